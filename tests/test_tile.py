"""Launch plans of the CuTe route: their invariants, and the canonical bits of the kernels they shape."""

import itertools

import numpy as np
import pytest

from flashnorm.kernels import tile as tiles
from flashnorm.kernels.tile import RowTile
from flashnorm.program import AddResidual, Affine, Cast, LoadRow, Rms, RowProgram, SaveRstd, Variant

from . import ptx_emulator as emulator
from .ptx_emulator import fma32, round_bits, widen

B, F, S = "bfloat16", "float16", "float32"
HIDDEN = (1, 3, 7, 8, 9, 64, 100, 128, 257, 576, 1000, 2048, 4096, 4097, 5120, 7168, 8192, 12288, 16384)
WIDE = (20480, 32768, 40000, 65536, 65537, 131072, 200001, 262144)
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")


# ------------------------------------------------------------------ plans
@pytest.mark.parametrize("hidden_size", HIDDEN + WIDE)
@pytest.mark.parametrize("vec", (8, 4, 2, 1))
def test_plans_are_legal_everywhere(hidden_size, vec):
    """Every plan is a valid tile within its architecture's shared memory, and plans cover every M in order."""
    for loaded, held in (((2,), 2), ((4,), 4), ((2, 2), 4), ((4, 4), 4), ((2, 4), 2), ((2, 2), 2)):
        for arch in ARCHS:
            sm = tiles.sm_of(arch)
            plans = tiles.plans(hidden_size, vec, loaded, held, sm)
            limits = [limit for limit, _ in plans]
            assert limits[-1] is None and limits[:-1] == sorted(limits[:-1])
            for _, tile in plans:
                assert (tile.hidden_size, tile.vec) == (hidden_size, vec)
                assert tile.shared_bytes(loaded) <= tiles.shared_limit(sm)
                assert tile.cluster_n == 1 or tiles.has_clusters(sm)
                assert not tile.staged or vec * min(loaded) >= 4
                assert tile.cluster_n <= 8, "more needs a launch attribute"
                if tile.hold == "registers":
                    held_registers = tile.rounds * 8 * held // 4
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
    ],
)
def test_bad_tiles_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        RowTile(**{"hidden_size": 4096, "vec": 8, "threads_per_row": 128, "num_threads": 256, **change})


