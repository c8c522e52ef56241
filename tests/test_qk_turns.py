"""Angles: how right they are, whose frequencies they are, which channels make a pair."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import flashnorm
from flashnorm.program import QkLayout
from tests.canonical.qk import frequencies, quarters, turns
from tests.oracles import round_to
from tests.oracles_qk import turned, yarn_frequencies, yarn_range
from tests.qk import Case, Problem
from tests.tolerance import steps_between

pytestmark = pytest.mark.cpu_only

FAR = 131_072  # the furthest position that the contract speaks of
ANGLE = 1e-6  # and how far off an angle may be there


def layout(**more: Any) -> QkLayout:
    return QkLayout((1, 1, 1), 128, rotary_dim=128, grid=(1, 1, 1), channels=(44, 42, 42), **more)


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1.0, 7.3])
def test_every_position(base: float) -> None:
    """Sine and cosine of all of them, at frequencies from the fastest to the slowest."""
    values = np.array(frequencies((64,), base))[[0, 1, 2, 5, 13, 31]]
    position = np.arange(FAR + 1, dtype=np.float32)[:, None]
    sine, cosine = turns(position, *quarters(list(values)))
    angle = position.astype(np.float64) * values
    error = np.maximum(np.abs(sine - np.sin(angle)), np.abs(cosine - np.cos(angle)))
    assert error.max() <= 2e-7, error.max()
    # The angle that they are of, modulo 2 pi.
    off = np.arctan2(sine * np.cos(angle) - cosine * np.sin(angle), cosine * np.cos(angle) + sine * np.sin(angle))
    assert np.abs(off).max() <= ANGLE


def test_every_angle_of_a_turn() -> None:
    """All fp32 numbers of an eighth of a turn, by the largest frequency's two floats: quarter turns as they are."""
    step = np.arange(np.float32(0.25).view(np.int32), np.float32(0.5).view(np.int32) + 1, 7, dtype=np.int32)
    y = np.concatenate(
        [step.view(np.float32), -step.view(np.float32), np.linspace(-0.5, 0.5, 100_001, dtype=np.float32)]
    )
    sine, cosine = turns(np.float32(1), y, np.float32(0))
    angle = y.astype(np.float64) * (math.pi / 2)
    assert np.abs(sine - np.sin(angle)).max() <= 1e-7 and np.abs(cosine - np.cos(angle)).max() <= 1e-7


def test_frequencies_are_the_models() -> None:
    """Exact powers, to the last bit of fp64, and their two floats."""
    for yarn in (None, (4.0, 2.0, 9.0), (8.0, 3.0, 3.0), (0.5, -1.0, 30.0)):
        more = {} if yarn is None else dict(zip(("factor", "low", "high"), yarn, strict=True))
        for base in (10000.0, 500000.0, 1.5):
            mine = layout(base=base, **more)
            want = frequencies(mine.channels, base, yarn)
            assert list(mine.frequencies()) == want
            high, low = quarters(want)
            assert mine.numbers()[1::2] == high.tolist() and mine.numbers()[2::2] == low.tolist()


@pytest.mark.parametrize(("factor", "trained"), [(4.0, 4096), (32.0, 8192), (2.0, 32768)])
def test_yarn_is_that_of_transformers(factor: float, trained: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own function, in fp64."""
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    width, base = 128, 10000.0
    parameters = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
        "rope_theta": base,
    }
    config = transformers.LlamaConfig(
        head_dim=width, hidden_size=4 * width, num_attention_heads=4, rope_theta=base,
        max_position_embeddings=int(factor * trained), rope_scaling=parameters,
    )  # fmt: skip
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    theirs, attention = rope.ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    monkeypatch.undo()
    assert theirs.dtype == torch.float64
    low, high = yarn_range(width, base, trained)
    mine = QkLayout((1, 1, 1), width, rotary_dim=width, grid=(1, 1, 1), channels=(width, 0, 0), base=base,
                    factor=factor, low=low, high=high, attention_factor=attention)  # fmt: skip
    torch.testing.assert_close(torch.tensor(mine.frequencies(), dtype=torch.float64), theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.tensor(yarn_frequencies(width, base, factor, low, high), dtype=torch.float64), theirs, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize(("interleave", "module"), [(False, "llama"), (True, "cohere")])
def test_pairs_are_those_of_transformers(interleave: bool, module: str, route: str) -> None:
    """Rotary embeddings of a model that pairs alike, in fp64, rounded once."""
    models = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    problem = Problem(Case(scope="none", interleave=interleave, rotary=64, q_weight=None, k_weight=None))
    assert problem.cache is not None and problem.positions is not None
    picked = problem.cache.double()[problem.positions.reshape(-1)]
    cos, sin = picked[:, :32], picked[:, 32:]
    whole = [torch.repeat_interleave(t, 2, -1) if interleave else torch.cat((t, t), -1) for t in (cos, sin)]
    q, k, _ = problem.parts()
    theirs = models.apply_rotary_pos_emb(q.double()[None], k.double()[None], *(t[None] for t in whole), unsqueeze_dim=2)
    for mine, want, part in zip(problem.run(route), theirs, (q, k), strict=False):
        near = round_to(want[0], mine.dtype)
        assert bool((steps_between(mine.reshape(near.shape), near) <= 1).all())
        ours = turned(part, None, cos, sin, scope="none", interleave=interleave, eps=0.0, attention=1.0, rounded=True)
        torch.testing.assert_close(ours.out, want[0], rtol=1e-12, atol=1e-12)


def test_axes_and_their_channels(exact_route: str) -> None:
    """A token's frame turns the first channels, its row the next, its column the last; width is fastest."""
    case = Case(heads=(1, 1, 0), head_dim=12, channels=(4, 4, 4), grid=(2, 3, 4), scope="none")
    names = ("num_frame_channels", "num_height_channels", "num_width_channels")
    for axis, reach in enumerate((12, 4, 1)):  # tokens from a step of the axis to the next
        problem = Problem(case)
        problem.x[:] = 1
        q = problem.run(exact_route)[0][0, :, 0]
        mine = slice(4 * axis, 4 * axis + 4)
        moved = [not torch.equal(q[0, mine], q[token, mine]) for token in range(24)]
        assert moved == [token // reach % case.grid[axis] != 0 for token in range(24)], names[axis]


def test_the_first_token_does_not_turn(exact_route: str) -> None:
    problem = Problem(Case(scope="none"))
    got = problem.run(exact_route)
    for mine, part in zip(got, problem.parts(), strict=True):
        assert torch.equal(mine[0, 0], part[0])


def test_parameter_sets_do_not_meet(exact_route: str) -> None:
    """Calls with other frequencies, one after the other and over again: none sees another's."""
    problems = [Problem(Case()), Problem(Case(yarn=True)), Problem(Case(channels=(20, 20, 24)))]
    for _ in range(3):
        for problem in problems:
            problem.check(problem.run(exact_route), exact_route)
    base = problems[0].run(exact_route, base=500.0)
    assert not torch.equal(base[0], problems[0].expected()[0])
    assert flashnorm.supports_fused_qk_rmsnorm_rope(problems[0].x, **problems[0].weights, **problems[0].options())
