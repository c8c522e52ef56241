"""What two processes do with a norm of DTensors; `tests.test_dtensor` starts them."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flashnorm
from flashnorm import functional, nn
from tests.inputs import gains, rows
from tests.tolerance import assert_same_bits, assert_same_sum

WORLD = 2
SHAPE = (2, 6, 64)


def start(rank: int, port: int, device: str, folder: str) -> None:
    """One process: joins the group and runs every check; its first failure is the last, since processes must agree."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    patience = datetime.timedelta(seconds=120)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=WORLD, timeout=patience)
    mesh = dist.device_mesh.init_device_mesh(device, (WORLD,))
    for name, check in CHECKS.items():
        torch.manual_seed(0)
        said = ""
        try:
            check(mesh, torch.device(device))
        except Exception:
            said = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(said)
        if said:
            break
    dist.destroy_process_group()


Norm = Callable[..., Any]
# name -> (the call, how many rows tensors, how many vectors)
NORMS: dict[str, tuple[Norm, int, int]] = {
    "rmsnorm": (flashnorm.rmsnorm, 1, 1),
    "gemma_rmsnorm": (flashnorm.gemma_rmsnorm, 1, 1),
    "layernorm": (flashnorm.layernorm, 1, 2),
    "add_rmsnorm": (flashnorm.add_rmsnorm, 2, 1),
    "add_layernorm": (flashnorm.add_layernorm, 2, 2),
    "rms_norm": (lambda x, w: functional.rms_norm(x, w, offset=0.5, casting_mode="gemma"), 1, 1),
    "rms_norm_none": (lambda x, w: functional.rms_norm(x, w, casting_mode="none"), 1, 1),
}


