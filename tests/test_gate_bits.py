"""Operators with gates against their exact arithmetic and fp64: every combination, special rows, batches, layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.combos import HIDDEN, HIDDEN_LONG, HIDDEN_ODD, SCALED_HIDDEN, TOKENS
from tests.gatecombos import COMBOS, DIT, GATE, NEXT, OVER, USUAL, B, GateCombo, of_shape
from tests.gatekit import GateProblem, judge
from tests.golden.digests import gate_problem, golden_digests, golden_file
from tests.inputs import SPECIAL
from tests.tolerance import MIN_SHARE_ELEMENTS, Pool, assert_same_bits

every_combo = pytest.mark.parametrize("combo", COMBOS, ids=str)
usual = pytest.mark.parametrize("combo", USUAL, ids=str)


def hidden_sizes(combo: GateCombo, route: str, full: bool) -> list[int]:
    """A third of all by turns, one that few threads serve and one that is streamed; all of them with --full."""
    every = (*SCALED_HIDDEN, 16, 48) if combo.whole > 1 else (*HIDDEN, *HIDDEN_ODD)
    turn = COMBOS.index(combo)
    if full:
        return sorted({-(-h // combo.whole) * combo.whole for h in (*every, *HIDDEN_LONG)})
    if route == "cute":
        every = (every[turn % len(every)], every[(turn + len(every) // 2) % len(every)], 4096)
    else:
        every = (*every[turn % 3 :: 3], 4096, 16384)
    return sorted({-(-h // combo.whole) * combo.whole for h in every})


@every_combo
def test_bits(combo: GateCombo, exact_route: str, device: torch.device, full: bool) -> None:
    for h in hidden_sizes(combo, exact_route, full):
        count = 6 if h < 64 else 4 if h < 8192 else 2 if h < 65536 else 1
        problem = GateProblem(combo, of_shape(combo, count, h), device, seed="bits")
        problem.check_bits(problem.run(exact_route), f"on {exact_route}")


@every_combo
def test_accuracy(combo: GateCombo, route: str, device: torch.device) -> None:
    """Over enough elements for a share; with results given and not."""
    pool, turn, elements = Pool(combo.numerics), COMBOS.index(combo), 0
    for i, h in enumerate((64, 96, 576, 1000, 4096, 3072)):
        count = min(TOKENS[(turn + i) % len(TOKENS)], 100)
        if i == 5:
            count = max(1, (MIN_SHARE_ELEMENTS - elements) // 3072 + 3)
        problem = GateProblem(combo, of_shape(combo, count, h), device)
        elements += problem.count * problem.shape[-1]
        problem.accuracy(problem.run(route, "contiguous" if i % 2 else "none"), pool, f"{problem.what} on {route}")
    pool.judge(f"{combo} on {route}")


@every_combo
def test_special_rows(combo: GateCombo, exact_route: str, device: torch.device) -> None:
    """NaN, infinite, zero, huge and subnormal rows keep their own bits and spoil no other row."""
    names = tuple(SPECIAL)
    for eps in (1e-6, 0.0):
        problem = GateProblem(combo, of_shape(combo, len(names) + 3, 384), device, special=names, eps=eps)
        problem.check_bits(problem.run(exact_route), f"eps {eps} on {exact_route}")


@every_combo
def test_outputs_may_be_inputs(combo: GateCombo, exact_route: str, device: torch.device) -> None:
    """The residual in place, the norm over its input: also where a row is too long to be held."""
    for count, h in ((3, 576), (8, 128), (2, 16384), (1, 65536 + 32)):
        problem = GateProblem(combo, of_shape(combo, count, h), device)
        for out in ("alias", "contiguous") if combo.aliases else ("contiguous",):
            problem.check_bits(problem.run(exact_route, out), f"out {out} on {exact_route}")


@every_combo
def test_golden_bits(combo: GateCombo, exact_route: str, device: torch.device) -> None:
    problem = gate_problem(combo, device)
    got = problem.run(exact_route)
    if problem.near:  # a digest tells nothing of a distance
        problem.check_bits(got, f"on {exact_route}")
    else:
        assert golden_digests(got, combo) == golden_file()[problem.what]


# ------------------------------------------------------------------ batches
def part(whole: GateProblem, cut: slice) -> GateProblem:
    """Some rows (of a diffusion transformer: of every batch)."""
    dim = len(whole.shape) - 2
    rowed = {n for n, t in whole.tensors.items() if t.shape == torch.Size(whole.shape)}
    index = (slice(None),) * dim + (cut,)
    given = {name: t[index] if name in rowed else t for name, t in whole.tensors.items()}
    shape = tuple(whole.tensors["branch" if "branch" in given else "input"][index].shape)
    return GateProblem(whole.combo, shape, whole.device, given=given)


@pytest.mark.parametrize("combo", dict.fromkeys((*USUAL, *COMBOS[::4])), ids=str)
def test_any_chunking_of_a_batch(combo: GateCombo, exact_route: str, device: torch.device) -> None:
    """One call of many rows, and chunks of 1 to 300 of them; a row's codes, and its scales, do not move."""
    shape = (2, 400, 128) if combo.op in DIT else (800, 128)
    whole = GateProblem(combo, shape, device, seed="batch")
    want = whole.run(exact_route)
    if combo.form:
        _, want_scales = whole.decoded(want)
    dim, blocks = len(shape) - 2, 128 // combo.whole
    for size in (1, 2, 7, 31, 64, 127, 128, 129, 255, 300):
        for start in range(0, min(400, 12 * size), size):
            cut = slice(start, min(start + size, 400))
            mine = part(whole, cut)
            got = mine.run(exact_route)
            index = (slice(None),) * dim + (cut,)
            for name in (n for n in combo.written if n != "sf_out"):
                assert_same_bits(got[name], want[name][index], f"{combo}: {name}, rows {cut}")
            if combo.form:
                scales = mine.decoded(got)[1].view(2, -1, blocks).view(torch.uint8)
                right = want_scales.view(torch.uint8).view(2, 400, blocks)[:, cut]
                assert_same_bits(scales, right.contiguous(), f"{combo}: scales, rows {cut}")


