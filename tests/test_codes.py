"""8-bit results to the byte on every route: all codes, all 16-bit values, every tie, and the special values.

A row of ones has the mean square 1, so that with eps = 0 the norm is 1 and the result is the weight itself: any number
can be sent through an operator's store. Nothing depends on an order of additions then, and the torch route owes the
same bytes as every other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import flashnorm
from tests.canonical.codes import encode, magnitudes
from tests.combos import BLOCKED, COMBOS, DTYPES, STATIC, Combo
from tests.inputs import gains
from tests.problem import Problem
from tests.tolerance import assert_same_bits

INF, NAN = math.inf, math.nan
FORMATS = ("e4m3", "e5m2")
LAST = {"e4m3": 0x7E, "e5m2": 0x7B}


def sent(combo: Combo, weight: torch.Tensor, device: torch.device, rows: int = 1, **more: object) -> Problem:
    """A problem whose norm is the weight."""
    shape = (rows, weight.numel())
    residual = None if combo.residual is None else torch.zeros(shape, dtype=DTYPES[combo.residual])
    x = torch.ones(shape, dtype=DTYPES[combo.x])
    return Problem(combo, shape, device, x=x, weight=weight, residual=residual, eps=0.0, **more)  # type: ignore[arg-type]


def static(form: str) -> Combo:
    return Combo("rmsnorm_quant", "f32", "f32", out=form, scale="value")


def bytes_of(problem: Problem, route: str) -> torch.Tensor:
    return problem.run(route).out.view(torch.uint8)[0]


# ------------------------------------------------------------------ one scale
@pytest.mark.parametrize("scale", [1.0, 0.125, 1024.0])
@pytest.mark.parametrize("form", FORMATS)
def test_every_code_comes_back(form: str, scale: float, route: str, device: torch.device) -> None:
    """All 256; a NaN's code becomes 0x7F, and e5m2's infinity the largest finite code."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(DTYPES[form]).float() * scale
    want = torch.where(values.isnan(), 0x7F, codes)
    if form == "e5m2":
        want[0x7C], want[0xFC] = 0x7B, 0xFB
    got = bytes_of(sent(static(form), values, device, scale=scale), route)
    assert torch.equal(got, want), (got != want).nonzero()


