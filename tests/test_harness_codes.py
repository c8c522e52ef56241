"""The judges are judged, second part: 8-bit codes, scales, LayerNorm, gathered rows, buffers."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests import canonical, oracles, tolerance
from tests.buffers import Guarded, place
from tests.canonical import Blocks, block_bits, narrow, norm, tensor_bits, widen
from tests.canonical.codes import decode, encode, largest, magnitudes, power_bytes, power_of
from tests.canonical.quantise import by_block, by_tensor, pack, unpack
from tests.combos import COMBOS, RMSNORMS, Combo
from tests.judge import accuracy
from tests.problem import Problem
from tests.test_harness import exact, f32, nearest, root, sample, slow_sum
from tests.tolerance import Pool

pytestmark = pytest.mark.cpu_only

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
every_format = pytest.mark.parametrize("dtype", FP8, ids=str)
INF, NAN = math.inf, math.nan


def codes_of(values: list[float], dtype: torch.dtype) -> list[int]:
    return encode(np.array(values, np.float32), dtype).view(torch.uint8).tolist()


# ------------------------------------------------------------------ codes
@every_format
def test_magnitudes_are_those_of_the_format(dtype: torch.dtype) -> None:
    known = magnitudes(dtype)
    assert bool((np.diff(known) > 0).all()) and known[0] == 0
    assert float(known[-1]) == float(torch.finfo(dtype).max) == oracles.largest(dtype)
    assert float(known[1]) == {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16}[dtype]
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert np.array_equal(decode(every), every.float().numpy(), equal_nan=True)


@every_format
def test_encode_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    """Every value, every tie and the fp32 numbers beside it, against exact distances."""
    known = magnitudes(dtype)
    for code in range(len(known) - 1):
        low, high = Fraction(float(known[code])), Fraction(float(known[code + 1]))
        middle = np.float32((low + high) / 2)
        assert Fraction(float(middle)) * 2 == low + high
        below, above = (np.nextafter(middle, np.float32(side)) for side in (-INF, INF))
        even = code + code % 2
        assert codes_of([known[code], below, middle, above], dtype) == [code, code, even, code + 1]
        assert codes_of([-below, -middle], dtype) == [0x80 + code, 0x80 + even]


@every_format
def test_encode_saturates_and_knows_nan(dtype: torch.dtype) -> None:
    last, top = len(magnitudes(dtype)) - 1, float(largest(dtype))
    assert codes_of([top * 1.01, top * 2, 3e38, INF], dtype) == [last] * 4
    assert codes_of([-top * 1.01, -INF], dtype) == [0x80 + last] * 2
    assert codes_of([NAN, -NAN], dtype) == [0x7F] * 2
    assert codes_of([0.0, -0.0, 1e-45, -1e-45], dtype) == [0, 0x80, 0, 0x80]


def test_encode_int8() -> None:
    values = np.array([0.5, 1.5, -0.5, 126.5, 127.5, -127.5, -128, 1e9, -INF, NAN, -0.0], np.float32)
    assert encode(values, torch.int8).tolist() == [0, 2, 0, 126, 127, -127, -127, 127, -127, 0, 0]


@every_format
def test_encode_agrees_with_torch_where_torch_says_the_same(dtype: torch.dtype) -> None:
    top = float(largest(dtype))
    values = torch.from_numpy(sample(3, 100_000, spread=20.0)).clamp(-top, top)
    assert tolerance.same_bits(encode(values.numpy(), dtype), values.to(dtype))


def test_power_of_two_bytes() -> None:
    """The smallest power of two that is not less: exact powers stay, everything above goes up; clamped to 0 ... 254."""
    values = [
        1.0,
        np.nextafter(np.float32(1), np.float32(2)),
        2.0**-127,
        2.0**-149,
        1.5 * 2.0**-127,
        2.0**127,
        3e38,
        0.0,
    ]
    got = power_bytes(np.array([*values, NAN], np.float32))
    assert got.tolist() == [127, 128, 0, 0, 1, 254, 254, 0, 255]
    assert power_of(got[:4]).tolist() == [1.0, 2.0, 2.0**-127, 2.0**-127] and np.isnan(power_of(got[-1:]))[0]


# ------------------------------------------------------------------ scales
def test_one_scale_against_fractions() -> None:
    y, scale = sample(1, 500, spread=8.0), Fraction(float(np.float32(0.0273)))
    inverse = f32(1 / scale)
    for dtype in FP8:
        got = by_tensor(y, float(scale), dtype).float().tolist()
        for value, code in zip(exact(y), got, strict=True):
            product = np.float32(f32(value * inverse))
            assert code == float(encode(product[None], dtype).float()[0])


SPECIAL_BLOCKS = {
    "zeros": ([0.0, -0.0], {}, 0),
    "NaN": ([1.0, NAN, 0.0], {"fp32": NAN, "power": 255}, "nan"),
    "infinity": ([INF, -INF, 1.0, -1.0, 0.0, -0.0], {}, None),
    "both": ([INF, NAN], {"fp32": NAN, "power": 255}, "nan"),
    "below the floor": ([1e-12, -1e-12, -0.0], {}, None),
}


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("dtype", (*FP8, torch.int8), ids=str)
@pytest.mark.parametrize("name", SPECIAL_BLOCKS)
def test_special_blocks(name: str, dtype: torch.dtype, power: bool) -> None:
    """The table of special values, by hand."""
    values, said, every = SPECIAL_BLOCKS[name]
    v = np.zeros((1, 8), np.float32)
    v[0, : len(values)] = values
    codes, scale = by_block(v, Blocks(8, 1e-10, power=power), dtype)
    top = {torch.int8: 127, torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}[dtype]
    raw, q = codes.view(torch.uint8)[0].tolist(), Fraction(float(largest(dtype)))
    minus = (lambda code: 256 - code if code else 0) if dtype == torch.int8 else (lambda code: 0x80 + code)
    if name == "zeros":
        assert raw == [0] * 8
    elif every == "nan":
        assert raw == [0 if dtype == torch.int8 else 0x7F] * 8
        assert scale[0, 0] == 255 if power else bool(scale.isnan()[0, 0])
        return
    elif name == "infinity":  # everything finite is nothing beside FLT_MAX
        assert raw == [top, minus(top), 0, minus(0), 0, minus(0), 0, 0]
    else:  # 1e-12 of at least 1e-10: a hundredth of Q
        small = float(np.float32(1e-12)) * (float(q) / 1e-10)
        assert abs(float(codes[0, 0].float()) - small) <= max(0.5, small / 8) and raw[2] == minus(0)
        assert raw[1] == minus(raw[0])
    a = Fraction(float(np.float32(1e-10))) if name != "infinity" else Fraction(float(np.finfo(np.float32).max))
    exactly = f32(a / q)
    if power:
        stored = Fraction(2) ** (int(scale[0, 0]) - 127)
        assert stored >= exactly > stored / 2
    else:
        assert Fraction(float(scale[0, 0])) == exactly
    assert said == {}


def test_blocks_against_fractions() -> None:
    """Amax, floor, cap, scale, codes: one block at a time, the last one shorter."""
    v = widen(narrow(sample(5, 3, 21, spread=4.0), torch.bfloat16))
    v[1, 8:16] = 0
    for how in (Blocks(8, 1e-4, ratio=True), Blocks(8, 1e-10), Blocks(8, 1e-10, power=True), Blocks(0, 1e-10, cap=0.7)):
        for dtype in (*FP8, torch.int8):
            codes, scale = by_block(v, how, dtype)
            q, size = Fraction(float(largest(dtype))), how.size or 21
            for row in range(3):
                for block in range(-(-21 // size)):
                    values = exact(v[row, block * size : (block + 1) * size])
                    amax = max(map(abs, values))
                    a = max(amax, Fraction(float(np.float32(how.floor))))
                    a = a if how.cap is None else min(a, Fraction(float(np.float32(how.cap))))
                    s = f32(a / q)
                    if how.power:
                        s = Fraction(2) ** (int(scale[row, block]) - 127)
                        assert s >= f32(a / q) > s / 2
                    else:
                        assert Fraction(float(scale[row, block])) == s
                    times = f32(q / a) if how.ratio else f32(1 / s)
                    products = np.array([float(f32(value * times)) if amax else 0.0 for value in values], np.float32)
                    got = codes[row, block * size : (block + 1) * size]
                    assert tolerance.same_bits(got, encode(products, dtype))


def test_packed_bytes() -> None:
    stored = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 255, 254]], dtype=torch.uint8)
    words = pack(stored)
    assert words.dtype == torch.int32 and words.shape == (2, 2)
    assert words.tolist() == [[0x04030201, 5], [0xFF080706 - 2**32, 254]]
    assert torch.equal(unpack(words, 5), stored)


# ------------------------------------------------------------------ LayerNorm, gathered and scaled rows
@pytest.mark.parametrize("numerics", ["flashinfer", "hf-llama", "hf-gemma"])
@pytest.mark.parametrize("there", ["both", "gain", "bias", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_layernorm_against_fractions(dtype: torch.dtype, there: str, numerics: str) -> None:
    """The whole operator in exact arithmetic, with a mean that is large beside the spread."""
    h, eps = 21, 1e-5
    x = narrow(sample(7, 2, h) + np.float32(37), dtype)
    residual = narrow(sample(8, 2, h), torch.bfloat16) if numerics != "flashinfer" else None
    weight = narrow(sample(9, h), torch.float16) if there in ("both", "gain") else None
    bias = narrow(sample(10, h), torch.bfloat16) if there in ("both", "bias") else None
    got = norm(x, weight, residual, bias=bias, centred=True, eps=eps, numerics=numerics)
    for row in range(2):
        hs = exact(widen(x)[row])
        if residual is not None:
            hs = [f32(a + b) for a, b in zip(hs, exact(widen(residual)[row]), strict=True)]
            hs = [nearest(v, torch.bfloat16) for v in hs]  # type: ignore[misc]
        one = Fraction(1)
        m1 = f32(slow_sum([(v, one) for v in hs]) / h)
        ds = [f32(v - m1) for v in hs]
        m2 = f32(slow_sum([(d, one) for d in ds]) / h)
        square = f32(slow_sum([(d, d) for d in ds]) / h)
        rstd = f32(1 / root(f32(max(Fraction(0), f32(square - m2 * m2)) + f32(Fraction(eps)))))
        assert Fraction(float(got.rstd[row])) == rstd
        for i in range(h):
            y = f32(f32(ds[i] - m2) * rstd)
            if weight is not None:
                y = y * exact(widen(weight))[i]
                y = f32(y) if bias is None else f32(y + exact(widen(bias))[i])
            elif bias is not None:
                y = f32(y + exact(widen(bias))[i])
            assert Fraction(float(got.y[row, i])) == y


def test_missing_elements_are_zero_after_the_subtraction() -> None:
    """A row far from zero and short of a group: padding that entered the sums would be seen."""
    x = torch.full((1, 769), 1000.0)
    x[0, ::2] += 1
    got = norm(x, None, centred=True, eps=0.0)
    want = oracles.norm(x, None, centred=True, eps=0.0)
    assert float((torch.from_numpy(got.y).double() - want.out).abs().max()) < 1e-5


def test_gathered_and_scaled_rows() -> None:
    x = torch.randint(-128, 128, (4, 16), dtype=torch.int8)
    scale = torch.tensor([[0.25], [3.0], [0.0007], [1.0]])
    index = torch.tensor([[3, 0], [-1, 4], [1, 1]])
    got = norm(x, None, index=index, input_scale=scale, out=torch.float16)
    plain = norm(torch.from_numpy(x.numpy().astype(np.float32) * scale.numpy()), None)
    assert got.rounding is torch.float16 and got.y.shape == (3, 2, 16)
    for place_, row in {(0, 0): 3, (0, 1): 0, (2, 0): 1, (2, 1): 1}.items():
        assert np.array_equal(got.y[place_], plain.y[row]) and got.rstd[place_] == plain.rstd[row]
    assert np.isnan(got.y[1]).all() and bool(got.rstd[1].isnan().all())
    assert norm(x, torch.ones(16), input_scale=scale).rounding is torch.float32
    assert norm(x, None, input_scale=scale[:1]).rounding is torch.bfloat16


def test_what_is_rounded_before_codes_are_made() -> None:
    """T-rounded where the specification says so, and nowhere else."""
    x, w = narrow(sample(1, 20, 64), torch.bfloat16), narrow(sample(2, 64), torch.float32)
    plain, llama = (norm(x, w, numerics=mode) for mode in ("flashinfer", "hf-llama"))
    assert not np.array_equal(plain.y, plain.rounded()) and np.array_equal(llama.y, llama.rounded())
    assert np.array_equal(norm(x, w, numerics="hf-llama", offset=1.0).y, norm(x, w, offset=1.0).y)
    once, twice = (tensor_bits(plain, torch.float8_e4m3fn, 0.0273, double=double).out for double in (False, True))
    assert not tolerance.same_bits(once, twice)
    assert tolerance.same_bits(twice, by_tensor(plain.rounded(), 0.0273, torch.float8_e4m3fn))
    side = block_bits(plain, torch.int8, Blocks(0, 1e-10)).normed_out
    assert side is not None and tolerance.same_bits(side, narrow(plain.y, torch.bfloat16))


# ------------------------------------------------------------------ oracle and tolerance
@every_format
def test_oracle_rounds_codes_once(dtype: torch.dtype) -> None:
    known = [Fraction(float(v)) for v in magnitudes(dtype)]
    values, want = [], []
    for low, high in itertools.pairwise(known):
        tie = (low + high) / 2
        hair = tie / 2**40
        even = low if known.index(low) % 2 == 0 else high
        values += [float(tie), float(tie + hair), -float(tie - hair)]
        want += [float(even), float(high), -float(low)]
    got = oracles.round_to(torch.tensor([*values, 1e9, INF, -INF], dtype=torch.float64), dtype).float().tolist()
    top = oracles.largest(dtype)
    assert got == [*want, top, top, -top]


@pytest.mark.parametrize("combo", [c for c in COMBOS if c not in RMSNORMS], ids=str)
def test_canonical_bits_meet_the_accuracy_rule(combo: Combo) -> None:
    """The two models know nothing of each other."""
    pool = Pool(combo.numerics)
    for i, shape in enumerate(((7, 4096), (199, 128), (1, 16384), (33, 1024))):
        problem = Problem(combo, shape, seed=i)
        accuracy(problem, problem.canonical(), pool, problem.what)
    pool.judge(str(combo), need=90_000)


def test_tolerance_refuses_wrong_codes_and_scales() -> None:
    combo = next(c for c in COMBOS if c.side and c.block == 128 and c.out == "e4m3")
    problem = Problem(combo, (200, 512))
    right = problem.canonical()
    assert right.scale is not None

    def refused(match: str, **changed: torch.Tensor) -> None:
        pool = Pool(combo.numerics)
        with pytest.raises(AssertionError, match=match):
            accuracy(problem, canonical.Bits(**{**vars(right), **changed}), pool, "wrong")
            pool.judge("wrong")

    raw = right.out.view(torch.uint8)
    refused("codes: .* out of tolerance", out=(raw ^ 2).view(right.out.dtype))
    refused("codes equal", out=torch.where(raw & 0x7F > 0x10, raw - 1, raw).view(right.out.dtype))
    refused("codes: .* out of tolerance", scale=right.scale, out=torch.full_like(raw, 0x7F).view(right.out.dtype))
    refused("scales: .* out of tolerance", scale=right.scale * 1.02)
    refused("scales: .* out of tolerance", scale=torch.full_like(right.scale, NAN))


def test_bits_of_codes_hold_to_the_byte() -> None:
    """NaN payloads of fp32, fp16 and bf16 are free; those of codes are not, and neither are bytes."""
    a = torch.tensor([0x7F, 0x80], dtype=torch.uint8)
    b = torch.tensor([0xFF, 0x80], dtype=torch.uint8)
    assert not tolerance.same_bits(a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn))
    assert not tolerance.same_bits(a, b) and tolerance.same_bits(a, a)
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert tolerance.same_bits(quiet[:1], quiet[1:])


# ------------------------------------------------------------------ buffers
def test_a_guard_sees_what_is_written_beside_a_tensor() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32):
        guard = Guarded(None, "cpu", "half", written=True, shape=(3, 8), dtype=dtype, poison=1)
        guard.view.view(torch.uint8).fill_(3)
        guard.check("inside")
        strides, offset = place((3, 8), "half")
        start = guard.view.storage_offset() - offset
        guard.storage.view(guard.before.dtype)[start + strides[0] - 1] += 1
        with pytest.raises(AssertionError, match="1 elements outside"):
            guard.check("outside")
    guard = Guarded(torch.ones(3), "cpu")
    guard.view[1] = 2
    with pytest.raises(AssertionError, match="an input was written"):
        guard.check("input")
