"""DTensors: a norm works on rows, so every process normalises the rows that it has.

- A mesh dimension that shards rows (the batch, the sequence, heads) stays as it is: nothing is communicated.
- One that shards the hidden dimension, or holds partial sums, is redistributed to whole rows first.
- A weight is made whole where its rows are shared, and follows the rows where it is given for each. Its gradient is a
  sum over all processes that hold other rows: it is added up in fp32 and has the weight's own placements.

`torch.distributed` is imported only where a tensor is a DTensor already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashnorm.core.checks import PLAIN

Tensor = torch.Tensor


def sharded(*tensors: Any) -> bool:
    """Whether some of the arguments are DTensors."""
    return any(type(t) not in PLAIN and _is_dtensor(t) for t in tensors)


def _is_dtensor(value: Any) -> bool:
    return any(
        kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed") for kind in type(value).__mro__
    )


def over_rows(
    function: Callable[..., Any], rows: Sequence[Any], vectors: Sequence[Any], *rest: Any, **more: Any
) -> Any:
    """`function(*rows, *vectors, *rest, **more)` on what each process has; its results as DTensors.

    Args:
        function: takes plain tensors; returns one or several whose leading dimensions are those of the rows.
        rows: [..., H], of one shape; None where absent.
        vectors: weights and biases, [H] or broadcasting to the rows; None where absent.

    Raises:
        ValueError: a plain tensor among DTensors, or DTensors of several meshes.
    """
    from torch.distributed.tensor import DTensor

    given = [t for t in (*rows, *vectors) if t is not None]
    if not all(isinstance(t, DTensor) for t in given):
        raise ValueError("some arguments are DTensors and some are plain tensors; distribute or localise all of them")
    first = rows[0]
    mesh, dims = first.device_mesh, first.ndim
    if any(t.device_mesh != mesh for t in given):
        raise ValueError("all DTensors of a call must be on one device mesh")
    placements = [_rows_stay([t.placements[i] for t in rows if t is not None], dims) for i in range(mesh.ndim)]
    local = [None if t is None else _local(t, mesh, placements, placements) for t in rows]
    local += [None if t is None else _vector(t, mesh, placements, dims) for t in vectors]
    found = function(*local, *rest, **more)

    def back(result: Tensor) -> Any:
        shape = first.shape[: result.dim()]
        stride = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            stride[i - 1] = stride[i] * shape[i]
        return DTensor.from_local(
            result.contiguous(), mesh, placements, run_check=False, shape=shape, stride=tuple(stride)
        )

    return tuple(map(back, found)) if isinstance(found, tuple) else back(found)


def _rows_stay(placements: Sequence[Any], dims: int) -> Any:
    """Along one mesh dimension: the first placement that shards rows; without one, everybody has all of them."""
    from torch.distributed.tensor import Replicate

    return next((p for p in placements if p.is_shard() and p.dim % dims != dims - 1), Replicate())


def _local(tensor: Any, mesh: Any, placements: Any, gradients: Any) -> Any:
    return tensor.redistribute(mesh, placements).to_local(grad_placements=gradients)


def _vector(tensor: Any, mesh: Any, placements: Any, dims: int) -> Any:
    """A weight on this process, in fp32 where its gradient is added up over processes."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    here, gradients = [], []
    for p in placements:
        own = p.dim % dims - (dims - tensor.ndim) if p.is_shard() else -1
        follows = own >= 0 and tensor.shape[own] != 1
        here.append(Shard(own) if follows else Replicate())
        gradients.append(Shard(own) if follows else Partial() if p.is_shard() else Replicate())
    summed = any(p.is_partial() for p in gradients)
    if summed and tensor.requires_grad and torch.is_grad_enabled():
        tensor = tensor.float()  # exact, so the forward's bits stay; its gradient is rounded once, after the sum
    return _local(tensor, mesh, here, gradients)
