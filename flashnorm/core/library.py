"""An operator as torch.library knows it: its definition, and what stands in front of its kernel there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from flashnorm.core import checks

if TYPE_CHECKING:
    from flashnorm.core.op import Op

_library = torch.library.Library("flashnorm", "DEF")
RECORDED: set[str] = set()  # public functions that record a gradient, where no argument keeps them from it


def define(op: Op, kernel: Callable[..., None]) -> Any:
    """Registers an operator by its schema, with fake and autograd kernels; returns its overload."""
    _library.define(op.schema())
    _library.impl(op.name, _decoded(op, kernel), "CompositeExplicitAutograd")
    _library.impl(op.name, _autograd(op), "Autograd")
    torch.library.register_fake(f"flashnorm::{op.name}", _fake, lib=_library)
    return getattr(torch.ops.flashnorm, op.name).default


def _decoded(op: Op, kernel: Callable[..., None]) -> Callable[..., None]:
    """In front of the dispatcher's call: bytes become what they are, and numbers in CPU tensors numbers."""
    if not op.encoded and not op.by_value:
        return kernel

    def decoded(*args: Any) -> None:
        given = list(args[: len(args) - len(op.encoded)])
        for i, word in zip(op.encoded, args[len(given) :], strict=True):
            given[i] = given[i].view(getattr(torch, word))
        for name, (scalar, _) in op.by_value.items():
            if given[op.index(name)] is not None:
                tensor, number = checks.split(op, name, given[op.index(name)])
                given[op.index(name)], given[len(op.operands) + op.scalars.index(scalar)] = tensor, number
        kernel(*given)

    return decoded


def _autograd(op: Op) -> Callable[..., None]:
    """Raises where a gradient would be lost; below it, nothing records."""

    def refusing(*args: Any) -> None:
        recording = torch.is_grad_enabled()
        for operand, tensor in zip(op.operands, args, strict=False):
            if tensor is not None and ((recording and tensor.requires_grad) or checks.has_tangent(tensor)):
                raise RuntimeError(f"{op.called}: {op.label(operand)} requires grad, but {_lost(op, args)}")
        with torch._C._AutoDispatchBelowAutograd():
            op.overload(*args)

    return refusing


def _lost(op: Op, args: tuple[Any, ...]) -> str:
    """Why a gradient would be lost, and what to do about it."""
    if op.called in RECORDED and not checks.transformed():  # a call without these arguments would not have come here
        named = {o.name for o, t in zip(op.operands, args, strict=False) if t is not None}
        by = " and ".join(name for name in ("row_index", "input_scale") if name in named) or "out"
        return (
            f"a call with {by} records no gradient; leave {by} out, or call it under torch.no_grad(), or on "
            "detached tensors"
        )
    return checks.unrecorded()


def refuse_vmap(op: Op, tensors: Iterable[torch.Tensor | None]) -> None:
    """Raises RuntimeError under `torch.func.vmap`, whose own text does not say what to do."""
    if any(t is not None and torch._C._functorch.is_batchedtensor(t) for t in tensors):
        raise RuntimeError(
            f"{op.called}: torch.func.vmap has no batching rule for this operator; hand the batch over as further "
            "dimensions in front: each row is normalised by itself"
        )


def _fake(*_: Any) -> None:
    """Operators return nothing: they write into what they are given."""
