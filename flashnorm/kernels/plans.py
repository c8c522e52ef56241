"""Launch plans of the row kernels: which tile for which row, how many rows, and which program.

All the numbers of the `cute` route, with their measured reasons. Pure: asked about devices that are not here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashnorm.kernels.tile import (
    GROUP,
    LEAST_COPY,
    WARP,
    Needs,
    Plans,
    Prefetch,
    RowTile,
    lanes,
    needs_of,
    shared_limit,
    sm_of,
)
from flashnorm.program import Variant


@dataclass(frozen=True)
class Shape:
    """What a table says of a tile: threads a row, threads a CTA, CTAs a row, and what else pays there."""

    threads: int
    cta: int
    cluster: int = 1
    early_weights: bool = True
    signal_early: bool = False
    prefetch: Prefetch = "none"
    streaming: bool = False
    shared: bool = False  # the row waits in shared memory where registers would hold it too
    late_residual: bool = False
    turns: int = 1
    abreast: int = 1
    ahead: bool = False  # of the vectors, where rows are abreast
    batch: int = 0  # rounds whose vectors are loaded together; 0: as many as registers allow
    apart: Shape | None = None  # in place of this one where rows cannot be abreast, instructions are the limit, or two
    # operands are loaded by rows
    two: Shape | None = None  # in place of this one where two operands are loaded by rows
    mean: Shape | None = None  # in place of this one for LayerNorm's three sums and two vectors
    narrow: Shape | None = None  # in place of this one where results take a byte an element


def _wide(threads: int, cluster: int, early_weights: bool) -> Shape:
    return Shape(threads, threads, cluster, early_weights, True, "vecs", shared=True, late_residual=True)


# 2048 x 131072: 266.3 us with nothing asked for in L2, 271.8 with the weights, 287 to 289 where sums come to mailboxes.
_WIDER = _wide(256, 4, early_weights=False)
_WIDER = replace(_WIDER, prefetch="none", two=_WIDER)


# Three sums are two barriers, and weight and bias in fp32 are four times a bf16 row. Few warps a row, with weights for
# a few groups at a time, leave registers for several rows on an SM (H200, fp32 weight and bias, 16384 x 7168: 121 us
# on 128 threads, 153 on 256, 190 on 512, 302 with the weights loaded early). Clusters lose what the vectors gain from
# an L1 that several rows share (8192 x 16384: 141 us on one CTA, 170 on two).
def _thin(threads: int, batch: int = 0, shared: bool = False) -> Shape:
    return Shape(threads, threads, early_weights=False, signal_early=True, shared=shared, batch=batch)


# Beyond them two rows abreast (8192 x 16384: 126 registers, so two CTAs and as many rows on an SM as one by one): half
# the loads of vectors, half the barriers, and a batch under way while sums cross the row. 137.1 us, 140.4 one by one.
_ABREAST = replace(_thin(256, 1), abreast=2, ahead=True, apart=_thin(256, 1))

# The same of up to 8192 on 128 threads (16384 x 7168: 116.8 us; x 5120: 85.0, 88.0 one by one); apart, two rows in a
# CTA find the vectors in L1 (16384 x 7168: 118.8 us, 121.2 with a row; not so in CUDA).
_PAIRS = Shape(128, 128, early_weights=False, batch=1, abreast=2, ahead=True,
               apart=Shape(128, 256, early_weights=False, batch=1))  # fmt: skip
_LESS_WIDE = replace(_PAIRS, ahead=False, apart=_thin(128))

# Where a row is a few groups, its three sums cost as many instructions as its elements: four rows in turn share the
# vectors in registers (32768 x 128: 6.2 us, 7.5 with one row and late vectors). Beyond what runs at once that is as
# fast as memory goes, and fewer threads are better (262144 x 128: 35.0 us on 4, 35.1 on 8 with four rows in turn, 35.0
# with two abreast, of 14.7 instructions an element for 17.0).
_NARROW_MEAN = Shape(16, 128, turns=4)
_MANY_NARROW_MEAN = Shape(4, 64, early_weights=False, batch=4)


# The classes of M, by their largest M, and for each the tile by the size of a row: the largest number of 16-bit
# elements held a row (H for bf16; twice that where an fp32 value waits between the passes), rising.
#
# H200, bf16, CUDA graphs, cold L2, PDL (benchmarks/results/tune_cute_h200.jsonl). Few rows: latency counts, so a
# group or two a thread, everything asked into L2 before the earlier kernel is done (1 x 4096: 1.07 us, 1.37 without,
# 64 x 8192: 1.76 and 2.18) and the next kernel let in at once (1 x 4096: 1.37 us, 1.39 to 1.66 without). Many rows:
# bandwidth counts, so few barriers and 16 elements a thread or more, until a row is so wide that one CTA of it fills
# an SM: then clusters, the row in shared memory, since registers for it leave no second row in flight (2048 x 131072:
# 266 us on four CTAs, weights loaded 4 groups at a time; 267 with 8, 280 in registers). There the fused addition
# stores its sum late, so that the first pass only reads (2048 x 131072: 543 us, 570 without). 32768 x 8192: 254.8 us
# with two rows abreast, 256.4 with two a CTA in shared memory, 258.3 with one (fp32, x 4096: 301 us, 380 and 304; other
# widths and fewer rows of this class were not measured). Between them rows used once are marked
# so (1024 x 8192: 9.56 us, 10.04 without). FP8 results halve what is written, so that fewer threads a row win
# (32768 x 8192: 187 us on 256 threads, 207 on 512; 16384 x 4096: 49.5 on 128, 51.7 on 256), but for a fused addition,
# which moves as much as before (8192 x 16384: 224 us on 1024, 226 on 512).
def _soon(threads: int, cta: int, cluster: int = 1, mean: Shape | None = None) -> Shape:
    return Shape(threads, cta, cluster, signal_early=True, prefetch="all", mean=mean)


def _narrow(mean: Shape) -> tuple[int, Shape]:
    return 256, Shape(16, 256, mean=mean, narrow=Shape(8, 128, two=Shape(16, 256)))


# Of many rows, those beyond 256.
_WIDE: tuple[tuple[int, Shape], ...] = (
    (1536, Shape(32, 128, streaming=True)),
    *(
        (size, Shape(256, 256, mean=mean, narrow=Shape(128, 128, two=Shape(256, 256))))
        for size, mean in ((4096, _thin(128)), (6144, _LESS_WIDE))
    ),
    (
        8192,
        Shape(
            512,
            512,
            early_weights=False,
            batch=2,
            abreast=2,
            apart=Shape(512, 1024, shared=True),
            two=Shape(512, 512),
            mean=_PAIRS,
            narrow=Shape(256, 256, two=Shape(512, 512)),
        ),
    ),
    (
        16384,
        Shape(
            512,
            512,
            mean=_ABREAST,
            narrow=Shape(256, 256, early_weights=False, two=Shape(512, 512)),
        ),
    ),
    (
        32768,
        Shape(
            512,
            512,
            early_weights=False,
            mean=Shape(256, 256, early_weights=False, shared=True),
            narrow=Shape(512, 512, early_weights=False, two=Shape(1024, 1024)),
        ),
    ),
    (65536, Shape(1024, 1024, early_weights=False, shared=True)),
    (131072, _WIDER),
    (1 << 30, _wide(128, 8, early_weights=True)),
)

CLASSES: tuple[tuple[int | None, tuple[tuple[int, Shape], ...]], ...] = (
    (
        160,
        (
            (256, _soon(16, 64)),
            (1024, _soon(128, 128)),
            (2048, _soon(256, 256)),
            (4096, _soon(512, 512, mean=_soon(256, 256))),
            (16384, _soon(512, 512)),
            (32768, _soon(512, 512, 2)),
            (65536, _soon(256, 256, 4)),
            (1 << 30, _soon(128, 128, 8)),
        ),
    ),
    (
        768,
        (
            (256, Shape(16, 128)),
            (1536, Shape(64, 128)),
            (4096, Shape(512, 512, signal_early=True, mean=Shape(256, 256, signal_early=True, streaming=True))),
            (8192, Shape(512, 512, signal_early=True)),
            (16384, Shape(512, 512)),
            (32768, Shape(512, 512, 2)),
            (65536, Shape(256, 256, 4)),
            (1 << 30, Shape(128, 128, 8)),
        ),
    ),
    (
        3072,
        (
            (256, Shape(16, 256)),
            (1536, Shape(32, 128)),
            (4096, Shape(256, 256, mean=_thin(128))),
            (
                8192,
                Shape(
                    128, 128, early_weights=False, signal_early=True, streaming=True, mean=_thin(128, 1, shared=True)
                ),
            ),
            (16384, Shape(256, 256, early_weights=False)),
            (32768, Shape(512, 512, early_weights=False)),
            (65536, Shape(1024, 1024, early_weights=False, shared=True)),
            (131072, _WIDER),
            (1 << 30, _wide(128, 8, early_weights=True)),
        ),
    ),
    (98304, (_narrow(_NARROW_MEAN), *_WIDE)),
    (None, (_narrow(_MANY_NARROW_MEAN), *_WIDE)),
)


def has_clusters(sm: int) -> bool:
    """Distributed shared memory, worth its barrier: sm_90 and the data-centre and embedded parts after it."""
    return 90 <= sm < 120


def _dense(shape: Shape, hidden_size: int, held: int, most: bool, narrow: bool, blocks: bool) -> Shape:
    """The shape with threads that have the same number of groups each, where that is possible.

    Rows of a few groups a thread: two to five groups. With `blocks` of scales three at least where there are more rows
    than run at once (two in rows of eight): fewer instructions; SiLU gains more from warps (99840 x 512: 49.9 us with
    two groups, 52.0 with four; x 128: 13.8 and 14.7). Of three groups two rows take turns and share what a thread does
    for itself and the widened weights; with more, turns would leave too few warps (99840 x 192: 0.95 of `mul`, three
    groups; x 128: 0.82, four in turn on 24 warps). Wider rows: fewer threads, as long as they hold few enough (NVFP4 at
    7168: 27.8 with 3.5 groups a thread, 22.8 with seven), for codes as few as hold 128 bytes (at 4096: 24.2 with four
    groups, 22.2 with eight).
    """
    groups, threads = -(-hidden_size // GROUP), WARP
    least = 3 if most and groups > 8 and blocks else 2

    def holds(threads: int) -> bool:
        return groups % threads == 0 and groups // threads * GROUP * held <= 128

    while threads > 1 and (groups % threads or groups // threads < least):
        threads //= 2
    if least <= groups // threads <= 5 and groups % threads == 0:
        return Shape(threads, 128, turns=2 if most and groups // threads == 3 else 1)
    threads = shape.threads
    while threads > WARP and groups % threads:
        threads //= 2
    if not holds(threads) or shape.cluster > 1:
        return shape
    fewer = threads
    while narrow and fewer > WARP and holds(fewer // 2):
        fewer //= 2
    if fewer < threads:
        return replace(shape, threads=fewer, cta=max(64, fewer), early_weights=False, batch=2)
    return replace(shape, threads=threads, cta=threads * (shape.cta // shape.threads))


def _shape(size: int, rows: int) -> Shape:
    """The table's word."""
    table = next(t for limit, t in CLASSES if limit is None or rows <= limit)
    return next(s for limit, s in table if size <= limit)