@usual
def test_any_number_of_threads(combo: GateCombo, exact_route: str, device: torch.device) -> None:
    problem = GateProblem(combo, of_shape(combo, 1032, 640), device)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        problem.check_bits(problem.run(exact_route), f"{threads} threads")


@usual
def test_what_is_not_said(combo: GateCombo, route: str, device: torch.device) -> None:
    """eps is 1e-6 (1e-5 under a gate), the mode "flashinfer", and PDL the device's business."""
    problem = GateProblem(combo, of_shape(combo, 6, 256), device, eps=1e-5 if combo.op == GATE else 1e-6)
    want, call = problem.run(route, enable_pdl=False), problem.prepare()
    for name in ("eps", "post_eps", "epsilon", "numerics", "enable_pdl", "activation", "norm_before_gate"):
        call.arguments.pop(name, None)
    if combo.op == NEXT:
        want = GateProblem(combo, problem.shape, device).prepare(next_eps=1e-6)(route)
        del call.arguments["next_eps"]
    for name, tensor in call(route).items():
        assert_same_bits(tensor, want[name], f"defaults: {name}")


@pytest.mark.parametrize("numerics", ["hf-llama", "vllm", "hf-gemma", "torch", "cake"])
@usual
def test_every_mode_is_taken(combo: GateCombo, numerics: str, route: str, device: torch.device) -> None:
    """One mode beside the first: what is normalised is the sum as it is stored."""
    problem = GateProblem(replace(combo, numerics=numerics), of_shape(combo, 6, 256), device)
    judge(problem, route)
    if combo.op not in DIT:
        first = GateProblem(combo, problem.shape, device).run(route)
        for name, tensor in problem.run(route).items():
            assert_same_bits(tensor, first[name], f"{numerics}: {name}")


# ------------------------------------------------------------------ layouts
LAYOUTS = ("misaligned", "half", "odd rows", "transposed", "every other", "last 2", "expanded")


@pytest.mark.parametrize("layout", LAYOUTS)
@usual
def test_layouts(combo: GateCombo, layout: str, route: str, device: torch.device) -> None:
    """Of inputs, of outputs, and of vectors."""
    if combo.op == GATE and layout == "expanded":
        pytest.skip("the input is written: its rows must not be one")
    for h in (128, 111) if combo.whole == 1 else (128,):
        shape = (3, 5, h)
        judge(GateProblem(combo, shape, device, layout=layout), route)
        if layout != "expanded":
            judge(GateProblem(combo, shape, device), route, layout)
            judge(GateProblem(combo, shape, device, layout=layout), route, "alias" if combo.aliases else "none")
        judge(GateProblem(combo, shape, device, residual_layout=layout), route)
    vectors = layout if layout in ("misaligned", "last 2") else "contiguous"
    judge(GateProblem(combo, (3, 5, 128), device, vec_layout=vectors), route)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "last 2", "expanded"])
def test_modulation(over: str, layout: str, route: str, device: torch.device) -> None:
    """Every shape of it, in every layout, for one batch and several, one row and several."""
    for combo in (c for c in USUAL if c.op in DIT):
        mine = replace(combo, over=over)
        for shape in ((2, 5, 96), (1, 7, 96), (3, 1, 96), (1, 1, 96)):
            judge(GateProblem(mine, shape, device, vec_layout=layout), route)
    judge(GateProblem(replace(USUAL[1], op=B, over=over, form="nvfp4", number="value"), (3, 5, 96), device), route)


@pytest.mark.parametrize("shape", [(4096,), (1, 4096), (3, 5, 256), (2, 3, 5, 256)], ids=str)
@pytest.mark.parametrize("combo", [c for c in USUAL if c.op not in DIT], ids=str)
def test_ranks(combo: GateCombo, shape: tuple[int, ...], route: str, device: torch.device) -> None:
    judge(GateProblem(combo, shape, device), route)


EMPTY = {"dit": ((0, 5, 128), (2, 0, 128), (0, 0, 128)), "rows": ((0, 128), (0, 8, 128), (4, 0, 128))}


@every_combo
def test_no_rows(combo: GateCombo, route: str, device: torch.device) -> None:
    """No batch, no token: results of the right shape and dtype, given or new, and nothing is read."""
    for shape in EMPTY["dit" if combo.op in DIT else "rows"]:
        for out in ("none", "contiguous"):
            problem = GateProblem(combo, shape, device)
            got = problem.run(route, out)
            for name, (wanted, dtype) in problem.canonical_shapes().items():
                if name in got:
                    assert got[name].shape == wanted and got[name].dtype == dtype, name
