"""Who is measured at what: one declaration an operator.

`BENCHES` maps an operator to its contenders, each a function from one buffer set to a callable without
arguments. Buffers carry the names of the operator's operands, taken from its declaration in
`flashnorm.core.op.OPS`, and so do the bytes that must move: an operator is added here by one entry.

Peers are imported when they are bound, so that one which is missing or broken fails alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import flashnorm
from flashnorm.backends import builder
from flashnorm.core.op import OPS
from flashnorm.jit.arch import device_arch
from flashnorm.program import Operand, RowProgram, Variant

from .measure import Call
from .roofline import operand_bytes, operand_shape

EPS = 1e-6
Buffers = Any  # a SimpleNamespace of tensors by operand name; Any so that attributes type-check
Bind = Callable[[Buffers], Call]


@dataclass(frozen=True)
class Contender:
    """One competitor: `bind(buffers)` gives the call to time, which runs inside `context()`."""

    name: str
    kind: Literal["ours", "peer", "ceiling"]
    bind: Bind
    context: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


@dataclass(frozen=True)
class Bench:
    """An operator's contenders.

    Attributes:
        ours: binds the public function.
        peers: binds each peer, by the name it is reported under.
        cpu: the peers that also run on CPU tensors.
    """

    ours: Bind
    peers: dict[str, Bind]
    cpu: tuple[str, ...] = ("torch", "torch.compile")


# ------------------------------------------------------------------ what eager PyTorch does, also compiled
def _torch_rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _torch_fused_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, weight.shape, weight, EPS), h


@functools.cache
def _compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, dynamic=False)


# ------------------------------------------------------------------ peers
def _flashinfer() -> Any:
    """FlashInfer's norms; its CuTe kernels only if it really has them, since it falls back silently."""
    norm = importlib.import_module("flashinfer.norm")
    if norm._USE_CUDA_NORM:
        raise RuntimeError("flashinfer.norm could not import its CuTe kernels and would run its CUDA ones")
    return norm


@functools.cache
def _flashinfer_cuda_build() -> Future[Any]:
    # Imported here, not in the thread: its imports and those of the main thread share modules.
    norm = importlib.import_module("flashinfer.norm")
    return ThreadPoolExecutor(1).submit(norm.get_norm_module)


def _flashinfer_cuda() -> Any:
    """FlashInfer's CUDA module, built on first use; its entry points are bare TVM-FFI functions."""
    return _flashinfer_cuda_build().result()


def _quack() -> Any:
    return importlib.import_module("quack")


