"""A residual addition and the norm of the sum, both new tensors, so that both are differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashnorm.core import gradients, sharding
from flashnorm.core.op import Op
from flashnorm.ops import differentiable
from flashnorm.ops.layernorm import ADD_LAYERNORM, STATISTICS
from flashnorm.ops.rmsnorm import ADD_RMSNORM, GEMMA_ADD_RMSNORM

Tensor = torch.Tensor


# With every operand by position, None where it is to be made: x, residual, h, weight, out, rstd, eps, numerics, PDL.
add_rmsnorm_with_rstd = ADD_RMSNORM.behind()


def _rms(op: Op, offset: float, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call behind the public function, whose results are (y, h)."""

    def serve(
        x: Tensor, residual: Any, weight: Any, _: None, eps: float, numerics: str, pdl: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        rstd = op.empty("rstd", x)
        y, h = call(x, residual, None, weight, None, rstd, eps, numerics, pdl)
        return y, h, rstd

    norm = differentiable.rms(op, serve, offset, adds=True)

    def add(x: Any, residual: Any, weight: Any, *rest: Any) -> tuple[Tensor, Tensor]:
        if sharding.sharded(x, residual, weight):
            pair: tuple[Tensor, Tensor] = sharding.over_rows(add, [x, residual], [weight], *rest)
            return pair
        if gradients.wanted(x, residual, weight):
            y, h, _ = norm(x, residual, weight, None, *rest)
            return y, h
        result: tuple[Tensor, Tensor] = call(x, residual, None, weight, None, None, *rest)
        return result

    return add


_ADD = _rms(ADD_RMSNORM, 0.0, add_rmsnorm_with_rstd)
_GEMMA_ADD = _rms(GEMMA_ADD_RMSNORM, 1.0, GEMMA_ADD_RMSNORM.behind())


def add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    numerics: str = "cake",
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""The sum of `x` and a residual, and its RMSNorm; differentiable, and nothing is overwritten.

    .. math:: h = x + \mathrm{residual}, \quad y = \frac{h}{\sqrt{\operatorname{mean}(h^2) + \epsilon}} \cdot w

    Args:
        x: [..., H], fp32, fp16 or bf16, 1 <= H <= 262,144; any strides.
        residual: of the same shape, fp32, fp16 or bf16.
        weight: [H], fp32, fp16 or bf16; None for no weight.
        eps: added to the mean square, in fp32; finite and >= 0.
        numerics: what is normalised: "cake", "hf-gemma", "torch", "hf-llama" and "vllm" the sum as it is returned;
            "flashinfer" the unrounded fp32 sum (its backward starts from the rounded one). "hf-llama" also rounds
            before the weight.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.

    Returns:
        (y, h): y [..., H] in the dtype of `x`, h [..., H] in the residual's, rounded once.

    Raises:
        TypeError: for something that is no tensor, or an eps that is no number.
        ValueError: for a wrong dtype, shape, device or option.
        RuntimeError: where no route serves the device.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _ADD(x, residual, weight, eps, numerics, enable_pdl)
    return result


def gemma_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    numerics: str = "cake",
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""`add_rmsnorm` with the gain of Gemma's checkpoints, :math:`w + 1`, added in fp32.

    Arguments, results and errors are those of `add_rmsnorm`; one rounding at the end in every mode.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _GEMMA_ADD(x, residual, weight, eps, numerics, enable_pdl)
    return result


_with_statistics = ADD_LAYERNORM.behind()


def _serve_layer(
    x: Tensor, residual: Any, weight: Any, bias: Any, eps: float, numerics: str, pdl: bool | None
) -> tuple[Tensor, ...]:
    statistics = [ADD_LAYERNORM.empty(name, x) for name in STATISTICS]
    y, h = _with_statistics(x, residual, None, weight, bias, None, *statistics, eps, numerics, pdl)
    return y, h, *statistics


_LAYER = differentiable.layer(ADD_LAYERNORM, _serve_layer, adds=True)


def add_layernorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    numerics: str = "cake",
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""The sum of `x` and a residual, and its LayerNorm; differentiable, and nothing is overwritten.

    .. math:: h = x + \mathrm{residual}, \quad y = \operatorname{layernorm}(h)

    Args:
        x: [..., H], fp32, fp16 or bf16, 1 <= H <= 262,144; any strides.
        residual: of the same shape, fp32, fp16 or bf16.
        weight: [H], the gain; fp32, fp16 or bf16; None for none.
        bias: [H]; fp32, fp16 or bf16; None for none.
        eps: added to the variance, in fp32; finite and >= 0.
        numerics: what is normalised: "flashinfer" the unrounded fp32 sum (its backward starts from the rounded one),
            every other mode the sum as it is returned.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.

    Returns:
        (y, h): y [..., H] in the dtype of `x`, h [..., H] in the residual's, rounded once.

    Raises:
        As `add_rmsnorm`.
    """
    rest = (eps, numerics, enable_pdl)
    result: tuple[torch.Tensor, torch.Tensor]
    if sharding.sharded(x, residual, weight, bias):
        more: dict[str, Any] = {"numerics": numerics, "enable_pdl": enable_pdl}
        result = sharding.over_rows(add_layernorm, [x, residual], [weight, bias], eps, **more)
        return result
    if gradients.wanted(x, residual, weight, bias):
        y, h, *_ = _LAYER(x, residual, weight, bias, *rest)
        return y, h
    result = _with_statistics(x, residual, None, weight, bias, None, None, None, None, *rest)
    return result
