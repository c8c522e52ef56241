"""Finds launch plans for backwards: `python -m benchmarks.tune_backward`, from the root, on the GPU.

    python -m benchmarks.tune_backward --budget 240                 # both norms, both routes
    python -m benchmarks.tune_backward --norms rms --routes cute --shapes 2048x32768,16384x4096 --limit 40
    python -m benchmarks.tune_backward --limit 1                    # the chosen plans alone
    python -m benchmarks.tune_backward --routes cute --check-only --limit 1 --shapes 300x1003,100x40000
    python -m benchmarks.tune_backward --routes cute --compile-only --limit 3       # needs no GPU

Each candidate of `backward_candidates` is compiled (in worker processes), its gradients are compared with the CPU
route's bit for bit, on as many rows as give every stream a second block (or the longest one there may be), and it is
timed as `measure.py` says, in CUDA graphs over cold buffers with PDL on, beside `torch.mul(x, dout, out=dx)`. Every
shape may take twice its share of the budget that is left; when it is up, other candidates of the shape are left out,
and the chosen plan never is. The end is a table: the chosen plan and the best one of each shape.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import flashnorm
from benchmarks import backward_candidates as candidates
from benchmarks.backward_candidates import Plan, checked_rows, describe, program, variant
from benchmarks.tune_cute import CheckProcess, load, time_all, warm_worker
from flashnorm.kernels import tile as tiles
from flashnorm.kernels.stream_tile import StreamTile
from flashnorm.ops.backward import layernorm_backward, rmsnorm_backward
from flashnorm.program import partials

SHAPES = {
    "rms": "2048x32768,16384x4096,16384x16384,32768x8192,16231x6144,16172x2048,4096x2048,8192x512",
    "layer": "16384x7168,4096x4096,8192x768,16384x16384",
}
# (M, H) -> us of quack's backward of RMSNorm for bf16 on an H200 (`results/backward_h200.json`).
QUACK = {
    (4096, 2048): 28.8, (16384, 4096): 119.9, (32768, 8192): 474.8, (16384, 16384): 588.9,
    (16172, 2048): 66.4, (16231, 6144): 205.3, (8192, 512): 19.2, (2048, 32768): 186.9,
}  # fmt: skip
B, S = torch.bfloat16, torch.float32
Candidate = StreamTile | Plan
Launch = Callable[..., Any]


# ------------------------------------------------------------------ compiling
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


def build_cuda(norm: str) -> Any:
    """The CUDA route's module of a norm, in which plans can be forced."""
    import tvm_ffi

    from flashnorm.backends.cuda import spec
    from flashnorm.core.device import facts
    from flashnorm.core.plan import target_of

    target = target_of(facts(torch.device("cuda")))
    folder = spec(program(norm), candidates.dtypes(norm), target, ("FLASHNORM_TUNING",)).build()
    return tvm_ffi.load_module(str(folder / "kernel.so"))


def forced(module: Any, plan: Plan) -> Launch:
    def launch(*arguments: Any) -> None:
        module["force_streams"](*plan)
        module["launch"](*arguments)

    return launch


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
    """Gradients by the CPU route, once a shape: of a few rows and of `checked_rows`; `what` is "rms" or "rms short"."""

    def __init__(self, what: str, hidden_size: int) -> None:
        norm, _, short = what.partition(" ")
        self.norm, self.hidden_size, self.cases = norm, hidden_size, []
        for rows in checked_rows(hidden_size, bool(short)):
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


class Job(NamedTuple):
    """One shape of one norm on one route."""

    route: str
    norm: str
    rows: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.route:4} {self.norm:5} {self.rows:6d} x {self.hidden:<6d}"


def words(text: str) -> list[str]:
    return text.split(",")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--norms", type=words, default=["rms", "layer"])
    parser.add_argument("--routes", type=words, default=["cute", "cuda"])
    parser.add_argument("--shapes", help="MxH, by commas; each norm has its own ones otherwise")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--json", default="tune_backward.jsonl")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds, compiling included")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=int, default=24, help="candidates a shape at most")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--check-only", action="store_true", help="compile and check, time nothing")
    parser.add_argument("--compile-only", action="store_true", help="compile; needs no GPU")
    return parser.parse_args()


