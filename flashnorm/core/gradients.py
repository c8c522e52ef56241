"""Norms that autograd records: what a public function runs where an input requires a gradient.

A `Differentiable` stands beside an operator. It is an operator too, `torch.ops.flashnorm.<name>_train`, which writes
nothing but new tensors, so that compilers, modes and checkpointing policies see one node with a gradient. Plain calls
in eager mode record without the dispatcher, which would cost as much again as the recording.

The forward is the operator's own call, with its bits; the backward is an operator of its own. Where a gradient of the
gradient is wanted (`create_graph=True`), PyTorch differentiates the formula instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flashnorm.core import dispatch, library
from flashnorm.core.checks import PLAIN

if TYPE_CHECKING:
    from flashnorm.core.op import Op

Tensor = torch.Tensor
Maybe = torch.Tensor | None  # written out in annotations of functions that PyTorch reads

_library = torch.library.Library("flashnorm", "FRAGMENT")
_functorch = torch._C._functorch.peek_interpreter_stack


@dataclass(frozen=True)
class Incoming:
    """What a backward starts from.

    Attributes:
        dy: gradient of the norm, or None: zeros.
        dh: gradient of the sum with the residual, or None.
        drstd: gradient of rstd, or None.
        h: [..., H], what was normalised, as it was stored.
        weight: or None.
        statistics: as the forward saved them.
        dtypes: of x, the residual, the weight and the bias; None where absent.
        bias_shape: or None.
        needs: which of the four want a gradient.
        eps, numerics, enable_pdl: of the forward.
        in_place: dx may be written over dy.
    """

    dy: Tensor | None
    dh: Tensor | None
    drstd: Tensor | None
    h: Tensor
    weight: Tensor | None
    statistics: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype | None, ...]
    bias_shape: torch.Size | None
    needs: tuple[bool, ...]
    eps: float
    numerics: str
    enable_pdl: bool | None
    in_place: bool


Gradients = tuple[Maybe, Maybe, Maybe, Maybe]  # of x, residual, weight, bias


@dataclass(frozen=True, eq=False)
class Differentiable:
    """One norm with its gradients.

    Attributes:
        name: of the public function.
        op: its operator, whose checks a compiled call has too.
        serve: (x, residual, weight, bias, eps, numerics, enable_pdl) -> (y, [h,] *statistics), all of them new; the
            call that inference makes too.
        backward: the gradients that are needed, None in place of the others.
        formula: (h, weight, dtype of y, eps, numerics) -> y in plain PyTorch, without a bias; for second gradients.
        adds: there is a residual, and h is a result.
        statistics: how many fp32 values a row are saved.
    """

    name: str
    op: Op
    serve: Callable[..., tuple[Tensor, ...]]
    backward: Callable[[Incoming], Gradients]
    formula: Callable[[Tensor, Maybe, torch.dtype, float, str], Tensor]
    adds: bool
    statistics: int

    def __post_init__(self) -> None:
        if not self.adds:  # one with a residual has no argument that keeps it from recording
            library.RECORDED.add(self.op.called)
        outputs = ", ".join(["Tensor"] * (1 + self.adds + self.statistics))
        tensors = "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias"
        scalars = "float eps, str numerics, bool? enable_pdl"
        _library.define(f"{self.name}_train({tensors}, {scalars}) -> ({outputs})")
        _library.impl(f"{self.name}_train", self.serve, "CompositeExplicitAutograd")
        _library.impl(f"{self.name}_train", self._record, "Autograd")
        torch.library.register_fake(f"flashnorm::{self.name}_train", self._fake, lib=_library)

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.flashnorm, f"{self.name}_train").default

    def __call__(self, *args: Any, in_place: bool = False) -> tuple[Tensor, ...]:
        """The norm, recorded: (y, [h,] *statistics). Takes what `serve` takes; `in_place`: dx may overwrite dy."""
        if watched():
            check(self.op, *args)  # here, since fakes see shapes alone
            return self.overload(*args)
        return _Record.apply(self, in_place, *args)

    def _record(self, *args: Any) -> tuple[Tensor, ...]:
        return _Record.apply(self, False, *args)

    def _fake(self, x: Tensor, residual: Maybe, *_: Any) -> tuple[Tensor, ...]:
        rows = [torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(self.statistics)]
        sums = [] if residual is None else [torch.empty_like(residual)]
        return (torch.empty_like(x), *sums, *rows)

    def run(self, *args: Any) -> tuple[Tensor, ...]:
        """The forward, unrecorded: straight, or for whoever watches."""
        subclass = any(isinstance(t, torch.Tensor) and type(t) not in PLAIN for t in args[:4])
        if torch._C._len_torch_dispatch_stack() == 0 and not subclass:
            return self.serve(*args)  # which says what is wrong with arguments
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args)


def watched() -> bool:
    """Whether a call is recorded by somebody else than autograd: a compiler, a mode or a trace."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_tracing()


