"""Modules with Liger-Kernel's arguments: what they compute, in which rounding, and that they behave as modules."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import flashnorm
from flashnorm import functional, nn
from tests import oracles
from tests.inputs import gains, rows
from tests.tolerance import Pool, assert_row_gradient, assert_same_bits, assert_same_sum

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-5
MODES = {"llama": "hf-llama", "gemma": "hf-gemma", "none": "none"}
FAMILIES: dict[Any, tuple[float, str, str]] = {
    nn.RMSNorm: (0.0, "llama", "ones"),
    nn.RMSNormForGemma: (1.0, "gemma", "zeros"),
    nn.RMSNormForGemma2: (1.0, "gemma", "zeros"),
    nn.RMSNormForGemma3: (1.0, "gemma", "zeros"),
    nn.RMSNormForGemma4: (0.0, "gemma", "ones"),
    nn.RMSNormForMuseGlimmer: (0.0, "gemma", "ones"),
    nn.RMSNormForMuseGlimmerTextCentered: (1.0, "gemma", "zeros"),
    nn.RMSNormForOlmo2: (0.0, "llama", "ones"),
    nn.RMSNormForGlm4: (0.0, "llama", "ones"),
    nn.RMSNormForQwen3Next: (1.0, "gemma", "zeros"),
}
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)


@every_family
def test_families_are_configured_as_named(family: Any, device: torch.device) -> None:
    module = family(64, 1e-5).to(device)
    assert (module.offset, module.casting_mode, module.init_fn) == FAMILIES[family]
    assert module.variance_epsilon == 1e-5 and module.in_place is False and module.row_mode is None
    assert torch.equal(module.weight.cpu(), torch.ones(64) if module.init_fn == "ones" else torch.zeros(64))
    assert list(module.state_dict()) == ["weight"]
    x = rows((4, 64), BF16).to(device)
    want = functional.rms_norm(x, module.weight, 1e-5, offset=module.offset, casting_mode=module.casting_mode)
    assert_same_bits(module(x), want)


@every_family
def test_modules_are_copied_pickled_and_saved(family: Any, device: torch.device) -> None:
    module = family(64).to(device)
    torch.nn.init.uniform_(module.weight, 0.5, 2)
    x = rows((4, 64), F32).to(device)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    fresh = family(64).to(device)
    fresh.load_state_dict(module.state_dict())
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
        fresh,
    ):
        assert type(other) is family and repr(other) == repr(module)
        assert_same_bits(other(x), module(x))
    module.reset_parameters()
    assert_same_bits(module.weight, family(64).to(device).weight)


def test_repr() -> None:
    assert repr(nn.RMSNorm(64)) == "RMSNorm(64, eps=1e-06, offset=0.0, casting_mode='llama', in_place=False)"
    assert "elementwise_affine=False" in repr(nn.RMSNorm(64, elementwise_affine=False))
    assert repr(nn.LayerNorm(64, 1e-5)) == "LayerNorm(64, eps=1e-05)"
    assert "offset=1.0" in repr(nn.FusedAddRMSNorm(64, offset=1.0))


def test_positional_arguments_are_liger_kernels() -> None:
    module = nn.RMSNorm(64, 1e-5, 1.0, "gemma", "zeros", True, True, False)
    assert (module.variance_epsilon, module.offset, module.casting_mode, module.init_fn) == (
        1e-5,
        1.0,
        "gemma",
        "zeros",
    )
    assert (module.in_place, module.row_mode, module.elementwise_affine, module.weight) == (True, True, False, None)
    fused = nn.FusedAddRMSNorm(64, 1e-5, 1.0, "gemma", "zeros", True)
    assert fused.in_place and fused.offset == 1.0


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("mode", MODES)
def test_casting_modes(mode: str, offset: float, dtype: torch.dtype, route: str, device: torch.device) -> None:
    """Forward and gradients against the formula with the mode's roundings, weights of both widths, and none."""
    shape = (40, 512)
    x, dy = rows(shape, dtype), rows(shape, dtype, "dy")
    for vector in (dtype, F32, None):
        weight = None if vector is None else gains(shape[-1:], vector)
        leaf = x.to(device, copy=True).requires_grad_()
        own = None if weight is None else weight.to(device, copy=True).requires_grad_()
        with flashnorm.backend(route):
            y = functional.rms_norm(leaf, own, EPS, offset=offset, casting_mode=mode)
            y.backward(dy.to(device))
        what = f"{mode} {offset} {dtype} {vector} {route}"
        if mode == "none" and dtype != F32:
            want, gradients = oracles.narrow(x, weight, dy, eps=EPS, offset=offset)
        else:
            numerics = "hf-gemma" if mode == "none" else MODES[mode]
            shifted = weight if weight is None or not offset else (weight.float() + offset)
            want = oracles.norm(x, shifted, eps=EPS, numerics=numerics)
            gradients = oracles.gradients(x, weight, dy=dy, eps=EPS, numerics=numerics, offset=offset)
        pool = Pool(numerics="hf-llama" if mode == "llama" else "hf-gemma")
        pool.add(y, want, what)
        pool.judge(what, need=shape[0] * shape[1])
        assert_row_gradient(leaf.grad, gradients, what)
        if own is not None:
            assert own.grad.dtype == vector
            assert_same_sum(own.grad, gradients.weight, what, rounded=mode == "llama" and dtype != F32)


