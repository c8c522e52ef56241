"""What `tune_backward` tries: tiles of the CuTe route's backward, and plans of the CUDA route's. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from flashnorm.kernels import stream_plans
from flashnorm.kernels import tile as tiles
from flashnorm.kernels.stream_tile import Asks, StreamTile, asks_of
from flashnorm.program import BackwardProgram, Variant, partials
from flashnorm.program.backward import INNER_ROWS


def program(norm: str) -> BackwardProgram:
    return BackwardProgram("layer", dbias=True) if norm == "layer" else BackwardProgram("rms")


def dtypes(norm: str) -> tuple[str, ...]:
    """bf16 rows and vectors."""
    return tuple("float32" if o.dtypes == ("float32",) else "bfloat16" for o in program(norm).operands())


def variant(norm: str, hidden_size: int) -> Variant:
    return Variant(program(norm), dtypes(norm), hidden_size, vec=math.gcd(hidden_size, 8))


def checked_rows(hidden_size: int, short: bool) -> tuple[int, ...]:
    """Numbers of rows that give every stream a second block, or the longest one that is a block."""
    streams = partials(1, hidden_size)
    return (3, INNER_ROWS * streams - 5) if short else (3, (INNER_ROWS + 1) * streams + 5)


# ------------------------------------------------------------------ CuTe
# A fold that waits beside the rows, where they leave it registers.
BESIDE: dict[str, Any] = {"fold_blocks": 8, "signal_early": True}
# What differs from the plan, by itself: the first ones are those that an argument speaks for.
POLICIES: tuple[dict[str, Any], ...] = (
    {"refill": True}, {"refill": False}, {"stages": 4}, {"stages": 5}, {"stages": 6}, {"stages": 3}, {"stages": 2},
    BESIDE, {"signal_early": True}, {"late_signal": True}, {"fold_ctas": 1}, {"fold_ctas": 2},
    {"stages": 4, "late_signal": True},
    {"stages": 3, "refill": True}, {"again": "values", "outer": "registers"}, {"again": "values", "outer": "shared"},
    {"again": "values", "vectors": "shared"}, {"again": "values", "outer": "shared", "vectors": "raw"},
    {"again": "shared"}, {"again": "shared", "refill": True}, {"outer": "shared"}, {"vectors": "values"},
    {"vectors": "shared"}, {"vectors": "raw"}, {"streaming": True}, {"prefetch": "none"},
)  # fmt: skip
# Rows summed before the ones in front of them are written.
SKEWED: tuple[dict[str, Any], ...] = (
    {"stages": 2}, {"stages": 3, "outer": "registers"}, {"stages": 3}, {"stages": 2} | BESIDE,
    {"stages": 3, "outer": "registers"} | BESIDE, {"stages": 2, "fold_blocks": 8},
    {"stages": 2, "fold_blocks": 4, "signal_early": True}, {"stages": 2, "late_signal": True}, {"stages": 4},
)  # fmt: skip
SHAPED: tuple[dict[str, Any], ...] = ({}, {"refill": True}, {"stages": 4}, {"stages": 2, "again": "shared"})


def _shapes(chosen: StreamTile, sm: int) -> Iterator[dict[str, int]]:
    """Threads of a row, threads of a CTA and CTAs of a row that there may be."""
    t, n, c, h = chosen.threads_per_row, chosen.num_threads, chosen.cluster_n, chosen.hidden_size
    streams = partials(1, h)
    for threads, cta, cluster in (
        (t, n // 2, c), (t, 2 * n, c), (t // 2, n // 2, c), (t // 2, n, c), (2 * t, n, c), (2 * t, 2 * n, c),
        (512, 512, 2), (256, 256, 2), (256, 256, 4), (128, 128, 8), (512, 512, 1), (1024, 1024, 1),
    ):  # fmt: skip
        if cluster > 1 and (h < 8192 or not stream_plans.has_clusters(sm)):
            continue
        if threads < 1 or cta % max(threads, 32) or threads * cluster > tiles.lanes(h) or cta > 1024:
            continue
        if cta // threads > streams or (threads > 32 and cta // threads > 8):
            continue
        yield {"threads_per_row": threads, "num_threads": cta, "cluster_n": cluster}


def _short(chosen: StreamTile, sm: int) -> Iterator[dict[str, Any]]:
    """For streams of a block: two of a worker, or one, whose outer sums take no room."""
    t, n, c = chosen.threads_per_row, chosen.num_threads, chosen.cluster_n
    if t < n:  # several rows a CTA: half as many with two streams each, so that there are as many CTAs
        yield {"threads_per_row": 2 * t, "short": True, "streams": 2, "outer": "shared"}
        yield {"short": True, "streams": 1, "outer": "registers"}
        return
    for threads, cluster in dict.fromkeys(((t, c), (256, 4), (128, 8), (512, 2))):
        if threads * cluster > tiles.lanes(chosen.hidden_size) or not stream_plans.has_clusters(sm):
            continue
        shape = {"threads_per_row": threads, "num_threads": threads, "cluster_n": cluster, "short": True}
        yield shape | {"streams": 2, "outer": "shared", "refill": True}
        yield shape | {"streams": 2, "outer": "shared", "refill": False}
        yield shape | {"streams": 1, "outer": "registers", "refill": True}
        yield shape | {"streams": 1, "outer": "registers", "refill": False, "stages": 3}


def _skewed(chosen: StreamTile, sm: int) -> Iterator[dict[str, Any]]:
    """The plan's rows skewed, and those of other clusters; then what differs from that on the plan's."""
    skew = {"again": "shared", "refill": True, "skew": True}
    shapes: list[dict[str, int]] = [{}]
    if chosen.cluster_n > 1 and stream_plans.has_clusters(sm):
        shapes += [{"threads_per_row": n, "num_threads": n, "cluster_n": c} for n, c in ((512, 2), (256, 4))]
        shapes = [shape for shape in shapes if shape.get("cluster_n") != chosen.cluster_n]
    for policy in SKEWED[:3]:
        yield from (skew | shape | policy for shape in shapes)
    yield from (skew | policy for policy in SKEWED[3:])


def tiles_for(norm: str, rows: int, hidden_size: int, sm: int, limit: int) -> list[StreamTile]:
    """The plan first, then what differs from it."""
    asks = asks_of(variant(norm, hidden_size))
    found_plans = stream_plans.plans(hidden_size, math.gcd(hidden_size, 8), asks, sm)
    chosen = next(tile for most, tile in found_plans if most is None or rows <= most)
    every = found_plans[-1][1]
    changes: list[tuple[StreamTile, dict[str, Any]]] = [(chosen, change) for change in _skewed(chosen, sm)]
    changes += [(every, {}), (every, {"refill": False})]
    if rows <= INNER_ROWS * partials(1, hidden_size):
        changes += [(every, change) for change in _short(every, sm)]
    changes += [(chosen, policy) for policy in POLICIES]
    changes += [(every, shape | policy) for policy in SHAPED for shape in _shapes(every, sm)]
    found: dict[StreamTile, None] = {chosen: None}
    for tile, change in changes:
        with contextlib.suppress(ValueError):
            other = dataclasses.replace(tile, **change)
            if _has_room(other, asks, sm):
                found.setdefault(other)
    return list(found)[:limit]


def _has_room(tile: StreamTile, asks: Asks, sm: int) -> bool:
    room = min(255, 65536 // tile.num_threads) + 12  # the estimate errs to the safe side
    return tile.stream_bytes(asks) <= tiles.shared_limit(sm) and stream_plans.registers(tile, asks) <= room


def describe(tile: StreamTile) -> str:
    flags = [name for name in ("refill", "skew", "short", "streaming") if getattr(tile, name)]
    flags += ["late signal"] * tile.late_signal + [f"{tile.fold_ctas} CTAs of the fold"] * (tile.fold_ctas > 0)
    flags += [f"{tile.fold_blocks} blocks a CTA of the fold"] * (tile.fold_blocks > 1)
    flags += ["early signal"] * tile.signal_early
    flags += ["two streams"] * (tile.streams == 2) + ["no prefetch"] * (tile.prefetch == "none")
    return (
        f"{tile.threads_per_row}/{tile.num_threads}x{tile.cluster_n} stages {tile.stages} again {tile.again} "
        f"outer {tile.outer} vectors {tile.vectors} {' '.join(flags)}{' by columns' * (not tile.summed)}"
    ).rstrip()


# ------------------------------------------------------------------ CUDA
class Plan(NamedTuple):
    """A plan of `csrc/flashnorm/ffi/backward_plan.h`; threads 0: its own choice, stages 0: as many as fit."""

    threads: int = 0
    rows: int = 0
    cluster: int = 0
    lanes: int = 0
    groups: int = 0
    stages: int = 0
    apart: bool = False  # rows and sums by kernels of their own

    def __str__(self) -> str:
        if self.apart:
            return "rows and sums apart"
        shape = f"{self.threads}x{self.rows}x{self.cluster}, {self.lanes} lanes of {self.groups}" * (self.threads > 0)
        return (shape or "the plan") + f", stages {self.stages}" * (self.stages > 0)


TILES = {  # by the most elements of a row, what `StreamTiles` has for it
    256: ((32, 8, 1, 1, 1),), 512: ((32, 8, 1, 2, 1),), 1024: ((32, 8, 1, 4, 1),), 2048: ((128, 4, 1, 2, 1),),
    4096: ((256, 2, 1, 2, 1),), 8192: ((512, 1, 1, 2, 1),),
}  # fmt: skip
WIDE = {16384: ((512, 1, 1, 2, 2), (512, 1, 2, 1, 4)), 32768: ((512, 1, 2, 1, 4),)}
WIDE_OF_TWO = {16384: ((256, 1, 2, 2, 2), (256, 1, 4, 1, 4)), 32768: ((256, 1, 4, 1, 4),)}


def plans_for(norm: str, hidden_size: int, limit: int) -> list[Plan]:
    """The choice, every tile with every number of stages, and the kernels for what no tile serves."""
    table = TILES | (WIDE_OF_TWO if program(norm).sums > 1 else WIDE)
    most = next((size for size in sorted(table) if hidden_size <= size), 0)
    tries = [Plan(*tile, stages) for tile in table.get(most, ()) for stages in (4, 3, 2, 1)]
    return [Plan(), *tries, Plan(apart=True)][:limit]
