"""Stores: how a row leaves, as it is or in codes with scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashnorm.program.operand import FP4, FP8, TILE_COLUMNS, TILE_ROWS, UE8M0, Operand, Stage


@dataclass(frozen=True)
class Cast(Stage):
    """One rounding to the destination's dtype, which is that of the operand `like`."""

    dst: str = "out"
    like: str = "x"

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.dst, "row", "out", like=self.like),)


@dataclass(frozen=True)
class NextNorm(Stage):
    """y is stored, and normalised once more: z = mul(mul(r, rstd2), add(next_weight, next_center)), one rounding.

    r = y as it is stored in `residual_out`, widened again; rstd2 = div(1, sqrt(add(div(sum(r*r), H), next_eps))).
    """

    def operands(self) -> tuple[Operand, ...]:
        stored = Operand("residual_out", "row", "out", like="residual")
        return (stored, Operand("next_weight", "vec"), Operand("ffn_input", "row", "out", like="x"))

    def scalars(self) -> tuple[str, ...]:
        return ("next_eps", "next_center")


@dataclass(frozen=True)
class QuantTensor(Stage):
    """inv = div(1, scale); out = cast(mul(y, inv)): saturating, nearest even, NaN gives 0x7F.

    `on_device` says where the scale is: an element in device memory, or a value that comes with the launch.
    """

    on_device: bool = False

    def operands(self) -> tuple[Operand, ...]:
        out = (Operand("out", "row", "out", FP8),)
        return (*out, Operand("scale", "scalar")) if self.on_device else out

    def scalars(self) -> tuple[str, ...]:
        return () if self.on_device else ("scale_value",)


Layout = Literal["rows", "swizzled", "both"]


def swizzled_offset(row: int, column: int, columns: int) -> int:
    """Where the scale of a row and a block lies in a swizzled tensor with `columns`, a multiple of 4, for each row.

    Tiles of 128 rows and 4 columns, 512 bytes each, tile columns first; within a tile the 4 scales of a row are
    neighbours, rows 32 apart follow each other (cuBLAS: 1D block scaling factors layout).
    """
    tile = row // TILE_ROWS * (columns // TILE_COLUMNS) + column // TILE_COLUMNS
    return tile * TILE_ROWS * TILE_COLUMNS + row % 32 * 16 + row % TILE_ROWS // 32 * 4 + column % TILE_COLUMNS


