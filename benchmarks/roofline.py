"""Bytes that must move, taken from an operator's operand list, and the picture of who moves them how fast."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from flashnorm.program import Operand

_COLOURS = {"ours": ("#0b6e4f", "#5aa469", "#1d3557", "#7a9cc6"), "ceiling": ("#555555",)}
_PEER_COLOURS = ("#e76f51", "#e9c46a", "#9d4edd", "#c77dff", "#2a9d8f", "#f4a261", "#b56576")


def operand_shape(operand: Operand, num_tokens: int, hidden_size: int) -> tuple[int, ...]:
    """The contiguous shape of an operand for one flat batch of rows."""
    return {
        "row": (num_tokens, hidden_size),
        "vec": (hidden_size,),
        "per_row": (num_tokens,),
        "scalar": (1,),
    }[operand.kind]


def operand_bytes(operand: Operand, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of an operand's buffer; `dtype` serves where the operand does not fix its own."""
    itemsize = (getattr(torch, operand.dtype) if operand.dtype else dtype).itemsize
    elements = 1
    for extent in operand_shape(operand, num_tokens, hidden_size):
        elements *= extent
    return elements * itemsize


def bytes_moved(operands: Iterable[Operand], num_tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
    """The fewest bytes a call moves: every "in" read once, every "out" written once, every "inout" both."""
    total = 0
    for operand in operands:
        times = 2 if operand.mode == "inout" else 1
        total += times * operand_bytes(operand, num_tokens, hidden_size, dtype)
    return total


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
    figure, axes = plt.subplots(1, len(ops), figsize=(8.5 * len(ops), 6.5), squeeze=False)
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

    for axis, op in zip(axes[0], ops, strict=True):
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
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
