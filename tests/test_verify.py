"""The model that `flashnorm verify` holds kernels to, and that the command sees what it should."""

from __future__ import annotations

import argparse
import json
import random
from fractions import Fraction

import pytest
import torch

from flashnorm import model, verify
from flashnorm.core.op import OPS
from flashnorm.program import AddResidual, Affine, Cast, LoadRow, Rms, RowProgram, Stage

CPU = torch.device("cpu")


def _round(value: Fraction) -> float:
    """A rational to the nearest fp32 value, ties to even; finite, normal or zero."""
    if value == 0:
        return 0.0
    sign, value = (-1, -value) if value < 0 else (1, value)
    exponent = 0
    while value >= 1 << 24:
        value, exponent = value / 2, exponent + 1
    while value < 1 << 23:
        value, exponent = value * 2, exponent - 1
    return sign * float(round(value)) * 2.0**exponent  # Fraction rounds ties to even


def _fp32(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_fma_rounds_once() -> None:
    rng = random.Random(1)
    a, b, c = [], [], []
    for _ in range(4000):
        a.append(rng.uniform(1, 2))
        b.append(rng.uniform(1, 2))
        # From addends that cancel the product to ones that lie far below its last bit.
        c.append(rng.choice((-1, 1)) * rng.uniform(1, 2) * 2.0 ** rng.randrange(-60, 40))
    # The product is 1 + 2^-22 + 2^-46; with c = 2^-24 a sum in fp64 lands on a tie that the exact sum is not on.
    a += [1 + 2.0**-23] * 2
    b += [1 + 2.0**-23] * 2
    c += [2.0**-24, -(2.0**-24)]
    x, y, z = _fp32(a), _fp32(b), _fp32(c)
    got = model._fma(x, y, z).tolist()
    numbers = ([Fraction(v) for v in t.tolist()] for t in (x, y, z))
    assert got == [_round(i * j + k) for i, j, k in zip(*numbers, strict=True)]


@pytest.mark.parametrize("hidden", [1, 3, 8, 9, 77, 256, 300, 8192, 8200, 20011])
def test_canonical_sum_against_exact_rationals(hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    v = torch.randn(hidden, generator=generator) * 3
    terms = [Fraction(t) for t in v.tolist()]
    lanes = 1
    while lanes < min(1024, -(-hidden // 8)):
        lanes *= 2
    acc = [[Fraction(0)] * 8 for _ in range(lanes)]
    for i, t in enumerate(terms):
        lane, position = i // 8 % lanes, i % 8
        acc[lane][position] = Fraction(_round(t * t + acc[lane][position]))

    def add(p: Fraction, q: Fraction) -> Fraction:
        return Fraction(_round(p + q))

    def positions(p: list[Fraction]) -> Fraction:
        return add(add(add(p[0], p[4]), add(p[2], p[6])), add(add(p[1], p[5]), add(p[3], p[7])))

    def fold(values: list[Fraction]) -> Fraction:
        s = len(values) // 2
        while s >= 1:
            values = [add(values[i], values[i + s]) for i in range(s)]
            s //= 2
        return values[0]

    lane_sums = [positions(p) for p in acc]
    width = min(32, lanes)
    wanted = fold([fold(lane_sums[i : i + width]) for i in range(0, lanes, width)])
    assert model.canonical_sum(v[None], v[None]).tolist() == [float(wanted)]


def test_steps_counts_representable_values() -> None:
    one = torch.tensor([1.0, -1.0, 0.0, 1.0, torch.nan, torch.nan], dtype=torch.bfloat16)
    other = torch.tensor([1.0078125, -1.0078125, -0.0, -1.0, torch.nan, 1.0], dtype=torch.bfloat16)
    apart = model.steps(one, other).tolist()
    assert apart[:3] == [1, 1, 0]
    assert apart[3] == 2 * 0x3F80
    assert apart[4:] == [0, 1 << 31]


def test_exact_and_canonical_agree_and_round_where_the_mode_says() -> None:
    x = torch.full((1, 16), 1.0, dtype=torch.bfloat16)
    residual = torch.full((1, 16), 0.00396, dtype=torch.bfloat16)
    weight = torch.linspace(0.5, 2.0, 16, dtype=torch.bfloat16)
    given = {"x": x, "residual": residual, "weight": weight}
    sums = {}
    for rounded in (False, True):
        program = RowProgram(AddResidual(rounded=rounded), Rms(), (), Cast("x"))
        h, _ = model._load(program, given)
        sums[rounded] = float(h[0, 0])
        written = model.canonical(program, given, {"eps": 1.0})
        assert float(written["residual"][0, 0]) == 1.0078125
        formula = model.exact(program, given, {"eps": 1.0})["x"]
        assert int(model.steps(written["x"], formula).max()) <= 1
    assert sums[False] == pytest.approx(1.0039673, abs=1e-7)
    assert sums[True] == 1.0078125


def test_unknown_stage_is_refused() -> None:
    program = RowProgram(LoadRow(), Rms(), (Stage(),), Cast())
    given = {"x": torch.ones(1, 8), "out": torch.empty(1, 8)}
    for reader in (model.exact, model.canonical):
        with pytest.raises(NotImplementedError, match="Stage"):
            reader(program, given, {"eps": 1e-6})
    offset = RowProgram(LoadRow(), Rms(), (Affine(offset=1.0),), Cast())
    given["weight"] = torch.zeros(8)
    assert model.exact(offset, given, {"eps": 0.0})["out"].tolist() == [[1.0] * 8]


# ------------------------------------------------------------------ the command
def _model_call(op, case, given, device):
    """A perfect route: the model itself."""
    written = model.canonical(verify.program_of(op, case), given, {"eps": verify.EPS})
    return {name: written[name] for name in (o.name for o in op.operands) if name in written}


@pytest.fixture
def perfect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "call", _model_call)
    monkeypatch.setattr(verify, "_serves", lambda op, route, device: None if route == "cpu" else "not here")
    monkeypatch.setattr(verify, "speed", lambda op, route, device: 1.5)


def test_a_right_route_passes(perfect: None) -> None:
    lines, missing = verify.check_device(CPU, quick=True)
    assert {line.op for line in lines} == set(OPS)
    assert [line.failures for line in lines] == [[] for _ in lines]
    assert all(line.bits and line.repeats and line.chunks and line.speed == 1.5 for line in lines)
    assert set(missing) == {"cute", "cuda", "torch"}


def _other_sum(op, case, given, device):
    """Right to the last bit or so, but with another order of additions."""
    formula = model.exact(verify.program_of(op, case), given, {"eps": verify.EPS})
    return {name: (v * (1 + 2.0**-12)).to(given[name].dtype) for name, v in formula.items()}


def _drift(op, case, given, device):
    written = _model_call(op, case, given, device)
    first = next(iter(written.values()))
    first[0, 0] += torch.rand(()) + 1
    return written


def _by_batch(op, case, given, device):
    written = _model_call(op, case, given, device)
    return {name: t * 2 if t.shape[0] < 3 else t for name, t in written.items()}


def _unwritten(op, case, given, device):
    written = _model_call(op, case, given, device)
    next(iter(written.values()))[-1, -1] = torch.nan
    return written


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_other_sum, "bits differ from the specified arithmetic"),
        (_drift, "runs differ"),
        (_by_batch, "depend on the batch"),
        (_unwritten, "steps from the formula"),
    ],
)
def test_a_wrong_route_fails(perfect: None, monkeypatch: pytest.MonkeyPatch, fault, said: str) -> None:
    monkeypatch.setattr(verify, "call", fault)
    lines, _ = verify.check_device(CPU, quick=True, ops=("rmsnorm", "fused_add_rmsnorm"))
    for line in lines:
        assert any(said in text for text in line.failures), line


