"""The model that `flashnorm verify` and the benchmarks hold kernels to: its arithmetic, its formats, its stages."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from flashnorm import model
from flashnorm.model import arithmetic, formats, programs
from flashnorm.program import (
    AddResidual,
    Affine,
    AffineBias,
    Bias,
    Cast,
    LoadRow,
    MeanVar,
    QuantBlocks,
    QuantTensor,
    Rms,
    Round,
    RowProgram,
    SaveRstd,
    Stage,
)

pytestmark = pytest.mark.cpu_only


def _round(value: Fraction) -> float:
    """A rational to the nearest fp32 value, ties to even; finite, normal or zero."""
    if value == 0:
        return 0.0
    sign, value = (-1, -value) if value < 0 else (1, value)
    exponent = 0
    while value >= 1 << 24:
        value, exponent = value / 2, exponent + 1
    while value < 1 << 23:
        value, exponent = value * 2, exponent - 1
    return sign * float(round(value)) * 2.0**exponent  # Fraction rounds ties to even


def _fp32(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_fma_rounds_once() -> None:
    rng = random.Random(1)
    a, b, c = [], [], []
    for _ in range(4000):
        a.append(rng.uniform(1, 2))
        b.append(rng.uniform(1, 2))
        # From addends that cancel the product to ones that lie far below its last bit.
        c.append(rng.choice((-1, 1)) * rng.uniform(1, 2) * 2.0 ** rng.randrange(-60, 40))
    # The product is 1 + 2^-22 + 2^-46; with c = 2^-24 a sum in fp64 lands on a tie that the exact sum is not on.
    a += [1 + 2.0**-23] * 2
    b += [1 + 2.0**-23] * 2
    c += [2.0**-24, -(2.0**-24)]
    x, y, z = _fp32(a), _fp32(b), _fp32(c)
    got = arithmetic.fma(x, y, z).tolist()
    numbers = ([Fraction(v) for v in t.tolist()] for t in (x, y, z))
    assert got == [_round(i * j + k) for i, j, k in zip(*numbers, strict=True)]


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("hidden", [1, 3, 8, 9, 77, 256, 300, 8192, 8200, 20011])
def test_canonical_sum_against_exact_rationals(hidden: int, squared: bool) -> None:
    generator = torch.Generator().manual_seed(hidden)
    v = torch.randn(hidden, generator=generator) * 3
    terms = [Fraction(t) for t in v.tolist()]
    lanes = 1
    while lanes < min(1024, -(-hidden // 8)):
        lanes *= 2
    acc = [[Fraction(0)] * 8 for _ in range(lanes)]
    for i, t in enumerate(terms):
        lane, position = i // 8 % lanes, i % 8
        acc[lane][position] = Fraction(_round((t * t if squared else t) + acc[lane][position]))

    def add(p: Fraction, q: Fraction) -> Fraction:
        return Fraction(_round(p + q))

    def positions(p: list[Fraction]) -> Fraction:
        return add(add(add(p[0], p[4]), add(p[2], p[6])), add(add(p[1], p[5]), add(p[3], p[7])))

    def fold(values: list[Fraction]) -> Fraction:
        s = len(values) // 2
        while s >= 1:
            values = [add(values[i], values[i + s]) for i in range(s)]
            s //= 2
        return values[0]

    lane_sums = [positions(p) for p in acc]
    width = min(32, lanes)
    wanted = fold([fold(lane_sums[i : i + width]) for i in range(0, lanes, width)])
    assert model.canonical_sum(v[None], v[None] if squared else None).tolist() == [float(wanted)]


def test_steps_counts_representable_values() -> None:
    one = torch.tensor([1.0, -1.0, 0.0, 1.0, torch.nan, torch.nan], dtype=torch.bfloat16)
    other = torch.tensor([1.0078125, -1.0078125, -0.0, -1.0, torch.nan, 1.0], dtype=torch.bfloat16)
    apart = model.steps(one, other).tolist()
    assert apart[:3] == [1, 1, 0]
    assert apart[3] == 2 * 0x3F80
    assert apart[4:] == [0, 1 << 31]


def test_exact_and_canonical_agree_and_round_where_the_mode_says() -> None:
    x = torch.full((1, 16), 1.0, dtype=torch.bfloat16)
    residual = torch.full((1, 16), 0.00396, dtype=torch.bfloat16)
    weight = torch.linspace(0.5, 2.0, 16, dtype=torch.bfloat16)
    given = {"x": x, "residual": residual, "weight": weight}
    sums = {}
    for rounded in (False, True):
        program = RowProgram(AddResidual(rounded=rounded), Rms(), (), Cast("x"))
        h, _ = programs._load(program, given, {})
        sums[rounded] = float(h[0, 0])
        written = model.canonical(program, given, {"eps": 1.0})
        assert float(written["residual"][0, 0]) == 1.0078125
        formula = model.exact(program, given, {"eps": 1.0})["x"]
        assert int(model.steps(written["x"], formula).max()) <= 1
    assert sums[False] == pytest.approx(1.0039673, abs=1e-7)
    assert sums[True] == 1.0078125


def test_unknown_stage_is_refused() -> None:
    program = RowProgram(LoadRow(), Rms(), (Stage(),), Cast())
    given = {"x": torch.ones(1, 8), "out": torch.empty(1, 8)}
    for reader in (model.exact, model.canonical):
        with pytest.raises(NotImplementedError, match="Stage"):
            reader(program, given, {"eps": 1e-6})
    offset = RowProgram(LoadRow(), Rms(), (Affine(offset=1.0),), Cast())
    given["weight"] = torch.zeros(8)
    assert model.exact(offset, given, {"eps": 0.0})["out"].tolist() == [[1.0] * 8]


# ------------------------------------------------------------------ formats
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def raw(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.uint8)


def _awkward_numbers() -> torch.Tensor:
    """All bf16 and fp16 numbers, the points half-way between codes with their fp32 neighbours, and random bits."""
    half = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    numbers = [half.view(torch.bfloat16).float(), half.view(torch.float16).float()]
    for dtype in FP8:
        known = torch.arange(0x7C, dtype=torch.uint8).view(dtype).float().sort().values
        middle = (known[1:] + known[:-1]) / 2
        for shift in (-2, -1, 0, 1, 2):
            near = (middle.view(torch.int32) + shift).view(torch.float32)
            numbers += [near, -near]
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(0))
    return torch.cat([*numbers, bits.to(torch.int32).view(torch.float32)])


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_codes_against_ml_dtypes(dtype: torch.dtype) -> None:
    """An encoder that nobody here wrote. It does not saturate: its overflows and NaN are put right first."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml-dtypes is not installed")
    values = _awkward_numbers()
    with np.errstate(invalid="ignore"):  # NaN to a format
        theirs = values.numpy().astype(getattr(ml_dtypes, str(dtype).removeprefix("torch.")))
    codes = torch.from_numpy(theirs.view("uint8").copy())
    largest = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}[dtype]
    overflow = (codes & 0x7F) > largest
    codes = torch.where(overflow, largest | (values < 0).to(torch.uint8) * 0x80, codes)
    codes = torch.where(values.isnan(), 0x7F, codes)
    assert torch.equal(raw(formats.encode(values, dtype)), codes)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_code_is_its_own_value(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    finite = (codes & 0x7F) <= {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}[dtype]
    again = raw(formats.encode(codes.view(dtype).float(), dtype))
    assert torch.equal(again[finite], codes[finite])


def test_codes_that_the_formats_name() -> None:
    values = torch.tensor([448, 464, 465, 1e30, torch.inf, -torch.inf, torch.nan, -0.0, -1e-30, 2.0**-10, 2.0**-9])
    assert raw(formats.encode(values, FP8[0])).tolist() == [126, 126, 126, 126, 126, 254, 127, 128, 128, 0, 1]
    values = torch.tensor([57344, 61440, 1e30, -torch.inf, -torch.nan, -0.0, 2.0**-17, 1.5 * 2.0**-17, 448, 500])
    assert raw(formats.encode(values, FP8[1])).tolist() == [123, 123, 123, 251, 127, 128, 0, 1, 95, 96]
    values = torch.tensor([0.5, 1.5, -2.5, 126.5, 127.4, 128, -1e9, torch.inf, -torch.inf, torch.nan, -0.4])
    assert formats.encode(values, torch.int8).tolist() == [0, 2, -2, 126, 127, 127, -127, 127, -127, 0, 0]
    numbers = torch.arange(-(1 << 14), 1 << 14) / 64
    assert torch.equal(formats.encode(numbers, torch.int8), numbers.round().clamp(-127, 127).to(torch.int8))


def test_exponents() -> None:
    for e in range(-149, 128):
        power = 2.0**e
        byte = max(0, e + 127)
        scale = torch.tensor([power, power * (1 + 2.0**-23) if e >= -126 else power])
        assert formats.exponent_bytes(scale).tolist() == [byte, min(254, byte + 1) if e >= -126 else byte], e
    assert formats.exponent_bytes(torch.tensor([2.0**-127, 2.0**-127 + 2.0**-149])).tolist() == [0, 1]
    odd = torch.tensor([0.0, -0.0, -1.0, torch.nan, torch.inf, torch.finfo(torch.float32).max])
    assert formats.exponent_bytes(odd).tolist() == [0, 0, 0, 255, 254, 254]
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert formats.powers(byte)[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert formats.powers(byte)[255].isnan()


def test_bytes_are_packed_low_first() -> None:
    byte = torch.tensor([[1, 2, 3, 0xFF, 5]], dtype=torch.uint8)
    word = formats.pack(byte)
    assert word.dtype == torch.int32
    assert word.tolist() == [[0xFF030201 - (1 << 32), 5]]
    assert formats.unpack(word).tolist() == [[1, 2, 3, 0xFF, 5, 0, 0, 0]]


# ------------------------------------------------------------------ stages
def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("hidden", [1, 5, 8, 77, 300, 9000])
def test_layernorm_operation_by_operation(hidden: int) -> None:
    """NumPy rounds every fp32 operation once; the fused ones are made of fp64, where they are exact enough here."""
    h, weight, bias = _random(3, hidden) * 3 + 1000, _random(hidden, seed=1), _random(hidden, seed=2)
    program = RowProgram(LoadRow(), MeanVar(), (AffineBias(),), Cast(), (SaveRstd(),))
    given = {"x": h, "weight": weight, "bias": bias, "out": h, "rstd": h[:, 0]}
    got = model.canonical(program, given, {"eps": 1e-5})

    def total(values: np.ndarray, squared: bool = False) -> np.ndarray:
        t = torch.from_numpy(values)
        return model.canonical_sum(t, t if squared else None).numpy()[:, None]

    x, count = h.numpy(), np.float32(hidden)
    d = x - total(x) / count
    m2 = total(d) / count
    var = (-m2.astype(np.float64) * m2 + total(d, squared=True) / count).astype(np.float32)
    rstd = np.float32(1) / np.sqrt(np.maximum(var, np.float32(0)) + np.float32(1e-5))
    n = (d - m2) * rstd
    y = arithmetic.fma(torch.from_numpy(n), weight.expand_as(h), bias.expand_as(h))
    assert model.same_bits(got, {"out": y, "rstd": torch.from_numpy(rstd[:, 0])})
    shifted = model.canonical(RowProgram(LoadRow(), MeanVar(), (Bias(),), Cast()), given, {"eps": 1e-5})
    assert torch.equal(shifted["out"], torch.from_numpy(n + bias.numpy()))
    formula = model.exact(program, given, {"eps": 1e-5})
    assert float((got["out"] - formula["out"]).abs().max()) < 1e-5


def test_a_row_of_equal_numbers_has_no_variance() -> None:
    row = torch.full((1, 1000), 7.7)
    given = {"x": row, "out": row, "rstd": row[:, 0]}
    program = RowProgram(LoadRow(), MeanVar(), (), Cast(), (SaveRstd(),))
    got = model.canonical(program, given, {"eps": 1e-6})
    assert not got["out"].any()
    assert got["rstd"].tolist() == pytest.approx([1000.0])
    given["x"] = torch.where(torch.arange(1000) == 3, torch.nan, row)
    assert model.canonical(program, given, {"eps": 1e-6})["out"].isnan().all()


def test_rows_by_index_and_scale() -> None:
    pool = torch.tensor([[1, -128], [127, 3]], dtype=torch.int8)
    given = {
        "x": pool, "row_index": torch.tensor([1, -1, 0, 2]), "input_scale": torch.tensor([0.5, 2.0]),
        "out": torch.empty(4, 2, dtype=torch.float16), "rstd": torch.empty(4),
    }  # fmt: skip
    program = RowProgram(LoadRow(indexed=True, scaled=True), Rms(), (), Cast(), (SaveRstd(),))
    for reader in (model.canonical, model.exact):
        got = reader(program, given, {"eps": 1e-6})
        assert got["rstd"].isnan().tolist() == [False, True, False, True]
        assert got["out"].isnan().all(-1).tolist() == [False, True, False, True]
        want = torch.nn.functional.rms_norm(torch.tensor([[254.0, 6.0], [0.5, -64.0]]), (2,), None, 1e-6)
        assert torch.equal(got["out"][[0, 2]].half(), want.half())


def test_t_is_the_dtype_that_a_program_rounds_to() -> None:
    """The input's; that of an int8 input's result; of its weight; bfloat16."""
    x, weight = torch.ones(1, 3, dtype=torch.int8), torch.tensor([1.0009765625, 1.0, 1.0])
    for out, weight_dtype, kind in (
        (torch.float16, torch.float32, torch.float16),
        (torch.float8_e4m3fn, torch.float32, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16),
    ):
        given = {
            "x": x, "input_scale": torch.ones(1), "weight": weight.to(weight_dtype), "out": torch.empty(1, 3).to(out),
        }  # fmt: skip
        store = Cast() if out is torch.float16 else QuantTensor()
        program = RowProgram(LoadRow(scaled=True), Rms(), (Affine(round_norm=True), Round()), store)
        assert programs._kind(program, given) == kind


def test_codes_are_judged_with_the_scale_beside_them() -> None:
    y = _random(6, 300).bfloat16()
    program = RowProgram(LoadRow(), Rms(), (Round(),), QuantBlocks(128, 1e-10, ue8m0=True, packed=True, side=True))
    given = {
        "x": y, "out": torch.empty(6, 300, dtype=torch.float8_e4m3fn), "normed_out": y,
        "scale": torch.empty(9, 1, dtype=torch.int32),
    }  # fmt: skip
    got = model.canonical(program, given, {"eps": 1e-6})
    assert got["scale"].shape == (9, 1) and not got["scale"][6:].any()
    for stored in (None, got):
        formula = model.exact(program, given, {"eps": 1e-6}, stored)
        assert {name: int(model.steps(got[name], formula[name]).max()) for name in got} == {
            "out": 0, "scale": 0, "normed_out": 0,
        }  # fmt: skip
    wrong = {**got, "scale": got["scale"] - 1}  # half the first scale of every row
    doubled = model.exact(program, given, {"eps": 1e-6}, wrong)["out"]
    assert torch.equal(doubled[:, :128], formula["out"][:, :128] * 2)
    assert torch.equal(doubled[:, 128:], formula["out"][:, 128:])


def test_steps_of_codes() -> None:
    codes = torch.tensor([0x38, 0x38, 0x00, 0x01, 0x7F, 0x7F, 0x7E], dtype=torch.uint8)
    other = torch.tensor([0x39, 0xB8, 0x80, 0x81, 0x7F, 0x01, 0x7D], dtype=torch.uint8)
    e4m3, e5m2 = (model.steps(codes.view(d), other.view(d)).tolist() for d in FP8)
    assert e4m3 == [1, 0x70, 0, 2, 0, 1 << 31, 1]
    assert e5m2 == [1, 0x70, 0, 2, 0, 1 << 31, 0]  # 0x7D and 0x7E are NaN there
    whole = torch.tensor([3, -127], dtype=torch.int8)
    assert model.steps(whole, torch.tensor([4.4, 127.0])).tolist() == [1, 254]
    assert model.steps(torch.tensor([254, 7], dtype=torch.uint8), torch.tensor([254.0, 9.0])).tolist() == [0, 2]
    assert not model.same_bits({"a": codes[4:5].view(FP8[1])}, {"a": codes[6:].view(FP8[1])})
