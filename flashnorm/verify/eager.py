"""The public function beside the same work in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashnorm
from flashnorm import timing
from flashnorm.core.dispatch import backend
from flashnorm.core.op import Op
from flashnorm.program import (
    Affine,
    BlockScales,
    Gate,
    GateResidual,
    LoadGained,
    LoadGated,
    MeanVar,
    MixResidual,
    NextNorm,
    QuantBlocks,
    QuantNvfp4,
    QuantTensor,
    ScaleShift,
    Silu,
)
from flashnorm.verify.cases import USUAL, Case, options_of
from flashnorm.verify.problem import NUMBERS, Problem, make_problem

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
_E2M1 = 6.0
_GATES = (GateResidual, LoadGained, LoadGated, Gate, ScaleShift, MixResidual)
_ALWAYS_NEW = ("add_rmsnorm", "add_layernorm")  # whose results no caller hands over
_LAYOUTS = {"swizzled": {"is_sf_swizzled_layout": True}, "both": {"output_both_sf_layouts": True}}


def rivals(
    op: Op, case: Case, device: torch.device, rows: int, hidden: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A call of the operator, on whichever route is forced then, and the same work in eager PyTorch."""
    problem = make_problem(op, case, rows, hidden, device)
    given = {name: t.to(device) for name, t in problem.given.items()}
    # The public function: a user's call goes through it, and is warm from the second time on.
    function = getattr(flashnorm, op.called)
    numbers = {name: number for name, number in problem.numbers.items() if number is not None}
    arguments = {op.label(o): {**given, **numbers}[o.name] for o in op.operands if o.name in {**given, **numbers}}
    options = options_of(op, case)
    options |= {op.labels.get(s, s): NUMBERS[s] for s in problem.program.scalars() if s in ("center", "next_center")}
    store = problem.program.store
    if isinstance(problem.program.load, GateResidual):
        return lambda: function(**_batched(op, problem, arguments), **options), lambda: _eager(problem, given)
    options |= _LAYOUTS.get(store.layout, {}) if isinstance(store, BlockScales) else {}
    if op.name in _ALWAYS_NEW:
        arguments = {name: value for name, value in arguments.items() if name not in ("h", "out")}
    return lambda: function(**arguments, **options), lambda: _eager(problem, given)


