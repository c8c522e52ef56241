"""RMSNorm with its statistics in the input's own dtype: what Liger-Kernel calls the casting mode "none".

Its forward is plain PyTorch on every device, since the mode exists to be compared with; the backward is the kernels'.
"""

from __future__ import annotations

import torch

from flashnorm.core import gradients, sharding
from flashnorm.ops import differentiable
from flashnorm.ops.rmsnorm import ADD_RMSNORM, RMSNORM

Tensor = torch.Tensor


def _squeezed(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=dtype).item()


def _formula(h: Tensor, weight: Tensor | None, dtype: torch.dtype, eps: float, _: str) -> Tensor:
    return _norm(h, weight, dtype, eps)[0]


def _norm(h: Tensor, weight: Tensor | None, dtype: torch.dtype, eps: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt((h * h).float().mean(-1, keepdim=True) + eps)
    n = h.float() * rstd
    y = n if weight is None else n * weight.float()
    return y.to(dtype), rstd.to(dtype).float().squeeze(-1)


def _serve(x: Tensor, _: None, weight: Tensor | None, __: None, eps: float, *___: object) -> tuple[Tensor, ...]:
    return _norm(x, weight, x.dtype, eps)


_NORM = differentiable.rms(RMSNORM, _serve, 0.0, name="narrow_rmsnorm", formula=_formula)


def narrow_rmsnorm(x: Tensor, weight: Tensor | None, eps: float, offset: float, in_place: bool) -> Tensor:
    """x * rstd * (w + offset), where eps, the offset, the squares and w + offset are rounded to the dtype of `x`.

    Their sum is fp32, and so are rstd and the product, which is rounded once; rstd is saved for the backward rounded.

    Args:
        x: [..., H], fp16 or bf16.
        weight: broadcasts to x; in another dtype than that of `x`, w + offset is fp32.
        eps: finite and >= 0.
        offset: added to the weight.
        in_place: the backward may write into the gradient it is given.
    """
    if sharding.sharded(x, weight):
        y: Tensor = sharding.over_rows(narrow_rmsnorm, [x], [weight], eps, offset, False)
        return y
    gradients.check(RMSNORM, x, None, weight, None, eps, "cake", None)
    if weight is not None and offset:
        rounded = _squeezed(offset, x.dtype)
        weight = weight + rounded if weight.dtype == x.dtype else weight.float() + rounded
    eps = _squeezed(eps, x.dtype)
    if gradients.wanted(x, weight):
        return _NORM(x, None, weight, None, eps, "cake", None, in_place=in_place)[0]
    return _serve(x, None, weight, None, eps)[0]


def narrow_add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(`narrow_rmsnorm` of the sum in the dtype of `x`, the sum in the residual's).

    Args:
        x: [..., H], fp16 or bf16.
        residual: of the same shape, fp32, fp16 or bf16.
        weight, eps, offset: those of `narrow_rmsnorm`.
    """
    if sharding.sharded(x, residual, weight):
        pair: tuple[Tensor, Tensor] = sharding.over_rows(narrow_add_rmsnorm, [x, residual], [weight], eps, offset)
        return pair
    gradients.check(ADD_RMSNORM, x, residual, weight, None, eps, "cake", None)  # PyTorch's sum would broadcast
    total = (x.float() + residual.float()).to(residual.dtype)
    return narrow_rmsnorm(total, weight, eps, offset, False).to(x.dtype), total
