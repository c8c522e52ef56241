"""NVFP4, MXFP4, MXFP8 and SiLU in the interpreted CuTe kernels: every byte the model's, whatever tile and layout."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch

from flashnorm.kernels import tile as tiles
from flashnorm.kernels.tile import RowTile
from flashnorm.model import arithmetic, formats
from flashnorm.program import (
    AddResidual,
    Affine,
    Cast,
    LoadRow,
    QuantBlocks,
    QuantNvfp4,
    QuantTensor,
    Rms,
    RowProgram,
    Silu,
    Variant,
)
from tests import cute_emulator as emulator
from tests.cute_launch import check, dtypes_of
from tests.tolerance import EXP_TO, EXP_ULPS

pytestmark = pytest.mark.cpu_only

pytest.importorskip("cutlass")  # nothing is compiled, but its tracing code runs

B, F, S, E4, E5 = "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"
TARGETS = ({"sm": 80}, {"sm": 90}, {"sm": 100, "native_fp4": True})
MX = partial(QuantBlocks, 32, 0.0, ue8m0=True)
STORES = (
    QuantNvfp4(16),
    QuantNvfp4(32, "value", layout="swizzled"),
    QuantNvfp4(16, "device", side=True, layout="both"),
    MX(fp4=True, layout="both"),
    MX(fp4=True, ocp=True, side=True),
    MX(layout="swizzled"),
    MX(ocp=True),
)


AFFINE = (Affine(),)


def norm(store, load=None, maps=AFFINE):
    return RowProgram(load or LoadRow(), Rms(), maps, store)


def short(store):
    kind = "nvfp4" if isinstance(store, QuantNvfp4) else "mxfp4" if store.fp4 else "mxfp8"
    flags = [store.layout, *(name for name in ("ocp", "side", "global_scale") if getattr(store, name, False))]
    return "-".join([kind, str(store.block), *flags])


# ------------------------------------------------------------------ tiles, layouts, alignments
SHAPES = ((1, 32, 1), (2, 64, 1), (4, 32, 1), (8, 64, 1), (32, 64, 1), (128, 128, 1), (32, 32, 2), (64, 64, 4))


@pytest.mark.parametrize("store", STORES, ids=short)
def test_tiles(store):
    """Rows of a block to several thousand, on a thread to a cluster, one and several rows a CTA; fewer threads than a
    block has groups where it fits one round, and refused where it does not."""
    program = norm(store)
    for hidden_size in (16, 32, 48, 64, 96, 576, 2048):
        if hidden_size % store.block:
            continue
        most = tiles.lanes(hidden_size)
        for t, n, c in SHAPES:
            if t * c > most or (t == 128 and hidden_size < 2048):
                continue
            tile = RowTile(hidden_size, 8, t, n, c, early_weights=n == t, prefetch="vecs")
            if t < store.block // 8 and tile.rounds > 1:
                with pytest.raises(ValueError, match="threads a row"):
                    check(program, dtypes_of(program), hidden_size, tile)
            else:
                check(program, dtypes_of(program, x=F, weight=S), hidden_size, tile, rows=3, **TARGETS[c % 3])


@pytest.mark.parametrize("hold", ("registers", "shared", "global"))
@pytest.mark.parametrize("store", STORES, ids=short)
def test_reload_policies(store, hold):
    for load, x, residual in ((None, B, B), (AddResidual(), B, S), (AddResidual(rounded=True, dst="h"), S, F)):
        program = norm(store, load, maps=() if x == S else (Affine(1.0),))
        for hidden_size, t, n, c in ((576, 32, 64, 1), (2080, 64, 64, 1), (2048, 32, 32, 4)):
            vec, early = 8 if n > t or c > 1 else 4, hold == "registers"
            tile = RowTile(
                hidden_size, vec, t, n, c, hold=hold, staged=hold == "shared", early_weights=early, batch=3,
                late_residual=c == 4,
            )  # fmt: skip
            check(program, dtypes_of(program, x=x, residual=residual, h=residual), hidden_size, tile, rows=2, pad=1)


@pytest.mark.parametrize("vec", (8, 4, 2, 1))
def test_alignments_of_pairs(vec):
    for store, hidden_size in ((QuantNvfp4(16, layout="swizzled"), 48), (MX(fp4=True), 96)):
        for rank, pad in ((1, 0), (1, 1), (2, 3)):
            program = norm(store)
            for turns in (1, 2):
                tile = RowTile(hidden_size, vec, 4, 32, turns=turns)
                check(program, dtypes_of(program), hidden_size, tile, 6, rank, pad=pad)


@pytest.mark.parametrize("rows", (1, 127, 128, 129, 260))
def test_swizzled_scales_and_their_padding(rows):
    """Rows up to a multiple of 128 and columns up to one of 4, in tiles; the other layout has padding of its own."""
    for store, hidden_size in ((QuantNvfp4(16, layout="swizzled"), 80), (MX(fp4=True, layout="both"), 160)):
        program = norm(store, maps=())
        for t, n in ((8, 32), (4, 64)):
            if t >= store.block // 8 and hidden_size // 8 <= 4 * t:
                tile = RowTile(hidden_size, 8, t, n)
                check(program, dtypes_of(program), hidden_size, tile, rows=rows, padding=3, column=True)
    program = norm(QuantNvfp4(16, layout="both"), maps=())
    tile = RowTile(16, 8, 2, 32)
    check(program, dtypes_of(program), 16, tile, rows=rows, padding=140)  # rows beyond those that are swizzled


def test_swizzled_scales_of_one_row_a_cta():
    program = norm(QuantNvfp4(16, layout="both"))
    check(program, dtypes_of(program), 1040, RowTile(1040, 8, 64, 64), rows=3, padding=1)
    check(program, dtypes_of(program), 1040, RowTile(1040, 8, 32, 32, 4), rows=2)


# ------------------------------------------------------------------ special values, to the byte
def special(hidden_size):
    """Blocks of zeros of both signs, infinities, NaN, the largest, subnormal and ordinary numbers, side by side."""

    def fill(x):
        x[0], x[1] = 0.0, -0.0
        x[2, ::3], x[2, 1::3] = 0.0, -0.0
        x[3, hidden_size // 2], x[4, 0] = math.inf, -math.inf
        x[5, -1], x[6, 0] = math.nan, -math.nan
        x[7] = torch.finfo(x.dtype).max
        x[8] = torch.finfo(x.dtype).tiny / 8
        x[9, :70], x[10, :5], x[10, 5:40] = 0.0, -1e-38, 0.0
        x[11] *= 1e-4
        x[12, :64] *= 1e-7

    return fill


def gains(w):
    w[:11] = torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-30, -1e-30, math.inf, -1, 2, 3e38, -3e38])
    w[32:64] *= 1e-38
    w[70:72] = math.inf


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("store", STORES, ids=short)
def test_special_values(store, target):
    outs = (E4, E5) if isinstance(store, QuantBlocks) and not store.fp4 else ("uint8",)
    for out, maps in itertools.product(outs, ((), (Affine(),), (Affine(1.0), Silu()))):
        program = norm(store, maps=maps)
        change = {"x": special(192)} | ({"weight": gains} if maps else {})
        dtypes = dtypes_of(program, x=S, weight=S, out=out)
        check(program, dtypes, 192, RowTile(192, 4, 8, 32), rows=14, change=change, **target)


@pytest.mark.parametrize("gain", (1e-45, 1e-30, 1e-3, 448.0, 1e20, 1e35, 3.4e38, math.inf, math.nan))
def test_global_scales(gain):
    """Far from where they are of use, too: the quotient by 6 may be subnormal and still matter."""

    def small(x):
        x[4] = -0.0
        x[4, :16], x[5, 3] = 0.0, math.inf

    def spread(w):
        w[:64] *= 1e-38
        w[64:128] *= torch.logspace(-44, 30, 64)

    for target in TARGETS:
        program = norm(QuantNvfp4(16, "device"))
        change = {"global_scale": lambda g: g.fill_(gain), "x": small, "weight": spread}
        dtypes = dtypes_of(program, x=S, weight=S, global_scale=S)
        check(program, dtypes, 192, RowTile(192, 8, 8, 32), rows=6, change=change, **target)


# ------------------------------------------------------------------ arithmetic, by itself
def run(make, *given):
    """What kernel code makes of numbers, one a thread."""
    count = given[0].size
    given = [np.concatenate([g, np.zeros(-count % 32, g.dtype)]) for g in given]
    machine = emulator.Machine(1, given[0].size, np.zeros(1, np.uint8), None, None)
    with emulator.patched(machine):
        out = make(*(g[None, :] for g in given))
    return [np.asarray(o).reshape(-1)[:count] for o in out]


def near(values):
    """Numbers, and three neighbours on either side."""
    bits = np.asarray(values, np.float32).view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)
    return np.unique(np.clip(bits.reshape(-1), 0, 0x7F800000).astype(np.int32)).view(np.float32)


HALVES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
EVERY = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
SCALES = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def codes(values):
    """Eight codes by the model as one word, a row of eight values each."""
    pairs = formats.encode(torch.from_numpy(np.ascontiguousarray(values)), torch.float4_e2m1fn_x2).view(torch.uint8)
    return pairs.numpy().view(np.uint32)[:, 0]


def eights(values):
    values = values[~(np.isnan(values) & np.signbit(values))]  # no arithmetic makes a negative NaN
    return np.resize(values, (-(-values.size // 8), 8))


@pytest.mark.parametrize("how", ("native", "usual", "saturating"))
def test_every_number_that_matters_has_its_code(how):
    """All of bf16, and what lies next to a midpoint or to a number of the format, of both signs."""
    from flashnorm.kernels import codec4

    close = near(np.concatenate([HALVES, [0.5, 1, 1.5, 2, 3, 4, 6, 7, 7.21, 7.3, 8, 4.47, 1e-40]]))
    largest = {"native": np.inf, "usual": 6.5, "saturating": 7.99999}[how]
    values = eights(np.concatenate([v[np.abs(v) <= largest] for v in (EVERY, close, -close)]))
    for power in (1.0, 2.0**100, 2.0**-126, 2.0**127):
        factor = np.full(len(values), power / codec4.unit(how == "native"), np.float32)
        with np.errstate(over="ignore", under="ignore"):
            given = values if power == 1 else (values.astype(np.float64) / power).astype(np.float32)
            product = torch.from_numpy(given.astype(np.float64) * power).float().numpy()
        amax = np.abs(given).max(1)

        def make(*v):
            if how == "native":
                return [codec4.products(list(v[:8]), v[8])]
            return [codec4.emulated_products(list(v[:8]), v[8], v[9], how == "saturating")]

        (got,) = run(make, *given.T, factor, amax)
        some = amax != 0 if how != "native" else amax == amax
        np.testing.assert_array_equal(got[some], codes(product)[some])


@pytest.mark.parametrize("native", (False, True))
def test_quotients_have_the_codes_of_the_true_division(native):
    """Every e4m3 scale; whatever lies at a midpoint times the scale, random, subnormal and huge numbers."""
    from flashnorm.kernels import codec4, scales

    generator = np.random.default_rng(0)
    for scale in SCALES:
        sizes = np.concatenate([near(HALVES * scale), near([6 * scale, 1e-42, 1e-38])])
        sizes = np.concatenate([sizes, generator.random(64, np.float32) * 6 * scale, [0]])
        far = np.concatenate([near([6 * scale, 7 * scale, 8 * scale, 3.4e38, 448 * 6]), [np.inf]])
        values = eights(np.concatenate([sizes, -sizes]).astype(np.float32))
        far = eights(np.concatenate([far, -far, sizes]).astype(np.float32))
        with np.errstate(over="ignore", under="ignore"):
            byte = formats.encode(torch.tensor([float(scale)]), formats.E4M3).view(torch.uint8)
            # What a scale may have been rounded from; blocks with far numbers are special ones.
            for given, wanted in ((values, scale), (far, 1e6 if scale == 448 else 1e-6)):
                amax = np.abs(given).max(1)

                def make(*v):
                    value = scales.e4m3_value(v[8])
                    inverse = scales.inverse_parts(value, codec4.unit(native))
                    if native:
                        return [codec4.quotients(list(v[:8]), inverse)]
                    return [codec4.emulated_quotients(list(v[:8]), value, inverse, v[9], v[10], v[8])]

                some = np.full(len(given), byte, np.uint32), np.full(len(given), wanted, np.float32)
                (got,) = run(make, *given.T, *some, amax)
                np.testing.assert_array_equal(got[amax != 0], codes(given / scale)[amax != 0], err_msg=str(scale))


def test_scales_that_are_powers_of_two():
    """Bytes by comparison are those of the quotient, rounded; and factors the inverse of what they stand for."""
    from flashnorm.kernels import scales

    sizes = EVERY[:0x7F81]
    for dtype, largest in {formats.E2M1: 6.0, formats.E4M3: 448.0, formats.E5M2: 57344.0, torch.int8: 127.0}.items():
        a = np.concatenate([sizes, near(largest * 2.0 ** np.arange(-149.0, 113)), near(2.0 ** np.arange(-149.0, 128))])
        a = a[np.isfinite(a)]
        up, down = run(lambda v: [scales.up_byte(v, largest), scales.floor_byte(v, largest)], a)  # noqa: B023
        given = torch.from_numpy(a)
        quotient = arithmetic.div(given, torch.tensor(largest))
        np.testing.assert_array_equal(up, formats.exponent_bytes(quotient).numpy())
        if dtype != torch.int8:
            np.testing.assert_array_equal(down, formats.floor_bytes(given, dtype).numpy())
        assert max(up.max(), down.max()) <= 253
    byte = np.arange(254, dtype=np.uint32)
    (factor,) = run(lambda v: [scales.factor_of(v)], byte)
    np.testing.assert_array_equal(factor, 2.0 ** (127.0 - byte))


@pytest.mark.parametrize("sm", (80, 90))
def test_scales_in_e4m3(sm):
    from flashnorm.kernels import scales

    generator = np.random.default_rng(1)
    random = generator.integers(0, 0x7F800000, 1 << 15, np.int32).view(np.float32)
    a = np.concatenate([EVERY[:0x7F80], near(6 * SCALES), near(6 * 2.0 ** np.arange(-126, 126.0)), random])
    usual = a[a >= 6 * 2.0**-126]
    np.testing.assert_array_equal(run(lambda v: [scales.sixth(v)], usual)[0], usual / np.float32(6))
    with np.errstate(under="ignore", over="ignore"):
        for gain in np.float32([1e-3, 2.0**99, 2.0**100, 3e38]):
            got = run(lambda v, g: [scales.sixth(v, g)], a, np.full(a.size, gain))[0]
            want = gain * (a / np.float32(6))
            same = (got == want) | (np.maximum(got, want) < 2.0**-12)  # whose code is 0
            assert same.all()
    middle = (SCALES[1:] + SCALES[:-1]) / 2
    b = np.concatenate([EVERY[:0x7F81], [np.nan], near(middle), near([448, 464, 480])]).astype(np.float32)
    want = formats.encode(torch.from_numpy(b), formats.E4M3).view(torch.uint8).numpy()
    np.testing.assert_array_equal(run(lambda v: [scales.e4m3_byte(v, sm)], b)[0], want)
    every = np.arange(127, dtype=np.uint32)
    values = torch.arange(127, dtype=torch.uint8).view(formats.E4M3).float().numpy()
    np.testing.assert_array_equal(run(lambda v: [scales.e4m3_value(v)], every)[0], values)


# ------------------------------------------------------------------ SiLU
def test_silu_is_near_the_formula():
    """All of bf16, numbers around every limit, random ones; groups of which no, one or every number is far out."""
    from flashnorm.kernels import silu

    generator = np.random.default_rng(2)
    limits = near([87, 88, 88.5, 88.72, 89, 104, 1e-38, 2**-23, 2**-24, 1, np.log(2) / 2, 3.4e38])
    random = (generator.standard_normal(1 << 16) * 20).astype(np.float32)
    usual = random[np.abs(random) < 80]
    values = np.concatenate([EVERY, limits, -limits, random])
    mixed = np.stack([values, *(np.resize(usual[i:], values.size) for i in range(7))], 1)
    alone = np.resize(values, (-(-values.size // 8), 8))
    firsts = []
    for group in (mixed, alone):
        got = np.stack(run(lambda *v: silu.activate(list(v), "silu", "bfloat16"), *group.T), 1)
        want = arithmetic.silu(torch.from_numpy(group)).numpy()
        exactly = np.stack(run(lambda *v: silu.activate(list(v), "silu", "float32"), *group.T), 1)
        np.testing.assert_array_equal(exactly.view(np.int32)[~np.isnan(want)], want.view(np.int32)[~np.isnan(want)])
        assert np.isnan(exactly[np.isnan(want)]).all()
        numbers = ~np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), ~numbers)
        np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(want)[numbers])
        far = numbers & ~(np.abs(group) <= EXP_TO)
        with np.errstate(all="ignore"):
            exact = group.astype(np.float64) / (1 + np.exp(-group.astype(np.float64)))
            ulp = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126))) - 23)
        judged = np.abs(group) <= EXP_TO
        assert (np.abs(got - exact) / ulp)[judged].max() <= EXP_ULPS
        assert np.abs(got[far].view(np.int32).astype(np.int64) - want[far].view(np.int32)).max() <= EXP_ULPS
        firsts.append(got[:, 0])
    # A number has the same bits whatever stands beside it.
    np.testing.assert_array_equal(firsts[0][::8][: len(firsts[1])].view(np.int32), firsts[1].view(np.int32))


@pytest.mark.parametrize("vec", (8, 2, 1))
def test_silu_programs(vec):
    """Any H; with codes of 8 bits, and of 4."""
    for maps in ((Affine(), Silu()), (Silu(),)):
        for store, x, hidden_size in (
            (Cast(), B, 100),
            (Cast(), S, 7),
            (QuantTensor(), F, 129),
            (QuantTensor(True), B, 64),
        ):
            program = norm(store, maps=maps)
            most = min(8, tiles.lanes(hidden_size))
            for out in (E4, E5) if isinstance(store, QuantTensor) else (x,):
                tile = RowTile(hidden_size, vec, most, 32)
                check(program, dtypes_of(program, x=x, weight=S, out=out), hidden_size, tile, rows=5, pad=1)
    program = norm(QuantNvfp4(16), maps=(Affine(), Silu()))
    check(program, dtypes_of(program), 1024, RowTile(1024, vec, 32, 64), rows=3)


def test_what_the_programs_need():
    four = norm(QuantNvfp4(16), AddResidual())
    assert tiles.needs_of(Variant(four, dtypes_of(four), 4096)) == tiles.Needs(
        (2, 2), 4, heavy=True, narrow=True, dense=True, least=2
    )
    eight = norm(MX())
    assert tiles.needs_of(Variant(eight, dtypes_of(eight), 4096)) == tiles.Needs(
        (2,), 2, heavy=True, narrow=True, dense=True, least=4
    )
    assert tiles.needs_of(Variant(norm(Cast(), maps=(Affine(), Silu())), (B, B, B), 1024)).heavy
    for arch in ("sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a", "sm_100f", "sm_120f"):
        assert tiles.converts_fp4(arch), arch
    for arch in ("sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"):
        assert not tiles.converts_fp4(arch), arch
