"""The row-forward kernel: one body for every RowProgram.

 1. load: the thread's groups of the row, all in flight together (weights with them, where registers allow);
 2. statistics: lane sums, then the canonical sum over the row's threads: one barrier;
 3. maps, group by group, on the normalised values;
 4. store, each group as soon as it is ready.

Everything a launch plan decides (threads, cluster, staging, what is held where) is in the RowTile and read in
`frame` and `reduce`; everything an operator decides is in its stages. One artefact holds a kernel for each class
of M, and host code picks among them: bits do not depend on the tile, so M may.
"""

from itertools import islice

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from flashnorm.kernels import memory
from flashnorm.kernels.frame import Frame
from flashnorm.kernels.loads import LOADS
from flashnorm.kernels.maps import MAPS
from flashnorm.kernels.reduce import lane_sum
from flashnorm.kernels.stats import STATS
from flashnorm.kernels.stores import SAVES, STORES
from flashnorm.kernels.tile import loaded_widths


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


def row_program(k, scalars):
    """The four steps, traced for one thread of one row."""
    tile, program = k.tile, k.variant.program
    load = LOADS[type(program.load)](k, program.load)
    vecs = [o.name for o in program.operands() if o.kind == "vec"]
    everything = tile.rounds

    order = [j for lane in range(tile.lanes_per_thread) for j in range(lane, tile.rounds, tile.lanes_per_thread)]
    if tile.staged:
        k.stage(load.names, order)
    elif tile.hold == "registers":
        for j in range(everything):
            for name in load.names:
                k.load(name, (j,))
    if tile.early_weights:
        for name in vecs:
            k.load(name, range(everything))
    rereads = load.names if tile.hold == "global" else ()

    ahead = tile.hold != "registers"
    late = Turns(k, range(everything), [*rereads, *([] if tile.early_weights else vecs)], tile.batch, ahead)
    if ahead and not rereads:
        late.ask()  # under way while the sum crosses the row

    stats_type = STATS[type(program.stats)]
    turns = k.arrivals(order) if tile.staged else iter(Turns(k, order, rereads, tile.batch, ahead))
    sums = []
    for lane in range(tile.lanes_per_thread):
        own = len(range(lane, tile.rounds, tile.lanes_per_thread))
        sums.append(lane_sum((load.first(j) for j in islice(turns, own)), stats_type.square))
    stats = stats_type(k, program.stats, scalars, sums)
    for save in program.saves:
        SAVES[type(save)](k, save, stats)

    for j in late:
        y = stats.normalise(load.again(j))
        for stage in program.maps:
            y = MAPS[type(stage)](k, stage, j, y)
        STORES[type(program.store)](k, program.store, j, y)


class RowForward:
    """A program's kernels for every class of M.

    Args:
        variant: what is computed, on which dtypes, widths and layouts.
        plans: (largest M, tile) in rising order; the last one serves every M beyond the one before.
        has_pdl: whether the architecture has programmatic dependent launch (sm_90 and newer).
    """

    def __init__(self, variant, plans, has_pdl):
        self.variant, self.plans, self.has_pdl = variant, plans, has_pdl
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
        kinds = [o.kind for o in self.variant.program.operands()]
        shape = operands[kinds.index("row")].shape
        return Int64(shape[0]) if self.variant.row_rank == 1 else Int64(shape[0]) * Int64(shape[1])

    def launch(self, index, rows, scalars, enable_pdl, operands, stream):
        tile = self.plans[index][1]
        blocks = (rows + Int64(tile.rows - 1)) // Int64(tile.rows) * Int64(tile.cluster_n)
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
        if tile.cluster_n > 1:
            memory.cluster_arrive()
        shared = Int32(0)
        size = tile.shared_bytes(loaded_widths(self.variant))
        if size:
            allocator = getattr(cutlass, "memory", cutlass.utils).SmemAllocator()  # it has moved between versions
            pointer = allocator.allocate(size, byte_alignment=16)
            shared = Int32(pointer.toint())
        k = Frame(tile, self.variant, dict(zip(self.names, operands, strict=True)), tid, bid, shared)
        if self.has_pdl:
            k.prefetch()
            memory.wait_for_earlier_kernel()
            if tile.signal_early:
                memory.let_next_kernel_start()
        row_program(k, {n: v.ir_value() for n, v in zip(program.scalars(), scalars, strict=True)})
        if self.has_pdl and not tile.signal_early:
            memory.let_next_kernel_start()
