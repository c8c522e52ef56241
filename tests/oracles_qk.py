"""What Q, K and V must become, from the formula in fp64; written apart from `canonical` and from the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tests.oracles import round_to


@dataclass(frozen=True)
class Turned:
    """Q or K by the formula.

    Attributes:
        out: [tokens, heads, head_dim] in fp64, rounded at the inner place alone.
        operand: the largest magnitude of what is subtracted, [tokens, heads].
        unsure: how far an element may be off because fp32 cannot tell which way the norm of its pair is rounded.
    """

    out: torch.Tensor
    operand: torch.Tensor
    unsure: torch.Tensor


NEAR_TIE = 1e-6  # relative: the accuracy of a norm in fp32


def as_fp32(value: float) -> float:
    """A number as it goes with a launch."""
    return float(torch.tensor(value, dtype=torch.float32))


def yarn_frequencies(count: int, base: float, factor: float, low: float, high: float) -> list[float]:
    """Pair j of an axis of `count` channels: base^(-2j/count), or that divided by the factor, or between."""
    frequencies = []
    for j in range(count // 2):
        plain = math.exp(-2 * j / count * math.log(base))
        if factor == 1.0:
            frequencies.append(plain)
            continue
        end = high if abs(high - low) > 1e-6 else high + 0.001
        share = (j - low) / (end - low)
        share = 0.0 if share < 0 else 1.0 if share > 1 else share
        frequencies.append(plain * (share / factor + 1 - share))
    return frequencies


def yarn_range(count: int, base: float, trained: int, fast: float = 32.0, slow: float = 1.0) -> tuple[float, float]:
    """The pairs that turn `fast` and `slow` times within `trained` tokens, rounded outwards."""

    def pair(rotations: float) -> float:
        return count * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    return float(max(math.floor(pair(fast)), 0)), float(min(math.ceil(pair(slow)), count - 1))


def grid_angles(tokens: int, grid: tuple[int, ...], per_axis: list[list[float]]) -> torch.Tensor:
    """[tokens, pairs]: frames, rows, columns, the last fastest."""
    out = []
    for token in range(tokens):
        place = token % math.prod(grid)
        column, rest = place % grid[2], place // grid[2]
        steps = (rest // grid[1], rest % grid[1], column)
        out.append([step * f for step, axis in zip(steps, per_axis, strict=True) for f in axis])
    return torch.tensor(out, dtype=torch.float64)


def turned(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    scope: str,
    interleave: bool,
    eps: float,
    attention: float,
    rounded: bool,
) -> Turned:
    """[tokens, heads, head_dim] normalised over its scope, weighted, and turned by [tokens, pairs]."""
    v = x.double()
    if scope != "none":
        dims = (-2, -1) if scope == "hidden" else (-1,)
        v = v / torch.sqrt(v.square().mean(dims, keepdim=True) + as_fp32(eps))
        v = v if weight is None else v * weight.double()
    attention = as_fp32(attention)
    unsure = torch.zeros_like(v)
    if scope != "none" and rounded:
        low, high = (round_to(v * (1 + side * NEAR_TIE), x.dtype).double() for side in (-1, 1))
        v, unsure = round_to(v, x.dtype).double(), (high - low).abs() * attention
    pairs = cos.shape[-1]
    out, off = v.clone(), unsure.clone()
    for p in range(pairs):
        low, high = (2 * p, 2 * p + 1) if interleave else (p, p + pairs)
        point = torch.complex(v[..., low], v[..., high])
        by = torch.complex(cos[:, p].double(), sin[:, p].double()).unsqueeze(-1)
        moved = point * by * attention
        out[..., low], out[..., high] = moved.real, moved.imag
        off[..., low] = off[..., high] = unsure[..., low] + unsure[..., high]
    return Turned(out, v.abs().amax(-1) * max(1.0, attention), off)
