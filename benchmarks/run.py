"""A benchmark run: first calls, then every operator at every shape, then what it costs the host.

`bench.py` is the command line in front of it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flashnorm.core import native

from . import report as reporting
from .bars import BARE, Shape
from .entry import Bench, Buffers, Contender
from .measure import Call, Graph, HostCalls, Timing, count_launches, count_sets, time_cpu, time_graphs, time_host
from .peers import BENCHES
from .prepare import Builds, jobs
from .report import progress
from .rivals import EPS, SCALE

HOST_SHAPE: Shape = (1, 4096)
# No published last-level cache of a CPU we meet is larger per core pair than this.
_CPU_CACHE = 64 << 20
# Of the budget: the most that may go into what is compiled ahead.
_AHEAD = 0.5


@dataclass
class Trial:
    """By contender, at one operator and shape: failures, distance from the formula, seconds of the first call."""

    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    prepare: dict[str, float] = dataclasses.field(default_factory=dict)


class Run:
    """A benchmark run: settings, clock and the growing report."""

    def __init__(self, args: argparse.Namespace, argv: Sequence[str]):
        self.args = args
        self.started = time.monotonic()
        self.device = torch.device(args.device)
        self.dtype = getattr(torch, args.dtype)
        self.longest = 0.0
        settings = {
            "dtype": args.dtype, "eps": EPS, "scale": SCALE, "repeats": args.repeats, "budget_s": args.budget
        }  # fmt: skip
        self.report = reporting.header(argv, self.device, settings, args.commit)
        self.broken: str | None = None
        self.trials: dict[tuple[str, Shape], Trial] = {}
        self.spent: Counter[str] = Counter()

    def work(self) -> list[tuple[Bench, Shape]]:
        """What is to be measured, shape by shape: a run that is cut off has left out the same shapes of all."""
        benches = [BENCHES[name] for name in self.args.ops]
        wanted = {bench.name: self.args.shapes or bench.shapes for bench in benches}
        shapes = dict.fromkeys(shape for mine in wanted.values() for shape in mine)
        return [(bench, shape) for shape in shapes for bench in benches if shape in wanted[bench.name]]

    def host_work(self) -> list[tuple[Bench, Shape]]:
        """What the host cost alone needs: one small shape of each."""
        self.say(f"warm calls are looked at in {'C++' if native.load() is not None else 'Python'}")
        return [(BENCHES[name], self.args.host_shape) for name in self.args.ops]

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @contextlib.contextmanager
    def clock(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent[what] += time.monotonic() - began

    def save(self) -> None:
        self.report["settings"]["elapsed_s"] = round(self.elapsed(), 1)
        self.report["settings"]["spent_s"] = {what: round(seconds, 1) for what, seconds in self.spent.items()}
        if self.args.json:
            path = Path(self.args.json)
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(path.name + ".part")
            aside.write_text(json.dumps(self.report, indent=1) + "\n")
            os.replace(aside, path)

    def say(self, text: str) -> None:
        progress(f"[{self.elapsed():5.0f} s] {text}")

    def skip(self, bench: Bench, shape: Shape, why: str) -> None:
        self.report["skipped"].append({"op": bench.name, "M": shape[0], "H": shape[1], "why": why})

    def out_of_time(self) -> bool:
        return self.elapsed() + self.longest > self.args.budget

    # ------------------------------------------------------------------ before anything is measured
    def prepare(self, work: Sequence[tuple[Bench, Shape]]) -> None:
        """Builds what can be built in the background, and uses the time for the first calls of everybody else."""
        try:
            todo = jobs(work, self.args.routes, self.dtype, self.device)
        except Exception as error:  # said again, and for whom, at the first call
            progress(f"nothing is built ahead: {_reason(error)}")
            todo = []
        with self.clock("compiling"):
            builds = Builds(todo, self.args.peers if self.device.type == "cuda" else (), work)
            for bench, shape in work:
                if builds.done() or self.broken or self.elapsed() > _AHEAD * self.args.budget:
                    break
                for c in bench.contenders(self.args.routes, self.args.peers, self.device.type):
                    if not c.built_aside:
                        self._correct(bench, c, shape)
            builds.wait(max(0.0, _AHEAD * self.args.budget - self.elapsed()))
        if self.device.type == "cuda":
            # What compilers and libraries left behind stays: it need not be walked again after every shape.
            gc.collect()
            gc.freeze()
            torch.cuda.empty_cache()
        self.say(f"{len(todo)} kernels built ahead, {len(self.trials)} of {len(work)} first calls of peers done")

    # ------------------------------------------------------------------ one operator at one shape
    def measure(self, bench: Bench, shape: Shape) -> None:
        why = self.broken or ("out of time" if self.out_of_time() else None)
        if why:
            self.skip(bench, shape, why)
            return
        began = time.monotonic()
        try:
            rows = self._rows(bench, shape)
        except Exception as error:
            self._broken_by(error)
            self.skip(bench, shape, _reason(error))
            rows = []
        reporting.relate(rows)
        self.report["rows"] += rows
        spent = time.monotonic() - began
        if self.report["rows"] != rows:  # the first shape pays for imports
            self.longest = max(self.longest, spent)
        best = min((r["us"] for r in rows if r["us"] and r["kind"] == "peer"), default=0.0)
        ours = ", ".join(f"{r['contender']} {r['us']:.2f}" for r in rows if r["us"] and r["kind"] == "ours")
        self.say(f"{bench.name} {shape[0]}x{shape[1]}: {ours or 'nothing of ours'}; best peer {best:.2f} us")
        self.save()
        gc.collect()
        if self.device.type == "cuda" and not self.broken:
            torch.cuda.empty_cache()

    def _rows(self, bench: Bench, shape: Shape) -> list[reporting.Row]:
        entrants = bench.contenders(self.args.routes, self.args.peers, self.device.type)
        moved = bench.bytes_moved(*shape, self.dtype)
        ceiling_moved = 2 * shape[0] * shape[1] * self.dtype.itemsize
        sets, launches = self._counts(bench, shape, moved)
        with self.clock("first calls"):
            ready = [c for c in entrants if self._correct(bench, c, shape)]
        trial = self._trial(bench, shape)
        with self.clock("timing"):
            buffers = bench.make_sets(sets, *shape, self.dtype, self.device)
            timings = self._time(bench, ready, buffers, launches, trial)
        rows = []
        for c in entrants:
            timing: Timing | None = timings.get(c.name)
            number = ceiling_moved if c.kind == "ceiling" else moved
            rows.append({
                "op": bench.name, "M": shape[0], "H": shape[1], "dtype": self.args.dtype, "device": self.device.type,
                "contender": c.name, "kind": c.kind,
                "us": timing and timing.us, "us_min": timing and timing.us_min, "us_max": timing and timing.us_max,
                "bytes": number, "gbps": timing and number / timing.us / 1e3,
                "to_best_peer": None, "of_ceiling": None, "error_l2": trial.errors.get(c.name),
                "prepare_s": trial.prepare.get(c.name),
                "sets": sets, "launches": timing and timing.launches, "failure": trial.failures.get(c.name),
            })  # fmt: skip
        return rows

    def _counts(self, bench: Bench, shape: Shape, moved: int) -> tuple[int, int]:
        if self.args.same_buffers:
            return 1, count_launches(1, moved)
        size = bench.set_bytes(*shape, self.dtype)
        if self.device.type == "cpu":
            return count_sets(size, _CPU_CACHE, 2 << 30), 0
        free, _ = torch.cuda.mem_get_info(self.device)
        cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or (64 << 20)
        # A tenth: every contender that allocates its outputs holds about as much again.
        sets = count_sets(size, cache, free // 10)
        return sets, count_launches(sets, moved)

    def _trial(self, bench: Bench, shape: Shape) -> Trial:
        return self.trials.setdefault((bench.name, shape), Trial())

    def _correct(self, bench: Bench, c: Contender, shape: Shape) -> bool:
        """Calls a contender once on fresh buffers (which compiles it) and compares some rows with the formula; once."""
        if c.kind == "ceiling":
            return True
        trial = self._trial(bench, shape)
        if c.name in trial.prepare:
            return c.name not in trial.failures
        if self.broken:
            trial.failures[c.name] = self.broken
            return False
        began = time.monotonic()
        try:
            fresh = bench.make_sets(1, *shape, self.dtype, self.device)[0]
            some = sorted({0, shape[0] // 2, shape[0] - 1})
            wanted = bench.expected(fresh, some)
            began = time.monotonic()
            with c.context():
                returned = c.bind(fresh)()
            trial.prepare[c.name] = round(time.monotonic() - began, 2)
            distance = float((bench.values(fresh, returned, some) - wanted).norm() / wanted.norm())
            trial.errors[c.name] = distance
            wrong = bench.reason_wrong(fresh, returned, distance)
            if wrong is not None:
                trial.failures[c.name] = wrong
        except Exception as error:
            trial.prepare.setdefault(c.name, round(time.monotonic() - began, 2))
            trial.failures[c.name] = _reason(error)
            self._broken_by(error)
        return c.name not in trial.failures

    def _time(
        self, bench: Bench, ready: list[Contender], buffers: list[Buffers], launches: int, trial: Trial
    ) -> dict[str, Timing]:
        if self.device.type == "cpu":
            calls: dict[str, Sequence[Call]] = {c.name: [c.bind(t) for t in buffers] for c in ready}
            return time_cpu(calls, {c.name: c.context for c in ready}, self.args.repeats)
        graphs: dict[str, Graph] = {}
        for c in ready:
            try:
                with c.context():
                    calls_of = [c.bind(t) for t in buffers]
                graph = Graph(calls_of, launches, c.context)
                if graph.writes(bench.result(buffers[-1], graph.results[-1])):
                    graphs[c.name] = graph
                else:
                    trial.failures[c.name] = "its captured graph writes nothing: it launches outside of the capture"
            except Exception as error:
                trial.failures[c.name] = _reason(error)
                self._broken_by(error)
        return time_graphs(graphs, self.args.repeats) if not self.broken else {}

    def _broken_by(self, error: Exception) -> None:
        """A CUDA error that sticks ends the run: every later figure would be of a dead context."""
        if self.args.trace:
            traceback.print_exception(error)
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except Exception as sticky:
            self.broken = f"the CUDA context is gone: {_reason(sticky)}"

    # ------------------------------------------------------------------ host cost
    def host(self, bench: Bench) -> None:
        buffers = bench.make_sets(1, *self.args.host_shape, self.dtype, self.device)[0]
        entrants = bench.contenders(self.args.routes, self.args.peers, self.device.type)
        entrants = [c for c in entrants if c.kind != "ceiling"]
        for c in [c for c in entrants if c.kind == "ours" and c.name != "flashnorm torch"]:
            bind = bench.bare(c.name.removeprefix("flashnorm "))
            entrants.append(Contender(f"{c.name}, {BARE}", "peer", bind))
        calls: dict[str, HostCalls] = {}
        failures: dict[str, str] = {}
        for c in entrants:
            try:
                with c.context():
                    call = c.bind(buffers)
                    for _ in range(10):
                        call()
                calls[c.name] = HostCalls(call, c.context)
            except Exception as error:
                self._broken_by(error)
                failures[c.name] = _reason(error)
        calls["torch.empty_like"] = HostCalls(lambda: torch.empty_like(buffers.x), contextlib.nullcontext)
        timings = {} if self.broken else time_host(calls)
        for name in (*(c.name for c in entrants), "torch.empty_like"):
            t = timings.get(name)
            why = failures.get(name) or self.broken
            us = {"us": t and t.us, "us_min": t and t.us_min, "us_max": t and t.us_max}
            self.report["host"].append({"op": bench.name, "contender": name, **us, "failure": None if t else why})
        self.save()
        costs = (f"{name} {t.us:.1f}" for name, t in timings.items())
        self.say(f"host cost of {bench.name}: {', '.join(costs)}")


def _reason(error: Exception) -> str:
    """One line: the type, the first line of the text, and what a compiler complained about first."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    complaint = next((line for line in lines[1:] if "error" in line.lower()), "")
    return f"{type(error).__name__}: {lines[0]}{' ... ' if complaint else ''}{complaint}"[:300]
