"""Quantisation with a scale for every block of a row, found from the row itself.

A block of 128 elements is 16 groups, and these belong to 16 neighbouring threads in one and the same round: its
maximum is a few shuffles, in which every thread of the warp takes part, also those beyond the end of the row. The
whole row as one block needs an exchange between the warps, and then one more pass.
"""

from cutlass import Int32

from flashnorm.kernels import codec4
from flashnorm.kernels.codec import encode, pack
from flashnorm.kernels.codec4 import LARGEST_E2M1, unit
from flashnorm.kernels.fp import constant, div_rn, max_nan, min_nan, mul_rn, rcp_rn
from flashnorm.kernels.groups import GroupStore
from flashnorm.kernels.memory import GROUP, warp_barrier
from flashnorm.kernels.reduce import butterfly, largest, row_max
from flashnorm.kernels.scales import (
    e4m3_byte,
    e4m3_value,
    factor_of,
    floor_byte,
    inverse_parts,
    is_nan,
    is_nan_e4m3,
    masked,
    masks,
    sixth,
    up_byte,
)
from flashnorm.program import SCALES, Round

LARGEST_CODE = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
NAN_CODES = {"float8_e4m3fn": 0x7F7F7F7F, "float8_e5m2": 0x7F7F7F7F, "int8": 0}  # of four elements
NAN_E2M1 = 0x77777777  # of eight
FLT_MAX = (2 - 2**-23) * 2.0**127
PACKED = 4  # bytes of an int32


class BlockStore(GroupStore):
    """A store that goes over a row by blocks, and finds a scale for each.

    Subclasses say what `_scale(amax)` makes of a block's largest |y|: (what is stored, what `_codes` needs, masks for
    the codes, None where `_codes` makes do without); and `_codes(y, what)`: raw registers.
    """

    def __init__(self, k, stage):
        self.k, self.stage = k, stage
        self.pairs = next(o.kind for o in stage.operands() if o.name == "out") == "pairs"
        self.scales = [o for o in stage.operands() if o.kind in SCALES]

    def _scale(self, amax):
        raise NotImplementedError

    def _codes(self, y, how):
        raise NotImplementedError

    def begin(self):
        k, groups = self.k, self.stage.block // GROUP
        self.threads = min(groups, k.tile.threads)
        if self.threads < groups and k.tile.rounds > 1:
            raise ValueError(f"a block of {self.stage.block} needs {groups} threads a row: {k.tile}")
        self.first = ((k.thread & Int32(self.threads - 1)) == Int32(0)).to(Int32)

    def group(self, j, y):
        k, groups = self.k, self.stage.block // GROUP
        # Of whole blocks a thread has what its neighbours have: elements, or nothing that is stored.
        amax = butterfly(largest(y if self.stage.whole else k.present(j, y)), self.threads, max_nan)
        scale, how, some = self._scale(amax)
        self._store(j, y, how, some)
        there = k.has_group(j)
        mine = self.first if there is None else self.first & there
        for operand in self.scales:
            k.store_block(operand.name, k.thread // Int32(groups), scale, mine, j * k.tile.threads // groups)

    def end(self):
        self._clear_columns()

    def _store(self, j, y, how, some):
        codes = self._codes(y, how)
        codes = codes if some is None else [masked(c, *some) for c in codes]
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
        """A row that is one block: its scale needs all of it, so it is no store of groups."""
        self._by_row(row, stats)
        self.end()

    def end(self):
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
            again = ((j, k.held_again(j, dtype)) for j in range(k.tile.rounds))
        else:
            again = row.outputs(stats)
        for j, y in again:
            self._store(j, y, factor, some)
            if keeps and k.tile.rounds > 2:
                warp_barrier()
        k.store_block("scale", Int32(0), scale, (k.thread == Int32(0)).to(Int32))

    # ------------------------------------------------------------------ one block
    def _scale(self, amax):
        a, largest_code = min_nan(amax, constant(FLT_MAX)), constant(self.largest)
        a = max_nan(a, constant(self.stage.floor)) if self.stage.floor else a
        a = a if self.cap is None else min_nan(a, self.cap)
        if self.stage.fp4:
            byte = (floor_byte if self.stage.ocp else up_byte)(a, self.largest)
            factor = mul_rn(factor_of(byte), constant(1 / unit(self.k.native_fp4)))
            some = masks(amax, is_nan(a), NAN_E2M1) if self.k.native_fp4 else None
            return byte, factor if self.k.native_fp4 else (factor, amax), some
        some = masks(amax, is_nan(a), NAN_CODES[self.out])
        if self.stage.ue8m0:
            byte = (floor_byte if self.stage.ocp else up_byte)(a, self.largest)
            return byte, factor_of(byte), some
        s = div_rn(a, largest_code)
        return s, div_rn(largest_code, a) if self.stage.ratio else rcp_rn(s), some

    def _codes(self, y, factor):
        if not self.pairs:
            return encode([mul_rn(v, factor) for v in y], self.out, self.k.sm)
        if self.k.native_fp4:
            return [codec4.products(y, factor)]
        factor, amax = factor
        return [codec4.emulated_products(y, factor, amax, self.stage.ocp)]


class QuantNvfp4Store(BlockStore):
    """scale = e4m3(min(mul(G, div(amax, 6)), 448)); code = e2m1(div(mul(y, G), f(scale))).

    The minimum is what the conversion does with more than the largest code.
    """

    def __init__(self, k, stage, scalars):
        super().__init__(k, stage)
        self.gain = k.load_one("global_scale") if stage.global_scale == "device" else scalars.get("global_scale_value")

    def _scale(self, amax):
        wanted = sixth(min_nan(amax, constant(FLT_MAX)), self.gain)
        byte = e4m3_byte(wanted, self.k.sm)
        value = e4m3_value(byte)
        inverse = inverse_parts(value, unit(self.k.native_fp4))
        if self.k.native_fp4:
            return byte, inverse, masks(amax, is_nan_e4m3(byte), NAN_E2M1, byte)
        return byte, (value, inverse, wanted, amax, byte), None

    def _codes(self, y, how):
        scaled = y if self.gain is None else [mul_rn(v, self.gain) for v in y]
        return [codec4.quotients(scaled, how) if self.k.native_fp4 else codec4.emulated_quotients(scaled, *how)]
