"""The two norms of fp32 rows, with PyTorch's own sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Whether a mode rounds the normalised row before a plain weight, and the product after it. A name that is
# not here is a caller that did not resolve its aliases.
_ROUNDS_NORM = {"flashinfer": False, "hf-llama": True, "hf-gemma": False, "torch": False}


def rms_norm(
    h: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
    *,
    eps: float,
    numerics: str,
    offset: float = 0.0,
    stored: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """y, normalised and weighted, and rstd with a last dimension of 1; fp32, but y in `dtype` where the mode says so.

    Args:
        h: [..., H], fp32.
        weight: broadcasts to h, last dimension H; None for no weight.
        dtype: T of the specification.
        eps: a finite value >= 0, used as fp32.
        numerics: "flashinfer", "hf-llama", "hf-gemma" or "torch".
        offset: added to the weight in fp32; 1.0 in Gemma's forms.
        stored: the dtype that holds h exactly, given where y is rounded to T next: then the mode "torch" may ask
            PyTorch's own function, which does both.
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


def layer_norm(
    h: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """y, normalised, weighted and shifted, and both means and rstd with a last dimension of 1; fp32.

    The second mean takes out what the rounding of the first left in every element: for a row of 40000 ... 40003
    that is more than the row's own spread allows.

    Args:
        h: [..., H], fp32.
        weight: broadcasts to h, last dimension H; None for no weight.
        bias: the same; None for no bias.
        eps: a finite value >= 0, used as fp32.
    """
    mean = h.mean(-1, keepdim=True)
    d = h - mean
    rest = d.mean(-1, keepdim=True)
    d = d - rest
    rstd = torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + eps)
    y = d * rstd
    y = y if weight is None else y * weight.float()
    return y if bias is None else y + bias.float(), (mean, rest, rstd)
