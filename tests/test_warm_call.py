"""The warm call in C++: what it must see that no guard looks at, and what it must give back."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch

import flashnorm
from flashnorm.core import dispatch, guard, native, plan
from flashnorm.core.op import ALL
from flashnorm.ops.rmsnorm import RMSNORM
from tests.warm_calls import planned


@pytest.fixture(autouse=True)
def _cold():
    for op in ALL.values():
        op.forget()
    yield
    for op in ALL.values():
        op.forget()


@pytest.fixture
def call(device):
    """A warm call, its tensors, and the function in C++ behind it."""
    if native.load() is None:
        pytest.skip("no compiler, or no headers of Python or PyTorch")
    x, weight, out = (torch.randn(*shape, device=device) for shape in ((4, 64), (64,), (4, 64)))
    flashnorm.rmsnorm(x, weight, 1e-6, out)
    return x, weight, out


def missed(x, weight, eps=1e-6, out=None, enable_pdl=None, numerics="flashinfer", return_rstd=False, *more) -> bool:
    """Whether the function in C++ leaves a call to the one behind."""
    scope = RMSNORM._warm_calls.fronts[0][0]
    return (
        scope["native"](x, weight, eps, out, enable_pdl, numerics, return_rstd, *(more or (None, None))) is native.MISS
    )


def test_it_serves(call):
    x, weight, out = call
    out.fill_(torch.nan)
    assert not missed(x, weight, 1e-6, out) and not out.isnan().any()
    assert not missed(x, weight) and not missed(x, torch.nn.Parameter(weight, requires_grad=False), 1e-5, x)
    assert missed(x, weight, 1e-6, out, None, "hf-llama") and missed(x, weight, 1e-6, out, 1)
    assert missed(x, weight, -1.0) and missed(x, weight, float("inf")) and missed(x, weight, float("nan"))
    assert missed(x[:2], weight) and missed(x, weight, 1e-6, out, None, "flashinfer", True)
    assert missed(x, weight, 1e-6, out, None, "flashinfer", False, x, None) and missed(None, weight)


def test_what_torch_must_see_is_missed(call):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        pass

    class Dispatch(TorchDispatchMode):
        pass

    x, weight, out = call
    for mode in (Functions(), Dispatch(), torch.autograd.profiler.profile(), torch.autograd.forward_ad.dual_level()):
        with mode:
            assert missed(x, weight, 1e-6, out), mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert missed(x, weight, 1e-6, out)
    with flashnorm.backend("torch"):
        assert missed(x, weight, 1e-6, out)
    assert not missed(x, weight, 1e-6, out)
    seen = []
    torch.jit.trace(lambda a: (seen.append(missed(a, weight, 1e-6, out)), a + 1)[1], (x,), check_trace=False)
    assert seen == [True]


def test_tensors_that_are_not_what_they_seem_are_missed(call, device):
    x, weight, _out = call
    seen = []

    def one(a):
        seen.append(missed(a, weight))
        return a

    torch.vmap(one)(torch.randn(3, 4, 64, device=device))
    torch.func.grad(lambda a: one(a).sum())(x)
    assert seen == [True, True]
    negated = torch.randn(4, 64, dtype=torch.complex64, device=device).conj().imag
    for odd in (negated, torch._efficientzerotensor(4, 64, device=device), x.to("meta"), x.to_sparse()):
        assert missed(odd, weight) and missed(x, weight, 1e-6, odd)

    class Mine(torch.Tensor):
        pass

    assert missed(x.as_subclass(Mine), weight) and missed(x, weight.as_subclass(Mine))
    wanted = x.clone().requires_grad_()
    assert missed(wanted, weight) and missed(x, weight, 1e-6, wanted) and missed(wanted * 1, weight)
    with torch.no_grad():
        assert not missed(wanted, weight)


def test_versions_are_counted(call, device):
    x, weight, out = call
    before = out._version, x._version, weight._version
    assert not missed(x, weight, 1e-6, out)
    assert (out._version, x._version, weight._version) == (before[0] + 1, *before[1:])
    with torch.inference_mode():
        y = torch.empty_like(x)
    for inside in (True, False):
        with torch.inference_mode(inside):
            assert not missed(x, weight, 1e-6, y)
    residual = torch.randn_like(x)
    flashnorm.fused_add_rmsnorm(x, residual, weight)
    before = x._version, residual._version
    assert planned(lambda: flashnorm.fused_add_rmsnorm(x, residual, weight)) == 0
    assert (x._version, residual._version) == (before[0] + 1, before[1] + 1)


def test_nothing_is_kept(call):
    x, weight, out = call
    counted = (x, weight, out, native.MISS, 1e-6, None)
    gc.collect()
    before = [sys.getrefcount(o) for o in counted]
    for _ in range(100):
        missed(x, weight, 1e-6, out)
        missed(x, weight)
        missed(x, weight, -1.0)
        flashnorm.rmsnorm(x, weight, 1e-6, out)
    after = [sys.getrefcount(o) for o in counted]
    assert all(abs(a - b) < 50 for a, b in zip(after, before, strict=True)), (before, after)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyError])
def test_the_error_of_a_launch_is_raised_as_it_is(call, error):
    import tvm_ffi

    x, weight, out = call

    def broken(*_):
        raise error("out of order")

    views = plan.make_plan(RMSNORM, (x, weight, out, None), {"numerics": "flashinfer"}).views
    made = plan.Plan(
        broken, tvm_ffi.convert(broken), (0, 1), views, x.device, dispatch.Explanation("rmsnorm", "cpu", ())
    )
    launch = guard.guarded(RMSNORM, made, (x, weight, out, None), [1e-6])
    if not isinstance(launch, native.load().Launch):
        pytest.skip("the guard is not in C++")
    RMSNORM._warm_calls[x.numel()] = (("flashinfer", False, None, 1e-6, launch),)
    for _ in range(3):
        with pytest.raises(error, match="out of order"):
            missed(x, weight, 1e-6, out)


def test_forgetting_while_others_call(call):
    x, weight, out = call
    want, wrong, stop = flashnorm.rmsnorm(x, weight).clone(), [], threading.Event()

    def run():
        mine = torch.empty_like(x)
        while not stop.is_set():
            flashnorm.rmsnorm(x, weight, 1e-6, mine)
            if not torch.equal(mine, want):
                wrong.append(mine.clone())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        RMSNORM.forget()
        flashnorm.rmsnorm(x, weight, 1e-6, out)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_class_that_lies_about_itself_is_missed(call):
    x, weight, _out = call

    class Liar:
        __class__ = torch.Tensor  # type: ignore[assignment]

    assert missed(Liar(), weight) and missed(x, Liar()) and missed(x, weight, 1e-6, Liar())


def test_compiled_calls_see_no_cpp(call, device):
    x, weight, _out = call
    torch._dynamo.reset()
    compiled = torch.compile(flashnorm.rmsnorm, backend="eager", fullgraph=True)
    want = flashnorm.rmsnorm(x, weight)
    assert torch.equal(compiled(x, weight), want)
    RMSNORM.forget()  # the function in C++ goes, and comes again: no graph depends on it
    assert torch.equal(flashnorm.rmsnorm(x, weight), want)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(x, weight), want)


@pytest.mark.gpu
def test_it_launches_on_the_current_stream(call):
    x, weight, out = call
    x = torch.randn(4, 64, device="cuda")
    stream = torch.cuda.Stream()
    want = flashnorm.rmsnorm(x, weight)
    for _ in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            late = x * 1
            assert not missed(late, weight, 1e-6, out)
        stream.synchronize()
        assert torch.equal(out, want)


DIT = {
    "fused_dit_gate_residual_layernorm_gamma_beta": ("residual", "gate", "gamma", "beta"),
    "fused_dit_gate_residual_layernorm_scale_shift": ("residual", "gate", "scale", "shift"),
    "fused_dit_residual_layernorm_scale_shift": ("residual", "scale", "shift"),
}


def dit(form, batches, rows, hidden, vectors, device, seed):
    """Arguments of a call with every output given; vectors of each shape that they may have."""
    torch.manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape).bfloat16().to(device)  # noqa: E731
    shapes = {"one": (hidden,), "batch": (batches, hidden), "batch rows": (batches, 1, hidden), "temb": None}
    temb = normal(batches, rows, 6 * hidden).chunk(6, dim=2)
    made = {name: normal(batches, rows, hidden) for name in ("input", "residual", "residual_out", "norm_out")}
    for i, name in enumerate(("gate", "scale", "shift")):
        made[name] = normal(*shapes[vectors]) if shapes[vectors] else temb[i]
    made |= {"gamma": normal(hidden), "beta": normal(hidden)}
    if form:
        per, block = (8, 16) if form == "nvfp4" else (4, 32)
        columns = -(-hidden // (4 * block))
        made["norm_out"] = torch.zeros(batches, rows, hidden // per, dtype=torch.int32, device=device)
        made["sf_out"] = torch.full((batches, -(-rows // 128), columns, 32, 4, 4), 7, dtype=torch.uint8, device=device)
        made[f"use_{form}"] = True
        made |= {"global_scaling_factor": 3.0} if form == "nvfp4" else {}
    return made


@pytest.mark.parametrize("vectors", ["one", "batch", "batch rows", "temb"])
@pytest.mark.parametrize(("batches", "rows"), [(1, 5), (2, 128), (2, 5)])
@pytest.mark.parametrize("form", ["", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("op", DIT)
def test_codes_of_a_block_are_warm_through_their_views(op, form, batches, rows, vectors, device):
    """The kernel takes views of codes, scales and vectors; a warm call looks at what it was given: the same bits."""
    function = getattr(flashnorm, op)
    outs = ("residual_out", "norm_out", *(("sf_out",) if form else ()))

    def run(seed, scales):
        call = dit(form, batches, rows, 64, vectors, device, seed)
        names = ("input", *DIT[op], *outs, f"use_{form}", "global_scaling_factor")
        given = {name: call[name] for name in names if name in call}
        returned = function(**given, **({"return_scales": scales} if form else {}))
        wanted = outs if scales or not form else outs[:2]
        assert len(returned) == len(wanted) and all(t is call[n] for t, n in zip(returned, wanted, strict=True))
        return [call[name].clone() for name in outs]

    cold = []
    for seed in range(3):
        for one in ALL.values():
            one.forget()
        cold.append(run(seed, seed % 2 == 0))
    run(0, False), run(1, True)
    assert planned(lambda: [run(seed, seed % 2 == 0) for seed in range(3)]) == 0
    for seed, want in enumerate(cold):
        assert all(torch.equal(a, b) for a, b in zip(run(seed, seed % 2 == 1), want, strict=True))


def test_codes_that_overlap_are_refused_warm(device):
    call = dit("nvfp4", 1, 5, 64, "one", device, 0)
    names = ("input", "scale", "shift", "residual_out", "norm_out", "sf_out", "use_nvfp4", "global_scaling_factor")
    given = {name: call[name] for name in names}
    for _ in range(2):
        flashnorm.fused_dit_residual_layernorm_scale_shift(**given)
    given["norm_out"] = call["residual_out"].view(torch.int32)[..., :8].contiguous()
    flashnorm.fused_dit_residual_layernorm_scale_shift(**given)
    memory = call["residual_out"].view(-1).view(torch.int32)[:40].view(1, 5, 8)
    for bad in ({"norm_out": memory}, {"global_scaling_factor": None}, {"use_nvfp4": 1}, {"sf_out": call["scale"]}):
        with pytest.raises((ValueError, TypeError)):
            flashnorm.fused_dit_residual_layernorm_scale_shift(**{**given, **bad})
