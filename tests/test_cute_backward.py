"""The backward of the CuTe route: interpreted, its bits are the model's in every tile; compiled, its rules."""

import math
import re
from dataclasses import replace

import pytest
import torch

from flashnorm.kernels import stream_plans
from flashnorm.kernels import tile as tiles
from flashnorm.kernels.stream_tile import Asks, StreamTile, asks_of
from flashnorm.program import BackwardProgram, partials
from flashnorm.program.backward import INNER_ROWS
from tests import binaries
from tests.canonical.backward import Order
from tests.cute_backward import Backward, check
from tests.test_cute_compile import ARCHS, not_allowed
from tests.test_tile import HIDDEN, WIDE

pytestmark = pytest.mark.cpu_only  # but for those of a GPU

B, F, S = "bfloat16", "float16", "float32"
RMS = BackwardProgram("rms")
GEMMA = BackwardProgram("rms", offset=1.0, g_residual=True, dresidual=True)
LLAMA = BackwardProgram("rms", round_norm=True)
LAYER = BackwardProgram("layer", dbias=True)
BARE = BackwardProgram("rms", weight=False, dweight=False)
ALL = BackwardProgram("layer", g_residual=True, dresidual=True, dbias=True)
FROZEN = BackwardProgram("rms", dweight=False)
WEIGHT = BackwardProgram("rms", dx=False)
BIAS = BackwardProgram("layer", weight=False, dweight=False, dx=False, dbias=True)
DTYPES = ((B, B, B), (F, S, B), (S, S, S), (B, F, S))


def tile(hidden_size, vec, threads, cta, cluster=1, **more):
    return StreamTile(hidden_size, vec, threads, cta, cluster, **more)


# ------------------------------------------------------------------ plans
def test_plans_are_legal_everywhere():
    """Every plan fits its architecture, and the workers of a CTA have partials that are added up next to each other."""
    asked = [
        Asks(loaded, words, exchanges, sums, vector)
        for loaded in ((2, 2), (4, 4), (2, 4, 4))
        for words, exchanges, sums in ((1, 1, 1), (3, 2, 2), (1, 0, 1))
        for vector in (0, 2, 4)
    ]
    for hidden_size in (*HIDDEN, *WIDE, 20001, 24578, 32766):
        for vec in (v for v in (8, 4, 2, 1) if hidden_size % v == 0):
            for sm in {tiles.shared_limit(sm): sm for sm in map(tiles.sm_of, ARCHS)}.values():
                for asks in asked:
                    *few, (limit, last) = stream_plans.plans(hidden_size, vec, asks, sm)
                    assert limit is None and not last.short and len(few) <= 1
                    for chosen in (*(plan for _, plan in few), last):
                        assert chosen.stream_bytes(asks) <= tiles.shared_limit(sm)
                        assert chosen.cluster_n == 1 or (stream_plans.has_clusters(sm) and chosen.cluster_n <= 8)
                        assert chosen.stages == 0 or vec * min(asks.loaded) >= 4
                        assert not chosen.keeps_vectors(asks) or vec * asks.vector >= 4
                        assert partials(1, hidden_size) % (chosen.rows * chosen.streams) == 0
                        assert chosen.rows == 1 or chosen.summed
                    for most, chosen in few:
                        assert chosen.short and most == INNER_ROWS * partials(1, hidden_size)
                        assert not stream_plans.pick_short(hidden_size, vec, replace(asks, by_rows=True), sm)
                        assert not stream_plans.pick_short(hidden_size, vec, replace(asks, axes=2), sm)


@pytest.mark.parametrize(
    "wrong",
    (
        {"stages": 1},
        {"again": "shared", "stages": 0},
        {"again": "global"},
        {"summed": False},
        {"turns": 2},
        {"refill": True, "stages": 0},
        {"streams": 2},
        {"short": True, "streams": 4},
        {"short": True, "outer": "shared"},
        {"fold_blocks": 2},
        {"fold_blocks": 0},
        {"fold_blocks": 4, "hidden_size": 1026, "vec": 2},
        {"skew": True, "threads_per_row": 64},
        {"skew": True, "threads_per_row": 64, "again": "shared"},
        {"skew": True, "again": "shared", "refill": True},
    ),
)
def test_tiles_that_cannot_be(wrong):
    with pytest.raises(ValueError):
        replace(tile(1024, 8, 32, 64), **wrong)


# ------------------------------------------------------------------ interpreted
SHAPES = ((8, 32, 1), (16, 64, 1), (32, 32, 1), (64, 256, 1), (32, 32, 4), (64, 64, 2))  # threads, of a CTA, CTAs


