"""What a call must satisfy before anything is launched; each failure names the argument.

All of it works on shapes, dtypes, devices and strides, so it traces under torch.compile; only
`check_memory` looks at addresses and runs where data exists.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flashnorm.core import layout
from flashnorm.program import (
    FLOATS,
    SCALES,
    TAILED,
    TILE_ROWS,
    BackwardProgram,
    BlockScales,
    Operand,
    Program,
    QkNormRope,
    RowProgram,
    partials,
)

if TYPE_CHECKING:
    from flashnorm.core.op import Op

MAX_HIDDEN = 262_144
FLT_MAX = 3.4028234663852886e38
SMALLEST = 7.006492321624087e-46  # the least double that rounds to an fp32 value other than 0
# The least of run-time scalars that need not be positive, as fp32 values.
AT_LEAST = {"eps": 0.0, "next_eps": 0.0, **dict.fromkeys(("alpha_value", "center", "next_center"), -FLT_MAX)}


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def least(name: str) -> float:
    """The smallest value that a run-time scalar may have."""
    return AT_LEAST.get(name, SMALLEST)


def check_scalar(op: Op, name: str, value: Any) -> float:
    """A run-time fp32 value: a finite Python number >= 0, or > 0."""
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]  # a compiler's symbol, checked when it has a value
    label = op.labels.get(name, name)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        tensor = " or a tensor" if name in {scalar for scalar, _ in op.by_value.values()} else ""
        raise TypeError(f"{op.called}: {label} must be a Python number{tensor}, got {type(value).__name__}")
    number = float(value)
    if not (least(name) <= number <= FLT_MAX):
        low = least(name)
        bound = "" if low < 0 else " and >= 0" if low == 0 else " and > 0 as an fp32 value"
        raise ValueError(f"{op.called}: {label} must be finite{bound}, got {value!r}")
    return number


def split(op: Op, name: str, value: Any) -> tuple[torch.Tensor | None, float]:
    """An argument that is a number or a tensor of one element, as (tensor that a kernel reads or None, number).

    A tensor on the CPU is read here, so what it requires of autograd is asked here too. A kernel reads fp32, fp16 and
    bf16; other numbers become fp32.
    """
    (scalar, default), label = op.by_value[name], op.labels.get(name, name)
    if value is None and default is not None:
        return None, default
    if not isinstance(value, torch.Tensor):
        return None, check_scalar(op, scalar, value)
    if op.operands[op.index(name)].kind == "vec":
        return value, 1.0
    if value.dim() > 1 or value.numel() != 1:
        raise ValueError(f"{op.called}: {label} must be a scalar tensor or shape (1,), got {tuple(value.shape)}")
    if value.dtype == torch.bool or value.dtype.is_complex:
        raise ValueError(f"{op.called}: {label} must be a real number, got {dtype_name(value)}")
    if value.device.type == "cpu" and type(value) in PLAIN and not torch.compiler.is_compiling():
        if (value.requires_grad and torch.is_grad_enabled()) or has_tangent(value):
            raise RuntimeError(f"{op.called}: {label} requires grad, but {unrecorded()}")
        return None, check_scalar(op, scalar, value.item())
    return value if dtype_name(value) in FLOATS else value.float(), 1.0


PLAIN = (torch.Tensor, torch.nn.Parameter)


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode AD follows a tensor: also under `torch.no_grad()`, which stops recording alone.

    In inference mode PyTorch's own operators drop tangents, and tensors under a transform cannot be unpacked there.
    """
    if torch.autograd.forward_ad._current_level < 0 or torch.is_inference_mode_enabled():
        return False
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def transformed() -> bool:
    """Whether a transform of `torch.func` or forward mode is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def unrecorded() -> str:
    """Why an operator without a derivative would lose a gradient, and what to do about it."""
    if transformed():
        return (
            "this operator records no gradient for torch.func and forward mode; use backward() or torch.autograd.grad "
            "where it is differentiable, else call it on detached tensors"
        )
    return "this operator records no gradient; call it under torch.no_grad(), or on detached tensors"


def check_option(op: Op, name: str, value: Any) -> Any:
    """One of an option's accepted values, or an alias of one."""
    accepted = op.options[name]
    try:
        # 16.0 and True are found under 16 and 1, and are neither; nor is 1, of any kind, the flag True.
        if type(accepted) is dict and not isinstance(value, str):
            kinds = set(map(type, accepted))
            if type(value) not in kinds and (bool in kinds or isinstance(value, bool | float)):
                raise KeyError(value)
        return accepted[value]
    except (KeyError, TypeError):
        words = sorted(set(map(str, accepted)))  # some are accepted as a number too
        raise ValueError(f"{op.called}: {name} must be one of {words}, got {value!r}") from None


