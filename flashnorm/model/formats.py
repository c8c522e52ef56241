"""Number formats of quantised results, by integer arithmetic on the bits of fp32 numbers.

Codes are nearest even and saturate: an infinity is the largest finite code with its sign. NaN is 0x7F whatever its
sign (0 in int8). -0 and what underflows keep their sign. (fp8: "FP8 Formats for Deep Learning", arXiv:2209.05433;
ue8m0: OCP Microscaling Formats specification 1.0.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0}
_FP8 = {E4M3: (3, 7, 0x7E), E5M2: (2, 15, 0x7B)}  # bits of the fraction, exponent bias, largest finite code
_INFINITY = 0x7F800000  # as bits of an fp32 number; above it, NaN


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values to codes of `dtype`: float8_e4m3fn, float8_e5m2 or int8."""
    bits = values.contiguous().view(torch.int32).long()
    sign, size = bits < 0, bits & 0x7FFFFFFF
    exponent = size >> 23
    significand = (size & 0x7FFFFF) | 0x800000  # of a subnormal number too: it is far below every code
    if dtype == torch.int8:
        code = _shifted(significand, 127 + 23 - exponent).clamp(max=127)
        return torch.where(size > _INFINITY, 0, torch.where(sign, -code, code)).to(dtype)
    fraction, bias, largest = _FP8[dtype]
    wanted = exponent - 127 + bias  # the code's exponent, where the value is normal there
    kept = _shifted(significand, 23 - fraction + (1 - wanted).clamp(min=0))
    # The leading bit counts as one step of the exponent, and so does a fraction that was rounded up to the next power.
    code = (kept + ((wanted.clamp(min=1) - 1) << fraction)).clamp(max=largest)
    code = torch.where(sign, code | 0x80, code)
    return torch.where(size > _INFINITY, 0x7F, code).to(torch.uint8).view(dtype)


def _shifted(number: Tensor, shift: Tensor) -> Tensor:
    """A number of 24 bits / 2^shift, to nearest even."""
    shift = shift.clamp(1, 31)  # a shift by less leaves far more than the largest code, by more leaves nothing
    kept, rest, half = number >> shift, number & ((1 << shift) - 1), 1 << (shift - 1)
    return kept + ((rest > half) | ((rest == half) & (kept & 1 == 1))).long()


# ------------------------------------------------------------------ scales that are powers of two
def exponent_bytes(scale: Tensor) -> Tensor:
    """127 + the smallest e with 2^e >= an fp32 scale, within 0 ... 254; NaN is 255."""
    bits = scale.contiguous().view(torch.int32).long()
    up = (bits >> 23) + (bits & 0x7FFFFF != 0).long()
    up = torch.where(bits <= 1 << 22, 0, up)  # 2^-127 is a subnormal number; no scale is below it
    return torch.where(scale.isnan(), 255, up.clamp(max=254)).to(torch.uint8)


def powers(byte: Tensor) -> Tensor:
    """2^(byte - 127), fp32; 255 is NaN."""
    power = ((byte.long() + 1023 - 127) << 52).view(torch.float64).float()
    return torch.where(byte == 255, torch.nan, power)


def pack(byte: Tensor) -> Tensor:
    """[M, B] bytes to [M, ceil(B / 4)] int32, the first of four in the low byte; what is missing is 0."""
    four = F.pad(byte.long(), (0, -byte.shape[-1] % 4)).unflatten(-1, (-1, 4))
    word = (four << torch.tensor([0, 8, 16, 24], device=byte.device)).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def unpack(word: Tensor) -> Tensor:
    """[M, W] int32 to [M, 4 W] bytes."""
    return ((word.long().unsqueeze(-1) >> torch.tensor([0, 8, 16, 24], device=word.device)) & 0xFF).flatten(-2)
