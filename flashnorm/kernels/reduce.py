"""The canonical sum of a row (arithmetic.md section 1), split over threads, warps and the CTAs of a cluster.

Four steps, each an exact piece of the canonical order:
 1. `lane_sum`: the terms of one lane, position by position, then its 8 positions.
 2. `block_sums`: every block of 32 lanes by halving; levels that lie inside a thread need no shuffle, and a
    thread that holds several lanes sends half of them at each shuffle instead of all.
 3. `exchange`: one value per block crosses warps through shared memory (of every CTA of the cluster).
 4. `fold`: the blocks by halving, by every thread for itself, so that one barrier is enough.

fp32 addition commutes, so it does not matter which of the two partners of a halving step adds: all of them
may, and all hold the same bits.
"""

from cutlass import Int32
from cutlass._mlir.dialects import arith, nvvm

from flashnorm.kernels import memory
from flashnorm.kernels.fp import add_rn, constant, fma_rn, mul_rn

POSITIONS = 8


def _shuffle_xor(value, offset):
    mask, at, clamp = (Int32(v).ir_value() for v in (0xFFFFFFFF - (1 << 32), offset, 31))
    return nvvm.shfl_sync(mask, value, at, clamp, nvvm.ShflKind.bfly)


def _bit(tid, bit):
    """Whether bit `bit` of this thread's index in its warp is set, as i1."""
    return ((tid >> Int32(bit)) & Int32(1) != Int32(0)).ir_value()


def lane_sum(groups, square):
    """The sum of one lane: `groups` yields its groups in order, each 8 fp32 values (squared first if `square`)."""
    acc = None
    for h in groups:
        if acc is None:
            acc = [mul_rn(v, v) for v in h] if square else list(h)
        elif square:
            acc = [fma_rn(v, v, a) for v, a in zip(h, acc, strict=True)]
        else:
            acc = [add_rn(v, a) for v, a in zip(h, acc, strict=True)]
    if acc is None:
        return constant(0.0)
    even = add_rn(add_rn(acc[0], acc[4]), add_rn(acc[2], acc[6]))
    odd = add_rn(add_rn(acc[1], acc[5]), add_rn(acc[3], acc[7]))
    return add_rn(even, odd)


def halve(values):
    """values[i] += values[i + s] for s = n/2 ... 1."""
    while len(values) > 1:
        s = len(values) // 2
        values = [add_rn(values[i], values[i + s]) for i in range(s)]
    return values[0]


def _select(cond, a, b):
    return arith.select(cond, a, b)


def _narrow_row_sum(tile, lane_values):
    """Fewer threads than a warp share the row: it is all shuffles."""
    t = tile.threads_per_row
    per_block = min(tile.lanes, 32) // t
    totals = []
    for b in range(0, len(lane_values), per_block):
        v, s = halve(lane_values[b : b + per_block]), t // 2
        while s:
            v, s = add_rn(v, _shuffle_xor(v, s)), s // 2
        totals.append(v)
    return halve(totals)


def block_sums(lane_values, tid):
    """Sums over the warp of each of K lane values, K a power of two at most 32.

    Returns (value, spread): thread l of the warp ends with the sum of value number l >> spread.
    """
    values, level = list(lane_values), 4
    while len(values) > 1:  # keep one half, send the other: half the shuffles of a plain butterfly
        half, mine = len(values) // 2, _bit(tid, level)
        kept = [_select(mine, values[i + half], values[i]) for i in range(half)]
        sent = [_select(mine, values[i], values[i + half]) for i in range(half)]
        values = [add_rn(k, _shuffle_xor(s, 1 << level)) for k, s in zip(kept, sent, strict=True)]
        level -= 1
    spread, v = level + 1, values[0]
    while level >= 0:
        v, level = add_rn(v, _shuffle_xor(v, 1 << level)), level - 1
    return v, spread


def slot_of(tile, block):
    """Where block sum `block` lies: what one thread folds by itself is consecutive."""
    own = min(tile.blocks, 8)
    stride = tile.blocks // own
    if isinstance(block, int):
        return block % stride * own + block // stride
    if stride == 1:
        return block
    return (block & Int32(stride - 1)) * Int32(own) + (block >> Int32(stride.bit_length() - 1))


def fold(tile, row_slots, tid):
    """The blocks by halving, from shared memory: upper levels in the thread, at most two more by shuffles."""
    own = min(tile.blocks, 8)
    stride = tile.blocks // own
    base = row_slots if stride == 1 else row_slots + (tid & Int32(stride - 1)) * Int32(own * 4)
    v, s = halve(memory.read_floats(base.ir_value(), own)), stride // 2
    while s:
        v, s = add_rn(v, _shuffle_xor(v, s)), s // 2
    return v


def row_sum(k, lane_values):
    """The canonical sum from this thread's lane sums; every thread of the row gets it."""
    tile, tid = k.tile, k.tid
    if tile.threads < 32:
        return _narrow_row_sum(tile, lane_values)
    value, spread = block_sums(lane_values, tid)
    if not tile.exchange:  # one warp: the blocks lie in its threads, 2^spread copies of each
        s = len(lane_values) // 2
        while s:
            value, s = add_rn(value, _shuffle_xor(value, s << spread)), s // 2
        return value
    warps = tile.threads // 32
    lane = tid & Int32(31)
    block = k.thread // Int32(32) + (lane >> Int32(spread)) * Int32(warps)
    slot = k.exchange_base + slot_of(tile, block) * Int32(4)
    copy = lane & Int32((1 << spread) - 1)
    if tile.cluster_n == 1:
        memory.write_float(slot.ir_value(), value, (copy == Int32(0)).to(Int32).ir_value())
        memory.barrier(0 if tile.rows == 1 else (k.row_in_cta + Int32(1)).ir_value(), tile.threads_per_row)
    else:
        _send_to_cluster(k, slot, value, copy)
    return fold(tile, k.exchange_base, tid)


def _send_to_cluster(k, slot, value, copy):
    """Every CTA gets every block sum: of the copies of a value in a warp, number i goes to CTA i.

    A warp holds 32 T / L copies of each, T = threads of the row >= 32 * cluster_n, so there is one for every CTA.
    """
    memory.cluster_wait()  # every peer runs, so its shared memory exists (they arrived before their loads)
    inside = (copy < Int32(k.tile.cluster_n)).to(Int32)
    memory.write_remote_float(slot.ir_value(), copy.ir_value(), value, inside.ir_value())
    memory.cluster_arrive()
    memory.cluster_wait()
