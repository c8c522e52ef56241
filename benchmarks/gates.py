"""The operators with gates: DiT's LayerNorms, residual mixes, the norm under a gate; who is measured at what."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashnorm
from flashnorm.model import exact
from flashnorm.ops.modulation import MODULATION
from flashnorm.program import BlockScales, Cast, QuantNvfp4, Round, RowProgram, Variant
from flashnorm.scales import dequantize, unswizzle_scales

from .bars import CUDA, Bars, Shape
from .entry import SCALARS, Bench, Bind, Buffers, over_buffers
from .measure import Call
from .rivals import EPS
from .roofline import Buffer

A, B, C = (
    "fused_dit_gate_residual_layernorm_gamma_beta",
    "fused_dit_gate_residual_layernorm_scale_shift",
    "fused_dit_residual_layernorm_scale_shift",
)
MIX, NEXT, GATE = "gated_residual_rmsnorm", "gated_residual_next_rmsnorm", "rmsnorm_sigmoid_gate"

# Tokens of one video, of two (guidance), of a long one; widths of the 5B and 14B models.
TWO = 15360
DIT_TABLE: tuple[Shape, ...] = tuple((tokens, width) for width in (3072, 5120) for tokens in (1920, TWO, 32760))
MIX_TABLE: tuple[Shape, ...] = tuple((rows, 8192) for rows in (1, 8, 64, 512, 1024, 4096, 8192))
HEADS_TABLE: tuple[Shape, ...] = (*MIX_TABLE, (128, 64), (8192, 64), (131072, 64), (1048576, 64))
_DIT_BARS = Bars(
    CUDA, ratio=1.03, slack_us=0.0, rivals=("torch.compile", "flashinfer cuda"),
    ceiling={shape: 0.93 for shape in DIT_TABLE if shape[0] > TWO},
)  # fmt: skip
_CODES_BARS = Bars(CUDA, ratio=1.0, slack_us=0.0, rivals=("torch.compile",))
_MIX_BARS = Bars(
    ratio=1.0,
    slack_us=0.05,
    rivals=("torch.compile",),
    ceiling={shape: 0.85 for shape in MIX_TABLE if shape[0] >= 4096},
)


@dataclass(frozen=True)
class GateBench(Bench):
    """A bench whose operands are more than rows, a weight and a bias.

    Attributes:
        absent: optional operands that are left out.
        per_token: modulation is a slice of [tokens, 6 H] for each token, and no vector.
    """

    absent: tuple[str, ...] = ()
    per_token: bool = False

    def program(self) -> RowProgram:
        declared = self.declared
        without = {*self.absent, *(name for name in declared.by_value if name != "alpha")}
        options = {key: next(iter(values.values())) for key, values in declared.options.items()}
        return declared.program(frozenset(o.name for o in declared.operands if o.name not in without), options)

    def variant(self, hidden_size: int, dtype: torch.dtype) -> Variant:
        found = super().variant(hidden_size, dtype)
        mine = tuple(o.name for o in found.program.operands() if self.per_token and o.name in MODULATION)
        return replace(found, row_vecs=mine)

    def buffers(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> list[Buffer]:
        found, store = super().buffers(num_tokens, hidden_size, dtype), self.program().store
        for i, buffer in enumerate(found):
            if self.per_token and buffer.name in MODULATION:
                found[i] = replace(buffer, shape=(num_tokens, hidden_size))
            elif buffer.kind == "swizzled" and isinstance(store, BlockScales):
                rows, columns = -(-num_tokens // 128) * 128, store.columns(hidden_size, buffer.kind)
                found[i] = replace(buffer, shape=(rows, columns))
        return found

    def make_sets(
        self, count: int, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> list[Buffers]:
        found = super().make_sets(count, num_tokens, hidden_size, dtype, device)
        for t in found if self.per_token else ():
            slices = torch.empty(num_tokens, 6 * hidden_size, dtype=dtype, device=t.x.device).chunk(6, dim=1)
            for name, part in zip(MODULATION, slices, strict=False):
                if hasattr(t, name):
                    setattr(t, name, part.copy_(getattr(t, name)))
        return found

    def result(self, t: Buffers, returned: object) -> Tensor:
        """The norm comes second, after the sum; ours is in batches."""
        if self.op not in (A, B, C) or isinstance(returned, Tensor):  # a tensor: the ceiling's
            return super().result(t, returned)
        norm: Tensor = returned[1] if isinstance(returned, (tuple, list)) else t.out
        norm = norm.flatten(0, -2)
        return norm.view(t.out.dtype) if norm.dtype == torch.int32 else norm

    def values(self, t: Buffers, returned: object, rows: Sequence[int]) -> Tensor:
        store = self.program().store
        if isinstance(returned, Tensor):
            return returned[list(rows)].double()
        if not isinstance(store, BlockScales):
            return super().values(t, returned, rows)
        if isinstance(returned, (tuple, list)) and len(returned) > 2:  # a peer has scales by rows
            scale = returned[2]
        else:
            scale = unswizzle_scales(t.scale, t.x.shape[0], store.blocks(t.x.shape[-1]))
        kind = torch.float8_e4m3fn if isinstance(store, QuantNvfp4) else torch.uint8
        codes, beside = self.result(t, returned)[list(rows)], scale[list(rows)].view(kind)
        return dequantize(codes, beside, block_size=store.block, dtype=torch.float64)

    def expected(self, t: Buffers, rows: Sequence[int]) -> Tensor:
        program = self.program()
        maps = tuple(stage for stage in program.maps if not isinstance(stage, Round))
        plain = replace(program, maps=maps, store=Cast(), saves=())
        given = {}
        for operand in plain.operands():
            tensor = t.x if operand.name == "out" else getattr(t, operand.name)
            given[operand.name] = tensor[list(rows)] if tensor.dim() > 1 else tensor
        return exact(plain, given, SCALARS)["out"].double()


# ------------------------------------------------------------------ formulas
def _gated(x: Tensor, residual: Tensor, gate: Tensor, gate_bias: Tensor) -> Tensor:
    return x.float() * (gate + gate_bias) + residual.float()


def _modulated(h: Tensor, scale: Tensor, scale_bias: Tensor, shift: Tensor, shift_bias: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:], eps=EPS) * (1 + (scale + scale_bias)) + (shift + shift_bias)


def gamma_beta(x: Tensor, residual: Tensor, gate: Tensor, gate_bias: Tensor, gamma: Tensor, beta: Tensor) -> Any:
    h = _gated(x, residual, gate, gate_bias)
    return h.to(x.dtype), F.layer_norm(h, gamma.shape, gamma, beta, EPS).to(x.dtype)


def gate_scale_shift(
    x: Tensor, residual: Tensor, gate: Tensor, gate_bias: Tensor, *modulation: Tensor
) -> tuple[Tensor, Tensor]:
    h = _gated(x, residual, gate, gate_bias)
    return h.to(x.dtype), _modulated(h, *modulation).to(x.dtype)


def scale_shift(x: Tensor, residual: Tensor, *modulation: Tensor) -> tuple[Tensor, Tensor]:
    h = x.float() + residual.float()
    return h.to(x.dtype), _modulated(h, *modulation).to(x.dtype)


def gate_scale_shift_mxfp8(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, n = gate_scale_shift(*given)
    v = n.float().unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(v.abs().amax(-1, keepdim=True) / 448))
    codes = (v * torch.exp2(-exponent)).flatten(-2).to(torch.float8_e4m3fn)
    return h, codes, (exponent + 127).to(torch.uint8).squeeze(-1)


def mixed(x: Tensor, gain: Tensor, alpha: Tensor, beta: Tensor, residual: Tensor) -> Tensor:
    v = x.float() * (gain.float() + SCALARS["center"])
    return alpha * residual + beta * F.rms_norm(v, v.shape[-1:], eps=EPS)


def mixed_next(*given: Tensor) -> tuple[Tensor, Tensor]:
    *mine, weight = given
    r = mixed(*mine)
    n = F.rms_norm(r, r.shape[-1:], eps=SCALARS["next_eps"])
    return r, (n * (weight.float() + SCALARS["next_center"])).to(given[0].dtype)


def under_a_gate(x: Tensor, gate: Tensor) -> Tensor:
    return (F.rms_norm(x.float(), x.shape[-1:], eps=EPS) * torch.sigmoid(gate.float())).to(x.dtype)


# ------------------------------------------------------------------ calls
def _batches(t: Buffers) -> int:
    return 2 if t.x.shape[0] == TWO else 1


def _over(t: Buffers, name: str) -> Tensor:
    """Rows, codes or modulation as [B, R, ...]; one vector for all as [B, 1, H]; scales as they are given."""
    tensor, batches = getattr(t, name), _batches(t)
    if name == "scale":
        return tensor.view(batches, -1, tensor.shape[1] // 4, 32, 4, 4)
    if tensor.dim() == 1:
        return tensor.view(1, 1, -1).expand(batches, 1, -1)
    if tensor.element_size() == 1:
        tensor = tensor.view(torch.int32)
    return tensor.unflatten(0, (batches, -1))


def _dit(op: str, t: Buffers, library: Any, **more: Any) -> Call:
    """A library's function over the buffers; FlashInfer's has the same parameters."""
    over, outs = partial(_over, t), {"residual_out": _over(t, "residual_out"), "norm_out": _over(t, "out")}
    function = getattr(library, op)
    if op == A:
        return partial(
            function, over("x"), over("residual"), over("gate"), t.weight, t.bias,
            gate_bias=t.gate_bias, epsilon=EPS, **outs, **more,
        )  # fmt: skip
    biases = {"scale_bias": t.mod_scale_bias, "shift_bias": t.shift_bias, "epsilon": EPS, **outs, **more}
    scale, shift = over("mod_scale"), over("shift")
    if op == C:
        return partial(function, over("x"), scale, shift, residual=over("residual"), **biases)
    return partial(
        function, over("x"), over("residual"), over("gate"), scale, shift, gate_bias=t.gate_bias, **biases
    )  # fmt: skip


_MODULATION = ("mod_scale", "mod_scale_bias", "shift", "shift_bias")
_GATED = ("x", "residual", "gate", "gate_bias")
_FORMULAS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    A: (gamma_beta, (*_GATED, "weight", "bias")),
    B: (gate_scale_shift, (*_GATED, *_MODULATION)),
    C: (scale_shift, ("x", "residual", *_MODULATION)),
}
_WIDE = dict.fromkeys(("gate_bias", "mod_scale_bias", "shift_bias", "weight", "bias"), "float32")


def _dit_bench(op: str, per_token: bool) -> GateBench:
    formula, names = _FORMULAS[op]
    peers: dict[str, Bind] = over_buffers(formula, *names)
    if per_token:  # the only layout that it has, at a width of 3072
        peers["flashinfer cuda"] = lambda t: _dit(op, t, importlib.import_module("flashinfer.norm"))
    return GateBench(
        op, lambda t: _dit(op, t, flashnorm), peers, form="temb" if per_token else "", dtypes=_WIDE,
        shapes=DIT_TABLE, bars=_DIT_BARS, per_token=per_token,
    )  # fmt: skip


def _codes_bench(form: str) -> GateBench:
    """The form most used, in codes; scales lie in tiles."""
    more = {"use_nvfp4": True, "global_scaling_factor": 1.0} if form == "nvfp4" else {"use_mxfp8": True}
    formula, names = (gate_scale_shift_mxfp8 if form == "mxfp8" else None), _FORMULAS[B][1]
    return GateBench(
        B, lambda t: _dit(B, t, flashnorm, sf_out=_over(t, "scale"), **more),
        over_buffers(formula, *names) if formula else {}, form=form, behind=f"{B}_{form}",
        dtypes={**_WIDE, "scale": "uint8", **({"out": "uint8"} if form == "nvfp4" else {})},
        shapes=DIT_TABLE, bars=_CODES_BARS,
    )  # fmt: skip


def _mix(t: Buffers, library: Any = flashnorm) -> Call:
    center = SCALARS["center"]
    return partial(library.gated_residual_rmsnorm, t.x, t.residual, t.gain, t.alpha, t.beta, EPS, center, t.out)


def _mix_next(t: Buffers, library: Any = flashnorm) -> Call:
    eps, center, next_center = SCALARS["next_eps"], SCALARS["center"], SCALARS["next_center"]
    given = (t.x, t.residual, t.next_weight, t.alpha, t.beta, EPS, eps, next_center, t.residual_out, t.ffn_input)
    return partial(library.gated_residual_next_rmsnorm, *given, post_weight=t.gain, post_gain_center=center)


def _flashinfer(bind: Callable[..., Call]) -> Bind:
    """FlashInfer's kernel; it has one for Blackwell alone, and says so elsewhere."""
    return lambda t: bind(t, importlib.import_module("flashinfer.norm"))


