"""The plugins for vLLM and SGLang, against stand-ins shaped like the interfaces they are written for."""

from __future__ import annotations

import enum
import importlib
import logging
import math
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import flashnorm
from flashnorm.core.checks import MAX_HIDDEN
from flashnorm.integrations import sglang as sglang_plugin
from flashnorm.integrations import vllm as vllm_plugin

H = 256


@pytest.fixture
def calls(monkeypatch):
    """(function, numerics) of every call of flashnorm, in order."""
    seen = []
    for name in ("rmsnorm", "gemma_rmsnorm", "fused_add_rmsnorm", "gemma_fused_add_rmsnorm"):
        real = getattr(flashnorm, name)

        def spy(*args, _name=name, _real=real, **named):
            seen.append((_name, named["numerics"]))
            return _real(*args, **named)

        monkeypatch.setattr(flashnorm, name, spy)
    return seen


def module(monkeypatch, name, **members):
    """A module under a name, its parents too."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        here = ".".join(parts[:i])
        if here not in sys.modules:
            made = ModuleType(here)
            made.__path__ = []
            monkeypatch.setitem(sys.modules, here, made)
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], made)
    sys.modules[name].__dict__.update(members)
    return sys.modules[name]


class Theirs:
    """Says which of the engine's own forwards ran."""

    def forward_native(self, x, residual=None):
        return ("native", x, residual)

    def forward_cuda(self, x, residual=None, *more, **named):
        return ("cuda", x, residual, *more, *named.values())

    def forward_cpu(self, x, residual=None):
        return ("cpu", x, residual)


# ------------------------------------------------------------------ vLLM
@pytest.fixture
def vllm(monkeypatch):
    """Its registry of operators, and two layers."""
    registry = {}

    class CustomOp(nn.Module):
        def __new__(cls, *args, **named):
            return super().__new__(registry.get(cls.__name__, cls))

        def __init__(self, device="cuda"):
            super().__init__()
            self._forward_method = getattr(self, f"forward_{device}")

        def forward(self, *args, **named):
            return self._forward_method(*args, **named)

        @classmethod
        def register_oot(cls, decorated=None, name=None):
            def decorate(op):
                key = name or cls.__name__
                assert key not in registry, f"Duplicate op name: {key}"
                op.name = key
                registry[key] = op
                return op

            return decorate if decorated is None else decorate(decorated)

    class RMSNorm(Theirs, CustomOp):
        name = "rms_norm"

        def __init__(self, hidden_size, eps=1e-6, var_hidden_size=None, has_weight=True, dtype=None, device="cuda"):
            super().__init__(device)
            self.variance_epsilon, self.has_weight = eps, has_weight
            self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size
            self.weight = nn.Parameter(torch.rand(hidden_size, dtype=dtype) + 0.5)

    class GemmaRMSNorm(Theirs, CustomOp):
        name = "gemma_rms_norm"

        def __init__(self, hidden_size, eps=1e-6, device="cuda"):
            super().__init__(device)
            self.variance_epsilon = eps
            self.weight = nn.Parameter(torch.rand(hidden_size))

    module(monkeypatch, "vllm.model_executor.custom_op", CustomOp=CustomOp, op_registry_oot=registry)
    return module(monkeypatch, "vllm.model_executor.layers.layernorm", RMSNorm=RMSNorm, GemmaRMSNorm=GemmaRMSNorm)


