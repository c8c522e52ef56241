"""Gated norms: a branch that is normalised and mixed into the residual stream, and a norm under an elementwise gate."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashnorm import reference
from flashnorm.core.op import NUMERICS, Op
from flashnorm.ops import programs
from flashnorm.program import (
    Affine,
    Cast,
    Gate,
    LoadGained,
    LoadGated,
    LoadRow,
    MixResidual,
    NextNorm,
    Rms,
    RowProgram,
)

Tensor = torch.Tensor


# ------------------------------------------------------------------ a branch and the residual stream
def _mixed(present: programs.Present, options: programs.Options, *, following: bool) -> RowProgram:
    return RowProgram(
        load=LoadGained() if "gain" in present else LoadRow(),
        stats=Rms(),
        maps=(MixResidual("vec" if "alpha" in present else "value"),),
        store=NextNorm() if following else Cast("out", like="residual"),
    )


_MIXED: dict[str, Any] = {
    "options": {"numerics": NUMERICS},
    "optional": ("gain", "alpha"),
    "by_value": {"alpha": ("alpha_value", None)},
}
MIXED = Op(
    "gated_residual_rmsnorm",
    program=functools.partial(_mixed, following=False),
    reference=reference.gated_residual_rmsnorm,
    labels={"x": "branch", "gain": "weight", "center": "gain_center"},
    **_MIXED,
)
MIXED_NEXT = Op(
    "gated_residual_next_rmsnorm",
    program=functools.partial(_mixed, following=True),
    reference=reference.gated_residual_next_rmsnorm,
    labels={
        "x": "branch",
        "gain": "post_weight",
        "center": "post_gain_center",
        "eps": "post_eps",
        "next_center": "next_gain_center",
    },
    **_MIXED,
)
_MIX, _MIX_NEXT = MIXED.behind(), MIXED_NEXT.behind()


def gated_residual_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    alpha: float | torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
    gain_center: float = 0.0,
    out: torch.Tensor | None = None,
    *,
    enable_pdl: bool | None = True,
    numerics: str = "flashinfer",
) -> torch.Tensor:
    r"""Normalises a branch and mixes it into the residual stream.

    .. math::
        v = \mathrm{branch} \cdot (w + c), \quad
        \mathrm{out} = \alpha \cdot \mathrm{residual} + \beta \cdot \frac{v}{\sqrt{\operatorname{mean}(v^2) + \epsilon}}

    The weight is part of what is normalised; everything in fp32, rounded once.

    Args:
        branch: [..., H], fp32, fp16 or bf16; any strides.
        residual: of the same shape, fp32, fp16 or bf16.
        weight: w, [H]; None: v is the branch.
        alpha: [H], or a number.
        beta: [H].
        eps: added to the mean square, in fp32; finite and >= 0.
        gain_center: c.
        out: [..., H] of the residual's dtype, or the residual itself; written in place of a new tensor.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: all modes are the same here.

    Returns:
        out.

    Raises:
        TypeError: for something that is no tensor, or a number that is none.
        ValueError: for a wrong dtype, shape, device, overlap or option, before anything is launched.
        RuntimeError: where no route serves the device, or a gradient would be lost.
    """
    given = (branch, weight, alpha, beta, residual, out)
    made: Tensor = _MIX(*given, eps=eps, center=gain_center, numerics=numerics, enable_pdl=enable_pdl)
    return made


def gated_residual_next_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    alpha: float | torch.Tensor,
    beta: torch.Tensor,
    post_eps: float = 1e-6,
    next_eps: float = 1e-6,
    next_gain_center: float = 0.0,
    residual_out: torch.Tensor | None = None,
    ffn_input: torch.Tensor | None = None,
    *,
    post_weight: torch.Tensor | None = None,
    post_gain_center: float = 0.0,
    enable_pdl: bool | None = True,
    numerics: str = "flashinfer",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""`gated_residual_rmsnorm`, and the norm of its result that the next layer reads, in one pass.

    .. math::
        r = \alpha \cdot \mathrm{residual} + \beta \cdot \operatorname{rmsnorm}(v), \quad
        \mathrm{ffn\_input} = \frac{r}{\sqrt{\operatorname{mean}(r^2) + \epsilon_{next}}} \cdot (w_{next} + c_{next})

    The second norm reads r as it is stored in `residual_out`.

    Args:
        branch: [..., H], fp32, fp16 or bf16; any strides. v is branch * (post_weight + post_gain_center).
        residual: of the same shape, fp32, fp16 or bf16.
        next_weight: [H].
        alpha: [H], or a number.
        beta: [H].
        post_eps, next_eps: added to the mean squares, in fp32; finite and >= 0.
        next_gain_center: added to `next_weight`.
        residual_out: [..., H] of the residual's dtype, or the residual itself; written in place of a new tensor.
        ffn_input: [..., H] of the branch's dtype; written in place of a new tensor.
        post_weight: [H]; None: v is the branch.
        post_gain_center: added to `post_weight`.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: all modes are the same here.

    Returns:
        (residual_out, ffn_input).

    Raises:
        As `gated_residual_rmsnorm`.
    """
    given = (branch, post_weight, alpha, beta, residual, residual_out, next_weight, ffn_input)
    numbers = {"eps": post_eps, "center": post_gain_center, "next_eps": next_eps, "next_center": next_gain_center}
    pair: tuple[Tensor, Tensor] = _MIX_NEXT(*given, **numbers, numerics=numerics, enable_pdl=enable_pdl)
    return pair


