"""Gates, modulation and residual streams: their bits, and their formulas."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashnorm.model.arithmetic import add, canonical_sum, div, fma, mul, sqrt
from flashnorm.model.stores import fp32
from flashnorm.program import GateResidual, MixResidual, ScaleShift

Tensors = Mapping[str, Tensor]
Numbers = Mapping[str, float]


# ------------------------------------------------------------------ bits
def gated_residual(stage: GateResidual, given: Tensors, scalars: Numbers) -> Tensor:
    """h, fp32; the formula's too."""
    x = given["x"].float()
    factor = fp32(given["input_factor"] if stage.factor == "device" else scalars["input_factor_value"], x).expand_as(x)
    if stage.gate:
        factor = mul(_biased(given, "gate", stage.gate_bias).expand_as(x), factor)
    return fma(x, factor, given["residual"].float()) if stage.residual else mul(x, factor)


def canonical_scale_shift(stage: ScaleShift, y: Tensor, given: Tensors) -> Tensor:
    scale, shift = _biased(given, "mod_scale", stage.scale_bias), _biased(given, "shift", stage.shift_bias)
    return fma(y, add(torch.ones_like(scale), scale), shift)


def canonical_mix(stage: MixResidual, n: Tensor, given: Tensors, scalars: Numbers) -> Tensor:
    alpha = given["alpha"].float() if stage.alpha == "vec" else fp32(scalars["alpha_value"], n)
    return fma(given["beta"].float().expand_as(n), n, mul(alpha, given["residual"].float()))


def canonical_next(y: Tensor, given: Tensors, scalars: Numbers) -> dict[str, Tensor]:
    stored = y.to(given["residual_out"].dtype)
    r = stored.float()
    square = div(canonical_sum(r, r), r.shape[-1])
    rstd = div(1.0, sqrt(add(square, fp32(scalars["next_eps"], r))))
    gain = add(given["next_weight"].float(), fp32(scalars["next_center"], r))
    z = mul(mul(r, rstd.unsqueeze(-1)), gain)
    return {"residual_out": stored, "ffn_input": z.to(given["ffn_input"].dtype)}


def _biased(given: Tensors, name: str, biased: bool) -> Tensor:
    """A vector of modulation, with its bias where there is one."""
    vector = given[name].float()
    return add(vector, given["gate_bias" if name == "gate" else f"{name}_bias"].float()) if biased else vector


# ------------------------------------------------------------------ formula
def exact_activation(v: Tensor, name: str) -> Tensor:
    """By the formula: an infinity of negative sign gives NaN in silu."""
    v = v.double()
    return (v if name == "silu" else 1.0) / (1 + torch.exp(-v))


def exact_scale_shift(stage: ScaleShift, y: Tensor, given: Tensors) -> Tensor:
    scale, shift = given["mod_scale"].double(), given["shift"].double()
    scale = scale + given["mod_scale_bias"].double() if stage.scale_bias else scale
    shift = shift + given["shift_bias"].double() if stage.shift_bias else shift
    return y * (1 + scale) + shift


def exact_mix(stage: MixResidual, n: Tensor, given: Tensors, scalars: Numbers) -> Tensor:
    alpha = given["alpha"].double() if stage.alpha == "vec" else fp32(scalars["alpha_value"], n).double()
    return given["beta"].double() * n + alpha * given["residual"].double()


def exact_next(y: Tensor, given: Tensors, scalars: Numbers, stored: Tensors | None) -> dict[str, Tensor]:
    r = (y.to(given["residual_out"].dtype) if stored is None else stored["residual_out"]).double()
    rstd = (r.square().mean(-1, keepdim=True) + fp32(scalars["next_eps"], r).double()).rsqrt()
    gain = given["next_weight"].double() + fp32(scalars["next_center"], r).double()
    return {"residual_out": y, "ffn_input": r * rstd * gain}
