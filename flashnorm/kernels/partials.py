"""Partial sums over rows: what workers leave in the workspace, and the kernel that folds them.

A partial is H fp32 values. Those of one sum lie one after the other, for every weight row its own; the second sum
(dbias) comes behind all of the first. Adding +0 changes no partial, which are never -0: those that nobody has written
count as +0, and are not read.
"""

from cutlass import Int32, Int64

from flashnorm.kernels import memory
from flashnorm.kernels.codec import pack
from flashnorm.kernels.fp import add_rn
from flashnorm.kernels.reduce import halve
from flashnorm.kernels.tile import WARP, WIDTH

GROUP = memory.GROUP
SLICES = 8  # of the partials of a column, each added up by one thread; their sums are then those of neighbours
BATCH = 16  # loads of a thread in flight
FOLD_THREADS = WARP * SLICES


def fold_bytes(blocks):
    """Shared memory of a fold of so many blocks of columns: the slices' sums of each."""
    return SLICES * blocks * WARP * 4


def fold_grid(hidden_size, blocks):
    """CTAs of a fold for all columns of one gradient."""
    return -(-hidden_size // (WARP * blocks))


# ------------------------------------------------------------------ what a CTA leaves
def partial_address(k, part, index, sum_floats):
    """int64 address of this thread's round 0 in a partial: number `index` (Int64) of sum `part`."""
    at = index * Int64(k.tile.hidden_size) + Int64(part) * sum_floats
    return k.tensors["workspace"].iterator.toint() + at * Int64(4)


def leave(k, sums, flat, index, sum_floats, here=None):
    """Write a worker's sums as partial `index`; `here` (int32 or None): whether there is such a worker."""
    vec = min(4, k.tile.hidden_size & -k.tile.hidden_size)
    for part in range(len(sums.parts)):
        base = partial_address(k, part, index, sum_floats) + Int64(k.thread) * Int64(GROUP * 4)
        for j in range(sums.width // GROUP):
            at = part * sums.width + j * GROUP
            address = (base + Int64(j * k.tile.threads * GROUP * 4)).ir_value()
            regs = pack(flat[at : at + GROUP], "float32")
            memory.store_group(address, regs, "float32", vec, **k.guard(j, here))


def join_workers(k, sums, flat, index, sum_floats):
    """Add the sums of a CTA's workers by halving, and write them as partial `index`."""
    tile = k.tile
    if tile.rows == 1:
        leave(k, sums, flat, index, sum_floats)
        return
    if tile.stages:
        memory.stage_wait(0)
    pitch, width = tile.groups * GROUP * 4, 4 if tile.hidden_size % 4 == 0 else 1
    own = k.fold_base + k.row_in_cta * Int32(pitch) + k.thread * Int32(GROUP * 4)
    for part in range(len(sums.parts)):
        memory.barrier(0, tile.num_threads)
        for j in range(tile.rounds):
            here = k.has_group(j)
            for half in (0, 4):
                at = part * sums.width + j * GROUP + half
                slot = own + Int32((j * tile.threads * GROUP + half) * 4)
                memory.write_floats(slot.ir_value(), flat[at : at + 4], None if here is None else here.ir_value())
        memory.barrier(0, tile.num_threads)
        base, items = partial_address(k, part, index, sum_floats), tile.hidden_size // width
        for first in range(0, items, tile.num_threads):
            item = k.tid + Int32(first)
            inside = (item < Int32(items)).to(Int32)
            item = item * inside
            where = k.fold_base + item * Int32(width * 4)
            each = [memory.read_floats((where + Int32(r * pitch)).ir_value(), width) for r in range(tile.rows)]
            total = [halve([values[i] for values in each]) for i in range(width)]
            memory.store_floats((base + Int64(item) * Int64(width * 4)).ir_value(), total, inside.ir_value())


# ------------------------------------------------------------------ fold
def folded(items, load, batch=BATCH):
    """The values of some items, lists of them, joined by halving, a batch of loads at a time.

    Until its last step, halving keeps items at even places from those at odd ones: each are a halving of their own.
    """
    if len(items) <= batch:
        loaded = [load(item) for item in items]
        if len(loaded[0]) > 1:
            memory.barrier(0, FOLD_THREADS)  # or ptxas saves registers by a second latency
        return [halve(list(values)) for values in zip(*loaded, strict=True)]
    even = folded(items[0::2], load, batch)
    memory.warp_barrier()  # or ptxas begins with all loads, and spills
    return [add_rn(a, b) for a, b in zip(even, folded(items[1::2], load, batch), strict=True)]


def fold(variant, tensors, tid, bid, shared, most, live, weight_row, sum_floats, blocks=1):
    """Add up the partials of some columns of one weight row's gradient, and store it.

    Args:
        variant, tensors: what is computed, and its operands by name.
        tid, bid: 256 threads; the CTAs of all columns of dweight, then those of dbias, for each weight row.
        shared: `fold_bytes` of shared memory.
        most: partials at most, a power of two from 8 on.
        live: those that were written (Int64): of the others, none is read.
        weight_row: the distance of two weight rows of dweight in elements (Int64), or None for one row.
        sum_floats: fp32 values of all partials of a sum (Int64).
        blocks: of 32 columns, 1 or a multiple of 4, of which a thread then has four together.
    """
    parts = [name for name in ("dweight", "dbias") if name in tensors]
    hidden, width = variant.hidden_size, min(4, blocks)
    ctas = fold_grid(hidden, blocks)
    row, at = bid // Int32(ctas * len(parts)), bid % Int32(ctas * len(parts))
    part = (at >= Int32(ctas)).to(Int32)
    lane, warp = tid % Int32(WARP), tid // Int32(WARP)
    start = Int64(row) * live * Int64(hidden) + Int64(part) * sum_floats
    columns = (at - part * Int32(ctas)) * Int32(WARP * blocks)
    for step in range(blocks // width):
        first, slots = columns + Int32(step * WARP * width), shared + Int32(fold_bytes(step * width))
        column = first + lane * Int32(width)
        inside = (column < Int32(hidden)).to(Int32)
        base = tensors["workspace"].iterator.toint() + (start + Int64(column)) * Int64(4)

        def load(q, base=base, inside=inside):
            p = Int64(warp) + Int64(q * SLICES)
            here = inside & (p < live).to(Int32)
            return memory.load_floats((base + p * Int64(4 * hidden)).ir_value(), width, here.ir_value())

        totals = folded(list(range(most // SLICES)), load, max(BATCH // width, SLICES))
        slot = (slots + (warp * Int32(WARP) + lane) * Int32(4 * width)).ir_value()
        if width == 1:
            memory.write_float(slot, totals[0], Int32(1).ir_value())
        else:
            memory.write_floats(slot, totals)
        memory.barrier(0, FOLD_THREADS)
        column = first + tid
        mine = (tid < Int32(WARP * width)).to(Int32) & (column < Int32(hidden)).to(Int32)
        own = slots + tid % Int32(WARP * width) * Int32(4)
        values = [memory.read_floats((own + Int32(s * WARP * width * 4)).ir_value(), 1)[0] for s in range(SLICES)]
        _store_column(variant, tensors, parts, part, row, column, halve(values), mine, weight_row)


def _store_column(variant, tensors, parts, part, row, column, total, mine, weight_row):
    """Store one value of a gradient, by the threads for which `mine` holds."""
    for number, name in enumerate(parts):
        dtype, tensor = variant.dtype(name), tensors[name]
        where = Int64(column) if weight_row is None else Int64(column) + Int64(row) * weight_row
        address = tensor.iterator.toint() + where * Int64(WIDTH[dtype])
        pred = mine & (part == Int32(number)).to(Int32)
        memory.store_one(address.ir_value(), pack([total, total], dtype)[0], dtype, pred.ir_value())
