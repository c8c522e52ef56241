"""Strides, offsets and views: right to the bit where a route is exact, and nothing written outside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashnorm
from tests.combos import BF16, COMBOS, FUSED, PLAIN, Combo
from tests.inputs import Guarded, Problem, gains, rows
from tests.test_matrix import check
from tests.tolerance import Pool, assert_same_bits

MATRIX = ("contiguous", "misaligned", "half", "other half", "odd rows", "last 2")
GRID = (*MATRIX, "heads", "transposed", "every other")
MIXED = next(c for c in COMBOS if c.op == "fused_add_rmsnorm" and c.x == "bf16" and c.residual == "f32" and c.weight)
PLAIN_BF16 = [c for c in BF16 if c.op in PLAIN]


def judge(problem: Problem, route: str, out: str = "none") -> None:
    """Exact routes give the canonical bits whatever the layout; the torch route stays within the tolerance."""
    if route == "torch":
        check(problem, route, Pool(problem.combo.numerics), out)
    else:
        problem.check_bits(problem.run(route, out), f"out {out} on {route}")


@pytest.mark.parametrize("layout", MATRIX)
@pytest.mark.parametrize("combo", (*BF16, MIXED), ids=str)
def test_matrices(combo: Combo, layout: str, route: str, device: torch.device) -> None:
    for shape in ((19, 576), (5, 111), (1, 128)):
        judge(Problem(combo, shape, device, layout=layout), route)


@pytest.mark.parametrize("layout", GRID)
@pytest.mark.parametrize("combo", (*BF16, MIXED), ids=str)
def test_grids(combo: Combo, layout: str, route: str, device: torch.device) -> None:
    judge(Problem(combo, (3, 5, 128), device, layout=layout), route)
    judge(Problem(combo, (4, 1, 3, 128), device, layout=layout), route)


@pytest.mark.parametrize("residual_layout", ["contiguous", "heads", "transposed", "misaligned", "last 2"])
@pytest.mark.parametrize("layout", ["contiguous", "half", "last 2"])
@pytest.mark.parametrize("combo", (*[c for c in BF16 if c.op in FUSED], MIXED), ids=str)
def test_input_and_residual_may_differ(
    combo: Combo, layout: str, residual_layout: str, route: str, device: torch.device
) -> None:
    judge(Problem(combo, (3, 5, 128), device, layout=layout, residual_layout=residual_layout), route)


@pytest.mark.parametrize("out", [*GRID, "alias"])
@pytest.mark.parametrize("layout", ["contiguous", "heads", "transposed", "last 2"])
@pytest.mark.parametrize("combo", PLAIN_BF16, ids=str)
def test_out_has_its_own_layout(combo: Combo, layout: str, out: str, route: str, device: torch.device) -> None:
    judge(Problem(combo, (3, 5, 128), device, layout=layout), route, out)


@pytest.mark.parametrize("layout", ["expanded", "misaligned", "last 2"])
@pytest.mark.parametrize("combo", PLAIN_BF16, ids=str)
def test_inputs_may_repeat(combo: Combo, layout: str, route: str, device: torch.device) -> None:
    """Stride 0 along the outer dimensions of an input, and the layouts of a weight."""
    judge(Problem(combo, (3, 5, 128), device, layout="expanded"), route)
    judge(Problem(combo, (5, 111), device, layout="expanded"), route, "half")
    for weight_shape in ((128,), (5, 128), (3, 1, 128)):
        judge(Problem(combo, (3, 5, 128), device, weight_shape=weight_shape, weight_layout=layout), route)


@pytest.mark.parametrize("combo", BF16, ids=str)
@pytest.mark.parametrize("shift", range(8))
def test_every_alignment(combo: Combo, shift: int, route: str, device: torch.device) -> None:
    """Any whole element: the address of a view moved by 0 to 7 elements, with row strides that keep or break it."""
    for pitch in (136, 137, 138, 140):
        h = 128
        flat = rows((8 + 5 * pitch,), torch.bfloat16, pitch)
        buffer = Guarded(flat, device, written=True)
        view = buffer.view[shift : shift + 5 * pitch].view(5, pitch)[:, :h]
        want = flat[shift : shift + 5 * pitch].view(5, pitch)[:, :h]
        problem = Problem(replace(combo, rstd=False), (5, h), device, x=want.clone(), seed=shift)
        weight = gains((h,), torch.bfloat16, "w").to(device)
        problem.weight = weight.cpu()
        with flashnorm.backend(route):
            if combo.op in FUSED:
                assert problem.residual is not None
                residual = problem.residual.clone().to(device)
                getattr(flashnorm, combo.op)(view, residual, weight)
                out = view
            else:
                out = getattr(flashnorm, combo.op)(view, weight)
                assert_same_bits(view, want, "the input")
        expected = problem.canonical().out if route != "torch" else problem.run("torch").out
        assert_same_bits(out, expected, f"{combo} shifted by {shift}, pitch {pitch}, on {route}")
        buffer.check("the buffer")
        rest = buffer.view.clone()
        rest[shift : shift + 5 * pitch].view(5, pitch)[:, :h] = want.to(device)
        assert_same_bits(rest, flat, "elements between the rows")


def test_heads_of_a_projection(route: str, device: torch.device) -> None:
    """`qkv.split([2048, 1024, 1024], -1)[0].view(1024, 16, 128)`: in place, k and v untouched."""
    qkv = rows((1024, 4096), torch.bfloat16, "qkv")
    for weight in (gains((128,), torch.bfloat16), gains((16, 128), torch.bfloat16)):
        live = qkv.clone().to(device)
        q = live.split([2048, 1024, 1024], -1)[0].view(1024, 16, 128)
        with flashnorm.backend(route):
            got = flashnorm.rmsnorm(q, weight.to(device), out=q)
        assert got is q
        x = qkv[:, :2048].reshape(1024, 16, 128).contiguous()
        judged = Problem(Combo("rmsnorm"), (1024, 16, 128), device, x=x, weight=weight)
        want = judged.canonical().out if route != "torch" else judged.run("torch").out
        assert_same_bits(q, want, "q")
        assert_same_bits(live[:, 2048:], qkv[:, 2048:], "k and v")


@pytest.mark.parametrize("combo", BF16, ids=str)
def test_strides_of_single_rows_mean_nothing(combo: Combo, route: str, device: torch.device) -> None:
    """`big[3:4]`, and size-1 dimensions with any stride at all, 0 included."""
    h = 576
    problem = Problem(replace(combo, rstd=False), (1, h), device)
    want = problem.run(route)
    strides = [(h * 3, 1), (1, 1), (0, 1), (12345, 1), (h + 1, 1)]
    views = [(1, h, s) for s in strides] + [(1, 1, h, (7, 0, 1)), (1, 1, h, (1, 5, 1))]
    for *shape, stride in views:
        storage = torch.full((2 * h,), 7.0, dtype=torch.bfloat16, device=device)
        x = storage.as_strided(shape, stride, 64)  # type: ignore[arg-type]
        x.copy_(problem.x.view(shape))
        assert problem.weight is not None
        weight = problem.weight.to(device)
        with flashnorm.backend(route):
            if problem.residual is None:
                got = getattr(flashnorm, combo.op)(x, weight)
            else:
                residual = storage.new_empty(2 * h).as_strided(shape, stride, 128)  # type: ignore[arg-type]
                residual.copy_(problem.residual.view(shape))
                getattr(flashnorm, combo.op)(x, residual, weight)
                got = x
                assert want.residual is not None
                assert_same_bits(residual.reshape(1, h), want.residual.to(device), f"residual {stride}")
        assert_same_bits(got.reshape(1, h), want.out.to(device), f"strides {stride}")
        assert bool((storage[:64] == 7).all()) and bool((storage[64 + h :] == 7).all())


def test_a_new_output_is_dense(route: str, device: torch.device) -> None:
    """Without out=, the result never overlaps itself or the input, whatever the input's strides."""
    for layout in (*GRID, "expanded"):
        guard = Guarded(rows((3, 5, 128), torch.bfloat16), device, layout)
        with flashnorm.backend(route):
            out = flashnorm.rmsnorm(guard.view, None)
        assert out.shape == (3, 5, 128) and out.stride(-1) == 1
        assert out.untyped_storage().data_ptr() != guard.view.untyped_storage().data_ptr()
        assert len({int(i) for i in torch.as_strided(torch.arange(4096), out.shape, out.stride()).flatten()}) == 1920