class BlockScales(Stage):
    """A store that finds a scale for every `block` elements of a row from y itself.

    `layout` says where scales go: "rows", an operand of kind "blocks"; "swizzled"; or "both", swizzled in `scale` and
    by rows in `scale_rows`.
    """

    block: int
    layout: Layout

    @property
    def whole(self) -> bool:
        """Whether a row must be whole blocks."""
        return True

    def blocks(self, hidden_size: int) -> int:
        """Blocks of a row."""
        return -(-hidden_size // self.block) if self.block else 1

    def columns(self, hidden_size: int, kind: str = "blocks") -> int:
        """B: elements of an operand of this kind for one row."""
        count = self.blocks(hidden_size)
        return count if kind == "blocks" else -(-count // TILE_COLUMNS) * TILE_COLUMNS

    def _scales(self, dtypes: tuple[str, ...], raw: bool) -> tuple[Operand, ...]:
        rows = Operand("scale_rows" if self.layout == "both" else "scale", "blocks", "out", dtypes, raw=raw)
        if self.layout == "rows":
            return (rows,)
        swizzled = Operand("scale", "swizzled", "out", dtypes, raw=raw)
        return (swizzled, rows) if self.layout == "both" else (swizzled,)


_NIBBLES = Operand("out", "pairs", "out", (FP4, "uint8"), raw=True)
_SIDE = Operand("normed_out", "row", "out")


@dataclass(frozen=True)
class QuantBlocks(BlockScales):
    """A scale for every `block` elements of a row (the last block may be shorter), found from y itself.

    a = max(amax |y|, floor), an infinite amax counting as FLT_MAX; with a cap a = min(a, cap); both keep NaN.
    s = div(a, Q), Q the largest finite code (448, 57344, 127, 6); `ue8m0`: a power of two, stored as exponent byte
    (127 + e, clamped to 0 ... 254; NaN 0xFF): the smallest >= div(a, Q), or with `ocp` 2^(floor(log2 a) - d), d = 8
    (e4m3) or 2 (e2m1), 15 (e5m2). out = cast(mul(y, r)), saturating, nearest even, with r = div(1, s), or
    r = div(Q, a) where `ratio` says so. If amax is NaN, the scale is NaN and every code of the block 0x7F (e2m1: 7,
    int8: 0); if amax is 0, every code is +0.

    Attributes:
        block: elements a scale serves, a multiple of 8; 0: the whole row.
        floor: the least a.
        ratio: codes are made with div(Q, a).
        ue8m0: the scale is a power of two.
        packed: ue8m0 bytes of four neighbouring blocks in an int32, the first in its low byte; B counts int32s, and
            the bytes of blocks that are not there are 0.
        cap: where the cap on a is: nowhere, in the launch ("value"), or an element in device memory ("device").
        side: y is also written, cast to `normed_out`'s dtype (T; where a `Round` has rounded y, it is exact).
        ocp: the power of two is that of amax, rounded down, as the OCP specification has it; large elements saturate.
        fp4: codes are e2m1, two to a byte.
        layout: where scales go.
    """

    block: int
    floor: float
    ratio: bool = False
    ue8m0: bool = False
    packed: bool = False
    cap: Literal["", "value", "device"] = ""
    side: bool = False
    ocp: bool = False
    fp4: bool = False
    layout: Layout = "rows"

    @property
    def whole(self) -> bool:
        return self.fp4 or self.block == 32

    def operands(self) -> tuple[Operand, ...]:
        kept = ("int32",) if self.packed else ("uint8", UE8M0) if self.ue8m0 else ("float32",)
        # The ratio is the 1x128 recipe of block-scaled GEMMs, blocks of 32 are MXFP8: both of e4m3fn alone.
        codes = ("float8_e4m3fn",) if self.ratio or self.block == 32 else (*FP8, "int8")
        out = [_NIBBLES if self.fp4 else Operand("out", "row", "out", codes)]
        out += self._scales(kept, raw=UE8M0 in kept)
        if self.cap == "device":
            out.append(Operand("scale_ub", "scalar"))
        return (*out, _SIDE) if self.side else tuple(out)

    def scalars(self) -> tuple[str, ...]:
        return ("scale_ub_value",) if self.cap == "value" else ()

    def columns(self, hidden_size: int, kind: str = "blocks") -> int:
        count = super().columns(hidden_size, kind)
        return -(-count // 4) if self.packed else count


@dataclass(frozen=True)
class QuantNvfp4(BlockScales):
    """e2m1 codes with an e4m3 scale for every `block` elements, G = global_scale: dequantised = code * scale / G.

    scale = e4m3(min(mul(G, div(amax |y|, 6)), 448)), an infinite amax counting as FLT_MAX, the minimum keeping NaN;
    out = e2m1(div(mul(y, G), f(scale))), saturating, nearest even. If amax (or G) is NaN, the scale is 0x7F and every
    code 7; if amax is 0 or the stored scale is 0, every code is +0. Elements are divided by the scale that is stored.

    Attributes:
        block: elements a scale serves: 16 or 32.
        global_scale: where G is: nowhere (1), in the launch ("value"), or an element in device memory ("device").
        side: y is also written, rounded to `normed_out`'s dtype; codes come from y itself.
        layout: where scales go.
    """

    block: int = 16
    global_scale: Literal["", "value", "device"] = ""
    side: bool = False
    layout: Layout = "rows"

    def operands(self) -> tuple[Operand, ...]:
        out = [_NIBBLES, *self._scales(("float8_e4m3fn", "uint8"), raw=True)]
        if self.global_scale == "device":
            out.append(Operand("global_scale", "scalar"))
        return (*out, _SIDE) if self.side else tuple(out)

    def scalars(self) -> tuple[str, ...]:
        return ("global_scale_value",) if self.global_scale == "value" else ()