def test_numbers_and_names_of_modes_are_the_same(device: torch.device) -> None:
    x, weight = rows((4, 64), BF16).to(device), gains((64,), BF16).to(device)
    for number, name in ((0, "llama"), (1, "gemma"), (-1, "none")):
        assert_same_bits(*(functional.rms_norm(x, weight, casting_mode=m, offset=1.0) for m in (number, name)))
    for row_mode in (None, True, False):
        assert_same_bits(functional.rms_norm(x, weight, row_mode=row_mode), functional.rms_norm(x, weight))
        got = nn.RMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False, row_mode)
        assert_same_bits(got, functional.rms_norm(x, weight))


@pytest.mark.parametrize("module", [nn.RMSNormForGemma4, nn.RMSNormForMuseGlimmer], ids=lambda m: m.__name__)
def test_without_a_weight_the_kernels_serve(module: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = functional.rms.recorded
    monkeypatch.setattr(functional.rms, "recorded", lambda *args: seen.append(args) or real(*args))
    norm, x = module(64, with_scale=False), rows((4, 64), BF16).to(device).requires_grad_()
    assert norm.weight is None and not norm.state_dict()
    norm(x).sum().backward()
    assert len(seen) == 1 and seen[0][2] is None and x.grad is not None
    assert nn.RMSNormForMuseGlimmer(with_scale=False)(x).shape == x.shape
    with pytest.raises(ValueError, match="hidden_size may be None only where there is no weight"):
        nn.RMSNormForMuseGlimmer()


@pytest.mark.parametrize("mode", MODES)
def test_in_place_writes_the_gradient_it_was_given_and_only_then(mode: str, device: torch.device) -> None:
    x, dy = rows((4, 64), BF16).to(device), rows((4, 64), BF16, "dy").to(device)
    found = {}
    for in_place in (False, True):
        norm, leaf, given = nn.RMSNorm(64, casting_mode=mode, in_place=in_place).to(device), x.clone(), dy.clone()
        norm(leaf.requires_grad_()).backward(given)
        found[in_place] = leaf.grad
        assert torch.equal(given, leaf.grad if in_place else dy)
    assert_same_bits(found[True], found[False])
    norm(leaf).sum().backward()  # an expanded gradient is nobody's to write


@pytest.mark.parametrize("offset", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("mode", MODES)
def test_fused_add_is_the_norm_of_the_rounded_sum(mode: str, offset: float, device: torch.device) -> None:
    fused = nn.FusedAddRMSNorm(64, EPS, offset, mode, dtype=BF16).to(device)
    plain = nn.RMSNorm(64, EPS, offset, mode, dtype=BF16).to(device)
    for weight in (fused.weight, plain.weight):
        weight.data.copy_(gains((64,), BF16))
    a, b, c, d = (rows((4, 64), BF16, i % 2).to(device).requires_grad_() for i in range(4))
    y, s = fused(a, b)
    total = c + d
    want = plain(total)
    assert_same_bits(s, total)
    assert_same_bits(y, want)
    dy = rows((4, 64), BF16, "dy").to(device)
    y.backward(dy)
    want.backward(dy)
    assert_same_bits(a.grad, c.grad)
    assert_same_bits(b.grad, d.grad)
    assert_same_bits(fused.weight.grad, plain.weight.grad)


def test_layer_norm_module(device: torch.device) -> None:
    module = nn.LayerNorm(64, 1e-5, bias=True).to(device)
    assert module.bias.abs().sum() > 0 and not nn.LayerNorm(64).bias.any()
    assert list(module.state_dict()) == ["weight", "bias"]
    x = rows((4, 64), BF16).to(device).requires_grad_()
    assert_same_bits(module(x), flashnorm.layernorm(x, module.weight, module.bias, 1e-5))
    module(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("make", [nn.RMSNorm, nn.FusedAddRMSNorm, nn.LayerNorm], ids=lambda m: m.__name__)
def test_compiled_modules(make: Any, device: torch.device) -> None:
    torch._dynamo.reset()
    module = make(64).to(device)
    x = rows((4, 64), BF16).to(device).requires_grad_()
    args = (x, x.detach()) if make is nn.FusedAddRMSNorm else (x,)
    got, want = torch.compile(module, fullgraph=True, backend="aot_eager")(*args), module(*args)
    for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, want)), strict=True):
        assert_same_bits(a, b)


