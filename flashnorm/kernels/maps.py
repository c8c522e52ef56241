"""Map stages: n -> y of one group, in fp32."""

from flashnorm.kernels.codec import round_to
from flashnorm.kernels.fp import add_rn, constant, fma_rn, mul_rn
from flashnorm.kernels.silu import activate
from flashnorm.program import Affine, AffineBias, Bias, Gate, MixResidual, Round, Silu


def affine(k, stage, j, n):
    """y = mul(n, g), g = w or add(w, offset)."""
    g = k.values("weight", j)
    if stage.offset:
        offset = constant(stage.offset)
        g = [add_rn(w, offset) for w in g]
    if stage.round_norm:
        n = round_to(n, k.variant.rounding)
    return [mul_rn(a, b) for a, b in zip(n, g, strict=True)]


def affine_bias(k, stage, j, n):
    """y = fma(n, w, bias)."""
    w, bias = k.values("weight", j), k.values("bias", j)
    return [fma_rn(a, b, c) for a, b, c in zip(n, w, bias, strict=True)]


def bias(k, stage, j, n):
    """y = add(n, bias)."""
    return [add_rn(a, b) for a, b in zip(n, k.values("bias", j), strict=True)]


def round_(k, stage, j, n):
    """y = rT(n), widened again."""
    return round_to(n, k.variant.rounding)


def silu(k, stage, j, n):
    """y = div(y, add(1, exp(-y)))."""
    return activate(n, "silu", k.variant.rounding)


def gate(k, stage, j, n):
    """y = mul(y, act(gate))."""
    act = activate(k.values("gate", j), stage.activation, k.variant.rounding)
    return [mul_rn(a, b) for a, b in zip(n, act, strict=True)]


def mix_residual(k, stage, j, n):
    """y = fma(beta, n, mul(alpha, residual))."""
    residual = k.values("residual", j)
    alpha = k.values("alpha", j) if stage.alpha == "vec" else [k.scalars["alpha_value"]] * len(n)
    kept = [mul_rn(a, r) for a, r in zip(alpha, residual, strict=True)]
    return [fma_rn(b, v, r) for b, v, r in zip(k.values("beta", j), n, kept, strict=True)]


MAPS = {
    Affine: affine,
    AffineBias: affine_bias,
    Bias: bias,
    Gate: gate,
    MixResidual: mix_residual,
    Round: round_,
    Silu: silu,
}
