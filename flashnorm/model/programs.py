"""Two readers of a program: its bits, and its formula."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from flashnorm.model import formats
from flashnorm.model.arithmetic import add, canonical_sum, div, fma, mul, sqrt, sub
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

Tensors = Mapping[str, Tensor]
_FLT_MAX = torch.finfo(torch.float32).max


# ------------------------------------------------------------------ bits
def canonical(program: RowProgram, given: Tensors, scalars: Mapping[str, float]) -> dict[str, Tensor]:
    """What a kernel of `program` must write, bit for bit.

    Args:
        program: of known stages.
        given: the operands by name, rows [M, H], on the CPU; those that are only written are not looked at,
            but for their dtype and the rows of scales.
        scalars: run-time values by name.

    Returns:
        Every written operand, in the dtype of the tensor given for it.

    Raises:
        NotImplementedError: for a stage this model does not know.
    """
    kind = _kind(program, given)
    h, written = _load(program, given)
    hidden, eps = h.shape[-1], _fp32(scalars["eps"], h)
    match program.stats:
        case Rms():
            centred, square = h, div(canonical_sum(h, h), hidden)
        case MeanVar():
            d = sub(h, div(canonical_sum(h), hidden).unsqueeze(-1))
            mean = div(canonical_sum(d), hidden)
            square = fma(-mean, mean, div(canonical_sum(d, d), hidden)).clamp(min=0)
            centred = sub(d, mean.unsqueeze(-1))
        case _:
            raise NotImplementedError(f"no model of {program.stats}")
    rstd = div(1.0, sqrt(add(square, eps)))
    y = mul(centred, rstd.unsqueeze(-1))
    for stage in program.maps:
        match stage:
            case Affine():
                gain = given["weight"].float()
                gain = add(gain, _fp32(stage.offset, gain)) if stage.offset else gain
                y = mul(y.to(kind).float() if stage.round_norm else y, gain)
            case AffineBias():
                y = fma(y, given["weight"].float(), given["bias"].float())
            case Bias():
                y = add(y, given["bias"].float())
            case Round():
                y = y.to(kind).float()
            case _:
                raise NotImplementedError(f"no model of {stage}")
    match program.store:
        case Cast():
            made = {program.store.dst: y.to(given[program.store.dst].dtype)}
        case QuantTensor():
            scale = _fp32(given["scale"] if program.store.on_device else scalars["scale_value"], y)
            made = {"out": formats.encode(mul(y, div(1.0, scale)), given["out"].dtype)}
        case QuantBlocks():
            made = _canonical_blocks(program.store, y, given, scalars)
        case _:
            raise NotImplementedError(f"no model of {program.store}")
    return {**written, **made, **_saved(program, rstd)}


def _canonical_blocks(stage: QuantBlocks, y: Tensor, given: Tensors, scalars: Mapping[str, float]) -> dict[str, Tensor]:
    dtype = given["out"].dtype
    largest = formats.LARGEST[dtype]
    blocks = _blocks(stage, y)
    found, a = _amax(stage, blocks, given, scalars)
    scale = div(a, largest)
    kept = scale
    if stage.ue8m0:
        byte = formats.exponent_bytes(scale)
        kept, scale = formats.pack(byte) if stage.packed else byte, formats.powers(byte)
    factor = div(largest, a) if stage.ratio else div(1.0, scale)
    values = torch.where(found.unsqueeze(-1) == 0, 0.0, mul(blocks, factor.unsqueeze(-1)))
    out = formats.encode(values, dtype).flatten(-2)[:, : y.shape[-1]]
    made = {"out": out, "scale": _padded(kept, given["scale"].shape[0])}
    return {**made, "normed_out": y.to(given["normed_out"].dtype)} if stage.side else made


# ------------------------------------------------------------------ formula
def exact(
    program: RowProgram, given: Tensors, scalars: Mapping[str, float], stored: Tensors | None = None
) -> dict[str, Tensor]:
    """The formula in fp64, from h as rounded to fp32, rounded only where the program's mode says so.

    Arguments and errors are those of `canonical`, on any device. The fp64 values are not rounded to the
    operands' dtypes: what codes stand for comes as y / scale, and exponents packed in an int32 one by one.

    Args:
        program, given, scalars: see `canonical`.
        stored: what a kernel wrote. Codes are judged with the scale that stands beside them, so that it is taken
            from here.
    """
    kind = _kind(program, given)
    h32, written = _load(program, given)
    h, eps = h32.double(), _fp32(scalars["eps"], h32).double()
    match program.stats:
        case Rms():
            centred = h
        case MeanVar():
            centred = h - h.mean(-1, keepdim=True)
        case _:
            raise NotImplementedError(f"no formula for {program.stats}")
    rstd = (centred.square().mean(-1) + eps).rsqrt()
    y = centred * rstd.unsqueeze(-1)
    for stage in program.maps:
        match stage:
            case Affine():
                y = (y.to(kind).double() if stage.round_norm else y) * (given["weight"].double() + stage.offset)
            case AffineBias():
                y = y * given["weight"].double() + given["bias"].double()
            case Bias():
                y = y + given["bias"].double()
            case Round():
                y = y.to(kind).double()
            case _:
                raise NotImplementedError(f"no formula for {stage}")
    match program.store:
        case Cast():
            made = {program.store.dst: y}
        case QuantTensor():
            made = {"out": y / _fp32(given["scale"] if program.store.on_device else scalars["scale_value"], y).double()}
        case QuantBlocks():
            made = _exact_blocks(program.store, y, given, scalars, stored)
        case _:
            raise NotImplementedError(f"no formula for {program.store}")
    return {name: t.double() for name, t in {**written, **made, **_saved(program, rstd)}.items()}


def _exact_blocks(
    stage: QuantBlocks, y: Tensor, given: Tensors, scalars: Mapping[str, float], stored: Tensors | None
) -> dict[str, Tensor]:
    blocks = _blocks(stage, y)
    found, a = _amax(stage, blocks, given, scalars)
    kept = scale = a / formats.LARGEST[given["out"].dtype]
    if stage.ue8m0:
        kept = formats.exponent_bytes(scale.float())
        scale = formats.powers(kept).double()
        kept = F.pad(kept, (0, -kept.shape[-1] % 4)) if stage.packed else kept
    if stored is not None:
        beside = stored["scale"][: y.shape[0]]
        if stage.ue8m0:
            byte = formats.unpack(beside)[:, : scale.shape[-1]] if stage.packed else beside
            scale = formats.powers(byte).double()
        else:
            scale = beside.double()
    out = torch.where(found.unsqueeze(-1) == 0, 0.0, blocks / scale.unsqueeze(-1)).flatten(-2)[:, : y.shape[-1]]
    made = {"out": out, "scale": _padded(kept, given["scale"].shape[0])}
    return {**made, "normed_out": y} if stage.side else made


# ------------------------------------------------------------------ what both readers share: no arithmetic to speak of
def _kind(program: RowProgram, given: Tensors) -> torch.dtype:
    """T: what "rounded" means."""
    dtypes = tuple(str(given[operand.name].dtype).removeprefix("torch.") for operand in program.operands())
    kind: torch.dtype = getattr(torch, rounding(program, dtypes))
    return kind


def _fp32(value: Tensor | float, like: Tensor) -> Tensor:
    """A run-time number, as the fp32 number that kernels get."""
    if isinstance(value, Tensor):
        return value.float().reshape(())
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _load(program: RowProgram, given: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
    """(h in fp32, what loading writes). One fp32 operation is the formula and the model alike."""
    stage, x = program.load, given["x"].float()
    match stage:
        case LoadRow():
            h = mul(x, given["input_scale"].reshape(-1, 1)) if stage.scaled else x
            return (_gathered(h, given["row_index"].long()) if stage.indexed else h), {}
        case AddResidual():
            h = add(x, given["residual"].float())
            kept = h.to(given[stage.dst].dtype)
            return (kept.float() if stage.rounded else h), {stage.dst: kept}
        case _:
            raise NotImplementedError(f"no formula for {stage}")


def _gathered(pool: Tensor, index: Tensor) -> Tensor:
    """Rows of the pool, and of NaN where an index is outside of it."""
    rows = F.pad(pool, (0, 0, 0, 1), value=torch.nan)
    return rows[torch.where((index < 0) | (index >= pool.shape[0]), pool.shape[0], index)]


def _blocks(stage: QuantBlocks, y: Tensor) -> Tensor:
    """[M, H] to [M, B, block]; a last block that is shorter is filled with zeros."""
    block = stage.block or y.shape[-1]
    return F.pad(y, (0, -y.shape[-1] % block)).unflatten(-1, (-1, block))


def _amax(stage: QuantBlocks, blocks: Tensor, given: Tensors, scalars: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """(the largest magnitude of each block; the same within the stage's limits). NaN stays NaN."""
    found = blocks.abs().amax(-1)
    a = torch.where(found == torch.inf, _FLT_MAX, found)
    floor = _fp32(stage.floor, a).to(a.dtype)
    a = torch.where(a < floor, floor, a)
    if stage.cap:
        cap = _fp32(given["scale_ub"] if stage.cap == "device" else scalars["scale_ub_value"], a).to(a.dtype)
        a = torch.where((a > cap) | (cap.isnan() & ~a.isnan()), cap, a)
    return found, a


def _padded(scales: Tensor, rows: int) -> Tensor:
    return F.pad(scales, (0, 0, 0, rows - scales.shape[0]))


def _saved(program: RowProgram, rstd: Tensor) -> dict[str, Tensor]:
    for stage in program.saves:
        if not isinstance(stage, SaveRstd):
            raise NotImplementedError(f"no formula for {stage}")
    return {"rstd": rstd} if program.saves else {}
