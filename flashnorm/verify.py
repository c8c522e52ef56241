"""`python -m flashnorm verify`: does every operator compute what it promises, on every route of this machine?

For each operator, route, choice of dtypes and numerics mode:

- **accuracy** against the formula in fp64, judged as the contract judges it: 16-bit results within one step
  (two where the mode rounds twice) and at least 99.9 % equal, fp32 within 2e-6 relative + 1e-6 of the row's largest;
- **bits** against a model of the exact arithmetic in plain PyTorch, written apart from every kernel; GPU routes
  also against the cpu route;
- **repeatability**: run after run, and the rows in chunks of any size, bit for bit;
- **speed** beside eager PyTorch, for information.

The formula and the model (`flashnorm.model`) read an operator's program, stage by stage. A program with a stage
they do not know counts as a failure, not as passed over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashnorm
from flashnorm import timing
from flashnorm.core import device as devices
from flashnorm.core import plan
from flashnorm.core.dispatch import ROUTES, backend
from flashnorm.core.op import OPS, Op
from flashnorm.model import canonical, exact, same_bits, steps
from flashnorm.program import Affine, RowProgram

EPS = 1e-6
MIN_EQUAL = 0.999
FP32_RELATIVE, FP32_OF_ROW = 2e-6, 1e-6


# ------------------------------------------------------------------ one line of the table
@dataclass
class Line:
    """What was found for one operator, route, mode and choice of dtypes.

    Attributes:
        max_steps, equal: against fp64, in steps of each output's dtype, over all shapes.
        bits: equal to the model of the arithmetic; None on the torch route, which promises none.
        like_cpu: GPU routes: equal to the cpu route, None where there is none to compare with.
        repeats, chunks: run after run, and for any chunking of the rows.
        speed: time of eager PyTorch / time of this route; above 1 is faster.
        failures: what broke a promise, in words.
    """

    op: str
    route: str
    numerics: str
    dtypes: str
    elements: int = 0
    max_steps: int = 0
    equal: float = 1.0
    bits: bool | None = None
    like_cpu: bool | None = None
    repeats: bool | None = None
    chunks: bool | None = None
    speed: float | None = None
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """A choice of dtypes, a numerics mode, and whether optional outputs are asked for."""

    x: torch.dtype
    weight: torch.dtype
    residual: torch.dtype
    numerics: str = "flashinfer"
    extras: bool = False

    @property
    def label(self) -> str:
        names = "/".join(str(t).removeprefix("torch.") for t in dict.fromkeys((self.x, self.weight, self.residual)))
        return names + (" +rstd" if self.extras else "")


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QUICK_CASES = (Case(BF16, BF16, BF16),)
CASES = (*QUICK_CASES, Case(FP32, FP32, FP32), Case(FP16, FP32, FP32, extras=True), Case(BF16, BF16, BF16, "hf-llama"))
# (M, H): every fold of the sum from one group up, odd widths, and past 8192, where lanes take several groups.
QUICK_SHAPES = ((33, 4096), (5, 1000), (3, 16392))
SHAPES = (*QUICK_SHAPES, (4, 77), (17, 7168), (129, 128), (7, 1), (2, 65537))
OTHER_SHAPES = SHAPES[: len(QUICK_SHAPES) + 1]  # for all choices of dtypes but the first
CHUNKS = (1, 2, 5, 11)


def program_of(op: Op, case: Case) -> RowProgram:
    """The program of a case: every input present, optional outputs where the case asks for them."""
    names = frozenset(o.name for o in op.operands if case.extras or o.mode != "out" or o.name not in op.optional)
    return op.program(names, {key: op.options[key][value] for key, value in _options(op, case).items()})


def make_inputs(op: Op, case: Case, rows: int, hidden: int) -> dict[str, Tensor]:
    """Rows of very different size, weights that are no ones, outputs full of NaN; on the CPU."""
    generator = torch.Generator().manual_seed(rows * 1_000_003 + hidden)
    given = {}
    for operand in program_of(op, case).operands():
        names = {"weight": case.weight, "residual": case.residual}
        dtype = getattr(torch, operand.dtype) if operand.dtype else names.get(operand.like or operand.name, case.x)
        if operand.kind == "vec":
            tensor = torch.rand(hidden, generator=generator) * 2 - 0.7
        elif operand.mode == "out":
            tensor = torch.full((rows, hidden) if operand.kind == "row" else (rows,), torch.nan)
        else:
            size = 10.0 ** (torch.rand(rows, 1, generator=generator) * 4 - 2)
            tensor = torch.randn(rows, hidden, generator=generator) * size
        given[operand.name] = tensor.to(dtype)
    return given


def call(op: Op, case: Case, given: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Runs an operator on copies of its inputs; returns what it wrote."""
    copies = {name: t.to(device, copy=True) for name, t in given.items()}
    tensors = (copies.get(o.name) for o in op.operands)
    op.checked(*tensors, *(EPS for _ in op.scalars), *_options(op, case).values(), None)
    return {o.name: copies[o.name] for o in op.operands if o.written and o.name in copies}


