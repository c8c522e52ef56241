"""Row programs for the tests of csrc/: their tensors in watched buffers, and what each program must leave behind.

`expected` follows a program stage by stage over the NumPy model of the arithmetic (`tests.canonical`). It is asked
about kernels below the operators, so it takes the operands of a kernel and not the arguments of a function.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from flashnorm.program import (
    AddResidual,
    Affine,
    AffineBias,
    Bias,
    Cast,
    LoadRow,
    MeanVar,
    QuantBlocks,
    QuantTensor,
    Rms,
    Round,
    RowProgram,
    SaveRstd,
    rounding,
)
from tests.canonical.arithmetic import F32, fma, narrow, widen
from tests.canonical.norms import gather, layer, rms
from tests.canonical.quantise import Blocks, by_block, by_tensor

B, H, F = "bfloat16", "float16", "float32"
E4, E5, I8 = "float8_e4m3fn", "float8_e5m2", "int8"
EPS, SCALE, CAP, POOL = 1e-6, 0.0371, 1.7, 23
PADDING = 3  # rows of scales beyond the rows

BLOCK_128 = QuantBlocks(128, 1e-4, ratio=True, side=True)


def _dynamic(block: int, **options: Any) -> QuantBlocks:
    return QuantBlocks(block, 1e-10, **options)


# name: program, dtypes of its operands in order
PROGRAMS: dict[str, tuple[RowProgram, tuple[str, ...]]] = {
    "layernorm": (RowProgram(LoadRow(), MeanVar(), (AffineBias(),), Cast(), (SaveRstd(),)), (B, F, F, B, F)),
    "layernorm_f32": (RowProgram(LoadRow(), MeanVar(), (AffineBias(),), Cast(), (SaveRstd(),)), (F, B, H, F, F)),
    "layernorm_bare": (RowProgram(LoadRow(), MeanVar(), (), Cast()), (H, H)),
    "layernorm_bias": (RowProgram(LoadRow(), MeanVar(), (Bias(),), Cast()), (F, F, F)),
    "add_layernorm": (RowProgram(AddResidual(), MeanVar(), (AffineBias(),), Cast("x")), (B, F, F, B)),
    "add_layernorm_rounded": (RowProgram(AddResidual(True), MeanVar(), (Affine(),), Cast("x")), (H, H, B)),
    "rms_quant": (RowProgram(LoadRow(), Rms(), (Affine(),), QuantTensor(), (SaveRstd(),)), (B, B, E4, F)),
    "gemma_quant": (RowProgram(LoadRow(), Rms(), (Affine(offset=1.0),), QuantTensor(True)), (H, F, E5, B)),
    "add_quant": (RowProgram(AddResidual(), Rms(), (Affine(),), QuantTensor(True)), (B, B, B, E4, F)),
    "llama_quant": (RowProgram(LoadRow(), Rms(), (Affine(round_norm=True), Round()), QuantTensor(True)), (B, F, E4, H)),
    "layernorm_quant": (RowProgram(LoadRow(), MeanVar(), (AffineBias(), Round()), QuantTensor()), (B, F, F, E4)),
    "block_quant": (RowProgram(AddResidual(), Rms(), (Affine(), Round()), BLOCK_128), (B, B, B, E4, F, B)),
    "dynamic_128": (RowProgram(LoadRow(), Rms(), (Affine(), Round()), _dynamic(128)), (H, H, E5, F)),
    "dynamic_128_power": (RowProgram(LoadRow(), Rms(), (Round(),), _dynamic(128, ue8m0=True)), (F, I8, "uint8")),
    "dynamic_128_packed": (
        RowProgram(AddResidual(True), Rms(), (Affine(), Round()), _dynamic(128, ue8m0=True, packed=True, side=True)),
        (B, F, B, E4, "int32", B),
    ),
    "dynamic_row": (RowProgram(LoadRow(), Rms(), (Affine(), Round()), _dynamic(0)), (B, B, I8, F)),
    "dynamic_row_capped": (
        RowProgram(AddResidual(), Rms(), (Affine(round_norm=True), Round()), _dynamic(0, cap="value", side=True)),
        (H, B, F, E4, F, H),
    ),
    "dynamic_row_power": (
        RowProgram(LoadRow(), Rms(), (Affine(offset=1.0), Round()), _dynamic(0, ue8m0=True, cap="device")),
        (B, B, E5, "uint8", H),
    ),
    "indexed": (RowProgram(LoadRow(indexed=True), Rms(), (Affine(),), Cast(), (SaveRstd(),)), (B, "int32", B, B, F)),
    "indexed_quant": (RowProgram(LoadRow(indexed=True), Rms(), (Affine(),), QuantTensor()), (F, "int64", F, E5)),
    "int8": (RowProgram(LoadRow(scaled=True), Rms(), (Affine(),), Cast(), (SaveRstd(),)), (I8, F, B, B, F)),
    "int8_indexed": (
        RowProgram(LoadRow(True, True), Rms(), (Affine(1.0), Round()), QuantTensor(), (SaveRstd(),)),
        (I8, "int64", F, H, E4, F),
    ),
}


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, in a last dimension of their own."""
    return tensor.contiguous().view(-1).view(torch.uint8).view(*tensor.shape, tensor.element_size())


