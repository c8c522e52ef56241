"""The command line: `python -m flashnorm doctor | verify | explain | cache | precompile | bench`.

Exit codes: 0 all is well, 1 something failed or nothing serves, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

COMMANDS = {
    "doctor": ("flashnorm.doctor", "what this machine has, and which route serves each operator"),
    "verify": ("flashnorm.verify", "every operator on every route here, against fp64"),
    "explain": ("flashnorm.explain_cli", "which route serves a call, and why the others do not"),
    "cache": ("flashnorm.cache_cli", "the compiled kernels that are kept: list, info, clear"),
    "precompile": ("flashnorm.precompile", "build kernels into a folder, for machines that have no compiler"),
    "gen-module": ("flashnorm.precompile", "another name of precompile"),
    "bench": ("flashnorm.bench", "the routes here beside eager PyTorch, in a minute"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses a command line and runs it; returns the exit code."""
    about = "Normalisation kernels with the same bits everywhere."
    parser = argparse.ArgumentParser(prog="flashnorm", description=about)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.add_argument("--json", action="store_true", help="print JSON")
        importlib.import_module(module).add_arguments(sub)
    arguments = parser.parse_args(argv)
    try:
        check_environment()
    except ValueError as error:
        print(f"flashnorm {arguments.command}: {error}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(COMMANDS[arguments.command][0]).run(arguments))
    except KeyboardInterrupt:
        print(f"flashnorm {arguments.command}: interrupted", file=sys.stderr)
        return 130


def check_environment() -> None:
    """What a first call would say of a forced route that there is not."""
    from flashnorm.config import settings
    from flashnorm.core.dispatch import forced_route

    forced_route(settings.backend, settings.use_cuda_norm)


def console() -> Console:
    """Where tables go: as wide as the terminal, and wide enough for any line in a file or a pipe."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def print_json(value: Any) -> None:
    """Prints plain data the way scripts read it."""
    json.dump(value, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    sys.exit(main())
