"""Operators with gates: what is tested of them, and one call of it, its tensors watched like those of `problem`.

The LayerNorms of diffusion transformers (`fused_dit_*`), residual mixes (`gated_residual_*`) and `rmsnorm_sigmoid_gate`
take more kinds of tensors than a `Problem` knows; they have combinations and problems of their own.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch

import flashnorm
from flashnorm.ops import dit, gated
from tests import canonical, gate_oracles
from tests.buffers import Guarded, from_tiles, values_for
from tests.combos import DTYPES
from tests.gatecombos import DIT, GATE, MIX, MIXES, NEXT, OPS, A, B, C, GateCombo, modulation_shape
from tests.inputs import SPECIAL, gains, generator, rows
from tests.judge import scaled
from tests.oracles import Expected
from tests.tolerance import Pool, assert_near, assert_same_bits

FUNCTIONS = {name: getattr(dit if name in DIT else gated, name) for name in OPS}
G, FACTOR, ALPHA, CENTER, NEXT_CENTER, NEXT_EPS = 229 / 2, 0.6, 0.75, 1.0, 0.5, 1e-5


@dataclass
class GateCall:
    """The keywords of one call, in watched buffers."""

    problem: GateProblem
    guards: dict[str, Guarded]
    arguments: dict[str, Any]

    def __call__(self, route: str | None = None) -> dict[str, torch.Tensor]:
        function = FUNCTIONS[self.problem.combo.op]
        with contextlib.nullcontext() if route is None else flashnorm.backend(route):
            return self.outcome(function(**self.arguments), f"{self.problem.what} on {route}")

    def outcome(self, result: Any, what: str) -> dict[str, torch.Tensor]:
        """What the call left, on the CPU; nothing else was written."""
        for name, guard in self.guards.items():
            guard.check(f"{what}: {name}")
        return {name: tensor.cpu() for name, tensor in self.left(result, what).items()}

    def left(self, result: Any, what: str = "") -> dict[str, torch.Tensor]:
        combo = self.problem.combo
        if combo.op == GATE:
            assert result is None, what
            return {"input": self.arguments["input"]}
        made = result if isinstance(result, tuple) else (result,)
        found = dict(zip(combo.written, made, strict=True))
        for name, tensor in found.items():
            mine = self.arguments.get(name)
            assert mine is None or tensor is mine, f"{what}: {name} must be returned itself"
        return found


@dataclass
class GateProblem:
    """The values of one call, on the CPU.

    Attributes:
        combo, shape: what is called; [B, R, H] or [..., H].
        device: where the tensors will live.
        layout, residual_layout, vec_layout: of the input (and a gate of its shape), the residual, and vectors.
        special: names of `SPECIAL` rows, written over the first rows of the input; the residual is zero there.
        eps: of the call.
        seed: part of the key that the numbers are drawn with.
        given: values to use in place of random ones, by public name.
    """

    combo: GateCombo
    shape: tuple[int, ...]
    device: torch.device | str = "cpu"
    layout: str = "contiguous"
    residual_layout: str | None = None
    vec_layout: str = "contiguous"
    special: tuple[str, ...] = ()
    eps: float = 1e-6
    seed: object = 0
    given: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        combo, shape = self.combo, self.shape
        x_name = "branch" if combo.op in MIXES else "input"
        x, vec = DTYPES[combo.x], DTYPES[combo.vec]
        made = {x_name: self._value(x_name, shape, x)}
        if combo.residual is not None:
            made["residual"] = self._value("residual", shape, DTYPES[combo.residual])
        if combo.op == GATE:
            made["gate"] = self._value("gate", shape, vec)
        for name in {A: ("gate",), B: ("gate", "scale", "shift"), C: ("scale", "shift")}.get(combo.op, ()):
            made[name] = self._value(name, modulation_shape(combo.over, shape), vec)
            if combo.bias is not None:
                made[f"{name}_bias"] = self._value(f"{name}_bias", shape[-1:], DTYPES[combo.bias])
        first = {MIX: "weight", NEXT: "post_weight", GATE: "weight"}.get(combo.op)
        if first is not None and combo.bias is not None:
            made[first] = self._value(first, shape[-1:], DTYPES[combo.bias])
        names: tuple[str, ...] = {A: ("gamma", "beta"), MIX: ("alpha", "beta")}.get(combo.op, ())
        names = ("alpha", "beta", "next_weight") if combo.op == NEXT else names
        for name in names:
            if name != "alpha" or combo.number != "value":
                made[name] = self._value(name, shape[-1:], vec)
        for i, name in enumerate(self.special):
            SPECIAL[name](made[x_name].view(-1, shape[-1])[i])
            if "residual" in made:
                made["residual"].view(-1, shape[-1])[i] = 0
        self.tensors = {name: values_for(self._layout(name), tensor) for name, tensor in made.items()}

    def _value(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name in self.given:
            return self.given[name].clone()
        if name in ("input", "branch", "residual"):
            return rows(shape, dtype, name, self.seed)
        if name == "gate" and self.combo.op == GATE:  # as far as the exponential's accuracy is promised, and denser
            return (torch.randn(shape, generator=generator("gate", shape, self.seed)) * 6).clamp(-80, 80).to(dtype)
        return gains(shape, dtype, name, self.seed)

    def _layout(self, name: str) -> str:
        if name == "residual":
            return self.residual_layout or self.layout
        rowed = name in ("input", "branch") or (name == "gate" and self.combo.op == GATE)
        return self.layout if rowed else self.vec_layout

    @property
    def what(self) -> str:
        return f"{self.combo} {self.shape} {self.layout}"

    # -------------------------------------------------------------- the call
    def prepare(self, out: str = "none", *, enable_pdl: bool | None = None, **more: Any) -> GateCall:
        """Lays everything out.

        Args:
            out: "none", "alias" (every output that may be is an input), or the layout of given, poisoned outputs.
            enable_pdl: passed on.
            more: further keywords.
        """
        combo = self.combo
        aliases = combo.aliases if out == "alias" else {}
        mutated = {*aliases.values(), *(["input"] if combo.op == GATE else [])}
        guards = {
            name: Guarded(tensor, self.device, self._layout(name), written=name in mutated)
            for name, tensor in self.tensors.items()
        }
        if out != "none" and combo.op != GATE:
            want = self.canonical_shapes()
            for name in combo.written:
                if name not in aliases:
                    shape, dtype = want[name]
                    codes = dtype in (torch.int32, torch.uint8)
                    layout = "contiguous" if codes or out == "alias" else out
                    new: dict[str, Any] = {"shape": shape, "dtype": dtype, "poison": 0x5B if codes else None}
                    guards[name] = Guarded(None, self.device, layout, written=True, **new)
        arguments: dict[str, Any] = {name: guard.view for name, guard in guards.items()}
        arguments |= {name: arguments[like] for name, like in aliases.items()}
        arguments |= self.options() | {"enable_pdl": enable_pdl, "numerics": combo.numerics} | more
        return GateCall(self, guards, arguments)

    def canonical_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every output."""
        combo, x = self.combo, DTYPES[self.combo.x]
        stored = x if combo.residual is None else DTYPES[combo.residual]
        found = {"residual_out": (self.shape, stored), "norm_out": (self.shape, x), "ffn_input": (self.shape, x)}
        found["out"] = (self.shape, stored)
        if combo.form:
            batches, count, hidden = self.shape
            found["norm_out"] = ((batches, count, hidden // (8 if combo.form == "nvfp4" else 4)), torch.int32)
            across = -(-hidden // (4 * combo.whole))
            found["sf_out"] = ((batches, -(-count // 128), across, 32, 4, 4), torch.uint8)
        return found

    def options(self) -> dict[str, Any]:
        """Keywords that are no tensors of a kernel's rows or vectors."""
        combo = self.combo

        def number(value: float) -> float | torch.Tensor:
            return value if combo.number == "value" else torch.tensor([value], device=self.device)

        if combo.op in DIT:
            found: dict[str, Any] = {"epsilon": self.eps}
            if combo.number:
                found["input_global_scaling_factor"] = number(FACTOR)
            if combo.form:
                found |= {f"use_{combo.form}": True, "return_scales": True}
            if combo.form == "nvfp4":
                found["global_scaling_factor"] = number(G)
            return found
        if combo.op == GATE:
            choices = {"activation": combo.activation, "norm_before_gate": combo.before, "group_size": combo.group}
            return {"eps": self.eps, **choices, **({} if combo.bias else {"weight": None})}
        found = {"alpha": ALPHA} if combo.number == "value" else {}
        if combo.op == MIX:
            return found | {"eps": self.eps, "gain_center": CENTER, **({} if combo.bias else {"weight": None})}
        numbers = {"post_eps": self.eps, "next_eps": NEXT_EPS}
        return found | numbers | {"post_gain_center": CENTER, "next_gain_center": NEXT_CENTER}

    def run(self, route: str | None, out: str = "none", *, enable_pdl: bool | None = None) -> dict[str, torch.Tensor]:
        return self.prepare(out, enable_pdl=enable_pdl)(route)

    # -------------------------------------------------------------- what must come out
    def _over(self, name: str) -> torch.Tensor:
        """Modulation over [B, R, H]."""
        tensor = self.tensors[name]
        return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor

    def _arguments(self) -> dict[str, Any]:
        """What both models take, but for input and residual."""
        combo, t = self.combo, self.tensors
        if combo.op in DIT:
            found = {name: self._over(name) for name in ("gate", "scale", "shift") if name in t}
            names = ("gate_bias", "scale_bias", "shift_bias", "gamma", "beta")
            found |= {name: t[name] for name in names if name in t}
            return found | {"factor": FACTOR if combo.number else 1.0, "eps": self.eps, "numerics": combo.numerics}
        if combo.op == GATE:
            options = {"group": combo.group, "activation": combo.activation, "before": combo.before}
            return {"weight": t.get("weight"), "eps": self.eps, **options}
        weight = t.get("weight" if combo.op == MIX else "post_weight")
        return {"weight": weight, "alpha": t.get("alpha", ALPHA), "beta": t["beta"], "eps": self.eps, "center": CENTER}

    def canonical(self) -> dict[str, torch.Tensor]:
        """The bits that every exact route must leave."""
        combo, t, given = self.combo, self.tensors, self._arguments()
        if combo.op in DIT:
            return canonical.gates.dit(t["input"], t.get("residual"), form=combo.form, gain=G, **given)
        if combo.op == GATE:
            return {"input": canonical.gates.gated(t["input"], t["gate"], **given)}
        stored = canonical.gates.mix(t["branch"], t["residual"], **given)
        if combo.op == MIX:
            return {"out": stored}
        following = canonical.gates.following(stored, t["next_weight"], t["branch"].dtype, NEXT_EPS, NEXT_CENTER)
        return {"residual_out": stored, "ffn_input": following}

    @property
    def near(self) -> bool:
        """Whether a route may differ from the canonical bits: GPUs have an exponential of their own for 16 bits."""
        return self.combo.op == GATE and self.combo.x != "f32" and torch.device(self.device).type == "cuda"

    def check_bits(self, got: dict[str, torch.Tensor], what: str = "") -> None:
        """Every tensor of an outcome against the canonical bits."""
        want = self.canonical()
        assert got.keys() == want.keys(), f"{self.what} {what}"
        compare = assert_near if self.near else assert_same_bits
        for name, tensor in got.items():
            compare(tensor.contiguous(), want[name], f"{self.what} {what}: {name}")

    def oracle(self, got: dict[str, torch.Tensor]) -> dict[str, Expected]:
        """The formulas, in fp64; a second norm is of the sum that was stored."""
        combo, t, given = self.combo, self.tensors, self._arguments()
        if combo.op in DIT:
            return {"norm_out": gate_oracles.dit(t["input"], t.get("residual"), **given)}
        if combo.op == GATE:
            return {"input": gate_oracles.gated(t["input"], t["gate"], **given)}
        want = {combo.written[0]: gate_oracles.mix(t["branch"], t["residual"], **given)}
        if combo.op == NEXT:
            stored, weight = got["residual_out"], t["next_weight"]
            want["ffn_input"] = gate_oracles.following(stored, weight, t["branch"].dtype, NEXT_EPS, NEXT_CENTER)
        return want

    def accuracy(self, got: dict[str, torch.Tensor], pool: Pool, what: str) -> None:
        """Judges every output by the contract's rule; a stored sum bit for bit."""
        for name, want in self.oracle(got).items():
            if want.residual is not None:
                assert_same_bits(got["residual_out"].contiguous(), want.residual, f"{what}: residual_out")
            if not self.combo.form:
                pool.add(got[name], want, f"{what}: {name}")
                continue
            codes, scales = self.decoded(got, what)
            rounded = Expected(want.rounded.double(), want.rounded, None, want.rstd, want.judged)
            gain = G if self.combo.form == "nvfp4" else 1.0
            scaled(rounded, canonical.Bits(codes, scale=scales), pool, what, block=self.combo.whole, gain=gain)

    def decoded(self, got: dict[str, torch.Tensor], what: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        """(codes [B, R, ...], scales [rows, blocks]) in their dtypes; padding is zero."""
        _, count, hidden = self.shape
        four = self.combo.form == "nvfp4"
        codes = got["norm_out"].contiguous().view(torch.uint8)
        codes = codes.view(torch.float4_e2m1fn_x2 if four else torch.float8_e4m3fn)
        kept = [from_tiles(tiles, count, hidden // self.combo.whole, what) for tiles in got["sf_out"]]
        scales = torch.cat(kept)
        return codes, scales.view(torch.float8_e4m3fn) if four else scales

    @property
    def count(self) -> int:
        return math.prod(self.shape[:-1])


def judge(problem: GateProblem, route: str, out: str = "none") -> None:
    """Exact routes give the canonical bits; the torch route stays within the tolerance."""
    got = problem.run(route, out)
    if route == "torch":
        problem.accuracy(got, Pool(problem.combo.numerics), f"{problem.what} on torch")
    else:
        problem.check_bits(got, f"out {out} on {route}")
