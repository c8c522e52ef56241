"""fp32 values to fp8 and int8 codes: with a scale that is given, or with scales found from the values.

Rounding is to nearest even, and saturates: an infinity is the largest finite code with its sign. NaN is 0x7F in
both fp8 formats (0 in int8), -0 and what underflows keep their sign. PyTorch's own cast agrees on none but the
rounding in all of its versions, so values are clamped before it, and NaN is put in after it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
_NAN = 0x7F
_BIAS = 127  # of an exponent byte, as of fp32's own exponent


def codes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values to codes of `dtype`: float8_e4m3fn, float8_e5m2 or int8."""
    largest = LARGEST[dtype]
    nan = values.isnan()
    if dtype == torch.int8:
        return torch.where(nan, 0.0, values).round().clamp(-largest, largest).to(dtype)
    finite = values.clamp(-largest, largest).to(dtype)
    return torch.where(nan, _NAN, finite.view(torch.uint8)).view(dtype)


def by_tensor(y: Tensor, scale: Tensor | None, scale_value: float, dtype: torch.dtype) -> Tensor:
    """Codes of y / scale, the scale a tensor of one element or else a number."""
    return codes(y * (1.0 / _one(scale, scale_value, y)), dtype)


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
) -> tuple[Tensor, Tensor]:
    """Codes of y, in its shape, and the scale of every `block` elements of its rows, [scales, B].

    The scale is max(amax, floor) / Q, Q the largest finite code; in the "ue8m0" formats the smallest power of two
    that is no less, as its exponent byte ("ue8m0_packed": four of them in an int32, the first in the low byte).

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
    """
    hidden = y.shape[-1]
    block = block or hidden
    rows = F.pad(y.reshape(-1, hidden), (0, -hidden % block)).unflatten(-1, (-1, block))
    largest = torch.full_like(rows[..., :1], LARGEST[dtype])  # a tensor: PyTorch may multiply by a number's inverse
    found = rows.abs().amax(-1, keepdim=True)
    amax = torch.minimum(found.clamp(floor, FLT_MAX), _one(cap, cap_value, y))
    scale = amax / largest
    kept = scale
    if scale_format != "fp32":
        kept = _exponent_bytes(scale)
        scale = _powers(kept)
    factor = largest / amax if ratio else 1.0 / scale
    made = codes(torch.where(found == 0, 0.0, rows * factor), dtype)  # zeros lose their sign
    kept = kept.squeeze(-1)
    if scale_format == "ue8m0_packed":
        kept = F.pad(kept, (0, -kept.shape[-1] % 4)).contiguous().view(torch.int32)
    return made.flatten(-2)[:, :hidden].reshape(y.shape), F.pad(kept, (0, 0, 0, scales - kept.shape[0]))


def _one(tensor: Tensor | None, value: float, like: Tensor) -> Tensor:
    """A run-time number, fp32, without dimensions, on the device: given there, or from the host."""
    if tensor is not None:
        return tensor.float().reshape(())
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _exponent_bytes(scale: Tensor) -> Tensor:
    """127 + the smallest e with 2^e >= scale, within 0 ... 254; NaN is 255."""
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, 1/2 <= mantissa < 1
    byte = (exponent - (mantissa == 0.5).int() + _BIAS).clamp(0, 254)
    return torch.where(scale.isnan(), 255, torch.where(scale > 0, byte, 0)).to(torch.uint8)


def _powers(byte: Tensor) -> Tensor:
    """2^(byte - 127), put together from bits: byte 0 is a subnormal number, 255 NaN."""
    bits = byte.int() << 23
    bits = torch.where(byte == 0, 1 << 22, torch.where(byte == 255, 0x7FC00000, bits))
    return bits.view(torch.float32)
