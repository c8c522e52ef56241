"""A backward of the CuTe route on operands in guarded memory, interpreted or run; the model's word on every byte."""

from __future__ import annotations

import contextlib
import math
from unittest import mock

import numpy as np
import torch

from flashnorm.kernels.tile import WIDTH
from flashnorm.program import BackwardProgram, Variant
from tests import canonical
from tests import cute_emulator as emulator
from tests.canonical.backward import USUAL, Order, backward_bits

GAP = 64  # bytes between operands
ROWS = {"dout": "dout", "dx": "dout", "x": "x", "dresidual": "x"}  # whose dtype an operand has


@contextlib.contextmanager
def ordered(order: Order):
    """Kernels that add up rows in an order of other figures."""
    from flashnorm.kernels import columns, gradient, row_backward

    with (
        mock.patch.object(gradient, "INNER_ROWS", order.inner),
        mock.patch.object(columns, "INNER_ROWS", order.inner),
        mock.patch.object(row_backward, "partials_of", order.partials),
        mock.patch.object(row_backward, "PARTIALS", order.elements),
        mock.patch.object(row_backward, "LEAST_PARTIALS", order.least),
    ):
        yield


# ------------------------------------------------------------------ running the kernels
class Written(emulator.Machine):
    """A machine whose workspace may be read where a kernel has written it.

    Attributes:
        workspace: the bytes of global memory that are workspace.
    """

    workspace = np.zeros(0, bool)

    def store(self, space, addr, data, active):
        super().store(space, addr, data, active)
        if space == "global":
            _, at = self._place(space, addr, data.shape[-1], active & self.alive)
            self.readable[at] |= self.workspace[at]


class Kernel:
    """What a kernel of `RowBackward` becomes: its launch runs the body over a grid of its own."""

    def __init__(self, body, made, shared):
        self.body, self.made, self.shared = body, made, shared

    def __call__(self, *arguments):
        self.arguments = arguments
        return self

    def launch(self, grid, block, cluster=None, **_):
        (ctas,) = np.unique(grid[0].a)
        machine = self.made(int(ctas), block[0], (cluster or [1])[0], self.shared(*self.arguments))
        with emulator.patched(machine):
            tid = emulator.Int(np.broadcast_to(np.arange(machine.shape[1]), machine.shape))
            bid = emulator.Int(np.broadcast_to(np.arange(machine.shape[0])[:, None], machine.shape))
            self.body(*self.arguments, tid, bid)


def launch_backward(variant, tile, made, tensors, sm=90):
    """Run the kernels of a backward in their order, on the grids that the host code gives them.

    Args:
        made: (CTAs, threads, CTAs of a cluster, bytes of shared memory) -> a machine.
        tensors: an `emulator.Tensor` for each operand of the variant's program, in order.
        sm: the compute capability that it is traced for.

    Returns:
        How rows share weight rows: "one", "several" or "own".
    """
    from flashnorm.kernels import partials
    from flashnorm.kernels.row_backward import FOLDS, RowBackward

    kernel = object.__new__(RowBackward)
    kernel.variant, kernel.plans, kernel.sm, kernel.has_pdl = variant, ((None, tile),), sm, sm >= 90
    kernel.prepare()

    def shared_of_rows(index, mode, operands):
        return (tile if mode in ("one", "several") else tile.alone()).stream_bytes(kernel.asks)

    kernel.rows = Kernel(kernel.rows_body, made, shared_of_rows)
    kernel.columns = Kernel(kernel.columns_body, made, lambda *_: 0)
    kernel.fold = Kernel(kernel.fold_body, made, lambda *_: partials.fold_bytes(tile.fold_blocks))

    def fold_some(index, _, count, operands, common):
        fitting = [size for size in FOLDS if count.a <= size < kernel.streams]
        size = min([*fitting, max(partials.SLICES, kernel.streams)])
        kernel.fold(index, "several", size, operands).launch(**common)

    kernel.fold_some = fold_some
    with emulator.patched(made(1, 32, 1, 0)):
        rows = emulator.Int(int(np.prod(tensors[0].shape[:-1])))
        mode = "one"
        if kernel.by_rows:
            mode = "own" if not kernel.parts or kernel.split_of(tensors).own.a else "several"
    with emulator.patched(made(1, 32, 1, 0)):
        kernel.launch(0, mode, rows, True, tensors, None)
    return mode


