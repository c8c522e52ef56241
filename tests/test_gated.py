"""Residual mixes and the norm under a gate: every argument of the exponential, groups, probes, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashnorm
from flashnorm import functional
from flashnorm.ops import gated
from tests import canonical, gate_oracles
from tests.gatecombos import GATE, MIX, MIXES, NEXT, USUAL, GateCombo
from tests.gatekit import FUNCTIONS, GateProblem, judge
from tests.inputs import gains, rows
from tests.tolerance import assert_same_bits

BF16, F32 = torch.bfloat16, torch.float32
EXACT_ULPS, EXACT_TO = 4, 80.0  # the contract's
usual = {combo.op: combo for combo in USUAL}


# ------------------------------------------------------------------ the gate
@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_every_bf16_gate(activation: str, exact_route: str, device: torch.device) -> None:
    """All 65,536, under a norm of 1: within 4 ulp of the formula in fp64 where asked for; on the CPU to the bit."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).view(256, 256)
    x = torch.ones(256, 256)
    with flashnorm.backend(exact_route):
        got = functional.rmsnorm_gate(x.to(device), values.to(device), None, 0.0, activation=activation).cpu()
    if exact_route == "cpu":
        assert_same_bits(got, torch.from_numpy(canonical.gates.act(canonical.widen(values), activation)), activation)
    exact = gate_oracles.act(values.double(), activation)
    judged = (values.double().abs() <= EXACT_TO) & (exact.abs() >= 2.0**-126)
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs())) - 23)
    assert bool(((got.double() - exact).abs() <= EXACT_ULPS * ulp)[judged].all())


def test_what_the_ends_of_a_gate_are(route: str, device: torch.device) -> None:
    """The formulas' own values: the sigmoid of infinities is 1 and 0; SiLU of -infinity is NaN."""
    inf, nan = torch.inf, torch.nan
    x, gate = (torch.tensor([v]).to(device) for v in ([1.0] * 8, [inf, -inf, 200.0, -200.0, 0.0, -0.0, nan, 100.0]))
    with flashnorm.backend(route):
        sigmoid, silu = (
            functional.rmsnorm_gate(x, gate, None, 0.0, activation=name)[0].cpu() for name in ("sigmoid", "silu")
        )
    assert sigmoid[[0, 1, 2, 3, 4, 5, 7]].tolist() == [1, 0, 1, 0, 0.5, 0.5, 1] and sigmoid[6].isnan()
    assert silu[[0, 2, 3, 4, 5, 7]].tolist() == [inf, 200, 0, 0, 0, 100] and silu[[1, 6]].isnan().all()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 64), (2, 5, 192)], ids=str)