def _liger(module: str, function: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply


_LIGER_MODE = (0.0, "llama", False)  # offset, casting mode, in place

BENCHES: dict[str, Bench] = {
    "rmsnorm": Bench(
        ours=lambda t: partial(flashnorm.rmsnorm, t.x, t.weight, EPS, t.out),
        peers={
            "torch": lambda t: partial(_torch_rmsnorm, t.x, t.weight),
            "torch.compile": lambda t: partial(_compiled(_torch_rmsnorm), t.x, t.weight),
            "flashinfer cute": lambda t: partial(_flashinfer().rmsnorm, t.x, t.weight, EPS, t.out, True),
            "flashinfer cuda": lambda t: partial(_flashinfer_cuda().rmsnorm, t.out, t.x, t.weight, EPS, True),
            "quack": lambda t: partial(_quack().rmsnorm, t.x, t.weight, eps=EPS),
            "liger": lambda t: partial(_liger("rms_norm", "LigerRMSNormFunction"), t.x, t.weight, EPS, *_LIGER_MODE),
        },
    ),
    "fused_add_rmsnorm": Bench(
        ours=lambda t: partial(flashnorm.fused_add_rmsnorm, t.x, t.residual, t.weight, EPS),
        peers={
            "torch": lambda t: partial(_torch_fused_add, t.x, t.residual, t.weight),
            "torch.compile": lambda t: partial(_compiled(_torch_fused_add), t.x, t.residual, t.weight),
            "flashinfer cute": lambda t: partial(
                _flashinfer().fused_add_rmsnorm, t.x, t.residual, t.weight, EPS, True
            ),
            "flashinfer cuda": lambda t: partial(
                _flashinfer_cuda().fused_add_rmsnorm, t.x, t.residual, t.weight, EPS, True
            ),
            "quack": lambda t: partial(
                _quack().rmsnorm, t.x, t.weight, residual=t.residual, eps=EPS, prenorm=True
            ),
            "liger": lambda t: partial(
                _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"),
                t.x, t.residual, t.weight, EPS, *_LIGER_MODE,
            ),
        },
    ),
}  # fmt: skip


def prebuild(names: Iterable[str]) -> None:
    """Starts building what a peer builds for a minute, in the background; the first bind waits for it."""
    if "flashinfer cuda" in names:
        with contextlib.suppress(Exception):  # said where it is bound
            _flashinfer_cuda_build()


# ------------------------------------------------------------------ contenders and buffers of one operator
def operands(op: str) -> tuple[Operand, ...]:
    """The operator's operands in its default form: without the outputs that are made on request only."""
    return program(op).operands()


def program(op: str) -> RowProgram:
    declared = OPS[op]
    names = frozenset(o.name for o in declared.operands if o.mode != "out" or o.name not in declared.optional)
    return declared.program(names, {key: next(iter(values.values())) for key, values in declared.options.items()})


def contenders(op: str, routes: Iterable[str], peers: Iterable[str], device: str) -> list[Contender]:
    """The ceiling, our routes that serve this kind of device, then the peers asked for."""
    bench = BENCHES[op]
    found = [Contender("mul", "ceiling", partial(_mul, op))]
    for route in routes:
        if route == "torch" or (route == "cpu") == (device == "cpu"):
            found.append(Contender(f"flashnorm {route}", "ours", bench.ours, partial(flashnorm.backend, route)))
    for name, bind in bench.peers.items():
        if name in peers and (device != "cpu" or name in bench.cpu):
            found.append(Contender(name, "peer", bind))
    return found


def _mul(op: str, t: Buffers) -> Call:
    """`torch.mul` from one row buffer of the operator to another: as fast as memory goes."""
    rows = [getattr(t, operand.name) for operand in operands(op) if operand.kind == "row"]
    return partial(torch.mul, rows[0], 2, out=rows[-1])


def bare(op: str, route: str) -> Bind:
    """Binds the kernel itself, without any of flashnorm's Python: what a call costs at least."""
    own = program(op)

    def bind(t: Buffers) -> Call:
        tensors = [getattr(t, operand.name) for operand in own.operands()]
        dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        device = t.x.device
        target = "host" if device.type == "cpu" else device_arch(*torch.cuda.get_device_capability(device)).name
        launch = builder(route)(Variant(own, dtypes, t.x.shape[-1]), target)
        return partial(launch, *(EPS for _ in own.scalars()), t.x.is_cuda, *tensors)

    return bind


def set_bytes(op: str, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
    return sum(operand_bytes(operand, num_tokens, hidden_size, dtype) for operand in operands(op))


def make_sets(
    op: str, count: int, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> list[Buffers]:
    """`count` buffer sets. Everything rotates, the weights too: in a model every layer has its own."""
    generator = torch.Generator(device).manual_seed(7)
    stacks = {}
    for operand in operands(op):
        shape = (count, *operand_shape(operand, num_tokens, hidden_size))
        kind = getattr(torch, operand.dtype) if operand.dtype else dtype
        stack = torch.empty(shape, dtype=kind, device=device)
        if operand.mode == "out":
            stack.fill_(float("nan"))
        elif operand.kind == "vec":
            stack.uniform_(0.5, 1.5, generator=generator)
        else:
            stack.normal_(generator=generator)
        stacks[operand.name] = stack
    return [SimpleNamespace(**{name: stack[k] for name, stack in stacks.items()}) for k in range(count)]


def result_of(op: str, t: Buffers, returned: object) -> Tensor:
    """The normalised rows of a call: what it returned (its first tensor), else the first buffer it wrote."""
    if isinstance(returned, (tuple, list)) and returned:
        returned = returned[0]
    if isinstance(returned, Tensor):
        return returned
    names = [operand.name for operand in operands(op) if operand.written]
    return getattr(t, "out" if "out" in names else names[0])
