"""fp32 values to codes of 8 and 4 bits: with a scale that is given, or with scales found from the values.

Rounding is to nearest even, and saturates: an infinity is the largest finite code with its sign. NaN is 0x7F in
both fp8 formats (7 in e2m1, 0 in int8), -0 and what underflows keep their sign. PyTorch's own cast agrees on none but
the rounding in all of its versions, so values are clamped before it, and NaN is put in after it; it has none to e2m1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max
E4M3, E2M1 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
LARGEST = {E4M3: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0, E2M1: 6.0}
TILE_ROWS, TILE_COLUMNS = 128, 4
_NAN = 0x7F
_BIAS = 127  # of an exponent byte, as of fp32's own exponent


def codes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values to codes of `dtype`: float8_e4m3fn, float8_e5m2, int8; or for float4_e2m1fn_x2 [..., H / 2] bytes."""
    if dtype == E2M1:
        return _pairs(_e2m1(values))
    largest = LARGEST[dtype]
    nan = values.isnan()
    if dtype == torch.int8:
        return torch.where(nan, 0.0, values).round().clamp(-largest, largest).to(dtype)
    finite = values.clamp(-largest, largest).to(dtype)
    return torch.where(nan, _NAN, finite.view(torch.uint8)).view(dtype)


def _e2m1(values: Tensor) -> Tensor:
    """Codes of four bits, one a byte."""
    size = values.abs()
    # Values lie 1/2, then 1, then 2 apart. In each stretch code and quotient are even together.
    code = torch.where(size < 2, (size * 2).round(), torch.where(size < 4, size.round() + 2, (size / 2).round() + 4))
    code = torch.where(values.isnan(), 7.0, code.clamp(max=7.0)).to(torch.uint8)
    return torch.where(torch.signbit(values) & ~values.isnan(), code | 8, code)


def _pairs(nibbles: Tensor) -> Tensor:
    """Two codes a byte, the even one in the low half."""
    low, high = nibbles.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def by_tensor(y: Tensor, scale: Tensor | None, scale_value: float, dtype: torch.dtype) -> Tensor:
    """Codes of y / scale, the scale a tensor of one element or else a number."""
    return codes(y * (1.0 / number(scale, scale_value, y)), dtype)