def check_flag(called: str, name: str, value: Any) -> None:
    """True or False: what merely equals one of them is a mistake."""
    if not isinstance(value, bool):
        raise ValueError(f"{called}: {name} must be True or False, got {value!r}")


def check_settings(op: Op, given: Sequence[Any]) -> tuple[list[float], dict[str, Any], bool]:
    """What a call has behind its operands: the scalars, the options, and whether launches may depend on each other."""
    scalars = [check_scalar(op, name, value) for name, value in zip(op.scalars, given, strict=False)]
    words = zip(op.options, given[len(op.scalars) : -1], strict=True)
    options = {name: check_option(op, name, value) for name, value in words}
    pdl = given[-1]
    if pdl is not None and not isinstance(pdl, bool):
        raise ValueError(f"{op.called}: enable_pdl must be None, True or False, got {pdl!r}")
    return scalars, options, pdl is None or pdl


def check_dtype_of(op: Op, name: str, tensor: Any, input: Any) -> None:
    """An output that must have the input's dtype."""
    both = isinstance(tensor, torch.Tensor) and isinstance(input, torch.Tensor)
    if both and dtype_name(input) in FLOATS and tensor.dtype != input.dtype:  # a wrong input is named by itself
        raise ValueError(f"{op.called}: {name} must have the dtype of input, {input.dtype}, got {tensor.dtype}")


def check_present(op: Op, tensors: Sequence[Any]) -> None:
    """Presence and types of the operands of one call, and the row length."""
    for operand, tensor in zip(op.operands, tensors, strict=True):
        if tensor is None and (operand.name in op.optional or (operand.mode == "out" and operand.like)):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op.called}: {op.label(operand)} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            what = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
            raise ValueError(f"{op.called}: {op.label(operand)} must be a plain strided tensor, got a {what} one")
    x = tensors[0]
    if x.ndim < 1:
        raise ValueError(f"{op.called}: {op.label(op.operands[0])} must have at least one dimension, got a 0-d tensor")
    hidden = x.shape[-1]
    if not 1 <= hidden <= MAX_HIDDEN:
        raise ValueError(
            f"{op.called}: the last dimension of {op.label(op.operands[0])} must be 1 to {MAX_HIDDEN}, got {hidden}"
        )


def check_whole_blocks(op: Op, hidden: int, block: int) -> None:
    """That a row, of the first operand, is whole blocks."""
    if hidden % block:
        raise ValueError(
            f"{op.called}: the last dimension of {op.label(op.operands[0])} must be a multiple of {block}, got {hidden}"
        )


