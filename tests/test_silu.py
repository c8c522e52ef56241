"""RMSNorm + SiLU: every 16-bit argument, the ends of the exponential, FP8 and NVFP4 results, forms of a call."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import flashnorm
from tests import canonical
from tests.canonical.quantise import nvfp4
from tests.combos import DTYPES, SILU, Combo
from tests.conftest import unserved
from tests.inputs import gains, rows
from tests.judge import judge
from tests.problem import Problem
from tests.test_codes import sent
from tests.tolerance import EXP_TO, EXP_ULPS, assert_near, assert_same_bits, steps_between

INF, NAN = math.inf, math.nan
F32 = Combo(SILU, "f32", "f32")


def of(values: torch.Tensor, route: str, device: torch.device) -> torch.Tensor:
    """SiLU of any fp32 numbers, by way of the weight."""
    return sent(F32, values, device).run(route).out[0]


def test_every_bf16_value(exact_route: str, device: torch.device) -> None:
    """All 65,536 of them, to the bit; and within 4 ulp of the formula in fp64 where the contract asks for it."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    problem = sent(F32, values, device)
    got = problem.run(exact_route)
    problem.check_bits(got, f"on {exact_route}")
    out, y = got.out[0].double(), values.double()
    assert error(out, y) <= EXP_ULPS


def sweeps() -> list[torch.Tensor]:
    """Numbers from the smallest to 80, densely, and a third of all significands at some sizes; of both signs."""
    magnitude = int(torch.tensor(EXP_TO).view(torch.int32))
    found = [torch.arange(0, magnitude, 257, dtype=torch.int32)]
    for size in (2.0**-126, 2.0**-24, 2.0**-23, 0.5, 1.0, 2.0, 8.0, 32.0):
        first = int(torch.tensor(size).view(torch.int32))
        found.append(torch.arange(first, min(first + (1 << 23), magnitude), 3, dtype=torch.int32))
    parts = [part.view(torch.float32) for bits in found for part in bits.split(1 << 22)]
    return [part * sign for part in parts for sign in (1.0, -1.0)]


def test_numbers_on_a_gpu(device: torch.device) -> None:
    """Rows in fp32 have the bits of the CPU; of 16-bit rows both routes are alike, a step from the formula at most."""
    if device.type != "cuda":
        pytest.skip("compares a GPU with the CPU")
    routes = [route for route in ("cute", "cuda") if not unserved(route, device.type)]
    assert routes
    elements = equal = 0
    for y in sweeps():
        want = active(y, "cpu")
        formula = (y.double() / (1 + torch.exp(-y.double()))).half()
        halves = []
        for route in routes:
            assert_same_bits(active(y.to(device), route), want, route)
            halves.append(active(y.to(device), route, torch.float16).cpu())
            assert_same_bits(halves[-1], halves[0], route)
        assert int(steps_between(halves[0], formula).max()) <= 1
        elements, equal = elements + y.numel(), equal + int((halves[0] == formula).sum())
    assert equal >= 0.999 * elements


def active(y: torch.Tensor, route: str, dtype: torch.dtype = torch.float32, hidden: int = 8192) -> torch.Tensor:
    """SiLU of fp32 numbers, in a dtype, by way of the weight: a row of ones has a norm of exactly 1 without an eps."""
    padded = torch.nn.functional.pad(y, (0, -y.numel() % hidden)).view(-1, hidden)
    one = torch.ones(1, hidden, device=y.device, dtype=dtype)
    with flashnorm.backend(route):
        rows = [flashnorm.fused_rmsnorm_silu(one, weight, 0.0) for weight in padded]
    return torch.cat(rows).view(-1)[: y.numel()]


def error(out: torch.Tensor, y: torch.Tensor) -> float:
    """The largest distance from the formula in ulp of fp32, in fp64, for arguments up to `EXP_TO`."""
    exact = y / (1 + torch.exp(-y))
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-126))) - 23)
    return float(((out - exact).abs() / ulp)[y.abs() <= EXP_TO].max())


