"""The warm call: a function generated from an operator's operand list.

A warm call finds the entries of its shape, lets one C++ guard of torch compare every tensor with what an entry
was made for (class, dispatch keys, dtype, device, sizes, strides, requires_grad), and launches. What no guard
knows is tested beside it: alignment, the value of eps, overlap of what is written, and whether torch must see
the call (modes, a profiler, a gradient that would be lost). Anything unusual, an exception included, goes to
the cold path, which knows what to say. The text is generated, because a loop over operands in place of this
straight line costs as much as the launch itself; `Op` is its only caller.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._dynamo.guards import TensorGuards

from flashnorm.core.checks import FLT_MAX
from flashnorm.core.dispatch import forced_here

if TYPE_CHECKING:
    from flashnorm.core.op import Op
    from flashnorm.program import Operand

MAX_SHAPES = 8192  # of the warm path; past it all are forgotten, and made again from loaded kernels
MAX_CHAIN = 4  # entries that differ in layouts, dtypes or torch's state but not in shape


class Entry(NamedTuple):
    """One warm way through an operator; a tuple, since unpacking one is the cheapest way to read it.

    Attributes:
        check: the guard. It wants distinct tensors: a stand-in takes the place of an operand that is absent, or
            of an output that is the input itself.
        key: the options as given, which optional outputs are absent, and the route that is forced.
        low: bits that the addresses have below 16 bytes, together.
        scalars: as they were the first time, so that the same objects need no second look.
        extents: bytes that each operand spans, then whether an output may be the tensor that it is like.
        gradless: must not run in grad mode, because some operand requires a gradient.
        counted: whether torch counts the versions of what is written (not in inference mode).
        launch: takes scalars, enable_pdl and the operands (optional outputs only if present).
    """

    check: Callable[..., bool]
    key: tuple[Any, ...]
    low: int
    scalars: tuple[float, ...]
    extents: tuple[Any, ...]
    gradless: bool
    counted: bool
    launch: Callable[..., None]


@dataclass(eq=False)
class Recent:
    """The entries of an operator: the last one that served, and all by shape and `Entry.key`."""

    front: list[Entry]
    by_shape: dict[Any, tuple[Entry, ...]]

    def clear(self) -> None:
        self.front[:] = []
        self.by_shape.clear()


EAGER = """\
    if is_compiling():
        return traced({arguments})
    if dispatch_modes() or function_modes() or profiler._is_profiler_enabled:
        return cold({arguments})
"""
# `front` holds the entry that served last: most calls look like the one before, and need no look-up.
TEMPLATE = """\
def {name}({arguments}):
{eager}
    try:
        {allocate}
        {pointers}
    except (AttributeError, TypeError, RuntimeError):  # no tensor, or no memory: the cold path says what
        return cold({arguments})
    entries = front
    while True:
        for entry in entries:
            check, key, low, ({seen},), ({extents}, alias), gradless, counted, launch = entry
            if (
                ({state}) == key
                and {check}
                and ({any_pointer}) & 15 == low
                and {scalars_ok}
                and {apart}
                and (enable_pdl is None or enable_pdl.__class__ is bool)
                and not (gradless and grad_enabled())
            ):
                {launch}
                if counted:
                    {versions}
                if entries is not front:
                    front[0] = entry
                return {result}
        if entries is not front:
            return cold({arguments})
        try:
            entries = recent.get(({first}.shape, {state}), ())
        except TypeError:  # an option that is no value of anything
            return cold({arguments})
