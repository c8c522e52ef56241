"""Stages before the store: how a row is loaded, its statistics, the maps; and what is saved of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashnorm.program.operand import FLOATS, Operand, Stage

# ------------------------------------------------------------------ 1. load: h, fp32
Activation = Literal["sigmoid", "silu"]  # sigmoid(v) = div(1, add(1, exp(-v))), with `Silu`'s exp


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


@dataclass(frozen=True)
class GateResidual(Stage):
    """h of a diffusion transformer's block; also stored, rounded, in `residual_out`. s is `input_factor`.

    With a gate: h = fma(x, mul(g, s), residual), g = gate or add(gate, gate_bias). Without: h = fma(x, s, residual),
    or mul(x, s) without a residual.

    Attributes:
        gate, gate_bias, residual: which of the operands there are: a bias with a gate, a gate with a residual.
        rounded: what is normalised is the stored h.
        factor: where s is: in the launch ("value"), or an element in device memory ("device").
    """

    gate: bool
    gate_bias: bool
    residual: bool
    rounded: bool = False
    factor: Literal["value", "device"] = "value"

    def operands(self) -> tuple[Operand, ...]:
        out = [Operand("x", "row")]
        if self.residual:
            out.append(Operand("residual", "row"))
        if self.gate:
            out.append(Operand("gate", "vec"))
        if self.gate_bias:
            out.append(Operand("gate_bias", "vec"))
        if self.factor == "device":
            out.append(Operand("input_factor", "scalar"))
        return (*out, Operand("residual_out", "row", "out", like="residual" if self.residual else "x"))

    def scalars(self) -> tuple[str, ...]:
        return ("input_factor_value",) if self.factor == "value" else ()


@dataclass(frozen=True)
class LoadGained(Stage):
    """h = mul(f(x), add(w, center)), w = gain: the weight is part of what is normalised."""

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("x", "row"), Operand("gain", "vec"))

    def scalars(self) -> tuple[str, ...]:
        return ("center",)


@dataclass(frozen=True)
class LoadGated(Stage):
    """h = mul(f(x), act(gate)), act one of `ACTIVATIONS`."""

    activation: Activation

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("x", "row"), Operand("gate", "row"))


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


# 2^f = 1 + f c1 + f^2 c2 + ..., for |f| <= 0.5: relative error 2e-9 before rounding. log2(e) in two parts.
EXP2 = tuple(
    float.fromhex(text)
    for text in ("0x1.62e43p-1", "0x1.ebfbdcp-3", "0x1.c6aee6p-5", "0x1.3b2d5p-7", "0x1.5f3f3p-10", "0x1.41fb2ep-13")
)
LOG2E = (float.fromhex("0x1.715476p+0"), float.fromhex("0x1.4ae0cp-26"))
EXP_FROM, EXP_TO = -87.0, 88.5
# log(2) in two parts.
LN2 = (float.fromhex("0x1.62e43p-1"), float.fromhex("-0x1.05c61p-29"))


@dataclass(frozen=True)
class Silu(Stage):
    """y = div(y, add(1, exp(-y))), within 4 ulp for |y| <= 80; rows in fp32 have the same bits everywhere, others
    on the GPU routes of one architecture.

    -0 stays, an infinity is itself or, below zero, NaN, and what is far below zero is -0.
    exp(t): infinite for t > 88.5; else, with t = max(t, -87): c = 1.5 * 2^23; k = fma(t, LOG2E[0], c); n = sub(k, c);
    f = fma(t, LOG2E[0], -n); f = fma(t, LOG2E[1], f); p = EXP2[5]; p = fma(p, f, EXP2[i]) for i = 4 ... 0;
    p = fma(p, f, 1); exp = mul(p, 2^n), exact; within 1.2 ulp.
    On GPUs, where rows have 16 bits, by their approximations of 2^x and 1/x: k = mul(y, -LOG2E[0]);
    v = fma(k, -LN2[1], fma(k, -LN2[0], -y)); e = 2^k; w = mul(e, v); d = add(e, 1); q = mul(y, 1/d);
    y = fma(-fma(w, q, fma(d, q, -y)), 1/d, q).
    """


@dataclass(frozen=True)
class Gate(Stage):
    """y = mul(y, act(gate))."""

    activation: Activation

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("gate", "row"),)


@dataclass(frozen=True)
class ScaleShift(Stage):
    """y = fma(n, add(1, s), t): s = mod_scale or add(mod_scale, mod_scale_bias), t likewise of shift."""

    scale_bias: bool
    shift_bias: bool

    def operands(self) -> tuple[Operand, ...]:
        names = ["mod_scale", *(["mod_scale_bias"] if self.scale_bias else [])]
        names += ["shift", *(["shift_bias"] if self.shift_bias else [])]
        return tuple(Operand(name, "vec") for name in names)


@dataclass(frozen=True)
class MixResidual(Stage):
    """y = fma(beta, n, mul(alpha, residual)); `alpha` says whether that is a vector or comes with the launch."""

    alpha: Literal["vec", "value"]

    def operands(self) -> tuple[Operand, ...]:
        vecs = [Operand("alpha", "vec")] if self.alpha == "vec" else []
        return (*vecs, Operand("beta", "vec"), Operand("residual", "row"))

    def scalars(self) -> tuple[str, ...]:
        return ("alpha_value",) if self.alpha == "value" else ()


# ------------------------------------------------------------------ saved for a backward, or for the caller
@dataclass(frozen=True)
class SaveRstd(Stage):
    """rstd, fp32, one a row."""

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("rstd", "per_row", "out", ("float32",)),)


@dataclass(frozen=True)
class SaveMeans(Stage):
    """m1 and m2 of `MeanVar`, fp32, one each a row: with them and rstd, n can be made again to the bit."""

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("mean", "per_row", "out", ("float32",)), Operand("rest", "per_row", "out", ("float32",)))
