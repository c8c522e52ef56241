"""NVFP4 and MXFP4 to the byte: every code and scale, every tie, special values, rules, layouts; what a GEMM gets.

A row of ones has a norm of 1 with eps = 0, so that the weight itself goes through the store: nothing depends on an
order of additions, and the torch route owes the same bytes as every other.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import flashnorm
from tests.buffers import Guarded, tiled
from tests.canonical import tiles
from tests.canonical.codes import E2M1, magnitudes, nibbles
from tests.combos import COMBOS, FP4, MXFP8, SCALED, Combo
from tests.inputs import gains, generator, rows
from tests.judge import judge
from tests.problem import Problem, public_names
from tests.test_bits import assert_same
from tests.test_codes import PATTERNS, sent
from tests.tolerance import assert_same_bits

INF, NAN = math.inf, math.nan
NVFP4 = Combo(FP4[0], "f32", "f32", out="e2m1", block=16, form="e4m3")
MXFP4 = Combo(FP4[0], "f32", "f32", out="e2m1", block=32, form="ue8m0")
MXFP4_OCP = replace(MXFP4, rule="ocp")
WHOLE = tuple(c for c in SCALED if c.scaled)
PLACED = tuple(c for c in WHOLE if c.op in (*FP4, *MXFP8) and c.x == "bf16")
E4M3 = magnitudes(torch.float8_e4m3fn)[1:]  # the positive scales
VALUES = magnitudes(E2M1)


def codes_of(problem: Problem, route: str) -> tuple[np.ndarray, list[int]]:
    """(codes of the first row by block, the bytes of its scales)."""
    got = problem.run(route)
    assert got.scale is not None
    return nibbles(got.out[0]).reshape(-1, problem.combo.block), got.scale[0].view(torch.uint8).tolist()


def weights(blocks: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(blocks.astype(np.float32).reshape(-1))


# ------------------------------------------------------------------ codes and scales
@pytest.mark.parametrize("gain", [None, 0.5, 448.0])
def test_every_code_with_every_scale(gain: float | None, route: str, device: torch.device) -> None:
    """A block of all sixteen codes times a scale comes back as it is: 126 scales, G in them and not in the codes."""
    sixteen = np.concatenate([VALUES, -VALUES])
    weight = weights(E4M3[:, None] * sixteen / np.float32(gain or 1.0))
    problem = sent(replace(NVFP4, scale=gain and "value"), weight, device, scale=gain)
    codes, scale = codes_of(problem, route)
    assert scale == list(range(1, 0x7F))
    assert codes.tolist() == [list(range(16))] * 126


def test_every_tie_with_every_scale(route: str, device: torch.device) -> None:
    """Midpoints of neighbours in units of the stored scale, and fp32 numbers up to three steps beside them."""
    middle = (VALUES[:-1] + VALUES[1:]) / 2
    near = [E4M3[:, None] * middle]
    for side in (np.float32(-INF), np.float32(INF)):
        step = near[0]
        for _ in range(3):
            step = np.nextafter(step, side)
            near.append(step)
    beside = np.concatenate(near, -1)  # [scales, 49]
    beside = np.concatenate([beside, -beside], -1)
    beside = np.pad(beside, ((0, 0), (0, -beside.shape[1] % 15))).reshape(len(E4M3), -1, 15)
    top = np.broadcast_to(E4M3[:, None, None] * 6, (*beside.shape[:2], 1))
    problem = sent(NVFP4, weights(np.concatenate([top, beside], -1)), device)
    got = problem.run(route)
    problem.check_bits(got, f"on {route}")
    first = nibbles(got.out[0]).reshape(len(E4M3), -1, 16)[:, :, 1:].reshape(len(E4M3), -1)
    code = np.arange(7)
    assert (first[:, :7] == code + code % 2).all(), "ties go to the even code"


@pytest.mark.parametrize("combo", [MXFP4, MXFP4_OCP], ids=str)
def test_every_code_with_every_power(combo: Combo, route: str, device: torch.device) -> None:
    """All powers of two that fp32 has room for: bytes 1 to 252, with subnormal elements at the low end."""
    sixteen = np.concatenate([VALUES, -VALUES])
    powers = np.exp2(np.arange(1, 253) - 127.0)
    blocks = np.tile(powers[:, None] * sixteen, 2)
    codes, scale = codes_of(sent(combo, weights(blocks), device), route)
    assert scale == list(range(1, 253))
    assert codes.tolist() == [[*range(16), *range(16)]] * 252


@pytest.mark.parametrize("combo", [c for c in COMBOS if c.scaled and c.weight is not None], ids=str)
def test_special_blocks(combo: Combo, route: str, device: torch.device) -> None:
    """Each pattern in a block of its own, in every operator: no block spoils another one."""
    if route == "torch" and combo.op not in (*FP4, *MXFP8):
        pytest.skip("PyTorch's own exponential has other bits")
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[combo.weight or ""]
    weight = torch.cat([fill(combo.block, dtype) for fill in PATTERNS.values()])
    problem = sent(combo, weight, device, rows=3)
    problem.check_bits(problem.run(route, "contiguous"), f"on {route}")


def block(*values: float, rest: float = 0.0) -> np.ndarray:
    return np.array([*values, *[rest] * (16 - len(values))], np.float32)


def test_what_the_bytes_are(route: str, device: torch.device) -> None:
    """The table of special values itself, no model in between."""
    cases: dict[str, tuple[np.ndarray, int, list[int]]] = {
        "zeros of both signs": (block(0.0, -0.0), 0, [0, 0]),
        "NaN": (block(1.0, -1.0, NAN), 0x7F, [7, 7, 7]),
        "a negative NaN": (block(-NAN, -1.0), 0x7F, [7, 7]),
        "NaN beside an infinity": (block(INF, NAN, -INF), 0x7F, [7, 7, 7]),
        "infinity": (block(INF, -INF, 300.0, -300.0, -0.0), 0x7E, [7, 15, 1, 9, 8]),  # 300 / 448 = 0.67
        "the largest": (block(3.4e38, -3.4e38, 0.0), 0x7E, [7, 15, 0]),
        "scale 448": (block(2688.0, -2688.0, 1e-30, -1e-30), 0x7E, [7, 15, 0, 8]),
        "the smallest scale": (block(6 * 2.0**-9, -(2.0**-9)), 0x01, [7, 10]),
        "a tie between no scale and the smallest": (block(6 * 2.0**-10, -(2.0**-10)), 0x00, [0, 0]),
        "a hair above it": (block(6.001 * 2.0**-10, -(6.001 * 2.0**-10)), 0x01, [5, 13]),
        "subnormal numbers": (block(1e-40, -1e-40), 0x00, [0, 0]),
    }
    weight = weights(np.stack([values for values, _, _ in cases.values()]))
    codes, scale = codes_of(sent(NVFP4, weight, device), route)
    for i, (name, (_, byte, want)) in enumerate(cases.items()):
        assert scale[i] == byte, name
        rest = 7 if byte == 0x7F else 0
        assert codes[i].tolist() == [*want, *[rest] * (16 - len(want))], name


@pytest.mark.parametrize(("gain", "byte", "code"), [(1e30, 0x7E, 7), (2.0**-12, 0, 0), (1e-38, 0, 0), (3e38, 0x7E, 7)])
def test_a_global_scale_of_any_size(gain: float, byte: int, code: int, route: str, device: torch.device) -> None:
    """Past the largest scale codes saturate; below the smallest everything is 0, signs too."""
    problem = sent(replace(NVFP4, scale="value"), weights(block(6.0, -6.0, 0.0, -0.0)), device, scale=gain)
    codes, scale = codes_of(problem, route)
    assert scale == [byte] and codes[0][:2].tolist() == [code, code + 8 if code else 0]
    problem.check_bits(problem.run(route), f"on {route}")


@pytest.mark.gpu
@pytest.mark.parametrize("gain", [0.0, -0.0, NAN, INF, -1.0, 2.0**-149], ids=str)
def test_a_global_scale_on_the_device_is_not_looked_at(gain: float, exact_route: str, device: torch.device) -> None:
    """It goes through the same operations as any other: NaN makes scales of NaN; a negative one (-0) is no error."""
    for dtype in ("f32", "f16"):
        problem = sent(replace(NVFP4, scale=dtype), weights(block(6.0, -3.0, 1.0, rest=0.5)), device, scale=gain)
        if math.copysign(1.0, gain) > 0 or math.isnan(gain):
            problem.check_bits(problem.run(exact_route), f"G {gain}")
        else:
            problem.run(exact_route)


# ------------------------------------------------------------------ rules
LARGEST = {"e2m1": 6.0, "e4m3": 448.0}


@pytest.mark.parametrize("out", ["e2m1", "e4m3"])
@pytest.mark.parametrize("rule", ["up", "ocp"])
def test_the_rules_by_their_definitions(out: str, rule: str, route: str, device: torch.device) -> None:
    """amax over all of fp32, powers of two and their neighbours: 2^ceil(log2(a / Q)), 2^(floor(log2 a) - d)."""
    top = LARGEST[out]
    powers = np.exp2(np.arange(-149, 128, dtype=np.float64)).astype(np.float32)
    at_top = (powers[8:-10].astype(np.float64) * top).astype(np.float32)
    amax = np.concatenate([powers, np.nextafter(powers[1:], np.float32(0)), at_top])
    amax = np.concatenate([amax, np.nextafter(amax, np.float32(INF)), [np.finfo(np.float32).max]]).astype(np.float32)
    amax = amax[np.isfinite(amax)]
    blocks = np.zeros((len(amax), 32), np.float32)
    blocks[:, 5] = -amax
    combo = Combo(FP4[0] if out == "e2m1" else MXFP8[0], "f32", "f32", out=out, block=32, form="ue8m0", rule=rule)
    got = sent(combo, weights(blocks), device).run(route)
    assert got.scale is not None
    want = []
    for a in amax.tolist():
        quotient = float(np.float32(a) / np.float32(top))  # in fp32, as the specification has it
        part, exponent = math.frexp(quotient)
        up = exponent - (part == 0.5) if quotient else -127
        power = up if rule == "up" else math.frexp(a)[1] - math.frexp(top)[1]
        want.append(min(max(127 + power, 0), 254))
    assert got.scale[0].tolist() == want
    # What the largest element became: never more than the largest code by the one rule, often that by the other.
    scale = np.exp2(np.array(want, np.float64) - 127)
    ratio = amax / scale
    assert ratio.max() <= top * (1 + 2.0**-23) if rule == "up" else (ratio > top).any()
    if out == "e2m1":
        code = nibbles(got.out[0]).reshape(-1, 32)[:, 5]
        assert ((code & 7)[ratio > 5] == 7).all() and (code[ratio > 0.25] >= 8).all()


# ------------------------------------------------------------------ layouts
@pytest.mark.parametrize("m", [1, 17, 127, 128, 129, 300])
@pytest.mark.parametrize("combo", PLACED, ids=str)
def test_rows_of_any_number(combo: Combo, m: int, route: str, device: torch.device) -> None:
    """Watched buffers full of 0x7F: every byte of a tile that is no scale becomes 0, nothing behind it is touched."""
    for out in ("none", "contiguous"):
        judge(Problem(combo, (m, 96), device), route, out)


@pytest.mark.parametrize("combo", [c for c in PLACED if c.placed != "rows"], ids=str)
def test_tiles_one_by_one(combo: Combo, route: str, device: torch.device) -> None:
    """Against a loop over rows and blocks, for numbers of either that end within a tile and with one."""
    for m, h in ((3, 160), (129, 128), (256, 288)):
        call = Problem(combo, (m, h), device).prepare("contiguous")
        left = call.outcome(call_it(call, route), "tiles")
        assert left.scale is not None
        raw = call.arguments["block_scale"].cpu()
        assert torch.equal(raw, tiles(left.scale.view(torch.uint8)).view(-1))
        assert torch.equal(raw[tiled(m, h // combo.block)], left.scale.view(torch.uint8))


def call_it(call: Any, route: str) -> Any:
    with flashnorm.backend(route):
        return getattr(flashnorm, call.problem.combo.op)(**call.arguments)


@pytest.mark.parametrize("layout", ["half", "other half", "odd rows", "last 2", "misaligned", "transposed"])
@pytest.mark.parametrize("combo", [c for c in PLACED if c.placed != "swizzled"], ids=str)
def test_scales_of_any_stride(combo: Combo, layout: str, route: str, device: torch.device) -> None:
    problem = Problem(combo, (5, 384), device)
    want, call = problem.run(route), problem.prepare("contiguous")
    name = "block_scale" if combo.placed == "rows" else "block_scale_unswizzled"
    shape = (5, 384 // combo.block)
    shape = shape[::-1] if layout == "transposed" else shape
    guard = Guarded(None, device, layout if layout != "transposed" else "contiguous", written=True, shape=shape,
                    dtype=torch.uint8, poison=0x7F)  # fmt: skip
    call.guards[name] = guard
    call.arguments[name] = guard.view.t() if layout == "transposed" else guard.view
    assert_same(call(route), want, f"scales {layout}")


@pytest.mark.parametrize("combo", [c for c in PLACED if c.side], ids=str)
def test_y_out_changes_no_other_byte(combo: Combo, route: str, device: torch.device) -> None:
    with_it, without = (Problem(replace(combo, side=side), (19, 384), device).run(route) for side in (True, False))
    assert with_it.normed_out is not None and without.normed_out is None
    assert_same(replace(with_it, normed_out=None), without, "y_out")


@pytest.mark.parametrize("combo", [c for c in PLACED if c.residual], ids=str)
def test_a_residual_anywhere(combo: Combo, route: str, device: torch.device) -> None:
    """Strided, of a permuted grid, with a last stride of 2: updated where it lies."""
    for layout in ("half", "heads", "transposed", "last 2", "odd rows"):
        judge(Problem(combo, (3, 5, 64), device, residual_layout=layout), route, "heads")


# ------------------------------------------------------------------ arguments
def test_tensors_by_their_formats(route: str, device: torch.device) -> None:
    """Bytes, or the dtypes of the formats: given ones are returned themselves, with the same bytes, cold and warm."""
    for combo in PLACED:
        problem = Problem(combo, (7, 192), device)
        want = problem.run(route)
        names = public_names(combo)
        kinds = {
            "out": (torch.uint8, E2M1) if combo.out == "e2m1" else (torch.float8_e4m3fn,),
            "scale": (torch.uint8, torch.float8_e4m3fn if combo.form == "e4m3" else torch.float8_e8m0fnu),
        }
        for out in kinds["out"]:
            for scale in kinds["scale"]:
                for _ in range(2):
                    call = problem.prepare("contiguous")
                    for name, dtype in (("out", out), ("scale", scale), ("scale_rows", scale)):
                        given = call.arguments.get(names.get(name, name))
                        if given is not None and given.element_size() == 1:
                            call.arguments[names.get(name, name)] = given.view(dtype)
                    assert_same(call(route), want, f"{out}, {scale}")


def test_every_form_of_a_global_scale(route: str, device: torch.device) -> None:
    """None is 1; numbers and tensors of one element, wherever they are, are the same; none is planned for its value."""
    combo = PLACED[0]
    forms: list[Any] = [114.5, np.float32(114.5), torch.nn.Parameter(torch.tensor(114.5), requires_grad=False)]
    for where in sorted({"cpu", device.type}):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            forms += [torch.full(shape, 114.5, dtype=dtype, device=where) for shape in ((), (1,))]
    want = Problem(combo, (5, 128), device, scale=114.5).run(route)
    for form in forms:
        call = Problem(combo, (5, 128), device).prepare()
        call.arguments["global_scale"] = form
        assert_same(call(route), want, f"global_scale {form!r}")
    one = Problem(combo, (5, 128), device, scale=1.0).run(route)
    assert_same(Problem(replace(combo, scale=None), (5, 128), device).run(route), one, "no global scale")


BAD = [0.0, -0.0, -1.0, NAN, INF, 1e39, 1e-46]


@pytest.mark.parametrize("value", BAD, ids=str)
@pytest.mark.parametrize("op", FP4)
def test_global_scales_that_are_refused(op: str, value: float, device: torch.device) -> None:
    combo = next(c for c in PLACED if c.op == op and c.form == "e4m3")
    for warm in (False, True):
        call = Problem(combo, (3, 128), device).prepare("contiguous")
        if warm:
            call_it(call, "torch")
        before = {name: guard.view.clone() for name, guard in call.guards.items()}
        for form in (value, torch.tensor(value, dtype=torch.float64)):
            with pytest.raises(ValueError, match=f"{op}: global_scale must be finite and > 0"):
                getattr(flashnorm, op)(**(call.arguments | {"global_scale": form}))
        for name, guard in call.guards.items():
            assert_same_bits(guard.view, before[name], name)


WRONG = [
    ({"block_size": 64}, "block_size must be one of"),
    ({"block_size": None}, "block_size must be one of"),
    ({"block_size": 16.5}, "block_size must be one of"),
    ({"scale_format": "fp32"}, "scale_format must be one of"),
    ({"scale_rule": None}, "scale_rule must be one of"),
    ({"scale_format": "ue8m0"}, "scale_format 'ue8m0' needs block_size 32"),
    ({"block_size": 32, "scale_format": "e4m3", "scale_rule": "ocp"}, "scale_rule goes with"),
    ({"block_size": 32, "global_scale": 1.0}, "global_scale goes with"),
    ({"is_sf_swizzled_layout": None}, "is_sf_swizzled_layout must be True or False"),
    ({"is_sf_swizzled_layout": "yes"}, "is_sf_swizzled_layout must be True or False"),
]


@pytest.mark.parametrize(("options", "text"), WRONG, ids=str)
@pytest.mark.parametrize("op", FP4)
def test_options_that_do_not_go(op: str, options: dict[str, Any], text: str, device: torch.device) -> None:
    x = rows((4, 64), torch.bfloat16).to(device)
    residual = {"residual": x.clone()} if op == FP4[1] else {}
    for _ in range(2):  # then after a good call
        with pytest.raises(ValueError, match=f"{op}: .*{text}"):
            getattr(flashnorm, op)(x, weight=None, **residual, **options)
        assert all(torch.equal(t, x) for t in residual.values())
        with flashnorm.backend("torch"):
            getattr(flashnorm, op)(x, weight=None, **{name: t.clone() for name, t in residual.items()})


@pytest.mark.parametrize("op", [*FP4, *MXFP8])
def test_tiles_that_do_not_fit(op: str, device: torch.device) -> None:
    """Too few or too many bytes, gaps between them, another dtype; for both layouts a wrong one of either."""
    x = rows((129, 96), torch.bfloat16).to(device)
    given: dict[str, Any] = {"input": x, "weight": None, "is_sf_swizzled_layout": True}
    given |= {"residual": x.clone()} if op.startswith("add") else {}
    size = 256 * (8 if op in FP4 else 4)
    whole = torch.zeros(2 * size, dtype=torch.uint8, device=device)
    wrong = [whole[: size - 512], whole[: size + 512], whole[::2], whole[:size].view(-1, 8).t(), whole[: size // 2]]
    for bad in (*wrong, torch.zeros(size, device=device)):
        with pytest.raises(ValueError, match=f"{op}: block_scale must"):
            getattr(flashnorm, op)(**given, block_scale=bad)
        if op == FP4[1]:
            with pytest.raises(ValueError, match=f"{op}: block_scale must"):
                flashnorm.add_rmsnorm_fp4quant(**given, block_scale=bad, output_both_sf_layouts=True)
    if op == FP4[1]:
        for bad in (whole[: 129 * 5].view(129, 5), whole[: 128 * 6].view(128, 6), whole[: 129 * 6]):
            with pytest.raises(ValueError, match=r"block_scale_unswizzled|block_scale must have a row"):
                flashnorm.add_rmsnorm_fp4quant(**given, output_both_sf_layouts=True, block_scale_unswizzled=bad)
    assert torch.equal(given.get("residual", x), x) and not bool(whole.any())
    for shape in ((size,), (2, -1), (256, -1), (2, -1, 32, 4, 4)):  # any shape of as many bytes
        with flashnorm.backend("torch"):
            made = getattr(flashnorm, op)(**given, block_scale=whole[:size].view(shape))
        assert made[1].shape == whole[:size].view(shape).shape


# ------------------------------------------------------------------ what they are worth
@pytest.mark.parametrize("combo", WHOLE, ids=str)
def test_a_gemm_of_the_codes(combo: Combo, route: str, device: torch.device) -> None:
    """Dequantised as a block-scaled GEMM does, against fp64, within the error of the formats.

    A code is off by half a step: of e2m1 a quarter of a unit below 1, and at most a fifth of its size above; where a
    scale was rounded down, the largest elements saturate by as much. The OCP rule lets them reach 8 units.
    """
    m, k, n = 37, 1024, 24
    problem = Problem(combo, (m, k), device, scale=16.0 if combo.scale else None)
    want, call = problem.oracle(), problem.prepare("contiguous")
    left = call.left(call_it(call, route))
    values = flashnorm.dequantize(
        left["out"],
        left["scale"].view(torch.uint8 if combo.form == "ue8m0" else torch.float8_e4m3fn),
        block_size=combo.block,
        global_scale=16.0 if combo.scale else None,
        swizzled=combo.placed != "rows",
        dtype=torch.float64,
    ).cpu()
    stored = problem.run(route).scale
    assert stored is not None
    scale = torch.exp2(stored.double() - 127) if combo.form == "ue8m0" else stored.double()
    unit = scale.repeat_interleave(combo.block, 1) / (16.0 if combo.scale else 1.0)
    size = want.out.abs()
    relative, absolute = (0.25 if combo.rule == "ocp" else 0.2, 0.25) if combo.out == "e2m1" else (2.0**-4, 2.0**-10)
    relative = 0.125 if combo.out == "e4m3" and combo.rule == "ocp" else relative
    error = torch.maximum(size * relative, unit * absolute) + size * 2.0**-20
    assert bool(((values - want.out).abs() <= error).all())
    other = torch.randn(k, n, generator=generator("gemm")).double()
    got, exact = values @ other, want.out @ other
    assert bool(((got - exact).abs() <= error @ other.abs()).all())
    assert float((got - exact).norm() / exact.norm()) < (0.15 if combo.out == "e2m1" else 0.04)


def test_a_good_global_scale_is_worth_something(route: str, device: torch.device) -> None:
    """Small rows underflow their scales without one; with 448 * 6 / amax they lose nothing."""
    x, weight = rows((16, 512), torch.bfloat16).to(device), (gains((512,), torch.bfloat16) * 2.0**-12).to(device)
    want = Problem(Combo("rmsnorm"), (16, 512), x=x.cpu(), weight=weight.cpu()).oracle().out
    with flashnorm.backend(route):
        found = {}
        for gain in (1.0, 448 * 6 / float(want.abs().max())):
            codes, scale = flashnorm.rmsnorm_fp4quant(x, weight, global_scale=gain)
            values = flashnorm.dequantize(codes, scale, block_size=16, global_scale=gain, dtype=torch.float64)
            found[gain] = float((values.cpu() - want).norm() / want.norm())
    small, good = found.values()
    assert good < 0.12 and small > 0.3
