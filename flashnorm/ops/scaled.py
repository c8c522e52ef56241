"""What operators with a scale for every 16 or 32 elements have in common: where scales lie, and their declarations.

Each layout of scales is an operator of its own, and so is each way to come by h: behind one public function, a
call of either kind pays nothing for the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashnorm.core import layout
from flashnorm.core.checks import check_whole_blocks
from flashnorm.core.op import NUMERICS, Op
from flashnorm.ops import programs
from flashnorm.program import TILE_COLUMNS, TILE_ROWS, Affine, BlockScales, Layout, Rms, RowProgram

Tensor = torch.Tensor
SCALE_RULE = {"up": "up", "ocp": "ocp"}
Store = Callable[[programs.Present, programs.Options, Layout], BlockScales]


def _program(
    present: programs.Present, options: programs.Options, *, store: Store, placed: Layout, residual: str | None
) -> RowProgram:
    return RowProgram(
        load=programs.load(present, options, residual),
        stats=Rms(),
        maps=(Affine(),) if "weight" in present else (),  # "hf-llama" rounds nothing here
        store=store(present, options, placed),
    )


def declare(
    called: str,
    placed: Layout,
    residual: str | None,
    functional: Op | None = None,
    *,
    store: Store,
    formulas: Mapping[str | None, Callable[..., None]],
    options: Mapping[str, Mapping[Any, str]],
    **more: Any,
) -> Op:
    """The operator of one layout and one way to come by h.

    Args:
        called: the public function.
        placed: where scales go.
        residual: as `programs.load` takes it.
        functional: as `Op` takes it.
        store: (operands that are there, options, layout) -> the store.
        formulas: by `residual`; they take `swizzled`.
        options: beside the numerics mode.
        more: further arguments of `Op`.
    """
    layout_name = "" if placed == "rows" else f"_{placed}"
    new = "_new" if residual == "h" else ""
    return Op(
        f"{called}{layout_name}{new}",
        program=functools.partial(_program, store=store, placed=placed, residual=residual),
        reference=functools.partial(formulas[residual], swizzled=placed != "rows"),
        options={"numerics": NUMERICS, **options},
        blocks=functools.partial(by_rows, called),
        returns=("out", "scale", "scale_rows") if placed == "both" else ("out", "scale"),
        functional=functional,
        public=not layout_name and not new,
        called=called,
        **more,
    )


# ------------------------------------------------------------------ where scales lie
def by_rows(called: str, scale: Tensor, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """[M, B] of [..., B]."""
    lead = tuple(scale.shape[:-1])
    if math.prod(lead) != rows or scale.dim() < 1:
        raise ValueError(
            f"{called}: block_scale must have a row of scales for each of {rows} rows, got shape {tuple(scale.shape)}"
        )
    if 0 in lead:
        return (0, scale.shape[-1]), (scale.shape[-1], 1)
    sizes, (strides,) = layout.collapse(lead, [scale.stride()[:-1]])
    if len(sizes) > 1:
        raise ValueError(
            f"{called}: block_scale must have rows that one stride walks, got shape {tuple(scale.shape)} with strides "
            f"{scale.stride()}"
        )
    return (rows, scale.shape[-1]), (strides[0] if strides else scale.shape[-1], scale.stride(-1))


def empty_scales(input: Tensor, columns: int, swizzled: bool, dtype: torch.dtype) -> Tensor:
    """New scales: [..., B], or the bytes of whole tiles of 128 rows and 4 columns."""
    if not swizzled:
        return torch.empty((*input.shape[:-1], columns), dtype=dtype, device=input.device)
    rows = math.prod(input.shape[:-1])
    tiles = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
    return torch.empty((tiles * TILE_ROWS * TILE_COLUMNS,), dtype=dtype, device=input.device)


def check_input(op: Op, input: Any, block: int) -> None:
    """What an allocation hangs on."""
    if not isinstance(input, torch.Tensor):
        raise TypeError(f"{op.called}: input must be a torch.Tensor, got {type(input).__name__}")
    if input.dim() < 1:
        raise ValueError(f"{op.called}: input must have at least one dimension, got a 0-d tensor")
    check_whole_blocks(op, input.shape[-1], block)
