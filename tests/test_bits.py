"""The same bits everywhere: every exact route, batch, position, thread count and process, and golden ones on file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.canonical import Bits
from tests.combos import (
    BF16,
    CHUNKED,
    COMBOS,
    HIDDEN,
    HIDDEN_LONG,
    HIDDEN_ODD,
    OLD,
    RMSNORMS,
    SILU,
    USUAL,
    Combo,
    every_hidden,
    some_hidden,
)
from tests.conftest import unserved
from tests.golden.digests import golden_digests, golden_file, golden_problem, golden_problems, golden_shapes
from tests.inputs import SPECIAL
from tests.problem import Problem
from tests.tolerance import assert_same_bits

ROOT = Path(__file__).parent.parent
SPECIAL_NAMES = tuple(SPECIAL)


def exact_shapes(combo: Combo, route: str, full: bool) -> list[tuple[int, int]]:
    """Every hidden size where one kernel serves all of them, a few by turns where each is compiled."""
    turn = COMBOS.index(combo)
    hidden: tuple[int, ...] = every_hidden(combo) if combo.whole > 1 else (*HIDDEN, *HIDDEN_ODD)
    if full:
        hidden = every_hidden(combo)
    elif route == "cute":
        hidden = some_hidden(combo)
    elif combo not in RMSNORMS:  # what they share with RMSNorm is seen there
        hidden = hidden[turn % 2 :: 2] if combo.op in OLD else hidden[turn % 3 :: 3]
    elif turn % 6 == 0:
        hidden = (*hidden, HIDDEN_LONG[turn // 6 % 2])
    return [(5 if h < 64 else 3 if h < 4096 else 2 if h < 65536 else 1, h) for h in hidden]


def assert_same(got: Bits, want: Bits, what: str, cut: slice = slice(None)) -> None:
    """Everything that two calls left, of the second only some rows."""
    for field in fields(Bits):
        tensor, right = getattr(got, field.name), getattr(want, field.name)
        assert (tensor is None) == (right is None), f"{what}: {field.name}"
        if tensor is not None:
            assert_same_bits(tensor, right[cut], f"{what}: {field.name}")


def some_rows(whole: Problem, cut: slice) -> Problem:
    """A problem of some rows of another one, whose rows are a matrix."""
    cut_x = whole.x if whole.index is not None else whole.x[cut]
    scale = whole.input_scale
    if scale is not None and scale.numel() > 1 and whole.index is None:
        scale = scale[cut]
    return Problem(
        whole.combo,
        (len(range(*cut.indices(whole.shape[0]))), whole.shape[-1]),
        whole.device,
        x=cut_x,
        weight=whole.weight,
        bias=whole.bias,
        residual=None if whole.residual is None else whole.residual[cut],
        index=None if whole.index is None else whole.index[cut],
        input_scale=scale,
    )


@pytest.mark.parametrize("combo", COMBOS, ids=str)
def test_canonical(combo: Combo, exact_route: str, device: torch.device, full: bool) -> None:
    """Outputs, residuals and rstd equal the canonical model, bit for bit."""
    for shape in exact_shapes(combo, exact_route, full):
        problem = Problem(combo, shape, device, seed="bits")
        problem.check_bits(problem.run(exact_route), f"on {exact_route}")


@pytest.mark.parametrize("combo", [c for c in COMBOS if c.x != "i8"], ids=str)
def test_special_rows(combo: Combo, exact_route: str, device: torch.device) -> None:
    """NaN, infinite, zero, huge and subnormal rows keep their own bits and spoil no other row."""
    shape = (len(SPECIAL) + 3, 4096 if exact_route == "cute" else 384 if combo.whole > 1 else 333)
    for eps in (1e-6, 0.0):
        problem = Problem(combo, shape, device, special=SPECIAL_NAMES, eps=eps)
        if problem.residual is not None:
            problem.residual[: len(SPECIAL)] = 0  # the special row itself is what gets normalised
        problem.check_bits(problem.run(exact_route), f"eps {eps} on {exact_route}")


def test_special_rows_mean_what_they_should(exact_route: str, device: torch.device) -> None:
    names = tuple(SPECIAL)
    problem = Problem(BF16[0], (len(names), 4096), device, special=names)
    out = dict(zip(names, problem.run(exact_route).out.float(), strict=True))
    assert bool(out["nan"].isnan().all())
    assert bool(out["inf"][:-1].eq(0).all()) and bool(out["inf"][-1].isnan())
    for name in ("zero", "negative zero", "overflowing squares"):
        assert bool(out[name].eq(0).all()), name
    assert problem.weight is not None
    assert_same_bits(out["300"].to(torch.bfloat16), problem.weight, "a constant row normalises to 1")
    bare = Problem(BF16[0], (2, 4096), device, special=("zero", "300"), eps=0.0).run(exact_route).out
    assert bool(bare[0].isnan().all()) and not bool(bare[1].isnan().any())


@pytest.mark.parametrize("combo", CHUNKED, ids=str)
def test_any_chunking_of_a_batch(combo: Combo, exact_route: str, device: torch.device, full: bool) -> None:
    """One launch of many rows, and chunks of 1 to 255 of them."""
    h, count = 128, 4096 if full else 1024
    whole = Problem(combo, (count, h), device, seed="batch")
    want = whole.run(exact_route)
    for size in range(1, 256) if full else (1, 2, 3, 7, 8, 16, 31, 33, 64, 100, 127, 128, 129, 255):
        last = count if size > 6 or full else 48 * size
        for start in range(0, last, size):
            cut = slice(start, min(start + size, last))
            assert_same(some_rows(whole, cut).run(exact_route), want, f"{combo}: rows {cut}", cut)


@pytest.mark.parametrize("h", [128, 111, 4096])
@pytest.mark.parametrize("combo", USUAL, ids=str)
def test_any_position_in_a_batch(combo: Combo, h: int, exact_route: str, device: torch.device) -> None:
    if h % combo.whole:
        pytest.skip(f"takes whole blocks of {combo.whole} alone")
    alone = Problem(combo, (1, h), device)
    want = alone.run(exact_route)
    for m in (2, 65, 257, 1031):
        residual = None if alone.residual is None else alone.residual.repeat(m, 1)
        same = Problem(
            combo, (m, h), device, x=alone.x.repeat(m, 1), weight=alone.weight, bias=alone.bias, residual=residual
        )
        assert_same_bits(same.run(exact_route).out, want.out.expand(m, -1), f"{m} copies of a row")


@pytest.mark.parametrize("shape", [(1, 4096), (19, 4096), (3, 5, 128), (300, 111)], ids=str)
@pytest.mark.parametrize("combo", [c for c in USUAL if c.may_alias], ids=str)
def test_out_may_be_the_input(combo: Combo, shape: tuple[int, ...], exact_route: str, device: torch.device) -> None:
    problem = Problem(combo, shape, device)
    for out in ("alias", "contiguous", "none"):
        problem.check_bits(problem.run(exact_route, out), f"out {out} on {exact_route}")


@pytest.mark.cpu_only
@pytest.mark.parametrize("combo", USUAL, ids=str)
def test_any_number_of_threads(combo: Combo, exact_route: str) -> None:
    problem = Problem(combo, (1031, 640))
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        problem.check_bits(problem.run(exact_route), f"{threads} threads")


def test_a_thousand_repeats(exact_route: str, device: torch.device, full: bool) -> None:
    problem = Problem(BF16[0], (64, 4096), device)
    want = problem.run(exact_route).out
    for _ in range(1000 if full else 50):
        assert_same_bits(problem.run(exact_route).out, want, "a repeat")


def test_routes_agree_with_each_other(device: torch.device) -> None:
    """On a GPU: cute and cuda, and the cpu route on the same rows."""
    routes = [("cute", device), ("cuda", device)] if device.type == "cuda" else []
    routes += [("cpu", torch.device("cpu"))]
    routes = [(route, where) for route, where in routes if not unserved(route, where.type)]
    assert routes
    for combo in USUAL:
        for route, where in routes:
            problem = Problem(combo, (99, 4096), where, seed="routes")
            problem.check_bits(problem.run(route), f"on {route}")


# ------------------------------------------------------------------ golden bits
def test_the_golden_files_are_complete_and_canonical() -> None:
    want = golden_file()
    problems = golden_problems()
    assert {p.what for p in problems} == set(want)
    for problem in problems:
        assert golden_digests(problem.canonical(), problem.combo) == want[problem.what], problem.what


@pytest.mark.parametrize("combo", COMBOS, ids=str)
def test_golden_bits(combo: Combo, exact_route: str, device: torch.device) -> None:
    want = golden_file()
    if combo.op == SILU and device.type == "cuda":
        pytest.skip("GPUs have an exponential of their own")
    for shape in golden_shapes(combo):
        problem = golden_problem(combo, shape, device)
        assert golden_digests(problem.run(exact_route), combo) == want[problem.what], problem.what


CHILD = """
import json, sys, torch
from tests.combos import BF16
from tests.golden.digests import golden_digests, golden_problem
torch.set_num_threads(int(sys.argv[3]))
problem = golden_problem(BF16[int(sys.argv[4])], (5, 4096), sys.argv[2])
print(json.dumps(golden_digests(problem.run(sys.argv[1]), problem.combo)))
"""


@pytest.mark.parametrize("index", [0, 2])
def test_another_process(index: int, exact_route: str, device: torch.device) -> None:
    """Two fresh processes, with other hash seeds and thread counts, give the bits on file."""
    want = golden_file()[golden_problem(BF16[index], (5, 4096), "cpu").what]
    for threads in ("1", "2"):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, exact_route, device.type, threads, str(index)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": threads},
            capture_output=True,
            text=True,
            check=False,
        )
        assert child.returncode == 0, child.stderr
        assert json.loads(child.stdout.splitlines()[-1]) == want
