"""What a stage sees of the kernel: this thread's place in its row, and the groups it owns.

Reload policy, staging, masks, strides and alignment are settled here. Stages speak of operands by name and of
groups by round: round j of thread t is group t + j * T of the row. All loops over rounds run while tracing.
"""

from copy import copy
from typing import Any

from cutlass import Int32, Int64
from cutlass._mlir.dialects import cute as cute_ir

from flashnorm.kernels import memory
from flashnorm.kernels.codec import HALVES, unpack, unpack_by
from flashnorm.kernels.fp import constant, hide, keep
from flashnorm.kernels.tile import SLOT, WIDTH, needs_of
from flashnorm.program import SCALES, TILE_COLUMNS, TILE_ROWS, RowProgram

ONE_VALUE = ("per_row", "per_pool", "scalar")  # kinds of operands without a hidden dimension


def extent(tensor, axis):
    """The size of a tensor along an axis, as Int64; `tensor.shape` keeps 32 bits of it."""
    leaf = list(cute_ir.get_leaves(cute_ir.get_shape(tensor.layout)))[axis]
    return Int64(cute_ir.get_scalars(leaf))


def row_count(tensor, rank):
    """M: the rows of the grid over which a tensor lies."""
    return extent(tensor, 0) if rank == 1 else extent(tensor, 0) * extent(tensor, 1)


def pads(program: RowProgram) -> bool:
    """Whether the grid has rows beyond the last one, which only write the padding of an operand."""
    return any(operand.kind in SCALES for operand in program.operands())


