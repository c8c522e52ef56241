"""Threads, processes and devices: first calls at once, a fork, two architectures, memory over many calls."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import flashnorm
from benchmarks.measure import resident
from flashnorm import backends
from flashnorm.core import commands, dispatch, plan
from flashnorm.core.device import DeviceFacts
from flashnorm.core.op import ALL
from flashnorm.ops.rmsnorm import FUSED_ADD_RMSNORM, RMSNORM

SHAPES = ((1, 64), (3, 64), (7, 128), (64, 1000), (2, 3, 256), (5, 4096), (2, 8193), (33, 77))
THREADS = 16


@pytest.fixture
def cold(monkeypatch):
    """No call is warm, no kernel is loaded."""
    for op in ALL.values():
        op.forget()
    monkeypatch.setattr(plan, "_launches", {})
    monkeypatch.setattr(plan, "_failed", {})
    monkeypatch.setattr(plan, "_said", set())
    yield
    for op in ALL.values():
        op.forget()


def together(work, count=THREADS):
    """Runs work(i) in as many threads, which start at once; returns what they returned, or raises what one raised."""
    results, errors, start = [None] * count, [], threading.Barrier(count)

    def run(i):
        start.wait()
        try:
            results[i] = work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
    return results


def inputs(shape, device):
    generator = torch.Generator().manual_seed(sum(shape))
    x, residual, w = (torch.randn(s, generator=generator).to(torch.bfloat16) for s in (shape, shape, shape[-1:]))
    return x.to(device), residual.to(device), w.to(device)


# ------------------------------------------------------------------ threads
def test_sixteen_threads_make_their_first_calls_at_once(cold, route, device):
    """Each in its own order of shapes: the same bits as one thread after another."""
    given = {shape: inputs(shape, device) for shape in SHAPES}

    def call(shape):
        x, residual, w = given[shape]
        x, residual, y = x.clone(), residual.clone(), flashnorm.rmsnorm(x, w)
        flashnorm.fused_add_rmsnorm(x, residual, w)
        return y, x, residual

    def work(i):
        with flashnorm.backend(route):
            order = [SHAPES[(i + k) % len(SHAPES)] for k in range(len(SHAPES))]
            return {shape: call(shape) for _ in range(3) for shape in order}

    found = together(work)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for shape in SHAPES:
        RMSNORM.forget()
        FUSED_ADD_RMSNORM.forget()
        with flashnorm.backend(route):
            want = call(shape)
        for results in found:
            assert all(torch.equal(a, b) for a, b in zip(results[shape], want, strict=True)), shape


def test_a_kernel_is_built_once_however_many_ask(cold, monkeypatch):
    built = []

    def builder(route):
        def build(variant, target):
            built.append((route, target, variant))
            time.sleep(0.05)  # long enough for all to ask
            return lambda *_: None

        return build

    monkeypatch.setattr(backends, "builder", builder)
    variants = [commands.plain_variant(RMSNORM, torch.bfloat16, hidden, {}) for hidden in (64, 128)]
    launches = together(lambda i: plan._kernel("cpu", "host", variants[i % 2], torch.device("cpu")))
    assert len(built) == 2
    assert len(set(map(id, launches))) == 2


def test_a_forced_route_is_a_threads_own(cold):
    x, _, w = inputs((4, 64), "cpu")

    def work(i):
        with flashnorm.backend("torch" if i % 2 else "cpu"):
            return [flashnorm.explain("rmsnorm", x, w).route for _ in range(50)]

    for i, seen in enumerate(together(work)):
        assert set(seen) == {"torch" if i % 2 else "cpu"}
    assert dispatch.forced_here() is None


# ------------------------------------------------------------------ processes
FORK = """
import os, sys, torch
import flashnorm

def call():
    x = torch.arange(256.0).view(4, 64)
    return flashnorm.rmsnorm(x, x[0] + 1)

before = call() if "called" in sys.argv else None
child = os.fork()
if child == 0:
    try:
        after = call()
        os._exit(0 if before is None or torch.equal(after, before) else 3)
    except BaseException:
        os._exit(4)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert before is None or torch.equal(call(), before)
