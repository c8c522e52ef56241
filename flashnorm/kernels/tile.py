"""Tiles: how many threads, CTAs and passes a row gets. Pure Python, every number beside its reason.

A row of H elements is G = ceil(H/8) groups, owned by L = min(1024, G rounded up to a power of two) lanes
(lane l takes groups l, l+L, ...). The threads that share a row, T = threads_per_row * cluster_n of them,
divide the lanes: thread t holds lanes t, t+T, t+2T, ..., so it loads groups t, t+T, t+2T, ... The order
of additions belongs to lanes and never to threads, which is why any tile gives the same bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from flashnorm.program import AddResidual, Variant

GROUP = 8
MAX_LANES = 1024
WARP = 32

WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2}

Hold = Literal["registers", "shared", "global"]
Prefetch = Literal["none", "vecs", "all"]
Plans = tuple[tuple["int | None", "RowTile"], ...]

# Shared memory one CTA may use, bytes (CUDA programming guide, technical specifications per compute capability).
SHARED_LIMIT = {80: 163, 86: 99, 87: 163, 88: 99, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}


def shared_limit(sm: int) -> int:
    """Bytes of shared memory a CTA may have on compute capability `sm` (90 = 9.0); unknown ones get the smallest."""
    return 1024 * SHARED_LIMIT.get(sm, 99)


def lanes(hidden_size: int) -> int:
    """L: the lanes of the canonical sum."""
    groups = -(-hidden_size // GROUP)
    return min(MAX_LANES, 1 << (groups - 1).bit_length())


@dataclass(frozen=True)
class RowTile:
    """One launch plan.

    Attributes:
        hidden_size: H.
        vec: elements that may be accessed together (8, 4, 2 or 1).
        threads_per_row: threads of one CTA that share a row; a power of two.
        num_threads: threads of a CTA; num_threads / threads_per_row rows are worked on side by side.
        cluster_n: CTAs that share a row and exchange their sums through distributed shared memory.
        hold: where a row waits for its second pass: "registers" (raw, in its storage dtype), "shared"
            (copied there by cp.async and read twice), or "global" (read twice from L2; needs neither).
        staged: rows arrive by cp.async; with hold="registers" they are then moved to registers once.
        early_weights: weights are loaded before the row's sum is known; costs registers, hides their latency.
        signal_early: the next kernel may start as soon as this one runs (its own wait still orders memory).
        prefetch: what is asked into L2 before the wait for the earlier kernel: nothing, the "vecs" (weights), or
            "all". L2 is where the GPU's memory is coherent, so a line that the earlier kernel still writes is
            never seen stale; no value is read.
        streaming: rows are marked as used once, so that they make room for weights in the caches.
        late_residual: the sum is stored in the second pass, so that the first one only reads.
        batch: groups per thread loaded together where a row does not fit registers.
    """

    hidden_size: int
    vec: int
    threads_per_row: int
    num_threads: int
    cluster_n: int = 1
    hold: Hold = "registers"
    staged: bool = False
    early_weights: bool = True
    signal_early: bool = False
    prefetch: Prefetch = "none"
    streaming: bool = False
    late_residual: bool = False
    batch: int = 4

    def __post_init__(self) -> None:
        t, n, c = self.threads_per_row, self.num_threads, self.cluster_n
        problems = {
            "hidden_size must be positive": self.hidden_size >= 1,
            "vec must be 1, 2, 4 or 8": self.vec in (1, 2, 4, 8),
            "threads_per_row must be a power of two": t >= 1 and t & (t - 1) == 0,
            "cluster_n must be 1, 2, 4, 8 or 16": c in (1, 2, 4, 8, 16),
            "more threads than lanes share a row": t * c <= self.lanes,
            "num_threads must be whole warps, at most 1024": n % WARP == 0 and WARP <= n <= 1024,
            "num_threads must be a multiple of threads_per_row": n % t == 0,
            "at most 15 rows of more than a warp fit the named barriers": t <= WARP or n // t <= 15,
            "a cluster works on one row, by whole warps": c == 1 or (t == n and t >= WARP),
            "hold='shared' needs staging": self.hold != "shared" or self.staged,
            "hold='global' is not staged": self.hold != "global" or not self.staged,
            "batch must be positive": self.batch >= 1,
        }
        for text, holds in problems.items():
            if not holds:
                raise ValueError(f"{text}: {self}")

    @cached_property
    def groups(self) -> int:
        """G: groups of a row, the last one perhaps partial."""
        return -(-self.hidden_size // GROUP)

    @cached_property
    def lanes(self) -> int:
        return lanes(self.hidden_size)

    @property
    def threads(self) -> int:
        """T: threads that share a row, over all CTAs of a cluster."""
        return self.threads_per_row * self.cluster_n

    @property
    def rows(self) -> int:
        """Rows of one CTA."""
        return self.num_threads // self.threads_per_row

    @property
    def lanes_per_thread(self) -> int:
        return self.lanes // self.threads

    @property
    def rounds(self) -> int:
        """Groups that the busiest thread loads."""
        return -(-self.groups // self.threads)

    @property
    def blocks(self) -> int:
        """Blocks of 32 lanes, each summed by itself before the blocks are."""
        return max(1, self.lanes // WARP)

    @property
    def exchange(self) -> bool:
        """Whether sums cross warps, through shared memory."""
        return self.threads > WARP

    def stage_bytes(self, widths: tuple[int, ...]) -> int:
        """Shared memory of the staged rows; `widths` are the element sizes of the operands loaded by rows."""
        return self.rounds * self.num_threads * sum(GROUP * w for w in widths) if self.staged else 0

    @property
    def exchange_bytes(self) -> int:
        """Shared memory of the block sums."""
        return self.rows * self.blocks * 4 if self.exchange else 0

    def shared_bytes(self, widths: tuple[int, ...]) -> int:
        return self.stage_bytes(widths) + self.exchange_bytes

    def groups_of(self, thread: int) -> list[int]:
        """The groups that thread `thread` of a row loads, in order (the emulation in tests reads this)."""
        return list(range(thread, self.groups, self.threads))


# ------------------------------------------------------------------ choosing one
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
    two: Shape | None = None  # in place of this one where two operands are loaded by rows


def _wide(threads: int, cluster: int, early_weights: bool) -> Shape:
    return Shape(threads, threads, cluster, early_weights, True, "vecs", shared=True, late_residual=True)


# The classes of M, by their largest M, and for each the tile by the size of a row: the largest number of 16-bit
# elements held a row (H for bf16; twice that where an fp32 value waits between the passes), rising.
#
# H200, bf16, CUDA graphs, cold L2, PDL (benchmarks/results/tune_cute_h200.jsonl). Few rows: latency counts, so a
# group or two a thread, everything asked into L2 before the earlier kernel is done (1 x 4096: 1.07 us, 1.37 without,
# 64 x 8192: 1.76 and 2.18) and the next kernel let in at once (1 x 4096: 1.37 us, 1.39 to 1.66 without). Many rows:
# bandwidth counts, so few barriers and 16 elements a thread or more, until a row is so wide that one CTA of it fills
# an SM: then clusters, the row in shared memory, since registers for it leave no second row in flight
# (2048 x 131072: 271 us on four CTAs, 284 in registers). There the fused addition stores its sum late, so that the
# first pass only reads (2048 x 131072: 543 us, 570 without). 32768 x 8192: 257 us with two rows a CTA in shared memory,
# 260 with one. Between them rows used once are marked so (1024 x 8192:
# 9.56 us, 10.04 without).
def _soon(threads: int, cta: int, cluster: int = 1) -> Shape:
    return Shape(threads, cta, cluster, signal_early=True, prefetch="all")


CLASSES: tuple[tuple[int | None, tuple[tuple[int, Shape], ...]], ...] = (
    (
        160,
        (
            (256, _soon(16, 64)),
            (1024, _soon(128, 128)),
            (2048, _soon(256, 256)),
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
            (4096, Shape(512, 512, signal_early=True)),
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
            (4096, Shape(256, 256)),
            (8192, Shape(128, 128, early_weights=False, signal_early=True, streaming=True)),
            (16384, Shape(256, 256, early_weights=False)),
            (32768, Shape(512, 512, early_weights=False)),
            (65536, Shape(1024, 1024, early_weights=False, shared=True)),
            (131072, _wide(256, 4, early_weights=False)),
            (1 << 30, _wide(128, 8, early_weights=True)),
        ),
    ),
    (
        None,
        (
            (256, Shape(16, 256)),
            (1536, Shape(32, 128, streaming=True)),
            (6144, Shape(256, 256)),
            (8192, Shape(512, 1024, shared=True, two=Shape(512, 512))),
            (16384, Shape(512, 512)),
            (32768, Shape(512, 512, early_weights=False)),
            (65536, Shape(1024, 1024, early_weights=False, shared=True)),
            (131072, _wide(256, 4, early_weights=False)),
            (1 << 30, _wide(128, 8, early_weights=True)),
        ),
    ),
)


def has_clusters(sm: int) -> bool:
    """Distributed shared memory, worth its barrier: sm_90 and the data-centre and embedded parts after it."""
    return 90 <= sm < 120


def _shape(size: int, rows: int, sm: int) -> Shape:
    """The table's word; where there are no clusters, one CTA has all the threads of the cluster."""
    table = next(t for limit, t in CLASSES if limit is None or rows <= limit)
    shape = next(s for limit, s in table if size <= limit)
    if shape.cluster == 1 or has_clusters(sm):
        return shape
    threads = min(MAX_LANES, shape.threads * shape.cluster)
    return replace(shape, threads=threads, cta=threads, cluster=1)