# ------------------------------------------------------------------ a gate
def _gated(present: programs.Present, options: programs.Options) -> RowProgram:
    act, before = options["activation"], options["norm_before_gate"] == "yes"
    gain = (Affine(),) if "weight" in present else ()
    return RowProgram(
        load=LoadRow() if before else LoadGated(act),
        stats=Rms(),
        maps=(*gain, Gate(act)) if before else gain,
        store=Cast("x"),
    )


GATED = Op(
    "rmsnorm_sigmoid_gate",
    program=_gated,
    reference=reference.rmsnorm_sigmoid_gate,
    options={
        "numerics": NUMERICS,
        "activation": {"sigmoid": "sigmoid", "silu": "silu"},
        "norm_before_gate": {"yes": "yes", "no": "no", True: "yes", False: "no"},
    },
    optional=("weight",),
    broadcast_vecs=True,
    returns=(),
)
_GATE = GATED.behind()


def rmsnorm_sigmoid_gate(
    input: torch.Tensor,
    gate: torch.Tensor,
    eps: float = 1e-5,
    *,
    enable_pdl: bool | None = True,
    weight: torch.Tensor | None = None,
    group_size: int | None = None,
    activation: str = "sigmoid",
    norm_before_gate: bool = True,
    numerics: str = "flashinfer",
) -> None:
    r"""RMSNorm under a gate, in place: of attention heads, of Mamba-2, of Qwen3-Next.

    .. math::
        x \leftarrow \operatorname{rmsnorm}(x) \cdot w \cdot \operatorname{act}(g), \quad\text{or}\quad
        x \leftarrow \operatorname{rmsnorm}(x \cdot \operatorname{act}(g)) \cdot w

    in fp32, rounded once; act is the sigmoid or SiLU.

    Args:
        input: x, [..., H], fp32, fp16 or bf16; any strides; overwritten.
        gate: g, of the same shape, any floating dtype.
        eps: added to the mean square, in fp32; finite and >= 0.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        weight: w, [H]; None for none.
        group_size: a divisor of H: every `group_size` elements of a row are normalised by themselves; None for H.
        activation: "sigmoid" or "silu".
        norm_before_gate: whether the norm is taken before the gate or after it.
        numerics: all modes are the same here.

    Raises:
        TypeError: for something that is no tensor, or an eps that is no number.
        ValueError: for a wrong dtype, shape, device, overlap or option, before anything is launched.
        RuntimeError: where no route serves the device, or a gradient would be lost.
    """
    if group_size is not None:
        input, gate, weight = _grouped(input, gate, weight, group_size)
    _GATE(input, weight, gate, eps, numerics, activation, norm_before_gate, enable_pdl)


def _grouped(input: Any, gate: Any, weight: Any, group_size: Any) -> tuple[Any, Any, Any]:
    """Rows of groups in place of rows, over the same memory."""
    called = GATED.called
    for name, tensor in (("input", input), ("gate", gate)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{called}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1 or input.dim() < 1:
        raise ValueError(f"{called}: group_size must be a positive divisor of H, got {group_size!r}")
    hidden = input.shape[-1]
    if hidden % group_size or gate.shape != input.shape:
        raise ValueError(
            f"{called}: group_size must divide the last dimension of input and gate, got {group_size!r} for "
            f"{tuple(input.shape)} and {tuple(gate.shape)}"
        )
    shape = (hidden // group_size, group_size)
    if isinstance(weight, torch.Tensor):
        if tuple(weight.shape) != (hidden,):
            raise ValueError(f"{called}: weight must have shape ({hidden},), got {tuple(weight.shape)}")
        weight = weight.unflatten(-1, shape)
    return input.unflatten(-1, shape), gate.unflatten(-1, shape), weight
