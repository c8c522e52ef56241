"""A row has the same bits in a batch of thousands as in a small one: GPUs work on two rows at once in the first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashnorm
from tests.inputs import gains, rows
from tests.tolerance import assert_same_bits

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
M = 3335  # more than 24 for each SM of an H200, and odd
PIECES = (slice(0, 40), slice(1663, 1666), slice(3301, M))  # also the last row, which has no neighbour


def layernorm(x: torch.Tensor, _: torch.Tensor, vectors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return (flashnorm.layernorm(x, vectors[0], vectors[1]),)


def layernorm_quant(x: torch.Tensor, _: torch.Tensor, vectors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(x, dtype=E4M3)
    flashnorm.layernorm_quant(out, x, vectors[0], vectors[1], 0.05)
    return (out,)


def gated(x: torch.Tensor, residual: torch.Tensor, vectors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    gate, scale, shift = (v.to(BF16).view(1, 1, -1) for v in vectors[:3])
    biases = dict(zip(("gate_bias", "scale_bias", "shift_bias"), vectors[3:], strict=True))
    out = flashnorm.fused_dit_gate_residual_layernorm_scale_shift(x[None], residual[None], gate, scale, shift, **biases)
    return tuple(t[0] for t in out)


def modulated(x: torch.Tensor, residual: torch.Tensor, vectors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    scale, shift = (v.to(BF16).view(1, 1, -1) for v in vectors[:2])
    given = dict(zip(("scale_bias", "shift_bias"), vectors[3:5], strict=True)) | {"residual": residual[None]}
    out = flashnorm.fused_dit_residual_layernorm_scale_shift(x[None], scale, shift, **given)
    return tuple(t[0] for t in out)


@pytest.mark.parametrize("h", [128, 3072, 4096, 5120, 7168, 8192, 16384])
@pytest.mark.parametrize("op", [layernorm, layernorm_quant, gated, modulated])
def test_the_bits_of_few_rows(
    op: Callable[..., tuple[torch.Tensor, ...]], h: int, exact_route: str, device: torch.device
) -> None:
    x, residual = (rows((M, h), BF16, name).to(device) for name in ("x", "residual"))
    vectors = [gains((h,), F32, f"vector {i}").to(device) for i in range(6)]
    if exact_route == "cute" and op in (layernorm_quant, gated, modulated):
        pytest.skip("the cuda route serves it")
    with flashnorm.backend(exact_route):
        whole = op(x, residual, vectors)
        for piece in PIECES:
            for got, want in zip(whole, op(x[piece], residual[piece], vectors), strict=True):
                assert_same_bits(got[piece], want, f"{op.__name__} {M} x {h}, rows {piece.start} to {piece.stop}")
