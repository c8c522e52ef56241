"""The warm call in C++: what it is told once, and each function's parameters as it reads them.

`core.fastpath` writes a warm call as text and says what it looks at. The extension module (`ffi/warm.cpp`) does the
same from the same declarations in a third of the time. Where it is there, the text asks it first, and what it misses
goes to the function behind.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from flashnorm.core import dispatch
from flashnorm.core.checks import least, split
from flashnorm.program import TAILED

if TYPE_CHECKING:
    from flashnorm.core.op import Op
    from flashnorm.program import Operand

MISS = object()  # of a call that is not warm


@functools.cache
def load() -> Any:
    """The extension module, ready to be used; or None."""
    from flashnorm.backends.warm import load as built

    module = built()
    if module is None:
        return None
    import tvm_ffi

    with _disable_current_modes():  # of whoever makes the first call
        one = torch.zeros(1, device="cpu")
        several = (one, torch.nn.Parameter(one), one[:0], one.expand(2, 3).mT)
    given = (
        torch.Tensor,
        torch.nn.Parameter,
        vars(torch.autograd.profiler),
        vars(torch.autograd.forward_ad),
        dispatch._forced,
        getattr(torch._C, "_cuda_getCurrentRawStream", None),
        tvm_ffi.Function.__from_extern_c__(module.fail, keep_alive_object=module),
        MISS,
        getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
        several,
    )
    try:
        module.setup(*given)
    except Exception as error:  # a PyTorch that keeps tensors elsewhere
        logging.getLogger("flashnorm").info("warm calls are looked at in Python: %s", error)
        return None
    return module


def looks_through() -> bool:
    """Whether warm calls may look at other tensors than their kernel takes, over the same memory: in C++ they do."""
    from flashnorm.backends.guard import load as guards

    return not torch.compiler.is_compiling() and load() is not None and guards() is not None


def launch(guard: Callable[..., bool], on_device: Callable[..., bool], device: torch.device) -> Callable[..., bool]:
    """A guarded launch that the extension calls without Python; `on_device` makes its device current first."""
    module, handle = load(), getattr(guard, "__chandle__", None)
    if module is None or handle is None:
        return on_device
    launched: Callable[..., bool] = module.Launch(
        on_device, guard, handle(), -1 if on_device is guard else device.index
    )
    return launched


@dataclass(frozen=True)
class Front:
    """What a warm call looks at; `core.fastpath.warm` says what each is.

    Attributes:
        parameters: names, in order.
        local: operand -> the name that it has in the function.
        numbers: operand that may be a number -> the scalar that the number is.
        asked: optional output -> the parameter that asks for it.
    """

    op: Op
    parameters: Sequence[str]
    local: Mapping[str, str]
    names: Mapping[str, str]
    numbers: Mapping[str, str]
    state: Sequence[str]
    asked: Mapping[str, str]
    unless: Sequence[str]
    only: Mapping[str, Any]
    tails: Mapping[str, Sequence[str]]
    returns: Sequence[str]
    eager: bool

    def call(self, module: Any, recent: dict[int, Any], after: Callable[..., Any] | None) -> Callable[..., Any]:
        """Takes every parameter by position; returns what the call does, else what `after` says, else `MISS`."""
        op, at = self.op, self._at
        nones, scalars = dict(op.by_value.values()), []
        for name in op.scalars:
            parameter = -1 if name in self.numbers.values() else at(name if at(name) >= 0 else self.names[name])
            scalars.append((parameter, least(name), nones.get(name) if parameter < 0 else None))
        called: Callable[..., Any] = module.Warm(
            recent,
            len(self.parameters),
            self.eager,
            at("enable_pdl"),
            tuple(self._slot(operand) for operand in op.operands),
            tuple(scalars),
            tuple(map(at, self.unless)),
            tuple((at(name), value) for name, value in self.only.items()),
            tuple(map(at, self.state)),
            tuple(map(op.index, self.returns)),
            tuple(map(op.index, self.asked)),
            after,
        )
        return called

    def _at(self, name: str) -> int:
        return self.parameters.index(name) if name in self.parameters else -1

    def _slot(self, operand: Operand) -> tuple[Any, ...]:
        """An operand as `Slot` in `warm_call.h` has it."""
        op, name = self.op, operand.name
        number, none, divide = -1, None, None
        if name in self.numbers:
            number = op.scalars.index(self.numbers[name])
            none = op.by_value[name][1]
            divide = functools.partial(split, op, name)
        flag = self._at(self.asked[name]) if name in self.asked else -1
        make, of = self._made(operand)
        absent = name in op.optional
        parameter = self._at(self.local[name])
        vector = operand.kind == "vec"
        return parameter, flag, operand.written, absent, make, tuple(map(self._at, of)), number, vector, none, divide

    def _made(self, operand: Operand) -> tuple[Callable[..., Any] | None, Sequence[str]]:
        """What makes an output that was not given, of which parameters."""
        op, name, x = self.op, operand.name, self.local[self.op.operands[0].name]
        if name in self.asked:
            return functools.partial(op.empty, name), (x,)
        if self._at(self.local[name]) < 0:
            return None, ()
        if name in self.tails:
            dtype = getattr(torch, operand.dtypes[0]) if len(operand.dtypes) == 1 else None
            return functools.partial(_tail, dtype), (x, *self.tails[name])
        if operand.mode == "out" and operand.like and name not in op.optional and operand.kind not in TAILED:
            like = self.local[operand.like]
            if self._at(like) >= 0:
                return torch.empty_like, (like,)
        return None, ()


def call(chain: Sequence[tuple[dict[int, Any], Front]]) -> Callable[..., Any] | None:
    """One function for all that stand in front of a public one, asked in this order. None: there is no such thing."""
    module = load()
    asked: Callable[..., Any] | None = None
    for recent, front in reversed(chain) if module is not None else ():
        asked = front.call(module, recent, asked)
    return asked


def _tail(dtype: torch.dtype | None, x: torch.Tensor, *sizes: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], *sizes), dtype=dtype)
