"""One call of `fused_qk_rmsnorm_rope`: its tensors in watched buffers, and what must become of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import flashnorm
from tests.buffers import Guarded
from tests.canonical.qk import copy_bits, frequencies, grid_turns, part_bits, table_turns
from tests.combos import DTYPES
from tests.inputs import gains, indices, rows
from tests.tolerance import assert_same_bits

EPS = 1e-6
PARTS = ("q_out", "k_out", "v_out")
# Products with 16-bit values are exact: decimal ones would often lie on a tie in fp32, and beside it in fp64.
SCALES = (229 / 128, 157 / 256)  # of codes: Q and K, and V
ATTENTION = 147 / 128
YARN = (4.0, 2.0, 9.0)  # factor, low, high


@dataclass(frozen=True)
class Case:
    """What a call asks for.

    Attributes:
        heads, head_dim: of Q, K and V.
        channels: of the axes; empty where there is a table.
        grid: frames, height, width.
        rotary: columns of a table, 0 for none.
        index: dtype of positions.
        scope, interleave: as the operator takes them; scope "none" is is_qk_norm=False.
        x, q_weight, k_weight: dtypes by their short names; None for no weight.
        coded: results in e4m3.
        yarn: frequencies and the attention factor are YaRN's.
    """

    heads: tuple[int, int, int] = (4, 2, 3)
    head_dim: int = 64
    channels: tuple[int, ...] = (24, 20, 20)
    grid: tuple[int, ...] = (3, 2, 5)
    rotary: int = 0
    index: str = "i64"
    scope: str = "hidden"
    interleave: bool = True
    x: str = "bf16"
    q_weight: str | None = "bf16"
    k_weight: str | None = "bf16"
    coded: bool = False
    yarn: bool = False

    @property
    def width(self) -> int:
        return sum(self.heads) * self.head_dim

    @property
    def sequence(self) -> int:
        return 7 if self.rotary else math.prod(self.grid)

    def __str__(self) -> str:
        turns = f"table{self.rotary}-{self.index}" if self.rotary else f"{self.channels}x{self.grid}"
        parts = ["x".join(map(str, self.heads)), self.head_dim, turns.replace(" ", ""), self.scope, self.x]
        flags = {"neox": not self.interleave, "fp8": self.coded, "yarn": self.yarn}
        parts += [f"w={self.q_weight}/{self.k_weight}", *(name for name, on in flags.items() if on)]
        return "-".join(map(str, parts))


USUAL = Case()
# Pairwise: every scope, pairing, kind of result and dtype with each other, on few kernels.
CASES = (
    USUAL,
    Case(interleave=False, x="f16", q_weight="f32", k_weight="f16"),
    Case(coded=True, yarn=True),
    Case(coded=True, interleave=False, scope="head", k_weight="f32"),
    Case(scope="head", yarn=True, q_weight=None),
    Case(scope="none", interleave=False, yarn=True),
    Case(scope="none", x="f16", coded=True, q_weight=None, k_weight=None),
    Case(rotary=32, interleave=False, scope="head", index="i32"),
    Case(rotary=48, x="f16", coded=True),
    Case(rotary=64, interleave=False, k_weight=None),
)


class Problem:
    """The values of one call, on the CPU.

    Args:
        case: what is asked for.
        lead: leading sizes; by default two sequences.
        shared: weights of one head for all of them, where the scope allows it.
        bad: some positions lie outside of the table.
        given: tensors in place of those made here, by the name of the argument.
    """

    def __init__(
        self,
        case: Case,
        lead: tuple[int, ...] = (),
        *,
        shared: bool = False,
        bad: bool = False,
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.case = case
        self.lead = lead or (2, case.sequence)
        key = (str(case), self.lead)
        self.x = rows((*self.lead, case.width), DTYPES[case.x], *key)
        self.weights: dict[str, torch.Tensor | None] = {}
        for name, n, dtype in (("q_weight", case.heads[0], case.q_weight), ("k_weight", case.heads[1], case.k_weight)):
            shape = (case.head_dim,) if shared else (n, case.head_dim)
            self.weights[name] = None if dtype is None else gains(shape, DTYPES[dtype], name, *key)
        self.cache = self.positions = None
        if case.rotary:
            angles = torch.rand(11, case.rotary // 2, generator=torch.Generator().manual_seed(3)) * 6
            self.cache = torch.cat((angles.cos(), angles.sin()), -1)
            self.positions = indices(self.lead, 11, DTYPES[case.index], *key)
            for place, value in zip(range(2 if bad else 0), (-1, 11), strict=False):
                self.positions.view(-1)[place] = value
        given = given or {}
        self.x = given.get("qkv", self.x)
        self.weights = {name: given.get(name, weight) for name, weight in self.weights.items()}
        self.cache = given.get("cos_sin_cache", self.cache)
        self.positions = given.get("positions", self.positions)

    @property
    def what(self) -> str:
        return f"{self.case} {'x'.join(map(str, self.lead))}"

    @property
    def tokens(self) -> int:
        return math.prod(self.lead)

    @property
    def scales(self) -> tuple[float, float]:
        return SCALES if self.case.coded else (1.0, 1.0)

    def options(self) -> dict[str, Any]:
        """Everything that is no tensor."""
        case = self.case
        out: dict[str, Any] = dict(zip(("num_heads_q", "num_heads_k", "num_heads_v"), case.heads, strict=True))
        out |= {"head_dim": case.head_dim, "eps": EPS, "interleave": case.interleave, "output_fp8": case.coded}
        out |= {"is_qk_norm": False} if case.scope == "none" else {"norm_scope": case.scope}
        if not case.rotary:
            names = ("num_frame_channels", "num_height_channels", "num_width_channels", "ppf", "pph", "ppw")
            out |= dict(zip(names, (*case.channels, *case.grid), strict=True))
        if case.yarn:
            out |= dict(zip(("factor", "low", "high"), YARN, strict=True)) | {"attention_factor": ATTENTION}
        if case.coded:
            out |= dict(zip(("output_quant_scale", "v_quant_scale"), SCALES, strict=True))
        return out

    def expected(self) -> tuple[torch.Tensor, ...]:
        """The bits of Q, K and V."""
        case = self.case
        yarn = YARN if case.yarn else None
        if case.rotary:
            assert self.cache is not None and self.positions is not None
            sine, cosine = table_turns(self.cache, self.positions)
        else:
            values = frequencies(case.channels, 10000.0, yarn)
            sine, cosine = grid_turns(self.tokens, case.grid, case.channels, values)
        made = []
        more: dict[str, Any] = {"scope": case.scope, "interleave": case.interleave, "eps": EPS}
        more |= {"attention": ATTENTION if case.yarn else 1.0, "scale": SCALES[0] if case.coded else None}
        q, k, v = self.parts()
        for part, weight in ((q, self.weights["q_weight"]), (k, self.weights["k_weight"])):
            gain = None if weight is None else weight.expand(part.shape[1:])
            made.append(part_bits(part, gain, sine, cosine, **more))
        made.append(copy_bits(v, SCALES[1] if case.coded else None))
        return tuple(t.reshape(*self.lead, n, case.head_dim) for t, n in zip(made, case.heads, strict=True))

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Q, K and V, [tokens, heads, head_dim]."""
        flat = self.x.reshape(self.tokens, self.case.width)
        cuts = flat.split([n * self.case.head_dim for n in self.case.heads], -1)
        return tuple(c.reshape(self.tokens, n, self.case.head_dim) for c, n in zip(cuts, self.case.heads, strict=True))

    def run(
        self,
        route: str | None,
        device: torch.device | str = "cpu",
        *,
        layout: str = "contiguous",
        out: str = "none",
        weight_layout: str = "contiguous",
        flat: bool = False,
        **more: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Calls the operator on a route and returns Q, K and V on the CPU; nothing else was written.

        Args:
            route: forced; None for the device's own.
            device: where the tensors live.
            layout, weight_layout: of the input and positions, and of weights.
            out: layout of the results that are given, "none" for new ones.
            flat: weights come as one dimension.
            more: further keywords.
        """
        case = self.case
        guards = {"qkv": Guarded(self.x, device, layout)}
        for name, weight in self.weights.items():
            if weight is not None:
                guards[name] = Guarded(weight.flatten() if flat else weight, device, weight_layout)
        if self.cache is not None and self.positions is not None:
            guards["cos_sin_cache"] = Guarded(self.cache, device, weight_layout)
            guards["positions"] = Guarded(self.positions, device, layout)
        dtype = torch.float8_e4m3fn if case.coded else self.x.dtype
        if out != "none":
            for name, n in zip(PARTS, case.heads, strict=True):
                shape = (*self.lead, n, case.head_dim)
                guards[name] = Guarded(None, device, out, written=True, shape=shape, dtype=dtype)
        arguments: dict[str, Any] = {"q_weight": None, "k_weight": None}
        arguments |= {name: guard.view for name, guard in guards.items()} | self.options() | more
        with contextlib.nullcontext() if route is None else flashnorm.backend(route):
            made = flashnorm.fused_qk_rmsnorm_rope(**arguments)
        for name, guard in guards.items():
            guard.check(f"{case} on {route}: {name}")
        assert isinstance(made, tuple) and len(made) == 3
        for name, tensor, n in zip(PARTS, made, case.heads, strict=True):
            assert name not in guards or tensor is guards[name].view
            assert tensor.shape == (*self.lead, n, case.head_dim) and tensor.dtype == dtype
        return tuple(t.cpu() for t in made)

    def check(self, got: tuple[torch.Tensor, ...], what: str = "") -> None:
        for name, mine, want in zip(PARTS, got, self.expected(), strict=True):
            assert_same_bits(mine, want, f"{self.case} {what}: {name}")
