"""RMSNorm, plain and with a residual, its result cast, or quantised with a scale given or found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashnorm.reference import norms, quantise, rows


# ------------------------------------------------------------------ one cast
def rmsnorm(
    *,
    x: Tensor,
    row_index: Tensor | None,
    input_scale: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    rstd: Tensor | None,
    eps: float,
    numerics: str,
    offset: float = 0.0,
) -> None:
    """out = x / sqrt(mean(x^2) + eps) * (weight + offset), over the last dimension.

    Args:
        x: [..., H], fp32, fp16, bf16, or int8 with a scale. M = 0 rows are fine.
        row_index: [...], int32 or int64, into the rows of x, flattened; None where x itself is the rows.
        input_scale: fp32, what int8 is multiplied by: one element, or one for every row of x.
        weight: broadcasts to the rows, last dimension H, any of the three dtypes; None for no weight.
        out: [..., H], written. May be x itself.
        rstd: [...], fp32, written with 1 / sqrt(mean(x^2) + eps); None where nobody wants it.
        eps: a finite value >= 0, used as fp32.
        numerics: "flashinfer", "hf-llama", "hf-gemma" or "torch".
        offset: added to the weight in fp32; 1.0 in Gemma's forms.
    """
    h = rows.load(x, row_index, input_scale)
    kind = rows.rounding(x, out, weight)
    y, inverse = norms.rms_norm(h, weight, kind, eps=eps, numerics=numerics, offset=offset, stored=x.dtype)
    rows.write((rstd, inverse.squeeze(-1)), (out, y))


def add_rmsnorm(
    *,
    x: Tensor,
    residual: Tensor,
    h: Tensor,
    weight: Tensor | None,
    out: Tensor,
    eps: float,
    numerics: str,
    rstd: Tensor | None = None,
    offset: float = 0.0,
) -> None:
    """h = x + residual; out = rmsnorm(h) * (weight + offset).

    Args:
        x: [..., H], fp32, fp16 or bf16.
        residual: like x, of any of the three dtypes.
        h: like residual, written with the sum, rounded once. May be `residual` itself.
        weight: broadcasts to x, last dimension H; None for no weight.
        out: like x, written. May be `x` itself.
        eps: a finite value >= 0, used as fp32.
        numerics: "flashinfer" (norms the unrounded sum), "hf-llama", "hf-gemma" or "torch" (the stored one).
        rstd: [...], fp32, written with 1 / sqrt(mean(h^2) + eps); None where nobody wants it.
        offset: added to the weight in fp32; 1.0 in Gemma's forms.
    """
    stored, total = rows.add(x, residual, numerics)
    y, inverse = norms.rms_norm(total, weight, x.dtype, eps=eps, numerics=numerics, offset=offset, stored=h.dtype)
    rows.write((h, stored), (rstd, inverse.squeeze(-1)), (out, y))


def fused_add_rmsnorm(*, x: Tensor, residual: Tensor, **given: Any) -> None:
    """`add_rmsnorm` in place: residual <- x + residual; x <- rmsnorm(that sum) * (weight + offset)."""
    add_rmsnorm(x=x, residual=residual, h=residual, out=x, **given)


# ------------------------------------------------------------------ a scale that is given
def rmsnorm_quant(
    *,
    x: Tensor,
    row_index: Tensor | None,
    input_scale: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    scale: Tensor | None,
    eps: float,
    scale_value: float,
    numerics: str,
    offset: float = 0.0,
) -> None:
    """out = codes of rmsnorm(x) * (weight + offset) / scale.

    Args:
        x, row_index, input_scale, weight, eps, numerics, offset: those of `rmsnorm`.
        out: [..., H], float8_e4m3fn or float8_e5m2, written.
        scale: one element, of any floating-point dtype; None: `scale_value`.
        scale_value: the scale as a number, used as fp32.
    """
    h, kind = rows.load(x, row_index, input_scale), rows.rounding(x, weight)
    y, _ = norms.rms_norm(h, weight, kind, eps=eps, numerics=numerics, offset=offset)
    rows.write((out, quantise.by_tensor(y.float(), scale, scale_value, out.dtype)))


def add_rmsnorm_quant(
    *,
    x: Tensor,
    residual: Tensor,
    h: Tensor,
    weight: Tensor | None,
    out: Tensor,
    scale: Tensor | None,
    eps: float,
    scale_value: float,
    numerics: str,
    offset: float = 0.0,
) -> None:
    """h = x + residual; out = codes of rmsnorm(h) * (weight + offset) / scale.

    Args are those of `add_rmsnorm` and of `rmsnorm_quant`.
    """
    stored, total = rows.add(x, residual, numerics)
    y, _ = norms.rms_norm(total, weight, x.dtype, eps=eps, numerics=numerics, offset=offset)
    rows.write((h, stored), (out, quantise.by_tensor(y.float(), scale, scale_value, out.dtype)))


def fused_add_rmsnorm_quant(*, residual: Tensor, **given: Any) -> None:
    """`add_rmsnorm_quant` with the sum in the residual itself."""
    add_rmsnorm_quant(residual=residual, h=residual, **given)


# ------------------------------------------------------------------ scales that are found
def add_rmsnorm_fp8_block_quant(
    *,
    x: Tensor,
    residual: Tensor,
    h: Tensor,
    weight: Tensor | None,
    out: Tensor,
    scale: Tensor,
    normed_out: Tensor,
    eps: float,
    numerics: str,
) -> None:
    """h = x + residual; normed_out = rmsnorm(h) * weight; out, scale = its codes by blocks of 128.

    Args:
        x, residual, h, weight, eps, numerics: those of `add_rmsnorm`.
        out: like x, of float8_e4m3fn, written.
        scale: [M', B], fp32, any strides; M' >= M, the rows of the flattened grid; the rest is padding, and zeroed.
        normed_out: like x, written with what was quantised.
    """
    stored, total = rows.add(x, residual, numerics)
    normed, _ = norms.rms_norm(total, weight, x.dtype, eps=eps, numerics=numerics, stored=h.dtype)
    normed = normed.to(x.dtype)
    made, kept = quantise.by_blocks(normed.float(), out.dtype, scale.shape[0], block=128, floor=1e-4, ratio=True)
    rows.write((h, stored), (normed_out, normed), (out, made), (scale, kept))


def fused_add_rmsnorm_fp8_block_quant(*, residual: Tensor, **given: Any) -> None:
    """`add_rmsnorm_fp8_block_quant` with the sum in the residual itself."""
    add_rmsnorm_fp8_block_quant(residual=residual, h=residual, **given)


def rmsnorm_dynamic_quant(*, x: Tensor, **given: Any) -> None:
    """out, scale = codes of rmsnorm(x) * weight and the scales they need; see `add_rmsnorm_dynamic_quant`."""
    rows.write(*_dynamic(x.float(), x.dtype, x.dtype, **given))


def add_rmsnorm_dynamic_quant(*, x: Tensor, residual: Tensor, h: Tensor, numerics: str, **given: Any) -> None:
    """h = x + residual; out, scale = codes of rmsnorm(h) * weight and the scales they need.

    Args:
        x, residual, h, weight, eps, numerics: those of `add_rmsnorm`.
        out: like x, of float8_e4m3fn, float8_e5m2 or int8, written.
        scale: [M', B], fp32, uint8 or int32, any strides; the rows past the grid's M are padding, and zeroed.
        scale_ub: the largest amax, one fp32 element; None: `scale_ub_value`.
        normed_out: like x, written with what was quantised; None where nobody wants it.
        scale_ub_value: the largest amax as a number.
        granularity: elements a scale serves: "token", the whole row, or "128".
        scale_format: "fp32", "ue8m0" or "ue8m0_packed".
    """
    stored, total = rows.add(x, residual, numerics)
    rows.write((h, stored), *_dynamic(total, x.dtype, h.dtype, numerics=numerics, **given))


def fused_add_rmsnorm_dynamic_quant(*, residual: Tensor, **given: Any) -> None:
    """`add_rmsnorm_dynamic_quant` with the sum in the residual itself."""
    add_rmsnorm_dynamic_quant(residual=residual, h=residual, **given)


def _dynamic(
    h: Tensor,
    dtype: torch.dtype,
    stored: torch.dtype,
    *,
    weight: Tensor | None,
    out: Tensor,
    scale: Tensor,
    scale_ub: Tensor | None,
    normed_out: Tensor | None,
    eps: float,
    scale_ub_value: float,
    numerics: str,
    granularity: str,
    scale_format: str,
) -> tuple[tuple[Tensor | None, Tensor], ...]:
    """What is to be written where."""
    normed, _ = norms.rms_norm(h, weight, dtype, eps=eps, numerics=numerics, stored=stored)
    normed = normed.to(dtype)
    made, kept = quantise.by_blocks(
        normed.float(),
        out.dtype,
        scale.shape[0],
        block={"token": 0, "128": 128}[granularity],
        floor=1e-10,
        cap=scale_ub,
        cap_value=scale_ub_value,
        scale_format=scale_format,
    )
    return (normed_out, normed), (out, made), (scale, kept)