def rows(device, dtype=torch.bfloat16, seed=0):
    return torch.randn(7, H, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("engine_device", ["cuda", "cpu"])
@pytest.mark.parametrize("residual", [False, True])
def test_vllm_layers_run_on_flashnorm(residual, engine_device, vllm, calls, device):
    vllm_plugin.register()
    vllm_plugin.register()  # every process of vLLM does
    layer = vllm.RMSNorm(H, 1e-5, dtype=torch.bfloat16, device=engine_device).to(device)
    assert isinstance(layer, vllm.RMSNorm) and type(layer).__name__ == "FlashnormRMSNorm" and layer.name == "rms_norm"
    assert list(layer.state_dict()) == ["weight"]
    x, r = rows(device), rows(device, seed=1) if residual else None
    want, r_want = x.clone(), None if r is None else r.clone()
    got = layer(x, r)
    if residual:
        flashnorm.fused_add_rmsnorm(want, r_want, layer.weight.data, 1e-5, numerics="vllm")
        assert torch.equal(got[0], want) and torch.equal(got[1], r_want) and got[0] is x and got[1] is r
        assert calls[0] == ("fused_add_rmsnorm", "vllm")
    else:
        assert torch.equal(got, flashnorm.rmsnorm(want, layer.weight.data, 1e-5, numerics="vllm"))
        assert calls[0] == ("rmsnorm", "vllm")


@pytest.mark.parametrize("residual", [False, True])
def test_vllm_gemma(residual, vllm, calls, device):
    vllm_plugin.register()
    layer = vllm.GemmaRMSNorm(H).to(device)
    layer(rows(device), rows(device, seed=1) if residual else None)
    assert calls == [("gemma_fused_add_rmsnorm" if residual else "gemma_rmsnorm", "hf-gemma")]


def test_vllm_keeps_what_flashnorm_does_not_compute(vllm, calls, device):
    vllm_plugin.register()
    x = rows(device)
    assert vllm.RMSNorm(H, var_hidden_size=H // 2, dtype=torch.bfloat16).to(device)(x)[0] == "cuda"
    assert vllm.RMSNorm(H, dtype=torch.float32).to(device)(x)[0] == "cuda"  # the result would be fp32
    assert vllm.RMSNorm(H, dtype=torch.bfloat16).to(device)(x, x.float())[0] == "cuda"
    assert vllm.RMSNorm(H, dtype=torch.bfloat16, device="cpu").to(device)(x.double())[0] == "cpu"
    assert vllm.RMSNorm(H, dtype=torch.bfloat16).to(device)(x, None, 3) == ("cuda", x, None, 3)
    assert vllm.RMSNorm(H, dtype=torch.bfloat16, device="native").to(device)(x)[0] == "native"
    assert calls == []
    layer = vllm.RMSNorm(H, has_weight=False, dtype=torch.float32).to(device)
    assert torch.equal(layer(x), flashnorm.rmsnorm(x, None, numerics="vllm"))


def refused_by_flashnorm(layer, x):
    """What to call a layer with that its engine may take, and flashnorm would not."""
    yield x[:, : H // 2]  # rows of another width than the weight
    yield x.to("meta")  # another device
    yield torch.nested.nested_tensor([x, x], layout=torch.jagged)
    for eps in (-1e-6, math.nan, True, torch.tensor(1e-6)):
        layer.variance_epsilon = eps
        yield x


def refused_with_a_residual(x):
    """(x, residual) that the operator in place would refuse."""
    yield x, x
    yield x, x[:1].expand_as(x)
    yield x[:1].expand_as(x), x.clone()
    yield x, x.to_sparse()
    yield x, x.clone().requires_grad_()


def test_vllm_keeps_what_flashnorm_would_refuse(vllm, calls, device):
    vllm_plugin.register()
    layer, x = vllm.RMSNorm(H, dtype=torch.bfloat16).to(device), rows(device)
    for given in refused_by_flashnorm(layer, x):
        assert layer(given)[0] == "cuda"
    gemma = vllm.GemmaRMSNorm(H).to(device)
    for given in refused_by_flashnorm(gemma, x):
        assert gemma(given)[0] == "cuda"
    fresh = vllm.RMSNorm(H, dtype=torch.bfloat16).to(device)
    for given in refused_with_a_residual(x):
        assert fresh(*given)[0] == vllm.GemmaRMSNorm(H).to(device)(*given)[0] == "cuda"
    with forward_ad.dual_level():
        assert fresh(forward_ad.make_dual(x, x))[0] == "cuda"
    torch.func.vmap(lambda row: calls.extend(fresh(row)[:1]) or row)(x)
    assert calls.pop() == "cuda"
    wide = torch.zeros(1, MAX_HIDDEN + 8, dtype=torch.bfloat16, device=device)
    assert vllm.RMSNorm(MAX_HIDDEN + 8, dtype=torch.bfloat16).to(device)(wide)[0] == "cuda"
    assert calls == []


def test_vllm_another_plugin_was_first(vllm, caplog):
    @vllm.RMSNorm.register_oot
    class Other(vllm.RMSNorm):
        pass

    with caplog.at_level(logging.WARNING, logger="flashnorm"):
        vllm_plugin.register()
    assert "Other serves vLLM's RMSNorm already" in caplog.text
    assert type(vllm.RMSNorm(H)) is Other
    assert type(vllm.GemmaRMSNorm(H)).__name__ == "FlashnormGemmaRMSNorm"


def test_vllm_of_another_shape_is_left_alone(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, logger="flashnorm"):
        vllm_plugin.register()
        assert "not where they were expected" in caplog.text
        module(monkeypatch, "vllm.model_executor.custom_op")
        module(monkeypatch, "vllm.model_executor.layers.layernorm", RMSNorm=type("RMSNorm", (), {}))
        vllm_plugin.register()
    assert "RMSNorm cannot be registered out of tree" in caplog.text
    assert "GemmaRMSNorm cannot be registered" in caplog.text


# ------------------------------------------------------------------ SGLang
@pytest.fixture
def sglang(monkeypatch):
    """Its hooks, and two layers."""
    hooks = []
    kinds = enum.Enum("HookType", {"AROUND": "around", "REPLACE": "replace"})

    class HookRegistry:
        @classmethod
        def register(cls, target, hook, hook_type, *, source=None):
            hooks.append((target, hook, hook_type))

        @classmethod
        def apply_hooks(cls):
            for target, hook, kind in hooks:
                assert kind is kinds.AROUND
                where, name = target.rsplit(".", 1)
                owner = pkgutil.resolve_name(where)
                original = getattr(owner, name)

                def wrapper(*args, _hook=hook, _original=original, **named):
                    return _hook(_original, *args, **named)

                setattr(owner, name, wrapper)

    class Layer(Theirs, nn.Module):
        def __init__(self, hidden_size, eps=1e-6, dtype=torch.bfloat16):
            super().__init__()
            self.variance_epsilon, self.variance_size_override = eps, None
            self.weight = nn.Parameter(torch.rand(hidden_size, dtype=dtype))

        def forward(self, *args, **named):
            return self.forward_cuda(*args, **named)

    RMSNorm, GemmaRMSNorm = type("RMSNorm", (Layer,), {}), type("GemmaRMSNorm", (Layer,), {})
    module(monkeypatch, "sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=kinds)
    layers = module(monkeypatch, "sglang.srt.layers.layernorm", RMSNorm=RMSNorm, GemmaRMSNorm=GemmaRMSNorm)
    layers.apply = HookRegistry.apply_hooks
    return layers


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", ["RMSNorm", "GemmaRMSNorm"])
def test_sglang_layers_run_on_flashnorm(name, residual, sglang, calls, device):
    sglang_plugin.register()
    sglang.apply()
    layer = getattr(sglang, name)(H, 1e-5).to(device)
    x, r = rows(device), rows(device, seed=1) if residual else None
    before = x.clone()
    got = layer(x, r)
    family = "gemma_" if name == "GemmaRMSNorm" else ""
    assert calls == [(f"{family}fused_add_rmsnorm" if residual else f"{family}rmsnorm", "flashinfer")]
    if residual:
        assert got[0] is x and got[1] is r and not torch.equal(x, before)
    else:
        assert torch.equal(
            got, getattr(flashnorm, f"{family}rmsnorm")(x, layer.weight.data, 1e-5, numerics="flashinfer")
        )
        assert torch.equal(x, before)


def test_sglang_keeps_what_flashnorm_does_not_compute(sglang, calls, device):
    sglang_plugin.register()
    sglang.apply()
    layer, x = sglang.RMSNorm(H).to(device), rows(device)
    assert layer(x, None, post_residual_addition=x)[0] == "cuda"
    assert layer(x, x.clone(), None)[0] == "cuda"
    assert layer(x.double())[0] == "cuda"
    for name, value in (("variance_size_override", 64), ("cast_x_before_out_mul", True), ("fp32_residual", True)):
        other = sglang.RMSNorm(H).to(device)
        setattr(other, name, value)
        assert other(x)[0] == "cuda"
    for name in ("RMSNorm", "GemmaRMSNorm"):
        for given in refused_with_a_residual(x):
            assert getattr(sglang, name)(H).to(device)(*given)[0] == "cuda"
        for given in refused_by_flashnorm(other := getattr(sglang, name)(H).to(device), x):
            assert other(given)[0] == "cuda"
    assert calls == []
    layer(x, None, post_residual_addition=None)
    assert len(calls) == 1


def test_sglang_without_hooks_is_left_alone(caplog):
    with caplog.at_level(logging.WARNING, logger="flashnorm"):
        sglang_plugin.register()
    assert "SGLang has no hooks" in caplog.text


# ------------------------------------------------------------------ how the engines find them
def test_entry_points_lead_to_functions():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    points = {name: project["entry-points"][name] for name in ("vllm.general_plugins", "sglang.srt.plugins")}
    for group in points.values():
        where, _, name = group["flashnorm"].partition(":")
        assert callable(getattr(importlib.import_module(where), name))
