"""Backwards whose rows are summed before the ones in front of them are written: the same bits as any others."""

from dataclasses import replace

import pytest

from flashnorm.kernels import stream_plans
from flashnorm.kernels import tile as tiles
from flashnorm.kernels.stream_tile import asks_of
from tests import binaries
from tests.canonical.backward import Order
from tests.cute_backward import check
from tests.test_cute_backward import ALL, LAYER, RMS, WEIGHT, B, F, S, tile, variant
from tests.test_cute_compile import not_allowed

pytestmark = pytest.mark.cpu_only


@pytest.fixture(autouse=True)
def tracing():
    pytest.importorskip("cutlass")


SKEWED = {"again": "shared", "refill": True, "skew": True}


@pytest.mark.parametrize(
    ("program", "hidden_size", "dtypes"),
    ((RMS, 1000, (B, B, B)), (LAYER, 1028, (B, F, S)), (ALL, 520, (B, S, F)), (WEIGHT, 1000, (B, B, B))),
    ids=("rms", "layer", "all", "weight"),
)
def test_skewed_rows(program, hidden_size, dtypes):
    """Streams of no row, of one, of two, and of a block and a row, whose last row is written in a turn of its own."""
    shapes = ((64, 64, 2), (64, 64, 1), (32, 32, 4), (64, 128, 1))
    for number, rows in enumerate((1, 2, 3, 7, 8, 9, 10, 31)):
        threads, cta, cluster = shapes[number % 4]
        if threads * cluster > tiles.lanes(hidden_size):
            threads, cta, cluster = shapes[1]
        waits = {"stages": 2 + number % 3, "outer": ("shared", "registers")[number % 2], "batch": 1 + number % 2}
        vectors = ("raw", "shared", "global", "values")[number // 2 % 4]
        prefetch = ("none", "all")[number % 2]
        found = tile(hidden_size, 4, threads, cta, cluster, vectors=vectors, prefetch=prefetch, **waits, **SKEWED)
        check(found, program, dtypes, (rows,), pad=number % 2, order=Order(4, 1, 2))
    if program is RMS:
        found = tile(hidden_size, 4, 64, 64, stages=2, **SKEWED)
        check(found, program, dtypes, (4, 3), order=Order(4, 1, 2))
        assert check(found, program, dtypes, (7, 3), share="last", order=Order(4, 1, 2)) == "several"
        assert check(found, program, dtypes, (3, 3), share="own", order=Order(4, 1, 2)) == "own"


@pytest.mark.parametrize("program", (RMS, LAYER), ids=("rms", "layer"))
def test_skewed_short_streams(program):
    """A worker goes on with its second stream while the last row of the first one waits to be written."""
    for number, rows in enumerate((1, 3, 4, 5, 8, 9, 27, 32)):
        stages, cluster = 2 + number % 2, 1 + number // 2 % 2
        for streams, outer in ((1, "registers"), (2, "registers"), (2, "shared")):
            more = {"short": True, "streams": streams, "outer": outer, "stages": stages}
            found = tile(1000, 8, 64, 64, cluster, **SKEWED, **more)
            check(found, program, (B, B, B), (rows,), order=Order(4, 1, 8))


def test_a_skewed_plan_of_wide_rows():
    short = stream_plans.pick_short(32768, 8, asks_of(variant(RMS, 32768)), 90)
    for more in ({"stages": 2}, {"stages": 3, "outer": "registers"}):
        check(replace(short, skew=True, **more), RMS, (B, B, B), (5,), order=Order(4, 1, 2))


@pytest.mark.parametrize(
    ("program", "hidden_size", "shape", "more"),
    (
        (RMS, 32768, (512, 512, 2), {"outer": "shared", "vectors": "raw", "short": True, "streams": 2}),
        (RMS, 32768, (512, 512, 2), {"stages": 3, "vectors": "raw", "short": True, "streams": 2}),
        (RMS, 16384, (512, 512, 1), {"stages": 3, "vectors": "raw"}),
        (LAYER, 16384, (512, 512, 2), {"outer": "shared", "vectors": "shared"}),
    ),
)
def test_skewed_plans_compile(program, hidden_size, shape, more, tmp_path):
    """The arithmetic is what was written, and nothing spills: a branch may cost no copy of what a loop carries."""
    from flashnorm.kernels.compile import compile_variant

    found = tile(hidden_size, 8, *shape, **SKEWED, **more)
    made = compile_variant(variant(program, hidden_size), "sm_90a", plans=((None, found),), inspect=True)
    assert not not_allowed(made.ptx)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(made.cubin)
    usage = binaries.resources(path)
    assert usage and all(stack == 0 and local == 0 for _, stack, local in usage), usage


def test_a_fold_has_room_beside_skewed_rows(tmp_path):
    """Registers of a CTA of each, in steps of 8 a thread, are those of an SM at most."""
    from flashnorm.kernels.compile import compile_variant
    from flashnorm.kernels.partials import FOLD_THREADS

    asked = variant(RMS, 32768)
    short = stream_plans.pick_short(32768, 8, asks_of(asked), 90)
    found = replace(short, skew=True, fold_blocks=8, signal_early=True)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compile_variant(asked, "sm_90a", plans=((None, found),), inspect=True).cubin)
    fold, rows = sorted(-(-registers // 8) * 8 for registers, _, _ in binaries.resources(path))
    assert rows * found.num_threads + fold * FOLD_THREADS <= 65536, (rows, fold)
