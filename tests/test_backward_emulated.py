"""The CUDA route's backward kernels, run on the CPU over an emulation of the GPU's threads: the bits of every plan.

Most run with a shorter order than the specification's (`FN_INNER_ROWS` and its neighbours), so that few rows fill
every accumulator; the order itself is checked by the model that takes the same figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from flashnorm.jit.codegen import unit
from flashnorm.program import BackwardProgram
from tests.backward_problem import LAYER, RMS, SUMS, Norm, Problem
from tests.buffers import Guarded
from tests.canonical.backward import USUAL, Order
from tests.combos import DTYPES
from tests.csrc_emulated import Emulated, build
from tests.tolerance import assert_same_bits

pytestmark = pytest.mark.cpu_only

SHORT = Order(inner=4, elements=1 << 14, least=8)
DEFINES = (f"FN_INNER_ROWS={SHORT.inner}", f"FN_PARTIAL_ELEMENTS={SHORT.elements}", f"FN_LEAST_PARTIALS={SHORT.least}")
NAMES = {str(DTYPES[short]).removeprefix("torch."): short for short in ("f32", "f16", "bf16")}
NORMS = {
    "rms": RMS,
    "layer": LAYER,
    "wide": Norm(dout="f16", x="f32", weight="f32", offset=1.0, round_norm=True, joins=True,
                 wanted=("dx", "dresidual", "dweight")),
    "rows": Norm(True, dout="f32", x="bf16", weight=None, wanted=("dx",)),
}  # fmt: skip
USUALLY = ("rms",)  # built with the specification's figures too


def program_of(norm: Norm) -> BackwardProgram:
    wanted = {name: name in norm.wanted for name in ("dx", "dresidual", "dweight", "dbias")}
    kind = "layer" if norm.centred else "rms"
    return BackwardProgram(kind, norm.weight is not None, norm.offset, norm.round_norm, norm.joins, **wanted)  # type: ignore[arg-type]


def dtypes_of(norm: Norm) -> tuple[str, ...]:
    short = {"dout": norm.dout, "x": norm.x, "weight": norm.weight, "g_residual": norm.x, "dx": norm.dout}
    short |= {"dresidual": norm.x, "dweight": norm.dweight, "dbias": norm.dweight}
    long = {short: name for name, short in NAMES.items()}
    return tuple(long[short.get(o.name) or "f32"] for o in program_of(norm).operands())


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Emulated]:
    programs = {name: (program_of(norm), dtypes_of(norm)) for name, norm in NORMS.items()}
    return build(tmp_path_factory.mktemp("short"), programs, DEFINES)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Emulated]:
    programs = {name: (program_of(NORMS[name]), dtypes_of(NORMS[name])) for name in USUALLY}
    return build(tmp_path_factory.mktemp("usual"), programs)


@dataclass(frozen=True)
class Forced:
    """A device and a plan; zeros for the plan of its own."""

    sm: int = 90
    processors: int = 132
    shared_memory: int = 227 * 1024
    plan: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)  # threads, rows, cluster, lanes, groups
    stages: int = 0
    apart: bool = False


@dataclass
class Launch:
    """One call of an emulated unit in watched buffers."""

    emulated: Emulated
    problem: Problem
    order: Order
    layout: str = "contiguous"
    forced: Forced = field(default_factory=Forced)

    def __call__(self) -> int:
        """Checks every bit; returns how many kernels ran."""
        problem, norm, force = self.problem, self.problem.norm, self.forced
        guards: dict[str, Guarded] = {}
        tensors: list[Any] = []
        weight_rows = max(1, problem.values["weight"].numel() // problem.shape[-1]) if norm.weight else 1
        for operand in self.emulated.program.operands():
            name = operand.name
            if name == "workspace":
                count = self.order.partials(weight_rows, problem.shape[-1]) * weight_rows * problem.shape[-1]
                sums = sum(gradient in norm.wanted for gradient in SUMS)
                guards[name] = Guarded(None, written=True, shape=(sums * count,), dtype=torch.float32)
            elif operand.written:
                like = problem.values["weight"].shape if name == "dweight" else problem.shape[-1:]
                shape = tuple(like) if name in SUMS else problem.shape
                place = self.layout if name not in SUMS else "contiguous"
                guards[name] = Guarded(None, "cpu", place, written=True, shape=shape, dtype=norm.dtype(name))
            else:
                place = self.layout if operand.kind == "row" else "contiguous"
                guards[name] = Guarded(problem.values[name], "cpu", place)
            tensors.append(guards[name].view)
            if name in ("weight", "dweight") and weight_rows > 1:
                tensors[-1] = tensors[-1].expand(*problem.shape)
        self.emulated.module["force"](
            force.sm, force.processors, force.shared_memory, *force.plan, force.stages, force.apart
        )
        self.emulated.launch(False, *tensors)
        for name, guard in guards.items():
            guard.check(f"{problem.what} {force}: {name}")
        problem.check({name: guards[name].view for name in norm.wanted}, str(force), self.order)
        return int(self.emulated.module["launches"]())


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("h", [1, 5, 8, 40, 77, 136, 256, 300, 512, 600, 1000, 1032, 2048])
def test_picked_plan(units: dict[str, Emulated], name: str, h: int) -> None:
    """Enough rows for several flushes of every partial."""
    count = SHORT.partials(1, h) * (9 if h < 600 else 5) + 3
    Launch(units[name], Problem(NORMS[name], (min(count, 70000 // h), h)), SHORT)()


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("sm", [75, 90])
@pytest.mark.parametrize("h", [3000, 4095, 4096, 6144, 8192, 9001, 16384, 24576, 40000])
def test_picked_plan_of_wide_rows(units: dict[str, Emulated], name: str, h: int, sm: int) -> None:
    forced = Forced(sm=sm, shared_memory=(64 if sm == 75 else 227) * 1024)
    count = 45 if h < 5000 else 11
    Launch(units[name], Problem(NORMS[name], (count, h)), SHORT, forced=forced)()


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("shared_memory", [227, 40])
def test_the_ring(units: dict[str, Emulated], stages: int, shared_memory: int) -> None:
    """Accumulators in shared memory or in the workspace, one row in flight or several."""
    forced = Forced(shared_memory=shared_memory * 1024, stages=stages)
    for name in ("rms", "layer"):
        for h in (256, 1000, 2048):
            Launch(units[name], Problem(NORMS[name], (8 * 9 + 5, h)), SHORT, forced=forced)()


@pytest.mark.parametrize(
    ("h", "plan"),
    [
        (40, (8, 32, 1, 1, 1)),
        (2048, (128, 4, 1, 2, 1)),
        (4096, (256, 2, 1, 2, 1)),
        (6144, (512, 1, 1, 2, 1)),
        (8192, (512, 1, 1, 2, 2)),
        (10000, (512, 1, 2, 1, 4)),
        (24576, (512, 1, 2, 1, 4)),
    ],
)
def test_forced_plans(units: dict[str, Emulated], h: int, plan: tuple[int, int, int, int, int]) -> None:
    assert Launch(units["rms"], Problem(RMS, (19, h)), SHORT, forced=Forced(plan=plan))() == 2


def test_a_plan_that_is_none(units: dict[str, Emulated]) -> None:
    with pytest.raises(RuntimeError, match="no kernel for the plan"):
        Launch(units["rms"], Problem(RMS, (3, 4096)), SHORT, forced=Forced(plan=(96, 1, 1, 2, 1)))()


@pytest.mark.parametrize("name", ["rms", "layer", "wide"])
@pytest.mark.parametrize("h", [64, 1000, 8200])
def test_rows_and_sums_apart(units: dict[str, Emulated], name: str, h: int) -> None:
    problem = Problem(NORMS[name], (60 if h < 5000 else 7, h))
    assert Launch(units[name], problem, SHORT, forced=Forced(apart=True))() == 3
    assert Launch(units[name], problem, SHORT)() == 2


@pytest.mark.parametrize("processors", [1, 2, 46, 132, 148, 264])
def test_any_number_of_processors(units: dict[str, Emulated], processors: int) -> None:
    for h in (72, 2000):
        Launch(units["rms"], Problem(RMS, (50, h)), SHORT, forced=Forced(processors=processors))()


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 31, 32, 33])
def test_few_rows(units: dict[str, Emulated], count: int) -> None:
    for name in ("rms", "layer"):
        for h in (72, 4096):
            Launch(units[name], Problem(NORMS[name], (count, h)), SHORT)()


@pytest.mark.parametrize(
    ("shape", "launches"), [((50, 3, 64), 2), ((9, 5, 77), 3), ((1, 9, 64), 1), ((7, 40, 1000), 2), ((1, 5, 77), 1)]
)
def test_weights_of_several_rows(units: dict[str, Emulated], shape: tuple[int, ...], launches: int) -> None:
    for name in ("rms", "wide"):
        problem = Problem(NORMS[name], shape, shape[1:2])
        assert Launch(units[name], problem, SHORT)() == launches


@pytest.mark.parametrize("layout", ["misaligned", "half", "odd rows", "transposed", "every other"])
def test_layouts(units: dict[str, Emulated], layout: str) -> None:
    for name in ("rms", "layer"):
        for shape in ((6, 7, 128), (3, 9, 77)):
            Launch(units[name], Problem(NORMS[name], shape), SHORT, layout)()


def test_a_bias_of_several_rows_is_refused(units: dict[str, Emulated]) -> None:
    with pytest.raises(ValueError, match="a bias goes with a weight that all rows share"):
        Launch(units["layer"], Problem(LAYER, (5, 3, 64), (3,)), SHORT)()


def test_no_rows(units: dict[str, Emulated]) -> None:
    emulated = units["layer"]
    tensors = {
        o.name: torch.full((0, 64) if o.kind == "row" else (0,) if o.kind == "per_row" else (64,), 3.0)
        for o in emulated.program.operands()
    }
    tensors["workspace"] = torch.full((1 << 15,), float("nan"))
    made = [
        tensors[o.name].to(getattr(torch, dtype))
        for o, dtype in zip(emulated.program.operands(), emulated.dtypes, strict=True)
    ]
    emulated.launch(False, *made)
    for name in SUMS:
        index = [o.name for o in emulated.program.operands()].index(name)
        assert_same_bits(made[index], torch.zeros_like(made[index]), name)


@pytest.mark.parametrize(("count", "h"), [(300, 512), (129, 2048), (3, 16384)])
def test_the_usual_order(usual: dict[str, Emulated], count: int, h: int) -> None:
    Launch(usual["rms"], Problem(RMS, (count, h)), USUAL)()


def test_a_unit_needs_a_dtype_for_every_operand() -> None:
    program = BackwardProgram("rms")
    with pytest.raises(ValueError, match="6 dtypes for 7 operands"):
        unit(program, ("bfloat16",) * 6, "cuda")
    with pytest.raises(KeyError):
        unit(program, ("float64",) * 7, "cpu")
