"""RMSNorm in four bits: NVFP4 and MXFP4."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashnorm import reference
from flashnorm.core.checks import check_dtype_of, check_flag, check_option
from flashnorm.core.op import Op
from flashnorm.ops import programs, scaled
from flashnorm.program import FP4, BlockScales, Layout, QuantBlocks, QuantNvfp4

Tensor = torch.Tensor
BLOCK_SIZE = {"16": "16", "32": "32", 16: "16", 32: "32"}
SCALE_FORMAT = {"auto": "auto", "e4m3": "e4m3", "ue8m0": "ue8m0", None: "auto"}
SCALE_DTYPES = {"e4m3": torch.float8_e4m3fn, "ue8m0": torch.uint8}
CODES = getattr(torch, FP4)


def _form(options: programs.Options) -> tuple[int, str]:
    """(block, format of its scale)."""
    block, form = int(options["block_size"]), options["scale_format"]
    return block, form if form != "auto" else "e4m3" if block == 16 else "ue8m0"


def _store(present: programs.Present, options: programs.Options, placed: Layout, *, residual: bool) -> BlockScales:
    block, form = _form(options)
    side = residual and "normed_out" in present
    if form == "e4m3":
        return QuantNvfp4(block, "device" if "global_scale" in present else "value", side, placed)
    return QuantBlocks(block, 0.0, ue8m0=True, side=side, ocp=options["scale_rule"] == "ocp", fp4=True, layout=placed)


_FORMULAS: Mapping[str | None, Callable[..., None]] = {
    None: reference.rmsnorm_fp4quant,
    "residual": reference.fused_add_rmsnorm_fp4quant,
    "h": reference.add_rmsnorm_fp4quant,
}


def _declare(called: str, placed: Layout, residual: str | None, functional: Op | None = None) -> Op:
    return scaled.declare(
        called,
        placed,
        residual,
        functional,
        store=functools.partial(_store, residual=residual is not None),
        formulas=_FORMULAS,
        options={"block_size": BLOCK_SIZE, "scale_format": SCALE_FORMAT, "scale_rule": scaled.SCALE_RULE},
        optional=("weight", "global_scale", "normed_out"),
        by_value={"global_scale": ("global_scale_value", 1.0)},
        labels={"out": "y_fp4", "scale": "block_scale", "scale_rows": "block_scale_unswizzled", "normed_out": "y_out"},
    )


FP4QUANT, FP4QUANT_SWIZZLED = (_declare("rmsnorm_fp4quant", placed, None) for placed in ("rows", "swizzled"))
ADD_FP4QUANT, ADD_FP4QUANT_SWIZZLED, ADD_FP4QUANT_BOTH = (
    _declare("add_rmsnorm_fp4quant", placed, "residual", _declare("add_rmsnorm_fp4quant", placed, "h"))
    for placed in ("rows", "swizzled", "both")
)


# ------------------------------------------------------------------ checks, and what is allocated
def _check(op: Op, given: Mapping[str, Any]) -> None:
    """What goes with what."""
    options = {name: check_option(op, name, given[name]) for name in ("block_size", "scale_format", "scale_rule")}
    block, form = _form(options)
    if form == "ue8m0" and block == 16:
        raise ValueError(f"{op.called}: scale_format 'ue8m0' needs block_size 32, got 16")
    if form == "ue8m0" and given["global_scale"] is not None:
        raise ValueError(f"{op.called}: global_scale goes with scale_format 'e4m3', not with 'ue8m0'")
    if form == "e4m3" and options["scale_rule"] != "up":
        raise ValueError(f"{op.called}: scale_rule goes with scale_format 'ue8m0', not with 'e4m3'")
    if "normed_out" in given:
        check_dtype_of(op, "y_out", given["normed_out"], given["x"])


def _outputs(
    op: Op, input: Any, y_fp4: Any, block_scale: Any, swizzled: bool, block_size: Any, scale_format: Any
) -> tuple[Any, Any]:
    """The outputs, new where they were not given."""
    chosen = {"block_size": block_size, "scale_format": scale_format}
    block, form = _form({name: check_option(op, name, value) for name, value in chosen.items()})
    scaled.check_input(op, input, block)
    if y_fp4 is None:
        shape = (*input.shape[:-1], input.shape[-1] // 2)
        y_fp4 = torch.empty(shape, dtype=torch.uint8, device=input.device).view(CODES)
    if block_scale is None:
        block_scale = scaled.empty_scales(input, input.shape[-1] // block, swizzled, SCALE_DTYPES[form])
    return y_fp4, block_scale


_ROWS, _SWIZZLED, _ADD_ROWS, _ADD_SWIZZLED, _ADD_BOTH = (
    op.behind(_check) for op in (FP4QUANT, FP4QUANT_SWIZZLED, ADD_FP4QUANT, ADD_FP4QUANT_SWIZZLED, ADD_FP4QUANT_BOTH)
)


_PLACED: dict[Layout, dict[str, bool]] = {
    placed: {"is_sf_swizzled_layout": placed == "swizzled", "output_both_sf_layouts": placed == "both"}
    for placed in ("rows", "swizzled", "both")
}


# ------------------------------------------------------------------ the public functions
@FP4QUANT.warm(only={"is_sf_swizzled_layout": False})
@FP4QUANT_SWIZZLED.warm(only={"is_sf_swizzled_layout": True})
def rmsnorm_fp4quant(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: float | torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
    *,
    scale_rule: str = "up",
    numerics: str = "flashinfer",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""`rmsnorm` in e2m1, with a scale for every 16 or 32 elements: NVFP4, MXFP4.

    With y the norm in fp32, a the largest \|y\| of a block and G the global scale,

    .. math::
        \text{e4m3:}\quad s = \operatorname{e4m3}\!\left(\min\!\left(G \cdot \frac{a}{6},\, 448\right)\right), \quad
        q = \operatorname{e2m1}\!\left(\frac{y\,G}{s}\right), \quad y \approx \frac{q\,s}{G}

    .. math::
        \text{ue8m0:}\quad s = 2^{\lceil \log_2 (a / 6) \rceil}, \quad q = \operatorname{e2m1}(y / s), \quad
        y \approx q\,s

    Elements are divided by the scale that is stored. Codes are nearest even and saturate. A block with a NaN has the
    scale NaN and codes 7; a block of zeros, or one whose stored e4m3 scale is 0, has codes of 0.
    (NVIDIA, "Introducing NVFP4", 2025; OCP Microscaling Formats 1.0, 2023. `flashnorm.dequantize` is the inverse.)

    Args:
        input: [..., H], fp32, fp16 or bf16; any strides. H is a multiple of `block_size`.
        weight: [H], fp32, fp16 or bf16; None for no weight.
        y_fp4: [..., H/2], float4_e2m1fn_x2 or uint8: two codes a byte, the even column in the low half; written in
            place of a new tensor.
        block_scale: written in place of a new tensor; float8_e4m3fn (or uint8) for "e4m3", uint8 (or float8_e8m0fnu)
            for "ue8m0". [..., H / block_size]; swizzled: ceil(M/128) * ceil(H / block_size / 4) * 512 contiguous
            bytes, in tiles of 128 rows and 4 blocks, their padding zero.
        global_scale: G, with "e4m3" only; a number or a CPU tensor of one element (by value, finite and > 0), or a 0-d
            or (1,) tensor on the device; None for 1. It multiplies the scales: 448 * 6 / amax(y) uses all of their
            range.
        eps: added to the mean square, in fp32; finite and >= 0.
        block_size: 16 or 32 elements.
        scale_format: "e4m3" or "ue8m0" (block_size 32 only); None for what goes with the block size.
        is_sf_swizzled_layout: whether scales lie in the tiles that block-scaled matrix products read.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        scale_rule: of "ue8m0": "up" (rounded up, so that nothing saturates), or "ocp" (the specification's
            2^(floor(log2 a) - 2), with which the largest elements may saturate).
        numerics: as in `rmsnorm`; all modes round once, here.

    Returns:
        (y_fp4, block_scale).

    Raises:
        TypeError: for something that is no tensor, or an eps or global_scale that is no number.
        ValueError: for a wrong dtype, shape, device, overlap or option, before anything is launched.
        RuntimeError: where no route serves the device, or a gradient would be lost.
    """
    op, call = (FP4QUANT_SWIZZLED, _SWIZZLED) if is_sf_swizzled_layout else (FP4QUANT, _ROWS)
    if y_fp4 is None or block_scale is None or is_sf_swizzled_layout is not True:
        check_flag(op.called, "is_sf_swizzled_layout", is_sf_swizzled_layout)
        given = (input, y_fp4, block_scale, is_sf_swizzled_layout, block_size, scale_format)
        y_fp4, block_scale = _outputs(op, *given)
    options = (numerics, block_size, scale_format, scale_rule)
    pair: tuple[Tensor, Tensor] = call(input, weight, y_fp4, block_scale, global_scale, eps, *options, enable_pdl)
    return pair