class Frame:
    """One thread's view of one row.

    Attributes:
        tile, variant: the launch plan, and what is computed.
        sm: the compute capability that the kernel is for, 90 for 9.0.
        tid: thread of the CTA.
        row: the row's number in the flattened grid; beyond the last row where the grid is larger.
        row_ok: whether there is such a row (int32), or None where that is certain.
        padded: whether the grid may be larger than the rows, for the padding of a "blocks" operand.
        cta: the number of the CTA, or of its cluster.
        row_in_cta: which of the CTA's rows this thread works on.
        thread: the thread's number among all that share the row (over the whole cluster).
        pool_ok: whether the row's index lies in the pool (int32), or None where rows are not picked.
        held: what a load stage keeps for the later passes, by round (hold="registers").
        lead: the frame of the row that loads vectors for this one, too, where rows are abreast.
        native_fp4: the target has conversions to e2m1.
        scalars: the launch's fp32 values by name.
        mailboxes: shared address of those that exchanges over a cluster arrive in, if they do.
    """

    native_fp4 = False
    lead: Any = None

    def __init__(self, tile, variant, sm, tensors, tid, bid, shared_base, needs=None):
        self.tile, self.variant, self.sm, self.tensors, self.tid = tile, variant, sm, tensors, tid
        self.operands = {o.name: o for o in variant.program.operands()}
        self.held, self.scalars = {}, {}
        self.stage_names: tuple = ()
        self.pool_row, self.pool_ok = None, None
        self._raw, self._bases, self._masks = {}, {}, {}
        self._exchanges, self._exchanged, self._passes = 0, False, 0
        t, c = tile.threads_per_row, tile.cluster_n
        self.row_in_cta, within = (Int32(0), tid) if tile.rows == 1 else (tid // Int32(t), tid % Int32(t))
        block = bid if c == 1 else bid // Int32(c)  # the CTAs of a cluster are consecutive
        self.thread = within if c == 1 else within + bid % Int32(c) * Int32(t)
        self.tight = False  # instructions are the limit, and registers are not
        if needs is None:
            needs = needs_of(variant)
            self.tight = needs.narrow or needs.dense
        room = tile.abreast * needs.exchanges * tile.blocks * 4
        self._exchange_base = shared_base + self.row_in_cta * Int32(room)
        self.stage_base = shared_base + Int32(tile.exchange_bytes(needs)) + tid * Int32(SLOT)
        self.mailboxes, self.mailbox_count = shared_base, 0
        if tile.mailbox:
            self.mailbox_count = needs.exchanges
            self.mailboxes = shared_base + Int32(tile.exchange_bytes(needs) - SLOT * needs.exchanges)
        self.cta = block
        self.coords: tuple = ()
        self._place_row(0)

    def following(self, number, lead=None):
        """The view of the same threads' row `number` rows later, in turn or abreast of `lead`; vectors stay loaded."""
        other = copy(self)
        other.held, other._passes, other.lead = {}, 0, lead
        other._bases = {name: base for name, base in self._bases.items() if name in self.common}
        other._raw = {(name, j): raw for (name, j), raw in self._raw.items() if name in self.common}
        other._place_row(self.number + number)
        return other

    def shares(self, name):
        """Whether an operand is loaded by the lead."""
        return self.lead is not None and name in self.common

    def _place_row(self, number):
        """Threads past the last row repeat it for loads, and store nothing; see also `clear_padding`."""
        kinds = ("row", "pairs", "per_row")
        self.by_row = {o for o, v in self.operands.items() if v.kind in kinds or o in self.variant.row_vecs}
        self.number = number
        self.common = {o.name for o in self.operands.values() if o.kind in ("vec", "scalar")} - self.by_row
        tensor = next(self.tensors[o.name] for o in self.operands.values() if o.kind == "row")
        plain = self.variant.row_rank == 1
        self._count = row_count(tensor, self.variant.row_rank)
        self.next_pass()
        self.row, self.row_ok = Int64(self.cta) * Int64(self.tile.all_rows) + Int64(self.row_in_cta), None
        if number:
            self.row = self.row + Int64(number * self.tile.rows)
        row = self.row
        self.padded = pads(self.variant.program)
        several = self.tile.all_rows > 1
        if several or self.padded:
            inside = (row < self._count).to(Int64)
            self.row_ok = inside.to(Int32) if several else None
            row = inside * row + (Int64(1) - inside) * (self._count - Int64(1))
        self.coords = (row,) if plain else (row // extent(tensor, 1), row % extent(tensor, 1))

    def clear_padding(self):
        """Zero the padding of scales, whose rows from the last one on have threads of their own.

        A CTA that has such a row and no other ends here; in others, these threads go on without loads and stores.
        """
        threads, beyond = self.tile.threads, (self.row >= self._count).to(Int32)
        for name in (o.name for o in self.operands.values() if o.kind in SCALES):
            tensor = self.tensors[name]
            mine = beyond & (self.row < extent(tensor, 0)).to(Int32)
            for at in range(0, tensor.shape[1], threads):
                item = self.thread + Int32(at)
                pred = (mine & (item < Int32(tensor.shape[1])).to(Int32)).ir_value()
                address = self._item(name, item).ir_value()
                if WIDTH[self.variant.dtype(name)] == 4:
                    memory.store_f32(address, constant(0.0), pred)
                else:
                    memory.store_byte(address, Int32(0).ir_value(), pred)
        if self.tile.all_rows == 1:
            memory.leave(beyond.ir_value())

    def pick_row(self, index):
        """Take the pool's row `index` (a raw int64); one that is not there is not read."""
        pool = next(self.tensors[o.name] for o in self.operands.values() if o.kind == "pool")
        index = Int64(index)
        inside = ((index >= Int64(0)).to(Int32) & (index < extent(pool, 0)).to(Int32)).to(Int64)
        self.pool_row, self.pool_ok = index * inside, inside.to(Int32)

    # ------------------------------------------------------------------ addresses and masks
    def _base(self, name):
        """int64 address of round 0 of this thread (of the one value where there is no hidden dimension)."""
        if name not in self._bases:
            tensor, kind = self.tensors[name], self.operands[name].kind
            at = Int64(0) if kind in ONE_VALUE else Int64(self.thread) * Int64(self._group_size(name))
            coords = self.coords if name in self.by_row else ()
            for coord, stride in zip(
                (self.pool_row,) if kind in ("pool", "per_pool") else coords, tensor.stride, strict=False
            ):
                at = at + coord * Int64(stride)
            self._bases[name] = tensor.iterator.toint() + at * Int64(WIDTH[self.variant.dtype(name)])
        return self._bases[name]

    def _group_size(self, name):
        """Elements of the tensor that a group is: two of a row's are one of pairs."""
        return memory.GROUP // 2 if self.operands[name].kind == "pairs" else memory.GROUP

    def _address(self, name, j):
        offset = j * self.tile.threads * self._group_size(name) * WIDTH[self.variant.dtype(name)]
        return (self._base(name) + Int64(offset)).ir_value()

    def mask(self, j):
        """(full, tail) of round j as int32 0/1 or None: see `memory`."""
        if j not in self._masks:
            whole, part = divmod(self.tile.hidden_size, memory.GROUP)
            first = j * self.tile.threads
            if first + self.tile.threads <= whole:
                self._masks[j] = (None, None)
            else:
                g = self.thread + Int32(first)
                tail = (g == Int32(whole)).to(Int32) if part and first <= whole else None
                self._masks[j] = ((g < Int32(whole)).to(Int32), tail)
        return self._masks[j]

    def has_group(self, j):
        """Whether the row has any element of round j for this thread, as int32, or None where that is certain."""
        full, tail = self.mask(j)
        return full if tail is None else full | tail

    def present(self, j, values):
        """The values of round j, those of elements that the row does not have replaced by +0."""
        full, tail = self.mask(j)
        if full is None:
            return values
        part = self.tile.hidden_size % memory.GROUP
        whole = (Int32(0) - full).ir_value()
        some = whole if tail is None else (Int32(0) - (full | tail)).ir_value()
        return [keep(v, some if i < part else whole) for i, v in enumerate(values)]

    def _readable(self, name):
        """Whether this row of an operand may be read, as int32, or None where that is certain."""
        row = self.row_ok if self.padded else None
        if self.operands[name].kind not in ("pool", "per_pool"):
            return row
        return self.pool_ok if row is None else self.pool_ok & row

    def guard(self, j, here):
        """The predicates of round j, narrowed to rows that are `here` (int32 or None)."""
        full, tail = self.mask(j)
        if here is not None:
            full = here if full is None else full & here
            tail = None if tail is None else tail & here
        as_value = [None if v is None else v.ir_value() for v in (full, tail)]
        return {"full": as_value[0], "tail": as_value[1], "tail_count": self.tile.hidden_size % memory.GROUP}

    # ------------------------------------------------------------------ loads
    def prefetch(self):
        """Ask for what the tile wants in L2; needs no wait for the kernel before this one (see RowTile.prefetch).

        Rows that an index picks are left out: the index itself may be what that kernel writes.
        """
        wanted = {"none": (), "vecs": ("vec",), "all": ("vec", "row")}[self.tile.prefetch]
        for operand in self.operands.values():
            if operand.kind in wanted and operand.mode != "out":
                for j in range(self.tile.rounds):
                    pred = self.has_group(j)
                    memory.prefetch(self._address(operand.name, j), None if pred is None else pred.ir_value())

    def stage(self, names, order):
        """Start the copies of whole rows to shared memory, a batch a round, in the order they will be used in."""
        self.stage_names = tuple(names)
        for j in order:
            for name in names:
                dtype, here = self.variant.dtype(name), self._readable(name)
                valid = None
                if self.mask(j)[0] is not None:
                    g = self.thread + Int32(j * self.tile.threads)
                    valid = (Int32(self.tile.hidden_size) - g * Int32(memory.GROUP)) * Int32(WIDTH[dtype])
                if here is not None:
                    valid = (Int32(memory.GROUP * WIDTH[dtype]) if valid is None else valid) * here
                slot, plane = self._slot(name, j)
                memory.stage_group(
                    slot,
                    plane,
                    self._address(name, j),
                    dtype,
                    self.tile.vec,
                    None if valid is None else valid.ir_value(),
                )
            memory.stage_commit()

    def arrivals(self, order):
        """The staged rounds in order, each as soon as its own batch is there."""
        for i, j in enumerate(order):
            memory.stage_wait(len(order) - 1 - i)
            yield j

    def _slot(self, name, j):
        """Shared address of a staged group of this thread, and the distance to an fp32 group's second half.

        Neighbouring threads are 16 bytes apart, so that no two of a quarter warp meet in a bank.
        """
        plane = self.tile.num_threads * SLOT
        before = 0
        for staged in self.stage_names:
            if staged == name:
                break
            before += memory.planes_of(self.variant.dtype(staged))
        each = memory.planes_of(self.variant.dtype(name))
        return (self.stage_base + Int32((before * self.tile.rounds + j * each) * plane)).ir_value(), plane

    def has(self, name):
        """Whether an operand was loaded, in a turn before this one."""
        return (name, 0) in self._raw

    def load(self, name, rounds):
        """Issue the loads of some rounds; `raw` hands them out."""
        dtype = self.variant.dtype(name)
        for j in rounds:
            how = self.guard(j, self._readable(name))
            shared = self.operands[name].kind == "vec" and name not in self.by_row
            how["streaming"] = self.tile.streaming and not shared and self.tile.hold != "global"
            self._raw[name, j] = memory.load_group(self._address(name, j), dtype, self.tile.vec, **how)

    def load_one(self, name):
        """The value of an operand without a hidden dimension: fp32 of a float, a raw int64 of an integer."""
        here = self._readable(name)
        pred = None if here is None else here.ir_value()
        return memory.load_one(self._base(name).ir_value(), self.variant.dtype(name), pred)

    def raw(self, name, j):
        """Raw registers of round j, loaded or staged before."""
        if name in self.stage_names:
            slot, plane = self._slot(name, j)
            return memory.read_slot(slot, plane, self.variant.dtype(name))
        return self.lead.raw(name, j) if self.shares(name) else self._raw[name, j]

    def values(self, name, j):
        """fp32 values of round j."""
        return unpack(self.raw(name, j), self.variant.dtype(name))

    def next_pass(self):
        """Give the next pass over what is held a zero of its own, made of M, so that only the launch knows it."""
        self._zero = Int32(self._count >> Int64(62 - self._passes))
        self._passes += 1

    def held_again(self, j, dtype):
        """fp32 values of what was held of round j, in a way that no compiler takes for that of the pass before.

        It would otherwise keep the widened values of that pass instead of unpacking twice: double the registers
        across the barrier.
        """
        if self.tile.rounds <= 2:
            return unpack(self.held[j], dtype)
        if dtype == "bfloat16" and self.tight:
            return unpack_by(self.held[j], *(hide(Int32(word).ir_value(), self._zero.ir_value()) for word in HALVES))
        return unpack([hide(r, self._zero.ir_value()) for r in self.held[j]], dtype)

    # ------------------------------------------------------------------ stores
    def store(self, name, j, regs):
        dtype = self.variant.dtype(name)
        guard = self.guard(j, self.row_ok)
        memory.store_group(self._address(name, j), regs, dtype, self.tile.vec, **guard, streaming=self.tile.streaming)

    def store_pairs(self, name, j, reg):
        """The codes of a group; a row of them is whole groups."""
        full = self.guard(j, self.row_ok)["full"]
        memory.store_pairs(self._address(name, j), reg, self.tile.vec, full)

    def store_per_row(self, name, value):
        """One fp32 value a row, by the row's first thread."""
        first = (self.thread == Int32(0)).to(Int32)
        first = first if self.row_ok is None else first & self.row_ok
        memory.store_f32(self._base(name).ir_value(), value, first.ir_value())

    def store_block(self, name, at, value, mine, ahead=0):
        """What belongs to block `at` (Int32) + `ahead` of an operand of scales, by the thread for which `mine` holds.

        `value` is fp32, or the raw int32 of a byte; in an operand of int32, blocks are its bytes.
        """
        dtype = self.variant.dtype(name)
        pred = (mine if self.row_ok is None else mine & self.row_ok).ir_value()
        if dtype == "float32":
            memory.store_f32(self._item(name, at, ahead).ir_value(), value, pred)
        elif dtype == "int32":
            at = at + Int32(ahead)
            memory.store_byte((self._item(name, at >> Int32(2)) + Int64(at & Int32(3))).ir_value(), value, pred)
        else:
            memory.store_byte(self._item(name, at, ahead).ir_value(), value, pred)

    def _item(self, name, at, ahead=0):
        """int64 address of value `at` (Int32) + `ahead` of this row in an operand of scales.

        It begins with what is the same for all blocks of a thread.
        """
        tensor = self.tensors[name]
        if self.operands[name].kind == "swizzled":
            if ahead % TILE_COLUMNS == 0 and ahead:
                return self._item(name, at) + Int64(ahead * TILE_ROWS)
            at = at + Int32(ahead)
            tiles = (self.row >> Int64(7)) * Int64(tensor.shape[1] * TILE_ROWS)
            row = ((self.row & Int64(31)) << Int64(4)) + (((self.row >> Int64(5)) & Int64(3)) << Int64(2))
            column = (at >> Int32(2)) * Int32(TILE_ROWS * TILE_COLUMNS) + (at & Int32(3))
            return tensor.iterator.toint() + tiles + row + Int64(column)
        offset = self.row * Int64(tensor.stride[0]) + Int64(at) * Int64(tensor.stride[1])
        if ahead:
            offset = offset + Int64(ahead) * Int64(tensor.stride[1])
        return tensor.iterator.toint() + offset * Int64(WIDTH[self.variant.dtype(name)])

    # ------------------------------------------------------------------ exchanges between warps
    def exchange_slots(self):
        """Shared memory of a value for every block of the row, for one exchange; each call gives other slots."""
        base, n = self._exchange_base, self._exchanges
        self._exchanges += 1
        return base if n == 0 else base + Int32(n * self.tile.blocks * 4)

    def first_exchange(self):
        """Whether no exchange has been waited for; true once."""
        first, self._exchanged = not self._exchanged, True
        return first

    def open_mailboxes(self):
        """Make the mailboxes of the cluster's exchanges; the cluster's next barrier shows them to the others."""
        for number in range(self.mailbox_count):
            box = self.mailboxes + Int32(number * SLOT)
            memory.open_mailbox(box.ir_value(), (self.tid == Int32(0)).to(Int32).ir_value())
        memory.publish_mailboxes()

    def mailbox(self):
        """Where the exchange at hand arrives and the phase to wait for, or None for the cluster's barrier."""
        if not self.tile.mailbox:
            return None
        return self.mailboxes + Int32((self._exchanges - 1) * SLOT), Int32(0)
