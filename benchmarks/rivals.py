"""What flashnorm is measured against: formulas in PyTorch, eager and compiled, and other libraries.

Libraries are imported when a call is bound, so that one which is missing or broken fails alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6
# A normalised row of any width here, times a weight of at most 1.5, stays below 448 * SCALE and is not clipped.
SCALE = 0.025
E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0


# ------------------------------------------------------------------ formulas; none of them writes in place
def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, weight.shape, weight, EPS), h


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x.float(), weight.shape, weight, bias, EPS).to(x.dtype)


def layernorm_eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's own kernel; it wants the affine parameters in the input's dtype."""
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def rmsnorm_quant(x: Tensor, weight: Tensor) -> Tensor:
    return _codes(_rms(x.float(), weight) * (1 / SCALE))


def fused_add_rmsnorm_quant(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x.float() + residual.float()
    return _codes(_rms(h, weight) * (1 / SCALE)), h.to(residual.dtype)


def layernorm_quant(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _codes(F.layer_norm(x.float(), weight.shape, weight, bias, EPS) * (1 / SCALE))


def fused_add_rmsnorm_block_quant(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = x.float() + residual.float()
    normed = _rms(h, weight).to(x.dtype)
    codes, scale = _blocks(normed, 128, 1e-4)
    return codes, scale, normed, h.to(residual.dtype)


def rmsnorm_token_quant(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _blocks(_rms(x.float(), weight).to(x.dtype), x.shape[-1], 1e-10)


def rmsnorm_block_quant(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _blocks(_rms(x.float(), weight).to(x.dtype), 128, 1e-10)


def rmsnorm_nvfp4(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    v = _rms(x.float(), weight).unflatten(-1, (-1, 16))
    scale = (v.abs().amax(-1, keepdim=True) / 6).clamp(max=_LARGEST).to(E4M3)
    return _pairs((v / scale.float()).flatten(-2)), scale.squeeze(-1).view(torch.uint8)


def rmsnorm_mxfp4(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    values, exponent = _power_blocks(x, weight, 6.0)
    return _pairs(values), exponent


def rmsnorm_mxfp8(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    values, exponent = _power_blocks(x, weight, _LARGEST)
    return values.to(E4M3), exponent


def rmsnorm_silu(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(_rms(x.float(), weight)).to(x.dtype)


def rmsnorm_silu_quant(x: Tensor, weight: Tensor) -> Tensor:
    return _codes(F.silu(_rms(x.float(), weight)) * (1 / SCALE))


def _rms(h: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(h, weight.shape, weight.float(), EPS)


def _power_blocks(x: Tensor, weight: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """(elements divided by a power of two for every 32 of them, its exponent bytes)."""
    v = _rms(x.float(), weight).unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(v.abs().amax(-1, keepdim=True) / largest))
    return (v * torch.exp2(-exponent)).flatten(-2), (exponent + 127).to(torch.uint8).squeeze(-1)


def _pairs(values: Tensor) -> Tensor:
    """e2m1 codes, two to a byte; ties go down."""
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    code = torch.bucketize(values.abs(), between).to(torch.uint8) | (values < 0).to(torch.uint8) << 3
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def _codes(y: Tensor) -> Tensor:
    return y.clamp(-_LARGEST, _LARGEST).to(E4M3)


def _blocks(normed: Tensor, block: int, floor: float) -> tuple[Tensor, Tensor]:
    """(codes, a scale for every `block` elements of a row)."""
    v = normed.float().unflatten(-1, (-1, block))
    amax = v.abs().amax(-1, keepdim=True).clamp(min=floor)
    return _codes(v * (_LARGEST / amax)).flatten(-2), (amax / _LARGEST).squeeze(-1)


def qk_norm_rope(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int, int], head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms over all heads, rotary embeddings of neighbouring channels; V is a copy."""
    parts = x.split([n * head_dim for n in heads], -1)
    made = []
    for part, weight in zip(parts[:2], (q_weight, k_weight), strict=True):
        h = part if part.dtype == torch.float64 else part.float()
        v = F.rms_norm(h, weight.shape, weight.to(h.dtype), EPS).to(x.dtype)
        a, b = v.unflatten(-1, (-1, head_dim // 2, 2)).unbind(-1)
        c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
        made.append(torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2).to(x.dtype))
    return made[0], made[1], parts[2].unflatten(-1, (-1, head_dim)).clone()


def qk_norm_rope_codes(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qk_norm_rope(given[0].float(), *given[1:])
    return _codes(q), _codes(k), _codes(v)


# ------------------------------------------------------------------ compiled
@functools.cache
def compiled(formula: Callable[..., Any], shape: torch.Size) -> Callable[..., Any]:
    """`torch.compile` for one shape, as if there were no other.

    Dynamo counts recompilations by code object, and searches by code object for what a call may use. Every shape has
    a copy of the formula's code: none counts against another's limit, or waits for the guards of others.
    """
    code = formula.__code__.replace(co_name="_".join([formula.__name__, *map(str, shape)]))
    return torch.compile(types.FunctionType(code, formula.__globals__), dynamic=False)


# ------------------------------------------------------------------ libraries
def flashinfer() -> Any:
    """FlashInfer's norms; its CuTe kernels only if it really has them, since it falls back silently."""
    norm = importlib.import_module("flashinfer.norm")
    if norm._USE_CUDA_NORM:
        raise RuntimeError("flashinfer.norm could not import its CuTe kernels and would run its CUDA ones")
    return norm


@functools.cache
def _flashinfer_cuda_build() -> Future[Any]:
    # Imported here, not in the thread: its imports and those of the main thread share modules.
    norm = importlib.import_module("flashinfer.norm")
    return ThreadPoolExecutor(1).submit(norm.get_norm_module)


def flashinfer_cuda() -> Any:
    """FlashInfer's CUDA module, built on first use; its entry points are bare TVM-FFI functions."""
    return _flashinfer_cuda_build().result()


@functools.cache
def _flashinfer_silu_build(tokens: int, width: int) -> Future[Any]:
    """FlashInfer's module for one width and number of tokens, being built."""
    norm, jit = importlib.import_module("flashinfer.norm"), importlib.import_module("flashinfer.jit.rmsnorm_silu")
    warps, split, config, occupancy, load = jit.select_knobs(width, tokens, "bf16", 90)
    ctas = jit._estimate_ctas_per_row(width, split, config, load)
    return _BUILDERS.submit(norm._get_rmsnorm_silu_module, width, "bf16", warps, ctas, load, config, occupancy)


_BUILDERS = ThreadPoolExecutor(8)
SILU_WIDTHS = (48, 96, 192, 384)  # that FlashInfer is tuned for on compute capability 9.0; others take 8 to 40 times


def flashinfer_silu(x: Tensor, weight: Tensor, out: Tensor) -> Callable[[], Any]:
    tokens, width = x.shape
    if width not in SILU_WIDTHS:
        raise ValueError("not tuned for this width")
    _flashinfer_silu_build(tokens, width).result()
    return functools.partial(importlib.import_module("flashinfer.norm").fused_rmsnorm_silu, x, weight, EPS, out)


def quack() -> Any:
    return importlib.import_module("quack.rmsnorm")


def liger(module: str, function: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply


LIGER_MODE = (0.0, "llama", False)  # offset, casting mode, in place


def start_building(peers: Iterable[str], silu: Iterable[tuple[int, int]] = (), norms: bool = True) -> list[Future[Any]]:
    """Starts what a peer builds for a minute, in the background; whoever binds it waits for it.

    Args:
        peers: that are asked for.
        silu: shapes at which RMSNorm + SiLU is measured.
        norms: whether anything else is.
    """
    if "flashinfer cuda" not in peers:
        return []
    with contextlib.suppress(Exception):  # said where it is bound
        started = [_flashinfer_silu_build(tokens, width) for tokens, width in silu if width in SILU_WIDTHS]
        return [*started, _flashinfer_cuda_build()] if norms else started
    return []
