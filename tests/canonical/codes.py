"""8-bit codes and scales that are powers of two, straight from the definitions of the formats.

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

# bits of the fraction, exponent bias, code of the largest finite value
_FORMATS = {torch.float8_e4m3fn: (3, 7, 0x7E), torch.float8_e5m2: (2, 15, 0x7B)}
NAN_CODE = 0x7F  # in both formats, whatever the sign of the NaN


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
    """One rounding to e4m3fn, e5m2 or int8: nearest even and saturating; NaN is 0x7F, in int8 0."""
    assert values.dtype == np.float32
    if dtype == torch.int8:
        whole = np.clip(np.rint(values), np.float32(-127), np.float32(127))
        return torch.from_numpy(np.where(np.isnan(values), np.float32(0), whole).astype(np.int8))
    known = magnitudes(dtype).astype(np.float64)
    middle = (known[:-1] + known[1:]) / 2
    size = np.abs(values).astype(np.float64)
    code = np.searchsorted(middle, size, side="left")  # how many midpoints lie below
    tie = size == middle[np.minimum(code, len(middle) - 1)]
    code = code + (tie & (code % 2 == 1))
    code = np.where(np.signbit(values), code + 0x80, code)
    code = np.where(np.isnan(values), NAN_CODE, code)
    return torch.from_numpy(code.astype(np.uint8)).view(dtype)


def decode(codes: torch.Tensor) -> F32:
    """The fp32 value of every code; a NaN's and an infinity's code give NaN and the infinity."""
    if codes.dtype == torch.int8:
        return codes.detach().cpu().numpy().astype(np.float32)
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


def power_of(byte: U8) -> F32:
    """2^(byte - 127); NaN for 0xFF."""
    power = np.exp2(byte.astype(np.float64) - 127)
    return np.where(byte == 255, np.nan, power).astype(np.float32)