def values(count: int, vectors: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    made = [rows(SHAPE, dtype, i) for i in range(count)] + [gains(SHAPE[-1:], dtype, i) for i in range(vectors)]
    return [t.to(device).requires_grad_() for t in made]


def differentiate(norm: Norm, tensors: list[Any]) -> tuple[list[Any], list[Any]]:
    """Results, and gradients of a loss that weighs every element differently."""
    results = norm(*tensors)
    results = list(results) if isinstance(results, tuple) else [results]
    loss = sum((y.float() * y.float()).sum() for y in results)
    return results, list(torch.autograd.grad(loss, tensors))


def rows_stay_sharded(mesh: Any, device: torch.device) -> None:
    """Results keep the placement and the bits; a replicated weight's gradient is that of the whole batch."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    for dtype in (torch.float32, torch.bfloat16):
        for name, (norm, count, vectors) in NORMS.items():
            plain = values(count, vectors, device, dtype)
            want, gradients = differentiate(norm, plain)
            for dim in (0, 1):
                placed = [Shard(dim)] * count + [Replicate()] * vectors
                tensors = [
                    distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
                    for t, p in zip(plain, placed, strict=True)
                ]
                with torch.no_grad():
                    unrecorded = norm(*tensors)
                first = unrecorded[0] if isinstance(unrecorded, tuple) else unrecorded
                assert_same_bits(first.full_tensor(), want[0], name)
                with CommDebugMode() as seen, torch.no_grad():
                    norm(*tensors)
                assert seen.get_total_counts() == 0, (name, seen.get_comm_counts())
                got, mine = differentiate(norm, tensors)
                what = f"{name} {dtype} sharded by {dim}"
                for y, whole in zip(got, want, strict=True):
                    assert y.placements == (Shard(dim),), (what, y.placements)
                    assert_same_bits(y.full_tensor(), whole, what)
                for t, g, whole in zip(tensors, mine, gradients, strict=True):
                    assert g.placements == t.placements, (what, g.placements)
                    assert g.dtype == dtype
                    if t.dim() == 1:
                        assert_same_sum(g.full_tensor(), whole, what)
                    else:
                        assert_same_bits(g.full_tensor(), whole, what)


def weights_by_row(mesh: Any, device: torch.device) -> None:
    """A weight for every head goes with the heads."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, w = rows(SHAPE, torch.float32).to(device).requires_grad_(), gains(SHAPE[1:], torch.float32).to(device)
    want, gradients = differentiate(flashnorm.rmsnorm, [x, w.requires_grad_()])
    for dim, placed in ((0, Replicate()), (1, Replicate()), (1, Shard(0))):
        tensors = [distribute_tensor(x.detach(), mesh, [Shard(dim)]), distribute_tensor(w.detach(), mesh, [placed])]
        got, mine = differentiate(flashnorm.rmsnorm, [t.requires_grad_() for t in tensors])
        assert_same_bits(got[0].full_tensor(), want[0])
        for g, whole in zip(mine, gradients, strict=True):
            assert_same_sum(g.full_tensor(), whole)


def others_are_redistributed(mesh: Any, device: torch.device) -> None:
    """Hidden-sharded and partial inputs become whole rows; a row-sharded residual says where a partial sum goes."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    x, w = values(1, 1, device, torch.float32)
    want, gradients = differentiate(flashnorm.rmsnorm, [x, w])
    weight = distribute_tensor(w.detach(), mesh, [Replicate()]).requires_grad_()
    for placed in (Shard(2), Shard(-1), Replicate()):
        tensor = distribute_tensor(x.detach(), mesh, [placed]).requires_grad_()
        got, mine = differentiate(flashnorm.rmsnorm, [tensor, weight])
        assert got[0].placements == (Replicate(),)
        assert_same_bits(got[0].full_tensor(), want[0])
        for g, whole in zip(mine, gradients, strict=True):
            assert_same_bits(g.full_tensor(), whole)
    half = DTensor.from_local(x.detach() / 2, mesh, [Partial()])
    y, h = flashnorm.add_rmsnorm(half, distribute_tensor(torch.zeros_like(x), mesh, [Shard(1)]), weight)
    assert y.placements == h.placements == (Shard(1),)
    assert_same_bits(y.full_tensor(), want[0])


def uneven_and_empty(mesh: Any, device: torch.device) -> None:
    """Three rows on two processes, and one: somebody has none."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for count in (3, 1):
        x, w = rows((count, 64), torch.float32).to(device), gains((64,), torch.float32).to(device)
        want, gradients = differentiate(flashnorm.rmsnorm, [x.requires_grad_(), w.requires_grad_()])
        tensors = [
            distribute_tensor(t.detach(), mesh, [p]).requires_grad_() for t, p in ((x, Shard(0)), (w, Replicate()))
        ]
        got, mine = differentiate(flashnorm.rmsnorm, tensors)
        assert_same_bits(got[0].full_tensor(), want[0])
        assert_same_bits(mine[0].full_tensor(), gradients[0])
        assert_same_sum(mine[1].full_tensor(), gradients[1])


def others_are_refused(mesh: Any, device: torch.device) -> None:
    """A plain weight with a DTensor, and operators that write in place or quantise."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, w = (t.detach() for t in values(1, 1, device, torch.float32))
    mine, weight = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Replicate()])
    for wrong, text in (
        (lambda: flashnorm.rmsnorm(mine, w), "some are plain tensors"),
        (lambda: flashnorm.rmsnorm(mine, weight, out=mine), "takes no DTensors"),
        (lambda: flashnorm.fused_add_rmsnorm(mine, mine.clone(), weight), "takes no DTensors"),
        (lambda: flashnorm.rmsnorm_dynamic_quant(mine, weight), "takes no DTensors"),
    ):
        try:
            wrong()
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"nothing was refused: {text}")


def a_module_is_distributed(mesh: Any, device: torch.device) -> None:
    """`distribute_module` makes parameters DTensors; a compiled module gives the same."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    x = rows(SHAPE, torch.float32).to(device)
    for make in (nn.RMSNorm, nn.RMSNormForGemma, nn.LayerNorm):
        whole = make(SHAPE[-1]).to(device)
        whole(x).square().sum().backward()
        module = distribute_module(make(SHAPE[-1]).to(device), mesh)
        placed = distribute_tensor(x, mesh, [Shard(1)])
        assert_same_bits(module(placed).full_tensor(), whole(x))
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_same_bits(compiled(placed).full_tensor(), whole(x))
        module(placed).to_local().square().sum().backward()
        assert_same_sum(module.weight.grad.full_tensor(), whole.weight.grad)


def fully_sharded(mesh: Any, device: torch.device) -> None:
    """FSDP2: parameters sharded at rest, whole while they are used."""
    from torch.distributed.fsdp import fully_shard

    x, target = rows((4, 64), torch.float32).to(device), rows((4, 64), torch.float32, "target").to(device)
    whole, parts = (torch.nn.Sequential(torch.nn.Linear(64, 64), nn.RMSNorm(64)).to(device) for _ in range(2))
    whole[1].weight.data.copy_(gains((64,), torch.float32))
    parts.load_state_dict(whole.state_dict())
    fully_shard(parts, mesh=mesh)
    whole(x).sub(target).square().mean().backward()
    mine = slice(dist.get_rank(), None, WORLD)
    parts(x[mine]).sub(target[mine]).square().mean().backward()
    for a, b in zip(parts.parameters(), whole.parameters(), strict=True):
        assert_same_sum(a.grad.full_tensor(), b.grad)


CHECKS = {
    check.__name__: check
    for check in (
        rows_stay_sharded,
        weights_by_row,
        others_are_redistributed,
        uneven_and_empty,
        others_are_refused,
        a_module_is_distributed,
        fully_sharded,
    )
}
