"""Faults that users of norm kernels have met elsewhere, each with its right value."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashnorm
from tests.canonical import rmsnorm_bits
from tests.combos import BF16, COMBOS, FUSED, PLAIN, Combo
from tests.inputs import Guarded, Problem, gains, rows
from tests.test_layouts import judge
from tests.tolerance import assert_same_bits, same_bits, steps_between

PLAIN_BF16 = [c for c in BF16 if c.op in PLAIN]
every_combo = pytest.mark.parametrize("combo", BF16, ids=str)


# ------------------------------------------------------------------ index width
def spread_out(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of gigabytes with cheap contents: one block of rows repeated, each row scaled by its index."""
    block = rows((1024, shape[-1]), dtype).to(device)
    big = torch.empty(shape, dtype=dtype, device=device)
    flat = big.view(-1, shape[-1])
    for start in range(0, flat.shape[0], 1024):
        part = flat[start : start + 1024]
        part.copy_(block[: part.shape[0]] * (1 + start // 1024 % 7))
    return big


@pytest.mark.large
@every_combo
def test_row_times_hidden_beyond_32_bits(combo: Combo, exact_route: str, device: torch.device) -> None:
    """Contiguous fp16 (175000, 12288): the element index wraps from row 174763 on."""
    m, h = 175_000, 12_288
    x = spread_out((m, h), torch.float16, device)
    weight = gains((h,), torch.float16).to(device)
    picked = [0, 1, 87_381, 87_382, 174_761, 174_762, 174_763, 174_764, m - 2, m - 1]
    picked_x = x[picked].cpu()
    picked_r = None
    with flashnorm.backend(exact_route):
        if combo.op in FUSED:
            residual = torch.empty_like(x).copy_(x.flip(0))
            picked_r = residual[picked].cpu()
            getattr(flashnorm, combo.op)(x, residual, weight)
            out = x
        else:
            out = torch.full_like(x, float("nan"))
            getattr(flashnorm, combo.op)(x, weight, out=out)
    want = rmsnorm_bits(picked_x, weight.cpu(), picked_r, offset=combo.offset)
    assert_same_bits(out[picked], want.out, f"{combo}: rows {picked}")
    if want.residual is not None:
        assert_same_bits(residual[picked], want.residual, f"{combo}: residual rows {picked}")
    assert not bool(out[::97].isnan().any()), "a row was never written"


@pytest.mark.large
@every_combo
def test_strided_view_beyond_32_bits(combo: Combo, exact_route: str, device: torch.device) -> None:
    """A bf16 view `buf[:, :, :5120]` of (2, 139811, 15360), and its right half left alone."""
    buffer = spread_out((2, 139_811, 15_360), torch.bfloat16, device)
    x = buffer[:, :, :5120]
    weight = gains((5120,), torch.bfloat16).to(device)
    places = [(0, 0), (0, 139_810), (1, 0), (1, 1), (1, 69_905), (1, 139_809), (1, 139_810)]
    picked_x = torch.stack([x[p] for p in places]).cpu()
    right = torch.stack([buffer[(*p, slice(5120, None))] for p in places]).cpu()
    picked_r = None
    with flashnorm.backend(exact_route):
        if combo.op in FUSED:
            residual = buffer[:, :, 10_240:]
            picked_r = torch.stack([residual[p] for p in places]).cpu()
            right = right[:, :5120]
            getattr(flashnorm, combo.op)(x, residual, weight)
        else:
            getattr(flashnorm, combo.op)(x, weight, out=x)
    want = rmsnorm_bits(picked_x, weight.cpu(), picked_r, offset=combo.offset)
    assert_same_bits(torch.stack([x[p] for p in places]), want.out, f"{combo}: {places}")
    after = torch.stack([buffer[(*p, slice(5120, 10_240 if combo.op in FUSED else None))] for p in places])
    assert_same_bits(after, right, "columns beside the view")
    if want.residual is not None:
        assert_same_bits(torch.stack([residual[p] for p in places]), want.residual, f"{combo}: residual")


@every_combo
def test_row_stride_beyond_32_bits(combo: Combo, route: str, device: torch.device) -> None:
    """Two rows 2^31 + 64 elements apart: 4 GB of address space, of which a CPU touches two pages."""
    h, apart = 128, 2**31 + 64
    buffer = torch.empty(apart + h, dtype=torch.bfloat16, device=device)
    view = buffer.as_strided((2, h), (apart, 1))
    problem = Problem(combo, (2, h), device)
    view.copy_(problem.x)
    assert problem.weight is not None
    weight = problem.weight.to(device)
    want = problem.run(route)
    with flashnorm.backend(route):
        if problem.residual is not None:
            residual = problem.residual.clone().to(device)
            getattr(flashnorm, combo.op)(view, residual, weight)
        else:
            getattr(flashnorm, combo.op)(view, weight, out=view)
    assert_same_bits(view, want.out, f"{combo}: rows {apart} elements apart")


# ------------------------------------------------------------------ hidden sizes
@pytest.mark.parametrize("h", [3584, 1440, 180, 192, 16384, 32768, 49152, 131072])
@pytest.mark.parametrize("combo", [BF16[0], BF16[2]], ids=str)
def test_hidden_sizes_that_failed(combo: Combo, h: int, route: str, device: torch.device) -> None:
    """Odd warp counts, partial warps and large shared memory: right, or loud; outputs start as NaN."""
    judge(Problem(combo, (3, h), device), route, "contiguous" if combo.op in PLAIN else "none")


# ------------------------------------------------------------------ empty
EMPTY = [(0, 128), (0, 8, 128), (4, 0, 128), (0, 0, 128), (2, 3, 0, 128)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@every_combo
def test_empty(combo: Combo, shape: tuple[int, ...], route: str, device: torch.device) -> None:
    for out in ("none", "contiguous", "alias") if combo.op in PLAIN else ("none",):
        got = Problem(combo, shape, device).run(route, out)
        assert got.out.shape == shape and got.out.dtype == torch.bfloat16
        if combo.rstd:
            assert got.rstd is not None and got.rstd.shape == shape[:-1] and got.rstd.dtype == torch.float32


def test_empty_with_a_weight_per_head(route: str, device: torch.device) -> None:
    for shape, weight_shape in (((0, 8, 128), (8, 128)), ((4, 0, 128), (4, 1, 128)), ((0, 128), (1, 128))):
        got = Problem(Combo("rmsnorm"), shape, device, weight_shape=weight_shape).run(route)
        assert got.out.shape == shape


# ------------------------------------------------------------------ dtypes
def test_dtypes_by_turns_in_one_process(exact_route: str, device: torch.device) -> None:
    """The same shape with other dtypes, one after another, twice: a cache key that lacks one runs the wrong kernel."""
    turns = [c for c in COMBOS if c.op == "rmsnorm" and c.numerics == "flashinfer"]
    for combo in (*turns, *reversed(turns)):
        problem = Problem(combo, (5, 4096), device)
        problem.check_bits(problem.run(exact_route), f"on {exact_route}")


def test_modes_by_turns_in_one_process(exact_route: str, device: torch.device) -> None:
    turns = [c for c in COMBOS if c.op in FUSED and {c.x, c.weight, c.residual} == {"bf16"}]
    assert len(turns) >= 5
    for combo in (*turns, *reversed(turns)):
        problem = Problem(combo, (5, 4096), device)
        problem.check_bits(problem.run(exact_route), f"on {exact_route}")


# ------------------------------------------------------------------ numerics
def test_which_sum_is_normalised(route: str, device: torch.device) -> None:
    """x = 1.0, residual = 0.00396 in bf16: 1.0039673 unrounded, 1.0078125 in the residual."""
    x, residual = torch.zeros(1, 8), torch.zeros(1, 8)
    x[0, 0], residual[0, 0], x[0, 1] = 1.0, 0.00396, 1.0
    x, residual = x.to(torch.bfloat16), residual.to(torch.bfloat16)
    found = {}
    for mode in ("flashinfer", "hf-llama", "hf-gemma"):
        combo = Combo("fused_add_rmsnorm", "bf16", "bf16", "bf16", mode)
        weight = torch.full((8,), 1.5, dtype=torch.bfloat16)
        got = Problem(combo, (1, 8), device, x=x.clone(), residual=residual.clone(), weight=weight, eps=0.0).run(route)
        assert got.residual is not None and float(got.residual[0, 0]) == 1.0078125, mode
        found[mode] = got.out[0, :2].tolist()
    # bf16 has steps of 1/128 below 2 and of 1/64 from there on.
    # unrounded: rstd = sqrt(8 / (1.0039673^2 + 1)) = 1.9960370, n = 2.0039558, 1.9960370; times 1.5: 3.00593, 2.99406
    # rounded:   rstd = sqrt(8 / (1.0078125^2 + 1)) = 1.9922027, n = 2.0077668, 1.9922027; times 1.5: 3.01165, 2.98830
    #            and n rounded first: 2.0, 1.9921875; times 1.5: 3.0, 2.98828
    assert found == {"flashinfer": [3.0, 3.0], "hf-llama": [3.0, 2.984375], "hf-gemma": [3.015625, 2.984375]}


@pytest.mark.parametrize("residual", [False, True])
def test_gemma_adds_one_in_fp32(residual: bool, route: str, device: torch.device) -> None:
    """15.8125 gains 16.8125 and 0.00390625 gains 1.00390625: bf16 holds neither sum."""
    weight = torch.tensor([15.8125, 0.00390625] * 4, dtype=torch.bfloat16)
    combo = next(
        c
        for c in COMBOS
        if c.op == ("gemma_fused_add_rmsnorm" if residual else "gemma_rmsnorm")
        and (c.x, c.weight) == ("f32", "f16" if residual else "bf16")
    )
    weight = weight.to(torch.float16) if residual else weight
    x = torch.ones(1, 8)
    zero = torch.zeros(1, 8, dtype=torch.bfloat16) if residual else None
    got = Problem(combo, (1, 8), device, x=x, residual=zero, weight=weight, eps=0.0).run(route)
    assert got.out[0].tolist() == [16.8125, 1.00390625] * 4


@pytest.mark.parametrize("value", [256.0, 300.0, 65504.0, -65504.0])
@pytest.mark.parametrize("combo", [c for c in COMBOS if (c.x, c.weight) == ("f16", "f16")], ids=str)
def test_squares_that_overflow_fp16(combo: Combo, value: float, route: str, device: torch.device) -> None:
    x = torch.full((2, 4096), value, dtype=torch.float16)
    residual = None if combo.residual is None else torch.zeros(2, 4096, dtype=torch.float16)
    problem = Problem(combo, (2, 4096), device, x=x, residual=residual)
    got = problem.run(route)
    assert problem.weight is not None
    # every element is 1 before the gain, give or take an fp32 rounding, which tips a tie now and then
    want = ((problem.weight.float() + combo.offset) * (1 if value > 0 else -1)).to(torch.float16).expand(2, 4096)
    assert int(steps_between(got.out, want).max()) <= 1
    assert value not in (256.0, 300.0) or same_bits(got.out, want)
    if combo.rstd:
        assert got.rstd is not None
        assert got.rstd.tolist() == pytest.approx([1 / abs(value)] * 2, rel=1e-6)


def test_eps_is_not_held_in_16_bits(route: str, device: torch.device) -> None:
    """eps 1e-12 in fp16 is 0: a row of zeros would be NaN, a row of 2^-20 twice too large."""
    zero = torch.zeros(1, 64, dtype=torch.float16)
    small = torch.full((1, 64), 2.0**-20, dtype=torch.float16)  # mean square 9.1e-13, eps 1e-12
    combo = Combo("rmsnorm", "f16", "f16", rstd=True)
    one = torch.full((64,), 2.0, dtype=torch.float16)
    got = Problem(combo, (2, 64), device, x=torch.cat([zero, small]), weight=one, eps=1e-12).run(route)
    assert bool((got.out[0] == 0).all())
    assert got.rstd is not None
    assert got.rstd.tolist() == pytest.approx([1e6, (2.0**-40 + 1e-12) ** -0.5], rel=1e-6)
    assert float(got.out[1, 0]) == pytest.approx(2 * 2.0**-20 * (2.0**-40 + 1e-12) ** -0.5, rel=1e-3)


# ------------------------------------------------------------------ PDL, devices, streams
@every_combo
def test_pdl_changes_no_bit(combo: Combo, route: str, device: torch.device) -> None:
    """On, off and unset; the weight is written just before, which a wait in the wrong place would miss."""
    problem = Problem(combo, (64, 4096), device)
    want = problem.run(route, enable_pdl=False)
    for choice in (True, None, False):
        got = problem.run(route, enable_pdl=choice)
        assert_same_bits(got.out, want.out, f"enable_pdl={choice}")
    if device.type == "cuda" and problem.residual is None:
        x = problem.x.to(device)
        with flashnorm.backend(route):
            for i in range(20):
                weight = torch.full((4096,), float(i), device=device, dtype=torch.bfloat16) + 0.5
                got = getattr(flashnorm, combo.op)(x, weight, enable_pdl=True)
                fresh = getattr(flashnorm, combo.op)(x, weight, enable_pdl=False)
                assert_same_bits(got, fresh, f"weight written just before, turn {i}")


@pytest.mark.gpu
@every_combo
def test_side_stream(combo: Combo, route: str, device: torch.device) -> None:
    """The launch is on the current stream: it waits for what that stream does before."""
    problem = Problem(combo, (256, 4096), device)
    want = problem.run(route)
    arguments = {n: g.view.clone() for n, g in problem.arguments().items()}
    late = torch.zeros_like(arguments["input"])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), flashnorm.backend(route):
        torch.cuda._sleep(20_000_000)
        late.copy_(arguments["input"])
        result = getattr(flashnorm, combo.op)(**{**arguments, "input": late})
    stream.synchronize()
    assert_same_bits(late if result is None else result, want.out, "on a side stream")


@pytest.mark.gpu
def test_another_device_is_current(exact_route: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for there, current in (("cuda:1", 0), ("cuda:0", 1)):
        for combo in BF16:
            problem = Problem(combo, (7, 4096), torch.device(there))
            with torch.cuda.device(current):
                problem.check_bits(problem.run(exact_route), f"on {there} while {current} is current")


IMPORT = """
import os, sys, torch
before = set(sys.modules)
import flashnorm
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert not new & {"cutlass", "triton", "cuda", "ninja"}, new
child = os.fork()
if child == 0:
    x = torch.full((2, 64), 3.0)
    with flashnorm.backend("torch"):
        right = torch.equal(flashnorm.rmsnorm(x, x[0] * 0.5, 0.0), torch.full((2, 64), 1.5))
    os._exit(0 if right else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the call after a fork"
"""


def test_import_is_light() -> None:
    """Neither CUDA nor the DSL nor a build system comes with it, and a process may fork after it."""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ aliasing and buffers
@every_combo
def test_results_are_not_reused(combo: Combo, route: str, device: torch.device) -> None:
    """A later call must not overwrite the result of an earlier one."""
    first = Problem(combo, (7, 4096), device, seed="first")
    second = Problem(combo, (7, 4096), device, seed="second")
    arguments = [{n: g.view for n, g in p.arguments().items()} for p in (first, second)]
    function = getattr(flashnorm, combo.op)
    options = {"return_rstd": True} if combo.rstd else {}
    with flashnorm.backend(route):
        results = [function(**a, **options) for a in arguments]
        again = [function(**a, **options) for a in arguments] if combo.op in PLAIN else results
    for problem, argument, result, later in zip((first, second), arguments, results, again, strict=True):
        want = problem.run(route)
        kept = result if combo.op in PLAIN else (argument["input"], argument["residual"])
        if combo.op in PLAIN:
            pairs = zip(kept, (want.out, want.rstd), strict=True) if combo.rstd else [(kept, want.out)]
            spare = later if combo.rstd else (later,)
            for (tensor, right), other in zip(pairs, spare, strict=True):
                assert right is not None
                assert_same_bits(tensor, right, "an earlier result")
                assert tensor.data_ptr() != other.data_ptr()
        else:
            assert want.residual is not None
            assert_same_bits(kept[0], want.out, "input")
            assert_same_bits(kept[1], want.residual, "residual")


@pytest.mark.parametrize("combo", [c for c in BF16 if c.op in FUSED], ids=str)
def test_a_clone_is_another_tensor(combo: Combo, route: str, device: torch.device) -> None:
    """`y = x.clone(); fused_add(y, x)`."""
    x = rows((7, 4096), torch.bfloat16)
    problem = Problem(combo, (7, 4096), device, x=x, residual=x.clone())
    want = problem.run(route)
    live = x.clone().to(device)
    y = live.clone()
    assert problem.weight is not None
    with flashnorm.backend(route):
        getattr(flashnorm, combo.op)(y, live, problem.weight.to(device))
    assert want.residual is not None
    assert_same_bits(y, want.out, "input")
    assert_same_bits(live, want.residual, "residual")
    assert_same_bits(live, (x.float() * 2).to(torch.bfloat16), "x + x")


def test_out_of_another_tensor_is_untouched_elsewhere(route: str, device: torch.device) -> None:
    """One row of a large buffer: `out=big[3:4]`, from `big[5:6]`."""
    big = rows((8, 576), torch.bfloat16)
    guard = Guarded(big, device, written=True)
    weight = gains((576,), torch.bfloat16)
    want = Problem(Combo("rmsnorm"), (1, 576), device, x=big[5:6].clone(), weight=weight).run(route).out
    with flashnorm.backend(route):
        flashnorm.rmsnorm(guard.view[5:6], weight.to(device), out=guard.view[3:4])
    right = big.clone()
    right[3:4] = want
    assert_same_bits(guard.view, right, "the buffer")
    guard.check("the buffer")
