"""Q and K normalised and turned by rotary embeddings, V copied: one launch for all of a token."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from flashnorm import reference
from flashnorm.core import checks
from flashnorm.core import device as devices
from flashnorm.core.op import NUMERICS, Op
from flashnorm.core.plan import explain
from flashnorm.ops import programs
from flashnorm.ops.rows import check_bounds
from flashnorm.program import MAX_HEAD_DIM, MAX_QUARTERS, QkLayout, QkLayouts, QkNormRope

Tensor = torch.Tensor
NAME = "fused_qk_rmsnorm_rope"
SCOPES = ("hidden", "head")
MAX_POSITION = 1 << 21  # of an axis: quarter turns must not outgrow the range reduction
CODES = torch.float8_e4m3fn


def _program(present: programs.Present, options: programs.Options, *, cached: bool, coded: bool) -> QkNormRope:
    layout = options["layout"]
    weights = ("q_weight" in present, "k_weight" in present)
    return QkNormRope(layout.scope, layout.interleave, cached, *weights, coded, layout)


_WITHOUT: dict[bool, dict[str, Any]] = {True: {}, False: {"positions": None, "cos_sin_cache": None}}


def _declare(cached: bool, coded: bool) -> Op:
    """One operator for each way to come by sines and cosines, and for each kind of result: a call has one of each."""
    return Op(
        NAME + ("_cached" if cached else "") + ("_fp8" if coded else ""),
        program=functools.partial(_program, cached=cached, coded=coded),
        reference=functools.partial(reference.fused_qk_rmsnorm_rope, **_WITHOUT[cached]),
        options={"numerics": NUMERICS, "layout": QkLayouts()},
        optional=("q_weight", "k_weight"),
        routes=("cuda", "cpu", "torch"),
        labels={"x": "qkv"},
        public=not cached and not coded,
        called=NAME,
    )


QK = _declare(False, False)
QK_FP8 = _declare(False, True)
QK_CACHED = _declare(True, False)
QK_CACHED_FP8 = _declare(True, True)
_CACHED, _CACHED_FP8 = QK_CACHED.behind(), QK_CACHED_FP8.behind()

# Parameters that make the layout, in the order of `_layout`; a warm call compares them.
_SEEN = (
    "num_heads_q", "num_heads_k", "num_heads_v", "head_dim", "ppf", "pph", "ppw", "num_frame_channels",
    "num_height_channels", "num_width_channels", "base", "interleave", "factor", "low", "high", "attention_factor",
    "is_qk_norm", "norm_scope",
)  # fmt: skip

_TABLE = ("positions", "cos_sin_cache")
_UNSCALED = {"output_fp8": False, "output_quant_scale": 1.0, "v_quant_scale": 1.0}
_TAILS = {f"{part}_out": (f"num_heads_{part}", "head_dim") for part in "qkv"}


@QK.warm(seen=_SEEN, unless=_TABLE, only=_UNSCALED, tails=_TAILS)
@QK_FP8.warm(seen=_SEEN, unless=_TABLE, only={"output_fp8": True}, tails=_TAILS)
def fused_qk_rmsnorm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    *,
    ppf: int | None = None,
    pph: int | None = None,
    ppw: int | None = None,
    num_frame_channels: int | None = None,
    num_height_channels: int | None = None,
    num_width_channels: int | None = None,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float = 1e-6,
    base: float = 10000.0,
    interleave: bool = True,
    factor: float = 1.0,
    low: float = 0.0,
    high: float = 0.0,
    attention_factor: float = 1.0,
    is_qk_norm: bool = True,
    output_fp8: bool = False,
    output_quant_scale: float = 1.0,
    v_quant_scale: float = 1.0,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
    norm_scope: str = "hidden",
    cos_sin_cache: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    numerics: str = "flashinfer",
    skip_check: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""RMSNorm of Q and of K, rotary embeddings, and a copy of V, for tokens whose Q, K and V lie side by side.

    .. math::
        v = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot w, \qquad
        (a, b) \mapsto (a \cos\theta - b \sin\theta,\; b \cos\theta + a \sin\theta)

    over the pairs (a, b) of channels of v, which is rounded to the input's dtype first where the results have it; one
    rounding at the end (Su et al., 2021, arXiv:2104.09864). Token i of a sequence is the point (frame, height, width)
    of a grid, width fastest; the first `num_frame_channels` channels of a head turn with the frame, the next ones with
    the height, the last ones with the width. Pair j of an axis of C channels turns by :math:`\mathrm{base}^{-2j/C}` a
    step. Frequencies are fp64, angles right to 1e-6 rad modulo :math:`2\pi` up to position 131,072. With
    `cos_sin_cache` and `positions` the grid's arguments are left out.

    Args:
        qkv: [B, S, (q + k + v) * head_dim] or [num_tokens, ...], bf16 or fp16; all heads of Q, then of K, then of V;
            any strides.
        q_weight, k_weight: [heads * head_dim] or [heads, head_dim]; with `norm_scope="head"` [head_dim] or
            [heads, head_dim]; fp32, fp16 or bf16; None for no weight.
        ppf, pph, ppw: points of the grid: frames, height, width. S, or a divisor of num_tokens, is their product.
        num_frame_channels, num_height_channels, num_width_channels: channels of a head for each axis; even, their sum
            is head_dim.
        num_heads_q, num_heads_k, num_heads_v: of each part; may be 0.
        head_dim: even, 2 to 512.
        eps: added to the mean square, in fp32; finite and >= 0.
        base: of the frequencies; > 0.
        interleave: pairs are (2p, 2p + 1); else NeoX's, p and p + half of the channels that turn.
        factor, low, high, attention_factor: YaRN (Peng et al., 2023, arXiv:2309.00071), where factor is not 1: pairs
            of an axis below `low` keep their frequency, those above `high` have it divided by `factor`, with a ramp
            between; Q and K are multiplied by `attention_factor` where they turn.
        is_qk_norm: False turns Q and K as they are; weights are checked and not used.
        output_fp8: results in float8_e4m3fn, nothing rounded before.
        output_quant_scale, v_quant_scale: with `output_fp8`, what Q and K, and V, are multiplied by; > 0.
        q_out, k_out, v_out: [B, S, heads, head_dim] or [num_tokens, heads, head_dim], written in place of new tensors;
            any strides; they overlap nothing.
        norm_scope: the mean is over all heads of Q, and of K ("hidden"), or over each head ("head").
        cos_sin_cache: [P, R], fp32, R even, R <= head_dim: cosines and then sines of R / 2 pairs; the first R channels
            of a head turn. R of them make the pairs (p, p + R / 2) of NeoX.
        positions: [B, S] or [num_tokens], int32 or int64: rows of `cos_sin_cache`. On a GPU a bad one reads nothing
            and makes Q and K of its token NaN.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: as in `rmsnorm`; all modes round alike, here.
        skip_check: taken and ignored: checks cost a warm call nothing.

    Returns:
        (q_out, k_out, v_out).

    Raises:
        TypeError: for something that is no tensor or no number.
        ValueError: for a wrong dtype, shape, device, overlap, number or option, before anything is launched; for a bad
            position on the CPU.
        RuntimeError: where no route serves the device, or a gradient would be lost.
    """
    grid = (ppf, pph, ppw, num_frame_channels, num_height_channels, num_width_channels)
    yarn = (base, interleave, factor, low, high, attention_factor)
    heads = (num_heads_q, num_heads_k, num_heads_v, head_dim)
    seen = (*heads, *grid, *yarn, is_qk_norm, norm_scope)
    cached, layout = _form(seen, output_fp8, output_quant_scale, v_quant_scale, cos_sin_cache, positions)
    given = (q_out, k_out, v_out)
    outs = [_new(qkv, n, head_dim, output_fp8) if out is None else out for out, n in zip(given, heads[:3], strict=True)]
    call: Callable[..., Any] = _CALLS[cached, output_fp8]
    operands = (qkv, q_weight, k_weight, *((positions, cos_sin_cache) if cached else ()), *outs)
    numbers = (eps, output_quant_scale, v_quant_scale)
    more: dict[str, Any] = {} if cached else {"seen": seen}
    made: tuple[Tensor, Tensor, Tensor] = call(*operands, *numbers, numerics, layout, enable_pdl, **more)
    return made


