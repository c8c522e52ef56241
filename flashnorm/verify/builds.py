"""Kernels built before they are checked: compilers run side by side, and what is ready is checked meanwhile.

One kernel after the other, compilers are most of the time of a cold machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from flashnorm import backends, recipe
from flashnorm.config import settings
from flashnorm.core import device as devices
from flashnorm.core import plan
from flashnorm.core.op import Op
from flashnorm.core.operands import normalise
from flashnorm.jit import toolchain
from flashnorm.program import Variant
from flashnorm.verify.cases import Case, Shapes
from flashnorm.verify.problem import make_problem

Todo = tuple[Op, Case, Shapes]
Job = tuple[str, str, Variant]  # route, target, variant
CPU = torch.device("cpu")
COMPILED = ("cuda", "cpu")  # routes that run compilers of their own
FEW = 4  # kernels that this process has compiled by the time that others have begun
SECONDS = 10.0  # between two lines of progress where nobody looks at a terminal


def variant_of(op: Op, case: Case, device: torch.device, hidden: int = 8) -> Variant:
    """A kernel; those of the C++ routes take H and strides as they come."""
    problem = make_problem(op, case, 2, hidden, device)
    return normalise(op, problem.program, [problem.given.get(o.name) for o in op.operands])[0]


class Builds:
    """The kernels of one route, being built in the background, and those of the CPU route that they are held against.

    What fails here fails again, and is reported, where the kernel is called. PyTorch's route has none: every kernel
    of it counts as ready. So does every one of the CuTe DSL, which compiles one at a time in a process: this one begins
    with the first, and others fill the cache with the rest.
    """

    def __init__(
        self,
        route: str,
        todo: Sequence[Todo],
        more: Sequence[tuple[Op, Case]],
        device: torch.device,
        also: Sequence[Variant] = (),
    ) -> None:
        """`todo` is what will be checked, `more` and `also` what is needed after it."""
        self._pool: ThreadPoolExecutor | None = None
        self._beside: Beside | None = None
        self._waiting: list[list[Future[object]]] = [[] for _ in todo]
        self.built, self.total = 0, 0
        if settings.disable_jit or route == "torch":
            return
        target = plan.target_of(devices.facts(device))
        jobs: list[tuple[Job, int | None]] = []
        for place, (op, case, _) in enumerate(todo):
            if route in COMPILED:
                jobs.append(((route, target, variant_of(op, case, device)), place))
            if route != "cpu" and "cpu" in op.routes:
                jobs.append((("cpu", "host", variant_of(op, case, CPU)), place))
        if route in COMPILED:
            later = [*(variant_of(op, case, device) for op, case in more), *also]
            jobs += [((route, target, variant), None) for variant in later]
        self._start(jobs)
        if route == "cute":  # last: what is begun here is ended by `__exit__` alone
            self._beside = Beside(
                recipe.Kernel(op.name, route, target, variant_of(op, case, device, hidden))
                for op, case, shapes in todo
                for _, hidden in shapes
            )

    def _start(self, jobs: Sequence[tuple[Job, int | None]]) -> None:
        self._pool = ThreadPoolExecutor(toolchain.job_count(settings))

        def build(job: Job) -> object:
            route, target, variant = job
            try:
                return backends.artifact(route, variant, target).build()
            except Exception as error:
                return error
            finally:
                self.built += 1

        found: dict[Any, Future[object]] = {}
        # nvcc's take longest, and of a compiler's those with many operands: last, they would keep one processor
        # waiting for the others.
        for job, place in sorted(jobs, key=lambda one: (one[0][0] == "cpu", -len(one[0][2].dtypes))):
            route, _, variant = job
            key = (route, variant.program.code(), variant.dtypes)
            if key not in found:
                found[key] = self._pool.submit(build, job)
            if place is not None:
                self._waiting[place].append(found[key])
        self.total = len(found)

    def in_turn(self) -> Iterator[int]:
        """The places of `todo`, each as soon as its kernels are there, and in order where several are."""
        left = dict(enumerate(self._waiting))
        while left:
            ready = [i for i, futures in left.items() if all(future.done() for future in futures)]
            if not ready:
                wait([f for futures in left.values() for f in futures if not f.done()], return_when=FIRST_COMPLETED)
                continue
            del left[ready[0]]
            yield ready[0]

    def __enter__(self) -> Builds:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._beside is not None:
            self._beside.end()
        if self._pool is not None:
            # After an error or an interrupt, nobody waits for what has not begun.
            self._pool.shutdown(wait=True, cancel_futures=kind is not None)


# The first thing that process does is to wait for the end of its input, in a thread: it comes with this one's,
# however that is. Its own processes are of its session, and end with it.
_BESIDE = """
import os, signal, sys, threading

def follow():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)

threading.Thread(target=follow, daemon=True).start()
from flashnorm.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


class Beside:
    """`flashnorm precompile` in a process of its own, which has several: kernels come to the cache, where locks see to
    it that none is built twice. What fails there is built here, where it is needed."""

    def __init__(self, kernels: Iterable[recipe.Kernel]) -> None:
        missing = [kernel for kernel in dict.fromkeys(kernels) if not _there(kernel)]
        self._process: subprocess.Popen[bytes] | None = None
        if len(missing) <= FEW:
            return
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        asked = Path(self._folder.name) / "recipe.json"
        asked.write_text(recipe.to_json(missing), encoding="utf-8")
        command = [sys.executable, "-c", _BESIDE, "precompile", "--json"]
        command += ["--recipe", str(asked), "--out", str(asked.parent / "out")]
        command += ["--jobs", str(max(1, toolchain.job_count(settings) // 2))]  # C++ compilers run meanwhile
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def end(self) -> None:
        """What it has not built by now nobody waits for."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            self._process.communicate()
            self._folder.cleanup()


def _there(kernel: recipe.Kernel) -> bool:
    try:
        return backends.artifact(kernel.route, kernel.variant, kernel.arch).lookup() is not None
    except Exception:
        return True  # not to be had, for whatever reason: its call says why


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