def jobs_of(options: argparse.Namespace) -> list[Job]:
    found = []
    for route in options.routes:
        for norm in options.norms:
            for shape in words(options.shapes or SHAPES[norm]):
                rows, hidden = map(int, shape.split("x"))
                found.append(Job(route, norm, rows, hidden))
    return found


class Run:
    """What is compiled and measured so far."""

    def __init__(self, options: argparse.Namespace, pool: concurrent.futures.Executor, folder: str) -> None:
        self.options, self.failed, self.checker = options, list[str](), CheckProcess(Checker)
        self.begin, self.end, sm = time.monotonic(), math.inf, tiles.sm_of(options.arch)
        self.jobs, self.candidates = jobs_of(options), dict[Job, list[Candidate]]()
        for job in self.jobs:
            self.candidates[job] = list(
                candidates.tiles_for(job.norm, job.rows, job.hidden, sm, options.limit)
                if job.route == "cute"
                else candidates.plans_for(job.norm, job.hidden, options.limit)
            )
        # The plans of all shapes first, then what is tried in the order of the shapes.
        cute = [(job.norm, found) for job, found in self.candidates.items() if job.route == "cute"]
        order = [(norm, tile) for norm, found in cute for tile in found[:1]]
        order += [(norm, tile) for norm, found in cute for tile in found[1:]]
        self.libraries = {
            key: pool.submit(compile_tile, *key, options.arch, folder)  # type: ignore[arg-type]
            for key in dict.fromkeys(order)
        }
        self.builders = concurrent.futures.ThreadPoolExecutor(2)  # nvcc is a process of its own
        norms = {job.norm for job in self.jobs if job.route == "cuda" and not options.compile_only}
        self.modules = {norm: self.builders.submit(build_cuda, norm) for norm in norms}

    def library(self, norm: str, tile: StreamTile) -> str | None:
        try:
            path, why = self.libraries[norm, tile].result(timeout=120)
        except Exception as error:
            path, why = None, f"{type(error).__name__}: {error}"
        if path is None:
            self.fail(f"{norm} H={tile.hidden_size} {describe(tile)}: {why}")
        return path

    def fail(self, text: str) -> None:
        self.failed.append(text)
        print("  FAILED", text, flush=True)

    def share(self, place: int) -> bool:
        """Whether there is time for the job at a place; it may take twice its part of what is left."""
        left = self.options.budget - (time.monotonic() - self.begin)
        self.end = time.monotonic() + 2 * left / (len(self.jobs) - place + 1)
        return left > 0

    def right(self, job: Job) -> dict[Candidate, Launch]:
        """The launches whose bits are the CPU route's; where time is up, that of the plan alone."""
        found: dict[Candidate, Launch] = {}
        checker = None
        for place, candidate in enumerate(self.candidates[job]):
            if place and time.monotonic() > self.end - 0.15 * len(found):  # what timing them takes
                break
            if isinstance(candidate, Plan):
                checker = checker or Checker(job.norm, job.hidden)
                launch = forced(self.modules[job.norm].result(), candidate)
                try:
                    why = checker.wrong(launch)
                except RuntimeError as error:
                    why = str(error)[:300]
            elif path := self.library(job.norm, candidate):
                why = self.checker.wrong(job.norm + " short" * candidate.short, job.hidden, path)
                launch = load(path)
            else:
                continue
            if why is None:
                found[candidate] = launch
            else:
                self.fail(f"{job} {self.name(candidate)}: {why}")
        return found

    @staticmethod
    def name(candidate: Candidate) -> str:
        return describe(candidate) if isinstance(candidate, StreamTile) else str(candidate)

    def tune(self, job: Job, flush: torch.Tensor) -> dict[str, float]:
        """us of mul, of the chosen plan and of the best one, which are printed."""
        launches = self.right(job)
        bench = Bench(job.norm, job.rows, job.hidden)
        graphs: dict[Any, Any] = {"mul": bench.graph(None)}
        for candidate, launch in launches.items():
            try:
                graphs[candidate] = bench.graph(launch)
            except Exception as error:
                self.fail(f"{job} {self.name(candidate)}: capture: {type(error).__name__}: {error}"[:300])
        times = time_all(graphs, self.options.repeats, flush)
        with open(self.options.json, "a", encoding="utf-8") as out:
            for candidate, us in times.items():
                plan = candidate if candidate == "mul" else self._fields(candidate)
                out.write(json.dumps(job._asdict() | {"us": round(us, 4), "plan": plan}) + "\n")
        mul, chosen = times.pop("mul"), self.candidates[job][0]
        ranked = sorted(times, key=times.get)  # type: ignore[arg-type]
        print(f"[{time.monotonic() - self.begin:5.1f} s] {job} mul {mul:8.2f}, {len(launches)} of"
              f" {len(self.candidates[job])} candidates")  # fmt: skip
        for candidate in [*ranked[:6], *([chosen] if chosen in times and chosen not in ranked[:6] else [])]:
            mark = "*" if candidate == chosen else " "
            print(f"    {mark} {times[candidate]:8.2f} us, {mul / times[candidate]:.3f} of mul  {self.name(candidate)}")
        sys.stdout.flush()
        found = {"mul": mul}
        if ranked:
            found |= {"chosen": times.get(chosen, math.nan), "best": times[ranked[0]]}
        return found

    @staticmethod
    def _fields(candidate: Candidate) -> dict[str, Any]:
        return dataclasses.asdict(candidate) if isinstance(candidate, StreamTile) else candidate._asdict()


