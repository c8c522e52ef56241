"""The LayerNorms of diffusion transformers: gate, residual, norm and modulation in one pass.

Three modes, each in the input's dtype, NVFP4 and MXFP8: an operator for each, behind three public functions.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch

from flashnorm import reference
from flashnorm.core import native
from flashnorm.core.checks import check_flag, check_whole_blocks
from flashnorm.core.op import NUMERICS, Op
from flashnorm.ops import modulation, programs
from flashnorm.program import (
    AffineBias,
    Cast,
    GateResidual,
    MeanVar,
    QuantBlocks,
    QuantNvfp4,
    Round,
    RowProgram,
    ScaleShift,
    Stage,
)

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])
Mode = Literal["gamma_beta", "gate_scale_shift", "scale_shift"]
Format = Literal["", "nvfp4", "mxfp8"]
CALLED: dict[Mode, str] = {
    "gamma_beta": "fused_dit_gate_residual_layernorm_gamma_beta",
    "gate_scale_shift": "fused_dit_gate_residual_layernorm_scale_shift",
    "scale_shift": "fused_dit_residual_layernorm_scale_shift",
}


def _store(form: Format, present: programs.Present) -> Stage:
    if form == "nvfp4":
        return QuantNvfp4(16, "device" if "global_scale" in present else "value", layout="swizzled")
    if form == "mxfp8":
        return QuantBlocks(32, 0.0, ue8m0=True, layout="swizzled")
    return Cast("out")


def _program(present: programs.Present, options: programs.Options, *, mode: Mode, form: Format) -> RowProgram:
    gate = mode != "scale_shift"
    load = GateResidual(
        gate=gate,
        gate_bias=gate and "gate_bias" in present,
        residual=gate or "residual" in present,
        rounded=options["numerics"] != "flashinfer",
        factor="device" if "input_factor" in present else "value",
    )
    scaled = ScaleShift("mod_scale_bias" in present, "shift_bias" in present)
    gain = AffineBias() if mode == "gamma_beta" else scaled
    # Codes are made of the rounded norm; where that is what is stored, the store rounds it.
    return RowProgram(load, MeanVar(), (gain, Round()) if form else (gain,), _store(form, present))


def _declare(mode: Mode, form: Format) -> Op:
    called = CALLED[mode]
    return Op(
        f"{called}_{form}" if form else called,
        program=functools.partial(_program, mode=mode, form=form),
        reference=functools.partial(getattr(reference, called), form=form),
        options={"numerics": NUMERICS},
        optional=("residual",) * (mode == "scale_shift") + (*modulation.BIASES, "input_factor", "global_scale"),
        routes=("cuda", "cpu", "torch"),
        broadcast_vecs=True,
        by_value={
            "input_factor": ("input_factor_value", 1.0),
            **({"global_scale": ("global_scale_value", None)} if form == "nvfp4" else {}),
        },
        labels={
            "weight": "gamma",
            "bias": "beta",
            "mod_scale": "scale",
            "mod_scale_bias": "scale_bias",
            "out": "norm_out",
            "scale": "sf_out",
            "input_factor": "input_global_scaling_factor",
            "global_scale": "global_scaling_factor",
            "eps": "epsilon",
        },
        returns=("residual_out", "out", *(("scale",) if form else ())),
        public=not form,
        called=called,
    )


FORMATS: tuple[Format, ...] = ("", "nvfp4", "mxfp8")
OPERATORS = {(mode, form): _declare(mode, form) for mode in CALLED for form in FORMATS}
CALLS = {key: op.behind() for key, op in OPERATORS.items()}


# ------------------------------------------------------------------ a call
def _run(
    mode: Mode,
    given: dict[str, Any],
    epsilon: float,
    numerics: str,
    enable_pdl: bool | None,
    *,
    use_nvfp4: bool,
    use_mxfp8: bool,
    return_scales: bool,
) -> tuple[Tensor, ...]:
    """One of the public functions, its tensors by operand."""
    op = OPERATORS[mode, ""]
    for name, flag in (("use_nvfp4", use_nvfp4), ("use_mxfp8", use_mxfp8), ("return_scales", return_scales)):
        check_flag(op.called, name, flag)
    if use_nvfp4 and use_mxfp8:
        raise ValueError(f"{op.called}: use_nvfp4 and use_mxfp8 exclude each other")
    form: Format = "nvfp4" if use_nvfp4 else "mxfp8" if use_mxfp8 else ""
    op, call = OPERATORS[mode, form], CALLS[mode, form]
    _check(op, form, given, return_scales)
    came = dict(given)
    for name in modulation.MODULATION:
        given[name] = modulation.over_rows(given.get(name), given["x"])
    if given["residual"] is None and given["residual_out"] is None:
        given["residual_out"] = torch.empty_like(given["x"], memory_format=torch.contiguous_format)
    rest = (epsilon, numerics, enable_pdl)
    if not form:
        made: tuple[Tensor, ...] = _call(op, call, came, given, rest)
        return made
    if given["scale"] is None and not return_scales and not torch.compiler.is_compiling():
        _say_lost(op.called)
    modulation.allocate_codes(op, form, given)
    parts = modulation.parts(op, given)
    for part in parts:
        part["out"] = part["out"].view(torch.uint8 if form == "nvfp4" else torch.float8_e4m3fn)
        _call(op, call, came if len(parts) == 1 else None, part, rest)
    made = (given["residual_out"], given["out"])
    return (*made, given["scale"]) if return_scales else made


def _call(op: Op, call: Callable[..., Any], came: Mapping[str, Any] | None, given: dict[str, Any], rest: Any) -> Any:
    """One call. Where it is all of the caller's, over the tensors that came, these are what warm calls look at."""
    args = (*(given.get(operand.name) for operand in op.operands), *rest)
    if came is not None and native.looks_through():
        theirs = {o.name: came.get(o.name) for o in op.operands if o.name not in op.by_value}
        if modulation.start_alike(theirs, given):
            return op.checked(*args, given=theirs)
    return call(*args)


