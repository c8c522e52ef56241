"""Q and K normalised and turned, V copied: `fused_qk_rmsnorm_rope` and its contenders.

A shape is tokens and the elements of one: Q, K and V of H / 384 heads of 128, as video models have them; other widths
get narrower heads.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashnorm
from flashnorm.backends import builder
from flashnorm.jit.arch import device_arch
from flashnorm.program import QkLayout, QkNormRope, Variant

from . import rivals
from .bars import CUDA, Bars, Shape
from .entry import Bench, Bind, Buffers
from .measure import Call
from .rivals import EPS
from .roofline import Buffer

TOKENS = 32760  # of a video of 81 frames at 832 x 480
GRID = (21, 30, 52)
HEADS = (12, 24)
MANY_HEADS = 40  # more than FlashInfer takes
CEILING = 0.88
AGAINST_FLASHINFER = 0.6


def _width(heads: int) -> int:
    return 3 * 128 * heads


@functools.cache
def layout_for(tokens: int, hidden_size: int) -> QkLayout:
    """Heads, channels and grid of a shape."""
    if hidden_size % _width(1) == 0:
        heads, width = (hidden_size // _width(1),) * 3, 128
    else:
        width = next((unit for unit in (64, 32, 16, 8, 2) if hidden_size % (4 * unit) == 0), 0)
        if not width:
            raise ValueError(f"no heads make {hidden_size} elements")
        third = hidden_size // width // 3
        heads = (hidden_size // width - 2 * third, third, third)
    part = width // 6 * 2
    grid = GRID if tokens == TOKENS else (1, 1, tokens)
    return QkLayout(heads, width, rotary_dim=width, grid=grid, channels=(width - 2 * part, part, part))  # type: ignore[arg-type]


def _keywords(layout: QkLayout, coded: bool) -> dict[str, Any]:
    """Everything that is no tensor, as the public functions take it."""
    names = ("num_heads_q", "num_heads_k", "num_heads_v", "ppf", "pph", "ppw")
    names += ("num_frame_channels", "num_height_channels", "num_width_channels")
    out: dict[str, Any] = dict(zip(names, (*layout.heads, *layout.grid, *layout.channels), strict=True))
    return out | {"head_dim": layout.head_dim, "eps": EPS, "output_fp8": coded}


def _call(function: Callable[..., Any], coded: bool, t: Buffers) -> Call:
    more = _keywords(layout_for(*t.x.shape), coded)
    return partial(function, t.x, t.q_weight, t.k_weight, **more, q_out=t.q_out, k_out=t.k_out, v_out=t.v_out)


def _flashinfer(coded: bool, t: Buffers) -> Call:
    return _call(importlib.import_module("flashinfer.norm").fused_qk_rmsnorm_rope, coded, t)


def _formula(coded: bool, compiled: bool, t: Buffers) -> Call:
    """The formula as models have it, sines and cosines made beforehand."""
    layout = layout_for(*t.x.shape)
    cos, sin = (turns.float().to(t.x.device) for turns in turns_of(layout))
    formula = rivals.qk_norm_rope_codes if coded else rivals.qk_norm_rope
    formula = rivals.compiled(formula, t.x.shape) if compiled else formula
    return partial(formula, t.x, t.q_weight, t.k_weight, cos, sin, layout.heads, layout.head_dim)


def turns_of(layout: QkLayout) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a sequence, [tokens, pairs], fp64."""
    _, height, width = layout.grid
    token = torch.arange(layout.sequence)
    axes = (token // (height * width), token // width % height, token % width)
    powers = [torch.arange(0, count, 2, dtype=torch.float64) / count for count in layout.channels]
    angles = [axis.unsqueeze(-1) * layout.base**-power for axis, power in zip(axes, powers, strict=True)]
    whole = torch.cat(angles, -1)
    return whole.cos(), whole.sin()


@dataclass(frozen=True)
class QkBench(Bench):
    """A bench whose program is no row program."""

    coded: bool = False

    def _program(self, tokens: int, hidden_size: int) -> QkNormRope:
        return QkNormRope("hidden", True, False, True, True, self.coded, layout_for(tokens, hidden_size))

    def variant(self, hidden_size: int, dtype: torch.dtype) -> Variant:
        return self._variant(1, hidden_size, dtype)

    def _variant(self, tokens: int, hidden_size: int, dtype: torch.dtype) -> Variant:
        buffers = self.buffers(tokens, hidden_size, dtype)
        dtypes = tuple(str(buffer.dtype).removeprefix("torch.") for buffer in buffers)
        return Variant(self._program(tokens, hidden_size), dtypes, hidden_size)

    def bare(self, route: str) -> Bind:
        def bind(t: Buffers) -> Call:
            capability = torch.cuda.get_device_capability(t.x.device) if t.x.is_cuda else None
            target = "host" if capability is None else device_arch(*capability).name
            variant, layout = self._variant(*t.x.shape, t.x.dtype), layout_for(*t.x.shape)
            launch = builder(route)(variant, target)
            weights = (w.view(n, layout.head_dim) for w, n in zip((t.q_weight, t.k_weight), layout.heads, strict=False))
            return partial(launch, EPS, 1.0, 1.0, t.x.is_cuda, t.x, *weights, t.q_out, t.k_out, t.v_out)

        return bind

    def buffers(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> list[Buffer]:
        layout = layout_for(num_tokens, hidden_size)
        out = torch.float8_e4m3fn if self.coded else dtype
        made = [Buffer("x", (num_tokens, hidden_size), dtype)]
        made += [
            Buffer(name, (n * layout.head_dim,), dtype, kind="vec")
            for name, n in zip(("q_weight", "k_weight"), layout.heads, strict=False)
        ]
        return made + [
            Buffer(name, (num_tokens, n, layout.head_dim), out, "out", "heads")
            for name, n in zip(("q_out", "k_out", "v_out"), layout.heads, strict=True)
        ]

    def values(self, t: Buffers, returned: object, rows: Sequence[int]) -> Tensor:
        if isinstance(returned, Tensor):  # in one piece
            return returned[list(rows)].double()
        assert isinstance(returned, (tuple, list))
        return torch.cat([part[list(rows)].double().flatten(1) for part in returned], -1)

    def expected(self, t: Buffers, rows: Sequence[int]) -> Tensor:
        layout, x = layout_for(*t.x.shape), t.x[list(rows)].double()
        cos, sin = (turns[[row % layout.sequence for row in rows]].to(x.device) for turns in turns_of(layout))
        weights = (t.q_weight.double(), t.k_weight.double())
        parts = rivals.qk_norm_rope(x, *weights, cos, sin, layout.heads, layout.head_dim)
        return torch.cat([part.flatten(1) for part in parts], -1)

    def reason_wrong(self, t: Buffers, returned: object, distance: float) -> str | None:
        limit = 5e-2 if self.coded else 2e-2
        return None if distance <= limit else f"wrong result: relative L2 error {distance:.1e}"


def _bench(form: str, coded: bool, heads: Sequence[int]) -> QkBench:
    shapes: tuple[Shape, ...] = tuple((TOKENS, _width(n)) for n in heads)
    bars = Bars(CUDA, AGAINST_FLASHINFER, 0.0, ("flashinfer cuda",), ceiling=dict.fromkeys(shapes, CEILING))
    peers: dict[str, Bind] = {"torch": partial(_formula, coded, False), "torch.compile": partial(_formula, coded, True)}
    if MANY_HEADS in heads:
        bars = replace(bars, ratio=None)
    else:
        peers["flashinfer cuda"] = partial(_flashinfer, coded)
    ours = partial(_call, flashnorm.fused_qk_rmsnorm_rope, coded)
    op = "fused_qk_rmsnorm_rope"
    behind = f"{op}_fp8" if coded else ""
    return QkBench(op, ours, peers, form, shapes=shapes, bars=bars, behind=behind, coded=coded)


ENTRIES = (
    _bench("bf16", False, HEADS),
    _bench("bf16_40_heads", False, (MANY_HEADS,)),
    _bench("e4m3", True, HEADS),
    _bench("e4m3_40_heads", True, (MANY_HEADS,)),
)
