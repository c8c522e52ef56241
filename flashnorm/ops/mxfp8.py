"""RMSNorm in MXFP8: e4m3 with a power of two for every 32 elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashnorm import reference
from flashnorm.core.checks import check_flag
from flashnorm.core.op import Op
from flashnorm.ops import programs, scaled
from flashnorm.program import BlockScales, Layout, QuantBlocks

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
BLOCK = 32


def _store(present: programs.Present, options: programs.Options, placed: Layout) -> BlockScales:
    return QuantBlocks(BLOCK, 0.0, ue8m0=True, ocp=options["scale_rule"] == "ocp", layout=placed)


_FORMULAS: Mapping[str | None, Callable[..., None]] = {
    None: reference.rmsnorm_mxfp8_quant,
    "residual": reference.fused_add_rmsnorm_mxfp8_quant,
    "h": reference.add_rmsnorm_mxfp8_quant,
}


def _declare(called: str, placed: Layout, residual: str | None, functional: Op | None = None) -> Op:
    return scaled.declare(
        called,
        placed,
        residual,
        functional,
        store=_store,
        formulas=_FORMULAS,
        options={"scale_rule": scaled.SCALE_RULE},
        optional=("weight",),
        labels={"scale": "block_scale"},
    )


MXFP8, MXFP8_SWIZZLED = (_declare("rmsnorm_mxfp8_quant", placed, None) for placed in ("rows", "swizzled"))
ADD_MXFP8, ADD_MXFP8_SWIZZLED = (
    _declare("add_rmsnorm_mxfp8_quant", placed, "residual", _declare("add_rmsnorm_mxfp8_quant", placed, "h"))
    for placed in ("rows", "swizzled")
)


_ROWS, _SWIZZLED, _ADD_ROWS, _ADD_SWIZZLED = (
    op.behind() for op in (MXFP8, MXFP8_SWIZZLED, ADD_MXFP8, ADD_MXFP8_SWIZZLED)
)


@MXFP8.warm(only={"is_sf_swizzled_layout": False})
@MXFP8_SWIZZLED.warm(only={"is_sf_swizzled_layout": True})
def rmsnorm_mxfp8_quant(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    out: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    is_sf_swizzled_layout: bool = False,
    scale_rule: str = "up",
    enable_pdl: bool | None = None,
    numerics: str = "flashinfer",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""`rmsnorm` in MXFP8: e4m3 with a power of two for every 32 elements.

    .. math::
        s = 2^{\lceil \log_2 (a / 448) \rceil}, \quad q = \operatorname{e4m3}(y / s), \quad y \approx q\,s

    y is the norm in fp32, a the largest \|y\| of the block. Codes are nearest even and saturate. A block with a NaN has
    the scale byte 0xFF and codes 0x7F, a block of zeros codes of 0. (OCP Microscaling Formats 1.0, 2023, with the scale
    rounded up; `flashnorm.dequantize` is the inverse.)

    Args:
        input: [..., H], fp32, fp16 or bf16; any strides. H is a multiple of 32.
        weight: [H], fp32, fp16 or bf16; None for no weight.
        out: [..., H], float8_e4m3fn; written in place of a new tensor.
        block_scale: uint8 (or float8_e8m0fnu) exponents with a bias of 127, written in place of a new tensor:
            [..., H / 32]; swizzled: ceil(M/128) * ceil(H/128) * 512 contiguous bytes, in tiles of 128 rows and 4
            blocks, their padding zero.
        eps: added to the mean square, in fp32; finite and >= 0.
        is_sf_swizzled_layout: whether scales lie in the tiles that block-scaled matrix products read.
        scale_rule: "up" (rounded up, so that nothing saturates), or "ocp" (the specification's 2^(floor(log2 a) - 8),
            with which the largest elements may saturate).
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: as in `rmsnorm`; all modes round once, here.

    Returns:
        (out, block_scale).

    Raises:
        TypeError: for something that is no tensor, or an eps that is no number.
        ValueError: for a wrong dtype, shape, device, overlap or option, before anything is launched.
        RuntimeError: where no route serves the device, or a gradient would be lost.
    """
    op, call = (MXFP8_SWIZZLED, _SWIZZLED) if is_sf_swizzled_layout else (MXFP8, _ROWS)
    given = _outputs(op, input, out, block_scale, is_sf_swizzled_layout)
    pair: Pair = call(input, weight, *given, eps, numerics, scale_rule, enable_pdl)
    return pair


@ADD_MXFP8.warm(only={"is_sf_swizzled_layout": False})
@ADD_MXFP8_SWIZZLED.warm(only={"is_sf_swizzled_layout": True})
def add_rmsnorm_mxfp8_quant(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    out: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    is_sf_swizzled_layout: bool = False,
    scale_rule: str = "up",
    enable_pdl: bool | None = None,
    numerics: str = "flashinfer",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Adds into the residual stream, and normalises the sum into MXFP8: `rmsnorm_mxfp8_quant` of the sum.

    .. math::
        h = \mathrm{input} + \mathrm{residual}, \quad \mathrm{residual} \leftarrow h

    Args:
        input: [..., H], fp32, fp16 or bf16; not written. H is a multiple of 32.
        residual: of the same shape, fp32, fp16 or bf16, any strides; overwritten with the sum, rounded once.
        weight, out, block_scale, eps, is_sf_swizzled_layout, scale_rule, enable_pdl: as in `rmsnorm_mxfp8_quant`.
        numerics: as in `fused_add_rmsnorm`: whether the norm is of the sum as it is stored.

    Returns:
        (out, block_scale).

    Raises:
        As `rmsnorm_mxfp8_quant`; nothing is written then.
    """
    op, call = (ADD_MXFP8_SWIZZLED, _ADD_SWIZZLED) if is_sf_swizzled_layout else (ADD_MXFP8, _ADD_ROWS)
    given = _outputs(op, input, out, block_scale, is_sf_swizzled_layout)
    pair: Pair = call(input, residual, weight, *given, eps, numerics, scale_rule, enable_pdl)
    return pair


def _outputs(op: Op, input: Any, out: Any, block_scale: Any, swizzled: Any) -> tuple[Any, Any]:
    """The outputs, new where they were not given."""
    if swizzled is True and out is not None and block_scale is not None:
        return out, block_scale
    check_flag(op.called, "is_sf_swizzled_layout", swizzled)
    scaled.check_input(op, input, BLOCK)
    if out is None:
        out = torch.empty(input.shape, dtype=torch.float8_e4m3fn, device=input.device)
    if block_scale is None:
        block_scale = scaled.empty_scales(input, input.shape[-1] // BLOCK, swizzled, torch.uint8)
    return out, block_scale
