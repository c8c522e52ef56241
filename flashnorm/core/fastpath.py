"""The warm call: a function generated from an operator's operand list.

A warm call looks one key up and launches. The key holds everything a plan was made from (class, dtype,
shape, strides and device number of every tensor, alignment, options, forced route; a build of torch has one
kind of accelerator, so that a number says which device), so a hit needs no further
check but three that no key can hold: the value of eps, overlap of what is written, and whether torch
must see the call (grad, modes, functorch, profiler). Anything unusual, an exception included, goes to
the checked path, which knows what to say. The text is generated, because a loop over operands in place
of this straight line costs as much as the launch itself; `Op` is its only caller.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flashnorm.core.checks import FLT_MAX
from flashnorm.core.dispatch import forced_here

if TYPE_CHECKING:
    from flashnorm.core.op import Op

TEMPLATE = """\
def {name}({arguments}):
    if is_compiling():
        return traced({arguments})
    if dispatch_modes() or function_modes() or functorch() is not None or profiling():
        return checked({arguments})
    try:
        {allocate}
        {pointers}
        plan = plans.get(({options}, forced_here(), ({any_pointer}) & 15, {key}))
    except (AttributeError, TypeError, RuntimeError):  # no tensor, no memory, no hash: the checked path says what
        return checked({arguments})
    if plan is not None:
        {extents}, alias = plan.extents
        if (
            {scalars_ok}
            and {present} # no memory: a meta tensor shares its device number with the CPU
            and {apart}
            and not (grad_enabled() and ({requires_grad}))
        ):
            {launch}
            {versions}
            return {result}
    return checked({arguments})
"""


def generate(op: Op) -> Callable[..., Any]:
    """Compiles the warm call of an operator."""
    names = [o.name for o in op.operands]
    optional = {o.name for o in op.operands if o.name in op.optional}
    index = {name: i for i, name in enumerate(names)}

    def maybe(name: str, present: str, absent: str) -> str:
        return f"({absent} if {name} is None else {present})" if name in optional else present

    outs = {o.name: o.like or names[0] for o in op.operands if o.mode == "out" and o.name not in optional}
    apart = [f"({test})" for o in op.operands for test in _apart(op, o.name, index)]
    written = [o.name for o in op.operands if o.written]
    arguments = ", ".join((*names, *op.scalars, *op.options, "enable_pdl"))
    text = TEMPLATE.format(
        name=op.name,
        arguments=arguments,
        allocate="; ".join(f"{n} = empty_like({like}) if {n} is None else {n}" for n, like in outs.items()) or "pass",
        pointers="; ".join(f"p{i} = {maybe(n, f'{n}.data_ptr()', '16')}" for n, i in index.items()),
        any_pointer=" | ".join(f"p{i}" for i in index.values()),
        options=", ".join(op.options) or "None",
        key=", ".join(
            maybe(n, f"({n}.__class__, {n}.dtype, {n}.shape, {n}.stride(), {n}.get_device())", "None") for n in names
        ),
        present=" and ".join(f"p{i}" for i in index.values()),
        extents=", ".join(f"n{i}" for i in index.values()),
        scalars_ok=" and ".join(f"{s}.__class__ is float and 0.0 <= {s} <= {FLT_MAX!r}" for s in op.scalars),
        apart="\n            and ".join(apart),
        requires_grad=" or ".join(maybe(n, f"{n}.requires_grad", "False") for n in names),
        launch=_launch(op),
        versions="; ".join(f"bump({n})" for n in written),
        result=", ".join(outs) or "None",
    )
    scope: dict[str, Any] = {
        "is_compiling": torch.compiler.is_compiling,
        "empty_like": torch.empty_like,
        "forced_here": forced_here,
        "dispatch_modes": torch._C._len_torch_dispatch_stack,
        "function_modes": torch._C._len_torch_function_stack,
        "functorch": torch._C._functorch.peek_interpreter_stack,
        "profiling": torch._C._autograd._profiler_enabled,
        "grad_enabled": torch.is_grad_enabled,
        "bump": bump_version,
        "plans": op.plans,
        "traced": op.traced,
        "checked": op.checked,
    }
    exec(compile(textwrap.dedent(text), f"<flashnorm {op.name}>", "exec"), scope)  # noqa: S102  # our own text
    return scope[op.name]  # type: ignore[no-any-return]


def _launch(op: Op) -> str:
    """The launch with the operands its kernel has; plans leave out inputs that are absent by themselves."""

    def call(names: list[str]) -> str:
        return f"plan.launch({', '.join((*op.scalars, 'enable_pdl is None or bool(enable_pdl)', *names))})"

    names = [o.name for o in op.operands]
    extra = [o.name for o in op.operands if o.mode == "out" and o.name in op.optional]
    if not extra:
        return call(names)
    plain = [n for n in names if n not in extra]
    tests = " and ".join(f"{n} is None" for n in extra)
    return f"{call(plain)} if {tests} else {call(names)}"


def _apart(op: Op, name: str, index: dict[str, int]) -> list[str]:
    """Tests that the written operand `name` shares no byte range with any operand before or after it."""
    tests = []
    i = index[name]
    for other, j in index.items():
        both = op.operands[i].written and op.operands[j].written
        if not op.operands[i].written or other == name or (both and j < i):
            continue
        alias = " or p{} == p{} and alias".format(i, j) if op.may_alias(name, other) else ""
        tests.append(f"p{i} >= p{j} + n{j} or p{j} >= p{i} + n{i}{alias}")
    return tests


def bump_version(tensor: torch.Tensor | None) -> None:
    """Tells autograd that a tensor was written; tensors made in inference mode keep no count."""
    if tensor is not None and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
