"""Gradients of the public functions: what they are, in which dtypes, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import flashnorm
from flashnorm import functional
from tests import oracles
from tests.inputs import SPECIAL, gains, rows
from tests.oracles import ExpectedGradients
from tests.tolerance import assert_row_gradient, assert_same_bits, assert_same_sum, assert_second_gradient

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-5


@dataclass(frozen=True)
class Norm:
    """A differentiable function: how it is called, and what the oracle must know of it."""

    call: Callable[..., Any]
    names: tuple[str, ...]
    offset: float = 0.0
    numerics: str = "flashinfer"

    @property
    def centred(self) -> bool:
        return "bias" in self.names

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype, **dtypes: torch.dtype) -> dict[str, torch.Tensor]:
        """Values on the CPU: rows and gains, in `dtype` where nothing else is said."""
        made = {}
        for name in self.names:
            of = rows if name in ("x", "residual") else gains
            made[name] = of(shape if of is rows else shape[-1:], dtypes.get(name, dtype), name)
        return made

    def __call__(self, tensors: dict[str, Any]) -> tuple[Any, ...]:
        found = self.call(*(tensors[name] for name in self.names))
        return found if isinstance(found, tuple) else (found,)

    def expected(
        self, tensors: dict[str, Any], dy: torch.Tensor, dh: torch.Tensor | None = None, **more: Any
    ) -> ExpectedGradients:
        named = {name: tensors.get(name) for name in ("x", "weight", "residual")}
        given = {"bias": tensors.get("bias"), "centred": self.centred, "eps": EPS, "offset": self.offset}
        return oracles.gradients(*named.values(), dy=dy, dh=dh, numerics=self.numerics, **given, **more)


def _liger(mode: str, offset: float) -> Callable[..., Any]:
    return lambda x, w: functional.rms_norm(x, w, EPS, offset=offset, casting_mode=mode)


PLAIN, SUM = ("x", "weight"), ("x", "residual", "weight")
NORMS = {
    "rmsnorm": Norm(lambda x, w: flashnorm.rmsnorm(x, w, EPS), PLAIN),
    "rmsnorm-llama": Norm(lambda x, w: flashnorm.rmsnorm(x, w, EPS, numerics="hf-llama"), PLAIN, 0.0, "hf-llama"),
    "gemma_rmsnorm": Norm(lambda x, w: flashnorm.gemma_rmsnorm(x, w, EPS), PLAIN, 1.0),
    "layernorm": Norm(lambda x, w, b: flashnorm.layernorm(x, w, b, EPS), (*PLAIN, "bias")),
    "add_rmsnorm": Norm(lambda x, r, w: flashnorm.add_rmsnorm(x, r, w, EPS), SUM, 0.0, "cake"),
    "add_rmsnorm-flashinfer": Norm(lambda x, r, w: flashnorm.add_rmsnorm(x, r, w, EPS, numerics="flashinfer"), SUM),
    "gemma_add_rmsnorm": Norm(lambda x, r, w: functional.gemma_add_rmsnorm(x, r, w, EPS), SUM, 1.0, "cake"),
    "add_layernorm": Norm(
        lambda x, r, w, b: flashnorm.add_layernorm(x, r, w, b, EPS), (*SUM, "bias"), 0.0, "cake"
    ),
    "rms_norm-llama+half": Norm(_liger("llama", 0.5), PLAIN, 0.5, "hf-llama"),
    "rms_norm-gemma+half": Norm(_liger("gemma", 0.5), PLAIN, 0.5, "hf-gemma"),
    "rms_norm-gemma": Norm(_liger("gemma", 1.0), PLAIN, 1.0, "hf-gemma"),
}  # fmt: skip
every_norm = pytest.mark.parametrize("name", NORMS)
DTYPES = (  # of rows, of weights and biases, of the residual
    (F32, F32, F32),
    (BF16, BF16, BF16),
    (F16, F16, F16),
    (BF16, F32, F32),
    (F32, BF16, F16),
    (F16, BF16, BF16),
)


SHAPES = ((1, 64), (7, 111), (3, 5, 128), (133, 576))


def leaves(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: t.detach().to(device, copy=True).requires_grad_() for name, t in tensors.items()}


def judge(tensors: dict[str, Any], want: ExpectedGradients, what: str) -> None:
    """Every leaf's gradient has its dtype and shape, and is right."""
    rounded = "llama" in what and tensors["x"].dtype != F32
    for name, leaf in tensors.items():
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape, f"{what}: {name}"
        if name in ("x", "residual"):
            assert_row_gradient(leaf.grad, want, f"{what}: {name}")
        else:
            assert_same_sum(leaf.grad, getattr(want, name), f"{what}: {name}", rounded=rounded)


