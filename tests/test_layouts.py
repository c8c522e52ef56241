"""Strides, offsets and views: right to the bit where a route is exact, and nothing written outside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashnorm
from tests.buffers import Guarded
from tests.combos import COMBOS, LAID_OUT, USUAL, Combo, fitting
from tests.inputs import gains, rows
from tests.judge import judge
from tests.problem import Problem
from tests.tolerance import assert_same_bits

MATRIX = ("contiguous", "misaligned", "half", "other half", "odd rows", "last 2")
GRID = (*MATRIX, "heads", "transposed", "every other")
MIXED = next(c for c in COMBOS if c.op == "fused_add_rmsnorm" and c.x == "bf16" and c.residual == "f32" and c.weight)
GATHERED = tuple(c for c in COMBOS if c.index is not None or c.x == "i8")[::3]
BROADCAST = ("rmsnorm", "gemma_rmsnorm", "rmsnorm_quant", "gemma_rmsnorm_quant")
FORMS = tuple(c for c in LAID_OUT if c.residual is None)  # whose inputs are only read


@pytest.mark.parametrize("layout", MATRIX)
@pytest.mark.parametrize("combo", (*LAID_OUT, MIXED, *GATHERED), ids=str)
def test_matrices(combo: Combo, layout: str, route: str, device: torch.device) -> None:
    for shape in ((19, 576), (5, 111), (1, 128)):
        judge(Problem(combo, fitting(combo, *shape), device, layout=layout), route)


@pytest.mark.parametrize("layout", GRID)
@pytest.mark.parametrize("combo", (*LAID_OUT, MIXED), ids=str)
def test_grids(combo: Combo, layout: str, route: str, device: torch.device) -> None:
    judge(Problem(combo, (3, 5, 128), device, layout=layout), route)
    judge(Problem(combo, (4, 1, 3, 128), device, layout=layout), route)


@pytest.mark.parametrize("residual_layout", ["contiguous", "heads", "transposed", "misaligned", "last 2"])
@pytest.mark.parametrize("layout", ["contiguous", "half", "last 2"])
@pytest.mark.parametrize("combo", (*[c for c in LAID_OUT if c.residual], MIXED), ids=str)
def test_input_and_residual_may_differ(
    combo: Combo, layout: str, residual_layout: str, route: str, device: torch.device
) -> None:
    judge(Problem(combo, (3, 5, 128), device, layout=layout, residual_layout=residual_layout), route)


OUTS = [(c, out) for c in LAID_OUT if not c.in_place for out in (*GRID, *(("alias",) if c.may_alias else ()))]


@pytest.mark.parametrize("layout", ["contiguous", "heads", "transposed", "last 2"])
@pytest.mark.parametrize(("combo", "out"), OUTS, ids=str)
def test_out_has_its_own_layout(combo: Combo, layout: str, out: str, route: str, device: torch.device) -> None:
    """normed_out, where there is one, has it too."""
    judge(Problem(combo, (3, 5, 128), device, layout=layout), route, out)


@pytest.mark.parametrize("layout", ["expanded", "misaligned", "last 2"])
@pytest.mark.parametrize("combo", FORMS, ids=str)
def test_inputs_may_repeat(combo: Combo, layout: str, route: str, device: torch.device) -> None:
    """Stride 0 along the outer dimensions of an input, and the layouts of a weight."""
    judge(Problem(combo, (3, 5, 128), device, layout="expanded"), route)
    judge(Problem(combo, (5, 111), device, layout="expanded"), route, "half")
    for weight_shape in ((128,), (5, 128), (3, 1, 128)) if combo.op in BROADCAST else ((128,),):
        judge(Problem(combo, (3, 5, 128), device, weight_shape=weight_shape, weight_layout=layout), route)


@pytest.mark.parametrize("combo", LAID_OUT, ids=str)
@pytest.mark.parametrize("shift", range(8))
def test_every_alignment(combo: Combo, shift: int, route: str, device: torch.device) -> None:
    """Any whole element: the address of a view moved by 0 to 7 elements, with row strides that keep or break it."""
    combo = replace(combo, rstd=False)
    for pitch in (136, 137, 138, 140):
        h = 128
        flat = rows((8 + 5 * pitch,), torch.bfloat16, pitch)
        buffer = Guarded(flat, device, written=True)
        view = buffer.view[shift : shift + 5 * pitch].view(5, pitch)[:, :h]
        want = flat[shift : shift + 5 * pitch].view(5, pitch)[:, :h]
        problem = Problem(combo, (5, h), device, x=want.clone(), seed=shift)
        call = problem.prepare()
        call.arguments["input"] = view
        got = call(route)
        if not combo.in_place:
            assert_same_bits(view, want, "the input")
        expected = problem.canonical() if route != "torch" else problem.run("torch")
        assert_same_bits(got.out, expected.out, f"{combo} shifted by {shift}, pitch {pitch}, on {route}")
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


@pytest.mark.parametrize("combo", USUAL, ids=str)
def test_strides_of_single_rows_mean_nothing(combo: Combo, route: str, device: torch.device) -> None:
    """`big[3:4]`, and size-1 dimensions with any stride at all, 0 included."""
    combo = replace(combo, rstd=False)
    (h,) = fitting(combo, 576)
    want = Problem(combo, (1, h), device).run(route)
    strides = [(h * 3, 1), (1, 1), (0, 1), (12345, 1), (h + 1, 1)]
    views = [(1, h, s) for s in strides] + [(1, 1, h, (7, 0, 1)), (1, 1, h, (1, 5, 1))]
    for *shape, stride in views:
        storage = torch.full((2 * h,), 7.0, dtype=torch.bfloat16, device=device)
        x = storage.as_strided(shape, stride, 64)  # type: ignore[arg-type]
        values = Problem(combo, (1, h))
        x.copy_(values.x.view(shape))
        same = {"x": values.x.view(shape), "weight": values.weight, "bias": values.bias}
        if values.residual is not None:
            same["residual"] = values.residual.view(shape)
        call = Problem(combo, tuple(shape), device, **same).prepare()  # type: ignore[arg-type]
        call.arguments["input"] = x
        if values.residual is not None:
            residual = storage.new_empty(2 * h).as_strided(shape, stride, 128)  # type: ignore[arg-type]
            residual.copy_(values.residual.view(shape))
            call.arguments["residual"] = residual
        got = call(route)
        assert_same_bits(got.out.reshape(1, -1), want.out, f"strides {stride}")
        if want.residual is not None:
            assert got.residual is not None
            assert_same_bits(got.residual.reshape(1, h), want.residual, f"residual {stride}")
        assert bool((storage[:64] == 7).all()) and bool((storage[64 + h :] == 7).all())


@pytest.mark.parametrize("combo", USUAL, ids=str)
def test_a_negated_view_keeps_its_sign(combo: Combo, device: torch.device) -> None:
    """A lazy negation of PyTorch's is part of an input's values; the route does not matter, so none is compiled."""
    combo = replace(combo, x="f32", residual=combo.residual and "f32", rstd=False)
    z = torch.randn(4, 128, dtype=torch.complex64, device=device).conj().imag
    assert z.is_neg()
    problem = Problem(combo, (4, 128), device, x=z.resolve_neg().cpu().contiguous())
    want = problem.run("torch").out
    for _ in range(2):  # the second time after a warm call
        call = problem.prepare()
        if combo.in_place:
            call.arguments["input"] = z
            with flashnorm.backend("torch"), pytest.raises(ValueError, match="negated view"):
                getattr(flashnorm, combo.op)(**call.arguments)
        else:
            call.arguments["input"] = z
            assert_same_bits(call("torch").out, want, "a negated input")
        problem.run("torch")


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm", "rmsnorm_dynamic_quant"])
def test_a_new_output_is_dense(op: str, route: str, device: torch.device) -> None:
    """Without out=, the result never overlaps itself or the input, whatever the input's strides."""
    for layout in (*GRID, "expanded"):
        guard = Guarded(rows((3, 5, 128), torch.bfloat16), device, layout)
        with flashnorm.backend(route):
            out = getattr(flashnorm, op)(guard.view, None, *((None,) if op == "layernorm" else ()))
        out = out[0] if isinstance(out, tuple) else out
        assert out.shape == (3, 5, 128) and out.stride(-1) == 1
        assert out.untyped_storage().data_ptr() != guard.view.untyped_storage().data_ptr()
        assert len({int(i) for i in torch.as_strided(torch.arange(4096), out.shape, out.stride()).flatten()}) == 1920