def shapes(hidden_size):
    for threads, cta, cluster in SHAPES:
        if threads * cluster <= tiles.lanes(hidden_size):
            yield threads, cta, cluster


@pytest.fixture(autouse=True)
def tracing():
    pytest.importorskip("cutlass")  # nothing is compiled, but its tracing code runs


@pytest.mark.parametrize("hidden_size", (1, 7, 64, 100, 257, 520, 1000))
@pytest.mark.parametrize("program", (RMS, LAYER), ids=("rms", "layer"))
def test_canonical_bits_for_every_shape_of_tile(hidden_size, program):
    vec = math.gcd(hidden_size, 8)
    few = [(1, 32, 1)] if hidden_size < 64 else []
    for number, (threads, cta, cluster) in enumerate((*few, *shapes(hidden_size))):
        stages = 0 if vec == 1 else 2 + number % 3
        found = tile(hidden_size, vec, threads, cta, cluster, stages=stages, prefetch="all")
        least = 8 if few == [] else 32
        assert check(found, program, (B, B, B), (5 * least + 3,), pad=number % 2, order=Order(4, 1, least)) == "one"


@pytest.mark.parametrize("again", ("values", "raw", "shared", "global"))
@pytest.mark.parametrize("vectors", ("values", "raw", "shared", "global"))
def test_where_things_wait(again, vectors):
    for (hidden_size, threads, cta, cluster, outer), dtypes in zip(
        ((1000, 32, 64, 1, "shared"), (2056, 64, 64, 2, "registers"), (520, 64, 64, 1, "shared")),
        DTYPES[1:],
        strict=True,
    ):
        more = {"again": again, "outer": outer, "vectors": vectors, "batch": 2}
        stages = {"global": 0, "shared": 3}.get(again, 2)
        found = tile(hidden_size, 8, threads, cta, cluster, stages=stages, refill=stages > 0, **more)
        check(found, ALL, dtypes, (11,), pad=1, order=Order(4, 1, 2))


@pytest.mark.parametrize("program", (RMS, ALL, WEIGHT), ids=("rms", "all", "weight"))
@pytest.mark.parametrize(("streams", "outer"), ((1, "registers"), (2, "registers"), (2, "shared")))
def test_short_streams(program, streams, outer):
    """Streams of a block at most, one of a worker or two, whether the second one has rows or not, or fewer."""
    more = {"stages": 2, "again": "shared", "outer": outer, "short": True, "streams": streams}
    for number, rows in enumerate((1, 3, 4, 5, 8, 9, 27, 31, 32)):
        for threads, cta, cluster in (((64, 64, 2),), ((64, 64, 1), (32, 64, 1)), ((32, 128, 1),))[number % 3]:
            odd = number % 2
            found = tile(1000, 8, threads, cta, cluster, refill=not odd, late_signal=bool(odd), fold_ctas=odd, **more)
            check(found, program, (B, B, B), (rows,), pad=odd, order=Order(4, 1, 8))


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("vec", (8, 4, 2, 1))
def test_alignments_tails_and_grids(dtypes, vec):
    hidden_size = {8: 104, 4: 100, 2: 102, 1: 101}[vec]
    for stages in (0, 2):
        if stages and vec * min(4 if d == S else 2 for d in dtypes[:2]) < 4:
            continue
        check(tile(hidden_size, vec, 8, 32, stages=stages), GEMMA, dtypes, (5, 3), pad=1, sm=80, order=Order(4, 1, 4))
        check(tile(hidden_size, vec, 8, 32, stages=stages), LLAMA, dtypes, (23,), pad=1, order=Order(4, 1, 4))


@pytest.mark.parametrize("program", (BARE, FROZEN, WEIGHT, BIAS), ids=("bare", "frozen", "weight", "bias"))
def test_what_is_not_asked_for(program):
    for summed in (True, False):
        found = tile(1000, 8, 64, 64, stages=2, summed=summed or not program.sums)
        check(found, program, (B, B, B), (21,), order=Order(4, 1, 4))


@pytest.mark.parametrize("program", (RMS, LAYER, WEIGHT), ids=("rms", "layer", "weight"))
def test_sums_by_columns(program):
    """Rows of which a thread could not keep the sums: these are made by a kernel of their own."""
    for hidden_size, vec in ((1000, 8), (1059, 1)):
        for again in ("raw", "global"):
            found = tile(hidden_size, vec, 64, 64, stages=0, again=again, vectors="global", summed=False)
            check(found, program, (B, F, S), (11,), pad=1, order=Order(4, 1, 2))
            check(found, program, (B, F, S), (3, 4), pad=1, order=Order(4, 1, 2))