def test_an_exception_is_a_finding(perfect: None, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no launch")

    monkeypatch.setattr(verify, "call", broken)
    arguments = argparse.Namespace(quick=True, json=False, device="cpu", ops="rmsnorm", routes="cpu")
    assert verify.run(arguments) == 1
    assert "FAIL rmsnorm, cpu, flashinfer, bfloat16: RuntimeError: no launch" in capsys.readouterr().out


def test_json(perfect: None, capsys) -> None:
    arguments = argparse.Namespace(quick=True, json=True, device="cpu", ops="rmsnorm,fused_add_rmsnorm", routes="")
    assert verify.run(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "flashnorm-verify/1"
    assert report["ok"] is True
    assert [line["op"] for line in report["devices"][0]["lines"]] == ["rmsnorm", "fused_add_rmsnorm"]


def test_nothing_to_check_is_not_success(perfect: None, capsys) -> None:
    arguments = argparse.Namespace(quick=True, json=False, device="cpu", ops="", routes="cuda")
    assert verify.run(arguments) == 2


def test_the_torch_route_is_accurate() -> None:
    lines, _ = verify.check_device(CPU, quick=True, routes=("torch",))
    assert lines
    assert [line.failures for line in lines] == [[] for _ in lines]
    assert all(line.bits is None for line in lines)