def _check(op: Op, form: Format, given: Mapping[str, Any], return_scales: bool) -> None:
    """What goes with what, and the shapes that go with [B, R, H]; types and dtypes are looked at in the call."""
    x = given["x"]
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op.called}: input must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != 3:
        dimensions = "a 0-d tensor" if x.dim() == 0 else str(tuple(x.shape))
        raise ValueError(f"{op.called}: input must have shape [B, R, H], got {dimensions}")
    if form:
        check_whole_blocks(op, x.shape[-1], modulation.BLOCK[form])
    if form == "nvfp4" and given["global_scale"] is None:
        raise ValueError(f"{op.called}: global_scaling_factor is needed with use_nvfp4")
    if form != "nvfp4" and given["global_scale"] is not None:
        raise ValueError(f"{op.called}: global_scaling_factor goes with use_nvfp4")
    if not form and given["scale"] is not None:
        raise ValueError(f"{op.called}: sf_out goes with use_nvfp4 or use_mxfp8")
    if not form and return_scales:
        raise ValueError(f"{op.called}: return_scales goes with use_nvfp4 or use_mxfp8")
    modulation.check_shapes(op, given, codes=bool(form))


@functools.cache
def _say_lost(called: str) -> None:
    warnings.warn(f"{called}: the scales of these codes are lost; pass sf_out, or return_scales=True", stacklevel=5)


_PLAIN = {"use_nvfp4": False, "use_mxfp8": False}


def _warm(mode: Mode) -> Callable[[F], F]:
    """Warm calls of a public function: of its plain form, and in C++ of those in codes."""

    def decorate(function: F) -> F:
        for form in FORMATS[1:]:
            without = () if form == "nvfp4" else ("global_scaling_factor",)
            op, chosen = OPERATORS[mode, form], {**_PLAIN, f"use_{form}": True}
            for scales in (False, True):
                returns = op.returns if scales else op.returns[:-1]
                function = op.also_warm(unless=without, only={**chosen, "return_scales": scales}, returns=returns)(
                    function
                )
        plain = {**_PLAIN, "return_scales": False}
        return OPERATORS[mode, ""].warm(unless=("sf_out", "global_scaling_factor"), only=plain)(function)

    return decorate


# ------------------------------------------------------------------ the public functions
@_warm("gamma_beta")
def fused_dit_gate_residual_layernorm_gamma_beta(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: float | torch.Tensor | None = None,
    input_global_scaling_factor: float | torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    sf_out: torch.Tensor | None = None,
    return_scales: bool = False,
    enable_pdl: bool | None = None,
    numerics: str = "flashinfer",
) -> tuple[torch.Tensor, ...]:
    r"""Gate, residual addition and LayerNorm of a diffusion transformer's block.

    .. math::
        h = x\,(g + b_g)\,s + r, \quad n = \operatorname{layernorm}(h) \cdot \gamma + \beta

    h is one fused multiply-add, the variance LayerNorm's corrected two-pass, all in fp32; n is rounded to the input's
    dtype, and every output format starts from that. NVFP4 and MXFP8 as in `rmsnorm_fp4quant` and
    `rmsnorm_mxfp8_quant`. On CUDA tensors the CUDA route serves it.

    Args:
        input: x, [B, R, H], fp32, fp16 or bf16; any strides, not written.
        residual: r, of the same shape.
        gate: g, [H], [1, H], [B, H], [B, 1, H] or [B, R, H] (where B is 1 also [R, H]), any row stride: slices of
            `temb.chunk(6, dim=2)` are read in place.
        gamma, beta: [H].
        gate_bias: b_g, [H] or [1, H]; None for none.
        epsilon: added to the variance, in fp32; finite and >= 0.
        use_nvfp4, use_mxfp8: codes in place of n; H a multiple of 16 or 32.
        global_scaling_factor: NVFP4's G, a number, or one element on the device; needed there.
        input_global_scaling_factor: s, a number, or one element on the device; None for 1.
        residual_out: [B, R, H], written with h, rounded to the residual's dtype, in place of a new tensor.
        norm_out: [B, R, H] in the input's dtype, or codes: int32 [B, R, H/8] (NVFP4) or [B, R, H/4] (MXFP8).
        sf_out: uint8 [B, ceil(R/128), K, 32, 4, 4], K = ceil(H/64) (NVFP4) or ceil(H/128): scales in tiles, padding 0.
        return_scales: the scales are returned too. Codes whose scales nobody asked for are warned of once.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: "flashinfer" normalises the unrounded h, the other modes what is stored.

    Returns:
        (residual_out, norm_out), or (residual_out, norm_out, sf_out).

    Raises:
        TypeError: for something that is no tensor, or a factor or epsilon that is no number.
        ValueError: for a wrong dtype, shape, device, overlap or option, before anything is launched.
        RuntimeError: where no route serves the device, or a gradient would be lost.
    """
    given = {
        "x": input, "residual": residual, "gate": gate, "gate_bias": gate_bias, "weight": gamma, "bias": beta,
        "residual_out": residual_out, "out": norm_out, "scale": sf_out,
        "input_factor": input_global_scaling_factor, "global_scale": global_scaling_factor,
    }  # fmt: skip
    flags = {"use_nvfp4": use_nvfp4, "use_mxfp8": use_mxfp8, "return_scales": return_scales}
    return _run("gamma_beta", given, epsilon, numerics, enable_pdl, **flags)


