"""Codes of 8 and 4 bits and scales that are powers of two, straight from the definitions of the formats.

A format is the list of its finite values. A number is encoded by looking its magnitude up among the midpoints of
neighbouring values, all of which fp32 holds exactly; the neighbour with an even code wins a tie. What lies past the
last midpoint is the largest code: the casts saturate.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tests.canonical.arithmetic import F32

U8 = npt.NDArray[np.uint8]

E2M1 = torch.float4_e2m1fn_x2
# bits of the fraction, exponent bias, code of the largest finite value
_FORMATS = {torch.float8_e4m3fn: (3, 7, 0x7E), torch.float8_e5m2: (2, 15, 0x7B), E2M1: (1, 1, 0x7)}
# Whatever the sign of the NaN; e2m1 has none, and its largest code stands for it.
NAN_CODE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F, E2M1: 0x7, torch.int8: 0}


def magnitudes(dtype: torch.dtype) -> F32:
    """The values of the codes 0x00, 0x01, ... up to the largest finite one."""
    fraction_bits, bias, last = _FORMATS[dtype]
    code = np.arange(last + 1)
    exponent, fraction = code >> fraction_bits, code & (2**fraction_bits - 1)
    significand = np.where(exponent == 0, fraction, fraction + 2**fraction_bits)
    power = np.maximum(exponent, 1) - bias - fraction_bits
    return (significand * np.exp2(power.astype(np.float64))).astype(np.float32)


def largest(dtype: torch.dtype) -> np.float32:
    """Q of the specification: the largest finite code's value."""
    return np.float32(127) if dtype == torch.int8 else magnitudes(dtype)[-1]


def encode(values: F32, dtype: torch.dtype) -> torch.Tensor:
    """One rounding to e4m3fn, e5m2, int8, or to [..., H / 2] pairs of e2m1; see `code_bytes`."""
    found = code_bytes(values, dtype)
    return torch.from_numpy(pairs(found) if dtype == E2M1 else found).view(dtype)


def code_bytes(values: F32, dtype: torch.dtype) -> U8:
    """Codes, one a byte: nearest even and saturating; NaN is `NAN_CODE`."""
    assert values.dtype == np.float32
    if dtype == torch.int8:
        whole = np.clip(np.rint(values), np.float32(-127), np.float32(127))
        return np.where(np.isnan(values), np.float32(0), whole).astype(np.int8).view(np.uint8)
    known = magnitudes(dtype).astype(np.float64)
    middle = (known[:-1] + known[1:]) / 2
    with np.errstate(invalid="ignore"):  # NaN
        size = np.abs(values).astype(np.float64)
    code = np.searchsorted(middle, size, side="left")  # how many midpoints lie below
    tie = size == middle[np.minimum(code, len(middle) - 1)]
    code = code + (tie & (code % 2 == 1))
    code = np.where(np.signbit(values), code + (0x8 if dtype == E2M1 else 0x80), code)
    return np.where(np.isnan(values), NAN_CODE[dtype], code).astype(np.uint8)


def pairs(codes: U8) -> U8:
    """[..., H] codes of four bits, two to a byte: that of an even column is the low half."""
    assert bool((codes < 16).all())
    return np.ascontiguousarray(codes[..., 0::2] + 16 * codes[..., 1::2])


def nibbles(packed: torch.Tensor) -> U8:
    """The codes of four bits in [..., H / 2] bytes, [..., H]."""
    raw = packed.detach().cpu().contiguous().view(torch.uint8).numpy()
    found = np.empty((*raw.shape[:-1], 2 * raw.shape[-1]), np.uint8)
    found[..., 0::2], found[..., 1::2] = raw % 16, raw // 16
    return found


def decode(codes: torch.Tensor) -> F32:
    """The fp32 value of every code; a NaN's and an infinity's code give NaN and the infinity."""
    if codes.dtype == torch.int8:
        return codes.detach().cpu().numpy().astype(np.float32)
    if codes.dtype == E2M1:
        code = nibbles(codes)
        return np.where(code < 8, magnitudes(E2M1)[code % 8], -magnitudes(E2M1)[code % 8])
    raw = codes.detach().cpu().contiguous().view(torch.uint8).numpy()
    fraction_bits, _, last = _FORMATS[codes.dtype]
    known = np.full(128, np.nan, np.float32)
    known[: last + 1] = magnitudes(codes.dtype)
    if codes.dtype == torch.float8_e5m2:
        known[last + 1] = np.inf
    assert fraction_bits < 4
    return np.where(raw & 0x80, -known[raw & 0x7F], known[raw & 0x7F]).astype(np.float32)


def power_bytes(values: F32) -> U8:
    """The exponent byte of the smallest power of two that is not below a positive number; NaN is 0xFF."""
    with np.errstate(invalid="ignore"):
        part, exponent = np.frexp(values.astype(np.float64))  # part in [1/2, 1)
        power = np.where(part == 0.5, exponent - 1, exponent)
        byte = np.clip(power + 127, 0, 254)
    byte = np.where(np.isposinf(values), 254, np.where(values == 0, 0, byte))
    return np.where(np.isnan(values), 255, byte).astype(np.uint8)


def floor_bytes(amax: F32, dtype: torch.dtype) -> U8:
    """The exponent byte of the power of two at or below a magnitude, divided by that of the largest code's."""
    with np.errstate(invalid="ignore"):
        exponent = np.frexp(amax.astype(np.float64))[1] - 1  # floor(log2), also of fp32's subnormals
        top = int(np.floor(np.log2(float(largest(dtype)))))
        byte = np.clip(exponent - top + 127, 0, 254)
    byte = np.where(amax == 0, 0, byte)
    return np.where(np.isnan(amax), 255, byte).astype(np.uint8)


def power_of(byte: U8) -> F32:
    """2^(byte - 127); NaN for 0xFF."""
    power = np.exp2(byte.astype(np.float64) - 127)
    return np.where(byte == 255, np.nan, power).astype(np.float32)
