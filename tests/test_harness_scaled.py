"""The judges are judged, third part: four bits, powers of two for blocks, tiles, SiLU."""

from __future__ import annotations

import itertools
import math
import random as python_random
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests import canonical, oracles, tolerance
from tests.canonical import norm, nvfp4_bits, power_bits, tiles, widen
from tests.canonical.codes import E2M1, code_bytes, decode, encode, floor_bytes, magnitudes, nibbles, pairs
from tests.canonical.quantise import nvfp4
from tests.judge import scaled
from tests.test_harness import f32, sample
from tests.tolerance import Pool

pytestmark = pytest.mark.cpu_only

E4M3 = torch.float8_e4m3fn
INF, NAN = math.inf, math.nan
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def codes_of(values: list[float]) -> list[int]:
    return code_bytes(np.array(values, np.float32), E2M1).tolist()


# ------------------------------------------------------------------ e2m1
def test_e2m1_is_the_format() -> None:
    assert magnitudes(E2M1).tolist() == VALUES
    for code, (low, high) in enumerate(itertools.pairwise(VALUES)):
        tie = np.float32((low + high) / 2)
        below, above = (float(np.nextafter(tie, np.float32(side))) for side in (-INF, INF))
        even = code + code % 2
        assert codes_of([low, below, float(tie), above]) == [code, code, even, code + 1]
        assert codes_of([-below, -float(tie), -above]) == [8 + code, 8 + even, 9 + code]
    assert codes_of([6.1, 7, 1e9, INF, -INF, NAN, -NAN]) == [7, 7, 7, 7, 15, 7, 7]
    assert codes_of([0.0, -0.0, 1e-45, -1e-45, 0.25, -0.25]) == [0, 8, 0, 8, 0, 8]


def test_pairs_hold_the_even_column_low() -> None:
    packed = pairs(np.array([[1, 2, 15, 0]], np.uint8))
    assert packed.tolist() == [[0x21, 0x0F]]
    assert nibbles(torch.from_numpy(packed)).tolist() == [[1, 2, 15, 0]]
    codes = encode(np.array([[0.5, 1.0, -6.0, 0.0]], np.float32), E2M1)
    assert codes.dtype == E2M1 and codes.view(torch.uint8).tolist() == [[0x21, 0x0F]]
    assert decode(codes).tolist() == [[0.5, 1.0, -6.0, 0.0]]
    assert oracles.places(codes).tolist() == [[1, 2, -7, 0]]


def test_oracle_finds_the_places_of_e2m1() -> None:
    values = torch.tensor(
        [0.0, 0.25, 0.25 + 1e-12, -0.75, 1.25, 2.5, 3.5, 5.0, 5.0 + 1e-9, 9.0, -9.0, INF, NAN]
    ).double()
    values[2], values[8] = 0.25 + 1e-12, 5 + 1e-9
    assert oracles.round_to(values, E2M1).tolist() == [0, 0, 1, -2, 2, 4, 6, 6, 7, 7, -7, 7, 7]


# ------------------------------------------------------------------ powers of two
def test_floor_bytes() -> None:
    amax = np.array([0, 1, 1.999, 2, 448, 3e38, 2.0**-126, 2.0**-149, 6, NAN], np.float32)
    assert floor_bytes(amax, E4M3).tolist() == [0, 119, 119, 120, 127, 246, 0, 0, 121, 255]
    assert floor_bytes(amax, E2M1).tolist() == [0, 125, 125, 126, 133, 252, 0, 0, 127, 255]
    wide = oracles.block_scales(torch.from_numpy(amax[:-1]).view(-1, 1), 1, E2M1, floor=0.0, power=True, down=True)
    assert (torch.log2(wide).flatten() + 127).tolist() == floor_bytes(amax[:-1], E2M1).tolist()


# ------------------------------------------------------------------ NVFP4, by exact fractions
def _e4m3(value: Fraction) -> Fraction:
    known = [Fraction(float(v)) for v in magnitudes(E4M3)]
    best = min(abs(v - value) for v in known)
    return next(v for i, v in enumerate(known) if abs(v - value) == best and (i % 2 == 0 or _alone(known, value, best)))


def _alone(known: list[Fraction], value: Fraction, best: Fraction) -> bool:
    return sum(abs(v - value) == best for v in known) == 1


