"""torch.library seen from RMSNorm: compilers, export, modes, transforms, subclasses, autograd."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flashnorm

IN_PLACE = ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm")


def make(device, *shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("name", IN_PLACE)
def test_inductor_does_not_merge_a_clone_with_its_source(name, device):
    # a compiler once dropped the clone and handed one tensor in twice
    def step(x, weight):
        y = x.clone()
        getattr(flashnorm, name)(y, x, weight)
        return y, x

    x, weight = make(device, 5, 64), make(device, 64, seed=2)
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True)(x.clone(), weight)
    want = step(x.clone(), weight)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_inductor_matches_eager_with_a_graph_around(device):
    def step(x, residual, weight):
        h = x * 2
        flashnorm.fused_add_rmsnorm(h, residual, weight, 1e-5)
        return flashnorm.gemma_rmsnorm(h, weight) + residual

    x, residual, weight = make(device, 5, 64), make(device, 5, 64, seed=1), make(device, 64, seed=2)
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True)(x, residual.clone(), weight)
    assert torch.equal(got, step(x, residual.clone(), weight))


def test_errors_keep_their_text_under_fullgraph(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: flashnorm.rmsnorm(x, w), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"weight must broadcast to \(4, 64\) with last dimension 64"):
        compiled(make(device, 4, 64), make(device, 32))


def test_export(device):
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(make(device, 64, seed=2), requires_grad=False)

        def forward(self, x):
            return flashnorm.rmsnorm(x, self.weight, 1e-5)

    module, x = Norm(), make(device, 6, 64)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("m", min=2)},))
    assert any("flashnorm.rmsnorm" in str(node.target) for node in program.graph.nodes)
    y = make(device, 9, 64, seed=3)
    assert torch.equal(program.module()(y), module(y))


def test_fake_tensors_have_the_right_shapes():
    with FakeTensorMode():
        x, weight = torch.empty(3, 5, 64, dtype=torch.float16), torch.empty(64)
        y, rstd = flashnorm.rmsnorm(x, weight, return_rstd=True)
        assert y.shape == (3, 5, 64) and y.dtype == torch.float16
        assert rstd.shape == (3, 5) and rstd.dtype == torch.float32


def test_meta_tensors_never_reach_a_kernel(device):
    x, weight = make(device, 4, 64), make(device, 64)
    flashnorm.rmsnorm(x, weight)
    y = flashnorm.rmsnorm(x.to("meta"), weight.to("meta"))
    assert y.device.type == "meta" and y.shape == x.shape
    with pytest.raises(ValueError, match="weight is on meta"):
        flashnorm.rmsnorm(x, weight.to("meta"))


def test_a_saved_tensor_that_is_overwritten_is_noticed(device):
    leaf = make(device, 4, 64, dtype=torch.float32).requires_grad_(True)
    saved = leaf * 1.0
    loss = (saved * saved).sum()
    with torch.no_grad():
        flashnorm.rmsnorm(saved, None, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_mode_and_parameters(device):
    weight = torch.nn.Parameter(make(device, 64))
    x = make(device, 4, 64)
    with torch.no_grad():
        want = flashnorm.rmsnorm(x, weight)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(flashnorm.rmsnorm(x, weight), want)
            y = x.clone()
            flashnorm.rmsnorm(y, weight, out=y)
            assert torch.equal(y, want)


def test_autocast_changes_nothing(device):
    x, weight = make(device, 4, 64, dtype=torch.float32), make(device, 64, dtype=torch.float32)
    want = flashnorm.rmsnorm(x, weight)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        got = flashnorm.rmsnorm(x, weight)
    assert got.dtype == torch.float32 and torch.equal(got, want)


def test_a_profiler_sees_the_operator(device):
    x, weight = make(device, 4, 64), make(device, 64)
    flashnorm.rmsnorm(x, weight)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        flashnorm.rmsnorm(x, weight)
    assert any(event.key == "flashnorm::rmsnorm" for event in profile.key_averages())


def test_a_dispatch_mode_sees_the_operator(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, weight = make(device, 4, 64), make(device, 64)
    want = flashnorm.rmsnorm(x, weight)
    with Spy():
        assert torch.equal(flashnorm.rmsnorm(x, weight), want)
    assert "flashnorm.rmsnorm.default" in seen


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functionalize"])
def test_a_transform_is_never_bypassed(transform, device):
    x, weight = make(device, 4, 64, dtype=torch.float32), make(device, 64, dtype=torch.float32)
    flashnorm.rmsnorm(x, weight)  # warm

    def call(a):
        return flashnorm.rmsnorm(a, weight)

    run = {
        "functionalize": lambda: torch.func.functionalize(call)(x),
        "vmap": lambda: torch.func.vmap(call)(x[None]),
        "grad": lambda: torch.func.grad(lambda a: call(a).sum())(x),
        "jvp": lambda: torch.func.jvp(call, (x,), (x,)),
    }[transform]
    with pytest.raises(RuntimeError, match=r"no gradient for torch.func|vmap has no batching rule|alias annotations"):
        run()


def test_a_subclass_keeps_its_say(device):
    class Tagged(torch.Tensor):
        pass

    x, weight = make(device, 4, 64), make(device, 64)
    tagged = flashnorm.rmsnorm(x.as_subclass(Tagged), weight)
    assert torch.equal(tagged.as_subclass(torch.Tensor), flashnorm.rmsnorm(x, weight))


def test_results_are_fresh_each_call(device):
    # a cached output buffer would let a later call overwrite an earlier result
    x, weight = make(device, 4, 64), make(device, 64)
    first = flashnorm.rmsnorm(x, weight)
    kept = first.clone()
    flashnorm.rmsnorm(-x, weight)
    assert torch.equal(first, kept)
