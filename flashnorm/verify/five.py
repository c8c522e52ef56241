"""Five questions about a kernel beyond its results: is it stable, frugal, light, steady, and of one mind across dtypes?

- **stability**: 1000 runs, bit for bit the same, over rows of zeros, with NaN, with an infinity, and with a spike, and
  the bits of the specified arithmetic in each of them;
- **bytes**: what must cross memory, and how long that takes beside a copy of as many bytes;
- **resources**: registers, shared memory, spills and occupancy, from the artefact (GPU kernels);
- **tail**: the 99th percentile of a call's time over its median, as a CUDA graph on a GPU;
- **dtypes**: inputs that fp32, fp16 and bf16 all hold exactly give results that are the same number, rounded to each,
  within one step of the correctly rounded formula.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flashnorm import backends, timing
from flashnorm.core import device as devices
from flashnorm.core import plan
from flashnorm.core.commands import plain_variant
from flashnorm.core.dispatch import backend
from flashnorm.core.op import Op
from flashnorm.core.operands import normalise
from flashnorm.model import canonical, exact, same_bits, steps
from flashnorm.program import AddResidual, Cast, LoadRow, Variant
from flashnorm.verify import problem as problems
from flashnorm.verify import resources
from flashnorm.verify.cases import BF16, FP16, FP32, USUAL, Case
from flashnorm.verify.eager import rivals
from flashnorm.verify.problem import Problem, make_problem

RUNS = 1000
HASTE = {"runs": 200, "seconds": 0.3}
SHAPE = (33, 1024)
WIDE = {"cuda": (4096, 4096), "cpu": (256, 4096)}
CALLS = 1000
MAX_TAIL = 3.0  # on a GPU, whose graph has nothing else to do; a CPU's tail is its other users'
HEADLINES = ("rmsnorm", "fused_add_rmsnorm", "layernorm", "rmsnorm_quant", "rmsnorm_dynamic_quant", "rmsnorm_fp4quant")
CPU = torch.device("cpu")


@dataclass
class Five:
    """The answers for one operator on one route; None where a question does not apply.

    Attributes:
        runs: how many were compared.
        stable, special: all alike; and as specified, in rows of zeros, NaN, infinity and spikes.
        bytes_needed: that must cross memory, for `shape`.
        bytes_share: time of a copy of as many bytes / time of the call.
        registers, stack, shared, occupancy: see `resources.Resources`.
        p50, p99: microseconds.
        ulp: the largest distance from the correctly rounded formula, over the dtypes.
        one_mind: whether the dtypes agree.
        notes: why something was not looked at.
        failures: what broke a promise, in words.
    """

    op: str
    route: str
    runs: int = 0
    stable: bool | None = None
    special: bool | None = None
    shape: tuple[int, int] = SHAPE
    bytes_needed: int = 0
    bytes_share: float | None = None
    registers: int | None = None
    stack: int | None = None
    shared: int | None = None
    occupancy: float | None = None
    p50: float | None = None
    p99: float | None = None
    ulp: int | None = None
    one_mind: bool | None = None
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def tail(self) -> float | None:
        return self.p99 / self.p50 if self.p50 and self.p99 else None


def examine(op: Op, route: str, device: torch.device, *, runs: float | None = None, seconds: float = 2.0) -> Five:
    """Asks all five questions of an operator on a route, in its usual case; `seconds` go into the tail."""
    found = Five(op.name, route)
    for ask in (_stability, _bytes_and_tail, _resources, _dtypes):
        try:
            ask(found, op, device, seconds if ask is _bytes_and_tail else runs or RUNS)
        except Exception as error:  # whatever is raised is the finding
            found.failures.append(f"{ask.__name__.strip('_')}: {type(error).__name__}: {error}")
    return found


# ------------------------------------------------------------------ stability
def _stability(found: Five, op: Op, device: torch.device, limit: float) -> None:
    runs = int(limit)
    problem = with_a_spike(make_problem(op, USUAL, *SHAPE, device))
    with backend(found.route):
        first = _on_cpu(problems.call(problem, device))
        found.runs, found.stable = runs, True
        for run in range(1, runs):
            if not same_bits(first, _on_cpu(problems.call(problem, device))):
                found.stable = False
                found.failures.append(f"stability: run {run} of {runs} differs from the first")
                break
    if found.route != "torch":
        found.special = same_bits(first, canonical(problem.program, problem.modelled(), problem.scalars()))
        if not found.special:
            found.failures.append("stability: rows of zeros, NaN, infinity or a spike are not as specified")


def with_a_spike(problem: Problem) -> Problem:
    """The same call, where one row (the last) is small numbers and one that is ten thousand times their size."""
    x = problem.given["x"].clone()
    if x.dtype.is_floating_point:
        x[-1] = torch.linspace(-1.0, 1.0, x.shape[-1]).to(x.dtype)
        x[-1, x.shape[-1] // 3] = 1.0e4
    return replace(problem, given={**problem.given, "x": x})


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t if t.device == CPU else problems.moved(t, CPU) for name, t in tensors.items()}


# ------------------------------------------------------------------ bytes, and the tail
def _bytes_and_tail(found: Five, op: Op, device: torch.device, seconds: float) -> None:
    found.shape = WIDE[device.type]
    problem = make_problem(op, USUAL, *found.shape, device)
    found.bytes_needed = op.bytes_moved([problem.given.get(o.name) for o in op.operands])
    ours, _ = rivals(op, USUAL, device, *found.shape)
    # A copy reads as much as it writes.
    source = torch.ones(found.bytes_needed // 4, dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    with backend(found.route), torch.no_grad():
        ours()
        mine, copy = timing.per_call((ours, lambda: target.copy_(source)), device, 0.01)
        found.bytes_share = copy / mine
        count = min(CALLS, max(100, round(seconds / mine)))
        times = _graph_times(ours, device, count) if device.type == "cuda" else _call_times(ours, count)
    ordered = sorted(times)
    found.p50, found.p99 = statistics.median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    if device.type == "cuda" and found.tail is not None and found.tail > MAX_TAIL:
        found.failures.append(f"tail: p99 is {found.tail:.1f} times p50, {MAX_TAIL} allowed")


def _call_times(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def _graph_times(call: Callable[[], object], device: torch.device, count: int) -> list[float]:
    """Microseconds of each of many replays of a graph of one call."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        stream.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]