def test_nvfp4_operation_by_operation() -> None:
    """Each fp32 operation rounded on its own, in rationals."""
    rng = python_random.Random(5)
    for gain in (None, 1.0, 61.3, 2.0**-9):
        block = np.array([rng.uniform(-9, 9) * 2.0 ** rng.randrange(-4, 5) for _ in range(16)], np.float32)
        codes, scale = nvfp4(block[None], 16, gain)
        exact = [Fraction(float(v)) for v in block]
        wide = f32(max(map(abs, exact)) / 6)
        if gain is not None:
            factor = Fraction(float(np.float32(gain)))
            wide, exact = f32(factor * wide), [f32(factor * v) for v in exact]
        stored = _e4m3(min(wide, Fraction(448)))
        assert Fraction(float(scale.float())) == stored
        for value, code in zip(exact, nibbles(codes)[0].tolist(), strict=True):
            quotient = f32(value / stored)
            away = {c: abs(abs(quotient) - Fraction(v)) for c, v in enumerate(VALUES)}
            best = min(away.values())
            assert away[code & 7] == best and (code < 8 or value < 0), (value, code)
            assert code & 1 == 0 or sum(a == best for a in away.values()) == 1


def test_special_blocks() -> None:
    rows = np.zeros((6, 16), np.float32)
    rows[1, 3], rows[2, 0], rows[3, :2], rows[4, :2], rows[5, :2] = NAN, -INF, (-0.0, 1e-6), (-1e-3, 6), (-0.0, 6)
    codes, scale = nvfp4(rows, 16, None)
    assert scale.view(torch.uint8).flatten().tolist() == [0, 0x7F, 0x7E, 0, 0x38, 0x38]
    found = nibbles(codes)
    assert not found[0].any() and (found[1] == 7).all() and not found[3].any()
    assert found[2, :2].tolist() == [15, 0] and found[4, :2].tolist() == [8, 7] and found[5, :2].tolist() == [8, 7]


# ------------------------------------------------------------------ tiles
def test_tiles_by_hand() -> None:
    scales = torch.arange(1, 131 * 5 + 1).remainder(251).to(torch.uint8).view(131, 5)
    found = tiles(scales)
    assert found.shape == (256, 8)
    flat = found.flatten()
    assert flat[:4].tolist() == scales[0, :4].tolist() and flat[4:8].tolist() == scales[32, :4].tolist()
    assert flat[16:20].tolist() == scales[1, :4].tolist() and flat[512:516].tolist() == [int(scales[0, 4]), 0, 0, 0]
    assert flat[1024:1028].tolist() == scales[128, :4].tolist() and not flat[1028:1040].any()
    assert int((flat != 0).sum()) == int((scales != 0).sum())


# ------------------------------------------------------------------ SiLU
def test_silu_by_fractions() -> None:
    """exp by its operations in rationals, and the division once rounded."""
    log2e, low = (Fraction(float.fromhex(t)) for t in ("0x1.715476p+0", "0x1.4ae0cp-26"))
    factors = [
        Fraction(float.fromhex(t))
        for t in ("0x1.41fb2ep-13", "0x1.5f3f3p-10", "0x1.3b2d5p-7", "0x1.c6aee6p-5", "0x1.ebfbdcp-3", "0x1.62e43p-1")
    ]
    y = np.array([0.3, -0.3, 1.7, -5.5, 20, -20, 80, -80, 1e-3, -1e-3, 0.34657359, 86.9, -86.9], np.float32)
    for value, got in zip(y.tolist(), canonical.silu(y).tolist(), strict=True):
        t = -Fraction(value)
        n = Fraction(round(t * log2e))  # no tie among these
        f = f32(t * low + f32(t * log2e - n))
        p = factors[0]
        for factor in (*factors[1:], Fraction(1)):
            p = f32(p * f + factor)
        assert got == float(f32(Fraction(value) / f32(1 + p * Fraction(2) ** int(n)))), value
        assert got == pytest.approx(value / (1 + math.exp(-value)), rel=3e-7)


def test_oracle_of_silu() -> None:
    x = sample(1, 8, 64)
    want = oracles.norm(torch.from_numpy(x), None, silu=True)
    plain = oracles.norm(torch.from_numpy(x), None).out
    assert torch.allclose(want.out, torch.nn.functional.silu(plain), rtol=1e-13, atol=0)
    bits = norm(torch.from_numpy(x), None).silu()
    assert float((want.out - torch.from_numpy(bits.y).double()).abs().max()) < 1e-6