def _registers(tile: RowTile) -> int:
    """Registers a thread can have."""
    return min(255, 65536 // tile.num_threads)


def _registers_suffice(tile: RowTile, held: int) -> bool:
    """Held rows may take half of the registers; the rest computes."""
    return tile.rounds * GROUP * held // 4 <= min(64, _registers(tile) // 2)


def _weights_fit(tile: RowTile, held: int) -> bool:
    """Weights (at worst fp32) may wait beside the row where both leave three eighths of the registers."""
    return tile.rounds * GROUP * (held + 4) // 4 <= _registers(tile) * 5 // 8


def _batch(tile: RowTile, width: int) -> int:
    """Rounds loaded together, `width` bytes an element of each: two batches take half of the registers."""
    return max(1, min(4, _registers(tile) // 4 // (GROUP * width // 4)))


def pick(hidden_size: int, vec: int, loaded: tuple[int, ...], held: int, sm: int, rows: int) -> RowTile:
    """The tile for a row of H elements; pure.

    Args:
        hidden_size: H.
        vec: elements that may be accessed together.
        loaded: element sizes of the operands that are loaded row by row, in bytes.
        held: bytes an element takes between the two passes when it waits in registers.
        sm: compute capability, 90 for 9.0.
        rows: M, or any M of its class.
    """
    shape = _shape(hidden_size * held // 2, rows, sm)
    shape = shape.two if shape.two is not None and len(loaded) > 1 else shape
    cluster = min(shape.cluster, max(1, lanes(hidden_size) // WARP))
    threads = min(shape.threads, lanes(hidden_size) // cluster)
    cta = threads * (shape.cta // shape.threads) if threads >= WARP else shape.cta
    tile = RowTile(
        hidden_size, vec, threads, cta, cluster, early_weights=shape.early_weights, signal_early=shape.signal_early,
        prefetch=shape.prefetch, streaming=shape.streaming, late_residual=shape.late_residual,
    )  # fmt: skip
    if _registers_suffice(tile, held) and not shape.shared:
        early = tile.early_weights and _weights_fit(tile, held)
        return replace(tile, early_weights=early, batch=4 if early else _batch(tile, 4))
    early = shape.shared and tile.early_weights and _weights_fit(tile, 0)
    one_row = replace(tile, num_threads=threads, streaming=False)
    tile = replace(tile if shape.shared else one_row, early_weights=early, streaming=False)
    tile = replace(tile, batch=_batch(tile, 4))  # of weights, at worst fp32
    if vec * min(loaded) >= 4:  # the least that cp.async moves
        staged = replace(tile, hold="shared", staged=True)
        if staged.shared_bytes(loaded) <= shared_limit(sm):
            return staged
    if _registers_suffice(tile, held):
        return tile
    return replace(tile, hold="global", batch=_batch(tile, sum(loaded) + 4))


def plans(hidden_size: int, vec: int, loaded: tuple[int, ...], held: int, sm: int) -> Plans:
    """(largest M, tile) for every class of M, equal neighbours merged; the last one serves every larger M."""
    out: list[tuple[int | None, RowTile]] = []
    for limit, _ in CLASSES:
        tile = pick(hidden_size, vec, loaded, held, sm, 1 << 62 if limit is None else limit)
        if out and out[-1][1] == tile:
            out.pop()
        out.append((limit, tile))
    return tuple(out)


def sm_of(arch: str) -> int:
    """90 of "sm_90a".

    Raises:
        ValueError: it is no such name.
    """
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise ValueError(f"arch must look like 'sm_90a', got {arch!r}")
    return int(match.group(1))


def loaded_widths(variant: Variant) -> tuple[int, ...]:
    """Bytes an element of each operand that a row is loaded from."""
    return tuple(WIDTH[variant.dtype(o.name)] for o in variant.program.load.operands() if o.mode != "out")


def held_width(variant: Variant) -> int:
    """Bytes an element takes in registers between the passes: its storage dtype, or an unrounded fp32 sum."""
    load = variant.program.load
    if isinstance(load, AddResidual):
        return WIDTH[variant.dtype("residual")] if load.rounded else 4
    return WIDTH[variant.dtype("x")]


def plans_for(variant: Variant, arch: str) -> Plans:
    """The launch plans of a variant, as `plans` gives them."""
    return plans(variant.hidden_size, variant.vec, loaded_widths(variant), held_width(variant), sm_of(arch))
