"""Rows picked by an index, and int8 rows with their scales: what paged caches and compressed activations hand over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashnorm
from tests.buffers import Guarded
from tests.combos import COMBOS, DTYPES, Combo
from tests.inputs import gains, indices, rows, scales
from tests.judge import check, judge
from tests.problem import Problem
from tests.tolerance import Pool, assert_same_bits

GATHERED = tuple(c for c in COMBOS if c.index is not None)
WIDENED = tuple(c for c in COMBOS if c.x == "i8")
PLAIN = next(c for c in GATHERED if c.op == "rmsnorm" and c.x == "bf16")
BOTH = tuple(c for c in GATHERED if c.x == "i8")


# ------------------------------------------------------------------ row_index
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (2, 3), (2, 1, 3), (3, 0), (300,)], ids=str)
@pytest.mark.parametrize("combo", GATHERED, ids=str)
def test_an_index_of_any_shape(combo: Combo, shape: tuple[int, ...], route: str, device: torch.device) -> None:
    """The result has the shape of the index, then H; rows repeat, and most of a large pool is never read."""
    for pool in (1, 7, 1000):
        problem = Problem(combo, (*shape, 256), device, pool=pool)
        judge(problem, route)
        if combo.rstd:
            got = problem.run(route)
            assert got.rstd is not None and got.rstd.shape == shape


@pytest.mark.parametrize("combo", [c for c in GATHERED if replace(c, index=None) in COMBOS], ids=str)
def test_picking_rows_is_picking_rows(combo: Combo, route: str, device: torch.device) -> None:
    """The bits of the operator over the rows picked beforehand."""
    problem = Problem(combo, (9, 640), device)
    assert problem.index is not None
    picked = problem.x[problem.index.long()]
    same = Problem(replace(combo, index=None), (9, 640), device, x=picked, weight=problem.weight)
    assert_same_bits(problem.run(route).out, same.run(route).out, f"{combo}")


@pytest.mark.parametrize(
    "layout", ["half", "other half", "odd rows", "misaligned", "every other", "last 2", "expanded"]
)
def test_pools_of_any_layout(layout: str, route: str, device: torch.device) -> None:
    for combo in (PLAIN, BOTH[0]):
        judge(Problem(combo, (2, 5, 128), device, layout=layout, pool=11), route)


def test_a_paged_buffer(route: str, device: torch.device) -> None:
    """Pages of rows, of which a head's slice is normalised: the index counts rows, page after page."""
    pages = rows((6, 16, 4, 128), torch.bfloat16, "pages")
    weight = gains((128,), torch.bfloat16)
    live = pages.to(device)[:, :, 1]  # (6, 16, 128), strides (8192, 512, 1)
    index = indices((3, 7), 96, torch.int32)
    with flashnorm.backend(route):
        got = flashnorm.rmsnorm(live, weight.to(device), row_index=index.to(device))
    x = pages[:, :, 1].reshape(96, 128)[index.long()]
    assert_same_bits(got, Problem(Combo("rmsnorm"), (3, 7, 128), device, x=x, weight=weight).run(route).out, "pages")


def test_indices_of_any_layout(route: str, device: torch.device) -> None:
    """A column of a table, a transposed one, one number for all: as they are, and only read."""
    x, weight = rows((9, 128), torch.bfloat16), gains((128,), torch.bfloat16)
    table = indices((6, 4), 9, torch.int32, "table")
    guard = Guarded(table, device)
    for view in (lambda t: t[:, 1], lambda t: t.t(), lambda t: t[::2, ::3], lambda t: t[2:3, 0].expand(5)):
        index = view(table)
        with flashnorm.backend(route):
            got = flashnorm.rmsnorm(x.to(device), weight.to(device), row_index=view(guard.view))
        picked = x[index.long()].contiguous()
        want = Problem(Combo("rmsnorm"), tuple(picked.shape), device, x=picked, weight=weight).run(route).out
        assert_same_bits(got, want, f"index {tuple(index.shape)}")
        guard.check("the table")


