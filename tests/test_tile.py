"""Launch plans of the CuTe route: their invariants."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from flashnorm.kernels import plans
from flashnorm.kernels import tile as tiles
from flashnorm.kernels.tile import Needs, RowTile, needs_of
from flashnorm.program import (
    AddResidual,
    Affine,
    AffineBias,
    Cast,
    LoadRow,
    MeanVar,
    QuantBlocks,
    Rms,
    Round,
    RowProgram,
    Silu,
    Variant,
)
from flashnorm.verify import cases
from flashnorm.verify.builds import variant_of

pytestmark = pytest.mark.cpu_only

HIDDEN = (1, 3, 7, 8, 9, 33, 64, 77, 100, 128, 257, 576, 1000, 2048, 4096, 4097, 5120, 7168, 8192, 12288, 16384)
WIDE = (20480, 32768, 40000, 65536, 65537, 131072, 200001, 262144)
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")


# ------------------------------------------------------------------ plans
@functools.cache
def asked():
    """What the operators' programs ask for, in every combination of dtypes and options that they take."""
    cute = [op for op in cases.operators().values() if "cute" in op.routes]
    return {needs_of(variant_of(op, case, torch.device("cpu"))) for op in cute for case in cases.cases_of(op)}


def test_programs_ask_for_much():
    """The combinations are there: one operand or two of 1 to 4 bytes, up to 8 bytes held, every kind of block."""
    assert {needs.loaded for needs in asked()} == {(1,), (2,), (4,), (2, 2), (2, 4), (4, 4)}
    assert {needs.held for needs in asked()} == {2, 4, 6, 8} and {needs.least for needs in asked()} == {0, 1, 2, 4, 16}


@pytest.mark.parametrize("hidden_size", HIDDEN + WIDE)
@pytest.mark.parametrize("vec", (8, 4, 2, 1))
def test_plans_are_legal_everywhere(hidden_size, vec):
    """Every plan is a valid tile within its architecture's shared memory, and plans cover every M in order."""
    for needs in asked():
        for arch in ARCHS:
            sm = tiles.sm_of(arch)
            chosen = plans.plans(hidden_size, vec, needs, sm)
            limits = [limit for limit, _ in chosen]
            assert limits[-1] is None and limits[:-1] == sorted(limits[:-1])
            for _, tile in chosen:
                assert (tile.hidden_size, tile.vec) == (hidden_size, vec)
                assert tile.shared_bytes(needs) <= tiles.shared_limit(sm)
                assert tile.cluster_n == 1 or plans.has_clusters(sm)
                assert not tile.staged or vec * min(needs.loaded) >= 4
                assert tile.abreast == 1 or (needs.grouped and len(needs.loaded) == 1)
                assert tile.cluster_n <= 8, "more needs a launch attribute"
                assert tile.threads >= min(needs.least, tiles.lanes(hidden_size)), "a block belongs to neighbours"
                if tile.hold == "registers":
                    held_registers = tile.abreast * tile.rounds * 8 * needs.held // 4
                    assert held_registers <= (65536 // tile.num_threads) // 2


@pytest.mark.parametrize("hidden_size", HIDDEN + WIDE)
def test_every_group_and_lane_has_one_owner(hidden_size):
    lanes, groups = tiles.lanes(hidden_size), -(-hidden_size // 8)
    assert lanes & (lanes - 1) == 0 and (lanes >= groups or lanes == 1024)
    for t, c in itertools.product((1, 2, 8, 16, 32, 128, 1024), (1, 2, 8)):
        if t * c > lanes or (c > 1 and t < 32):
            continue
        tile = RowTile(hidden_size, 8, t, max(32, t), c)
        owned = [tile.groups_of(i) for i in range(tile.threads)]
        assert sorted(itertools.chain(*owned)) == list(range(groups))
        assert max(map(len, owned)) == tile.rounds
        owner = {}
        for i, mine in enumerate(owned):
            for g in mine:
                assert owner.setdefault(g % lanes, i) == i, "a lane's groups belong to one thread"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"threads_per_row": 96}, "power of two"),
        ({"threads_per_row": 1024, "num_threads": 1024}, "more threads than lanes"),
        ({"num_threads": 48}, "whole warps"),
        ({"vec": 3}, "vec"),
        ({"cluster_n": 3}, "cluster_n"),
        ({"cluster_n": 2}, "a cluster works on one row"),
        ({"hold": "shared"}, "staging"),
        ({"threads_per_row": 64, "num_threads": 1024}, "named barriers"),
        ({"turns": 2}, "take turns"),
        ({"abreast": 0}, "abreast must be"),
        ({"abreast": 2, "hold": "global"}, "rows abreast"),
        ({"abreast": 2, "staged": True}, "rows abreast"),
        ({"abreast": 2, "num_threads": 128, "cluster_n": 2}, "rows abreast"),
    ],
)
def test_bad_tiles_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        RowTile(**{"hidden_size": 4096, "vec": 8, "threads_per_row": 128, "num_threads": 256, **change})


