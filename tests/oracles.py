"""What an RMSNorm must give, from the formula in fp64.

Written from the contract alone: `h` as rounded to fp32, the formula in fp64, a rounding at each
place where the mode has one and nowhere else. Nothing here knows an order of summation. Beside it,
the modules of PyTorch and Hugging Face as they are written in eager mode, for the promises that
are made relative to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# significand bits, smallest normal exponent, largest finite value
_FORMAT = {
    torch.float32: (24, -126, float.fromhex("0x1.fffffep+127")),
    torch.float16: (11, -14, 65504.0),
    torch.bfloat16: (8, -126, float.fromhex("0x1.fep+127")),
}
LLAMA = ("hf-llama", "vllm")
GEMMA = ("hf-gemma", "torch", "cake")


@dataclass(frozen=True)
class Expected:
    """The oracle's answer.

    Attributes:
        out: the result in fp64, rounded at the mode's inner places but not at the last one.
        rounded: `out` rounded once to the dtype of the output.
        residual: the stored sum, in the residual's dtype, or None.
        rstd: fp64, the input's shape without the last dimension.
        judged: bool of rstd's shape; the rows whose mean square is a normal fp32 number.
    """

    out: torch.Tensor
    rounded: torch.Tensor
    residual: torch.Tensor | None
    rstd: torch.Tensor
    judged: torch.Tensor


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp64, exact, for exponents of normal numbers (an infinity's is as good as any other)."""
    return ((exponent.clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 to `dtype` in one rounding, nearest even (torch's own cast goes through fp32 and rounds twice)."""
    bits, low, largest = _FORMAT[dtype]
    assert values.dtype == torch.float64
    values = values.contiguous()
    exponent = ((values.view(torch.int64) >> 52) & 0x7FF) - 1023  # |values| = m * 2^exponent, 1 <= m < 2
    quantum = exponent.clamp(min=low) - (bits - 1)
    finite = values.isfinite()
    steps = torch.where(finite, values, 0.0) * _power(-quantum)
    near = torch.round(steps) * _power(quantum)  # torch.round is nearest even; the products are exact
    near = torch.where(near.abs() > largest, torch.copysign(torch.full_like(near, torch.inf), near), near)
    return torch.where(finite, near, values).to(dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    numerics: str = "flashinfer",
    offset: float = 0.0,
) -> Expected:
    """x * rstd * (w + offset) over the last dimension; with a residual, of x + residual.

    Args:
        x: [..., H], fp32, fp16 or bf16.
        weight: broadcasts against x, or None.
        residual: x's shape, or None.
        eps: taken as the fp32 number it rounds to.
        numerics: a public mode.
        offset: added to the weight.
    """
    x, weight, residual = (None if t is None else t.detach().cpu() for t in (x, weight, residual))
    assert x is not None
    stored = None
    h = x.double()
    if residual is not None:
        total = h + residual.double()  # exact enough to be rounded once more: see below
        h32 = x.float() + residual.float()  # "h as rounded to fp32" is one fp32 addition
        both = total.isfinite() & h32.isfinite()
        assert bool(((h32.double() - total).abs() <= total.abs() * 2.0**-24 + 2.0**-150)[both].all())
        h = h32.double()
        stored = round_to(h, residual.dtype)
        if numerics != "flashinfer":
            h = stored.double()
    eps32 = torch.tensor(eps, dtype=torch.float32).double()
    mean_square = h.square().mean(-1)
    rstd = 1.0 / torch.sqrt(mean_square + eps32)
    out = h * rstd.unsqueeze(-1)
    if weight is not None:
        if numerics in LLAMA and not offset:
            out = round_to(out, x.dtype).double()
        out = out * (weight.double() + offset)
    judged = (mean_square >= 2.0**-126) & (mean_square <= _FORMAT[torch.float32][2])
    return Expected(out, round_to(out, x.dtype), stored, rstd, judged)


# ------------------------------------------------------------------ eager PyTorch
def llama_module(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The Llama family's module: statistics in fp32, cast to the input's dtype, then the weight."""
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    normed = (wide * torch.rsqrt(variance + eps)).to(x.dtype)
    return normed if weight is None else (weight * normed).to(x.dtype)


def gemma_module(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The Gemma family's module: everything in fp32, gain 1 + w, one cast at the end."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).type_as(x)


def eager(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    numerics: str = "flashinfer",
    offset: float = 0.0,
) -> torch.Tensor:
    """What a user without this library would write in the same dtype, for comparison of errors."""
    if residual is not None:
        x = (x + residual).to(x.dtype)
    if offset and weight is not None:
        return gemma_module(x, weight, eps)
    if numerics in LLAMA:
        return llama_module(x, None if weight is None else weight.to(x.dtype), eps)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
