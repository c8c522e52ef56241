"""RMSNorm, its Gemma form, and both with a fused residual addition."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashnorm import reference
from flashnorm.core.op import NUMERICS, Op
from flashnorm.program import AddResidual, Affine, Cast, LoadRow, Rms, RowProgram, SaveRstd


def _program(
    present: frozenset[str], options: Mapping[str, Any], *, offset: float = 0.0, residual: str | None = None
) -> RowProgram:
    """The family's program. arithmetic.md's modes are two switches: the residual's rounding and the norm's.

    `residual`: None, or where the sum goes: "residual" (both in place), or another operand (nothing in place).
    """
    numerics = options["numerics"]
    load = LoadRow() if residual is None else AddResidual(rounded=numerics != "flashinfer", dst=residual)
    affine = Affine(offset=offset, round_norm=numerics == "hf-llama" and offset == 0.0)
    return RowProgram(
        load=load,
        stats=Rms(),
        maps=(affine,) if "weight" in present else (),
        store=Cast("x" if residual == "residual" else "out"),
        saves=(SaveRstd(),) if residual is None and "rstd" in present else (),
    )


_FORMULAS: dict[str | None, Callable[..., None]] = {
    None: reference.rmsnorm,
    "residual": reference.fused_add_rmsnorm,
    "h": reference.add_rmsnorm,
}


def _declare(name: str, functional: Op | None = None, **kind: Any) -> Op:
    residual = kind.get("residual")
    formula = _FORMULAS[residual]
    return Op(
        name,
        program=functools.partial(_program, **kind),
        reference=functools.partial(formula, offset=kind.get("offset", 0.0)),
        options={"numerics": NUMERICS},
        optional=("weight", "rstd") if residual is None else ("weight",),
        broadcast_vecs=residual is None,
        functional=functional,
        public=residual != "h",
    )


RMSNORM = _declare("rmsnorm")
GEMMA_RMSNORM = _declare("gemma_rmsnorm", offset=1.0)
ADD_RMSNORM = _declare("add_rmsnorm", residual="h")
GEMMA_ADD_RMSNORM = _declare("gemma_add_rmsnorm", residual="h", offset=1.0)
FUSED_ADD_RMSNORM = _declare("fused_add_rmsnorm", ADD_RMSNORM, residual="residual")
GEMMA_FUSED_ADD_RMSNORM = _declare("gemma_fused_add_rmsnorm", GEMMA_ADD_RMSNORM, residual="residual", offset=1.0)


@RMSNORM.warm(return_rstd="rstd")
def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
    return_rstd: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Root mean square normalisation over the last dimension.

    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot w

    in fp32, with every operation correctly rounded and the sum in one fixed order, so that a row's
    bits depend on the row, the dtypes, H and `numerics` alone (Zhang and Sennrich, 2019,
    arXiv:1910.07467).

    Args:
        input: [..., H], fp32, fp16 or bf16, 1 <= H <= 262,144; any strides.
        weight: [H], or anything that broadcasts to `input` with last dimension H and does not enlarge
            it ([N, H] per head, [M, H] per token, [B, 1, H]); fp32, fp16 or bf16; None for no weight.
        eps: added to the mean square, in fp32; finite and >= 0.
        out: written in place of a new tensor: `input` itself, or a tensor of its shape and dtype that
            overlaps no input.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: "flashinfer" (one rounding at the end), "hf-llama" or "vllm" (rounded to the input's
            dtype before the weight and again after it), "hf-gemma", "torch" or "cake" (one rounding).
        return_rstd: also return 1 / sqrt(mean(x^2) + eps), fp32, of shape `input.shape[:-1]`.

    Returns:
        [..., H] in the input's dtype: `out` where it was given; with `return_rstd`, (out, rstd).

    Raises:
        TypeError: for something that is no tensor, or an eps that is no number.
        ValueError: for a wrong dtype, shape, device, overlap or option, before anything is launched.
        RuntimeError: where no route serves the device, or a gradient would be lost.
    """
    rstd = RMSNORM.empty("rstd", input) if return_rstd else None
    y: torch.Tensor = RMSNORM.checked(input, weight, out, rstd, eps, numerics, enable_pdl)
    return y if rstd is None else (y, rstd)


@GEMMA_RMSNORM.warm(return_rstd="rstd")
def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
    return_rstd: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""RMSNorm with the gain of Gemma's checkpoints, :math:`w + 1`, added in fp32.

    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot (w + 1)

    One rounding at the end in every mode. Arguments, results and errors are those of `rmsnorm`.
    """
    rstd = GEMMA_RMSNORM.empty("rstd", input) if return_rstd else None
    y: torch.Tensor = GEMMA_RMSNORM.checked(input, weight, out, rstd, eps, numerics, enable_pdl)
    return y if rstd is None else (y, rstd)


@FUSED_ADD_RMSNORM.warm()
def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
) -> None:
    r"""Adds into the residual stream and normalises the sum, both in place.

    .. math::
        h = \mathrm{input} + \mathrm{residual}, \quad \mathrm{residual} \leftarrow h, \quad
        \mathrm{input} \leftarrow \frac{h}{\sqrt{\operatorname{mean}(h^2) + \epsilon}} \cdot w

    Args:
        input: [..., H], fp32, fp16 or bf16; overwritten with the norm.
        residual: of the same shape, fp32, fp16 or bf16; overwritten with the sum, rounded once.
        weight: [H], fp32, fp16 or bf16; None for no weight.
        eps: added to the mean square, in fp32; finite and >= 0.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: what is normalised: "flashinfer" the unrounded fp32 sum; "hf-llama", "vllm", "hf-gemma",
            "torch" and "cake" the sum as stored in the residual. "hf-llama" also rounds before the weight.

    Raises:
        TypeError: for something that is no tensor, or an eps that is no number.
        ValueError: for a wrong dtype, shape, device or option, or where `input`, `residual` and `weight`
            overlap in memory; nothing is written then.
        RuntimeError: where no route serves the device, or a gradient would be lost.
    """
    FUSED_ADD_RMSNORM.checked(input, residual, weight, eps, numerics, enable_pdl)


@GEMMA_FUSED_ADD_RMSNORM.warm()
def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
) -> None:
    r"""`fused_add_rmsnorm` with the gain of Gemma's checkpoints, :math:`w + 1`, added in fp32.

    Arguments, effects and errors are those of `fused_add_rmsnorm`; one rounding at the end in every mode.
    """
    GEMMA_FUSED_ADD_RMSNORM.checked(input, residual, weight, eps, numerics, enable_pdl)
