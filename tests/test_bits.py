"""The same bits everywhere: every exact route, batch, position, thread count and process, and golden ones on file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.canonical import Bits, narrow
from tests.combos import (
    BF16,
    CHUNKED,
    COMBOS,
    DTYPES,
    FUSED,
    HIDDEN,
    HIDDEN_LONG,
    HIDDEN_ODD,
    PLAIN,
    Combo,
    some_hidden,
)
from tests.conftest import unserved
from tests.inputs import SPECIAL, Outcome, Problem
from tests.tolerance import assert_same_bits, bits_of

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden" / "rmsnorm.json"


def exact_shapes(combo: Combo, route: str, full: bool) -> list[tuple[int, int]]:
    """Every hidden size where one kernel serves all of them, a few by turns where each is compiled."""
    hidden: tuple[int, ...] = (*HIDDEN, *HIDDEN_ODD)
    if full:
        hidden = (*hidden, *HIDDEN_LONG)
    elif route == "cute":
        hidden = some_hidden(combo)
    elif COMBOS.index(combo) % 6 == 0:
        hidden = (*hidden, HIDDEN_LONG[COMBOS.index(combo) // 6 % 2])
    return [(5 if h < 64 else 3 if h < 4096 else 2 if h < 65536 else 1, h) for h in hidden]


@pytest.mark.parametrize("combo", COMBOS, ids=str)
def test_canonical(combo: Combo, exact_route: str, device: torch.device, full: bool) -> None:
    """Outputs, residuals and rstd equal the canonical model, bit for bit."""
    for shape in exact_shapes(combo, exact_route, full):
        problem = Problem(combo, shape, device, seed="bits")
        problem.check_bits(problem.run(exact_route), f"on {exact_route}")


@pytest.mark.parametrize("combo", COMBOS, ids=str)
def test_special_rows(combo: Combo, exact_route: str, device: torch.device) -> None:
    """NaN, infinite, zero, huge and subnormal rows keep their own bits and spoil no other row."""
    shape = (len(SPECIAL) + 3, 4096 if exact_route == "cute" else 333)
    for eps in (1e-6, 0.0):
        problem = Problem(combo, shape, device, special=tuple(SPECIAL), eps=eps)
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
            stop = min(start + size, last)
            cut = slice(start, stop)
            part = Problem(
                combo,
                (stop - start, h),
                device,
                x=whole.x[cut],
                weight=whole.weight,
                residual=None if whole.residual is None else whole.residual[cut],
            ).run(exact_route)
            assert_same_bits(part.out, want.out[cut], f"{combo}: rows {start} to {stop}")
            if part.residual is not None and want.residual is not None:
                assert_same_bits(part.residual, want.residual[cut], f"{combo}: residual of rows {start} to {stop}")
            if part.rstd is not None and want.rstd is not None:
                assert_same_bits(part.rstd, want.rstd[cut], f"{combo}: rstd of rows {start} to {stop}")


@pytest.mark.parametrize("h", [111, 4096])
@pytest.mark.parametrize("combo", BF16, ids=str)
def test_any_position_in_a_batch(combo: Combo, h: int, exact_route: str, device: torch.device) -> None:
    alone = Problem(combo, (1, h), device)
    want = alone.run(exact_route)
    for m in (2, 65, 257, 1031):
        same = Problem(
            combo,
            (m, h),
            device,
            x=alone.x.repeat(m, 1),
            weight=alone.weight,
            residual=None if alone.residual is None else alone.residual.repeat(m, 1),
        ).run(exact_route)
        assert_same_bits(same.out, want.out.expand(m, h), f"{m} copies of a row")


@pytest.mark.parametrize("shape", [(1, 4096), (19, 4096), (3, 5, 128), (300, 111)], ids=str)
@pytest.mark.parametrize("combo", [c for c in BF16 if c.op in PLAIN], ids=str)
def test_out_may_be_the_input(combo: Combo, shape: tuple[int, ...], exact_route: str, device: torch.device) -> None:
    problem = Problem(combo, shape, device)
    for out in ("alias", "contiguous", "none"):
        problem.check_bits(problem.run(exact_route, out), f"out {out} on {exact_route}")


@pytest.mark.cpu_only
@pytest.mark.parametrize("combo", BF16, ids=str)
def test_any_number_of_threads(combo: Combo, exact_route: str) -> None:
    problem = Problem(combo, (1031, 576))
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
    for combo in BF16:
        for route, where in routes:
            problem = Problem(combo, (99, 4096), where, seed="routes")
            problem.check_bits(problem.run(route), f"on {route}")


# ------------------------------------------------------------------ golden bits
def integers(count: int, seed: int) -> np.ndarray:
    """The same 32-bit numbers everywhere: a multiply-and-shift mix of the index, in integers alone."""
    value = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        seed * 0x632BE59BD9B4E019 % 2**64
    )
    value ^= value >> np.uint64(29)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    return value >> np.uint64(32)


def golden_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values that every dtype holds exactly: 8 significant bits (fp32: 22) times a power of two from 1/16 to 16."""
    raw = integers(int(np.prod(shape)), seed)
    bits = 22 if dtype == torch.float32 else 8
    mantissa = (raw & np.uint64(2**bits - 1)).astype(np.float64) - 2.0 ** (bits - 1) + 0.5
    mantissa = np.where(mantissa > 0, np.ceil(mantissa), np.floor(mantissa))  # no zeros
    power = ((raw >> np.uint64(24)) % np.uint64(9)).astype(np.float64) - 4
    values = (mantissa * np.exp2(power - (bits - 2))).astype(np.float32).reshape(shape)
    tensor = narrow(values, dtype)
    assert bool((tensor.double() == torch.from_numpy(values).double()).all())
    return tensor


