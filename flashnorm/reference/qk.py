"""Q and K normalised and turned, V copied.

Angles are fp64, made on the CPU where a device has none of it. Everything else is fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashnorm.reference import norms, quantise, rows

if TYPE_CHECKING:
    from flashnorm.program import QkLayout


def fused_qk_rmsnorm_rope(
    *,
    x: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    q_out: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    eps: float,
    output_quant_scale: float,
    v_quant_scale: float,
    numerics: str,
    layout: QkLayout,
) -> None:
    """q_out, k_out = rope(rmsnorm(q) * q_weight), rope(rmsnorm(k) * k_weight); v_out = v.

    Args:
        x: [..., (q + k + v) * head_dim], bf16 or fp16.
        q_weight, k_weight: one gain for every element of all heads, or of one head for each of them; None for no
            weight.
        positions: [...], rows of `cos_sin_cache`; one outside of it makes a token of NaN.
        cos_sin_cache: [P, R], cosines and then sines; None where the layout has a grid.
        q_out, k_out, v_out: [..., heads, head_dim], written: x's dtype, or float8_e4m3fn.
        eps: a finite value >= 0, used as fp32.
        output_quant_scale, v_quant_scale: what codes are multiplied by.
        numerics: any mode: they differ where there is a residual, or a rounding before a weight.
        layout: heads, scope, pairs, grid and frequencies.
    """
    coded = q_out.dtype != x.dtype
    cos, sin = _from_cache(positions, cos_sin_cache) if cos_sin_cache is not None else _of_grid(layout, x)
    parts = x.split([n * layout.head_dim for n in layout.heads], -1)
    made = []
    for part, weight, n in zip(parts[:2], (q_weight, k_weight), layout.heads[:2], strict=True):
        v = _normed(part.float(), weight, n, layout, eps)
        if not coded:
            v = v.to(x.dtype).float()
        y = _turned(v, cos.unsqueeze(-2), sin.unsqueeze(-2), layout)
        made.append(quantise.codes(y * output_quant_scale, q_out.dtype) if coded else y)
    v = parts[2].unflatten(-1, (layout.heads[2], layout.head_dim))
    made.append(quantise.codes(v.float() * v_quant_scale, v_out.dtype) if coded else v)
    rows.write(*zip((q_out, k_out, v_out), made, strict=True))


def _normed(h: Tensor, weight: Tensor | None, heads: int, layout: QkLayout, eps: float) -> Tensor:
    """[..., heads, head_dim], normalised over the layout's scope."""
    shape = (heads, layout.head_dim)
    if layout.scope == "none" or heads == 0:
        return h.unflatten(-1, shape)
    if layout.scope == "head":
        return norms.rms_norm(h.unflatten(-1, shape), weight, h.dtype, eps=eps, numerics="hf-gemma")[0]
    flat = None if weight is None else weight.reshape(-1)
    return norms.rms_norm(h, flat, h.dtype, eps=eps, numerics="hf-gemma")[0].unflatten(-1, shape)


def _turned(v: Tensor, cos: Tensor, sin: Tensor, layout: QkLayout) -> Tensor:
    """The first channels of every head in pairs, the rest as they are."""
    turns, rest = v[..., : layout.rotary_dim], v[..., layout.rotary_dim :]
    a, b = turns.unflatten(-1, (-1, 2)).unbind(-1) if layout.interleave else turns.chunk(2, -1)
    low, high = a * cos - b * sin, b * cos + a * sin
    if layout.attention_factor != 1.0:
        low, high = low * layout.attention_factor, high * layout.attention_factor
    turned = torch.stack((low, high), -1).flatten(-2) if layout.interleave else torch.cat((low, high), -1)
    return torch.cat((turned, rest), -1).where(~cos[..., :1].isnan(), torch.nan)


def _from_cache(positions: Tensor | None, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., R / 2]; NaN for a position that the table does not have."""
    assert positions is not None
    count = cache.shape[0]
    if count == 0:
        nan = torch.full((*positions.shape, cache.shape[1] // 2), torch.nan, device=cache.device)
        return nan, nan
    index = positions.long()
    inside = index.clamp(0, count - 1)
    picked = cache[inside].where((index == inside).unsqueeze(-1), torch.nan)
    cos, sin = picked.chunk(2, -1)
    return cos, sin


def _of_grid(layout: QkLayout, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., head_dim / 2] of the tokens of x."""
    frames, height, width = layout.grid
    i = torch.arange(frames * height * width)
    axes = (i // (height * width), i % (height * width) // width, i % width)
    angles = torch.cat(
        [t.double().unsqueeze(-1) * _frequencies(layout, c) for t, c in zip(axes, layout.channels, strict=True)], -1
    )
    both = torch.stack((angles.cos(), angles.sin())).float().to(x.device)
    if x.dim() == 2:
        both = both.repeat(1, x.shape[0] // i.numel(), 1)
    cos, sin = both.unbind(0)
    return cos, sin


def _frequencies(layout: QkLayout, channels: int) -> Tensor:
    """Radians that the pairs of an axis turn by a step, fp64; YaRN's where the factor is not 1."""
    j = torch.arange(channels // 2, dtype=torch.float64)
    frequency = layout.base ** (-2 * j / channels) if channels else j
    if layout.factor == 1.0:
        return frequency
    high = layout.high + 0.001 if abs(layout.low - layout.high) <= 1e-6 else layout.high
    ramp = ((j - layout.low) / (high - layout.low)).clamp(0, 1)
    return frequency / layout.factor * ramp + frequency * (1 - ramp)
