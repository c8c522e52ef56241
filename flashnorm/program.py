"""The vocabulary: what a row kernel does, as plain data.

A norm kernel differs from another in four places only: how a row is loaded, which statistics it
needs, which maps are applied to the normalised row, and how it is stored. Each is a frozen
dataclass here, and a `RowProgram` is four of them (plus what is saved for a backward). Equality,
hash and repr of a program *are* the cache key of its kernels, and its operand list is the order
in which every route takes its tensors: nothing about a kernel is written down a second time.

Pure data: no torch, no DSL, no CUDA. Dtypes are named by their `torch` attribute ("bfloat16").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["row", "pool", "vec", "per_row", "per_pool", "scalar", "blocks"]
Mode = Literal["in", "out", "inout"]

FLOATS = ("float32", "float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Operand:
    """One tensor of a kernel.

    Attributes:
        name: the parameter it is known by everywhere (schema, C++ unit, error texts).
        kind: "row" is [..., H], one row of H elements for every point of the row grid; "pool" is [P, H], rows that
            an index picks from; "vec" is [H], or rows that broadcast against the row grid; "per_row" is [...], one
            value a row (an input may broadcast); "per_pool" is [P], one value a row of the pool; "scalar" is one
            element in device memory; "blocks" is [M', B], B values for each of the M rows of the flattened grid, of
            any two strides: the rows from M to M' are padding and get zeros.
        mode: whether the kernel reads it, writes it, or both.
        dtypes: those it may have, by name.
        like: the operand whose dtype this one must have; an output may also be that very tensor.
    """

    name: str
    kind: Kind
    mode: Mode = "in"
    dtypes: tuple[str, ...] = FLOATS
    like: str | None = None

    @property
    def written(self) -> bool:
        return self.mode != "in"


@dataclass(frozen=True)
class Stage:
    """A step of a program. It knows its operands and, by its type, its meaning; nothing else."""

    def operands(self) -> tuple[Operand, ...]:
        return ()

    def scalars(self) -> tuple[str, ...]:
        """Names of the run-time fp32 values the step needs."""
        return ()


# ------------------------------------------------------------------ 1. load: h, fp32
@dataclass(frozen=True)
class LoadRow(Stage):
    """h = f(x); `scaled`: h = mul(float(x), input_scale), x in int8.

    `indexed`: x is a pool, and row m of the grid is its row `row_index[m]`. An index outside of it makes a row of
    NaN, and reads nothing.
    """

    indexed: bool = False
    scaled: bool = False

    def operands(self) -> tuple[Operand, ...]:
        out = [Operand("x", "pool" if self.indexed else "row", dtypes=("int8",) if self.scaled else FLOATS)]
        if self.indexed:
            out.append(Operand("row_index", "per_row", dtypes=("int32", "int64")))
        if self.scaled:
            out.append(Operand("input_scale", "per_pool" if self.indexed else "per_row", dtypes=("float32",)))
        return tuple(out)


@dataclass(frozen=True)
class AddResidual(Stage):
    """s = add(x, residual), stored rounded to the residual's dtype.

    `rounded` says what is normalised: the stored sum widened again (Hugging Face, Cake), or the
    unrounded fp32 sum (FlashInfer). `dst` names where the sum goes: the residual itself, or
    another operand.
    """

    rounded: bool = False
    dst: str = "residual"

    def operands(self) -> tuple[Operand, ...]:
        if self.dst == "residual":
            return (Operand("x", "row"), Operand("residual", "row", "inout"))
        return (Operand("x", "row"), Operand("residual", "row"), Operand(self.dst, "row", "out", like="residual"))


# ------------------------------------------------------------------ 2. statistics: n, fp32
@dataclass(frozen=True)
class Rms(Stage):
    """rstd = div(1, sqrt(add(div(sum(h*h), H), eps))); n = mul(h, rstd)."""

    def scalars(self) -> tuple[str, ...]:
        return ("eps",)


@dataclass(frozen=True)
class MeanVar(Stage):
    """The corrected two-pass of LayerNorm.

    m1 = div(sum(h), H); d = sub(h, m1); m2 = div(sum(d), H); var = max(0, fma(-m2, m2, div(sum(d*d), H)));
    rstd = div(1, sqrt(add(var, eps))); n = mul(sub(d, m2), rstd). The maximum keeps NaN. What a row lacks of a whole
    group is 0 after the subtraction: a missing d is 0, not -m1.
    """

    def scalars(self) -> tuple[str, ...]:
        return ("eps",)


# ------------------------------------------------------------------ 3. maps: n -> y, fp32
@dataclass(frozen=True)
class Affine(Stage):
    """y = mul(n, g), g = w or add(w, offset); `round_norm`: n is rounded to T first."""

    offset: float = 0.0
    round_norm: bool = False

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("weight", "vec"),)


@dataclass(frozen=True)
class AffineBias(Stage):
    """y = fma(n, w, bias)."""

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("weight", "vec"), Operand("bias", "vec"))


@dataclass(frozen=True)
class Bias(Stage):
    """y = add(n, bias): a bias without a weight."""

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("bias", "vec"),)


@dataclass(frozen=True)
class Round(Stage):
    """y = rT(y), widened again."""


# ------------------------------------------------------------------ 4. store
@dataclass(frozen=True)
class Cast(Stage):
    """One rounding to the destination's dtype."""

    dst: str = "out"

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.dst, "row", "out", like="x"),)


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


