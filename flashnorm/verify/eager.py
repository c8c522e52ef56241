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
from flashnorm.program import Affine, BlockScales, MeanVar, QuantBlocks, QuantNvfp4, QuantTensor, Silu
from flashnorm.verify.cases import USUAL, Case, options_of
from flashnorm.verify.problem import NUMBERS, Problem, make_problem

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
_E2M1 = 6.0
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
    store = problem.program.store
    options |= _LAYOUTS.get(store.layout, {}) if isinstance(store, BlockScales) else {}
    return lambda: function(**arguments, **options), lambda: _eager(problem, given)


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
    if isinstance(program.stats, MeanVar):
        y = F.layer_norm(h, shape, weight, bias, eps)
    else:
        y = F.rms_norm(h, shape, weight, eps)
    store = program.store
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
