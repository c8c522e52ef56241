"""The judges are judged: canonical bits against exact fractions, the oracle against the canonical bits, distances."""

from __future__ import annotations

import random
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from flashnorm import recipe
from tests import canonical, combos, conftest, gatecombos, oracles, tolerance, warm
from tests.canonical import canonical_sum, fma, narrow, rmsnorm_bits, widen

FORMATS = {torch.float32: (24, -126, 127), torch.float16: (11, -14, 15), torch.bfloat16: (8, -126, 127)}
DTYPES = list(FORMATS)


# ------------------------------------------------------------------ a slow model on exact fractions
def nearest(value: Fraction, dtype: torch.dtype) -> Fraction | float:
    """Rounds an exact rational to a format, nearest even; overflow gives an infinity."""
    bits, low, high = FORMATS[dtype]
    if value == 0:
        return Fraction(0)
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, low) - (bits - 1))
    steps = round(size / quantum)  # Python rounds a Fraction half to even
    near = steps * quantum
    if near >= Fraction(2) ** (high + 1):
        return float("inf") if value > 0 else float("-inf")
    return near if value > 0 else -near


def f32(value: Fraction) -> Fraction:
    near = nearest(value, torch.float32)
    assert isinstance(near, Fraction)
    return near


def root(value: Fraction) -> Fraction:
    """sqrt of an fp32 number, correctly rounded: integer square root with far more bits than needed, made sticky."""
    import math

    shift = 200
    scaled = value * Fraction(4) ** shift
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    exact = scaled.denominator == 1 and whole * whole == scaled.numerator
    return f32(Fraction(2 * whole + (0 if exact else 1), 2 * 2**shift))


