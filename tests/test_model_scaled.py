"""The model's four bits, powers of two, tiles and SiLU: formats over all codes and all bf16, stores to the byte."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from flashnorm import model
from flashnorm.model import arithmetic, formats, stores
from flashnorm.program import Affine, Cast, LoadRow, QuantBlocks, QuantNvfp4, Rms, RowProgram, Silu, swizzled_offset
from flashnorm.reference import quantise
from tests.canonical import codes as canonical_codes
from tests.canonical import exp, silu, tiles
from tests.canonical.quantise import Blocks, by_block, nvfp4

pytestmark = pytest.mark.cpu_only

E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
INF, NAN = torch.inf, torch.nan


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def every_bf16() -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def near(values: torch.Tensor) -> torch.Tensor:
    """fp32 numbers, the three below and above each, and all of them negative."""
    shifted = torch.cat([(values.view(torch.int32) + shift).view(torch.float32) for shift in range(-3, 4)])
    return torch.cat([shifted, -shifted])


def awkward() -> torch.Tensor:
    ties = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=torch.Generator().manual_seed(1))
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 6.0, 6.5, 7.0, 8.0, 3e38, INF, -INF, NAN, -NAN])
    return torch.cat(
        [every_bf16(), near(ties), near(MAGNITUDES[1:]), special, bits.to(torch.int32).view(torch.float32)]
    )


# ------------------------------------------------------------------ e2m1
def test_e2m1_against_ml_dtypes() -> None:
    """It saturates too, but gives a NaN the code of a zero; here it is the largest code, without a sign."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml-dtypes is not installed")
    values = awkward()
    with np.errstate(invalid="ignore"):
        theirs = torch.from_numpy(values.numpy().astype(ml_dtypes.float4_e2m1fn).view("uint8").copy()) & 15
    theirs = torch.where(values.isnan(), 7, theirs)
    assert torch.equal(formats.numbers(values, E2M1), theirs)
    assert torch.equal(quantise._e2m1(values), theirs)
    assert torch.equal(torch.from_numpy(canonical_codes.code_bytes(values.numpy(), E2M1)), theirs)


def test_e2m1_against_the_nearest_of_sixteen() -> None:
    values = awkward()
    values = values[~values.isnan()].clamp(-6, 6).double()
    code = formats.numbers(values.float(), E2M1)
    away = (values.abs().unsqueeze(-1) - MAGNITUDES.double()).abs()
    best = away.amin(-1)
    mine = away.gather(-1, (code & 7).long().unsqueeze(-1)).squeeze(-1)
    assert torch.equal(mine, best)
    tied = (away == best.unsqueeze(-1)).sum(-1) > 1
    assert tied.any() and not (code[tied] & 1).any()
    assert torch.equal(code >> 3 == 1, values.signbit())


def test_every_pair() -> None:
    byte = torch.arange(256).to(torch.uint8)
    nibbles = formats.unpaired(byte)
    assert nibbles[:6].tolist() == [0, 0, 1, 0, 2, 0] and nibbles[-2:].tolist() == [15, 15]
    assert torch.equal(formats.pairs(nibbles), byte)
    values = formats.e2m1(nibbles)
    assert torch.equal(values, torch.where(nibbles > 7, -1, 1) * MAGNITUDES[(nibbles & 7).long()])
    encoded = formats.encode(values, E2M1)
    assert encoded.dtype == E2M1 and torch.equal(encoded.view(torch.uint8), byte)
    assert torch.equal(torch.from_numpy(canonical_codes.decode(encoded)), values)


def test_steps_of_pairs() -> None:
    """-0 is +0; two numbers of a byte are two elements."""
    a, b = (torch.tensor(t, dtype=torch.uint8).view(E2M1) for t in ([0x80, 0x71, 0x9F], [0x08, 0x60, 0x1F]))
    assert model.steps(a, b).tolist() == [0, 0, 1, 1, 0, 2]
    assert model.steps(a[1:2], torch.tensor([0.3, 4.9], dtype=torch.float64)).tolist() == [0, 1]


