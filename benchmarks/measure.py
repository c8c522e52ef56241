"""Timing: CUDA graphs over buffers that are always cold, interleaved repeats, medians.

A contender is a zero-argument callable per buffer set (see `peers.Contender`), so that this module
knows no operator and no library.

Device time. A graph holds one launch per buffer set, and there are so many sets that the caches have
forgotten a buffer before its turn comes again. Graphs of all contenders are replayed in turn, repeat by
repeat, so that a clock that drifts moves everybody. A short spin kernel goes ahead of each timed replay:
the start event then fires only when the graph is already queued, and the time to submit it is not in the
figure.

Host time. Warm calls in blocks short enough for the launch queue, drained between blocks, outside the clock.

CPU time. Calls over rotated sets, in blocks of some milliseconds, interleaved in the same way.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

Call = Callable[[], object]

# A graph of more launches is slow to build and tells no more; 4096 sets of the smallest shape still
# exceed the caches of the devices this is run on.
MAX_LAUNCHES = 4096
MIN_GRAPH_US = 400.0
# Only to choose how many launches a graph holds, never in a figure.
_GUESS_BYTES_PER_US = 4.0e6
_GUESS_LAUNCH_US = 1.2
# A byte that no operator writes everywhere: what still holds it was not written.
SENTINEL = 0x3F


@dataclass
class Timing:
    """Microseconds of one call: the median over the repeats, and their range."""

    us: float
    us_min: float
    us_max: float
    launches: int


def summarise(samples: Sequence[float], launches: int) -> Timing:
    return Timing(statistics.median(samples), min(samples), max(samples), launches)


def count_sets(set_bytes: int, cache_bytes: int, free_bytes: int) -> int:
    """How many buffer sets to rotate over.

    Args:
        set_bytes: bytes of one set, every buffer counted once.
        cache_bytes: the last-level cache; the sets together are to hold three times as much.
        free_bytes: memory that may be taken. Contenders that allocate their outputs take as much again.

    Returns:
        between 1 and MAX_LAUNCHES; at least 3 where memory allows.
    """
    wanted = max(3, -(-3 * cache_bytes // set_bytes))
    affordable = max(1, free_bytes // set_bytes)
    return int(min(wanted, affordable, MAX_LAUNCHES))


def count_launches(sets: int, bytes_moved: int) -> int:
    """Launches of one graph: every set at least once, and enough to fill MIN_GRAPH_US."""
    guess_us = max(_GUESS_LAUNCH_US, bytes_moved / _GUESS_BYTES_PER_US)
    return min(MAX_LAUNCHES, max(sets, math.ceil(MIN_GRAPH_US / guess_us)))


class Graph:
    """One contender's launches over all sets, captured."""

    def __init__(self, calls: Sequence[Call], launches: int, context: Callable[[], AbstractContextManager[object]]):
        self.launches = launches
        self.results: list[object] = [None] * len(calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with context(), torch.cuda.stream(stream):
            for call in (*calls[:2], *calls[-1:]):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with context(), torch.cuda.graph(self.graph):
            for k in range(launches):
                # Keeping a result until its set's next turn stops the allocator from handing the same,
                # still cached, output buffer to every launch.
                self.results[k % len(calls)] = calls[k % len(calls)]()
        self.graph.replay()
        torch.cuda.synchronize()

    def writes(self, result: torch.Tensor) -> bool:
        """Whether a replay writes `result`, a tensor of the last set: a launch outside of the capture does not."""
        bits = result.view(torch.uint8)  # few operations know all formats of 8 bits
        bits.fill_(SENTINEL)
        self.graph.replay()
        torch.cuda.synchronize()
        return bool((bits != SENTINEL).any())

    def replay(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Queues one timed replay; the events are read after a synchronisation."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(100_000 + 1000 * self.launches)
        start.record()
        self.graph.replay()
        stop.record()
        return start, stop


def time_graphs(graphs: dict[str, Graph], repeats: int) -> dict[str, Timing]:
    """Replays all graphs in turn, `repeats` times, each repeat starting with another one."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for repeat in range(repeats):
        shift = repeat % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            start, stop = graphs[name].replay()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1e3 / graphs[name].launches)
    return {name: summarise(s, graphs[name].launches) for name, s in samples.items()}


@dataclass
class HostCalls:
    """One contender of the host measurement: a bound call and the context it runs in."""

    call: Call
    context: Callable[[], AbstractContextManager[object]]
    samples: list[float] = field(default_factory=list)


def time_host(calls: dict[str, HostCalls], blocks: int = 40, block: int = 100) -> dict[str, Timing]:
    """Host microseconds of a warm call.

    Args:
        calls: contenders on one small shape, already warm.
        blocks: timed blocks of each contender, interleaved.
        block: calls a block; far fewer than the launch queue holds.
    """
    sync = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    for index in range(blocks + 2):
        for entry in calls.values():
            call = entry.call
            with entry.context():
                sync()
                start = time.perf_counter()
                for _ in range(block):
                    call()
                spent = time.perf_counter() - start
                sync()
            if index >= 2:
                entry.samples.append(spent / block * 1e6)
    return {name: summarise(entry.samples, block) for name, entry in calls.items()}


def time_cpu(
    calls: dict[str, Sequence[Call]],
    contexts: dict[str, Callable[[], AbstractContextManager[object]]],
    repeats: int,
    block_ms: float = 20.0,
) -> dict[str, Timing]:
    """Wall-clock microseconds of a call on the CPU, over rotated sets, interleaved.

    The first block of each contender warms it up and sets how many calls a block holds.
    """
    launches: dict[str, int] = {}
    for name, bound in calls.items():
        with contexts[name]():
            bound[0]()
            start = time.perf_counter()
            count = 0
            while count < len(bound) or time.perf_counter() - start < block_ms / 1e3:
                bound[count % len(bound)]()
                count += 1
                if time.perf_counter() - start > 10 * block_ms / 1e3:
                    break
            launches[name] = count
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for repeat in range(repeats):
        shift = repeat % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            bound, count = calls[name], launches[name]
            with contexts[name]():
                start = time.perf_counter()
                for k in range(count):
                    bound[k % len(bound)]()
                samples[name].append((time.perf_counter() - start) / count * 1e6)
    return {name: summarise(s, launches[name]) for name, s in samples.items()}


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
