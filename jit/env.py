"""What the parts of `flashnorm.jit` share: errors, the logger, running a tool, where the cache is.

A tool's failure is a value (`Missing`) while it is looked for and an exception (`BuildError`) once
it was asked to build something.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config import compiler_environment

logger = logging.getLogger("flashnorm")

# Output of a failing compiler that goes into the exception; errors come last, notes by the hundred.
_MAX_LINES = 40


class JitError(RuntimeError):
    """An artefact could not be had."""


class BuildError(JitError):
    """Building an artefact failed: the compiler, its absence, or the disk.

    Attributes:
        command: the command that failed, as one would type it, or "".
        output: everything it printed.
    """

    def __init__(self, message: str, *, command: str = "", output: str = "") -> None:
        self.command = command
        self.output = output
        lines = output.strip().splitlines()
        text = message
        if lines:
            cut = "" if len(lines) <= _MAX_LINES else f"[... {len(lines) - _MAX_LINES} lines more ...]\n"
            text += "\n" + cut + "\n".join(lines[-_MAX_LINES:])
        if command:
            text += f"\ncommand: {command}"
        super().__init__(text)


class MissingArtifact(JitError):
    """An artefact is not there and may not be built."""


class LoadError(JitError):
    """An artefact is there and intact, but does not load in this process."""


@dataclass(frozen=True)
class Missing:
    """Something that was looked for and is not there; false, and says why."""

    reason: str

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        return self.reason


def run(command: Sequence[str | Path], *, cwd: Path | None = None, timeout: float | None = None) -> str:
    """Run a tool to its end and return what it printed (both streams).

    Args:
        command: the program and its arguments; no shell is involved.
        cwd: the folder to run in.
        timeout: seconds after which the tool is killed.

    Raises:
        BuildError: the tool is not there, failed, or took too long.
    """
    words = [str(word) for word in command]
    shown = shlex.join(words)
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=compiler_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{words[0]} was still running after {timeout:g} s", command=shown) from error
    except OSError as error:
        raise BuildError(f"{words[0]} could not be started: {error}", command=shown) from error
    if done.returncode != 0:
        how = "failed with exit status" if done.returncode > 0 else "was killed by signal"
        raise BuildError(f"{words[0]} {how} {abs(done.returncode)}", command=shown, output=done.stdout)
    return done.stdout
