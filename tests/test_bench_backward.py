"""The benchmark of gradients: what it holds figures to, and the plans that its tuning tries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import backward, tune_backward
from benchmarks import backward_candidates as candidates
from flashnorm.kernels import stream_plans
from flashnorm.kernels.stream_tile import asks_of
from flashnorm.program.backward import INNER_ROWS, partials

pytestmark = pytest.mark.cpu_only

HEADER = Path(__file__).parents[1] / "csrc" / "flashnorm" / "ffi" / "backward_plan.h"
SHAPES = [(norm, *map(int, shape.split("x"))) for norm, shapes in tune_backward.SHAPES.items() for shape in
          shapes.split(",")]  # fmt: skip


def _cases(cute: float, torch: float, compiled: float, saves: float) -> list[backward.Case]:
    return [
        backward.Case("rms", 4096, 2048, us={"mul": 13.5, "cute": cute, "quack": 28.8}),
        backward.Case("rms", 16384, 4096, us={"mul": 93.3, "cute": 93.3 / 0.9, "quack": 120.0}),
        backward.Case("layer", 4096, 4096, us={"mul": 27.0, "cute": 36.0, "torch": torch, "compile": compiled}),
        backward.Case("rms", 4096, 4096, "forward", us={"cute": 20.0, "cute, saves": saves, "cute + residual": 40.0}),
    ]


def test_bars_of_training() -> None:
    found = list(backward.bars(_cases(17.5, 66.0, 41.0, 20.5), ["cute", "cuda"]))
    assert all(bar.cleared for bar in found), found
    asked = [(bar.asked, bar.least) for bar in found]
    assert asked == [(1.0, False), (1.0, False), (0.88, True), (0.9, False), (1.03, False), (0.8, False)]
    missed = [bar.what for bar in backward.bars(_cases(29.0, 66.0, 39.0, 20.7), ["cute"]) if not bar.cleared]
    assert len(missed) == 4 and all("MISSED" not in what for what in missed)


@pytest.mark.parametrize(("norm", "rows", "hidden"), SHAPES)
def test_candidates_begin_with_the_plan(norm: str, rows: int, hidden: int) -> None:
    """And are tiles that may serve so many rows, each of them once."""
    found = candidates.tiles_for(norm, rows, hidden, 90, 100)
    plans = stream_plans.plans(hidden, 8, asks_of(candidates.variant(norm, hidden)), 90)
    assert found[0] == next(tile for most, tile in plans if most is None or rows <= most)
    assert len(set(found)) == len(found) > 8
    most = INNER_ROWS * partials(1, hidden)
    for tile in found:
        assert not tile.short or rows <= most
        assert partials(1, hidden) % (tile.rows * tile.streams) == 0
        assert max(candidates.checked_rows(hidden, tile.short)) <= most or not tile.short
    assert len({candidates.describe(tile) for tile in found}) == len(found)


@pytest.mark.parametrize(("norm", "rows", "hidden"), SHAPES)
def test_cuda_plans_have_kernels(norm: str, rows: int, hidden: int) -> None:
    text = HEADER.read_text()
    there = {tuple(map(int, found.split(","))) for found in re.findall(r"StreamTile<([\d, ]+)>", text)}
    found = candidates.plans_for(norm, hidden, 100)
    assert found[0] == candidates.Plan() and found[-1].apart and len(found) > 2
    assert all(plan[:5] in there for plan in found[1:-1])
    assert len({str(plan) for plan in found}) == len(found)