def slow_sum(terms: list[tuple[Fraction, Fraction]]) -> Fraction:
    """The canonical sum of products, one element at a time, straight from its description."""
    groups = -(-len(terms) // 8)
    lanes = 1
    while lanes < groups and lanes < 1024:
        lanes *= 2
    acc: list[list[Fraction | None]] = [[None] * 8 for _ in range(lanes)]
    for i, (a, b) in enumerate(terms):
        lane = acc[(i // 8) % lanes]
        old = lane[i % 8]
        lane[i % 8] = f32(a * b) if old is None else f32(a * b + old)
    sums = []
    for lane in acc:
        p = [v or Fraction(0) for v in lane]
        even, odd = f32(f32(p[0] + p[4]) + f32(p[2] + p[6])), f32(f32(p[1] + p[5]) + f32(p[3] + p[7]))
        sums.append(f32(even + odd))

    def halve(values: list[Fraction]) -> Fraction:
        while len(values) > 1:
            s = len(values) // 2
            values = [f32(values[i] + values[i + s]) for i in range(s)]
        return values[0]

    return halve([halve(sums[i : i + 32]) for i in range(0, len(sums), 32)])


def exact(values: np.ndarray) -> list[Fraction]:
    return [Fraction(float(v)) for v in values]


def sample(seed: int, *shape: int, spread: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.uniform(-spread, spread, shape))).astype(np.float32)


# ------------------------------------------------------------------ canonical
def test_fma_is_one_rounding() -> None:
    rng = random.Random(7)
    triples = []
    for _ in range(1500):
        a, b = (rng.randrange(2**23, 2**24) * 2.0 ** rng.randrange(-40, 20) for _ in range(2))
        # addends that leave the product just beside a tie: the cases a double rounding gets wrong
        near = float(np.float32(a * b)) * rng.choice((1.0, -1.0, 2.0**24, 2.0**-24, 2.0**23, 2.0**30, -(2.0**-25)))
        triples.append((a, b, near))
    # product exactly half a step above the addend, and a hair more or less: 1 + 2^-24 +- 2^-60
    for sign in (1, -1):
        triples += [
            (2.0**-12, 2.0**-12, sign * 1.0),
            (2.0**-12 * (1 + 2.0**-23), 2.0**-12 * (1 - 2.0**-23), sign * 1.0),
        ]
        triples += [(sign * (1 + 2.0**-23), 2.0**-24, 1.0), (sign * (1 - 2.0**-24), 2.0**-24, 1.0)]
    triples += [(2.0**-75, 2.0**-75, 2.0**-149), (2.0**-75, -(2.0**-75), 2.0**-149), (3 * 2.0**-100, 2.0**-50, 0.0)]
    a, b, c = (np.array(column, np.float32) for column in zip(*triples, strict=True))
    got = fma(a, b, c)
    for i in range(len(a)):
        x, y, z = (Fraction(float(v[i])) for v in (a, b, c))
        want = nearest(x * y + z, torch.float32)
        assert Fraction(float(got[i])) == want if isinstance(want, Fraction) else float(got[i]) == want, (x, y, z)


def test_a_double_rounding_would_be_seen() -> None:
    """A hair below a tie: fp64 loses the hair, and its cast then goes to the even neighbour, a step too far."""
    a, b, c = np.float32([1 + 2.0**-23]), np.float32([2.0**-24 * (1 - 2.0**-23)]), np.float32([1 + 2.0**-23])
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert float(twice[0]) == 1 + 2.0**-22 and float(fma(a, b, c)[0]) == 1 + 2.0**-23


def test_fma_special_values() -> None:
    inf, nan = np.float32("inf"), np.float32("nan")
    a = np.array([inf, inf, nan, 0, -0.0, 2.0**100, 2.0**127], np.float32)
    b = np.array([1, 0, 1, 1, 1, 2.0**100, 2], np.float32)
    c = np.array([-inf, 1, 1, -0.0, -0.0, 1, -(2.0**127)], np.float32)
    got = fma(a, b, c)
    assert np.isnan(got[:3]).all() and struct.pack("f", got[3]) == struct.pack("f", 0.0)
    assert np.signbit(got[4]) and got[5] == inf and got[6] == 2.0**127


@pytest.mark.parametrize("h", [1, 2, 7, 8, 9, 17, 64, 65, 111, 250, 257, 300, 1023])
def test_sum_follows_its_description(h: int) -> None:
    rows = sample(h, 3, h, spread=6.0)
    got = canonical_sum(rows, rows)
    for row in range(3):
        values = exact(rows[row])
        assert Fraction(float(got[row])) == slow_sum(list(zip(values, values, strict=True)))


def test_sum_of_a_row_longer_than_the_lanes() -> None:
    h = 2 * 8192 + 8 * 3 + 5
    row = sample(1, 1, h, spread=4.0)
    values = exact(row[0])
    assert Fraction(float(canonical_sum(row, row)[0])) == slow_sum(list(zip(values, values, strict=True)))
    ones = [(v, Fraction(1)) for v in values]
    assert Fraction(float(canonical_sum(row)[0])) == slow_sum(ones)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_against_fractions_and_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert tolerance.same_bits(narrow(widen(codes), dtype), codes)  # every value survives the way there and back
    finite = widen(codes[codes.isfinite()]).astype(np.float64)
    around = np.unique(finite)
    middle = ((around[:-1] + around[1:]) / 2).astype(np.float32)  # every tie, and its neighbours
    inf = np.float32(np.inf)
    edges = np.concatenate([middle, np.nextafter(middle, inf), np.nextafter(middle, -inf)])
    edges = np.concatenate([edges, np.float32([65519.9, 65520, 1e38, 3.4e38, -3.4e38, np.inf, -np.inf])])
    assert tolerance.same_bits(narrow(edges, dtype), torch.from_numpy(edges).to(dtype))
    for value in edges[:: max(1, len(edges) // 800)]:
        if np.isfinite(value):
            want = nearest(Fraction(float(value)), dtype)
            assert float(narrow(np.float32([value]), dtype)[0]) == float(want)
    assert bool(narrow(np.float32([np.nan]), dtype).isnan().all())


CONTRACT_MODES = ["flashinfer", "hf-llama", "vllm", "hf-gemma", "torch", "cake"]


@pytest.mark.parametrize("numerics", CONTRACT_MODES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rmsnorm_bits_against_fractions(dtype: torch.dtype, with_residual: bool, offset: float, numerics: str) -> None:
    """The whole operator in exact arithmetic, with every dtype of weight and residual by turns."""
    h, eps = 21, 1e-5
    turn = DTYPES.index(dtype) + CONTRACT_MODES.index(numerics)
    w_dtype, r_dtype = DTYPES[turn % 3], DTYPES[(turn // 3 + 1) % 3]
    x = narrow(sample(turn, 2, h), dtype)
    weight = narrow(sample(turn + 50, h), w_dtype)
    residual = narrow(sample(turn + 90, 2, h), r_dtype) if with_residual else None
    got = rmsnorm_bits(x, weight, residual, eps=eps, numerics=numerics, offset=offset)
    for row in range(2):
        hs = exact(widen(x)[row])
        if residual is not None:
            hs = [f32(a + b) for a, b in zip(hs, exact(widen(residual)[row]), strict=True)]
            stored = [nearest(v, r_dtype) for v in hs]
            assert got.residual is not None
            assert exact(widen(got.residual)[row]) == stored
            if numerics != "flashinfer":
                hs = stored  # type: ignore[assignment]
        mean = f32(slow_sum(list(zip(hs, hs, strict=True))) / h)
        rstd = f32(1 / root(f32(mean + f32(Fraction(eps)))))
        assert Fraction(float(got.rstd[row])) == rstd
        for i, w in enumerate(exact(widen(weight))):
            n = f32(hs[i] * rstd)
            if numerics in ("hf-llama", "vllm") and not offset:
                n = nearest(n, dtype)  # type: ignore[assignment]
            y = f32(n * f32(w + Fraction(offset)))
            assert Fraction(float(got.out[row, i])) == nearest(y, dtype)


def test_cases_of_the_residual_convention() -> None:
    """x = 1.0 and residual = 0.00396 in bf16: which sum is normalised decides the result of a two-element row."""
    x = torch.tensor([[1.0, 4.0]], dtype=torch.bfloat16)
    residual = torch.tensor([[0.00396, 0.0]], dtype=torch.bfloat16)
    assert float(x.float()[0, 0] + residual.float()[0, 0]) == pytest.approx(1.0039673, abs=1e-7)
    plain = rmsnorm_bits(x, None, residual, eps=0.0)
    rounded = rmsnorm_bits(x, None, residual, eps=0.0, numerics="hf-gemma")
    assert plain.residual is not None and float(plain.residual[0, 0]) == 1.0078125
    assert float(plain.rstd[0]) != float(rounded.rstd[0])


# ------------------------------------------------------------------ the oracle and the distances
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_oracle_rounds_once(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    bits, low, _ = FORMATS[dtype]
    values = []
    for _ in range(700):
        m, e = rng.randrange(2 ** (bits - 1), 2**bits), rng.randrange(low - bits, 20)
        tie = (m + 0.5) * 2.0 ** (e - bits)
        values += [tie, tie * (1 + 2.0**-52), tie * (1 - 2.0**-52), -tie]
    got = oracles.round_to(torch.tensor(values, dtype=torch.float64), dtype)
    for value, near in zip(values, got.tolist(), strict=True):
        assert near == float(nearest(Fraction(value), dtype)), value
    inf = oracles.round_to(torch.tensor([1e39, -1e39, float("nan"), 0.0], dtype=torch.float64), dtype)
    assert inf[:2].tolist() == [float("inf"), float("-inf")] and bool(inf[2].isnan()) and float(inf[3]) == 0


@pytest.mark.parametrize("numerics", CONTRACT_MODES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_canonical_bits_meet_the_accuracy_rule(dtype: torch.dtype, offset: float, numerics: str) -> None:
    pool = tolerance.Pool(numerics)
    for i, (m, h) in enumerate([(7, 4096), (999, 111), (1, 65537), (3, 8)]):
        x, residual = narrow(sample(i, m, h), dtype), narrow(sample(i + 9, m, h), torch.bfloat16)
        weight = narrow(sample(i + 5, h), torch.float32)
        with_residual = residual if i % 2 else None
        got = rmsnorm_bits(x, weight, with_residual, numerics=numerics, offset=offset)
        want = oracles.rms_norm(x, weight, with_residual, numerics=numerics, offset=offset)
        eager = oracles.eager(x, weight, numerics=numerics, offset=offset) if with_residual is None else None
        pool.add(got.out, want, f"{m}x{h}", eager)
        tolerance.assert_rstd(got.rstd, want)
        if with_residual is not None:
            assert got.residual is not None and want.residual is not None
            tolerance.assert_same_bits(got.residual, want.residual, "residual")
    pool.judge("canonical")


def test_tolerance_refuses_what_is_wrong() -> None:
    x = narrow(sample(4, 64, 2048), torch.bfloat16)
    weight = narrow(sample(5, 2048), torch.bfloat16)
    want = oracles.rms_norm(x, weight)
    right = canonical.rmsnorm_bits(x, weight).out
    llama = canonical.rmsnorm_bits(x, weight, numerics="hf-llama").out
    for wrong in (right * 1.02, torch.full_like(right, float("nan")), torch.zeros_like(right)):
        with pytest.raises(AssertionError, match="out of tolerance"):
            tolerance.Pool("flashinfer").add(wrong, want, "wrong")
    pool = tolerance.Pool("flashinfer")  # another rounding stays within a step, but not in 99.9 % of the elements
    pool.add(llama, want, "llama")
    with pytest.raises(AssertionError, match="elements equal"):
        pool.judge("llama")
    few = tolerance.Pool("flashinfer")
    few.add(right[:1], oracles.rms_norm(x[:1], weight), "one row")
    with pytest.raises(AssertionError, match="too few"):
        few.judge("one row")
    with pytest.raises(AssertionError, match="rstd"):
        tolerance.assert_rstd(want.rstd.float() * (1 + 3e-6), want)
    with pytest.raises(AssertionError, match="other bits; first at \\(0, 5\\)"):
        moved = right.clone()
        moved[0, 5] = -moved[0, 5]
        tolerance.assert_same_bits(moved, right)


def test_steps_cross_zero_powers_of_two_and_infinity() -> None:
    for dtype in DTYPES:
        tiny = torch.tensor([1], dtype=torch.int32).to(tolerance._INT[dtype.itemsize]).view(dtype)
        largest = torch.tensor([torch.finfo(dtype).max], dtype=dtype)
        zero, inf = torch.zeros(1, dtype=dtype), torch.full((1,), float("inf"), dtype=dtype)
        assert int(tolerance.steps_between(tiny, -tiny)) == 2
        assert int(tolerance.steps_between(zero, -zero)) == 0 and not tolerance.same_bits(zero, -zero)
        assert int(tolerance.steps_between(largest, inf)) == 1
        one = torch.ones(1, dtype=dtype)
        below = torch.tensor([1 - torch.finfo(dtype).eps / 2], dtype=dtype)
        assert int(tolerance.steps_between(one, below)) == 1
        nan = torch.full((1,), float("nan"), dtype=dtype)
        assert int(tolerance.steps_between(nan, nan)) == 0 and int(tolerance.steps_between(nan, one)) == tolerance.FAR


# ------------------------------------------------------------------ what a run on a GPU builds
def test_the_kernels_of_a_gpu_are_named_without_one(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("on a GPU they are built")
    kernels = warm.kernels_for("sm_80")
    assert set(recipe.from_json(recipe.to_json(kernels))) == set(kernels)
    assert {kernel.arch for kernel in kernels} == {"sm_80"}
    for route, least in (("cuda", 100), ("cute", 300)):
        assert sum(kernel.route == route for kernel in kernels) > least
    names = {kernel.op for kernel in kernels}
    for op in {c.op for c in combos.COMBOS} | {c.op for c in gatecombos.COMBOS}:
        assert any(name.startswith(op) for name in names), op


def test_modes_that_a_test_leaves_behind_are_seen() -> None:
    """Each of what conftest compares after every test, and the state that kernels below autograd run in."""
    before = conftest._modes()
    for mode in (torch.no_grad, torch.inference_mode, forward_ad.dual_level, torch._C._AutoDispatchBelowAutograd):
        with mode():
            assert conftest._modes() != before, mode
    assert conftest._modes() == before
