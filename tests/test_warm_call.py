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
