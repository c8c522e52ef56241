"""Norms as functions, with the arguments that Liger-Kernel's users know. All are differentiable.

They choose among flashnorm's operators and add nothing to their cost but a few Python statements.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from flashnorm.core.checks import FLT_MAX
from flashnorm.core.dispatch import backend, check_name
from flashnorm.ops import rmsnorm as rms
from flashnorm.ops.add import add_layernorm, add_rmsnorm, gemma_add_rmsnorm
from flashnorm.ops.gated import rmsnorm_gate
from flashnorm.ops.layernorm import layernorm
from flashnorm.ops.narrow import narrow_add_rmsnorm, narrow_rmsnorm

__all__ = [
    "add_layernorm",
    "add_rmsnorm",
    "fused_add_rms_norm",
    "gemma_add_rmsnorm",
    "layer_norm",
    "rms_norm",
    "rmsnorm_gate",
]

CASTING_MODES = {"llama": "hf-llama", "gemma": "hf-gemma", "none": "none", 0: "hf-llama", 1: "hf-gemma", -1: "none"}
_HALF = (torch.float16, torch.bfloat16)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = False,
    row_mode: bool | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    r"""RMSNorm over the last dimension, with Liger-Kernel's arguments.

    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot (w + \mathrm{offset})

    Args:
        x: [..., H], fp32, fp16 or bf16.
        weight: [H], or what broadcasts to `x`; None for no weight (the offset is not used then).
        eps: added to the mean square; finite and >= 0.
        offset: added to the weight, in fp32.
        casting_mode: "llama" (or 0) rounds the normalised row to the dtype of `x` before the weight, and the product
            again; "gemma" (1) rounds once; "none" (-1) rounds eps, the offset, the squares and, for the backward, rstd
            to the dtype of `x`, and adds the squares up in fp32. The forward of "none" in fp16 and bf16 is plain
            PyTorch.
        in_place: the backward writes the gradient of `x` into the one that it is given, where that has its layout.
            Wrong where somebody else reads that gradient too, as in a residual connection.
        row_mode: accepted and not needed: results and speed do not depend on such a choice here.
        impl: "cute", "cuda", "cpu" or "torch": the route of this call and of its backward. Not inside a compiled graph.

    Returns:
        [..., H] in the dtype of `x`.

    Raises:
        TypeError: for something that is no tensor or number.
        ValueError: for a wrong dtype, shape, device, mode or impl.
        RuntimeError: where no route serves the device.
    """
    mode = check_mode(casting_mode, offset)
    with _on(impl):
        if mode == "none":
            if isinstance(x, torch.Tensor) and x.dtype in _HALF:
                return narrow_rmsnorm(x, weight, eps, offset, in_place)
            mode = "hf-gemma"
        if offset == 1.0 and mode == "hf-gemma" and weight is not None:
            return rms.recorded(1.0, x, weight, eps, mode, in_place)
        return rms.recorded(0.0, x, _shifted(weight, offset), eps, mode, in_place)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = False,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""The sum of `x` and a residual, and its `rms_norm`.

    .. math::
        s = x + \mathrm{residual}, \quad
        y = \frac{s}{\sqrt{\operatorname{mean}(s^2) + \epsilon}} \cdot (w + \mathrm{offset})

    The sum is rounded to the residual's dtype, and what is normalised is the rounded sum.

    Args:
        x, residual: [..., H], fp32, fp16 or bf16.
        weight, eps, offset, casting_mode, impl: those of `rms_norm`.
        in_place: accepted and not used: a gradient of the sum joins that of the norm, in a new tensor.

    Returns:
        (y, s): y in the dtype of `x`, s in the residual's.

    Raises:
        As `rms_norm`.
    """
    mode = check_mode(casting_mode, offset)
    with _on(impl):
        if mode == "none":
            if isinstance(x, torch.Tensor) and x.dtype in _HALF:
                return narrow_add_rmsnorm(x, residual, weight, eps, offset)
            mode = "hf-gemma"
        if offset == 1.0 and mode == "hf-gemma" and weight is not None:
            return gemma_add_rmsnorm(x, residual, weight, eps, numerics=mode)
        return add_rmsnorm(x, residual, _shifted(weight, offset), eps, numerics=mode)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    r"""LayerNorm over the last dimension.

    .. math:: y = \frac{x - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + \epsilon}} \cdot w + b

    Args:
        x: [..., H], fp32, fp16 or bf16.
        weight, bias: [H], or None.
        eps: added to the variance; finite and >= 0.
        impl: as for `rms_norm`.

    Returns:
        [..., H] in the dtype of `x`.

    Raises:
        As `rms_norm`.
    """
    with _on(impl):
        return layernorm(x, weight, bias, eps)


def check_mode(casting_mode: Any, offset: Any) -> str:
    """The numerics of a casting mode; raises where either argument is wrong."""
    try:
        mode = CASTING_MODES[casting_mode]
    except (KeyError, TypeError):
        accepted = ", ".join(map(repr, CASTING_MODES))
        raise ValueError(f"casting_mode must be one of {accepted}, got {casting_mode!r}") from None
    if isinstance(offset, bool) or not isinstance(offset, int | float):
        raise TypeError(f"offset must be a Python number, got {type(offset).__name__}")
    if not -FLT_MAX <= offset <= FLT_MAX:  # as compilers can ask it of a symbol
        raise ValueError(f"offset must be finite, got {offset!r}")
    return mode


def _shifted(weight: Any, offset: float) -> Any:
    """The gain in fp32 where there is an offset: the sum that a kernel would make of it."""
    return weight.float() + offset if offset and isinstance(weight, torch.Tensor) else weight


def _on(impl: str | None) -> contextlib.AbstractContextManager[None]:
    if impl is None:
        return _ANYWHERE
    check_name(impl, "impl")
    if torch.compiler.is_compiling():
        raise ValueError("impl cannot be chosen inside a compiled graph; set FLASHNORM_BACKEND instead")
    return backend(impl)


_ANYWHERE: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
