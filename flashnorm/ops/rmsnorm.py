"""RMSNorm, its Gemma form, and both with a fused residual addition."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from flashnorm import reference
from flashnorm.core import gradients, sharding
from flashnorm.core.checks import check_flag
from flashnorm.core.op import Op
from flashnorm.ops import differentiable, programs
from flashnorm.ops.rows import check_index, new_out
from flashnorm.program import Cast, Rms, RowProgram, SaveRstd

Tensor = torch.Tensor


def _program(
    present: programs.Present, options: programs.Options, *, offset: float, residual: str | None, rows: bool
) -> RowProgram:
    return RowProgram(
        load=programs.load(present, options, residual, rows),
        stats=Rms(),
        maps=programs.rms_maps(present, options, offset),
        store=Cast("x" if residual == "residual" else "out"),
        saves=(SaveRstd(),) if residual != "residual" and "rstd" in present else (),
    )


_FORMULAS: dict[str | None, Callable[..., None]] = {
    None: reference.rmsnorm,
    "residual": reference.fused_add_rmsnorm,
    "h": reference.add_rmsnorm,
}
_declare = functools.partial(programs.rms_op, program=_program, formulas=_FORMULAS, optional=("weight", "rstd"))

RMSNORM = _declare("rmsnorm")
RMSNORM_ROWS = _declare("rmsnorm_rows", rows=True)
GEMMA_RMSNORM = _declare("gemma_rmsnorm", offset=1.0)
GEMMA_RMSNORM_ROWS = _declare("gemma_rmsnorm_rows", offset=1.0, rows=True)
_RESULTS: dict[str, Any] = {"labels": {"x": "x"}, "returns": ("out", "h")}
ADD_RMSNORM = _declare("add_rmsnorm", residual="h", public=True, **_RESULTS)
GEMMA_ADD_RMSNORM = _declare("gemma_add_rmsnorm", residual="h", offset=1.0, **_RESULTS)
FUSED_ADD_RMSNORM = _declare("fused_add_rmsnorm", ADD_RMSNORM, residual="residual")
GEMMA_FUSED_ADD_RMSNORM = _declare("gemma_fused_add_rmsnorm", GEMMA_ADD_RMSNORM, residual="residual", offset=1.0)


def _checked(op: Op, tensors: tuple[Any, ...], like: Any, return_rstd: bool, *rest: Any) -> Any:
    """The cold call, with rstd where it is asked for: one value a row of `like`."""
    check_flag(op.called, "return_rstd", return_rstd)
    rstd = op.empty("rstd", like) if return_rstd else None
    y = op.checked(*tensors, rstd, *rest)
    return y if rstd is None else (y, rstd)


def _rows(op: Op) -> Callable[..., Any]:
    """The operator over rows that are picked or widened; behind the public function, with a warm call of its own."""

    @op.warm(return_rstd="rstd")
    def rows(
        input: Tensor,
        row_index: Tensor | None,
        input_scale: Tensor | None,
        weight: Tensor | None,
        out: Tensor,
        eps: float,
        enable_pdl: bool | None,
        *,
        numerics: str,
        return_rstd: bool,
    ) -> Any:
        tensors = (input, row_index, input_scale, weight, out)
        return _checked(op, tensors, out, return_rstd, eps, numerics, enable_pdl)

    def call(input: Any, weight: Any, out: Any, row_index: Any, input_scale: Any, *rest: Any, **more: Any) -> Any:
        out = new_out(op, input, weight, out, row_index)
        check_index(op, input, row_index)
        return rows(input, row_index, input_scale, weight, out, *rest, **more)

    return call


_RMSNORM_ROWS, _GEMMA_RMSNORM_ROWS = _rows(RMSNORM_ROWS), _rows(GEMMA_RMSNORM_ROWS)


@RMSNORM.warm(unless=("row_index", "input_scale"), return_rstd="rstd")
def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
    return_rstd: bool = False,
    row_index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
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
        row_index: [...], int32 or int64: the rows of `input`, its leading dimensions flattened, that are normalised
            (a gather from a paged buffer). The result has the shape `row_index.shape + (H,)`. On a GPU a bad index
            reads nothing and makes its row NaN.
        input_scale: fp32, one element or one for every row of `input` ((M, 1)): `input` is int8 and stands for
            `input * input_scale`, in fp32. The output's dtype is that of `out`, else the weight's, else bf16.

    Returns:
        [..., H] in the input's dtype: `out` where it was given; with `return_rstd`, (out, rstd).

    Raises:
        TypeError: for something that is no tensor, or an eps that is no number.
        ValueError: for a wrong dtype, shape, device, overlap or option, before anything is launched; for a bad
            `row_index` on the CPU.
        RuntimeError: where no route serves the device, or a gradient would be lost: with `out`, `row_index` or
            `input_scale`, the call is not differentiable.
    """
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    if row_index is not None or input_scale is not None:
        more: dict[str, Any] = {"numerics": numerics, "return_rstd": return_rstd}
        result = _RMSNORM_ROWS(input, weight, out, row_index, input_scale, eps, enable_pdl, **more)
    elif out is None and sharding.sharded(input, weight):
        result = sharding.over_rows(
            rmsnorm, [input], [weight], eps, None, enable_pdl, numerics=numerics, return_rstd=return_rstd
        )
    elif out is None and gradients.wanted(input, weight):
        result = _recorded(DIFFERENTIABLE[0.0], return_rstd, input, weight, eps, numerics, enable_pdl)
    else:
        result = _checked(RMSNORM, (input, weight, out), input, return_rstd, eps, numerics, enable_pdl)
    return result


