"""The rows that are normalised, in fp32: gathered, dequantised, or summed with a residual; and how results go out."""

from __future__ import annotations

import torch
from torch import Tensor

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Whether a mode normalises the sum as it is stored in the residual. A name that is not here is a
# caller that did not resolve its aliases: a KeyError, not a guess.
_ROUNDS_RESIDUAL = {"flashinfer": False, "hf-llama": True, "hf-gemma": True, "torch": True}


def load(x: Tensor, row_index: Tensor | None, input_scale: Tensor | None) -> Tensor:
    """h: the rows of x, or those that an index picks, times their scales where x is int8.

    Args:
        x: [..., H]; with an index, the pool: its leading dimensions are flattened.
        row_index: [...], int32 or int64. An index outside of the pool makes a row of NaN.
        input_scale: fp32, one element, or one for every row of x, of any shape.
    """
    scale = None
    if input_scale is not None:
        scale = input_scale.reshape(() if input_scale.numel() == 1 else (*x.shape[:-1], 1))
    if row_index is None:
        return _scaled(x, scale)
    pool = x.reshape(-1, x.shape[-1])
    count = pool.shape[0]
    if count == 0:
        return torch.full((*row_index.shape, x.shape[-1]), torch.nan, device=x.device)
    index = row_index.long()
    inside = index.clamp(0, count - 1)
    picked = scale if scale is None or scale.dim() == 0 else scale.reshape(count, 1)[inside]
    return torch.where((index == inside).unsqueeze(-1), _scaled(pool[inside], picked), torch.nan)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x.float() if scale is None else x.float() * scale


def add(x: Tensor, residual: Tensor, numerics: str) -> tuple[Tensor, Tensor]:
    """(x + residual as it is stored, in the residual's dtype; the sum that is normalised, fp32)."""
    return store(x.float() + residual.float(), residual.dtype, numerics)


def store(h: Tensor, dtype: torch.dtype, numerics: str) -> tuple[Tensor, Tensor]:
    """(h as it is stored, in `dtype`; h that is normalised, fp32)."""
    stored = h.to(dtype)
    return stored, stored.float() if _ROUNDS_RESIDUAL[numerics] else h


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of fp32 tensors in one rounding (twice in 2^29): by way of fp64, where the device has that."""
    if c.device.type == "mps":
        return a * b + c
    return (a.double() * b.double() + c.double()).float()


def rounding(*tensors: Tensor | None) -> torch.dtype:
    """T, the dtype that "rounded" means: that of the first floating-point tensor among input, result and weight."""
    return next((t.dtype for t in tensors if t is not None and t.dtype in _FLOATS), torch.bfloat16)


def write(*pairs: tuple[Tensor | None, Tensor]) -> None:
    """Everything at once, after everything has been read."""
    for tensor, values in pairs:
        if tensor is not None:
            tensor.copy_(values)
