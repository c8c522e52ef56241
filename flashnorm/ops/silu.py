"""RMSNorm and SiLU in one pass, as decoders of video models chain them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flashnorm import reference
from flashnorm.core.op import NUMERICS, Op
from flashnorm.ops import programs, scaled
from flashnorm.program import FP4, FP8, Affine, Cast, QuantNvfp4, Rms, RowProgram, Silu, Stage

Tensor = torch.Tensor
BLOCK = 16
CODES = getattr(torch, FP4)
EIGHT_BITS = tuple(getattr(torch, name) for name in FP8)


def _declare(name: str, reference: Callable[..., None], store: Callable[[programs.Present], Stage], **more: Any) -> Op:
    def program(present: programs.Present, options: programs.Options) -> RowProgram:
        gain = (Affine(),) if "weight" in present else ()  # "hf-llama" rounds nothing here
        return RowProgram(programs.load(present, options), Rms(), (*gain, Silu()), store(present))

    return Op(
        name,
        program=program,
        reference=reference,
        options={"numerics": NUMERICS},
        called="fused_rmsnorm_silu",
        public=name == "fused_rmsnorm_silu",
        **more,
    )


SILU = _declare("fused_rmsnorm_silu", reference.fused_rmsnorm_silu, lambda _: Cast(), optional=("weight",))
SILU_QUANT = _declare(
    "fused_rmsnorm_silu_quant",
    reference.fused_rmsnorm_silu_quant,
    programs.quant_tensor,
    optional=("weight", "scale"),
    by_value={"scale": ("scale_value", 1.0)},
    returns=("out",),
)
SILU_FP4 = _declare(
    "fused_rmsnorm_silu_fp4",
    reference.fused_rmsnorm_silu_fp4,
    lambda _: QuantNvfp4(BLOCK),
    optional=("weight",),
    labels={"scale": "block_scale"},
    blocks=functools.partial(scaled.by_rows, "fused_rmsnorm_silu"),
    returns=("out", "scale"),
)


_QUANT, _FP4 = SILU_QUANT.behind(), SILU_FP4.behind()


@SILU.warm(unless=("block_scale", "scale"))
@SILU_QUANT.warm(unless=("block_scale",))
def fused_rmsnorm_silu(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    *,
    scale: float | torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    numerics: str = "flashinfer",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""SiLU of `rmsnorm`, in the input's dtype, in FP8 or in NVFP4, as `out` says.

    .. math::
        y = \operatorname{rmsnorm}(x), \quad z = \frac{y}{1 + e^{-y}}

    z in fp32, rounded once; FP8: :math:`\operatorname{cast}(z / \mathrm{scale})`, saturating; NVFP4: e2m1 codes with an
    e4m3 scale for every 16 elements, as in `rmsnorm_fp4quant` with a global scale of 1. Infinite y of negative sign
    gives NaN, as the formula does.

    Args:
        input: [..., H], fp32, fp16 or bf16; any strides.
        weight: [H], fp32, fp16 or bf16; None for no weight.
        eps: added to the mean square, in fp32; finite and >= 0.
        out: [..., H] of the input's dtype (may be `input` itself), float8_e4m3fn or float8_e5m2; or [..., H/2]
            float4_e2m1fn_x2 (or uint8), H a multiple of 16. Written in place of a new tensor of the input's dtype.
        block_scale: [..., H / 16], float8_e4m3fn (or uint8), for NVFP4 only; written in place of a new tensor.
        scale: for FP8 only, None for 1; a number or a CPU tensor of one element (by value, finite and > 0), or a 0-d
            or (1,) tensor on the device.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: as in `rmsnorm`; all modes round once, here.

    Returns:
        out; for NVFP4 (out, block_scale).

    Raises:
        TypeError: for something that is no tensor, or an eps or scale that is no number.
        ValueError: for a wrong dtype, shape, device, overlap or option, before anything is launched.
        RuntimeError: where no route serves the device, or a gradient would be lost.
    """
    kind = out.dtype if isinstance(out, torch.Tensor) else None
    if scale is not None and kind not in EIGHT_BITS:
        raise ValueError(f"fused_rmsnorm_silu: scale goes with an FP8 out, not with {kind or 'a new one'}")
    if kind in (CODES, torch.uint8):
        scaled.check_input(SILU_FP4, input, BLOCK)
        if block_scale is None:
            block_scale = scaled.empty_scales(input, input.shape[-1] // BLOCK, False, torch.float8_e4m3fn)
        pair: tuple[Tensor, Tensor] = _FP4(input, weight, out, block_scale, eps, numerics, enable_pdl)
        return pair
    if block_scale is not None:
        raise ValueError(f"fused_rmsnorm_silu: block_scale goes with an NVFP4 out, not with {kind or 'a new one'}")
    made: Tensor
    if kind in EIGHT_BITS:
        made = _QUANT(input, weight, out, scale, eps, numerics, enable_pdl)
    else:
        made = SILU.checked(input, weight, out, eps, numerics, enable_pdl)
    return made
