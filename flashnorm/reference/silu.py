"""SiLU of RMSNorm, its result cast, or quantised with a scale given or found.

SiLU is that of the norm in fp32, whatever the mode, with PyTorch's own exponential: y / (1 + exp(-y)). An infinite y
of negative sign gives NaN, by the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm.reference import norms, quantise, rows


def fused_rmsnorm_silu(*, x: Tensor, weight: Tensor | None, out: Tensor, eps: float, numerics: str) -> None:
    """out = silu(rmsnorm(x) * weight).

    Args:
        x: [..., H], fp32, fp16 or bf16.
        weight: broadcasts to x, last dimension H; None for no weight.
        out: like x, written. May be x itself.
        eps: a finite value >= 0, used as fp32.
        numerics: any mode: they differ where there is a residual, or a rounding before the end.
    """
    rows.write((out, _silu(x, weight, eps)))


def fused_rmsnorm_silu_quant(
    *,
    x: Tensor,
    weight: Tensor | None,
    out: Tensor,
    scale: Tensor | None,
    eps: float,
    scale_value: float,
    numerics: str,
) -> None:
    """out = codes of silu(rmsnorm(x) * weight) / scale.

    Args:
        x, weight, eps, numerics: those of `fused_rmsnorm_silu`.
        out: like x, of float8_e4m3fn or float8_e5m2, written.
        scale: one element, of any floating-point dtype; None: `scale_value`.
        scale_value: the scale as a number, used as fp32.
    """
    rows.write((out, quantise.by_tensor(_silu(x, weight, eps), scale, scale_value, out.dtype)))


def fused_rmsnorm_silu_fp4(
    *, x: Tensor, weight: Tensor | None, out: Tensor, scale: Tensor, eps: float, numerics: str
) -> None:
    """out, scale = NVFP4 codes of silu(rmsnorm(x) * weight) and their e4m3 scales.

    Args:
        x, weight, eps, numerics: those of `fused_rmsnorm_silu`; H is a multiple of 16.
        out: [..., H / 2], bytes, written: two codes each, the even column in the low half.
        scale: [M', H / 16], bytes, any strides, written; rows past M are zeroed.
    """
    made, kept = quantise.nvfp4(_silu(x, weight, eps), 16)
    rows.write((out, made), (scale, quantise.padded(kept, scale.shape[0])))


def _silu(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y, _ = norms.rms_norm(x.float(), weight, x.dtype, eps=eps, numerics="hf-gemma")
    return y / (1.0 + torch.exp(-y))
