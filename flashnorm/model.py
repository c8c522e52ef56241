"""The model: what a program's kernels must write, bit for bit, and what it means in fp64, in plain PyTorch.

Two independent readers of a `RowProgram`, for `flashnorm verify`, the tests and the benchmarks. Neither shares
a line with a kernel or with `reference.py`. They are slow and take small inputs.

Formats and order of operations: every fp32 operation is rounded once, to nearest even; sums follow the one order
that all routes share (see `canonical_sum`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from flashnorm.program import AddResidual, Affine, Cast, LoadRow, Rms, RowProgram, SaveRstd

_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


# ------------------------------------------------------------------ fp32 operations, each rounded once
# An operation on two fp32 values in fp64, rounded to fp32, is the correctly rounded fp32 operation: 53 bits are at
# least 2 * 24 + 2, so that rounding twice is rounding once. It does not depend on how PyTorch vectorises fp32.
def _add(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() + b.double()).float()


def _mul(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() * b.double()).float()


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The product is exact in fp64; the sum is rounded to odd there, so that rounding it to fp32 is rounding once."""
    p, q = a.double() * b.double(), c.double()
    s = p + q
    back = s - p
    lost = (p - (s - back)) + (q - back)  # what the fp64 sum lost, exactly
    even = (s.contiguous().view(torch.int64) & 1) == 0
    toward = torch.where(lost > 0, torch.inf, -torch.inf).double()
    return torch.where((lost != 0) & even & s.isfinite(), torch.nextafter(s, toward), s).float()


def _halve(v: Tensor) -> Tensor:
    """Folds the last dimension, a power of two, onto its first element."""
    while v.shape[-1] > 1:
        half = v.shape[-1] // 2
        v = _add(v[..., :half], v[..., half:])
    return v[..., 0]


def canonical_sum(a: Tensor, b: Tensor) -> Tensor:
    """sum(a * b) over the last dimension, [..., H] fp32 -> [...], in the one order all kernels follow.

    Groups of 8 elements; L = min(1024, groups rounded up to a power of two) lanes, lane l takes groups l, l + L, ...;
    the first product is rounded, each further one comes in by fma; then the 8 positions, the lanes within blocks of
    32, and the blocks are folded by halving.
    """
    hidden = a.shape[-1]
    groups = -(-hidden // 8)
    lanes = min(1024, 1 << (groups - 1).bit_length())
    rounds = -(-groups // lanes)
    lead = a.shape[:-1]

    def split(t: Tensor) -> Tensor:
        return F.pad(t, (0, rounds * lanes * 8 - hidden)).view(*lead, rounds, lanes, 8)

    a, b = split(a), split(b)
    acc = _mul(a[..., 0, :, :], b[..., 0, :, :])
    for k in range(1, rounds):
        acc = _fma(a[..., k, :, :], b[..., k, :, :], acc)
    return _halve(_halve(_halve(acc).view(*lead, max(1, lanes // 32), min(32, lanes))))


# ------------------------------------------------------------------ two readers of a program
def canonical(program: RowProgram, given: Mapping[str, Tensor], scalars: Mapping[str, float]) -> dict[str, Tensor]:
    """What a kernel of `program` must write, bit for bit.

    Args:
        program: of known stages.
        given: the operands by name, rows [M, H], on the CPU; those that are only written are not looked at,
            but for their dtype.
        scalars: run-time values by name.

    Returns:
        Every written operand, in the dtype of the tensor given for it.

    Raises:
        NotImplementedError: for a stage this model does not know.
    """
    x = given["x"]
    h, written = _load(program, given)
    if not isinstance(program.stats, Rms):
        raise NotImplementedError(f"no model of {program.stats}")
    mean = (canonical_sum(h, h).double() / h.shape[-1]).float()
    root = _add(mean, torch.tensor(scalars["eps"])).double().sqrt().float()
    rstd = (1.0 / root.double()).float()
    y = _mul(h, rstd[..., None])
    for stage in program.maps:
        if not isinstance(stage, Affine):
            raise NotImplementedError(f"no model of {stage}")
        gain = given["weight"].float()
        gain = _add(gain, torch.tensor(stage.offset)) if stage.offset else gain
        y = _mul(y.to(x.dtype).float() if stage.round_norm else y, gain)
    return _finish(program, given, written, y, rstd)


def exact(program: RowProgram, given: Mapping[str, Tensor], scalars: Mapping[str, float]) -> dict[str, Tensor]:
    """The formula in fp64, from h as rounded to fp32, rounded only where the program's mode says so.

    Arguments and errors are those of `canonical`, on any device. The fp64 values are not rounded to the
    operands' dtypes.
    """
    x = given["x"]
    h32, written = _load(program, given)
    h = h32.double()
    if not isinstance(program.stats, Rms):
        raise NotImplementedError(f"no formula for {program.stats}")
    eps = float(torch.tensor(scalars["eps"], dtype=torch.float32))
    rstd = (h.square().mean(-1) + eps).rsqrt()
    y = h * rstd[..., None]
    for stage in program.maps:
        if not isinstance(stage, Affine):
            raise NotImplementedError(f"no formula for {stage}")
        y = (y.to(x.dtype).double() if stage.round_norm else y) * (given["weight"].double() + stage.offset)
    return {name: t.double() for name, t in _finish(program, given, written, y, rstd, rounded=False).items()}


def _load(program: RowProgram, given: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """(h in fp32, what loading writes). One fp32 addition is the formula and the model alike."""
    stage, x = program.load, given["x"].float()
    if isinstance(stage, LoadRow):
        return x, {}
    if not isinstance(stage, AddResidual):
        raise NotImplementedError(f"no formula for {stage}")
    h = _add(x, given["residual"].float())
    stored = h.to(given[stage.dst].dtype)
    return (stored.float() if stage.rounded else h), {stage.dst: stored}


def _finish(
    program: RowProgram,
    given: Mapping[str, Tensor],
    written: dict[str, Tensor],
    y: Tensor,
    rstd: Tensor,
    rounded: bool = True,
) -> dict[str, Tensor]:
    if not isinstance(program.store, Cast):
        raise NotImplementedError(f"no formula for {program.store}")
    dst = program.store.dst
    written = {**written, dst: y.to(given[dst].dtype) if rounded else y}
    for stage in program.saves:
        if not isinstance(stage, SaveRstd):
            raise NotImplementedError(f"no formula for {stage}")
        written["rstd"] = rstd
    return written


# ------------------------------------------------------------------ distances
def steps(got: Tensor, wanted: Tensor) -> Tensor:
    """How many representable values apart, elementwise, in the dtype of `got`; both NaN is 0, one NaN is 2^31."""

    def ordinal(t: Tensor) -> Tensor:
        bits = t.contiguous().view(_INTEGERS[t.dtype]).long()
        least = -(1 << (8 * t.element_size() - 1))
        return torch.where(bits < 0, least - bits, bits)

    wanted = wanted.to(got.dtype)
    apart = (ordinal(got) - ordinal(wanted)).abs()
    nan = got.isnan().long() + wanted.isnan().long()
    return torch.where(nan == 0, apart, torch.where(nan == 2, 0, 1 << 31))


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(_bits(a[name]), _bits(b[name])) for name in a)


def _bits(t: Tensor) -> Tensor:
    """The bits, with one pattern for every NaN: payloads are nobody's promise."""
    t = torch.where(t.isnan(), torch.full_like(t, torch.nan), t)
    return t.cpu().contiguous().view(_INTEGERS[t.dtype])