_OPS = {(False, False): QK, (False, True): QK_FP8, (True, False): QK_CACHED, (True, True): QK_CACHED_FP8}
_CALLS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): QK.checked,
    (False, True): QK_FP8.checked,
    (True, False): _CACHED,
    (True, True): _CACHED_FP8,
}


def supports_fused_qk_rmsnorm_rope(qkv: Any, q_weight: Any = None, k_weight: Any = None, **arguments: Any) -> bool:
    """Whether `fused_qk_rmsnorm_rope` takes these arguments and has a route for them. Never raises."""
    try:
        bound = inspect.signature(fused_qk_rmsnorm_rope).bind(qkv, q_weight, k_weight, **arguments)
        bound.apply_defaults()
        given = {"x": qkv, **bound.arguments}
        rest = (given[name] for name in (*_UNSCALED, *reversed(_TABLE)))
        cached, given["layout"] = _form(tuple(given[name] for name in _SEEN), *rest)
        op = _OPS[cached, given["output_fp8"]]
        tensors = [given[operand.name] for operand in op.operands]
        # A result that is not given is no matter: any tensor stands for it.
        present = [qkv if t is None and o.mode == "out" else t for o, t in zip(op.operands, tensors, strict=True)]
        checks.check_present(op, present)
        settings = [given[name] for name in (*op.scalars, *op.options, "enable_pdl")]
        options = checks.check_settings(op, settings)[1]
        checks.check_tensors(op, op.program_of(tensors, options), tensors)
        if not op._needs_dispatcher(tensors):  # else nothing is known of memory
            checks.check_memory(op, tensors)
        return explain(op, devices.facts(qkv.device)).route is not None
    except Exception:  # whatever is wrong with them
        return False


