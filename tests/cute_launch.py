"""One launch of an interpreted CuTe kernel: operands in guarded memory, and the model's word on every byte."""

from __future__ import annotations

import math

import torch

from flashnorm import model
from flashnorm.kernels.tile import WIDTH, needs_of
from flashnorm.program import Silu, Variant
from tests import cute_emulator as emulator

SCALARS = {"eps": 1e-6, "scale_value": 0.0371, "scale_ub_value": 1.5, "global_scale_value": 173.25}
POOL = 5  # rows of a pool
GAP = 64  # bytes between operands


def dtypes_of(program, **given):
    """A dtype for every operand: bfloat16 where it may have that, else the first it may have, unless one is given."""

    def usual(operand):
        return "uint8" if operand.raw else "bfloat16" if "bfloat16" in operand.dtypes else operand.dtypes[0]

    return tuple("uint8" if o.raw else given.get(o.name, usual(o)) for o in program.operands())


def values(dtype, count, generator):
    """Plausible values for what is read: not the zeros and ones that hide mistakes."""
    if dtype == "int8":
        return torch.randint(-128, 128, (count,), generator=generator, dtype=torch.int8)
    if dtype in ("int32", "int64"):
        return torch.randint(-2, POOL + 2, (count,), generator=generator, dtype=getattr(torch, dtype))
    return (torch.randn(count, generator=generator) * 2).to(getattr(torch, dtype))


class Launch:
    """Operands in one piece of memory, with gaps around them, and what a kernel made of them.

    Args:
        program, dtypes, hidden_size, tile: what is computed, and how.
        rows, row_rank, row_vecs: the grid, and which vectors come by row.
        pad: how many access widths lie between rows.
        padding: rows of a "blocks" operand beyond the last one; of "swizzled" ones there are as many as there must be.
        column: whether a "blocks" operand lies column by column.
        change: alters the values that are read, by name.
    """

    def __init__(
        self, program, dtypes, hidden_size, tile, rows=3, row_rank=1, row_vecs=(), pad=0, padding=0, column=False,
        change=None, seed=0,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.program, self.tile = program, tile
        self.variant = Variant(program, dtypes, hidden_size, row_rank, row_vecs, tile.vec)
        self.outer = (rows,) if row_rank == 1 else (2, -(-rows // 2))
        self.rows = math.prod(self.outer)
        self.grid_rows = self.rows
        stride = -(-hidden_size // tile.vec) * tile.vec + pad * tile.vec
        places, at = {}, GAP
        for operand in program.operands():
            shape, strides = self.place(operand, stride, padding, column)
            size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            places[operand.name] = (operand, at, size, shape, strides)
            at += -(-size * WIDTH[self.variant.dtype(operand.name)] // GAP) * GAP + GAP
        self.memory = torch.full((at,), 0x5A, dtype=torch.uint8)
        readable, writable = torch.zeros(at, dtype=torch.bool), torch.zeros(at, dtype=torch.bool)
        self.view, tensors = {}, []
        for name, (operand, start, size, shape, strides) in places.items():
            dtype = self.variant.dtype(name)
            flat = self.memory[start : start + size * WIDTH[dtype]].view(getattr(torch, dtype))
            self.view[name] = flat.as_strided(shape, strides)
            cells = torch.zeros(size, dtype=torch.bool)
            cells.as_strided(shape, strides).fill_(True)
            cells = cells.repeat_interleave(WIDTH[dtype])
            if operand.mode != "out":
                flat.copy_(values(dtype, size, generator))
                if operand.name == "global_scale":  # is positive
                    flat.abs_()
                readable[start : start + cells.numel()] |= cells
            if operand.written:
                writable[start : start + cells.numel()] |= cells
            tensors.append(emulator.Tensor(start, shape, strides))
        for name, alter in (change or {}).items():
            alter(self.view[name])
        given = {name: self.flat(name).clone() for name in self.view}
        self.expected = model.canonical(program, given, SCALARS)
        before = self.memory.clone()
        machine = emulator.Machine(
            -(-self.grid_rows // tile.all_rows) * tile.cluster_n,
            tile.num_threads,
            self.memory.numpy(),
            readable.numpy(),
            writable.numpy(),
            tile.cluster_n,
            tile.shared_bytes(needs_of(self.variant)),
        )
        self.machine, self.tensors = machine, tensors
        self.before, self.writable = before, writable

    def place(self, operand, stride, padding, column):
        """(shape, strides) of an operand."""
        hidden = self.tile.hidden_size
        dense = (1,) if len(self.outer) == 1 else (self.outer[1], 1)
        match operand.kind:
            case "scalar":
                return (1,), (1,)
            case "per_row":
                return self.outer, dense
            case "per_pool":
                return (POOL,), (2,)
            case "pool":
                return (POOL, hidden), (stride, 1)
            case "blocks":
                count, high = self.program.store.columns(hidden), self.rows + padding
                self.grid_rows = max(self.grid_rows, high)
                return (high, count), (1, high) if column else (count, 1)
            case "swizzled":
                count, high = self.program.store.columns(hidden, operand.kind), -(-self.rows // 128) * 128
                self.grid_rows = max(self.grid_rows, high)
                return (high, count), (count, 1)
            case "pairs":
                hidden, stride = hidden // 2, stride // 2 if stride % (2 * self.tile.vec) == 0 else stride
            case "vec" if operand.name not in self.variant.row_vecs:
                return (hidden,), (1,)
        strides = tuple(n * stride for n in dense)
        if operand.kind == "vec":  # broadcast over the last outer dimension
            strides = (*strides[:-1], 0)
        return (*self.outer, hidden), (*strides, 1)

    def flat(self, name):
        """An operand as the model takes it, rows [M, ...]."""
        view, rank = self.view[name], len(self.outer)
        return view.reshape(self.rows, *view.shape[rank:]) if view.shape[:rank] == self.outer else view

    def check(self, sm=90, native_fp4=False):
        """Run it as traced for a target, and compare every byte there is."""
        emulator.launch(self.variant, self.tile, self.machine, self.tensors, self.scalars(), sm, native_fp4)
        for name, want in self.expected.items():
            got = self.flat(name).reshape(want.shape)
            if Silu() not in self.program.maps:
                assert model.same_bits({name: got}, {name: want}), (name, self.tile, got, want)
        got = {name: self.flat(name).reshape(want.shape) for name, want in self.expected.items()}
        assert model.agree(self.program, got, self.expected), (self.tile, got, self.expected)
        untouched = ~self.writable
        assert torch.equal(self.memory[untouched], self.before[untouched]), "bytes outside the outputs changed"

    def scalars(self):
        return {name: SCALARS[name] for name in self.program.scalars()}


def check(*given, sm=90, native_fp4=False, **more):
    """`Launch(...).check(sm, native_fp4)`."""
    Launch(*given, **more).check(sm, native_fp4)
