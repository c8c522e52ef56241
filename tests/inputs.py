"""Inputs for the operators: guarded buffers, layouts and awkward rows.

Every tensor a test hands over lies inside a larger buffer. What surrounds it, and the gaps of a
strided layout, hold a signalling-NaN pattern: a kernel that reads there spoils its result, and one
that writes there is caught when the buffer is compared afterwards. Outputs are poisoned with NaN,
so a stale element cannot pass for a result. Weights are never 1 (nor 0 where 1 is added).
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

import flashnorm
from tests.canonical import Bits, rmsnorm_bits
from tests.combos import DTYPES, FUSED, Combo
from tests.tolerance import assert_same_bits, bits_of

_INT = {4: torch.int32, 2: torch.int16}
# NaNs that no arithmetic produces: quiet bit clear, low bits set.
_GUARD = {torch.float32: 0x7FA5A5A5, torch.float16: 0x7DA5, torch.bfloat16: 0x7FA5}
_EDGE = 64  # elements at least before and after, a multiple of every alignment


def generator(*key: object) -> torch.Generator:
    """A generator seeded by what the numbers are for: the same in every process and run."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def rows(shape: tuple[int, ...], dtype: torch.dtype, *key: object) -> torch.Tensor:
    """Normal rows whose magnitudes differ from row to row by up to 2^6."""
    source = generator("rows", shape, str(dtype), *key)
    values = torch.randn(shape, generator=source)
    scale = torch.randint(-3, 4, (*shape[:-1], 1), generator=source).float().exp2()
    return (values * scale).to(dtype)


def gains(shape: tuple[int, ...], dtype: torch.dtype, *key: object) -> torch.Tensor:
    """Weights in [-2, 2], none of them 1 or 0, so that a missing or doubled gain shows."""
    values = torch.rand(shape, generator=generator("gains", shape, *key)) * 4 - 2
    values = torch.where((values.abs() < 0.05) | ((values.abs() - 1).abs() < 0.05), values + 0.3, values)
    return values.to(dtype)


SPECIAL: dict[str, Callable[[torch.Tensor], None]] = {}