@pytest.mark.parametrize(("share", "program"), (("last", RMS), ("first", GEMMA), ("own", RMS), ("own", GEMMA)))
def test_weights_by_rows(share, program):
    """A sum for every weight row, or none; workers of a CTA are of different weight rows, and some of none."""
    for hidden_size, threads, cta, stages in ((64, 4, 32, 2), (257, 32, 64, 0), (1000, 64, 64, 2)):
        waits = {"outer": "shared", "vectors": "shared"} if hidden_size == 64 else {}
        for grid in ((7, 3), (1, 1)):
            for elements in (1, 4 * hidden_size * grid[1]):
                vec = math.gcd(hidden_size, 8)
                mode = check(
                    tile(hidden_size, vec, threads, cta, stages=stages, **waits),
                    program,
                    (B, B, B),
                    grid,
                    share=share,
                    order=Order(4, elements, 8),
                )
                assert mode == ("own" if share == "own" and grid != (1, 1) else "several")
    found = tile(1000, 8, 64, 64, stages=0, again="raw", vectors="global", summed=False)
    check(found, program, (B, B, B), (7, 3), share=share, order=Order(4, 4000, 8))


def test_weights_by_rows_without_a_gradient():
    check(tile(520, 8, 32, 64, stages=2), FROZEN, (B, B, B), (7, 3), share="last")


@pytest.mark.parametrize("fold_blocks", (4, 8, 16))
@pytest.mark.parametrize("hidden_size", (100, 520, 1000, 2056))
def test_folds_of_several_blocks(hidden_size, fold_blocks):
    """CTAs that have more columns than are left, sums of two kinds, weight rows of their own."""
    threads = min(32, tiles.lanes(hidden_size))
    found = tile(hidden_size, 4, threads, 32, stages=2, fold_blocks=fold_blocks, signal_early=True)
    for program, dtypes in ((RMS, (B, B, B)), (LAYER, (F, S, S))):
        check(found, program, dtypes, (37,), order=Order(4, 1, 16))
    check(found, RMS, (B, B, B), (7, 3), share="last", order=Order(4, 1, 16))


def test_more_partials_than_rows():
    """Partials without a row are not written and not read."""
    for rows in (1, 3, 64, 65):
        for threads, cta in ((32, 128), (64, 64)):
            check(tile(520, 8, threads, cta), RMS, (B, B, B), (rows,))


def test_infinities_stay_in_their_rows():
    """A row without a finite rstd: what it lacks beyond H must not make NaN of its sum."""

    def spoil(rstd):
        rstd[3] = math.inf

    for hidden_size in (100, 1000):
        change = {"rstd": spoil, "x": lambda x: x[3].fill_(3.0)}
        check(tile(hidden_size, 4, 8, 32), RMS, (B, B, B), (9,), change=change, order=Order(4, 1, 4))


def test_in_place():
    """Gradients of rows over what they were made of, as the caller of `columns` and `rows` may ask for."""
    for summed in (True, False):
        one = Backward(GEMMA, 1000, 8, (B, B, B), (21,), order=Order(4, 1, 4))
        places = dict(zip(one.view, one.tensors, strict=True))
        places["dx"], places["dresidual"] = places["dout"], places["x"]
        one.tensors = list(places.values())
        one.writable |= one.readable
        found = tile(1000, 8, 64, 64, stages=2 if summed else 0, again="values" if summed else "global", summed=summed)
        one.interpret(replace(found, vectors="raw" if summed else "global"))
        one.view |= {"dx": one.view["dout"], "dresidual": one.view["x"]}
        one.compare()


@pytest.mark.parametrize("hidden_size", (20480, 40000, 65537, 131072))
def test_plans_of_wide_rows(hidden_size):
    vec = math.gcd(hidden_size, 8)
    for sm in (80, 90) if hidden_size < 65536 else (90,):
        for _, found in stream_plans.plans(hidden_size, vec, asks_of(variant(RMS, hidden_size)), sm):
            least = found.streams
            check(found, RMS, (B, B, B), (2,), sm=sm, order=Order(4, 1, least))


# ------------------------------------------------------------------ compiled
def variant(program, hidden_size, dtypes=(B, B, B), vec=None, **more):
    found = Backward(program, hidden_size, vec or math.gcd(hidden_size, 8), dtypes, (1,) * more.get("row_rank", 1))
    return replace(found.variant, **more)


