"""The bars: what `--check` holds the figures of a GPU run to. A bar without its figures counts as not cleared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Add = Callable[..., None]
Shape = tuple[int, int]

CUTE, CUDA = "flashnorm cute", "flashnorm cuda"
BARE = "bare launch"
CUDA_TO_CUTE = 1.10


@dataclass(frozen=True)
class Bars:
    """What the figures of one bench are held to.

    Attributes:
        ours: the contender that is held to them.
        ratio, slack_us: its time is at most `ratio` of the fastest rival's, or at most that much more: a rival's
            time carries noise of its own. None: its time is shown, no more.
        rivals: the peers that count; None: all of them.
        geomean: the most that its time / the fastest rival's may be in the geometric mean over all shapes.
        ceiling: the least share of `mul`'s bandwidth, by shape.
        fallback: the CUDA route is held to FlashInfer's CUDA kernels, and in the mean to the CuTe route.
        host: the most that a warm call may cost the host, as a multiple of the bare launch or of a peer's call.
    """

    ours: str = CUTE
    ratio: float | None = 1.03
    slack_us: float = 0.05
    rivals: tuple[str, ...] | None = None
    geomean: float | None = None
    ceiling: Mapping[Shape, float] = field(default_factory=dict)
    fallback: bool = False
    host: Mapping[str, float] = field(default_factory=lambda: {BARE: 1.4})


def groups(rows: Iterable[Row]) -> dict[tuple[str, int, int], dict[str, Row]]:
    """Rows by (op, M, H), then by contender."""
    found: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["op"], row["M"], row["H"]), {})[row["contender"]] = row
    return found


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def check(report: Row, bars: Mapping[str, Bars]) -> list[Row]:
    """Evaluates the bars of every operator of the report; returns and stores one entry each."""
    entries: list[Row] = []

    def add(bar: str, asked: str, got: str, ok: bool, op: str, *shape: int) -> None:
        rows, width = shape or (None, None)
        entries.append({"bar": bar, "op": op, "M": rows, "H": width, "asked": asked, "got": got, "ok": bool(ok)})

    measured = groups(report["rows"])
    # What there was no time for is missing in the rows.
    shapes = dict.fromkeys((*measured, *((s["op"], s["M"], s["H"]) for s in report["skipped"])))
    for op in dict.fromkeys(name for name, _, _ in shapes) if report["machine"].get("capability") else ():
        mine = {key[1:]: measured.get(key, {}) for key in shapes if key[0] == op}
        _check_times(add, op, mine, bars[op])
        if bars[op].fallback:
            _check_fallback(add, op, mine)
    for op in dict.fromkeys(entry["op"] for entry in report["host"]):
        _check_host(add, op, {e["contender"]: e["us"] for e in report["host"] if e["op"] == op}, bars[op].host)
    report["checks"] = entries
    return entries


def _check_times(add: Add, op: str, mine: Mapping[Shape, Mapping[str, Row]], bars: Bars) -> None:
    ours, ratios = bars.ours, []
    route = ours.split()[-1]
    for shape, rows in mine.items():
        us = _us(rows.get(ours))
        rivals = {n: r["us"] for n, r in rows.items() if r["kind"] == "peer" and r["us"]}
        if bars.rivals is not None:
            rivals = {name: rivals[name] for name in bars.rivals if name in rivals}
        if bars.ratio is not None:
            bar = f"{route} against fastest peer" if bars.rivals is None else f"{route} against {_either(bars.rivals)}"
            if us and rivals:
                best = min(rivals, key=rivals.__getitem__)
                limit = max(bars.ratio * rivals[best], rivals[best] + bars.slack_us)
                ratios.append(us / rivals[best])
                add(bar, f"<= {limit:.2f} us ({best} {rivals[best]:.2f})", f"{us:.2f} us", us <= limit, op, *shape)
            else:
                lacking = "of no rival" if us else f"not of {ours}"
                add(bar, f"<= {bars.ratio}x", f"a time {lacking}", False, op, *shape)
        if shape in bars.ceiling:
            least, got = bars.ceiling[shape], (rows.get(ours) or {}).get("of_ceiling")
            text = f"{got:.3f}" if got else "not measured"
            add(f"{route} of the ceiling", f">= {least} of mul", text, bool(got) and got >= least, op, *shape)
    if bars.geomean is not None:
        _mean(add, f"{route} / fastest peer, geomean", bars.geomean, ratios, op)


def _check_fallback(add: Add, op: str, mine: Mapping[Shape, Mapping[str, Row]]) -> None:
    ratios = []
    for shape, rows in mine.items():
        cute, cuda, rival = (_us(rows.get(name)) for name in (CUTE, CUDA, "flashinfer cuda"))
        if cute and cuda:
            ratios.append(cuda / cute)
        if cuda and rival:
            asked, got = f"< {rival:.2f} us", f"{cuda:.2f} us"
            add("cuda against flashinfer cuda", asked, got, cuda < rival, op, *shape)
    _mean(add, "cuda / cute, geomean", CUDA_TO_CUTE, ratios, op)


def _us(row: Row | None) -> float | None:
    return row["us"] if row else None


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _mean(add: Add, bar: str, limit: float, values: Sequence[float], op: str) -> None:
    got = f"{geomean(values):.3f} over {len(values)} shapes" if values else "not measured"
    add(bar, f"<= {limit}", got, bool(values) and geomean(values) <= limit, op)


def _check_host(add: Add, op: str, us: Mapping[str, float | None], limits: Mapping[str, float]) -> None:
    for route in (CUTE, CUDA):
        for rival, limit in limits.items():
            other = f"{route}, {rival}" if rival == BARE else rival
            mine, theirs = us.get(route), us.get(other)
            if mine and theirs:
                got = f"{mine / theirs:.2f}x ({mine:.2f} / {theirs:.2f} us)"
                add(f"host: {route} / {other}", f"<= {limit}x", got, mine / theirs <= limit, op)
            elif route in us and rival == BARE:
                add(f"host: {route} / {other}", f"<= {limit}x", "not measured", False, op)


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Asked and got of every bar that was missed, then how many of each kind were cleared."""
    lines = ["| missed bar | op | M x H | asked | got |", "|---" * 5 + "|"]
    for entry in entries:
        if not entry["ok"]:
            shape = f"{entry['M']} x {entry['H']}" if entry["M"] else "all"
            lines.append(f"| {entry['bar']} | {entry['op']} | {shape} | {entry['asked']} | {entry['got']} |")
    lines = lines if len(lines) > 2 else []
    lines += ["", "| bar | op | cleared | got |", "|---" * 4 + "|"]
    for bar, op in dict.fromkeys((entry["bar"], entry["op"]) for entry in entries):
        mine = [entry for entry in entries if (entry["bar"], entry["op"]) == (bar, op)]
        got = f"{mine[0]['got']}, asked {mine[0]['asked']}" if len(mine) == 1 else ""
        lines.append(f"| {bar} | {op} | {sum(e['ok'] for e in mine)} of {len(mine)} | {got} |")
    return "\n".join(lines)