def _special(name: str) -> Callable[[Callable[[torch.Tensor], None]], Callable[[torch.Tensor], None]]:
    def keep(fill: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        SPECIAL[name] = fill
        return fill

    return keep


@_special("zero")
def _zero(row: torch.Tensor) -> None:
    row.zero_()


@_special("negative zero")
def _minus_zero(row: torch.Tensor) -> None:
    row.fill_(-0.0)


@_special("nan")
def _nan(row: torch.Tensor) -> None:
    row[row.numel() // 2] = math.nan


@_special("inf")
def _inf(row: torch.Tensor) -> None:
    row[-1] = -math.inf


@_special("spike")
def _spike(row: torch.Tensor) -> None:
    row[row.numel() // 3] = 1e4


@_special("largest")
def _largest(row: torch.Tensor) -> None:
    row.fill_(min(torch.finfo(row.dtype).max, 65504.0))


@_special("overflowing squares")
def _overflow(row: torch.Tensor) -> None:
    row.fill_(torch.finfo(row.dtype).max)  # fp32 and bf16: the squares are infinite, rstd 0


@_special("300")
def _three_hundred(row: torch.Tensor) -> None:
    row.fill_(300.0)


@_special("subnormal")
def _subnormal(row: torch.Tensor) -> None:
    row.copy_((torch.arange(row.numel()) % 7 - 3).float() * torch.finfo(row.dtype).smallest_normal / 8)


# ------------------------------------------------------------------ layouts
Strides = tuple[list[int], int]  # strides and the offset of the first element, in elements


def _dense(shape: tuple[int, ...], last: int = 1) -> list[int]:
    strides = [last] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides


def place(shape: tuple[int, ...], layout: str) -> Strides:
    """Where the elements of a tensor lie.

    `contiguous`; `misaligned` by one element; `half` and `other half` of rows twice as long; `odd rows` one element
    apart; `heads` of a wider projection; `transposed` outer dimensions; `every other` row; `expanded` along the
    outer dimensions (inputs only); `last 2`, a last stride of 2.
    """
    h = shape[-1]
    dense = _dense(shape)
    if layout == "contiguous":
        return dense, 0
    if layout == "misaligned":
        return dense, 1
    if layout in ("half", "other half"):
        return [s * 2 for s in dense[:-1]] + [1], h if layout == "other half" else 0
    if layout == "odd rows":
        return _dense((*shape[:-1], h + 1)), 0
    if layout == "heads":  # (B, N, H) of rows that hold N + 3 heads
        wider = _dense((*shape[:-2], shape[-2] + 3, h))
        return wider, 2 * h
    if layout == "transposed":
        outer = list(range(len(shape) - 1))[::-1]
        inner = _dense((*(shape[i] for i in outer), h))
        strides = [0] * len(shape)
        for position, dim in enumerate([*outer, len(shape) - 1]):
            strides[dim] = inner[position]
        return strides, 0
    if layout == "every other":
        strides = _dense((*shape[:-2], shape[-2] * 2, h))
        strides[-2] *= 2
        return strides, h
    if layout == "expanded":
        return [0] * (len(shape) - 1) + [1], 0
    assert layout == "last 2", layout
    return _dense(shape, last=2), 0


def values_for(layout: str, values: torch.Tensor) -> torch.Tensor:
    """The values a layout can hold: an expanded tensor repeats its first row."""
    if layout != "expanded":
        return values
    return values[(0,) * (values.dim() - 1)].expand(values.shape)


class Guarded:
    """A tensor inside a buffer whose every other byte is watched.

    Args:
        values: what it holds, or None for a NaN-poisoned output of `shape` and `dtype`.
        device: where it lives.
        layout: one of `place`.
        written: whether the operator may write it.
    """

    def __init__(
        self,
        values: torch.Tensor | None,
        device: torch.device | str = "cpu",
        layout: str = "contiguous",
        *,
        written: bool = False,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if values is None:
            assert shape is not None and dtype is not None
            values = torch.full(shape, math.nan, dtype=dtype)
        values = values_for(layout, values)
        shape, dtype = tuple(values.shape), values.dtype
        strides, offset = place(shape, layout)
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) + 1
        edge = -(-max(_EDGE, shape[-1] if shape else 1) // _EDGE) * _EDGE
        size = 2 * edge + offset + reach
        raw = torch.full((size,), _GUARD[dtype], dtype=_INT[dtype.itemsize], device=device)
        where = (shape, strides, edge + offset)
        self.inside = torch.zeros(size, dtype=torch.bool, device=device)
        self.inside.as_strided(*where).fill_(True)
        self.storage = raw.view(dtype)
        # integers: a copy of floating-point NaNs need not keep their bits
        once = tuple(slice(0, 1) if s == 0 and n > 1 else slice(None) for n, s in zip(shape, strides, strict=True))
        raw.as_strided(*where)[once].copy_(bits_of(values).view(shape)[once].to(device))
        self.view = self.storage.as_strided(*where)
        self.before = raw.clone()
        self.written = written

    def check(self, what: str) -> None:
        """Nothing outside the tensor was written; nothing at all of an input."""
        changed = self.storage.view(self.before.dtype) != self.before
        outside = changed & ~self.inside
        assert not bool(outside.any()), f"{what}: {int(outside.sum())} elements outside the tensor were written"
        if not self.written:
            assert not bool(changed.any()), f"{what}: an input was written"

    def unchanged(self) -> bool:
        return bool((self.storage.view(self.before.dtype) == self.before).all())


# ------------------------------------------------------------------ one call, with everything around it
@dataclass(frozen=True)
class Outcome:
    """What a call left behind, on the CPU."""

    out: torch.Tensor
    residual: torch.Tensor | None
    rstd: torch.Tensor | None


class Problem:
    """The tensors of one call of a combination, ready to be run on any route.

    Args:
        combo: the operator and its dtypes.
        shape: of the input, any rank.
        device: where the tensors live.
        layout: of the input and the residual (written in place by the fused operators).
        weight_shape: of the weight where it is not `(H,)`.
        special: names of `SPECIAL` rows, written over the first rows.
        x, residual, weight: values to use in place of random ones.
        eps: passed on.
        seed: part of the key that the numbers are drawn with.
    """

    def __init__(
        self,
        combo: Combo,
        shape: tuple[int, ...],
        device: torch.device | str = "cpu",
        *,
        layout: str = "contiguous",
        residual_layout: str | None = None,
        weight_layout: str = "contiguous",
        weight_shape: tuple[int, ...] | None = None,
        special: tuple[str, ...] = (),
        x: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        eps: float = 1e-6,
        seed: object = 0,
    ) -> None:
        self.combo, self.shape, self.device, self.eps = combo, shape, device, eps
        x = rows(shape, DTYPES[combo.x], "x", seed) if x is None else x
        for name, row in zip(special, x.view(-1, shape[-1]), strict=False):
            SPECIAL[name](row)
        self.x_layout, self.residual_layout, self.weight_layout = layout, residual_layout or layout, weight_layout
        self.x = values_for(layout, x)
        self.weight = self.residual = None
        if combo.weight is not None:
            w_shape = weight_shape or shape[-1:]
            weight = gains(w_shape, DTYPES[combo.weight], seed) if weight is None else weight
            self.weight = values_for(weight_layout, weight)
        if combo.residual is not None:
            self.residual = rows(shape, DTYPES[combo.residual], "residual", seed) if residual is None else residual

    @property
    def what(self) -> str:
        return f"{self.combo} {self.shape} {self.x_layout}"

    def canonical(self) -> Bits:
        """The bits that every exact route must give."""
        options = {"eps": self.eps, "numerics": self.combo.numerics, "offset": self.combo.offset}
        return rmsnorm_bits(self.x, self.weight, self.residual, **options)  # type: ignore[arg-type]

    def check_bits(self, got: Outcome | Bits, what: str = "") -> None:
        """Every tensor of an outcome against the canonical bits."""
        want, what = self.canonical(), f"{self.what} {what}"
        assert_same_bits(got.out, want.out, f"{what}: out")
        assert (got.residual is None) == (want.residual is None)
        if got.residual is not None and want.residual is not None:
            assert_same_bits(got.residual, want.residual, f"{what}: residual")
        if got.rstd is not None:
            assert_same_bits(got.rstd, want.rstd, f"{what}: rstd")

    def arguments(self) -> dict[str, Guarded]:
        """Fresh guarded tensors by parameter name."""
        fused = self.combo.op in FUSED
        made = {"input": Guarded(self.x, self.device, self.x_layout, written=fused)}
        if self.residual is not None:
            made["residual"] = Guarded(self.residual, self.device, self.residual_layout, written=True)
        if self.weight is not None:
            made["weight"] = Guarded(self.weight, self.device, self.weight_layout)
        return made

    def run(self, route: str | None, out: str = "none", *, enable_pdl: bool | None = None) -> Outcome:
        """Calls the public function; everything that must not change is compared afterwards.

        Args:
            route: the forced route, or None for the dispatcher's choice.
            out: "none", "alias" (the input itself), or the layout of a given, NaN-poisoned output.
            enable_pdl: passed on.
        """
        combo, guards = self.combo, self.arguments()
        views = {name: guard.view for name, guard in guards.items()}
        views.setdefault("weight", None)  # type: ignore[arg-type]
        options: dict[str, object] = {"eps": self.eps, "numerics": combo.numerics, "enable_pdl": enable_pdl}
        if out == "alias":
            guards["input"].written = True
            options["out"] = views["input"]
        elif out != "none":
            guards["out"] = Guarded(None, self.device, out, written=True, shape=self.shape, dtype=self.x.dtype)
            options["out"] = guards["out"].view
        if combo.rstd:
            options["return_rstd"] = True
        function = getattr(flashnorm, combo.op)
        with contextlib.nullcontext() if route is None else flashnorm.backend(route):
            result = function(*(views[name] for name in ("input", "residual", "weight") if name in views), **options)
        for name, guard in guards.items():
            guard.check(f"{self.what} on {route}: {name}")
        if combo.op in FUSED:
            assert result is None
            assert self.residual is not None
            return Outcome(views["input"].cpu(), views["residual"].cpu(), None)
        rstd = None
        if combo.rstd:
            assert type(result) is tuple and len(result) == 2, f"{self.what}: return_rstd gave {type(result)}"
            result, rstd = result
            assert rstd.is_contiguous() and rstd.device == result.device
            rstd = rstd.cpu()
        if out != "none":
            assert result is options["out"], f"{self.what}: out= must be returned itself"
        return Outcome(result.cpu(), None, rstd)
