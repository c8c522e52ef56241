"""The report of a benchmark run: JSON, text, and the bars a release must clear.

JSON, schema "flashnorm-bench/1":

    schema     "flashnorm-bench/1"
    date       UTC, ISO 8601
    commit     of the checkout, "+dirty" appended where it had changes; "" outside of one
    command    the command line
    machine    device, capability, sms, l2_bytes, memory_bytes | processor, threads, load_average
    versions   of python, torch, triton, cuda, flashnorm, the DSL, TVM-FFI and the peers
    settings   dtype, eps, repeats, budget_s, elapsed_s
    rows       one per operator, shape and contender:
                 op, M, H, dtype, device
                 contender       "flashnorm cute", "flashinfer cute", "mul", ...
                 kind            "ours" | "peer" | "ceiling"
                 us, us_min, us_max   median and range over the repeats; null where it failed
                 bytes           that must move (operand list)
                 gbps            bytes / us
                 to_best_peer    us / us of the fastest peer of that row's operator and shape
                 of_ceiling      gbps / gbps of `mul` there
                 error_l2        relative L2 error of the result against the fp64 formula
                 prepare_s       seconds of the first call: imports and compilation
                 sets, launches  buffer sets rotated over; launches of one graph
                 failure         null, or why there is no time
    host       op, contender, us, us_min, us_max: host microseconds of a warm 1 x 4096 call
    skipped    op, M, H, why
    checks     bar, op, M, H, asked, got, ok
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

SCHEMA = "flashnorm-bench/1"
Row = dict[str, Any]
Add = Callable[..., None]
_DISTRIBUTIONS = (
    "flashnorm", "torch", "triton", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi",
    "flashinfer-python", "quack-kernels", "liger-kernel",
)  # fmt: skip

# The bars. A peer's time carries noise of its own, hence the first two numbers.
SLOWER_RATIO = 1.03
SLOWER_US = 0.05
GEOMEAN_TO_BEST = 0.98
WIDE_ROWS = 65536
WIDE_OF_CEILING = 0.92
CUDA_TO_CUTE = 1.10
HOST_TO_BARE = 1.4
HOST_TO_FLASHINFER = 0.6
CUTE, CUDA = "flashnorm cute", "flashnorm cuda"


def header(command: Sequence[str], device: torch.device, settings: Mapping[str, Any], commit: str = "") -> Row:
    """Everything of the report but its rows; `commit` for a copy of a checkout that git does not know."""
    machine: Row = {"processor": _processor(), "threads": torch.get_num_threads()}
    # A busy machine makes every CPU figure worthless: two threads that wait for each other wait for the scheduler.
    machine["load_average"] = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "memory_bytes": properties.total_memory,
        }
    else:
        machine["device"] = machine["processor"]
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
        "command": " ".join(command),
        "machine": machine,
        "versions": versions,
        "settings": dict(settings),
        "rows": [],
        "host": [],
        "skipped": [],
        "checks": [],
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    def git(*args: str) -> str:
        try:
            done = subprocess.run(
                ("git", *args), cwd=os.path.dirname(__file__), capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    return commit + ("+dirty" if commit and git("status", "--porcelain", "-uno") else "")


def relate(rows: Iterable[Row]) -> None:
    """Fills `to_best_peer` and `of_ceiling` of the rows of one operator and shape, in place."""
    rows = list(rows)
    peers = [r["us"] for r in rows if r["kind"] == "peer" and r["us"]]
    ceiling = [r["gbps"] for r in rows if r["kind"] == "ceiling" and r["us"]]
    for row in rows:
        row["to_best_peer"] = row["us"] / min(peers) if row["us"] and peers else None
        row["of_ceiling"] = row["gbps"] / ceiling[0] if row["us"] and ceiling else None


def groups(rows: Iterable[Row]) -> dict[tuple[str, int, int], dict[str, Row]]:
    """Rows with a time by (op, M, H), then by contender."""
    found: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in rows:
        if row["us"]:
            found.setdefault((row["op"], row["M"], row["H"]), {})[row["contender"]] = row
    return found


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def check(report: Row) -> list[Row]:
    """Evaluates the bars; returns and stores one entry each. A bar without its figures counts as not cleared."""
    entries: list[Row] = []

    def add(bar: str, asked: str, got: str, ok: bool, op: str, *shape: int) -> None:
        rows, width = shape or (None, None)
        entries.append({"bar": bar, "op": op, "M": rows, "H": width, "asked": asked, "got": got, "ok": bool(ok)})

    by_shape = groups(report["rows"])
    for op in dict.fromkeys(row["op"] for row in report["rows"]):
        to_best, to_cute = [], []
        for (name, tokens, width), rows in by_shape.items():
            if name != op:
                continue
            cute, cuda = rows.get(CUTE), rows.get(CUDA)
            peers = {n: r["us"] for n, r in rows.items() if r["kind"] == "peer"}
            if cute and peers:
                best = min(peers, key=peers.__getitem__)
                limit = max(SLOWER_RATIO * peers[best], peers[best] + SLOWER_US)
                to_best.append(cute["us"] / peers[best])
                asked = f"<= {limit:.2f} us ({best} {peers[best]:.2f})"
                add("cute against fastest peer", asked, f"{cute['us']:.2f} us", cute["us"] <= limit, op, tokens, width)
            if cute and width >= WIDE_ROWS and cute["of_ceiling"]:
                got = cute["of_ceiling"]
                add("cute on wide rows", f">= {WIDE_OF_CEILING} of mul", f"{got:.3f}", got >= WIDE_OF_CEILING,
                    op, tokens, width)  # fmt: skip
            if cute and cuda:
                to_cute.append(cuda["us"] / cute["us"])
            rival = peers.get("flashinfer cuda")
            if cuda and rival:
                add("cuda against flashinfer cuda", f"< {rival:.2f} us", f"{cuda['us']:.2f} us", cuda["us"] < rival,
                    op, tokens, width)  # fmt: skip
        if report["machine"].get("capability"):
            _mean(add, "cute / fastest peer, geomean", GEOMEAN_TO_BEST, to_best, op)
            _mean(add, "cuda / cute, geomean", CUDA_TO_CUTE, to_cute, op)
    _check_host(add, report["host"])
    report["checks"] = entries
    return entries


def _mean(add: Add, bar: str, limit: float, values: Sequence[float], op: str) -> None:
    got = f"{geomean(values):.3f} over {len(values)} shapes" if values else "not measured"
    add(bar, f"<= {limit}", got, bool(values) and geomean(values) <= limit, op)


def _check_host(add: Add, host: Sequence[Mapping[str, Any]]) -> None:
    for op in dict.fromkeys(entry["op"] for entry in host):
        us = {entry["contender"]: entry["us"] for entry in host if entry["op"] == op}
        for route in (CUTE, CUDA):
            for rival, limit in ((f"{route}, bare launch", HOST_TO_BARE), ("flashinfer cute", HOST_TO_FLASHINFER)):
                if route in us and rival in us:
                    ratio = us[route] / us[rival]
                    got = f"{ratio:.2f}x ({us[route]:.2f} / {us[rival]:.2f} us)"
                    add(f"host: {route} / {rival}", f"<= {limit}x", got, ratio <= limit, op)


def table(report: Row) -> str:
    """Microseconds and GB/s, one line a shape, as markdown; the fastest contender of a line in bold."""
    lines: list[str] = []
    for op in dict.fromkeys(row["op"] for row in report["rows"]):
        mine = [row for row in report["rows"] if row["op"] == op]
        names = list(dict.fromkeys(row["contender"] for row in mine))
        lines += [f"**{op}**, {mine[0]['dtype']}: us (GB/s)", ""]
        lines += ["| M x H | " + " | ".join(names) + " | ours / best peer |", "|---" * (len(names) + 2) + "|"]
        for key in dict.fromkeys((row["M"], row["H"]) for row in mine):
            cells, ratios = [], []
            here = {row["contender"]: row for row in mine if (row["M"], row["H"]) == key}
            times = [row["us"] for row in here.values() if row["us"] and row["kind"] != "ceiling"]
            for name in names:
                row = here.get(name)
                if row is None:
                    cells.append("-")
                elif not row["us"]:
                    cells.append("failed")
                else:
                    cell = f"{_short(row['us'])} ({row['gbps']:.0f})"
                    cells.append(f"**{cell}**" if times and row["us"] == min(times) else cell)
                    if row["kind"] == "ours" and row["to_best_peer"]:
                        ratios.append(f"{row['to_best_peer']:.2f}")
            lines.append(f"| {key[0]} x {key[1]} | " + " | ".join(cells) + f" | {' / '.join(ratios) or '-'} |")
        for name in dict.fromkeys(row["contender"] for row in mine if row["kind"] == "ours"):
            found = [r["to_best_peer"] for r in mine if r["contender"] == name and r["to_best_peer"]]
            if found:
                lines += ["", f"{name} / fastest peer: {geomean(found):.3f} (geometric mean of {len(found)} shapes)"]
        lines.append("")
    if report["host"]:
        lines += ["Host us of a warm call, 1 x 4096:", "", "| op | contender | us |", "|---|---|---|"]
        lines += [f"| {e['op']} | {e['contender']} | {e['us']:.2f} |" for e in report["host"]]
        lines.append("")
    failures = [r for r in report["rows"] if r["failure"]]
    if failures or report["skipped"]:
        lines.append("Not measured:")
        lines += [f"- {r['op']} {r['M']}x{r['H']} {r['contender']}: {r['failure']}" for r in failures]
        lines += [f"- {s['op']} {s['M']}x{s['H']}: {s['why']}" for s in report["skipped"]]
        lines.append("")
    return "\n".join(lines)


def _short(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def check_table(entries: Sequence[Mapping[str, Any]]) -> str:
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


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
