"""Q and K normalised and turned, V copied: the same promises of an operator that is no row program.

A form is what its kernels are compiled for (`QkLayouts.words`); what the promises are says `flashnorm.verify`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashnorm
from flashnorm import timing
from flashnorm.core.dispatch import backend
from flashnorm.core.op import ALL, Op
from flashnorm.core.operands import normalise
from flashnorm.model import formats, same_bits, steps
from flashnorm.model.turned import PARTS, Near, canonical, exact
from flashnorm.program import QkLayout, QkNormRope, Variant
from flashnorm.verify.cases import BF16, FP16, FP32
from flashnorm.verify.lines import CPU, MIN_ELEMENTS, MIN_EQUAL, Line, serves
from flashnorm.verify.problem import moved, poison

# Products with 16-bit values are exact: others would lie on a tie in fp32, and beside it in fp64.
SCALARS = {"eps": 1e-6, "output_quant_scale": 229 / 128, "v_quant_scale": 157 / 256}
YARN = {"factor": 4.0, "low": 2.0, "high": 9.0, "attention_factor": 147 / 128}
TABLE = 19  # rows of cosines and sines
# tokens of a sequence, as a grid; heads; head_dim: groups of 8 that heads split, and do not; each kind of plan
Shape = tuple[tuple[int, int, int], tuple[int, int, int], int]
QUICK_SHAPES: tuple[Shape, ...] = (((3, 1, 5), (4, 2, 3), 64), ((1, 2, 1), (3, 1, 2), 66))
SHAPES: tuple[Shape, ...] = (
    *QUICK_SHAPES, ((1, 5, 3), (12, 12, 12), 128), ((1, 2, 1), (40, 8, 8), 128), ((2, 1, 1), (3, 2, 1), 512),
)  # fmt: skip
SEQUENCES = 3


@dataclass(frozen=True)
class Form:
    """What is checked of an operator: the layout's word, dtypes, and whether frequencies are YaRN's."""

    word: str
    x: torch.dtype = BF16
    weight: torch.dtype = BF16
    index: torch.dtype = torch.int64
    yarn: bool = False


# The first of each is that of a quick run.
FORMS: dict[str, tuple[Form, ...]] = {
    "fused_qk_rmsnorm_rope": (Form("hidden"), Form("hidden-neox", FP16, FP32, yarn=True), Form("none"), Form("head")),
    "fused_qk_rmsnorm_rope_fp8": (Form("hidden", yarn=True), Form("head-neox", FP16)),
    "fused_qk_rmsnorm_rope_cached": (Form("head-neox"), Form("hidden", FP16, index=torch.int32)),
    "fused_qk_rmsnorm_rope_cached_fp8": (Form("head-neox", weight=FP32),),
}


# Between them everything that a kernel is put together from.
COVERING = ("fused_qk_rmsnorm_rope", "fused_qk_rmsnorm_rope_cached_fp8")


def operators() -> dict[str, Op]:
    return {name: ALL[name] for name in FORMS}


def chosen(ops: Iterable[Op], *, covering: bool) -> list[Op]:
    """Those to check; with `covering`, no more than have all that there is."""
    return [op for op in ops if op.name in COVERING or not covering]


@dataclass(frozen=True)
class Problem:
    """One call: tokens [T, C] on the CPU, results poisoned."""

    op: Op
    program: QkNormRope
    given: Mapping[str, Tensor]

    def part(self, start: int, stop: int) -> Problem:
        """The call for some of the tokens; whole sequences, where there is a grid."""
        mine = ("x", "positions", *PARTS)
        return dataclasses.replace(
            self, given={name: t[start:stop] if name in mine else t for name, t in self.given.items()}
        )


def make_problem(op: Op, form: Form, shape: Shape, sequences: int = SEQUENCES) -> Problem:
    """Tokens of very different size; where there are many, one of zeros, with a NaN, and with an infinity."""
    grid, heads, width = shape
    cached, coded = "positions" in {o.name for o in op.operands}, op.name.endswith("_fp8")
    scope, _, neox = form.word.partition("-")
    part = width // 6 * 2
    turns: dict[str, object] = {"rotary_dim": width // 4 * 2 if cached else width, "interleave": not neox}
    if not cached:
        turns |= {"grid": grid, "channels": (width - 2 * part, part, part), **(YARN if form.yarn else {})}
    layout = QkLayout(heads, width, scope, **turns)  # type: ignore[arg-type]
    program = QkNormRope(layout.scope, layout.interleave, cached, True, True, coded, layout)
    tokens = sequences * grid[0] * grid[1] * grid[2]
    pool = torch.Generator().manual_seed(tokens * 1_000_003 + layout.hidden_size)
    size = 10.0 ** (torch.rand(tokens, 1, generator=pool) * 4 - 2)
    x = (torch.randn(tokens, layout.hidden_size, generator=pool) * size).to(form.x)
    if tokens > 30:
        x[0] = 0
        x[1, 0], x[2, 1] = torch.nan, -torch.inf
    given = {"x": x}
    for name, n in (("q_weight", heads[0]), ("k_weight", heads[1])):
        given[name] = (torch.rand(n, width, generator=pool) * 2 - 0.7).to(form.weight)
    if cached:
        given["positions"] = torch.randint(0, TABLE, (tokens,), generator=pool).to(form.index)
        angles = torch.rand(TABLE, layout.rotary_dim // 2, generator=pool) * 6
        given["cos_sin_cache"] = torch.cat((angles.cos(), angles.sin()), -1)
    for name, n in zip(PARTS, heads, strict=True):
        given[name] = poison((tokens, n, width), torch.float8_e4m3fn if coded else form.x)
    return Problem(op, program, given)


def variants(ops: Iterable[Op], quick: bool) -> list[Variant]:
    """What is compiled for them."""
    problems = [make_problem(op, form, QUICK_SHAPES[0], 1) for op in ops for form in forms_of(op, quick)]
    return [normalise(p.op, p.program, [p.given[o.name] for o in p.op.operands])[0] for p in problems]


def forms_of(op: Op, quick: bool) -> tuple[Form, ...]:
    return FORMS[op.name][: 1 if quick else None]


def scalars_of(problem: Problem) -> dict[str, float]:
    return SCALARS if problem.program.coded else SCALARS | {"output_quant_scale": 1.0, "v_quant_scale": 1.0}


def call(problem: Problem, device: torch.device) -> dict[str, Tensor]:
    """Runs the operator on copies of its inputs; returns what it wrote, on the CPU."""
    copies = {name: moved(t, device) for name, t in problem.given.items()}
    operands = (copies[o.name] for o in problem.op.operands)
    numbers = (scalars_of(problem)[name] for name in problem.op.scalars)
    problem.op.checked(*operands, *numbers, "flashinfer", str(problem.program.layout), None)
    return {name: moved(copies[name], CPU) for name in PARTS}


def verify_lines(
    ops: Iterable[Op], route: str, device: torch.device, *, quick: bool, say: Callable[[str], None]
) -> Iterator[Line]:
    """A line for each form of each operator; each is said as it begins."""
    for op in ops:
        for form in forms_of(op, quick):
            line = new_line(op, route, form)
            say(f"{op.name}, {line.dtypes}")
            try:
                _verify(line, op, form, route, device, QUICK_SHAPES if quick else SHAPES, 2 if quick else 4)
                if route != "torch" and not quick and form == FORMS[op.name][0]:
                    line.speed = speed(op, route, device)
            except Exception as error:  # whatever is raised is the finding
                line.failures.append(f"{type(error).__name__}: {error}")
            yield line


def new_line(op: Op, route: str, form: Form) -> Line:
    dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in (form.x, form.weight))
    words = ["/".join(dtypes), *(["-> e4m3"] if op.name.endswith("_fp8") else []), form.word]
    return Line(op.name, route, "flashinfer", " ".join([*words, *(["yarn"] if form.yarn else [])]))


def _verify(
    line: Line, op: Op, form: Form, route: str, device: torch.device, shapes: tuple[Shape, ...], runs: int
) -> None:
    equal = elements = 0
    for shape in shapes:
        problem = make_problem(op, form, shape)
        tokens = problem.given["x"].shape[0]
        where = f"{tokens} tokens of {shape[1]} heads of {shape[2]}"
        with backend(route):
            got = call(problem, device)
            again = all(same_bits(got, call(problem, device)) for _ in range(runs - 1))
            alone = [
                call(problem.part(at, at + tokens // SEQUENCES), device) for at in range(0, tokens, tokens // SEQUENCES)
            ]
        line.found("repeats", again, f"{where}: runs differ")
        kept = all(
            same_bits(part, {name: t[len(part[name]) * i :][: len(part[name])] for name, t in got.items()})
            for i, part in enumerate(alone)
        )
        line.found("chunks", kept, f"{where}: a token's bits depend on the batch" if route != "torch" else "")
        for name, wanted in exact(problem.program, problem.given, scalars_of(problem)).items():
            apart = _apart(got[name], wanted)
            equal, elements = equal + int((apart == 0).sum()), elements + apart.numel()
            line.max_steps = max(line.max_steps, int(apart.max()))
            if int(apart.max()) > 1:
                line.failures.append(f"{where} {name}: {int(apart.max())} steps from the formula, 1 allowed")
        if route == "torch":
            continue
        kept = same_bits(got, canonical(problem.program, problem.given, scalars_of(problem)))
        line.found("bits", kept, f"{where}: bits differ from the specified arithmetic")
        if device.type == "cuda" and serves(op, "cpu", CPU) is None:
            with backend("cpu"):
                kept = same_bits(got, call(problem, CPU))
            line.found("like_cpu", kept, f"{where}: bits differ from the cpu route")
    line.elements, line.equal = elements, equal / elements
    if elements >= MIN_ELEMENTS and line.equal < MIN_EQUAL:
        line.failures.append(f"only {line.equal:.4%} are equal to the rounded formula")


# ------------------------------------------------------------------ beside plain PyTorch
def problem_of(op: Op, rows: int, hidden: int, dtype: torch.dtype) -> Problem:
    """Heads of 128 channels, or fewer where H asks for it, about a third of them each Q, K and V; bf16 for fp32.

    Raises:
        ValueError: fewer than three heads of two channels make H.
    """
    width = next((n for n in (128, 64, 32, 16, 8, 2) if hidden % n == 0 and hidden // n >= 3), 0)
    if not width:
        raise ValueError(f"{op.called}: no three heads make {hidden} elements")
    if str(dtype).removeprefix("torch.") not in op.operands[0].dtypes:
        dtype = BF16
    third = hidden // width // 3
    heads = (hidden // width - 2 * third, third, third)
    return make_problem(op, Form("hidden", dtype, dtype), ((1, 1, rows), heads, width), 1)


def rivals(
    op: Op, dtype: torch.dtype, device: torch.device, rows: int, hidden: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A call of the public function, on whichever route is forced then, and the same work in eager PyTorch."""
    problem = problem_of(op, rows, hidden, dtype)
    layout = problem.program.layout
    assert layout is not None
    given = {op.label(o): problem.given[o.name].to(device) for o in op.operands}
    named: dict[str, Any] = dict(zip(("num_heads_q", "num_heads_k", "num_heads_v"), layout.heads, strict=True))
    if layout.grid:
        named |= dict(zip(("ppf", "pph", "ppw"), layout.grid, strict=True))
        axes = ("num_frame_channels", "num_height_channels", "num_width_channels")
        named |= dict(zip(axes, layout.channels, strict=True))
    function, coded = getattr(flashnorm, op.called), problem.program.coded
    named |= {"head_dim": layout.head_dim, "interleave": layout.interleave, "output_fp8": coded}

    def eager() -> object:
        with backend("torch"):
            return function(**given, **named)

    return lambda: function(**given, **named), eager


def speed(op: Op, route: str, device: torch.device) -> float:
    """Time of eager PyTorch / time of the route, on a shape that fills the device a little."""
    ours, eager = rivals(op, BF16, device, 4096 if device.type == "cuda" else 128, 3 * 12 * 128)
    with backend(route), torch.no_grad():
        mine, theirs = timing.per_call((ours, eager), device, 0.01)
    return theirs / mine


# ------------------------------------------------------------------ against fp64
def _apart(got: Tensor, wanted: Near) -> Tensor:
    """Steps from the rounded formula, none where it may be rounded to what was got."""
    low, high = (wanted.value + side * wanted.room for side in (-1, 1))
    between = steps(got, low) + steps(got, high) <= _width(got, low, high)
    return torch.where(between, 0, steps(got, wanted.value))


def _width(got: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Steps between two values in the dtype of `got`."""
    if got.element_size() == 1:
        return steps(formats.encode(low.float(), got.dtype), high)
    return steps(low.to(got.dtype), high)
