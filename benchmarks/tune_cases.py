"""What `tune_cute` tunes: programs on the dtypes they are tuned for, their operands, and the bits they must write."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashnorm import model
from flashnorm.program import (
    TILE_ROWS,
    AddResidual,
    Affine,
    AffineBias,
    BlockScales,
    Cast,
    Gate,
    GateResidual,
    LoadGained,
    LoadRow,
    MeanVar,
    MixResidual,
    NextNorm,
    Operand,
    QuantBlocks,
    QuantNvfp4,
    QuantTensor,
    Rms,
    Round,
    RowProgram,
    ScaleShift,
    Silu,
    Variant,
)

B, S, E4, I8, U = "bfloat16", "float32", "float8_e4m3fn", "int8", "uint8"
BLOCK = 128
SCALARS = {
    "eps": 1e-6,
    "scale_value": 0.05,
    "scale_ub_value": torch.finfo(torch.float32).max,
    "global_scale_value": 173.25,
    "input_factor_value": 1.0,
    "next_eps": 1e-5,
    "center": 1.0,
    "next_center": 1.0,
}
DYNAMIC = (Affine(), Round())
ACTIVE = (Affine(), Silu())
GATED = GateResidual(gate=True, gate_bias=False, residual=True)
SHIFTED = (ScaleShift(False, False),)
MIXED = (MixResidual("vec"),)


@dataclass(frozen=True)
class Case:
    """A program, and the dtype of each of its operands."""

    program: RowProgram
    dtypes: tuple[str, ...]

    def variant(self, hidden_size: int) -> Variant:
        return Variant(self.program, self.dtypes, hidden_size)


CASES = {
    "rms": Case(RowProgram(LoadRow(), Rms(), (Affine(),), Cast()), (B, B, B)),
    "add": Case(RowProgram(AddResidual(), Rms(), (Affine(),), Cast("x")), (B, B, B)),
    "quant": Case(RowProgram(LoadRow(), Rms(), (Affine(),), QuantTensor()), (B, B, E4)),
    "add_quant": Case(RowProgram(AddResidual(), Rms(), (Affine(),), QuantTensor()), (B, B, B, E4)),
    "ln": Case(RowProgram(LoadRow(), MeanVar(), (AffineBias(),), Cast()), (B, S, S, B)),
    "ln_quant": Case(RowProgram(LoadRow(), MeanVar(), (AffineBias(),), QuantTensor()), (B, S, S, E4)),
    "add_ln": Case(RowProgram(AddResidual(), MeanVar(), (AffineBias(),), Cast("x")), (B, B, S, S)),
    "gamma_beta": Case(RowProgram(GATED, MeanVar(), (AffineBias(),), Cast("out")), (B, B, S, B, S, S, B)),
    "gate_scale_shift": Case(RowProgram(GATED, MeanVar(), SHIFTED, Cast("out")), (B, B, S, B, S, S, B)),
    "gate_scale_shift_biases": Case(
        RowProgram(GateResidual(True, True, True), MeanVar(), (ScaleShift(True, True),), Cast("out")),
        (B, B, B, S, B, B, S, B, S, B),
    ),
    "scale_shift_biases": Case(
        RowProgram(GateResidual(False, False, True), MeanVar(), (ScaleShift(True, True),), Cast("out")),
        (B, B, B, B, S, B, S, B),
    ),
    "mix": Case(RowProgram(LoadGained(), Rms(), MIXED, Cast("out", like="residual")), (B, B, S, S, S, S)),
    "next": Case(RowProgram(LoadGained(), Rms(), MIXED, NextNorm()), (B, B, S, S, S, S, B, B)),
    "gate": Case(RowProgram(LoadRow(), Rms(), (Gate("sigmoid"),), Cast("x")), (B, B)),
    "blocks": Case(RowProgram(LoadRow(), Rms(), DYNAMIC, QuantBlocks(BLOCK, 1e-10)), (B, B, E4, S)),
    "token": Case(RowProgram(LoadRow(), Rms(), DYNAMIC, QuantBlocks(0, 1e-10, cap="value")), (B, B, E4, S)),
    "add_token": Case(RowProgram(AddResidual(), Rms(), DYNAMIC, QuantBlocks(0, 1e-10, cap="value")), (B, B, B, E4, S)),
    "int8": Case(RowProgram(LoadRow(scaled=True), Rms(), (Affine(),), Cast()), (I8, S, B, B)),
    "silu": Case(RowProgram(LoadRow(), Rms(), ACTIVE, Cast()), (B, B, B)),
    "silu_quant": Case(RowProgram(LoadRow(), Rms(), ACTIVE, QuantTensor()), (B, B, E4)),
    "silu_fp4": Case(RowProgram(LoadRow(), Rms(), ACTIVE, QuantNvfp4()), (B, B, U, U)),
    "fp4": Case(RowProgram(LoadRow(), Rms(), (Affine(),), QuantNvfp4(16, "value")), (B, B, U, U)),
    "fp4_tiles": Case(
        RowProgram(LoadRow(), Rms(), (Affine(),), QuantNvfp4(16, "value", layout="swizzled")), (B, B, U, U)
    ),
    "add_fp4": Case(RowProgram(AddResidual(), Rms(), (Affine(),), QuantNvfp4(16, "value")), (B, B, B, U, U)),
    "add_fp4_both": Case(
        RowProgram(AddResidual(), Rms(), (Affine(),), QuantNvfp4(16, "value", layout="both")), (B, B, B, U, U, U)
    ),
    "mxfp4": Case(RowProgram(LoadRow(), Rms(), (Affine(),), QuantBlocks(32, 0.0, ue8m0=True, fp4=True)), (B, B, U, U)),
    "mxfp8": Case(RowProgram(LoadRow(), Rms(), (Affine(),), QuantBlocks(32, 0.0, ue8m0=True)), (B, B, E4, U)),
    "add_mxfp8": Case(
        RowProgram(AddResidual(), Rms(), (Affine(),), QuantBlocks(32, 0.0, ue8m0=True)), (B, B, B, E4, U)
    ),
}


def shape_of(operand: Operand, case: Case, rows: int, hidden_size: int) -> tuple[int, ...]:
    match operand.kind:
        case "row":
            return (rows, hidden_size)
        case "pairs":
            return (rows, hidden_size // 2)
        case "vec":
            return (hidden_size,)
        case "per_row":
            return (rows,)
        case "blocks" | "swizzled":
            store = case.program.store
            assert isinstance(store, BlockScales)
            padded = rows if operand.kind == "blocks" else -(-rows // TILE_ROWS) * TILE_ROWS
            return (padded, store.columns(hidden_size, operand.kind))
    raise NotImplementedError(f"no case has an operand of kind {operand.kind}")


def operands(case: Case, rows: int, hidden_size: int, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows and weights that are read, and every byte of what is written set."""
    generator = torch.Generator(device=device).manual_seed(seed)
    out = {}
    for operand, name in zip(case.program.operands(), case.dtypes, strict=True):
        dtype, shape = getattr(torch, name), shape_of(operand, case, rows, hidden_size)
        if operand.mode == "out":
            bits = torch.full((*shape, dtype.itemsize), 0xFF, dtype=torch.uint8, device=device)
            out[operand.name] = bits.view(dtype).view(shape)
        elif dtype == torch.int8:
            out[operand.name] = torch.randint(-128, 128, shape, generator=generator, dtype=dtype, device=device)
        else:
            out[operand.name] = torch.randn(shape, generator=generator, device=device).to(dtype)
    return out


