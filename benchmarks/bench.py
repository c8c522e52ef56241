"""One loop over operators, shapes, routes and peers: `python -m benchmarks.bench`, from the project's root.

    python -m benchmarks.bench --ops rmsnorm,fused_add_rmsnorm --shapes table --routes cute,cuda \
        --peers all --json bench.json --png bench.png --budget 240 --check

Without a GPU the same loop measures the cpu route against PyTorch, eager and compiled, with `--threads`
threads. `measure.py` says how time is taken, `report.py` what the JSON holds and which bars `--check` holds
the run to, `peers.py` how another operator or peer is added.

The run stops before `--budget` seconds are over and lists what it had to leave out; the JSON is rewritten
after every shape, so that a run that is cut off still leaves what it measured. A contender that fails is
reported and left out, the others go on. Exit status: 0; with `--check`, 1 where a bar was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import flashnorm
from flashnorm.model import exact

from . import peers as field
from . import report as reporting
from .measure import Call, Graph, HostCalls, Timing, count_launches, count_sets, time_cpu, time_graphs, time_host
from .peers import BENCHES, EPS, Contender
from .report import progress
from .roofline import bytes_moved, plot

Shape = tuple[int, int]

# Decode, prefill, wide rows that need more than one CTA, and the narrow rows of QK norms.
TABLE: tuple[Shape, ...] = (
    (1, 4096), (8, 4096), (64, 4096), (64, 8192), (128, 7168), (512, 4096), (1024, 8192), (4096, 4096), (16384, 4096),
    (32768, 8192), (8192, 16384), (4096, 32768), (4096, 65536), (2048, 131072), (32768, 128), (262144, 128),
    (16384, 5120),
)  # fmt: skip
CPU_TABLE: tuple[Shape, ...] = (
    (1, 4096), (8, 4096), (64, 4096), (512, 4096), (1024, 8192), (4096, 4096), (128, 65536), (32768, 128),
)  # fmt: skip
QUICK: tuple[Shape, ...] = ((1, 4096), (64, 8192), (4096, 4096), (32768, 128))
HOST_SHAPE: Shape = (1, 4096)

# No published last-level cache of a CPU we meet is larger per core pair than this.
_CPU_CACHE = 64 << 20
# A result further than this from the fp64 formula is not the operator: bf16 rounding alone is 1.7e-3, and
# peers that round twice reach 2.5e-3.
_WRONG = 2e-2


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
        settings = {"dtype": args.dtype, "eps": EPS, "repeats": args.repeats, "budget_s": args.budget}
        self.report = reporting.header(argv, self.device, settings, args.commit)
        self.broken: str | None = None

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def save(self) -> None:
        self.report["settings"]["elapsed_s"] = round(self.elapsed(), 1)
        if self.args.json:
            path = Path(self.args.json)
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(path.name + ".part")
            aside.write_text(json.dumps(self.report, indent=1) + "\n")
            os.replace(aside, path)

    def say(self, text: str) -> None:
        progress(f"[{self.elapsed():5.0f} s] {text}")

    def skip(self, op: str, shape: Shape, why: str) -> None:
        self.report["skipped"].append({"op": op, "M": shape[0], "H": shape[1], "why": why})

    def out_of_time(self) -> bool:
        return self.elapsed() + self.longest > self.args.budget

    # ------------------------------------------------------------------ one operator at one shape
    def measure(self, op: str, shape: Shape) -> None:
        why = self.broken or ("out of time" if self.out_of_time() else None)
        if why:
            self.skip(op, shape, why)
            return
        began = time.monotonic()
        try:
            rows = self._rows(op, shape)
        except Exception as error:
            self._broken_by(error)
            self.skip(op, shape, _reason(error))
            rows = []
        reporting.relate(rows)
        self.report["rows"] += rows
        spent = time.monotonic() - began
        if self.report["rows"] != rows:  # the first shape pays for imports and for what peers build
            self.longest = max(self.longest, spent)
        best = min((r["us"] for r in rows if r["us"] and r["kind"] == "peer"), default=0.0)
        ours = ", ".join(f"{r['contender']} {r['us']:.2f}" for r in rows if r["us"] and r["kind"] == "ours")
        self.say(f"{op} {shape[0]}x{shape[1]}: {ours or 'nothing of ours'}; best peer {best:.2f} us")
        self.save()
        gc.collect()
        if self.device.type == "cuda" and not self.broken:
            torch.cuda.empty_cache()

    def _rows(self, op: str, shape: Shape) -> list[reporting.Row]:
        entrants = field.contenders(op, self.args.routes, self.args.peers, self.device.type)
        moved = bytes_moved(field.operands(op), *shape, self.dtype)
        ceiling_moved = 2 * shape[0] * shape[1] * self.dtype.itemsize
        sets, launches = self._counts(op, shape, moved)
        buffers = field.make_sets(op, sets, *shape, self.dtype, self.device)
        trial = Trial()
        if "torch.compile" in self.args.peers:
            torch._dynamo.reset()  # one compilation a shape, and none of them counts against Dynamo's limit
        ready = [c for c in entrants if self._correct(op, c, shape, trial)]
        timings = self._time(op, ready, buffers, launches, trial)
        rows = []
        for c in entrants:
            timing: Timing | None = timings.get(c.name)
            number = ceiling_moved if c.kind == "ceiling" else moved
            rows.append({
                "op": op, "M": shape[0], "H": shape[1], "dtype": self.args.dtype, "device": self.device.type,
                "contender": c.name, "kind": c.kind,
                "us": timing and timing.us, "us_min": timing and timing.us_min, "us_max": timing and timing.us_max,
                "bytes": number, "gbps": timing and number / timing.us / 1e3,
                "to_best_peer": None, "of_ceiling": None, "error_l2": trial.errors.get(c.name),
                "prepare_s": trial.prepare.get(c.name),
                "sets": sets, "launches": timing and timing.launches, "failure": trial.failures.get(c.name),
            })  # fmt: skip
        return rows

    def _counts(self, op: str, shape: Shape, moved: int) -> tuple[int, int]:
        size = field.set_bytes(op, *shape, self.dtype)
        if self.device.type == "cpu":
            return count_sets(size, _CPU_CACHE, 2 << 30), 0
        free, _ = torch.cuda.mem_get_info(self.device)
        cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or (64 << 20)
        # A tenth: every contender that allocates its outputs holds about as much again.
        sets = count_sets(size, cache, free // 10)
        return sets, count_launches(sets, moved)

    def _correct(self, op: str, c: Contender, shape: Shape, trial: Trial) -> bool:
        """Calls a contender once on fresh buffers (which compiles it) and compares some rows with the formula."""
        if c.kind == "ceiling":
            return True
        if self.broken:
            trial.failures[c.name] = self.broken
            return False
        try:
            fresh = field.make_sets(op, 1, *shape, self.dtype, self.device)[0]
            some = sorted({0, shape[0] // 2, shape[0] - 1})
            # Gathered before the call: it may write in place.
            given = {o.name: getattr(fresh, o.name) for o in field.operands(op)}
            given = {o.name: given[o.name][some] if o.kind in ("row", "per_row") else given[o.name].clone()
                     for o in field.operands(op)}  # fmt: skip
            began = time.monotonic()
            with c.context():
                returned = c.bind(fresh)()
            trial.prepare[c.name] = round(time.monotonic() - began, 2)
            got = field.result_of(op, fresh, returned)[some].double()
            expected = exact(field.program(op), given, {"eps": EPS})
            wanted = expected["out" if "out" in expected else "x"]
            distance = trial.errors[c.name] = float((got - wanted).norm() / wanted.norm())
            if not distance <= _WRONG:
                trial.failures[c.name] = f"wrong result: relative L2 error {distance:.1e}"
        except Exception as error:
            trial.failures[c.name] = _reason(error)
            self._broken_by(error)
        return c.name not in trial.failures

    def _time(
        self, op: str, ready: list[Contender], buffers: list[field.Buffers], launches: int, trial: Trial
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
                if graph.writes(field.result_of(op, buffers[-1], graph.results[-1])):
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
    def host(self, op: str) -> None:
        buffers = field.make_sets(op, 1, *HOST_SHAPE, self.dtype, self.device)[0]
        entrants = field.contenders(op, self.args.routes, self.args.peers, self.device.type)
        entrants = [c for c in entrants if c.kind != "ceiling"]
        for c in [c for c in entrants if c.kind == "ours"]:
            bind = field.bare(op, c.name.removeprefix("flashnorm "))
            entrants.append(Contender(f"{c.name}, bare launch", "peer", bind))
        calls: dict[str, HostCalls] = {}
        for c in entrants:
            try:
                with c.context():
                    call = c.bind(buffers)
                    for _ in range(10):
                        call()
                calls[c.name] = HostCalls(call, c.context)
            except Exception as error:
                self._broken_by(error)
                self.skip(op, HOST_SHAPE, f"host cost of {c.name}: {_reason(error)}")
        calls["torch.empty_like"] = HostCalls(lambda: torch.empty_like(buffers.x), contextlib.nullcontext)
        if self.broken:
            return
        for name, timing in time_host(calls).items():
            self.report["host"].append(
                {"op": op, "contender": name, "us": timing.us, "us_min": timing.us_min, "us_max": timing.us_max}
            )
        self.save()
        costs = (f"{e['contender']} {e['us']:.1f}" for e in self.report["host"] if e["op"] == op)
        self.say(f"host cost of {op}: {', '.join(costs)}")


def _reason(error: Exception) -> str:
    """One line: the type, the first line of the text, and what a compiler complained about first."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    complaint = next((line for line in lines[1:] if "error" in line.lower()), "")
    return f"{type(error).__name__}: {lines[0]}{' ... ' if complaint else ''}{complaint}"[:300]


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """A named table ("table", "cpu", "quick"), or shapes such as "1x4096,64x8192".

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    named = {"table": TABLE, "cpu": CPU_TABLE, "quick": QUICK}
    if text in named:
        return named[text]
    try:
        shapes = tuple(tuple(int(n) for n in part.split("x")) for part in text.split(","))
        if any(len(shape) != 2 or min(shape) < 1 for shape in shapes):
            raise ValueError
    except ValueError:
        known = ", ".join(named)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {known} and no list like 1x4096,8x4096") from None
    return shapes  # type: ignore[return-value]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--ops", type=_names, default=tuple(BENCHES), help="comma-separated operators")
    parser.add_argument("--shapes", type=parse_shapes, help='"table", "cpu", "quick", or 1x4096,8x4096,...')
    parser.add_argument("--routes", type=_names, help="of cute,cuda,cpu,torch; default: those of the device")
    parser.add_argument("--peers", type=_names, default=("all",), help='"all", "none", or names')
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats, medians are reported")
    parser.add_argument("--threads", type=int, default=2, help="threads of the CPU measurement")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds; what does not fit is skipped")
    parser.add_argument("--json", help="where the report goes")
    parser.add_argument("--commit", default="", help="what the report names, where there is no git")
    parser.add_argument("--png", help="where the roofline picture goes")
    parser.add_argument("--no-host", action="store_true", help="leave the host cost out")
    parser.add_argument("--check", action="store_true", help="hold the figures to the bars; exit 1 on a miss")
    parser.add_argument("--trace", action="store_true", help="print the traceback of every failure")
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.routes is None:
        args.routes = ("cute", "cuda") if args.device == "cuda" else ("cpu",)
    if args.shapes is None:
        args.shapes = TABLE if args.device == "cuda" else CPU_TABLE
    known = list(dict.fromkeys(name for bench in BENCHES.values() for name in bench.peers))
    if args.peers == ("all",):
        args.peers = tuple(known)
    elif args.peers == ("none",):
        args.peers = ()
    for given, allowed, what in ((args.ops, BENCHES, "operator"), (args.peers, known, "peer")):
        for name in given:
            if name not in allowed:
                parser.error(f"unknown {what} {name!r}; known: {', '.join(allowed)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    run = Run(args, ["python -m benchmarks.bench", *argv])
    machine = run.report["machine"]["device"]
    progress(f"flashnorm {flashnorm.__version__} on {machine}, {args.dtype}, budget {args.budget:.0f} s")
    if args.device == "cpu" and (run.report["machine"]["load_average"] or 0) > 1:
        progress("this machine is busy: CPU figures will say more about that than about any kernel")
    with torch.no_grad():
        if args.device == "cuda":
            field.prebuild(args.peers)
        if not args.no_host:
            for op in args.ops:
                run.host(op)
        for shape in args.shapes:
            for op in args.ops:
                run.measure(op, shape)
    ok = True
    if args.check:
        ok = all(entry["ok"] for entry in reporting.check(run.report))
    run.save()
    if args.png:
        title = f"{machine}, {args.dtype}, buffers past the cache"
        Path(args.png).parent.mkdir(parents=True, exist_ok=True)
        try:
            plot(run.report["rows"], args.png, title)
        except ImportError as error:
            progress(f"no picture: {error}")
    print(reporting.table(run.report))
    if args.check:
        print(reporting.check_table(run.report["checks"]))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
