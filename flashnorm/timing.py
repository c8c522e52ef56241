"""Timing calls against one another, well enough for `verify` and `bench`; benchmarks/ does it thoroughly."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

ROUNDS = 5


def per_call(calls: Sequence[Callable[[], object]], device: torch.device, seconds: float) -> list[float]:
    """Median seconds a call takes, from the host's call to the end of its work, many of them in a row.

    The calls take turns, so that a busy machine is busy for all of them. Inputs stay the same, so what fits
    a cache is read from there.

    Args:
        calls: what is compared.
        device: where they run.
        seconds: about how long one turn of one call lasts.
    """
    counts = [_count(call, device, seconds) for call in calls]
    turns: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for found, call, count in zip(turns, calls, counts, strict=True):
            found.append(_turn(call, device, count) / count)
    return [statistics.median(found) for found in turns]


def _count(call: Callable[[], object], device: torch.device, seconds: float) -> int:
    """Calls in one turn. The first estimate is of a few calls, with all that waiting for the device costs."""
    count = 1
    for _ in range(3):
        count = max(1, round(count * seconds / max(_turn(call, device, count), 1e-7)))
    return count


def _turn(call: Callable[[], object], device: torch.device, count: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
