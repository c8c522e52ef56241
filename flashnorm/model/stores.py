"""The stores that find scales: their bits, and their formulas."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from flashnorm.model import formats
from flashnorm.model.arithmetic import div, mul
from flashnorm.program import BlockScales, QuantBlocks, QuantNvfp4

Tensors = Mapping[str, Tensor]
Numbers = Mapping[str, float]
_FLT_MAX = torch.finfo(torch.float32).max


# ------------------------------------------------------------------ bits
def canonical_blocks(stage: QuantBlocks, y: Tensor, given: Tensors, scalars: Numbers) -> dict[str, Tensor]:
    dtype = formats.E2M1 if stage.fp4 else given["out"].dtype
    largest = formats.LARGEST[dtype]
    blocks = _blocks(stage, y)
    found, a = _limited(stage, blocks, given, scalars)
    scale = div(a, largest)
    kept = scale
    if stage.ue8m0:
        byte = formats.floor_bytes(a, dtype) if stage.ocp else formats.exponent_bytes(scale)
        kept, scale = formats.pack(byte) if stage.packed else byte, formats.powers(byte)
    factor = div(largest, a) if stage.ratio else div(1.0, scale)
    values = torch.where(found.unsqueeze(-1) == 0, 0.0, mul(blocks, factor.unsqueeze(-1)))
    out = formats.encode(values.flatten(-2)[:, : y.shape[-1]], dtype)
    return _made(stage, y, given, out, kept)


def canonical_nvfp4(stage: QuantNvfp4, y: Tensor, given: Tensors, scalars: Numbers) -> dict[str, Tensor]:
    blocks, gain = _blocks(stage, y), _global_scale(stage, y, given, scalars)
    found = blocks.abs().amax(-1)
    scale = div(_finite(found), 6.0)
    if gain is not None:
        scale, blocks = mul(gain, scale), mul(blocks, gain)
    kept = formats.encode(torch.where(scale > 448, 448.0, scale), formats.E4M3)
    value = kept.float()
    nothing = (found == 0) | (value == 0)
    codes = torch.where(nothing.unsqueeze(-1), 0.0, div(blocks, value.unsqueeze(-1)))
    return _made(stage, y, given, formats.encode(codes.flatten(-2), formats.E2M1), kept)


def _made(stage: QuantBlocks | QuantNvfp4, y: Tensor, given: Tensors, out: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Every operand of such a store, in the dtypes of the tensors given."""
    made = {"out": out.view(given["out"].dtype)}
    for name, scales in _laid_out(stage, kept.view(torch.uint8) if kept.element_size() == 1 else kept, given).items():
        made[name] = scales.view(given[name].dtype)
    return {**made, "normed_out": y.to(given["normed_out"].dtype)} if stage.side else made


# ------------------------------------------------------------------ formula
def exact_blocks(
    stage: QuantBlocks, y: Tensor, given: Tensors, scalars: Numbers, stored: Tensors | None
) -> dict[str, Tensor]:
    dtype = formats.E2M1 if stage.fp4 else given["out"].dtype
    blocks = _blocks(stage, y)
    found, a = _limited(stage, blocks, given, scalars)
    kept = scale = a / formats.LARGEST[dtype]
    if stage.ue8m0:
        kept = formats.floor_bytes(a.float(), dtype) if stage.ocp else formats.exponent_bytes(scale.float())
        scale = formats.powers(kept).double()
    if stored is not None:
        scale = beside = _beside(stage, stored, y)
        if stage.ue8m0:
            scale = formats.powers(formats.unpack(beside)[:, : kept.shape[-1]] if stage.packed else beside)
        scale = scale.double()
    if stage.packed:
        kept = F.pad(kept, (0, -kept.shape[-1] % 4))
    out = torch.where(found.unsqueeze(-1) == 0, 0.0, blocks / scale.unsqueeze(-1)).flatten(-2)[:, : y.shape[-1]]
    made = {"out": out, **_laid_out(stage, kept, given)}
    return {**made, "normed_out": y} if stage.side else made


def exact_nvfp4(
    stage: QuantNvfp4, y: Tensor, given: Tensors, scalars: Numbers, stored: Tensors | None
) -> dict[str, Tensor]:
    blocks, gain = _blocks(stage, y), _global_scale(stage, y, given, scalars)
    found = blocks.abs().amax(-1)
    scale = _finite(found) / 6
    if gain is not None:
        scale, blocks = scale * gain.double(), blocks * gain.double()
    scale = torch.where(scale > 448, 448.0, scale)
    value = formats.encode(scale.float(), formats.E4M3) if stored is None else _beside(stage, stored, y)
    value = value.view(formats.E4M3).double()
    nothing = (found == 0) | (value == 0)
    out = torch.where(nothing.unsqueeze(-1), 0.0, blocks / value.unsqueeze(-1)).flatten(-2)
    made = {"out": out, **_laid_out(stage, scale, given)}
    return {**made, "normed_out": y} if stage.side else made


# ------------------------------------------------------------------ what both share: no arithmetic to speak of
def fp32(value: Tensor | float, like: Tensor) -> Tensor:
    """A run-time number, as the fp32 number that kernels get."""
    if isinstance(value, Tensor):
        return value.float().reshape(())
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _global_scale(stage: QuantNvfp4, y: Tensor, given: Tensors, scalars: Numbers) -> Tensor | None:
    if not stage.global_scale:
        return None
    return fp32(given["global_scale"] if stage.global_scale == "device" else scalars["global_scale_value"], y)


def _blocks(stage: BlockScales, y: Tensor) -> Tensor:
    """[M, H] to [M, B, block]; a last block that is shorter is filled with zeros."""
    block = stage.block or y.shape[-1]
    return F.pad(y, (0, -y.shape[-1] % block)).unflatten(-1, (-1, block))


def _finite(amax: Tensor) -> Tensor:
    return torch.where(amax == torch.inf, _FLT_MAX, amax)


def _limited(stage: QuantBlocks, blocks: Tensor, given: Tensors, scalars: Numbers) -> tuple[Tensor, Tensor]:
    """(the largest magnitude of each block; the same within the stage's limits). NaN stays NaN."""
    found = blocks.abs().amax(-1)
    a = _finite(found)
    floor = fp32(stage.floor, a).to(a.dtype)
    a = torch.where(a < floor, floor, a)
    if stage.cap:
        cap = fp32(given["scale_ub"] if stage.cap == "device" else scalars["scale_ub_value"], a).to(a.dtype)
        a = torch.where((a > cap) | (cap.isnan() & ~a.isnan()), cap, a)
    return found, a


def _laid_out(stage: BlockScales, scales: Tensor, given: Tensors) -> dict[str, Tensor]:
    """[M, B] scales as the operands for them hold them; padding is zero."""
    made = {}
    for operand in stage.operands():
        if operand.kind == "swizzled":
            made[operand.name] = formats.swizzled(scales)
        elif operand.kind == "blocks":
            made[operand.name] = F.pad(scales, (0, 0, 0, given[operand.name].shape[0] - scales.shape[0]))
    return made


def _beside(stage: BlockScales, stored: Tensors, y: Tensor) -> Tensor:
    """[M, B], the scales that stand beside the codes; those of a byte as bytes."""
    rows, scales = y.shape[0], stored["scale"]
    scales = scales.view(torch.uint8) if scales.element_size() == 1 else scales
    return scales[:rows] if stage.layout == "rows" else formats.unswizzled(scales, rows, stage.blocks(y.shape[-1]))
