"""The row-forward kernel: one body for every RowProgram.

 1. load: the thread's groups of the row, all in flight together (weights with them, where registers allow);
 2. statistics: lane sums, then the canonical sums over the row's threads: one barrier a pass;
 3. maps, group by group, on the normalised values;
 4. store, each group as soon as it is ready, or after a pass that looks for the scale of the whole row.

Everything a launch plan decides (threads, cluster, staging, what is held where) is in the RowTile and read in
`frame` and `reduce`; everything an operator decides is in its stages. One artefact holds a kernel for each class
of M, and host code picks among them: bits do not depend on the tile, so M may.
"""

from contextlib import suppress
from itertools import islice

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from flashnorm.kernels import memory
from flashnorm.kernels.fp import add_rn
from flashnorm.kernels.frame import Frame, extent, pads, row_count
from flashnorm.kernels.loads import LOADS
from flashnorm.kernels.maps import MAPS
from flashnorm.kernels.reduce import LaneSum, row_sums
from flashnorm.kernels.stats import STATS
from flashnorm.kernels.stores import SAVES, STORES, vecs_of
from flashnorm.kernels.tile import needs_of
from flashnorm.program import SCALES


class Turns:
    """Rounds in order, with the loads of some operands issued a batch at a time.

    A store keeps every later load behind it, so with `ahead` a batch is under way before the one in front is stored.
    That takes registers, which a row that waits in registers does not leave.
    """

    def __init__(self, k, rounds, names, batch, ahead):
        rounds = list(rounds)
        self.k, self.names, self.ahead = k, names, ahead
        self.batches = [rounds[at : at + batch] for at in range(0, len(rounds), batch)] if names else [rounds]
        self.asked = 0

    def ask(self):
        """Issue the loads of the next batch."""
        if self.asked < len(self.batches):
            for j in self.batches[self.asked]:
                for name in self.names:
                    self.k.load(name, (j,))
        self.asked += 1

    def __iter__(self):
        for i, part in enumerate(self.batches):
            while self.asked < i + (2 if self.ahead else 1):
                self.ask()
            yield from part