def test_what_programs_need():
    """By dtype, not by operator: what is loaded and held, how many vectors there are, what crosses the row."""
    norm, codes = RowProgram(LoadRow(), Rms(), (Affine(),), Cast()), QuantBlocks(0, 1e-10)
    assert needs(norm, "bfloat16", "float32", "bfloat16") == Needs((2,), 2)
    picked = RowProgram(LoadRow(indexed=True, scaled=True), Rms(), (), Cast())
    assert needs(picked, "int8", "int64", "float32", "bfloat16") == Needs((1,), 2, vectors=0, heavy=True)
    layer = RowProgram(AddResidual(), MeanVar(), (AffineBias(), Round()), codes)
    dtypes = ("bfloat16", "float32", "float32", "float32", "int8", "float32")
    assert needs(layer, *dtypes) == Needs(
        (2, 4), 4, vectors=2, exchanges=4, heavy=True, narrow=True, least=0, grouped=False
    )
    rounded = RowProgram(AddResidual(rounded=True), Rms(), (Affine(),), Cast())
    assert needs(rounded, "bfloat16", "bfloat16", "bfloat16", "bfloat16") == Needs((2, 2), 2)


def test_rows_abreast():
    """Many rows of LayerNorm, where weight and bias in fp32 are four times the row; not where stores need all of it."""
    layer, codes = RowProgram(LoadRow(), MeanVar(), (AffineBias(),), Cast()), QuantBlocks(0, 1e-10)
    one = needs(layer, "bfloat16", "float32", "float32", "bfloat16")
    whole = needs(replace(layer, store=codes), "bfloat16", "float32", "float32", "float8_e4m3fn", "float32")
    added = needs(replace(layer, load=AddResidual()), "bfloat16", "bfloat16", "float32", "float32", "bfloat16")
    for rows, hidden_size in ((8192, 16384), (8192, 12288), (16384, 7168), (16384, 5120)):
        assert plans.pick(hidden_size, 8, one, 90, rows).abreast == 2
        assert plans.pick(hidden_size, 8, whole, 90, rows).abreast == 1
        assert plans.pick(hidden_size, 8, added, 90, rows).abreast == 1
    assert plans.pick(16384, 8, one, 90, 256).abreast == 1
    plain = RowProgram(LoadRow(), Rms(), (Affine(),), Cast())
    rms = needs(plain, "bfloat16", "bfloat16", "bfloat16")
    assert plans.pick(8192, 8, rms, 90, 32768) == RowTile(8192, 8, 512, 512, early_weights=False, batch=2, abreast=2)
    silu = needs(replace(plain, maps=(Affine(), Silu())), "bfloat16", "bfloat16", "bfloat16")
    assert plans.pick(8192, 8, silu, 90, 32768).abreast == 1


def needs(program, *dtypes):
    return needs_of(Variant(program, dtypes, 4096))


def test_exchanges_and_staged_rows_do_not_overlap():
    """Every exchange has slots of its own, and staged groups begin behind them, 16 bytes each at least."""
    tile = RowTile(512, 8, 64, 64, hold="shared", staged=True)
    for exchanges in (1, 2, 3, 4):
        wanted = Needs((1,), 1, exchanges=exchanges)
        assert tile.exchange_bytes(wanted) % 16 == 0 and tile.exchange_bytes(wanted) >= exchanges * tile.blocks * 4
        assert tile.shared_bytes(wanted) == tile.exchange_bytes(wanted) + 64 * 16
