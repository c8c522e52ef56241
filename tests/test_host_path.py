"""The warm call and its guards: what changes between two calls of one shape must be noticed."""

from __future__ import annotations

import pytest
import torch

import flashnorm
from flashnorm.core import guard
from flashnorm.ops.rmsnorm import RMSNORM
from tests.warm_calls import planned


def make(device, *shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype if dtype.is_complex else None).to(device, dtype)


def cold(*args, **options):
    """The same call without anything remembered."""
    RMSNORM.forget()
    out = flashnorm.rmsnorm(*args, **options)
    RMSNORM.forget()
    return out


def test_the_second_call_is_warm(kind, device):
    x, weight = make(device, 4, 64), make(device, 64, seed=1)
    out = torch.empty_like(x)
    flashnorm.rmsnorm(x, weight, out=out)
    assert planned(lambda: [flashnorm.rmsnorm(x, weight, out=out) for _ in range(5)]) == 0
    assert planned(lambda: flashnorm.rmsnorm(x[:2], weight)) == 1


def test_interleaved_slices_of_many_rows_are_apart_and_warm(kind, device):
    buffer = make(device, 200_000, 64)
    x, out, weight = buffer[:, :32], buffer[:, 32:], make(device, 32, seed=1)
    want = cold(x.contiguous(), weight)
    flashnorm.rmsnorm(x, weight, out=out)
    assert torch.equal(out, want)
    assert planned(lambda: flashnorm.rmsnorm(x, weight, out=out)) == 0
    shifted = buffer.view(-1)[16 : 16 + 64 * 199_999].view(-1, 64)
    with pytest.raises(ValueError, match="out overlaps input"):
        flashnorm.rmsnorm(x[:199_999], weight, out=shifted[:, :32])


def test_alignment_is_compared_operand_by_operand(kind, device):
    # together the addresses have the same low bits, but another operand is the unaligned one
    base, wide = make(device, 1000, dtype=torch.bfloat16), make(device, 1000, seed=1)
    first = base[2:130].view(2, 64), wide[:64]
    second = base[:128].view(2, 64), wide[1:65]
    flashnorm.rmsnorm(*first)
    assert planned(lambda: flashnorm.rmsnorm(*second)) == 1
    assert torch.equal(flashnorm.rmsnorm(*second), cold(*second))


def test_a_negated_view_keeps_its_sign(kind, device):
    z, weight = make(device, 4, 64, dtype=torch.complex64).conj().imag, make(device, 64, seed=1)
    assert z.is_neg()
    want = cold(z.resolve_neg(), weight)
    flashnorm.rmsnorm(make(device, 4, 128)[:, ::2], weight)  # warm, with the same strides
    for _ in range(2):
        assert torch.equal(flashnorm.rmsnorm(z, weight), want)
        with pytest.raises(ValueError, match="negated view"):
            flashnorm.rmsnorm(make(device, 4, 64), weight, out=z)


def test_freed_memory_is_refused(kind, device):
    weight = make(device, 64, seed=1)
    flashnorm.rmsnorm(make(device, 4, 64), weight)
    x = make(device, 4, 64)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="input has no memory"):
        flashnorm.rmsnorm(x, weight)


@pytest.mark.parametrize("odd", ["sparse", "csr", "quantised"])
def test_other_kinds_of_tensors_are_refused_warm_as_well(kind, odd):
    x, weight = make("cpu", 4, 64), make("cpu", 64, seed=1)
    flashnorm.rmsnorm(x, weight)
    bad = {
        "sparse": lambda: x.to_sparse(),
        "csr": lambda: x.to_sparse_csr(),
        "quantised": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    }[odd]()
    with pytest.raises(ValueError, match="input must be a plain strided tensor"):
        flashnorm.rmsnorm(bad, weight)


def test_metadata_that_changes_in_place_is_noticed(kind, device):
    x, weight = make(device, 4, 64), make(device, 64, seed=1)
    flashnorm.rmsnorm(x, weight)
    other = make(device, 4, 64, seed=2)
    x.data = other
    assert torch.equal(flashnorm.rmsnorm(x, weight), cold(other, weight))
    x.set_(make(device, 4, 128, seed=3)[:, ::2])
    assert torch.equal(flashnorm.rmsnorm(x, weight), cold(x.contiguous(), weight))


