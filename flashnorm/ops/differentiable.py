"""The gradients of RMSNorm and LayerNorm: their backward operators and formulas, as `core.gradients` takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from flashnorm.core.gradients import Differentiable, Gradients, Incoming
from flashnorm.core.op import NUMERICS
from flashnorm.reference import norms

Tensor = torch.Tensor
Serve = Callable[..., tuple[Tensor, ...]]


def rms(name: str, serve: Serve, offset: float, *, adds: bool = False) -> Differentiable:
    """RMSNorm of x, or of its sum with a residual; `offset` is added to the weight."""
    formula = functools.partial(_rms_formula, offset=offset)
    return Differentiable(name, serve, functools.partial(_backward, offset=offset), formula, adds, 1)


def layer(name: str, serve: Serve, *, adds: bool = False) -> Differentiable:
    """LayerNorm of x, or of its sum with a residual."""
    return Differentiable(name, serve, _backward, _layer_formula, adds, 3)


def _rms_formula(
    h: Tensor, weight: Tensor | None, dtype: torch.dtype, eps: float, numerics: str, *, offset: float
) -> Tensor:
    mode = NUMERICS[numerics]
    return norms.rms_norm(h.float(), weight, dtype, eps=eps, numerics=mode, offset=offset)[0].to(dtype)


def _layer_formula(h: Tensor, weight: Tensor | None, dtype: torch.dtype, eps: float, numerics: str) -> Tensor:
    return norms.layer_norm(h.float(), weight, None, eps=eps)[0].to(dtype)


def _backward(given: Incoming, *, offset: float = 0.0) -> Gradients:
    """INTERIM plain PyTorch."""
    h, rstd = given.h.float(), given.statistics[-1].unsqueeze(-1)
    centred = len(given.statistics) == 3
    xh = (((h - given.statistics[0].unsqueeze(-1)) - given.statistics[1].unsqueeze(-1)) if centred else h) * rstd
    dtype, residual, _, bias = given.dtypes
    dweight = dbias = dx = None
    if given.dy is not None:
        dy = given.dy.float()
        gw = dy if given.weight is None else dy * (given.weight.float() + offset)
        c = (gw * xh).mean(-1, keepdim=True)
        dx = rstd * ((gw - gw.mean(-1, keepdim=True) if centred else gw) - c * xh)
        if given.needs[2] and given.weight is not None:
            n = xh.to(dtype).float() if NUMERICS[given.numerics] == "hf-llama" and not offset and not centred else xh
            dweight = (dy * n).sum_to_size(given.weight.shape).to(given.weight.dtype)
        if given.needs[3]:
            dbias = dy.sum_to_size(given.bias_shape).to(bias)
    if given.drstd is not None:
        more = given.drstd.unsqueeze(-1) * (-(rstd.pow(3)) / h.shape[-1]) * h
        dx = more if dx is None else dx + more
    if given.dh is not None:
        dx = dx + given.dh.float()
    return (
        dx.to(dtype) if given.needs[0] else None,
        dx.to(residual) if residual is not None and given.needs[1] else None,
        dweight,
        dbias,
    )
