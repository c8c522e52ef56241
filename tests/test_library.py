"""torch.library: opcheck, compile, export, fakes, autograd, version counters, modes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flashnorm
from flashnorm.core.op import OPS

IN_PLACE = ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm")
ALL = [*OPS.values(), *(op.functional for op in OPS.values() if op.functional)]


def make(device, *shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def call(name, x, residual, weight):
    """Any operator of the family, functionally: (its outputs)."""
    if name in IN_PLACE:
        getattr(flashnorm, name)(x, residual, weight)
        return x, residual
    return (getattr(flashnorm, name)(x, weight),)


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_opcheck(op, device):
    tensors = {
        "x": make(device, 4, 64),
        "residual": make(device, 4, 64, seed=1),
        "weight": make(device, 64, seed=2),
        "out": torch.empty(4, 64, dtype=torch.bfloat16, device=device),
        "rstd": torch.empty(4, dtype=torch.float32, device=device),
        "h": torch.empty(4, 64, dtype=torch.bfloat16, device=device),
    }
    arguments = [tensors[o.name] for o in op.operands]
    torch.library.opcheck(op.overload, (*arguments, 1e-6, "flashinfer", True))
    without = [None if o.name in op.optional else t for o, t in zip(op.operands, arguments, strict=True)]
    torch.library.opcheck(op.overload, (*without, 1e-6, "hf-llama", False))


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_schema_marks_what_is_written(op):
    schema = op.overload._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {o.name for o in op.operands if o.written}
    assert not any(a.has_default_value() for a in schema.arguments)


@pytest.mark.parametrize("name", sorted(OPS))
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_fullgraph_compile_is_bit_equal_with_one_graph_for_all_m(name, backend, device):
    torch._dynamo.reset()
    graphs = 0

    def counted(gm, inputs):
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    compiled = torch.compile(lambda *a: call(name, *a), backend=counted, fullgraph=True)
    for m in (4, 7, 2, 33):
        x, residual, weight = make(device, m, 64), make(device, m, 64, seed=1), make(device, 64, seed=2)
        mine, theirs = (x.clone(), residual.clone()), (x.clone(), residual.clone())
        for t in mine:
            torch._dynamo.mark_dynamic(t, 0)
        got, want = compiled(*mine, weight), call(name, *theirs, weight)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert torch.equal(mine[1], theirs[1])
    assert graphs == 1


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


@pytest.mark.parametrize("name", sorted(OPS))
def test_a_gradient_is_never_lost(name, device):
    x, residual, weight = make(device, 4, 64), make(device, 4, 64, seed=1), make(device, 64, seed=2)
    call(name, x.clone(), residual.clone(), weight)  # warm: the fast path must refuse as well
    before = x.clone()
    for leaf in (x, weight):
        leaf.requires_grad_(True)
        with pytest.raises(RuntimeError, match="requires grad, but this operator records no gradient"):
            call(name, x, residual, weight)
        with torch.no_grad():
            call(name, x.detach().clone(), residual.clone(), weight)
        leaf.requires_grad_(False)
    assert torch.equal(x, before)


@pytest.mark.parametrize("warm", [False, True])
def test_writes_are_seen_by_autograd(warm, device):
    x, residual, weight = make(device, 4, 64), make(device, 4, 64, seed=1), make(device, 64, seed=2)
    out = torch.empty_like(x)
    for op in OPS.values():
        op.forget()
    if warm:
        flashnorm.rmsnorm(x, weight, out=out)
        flashnorm.fused_add_rmsnorm(x, residual, weight)
    versions = [t._version for t in (x, residual, out, weight)]
    flashnorm.rmsnorm(x, weight, out=out)
    assert out._version > versions[2] and x._version == versions[0]
    flashnorm.fused_add_rmsnorm(x, residual, weight)
    assert x._version > versions[0] and residual._version > versions[1] and weight._version == versions[3]


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
    with pytest.raises(RuntimeError, match=r"records no gradient|Batching rule not implemented|alias annotations"):
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
