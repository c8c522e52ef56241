"""Operators over rows that are picked by an index, or widened from int8: what their functions do before the call."""

from __future__ import annotations

from typing import Any

import torch

from flashnorm.core.checks import PLAIN
from flashnorm.core.op import Op


def new_out(op: Op, input: Any, weight: Any, out: Any, row_index: Any) -> torch.Tensor:
    """The output of such a call: what was given, or a new tensor.

    Raises:
        TypeError: the input or the index is no tensor.
    """
    for name, value in (("input", input), ("row_index", row_index)):
        if not isinstance(value, torch.Tensor) and not (value is None and name == "row_index"):
            raise TypeError(f"{op.called}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if out is not None:
        return out
    dtype = input.dtype
    if not dtype.is_floating_point:
        of_weight = isinstance(weight, torch.Tensor) and weight.dtype.is_floating_point
        dtype = weight.dtype if of_weight else torch.bfloat16  # a wrong weight is named later
    rows = input.shape[:-1] if row_index is None else row_index.shape
    return torch.empty((*rows, input.shape[-1]), dtype=dtype, device=input.device)


def check_index(op: Op, input: torch.Tensor, row_index: torch.Tensor | None) -> None:
    """Raises ValueError for a bad index, where looking is free: on the CPU."""
    if row_index is not None:
        check_bounds(op, "row_index", row_index, input.numel() // max(1, input.shape[-1]))


def check_bounds(op: Op, name: str, index: Any, count: int) -> None:
    """Raises ValueError where an index is not 0 to count - 1 and looking is free; what is no index is named later."""
    if torch.compiler.is_compiling() or type(index) not in PLAIN:
        return
    if index.device.type != "cpu" or index.numel() == 0 or index.dtype not in (torch.int32, torch.int64):
        return
    low, high = (int(v) for v in index.aminmax())
    if low < 0 or high >= count:
        row = int(((index < 0) | (index >= count)).flatten().nonzero()[0])
        raise ValueError(f"{op.called}: {name} must be 0 to {count - 1}, got {int(index.flatten()[row])} for row {row}")