# ------------------------------------------------------------------ resources
def _resources(found: Five, op: Op, device: torch.device, limit: float) -> None:
    if found.route not in ("cute", "cuda"):
        return
    problem = make_problem(op, USUAL, *found.shape, device)
    variant, _ = normalise(op, problem.program, [problem.given.get(o.name) for o in op.operands])
    _read(found, variant, devices.facts(device))


def elsewhere(op: Op, route: str, facts: devices.DeviceFacts) -> Five:
    """The resources alone, for a device that need not be here: the kernel is built, and read."""
    found = Five(op.name, route, shape=WIDE["cuda"])
    try:
        _read(found, plain_variant(op, BF16, found.shape[1], {}), facts)
    except Exception as error:  # whatever is raised is the finding
        found.failures.append(f"resources: {type(error).__name__}: {error}")
    return found


def _read(found: Five, variant: Variant, facts: devices.DeviceFacts) -> None:
    answer = resources.of_artifact(backends.artifact(found.route, variant, plan.target_of(facts)).build(), facts.sm)
    if isinstance(answer, str):
        found.notes.append(f"resources: {answer}")
        return
    found.registers, found.stack, found.shared = answer.registers, answer.stack, answer.shared
    found.occupancy = answer.occupancy
    if answer.stack:
        found.failures.append(f"resources: {answer.stack} bytes of stack or spills a thread")


# ------------------------------------------------------------------ across dtypes
def cases(op: Op) -> list[Case]:
    """The choices of dtypes that `_dtypes` compares, fp32 first; none where it does not apply."""
    base = make_problem(op, Case(FP32, FP32, FP32), 2, 8, CPU)
    load = base.program.load
    if not isinstance(base.program.store, Cast) or not isinstance(load, (LoadRow, AddResidual)):
        return []
    return [Case(t, FP32, t) for t in (FP32, FP16, BF16)] if base.given["x"].dtype == FP32 else []


def _dtypes(found: Five, op: Op, device: torch.device, limit: float) -> None:
    results: dict[torch.dtype, Tensor] = {}
    for case in cases(op):
        problem = make_problem(op, case, *SHAPE, device)
        problem = replace(problem, given=_common(problem))
        dtype, store = case.x, problem.program.store
        assert isinstance(store, Cast)
        with backend(found.route):
            got = _on_cpu(problems.call(problem, device))
        results[dtype] = got[store.dst]
        wanted = exact(problem.program, problem.modelled(), problem.scalars(), got)[store.dst]
        if dtype != FP32:
            found.ulp = max(found.ulp or 0, int(steps(got[store.dst], wanted).max()))
    if not results:
        return
    if found.ulp is not None and found.ulp > 1:
        found.failures.append(f"dtypes: {found.ulp} steps from the correctly rounded value, 1 allowed")
    found.one_mind = all(torch.equal(results[FP32].to(dtype), results[dtype]) for dtype in (FP16, BF16))
    if not found.one_mind and found.route != "torch":
        found.failures.append("dtypes: a result in 16 bits is not the fp32 result, rounded")


def _common(problem: Problem) -> dict[str, Tensor]:
    """The inputs, with rows of numbers that all three dtypes hold: seven bits, of a few sizes."""
    given = dict(problem.given)
    for seed, name in enumerate(("x", "residual")):
        if name in given:
            generator = torch.Generator().manual_seed(seed)
            shape = given[name].shape
            whole = torch.randint(-127, 128, shape, generator=generator)
            size = torch.exp2(torch.randint(-6, 3, (shape[0], 1), generator=generator).float())
            given[name] = (whole * size).to(given[name].dtype)
    return given


# ------------------------------------------------------------------ what is printed
def table(found: Sequence[Five]) -> str:
    """The answers, one line each, failures spelled out below."""
    kernel = ("registers", "spills", "occupancy")
    rows = [("", "operator", "route", "runs", "special", "bytes", "of a copy", *kernel, "p99/p50", "dtypes", "ulp")]
    for f in found:
        rows.append(
            (
                "FAIL" if f.failures else "ok",
                f.op,
                f.route,
                f"{f.runs} alike" if f.stable else "-" if f.stable is None else "DIFFER",
                _mark(f.special),
                f"{f.bytes_needed / 1e6:.1f} MB" if f.bytes_needed else "-",
                _number(f.bytes_share, "{:.2f}"),
                _number(f.registers, "{}"),
                _number(f.stack, "{}"),
                _number(f.occupancy, "{:.0%}"),
                _number(f.tail, "{:.2f}"),
                _mark(f.one_mind),
                _number(f.ulp, "{}"),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    text.insert(1, "-" * len(text[0]))
    text += [f"FAIL {f.op}, {f.route}: {why}" for f in found for why in f.failures]
    return "\n".join([*text, *dict.fromkeys(note for f in found for note in f.notes)])


def _mark(value: bool | None) -> str:
    return {None: "-", True: "yes", False: "NO"}[value]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
