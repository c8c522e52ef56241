"""Gated norms: a branch that is normalised and mixed into the residual stream, and a norm under an elementwise gate."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashnorm import reference
from flashnorm.core import device as devices
from flashnorm.core import gradients, plan
from flashnorm.core.checks import check_present
from flashnorm.core.op import NUMERICS, Op
from flashnorm.ops import programs
from flashnorm.ops.gate_gradient import Form, formula, record
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


@MIXED.warm()
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
    made: Tensor = MIXED.checked(*given, gain_center, eps, numerics, enable_pdl)
    return made


@MIXED_NEXT.warm()
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
    numbers = (post_gain_center, post_eps, next_eps, next_gain_center)
    pair: tuple[Tensor, Tensor] = MIXED_NEXT.checked(*given, *numbers, numerics, enable_pdl)
    return pair


# ------------------------------------------------------------------ a gate
def _gated(present: programs.Present, options: programs.Options, *, dst: str) -> RowProgram:
    act, before = options["activation"], options["norm_before_gate"] == "yes"
    gain = (Affine(),) if "weight" in present else ()
    return RowProgram(
        load=LoadRow() if before else LoadGated(act),
        stats=Rms(),
        maps=(*gain, Gate(act)) if before else gain,
        store=Cast(dst),
    )


_BEFORE: dict[Any, str] = {"yes": "yes", "no": "no", True: "yes", False: "no"}
_GATED: dict[str, Any] = {
    "options": {
        "numerics": NUMERICS,
        "activation": {"sigmoid": "sigmoid", "silu": "silu"},
        "norm_before_gate": _BEFORE,
    },
    "optional": ("weight",),
    "broadcast_vecs": True,
}
GATED_NEW = Op(
    "rmsnorm_gate",
    program=functools.partial(_gated, dst="out"),
    reference=reference.rmsnorm_gate,
    public=False,
    **_GATED,
)
GATED = Op(
    "rmsnorm_sigmoid_gate",
    program=functools.partial(_gated, dst="x"),
    reference=reference.rmsnorm_sigmoid_gate,
    returns=(),
    functional=GATED_NEW,
    **_GATED,
)


_GROUPS, _GROUPS_NEW = GATED.behind(), GATED_NEW.behind()


@GATED.warm(unless=("group_size",))
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
    given = _grouped(GATED, input, gate, weight, group_size)
    call = GATED.checked if group_size is None else _GROUPS  # of groups, this one is warm
    call(*given, eps, numerics, activation, norm_before_gate, enable_pdl)


@GATED_NEW.warm(unless=("group_size",))
def rmsnorm_gate(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    *,
    group_size: int | None = None,
    activation: str = "sigmoid",
    norm_before_gate: bool = True,
    enable_pdl: bool | None = None,
    numerics: str = "flashinfer",
) -> torch.Tensor:
    r"""`rmsnorm_sigmoid_gate` into a new tensor; differentiable.

    .. math::
        y = \operatorname{rmsnorm}(x) \cdot w \cdot \operatorname{act}(g), \quad\text{or}\quad
        y = \operatorname{rmsnorm}(x \cdot \operatorname{act}(g)) \cdot w

    Args:
        input: x, [..., H], fp32, fp16 or bf16; any strides.
        out: [..., H] of the input's dtype, or the input itself; written in place of a new tensor.
        gate, weight, eps, group_size, activation, norm_before_gate, enable_pdl, numerics: as in
            `rmsnorm_sigmoid_gate`.

    Returns:
        out. Where an input requires a gradient it is recorded, with the same bits: saved are the input, the gate and
        the weight. With `out` such a call raises. A compiler is handed the formula, with PyTorch's exponential.

    Raises:
        As `rmsnorm_sigmoid_gate`.
    """
    given, new = _grouped(GATED_NEW, input, gate, weight, group_size), out
    if out is None and gradients.wanted(input, gate, weight):
        options = (eps, numerics, activation, norm_before_gate, enable_pdl)
        form = Form(eps, activation, norm_before_gate in (True, "yes"), enable_pdl)
        if gradients.watched():
            GATED_NEW._validate([*given, None, *options])  # here, since fakes see shapes alone
            y = formula(form, *given)
        else:
            y = record(form, lambda *tensors: GATED_NEW.checked(*tensors, None, *options), *given)
        return y if group_size is None else y.flatten(-2)
    if group_size is not None and isinstance(out, torch.Tensor) and out.shape == input.shape:
        new = out.unflatten(-1, (-1, group_size))  # with another shape, it is refused
    call = GATED_NEW.checked if group_size is None else _GROUPS_NEW
    made: Tensor = call(*given, new, eps, numerics, activation, norm_before_gate, enable_pdl)
    if group_size is None:
        return made
    return made.flatten(-2) if out is None else out


def _grouped(op: Op, input: Any, gate: Any, weight: Any, group_size: Any) -> tuple[Any, Any, Any]:
    """(input, weight, gate), as rows of groups over the same memory where groups are normalised by themselves."""
    if isinstance(weight, torch.Tensor) and isinstance(input, torch.Tensor) and weight.shape != input.shape[-1:]:
        raise ValueError(f"{op.called}: weight must have shape {tuple(input.shape[-1:])}, got {tuple(weight.shape)}")
    if group_size is None:
        return input, weight, gate
    check_present(op, [{"x": input, "weight": weight, "gate": gate}.get(o.name) for o in op.operands])
    hidden = input.shape[-1]
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1 or hidden % group_size:
        raise ValueError(
            f"{op.called}: group_size must be a positive divisor of the last dimension, {hidden}, got {group_size!r}"
        )
    if gate.shape != input.shape:
        raise ValueError(f"{op.called}: gate must have shape {tuple(input.shape)}, got {tuple(gate.shape)}")
    shape = (hidden // group_size, group_size)
    return (
        input.unflatten(-1, shape),
        None if weight is None else weight.unflatten(-1, shape),
        gate.unflatten(-1, shape),
    )


# ------------------------------------------------------------------ probes
def supports_gated_residual_rmsnorm(branch: Any, residual: Any, weight: Any, alpha: Any, beta: Any) -> bool:
    """Whether `gated_residual_rmsnorm` takes these arguments and has a route for them. Never raises."""
    return _takes(MIXED, x=branch, gain=weight, alpha=alpha, beta=beta, residual=residual)


def supports_gated_residual_next_rmsnorm(
    branch: Any, residual: Any, next_weight: Any, alpha: Any, beta: Any, *, post_weight: Any = None
) -> bool:
    """Whether `gated_residual_next_rmsnorm` takes these arguments and has a route for them. Never raises."""
    given = {"x": branch, "gain": post_weight, "alpha": alpha, "beta": beta, "residual": residual}
    return _takes(MIXED_NEXT, **given, next_weight=next_weight)


def supports_rmsnorm_sigmoid_gate(dtype: Any, head_dim: Any, device: Any = None) -> bool:
    """Whether `rmsnorm_sigmoid_gate` takes rows of a dtype and a width, on a device. Never raises.

    Args:
        dtype: of the input and the gate.
        head_dim: H.
        device: None for the current CUDA device, or the CPU where there is none.
    """
    try:
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
        one = torch.empty(0, head_dim, dtype=dtype)  # CUDA is not asked for memory
        return _takes(GATED, where, x=one, gate=one)
    except Exception:  # whatever it is that no tensor can be made of
        return False


def _takes(op: Op, where: torch.device | None = None, **given: Any) -> bool:
    try:
        op.accepts(*(given.get(operand.name) for operand in op.operands))
        there = where is None or devices.present(where)
        return there and plan.explain(op, devices.facts(where or given["x"].device)).route is not None
    except Exception:  # the answer is no
        return False
