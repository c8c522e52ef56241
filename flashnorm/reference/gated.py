"""Gated norms: a branch that is normalised and mixed into the residual stream, and a norm under a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashnorm.reference import norms, rows


def gated_residual_rmsnorm(*, out: Tensor, numerics: str, **given: Any) -> None:
    """out = alpha * residual + beta * rmsnorm(v), v = x * (gain + center).

    Args:
        x: [..., H], fp32, fp16 or bf16.
        gain: [H], any of the three dtypes; None: v is x.
        alpha: [H], the same; None: `alpha_value`.
        beta: [H], the same.
        residual: like x, of any of the three dtypes.
        out: like residual, written. May be `residual` itself.
        eps: a finite value >= 0, used as fp32.
        center, alpha_value: numbers, used as fp32.
        numerics: any mode; they are the same here.
    """
    rows.write((out, _mixed(**given)))


def gated_residual_next_rmsnorm(
    *,
    residual_out: Tensor,
    next_weight: Tensor,
    ffn_input: Tensor,
    next_eps: float,
    next_center: float,
    numerics: str,
    **given: Any,
) -> None:
    """residual_out = r = alpha * residual + beta * rmsnorm(v); ffn_input = rmsnorm(r) * (next_weight + next_center).

    Args:
        residual_out: like residual, written with r, rounded once: that is what the second norm reads. May be
            `residual` itself.
        next_weight: [H], any of the three dtypes.
        ffn_input: like x, written. May be x itself.
        next_eps: a finite value >= 0, used as fp32.
        next_center: a number, used as fp32.
        x, gain, alpha, beta, residual, eps, center, alpha_value, numerics: as in `gated_residual_rmsnorm`.
    """
    stored = _mixed(**given).to(residual_out.dtype)
    n, _ = norms.rms_norm(stored.float(), None, torch.float32, eps=next_eps, numerics="hf-gemma")
    rows.write((residual_out, stored), (ffn_input, n * (next_weight.float() + next_center)))


def _mixed(
    *,
    x: Tensor,
    gain: Tensor | None,
    alpha: Tensor | None,
    beta: Tensor,
    residual: Tensor,
    eps: float,
    center: float,
    alpha_value: float,
) -> Tensor:
    """r before it is stored, fp32."""
    v = x.float() if gain is None else x.float() * (gain.float() + center)
    n, _ = norms.rms_norm(v, None, torch.float32, eps=eps, numerics="hf-gemma")
    scaled = residual.float() * (alpha_value if alpha is None else alpha.float())
    return rows.fma(beta.float(), n, scaled)


def rmsnorm_gate(
    *,
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor,
    out: Tensor,
    eps: float,
    numerics: str,
    activation: str,
    norm_before_gate: str,
) -> None:
    """out = rmsnorm(x) * weight * act(gate), or rmsnorm(x * act(gate)) * weight.

    Args:
        x: [..., H], fp32, fp16 or bf16.
        weight: broadcasts to x, last dimension H, any of the three dtypes; None for no weight.
        gate: like x, of any of the three dtypes.
        out: like x, written. May be x itself.
        eps: a finite value >= 0, used as fp32.
        numerics: any mode; they are the same here.
        activation: "sigmoid", or "silu", g * sigmoid(g).
        norm_before_gate: "yes" or "no": which of the two forms.
    """
    act, before = _activated(gate.float(), activation), norm_before_gate == "yes"
    h = x.float() if before else x.float() * act
    y, _ = norms.rms_norm(h, weight, x.dtype, eps=eps, numerics="hf-gemma")
    rows.write((out, y * act if before else y))


def rmsnorm_sigmoid_gate(*, x: Tensor, **given: Any) -> None:
    """`rmsnorm_gate` in place."""
    rmsnorm_gate(x=x, out=x, **given)


def _activated(gate: Tensor, activation: str) -> Tensor:
    return (gate if activation == "silu" else 1.0) / (1.0 + torch.exp(-gate))
