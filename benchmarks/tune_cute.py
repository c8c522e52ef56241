"""Finds launch plans for the CuTe route: `python -m benchmarks.tune_cute`, from the project's root, on the GPU.

    python -m benchmarks.tune_cute --ops ln,quant --shapes 16384x7168,64x4096
    python -m benchmarks.tune_cute --ops ln --shapes 8192x16384 --like 256/256x1    # those of 256 threads
    python -m benchmarks.tune_cute --check-only --ops ln,blocks,token --limit 1     # the chosen tiles, bit for bit

For every operation of `tune_cases.py` and shape of the table: each candidate tile is compiled (in worker processes),
its results are compared bit for bit with `flashnorm.model`, and it is timed as `measure.py` says, in CUDA graphs over
cold buffers with PDL on, beside `torch.mul`. The best of the first round are then varied in what does not change the
shape of a tile (weights early or late, staging, when the next kernel may start, prefetch). A tile that fails is
reported and left out. Every measured point is a line of the JSON; the end of the output is the best per shape.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.tune_cases import CASES, Checker, bytes_moved, call, operands
from flashnorm.kernels import plans
from flashnorm.kernels import tile as tiles
from flashnorm.kernels.tile import Needs, RowTile

# Few rows first: that is where plans differ most, and a budget that runs out should cost the least.
SHAPES = (
    "1x4096,8x4096,64x4096,64x8192,128x7168,512x4096,1024x8192,4096x4096,16384x4096,4096x32768,8192x16384,"
    "4096x65536,32768x128,262144x128,2048x131072,16384x5120,32768x8192,1x65536,4096x1024"
)
ABREAST: tuple[dict, ...] = ({}, {"batch": 3}, {"ahead": True})  # ways with vectors


# ------------------------------------------------------------------ candidates
def needs(op: str) -> Needs:
    """What a tile must have for it; H does not matter."""
    return tiles.needs_of(CASES[op].variant(4096))


def first_round(hidden_size: int, rows: int, op: str, sm: int) -> Iterator[RowTile]:
    """Tiles that differ in threads, rows per CTA and cluster."""
    lanes, groups = tiles.lanes(hidden_size), -(-hidden_size // 8)
    held, weights, least = needs(op).held, max(1, needs(op).vectors), needs(op).least
    few, narrow = rows <= 256, hidden_size <= 512
    for c in (1, 2, 4, 8):
        if c > 1 and not (plans.has_clusters(sm) and (hidden_size >= 16384 or (few and hidden_size >= 4096))):
            continue
        for t in (*((2, 4) if narrow else ()), 8, 16, 32, 64, 128, 256, 512, 1024):
            rounds = -(-groups // (t * c))
            if not min(least, lanes) <= t * c <= lanes or (c > 1 and t < 32):
                continue
            if rounds * 8 * held > min(384, 131072 // t):
                continue
            if few and rounds > 4 and hidden_size < 32768:
                continue
            several = (t, *((32, 64) if narrow else ()), 128, 256, min(2 * t, 512))
            for n in dict.fromkeys(several) if c == 1 else (t,):
                if n >= max(t, 32) and (t <= 32 or n // t <= 8) and not (few and n > max(t, 128)):
                    yield RowTile(hidden_size, 8, t, n, c, early_weights=rounds * weights <= 4)
                    if weights > 1 and not few and rounds > 1:
                        yield RowTile(hidden_size, 8, t, n, c, early_weights=False, batch=1)
                    if weights > 1 and not few and c == 1 and n <= (64 if narrow else 512) and needs(op).grouped:
                        for abreast in (a for a in (2, 4) if a * rounds * 8 * held <= 256):  # half of the registers
                            late = RowTile(hidden_size, 8, t, n, early_weights=False, batch=1, abreast=abreast)
                            for how in ABREAST:
                                yield dataclasses.replace(late, **how)
    if hidden_size >= 32768:
        for c in (1, 2, 4, 8)[: 4 if plans.has_clusters(sm) else 1]:
            for t in (128, 256, 512, 1024):
                if t * c <= lanes:
                    tile = RowTile(hidden_size, 8, t, t, c, hold="shared", staged=True, early_weights=False)
                    if tile.shared_bytes(needs(op)) <= tiles.shared_limit(sm):
                        yield tile


def second_round(best: RowTile, few: bool) -> Iterator[RowTile]:
    """Variations of a good tile."""
    change = dataclasses.replace
    yield change(best, early_weights=not best.early_weights)
    yield change(best, signal_early=True)
    yield change(best, signal_early=True, prefetch="vecs")
    if best.cluster_n > 1:
        yield change(best, mailbox=not best.mailbox)
        yield change(best, mailbox=not best.mailbox, signal_early=True, prefetch="vecs")
    if few:
        yield change(best, signal_early=True, prefetch="all")
        yield change(best, signal_early=True, prefetch="all", early_weights=not best.early_weights)
    else:
        yield change(best, streaming=True)
        yield change(best, streaming=True, signal_early=True)
    if best.hold == "registers" and best.threads <= 32:
        for turns in {1, 2, 4} - {best.turns}:
            yield change(best, turns=turns)
            yield change(best, turns=turns, early_weights=not best.early_weights)
    if best.hold == "registers" and not few and best.turns == best.abreast == 1:
        yield change(best, staged=True)
        yield change(best, staged=True, hold="shared")
        yield change(best, staged=True, hold="shared", signal_early=True)
    if not best.early_weights:
        if not few and best.hold == "registers":
            yield change(best, ahead=not best.ahead)
        for batch in (1, 2, 3, 8, 16):
            yield change(best, batch=batch)
            if batch <= 3 and not few:
                yield change(best, batch=batch, streaming=True)


def describe(tile: RowTile) -> str:
    flags = [f for f in ("staged", "early_weights", "signal_early", "streaming") if getattr(tile, f)]
    flags += [f"prefetch-{tile.prefetch}"] if tile.prefetch != "none" else []
    flags += [f"{f}-{n}" for f in ("turns", "abreast") if (n := getattr(tile, f)) > 1]
    flags += [f for f in ("ahead", "mailbox") if getattr(tile, f)]
    return f"{tile.threads_per_row}/{tile.num_threads}x{tile.cluster_n} {tile.hold} b{tile.batch} {' '.join(flags)}"


# ------------------------------------------------------------------ compiling, in worker processes
def compile_tile(op: str, tile: RowTile, arch: str, folder: str) -> tuple[str | None, str]:
    """(library, "") or (None, reason); runs in a worker."""
    try:
        from flashnorm.jit.dsl import find_dsl
        from flashnorm.jit.link import find_linker, link_object
        from flashnorm.jit.toolchain import find_tvm_ffi
        from flashnorm.kernels.compile import compile_variant

        variant = CASES[op].variant(tile.hidden_size)
        out = Path(tempfile.mkdtemp(dir=folder))
        compile_variant(variant, arch, plans=((None, tile),)).export(out / "kernel.o")
        return str(link_object(out, find_linker(), find_dsl(), find_tvm_ffi())), ""
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}"[:500]


def warm_worker() -> None:
    with contextlib.suppress(Exception):
        import flashnorm.kernels.compile  # noqa: F401


# ------------------------------------------------------------------ checking and timing
def load(library: str) -> Callable[..., Any]:
    from flashnorm.jit.link import load_linked

    return load_linked(Path(library).parent)


def check_loop(pipe: Any, make: Callable[[str, int], Any]) -> None:
    """A process that checks tiles: one that faults or hangs takes this process along and no other."""
    checkers: dict[tuple[str, int], Any] = {}
    while True:
        op, hidden_size, library = pipe.recv()
        try:
            if (op, hidden_size) not in checkers:
                checkers[op, hidden_size] = make(op, hidden_size)
            why = checkers[op, hidden_size].wrong(load(library))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:300]
        pipe.send(why)
        if why is not None:
            torch.cuda.synchronize()  # raises, and ends the process, where the device is lost to it


class CheckProcess:
    """Asks `check_loop`, and starts another one where it died; `make` makes what checks an operation at some H."""

    def __init__(self, make: Callable[[str, int], Any] = Checker) -> None:
        self.make = make
        self.context = multiprocessing.get_context("spawn")
        self.process: Any = None
        self.pipe: Any = None

    def wrong(self, op: str, hidden_size: int, library: str) -> str | None:
        if self.process is None or not self.process.is_alive():
            self.pipe, theirs = self.context.Pipe()
            self.process = self.context.Process(target=check_loop, args=(theirs, self.make), daemon=True)
            self.process.start()
        try:
            self.pipe.send((op, hidden_size, library))
            if self.pipe.poll(40):
                return self.pipe.recv()
            why = "no answer in 40 s"
        except (EOFError, OSError) as error:
            why = f"the check died: {type(error).__name__}"
        self.stop()
        return why

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


class Bench:
    """Buffers of one shape, and timing of launches over them."""

    def __init__(self, op: str, rows: int, hidden_size: int) -> None:
        from benchmarks.measure import count_launches, count_sets

        self.case = CASES[op]
        self.moved = bytes_moved(self.case, rows, hidden_size)
        free, _ = torch.cuda.mem_get_info()
        sets = count_sets(self.moved, torch.cuda.get_device_properties(0).L2_cache_size, int(free * 0.6))
        # Graphs of many small launches are slow to make, and 1500 launches time a microsecond well enough.
        self.launches = min(1500, count_launches(sets, self.moved))
        self.sets = [operands(self.case, rows, hidden_size, "cuda", n) for n in range(min(sets, self.launches))]
        # torch.mul on as many bytes as the rows that are read: the yardstick of every operation.
        self.plain = [torch.randn(rows, hidden_size, device="cuda", dtype=torch.bfloat16) for _ in self.sets]

    def graph(self, launch: Callable[..., Any] | None) -> Any:
        """A captured graph; None times torch.mul over a bf16 tensor of the shape."""
        from benchmarks.measure import Graph

        if launch is None:
            pairs = zip(self.plain, self.plain[1:] + self.plain[:1], strict=True)
            calls = [lambda x=x, y=y: torch.mul(x, 2, out=y) for x, y in pairs]
        else:
            calls = [lambda given=given: call(self.case, launch, given, True) for given in self.sets]
        return Graph(calls, self.launches, contextlib.nullcontext)


def time_all(graphs: dict[Any, Any], repeats: int, flush: torch.Tensor) -> dict[Any, float]:
    """Median microseconds a launch; the caches are swept before each replay, and graphs take turns."""
    samples: dict[Any, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            flush.zero_()
            start, stop = graph.replay()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1e3 / graph.launches)
    return {name: sorted(s)[len(s) // 2] for name, s in samples.items()}


# ------------------------------------------------------------------ one shape
class Run:
    """What is compiled, checked and measured so far."""

    def __init__(self, options: argparse.Namespace, pool: concurrent.futures.Executor, folder: str) -> None:
        self.options, self.pool, self.folder = options, pool, folder
        self.sm = tiles.sm_of(options.arch)
        self.failed: list[str] = []
        self.checker = CheckProcess()
        self.libraries: dict[tuple[str, RowTile], concurrent.futures.Future] = {}
        self.good: dict[tuple[str, RowTile], Callable[..., Any] | None] = {}

    def compile(self, op: str, candidates: Sequence[RowTile]) -> None:
        for tile in candidates:
            if (op, tile) not in self.libraries:
                self.libraries[op, tile] = self.pool.submit(compile_tile, op, tile, self.options.arch, self.folder)

    def fail(self, op: str, tile: RowTile, why: str) -> None:
        self.failed.append(f"{op} H={tile.hidden_size} {describe(tile)}: {why}")
        print("  FAILED", self.failed[-1], flush=True)

    def library(self, op: str, tile: RowTile) -> str | None:
        try:
            path, why = self.libraries[op, tile].result(timeout=120)
        except Exception as error:  # a worker that died takes its neighbours along, not this process
            path, why = None, f"{type(error).__name__}: {error}"
        if path is None:
            self.fail(op, tile, why)
        return path

    def launch(self, op: str, tile: RowTile) -> Callable[..., Any] | None:
        """The checked kernel of a tile, or None."""
        if (op, tile) not in self.good:
            self.good[op, tile] = None
            path = self.library(op, tile)
            if path is not None:
                why = self.checker.wrong(op, tile.hidden_size, path)
                if why is None:
                    self.good[op, tile] = load(path)
                else:
                    self.fail(op, tile, why)
        return self.good[op, tile]

    def measure(self, bench: Bench, op: str, rows: int, candidates: Sequence[RowTile], flush: torch.Tensor) -> dict:
        graphs: dict[Any, Any] = {"mul": bench.graph(None)}
        for tile in candidates:
            launch = self.launch(op, tile)
            if launch is not None:
                try:
                    graphs[tile] = bench.graph(launch)
                except Exception as error:
                    self.fail(op, tile, f"capture: {type(error).__name__}: {error}"[:300])
        times = time_all(graphs, self.options.repeats, flush)
        with open(self.options.json, "a", encoding="utf-8") as out:
            for tile, us in times.items():
                plan = {} if tile == "mul" else dataclasses.asdict(tile)
                out.write(json.dumps({"op": op, "M": rows, "us": round(us, 4), "tile": plan}) + "\n")
        return times


def tune_shape(run: Run, op: str, rows: int, hidden_size: int, flush: torch.Tensor) -> str:
    bench = Bench(op, rows, hidden_size)
    times = run.measure(bench, op, rows, candidates_of(run, op, rows, hidden_size), flush)
    mul = times.pop("mul")
    ranked = sorted(times, key=times.get)  # type: ignore[arg-type]
    more: dict[RowTile, None] = {}
    for tile in ranked[: 0 if run.options.first else 2]:
        more.update(dict.fromkeys(t for t in second_round(tile, rows <= 256) if t not in times))
    legal = [t for t in more if t.shared_bytes(needs(op)) <= tiles.shared_limit(run.sm)]
    run.compile(op, legal)
    again = run.measure(bench, op, rows, [*ranked[:2], *legal], flush)
    mul = min(mul, again.pop("mul"))
    times.update(again)
    ranked = sorted(times, key=times.get)  # type: ignore[arg-type]
    if not ranked:
        return f"{op:9s} {rows:6d} x {hidden_size:<6d} mul {mul:8.2f}  nothing ran"
    head = f"{op:9s} {rows:6d} x {hidden_size:<6d} mul {mul:8.2f} ({bench.moved / mul / 1e3:5.0f} GB/s at its time)"
    best = [f"{times[t]:8.2f} us {bench.moved / times[t] / 1e3:5.0f} GB/s  {describe(t)}" for t in ranked[:5]]
    return head + "".join(f"\n      {line}" for line in best)


def candidates_of(run: Run, op: str, rows: int, hidden_size: int) -> list[RowTile]:
    table = plans.plans(hidden_size, 8, needs(op), run.sm)
    chosen = next(t for limit, t in table if limit is None or rows <= limit)
    like, found = run.options.like.split(","), first_round(hidden_size, rows, op, run.sm)
    asked = [t for t in found if any(part in describe(t) for part in like)]
    return list(dict.fromkeys([chosen, *asked]))[: run.options.limit]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default="rms,add", help=f"by commas, of {', '.join(CASES)}")
    parser.add_argument("--shapes", default=SHAPES, help="MxH, by commas")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--json", default="tune_cute.jsonl")
    parser.add_argument("--budget", type=float, default=230.0, help="seconds, compiling included")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=int, default=80, help="tiles a shape at most, in the first round")
    parser.add_argument(
        "--like", default="", help="beside the chosen tile, those described by one of these texts alone"
    )
    parser.add_argument("--first", action="store_true", help="no second round")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--check-only", action="store_true", help="compile and check the first round, time nothing")
    parser.add_argument("--compile-only", action="store_true", help="compile the first round; needs no GPU")
    return parser.parse_args()


def main() -> int:
    options, begin = parse(), time.monotonic()
    shapes = [tuple(int(v) for v in s.split("x")) for s in options.shapes.split(",") if s]
    jobs = [(op, rows, hidden) for rows, hidden in shapes for op in options.ops.split(",")]
    lines, skipped = [], []
    # Processes, since the DSL compiles one kernel at a time in each; spawned, since CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context, initializer=warm_worker) as pool,
    ):
        run = Run(options, pool, folder)
        for op, rows, hidden in jobs:
            run.compile(op, candidates_of(run, op, rows, hidden))
        print(f"{len(run.libraries)} tiles, {options.workers} workers", flush=True)
        if options.compile_only:
            done = [run.library(op, tile) for op, tile in list(run.libraries)]
            compiled = sum(d is not None for d in done)
            print(f"{compiled} compiled, {len(run.failed)} failed, {time.monotonic() - begin:.1f} s")
            return 1 if run.failed else 0
        if options.check_only:
            checked = sum(run.launch(op, tile) is not None for op, tile in list(run.libraries))
            run.checker.stop()
            print(f"{checked} right, {len(run.failed)} failed, {time.monotonic() - begin:.1f} s")
            return 1 if run.failed else 0
        flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        for op, rows, hidden in jobs:
            if time.monotonic() - begin > options.budget:
                skipped.append(f"{op} {rows}x{hidden}")
                continue
            try:
                lines.append(tune_shape(run, op, rows, hidden, flush))
            except Exception:
                lines.append(f"{op} {rows}x{hidden}: {traceback.format_exc(limit=3)}")
            print(f"[{time.monotonic() - begin:5.1f} s] {lines[-1]}", flush=True)
            torch.cuda.empty_cache()
        run.checker.stop()
        for future in run.libraries.values():
            future.cancel()
    print("\n==== best of each shape\n" + "\n".join(lines))
    print(f"\n{len(run.failed)} failures" + "".join(f"\n  {f}" for f in run.failed[:20]))
    if skipped:
        print("left out for time: " + ", ".join(skipped))
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
