"""The LayerNorms of diffusion transformers: a gate, a residual, the norm, its modulation; cast, or in codes.

What is quantised is the norm as it is rounded to the input's dtype, in every format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashnorm.reference import norms, quantise, rows


def fused_dit_gate_residual_layernorm_gamma_beta(
    *, weight: Tensor, bias: Tensor, eps: float, form: str = "", **given: Any
) -> None:
    """residual_out = h = x * (gate + gate_bias) * s + residual; out = layernorm(h) * weight + bias.

    Args:
        x: [..., H], fp32, fp16 or bf16.
        residual: like x, of any of the three dtypes.
        gate: broadcasts to x, last dimension H, any of the three dtypes.
        gate_bias: the same; None for none.
        input_factor: s, one element; None: `input_factor_value`.
        residual_out: like residual, written with h, rounded once. May be `residual` itself.
        weight, bias: [H], any of the three dtypes.
        out: like x, written with n, the norm, rounded once. May be x itself. Or codes of n: bytes, [..., H / 2], two
            e2m1 codes each ("nvfp4"); [..., H], float8_e4m3fn ("mxfp8").
        scale: bytes, [M', C], contiguous, written: tiles of 128 rows and 4 columns, for codes only.
        global_scale: G of NVFP4, one element; None: `global_scale_value`.
        eps: a finite value >= 0, used as fp32.
        input_factor_value, global_scale_value: s and G as numbers.
        numerics: "flashinfer" (norms the unrounded h), "hf-llama", "hf-gemma" or "torch" (the stored one).
        form: of the output: "" (the input's dtype), "nvfp4" or "mxfp8".
    """
    stored, h = _gated(**given)
    y, _ = norms.layer_norm(h, weight, bias, eps=eps)
    rows.write((given["residual_out"], stored), *_made(y, form, **given))


def fused_dit_gate_residual_layernorm_scale_shift(
    *,
    mod_scale: Tensor,
    mod_scale_bias: Tensor | None,
    shift: Tensor,
    shift_bias: Tensor | None,
    eps: float,
    form: str = "",
    **given: Any,
) -> None:
    """residual_out = h = x * (gate + gate_bias) * s + residual; out = layernorm(h) * (1 + scale) + shift.

    Args:
        mod_scale, shift: broadcast to x, last dimension H, any of the three dtypes.
        mod_scale_bias, shift_bias: the same, added to them; None for none.
        x, residual, gate, gate_bias, input_factor, residual_out, out, scale, global_scale, eps, input_factor_value,
            global_scale_value, numerics, form: as in `fused_dit_gate_residual_layernorm_gamma_beta`.
    """
    stored, h = _gated(**given)
    n, _ = norms.layer_norm(h, None, None, eps=eps)
    y = _modulated(n, mod_scale, mod_scale_bias, shift, shift_bias)
    rows.write((given["residual_out"], stored), *_made(y, form, **given))


def fused_dit_residual_layernorm_scale_shift(**given: Any) -> None:
    """residual_out = h = x * s + residual; out = layernorm(h) * (1 + scale) + shift.

    Args are those of `fused_dit_gate_residual_layernorm_scale_shift`, without the gate; residual: None for none, then
    residual_out is like x.
    """
    fused_dit_gate_residual_layernorm_scale_shift(**given, gate=None, gate_bias=None)


# ------------------------------------------------------------------ the steps
def _gated(
    *,
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    gate_bias: Tensor | None,
    input_factor: Tensor | None,
    input_factor_value: float,
    residual_out: Tensor,
    numerics: str,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """(h as it is stored, in that dtype; h that is normalised, fp32)."""
    factor = quantise.number(input_factor, input_factor_value, x)
    factor = factor if gate is None else _biased(gate, gate_bias) * factor
    # Rows may be far from zero and close together: a second rounding of h would be as large as what is left of them.
    h = x.float() * factor if residual is None else rows.fma(x.float(), factor, residual.float())
    return rows.store(h, residual_out.dtype, numerics)


def _biased(vector: Tensor, bias: Tensor | None) -> Tensor:
    return vector.float() if bias is None else vector.float() + bias.float()


def _modulated(n: Tensor, scale: Tensor, scale_bias: Tensor | None, shift: Tensor, shift_bias: Tensor | None) -> Tensor:
    return n * (1.0 + _biased(scale, scale_bias)) + _biased(shift, shift_bias)


def _made(
    y: Tensor,
    form: str,
    *,
    x: Tensor,
    out: Tensor,
    scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    global_scale_value: float = 1.0,
    **_: Any,
) -> tuple[tuple[Tensor | None, Tensor], ...]:
    """What is to be written of y."""
    n = y.to(x.dtype)
    if not form:
        return ((out, n),)
    if form == "nvfp4":
        made, kept = quantise.nvfp4(n.float(), 16, global_scale, global_scale_value)
    else:
        count = n.shape[:-1].numel()
        made, kept = quantise.by_blocks(
            n.float(), torch.float8_e4m3fn, count, block=32, floor=0.0, scale_format="ue8m0"
        )
    return (out, made), (scale, quantise.in_tiles(kept))
