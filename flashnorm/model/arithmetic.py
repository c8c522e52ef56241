"""fp32 operations, each rounded once, and the sum of a row.

An operation on two fp32 values in fp64, rounded to fp32, is the correctly rounded fp32 operation: 53 bits are at
least 2 * 24 + 2, so that rounding twice is rounding once. It does not depend on how PyTorch vectorises fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashnorm.program import EXP2, EXP_FROM, EXP_TO, LOG2E


def add(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() + b.double()).float()


def sub(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() - b.double()).float()


def mul(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() * b.double()).float()


def div(a: Tensor | float, b: Tensor | float) -> Tensor:
    """At least one of them a tensor; a number is one that fp32 has."""
    a, b = (t.double() if isinstance(t, Tensor) else t for t in (a, b))
    quotient: Tensor = a / b  # type: ignore[assignment]
    return quotient.float()


def sqrt(a: Tensor) -> Tensor:
    return a.double().sqrt().float()


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The product is exact in fp64; the sum is rounded to odd there, so that rounding it to fp32 is rounding once."""
    p, q = a.double() * b.double(), c.double()
    s = p + q
    back = s - p
    lost = (p - (s - back)) + (q - back)  # what the fp64 sum lost, exactly
    even = (s.contiguous().view(torch.int64) & 1) == 0
    toward = torch.where(lost > 0, torch.inf, -torch.inf).double()
    return torch.where((lost != 0) & even & s.isfinite(), torch.nextafter(s, toward), s).float()


def exp(t: Tensor) -> Tensor:
    """e^t by the operations that `Silu` prescribes."""

    def number(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=t.device)

    # A NaN compares false, and stays.
    x = torch.where(t < EXP_FROM, EXP_FROM, t)
    magic = number(1.5 * 2.0**23)  # beside it, fp32 has no fractions: adding it rounds
    n = sub(fma(x, number(LOG2E[0]), magic), magic)
    f = fma(x, number(LOG2E[1]), fma(x, number(LOG2E[0]), -n))
    p = number(EXP2[-1]).expand_as(t)
    for factor in (*EXP2[-2::-1], 1.0):
        p = fma(p, f, number(factor))
    power = ((n.long().clamp(-1022, 1023) + 1023) << 52).view(torch.float64)
    return torch.where(t > EXP_TO, torch.inf, (p.double() * power).float())  # exact


def silu(y: Tensor) -> Tensor:
    """div(y, add(1, exp(-y)))."""
    return div(y, add(torch.ones_like(y), exp(-y)))


def activation(v: Tensor, name: str) -> Tensor:
    """sigmoid(v) = div(1, add(1, exp(-v))), or silu(v)."""
    return silu(v) if name == "silu" else div(1.0, add(torch.ones_like(v), exp(-v)))


def _halve(v: Tensor) -> Tensor:
    """Folds the last dimension, a power of two, onto its first element."""
    while v.shape[-1] > 1:
        half = v.shape[-1] // 2
        v = add(v[..., :half], v[..., half:])
    return v[..., 0]


def canonical_sum(a: Tensor, b: Tensor | None = None) -> Tensor:
    """sum(a * b), or sum(a), over the last dimension, [..., H] fp32 -> [...], in the one order all kernels follow.

    Groups of 8 elements; L = min(1024, groups rounded up to a power of two) lanes, lane l takes groups l, l + L, ...;
    the first product is rounded, each further one comes in by fma (values: the first itself, further ones by add);
    then the 8 positions, the lanes within blocks of 32, and the blocks are folded by halving.
    """
    hidden = a.shape[-1]
    groups = -(-hidden // 8)
    lanes = min(1024, 1 << (groups - 1).bit_length())
    rounds = -(-groups // lanes)
    lead = a.shape[:-1]

    def turns(t: Tensor) -> tuple[Tensor, ...]:
        return F.pad(t, (0, rounds * lanes * 8 - hidden)).view(*lead, rounds, lanes, 8).unbind(-3)

    if b is None:
        acc, *rest = turns(a)
        for term in rest:
            acc = add(acc, term)
    else:
        (p, q), *pairs = zip(turns(a), turns(b), strict=True)
        acc = mul(p, q)
        for p, q in pairs:
            acc = fma(p, q, acc)
    return _halve(_halve(_halve(acc).view(*lead, max(1, lanes // 32), min(32, lanes))))
