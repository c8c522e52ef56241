"""Two readers of a program: its bits, and its formula."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from flashnorm.model import formats, gates, stores
from flashnorm.model.arithmetic import activation, add, canonical_sum, div, fma, mul, silu, sqrt, sub
from flashnorm.model.stores import fp32
from flashnorm.program import (
    AddResidual,
    Affine,
    AffineBias,
    Bias,
    Cast,
    Gate,
    GateResidual,
    LoadGained,
    LoadGated,
    LoadRow,
    MeanVar,
    MixResidual,
    NextNorm,
    QuantBlocks,
    QuantNvfp4,
    QuantTensor,
    Rms,
    Round,
    RowProgram,
    SaveMeans,
    SaveRstd,
    ScaleShift,
    Silu,
    rounding,
)

Tensors = Mapping[str, Tensor]


# ------------------------------------------------------------------ bits
def canonical(program: RowProgram, given: Tensors, scalars: Mapping[str, float]) -> dict[str, Tensor]:
    """What a kernel of `program` must write, bit for bit.

    Args:
        program: of known stages.
        given: the operands by name, rows [M, H], pairs [M, H / 2], scales [M', B], also swizzled ones; on the CPU;
            those that are only written are not looked at, but for their dtype and the rows of scales.
        scalars: run-time values by name.

    Returns:
        Every written operand, in the dtype of the tensor given for it.

    Raises:
        NotImplementedError: for a stage this model does not know.
    """
    kind = _kind(program, given)
    h, written = _load(program, given, scalars)
    hidden, eps = h.shape[-1], fp32(scalars["eps"], h)
    match program.stats:
        case Rms():
            means: tuple[Tensor, ...] = ()
            centred, square = h, div(canonical_sum(h, h), hidden)
        case MeanVar():
            first = div(canonical_sum(h), hidden)
            d = sub(h, first.unsqueeze(-1))
            mean = div(canonical_sum(d), hidden)
            means = first, mean
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
                gain = add(gain, fp32(stage.offset, gain)) if stage.offset else gain
                y = mul(y.to(kind).float() if stage.round_norm else y, gain)
            case AffineBias():
                y = fma(y, given["weight"].float(), given["bias"].float())
            case Bias():
                y = add(y, given["bias"].float())
            case Round():
                y = y.to(kind).float()
            case Silu():
                y = silu(y)
            case Gate():
                y = mul(y, activation(given["gate"].float(), stage.activation))
            case ScaleShift():
                y = gates.canonical_scale_shift(stage, y, given)
            case MixResidual():
                y = gates.canonical_mix(stage, y, given, scalars)
            case _:
                raise NotImplementedError(f"no model of {stage}")
    match program.store:
        case Cast():
            made = {program.store.dst: y.to(given[program.store.dst].dtype)}
        case QuantTensor():
            scale = fp32(given["scale"] if program.store.on_device else scalars["scale_value"], y)
            made = {"out": formats.encode(mul(y, div(1.0, scale)), given["out"].dtype)}
        case QuantBlocks():
            made = stores.canonical_blocks(program.store, y, given, scalars)
        case QuantNvfp4():
            made = stores.canonical_nvfp4(program.store, y, given, scalars)
        case NextNorm():
            made = gates.canonical_next(y, given, scalars)
        case _:
            raise NotImplementedError(f"no model of {program.store}")
    return {**written, **made, **_saved(program, rstd, means)}


# ------------------------------------------------------------------ formula
def exact(
    program: RowProgram, given: Tensors, scalars: Mapping[str, float], stored: Tensors | None = None
) -> dict[str, Tensor]:
    """The formula in fp64, from h as rounded to fp32, rounded only where the program's mode says so.

    Arguments and errors are those of `canonical`, on any device. The fp64 values are not rounded to the
    operands' dtypes: what codes stand for comes as y / scale, for pairs too [M, H], and exponents packed in an int32
    one by one. Scales lie where they lie in the operand, tiles included.

    Args:
        program, given, scalars: see `canonical`.
        stored: what a kernel wrote. Codes are judged with the scale that stands beside them, and a second norm with
            the sum it was of, so that they are taken from here.
    """
    kind = _kind(program, given)
    h32, written = _load(program, given, scalars)
    h, eps = h32.double(), fp32(scalars["eps"], h32).double()
    if isinstance(program.load, LoadGated):  # the exponential has an error of its own
        h = given["x"].double() * gates.exact_activation(given["gate"], program.load.activation)
    match program.stats:
        case Rms():
            means: tuple[Tensor, ...] = ()
            centred = h
        case MeanVar():
            means = h.mean(-1), torch.zeros_like(h[..., 0])
            centred = h - means[0].unsqueeze(-1)
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
            case Silu():
                y = gates.exact_activation(y, "silu")
            case Gate():
                y = y * gates.exact_activation(given["gate"], stage.activation)
            case ScaleShift():
                y = gates.exact_scale_shift(stage, y, given)
            case MixResidual():
                y = gates.exact_mix(stage, y, given, scalars)
            case _:
                raise NotImplementedError(f"no formula for {stage}")
    match program.store:
        case Cast():
            made = {program.store.dst: y}
        case QuantTensor():
            made = {"out": y / fp32(given["scale"] if program.store.on_device else scalars["scale_value"], y).double()}
        case QuantBlocks():
            made = stores.exact_blocks(program.store, y, given, scalars, stored)
        case QuantNvfp4():
            made = stores.exact_nvfp4(program.store, y, given, scalars, stored)
        case NextNorm():
            made = gates.exact_next(y, given, scalars, stored)
        case _:
            raise NotImplementedError(f"no formula for {program.store}")
    return {name: t.double() for name, t in {**written, **made, **_saved(program, rstd, means)}.items()}


# ------------------------------------------------------------------ what both readers share: no arithmetic to speak of
def _kind(program: RowProgram, given: Tensors) -> torch.dtype:
    """T: what "rounded" means."""
    dtypes = tuple(str(given[operand.name].dtype).removeprefix("torch.") for operand in program.operands())
    kind: torch.dtype = getattr(torch, rounding(program, dtypes))
    return kind


def _load(program: RowProgram, given: Tensors, scalars: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
    """(h in fp32, what loading writes). h is rounded to fp32 in the formula as in the model."""
    stage, x = program.load, given["x"].float()
    match stage:
        case LoadRow():
            h = mul(x, given["input_scale"].reshape(-1, 1)) if stage.scaled else x
            return (_gathered(h, given["row_index"].long()) if stage.indexed else h), {}
        case AddResidual():
            h = add(x, given["residual"].float())
            kept = h.to(given[stage.dst].dtype)
            return (kept.float() if stage.rounded else h), {stage.dst: kept}
        case GateResidual():
            h = gates.gated_residual(stage, given, scalars)
            kept = h.to(given["residual_out"].dtype)
            return (kept.float() if stage.rounded else h), {"residual_out": kept}
        case LoadGained():
            return mul(x, add(given["gain"].float(), fp32(scalars["center"], x))), {}
        case LoadGated():
            return mul(x, activation(given["gate"].float(), stage.activation)), {}
        case _:
            raise NotImplementedError(f"no formula for {stage}")


def _gathered(pool: Tensor, index: Tensor) -> Tensor:
    """Rows of the pool, and of NaN where an index is outside of it."""
    rows = F.pad(pool, (0, 0, 0, 1), value=torch.nan)
    return rows[torch.where((index < 0) | (index >= pool.shape[0]), pool.shape[0], index)]


def _saved(program: RowProgram, rstd: Tensor, means: tuple[Tensor, ...]) -> dict[str, Tensor]:
    found = {}
    for stage in program.saves:
        match stage:
            case SaveRstd():
                found["rstd"] = rstd
            case SaveMeans():
                found |= dict(zip(("mean", "rest"), means, strict=True))
            case _:
                raise NotImplementedError(f"no formula for {stage}")
    return found
