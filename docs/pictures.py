"""Pictures of the layouts of scales and codes, and plots of the benchmark's results, as SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#e45756", "#72b7b2", "#bab0ac", "#333f8a")
_CELL = 46


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    style = "<style>text{font:12px system-ui,sans-serif;fill:currentColor}</style>"
    size = f"viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img'>{style}{''.join(parts)}</svg>"


def _cell(x: float, y: float, width: float, text: str, colour: str, opacity: float = 0.35) -> str:
    filled = f"fill='{colour}' fill-opacity='{opacity}' stroke='{colour}'"
    box = f"<rect x='{x}' y='{y}' width='{width}' height='24' {filled}/>"
    return box + _text(x + width / 2, y + 16, text, "middle")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f"<text x='{x}' y='{y}' text-anchor='{anchor}'>{text}</text>"


def nibbles() -> str:
    """How a row of e2m1 codes lies in bytes, with a scale for every 16."""
    parts = [_text(0, 14, "elements of a row"), _text(0, 78, "bytes of the codes"), _text(0, 142, "scales of the row")]
    for i in range(10):
        label = f"x{i}" if i < 8 else "..." if i == 8 else "x15"
        parts.append(_cell(130 + i * _CELL, 0, _CELL, label, _COLOURS[i % 2]))
    for i in range(5):
        low, high = ("x0", "x2", "x4", "x6", "x14")[i], ("x1", "x3", "x5", "x7", "x15")[i]
        parts.append(_cell(130 + 2 * i * _CELL, 62, _CELL, f"{high}", _COLOURS[1]))
        parts.append(_cell(130 + (2 * i + 1) * _CELL, 62, _CELL, f"{low}", _COLOURS[0]))
        parts.append(_text(130 + (2 * i + 1) * _CELL, 104, f"byte {i if i < 4 else 7}", "middle"))
    parts.append(_cell(130, 126, 10 * _CELL, "one e4m3 scale for x0 ... x15 (NVFP4)", _COLOURS[2]))
    return _svg(130 + 10 * _CELL + 2, 156, parts)


def tile() -> str:
    """The 512 bytes of a tile of 128 rows and 4 blocks."""
    parts = [_text(0, 14, "16 bytes a line: four rows that are 32 apart, four blocks of each")]
    for line, name in enumerate(("0", "1", "2", "...", "31")):
        y = 30 + line * 28
        parts.append(_text(60, y + 16, f"bytes {int(name) * 16}" if name.isdigit() else "...", "end"))
        for part in range(4):
            row = f"row {int(name) + 32 * part}" if name.isdigit() else "..."
            parts.append(_cell(70 + part * 4 * 34, y, 4 * 34, f"{row}: b0 b1 b2 b3", _COLOURS[part]))
    return _svg(70 + 16 * 34 + 2, 30 + 5 * 28, parts)


def columns() -> str:
    """Scales in columns: one block after the other, rows padded to fours."""
    parts = [_text(0, 14, "M = 6 rows, 3 blocks: strides (1, 8); two rows of padding, always zero")]
    for block in range(3):
        for row in range(8):
            padding = row >= 6
            text, colour = ("0", _COLOURS[7]) if padding else (f"m{row} b{block}", _COLOURS[block])
            parts.append(_cell(row * 62, 28 + block * 30, 62, text, colour, 0.15 if padding else 0.35))
    return _svg(8 * 62 + 2, 28 + 3 * 30, parts)


# ------------------------------------------------------------------ plots
def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def bandwidth(rows: Sequence[dict[str, Any]], op: str) -> str:
    """Bandwidth over bytes of every contender of an operator, both axes logarithmic."""
    mine = [r for r in rows if r["op"] == op and r.get("gbps")]
    contenders = list(dict.fromkeys(r["contender"] for r in mine))
    xs, ys = ([math.log10(r[key]) for r in mine] for key in ("bytes", "gbps"))
    left, top, width, height = 56, 10, 520, 260
    x_low, x_high, y_low, y_high = min(xs), max(xs), math.floor(min(ys)), math.ceil(max(ys))

    def place(bytes_moved: float, gbps: float) -> tuple[float, float]:
        x = left + (math.log10(bytes_moved) - x_low) / (x_high - x_low or 1) * width
        y = top + (y_high - math.log10(gbps)) / (y_high - y_low or 1) * height
        return x, y

    parts = []
    for power in range(y_low, y_high + 1):
        y = top + (y_high - power) / (y_high - y_low or 1) * height
        parts.append(f"<line x1='{left}' x2='{left + width}' y1='{y}' y2='{y}' stroke='#888' stroke-opacity='0.3'/>")
        parts.append(_text(left - 6, y + 4, f"{10**power:g}", "end"))
    for power in range(math.ceil(x_low), math.floor(x_high) + 1):
        x, _ = place(10**power, 10**y_low)
        parts.append(_text(x, top + height + 16, f"{10 ** (power % 3)} {' kMG'[power // 3]}B", "middle"))
    for i, contender in enumerate(contenders):
        colour = _COLOURS[i % len(_COLOURS)]
        points = sorted(place(r["bytes"], r["gbps"]) for r in mine if r["contender"] == contender)
        best = dict(reversed(points))  # of shapes with as many bytes
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(best.items()))
        dash = " stroke-dasharray='4 3'" if contender == "mul" else ""
        thick = 2.5 if contender.startswith("flashnorm") else 1.2
        parts.append(f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='{thick}'{dash}/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5' fill='{colour}'/>" for x, y in points]
        parts.append(f"<rect x='{left + width + 16}' y='{top + i * 20}' width='12' height='12' fill='{colour}'/>")
        parts.append(_text(left + width + 34, top + i * 20 + 11, contender))
    parts.append(_text(4, top + height + 34, "GB/s over bytes that must move"))
    return _svg(left + width + 190, top + height + 44, parts)
