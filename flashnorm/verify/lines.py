"""One line of the table: an operator on a route, in one case, over all shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashnorm.core import device as devices
from flashnorm.core import plan
from flashnorm.core.dispatch import backend
from flashnorm.core.op import Op
from flashnorm.model import agree, canonical, exact, same_bits, steps
from flashnorm.model.formats import LARGEST
from flashnorm.program import SCALES, Affine, MeanVar, MixResidual, Operand, rounding
from flashnorm.verify import problem as problems
from flashnorm.verify.cases import FP32, Case, label
from flashnorm.verify.problem import Problem, make_problem

MIN_EQUAL, MIN_ELEMENTS = 0.999, 100_000
FP32_RELATIVE, FP32_OF_ROW = 2e-6, 1e-6
HALF_WAY = 2.0**-22  # what two fp32 roundings may move a quotient by
CHUNKS = (1, 2, 5, 11)
CPU = torch.device("cpu")


@dataclass
class Line:
    """What was found for one operator, route, mode and choice of dtypes.

    Attributes:
        elements: that were held against fp64, over all shapes.
        max_steps: against fp64, in steps of each output's dtype, over all shapes; scales in fp32 are left out.
        equal: the share of equal elements, of the output with the least; None where all outputs are fp32: two orders
            of an fp32 sum round half of the results differently, and that share says nothing.
        bits: equal to the model of the arithmetic, or as near as `model.agree` asks of GPUs' exponentials; None on the
            torch route, which promises none.
        like_cpu: GPU routes: the same of the cpu route, None where there is none to compare with.
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
    equal: float | None = None
    bits: bool | None = None
    like_cpu: bool | None = None
    repeats: bool | None = None
    chunks: bool | None = None
    speed: float | None = None
    failures: list[str] = field(default_factory=list)

    def found(self, promise: str, kept: bool, text: str) -> None:
        """Notes whether a promise was kept for one shape; a text where breaking it is a failure."""
        setattr(self, promise, kept and getattr(self, promise) is not False)
        if not kept and text:
            self.failures.append(text)


def new_line(op: Op, route: str, case: Case, device: torch.device) -> Line:
    return Line(op.name, route, case.numerics, label(op, case, device))


def serves(op: Op, route: str, device: torch.device) -> str | None:
    """Why a forced route cannot serve a device; None where it can."""
    with backend(route):
        found = plan.explain(op, devices.facts(device))
    return None if found.route == route else dict(found.reasons).get(route, f"{found.route} serves it")


def verify_line(
    op: Op, route: str, case: Case, device: torch.device, shapes: Sequence[tuple[int, int]], runs: int
) -> Line:
    """Checks one operator on one route, in one case, over all shapes."""
    line = new_line(op, route, case, device)
    equal: dict[str, list[int]] = {}  # output -> [elements that are equal, elements]
    for rows, hidden in shapes:
        problem = make_problem(op, case, rows, hidden, device)
        where = f"{rows}x{problem.hidden}"
        with backend(route):
            got = _on_cpu(problems.call(problem, device))
            again = all(same_bits(got, _on_cpu(problems.call(problem, device))) for _ in range(runs - 1))
            chunked = _chunked(problem, device)
        line.found("repeats", again, f"{where}: runs differ")
        kept = same_bits(chunked, {name: problem.by_rows(name, t) for name, t in got.items()})
        # PyTorch's own sums may depend on the batch; the contract exempts that route.
        line.found("chunks", kept, f"{where}: a row's bits depend on the batch" if route != "torch" else "")
        given, scalars = problem.modelled(), problem.scalars()
        for name, wanted in exact(problem.program, given, scalars, got).items():
            _judge(line, problem, name, got[name], wanted, where, equal)
        if route == "torch":
            continue
        kept = _right(problem, got, canonical(problem.program, given, scalars), device)
        line.found("bits", kept, f"{where}: bits differ from the specified arithmetic")
        if device.type == "cuda" and serves(op, "cpu", CPU) is None:
            with backend("cpu"):
                kept = _right(problem, got, problems.call(problem, CPU), device)
            line.found("like_cpu", kept, f"{where}: bits differ from the cpu route")
    for name, (same, elements) in equal.items():
        share = same / elements
        line.equal = share if line.equal is None else min(line.equal, share)
        if elements >= MIN_ELEMENTS and share < MIN_EQUAL:
            line.failures.append(f"only {share:.4%} of {name} are equal to the rounded formula")
    return line


def _right(problem: Problem, got: dict[str, Tensor], wanted: dict[str, Tensor], device: torch.device) -> bool:
    """Whether a device wrote what it should: the bits, or, of an exponential on a GPU, what is near enough."""
    if device.type != "cuda":
        return same_bits(got, wanted)
    return agree(problem.program, got, wanted, problem.case.x)


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t if t.device == CPU else problems.moved(t, CPU) for name, t in tensors.items()}


