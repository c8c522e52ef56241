"""Values for the operators: rows, weights, indices, and awkward rows. Weights are never 1 (nor 0 where 1 is added)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch


def generator(*key: object) -> torch.Generator:
    """A generator seeded by what the numbers are for: the same in every process and run."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def rows(shape: tuple[int, ...], dtype: torch.dtype, *key: object) -> torch.Tensor:
    """Normal rows whose magnitudes differ from row to row by up to 2^6; in int8, of every size up to the largest."""
    source = generator("rows", shape, str(dtype), *key)
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, generator=source).to(dtype)
    values = torch.randn(shape, generator=source)
    scale = torch.randint(-3, 4, (*shape[:-1], 1), generator=source).float().exp2()
    return (values * scale).to(dtype)


def gains(shape: tuple[int, ...], dtype: torch.dtype, *key: object) -> torch.Tensor:
    """Weights in [-2, 2], none of them 1 or 0, so that a missing or doubled gain shows."""
    values = torch.rand(shape, generator=generator("gains", shape, *key)) * 4 - 2
    values = torch.where((values.abs() < 0.05) | ((values.abs() - 1).abs() < 0.05), values + 0.3, values)
    return values.to(dtype)


def scales(shape: tuple[int, ...], *key: object) -> torch.Tensor:
    """Positive fp32 scales between 2^-8 and 2^-2, none of them a power of two."""
    return torch.exp2(torch.rand(shape, generator=generator("scales", shape, *key)) * 6 - 8.01)


def indices(shape: tuple[int, ...], count: int, dtype: torch.dtype, *key: object) -> torch.Tensor:
    """Which of `count` rows each row is: any order, the first and the last among them where there is room, repeats."""
    chosen = torch.randint(0, count, shape, generator=generator("indices", shape, count, *key))
    flat = chosen.view(-1)
    for place, row in zip(range(flat.numel()), (count - 1, 0, 0), strict=False):
        flat[place] = row
    return chosen.to(dtype)


SPECIAL: dict[str, Callable[[torch.Tensor], None]] = {}


def _special(name: str) -> Callable[[Callable[[torch.Tensor], None]], Callable[[torch.Tensor], None]]:
    def keep(fill: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        SPECIAL[name] = fill
        return fill

    return keep


@_special("zero")
def _zero(row: torch.Tensor) -> None:
    row.zero_()


@_special("negative zero")
def _minus_zero(row: torch.Tensor) -> None:
    row.fill_(-0.0)


@_special("nan")
def _nan(row: torch.Tensor) -> None:
    row[row.numel() // 2] = math.nan


@_special("inf")
def _inf(row: torch.Tensor) -> None:
    row[-1] = -math.inf


@_special("spike")
def _spike(row: torch.Tensor) -> None:
    row[row.numel() // 3] = 1e4


@_special("largest")
def _largest(row: torch.Tensor) -> None:
    row.fill_(min(torch.finfo(row.dtype).max, 65504.0))


@_special("overflowing squares")
def _overflow(row: torch.Tensor) -> None:
    row.fill_(torch.finfo(row.dtype).max)  # fp32 and bf16: the squares are infinite, rstd 0


@_special("300")
def _three_hundred(row: torch.Tensor) -> None:
    row.fill_(300.0)


@_special("subnormal")
def _subnormal(row: torch.Tensor) -> None:
    row.copy_((torch.arange(row.numel()) % 7 - 3).float() * torch.finfo(row.dtype).smallest_normal / 8)
