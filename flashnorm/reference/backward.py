"""Gradients of the norms, from the saved statistics, with PyTorch's own sums."""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm.reference import rows


def rmsnorm_backward(
    *,
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    g_residual: Tensor | None,
    dx: Tensor | None,
    dresidual: Tensor | None,
    dweight: Tensor | None,
    workspace: Tensor | None,
    weight_offset: str,
    round_norm: str,
) -> None:
    """dx = rstd * (gw - n * mean(gw * n)) + g_residual; dweight = sum(dout * n), n = x * rstd, gw = dout * g.

    Args:
        dout: [..., H], fp32, fp16 or bf16, the gradient of the output.
        x: [..., H], what was normalised, as it was stored.
        weight: broadcasts to x, last dimension H; None for no weight. g = weight + offset.
        rstd: fp32, one value a row.
        g_residual: [..., H], a gradient of x itself, or None.
        dx, dresidual: [..., H], written; None where nobody wants them.
        dweight: of the weight's shape, written; or None.
        workspace: not used.
        weight_offset: a number.
        round_norm: "yes" or "no": whether dweight takes n rounded to dout's dtype.
    """
    scale = rstd.reshape(*x.shape[:-1], 1)
    n = x.float() * scale
    gw = _weighted(dout.float(), weight, float(weight_offset))
    grad = scale * (gw - n * (gw * n).mean(-1, keepdim=True))
    rounded = n.to(dout.dtype).float() if round_norm == "yes" else n
    _write(grad, g_residual, dx, dresidual, (dweight, dout.float() * rounded))


def layernorm_backward(
    *,
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rest: Tensor,
    rstd: Tensor,
    g_residual: Tensor | None,
    dx: Tensor | None,
    dresidual: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    workspace: Tensor | None,
) -> None:
    """dx = rstd * (gw - mean(gw) - n * mean(gw * n)) + g_residual; dweight = sum(dout * n), dbias = sum(dout).

    n = (x - mean - rest) * rstd, gw = dout * weight. Args are those of `rmsnorm_backward`, and

    Args:
        mean, rest: fp32, one value a row: the mean of x, and the mean of what it left.
        dbias: [H], written; None where nobody wants it.
    """
    shape = (*x.shape[:-1], 1)
    scale = rstd.reshape(shape)
    n = (x.float() - mean.reshape(shape) - rest.reshape(shape)) * scale
    gw = _weighted(dout.float(), weight, 0.0)
    grad = scale * (gw - gw.mean(-1, keepdim=True) - n * (gw * n).mean(-1, keepdim=True))
    _write(grad, g_residual, dx, dresidual, (dweight, dout.float() * n), (dbias, dout.float()))


def _weighted(dout: Tensor, weight: Tensor | None, offset: float) -> Tensor:
    if weight is None:
        return dout
    return dout * (weight.float() + offset if offset else weight.float())


def _write(
    grad: Tensor,
    g_residual: Tensor | None,
    dx: Tensor | None,
    dresidual: Tensor | None,
    *terms: tuple[Tensor | None, Tensor],
) -> None:
    """Rows' gradients, and sums of terms over the rows that share a vector."""
    grad = grad if g_residual is None else grad + g_residual.float()
    sums = [(target, term if target is None else _sum_to(term, target.shape)) for target, term in terms]
    rows.write((dx, grad), (dresidual, grad), *sums)


def _sum_to(term: Tensor, shape: torch.Size) -> Tensor:
    """The sum over the dimensions that `shape` lacks, or has as 1; the last one stays."""
    lead = (1,) * (term.dim() - len(shape)) + tuple(shape[:-1])
    over = [i for i, n in enumerate(lead) if n == 1 and term.shape[i] != 1]
    return (term.sum(over) if over else term).reshape(shape)
