"""LayerNorm where other kernels fail: means that are large beside the spread, and rows that end inside a group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import oracles
from tests.combos import COMBOS, USUAL, Combo
from tests.judge import judge
from tests.problem import Problem
from tests.tolerance import FP32_OF_LARGEST, assert_same_bits, same_bits

F32 = next(c for c in COMBOS if c.op == "layernorm" and c.x == "f32" and c.bias and c.weight)
FAMILY = tuple(c for c in USUAL if c.centred)
OF_LARGEST = 1e-5  # what is promised for rows whose mean is large beside their spread


def steps_up(start: float, step: float, h: int) -> torch.Tensor:
    return (torch.arange(h, dtype=torch.float64) * step + start).float()


AWKWARD = {
    "40000 to 40003": torch.tensor([40000.0, 40001.0, 40002.0, 40003.0]),
    "40000 to 40003, many": steps_up(40000, 1, 4).repeat(300),
    "1000 + i / 1000": steps_up(1000, 1e-3, 16),
    "1000 + i / 1000, 769": steps_up(1000, 1e-3, 769),
    "a million and a bit": steps_up(1e6, 0.25, 100),
    "-1e5": steps_up(-1e5, 0.03125, 1000),
    "one away from many": torch.cat([torch.full((511,), 1e4), torch.tensor([1e4 + 1])]),
    "16384 of 2^20": steps_up(2.0**20, 0.125, 16384),
}


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("name", AWKWARD)
def test_a_large_mean(name: str, with_residual: bool, route: str, device: torch.device) -> None:
    """Within 1e-5 of the row's largest |y|, of the same stored inputs; E[x^2] - E[x]^2 would give 0, or NaN."""
    x = AWKWARD[name].expand(3, -1).contiguous()
    combo = replace(F32, op="fused_add_layernorm", residual="f32") if with_residual else F32
    half = (x / 2).contiguous() if with_residual else None
    problem = Problem(combo, tuple(x.shape), device, x=x if half is None else half.clone(), residual=half)
    want, got = problem.oracle(), problem.run(route)
    error = (got.out.double() - want.out).abs()
    assert bool((error <= OF_LARGEST * want.out.abs().amax(-1, keepdim=True)).all()), float(error.max())
    if route != "torch":
        problem.check_bits(got, f"on {route}")


@pytest.mark.parametrize("h", [1, 2, 3, 7, 9, 17, 769, 1023, 4095])
def test_values_near_1000(h: int, route: str, device: torch.device) -> None:
    """fp32 rows that end inside a group of 8: what is missing is no value at all, neither 0 nor minus the mean."""
    x = 1000 + torch.randn(3, h)
    judge(Problem(F32, (3, h), device, x=x), route)


@pytest.mark.parametrize("combo", FAMILY, ids=str)
def test_bf16_near_1000(combo: Combo, route: str, device: torch.device) -> None:
    """bf16 has steps of 4 there: a handful of values, whose norm is exact to a rounding."""
    x = (1000 + 8 * torch.randn(33, 4096)).to(torch.bfloat16)
    residual = None if combo.residual is None else torch.zeros_like(x)
    judge(Problem(combo, (33, 4096), device, x=x, residual=residual), route)


def test_a_constant_row(route: str, device: torch.device) -> None:
    """Its variance is 0, so that the result is the bias; with eps = 0, NaN, as PyTorch has it."""
    for value in (3.0, 1e-30, 1000.1, -7e4):
        for h in (1, 8, 111, 128, 4096):
            problem = Problem(F32, (2, h), device, x=torch.full((2, h), value))
            got = problem.run(route).out
            assert problem.bias is not None
            assert bool(((got - problem.bias).abs() <= FP32_OF_LARGEST * problem.bias.abs().max()).all()), (value, h)
    assert bool(Problem(F32, (1, 8), device, x=torch.zeros(1, 8), eps=0.0).run(route).out.isnan().all())


def test_what_is_missing_is_skipped(route: str, device: torch.device) -> None:
    """No bias is no addition of 0, which would drop the sign of a -0: here n underflows to it."""
    combo = next(c for c in COMBOS if c.op == "layernorm" and c.x == "bf16" and c.bias is None)
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    x[0, 0] = -1e-38
    weight = torch.full((8,), 1.5, dtype=torch.bfloat16)
    got = Problem(combo, (1, 8), device, x=x, weight=weight, eps=3e38).run(route).out
    assert bool(got[0, 0].signbit()) and not bool(got.any())


def test_out_and_pdl_are_taken(route: str, device: torch.device) -> None:
    combo = next(c for c in FAMILY if c.op == "layernorm")
    problem = Problem(combo, (5, 576), device)
    want = problem.run(route)
    for out in ("contiguous", "alias", "half"):
        for pdl in (True, False):
            assert_same_bits(problem.run(route, out, enable_pdl=pdl).out, want.out, out)


def test_double_rounding_goes_through_t(route: str, device: torch.device) -> None:
    """It reproduces codes that were made from a bf16 result; without it, the result is rounded once."""
    twice = next(c for c in COMBOS if c.double and c.x == "bf16")
    problem = Problem(twice, (33, 1024), device)
    judge(problem, route)
    got = problem.run(route).out
    plain = Problem(next(c for c in FAMILY if c.op == "layernorm"), (33, 1024), device, x=problem.x).run(route).out
    inverse = torch.tensor(1.0) / torch.tensor(float(problem.scale or 0.0))
    assert_same_bits(got, oracles.round_to((plain.float() * inverse).double(), got.dtype), "from the bf16 result")
    once = Problem(replace(twice, double=False), (33, 1024), x=problem.x).canonical().out
    assert not same_bits(got, once)