def test_random_arguments(exact_route: str, device: torch.device) -> None:
    """Of every size, and densely where the exponential takes its turns: multiples of log(2), +-87, +-88.5."""
    pool = np.random.default_rng(5)
    around = [math.log(2) * k for k in range(-128, 129)] + [math.log(2) * (k + 0.5) for k in range(-128, 128)]
    around += [87.0, -87.0, 88.5, -88.5, 88.7, -88.7, 104.0, -104.0]
    near = (np.array(around)[:, None] * (1 + pool.uniform(-1e-6, 1e-6, 40))).astype(np.float32).reshape(-1)
    wide = np.exp2(pool.uniform(-149, 127, 20_000)).astype(np.float32) * pool.choice([-1, 1], 20_000).astype(np.float32)
    usual = pool.uniform(-100, 100, 20_000).astype(np.float32)
    problem = sent(F32, torch.from_numpy(np.concatenate([near, wide, usual])), device)
    problem.check_bits(problem.run(exact_route), f"on {exact_route}")


def test_what_the_ends_are(route: str, device: torch.device) -> None:
    """The formula's own values, no model in between: -infinity gives NaN, what is far below -88.5 a -0."""
    values = torch.tensor([0.0, -0.0, INF, -INF, NAN, 200.0, -200.0, 3e38, -3e38, 88.0, -88.0, 1e-40, -1e-40, 30.0])
    got = of(values, route, device)
    assert got[[3, 4]].isnan().all() and got[2] == INF
    want = torch.tensor([0.0, -0.0, 200.0, -0.0, 3e38, -0.0, 88.0, 1e-40 / 2, -1e-40 / 2, 30.0])
    near = got[[0, 1, 5, 6, 7, 8, 9, 11, 12, 13]]
    assert torch.equal(near, want) and torch.equal(near.signbit(), want.signbit())
    assert -1e-35 < float(got[10]) < 0


@pytest.mark.parametrize("h", [1, 7, 100, 1440])
@pytest.mark.parametrize("out", [None, "e4m3"])
def test_any_width(out: str | None, h: int, route: str, device: torch.device) -> None:
    """Widths of video decoders and odd ones, given an output or not, from strided rows, in place."""
    combo = Combo(SILU, out=out, scale="value" if out else None)
    for layout in ("contiguous", "odd rows", "last 2"):
        for given in ("none", "contiguous", "half", *(("alias",) if out is None else ())):
            judge(Problem(combo, (5, h), device, layout=layout), route, given)


