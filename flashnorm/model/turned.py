"""Q and K normalised and turned, V copied: what `QkNormRope` must write, bit for bit, and what it means in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flashnorm.model import formats
from flashnorm.model.arithmetic import add, canonical_sum, div, fma, mul, sqrt, sub
from flashnorm.model.stores import fp32
from flashnorm.program import COS, SIN, QkLayout, QkNormRope
from flashnorm.program.qk import two_floats

Tensors = Mapping[str, Tensor]
PARTS = ("q_out", "k_out", "v_out")
OF_LARGEST = 1e-6  # of the largest operand: what a difference in fp32 may lose
NEAR_TIE = 1e-6  # relative: how well fp32 knows a norm, which may then be rounded either way
QUARTERS = 2 / torch.pi  # of a radian


class Near(NamedTuple):
    """A value by the formula, and how far from it a result may be rounded from."""

    value: Tensor
    room: Tensor


def canonical(program: QkNormRope, given: Tensors, scalars: Mapping[str, float]) -> dict[str, Tensor]:
    """The bits of Q, K and V, [tokens, heads, head_dim].

    Args:
        program: with its layout.
        given: operands by name, on the CPU: x [tokens, C], weights [heads, head_dim], positions [tokens].
        scalars: run-time values by name.
    """
    layout = _layout(program)
    sin, cos = _turns(program, layout, given)
    kind = given["x"].dtype
    made = {}
    for i, part in enumerate(_parts(layout, given["x"])):
        v = part.float()
        if PARTS[i] == "v_out":
            scaled = mul(v, fp32(scalars["v_quant_scale"], v))
            made[PARTS[i]] = formats.encode(scaled, formats.E4M3) if program.coded else part.clone()
            continue
        if program.scope != "none" and v.numel():
            rows = _together(program, v)
            mean = div(canonical_sum(rows, rows), float(rows.shape[-1]))
            v = mul(v, div(1.0, sqrt(add(mean, fp32(scalars["eps"], v)))).unsqueeze(-1))
            weight = given.get(f"{'qk'[i]}_weight")
            v = v if weight is None else mul(v, weight.float())
            v = v if program.coded else v.to(kind).float()
        a, b = _pairs(program, layout, v)
        low, high = fma(a, cos, -mul(b, sin)), fma(b, cos, mul(a, sin))
        if layout.attention_factor != 1.0:
            low, high = (mul(t, fp32(layout.attention_factor, t)) for t in (low, high))
        y = _joined(program, layout, v, low, high).where(~cos[..., :1].isnan(), torch.nan)
        scaled = mul(y, fp32(scalars["output_quant_scale"], y))
        made[PARTS[i]] = formats.encode(scaled, formats.E4M3) if program.coded else y.to(kind)
    return made


def exact(program: QkNormRope, given: Tensors, scalars: Mapping[str, float]) -> dict[str, Near]:
    """The formula in fp64, rounded at the inner place alone; see `canonical`."""
    layout = _layout(program)
    cos, sin = _angles(program, layout, given)
    kind = given["x"].dtype
    made = {}
    for i, part in enumerate(_parts(layout, given["x"])):
        v, scale = part.double(), fp32(scalars["v_quant_scale" if PARTS[i] == "v_out" else "output_quant_scale"], part)
        by = scale.double() if program.coded else 1.0
        if PARTS[i] == "v_out":
            made[PARTS[i]] = Near(v * by, torch.zeros_like(v))
            continue
        unsure = torch.zeros_like(v)
        if program.scope != "none" and v.numel():
            mean = _together(program, v).square().mean(-1)
            v = v * (mean + fp32(scalars["eps"], part).double()).rsqrt().unsqueeze(-1)
            weight = given.get(f"{'qk'[i]}_weight")
            v = v if weight is None else v * weight.double()
            if not program.coded:
                ends = [(v * (1 + side * NEAR_TIE)).to(kind).double() for side in (-1, 1)]
                v, unsure = v.to(kind).double(), (ends[1] - ends[0]).abs()
        a, b = _pairs(program, layout, v)
        factor = layout.attention_factor
        low, high = (a * cos - b * sin) * factor, (b * cos + a * sin) * factor
        near, far = _pairs(program, layout, unsure)
        both = (near + far) * factor
        largest = v.abs().nan_to_num(0.0, posinf=0.0).amax(-1, keepdim=True) * max(1.0, factor) if v.numel() else v
        room = _joined(program, layout, unsure, both, both) + OF_LARGEST * largest
        y = _joined(program, layout, v, low, high).where(~cos[..., :1].isnan(), torch.nan)
        made[PARTS[i]] = Near(y * by, room * by)
    return made


# ------------------------------------------------------------------ what both share
def _layout(program: QkNormRope) -> QkLayout:
    assert program.layout is not None
    return program.layout


def _parts(layout: QkLayout, x: Tensor) -> list[Tensor]:
    cuts = x.split([n * layout.head_dim for n in layout.heads], -1)
    return [cut.unflatten(-1, (n, layout.head_dim)) for cut, n in zip(cuts, layout.heads, strict=True)]


def _together(program: QkNormRope, v: Tensor) -> Tensor:
    """What is normalised together, as the last dimension."""
    return v.flatten(-2).unsqueeze(-2) if program.scope == "hidden" else v


def _pairs(program: QkNormRope, layout: QkLayout, v: Tensor) -> tuple[Tensor, Tensor]:
    turning = v[..., : layout.rotary_dim]
    if program.interleave:
        return turning[..., ::2], turning[..., 1::2]
    half = layout.rotary_dim // 2
    return turning[..., :half], turning[..., half:]


def _joined(program: QkNormRope, layout: QkLayout, v: Tensor, low: Tensor, high: Tensor) -> Tensor:
    turned = torch.stack((low, high), -1).flatten(-2) if program.interleave else torch.cat((low, high), -1)
    return torch.cat((turned, v[..., layout.rotary_dim :]), -1)


def _steps(layout: QkLayout, tokens: int) -> Tensor:
    """[tokens, pairs]: how many steps each pair turns at a token."""
    _, height, width = layout.grid
    token = torch.arange(tokens) % layout.sequence
    axes = (token // (height * width), token // width % height, token % width)
    columns = [axis.unsqueeze(-1).expand(-1, n // 2) for axis, n in zip(axes, layout.channels, strict=True)]
    return torch.cat(columns, -1)


def _picked(given: Tensors) -> tuple[Tensor, Tensor]:
    """(cosines, sines) [tokens, 1, pairs] from the table; NaN where it has no row."""
    table, index = given["cos_sin_cache"], given["positions"].long()
    inside = (index >= 0) & (index < table.shape[0])
    rows = table[index.where(inside, 0)].where(inside.unsqueeze(-1), torch.nan).unsqueeze(-2)
    cos, sin = rows.chunk(2, -1)
    return cos, sin


def _turns(program: QkNormRope, layout: QkLayout, given: Tensors) -> tuple[Tensor, Tensor]:
    """(sines, cosines) [tokens, 1, pairs], by the operations that the program prescribes."""
    if program.cached:
        cos, sin = _picked(given)
        return sin, cos
    t = _steps(layout, given["x"].shape[0]).float().unsqueeze(-2)
    both = [two_floats(f * QUARTERS) for f in layout.frequencies()]
    hi, lo = torch.tensor(both, dtype=torch.float32).unbind(-1)
    magic = fp32(1.5 * 2.0**23, t)
    product = mul(t, hi)
    quarters = sub(add(product, magic), magic)
    y = add(sub(product, quarters), fma(t, lo, fma(t, hi, -product)))
    z = mul(y, y)
    s, c = (fp32(factors[-1], z).expand_as(z) for factors in (SIN, COS))
    for factor in SIN[-2::-1]:
        s = fma(z, s, fp32(factor, z))
    for factor in (*COS[-2::-1], 1.0):
        c = fma(z, c, fp32(factor, z))
    s, which = mul(y, s), quarters.long() % 4
    sine = torch.stack((s, c, -s, -c)).gather(0, which.unsqueeze(0))[0]
    cosine = torch.stack((c, -s, -c, s)).gather(0, which.unsqueeze(0))[0]
    return sine, cosine


def _angles(program: QkNormRope, layout: QkLayout, given: Tensors) -> tuple[Tensor, Tensor]:
    """(cosines, sines) [tokens, 1, pairs] in fp64."""
    if program.cached:
        cos, sin = _picked(given)
        return cos.double(), sin.double()
    steps = _steps(layout, given["x"].shape[0]).double().unsqueeze(-2)
    angle = steps * torch.tensor(layout.frequencies(), dtype=torch.float64)
    return angle.cos(), angle.sin()
