"""Gradients of rows, and sums over rows, of every route: to the bit, and against the formula in fp64.

`test_backward_emulated.py` runs the CUDA route's kernels, and their plans, on the host.
"""

from __future__ import annotations

import json

import pytest
import torch

from flashnorm.ops import backward
from flashnorm.program import BackwardProgram, partials
from tests import oracles
from tests.backward_problem import EPS, LAYER, NORMS, RMS, SUMS, Norm, Problem
from tests.canonical.backward import Order
from tests.golden.backward import FILE, digests, problems
from tests.inputs import gains, rows
from tests.tolerance import assert_row_gradient, assert_same_bits, assert_same_sum, assert_weight_gradient

HIDDEN = (1, 5, 8, 9, 24, 64, 77, 256, 300, 576, 1000, 2048, 4095, 4096)
HIDDEN_WIDE = (6144, 8192, 8200, 9001, 16384, 20001, 24576, 32768, 40000)


# ------------------------------------------------------------------ bits
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_the_bits(norm: Norm, exact_route: str, device: torch.device, full: bool) -> None:
    turn = NORMS.index(norm)
    for h in HIDDEN if full else HIDDEN[turn % 3 :: 3]:
        problem = Problem(norm, (37 if h < 1000 else 7, h))
        problem.check(problem.run(exact_route, device), exact_route)
    for h in HIDDEN_WIDE if full else HIDDEN_WIDE[turn % 4 :: 4]:
        problem = Problem(norm, (3, h))
        problem.check(problem.run(exact_route, device), exact_route)


# Rows beyond 16 of a partial: outer accumulators. P is 8192, 1024, and 128 (64 of two weight rows).
@pytest.mark.parametrize(
    ("norm", "shape", "lead"),
    [
        (RMS, (8192 * 17 + 100, 8), ()),
        (LAYER, (8192 * 16 + 3, 8), ()),
        (RMS, (1024 * 17, 1000), ()),
        (RMS, (128 * 33 + 5, 8192), ()),
        (LAYER, (128 * 17 + 1, 8200), ()),
        (Norm(joins=True, wanted=("dresidual", "dweight")), (17 * 64 + 2, 2, 8192), (2,)),
    ],
    ids=str,
)
def test_many_rows(
    norm: Norm, shape: tuple[int, ...], lead: tuple[int, ...], exact_route: str, device: torch.device
) -> None:
    problem = Problem(norm, shape, lead)
    problem.check(problem.run(exact_route, device), exact_route)


@pytest.mark.parametrize(
    ("shape", "lead"),
    [
        ((5, 3, 64), (3,)),
        ((40, 3, 256), (3,)),
        ((3, 40, 256), (3, 1)),
        ((9, 64), (9,)),
        ((1, 9, 64), (9,)),
        ((9, 1, 64), (1,)),
        ((1, 64), (1,)),
        ((5, 4, 3, 65), (5, 1, 3)),
        ((5, 4, 3, 64), (4, 1)),
        ((5, 4, 3, 64), (5, 4, 3)),
        ((2, 700, 1000), (700,)),
        ((64,), ()),
    ],
    ids=str,
)
def test_weights_of_several_rows(
    shape: tuple[int, ...], lead: tuple[int, ...], exact_route: str, device: torch.device
) -> None:
    for norm in (RMS, Norm(joins=True, offset=1.0, round_norm=True, wanted=("dx", "dresidual", "dweight"))):
        problem = Problem(norm, shape, lead)
        for layout in ("contiguous", "transposed"):
            problem.check(problem.run(exact_route, device, layout=layout, out=layout), exact_route)


LAYOUTS = ("misaligned", "half", "odd rows", "transposed", "every other", "expanded", "last 2")


