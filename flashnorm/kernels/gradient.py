"""What a worker of the backward does: the two passes over a row, and the rows of its stream one after the other."""

from cutlass import Int32

from flashnorm.kernels import memory
from flashnorm.kernels.codec import pack, round_to, unpack
from flashnorm.kernels.fp import add_rn, constant, fma_rn, mul_rn
from flashnorm.kernels.grads import GRADS
from flashnorm.kernels.loops import repeat, when
from flashnorm.kernels.reduce import LaneSum, received_sums, row_sums, send_sums
from flashnorm.kernels.stream_frame import Cursor
from flashnorm.program.backward import INNER_ROWS

GROUP = memory.GROUP


class Row:
    """The gradients of the row at hand; `terms_of` hands its part of the sums over rows out, group by group."""

    def __init__(self, k):
        self.k, self.program = k, k.variant.program
        k.fetch()
        self.grad = GRADS[self.program.norm](k)
        self.kept = {}
        # Of what comes through the stages, what the second pass has from elsewhere, or does not want.
        last = k.tile.again == "shared" and self.program.rows
        self.once = tuple(name for name in k.loads if name in ("dout", "x") and not last)

    def _group(self, j, raws):
        """(dout, gw, xh) of a round, +0 where the row has no element."""
        k = self.k
        dout, h = (unpack(raw, k.variant.dtype(name)) for name, raw in zip(("dout", "x"), raws, strict=True))
        return dout, self._weighted(j, dout), k.present(j, self.grad.normalise(h))

    def _weighted(self, j, dout):
        if not (self.program.weight and self.program.rows):
            return dout
        g = self.k.weight(j)
        if self.program.offset:
            offset = constant(self.program.offset)
            g = [add_rn(w, offset) for w in g]
        return self.k.present(j, [mul_rn(a, b) for a, b in zip(dout, g, strict=True)])

    def _bring(self, names, j, order):
        """Have a batch of rounds loaded where round j is the first of one."""
        at, batch = order.index(j), self.k.tile.batch
        if at % batch == 0:
            if at and self.k.tile.again in ("shared", "global"):
                memory.warp_barrier()  # or ptxas begins with the loads of all rounds, and spills
            self.k.bring(names, order[at : at + batch])

    def first(self, each):
        """The first pass; `each` gets (round, dout, xh of dweight)."""
        k, tile = self.k, self.k.tile
        lanes = tile.lanes_per_thread
        sums: list[list] = []
        order = [j for lane in range(lanes) for j in range(lane, tile.rounds, lanes)]
        for lane in range(lanes):
            own = range(lane, tile.rounds, lanes)
            lane_sums = None
            for j in own:
                self._bring(("dout", "x"), j, order)
                k.arrive(j)
                raws = [k.raw(name, j) for name in ("dout", "x")]
                if self.once:
                    k.refill(self.once, j)
                dout, gw, xh = self._group(j, raws)
                if tile.again == "values":
                    self.kept[j] = gw, xh
                elif tile.again == "raw":
                    k.held["dout", j], k.held["x", j] = raws
                each(j, dout, round_to(xh, k.variant.rounding) if self.program.round_norm else xh)
                terms = self.grad.terms(gw, xh)
                lane_sums = lane_sums or [LaneSum() for _ in terms]
                for one, (values, factors) in zip(lane_sums, terms, strict=True):
                    one.add(values, factors)
            if len(own) < -(-tile.groups // tile.lanes):
                for one in lane_sums or ():
                    one.skip()
            sums.append(lane_sums or [LaneSum() for _ in range(k.asks.exchanges)])
        if self.program.rows:
            totals = [[lane[i].total() for lane in sums] for i in range(k.asks.exchanges)]
            if k.skewed:
                send_sums(k, totals)
            else:
                self.grad.take(row_sums(k, totals))

    def second(self):
        """The second pass: what is written of the row itself."""
        k, program = self.k, self.program
        if k.skewed:
            self.grad.take(received_sums(k, [k.exchange_slots() for _ in range(k.asks.exchanges)]))
        order = list(range(k.tile.rounds))
        for j in order:
            self._bring(k.loads, j, order)
            if j in self.kept:
                gw, xh = self.kept[j]
            else:
                _, gw, xh = self._group(j, [k.again(name, j) for name in ("dout", "x")])
            more = k.values("g_residual", j) if program.g_residual else None
            k.refill([name for name in k.loads if name not in self.once], j)
            dx = self.grad.dx(gw, xh)
            if more is not None:
                dx = [add_rn(a, b) for a, b in zip(dx, more, strict=True)]
            for name in k.results:
                k.store(name, j, pack(dx, k.variant.dtype(name)))


class Sums:
    """Sums over the rows of a stream: `width` groups for each of dweight and dbias, as flat lists of raw values."""

    def __init__(self, k, rounds, summed=True):
        program = k.variant.program
        self.k = k
        self.parts = [name for name in ("dweight", "dbias") if summed and getattr(program, name)]
        self.width = rounds * GROUP
        self.size = self.width * len(self.parts)

    def zero(self):
        return [constant(0.0) for _ in range(self.size)]

    def add(self, inner, j, dout, xh):
        """One group of a row, in place."""
        for part, name in enumerate(self.parts):
            at = part * self.width + j * GROUP
            old = inner[at : at + GROUP]
            if name == "dweight":
                new = [fma_rn(d, x, a) for d, x, a in zip(dout, xh, old, strict=True)]
            else:
                new = [add_rn(d, a) for d, a in zip(dout, old, strict=True)]
            inner[at : at + GROUP] = new

    # ------------------------------------------------------------------ outer sums
    def _slot(self, at):
        return (self.k.sums_base + Int32(at // 4 * self.k.tile.num_threads * 16)).ir_value()

    def outer(self):
        """The outer sums at +0: what is carried of them."""
        if self.k.tile.outer == "registers":
            return self.zero()
        for at in range(0, self.size, 4):
            memory.write_floats(self._slot(at), [constant(0.0)] * 4)
        return []

    def join(self, outer, inner):
        """The outer sums with the inner ones added."""
        if self.k.tile.outer == "registers":
            return [add_rn(a, b) for a, b in zip(outer, inner, strict=True)]
        for at in range(0, self.size, 4):
            old = memory.read_floats(self._slot(at), 4)
            memory.write_floats(self._slot(at), [add_rn(a, b) for a, b in zip(old, inner[at : at + 4], strict=True)])
        return []

    def final(self, outer):
        if self.k.tile.outer == "registers":
            return outer
        return [v for at in range(0, self.size, 4) for v in memory.read_floats(self._slot(at), 4)]


class Stream:
    """The rows of one stream, one after the other."""

    def __init__(self, k, walk):
        self.k, self.tile, self.sums = k, k.tile, Sums(k, k.tile.rounds, k.tile.summed)
        ahead = k.loads + k.words if self.tile.stages else ()
        self.ahead = Cursor(k, walk, ahead)
        self.at = Cursor(k, walk, (k.results if ahead else k.loads + k.words + k.results))
        self.split = len(self.at.start), len(self.ahead.start) if ahead else 0
        # Asked for before the first one is begun. Skewed, the last of them is asked for when the first one is summed.
        self.early_rows = max(0, self.tile.stages - (not self.tile.refill))
        self.ahead_rows = self.early_rows - k.skewed

    def prefetch(self):
        """Ask for the weight and the first rows in L2; needs no wait for an earlier kernel (see RowTile.prefetch)."""
        k, ahead = self.k, self.ahead.start
        if k.asks.vector:
            k.prefetch_round("weight", k._base("weight"), None)
        for _ in range(self.early_rows):
            here, places = self.ahead.here(ahead), self.ahead.places(ahead)
            for name in k.loads:
                k.prefetch_round(name, places[name], here)
            ahead = self.ahead.advance(ahead)

    def run(self, trips):
        """Everything, `trips` rows (Int32); returns the sums over rows, flat."""
        k, tile = self.k, self.tile
        ring, ahead = Int32(0), self.ahead.start
        shared = k.tile.keeps_vectors(k.asks)
        if k.asks.vector and shared:  # it comes with the first row
            k.bring_weight()
        for _ in range(self.ahead_rows):
            k.ask(self.ahead.here(ahead), self.ahead.places(ahead), ring)
            ring, ahead = ring + Int32(tile.row_bytes(k.asks)), self.ahead.advance(ahead)
        if k.asks.vector and not shared:
            k.bring_weight()
        state = [*self.at.start, *(ahead if tile.stages else ()), Int32(0)]
        self.kinds = [*self.at.kinds, *(self.ahead.kinds if tile.stages else ()), Int32]
        if k.skewed:  # the row that is summed; one turn more writes the last one
            state, self.kinds = [Int32(0), *state], [Int32, *self.kinds]
            self.rows, trips = trips * Int32(tile.streams), trips + Int32(tile.streams == 1)
            if k.asks.vector:
                k._base("weight")  # branches may share what is made outside
        carried = [trips, *state]
        if tile.short and tile.streams == 1:
            inner = self._rows(trips, [v.ir_value() for v in state])[len(state) :]
            return [add_rn(constant(0.0), v) for v in inner]
        outer = self.sums.outer()
        blocks = (trips + Int32(INNER_ROWS - 1)) >> Int32(INNER_ROWS.bit_length() - 1)
        if tile.short:  # a block is a stream: what the first one leaves in the outer sums is its partial
            blocks = Int32(tile.streams)
        left = len(carried)
        out = repeat(blocks, [v.ir_value() for v in carried] + outer, lambda raw: self._block(raw, left))
        return self.sums.final(out[left:])

    def _block(self, raw, split):
        """Sixteen rows, or what is left of them, and the end of their inner sums."""
        left, state, outer = Int32(raw[0]), raw[1:split], raw[split:]
        rows = left
        if not self.tile.short:
            short = (left < Int32(INNER_ROWS)).to(Int32)
            rows = Int32(INNER_ROWS) + short * (left - Int32(INNER_ROWS))
            left = left - Int32(INNER_ROWS)
        elif self.k.skewed:
            left = left + Int32(1)  # of the second one
        out = self._rows(rows, state)
        state, inner = out[: len(state)], out[len(state) :]
        outer = self.sums.join(outer, inner)
        return [left.ir_value(), *state, *outer]

    def _rows(self, count, state):
        """The next rows; the state and the inner sums after them."""
        turn = self._skewed if self.k.skewed else self._row
        return repeat(count, list(state) + self.sums.zero(), lambda raw: turn(raw, len(state)))

    def _row(self, raw, split):
        k, tile = self.k, self.tile
        state = [kind(v) for kind, v in zip(self.kinds, raw[:split], strict=True)]
        inner = list(raw[split:])
        at, ahead, ring = state[: self.split[0]], state[self.split[0] : -1], state[-1]
        k.enter(self.at.here(at), self.at.places(at), at[0], ring)
        if tile.stages:
            memory.stage_wait(self.ahead_rows - 1)
            later = self.ahead.here(ahead), self.ahead.places(ahead)
            if tile.refill:
                k.expect(*later)
            else:
                k.ask(*later, k.stage_before(ring))
            ahead = self.ahead.advance(ahead)
            ring = k.next_stage(ring)
        row = Row(k)
        row.first(lambda j, dout, xh: self.sums.add(inner, j, dout, xh))
        if k.variant.program.rows:
            row.second()
        k.refilled()
        state = [*self.at.advance(at), *ahead, ring]
        return [v.ir_value() for v in state] + inner

    def _skewed(self, raw, split):
        """Sum a row, then write the one in front of it, whose sums have crossed the cluster meanwhile."""
        k = self.k
        state = [kind(v) for kind, v in zip(self.kinds, raw[:split], strict=True)]
        number, at, ahead, ring = state[0], state[1 : 1 + self.split[0]], state[1 + self.split[0] : -1], state[-1]
        later, stage = (self.ahead.here(ahead), self.ahead.places(ahead)), k.stage_before(ring)

        def sum_up(inner):
            k.enter(more, {}, number, ring)
            k.arrive(0)
            Row(k).first(lambda j, dout, xh: self.sums.add(inner, j, dout, xh))
            return inner

        def write(raw):
            at = [kind(v) for kind, v in zip(self.at.kinds, raw, strict=True)]
            k.enter(self.at.here(at), self.at.places(at), at[0], stage)
            k.expect(*later)
            Row(k).second()
            return [v.ir_value() for v in self.at.advance(at)]

        def ask(raw):
            k.ask(*later, stage)
            return raw

        more = (number < self.rows).to(Int32)
        inner = when(more, raw[split:], sum_up, list)
        at = when((Int32(0) < number).to(Int32), [v.ir_value() for v in at], write, ask)
        state = [number + Int32(1), *self.ahead.advance(ahead), k.next_stage(ring)]
        first, *others = (v.ir_value() for v in state)
        return [first, *at, *others, *inner]
