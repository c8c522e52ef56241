"""The program that is no row program: Q and K of a token normalised and turned, V copied, in one launch.

`QkNormRope` says what a kernel is compiled for, and `QkLayout` all that is known when it runs: heads, positions,
frequencies. The C++ routes take a layout by value when a kernel is bound (`QkNormRope.bind`), so no launch looks a
table up and none can see another call's.
"""

from __future__ import annotations

import decimal
import functools
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from flashnorm.program.operand import FLOATS, Operand

Scope = Literal["hidden", "head", "none"]
SCOPES: tuple[Scope, ...] = ("hidden", "head", "none")
MAX_HEAD_DIM = 512

# sin(pi/2 y) = y (SIN[0] + SIN[1] z + ...) and cos(pi/2 y) = 1 + COS[0] z + ..., z = y^2, |y| <= 0.5: within 4.2e-9 and
# 4.1e-10 before rounding.
SIN = tuple(float.fromhex(t) for t in ("0x1.921fb6p+0", "-0x1.4abbe6p-1", "0x1.4668e6p-4", "-0x1.2ef846p-8"))
COS = tuple(float.fromhex(t) for t in ("-0x1.3bd3ccp+0", "0x1.03c1aep-2", "-0x1.55b148p-6", "0x1.d47e82p-11"))
MAX_QUARTERS = float(1 << 22)  # quarter turns that the range reduction takes
_QUARTERS = 2 / math.pi  # of a radian