def _batched(op: Op, problem: Problem, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as one batch of rows, codes in int32."""
    operands, store = {op.label(o): o for o in op.operands}, problem.program.store
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        kind = operands[name].kind
        if isinstance(store, BlockScales) and kind == "swizzled":
            found[name] = value.view(torch.uint8).view(1, -1, store.columns(problem.hidden, kind) // 4, 32, 4, 4)
        else:
            found[name] = value.unsqueeze(0) if kind in ("row", "pairs") else value
    if isinstance(store, BlockScales):
        found["norm_out"] = found["norm_out"].view(torch.int32)
        found["use_nvfp4" if isinstance(store, QuantNvfp4) else "use_mxfp8"] = True
    return found


def _eager(problem: Problem, given: dict[str, Tensor]) -> Any:
    """What a user would write."""
    program, x = problem.program, given["x"]
    if "row_index" in given:
        x = x[given["row_index"]]
    if "input_scale" in given:
        scale = given["input_scale"]
        scale = scale[given["row_index"]] if "row_index" in given else scale
        x = (x.float() * scale[:, None]).to(problem.case.x)
    h = x + given["residual"] if "residual" in given else x
    weight, bias = given.get("weight"), given.get("bias")
    offset = sum(stage.offset for stage in program.maps if isinstance(stage, Affine))
    weight = weight + offset if weight is not None and offset else weight
    shape, eps = (problem.hidden,), NUMBERS["eps"]
    store = program.store
    if any(isinstance(stage, _GATES) for stage in program.stages()):
        y = _gated(problem, given)
        if isinstance(store, NextNorm):
            weight = given["next_weight"].float() + NUMBERS["next_center"]
            return F.rms_norm(y.float(), shape, weight, NUMBERS["next_eps"]).to(x.dtype), y
    elif isinstance(program.stats, MeanVar):
        y = F.layer_norm(h, shape, weight, bias, eps)
    else:
        y = F.rms_norm(h, shape, weight, eps)
    if any(isinstance(stage, Silu) for stage in program.maps):
        y = F.silu(y)
    if isinstance(store, QuantNvfp4):
        parts, gain = y.float().unflatten(-1, (-1, store.block)), problem.scalars().get("global_scale_value", 1.0)
        scale = _codes(parts.abs().amax(-1, keepdim=True) * (gain / _E2M1), torch.float8_e4m3fn)
        return _pairs((parts * gain / scale.float()).nan_to_num().flatten(-2)), scale
    if isinstance(store, QuantBlocks) and store.ue8m0 and store.whole:
        parts, largest = y.float().unflatten(-1, (-1, store.block)), _E2M1 if store.fp4 else 448.0
        power = torch.log2(parts.abs().amax(-1, keepdim=True) / largest).ceil()
        values = (parts / torch.exp2(power)).nan_to_num().flatten(-2)
        return _pairs(values) if store.fp4 else _codes(values, given["out"].dtype), power
    if isinstance(store, QuantTensor):
        return _codes(y.float() / problem.scalars()["scale_value"], given["out"].dtype)
    if isinstance(store, QuantBlocks):
        block = store.block or problem.hidden
        parts = F.pad(y.float(), (0, -problem.hidden % block)).unflatten(-1, (-1, block))
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=store.floor) / _LARGEST[given["out"].dtype]
        return _codes(parts / scale, given["out"].dtype), scale
    return y


def _gated(problem: Problem, given: dict[str, Tensor]) -> Tensor:
    """A row under gates, before its codes or its second norm: in fp32, rounded where it is stored."""
    program, kind, shape = problem.program, given["x"].dtype, (problem.hidden,)
    v = {name: t.float() for name, t in given.items() if t.is_floating_point() and t.element_size() > 1}
    numbers, load, x = problem.scalars(), program.load, v["x"]
    mixed = next((stage for stage in program.maps if isinstance(stage, MixResidual)), None)
    if isinstance(load, GateResidual):
        x = x * numbers["input_factor_value"] * (v["gate"] + v.get("gate_bias", 0.0) if load.gate else 1.0)
        x = (x + v["residual"] if load.residual else x).to(given["residual_out"].dtype).float()
    if isinstance(load, LoadGained):
        x = x * (v["gain"] + numbers["center"])
    if isinstance(load, LoadGated):
        x = x * _act(v["gate"], load.activation)
    if isinstance(program.stats, MeanVar):
        y = F.layer_norm(x, shape, v.get("weight"), v.get("bias"), NUMBERS["eps"])
    else:
        y = F.rms_norm(x, shape, v.get("weight"), NUMBERS["eps"])
    for stage in program.maps:
        if isinstance(stage, Gate):
            y = y * _act(v["gate"], stage.activation)
        if isinstance(stage, ScaleShift):
            y = y * (1 + v["mod_scale"] + v.get("mod_scale_bias", 0.0)) + v["shift"] + v.get("shift_bias", 0.0)
    if mixed is not None:
        kept = v["residual"] * (v["alpha"] if mixed.alpha == "vec" else numbers["alpha_value"])
        return (kept + v["beta"] * y).to(given["residual"].dtype)
    return y.to(kind)


def _act(gate: Tensor, name: str) -> Tensor:
    return F.silu(gate) if name == "silu" else torch.sigmoid(gate)


def _codes(values: Tensor, dtype: torch.dtype) -> Tensor:
    largest = _LARGEST[dtype]
    return values.clamp(-largest, largest).to(dtype)


def _pairs(values: Tensor) -> Tensor:
    """The nearest e2m1 codes, two a byte: PyTorch has no cast to them."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    code = torch.bucketize(values.abs(), middle).to(torch.uint8) | (values < 0).to(torch.uint8) << 3
    return (code[..., ::2] | code[..., 1::2] << 4).view(torch.float4_e2m1fn_x2)


def speed(op: Op, route: str, device: torch.device) -> float:
    """Time of eager PyTorch / time of the route, in the usual case, on one shape that fills the device a little."""
    ours, eager = rivals(op, USUAL, device, 4096 if device.type == "cuda" else 128, 4096)
    with backend(route), torch.no_grad():
        mine, theirs = timing.per_call((ours, eager), device, 0.01)
    return theirs / mine
