"""Forward-mode derivatives: no operator has one, so each says so rather than hand on a wrong one.

`torch.no_grad()` stops the recording of graphs and leaves forward mode as it is; inference mode stops both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import flashnorm
from flashnorm import functional
from flashnorm.core.op import ALL
from tests.inputs import gains, rows

F32 = torch.float32
SHAPE = (4, 64)
Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]

# Of (x, weight, another tensor like x), all of them in fp32.
NORMS: dict[str, Norm] = {
    "rmsnorm": lambda x, w, _: flashnorm.rmsnorm(x, w),
    "rmsnorm into out": lambda x, w, y: flashnorm.rmsnorm(x, w, out=torch.empty_like(y)),
    "rmsnorm of rows": lambda x, w, _: flashnorm.rmsnorm(x, w, row_index=torch.tensor([1, 2], device=x.device)),
    "rmsnorm, weight": lambda x, _, y: flashnorm.rmsnorm(y, x),
    "rmsnorm_quant": lambda x, w, y: flashnorm.rmsnorm_quant(y.to(torch.float8_e4m3fn), x, w, 1.0),
    "gemma_rmsnorm": lambda x, w, _: flashnorm.gemma_rmsnorm(x, w),
    "layernorm": lambda x, w, _: flashnorm.layernorm(x, w, None),
    "add_rmsnorm": lambda x, w, y: flashnorm.add_rmsnorm(x, y, w),
    "add_rmsnorm, residual": lambda x, w, y: flashnorm.add_rmsnorm(y, x, w),
    "fused_add_rmsnorm": lambda x, w, y: flashnorm.fused_add_rmsnorm(x, y.clone(), w),
    "fused_rmsnorm_silu": lambda x, w, _: flashnorm.fused_rmsnorm_silu(x.bfloat16(), w.bfloat16()),
    "rmsnorm_sigmoid_gate": lambda x, w, y: flashnorm.rmsnorm_sigmoid_gate(x, y, weight=w),
    "functional.rmsnorm_gate": lambda x, w, y: functional.rmsnorm_gate(x, y, w),
    "functional.rms_norm": lambda x, w, _: functional.rms_norm(x, w),
}
every_norm = pytest.mark.parametrize("name", NORMS)


@pytest.fixture(autouse=True)
def _cold() -> Iterator[None]:
    for op in ALL.values():
        op.forget()
    yield
    for op in ALL.values():
        op.forget()


def make(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, another tensor like x, a tangent."""
    x, y, v = (rows(SHAPE, F32, key).to(device) for key in range(3))
    return x, gains(SHAPE[-1:], F32).to(device), y, v


def refused() -> Any:
    return pytest.raises(RuntimeError, match=r"records no gradient for torch\.func and forward mode")


def warmed(norm: Norm, warm: bool, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    with torch.no_grad():
        for _ in range(2 * warm):
            norm(x.clone(), w, y)


@every_norm
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("outside", [torch.no_grad, torch.enable_grad])
def test_jvp_is_refused(name: str, warm: bool, outside: Any, device: torch.device) -> None:
    norm, (x, w, y, v) = NORMS[name], make(device)
    warmed(norm, warm, x, w, y)
    with outside(), refused():
        torch.func.jvp(lambda q: norm(q * 1, w, y), (x,), (v,))
    with refused():
        torch.func.jvp(outside()(lambda q: norm(q * 1, w, y)), (x,), (v,))


@every_norm
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_dual_tensors_are_refused_without_recording(name: str, warm: bool, device: torch.device) -> None:
    norm, (x, w, y, v) = NORMS[name], make(device)
    warmed(norm, warm, x, w, y)
    before = x.clone()
    with torch.no_grad(), forward_ad.dual_level():
        with refused():
            norm(forward_ad.make_dual(x, v), w, y)
        assert torch.equal(x, before)  # refused before anything was written
        norm(x.clone(), w, y)  # what has no tangent is served


def test_a_tangent_of_an_incoming_gradient_is_refused(device: torch.device) -> None:
    """Gradients run without recording, and a derivative of one along a tangent is forward mode."""
    x, w, _, v = make(device)
    x.requires_grad_()
    y = flashnorm.rmsnorm(x, w)
    with forward_ad.dual_level(), refused():
        torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(v), v))


@pytest.mark.parametrize("name", ["rmsnorm", "fused_add_rmsnorm"])
def test_a_compiled_jvp_is_refused(name: str, device: torch.device) -> None:
    norm, (x, w, y, v) = NORMS[name], make(device)
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def compiled(a: torch.Tensor) -> Any:
        def run(q: torch.Tensor) -> torch.Tensor:
            h = q * 1
            made = norm(h, w, y)
            return h if made is None else made

        return torch.func.jvp(run, (a,), (v,))

    with torch.no_grad(), refused():
        compiled(x)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_inference_mode_drops_tangents_as_it_does_pytorchs(warm: bool, device: torch.device) -> None:
    x, w, y, v = make(device)
    warmed(NORMS["rmsnorm"], warm, x, w, y)
    want = flashnorm.rmsnorm(x, w)

    @torch.inference_mode()
    def norm(q: torch.Tensor) -> torch.Tensor:
        return flashnorm.rmsnorm(q, w)

    @torch.inference_mode()
    def double(q: torch.Tensor) -> torch.Tensor:
        return q * 2

    got, tangent = torch.func.jvp(norm, (x,), (v,))
    assert torch.equal(got, want)
    assert torch.equal(tangent, torch.func.jvp(double, (x,), (v,))[1])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, v)
        assert torch.equal(norm(dual), want)
        assert forward_ad.unpack_dual(norm(dual)).tangent is forward_ad.unpack_dual(double(dual)).tangent is None
    # A transform that begins inside of it has tangents again: not with every PyTorch (2.13 has them, 2.11 does not).
    with torch.inference_mode():
        kept = bool(torch.func.jvp(lambda q: q * 2, (x,), (v,))[1].any())
        assert kept or torch.__version__ < (2, 13)
        if kept:
            with refused():
                torch.func.jvp(lambda q: flashnorm.rmsnorm(q, w), (x,), (v,))
