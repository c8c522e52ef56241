"""Every operator on every route, dtype and shape, against the fp64 oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests import oracles
from tests.combos import (
    BF16,
    COMBOS,
    DYNAMIC,
    FLOATS,
    FP4,
    HIDDEN,
    HIDDEN_LONG,
    MXFP8,
    OLD,
    OPS,
    RMSNORMS,
    SILU,
    TOKENS,
    USUAL,
    Combo,
    every_hidden,
    some_hidden,
)
from tests.judge import check
from tests.problem import Problem
from tests.tolerance import MIN_SHARE_ELEMENTS, Pool, assert_same_bits, assert_share_of

FUSED_BF16 = next(c for c in BF16 if c.op == "fused_add_rmsnorm")
BROADCAST = ("rmsnorm", "gemma_rmsnorm", "rmsnorm_quant", "gemma_rmsnorm_quant")  # whose weight may be one for each row
LARGEST = 100_000  # elements of a tensor, but for rows that are longer by themselves


def shapes(combo: Combo, route: str, full: bool) -> list[tuple[int, ...]]:
    """The shapes of one combination: every H where H costs nothing, a few by turns where a kernel is compiled for each.

    The number of rows rotates through TOKENS with the combination and H, and more rows are added where the elements
    would be too few to judge a share.
    """
    turn = COMBOS.index(combo)
    hidden = every_hidden(combo) if combo.whole > 1 else HIDDEN if not full else HIDDEN + HIDDEN_LONG
    if combo not in RMSNORMS and not full:  # what they share with RMSNorm was seen there
        hidden = hidden[turn % 3 :: 3]
    elif combo in RMSNORMS and route == "cuda":
        hidden = (*hidden, *HIDDEN_LONG)
    if route == "cute" and not full:
        hidden = some_hidden(combo)
    found = []
    for i, h in enumerate(hidden):
        m = TOKENS[(turn + i) % len(TOKENS)]
        found.append((max(1, min(m, LARGEST // h)), h))
    if combo in RMSNORMS and route in ("cuda", "torch") and not full:
        found = [*found[turn % 2 :: 2], (33, 4096)]
    missing = MIN_SHARE_ELEMENTS - sum(m * h for m, h in found)
    return found if missing <= 0 else [*found, (-(-missing // 4096), 4096)]


@pytest.mark.parametrize("combo", COMBOS, ids=str)
def test_shapes(combo: Combo, route: str, device: torch.device, full: bool) -> None:
    pool = Pool(combo.numerics)
    for i, shape in enumerate(shapes(combo, route, full)):
        check(
            Problem(combo, shape, device),
            route,
            pool,
            out="contiguous" if i % 3 == 1 and not combo.in_place else "none",
        )
    pool.judge(f"{combo} on {route}")


@pytest.mark.parametrize("combo", USUAL, ids=str)
@pytest.mark.parametrize("shape", [(4096,), (1, 4096), (3, 5, 4096), (2, 3, 5, 4096), (2, 1, 3, 2, 4096)], ids=str)
def test_ranks(combo: Combo, shape: tuple[int, ...], route: str, device: torch.device) -> None:
    """Any rank from 1; rstd has the input's shape without the last dimension (0-d for a single row)."""
    check(Problem(combo, shape, device), route, Pool(combo.numerics))


WEIGHTS = {
    "heads": ((9, 4, 128), (4, 128)),
    "one row": ((9, 4, 128), (1, 128)),
    "each token": ((19, 4096), (19, 4096)),
    "one token": ((1, 4096), (1, 4096)),
    "batch": ((3, 5, 4096), (3, 1, 4096)),
    "sequence": ((3, 5, 4096), (5, 4096)),
    "all": ((3, 5, 128), (3, 5, 128)),
    "one everywhere": ((3, 5, 128), (1, 1, 128)),
    "four": ((2, 3, 4, 128), (3, 1, 128)),
}


