"""The CuTe kernels, interpreted: every bit they write is the model's, whatever the tile, and no other byte changes."""

import math

import pytest

from flashnorm.kernels import plans
from flashnorm.kernels import tile as tiles
from flashnorm.kernels.tile import WIDTH, Needs, RowTile
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
)
from tests.cute_launch import check, dtypes_of

pytestmark = pytest.mark.cpu_only

pytest.importorskip("cutlass")  # nothing is compiled, but its tracing code runs

B, F, S = "bfloat16", "float16", "float32"
E4, E5, I32, I64 = "float8_e4m3fn", "float8_e5m2", "int32", "int64"
HIDDEN = (1, 3, 7, 8, 9, 64, 100, 128, 257, 576, 1000, 2048, 4097, 5120, 8192, 12288)
WIDE = (20480, 32768, 40000, 65536, 65537, 131072, 200001, 262144)

NORM = RowProgram(LoadRow(), Rms(), (Affine(),), Cast())
BARE = RowProgram(LoadRow(), Rms(), (), Cast())
GEMMA = RowProgram(LoadRow(), Rms(), (Affine(1.0),), Cast("x"))
FUSED = RowProgram(AddResidual(), Rms(), (Affine(),), Cast("x"))
TRAIN = RowProgram(AddResidual(rounded=True, dst="h"), Rms(), (Affine(0.0, True),), Cast(), (SaveRstd(),))
STANDARD = RowProgram(LoadRow(), MeanVar(), (), Cast(), (SaveRstd(),))
CENTRED = RowProgram(LoadRow(), MeanVar(), (Bias(),), Cast())
FUSED_LAYER = RowProgram(AddResidual(), MeanVar(), (AffineBias(),), Cast("x"))
TRAIN_LAYER = RowProgram(AddResidual(rounded=True, dst="h"), MeanVar(), (Affine(),), Cast(), (SaveRstd(),))
QUANT = RowProgram(LoadRow(), Rms(), (Affine(),), QuantTensor())
LLAMA = RowProgram(AddResidual(), Rms(), (Affine(0.0, True), Round()), QuantTensor(on_device=True))
LAYER_QUANT = RowProgram(LoadRow(), MeanVar(), (AffineBias(), Round()), QuantTensor())
FP8_BLOCK = RowProgram(AddResidual(), Rms(), (Affine(), Round()), QuantBlocks(128, floor=1e-4, ratio=True, side=True))


def dynamic(load=None, maps=None, stats=None, **store):
    store = QuantBlocks(**{"block": 128, "floor": 1e-10, **store})
    return RowProgram(load or LoadRow(), stats or Rms(), (Affine(), Round()) if maps is None else maps, store)


