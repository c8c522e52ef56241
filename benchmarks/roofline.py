"""Buffers of a call and the bytes that must move, and the picture of who moves them how fast."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_COLOURS = {"ours": ("#0b6e4f", "#5aa469", "#1d3557", "#7a9cc6"), "ceiling": ("#555555",)}
_PEER_COLOURS = ("#e76f51", "#e9c46a", "#9d4edd", "#c77dff", "#2a9d8f", "#f4a261", "#b56576")
_PANELS_A_ROW = 3


@dataclass(frozen=True)
class Buffer:
    """One operand of a call on a flat batch of rows: `mode` and `kind` as `flashnorm.program.Operand` has them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    mode: str = "in"
    kind: str = "row"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def bytes_moved(buffers: Iterable[Buffer]) -> int:
    """The fewest bytes a call moves: every "in" read once, every "out" written once, every "inout" both."""
    return sum(buffer.bytes * (2 if buffer.mode == "inout" else 1) for buffer in buffers)


def plot(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], title: str) -> None:
    """Draws achieved GB/s against the bytes of a call, one panel an operator, log-log, `mul` as the roof.

    Args:
        rows: rows of the JSON report (see `report.py`); rows without a time are left out.
        path: the PNG to write.
        title: drawn above the panels: device, dtype.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in rows if row["us"] is not None]
    ops = list(dict.fromkeys(row["op"] for row in timed))
    if not ops:
        return
    across = min(len(ops), _PANELS_A_ROW)
    down = -(-len(ops) // across)
    figure, axes = plt.subplots(down, across, figsize=(8.5 * across, 6.5 * down), squeeze=False, layout="constrained")
    # One colour a contender over all panels.
    colours: dict[str, str] = {}
    for row in timed:
        if row["contender"] not in colours:
            palette = _COLOURS.get(row["kind"], _PEER_COLOURS)
            used = sum(1 for c in colours.values() if c in palette)
            colours[row["contender"]] = palette[used % len(palette)]
    # `mul` moves other bytes than the operator it stands beside; it is drawn above the same place.
    place = {(r["op"], r["M"], r["H"]): r["bytes"] for r in rows if r["kind"] != "ceiling"}

    def at(row: Mapping[str, Any]) -> float:
        return float(place.get((row["op"], row["M"], row["H"]), row["bytes"]))

    for axis in axes.flat[len(ops) :]:
        axis.set_visible(False)
    for axis, op in zip(axes.flat, ops, strict=False):
        for name, colour in colours.items():
            mine = sorted((r for r in timed if r["op"] == op and r["contender"] == name), key=at)
            if not mine:
                continue
            kind = mine[0]["kind"]
            axis.plot(
                [at(r) for r in mine],
                [r["gbps"] for r in mine],
                marker="o" if kind == "ours" else ".",
                linestyle="--" if kind == "ceiling" else "-",
                linewidth=2.2 if kind == "ours" else 1.0,
                zorder=3 if kind == "ours" else 2,
                color=colour,
                label=name,
            )
        for row in timed:
            if row["op"] == op and row["kind"] == "ceiling":
                label = f"{row['M']}x{row['H']}"
                axis.annotate(label, (at(row), row["gbps"]), fontsize=6, rotation=60, alpha=0.7)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("bytes that must move in a call")
        axis.set_ylabel("GB/s")
        axis.set_title(op)
        axis.grid(True, which="both", alpha=0.2)
        axis.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)