@pytest.mark.parametrize("h", [65536, 65535])
@pytest.mark.parametrize("form", FORMATS)
def test_every_bf16_value(form: str, h: int, route: str, device: torch.device) -> None:
    """NaNs of both signs and all payloads, infinities, subnormals; in whole vectors, and one element at a time."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()[65536 - h :]
    for scale in (1.0, 0.37):
        problem = sent(static(form), values, device, scale=scale)
        problem.check_bits(problem.run(route), f"scale {scale} on {route}")
    got = bytes_of(sent(static(form), values, device, scale=1.0), route)
    assert bool((got[values.isnan()] == 0x7F).all())
    assert bool((got[values == INF] == LAST[form]).all()) and bool((got[values == -INF] == 0x80 + LAST[form]).all())


@pytest.mark.parametrize("form", FORMATS)
def test_every_tie_goes_to_the_even_code(form: str, route: str, device: torch.device) -> None:
    """Each midpoint of two neighbours, and the fp32 numbers on both sides of it."""
    known = magnitudes(DTYPES[form]).astype(np.float64)
    middle = ((known[:-1] + known[1:]) / 2).astype(np.float32)
    code = np.arange(len(middle))
    inf = np.float32(INF)
    values = np.concatenate([middle, np.nextafter(middle, -inf), np.nextafter(middle, inf)])
    want = np.concatenate([code + code % 2, code, code + 1])
    values, want = np.concatenate([values, -values]), np.concatenate([want, want + 0x80])
    got = bytes_of(sent(static(form), torch.from_numpy(values), device, scale=1.0), route)
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("form", FORMATS)
def test_saturation(form: str, route: str, device: torch.device) -> None:
    """Past the largest finite code, whatever the size; e5m2 is not clamped where e4m3 is."""
    top = float(torch.finfo(DTYPES[form]).max)
    values = torch.tensor([top, top * 1.0001, top * 1.2, 1e30, 3.4e38, INF, 448.0, 449.0, 500.0, 57344.0])
    got = bytes_of(sent(static(form), torch.cat([values, -values]), device, scale=1.0), route)
    want = [LAST[form]] * 6 + ([0x7E] * 4 if form == "e4m3" else [0x5F, 0x5F, 0x60, 0x7B])
    assert got.tolist() == want + [code + 0x80 for code in want]


SCALES = [2.0**-127, 2.0**-126, 1e-38, 1e-40, 2.0**-149, 2.0**127, 3.4e38, 1.5 * 2.0**126, 1 / 3]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("form", FORMATS)
def test_scales_of_any_size(form: str, scale: float, route: str, device: torch.device) -> None:
    """A scale whose inverse is subnormal or infinite, and a subnormal one: nothing is flushed."""
    around = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.75, 100.0, 1e-3, 2.0**-9, 2.0**-10, 1.1 * 2.0**-10, -(2.0**-11)])
    values = torch.cat([around, around * torch.tensor(scale), around * 2.0**-120, around * 2.0**120])
    problem = sent(static(form), values, device, scale=scale)
    problem.check_bits(problem.run(route), f"scale {scale} on {route}")


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, -0.0, NAN, INF, -INF, -0.5, 2.0**-149], ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_a_scale_on_the_device_follows_ieee(form: str, scale: float, route: str, device: torch.device) -> None:
    """Nobody looks at it before the launch: div(1, scale), and what comes of that."""
    values = torch.tensor([0.0, -0.0, 1.0, -2.0, 1e-30, INF, NAN, 300.0])
    for dtype in ("f32", "bf16"):
        combo = Combo("rmsnorm_quant", "f32", "f32", out=form, scale=dtype)
        problem = sent(combo, values, device, scale=scale)
        problem.check_bits(problem.run(route), f"scale {scale} on {route}")


QUANT = [c for c in COMBOS if c.op in STATIC and c.weight is not None and not c.centred and c.x != "i8"]


@pytest.mark.parametrize("combo", [c for c in QUANT if c.index is None], ids=str)
def test_special_values_in_every_operator(combo: Combo, route: str, device: torch.device) -> None:
    """Ties, saturation, NaN, infinities, zeros and subnormals in each of the siblings."""
    weight = torch.cat([fill(40, DTYPES[combo.weight or "bf16"]) for fill in PATTERNS.values()])
    weight = weight - torch.tensor(combo.offset).to(weight.dtype)
    for scale in (1.0, 0.0279541015625):
        problem = sent(combo, weight, device, rows=3, scale=scale)
        problem.check_bits(problem.run(route), f"scale {scale} on {route}")


@pytest.mark.parametrize("combo", [c for c in COMBOS if c.op == "layernorm_quant" and c.bias], ids=str)
def test_special_values_of_layernorm(combo: Combo, route: str, device: torch.device) -> None:
    """A constant row has a norm of 0, so that the result is the bias."""
    bias = torch.cat([fill(40, DTYPES[combo.bias or "f32"]) for fill in PATTERNS.values()])
    shape = (2, bias.numel())
    x = torch.full(shape, 3.0, dtype=DTYPES[combo.x])
    for scale in (1.0, 0.0279541015625):
        problem = Problem(combo, shape, device, x=x, bias=bias, eps=1.0, scale=scale)
        problem.check_bits(problem.run(route), f"scale {scale} on {route}")


# ------------------------------------------------------------------ a scale a block
def _filled(values: list[float]) -> Callable[[int, torch.dtype], torch.Tensor]:
    """A pattern that repeats; what the dtype cannot hold becomes its largest number."""

    def fill(size: int, dtype: torch.dtype) -> torch.Tensor:
        wide = torch.tensor(values, dtype=torch.float64).repeat(-(-size // len(values)))[:size]
        top = torch.finfo(dtype).max
        return torch.where(wide.isfinite(), wide.clamp(-top, top), wide).to(dtype)

    return fill


def _once(value: float, rest: list[float]) -> Callable[[int, torch.dtype], torch.Tensor]:
    """One element among many."""

    def fill(size: int, dtype: torch.dtype) -> torch.Tensor:
        block = _filled(rest)(size, dtype)
        block[size - 2] = value
        return block

    return fill


ORDINARY = [1.5, -0.3, 0.0, -0.0, 7.25, -(2.0**-10), 0.011]
PATTERNS: dict[str, Callable[[int, torch.dtype], torch.Tensor]] = {
    "zeros": _filled([0.0]),
    "zeros of both signs": _filled([0.0, -0.0]),
    "ordinary": _filled(ORDINARY),
    "NaN": _once(NAN, ORDINARY),
    "a negative NaN": _once(-NAN, ORDINARY),
    "NaN among zeros": _once(NAN, [0.0]),
    "infinity": _once(INF, ORDINARY),
    "-infinity": _once(-INF, ORDINARY),
    "infinity and NaN": _once(NAN, [INF, -INF, 1.0]),
    "infinities": _filled([INF, -INF]),
    "the largest": _filled([3.4e38, -3.4e38, 1.0]),
    "one beside a huge one": _once(3e38, [1e-3, -1e-3, 0.0, -0.0, 6e4]),
    "subnormal": _filled([1e-40, -1e-40, 3e-39, 0.0, 6e-8, -6e-8]),
    "subnormal alone": _filled([1e-40, -1e-40]),
    "at the dynamic floor": _filled([1e-10, -1e-10, 5e-11, -1e-14]),
    "below the dynamic floor": _filled([9e-11, -1e-12, -1e-15, 1e-15, -0.0]),
    "at the block floor": _filled([1e-4, -1e-4, 5e-5, -1e-8]),
    "below the block floor": _filled([9e-5, -1e-6, -1e-10, 1e-10, -0.0]),
    "one element": _once(-5.0, [0.0]),
    "a power of two times 448": _once(448.0, [1.0, -3.5, 27.0]),
    "a hair above it": _once(450.0, [1.0, -3.5, 27.0]),
    "a power of two times 127": _once(-254.0, [1.0, -3.5, 27.0]),
    "a hair less": _once(253.0, [1.0, -3.5, 27.0]),
    "a power of two times 57344": _once(28672.0, [1.0, -3.5, 27.0]),
    "ties of int8": _once(127.0, [0.5, 1.5, -2.5, 126.5, -0.25]),
    "ties of e4m3": _once(448.0, [17.0, 19.0, -21.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-10)]),
    "the largest fp16": _once(65504.0, [65500.0, -1.0, 0.01]),
}
BY_BLOCK = [c for c in COMBOS if c.block_size == 128 and c.weight is not None]
BY_TOKEN = [c for c in COMBOS if c.makes_scales and c.block_size == 0 and c.weight is not None]


@pytest.mark.parametrize("combo", BY_BLOCK, ids=str)
def test_special_blocks(combo: Combo, route: str, device: torch.device) -> None:
    """Each pattern in a block of its own: no block spoils another one."""
    weight = torch.cat([fill(128, DTYPES[combo.weight or "bf16"]) for fill in PATTERNS.values()])
    problem = sent(combo, weight, device, rows=3)
    problem.check_bits(problem.run(route), f"on {route}")
    if combo.op != BLOCKED:  # a last block of three elements
        problem = sent(combo, torch.cat([weight, weight[:3]]), device, rows=2)
        problem.check_bits(problem.run(route), f"a short block on {route}")


@pytest.mark.parametrize("combo", BY_TOKEN, ids=str)
def test_special_tokens(combo: Combo, route: str, device: torch.device) -> None:
    """One scale for a row: each pattern is a row's own weight, in whole vectors and not."""
    for name, fill in PATTERNS.items():
        for h in (384, 99):
            problem = sent(combo, fill(h, DTYPES[combo.weight or "bf16"]), device, rows=2)
            problem.check_bits(problem.run(route), f"{name} on {route}")