def test_impl_chooses_the_route(device: torch.device, route: str) -> None:
    x, weight = rows((4, 64), BF16).to(device).requires_grad_(), gains((64,), BF16).to(device)
    with flashnorm.backend(route):
        want = functional.rms_norm(x, weight)
    assert_same_bits(functional.rms_norm(x, weight, impl=route), want)


def test_wrong_arguments() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    for wrong, text in (
        (lambda: nn.RMSNorm(8, casting_mode="half"), "casting_mode must be one of 'llama'"),
        (lambda: nn.RMSNorm(8, init_fn="normal"), "init_fn must be one of 'ones', 'zeros'"),
        (lambda: nn.RMSNorm(0), "hidden_size must be a positive integer"),
        (lambda: nn.LayerNorm(8, init_fn="normal"), "init_fn must be one of 'ones', 'zeros'"),
        (lambda: functional.rms_norm(x, weight, impl="triton"), "impl must be one of cute, cuda, cpu, torch"),
        (lambda: functional.rms_norm(x, weight, offset=float("nan")), "offset must be finite"),
        (lambda: functional.rms_norm(x, weight[:3]), "weight must broadcast"),
        (lambda: functional.rms_norm(x.half(), weight[:3], casting_mode="none"), "weight must broadcast"),
        (lambda: functional.rms_norm(x, weight, -1.0), "eps must be finite"),
    ):
        with pytest.raises(ValueError, match=text):
            wrong()
    with pytest.raises(TypeError, match="offset must be a Python number"):
        functional.rms_norm(x, weight, offset="1")  # type: ignore[arg-type]


@pytest.mark.parametrize("through", ["function", "module"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_residual_that_does_not_fit(mode: str, dtype: torch.dtype, through: str, device: torch.device) -> None:
    """Every mode refuses it as every other does: nothing is broadcast."""
    x = rows((6, 64), dtype).to(device)
    module = nn.FusedAddRMSNorm(64, EPS, casting_mode=mode, dtype=dtype, device=device)

    def call(x: Any, residual: Any) -> Any:
        if through == "module":
            return module(x, residual)
        return functional.fused_add_rms_norm(x, residual, module.weight, EPS, casting_mode=mode)

    for a, b in ((x, x[:1]), (x[:1], x), (x, x[0]), (x[0], x), (x, x[:, :1])):
        with pytest.raises(ValueError, match="residual must have shape"):
            call(a, b)
    for b in (x.tolist(), None, 1.0):
        with pytest.raises(TypeError, match=r"residual must be a torch\.Tensor"):
            call(x, b)
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor"):
        call(x.tolist(), x)
    for b in (x.double(), x.to(torch.int32)):
        with pytest.raises(ValueError, match="residual must have dtype"):
            call(x, b)