def _options(op: Op, case: Case) -> dict[str, Any]:
    return {key: case.numerics if key == "numerics" else next(iter(values)) for key, values in op.options.items()}


def verify_line(
    op: Op, route: str, case: Case, device: torch.device, shapes: Sequence[tuple[int, int]], runs: int
) -> Line:
    """Checks one operator on one route, in one choice of dtypes, over all shapes."""
    line = Line(op.name, route, case.numerics, case.label)
    program = program_of(op, case)
    allowed = 2 if any(isinstance(s, Affine) and s.round_norm for s in program.maps) else 1
    differing = 0
    scalars = {"eps": EPS}
    for rows, hidden in shapes:
        given = make_inputs(op, case, rows, hidden)
        where = f"{rows}x{hidden}"
        with backend(route):
            got = {name: t.cpu() for name, t in call(op, case, given, device).items()}
            again = all(same_bits(got, call(op, case, given, device)) for _ in range(runs - 1))
            chunked = _chunked(op, case, given, device, rows)
        line.repeats = again and line.repeats is not False
        line.chunks = same_bits(got, chunked) and line.chunks is not False
        if not again:
            line.failures.append(f"{where}: runs differ")
        # PyTorch's own sums may depend on the batch; the contract exempts that route.
        if not same_bits(got, chunked) and route != "torch":
            line.failures.append(f"{where}: a row's bits depend on the batch")
        for name, wanted in exact(program, given, scalars).items():
            apart = steps(got[name], wanted)
            differing += int((apart > 0).sum())
            line.elements += apart.numel()
            line.max_steps = max(line.max_steps, int(apart.max()))
            _judge(line, f"{where} {name}", got[name], wanted, apart, allowed)
        if route != "torch":
            equal = same_bits(got, canonical(program, given, scalars))
            line.bits = equal and line.bits is not False
            if not equal:
                line.failures.append(f"{where}: bits differ from the specified arithmetic")
        if device.type == "cuda" and route != "torch" and _serves(op, "cpu", torch.device("cpu")) is None:
            with backend("cpu"):
                equal = same_bits(got, call(op, case, given, torch.device("cpu")))
            line.like_cpu = equal and line.like_cpu is not False
            if not equal:
                line.failures.append(f"{where}: bits differ from the cpu route")
    line.equal = 1.0 - differing / line.elements
    if case.x is not FP32 and line.elements >= 100_000 and line.equal < MIN_EQUAL:
        line.failures.append(f"only {line.equal:.4%} of the elements are equal to the rounded formula")
    return line


