"""`flashnorm doctor`: what this machine has, and which route serves each operator. What a bug report needs."""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import flashnorm
from flashnorm import api
from flashnorm.config import settings
from flashnorm.core import device as devices
from flashnorm.core import dispatch
from flashnorm.jit import toolchain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", action="append", default=[], metavar="SM", help="also a device that is not here, such as sm_107a"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; 1 where some operator has no route on a device that is here."""
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
    served = all(route["route"] for d in found["devices"] if d["here"] for route in d["operators"].values())
    return 0 if served else 1


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
    }


def _tools() -> dict[str, Any]:
    return {
        "CuTe DSL": toolchain.find_dsl(),
        "TVM FFI": toolchain.find_tvm_ffi(),
        "nvcc": toolchain.find_nvcc(),
        "host compiler": toolchain.find_host_compiler(),
        "ninja": toolchain.find_ninja(),
        "processor": toolchain.detect_cpu(),
    }


def _tool(found: Any) -> dict[str, Any]:
    if isinstance(found, toolchain.Missing):
        return {"found": False, "detail": str(found)}
    wanted = ("version", "path", "machine", "level")
    detail = [_text(getattr(found, name)) for name in wanted if getattr(found, name, None)]
    if isinstance(found, toolchain.Dsl) and not found.known_good:
        detail.append("(not a version that was tested)")
    return {"found": True, "detail": " ".join(detail) or str(found)}


def _text(value: Any) -> str:
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _device(name: str, facts: devices.DeviceFacts, *, here: bool) -> dict[str, Any]:
    answers: dict[str, dispatch.Explanation] = api.routes(facts)
    return {
        "name": name,
        "here": here,
        "capability": facts.capability,
        "formats": api.formats(facts),
        "operators": {op: {"route": e.route, "passed_over": dict(e.reasons)} for op, e in answers.items()},
    }


def _print(found: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table("what", "found", title="this machine", title_justify="left")
    for name, version in found["versions"].items():
        table.add_row(name, version)
    for name, tool in found["tools"].items():
        table.add_row(name, tool["detail"] if tool["found"] else f"[red]missing[/red]: {tool['detail']}")
    for name, value in found["settings"].items():
        table.add_row(f"setting {name}", value)
    console.print(table)
    for device in found["devices"]:
        title = device["name"] + ("" if device["here"] else " (not here)")
        if device["capability"]:
            title += " compute capability {}.{}".format(*device["capability"])
        table = Table("operator", "route", "passed over", title=title, title_justify="left")
        for op, answer in device["operators"].items():
            why = "\n".join(f"{route}: {reason}" for route, reason in answer["passed_over"].items())
            table.add_row(op, answer["route"] or "[red]none[/red]", why)
        console.print(table)
        console.print("formats: " + ", ".join(f"{name} {how}" for name, how in device["formats"].items()))
