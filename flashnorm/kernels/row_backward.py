"""The row-backward kernels: one set for every BackwardProgram.

`rows`: a worker, the threads of a CTA or cluster that share a row, follows one stream of rows (`stream_tile`), and for
each row
 1. takes it from its stage, and asks for the one that comes a few rows later;
 2. adds its share of dweight and dbias to sums in registers, and its terms to the canonical sums of the row;
 3. writes the row's gradient.
At the end the workers of a CTA add their sums up, as far as the order of the sum has them next to each other, and
leave one partial a CTA in the workspace.

`columns`: where a row is too wide for the sums of its columns to stay in registers, they are made here instead, from
the rows read once more. It goes first: gradients may overwrite what it reads.

`fold`: adds up the partials.

A weight that comes by rows has a stream for each of its rows and partials ("several"); where every row has a weight of
its own, nothing is summed ("own"); beside `columns`, rows are no streams either ("alone").
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from flashnorm.kernels import columns, memory, partials
from flashnorm.kernels.codec import pack
from flashnorm.kernels.fp import mul_rn
from flashnorm.kernels.frame import extent, row_count
from flashnorm.kernels.gradient import Row, Stream
from flashnorm.kernels.stream_frame import StreamFrame, Walk, whole_grid
from flashnorm.kernels.stream_tile import asks_of
from flashnorm.kernels.tile import RESERVED, shared_limit
from flashnorm.program import partials as partials_of
from flashnorm.program.backward import LEAST_PARTIALS, MOST_PARTIALS, PARTIALS

FOLDS = (64, 1024)  # partials of a weight row for which there are shorter folds


def runtime_partials(weight_rows, hidden_size):
    """The logarithm of `program.partials` of an Int64, by comparisons (Int32)."""
    power = Int32(0)
    for k in range(1, MOST_PARTIALS.bit_length()):
        power = power + (weight_rows * Int64(hidden_size << k) <= Int64(PARTIALS)).to(Int32)
    least = Int32(LEAST_PARTIALS.bit_length() - 1)
    raised = (weight_rows == Int64(1)).to(Int32) & (power < least).to(Int32)
    return power + raised * (least - power)


class Parts:
    """How the rows of a grid share the rows of a weight that comes by rows; all Int64.

    Attributes:
        weight_rows: R.
        each: rows that share one of them.
        partials: P.
        distance: of two weight rows in dweight, in elements.
    """

    def __init__(self, like, hidden_size, rank):
        self.rank, self.extents = rank, [extent(like, axis) for axis in range(rank)]
        self.varies = [(Int64(like.stride[axis]) != Int64(0)).to(Int64) for axis in range(rank)]
        self.weight_rows, self.each, self.distance = Int64(1), Int64(1), Int64(0)
        for axis, (size, varies) in enumerate(zip(self.extents, self.varies, strict=True)):
            self.weight_rows = self.weight_rows * (Int64(1) + varies * (size - Int64(1)))
            self.each = self.each * (size - varies * (size - Int64(1)))
            # The last axis that varies: where two do, every row has a weight row, and no sum is asked for.
            self.distance = varies * Int64(like.stride[axis]) + (Int64(1) - varies) * self.distance
        self.power = Int64(runtime_partials(self.weight_rows, hidden_size))
        self.partials = Int64(1) << self.power

    @property
    def own(self):
        """Whether every row has a weight row of its own, of several."""
        return (self.each == Int64(1)).to(Int32) & (self.weight_rows != Int64(1)).to(Int32)

    def walk(self, worker):
        """The rows of a worker's stream, and (int32) whether there is such a worker."""
        here = (worker < self.weight_rows * self.partials).to(Int64)
        weight_row, first = (worker >> self.power) * here, worker & (self.partials - Int64(1))
        corner = tuple(weight_row * varies for varies in self.varies)
        width = None
        if self.rank == 2:
            width = self.extents[1] - self.varies[1] * (self.extents[1] - Int64(1))
        first = first + (Int64(1) - here) * self.each  # no row is that far
        return Walk(first, self.partials, self.each, corner, width), here.to(Int32)


