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

Kind = Literal["row", "vec", "per_row", "scalar"]
Mode = Literal["in", "out", "inout"]


@dataclass(frozen=True)
class Operand:
    """One tensor of a kernel.

    Attributes:
        name: the parameter it is known by everywhere (schema, C++ unit, error texts).
        kind: "row" is [..., H], one row of H elements for every point of the row grid; "vec" is
            [H], or rows that broadcast against the row grid; "per_row" is [...], one value a row;
            "scalar" is one element in device memory.
        mode: whether the kernel reads it, writes it, or both.
        dtype: fixed dtype by name, or None where the caller's tensor decides.
        like: the operand whose dtype this one must have; an output may also be that very tensor.
    """

    name: str
    kind: Kind
    mode: Mode = "in"
    dtype: str | None = None
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
    """h = f(x)."""

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("x", "row"),)


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


# ------------------------------------------------------------------ 3. maps: n -> y, fp32
@dataclass(frozen=True)
class Affine(Stage):
    """y = mul(n, g), g = w or add(w, offset); `round_norm`: n is rounded to x's dtype first."""

    offset: float = 0.0
    round_norm: bool = False

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("weight", "vec"),)


# ------------------------------------------------------------------ 4. store
@dataclass(frozen=True)
class Cast(Stage):
    """One rounding to the destination's dtype."""

    dst: str = "out"

    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.dst, "row", "out", like="x"),)


# ------------------------------------------------------------------ saved for a backward, or for the caller
@dataclass(frozen=True)
class SaveRstd(Stage):
    """rstd, fp32, one a row."""

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("rstd", "per_row", "out", "float32"),)


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
