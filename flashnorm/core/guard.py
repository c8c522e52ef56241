"""Guards: a launch that first makes sure that the call is the one its plan was made for.

A guarded launch takes scalars, enable_pdl and every operand of the operator (None where absent) and returns
whether it launched. It compares dtype, device, shape, strides and alignment of every tensor, and the numbers that its
kernel does not take; and it refuses where something written overlaps something else. One is in C++ and adds a tenth
of a microsecond to the kernel's own launch; the other, in Python, serves plans that copy, PyTorch's own formula, and
machines without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flashnorm.core import layout, native
from flashnorm.core.operands import WIDE, View
from flashnorm.core.plan import Plan

if TYPE_CHECKING:
    from flashnorm.core.op import Op

Tensors = Sequence[torch.Tensor | None]
Guarded = Callable[..., bool]


def guarded(op: Op, made: Plan, tensors: Tensors, scalars: Sequence[float], given: Tensors | None = None) -> Guarded:
    """The guarded launch of a plan, made for these tensors and numbers.

    Args:
        given: what calls come with, where the tensors are views of that from its first byte on.
    """
    launch = _in_cpp(op, made, tensors, scalars, given or tensors) if made.kernel is not None else None
    if launch is None:
        return made.on_device(_in_python(op, made, tensors, scalars))
    return native.launch(launch, made.on_device(launch), made.device)


def _fixed(made: Plan, scalars: Sequence[float]) -> list[tuple[int, float]]:
    """The numbers that go with other programs of the operator: a call with another one is another call."""
    return [(i, v) for i, v in enumerate(scalars) if i not in made.leading]


def _in_cpp(op: Op, made: Plan, tensors: Tensors, scalars: Sequence[float], given: Tensors) -> Guarded | None:
    order = [view.position for view in made.views]
    if order != sorted(order) or any(view.copy for view in made.views):
        return None
    from flashnorm.backends.guard import load

    make = load()
    if make is None:
        return None
    by_position = {view.position: view for view in made.views}
    fixed = _fixed(made, scalars)
    words: list[Any] = [made.kernel, len(op.scalars) + 1, len(made.leading), *made.leading]
    words += [len(fixed), *(word for pair in fixed for word in pair), len(op.operands)]
    for i, operand in enumerate(op.operands):
        words.append(given[i])
        if given[i] is not None:
            words += [operand.written, operand.kind in WIDE, _alias(op, i, tensors)]
            words += _taken(by_position.get(i), tensors[i], given[i])
    return make(*words)


def _taken(view: View | None, tensor: torch.Tensor | None, given: torch.Tensor | None) -> list[Any]:
    """What the kernel takes in place of what is given: rank, size, strides, as bytes, dtype; -1 where it takes that."""
    if view is None or tensor is None or (view.size is None and tensor is given):
        return [-1]
    size = tuple(tensor.shape) if view.size is None else view.size
    stride = tensor.stride() if view.stride is None else view.stride
    return [len(size), *size, *stride, view.raw, None if tensor is given else tensor]


def _alias(op: Op, i: int, tensors: Tensors) -> int:
    """The operand that operand `i` may be, if they are laid out alike; else -1."""
    operand, t = op.operands[i], tensors[i]
    if t is None or operand.like is None or not op.may_alias(operand.name, operand.like):
        return -1
    like = tensors[op.index(operand.like)]
    alike = like is not None and _facts(t) == _facts(like)
    return op.index(operand.like) if alike else -1


def _in_python(op: Op, made: Plan, tensors: Tensors, scalars: Sequence[float]) -> Guarded:
    fixed = _fixed(made, scalars)
    first = len(op.scalars) + 1
    wanted = [_facts(t) for t in tensors]
    low = _low(op, tensors)
    known = _crossing(op, tensors)  # interleaved slices: the exact check has found them apart

    def launch(*args: Any) -> bool:
        given = args[first:]
        if any(args[i] != value for i, value in fixed):
            return False
        if [_facts(t) for t in given] != wanted or _low(op, given) != low or not apart(op, given, known):
            return False
        made.run(*args)
        return True

    return launch


def _facts(t: torch.Tensor | None) -> Any:
    """What must be as it was, that there is memory included."""
    return None if t is None else (t.dtype, t.device, t.shape, t.stride(), t.is_neg(), t.data_ptr() != 0)


def _low(op: Op, tensors: Tensors) -> list[int]:
    """Bits that each address has below 16 bytes."""
    return [
        0 if t is None or operand.kind not in WIDE else t.data_ptr() & (layout.ACCESS_BYTES - 1)
        for operand, t in zip(op.operands, tensors, strict=True)
    ]


def _crossing(op: Op, tensors: Tensors) -> dict[tuple[int, int], int]:
    """Distances of the pairs, one of them written, whose byte ranges cross; an output may be the tensor it is like."""
    spans = [
        None
        if t is None or not t.numel()
        else (t.data_ptr(), t.data_ptr() + layout.extent(*op.reach(o, t, tensors), t.element_size()))
        for o, t in zip(op.operands, tensors, strict=True)
    ]
    found = {}
    for i, a in enumerate(spans):
        for j, b in enumerate(spans):
            if a is None or b is None or i == j or not op.operands[i].written:
                continue
            same = a == b and (_alias(op, i, tensors) == j or _alias(op, j, tensors) == i)
            if a[0] < b[1] and b[0] < a[1] and not same:
                found[i, j] = a[0] - b[0]
    return found


def apart(op: Op, tensors: Tensors, known: dict[tuple[int, int], int]) -> bool:
    """Whether no pair crosses, but at a distance that is known to be good."""
    return all(known.get(pair) == distance for pair, distance in _crossing(op, tensors).items())