def test_what_the_bytes_are(route: str, device: torch.device) -> None:
    """The table of special values itself, for two operators: no model in between."""
    e4m3 = next(c for c in BY_BLOCK if c.op == BLOCKED and c.x == "bf16")
    names = ("zeros of both signs", "NaN", "infinity", "-infinity", "infinity and NaN", "below the block floor")
    weight = torch.cat([PATTERNS[name](128, torch.bfloat16) for name in names])
    got = sent(e4m3, weight, device).run(route)
    assert got.scale is not None
    codes, scale = dict(zip(names, got.out.view(torch.uint8).view(-1, 128), strict=True)), got.scale[0]
    assert bool((codes["zeros of both signs"] == 0).all()) and float(scale[0]) == float(torch.tensor(1e-4) / 448)
    for i, name in ((1, "NaN"), (4, "infinity and NaN")):
        assert bool((codes[name] == 0x7F).all()) and bool(scale[i].isnan())
    largest = float(torch.tensor(torch.finfo(torch.float32).max) / 448)
    for i, name, code in ((2, "infinity", 0x7E), (3, "-infinity", 0xFE)):
        assert float(scale[i]) == largest and int(codes[name][126]) == code
        assert codes[name][:5].tolist() == [0, 0x80, 0, 0x80, 0]  # 1.5, -0.3, 0, -0, 7.25 beside an infinity
    assert float(scale[5]) == float(torch.tensor(1e-4) / 448)
    assert codes["below the block floor"][:5].tolist()[2:] == [0x80, 0, 0x80]  # -1e-10, 1e-10, -0: signs are kept
    int8 = next(c for c in BY_BLOCK if c.out == "i8")
    weight = torch.cat([PATTERNS[name](128, torch.bfloat16) for name in ("NaN", "infinity", "zeros")])
    got = sent(int8, weight, device).run(route)
    assert got.scale is not None
    codes8 = got.out.view(-1, 128)
    assert bool((codes8[0] == 0).all()) and bool(got.scale[0, 0].isnan())
    assert int(codes8[1][126]) == 127 and bool((codes8[1][:5] == 0).all()) and bool((codes8[2] == 0).all())