def by_blocks(
    y: Tensor,
    dtype: torch.dtype,
    scales: int,
    *,
    block: int,
    floor: float,
    cap: Tensor | None = None,
    cap_value: float = FLT_MAX,
    ratio: bool = False,
    scale_format: str = "fp32",
    scale_rule: str = "up",
) -> tuple[Tensor, Tensor]:
    """Codes of y, in its shape (e2m1: in pairs), and the scale of every `block` elements of its rows, [scales, B].

    The scale is max(amax, floor) / Q, Q the largest finite code; in the "ue8m0" formats the smallest power of two
    that is no less, as its exponent byte ("ue8m0_packed": four of them in an int32, the first in the low byte), or by
    the rule "ocp" the power of two of amax / that of Q.

    Args:
        y: [..., H], fp32.
        dtype: of the codes.
        scales: rows of the scales; those beyond y's own M are zero.
        block: elements a scale serves; the last block of a row may be shorter. 0: the whole row.
        floor: the least amax.
        cap: the largest amax, a tensor of one element; None: `cap_value`.
        cap_value: the largest amax. Without a cap, an infinite amax counts as the largest fp32 number.
        ratio: codes are y * (Q / amax), and not y * (1 / scale).
        scale_format: "fp32", "ue8m0" or "ue8m0_packed".
        scale_rule: "up" or "ocp".
    """
    hidden = y.shape[-1]
    block = block or hidden
    rows = F.pad(y.reshape(-1, hidden), (0, -hidden % block)).unflatten(-1, (-1, block))
    largest = torch.full_like(rows[..., :1], LARGEST[dtype])  # a tensor: PyTorch may multiply by a number's inverse
    found = rows.abs().amax(-1, keepdim=True)
    amax = torch.minimum(found.clamp(floor, FLT_MAX), number(cap, cap_value, y))
    scale = amax / largest
    kept = scale
    if scale_format != "fp32":
        kept = _exponent_bytes(scale) if scale_rule == "up" else _floor_bytes(amax, LARGEST[dtype])
        scale = _powers(kept)
    factor = largest / amax if ratio else 1.0 / scale
    made = codes(torch.where(found == 0, 0.0, rows * factor), dtype)  # zeros lose their sign
    kept = kept.squeeze(-1)
    if scale_format == "ue8m0_packed":
        kept = F.pad(kept, (0, -kept.shape[-1] % 4)).contiguous().view(torch.int32)
    made = made.flatten(-2)[:, : hidden // 2 if dtype == E2M1 else hidden]
    return made.reshape(*y.shape[:-1], made.shape[-1]), padded(kept, scales)


def nvfp4(y: Tensor, block: int, gain: Tensor | None = None, gain_value: float = 1.0) -> tuple[Tensor, Tensor]:
    """Pairs of e2m1 codes of y, [..., H / 2], and the e4m3 scale of every `block` elements, [M, B], as bytes.

    The scale is G amax / 6, at most 448, rounded; codes are those of y G / scale, with the rounded scale.

    Args:
        y: [..., H], fp32, whole blocks.
        block: elements a scale serves.
        gain: G, a tensor of one element; None: `gain_value`.
        gain_value: G as a number.
    """
    blocks = y.reshape(-1, y.shape[-1]).unflatten(-1, (-1, block))
    found = blocks.abs().amax(-1, keepdim=True)
    gain = number(gain, gain_value, y)
    six = torch.full_like(found, LARGEST[E2M1])  # a tensor: PyTorch may multiply by a number's inverse
    kept = codes((gain * (found.clamp(max=FLT_MAX) / six)).clamp(max=LARGEST[E4M3]), E4M3)
    scale = kept.float()
    nothing = (found == 0) | (scale == 0)
    pairs = codes(torch.where(nothing, 0.0, blocks * gain / scale), E2M1)
    made = pairs.flatten(-2)
    return made.reshape(*y.shape[:-1], made.shape[-1]), kept.view(torch.uint8).squeeze(-1)


# ------------------------------------------------------------------ where scales go
def padded(scales: Tensor, rows: int) -> Tensor:
    """[M, B] to [rows, B], with zeros."""
    return F.pad(scales, (0, 0, 0, rows - scales.shape[0]))


def in_tiles(scales: Tensor) -> Tensor:
    """[M, B] in tiles of 128 rows and 4 columns, rows 32 apart beside each other: [M', C], with zeros."""
    rows, columns = scales.shape
    whole = F.pad(scales, (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    tiles = whole.view(-1, TILE_ROWS // 32, 32, whole.shape[-1] // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(whole.shape)


# ------------------------------------------------------------------ numbers and powers of two
def number(tensor: Tensor | None, value: float, like: Tensor) -> Tensor:
    """A run-time number, fp32, without dimensions, on the device: given there, or from the host."""
    if tensor is not None:
        return tensor.float().reshape(())
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _exponent_bytes(scale: Tensor) -> Tensor:
    """127 + the smallest e with 2^e >= scale, within 0 ... 254; NaN is 255."""
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, 1/2 <= mantissa < 1
    byte = (exponent - (mantissa == 0.5).int() + _BIAS).clamp(0, 254)
    return torch.where(scale.isnan(), 255, torch.where(scale > 0, byte, 0)).to(torch.uint8)


def _floor_bytes(amax: Tensor, largest: float) -> Tensor:
    """127 + floor(log2 amax) - floor(log2 largest), within 0 ... 254; NaN is 255."""
    mantissa, exponent = torch.frexp(amax)
    byte = (exponent - math.frexp(largest)[1] + _BIAS).clamp(0, 254)
    return torch.where(amax.isnan(), 255, torch.where(mantissa > 0, byte, 0)).to(torch.uint8)


def _powers(byte: Tensor) -> Tensor:
    """2^(byte - 127), put together from bits: byte 0 is a subnormal number, 255 NaN."""
    bits = byte.int() << 23
    bits = torch.where(byte == 0, 1 << 22, torch.where(byte == 255, 0x7FC00000, bits))
    return bits.view(torch.float32)
