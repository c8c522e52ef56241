"""What a call that must be refused looks like: good arguments of every operator, one of them changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashnorm
from tests.combos import COMBOS, DYNAMIC, OPS, PLAIN, SILU, USUAL, Combo
from tests.problem import Call, Problem

M, H = 4, 128
BF16 = torch.bfloat16
FLOATS = ("float32", "float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e5m2")

# Each operator with everything that it can be given.
FULL: dict[str, Combo] = {combo.op: combo for combo in USUAL}
FULL[DYNAMIC] = next(c for c in COMBOS if c.op == DYNAMIC and c.x == "bf16" and c.side and c.column and c.residual)
FULL["rmsnorm"] = next(c for c in COMBOS if str(c) == "rmsnorm-flashinfer-bf16-w=bf16")

CODES = ("out", "y_fp4")
SIDES = ("normed_out", "y_out")
ROWS = ("input", "residual", *CODES, *SIDES)  # tensors shaped like the input, or half as wide
GAINS = ("weight", "gemma", "beta")
SCALES = ("block_scale", "scale", "block_scale_unswizzled")


def good(op: str, device: torch.device) -> Call:
    """A call that is fine, each tensor in a watched buffer."""
    call = Problem(FULL[op], (M, H), device).prepare("none" if FULL[op].in_place else "contiguous")
    for guard in call.guards.values():
        guard.written = True
    return call


def tensors(op: str) -> list[str]:
    """The tensor parameters of an operator, but for the scale of the static ones, which may be a number."""
    call = good(op, torch.device("cpu"))
    return [name for name, value in call.arguments.items() if isinstance(value, torch.Tensor)]


def accepted(op: str, name: str) -> tuple[str, ...]:
    """The dtypes that a parameter takes, the others being as they are."""
    combo = FULL[op]
    if name == "y_fp4":
        return ("float4_e2m1fn_x2", "uint8")
    if name == "out":
        return ("bfloat16",) if op in (*PLAIN, SILU) else FP8[:1] if combo.makes_scales else FP8
    if name in SCALES and combo.scaled:
        return ("float8_e4m3fn", "uint8") if combo.form == "e4m3" else ("uint8", "float8_e8m0fnu")
    return ("float32",) if name in SCALES else ("bfloat16",) if name in SIDES else FLOATS


def elsewhere(op: str, name: str) -> tuple[str, ...]:
    """Dtypes of a parameter that ask another operator."""
    return (*FP8, "uint8") if (op, name) == (SILU, "out") else ()


def like_the_input(op: str, name: str, *shape: int) -> tuple[int, ...]:
    """The shape of one of `ROWS` where the input has this one."""
    *lead, h = shape
    return (*lead, -(-h // 2) if name == "y_fp4" else h)


def written(op: str) -> list[str]:
    """The tensor parameters that an operator writes."""
    names = ("residual", *CODES, *SIDES, *SCALES, *(["input"] if FULL[op].in_place else []))
    return [name for name in tensors(op) if name in names]


EVERY = [(op, name) for op in OPS for name in tensors(op)]
every_argument = pytest.mark.parametrize(("op", "name"), EVERY)
every_op = pytest.mark.parametrize("op", OPS)
LIKE_THE_INPUT = [(op, name) for op, name in EVERY if name in ROWS and name != "input"]
EVERY_GAIN = [(op, name) for op, name in EVERY if name in GAINS]
WRITTEN = [(op, name) for op in OPS for name in written(op)]


def refuse(
    op: str,
    device: torch.device,
    error: type[Exception] | tuple[type[Exception], ...],
    *needles: str,
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Calls `op` with some arguments changed: it must raise, say each needle, and write nothing.

    Args:
        change: given the good arguments by name, returns what is passed in place of them.
    """
    call = good(op, device)
    changed = change(dict(call.arguments))
    before = {name: value.clone() for name, value in changed.items() if has_data(value)}
    with pytest.raises(error) as caught:
        getattr(flashnorm, op)(**{**call.arguments, **changed})
    text = str(caught.value)
    for needle in needles:
        assert needle in text, f"{needle!r} is not in: {text}"
    for name, guard in call.guards.items():
        assert guard.unchanged(), f"{name} was written"
    for name, value in before.items():
        now, then = (t.clone(memory_format=torch.contiguous_format).flatten() for t in (changed[name], value))
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8)), f"{name} was written"


def has_data(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and value.dim() > 0
        and value.numel() > 0
    )


def filled(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor of halves, of any dtype that holds them."""
    return torch.full(shape, 0.5, device=device).to(dtype)
