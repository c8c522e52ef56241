"""What a backward sees of the kernel: this thread's share of the row that its worker is at, and of those to come.

A worker follows one stream of rows. Addresses are moved from row to row, so that no row costs a division, and rows
come through a ring of stages in shared memory, each thread's groups by itself: nobody waits for the copies of others.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64

from flashnorm.kernels import memory
from flashnorm.kernels.codec import unpack
from flashnorm.kernels.fp import hide
from flashnorm.kernels.frame import Frame, extent, row_count
from flashnorm.kernels.tile import SLOT, WIDTH


@dataclass(frozen=True)
class Walk:
    """Which rows a stream has: t = first, first + step, ... below `count`; t counts the rows of a part of the grid.

    Attributes:
        first, step, count: Int64.
        corner: the coordinates of the part's row 0, one or two Int64.
        width: rows of the part along its last axis (Int64); None where the grid has one axis.
        leap: None, or (Int32, Int64) of a walk that goes on with a second stream, in a grid of one axis: after how many
            rows, those that do not exist counted, and how much further than the first stream it begins.
    """

    first: Any
    step: Any
    count: Any
    corner: tuple
    width: Any = None
    leap: Any = None

    def coords(self):
        """The coordinates of the first row."""
        if self.width is None:
            return (self.corner[0] + self.first,)
        return (self.corner[0] + self.first // self.width, self.corner[1] + self.first % self.width)

    def rows(self, further=0):
        """Rows of the stream (Int32), or of that which begins so much further; both begin before row `step`."""
        return Int32((self.count - self.first - Int64(further) + self.step - Int64(1)) // self.step)


class Cursor:
    """Where some operands have the row that a stream is at: a list of raw integers, moved by `advance`.

    The list is the row's number, in a grid of two axes the place along the last one, then an address for each operand.
    """

    def __init__(self, k, walk, names):
        self.walk, self.names = walk, names
        self.steps, self.wraps = {}, {}
        self.rows, self.more = walk.rows(), None if walk.leap is None else walk.rows(walk.leap[1])
        coords = walk.coords()
        for name in names:
            strides = [Int64(s) * Int64(WIDTH[k.variant.dtype(name)]) for s in k.tensors[name].stride]
            if walk.width is None:
                self.steps[name] = walk.step * strides[0]
            else:
                along = walk.step % walk.width
                self.steps[name] = walk.step // walk.width * strides[0] + along * strides[1]
                self.wraps[name] = strides[0] - walk.width * strides[1]
            if walk.leap is not None:
                self.wraps[name] = (walk.leap[1] - Int64(walk.leap[0]) * walk.step) * strides[0]
        self.along = None if walk.width is None else walk.step % walk.width
        self.start = [Int32(0), *(() if walk.width is None else (walk.first % walk.width,))]
        self.start += [k.address_of(name, coords) for name in names]
        self.kinds = [Int32] + [Int64] * (len(self.start) - 1)

    def here(self, state):
        """Whether there is such a row, int32."""
        inside = (state[0] < self.rows).to(Int32)
        if self.walk.leap is not None:
            first = self.walk.leap[0]
            inside = inside | (first <= state[0]).to(Int32) & (state[0] < first + self.more).to(Int32)
        return inside

    def places(self, state):
        """Addresses by name."""
        return dict(zip(self.names, state[len(state) - len(self.names) :], strict=True))

    def advance(self, state):
        """The state at the stream's next row."""
        places, number = self.places(state), state[0] + Int32(1)
        if self.walk.leap is not None:
            over = (number == self.walk.leap[0]).to(Int64)
            return [number, *(at + self.steps[name] + over * self.wraps[name] for name, at in places.items())]
        if self.walk.width is None:
            return [number, *(at + self.steps[name] for name, at in places.items())]
        along = state[1] + self.along
        over = (self.walk.width - Int64(1) < along).to(Int64)
        moved = [at + self.steps[name] + over * self.wraps[name] for name, at in places.items()]
        return [number, along - over * self.walk.width, *moved]