@GEMMA_RMSNORM.warm(unless=("row_index", "input_scale"), return_rstd="rstd")
def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
    return_rstd: bool = False,
    row_index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""RMSNorm with the gain of Gemma's checkpoints, :math:`w + 1`, added in fp32.

    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot (w + 1)

    One rounding at the end in every mode. Arguments, results and errors are those of `rmsnorm`.
    """
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    if row_index is not None or input_scale is not None:
        more: dict[str, Any] = {"numerics": numerics, "return_rstd": return_rstd}
        result = _GEMMA_RMSNORM_ROWS(input, weight, out, row_index, input_scale, eps, enable_pdl, **more)
    elif out is None and sharding.sharded(input, weight):
        result = sharding.over_rows(
            gemma_rmsnorm, [input], [weight], eps, None, enable_pdl, numerics=numerics, return_rstd=return_rstd
        )
    elif out is None and gradients.wanted(input, weight):
        result = _recorded(DIFFERENTIABLE[1.0], return_rstd, input, weight, eps, numerics, enable_pdl)
    else:
        result = _checked(GEMMA_RMSNORM, (input, weight, out), input, return_rstd, eps, numerics, enable_pdl)
    return result


def _recorded(norm: gradients.Differentiable, return_rstd: bool, x: Any, weight: Any, *rest: Any) -> Any:
    """The call that autograd records."""
    check_flag(norm.op.called, "return_rstd", return_rstd)
    y, rstd = norm(x, None, weight, None, *rest)
    return (y, rstd) if return_rstd else y


def _serve(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """The public function, as `gradients` calls it."""

    def serve(x: Tensor, _: None, weight: Any, __: None, eps: float, numerics: str, pdl: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = function(x, weight, eps, None, pdl, numerics=numerics, return_rstd=True)
        return result

    return serve


DIFFERENTIABLE = {
    0.0: differentiable.rms(RMSNORM, _serve(rmsnorm), 0.0),
    1.0: differentiable.rms(GEMMA_RMSNORM, _serve(gemma_rmsnorm), 1.0),
}


def recorded(offset: float, x: Any, weight: Any, eps: float, numerics: str, in_place: bool) -> Tensor:
    """`rmsnorm` (offset 0) or `gemma_rmsnorm` (1), whose backward may overwrite the gradient that it is given."""
    if in_place and gradients.wanted(x, weight) and not sharding.sharded(x, weight):
        return DIFFERENTIABLE[offset](x, None, weight, None, eps, numerics, None, in_place=True)[0]
    y = (gemma_rmsnorm if offset else rmsnorm)(x, weight, eps, numerics=numerics)
    return cast(Tensor, y)


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