# ------------------------------------------------------------------ powers of two
def test_exponent_bytes_against_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml-dtypes is not installed")
    byte = torch.arange(256).to(torch.uint8)
    theirs = torch.from_numpy(byte.numpy().view(ml_dtypes.float8_e8m0fnu).astype("float32"))
    assert torch.equal(formats.powers(byte).nan_to_num(nan=0), theirs.nan_to_num(nan=0))
    assert theirs.isnan().tolist() == formats.powers(byte).isnan().tolist() == [False] * 255 + [True]


@pytest.mark.parametrize(("dtype", "down"), [(E4M3, 8), (E5M2, 15), (E2M1, 2)], ids=str)
def test_powers_rounded_down(dtype: torch.dtype, down: int) -> None:
    """floor(log2 amax) - d by exact comparison, for every power of two of fp32 and the numbers beside it."""
    for e in range(-149, 128):
        power = Fraction(2) ** e
        for number, floor in ((power, e), (power * 3 / 2, e), (power * 2 - Fraction(2) ** max(e - 23, -149), e)):
            if number.denominator > 2**149 or number < power:
                continue
            byte = max(0, min(254, 127 + floor - down))
            given = torch.tensor([float(number)])
            assert formats.floor_bytes(given, dtype).tolist() == [byte], number
            assert quantise._floor_bytes(given, formats.LARGEST[dtype]).tolist() == [byte]
            assert canonical_codes.floor_bytes(given.numpy(), dtype).tolist() == [byte]
    odd = torch.tensor([0.0, NAN])
    assert formats.floor_bytes(odd, dtype).tolist() == quantise._floor_bytes(odd, formats.LARGEST[dtype]).tolist()
    assert formats.floor_bytes(odd, dtype).tolist() == [0, 255]