def check_tensors(op: Op, program: Program, tensors: Sequence[Any]) -> None:
    """Dtypes, devices and shapes of one call, by the operands that its program has."""
    x = tensors[0]
    kinds = {operand.name: operand for operand in program.operands()}
    store = program.store if isinstance(program, RowProgram) else None
    if isinstance(program, QkNormRope):
        if complaint := program.complaint(tuple(x.shape)):
            raise ValueError(f"{op.called}: {op.label(op.operands[0])} {complaint}")
    elif isinstance(store, BlockScales) and store.whole:
        check_whole_blocks(op, x.shape[-1], store.block)
    index = tensors[op.index("row_index")] if "row_index" in kinds else None
    rows = tuple(x.shape[:-1] if index is None else index.shape)
    for each, tensor in zip(op.operands, tensors, strict=True):
        if tensor is None:
            continue
        operand = kinds.get(each.name)
        if operand is None:
            raise ValueError(f"{op.called}: {op.label(each)} does not go with the other arguments")
        _check_dtype(op, operand, tensor, tensors)
        if tensor.device != x.device and not (operand.kind == "scalar" and tensor.device.type == "cpu"):
            first = op.label(op.operands[0])
            raise ValueError(f"{op.called}: {op.label(operand)} is on {tensor.device}, but {first} on {x.device}")
        _check_shape(op, operand, tensor, x, rows)
        if operand.kind in SCALES:
            assert isinstance(store, BlockScales)
            count, columns = math.prod(rows), store.columns(x.shape[-1], operand.kind)
            size, _ = scales_view(op, program, operand, tensor, count, x.shape[-1])
            # Tiles have been compared with the rows already.
            if operand.kind == "blocks" and (len(size) != 2 or size[0] < count or size[1] != columns):
                raise ValueError(
                    f"{op.called}: {op.label(operand)} must hold {columns} values for each of {count} rows, "
                    f"got shape {tuple(tensor.shape)}"
                )
        if operand.kind == "workspace":
            assert isinstance(program, BackwardProgram)
            dweight = tensors[op.index("dweight")] if program.dweight else None
            _check_workspace(op, operand, tensor, program.sums, x.shape[-1], dweight)


def _check_workspace(op: Op, operand: Operand, tensor: Any, sums: int, hidden: int, dweight: Any) -> None:
    weight_rows = 1 if dweight is None else dweight.numel() // hidden
    needed = sums * partials(weight_rows, hidden) * weight_rows * hidden
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() < needed:
        raise ValueError(
            f"{op.called}: {op.label(operand)} must be one contiguous dimension of at least {needed} elements, "
            f"got shape {tuple(tensor.shape)}"
        )