@_warm("gate_scale_shift")
def fused_dit_gate_residual_layernorm_scale_shift(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate_bias: torch.Tensor | None = None,
    scale_bias: torch.Tensor | None = None,
    shift_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: float | torch.Tensor | None = None,
    input_global_scaling_factor: float | torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    sf_out: torch.Tensor | None = None,
    return_scales: bool = False,
    enable_pdl: bool | None = None,
    numerics: str = "flashinfer",
) -> tuple[torch.Tensor, ...]:
    r"""Gate, residual addition, LayerNorm without weights, and modulation.

    .. math::
        h = x\,(g + b_g)\,s + r, \quad n = \operatorname{layernorm}(h) \cdot (1 + c + b_c) + (t + b_t)

    Args:
        input, residual: x and r, [B, R, H], fp32, fp16 or bf16; any strides, not written.
        gate, scale, shift: g, c and t: [H], [1, H], [B, H], [B, 1, H] or [B, R, H], any row stride.
        gate_bias, scale_bias, shift_bias: b_g, b_c and b_t, [H] or [1, H]; None for none.
        Everything else: as in `fused_dit_gate_residual_layernorm_gamma_beta`.

    Returns:
        (residual_out, norm_out), or (residual_out, norm_out, sf_out).

    Raises:
        As `fused_dit_gate_residual_layernorm_gamma_beta`.
    """
    given = {
        "x": input, "residual": residual, "gate": gate, "gate_bias": gate_bias, "mod_scale": scale, "shift": shift,
        "mod_scale_bias": scale_bias, "shift_bias": shift_bias,
        "residual_out": residual_out, "out": norm_out, "scale": sf_out,
        "input_factor": input_global_scaling_factor, "global_scale": global_scaling_factor,
    }  # fmt: skip
    flags = {"use_nvfp4": use_nvfp4, "use_mxfp8": use_mxfp8, "return_scales": return_scales}
    return _run("gate_scale_shift", given, epsilon, numerics, enable_pdl, **flags)


@_warm("scale_shift")
def fused_dit_residual_layernorm_scale_shift(
    input: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    scale_bias: torch.Tensor | None = None,
    shift_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: float | torch.Tensor | None = None,
    input_global_scaling_factor: float | torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    sf_out: torch.Tensor | None = None,
    return_scales: bool = False,
    enable_pdl: bool | None = None,
    numerics: str = "flashinfer",
) -> tuple[torch.Tensor, ...]:
    r"""Residual addition (or none), LayerNorm without weights, and modulation.

    .. math::
        h = x\,s + r, \quad n = \operatorname{layernorm}(h) \cdot (1 + c + b_c) + (t + b_t)

    Args:
        input: x, [B, R, H], fp32, fp16 or bf16; any strides, not written.
        scale, shift: c and t: [H], [1, H], [B, H], [B, 1, H] or [B, R, H], any row stride.
        residual: r, of the input's shape; None for none.
        scale_bias, shift_bias: b_c and b_t, [H] or [1, H]; None for none.
        Everything else: as in `fused_dit_gate_residual_layernorm_gamma_beta`.

    Returns:
        (residual_out, norm_out), or (residual_out, norm_out, sf_out).

    Raises:
        As `fused_dit_gate_residual_layernorm_gamma_beta`.
    """
    given = {
        "x": input, "residual": residual, "mod_scale": scale, "shift": shift,
        "mod_scale_bias": scale_bias, "shift_bias": shift_bias,
        "residual_out": residual_out, "out": norm_out, "scale": sf_out,
        "input_factor": input_global_scaling_factor, "global_scale": global_scaling_factor,
    }  # fmt: skip
    flags = {"use_nvfp4": use_nvfp4, "use_mxfp8": use_mxfp8, "return_scales": return_scales}
    return _run("scale_shift", given, epsilon, numerics, enable_pdl, **flags)