def _chunked(op: Op, case: Case, given: Mapping[str, Tensor], device: torch.device, rows: int) -> dict[str, Tensor]:
    """The same rows in chunks of uneven size, put together again."""
    per_row = {o.name for o in op.operands if o.kind in ("row", "per_row")}
    parts: list[dict[str, Tensor]] = []
    start = 0
    while start < rows:
        stop = min(rows, start + CHUNKS[len(parts) % len(CHUNKS)])
        part = {name: t[start:stop] if name in per_row else t for name, t in given.items()}
        parts.append(call(op, case, part, device))
        start = stop
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _judge(line: Line, where: str, got: Tensor, wanted: Tensor, apart: Tensor, allowed: int) -> None:
    if got.dtype is not FP32:
        if int(apart.max()) > allowed:
            line.failures.append(f"{where}: {int(apart.max())} steps from the formula, {allowed} allowed")
        return
    largest = wanted.abs().amax(-1, keepdim=True) if wanted.ndim > 1 else torch.zeros_like(wanted)
    far = (got.double() - wanted).abs() > FP32_RELATIVE * wanted.abs() + FP32_OF_ROW * largest
    if bool((far | got.isnan()).any()):
        line.failures.append(f"{where}: {int(far.sum())} elements outside of the fp32 bound")


def _serves(op: Op, route: str, device: torch.device) -> str | None:
    """Why a forced route cannot serve a device; None where it can."""
    with backend(route):
        found = plan.explain(op, devices.facts(device))
    return None if found.route == route else dict(found.reasons).get(route, f"{found.route} serves it")


