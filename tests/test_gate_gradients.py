"""The gradient of `functional.rmsnorm_gate`: what it is, that the forward keeps its bits, and what must raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flashnorm
from flashnorm import functional
from tests import gate_oracles
from tests.inputs import gains, rows
from tests.tolerance import assert_gated_gradient, assert_same_bits, assert_second_gradient

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-5
NAMES = ("x", "gate", "weight")
FORMS = [
    {"activation": act, "norm_before_gate": before, "group_size": group}
    for act in ("sigmoid", "silu")
    for before in (True, False)
    for group in (None, 32)
]
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda f: "-".join(map(str, f.values())))


def tensors(shape: tuple[int, ...], dtype: torch.dtype, weight: torch.dtype, device: torch.device) -> dict[str, Any]:
    made = {"x": rows(shape, dtype, "x"), "gate": rows(shape, dtype, "gate"), "weight": gains(shape[-1:], weight)}
    return {name: t.detach().to(device, copy=True).requires_grad_() for name, t in made.items()}


def gated(t: dict[str, Any], form: dict[str, Any]) -> torch.Tensor:
    return functional.rmsnorm_gate(t["x"], t["gate"], t["weight"], EPS, **form)


def in_fp64(t: dict[str, Any], form: dict[str, Any]) -> torch.Tensor:
    """The formula, of fp64 numbers."""
    given = {"activation": form["activation"], "before": form["norm_before_gate"], "group": form["group_size"]}
    return gate_oracles.gated_norm(*(t[name] for name in NAMES), eps=EPS, **given)[0]


def doubled(t: dict[str, Any]) -> dict[str, Any]:
    return {name: None if v is None else v.detach().cpu().double().requires_grad_() for name, v in t.items()}


@every_form
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F16, BF16)], ids=str)
def test_gradients_are_right(form: dict[str, Any], dtypes: Any, route: str, device: torch.device) -> None:
    for shape in ((1, 64), (7, 96), (3, 5, 128)):
        for with_weight in (True, False):
            t = tensors(shape, *dtypes, device)
            if not with_weight:
                t["weight"] = None
            dy = rows(shape, dtypes[0], "dy")
            with flashnorm.backend(route):
                y = gated(t, form)
            y.backward(dy.to(device))  # on the route of the forward
            exact = doubled(t)
            in_fp64(exact, form).backward(dy.double())
            for name in NAMES:
                if t[name] is not None:
                    assert t[name].grad.dtype == t[name].dtype and t[name].grad.shape == t[name].shape
                    assert_gated_gradient(t[name].grad, exact[name].grad, f"{name} {shape} {form} on {route}")


@every_form
def test_recorded_bits_are_those_of_inference(form: dict[str, Any], route: str, device: torch.device) -> None:
    t = tensors((5, 96), BF16, F32, device)
    with flashnorm.backend(route):
        for _ in range(2):  # a warm call, too
            recorded = gated(t, form)
            with torch.no_grad():
                want = gated(t, form)
            assert recorded.requires_grad and not want.requires_grad
            assert_same_bits(recorded.detach(), want, str(form))


@every_form
def test_what_is_not_asked_for(form: dict[str, Any], device: torch.device) -> None:
    """Any subset of the three gets the gradients that all get together."""
    whole = tensors((4, 64), F32, F32, device)
    dy = rows((4, 64), F32, "dy").to(device)
    gated(whole, form).backward(dy)
    for asked in ({"x"}, {"gate"}, {"weight"}, {"x", "gate"}, {"gate", "weight"}):
        t = {name: v.detach().clone().requires_grad_(name in asked) for name, v in whole.items()}
        gated(t, form).backward(dy)
        for name in NAMES:
            if name in asked:
                assert_same_bits(t[name].grad, whole[name].grad, f"{name} of {asked}")
            else:
                assert t[name].grad is None


@every_form
def test_second_gradients(form: dict[str, Any], device: torch.device) -> None:
    t, dy = tensors((3, 64), F32, F32, device), rows((3, 64), F32, "dy")
    exact = doubled(t)
    for values, function, arriving in ((t, gated, dy.to(device)), (exact, in_fp64, dy.double())):
        firsts = torch.autograd.grad(function(values, form), list(values.values()), arriving, create_graph=True)
        sum(first.square().sum() for first in firsts).backward()
    for name in NAMES:
        assert_second_gradient(t[name].grad, exact[name].grad, f"{name}, twice")


@pytest.mark.parametrize("form", FORMS[::3], ids=lambda f: "-".join(map(str, f.values())))
def test_compiled_and_checkpointed(form: dict[str, Any], device: torch.device) -> None:
    dy = rows((6, 64), F32, "dy").to(device)
    want = tensors((6, 64), F32, F32, device)
    gated(want, form).backward(dy)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, gate, w: gated({"x": x, "gate": gate, "weight": w}, form),
                             backend="aot_eager", fullgraph=True)  # fmt: skip
    for call in (compiled, lambda *a: checkpoint(lambda *b: gated(dict(zip(NAMES, b, strict=True)), form), *a,
                                                 use_reentrant=False)):  # fmt: skip
        t = tensors((6, 64), F32, F32, device)
        call(*t.values()).backward(dy)
        for name in NAMES:
            assert_gated_gradient(t[name].grad, want[name].grad.double(), name)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_what_raises(device: torch.device) -> None:
    t = tensors((4, 64), F32, F32, device)
    for out in (torch.empty(4, 64, device=device), t["x"]):
        with pytest.raises(RuntimeError, match="rmsnorm_gate: input requires grad, but this operator records"):
            functional.rmsnorm_gate(t["x"], t["gate"], t["weight"], out=out)
    with pytest.raises(ValueError, match="activation must be"):
        functional.rmsnorm_gate(t["x"], t["gate"], activation="relu")
    with pytest.raises(ValueError, match="gate must have shape"):
        functional.rmsnorm_gate(t["x"], t["gate"][:, :32])
    with pytest.raises(ValueError, match="gate must have shape"), Watching():  # where it could be broadcast
        functional.rmsnorm_gate(t["x"], t["gate"][:1])
    with pytest.raises(ValueError, match="group_size must be"):
        functional.rmsnorm_gate(t["x"], t["gate"], group_size=48)
