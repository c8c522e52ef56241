"""Quantised stores, bit for bit: one scale for a tensor, or one for every block of a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests.canonical.arithmetic import F32
from tests.canonical.codes import NAN_CODE, encode, largest, power_bytes, power_of

FLT_MAX = np.finfo(np.float32).max


def by_tensor(y: F32, scale: float | np.float32, dtype: torch.dtype) -> torch.Tensor:
    """cast(mul(y, div(1, scale))); the scale is an fp32 number, or one that is rounded to it."""
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / np.float32(scale)
        return encode(y * inverse, dtype)


@dataclass(frozen=True)
class Blocks:
    """How a row's blocks are scaled.

    Attributes:
        size: elements of a block; the last one of a row may be shorter. 0: the whole row.
        floor: the least amax.
        ratio: codes are v * (Q / a), not v * (1 / scale).
        power: the scale is a power of two.
        packed: four of its bytes in an int32.
        cap: the greatest amax, or None.
    """

    size: int
    floor: float
    ratio: bool = False
    power: bool = False
    packed: bool = False
    cap: float | None = None


def by_block(v: F32, how: Blocks, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes like v, scales [rows, blocks]) of rows [..., H]; scales are fp32, uint8 or packed int32."""
    shape, hidden = v.shape, v.shape[-1]
    rows = int(np.prod(shape[:-1]))
    size = how.size or hidden
    count = -(-hidden // size)
    padded = np.zeros((rows, count * size), np.float32)
    padded[:, :hidden] = v.reshape(rows, hidden)
    block = padded.reshape(rows, count, size)
    with np.errstate(all="ignore"):
        amax = np.abs(block).max(-1)  # NumPy's maxima and minima keep a NaN
        a = np.maximum(np.where(np.isinf(amax), FLT_MAX, amax), np.float32(how.floor))
        if how.cap is not None:
            a = np.minimum(a, np.float32(how.cap))
        scale = a / largest(dtype)
        stored = torch.from_numpy(scale)
        if how.power:
            byte = power_bytes(scale)
            scale, stored = power_of(byte), torch.from_numpy(byte)
        multiplier = largest(dtype) / a if how.ratio else np.float32(1) / scale
        assert scale.dtype == multiplier.dtype == np.float32
        codes = encode(block * multiplier[..., None], dtype)
    bare = codes.view(torch.uint8)
    bare[torch.from_numpy(np.isnan(amax))] = 0 if dtype == torch.int8 else NAN_CODE
    bare[torch.from_numpy(amax == 0)] = 0
    codes = bare.view(rows, count * size)[:, :hidden].reshape(shape).contiguous().view(dtype)
    return codes, pack(stored) if how.packed else stored


def pack(stored: torch.Tensor) -> torch.Tensor:
    """[rows, blocks] bytes to [rows, ceil(blocks / 4)] int32: block 4i + j in byte j, low first; no block, no bits."""
    rows, count = stored.shape
    words = np.zeros((rows, -(-count // 4)), np.uint32)
    for block in range(count):
        byte = stored[:, block].numpy().astype(np.uint32)
        words[:, block // 4] |= byte << np.uint32(8 * (block % 4))
    return torch.from_numpy(words.view(np.int32))


def unpack(words: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` bytes of every row of `pack`'s result."""
    raw = words.detach().cpu().contiguous().numpy().view(np.uint32)
    byte = [(raw[:, block // 4] >> np.uint32(8 * (block % 4))) & np.uint32(0xFF) for block in range(count)]
    return torch.from_numpy(np.stack(byte, -1).astype(np.uint8))