"""


def generate(op: Op, recent: Recent, cold: Callable[..., Any], *, eager: bool) -> Callable[..., Any]:
    """Compiles the warm call of an operator.

    Args:
        op: its declaration.
        recent: the entries by `key`; shared with `remember`.
        cold: takes over whatever is not warm.
        eager: called by people, so that compilers, modes and profilers must be looked for; else by torch's dispatcher.
    """
    names = [o.name for o in op.operands]
    index = {name: i for i, name in enumerate(names)}

    def maybe(name: str, present: str, absent: str) -> str:
        return f"({absent} if {name} is None else {present})" if name in op.optional else present

    outs = {o.name: o.like or names[0] for o in op.operands if o.mode == "out" and o.name not in op.optional}
    written = [o.name for o in op.operands if o.written]
    sure = [n for n in written if n not in op.optional]
    arguments = ", ".join((*names, *op.scalars, *op.options, "enable_pdl"))
    text = TEMPLATE.format(
        name=op.name,
        arguments=arguments,
        eager=EAGER.format(arguments=arguments) if eager else "",
        allocate="; ".join(f"{n} = empty_like({like}) if {n} is None else {n}" for n, like in outs.items()) or "pass",
        pointers="; ".join(f"p{i} = {maybe(n, f'{n}.data_ptr()', '0')}" for n, i in index.items()),
        first=names[0],
        state=", ".join((*op.options, *(f"{n} is None" for n in _extras(op)), "forced_here()")),
        seen=", ".join(f"{s}_seen" for s in op.scalars),
        any_pointer=" | ".join(f"p{i}" for i, o in enumerate(op.operands) if o.kind != "per_row"),
        extents=", ".join(f"n{i}" for i in index.values()),
        scalars_ok=" and ".join(
            f"({s} is {s}_seen or {s}.__class__ is float and 0.0 <= {s} <= {FLT_MAX!r})" for s in op.scalars
        ),
        check=_branched(op, lambda operands: _check(op, operands)),
        apart=_apart(op),
        launch=_branched(op, lambda operands: _launch(op, operands)),
        versions=f"bump(({', '.join(sure)},))"
        + "".join(f"; {n} is None or bump(({n},))" for n in written if n not in sure),
        result=", ".join(outs) or "None",
    )
    scope: dict[str, Any] = {
        # true under Dynamo alone: other tracers bring tensors of their own class, which no guard lets through
        "is_compiling": torch.compiler.is_dynamo_compiling,
        "empty_like": torch.empty_like,
        "forced_here": forced_here,
        "dispatch_modes": torch._C._len_torch_dispatch_stack,
        "function_modes": torch._C._len_torch_function_stack,
        "profiler": torch.autograd.profiler,
        "grad_enabled": torch.is_grad_enabled,
        "bump": torch._C._increment_version,
        "stand_ins": op.stand_ins,
        "front": recent.front,
        "recent": recent.by_shape,
        "traced": op.traced,
        "cold": cold,
    }
    exec(compile(textwrap.dedent(text), f"<flashnorm {op.name}>", "exec"), scope)  # our own text
    return scope[op.name]


def remember(
    op: Op,
    recent: Recent,
    tensors: Sequence[torch.Tensor | None],
    scalars: Sequence[float],
    options: Sequence[Any],
    extents: tuple[Any, ...],
    launch: Callable[..., None],
) -> None:
    """Makes a call warm: puts an entry for it in front of those of its shape."""
    x = tensors[0]
    assert x is not None
    filled = [
        stand_in if t is None or (t is x and op.may_alias(o.name, op.operands[0].name)) else t
        for o, t, stand_in in zip(op.operands, tensors, op.stand_ins, strict=True)
        if t is not None or o.name not in _extras(op)
    ]
    written = [t for o, t in zip(op.operands, tensors, strict=True) if o.written and t is not None]
    low = 0
    for o, t in zip(op.operands, tensors, strict=True):
        low |= 0 if t is None or o.kind == "per_row" else t.data_ptr() & 15
    absent = (t is None for o, t in zip(op.operands, tensors, strict=True) if o.name in _extras(op))
    key = (*options, *absent, forced_here())
    if len(recent.by_shape) >= MAX_SHAPES:
        recent.clear()
    entry = Entry(
        check=TensorGuards(*filled, dynamic_dims_sizes=None, dynamic_dims_strides=None).check,
        key=key,
        low=low,
        scalars=tuple(scalars),
        extents=extents,
        gradless=any(t.requires_grad for t in filled),
        counted=not any(t.is_inference() for t in written),
        launch=launch,
    )
    where = (x.shape, *key)
    recent.by_shape[where] = (entry, *recent.by_shape.get(where, ())[: MAX_CHAIN - 1])
    recent.front[:] = [entry]


def _extras(op: Op) -> list[str]:
    """Outputs that most calls leave out; the text has a branch for them, so that those calls pay nothing."""
    return [o.name for o in op.operands if o.mode == "out" and o.name in op.optional]


def _branched(op: Op, text: Callable[[list[Operand]], str]) -> str:
    """`text` of the operands without the extra outputs where those are absent, else of all."""
    extras = _extras(op)
    everything = text(list(op.operands))
    if not extras:
        return everything
    absent = " and ".join(f"{n} is None" for n in extras)
    return f"({text([o for o in op.operands if o.name not in extras])} if {absent} else {everything})"


def _check(op: Op, operands: list[Operand]) -> str:
    return f"check({', '.join(_guarded(op, op.index(o.name)) for o in operands)})"


def _launch(op: Op, operands: list[Operand]) -> str:
    """The launch with the operands its kernel has; plans leave out inputs that are absent by themselves."""
    return f"launch({', '.join((*op.scalars, 'enable_pdl is not False', *(o.name for o in operands)))})"


def _guarded(op: Op, i: int) -> str:
    """What the guard is shown for operand `i`."""
    operand, x = op.operands[i], op.operands[0].name
    name = operand.name
    tests = [f"{name} is None"] if name in op.optional else []
    tests += [f"{name} is {x}"] if op.may_alias(name, x) else []
    return f"(stand_ins[{i}] if {' or '.join(tests)} else {name})" if tests else name


def _apart(op: Op) -> str:
    """Tests that no written operand shares a byte range with another, but an output with the tensor it may be."""
    extras, seen, groups = _extras(op), set(), []
    order = sorted(range(len(op.operands)), key=lambda i: op.operands[i].name in extras)  # an extra output tests all
    for i in order:
        written = op.operands[i]
        tests = []
        for j, other in enumerate(op.operands):
            late = other.name in extras and written.name not in extras
            if written.written and i != j and not late and frozenset((i, j)) not in seen:
                seen.add(frozenset((i, j)))
                alias = f" or p{i} == p{j} and alias" if op.may_alias(written.name, other.name) else ""
                tests.append(f"(p{i} >= p{j} + n{j} or p{j} >= p{i} + n{i}{alias})")
        if tests:
            together = " and ".join(tests)
            groups.append(f"({written.name} is None or {together})" if written.name in extras else together)
    return "\n            and ".join(groups) or "True"