@ADD_FP4QUANT.warm(only=_PLACED["rows"], unless=("block_scale_unswizzled",))
@ADD_FP4QUANT_SWIZZLED.warm(only=_PLACED["swizzled"], unless=("block_scale_unswizzled",))
@ADD_FP4QUANT_BOTH.warm(only=_PLACED["both"])
def add_rmsnorm_fp4quant(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: float | torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    output_both_sf_layouts: bool = False,
    block_scale_unswizzled: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    y_out: torch.Tensor | None = None,
    *,
    scale_rule: str = "up",
    numerics: str = "flashinfer",
) -> tuple[torch.Tensor, ...]:
    r"""Adds into the residual stream, and normalises the sum into e2m1: `rmsnorm_fp4quant` of `input + residual`.

    .. math::
        h = \mathrm{input} + \mathrm{residual}, \quad \mathrm{residual} \leftarrow h, \quad
        \mathrm{y\_out} = \operatorname{rmsnorm}(h)

    Args:
        input: [..., H], fp32, fp16 or bf16; not written. H is a multiple of `block_size`.
        residual: of the same shape, fp32, fp16 or bf16, any strides; overwritten with the sum, rounded once.
        weight, y_fp4, block_scale, global_scale, eps, block_size, scale_format, is_sf_swizzled_layout, enable_pdl,
            scale_rule: as in `rmsnorm_fp4quant`.
        output_both_sf_layouts: scales are written in both layouts: swizzled to `block_scale`, and by rows to
            `block_scale_unswizzled`.
        block_scale_unswizzled: [..., H / block_size], then written in place of a new tensor.
        y_out: [..., H], the input's dtype: also written, with the norm, rounded once. No other byte depends on it.
        numerics: as in `fused_add_rmsnorm`: whether the norm is of the sum as it is stored.

    Returns:
        (y_fp4, block_scale), or with both layouts (y_fp4, block_scale, block_scale_unswizzled).

    Raises:
        As `rmsnorm_fp4quant`; nothing is written then.
    """
    check_flag(ADD_FP4QUANT.called, "is_sf_swizzled_layout", is_sf_swizzled_layout)
    check_flag(ADD_FP4QUANT.called, "output_both_sf_layouts", output_both_sf_layouts)
    swizzled = is_sf_swizzled_layout or output_both_sf_layouts
    op = ADD_FP4QUANT_BOTH if output_both_sf_layouts else ADD_FP4QUANT_SWIZZLED if swizzled else ADD_FP4QUANT
    y_fp4, block_scale = _outputs(op, input, y_fp4, block_scale, swizzled, block_size, scale_format)
    scales: tuple[Tensor, ...] = (block_scale,)
    if output_both_sf_layouts:
        scales += _outputs(op, input, y_fp4, block_scale_unswizzled, False, block_size, scale_format)[1:]
    elif block_scale_unswizzled is not None:
        raise ValueError(f"{op.called}: block_scale_unswizzled needs output_both_sf_layouts=True")
    call = _ADD_BOTH if output_both_sf_layouts else _ADD_SWIZZLED if swizzled else _ADD_ROWS
    options = (numerics, block_size, scale_format, scale_rule)
    more = (global_scale, y_out, eps, *options, enable_pdl)
    made: tuple[Tensor, ...] = call(input, residual, weight, y_fp4, *scales, *more)
    return made