def test_heads_and_groups(shape: tuple[int, ...], before: bool, route: str, device: torch.device) -> None:
    """Groups of a row are the rows of a tensor of that shape, weights cut up alike."""
    x, gate, weight = rows(shape, BF16, "x"), rows(shape, BF16, "gate"), gains(shape[-1:], F32)
    for group in (None, 64, 32, 1):
        combo = GateCombo(GATE, residual=None, bias="f32", before=before, group=group)
        judge(GateProblem(combo, shape, device, given={"input": x, "gate": gate, "weight": weight}), route)
    cut = (*shape[:-1], shape[-1] // 32, 32)
    whole, parts = x.to(device), x.view(cut).to(device)
    with flashnorm.backend(route):
        flashnorm_gate = FUNCTIONS[GATE]
        flashnorm_gate(whole, gate.to(device), group_size=32, norm_before_gate=before)
        flashnorm_gate(parts, gate.view(cut).to(device), norm_before_gate=before)
    assert torch.equal(whole, parts.view(shape))


def test_heads_of_a_projection(route: str, device: torch.device) -> None:
    """In place on a slice of a projection: what lies beside it stays."""
    qkv, gate = rows((7, 512), BF16, "qkv"), rows((7, 4, 64), BF16, "gate")
    live = qkv.clone().to(device)
    with flashnorm.backend(route):
        FUNCTIONS[GATE](live[:, :256].view(7, 4, 64), gate.to(device))
    given = {"input": qkv[:, :256].reshape(7, 4, 64).contiguous(), "gate": gate}
    want = GateProblem(usual[GATE], (7, 4, 64), device, given=given, eps=1e-5).run(route)["input"]
    assert_same_bits(live[:, :256].reshape(7, 4, 64), want, "the slice")
    assert torch.equal(live[:, 256:].cpu(), qkv[:, 256:])


@pytest.mark.parametrize("group", [None, 32])
def test_rmsnorm_gate_returns_a_new_tensor(group: int | None, route: str, device: torch.device) -> None:
    """The same as in place; into a given one, or the input itself, and returned as it was given."""
    problem = GateProblem(GateCombo(GATE, residual=None, bias="f32", activation="silu", group=group), (6, 96), device)
    want, t = problem.run(route)["input"], {name: tensor.to(device) for name, tensor in problem.tensors.items()}
    options: dict[str, Any] = {"group_size": group, "activation": "silu"}
    with flashnorm.backend(route):
        new = functional.rmsnorm_gate(t["input"], t["gate"], t["weight"], 1e-6, **options)
        assert torch.equal(t["input"].cpu(), problem.tensors["input"])
        out = torch.full_like(t["input"], torch.nan)
        assert functional.rmsnorm_gate(t["input"], t["gate"], t["weight"], 1e-6, out, **options) is out
        assert functional.rmsnorm_gate(t["input"], t["gate"], t["weight"], 1e-6, t["input"], **options) is t["input"]
    for name, tensor in {"new": new, "given": out, "in place": t["input"]}.items():
        assert tensor.shape == (6, 96)
        assert_same_bits(tensor, want, name)


# ------------------------------------------------------------------ residual mixes
@pytest.mark.parametrize("op", MIXES)
def test_alpha_of_one_multiplies_nothing(op: str, exact_route: str, device: torch.device) -> None:
    """fma(beta, n, residual), by a number or a vector of ones; the number may be an int, negative or 0."""
    base = GateCombo(op, residual="f32", vec="f32", bias="bf16")
    problem = GateProblem(base, (5, 96), device, given={"alpha": torch.ones(96)})
    want = problem.run(exact_route)
    for alpha in (1.0, 1):
        call = problem.prepare()
        call.arguments["alpha"] = alpha
        for name, tensor in call(exact_route).items():
            assert_same_bits(tensor, want[name], name)
    for alpha in (-0.75, 0.0):
        vector = GateProblem(base, (5, 96), device, given={"alpha": torch.full((96,), alpha)}).run(exact_route)
        call = problem.prepare()
        call.arguments["alpha"] = alpha
        for name, tensor in call(exact_route).items():
            assert_same_bits(tensor, vector[name], f"alpha {alpha}: {name}")


def test_the_second_norm_is_of_what_is_stored(exact_route: str, device: torch.device) -> None:
    """In a bf16 residual stream the sum has lost bits: its norm is that of `rmsnorm` over the returned sum."""
    problem = GateProblem(GateCombo(NEXT, "bf16", "bf16", "bf16", None), (9, 192), device)
    got = problem.run(exact_route)
    weight = (problem.tensors["next_weight"].float() + 0.5).to(device)
    with flashnorm.backend(exact_route):
        want = flashnorm.rmsnorm(got["residual_out"].to(device), weight, 1e-5)
    assert_same_bits(got["ffn_input"], want, "ffn_input")


@pytest.mark.parametrize("h", [8192, 16384 + 8, 70000])
@pytest.mark.parametrize("op", MIXES)
def test_the_stream_in_place(op: str, h: int, route: str, device: torch.device) -> None:
    """The width that models use, and rows too long to be held."""
    judge(GateProblem(usual[op], (2, h), device), route, "alias")


# ------------------------------------------------------------------ probes
def test_probes(device: torch.device) -> None:
    problems = {op: GateProblem(usual[op], (4, 96), device).prepare().arguments for op in MIXES}
    a, b = problems[MIX], problems[NEXT]
    one = gated.supports_gated_residual_rmsnorm
    two = gated.supports_gated_residual_next_rmsnorm
    mine = {name: a[name] for name in ("branch", "residual", "weight", "alpha", "beta")}
    assert one(**mine) and one(**mine | {"weight": None, "alpha": 0.5})
    theirs = {name: b[name] for name in ("branch", "residual", "next_weight", "alpha", "beta", "post_weight")}
    assert two(**theirs) and two(**theirs | {"post_weight": None, "alpha": 1.0})
    for bad in ({"branch": None}, {"branch": 3}, {"residual": a["residual"][:1]}, {"beta": a["beta"][:5]}):
        assert not one(**mine | bad) and not two(**theirs | bad)
    for bad in ({"beta": a["beta"].to(torch.int8)}, {"beta": a["beta"].to("meta")}, {"alpha": "1"}, {"alpha": None}):
        assert not one(**mine | bad) and not two(**theirs | bad)
    three = gated.supports_rmsnorm_sigmoid_gate
    assert three(BF16, 64) and three(torch.float16, 7, device) and three(F32, 100, "cpu")
    assert not three(BF16, 64, "toaster")
    for arguments in ((torch.int8, 64), (BF16, 0), (BF16, 300_000), (BF16, -1), ("x", 64), (None, None)):
        assert not three(*arguments)


# ------------------------------------------------------------------ what is refused
def refuse(op: str, error: type[Exception], text: str, **changes: Any) -> None:
    """On the cold path, and after a good call."""
    for _ in range(2):
        call = GateProblem(usual[op], (4, 96)).prepare()
        before = {name: guard.storage.clone() for name, guard in call.guards.items()}
        with flashnorm.backend("torch"):
            with pytest.raises(error, match=f"{op}: {text}"):
                FUNCTIONS[op](**{**call.arguments, **changes})
            for name, guard in call.guards.items():
                assert torch.equal(guard.storage.view(torch.uint8), before[name].view(torch.uint8)), name
            FUNCTIONS[op](**call.arguments)


def tensor(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


WRONG: list[tuple[str, type[Exception], str, dict[str, Any]]] = []
for _op in MIXES:
    _first, _out = ("weight", "out") if _op == MIX else ("post_weight", "residual_out")
    _center, _eps = ("gain_center", "eps") if _op == MIX else ("post_gain_center", "post_eps")
    for _name in ("beta", "alpha", _first, *(["next_weight"] if _op == NEXT else [])):
        WRONG.append((_op, ValueError, rf"{_name} must have shape \(96,\), got \(95,\)", {_name: tensor(95)}))
        WRONG.append((_op, ValueError, rf"{_name} must have shape \(96,\), got \(4, 96\)", {_name: tensor(4, 96)}))
        WRONG.append(
            (_op, ValueError, rf"{_name} must have dtype .*, got int32", {_name: tensor(96, dtype=torch.int32)})
        )
    WRONG += [
        (_op, TypeError, "branch must be a torch.Tensor, got NoneType", {"branch": None}),
        (_op, TypeError, "residual must be a torch.Tensor, got list", {"residual": [1.0]}),
        (_op, TypeError, "beta must be a torch.Tensor, got float", {"beta": 1.0}),
        (_op, TypeError, "alpha must be a Python number or a tensor, got NoneType", {"alpha": None}),
        (_op, TypeError, "alpha must be a Python number or a tensor, got str", {"alpha": "1"}),
        (_op, ValueError, "alpha must be finite, got inf", {"alpha": torch.inf}),
        (_op, ValueError, r"alpha must have shape \(96,\), got \(1,\)", {"alpha": tensor(1)}),
        (_op, ValueError, r"residual must have shape \(4, 96\), got \(4, 48\)", {"residual": tensor(4, 48)}),
        (_op, ValueError, f"{_out} must have dtype float32, got bfloat16", {_out: tensor(4, 96, dtype=BF16)}),
        (_op, ValueError, rf"{_out} must have shape \(4, 96\), got \(96,\)", {_out: tensor(96)}),
        (_op, ValueError, f"{_out} is written, so its elements", {_out: tensor(1, 96).expand(4, 96)}),
        (_op, ValueError, f"{_eps} must be finite and >= 0, got -1", {_eps: -1}),
        (_op, TypeError, f"{_center} must be a Python number, got NoneType", {_center: None}),
        (_op, ValueError, f"{_center} must be finite, got nan", {_center: torch.nan}),
        (_op, ValueError, "numerics must be one of", {"numerics": "exact"}),
        (_op, ValueError, "enable_pdl must be", {"enable_pdl": 1}),
    ]
WRONG += [
    (NEXT, ValueError, "next_eps must be finite and >= 0", {"next_eps": torch.inf}),
    (NEXT, ValueError, "next_gain_center must be finite", {"next_gain_center": torch.inf}),
    (NEXT, TypeError, "next_weight must be a torch.Tensor", {"next_weight": None}),
    (NEXT, ValueError, "ffn_input must have dtype bfloat16", {"ffn_input": tensor(4, 96)}),
    (GATE, TypeError, "input must be a torch.Tensor", {"input": None}),
    (GATE, TypeError, "gate must be a torch.Tensor", {"gate": None}),
    (GATE, ValueError, r"gate must have shape \(4, 96\), got \(96,\)", {"gate": tensor(96)}),
    (GATE, ValueError, r"weight must have shape \(96,\), got \(4, 96\)", {"weight": tensor(4, 96)}),
    (GATE, ValueError, r"weight must have shape \(96,\), got \(32,\)", {"weight": tensor(32), "group_size": 32}),
    (GATE, ValueError, r"gate must have shape \(4, 96\), got \(4, 48\)", {"gate": tensor(4, 48), "group_size": 32}),
    (GATE, ValueError, "activation must be one of", {"activation": "relu"}),
    (GATE, ValueError, "norm_before_gate must be one of", {"norm_before_gate": None}),
    (GATE, ValueError, "eps must be finite", {"eps": torch.nan}),
    *[
        (GATE, ValueError, "group_size must be a positive divisor", {"group_size": n})
        for n in (0, -32, 64, 1.5, True, "3")
    ],
    (GATE, TypeError, "weight must be a torch.Tensor", {"weight": 1.0, "group_size": 32}),
]


@pytest.mark.parametrize(("op", "error", "text", "changes"), WRONG, ids=str)
def test_arguments_that_do_not_fit(op: str, error: type[Exception], text: str, changes: dict[str, Any]) -> None:
    refuse(op, error, text, **changes)


@pytest.mark.parametrize("op", MIXES)
def test_memory_that_overlaps(op: str) -> None:
    """The residual itself may be written, and nothing that lies across it."""
    shared, out = torch.ones(5, 96), "out" if op == MIX else "residual_out"
    refuse(op, ValueError, f"({out}|residual) overlaps ({out}|residual)", **{"residual": shared[:4], out: shared[1:]})
    refuse(op, ValueError, f"({out}|beta) overlaps ({out}|beta)", **{"beta": shared[2], out: shared[:4]})
    if op == NEXT:
        both = torch.ones(4, 96, dtype=BF16)
        refuse(op, ValueError, "ffn_input overlaps", residual=both.clone(), residual_out=both, ffn_input=both)


def test_a_gate_over_its_input() -> None:
    both = torch.ones(4, 96, dtype=BF16)
    refuse(GATE, ValueError, "gate overlaps input", input=both, gate=both)
