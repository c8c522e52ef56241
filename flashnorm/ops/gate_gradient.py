"""What autograd records of a norm under a gate.

The forward is the operator's own call, with its bits; saved are its three arguments. The backward takes RMSNorm's
kernels for the rows and PyTorch for the gate, in fp32. Compilers and modes are handed the formula itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flashnorm.core import dispatch, gradients
from flashnorm.core.gradients import Maybe
from flashnorm.ops.backward import rmsnorm_backward
from flashnorm.ops.rmsnorm import rmsnorm

Tensor = torch.Tensor


class Form(NamedTuple):
    """How the norm and the gate are joined: the arguments of `rmsnorm_gate`."""

    eps: float
    activation: str
    before: bool
    enable_pdl: bool | None


def record(form: Form, serve: Callable[[Tensor, Maybe, Tensor], Tensor], x: Any, weight: Any, gate: Any) -> Tensor:
    """serve(x, weight, gate), recorded."""
    y: Tensor = _Record.apply(form, serve, x, weight, gate)
    return y


def formula(form: Form, x: Tensor, weight: Maybe, gate: Tensor) -> Tensor:
    """The result by differentiable functions, in fp32, rounded once; its activation is PyTorch's."""
    act, _ = _activated(form, gate)
    h = x.float() if form.before else x.float() * act
    y = rmsnorm(h, weight, form.eps, enable_pdl=form.enable_pdl)
    assert isinstance(y, torch.Tensor)
    return (y * act if form.before else y).to(x.dtype)


def _activated(form: Form, gate: Tensor) -> tuple[Tensor, Tensor]:
    """(act(g), sigmoid(g)), fp32."""
    g = gate.float()
    s = torch.sigmoid(g)
    return (s if form.activation == "sigmoid" else g * s), s


def _slope(form: Form, act: Tensor, s: Tensor) -> Tensor:
    """act'(g), of what `_activated` gives."""
    return s * (1 - s) if form.activation == "sigmoid" else s + act * (1 - s)


class _Record(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, serve: Callable[..., Tensor], x: Tensor, weight: Maybe, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.form, ctx.forced = form, dispatch.forced_here()
        return serve(x, weight, gate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        form, saved, needs = ctx.form, ctx.saved_tensors, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return (None, None, *_differentiable(form, saved, needs, dy))
        with gradients.on_route(ctx.forced):
            return (None, None, *_gradients(form, saved, needs, dy))


def _gradients(form: Form, saved: Sequence[Any], needs: Sequence[bool], dy: Tensor) -> tuple[Maybe, Maybe, Maybe]:
    """Of x, the weight and the gate."""
    (x, weight, gate), (for_x, for_weight, for_gate) = saved, needs
    act, s = _activated(form, gate)
    d, wide = dy.float(), x.float()
    h = wide if form.before else wide * act
    n, rstd = rmsnorm(h, weight, form.eps, enable_pdl=form.enable_pdl, return_rstd=True)
    wanted: dict[str, Any] = {"dweight": weight.dtype} if for_weight else {}
    if for_x or (for_gate and not form.before):
        wanted["dx"] = torch.float32
    arriving = d * act if form.before else d
    found = rmsnorm_backward(arriving, h, weight, rstd, wanted=wanted, enable_pdl=form.enable_pdl) if wanted else {}
    dx = dgate = None
    if for_x:
        dx = (found["dx"] if form.before else found["dx"] * act).to(x.dtype)
    if for_gate:
        dgate = ((d * n if form.before else found["dx"] * wide) * _slope(form, act, s)).to(gate.dtype)
    return dx, found.get("dweight"), dgate


def _differentiable(form: Form, saved: Sequence[Any], needs: Sequence[bool], dy: Tensor) -> list[Maybe]:
    """The same as expressions that autograd can differentiate again."""
    with torch.enable_grad():
        # Views of their own: what is differentiated here are these, wherever they come from.
        here = [t.view_as(t) if need else t for t, need in zip(saved, needs, strict=True)]
        sources = [t for t, need in zip(here, needs, strict=True) if need]
        found = iter(torch.autograd.grad(formula(form, *here), sources, dy, create_graph=True, allow_unused=True))
        return [next(found) if need else None for need in needs]