# ------------------------------------------------------------------ checks
def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{NAME}: {name} must be an int, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{NAME}: {name} must be {low} to {high}, got {value}")
    return int(value)


def _number(name: str, value: Any, positive: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{NAME}: {name} must be a Python number, got {type(value).__name__}")
    if not math.isfinite(value) or (positive and not value > 0):
        raise ValueError(f"{NAME}: {name} must be finite{' and > 0' if positive else ''}, got {value!r}")
    return float(value)


def _form(
    seen: tuple[Any, ...], output_fp8: Any, output_quant_scale: Any, v_quant_scale: Any, cache: Any, positions: Any
) -> tuple[bool, str]:
    """(whether sines come from a table, the layout), after the checks of all that makes no tensor."""
    checks.check_flag(NAME, "output_fp8", output_fp8)
    cached = cache is not None or positions is not None
    rotary = _check_cache(cache, positions) if cached else None
    layout = _text(*seen, rotary)
    if not output_fp8:
        _check_unscaled(output_quant_scale, v_quant_scale)
    if cached:
        check_bounds(QK_CACHED, "positions", positions, cache.shape[0])
    return cached, layout


def _check_unscaled(output_quant_scale: Any, v_quant_scale: Any) -> None:
    for name, value in (("output_quant_scale", output_quant_scale), ("v_quant_scale", v_quant_scale)):
        if value != 1.0:
            raise ValueError(f"{NAME}: {name} goes with output_fp8=True, got {value!r}")


def _check_cache(cache: Any, positions: Any) -> int:
    """The number of channels that turn."""
    for name, value in (("cos_sin_cache", cache), ("positions", positions)):
        if not isinstance(value, torch.Tensor):
            both = "cos_sin_cache and positions come together; " if value is None else ""
            raise TypeError(f"{NAME}: {both}{name} must be a torch.Tensor, got {type(value).__name__}")
    if cache.dim() != 2:
        raise ValueError(f"{NAME}: cos_sin_cache must have shape (P, rotary_dim), got {tuple(cache.shape)}")
    return int(cache.shape[1])


def _text(*parameters: Any) -> str:
    """The layout of a call as an option of the operators; `_layout` says what parameters there are."""
    if torch.compiler.is_compiling():
        return str(_layout(*parameters))
    try:
        return _known_text(*parameters)
    except TypeError:  # something that cannot be hashed: it is wrong, and is named
        return str(_layout(*parameters))


@functools.lru_cache(maxsize=1024, typed=True)
def _known_text(*parameters: Any) -> str:
    return str(_layout(*parameters))


def _layout(
    num_heads_q: Any,
    num_heads_k: Any,
    num_heads_v: Any,
    head_dim: Any,
    ppf: Any,
    pph: Any,
    ppw: Any,
    num_frame_channels: Any,
    num_height_channels: Any,
    num_width_channels: Any,
    base: Any,
    interleave: Any,
    factor: Any,
    low: Any,
    high: Any,
    attention_factor: Any,
    is_qk_norm: Any,
    norm_scope: Any,
    rotary_dim: Any,
) -> QkLayout:
    """The layout of a call; `rotary_dim` is None where a grid says how tokens turn.

    Raises:
        TypeError, ValueError: naming the parameter.
    """
    width = _whole("head_dim", head_dim, 2, MAX_HEAD_DIM)
    if width % 2:
        raise ValueError(f"{NAME}: head_dim must be even, got {width}")
    most = checks.MAX_HIDDEN // width
    named = (("num_heads_q", num_heads_q), ("num_heads_k", num_heads_k), ("num_heads_v", num_heads_v))
    q, k, v = (_whole(name, value, 0, most) for name, value in named)
    checks.check_flag(NAME, "interleave", interleave)
    checks.check_flag(NAME, "is_qk_norm", is_qk_norm)
    if norm_scope not in SCOPES:
        raise ValueError(f"{NAME}: norm_scope must be one of {', '.join(SCOPES)}, got {norm_scope!r}")
    scope = norm_scope if is_qk_norm else "none"
    yarn = {
        "base": _number("base", base, positive=True),
        "factor": _number("factor", factor, positive=True),
        "low": _number("low", low),
        "high": _number("high", high),
        "attention_factor": _number("attention_factor", attention_factor, positive=True),
    }
    if yarn["factor"] == 1.0 and yarn["attention_factor"] != 1.0:
        raise ValueError(f"{NAME}: attention_factor must be 1.0 where factor is 1.0, got {attention_factor!r}")
    grid = {"ppf": ppf, "pph": pph, "ppw": ppw}
    channels = {
        "num_frame_channels": num_frame_channels,
        "num_height_channels": num_height_channels,
        "num_width_channels": num_width_channels,
    }
    if rotary_dim is not None:
        for name, value in (*grid.items(), *channels.items()):
            if value is not None:
                raise ValueError(f"{NAME}: {name} does not go with cos_sin_cache, got {value!r}")
        if yarn["factor"] != 1.0:
            raise ValueError(f"{NAME}: factor does not go with cos_sin_cache, whose angles are known; got {factor!r}")
        if rotary_dim % 2 or not 2 <= rotary_dim <= width:
            raise ValueError(
                f"{NAME}: cos_sin_cache must have an even number of columns, 2 to head_dim = {width}, got {rotary_dim}"
            )
        return QkLayout((q, k, v), width, scope, interleave, rotary_dim)  # type: ignore[arg-type]
    sizes = tuple([_whole(name, value, 1, MAX_POSITION) for name, value in grid.items()])
    parts = tuple([_whole(name, value, 0, MAX_HEAD_DIM) for name, value in channels.items()])
    if sizes[0] * sizes[1] * sizes[2] > 0x7FFFFFFF:
        raise ValueError(f"{NAME}: ppf * pph * ppw must be less than 2^31, got {sizes}")
    fastest = max(1.0, 1.0 / yarn["base"]) / min(1.0, yarn["factor"])
    if max(sizes) * fastest >= MAX_QUARTERS:
        raise ValueError(f"{NAME}: base = {base!r} and factor = {factor!r} turn too far in {max(sizes)} steps")
    for name, count in zip(channels, parts, strict=True):
        if count % 2:
            raise ValueError(f"{NAME}: {name} must be even, got {count}")
    if sum(parts) != width:
        raise ValueError(
            f"{NAME}: num_frame_channels, num_height_channels and num_width_channels must sum to head_dim = {width}, "
            f"got {parts}"
        )
    layout = QkLayout((q, k, v), width, scope, interleave, width, sizes, parts, **yarn)  # type: ignore[arg-type]
    return layout


def _new(qkv: Any, heads: int, head_dim: int, coded: bool) -> Tensor:
    """A new result."""
    if not isinstance(qkv, torch.Tensor):
        raise TypeError(f"{NAME}: qkv must be a torch.Tensor, got {type(qkv).__name__}")
    return torch.empty((*qkv.shape[:-1], heads, head_dim), dtype=CODES if coded else qkv.dtype, device=qkv.device)
