"""MXFP8 to the byte: every code with every power of two, ties, special values. What it shares with MXFP4: test_fp4."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import flashnorm
from tests.canonical.codes import magnitudes
from tests.combos import MXFP8, Combo
from tests.inputs import gains, rows
from tests.test_codes import sent
from tests.tolerance import assert_same_bits

INF, NAN = math.inf, math.nan
E4M3 = torch.float8_e4m3fn
UP = Combo(MXFP8[0], "f32", "f32", out="e4m3", block=32, form="ue8m0")
OCP = replace(UP, rule="ocp")


def weights(blocks: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(blocks.astype(np.float32).reshape(-1))


def found(combo: Combo, blocks: np.ndarray, route: str, device: torch.device) -> tuple[list[list[int]], list[int]]:
    """(codes by block, bytes of the scales)."""
    got = sent(combo, weights(blocks), device).run(route)
    assert got.scale is not None
    return got.out.view(torch.uint8)[0].view(-1, 32).tolist(), got.scale[0].tolist()


@pytest.mark.parametrize("combo", [UP, OCP], ids=str)
def test_every_code_with_powers_of_two(combo: Combo, route: str, device: torch.device) -> None:
    """31 codes and the largest one, which decides the scale; from subnormal elements to the largest numbers."""
    known = np.concatenate([magnitudes(E4M3), -magnitudes(E4M3)])
    codes = np.concatenate([np.arange(0x7F), np.arange(0x80, 0xFF)])
    known, codes = (np.resize(v, (9, 31)) for v in (known, codes))
    known, codes = (
        np.pad(known, ((0, 0), (0, 1)), constant_values=448),
        np.pad(codes, ((0, 0), (0, 1)), constant_values=0x7E),
    )
    bytes_ = [1, 2, 100, 126, 127, 128, 200, 245, 246]
    blocks = np.concatenate([known * 2.0 ** (byte - 127) for byte in bytes_])
    got, scale = found(combo, blocks, route, device)
    assert scale == [byte for byte in bytes_ for _ in range(9)]
    small = [i for i, byte in enumerate(scale) if byte >= 10]  # below, fp32 has no room for the smallest codes
    assert [got[i] for i in small] == [codes.tolist()[i % 9] for i in small]
    problem = sent(combo, weights(blocks), device)
    problem.check_bits(problem.run(route), f"on {route}")


def test_every_tie_goes_to_the_even_code(route: str, device: torch.device) -> None:
    known = magnitudes(E4M3).astype(np.float64)
    middle = ((known[:-1] + known[1:]) / 2).astype(np.float32)
    near = np.concatenate([middle, np.nextafter(middle, np.float32(-INF)), np.nextafter(middle, np.float32(INF))])
    code = np.arange(len(middle))
    want = np.concatenate([code + code % 2, code, code + 1])
    near, want = np.concatenate([near, -near]), np.concatenate([want, want + 0x80])
    short = -len(near) % 31
    near, want = (np.pad(v, (0, short)).reshape(-1, 31) for v in (near, want))
    blocks = np.pad(near, ((0, 0), (0, 1)), constant_values=448)
    got, scale = found(UP, blocks, route, device)
    assert set(scale) == {127} and [row[:31] for row in got] == want.tolist()


def test_what_the_bytes_are(route: str, device: torch.device) -> None:
    """The table of special values itself, no model in between."""
    cases = {
        "zeros of both signs": ([0.0, -0.0], (0, 0), [0, 0], [0, 0]),
        "NaN": ([1.0, NAN, -1.0], (0xFF, 0xFF), [0x7F] * 3, [0x7F] * 3),
        "a negative NaN beside infinities": ([INF, -NAN, -INF], (0xFF, 0xFF), [0x7F] * 3, [0x7F] * 3),
        # FLT_MAX / 448 is just below 2^119.2: 2^120, or 2^(127 - 8) = 2^119, of which the largest is 511 times
        "infinities": ([INF, -INF, -0.0, 1e-3, -1e-3], (247, 246), *[[0x7E, 0xFE, 0x80, 0, 0x80]] * 2),
        "448": ([448.0, -448.0, 2.0**-9], (127, 127), [0x7E, 0xFE, 1], [0x7E, 0xFE, 1]),
        "a hair above it": ([448.5, -1.0, 0.0], (128, 127), [0x76, 0xB0, 0], [0x7E, 0xB8, 0]),
        "511": ([511.0, -1.0, 0.0], (128, 127), [0x78, 0xB0, 0], [0x7E, 0xB8, 0]),
        "the smallest number": ([2.0**-149, -(2.0**-149)], (0, 0), [0, 0x80], [0, 0x80]),
        "the smallest that is something": ([2.0**-127 * 2.0**-9, -(2.0**-127)], (0, 0), [1, 0xB8], [1, 0xB8]),
    }  # fmt: skip
    blocks = np.zeros((len(cases), 32), np.float32)
    for i, (values, _, _, _) in enumerate(cases.values()):
        blocks[i, : len(values)] = values
    for rule, combo in enumerate((UP, OCP)):
        codes, scale = found(combo, blocks, route, device)
        for i, (name, (values, want, *by_rule)) in enumerate(cases.items()):
            assert scale[i] == want[rule], f"{name}, {combo.rule}"
            rest = 0x7F if want[rule] == 0xFF else 0
            assert codes[i] == [*by_rule[rule], *[rest] * (32 - len(values))], f"{name}, {combo.rule}"


def test_rules_differ_where_they_should(route: str, device: torch.device) -> None:
    """The same codes and scales where the largest element of a block is 448 or less of its power of two; else not."""
    x, weight = rows((64, 256), torch.bfloat16).to(device), gains((256,), torch.bfloat16).to(device)
    with flashnorm.backend(route):
        (up, s_up), (ocp, s_ocp) = (flashnorm.rmsnorm_mxfp8_quant(x, weight, scale_rule=rule) for rule in ("up", "ocp"))
        again, s_again = flashnorm.rmsnorm_mxfp8_quant(x, weight)
    assert_same_bits(again, up, "up is the default")
    assert torch.equal(s_again, s_up)
    apart = s_up.int() - s_ocp.int()
    assert set(apart.unique().tolist()) == {0, 1}
    same = (apart == 0).repeat_interleave(32, -1)
    assert torch.equal(up.view(torch.uint8)[same], ocp.view(torch.uint8)[same])
    most = ocp.float().abs().unflatten(-1, (-1, 32)).amax(-1)
    assert bool((most[apart == 1] == 448).all()) and bool(
        (up.float().abs().unflatten(-1, (-1, 32)).amax(-1) > 200).all()
    )


@pytest.mark.parametrize("op", MXFP8)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scale_rule": "floor"}, "scale_rule must be one of"),
        ({"scale_rule": None}, "scale_rule must be one of"),
        ({"is_sf_swizzled_layout": 1}, "is_sf_swizzled_layout must be True or False"),
        ({"numerics": "exact"}, "numerics must be one of"),
        ({"eps": -1.0}, "eps must be finite"),
    ],
    ids=str,
)
def test_options_that_do_not_go(op: str, options: dict[str, object], text: str, device: torch.device) -> None:
    x = rows((4, 64), torch.bfloat16).to(device)
    residual = {"residual": x.clone()} if op == MXFP8[1] else {}
    for width in (64, 48):
        wrong = text if width == 64 else f"{text}|multiple of 32"
        with pytest.raises(ValueError, match=f"{op}: .*({wrong})"):
            given = {name: t[:, :width] for name, t in {"input": x, **residual}.items()}
            getattr(flashnorm, op)(**given, weight=None, **options)
    assert all(torch.equal(t, x) for t in residual.values())