@pytest.mark.parametrize(("shape", "weight_shape"), WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("combo", [c for c in USUAL if c.op in BROADCAST], ids=str)
def test_broadcast_weights(
    combo: Combo, shape: tuple[int, ...], weight_shape: tuple[int, ...], route: str, device: torch.device
) -> None:
    """A weight broadcasts by PyTorch's rules, also from a view with a stride of 0."""
    check(Problem(combo, shape, device, weight_shape=weight_shape), route, Pool(combo.numerics))
    if len(weight_shape) > 1:
        again = Problem(combo, shape, device, weight_shape=weight_shape, weight_layout="expanded", seed=1)
        check(again, route, Pool(combo.numerics))


@pytest.mark.parametrize("op", ["rmsnorm", "fused_add_rmsnorm", "rmsnorm_quant"])
def test_no_weight_means_no_gain(op: str, route: str, device: torch.device) -> None:
    """Without a weight the Gemma forms add nothing: they equal the plain ones, mode by mode."""
    plain = next(c for c in COMBOS if c.weight is None and c.op == op)
    for numerics in ("flashinfer", "hf-llama") if op == "rmsnorm" else ("flashinfer",):
        mode = replace(plain, numerics=numerics)
        results = [Problem(replace(mode, op=name), (19, 576), device).run(route) for name in (op, f"gemma_{op}")]
        check(Problem(mode, (19, 576), device), route, Pool(numerics))
        assert_same_bits(results[0].out, results[1].out, f"{mode}")


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1.0, 3e38])
@pytest.mark.parametrize("combo", USUAL, ids=str)
def test_eps_is_a_run_time_value(combo: Combo, eps: float, route: str, device: torch.device) -> None:
    """One kernel serves every eps; 1e-12 matters on small rows, which a 16-bit eps would lose."""
    small = torch.full((2, 4096), 2.0**-20).to(torch.bfloat16)
    small[:, ::2] *= -1  # LayerNorm wants a variance
    residual = None if combo.residual is None else -small / 2
    for x, r in ((None, None), (small, residual)):
        check(Problem(combo, (2, 4096), device, x=x, residual=r, eps=eps), route, Pool(combo.numerics))


@pytest.mark.parametrize("combo", USUAL, ids=str)
def test_what_is_not_said(combo: Combo, route: str, device: torch.device) -> None:
    """eps is 1e-6, the mode "flashinfer", and PDL the device's business."""
    x = torch.full((2, 4096), 2.0**-12).to(torch.bfloat16)
    x[:, ::2] *= -1
    problem = Problem(combo, (2, 4096), device, x=x)
    want, call = problem.run(route, enable_pdl=False), problem.prepare()
    for name in ("eps", "numerics", "enable_pdl"):
        del call.arguments[name]
    got = call(route)
    assert_same_bits(got.out, want.out, "defaults")
    if combo.residual is not None:
        assert got.residual is not None and want.residual is not None
        assert_same_bits(got.residual, want.residual, "defaults: residual")


NUMERICS_ALIASES = (("hf-llama", "vllm"), ("hf-gemma", "torch"), ("hf-gemma", "cake"))


@pytest.mark.parametrize(("name", "alias"), NUMERICS_ALIASES)
@pytest.mark.parametrize("combo", BF16, ids=str)
def test_aliases_of_modes(combo: Combo, name: str, alias: str, route: str, device: torch.device) -> None:
    if (route, alias, device.type) == ("torch", "torch", "cuda"):
        pytest.skip("on GPUs PyTorch's own function has a kernel, and an order of additions, of its own")
    results = [Problem(replace(combo, numerics=n, rstd=False), (7, 4096), device).run(route) for n in (name, alias)]
    assert_same_bits(results[0].out, results[1].out, f"{name} and {alias}")


@pytest.mark.parametrize("combo", [c for c in USUAL if c not in BF16], ids=str)
def test_every_mode_is_taken(combo: Combo, device: torch.device) -> None:
    """All six names, by the torch route: the combinations have a kernel of each mode for the others."""
    found = {}
    for name in (*oracles.LLAMA, *oracles.GEMMA, "flashinfer"):
        problem = Problem(replace(combo, numerics=name), (7, 256), device)
        found[name] = check(problem, "torch", Pool(name)).out
    assert_same_bits(found["hf-llama"], found["vllm"], "vllm")
    assert_same_bits(found["hf-gemma"], found["cake"], "cake")


# ------------------------------------------------------------------ what users of PyTorch and Hugging Face are promised
FAMILIES = {
    "hf-llama": ("rmsnorm", lambda x, w: oracles.llama_module(x, w, 1e-6)),
    "hf-gemma": ("gemma_rmsnorm", lambda x, w: oracles.gemma_module(x, w, 1e-6)),
    "torch": ("rmsnorm", lambda x, w: torch.nn.functional.rms_norm(x, x.shape[-1:], w, 1e-6)),
}


