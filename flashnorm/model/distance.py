"""How far results are from one another: in steps, and in bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashnorm.model import formats
from flashnorm.program import BlockScales, Cast, Gate, LoadGated, RowProgram, Silu

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_FAR = 1 << 31
_NAN_ABOVE = {formats.E4M3: 0x7E, formats.E5M2: 0x7B}  # infinities of e5m2 are no results either


def steps(got: Tensor, wanted: Tensor) -> Tensor:
    """How many representable values apart, elementwise, in the dtype of `got`; both NaN is 0, one NaN is 2^31.

    Codes are made of `wanted` where it is in no dtype of codes. Bytes of exponents are as far apart as their numbers,
    and four of them packed in an int32 are compared one by one, against four columns of `wanted`; pairs of e2m1 codes
    against two columns, or against pairs.
    """
    if got.dtype == torch.int32:
        return (formats.unpack(got) - wanted.long()).abs()
    if got.dtype == formats.E2M1:
        codes = formats.unpaired(wanted) if wanted.dtype == got.dtype else formats.numbers(wanted.float(), got.dtype)
        return (_nibble_ordinal(formats.unpaired(got)) - _nibble_ordinal(codes)).abs()
    if got.dtype == torch.uint8:
        return (got.long() - wanted.long()).abs()
    if got.dtype in formats.LARGEST and wanted.dtype != got.dtype:
        wanted = formats.encode(wanted.float(), got.dtype)
    if got.dtype == torch.int8:
        return (got.long() - wanted.long()).abs()
    wanted = wanted.to(got.dtype)
    apart = (_ordinal(got) - _ordinal(wanted)).abs()
    nan = _nan(got).long() + _nan(wanted).long()
    return torch.where(nan == 0, apart, torch.where(nan == 2, 0, _FAR))


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether all of a is in b, bit for bit. A NaN's bits are nobody's promise, but in a format of one byte."""
    # Most of what is compared is equal to the last byte, and needs no look for NaN.
    return all(
        torch.equal(_integers(a[name].cpu()), _integers(b[name].cpu())) or torch.equal(_bits(a[name]), _bits(b[name]))
        for name in a
    )


def agree(
    program: RowProgram, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> bool:
    """Whether a GPU may have written `got` where the model writes `wanted`.

    Equal bits; of programs with an exponential, for which GPUs use their approximation unless rows are in fp32, within
    one step. Codes with another scale than the model's are not compared.

    `dtype` of the program's rows, where results do not say it.
    """
    if dtype == torch.float32 or not any(isinstance(stage, Silu | Gate | LoadGated) for stage in program.stages()):
        return same_bits(got, wanted)
    kinds = {o.name: o.kind for o in program.operands()}
    name = program.store.dst if isinstance(program.store, Cast) else "out"
    out, right = got[name], wanted[name]
    if out.dtype == torch.float32:
        return same_bits(got, wanted)
    if kinds[name] == "pairs":
        out, right = (t.contiguous().view(torch.uint8).view(formats.E2M1) for t in (out, right))
    apart = steps(out, right)
    apart = apart.view(-1, apart.shape[-1])
    if "scale" in wanted and isinstance(program.store, BlockScales):
        rows, blocks = apart.shape[0], program.store.blocks(apart.shape[1])
        scale, its = (t.contiguous().view(torch.uint8) for t in (got["scale"], wanted["scale"]))
        if kinds["scale"] == "swizzled":
            scale, its = (formats.unswizzled(t, rows, blocks) for t in (scale, its))
        between = steps(scale, its)[:rows]
        if int(between.max()) > 1:
            return False
        apart = apart * (between == 0).repeat_interleave(apart.shape[1] // blocks, -1)
    return not apart.numel() or int(apart.max()) <= 1


def _integers(t: Tensor) -> Tensor:
    return t.contiguous().view(_INTEGERS[t.element_size()])


def _nan(t: Tensor) -> Tensor:
    return t.isnan() if t.element_size() > 1 else (_integers(t) & 0x7F) > _NAN_ABOVE[t.dtype]


def _ordinal(t: Tensor) -> Tensor:
    """The place of a floating-point number among all of its format; 0 for both zeros."""
    size = _integers(t).long() & ((1 << 8 * t.element_size() - 1) - 1)
    return torch.where(_integers(t).long() >> (8 * t.element_size() - 1) & 1 == 1, -size, size)


def _nibble_ordinal(code: Tensor) -> Tensor:
    """The same of e2m1 codes, which all stand for numbers."""
    size = code.long() & 7
    return torch.where(code & 8 != 0, -size, size)


def _bits(t: Tensor) -> Tensor:
    if t.is_floating_point() and t.element_size() > 1:
        t = torch.where(t.isnan(), torch.full_like(t, torch.nan), t)
    return _integers(t.cpu())
