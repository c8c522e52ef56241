"""Operands, and what a stage is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "row", "pairs", "pool", "vec", "per_row", "per_pool", "scalar", "blocks", "swizzled", "heads", "gain", "table",
    "workspace",
]  # fmt: skip
Mode = Literal["in", "out", "inout"]

FLOATS = ("float32", "float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
FP4 = "float4_e2m1fn_x2"  # two to a byte
UE8M0 = "float8_e8m0fnu"
ENCODED = (*FP8, FP4, UE8M0)  # dtypes that compilers of PyTorch know too little about: they get bytes
TAILED = ("heads", "gain", "table")  # kinds of operands whose rows are not H wide
SCALES = ("blocks", "swizzled")  # kinds of operands that hold a value for every block of a row
TILE_ROWS, TILE_COLUMNS = 128, 4  # of a swizzled scale tensor


@dataclass(frozen=True)
class Operand:
    """One tensor of a kernel.

    Attributes:
        name: the parameter it is known by everywhere (schema, C++ unit, error texts).
        kind: "row" is [..., H], one row of H elements for every point of the row grid; "pairs" is [..., H/2], the
            same with two elements a byte, the even one in the low half; "pool" is [P, H], rows that
            an index picks from; "vec" is [H], or rows that broadcast against the row grid; "per_row" is [...], one
            value a row (an input may broadcast); "per_pool" is [P], one value a row of the pool; "scalar" is one
            element in device memory; "blocks" is [M', B], B values for each of the M rows of the flattened grid, of
            any two strides: the rows from M to M' are padding and get zeros. "swizzled" are the same values, a byte
            each, in the tiles of 128 rows and 4 columns that block-scaled matrix products read (`swizzled_offset`),
            rows and columns rounded up to whole tiles with zeros. "heads" is [..., N, D], N heads of D elements for
            every point of the grid; "gain" is [N, D], a gain for each of their elements, or one [D] for all of them;
            "table" is [P, R]. "workspace" is memory that a call uses for itself, in one dimension,
            of any content before and after.
        mode: whether the kernel reads it, writes it, or both.
        dtypes: those it may have, by name.
        like: the operand whose dtype this one must have; an output may also be that very tensor.
        raw: kernels take its bytes, uint8, whichever of its dtypes it has.
        tails: of one that is not H wide, the sizes behind its rows that are accepted; kernels take the first.
    """

    name: str
    kind: Kind
    mode: Mode = "in"
    dtypes: tuple[str, ...] = FLOATS
    like: str | None = None
    raw: bool = False
    tails: tuple[tuple[int, ...], ...] = ()

    @property
    def written(self) -> bool:
        return self.mode != "in"

    def carried(self, dtype: str) -> str:
        """The dtype as which kernels take a tensor of this one."""
        return "uint8" if self.raw else dtype


@dataclass(frozen=True)
class Stage:
    """A step of a program. It knows its operands and, by its type, its meaning; nothing else."""

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def scalars(self) -> tuple[str, ...]:
        """Names of the run-time fp32 values the step needs."""
        return ()
