"""The vocabulary: what a row kernel does, as plain data.

A norm kernel differs from another in four places only: how a row is loaded, which statistics it
needs, which maps are applied to the normalised row, and how it is stored. Each is a frozen
dataclass here, and a `RowProgram` is four of them (plus what is saved for a backward). Equality,
hash and repr of a program *are* the cache key of its kernels, and its operand list is the order
in which every route takes its tensors: nothing about a kernel is written down a second time.

`operand.py` says what operands and stages are, `stages.py` and `stores.py` have the stages. `backward.py` is the same
for gradients and `qk.py` for Q, K and V of attention: kernels of their own, which are no row programs.

Pure data: no torch, no DSL, no CUDA. Dtypes are named by their `torch` attribute ("bfloat16").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flashnorm.program.backward import BackwardProgram, partials, workspace_floats
from flashnorm.program.operand import (
    ENCODED,
    FLOATS,
    FP4,
    FP8,
    SCALES,
    TAILED,
    TILE_COLUMNS,
    TILE_ROWS,
    UE8M0,
    Kind,
    Mode,
    Operand,
    Stage,
)
from flashnorm.program.qk import COS, MAX_HEAD_DIM, MAX_QUARTERS, SCOPES, SIN, QkLayout, QkLayouts, QkNormRope
from flashnorm.program.stages import (
    EXP2,
    EXP_FROM,
    EXP_TO,
    LN2,
    LOG2E,
    Activation,
    AddResidual,
    Affine,
    AffineBias,
    Bias,
    Gate,
    GateResidual,
    LoadGained,
    LoadGated,
    LoadRow,
    MeanVar,
    MixResidual,
    Rms,
    Round,
    SaveMeans,
    SaveRstd,
    ScaleShift,
    Silu,
)
from flashnorm.program.stores import (
    BlockScales,
    Cast,
    Layout,
    NextNorm,
    QuantBlocks,
    QuantNvfp4,
    QuantTensor,
    swizzled_offset,
)

__all__ = [
    "COS",
    "ENCODED",
    "EXP2",
    "EXP_FROM",
    "EXP_TO",
    "FLOATS",
    "FP4",
    "FP8",
    "LN2",
    "LOG2E",
    "MAX_HEAD_DIM",
    "MAX_QUARTERS",
    "SCALES",
    "SCOPES",
    "SIN",
    "TAILED",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "UE8M0",
    "Activation",
    "AddResidual",
    "Affine",
    "AffineBias",
    "BackwardProgram",
    "Bias",
    "BlockScales",
    "Cast",
    "Gate",
    "GateResidual",
    "Kind",
    "Layout",
    "LoadGained",
    "LoadGated",
    "LoadRow",
    "MeanVar",
    "MixResidual",
    "Mode",
    "NextNorm",
    "Operand",
    "Program",
    "QkLayout",
    "QkLayouts",
    "QkNormRope",
    "QuantBlocks",
    "QuantNvfp4",
    "QuantTensor",
    "Rms",
    "Round",
    "RowProgram",
    "SaveMeans",
    "SaveRstd",
    "ScaleShift",
    "Silu",
    "Stage",
    "Variant",
    "partials",
    "rounding",
    "swizzled_offset",
    "workspace_floats",
]


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

    # ------------------------------------------------------------------ what every program says of itself
    @property
    def name(self) -> str:
        return type(self.load).__name__

    def code(self) -> RowProgram:
        """What the C++ routes compile for: all of it."""
        return self

    def bind(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """The launch, from a compiled kernel's entry point: that itself."""
        return kernel


Program = RowProgram | QkNormRope | BackwardProgram


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

    program: Program
    dtypes: tuple[str, ...]
    hidden_size: int
    row_rank: int = 1
    row_vecs: tuple[str, ...] = ()
    vec: int = 8

    @property
    def row_program(self) -> RowProgram:
        """The program, which is one of rows.

        Raises:
            ValueError: it is not.
        """
        if not isinstance(self.program, RowProgram):
            raise ValueError(f"{self.program.name} is no row program")
        return self.program

    def dtype(self, name: str) -> str:
        for operand, dtype in zip(self.program.operands(), self.dtypes, strict=True):
            if operand.name == name:
                return dtype
        raise KeyError(name)

    @property
    def rounding(self) -> str:
        """T, the dtype that "rounded" means inside a formula; see `rounding`."""
        return rounding(self.program, self.dtypes)


def rounding(program: Program, dtypes: tuple[str, ...]) -> str:
    """T of arithmetic.md: the input's dtype. An int8 input has the output's, else the weight's, else bfloat16.

    A backward sees T in the gradient of the output; what was normalised may have been stored in a residual's dtype.
    """
    given = {operand.name: dtype for operand, dtype in zip(program.operands(), dtypes, strict=True)}
    if isinstance(program, BackwardProgram):
        return given["dout"]
    return next((given[name] for name in ("x", "out", "weight") if given.get(name) in FLOATS), "bfloat16")
