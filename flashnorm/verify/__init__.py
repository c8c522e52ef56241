"""`python -m flashnorm verify`: does every operator compute what it promises, on every route of this machine?

For each operator, route, choice of dtypes and numerics mode:

- **accuracy** against the formula in fp64, judged as the contract judges it: 16-bit results within one step
  (two where the mode rounds twice) and at least 99.9 % equal, fp32 within 2e-6 relative + 1e-6 of the row's largest;
  codes within one step of the formula divided by the scale that stands beside them, scales within one step;
- **bits** against a model of the exact arithmetic in plain PyTorch, written apart from every kernel; GPU routes
  also against the cpu route;
- **repeatability**: run after run, and the rows in chunks of any size, bit for bit;
- **speed** beside eager PyTorch, for information.

Of the main operators it then asks five questions more (`flashnorm.verify.five`): stability over 1000 runs, bytes,
resources of the kernels, the tail of their times, and whether the dtypes agree. `--html FILE` writes all of it as a
page with plots.

The formula and the model (`flashnorm.model`) read an operator's program, stage by stage. A program with a stage
they do not know counts as a failure, not as passed over.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import flashnorm
from flashnorm.core import device as devices
from flashnorm.core import dispatch
from flashnorm.core.dispatch import ROUTES
from flashnorm.core.op import Op
from flashnorm.core.tools import tools
from flashnorm.jit import toolchain
from flashnorm.program import Variant
from flashnorm.verify import builds, five, report, turned
from flashnorm.verify.cases import USUAL, Case, Shapes, chosen, operators
from flashnorm.verify.eager import rivals, speed
from flashnorm.verify.lines import Line, new_line, serves, verify_line
from flashnorm.verify.problem import make_problem

__all__ = ["Case", "Line", "add_arguments", "check_device", "make_problem", "rivals", "run", "table"]


IN_HASTE = "--quick: every stage that kernels are put together from, once; without it, all operators in all cases"


def check_device(
    device: torch.device,
    *,
    quick: bool = False,
    ops: Sequence[str] = (),
    routes: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[list[Line], dict[str, str]]:
    """Checks every operator on every route that serves one device.

    Args:
        device: whose tensors are used.
        quick: few shapes, and one case of each operator that is in `ops`; where none is named, of those operators that
            have a stage which no earlier one has.
        ops, routes: only these; empty means all.
        say: told of progress.

    Returns:
        The lines, and for each route that serves nothing here its reason.
    """
    lines: list[Line] = []
    missing: dict[str, str] = {}
    plans: list[tuple[str, list[Op], list[tuple[Op, Case, Shapes]], list[Op]]] = []
    for route in (r for r in ROUTES if not routes or r in routes):
        if quick and route == "torch" and not routes and plans:
            continue  # plain PyTorch: slow, and the same everywhere
        serving = {}
        for name, op in every().items():
            if ops and name not in ops:
                continue
            reason = serves(op, route, device)
            if reason is None:
                serving[name] = op
            elif route in op.routes:
                missing.setdefault(route, reason)
        rows, mine = ([op for op in serving.values() if op.by_rows is kind] for kind in (True, False))
        covering = quick and not ops
        todo = list(chosen(rows, device, quick=quick, exact=route != "torch", covering=covering))
        turns = list(turned.chosen(mine, covering=covering))
        if todo or turns:
            plans.append((route, rows, todo, turns))
    total = sum(len(todo) + sum(len(turned.forms_of(op, quick)) for op in turns) for _, _, todo, turns in plans)
    begun = itertools.count(1)
    for route, rows, todo, turns in plans:
        also = turned.variants(turns, quick) if route != "torch" else []

        def tell(text: str, route: str = route) -> None:
            say(f"{device.type}: {next(begun)} of {total} lines; {route}, {text}")

        say(f"{device.type}: {route}")
        lines += _check_route(route, todo, _more(rows, route, quick), also, device, quick, tell)
        lines += turned.verify_lines(turns, route, device, quick=quick, say=tell)
    return lines, {route: reason for route, reason in missing.items() if all(line.route != route for line in lines)}


def every() -> dict[str, Op]:
    """All operators that are checked."""
    return operators() | turned.operators()


def _check_route(
    route: str,
    todo: Sequence[tuple[Op, Case, Shapes]],
    more: Sequence[tuple[Op, Case]],
    also: Sequence[Variant],
    device: torch.device,
    quick: bool,
    say: Callable[[str], None],
) -> list[Line]:
    """The lines of a route, each checked once its kernel is there; speeds come last, when no compiler runs beside.

    `say` is told of each line as it begins.
    """
    lines: dict[int, Line] = {}
    with builds.Builds(route, todo, more, device, also) as ahead:
        for place in ahead.in_turn():
            op, case, shapes = todo[place]
            line = lines[place] = new_line(op, route, case, device)
            kernels = f"{ahead.built} of {ahead.total} kernels are there; " if ahead.total else ""
            say(f"{kernels}{op.name}, {line.dtypes}")
            try:
                lines[place] = verify_line(op, route, case, device, shapes, 2 if quick else 4)
            except Exception as error:  # whatever is raised is the finding
                line.failures.append(f"{type(error).__name__}: {error}")
    for place, (op, case, _) in enumerate(todo):
        if case == USUAL and route != "torch" and not quick:
            try:
                lines[place].speed = speed(op, route, device)
            except Exception as error:
                lines[place].failures.append(f"{type(error).__name__}: {error}")
    return [lines[place] for place in range(len(todo))]


def _more(serving: Sequence[Op], route: str, quick: bool) -> list[tuple[Op, Case]]:
    """What the five questions will want."""
    names = _headlines(quick)
    return [(op, case) for op in serving if op.name in names for case in five.cases(op)] if route != "torch" else []


def _headlines(quick: bool) -> tuple[str, ...]:
    return five.HEADLINES[: 1 if quick else None]


def examine_device(
    device: torch.device,
    *,
    quick: bool = False,
    ops: Sequence[str] = (),
    routes: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> list[five.Five]:
    """Asks the five questions of the main operators (quick: of one) on every route that serves one device."""
    found = []
    for route in (r for r in ROUTES if (r in routes if routes else r != "torch")):
        for name in _headlines(quick) if not ops else (name for name in five.HEADLINES if name in ops):
            op = operators()[name]
            if serves(op, route, device) is None:
                say(f"{device.type}: {name}, {route}: five questions")
                found.append(five.examine(op, route, device, **(five.HASTE if quick else {})))
    return found


def examine_elsewhere(
    arch: toolchain.Arch, *, quick: bool = False, ops: Sequence[str] = (), routes: Sequence[str] = ()
) -> list[five.Five]:
    """Builds the main operators' kernels for a GPU that need not be here, and reads their resources."""
    facts = devices.DeviceFacts("cuda", arch.capability)
    names = [name for name in five.HEADLINES[: 2 if quick else None] if not ops or name in ops]
    return [
        five.elsewhere(operators()[name], route, facts)
        for route in ("cute", "cuda")
        for name in names
        if route in operators()[name].routes
        and (not routes or route in routes)
        and dispatch.refusal(route, operators()[name].routes, facts, tools()) is None
    ]