def table(results: dict[Job, dict[str, float]]) -> None:
    """The chosen plan and the best one of each shape, with their shares of mul's bandwidth and of quack's time."""
    shares: dict[tuple[str, str], list[float]] = {}
    print(f"\n{'':24}{'mul':>9}{'chosen':>9}{'of mul':>8}{'best':>9}{'of mul':>8}{'of quack':>9}")
    for job, us in results.items():
        line = f"{job!s:24}{us['mul']:9.2f}"
        for name in ("chosen", "best"):
            line += f"{us[name]:9.2f}{us['mul'] / us[name]:8.3f}" if name in us else f"{'-':>9}{'-':>8}"
        quack = QUACK.get((job.rows, job.hidden)) if job.norm == "rms" else None
        if quack and "best" in us:
            line += f"{us['best'] / quack:9.3f}"
            for name in ("chosen", "best"):
                shares.setdefault((job.route, name), []).append(us[name] / quack)
        print(line)
    for (route, name), values in shares.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(f"{route}, {name}: geometric mean {mean:.3f} of quack over {len(values)} shapes")


def main() -> int:
    options = parse()
    results: dict[Job, dict[str, float]] = {}
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context, initializer=warm_worker) as pool,
    ):
        run = Run(options, pool, folder)
        print(f"{sum(map(len, run.candidates.values()))} candidates, {options.workers} workers", flush=True)
        if options.compile_only:
            done = [run.library(*key) for key in run.libraries]
            print(f"{len(done)} tiles, {len(run.failed)} failed, {time.monotonic() - run.begin:.1f} s")
            return 1 if run.failed else 0
        flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        for place, job in enumerate(run.jobs):
            if not run.share(place):
                print(f"{job}: left out for time")
                continue
            try:
                if options.check_only:
                    print(f"{job}: {len(run.right(job))} of {len(run.candidates[job])} candidates right", flush=True)
                else:
                    results[job] = run.tune(job, flush)
            except Exception:
                run.fail(f"{job}: {traceback.format_exc(limit=4)}")
            torch.cuda.empty_cache()
        run.checker.stop()
        for future in (*run.libraries.values(), *run.modules.values()):
            future.cancel()
        run.builders.shutdown(wait=False)
    if results:
        table(results)
    print(f"{len(run.failed)} failures")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
