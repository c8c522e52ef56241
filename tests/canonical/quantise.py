"""Quantised stores, bit for bit: one scale for a tensor, or one for every block of a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests.canonical.arithmetic import F32
from tests.canonical.codes import (
    E2M1,
    NAN_CODE,
    U8,
    code_bytes,
    decode,
    encode,
    floor_bytes,
    largest,
    pairs,
    power_bytes,
    power_of,
)

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
        down: the power of two comes from amax, rounded down, as the OCP specification has it.
    """

    size: int
    floor: float
    ratio: bool = False
    power: bool = False
    packed: bool = False
    cap: float | None = None
    down: bool = False


def by_block(v: F32, how: Blocks, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes like v, or pairs, scales [rows, blocks]) of rows [..., H]; scales are fp32, uint8 or packed int32."""
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
            byte = floor_bytes(a, dtype) if how.down else power_bytes(scale)
            scale, stored = power_of(byte), torch.from_numpy(byte)
        multiplier = largest(dtype) / a if how.ratio else np.float32(1) / scale
        assert scale.dtype == multiplier.dtype == np.float32
        codes = code_bytes(block * multiplier[..., None], dtype)
    codes[np.isnan(amax)] = NAN_CODE[dtype]
    codes[amax == 0] = 0
    return _unblocked(codes, shape, dtype), pack(stored) if how.packed else stored


def nvfp4(y: F32, size: int, gain: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(pairs of e2m1 codes, e4m3 scales [rows, blocks]) of rows [..., H] of whole blocks; gain None: none."""
    block = y.reshape(int(np.prod(y.shape[:-1])), y.shape[-1] // size, size)
    with np.errstate(all="ignore"):
        amax = np.abs(block).max(-1)  # keeps a NaN
        scale = np.where(np.isinf(amax), FLT_MAX, amax) / np.float32(6)
        if gain is not None:
            scale, block = np.float32(gain) * scale, block * np.float32(gain)
        stored = encode(np.minimum(scale, np.float32(448)), torch.float8_e4m3fn)
        value = decode(stored)
        quotient = block / value[..., None]
        assert scale.dtype == value.dtype == quotient.dtype == np.float32
        codes = code_bytes(quotient, E2M1)
    codes[np.isnan(amax)] = NAN_CODE[E2M1]
    codes[(amax == 0) | (value == 0)] = 0
    return _unblocked(codes, y.shape, E2M1), stored


def _unblocked(codes: U8, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Codes of blocks, one a byte, as the codes of rows."""
    flat = np.ascontiguousarray(codes.reshape(len(codes), int(np.prod(codes.shape[1:])))[:, : shape[-1]]).reshape(shape)
    return torch.from_numpy(pairs(flat) if dtype == E2M1 else flat).view(dtype)


def tiles(scales: torch.Tensor) -> torch.Tensor:
    """[rows, blocks] scales of a byte in tiles, [rows up to 128, blocks up to 4]: one by one; the rest is 0.

    A tile has 128 rows and 4 blocks, 512 bytes. Within it rows 0, 32, 64 and 96 are the first 16 bytes, 4 each.
    """
    rows, count = scales.shape
    raw = scales.contiguous().view(torch.uint8)
    down, across = -(-rows // 128), -(-count // 4)
    found = torch.zeros(down, across, 32, 4, 4, dtype=torch.uint8)
    for row in range(rows):
        for block in range(count):
            found[row // 128, block // 4, row % 32, row // 32 % 4, block % 4] = raw[row, block]
    return found.view(down * 128, across * 4).view(scales.dtype)


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
