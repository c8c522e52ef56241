"""The report of a benchmark run: JSON and text. The bars it is held to stand in `bars.py`.

JSON, schema "flashnorm-bench/1":

    schema     "flashnorm-bench/1"
    date       UTC, ISO 8601
    commit     of the checkout, "+dirty" appended where it had changes; "" outside of one
    command    the command line
    machine    device, capability, sms, l2_bytes, memory_bytes | processor, threads, load_average
    versions   of python, torch, triton, cuda, flashnorm, the DSL, TVM-FFI and the peers
    settings   dtype, eps, scale, repeats, budget_s, elapsed_s; spent_s: seconds by what they went into
    rows       one per operator, shape and contender:
                 op, M, H, dtype, device   op with its form where it has several: "rmsnorm_dynamic_quant/token"
                 contender       "flashnorm cute", "flashinfer cute", "mul", ...
                 kind            "ours" | "peer" | "ceiling"
                 us, us_min, us_max   median and range over the repeats; null where it failed
                 bytes           that must move (operand list)
                 gbps            bytes / us
                 to_best_peer    us / us of the fastest peer of that row's operator and shape
                 of_ceiling      gbps / gbps of `mul` there
                 error_l2        relative L2 error of the (dequantised) result against the fp64 formula
                 prepare_s       seconds of the first call: imports and compilation, but for what was compiled in
                                 the background before it
                 sets, launches  buffer sets rotated over; launches of one graph
                 failure         null, or why there is no time
    host       op, contender, us, us_min, us_max, failure: host microseconds of a warm 1 x 4096 call
    skipped    op, M, H, why
    checks     bar, op, M, H, asked, got, ok
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .bars import geomean

SCHEMA = "flashnorm-bench/1"
Row = dict[str, Any]
_DISTRIBUTIONS = (
    "flashnorm", "torch", "triton", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi",
    "flashinfer-python", "quack-kernels", "liger-kernel",
)  # fmt: skip


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
        lines += [f"| {e['op']} | {e['contender']} | {e['us']:.2f} |" for e in report["host"] if e["us"]]
        lines.append("")
    failures = [r for r in report["rows"] if r["failure"]]
    unhosted = [e for e in report["host"] if e["failure"]]
    if failures or unhosted or report["skipped"]:
        lines.append("Not measured:")
        lines += [f"- {r['op']} {r['M']}x{r['H']} {r['contender']}: {r['failure']}" for r in failures]
        lines += [f"- {e['op']}, host cost, {e['contender']}: {e['failure']}" for e in unhosted]
        lines += [f"- {s['op']} {s['M']}x{s['H']}: {s['why']}" for s in report["skipped"]]
        lines.append("")
    return "\n".join(lines)


def _short(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
