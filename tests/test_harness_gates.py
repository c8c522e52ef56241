"""The models of operators with gates: three that were written apart agree, and one wrong element is found."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from flashnorm import model
from flashnorm.core.op import Op
from flashnorm.ops import dit, gated
from tests import canonical, gate_oracles
from tests.combos import DTYPES
from tests.gatecombos import COMBOS, DIT, GATE, MIX, OVER, USUAL, A, B, C, GateCombo, modulation_shape, of_shape
from tests.gatekit import ALPHA, CENTER, FACTOR, NEXT_CENTER, NEXT_EPS, G, GateProblem
from tests.inputs import SPECIAL
from tests.tolerance import Pool, assert_same_bits

pytestmark = pytest.mark.cpu_only

every_combo = pytest.mark.parametrize("combo", COMBOS, ids=str)
MODES = {A: "gamma_beta", B: "gate_scale_shift", C: "scale_shift"}


def operator(combo: GateCombo) -> Op:
    if combo.op in DIT:
        return dit.OPERATORS[MODES[combo.op], combo.form]  # type: ignore[index]
    return {MIX: gated.MIXED, GATE: gated.GATED}.get(combo.op, gated.MIXED_NEXT)


def by_model(problem: GateProblem) -> dict[str, torch.Tensor]:
    """What `flashnorm.model` says of the operator's own program; codes and tiles as a call leaves them."""
    combo, op, hidden = problem.combo, operator(problem.combo), problem.shape[-1]
    names = {op.label(o): o.name for o in op.operands}
    wide = combo.group or hidden
    count = problem.count * hidden // wide
    given: dict[str, torch.Tensor] = {}
    for name, tensor in problem.tensors.items():
        if tensor.dim() == 1 and not combo.group:
            given[names[name]] = tensor
            continue
        over = tensor.unsqueeze(1) if combo.op in DIT and tensor.dim() == 2 else tensor
        given[names[name]] = over.expand(problem.shape).reshape(count, wide)
    for name, (_, dtype) in problem.canonical_shapes().items():
        if name in combo.written:
            given[names[name]] = torch.empty(count, wide, dtype=dtype)
    if combo.form:
        four = combo.form == "nvfp4"
        codes = torch.uint8 if four else torch.float8_e4m3fn
        given["out"] = torch.empty(count, hidden // 2 if four else hidden, dtype=codes)
        given["scale"] = torch.empty(128, 4, dtype=torch.uint8)
    if combo.number == "device":
        given |= {"input_factor": torch.tensor([FACTOR])} | ({"global_scale": torch.tensor([G])} if combo.form else {})
    options: dict[str, Any] = {key: next(iter(values.values())) for key, values in op.options.items()}
    options["numerics"] = op.options["numerics"][combo.numerics]
    if combo.op == GATE:
        options |= {"activation": combo.activation, "norm_before_gate": "yes" if combo.before else "no"}
    program = op.program(frozenset(given), options)
    given = {o.name: given[o.name] for o in program.operands()}
    scalars = {"eps": problem.eps, "center": CENTER, "next_eps": NEXT_EPS, "next_center": NEXT_CENTER}
    scalars |= {"alpha_value": ALPHA, "input_factor_value": FACTOR if combo.number else 1.0, "global_scale_value": G}
    made = model.canonical(program, given, scalars)
    shapes = {"input": (problem.shape, DTYPES[combo.x]), **problem.canonical_shapes()}
    called = {o.name: op.label(o) for o in op.operands}
    return {
        called[name]: tensor.contiguous().view(torch.uint8).view(shapes[called[name]][1]).view(shapes[called[name]][0])
        for name, tensor in made.items()
    }


def fitting(combo: GateCombo, count: int, hidden: int) -> tuple[int, ...]:
    return (1, count, of_shape(combo, 1, hidden)[-1]) if combo.form else of_shape(combo, count, hidden)


@every_combo
def test_two_models_give_the_same_bits(combo: GateCombo) -> None:
    """One reads programs in PyTorch, one follows operators in NumPy; they share no line."""
    for count, hidden, special in ((6, 100, ()), (len(SPECIAL) + 3, 192, tuple(SPECIAL)), (1, 8200, ())):
        if combo.form and hidden > 192:
            continue
        problem = GateProblem(combo, fitting(combo, count, hidden), special=special)
        problem.check_bits(by_model(problem), "of the model")


@every_combo
def test_the_exact_bits_are_accurate(combo: GateCombo) -> None:
    pool = Pool(combo.numerics)
    for hidden in (64, 1000):
        problem = GateProblem(combo, fitting(combo, 6, hidden), seed="oracle")
        problem.accuracy(problem.canonical(), pool, problem.what)


@every_combo
def test_one_wrong_element_is_found(combo: GateCombo) -> None:
    """Of every output: another bit, and where nothing is quantised, a value two steps away."""
    problem = GateProblem(combo, fitting(combo, 6, 96))
    for name in combo.written:
        got = {n: t.clone() for n, t in problem.canonical().items()}
        raw = got[name].view(torch.uint8).flatten()
        raw[len(raw) // 2] ^= 1
        with pytest.raises(AssertionError, match="other bits"):
            problem.check_bits(got)
    if not combo.form and combo.x == "bf16":
        got = {n: t.clone() for n, t in problem.canonical().items()}
        values = got[combo.written[-1]].flatten()
        largest = int(values.float().abs().argmax())
        values[largest] = values[largest] * (1 + 2.0**-5)
        with pytest.raises(AssertionError, match="out of tolerance"):
            problem.accuracy(got, Pool(combo.numerics), "wrong")


def test_a_gated_residual_is_one_rounding_of_the_exact_sum() -> None:
    """Against fractions: x g + r, g rounded where its bias is added and where s multiplies it."""
    pool = np.random.default_rng(2)
    x, r, g, b = (pool.standard_normal(400).astype(np.float32) * np.exp2(pool.integers(-9, 9, 400)) for _ in range(4))
    x, r, g, b = (torch.from_numpy(v.astype(np.float32)) for v in (x, r, g, b))
    zeros = torch.zeros(400)
    for factor in (1.0, 0.6):
        got = canonical.gates.dit(
            x.view(1, 1, -1), r.view(1, 1, -1), gate=g, gate_bias=b, gamma=zeros, beta=zeros, factor=factor
        )["residual_out"].flatten()
        want = gate_oracles.dit(
            x.view(1, 1, -1), r.view(1, 1, -1), gate=g, gate_bias=b, gamma=zeros, beta=zeros, factor=factor
        ).residual
        assert want is not None
        assert_same_bits(got, want.flatten(), "the two models")
        s = np.float32(factor)
        for i in range(400):
            times = np.float32(np.float32(g[i].item()) + np.float32(b[i].item())) * s
            exact = Fraction(x[i].item()) * Fraction(float(np.float32(times))) + Fraction(r[i].item())
            near = np.float32(got[i].item())
            around = (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
            apart = [abs(Fraction(float(v)) - exact) for v in around]
            assert apart[1] == min(apart)


def test_every_choice_is_among_the_combinations() -> None:
    for op in DIT:
        mine = [c for c in COMBOS if c.op == op]
        assert {c.x for c in mine} == {"f32", "f16", "bf16"}
        assert {c.form for c in mine} == {"", "nvfp4", "mxfp8"}
        assert {c.number for c in mine} == {"", "value", "device"}
        assert {c.bias is None for c in mine} == {True, False}
    assert {c.over for c in COMBOS if c.op in DIT} == set(OVER)
    assert {c.residual for c in COMBOS if c.op == C} == {None, "f16", "bf16"}
    gates = [c for c in COMBOS if c.op == GATE]
    assert {(c.activation, c.before) for c in gates} == {(a, b) for a in ("sigmoid", "silu") for b in (True, False)}
    assert {c.op for c in USUAL} == {c.op for c in COMBOS}
    assert modulation_shape("BRH", (2, 5, 96)) == (2, 5, 96)
