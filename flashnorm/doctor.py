"""`flashnorm doctor`: what this machine has, and which route serves each operator. What a bug report needs."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import itertools
import platform
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import flashnorm
from flashnorm import api
from flashnorm.backends import artifact
from flashnorm.backends.warm import headers
from flashnorm.config import settings
from flashnorm.core import device as devices
from flashnorm.core import dispatch, plan
from flashnorm.core.op import OPS, Op
from flashnorm.core.tools import tools
from flashnorm.jit import JitError, cpu, toolchain
from flashnorm.jit.entry import read_meta
from flashnorm.jit.store import Store, default_store
from flashnorm.program import Program, Variant


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", action="append", default=[], metavar="SM", help="also a device that is not here, such as sm_107a"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; 1 where some operator has neither a route nor a kernel on a device that is here."""
    try:
        asked = [toolchain.parse_arch(name) for name in arguments.arch]
    except ValueError as error:
        print(f"flashnorm doctor: {error}", file=sys.stderr)
        return 2
    found = report(asked)
    if arguments.json:
        from flashnorm.__main__ import print_json

        print_json(found)
    else:
        _print(found)
    answers = [answer for device in found["devices"] if device["here"] for answer in device["operators"].values()]
    return 0 if all(answer["route"] or answer["kernels"] for answer in answers) else 1


def report(asked: list[toolchain.Arch]) -> dict[str, Any]:
    """Versions, tools, settings, and for every device the route of every operator with its reasons."""
    return {
        "versions": versions(),
        "tools": {name: _tool(found) for name, found in _tools().items()},
        "settings": {
            field.name: str(getattr(settings, field.name))
            for field in dataclasses.fields(settings)
            if getattr(settings, field.name) != field.default and field.name != "path"
        },
        "devices": [
            *(_device(str(d), devices.facts(d), here=True) for d in devices.visible()),
            *(_device(arch.name, devices.DeviceFacts("cuda", arch.capability), here=False) for arch in asked),
        ],
    }


def versions() -> dict[str, str]:
    return {
        "flashnorm": flashnorm.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch cuda": str(torch.version.cuda),
        **({"nvidia driver": known} if (known := driver(_read("/proc/driver/nvidia/version"))) else {}),
    }


def _tools() -> dict[str, Any]:
    return {
        "CuTe DSL": toolchain.find_dsl(),
        "TVM FFI": toolchain.find_tvm_ffi(),
        "nvcc": toolchain.find_nvcc(),
        "host compiler": toolchain.find_host_compiler(),
        "headers": headers(),
        "ninja": toolchain.find_ninja(),
        "processor": toolchain.detect_cpu(),
    }


def _tool(found: Any) -> dict[str, Any]:
    if isinstance(found, toolchain.Missing):
        return {"found": False, "detail": str(found)}
    if isinstance(found, toolchain.HostCompiler):
        command = shlex.join(found.command)
        return {"found": True, "detail": f"{command} ({found.kind}) {found.version} {found.machine}"}
    if isinstance(found, cpu.Cpu):
        named = cpu.model_name(_read("/proc/cpuinfo"))
        return {"found": True, "detail": ", ".join([*filter(None, (named, found.machine)), " ".join(found.vectors)])}
    wanted = ("version", "path")
    detail = [_text(getattr(found, name)) for name in wanted if getattr(found, name, None)]
    if isinstance(found, toolchain.Dsl) and not found.known_good:
        detail.append("(not a version that was tested)")
    return {"found": True, "detail": " ".join(detail) or str(found)}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:  # not this system's, or not shown to a container
        return ""


def driver(text: str) -> str | None:
    """The version of NVIDIA's driver, from the text of /proc/driver/nvidia/version."""
    found = re.search(r"^NVRM version:.*?\b(\d+\.[\d.]+\d)\b", text, flags=re.MULTILINE)
    return found[1] if found else None


def _text(value: Any) -> str:
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _device(name: str, facts: devices.DeviceFacts, *, here: bool) -> dict[str, Any]:
    answers: dict[str, dispatch.Explanation] = api.routes(facts)
    ready = kernels(facts)
    return {
        "name": name,
        "model": torch.cuda.get_device_name(name) if here and name.startswith("cuda") else None,
        "here": here,
        "capability": facts.capability,
        "formats": api.formats(facts),
        "operators": {
            op: {"route": e.route, "passed_over": dict(e.reasons), "kernels": dict(ready.get(op, {}))}
            for op, e in answers.items()
        },
    }


