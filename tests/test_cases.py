"""Faults that users of norm kernels have met elsewhere, each with its right value."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashnorm
from tests.buffers import Guarded, from_tiles, padded
from tests.combos import BF16, BLOCKED, COMBOS, E2M1, USUAL, Combo, fitting
from tests.inputs import gains, rows
from tests.judge import judge
from tests.problem import SCALE_DTYPES, Problem, public_names
from tests.tolerance import assert_near, assert_same_bits, same_bits, steps_between

every_combo = pytest.mark.parametrize("combo", USUAL, ids=str)


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


def check_some_rows(
    combo: Combo,
    route: str,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    places: list[tuple[int, ...]],
    outputs: dict[str, torch.Tensor],
) -> None:
    """Calls with large tensors and compares some rows of everything that is written."""
    h, device = x.shape[-1], x.device

    def some(tensor: torch.Tensor) -> torch.Tensor:
        bare = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        return torch.stack([bare[place] for place in places]).cpu().view(tensor.dtype)

    picked = {"x": some(x), "residual": None if residual is None else some(residual)}
    problem = Problem(combo, (len(places), h), device, **picked)  # type: ignore[arg-type]
    call = problem.prepare()
    names = public_names(combo)
    call.arguments |= {"input": x} | {names.get(name, name): tensor for name, tensor in outputs.items()}
    call.arguments |= {} if residual is None else {"residual": residual}
    count, blocks = x[..., 0].numel(), -(-h // (combo.block_size or h))
    if combo.op == BLOCKED:
        call.arguments["block_scale"] = torch.full((blocks, padded(count)), torch.nan, device=device)
    with flashnorm.backend(route):
        left = call.left(getattr(flashnorm, combo.op)(**call.arguments))
    if combo.makes_scales:
        scale = left["scale"].t()[:count] if combo.op == BLOCKED else left["scale"]
        scale = scale if combo.placed == "rows" else from_tiles(scale, count, blocks, str(combo))
        left["scale"] = scale.reshape(*x.shape[:-1], blocks)
    if "scale_rows" in left:
        both = [t.cpu().view(torch.uint8) for t in (left.pop("scale_rows"), left["scale"])]
        assert torch.equal(*both), f"{combo}: the two layouts hold other scales"
    left["out"] = left["out"].view(combo.out_dtype)
    want, compare = problem.canonical(), assert_near if problem.near else assert_same_bits
    for name, tensor in left.items():
        compare(some(tensor), getattr(want, name), f"{combo}: {name} of rows {places}")


def zeros(combo: Combo, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A new result; pairs of codes as bytes."""
    pairs = combo.out_dtype == E2M1
    *lead, h = shape
    dtype = torch.uint8 if pairs else combo.out_dtype
    return torch.zeros(*lead, h // 2 if pairs else h, dtype=dtype, device=device)


@pytest.mark.large
@every_combo
def test_row_times_hidden_beyond_32_bits(combo: Combo, exact_route: str, device: torch.device) -> None:
    """Contiguous fp16 (175000, 12288): the element index wraps from row 174763 on."""
    m, h = 175_000, 12_288
    combo = replace(combo, x="f16", weight="f16", residual=combo.residual and "f16", rstd=False)
    x = spread_out((m, h), torch.float16, device)
    residual = None if combo.residual is None else torch.empty_like(x).copy_(x.flip(0))
    new = {} if combo.in_place else {"out": zeros(combo, (m, h), device)}
    if combo.side:
        new["normed_out"] = torch.full_like(x, torch.nan)
    picked = [0, 1, 87_381, 87_382, 174_761, 174_762, 174_763, 174_764, m - 2, m - 1]
    check_some_rows(combo, exact_route, x, residual, [(p,) for p in picked], new)
    for name, tensor in new.items():
        written = tensor[::97].view(torch.uint8) if combo.makes_codes and name == "out" else ~tensor[::97].isnan()
        assert bool(written.any(-1).all()), f"{name}: a row was never written"


@pytest.mark.large
@every_combo
def test_strided_view_beyond_32_bits(combo: Combo, exact_route: str, device: torch.device) -> None:
    """A bf16 view `buf[:, :, :5120]` of (2, 139811, 15360), and its right half left alone."""
    buffer = spread_out((2, 139_811, 15_360), torch.bfloat16, device)
    x, middle, residual = buffer[:, :, :5120], buffer[:, :, 5120:10_240], None
    combo = replace(combo, rstd=False)
    places: list[tuple[int, ...]] = [(0, 0), (0, 139_810), (1, 0), (1, 1), (1, 69_905), (1, 139_809), (1, 139_810)]
    kept = torch.stack([middle[p] for p in places]).cpu()
    new = {}
    if combo.residual is not None:
        residual = buffer[:, :, 10_240:]
    if combo.may_alias:
        new["out"] = x
    elif not combo.in_place:
        wide = zeros(combo, (2, 139_811, 15_360), device)
        new["out"] = wide[:, :, : wide.shape[-1] // 3]
    if combo.side:
        new["normed_out"] = torch.zeros_like(buffer)[:, :, 10_240:]
    check_some_rows(combo, exact_route, x, residual, places, new)
    assert_same_bits(torch.stack([middle[p] for p in places]), kept, "columns beside the view")


@every_combo
def test_row_stride_beyond_32_bits(combo: Combo, route: str, device: torch.device) -> None:
    """Two rows 2^31 + 64 elements apart: 4 GB of address space, of which a CPU touches two pages."""
    h, apart = 128, 2**31 + 64
    problem = Problem(replace(combo, rstd=False), (2, h), device)
    want, call = problem.run(route), problem.prepare()

    def far(tensor: torch.Tensor) -> torch.Tensor:
        view = torch.empty(apart + h, dtype=tensor.dtype, device=device).as_strided((2, h), (apart, 1))
        return view.copy_(tensor)

    call.arguments["input"] = far(call.arguments["input"])
    if combo.makes_codes and call.arguments.get("out") is not None:
        call.arguments["out"] = far(call.arguments["out"])
    got = call(route)
    assert_same_bits(got.out, want.out, f"{combo}: rows {apart} elements apart")


# ------------------------------------------------------------------ hidden sizes
@pytest.mark.parametrize("h", [3584, 1440, 180, 192, 16384, 32768, 49152, 131072])
@pytest.mark.parametrize("combo", [BF16[0], BF16[2], *[c for c in USUAL if c.centred or c.makes_scales]], ids=str)
def test_hidden_sizes_that_failed(combo: Combo, h: int, route: str, device: torch.device) -> None:
    """Odd warp counts, partial warps and large shared memory: right, or loud; outputs start as NaN."""
    (h,) = fitting(combo, h)
    judge(Problem(combo, (3, h), device), route, "none" if combo.in_place else "contiguous")


# ------------------------------------------------------------------ empty
EMPTY = [(0, 128), (0, 8, 128), (4, 0, 128), (0, 0, 128), (2, 3, 0, 128)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("combo", (*USUAL, *[c for c in COMBOS if c.column or c.index or c.x == "i8"]), ids=str)
def test_empty(combo: Combo, shape: tuple[int, ...], route: str, device: torch.device) -> None:
    """Nothing is read or written, and everything has its shape: scales (0, blocks), or (blocks, 0)."""
    for out in ("none", "contiguous", "alias") if combo.may_alias else ("none", "contiguous"):
        got = Problem(combo, shape, device).run(route, out)
        assert got.out.shape == zeros(combo, shape, device).shape and got.out.dtype == combo.out_dtype
        if combo.rstd:
            assert got.rstd is not None and got.rstd.shape == shape[:-1] and got.rstd.dtype == torch.float32
        if combo.makes_scales:
            assert got.scale is not None and got.scale.shape[0] == 0 and got.scale.dtype == SCALE_DTYPES[combo.form]


def test_empty_with_a_weight_per_head(route: str, device: torch.device) -> None:
    for shape, weight_shape in (((0, 8, 128), (8, 128)), ((4, 0, 128), (4, 1, 128)), ((0, 128), (1, 128))):
        got = Problem(Combo("rmsnorm"), shape, device, weight_shape=weight_shape).run(route)
        assert got.out.shape == shape


# ------------------------------------------------------------------ dtypes
def test_dtypes_by_turns_in_one_process(exact_route: str, device: torch.device) -> None:
    """The same shape with other dtypes, one after another, twice: a cache key that lacks one runs the wrong kernel."""
    turns = [c for c in COMBOS if c.op in ("rmsnorm", "rmsnorm_quant") and c.numerics == "flashinfer"]
    for combo in (*turns, *reversed(turns)):
        problem = Problem(combo, (5, 4096), device)
        problem.check_bits(problem.run(exact_route), f"on {exact_route}")


def test_modes_by_turns_in_one_process(exact_route: str, device: torch.device) -> None:
    turns = [c for c in COMBOS if c.residual and {c.x, c.weight, c.residual} == {"bf16"}]
    assert len(turns) >= 5
    for combo in (*turns, *reversed(turns)):
        problem = Problem(combo, (5, 4096), device)
        problem.check_bits(problem.run(exact_route), f"on {exact_route}")


# ------------------------------------------------------------------ numerics
BARE = tuple(c for c in COMBOS if not (c.makes_codes or c.centred or c.once) and c.index is None)


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
@pytest.mark.parametrize("combo", [c for c in BARE if (c.x, c.weight) == ("f16", "f16")], ids=str)
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
        for i in range(20):
            calls = [problem.prepare("contiguous", enable_pdl=choice) for choice in (True, False)]
            left = []
            with flashnorm.backend(route):
                for call in calls:
                    name = "gemma" if combo.centred else "weight"
                    call.arguments[name].fill_(i + 0.5)
                    left.append(call.left(getattr(flashnorm, combo.op)(**call.arguments)))
            got, fresh = (written["out"] for written in left)
            assert_same_bits(got, fresh, f"weight written just before, turn {i}")


@pytest.mark.gpu
@every_combo
def test_side_stream(combo: Combo, route: str, device: torch.device) -> None:
    """The launch is on the current stream: it waits for what that stream does before."""
    problem = Problem(combo, (256, 4096), device)
    want, call = problem.run(route), problem.prepare()
    early = call.arguments["input"].clone()
    call.arguments["input"].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), flashnorm.backend(route):
        torch.cuda._sleep(20_000_000)
        call.arguments["input"].copy_(early)
        left = call.left(getattr(flashnorm, combo.op)(**call.arguments))
    stream.synchronize()
    assert_same_bits(left["out"], want.out, "on a side stream")


@pytest.mark.gpu
def test_another_device_is_current(exact_route: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for there, current in (("cuda:1", 0), ("cuda:0", 1)):
        for combo in USUAL:
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
    problems = [Problem(combo, (7, 4096), device, seed=seed) for seed in ("first", "second")]
    calls = [problem.prepare() for problem in problems]
    function = getattr(flashnorm, combo.op)
    with flashnorm.backend(route):
        results = [call.left(function(**call.arguments)) for call in calls]
        again = [call.left(function(**call.arguments)) for call in calls] if combo.residual is None else results
    for problem, call, result, later in zip(problems, calls, results, again, strict=True):
        want = problem.run(route)
        for name, tensor in result.items():
            if name in ("scale", "scale_rows"):
                seen = problem.unpadded(tensor, name) if name == "scale" else problem.by_rows(tensor)
                assert want.scale is not None
                assert_same_bits(seen.cpu(), want.scale, f"an earlier {name}")
            else:
                assert_same_bits(tensor, getattr(want, name), f"an earlier {name}")
            given = any(tensor is value for value in call.arguments.values())
            assert given or later is result or tensor.data_ptr() != later[name].data_ptr()


@pytest.mark.parametrize("combo", [c for c in USUAL if c.residual], ids=str)
def test_a_clone_is_another_tensor(combo: Combo, route: str, device: torch.device) -> None:
    """`y = x.clone(); fused_add(y, x)`."""
    x = rows((7, 4096), torch.bfloat16)
    problem = Problem(combo, (7, 4096), device, x=x, residual=x.clone())
    want, call = problem.run(route), problem.prepare()
    live = x.clone().to(device)
    call.arguments |= {"input": live.clone(), "residual": live}
    got = call(route)
    assert want.residual is not None
    assert_same_bits(got.out, want.out, "out")
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
