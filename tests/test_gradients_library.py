"""Recorded norms seen from PyTorch: compilers, checkpoints, autocast, saved memory, and what must raise."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flashnorm
from flashnorm import nn
from flashnorm.core.gradients import _library
from tests.inputs import gains, rows
from tests.test_gradients import BF16, F32, NORMS, leaves
from tests.tolerance import assert_same_bits

TRAINED = ("rmsnorm", "gemma_rmsnorm", "layernorm", "add_rmsnorm", "gemma_add_rmsnorm", "add_layernorm")
every_trained = pytest.mark.parametrize("name", TRAINED)


def gradients(norm: Any, tensors: dict[str, Any]) -> list[torch.Tensor]:
    loss = sum((y.float() * (i + 1)).square().sum() for i, y in enumerate(norm(tensors)))
    return list(torch.autograd.grad(loss, list(tensors.values())))


@every_trained
def test_opcheck(name: str, device: torch.device) -> None:
    """The registered operator: its schema, its fake, its gradient, dynamic shapes."""
    t = leaves(NORMS[name].tensors((4, 64), F32), device)
    given = (t["x"], t.get("residual"), t["weight"], t.get("bias"), 1e-5, "hf-gemma", None)
    torch.library.opcheck(getattr(torch.ops.flashnorm, f"{name}_train").default, given)


@every_trained
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_gradients_are_bit_equal_with_one_graph_for_all_m(
    name: str, backend: str, device: torch.device
) -> None:
    norm = NORMS[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(norm, backend=counter, fullgraph=True)
    for m in (4, 7):
        tensors = leaves(norm.tensors((m, 64), BF16), device)
        for key in ("x", "residual"):
            if key in tensors:
                torch._dynamo.mark_dynamic(tensors[key], 0)
        for got, want in zip(gradients(compiled, tensors), gradients(norm, tensors), strict=True):
            assert_same_bits(got, want, f"{name} {m}")
    assert counter.frame_count == 1


@every_trained
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(name: str, reentrant: bool, device: torch.device) -> None:
    norm = NORMS[name]
    tensors = leaves(norm.tensors((4, 64), BF16), device)

    def again(given: dict[str, Any]) -> Any:
        def run(*values: torch.Tensor) -> tuple[Any, ...]:
            return tuple(y.sin() for y in norm(dict(zip(given, values, strict=True))))

        return checkpoint(run, *given.values(), use_reentrant=reentrant)

    def plain(given: dict[str, Any]) -> Any:
        return tuple(y.sin() for y in norm(given))

    if reentrant:  # refuses torch.autograd.grad
        found = []
        for run in (again, plain):
            for t in tensors.values():
                t.grad = None
            sum(y.float().square().sum() for y in run(tensors)).backward()
            found.append([t.grad for t in tensors.values()])
    else:
        found = [gradients(run, tensors) for run in (again, plain)]
    for got, want in zip(*found, strict=True):
        assert_same_bits(got, want, name)


@every_trained
def test_a_checkpointing_policy_sees_one_operator(name: str, device: torch.device) -> None:
    """Selective checkpointing: the norm is named, and kept or made again as the policy says."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    norm = NORMS[name]
    op = getattr(torch.ops.flashnorm, f"{name}_train").default
    tensors = leaves(norm.tensors((4, 64), BF16), device)
    for keep in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE):
        seen = []

        def policy(ctx: Any, func: Any, *_: Any, keep: Any = keep, seen: list[Any] = seen, **__: Any) -> Any:
            seen.append(func)
            return keep if func is op else CheckpointPolicy.PREFER_RECOMPUTE

        def run(given: dict[str, Any], policy: Any = policy) -> Any:
            def body(*values: torch.Tensor) -> tuple[Any, ...]:
                return tuple(y.sin() for y in norm(dict(zip(given, values, strict=True))))

            context = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
            return checkpoint(body, *given.values(), use_reentrant=False, context_fn=context)

        got = gradients(run, tensors)
        want = gradients(lambda given: tuple(y.sin() for y in norm(given)), tensors)
        assert op in seen
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b, name)


@every_trained
def test_autocast_changes_nothing(name: str, device: torch.device) -> None:
    norm = NORMS[name]
    tensors = leaves(norm.tensors((4, 64), F32), device)
    want = gradients(norm, tensors)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = gradients(norm, tensors)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b, name)


@every_trained
def test_what_is_saved(name: str, device: torch.device) -> None:
    """The normalised row, the weight, and fp32 statistics: one of RMSNorm, three of LayerNorm, a row."""
    norm, shape = NORMS[name], (32, 64)
    tensors = leaves(norm.tensors(shape, BF16), device)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = norm(tensors)
    row = tensors["x"] if len(results) == 1 else results[1]
    assert row.data_ptr() in {t.data_ptr() for t in saved}  # itself, no copy
    assert tensors["weight"].data_ptr() in {t.data_ptr() for t in saved}
    statistics = 3 if norm.centred else 1
    size = sum(t.numel() * t.element_size() for t in saved)
    assert size == row.numel() * 2 + 64 * 2 + shape[0] * 4 * statistics