# ------------------------------------------------------------------ operands
class Backward:
    """Operands in one piece of memory, with gaps around them, and the gradients that they must give.

    Args:
        program, hidden_size, vec: what is computed, and how many elements are accessed together.
        dtypes: of dout, x and the vectors; residual gradients are fp16.
        grid: the rows, (M,) or (A, B).
        share: how rows share a weight that comes by rows: None for a plain one, "last" or "first" for a weight row for
            each place along that axis of two, "own" for one each.
        pad: how many access widths lie between rows.
        change: alters the values that are read, by name.
        order: of the sums over rows.
    """

    def __init__(
        self, program, hidden_size, vec, dtypes, grid, share=None, pad=0, change=None, order=USUAL, seed=0
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.program, self.grid, self.share, self.order = program, grid, share, order
        given = dict(zip(("dout", "x", "vec"), dtypes, strict=True))
        self.dtypes = {o.name: self._dtype(o, given) for o in program.operands()}
        vectors = tuple(o.name for o in program.operands() if o.kind == "vec")
        row_vecs = vectors if share else ()
        self.variant = Variant(program, tuple(self.dtypes.values()), hidden_size, len(grid), row_vecs, vec)
        self.weight_rows = {None: 1, "last": grid[-1], "first": grid[0], "own": math.prod(grid)}[share]
        stride = -(-hidden_size // vec) * vec + pad * vec
        places, at = {}, GAP
        for operand in program.operands():
            shape, strides = self._place(operand, stride)
            size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            places[operand.name] = (operand, at, size, shape, strides)
            at += -(-size * WIDTH[self.dtypes[operand.name]] // GAP) * GAP + GAP
        self.memory = torch.full((at,), 0x5A, dtype=torch.uint8)
        self.readable, self.writable, self.workspace = (torch.zeros(at, dtype=torch.bool) for _ in range(3))
        self.view, self.tensors = {}, []
        for name, (operand, start, size, shape, strides) in places.items():
            flat = self.memory[start : start + size * WIDTH[self.dtypes[name]]]
            flat = flat.view(getattr(torch, self.dtypes[name]))
            self.view[name] = flat.as_strided(shape, strides)
            cells = torch.zeros(size, dtype=torch.bool)
            cells.as_strided(shape, strides).fill_(True)
            cells = cells.repeat_interleave(WIDTH[self.dtypes[name]])
            if operand.mode == "in":
                found = torch.randn(size, generator=generator)
                flat.copy_(found.abs() + 0.5 if name == "rstd" else found)
            for mask, has in (
                (self.readable, operand.mode == "in"),
                (self.writable, operand.written),
                (self.workspace, operand.kind == "workspace"),
            ):
                if has:
                    mask[start : start + cells.numel()] |= cells
            self.tensors.append(emulator.Tensor(start, shape, strides))
        for name, alter in (change or {}).items():
            alter(self.view[name])
        self.expected = self._expected()
        self.before = self.memory.clone()

    @staticmethod
    def _dtype(operand, given):
        if operand.kind == "vec":
            return given["vec"]
        if operand.dtypes == ("float32",):
            return "float32"
        return given[ROWS[operand.name]] if operand.name in ROWS else "float16"

    def _place(self, operand, stride):
        """(shape, strides) of an operand."""
        hidden = self.variant.hidden_size
        dense = (1,) if len(self.grid) == 1 else (self.grid[1], 1)
        if operand.kind == "workspace":
            count = self.program.sums * self.order.partials(self.weight_rows, hidden) * self.weight_rows * hidden
            return (count,), (1,)
        if operand.kind == "per_row":
            return self.grid, dense
        if operand.kind == "vec":
            if self.share is None:
                return (hidden,), (1,)
            if self.share in ("last", "first"):
                dense = (0, 1)[-len(self.grid) :] if self.share == "last" else (1, 0)
        return (*self.grid, hidden), (*(n * stride for n in dense), 1)

    def _weight_rows(self, tensor):
        """A vector as the model has it: [H], or its rows without those that are there again."""
        if self.share == "last" and len(self.grid) == 2:
            return tensor[0]
        return tensor[:, :1] if self.share == "first" else tensor

    def _expected(self):
        view, program = self.view, self.program
        got = backward_bits(
            view["dout"], view["x"],
            self._weight_rows(view["weight"]) if program.weight else None, view["rstd"],
            means=(view["mean"], view["rest"]) if program.norm == "layer" else None, g_residual=view.get("g_residual"),
            offset=program.offset, round_norm=program.round_norm, bias=program.dbias,
            order=self.order,
        )  # fmt: skip
        found = {name: getattr(got, name) for name in ("dx", "dresidual", "dweight", "dbias") if name in view}
        for name in ("dweight", "dbias"):
            if name in found:
                found[name] = canonical.narrow(found[name], view[name].dtype)
        return found

    def compare(self):
        """Every byte there is with what it must be; the workspace may hold anything."""
        for name, want in self.expected.items():
            got = self._weight_rows(self.view[name]) if name == "dweight" else self.view[name]
            bits = {2: torch.int16, 4: torch.int32}[want.element_size()]
            bad = got.contiguous().view(bits) != want.contiguous().view(bits)
            bad &= ~(got.isnan() & want.isnan())
            assert not bad.any(), (name, int(bad.sum()), bad.numel(), got[bad][:4], want[bad][:4])
        untouched = ~self.writable
        assert torch.equal(self.memory[untouched], self.before[untouched]), "bytes outside the outputs changed"

    def interpret(self, tile, sm=90):
        """Run it as traced for a target; returns how rows share weight rows."""
        readable = self.readable.numpy().copy()

        def made(ctas, threads, cluster, shared):
            machine = Written(ctas, threads, self.memory.numpy(), readable, self.writable.numpy(), cluster, shared)
            machine.waited, machine.workspace = sm < 90, self.workspace.numpy()
            return machine

        with ordered(self.order):
            return launch_backward(self.variant, tile, made, self.tensors, sm)

    def run(self, launch, pdl):
        """Run a compiled one on the GPU, with the same memory there."""
        memory = self.before.cuda()
        given = []
        for name, view in self.view.items():
            start = view.storage_offset() * view.element_size()
            flat = memory[: memory.numel() // view.element_size() * view.element_size()].view(view.dtype)
            given.append(flat.as_strided(view.shape, view.stride(), start // view.element_size()))
            assert given[-1].numel() == view.numel(), name
        launch(pdl, *given)
        self.memory.copy_(memory.cpu())


def check(tile, program: BackwardProgram, dtypes, grid, *, sm=90, **more):
    """`Backward(...)` interpreted on a tile, and compared; returns how rows share weight rows."""
    one = Backward(program, tile.hidden_size, tile.vec, dtypes, grid, **more)
    mode = one.interpret(tile, sm)
    one.compare()
    return mode
