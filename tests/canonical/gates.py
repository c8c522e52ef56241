"""Operators with gates, bit for bit: the LayerNorms of diffusion transformers, residual mixes, norms under a gate.

Everything comes over [..., H]; vectors of modulation broadcast.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.canonical.arithmetic import F32, exp, fma, narrow, silu, widen
from tests.canonical.norms import ROUNDED_SUM, layer, rms
from tests.canonical.quantise import Blocks, by_block, nvfp4, tiles

Outcome = dict[str, torch.Tensor]


def act(v: F32, name: str) -> F32:
    """silu(v), or div(1, add(1, exp(-v)))."""
    with np.errstate(all="ignore"):
        return silu(v) if name == "silu" else np.float32(1) / (np.float32(1) + exp(-v))


def _plus(vector: torch.Tensor, bias: torch.Tensor | None) -> F32:
    return widen(vector) if bias is None else widen(vector) + widen(bias)


def _like(values: F32, shape: tuple[int, ...]) -> F32:
    return np.broadcast_to(values, shape)


# ------------------------------------------------------------------ diffusion transformers
def dit(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    *,
    gate: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    gamma: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    scale_bias: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    shift_bias: torch.Tensor | None = None,
    factor: float = 1.0,
    gain: float = 1.0,
    form: str = "",
    eps: float = 1e-6,
    numerics: str = "flashinfer",
) -> Outcome:
    """residual_out, norm_out and, of codes, sf_out.

    Args:
        x, residual: [B, R, H].
        gate, scale, shift: broadcast to that.
        gate_bias, gamma, beta, scale_bias, shift_bias: [H].
        factor: s of the input.
        gain: G of NVFP4.
        form: "", "nvfp4" or "mxfp8".
        eps, numerics: of the call.
    """
    shape = tuple(x.shape)
    with np.errstate(all="ignore"):
        times = _like(np.asarray(np.float32(factor)), shape)
        if gate is not None:
            times = _like(_plus(gate, gate_bias) * np.float32(factor), shape)
        h = widen(x) * times if residual is None else fma(widen(x), times, widen(residual))
        stored = narrow(h, x.dtype if residual is None else residual.dtype)
        n, _ = layer(widen(stored) if ROUNDED_SUM[numerics] else h, eps)
        if gamma is not None and beta is not None:
            slope, offset = widen(gamma), widen(beta)
        else:
            assert scale is not None and shift is not None
            slope, offset = np.float32(1) + _plus(scale, scale_bias), _plus(shift, shift_bias)
        y = fma(n, _like(slope, shape), _like(offset, shape))
    return {"residual_out": stored, **_stored(narrow(y, x.dtype), form, gain)}


def _stored(v: torch.Tensor, form: str, gain: float) -> Outcome:
    """The rounded norm as it is, or its codes in int32 and their scales in tiles, batch by batch."""
    if not form:
        return {"norm_out": v}
    batches, rows, _ = v.shape
    if form == "nvfp4":
        codes, scales = nvfp4(widen(v), 16, gain)
    else:
        codes, scales = by_block(widen(v), Blocks(32, 0.0, power=True), torch.float8_e4m3fn)
    down, across = -(-rows // 128), -(-scales.shape[1] // 4)
    each = [tiles(scales.view(torch.uint8)[b * rows : (b + 1) * rows]) for b in range(batches)]
    placed = torch.stack(each) if each else torch.zeros(0, dtype=torch.uint8)
    return {
        "norm_out": codes.view(torch.uint8).contiguous().view(torch.int32).view(batches, rows, -1),
        "sf_out": placed.view(batches, down, across, 32, 4, 4),
    }


# ------------------------------------------------------------------ a branch and the residual stream
def mix(
    branch: torch.Tensor,
    residual: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    alpha: torch.Tensor | float,
    beta: torch.Tensor,
    eps: float,
    center: float,
) -> torch.Tensor:
    """alpha * residual + beta * rmsnorm(v), in the residual's dtype."""
    shape = tuple(branch.shape)
    with np.errstate(all="ignore"):
        v = widen(branch)
        if weight is not None:
            v = v * (widen(weight) + np.float32(center))
        n, _ = rms(v, eps)
        kept = (widen(alpha) if isinstance(alpha, torch.Tensor) else np.float32(alpha)) * widen(residual)
        return narrow(fma(_like(widen(beta), shape), n, kept), residual.dtype)


def following(
    stored: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, eps: float, center: float
) -> torch.Tensor:
    """The norm of a sum as it is stored."""
    with np.errstate(all="ignore"):
        n, _ = rms(widen(stored), eps)
        return narrow(n * (widen(weight) + np.float32(center)), dtype)


# ------------------------------------------------------------------ a gate
def gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    eps: float,
    group: int | None,
    activation: str,
    before: bool,
) -> torch.Tensor:
    """rmsnorm(x) * w * act(gate), or rmsnorm(x * act(gate)) * w, over groups of a row's elements."""
    groups = (*x.shape[:-1], -1, group or x.shape[-1])
    with np.errstate(all="ignore"):
        h, a = widen(x).reshape(groups), act(widen(gate), activation).reshape(groups)
        n, _ = rms(h if before else h * a, eps)
        y = n if weight is None else n * widen(weight).reshape(groups[-2:] if group else (1, -1))
        return narrow((y * a if before else y).reshape(x.shape), x.dtype)