@pytest.mark.parametrize("combo", [c for c in GATHERED if c.out is None or c.x == "i8"][:2], ids=str)
def test_a_weight_for_each_picked_row(combo: Combo, route: str, device: torch.device) -> None:
    """The weight broadcasts against the result, not against the pool."""
    for shape, weight_shape in (((9, 128), (9, 128)), ((3, 4, 128), (4, 128)), ((3, 4, 128), (3, 1, 128))):
        judge(Problem(combo, shape, device, weight_shape=weight_shape, pool=2), route)


BAD = [[0, 5, 2], [-1, 0, 1], [0, 1, 2**31 - 1], [-(2**31), 1, 1]]


@pytest.mark.cpu_only
@pytest.mark.parametrize("index", BAD, ids=str)
@pytest.mark.parametrize("combo", GATHERED, ids=str)
def test_a_bad_index_is_refused_on_the_cpu(combo: Combo, index: list[int], route: str) -> None:
    """Named with its range, before anything is read or written; also after a good call of the same shape."""
    bad = next(i for i in index if not 0 <= i < 5)
    for dtype in ("i32", "i64"):
        chosen = torch.tensor(index).to(DTYPES[dtype])
        wrong = Problem(replace(combo, index=dtype), (3, 128), index=chosen).prepare("contiguous")
        for _ in range(2):
            with flashnorm.backend(route), pytest.raises(ValueError, match=f"row_index must be 0 to 4, got {bad}"):
                getattr(flashnorm, combo.op)(**wrong.arguments)
            assert all(guard.unchanged() for guard in wrong.guards.values())
            Problem(combo, (3, 128)).run(route, "contiguous")


@pytest.mark.gpu
@pytest.mark.parametrize("index", BAD, ids=str)
@pytest.mark.parametrize("combo", GATHERED, ids=str)
def test_a_bad_index_makes_its_row_nan_on_a_gpu(
    combo: Combo, index: list[int], exact_route: str, device: torch.device
) -> None:
    """That row alone, rstd too, codes 0x7F; nothing out of range is read, and no other row differs."""
    for dtype in ("i32", "i64"):
        chosen = torch.tensor(index).to(DTYPES[dtype])
        problem = Problem(replace(combo, index=dtype), (3, 256), device, index=chosen)
        got = problem.run(exact_route)
        problem.check_bits(got, f"index {index}")
        wrong = (chosen < 0) | (chosen >= 5)
        if combo.makes_codes:
            assert bool((got.out.view(torch.uint8)[wrong] == 0x7F).all())
        else:
            assert bool(got.out[wrong].isnan().all()) and not bool(got.out[~wrong].isnan().any())


@pytest.mark.gpu
def test_an_index_that_int64_alone_can_hold(exact_route: str, device: torch.device) -> None:
    """Past 32 bits: bad, not wrapped into the pool."""
    chosen = torch.tensor([2**32, 2**32 + 1, 2, -(2**32)])
    problem = Problem(replace(PLAIN, index="i64"), (4, 128), device, index=chosen)
    problem.check_bits(problem.run(exact_route))


@pytest.mark.large
def test_rows_beyond_32_bits(exact_route: str, device: torch.device) -> None:
    """A pool of (300000, 8192) bf16: the element's index wraps from row 262144 on."""
    pool = torch.zeros(300_000, 8192, dtype=torch.bfloat16, device=device)
    index = torch.tensor([0, 262_143, 262_144, 299_999, 150_000], dtype=torch.int32)
    values = rows((5, 8192), torch.bfloat16)
    pool[index.long().to(device)] = values.to(device)
    weight = gains((8192,), torch.bfloat16)
    with flashnorm.backend(exact_route):
        got = flashnorm.rmsnorm(pool, weight.to(device), row_index=index.to(device))
    want = Problem(Combo("rmsnorm"), (5, 8192), x=values, weight=weight).canonical().out
    assert_same_bits(got, want, "rows of a large pool")


