"""What the LayerNorms of diffusion transformers do before their call: shapes over [B, R, H], codes, and batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashnorm.core.checks import PLAIN, check_identity, check_memory, check_present
from flashnorm.core.op import Op
from flashnorm.program import TILE_COLUMNS, TILE_ROWS

Tensor = torch.Tensor
BLOCK = {"nvfp4": 16, "mxfp8": 32}
MODULATION = ("gate", "mod_scale", "shift")
BIASES = ("gate_bias", "mod_scale_bias", "shift_bias")


def check_shapes(op: Op, given: Mapping[str, Any], codes: bool) -> None:
    """Every shape that goes with the input's [B, R, H], but for those of codes; what is no tensor is named later."""
    x = given["x"]
    batches, _, hidden = x.shape
    for name in ("residual", "residual_out", *(() if codes else ("out",))):
        tensor = given[name]
        if isinstance(tensor, torch.Tensor) and tensor.shape != x.shape:
            raise ValueError(
                f"{op.called}: {op.labels.get(name, name)} must have shape {tuple(x.shape)}, got {tuple(tensor.shape)}"
            )
    for name in MODULATION:
        tensor = given.get(name)
        if isinstance(tensor, torch.Tensor) and not _modulates(tensor, x):
            raise ValueError(
                f"{op.called}: {op.labels.get(name, name)} must have shape ({hidden},), (1, {hidden}), "
                f"({batches}, {hidden}), ({batches}, 1, {hidden}) or {tuple(x.shape)}, got {tuple(tensor.shape)}"
            )
    for name in (*BIASES, "weight", "bias"):
        tensor, more = given.get(name), f" or (1, {hidden})" if name in BIASES else ""
        if isinstance(tensor, torch.Tensor) and not (
            tuple(tensor.shape) == (hidden,) or (more and tuple(tensor.shape) == (1, hidden))
        ):
            raise ValueError(
                f"{op.called}: {op.labels.get(name, name)} must have shape ({hidden},){more}, got {tuple(tensor.shape)}"
            )


def _modulates(tensor: Tensor, x: Tensor) -> bool:
    """Whether a vector is one for all rows, for each batch, or for each row."""
    shape, (batches, rows, hidden) = tuple(tensor.shape), x.shape
    if not 1 <= len(shape) <= 3 or shape[-1] != hidden:
        return False
    if len(shape) == 2:
        return shape[0] in (1, batches) or (batches == 1 and shape[0] == rows)
    return len(shape) == 1 or (shape[0] in (1, batches) and shape[1] in (1, rows))


def over_rows(tensor: Any, x: Tensor) -> Any:
    """[B, H] modulates whole batches; where there is one batch, [R, H] its rows."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2:
        return tensor
    return tensor.unsqueeze(1 if tensor.shape[0] in (1, x.shape[0]) else 0)


def start_alike(came: Mapping[str, Any], given: dict[str, Any]) -> bool:
    """Whether the operands of a call are tensors that were given, or others over the same memory from its start on."""
    for name, theirs in came.items():
        mine: Any = given.get(name)
        if theirs is mine:
            continue
        if type(theirs) not in PLAIN or type(mine) not in PLAIN:
            return False
        try:
            if theirs.data_ptr() != mine.data_ptr():
                return False
        except RuntimeError:  # it has no memory of its own
            return False
    return True


def allocate_codes(op: Op, form: str, given: dict[str, Any]) -> None:
    """Codes as int32, and their scales, new where they were not given; whatever was given is looked at."""
    x, residual = given["x"], given["residual"]
    batches, rows, hidden = x.shape
    columns = -(-hidden // (BLOCK[form] * TILE_COLUMNS))
    wanted = {
        "out": ((batches, rows, hidden // (8 if form == "nvfp4" else 4)), torch.int32),
        "scale": ((batches, -(-rows // TILE_ROWS), columns, 32, 4, 4), torch.uint8),
    }
    for name, (shape, dtype) in wanted.items():
        tensor = given[name]
        label = op.labels[name]
        if tensor is None:
            given[name] = torch.empty(shape, dtype=dtype, device=x.device)
        elif not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op.called}: {label} must be a torch.Tensor, got {type(tensor).__name__}")
        elif tensor.layout is not torch.strided or tensor.dtype != dtype or not tensor.is_contiguous():
            strides = f" with strides {tensor.stride()}" if tensor.layout is torch.strided else f", {tensor.layout}"
            raise ValueError(
                f"{op.called}: {label} must be contiguous {dtype}, got {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}{strides}"
            )
        elif tuple(tensor.shape) != shape:
            raise ValueError(f"{op.called}: {label} must have shape {shape}, got {tuple(tensor.shape)}")
        elif tensor.device != x.device:
            raise ValueError(f"{op.called}: {label} is on {tensor.device}, but input on {x.device}")
    if given["residual_out"] is None and isinstance(residual, torch.Tensor):
        given["residual_out"] = torch.empty_like(residual, memory_format=torch.contiguous_format)


def parts(op: Op, given: dict[str, Any]) -> list[dict[str, Any]]:
    """What is called at once: each batch has tiles of its own, which are those of all rows where tiles end with it."""
    x = given["x"]
    if x.shape[0] <= 1 or x.shape[1] % TILE_ROWS == 0:
        return [dict(given)]
    # What one batch writes, another one might read: of that, calls of single batches see nothing.
    tensors = [t if isinstance(t := given.get(o.name), torch.Tensor) else None for o in op.operands]
    if all(t is None or (type(t) in PLAIN and t.device.type != "meta") for t in tensors):
        check_present(op, tensors)
        if torch.compiler.is_compiling():
            check_identity(op, tensors)
        else:
            check_memory(op, tensors)
    return [{name: _of_batch(tensor, batch) for name, tensor in given.items()} for batch in range(x.shape[0])]


def _of_batch(tensor: Any, batch: int) -> Any:
    """One batch of an operand; vectors for all batches stay."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 3:
        return tensor
    return tensor[batch if tensor.shape[0] > 1 else 0]