@dataclass(frozen=True)
class QkLayout:
    """Which heads there are, and how far each pair of channels is turned at a token.

    Attributes:
        heads: of Q, K and V, one after the other in a token.
        head_dim: channels of a head.
        scope: what is normalised together: all heads of Q and all of K ("hidden"), each head, or "none".
        interleave: pairs are (2p, 2p + 1), else (p, p + rotary_dim / 2).
        rotary_dim: channels that turn, from the first on.
        grid: frames, height and width: the tokens of one sequence, width fastest. Empty where positions come with
            the call.
        channels: of a head, that turn with the frame, the height and the width.
        base: channel pair j of C turns by base^(-2j/C) a step.
        factor, low, high: YaRN, where factor is not 1: pairs below `low` keep their frequency, those above `high` have
            it divided by `factor`, in between there is a ramp (Peng et al., 2023, arXiv:2309.00071).
        attention_factor: what turned channels are multiplied by.
    """

    heads: tuple[int, int, int]
    head_dim: int
    scope: Scope = "hidden"
    interleave: bool = True
    rotary_dim: int = 0
    grid: tuple[int, ...] = ()
    channels: tuple[int, ...] = ()
    base: float = 10000.0
    factor: float = 1.0
    low: float = 0.0
    high: float = 0.0
    attention_factor: float = 1.0

    @property
    def hidden_size(self) -> int:
        """Elements of a token."""
        return sum(self.heads) * self.head_dim

    @property
    def sequence(self) -> int:
        """Tokens of one grid."""
        return math.prod(self.grid)

    def __str__(self) -> str:
        """The layout as a word; `layout_of` reads it."""
        integers = (*self.heads, self.head_dim, self.rotary_dim, int(self.interleave), *self.grid, *self.channels)
        numbers = (self.base, self.factor, self.low, self.high, self.attention_factor)
        return f"{self.scope};{_listed(integers)};{_listed(numbers)}"

    def integers(self) -> list[int]:
        """What a kernel is bound with: heads, head_dim, rotary_dim, grid, the first pairs of the 2nd and 3rd axis."""
        grid, channels = self.grid or (1, 1, 1), self.channels or (0, 0, 0)
        return [*self.heads, self.head_dim, self.rotary_dim, *grid, channels[0] // 2, (channels[0] + channels[1]) // 2]

    def numbers(self) -> list[float]:
        """And further: the attention factor, then the two floats of every pair's frequency in quarter turns a step."""
        return [self.attention_factor, *(part for f in self.frequencies() for part in two_floats(f * _QUARTERS))]

    def frequencies(self) -> tuple[float, ...]:
        """Radians that each pair turns by a step, fp64; none where cosines and sines come with the call."""
        return _frequencies(self.channels, self.base, self.factor, self.low, self.high)


def two_floats(value: float) -> tuple[float, float]:
    """hi, lo: fp32 values whose sum is the fp64 one, but for 2^-48 of it."""
    hi = _fp32(value)
    return hi, _fp32(value - hi)


def _fp32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@functools.lru_cache(maxsize=256)
def _frequencies(channels: tuple[int, ...], base: float, factor: float, low: float, high: float) -> tuple[float, ...]:
    """Powers are exact roundings of the true ones, whatever this machine's libm makes of `pow`."""
    out = []
    with decimal.localcontext(decimal.Context(prec=40)):
        for count in channels:
            for j in range(count // 2):
                frequency = float(decimal.Decimal(base) ** (decimal.Decimal(-2 * j) / decimal.Decimal(count)))
                if factor != 1.0:
                    top = high + 0.001 if abs(low - high) <= 1e-6 else high
                    ramp = min(max((j - low) / (top - low), 0.0), 1.0)
                    frequency = frequency / factor * ramp + frequency * (1.0 - ramp)
                out.append(frequency)
    return tuple(out)


def _listed(numbers: tuple[Any, ...]) -> str:
    return ",".join([repr(n) for n in numbers])


def layout_of(text: Any) -> QkLayout:
    """A layout from its text; raises KeyError where it is none. It traces under compilers."""
    try:
        scope, listed, numbers = text.split(";")
        q, k, v, head_dim, rotary_dim, interleave, *rest = [int(n) for n in listed.split(",")]
        base, factor, low, high, attention = [float(n) for n in numbers.split(",")]
    except (AttributeError, ValueError) as error:
        raise KeyError(text) from error
    if scope not in SCOPES or len(rest) not in (0, 6):
        raise KeyError(text)
    grid, channels = tuple(rest[:3]), tuple(rest[3:])
    turned = (bool(interleave), rotary_dim, grid, channels, base, factor, low, high, attention)
    return QkLayout((q, k, v), head_dim, scope, *turned)


class QkLayouts(Mapping[Any, QkLayout]):
    """All layouts by their texts: the values of an option. It counts a usual one of every kind."""

    def __getitem__(self, text: Any) -> QkLayout:
        return layout_of(text)

    def __iter__(self) -> Iterator[str]:
        return iter(self.words().values())

    def words(self) -> dict[str, str]:
        """The usual ones by what kernels tell apart: "head", "head-neox", ..."""
        found = {}
        for scope in SCOPES:
            for interleave in (True, False):
                layout = QkLayout((24, 24, 24), 128, scope, interleave, 128, (1, 1, 1), (44, 42, 42))
                found[scope + ("" if interleave else "-neox")] = str(layout)
        return found

    def __len__(self) -> int:
        return 2 * len(SCOPES)


@dataclass(frozen=True)
class QkNormRope:
    """Q and K of every token: v = mul(mul(h, rstd), w), rounded to T unless `coded`; then pairs (a, b) turn; one cast.

    rstd = div(1, sqrt(add(div(sum(h*h), n), eps))) over the n elements of the scope; without one, v = h. A missing
    weight is skipped. lo = fma(a, cos, -mul(b, sin)); hi = fma(b, cos, mul(a, sin)); then mul(., attention_factor)
    unless it is 1. `coded`: then mul(., q_scale), of channels that do not turn too, and V is mul(v, v_scale), all cast
    to e4m3; else V is copied.

    The angle of pair p at position t, in quarter turns, is t (hi + lo), its frequency: P = mul(t, hi); e = fma(t, hi,
    -P); k = sub(add(P, 1.5 * 2^23), 1.5 * 2^23); y = add(sub(P, k), fma(t, lo, e)); z = mul(y, y).
    s = mul(y, fma(z, fma(z, fma(z, SIN[3], SIN[2]), SIN[1]), SIN[0]));
    c = fma(z, fma(z, fma(z, fma(z, COS[3], COS[2]), COS[1]), COS[0]), 1). (sin, cos) is (s, c), (c, -s), (-s, -c),
    (-c, s) for k mod 4 = 0 ... 3: within 1e-7.

    `cached`: cosines and sines are the row `positions[m]` of a table, cosines first. A position outside of it makes
    all of the token's Q and K NaN, and reads nothing.
    """

    scope: Scope
    interleave: bool
    cached: bool
    q_weight: bool
    k_weight: bool
    coded: bool
    layout: QkLayout | None = None

    def operands(self) -> tuple[Operand, ...]:
        """Sizes are those of the layout; they say nothing where there is none."""
        layout = self.layout or QkLayout((0, 0, 0), 0)
        q, k, v = layout.heads
        width = layout.head_dim

        def gains(n: int) -> tuple[tuple[int, ...], ...]:
            return (n, width), ((width,) if self.scope == "head" else (n * width,))

        out = [Operand("x", "row", dtypes=FLOATS[1:])]
        out += [Operand("q_weight", "gain", tails=gains(q))] if self.q_weight else []
        out += [Operand("k_weight", "gain", tails=gains(k))] if self.k_weight else []
        if self.cached:
            out.append(Operand("positions", "per_row", dtypes=("int32", "int64")))
            out.append(Operand("cos_sin_cache", "table", dtypes=("float32",), tails=((layout.rotary_dim,),)))
        dtypes = ("float8_e4m3fn",) if self.coded else FLOATS[1:]
        like = None if self.coded else "x"
        for name, n in (("q_out", q), ("k_out", k), ("v_out", v)):
            out.append(Operand(name, "heads", "out", dtypes, like, tails=((n, width),)))
        return tuple(out)

    def scalars(self) -> tuple[str, ...]:
        return ("eps", "output_quant_scale", "v_quant_scale")

    # ------------------------------------------------------------------ what every program says of itself
    @property
    def name(self) -> str:
        return type(self).__name__

    def code(self) -> QkNormRope:
        """What the C++ routes compile for."""
        return replace(self, layout=None)

    def bind(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """The launch of this layout, from a compiled kernel's entry point."""
        assert self.layout is not None
        bound: Callable[..., Any] = kernel(*self.layout.integers(), *self.layout.numbers())
        return bound

    def complaint(self, shape: tuple[Any, ...]) -> str | None:
        """Why an input of this shape does not fit, or None."""
        layout = self.layout
        assert layout is not None
        if len(shape) not in (2, 3):
            return f"must be [num_tokens, C] or [batch, seq_len, C], got {len(shape)} dimensions"
        if shape[-1] != layout.hidden_size:
            q, k, v = layout.heads
            return (
                f"must have a last dimension of ({q} + {k} + {v}) * {layout.head_dim} = {layout.hidden_size}, "
                f"got {shape[-1]}"
            )
        if layout.grid and len(shape) == 3 and shape[1] != layout.sequence:
            return f"must have ppf * pph * ppw = {layout.sequence} tokens a sequence, got {shape[1]}"
        if layout.grid and len(shape) == 2 and shape[0] % layout.sequence:
            return f"must have a multiple of ppf * pph * ppw = {layout.sequence} tokens, got {shape[0]}"
        return None

    def data(self) -> dict[str, Any]:
        """As plain data, for a recipe."""
        return {**asdict(self), "layout": self.layout and str(self.layout)}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> QkNormRope:
        """From `data`; raises KeyError, TypeError or ValueError where it is not that."""
        layout = layout_of(data["layout"])
        flags = {field.name: data[field.name] for field in fields(cls) if field.name != "layout"}
        if flags.pop("scope") not in SCOPES or not all(isinstance(flag, bool) for flag in flags.values()):
            raise ValueError("scope is a word and the rest are flags")
        return cls(scope=data["scope"], layout=layout, **flags)