def _registers(tile: RowTile) -> int:
    """Registers a thread can have."""
    return min(255, 65536 // tile.num_threads)


def _registers_suffice(tile: RowTile, held: int) -> bool:
    """Held rows may take half of the registers; the rest computes."""
    return tile.rounds * GROUP * held // 4 <= min(64, _registers(tile) // 2)


def _weights_fit(tile: RowTile, held: int, vectors: int) -> bool:
    """Weights (at worst fp32) may wait beside the row where both leave 3/8 of the registers; two vectors take 1/4."""
    fit = tile.rounds * GROUP * (held + 4 * vectors) // 4 <= _registers(tile) * 5 // 8
    return fit and (vectors == 1 or tile.rounds * GROUP * vectors <= _registers(tile) // 4)


def _batch(tile: RowTile, rows: int, vectors: int) -> int:
    """Rounds loaded together, of vectors and of `rows` bytes an element: a batch takes a quarter of the registers.

    Two vectors take three eighths, but few rounds are loads enough: registers left are further rows on the SM.
    """
    room, most = (_registers(tile) * 3 // 8, min(3, tile.rounds)) if vectors > 1 else (_registers(tile) // 4, 4)
    return max(1, min(most, room // (GROUP * (rows + 4 * vectors) // 4)))


def pick(hidden_size: int, vec: int, needs: Needs, sm: int, rows: int) -> RowTile:
    """The tile for a row of H elements; pure.

    Args:
        hidden_size: H.
        vec: elements that may be accessed together.
        needs: what the program asks for.
        sm: compute capability, 90 for 9.0.
        rows: M, or any M of its class.
    """
    loaded, held, vectors = needs.loaded, needs.held, max(1, needs.vectors)
    shape = _shape(hidden_size * held // 2, rows)
    if shape.mean is not None and needs.exchanges >= 3:
        shape = shape.mean
    elif shape.narrow is not None and needs.narrow:
        shape = shape.narrow
    shape = shape.two if shape.two is not None and len(loaded) > 1 else shape
    if shape.apart is not None and (needs.dense or not needs.grouped or len(loaded) > 1):
        shape = shape.apart
    if shape.cluster > 1 and not has_clusters(sm):  # one CTA has their threads, or as many as registers allow
        most = min(512 if needs.heavy else 1024, shape.threads * shape.cluster)
        shape = replace(shape, threads=most, cta=most, cluster=1)
    if needs.dense and rows > 3072:
        shape = _dense(shape, hidden_size, held, rows > 98304, needs.narrow, needs.least > 1)
    cluster = min(shape.cluster, max(1, lanes(hidden_size) // WARP))
    threads = min(max(shape.threads, needs.least), lanes(hidden_size) // cluster)
    cta = threads * (shape.cta // shape.threads) if threads >= WARP else shape.cta
    tile = RowTile(
        hidden_size, vec, threads, cta, cluster, early_weights=shape.early_weights, signal_early=shape.signal_early,
        prefetch=shape.prefetch, streaming=shape.streaming, late_residual=shape.late_residual,
    )  # fmt: skip
    if _registers_suffice(tile, held) and not shape.shared:
        early = tile.early_weights and _weights_fit(tile, held, vectors)
        turns = shape.turns if tile.threads <= WARP else 1
        batch = 4 if early else shape.batch or _batch(tile, 0, vectors)
        abreast = shape.abreast if _registers_suffice(tile, held * shape.abreast) else 1
        ahead = shape.ahead and abreast > 1
        return replace(tile, early_weights=early, batch=batch, turns=turns, abreast=abreast, ahead=ahead)
    early = shape.shared and tile.early_weights and _weights_fit(tile, 0, vectors)
    one_row = not shape.shared and threads >= WARP
    tile = replace(tile, num_threads=threads if one_row else cta, early_weights=early, streaming=False)
    asked = shape.batch if shape.shared and shape.batch * vectors <= 8 else 0
    tile = replace(tile, batch=asked or _batch(tile, 0, vectors))
    if vec * min(loaded) >= LEAST_COPY:
        staged = replace(tile, hold="shared", staged=True)
        if staged.shared_bytes(needs) <= shared_limit(sm):
            return staged
    if _registers_suffice(tile, held):
        return tile
    return replace(tile, hold="global", batch=_batch(tile, sum(loaded), vectors))


def plans(hidden_size: int, vec: int, needs: Needs, sm: int) -> Plans:
    """(largest M, tile) for every class of M, equal neighbours merged; the last one serves every larger M."""
    out: list[tuple[int | None, RowTile]] = []
    for limit, _ in CLASSES:
        tile = pick(hidden_size, vec, needs, sm, 1 << 62 if limit is None else limit)
        if out and out[-1][1] == tile:
            out.pop()
        out.append((limit, tile))
    return tuple(out)


def plans_for(variant: Variant, arch: str) -> Plans:
    """The launch plans of a variant, as `plans` gives them."""
    return plans(variant.hidden_size, variant.vec, needs_of(variant), sm_of(arch))
