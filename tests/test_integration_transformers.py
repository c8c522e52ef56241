"""`patch` changes how a module computes and nothing else: on look-alike modules. Models are in another file."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import flashnorm
from flashnorm.integrations.transformers import patch, unpatch
from tests.tolerance import EQUAL_SHARE, FP32_OF_LARGEST, FP32_RELATIVE, steps_between

pytestmark = pytest.mark.cpu_only

EPS = 1e-5


# ------------------------------------------------------------------ modules that are known by name
class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size: int = 64, eps: float = EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class GemmaRMSNorm(nn.Module):
    def __init__(self, dim: int = 64, eps: float = EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Block(nn.Module):
    """Two norms around a linear layer, one of each family."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.linear, self.after = LlamaRMSNorm(), nn.Linear(64, 64), GemmaRMSNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(x + self.linear(self.before(x)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(operator, numerics) of every call of a public function, in order."""
    seen: list[tuple[str, str]] = []
    for name in ("rmsnorm", "gemma_rmsnorm", "layernorm"):
        real = getattr(flashnorm, name)

        def spy(*args: Any, _name: str = name, _real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            seen.append((_name, kwargs["numerics"]))
            return _real(*args, **kwargs)

        monkeypatch.setattr(flashnorm, name, spy)
    return seen


def state(model: nn.Module) -> list[tuple[str, type, dict[str, int]]]:
    """Everything an unpatch must bring back: classes, and attributes by identity."""
    return [
        (name, type(module), {key: id(value) for key, value in module.__dict__.items()})
        for name, module in model.named_modules()
    ]


def x_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


# ------------------------------------------------------------------ what patching does, and does not
def test_every_family_calls_its_operator(calls: list[tuple[str, str]]) -> None:
    block = Block()
    assert patch(block) == 2
    with torch.no_grad():
        block(x_of(3, 64))
    assert calls == [("rmsnorm", "hf-llama"), ("gemma_rmsnorm", "hf-gemma")]
    assert patch(block, numerics="flashinfer") == 2
    with torch.inference_mode():
        block(x_of(3, 64))
    assert calls[2:] == [("rmsnorm", "flashinfer"), ("gemma_rmsnorm", "flashinfer")]


def test_unpatch_brings_everything_back() -> None:
    block = Block()
    before, keys = state(block), list(block.state_dict())
    patch(block)
    assert [entry[:2] for entry in state(block)] == [entry[:2] for entry in before]
    assert list(block.state_dict()) == keys
    patch(block, numerics="torch")
    assert unpatch(block) == 2
    assert state(block) == before
    assert unpatch(block) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_torch_route_gives_the_original_bits(dtype: torch.dtype) -> None:
    block, x = Block().to(dtype), x_of(5, 7, 64, dtype=dtype)
    with torch.no_grad():
        want = block(x)
        patch(block)
        with flashnorm.backend("torch"):
            assert torch.equal(block(x), want)


def test_eps_and_weight_are_read_at_the_call() -> None:
    norm, x = LlamaRMSNorm(), x_of(4, 64)
    patch(norm)
    norm.variance_epsilon = 3.0
    norm.weight = nn.Parameter(torch.full((64,), 2.0))
    with torch.no_grad():
        got = norm(x)
        unpatch(norm)
        torch.testing.assert_close(got, norm(x), rtol=FP32_RELATIVE, atol=FP32_OF_LARGEST)


def test_patched_modules_train(calls: list[tuple[str, str]]) -> None:
    block, x = Block(), x_of(6, 64).requires_grad_()
    block(x).square().sum().backward()
    want = [x.grad, *(p.grad for p in block.parameters())]
    x.grad = None
    block.zero_grad()
    patch(block)
    block(x).square().sum().backward()
    got = [x.grad, *(p.grad for p in block.parameters())]
    for a, b in zip(got, want, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b)
    assert len(calls) == 2
    # Only the weight, only the input.
    norm = LlamaRMSNorm()
    patch(norm)
    assert norm(x.detach()).requires_grad
    norm.requires_grad_(False)
    assert norm(x).requires_grad
    assert not norm(x.detach()).requires_grad


def test_functorch_and_forward_mode_use_the_original(calls: list[tuple[str, str]]) -> None:
    norm, x = LlamaRMSNorm().requires_grad_(False), x_of(4, 64)
    tangent = x_of(4, 64).flip(0)
    want_vmap, want_jvp = torch.func.vmap(norm)(x), torch.func.jvp(norm, (x,), (tangent,))
    patch(norm)
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(norm)(x), want_vmap)
    got = torch.func.jvp(norm, (x,), (tangent,))
    assert torch.equal(got[0], want_jvp[0])
    assert torch.equal(got[1], want_jvp[1])
    with torch.autograd.forward_ad.dual_level():
        out = norm(torch.autograd.forward_ad.make_dual(x, tangent))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(out).tangent, want_jvp[1])
    assert calls == []


