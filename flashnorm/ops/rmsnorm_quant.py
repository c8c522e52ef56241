"""RMSNorm with FP8 output and one scale for the tensor: plain, Gemma's, and both with a fused residual addition."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flashnorm import reference
from flashnorm.core.op import Op
from flashnorm.ops import programs
from flashnorm.ops.rows import check_index
from flashnorm.program import Rms, RowProgram

Tensor = torch.Tensor


def _program(
    present: programs.Present, options: programs.Options, *, offset: float, residual: str | None, rows: bool
) -> RowProgram:
    return RowProgram(
        load=programs.load(present, options, residual, rows),
        stats=Rms(),
        maps=programs.rms_maps(present, options, offset, quantised=True),
        store=programs.quant_tensor(present),
    )


_FORMULAS: dict[str | None, Callable[..., None]] = {
    None: reference.rmsnorm_quant,
    "residual": reference.fused_add_rmsnorm_quant,
    "h": reference.add_rmsnorm_quant,
}
_declare = functools.partial(
    programs.rms_op,
    program=_program,
    formulas=_FORMULAS,
    optional=("weight", "scale"),
    by_value=programs.SCALE,
    returns=(),
)

RMSNORM_QUANT = _declare("rmsnorm_quant")
RMSNORM_QUANT_ROWS = _declare("rmsnorm_quant_rows", rows=True)
GEMMA_RMSNORM_QUANT = _declare("gemma_rmsnorm_quant", offset=1.0)
GEMMA_RMSNORM_QUANT_ROWS = _declare("gemma_rmsnorm_quant_rows", offset=1.0, rows=True)
ADD_RMSNORM_QUANT = _declare("add_rmsnorm_quant", residual="h")
GEMMA_ADD_RMSNORM_QUANT = _declare("gemma_add_rmsnorm_quant", residual="h", offset=1.0)
FUSED_ADD_RMSNORM_QUANT = _declare("fused_add_rmsnorm_quant", ADD_RMSNORM_QUANT, residual="residual")
GEMMA_FUSED_ADD_RMSNORM_QUANT = _declare(
    "gemma_fused_add_rmsnorm_quant", GEMMA_ADD_RMSNORM_QUANT, residual="residual", offset=1.0
)


def _rows(op: Op) -> Callable[..., None]:
    """The operator over rows that are picked or widened; behind the public function, with a warm call of its own."""

    @op.warm()
    def rows(
        input: Tensor,
        row_index: Tensor | None,
        input_scale: Tensor | None,
        weight: Tensor | None,
        out: Tensor,
        scale: float | Tensor,
        eps: float,
        enable_pdl: bool | None,
        *,
        numerics: str,
    ) -> None:
        op.checked(input, row_index, input_scale, weight, out, scale, eps, numerics, enable_pdl)

    def call(input: Any, row_index: Any, *rest: Any, **more: Any) -> None:
        check_index(op, input, row_index)
        rows(input, row_index, *rest, **more)

    return call


_RMSNORM_QUANT_ROWS, _GEMMA_RMSNORM_QUANT_ROWS = _rows(RMSNORM_QUANT_ROWS), _rows(GEMMA_RMSNORM_QUANT_ROWS)


@RMSNORM_QUANT.warm(unless=("row_index", "input_scale"))
def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
    row_index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> None:
    r"""`rmsnorm` divided by a scale, in FP8.

    .. math:: \mathrm{out} = \operatorname{cast}\!\left(\operatorname{rmsnorm}(x) \cdot \frac{1}{\mathrm{scale}}\right)

    The quotient 1 / scale is found once; the cast rounds once, to nearest even, and saturates (448 in e4m3, 57344 in
    e5m2; OCP 8-bit Floating Point Specification, 2023). NaN gives 0x7F.

    Args:
        out: [..., H], float8_e4m3fn or float8_e5m2; written.
        input: [..., H], fp32, fp16 or bf16; any strides.
        weight: [H], or anything that broadcasts to `input` with last dimension H; None for no weight.
        scale: a number or a CPU tensor of one element (by value, finite and > 0: nothing is copied to the device), or
            a 0-d or (1,) tensor on the device, read there.
        eps: added to the mean square, in fp32; finite and >= 0.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: "flashinfer" (one rounding at the end), "hf-llama" or "vllm" (what is quantised is the norm of that
            mode, in the input's dtype), "hf-gemma", "torch" or "cake" (one rounding).
        row_index, input_scale: as in `rmsnorm`.

    Raises:
        TypeError: for something that is no tensor, or an eps or scale that is no number.
        ValueError: for a wrong dtype, shape, device, overlap, option or scale, before anything is launched; for a bad
            `row_index` on the CPU.
        RuntimeError: where no route serves the device, or a gradient would be lost.
    """
    if row_index is not None or input_scale is not None:
        more = (weight, out, scale, eps, enable_pdl)
        _RMSNORM_QUANT_ROWS(input, row_index, input_scale, *more, numerics=numerics)
    else:
        RMSNORM_QUANT.checked(input, weight, out, scale, eps, numerics, enable_pdl)


@GEMMA_RMSNORM_QUANT.warm(unless=("row_index", "input_scale"))
def gemma_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
    row_index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> None:
    r"""`rmsnorm_quant` with the gain of Gemma's checkpoints, :math:`w + 1`, added in fp32.

    Arguments, effects and errors are those of `rmsnorm_quant`; one rounding at the end in every mode.
    """
    if row_index is not None or input_scale is not None:
        more = (weight, out, scale, eps, enable_pdl)
        _GEMMA_RMSNORM_QUANT_ROWS(input, row_index, input_scale, *more, numerics=numerics)
    else:
        GEMMA_RMSNORM_QUANT.checked(input, weight, out, scale, eps, numerics, enable_pdl)


@FUSED_ADD_RMSNORM_QUANT.warm()
def fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
) -> None:
    r"""Adds into the residual stream and normalises the sum into FP8.

    .. math::
        h = \mathrm{input} + \mathrm{residual}, \quad \mathrm{residual} \leftarrow h, \quad
        \mathrm{out} = \operatorname{cast}\!\left(\operatorname{rmsnorm}(h) \cdot \frac{1}{\mathrm{scale}}\right)

    Args:
        out: [..., H], float8_e4m3fn or float8_e5m2; written.
        input: [..., H], fp32, fp16 or bf16; not written.
        residual: of the same shape, fp32, fp16 or bf16; overwritten with the sum, rounded once.
        weight: [H], fp32, fp16 or bf16; None for no weight.
        scale: as in `rmsnorm_quant`.
        eps: added to the mean square, in fp32; finite and >= 0.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: as in `fused_add_rmsnorm`; in "hf-llama" what is quantised is the norm in the input's dtype.

    Raises:
        As `rmsnorm_quant`; nothing is written then.
    """
    FUSED_ADD_RMSNORM_QUANT.checked(input, residual, weight, out, scale, eps, numerics, enable_pdl)


@GEMMA_FUSED_ADD_RMSNORM_QUANT.warm()
def gemma_fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
) -> None:
    r"""`fused_add_rmsnorm_quant` with the gain of Gemma's checkpoints, :math:`w + 1`, added in fp32.

    Arguments, effects and errors are those of `fused_add_rmsnorm_quant`.
    """
    GEMMA_FUSED_ADD_RMSNORM_QUANT.checked(input, residual, weight, out, scale, eps, numerics, enable_pdl)
