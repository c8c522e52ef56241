"""The findings as one HTML file that needs nothing else: tables, and bars drawn as SVG."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; margin: 0.5rem 0 1.5rem; }
td, th { border-bottom: 1px solid #ddd; padding: 0.2rem 0.7rem 0.2rem 0; text-align: left; }
.ok { color: #1a7f37; } .bad { color: #b3261e; font-weight: 600; }
svg text { font: 12px system-ui, sans-serif; }
"""
_BAR, _LABEL, _WIDTH = 18, 260, 420
# what is drawn: key, title, what is good about it
_PLOTS = (
    ("bytes_share", "Bytes: time of a copy of as many bytes / time of the call", "longer is better"),
    ("tail", "Tail: p99 / p50", "1 is best"),
    ("occupancy", "Occupancy that registers leave", "longer is better"),
    ("registers", "Registers a thread", "shorter is better"),
)


def page(report: Mapping[str, Any]) -> str:
    """The HTML of a report as `verify --json` prints it."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>flashnorm verify</title>",
        f"<style>{_STYLE}</style><h1>flashnorm verify: {_verdict(report['ok'])}</h1>",
        f"<p>{_words(report['versions'])}; {report['seconds']} s</p>",
    ]
    for device in report["devices"]:
        parts.append(f"<h2>{html.escape(str(device['device']))}</h2>")
        five = device.get("five", [])
        if five:
            parts.append("<h3>Five dimensions</h3>")
            parts.append(
                _table(
                    five,
                    (
                        "op",
                        "route",
                        "runs",
                        "stable",
                        "special",
                        "bytes_needed",
                        "bytes_share",
                        "registers",
                        "stack",
                        "shared",
                        "occupancy",
                        "p50",
                        "p99",
                        "one_mind",
                        "ulp",
                    ),
                )
            )
            parts += [_bars(five, *plot) for plot in _PLOTS]
        if device["lines"]:
            parts.append("<h3>Results</h3>")
            about, kept = ("op", "route", "numerics", "dtypes"), ("bits", "like_cpu", "repeats", "chunks")
            parts.append(_table(device["lines"], (*about, "max_steps", "equal", *kept, "speed")))
        failures = [(x["op"], x["route"], why) for x in (*five, *device["lines"]) for why in x["failures"]]
        if failures:
            items = "".join(f"<li>{html.escape(', '.join(failure))}</li>" for failure in failures)
            parts.append(f"<h3>Failures</h3><ul class='bad'>{items}</ul>")
        if device["not_here"]:
            parts.append(f"<p>Not here: {_words(device['not_here'])}</p>")
    return "\n".join(parts) + "</html>\n"


def _verdict(ok: bool) -> str:
    return "<span class='ok'>every promise held</span>" if ok else "<span class='bad'>broken promises</span>"


def _words(found: Mapping[str, Any]) -> str:
    return html.escape("; ".join(f"{name}: {value}" for name, value in found.items()))


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    used = [c for c in columns if any(row.get(c) is not None for row in rows)]
    head = "".join(f"<th>{html.escape(c.replace('_', ' '))}</th>" for c in used)
    body = "".join(f"<tr>{''.join(_cell(row.get(c)) for c in used)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return f"<td class='{'ok' if value else 'bad'}'>{'yes' if value else 'NO'}</td>"
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"<td>{html.escape(text)}</td>"


def _bars(rows: Sequence[Mapping[str, Any]], key: str, title: str, good: str) -> str:
    """A bar for every row that has the value."""
    values = [(f"{row['op']}, {row['route']}", row[key]) for row in rows if row.get(key) is not None]
    if not values:
        return ""
    largest = max(value for _, value in values) or 1.0
    bars = []
    for i, (label, value) in enumerate(values):
        y, width = i * (_BAR + 4), max(1.0, value / largest * _WIDTH)
        bars.append(
            f"<text x='{_LABEL - 8}' y='{y + 13}' text-anchor='end'>{html.escape(label)}</text>"
            f"<rect x='{_LABEL}' y='{y}' width='{width:.1f}' height='{_BAR}' fill='#4c78a8'/>"
            f"<text x='{_LABEL + width + 6:.1f}' y='{y + 13}'>{value:.3g}</text>"
        )
    height = len(values) * (_BAR + 4)
    drawn = f"<svg width='{_LABEL + _WIDTH + 80}' height='{height}' role='img'>{''.join(bars)}</svg>"
    return f"<h4>{html.escape(title)} ({html.escape(good)})</h4>{drawn}"
