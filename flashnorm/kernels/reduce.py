"""The canonical sums of a row, split over threads, warps and the CTAs of a cluster; and maxima of it.

Four steps, each an exact piece of the canonical order:
 1. `LaneSum`: the terms of one lane, position by position, then its 8 positions.
 2. `block_sums`: every block of 32 lanes by halving; levels that lie inside a thread need no shuffle, and a
    thread that holds several lanes sends half of them at each shuffle instead of all.
 3. `send` and `receive`: one value per block crosses warps through shared memory (of every CTA of the cluster); what
    lies between them hides the way.
 4. `fold`: the blocks by halving, by every thread for itself, so that one barrier is enough.

fp32 addition commutes, so it does not matter which of the two partners of a halving step adds: all of them
may, and all hold the same bits. Every exchange of a kernel has slots of its own in shared memory: nobody has to wait
until the values of the one before have been read.
"""

from cutlass import Int32
from cutlass._mlir.dialects import arith, nvvm

from flashnorm.kernels import memory
from flashnorm.kernels.fp import add_rn, constant, fma_rn, magnitude, max_nan, mul_rn

POSITIONS = 8


def _shuffle_xor(value, offset):
    mask, at, clamp = (Int32(v).ir_value() for v in (0xFFFFFFFF - (1 << 32), offset, 31))
    return nvvm.shfl_sync(mask, value, at, clamp, nvvm.ShflKind.bfly)


def _bit(tid, bit):
    """Whether bit `bit` of this thread's index in its warp is set, as i1."""
    return ((tid >> Int32(bit)) & Int32(1) != Int32(0)).ir_value()


class LaneSum:
    """The sum of one lane, whose groups are added in order; `square`: of the squares of its values."""

    def __init__(self, square=False):
        self.square, self.acc = square, None

    def add(self, group, factors=None):
        """Add a group of 8 fp32 values, or their products with `factors`."""
        factors = group if self.square else factors
        if factors is None:
            self.acc = list(group) if self.acc is None else [add_rn(v, a) for v, a in zip(group, self.acc, strict=True)]
        elif self.acc is None:
            self.acc = [mul_rn(v, f) for v, f in zip(group, factors, strict=True)]
        else:
            self.acc = [fma_rn(v, f, a) for v, f, a in zip(group, factors, self.acc, strict=True)]

    def skip(self):
        """Add a group that the row does not have: +0, which changes nothing but a sum of -0."""
        if self.acc is not None and not self.square:
            self.acc = [add_rn(a, constant(0.0)) for a in self.acc]

    def total(self):
        acc = self.acc
        if acc is None:
            return constant(0.0)
        even = add_rn(add_rn(acc[0], acc[4]), add_rn(acc[2], acc[6]))
        odd = add_rn(add_rn(acc[1], acc[5]), add_rn(acc[3], acc[7]))
        return add_rn(even, odd)


def halve(values, join=add_rn):
    """values[i] += values[i + s] for s = n/2 ... 1."""
    while len(values) > 1:
        s = len(values) // 2
        values = [join(values[i], values[i + s]) for i in range(s)]
    return values[0]


def butterfly(value, threads, join=add_rn):
    """`value` of `threads` neighbouring threads, a power of two, joined by halving; all of them get it."""
    s = threads // 2
    while s:
        value, s = join(value, _shuffle_xor(value, s)), s // 2
    return value


def _select(cond, a, b):
    return arith.select(cond, a, b)


def _narrow_row_sum(tile, lane_values):
    """Fewer threads than a warp share the row: it is all shuffles."""
    t = tile.threads_per_row
    per_block = min(tile.lanes, 32) // t
    totals = []
    for b in range(0, len(lane_values), per_block):
        totals.append(butterfly(halve(lane_values[b : b + per_block]), t))
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
    return butterfly(halve(memory.read_floats(base.ir_value(), own)), stride)


