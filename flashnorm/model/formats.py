"""Number formats of quantised results, by integer arithmetic on the bits of fp32 numbers.

Codes are nearest even and saturate: an infinity is the largest finite code with its sign. NaN is 0x7F whatever its
sign (7 in e2m1, 0 in int8). -0 and what underflows keep their sign. (fp8: "FP8 Formats for Deep Learning",
arXiv:2209.05433; e2m1 and ue8m0: OCP Microscaling Formats specification 1.0.)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flashnorm.program import TILE_COLUMNS, TILE_ROWS, swizzled_offset

E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
LARGEST = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0, torch.int8: 127.0}
# bits of the fraction, exponent bias, largest finite code, sign, NaN
_FORMATS = {E4M3: (3, 7, 0x7E, 0x80, 0x7F), E5M2: (2, 15, 0x7B, 0x80, 0x7F), E2M1: (1, 1, 0x7, 0x8, 0x7)}
_INFINITY = 0x7F800000  # as bits of an fp32 number; above it, NaN


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values to codes of `dtype`: float8_e4m3fn, float8_e5m2, int8, or pairs of float4_e2m1fn_x2."""
    if dtype == E2M1:
        return pairs(numbers(values, dtype)).view(dtype)
    return numbers(values, dtype).view(dtype)


def numbers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of the codes, one a byte."""
    bits = values.contiguous().view(torch.int32).long()
    sign, size = bits < 0, bits & 0x7FFFFFFF
    exponent = size >> 23
    significand = (size & 0x7FFFFF) | 0x800000  # of a subnormal number too: it is far below every code
    if dtype == torch.int8:
        code = _shifted(significand, 127 + 23 - exponent).clamp(max=127)
        return torch.where(size > _INFINITY, 0, torch.where(sign, -code, code)).to(dtype)
    fraction, bias, largest, negative, nan = _FORMATS[dtype]
    wanted = exponent - 127 + bias  # the code's exponent, where the value is normal there
    kept = _shifted(significand, 23 - fraction + (1 - wanted).clamp(min=0))
    # The leading bit counts as one step of the exponent, and so does a fraction that was rounded up to the next power.
    code = (kept + ((wanted.clamp(min=1) - 1) << fraction)).clamp(max=largest)
    code = torch.where(sign, code | negative, code)
    return torch.where(size > _INFINITY, nan, code).to(torch.uint8)


def _shifted(number: Tensor, shift: Tensor) -> Tensor:
    """A number of 24 bits / 2^shift, to nearest even."""
    shift = shift.clamp(1, 31)  # a shift by less leaves far more than the largest code, by more leaves nothing
    kept, rest, half = number >> shift, number & ((1 << shift) - 1), 1 << (shift - 1)
    return kept + ((rest > half) | ((rest == half) & (kept & 1 == 1))).long()


# ------------------------------------------------------------------ two codes in a byte
def pairs(nibbles: Tensor) -> Tensor:
    """[..., H] codes of four bits to [..., H / 2] bytes: the element with the even index in the low half."""
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def unpaired(pair: Tensor) -> Tensor:
    """[..., H / 2] bytes to [..., H] codes of four bits."""
    byte = pair.contiguous().view(torch.uint8)
    return torch.stack([byte & 0xF, byte >> 4], -1).flatten(-2)


def e2m1(nibbles: Tensor) -> Tensor:
    """What codes of four bits stand for, fp32: +-(0, 0.5, 1, 1.5, 2, 3, 4, 6)."""
    fraction, exponent = nibbles & 1, nibbles >> 1 & 3
    size = torch.where(exponent == 0, fraction * 2, (2 + fraction) << exponent) / 4
    return torch.where(nibbles & 8 != 0, -size, size)


# ------------------------------------------------------------------ scales that are powers of two
def floor_bytes(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """127 + floor(log2 amax) - floor(log2 Q) of fp32 magnitudes, within 0 ... 254; NaN is 255. Zeros give 0."""
    part, exponent = torch.frexp(amax.double())  # amax = part * 2^exponent, 1/2 <= part < 1
    largest = math.frexp(LARGEST[dtype])[1]
    byte = torch.where(part == 0, 0, (127 + exponent.long() - largest).clamp(0, 254))
    return torch.where(amax.isnan(), 255, byte).to(torch.uint8)


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


# ------------------------------------------------------------------ scales in tiles
def swizzled(scales: Tensor) -> Tensor:
    """[M, B] scales in tiles of 128 rows and 4 columns, as [M', C]; what tiles have beyond them is 0."""
    offset, rows, columns = _offsets(scales.shape[0], scales.shape[1], scales.device)
    tiles = torch.zeros(rows * columns, dtype=scales.dtype, device=scales.device)
    return tiles.index_put_((offset,), scales).view(rows, columns)


def unswizzled(tiles: Tensor, rows: int, blocks: int) -> Tensor:
    """[M', C] in tiles to the [M, B] in them."""
    return tiles.flatten()[_offsets(rows, blocks, tiles.device)[0]]


def _offsets(rows: int, blocks: int, device: torch.device) -> tuple[Tensor, int, int]:
    """(where the scale of each row and block is, M', C)."""
    columns = -(-blocks // TILE_COLUMNS) * TILE_COLUMNS
    row, column = torch.arange(rows, device=device).unsqueeze(-1), torch.arange(blocks, device=device)
    return swizzled_offset(row, column, columns), -(-rows // TILE_ROWS) * TILE_ROWS, columns  # type: ignore