@pytest.mark.parametrize("h", [16, 48, 1440])
def test_nvfp4_is_that_of_the_activation(h: int, exact_route: str, device: torch.device) -> None:
    """Codes and scales come from SiLU in fp32, with a global scale of 1; a new block_scale, or a given one."""
    combo = Combo(SILU, out="e2m1", block=16, form="e4m3")
    problem = Problem(combo, (19, h), device)
    row = canonical.norm(problem.x, problem.weight)
    codes, scale = nvfp4(canonical.silu(row.y), 16, None)
    x, weight = problem.x.to(device), problem.weight.to(device)  # type: ignore[union-attr]
    for kept in (None, torch.full((19, h // 16), 0x7F, dtype=torch.uint8, device=device)):
        out = torch.full((19, h // 2), 0x5B, dtype=torch.uint8, device=device)
        with flashnorm.backend(exact_route):
            made = flashnorm.fused_rmsnorm_silu(x, weight, out=out.view(torch.float4_e2m1fn_x2), block_scale=kept)
        assert made[1] is kept if kept is not None else made[1].dtype == torch.float8_e4m3fn
        found, kept = out.view(torch.float4_e2m1fn_x2), made[1].view(torch.float8_e4m3fn)
        if problem.near:
            same = kept.cpu().view(torch.uint8) == scale.view(torch.uint8)
            assert_near(found, codes, "codes", same.repeat_interleave(16, -1))
            assert_near(kept, scale, "scales")
        else:
            assert_same_bits(found, codes, "codes")
            assert_same_bits(kept, scale, "scales")


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_every_form_of_a_scale(form: str, route: str, device: torch.device) -> None:
    """A number or an element anywhere; None is 1, and divides nothing."""
    value = 229 / 8192
    combo = Combo(SILU, out=form, scale="value")
    want = Problem(combo, (5, 96), device, scale=value).run(route).out
    forms: list[Any] = [np.float32(value), torch.tensor(value), torch.tensor([value], dtype=torch.float64)]
    forms += [torch.full((1,), value, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16)]
    for scale in forms:
        call = Problem(combo, (5, 96), device).prepare()
        call.arguments["scale"] = scale
        assert_same_bits(call(route).out, want, f"scale {scale!r}")
    one, none = (
        Problem(Combo(SILU, out=form, scale=s), (5, 96), device, scale=1.0).run(route) for s in ("value", None)
    )
    assert_same_bits(none.out, one.out, "no scale")


@pytest.mark.parametrize("numerics", ["hf-llama", "vllm", "hf-gemma", "torch", "cake"])
def test_modes_round_once(numerics: str, route: str, device: torch.device) -> None:
    """Nothing is added, and nothing rounded before SiLU: every mode is the same."""
    combos = [Combo(SILU, numerics=mode) for mode in ("flashinfer", numerics)]
    first, other = (Problem(combo, (7, 192), device).run(route).out for combo in combos)
    assert_same_bits(other, first, numerics)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scale": 0.5}, ValueError, "scale goes with an FP8 out"),
    ({"scale": 0.5, "out": ("bf16", 64)}, ValueError, "scale goes with an FP8 out"),
    ({"scale": 0.5, "out": ("u8", 32)}, ValueError, "scale goes with an FP8 out"),
    ({"scale": 0.0, "out": ("e4m3", 64)}, ValueError, "scale must be finite and > 0"),
    ({"scale": "1", "out": ("e4m3", 64)}, TypeError, "scale must be a Python number"),
    ({"block_scale": ("u8", 4)}, ValueError, "block_scale goes with an NVFP4 out"),
    ({"block_scale": ("u8", 4), "out": ("e4m3", 64)}, ValueError, "block_scale goes with an NVFP4 out"),
    ({"block_scale": ("u8", 3), "out": ("u8", 32)}, ValueError, "block_scale must hold 4 values"),
    ({"block_scale": ("f32", 4), "out": ("u8", 32)}, ValueError, "block_scale must have dtype"),
    ({"block_scale": 3.0, "out": ("u8", 32)}, TypeError, "block_scale must be a torch.Tensor"),
    ({"out": ("u8", 64)}, ValueError, r"out must have shape \(4, 32\)"),
    ({"out": ("e4m3", 32)}, ValueError, r"out must have shape \(4, 64\)"),
    ({"out": ("f32", 64)}, ValueError, "out must have dtype bfloat16"),
    ({"out": ("i8", 64)}, ValueError, "out must have dtype"),
    ({"out": [1.0]}, TypeError, "out must be a torch.Tensor"),
]


@pytest.mark.parametrize(("changes", "error", "text"), WRONG, ids=str)
def test_arguments_that_do_not_go(
    changes: dict[str, Any], error: type[Exception], text: str, device: torch.device
) -> None:
    """On the cold path, and after a good call of the kind."""
    x, weight = rows((4, 64), torch.bfloat16).to(device), gains((64,), torch.bfloat16).to(device)
    dtypes = {**DTYPES, "u8": torch.uint8}
    given = {
        name: torch.zeros(4, value[1], device=device).to(dtypes[value[0]]) if isinstance(value, tuple) else value
        for name, value in changes.items()
    }
    for _ in range(2):
        with pytest.raises(error, match=f"fused_rmsnorm_silu: {text}"):
            flashnorm.fused_rmsnorm_silu(x, weight, **given)
        for tensor in given.values():
            assert not isinstance(tensor, torch.Tensor) or not bool(tensor.view(torch.uint8).any())
        with flashnorm.backend("torch"):
            flashnorm.fused_rmsnorm_silu(x, weight)
            flashnorm.fused_rmsnorm_silu(x, weight, out=torch.zeros(4, 32, dtype=torch.uint8, device=device))


def test_rows_that_are_no_blocks(device: torch.device) -> None:
    """Any width but for NVFP4."""
    x = rows((4, 40), torch.bfloat16).to(device)
    with pytest.raises(ValueError, match="multiple of 16"):
        flashnorm.fused_rmsnorm_silu(x, None, out=torch.zeros(4, 20, dtype=torch.uint8, device=device))