class StreamFrame(Frame):
    """One thread's view of the rows of a stream.

    Attributes:
        asks: what the program asks of the tile.
        row_ok: whether the row at hand exists (int32); what does not is loaded as +0 and not stored.
        by_row_vecs: vectors that come by row.
    """

    def __init__(self, tile, variant, sm, tensors, tid, bid, shared_base, asks):
        self.asks = asks
        mailboxes, shared_base = shared_base, shared_base + Int32(tile.mailbox_bytes)
        super().__init__(tile, variant, sm, tensors, tid, bid, shared_base, asks)
        self.mailboxes, self.mailbox_count, self._mailbox = mailboxes, tile.exchange_turns, None
        self._parity_base = self._exchange_base
        kept = shared_base + Int32(tile.exchange_turns * tile.parity_bytes(asks))
        self.sums_base = kept + tid * Int32(SLOT)
        self.vectors_base = self.sums_base + Int32(tile.sums_bytes(asks))
        self.fold_base = kept + Int32(tile.sums_bytes(asks) + tile.vectors_bytes(asks))
        self.stage_base = self.fold_base + tid * Int32(SLOT)
        self.words_base = (
            self.fold_base + Int32(tile.row_bytes(asks) - 4 * asks.words * tile.num_threads) + tid * Int32(4)
        )
        self._ring = Int32(0)
        self.skewed = tile.skew and asks.exchanges > 0
        operands = variant.program.operands()
        self.loads = tuple(o.name for o in operands if o.kind == "row" and o.mode == "in")
        self.words = tuple(o.name for o in operands if o.kind == "per_row")
        self.results = tuple(o.name for o in operands if o.kind == "row" and o.mode == "out")
        for j in range(tile.rounds):  # made here, where the whole kernel may use them
            self.mask(j)

    def _place_row(self, turn):
        self.by_row, self.padded, self.row_ok, self.coords = set(), False, None, ()
        self._count = row_count(self.tensors["dout"], self.variant.row_rank)
        self.worker = Int64(self.cta) * Int64(self.tile.rows) + Int64(self.row_in_cta)
        self._zero = Int32(self._count >> Int64(62))

    def _readable(self, name):
        return None if self.operands[name].kind == "vec" else self.row_ok

    def address_of(self, name, coords):
        """int64 address of this thread's round 0 in the row at `coords`."""
        self.coords, saved = coords, self.coords
        self.by_row = {name}
        at = self._base(name)
        self.coords, self.by_row = saved, set()
        del self._bases[name]
        return at

    # ------------------------------------------------------------------ the row at hand
    def mailbox(self):
        """They take turns, row by row."""
        return self._mailbox

    def enter(self, here, places, number, ring):
        """Turn to a row, the one of this number: whether it exists, the addresses of its operands, and its stage."""
        self.row_ok, self._ring = here, ring
        self._bases.update(places)
        self._exchanges, self._exchanged = 0, True
        self._exchange_base = self._parity_base
        if self.tile.exchange:
            turns = self.tile.exchange_turns
            turn, phase = number & Int32(turns - 1), (number >> Int32(turns.bit_length() - 1)) & Int32(1)
            self._exchange_base = self._parity_base + turn * Int32(self.tile.parity_bytes(self.asks))
            if self.tile.cluster_n > 1:
                self._mailbox = self.mailboxes + turn * Int32(SLOT), phase
        self._zero = Int32(self._count >> Int64(62)) | here >> Int32(1)

    def fetch(self):
        """Load the row at hand into registers, where it has not come through the stages."""
        if self.tile.stages == 0 and self.tile.again != "global":
            for name in self.loads:
                self.load(name, range(self.tile.rounds))

    def word(self, name):
        """An fp32 value that comes with the row."""
        if self.tile.stages == 0:
            return self.load_one(name)
        (value,) = memory.read_floats(self._word_slot(name, self._ring).ir_value(), 1)
        return value

    def raw(self, name, j):
        if name in self.loads and self.tile.stages:
            slot, plane = self._slot(name, j)
            return memory.read_slot((slot + self._ring).ir_value(), plane, self.variant.dtype(name))
        if name == "weight" and self.tile.keeps_vectors(self.asks):
            slot, plane = self._vector_slot(j)
            return memory.read_slot(slot.ir_value(), plane, self.variant.dtype(name))
        return self._raw[name, j]

    def bring(self, names, batch):
        """Load some rounds of a row that waits nowhere, before a pass comes to them."""
        if self.tile.again == "global":
            for j in batch:
                for name in names:
                    self.load(name, (j,))

    def again(self, name, j):
        """Raw registers of a round once more; no compiler keeps what it made of the first ones."""
        if self.tile.again == "raw":
            return [hide(r, self._zero.ir_value()) for r in self.held[name, j]]
        return self.raw(name, j)

    # ------------------------------------------------------------------ stages
    def prefetch_round(self, name, place, here):
        """Ask for this thread's groups of an operand in L2, where its row is `here` (int32 or None)."""
        for j in range(self.tile.rounds):
            offset = j * self.tile.threads * memory.GROUP * WIDTH[self.variant.dtype(name)]
            pred = self.has_group(j)
            pred = here if pred is None else pred if here is None else pred & here
            memory.prefetch((place + Int64(offset)).ir_value(), None if pred is None else pred.ir_value())

    def _slot(self, name, j):
        plane = self.tile.num_threads * SLOT
        before = sum(memory.planes_of(self.variant.dtype(n)) for n in self.loads[: self.loads.index(name)])
        each = memory.planes_of(self.variant.dtype(name))
        return self.stage_base + Int32((before * self.tile.rounds + j * each) * plane), plane

    def _word_slot(self, name, ring):
        return self.words_base + Int32(self.words.index(name) * self.tile.num_threads * 4) + ring

    def ask(self, here, places, ring):
        """Start the copies of a row into the stage at `ring`; one that does not exist becomes +0."""
        for j in range(self.tile.rounds):
            for name in self.loads:
                self._ask_group(name, j, here, places, ring)
            if self.skewed:
                self._close_round(j, here, places, ring)
        if not self.skewed:
            self._ask_words(here, places, ring)
            memory.stage_commit()

    def _close_round(self, j, here, places, ring):
        """The end of a batch of copies where each round is one; words come with the first."""
        if j == 0:
            self._ask_words(here, places, ring)
        memory.stage_commit()

    def arrive(self, j):
        """Wait for a round of the row at hand, where each comes by itself; those of later rows may be under way."""
        if self.skewed:
            later = (self.tile.stages - 2) * self.tile.rounds
            memory.stage_wait(self.tile.rounds - 1 - j + later)

    def _ask_group(self, name, j, here, places, ring):
        slot, plane = self._slot(name, j)
        dtype = self.variant.dtype(name)
        offset = j * self.tile.threads * memory.GROUP * WIDTH[dtype]
        valid = self._valid_bytes(name, j, here)
        address = (places[name] + Int64(offset)).ir_value()
        memory.stage_group((slot + ring).ir_value(), plane, address, dtype, self.tile.vec, valid.ir_value())

    def _ask_words(self, here, places, ring):
        for name in self.words:
            memory.stage_word(self._word_slot(name, ring).ir_value(), places[name].ir_value(), here.ir_value())

    def expect(self, here, places):
        """Which row comes to the stage of the row at hand, by `refill`."""
        self._later = here, places

    def refill(self, names, j):
        """Start the copies of a round of the row that is expected, which nobody reads any more of the one at hand."""
        if self.tile.refill:
            for name in names:
                self._ask_group(name, j, *self._later, self._ring)
            if self.skewed:
                self._close_round(j, *self._later, self._ring)

    def refilled(self):
        """The end of such a row."""
        if self.tile.refill and not self.skewed:
            self._ask_words(*self._later, self._ring)
            memory.stage_commit()

    def _valid_bytes(self, name, j, here):
        """Bytes of this thread's group that exist, at most; none where the row does not."""
        width = WIDTH[self.variant.dtype(name)]
        if self.mask(j)[0] is None:
            return here * Int32(memory.GROUP * width)
        g = self.thread + Int32(j * self.tile.threads)
        return (Int32(self.tile.hidden_size) - g * Int32(memory.GROUP)) * Int32(width) * here

    def next_stage(self, ring):
        """The ring's stage behind this one."""
        size = self.tile.row_bytes(self.asks)
        ring = ring + Int32(size)
        return ring * (ring != Int32(size * self.tile.stages)).to(Int32)

    def stage_before(self, ring):
        """The ring's stage in front of this one, the last one to be free again."""
        size = self.tile.row_bytes(self.asks)
        return ring - Int32(size) + (ring == Int32(0)).to(Int32) * Int32(size * self.tile.stages)

    # ------------------------------------------------------------------ the weight
    def _vector_slot(self, j):
        each = memory.planes_of(self.variant.dtype("weight"))
        plane = self.tile.num_threads * SLOT
        return self.vectors_base + Int32(j * each * plane), plane

    def bring_weight(self):
        """Load the weight to where it waits for all rows."""
        for j in range(self.tile.rounds):
            if self.tile.keeps_vectors(self.asks):
                slot, plane = self._vector_slot(j)
                valid = None if self.mask(j)[0] is None else self._valid_bytes("weight", j, Int32(1)).ir_value()
                address = self._address("weight", j)
                memory.stage_group(slot.ir_value(), plane, address, self.variant.dtype("weight"), self.tile.vec, valid)
            elif self.tile.vectors != "global":
                self.load("weight", (j,))
                if self.tile.vectors == "values":
                    self.held["weight", j] = unpack(self._raw["weight", j], self.variant.dtype("weight"))
        if self.tile.keeps_vectors(self.asks) and not self.tile.stages:
            memory.stage_commit()
            memory.stage_wait(0)

    def weight(self, j):
        """fp32 values of the weight."""
        if self.tile.vectors == "values":
            return self.held["weight", j]
        if self.tile.vectors == "global":
            self.load("weight", (j,))
        raw = self.raw("weight", j)
        if self.tile.vectors == "raw" and self.tile.rounds > 1:
            raw = [hide(r, self._zero.ir_value()) for r in raw]
        return unpack(raw, self.variant.dtype("weight"))


def whole_grid(tensor, rank):
    """(corner, width, count) of the whole grid over which a tensor lies, as a `Walk` takes them."""
    if rank == 1:
        return (Int64(0),), None, extent(tensor, 0)
    return (Int64(0), Int64(0)), extent(tensor, 1), extent(tensor, 0) * extent(tensor, 1)
