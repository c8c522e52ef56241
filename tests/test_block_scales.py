"""Scales that operators find themselves: where they lie, what surrounds them, and what a GEMM makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import flashnorm
from tests import oracles
from tests.buffers import Guarded, padded
from tests.canonical import Blocks, widen
from tests.canonical.quantise import by_block
from tests.combos import BLOCKED, COMBOS, DTYPES, DYNAMIC, Combo
from tests.inputs import gains, generator, rows
from tests.judge import FLOORS, check, judge
from tests.problem import SCALE_DTYPES, Problem
from tests.test_bits import assert_same
from tests.tolerance import MIN_SHARE_ELEMENTS, Pool, assert_same_bits

MAKERS = tuple(c for c in COMBOS if c.makes_scales and not c.scaled)
DYNAMICS = tuple(c for c in MAKERS if c.op == DYNAMIC)
COLUMNS = tuple(c for c in MAKERS if c.column or c.op == BLOCKED)
USUAL_BLOCKED = next(c for c in MAKERS if c.op == BLOCKED)
USUAL_DYNAMIC = next(c for c in MAKERS if c.op == DYNAMIC)
CODE_ERROR = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17), "i8": (0.0, 0.5)}  # relative; half a step at 0


# ------------------------------------------------------------------ where scales lie
@pytest.mark.parametrize("m", [1, 2, 4, 17, 127, 128, 129])
@pytest.mark.parametrize("combo", COLUMNS, ids=str)
def test_padding_is_zero_and_nothing_else_is_written(combo: Combo, m: int, route: str, device: torch.device) -> None:
    """Buffers full of 0x7F bytes, watched on all sides: `run` looks at the padding and at what surrounds it."""
    for out in ("none", "contiguous"):
        judge(Problem(combo, (m, 384), device), route, out)


@pytest.mark.parametrize("layout", ["contiguous", "heads", "transposed", "half"])
@pytest.mark.parametrize("combo", COLUMNS, ids=str)
def test_rows_of_a_grid_are_counted_flat(combo: Combo, layout: str, route: str, device: torch.device) -> None:
    """Scales have one row for each of the flattened leading dimensions, however the input lies."""
    judge(Problem(combo, (3, 5, 256), device, layout=layout), route)


@pytest.mark.gpu
@pytest.mark.parametrize("combo", [USUAL_BLOCKED, next(c for c in COLUMNS if c.form == "ue8m0_packed")], ids=str)
def test_more_rows_than_a_grid_has_in_its_other_dimensions(
    combo: Combo, exact_route: str, device: torch.device
) -> None:
    judge(Problem(combo, (65_537 * 2 + 1, 128), device), exact_route)


@pytest.mark.parametrize("h", [128, 256, 640, 1920, 7168, 16384, 16512, 24576, 33152])
def test_any_multiple_of_128(h: int, route: str, device: torch.device) -> None:
    judge(Problem(USUAL_BLOCKED, (3, h), device), route)


@pytest.mark.parametrize("h", [1, 7, 100, 127, 129, 200, 4000, 4097])
@pytest.mark.parametrize("combo", [c for c in DYNAMICS if c.block], ids=str)
def test_a_last_block_that_is_short(combo: Combo, h: int, route: str, device: torch.device) -> None:
    judge(Problem(combo, (5, h), device), route)


@pytest.mark.parametrize("combo", DYNAMICS, ids=str)
def test_what_is_returned(combo: Combo, route: str, device: torch.device) -> None:
    """Dtypes, shapes and strides of new tensors; rows are all leading dimensions flattened."""
    for shape in ((5, 300), (2, 3, 300), (300,), (4, 300)):
        call = Problem(combo, shape, device).prepare()
        with flashnorm.backend(route):
            out, scale = flashnorm.rmsnorm_dynamic_quant(**call.arguments)
        count, blocks = out[..., 0].numel(), 3 if combo.block else 1
        words = 1 if combo.form == "ue8m0_packed" else blocks
        assert out.shape == shape and out.dtype == combo.out_dtype and out.is_contiguous()
        assert scale.shape == (count, words) and scale.dtype == SCALE_DTYPES[combo.form]
        assert scale.stride() == ((1, padded(count)) if combo.column else (words, 1))


def test_what_is_not_said(device: torch.device) -> None:
    """One fp32 scale a token and e4m3; out= decides the format. No route is asked about that."""
    x = rows((5, 256), torch.bfloat16).to(device)
    with flashnorm.backend("torch"):
        out, scale = flashnorm.rmsnorm_dynamic_quant(x, None)
        assert out.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == (5, 1)
        for dtype in (torch.int8, torch.float8_e5m2):
            given = torch.empty(5, 256, dtype=dtype, device=device)
            out, _ = flashnorm.rmsnorm_dynamic_quant(x, None, out=given)
            assert out is given


@pytest.mark.parametrize("layout", ["half", "other half", "odd rows", "last 2", "transposed"])
@pytest.mark.parametrize("combo", [c for c in DYNAMICS if not c.column and c.block], ids=str)
def test_scales_of_any_stride(combo: Combo, layout: str, route: str, device: torch.device) -> None:
    problem = Problem(combo, (5, 384), device)
    want = problem.run(route)
    dtype = SCALE_DTYPES[combo.form]
    shape = (5, 3) if layout != "transposed" else (3, 5)
    guard = Guarded(None, device, layout, written=True, shape=shape, dtype=dtype, poison=0x7F)
    call = problem.prepare("contiguous")
    call.arguments["scale"] = guard.view.t() if layout == "transposed" else guard.view
    call.guards["scale"] = guard
    assert_same(call(route), want, f"scales {layout}")


@pytest.mark.parametrize("layout", ["half", "odd rows"])
def test_block_scales_with_longer_rows(layout: str, route: str, device: torch.device) -> None:
    """block_scale's last dimension is contiguous; its rows may be further apart."""
    problem = Problem(USUAL_BLOCKED, (5, 384), device)
    want = problem.run(route)
    guard = Guarded(None, device, layout, written=True, shape=(3, 8), dtype=torch.float32, poison=0x7F7F7F7F)
    call = problem.prepare()
    call.guards["block_scale"], call.arguments["block_scale"] = guard, guard.view
    assert_same(call(route), want, f"block_scale {layout}")


