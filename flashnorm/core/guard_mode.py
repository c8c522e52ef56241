"""Guard mode (`FLASHNORM_GUARD=1`): every call looks at what goes in and what comes out.

A kernel that writes too little, too much or nonsense shows up as a wrong token many layers later. Under guard mode
each call runs on copies of its outputs, poisoned and with canaries around every row, and

- before the launch: an input with a NaN in what is read of it, and a row index that is out of range, raise; rows whose
  mean square (of LayerNorm: variance) is less than ten times eps are named in a warning, since there eps rules the
  result;
- after it: memory beside an output that was written, an input that was written, an element that was not, a residual
  that is not the sum, padding of scales that is not zero, and a NaN all raise `GuardError`, which names the operator,
  the argument and the first row. The caller's outputs are written only when all is well.

What an in-place operand was before is what it is when a kernel leaves it alone, so that of those only the residual
is known to have been written. Calls inside a CUDA graph capture are not looked at (nothing can be read there), and
neither is what a compiler traces; the operator that a compiled program calls is.

The mode costs several passes over memory and a synchronisation a call. Switched off it costs nothing: it stands on
the cold path, and no call becomes warm while it is on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flashnorm.config import settings
from flashnorm.core import device as devices
from flashnorm.core.canary import Watched, bits, by_rows, is_nan
from flashnorm.core.checks import dtype_name
from flashnorm.core.operands import Launch, grid_of
from flashnorm.program import (
    FLOATS,
    SCALES,
    UE8M0,
    AddResidual,
    BlockScales,
    LoadRow,
    MeanVar,
    Operand,
    Rms,
)

if TYPE_CHECKING:
    from flashnorm.core.op import Op

log = logging.getLogger("flashnorm")

Tensor = torch.Tensor
# Kinds of operands of whose rows an index picks some -> the index. What no index names may hold anything: a page that
# was never filled, positions that no token has.
PICKED = {"pool": "row_index", "per_pool": "row_index", "table": "positions"}
QUIET = 10.0  # times eps: where the mean square is less, eps changes the result by more than a twentieth


class GuardError(RuntimeError):
    """A call under guard mode went in or came out wrong; nothing of the caller's was written."""


def applies(device: torch.device) -> bool:
    """Whether a call is to be looked at."""
    return settings.guard and not (device.type == "cuda" and devices.capturing())


def launch(
    op: Op, program: Any, run: Launch, tensors: Sequence[Tensor | None], scalars: Sequence[float], pdl: bool
) -> None:
    """Runs a validated call and looks at everything around it.

    Args:
        op, tensors, scalars, pdl: of the call.
        program: of the call; of one that is no row program only the operands are known here.
        run: the plan's launch.

    Raises:
        ValueError: a row index is out of range.
        GuardError: everything else that the module's text names.
    """
    call = _Call(op, program, tensors)
    if 0 in call.grid:
        run(*scalars, pdl, *tensors)
        return
    # Also for tensors of inference mode, which nothing else may write.
    with torch.inference_mode():
        call.check_index()
        call.check_inputs()
        call.warn_of_quiet_rows(scalars)
        watched = {o.name: Watched(op, o, call.given[o.name], tensors) for o in call.operands if o.written}
        before = {o.name: bits(call.given[o.name]).clone() for o in call.operands if not o.written}
        swapped = [watched[o.name].copy if o.name in watched else t for o, t in zip(op.operands, tensors, strict=True)]
        run(*scalars, pdl, *swapped)
        for name, found in watched.items():
            text = found.beside()
            if text is not None:
                call.fail(name, text)
        for name, was in before.items():
            call.rows_fail(name, call.by_rows(name, bits(call.given[name]) != was), "was written, but is an input")
        for name, found in watched.items():
            call.check_written(name, found)
        call.check_sum(watched)
        call.check_outputs({name: found.copy for name, found in watched.items()})
        for found in watched.values():
            found.write_back()


