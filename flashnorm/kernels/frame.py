"""What a stage sees of the kernel: this thread's place in its row, and the groups it owns.

Reload policy, staging, masks, strides and alignment are settled here. Stages speak of operands by name and of
groups by round: round j of thread t is group t + j * T of the row. All loops over rounds run while tracing.
"""

from cutlass import Int32, Int64

from flashnorm.kernels import memory
from flashnorm.kernels.fp import hide, unpack
from flashnorm.kernels.tile import WIDTH


class Frame:
    """One thread's view of one row.

    Attributes:
        tile, variant: the launch plan, and what is computed.
        tid: thread of the CTA.
        row_in_cta: which of the CTA's rows this thread works on.
        thread: the thread's number among all that share the row (over the whole cluster).
        held: what a load stage keeps for the second pass, by round (hold="registers").
    """

    def __init__(self, tile, variant, tensors, tid, bid, shared_base):
        self.tile, self.variant, self.tensors, self.tid = tile, variant, tensors, tid
        self.held: dict = {}
        self.stage_names: tuple = ()
        self._raw, self._bases, self._masks = {}, {}, {}
        t, c = tile.threads_per_row, tile.cluster_n
        self.row_in_cta, within = (Int32(0), tid) if tile.rows == 1 else (tid // Int32(t), tid % Int32(t))
        block = bid if c == 1 else bid // Int32(c)  # the CTAs of a cluster are consecutive
        self.thread = within if c == 1 else within + bid % Int32(c) * Int32(t)
        self.exchange_base = shared_base + self.row_in_cta * Int32(tile.blocks * 4)
        self.stage_base = shared_base + Int32(tile.exchange_bytes) + tid * Int32(16)
        self._place_row(block)

    def _place_row(self, block):
        """Threads past the last row repeat it for loads, and store nothing."""
        operands = self.variant.program.operands()
        self.by_row = {o.name for o in operands if o.kind != "vec" or o.name in self.variant.row_vecs}
        shape = next(self.tensors[o.name].shape for o in operands if o.kind == "row")
        plain = self.variant.row_rank == 1
        count = Int64(shape[0]) if plain else Int64(shape[0]) * Int64(shape[1])
        self._zero = Int32(count >> Int64(62))
        row, self.row_ok = Int64(block) * Int64(self.tile.rows) + Int64(self.row_in_cta), None
        if self.tile.rows > 1:
            inside = (row < count).to(Int64)
            self.row_ok = inside.to(Int32)
            row = inside * row + (Int64(1) - inside) * (count - Int64(1))
        self.coords = (row,) if plain else (row // Int64(shape[1]), row % Int64(shape[1]))

    # ------------------------------------------------------------------ addresses and masks
    def _base(self, name):
        """int64 address of round 0 of this thread (of the row's one value where there is one a row)."""
        if name not in self._bases:
            tensor, width = self.tensors[name], WIDTH[self.variant.dtype(name)]
            kind = next(o.kind for o in self.variant.program.operands() if o.name == name)
            at = Int64(0) if kind == "per_row" else Int64(self.thread) * Int64(memory.GROUP)
            if name in self.by_row:
                for coord, stride in zip(self.coords, tensor.stride, strict=False):
                    at = at + coord * Int64(stride)
            self._bases[name] = tensor.iterator.toint() + at * Int64(width)
        return self._bases[name]

    def _address(self, name, j):
        offset = j * self.tile.threads * memory.GROUP * WIDTH[self.variant.dtype(name)]
        return (self._base(name) + Int64(offset)).ir_value()

    def _mask(self, j):
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

    def _guard(self, j, storing):
        full, tail = self._mask(j)
        if storing and self.row_ok is not None:
            full = self.row_ok if full is None else full & self.row_ok
            tail = None if tail is None else tail & self.row_ok
        as_value = [None if v is None else v.ir_value() for v in (full, tail)]
        return {"full": as_value[0], "tail": as_value[1], "tail_count": self.tile.hidden_size % memory.GROUP}

    # ------------------------------------------------------------------ loads and stores
    def prefetch(self):
        """Ask for what the tile wants in L2; needs no wait for the kernel before this one (see RowTile.prefetch)."""
        wanted = {"none": (), "vecs": ("vec",), "all": ("vec", "row")}[self.tile.prefetch]
        for operand in self.variant.program.operands():
            if operand.kind in wanted and operand.mode != "out":
                for j in range(self.tile.rounds):
                    full, tail = self._mask(j)
                    pred = full if tail is None else full | tail
                    memory.prefetch(self._address(operand.name, j), None if pred is None else pred.ir_value())

    def stage(self, names, order):
        """Start the copies of whole rows to shared memory, a batch a round, in the order they will be used in."""
        self.stage_names = tuple(names)
        for j in order:
            for name in names:
                dtype = self.variant.dtype(name)
                valid = None
                if self._mask(j)[0] is not None:
                    g = self.thread + Int32(j * self.tile.threads)
                    valid = (Int32(self.tile.hidden_size) - g * Int32(memory.GROUP)) * Int32(WIDTH[dtype])
                    valid = valid.ir_value()
                slot, plane = self._slot(name, j)
                memory.stage_group(slot, plane, self._address(name, j), dtype, self.tile.vec, valid)
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
        plane = self.tile.num_threads * 16
        before = 0
        for staged in self.stage_names:
            if staged == name:
                break
            before += memory.regs_of(self.variant.dtype(staged)) // 4
        each = memory.regs_of(self.variant.dtype(name)) // 4
        return (self.stage_base + Int32((before * self.tile.rounds + j * each) * plane)).ir_value(), plane

    def load(self, name, rounds):
        """Issue the loads of some rounds; `raw` hands them out."""
        dtype = self.variant.dtype(name)
        for j in rounds:
            guard = self._guard(j, False)
            streaming = self.tile.streaming and name in self.by_row and self.tile.hold != "global"
            self._raw[name, j] = memory.load_group(
                self._address(name, j), dtype, self.tile.vec, **guard, streaming=streaming
            )

    def raw(self, name, j):
        """Raw registers of round j: staged, or loaded before."""
        if name in self.stage_names:
            slot, plane = self._slot(name, j)
            return memory.read_slot(slot, plane, self.variant.dtype(name))
        return self._raw[name, j]

    def values(self, name, j):
        """fp32 values of round j."""
        return unpack(self.raw(name, j), self.variant.dtype(name))

    def held_again(self, j):
        """What was held of round j, as raw registers that no compiler takes for those of the first pass.

        It would otherwise keep the widened values of the first pass instead of unpacking twice: double the
        registers across the barrier. The zero comes from M, so that only the launch knows that it is one.
        """
        if self.tile.rounds <= 2:
            return self.held[j]
        return [hide(r, self._zero.ir_value()) for r in self.held[j]]

    def store(self, name, j, regs):
        dtype = self.variant.dtype(name)
        guard = self._guard(j, True)
        memory.store_group(self._address(name, j), regs, dtype, self.tile.vec, **guard, streaming=self.tile.streaming)

    def store_per_row(self, name, value):
        """One fp32 value a row, by the row's first thread."""
        first = (self.thread == Int32(0)).to(Int32)
        first = first if self.row_ok is None else first & self.row_ok
        memory.store_f32(self._base(name).ir_value(), value, first.ir_value())