# ------------------------------------------------------------------ the kernels, interpreted
def canonical_sum_of_squares(h):
    """arithmetic.md section 1 for one row, as plain loops over lanes."""
    groups = -(-h.size // 8)
    lanes = min(1024, 1 << (groups - 1).bit_length())
    padded = np.zeros(-(-groups // lanes) * lanes * 8, np.float32)
    padded[: h.size] = h
    rows = padded.reshape(-1, lanes, 8)
    acc = rows[0] * rows[0]
    for more in rows[1:]:
        acc = fma32(more, more, acc)
    v = ((acc[:, 0] + acc[:, 4]) + (acc[:, 2] + acc[:, 6])) + ((acc[:, 1] + acc[:, 5]) + (acc[:, 3] + acc[:, 7]))
    v = v.reshape(-1, min(32, lanes))
    while v.shape[1] > 1:
        v = v[:, : v.shape[1] // 2] + v[:, v.shape[1] // 2 :]
    v = v[:, 0]
    while v.size > 1:
        v = v[: v.size // 2] + v[v.size // 2 :]
    return v[0]


def model(variant, values, eps):
    """Every written operand of a program, row by row, in storage bits."""
    program, out = variant.program, {}

    def rounded(v, name):
        return widen(round_bits(np.ascontiguousarray(v), variant.dtype(name)), variant.dtype(name))

    x = values["x"]
    h = x
    if isinstance(program.load, AddResidual):
        h = x + values["residual"]
        out[program.load.dst] = round_bits(h, variant.dtype(program.load.dst))
        h = rounded(h, program.load.dst) if program.load.rounded else h
    with np.errstate(all="ignore"):
        mean = np.array([canonical_sum_of_squares(row) / np.float32(row.size) for row in h], np.float32)
        rstd = np.float32(1) / np.sqrt(mean + np.float32(eps))
        y = h * rstd[:, None]
        for stage in program.maps:
            g = values["weight"] + np.float32(stage.offset) if stage.offset else values["weight"]
            y = (rounded(y, "x") if stage.round_norm else y) * g
    out[program.store.dst] = round_bits(np.ascontiguousarray(y), variant.dtype(program.store.dst))
    if program.saves:
        out["rstd"] = rstd.view(np.uint32)
    return out


def check(program, dtypes, hidden_size, tile, rows=3, row_rank=1, row_vecs=(), pad=0, seed=0):
    """Interpret the kernel on random rows and compare every written bit, and every untouched byte."""
    pytest.importorskip("cutlass")  # the tests above need no DSL, these trace its kernels
    rng = np.random.default_rng(seed)
    variant = Variant(program, dtypes, hidden_size, row_rank, row_vecs, tile.vec)
    outer = (rows,) if row_rank == 1 else (2, -(-rows // 2))
    rows = int(np.prod(outer))
    align = max(tile.vec, 1)
    stride = -(-hidden_size // align) * align + pad * align
    chunks, offset, tensors, places = [], 64, [], {}
    for operand in program.operands():
        dtype = variant.dtype(operand.name)
        width = tiles.WIDTH[dtype]
        if operand.kind == "per_row":
            shape, strides = outer, (1,) if row_rank == 1 else (outer[1], 1)
        elif operand.kind == "vec" and operand.name not in row_vecs:
            shape, strides = (hidden_size,), (1,)
        else:
            shape, strides = (*outer, hidden_size), (stride, 1) if row_rank == 1 else (stride * outer[1], stride, 1)
            if operand.kind == "vec":  # broadcast over the last outer dimension
                strides = (*strides[:-2], 0, 1)
        index = np.zeros(shape, np.int64)
        for coordinate, step in zip(np.indices(shape), strides, strict=True):
            index += coordinate * step
        data = rng.standard_normal(int(index.max()) + 1).astype(np.float32) * 2
        bits = emulator.round_bits(data, dtype)
        places[operand.name] = (operand, dtype, offset, index, shape)
        tensors.append(emulator.Tensor(offset, shape, strides))
        chunks.append((offset, bits))
        offset += -(-bits.nbytes // 64) * 64 + 64
    memory = np.full(offset, 0x5A, np.uint8)
    readable, writable = np.zeros(offset, bool), np.zeros(offset, bool)
    for start, bits in chunks:
        memory[start : start + bits.nbytes] = bits.view(np.uint8)
    values = {}
    for name, (operand, dtype, start, index, shape) in places.items():
        width = tiles.WIDTH[dtype]
        cells = start + (index[..., None] * width + np.arange(width))
        if operand.mode != "out":
            readable[cells] = True
            bits = memory[cells].reshape(-1).view(np.uint16 if width == 2 else np.uint32).reshape(shape)
            wide = emulator.widen(bits, dtype)
            values[name] = wide.reshape(rows, hidden_size) if wide.ndim > 1 else wide
        if operand.written:
            writable[cells] = True
    expected, before = model(variant, values, 1e-6), memory.copy()
    ctas, shared = -(-rows // tile.rows) * tile.cluster_n, tile.shared_bytes(tiles.loaded_widths(variant))
    machine = emulator.Machine(ctas, tile.num_threads, memory, readable, writable, tile.cluster_n, shared)
    emulator.launch(variant, tile, machine, tensors, {"eps": 1e-6})
    untouched = np.ones(offset, bool)
    for name, want in expected.items():
        _, dtype, start, index, _ = places[name]
        width = tiles.WIDTH[dtype]
        cells = start + (index[..., None] * width + np.arange(width))
        untouched[cells] = False
        got = memory[cells].reshape(-1).view(np.uint16 if width == 2 else np.uint32)
        np.testing.assert_array_equal(got, want.reshape(-1), err_msg=f"{name}: {tile}")
    np.testing.assert_array_equal(memory[untouched], before[untouched], err_msg="bytes outside the outputs changed")


NORM = RowProgram(LoadRow(), Rms(), (Affine(),), Cast())
BARE = RowProgram(LoadRow(), Rms(), (), Cast())
GEMMA = RowProgram(LoadRow(), Rms(), (Affine(1.0),), Cast("x"))
FUSED = RowProgram(AddResidual(), Rms(), (Affine(),), Cast("x"))
TRAIN = RowProgram(AddResidual(rounded=True, dst="h"), Rms(), (Affine(0.0, True),), Cast(), (SaveRstd(),))


def tile_grid(hidden_size, vec=8):
    """Tiles of every shape that fits H."""
    most = tiles.lanes(hidden_size)
    for t in (1, 2, 4, 8, 16, 32, 64, 256, 1024):
        if t > most or -(-hidden_size // 8) // t > 300:
            continue
        yield RowTile(hidden_size, vec, t, max(32, t))
        if t < 1024:
            yield RowTile(hidden_size, vec, t, max(64, 2 * t), early_weights=False, batch=2, streaming=True)
    for c in (2, 4, 8, 16):
        for t in (32, 64, 256):
            if t * c <= most:
                yield RowTile(hidden_size, vec, t, t, c, signal_early=True, prefetch="all")


@pytest.mark.parametrize("hidden_size", HIDDEN)
def test_canonical_bits_for_every_tile(hidden_size):
    for tile in tile_grid(hidden_size):
        check(NORM, (B, B, B), hidden_size, tile, rows=3)


@pytest.mark.parametrize("vec", (8, 4, 2, 1))
@pytest.mark.parametrize("dtype", (B, F, S))
@pytest.mark.parametrize("hidden_size", (5, 100, 257, 1001))
def test_alignments_and_tails(hidden_size, dtype, vec):
    """Rows whose H is no multiple of the access width, in strided rows: nothing past the row is touched."""
    most = tiles.lanes(hidden_size)
    tile = RowTile(hidden_size, vec, min(most, 16), 32, prefetch="vecs")
    check(NORM, (dtype, S, B), hidden_size, tile, rows=5, pad=1)
    check(GEMMA, (dtype, B), hidden_size, tile, rows=5, pad=1)
    if vec * tiles.WIDTH[dtype] >= 4:
        for hold in ("registers", "shared"):
            staged = RowTile(hidden_size, vec, tile.threads_per_row, 32, hold=hold, staged=True)
            check(BARE, (dtype, F), hidden_size, staged, rows=3)


@pytest.mark.parametrize("program", (FUSED, TRAIN), ids=("fused", "train"))
@pytest.mark.parametrize("hold", ("registers", "shared", "global"))
@pytest.mark.parametrize("dtypes", ((B, B), (F, S), (S, B)))
def test_residuals_and_reload_policies(program, hold, dtypes):
    x, residual = dtypes
    names = {"x": x, "residual": residual, "h": residual, "weight": S, "out": x, "rstd": S}
    all_dtypes = tuple(names[o.name] for o in program.operands())
    for hidden_size, t, n, c in ((264, 32, 64, 1), (1003, 64, 64, 1), (2056, 32, 32, 4), (20000, 512, 512, 2)):
        vec = 8 if hidden_size % 8 == 0 else 2
        early = hold == "registers"
        tile = RowTile(hidden_size, vec, t, n, c, hold=hold, staged=hold == "shared", early_weights=early, batch=3)
        check(program, all_dtypes, hidden_size, tile, rows=3)


@pytest.mark.parametrize("row_vecs", ((), ("weight",)))
def test_three_dimensional_rows_and_weights_by_row(row_vecs):
    for t, n in ((16, 64), (64, 64)):
        check(NORM, (B, F, S), 520, RowTile(520, 8, t, n), rows=6, row_rank=2, row_vecs=row_vecs, pad=1)
    check(TRAIN, (B, B, B, B, B, S), 520, RowTile(520, 8, 32, 64), rows=6, row_rank=2, row_vecs=row_vecs, pad=2)


@pytest.mark.parametrize("hidden_size", WIDE)
def test_wide_rows(hidden_size):
    vec = 8 if hidden_size % 8 == 0 else 1
    for sm in (80, 90):
        for _, tile in tiles.plans(hidden_size, vec, (2,), 2, sm):
            check(NORM, (B, B, B), hidden_size, tile, rows=1)