def scales_view(
    op: Op, program: Program, operand: Operand, tensor: Any, rows: int, hidden: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and strides of the [M', B] that kernels take for scales; raises ValueError where the tensor does not fit."""
    assert isinstance(program, RowProgram) and isinstance(program.store, BlockScales)
    store = program.store
    if operand.kind == "blocks":
        return op.blocks(tensor, rows)
    padded, columns = -(-rows // TILE_ROWS) * TILE_ROWS, store.columns(hidden, operand.kind)
    if tensor.numel() != padded * columns or not tensor.is_contiguous():
        raise ValueError(
            f"{op.called}: {op.label(operand)} must be contiguous and hold {padded} x {columns} = {padded * columns} "
            f"bytes (tiles of 128 x 4), got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    return (padded, columns), (columns, 1)


def _check_dtype(op: Op, operand: Operand, tensor: torch.Tensor, tensors: Sequence[Any]) -> None:
    accepted = operand.dtypes
    if operand.like is not None:
        like = dtype_name(tensors[op.index(operand.like)])
        accepted = (like,) if like in accepted else accepted
    if dtype_name(tensor) not in accepted:
        raise ValueError(
            f"{op.called}: {op.label(operand)} must have dtype {' or '.join(accepted)}, got {dtype_name(tensor)}"
        )


def _check_shape(op: Op, operand: Operand, tensor: torch.Tensor, x: torch.Tensor, rows: tuple[int, ...]) -> None:
    label, shape, hidden = op.label(operand), tuple(tensor.shape), x.shape[-1]
    if operand.kind == "row" and shape != (*rows, hidden):
        raise ValueError(f"{op.called}: {label} must have shape {(*rows, hidden)}, got {shape}")
    if operand.kind == "pairs" and shape != (*rows, hidden // 2):
        raise ValueError(f"{op.called}: {label} must have shape {(*rows, hidden // 2)}, got {shape}")
    if operand.kind in ("per_row", "per_pool"):
        grid = rows if operand.kind == "per_row" else tuple(x.shape[:-1])
        count = math.prod(grid)
        fits = shape == grid
        if not operand.written and not fits:
            fits = tensor.numel() == 1 or shape in ((*grid, 1), (count, 1))
        if not fits:
            more = "" if operand.written else f", {(count, 1)} or one element"
            raise ValueError(f"{op.called}: {label} must have shape {grid}{more}, got {shape}")
    if operand.kind == "scalar" and tensor.numel() != 1:
        raise ValueError(f"{op.called}: {label} must be a scalar tensor or shape (1,), got {shape}")
    if operand.kind == "vec":
        _check_vec(op, label, shape, rows, hidden)
    if operand.kind in TAILED:
        lead = {"heads": rows, "gain": (), "table": (shape[0] if shape else 0,)}[operand.kind]
        accepted = [(*lead, *tail) for tail in operand.tails]
        if shape not in accepted:
            raise ValueError(f"{op.called}: {label} must have shape {' or '.join(map(str, accepted))}, got {shape}")


def _check_vec(op: Op, label: str, shape: tuple[int, ...], rows: tuple[int, ...], hidden: int) -> None:
    if len(shape) == 1 and shape[0] == hidden:
        return
    if not op.broadcast_vecs:
        raise ValueError(f"{op.called}: {label} must have shape ({hidden},), got {shape}")
    lead = shape[:-1]
    fits = (
        len(shape) > 1
        and shape[-1] == hidden
        and len(lead) <= len(rows)
        and all(a == 1 or a == b for a, b in zip(reversed(lead), reversed(rows), strict=False))
    )
    if not fits:
        raise ValueError(
            f"{op.called}: {label} must broadcast to {(*rows, hidden)} with last dimension {hidden} "
            f"and not enlarge it, got {shape}"
        )


def check_memory(op: Op, tensors: Sequence[torch.Tensor | None]) -> None:
    """Aliasing: no written row overlaps another one, a written tensor overlaps no other but `out` all of `x`."""
    spans: list[tuple[Operand, torch.Tensor, layout.Span]] = []
    for operand, tensor in zip(op.operands, tensors, strict=True):
        if tensor is None or tensor.numel() == 0:
            continue
        if tensor.data_ptr() == 0:
            raise ValueError(
                f"{op.called}: {op.label(operand)} has no memory (its storage was freed, or it never had one)"
            )
        if operand.written and tensor.is_neg():
            raise ValueError(f"{op.called}: {op.label(operand)} is a negated view, which cannot be written")
        size, stride = op.reach(operand, tensor, tensors)
        if operand.written and layout.self_overlaps(size, stride):
            raise ValueError(
                f"{op.called}: {op.label(operand)} is written, so its elements must not overlap; "
                f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
        block = layout.span(tensor.data_ptr(), size, stride, tensor.element_size())
        spans.append((operand, tensor, block))
    for i, (left, a, block_a) in enumerate(spans):
        for right, b, block_b in spans[i + 1 :]:
            if not (left.written or right.written):
                continue
            if layout.overlaps(block_a, block_b) and not _may_alias(op, left, a, right, b):
                exactly = ", or out the input exactly" if "out" in (left.name, right.name) else ""
                raise ValueError(
                    f"{op.called}: {op.label(right)} overlaps {op.label(left)} in memory; "
                    f"a written tensor must be apart from every other{exactly}"
                )


def check_identity(op: Op, tensors: Sequence[torch.Tensor | None]) -> None:
    """What a compiler can see of aliasing: one tensor given twice, and written."""
    for i, left in enumerate(op.operands):
        for j, right in enumerate(op.operands[i + 1 :], i + 1):
            same = tensors[i] is not None and tensors[i] is tensors[j]
            allowed = op.may_alias(right.name, left.name) or op.may_alias(left.name, right.name)
            if same and not allowed and (left.written or right.written):
                raise ValueError(f"{op.called}: {op.label(right)} is {op.label(left)}, and one of them is written")


def _may_alias(op: Op, left: Operand, a: torch.Tensor, right: Operand, b: torch.Tensor) -> bool:
    aliases = op.may_alias(right.name, left.name) or op.may_alias(left.name, right.name)
    return aliases and same_view(a, b)


def same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.data_ptr() != b.data_ptr() or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))