class RowBackward:
    """A program's kernels for every class of M.

    Args:
        variant: what is computed, on which dtypes, widths and layouts.
        plans: (largest M, tile) in rising order; the last one serves every M beyond the one before.
        sm: the compute capability to compile for, 90 for 9.0; programmatic dependent launch begins there.
    """

    def __init__(self, variant, plans, sm):
        self.variant, self.plans, self.sm, self.has_pdl = variant, plans, sm, sm >= 90
        self.prepare()
        self.rows.set_name_prefix("flashnorm_row_backward", remove_cutlass_symbol=True)
        self.columns.set_name_prefix("flashnorm_column_sums", remove_cutlass_symbol=True)
        self.fold.set_name_prefix("flashnorm_fold", remove_cutlass_symbol=True)

    def prepare(self):
        """What follows from the variant."""
        program = self.variant.program
        self.names = tuple(o.name for o in program.operands())
        self.asks = asks_of(self.variant)
        self.streams = partials_of(1, self.variant.hidden_size)
        self.by_rows = bool(self.variant.row_vecs)
        self.parts = [name for name in ("dweight", "dbias") if getattr(program, name)]

    # ------------------------------------------------------------------ on the host
    @cute.jit
    def __call__(self, stream, *arguments):
        enable_pdl, operands = arguments[0], arguments[1:]
        count = row_count(operands[0], self.variant.row_rank)
        self.choose(0, count, enable_pdl, operands, stream)

    @cute.jit
    def choose(self, index: cutlass.Constexpr[int], rows: Int64, enable_pdl, operands, stream):
        if const_expr(index == len(self.plans) - 1):
            self.share(index, rows, enable_pdl, operands, stream)
        elif rows <= self.plans[index][0]:
            self.share(index, rows, enable_pdl, operands, stream)
        else:
            self.choose(index + 1, rows, enable_pdl, operands, stream)

    @cute.jit
    def share(self, index: cutlass.Constexpr[int], rows: Int64, enable_pdl, operands, stream):
        if const_expr(not self.by_rows):
            self.launch(index, "one", rows, enable_pdl, operands, stream)
        elif const_expr(not self.parts):
            self.launch(index, "own", rows, enable_pdl, operands, stream)
        elif self.split_of(operands).own != Int32(0):
            self.launch(index, "own", rows, enable_pdl, operands, stream)
        else:
            self.launch(index, "several", rows, enable_pdl, operands, stream)

    def split_of(self, operands):
        """How rows share weight rows."""
        like = dict(zip(self.names, operands, strict=True))["dweight"]
        return Parts(like, self.variant.hidden_size, self.variant.row_rank)

    def launch(self, index, mode, rows, enable_pdl, operands, stream):
        tile = self.plans[index][1]
        sums = mode != "own" and bool(self.parts)
        weight_rows, blocks = Int64(1), (rows + Int64(tile.rows - 1)) // Int64(tile.rows)
        each = blocks  # of a CTA's rows that are no stream
        if mode == "own":
            pass
        elif mode == "one":
            blocks = self.live(tile, rows)
        else:
            split = self.split_of(operands)
            weight_rows = split.weight_rows
            workers = weight_rows * split.partials
            blocks = (workers + Int64(tile.rows - 1)) // Int64(tile.rows)
        common = {"stream": stream, "use_pdl": enable_pdl if self.has_pdl else False, "hint_smem_base_uniform": False}
        if sums and not tile.summed:
            wide = blocks * Int64(columns.blocks(self.variant.hidden_size))
            self.columns(mode, operands).launch(grid=[Int32(wide), 1, 1], block=[columns.THREADS, 1, 1], **common)
            mode_of_rows, blocks = "alone", each
        else:
            mode_of_rows = mode
        if tile.summed or self.variant.program.rows or mode == "own":
            self.rows(index, mode_of_rows, operands).launch(
                grid=[Int32(blocks * Int64(tile.cluster_n)), 1, 1],
                block=[tile.num_threads, 1, 1],
                cluster=[tile.cluster_n, 1, 1] if tile.cluster_n > 1 else None,
                **common,
            )
        if sums:
            folds = weight_rows * Int64(
                partials.fold_grid(self.variant.hidden_size, tile.fold_blocks) * len(self.parts)
            )
            common |= {"grid": [Int32(folds), 1, 1], "block": [partials.FOLD_THREADS, 1, 1]}
            if mode == "one":
                self.fold(index, mode, max(partials.SLICES, self.left(tile)), operands).launch(**common)
            else:
                self.fold_some(index, 0, split.partials, operands, common)

    @cute.jit
    def fold_some(self, index: cutlass.Constexpr[int], size: cutlass.Constexpr[int], count: Int64, operands, common):
        if const_expr(size == len(FOLDS) or FOLDS[size] >= self.streams):
            self.fold(index, "several", max(partials.SLICES, self.streams), operands).launch(**common)
        elif count <= FOLDS[size]:
            self.fold(index, "several", FOLDS[size], operands).launch(**common)
        else:
            self.fold_some(index, size + 1, count, operands, common)

    def left(self, tile):
        """Partials that CTAs leave where all rows share the weight, at most: each adds up what folds together first."""
        return self.streams // (tile.rows * tile.streams)

    def live(self, tile, rows):
        """CTAs (clusters) that have a row, where all rows share the weight: as many partials."""
        most = Int64(self.left(tile))
        return most + (rows < most).to(Int64) * (rows - most)

    # ------------------------------------------------------------------ on the device
    @cute.kernel
    def rows(self, index: cutlass.Constexpr[int], mode: cutlass.Constexpr[str], operands: tuple):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        self.rows_body(index, mode, operands, tid, bid)

    @cute.kernel
    def columns(self, mode: cutlass.Constexpr[str], operands: tuple):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        self.columns_body(mode, operands, tid, bid)

    @cute.kernel
    def fold(
        self, index: cutlass.Constexpr[int], mode: cutlass.Constexpr[str], most: cutlass.Constexpr[int], operands: tuple
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        self.fold_body(index, mode, most, operands, tid, bid)

    def shared(self, size):
        if not size:
            return Int32(0)
        allocator = getattr(cutlass, "memory", cutlass.utils).SmemAllocator()  # it has moved between versions
        return Int32(allocator.allocate(size, byte_alignment=16).toint())

    def wait(self, signal=True):
        """Until what earlier kernels wrote may be read; the next kernel may start, its own wait orders the rest."""
        if self.has_pdl:
            memory.wait_for_earlier_kernel()
            if signal:
                memory.let_next_kernel_start()

    def rows_body(self, index, mode, operands, tid, bid):
        tile = self.plans[index][1]
        if mode in ("own", "alone"):
            tile = tile.alone()
        tensors, shared = dict(zip(self.names, operands, strict=True)), self.shared(tile.stream_bytes(self.asks))
        k = StreamFrame(tile, self.variant, self.sm, tensors, tid, bid, shared, self.asks)
        if tile.cluster_n > 1:
            k.open_mailboxes()
            memory.cluster_begin()
        stream = None
        if mode in ("one", "several"):
            walk, number, here = self.walk_of(k, mode, tile.rows, tile.streams)
            if self.by_rows and "weight" in self.names:
                k._bases["weight"] = k.address_of("weight", walk.corner)
            stream = Stream(k, walk)
            if self.has_pdl and tile.prefetch == "all":
                stream.prefetch()
        self.wait(stream is None or not tile.late_signal)
        if tile.cluster_n > 1:
            memory.cluster_wait()  # every peer runs, so its shared memory exists
        if stream is None:
            self.row_alone(k, self.parts if mode == "own" else [])
            return
        sums = stream.run(trips_of(walk))
        if self.has_pdl and tile.late_signal:
            memory.let_next_kernel_start()
        if not stream.sums.parts:
            return
        if mode == "several":
            partials.leave(k, stream.sums, sums, number, self.sum_floats(operands, mode), here)
        else:
            partials.join_workers(k, stream.sums, sums, number, self.sum_floats(operands, mode))

    def walk_of(self, k, mode, workers, streams=1):
        """A worker's rows, the number of its partial (or its CTA's), and whether there is such a worker."""
        if mode == "several":
            walk, here = self.split_of(k.tensors.values()).walk(k.worker)
            return walk, k.worker, here
        corner, width, count = whole_grid(k.tensors["dout"], self.variant.row_rank)
        first = Int64(k.cta) + Int64(k.row_in_cta) * Int64(self.streams // (workers * streams))
        walk, leap = Walk(first, Int64(self.streams), count, corner, width), None
        if streams > 1:
            leap = trips_of(walk), Int64(self.streams // streams)
        return replace(walk, leap=leap), Int64(k.cta), None

    def sum_floats(self, operands, mode):
        if mode == "one":
            return Int64(self.streams * self.variant.hidden_size)
        split = self.split_of(operands)
        return split.weight_rows * split.partials * Int64(self.variant.hidden_size)

    def row_alone(self, k, parts):
        """One row that is summed with no other; `parts` are the gradients of its own weight row that it stores."""
        corner, width, count = whole_grid(k.tensors["dout"], self.variant.row_rank)
        walk = Walk(k.worker, Int64(1), count, corner, width)
        here = (k.worker < count).to(Int64)
        inside = Walk(k.worker * here, Int64(1), count, corner, width).coords()
        for operand in self.variant.program.operands():
            if operand.kind == "vec" and operand.name not in self.variant.row_vecs:
                k._bases[operand.name] = k.address_of(operand.name, ())
            elif operand.kind != "workspace":
                k._bases[operand.name] = k.address_of(operand.name, inside)
        k.enter((walk.first < count).to(Int32), {}, Int32(0), Int32(0))
        row = Row(k)

        def store(j, dout, xh):
            for name in parts:
                terms = [mul_rn(a, b) for a, b in zip(dout, xh, strict=True)] if name == "dweight" else dout
                k.store(name, j, pack(terms, self.variant.dtype(name)))

        row.first(store)
        if self.variant.program.rows:
            row.second()

    def columns_body(self, mode, operands, tid, bid):
        tensors = dict(zip(self.names, operands, strict=True))
        self.wait()
        k = columns.ColumnFrame(self.variant, self.sm, tensors, tid, bid, self.asks)
        walk, number, here = self.walk_of(k, mode, 1)
        columns.run(k, walk, trips_of(walk), number, self.sum_floats(operands, mode), here)

    def fold_body(self, index, mode, most, operands, tid, bid):
        tile, tensors = self.plans[index][1], dict(zip(self.names, operands, strict=True))
        room = shared_limit(self.sm) // tile.fold_ctas - RESERVED if tile.fold_ctas else 0
        shared = self.shared(max(partials.fold_bytes(tile.fold_blocks), room))
        if self.has_pdl and tile.signal_early:
            memory.let_next_kernel_start()
        self.wait(not tile.signal_early)
        distance = None
        if mode == "one":
            live = self.live(tile, row_count(tensors["dout"], self.variant.row_rank))
        else:
            split = self.split_of(operands)
            live, distance = split.partials, split.distance
        floats = self.sum_floats(operands, mode)
        partials.fold(self.variant, tensors, tid, bid, shared, most, live, distance, floats, tile.fold_blocks)


def trips_of(walk):
    """Rows of the longest stream (Int32): every worker counts them, those that do not exist too."""
    return Int32((walk.count + walk.step - Int64(1)) // walk.step)
