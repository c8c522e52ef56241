"""Rows abreast in the CuTe kernels, interpreted: the model's bits for any number of rows, vectors loaded once."""

from dataclasses import replace

import numpy as np
import pytest

from flashnorm.kernels import tile as tiles
from flashnorm.kernels.tile import RowTile
from flashnorm.program import (
    AddResidual,
    Affine,
    AffineBias,
    LoadRow,
    QuantNvfp4,
    QuantTensor,
    Rms,
    RowProgram,
)
from tests.cute_launch import Launch, check, dtypes_of
from tests.ptx_emulator import GLOBAL_BASE
from tests.test_cute_kernels import (
    FP8_BLOCK,
    FUSED,
    FUSED_LAYER,
    GEMMA,
    LAYER_QUANT,
    LLAMA,
    NORM,
    STANDARD,
    TRAIN,
    TRAIN_LAYER,
    B,
    F,
    S,
    dynamic,
)

pytestmark = pytest.mark.cpu_only

pytest.importorskip("cutlass")  # nothing is compiled, but its tracing code runs

LAYER = RowProgram(LoadRow(), STANDARD.stats, (AffineBias(),), NORM.store)
NVFP4 = RowProgram(LoadRow(), Rms(), (Affine(),), QuantNvfp4())
TILES = (  # hidden size, threads a row, threads, rows abreast, turns; with sums of many warps, one warp, and less
    (1003, 64, 128, 2, 1),
    (520, 64, 64, 3, 1),
    (100, 4, 32, 2, 2),
    (264, 32, 64, 2, 1),
    (2056, 32, 32, 4, 1),
)


def tiles_of():
    for hidden_size, t, n, abreast, turns in TILES:
        vec = 8 if hidden_size % 8 == 0 else 4 if hidden_size % 4 == 0 else 1
        for early, batch, ahead in ((True, 4, False), (False, 1, True), (False, 3, False)):
            yield RowTile(
                hidden_size, vec, t, n, early_weights=early, batch=batch, turns=turns, abreast=abreast, ahead=ahead
            )  # fmt: skip


def shift(x):
    """Rows far from zero, where an element too many in a sum would show, and one of -0, whose sums keep their sign."""
    x += 1000
    x[-1] = -0.0


@pytest.mark.parametrize("rows", (1, 2, 5, 12))
def test_any_number_of_rows(rows):
    for tile in tiles_of():
        check(NORM, (B, B, B), tile.hidden_size, tile, rows=rows)
        change = {"x": shift}
        check(LAYER, dtypes_of(LAYER, x=S, weight=S, bias=S), tile.hidden_size, tile, rows=rows, change=change)


@pytest.mark.parametrize("program", (FUSED, TRAIN, FUSED_LAYER, TRAIN_LAYER, GEMMA, STANDARD, LAYER_QUANT, LLAMA))
def test_programs_that_store_group_by_group(program):
    names = {"weight": S, "bias": F}
    for tile in tiles_of():
        check(program, dtypes_of(program, **names), tile.hidden_size, tile, rows=5, pad=1)


@pytest.mark.parametrize("program", (FP8_BLOCK, NVFP4, dynamic(ue8m0=True)))
def test_scales_of_blocks_and_their_padding(program):
    for t, n in ((32, 64), (64, 64)):
        for early in (True, False):
            tile = RowTile(640, 8, t, n, early_weights=early, batch=1, abreast=2)
            for rows in (1, 6, 7):
                check(program, dtypes_of(program), 640, tile, rows=rows, padding=3)


def test_picked_rows_and_weights_by_row():
    """An index that is none spoils its own row alone; a weight that comes by row is each row's own."""
    picked = RowProgram(LoadRow(indexed=True, scaled=True), Rms(), (Affine(),), QuantTensor())
    for tile in tiles_of():
        check(picked, dtypes_of(picked), tile.hidden_size, tile, rows=7, pad=1)
        for row_vecs in ((), ("weight",)):
            check(NORM, (B, F, S), tile.hidden_size, tile, rows=6, row_rank=2, row_vecs=row_vecs, pad=1)


def vector_loads(abreast, early):
    """How many bytes of the weight a launch of four rows reads."""
    tile = RowTile(520, 8, 64, 64, early_weights=early, batch=1, abreast=abreast)
    launch = Launch(LAYER, dtypes_of(LAYER, weight=S, bias=S), 520, tile, rows=4)
    begin = launch.tensors[1].iterator.toint().a - GLOBAL_BASE
    seen, load = [], launch.machine.load

    def counted(space, addr, size, active):
        at = np.broadcast_to(addr, active.shape)[active & launch.machine.alive] - GLOBAL_BASE
        seen.append(size * int(((at >= begin) & (at < begin + 4 * 520)).sum()) if space == "global" else 0)
        return load(space, addr, size, active)

    launch.machine.load = counted
    launch.check()
    return sum(seen)


@pytest.mark.parametrize("early", (True, False))
def test_a_load_of_a_vector_serves_all_rows(early):
    assert vector_loads(1, early) == 4 * 520 * 4
    assert vector_loads(2, early) == 2 * 520 * 4
    assert vector_loads(4, early) == 520 * 4


@pytest.mark.parametrize("hold", ("registers", "shared", "global"))
def test_one_row_with_vectors_ahead(hold):
    for program in (LAYER, FUSED_LAYER):
        tile = RowTile(1000, 8, 64, 128, hold=hold, staged=hold == "shared", early_weights=False, batch=1, ahead=True)
        check(program, dtypes_of(program, weight=S), 1000, tile, rows=3)
        check(program, dtypes_of(program, weight=S), 1000, replace(tile, streaming=True), rows=3)


def test_sums_cross_warps_in_one_exchange():
    tile = RowTile(1024, 8, 64, 128, abreast=2)
    needs = tiles.needs_of(Launch(LAYER, dtypes_of(LAYER), 1024, tile).variant)
    assert tile.all_rows == 4
    assert tile.exchange_bytes(needs) == 2 * 2 * tile.blocks * 3 * 4


def test_a_row_that_is_one_block_refuses():
    program = dynamic(AddResidual(), block=0)
    tile = RowTile(520, 8, 64, 64, abreast=2)
    assert not tiles.needs_of(Launch(program, dtypes_of(program), 520, tile).variant).grouped
    with pytest.raises(ValueError, match="group by group"):
        check(program, dtypes_of(program), 520, tile)
