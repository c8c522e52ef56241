"""Operands: how the tensors of a call become what every kernel takes.

Rows are [M, H] or [A, B, H] with a last stride of 1; what varies with them follows the same grid. Everything else about
a kernel's operands stands in `flashnorm.program`. Works on shapes, strides and the low bits of addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flashnorm.core import layout
from flashnorm.core.checks import dtype_name, scales_view
from flashnorm.program import SCALES, TAILED, Operand, Program, Variant

if TYPE_CHECKING:
    from flashnorm.core.op import Op

Launch = Callable[..., Any]


@dataclass(frozen=True)
class View:
    """How the caller's tensor becomes a kernel's operand.

    Attributes:
        position: among the operator's operands.
        size, stride: of the view the kernel takes; None where the tensor is that already.
        shape: of the copy where it is not the tensor's.
        copy: the kernel works on a contiguous copy (last stride not 1, or rows no two strides can walk).
        raw: the kernel takes its bytes, whatever dtype it has.
        read, write: which way the copy goes.
    """

    position: int
    size: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    shape: tuple[int, ...] | None = None
    copy: bool = False
    read: bool = True
    write: bool = False
    raw: bool = False


_POOLS = ("pool", "per_pool")
_GRID = ("row", "pairs", "vec", "per_row", "heads")
WIDE = ("row", "pairs", "pool", "vec")  # whose elements along H are accessed several at a time


def normalise(op: Op, program: Program, tensors: Sequence[torch.Tensor | None]) -> tuple[Variant, list[View]]:
    """The kernel variant of a call and, for each operand of the program, its view."""
    operands = program.operands()
    given: list[torch.Tensor] = []
    for operand in operands:
        tensor = tensors[op.index(operand.name)]
        assert tensor is not None
        given.append(tensor)
    hidden = given[0].shape[-1]
    rows, pool = grid_of(operands, given), tuple(given[0].shape[:-1])
    placed = [_place(o, t, pool if o.kind in _POOLS else rows, hidden) for o, t in zip(operands, given, strict=True)]
    pool_sizes, sizes = _collapse(placed, _POOLS, 1), _collapse(placed, _GRID, 2)
    views, access = [], []
    for operand, tensor, place in zip(operands, given, placed, strict=True):
        if operand.kind in SCALES:
            size, stride = scales_view(op, program, operand, tensor, math.prod(rows), hidden)
        elif operand.kind == "workspace":
            size, stride = tuple(tensor.shape), (1,)
        else:
            size, stride = place.view(pool_sizes if operand.kind in _POOLS else sizes)
        raw = operand.carried(dtype_name(tensor)) != dtype_name(tensor)
        same = not place.copy and not raw and _is_view(tensor, size, stride)
        views.append(
            View(
                op.index(operand.name),
                None if same else size,
                None if same else stride,
                shape=place.whole if place.copy and not place.shared else None,
                copy=place.copy,
                read=operand.mode != "out",
                write=operand.written,
                raw=raw,
            )
        )
        if place.wide:
            address = 0 if place.copy else tensor.data_ptr() & (layout.ACCESS_BYTES - 1)
            access.append((address, tensor.element_size(), stride[:-1]))
    variant = Variant(
        program,
        tuple(o.carried(dtype_name(t)) for o, t in zip(operands, given, strict=True)),
        hidden,
        len(sizes),
        tuple(p.operand.name for p in placed if p.operand.kind == "vec" and not p.shared),
        layout.access_width(hidden, access),
    )
    return variant, views


def grid_of(operands: Sequence[Operand], tensors: Sequence[Any]) -> tuple[int, ...]:
    """The row grid of a call: what its first "row" operand has in front of H."""
    first = next(t for o, t in zip(operands, tensors, strict=True) if o.kind == "row")
    return tuple(first.shape[:-1])


@dataclass
class _Place:
    """Where an operand lies over its grid of rows.

    Attributes:
        operand, grid, hidden: whose, over which sizes, and the size of its last dimension.
        outer: its strides over them, in elements.
        copy: it is a contiguous copy that lies so.
        tail: sizes and strides behind the grid of one that is not H wide.
    """

    operand: Operand
    grid: tuple[int, ...]
    hidden: int
    outer: tuple[int, ...]
    copy: bool = False
    tail: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def wide(self) -> bool:
        return self.operand.kind in WIDE

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of a copy of it."""
        if self.tail is not None:
            return (*self.grid, *self.tail[0])
        return (*self.grid, self.hidden) if self.wide else self.grid

    @property
    def shared(self) -> bool:
        """One vector for all rows."""
        return self.operand.kind == "vec" and not any(self.outer)

    def copied(self) -> None:
        """Makes it a contiguous copy; a shared vector stays one row."""
        self.copy = True
        if self.tail is not None:
            self.outer, self.tail = _dense(self.grid, math.prod(self.tail[0])), (self.tail[0], _dense(self.tail[0], 1))
        elif not self.shared:
            self.outer = _dense(self.grid, self.hidden if self.wide else 1)

    def view(self, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size and strides of what the kernel takes, where the grid has collapsed to `sizes`."""
        kind = self.operand.kind
        if kind == "scalar":
            return (1,), (1,)
        if self.tail is not None:
            inner, steps = self.tail
            return ((*sizes, *inner), (*self.outer, *steps)) if kind == "heads" else (inner, steps)
        if not self.wide:
            return sizes, self.outer
        if self.shared:
            return (self.hidden,), (1,)
        # A grid of one row has no stride of its own; H keeps the access width that H alone decides.
        outer = (self.hidden,) if kind in ("row", "pairs") and sizes == (1,) and not self.copy else self.outer
        return (*sizes, self.hidden), (*outer, 1)


def _place(operand: Operand, tensor: torch.Tensor, grid: tuple[int, ...], hidden: int) -> _Place:
    if operand.kind == "pairs":
        hidden //= 2
    if operand.kind in ("scalar", "workspace", *SCALES):
        return _Place(operand, (), hidden, ())
    if operand.kind in TAILED:
        return _place_tail(operand, tensor, grid if operand.kind == "heads" else ())
    if operand.kind in ("per_row", "per_pool"):
        return _Place(operand, grid, hidden, _value_strides(tensor, grid))
    lead = tensor.shape[:-1]
    pad = (0,) * (len(grid) - len(lead))
    # A vector broadcasts against the rows with stride 0.
    broadcast = operand.kind == "vec"
    inner = (0 if broadcast and n == 1 else s for n, s in zip(lead, tensor.stride()[:-1], strict=True))
    place = _Place(operand, grid, hidden, (*pad, *inner))
    if hidden != 1 and tensor.stride(-1) != 1:
        place.copied()
    return place


def _place_tail(operand: Operand, tensor: torch.Tensor, grid: tuple[int, ...]) -> _Place:
    sizes, strides = tuple(tensor.shape[len(grid) :]), tensor.stride()[len(grid) :]
    if operand.kind == "gain":  # one row for each head: a flat one is cut into them, a single one repeats
        n, d = operand.tails[0]
        outer = strides[0] if len(sizes) == 2 else d * strides[0] if sizes == (n * d,) else 0
        sizes, strides = (n, d), (outer, strides[-1])
    place = _Place(operand, grid, 0, tensor.stride()[: len(grid)], tail=(sizes, strides))
    if strides[-1] != 1:
        place.copied()
    return place


def _value_strides(tensor: torch.Tensor, grid: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of one value a row, which comes shaped like the grid, as (M, 1), or as one element for all."""
    if tensor.numel() == 1:
        return (0,) * len(grid)
    if tuple(tensor.shape) in (grid, (*grid, 1)):
        return tensor.stride()[: len(grid)]
    return _dense(grid, tensor.stride(0))


def _dense(grid: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Strides over a grid whose last dimension advances by `step` elements."""
    out = []
    for n in reversed(grid):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def _collapse(placed: Sequence[_Place], kinds: tuple[str, ...], most: int) -> tuple[int, ...]:
    """Gives the operands of these kinds strides over the fewest sizes that serve them all, at most `most`."""
    mine = [p for p in placed if p.operand.kind in kinds]
    if not mine:
        return (1,)
    sizes, strides = layout.collapse(mine[0].grid, [p.outer for p in mine])
    if len(sizes) > most:  # no such strides walk these rows: copy whatever does not collapse by itself
        for p in mine:
            if len(layout.collapse(p.grid, [p.outer])[0]) > 1:
                p.copied()
        sizes, strides = layout.collapse(mine[0].grid, [p.outer for p in mine])
    for p, outer in zip(mine, strides, strict=True):
        p.outer = outer or (0,)
    return sizes or (1,)


def _is_view(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor is the view already; a dimension of size 1 may have any stride."""
    return tuple(tensor.shape) == size and all(
        n == 1 or a == b for n, a, b in zip(size, tensor.stride(), stride, strict=True)
    )


# ------------------------------------------------------------------ launches
def over(op: Op, program: Program, kernel: Launch, views: Sequence[View]) -> Launch:
    """The kernel over the operator's arguments: its own scalars, views, and copies in and out, around it."""
    first = len(op.scalars) + 1
    leading = leading_arguments(op, program)

    def run(*args: Any) -> None:
        operands, back = [], []
        for view in views:
            tensor = source = args[first + view.position]
            if view.raw:
                tensor = source = source.view(torch.uint8)
            if view.copy:
                tensor = _copy_in(source, view)
                if view.write:
                    back.append((source, tensor))
            operands.append(tensor if view.size is None else tensor.as_strided(view.size, view.stride))
        kernel(*(args[i] for i in leading), *operands)
        for target, tensor in back:
            target.copy_(tensor.view(target.shape))

    return run


def leading_arguments(op: Op, program: Program) -> list[int]:
    """Which of the operator's scalars and enable_pdl a program's kernel takes, by their places."""
    return [*(op.scalars.index(name) for name in program.scalars()), len(op.scalars)]


def _copy_in(source: torch.Tensor, view: View) -> torch.Tensor:
    shape = source.shape if view.shape is None else view.shape
    if not view.read:
        return torch.empty(shape, dtype=source.dtype, device=source.device)
    spread = source.reshape(shape) if source.numel() == math.prod(shape) else source.expand(shape)
    return spread.clone(memory_format=torch.contiguous_format)