# ------------------------------------------------------------------ tiles
def tile_grid(hidden_size, vec=8):
    """Tiles of every shape that fits H."""
    most = tiles.lanes(hidden_size)
    for t in (1, 2, 4, 8, 16, 32, 64, 256, 1024):
        if t > most or -(-hidden_size // 8) // t > 300:
            continue
        yield RowTile(hidden_size, vec, t, max(32, t))
        if t <= 32 and t != 4:
            yield RowTile(hidden_size, vec, t, 32, early_weights=t != 16, turns=2 if t > 1 else 3)
        if t < 1024:
            yield RowTile(hidden_size, vec, t, max(64, 2 * t), early_weights=False, batch=2, streaming=True)
    for c in (2, 4, 8, 16):
        for t in (32, 64, 256):
            if t * c <= most:
                yield RowTile(hidden_size, vec, t, t, c, signal_early=True, prefetch="all", mailbox=t != 32)


@pytest.mark.parametrize("hidden_size", HIDDEN)
def test_canonical_bits_for_every_tile(hidden_size):
    for tile in tile_grid(hidden_size):
        check(NORM, (B, B, B), hidden_size, tile)


@pytest.mark.parametrize("hidden_size", (1, 9, 257, 1000, 12288))
def test_three_sums_for_every_tile(hidden_size):
    """Rows far from zero, where an element too many in a sum would show, and rows of -0, whose sums keep their sign."""

    def shift(x):
        x += 1000
        x[-1] = -0.0

    for tile in [*tile_grid(hidden_size)][:: 1 if hidden_size <= 1000 else 3]:
        check(STANDARD, dtypes_of(STANDARD, x=S, out=S), hidden_size, tile, change={"x": shift})


@pytest.mark.parametrize("hidden_size", (100, 128, 1000, 2560))
@pytest.mark.parametrize("block", (0, 128))
def test_block_scales_for_every_tile(hidden_size, block):
    program = dynamic(block=block, maps=(Round(),))
    for tile in tile_grid(hidden_size):
        if block and tile.threads < 16 and tile.rounds > 1:
            with pytest.raises(ValueError, match="threads a row"):
                check(program, dtypes_of(program), hidden_size, tile)
        else:
            check(program, dtypes_of(program), hidden_size, tile, padding=3, column=True)


@pytest.mark.parametrize("vec", (8, 4, 2, 1))
@pytest.mark.parametrize("dtype", (B, F, S))
@pytest.mark.parametrize("hidden_size", (5, 100, 257, 1001))
def test_alignments_and_tails(hidden_size, dtype, vec):
    """Rows whose H is no multiple of the access width, in strided rows: nothing past the row is touched."""
    most = tiles.lanes(hidden_size)
    tile = RowTile(hidden_size, vec, min(most, 16), 32, prefetch="vecs")
    check(NORM, (dtype, S, B), hidden_size, tile, rows=5, pad=1)
    check(GEMMA, (dtype, B), hidden_size, tile, rows=5, pad=1)
    for sm, out in ((80, E4), (90, E5)):
        check(QUANT, dtypes_of(QUANT, x=dtype, out=out), hidden_size, tile, rows=5, pad=1, sm=sm)
    if vec * WIDTH[dtype] >= 4:
        for hold in ("registers", "shared"):
            staged = RowTile(hidden_size, vec, tile.threads_per_row, 32, hold=hold, staged=True)
            check(BARE, (dtype, F), hidden_size, staged)
            check(CENTRED, dtypes_of(CENTRED, x=dtype), hidden_size, staged)


POLICIES = ((264, 32, 64, 1), (1003, 64, 64, 1), (2056, 32, 32, 4), (20000, 512, 512, 2))


@pytest.mark.parametrize("hold", ("registers", "shared", "global"))
@pytest.mark.parametrize("dtypes", ((B, B), (F, S), (S, B)))
def test_residuals_and_reload_policies(hold, dtypes):
    x, residual = dtypes
    names = {"x": x, "residual": residual, "h": residual, "weight": S, "bias": F, "out": x, "rstd": S}
    for program in (FUSED, TRAIN, FUSED_LAYER, TRAIN_LAYER):
        for hidden_size, t, n, c in POLICIES[:: 1 if program in (FUSED, FUSED_LAYER) else 2]:
            vec, early = (8 if hidden_size % 8 == 0 else 2), hold == "registers"
            tile = RowTile(
                hidden_size, vec, t, n, c, hold=hold, staged=hold == "shared", early_weights=early, batch=3,
                late_residual=c == 4, mailbox=c == 4,
            )  # fmt: skip
            check(program, dtypes_of(program, **names), hidden_size, tile)


@pytest.mark.parametrize("hold", ("registers", "shared", "global"))
def test_codes_and_reload_policies(hold):
    programs = (
        FP8_BLOCK,
        dynamic(AddResidual(), block=0, ue8m0=True, side=True),
        dynamic(maps=(Affine(),), block=0, cap="device"),
        dynamic(maps=(AffineBias(),), stats=MeanVar(), block=0),
        LAYER_QUANT,
        LLAMA,
    )
    for program in programs:
        for hidden_size, t, n, c in POLICIES[: 4 if program is FP8_BLOCK else 3]:
            vec, early = (8 if hidden_size % 8 == 0 else 2), hold == "registers"
            tile = RowTile(hidden_size, vec, t, n, c, hold=hold, staged=hold == "shared", early_weights=early, batch=3)
            check(program, dtypes_of(program), hidden_size, tile, padding=1)


@pytest.mark.parametrize("row_vecs", ((), ("weight",)))
def test_three_dimensional_rows_and_weights_by_row(row_vecs):
    for t, n, turns in ((16, 64, 1), (64, 64, 1), (32, 32, 3)):
        tile = RowTile(520, 8, t, n, turns=turns)
        check(NORM, (B, F, S), 520, tile, rows=6, row_rank=2, row_vecs=row_vecs, pad=1)
        check(QUANT, (B, F, E4), 520, tile, rows=6, row_rank=2, row_vecs=row_vecs, pad=1)
    check(TRAIN, (B, B, B, B, B, S), 520, RowTile(520, 8, 32, 64), rows=6, row_rank=2, row_vecs=row_vecs, pad=2)
    program = dynamic()
    check(program, dtypes_of(program), 520, RowTile(520, 8, 32, 64), rows=6, row_rank=2, pad=2, padding=2, column=True)


@pytest.mark.parametrize("hidden_size", WIDE)
def test_wide_rows(hidden_size):
    vec = 8 if hidden_size % 8 == 0 else 1
    for sm in (80, 90):
        for _, tile in plans.plans(hidden_size, vec, Needs((2,), 2), sm):
            check(NORM, (B, B, B), hidden_size, tile, rows=1)


# ------------------------------------------------------------------ rows that are picked, rows of int8
@pytest.mark.parametrize("vec", (8, 4, 2, 1))
@pytest.mark.parametrize("hidden_size", (5, 100, 257, 1001))
def test_picked_and_scaled_rows(hidden_size, vec):
    """Indices outside of the pool give NaN and read nothing; a row of a bad index spoils no other."""
    most = tiles.lanes(hidden_size)
    few, more = min(most, 16), min(most, 128)
    tilings = ((few, 64, 1, 1), (few, 32, 1, 2), (more, max(32, more), 1, 1), (32, 32, min(4, most // 32), 1))
    for t, n, c, turns in tilings:
        if c < 1 or t > most:
            continue
        tile = RowTile(hidden_size, vec, t, n, c, prefetch="all", turns=turns)
        for indexed, scaled, index in ((True, False, I32), (False, True, I64), (True, True, I64)):
            load = LoadRow(indexed=indexed, scaled=scaled)
            plain = RowProgram(load, Rms(), (Affine(),), Cast(), (SaveRstd(),))
            quant = RowProgram(load, Rms(), (Affine(1.0),), QuantTensor())
            for program in (plain, quant):
                check(program, dtypes_of(program, row_index=index), hidden_size, tile, rows=6, pad=1)


@pytest.mark.parametrize("hold", ("registers", "shared", "global"))
def test_picked_rows_and_reload_policies(hold):
    for scaled in (False, True):
        program = RowProgram(LoadRow(indexed=True, scaled=scaled), MeanVar(), (Affine(),), QuantTensor())
        for hidden_size, t, n, c in ((2048, 64, 64, 1), (2056, 32, 32, 4)):
            tile = RowTile(hidden_size, 8, t, n, c, hold=hold, staged=hold == "shared", early_weights=False, batch=3)
            check(program, dtypes_of(program), hidden_size, tile, rows=6)


def test_an_infinite_input_scale_reaches_no_element_that_is_not_there():
    program = RowProgram(LoadRow(scaled=True), Rms(), (), Cast(), (SaveRstd(),))

    def infinite(scale):
        scale.fill_(math.inf)

    for hidden_size, vec in ((12, 4), (1000, 8)):
        change = {"x": lambda x: x.fill_(3), "input_scale": infinite}
        check(program, dtypes_of(program), hidden_size, RowTile(hidden_size, vec, 2, 32), change=change)
