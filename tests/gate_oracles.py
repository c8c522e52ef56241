"""What operators with gates must give, by their formulas in fp64: written from the contract alone, like `oracles`."""

from __future__ import annotations

import torch

from tests.oracles import Expected, round_to

F64 = torch.Tensor


def _wide(tensor: torch.Tensor) -> F64:
    return tensor.detach().cpu().double()


def _fp32(values: F64) -> F64:
    """Rounded to fp32, in fp64."""
    return round_to(values, torch.float32).double()


def _number(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def act(v: F64, name: str) -> F64:
    sigmoid = 1 / (1 + torch.exp(-v))
    return v * sigmoid if name == "silu" else sigmoid


def _rstd(h: F64, eps: float) -> tuple[F64, F64, torch.Tensor]:
    """(h * rstd, rstd, rows whose mean square is a normal fp32 number)."""
    square = h.square().mean(-1)
    rstd = 1 / torch.sqrt(square + _number(eps))
    judged = (square >= 2.0**-126) & (square <= float.fromhex("0x1.fffffep+127"))
    return h * rstd.unsqueeze(-1), rstd, judged


def _expected(
    y: F64, dtype: torch.dtype, rstd: F64, judged: torch.Tensor, *operands: F64, stored: torch.Tensor | None = None
) -> Expected:
    largest = torch.stack([o.abs().expand(y.shape).amax(-1) for o in operands]).amax(0) if operands else None
    return Expected(y, round_to(y, dtype), stored, rstd, judged, largest)


def dit(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    *,
    gate: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    gamma: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    scale_bias: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    shift_bias: torch.Tensor | None = None,
    factor: float = 1.0,
    eps: float = 1e-6,
    numerics: str = "flashinfer",
) -> Expected:
    """layernorm(x (g + b) s + r) * slope + shift; `residual` of the answer is the stored sum.

    Args:
        x, residual: [B, R, H].
        gate, scale, shift: broadcast to that.
        gate_bias, gamma, beta, scale_bias, shift_bias: [H].
        factor: s.
        eps, numerics: of the call.
    """
    times = torch.tensor(_number(factor), dtype=torch.float64)
    if gate is not None:
        g = _wide(gate) if gate_bias is None else _fp32(_wide(gate) + _wide(gate_bias))
        times = _fp32(g * times)
    h = _fp32(_wide(x) * times + (0 if residual is None else _wide(residual)))
    stored = round_to(h, x.dtype if residual is None else residual.dtype)
    h = h if numerics == "flashinfer" else stored.double()
    n, rstd, judged = _rstd(h - h.mean(-1, keepdim=True), eps)
    if gamma is not None and beta is not None:
        slope, offset = _wide(gamma), _wide(beta)
    else:
        assert scale is not None and shift is not None
        slope = 1 + _wide(scale) + (0 if scale_bias is None else _wide(scale_bias))
        offset = _wide(shift) + (0 if shift_bias is None else _wide(shift_bias))
    return _expected(n * slope + offset, x.dtype, rstd, judged, n * slope, offset, stored=stored)


def mix(
    branch: torch.Tensor,
    residual: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    alpha: torch.Tensor | float,
    beta: torch.Tensor,
    eps: float,
    center: float,
) -> Expected:
    """alpha * residual + beta * rmsnorm(v)."""
    v = _wide(branch)
    if weight is not None:
        v = _fp32(v * _fp32(_wide(weight) + _number(center)))
    n, rstd, judged = _rstd(v, eps)
    new = _wide(beta) * n
    kept = (_wide(alpha) if isinstance(alpha, torch.Tensor) else _number(alpha)) * _wide(residual)
    return _expected(new + kept, residual.dtype, rstd, judged, new, kept)


def following(stored: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, eps: float, center: float) -> Expected:
    """The norm of a sum as it is stored."""
    n, rstd, judged = _rstd(_wide(stored), eps)
    return _expected(n * (_wide(weight) + _number(center)), dtype, rstd, judged)


def gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    eps: float,
    group: int | None,
    activation: str,
    before: bool,
) -> Expected:
    """`gated_norm`, of any dtypes; rows are judged whole."""
    wide = _wide(x), _wide(gate), None if weight is None else _wide(weight)
    y, rstd, judged = gated_norm(*wide, eps=eps, group=group, activation=activation, before=before)
    return _expected(y, x.dtype, rstd[..., 0], judged.all(-1))


def gated_norm(
    x: F64, gate: F64, weight: F64 | None, *, eps: float, group: int | None, activation: str, before: bool
) -> tuple[F64, F64, torch.Tensor]:
    """rmsnorm(x) * w * act(gate), or rmsnorm(x * act(gate)) * w, over groups, with each group's `_rstd`.

    Autograd can follow it.
    """
    groups = (*x.shape[:-1], -1, group or x.shape[-1])
    h, a = x.reshape(groups), act(gate, activation).reshape(groups)
    n, rstd, judged = _rstd(h if before else h * a, eps)
    y = n if weight is None else n * weight.reshape(groups[-2:] if group else (1, -1))
    return (y * a if before else y).reshape(x.shape), rstd, judged
