"""What happens when a route cannot be had: the next one serves, once logged; strict mode and forcing raise."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

import flashnorm
from flashnorm import backends
from flashnorm.backends import cpu
from flashnorm.core import device as devices
from flashnorm.core import dispatch, plan
from flashnorm.core.op import OPS
from flashnorm.jit.store import Store


@pytest.fixture
def fresh(monkeypatch):
    """No plan, kernel or failure remembered, before and after."""
    monkeypatch.setattr(plan, "_launches", {})
    monkeypatch.setattr(cpu, "_loaded", cpu._loaded.__wrapped__)  # which another test may have filled
    monkeypatch.setattr(plan, "_failed", {})
    monkeypatch.setattr(plan, "_said", set())
    monkeypatch.setattr(plan, "_there", lambda route, target, variant: False)  # whatever this machine's cache holds
    for op in OPS.values():
        op.forget()
    yield monkeypatch
    for op in OPS.values():
        op.forget()


def tensors():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(3, 48, generator=generator).bfloat16(), torch.randn(48, generator=generator).bfloat16()


def failing(calls):
    def builder(route):
        def build(variant, target):
            calls.append((route, target))
            raise OSError("no space left on device")

        return build

    return builder


def test_a_failed_build_is_skipped_for_the_process_and_logged_once(fresh, caplog):
    calls = []
    fresh.setattr(backends, "builder", failing(calls))
    fresh.setattr(plan, "tools", lambda: dispatch.Tools(None, frozenset(), None, None))
    x, weight = tensors()
    with caplog.at_level(logging.WARNING, logger="flashnorm"):
        got = [flashnorm.rmsnorm(x, weight) for _ in range(3)]
        flashnorm.rmsnorm(x[:2], weight)
    with flashnorm.backend("torch"):
        want = flashnorm.rmsnorm(x, weight)
    assert all(torch.equal(y, want) for y in got)
    assert calls == [("cpu", "host")]
    assert [r.message for r in caplog.records] == [
        "rmsnorm: torch route in place of cpu: failed to build: no space left on device"
    ]


def test_strict_mode_raises_the_build_error(fresh):
    fresh.setattr(backends, "builder", failing([]))
    fresh.setattr(plan, "tools", lambda: dispatch.Tools(None, frozenset(), None, None))
    fresh.setattr(plan, "settings", dataclasses.replace(plan.settings, strict=True))
    with pytest.raises(OSError, match="no space left"):
        flashnorm.rmsnorm(*tensors())


def test_strict_mode_forbids_a_fallback(fresh):
    fresh.setattr(plan, "tools", lambda: dispatch.Tools(None, frozenset(), None, "no compiler here"))
    fresh.setattr(plan, "settings", dataclasses.replace(plan.settings, strict=True))
    with pytest.raises(RuntimeError, match="torch route in place of cpu: no compiler here"):
        flashnorm.rmsnorm(*tensors())


def test_a_forced_route_that_cannot_serve_raises_with_the_reason(fresh):
    fresh.setattr(plan, "tools", lambda: dispatch.Tools(None, frozenset(), None, "no compiler here"))
    with flashnorm.backend("cpu"), pytest.raises(ValueError, match="forced but cannot serve: cpu: no compiler"):
        flashnorm.rmsnorm(*tensors())


def test_cuda_tensors_that_no_gpu_route_serves_raise_with_both_reasons(fresh):
    fresh.setattr(plan, "tools", lambda: dispatch.Tools("no DSL", frozenset(), "no nvcc", None))
    fresh.setattr(devices, "facts", lambda _: devices.DeviceFacts("cuda", (9, 0)))
    with pytest.raises(RuntimeError, match="no route for cuda tensors; cute: no DSL; cuda: no nvcc"):
        flashnorm.rmsnorm(*tensors())


def test_an_unknown_backend_variable_raises_at_the_first_call(fresh):
    fresh.setattr(plan, "settings", dataclasses.replace(plan.settings, backend="triton"))
    with pytest.raises(ValueError, match="FLASHNORM_BACKEND must be one of"):
        flashnorm.rmsnorm(*tensors())


def test_a_cold_call_inside_capture_says_so_and_is_not_remembered_as_a_failure(fresh):
    fresh.setattr(plan, "tools", lambda: dispatch.Tools(None, frozenset({"sm_90a"}), None, None))
    fresh.setattr(devices, "capturing", lambda: True)
    variant, _ = plan.normalise(
        OPS["rmsnorm"],
        OPS["rmsnorm"].program(frozenset({"x", "weight", "out"}), {"numerics": "flashinfer"}),
        (*tensors(), torch.empty(3, 48, dtype=torch.bfloat16), None),
    )
    with pytest.raises(RuntimeError, match="inside a CUDA graph capture"):
        plan._kernel("cute", "sm_90a", variant, torch.device("cuda", 0))
    assert not plan._failed


def test_the_backend_context_holds_for_warm_calls(fresh):
    x, weight = tensors()
    used = []

    def builder(route):
        def build(variant, target):
            def launch(*args):
                used.append(route)

            return launch

        return build

    fresh.setattr(backends, "builder", builder)
    fresh.setattr(plan, "tools", lambda: dispatch.Tools(None, frozenset(), None, None))
    for _ in range(2):
        flashnorm.rmsnorm(x, weight)
        with flashnorm.backend("torch"):
            flashnorm.rmsnorm(x, weight)
    assert used == ["cpu", "cpu"]


def test_a_kernel_that_may_not_be_built_is_one_line_with_the_command_first(fresh, caplog):
    fresh.setattr("flashnorm.jit.store.default_store", lambda: Store(None, disabled=True))
    fresh.setattr(plan, "tools", lambda: dispatch.Tools(None, frozenset(), None, None))
    x, weight = tensors()
    with caplog.at_level(logging.WARNING, logger="flashnorm"):
        flashnorm.rmsnorm(x, weight)
    (said,) = (record.message for record in caplog.records if record.message.startswith("rmsnorm: "))
    command = "flashnorm precompile --arch host --ops rmsnorm --dtype bf16 --hidden 48 --numerics flashinfer --out DIR"
    assert said.startswith(f"rmsnorm: torch route in place of cpu: `{command}` makes its kernel")
    assert len(said.splitlines()) == 1 and len(said) < 500