def on_route(forced: str | None) -> contextlib.AbstractContextManager[None]:
    """The route that a forward was forced to, for its backward: gradients have threads of their own."""
    return contextlib.nullcontext() if forced is None else dispatch.backend(forced)


def check(op: Op, x: Any, residual: Any, weight: Any, bias: Any, eps: Any, numerics: Any, pdl: Any) -> None:
    """Raises where an operator would refuse these arguments."""
    given = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    op._validate([*(given.get(o.name) for o in op.operands), eps, numerics, pdl])


def wanted(*tensors: Any) -> bool:
    """Whether autograd must record a call. Transforms of functorch and forward mode are not served here."""
    if not torch.is_grad_enabled() or not any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        return False
    if torch.compiler.is_compiling():
        return True
    return _functorch() is None and torch.autograd.forward_ad._current_level < 0


class _Record(torch.autograd.Function):
    """Saves what was normalised, the weight, and 4 bytes a row for every statistic."""

    @staticmethod
    def forward(ctx: Any, norm: Differentiable, in_place: bool, *args: Any) -> tuple[Tensor, ...]:
        x, residual, weight, bias, eps, numerics, enable_pdl = args
        outputs = norm.run(*args)
        h, statistics = (outputs[1] if norm.adds else x), outputs[1 + norm.adds :]
        ctx.save_for_backward(h, weight, *statistics)
        if norm.adds or len(statistics) > 1:
            ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.scalars, ctx.forced = norm, (eps, numerics, enable_pdl, in_place), dispatch.forced_here()
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, residual, weight, bias))
        ctx.bias_shape = None if bias is None else bias.shape
        return outputs

    @staticmethod
    def backward(ctx: Any, dy: Maybe, *more: Maybe) -> tuple[Any, ...]:
        norm: Differentiable = ctx.norm
        h, weight, *statistics = ctx.saved_tensors
        dh, drstd = (more[0], None) if norm.adds else (None, more[0] if norm.statistics == 1 else None)
        needs = tuple(ctx.needs_input_grad[2:6])
        saved = (h, weight, tuple(statistics))
        given = Incoming(dy, dh, drstd, *saved, ctx.dtypes, ctx.bias_shape, needs, *ctx.scalars)
        if dy is None and drstd is None:
            gradients = _of_sum(given)
        elif torch.is_grad_enabled():
            gradients = _by_formula(norm, given)
        else:
            with on_route(ctx.forced):
                gradients = norm.backward(given)
        return (None, None, *gradients, None, None, None)


def _of_sum(given: Incoming) -> Gradients:
    """Nobody uses the norm: what arrives at the sum goes on as it is."""
    dx, dresidual = (
        given.dh.to(dtype) if given.dh is not None and dtype is not None and need else None
        for dtype, need in zip(given.dtypes[:2], given.needs[:2], strict=True)
    )
    return dx, dresidual, None, None


def _by_formula(norm: Differentiable, given: Incoming) -> Gradients:
    """The gradients as expressions that autograd can differentiate again."""
    x, residual, _, bias = given.dtypes
    assert x is not None
    h, weight = (t if t is None or t.requires_grad else t.detach().requires_grad_() for t in (given.h, given.weight))
    assert h is not None
    with torch.enable_grad():
        # Views of their own: what is differentiated here are these, wherever they come from.
        h_here, weight_here = (None if t is None else t.view_as(t) for t in (h, weight))
        assert h_here is not None
        results, incoming = [norm.formula(h_here, weight_here, x, given.eps, given.numerics)], [given.dy]
        if given.drstd is not None:
            results.append(torch.rsqrt(h_here.float().pow(2).mean(-1) + given.eps))
            incoming.append(given.drstd)
        pairs = [(y, dy) for y, dy in zip(results, incoming, strict=True) if dy is not None]
        sources = [t for t in (h_here, weight_here) if t is not None]
        found = torch.autograd.grad(
            [y for y, _ in pairs], sources, [dy for _, dy in pairs], create_graph=True, allow_unused=True
        )
        total = found[0]
        if given.dh is not None:
            total = given.dh if total is None else total + given.dh
        dweight = found[1] if given.needs[2] and len(found) > 1 else None
        dbias = None
        if given.needs[3] and given.dy is not None and given.bias_shape is not None:
            dbias = given.dy.float().sum_to_size(given.bias_shape).to(bias)
        dx = total.to(x) if total is not None and given.needs[0] else None
        dresidual = total.to(residual) if total is not None and residual is not None and given.needs[1] else None
        return dx, dresidual, dweight, dbias