@dataclass(frozen=True)
class QuantBlocks(Stage):
    """A scale for every `block` elements of a row (the last block may be shorter), found from y itself.

    a = max(amax |y|, floor), an infinite amax counting as FLT_MAX; with a cap a = min(a, cap); both keep NaN.
    s = div(a, Q), Q the largest finite code (448, 57344, 127); `ue8m0`: the smallest power of two >= div(a, Q),
    stored as exponent byte (127 + e, clamped to 0 ... 254; NaN 0xFF). out = cast(mul(y, r)), saturating, nearest
    even, with r = div(1, s), or r = div(Q, a) where `ratio` says so. If amax is NaN, the scale is NaN and every code
    of the block 0x7F (int8: 0); if amax is 0, every code is +0.

    Attributes:
        block: elements a scale serves, a multiple of 8; 0: the whole row.
        floor: the least a.
        ratio: codes are made with div(Q, a).
        ue8m0: the scale is a power of two.
        packed: ue8m0 bytes of four neighbouring blocks in an int32, the first in its low byte; B counts int32s, and
            the bytes of blocks that are not there are 0.
        cap: where the cap on a is: nowhere, in the launch ("value"), or an element in device memory ("device").
        side: y is also written, cast to `normed_out`'s dtype (T, so that y, which a `Round` has rounded, is exact).
    """

    block: int
    floor: float
    ratio: bool = False
    ue8m0: bool = False
    packed: bool = False
    cap: Literal["", "value", "device"] = ""
    side: bool = False

    def operands(self) -> tuple[Operand, ...]:
        kept = ("int32",) if self.packed else ("uint8",) if self.ue8m0 else ("float32",)
        # The ratio is the 1x128 recipe of block-scaled GEMMs, which is of e4m3fn alone.
        codes = ("float8_e4m3fn",) if self.ratio else (*FP8, "int8")
        out = [Operand("out", "row", "out", codes), Operand("scale", "blocks", "out", kept)]
        if self.cap == "device":
            out.append(Operand("scale_ub", "scalar"))
        if self.side:
            out.append(Operand("normed_out", "row", "out"))
        return tuple(out)

    def scalars(self) -> tuple[str, ...]:
        return ("scale_ub_value",) if self.cap == "value" else ()

    def blocks(self, hidden_size: int) -> int:
        """Blocks of a row."""
        return -(-hidden_size // self.block) if self.block else 1

    def columns(self, hidden_size: int) -> int:
        """B: elements of `scale` for one row."""
        return -(-self.blocks(hidden_size) // 4) if self.packed else self.blocks(hidden_size)


# ------------------------------------------------------------------ saved for a backward, or for the caller
@dataclass(frozen=True)
class SaveRstd(Stage):
    """rstd, fp32, one a row."""

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("rstd", "per_row", "out", ("float32",)),)


# ------------------------------------------------------------------ the program
@dataclass(frozen=True)
class RowProgram:
    """One row kernel: load, statistics, maps, store (and saves)."""

    load: Stage
    stats: Stage
    maps: tuple[Stage, ...]
    store: Stage
    saves: tuple[Stage, ...] = ()

    def stages(self) -> tuple[Stage, ...]:
        return (self.load, self.stats, *self.maps, self.store, *self.saves)

    def operands(self) -> tuple[Operand, ...]:
        """Every operand once, in order of first use; one that is read and written is "inout"."""
        seen: dict[str, Operand] = {}
        for stage in self.stages():
            for new in stage.operands():
                old = seen.setdefault(new.name, new)
                if old.mode != new.mode:
                    seen[new.name] = replace(old, mode="inout")
        return tuple(seen.values())

    def scalars(self) -> tuple[str, ...]:
        """Every run-time fp32 value once, in order of first use."""
        return tuple(dict.fromkeys(name for stage in self.stages() for name in stage.scalars()))


@dataclass(frozen=True)
class Variant:
    """A program with everything a kernel is specialised on, whatever the route.

    Attributes:
        program: what is computed.
        dtypes: one dtype name for each of `program.operands()`, in that order.
        hidden_size: H. The C++ routes take it at run time and drop it from their cache key.
        row_rank: 1 where rows are [M, H], 2 where they are [A, B, H] with strides that do not collapse.
        row_vecs: the "vec" operands that are given per row ([M, H] or [A, B, H], any stride 0)
            instead of as one [H].
        vec: elements that may be accessed together: 8 (whole groups), 4, 2 or 1. H and every outer
            stride are multiples of it, every pointer of `min(16, vec * itemsize)` bytes.
    """

    program: RowProgram
    dtypes: tuple[str, ...]
    hidden_size: int
    row_rank: int = 1
    row_vecs: tuple[str, ...] = ()
    vec: int = 8

    def dtype(self, name: str) -> str:
        for operand, dtype in zip(self.program.operands(), self.dtypes, strict=True):
            if operand.name == name:
                return dtype
        raise KeyError(name)

    @property
    def rounding(self) -> str:
        """T, the dtype that "rounded" means inside a formula; see `rounding`."""
        return rounding(self.program, self.dtypes)


def rounding(program: RowProgram, dtypes: tuple[str, ...]) -> str:
    """T of arithmetic.md: the input's dtype. An int8 input has the output's, else the weight's, else bfloat16."""
    given = {operand.name: dtype for operand, dtype in zip(program.operands(), dtypes, strict=True)}
    return next((given[name] for name in ("x", "out", "weight") if given.get(name) in FLOATS), "bfloat16")
