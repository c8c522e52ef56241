"""What a call must satisfy before anything is launched; each failure names the argument.

All of it works on shapes, dtypes, devices and strides, so it traces under torch.compile; only
`check_memory` looks at addresses and runs where data exists.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flashnorm.core import layout
from flashnorm.program import Operand

if TYPE_CHECKING:
    from flashnorm.core.op import Op

FLOATS = ("float32", "float16", "bfloat16")
MAX_HIDDEN = 262_144
FLT_MAX = 3.4028234663852886e38


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_scalar(op: Op, name: str, value: Any) -> float:
    """A run-time fp32 value: a finite Python number >= 0."""
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]  # a compiler's symbol, checked when it has a value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{op.name}: {name} must be a Python number, got {type(value).__name__}")
    number = float(value)
    if not (0.0 <= number <= FLT_MAX):
        raise ValueError(f"{op.name}: {name} must be finite and >= 0, got {value!r}")
    return number


def check_option(op: Op, name: str, value: Any) -> Any:
    """One of an option's accepted values, or an alias of one."""
    accepted = op.options[name]
    try:
        return accepted[value]
    except (KeyError, TypeError):
        raise ValueError(f"{op.name}: {name} must be one of {sorted(map(str, accepted))}, got {value!r}") from None


def check_tensors(op: Op, tensors: Sequence[Any]) -> None:
    """Presence, types, dtypes, devices and shapes of the operands of one call."""
    for operand, tensor in zip(op.operands, tensors, strict=True):
        if tensor is None and (operand.name in op.optional or operand.mode == "out"):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op.name}: {op.label(operand)} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            what = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
            raise ValueError(f"{op.name}: {op.label(operand)} must be a plain strided tensor, got a {what} one")
    x = tensors[0]
    if x.ndim < 1:
        raise ValueError(f"{op.name}: {op.label(op.operands[0])} must have at least one dimension, got a 0-d tensor")
    hidden = x.shape[-1]
    if not 1 <= hidden <= MAX_HIDDEN:
        raise ValueError(
            f"{op.name}: the last dimension of {op.label(op.operands[0])} must be 1 to {MAX_HIDDEN}, got {hidden}"
        )
    for operand, tensor in zip(op.operands, tensors, strict=True):
        if tensor is not None:
            _check_dtype(op, operand, tensor, tensors)
            if tensor.device != x.device:
                first = op.label(op.operands[0])
                raise ValueError(f"{op.name}: {op.label(operand)} is on {tensor.device}, but {first} on {x.device}")
            _check_shape(op, operand, tensor, x)


def _check_dtype(op: Op, operand: Operand, tensor: torch.Tensor, tensors: Sequence[Any]) -> None:
    accepted: tuple[str, ...] = FLOATS
    if operand.dtype is not None:
        accepted = (operand.dtype,)
    elif operand.like is not None:
        accepted = (dtype_name(tensors[op.index(operand.like)]),)
    if dtype_name(tensor) not in accepted:
        raise ValueError(
            f"{op.name}: {op.label(operand)} must have dtype {' or '.join(accepted)}, got {dtype_name(tensor)}"
        )


def _check_shape(op: Op, operand: Operand, tensor: torch.Tensor, x: torch.Tensor) -> None:
    label = op.label(operand)
    if operand.kind == "row" and tensor.shape != x.shape:
        raise ValueError(f"{op.name}: {label} must have shape {tuple(x.shape)}, got {tuple(tensor.shape)}")
    if operand.kind == "per_row" and tensor.shape != x.shape[:-1]:
        raise ValueError(f"{op.name}: {label} must have shape {tuple(x.shape[:-1])}, got {tuple(tensor.shape)}")
    if operand.kind == "vec":
        hidden, shape = x.shape[-1], tensor.shape
        if len(shape) == 1 and shape[0] == hidden:
            return
        if not op.broadcast_vecs:
            raise ValueError(f"{op.name}: {label} must have shape ({hidden},), got {tuple(shape)}")
        lead, rows = shape[:-1], x.shape[:-1]
        fits = (
            len(shape) > 1
            and shape[-1] == hidden
            and len(lead) <= len(rows)
            and all(a == 1 or a == b for a, b in zip(reversed(lead), reversed(rows), strict=False))
        )
        if not fits:
            raise ValueError(
                f"{op.name}: {label} must broadcast to {tuple(x.shape)} with last dimension {hidden} "
                f"and not enlarge it, got {tuple(shape)}"
            )


def check_memory(op: Op, tensors: Sequence[torch.Tensor | None]) -> None:
    """Aliasing: no written row overlaps another one, a written tensor overlaps no other but `out` all of `x`."""
    spans: list[tuple[Operand, torch.Tensor, layout.Span]] = []
    for operand, tensor in zip(op.operands, tensors, strict=True):
        if tensor is None or tensor.numel() == 0:
            continue
        if tensor.data_ptr() == 0:
            raise ValueError(
                f"{op.name}: {op.label(operand)} has no memory (its storage was freed, or it never had one)"
            )
        if operand.written and tensor.is_neg():
            raise ValueError(f"{op.name}: {op.label(operand)} is a negated view, which cannot be written")
        if operand.written and layout.self_overlaps(tuple(tensor.shape), tensor.stride()):
            raise ValueError(
                f"{op.name}: {op.label(operand)} is written, so its elements must not overlap; "
                f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
        block = layout.span(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size())
        spans.append((operand, tensor, block))
    for i, (left, a, block_a) in enumerate(spans):
        for right, b, block_b in spans[i + 1 :]:
            if not (left.written or right.written):
                continue
            if layout.overlaps(block_a, block_b) and not _may_alias(op, left, a, right, b):
                exactly = ", or out the input exactly" if "out" in (left.name, right.name) else ""
                raise ValueError(
                    f"{op.name}: {op.label(right)} overlaps {op.label(left)} in memory; "
                    f"a written tensor must be apart from every other{exactly}"
                )


def check_identity(op: Op, tensors: Sequence[torch.Tensor | None]) -> None:
    """What a compiler can see of aliasing: one tensor given twice, and written."""
    for i, left in enumerate(op.operands):
        for j, right in enumerate(op.operands[i + 1 :], i + 1):
            same = tensors[i] is not None and tensors[i] is tensors[j]
            allowed = op.may_alias(right.name, left.name) or op.may_alias(left.name, right.name)
            if same and not allowed and (left.written or right.written):
                raise ValueError(f"{op.name}: {op.label(right)} is {op.label(left)}, and one of them is written")


def _may_alias(op: Op, left: Operand, a: torch.Tensor, right: Operand, b: torch.Tensor) -> bool:
    aliases = op.may_alias(right.name, left.name) or op.may_alias(left.name, right.name)
    return aliases and same_view(a, b)


def same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.data_ptr() != b.data_ptr() or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))
