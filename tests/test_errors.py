"""What every operator refuses of its tensors: which exception, that it names the argument, that nothing was written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashnorm
from tests.combos import BLOCKED, DYNAMIC, OLD, OPS, STATIC
from tests.inputs import gains, rows
from tests.problem import Problem
from tests.refusals import (
    BF16,
    EVERY,
    EVERY_GAIN,
    FULL,
    GAINS,
    LIKE_THE_INPUT,
    SIDES,
    WRITTEN,
    H,
    M,
    accepted,
    elsewhere,
    every_argument,
    every_op,
    filled,
    good,
    like_the_input,
    refuse,
)
from tests.tolerance import assert_same_bits

BROADCAST = ("rmsnorm", "gemma_rmsnorm", "rmsnorm_quant", "gemma_rmsnorm_quant")
REQUIRED = [(op, name) for op, name in EVERY if name == "input" or (name not in GAINS and op != DYNAMIC)]
REQUIRED = [(op, name) for op, name in REQUIRED if name != "out" or op in (*STATIC, BLOCKED)]
REQUIRED = [(op, name) for op, name in REQUIRED if op in OLD or name in ("input", "residual")]


# ------------------------------------------------------------------ types, dtypes, devices
@pytest.mark.parametrize("value", [[1.0], 3.0, "x", object()], ids=lambda value: type(value).__name__)
@every_argument
def test_not_a_tensor(op: str, name: str, value: object, device: torch.device) -> None:
    refuse(op, device, TypeError, op, name, "Tensor", type(value).__name__, change=lambda t: {name: value})


@pytest.mark.parametrize(("op", "name"), REQUIRED)
def test_none_where_a_tensor_is_needed(op: str, name: str, device: torch.device) -> None:
    refuse(op, device, TypeError, op, name, "NoneType", change=lambda t: {name: None})


WRONG = ("float64", "int32", "uint8", "int8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "bfloat16")


WRONG_FOR = [(op, name, dtype) for op, name in EVERY for dtype in WRONG if dtype not in accepted(op, name)]
WRONG_FOR = [(op, name, dtype) for op, name, dtype in WRONG_FOR if dtype not in elsewhere(op, name)]


@pytest.mark.parametrize(("op", "name", "dtype"), WRONG_FOR)
def test_wrong_dtype(op: str, name: str, dtype: str, device: torch.device) -> None:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        like = given[name]
        return {name: torch.zeros_like(like, dtype=getattr(torch, dtype), memory_format=torch.preserve_format)}

    refuse(op, device, ValueError, op, name, dtype, *accepted(op, name), change=change)


@every_argument
def test_wrong_device(op: str, name: str, device: torch.device) -> None:
    others = ["meta"] + (["cpu"] if device.type == "cuda" else [])
    for other in others:
        needles = (device.type, other) if name != "input" else (device.type,)
        refuse(op, device, ValueError, op, *needles, change=lambda t, o=other: {name: t[name].to(o)})


@every_argument
def test_sparse(op: str, name: str, device: torch.device) -> None:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        return {name: torch.zeros(given[name].shape, device=device).to_sparse()}

    refuse(op, device, ValueError, op, name, change=change)


# ------------------------------------------------------------------ shapes
BAD_ROWS = [(M, H // 2), (M, H + 1), (M, 1), (1, H), (M - 1, H), (H,), (M, 1, H), (2 * M, H // 2), (H, M)]


@pytest.mark.parametrize("shape", BAD_ROWS, ids=str)
@pytest.mark.parametrize(("op", "name"), LIKE_THE_INPUT)
def test_shape_unlike_the_input(op: str, name: str, shape: tuple[int, ...], device: torch.device) -> None:
    shape = like_the_input(op, name, *shape)

    def change(given: dict[str, Any]) -> dict[str, Any]:
        return {name: torch.zeros(shape, device=device).to(given[name].dtype)}

    refuse(op, device, ValueError, op, name, str(shape), str(like_the_input(op, name, M, H)), change=change)


@pytest.mark.parametrize("op", [op for op in OPS if FULL[op].residual and op != BLOCKED])
def test_residual_of_half_the_width(op: str, device: torch.device) -> None:
    x, residual = (rows((128, h), BF16).to(device) for h in (32, 16))
    changed = {"input": x, "residual": residual, "weight": None, "gemma": None, "beta": None}
    if "out" in good(op, device).arguments:
        changed |= {"out": torch.zeros(128, 32, device=device).to(FULL[op].out_dtype)}
    changed |= {"scale": None, "normed_out": None} if op == DYNAMIC else {}
    needles = ("residual", "(128, 16)", "(128, 32)")
    names = good(op, device).arguments
    refuse(op, device, ValueError, *needles, change=lambda t: {n: v for n, v in changed.items() if n in names})


BAD_GAINS = [
    (),
    (1,),
    (H - 1,),
    (H + 1,),
    (2 * H,),
    (H, 1),
    (1, 1),
    (M, 1),
    (M + 1, H),
    (H, M),
    (2, M, H),
    (1, M, H),
    (0, H),
]


@pytest.mark.parametrize("shape", BAD_GAINS, ids=str)
@pytest.mark.parametrize(("op", "name"), EVERY_GAIN)
def test_gain_or_bias_that_does_not_fit(op: str, name: str, shape: tuple[int, ...], device: torch.device) -> None:
    """Wrong width, a column, more rows than the input has, or a rank that would enlarge the result."""
    refuse(op, device, ValueError, op, name, str(shape), str(H), change=lambda t: {name: filled(shape, device)})


@pytest.mark.parametrize("shape", [(M, H), (1, H), (1, 1, H)], ids=str)
@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in EVERY_GAIN if op not in BROADCAST])
def test_one_row_for_all_where_nothing_broadcasts(
    op: str, name: str, shape: tuple[int, ...], device: torch.device
) -> None:
    refuse(op, device, ValueError, op, name, str(shape), f"({H},)", change=lambda t: {name: filled(shape, device)})


def test_a_square_input_does_not_make_a_column_fit(device: torch.device) -> None:
    x = rows((H, H), BF16).to(device)
    for shape in ((H, 1), (1, 1), (H, H, H)):
        with pytest.raises(ValueError, match="weight"):
            flashnorm.rmsnorm(x, filled(shape, device))


@pytest.mark.parametrize("shape", [(1,), (1, 5), (1, 8), (2, 4), (4,), (4, 1), (1, 4, 1), (0, 4), (1, 0)], ids=str)
def test_block_scale_that_does_not_fit(shape: tuple[int, ...], device: torch.device) -> None:
    """(H / 128, round_up(M, 4)): here (1, 4)."""
    bad = torch.zeros(shape, device=device)
    refuse(BLOCKED, device, ValueError, BLOCKED, "block_scale", str(shape), change=lambda t: {"block_scale": bad})


def test_block_scale_of_any_rows(device: torch.device) -> None:
    """M = 5 wants eight columns: five are not enough, and neither are twelve."""
    names = ("out", "normed_out", "input", "residual")
    five = {name: value for name, value in good(BLOCKED, device).arguments.items() if name in names}
    five = {name: value[:1].repeat(5, 1) for name, value in five.items()}
    for shape in ((1, 5), (1, 4), (1, 12), (2, 8)):
        bad = torch.zeros(shape, device=device)
        refuse(BLOCKED, device, ValueError, "block_scale", change=lambda t, bad=bad: {**five, "block_scale": bad})
    for bad in (torch.zeros(8, 2, device=device).t(), torch.zeros(2, 16, device=device)[:, ::2]):
        changed = {"block_scale": bad[:1]}
        refuse(BLOCKED, device, ValueError, "block_scale", change=lambda t, c=changed: {**five, **c})


@pytest.mark.parametrize("shape", [(1,), (M,), (M, 2), (1, M), (M + 1, 1), (M, 1, 1), (0, 1)], ids=str)
def test_dynamic_scale_that_does_not_fit(shape: tuple[int, ...], device: torch.device) -> None:
    bad = torch.zeros(shape, device=device)
    needles = (DYNAMIC, "scale", str(shape), str((M, 1)))
    refuse(DYNAMIC, device, ValueError, *needles, change=lambda t: {"scale": bad, "scale_layout": "row"})


@pytest.mark.parametrize("h", [1, 64, 100, 127, 129, 192, 1000])
def test_blocks_must_be_whole(h: int, device: torch.device) -> None:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        names = ("out", "normed_out", "input", "residual")
        return {**{n: torch.zeros(M, h, device=device).to(given[n].dtype) for n in names}, "weight": None}

    refuse(BLOCKED, device, ValueError, BLOCKED, "128", str(h), change=change)


@every_op
def test_hidden_size_out_of_range(op: str, device: torch.device) -> None:
    for shape, needle in (((), "0-d"), ((M, 0), "0"), ((1, 262_272), "262272")):

        def change(given: dict[str, Any], shape: tuple[int, ...] = shape) -> dict[str, Any]:
            changed: dict[str, Any] = {}
            for name, value in given.items():
                if name in ("input", "residual", "out", "normed_out"):
                    changed[name] = torch.ones(shape, device=device).to(value.dtype)
                elif name in GAINS:
                    changed[name] = None
            return changed | ({"scale": None} if op == DYNAMIC else {})

        refuse(op, device, ValueError, op, "input", needle, change=change)


@every_op
def test_the_longest_rows(op: str, device: torch.device) -> None:
    """262,144 elements are taken."""
    problem = Problem(FULL[op], (1, 262_144), device)
    wide = problem.run(None).out.shape[-1]
    assert wide == (131_072 if FULL[op].out == "e2m1" else 262_144)


@every_op
def test_empty_inputs_are_checked_too(op: str, device: torch.device) -> None:
    def empty(given: dict[str, Any]) -> dict[str, Any]:
        changed = {n: v[:0] for n, v in given.items() if n in ("input", "residual", "out", "normed_out")}
        changed |= {"block_scale": given["block_scale"][:, :0]} if op == BLOCKED else {}
        return changed | ({"scale": None} if op == DYNAMIC else {})

    gain = next(name for o, name in EVERY_GAIN if o == op)
    bad = filled((H // 2,), device)
    refuse(op, device, ValueError, gain, change=lambda t: {**empty(t), gain: bad})
    refuse(op, device, ValueError, "eps", change=lambda t: {**empty(t), "eps": math.nan})
    refuse(op, device, ValueError, "numerics", change=lambda t: {**empty(t), "numerics": "x"})


# ------------------------------------------------------------------ memory
@pytest.mark.parametrize("kind", ["stride 0", "rows overlap", "columns repeat"])
@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in WRITTEN if "scale" not in name])
def test_written_tensors_have_no_element_twice(op: str, name: str, kind: str, device: torch.device) -> None:
    shape = like_the_input(op, name, M, H)
    strides = {"stride 0": (0, 1), "rows overlap": (shape[1] // 2, 1), "columns repeat": (shape[1], 0)}
    refuse(
        op, device, ValueError, op, name, "stride", change=lambda t: {name: t[name].as_strided(shape, strides[kind])}
    )


def test_scales_have_no_element_twice(device: torch.device) -> None:
    bad = torch.zeros(4, device=device).expand(2, 4)
    x = rows((M, 256), BF16).to(device)
    out, side = torch.zeros(M, 256, device=device).to(torch.float8_e4m3fn), torch.zeros_like(x)
    with pytest.raises(ValueError, match="block_scale is written, so its elements must not overlap"):
        flashnorm.fused_add_rmsnorm_fp8_block_quant(out, bad, side, x, x.clone(), None)
    with pytest.raises(ValueError, match="scale"):
        flashnorm.rmsnorm_dynamic_quant(x, None, granularity=128, scale=bad.t().contiguous()[:, :1].expand(4, 2))


@pytest.mark.parametrize("op", [op for op in OPS if FULL[op].residual])
def test_input_is_residual(op: str, device: torch.device) -> None:
    needles = (op, "input", "residual", "overlap")
    refuse(op, device, ValueError, *needles, change=lambda t: {"residual": t["input"]})
    refuse(op, device, ValueError, *needles, change=lambda t: {"residual": t["input"].view(M, H)})
    shared = rows((M + 1, H), BF16).to(device)
    refuse(op, device, ValueError, *needles, change=lambda t: {"input": shared[:M], "residual": shared[1:]})
    flat = rows((M * H + 1,), BF16).to(device)
    halves = {"input": flat[:-1].view(M, H), "residual": flat[1:].view(M, H)}
    refuse(op, device, ValueError, *needles, change=lambda t: halves)
    wide = rows((M, H + 8), BF16).to(device)
    columns = {"input": wide[:, :H], "residual": wide[:, 8:]}
    refuse(op, device, ValueError, *needles, change=lambda t: columns)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in WRITTEN if name in ("input", "residual", *SIDES)])
def test_a_gain_inside_a_written_tensor(op: str, name: str, device: torch.device) -> None:
    gain = next(n for o, n in EVERY_GAIN if o == op)
    refuse(op, device, ValueError, op, gain, name, "overlap", change=lambda t: {gain: t[name][1]})


@every_argument
def test_freed_memory(op: str, name: str, device: torch.device) -> None:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        gone = given[name].clone()
        gone.untyped_storage().resize_(0)
        return {name: gone}

    call = good(op, device)
    call.arguments |= change(call.arguments)
    with pytest.raises(ValueError, match=f"{op}: {name} .*memory"):
        getattr(flashnorm, op)(**call.arguments)
    assert all(guard.unchanged() for guard in call.guards.values())


PAIRS = [(op, a, b) for op, a in WRITTEN for o, b in EVERY if o == op and a != b and "input" not in (a, b)]
# Scales in columns have padding: their overlaps are a test of their own.
PAIRS = [(op, a, b) for op, a, b in PAIRS if a not in ("residual", "scale") and b != "scale"]


@pytest.mark.parametrize(("op", "a", "b"), PAIRS)
def test_two_tensors_in_one_memory(op: str, a: str, b: str, device: torch.device) -> None:
    """Every written tensor is apart from every other one, whatever their dtypes."""

    def change(given: dict[str, Any]) -> dict[str, Any]:
        memory = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
        changed = {}
        for name in (a, b):
            t = given[name]
            size = t.numel() * t.element_size()
            changed[name] = memory[:size].view(t.dtype).view(t.shape)
        return changed

    refuse(op, device, ValueError, op, a, b, "overlap", change=change)


@pytest.mark.parametrize("op", ["rmsnorm", "gemma_rmsnorm", "layernorm", "fused_rmsnorm_silu"])
def test_out_overlaps_an_input(op: str, device: torch.device) -> None:
    flat = rows((M * H + 1,), BF16).to(device)
    shared = rows((2 * M, H), BF16).to(device)
    square = rows((H, H), BF16).to(device)
    pairs = {
        "one element later": (flat[:-1].view(M, H), flat[1:].view(M, H)),
        "one row later": (shared[:M], shared[1 : M + 1]),
        "every other row": (shared[:M], shared[::2]),
        "transposed in place": (square, square.t()),
    }
    for x, out in pairs.values():
        refuse(op, device, ValueError, op, "out", "overlap", change=lambda t, x=x, out=out: {"input": x, "out": out})
    gain = next(name for o, name in EVERY_GAIN if o == op)
    refuse(op, device, ValueError, op, "out", gain, "overlap", change=lambda t: {gain: t["out"][2]})


@pytest.mark.parametrize("op", [op for op in OPS if FULL[op].makes_codes])
def test_codes_over_the_input(op: str, device: torch.device) -> None:
    """Codes are half as wide: written over the input, they would overwrite what is still to be read."""

    def change(given: dict[str, Any]) -> dict[str, Any]:
        return {name: given["input"].view(given[name].dtype)[:, : given[name].shape[1]]}

    name = "y_fp4" if FULL[op].out == "e2m1" else "out"
    refuse(op, device, ValueError, op, name, "input", "overlap", change=change)


def test_neighbours_are_no_overlap(device: torch.device) -> None:
    """Interleaved and adjacent tensors share no element: they are fine."""
    weight = gains((H,), BF16).to(device)
    wide = rows((M, 2 * H), BF16).to(device)
    want = flashnorm.rmsnorm(wide[:, :H].contiguous(), weight)
    assert_same_bits(flashnorm.rmsnorm(wide[:, :H], weight, out=wide[:, H:]), want, "the other half")
    stack = rows((2 * M, H), BF16).to(device)
    want = flashnorm.rmsnorm(stack[::2].contiguous(), weight)
    assert_same_bits(flashnorm.rmsnorm(stack[::2], weight, out=stack[1::2]), want, "alternate rows")
    wide = rows((M, 2 * H), BF16).to(device)
    x, residual = wide[:, :H].clone(), wide[:, H:].clone()
    flashnorm.fused_add_rmsnorm(x, residual, weight)
    flashnorm.fused_add_rmsnorm(wide[:, :H], wide[:, H:], weight)
    assert_same_bits(wide, torch.cat([x, residual], -1), "input and residual of one buffer")