# ------------------------------------------------------------------ int8
@pytest.mark.parametrize("combo", WIDENED, ids=str)
def test_scales_of_every_shape(combo: Combo, route: str, device: torch.device) -> None:
    """One element, whatever its rank, or one for each row: (M, 1), or the rows' own shape."""
    x = rows((6, 128), torch.int8)
    one, each = scales((1,)), scales((6, 1))
    unindexed = replace(combo, index=None)
    for scale in (one, one.view(()), one.view(1, 1), each, each.view(6), each.expand(6, 1)):
        problem = Problem(unindexed, (6, 128), device, x=x, input_scale=each if scale.numel() > 1 else one)
        call = problem.prepare()
        call.arguments["input_scale"] = scale.to(device)
        got = call(route)
        assert_same_bits(got.out, problem.run(route).out, f"scale {tuple(scale.shape)}")
    if combo.index is None:
        heads = Problem(unindexed, (2, 3, 128), device, x=x.view(2, 3, 128), input_scale=each)
        judge(heads, route)


def test_every_int8_value(route: str, device: torch.device) -> None:
    """-128 is -128; a row of one value normalises to its sign."""
    combo = next(c for c in WIDENED if c.op == "rmsnorm" and c.out == "bf16")
    every = torch.arange(-128, 128).to(torch.int8)
    judge(Problem(combo, (3, 256), device, x=every.expand(3, 256).contiguous()), route)
    for value in (-128, -1, 0, 1, 127):
        x, weight = torch.full((2, 64), value, dtype=torch.int8), torch.full((64,), 1.5, dtype=torch.bfloat16)
        got = Problem(combo, (2, 64), device, x=x, weight=weight, input_scale=torch.ones(2, 1)).run(route)
        assert bool((got.out == 1.5 * (value > 0) - 1.5 * (value < 0)).all()), value


def test_special_input_scales(route: str, device: torch.device) -> None:
    """Zero, subnormal, huge, infinite and NaN scales of a row are that row's business."""
    combo = next(c for c in WIDENED if c.input_scale == "rows" and c.index is None)
    each = torch.tensor([[0.0], [1e-40], [3e38], [float("inf")], [float("nan")], [-0.5], [1.0]])
    problem = Problem(combo, (7, 128), device, input_scale=each)
    if route == "torch":
        check(problem, route, Pool(combo.numerics))
    else:
        problem.check_bits(problem.run(route))


