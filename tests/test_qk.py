"""Q and K normalised and turned, V copied: bits, accuracy, layouts, sizes, positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashnorm
from tests.golden import qk as golden
from tests.oracles import round_to
from tests.oracles_qk import Turned, as_fp32, grid_angles, turned, yarn_frequencies
from tests.qk import ATTENTION, CASES, EPS, USUAL, YARN, Case, Problem
from tests.tolerance import DIFFERENCE_OF_LARGEST, EQUAL_SHARE, assert_same_bits, steps_between

# Heads of all widths: of whole groups and not, wider than a warp has lanes, one channel pair; counts that differ.
WIDTHS = (
    (2, (2, 0, 0)), (6, (2, 2, 2)), (8, (4, 2, 2)), (16, (6, 6, 4)), (24, (8, 8, 8)), (66, (22, 22, 22)),
    (72, (24, 24, 24)), (96, (32, 32, 32)), (100, (36, 32, 32)), (128, (44, 42, 42)), (256, (96, 80, 80)),
    (264, (88, 88, 88)), (320, (0, 160, 160)), (512, (172, 170, 170)),
)  # fmt: skip
COUNTS = ((1, 1, 1), (5, 1, 1), (12, 12, 12), (0, 2, 1), (3, 0, 0), (40, 8, 8))
KINDS = (USUAL, Case(interleave=False, scope="head", coded=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits(case: Case, exact_route: str, device: torch.device) -> None:
    problem = Problem(case)
    problem.check(problem.run(exact_route, device), exact_route)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("width", "channels"), WIDTHS)
def test_every_width(kind: Case, width: int, channels: tuple[int, ...], exact_route: str, device: torch.device) -> None:
    for counts in ((3, 2, 2), (17, 4, 1)):
        problem = Problem(replace(kind, head_dim=width, channels=channels, heads=counts))
        problem.check(problem.run(exact_route, device), exact_route)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_count(kind: Case, counts: tuple[int, int, int], exact_route: str, device: torch.device) -> None:
    problem = Problem(replace(kind, heads=counts, head_dim=128, channels=(44, 42, 42)))
    problem.check(problem.run(exact_route, device), exact_route)


def test_more_heads_than_shared_memory_holds(exact_route: str, device: torch.device) -> None:
    """Sums of several rounds, and tokens that are read twice."""
    for kind in KINDS:
        problem = Problem(replace(kind, heads=(300, 200, 4), head_dim=256, channels=(96, 80, 80), grid=(1, 1, 2)))
        problem.check(problem.run(exact_route, device), exact_route)


@pytest.mark.parametrize("rotary", [2, 6, 16, 40, 66])
@pytest.mark.parametrize("interleave", [True, False])
def test_partial_rotation(rotary: int, interleave: bool, exact_route: str, device: torch.device) -> None:
    for width in (66, 80):
        case = Case(rotary=rotary, interleave=interleave, head_dim=width, scope="head" if rotary > 16 else "hidden")
        problem = Problem(case)
        problem.check(problem.run(exact_route, device), exact_route)


# ------------------------------------------------------------------ golden bits
def test_the_golden_file_is_complete_and_canonical() -> None:
    want = golden.on_file()
    assert {problem.what for problem in golden.problems()} == set(want)
    for problem in golden.problems():
        assert golden.digests(problem.expected()) == want[problem.what], problem.what


@pytest.mark.parametrize("problem", golden.problems(), ids=lambda problem: problem.what)
def test_golden_bits(problem: Problem, exact_route: str, device: torch.device) -> None:
    assert golden.digests(problem.run(exact_route, device)) == golden.on_file()[problem.what]


# ------------------------------------------------------------------ accuracy
@pytest.mark.parametrize("case", CASES, ids=str)
def test_accuracy(case: Case, route: str, device: torch.device) -> None:
    """A step, or a millionth of the largest operand; 99.9 % of the elements equal."""
    case = replace(case, grid=(5, 11, 13))
    problem = Problem(case, (2, 715))
    got = problem.run(route, device)
    if case.rotary:
        assert problem.cache is not None and problem.positions is not None
        half = case.rotary // 2
        table = problem.cache.double()[problem.positions.reshape(-1).long()]
        cos, sin = table[:, :half], table[:, half:]
    else:
        yarn = YARN if case.yarn else (1.0, 0.0, 0.0)
        angles = grid_angles(
            problem.tokens, case.grid, [yarn_frequencies(count, 10000.0, *yarn) for count in case.channels]
        )
        cos, sin = angles.cos(), angles.sin()
    equal = elements = 0
    weights = [*problem.weights.values(), None]
    for i, (part, weight, mine) in enumerate(zip(problem.parts(), weights, got, strict=True)):
        mine = mine.reshape(part.shape)
        scale = as_fp32(problem.scales[i // 2])
        if i == 2:
            made = Turned(part.double(), part.double().abs().amax(-1), torch.zeros(1))
        else:
            made = turned(
                part, weight, cos, sin, scope=case.scope, interleave=case.interleave, eps=EPS,
                attention=ATTENTION if case.yarn else 1.0, rounded=not case.coded,
            )  # fmt: skip
        want, room = made.out * scale, (made.operand.unsqueeze(-1) * DIFFERENCE_OF_LARGEST + made.unsure) * scale
        steps = steps_between(mine, round_to(want, mine.dtype))
        close = steps_between(mine, round_to(want - room, mine.dtype)) + steps_between(
            mine, round_to(want + room, mine.dtype)
        ) <= steps_between(round_to(want - room, mine.dtype), round_to(want + room, mine.dtype))
        assert bool(((steps <= 1) | close).all()), f"{case} on {route}: part {i}: {int(steps.max())} steps"
        equal, elements = equal + int((steps == 0).sum()), elements + steps.numel()
    assert elements > 100_000 and equal >= EQUAL_SHARE * elements, f"{case} on {route}: {equal / elements}"


# ------------------------------------------------------------------ layouts
@pytest.mark.parametrize(
    "layout", ["misaligned", "half", "other half", "odd rows", "transposed", "every other", "last 2"]
)
@pytest.mark.parametrize("kind", [*KINDS, CASES[7]], ids=str)
def test_layouts_of_the_input(kind: Case, layout: str, exact_route: str, device: torch.device) -> None:
    problem = Problem(kind)
    problem.check(problem.run(exact_route, device, layout=layout), f"{exact_route} {layout}")


@pytest.mark.parametrize("out", ["contiguous", "misaligned", "heads", "half", "transposed", "last 2"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_layouts_of_results(kind: Case, out: str, exact_route: str, device: torch.device) -> None:
    problem = Problem(kind)
    problem.check(problem.run(exact_route, device, out=out), f"{exact_route} {out}")


@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "half", "last 2", "expanded"])
@pytest.mark.parametrize("flat", [False, True])
def test_layouts_of_weights(layout: str, flat: bool, exact_route: str, device: torch.device) -> None:
    problem = Problem(CASES[1])
    for name, weight in problem.weights.items():
        assert weight is not None
        if layout == "expanded":
            problem.weights[name] = weight[:1, :1].expand(weight.shape) if flat else weight[:1].expand(weight.shape)
    got = problem.run(exact_route, device, weight_layout=layout, flat=flat)
    problem.check(got, f"{exact_route} {layout}")


def test_one_weight_for_every_head(exact_route: str, device: torch.device) -> None:
    problem = Problem(KINDS[1], shared=True)
    problem.check(problem.run(exact_route, device), exact_route)


def test_slices_of_one_projection(exact_route: str, device: torch.device) -> None:
    """The input is a part of a wider row, and the results are slices of one buffer."""
    problem = Problem(USUAL)
    wide = torch.randn(*problem.lead, USUAL.width + 96, dtype=torch.bfloat16, device=device)
    wide[..., 32 : 32 + USUAL.width] = problem.x.to(device)
    into = torch.zeros(*problem.lead, sum(USUAL.heads), USUAL.head_dim, dtype=torch.bfloat16, device=device)
    given = {name: None if w is None else w.to(device) for name, w in problem.weights.items()}
    qkv = wide.split([32, USUAL.width, 64], -1)[1]
    outs = dict(zip(("q_out", "k_out", "v_out"), into.split(list(USUAL.heads), -2), strict=True))
    with flashnorm.backend(exact_route):
        made = flashnorm.fused_qk_rmsnorm_rope(qkv, **given, **outs, **problem.options())
    problem.check(tuple(t.cpu() for t in made), exact_route)
    assert_same_bits(into.cpu(), torch.cat([t.cpu() for t in made], -2))


def test_tokens_in_one_dimension(exact_route: str, device: torch.device) -> None:
    """[num_tokens, C] is [B, S, C] flattened: grids follow each other."""
    flat, batched = Problem(USUAL, (2 * USUAL.sequence,)), Problem(USUAL)
    flat.x = batched.x.flatten(0, 1)
    flat.weights = batched.weights
    got = flat.run(exact_route, device)
    flat.check(got, exact_route)
    for mine, other in zip(got, batched.run(exact_route, device), strict=True):
        assert_same_bits(mine, other.flatten(0, 1))


@pytest.mark.parametrize("lead", [(0,), (0, 30), (0, 0)])
def test_no_tokens(lead: tuple[int, ...], route: str, device: torch.device) -> None:
    case = USUAL if lead != (0, 0) else CASES[7]
    for mine, n in zip(Problem(case, lead).run(route, device), case.heads, strict=True):
        assert mine.shape == (*lead, n, case.head_dim)


def test_a_token_is_alone(exact_route: str, device: torch.device) -> None:
    """Its bits depend neither on how many there are nor on where it lies."""
    for case in (CASES[7], CASES[8]):
        many = Problem(case, (300,))
        whole = many.run(exact_route, device)
        for begin, count in ((0, 1), (37, 5), (100, 200)):
            few = Problem(case, (count,))
            few.x, few.weights = many.x[begin : begin + count], many.weights
            assert many.positions is not None
            few.cache, few.positions = many.cache, many.positions[begin : begin + count]
            for mine, other in zip(few.run(exact_route, device), whole, strict=True):
                assert_same_bits(mine, other[begin : begin + count])


# ------------------------------------------------------------------ positions
def test_positions_outside_of_the_table(route: str, device: torch.device) -> None:
    """They raise on the CPU. On a GPU they read nothing, and Q and K of the token are NaN."""
    for case in (CASES[7], CASES[8], CASES[9]):
        problem = Problem(case, bad=True)
        if device.type == "cpu":
            with pytest.raises(ValueError, match="positions must be 0 to 10, got -1"):
                problem.run(route, device)
        elif route != "torch":
            problem.check(problem.run(route, device), route)


def test_positions_are_checked_in_warm_calls(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("values are looked at where looking is free")
    problem = Problem(CASES[7])
    problem.run(None)
    problem.run(None)
    assert problem.positions is not None
    problem.positions.view(-1)[3] = 11
    with pytest.raises(ValueError, match="positions must be 0 to 10, got 11"):
        problem.run(None)


def test_special_rows(exact_route: str, device: torch.device) -> None:
    """Zeros, NaN, infinities and the largest numbers: what the formula gives, and V to the bit."""
    for case in CASES[:6]:
        problem = Problem(case)
        width = case.head_dim
        problem.x[0, 0] = 0
        problem.x[0, 1] = -0.0
        problem.x[0, 2, 5] = torch.nan
        problem.x[0, 3, 2 * width] = torch.inf
        problem.x[0, 4] = torch.finfo(problem.x.dtype).max
        problem.x[0, 5] = torch.finfo(problem.x.dtype).tiny / 8
        problem.check(problem.run(exact_route, device), exact_route)