@every_norm
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(t).removeprefix("torch.") for t in d))
def test_gradients_are_right(name: str, dtypes: tuple[torch.dtype, ...], route: str, device: torch.device) -> None:
    norm, (dtype, vectors, residual) = NORMS[name], dtypes
    for shape in SHAPES:
        given = norm.tensors(shape, dtype, weight=vectors, bias=vectors, residual=residual)
        tensors = leaves(given, device)
        dy, dh = rows(shape, dtype, "dy"), rows(shape, residual, "dh")
        with flashnorm.backend(route):
            y, *h = norm(tensors)
        assert y.dtype == dtype
        torch.autograd.backward((y, *h), [t.to(device) for t in ((dy, dh) if h else (dy,))])
        judge(tensors, norm.expected(given, dy, dh if h else None), f"{name} {shape} {dtypes} on {route}")


@every_norm
def test_recorded_bits_are_those_of_inference(name: str, exact_route: str, device: torch.device) -> None:
    norm = NORMS[name]
    for dtype in (F32, BF16):
        tensors = leaves(norm.tensors((33, 576), dtype), device)
        with flashnorm.backend(exact_route):
            recorded = norm(tensors)
            with torch.no_grad():
                plain = norm(tensors)
        for a, b in zip(recorded, plain, strict=True):
            assert a.requires_grad and not b.requires_grad
            assert_same_bits(a, b, name)


