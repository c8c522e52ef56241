"""What the engines' plugins have in common: one RMSNorm call with their habits, and whether a kernel may take it."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

import flashnorm
from flashnorm.core.checks import FLT_MAX, MAX_HIDDEN, PLAIN
from flashnorm.core.layout import self_overlaps

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fits(x: Any, vectors: tuple[Any, ...], eps: Any, *, any_dtype: bool) -> bool:
    """Whether a kernel takes rows `x` and what lies along them (None is left out), and no transform would be lost.

    A vector in another dtype than the rows does where the result has the rows' in any case.
    """
    if not strided(x) or x.dtype not in DTYPES:
        return False
    shape = x.shape[-1:]
    if len(shape) != 1 or not 1 <= shape[0] <= MAX_HIDDEN:
        return False
    dtypes, device = DTYPES if any_dtype else (x.dtype,), x.device
    for tensor in vectors:
        if tensor is None:
            continue
        if not strided(tensor) or tensor.dtype not in dtypes or tensor.shape != shape or tensor.device != device:
            return False
    if type(eps) not in (float, int) or not 0.0 <= eps <= FLT_MAX:
        return False
    # Forward-mode tangents and torch.func levels do not show in requires_grad.
    return torch.autograd.forward_ad._current_level < 0 and _untransformed()


def strided(tensor: Any) -> bool:
    """Whether it is a tensor with strides and no subclass; `torch.export` without Dynamo hands over fakes of such ones.

    A strided nested tensor is a plain `Tensor` of the strided layout.
    """
    kind = type(tensor)
    known = kind in PLAIN or (kind in (FakeTensor, FunctionalTensor) and torch.compiler.is_compiling())
    return known and not tensor.is_nested and tensor.layout is torch.strided


@torch.compiler.assume_constant_result
def _untransformed() -> bool:
    """Whether no `torch.func` transform is active.

    Dynamo would take the answer None of PyTorch's function for an object. It runs this one instead while it traces,
    where it has entered the transforms of the traced code, and guards their stack in any case.
    """
    return torch._C._functorch.peek_interpreter_stack() is None


def serves(x: Any, residual: Any, weight: Any, eps: Any, *, gemma: bool) -> bool:
    """Whether flashnorm computes what an engine's layer does: one dtype (else the engine's result would have the wider
    one). A residual is like the input, and both can be written: no gradient is wanted, and no memory is shared."""
    if not fits(x, (weight,), eps, any_dtype=gemma):
        return False
    if residual is None:
        return True
    if not strided(residual) or (residual.dtype, residual.shape, residual.device) != (x.dtype, x.shape, x.device):
        return False
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, weight))
    return not recorded and residual is not x and not any(self_overlaps(t.shape, t.stride()) for t in (x, residual))


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
