"""Finds launch plans for the CuTe route's backward: `python -m benchmarks.tune_backward`, from the root, on the GPU.

    python -m benchmarks.tune_backward --budget 85 --json tune_backward.jsonl
    python -m benchmarks.tune_backward --norm layer --shapes 8192x512,16384x4096
    python -m benchmarks.tune_backward --limit 1                    # the chosen tiles alone
    python -m benchmarks.tune_backward --check-only --limit 1 --shapes 300x1003,100x40000
    python -m benchmarks.tune_backward --compile-only --limit 3     # needs no GPU

Each candidate is compiled (in worker processes), its gradients are compared with the CPU route's bit for bit, on as
many rows as give every stream a second block, and it is timed as `measure.py` says, in CUDA graphs over cold buffers
with PDL on, beside `torch.mul(x, dout, out=dx)`. The end of the output is the best of each shape, and for RMSNorm its
share of the time that was measured for quack, the geometric mean last.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import flashnorm
from benchmarks.tune_cute import CheckProcess, load, time_all, warm_worker
from flashnorm.kernels import stream_plans
from flashnorm.kernels import tile as tiles
from flashnorm.kernels.stream_tile import StreamTile, asks_of
from flashnorm.ops.backward import layernorm_backward, rmsnorm_backward
from flashnorm.program import BackwardProgram, Variant, partials
from flashnorm.program.backward import INNER_ROWS

# (M, H) -> us of quack's backward for bf16 on an H200, measured with CUDA graphs over cold buffers.
QUACK = {
    (8192, 512): 18.9,
    (4096, 2048): 30.3,
    (16172, 2048): 70.0,
    (16384, 4096): 123.0,
    (16231, 6144): 209.0,
    (32768, 8192): 477.0,
    (16384, 16384): 593.0,
    (2048, 32768): 188.0,
}
B, S = torch.bfloat16, torch.float32


def program(norm: str) -> BackwardProgram:
    return BackwardProgram("layer", dbias=True) if norm == "layer" else BackwardProgram("rms")


def variant(norm: str, hidden_size: int) -> Variant:
    """bf16 rows and vectors."""
    found = program(norm)
    dtypes = tuple("float32" if o.dtypes == ("float32",) else "bfloat16" for o in found.operands())
    return Variant(found, dtypes, hidden_size, vec=math.gcd(hidden_size, 8))


# ------------------------------------------------------------------ candidates
def candidates(norm: str, hidden_size: int, sm: int, limit: int) -> list[StreamTile]:
    """The plan, and what differs from it in threads, CTAs, stages, and where things wait."""
    asks, change = asks_of(variant(norm, hidden_size)), dataclasses.replace
    chosen = stream_plans.plans(hidden_size, math.gcd(hidden_size, 8), asks, sm)[0][1]
    streams, most = partials(1, hidden_size), tiles.lanes(hidden_size)

    def shapes() -> Iterator[StreamTile]:
        yield chosen
        t, n, c = chosen.threads_per_row, chosen.num_threads, chosen.cluster_n
        for threads, cta, cluster in (
            (t, n // 2, c), (t, 2 * n, c), (t // 2, n // 2, c), (t // 2, n, c), (2 * t, n, c), (2 * t, 2 * n, c),
            (512, 512, 2), (256, 256, 2), (256, 256, 4), (512, 512, 1), (1024, 1024, 1),
        ):  # fmt: skip
            if cluster > 1 and (hidden_size < 8192 or not stream_plans.has_clusters(sm)):
                continue
            if threads < 1 or cta % max(threads, 32) or threads * cluster > most or cta > 1024:
                continue
            if cta // threads > streams or (threads > 32 and cta // threads > 8):
                continue
            with contextlib.suppress(ValueError):
                yield change(chosen, threads_per_row=threads, num_threads=cta, cluster_n=cluster)

    found: dict[StreamTile, None] = {chosen: None}
    policies: tuple[dict[str, Any], ...] = (
        {}, {"stages": 2}, {"stages": 4}, {"again": "values", "outer": "registers", "stages": 3}, {"streaming": True},
        {"prefetch": "none"},
        {"again": "shared"}, {"again": "raw"}, {"outer": "shared"}, {"vectors": "values"}, {"vectors": "shared"},
    )  # fmt: skip
    for policy in policies:
        for tile in shapes():
            with contextlib.suppress(ValueError):
                other = change(tile, **policy)
                room = min(255, 65536 // other.num_threads) + 12  # the estimate errs to the safe side
                small = other.stream_bytes(asks) <= tiles.shared_limit(sm)
                if small and stream_plans.registers(other, asks) <= room:
                    found.setdefault(other)
    return list(found)[:limit]


def describe(tile: StreamTile) -> str:
    return (
        f"{tile.threads_per_row}/{tile.num_threads}x{tile.cluster_n} stages {tile.stages} again {tile.again} "
        f"outer {tile.outer} vectors {tile.vectors}{' streaming' * tile.streaming}"
        f" prefetch {tile.prefetch}{' by columns' * (not tile.summed)}"
    )


def compile_tile(norm: str, tile: StreamTile, arch: str, folder: str) -> tuple[str | None, str]:
    """(library, "") or (None, reason); runs in a worker."""
    try:
        from flashnorm.jit.dsl import find_dsl
        from flashnorm.jit.link import find_linker, link_object
        from flashnorm.jit.toolchain import find_tvm_ffi
        from flashnorm.kernels.compile import compile_variant

        out = Path(tempfile.mkdtemp(dir=folder))
        compile_variant(variant(norm, tile.hidden_size), arch, plans=((None, tile),)).export(out / "kernel.o")
        return str(link_object(out, find_linker(), find_dsl(), find_tvm_ffi())), ""
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}"[:500]


# ------------------------------------------------------------------ operands
def inputs(norm: str, rows: int, hidden_size: int, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """What is read."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    found = {name: normal(rows, hidden_size).to(B) for name in ("dout", "x")}
    found["weight"] = normal(hidden_size).to(B)
    if norm == "layer":
        found |= {"mean": normal(rows) / 8, "rest": normal(rows) / 1e8}
    return found | {"rstd": normal(rows).abs() + 0.5}


