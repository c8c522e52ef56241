"""What the engines' plugins have in common: one RMSNorm call with their habits, and whether a kernel may take it."""

from __future__ import annotations

from typing import Any

import torch

import flashnorm

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def serves(x: Any, residual: Any, weight: Any, *, gemma: bool) -> bool:
    """Whether flashnorm computes what the engine does: one dtype, and a residual like the input."""
    if not isinstance(x, torch.Tensor) or x.dtype not in _DTYPES:
        return False
    if weight is not None and not (weight.dtype in _DTYPES if gemma else weight.dtype == x.dtype):
        return False  # the engine's result would have the wider dtype
    return residual is None or (
        isinstance(residual, torch.Tensor) and residual.dtype == x.dtype and residual.shape == x.shape
    )


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    *,
    gemma: bool,
    numerics: str,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """norm(x) * weight in a new tensor; with a residual (x, residual), both in place, as the engines' kernels do."""
    if residual is None:
        plain: Any = flashnorm.gemma_rmsnorm if gemma else flashnorm.rmsnorm
        y: torch.Tensor = plain(x, weight, eps, numerics=numerics)
        return y
    fused = flashnorm.gemma_fused_add_rmsnorm if gemma else flashnorm.fused_add_rmsnorm
    fused(x, residual, weight, eps, numerics=numerics)
    return x, residual
