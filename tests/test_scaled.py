"""NVFP4, MXFP4, MXFP8 and RMSNorm + SiLU, end to end: bits against the model, layouts, errors, compilers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import flashnorm
from flashnorm import model
from flashnorm.core.op import ALL, Op
from flashnorm.program import FP4, swizzled_offset
from flashnorm.verify import cases
from flashnorm.verify.problem import Problem, call, make_problem
from tests.buffers import Guarded

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
E2M1 = getattr(torch, FP4)
PUBLIC = (
    "rmsnorm_fp4quant", "add_rmsnorm_fp4quant", "rmsnorm_mxfp8_quant", "add_rmsnorm_mxfp8_quant", "fused_rmsnorm_silu"
)  # fmt: skip
# Those that only compilers call differ in where h goes: one of them stands for all.
OPERATORS = [
    op
    for op in ALL.values()
    if op.called in PUBLIC and (not op.name.endswith("_new") or op.name == "add_rmsnorm_mxfp8_quant_new")
]
CHOSEN = [(op, case) for op, case, _ in cases.chosen(OPERATORS, torch.device("cpu"))]
SHAPES = ((1, 32), (17, 96), (129, 576), (127, 4096), (300, 64), (5, 16384))


# ------------------------------------------------------------------ bits
def _check(problem: Problem, route: str, device: torch.device) -> None:
    with flashnorm.backend(route), torch.no_grad():
        got = {name: tensor.cpu() for name, tensor in call(problem, device).items()}
    want = model.canonical(problem.program, problem.modelled(), problem.scalars())
    same = model.same_bits if device.type == "cpu" else partial(model.agree, problem.program, dtype=problem.case.x)
    assert same(got, want), f"{problem.rows} x {problem.hidden}: {', '.join(got)}"


@pytest.mark.parametrize(("op", "case"), CHOSEN, ids=lambda v: v.name if isinstance(v, Op) else "")
def test_bits(op: Op, case: cases.Case, exact_route: str, device: torch.device) -> None:
    """Every stage and layout; random rows and those of zeros, with a NaN and with an infinity."""
    for rows, hidden in SHAPES:
        if case == cases.USUAL or hidden <= 576:
            _check(make_problem(op, case, rows, hidden, device), exact_route, device)


def _special(dtype: torch.dtype, hidden: int) -> torch.Tensor:
    """Rows of zeros, of -0, with NaN, infinities, one spike, subnormals, the largest number; and ties."""
    base = torch.randn(10, hidden, generator=torch.Generator().manual_seed(3))
    base[0], base[1] = 0.0, -0.0
    base[2, hidden // 3] = math.nan
    base[3, 0], base[4, -1] = math.inf, -math.inf
    base[5] = 0.0
    base[5, 7] = 3e4
    base[6] *= 2.0**-130 if dtype == torch.bfloat16 else 2.0**-24
    base[7] = torch.finfo(dtype).max
    base[8] = torch.tensor([1.0, -1.0, 0.5, 0.25, -0.75, 3.5, 5.0, -0.0]).repeat(hidden // 8)
    base[9, 16:32] = 0.0  # a block of zeros in a row that is none
    return base.to(dtype)


@pytest.mark.parametrize(("op", "case"), CHOSEN, ids=lambda v: v.name if isinstance(v, Op) else "")
def test_special_rows(op: Op, case: cases.Case, exact_route: str, device: torch.device) -> None:
    problem = make_problem(op, case, 10, 128, device)
    given = {**problem.given, "x": _special(case.x, 128)}
    if "residual" in given:
        given["residual"] = torch.zeros_like(given["residual"])
    _check(replace(problem, given=given), exact_route, device)


@pytest.mark.parametrize("extreme", [87.0, 88.4, 88.6, 200.0, 3e38, math.inf, math.nan])
def test_silu_of_extreme_arguments(extreme: float, exact_route: str, device: torch.device) -> None:
    """By way of the weight: a row of +-1 has a norm of +-1."""
    x = torch.tensor([1.0, -1.0]).repeat(2, 64).to(device)
    weight = torch.linspace(-3, 3, 128, device=device)
    weight[5:9] = extreme
    weight[64] = -extreme
    with flashnorm.backend(exact_route):
        got = flashnorm.fused_rmsnorm_silu(x, weight, 0.0).cpu()
    program = ALL["fused_rmsnorm_silu"].program(frozenset({"x", "weight", "out"}), {"numerics": "flashinfer"})
    given = {"x": x.cpu(), "weight": weight.cpu(), "out": torch.empty(2, 128)}
    want = model.canonical(program, given, {"eps": 0.0})["out"]
    same = model.same_bits if device.type == "cpu" else partial(model.agree, program)
    assert same({"out": got}, {"out": want})
    y = x.cpu().double() * weight.cpu().double()
    exact = y / (1 + torch.exp(-y))
    inside = y.abs() <= 80
    assert bool(((got.double() - exact).abs() <= 4 * 2.0**-23 * exact.abs())[inside].all())
    assert bool((got.isnan() == exact.isnan())[~(y.abs() < 1e30)].all())


# ------------------------------------------------------------------ where things lie
def by_hand(plain: torch.Tensor) -> torch.Tensor:
    rows, blocks = plain.shape
    columns = -(-blocks // 4) * 4
    found = torch.zeros(-(-rows // 128) * 128 * columns, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            found[swizzled_offset(row, block, columns)] = plain[row, block]
    return found


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("rows", [1, 17, 127, 128, 129])
def test_layouts_of_scales(rows: int, route: str, device: torch.device) -> None:
    """Tiles hold what rows hold, and zeros: also in memory that was full of 0x7F, and nothing beyond it."""
    x = torch.randn(rows, 224, generator=torch.Generator().manual_seed(rows)).bfloat16().to(device)
    weight = torch.rand(224, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    with flashnorm.backend(route):
        codes, plain = flashnorm.rmsnorm_fp4quant(x, weight, global_scale=5.0)
        size = -(-rows // 128) * 128 * 16
        tiles = Guarded(None, device, written=True, shape=(size,), dtype=torch.uint8, poison=0x7F)
        pairs = Guarded(None, device, "half", written=True, shape=(rows, 112), dtype=torch.uint8, poison=0x5B)
        flashnorm.rmsnorm_fp4quant(x, weight, pairs.view, tiles.view, 5.0, is_sf_swizzled_layout=True)
        for guard, what in ((tiles, "tiles"), (pairs, "codes")):
            guard.check(what)
        assert torch.equal(raw(tiles.view), by_hand(raw(plain)))
        assert torch.equal(raw(pairs.view), raw(codes))
        residual = torch.zeros_like(x)
        y_out = torch.full_like(x, math.nan)
        both = flashnorm.add_rmsnorm_fp4quant(
            x, residual, weight, global_scale=5.0, output_both_sf_layouts=True, y_out=y_out
        )
        assert [t.dtype for t in both] == [E2M1, E4M3, E4M3]
        assert torch.equal(raw(both[0]), raw(codes)) and torch.equal(raw(both[2]), raw(plain))
        assert torch.equal(raw(both[1]), by_hand(raw(plain)))
        assert torch.equal(residual, x)
        assert torch.equal(raw(y_out), raw(flashnorm.rmsnorm(x, weight)))
        out, kept = flashnorm.rmsnorm_mxfp8_quant(x, weight)
        again, swizzled = flashnorm.rmsnorm_mxfp8_quant(x, weight, is_sf_swizzled_layout=True)
        assert torch.equal(raw(out), raw(again)) and torch.equal(raw(swizzled), by_hand(raw(kept)))


def test_dtypes_and_forms_of_arguments(route: str, device: torch.device) -> None:
    """The same bytes in uint8 and in the formats' own dtypes, for numbers and tensors, in any rank and stride."""
    x = torch.randn(6, 5, 128, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    weight = torch.rand(128, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    with flashnorm.backend(route):
        codes, scale = flashnorm.rmsnorm_fp4quant(x, weight, global_scale=3.0)
        assert codes.shape == (6, 5, 64) and scale.shape == (6, 5, 8)
        for gain in (torch.tensor(3.0), torch.tensor([3.0]), torch.tensor([3.0], device=device)):
            out = torch.zeros(6, 5, 64, dtype=torch.uint8, device=device)
            kept = torch.zeros(6, 5, 8, dtype=torch.uint8, device=device)
            for _ in range(3):  # cold, then warm
                made = flashnorm.rmsnorm_fp4quant(x, weight, out, kept, gain)
                assert made[0] is out and made[1] is kept
                assert torch.equal(raw(out), raw(codes)) and torch.equal(raw(kept), raw(scale))
        one = flashnorm.rmsnorm_fp4quant(x, weight)
        for gain in (None, 1.0):
            assert torch.equal(raw(flashnorm.rmsnorm_fp4quant(x, weight, global_scale=gain)[0]), raw(one[0]))
        turned = x.permute(1, 0, 2)
        got = flashnorm.rmsnorm_fp4quant(turned, weight, global_scale=3.0)
        assert torch.equal(raw(got[0]), raw(codes.view(torch.uint8).permute(1, 0, 2)))
        odd = torch.empty(30 * 129 + 1, dtype=x.dtype, device=device)[1:].view(30, 129)[:, :128]
        odd.copy_(x.view(30, 128))
        got = flashnorm.rmsnorm_fp4quant(odd, weight, global_scale=3.0)
        assert torch.equal(raw(got[0]), raw(codes).view(30, 64)) and torch.equal(raw(got[1]), raw(scale).view(30, 8))
        mx = flashnorm.rmsnorm_fp4quant(x, weight, block_size=32)
        kept = torch.zeros(6, 5, 4, dtype=torch.uint8, device=device)
        flashnorm.rmsnorm_fp4quant(x, weight, None, kept.view(E8M0), block_size=32)
        assert torch.equal(kept, mx[1])
        strided = torch.zeros(30, 256, dtype=x.dtype, device=device)[:, ::2]
        got = flashnorm.add_rmsnorm_fp4quant(x.view(30, 128), strided, weight, global_scale=3.0)
        assert torch.equal(raw(got[0]), raw(codes).view(30, 64)) and torch.equal(strided, x.view(30, 128))


def test_no_rows(route: str, device: torch.device) -> None:
    x, weight = torch.empty(0, 64, dtype=torch.bfloat16, device=device), torch.ones(64, device=device)
    with flashnorm.backend(route):
        assert [tuple(t.shape) for t in flashnorm.rmsnorm_fp4quant(x, weight)] == [(0, 32), (0, 4)]
        assert flashnorm.rmsnorm_fp4quant(x, weight, is_sf_swizzled_layout=True)[1].numel() == 0
        assert [tuple(t.shape) for t in flashnorm.rmsnorm_mxfp8_quant(x, weight)] == [(0, 64), (0, 2)]
        assert tuple(flashnorm.fused_rmsnorm_silu(x, weight).shape) == (0, 64)
        for shape in ((4, 0, 64), (0, 8, 64)):
            empty = x.new_empty(shape)
            assert tuple(flashnorm.rmsnorm_mxfp8_quant(empty, None)[1].shape) == (*shape[:-1], 2)
            assert tuple(flashnorm.rmsnorm_fp4quant(empty, None)[1].shape) == (*shape[:-1], 4)


def test_silu_forms(route: str, device: torch.device) -> None:
    """In place, in FP8 with a scale, in NVFP4; each from the same fp32 values."""
    x = torch.randn(33, 160, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    weight = torch.rand(160, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    with flashnorm.backend(route):
        want = flashnorm.fused_rmsnorm_silu(x, weight)
        copy = x.clone()
        assert flashnorm.fused_rmsnorm_silu(copy, weight, out=copy) is copy and torch.equal(copy, want)
        for kind in (E4M3, E5M2):
            first = flashnorm.fused_rmsnorm_silu(x, weight, out=torch.zeros(33, 160, device=device).to(kind))
            for scale in (1.0, torch.tensor([1.0], device=device)):
                out = torch.zeros(33, 160, device=device).to(kind)
                assert torch.equal(raw(flashnorm.fused_rmsnorm_silu(x, weight, out=out, scale=scale)), raw(first))
        pairs, scale = flashnorm.fused_rmsnorm_silu(
            x, weight, out=torch.zeros(33, 80, dtype=torch.uint8, device=device)
        )
        values = flashnorm.dequantize(pairs, scale, block_size=16)
        assert float((values - want.float()).norm() / want.float().norm()) < 0.13


def test_a_gemm_of_nvfp4(route: str, device: torch.device) -> None:
    """Dequantised and multiplied, as a block-scaled GEMM does: within the error of the format of the exact product."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    weight = (torch.rand(512, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16().to(device)
    other = torch.randn(512, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    gain = 448 * 6 / 8.0
    with flashnorm.backend(route):
        codes, scale = flashnorm.rmsnorm_fp4quant(x, weight, global_scale=gain, is_sf_swizzled_layout=True)
    values = flashnorm.dequantize(
        codes, scale, block_size=16, global_scale=gain, swizzled=True, dtype=torch.float64
    ).cpu()
    h = x.cpu().double()
    norm = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.cpu().double()
    # A code is off by at most a quarter of the block's largest element's step of 2 in 6.
    bound = norm.abs().unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, -1) / 6 * 1.07 + 1e-9
    assert bool(((values - norm).abs() <= bound).all())
    assert float((values @ other - norm @ other).norm() / (norm @ other).norm()) < 0.12


# ------------------------------------------------------------------ errors, compilers
def test_errors(device: torch.device) -> None:
    x, w = torch.randn(4, 64, device=device).bfloat16(), torch.ones(64, device=device)
    fp4, mx, silu, add = (
        flashnorm.rmsnorm_fp4quant, flashnorm.rmsnorm_mxfp8_quant, flashnorm.fused_rmsnorm_silu,
        flashnorm.add_rmsnorm_fp4quant,
    )  # fmt: skip

    def bytes_of(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8, device=device)

    wrong: list[tuple[Any, str]] = [
        (lambda: fp4(x[:, :40], None), "multiple of 16"),
        (lambda: fp4(x[:, :48].contiguous(), None, block_size=32), "multiple of 32"),
        (lambda: mx(x[:, :48].contiguous(), None), "multiple of 32"),
        (lambda: fp4(x, w, block_size=8), "block_size must be one of"),
        (lambda: fp4(x, w, scale_format="ue8m0"), "needs block_size 32"),
        (lambda: fp4(x, w, block_size=32, global_scale=2.0), "global_scale goes with"),
        (lambda: fp4(x, w, block_size=32, global_scale=torch.ones(1)), "global_scale goes with"),
        (lambda: fp4(x, w, scale_rule="ocp"), "scale_rule goes with"),
        (lambda: fp4(x, w, scale_rule="down"), "scale_rule must be one of"),
        (lambda: fp4(x, w, global_scale=0.0), "global_scale must be finite and > 0"),
        (lambda: fp4(x, w, global_scale=torch.ones(2, device=device)), "global_scale must be a scalar tensor"),
        (lambda: fp4(x, w, is_sf_swizzled_layout=1), "is_sf_swizzled_layout must be True or False"),
        (lambda: fp4(x, w, bytes_of(4, 64)), "y_fp4 must have shape"),
        (lambda: fp4(x, w, torch.zeros(4, 32, device=device)), "y_fp4 must have dtype"),
        (lambda: fp4(x, w, None, bytes_of(4, 3)), "block_scale must hold 4 values"),
        (lambda: fp4(x, w, None, bytes_of(5, 4)), "block_scale must have a row of scales"),
        (lambda: fp4(x, w, None, torch.zeros(4, 4, device=device)), "block_scale must have dtype"),
        (lambda: fp4(x, w, None, bytes_of(500), is_sf_swizzled_layout=True), "512 bytes"),
        (lambda: fp4(x, torch.ones(63, device=device)), "weight must have shape"),
        (lambda: add(x, x.clone(), w, y_out=torch.zeros(4, 64, device=device)), "y_out must have the dtype"),
        (lambda: add(x, x, w), "overlaps"),
        (lambda: add(x, x.clone(), w, block_scale_unswizzled=bytes_of(4, 4)), "needs output_both_sf_layouts"),
        (lambda: silu(x, w, scale=2.0), "scale goes with an FP8 out"),
        (lambda: silu(x, w, block_scale=bytes_of(4, 4)), "block_scale goes with an NVFP4 out"),
        (lambda: silu(x, w, out=torch.zeros(4, 64, device=device)), "out must have dtype"),
        (lambda: silu(x, w, -1.0), "eps must be finite and >= 0"),
    ]
    for bad, text in wrong:
        with pytest.raises(ValueError, match=text):
            bad()
    for bad in (lambda: fp4(None, w), lambda: mx([1.0], w), lambda: silu("x", w), lambda: fp4(x, w, eps="1")):
        with pytest.raises(TypeError):
            bad()


def test_a_number_that_goes_with_another_form_is_refused_warm(route: str, device: torch.device) -> None:
    x, w = torch.randn(4, 64, device=device).bfloat16(), torch.ones(64, device=device)
    out, scale = (torch.zeros(4, n, dtype=torch.uint8, device=device) for n in (32, 2))
    with flashnorm.backend(route):
        for _ in range(3):
            flashnorm.rmsnorm_fp4quant(x, w, out, scale, block_size=32)
        with pytest.raises(ValueError, match="global_scale goes with"):
            flashnorm.rmsnorm_fp4quant(x, w, out, scale, 2.0, block_size=32)
        codes, kept = torch.zeros(4, 64, device=device).to(E4M3), torch.zeros(4, 1, device=device)
        for _ in range(3):
            flashnorm.rmsnorm_dynamic_quant(x, w, granularity=128, out=codes, scale=kept)
        with pytest.raises(ValueError, match="scale_ub needs granularity"):
            flashnorm.rmsnorm_dynamic_quant(x, w, granularity=128, out=codes, scale=kept, scale_ub=2.0)


def test_gradients_are_not_lost(device: torch.device) -> None:
    x = torch.randn(4, 64, device=device).bfloat16().requires_grad_()
    w = torch.ones(64, device=device)
    for call_it in (flashnorm.rmsnorm_fp4quant, flashnorm.rmsnorm_mxfp8_quant, flashnorm.fused_rmsnorm_silu):
        with pytest.raises(RuntimeError, match="requires grad"):
            call_it(x, w)


def test_compiled(route: str, device: torch.device) -> None:
    """One graph for every number of rows from 2 on, with the bits of the eager call."""
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def formula(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Any:
        a, b = flashnorm.add_rmsnorm_fp4quant(x, residual, w, is_sf_swizzled_layout=True)
        c, d = flashnorm.rmsnorm_mxfp8_quant(x, w)
        return a.view(torch.uint8), b.view(torch.uint8), c.view(torch.uint8), d, flashnorm.fused_rmsnorm_silu(x, w)

    compiled = torch.compile(formula, fullgraph=True, backend=count)
    w = torch.linspace(0.5, 1.5, 64, device=device).bfloat16()
    with flashnorm.backend(route):
        for rows in (3, 130, 5):
            x = torch.randn(rows, 64, device=device).bfloat16()
            first, second = x.clone() * 0.5, x.clone() * 0.5
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(first, 0)
            got, want = compiled(x, first, w), formula(x, second, w)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)) and torch.equal(first, second)
    assert graphs == 1


@pytest.mark.gpu
def test_graph_capture(exact_route: str, device: torch.device) -> None:
    x, w = torch.randn(130, 512, device=device).bfloat16(), torch.ones(512, device=device)
    gain = torch.full((1,), 3.0, device=device)
    with flashnorm.backend(exact_route):
        want = flashnorm.rmsnorm_fp4quant(x, w, global_scale=gain, is_sf_swizzled_layout=True)
        out = [torch.zeros_like(t.view(torch.uint8)) for t in want]
        flashnorm.rmsnorm_fp4quant(x, w, *out, gain, is_sf_swizzled_layout=True)
        for t in out:
            t.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flashnorm.rmsnorm_fp4quant(x, w, *out, gain, is_sf_swizzled_layout=True)
        graph.replay()
        torch.cuda.synchronize()
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(out, want, strict=True))