# ------------------------------------------------------------------ speed
def rivals(
    op: Op, case: Case, device: torch.device, rows: int, hidden: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A call of the operator, on whichever route is forced then, and the same work in eager PyTorch."""
    given = {name: t.to(device) for name, t in make_inputs(op, case, rows, hidden).items()}
    # The public function: a user's call goes through it, and is warm from the second time on.
    function = getattr(flashnorm, op.name)
    options = _options(op, case)
    arguments = {op.label(o): given[o.name] for o in op.operands if o.name in given}
    offset = sum(stage.offset for stage in program_of(op, case).maps if isinstance(stage, Affine))

    def eager() -> object:
        h = given["x"] + given["residual"] if "residual" in given else given["x"]
        weight = given["weight"] + offset if offset else given["weight"]
        return F.rms_norm(h, (hidden,), weight, EPS)

    return lambda: function(**arguments, **options), eager


def speed(op: Op, route: str, device: torch.device) -> float:
    """Time of eager PyTorch / time of the route, bf16, on one shape that fills the device a little."""
    ours, eager = rivals(op, QUICK_CASES[0], device, 4096 if device.type == "cuda" else 128, 4096)
    with backend(route), torch.no_grad():
        mine, theirs = timing.per_call((ours, eager), device, 0.01)
    return theirs / mine


# ------------------------------------------------------------------ the command
def check_device(
    device: torch.device,
    *,
    quick: bool = False,
    ops: Sequence[str] = (),
    routes: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[list[Line], dict[str, str]]:
    """Checks every operator on every route that serves one device.

    Args:
        device: whose tensors are used.
        quick: one choice of dtypes, few shapes.
        ops, routes: only these; empty means all.
        say: told of progress.

    Returns:
        The lines, and for each route that serves nothing here its reason.
    """
    lines: list[Line] = []
    missing: dict[str, str] = {}
    for route in (r for r in ROUTES if not routes or r in routes):
        for op in (o for o in OPS.values() if not ops or o.name in ops):
            reason = _serves(op, route, device)
            if reason is not None:
                missing.setdefault(route, reason)
                continue
            for case in QUICK_CASES if quick else CASES:
                if case.numerics not in op.options.get("numerics", {case.numerics: None}):
                    continue
                say(f"{device.type}: {op.name}, {route}, {case.label}, {case.numerics}")
                try:
                    usual = case is QUICK_CASES[0]
                    shapes = QUICK_SHAPES if quick else SHAPES if usual else OTHER_SHAPES
                    line = verify_line(op, route, case, device, shapes, 2 if quick else 4)
                    if usual and route != "torch":
                        line.speed = speed(op, route, device)
                except Exception as error:  # whatever is raised is the finding
                    line = Line(op.name, route, case.numerics, case.label)
                    line.failures.append(f"{type(error).__name__}: {error}")
                lines.append(line)
    return lines, {route: reason for route, reason in missing.items() if all(line.route != route for line in lines)}


def table(lines: Sequence[Line]) -> str:
    """The findings, one line each, failures spelled out below."""
    rows = [
        ("", *["operator", "route", "mode", "dtypes", "steps", "equal", "bits", "=cpu", "repeats", "chunks", "speed"])
    ]
    for n in lines:
        what = ("FAIL" if n.failures else "ok", n.op, n.route, n.numerics, n.dtypes)
        # Two orders of an fp32 sum round half of the fp32 results differently: that share says nothing.
        accuracy = (str(n.max_steps), "-" if n.dtypes == "float32" else f"{n.equal:.3%}") if n.elements else ("", "")
        bits = (_mark(n.bits), _mark(n.like_cpu), _mark(n.repeats), _mark(n.chunks))
        rows.append((*what, *accuracy, *bits, f"{n.speed:.2f}x" if n.speed else ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    text.insert(1, "-" * len(text[0]))
    text += [f"FAIL {n.op}, {n.route}, {n.numerics}, {n.dtypes}: {why}" for n in lines for why in n.failures]
    return "\n".join(text)


def _mark(value: bool | None) -> str:
    return {None: "-", True: "yes", False: "NO"}[value]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; the command line adds `--json`."""
    parser.add_argument("--quick", action="store_true", help="one choice of dtypes and few shapes: seconds")
    parser.add_argument("--device", choices=("all", "cpu", "cuda"), default="all")
    parser.add_argument("--ops", default="", help="comma-separated operators; default: all")
    parser.add_argument("--routes", default="", help="comma-separated routes; default: all that serve")


def run(args: argparse.Namespace) -> int:
    """The command. Returns 0 if every promise held, 1 if one was broken, 2 if nothing could be checked."""
    ops, routes = (tuple(filter(None, text.split(","))) for text in (args.ops, args.routes))
    for asked, known, what in ((ops, tuple(OPS), "operator"), (routes, ROUTES, "route")):
        for name in asked:
            if name not in known:
                print(f"flashnorm verify: no {what} {name!r}; there are {', '.join(known)}", file=sys.stderr)
                return 2
    for name in ops:
        if name not in OPS:
            raise SystemExit(f"unknown operator {name!r}; known: {', '.join(OPS)}")
    began = time.monotonic()
    lines: list[Line] = []
    found: list[dict[str, object]] = []
    kinds: set[str] = set()
    for device in devices.visible():
        if device.type in kinds or args.device not in ("all", device.type):
            continue  # one device of a kind
        kinds.add(device.type)
        new, missing = check_device(device, quick=args.quick, ops=ops, routes=routes, say=_progress)
        lines += new
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        found.append({"device": name, "lines": [asdict(line) for line in new], "not_here": missing})
        if not args.json:
            print(f"{name}, flashnorm {flashnorm.__version__}, torch {torch.__version__}")
            print(table(new))
            print("".join(f"{route}: not here: {why}\n" for route, why in missing.items()))
    ok = bool(lines) and not any(line.failures for line in lines)
    if args.json:
        report = {
            "schema": "flashnorm-verify/1",
            "ok": ok,
            "seconds": round(time.monotonic() - began, 1),
            "versions": {"flashnorm": flashnorm.__version__, "torch": torch.__version__},
            "devices": found,
        }
        print(json.dumps(report, indent=2))
    else:
        failed = sum(1 for line in lines if line.failures)
        print(f"{len(lines) - failed} of {len(lines)} lines ok, {time.monotonic() - began:.0f} s")
    return (0 if ok else 1) if lines else 2


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)
