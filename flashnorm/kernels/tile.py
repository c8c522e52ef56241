"""Tiles: how many threads, CTAs and passes a row gets. Pure Python, every number beside its reason.

A row of H elements is G = ceil(H/8) groups, owned by L = min(1024, G rounded up to a power of two) lanes
(lane l takes groups l, l+L, ...). The threads that share a row, T = threads_per_row * cluster_n of them,
divide the lanes: thread t holds lanes t, t+T, t+2T, ..., so it loads groups t, t+T, t+2T, ... The order
of additions belongs to lanes and never to threads, which is why any tile gives the same bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from flashnorm.program import (
    AddResidual,
    BlockScales,
    Cast,
    Gate,
    LoadGained,
    LoadGated,
    MeanVar,
    NextNorm,
    Silu,
    Variant,
)

GROUP = 8
MAX_LANES = 1024
WARP = 32
SLOT = 16  # bytes of shared memory that a thread's staged group takes at least
LEAST_COPY = 4  # bytes that cp.async moves at once, at least

WIDTH = {"int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}  # bytes of an element
WIDTH |= {"float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}

Hold = Literal["registers", "shared", "global"]
Prefetch = Literal["none", "vecs", "all"]
Plans = tuple[tuple["int | None", "RowTile"], ...]

# Shared memory one CTA may use, bytes (CUDA programming guide, technical specifications per compute capability).
SHARED_LIMIT = {80: 163, 86: 99, 87: 163, 88: 99, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
RESERVED = 1024  # bytes of it that the system takes of each CTA


def shared_limit(sm: int) -> int:
    """Bytes of shared memory a CTA may have on compute capability `sm` (90 = 9.0); unknown ones get the smallest."""
    return 1024 * SHARED_LIMIT.get(sm, 99)


def lanes(hidden_size: int) -> int:
    """L: the lanes of the canonical sum."""
    groups = -(-hidden_size // GROUP)
    return min(MAX_LANES, 1 << (groups - 1).bit_length())


@dataclass(frozen=True)
class Needs:
    """What a program asks of a tile.

    Attributes:
        loaded: element sizes of the operands that are loaded row by row, in bytes.
        held: bytes an element takes between the passes when it waits in registers.
        vectors: operands of the maps, whose elements take four bytes at worst.
        exchanges: values that every block of lanes sends to all threads of the row.
        heavy: maps and store take more registers than those of RMSNorm, for which the tiles are chosen.
        narrow: results take a byte an element.
        dense: instructions are the limit, so that no thread should idle at the end of a row.
        least: threads that share a row at least, where it has as many groups: those of a block are neighbours.
        grouped: a group is stored as soon as it is ready, so that rows may be abreast.
    """

    loaded: tuple[int, ...]
    held: int
    vectors: int = 1
    exchanges: int = 1
    heavy: bool = False
    narrow: bool = False
    dense: bool = False
    least: int = 1
    grouped: bool = True


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
        late_residual: the sum of a row in shared memory is stored in the last pass, so that the first one only reads.
        batch: groups per thread loaded together where a row does not fit registers.
        turns: rows that a thread works on one after the other, each under way before the one in front is summed.
            Weights that are loaded early serve all of them.
        abreast: rows that a thread works on at once: their sums cross warps together, and what it loads of a vector
            serves all of them, whether it is loaded early or late.
        ahead: what is loaded late is asked for a batch before it is used, the first one while the sums cross the row.
            That takes a batch's registers; rows that wait elsewhere leave them, so there it is always so.
        mailbox: what the CTAs of a cluster exchange arrives in mailboxes (memory.send_float), where each waits for its
            own alone, in place of the cluster's barrier.
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
    turns: int = 1
    abreast: int = 1
    ahead: bool = False
    mailbox: bool = False

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
            "turns must be positive": self.turns >= 1,
            "rows that take turns are a warp's at most, in registers": self.turns == 1
            or (t * c <= WARP and self.hold == "registers" and not self.staged),
            "abreast must be positive": self.abreast >= 1,
            "rows abreast are of one CTA, in registers that they are loaded to": self.abreast == 1
            or (c == 1 and self.hold == "registers" and not self.staged),
            "a mailbox is a cluster's": not self.mailbox or c > 1,
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
        """Rows that one CTA works on side by side."""
        return self.num_threads // self.threads_per_row

    @property
    def all_rows(self) -> int:
        """Rows of one CTA, those of all turns."""
        return self.rows * self.abreast * self.turns

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

    def stage_bytes(self, needs: Needs) -> int:
        """Shared memory of the staged rows."""
        return self.rounds * self.num_threads * sum(max(SLOT, GROUP * w) for w in needs.loaded) if self.staged else 0

    def exchange_bytes(self, needs: Needs) -> int:
        """Shared memory of what crosses warps, in whole slots, since staged rows come behind it."""
        values = self.rows * self.abreast * self.blocks * needs.exchanges if self.exchange else 0
        return -(-4 * values // SLOT) * SLOT + (SLOT * needs.exchanges if self.mailbox else 0)

    def shared_bytes(self, needs: Needs) -> int:
        return self.stage_bytes(needs) + self.exchange_bytes(needs)

    def groups_of(self, thread: int) -> list[int]:
        """The groups that thread `thread` of a row loads, in order (the emulation in tests reads this)."""
        return list(range(thread, self.groups, self.threads))


# Where an encoding has conversion instructions: of 8 bits from a compute capability on, e2m1 on these alone, in targets
# that are compiled for one device or family ("a", "f").
NATIVE_FP8 = 89
BLACKWELL = (100, 103, 110, 120, 121)


def converts_fp4(arch: str) -> bool:
    """Whether a target has instructions that convert to e2m1."""
    return sm_of(arch) in BLACKWELL and arch[-1] in "af"


def sm_of(arch: str) -> int:
    """90 of "sm_90a".

    Raises:
        ValueError: it is no such name.
    """
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise ValueError(f"arch must look like 'sm_90a', got {arch!r}")
    return int(match.group(1))


def needs_of(variant: Variant) -> Needs:
    """What a variant asks of its tiles."""
    program, load, store = variant.row_program, variant.row_program.load, variant.row_program.store
    rows = [o for o in load.operands() if o.kind in ("row", "pool") and o.mode != "out"]
    beside = [WIDTH[variant.dtype(o.name)] for stage in program.maps for o in stage.operands() if o.kind == "row"]
    loaded = (*(WIDTH[variant.dtype(o.name)] for o in rows), *beside)
    if isinstance(load, AddResidual):  # its storage dtype, or an unrounded fp32 sum
        held = WIDTH[variant.dtype("residual")] if load.rounded else 4
    elif isinstance(load, (LoadGained, LoadGated)):
        held = 4
    else:  # int8 is widened to as many values, so it counts as much as 16 bits
        held = max(2, *(WIDTH[variant.dtype(o.name)] for o in rows))
    held += sum(beside)  # what the maps read waits with the row
    again = isinstance(store, NextNorm)
    held = max(held, WIDTH[variant.dtype("residual_out")]) if again else held
    acts = isinstance(load, LoadGated) or any(isinstance(stage, (Silu, Gate)) for stage in program.maps)
    whole_row = isinstance(store, BlockScales) and store.block == 0
    vectors = sum(o.kind == "vec" for o in program.operands())
    return Needs(
        loaded=loaded,
        held=held,
        vectors=vectors,
        exchanges=(3 if isinstance(program.stats, MeanVar) else 1) + whole_row + again,
        heavy=vectors > 1 or min(loaded) == 1 or not isinstance(store, Cast) or acts,
        narrow=not isinstance(store, (Cast, NextNorm)),
        dense=acts or (isinstance(store, BlockScales) and 0 < store.block <= 32),
        least=store.block // GROUP if isinstance(store, BlockScales) else 1,
        grouped=not (whole_row or again),
    )