@dataclass
class Call:
    """The operands of one launch by name, in order, and the buffers that they lie in."""

    name: str
    program: RowProgram
    dtypes: tuple[str, ...]
    tensors: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    taken: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = {name: buffer.clone() for name, buffer in self.buffers.items()}
        self.taken = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def scalars(self) -> list[float]:
        known = {"eps": EPS, "scale_value": float(np.float32(SCALE)), "scale_ub_value": float(np.float32(CAP))}
        return [known[name] for name in self.program.scalars()]

    @cached_property
    def want(self) -> dict[str, torch.Tensor]:
        return expected(self)

    def check(self) -> None:
        """Every written operand holds what it must, and not a byte beside them has changed."""
        want = self.want
        for operand in self.program.operands():
            got = self.tensors[operand.name]
            if operand.written:
                assert_same(got, want[operand.name], f"{self.name}: {operand.name}")
            after = self.buffers[operand.name].clone()
            if operand.written:
                place = after.as_strided(got.shape, got.stride(), got.storage_offset())
                place.copy_(self.taken[operand.name])
            same = torch.equal(raw(after), raw(self.before[operand.name]))
            assert same, f"{self.name}: {operand.name}: something outside of its elements was written"

    def reset(self) -> None:
        """Puts everything back as it was before a launch."""
        for name, buffer in self.buffers.items():
            buffer.copy_(self.before[name])


