"""Kernels built before anything is measured: in the background, side by side, into the caches they are loaded from.

nvcc takes far longer over a program, or over FlashInfer's CUDA module, than measuring it does, and each runs on one
core. Our own artefacts are built by processes of their own, as `flashnorm precompile` does and for its reasons.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any

import torch

from flashnorm.backends import artifact
from flashnorm.jit.arch import device_arch
from flashnorm.program import Variant

from .bars import Shape
from .entry import Bench
from .rivals import start_building

Job = tuple[str, Variant, str]  # route, variant, target


def jobs(
    work: Iterable[tuple[Bench, Shape]], routes: Iterable[str], dtype: torch.dtype, device: torch.device
) -> list[Job]:
    """The kernels that our own contenders need, each artefact once, those that take longest first."""
    target = device_arch(*torch.cuda.get_device_capability(device)).name if device.type == "cuda" else "host"
    found: dict[Any, Job] = {}
    for bench, (_, hidden_size) in work:
        variant = bench.variant(hidden_size, dtype)
        for route in routes:
            if route in bench.routes and route != "torch" and (route == "cpu") == (device.type == "cpu"):
                # The C++ routes take H when they run.
                key = (
                    route,
                    variant if route == "cute" else (variant.program.code(), variant.dtypes, variant.row_vecs),
                )
                found.setdefault(key, (route, variant, target))
    return sorted(found.values(), key=lambda job: job[0] == "cute")


def build(job: Job) -> None:
    """Puts one artefact into the cache; runs in a process of its own. What fails is said where it is called."""
    artifact(*job).build()


class Builds:
    """What is being built in the background."""

    def __init__(self, todo: Sequence[Job], peers: Iterable[str], work: Sequence[tuple[Bench, Shape]] = ()):
        silu = [shape for bench, shape in work if bench.name == "fused_rmsnorm_silu"]
        self._futures: list[Future[Any]] = start_building(peers, silu, norms=len(silu) < len(work) or not work)
        self._pool: ProcessPoolExecutor | None = None
        if len(todo) > 1:
            # Fresh interpreters: a forked child would inherit torch's threads, and their locks, as they were.
            count = min(len(todo), max(1, (os.cpu_count() or 2) - 2))
            self._pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
            self._futures += [self._pool.submit(build, job) for job in todo]

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def wait(self, seconds: float | None = None) -> None:
        wait(self._futures, timeout=seconds)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