def row_sums(k, lane_values):
    """The canonical sums of a row; `lane_values` are this thread's lane sums of each. Every thread gets all of them."""
    tile, tid = k.tile, k.tid
    if tile.threads < 32:
        return [_narrow_row_sum(tile, values) for values in lane_values]
    if not tile.exchange:  # one warp: the blocks lie in its threads, 2^spread copies of each
        in_warp, totals = [block_sums(values, tid) for values in lane_values], []
        spread = in_warp[0][1]
        for value, _ in in_warp:
            s = len(lane_values[0]) // 2
            while s:
                value, s = add_rn(value, _shuffle_xor(value, s << spread)), s // 2
            totals.append(value)
        return totals
    return received_sums(k, send_sums(k, lane_values))


def send_sums(k, lane_values):
    """Send a row's sums off, where warps exchange them; where they arrive is what `received_sums` takes."""
    tile, tid = k.tile, k.tid
    in_warp = [block_sums(values, tid) for values in lane_values]
    spread = in_warp[0][1]
    warps = tile.threads // 32
    lane = tid & Int32(31)
    block = k.thread // Int32(32) + (lane >> Int32(spread)) * Int32(warps)
    slots = [k.exchange_slots() for _ in in_warp]
    places = [base + slot_of(tile, block) * Int32(4) for base in slots]
    copy = lane & Int32((1 << spread) - 1)
    send(k, places, [value for value, _ in in_warp], copy, tile.blocks)
    return slots


def received_sums(k, slots):
    """The sums of the row at hand, which all of its threads have sent off."""
    receive(k)
    return [fold(k.tile, base, k.tid) for base in slots]


def send(k, places, values, copy, count):
    """Write fp32 values to shared memory, where every thread of the row may read them after `receive`.

    Args:
        k: the frame.
        places: the address for each value.
        values: what the warp has for that address; threads of a warp with the same address have the same value.
        copy: which of these threads this one is: the first one writes, and with a cluster number i writes to CTA i.
        count: how many values of each come together.
    """
    tile = k.tile
    if tile.cluster_n == 1:
        for place, value in zip(places, values, strict=True):
            memory.write_float(place.ir_value(), value, (copy == Int32(0)).to(Int32).ir_value())
        return
    # A warp holds 32 T / L copies of a block sum, T = threads of the row >= 32 * cluster_n: one for every CTA.
    inside = (copy < Int32(tile.cluster_n)).to(Int32)
    if k.first_exchange():
        memory.cluster_wait()  # every peer runs, so its shared memory exists (they arrived before their loads)
    mailbox = k.mailbox()
    if mailbox is not None:
        box = mailbox[0].ir_value()
        memory.expect_bytes(box, 4 * count * len(values), (k.tid == Int32(0)).to(Int32).ir_value())
        for place, value in zip(places, values, strict=True):
            memory.send_float(place.ir_value(), copy.ir_value(), value, box, inside.ir_value())
        return
    for place, value in zip(places, values, strict=True):
        memory.write_remote_float(place.ir_value(), copy.ir_value(), value, inside.ir_value())
    memory.cluster_arrive()


def receive(k):
    """Wait for what all threads of the row have sent."""
    tile = k.tile
    if tile.cluster_n == 1:
        memory.barrier(0 if tile.rows == 1 else (k.row_in_cta + Int32(1)).ir_value(), tile.threads_per_row)
        return
    mailbox = k.mailbox()
    if mailbox is None:
        memory.cluster_wait()
    else:
        memory.await_mailbox(*(v.ir_value() for v in mailbox))


# ------------------------------------------------------------------ maxima
def largest(group):
    """The largest magnitude of a group of fp32 values; NaN where one of them is."""
    return halve([magnitude(v) for v in group], max_nan)


def row_max(k, value):
    """The largest of a value of every thread of the row; every thread gets it."""
    tile = k.tile
    value = butterfly(value, min(tile.threads, 32), max_nan)
    if not tile.exchange:
        return value
    warps = tile.threads // 32
    base, lane = k.exchange_slots(), k.tid & Int32(31)
    send(k, [base + k.thread // Int32(32) * Int32(4)], [value], lane, warps)
    receive(k)
    (value,) = memory.read_floats((base + (lane & Int32(warps - 1)) * Int32(4)).ir_value(), 1)
    return butterfly(value, warps, max_nan)
