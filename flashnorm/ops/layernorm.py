"""LayerNorm, also with a fused residual addition, and with FP8 output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flashnorm import reference
from flashnorm.core import gradients, sharding
from flashnorm.core.op import NUMERICS, Op
from flashnorm.ops import differentiable, programs
from flashnorm.program import Cast, MeanVar, Round, RowProgram

Tensor = torch.Tensor
_LABELS = {"weight": "gemma", "bias": "beta"}
STATISTICS = ("mean", "rest", "rstd")
_FLAG: dict[Any, str] = {False: "no", True: "yes", "no": "no", "yes": "yes"}


def _program(
    present: programs.Present, options: programs.Options, *, residual: str | None = None, quantised: bool = False
) -> RowProgram:
    maps = programs.layer_maps(present)
    if quantised and options["double_rounding"] == "yes":
        maps = (*maps, Round())
    return RowProgram(
        load=programs.load(present, options, residual),
        stats=MeanVar(),
        maps=maps,
        store=programs.quant_tensor(present) if quantised else Cast("x" if residual == "residual" else "out"),
        saves=() if quantised or residual == "residual" else programs.saves(present),
    )


def _declare(name: str, formula: Callable[..., None], functional: Op | None = None, **kind: Any) -> Op:
    quantised, residual = kind.get("quantised", False), kind.get("residual")
    return Op(
        name,
        program=functools.partial(_program, **kind),
        reference=formula,
        options={"numerics": NUMERICS} | ({"double_rounding": _FLAG} if quantised else {}),
        optional=("weight", "bias", "mean", "rest", "rstd", *(("scale",) if quantised else ())),
        routes=("cuda", "cpu", "torch") if quantised else ("cute", "cuda", "cpu", "torch"),
        labels={"x": "x"} if residual == "h" else _LABELS,
        by_value=programs.SCALE if quantised else None,
        returns=("out", "h") if residual == "h" else () if quantised else None,
        functional=functional,
    )


LAYERNORM = _declare("layernorm", reference.layernorm)
ADD_LAYERNORM = _declare("add_layernorm", reference.add_layernorm, residual="h")
FUSED_ADD_LAYERNORM = _declare("fused_add_layernorm", reference.fused_add_layernorm, ADD_LAYERNORM, residual="residual")
LAYERNORM_QUANT = _declare("layernorm_quant", reference.layernorm_quant, quantised=True)


@LAYERNORM.warm()
def layernorm(
    input: torch.Tensor,
    gemma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
) -> torch.Tensor:
    r"""Layer normalisation over the last dimension.

    .. math:: y = \frac{x - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + \epsilon}} \cdot \gamma + \beta

    in fp32 with the biased variance (Ba, Kiros and Hinton, 2016, arXiv:1607.06450). The mean is found in two steps,
    the second over the differences from the first, and the variance is corrected by what the second leaves (Chan,
    Golub and LeVeque, 1983): rows far from zero lose nothing. Every operation is correctly rounded and every sum in
    one fixed order, as for `rmsnorm`.

    Args:
        input: [..., H], fp32, fp16 or bf16, 1 <= H <= 262,144; any strides.
        gemma: [H], the gain; fp32, fp16 or bf16; None for none.
        beta: [H], the bias; fp32, fp16 or bf16; None for none.
        eps: added to the variance, in fp32; finite and >= 0.
        out: written in place of a new tensor: `input` itself, or a tensor of its shape and dtype that
            overlaps no input.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: one rounding at the end in every mode.

    Returns:
        [..., H] in the input's dtype: `out` where it was given.

    Raises:
        TypeError: for something that is no tensor, or an eps that is no number.
        ValueError: for a wrong dtype, shape, device, overlap or option, before anything is launched.
        RuntimeError: where no route serves the device, or a gradient would be lost: with `out`, the call is not
            differentiable.
    """
    y: torch.Tensor
    if out is None and sharding.sharded(input, gemma, beta):
        y = sharding.over_rows(layernorm, [input], [gemma, beta], eps, None, enable_pdl, numerics=numerics)
        return y
    if out is None and gradients.wanted(input, gemma, beta):
        return DIFFERENTIABLE(input, None, gemma, beta, eps, numerics, enable_pdl)[0]
    y = LAYERNORM.checked(input, gemma, beta, out, None, None, None, eps, numerics, enable_pdl)
    return y


_with_statistics = LAYERNORM.behind()


def _serve(
    x: Tensor, _: None, weight: Any, bias: Any, eps: float, numerics: str, pdl: bool | None
) -> tuple[Tensor, ...]:
    """What a backward needs comes with the norm."""
    statistics = [LAYERNORM.empty(name, x) for name in STATISTICS]
    return _with_statistics(x, weight, bias, None, *statistics, eps, numerics, pdl), *statistics


DIFFERENTIABLE = differentiable.layer(LAYERNORM, _serve)


@FUSED_ADD_LAYERNORM.warm()
def fused_add_layernorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    gemma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
) -> None:
    r"""Adds into the residual stream and normalises the sum with `layernorm`, both in place.

    .. math::
        h = \mathrm{input} + \mathrm{residual}, \quad \mathrm{residual} \leftarrow h, \quad
        \mathrm{input} \leftarrow \operatorname{layernorm}(h)

    Args:
        input: [..., H], fp32, fp16 or bf16; overwritten with the norm.
        residual: of the same shape, fp32, fp16 or bf16; overwritten with the sum, rounded once.
        gemma: [H], the gain; None for none.
        beta: [H], the bias; None for none.
        eps: added to the variance, in fp32; finite and >= 0.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: what is normalised: "flashinfer" the unrounded fp32 sum, every other mode the stored one.

    Raises:
        As `fused_add_rmsnorm`.
    """
    FUSED_ADD_LAYERNORM.checked(input, residual, gemma, beta, eps, numerics, enable_pdl)


@LAYERNORM_QUANT.warm()
def layernorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor | None,
    beta: torch.Tensor | None,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
    double_rounding: bool = False,
) -> None:
    r"""`layernorm` divided by a scale, in FP8.

    .. math::
        \mathrm{out} = \operatorname{cast}\!\left(\operatorname{layernorm}(x) \cdot \frac{1}{\mathrm{scale}}\right)

    The cast rounds once, to nearest even, and saturates; NaN gives 0x7F. On CUDA tensors the CUDA route serves it.

    Args:
        out: [..., H], float8_e4m3fn or float8_e5m2; written.
        input: [..., H], fp32, fp16 or bf16; any strides.
        gemma: [H], the gain; None for none.
        beta: [H], the bias; None for none.
        scale: a number or a CPU tensor of one element (by value, finite and > 0), or a 0-d or (1,) tensor on the
            device, read there.
        eps: added to the variance, in fp32; finite and >= 0.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: the same in every mode.
        double_rounding: round the norm to the input's dtype first, as FlashInfer does.

    Raises:
        As `layernorm`.
    """
    LAYERNORM_QUANT.checked(input, gemma, beta, out, scale, eps, numerics, double_rounding, enable_pdl)