def test_what_no_kernel_serves_uses_the_original(calls: list[tuple[str, str]]) -> None:
    with torch.no_grad():
        for dtype, weight_dtype in [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]:
            norm, x = LlamaRMSNorm().to(weight_dtype), x_of(4, 64, dtype=dtype)
            want = norm(x)
            patch(norm)
            got = norm(x)
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
        norm(hidden_states=x_of(4, 64))
    assert calls == []


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_patched_and_their_own(how: str, calls: list[tuple[str, str]]) -> None:
    block, x = Block(), x_of(5, 64)
    patch(block)
    if how == "deepcopy":
        other = copy.deepcopy(block)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(block))
    else:
        stream = io.BytesIO()
        torch.save(block, stream)
        stream.seek(0)
        other = torch.load(stream, weights_only=False)
    with torch.no_grad():
        want = block(x)
        calls.clear()
        assert torch.equal(other(x), want)
        assert len(calls) == 2
        other.before.weight.zero_()
        assert not torch.equal(other(x), want)
        assert torch.equal(block(x), want)
    assert unpatch(other) == 2
    assert "forward" in block.before.__dict__
    assert "forward" not in other.before.__dict__


def test_errors_come_before_anything_is_patched() -> None:
    with pytest.raises(ValueError, match=r"Linear has no RMSNorm module.*LlamaRMSNorm"):
        patch(nn.Linear(3, 3))
    with pytest.raises(TypeError, match="model"):
        patch("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model"):
        unpatch(None)  # type: ignore[arg-type]
    block = Block()
    before = state(block)
    with pytest.raises(ValueError, match=r"numerics.*'llama'.*hf-llama"):
        patch(block, numerics="llama")
    assert state(block) == before
    block.after.forward = lambda x: x  # type: ignore[method-assign]
    before = state(block)
    with pytest.raises(ValueError, match=r"forward of after \(GemmaRMSNorm\) has been replaced"):
        patch(block)
    assert state(block) == before


def test_compiles_without_a_break() -> None:
    block, x = Block().eval(), x_of(6, 64)
    patch(block)
    with torch.no_grad():
        want = block(x)
        assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(x), want)


def test_accelerate_hooks_stay_in_front(calls: list[tuple[str, str]]) -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Double(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return tuple(2 * a for a in args), kwargs

    x = x_of(4, 64)
    for hook_first in (True, False):
        norm = LlamaRMSNorm()
        with torch.no_grad():
            want = norm(2 * x)
            if hook_first:
                hooks.add_hook_to_module(norm, Double())
                patch(norm)
            else:
                patch(norm)
                hooks.add_hook_to_module(norm, Double())
            calls.clear()
            torch.testing.assert_close(norm(x), want)
            assert len(calls) == 1
            assert unpatch(norm) == 1
            assert torch.equal(norm(x), want)
            hooks.remove_hook_from_module(norm)
            torch.testing.assert_close(norm(x), norm(x.clone()))
            assert len(calls) == 1
            assert patch(norm) == 1  # what accelerate leaves behind is no foreign forward


# ------------------------------------------------------------------ LayerNorm
def layer(*shape: int, affine: bool = True, bias: bool = True) -> nn.LayerNorm:
    norm = nn.LayerNorm(shape, elementwise_affine=affine, bias=bias)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 1.5)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [(True, True), (True, False), (False, False)], ids=str)
def test_layernorm(parts: tuple[bool, bool], dtype: torch.dtype, calls: list[tuple[str, str]]) -> None:
    norm, x = layer(1024, affine=parts[0], bias=parts[1]).to(dtype), x_of(128, 1024, dtype=dtype)
    with torch.no_grad():
        want = norm(x)
        assert patch(norm) == 1
        got = norm(x)
    assert calls == [("layernorm", "torch")]
    if dtype is torch.float32:
        torch.testing.assert_close(got, want, rtol=FP32_RELATIVE, atol=FP32_OF_LARGEST * float(want.abs().max()))
    else:
        assert (got == want).float().mean() >= EQUAL_SHARE
        assert int(steps_between(got, want).max()) <= 2


def test_layernorm_that_no_kernel_serves(calls: list[tuple[str, str]]) -> None:
    with pytest.raises(ValueError, match=r"torch.nn.LayerNorm over one dimension"):
        patch(layer(4, 64))
    norm, x = layer(64), x_of(4, 64)
    want = norm(x)
    patch(norm)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(norm(x), want)
        assert torch.equal(norm(input=x), want)
    assert calls == []


def test_layernorm_in_training(calls: list[tuple[str, str]]) -> None:
    norm, x, dout = layer(64), x_of(4, 64).requires_grad_(), x_of(4, 64).flip(0)
    given = [x, norm.weight, norm.bias]
    want = [(out := norm(x)), *torch.autograd.grad(out, given, dout)]
    patch(norm)
    got = [(out := norm(x)), *torch.autograd.grad(out, given, dout)]
    assert calls == [("layernorm", "torch")]
    for mine, original in zip(got, want, strict=True):
        limit = FP32_OF_LARGEST * float(original.detach().abs().max())
        torch.testing.assert_close(mine, original, rtol=FP32_RELATIVE, atol=limit)