@pytest.mark.parametrize("norm", [RMS, LAYER, NORMS[3]], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(norm: Norm, layout: str, exact_route: str, device: torch.device) -> None:
    for shape in ((6, 5, 128), (9, 1000), (3, 2, 77)):
        problem = Problem(norm, shape).laid_out(layout)
        outs = ("none", "alias") if layout == "half" else ("none",) if layout == "expanded" else ("none", layout)
        for out in outs:
            problem.check(problem.run(exact_route, device, layout=layout, out=out), exact_route)


def test_gradients_over_what_came_in(exact_route: str, device: torch.device) -> None:
    for shape in ((300, 64), (7, 4096), (5, 1001), (3, 40000)):
        for norm in (RMS, LAYER):
            problem = Problem(norm, shape)
            problem.check(problem.run(exact_route, device, out="alias"), exact_route)


@pytest.mark.parametrize("norm", [RMS, LAYER], ids=str)
def test_appended_rows_of_zeros_change_nothing(norm: Norm, exact_route: str, device: torch.device) -> None:
    """The gradient of a batch is that of the batch with padding, to the bit: the order hangs on H alone."""
    for h, count in ((64, 1), (1000, 150), (4096, 300)):
        whole = Problem(norm, (count, h))
        dout = whole.values["dout"]
        dout[0] = -0.0
        dout[:, ::7] = 0.0
        dout[:, 1] = -1e-38 if norm.dout != "f16" else 0.0
        first = Problem(norm, (count, h), given={"dout": dout, "x": whole.values["x"]}).run(exact_route, device)
        for more in (1, 17, 129, 300):
            zeros = torch.zeros(more, h, dtype=dout.dtype)
            given = {
                "dout": torch.cat([dout, zeros]),
                "x": torch.cat([whole.values["x"], rows((more, h), whole.values["x"].dtype, "more")]),
                "weight": whole.values["weight"],
            }
            longer = Problem(norm, (count + more, h), given=given).run(exact_route, device)
            for name in SUMS:
                if name in first:
                    assert_same_bits(longer[name], first[name], f"{name} of {count} rows and {more} of zeros")


def test_no_rows(route: str, device: torch.device) -> None:
    for norm in (RMS, LAYER, NORMS[3]):
        for shape, lead in (((0, 64), ()), ((0, 3, 64), (3,)), ((3, 0, 64), (3, 1))):
            if lead and norm.centred:
                continue
            got = Problem(norm, shape, lead).run(route, device)
            for name in SUMS:
                if name in got:
                    assert_same_bits(got[name], torch.zeros_like(got[name]), f"{name} without rows")


def test_again_in_the_same_workspace(exact_route: str, device: torch.device) -> None:
    """For other rows, other launches and a graph's replays: nothing in it has to be set up."""
    workspace = backward.backward_workspace(1, 4096, device, sums=2).fill_(float("nan"))
    for norm, count in ((RMS, 300), (LAYER, 5), (RMS, 1), (LAYER, 300), (RMS, 300)):
        problem = Problem(norm, (count, 4096))
        problem.check(problem.run(exact_route, device, workspace=workspace), exact_route)


@pytest.mark.cpu_only
@pytest.mark.parametrize("norm", [RMS, LAYER], ids=str)
def test_any_number_of_threads(norm: Norm) -> None:
    problem = Problem(norm, (700, 1000))
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        problem.check(problem.run("cpu"), f"{threads} threads")


def test_golden_bits(exact_route: str, device: torch.device) -> None:
    want = json.loads(FILE.read_text())
    assert set(want) == {problem.what for problem in problems()}
    for problem in problems():
        assert digests(problem.run(exact_route, device)) == want[problem.what], problem.what


# ------------------------------------------------------------------ the formula
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_the_formula(norm: Norm, route: str, device: torch.device) -> None:
    for shape in ((67, 1000), (300, 256)):
        problem = Problem(norm, shape)
        values = problem.values
        want = oracles.gradients(
            values["x"],
            values.get("weight"),
            dy=values["dout"],
            dh=values.get("g_residual"),
            bias=torch.zeros(shape[-1]) if "dbias" in norm.wanted else None,
            centred=norm.centred,
            eps=EPS,
            numerics="hf-llama" if norm.round_norm and norm.dout == norm.x else "flashinfer",
            offset=norm.offset,
        )
        got = problem.run(route, device)
        for name in ("dx", "dresidual"):
            if name in got:
                assert_row_gradient(got[name], want, f"{problem.what} {name}")
        for name, right in (("dweight", want.weight), ("dbias", want.bias)):
            if name in got:
                assert_same_sum(got[name], right, f"{problem.what} {name}")


@pytest.mark.parametrize(("count", "h"), [(1, 4096), (4096, 512), (16231, 256), (65536, 64)])
def test_dweight_is_as_good_as_eager_fp32(count: int, h: int, exact_route: str, device: torch.device) -> None:
    problem = Problem(RMS, (count, h))
    values = problem.values
    want = oracles.gradients(values["x"], values["weight"], dy=values["dout"], eps=EPS)
    eager = oracles.eager_weight_gradient(values["x"].to(device), values["dout"].to(device), EPS)
    got = problem.run(exact_route, device)["dweight"]
    assert want.weight is not None
    assert_weight_gradient(got, want.weight, eager, f"{count} x {h}")


# ------------------------------------------------------------------ errors, and PyTorch
def _given(shape: tuple[int, ...] = (4, 64)) -> dict[str, torch.Tensor]:
    return {
        "dout": rows(shape, torch.bfloat16, "dout"),
        "x": rows(shape, torch.bfloat16, "x"),
        "weight": gains(shape[-1:], torch.bfloat16),
        "rstd": torch.ones(shape[:-1]),
    }


BOTH = {"dx": torch.bfloat16, "dweight": torch.float32}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"dout": torch.zeros(4, 63).bfloat16()}, ValueError, "x must have shape"),
        ({"dout": torch.zeros(4, 64).double()}, ValueError, "dout must have dtype"),
        ({"weight": torch.zeros(63)}, ValueError, "weight must broadcast"),
        ({"weight": torch.zeros(5, 64)}, ValueError, "weight must broadcast"),
        ({"rstd": torch.ones(3)}, ValueError, "rstd must have shape"),
        ({"rstd": torch.ones(4).bfloat16()}, ValueError, "rstd must have dtype"),
        ({"dout": None}, TypeError, "dout must be a torch.Tensor"),
        ({"wanted": {"dx": torch.float32}}, ValueError, "dx must have dtype"),
        ({"wanted": {"dweight": torch.float64}}, ValueError, "dweight must have dtype"),
        ({"wanted": {"dbias": torch.float32}}, ValueError, "no gradient 'dbias'"),
        ({"weight": None, "wanted": {"dweight": torch.float32}}, ValueError, "no gradient 'dweight'"),
        ({"workspace": torch.zeros(7)}, ValueError, "workspace must be"),
        ({"g_residual": torch.zeros(3, 64)}, ValueError, "g_residual must have shape"),
    ],
)
def test_wrong_arguments(change: dict[str, object], error: type[Exception], text: str) -> None:
    given: dict[str, object] = {**_given(), "wanted": BOTH} | change
    with pytest.raises(error, match=text):
        backward.rmsnorm_backward(**given)  # type: ignore[arg-type]