@pytest.mark.gpu
@every_trained
def test_peak_memory(name: str, device: torch.device) -> None:
    """Forward: the results and the statistics. Backward: the gradients and a workspace, which is some megabytes."""
    norm, shape = NORMS[name], (16384, 1024)
    tensors = leaves(norm.tensors(shape, BF16), device)
    results = norm(tensors)
    torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    for t in tensors.values():
        t.grad = None
    grads = [torch.ones_like(y) for y in results]
    del results
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start, one = torch.cuda.memory_allocated(), shape[0] * shape[1] * 2
    results = norm(tensors)
    assert torch.cuda.max_memory_allocated() - start <= len(results) * one + 16 * shape[0] + 2**20
    torch.autograd.backward(results, grads)
    rows_of = len(results) + sum(key in ("x", "residual") for key in tensors)
    assert torch.cuda.max_memory_allocated() - start <= rows_of * one + 16 * 2**20


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traces_and_exports_hold_one_operator(device: torch.device) -> None:
    x, weight = rows((4, 64), F32).to(device), gains((64,), F32).to(device).requires_grad_()
    want = flashnorm.rmsnorm(x, weight)
    traced = torch.jit.trace(lambda a, b: flashnorm.rmsnorm(a, b), (x, weight), check_trace=False)
    assert "flashnorm::rmsnorm_train" in str(traced.graph) and traced(x, weight).requires_grad
    assert_same_bits(traced(x, weight), want)
    norm = nn.RMSNorm(64, casting_mode="gemma").to(device)
    program = torch.export.export(norm, (x,), dynamic_shapes=({0: torch.export.Dim("m", min=2)},))
    assert any("flashnorm.rmsnorm_train" in str(node.target) for node in program.graph.nodes)
    longer = rows((9, 64), F32).to(device)
    assert_same_bits(program.module()(longer), norm(longer))


# ------------------------------------------------------------------ what must raise
def test_a_lost_gradient_raises(device: torch.device) -> None:
    x, weight = rows((4, 64), F32).to(device), gains((64,), F32).to(device).requires_grad_()
    index = torch.zeros(2, dtype=torch.int32, device=device)
    codes, scale = torch.ones(4, 64, dtype=torch.int8, device=device), torch.ones(1, device=device)
    for lost, by in (
        (lambda: flashnorm.rmsnorm(x, weight, out=torch.empty_like(x)), "out"),
        (lambda: flashnorm.gemma_rmsnorm(x, weight, out=x), "out"),
        (lambda: flashnorm.layernorm(x, weight, None, out=torch.empty_like(x)), "out"),
        (lambda: flashnorm.rmsnorm(x, weight, row_index=index), "row_index"),
        (lambda: flashnorm.gemma_rmsnorm(x, weight, row_index=index, out=x[:2].clone()), "row_index"),
        (lambda: flashnorm.rmsnorm(codes, weight, input_scale=scale), "input_scale"),
        (lambda: flashnorm.rmsnorm(codes, weight, input_scale=scale, row_index=index), "row_index and input_scale"),
        (lambda: flashnorm.fused_add_rmsnorm(x, x.clone(), weight), ""),
        (lambda: flashnorm.fused_add_layernorm(x, x.clone(), weight, None), ""),
        (lambda: flashnorm.rmsnorm_quant(x.to(torch.float8_e4m3fn), x, weight, 1.0), ""),
    ):
        kept, call = x.clone(), f"a call with {by}" if by else "this operator"
        with pytest.raises(RuntimeError, match=f"(weight|gemma) requires grad, but {call} records no gradient; "):
            lost()
        assert torch.equal(x, kept)


def test_an_overwritten_input_is_noticed(device: torch.device) -> None:
    base = rows((4, 64), F32).to(device).requires_grad_()
    x = base * 1
    y = flashnorm.rmsnorm(x, None)
    with torch.no_grad():
        flashnorm.rmsnorm(x, None, out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@every_trained
def test_wrong_arguments_say_so_when_recorded(name: str, device: torch.device) -> None:
    norm = NORMS[name]
    tensors = leaves(norm.tensors((4, 64), F32), device)
    for wrong, error in (
        ({"weight": tensors["weight"][:3]}, ValueError),
        ({"x": tensors["x"].double()}, ValueError),
        ({"weight": 3}, TypeError),
    ):
        with pytest.raises(error, match=r"weight|gemma|input|x"):
            norm(tensors | wrong)


def test_transforms_are_refused(device: torch.device) -> None:
    x = rows((4, 64), F32).to(device)
    with pytest.raises(RuntimeError, match="records no gradient"):
        torch.func.grad(lambda a: flashnorm.rmsnorm(a, None).sum())(x)


# ------------------------------------------------------------------ routes and threads
def test_the_backward_takes_the_route_of_its_forward(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashnorm.core.dispatch import forced_here
    from flashnorm.ops import differentiable

    forced, real = [], differentiable.rmsnorm_backward
    monkeypatch.setattr(
        differentiable, "rmsnorm_backward", lambda *a, **k: forced.append(forced_here()) or real(*a, **k)
    )  # fmt: skip
    x = rows((4, 64), F32).to(device).requires_grad_()
    with flashnorm.backend("torch"):
        y = flashnorm.rmsnorm(x, None)
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()
    assert forced == ["torch"] and x.grad is not None


def test_operators_for_training_are_registered_once() -> None:
    assert all(hasattr(torch.ops.flashnorm, f"{name}_train") for name in TRAINED) and _library is not None