# ------------------------------------------------------------------ tiles
@pytest.mark.parametrize("rows", [1, 17, 127, 128, 129])
def test_tiles(rows: int) -> None:
    """Three writings of them, and the offset of each byte; what is beyond rows and blocks is zero."""
    for blocks in range(1, 10):
        plain = torch.randint(1, 256, (rows, blocks), generator=torch.Generator().manual_seed(blocks)).to(torch.uint8)
        made = formats.swizzled(plain)
        columns = -(-blocks // 4) * 4
        assert made.shape == (-(-rows // 128) * 128, columns)
        wanted = torch.full((made.numel(),), 0x7F, dtype=torch.uint8)
        places = [swizzled_offset(row, block, columns) for row in range(rows) for block in range(blocks)]
        rest = set(range(made.numel())) - set(places)
        wanted[torch.tensor(places)] = plain.flatten()
        wanted[torch.tensor(sorted(rest), dtype=torch.long)] = 0
        assert len(rest) == made.numel() - rows * blocks
        assert torch.equal(made.flatten(), wanted)
        assert torch.equal(quantise.in_tiles(plain), made) and torch.equal(tiles(plain), made)
        assert torch.equal(formats.unswizzled(made, rows, blocks), plain)
        assert torch.equal(formats.unswizzled(made.double(), rows, blocks), plain.double())


# ------------------------------------------------------------------ SiLU
def test_exp_is_within_its_bound_and_the_same_in_numpy() -> None:
    """1.2 ulp between its limits, subnormal results beyond which there are none."""
    t = torch.cat([torch.linspace(-87, 88.5, 1 << 19), random(1 << 16), every_bf16()])
    t = torch.cat([t, near(torch.tensor([87.0, 88.0, 88.5, 89.0, 0.5, 0.34657359, 1.0, 1e-30]))])
    got = arithmetic.exp(t)
    assert model.same_bits({"e": got}, {"e": torch.from_numpy(exp(t.numpy()))})
    assert torch.equal(got.isnan(), t.isnan()) and torch.equal(got == INF, t > 88.5)
    inside = (t >= -87) & (t <= 88.5)
    exact = torch.exp(t[inside].double())
    ulp = torch.exp2(torch.floor(torch.log2(exact)) - 23)
    assert float(((got[inside].double() - exact) / ulp).abs().max()) <= 1.2
    assert torch.equal(got[t < -87], torch.full_like(got[t < -87], float(arithmetic.exp(torch.tensor(-87.0)))))


def test_silu_is_the_same_in_numpy_and_near_the_formula() -> None:
    y = torch.cat([every_bf16(), random(1 << 16, seed=1) * 8, torch.linspace(-100, 100, 1 << 18)])
    got = arithmetic.silu(y)
    assert model.same_bits({"y": got}, {"y": torch.from_numpy(silu(y.numpy()))})
    exact = y.double() / (1 + torch.exp(-y.double()))
    inside = y.abs() <= 80
    assert float(((got.double() - exact)[inside] / exact[inside]).nan_to_num(nan=0).abs().max()) <= 3 * 2.0**-23
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, 88.0, -88.0, -88.5, -89.0, 3e38, -3e38])
    got = arithmetic.silu(special)
    assert got.isnan().tolist() == [False, False, False, True, True, *[False] * 6]
    assert got[:3].tolist() == [0.0, -0.0, INF] and got[:2].signbit().tolist() == [False, True]
    assert got[5] == 88 and -1e-35 < got[6] < 0 and got[7] < 0
    assert got[8:].tolist() == [0.0, float(torch.tensor(3e38)), 0.0] and got[8:].signbit().tolist() == [
        True,
        False,
        True,
    ]
    program = RowProgram(LoadRow(), Rms(), (Affine(), Silu()), Cast())
    x = random(5, 300)
    given = {"x": x, "weight": random(300, seed=3), "out": x}
    steps = {name: reader(program, given, {"eps": 1e-6})["out"] for name, reader in
             (("canonical", model.canonical), ("exact", model.exact))}  # fmt: skip
    assert float((steps["canonical"] - steps["exact"]).abs().max()) < 1e-5


# ------------------------------------------------------------------ stores, against the two other writings
BLOCK_ROWS = torch.tensor(
    [
        [0.0] * 8, [-0.0] * 8, [NAN, 0.0] * 4, [-NAN, 1.0] * 4, [INF, 1.0] * 4, [-INF, -3.0] * 4, [3.4e38, -1.0] * 4,
        [1e-45, -1e-45] * 4, [1e-39, -1e-38] * 4, [6.0, -6.0] * 4, [6.0000005, 5.0, 2.5, -0.25] * 2, [INF, NAN] * 4,
        [448.0, -464.0] * 4, [7.0, 3.5, 1.75, -0.875] * 2, [-1e-6, 1e-6] * 4, [1.17e-38, -5e-39] * 4,
    ]
)  # fmt: skip


def rows_of(block: int) -> torch.Tensor:
    """Blocks of special numbers, of bf16 numbers of every size, and of random ones: [M, 8 blocks]."""
    special = BLOCK_ROWS.repeat(1, block // 8).reshape(-1, 8 * block)
    sizes = random(64, 8 * block) * random(64, 1, seed=1).mul(20).exp2()
    return torch.cat([special, sizes, sizes.bfloat16().float(), every_bf16()[: 8 * block * 64].view(-1, 8 * block)])


def outputs(
    stage: QuantBlocks | QuantNvfp4, y: torch.Tensor, dtype: torch.dtype = torch.uint8
) -> dict[str, torch.Tensor]:
    """Poisoned operands, as kernels get them."""
    rows, blocks = len(y), stage.blocks(y.shape[-1])

    def poison(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0x7F, dtype=torch.uint8)

    out = poison(rows, y.shape[-1] // (2 if dtype == torch.uint8 else 1)).view(dtype)
    tiled = poison(-(-rows // 128) * 128, -(-blocks // 4) * 4)
    scale = {"scale": tiled} if stage.layout != "rows" else {"scale": poison(rows, blocks)}
    return {"out": out, **scale, **({"scale_rows": poison(rows + 2, blocks)} if stage.layout == "both" else {})}


@pytest.mark.parametrize("gain", [None, 1.0, 61.3, 1e-3, 2.0**-40, 3e38, INF])
@pytest.mark.parametrize("block", [16, 32])
def test_nvfp4_to_the_byte(block: int, gain: float | None) -> None:
    y = rows_of(block)
    stage = QuantNvfp4(block, "" if gain is None else "value", layout="both")
    got = stores.canonical_nvfp4(stage, y, outputs(stage, y), {} if gain is None else {"global_scale_value": gain})
    codes, scale = nvfp4(y.numpy(), block, gain)
    assert torch.equal(got["out"], codes.view(torch.uint8))
    assert torch.equal(got["scale_rows"][: len(y)], scale.view(torch.uint8)) and not got["scale_rows"][len(y) :].any()
    assert torch.equal(got["scale"], tiles(scale.view(torch.uint8)))
    made, kept = quantise.nvfp4(y, block, None, 1.0 if gain is None else gain)
    assert torch.equal(made, got["out"]) and torch.equal(kept, scale.view(torch.uint8))
    device = stores.canonical_nvfp4(
        replace(stage, global_scale="device"), y, {**outputs(stage, y), "global_scale": torch.tensor([gain or 1.0])}, {}
    )
    assert model.same_bits(device, got)


def test_nvfp4_of_special_blocks() -> None:
    """Scale and first two codes of every special block of 16."""
    y = BLOCK_ROWS.repeat(1, 2)
    stage = QuantNvfp4(16, "value")
    got = stores.canonical_nvfp4(stage, y, outputs(stage, y), {"global_scale_value": 1.0})
    found = [(int(s), int(c)) for s, c in zip(got["scale"][:, 0], got["out"][:, 0], strict=True)]
    nothing, nan, e4m3_one = (0, 0x00), (0x7F, 0x77), 0x38
    assert found == [
        nothing, nothing, nan, nan, (0x7E, 0x07), (0x7E, 0x8F), (0x7E, 0x87),
        nothing, nothing, (e4m3_one, 0xF7), (e4m3_one, 0x67), nan,
        (0x6A, 0xF7), (0x39, 0x57), nothing, nothing,
    ]  # fmt: skip
    broken = stores.canonical_nvfp4(stage, y, outputs(stage, y), {"global_scale_value": NAN})
    assert (broken["scale"] == 0x7F).all() and (broken["out"][2:] == 0x77).all()


@pytest.mark.parametrize("ocp", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, E2M1], ids=str)
def test_powers_of_two_to_the_byte(dtype: torch.dtype, ocp: bool) -> None:
    y = rows_of(32)
    stage = QuantBlocks(32, 0.0, ue8m0=True, ocp=ocp, fp4=dtype == E2M1, layout="both")
    got = stores.canonical_blocks(stage, y, outputs(stage, y, torch.uint8 if dtype == E2M1 else dtype), {})
    codes, scale = by_block(y.numpy(), Blocks(32, 0.0, power=True, down=ocp), dtype)
    assert torch.equal(got["out"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(got["scale_rows"][: len(y)], scale) and torch.equal(got["scale"], tiles(scale))
    rule = "ocp" if ocp else "up"
    made, kept = quantise.by_blocks(y, dtype, len(y), block=32, floor=0.0, scale_format="ue8m0", scale_rule=rule)
    assert torch.equal(made.view(torch.uint8), got["out"].view(torch.uint8)) and torch.equal(kept, scale)


@pytest.mark.parametrize("dtype", [E4M3, E2M1], ids=str)
def test_no_element_saturates_with_scales_rounded_up(dtype: torch.dtype) -> None:
    y = rows_of(32)
    y = y[(y.abs() < 3e38).all(-1)]
    largest = formats.LARGEST[dtype]
    for ocp in (False, True):
        stage = QuantBlocks(32, 0.0, ue8m0=True, ocp=ocp, fp4=dtype == E2M1)
        got = stores.canonical_blocks(stage, y, outputs(stage, y, torch.uint8 if dtype == E2M1 else dtype), {})
        quotient = y.unflatten(-1, (-1, 32)).double() / formats.powers(got["scale"]).double().unsqueeze(-1)
        assert bool((quotient.abs() <= largest).all()) != ocp


# ------------------------------------------------------------------ is there a better code?
def the_best(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The least error that any of the sixteen codes has, with this scale, in fp64."""
    values = torch.cat([MAGNITUDES, -MAGNITUDES]).double()
    return (y.double().unsqueeze(-1) - values * scale.double().unsqueeze(-1)).abs().amin(-1)


@pytest.mark.parametrize("gain", [1.0, 61.3, 448.0])
@pytest.mark.parametrize(
    "stage", [QuantNvfp4(16, "value"), QuantBlocks(32, 0.0, ue8m0=True, fp4=True)], ids=["nv", "mx"]
)
def test_no_code_is_worse_than_the_best_of_sixteen(stage: QuantBlocks | QuantNvfp4, gain: float) -> None:
    """For the scale that is stored; up to the rounding of one multiplication and one division."""
    y = random(64, 512) * random(64, 1, seed=1).mul(3).exp2()
    maker = stores.canonical_nvfp4 if isinstance(stage, QuantNvfp4) else stores.canonical_blocks
    got = maker(stage, y, outputs(stage, y), {"global_scale_value": gain})  # type: ignore[operator]
    if isinstance(stage, QuantNvfp4):
        scale = got["scale"].view(E4M3).double() / float(torch.tensor(gain))
    else:
        scale = formats.powers(got["scale"]).double()
    wide = scale.repeat_interleave(stage.block, -1)
    error = (y.double() - formats.e2m1(formats.unpaired(got["out"])).double() * wide).abs()
    assert bool((error <= the_best(y, wide) + 2.0**-22 * y.abs()).all())
    assert bool((wide > 0).any())


# ------------------------------------------------------------------ the two readers
@pytest.mark.parametrize("layout", ["rows", "swizzled", "both"])
@pytest.mark.parametrize("form", ["nvfp4", "e4m3", "mxfp4", "mxfp4-ocp", "mxfp8", "mxfp8-ocp"])
def test_bits_and_formula_agree(form: str, layout: str) -> None:
    """To a step of codes and scales, tiles and their padding included; and codes follow the scale beside them."""
    x = random(133, 320) * random(133, 1, seed=1).mul(2).exp2()
    x[0], x[1, 5], x[2, 7], x[4, :64] = 0, NAN, INF, 0
    stage: QuantBlocks | QuantNvfp4 = {
        "nvfp4": QuantNvfp4(16, "value"), "e4m3": QuantNvfp4(32, ""),
    }.get(form) or QuantBlocks(32, 0.0, ue8m0=True, ocp="ocp" in form, fp4="fp4" in form)  # fmt: skip
    stage = replace(stage, layout=layout, side=True)
    program = RowProgram(LoadRow(), Rms(), (Affine(),), stage)
    made = outputs(stage, x, E4M3 if "fp8" in form else torch.uint8)
    given = {"x": x, "weight": random(320, seed=2), "normed_out": x.bfloat16(), **made}
    numbers = {"eps": 1e-6, "global_scale_value": 61.3}
    got = model.canonical(program, given, numbers)
    assert {name: (t.shape, t.dtype) for name, t in got.items()} == {
        o.name: (given[o.name].shape, given[o.name].dtype) for o in program.operands() if o.written
    }
    typed = {o.name: o.dtypes[0] for o in program.operands() if o.raw}
    seen = {name: t.view(getattr(torch, typed.get(name, str(t.dtype)[6:]))) for name, t in got.items()}
    for stored in (None, got, seen):
        formula = model.exact(program, given, numbers, stored)
        for name, t in seen.items():
            steps = model.steps(t, formula[name])
            assert int(steps.max()) <= 1 and float((steps == 0).double().mean()) > 0.999, (name, stored is None)
    if form == "mxfp4":
        halved = {**got, "scale": torch.where(got["scale"] > 1, got["scale"] - 1, got["scale"])}
        doubled = model.exact(program, given, numbers, halved)["out"]
        assert torch.equal(doubled[5:], formula["out"][5:] * 2)
