"""Launch plans of the backward kernels: which tile for which row. Pure, as `plans` is.

The streams of a sum (`program.partials`) are 2^20 / H where nothing clamps them: 8192 elements of rows that are worked
on at the same time for each of 128 SMs. So a CTA has the workers of 8192 elements, 16 elements a thread, and there
are 128 of it: one for each SM of the devices that matter here (an H200 has 132). What hides latency is the stages: two
rows under way are 64 KiB an SM, and 4.8 TB/s with 700 ns want 26. Where there is room for two stages alone, groups are
refilled one by one, so that the next row is never all that is under way.

Streams are never fewer than 128, so wide rows have twice the partials, and streams that do not all run at the same
time: a second wave begins with empty stages. Where a stream is one block of rows (M <= 16 P), a worker follows two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashnorm.kernels.plans import has_clusters
from flashnorm.kernels.stream_tile import Again, Asks, Outer, StreamTile, Vectors, asks_of
from flashnorm.kernels.tile import GROUP, LEAST_COPY, RESERVED, WARP, Prefetch, lanes, shared_limit, sm_of
from flashnorm.program import Variant, partials
from flashnorm.program.backward import INNER_ROWS

StreamPlans = tuple[tuple["int | None", StreamTile], ...]


@dataclass(frozen=True)
class Shape:
    """What a table says of a tile: threads of a CTA at most, elements of a row a thread, CTAs a row, CTAs an SM.

    `exchanges`: sums of a row at most, of a program that it is for. `skew`: that of the tile, or no tile.
    `fold_blocks`: that of the tile, whose fold then lets the next kernel start early.
    """

    threads: int
    elements: int
    cluster: int = 1
    ctas: int = 1
    stages: int = 3
    streaming: bool = False
    prefetch: Prefetch = "all"
    exchanges: int = 2
    skew: bool = False
    fold_blocks: int = 1


Table = tuple[tuple[int, tuple[Shape, ...]], ...]
CTAS = 128
# By the largest H: what is tried, in order of preference, where registers and shared memory suffice. A row has 1024
# threads at most, over all CTAs of a cluster: those of wide rows have more elements, and shorter CTAs.
SHAPES: Table = (
    (2048, (Shape(512, 16), Shape(256, 16))),
    # 16384 x 4096: 102.5 us, 106 to 108 with three stages.
    (4096, (Shape(512, 16, stages=2, exchanges=1), Shape(512, 16), Shape(256, 16))),
    (8192, (Shape(512, 16), Shape(256, 16))),
    # LayerNorm, 16384 x 16384: 546 us on two CTAs of 512 threads a row, 684 on four of 256 that are not skewed.
    (
        16384,
        (
            Shape(512, 32),
            Shape(512, 16, 2, skew=True),
            Shape(256, 16, 4, 2),
            Shape(512, 16, 2),
            Shape(256, 16, 4),
            Shape(128, 16, 8),
        ),
    ),
    (32768, (Shape(512, 32, 2), Shape(256, 32, 4), Shape(128, 32, 8))),
    (65536, (Shape(256, 64, 4), Shape(128, 64, 8))),
    (131072, (Shape(128, 128, 8),)),
)
# The same for two short streams a worker. An SM had better have one CTA: 2048 x 32768 takes 110.6 us on two CTAs of 512
# threads a row (130 on four of 256, two of which share an SM), 108.9 skewed, 108.4 with a fold of few CTAs that wait
# beside the rows.
SHORT: Table = (
    (16384, ()),
    (32768, (Shape(512, 32, 2, skew=True, fold_blocks=8), Shape(512, 32, 2), Shape(256, 32, 4), Shape(128, 32, 8))),
    (65536, (Shape(256, 64, 4), Shape(128, 64, 8))),
    (131072, (Shape(128, 128, 8),)),
)
# Registers of what is neither held nor summed, as compiled kernels show; values that are kept are also worked in.
WORK = {"values": 52, "raw": 64, "shared": 64, "global": 64}
WORK_MEANS = 12  # more for a LayerNorm
HIDDEN = 4  # a round, of weights in registers that are widened when they are used
BY_ROWS = 12  # more to find the rows of a weight's row
NO_SUMS = 28  # less where nothing is summed over rows
SKEWED = {1: 32, 2: 20}  # less where passes are those of different rows, by the sums of a row


def registers(tile: StreamTile, asks: Asks) -> int:
    """Registers a thread is held to need."""
    row = 0
    if tile.again == "values":
        row = 2 * GROUP
    elif tile.again == "raw":
        row = sum(asks.loaded[:2]) * GROUP // 4
    if tile.stages == 0 and tile.again != "global":  # all of the row is loaded at once
        row = max(row, sum(asks.loaded) * GROUP // 4) + (2 * GROUP if tile.again == "values" else 0)
    vectors = {"values": 4, "raw": asks.vector}.get(tile.vectors, 0) * GROUP // 4 if asks.vector else 0
    vectors += HIDDEN if tile.vectors in ("raw", "shared") and tile.again != "values" else 0
    outer = tile.outer == "registers" and not tile.short
    sums = asks.sums * GROUP * (2 if outer else 1) if tile.summed else 0
    batch = sum(asks.loaded) * GROUP // 4 * tile.batch if tile.again == "global" else 0
    work = WORK[tile.again] + (WORK_MEANS if asks.exchanges > 1 else 0)
    work -= SKEWED.get(asks.exchanges, 0) if tile.skew else 0
    work += (BY_ROWS if asks.by_rows else 0) - (0 if tile.summed else NO_SUMS)
    return tile.rounds * (row + vectors + sums) + batch + work


def copies(tile: StreamTile, asks: Asks) -> bool:
    """Whether cp.async moves what the tile has in shared memory."""
    widths = (asks.loaded if tile.stages else ()) + ((asks.vector,) if tile.keeps_vectors(asks) else ())
    return all(tile.vec * width >= LEAST_COPY for width in widths)


def fits(tile: StreamTile, asks: Asks, sm: int, ctas: int = 1) -> bool:
    """Whether a tile's copies, registers and shared memory are there, for so many CTAs on an SM."""
    if not copies(tile, asks):
        return False
    shared = shared_limit(sm) // ctas - RESERVED * (ctas > 1)
    return registers(tile, asks) <= min(255, 65536 // (ctas * tile.num_threads)) and tile.stream_bytes(asks) <= shared


def tiles_of(hidden_size: int, vec: int, sm: int, table: Table = SHAPES) -> Iterator[tuple[Shape, StreamTile]]:
    """The table's tiles for a row, without what depends on registers and shared memory."""
    groups, streams = -(-hidden_size // GROUP), partials(1, hidden_size)
    for shape in next((found for limit, found in table if hidden_size <= limit), ()):
        c = shape.cluster
        if c > 1 and not has_clusters(sm):
            continue
        wanted = (1 << (groups - 1).bit_length()) * GROUP // (shape.elements * c)
        threads = min(max(1, wanted), lanes(hidden_size) // c)
        workers = min(streams // CTAS, shape.threads // threads, 8 if threads > WARP else streams) if c == 1 else 1
        cta = max(WARP, threads * max(1, workers))
        tile = StreamTile(hidden_size, vec, threads, cta, c, stages=0, again="global")
        yield shape, replace(tile, streaming=shape.streaming, prefetch=shape.prefetch)


def pick(hidden_size: int, vec: int, asks: Asks, sm: int) -> StreamTile:
    """The tile for a row of H elements; pure."""
    most = lanes(hidden_size)
    for shape, tile in tiles_of(hidden_size, vec, sm):
        if asks.exchanges > shape.exchanges:
            continue
        for again, outer, vectors, stages in SKEWED_ORDER if shape.skew else ORDER:
            if stages > shape.stages or (outer == "shared" and not asks.sums):
                continue
            # The registers are gone there.
            refill = (stages == 2 or (shape.skew and stages > 0)) and again == "shared" and not asks.by_rows
            full = replace(tile, again=again, outer=outer, vectors=vectors, stages=stages, refill=refill)
            if shape.skew and not (refill and full.exchange):
                continue
            full = replace(full, skew=shape.skew)
            if fits(full, asks, sm, shape.ctas):
                return full
    # Too wide: sums over rows by columns, and the rows by as many threads as there are.
    for again, batch in (("raw", 4), ("global", 4), ("global", 1)):
        for threads in (min(1024, most), min(512, most)):
            wide = StreamTile(hidden_size, vec, threads, max(WARP, threads), stages=0, summed=False, batch=batch)
            full = replace(wide, again="raw" if again == "raw" else "global", vectors="global")
            if fits(full, asks, sm):
                return full
    raise AssertionError(f"no tile for H = {hidden_size}")


STAGED: tuple[tuple[Again, Outer, Vectors], ...] = (
    ("values", "registers", "raw"),
    ("values", "shared", "shared"),
    ("shared", "registers", "raw"),
    ("shared", "shared", "raw"),
    ("shared", "registers", "shared"),
    ("shared", "shared", "shared"),
    ("shared", "shared", "global"),
)
UNSTAGED: tuple[tuple[Again, Vectors], ...] = (
    ("values", "raw"),
    ("values", "global"),
    ("raw", "raw"),
    ("raw", "global"),
    ("global", "global"),
)
# What to try first, where there is room: values of the first pass kept for the second one, weights in registers.
ORDER: list[tuple[Again, Outer, Vectors, int]] = [
    (again, outer, vectors, stages) for stages in (4, 3, 2) for again, outer, vectors in STAGED
] + [(again, "registers", vectors, 0) for again, vectors in UNSTAGED]
# Of skewed rows, which are read again in their stages: sums in registers leave their shared memory to a third stage.
SKEWED_ORDER = sorted((way for way in ORDER if way[0] == "shared"), key=lambda way: (-way[3], way[1] != "registers"))


def pick_short(hidden_size: int, vec: int, asks: Asks, sm: int) -> StreamTile | None:
    """The tile for so few rows that a stream is one block; None where it is that for any number."""
    if not asks.sums or asks.by_rows or asks.axes > 1:
        return None
    for shape, tile in tiles_of(hidden_size, vec, sm, SHORT):
        two = replace(tile, again="shared", outer="shared", stages=2, refill=True, short=True, streams=2)
        blocks = shape.fold_blocks if hidden_size % 4 == 0 else 1  # whose threads take four columns
        two = replace(two, skew=shape.skew, fold_blocks=blocks, signal_early=blocks > 1)
        for vectors in ("raw", "shared", "global"):
            full = replace(two, vectors=vectors)
            if fits(full, asks, sm, shape.ctas):
                return full
    return None


def plans(hidden_size: int, vec: int, asks: Asks, sm: int) -> StreamPlans:
    """(largest M, tile) for every class of M."""
    every, short = pick(hidden_size, vec, asks, sm), pick_short(hidden_size, vec, asks, sm)
    few = ((INNER_ROWS * partials(1, hidden_size), short),) if short else ()
    return (*few, (None, every))


def plans_for(variant: Variant, arch: str) -> StreamPlans:
    """The launch plans of a backward's variant."""
    return plans(variant.hidden_size, variant.vec, asks_of(variant), sm_of(arch))