call()
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.cpu_only
@pytest.mark.parametrize("when", ["imported", "called"])
def test_a_fork_after(when):
    """The child makes its own calls, warm or not; the parent goes on."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", FORK, when], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"


# ------------------------------------------------------------------ two devices
HOPPER, BLACKWELL, NEXT = (DeviceFacts("cuda", c) for c in ((9, 0), (12, 0), (10, 7)))


@pytest.fixture
def machine(cold, monkeypatch):
    """Tools that build for anything, but for a DSL that knows no sm_107a; what was built, and what must fail."""
    archs = frozenset({"sm_90", "sm_90a", "sm_120", "sm_120a"})
    have = dispatch.Tools(dsl=None, dsl_archs=archs, nvcc=None, cxx=None)
    monkeypatch.setattr(plan, "tools", lambda: have)
    monkeypatch.setattr(plan, "_there", lambda *_: False)
    built, broken = [], set()

    def builder(route):
        def build(variant, target):
            built.append((route, target))
            if (route, target) in broken:
                raise RuntimeError(f"{route} does not build for {target}")
            return lambda *_: (route, target)

        return build

    monkeypatch.setattr(backends, "builder", builder)
    return built, broken


def serve(facts, index):
    variant = commands.plain_variant(RMSNORM, torch.bfloat16, 4096, {})
    explanation, launch = plan._serve(RMSNORM, variant, facts, torch.device("cuda", index))
    return explanation.route, launch()


def test_two_architectures_in_one_process(machine):
    built, _ = machine
    for _ in range(3):
        assert serve(HOPPER, 0) == ("cute", ("cute", "sm_90a"))
        assert serve(BLACKWELL, 1) == ("cute", ("cute", "sm_120a"))
    assert built == [("cute", "sm_90a"), ("cute", "sm_120a")]


def test_a_device_that_the_dsl_cannot_target_beside_one_that_it_can(machine, caplog):
    built, _ = machine
    for _ in range(2):
        assert serve(NEXT, 1) == ("cuda", ("cuda", "sm_107a"))
        assert serve(HOPPER, 0) == ("cute", ("cute", "sm_90a"))
    assert built == [("cuda", "sm_107a"), ("cute", "sm_90a")]
    assert len(caplog.records) == 1 and "sm_107" in caplog.text


def test_a_failure_on_one_device_is_not_one_of_the_other(machine):
    built, broken = machine
    broken.add(("cute", "sm_120a"))
    for _ in range(2):
        assert serve(BLACKWELL, 1) == ("cuda", ("cuda", "sm_120a"))
        assert serve(HOPPER, 0) == ("cute", ("cute", "sm_90a"))
    assert built == [("cute", "sm_120a"), ("cuda", "sm_120a"), ("cute", "sm_90a")]


# ------------------------------------------------------------------ memory
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.cpu_only
@pytest.mark.parametrize("given", [True, False], ids=["out", "new"])
def test_memory_is_flat_over_many_calls(given):
    """200,000 calls over eight sizes, after as many as fill every pool."""
    x, w = torch.randn(8, 64), torch.randn(64)
    calls = [(x[:rows], torch.empty(rows, 64) if given else None) for rows in range(1, 9)]

    def many(count):
        for _ in range(count // len(calls)):
            for rows, out in calls:
                flashnorm.rmsnorm(rows, w, out=out)

    many(20_000)
    gc.collect()
    before, objects = resident(), len(gc.get_objects())
    many(200_000)
    gc.collect()
    assert resident() - before < 4 << 20
    assert len(gc.get_objects()) - objects < 100


@pytest.mark.cpu_only
def test_what_is_remembered_is_bounded():
    """New sizes for ever: the warm path forgets all when it has too many."""
    from flashnorm.core import fastpath

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastpath, "MAX_SIZES", 50)
        RMSNORM.forget()
        w = torch.randn(8)
        for rows in range(1, 200):
            flashnorm.rmsnorm(torch.randn(rows, 8), w)
        assert len(RMSNORM._warm_calls) <= 50
        RMSNORM.forget()
