"""The scale of the static operators: a number, or an element of any dtype on either side; a divisor."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import flashnorm
from tests.combos import STATIC, USUAL, Combo
from tests.inputs import gains, rows
from tests.judge import check
from tests.problem import Problem
from tests.tolerance import Pool, assert_same_bits

COMBOS = tuple(c for c in USUAL if c.op in STATIC)
every_operator = pytest.mark.parametrize("combo", COMBOS, ids=str)
VALUE = 0.0279541015625  # 229 / 2^13, which every dtype holds
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@every_operator
def test_every_form_of_a_scale(combo: Combo, route: str, device: torch.device) -> None:
    """A Python or NumPy number; 0-d and (1,) tensors of every dtype, on the CPU and on the device: the same bytes."""
    problem = Problem(combo, (5, 384), device, scale=VALUE)
    want = problem.run(route)
    if route != "torch":
        problem.check_bits(want)
    forms = [np.float32(VALUE), np.float64(VALUE), torch.nn.Parameter(torch.tensor(VALUE), requires_grad=False)]
    for where in sorted({"cpu", device.type}):
        forms += [torch.full(shape, VALUE, dtype=dtype, device=where) for dtype in DTYPES for shape in ((), (1,))]
    forms.append(torch.full((8,), VALUE, device=device)[3:4])  # inside a larger one
    forms.append(torch.tensor([VALUE], device=device).expand(1))
    for form in forms:
        call = problem.prepare()
        call.arguments["scale"] = form
        assert_same_bits(call(route).out, want.out, f"scale {form!r}")


@every_operator
def test_whole_numbers(combo: Combo, route: str, device: torch.device) -> None:
    problem = Problem(combo, (3, 128), device, scale=2.0)
    want = problem.run(route)
    for form in (2, np.int64(2), torch.tensor(2), torch.tensor([2], dtype=torch.int32, device=device)):
        call = problem.prepare()
        call.arguments["scale"] = form
        assert_same_bits(call(route).out, want.out, f"scale {form!r}")


@every_operator
def test_a_number_is_rounded_to_fp32_first(combo: Combo, route: str, device: torch.device) -> None:
    """0.1 is another number in fp32, and the inverse is that one's; in fp64 too many bits would be kept."""
    problem = Problem(combo, (19, 512), device, scale=float(np.float32(0.1)))
    want = problem.run(route)
    for form in (0.1, torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.1], dtype=torch.float64, device=device)):
        call = problem.prepare()
        call.arguments["scale"] = form
        assert_same_bits(call(route).out, want.out, f"scale {form!r}")


@every_operator
def test_one_kernel_and_one_warm_call_serve_every_value(combo: Combo, route: str, device: torch.device) -> None:
    """Values by turns: a remembered one would show."""
    for scale in (VALUE, 0.5, VALUE, 3.0, 0.5, 1e-3):
        problem = Problem(combo, (3, 256), device, scale=scale)
        for _ in range(3):
            got = problem.run(route)
        if route == "torch":
            check(problem, route, Pool(combo.numerics))
        else:
            problem.check_bits(got, f"scale {scale}")


BAD = [0.0, -0.0, -0.5, math.nan, math.inf, -math.inf, 1e39, 1e-46]


@pytest.mark.parametrize("value", BAD, ids=str)
@every_operator
def test_values_that_are_refused(combo: Combo, value: float, device: torch.device) -> None:
    """As a number, and in a CPU tensor: finite and positive, as an fp32 number; nothing is written."""
    forms = [value, np.float64(value), torch.tensor(value, dtype=torch.float64), torch.tensor([value]).double()]
    for form in forms:
        call = Problem(combo, (3, 128), device).prepare()
        for warm in (False, True):
            call.arguments["scale"] = VALUE
            if warm:
                getattr(flashnorm, combo.op)(**call.arguments)
                call = Problem(combo, (3, 128), device).prepare()
            call.arguments["scale"] = form
            with pytest.raises(ValueError, match=f"{combo.op}: scale must be finite and > 0"):
                getattr(flashnorm, combo.op)(**call.arguments)
            assert all(guard.unchanged() for guard in call.guards.values())


@every_operator
def test_shapes_that_are_refused(combo: Combo, device: torch.device) -> None:
    for shape in ((1, 1), (2,), (0,), (128,), (3, 1)):
        for where in sorted({"cpu", device.type}):
            call = Problem(combo, (3, 128), device).prepare()
            call.arguments["scale"] = torch.full(shape, VALUE, device=where)
            with pytest.raises(ValueError, match=rf"{combo.op}: scale must be a scalar tensor or shape \(1,\), got"):
                getattr(flashnorm, combo.op)(**call.arguments)
            assert all(guard.unchanged() for guard in call.guards.values())


