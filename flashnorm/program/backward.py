"""The vocabulary of a backward: what a norm's gradients are made of, and the order of their sums over rows.

A backward is one kernel for both norms. It reads a row of the incoming gradient and of what was normalised, needs one
or two sums of it, writes the row's own gradient, and adds what the row says of the weight (and the bias) to a sum over
rows. `BackwardProgram` is the cache key of its kernels, and its operands are the order in which every route takes its
tensors, as for a `RowProgram`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from flashnorm.program.operand import FLOATS, Operand

INNER_ROWS = 16  # of a partial, after which its inner accumulator joins the outer one
PARTIALS = 1 << 20  # elements of all partials together, where nothing clamps their number
MOST_PARTIALS = 8192
LEAST_PARTIALS = 128  # of a weight that all rows share


def partials(weight_rows: int, hidden_size: int) -> int:
    """P: into how many partials the rows that share one weight row are dealt, row t to partial t mod P.

    floor(2^20 / (R * H)), rounded down to a power of two and clamped, to [128, 8192] for one weight row and to
    [1, 8192] for several. It depends on nothing else, so a gradient's bits do not either.
    """
    count = PARTIALS // (weight_rows * hidden_size)
    power = 1 << count.bit_length() - 1 if count else 0
    return min(max(power, LEAST_PARTIALS if weight_rows == 1 else 1), MOST_PARTIALS)


def workspace_floats(weight_rows: int, hidden_size: int) -> int:
    """fp32 elements that all partials of one sum over rows take at most: at least R * P * H."""
    return max(PARTIALS, weight_rows * hidden_size, LEAST_PARTIALS * hidden_size if weight_rows == 1 else 0)


@dataclass(frozen=True)
class BackwardProgram:
    """The gradients of y = norm(h) * g (+ bias), arithmetic.md section 6; all in fp32.

    With xh = n recomputed from h and the saved statistics, gw = mul(dout, g) (dout itself without a weight) and
    c = div(sum(gw * xh), H):

    "rms":    dx = mul(rstd, fma(-c, xh, gw))
    "layer":  dx = mul(rstd, fma(-c, xh, sub(gw, b))), b = div(sum(gw), H)

    then dx = add(dx, g_residual); dx and dresidual are that value, each rounded once to its dtype. dweight sums
    fma(dout, xh, acc) over rows, dbias add(dout, acc), as `partials` deals them: each partial takes its rows in order
    into an inner accumulator, which after every 16 rows, and after the last, is added to an outer one and starts again
    at +0; the outer ones are folded by halving. One cast.

    Where there are several weight rows and each serves one row, nothing is added: dweight is mul(dout, xh).

    Attributes:
        norm: which.
        weight: there is one.
        offset: g = add(weight, offset), or the weight itself where this is 0.
        round_norm: dweight takes rT(xh) ("hf-llama"), T the dtype of dout.
        g_residual: a gradient of h itself joins dx.
        dx, dresidual, dweight, dbias: what is asked for.
    """

    norm: Literal["rms", "layer"]
    weight: bool = True
    offset: float = 0.0
    round_norm: bool = False
    g_residual: bool = False
    dx: bool = True
    dresidual: bool = False
    dweight: bool = True
    dbias: bool = False

    def __post_init__(self) -> None:
        if not (self.dx or self.dresidual or self.dweight or self.dbias):
            raise ValueError("a backward without a gradient")
        if self.dweight and not self.weight:
            raise ValueError("there is no weight to have a gradient")

    # ------------------------------------------------------------------ what every program says of itself
    @property
    def name(self) -> str:
        return f"{self.norm}_backward"

    def code(self) -> BackwardProgram:
        """What the C++ routes compile for: all of it."""
        return self

    def bind(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """The launch, from a compiled kernel's entry point: that itself."""
        return kernel

    @property
    def rows(self) -> bool:
        """Whether gradients of rows are written."""
        return self.dx or self.dresidual

    @property
    def sums(self) -> int:
        """Sums over rows: of dweight, of dbias."""
        return self.dweight + self.dbias

    def operands(self) -> tuple[Operand, ...]:
        """In the order of every route.

        `x` is what was normalised: the forward's input, or the stored sum with its residual. Statistics are fp32:
        rstd, of LayerNorm also m1 ("mean") and m2 ("rest"). A weight comes as one [H], or by rows, and dweight as it
        does. `workspace` holds partials between kernels; nobody sets it up, and nothing in it outlives a call.
        """
        found = [Operand("dout", "row"), Operand("x", "row")]
        if self.weight:
            found.append(Operand("weight", "vec"))
        if self.norm == "layer":
            found += [Operand("mean", "per_row", dtypes=("float32",)), Operand("rest", "per_row", dtypes=("float32",))]
        found.append(Operand("rstd", "per_row", dtypes=("float32",)))
        if self.g_residual:
            found.append(Operand("g_residual", "row"))
        if self.dx:
            found.append(Operand("dx", "row", "out", like="dout"))
        if self.dresidual:
            found.append(Operand("dresidual", "row", "out", like="x"))
        if self.dweight:
            found.append(Operand("dweight", "vec", "out", FLOATS))
        if self.dbias:
            found.append(Operand("dbias", "vec", "out", FLOATS))
        if self.sums:
            found.append(Operand("workspace", "workspace", "out", ("float32",)))
        return tuple(found)

    def scalars(self) -> tuple[str, ...]:
        """Run-time numbers: none, eps is in rstd."""
        return ()