class Row:
    """One thread's share of a row, pass by pass: h for the sums, y for what is stored.

    Made, everything is under way that the plan wants to be: the row, and the weights, or the first batch of them.
    """

    def __init__(self, k):
        tile, program = k.tile, k.variant.program
        self.k, self.program, self.hidden_size, self.present = k, program, tile.hidden_size, k.present
        self.load = LOADS[type(program.load)](k, program.load)
        mine = [o for stage in program.maps for o in stage.operands()]
        rows, vecs = ([o.name for o in mine if o.kind == kind] for kind in ("row", "vec"))
        vecs = [name for name in vecs if not k.shares(name)]
        lanes = tile.lanes_per_thread
        self.order = [j for lane in range(lanes) for j in range(lane, tile.rounds, lanes)]
        if tile.staged:
            k.stage((*self.load.names, *rows), self.order)
        elif tile.hold == "registers":
            for j in range(tile.rounds):
                for name in (*self.load.names, *rows):
                    k.load(name, (j,))
        # Vectors that h is made of are read wherever h is: once where it waits in registers.
        if tile.hold == "registers":
            for name in self.load.vecs:
                if not k.shares(name):
                    k.load(name, range(tile.rounds))
        if tile.early_weights:
            for name in (*vecs, *vecs_of(program.store)):
                if not (k.has(name) or k.shares(name)):
                    k.load(name, range(tile.rounds))
        again = self.load.vecs if tile.hold != "registers" else ()
        self.rereads = (*self.load.names, *again) if tile.hold == "global" else again
        self.late = [*self.rereads, *(rows if tile.hold == "global" else ()), *(() if tile.early_weights else vecs)]
        self.outgoing = self.turns(range(tile.rounds), self.late)
        if self.outgoing.ahead and not self.rereads:
            self.outgoing.ask()  # under way while the sum crosses the row
        self.incoming = self._first_pass()

    def turns(self, rounds, names):
        tile = self.k.tile
        return Turns(self.k, rounds, names, tile.batch, ahead=tile.ahead or tile.hold != "registers")

    def _first_pass(self):
        turns = iter(self.turns(self.order, self.rereads))
        return turns if not self.k.tile.staged else (j for j, _ in zip(self.k.arrivals(self.order), turns, strict=True))

    def lane_sums(self, term, squares):
        """This thread's lane sums of the row, taken in one pass: of each sum a list.

        Args:
            term: (round, h of a group) -> the 8 values of it that are summed.
            squares: for each sum, whether it is of the squares of the terms.
        """
        turns, again = self.incoming, self.incoming is None
        if again:
            turns = iter(self.turns(self.order, self.rereads))
        self.incoming = None
        tile = self.k.tile
        lane_sums: list[list] = [[] for _ in squares]
        for lane in range(tile.lanes_per_thread):
            own = len(range(lane, tile.rounds, tile.lanes_per_thread))
            sums = [LaneSum(square) for square in squares]
            for j in islice(turns, own):
                values = term(j, self.load.again(j, last=False) if again else self.load.first(j))
                for one in sums:
                    one.add(values)
                if again and self.rereads:
                    memory.warp_barrier()  # as in `outputs`
            if own < -(-tile.groups // tile.lanes):
                for one in sums:
                    one.skip()
            for done, one in zip(lane_sums, sums, strict=True):
                done.append(one.total())
        if again:
            self.k.next_pass()
        return lane_sums

    def corrected(self, totals):
        """The sums of the row, NaN where it was picked by an index that is none."""
        neutral = self.load.neutral
        return totals if neutral is None else [add_rn(total, neutral) for total in totals]

    def outputs(self, stats, last=True):
        """(round, y) over the row; `last` where no other pass follows."""
        turns, self.outgoing = self.outgoing or self.turns(range(self.k.tile.rounds), self.late), None
        for j in turns:
            y = stats.normalise(self.load.again(j, last))
            for stage in self.program.maps:
                y = MAPS[type(stage)](self.k, stage, j, y)
            yield j, y
            if not last and self.late:
                # No store keeps the loads of later rounds behind it: ptxas would begin with all of them, and spill.
                memory.warp_barrier()
        self.k.next_pass()


class Work:
    """The program on one row: made, its loads are under way."""

    def __init__(self, k, scalars):
        self.k, program = k, k.variant.program
        if k.padded:
            k.clear_padding()
        self.row = Row(k)
        self.store = STORES[type(program.store)](k, program.store, scalars)
        self.stats = STATS[type(program.stats)]()
        self.passes = self.stats.passes(self.row, scalars)


def begin(k, scalars):
    """Rows abreast, the first of them that of `k`."""
    return [Work(k.following(i, lead=k) if i else k, scalars) for i in range(k.tile.abreast)]


def finish(works):
    """Sums and stores of rows abreast: one exchange a pass for all, and each batch of vectors serves all."""
    k = works[0].k
    asked = [next(work.passes) for work in works]
    while asked:
        totals = iter(row_sums(k, [sums for one in asked for sums in one]))
        counts, asked = [len(one) for one in asked], []
        for work, count in zip(works, counts, strict=True):
            with suppress(StopIteration):
                asked.append(work.passes.send(work.row.corrected(list(islice(totals, count)))))
    for work in works:
        for save in k.variant.program.saves:
            SAVES[type(save)](work.k, save, work.stats)
    if not needs_of(k.variant).grouped:
        if len(works) > 1:
            raise ValueError(f"rows abreast are stored group by group, which this program's are not: {k.tile}")
        works[0].store(works[0].row, works[0].stats)
        return
    for work in works:
        work.store.begin()
    for groups in zip(*(work.row.outputs(work.stats) for work in works), strict=True):
        for work, (j, y) in zip(works, groups, strict=True):
            work.store.group(j, y)
    for work in works:
        work.store.end()


def row_program(k, scalars):
    """The four steps, traced for one thread: of one row, or of several in turn, or abreast."""
    k.scalars = scalars
    works = begin(k, scalars)
    for turn in range(1, k.tile.turns):
        following = begin(k.following(turn * k.tile.abreast), scalars)
        finish(works)
        works = following
    finish(works)


class RowForward:
    """A program's kernels for every class of M.

    Args:
        variant: what is computed, on which dtypes, widths and layouts.
        plans: (largest M, tile) in rising order; the last one serves every M beyond the one before.
        sm: the compute capability to compile for, 90 for 9.0; programmatic dependent launch begins there.
        native_fp4: the target has conversions to e2m1.
    """

    native_fp4 = False

    def __init__(self, variant, plans, sm, native_fp4=False):
        self.native_fp4 = native_fp4
        self.variant, self.plans, self.sm, self.has_pdl = variant, plans, sm, sm >= 90
        self.names = tuple(o.name for o in variant.program.operands())
        # ptxas treats kernels with "cutlass" in their name differently, hence names of our own.
        self.kernel.set_name_prefix("flashnorm_row_forward", remove_cutlass_symbol=True)

    @cute.jit
    def __call__(self, stream, *arguments):
        scalars, enable_pdl, operands = self.split(arguments)
        rows = self.count_rows(operands)
        self.choose(0, rows, scalars, enable_pdl, operands, stream)

    @cute.jit
    def choose(self, index: cutlass.Constexpr[int], rows: Int64, scalars, enable_pdl, operands, stream):
        if const_expr(index == len(self.plans) - 1):
            self.launch(index, rows, scalars, enable_pdl, operands, stream)
        elif rows <= self.plans[index][0]:
            self.launch(index, rows, scalars, enable_pdl, operands, stream)
        else:
            self.choose(index + 1, rows, scalars, enable_pdl, operands, stream)

    def split(self, arguments):
        n = len(self.variant.program.scalars())
        return arguments[:n], arguments[n], arguments[n + 1 :]

    def count_rows(self, operands):
        kinds = [operand.kind for operand in self.variant.program.operands()]
        return row_count(operands[kinds.index("row")], self.variant.row_rank)

    def launch(self, index, rows, scalars, enable_pdl, operands, stream):
        tile = self.plans[index][1]
        if pads(self.variant.program):  # a row of the grid for every row of padding, too
            for operand, tensor in zip(self.variant.program.operands(), operands, strict=True):
                if operand.kind in SCALES:
                    wanted = extent(tensor, 0)
                    rows = rows + (wanted > rows).to(Int64) * (wanted - rows)
        blocks = (rows + Int64(tile.all_rows - 1)) // Int64(tile.all_rows) * Int64(tile.cluster_n)
        self.kernel(index, scalars, operands).launch(
            grid=[Int32(blocks), 1, 1],
            block=[tile.num_threads, 1, 1],
            cluster=[tile.cluster_n, 1, 1] if tile.cluster_n > 1 else None,
            stream=stream,
            use_pdl=enable_pdl if self.has_pdl else False,
            hint_smem_base_uniform=False,  # a shuffle at the head of the kernel, for nothing here
        )

    @cute.kernel
    def kernel(self, index: cutlass.Constexpr[int], scalars: tuple, operands: tuple):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        self.body(index, scalars, operands, tid, bid)

    def body(self, index, scalars, operands, tid, bid):
        tile, program = self.plans[index][1], self.variant.program
        if tile.cluster_n > 1 and not tile.mailbox:
            memory.cluster_begin()
        shared = Int32(0)
        size = tile.shared_bytes(needs_of(self.variant))
        if size:
            allocator = getattr(cutlass, "memory", cutlass.utils).SmemAllocator()  # it has moved between versions
            pointer = allocator.allocate(size, byte_alignment=16)
            shared = Int32(pointer.toint())
        k = Frame(tile, self.variant, self.sm, dict(zip(self.names, operands, strict=True)), tid, bid, shared)
        k.native_fp4 = self.native_fp4
        if tile.mailbox:
            k.open_mailboxes()
            memory.cluster_begin()
        if self.has_pdl:
            k.prefetch()
            memory.wait_for_earlier_kernel()
            if tile.signal_early:
                memory.let_next_kernel_start()
        row_program(k, {n: v.ir_value() for n, v in zip(program.scalars(), scalars, strict=True)})
        if self.has_pdl and not tile.signal_early:
            memory.let_next_kernel_start()
