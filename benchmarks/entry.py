"""What one line of the benchmark is: an operator in one form, its buffers, its contenders and its bars.

Everything about buffers follows from the operands of the operator's program, as `flashnorm.core.op.OPS` declares
it: names, shapes, dtypes, and the bytes that must move.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

import flashnorm
from flashnorm.backends import builder
from flashnorm.core.op import ALL, Op
from flashnorm.jit.arch import device_arch
from flashnorm.model import exact
from flashnorm.program import (
    SCALES,
    BlockScales,
    Cast,
    Operand,
    QuantBlocks,
    QuantNvfp4,
    QuantTensor,
    Round,
    RowProgram,
    Variant,
)
from flashnorm.scales import dequantize

from .bars import Bars
from .measure import Call
from .rivals import EPS, SCALE, compiled
from .roofline import Buffer, bytes_moved

Shape = tuple[int, int]
Buffers = Any  # a SimpleNamespace of tensors by operand name; Any so that attributes type-check
Bind = Callable[[Buffers], Call]

# Whatever a program takes at run time, by name.
SCALARS = {
    "eps": EPS,
    "scale_value": SCALE,
    "global_scale_value": 1.0,
    "scale_ub_value": torch.finfo(torch.float32).max,
    "input_factor_value": 1.0,
    "center": 1.0,
    "next_eps": 1e-5,
    "next_center": 1.0,
}
# A result further than this from the fp64 formula is not the operator: rounding alone is 1.7e-3 in bf16 (2.5e-3 for
# peers that round twice), 2.6e-2 in e4m3, twice that in e5m2, 0.1 to 0.13 in e2m1 (bytes of two codes).
_WRONG = {torch.float8_e4m3fn: 5e-2, torch.float8_e5m2: 1e-1, torch.uint8: 2e-1}
_WRONG_AT_ALL = 2e-2


@dataclass(frozen=True)
class Contender:
    """One competitor: `bind(buffers)` gives the call to time, which runs inside `context()`."""

    name: str
    kind: Literal["ours", "peer", "ceiling"]
    bind: Bind
    context: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

    @property
    def built_aside(self) -> bool:
        """Whether its kernels are built in the background, before anything is measured (see `prepare.py`)."""
        return self.kind == "ours" or self.name == "flashinfer cuda"


@dataclass(frozen=True)
class Bench:
    """An operator in one form, and its contenders.

    Attributes:
        op: the public operator.
        ours: binds the public function, with every output given.
        peers: binds each peer, by the name it is reported under.
        form: tells two benches of one operator apart.
        options: compile-time choices that are not the operator's first.
        dtypes: of operands that do not have the run's.
        column: a scale a block lies column-major, its rows padded to a multiple of 4.
        shapes: that are measured on a GPU where none are asked for.
        cpu: the peers that also run on CPU tensors.
        bars: what the figures are held to.
        behind: the operator that serves this form, where it is another one.
    """

    op: str
    ours: Bind
    peers: Mapping[str, Bind]
    form: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    column: bool = False
    shapes: Sequence[Shape] = ()
    cpu: Sequence[str] = ("torch", "torch.compile")
    bars: Bars = field(default_factory=Bars)
    behind: str = ""

    @property
    def name(self) -> str:
        return f"{self.op}/{self.form}" if self.form else self.op

    @property
    def declared(self) -> Op:
        return ALL[self.behind or self.op]

    @property
    def routes(self) -> tuple[str, ...]:
        return self.declared.routes

    def program(self) -> RowProgram:
        """The operator with its weight and bias, and of its other operands only those that a call cannot leave out."""
        declared = self.declared
        names = (o.name for o in declared.operands if o.name not in declared.optional or o.name in ("weight", "bias"))
        options = {key: next(iter(values.values())) for key, values in declared.options.items()}
        return declared.program(frozenset(names), {**options, **self.options})

    def variant(self, hidden_size: int, dtype: torch.dtype) -> Variant:
        """The kernel of a call on this bench's buffers."""
        program = self.program()
        dtypes = tuple(
            operand.carried(str(b.dtype).removeprefix("torch."))
            for operand, b in zip(program.operands(), self.buffers(1, hidden_size, dtype), strict=True)
        )
        return Variant(program, dtypes, hidden_size)

    # -------------------------------------------------------------- contenders
    def contenders(self, routes: Iterable[str], peers: Iterable[str], device: str) -> list[Contender]:
        """The ceiling, our routes that serve this kind of device, then the peers asked for."""
        found = [Contender("mul", "ceiling", _mul)]
        for route in routes:
            if route in self.routes and (route == "torch" or (route == "cpu") == (device == "cpu")):
                found.append(Contender(f"flashnorm {route}", "ours", self.ours, partial(flashnorm.backend, route)))
        for name, bind in self.peers.items():
            if name in peers and (device != "cpu" or name in self.cpu):
                found.append(Contender(name, "peer", bind))
        return found

    def bare(self, route: str) -> Bind:
        """Binds the kernel itself, without any of flashnorm's Python: what a call costs at least."""
        own = self.program()

        def bind(t: Buffers) -> Call:
            capability = torch.cuda.get_device_capability(t.x.device) if t.x.is_cuda else None
            target = "host" if capability is None else device_arch(*capability).name
            launch = builder(route)(self.variant(t.x.shape[-1], t.x.dtype), target)
            operands = (getattr(t, operand.name) for operand in own.operands())
            return partial(launch, *(SCALARS[name] for name in own.scalars()), t.x.is_cuda, *operands)

        return bind

    # -------------------------------------------------------------- buffers
    def buffers(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> list[Buffer]:
        """One for each operand of the program."""
        program = self.program()

        def buffer(operand: Operand) -> Buffer:
            shape: tuple[int, ...] = {
                "row": (num_tokens, hidden_size),
                "pairs": (num_tokens, hidden_size // 2),
                "vec": (hidden_size,),
                "per_row": (num_tokens,),
                "scalar": (1,),
            }.get(operand.kind, ())
            if operand.kind in SCALES:
                store = program.store
                assert isinstance(store, BlockScales)
                rows = -(-num_tokens // 4) * 4 if self.column else num_tokens
                shape = (rows, store.columns(hidden_size))
            name = str(dtype).removeprefix("torch.")
            if operand.name in self.dtypes:
                name = self.dtypes[operand.name]
            elif name not in operand.dtypes:
                name = operand.dtypes[0]
            return Buffer(operand.name, shape, getattr(torch, name), operand.mode, operand.kind)

        return [buffer(operand) for operand in program.operands()]

    def bytes_moved(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
        return bytes_moved(self.buffers(num_tokens, hidden_size, dtype))

    def set_bytes(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
        return sum(buffer.bytes for buffer in self.buffers(num_tokens, hidden_size, dtype))

    def make_sets(
        self, count: int, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> list[Buffers]:
        """`count` buffer sets. Everything rotates, the weights too: in a model every layer has its own.

        Beside the operands a set holds `divisor`, the static scale for those who want it on the device.
        """
        generator = torch.Generator(device).manual_seed(7)
        stacks = {"divisor": torch.full((count, 1), SCALE, device=device)}
        for buffer in self.buffers(num_tokens, hidden_size, dtype):
            transposed = self.column and buffer.kind == "blocks"
            shape = buffer.shape[::-1] if transposed else buffer.shape
            stack = torch.empty((count, *shape), dtype=buffer.dtype, device=device)
            if buffer.mode == "out":
                stack.view(torch.uint8).fill_(0xFF)  # NaN in every float
            elif buffer.kind == "vec":
                stack.uniform_(0.5, 1.5, generator=generator)
            else:
                stack.normal_(generator=generator)
            stacks[buffer.name] = stack.mT if transposed else stack
        return [SimpleNamespace(**{name: stack[k] for name, stack in stacks.items()}) for k in range(count)]

    # -------------------------------------------------------------- results
    def result(self, t: Buffers, returned: object) -> Tensor:
        """The rows that a call made: what it returned (its first tensor), else the first buffer it wrote."""
        if isinstance(returned, (tuple, list)) and returned:
            returned = returned[0]
        if isinstance(returned, Tensor):
            return returned
        names = [operand.name for operand in self.program().operands() if operand.written]
        return getattr(t, "out" if "out" in names else names[0])

    def values(self, t: Buffers, returned: object, rows: Sequence[int]) -> Tensor:
        """What some rows of a result stand for, in fp64: codes are multiplied with their scale."""
        store, result, pick = self.program().store, self.result(t, returned), list(rows)
        if isinstance(store, QuantTensor):
            return result[pick].double() * SCALE
        if not isinstance(store, BlockScales):
            return result[pick].double()
        # Second in the tuple of whoever returns one.
        scale = returned[1] if isinstance(returned, (tuple, list)) else t.scale
        if isinstance(store, QuantBlocks) and not store.ue8m0:
            values, beside = result[pick].double(), torch.stack([scale[row].double() for row in rows])
            return values * beside.repeat_interleave(store.block or values.shape[-1], -1)[:, : values.shape[-1]]
        if result.element_size() > 1:  # no codes at all: judged by its distance
            return result[pick].double()
        kind = torch.float8_e4m3fn if isinstance(store, QuantNvfp4) else torch.uint8
        beside = scale[pick].view(kind)
        return dequantize(result[pick], beside, block_size=store.block, dtype=torch.float64)

    def expected(self, t: Buffers, rows: Sequence[int]) -> Tensor:
        """What some rows should stand for, by the formula in fp64; to be asked before a call that writes in place."""
        program = self.program()
        maps = tuple(stage for stage in program.maps if not isinstance(stage, Round))
        plain = replace(program, maps=maps, store=Cast(), saves=())
        given = {}
        for operand in plain.operands():
            if operand.mode == "in" or operand.name == "residual":
                tensor = getattr(t, operand.name)
                given[operand.name] = tensor[list(rows)] if operand.kind == "row" else tensor
        given["out"] = torch.empty_like(given["x"])
        return exact(plain, given, {"eps": EPS})["out"].double()

    def reason_wrong(self, t: Buffers, returned: object, distance: float) -> str | None:
        """Why a result that far from the formula is no result of this operator, or None."""
        if distance <= _WRONG.get(self.result(t, returned).dtype, _WRONG_AT_ALL):
            return None
        return f"wrong result: relative L2 error {distance:.1e}"


def over_buffers(formula: Callable[..., object], *names: str) -> dict[str, Bind]:
    """The peers of a formula over the buffers of these names, eager and compiled."""

    def eager(t: Buffers) -> Call:
        return partial(formula, *(getattr(t, name) for name in names))

    def compile_it(t: Buffers) -> Call:
        return partial(compiled(formula, t.x.shape), *(getattr(t, name) for name in names))

    return {"torch": eager, "torch.compile": compile_it}


def _mul(t: Buffers) -> Call:
    """`torch.mul` from one row buffer to another of the same dtype: as fast as memory goes."""
    rows = [v for v in vars(t).values() if v.shape == t.x.shape and v.dtype == t.x.dtype]
    return partial(torch.mul, t.x, 2, out=rows[-1] if len(rows) > 1 else torch.empty_like(t.x))
