"""Quantisation with a scale for every block of a row, found from the row itself.

A block of 128 elements is 16 groups, and these belong to 16 neighbouring threads in one and the same round: its
maximum is a few shuffles, in which every thread of the warp takes part, also those beyond the end of the row. The
whole row as one block needs an exchange between the warps, and then one more pass.
"""

import math

from cutlass import Int32

from flashnorm.kernels.codec import encode, exponent_byte, floor_byte, pack, power_of_two, unpack
from flashnorm.kernels.codec4 import LARGEST_E2M1, code_mask, e4m3_byte, e4m3_value, encode_e2m1
from flashnorm.kernels.fp import (
    all_ones_unless_zero,
    constant,
    div_rn,
    fma_rn,
    keep_raw,
    max_nan,
    min_nan,
    mul_rn,
    rcp_rn,
)
from flashnorm.kernels.memory import GROUP, warp_barrier
from flashnorm.kernels.reduce import butterfly, largest, row_max
from flashnorm.program import SCALES, Round

LARGEST_CODE = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
FLT_MAX = (2 - 2**-23) * 2.0**127
PACKED = 4  # bytes of an int32


class BlockStore:
    """A store that goes over a row by blocks, and finds a scale for each.

    Subclasses say what `_scale(amax)` makes of a block's largest |y|: (what is stored, what `_codes` needs, a mask for
    the codes); and `_codes(y, what)`: raw registers.
    """

    def __init__(self, k, stage):
        self.k, self.stage = k, stage
        self.pairs = next(o.kind for o in stage.operands() if o.name == "out") == "pairs"
        self.scales = [o for o in stage.operands() if o.kind in SCALES]

    def __call__(self, row, stats):
        self._by_block(row, stats)
        self._clear_columns()

    def _scale(self, amax):
        raise NotImplementedError

    def _codes(self, y, how):
        raise NotImplementedError

    def _by_block(self, row, stats):
        k, groups = self.k, self.stage.block // GROUP
        threads = min(groups, k.tile.threads)
        if threads < groups and k.tile.rounds > 1:
            raise ValueError(f"a block of {self.stage.block} needs {groups} threads a row: {k.tile}")
        first = ((k.thread & Int32(threads - 1)) == Int32(0)).to(Int32)
        for j, y in row.outputs(stats):
            amax = butterfly(largest(row.present(j, y)), threads, max_nan)
            scale, how, some = self._scale(amax)
            self._store(j, y, how, some)
            there = k.has_group(j)
            block = k.thread // Int32(groups) + Int32(j * k.tile.threads // groups)
            for operand in self.scales:
                k.store_block(operand.name, block, scale, first if there is None else first & there)

    def _store(self, j, y, how, some):
        codes = [keep_raw(c, some) for c in self._codes(y, how)]
        if self.pairs:
            self.k.store_pairs("out", j, codes[0])
        else:
            self.k.store("out", j, codes)
        if self.stage.side:
            self.k.store("normed_out", j, pack(y, self.k.variant.dtype("normed_out")))

    def _clear_columns(self):
        """Zero the columns of swizzled scales that no block has."""
        hidden_size = self.k.tile.hidden_size
        for operand in self.scales:
            self._clear(operand, self.stage.blocks(hidden_size), self.stage.columns(hidden_size, operand.kind))

    def _clear(self, operand, begin, end):
        first = (self.k.thread == Int32(0)).to(Int32)
        for missing in range(begin, end):
            self.k.store_block(operand.name, Int32(missing), Int32(0).ir_value(), first)


class QuantBlocksStore(BlockStore):
    """a from a block's largest |y|; s = div(a, Q), or a power of two; out = cast(mul(y, div(1, s)))."""

    def __init__(self, k, stage, scalars):
        super().__init__(k, stage)
        self.out = k.variant.dtype("out")
        self.largest = LARGEST_E2M1 if stage.fp4 else LARGEST_CODE[self.out]
        self.cap = k.load_one("scale_ub") if stage.cap == "device" else scalars.get("scale_ub_value")

    def __call__(self, row, stats):
        if self.stage.block:
            self._by_block(row, stats)
        else:
            self._by_row(row, stats)
        if self.stage.packed:  # bytes of an int32 that no block has
            hidden_size = self.k.tile.hidden_size
            self._clear(self.scales[0], self.stage.blocks(hidden_size), self.stage.columns(hidden_size) * PACKED)
        else:
            self._clear_columns()

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
        some = all_ones_unless_zero(amax)
        a = max_nan(min_nan(amax, constant(FLT_MAX)), constant(self.stage.floor))
        a = a if self.cap is None else min_nan(a, self.cap)
        largest_code = constant(self.largest)
        if self.stage.ocp:
            stored = floor_byte(a, math.frexp(self.largest)[1] - 1)
            return stored, rcp_rn(power_of_two(stored)), some
        stored = s = div_rn(a, largest_code)
        if self.stage.ue8m0:
            stored = exponent_byte(s)
            s = power_of_two(stored)
        return stored, div_rn(largest_code, a) if self.stage.ratio else rcp_rn(s), some

    def _codes(self, y, factor):
        values = [mul_rn(v, factor) for v in y]
        if self.pairs:
            return [encode_e2m1(values, values, self.k.native_fp4)]
        return encode(values, self.out, self.k.sm)


class QuantNvfp4Store(BlockStore):
    """scale = e4m3(min(mul(G, div(amax, 6)), 448)); code = e2m1(div(mul(y, G), f(scale)))."""

    def __init__(self, k, stage, scalars):
        super().__init__(k, stage)
        self.gain = k.load_one("global_scale") if stage.global_scale == "device" else scalars.get("global_scale_value")

    def _scale(self, amax):
        wanted = div_rn(min_nan(amax, constant(FLT_MAX)), constant(LARGEST_E2M1))
        wanted = wanted if self.gain is None else mul_rn(self.gain, wanted)
        byte = e4m3_byte(min_nan(wanted, constant(LARGEST_CODE["float8_e4m3fn"])), self.k.sm)
        value = e4m3_value(byte)
        return byte, (mul_rn(value, constant(-1.0)), rcp_rn(value)), code_mask(amax, byte)

    def _codes(self, y, how):
        """The quotient by the inverse with one correction: where a code can tell it is the rounded quotient."""
        minus, inverse = how
        scaled = list(y) if self.gain is None else [mul_rn(v, self.gain) for v in y]
        near = [mul_rn(v, inverse) for v in scaled]
        quotients = [fma_rn(fma_rn(minus, n, v), inverse, n) for v, n in zip(scaled, near, strict=True)]
        return [encode_e2m1(quotients, scaled, self.k.native_fp4)]