@pytest.mark.parametrize("numerics", [["flashinfer"], 3, None])
def test_options_of_other_kinds_are_refused_warm(kind, numerics, device):
    x, weight = make(device, 4, 64), make(device, 64, seed=1)
    flashnorm.rmsnorm(x, weight)
    with pytest.raises(ValueError, match="numerics must be one of"):
        flashnorm.rmsnorm(x, weight, numerics=numerics)


def test_a_forced_route_by_an_equal_name_is_the_same(kind, device):
    x, weight = make(device, 4, 64), make(device, 64, seed=1)

    def call():
        with flashnorm.backend("".join(["to", "rch"])):
            flashnorm.rmsnorm(x, weight)

    call()
    assert planned(call) == 0


def test_compiling_the_function_itself(device):
    x, weight = make(device, 4, 64), make(device, 64, seed=1)
    torch._dynamo.reset()
    for fullgraph in (False, True):
        compiled = torch.compile(flashnorm.rmsnorm, backend="eager", fullgraph=fullgraph)
        assert torch.equal(compiled(x, weight), cold(x, weight))

    @torch.compile(backend="eager")
    def forced(a):
        with flashnorm.backend("torch"):
            return flashnorm.rmsnorm(a, weight)

    with flashnorm.backend("torch"):
        assert torch.equal(forced(x), flashnorm.rmsnorm(x, weight))


def test_one_tensor_twice_is_refused_by_compilers_too(device):
    weight = make(device, 64, seed=1)

    def step(x):
        y = x * 1
        flashnorm.fused_add_rmsnorm(y, y, weight)
        return y

    torch._dynamo.reset()
    with pytest.raises(Exception, match="residual is input, and one of them is written"):
        torch.compile(step, backend="eager", fullgraph=True)(make(device, 4, 64))


def test_a_trace_records_the_operator(device):
    class Norm(torch.nn.Module):
        def forward(self, x):
            return flashnorm.rmsnorm(x, torch.ones(64, device=x.device))

    x = make(device, 4, 64)
    flashnorm.rmsnorm(x, torch.ones(64, device=x.device))
    traced = torch.jit.trace(Norm(), (x,), check_trace=False)
    y = make(device, 4, 64, seed=5)
    assert torch.equal(traced(y), Norm()(y))


def test_any_real_number_is_an_eps(device):
    numpy = pytest.importorskip("numpy")
    x, weight = make(device, 4, 64), make(device, 64, seed=1)
    want = flashnorm.rmsnorm(x, weight, 0.0)
    assert torch.equal(flashnorm.rmsnorm(x, weight, 0), want)
    assert torch.equal(flashnorm.rmsnorm(x, weight, numpy.float32(0)), want)


@pytest.mark.parametrize("in_cpp", [True, False])
def test_a_warm_launch_runs_on_the_tensors_device(in_cpp, monkeypatch):
    import contextlib

    from flashnorm.core import device as devices
    from flashnorm.core import dispatch, plan

    current = [0]

    @contextlib.contextmanager
    def switch(device):
        current[0], before = device.index, current[0]
        yield
        current[0] = before

    seen = []
    monkeypatch.setattr(devices, "several_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", switch)
    monkeypatch.setattr(
        guard, "_in_cpp", lambda *_: (lambda *_: (seen.append(current[0]), True)[1]) if in_cpp else None
    )
    where, nothing = torch.device("cuda", 1), dispatch.Explanation("rmsnorm", "cute", ())
    made = plan.Plan(lambda *_: seen.append(current[0]), lambda *_: None, (0, 1), (), where, nothing)
    tensors = make("cpu", 4, 64), make("cpu", 64, seed=1), torch.empty(4, 64), None
    assert guard.guarded(RMSNORM, made, tensors, [1e-6])(1e-6, True, *tensors)
    assert seen == [1] and current == [0]


def test_keyword_only_stays_keyword_only():
    """The warm call takes its keywords as ordinary parameters; a positional one too many is still refused."""
    x, w = make("cpu", 4, 64), make("cpu", 64, seed=1)
    for _ in range(2):  # cold and warm
        with pytest.raises(TypeError, match="positional"):
            flashnorm.rmsnorm(x, w, 1e-6, None, None, "hf-llama")
        with pytest.raises(TypeError, match="positional"):
            flashnorm.rmsnorm(x, w, 1e-6, None, None, "hf-llama", True)
        flashnorm.rmsnorm(x, w)
