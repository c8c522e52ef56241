"""One call of an operator: its tensors and numbers, as the operator takes them and as the model does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashnorm.core.op import Op
from flashnorm.program import MeanVar, Operand, QuantBlocks, RowProgram
from flashnorm.verify.cases import Case, dtype_of, options_of, program_of

NUMBERS = {"eps": 1e-6, "scale_value": 0.0123, "scale_ub_value": 2.0}
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
        found = {"eps": NUMBERS["eps"]}
        for name, (scalar, default) in self.op.by_value.items():
            number = self.numbers.get(name)
            found[scalar] = number if number is not None else default or 1.0
        return found

    def modelled(self) -> dict[str, Tensor]:
        """The operands, as a kernel gets them."""
        return {name: self.as_kernel(name, tensor) for name, tensor in self.given.items()}

    def as_kernel(self, name: str, tensor: Tensor) -> Tensor:
        """Scales as the [M', B] that they are, wherever they lie; everything else as it is."""
        if self.op.operands[self.op.index(name)].kind != "blocks":
            return tensor
        return tensor.as_strided(*self.op.blocks(tensor, self.rows))

    def part(self, start: int, stop: int) -> Problem:
        """The call for some of the rows."""
        kinds = {o.name: o.kind for o in self.program.operands()}
        given = {name: t[start:stop] if kinds[name] in ("row", "per_row") else t for name, t in self.given.items()}
        for operand in self.program.operands():
            if operand.kind == "blocks":
                given[operand.name] = _scales(self.op, self.program, operand, self.case, stop - start, self.hidden)
        return replace(self, rows=stop - start, given=given)


def make_problem(op: Op, case: Case, rows: int, hidden: int, device: torch.device) -> Problem:
    """Inputs for a device: rows of very different size, weights that are no ones, outputs full of NaN."""
    program = program_of(op, case, device)
    generator = torch.Generator().manual_seed(rows * 1_000_003 + hidden)
    given = {}
    for operand in program.operands():
        if operand.kind == "blocks":
            given[operand.name] = _scales(op, program, operand, case, rows, hidden)
        elif operand.mode == "out":
            shape = (rows, hidden) if operand.kind == "row" else (rows,)
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
    blocks = {o.name for o in op.operands if o.kind == "blocks"}
    copies = {n: _moved(t, device) if n in blocks else t.to(device, copy=True) for n, t in problem.given.items()}
    numbers = [NUMBERS[s] for s in op.scalars if s not in {scalar for scalar, _ in op.by_value.values()}]
    operands = (copies.get(o.name, problem.numbers.get(o.name)) for o in op.operands)
    op.checked(*operands, *numbers, *options_of(op, problem.case).values(), None)
    return {o.name: problem.as_kernel(o.name, copies[o.name]) for o in op.operands if o.written and o.name in copies}


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, with the memory around it that a view has."""
    if tensor._base is None:
        return tensor.to(device, copy=True)
    whole = tensor._base.to(device, copy=True)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


# ------------------------------------------------------------------ values
def _values(
    operand: Operand, program: RowProgram, case: Case, rows: int, hidden: int, generator: torch.Generator
) -> Tensor:
    dtype, pool = dtype_of(operand, case), rows + SPARE

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    if operand.kind == "scalar":
        scalar = {"scale": "scale_value", "scale_ub": "scale_ub_value"}[operand.name]
        return torch.full((1,), NUMBERS[scalar], dtype=dtype)
    if operand.kind == "vec":
        return (uniform(hidden) * 2 - 0.7).to(dtype)
    if operand.name == "row_index":
        index = torch.randint(0, pool, (rows,), generator=generator)
        index[:SPARE] = torch.arange(SPARE)[:rows]
        return index.to(dtype)
    if operand.kind in ("per_row", "per_pool"):
        return uniform(pool if operand.kind == "per_pool" else rows) + 0.5
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
    """Memory for scales, as the operator takes it: [M, B], or in columns that are padded to whole fours of rows."""
    assert isinstance(program.store, QuantBlocks)
    dtype, columns = dtype_of(operand, case), program.store.columns(hidden)
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