# ------------------------------------------------------------------ one result, whatever else is asked
@pytest.mark.parametrize("combo", [c for c in DYNAMICS if c.x == "bf16" and c.weight == "bf16"][:2], ids=str)
def test_a_side_output_changes_no_other_byte(combo: Combo, exact_route: str, device: torch.device) -> None:
    other = Problem(replace(combo, side=not combo.side), (7, 384), device).run(exact_route)
    got = Problem(combo, (7, 384), device).run(exact_route)
    assert_same_bits(got.out, other.out, "out")
    assert got.scale is not None and other.scale is not None
    assert_same_bits(got.scale, other.scale, "scale")


def test_layouts_and_packing_change_no_byte(route: str, device: torch.device) -> None:
    """Columns hold what rows hold; packed words the same bytes; both the same codes."""
    base = next(c for c in DYNAMICS if c.block and c.form == "ue8m0")
    rows_, columns, packed = (
        Problem(combo, (7, 1000), device).run(route)
        for combo in (base, replace(base, column=True), replace(base, column=True, form="ue8m0_packed"))
    )
    assert rows_.scale is not None and columns.scale is not None and packed.scale is not None
    assert_same_bits(columns.scale.contiguous(), rows_.scale, "columns")
    assert torch.equal(packed.scale.contiguous().view(torch.uint8), rows_.scale)  # 1000 / 128: eight blocks
    assert_same_bits(rows_.out, columns.out, "codes in columns")
    assert_same_bits(rows_.out, packed.out, "codes, packed")