def test_nothing_is_rounded_before_the_end() -> None:
    """In hf-llama, too, where an operator of this part says so."""
    x = torch.from_numpy(sample(1, 20, 64)).bfloat16()
    weight = torch.from_numpy(sample(2, 64)).bfloat16()
    plain, once, llama = (
        norm(x, weight, numerics=m, once=o).y for m, o in (("torch", False), ("vllm", True), ("vllm", False))
    )
    assert np.array_equal(plain, once) and not np.array_equal(plain, llama)
    wide = [
        oracles.norm(x, weight, numerics=m, once=o).out for m, o in (("torch", False), ("vllm", True), ("vllm", False))
    ]
    assert torch.equal(wide[0], wide[1]) and not torch.equal(wide[0], wide[2])


# ------------------------------------------------------------------ the judge
FORMS = ("nvfp4", "mxfp4", "mxfp4-ocp", "mxfp8", "mxfp8-ocp")


def made(form: str, silu: bool = False) -> tuple[oracles.Expected, canonical.Bits, dict[str, object]]:
    x = torch.from_numpy(sample(3, 520, 512)).bfloat16()
    weight = torch.from_numpy(sample(4, 512)).bfloat16()
    row = norm(x, weight, once=True)
    row = row.silu() if silu else row
    want = oracles.norm(x, weight, once=True, silu=silu)
    down = "ocp" in form
    if form == "nvfp4":
        return want, nvfp4_bits(row, 16, 61.3), {"block": 16, "gain": 61.3}
    return want, power_bits(row, E4M3 if "fp8" in form else E2M1, down=down), {"block": 32, "down": down}


@pytest.mark.parametrize("form", FORMS)
def test_the_canonical_bits_meet_the_accuracy_rule(form: str) -> None:
    """The two models know nothing of each other."""
    for silu in (False, True):
        want, got, how = made(form, silu)
        pool = Pool("flashinfer")
        scaled(want, got, pool, form, **how)  # type: ignore[arg-type]
        assert pool.shares["scales"].elements == got.scale.numel()  # type: ignore[union-attr]
        assert pool.shares["scales"].equal >= 0.999 * pool.shares["scales"].elements
        pool.judge(form)
        assert got.normed_out is not None
        if not silu:
            assert (
                tolerance.same_bits(got.normed_out, want.rounded)
                or float((tolerance.steps_between(got.normed_out, want.rounded) == 0).double().mean()) > 0.999
            )
            assert torch.equal(torch.from_numpy(widen(got.normed_out)), got.normed_out.float())


@pytest.mark.parametrize("form", FORMS)
def test_wrong_codes_and_scales_are_refused(form: str) -> None:
    want, right, how = made(form)
    raw, scale = right.out.view(torch.uint8), right.scale
    assert scale is not None

    def refused(match: str, **changed: torch.Tensor) -> None:
        pool = Pool("flashinfer")
        with pytest.raises(AssertionError, match=match):
            scaled(want, canonical.Bits(**{**vars(right), **changed}), pool, "wrong", **how)  # type: ignore[arg-type]
            pool.judge("wrong", need=1)

    steps = scale.view(torch.uint8).int()
    refused("codes: .* out of tolerance", out=(raw ^ 4).view(right.out.dtype))
    refused("codes: .* out of tolerance", out=(raw ^ 0x80).view(right.out.dtype))
    refused("scales: .* out of tolerance", scale=(steps + 2).to(torch.uint8).view(scale.dtype))
    refused("scales equal|out of tolerance", scale=(steps + 1).to(torch.uint8).view(scale.dtype))
    slip = torch.arange(raw.numel()).view(raw.shape) % 97 == 0
    less = torch.where(slip & (raw & 7 > 1), raw - 1, raw)
    refused("codes equal|out of tolerance", out=less.view(right.out.dtype))
    if form != "mxfp8-ocp" and form != "mxfp8":
        swapped = (raw >> 4) | (raw << 4)
        refused("codes: .* out of tolerance", out=swapped.view(right.out.dtype))


def test_stale_scales_show() -> None:
    want, right, how = made("nvfp4")
    stale = torch.full_like(right.scale.view(torch.uint8), 0x7F).view(E4M3)  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match="out of tolerance"):
        scaled(want, canonical.Bits(**{**vars(right), "scale": stale}), Pool("torch"), "stale", **how)  # type: ignore[arg-type]
