"""Quantisation with a scale for every block of a row, found from the row itself.

A block of 128 elements is 16 groups, and these belong to 16 neighbouring threads in one and the same round: its
maximum is a few shuffles, in which every thread of the warp takes part, also those beyond the end of the row. The
whole row as one block needs an exchange between the warps, and then one more pass.
"""

from cutlass import Int32

from flashnorm.kernels.codec import encode, exponent_byte, pack, power_of_two, unpack
from flashnorm.kernels.fp import all_ones_unless_zero, constant, div_rn, keep_raw, max_nan, min_nan, mul_rn, rcp_rn
from flashnorm.kernels.memory import GROUP, warp_barrier
from flashnorm.kernels.reduce import butterfly, largest, row_max
from flashnorm.program import Round

LARGEST_CODE = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
FLT_MAX = (2 - 2**-23) * 2.0**127
PACKED = 4  # bytes of an int32


class QuantBlocksStore:
    """a from a block's largest |y|; s = div(a, Q), or a power of two; out = cast(mul(y, div(1, s)))."""

    def __init__(self, k, stage, scalars):
        self.k, self.stage = k, stage
        self.out = k.variant.dtype("out")
        self.cap = k.load_one("scale_ub") if stage.cap == "device" else scalars.get("scale_ub_value")

    def __call__(self, row, stats):
        if self.stage.block:
            self._by_block(row, stats)
        else:
            self._by_row(row, stats)
        if self.stage.packed:
            self._clear_rest()

    # ------------------------------------------------------------------ the two ways over a row
    def _by_block(self, row, stats):
        k, groups = self.k, self.stage.block // GROUP
        threads = min(groups, k.tile.threads)
        if threads < groups and k.tile.rounds > 1:
            raise ValueError(f"a block of {self.stage.block} needs {groups} threads a row: {k.tile}")
        first = ((k.thread & Int32(threads - 1)) == Int32(0)).to(Int32)
        for j, y in row.outputs(stats):
            amax = butterfly(largest(row.present(j, y)), threads, max_nan)
            scale, factor, some = self._scale(amax)
            self._store(j, y, factor, some)
            there = k.has_group(j)
            block = k.thread // Int32(groups) + Int32(j * k.tile.threads // groups)
            k.store_block("scale", block, scale, first if there is None else first & there)

    def _by_row(self, row, stats):
        k, dtype = self.k, self.k.variant.rounding
        # What a row that waits in registers was made of is not needed any more: y takes its place.
        keeps = k.tile.hold == "registers" and k.variant.program.maps[-1:] == (Round(),)
        amax = None
        for j, y in row.outputs(stats, last=False):
            here = largest(row.present(j, y))
            amax = here if amax is None else max_nan(amax, here)
            if keeps:
                k.held[j] = pack(y, dtype)
        scale, factor, some = self._scale(row_max(k, amax))
        if keeps:
            again = ((j, unpack(k.held_again(j), dtype)) for j in range(k.tile.rounds))
        else:
            again = row.outputs(stats)
        for j, y in again:
            self._store(j, y, factor, some)
            if keeps and k.tile.rounds > 2:
                warp_barrier()
        k.store_block("scale", Int32(0), scale, (k.thread == Int32(0)).to(Int32))

    # ------------------------------------------------------------------ one block
    def _scale(self, amax):
        """(what is stored, what y is multiplied by, a mask for the codes) from the largest |y| of a block."""
        some = all_ones_unless_zero(amax)
        a = max_nan(min_nan(amax, constant(FLT_MAX)), constant(self.stage.floor))
        a = a if self.cap is None else min_nan(a, self.cap)
        largest_code = constant(LARGEST_CODE[self.out])
        stored = s = div_rn(a, largest_code)
        if self.stage.ue8m0:
            stored = exponent_byte(s)
            s = power_of_two(stored)
        return stored, div_rn(largest_code, a) if self.stage.ratio else rcp_rn(s), some

    def _store(self, j, y, factor, some):
        codes = encode([mul_rn(v, factor) for v in y], self.out, self.k.sm)
        self.k.store("out", j, [keep_raw(c, some) for c in codes])
        if self.stage.side:
            self.k.store("normed_out", j, pack(y, self.k.variant.dtype("normed_out")))

    def _clear_rest(self):
        """Zero the bytes of a packed scale that no block has."""
        hidden_size = self.k.tile.hidden_size
        first = (self.k.thread == Int32(0)).to(Int32)
        for missing in range(self.stage.blocks(hidden_size), self.stage.columns(hidden_size) * PACKED):
            self.k.store_block("scale", Int32(missing), Int32(0).ir_value(), first)
