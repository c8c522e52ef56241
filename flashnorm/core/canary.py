"""Watched memory: a copy of an output that shows what a kernel did not write, and what it wrote beside it.

Everything works on bits: of 8-bit floating-point tensors PyTorch compares and copies too little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashnorm.core import layout
from flashnorm.core.checks import scales_view
from flashnorm.program import SCALES, TILE_COLUMNS, TILE_ROWS, UE8M0, Operand

if TYPE_CHECKING:
    from flashnorm.core.op import Op

Tensor = torch.Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# NaN as a floating-point number of any width, so that a kernel that reads it shows it.
_CANARY = {1: 0xA5, 2: -91, 4: -5921371, 8: -25432095121169}
_CODES = 8  # bytes of 4-bit codes that are compared together: any one byte may be right
_EDGE = 64  # elements beside a tensor, at least; a row where that is more


def bits(t: Tensor) -> Tensor:
    """The same memory as integers of the same width."""
    return t.detach().view(INTEGERS[t.element_size()])


def by_rows(op: Op, program: Any, operand: Operand, t: Tensor, rows: int, hidden: int) -> Tensor:
    """The bits of an operand as [rows, values of a row]; of scales, padding included."""
    if operand.kind in SCALES:
        size, stride = scales_view(op, program, operand, t, rows, hidden)
        raw = bits(t).as_strided(size, stride, t.storage_offset())
        if operand.kind == "blocks":
            return raw
        tiles = raw.reshape(size[0] // TILE_ROWS, size[1] // TILE_COLUMNS, 32, TILE_ROWS // 32, TILE_COLUMNS)
        return tiles.permute(0, 3, 2, 1, 4).reshape(size)
    if operand.kind in ("per_row", "per_pool"):
        return bits(t).reshape(-1, 1)
    return bits(t).reshape(-1, t.shape[-1] if t.dim() else 1)


def is_nan(operand: Operand, dtype: torch.dtype, values: Tensor) -> Tensor:
    """Which of an operand's bits are NaN; tells apart what the bytes of a scale mean by the dtypes it may have."""
    name = str(dtype).removeprefix("torch.")
    if name in ("float32", "float16", "bfloat16"):
        return values.view(dtype).isnan()
    if name == UE8M0 or (name == "uint8" and UE8M0 in operand.dtypes):
        return values == 0xFF
    if name == "float8_e4m3fn" or (name == "uint8" and "float8_e4m3fn" in operand.dtypes):
        return values & 0x7F == 0x7F
    if name == "float8_e5m2":
        return values & 0x7F > 0x7C
    if name == "int32" and operand.kind in SCALES:  # four exponents
        return torch.stack([values >> shift & 0xFF == 0xFF for shift in (0, 8, 16, 24)]).any(0)
    return torch.zeros_like(values, dtype=torch.bool)


class Watched:
    """A copy of an output, laid out like it, with canaries around every row of it.

    What is only written starts as bits that no kernel writes (a NaN of its own, or -128, which int8 codes never are);
    what is also read starts as what it is.

    Attributes:
        tensor: the caller's.
        copy: what the kernel gets in its place.
    """

    def __init__(self, op: Op, operand: Operand, tensor: Tensor, tensors: Any) -> None:
        self.operand, self.tensor = operand, tensor
        size, self.stride = op.reach(operand, tensor, tensors)
        self.size = size
        item = tensor.element_size()
        row = size[-1] if size else 1
        self.edge = -(-max(_EDGE, row) // _EDGE) * _EDGE
        # Aligned as the caller's is: kernels are chosen by it.
        self.offset = self.edge + tensor.data_ptr() % layout.ACCESS_BYTES // item
        self.reach = layout.extent(size, self.stride, item) // item if tensor.numel() else 0
        kind = INTEGERS[item]
        self.memory = torch.full(
            (self.offset + self.reach + self.edge,), _CANARY[item], dtype=kind, device=tensor.device
        )
        whole = self.memory.as_strided(size, self.stride, self.offset)
        self.poison = _poison(operand, tensor).to(tensor.device)
        whole.copy_(self.poison.expand(size))
        place = (tuple(tensor.shape), tensor.stride(), self.offset)
        if operand.mode == "inout":
            self.memory.as_strided(*place).copy_(bits(tensor))
        self.copy = self.memory.view(tensor.dtype).as_strided(*place)

    def beside(self) -> str | None:
        """Where memory outside of the tensor was written, in words; None where none was."""
        inside = torch.zeros_like(self.memory, dtype=torch.bool)
        inside.as_strided(self.size, self.stride, self.offset).fill_(True)
        wrong = ((self.memory != _CANARY[self.memory.element_size()]) & ~inside).nonzero().flatten()
        if not wrong.numel():
            return None
        first, item = int(wrong[0]) - self.offset, self.memory.element_size()
        rows = self._starts()
        behind = int(torch.searchsorted(rows, first, right=True)) - 1
        where = "in front of row 0" if behind < 0 else f"behind row {behind}"
        return f"{wrong.numel() * item} bytes were written outside of it, the first {where}"

    def unwritten(self, values: Tensor) -> Tensor:
        """Which values, [rows, values of a row], are still what they were at the start."""
        if self.operand.mode == "inout":
            return torch.zeros_like(values, dtype=torch.bool)
        same = values == self.poison
        if not _four_bits(self.operand):
            return same
        width = same.shape[-1]
        chunk = _CODES if width % _CODES == 0 else width
        whole = same.unflatten(-1, (-1, chunk)).all(-1, keepdim=True)
        return whole.expand(*whole.shape[:-1], chunk).flatten(-2)

    def write_back(self) -> None:
        """All that a call may write, padding included."""
        theirs = bits(self.tensor).as_strided(self.size, self.stride, self.tensor.storage_offset())
        theirs.copy_(self.memory.as_strided(self.size, self.stride, self.offset))

    def _starts(self) -> Tensor:
        """Where rows begin, sorted, from the first element of the tensor on."""
        starts = torch.zeros((), dtype=torch.int64)
        for n, step in zip(self.size[:-1], self.stride[:-1], strict=True):
            starts = starts.unsqueeze(-1) + torch.arange(n) * step
        return starts.flatten().sort().values


def _four_bits(operand: Operand) -> bool:
    return operand.kind == "pairs"


def _poison(operand: Operand, tensor: Tensor) -> Tensor:
    """Bits that no kernel writes: one value for all, or one for each of a row's."""
    kind = INTEGERS[tensor.element_size()]
    if _four_bits(operand):
        # Every code is a number. A pattern, then, of which no eight bytes in a row are right.
        return (torch.arange(tensor.shape[-1]) * 197 + 71).remainder(256).to(kind)
    if tensor.element_size() == 1:
        return torch.tensor(0x80 if tensor.dtype == torch.int8 else 0xFF, dtype=kind)
    # A NaN that no conversion makes; of four packed exponents, four NaN.
    return torch.tensor({2: -89, 4: -5789785}[tensor.element_size()] if tensor.is_floating_point() else -1, dtype=kind)