@pytest.mark.parametrize("name", ["rmsnorm", "rmsnorm-llama", "gemma_rmsnorm"])
@pytest.mark.parametrize(
    ("shape", "weight_shape"),
    [((5, 128), (5, 128)), ((4, 3, 64), (3, 64)), ((4, 3, 64), (4, 1, 64)), ((4, 3, 64), (1, 3, 64)),
     ((2, 4, 3, 64), (4, 1, 64)), ((4, 3, 64), (4, 3, 64)), ((5, 128), (1, 128)), ((4, 3, 64), None)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_broadcast_weights_have_gradients_of_their_shape(
    name: str, shape: Any, weight_shape: Any, dtype: torch.dtype, route: str, device: torch.device
) -> None:
    norm, x, dy = NORMS[name], rows(shape, dtype), rows(shape, dtype, "dy")
    weight = None if weight_shape is None else gains(weight_shape, dtype)
    tensors = leaves({"x": x} | ({} if weight is None else {"weight": weight}), device)
    with flashnorm.backend(route):
        norm({"weight": None} | tensors)[0].backward(dy.to(device))
    want = norm.expected({"x": x, "weight": weight}, dy)
    judge(tensors, want, f"{name} {weight_shape} on {route}")


@every_norm
def test_rows_that_are_hard(name: str, route: str, device: torch.device) -> None:
    """Zeros, spikes, subnormal rows: gradients are the formula's, and never NaN where it has none."""
    norm = NORMS[name]
    given = norm.tensors((4, 128), F32)
    for row, special in enumerate(("zero", "spike", "300", "subnormal")):
        SPECIAL[special](given["x"][row])
        if "residual" in given:
            given["residual"][row].zero_()
    if norm.centred:
        given["x"] += 1e-2 * rows((4, 128), F32, "no constant rows")
    tensors, dy = leaves(given, device), rows((4, 128), F32, "dy")
    with flashnorm.backend(route):
        norm(tensors)[0].backward(dy.to(device))
    judge(tensors, norm.expected(given, dy), f"{name} on {route}")


@every_norm
def test_no_rows(name: str, route: str, device: torch.device) -> None:
    norm = NORMS[name]
    tensors = leaves(norm.tensors((0, 64), BF16), device)
    with flashnorm.backend(route):
        results = norm(tensors)
    torch.autograd.backward(results, [torch.empty_like(y) for y in results])
    for key, leaf in tensors.items():
        assert leaf.grad.shape == leaf.shape and not leaf.grad.any(), key


@every_norm
def test_layouts_of_gradients_and_inputs(name: str, route: str, device: torch.device) -> None:
    """Expanded, sliced, transposed and misaligned gradients; a half of wider rows as input."""
    norm, shape = NORMS[name], (6, 128)
    given = norm.tensors(shape, BF16)
    wide = torch.empty(6, 257, dtype=BF16)
    wide[:, 129:] = given["x"]
    for what, dy in {
        "sum": None,
        "row": rows((128,), BF16).expand(shape),
        "column": rows((6, 1), BF16).expand(shape),
        "transposed": rows((128, 6), BF16).t(),
        "sliced": rows((6, 300), BF16)[:, 1:257:2],
        "misaligned": rows((6, 129), BF16)[:, 1:],
    }.items():
        tensors = leaves(given, device)
        base = wide.to(device, copy=True).requires_grad_()
        with flashnorm.backend(route):
            y = norm(tensors | {"x": base[:, 129:]})[0]
        if dy is None:
            y.sum().backward()
        else:
            y.backward(_like(dy, device))
        tensors["x"].grad = base.grad[:, 129:]
        want = torch.ones(shape) if dy is None else dy
        judge(tensors, norm.expected(given, want.to(BF16)), f"{name} {what} on {route}")


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On a device with the very strides."""
    if tensor.device == device:
        return tensor
    room = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype, device=device)
    room.copy_(torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()))
    return room.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@every_norm
def test_only_what_is_needed(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What requires no gradient has none, and none is computed for it."""
    from flashnorm.ops import differentiable

    norm, asked = NORMS[name], []
    for each in ("rmsnorm_backward", "layernorm_backward"):
        real = getattr(differentiable, each)

        def watch(*args: Any, real: Any = real, wanted: Any, **more: Any) -> Any:
            asked.append(set(wanted))
            return real(*args, wanted=wanted, **more)

        monkeypatch.setattr(differentiable, each, watch)
    called = {"x": "dx", "residual": "dresidual", "weight": "dweight", "bias": "dbias"}
    given = norm.tensors((3, 64), F32)
    whole = leaves(given, device)
    norm(whole)[0].square().sum().backward()
    for alone in norm.names:
        tensors = {key: t.to(device, copy=True).requires_grad_(key == alone) for key, t in given.items()}
        norm(tensors)[0].square().sum().backward()
        assert asked[-1] == {called[alone]}
        assert all((t.grad is not None) == (key == alone) for key, t in tensors.items())
        torch.testing.assert_close(tensors[alone].grad, whole[alone].grad, rtol=0, atol=0)


@every_norm
def test_incoming_gradients_are_never_modified(name: str, device: torch.device) -> None:
    """A gradient that two consumers share: a norm around a residual connection."""
    norm = NORMS[name]
    tensors = leaves(norm.tensors((5, 64), F32), device)
    results = norm(tensors)
    grads = [torch.randn_like(y) for y in results]
    kept = [g.clone() for g in grads]
    torch.autograd.backward(results, grads, retain_graph=True)
    assert all(torch.equal(g, k) and g._version == 0 for g, k in zip(grads, kept, strict=True))
    first = {key: t.grad.clone() for key, t in tensors.items()}
    torch.autograd.backward(results, grads)
    assert all(torch.equal(t.grad, 2 * first[key]) for key, t in tensors.items())


@pytest.mark.parametrize("name", ["add_rmsnorm", "add_layernorm"])
def test_one_result_alone(name: str, device: torch.device) -> None:
    norm, shape = NORMS[name], (4, 64)
    given, dy = norm.tensors(shape, BF16, residual=F32), rows(shape, BF16, "dy")
    tensors = leaves(given, device)
    norm(tensors)[0].backward(dy.to(device))
    judge(tensors, norm.expected(given, dy), "the norm alone")
    tensors, dh = leaves(given, device), rows(shape, F32, "dh")
    norm(tensors)[1].backward(dh.to(device))
    assert torch.equal(tensors["x"].grad.cpu(), dh.to(BF16)) and torch.equal(tensors["residual"].grad.cpu(), dh)
    assert tensors["weight"].grad is None or not tensors["weight"].grad.any()


@pytest.mark.parametrize("name", ["rmsnorm", "gemma_rmsnorm"])
def test_rstd_has_a_gradient_too(name: str, route: str, device: torch.device) -> None:
    norm, shape = NORMS[name], (4, 64)
    given = norm.tensors(shape, F32)
    dy, drstd = rows(shape, F32, "dy"), rows((4, 1), F32, "drstd").squeeze(-1)
    for used in ((True, True), (False, True)):
        tensors = leaves(given, device)
        with flashnorm.backend(route):
            y, rstd = getattr(flashnorm, name)(tensors["x"], tensors["weight"], EPS, return_rstd=True)
        pairs = [(t, g.to(device)) for t, g, use in ((y, dy, used[0]), (rstd, drstd, used[1])) if use]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        want = norm.expected(given, dy if used[0] else torch.zeros(shape), drstd=drstd)
        assert_row_gradient(tensors["x"].grad, want, name)


@every_norm
def test_second_gradients(name: str, device: torch.device) -> None:
    """`create_graph=True` differentiates the formula: compared with fp64."""
    norm = NORMS[name]
    given = norm.tensors((3, 32), F32)

    def twice(tensors: dict[str, torch.Tensor], results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        loss = sum(y.pow(3).sum() for y in results)
        found = torch.autograd.grad(loss, list(tensors.values()), create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in found), list(tensors.values())))

    mine = leaves(given, device)
    theirs = {key: t.double().requires_grad_() for key, t in given.items()}
    h = theirs["x"] + theirs["residual"] if "residual" in given else theirs["x"]
    c = h - h.mean(-1, keepdim=True) if norm.centred else h
    y = c / torch.sqrt(c.square().mean(-1, keepdim=True) + EPS) * (theirs["weight"] + norm.offset)
    y = y + theirs["bias"] if norm.centred else y
    want = twice(theirs, (y, h) if "residual" in given else (y,))
    for key, a, b in zip(given, twice(mine, norm(mine)), want, strict=True):
        assert_second_gradient(a, b, f"{name}: {key}")
