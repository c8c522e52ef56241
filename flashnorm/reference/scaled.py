"""RMSNorm in blocks with a scale of 8 bits each: NVFP4, MXFP4 and MXFP8, scales by rows or in tiles.

Codes and scales come from the norm in fp32, whatever the mode: "hf-llama" rounds nothing before the weight here.
Codes of four bits and scales are uint8, whatever dtype callers see them as.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashnorm.reference import norms, quantise, rows

Writes = tuple[tuple[Tensor | None, Tensor], ...]


def rmsnorm_fp4quant(*, x: Tensor, numerics: str, **given: Any) -> None:
    """out, scale = e2m1 codes of rmsnorm(x) * weight and the scales they need; see `add_rmsnorm_fp4quant`."""
    rows.write(*_fp4(x.float(), x.dtype, **given))


def add_rmsnorm_fp4quant(*, x: Tensor, residual: Tensor, h: Tensor, numerics: str, **given: Any) -> None:
    """h = x + residual; out, scale = e2m1 codes of rmsnorm(h) * weight and the scales they need.

    Args:
        x: [..., H], fp32, fp16 or bf16; H is a multiple of the block.
        residual: like x, of any of the three dtypes.
        h: like residual, written with the sum, rounded once. May be `residual` itself.
        weight: broadcasts to x, last dimension H; None for no weight.
        out: [..., H / 2], bytes, written: two codes each, the even column in the low half.
        scale: bytes, written. By rows [M', B], any strides, those past M zeroed; swizzled: [M', C], contiguous, tiles
            of 128 rows and 4 columns one after the other, in each the scales of rows 32 apart beside each other.
        scale_rows: the same scales by rows, where both layouts are asked for.
        global_scale: G, one element of any floating-point dtype; None: `global_scale_value`.
        normed_out: like x, written with the norm, rounded once; None where nobody wants it.
        eps: a finite value >= 0, used as fp32.
        global_scale_value: G as a number.
        numerics: as in `add_rmsnorm`.
        block_size: "16" or "32": elements a scale serves.
        scale_format: "e4m3", "ue8m0", or "auto": the first for blocks of 16, the second for 32.
        scale_rule: of "ue8m0": "up" (nothing saturates) or "ocp" (rounded down from amax).
        swizzled: how `scale` lies.
    """
    stored, total = rows.add(x, residual, numerics)
    rows.write((h, stored), *_fp4(total, x.dtype, **given))


def fused_add_rmsnorm_fp4quant(*, residual: Tensor, **given: Any) -> None:
    """`add_rmsnorm_fp4quant` with the sum in the residual itself."""
    add_rmsnorm_fp4quant(residual=residual, h=residual, **given)


def rmsnorm_mxfp8_quant(*, x: Tensor, numerics: str, **given: Any) -> None:
    """out, scale = e4m3 codes of rmsnorm(x) * weight and powers of two; see `add_rmsnorm_mxfp8_quant`."""
    rows.write(*_mxfp8(x.float(), x.dtype, **given))


def add_rmsnorm_mxfp8_quant(*, x: Tensor, residual: Tensor, h: Tensor, numerics: str, **given: Any) -> None:
    """h = x + residual; out, scale = e4m3 codes of rmsnorm(h) * weight and a power of two for every 32 of them.

    Args:
        x, residual, h, weight, scale, scale_rows, eps, numerics, scale_rule, swizzled: as in `add_rmsnorm_fp4quant`.
        out: like x, of float8_e4m3fn, written.
    """
    stored, total = rows.add(x, residual, numerics)
    rows.write((h, stored), *_mxfp8(total, x.dtype, **given))


def fused_add_rmsnorm_mxfp8_quant(*, residual: Tensor, **given: Any) -> None:
    """`add_rmsnorm_mxfp8_quant` with the sum in the residual itself."""
    add_rmsnorm_mxfp8_quant(residual=residual, h=residual, **given)


# ------------------------------------------------------------------ what is to be written where
def _fp4(
    h: Tensor,
    dtype: torch.dtype,
    *,
    weight: Tensor | None,
    out: Tensor,
    scale: Tensor,
    eps: float,
    block_size: str,
    scale_format: str,
    scale_rule: str,
    global_scale: Tensor | None = None,
    global_scale_value: float = 1.0,
    normed_out: Tensor | None = None,
    scale_rows: Tensor | None = None,
    swizzled: bool = False,
) -> Writes:
    y = _norm(h, weight, dtype, eps)
    block = int(block_size)
    if scale_format == "e4m3" or (scale_format == "auto" and block == 16):
        made, kept = quantise.nvfp4(y, block, global_scale, global_scale_value)
    else:
        made, kept = _powers_of_two(y, quantise.E2M1, block, scale_rule)
    return (normed_out, y), (out, made), *_placed(kept, scale, scale_rows, swizzled)


def _mxfp8(
    h: Tensor,
    dtype: torch.dtype,
    *,
    weight: Tensor | None,
    out: Tensor,
    scale: Tensor,
    eps: float,
    scale_rule: str,
    scale_rows: Tensor | None = None,
    swizzled: bool = False,
) -> Writes:
    made, kept = _powers_of_two(_norm(h, weight, dtype, eps), out.dtype, 32, scale_rule)
    return (out, made), *_placed(kept, scale, scale_rows, swizzled)


def _norm(h: Tensor, weight: Tensor | None, dtype: torch.dtype, eps: float) -> Tensor:
    """The norm in fp32: in a mode that rounds only at the end, since there is no such end here."""
    y, _ = norms.rms_norm(h, weight, dtype, eps=eps, numerics="hf-gemma")
    return y


def _powers_of_two(y: Tensor, dtype: torch.dtype, block: int, rule: str) -> tuple[Tensor, Tensor]:
    count = y.shape[:-1].numel()
    return quantise.by_blocks(y, dtype, count, block=block, floor=0.0, scale_format="ue8m0", scale_rule=rule)


def _placed(kept: Tensor, scale: Tensor, scale_rows: Tensor | None, swizzled: bool) -> Writes:
    """[M, B] scales as the operands for them hold them."""
    by_rows = scale_rows if swizzled else scale
    rowed = () if by_rows is None else ((by_rows, quantise.padded(kept, by_rows.shape[0])),)
    return ((scale, quantise.in_tiles(kept)), *rowed) if swizzled else rowed
