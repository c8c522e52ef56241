"""Row programs of gates, modulation, residual mixes and second norms, and their operands, for tests of kernels."""

from __future__ import annotations

import torch

from flashnorm.program import (
    Affine,
    AffineBias,
    Cast,
    Gate,
    GateResidual,
    LoadGained,
    LoadGated,
    LoadRow,
    MeanVar,
    MixResidual,
    NextNorm,
    QuantBlocks,
    QuantNvfp4,
    Rms,
    Round,
    RowProgram,
    ScaleShift,
)

B, H, F = "bfloat16", "float16", "float32"
MXFP8 = QuantBlocks(32, 0.0, ue8m0=True, layout="swizzled")
USUAL = {
    "x": B, "residual": B, "gate": B, "gate_bias": F, "input_factor": F, "residual_out": B, "weight": F, "bias": F,
    "mod_scale": B, "mod_scale_bias": F, "shift": B, "shift_bias": F, "out": B, "scale": "uint8", "global_scale": F,
    "gain": B, "alpha": F, "beta": F, "next_weight": B, "ffn_input": B,
}  # fmt: skip
WIDE = {"residual": F, "residual_out": F, "out": F}


def _dtypes(program: RowProgram, given: dict[str, str]) -> tuple[str, ...]:
    return tuple({**USUAL, **given}[operand.name] for operand in program.operands())


def _mix(load: LoadRow | LoadGained, alpha: str, following: bool, **given: str) -> tuple[RowProgram, tuple[str, ...]]:
    store = NextNorm() if following else Cast("out", like="residual")
    program = RowProgram(load, Rms(), (MixResidual(alpha),), store)  # type: ignore[arg-type]
    return program, _dtypes(program, given)


def _of(load: object, stats: object, maps: tuple[object, ...], store: object, **given: str):  # type: ignore[no-untyped-def]
    program = RowProgram(load, stats, maps, store)  # type: ignore[arg-type]
    return program, _dtypes(program, given)


# Of diffusion transformers, which the CUDA route serves, and of gated norms, which both do: program, dtypes.
DIT = {
    "gate-gamma": _of(GateResidual(True, True, True), MeanVar(), (AffineBias(),), Cast()),
    "gate-modulated": _of(GateResidual(True, True, True), MeanVar(), (ScaleShift(True, True),), Cast()),
    "rounded": _of(
        GateResidual(True, False, True, True, "device"), MeanVar(), (ScaleShift(False, True),), Cast(), gate=H, shift=F
    ),
    "bare": _of(GateResidual(False, False, False), MeanVar(), (ScaleShift(False, False),), Cast()),
    "residual-nvfp4": _of(
        GateResidual(False, False, True), MeanVar(), (ScaleShift(True, False), Round()),
        QuantNvfp4(16, "device", layout="swizzled"), out="uint8",
    ),
    "gate-mxfp8": _of(
        GateResidual(True, True, True), MeanVar(), (ScaleShift(True, True), Round()), MXFP8, out="float8_e4m3fn",
        residual=F, residual_out=F,
    ),
}  # fmt: skip
GATED = {
    "mix": _mix(LoadRow(), "vec", False, **WIDE),
    "mix-gained": _mix(LoadGained(), "value", False, residual=H, out=H, gain=F),
    "next": _mix(LoadRow(), "vec", True, **WIDE),
    "next-gained": _mix(LoadGained(), "value", True, x=H, ffn_input=H, next_weight=F),
    "sigmoid": _of(LoadRow(), Rms(), (Gate("sigmoid"),), Cast("x")),
    "silu": _of(LoadRow(), Rms(), (Affine(), Gate("silu")), Cast("x"), x=F, gate=H),
    "before": _of(LoadGated("sigmoid"), Rms(), (Affine(),), Cast("x"), gate=F, weight=B),
}
SCALARS = {
    "eps": 1e-6, "next_eps": 1e-5, "center": 1.0, "next_center": 0.5, "alpha_value": 0.75, "input_factor_value": 0.625,
    "global_scale_value": 173.25,
}  # fmt: skip


def far_gates(gate: torch.Tensor) -> None:
    """Arguments of every kind: usual ones, beyond the range of exp, infinite, NaN; altered in place."""
    gate.mul_(60)
    special = (0.0, -0.0, 87.0, -87.0, 87.5, -87.5, -88.25, 88.75, -88.75, 1e30, -1e30, float("inf"), float("nan"))
    flat = gate[0] if gate.dim() > 1 else gate
    for i, value in enumerate(special[: flat.shape[-1]]):
        flat[..., i] = value
