"""The warm call: a function generated in front of a public one.

A public function validates, plans and launches, which takes tens of microseconds. In front of it stands a
generated one with the same signature, which finds the guarded launches for this size and tries them:
what a guard compares (`core.guard`) needs no second look, and what no guard knows is tested beside it: classes,
the value of eps, and whether torch must see the call (modes, functorch, a profiler, a gradient that would be
lost). Anything unusual, an exception included, goes to the function behind, which knows what to say. The text is
generated, because a loop over operands in place of this straight line costs as much as the launch itself. Where a
compiler is, C++ does all of that (`core.native`): the text hands it the arguments, and stands in where there is none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flashnorm.core import native
from flashnorm.core.checks import FLT_MAX, least, split
from flashnorm.core.dispatch import forced_here
from flashnorm.program import TAILED

if TYPE_CHECKING:
    from flashnorm.core.op import Op
    from flashnorm.program import Operand

MAX_SIZES = 8192  # of the warm path; past it all are forgotten, and made again from loaded kernels
MAX_CHAIN = 8  # guarded launches for one size


# Guarded launches by the number of elements of the first operand, which is cheaper to ask for than its shape. Each is
# a flat tuple: what it was made under (options as given, further parameters, whether optional outputs were asked for,
# the forced route), the scalars as they were then, so that the same objects need no second look, and the launch.
# A number that stands for None is told by its object: an entry with it serves no call that was given an equal number,
# which the function behind may refuse.
Entry = tuple[Any, ...]
ABSENT = object()
Chain = tuple[tuple["Recent", native.Front], ...]


class Recent(dict[int, tuple[Entry, ...]]):
    """The guarded launches of an operator, and the functions that look for them here, each with all its operators'.

    The first entry gives these functions their C++: a program that never calls an operator pays nothing for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fronts: list[tuple[dict[str, Any], Chain]] = []
        self.bound = False

    def bind(self) -> None:
        self.bound = True
        for scope, chain in self.fronts:
            scope["native"] = native.call(chain)

    def forget(self) -> None:
        self.clear()
        self.bound = False
        for scope, _ in self.fronts:
            scope["native"] = None


# Who must see a call through torch's dispatcher. The cold path asks for functorch too; the warm one need not, since
# tensors under its transforms cannot be handed to a kernel.
WATCHERS = (
    "is_compiling()",
    "is_tracing()",
    "dispatch_modes()",
    "function_modes()",
    "profiler._is_profiler_enabled",
    "forward_ad._current_level >= 0",
)
ASKED: dict[str, Any] = {
    "is_compiling": torch.compiler.is_dynamo_compiling,  # other compilers bring modes
    "is_tracing": torch._C._is_tracing,
    "dispatch_modes": torch._C._len_torch_dispatch_stack,
    "function_modes": torch._C._len_torch_function_stack,
    "profiler": torch.autograd.profiler,
    "forward_ad": torch.autograd.forward_ad,
    "functorch": torch._C._functorch.peek_interpreter_stack,
}
watched: Callable[[], Any] = eval(f"lambda: {' or '.join((*WATCHERS, 'functorch() is not None'))}", ASKED)

IN_CPP = """\
    if native is not None:
        made = native({parameters})
        return cold({{forward}}) if made is MISS else made
"""
TRACED = """\
    if is_compiling():
        return cold({forward})
"""
EAGER = f"""\
    if {" or ".join(WATCHERS)}{{unless}}:
        return cold({{{{forward}}}})
"""
TEMPLATE = """\
def {name}{signature}:
{positional}{in_cpp}{eager}
    try:
        if not {plain_x} or grad_enabled() and ({requires_grad}):
            return cold({forward})
        {allocate}
        entries = recent.get({x}.numel(), ())
    except (AttributeError, TypeError, ValueError, RuntimeError):  # no tensor: the function behind says what
        return cold({forward})
    try:
        for {entry}, launch in entries:
            if (
                {state}
                and {scalars}
                and {plain}
                and (enable_pdl is None or enable_pdl.__class__ is bool)
                and launch({arguments})
            ):
                {versions}
                return {result}
    except RuntimeError:
        if not memoryless({tensors}):
            raise
    return cold({forward})
"""