def outputs(norm: str, rows: int, hidden_size: int, device: str) -> dict[str, torch.Tensor]:
    found = {"dx": torch.full((rows, hidden_size), math.nan, dtype=B, device=device)}
    for name in ("dweight", "dbias")[: 2 if norm == "layer" else 1]:
        found[name] = torch.full((hidden_size,), math.nan, dtype=B, device=device)
    return found


def workspace(norm: str, hidden_size: int) -> torch.Tensor:
    size = program(norm).sums * partials(1, hidden_size) * hidden_size
    return torch.full((size,), math.nan, dtype=S, device="cuda")


class Checker:
    """Gradients by the CPU route, once a shape: of a few rows, and of so many that every stream has a second block."""

    def __init__(self, norm: str, hidden_size: int) -> None:
        self.norm, self.hidden_size, self.cases = norm, hidden_size, []
        for rows in (3, (INNER_ROWS + 1) * partials(1, hidden_size) + 5):
            given, wanted = inputs(norm, rows, hidden_size, "cpu", rows), outputs(norm, rows, hidden_size, "cpu")
            with flashnorm.backend("cpu"):
                (layernorm_backward if norm == "layer" else rmsnorm_backward)(**given, wanted=wanted)
            self.cases.append([{name: tensor.cuda() for name, tensor in each.items()} for each in (given, wanted)])

    def wrong(self, launch: Callable[..., Any]) -> str | None:
        """What differs, or None."""
        for given, wanted in self.cases:
            for pdl in (False, True):
                got = outputs(self.norm, len(given["x"]), self.hidden_size, "cuda")
                launch(pdl, *given.values(), *got.values(), workspace(self.norm, self.hidden_size))
                for name, want in wanted.items():
                    bad = got[name].view(torch.int16) != want.view(torch.int16)
                    if bad.any():
                        return f"{bad.float().mean().item():.2%} of {name} differs in {len(given['x'])} rows"
        return None


# ------------------------------------------------------------------ one shape
class Bench:
    """Buffers of one shape, and timing of launches over them."""

    def __init__(self, norm: str, rows: int, hidden_size: int) -> None:
        from benchmarks.measure import count_launches, count_sets

        self.norm, self.hidden_size = norm, hidden_size
        self.moved = 6 * rows * hidden_size
        free, _ = torch.cuda.mem_get_info()
        sets = count_sets(self.moved, torch.cuda.get_device_properties(0).L2_cache_size, int(free * 0.6))
        self.launches = min(1500, count_launches(sets, self.moved))
        self.workspace = workspace(norm, hidden_size)
        self.sets = [
            (inputs(norm, rows, hidden_size, "cuda", n), outputs(norm, rows, hidden_size, "cuda"))
            for n in range(min(sets, self.launches))
        ]

    def graph(self, launch: Callable[..., Any] | None) -> Any:
        """A captured graph; None times torch.mul."""
        from benchmarks.measure import Graph

        def bound(given: dict[str, torch.Tensor], out: dict[str, torch.Tensor]) -> Callable[[], object]:
            if launch is None:
                return lambda: torch.mul(given["x"], given["dout"], out=out["dx"])
            arguments = (True, *given.values(), *out.values(), self.workspace)
            return lambda: launch(*arguments)

        return Graph([bound(*each) for each in self.sets], self.launches, contextlib.nullcontext)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--norm", choices=("rms", "layer"), default="rms")
    parser.add_argument("--shapes", default=",".join(f"{m}x{h}" for m, h in QUACK), help="MxH, by commas")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--json", default="tune_backward.jsonl")
    parser.add_argument("--budget", type=float, default=85.0, help="seconds, compiling included")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=int, default=24, help="tiles a shape at most")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--check-only", action="store_true", help="compile and check, time nothing")
    parser.add_argument("--compile-only", action="store_true", help="compile; needs no GPU")
    return parser.parse_args()


