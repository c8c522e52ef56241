"""Tiles of the backward kernels: a worker's share of the rows, and where what it keeps waits. Pure Python.

dweight is the sum over rows in an order that knows of P streams: row t belongs to stream t mod P. A worker, the
threads of a CTA or cluster that share a row, has one stream and takes its rows one after the other, so that its sums
stay where they are made. P depends on H and the number of weight rows alone, and the tile on everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from flashnorm.kernels.tile import GROUP, SLOT, WIDTH, RowTile
from flashnorm.program import BackwardProgram, Variant

Again = Literal["values", "raw", "shared", "global"]
Outer = Literal["registers", "shared"]
Vectors = Literal["values", "raw", "shared", "global"]


@dataclass(frozen=True)
class Asks:
    """What a backward program asks of a tile.

    Attributes:
        loaded: element sizes of the operands that are loaded row by row, in bytes.
        words: fp32 values that come with each row (rstd, the means).
        exchanges: sums of a row that cross warps.
        sums: element size of each vector whose gradient is summed over the rows: a dweight, a dbias.
        vector: element size of the weight, 0 without one.
        by_rows: the weight comes by rows.
        axes: of the grid of rows, 1 or 2.
    """

    loaded: tuple[int, ...]
    words: int = 1
    exchanges: int = 1
    sums: int = 1
    vector: int = 2
    by_rows: bool = False
    axes: int = 1


@dataclass(frozen=True)
class StreamTile(RowTile):
    """A launch plan of the backward.

    Attributes:
        stages: rows of a worker in shared memory, the one it works on and those under way; 0: none, each row is loaded
            into registers when its turn comes.
        again: from where the second pass has a row: the fp32 "values" of the first, "raw" registers, "shared" memory,
            or "global" memory once more.
        outer: where the sums of whole blocks of rows wait: "registers", or "shared" memory.
        vectors: where the weight waits: its fp32 "values", "raw" registers, "shared" memory, or nowhere ("global").
        summed: dweight is summed here; otherwise a kernel of its own reads the rows again, by columns.
        refill: a group of a stage is asked for again, of a later row, as soon as it has been read for the last time;
            otherwise a stage as a whole is, when the row after it is begun. One more row is under way for it.
        short: for streams of one block of rows at most: there is nothing to add to outer sums until their end.
        streams: that a worker follows, one after the other: p, and with two p + P/2, which fold together first. Then a
            stream must be one block, so that the outer sums of the first are those that the second one's are added to.
        skew: a row is summed before the one in front of it is written, so that nobody waits for sums that cross warps
            and CTAs without work of its own. Both wait in their stages; copies are under way, and waited for, group by
            group. For rows that are not summed it changes nothing.
        late_signal: the fold may start when the rows are done, not when they begin: it does not take the first SMs that
            get free, but all alike.
        signal_early: the next kernel may start when the fold does, not when the rows are done. What it does before its
            own wait, it does beside the last rows, on SMs whose rows are done and which have room beside the fold.
        fold_blocks: of 32 columns, of a CTA of the fold: 1, or a multiple of 4. Fewer CTAs with more registers have
            room beside the rows, so that they wait there for their end.
        fold_ctas: of the fold on an SM, at most; it asks for shared memory that it does not need. 0: as many as fit.
    """

    stages: int = 2
    again: Again = "values"
    outer: Outer = "registers"
    vectors: Vectors = "values"
    summed: bool = True
    refill: bool = False
    short: bool = False
    streams: int = 1
    skew: bool = False
    late_signal: bool = False
    fold_blocks: int = 1
    fold_ctas: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = {
            "a stage that is worked on needs another one": self.stages == 0 or self.stages >= 2,
            "again='shared' needs stages": self.again != "shared" or self.stages > 0,
            "again='global' and stages exclude each other": self.again != "global" or self.stages == 0,
            "a worker takes its own rows in turn": self.turns == 1,
            "what waits nowhere is not refilled": not self.refill or self.stages > 0,
            "a worker has one stream, or two short ones": self.streams == 1 or (self.streams == 2 and self.short),
            "sums of short streams wait for a second one or nowhere": not self.short
            or self.streams == 2
            or self.outer == "registers",
            "a skewed row waits in its stage, which is refilled": not self.skew
            or (self.again == "shared" and self.refill),
            "a row that one warp sums waits for nobody": not self.skew or self.exchange,
            "a fold has one block of columns or a multiple of four, of which none is divided": self.fold_blocks == 1
            or (self.fold_blocks > 0 and self.fold_blocks % 4 == 0 and self.hidden_size % 4 == 0),
            "workers of a CTA are a power of two": self.rows & (self.rows - 1) == 0,
            "what is not summed is one row a CTA, without outer sums": self.summed
            or (self.rows == 1 and self.outer == "registers"),
        }
        for text, holds in problems.items():
            if not holds:
                raise ValueError(f"{text}: {self}")

    def alone(self) -> StreamTile:
        """The plan for rows that are no stream: nothing is kept for a next one."""
        again: Again = "raw" if self.rounds <= 4 else "global"
        one = replace(self, streams=1, outer="registers", refill=False, skew=False)
        return replace(one, stages=0, again=again, vectors="global", short=False)

    def row_bytes(self, asks: Asks) -> int:
        """Shared memory of one row in turn of every worker of the CTA."""
        planes = sum(max(SLOT, GROUP * width) for width in asks.loaded)
        return (planes * self.rounds + 4 * asks.words) * self.num_threads

    def sums_bytes(self, asks: Asks) -> int:
        """Shared memory of the outer sums."""
        return self.rounds * self.num_threads * GROUP * 4 * asks.sums if self.outer == "shared" else 0

    def vectors_bytes(self, asks: Asks) -> int:
        """Shared memory of the weight."""
        return self.rounds * self.num_threads * max(SLOT, GROUP * asks.vector) if self.keeps_vectors(asks) else 0

    def keeps_vectors(self, asks: Asks) -> bool:
        return self.vectors == "shared" and asks.vector > 0

    def parity_bytes(self, asks: Asks) -> int:
        """Shared memory of a row's exchanges, of which there are `exchange_turns`."""
        values = self.rows * self.blocks * asks.exchanges if self.exchange else 0
        return -(-4 * values // SLOT) * SLOT

    @property
    def exchange_turns(self) -> int:
        """Rows that take turns with places for their sums, a power of two; no barrier keeps writers from readers.

        Whoever sends row i has the sums of row i - 1, skewed of row i - 2, so all have sent those, and before it have
        read the sums of row i - 2, skewed of row i - 4. Later ones may still be read: two places, skewed four.
        """
        return 4 if self.skew else 2

    @property
    def mailbox_bytes(self) -> int:
        """Shared memory of the mailboxes of a cluster's exchanges, one for each that takes turns."""
        return self.exchange_turns * SLOT if self.cluster_n > 1 else 0

    def fold_bytes(self, asks: Asks) -> int:
        """Shared memory in which the workers of a CTA add up, where the rows were before."""
        return self.rows * self.groups * GROUP * 4 if self.rows > 1 and self.summed and asks.sums else 0

    def stream_bytes(self, asks: Asks) -> int:
        """All of it."""
        exchanges = self.mailbox_bytes + self.exchange_turns * self.parity_bytes(asks)
        kept = exchanges + self.sums_bytes(asks) + self.vectors_bytes(asks)
        return kept + max(self.stages * self.row_bytes(asks), self.fold_bytes(asks))


def asks_of(variant: Variant) -> Asks:
    """What a backward's variant asks of its tiles."""
    program = variant.program
    assert isinstance(program, BackwardProgram)
    operands = program.operands()
    rows = [o.name for o in operands if o.kind == "row" and o.mode == "in"]
    return Asks(
        loaded=tuple(WIDTH[variant.dtype(name)] for name in rows),
        words=sum(o.kind == "per_row" for o in operands),
        exchanges=(2 if program.norm == "layer" else 1) if program.rows else 0,
        sums=program.sums,
        vector=WIDTH[variant.dtype("weight")] if program.weight and program.rows else 0,
        by_rows=bool(variant.row_vecs),
        axes=variant.row_rank,
    )