def _chunked(problem: Problem, device: torch.device) -> dict[str, Tensor]:
    """The same rows in chunks of uneven size, put together again; scales by rows."""
    parts: list[dict[str, Tensor]] = []
    start = 0
    while start < problem.rows:
        stop = min(problem.rows, start + CHUNKS[len(parts) % len(CHUNKS)])
        part = problem.part(start, stop)
        written = _on_cpu(problems.call(part, device))
        parts.append({name: part.by_rows(name, t) for name, t in written.items()})
        start = stop
    return {name: torch.cat([_bytes(part[name]) for part in parts]).view(parts[0][name].dtype) for name in parts[0]}


def _bytes(t: Tensor) -> Tensor:
    """Not every version of PyTorch puts 8-bit floating-point tensors together."""
    return t.contiguous().view(torch.uint8) if t.element_size() == 1 else t


# ------------------------------------------------------------------ against fp64
def _judge(
    line: Line, problem: Problem, name: str, got: Tensor, wanted: Tensor, where: str, equal: dict[str, list[int]]
) -> None:
    """One output: the contract's bound for its kind. `equal` counts what is equal to the formula."""
    where = f"{where} {name}"
    kinds = {o.name: o for o in problem.program.operands()}
    line.elements += got.numel()
    if got.dtype is FP32:
        bound = _fp32_bound(problem, kinds[name], wanted)
        near = (got.double() - wanted).abs() <= bound
        far = ~(near & wanted.isfinite() | (got == wanted) | (got.isnan() & wanted.isnan()))
        if bool(far.any()):
            line.failures.append(f"{where}: {int(far.sum())} elements outside of the fp32 bound")
        if kinds[name].kind not in SCALES:
            line.max_steps = max(line.max_steps, int(steps(got, wanted).max()))
        return
    apart = steps(got, wanted)
    if got.dtype in LARGEST:
        # Rounded norms and their scales have few bits, so that a quotient may lie half-way between two codes exactly.
        # Both are right: which one it is depends on the last bit of 1 / scale.
        apart = torch.stack([apart, *(steps(got, wanted * (1 + s)) for s in (HALF_WAY, -HALF_WAY))]).amin(0)
    if got.element_size() == 2 and (isinstance(problem.program.stats, MeanVar) or _mixed(problem, name)):
        # Where the result is a difference of larger numbers, what they lost may be more than a step of it.
        lost = FP32_OF_ROW * _largest(problem, name, wanted)
        apart = torch.where((got.double() - wanted).abs() <= lost, 0, apart)
    twice = any(isinstance(stage, Affine) and stage.round_norm for stage in problem.program.maps)
    allowed = 2 if twice and got.element_size() == 2 else 1
    line.max_steps = max(line.max_steps, int(apart.max()))
    if int(apart.max()) > allowed:
        line.failures.append(f"{where}: {int(apart.max())} steps from the formula, {allowed} allowed")
    count, apart = equal.setdefault(name, [0, 0]), problem.by_rows(name, apart)
    count[0] += int((apart == 0).sum())
    count[1] += apart.numel()


def _fp32_bound(problem: Problem, operand: Operand, wanted: Tensor) -> Tensor:
    if operand.kind in SCALES:  # of a maximum that was rounded to T: one step of T
        dtypes = tuple(str(problem.given[o.name].dtype).removeprefix("torch.") for o in problem.program.operands())
        kind = getattr(torch, rounding(problem.program, dtypes))
        return max(torch.finfo(kind).eps, FP32_RELATIVE) * wanted.abs()
    largest = _largest(problem, operand.name, wanted) if wanted.ndim > 1 else torch.zeros_like(wanted)
    return FP32_RELATIVE * wanted.abs() + FP32_OF_ROW * largest


def _mixed(problem: Problem, name: str) -> bool:
    """Whether a residual was added to an output last."""
    return name != "ffn_input" and any(isinstance(stage, MixResidual) for stage in problem.program.maps)


def _largest(problem: Problem, name: str, wanted: Tensor) -> Tensor:
    """The largest magnitude of a row, or of what was added in it."""
    largest = _of_rows(wanted)
    for added in ("bias", "shift", "shift_bias"):
        if added in problem.given:
            largest = largest.clamp(min=float(problem.given[added].abs().max()))
    if _mixed(problem, name):
        largest = torch.maximum(largest, _of_rows(problem.given["residual"].double().to(wanted.device)))
    return largest


def _of_rows(t: Tensor) -> Tensor:
    return t.abs().nan_to_num(0.0, posinf=0.0).amax(-1, keepdim=True)
