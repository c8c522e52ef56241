"""The gradients of RMSNorm and LayerNorm: their backward operators and formulas, as `core.gradients` takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from flashnorm.core.gradients import Differentiable, Gradients, Incoming
from flashnorm.core.op import NUMERICS, Op
from flashnorm.ops.backward import layernorm_backward, rmsnorm_backward
from flashnorm.reference import norms

Tensor = torch.Tensor
Serve = Callable[..., tuple[Tensor, ...]]
Formula = Callable[[Tensor, Tensor | None, torch.dtype, float, str], Tensor]


def rms(
    op: Op, serve: Serve, offset: float, *, name: str = "", adds: bool = False, formula: Formula | None = None
) -> Differentiable:
    """RMSNorm of x, or of its sum with a residual; `offset` is added to the weight."""
    formula = formula or functools.partial(_rms_formula, offset=offset)
    return Differentiable(name or op.name, op, serve, functools.partial(_rms_backward, offset=offset), formula, adds, 1)


def layer(op: Op, serve: Serve, *, adds: bool = False) -> Differentiable:
    """LayerNorm of x, or of its sum with a residual."""
    return Differentiable(op.name, op, serve, _layer_backward, _layer_formula, adds, 3)


def _rms_formula(
    h: Tensor, weight: Tensor | None, dtype: torch.dtype, eps: float, numerics: str, *, offset: float
) -> Tensor:
    mode = NUMERICS[numerics]
    return norms.rms_norm(h.float(), weight, dtype, eps=eps, numerics=mode, offset=offset)[0].to(dtype)


def _layer_formula(h: Tensor, weight: Tensor | None, dtype: torch.dtype, eps: float, numerics: str) -> Tensor:
    return norms.layer_norm(h.float(), weight, None, eps=eps)[0].to(dtype)


def _rms_backward(given: Incoming, *, offset: float) -> Gradients:
    h, weight, (rstd,) = given.h, given.weight, given.statistics
    dh = given.dh
    if given.drstd is not None:  # d rstd / dh = -rstd^3 h / H
        dh = (given.drstd * rstd.pow(3) / -h.shape[-1]).unsqueeze(-1) * h.float()
    dy = torch.zeros_like(h, dtype=given.dtypes[0]) if given.dy is None else given.dy
    return _named(
        rmsnorm_backward(
            dy,
            h,
            weight,
            rstd,
            wanted=_wanted(given, dy),
            g_residual=dh,
            weight_offset=offset,
            round_norm=NUMERICS[given.numerics] == "hf-llama" and not offset,
            enable_pdl=given.enable_pdl,
        )
    )


def _layer_backward(given: Incoming) -> Gradients:
    assert given.dy is not None  # nothing else of a LayerNorm has a gradient without it
    wanted = _wanted(given, given.dy)
    return _named(
        layernorm_backward(
            given.dy,
            given.h,
            given.weight,
            *given.statistics,
            wanted=wanted,
            g_residual=given.dh,
            enable_pdl=given.enable_pdl,
        )
    )


def _wanted(given: Incoming, dy: Tensor) -> dict[str, torch.dtype | Tensor | None]:
    """The gradients that are needed, in their dtypes; dx in place of `dy` where the caller asked for that."""
    names = ("dx", "dresidual", "dweight", "dbias")
    wanted: dict[str, torch.dtype | Tensor | None] = {
        name: dtype for name, dtype, need in zip(names, given.dtypes, given.needs, strict=True) if need
    }
    if given.in_place and given.dy is not None and "dx" in wanted and dy.stride() == given.h.stride():
        wanted["dx"] = dy
    return wanted


def _named(found: dict[str, Tensor]) -> Gradients:
    return found.get("dx"), found.get("dresidual"), found.get("dweight"), found.get("dbias")