def test_exponents_that_no_block_has(route: str, device: torch.device) -> None:
    """ue8m0: NaN is 0xFF, an infinity counts as the largest number, a zero as the floor; missing bytes are 0."""
    combo = next(c for c in BY_BLOCK if c.form == "ue8m0_packed" and c.out == "e4m3")
    names = ("NaN", "infinity", "zeros", "a power of two times 448", "a hair above it")
    weight = torch.cat([PATTERNS[name](128, torch.bfloat16) for name in names])
    got = sent(combo, weight, device).run(route)
    assert got.scale is not None and got.scale.shape == (1, 2)
    raw = got.scale.contiguous().view(torch.uint8)[0].tolist()
    # FLT_MAX / 448 is just below 2^128 / 448 = 2^119.19: 2^120; 1e-10 / 448 = 2^-42.03: 2^-42
    assert raw == [0xFF, 127 + 120, 127 - 42, 127, 128, 0, 0, 0]


def test_a_weight_that_makes_nothing_new(route: str, device: torch.device) -> None:
    """Rows that are not ones: the store is the same, so codes agree with those of the plain operator's result."""
    x, weight = torch.randn(33, 512), gains((512,), torch.float32)
    with flashnorm.backend(route):
        norm = flashnorm.rmsnorm(x.to(device), weight.to(device))
        for form in FORMATS:
            out = torch.empty(33, 512, dtype=DTYPES[form], device=device)
            flashnorm.rmsnorm_quant(out, x.to(device), weight.to(device), 0.01)
            inverse = np.float32(1) / np.float32(0.01)
            assert_same_bits(out.cpu(), encode(norm.cpu().numpy() * inverse, DTYPES[form]), f"{form} on {route}")