def assert_same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal bits; a NaN in fp32, fp16 or bf16 may be any NaN."""
    got = got.cpu()
    assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape} {got.dtype}"
    differ = (raw(got) != raw(want)).any(-1)
    if got.dtype in (torch.float32, torch.float16, torch.bfloat16):
        differ &= ~(got.isnan() & want.isnan())
    if differ.any():
        at = tuple(int(i) for i in differ.nonzero()[0])
        raise AssertionError(f"{what}: {int(differ.sum())} of {differ.numel()} differ, first {at}: "
                             f"{raw(got)[at].tolist()} for {raw(want)[at].tolist()}")  # fmt: skip


# ------------------------------------------------------------------ operands
def rows_of(m: int, h: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Ordinary rows first, then the kinds that go wrong."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        x = torch.randint(-128, 128, (m, h), generator=generator, dtype=torch.int8)
        if m > 3:
            x[3] = 0
        return x
    x = torch.randn(m, h, generator=generator)
    tiny = {torch.float16: 1e-7, torch.bfloat16: 1e-39, torch.float32: 1e-39}[dtype]
    where = int(torch.randint(h, (1,), generator=generator))
    changes = [
        lambda r: r.zero_(),
        lambda r: r[where].fill_(float("nan")),
        lambda r: r[where].fill_(-float("inf")),
        lambda r: r.fill_(-0.0),
        lambda r: r.mul_(tiny),
        lambda r: r[where].fill_(3e4),
        lambda r: r.copy_(1000 + torch.arange(h) % 16 * 1e-3),
        lambda r: r.mul_(1e30),
        lambda r: r[: h // 2].zero_(),  # whole blocks of zeros
        lambda r: r[h // 2 :].fill_(-0.0),
        lambda r: r[: h // 2].mul_(1e-12),
        lambda r: r[h // 2].fill_(-float("nan")),
        lambda r: r.mul_(-1e25),
    ]
    for index, change in enumerate(changes):
        if 2 + index < m:
            change(x[2 + index])
    return x.to(dtype)


def _values(kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, bad: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if name == "row_index":
        index = torch.randint(POOL, shape, generator=generator)
        if bad:  # the only ones that a kernel itself must withstand
            index.view(-1)[:4] = torch.tensor([-1, POOL, 2**31 - 1, -(2**31)])[: index.numel()]
        return index.to(dtype)
    if name == "input_scale":
        scale = torch.rand(shape, generator=generator) * 0.1 + 1e-3
        special = torch.tensor([-0.05, float("inf"), float("nan"), 0.0, 1e30])
        scale.view(-1)[1 : 1 + min(5, scale.numel() - 1)] = special[: max(0, min(5, scale.numel() - 1))]
        return scale.to(dtype)
    if kind == "scalar":
        return torch.full(shape, SCALE if name == "scale" else CAP).to(dtype)
    lead = int(np.prod(shape[:-1]))
    return rows_of(lead, shape[-1], dtype, seed).view(shape)


def prepare(name: str, rows: tuple[int, ...], h: int, **layout: Any) -> Call:
    """A call of one of PROGRAMS; `layout` as `make` has it."""
    return make(name, *PROGRAMS[name], rows, h, **layout)


def make(
    name: str,
    program: RowProgram,
    dtypes: tuple[str, ...],
    rows: tuple[int, ...],
    h: int,
    *,
    pad: int = 0,
    start: int = 0,
    row_weight: bool = False,
    columns: bool = True,
    bad_index: bool = False,
    device: str = "cpu",
) -> Call:
    """A call of a program: rows `pad` elements apart, starting `start` elements into their buffers.

    Args:
        name: what error texts call it.
        program, dtypes: the program, and the dtypes of its operands in order.
        rows: the row grid, [M] or [A, B].
        h: elements of a row.
        row_weight: weights and biases are given for every row.
        columns: the scales of a block are neighbours in memory, not those of a row.
        bad_index: some indices are out of range.
        device: where the tensors are.
    """
    m = int(np.prod(rows))
    tensors, buffers = {}, {}
    for seed, (operand, dtype_name) in enumerate(zip(program.operands(), dtypes, strict=True)):
        dtype = torch_dtype(dtype_name)
        shape: tuple[int, ...]
        gap = 0
        if operand.kind in ("row", "pool") or operand.kind == "vec":
            lead = rows if operand.kind == "row" else (POOL,) if operand.kind == "pool" else rows if row_weight else ()
            shape, gap = (*lead, h), pad
        elif operand.kind == "blocks":
            store = program.store
            assert isinstance(store, QuantBlocks)
            count = 1 if store.block == 0 else -(-h // store.block)
            shape = (m + PADDING, -(-count // 4) if store.packed else count)
        else:
            shape = {"per_row": rows, "per_pool": (POOL,), "scalar": (1,)}[operand.kind]
        held = (*shape[:-1], shape[-1] + gap) if shape else shape
        size = int(np.prod(held))
        item = torch.empty(0, dtype=dtype).element_size()
        buffer = torch.full(((start + size + 16) * item,), 0xA5, dtype=torch.uint8).view(dtype)
        view = buffer[start : start + size].view(held)[..., : shape[-1]]
        if operand.kind == "blocks" and columns:
            view = buffer[start : start + size].view(shape[1], shape[0]).t()
        if operand.mode != "out":
            view.copy_(_values(operand.kind, operand.name, shape, dtype, 100 * h + seed, bad_index))
        on_device = buffer.to(device)
        buffers[operand.name] = on_device
        tensors[operand.name] = on_device.as_strided(view.shape, view.stride(), view.storage_offset())
    return Call(name, program, dtypes, tensors, buffers)


# ------------------------------------------------------------------ what a program means
def _loaded(program: RowProgram, given: dict[str, torch.Tensor]) -> tuple[F32, torch.Tensor | None]:
    """h, and the stored sum where there is one."""
    load = program.load
    if isinstance(load, AddResidual):
        h = widen(given["x"]) + widen(given["residual"])
        stored = narrow(h, given["residual"].dtype)
        return (widen(stored) if load.rounded else h), stored
    assert isinstance(load, LoadRow)
    if load.scaled:
        h = given["x"].cpu().numpy().astype(np.float32) * widen(given["input_scale"])[..., None]
    else:
        h = widen(given["x"])
    return (gather(h, given["row_index"]) if load.indexed else h), None


def _mapped(stage: Any, y: F32, given: dict[str, torch.Tensor], rounding_dtype: torch.dtype) -> F32:
    def rounded(v: F32) -> F32:
        return widen(narrow(v, rounding_dtype))

    if isinstance(stage, Round):
        return rounded(y)
    if isinstance(stage, Bias):
        return y + widen(given["bias"])
    weight = np.broadcast_to(widen(given["weight"]), y.shape)
    if isinstance(stage, AffineBias):
        return fma(y, weight, np.broadcast_to(widen(given["bias"]), y.shape))
    assert isinstance(stage, Affine)
    gain = weight + np.float32(stage.offset) if stage.offset else weight
    return (rounded(y) if stage.round_norm else y) * gain


def expected(call: Call) -> dict[str, torch.Tensor]:
    """What a launch must leave in each written operand."""
    program, given = call.program, {name: tensor.cpu() for name, tensor in call.taken.items()}
    rounding_dtype = torch_dtype(rounding(program, call.dtypes))
    with np.errstate(all="ignore"):
        h, stored = _loaded(program, given)
        y, rstd = (layer if isinstance(program.stats, MeanVar) else rms)(h, EPS)
        for stage in program.maps:
            y = _mapped(stage, y, given, rounding_dtype)
    want = {"rstd": torch.from_numpy(np.asarray(rstd, np.float32).copy())}
    if stored is not None:
        want["residual"] = stored
    store = program.store
    if isinstance(store, Cast):
        want[store.dst] = narrow(y, given[store.dst].dtype)
    elif isinstance(store, QuantTensor):
        scale = widen(given["scale"])[0] if store.on_device else np.float32(SCALE)
        want["out"] = by_tensor(y, scale, given["out"].dtype)
    else:
        assert isinstance(store, QuantBlocks)
        cap = {"": None, "value": CAP, "device": float(widen(given["scale_ub"])[0]) if "scale_ub" in given else None}
        how = Blocks(store.block, store.floor, store.ratio, store.ue8m0, store.packed, cap[store.cap])
        codes, scales = by_block(y, how, given["out"].dtype)
        want["out"] = codes
        want["scale"] = torch.cat([scales, torch.zeros(PADDING, scales.shape[1], dtype=scales.dtype)])
        if store.side:
            want["normed_out"] = narrow(y, given["normed_out"].dtype)
    return want
