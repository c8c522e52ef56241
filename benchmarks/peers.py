"""Who is measured at what: one declaration an operator. A new operator is one more entry of `BENCHES`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import flashnorm

from . import gates, qk, rivals
from .bars import BARE, CUDA, Bars, Shape
from .entry import Bench, Buffers, over_buffers
from .measure import Call
from .rivals import EPS, LIGER_MODE, SCALE, flashinfer, flashinfer_cuda, flashinfer_silu, liger, quack

# Decode, prefill, wide rows that need more than one CTA, and the narrow rows of QK norms.
TABLE: tuple[Shape, ...] = (
    (1, 4096), (8, 4096), (64, 4096), (64, 8192), (128, 7168), (512, 4096), (1024, 8192), (4096, 4096), (16384, 4096),
    (32768, 8192), (8192, 16384), (4096, 32768), (4096, 65536), (2048, 131072), (32768, 128), (262144, 128),
    (16384, 5120),
)  # fmt: skip
QUANT_TABLE = tuple(shape for shape in TABLE if shape[1] <= 32768)
LAYERNORM_TABLE = (*QUANT_TABLE, (16384, 7168))
BLOCK_TABLE: tuple[Shape, ...] = ((1, 4096), *((rows, 7168) for rows in (1, 8, 64, 512, 4096, 16384)))
DYNAMIC_TABLE: tuple[Shape, ...] = ((1, 4096), (64, 7168), (4096, 4096), (16384, 7168))
# Decoders of video models: widths by tokens of a frame at each resolution.
_SILU_WIDTHS = (48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 1024)
SILU_TABLE: tuple[Shape, ...] = (
    *((tokens, width) for tokens in (99840, 1560) for width in _SILU_WIDTHS),
    *((399360, width) for width in (96, 128, 192, 384)),
    *((tokens, width) for tokens in (24960, 6240) for width in _SILU_WIDTHS),
)
SILU_QUANT_TABLE: tuple[Shape, ...] = tuple((t, h) for t, h in SILU_TABLE if t in (1560, 99840))
FOUR_BITS_TABLE: tuple[Shape, ...] = ((1, 4096), (64, 7168), (4096, 4096), (16384, 7168))

_CEILING_WIDE = {shape: 0.92 for shape in TABLE if shape[1] >= 65536}
_HOST = {BARE: 1.4, "flashinfer cute": 0.6}
_NORM = Bars(geomean=0.98, ceiling=_CEILING_WIDE, fallback=True, host=_HOST)
_QUANT = Bars(geomean=0.98)
_LAYERNORM = Bars(
    ratio=1.0, slack_us=0.0, rivals=("quack", "torch", "torch.compile"), ceiling={(16384, 7168): 0.92}
)  # fmt: skip
_LAYERNORM_QUANT = Bars(CUDA, ratio=1.0, slack_us=0.0)
_BLOCK = Bars(CUDA, slack_us=0.0, rivals=("flashinfer cuda",), ceiling={(16384, 7168): 0.94})
_SHOWN = Bars(ratio=None)
_SILU = Bars(
    geomean=0.97, slack_us=0.0, rivals=("torch.compile", "flashinfer cuda"),
    ceiling={(tokens, width): 0.92 for tokens, width in SILU_TABLE if tokens >= 99840 and width >= 128},
)  # fmt: skip
_SILU_QUANT = replace(
    _SILU, rivals=("torch.compile",), host={},
    ceiling={shape: share for shape, share in _SILU.ceiling.items() if shape in SILU_QUANT_TABLE},
)  # fmt: skip
# Emulated before Blackwell: integer work is the limit, not memory.
_FOUR_BITS = Bars(ratio=None, ceiling=dict.fromkeys(FOUR_BITS_TABLE[2:], 1 / 1.5))


def _dynamic(form: str, granularity: str | int, formula: Callable[..., object]) -> Bench:
    def ours(t: Buffers) -> Call:
        call = flashnorm.rmsnorm_dynamic_quant
        return partial(call, t.x, t.weight, EPS, granularity=granularity, out=t.out, scale=t.scale)

    peers, options = over_buffers(formula, "x", "weight"), {"granularity": form}
    return Bench("rmsnorm_dynamic_quant", ours, peers, form, options, shapes=DYNAMIC_TABLE, bars=_SHOWN)


def _blocks(
    op: str, form: str, options: dict[str, str], call: Callable[[Buffers], Call], formula: Callable[..., object]
) -> Bench:
    dtypes = {"scale": "uint8", **({"out": "uint8"} if op == "rmsnorm_fp4quant" else {})}
    peers = over_buffers(formula, "x", "weight")
    return Bench(op, call, peers, form, options=options, dtypes=dtypes, shapes=FOUR_BITS_TABLE, bars=_FOUR_BITS)


_ENTRIES: tuple[Bench, ...] = (
    Bench(
        "rmsnorm",
        ours=lambda t: partial(flashnorm.rmsnorm, t.x, t.weight, EPS, t.out),
        peers={
            **over_buffers(rivals.rmsnorm, "x", "weight"),
            "flashinfer cute": lambda t: partial(flashinfer().rmsnorm, t.x, t.weight, EPS, t.out, True),
            "flashinfer cuda": lambda t: partial(flashinfer_cuda().rmsnorm, t.out, t.x, t.weight, EPS, True),
            "quack": lambda t: partial(quack().rmsnorm, t.x, t.weight, eps=EPS),
            "liger": lambda t: partial(liger("rms_norm", "LigerRMSNormFunction"), t.x, t.weight, EPS, *LIGER_MODE),
        },
        shapes=TABLE,
        bars=_NORM,
    ),
    Bench(
        "fused_add_rmsnorm",
        ours=lambda t: partial(flashnorm.fused_add_rmsnorm, t.x, t.residual, t.weight, EPS),
        peers={
            **over_buffers(rivals.fused_add_rmsnorm, "x", "residual", "weight"),
            "flashinfer cute": lambda t: partial(
                flashinfer().fused_add_rmsnorm, t.x, t.residual, t.weight, EPS, True
            ),
            "flashinfer cuda": lambda t: partial(
                flashinfer_cuda().fused_add_rmsnorm, t.x, t.residual, t.weight, EPS, True
            ),
            "quack": lambda t: partial(quack().rmsnorm, t.x, t.weight, residual=t.residual, eps=EPS, prenorm=True),
            "liger": lambda t: partial(
                liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"),
                t.x, t.residual, t.weight, EPS, *LIGER_MODE,
            ),
        },
        shapes=TABLE,
        bars=_NORM,
    ),
    Bench(
        "rmsnorm_quant",
        ours=lambda t: partial(flashnorm.rmsnorm_quant, t.out, t.x, t.weight, SCALE, EPS),
        peers={
            **over_buffers(rivals.rmsnorm_quant, "x", "weight"),
            "flashinfer cute": lambda t: partial(
                flashinfer().rmsnorm_quant, t.out, t.x, t.weight, t.divisor, EPS, True
            ),
            "flashinfer cuda": lambda t: partial(
                flashinfer_cuda().rmsnorm_quant, t.out, t.x, t.weight, t.divisor, EPS, True
            ),
        },
        shapes=QUANT_TABLE,
        bars=_QUANT,
    ),
    Bench(
        "fused_add_rmsnorm_quant",
        ours=lambda t: partial(flashnorm.fused_add_rmsnorm_quant, t.out, t.x, t.residual, t.weight, SCALE, EPS),
        peers={
            **over_buffers(rivals.fused_add_rmsnorm_quant, "x", "residual", "weight"),
            "flashinfer cute": lambda t: partial(
                flashinfer().fused_add_rmsnorm_quant, t.out, t.x, t.residual, t.weight, t.divisor, EPS, True
            ),
            "flashinfer cuda": lambda t: partial(
                flashinfer_cuda().fused_add_rmsnorm_quant, t.out, t.x, t.residual, t.weight, t.divisor, EPS, True
            ),
        },
        shapes=QUANT_TABLE,
        bars=_QUANT,
    ),
    Bench(
        "layernorm",
        ours=lambda t: partial(flashnorm.layernorm, t.x, t.weight, t.bias, EPS, t.out),
        peers={
            **over_buffers(rivals.layernorm, "x", "weight", "bias"),
            "torch": lambda t: partial(rivals.layernorm_eager, t.x, t.weight.to(t.x.dtype), t.bias.to(t.x.dtype)),
            "flashinfer cute": lambda t: partial(flashinfer().layernorm, t.x, t.weight, t.bias, EPS),
            "flashinfer cuda": lambda t: partial(flashinfer_cuda().layernorm, t.out, t.x, t.weight, t.bias, EPS),
            "quack": lambda t: partial(quack().layernorm_fwd, t.x, t.weight, t.bias, EPS),
        },
        dtypes={"weight": "float32", "bias": "float32"},
        shapes=LAYERNORM_TABLE,
        bars=_LAYERNORM,
    ),
    Bench(
        "layernorm_quant",
        ours=lambda t: partial(flashnorm.layernorm_quant, t.out, t.x, t.weight, t.bias, SCALE, EPS),
        peers={
            **over_buffers(rivals.layernorm_quant, "x", "weight", "bias"),
            "flashinfer cuda": lambda t: partial(
                flashinfer_cuda().layernorm_quant, t.out, t.x, t.weight, t.bias, t.divisor, EPS
            ),
        },
        dtypes={"weight": "float32", "bias": "float32"},
        shapes=LAYERNORM_TABLE,
        bars=_LAYERNORM_QUANT,
    ),
    Bench(
        "fused_add_rmsnorm_fp8_block_quant",
        ours=lambda t: partial(
            flashnorm.fused_add_rmsnorm_fp8_block_quant,
            t.out, t.scale.T, t.normed_out, t.x, t.residual, t.weight, EPS,
        ),
        peers={
            **over_buffers(rivals.fused_add_rmsnorm_block_quant, "x", "residual", "weight"),
            "flashinfer cuda": lambda t: partial(
                flashinfer_cuda().fused_add_rmsnorm_fp8_block_quant,
                t.out, t.scale.T, t.normed_out, t.x, t.residual, t.weight, EPS, True,
            ),
        },
        column=True,
        shapes=BLOCK_TABLE,
        bars=_BLOCK,
    ),
    _dynamic("token", "token", rivals.rmsnorm_token_quant),
    _dynamic("128", 128, rivals.rmsnorm_block_quant),
    Bench(
        "fused_rmsnorm_silu",
        ours=lambda t: partial(flashnorm.fused_rmsnorm_silu, t.x, t.weight, EPS, t.out),
        peers={
            **over_buffers(rivals.rmsnorm_silu, "x", "weight"),
            "flashinfer cuda": lambda t: flashinfer_silu(t.x, t.weight, t.out),
        },
        shapes=SILU_TABLE,
        bars=_SILU,
    ),
    Bench(
        "fused_rmsnorm_silu",
        ours=lambda t: partial(flashnorm.fused_rmsnorm_silu, t.x, t.weight, EPS, t.out, scale=SCALE),
        peers=over_buffers(rivals.rmsnorm_silu_quant, "x", "weight"),
        form="e4m3",
        behind="fused_rmsnorm_silu_quant",
        shapes=SILU_QUANT_TABLE,
        bars=_SILU_QUANT,
    ),
    _blocks(
        "rmsnorm_fp4quant", "nvfp4", {},
        lambda t: partial(flashnorm.rmsnorm_fp4quant, t.x, t.weight, t.out, t.scale, eps=EPS),
        rivals.rmsnorm_nvfp4,
    ),
    _blocks(
        "rmsnorm_fp4quant", "mxfp4", {"block_size": "32"},
        lambda t: partial(flashnorm.rmsnorm_fp4quant, t.x, t.weight, t.out, t.scale, eps=EPS, block_size=32),
        rivals.rmsnorm_mxfp4,
    ),
    _blocks(
        "rmsnorm_mxfp8_quant", "", {},
        lambda t: partial(flashnorm.rmsnorm_mxfp8_quant, t.x, t.weight, t.out, t.scale, EPS),
        rivals.rmsnorm_mxfp8,
    ),
    *gates.ENTRIES,
    *qk.ENTRIES,
)  # fmt: skip
BENCHES: dict[str, Bench] = {entry.name: entry for entry in _ENTRIES}


def known_peers(benches: Iterable[Bench] = _ENTRIES) -> list[str]:
    """Every peer's name once."""
    return list(dict.fromkeys(name for bench in benches for name in bench.peers))


def named(names: Iterable[str]) -> list[str]:
    """Benches by their names; an operator's name stands for all of its forms.

    Raises:
        KeyError: a name that is neither.
    """
    found: list[str] = []
    for name in names:
        mine = [name] if name in BENCHES else [bench.name for bench in _ENTRIES if bench.op == name]
        if not mine:
            raise KeyError(name)
        found += mine
    return list(dict.fromkeys(found))
