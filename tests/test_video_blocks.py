"""Blocks of video models at their published sizes, a few tokens long, with flashnorm's operators in them.

The baseline is the plain module in fp64 with the same weights; the error is held to that of the plain module in the
same dtype. A transformer block of Wan 2.2 (5B: 3072 wide, 24 heads; 14B: 5120, 40 heads), and the residual blocks of
its decoder at each of their widths.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashnorm
from tests.inputs import generator
from tests.tolerance import assert_no_worse

SIZES = {"5B": (3072, 24, 14336), "14B": (5120, 40, 13824)}
EPS, NORM = 1e-6, 1e-12
# The channels of the decoders of Wan 2.1 and 2.2, and where they narrow.
WIDTHS = [*((width, width) for width in (96, 192, 384, 256, 512, 1024)), (384, 192), (1024, 512)]
each_size = pytest.mark.parametrize(
    "size", [pytest.param("5B"), pytest.param("14B", marks=pytest.mark.slow)]
)  # fmt: skip


class Attention(nn.Module):
    """Attention with RMSNorm over all heads of queries and keys, as plain modules have it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(width, EPS), nn.RMSNorm(width, EPS)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        def split(t: Tensor) -> Tensor:
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = self.norm_q(self.q(x)), self.norm_k(self.k(context)), self.v(context)
        mixed = F.scaled_dot_product_attention(split(q), split(k), split(v))
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Self attention, cross attention and a feed-forward part, the first and the last under gates; and the norm that
    the next block begins with.

    `temb` is [B, 6, H], or [B, R, 6, H] where each token has a time of its own.
    """

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.width = width
        self.table, self.next_table = (nn.Parameter(torch.empty(1, 6, width)) for _ in range(2))
        self.attn1, self.attn2 = Attention(width, heads), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, EPS)
        self.ffn = nn.Sequential(nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width))

    def wide(self) -> torch.dtype:
        """Where eager modules normalise: in fp32, and in fp64 where they are the baseline."""
        return torch.promote_types(self.table.dtype, torch.float32)

    def modulated(self, h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return (F.layer_norm(h.to(self.wide()), (self.width,), eps=EPS) * (1 + scale) + shift).to(h.dtype)

    def gated(self, h: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
        return (h.to(self.wide()) + branch * gate).to(h.dtype)

    def forward(self, h: Tensor, context: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        """Plain PyTorch, eager: (the residual stream, what the next block's attention reads)."""

        def parts(table: Tensor) -> list[Tensor]:
            whole = table.to(self.wide()) + temb.to(self.wide())
            return [t.squeeze(2) if temb.dim() == 4 else t for t in whole.chunk(6, dim=temb.dim() - 2)]

        shift1, scale1, gate1, shift2, scale2, gate2 = parts(self.table)
        x = self.modulated(h, shift1, scale1)
        h = self.gated(h, self.attn1(x, x), gate1)
        gain, bias = self.norm2.weight.to(self.wide()), self.norm2.bias.to(self.wide())
        x = F.layer_norm(h.to(self.wide()), (self.width,), gain, bias, EPS).to(h.dtype)
        h = h + self.attn2(x, context)
        x = self.modulated(h, shift2, scale2)
        h = self.gated(h, self.ffn(x), gate2)
        shift, scale, *_ = parts(self.next_table)
        return h, self.modulated(h, shift, scale)

    def fused(self, h: Tensor, context: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        """The same with flashnorm's operators: slices of `temb` are read in place, the table's rows are biases."""
        flat = temb.flatten(-2)
        slices = (flat if temb.dim() == 4 else flat.unsqueeze(1)).chunk(6, dim=2)
        mine = [(part, row.float()) for part, row in zip(slices, self.table[0], strict=True)]
        (shift1, shift1_b), (scale1, scale1_b), (gate1, gate1_b), (shift2, shift2_b), (scale2, scale2_b), last = mine
        h, x = flashnorm.fused_dit_residual_layernorm_scale_shift(
            h, scale1, shift1, scale_bias=scale1_b, shift_bias=shift1_b, epsilon=EPS
        )
        h, x = flashnorm.fused_dit_gate_residual_layernorm_gamma_beta(
            self.attn1(x, x), h, gate1, self.norm2.weight, self.norm2.bias, gate_bias=gate1_b, epsilon=EPS
        )
        h, x = flashnorm.fused_dit_residual_layernorm_scale_shift(
            self.attn2(x, context), scale2, shift2, residual=h, scale_bias=scale2_b, shift_bias=shift2_b, epsilon=EPS
        )
        shift_b, scale_b = self.next_table[0, :2].float()
        return flashnorm.fused_dit_gate_residual_layernorm_scale_shift(
            self.ffn(x), h, last[0], slices[1], slices[0],
            gate_bias=last[1], scale_bias=scale_b, shift_bias=shift_b, epsilon=EPS,
        )  # fmt: skip


def filled(module: nn.Module, *key: object) -> nn.Module:
    """Weights of the size that training leaves, so that no part of a block is negligible."""
    source = generator(*key)
    for name, parameter in module.named_parameters():
        spread = 1.0 if parameter.dim() < 2 else 1 / parameter[0].numel() ** 0.5
        parameter.data.normal_(0, 0.3 if "table" in name else 0.1 if parameter.dim() < 2 else spread, generator=source)
        parameter.data.add_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return module.requires_grad_(False)


@pytest.mark.parametrize("per_token", [False, True])
@each_size
def test_a_transformer_block(size: str, per_token: bool, route: str, device: torch.device) -> None:
    """bf16, the stream as well: two videos of a few tokens, a time for each of them or for each token."""
    width, heads, inner = SIZES[size]
    with torch.device("meta"):
        block = Block(width, heads, inner)
    block = filled(block.to_empty(device="cpu").bfloat16(), size)  # type: ignore[assignment]
    source = generator("block", size)
    shapes = (2, 7, width), (2, 5, width), (2, *((7,) if per_token else ()), 6, width)
    h, context, temb = (torch.randn(shape, generator=source).bfloat16() for shape in shapes)
    temb = temb * 0.3
    given = [t.to(device) for t in (h * 3, context, temb)]
    exact = copy.deepcopy(block).double()(h.double() * 3, context.double(), temb.double())
    block = block.to(device)
    eager = block(*given)
    with flashnorm.backend(route), torch.no_grad():
        got = block.fused(*given)
    for name, *each in zip(("stream", "norm"), got, eager, exact, strict=True):
        assert_no_worse(*each, f"Wan 2.2 {size}, {name}, on {route}")


def test_a_transformer_block_in_fp32(route: str, device: torch.device) -> None:
    """The same promise where rounding is far smaller; the block is narrower, the arithmetic the same."""
    block = filled(Block(1536, 12, 8960), "fp32")
    source = generator("fp32 block")
    shapes = (1, 9, 1536), (1, 5, 1536), (1, 6, 1536)
    given = [torch.randn(shape, generator=source) for shape in shapes]
    exact = copy.deepcopy(block).double()(*(t.double() for t in given))
    given, block = [t.to(device) for t in given], block.to(device)
    with flashnorm.backend(route), torch.no_grad():
        got, eager = block.fused(*given), block(*given)  # type: ignore[operator]
    for name, *each in zip(("stream", "norm"), got, eager, exact, strict=True):
        assert_no_worse(*each, f"{name}, on {route}")


# ------------------------------------------------------------------ the decoder
class ResidualBlock(nn.Module):
    """Two convolutions, each behind RMSNorm over the channels and SiLU, and a shortcut."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.Parameter(torch.empty(n)) for n in (width, out))
        self.conv1, self.conv2 = nn.Conv3d(width, out, 3, padding=1), nn.Conv3d(out, out, 3, padding=1)
        self.shortcut = nn.Conv3d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Plain PyTorch: F.normalize over the channels, times their root."""

        def active(t: Tensor, gain: Tensor) -> Tensor:
            return F.silu(F.normalize(t, dim=1) * t.shape[1] ** 0.5 * gain.view(-1, 1, 1, 1))

        y = self.conv2(active(self.conv1(active(x, self.norm1)), self.norm2))
        return y + self.shortcut(x)

    def fused(self, x: Tensor) -> Tensor:
        def active(t: Tensor, gain: Tensor) -> Tensor:
            channels_last = t.permute(0, 2, 3, 4, 1)
            return flashnorm.fused_rmsnorm_silu(channels_last, gain, NORM).permute(0, 4, 1, 2, 3)  # type: ignore[union-attr]

        y = self.conv2(active(self.conv1(active(x, self.norm1)), self.norm2))
        return y + self.shortcut(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("width", "out"), WIDTHS)
def test_a_block_of_the_decoder(width: int, out: int, dtype: torch.dtype, route: str, device: torch.device) -> None:
    """A few voxels, channels last in memory, as the norm reads them in place."""
    block = filled(ResidualBlock(width, out).to(dtype), width, out)
    block.norm1.add_(1.0)
    block.norm2.add_(1.0)
    x = torch.randn(1, width, 2, 4, 6, generator=generator("voxels", width)).to(dtype)
    exact = copy.deepcopy(block).double()(x.double())
    block, x = block.to(device), x.to(device, memory_format=torch.channels_last_3d)
    with flashnorm.backend(route), torch.no_grad():
        got, eager = block.fused(x), block(x)  # type: ignore[operator]
    assert_no_worse(got, eager, exact, f"{width} to {out} on {route}")
