"""LayerNorm, plain and with a residual, its result cast or quantised."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashnorm.reference import norms, quantise, rows


def layernorm(
    *,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    mean: Tensor | None = None,
    rest: Tensor | None = None,
    rstd: Tensor | None = None,
    eps: float,
    numerics: str,
) -> None:
    """out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension.

    Args:
        x: [..., H], fp32, fp16 or bf16. M = 0 rows are fine.
        weight: broadcasts to x, last dimension H, any of the three dtypes; None for no weight.
        bias: the same; None for no bias.
        out: like x, written. May be x itself.
        mean, rest, rstd: [...], fp32, written: the mean, the mean of the differences from it, and
            1 / sqrt(var(x) + eps); None where nobody wants them.
        eps: a finite value >= 0, used as fp32.
        numerics: any mode: they differ where there is a residual.
    """
    y, saved = norms.layer_norm(x.float(), weight, bias, eps=eps)
    rows.write(*_saves((mean, rest, rstd), saved), (out, y))


def add_layernorm(
    *,
    x: Tensor,
    residual: Tensor,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    mean: Tensor | None = None,
    rest: Tensor | None = None,
    rstd: Tensor | None = None,
    eps: float,
    numerics: str,
) -> None:
    """h = x + residual; out = layernorm(h).

    Args:
        x, weight, bias, out, mean, rest, rstd, eps: those of `layernorm`.
        residual: like x, of any of the three dtypes.
        h: like residual, written with the sum, rounded once. May be `residual` itself.
        numerics: "flashinfer" (norms the unrounded sum), "hf-llama", "hf-gemma" or "torch" (the stored one).
    """
    stored, total = rows.add(x, residual, numerics)
    y, saved = norms.layer_norm(total, weight, bias, eps=eps)
    rows.write((h, stored), *_saves((mean, rest, rstd), saved), (out, y))


def _saves(targets: tuple[Tensor | None, ...], values: tuple[Tensor, ...]) -> list[tuple[Tensor | None, Tensor]]:
    return [(target, value.squeeze(-1)) for target, value in zip(targets, values, strict=True)]


def fused_add_layernorm(*, x: Tensor, residual: Tensor, **given: Any) -> None:
    """`add_layernorm` in place: residual <- x + residual; x <- layernorm(that sum)."""
    add_layernorm(x=x, residual=residual, h=residual, out=x, **given)


def layernorm_quant(
    *,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    scale: Tensor | None,
    eps: float,
    scale_value: float,
    numerics: str,
    double_rounding: str,
) -> None:
    """out = codes of layernorm(x) / scale.

    Args:
        x, weight, bias, eps, numerics: those of `layernorm`.
        out: like x, of float8_e4m3fn or float8_e5m2, written.
        scale: one element, of any floating-point dtype; None: `scale_value`.
        scale_value: the scale as a number, used as fp32.
        double_rounding: "yes" or "no": whether the norm is rounded to x's dtype before it is divided.
    """
    y, _ = norms.layer_norm(x.float(), weight, bias, eps=eps)
    y = y.to(x.dtype).float() if double_rounding == "yes" else y
    rows.write((out, quantise.by_tensor(y, scale, scale_value, out.dtype)))