def memoryless(*tensors: torch.Tensor | None) -> bool:
    """Whether a launch never began, because some tensor has no memory to hand over.

    Tensors under a functorch transform are such: they refuse, or show no address, which guards refuse.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    present = [t for t in tensors if t is not None]
    return any(t.device.type == "meta" or t.layout is not torch.strided or t.is_quantized for t in present)


def warm(
    op: Op,
    recent: Recent,
    cold: Callable[..., Any],
    *,
    names: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
    unless: Sequence[str] = (),
    seen: Sequence[str] = (),
    only: Mapping[str, Any] | None = None,
    tails: Mapping[str, Sequence[str]] | None = None,
    eager: bool,
) -> Callable[..., Any]:
    """Compiles the function that stands in front of `cold`.

    Args:
        op: the operator.
        recent: its guarded launches; see `remember`.
        cold: takes the same arguments.
        names: what `cold` calls an operand or a number, where that differs from the operator's own name.
        flags: parameters of `cold` that ask for an optional output: parameter -> operand.
        unless: parameters that are None in every warm call: with them, `cold` asks another operator.
        seen: further parameters that an entry was made under, after the options.
        only: parameters that have this value in every warm call.
        tails: outputs that are not H wide: the parameters that say how wide they are.
        eager: called by people, so that modes and profilers must be looked for; else by torch's dispatcher.
    """
    flags = flags or {}
    parameters = list(inspect.signature(cold).parameters.values())
    given = {p.name for p in parameters}
    in_cpp = front(op, cold, names=names, flags=flags, unless=unless, seen=seen, only=only, tails=tails, eager=eager)
    asked, state, spread, local = in_cpp.asked, in_cpp.state, in_cpp.numbers, dict(in_cpp.local)
    allocate = [f"{name}_tensor, {scalar} = {_spread(op, name, local[name])}" for name, scalar in spread.items()]
    nones = {
        scalar: (None, op.by_value[name][1]) for name, scalar in spread.items() if op.by_value[name][1] is not None
    }
    numbers = (s for s in op.scalars if s not in given and s not in spread.values())
    allocate += [f"{s} = {names[s]}" for s in numbers]
    follows = " or ".join(_requires_grad(op, o, local[o.name]) for o in op.operands if local[o.name] in given)
    given |= {f"{name}_tensor" for name in spread}
    local |= {name: f"{name}_tensor" for name in spread}
    x = local[op.operands[0].name]

    def maybe(name: str, present: str, absent: str) -> str:
        return f"({absent} if {local[name]} is None else {present})" if name in op.optional else present

    for o in op.operands:
        n = local[o.name]
        if o.name in asked:
            allocate.append(f"{n} = empty({o.name!r}, {x}) if {asked[o.name]} else None")
        elif n not in given:
            allocate.append(f"{n} = None")
        elif tails and o.name in tails:
            sizes = ", ".join(tails[o.name])
            dtype = f", dtype=dtypes[{n!r}]" if len(o.dtypes) == 1 else ""
            allocate.append(f"{n} = {x}.new_empty((*{x}.shape[:-1], {sizes}){dtype}) if {n} is None else {n}")
        elif o.mode == "out" and o.like and o.name not in op.optional and o.kind not in TAILED:
            allocate.append(f"{n} = empty_like({local[o.like] if o.like else x}) if {n} is None else {n}")
    written = [o.name for o in op.operands if o.written]
    # A registered operator returns nothing: its schema says so.
    result = (", ".join(local[name] for name in op.returns) or "None") if eager else "None"
    for flag, operand in flags.items():
        result = f"({result}, {local[operand]}) if {flag} else {result}"
    text = TEMPLATE.format(
        name=op.name,
        signature=_signature(parameters),
        positional=_positional(parameters),
        in_cpp=(TRACED if eager else "") + IN_CPP.format(parameters=", ".join(in_cpp.parameters)),
        eager=EAGER.format(unless=_elsewhere(unless, only or {})) if eager else "",
        allocate="; ".join(allocate) or "pass",
        x=x,
        entry=", ".join(f"{name}_seen" for name in (*state, "forced", *op.scalars)),
        state=" and ".join((*(_same(name) for name in state), "forced_here() is forced_seen")),
        scalars=" and ".join(
            f"({s} is {s}_seen or {s}.__class__ is float and {least(s)!r} <= {s} <= {FLT_MAX!r}"
            + (f" and {s}_seen is not none_{s}[1])" if s in nones else ")")
            for s in op.scalars
        )
        or "True",
        plain_x=_plain(x),
        plain=" and ".join(
            f"{maybe(o.name, _plain(local[o.name]), 'True')}"
            for o in op.operands
            if o.name not in asked and local[o.name] in given and local[o.name] != x
        )
        or "True",
        requires_grad=follows,
        tensors=", ".join(local.values()),
        arguments=", ".join((*op.scalars, "enable_pdl is not False", *local.values())),
        versions=_bumps([(local[n], n in op.optional) for n in written if n not in asked and local[n] in given]),
        result=result,
        forward="{forward}",
    ).replace("{forward}", _forward(parameters))
    scope: dict[str, Any] = {
        "empty_like": torch.empty_like,
        "empty": op.empty,
        "forced_here": forced_here,
        **ASKED,
        "grad_enabled": torch.is_grad_enabled,
        "bump": torch._C._increment_version,
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "memoryless": memoryless,
        "native": None,
        "MISS": native.MISS,
        "ABSENT": ABSENT,
        "split": functools.partial(split, op),
        "recent": recent,
        "cold": _named(cold, parameters),
        **{f"none_{scalar}": pair for scalar, pair in nones.items()},
        "defaults": {p.name: p.default for p in parameters},
        "dtypes": {local[o.name]: getattr(torch, o.dtypes[0]) for o in op.operands if o.name in (tails or ())},
    }
    exec(compile(text, f"<flashnorm {op.name}>", "exec"), scope)  # our own text
    # A public function with a warm call for each of its operators: the first one's C++ asks all of them.
    chain: Chain = ((recent, in_cpp), *getattr(cold, "chain", ()))
    for one, _ in chain:
        one.fronts.append((scope, chain))
        one.bound = False
    call: Any = functools.wraps(cold)(scope[op.name])
    call.is_warm, call.chain = True, chain
    return call


def front(
    op: Op,
    cold: Callable[..., Any],
    *,
    names: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
    unless: Sequence[str] = (),
    seen: Sequence[str] = (),
    only: Mapping[str, Any] | None = None,
    tails: Mapping[str, Sequence[str]] | None = None,
    returns: Sequence[str] | None = None,
    eager: bool,
) -> native.Front:
    """The same for the warm call in C++; arguments as in `warm`, and what is returned in place of `op.returns`."""
    given = tuple(inspect.signature(cold).parameters)
    flags = flags or {}
    return native.Front(
        op=op,
        parameters=given,
        local={o.name: names.get(o.name, o.name) for o in op.operands},
        names=names,
        numbers={name: scalar for name, (scalar, _) in op.by_value.items() if scalar not in given},
        state=(*(name for name in op.options if name in given), *seen, *flags),
        asked={operand: flag for flag, operand in flags.items()},
        unless=unless,
        only=only or {},
        tails=tails or {},
        returns=(op.returns if returns is None else returns) if eager else (),
        eager=eager,
    )


def _named(cold: Callable[..., Any], parameters: Any) -> Callable[..., Any]:
    """The function behind, which says what keyword is lacking: those that were left out are left out again."""
    required = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    if not required or hasattr(cold, "is_warm"):  # another warm call takes ABSENT as it is
        return cold

    def call(*args: Any, **more: Any) -> Any:
        return cold(*args, **{name: value for name, value in more.items() if value is not ABSENT})

    return call


def _requires_grad(op: Op, operand: Operand, name: str) -> str:
    """Whether autograd follows an operand. Asked first: a call that is recorded wants no output allocated for it."""
    if operand.name in op.by_value:
        return f"getattr({name}, 'requires_grad', False)"
    absent = operand.name in op.optional or (operand.mode == "out" and operand.like)
    return f"({name} is not None and {name}.requires_grad)" if absent else f"{name}.requires_grad"


def _spread(op: Op, name: str, parameter: str) -> str:
    """A parameter that is a tensor or a number, as both."""
    scalar, default = op.by_value[name]
    none = "" if default is None else f"none_{scalar} if {parameter} is None else "
    return f"{none}(None, {parameter}) if {parameter}.__class__ is float else split({name!r}, {parameter})"


def _elsewhere(unless: Sequence[str], only: Mapping[str, Any]) -> str:
    """What sends a call to the function behind, whatever the tensors are."""
    parts = [*(f"{name} is not None" for name in unless), *(_unlike(name, value) for name, value in only.items())]
    return "".join(f" or {part}" for part in parts)


def _unlike(name: str, value: Any) -> str:
    """Whether a parameter has another value. A flag is asked for itself: 0 equals False, and True equals 1.0."""
    if isinstance(value, bool):
        return f"{name} is not {value!r}"
    return f"{name} != {value!r}" + (f" or {name}.__class__ is bool" if isinstance(value, int | float) else "")


def _same(name: str) -> str:
    """Whether an option is what it was. Mostly the same object; only words, flags and numbers are compared."""
    compared = f"{name}.__class__ in (str, bool, int, float) and {name}.__class__ is {name}_seen.__class__"
    return f"({name} is {name}_seen or {compared} and {name} == {name}_seen)"


def _bumps(written: Sequence[tuple[str, bool]]) -> str:
    """Tells autograd of what was written, in one call for all that is always there."""
    always = "".join(f"{name}, " for name, optional in written if not optional)
    parts = [f"bump(({always}))"] if always else []
    parts += [f"None if {name} is None else bump(({name},))" for name, optional in written if optional]
    return "; ".join(parts) or "pass"


def _plain(name: str) -> str:
    return f"({name}.__class__ is Tensor or {name}.__class__ is Parameter)"


def _signature(parameters: Any) -> str:
    """The parameter list of a function, defaults included, annotations left out.

    Keyword-only parameters cost a look-up each where they are left out. Here they are ordinary ones behind a
    parameter that catches what was not meant to be positional.
    """
    parts, caught = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not caught:
            parts.append("_positional=ABSENT")
            caught = True
        without = p.default is p.empty and not caught
        parts.append(p.name if without else f"{p.name}={'ABSENT' if p.default is p.empty else f'defaults[{p.name!r}]'}")
    return f"({', '.join(parts)})"


def _positional(parameters: Any) -> str:
    """Hands a call with too many positional arguments on, to be refused."""
    ordinary = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    if len(ordinary) == len(parameters):
        return ""
    return f"    if _positional is not ABSENT:\n        return cold({', '.join(ordinary)}, _positional)\n"


def _forward(parameters: Any) -> str:
    """The arguments that hand a call on."""
    return ", ".join(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters)


def remember(recent: Recent, elements: int, entry: Entry) -> None:
    """Makes a call warm: puts its entry in front of those of as many elements."""
    if len(recent) >= MAX_SIZES:
        recent.clear()
    if not recent.bound:
        recent.bind()
    recent[elements] = (entry, *recent.get(elements, ())[: MAX_CHAIN - 1])