def call(case: Case, launch: Callable[..., Any], given: dict[str, torch.Tensor], pdl: bool) -> None:
    launch(*(SCALARS[name] for name in case.program.scalars()), pdl, *given.values())


def bytes_moved(case: Case, rows: int, hidden_size: int) -> int:
    """What a launch must read and write at least."""
    total = 0
    for operand, name in zip(case.program.operands(), case.dtypes, strict=True):
        count = math.prod(shape_of(operand, case, rows, hidden_size))
        total += count * getattr(torch, name).itemsize * (2 if operand.mode == "inout" else 1)
    return total


class Checker:
    """A few rows and their canonical bits, once a shape."""

    def __init__(self, op: str, hidden_size: int, rows: int | None = None) -> None:
        self.case = CASES[op]
        rows = rows or max(3, min(67, (1 << 20) // hidden_size))
        self.given = operands(self.case, rows, hidden_size, "cpu", seed=hidden_size)
        self.wanted = model.canonical(self.case.program, self.given, SCALARS)

    def wrong(self, launch: Callable[..., Any]) -> str | None:
        """What differs, or None."""
        for pdl in (False, True):
            given = {name: tensor.cuda() for name, tensor in self.given.items()}
            call(self.case, launch, given, pdl)
            found = {name: given[name].cpu().view(want.shape) for name, want in self.wanted.items()}
            if not model.agree(self.case.program, found, self.wanted):
                bad = {
                    name: (model.steps(found[name], want) != 0).float().mean().item()
                    for name, want in self.wanted.items()
                }
                return ", ".join(f"{share:.2%} of {name}" for name, share in bad.items() if share) + " differ"
        return None