def test_the_result_has_the_dtype_of_out_else_of_the_weight_else_bf16(device: torch.device) -> None:
    """Decided before there is a route; this one compiles nothing."""
    x, scale = rows((3, 64), torch.int8).to(device), torch.tensor([0.1], device=device)
    with flashnorm.backend("torch"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            weight = gains((64,), dtype).to(device)
            for op in (flashnorm.rmsnorm, flashnorm.gemma_rmsnorm):
                assert op(x, weight, input_scale=scale).dtype == dtype
                out = torch.empty(3, 64, dtype=dtype, device=device)
                assert op(x, gains((64,), torch.float32).to(device), out=out, input_scale=scale) is out
        assert flashnorm.rmsnorm(x, None, input_scale=scale).dtype == torch.bfloat16


def test_both_at_once_with_nothing_to_pick(route: str, device: torch.device) -> None:
    for combo in BOTH:
        for shape in ((0, 128), (2, 0, 128)):
            assert Problem(combo, shape, device, pool=3).run(route).out.shape == shape


# ------------------------------------------------------------------ refused
def refused(device: torch.device, match: str, error: type[Exception] = ValueError, **changed: object) -> None:
    """Each of the four operators says so, for one change of arguments that are fine."""
    x, weight = rows((5, 128), torch.bfloat16), gains((128,), torch.bfloat16)
    for op in ("rmsnorm", "gemma_rmsnorm", "rmsnorm_quant", "gemma_rmsnorm_quant"):
        given = {"input": x, "weight": weight, **changed}
        if op.endswith("quant"):
            given |= {"out": torch.zeros(5, 128).to(torch.float8_e4m3fn), "scale": 1.0}
        given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        with pytest.raises(error, match=f"{op}: .*{match}"):
            getattr(flashnorm, op)(**given)


def test_arguments_that_do_not_go(device: torch.device) -> None:
    index, codes = torch.arange(5), rows((5, 128), torch.int8)
    for dtype in (torch.int16, torch.uint8, torch.int8, torch.float32, torch.bool):
        name = str(dtype).removeprefix("torch.")
        refused(device, f"row_index must have dtype int32 or int64, got {name}", row_index=index.to(dtype))
    refused(device, "row_index must be a torch.Tensor", TypeError, row_index=[0, 1])
    refused(device, "row_index must be a torch.Tensor", TypeError, row_index=3)
    refused(device, "input must have dtype", input=codes)
    refused(device, "input must have dtype", input_scale=torch.ones(1))
    refused(device, "input_scale must be a torch.Tensor", TypeError, input=codes, input_scale=0.5)
    scaled = {"input": codes, "input_scale": torch.ones(1)}  # the weight's dtype is the result's
    refused(device, "weight must be a torch.Tensor", TypeError, **scaled, weight="ones")
    refused(device, "weight must have dtype", **scaled, weight=torch.ones(128, dtype=torch.int32))
    for shape in ((2,), (5, 2), (4, 1), (1, 5), (128,), (0,)):
        refused(device, "input_scale must have shape", input=codes, input_scale=torch.ones(shape))
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32):
        wrong = torch.ones(1, dtype=dtype)
        refused(device, "input_scale must have dtype float32", input=codes, input_scale=wrong)


def test_outputs_that_do_not_fit(device: torch.device) -> None:
    x, weight = rows((5, 128), torch.bfloat16).to(device), gains((128,), torch.bfloat16).to(device)
    index = torch.tensor([1, 2, 0], device=device)
    for shape in ((5, 128), (3, 64), (128,), (1, 3, 128)):
        with pytest.raises(ValueError, match=r"out must have shape \(3, 128\)"):
            flashnorm.rmsnorm(x, weight, out=x.new_zeros(shape), row_index=index)
    with pytest.raises(ValueError, match="out must have dtype bfloat16"):
        flashnorm.rmsnorm(x, weight, out=torch.zeros(3, 128, device=device), row_index=index)
    before = x.clone()
    for out in (x[:3], x[2:]):  # another row may still be read when this one is written
        with pytest.raises(ValueError, match="overlap"):
            flashnorm.rmsnorm(x, weight, out=out, row_index=index)
    whole = torch.arange(5, device=device)
    with pytest.raises(ValueError, match="overlap"):
        flashnorm.rmsnorm(x, weight, out=x, row_index=whole)
    assert torch.equal(x, before)


@pytest.mark.gpu
def test_everything_is_on_one_device(device: torch.device) -> None:
    x = rows((5, 128), torch.bfloat16).to(device)
    with pytest.raises(ValueError, match="row_index is on cpu, but input on cuda"):
        flashnorm.rmsnorm(x, None, row_index=torch.arange(5))
    with pytest.raises(ValueError, match="input_scale is on cpu, but input on cuda"):
        flashnorm.rmsnorm(rows((5, 128), torch.int8).to(device), None, input_scale=torch.ones(1))


@pytest.mark.cpu_only
def test_an_empty_pool_has_no_rows_to_pick() -> None:
    x, weight = torch.zeros(0, 128), torch.ones(128)
    assert flashnorm.rmsnorm(x, weight, row_index=torch.zeros(0, dtype=torch.int64)).shape == (0, 128)
    with pytest.raises(ValueError, match="row_index"):
        flashnorm.rmsnorm(x, weight, row_index=torch.zeros(2, dtype=torch.int64))
