"""`flashnorm cache`: which compiled kernels are kept, how much room they take, and removing them."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from flashnorm import __main__ as cli
from flashnorm.config import settings
from flashnorm.jit.folders import choose_folders
from flashnorm.jit.inventory import Found, clear, inventory

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_DAY = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", default="list", choices=("list", "info", "clear"), help="default: list")
    parser.add_argument("--older-than", type=float, metavar="DAYS", help="clear: only what was built before that")
    parser.add_argument("--quarantined", action="store_true", help="clear: only what failed its check")


def run(arguments: argparse.Namespace) -> int:
    """Lists, sums up or clears; 1 where something could not be removed."""
    if arguments.action != "clear" and (arguments.older_than is not None or arguments.quarantined):
        return _usage("--older-than and --quarantined go with clear")
    if arguments.older_than is not None and not 0 <= arguments.older_than < float("inf"):
        return _usage(f"--older-than takes a number of days, got {arguments.older_than}")
    # Where building is switched off no folder would be chosen to write to, but there may well be one to look at.
    folders = choose_folders(dataclasses.replace(settings, disable_jit=False))
    root = folders.root
    assert root is not None
    if arguments.action == "clear":
        return _clear(root, arguments)
    places = [("cache", root), *(("read only", path) for path in folders.readable)]
    places += [("precompiled", path) for path in settings.aot_dirs]
    held = [(kind, path, inventory(path)) for kind, path in places]
    report = {
        "folders": [_folder(kind, path, found) for kind, path, found in held],
        "temporary": folders.temporary,
    }
    if arguments.action == "list":
        report["artefacts"] = [{"folder": str(path), **_plain(one)} for _, path, found in held for one in found]
    if arguments.json:
        cli.print_json(report)
        return 0
    console = cli.console()
    if arguments.action == "list":
        for _, path, found in held:
            _print_list(console, path, found)
    else:
        _print_info(console, report)
    return 0


def _usage(text: str) -> int:
    print(f"flashnorm cache: {text}", file=sys.stderr)
    return 2


def _clear(root: Path, arguments: argparse.Namespace) -> int:
    done = clear(root, older_than=(arguments.older_than or 0.0) * _DAY, quarantined_only=arguments.quarantined)
    freed = sum(one.size for one in done.removed)
    if arguments.json:
        failed = [{"path": str(one.path), "reason": reason} for one, reason in done.failed]
        report = {"folder": str(root), "removed": [_plain(one) for one in done.removed], "failed": failed}
        cli.print_json({**report, "bytes": freed})
    else:
        print(f"removed {len(done.removed)} artefacts, {_size(freed)}, from {root}")
        for one, reason in done.failed:
            print(f"flashnorm cache: {one.path} cannot be removed: {reason}", file=sys.stderr)
    return 1 if done.failed else 0


# ------------------------------------------------------------------ what is printed
def _plain(one: Found) -> dict[str, Any]:
    return {**dataclasses.asdict(one), "path": str(one.path), "age": round(one.age)}


def _folder(kind: str, path: Path, found: Iterable[Found]) -> dict[str, Any]:
    found = list(found)
    existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    return {
        "kind": kind,
        "path": str(path),
        "artefacts": len(found),
        "bytes": sum(one.size for one in found),
        "free": shutil.disk_usage(existing).free,
        "states": dict(Counter(one.state for one in found)),
        "routes": dict(Counter(one.route or "other" for one in found if one.state == "kept")),
        "oldest": round(max((one.age for one in found), default=0.0)),
        "newest": round(min((one.age for one in found), default=0.0)),
    }


def _print_list(console: Any, path: Path, found: list[Found]) -> None:
    if not found:
        console.print(f"{path}: nothing is kept", markup=False)
        return
    table = Table(title=escape(str(path)), title_justify="left")
    for column in ("route", "arch", "name", "dtypes", "H", "size", "age", "state"):
        table.add_column(column, justify="right" if column in ("H", "size", "age") else "left", overflow="fold")
    for one in found:
        dtypes = " ".join(_SHORT.get(name, name) for name in dict.fromkeys(one.dtypes))
        hidden = "any" if one.hidden_size is None and one.route in ("cpu", "cuda") else str(one.hidden_size or "")
        state = "" if one.state == "kept" else f"[yellow]{one.state}[/yellow]"
        table.add_row(one.route, one.arch, one.name, dtypes, hidden, _size(one.size), _age(one.age), state)
    console.print(table)
    console.print(f"{len(found)} artefacts, {_size(sum(one.size for one in found))}")


def _print_info(console: Any, report: dict[str, Any]) -> None:
    for folder in report["folders"]:
        title = f"{folder['kind']}{' (temporary)' if report['temporary'] and folder['kind'] == 'cache' else ''}"
        table = Table("what", "found", title=title, title_justify="left")
        table.add_row("folder", escape(folder["path"]))
        table.add_row("artefacts", str(folder["artefacts"]))
        table.add_row("size", f"{_size(folder['bytes'])}; {_size(folder['free'])} free on this disk")
        for what in ("routes", "states"):
            table.add_row(what, ", ".join(f"{name} {count}" for name, count in sorted(folder[what].items())))
        if folder["artefacts"]:
            table.add_row("built", f"{_age(folder['oldest'])} to {_age(folder['newest'])} ago")
        console.print(table)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", _DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
