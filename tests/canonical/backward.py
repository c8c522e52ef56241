"""The gradients, bit for bit: of rows, and the sums over rows in their one order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests.canonical.arithmetic import F32, canonical_sum, fma, narrow, widen
from tests.canonical.norms import layer, rms


@dataclass(frozen=True)
class Gradients:
    """What one backward leaves behind, or must; None where the norm has no such thing.

    Attributes:
        dx: in the dtype of the incoming gradient.
        dresidual: the same values in the dtype of what was normalised.
        dweight, dbias: fp32, before their one cast.
    """

    dx: torch.Tensor
    dresidual: torch.Tensor
    dweight: F32 | None
    dbias: F32 | None


def statistics(x: torch.Tensor, eps: float, centred: bool) -> tuple[torch.Tensor, ...]:
    """What a forward saves: (rstd,) of RMSNorm, (m1, m2, rstd) of LayerNorm; fp32, one a row."""
    h = widen(x)
    count = np.float32(h.shape[-1])
    with np.errstate(all="ignore"):
        if not centred:
            return (torch.from_numpy(np.asarray(rms(h, eps)[1])),)
        m1 = np.asarray(canonical_sum(h) / count)
        m2 = np.asarray(canonical_sum(h - m1[..., None]) / count)
        return tuple(torch.from_numpy(part) for part in (m1, m2, np.asarray(layer(h, eps)[1])))


@dataclass(frozen=True)
class Order:
    """The figures of the order of sums over rows; others than the specification's make the same order short.

    Attributes:
        inner: rows after which a partial's inner accumulator joins its outer one.
        elements: of all partials together.
        least: partials of a weight that all rows share.
    """

    inner: int = 16
    elements: int = 2**20
    least: int = 128

    def partials(self, weight_rows: int, hidden: int) -> int:
        """Into how many partial sums the rows of one weight row are dealt."""
        whole = self.elements // (weight_rows * hidden)
        power = 1
        while 2 * power <= whole:
            power *= 2
        return min(max(power, self.least if weight_rows == 1 else 1), 8192)


USUAL = Order()


def owners(grid: tuple[int, ...], lead: tuple[int, ...]) -> list[list[int]]:
    """For each weight row, the rows of the flattened grid that share it, in order."""
    lead = (1,) * (len(grid) - len(lead)) + tuple(lead)
    index = np.arange(int(np.prod(lead)), dtype=np.int64).reshape(lead)
    of_row = np.broadcast_to(index, grid).reshape(-1)
    return [list(np.flatnonzero(of_row == r)) for r in range(index.size)]


def over_rows(a: F32, b: F32 | None, rows: list[int], count: int, inner_rows: int, alone: bool) -> F32:
    """The sum over some rows of a * b (or of a) in `count` partials; with `alone`, the one term that there is."""
    hidden = a.shape[-1]
    with np.errstate(all="ignore"):
        if alone:
            return a[rows[0]] if b is None else a[rows[0]] * b[rows[0]]
        outer = np.zeros((count, hidden), np.float32)
        for p in range(min(count, len(rows))):
            mine = rows[p::count]
            for first in range(0, len(mine), inner_rows):
                inner = np.zeros(hidden, np.float32)
                for row in mine[first : first + inner_rows]:
                    inner = a[row] + inner if b is None else fma(a[row], b[row], inner)
                outer[p] = outer[p] + inner
        while count > 1:
            count //= 2
            outer = outer[:count] + outer[count:]
        return outer[0]


def backward_bits(
    dout: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    *,
    means: tuple[torch.Tensor, torch.Tensor] | None = None,
    g_residual: torch.Tensor | None = None,
    offset: float = 0.0,
    round_norm: bool = False,
    bias: bool = False,
    order: Order = USUAL,
) -> Gradients:
    """The gradients of RMSNorm, or of LayerNorm where both of its means are given."""
    grid, hidden = tuple(x.shape[:-1]), x.shape[-1]
    dy, h = widen(dout).reshape(-1, hidden), widen(x).reshape(-1, hidden)
    count = np.float32(hidden)
    r = widen(rstd).reshape(-1, 1)
    with np.errstate(all="ignore"):
        if means is not None:
            m1, m2 = (widen(m).reshape(-1, 1) for m in means)
            h = (h - m1) - m2
        xh = h * r
        gw = dy
        if weight is not None:
            gain = widen(weight)
            gain = gain + np.float32(offset) if offset else gain
            gain = np.broadcast_to(gain, (*grid, hidden)).reshape(-1, hidden)
            gw = dy * gain
        c = (canonical_sum(gw, xh) / count)[:, None]
        v = gw if means is None else gw - (canonical_sum(gw) / count)[:, None]
        v = r * fma(np.broadcast_to(-c, v.shape), xh, v)
        if g_residual is not None:
            v = v + widen(g_residual).reshape(-1, hidden)
    v = v.reshape(x.shape)
    dweight = dbias = None
    if weight is not None:
        term = widen(narrow(xh, dout.dtype)) if round_norm else xh
        shares = owners(grid, tuple(weight.shape[:-1]))
        alone = len(shares) > 1 and all(len(rows) == 1 for rows in shares)
        p = order.partials(len(shares), hidden)
        sums = [over_rows(dy, term, rows, p, order.inner, alone) for rows in shares]
        dweight = np.stack(sums).reshape(tuple(weight.shape))
    if bias:
        dbias = over_rows(dy, None, list(range(dy.shape[0])), order.partials(1, hidden), order.inner, alone=False)
    return Gradients(narrow(v, dout.dtype), narrow(v, x.dtype), dweight, dbias)
