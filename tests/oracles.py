"""What a norm must give, from the formula in fp64.

Written from the contract alone: `h` as rounded to fp32, the formula in fp64, a rounding at each
place where the mode has one and nowhere else. Nothing here knows an order of summation. Beside it,
the modules of PyTorch and Hugging Face as they are written in eager mode, for the promises that
are made relative to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# significand bits, smallest normal exponent, largest finite value
_FORMAT = {
    torch.float32: (24, -126, float.fromhex("0x1.fffffep+127")),
    torch.float16: (11, -14, 65504.0),
    torch.bfloat16: (8, -126, float.fromhex("0x1.fep+127")),
    torch.float8_e4m3fn: (4, -6, 448.0),
    torch.float8_e5m2: (3, -14, 57344.0),
    torch.float4_e2m1fn_x2: (2, 0, 6.0),
}
E2M1 = torch.float4_e2m1fn_x2
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
LLAMA = ("hf-llama", "vllm")
GEMMA = ("hf-gemma", "torch", "cake")


@dataclass(frozen=True)
class Expected:
    """The oracle's answer.

    Attributes:
        out: the norm in fp64, rounded at the mode's inner places but not at the last one.
        rounded: `out` rounded once to T, the dtype of the input (of an int8 input: of the result or the weight).
        residual: the stored sum, in the residual's dtype, or None.
        rstd: fp64, the shape of the rows.
        judged: bool of rstd's shape; the rows whose mean square (variance) is a normal fp32 number.
        operand: where the result is a difference, the largest magnitude in each row of what is subtracted, or None.
    """

    out: torch.Tensor
    rounded: torch.Tensor
    residual: torch.Tensor | None
    rstd: torch.Tensor
    judged: torch.Tensor
    operand: torch.Tensor | None = None


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp64, exact, for exponents of normal numbers (an infinity's is as good as any other)."""
    return ((exponent.clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 to `dtype` in one rounding, nearest even (torch's own cast goes through fp32 and rounds twice).

    8-bit codes saturate; in int8 a NaN is 0. For pairs of e2m1 the `places` of the codes.
    """
    if dtype == torch.int8:
        return torch.round(values.nan_to_num(nan=0.0)).clamp(-127, 127).to(torch.int8)
    if dtype == E2M1:
        near = _nearest(values.nan_to_num(nan=6.0).clamp(-6, 6), dtype)
        size = near.abs()
        return torch.where(near < 0, -1, 1).to(torch.int8) * torch.searchsorted(_E2M1, size.contiguous()).to(torch.int8)
    return _nearest(values, dtype).to(dtype)


def places(packed: torch.Tensor) -> torch.Tensor:
    """[..., H / 2] pairs of e2m1 codes as [..., H] places among the format's magnitudes, with their sign; int8."""
    raw = packed.detach().cpu().contiguous().view(torch.uint8)
    code = torch.stack((raw & 15, raw >> 4), -1).flatten(-2).to(torch.int8)
    return torch.where(code >= 8, 8 - code, code)


def _nearest(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest values of a format, in fp64."""
    bits, low, largest = _FORMAT[dtype]
    assert values.dtype == torch.float64
    values = values.contiguous()
    exponent = ((values.view(torch.int64) >> 52) & 0x7FF) - 1023  # |values| = m * 2^exponent, 1 <= m < 2
    quantum = exponent.clamp(min=low) - (bits - 1)
    finite = values.isfinite()
    steps = torch.where(finite, values, 0.0) * _power(-quantum)
    near = torch.round(steps) * _power(quantum)  # torch.round is nearest even; the products are exact
    beyond = largest if dtype in CODES else torch.inf
    near = torch.where(near.abs() > largest, torch.copysign(torch.full_like(near, beyond), near), near)
    near = torch.where(finite, near, values)
    return near.clamp(-largest, largest) if dtype in CODES else near


def _loaded(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor | None,
    input_scale: torch.Tensor | None,
) -> torch.Tensor:
    """h as rounded to fp32, in fp64: the input, or its product with a scale, or its sum with a residual."""
    h = x.double()
    if input_scale is not None:
        scale = input_scale.double().flatten()
        h = round_to(h * (scale if scale.numel() == 1 else scale.view(*x.shape[:-1], 1)), torch.float32).double()
    if index is not None:
        there = (index >= 0) & (index < len(x))
        h = torch.where(there.unsqueeze(-1), h[torch.where(there, index, 0).long()], torch.nan)
    if residual is not None:
        total = h + residual.double()  # exact enough to be rounded once more: see below
        h32 = h.float() + residual.float()  # "h as rounded to fp32" is one fp32 addition
        both = total.isfinite() & h32.isfinite()
        assert bool(((h32.double() - total).abs() <= total.abs() * 2.0**-24 + 2.0**-150)[both].all())
        h = h32.double()
    return h


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    centred: bool = False,
    eps: float = 1e-6,
    numerics: str = "flashinfer",
    offset: float = 0.0,
    index: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    out: torch.dtype | None = None,
    once: bool = False,
    silu: bool = False,
) -> Expected:
    """h * rstd * (w + offset), or (h - mean) * rstd * w + b, over the last dimension.

    Args:
        x: [..., H], fp32, fp16 or bf16, or int8 with an input_scale; [P, H] with an index.
        weight: broadcasts against the rows, or None.
        residual: x's shape, or None.
        bias: broadcasts against the rows, or None.
        centred: LayerNorm rather than RMSNorm.
        eps: taken as the fp32 number it rounds to.
        numerics: a public mode.
        offset: added to the weight.
        index: which row of x each row is.
        input_scale: one element, or one for each row of x.
        out: dtype of the result, which an int8 input takes T from.
        once: nothing is rounded before the end, whatever the mode.
        silu: y / (1 + exp(-y)) of that.
    """
    x, weight, residual, bias, index, input_scale = (
        None if t is None else t.detach().cpu() for t in (x, weight, residual, bias, index, input_scale)
    )
    assert x is not None
    given = (x.dtype, out, None if weight is None else weight.dtype, torch.bfloat16)
    rounding = next(dtype for dtype in given if dtype in FLOATS)
    stored, h = None, _loaded(x, residual, index, input_scale)
    if residual is not None:
        stored = round_to(h, residual.dtype)
        if numerics != "flashinfer":
            h = stored.double()
    eps32 = torch.tensor(eps, dtype=torch.float32).double()
    if centred:
        h = h - h.mean(-1, keepdim=True)
    mean_square = h.square().mean(-1)
    rstd = 1.0 / torch.sqrt(mean_square + eps32)
    y = h * rstd.unsqueeze(-1)
    llama = weight is not None and numerics in LLAMA and not offset and not centred and not once
    if weight is not None:
        y = (round_to(y, rounding).double() if llama else y) * (weight.double() + offset)
    operand = None
    if centred:
        operand = y.abs().amax(-1)
        if bias is not None:
            operand = torch.maximum(operand, bias.double().abs().amax(-1))
            y = y + bias.double()
    if silu:
        y = y / (1 + torch.exp(-y))
    judged = (mean_square >= 2.0**-126) & (mean_square <= _FORMAT[torch.float32][2])
    return Expected(y, round_to(y, rounding), stored, rstd, judged, operand)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    numerics: str = "flashinfer",
    offset: float = 0.0,
) -> Expected:
    """x * rstd * (w + offset) over the last dimension; with a residual, of x + residual."""
    return norm(x, weight, residual, eps=eps, numerics=numerics, offset=offset)


# ------------------------------------------------------------------ gradients
@dataclass(frozen=True)
class ExpectedGradients:
    """The oracle's answer, all in fp64; None where there is no such tensor.

    Attributes:
        dh: of what was normalised, and so of x and of the residual.
        weight, bias: sums over rows, of the shapes of what they belong to.
        operand: the largest magnitude in each row of what dh is a difference of.
    """

    dh: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    operand: torch.Tensor


def gradients(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    dy: torch.Tensor,
    dh: torch.Tensor | None = None,
    drstd: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    centred: bool = False,
    eps: float = 1e-6,
    numerics: str = "flashinfer",
    offset: float = 0.0,
) -> ExpectedGradients:
    """The derivative of `norm`, by hand, of <dy, y> + <dh, h> + <drstd, rstd>.

    What was normalised is the sum as it is stored; in the mode "flashinfer" its statistics are those of the sum before.
    With "hf-llama" n is rounded in front of an offset too, as `nn.RMSNorm` has it; Gemma's operators never do that.
    """
    x, weight, residual, dy, dh, drstd, bias = (
        None if t is None else t.detach().cpu() for t in (x, weight, residual, dy, dh, drstd, bias)
    )
    assert x is not None and dy is not None
    total = _loaded(x, residual, None, None)
    stored = total if residual is None else round_to(total, residual.dtype).double()
    seen = total if numerics == "flashinfer" else stored
    mean = seen.mean(-1, keepdim=True) if centred else torch.zeros(())
    eps32 = torch.tensor(eps, dtype=torch.float32).double()
    rstd = 1.0 / torch.sqrt((seen - mean).square().mean(-1, keepdim=True) + eps32)
    n = (stored - mean) * rstd
    gain = torch.ones(()).double() if weight is None else weight.double() + offset
    gw = dy.double() * gain
    along = n * (gw * n).mean(-1, keepdim=True)
    found = rstd * ((gw - gw.mean(-1, keepdim=True) if centred else gw) - along)
    parts = [rstd * gw, rstd * along]
    if drstd is not None:
        parts.append(-drstd.double().unsqueeze(-1) * rstd.pow(3) * stored / x.shape[-1])
        found = found + parts[-1]
    if dh is not None:
        parts.append(dh.double())
        found = found + parts[-1]
    rounded = round_to(n, x.dtype).double() if numerics in LLAMA and not centred else n
    return ExpectedGradients(
        found,
        None if weight is None else (dy.double() * rounded).sum_to_size(weight.shape),
        None if bias is None else dy.double().sum_to_size(bias.shape),
        torch.stack([part.abs().amax(-1) for part in parts]).amax(0),
    )


def narrow(
    x: torch.Tensor, weight: torch.Tensor | None, dy: torch.Tensor, *, eps: float, offset: float
) -> tuple[Expected, ExpectedGradients]:
    """RMSNorm whose eps, offset, squares, and w + offset of the same dtype, are rounded to T; so is the saved rstd."""
    eps, offset = (float(torch.tensor(v, dtype=x.dtype)) for v in (eps, offset))
    h = x.double()
    gain = None if weight is None else weight.double() + offset
    if weight is not None and weight.dtype == x.dtype and offset:
        gain = round_to(gain, x.dtype).double()
    rstd = 1.0 / torch.sqrt(round_to(h.square(), x.dtype).double().mean(-1, keepdim=True) + eps)
    y = h * rstd if gain is None else h * rstd * gain
    everywhere = torch.ones(x.shape[:-1], dtype=torch.bool)
    saved = round_to(rstd, x.dtype).double()
    n, gw = h * saved, dy.double() if gain is None else dy.double() * gain
    along = n * (gw * n).mean(-1, keepdim=True)
    operand = (saved * torch.maximum(gw.abs(), along.abs())).amax(-1)
    dweight = None if weight is None else (dy.double() * n).sum_to_size(weight.shape)
    expected = Expected(y, round_to(y, x.dtype), None, rstd.squeeze(-1), everywhere)
    return expected, ExpectedGradients(saved * (gw - along), dweight, None, operand)


def eager_weight_gradient(x: torch.Tensor, dy: torch.Tensor, eps: float) -> torch.Tensor:
    """What PyTorch's autograd makes of RMSNorm written out in fp32."""
    weight = torch.ones(x.shape[-1], device=x.device, requires_grad=True)
    h = x.float()
    y = weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps))
    (found,) = torch.autograd.grad(y, weight, dy.float())
    return found


# ------------------------------------------------------------------ scales
def largest(dtype: torch.dtype) -> float:
    """The value of a format's largest finite code."""
    return 127.0 if dtype == torch.int8 else _FORMAT[dtype][2]


def each_block(values: torch.Tensor, size: int) -> torch.Tensor:
    """[..., H] as [rows, blocks, size] (0: one block), zeros where the last block ends early."""
    hidden = values.shape[-1]
    size = size or hidden
    flat = values.reshape(math.prod(values.shape[:-1]), hidden)
    return torch.nn.functional.pad(flat, (0, -hidden % size)).view(len(flat), -1, size)


def block_scales(
    norm: torch.Tensor,
    size: int,
    dtype: torch.dtype,
    *,
    floor: float,
    power: bool = False,
    cap: float | None = None,
    down: bool = False,
) -> torch.Tensor:
    """amax / Q of each block, [rows, blocks], in fp64; `power`: the smallest power of two that is not below it.

    `down`: the largest power of two that is not above amax, over that of Q.
    """
    a = each_block(norm.double(), size).abs().amax(-1)
    a = a.clamp(min=float(torch.tensor(floor)), max=None if cap is None else float(torch.tensor(cap)))
    scale = a / largest(dtype)
    if not power:
        return scale
    if down:
        exponent = torch.frexp(a)[1] - math.frexp(largest(dtype))[1]
        return torch.exp2(torch.where(a == 0, -127, exponent).clamp(-127, 127).double())
    part, exponent = torch.frexp(scale)
    return torch.exp2((exponent - (part == 0.5).long()).clamp(-127, 127).double())


def nvfp4_scales(norm: torch.Tensor, size: int, gain: float = 1.0) -> torch.Tensor:
    """min(G amax / 6, 448) of each block, [rows, blocks], in fp64."""
    a = each_block(norm.double(), size).abs().amax(-1)
    return (a * float(torch.tensor(gain, dtype=torch.float32)) / 6).clamp(max=448.0)


def quotients(norm: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
    """The fp64 norm divided by the stored scale of its block, [..., H]; 0 where that is 0."""
    hidden = norm.shape[-1]
    scale = scale.double().unsqueeze(-1)
    whole = torch.where(scale == 0, 0.0, each_block(norm.double(), size) / scale)
    return whole.reshape(whole.shape[0], -1)[:, :hidden].reshape(norm.shape)


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
    bias: torch.Tensor | None = None,
    centred: bool = False,
) -> torch.Tensor:
    """What a user without this library would write in the same dtype, for comparison of errors."""
    if residual is not None:
        x = (x + residual).to(x.dtype)
    if centred:
        weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if offset and weight is not None:
        return gemma_module(x, weight, eps)
    if numerics in LLAMA:
        return llama_module(x, None if weight is None else weight.to(x.dtype), eps)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