PROMISED = [(family, dtype, False) for family in FAMILIES for dtype in ("bf16", "f16")]
PROMISED += [("hf-llama", "bf16", True), ("hf-llama", "f16", True), ("hf-gemma", "bf16", True), ("torch", "bf16", True)]


@pytest.mark.parametrize(("family", "dtype", "with_residual"), PROMISED)
def test_modules(family: str, dtype: str, with_residual: bool, route: str, device: torch.device) -> None:
    """bf16 and fp16 (1024, 4096): at most 1 element in 10,000 differs, by two steps; on the torch route none does."""
    op, module = FAMILIES[family]
    name = op.replace("rmsnorm", "fused_add_rmsnorm") if with_residual else op
    combo = Combo(name, dtype, dtype, dtype if with_residual else None, family)
    problem = Problem(combo, (1024, 4096), device)
    got = problem.run(route)
    x = problem.x if problem.residual is None else problem.x + problem.residual
    assert problem.weight is not None
    want = module(x.to(device), problem.weight.to(device)).cpu()
    if route == "torch":
        assert_same_bits(got.out, want, f"{combo} on torch")
    else:
        assert_share_of(got.out, want, f"{combo} on {route}")


def test_every_pair_of_dtypes_is_among_the_combinations() -> None:
    plain = {(c.x, c.weight) for c in COMBOS if c.op == "rmsnorm" and c.numerics == "flashinfer"}
    assert plain >= set(itertools.product(FLOATS, FLOATS))
    fused = [c for c in COMBOS if c.op == "fused_add_rmsnorm" and c.numerics == "flashinfer"]
    for a, b in itertools.combinations(("x", "weight", "residual"), 2):
        assert {(getattr(c, a), getattr(c, b)) for c in fused} >= set(itertools.product(FLOATS, FLOATS))


def test_every_choice_is_among_the_combinations() -> None:
    """Each operator; each dtype in each place of each family; each option of the operators that quantise."""
    assert {c.op for c in COMBOS} == set(OPS) and {c.op for c in USUAL} == set(OPS)
    layers = [c for c in COMBOS if c.centred]
    for place in ("x", "weight", "bias", "residual"):
        assert {getattr(c, place) for c in layers} >= {*FLOATS} - ({"f16"} if place == "residual" else set())
    static = [c for c in COMBOS if c.scale and c.op in OLD]
    assert {(c.out, c.scale == "value") for c in static} == set(itertools.product(("e4m3", "e5m2"), (True, False)))
    assert {c.scale for c in static} == {"value", *FLOATS}
    dynamic = [c for c in COMBOS if c.op == DYNAMIC]
    for name, values in {
        "out": {"e4m3", "e5m2", "i8"},
        "form": {"fp32", "ue8m0", "ue8m0_packed"},
        "block": {0, 128},
        "column": {True, False},
        "side": {True, False},
        "cap": {"", "value", "device"},
        "x": set(FLOATS),
        "residual": {None, *FLOATS},
    }.items():
        assert {getattr(c, name) for c in dynamic} == values, name
    assert {c.index for c in COMBOS} == {None, "i32", "i64"} and any(c.index and c.input_scale for c in COMBOS)
    assert {c.input_scale for c in COMBOS} == {None, "one", "rows"}
    for family, values in {
        FP4: {
            "x": set(FLOATS),
            "weight": {None, *FLOATS},
            "residual": {None, *FLOATS},
            "scale": {None, "value", "f32", "bf16"},
            "placed": {"rows", "swizzled", "both"},
            "rule": {"up", "ocp"},
            "side": {True, False},
        },
        MXFP8: {"x": set(FLOATS), "residual": {None, "f32", "bf16"}, "placed": {"rows", "swizzled"}},
        (SILU,): {"x": set(FLOATS), "out": {None, "e4m3", "e5m2", "e2m1"}, "scale": {None, "value", "f32"}},
    }.items():
        mine = [c for c in COMBOS if c.op in family]
        for name, wanted in values.items():
            assert {getattr(c, name) for c in mine} == wanted, name
    fp4 = {(c.block, c.form, c.placed != "rows") for c in COMBOS if c.op in FP4}
    assert fp4 >= {(16, "e4m3", False), (16, "e4m3", True), (32, "e4m3", False), (32, "ue8m0", True)}
    assert {(c.rule, c.placed != "rows") for c in COMBOS if c.op in MXFP8} == {
        *itertools.product(("up", "ocp"), (True, False))
    }
