"""Kernels built before they are checked: the C++ compilers run side by side, and what is ready is checked meanwhile.

One kernel after the other, compilers are most of the time of a cold machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

import torch

from flashnorm import backends
from flashnorm.config import settings
from flashnorm.core import device as devices
from flashnorm.core import plan
from flashnorm.core.op import Op
from flashnorm.core.operands import normalise
from flashnorm.jit import toolchain
from flashnorm.program import Variant
from flashnorm.verify.cases import Case
from flashnorm.verify.problem import make_problem

Todo = tuple[Op, Case]
COMPILED = ("cuda", "cpu")  # routes that run compilers of their own
SECONDS = 10.0  # between two lines of progress where nobody looks at a terminal


def variant_of(op: Op, case: Case, device: torch.device) -> Variant:
    """A kernel of the C++ routes, which take H and strides as they come."""
    problem = make_problem(op, case, 2, 8, device)
    return normalise(op, problem.program, [problem.given.get(o.name) for o in op.operands])[0]


class Builds:
    """The kernels of one route, being built in the background.

    What fails here fails again, and is reported, where the kernel is called. The CuTe DSL compiles in this process,
    one kernel at a time, and PyTorch has none: for them every kernel counts as ready.
    """

    def __init__(
        self,
        route: str,
        todo: Sequence[Todo],
        more: Sequence[Todo],
        device: torch.device,
        also: Sequence[Variant] = (),
    ) -> None:
        """`todo` is what will be checked, `more` and `also` what is needed after it."""
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: list[Future[object] | None] = [None] * len(todo)
        self.built, self.total = 0, 0
        if route not in COMPILED or settings.disable_jit:
            return
        target = plan.target_of(devices.facts(device))
        found: dict[Any, Future[object]] = {}
        variants = [*(variant_of(op, case, device) for op, case in (*todo, *more)), *also]
        self._pool = ThreadPoolExecutor(toolchain.job_count(settings))

        def build(variant: Variant) -> object:
            try:
                return backends.artifact(route, variant, target).build()
            except Exception as error:
                return error
            finally:
                self.built += 1

        # Those with many operands take longest: last, they would keep one processor waiting for the other.
        for variant in sorted(variants, key=lambda v: -len(v.dtypes)):
            key = (variant.program.code(), variant.dtypes)
            if key not in found:
                found[key] = self._pool.submit(build, variant)
        self.total = len(found)
        self._waiting = [found[v.program.code(), v.dtypes] for v in variants[: len(todo)]]

    def in_turn(self) -> Iterator[int]:
        """The places of `todo`, each as soon as its kernel is there, and in order where several are."""
        left = dict(enumerate(self._waiting))
        while left:
            ready = [i for i, future in left.items() if future is None or future.done()]
            if not ready:
                wait([future for future in left.values() if future is not None], return_when=FIRST_COMPLETED)
                continue
            del left[ready[0]]
            yield ready[0]

    def __enter__(self) -> Builds:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            # After an error or an interrupt, nobody waits for what has not begun.
            self._pool.shutdown(wait=True, cancel_futures=kind is not None)


class Progress:
    """Says on standard error what is going on: a line that changes, or, where it is no terminal, one now and then."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if sys.stderr.isatty():
            print(f"\r\033[K{now - self._began:.0f} s  {text}", end="\r", file=sys.stderr, flush=True)
        elif now - self._last >= SECONDS:
            self._last = now
            print(f"flashnorm verify: {now - self._began:.0f} s  {text}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Takes a changing line away."""
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