def golden_shapes(combo: Combo) -> tuple[tuple[int, int], ...]:
    other = some_hidden(combo)[0]
    return ((5, 4096), (3 if other < 8192 else 1, other if other != 4096 else 2000))


def golden_problem(combo: Combo, shape: tuple[int, int], device: torch.device | str) -> Problem:
    def values(dtype: str | None, of: tuple[int, ...], seed: int) -> torch.Tensor | None:
        return None if dtype is None else golden_values(of, DTYPES[dtype], seed)

    return Problem(
        combo,
        shape,
        device,
        x=values(combo.x, shape, 1),
        residual=values(combo.residual, shape, 2),
        weight=values(combo.weight, shape[-1:], 3),
        eps=1e-5,
    )


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bits_of(tensor).numpy().tobytes()).hexdigest()


def golden_digests(got: Outcome | Bits, combo: Combo) -> dict[str, str]:
    found = {"out": digest(got.out)}
    if combo.op in FUSED:
        assert got.residual is not None
        found["residual"] = digest(got.residual)
    if combo.rstd:
        assert got.rstd is not None
        found["rstd"] = digest(got.rstd)
    return found


def golden_file() -> dict[str, dict[str, str]]:
    return json.loads(GOLDEN.read_text())  # type: ignore[no-any-return]


def test_the_golden_file_is_complete_and_canonical() -> None:
    want = golden_file()
    problems = [golden_problem(combo, shape, "cpu") for combo in COMBOS for shape in golden_shapes(combo)]
    assert {p.what for p in problems} == set(want)
    for problem in problems:
        assert golden_digests(problem.canonical(), problem.combo) == want[problem.what], problem.what


@pytest.mark.parametrize("combo", COMBOS, ids=str)
def test_golden_bits(combo: Combo, exact_route: str, device: torch.device) -> None:
    want = golden_file()
    for shape in golden_shapes(combo):
        problem = golden_problem(combo, shape, device)
        assert golden_digests(problem.run(exact_route), combo) == want[problem.what], problem.what


CHILD = """
import json, sys, torch
from tests.combos import BF16
from tests.test_bits import golden_digests, golden_problem
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
