"""Q and K normalised and turned, V copied, bit for bit: the sines and cosines included.

Powers of the base are taken with 60 digits; everything after them is fp64 where the specification says so, and fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import mpmath
import numpy as np
import torch

from tests.canonical.arithmetic import F32, canonical_sum, fma, narrow, widen
from tests.canonical.codes import encode

_SIN = [np.float32(float.fromhex(t)) for t in ("-0x1.2ef846p-8", "0x1.4668e6p-4", "-0x1.4abbe6p-1", "0x1.921fb6p+0")]
_COS = [np.float32(float.fromhex(t)) for t in ("0x1.d47e82p-11", "-0x1.55b148p-6", "0x1.03c1aep-2", "-0x1.3bd3ccp+0")]
_MAGIC = np.float32(12582912)
Numbers = Sequence[float]


def frequencies(channels: Sequence[int], base: float, yarn: Numbers | None = None) -> list[float]:
    """Radians a step of every pair, fp64; `yarn` is (factor, low, high)."""
    out = []
    with mpmath.workdps(60):
        for count in channels:
            for j in range(count // 2):
                value = float(mpmath.mpf(base) ** (mpmath.mpf(-2 * j) / count))
                if yarn is not None:
                    factor, low, high = yarn
                    top = high + 0.001 if abs(low - high) <= 1e-6 else high
                    ramp = min(1.0, max(0.0, (j - low) / (top - low)))
                    value = value / factor * ramp + value * (1.0 - ramp)
                out.append(value)
    return out


def quarters(values: Sequence[float]) -> tuple[F32, F32]:
    """The two floats of every frequency in quarter turns."""
    scaled = np.array(values, np.float64) * np.float64(float.fromhex("0x1.45f306dc9c883p-1"))
    high = scaled.astype(np.float32)
    return high, (scaled - high.astype(np.float64)).astype(np.float32)


def turns(position: F32, high: F32, low: F32) -> tuple[F32, F32]:
    """(sine, cosine) of position * (high + low) quarter turns; the arguments broadcast."""
    position, high, low = (np.ascontiguousarray(a) for a in np.broadcast_arrays(position, high, low))

    def like(value: np.float32) -> F32:
        return np.full(position.shape, value, np.float32)

    product = position * high
    rest = fma(position, low, fma(position, high, -product))
    shifted = product + _MAGIC
    y = (product - (shifted - _MAGIC)) + rest
    z = y * y
    s, c = like(_SIN[0]), like(_COS[0])
    for factor in _SIN[1:]:
        s = fma(z, s, like(factor))
    for factor in (*_COS[1:], np.float32(1)):
        c = fma(z, c, like(factor))
    s = y * s
    quarter = (shifted - _MAGIC).astype(np.int64) % 4
    sine = np.choose(quarter, [s, c, -s, -c])
    cosine = np.choose(quarter, [c, -s, -c, s])
    return sine, cosine


def grid_turns(tokens: int, grid: Sequence[int], channels: Sequence[int], values: Sequence[float]) -> tuple[F32, F32]:
    """(sine, cosine) [tokens, pairs] of tokens that fill grids one after the other."""
    token = np.arange(tokens) % int(np.prod(grid))
    axes = (token // (grid[1] * grid[2]), token // grid[2] % grid[1], token % grid[2])
    position = np.concatenate(
        [np.repeat(axis[:, None], count // 2, 1) for axis, count in zip(axes, channels, strict=True)], 1
    )
    return turns(position.astype(np.float32), *quarters(values))


def table_turns(cache: torch.Tensor, positions: torch.Tensor) -> tuple[F32, F32]:
    """(sine, cosine) [tokens, pairs] from a table; NaN for positions that it does not have."""
    table, index = widen(cache), positions.cpu().reshape(-1).numpy().astype(np.int64)
    there = (index >= 0) & (index < table.shape[0])
    picked = np.where(there[:, None], table[np.where(there, index, 0)], np.float32(np.nan))
    half = table.shape[1] // 2
    return picked[:, half:], picked[:, :half]


def part_bits(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    sine: F32,
    cosine: F32,
    *,
    scope: str,
    interleave: bool,
    eps: float,
    attention: float,
    scale: float | None,
) -> torch.Tensor:
    """Q or K.

    Args:
        x: [tokens, heads, head_dim].
        weight: [heads, head_dim], or None.
        sine, cosine: [tokens, pairs]; rows of NaN where everything becomes NaN.
        scope: "hidden", "head" or "none".
        interleave: whether pairs are neighbours.
        eps: of the norm.
        attention: 1.0 for none.
        scale: of e4m3 results; None for results in x's dtype.
    """
    tokens, heads, width = x.shape
    with np.errstate(all="ignore"):
        v = widen(x)
        if scope != "none" and heads:
            rows = v.reshape(tokens, 1, heads * width) if scope == "hidden" else v
            count = np.float32(rows.shape[-1])
            rstd = np.float32(1) / np.sqrt(canonical_sum(rows, rows) / count + np.float32(eps))
            v = v * rstd[..., None]
            if weight is not None:
                v = v * widen(weight)[None]
            if scale is None:
                v = widen(narrow(v, x.dtype))
        turning = 2 * sine.shape[-1]
        sin, cos = (np.repeat(t[:, None], heads, 1) for t in (sine, cosine))
        if interleave:
            low, high = np.arange(0, turning, 2), np.arange(1, turning, 2)
        else:
            low, high = np.arange(turning // 2), np.arange(turning // 2, turning)
        a, b = v[..., low], v[..., high]
        made = v.copy()
        made[..., low] = fma(a, cos, -(b * sin))
        made[..., high] = fma(b, cos, a * sin)
        if attention != 1.0:
            made[..., :turning] *= np.float32(attention)
        made[np.isnan(cosine[:, 0])] = np.nan
        if scale is None:
            return narrow(made, x.dtype)
        return encode(np.ascontiguousarray(made * np.float32(scale)), torch.float8_e4m3fn)


def copy_bits(x: torch.Tensor, scale: float | None) -> torch.Tensor:
    """V."""
    return x if scale is None else encode(widen(x) * np.float32(scale), torch.float8_e4m3fn)
