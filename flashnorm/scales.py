"""For whoever reads quantised results: scales out of and into their tiles, and numbers out of codes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashnorm.core.checks import check_flag
from flashnorm.program import TILE_COLUMNS, TILE_ROWS

_BYTES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
_PAIRS = (torch.uint8, torch.float4_e2m1fn_x2)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_STRIPE = 32  # rows of a tile that are 16 bytes apart
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unswizzle_scales(block_scale: Tensor, rows: int, columns: int) -> Tensor:
    r"""Scales out of the tiles that block-scaled matrix products read.

    With :math:`C = 4 \lceil columns / 4 \rceil`, the scale of row m and block k is byte

    .. math::
        512 \left( \left\lfloor \tfrac{m}{128} \right\rfloor \tfrac{C}{4} + \left\lfloor \tfrac{k}{4} \right\rfloor
        \right) + 16\,(m \bmod 32) + 4 \left\lfloor \tfrac{m \bmod 128}{32} \right\rfloor + k \bmod 4

    (cuBLAS documentation, "1D Block Scaling Factors Layout").

    Args:
        block_scale: uint8, float8_e4m3fn or float8_e8m0fnu, contiguous, of any shape: ceil(rows/128) * ceil(columns/4)
            tiles of 512 elements.
        rows: M, all leading dimensions of the codes together.
        columns: blocks of a row.

    Returns:
        [rows, columns], a new tensor of the same dtype.

    Raises:
        TypeError: if `block_scale` is no tensor.
        ValueError: for a dtype of more than a byte, a wrong number of elements, or one that is not contiguous.
    """
    _check_tensor("unswizzle_scales", "block_scale", block_scale, _BYTES)
    _check_count("unswizzle_scales", rows=rows, columns=columns)
    down, across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    size = down * across * TILE_ROWS * TILE_COLUMNS
    if block_scale.numel() != size or not block_scale.is_contiguous():
        raise ValueError(
            f"unswizzle_scales: block_scale must be contiguous and have {down} x {across} tiles of 512 = {size} "
            f"elements for {rows} rows and {columns} columns, got {tuple(block_scale.shape)} with strides "
            f"{block_scale.stride()}"
        )
    tiles = block_scale.view(torch.uint8).view(down, across, _STRIPE, TILE_ROWS // _STRIPE, TILE_COLUMNS)
    whole = tiles.permute(0, 3, 2, 1, 4).reshape(down * TILE_ROWS, across * TILE_COLUMNS)
    return whole[:rows, :columns].contiguous().view(block_scale.dtype)


def swizzle_scales(block_scale: Tensor) -> Tensor:
    """Scales by rows into the tiles that block-scaled matrix products read; the inverse of `unswizzle_scales`.

    Args:
        block_scale: [..., columns], uint8, float8_e4m3fn or float8_e8m0fnu; leading dimensions count as rows.

    Returns:
        [M', C], a new contiguous tensor of the same dtype: the rows rounded up to 128, the columns to 4. It is the
        bytes of the tiles one after the other (no element is at its own row and column); those of no row or no block
        are 0.

    Raises:
        TypeError: if `block_scale` is no tensor.
        ValueError: for a dtype of more than a byte, or a tensor without dimensions.
    """
    _check_tensor("swizzle_scales", "block_scale", block_scale, _BYTES)
    if block_scale.dim() < 1:
        raise ValueError("swizzle_scales: block_scale must have at least one dimension, got a 0-d tensor")
    columns, rows = block_scale.shape[-1], math.prod(block_scale.shape[:-1])
    flat = block_scale.contiguous().view(torch.uint8).view(rows, columns)
    whole = torch.nn.functional.pad(flat, (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    across = whole.shape[1] // TILE_COLUMNS
    tiles = whole.view(-1, TILE_ROWS // _STRIPE, _STRIPE, across, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(whole.shape).view(block_scale.dtype)


def dequantize(
    codes: Tensor,
    block_scale: Tensor,
    *,
    block_size: int,
    global_scale: float | Tensor | None = None,
    swizzled: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""The numbers that codes with block scales stand for: NVFP4, MXFP4, MXFP8.

    .. math::
        y = \frac{q \cdot s}{G}

    q is an element's code, s the scale of its block and G the global scale. In fp32 the product is exact, then there
    is one division and one rounding to `dtype`. A block whose scale is NaN is NaN. (OCP Microscaling Formats 1.0, 2023;
    NVIDIA, "Introducing NVFP4", 2025.)

    Args:
        codes: [..., H/2], float4_e2m1fn_x2 or uint8: two e2m1 codes a byte, the even column in the low half; or
            [..., H], float8_e4m3fn.
        block_scale: float8_e4m3fn, or powers of two in float8_e8m0fnu. Bytes (uint8) are taken for e4m3 with blocks of
            16, which have no other format, and for exponents with a bias of 127 else. [..., H / block_size], or
            [M, H / block_size], M being the leading dimensions of the codes together; or `swizzled`.
        block_size: elements a scale serves. H is a multiple of it.
        global_scale: G, a number or a tensor of one element; None for 1.
        swizzled: scales lie in tiles of 128 rows and 4 blocks; see `unswizzle_scales`.
        dtype: of the result: float32, float16, bfloat16 or float64.

    Returns:
        [..., H], a new tensor.

    Raises:
        TypeError: if `codes` or `block_scale` is no tensor.
        ValueError: for a wrong dtype, shape, device, block_size, global_scale or swizzled, naming it.
    """
    _check_tensor("dequantize", "codes", codes, (*_PAIRS, torch.float8_e4m3fn))
    _check_tensor("dequantize", "block_scale", block_scale, _BYTES)
    _check_count("dequantize", block_size=block_size)
    check_flag("dequantize", "swizzled", swizzled)
    if dtype not in _FLOATS:
        raise ValueError(f"dequantize: dtype must be one of {_words(_FLOATS)}, got {dtype}")
    if codes.dim() < 1:
        raise ValueError("dequantize: codes must have at least one dimension, got a 0-d tensor")
    if block_scale.device != codes.device:
        raise ValueError(f"dequantize: block_scale is on {block_scale.device}, but codes on {codes.device}")
    values = _e2m1(codes) if codes.dtype in _PAIRS else codes.float()
    hidden, rows = values.shape[-1], math.prod(values.shape[:-1])
    if not hidden or hidden % block_size:
        raise ValueError(f"dequantize: codes must have whole blocks of {block_size} elements in a row, got {hidden}")
    blocks = hidden // block_size
    if swizzled:
        scale = unswizzle_scales(block_scale, rows, blocks)
    elif tuple(block_scale.shape) in ((*values.shape[:-1], blocks), (rows, blocks)):
        scale = block_scale.reshape(rows, blocks)
    else:
        raise ValueError(
            f"dequantize: block_scale must have shape {(*values.shape[:-1], blocks)}, got {tuple(block_scale.shape)}"
        )
    numbers = values.reshape(rows, blocks, block_size) * _scales(scale, block_size).unsqueeze(-1)
    if global_scale is not None:
        numbers = numbers / _number("dequantize", "global_scale", global_scale, codes.device)
    return numbers.reshape(values.shape).to(dtype)


def _scales(block_scale: Tensor, block_size: int) -> Tensor:
    """fp32 values of scales."""
    if block_scale.dtype == torch.float8_e4m3fn or (block_scale.dtype == torch.uint8 and block_size == 16):
        return block_scale.view(torch.float8_e4m3fn).float()
    byte = block_scale.view(torch.uint8).int()
    bits = torch.where(byte == 0, 1 << 22, torch.where(byte == 255, 0x7FC00000, byte << 23))  # 2^-127 is subnormal
    return bits.view(torch.float32)


def _e2m1(pairs: Tensor) -> Tensor:
    """fp32 values of pairs of codes."""
    byte = pairs.contiguous().view(torch.uint8).int()
    known = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=pairs.device)
    return known[torch.stack((byte & 15, byte >> 4), -1)].flatten(-2)


# ------------------------------------------------------------------ checks
def _check_tensor(function: str, name: str, tensor: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{function}: {name} must have one of the dtypes {_words(dtypes)}, got {tensor.dtype}")


def _check_count(function: str, **counts: Any) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, (int, torch.SymInt)) or count < (name == "block_size"):
            least = "a positive" if name == "block_size" else "a non-negative"
            raise ValueError(f"{function}: {name} must be {least} whole number, got {count!r}")


def _number(function: str, name: str, value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            raise ValueError(
                f"{function}: {name} must be one floating-point element, got {value.dtype} {tuple(value.shape)}"
            )
        return value.to(device).float().reshape(())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{function}: {name} must be a number or a tensor of one element, got {value!r}")
    return torch.full((), float(value), dtype=torch.float32, device=device)


def _words(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
