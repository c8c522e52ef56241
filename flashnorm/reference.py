"""The formula of every operator in plain PyTorch: its executable specification, and the `torch` route.

Everything happens in fp32, whatever the dtypes of the tensors, and rounds to them where the numerics
mode says so. Each function writes into tensors its caller gives, like a kernel of any other route, and
each reads all of its inputs before it writes: an `out` that is `x` itself is fine.

A mode decides two things, and nothing else:

=============  ==============================  =======================
mode           normalised value                residual that is normed
=============  ==============================  =======================
"flashinfer"   one rounding, at the end        the unrounded fp32 sum
"hf-llama"     rounded to x's dtype before a   the sum as it is stored
               plain weight, product rounded
"hf-gemma"     one rounding, at the end        the sum as it is stored
"torch"        the same                        the same
=============  ==============================  =======================

A weight with an offset (Gemma's `1 + w`) is always applied in fp32 with one rounding at the end. The
sums are PyTorch's own, so the two "hf" modes are bit-equal to the modules they are named after, and
"torch" is to `torch.nn.functional.rms_norm` (which has a kernel and an order of its own on GPUs); the other
routes use the canonical sum and are not bit-equal to this one.

The functions trace under `torch.compile(fullgraph=True)` and on fake tensors: no value decides control flow.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Whether a mode normalises the sum as it is stored in the residual. A name that is not here is a
# caller that did not resolve its aliases: a KeyError, not a guess.
_ROUNDS_RESIDUAL = {"flashinfer": False, "hf-llama": True, "hf-gemma": True, "torch": True}
_ROUNDS_NORM = {"flashinfer": False, "hf-llama": True, "hf-gemma": False, "torch": False}


def rmsnorm(
    x: Tensor,
    weight: Tensor | None,
    out: Tensor,
    rstd: Tensor | None,
    *,
    eps: float,
    numerics: str,
    offset: float = 0.0,
) -> None:
    """out = x / sqrt(mean(x^2) + eps) * (weight + offset), over the last dimension.

    Args:
        x: [..., H], fp32, fp16 or bf16. M = 0 rows are fine.
        weight: broadcasts to x, last dimension H, any of the three dtypes; None for no weight.
        out: like x, written. Any dtype; may be x itself.
        rstd: [...], fp32, written with 1 / sqrt(mean(x^2) + eps); None where nobody wants it.
        eps: a finite value >= 0, used as fp32.
        numerics: "flashinfer", "hf-llama", "hf-gemma" or "torch".
        offset: added to the weight in fp32; 1.0 in Gemma's forms.
    """
    y, inverse = _normalise(x.float(), weight, x.dtype, eps, numerics, offset, stored=x.dtype)
    if rstd is not None:
        rstd.copy_(inverse.squeeze(-1))
    out.copy_(y)


def fused_add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    numerics: str,
    offset: float = 0.0,
) -> None:
    """residual <- x + residual; x <- rmsnorm(that sum) * (weight + offset), both in place.

    Args:
        x: [..., H], fp32, fp16 or bf16; read as the summand, then written with the result.
        residual: like x, of any of the three dtypes; written first. It shares no memory with x.
        weight: broadcasts to x, last dimension H; None for no weight.
        eps: a finite value >= 0, used as fp32.
        numerics: "flashinfer" (norms the unrounded sum), "hf-llama", "hf-gemma" or "torch" (the stored one).
        offset: added to the weight in fp32; 1.0 in Gemma's forms.
    """
    add_rmsnorm(x, residual, residual, weight, x, eps=eps, numerics=numerics, offset=offset)


def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    h: Tensor,
    weight: Tensor | None,
    out: Tensor,
    *,
    eps: float,
    numerics: str,
    offset: float = 0.0,
) -> None:
    """h = x + residual; out = rmsnorm(h) * (weight + offset): `fused_add_rmsnorm` with results of their own.

    Args:
        x: [..., H], fp32, fp16 or bf16.
        residual: like x, of any of the three dtypes.
        h: like residual, written first with the sum, rounded once. May be `residual` itself.
        weight: broadcasts to x, last dimension H; None for no weight.
        out: like x, written. May be `x` itself.
        eps: a finite value >= 0, used as fp32.
        numerics: "flashinfer" (norms the unrounded sum), "hf-llama", "hf-gemma" or "torch" (the stored one).
        offset: added to the weight in fp32; 1.0 in Gemma's forms.
    """
    total = x.float() + residual.float()
    h.copy_(total)
    if _ROUNDS_RESIDUAL[numerics]:
        total = total.to(h.dtype).float()
    y, _ = _normalise(total, weight, x.dtype, eps, numerics, offset, stored=h.dtype)
    out.copy_(y)


def _normalise(
    h: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
    eps: float,
    numerics: str,
    offset: float,
    *,
    stored: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y, normalised and weighted, and rstd with a last dimension of 1; fp32, but y in `dtype` where the mode says so.

    `dtype` is T of the specification: that of the operator's input; `stored` is the dtype that holds h exactly in
    the modes that normalise a stored value.
    """
    rounds_norm = _ROUNDS_NORM[numerics]
    # rsqrt and pow, not 1/sqrt and h*h: the same operations as the modules this must equal to the bit.
    rstd = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    n = h * rstd
    gain = weight is None or (weight.dim() == 1 and weight.dtype == dtype and not offset)
    if numerics == "torch" and gain and stored == dtype:
        return F.rms_norm(h.to(dtype), h.shape[-1:], weight, eps), rstd
    if weight is None:
        return n, rstd
    if offset:
        return n * (weight.float() + offset), rstd
    if rounds_norm:
        # A 16-bit product is computed in fp32 and rounded once, so this is `weight * n.to(dtype)`, and
        # keeps to the contract's dtype where that expression would promote (an fp32 weight).
        return (n.to(dtype).float() * weight.float()).to(dtype), rstd
    return n * weight.float(), rstd
