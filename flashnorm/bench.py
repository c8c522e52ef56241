"""`flashnorm bench`: the routes of this machine beside eager PyTorch, in a minute.

A first impression, not a measurement to quote: calls from Python, one after another, warm caches, the machine as it
is. The `benchmarks/` folder of the source tree measures with CUDA graphs and cold caches.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from typing import Any

import torch
from rich.table import Table

import flashnorm
from flashnorm import __main__ as cli
from flashnorm import timing
from flashnorm.core import device as devices
from flashnorm.core import plan
from flashnorm.core.dispatch import ROUTES, backend
from flashnorm.core.op import OPS, Op
from flashnorm.verify import Case, make_problem, rivals, turned

SHAPES = {"cuda": "1x4096,64x8192,4096x4096,16384x8192", "cpu": "1x4096,64x4096,1024x4096"}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", default="rmsnorm,fused_add_rmsnorm", help="comma-separated; all: every operator")
    parser.add_argument("--routes", default="", help="comma-separated; default: all that serve, but for torch")
    parser.add_argument("--shapes", default="", metavar="MxH,...", help="default: a few from one row up")
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES), help="of all tensors (default: bf16)")
    parser.add_argument("--device", default="", help="cuda:0, cpu (default: the first GPU, else the CPU)")
    parser.add_argument("--seconds", type=float, default=0.02, help="of one turn of one call (default: 0.02)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the comparison; 1 where a call fails or nothing serves, 2 for wrong usage."""
    try:
        device, ops, routes, shapes = _asked(arguments)
    except ValueError as error:
        print(f"flashnorm bench: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    lines, passed_over = _measure(device, ops, routes, shapes, DTYPES[arguments.dtype], arguments.seconds)
    report = {
        "schema": "flashnorm-bench/1",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "dtype": arguments.dtype,
        "versions": {"flashnorm": flashnorm.__version__, "torch": torch.__version__},
        "how": "host clock, warm caches, median of turns; PyTorch eager",
        "lines": lines,
        "not_here": passed_over,
        "seconds": round(time.monotonic() - began, 1),
    }
    if arguments.json:
        cli.print_json(report)
    else:
        _print(report)
    return 0 if lines and not any(line["error"] for line in lines) else 1


def _asked(
    arguments: argparse.Namespace,
) -> tuple[torch.device, list[Op], list[str], list[tuple[int, int]]]:
    """What is to be measured.

    Raises:
        ValueError: something unknown or malformed.
    """
    here = devices.visible()
    device = here[0]
    if arguments.device:
        found = [d for d in here if arguments.device in (str(d), d.type)]
        if not found:
            raise ValueError(f"--device must be one of {', '.join(map(str, here))}, got {arguments.device!r}")
        device = found[0]
    known = sorted(OPS)
    names = known if arguments.ops == "all" else arguments.ops.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"--ops must be among {', '.join(known)}, got {name!r}")
    routes = arguments.routes.split(",") if arguments.routes else [r for r in ROUTES if r != "torch"]
    for route in routes:
        if route not in ROUTES:
            raise ValueError(f"--routes must be among {', '.join(ROUTES)}, got {route!r}")
    if not 0 < arguments.seconds <= 60:
        raise ValueError(f"--seconds must be over 0 and at most 60, got {arguments.seconds}")
    shapes = []
    for text in (arguments.shapes or SHAPES[device.type]).split(","):
        rows, _, hidden = text.partition("x")
        if not (rows.isdecimal() and hidden.isdecimal() and int(rows) > 0 and 0 < int(hidden) <= 262144):
            raise ValueError(f"--shapes looks like 1x4096,64x8192 with H up to 262144, got {text!r}")
        shapes.append((int(rows), int(hidden)))
    return device, [OPS[name] for name in names], routes, shapes


def _measure(
    device: torch.device,
    ops: list[Op],
    routes: list[str],
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    seconds: float,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """One line for each operator, shape and route, and the reasons of routes that serve nothing here."""
    case = Case(dtype, dtype, dtype)
    lines: list[dict[str, Any]] = []
    passed_over: dict[str, str] = {}
    for op in ops:
        serving = []
        for route in routes:
            with backend(route):
                found = plan.explain(op, devices.facts(device))
            if found.route == route:
                serving.append(route)
            else:
                passed_over.setdefault(route, dict(found.reasons).get(route, f"{found.route} serves in its place"))
        for rows, hidden in shapes:
            for route in serving:
                line = {"op": op.name, "shape": [rows, hidden], "route": route}
                try:
                    line.update(_line(op, case, device, route, rows, hidden, seconds))
                except Exception as error:  # whatever is raised is the finding
                    line["error"] = f"{type(error).__name__}: {error}"
                lines.append(
                    {"seconds": None, "torch_seconds": None, "speed": None, "gb_s": None, "error": None, **line}
                )
    return lines, {route: why for route, why in passed_over.items() if all(n["route"] != route for n in lines)}


def _line(
    op: Op, case: Case, device: torch.device, route: str, rows: int, hidden: int, seconds: float
) -> dict[str, Any]:
    if op.by_rows:
        ours, eager = rivals(op, case, device, rows, hidden)
    else:
        ours, eager = turned.rivals(op, case.x, device, rows, hidden)
    with backend(route), torch.no_grad():
        mine, theirs = timing.per_call((ours, eager), device, seconds)
    # Every byte belongs to the call or to a row: two small problems tell them apart.
    few, more = (_bytes(op, case, n, hidden) for n in (4, 8))
    moved = few + (rows - 4) * (more - few) // 4
    return {"seconds": mine, "torch_seconds": theirs, "speed": theirs / mine, "gb_s": moved / mine / 1e9}


def _bytes(op: Op, case: Case, rows: int, hidden: int) -> int:
    """Bytes that a call must move."""
    if op.by_rows:
        given = make_problem(op, case, rows, hidden, torch.device("cpu")).given
    else:
        given = turned.problem_of(op, rows, hidden, case.x).given
    return op.bytes_moved([given.get(o.name) for o in op.operands])


def _print(report: dict[str, Any]) -> None:
    versions = report["versions"]
    threads = f", {report['threads']} threads" if report["threads"] else ""
    title = (
        f"{report['device']}{threads}, {report['dtype']}, flashnorm {versions['flashnorm']}, torch {versions['torch']}"
    )
    table = Table(title=title, title_justify="left")
    for column in ("operator", "M x H", "route", "us", "torch us", "speed", "GB/s"):
        table.add_column(column, justify="left" if column in ("operator", "route") else "right")
    for n in report["lines"]:
        what = (n["op"], "{} x {}".format(*n["shape"]), n["route"])
        if n["error"]:
            table.add_row(*what, "[red]failed[/red]", "", "", "")
        else:
            times = (f"{n['seconds'] * 1e6:.2f}", f"{n['torch_seconds'] * 1e6:.2f}")
            table.add_row(*what, *times, f"{n['speed']:.2f}x", f"{n['gb_s']:.0f}")
    console = cli.console()
    console.print(table)
    for n in report["lines"]:
        if n["error"]:
            console.print(f"{n['op']}, {n['route']}: {n['error']}", markup=False)
    for route, why in report["not_here"].items():
        console.print(f"{route}: not here: {why}", markup=False)
    console.print(f"{report['how']}; {report['seconds']:.0f} s", markup=False)
