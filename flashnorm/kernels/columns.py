"""Sums over the rows of a stream for rows too wide to keep them beside everything else: a thread owns 8 columns.

Nothing crosses threads: the statistics of a row are known, and dweight needs no sum of the row. Rows are loaded a few
at a time.
"""

from cutlass import Int32, Int64

from flashnorm.kernels import partials
from flashnorm.kernels.codec import round_to, unpack
from flashnorm.kernels.gradient import Sums
from flashnorm.kernels.grads import GRADS
from flashnorm.kernels.loops import repeat
from flashnorm.kernels.stream_frame import Cursor, StreamFrame
from flashnorm.kernels.stream_tile import StreamTile
from flashnorm.kernels.tile import GROUP, lanes
from flashnorm.program.backward import INNER_ROWS

THREADS = 128
BATCH = 4  # rows in flight


def blocks(hidden_size):
    """CTAs that share the columns of a stream."""
    return -(-(-(-hidden_size // GROUP)) // THREADS)


def tile_of(variant):
    """A tile in name: what the frame asks of one, for threads that share nothing."""
    threads = min(THREADS, lanes(variant.hidden_size))
    return StreamTile(
        variant.hidden_size, variant.vec, threads, max(32, threads), stages=0, again="raw", vectors="global"
    )


class ColumnFrame(StreamFrame):
    """One thread's view of its columns; round 0 is all it has."""

    def __init__(self, variant, sm, tensors, tid, bid, asks):
        count = blocks(variant.hidden_size)
        self.thread_of_all = bid % Int32(count) * Int32(THREADS) + tid
        super().__init__(tile_of(variant), variant, sm, tensors, tid, bid // Int32(count), Int32(0), asks)
        self.row_in_cta, self.thread = Int32(0), self.thread_of_all
        self.worker = Int64(self.cta)

    def mask(self, j):
        if j not in self._masks:
            whole, part = divmod(self.tile.hidden_size, GROUP)
            g = self.thread_of_all
            tail = (g == Int32(whole)).to(Int32) if part else None
            self._masks[j] = ((g < Int32(whole)).to(Int32), tail)
        return self._masks[j]


def run(k, walk, trips, number, sum_floats, here):
    """The sums of a stream, left as partial `number`."""
    sums = Sums(k, 1)
    names = (*(n for n in k.loads if n != "g_residual"), *k.words)
    cursor = Cursor(k, walk, names)
    size = len(cursor.start)

    def block(raw):
        left, state, outer = Int32(raw[0]), raw[1 : 1 + size], raw[1 + size :]
        short = (left < Int32(INNER_ROWS)).to(Int32)
        rows = Int32(INNER_ROWS) + short * (left - Int32(INNER_ROWS))
        batches = (rows + Int32(BATCH - 1)) >> Int32(BATCH.bit_length() - 1)
        out = repeat(batches, state + sums.zero(), batch)
        return [(left - Int32(INNER_ROWS)).ir_value(), *out[:size], *sums.join(outer, out[size:])]

    def batch(raw):
        state, inner = [kind(v) for kind, v in zip(cursor.kinds, raw[:size], strict=True)], list(raw[size:])
        rows = []
        for _ in range(BATCH):
            k.enter(cursor.here(state), cursor.places(state), Int32(0), Int32(0))
            for name in ("dout", "x"):
                k.load(name, (0,))
            rows.append(([k.raw(name, 0) for name in ("dout", "x")], GRADS[k.variant.program.norm](k)))
            state = cursor.advance(state)
        for raws, grad in rows:
            dout, h = (unpack(r, k.variant.dtype(name)) for name, r in zip(("dout", "x"), raws, strict=True))
            xh = k.present(0, grad.normalise(h))
            sums.add(inner, 0, dout, round_to(xh, k.variant.rounding) if k.variant.program.round_norm else xh)
        return [v.ir_value() for v in state] + inner

    carried = [trips, *cursor.start]
    out = repeat(
        (trips + Int32(INNER_ROWS - 1)) >> Int32(INNER_ROWS.bit_length() - 1),
        [v.ir_value() for v in carried] + sums.outer(),
        block,
    )
    partials.leave(k, sums, sums.final(out[len(carried) :]), number, sum_floats, here)
