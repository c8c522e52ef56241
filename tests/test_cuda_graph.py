"""CUDA graphs, streams and devices: what only a GPU can show (`--device cuda`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashnorm
from tests.combos import COMBOS, DYNAMIC, FP4, MXFP8, SILU, USUAL
from tests.problem import Problem, public_names
from tests.tolerance import assert_same_bits

ROUTES = ("cute", "cuda")
CAPTURED = (
    *[replace(c, rstd=False) for c in USUAL],  # rstd is always new
    next(c for c in COMBOS if c.op == DYNAMIC and c.x == "bf16" and c.residual == "bf16" and c.side),
    next(c for c in COMBOS if c.op == DYNAMIC and c.cap == "device"),
    next(c for c in COMBOS if c.op == "rmsnorm" and c.index and c.x == "bf16"),
    next(c for c in COMBOS if c.op == "rmsnorm_quant" and c.x == "i8"),
    next(c for c in COMBOS if c.scaled and c.scale == "f32"),
    next(c for c in COMBOS if c.op in MXFP8 and c.placed == "swizzled"),
    *[c for c in COMBOS if c.op == SILU and c.x == "bf16" and c.out],
)


@pytest.fixture(autouse=True)
def gpu(device):
    if torch.device(device).type != "cuda":
        pytest.skip("needs --device cuda")


def problem(m=5, hidden=4096, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(m, hidden, generator=generator).bfloat16().cuda() for _ in range(2))
    return x, residual, torch.randn(hidden, generator=generator).bfloat16().cuda()


@pytest.mark.parametrize("gpu_route", ROUTES)
@pytest.mark.parametrize("pdl", [True, False])
def test_a_replay_gives_eager_bits_on_new_data(gpu_route, pdl):
    x, residual, weight = problem()
    out = torch.empty_like(x)
    with flashnorm.backend(gpu_route), torch.no_grad():
        flashnorm.rmsnorm(x, weight, out=out)
        flashnorm.fused_add_rmsnorm(x.clone(), residual.clone(), weight)
        graph, h, r = torch.cuda.CUDAGraph(), x.clone(), residual.clone()
        with torch.cuda.graph(graph):
            for _ in range(3):  # a chain, so that a launch that starts before the one in front is done would show
                flashnorm.fused_add_rmsnorm(h, r, weight, enable_pdl=pdl)
                flashnorm.rmsnorm(h, weight, out=out, enable_pdl=pdl)
                h.copy_(out)
        for seed in (1, 2):
            x, residual, weight_new = problem(seed=seed)
            weight.copy_(weight_new)  # just written by the kernel in front
            h.copy_(x)
            r.copy_(residual)
            graph.replay()
            want_h, want_r, want = x.clone(), residual.clone(), torch.empty_like(x)
            for _ in range(3):
                flashnorm.fused_add_rmsnorm(want_h, want_r, weight, enable_pdl=False)
                flashnorm.rmsnorm(want_h, weight, out=want, enable_pdl=False)
                want_h.copy_(want)
            assert torch.equal(out, want) and torch.equal(r, want_r)


@pytest.mark.parametrize("gpu_route", ROUTES)
def test_a_warm_kernel_takes_a_new_shape_inside_capture(gpu_route):
    # a new M is a new plan, but no new kernel
    x, _, weight = problem(m=3, hidden=2048)
    with flashnorm.backend(gpu_route), torch.no_grad():
        flashnorm.rmsnorm(x, weight)
        y, _, _ = problem(m=700, hidden=2048, seed=4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flashnorm.rmsnorm(y, weight)
        graph.replay()
        assert torch.equal(out, flashnorm.rmsnorm(y, weight))


@pytest.mark.parametrize("gpu_route", ROUTES)
def test_a_cold_call_inside_capture_raises_one_clear_line(gpu_route):
    x = torch.randn(2, 1000 + len(gpu_route), device="cuda", dtype=torch.float16)  # a variant no other test uses
    weight = torch.ones(x.shape[-1], device="cuda", dtype=torch.float32)
    graph = torch.cuda.CUDAGraph()
    with flashnorm.backend(gpu_route), torch.no_grad():
        with pytest.raises(RuntimeError, match="inside a CUDA graph capture"), torch.cuda.graph(graph):
            flashnorm.rmsnorm(x, weight, numerics="hf-llama")
        torch.cuda.synchronize()
        flashnorm.rmsnorm(x, weight, numerics="hf-llama")  # and the process goes on


@pytest.mark.parametrize("gpu_route", ROUTES)
def test_the_current_stream_is_used(gpu_route):
    x, _, weight = problem(m=4096)
    with flashnorm.backend(gpu_route), torch.no_grad():
        want = flashnorm.rmsnorm(x * 2, weight)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(20):  # work in front, on this stream alone
                torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda")
            got = flashnorm.rmsnorm(x * 2, weight)
        side.synchronize()
        assert torch.equal(got, want)


@pytest.mark.parametrize("gpu_route", ROUTES)
def test_tensors_on_another_device_than_the_current_one(gpu_route):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, _, weight = problem()
    with flashnorm.backend(gpu_route), torch.no_grad():
        want = flashnorm.rmsnorm(x, weight)
        for current, where in ((0, 1), (1, 0)):
            with torch.cuda.device(current):
                for _ in range(2):
                    got = flashnorm.rmsnorm(x.to(f"cuda:{where}"), weight.to(f"cuda:{where}"))
                    assert got.device.index == where and torch.equal(got.cpu(), want.cpu())
                    assert torch.cuda.current_device() == current


# ------------------------------------------------------------------ every operator
@pytest.mark.parametrize("gpu_route", ROUTES)
@pytest.mark.parametrize("combo", CAPTURED, ids=str)
def test_every_operator_is_captured_without_a_copy_or_an_allocation(combo, gpu_route, device):
    """A number as a scale goes with the launch: nothing is copied to the device, and replays allocate nothing."""
    problem = Problem(combo, (7, 512), device)
    want, call = problem.run(gpu_route), problem.prepare("none" if combo.in_place else "contiguous")
    function = getattr(flashnorm, combo.op)
    kept = {name: value.clone() for name, value in call.arguments.items() if isinstance(value, torch.Tensor)}
    with flashnorm.backend(gpu_route):
        function(**call.arguments)  # warm: every buffer is given
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with torch.cuda.graph(graph):
            inside = torch.cuda.memory_stats()["allocation.all.allocated"]
            result = function(**call.arguments)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == inside, "allocated in capture"
        assert inside >= before
        for _ in range(2):
            for name, value in kept.items():
                call.arguments[name].copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            got = call.outcome(result, f"{combo} replayed on {gpu_route}")
            for name in ("out", "residual", "rstd", "scale", "normed_out"):
                if getattr(want, name) is not None:
                    assert_same_bits(getattr(got, name), getattr(want, name), name)


@pytest.mark.parametrize("gpu_route", ROUTES)
@pytest.mark.parametrize("combo", [c for c in CAPTURED if c.scale == "value"], ids=str)
def test_a_scale_on_the_device_is_read_at_each_replay(combo, gpu_route, device):
    problem = Problem(combo, (7, 512), device)
    call = problem.prepare("contiguous")
    name = "global_scale" if combo.op in FP4 else "scale"
    scale = call.arguments[name] = torch.ones(1, device=device)
    function = getattr(flashnorm, combo.op)
    kept = {name: value.clone() for name, value in call.arguments.items() if isinstance(value, torch.Tensor)}
    with flashnorm.backend(gpu_route):
        function(**call.arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function(**call.arguments)
        for value in (0.5, 0.03, 2.0):
            for name, tensor in kept.items():
                call.arguments[name].copy_(tensor)
            scale.fill_(value)
            graph.replay()
            want = Problem(combo, (7, 512), scale=value).canonical()
            out = call.arguments[public_names(combo).get("out", "out")]
            assert_same_bits(out.view(want.out.dtype), want.out, f"scale {value}")