def _gate(t: Buffers, library: Any = flashnorm) -> Call:
    return partial(library.rmsnorm_sigmoid_gate, t.x, t.gate, EPS)


_STREAM = dict.fromkeys(("residual", "residual_out", "alpha", "beta"), "float32")
ENTRIES: tuple[GateBench, ...] = (
    *(_dit_bench(op, per_token) for op in (A, B, C) for per_token in (False, True)),
    *(_codes_bench(form) for form in ("nvfp4", "mxfp8")),
    GateBench(
        MIX, _mix,
        {
            **over_buffers(mixed, "x", "gain", "alpha", "beta", "residual"),
            "flashinfer cute": _flashinfer(_mix),
        },
        dtypes={**_STREAM, "out": "float32"}, shapes=MIX_TABLE, bars=_MIX_BARS,
    ),
    GateBench(
        NEXT, _mix_next,
        {
            **over_buffers(mixed_next, "x", "gain", "alpha", "beta", "residual", "next_weight"),
            "flashinfer cute": _flashinfer(_mix_next),
        },
        dtypes=_STREAM, shapes=MIX_TABLE, bars=_MIX_BARS,
    ),
    GateBench(
        GATE, _gate, {**over_buffers(under_a_gate, "x", "gate"), "flashinfer cute": _flashinfer(_gate)},
        absent=("weight",), shapes=HEADS_TABLE, bars=_MIX_BARS,
    ),
)  # fmt: skip