class Run:
    """What is compiled and measured so far."""

    def __init__(self, options: argparse.Namespace, pool: concurrent.futures.Executor, folder: str) -> None:
        self.options, self.failed, self.checker = options, list[str](), CheckProcess(Checker)
        self.begin, sm = time.monotonic(), tiles.sm_of(options.arch)
        self.shapes = [tuple(int(v) for v in s.split("x")) for s in options.shapes.split(",") if s]
        self.tiles = {h: candidates(options.norm, h, sm, options.limit) for _, h in self.shapes}
        self.libraries = {
            tile: pool.submit(compile_tile, options.norm, tile, options.arch, folder)
            for place in range(options.limit)  # the plans of all shapes first
            for found in self.tiles.values()
            for tile in found[place : place + 1]
        }

    def library(self, tile: StreamTile) -> str | None:
        try:
            path, why = self.libraries[tile].result(timeout=120)
        except Exception as error:
            path, why = None, f"{type(error).__name__}: {error}"
        if path is None:
            self.fail(tile, why)
        return path

    def fail(self, tile: StreamTile, why: str) -> None:
        self.failed.append(f"H={tile.hidden_size} {describe(tile)}: {why}")
        print("  FAILED", self.failed[-1], flush=True)

    def late(self) -> bool:
        return time.monotonic() - self.begin > self.options.budget

    def right(self, hidden_size: int) -> dict[StreamTile, Callable[..., Any]]:
        """The launches whose bits are the CPU route's; where time is up, that of the plan alone."""
        found = {}
        for place, tile in enumerate(self.tiles[hidden_size]):
            if place and self.late():
                continue
            path = self.library(tile)
            if path is not None:
                why = self.checker.wrong(self.options.norm, hidden_size, path)
                if why is None:
                    found[tile] = load(path)
                else:
                    self.fail(tile, why)
        return found

    def tune(self, rows: int, hidden_size: int, flush: torch.Tensor) -> tuple[str, float | None]:
        """(what to print, the best time)."""
        launches = self.right(hidden_size)
        bench = Bench(self.options.norm, rows, hidden_size)
        graphs: dict[Any, Any] = {"mul": bench.graph(None)}
        for tile, launch in launches.items():
            try:
                graphs[tile] = bench.graph(launch)
            except Exception as error:
                self.fail(tile, f"capture: {type(error).__name__}: {error}"[:300])
        times = time_all(graphs, self.options.repeats, flush)
        with open(self.options.json, "a", encoding="utf-8") as out:
            for tile, us in times.items():
                plan = {} if tile == "mul" else dataclasses.asdict(tile)
                line = {"op": f"{self.options.norm}_backward", "M": rows, "H": hidden_size, "us": round(us, 4)}
                out.write(json.dumps({**line, "tile": plan}) + "\n")
        mul = times.pop("mul")
        ranked = sorted(times, key=times.get)  # type: ignore[arg-type]
        head = f"{rows:6d} x {hidden_size:<6d} mul {mul:8.2f}"
        if not ranked:
            return f"{head}  nothing ran", None
        chosen = self.tiles[hidden_size][0]
        shown = [*ranked[:5], *([chosen] if chosen in times and chosen not in ranked[:5] else [])]
        for tile in shown:
            mark = "*" if tile == chosen else " "
            head += f"\n    {mark} {times[tile]:8.2f} us, {mul / times[tile]:.2f} of mul  {describe(tile)}"
        return head, times[ranked[0]]


def main() -> int:
    options = parse()
    lines, shares = [], []
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context, initializer=warm_worker) as pool,
    ):
        run = Run(options, pool, folder)
        print(f"{len(run.libraries)} tiles, {options.workers} workers", flush=True)
        if options.compile_only:
            done = [run.library(tile) for tile in list(run.libraries)]
            print(f"{len(done)} tiles, {len(run.failed)} failed, {time.monotonic() - run.begin:.1f} s")
            return 1 if run.failed else 0
        flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        for rows, hidden in run.shapes:
            if run.late():
                lines.append(f"{rows} x {hidden}: left out for time")
                continue
            try:
                if options.check_only:
                    lines.append(f"{rows} x {hidden}: {len(run.right(hidden))} tiles right")
                else:
                    line, best = run.tune(rows, hidden, flush)
                    if best is not None and options.norm == "rms" and (rows, hidden) in QUACK:
                        shares.append(best / QUACK[rows, hidden])
                        line += f"\n    {shares[-1]:.2f} of quack's {QUACK[rows, hidden]} us"
                    lines.append(line)
            except Exception:
                lines.append(f"{rows} x {hidden}: {traceback.format_exc(limit=4)}")
            print(f"[{time.monotonic() - run.begin:5.1f} s] {lines[-1]}", flush=True)
            torch.cuda.empty_cache()
        run.checker.stop()
        for future in run.libraries.values():
            future.cancel()
    if shares:
        print(f"geometric mean of {len(shares)}: {math.exp(sum(map(math.log, shares)) / len(shares)):.3f} of quack")
    print(f"{len(run.failed)} failures")
    return 1 if run.failed or any("Traceback" in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
