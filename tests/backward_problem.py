"""One backward: its values, how it is called in watched buffers, and what must come out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import flashnorm
from flashnorm.ops.backward import layernorm_backward, rmsnorm_backward
from tests.buffers import Guarded, values_for
from tests.canonical import narrow
from tests.canonical.backward import USUAL, Gradients, Order, backward_bits, statistics
from tests.combos import DTYPES
from tests.inputs import gains, rows
from tests.tolerance import assert_same_bits

EPS = 1e-6
SUMS = ("dweight", "dbias")


@dataclass(frozen=True)
class Norm:
    """Which backward, and in which dtypes.

    Attributes:
        centred: LayerNorm's.
        dout, x, weight, dweight: dtypes, of gradients of rows those of dout and x; weight None: there is none.
        offset, round_norm: of the weight, and of the norm that dweight takes.
        joins: a gradient of x itself is added.
        wanted: gradients that are asked for.
    """

    centred: bool = False
    dout: str = "bf16"
    x: str = "bf16"
    weight: str | None = "bf16"
    dweight: str = "f32"
    offset: float = 0.0
    round_norm: bool = False
    joins: bool = False
    wanted: tuple[str, ...] = ("dx", "dweight")

    def __str__(self) -> str:
        words = ["layer" if self.centred else "rms", self.dout, self.x, str(self.weight), self.dweight]
        words += [f"+{self.offset}"] if self.offset else []
        words += [name for name in ("round_norm", "joins") if getattr(self, name)]
        return " ".join([*words, *self.wanted])

    def dtype(self, gradient: str) -> torch.dtype:
        return DTYPES[{"dx": self.dout, "dresidual": self.x}.get(gradient, self.dweight)]


RMS = Norm()
LAYER = Norm(True, wanted=("dx", "dweight", "dbias"))
NORMS = (
    RMS,
    LAYER,
    Norm(dout="f32", x="f32", weight="f32"),
    Norm(dout="f16", x="f32", weight="f32", dweight="f32", joins=True, wanted=("dx", "dresidual", "dweight")),
    Norm(dweight="bf16", offset=1.0, joins=True),
    Norm(round_norm=True, dweight="bf16"),
    Norm(dout="f16", x="f16", weight="bf16", dweight="f16", offset=0.5, round_norm=True),
    Norm(weight=None, wanted=("dx",)),
    Norm(wanted=("dx",)),
    Norm(wanted=("dweight",)),
    Norm(wanted=("dresidual",)),
    Norm(True, dout="f32", x="f32", weight="f32", wanted=("dx", "dweight", "dbias")),
    Norm(True, dout="bf16", x="f32", weight="f16", joins=True, wanted=("dx", "dresidual", "dweight", "dbias")),
    Norm(True, weight=None, wanted=("dx", "dbias")),
    Norm(True, wanted=("dbias",)),
    Norm(True, wanted=("dx", "dweight")),
)


@dataclass
class Problem:
    """The values of one backward.

    Attributes:
        norm: which.
        shape: of the rows.
        weight_lead: sizes of the weight in front of H.
        seed: of the values.
        given: values in place of random ones, by name.
    """

    norm: Norm
    shape: tuple[int, ...]
    weight_lead: tuple[int, ...] = ()
    seed: object = 0
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        norm, shape = self.norm, self.shape
        made = {"dout": rows(shape, DTYPES[norm.dout], "dout", self.seed)}
        made["x"] = rows(shape, DTYPES[norm.x], "x", self.seed)
        if norm.weight is not None:
            made["weight"] = gains((*self.weight_lead, shape[-1]), DTYPES[norm.weight], self.seed)
        if norm.joins:
            made["g_residual"] = rows(shape, DTYPES[norm.x], "joins", self.seed)
        self.values = made | dict(self.given)
        for name, part in zip(self.saved, statistics(self.values["x"], EPS, norm.centred), strict=True):
            self.values.setdefault(name, part)

    @property
    def saved(self) -> tuple[str, ...]:
        return ("mean", "rest", "rstd") if self.norm.centred else ("rstd",)

    @property
    def what(self) -> str:
        return f"{self.norm} {self.shape} {self.weight_lead}"

    def canonical(self, order: Order = USUAL) -> Gradients:
        values, norm = self.values, self.norm
        return backward_bits(
            values["dout"],
            values["x"],
            values.get("weight"),
            values["rstd"],
            means=(values["mean"], values["rest"]) if norm.centred else None,
            g_residual=values.get("g_residual"),
            offset=norm.offset,
            round_norm=norm.round_norm,
            bias=norm.centred,
            order=order,
        )

    def check(self, got: Mapping[str, torch.Tensor], what: str = "", order: Order = USUAL) -> None:
        """Every gradient that is asked for, to the bit, and no other."""
        assert set(got) == set(self.norm.wanted), f"{self.what} {what}: {sorted(got)}"
        want = self.canonical(order)
        for name, tensor in got.items():
            right = getattr(want, name)
            if name in SUMS:
                right = narrow(right, self.norm.dtype(name))
            assert_same_bits(tensor.cpu(), right, f"{self.what} {what}: {name}")

    def run(
        self,
        route: str | None,
        device: torch.device | str = "cpu",
        *,
        layout: str = "contiguous",
        out: str = "none",
        **more: Any,
    ) -> dict[str, torch.Tensor]:
        """Calls the backward with watched buffers; `out`: "none", "alias" (dx over dout), or a layout of rows."""
        norm, what = self.norm, f"{self.what} {layout} {out} on {route}"
        guards = {}
        for name, value in self.values.items():
            mine = layout if name in ("dout", "x", "g_residual") else "contiguous"
            guards[name] = Guarded(value, device, mine, written=name == "dout" and out == "alias")
        wanted: dict[str, Any] = {name: norm.dtype(name) for name in norm.wanted}
        for name in norm.wanted if out != "none" else ():
            if name == "dx" and out == "alias":
                wanted[name] = guards["dout"].view
                continue
            shape = {"dweight": self.values.get("weight", self.values["x"][..., :1]).shape, "dbias": self.shape[-1:]}
            place = "contiguous" if name in SUMS or out == "alias" else out
            guards[name] = Guarded(
                None, device, place, written=True, shape=tuple(shape.get(name, self.shape)), dtype=norm.dtype(name)
            )
            wanted[name] = guards[name].view
        named = {name: guard.view for name, guard in guards.items() if name not in norm.wanted}
        tensors = [named["dout"], named["x"], named.get("weight"), *(named[name] for name in self.saved)]
        call: Callable[..., dict[str, torch.Tensor]] = layernorm_backward if norm.centred else rmsnorm_backward
        if not norm.centred:
            more = {"weight_offset": norm.offset, "round_norm": norm.round_norm, **more}
        with flashnorm.backend(route) if route else contextlib.nullcontext():
            got = call(*tensors, wanted=wanted, g_residual=named.get("g_residual"), **more)
        for name, guard in guards.items():
            guard.check(f"{what}: {name}")
        for name, how in wanted.items():
            assert got[name] is how or not isinstance(how, torch.Tensor), f"{what}: {name}"
        return {name: tensor.cpu() for name, tensor in got.items()}

    def laid_out(self, layout: str) -> Problem:
        """The same problem of the values that a layout can hold."""
        held = {n: values_for(layout, v) for n, v in self.values.items() if n in ("dout", "x", "g_residual")}
        rest = {n: v for n, v in self.values.items() if n == "weight"}
        return Problem(self.norm, self.shape, self.weight_lead, self.seed, {**held, **rest})
