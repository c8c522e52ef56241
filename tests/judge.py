"""Judging what a call left behind: by the formula in fp64, or bit for bit where a route is exact."""

from __future__ import annotations

import torch

from tests import oracles
from tests.canonical import Bits
from tests.canonical.quantise import unpack
from tests.combos import BLOCKED
from tests.oracles import Expected
from tests.problem import Problem
from tests.tolerance import Pool, assert_rstd, assert_same_bits

FLOORS = {True: 1e-4, False: 1e-10}  # the least amax, of the operator of 1x128 blocks and of the dynamic one
_SIGNIFICAND = {torch.float16: 11, torch.bfloat16: 8}


def accuracy(problem: Problem, got: Bits, pool: Pool, what: str) -> None:
    """Judges every result by the fp64 oracle; what is stored exactly (a residual) bit for bit."""
    combo, want = problem.combo, problem.oracle()
    given = 1.0 if problem.scale is None else float(problem.scale)
    if combo.scaled:
        down = combo.rule == "ocp"
        scaled(want, got, pool, what, block=combo.block, gain=given if combo.form == "e4m3" else 1.0, down=down)
        if combo.side:
            assert got.normed_out is not None
            pool.add(got.normed_out, want, f"{what}: normed_out")
    elif combo.makes_scales:
        _blocks(problem, got, want, pool, what)
    elif combo.makes_codes:
        scale = torch.tensor(given, dtype=torch.float32).double()
        norm = want.rounded.double() if combo.double else want.out
        llama = combo.numerics in oracles.LLAMA and not combo.once
        if llama and not combo.offset and combo.weight and not combo.centred:
            norm = want.rounded.double()  # the product is rounded before it is quantised
        pool.add_codes(got.out, norm / scale, want.judged, what)
    else:
        pool.add(got.out, want, what, problem.eager())
    if want.residual is not None:
        assert got.residual is not None
        assert_same_bits(got.residual, want.residual, f"{what}: residual")
    if combo.rstd:
        assert got.rstd is not None
        assert_rstd(got.rstd, want, what)


def _blocks(problem: Problem, got: Bits, want: Expected, pool: Pool, what: str) -> None:
    """Scales by those of the rounded fp64 norm, codes by that norm over the stored scales."""
    combo, dtype = problem.combo, problem.combo.out_dtype
    size = combo.block_size
    count = -(-problem.shape[-1] // (size or problem.shape[-1]))
    power, cap = combo.form != "fp32", None if problem.cap is None else float(problem.cap)
    norm, judged = want.rounded, want.judged.flatten()
    floor = FLOORS[combo.op == BLOCKED]
    scales = oracles.block_scales(norm, size, dtype, floor=floor, power=power, cap=cap)
    assert got.scale is not None
    stored = unpack(got.scale, count) if combo.form == "ue8m0_packed" else got.scale
    assert stored.shape == scales.shape, f"{what}: scales {tuple(stored.shape)}, expected {tuple(scales.shape)}"
    step = torch.zeros_like(scales)
    if norm.dtype in _SIGNIFICAND:
        exponent = torch.frexp(scales * oracles.largest(dtype))[1]
        step = torch.exp2(exponent.double() - _SIGNIFICAND[norm.dtype]) / oracles.largest(dtype)
    pool.add_scales(stored[judged], scales[judged], step[judged], what)
    value = torch.exp2(stored.double() - 127) if power else stored
    pool.add_codes(got.out, oracles.quotients(norm, value, size), want.judged, what)
    if combo.side:
        assert got.normed_out is not None
        pool.add(got.normed_out, want, f"{what}: normed_out")


def scaled(
    want: Expected,
    got: Bits,
    pool: Pool,
    what: str,
    *,
    block: int,
    gain: float = 1.0,
    down: bool = False,
) -> None:
    """NVFP4, MXFP4 and MXFP8: codes by the fp64 norm over the stored scales, and those by the fp64 scales.

    Args:
        want: the fp64 norm, or SiLU of it.
        got: codes [..., H / 2] of e2m1 or [..., H] of e4m3; scales [rows, blocks] of e4m3, or exponent bytes.
        pool: for the shares.
        what: named where it fails.
        block: elements a scale serves.
        gain: the global scale.
        down: exponents are rounded down, as the OCP specification has it.
    """
    assert got.scale is not None
    norm, stored, judged = want.out, got.scale.detach().cpu(), want.judged.flatten()
    if stored.dtype == torch.float8_e4m3fn:
        wanted, value = oracles.nvfp4_scales(norm, block, gain), stored.double()
    else:
        wanted = oracles.block_scales(norm, block, got.out.dtype, floor=0.0, power=True, down=down)
        value = torch.exp2(stored.double() - 127)
    assert stored.shape == wanted.shape, f"{what}: scales {tuple(stored.shape)}, expected {tuple(wanted.shape)}"
    pool.add_scales(stored[judged], wanted[judged], torch.ones_like(wanted[judged]), what)
    pool.add_codes(got.out, oracles.quotients(norm * float(torch.tensor(gain)), value, block), want.judged, what)


def check(problem: Problem, route: str, pool: Pool, out: str = "none") -> Bits:
    """Runs one problem on a route and judges everything it left by the accuracy rule."""
    got = problem.run(route, out)
    accuracy(problem, got, pool, f"{problem.what} on {route}")
    return got


def judge(problem: Problem, route: str, out: str = "none") -> None:
    """Exact routes give the canonical bits; the torch route stays within the tolerance."""
    if route == "torch":
        check(problem, route, Pool(problem.combo.numerics), out)
    else:
        problem.check_bits(problem.run(route, out), f"out {out} on {route}")