# ------------------------------------------------------------------ the command
def table(lines: Sequence[Line]) -> str:
    """The findings, one line each, failures spelled out below."""
    rows = [
        ("", *["operator", "route", "mode", "dtypes", "steps", "equal", "bits", "=cpu", "repeats", "chunks", "speed"])
    ]
    for n in lines:
        what = ("FAIL" if n.failures else "ok", n.op, n.route, n.numerics, n.dtypes)
        accuracy = (str(n.max_steps), "-" if n.equal is None else f"{n.equal:.3%}")
        bits = (_mark(n.bits), _mark(n.like_cpu), _mark(n.repeats), _mark(n.chunks))
        rows.append((*what, *accuracy, *bits, f"{n.speed:.2f}x" if n.speed else ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    text.insert(1, "-" * len(text[0]))
    text += [f"FAIL {n.op}, {n.route}, {n.numerics}, {n.dtypes}: {why}" for n in lines for why in n.failures]
    return "\n".join(text)


def _mark(value: bool | None) -> str:
    return {None: "-", True: "yes", False: "NO"}[value]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; the command line adds `--json`."""
    parser.add_argument("--quick", action="store_true", help="every stage once, few shapes: seconds, once built")
    parser.add_argument("--html", default="", metavar="FILE", help="also write a page with tables and plots")
    parser.add_argument(
        "--arch", action="append", default=[], metavar="SM", help="also build for a GPU that is not here: its resources"
    )
    parser.add_argument("--device", choices=("all", "cpu", "cuda"), default="all")
    parser.add_argument("--ops", default="", help="comma-separated operators; default: all")
    parser.add_argument("--routes", default="", help="comma-separated routes; default: all that serve")


def run(args: argparse.Namespace) -> int:
    """The command. Returns 0 if every promise held, 1 if one was broken, 2 if nothing could be checked."""
    ops, routes = (tuple(filter(None, text.split(","))) for text in (args.ops, args.routes))
    known_ops = (*operators(), *turned.operators())
    for asked, known, what in ((ops, known_ops, "operator"), (routes, ROUTES, "route")):
        for name in asked:
            if name not in known:
                print(f"flashnorm verify: no {what} {name!r}; there are {', '.join(known)}", file=sys.stderr)
                return 2
    html = Path(args.html) if getattr(args, "html", "") else None
    try:
        elsewhere = [toolchain.parse_arch(name) for name in getattr(args, "arch", ())]
        here = {device.type for device in devices.visible()}
        if args.device not in ("all", *here) and not elsewhere:
            raise ValueError(f"there is no {args.device.upper()} device here")
        if html is not None:
            _try_to_write(html)
    except (OSError, ValueError) as error:
        print(f"flashnorm verify: {error}", file=sys.stderr)
        return 2
    began, say = time.monotonic(), builds.Progress()
    lines: list[Line] = []
    answers: list[five.Five] = []
    found: list[dict[str, Any]] = []
    kinds: set[str] = set()
    for device in devices.visible():
        if device.type in kinds or args.device not in ("all", device.type):
            continue  # one device of a kind
        kinds.add(device.type)
        new, missing = check_device(device, quick=args.quick, ops=ops, routes=routes, say=say)
        more = examine_device(device, quick=args.quick, ops=ops, routes=routes, say=say)
        say.end()
        lines += new
        answers += more
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        questions = [{**asdict(answer), "tail": answer.tail} for answer in more]
        found.append({"device": name, "lines": [asdict(line) for line in new], "five": questions, "not_here": missing})
        if not args.json:
            print(f"{name}, flashnorm {flashnorm.__version__}, torch {torch.__version__}")
            print(table(new))
            if args.quick and not ops:
                print(f"{IN_HASTE} ({len({line.op for line in new})} of {len(every())} operators)")
            print("\n" + five.table(more) if more else "")
            print("".join(f"{route}: not here: {why}\n" for route, why in missing.items()))
    for arch in elsewhere:
        more = examine_elsewhere(arch, quick=args.quick, ops=ops, routes=routes)
        answers += more
        asked_of = [{**asdict(answer), "tail": None} for answer in more]
        found.append({"device": f"{arch.name} (not here)", "lines": [], "five": asked_of, "not_here": {}})
        if not args.json:
            print(f"{arch.name} (not here)\n{five.table(more)}\n")
    failed = sum(bool(line.failures) for line in lines) + sum(bool(answer.failures) for answer in answers)
    made = {
        "schema": "flashnorm-verify/1",
        "ok": bool(lines) and not failed,
        "seconds": round(time.monotonic() - began, 1),
        "versions": {"flashnorm": flashnorm.__version__, "torch": torch.__version__},
        "devices": found,
    }
    if html is not None:
        html.write_text(report.page(made), encoding="utf-8")
    if args.json:
        print(json.dumps(made, indent=2))
    else:
        print(f"{len(lines) + len(answers) - failed} of {len(lines) + len(answers)} lines ok, {made['seconds']:.0f} s")
    return (0 if made["ok"] else 1) if lines else 2


def _try_to_write(file: Path) -> None:
    """Raises OSError where a page cannot be written: better now than after minutes of checks."""
    new = not file.exists()
    if new or file.is_file() or file.is_dir():  # no pipe: who reads it would take this for the end
        file.open("ab").close()
    if new:
        file.unlink()