@every_operator
def test_things_that_are_no_scale(combo: Combo, device: torch.device) -> None:
    wrong = (None, "1.0", [1.0], True, 1j, object(), torch.tensor(True), torch.tensor(1j))
    for form in wrong:
        call = Problem(combo, (3, 128), device).prepare()
        call.arguments["scale"] = form
        with pytest.raises((TypeError, ValueError), match=f"{combo.op}: scale must be"):
            getattr(flashnorm, combo.op)(**call.arguments)
        assert all(guard.unchanged() for guard in call.guards.values())


@every_operator
def test_a_scale_whose_gradient_would_be_lost(combo: Combo, device: torch.device) -> None:
    """On either side; one on the CPU is a number for the kernel, and says so no more."""
    problem = Problem(combo, (2, 64), device, scale=VALUE)
    for where in sorted({"cpu", device.type}):
        call = problem.prepare()
        call.arguments["scale"] = torch.tensor(VALUE, device=where, requires_grad=True)
        with pytest.raises(RuntimeError, match="scale requires grad, but this operator records no gradient"):
            call("torch")
        with torch.no_grad():
            assert_same_bits(call("torch").out, problem.run("torch").out)
        call = problem.prepare()
        with (
            forward_ad.dual_level(),
            pytest.raises(RuntimeError, match=r"records no gradient for torch\.func"),
        ):
            number = torch.tensor(VALUE, device=where)
            call.arguments["scale"] = forward_ad.make_dual(number, torch.ones_like(number))
            call("torch")


@pytest.mark.gpu
@every_operator
def test_a_scale_that_was_just_written(combo: Combo, exact_route: str, device: torch.device) -> None:
    """Read on the device, after what wrote it: never by the host, never before the wait of a dependent launch."""
    problem = Problem(combo, (64, 4096), device)
    scale = torch.ones(1, device=device)
    for i in range(20):
        call = problem.prepare()  # a residual is another one after a call
        call.arguments["scale"] = scale
        scale.fill_(0.01 * (i + 1))
        got = call(exact_route).out
        assert_same_bits(got, Problem(combo, (64, 4096), device, scale=float(scale)).canonical().out, f"turn {i}")


@pytest.mark.gpu
def test_a_scale_on_a_gpu_for_rows_on_the_cpu(device: torch.device) -> None:
    call = Problem(COMBOS[0], (3, 128), "cpu").prepare()
    call.arguments["scale"] = torch.ones(1, device=device)
    with pytest.raises(ValueError, match="scale is on cuda:0, but input on cpu"):
        getattr(flashnorm, COMBOS[0].op)(**call.arguments)


@pytest.mark.gpu
def test_a_scale_on_another_device(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    call = Problem(COMBOS[0], (3, 128), torch.device("cuda:0")).prepare()
    call.arguments["scale"] = torch.ones(1, device="cuda:1")
    with pytest.raises(ValueError, match="scale is on cuda:1, but input on cuda:0"):
        getattr(flashnorm, COMBOS[0].op)(**call.arguments)


@pytest.mark.parametrize("out", ["e4m3", "e5m2"])
def test_it_divides(out: str, route: str, device: torch.device) -> None:
    """A constant row of 300 normalises to 1: with a weight of 1.5 and a scale of 3, the code of 0.5."""
    x = torch.full((2, 64), 300.0, dtype=torch.bfloat16, device=device)
    weight = torch.full((64,), 1.5, dtype=torch.bfloat16, device=device)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[out]
    code = torch.full((2, 64), 7.0, device=device).to(dtype)
    with flashnorm.backend(route):
        flashnorm.rmsnorm_quant(code, x, weight, 3.0, 0.0)
    assert bool((code.float() == 0.5).all())


def test_the_output_says_which_format(device: torch.device) -> None:
    x, weight = rows((3, 64), torch.bfloat16).to(device), gains((64,), torch.bfloat16).to(device)
    for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.int8, torch.float8_e4m3fnuz):
        out = torch.zeros(3, 64, device=device).to(dtype)
        with pytest.raises(ValueError, match="out must have dtype float8_e4m3fn or float8_e5m2"):
            flashnorm.rmsnorm_quant(out, x, weight, 1.0)
