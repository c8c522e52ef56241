"""One call of an operator: its tensors and numbers, as the operator takes them and as the model does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashnorm.core.checks import scales_view
from flashnorm.core.op import Op
from flashnorm.model import formats
from flashnorm.program import SCALES, TILE_ROWS, BlockScales, MeanVar, Operand, RowProgram
from flashnorm.verify.cases import Case, dtype_of, options_of, program_of, width

NUMBERS = {"eps": 1e-6, "scale_value": 0.0123, "scale_ub_value": 2.0, "global_scale_value": 61.3}
NUMBERS |= {"next_eps": 1e-5, "center": 1.0, "next_center": 0.5, "alpha_value": 0.75, "input_factor_value": 0.6}
SPARE = 3  # rows of a pool that are more than the rows of the grid
_POISON = {torch.uint8: 0x7F, torch.int8: 0x7F, torch.int32: 0x7F7F7F7F}


@dataclass(frozen=True)
class Problem:
    """The inputs of one call, on the CPU.

    Attributes:
        op, case: what is called.
        program: that of the call.
        rows, hidden: M and H.
        given: tensors by operand; outputs are poisoned.
        numbers: operands that are given as numbers, None where left out.
    """

    op: Op
    case: Case
    program: RowProgram
    rows: int
    hidden: int
    given: Mapping[str, Tensor]
    numbers: Mapping[str, float | None]

    def scalars(self) -> dict[str, float]:
        """Run-time values, as a kernel gets them."""
        found = {name: NUMBERS[name] for name in self.op.scalars}
        for name, (scalar, default) in self.op.by_value.items():
            number = self.numbers.get(name)
            found[scalar] = number if number is not None else default or 1.0
        return found

    def modelled(self) -> dict[str, Tensor]:
        """The operands, as a kernel gets them."""
        return {name: self.as_kernel(name, tensor) for name, tensor in self.given.items()}

    def as_kernel(self, name: str, tensor: Tensor) -> Tensor:
        """Scales as the [M', B] that they are, wherever they lie; everything else as it is."""
        operand = self.op.operands[self.op.index(name)]
        if operand.kind not in SCALES:
            return tensor
        return tensor.as_strided(*scales_view(self.op, self.program, operand, tensor, self.rows, self.hidden))

    def by_rows(self, name: str, tensor: Tensor) -> Tensor:
        """What there is for each of the M rows, of a tensor as a kernel gets it: no padding, and nothing in tiles."""
        store = self.program.store
        if self.op.operands[self.op.index(name)].kind != "swizzled" or not isinstance(store, BlockScales):
            return tensor[: self.rows]
        raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        return formats.unswizzled(raw, self.rows, store.blocks(self.hidden)).view(tensor.dtype)

    def part(self, start: int, stop: int) -> Problem:
        """The call for some of the rows."""
        kinds = {o.name: o.kind for o in self.program.operands()}
        mine = ("row", "pairs", "per_row")
        given = {name: t[start:stop] if kinds[name] in mine else t for name, t in self.given.items()}
        for operand in self.program.operands():
            if operand.kind in SCALES:
                given[operand.name] = _scales(self.op, self.program, operand, self.case, stop - start, self.hidden)
        return replace(self, rows=stop - start, given=given)


def make_problem(op: Op, case: Case, rows: int, hidden: int, device: torch.device) -> Problem:
    """Inputs for a device: rows of very different size, weights that are no ones, outputs full of NaN.

    Where the operator takes whole blocks, H is the next that it takes.
    """
    program = program_of(op, case, device)
    hidden = width(program, hidden)
    generator = torch.Generator().manual_seed(rows * 1_000_003 + hidden)
    given = {}
    for operand in program.operands():
        if operand.kind in SCALES:
            given[operand.name] = _scales(op, program, operand, case, rows, hidden)
        elif operand.mode == "out":
            shape = {"row": (rows, hidden), "pairs": (rows, hidden // 2)}.get(operand.kind, (rows,))
            given[operand.name] = poison(shape, dtype_of(operand, case))
        else:
            given[operand.name] = _values(operand, program, case, rows, hidden, generator)
    numbers: dict[str, float | None] = {}
    for name, (scalar, default) in op.by_value.items():
        if name not in given:
            goes = scalar in program.scalars() and (default is None or case.extras)
            numbers[name] = NUMBERS[scalar] if goes else None
    return Problem(op, case, program, rows, hidden, given, numbers)


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An output that no kernel leaves like that: NaN, in every byte of a code or a scale."""
    if dtype in _POISON:
        return torch.full(shape, _POISON[dtype], dtype=dtype)
    if dtype.itemsize == 1:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, torch.nan, dtype=dtype)


def call(problem: Problem, device: torch.device) -> dict[str, Tensor]:
    """Runs the operator on copies of its inputs; returns what it wrote, scales as [M', B]."""
    op = problem.op
    scales = {o.name for o in op.operands if o.kind == "blocks"}
    copies = {n: (_moved_scales if n in scales else moved)(t, device) for n, t in problem.given.items()}
    numbers = [NUMBERS[s] for s in op.scalars if s not in {scalar for scalar, _ in op.by_value.values()}]
    operands = (copies.get(o.name, problem.numbers.get(o.name)) for o in op.operands)
    op.checked(*operands, *numbers, *options_of(op, problem.case).values(), None)
    return {o.name: problem.as_kernel(o.name, copies[o.name]) for o in op.operands if o.written and o.name in copies}


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device; of codes, of the bytes they are."""
    return _bare(tensor).to(device, copy=True).view(tensor.dtype)


def _moved_scales(tensor: Tensor, device: torch.device) -> Tensor:
    """The same with the memory around it that a view has."""
    if tensor._base is None:
        return moved(tensor, device)
    whole = _bare(tensor._base).to(device, copy=True)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).view(tensor.dtype)


def _bare(tensor: Tensor) -> Tensor:
    """Not every device copies every dtype of a byte."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


# ------------------------------------------------------------------ values
def _values(
    operand: Operand, program: RowProgram, case: Case, rows: int, hidden: int, generator: torch.Generator
) -> Tensor:
    dtype, pool = dtype_of(operand, case), rows + SPARE

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    if operand.kind == "scalar":
        return torch.full((1,), NUMBERS[f"{operand.name}_value"], dtype=dtype)
    if operand.kind == "vec":
        return (uniform(hidden) * 2 - 0.7).to(dtype)
    if operand.name == "row_index":
        index = torch.randint(0, pool, (rows,), generator=generator)
        index[:SPARE] = torch.arange(SPARE)[:rows]
        return index.to(dtype)
    if operand.kind in ("per_row", "per_pool"):
        return uniform(pool if operand.kind == "per_pool" else rows) + 0.5
    if operand.name == "gate":  # a row of them: as far as the exponential's accuracy is promised
        return (uniform(rows, hidden) * 40 - 20).to(dtype)
    count = pool if operand.kind == "pool" else rows
    if dtype == torch.int8:
        values = torch.randint(-128, 128, (count, hidden), generator=generator).to(dtype)
        return _special(values) if rows > 30 else values
    size = 10.0 ** (uniform(count, 1) * 4 - 2)
    centre = (uniform(count, 1) - 0.5) * 200 if isinstance(program.stats, MeanVar) else 0.0
    values = ((torch.randn(count, hidden, generator=generator) + centre) * size).to(dtype)
    return _special(values) if rows > 30 else values


def _special(rows: Tensor) -> Tensor:
    """The first rows are of zeros, with a NaN, and with an infinity."""
    rows[0] = 0
    if rows.dtype.is_floating_point:
        rows[1, rows.shape[1] // 2] = torch.nan
        rows[2, -1] = -torch.inf
    return rows


def _scales(op: Op, program: RowProgram, operand: Operand, case: Case, rows: int, hidden: int) -> Tensor:
    """Memory for scales, as the operator takes it: tiles, [M, B], or columns that are padded to whole fours of rows."""
    assert isinstance(program.store, BlockScales)
    dtype, columns = dtype_of(operand, case), program.store.columns(hidden, operand.kind)
    if operand.kind == "swizzled":
        return poison((-(-rows // TILE_ROWS) * TILE_ROWS * columns,), dtype)
    tall = poison((columns, -(-rows // 4) * 4), dtype)
    padded = tall.t()[:rows]
    for scale in (padded if case.extras else poison((rows, columns), dtype), padded, tall):
        try:
            size, _ = op.blocks(scale, rows)
        except ValueError:
            continue
        if size[0] >= rows and size[1] == columns:
            return scale
    raise ValueError(f"{op.name}: no layout of scales fits {rows} rows of {columns}")
