"""What the engines' plugins have in common: one RMSNorm call with their habits, and whether a kernel may take it."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

import flashnorm
from flashnorm.core.checks import FLT_MAX, MAX_HIDDEN, PLAIN

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fits(x: Any, vectors: tuple[Any, ...], eps: Any, *, any_dtype: bool) -> bool:
    """Whether a kernel takes rows `x` and what lies along them (None is left out): what flashnorm would refuse is left
    to the engine. A vector in another dtype than the rows does where the result has the rows' in any case."""
    # A strided nested tensor is a plain `Tensor` of the strided layout.
    if not plain(x) or x.dtype not in DTYPES or x.is_nested or x.layout is not torch.strided:
        return False
    shape = x.shape[-1:]
    if len(shape) != 1 or not 1 <= shape[0] <= MAX_HIDDEN:
        return False
    dtypes, device = DTYPES if any_dtype else (x.dtype,), x.device
    for tensor in vectors:
        if tensor is None:
            continue
        if not plain(tensor) or tensor.dtype not in dtypes or tensor.shape != shape or tensor.device != device:
            return False
    return isinstance(eps, float | int) and 0.0 <= eps <= FLT_MAX


def plain(tensor: Any) -> bool:
    """Whether it is a tensor and no subclass; `torch.export` without Dynamo hands over fakes of plain ones."""
    kind = type(tensor)
    return kind in PLAIN or (kind in (FakeTensor, FunctionalTensor) and torch.compiler.is_compiling())


def serves(x: Any, residual: Any, weight: Any, eps: Any, *, gemma: bool) -> bool:
    """Whether flashnorm computes what an engine's layer does: one dtype (else the engine's result would have the wider
    one), and a residual like the input."""
    if not fits(x, (weight,), eps, any_dtype=gemma):
        return False
    return residual is None or (
        plain(residual) and (residual.dtype, residual.shape, residual.device) == (x.dtype, x.shape, x.device)
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
