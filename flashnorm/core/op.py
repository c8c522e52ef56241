"""An operator, declared once: everything else about it is derived from its program's operands.

From an `Op` follow its torch.library schema with mutation annotations, the fake and autograd kernels,
the warm call, the checks, the plans of every route, the inputs of its tests and the bytes of its
roofline.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from flashnorm.core import checks, dispatch, fastpath, guard, guard_mode, library, plan, sharding
from flashnorm.program import ENCODED, BackwardProgram, Operand, Program, RowProgram

F = TypeVar("F", bound=Callable[..., Any])
OPS: dict[str, Op] = {}  # the operators that are public functions, by name
ALL: dict[str, Op] = {}  # and those that stand behind them
BACKWARD: dict[str, Op] = {}  # and those of gradients
NUMERICS = {
    "flashinfer": "flashinfer",
    "hf-llama": "hf-llama",
    "vllm": "hf-llama",
    "hf-gemma": "hf-gemma",
    "torch": "torch",  # the same program; on the torch route, PyTorch's own function
    "cake": "hf-gemma",
}


class Op:
    """One operator.

    Attributes:
        name: in `torch.ops.flashnorm`, in `explain`, in every error text.
        program: (names of the operands present, options) -> the program of that call.
        operands: of the program with everything present; the order of the tensors everywhere.
        scalars: names of the run-time fp32 values.
        options: accepted values of each compile-time choice, with what each stands for.
        optional: operands a call may leave out; names that the operator does not have are passed over.
        reference: the formula in plain PyTorch, and the `torch` route.
        routes: that the operator has.
        broadcast_vecs: a vector may be given per head or per row.
        labels: what users call an operand or a number, where that differs.
        by_value: operands of one element that may come as a number instead: their scalar, and the number that
            stands for none (None: there must be one). A CPU tensor counts as the number in it.
        blocks: for an operator whose "blocks" operand is not taken as it comes: (tensor, M) -> size and strides of the
            [M', B] that it is, in the tensor's memory; raises ValueError where it does not fit.
        returns: the operands that a call returns; by default every output that is not optional.
        functional: the operator that computes the same into new tensors, each `like` an operand that this
            one overwrites. Compilers get that one: they have been seen to drop a clone and hand one tensor
            in twice where two arguments are mutated.
        by_rows: its program is a row program.
        plainly: optional outputs that a plain call asks for; the others it leaves out.
        public: is a public function of the package under this name.
        called: the public function that users know it by, where that has another name.
    """

    def __init__(
        self,
        name: str,
        *,
        program: Callable[[frozenset[str], Mapping[str, Any]], Program],
        reference: Callable[..., None],
        options: Mapping[str, Mapping[str, Any]],
        optional: Sequence[str] = (),
        routes: tuple[str, ...] = dispatch.ROUTES,
        broadcast_vecs: bool = False,
        labels: Mapping[str, str] | None = None,
        by_value: Mapping[str, tuple[str, float | None]] | None = None,
        blocks: Callable[[Any, int], tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
        returns: Sequence[str] | None = None,
        functional: Op | None = None,
        plainly: Sequence[str] = (),
        public: bool = True,
        called: str = "",
    ) -> None:
        self.name = name
        self.called = called or name
        self.program = program
        self.reference = reference
        self.options = options
        self.routes = routes
        self.broadcast_vecs = broadcast_vecs
        # The number that stands for none is an object of the operator's own: warm calls tell it from an equal one.
        self.by_value = {
            name: (scalar, None if number is None else float.fromhex(number.hex()))
            for name, (scalar, number) in (by_value or {}).items()
        }
        self.blocks = blocks or (lambda tensor, _: (tuple(tensor.shape), tensor.stride()))
        called_so = labels or {}
        numbers = {number: called_so.get(name, name) for name, (number, _) in self.by_value.items()}
        self.labels = {"x": "input", **numbers, **called_so}
        self.functional = functional
        self.plainly = tuple(plainly)
        first = {key: next(iter(values.values())) for key, values in options.items()}
        full = program(_Everything(), first)
        self.by_rows = isinstance(full, RowProgram)
        self.operands: tuple[Operand, ...] = full.operands()
        self._index = {o.name: i for i, o in enumerate(self.operands)}
        self.optional = tuple(name for name in optional if name in self._index)
        self.scalars = tuple(dict.fromkeys((*full.scalars(), *numbers)))
        outs = (o.name for o in self.operands if o.mode == "out" and o.name not in self.optional)
        self.returns = tuple(outs if returns is None else returns)
        self.encoded = tuple(i for i, o in enumerate(self.operands) if set(o.dtypes) & set(ENCODED))
        self._asked: tuple[str, ...] = ()
        self._derived: frozenset[str] = frozenset()
        self._warm_calls = fastpath.Recent()
        self._warm_kernels = fastpath.Recent()
        self.overload = library.define(self, self._serve)
        (BACKWARD if isinstance(full, BackwardProgram) else ALL)[name] = self
        if public:
            OPS[name] = self

    # -------------------------------------------------------------- what the declaration implies
    def index(self, name: str) -> int:
        return self._index[name]

    def label(self, operand: Operand) -> str:
        return self.labels.get(operand.name, operand.name)

    def may_alias(self, written: str, other: str) -> bool:
        """Whether an output may be that very input: each element is read before it is written, by one thread."""
        out, like = (self.operands[self.index(name)] for name in (written, other))
        return out.like == other and out.mode == "out" and out.kind == like.kind == "row"

    def reach(self, operand: Operand, tensor: Any, tensors: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size and strides of all that a call may touch of an operand's memory: of blocks, the padding too."""
        if operand.kind != "blocks":
            return tuple(tensor.shape), tensor.stride()
        row = next(t for o, t in zip(self.operands, tensors, strict=True) if o.kind == "row" and t is not None)
        return self.blocks(tensor, math.prod(row.shape[:-1]))

    def program_of(self, tensors: Sequence[Any], options: Mapping[str, Any]) -> Program:
        """The program of a call with these tensors (None where absent)."""
        present = frozenset(o.name for o, t in zip(self.operands, tensors, strict=True) if t is not None)
        return self.program(present, options)

    def bytes_moved(self, tensors: Sequence[torch.Tensor | None]) -> int:
        """Bytes that must cross memory: what is read once, what is written once."""
        named = [(o, t) for o, t in zip(self.operands, tensors, strict=True) if t is not None]
        rows = next(t.numel() for o, t in named if o.kind == "row")
        return sum(
            (rows if o.kind == "pool" else t.numel()) * t.element_size() * (2 if o.mode == "inout" else 1)
            for o, t in named
        )

    def schema(self) -> str:
        """Arguments without defaults: the dispatcher would drop trailing ones that equal them."""
        parts = []
        for i, o in enumerate(self.operands):
            alias = f"({chr(97 + i)}!)" if o.written else ""
            parts.append(f"Tensor{alias}{'?' if o.name in self.optional else ''} {o.name}")
        parts += [f"float {s}" for s in self.scalars] + [f"str {key}" for key in self.options] + ["bool enable_pdl"]
        parts += [f"str {self.operands[i].name}_dtype" for i in self.encoded]
        return f"{self.name}({', '.join(parts)}) -> ()"

    # -------------------------------------------------------------- calls
    def warm(
        self,
        *,
        unless: Sequence[str] = (),
        seen: Sequence[str] = (),
        only: Mapping[str, Any] | None = None,
        tails: Mapping[str, Sequence[str]] | None = None,
        **flags: str,
    ) -> Callable[[F], F]:
        """Decorates the public function: puts the warm call in front of it.

        An option that is no parameter of the function is one that it makes of those in `seen`.

        Args:
            unless: parameters with which the function asks another operator.
            seen: further parameters that the function hands to `checked` as `seen`, in this order.
            only: parameters with the value that they have in a warm call.
            tails: outputs that are not H wide: the parameters that say how wide they are.
            flags: parameters that ask for an optional output: `return_rstd="rstd"`.
        """
        self._asked = tuple(flags.values())

        def decorate(cold: F) -> F:
            self._derived = frozenset(self.options) - set(inspect.signature(cold).parameters)
            more: dict[str, Any] = {"names": self.labels, "flags": flags, "unless": unless, "seen": seen, "only": only}
            more["tails"] = tails
            return cast(F, fastpath.warm(self, self._warm_calls, cold, **more, eager=True))

        return decorate

    def also_warm(
        self,
        *,
        unless: Sequence[str] = (),
        only: Mapping[str, Any] | None = None,
        returns: Sequence[str],
    ) -> Callable[[F], F]:
        """Decorates the public function of another operator, below its `warm`: this one's calls are warm in C++."""

        def decorate(cold: F) -> F:
            front = fastpath.front(self, cold, names=self.labels, unless=unless, only=only, returns=returns, eager=True)
            cold.chain = ((self._warm_calls, front), *getattr(cold, "chain", ()))  # type: ignore[attr-defined]
            return cold

        return decorate

    def behind(self, check: Callable[[Op, Mapping[str, Any]], None] | None = None) -> Callable[..., Any]:
        """The call for a public function that has several operators behind it, with a warm call of its own.

        It takes, by position or name, every operand (a number where `by_value` allows it), the other scalars, the
        options and enable_pdl. `check` sees them by name in a cold call, before anything else.
        """
        numbers = {scalar for scalar, _ in self.by_value.values()}
        names = (*self._index, *(s for s in self.scalars if s not in numbers), *self.options, "enable_pdl")

        def cold(*args: Any) -> Any:
            if check is not None:
                check(self, dict(zip(names, args, strict=True)))
            return self.checked(*args)

        cold.__signature__ = _positional(names)  # type: ignore[attr-defined]
        return fastpath.warm(self, self._warm_calls, cold, names={}, eager=True)

    def checked(self, *args: Any, seen: tuple[Any, ...] = (), given: Mapping[str, Any] | None = None) -> Any:
        """The cold call: validates everything, allocates what is missing, then launches or asks the dispatcher.

        Args:
            seen: further parameters that the call was made under; see `warm`.
            given: operands as the public function was given them, where it made views of them: warm calls look at
                these.
        """
        if torch.compiler.is_compiling():
            return self.traced(*args)
        tensors, scalars, options, enable_pdl = self._validate(self._spread(args))
        if self._needs_dispatcher(tensors):
            library.refuse_vmap(self, tensors)
            self._dispatch(tensors, scalars, options, enable_pdl)
        else:
            asked = (tensors[self.index(name)] is not None for name in self._asked)
            options_given = zip(self.options, args[len(args) - 1 - len(self.options) : -1], strict=True)
            chosen = (value for name, value in options_given if name not in self._derived)
            state = (*chosen, *seen, *asked, dispatch.forced_here())
            came = [(given or {}).get(o.name, t) for o, t in zip(self.operands, tensors, strict=True)]
            self._execute(tensors, scalars, options, enable_pdl, self._warm_calls, state, came)
        return self._result(tensors)

    def accepts(self, *operands: Any) -> bool:
        """Whether a call takes these tensors (a number where `by_value` allows it, None for what is absent or new).

        Raises what such a call would raise.
        """
        tensors = self._spread((*operands, *([None] * len(self.scalars))))[: len(self.operands)]
        checks.check_present(self, tensors)
        first = {key: next(iter(values)) for key, values in self.options.items()}
        checks.check_tensors(self, self.program_of(tensors, first), tensors)
        return True

    def traced(self, *args: Any) -> Any:
        """The call under a compiler: the same checks on shapes, then the registered operator."""
        tensors, scalars, options, enable_pdl = self._validate(self._spread(args))
        checks.check_identity(self, tensors)  # of memory nothing is known yet
        if self.functional is None:
            self._dispatch(tensors, scalars, options, enable_pdl)
            return self._result(tensors)
        mine = dict(zip((o.name for o in self.operands), tensors, strict=True))
        new = {o.name: torch.empty_like(mine[o.like]) for o in self.functional.operands if o.mode == "out" and o.like}
        given = [new.get(o.name, mine.get(o.name)) for o in self.functional.operands]
        self.functional._dispatch(given, scalars, options, enable_pdl)
        for o in self.functional.operands:
            if o.name in new and o.like:
                mine[o.like].copy_(new[o.name])
        return self._result(tensors)

    def _dispatch(
        self, tensors: Sequence[Any], scalars: Sequence[float], options: Mapping[str, Any], pdl: bool
    ) -> None:
        """The registered operator, which carries 8-bit floating-point tensors as bytes, and their dtypes as words."""
        words = [checks.dtype_name(tensors[i]) for i in self.encoded]
        passed = [t.view(torch.uint8) if i in self.encoded else t for i, t in enumerate(tensors)]
        self.overload(*passed, *scalars, *map(str, options.values()), pdl, *words)

    def _spread(self, args: Sequence[Any]) -> list[Any]:
        """A public call's arguments, each that may be tensor or number as both."""
        count = len(self.operands)
        tensors, numbers = list(args[:count]), {}
        for name, (scalar, _) in self.by_value.items():
            i = self.index(name)
            tensors[i], numbers[scalar] = checks.split(self, name, tensors[i])
        rest = iter(args[count:])
        return [*tensors, *(numbers[s] if s in numbers else next(rest) for s in self.scalars), *rest]

    def empty(self, name: str, x: Any) -> torch.Tensor:
        """An output that a caller asks for by a flag."""
        if not isinstance(x, torch.Tensor):
            first = self.label(self.operands[0])
            raise TypeError(f"{self.called}: {first} must be a torch.Tensor, got {type(x).__name__}")
        operand = self.operands[self.index(name)]
        shape = x.shape[:-1] if operand.kind == "per_row" else x.shape
        dtype = getattr(torch, operand.dtypes[0]) if len(operand.dtypes) == 1 else x.dtype
        return torch.empty(shape, dtype=dtype, device=x.device)

    def _validate(self, args: Sequence[Any]) -> tuple[list[Any], list[float], dict[str, Any], bool]:
        count = len(self.operands)
        tensors = list(args[:count])
        checks.check_present(self, tensors)
        if sharding.sharded(*tensors):
            raise ValueError(f"{self.called}: this call takes no DTensors; hand over local ones (`to_local()`)")
        scalars, options, pdl = checks.check_settings(self, args[count:])
        for i, operand in enumerate(self.operands):
            if tensors[i] is None and operand.mode == "out" and operand.name not in self.optional:
                tensors[i] = torch.empty_like(tensors[self.index(operand.like or self.operands[0].name)])
        checks.check_tensors(self, self.program_of(tensors, options), tensors)
        return tensors, scalars, options, pdl

    def _result(self, tensors: Sequence[Any]) -> Any:
        """What the call returns: its output, or a tuple of them, or None."""
        made = [tensors[self.index(name)] for name in self.returns]
        return (made[0] if len(made) == 1 else tuple(made)) if made else None

    def _needs_dispatcher(self, tensors: Sequence[Any]) -> bool:
        """Whether torch must see the call: a subclass, a mode, functorch, a profiler, or a gradient."""
        present = [t for t in tensors if t is not None]
        return bool(
            any(type(t) not in checks.PLAIN for t in present)
            or fastpath.watched()
            or (torch.is_grad_enabled() and any(t.requires_grad for t in present))
            or any(t.device.type == "meta" for t in present)
        )

    def _execute(
        self,
        tensors: Sequence[Any],
        scalars: Sequence[float],
        options: dict[str, Any],
        pdl: bool,
        recent: fastpath.Recent,
        state: tuple[Any, ...],
        given: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Launches a validated call, and makes it warm: for the tensors, or for those they are views of."""
        checks.check_memory(self, tensors)
        straight = [t if t is None or not t.is_neg() else t.resolve_neg() for t in tensors]
        made = plan.make_plan(self, straight, options)
        watched = guard_mode.applies(tensors[0].device)
        if watched:
            guard_mode.launch(
                self, self.program_of(straight, options), made.on_device(made.run), straight, scalars, pdl
            )
        else:
            made.on_device(made.run)(*scalars, pdl, *straight)
        for operand, tensor in zip(self.operands, tensors, strict=True):
            if operand.written and tensor is not None and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        if not watched and all(a is b for a, b in zip(straight, tensors, strict=True)):
            entry = (*state, *scalars, guard.guarded(self, made, tensors, scalars, given))
            fastpath.remember(recent, tensors[0].numel(), entry)

    @functools.cached_property
    def _dispatched(self) -> Callable[..., None]:
        """The dispatcher's call; generated by the first, since most programs make none of most operators."""
        return fastpath.warm(self, self._warm_kernels, self._kernel(), names={}, eager=False)

    def _serve(self, *args: Any) -> None:
        self._dispatched(*args)

    def _kernel(self) -> Callable[..., None]:
        """The dispatcher's cold call; it comes with every argument, by position."""
        options_at = len(self.operands) + len(self.scalars)

        def kernel(*args: Any) -> None:
            tensors, scalars, options, pdl = self._validate(args)
            state = (*args[options_at:-1], dispatch.forced_here())
            self._execute(tensors, scalars, options, pdl, self._warm_kernels, state)

        names = (*(o.name for o in self.operands), *self.scalars, *self.options, "enable_pdl")
        kernel.__signature__ = _positional(names)  # type: ignore[attr-defined]
        return kernel

    def forget(self) -> None:
        """Makes every call cold again (kernels stay loaded)."""
        self._warm_calls.forget()
        self._warm_kernels.forget()


def _positional(names: Sequence[str]) -> inspect.Signature:
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])


class _Everything(frozenset):  # type: ignore[type-arg]
    """The set of all operand names."""

    def __contains__(self, name: object) -> bool:
        return True