@pytest.mark.parametrize("combo", [c for c in MAKERS if c.side], ids=str)
def test_quantising_normed_out_again_gives_the_same_bytes(combo: Combo, route: str, device: torch.device) -> None:
    """By the model, and by the operator itself on rows that it leaves as they are."""
    got = Problem(combo, (33, 1024), device).run(route)
    assert got.normed_out is not None and got.scale is not None
    blocked = combo.op == BLOCKED
    cap = 1.7 if combo.cap else None
    packed = combo.form == "ue8m0_packed"
    how = Blocks(combo.block_size, FLOORS[blocked], blocked, combo.form != "fp32", packed, cap)
    codes, scale = by_block(widen(got.normed_out), how, combo.out_dtype)
    assert_same_bits(got.out, codes, "codes")
    assert_same_bits(got.scale.contiguous(), scale, "scales")


# ------------------------------------------------------------------ what they are worth
@pytest.mark.parametrize("combo", MAKERS, ids=str)
def test_a_gemm_of_the_codes(combo: Combo, route: str, device: torch.device) -> None:
    """Codes and scales as a block-scaled GEMM takes them, against fp64, within the error of the formats.

    A code is off by half a step: 2^-4 of its size at most (e5m2: 2^-3), half of the smallest step near zero (int8:
    everywhere), in units of its block's scale. The norm before it was rounded to T. Scales are read as the GEMM reads
    them: column-major, row m of block b at b * round_up(M, 4) + m.
    """
    m, k, n = 37, 1024, 64
    problem = Problem(combo, (m, k), device, cap=1e4)
    want = problem.oracle()
    call = problem.prepare()
    with flashnorm.backend(route):
        left = call.left(getattr(flashnorm, combo.op)(**call.arguments))
    scale, size = left["scale"], combo.block_size or k
    count = k // size
    if combo.op == BLOCKED or combo.column:
        words = scale.shape[0] if combo.op == BLOCKED else scale.shape[1]
        flat = scale.as_strided((words * padded(m),), (1,)).cpu()  # a copy of the view has no padding
        index = torch.arange(words)[None] * padded(m) + torch.arange(m)[:, None]
        scale = flat[index]
    scale, codes = scale.cpu(), left["out"].cpu()
    if combo.form == "ue8m0_packed":
        scale = torch.stack([(scale[:, b // 4] >> (8 * (b % 4))) & 0xFF for b in range(count)], 1)
    scale = scale.double() if combo.form == "fp32" else torch.exp2(scale.double() - 127)
    other = torch.randn(k, n, generator=generator("gemm")).double()
    codes = (codes.float() if combo.out != "i8" else codes).double()
    got = torch.zeros(m, n, dtype=torch.float64)
    for b in range(count):  # a block's products are summed before its scale comes in
        part = slice(b * size, (b + 1) * size)
        got += scale[:, b : b + 1] * (codes[:, part] @ other[part])
    relative, absolute = CODE_ERROR[combo.out or "e4m3"]
    spread = scale.repeat_interleave(size, 1)
    rounding = {"bf16": 2.0**-9, "f16": 2.0**-12}.get(combo.x, 2.0**-22)
    size_of = want.out.abs()
    error = torch.maximum(size_of * (relative + 2.0**-20), spread * absolute) + size_of * (2 * rounding) * (
        1 + relative
    )
    assert bool(((got - want.out @ other).abs() <= error @ other.abs()).all())
    assert bool((codes.abs() <= oracles.largest(combo.out_dtype)).all())


@pytest.mark.parametrize("combo", [USUAL_DYNAMIC, next(c for c in DYNAMICS if c.x == "f16" and c.out == "i8")], ids=str)
def test_scales_of_very_many_tokens(combo: Combo, route: str, device: torch.device) -> None:
    """At least 99.9 % of the scales are the oracle's: a share means something over 100,000 of them."""
    pool = Pool(combo.numerics)
    check(Problem(combo, (MIN_SHARE_ELEMENTS, 24), device), route, pool)
    assert pool.shares["scales"].elements >= MIN_SHARE_ELEMENTS
    pool.judge(f"{combo} on {route}")


# ------------------------------------------------------------------ the cap
@pytest.mark.parametrize("combo", [c for c in DYNAMICS if c.cap], ids=str)
def test_a_cap_clips(combo: Combo, route: str, device: torch.device) -> None:
    """Rows above it saturate, rows below it do not notice; a kernel serves any value."""
    for cap in (1e-8, 0.03, 1.0, 1e30):
        judge(Problem(combo, (9, 300), device, cap=cap), route)


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [0.0, float("nan"), float("inf"), -1.0, 1e-45], ids=str)
@pytest.mark.parametrize("combo", [c for c in DYNAMICS if c.cap == "device"], ids=str)
def test_a_cap_on_the_device_is_not_looked_at(combo: Combo, cap: float, exact_route: str, device: torch.device) -> None:
    """It follows IEEE arithmetic, as a scale does."""
    problem = Problem(combo, (9, 300), device, cap=cap)
    problem.check_bits(problem.run(exact_route), f"cap {cap}")


def test_a_cap_by_value_or_by_tensor(route: str, device: torch.device) -> None:
    x, weight = rows((5, 256), torch.bfloat16).to(device), gains((256,), torch.bfloat16).to(device)
    with flashnorm.backend(route):
        want = flashnorm.rmsnorm_dynamic_quant(x, weight, scale_ub=0.75)
        for where in {"cpu", device.type}:
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                for shape in ((), (1,)):
                    cap = torch.full(shape, 0.75, dtype=dtype, device=where)
                    got = flashnorm.rmsnorm_dynamic_quant(x, weight, scale_ub=cap)
                    assert_same_bits(got[0], want[0], f"cap {cap}")
                    assert_same_bits(got[1], want[1], f"cap {cap}")
    assert float(want[1].max()) == float(torch.tensor(0.75) / 448)


# ------------------------------------------------------------------ refused
def test_column_scales_need_their_padding(device: torch.device) -> None:
    """A view whose memory ends before the padding does is refused, not written past."""
    x = rows((5, 256), torch.bfloat16).to(device)
    options: dict[str, Any] = {"granularity": 128, "scale_layout": "column"}
    whole = torch.full((16,), 7.0, device=device)
    for bad in (whole[:13].as_strided((5, 2), (1, 5)), torch.empty(5, 2, device=device)):
        with pytest.raises(ValueError, match=r"rmsnorm_dynamic_quant: scale must have strides \(1, 8\)"):
            flashnorm.rmsnorm_dynamic_quant(x, None, scale=bad, **options)
    short = torch.empty(13, device=device).as_strided((5, 2), (1, 8))
    with pytest.raises(ValueError, match="scale"):
        flashnorm.rmsnorm_dynamic_quant(x, None, scale=short, **options)
    fits = whole.as_strided((5, 2), (1, 8))
    with flashnorm.backend("torch"):
        _, scale = flashnorm.rmsnorm_dynamic_quant(x, None, scale=fits, **options)
    assert scale is fits and bool((whole.view(2, 8)[:, 5:] == 0).all()) and not bool((whole == 7).any())


@pytest.mark.parametrize("warm", [False, True])
def test_memory_that_ends_before_the_padding(warm: bool, device: torch.device) -> None:
    """The same shape and strides as a good one, and nothing behind it: refused, also by a warm call."""
    combo = next(c for c in DYNAMICS if c.column and c.side and c.x == "bf16" and c.residual)
    call = Problem(combo, (5, 256), device).prepare("contiguous")
    memory = np.full(64, 7, np.float32)
    short = torch.from_numpy(memory[:13]) if device.type == "cpu" else torch.full((13,), 7.0, device=device)
    if warm:
        for _ in range(2):
            flashnorm.rmsnorm_dynamic_quant(**call.arguments)
    call.arguments["scale"] = short.as_strided((5, 2), (1, 8))
    with pytest.raises(ValueError, match="rmsnorm_dynamic_quant: scale"):
        flashnorm.rmsnorm_dynamic_quant(**call.arguments)
    call.arguments["residual"] = None  # another operator stands behind this
    if warm:
        fits = torch.zeros(16, device=device).as_strided((5, 2), (1, 8))
        flashnorm.rmsnorm_dynamic_quant(**{**call.arguments, "scale": fits})
    with pytest.raises(ValueError, match="rmsnorm_dynamic_quant: scale"):
        flashnorm.rmsnorm_dynamic_quant(**call.arguments)
    assert bool((memory == 7).all()) and bool((short == 7).all())


def test_padding_is_written_too(device: torch.device) -> None:
    """What lies where the padding of column scales does would be overwritten with zeros: refused as an overlap."""
    memory = torch.full((8,), 2.0, device=device)
    scale, weight = memory.as_strided((5, 1), (1, 8)), memory[5:8]
    x = torch.rand(5, 3, device=device)
    for _ in range(2):
        with flashnorm.backend("torch"), pytest.raises(ValueError, match="overlap"):
            flashnorm.rmsnorm_dynamic_quant(x, weight, scale=scale, scale_layout="column")
        assert bool((memory == 2).all())
        with flashnorm.backend("torch"):  # the second time after a good call of the same layout
            fits = torch.zeros(8, device=device).as_strided((5, 1), (1, 8))
            flashnorm.rmsnorm_dynamic_quant(x, weight.clone(), scale=fits, scale_layout="column")


WRONG = [
    ({"granularity": 64}, "granularity"),
    ({"granularity": "row"}, "granularity"),
    ({"dtype": torch.float16}, "dtype"),
    ({"scale_format": "e8m0"}, "scale_format"),
    ({"scale_layout": "tma"}, "scale_layout"),
    ({"scale_format": "ue8m0_packed"}, "ue8m0_packed"),
    ({"scale_format": "ue8m0_packed", "granularity": 128}, "ue8m0_packed"),
    ({"scale_format": "ue8m0_packed", "scale_layout": "column"}, "ue8m0_packed"),
    ({"granularity": 128, "scale_ub": 1.0}, "scale_ub"),
    ({"scale_ub": 0.0}, "scale_ub"),
    ({"scale_ub": -1.0}, "scale_ub"),
    ({"scale_ub": float("nan")}, "scale_ub"),
    ({"scale_ub": float("inf")}, "scale_ub"),
]


@pytest.mark.parametrize(("options", "name"), WRONG, ids=str)
def test_options_that_do_not_go(options: dict[str, object], name: str, device: torch.device) -> None:
    x = rows((5, 256), torch.bfloat16).to(device)
    residual = x.clone()
    for _ in range(2):  # the second time after a good call
        with pytest.raises(ValueError, match=f"rmsnorm_dynamic_quant: .*{name}"):
            flashnorm.rmsnorm_dynamic_quant(x, None, residual=residual, **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"rmsnorm_dynamic_quant: .*{name}"):
            flashnorm.rmsnorm_dynamic_quant(x, None, **options)  # type: ignore[arg-type]
        assert torch.equal(residual, x)
        flashnorm.rmsnorm_dynamic_quant(x, None)


def test_every_dtype_of_scales_is_refused_but_one(device: torch.device) -> None:
    x = rows((4, 256), torch.bfloat16).to(device)
    for form in ("fp32", "ue8m0", "ue8m0_packed"):
        right = SCALE_DTYPES[form]
        options = {"granularity": 128, "scale_format": form, "scale_layout": "column"}
        for dtype in {*SCALE_DTYPES.values(), *DTYPES.values()} - {right}:
            shape = (1, 4) if form == "ue8m0_packed" else (2, 4)
            bad = torch.zeros(shape, device=device).to(dtype).t()
            with pytest.raises(ValueError, match="scale must have dtype"):
                flashnorm.rmsnorm_dynamic_quant(x, None, scale=bad, **options)