def test_wanted_alone_is_computed() -> None:
    given = _given()
    assert backward.rmsnorm_backward(**given, wanted={}) == {}
    assert backward.rmsnorm_backward(**given, wanted={"dx": None}) == {}
    assert set(backward.rmsnorm_backward(**given, wanted={"dx": torch.bfloat16, "dweight": None})) == {"dx"}


def test_programs_say_what_they_are() -> None:
    with pytest.raises(ValueError, match="without a gradient"):
        BackwardProgram("rms", dx=False, dweight=False)
    with pytest.raises(ValueError, match="no weight"):
        BackwardProgram("rms", weight=False)
    order = Order()
    for weight_rows in (1, 2, 3, 128, 5000):
        for h in (1, 8, 127, 128, 129, 4096, 8192, 8193, 262144):
            assert partials(weight_rows, h) == order.partials(weight_rows, h), (weight_rows, h)


def test_opcheck(device: torch.device) -> None:
    given = {name: tensor.to(device) for name, tensor in _given((6, 2, 64)).items()}
    workspace = backward.backward_workspace(1, 64, device, sums=2)
    dx, sums = torch.empty_like(given["dout"]), torch.empty(64, device=device)
    tensors = (given["dout"], given["x"], given["weight"], given["rstd"], None, dx, None, sums, workspace)
    torch.library.opcheck(backward.RMSNORM_BACKWARD.overload, (*tensors, "0.0", "no", True))
    means = torch.zeros_like(given["rstd"])
    tensors = (given["dout"], given["x"], given["weight"], means, means, given["rstd"], None, dx, None, sums)
    torch.library.opcheck(backward.LAYERNORM_BACKWARD.overload, (*tensors, sums.clone(), workspace, True))


@pytest.mark.parametrize("lead", [(), (3,), (5, 1)])
def test_compiled_with_any_number_of_rows(lead: tuple[int, ...], exact_route: str, device: torch.device) -> None:
    import flashnorm

    def both(dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor) -> list[torch.Tensor]:
        return list(backward.rmsnorm_backward(dout, x, weight, rstd, wanted=BOTH).values())

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for count in (3, 8):
        problem = Problem(RMS, (5, count, 64) if len(lead) == 2 else (count, 3, 64), lead)
        tensors = [problem.values[name].to(device) for name in ("dout", "x", "weight", "rstd")]
        with flashnorm.backend(exact_route):
            got = compiled(*tensors)
        problem.check(dict(zip(("dx", "dweight"), got, strict=True)), "compiled")