VARIANTS = {
    "narrow": (RMS, 128),
    "rms": (RMS, 2048),
    "gemma": (GEMMA, 6144),
    "rms-fp32": (RMS, 8192, (S, S, S)),
    "mixed": (LLAMA, 16384, (B, F, S)),
    "wide": (RMS, 32768),
    "widest": (RMS, 262144),
    "layer": (LAYER, 4096),
    "layer-8192": (ALL, 8192),
    "layer-wide": (LAYER, 65536),
    "odd": (ALL, 1003, (F, S, B), 1),
    "bare": (BARE, 4096),
}
BY_ROWS = {
    "heads": (RMS, 128, {"row_rank": 2, "row_vecs": ("weight", "dweight")}),
    "tokens": (GEMMA, 1000, {"row_vecs": ("weight", "dweight")}),
    "frozen": (FROZEN, 1024, {"row_rank": 2, "row_vecs": ("weight",)}),
}
FEW = ("rms", "wide", "odd", "heads")
CASES = [(a, v) for a in ARCHS for v in ((*VARIANTS, *BY_ROWS) if a in ("sm_80", "sm_90a") else FEW)]


def named(name):
    if name in BY_ROWS:
        program, hidden_size, more = BY_ROWS[name]
        return variant(program, hidden_size, **more)
    return variant(*VARIANTS[name])


@pytest.fixture(scope="module")
def compiled():
    """Compile on demand, each case once."""
    pytest.importorskip("cutlass")
    from flashnorm.kernels.compile import compile_variant

    done = {}

    def get(arch, name):
        if (arch, name) not in done:
            done[arch, name] = compile_variant(named(name), arch, inspect=True)
        return done[arch, name]

    return get


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_arithmetic_is_what_was_written(compiled, arch, name):
    """No contraction, no approximation, no flushing; architecture features only where they exist."""
    ptx = compiled(arch, name).ptx
    assert not not_allowed(ptx)
    assert ".ftz" not in ptx and ".approx" not in ptx and ".local" not in ptx
    assert ("griddepcontrol" in ptx) == (tiles.sm_of(arch) >= 90)
    entries = re.findall(r"\.visible \.entry (\w+)", ptx)
    assert entries and all(entry.startswith("flashnorm") and "cutlass" not in entry for entry in entries)
    found = [tile for _, tile in stream_plans.plans_for(named(name), arch)]
    assert ("barrier.cluster" in ptx) == any(tile.cluster_n > 1 for tile in found)
    assert ("cp.async" in ptx) == (any(tile.stages for tile in found) and name != "frozen")


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_nothing_spills(compiled, arch, name, tmp_path):
    """No local memory and no stack, read from the machine code."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled(arch, name).cubin)
    usage = binaries.resources(path)
    assert usage and all(stack == 0 and local == 0 for _, stack, local in usage), usage


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_whole_groups_move_16_bytes_at_a_time(compiled, arch):
    """Rows, weights and partials; the fold reads partials by columns, and writes two bytes of each.

    A weight that waits in shared memory is copied there, as rows are: nothing else loads 16 bytes.
    """
    for name in ("rms", "layer"):
        ptx = compiled(arch, name).ptx
        moves = set(re.findall(r"\b((?:ld|st)\.global[.\w]*)", ptx))
        copied = all(tile.vectors == "shared" for _, tile in stream_plans.plans_for(named(name), arch))
        loads = {"ld.global.f32"} if copied else {"ld.global.f32", "ld.global.v4.b32"}
        assert moves == loads | {"st.global.v4.b32", "st.global.b16"}, moves
        copies = set(re.findall(r"\b(cp\.async\.c[ag]\.[.\w]+ \[[^,]*, \[[^,]*, \d+)", ptx))
        assert {copy.rsplit(" ", 1)[1] for copy in copies} == {"16", "4"}, copies


# ------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "grid", "share"),
    (
        ("narrow", (3000,), None),
        ("rms", (10000,), None),
        ("rms", (3,), None),
        ("gemma", (2200,), None),
        ("mixed", (300,), None),
        ("wide", (300,), None),
        ("wide", (2048,), None),
        ("wide", (2300,), None),
        ("widest", (40,), None),
        ("layer", (1000,), None),
        ("layer-8192", (2200,), None),
        ("layer-wide", (20,), None),
        ("odd", (400,), None),
        ("heads", (700, 5), "last"),
        ("heads", (30, 5), "own"),
        ("tokens", (50,), "own"),
    ),
)
def test_canonical_bits_on_this_gpu(name, grid, share):
    from flashnorm.backends import cute
    from flashnorm.jit.arch import device_arch

    found = named(name)
    dtypes = tuple(found.dtype(operand) for operand in ("dout", "x", "weight"))
    one = Backward(found.program, found.hidden_size, found.vec, dtypes, grid, share=share)
    launch = cute.build(one.variant, str(device_arch(*torch.cuda.get_device_capability())))
    for pdl in (False, True):
        one.run(launch, pdl)
        one.compare()