class _Call:
    """One call: its operands by name, and the texts of what may be wrong with it."""

    def __init__(self, op: Op, program: Any, tensors: Sequence[Tensor | None]) -> None:
        self.op, self.program = op, program
        self.operands: tuple[Operand, ...] = program.operands()
        self.load, self.stats = getattr(program, "load", None), getattr(program, "stats", None)
        self.given: dict[str, Tensor] = {}
        for operand in self.operands:
            tensor = tensors[op.index(operand.name)]
            assert tensor is not None
            self.given[operand.name] = tensor
        self.kinds: dict[str, Operand] = {o.name: o for o in self.operands}
        self.grid = grid_of(self.operands, [self.given[o.name] for o in self.operands])
        self.rows = math.prod(self.grid)
        self.hidden = self.given[self.operands[0].name].shape[-1]

    def fail(self, name: str, text: str) -> None:
        raise GuardError(f"{self.op.called}: guard mode: {self.op.label(self.kinds[name])}: {text}")

    def rows_fail(self, name: str, wrong: Tensor, text: str) -> None:
        """Raises for the first row that has something wrong, of [rows, values]."""
        if not bool(wrong.any()):
            return
        rows = wrong.any(-1).nonzero().flatten()
        column = int(wrong[rows[0]].nonzero()[0])
        more = f" ({rows.numel()} of {wrong.shape[0]} rows)" if wrong.shape[0] > 1 else ""
        self.fail(name, f"row {int(rows[0])}, element {column} {text}{more}")

    def values(self, name: str, tensor: Tensor) -> Tensor:
        """Bits as [rows, values of a row]."""
        return by_rows(self.op, self.program, self.kinds[name], tensor, self.rows, self.hidden)

    def by_rows(self, name: str, mask: Tensor) -> Tensor:
        """A mask that is laid out like an operand of rows, as [rows, values of a row]."""
        if self.kinds[name].kind in ("per_row", "per_pool"):
            return mask.reshape(-1, 1)
        return mask.reshape(-1, mask.shape[-1] if mask.dim() else 1)

    def read(self, name: str, mask: Tensor) -> Tensor:
        """What of a mask, [rows, values of a row], lies in rows of an operand that the call reads."""
        index = self.given.get(PICKED.get(self.kinds[name].kind, ""))
        if index is None or mask.shape[0] == 1:  # one value for all rows is read whatever they are
            return mask
        picked = torch.zeros_like(mask[:, :1])
        picked[index.flatten().long()] = True
        return mask & picked

    # -------------------------------------------------------------- before
    def check_index(self) -> None:
        """Indices that kernels read nothing for: of rows, and of the positions of a table."""
        tables = {"row_index": ("x", -1), "positions": ("cos_sin_cache", 1)}
        for name, (table, dims) in tables.items():
            index = self.given.get(name)
            if index is None or table not in self.given or not index.numel():
                continue
            count = math.prod(self.given[table].shape[:dims])
            bad = ((index < 0) | (index >= count)).flatten().nonzero()
            if bad.numel():
                first = int(bad[0])
                got = int(index.flatten()[first])
                raise ValueError(f"{self.op.called}: {name} must be 0 to {count - 1}, got {got} for row {first}")

    def check_inputs(self) -> None:
        for operand in self.operands:
            if operand.mode != "out":
                tensor = self.given[operand.name]
                nan = is_nan(operand, tensor.dtype, self.values(operand.name, tensor))
                self.rows_fail(operand.name, self.read(operand.name, nan), "is NaN before the launch")

    def warn_of_quiet_rows(self, scalars: Sequence[float]) -> None:
        """Names the rows that eps rules, where this module knows how rows come about."""
        h = self._loaded()
        if h is None or "eps" not in self.op.scalars or not isinstance(self.stats, (Rms, MeanVar)):
            return
        centred = isinstance(self.stats, MeanVar)
        size = h.var(-1, correction=0) if centred else h.square().mean(-1)
        eps = scalars[self.op.scalars.index("eps")]
        quiet = (size < QUIET * eps).nonzero().flatten()
        if quiet.numel():
            first = int(quiet[0])
            what = "variance" if centred else "mean square"
            log.warning(
                "%s: guard mode: %d of %d rows have a %s below %g eps; the first is row %d with %.3g, eps is %.3g",
                self.op.called,
                quiet.numel(),
                size.numel(),
                what,
                QUIET,
                first,
                float(size[first]),
                eps,
            )

    def _loaded(self) -> Tensor | None:
        """The rows that are normalised, [M, H] in fp32."""
        load = self.load
        if isinstance(load, AddResidual):
            return self._sum().flatten(0, -2) if self.grid else self._sum().unsqueeze(0)
        if not isinstance(load, LoadRow):
            return None
        h = self.given["x"].detach().reshape(-1, self.hidden).float()
        if load.scaled:
            h = h * self.given["input_scale"].reshape(-1, 1)
        return h[self.given["row_index"].flatten().long()] if load.indexed else h

    def _sum(self) -> Tensor:
        return self.given["x"].detach().float() + self.given["residual"].detach().float()

    # -------------------------------------------------------------- after
    def check_written(self, name: str, found: Watched) -> None:
        # Of exponents alone NaN is what memory starts as.
        text = "was not written" + (", or is NaN" if UE8M0 in found.operand.dtypes else "")
        self.rows_fail(name, found.unwritten(self.values(name, found.copy)), text)

    def check_sum(self, watched: dict[str, Watched]) -> None:
        """That the residual is the sum, rounded once: one addition, so there is one right answer."""
        load = self.load
        if isinstance(load, AddResidual):
            got = watched[load.dst].copy
            want = self._sum().to(got.dtype)
            wrong = (got != want) & ~(got.isnan() & want.isnan())
            self.rows_fail(load.dst, self.by_rows(load.dst, wrong), "is not the sum of input and residual")

    def check_outputs(self, outputs: dict[str, Tensor]) -> None:
        for name, tensor in outputs.items():
            operand, values = self.kinds[name], self.values(name, tensor)
            if operand.kind in SCALES:
                padding = torch.ones_like(values, dtype=torch.bool)
                padding[: self.rows, : self._blocks()] = False
                self.rows_fail(name, (values != 0) & padding, "is padding, but not zero")
            nan = is_nan(operand, tensor.dtype, values)
            if bool(nan.any()):
                self.rows_fail(name, nan, f"is NaN after the launch{self._why()}")

    def _blocks(self) -> int:
        """Scales of a row that are no padding."""
        assert isinstance(self.program.store, BlockScales)
        return self.program.store.columns(self.hidden)

    def _why(self) -> str:
        """What may have made a NaN out of numbers."""
        for operand in self.operands:
            tensor = self.given[operand.name]
            if operand.mode != "out" and dtype_name(tensor) in FLOATS:
                infinite = self.read(operand.name, self.by_rows(operand.name, tensor.isinf())).any(-1).nonzero()
                if infinite.numel():
                    return f"; row {int(infinite[0])} of {self.op.label(operand)} holds an infinity"
        return ""
