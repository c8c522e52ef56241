"""The operators, bit for bit: load, statistics, gain and bias, store."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from tests.canonical.arithmetic import F32, canonical_sum, fma, narrow, silu, widen
from tests.canonical.quantise import Blocks, by_block, by_tensor, nvfp4

# Which modes normalise the stored (rounded) residual sum, and which round the norm before the weight.
ROUNDED_SUM = {"flashinfer": False, "hf-llama": True, "vllm": True, "hf-gemma": True, "torch": True, "cake": True}
LLAMA = {"hf-llama", "vllm"}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Bits:
    """What one call leaves behind, or must; None where the operator has no such result.

    Attributes:
        out: the result, in its dtype.
        residual: the updated residual.
        rstd: fp32, one a row.
        scale: [rows, blocks] or [rows, words] of a quantised result, rows flattened.
        normed_out: the rounded norm: what codes were made from, or of 4 bits beside them.
    """

    out: torch.Tensor
    residual: torch.Tensor | None = None
    rstd: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    normed_out: torch.Tensor | None = None


@dataclass(frozen=True)
class Row:
    """A row between its norm and its store: y in fp32, the stored sum, rstd, and T."""

    y: F32
    residual: torch.Tensor | None
    rstd: torch.Tensor
    rounding: torch.dtype

    def rounded(self) -> F32:
        """rT(y), widened again."""
        return widen(narrow(self.y, self.rounding))

    def silu(self) -> Row:
        """The row after SiLU."""
        return replace(self, y=silu(self.y))


def rms(h: F32, eps: float) -> tuple[F32, F32]:
    """(n, rstd) of RMSNorm."""
    count = np.float32(h.shape[-1])
    rstd = np.float32(1) / np.sqrt(canonical_sum(h, h) / count + np.float32(eps))
    return h * rstd[..., None], rstd


def layer(h: F32, eps: float) -> tuple[F32, F32]:
    """(n, rstd) of LayerNorm: two passes, each corrected by what the mean of the differences shows."""
    count = np.float32(h.shape[-1])
    m1 = canonical_sum(h) / count
    d = h - m1[..., None]
    m2 = canonical_sum(d) / count
    variance = np.maximum(np.float32(0), fma(-m2, m2, canonical_sum(d, d) / count))
    rstd = np.float32(1) / np.sqrt(variance + np.float32(eps))
    return (d - m2[..., None]) * rstd[..., None], rstd


def gather(h: F32, index: torch.Tensor) -> F32:
    """Rows of a pool by index; one that is out of range is a row of NaN."""
    chosen = index.detach().cpu().numpy().astype(np.int64)
    there = (chosen >= 0) & (chosen < h.shape[0])
    rows = h[np.where(there, chosen, 0)] if h.shape[0] else np.zeros((*chosen.shape, h.shape[-1]), np.float32)
    return np.where(there[..., None], rows, np.float32(np.nan))


def load(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor | None,
    input_scale: torch.Tensor | None,
) -> F32:
    """h before any rounding: widened or scaled, gathered, and the residual added."""
    if input_scale is None:
        h = widen(x)
    else:
        scale = widen(input_scale).reshape(-1)
        whole = x.detach().cpu().numpy().astype(np.float32)
        h = whole * (scale[0] if scale.size == 1 else scale.reshape(*x.shape[:-1], 1))
    if index is not None:
        h = gather(h, index)
    return h if residual is None else h + widen(residual)


def rounding_of(x: torch.Tensor, out: torch.dtype | None, weight: torch.Tensor | None) -> torch.dtype:
    """T: the input's dtype; for int8 the output's, else the weight's, else bfloat16."""
    given = (x.dtype, out, None if weight is None else weight.dtype)
    return next((dtype for dtype in given if dtype in FLOATS), torch.bfloat16)  # type: ignore[misc]


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    centred: bool = False,
    eps: float = 1e-6,
    numerics: str = "flashinfer",
    offset: float = 0.0,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    out: torch.dtype | None = None,
    once: bool = False,
) -> Row:
    """Everything up to the store.

    Args:
        x: [..., H] (a pool [P, H] with an index), fp32, fp16, bf16, or int8 with an input_scale.
        weight: broadcasts against the rows, or None.
        residual: x's shape, or None.
        bias: [H], or None.
        centred: LayerNorm rather than RMSNorm.
        eps: rounded to fp32.
        numerics: one of the public modes.
        offset: 0 or 1, added to the weight in fp32.
        index: integers, the shape of the rows.
        input_scale: one fp32 element, or one for every row of x.
        out: dtype of the result, where that decides T.
        once: of an operator that rounds nothing before its store, whatever the mode: SiLU, scales of 8 bits.
    """
    rounding = rounding_of(x, out, weight)
    with np.errstate(all="ignore"):
        h, stored = load(x, residual, index, input_scale), None
        if residual is not None:
            stored = narrow(h, residual.dtype)
            if ROUNDED_SUM[numerics]:
                h = widen(stored)
        y, rstd = (layer if centred else rms)(h, eps)
        if weight is not None:
            gain = widen(weight)
            if offset:
                y = y * (gain + np.float32(offset))
            elif bias is not None:
                y = fma(y, np.broadcast_to(gain, y.shape), np.broadcast_to(widen(bias), y.shape))
            elif numerics in LLAMA and not centred and not once:
                y = widen(narrow(widen(narrow(y, rounding)) * gain, rounding))
            else:
                y = y * gain
        elif bias is not None:
            y = y + widen(bias)
    assert y.dtype == np.float32
    return Row(y, stored, torch.from_numpy(np.asarray(rstd, np.float32).copy()), rounding)


def rmsnorm_bits(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    numerics: str = "flashinfer",
    offset: float = 0.0,
) -> Bits:
    """The exact result of rmsnorm, gemma_rmsnorm (offset 1) and, with a residual, their fused forms."""
    return cast_bits(norm(x, weight, residual, eps=eps, numerics=numerics, offset=offset), x.dtype)


def cast_bits(row: Row, dtype: torch.dtype) -> Bits:
    """One rounding to the result's dtype."""
    return Bits(narrow(row.y, dtype), row.residual, row.rstd)


def tensor_bits(row: Row, dtype: torch.dtype, scale: float, *, double: bool = False) -> Bits:
    """Codes by one scale for everything; `double`: y is rounded to T first."""
    return Bits(by_tensor(row.rounded() if double else row.y, scale, dtype), row.residual, row.rstd)


def block_bits(row: Row, dtype: torch.dtype, how: Blocks) -> Bits:
    """Codes and scales by block, from rT(y), which is `normed_out`."""
    v = row.rounded()
    codes, scale = by_block(v, how, dtype)
    return Bits(codes, row.residual, row.rstd, scale, narrow(v, row.rounding))


def power_bits(row: Row, dtype: torch.dtype, *, down: bool = False) -> Bits:
    """MXFP4 and MXFP8: codes and exponent bytes for every 32 elements, from y itself; `down`: the OCP rule."""
    codes, scale = by_block(row.y, Blocks(32, 0.0, power=True, down=down), dtype)
    return Bits(codes, row.residual, row.rstd, scale, narrow(row.y, row.rounding))


def nvfp4_bits(row: Row, size: int = 16, gain: float | None = None) -> Bits:
    """Pairs of e2m1 codes and e4m3 scales, from y itself."""
    codes, scale = nvfp4(row.y, size, gain)
    return Bits(codes, row.residual, row.rstd, scale, narrow(row.y, row.rounding))