# ------------------------------------------------------------------ kernels that need no tools any more
def kernels(facts: devices.DeviceFacts) -> dict[str, Counter[str]]:
    """By operator and route: how many kernels lie in FLASHNORM_AOT_DIR and in the cache that a device can use.

    Only of routes that cannot build any here, be it for want of tools or because building is switched off: there it
    is the kernels that decide whether a call is served.
    """
    target, found = plan.target_of(facts), {name: Counter[str]() for name in OPS}
    store = default_store()

    def builds_nothing(route: str) -> bool:
        possible = dispatch.refusal(route, dispatch.ROUTES, facts, tools(), frozenset({route})) is None
        lacking = settings.disable_jit or dispatch.refusal(route, dispatch.ROUTES, facts, tools()) is not None
        return route != "torch" and possible and lacking

    routes = {route for route in dispatch.ROUTES if builds_nothing(route)}
    for route, variant, names in _kept(store, routes) if routes else ():
        try:
            usable = artifact(route, variant, target).lookup(store) is not None
        except (KeyError, ValueError, JitError):  # nothing of the kind can exist for this device
            continue
        for name in names if usable else ():
            if route in OPS[name].routes:
                found[name][route] += 1
    return {name: counts for name, counts in found.items() if counts}


@functools.cache
def _programs() -> dict[str, tuple[Program, tuple[str, ...]]]:
    """Every program of every operator by its repr, with the names of its operators."""
    found: dict[Program, list[str]] = {}
    for name, op in OPS.items():
        for program in dict.fromkeys(_forms(op)):
            found.setdefault(program, []).append(name)
    return {repr(program): (program, tuple(names)) for program, names in found.items()}


def _forms(op: Op) -> Iterator[Program]:
    always = {operand.name for operand in op.operands} - set(op.optional)
    choices = [[(key, value) for value in dict.fromkeys(values.values())] for key, values in op.options.items()]
    for present in itertools.product(*(((), (name,)) for name in op.optional)):
        for options in itertools.product(*choices):
            yield op.program(frozenset(always.union(*present)), dict(options)).code()


def _kept(store: Store, routes: set[str]) -> list[tuple[str, Variant, tuple[str, ...]]]:
    """(route, variant, operators) of every kernel of these routes in the store's folders, each once."""
    folders = [folder for folder in (*store.aot_dirs, store.root, *store.readable) if folder is not None]
    found: dict[tuple[str, Variant], tuple[str, ...]] = {}
    for path in (path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())):
        key = (read_meta(path) or {}).get("key") or {}
        if key.get("route") in routes:
            variant, names = _read_variant(key)
            if variant is not None:
                found[key["route"], variant] = names
    return [(route, variant, names) for (route, variant), names in found.items()]


def _read_variant(key: dict[str, Any]) -> tuple[Variant | None, tuple[str, ...]]:
    """The variant that a key of the store describes, and its operators; of C++ routes with any H."""
    begin = "Variant(program="
    # The C++ routes' keys name the program and the dtypes, the other one's the whole variant.
    text = key.get("variant") or f"{begin}{key.get('program')}, dtypes={tuple(key.get('dtypes', ()))!r}, hidden_size=8)"
    for shown, (program, names) in _programs().items():
        if text.startswith(f"{begin}{shown}, "):
            try:
                call = ast.parse(f"f({text.removeprefix(f'{begin}{shown}, ')}", mode="eval").body
                assert isinstance(call, ast.Call)
                fields = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
                return Variant(program, **fields), names
            except (SyntaxError, TypeError, ValueError):
                break
    return None, ()


# ------------------------------------------------------------------ what is printed
def _print(found: dict[str, Any]) -> None:
    from flashnorm.__main__ import console as of_commands

    console = of_commands()
    table = Table("what", "found", title="this machine", title_justify="left")
    for name, version in found["versions"].items():
        table.add_row(name, version)
    for name, tool in found["tools"].items():
        table.add_row(name, tool["detail"] if tool["found"] else f"[red]missing[/red]: {tool['detail']}")
    for name, value in found["settings"].items():
        table.add_row(f"setting {name}", value)
    console.print(table)
    for device in found["devices"]:
        title = device["name"] + (f" {device['model']}" if device.get("model") else "")
        title += "" if device["here"] else " (not here)"
        if device["capability"]:
            title += " compute capability {}.{}".format(*device["capability"])
        table = Table("operator", "route", "passed over", title=title, title_justify="left")
        alike: dict[tuple[str, str], list[str]] = {}
        for op, answer in device["operators"].items():
            alike.setdefault(_cells(answer), []).append(op)
        for cells, ops in alike.items():
            table.add_row("\n".join(ops), *cells, end_section=True)
        console.print(table)
        console.print("formats: " + ", ".join(f"{name} {how}" for name, how in device["formats"].items()))


def _cells(answer: dict[str, Any]) -> tuple[str, str]:
    """The route and what was passed over, each with the kernels that are there all the same."""
    route, kernels = answer["route"], answer["kernels"]
    shown = route or ("[yellow]only what is there[/yellow]" if kernels else "[red]none[/red]")
    if settings.disable_jit and route not in (None, "torch"):
        shown += f" (kernels that are there: {kernels.get(route, 0)})"
    lines = []
    for other, reason in answer["passed_over"].items():
        serves = f" (kernels that are there all the same: {kernels[other]})" if kernels.get(other) else ""
        lines.append(f"{other}: {reason}{serves}")
    return shown, "\n".join(lines)
