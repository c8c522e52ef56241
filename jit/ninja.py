"""build.ninja as text, and running it.

`Unit`s are compiled side by side and linked into one library. The text is a pure function of its
arguments. Where ninja is not installed the same commands run from a small thread pool: a build has
a handful of units and never an incremental rebuild, so ninja is a convenience here, not a need.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..config import Settings, settings
from .env import BuildError, Missing, run
from .toolchain import find_ninja, job_count


@dataclass(frozen=True)
class Unit:
    """One translation unit.

    Attributes:
        source: the file, absolute or relative to the build folder.
        command: compiler and flags, without source, output and "-c".
        object: the object file, relative to the build folder.
    """

    source: str
    command: tuple[str, ...]
    object: str

    def words(self) -> list[str]:
        return [*self.command, "-c", self.source, "-o", self.object]


@dataclass(frozen=True)
class Link:
    """The link step.

    Attributes:
        command: linker and flags that come before the objects.
        output: the library, relative to the build folder.
        libraries: what comes after the objects: "-L...", "-ltvm_ffi".
    """

    command: tuple[str, ...]
    output: str = "kernel.so"
    libraries: tuple[str, ...] = ()

    def words(self, units: Sequence[Unit]) -> list[str]:
        return [*self.command, *(unit.object for unit in units), "-o", self.output, *self.libraries]


def escape_path(text: str) -> str:
    """A path in a build line, where "$", ":" and blanks mean something.

    Raises:
        ValueError: it contains a newline, which ninja cannot express.
    """
    if "\n" in text or "\r" in text:
        raise ValueError(f"a path with a newline cannot be built: {text!r}")
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def escape_value(words: Sequence[str]) -> str:
    """A command as the value of a variable: quoted for the shell, then "$" for ninja."""
    text = shlex.join(words)
    if "\n" in text or "\r" in text:
        raise ValueError(f"a command with a newline cannot be built: {text!r}")
    return text.replace("$", "$$")


def ninja_text(units: Sequence[Unit], link: Link) -> str:
    """The build file. One rule runs whatever command an edge carries."""
    lines = [
        "ninja_required_version = 1.3",
        "",
        "rule run",
        "  command = $what",
        "  description = $what",
        "",
    ]
    for unit in units:
        lines.append(f"build {escape_path(unit.object)}: run {escape_path(unit.source)}")
        lines.append(f"  what = {escape_value(unit.words())}")
    objects = " ".join(escape_path(unit.object) for unit in units)
    lines.append(f"build {escape_path(link.output)}: run {objects}")
    lines.append(f"  what = {escape_value(link.words(units))}")
    lines.append(f"default {escape_path(link.output)}")
    return "\n".join(lines) + "\n"


def build(folder: Path, units: Sequence[Unit], link: Link, config: Settings = settings) -> Path:
    """Compile and link in `folder`; the sources are there already.

    Returns:
        The library.

    Raises:
        BuildError: with the failing command and the end of what it printed.
    """
    jobs = min(job_count(config), max(1, len(units)))
    ninja = find_ninja(config)
    if isinstance(ninja, Missing):
        _run_directly(folder, units, link, jobs)
    else:
        (folder / "build.ninja").write_text(ninja_text(units, link), encoding="utf-8")
        _run_ninja(folder, ninja.path, jobs)
    library = folder / link.output
    if not library.is_file():
        raise BuildError(f"the build left no {library}", command=shlex.join(link.words(units)))
    return library


def _run_ninja(folder: Path, ninja: Path, jobs: int) -> None:
    try:
        run([ninja, "--quiet", "-j", str(jobs), "-f", "build.ninja"], cwd=folder)
    except BuildError as error:
        raise BuildError(f"building in {folder} failed", command=error.command, output=error.output) from None


def _run_directly(folder: Path, units: Sequence[Unit], link: Link, jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        # list() raises the first failure, once every unit that was started has ended.
        list(pool.map(lambda unit: run(unit.words(), cwd=folder), units))
    run(link.words(units), cwd=folder)
