"""Turning an object that the DSL wrote into the library of an artefact.

The library names TVM-FFI and the DSL's runtime by their sonames and carries no search path, so it
loads wherever both are installed: TVM-FFI is in the process already, the runtime is loaded first
(`load_linked`). The DSL itself is not imported for that.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Settings, settings
from .dsl import find_runtime
from .entry import read_meta
from .env import LoadError, Missing, run
from .spec import load_launch, preload_library
from .toolchain import Dsl, TvmFfi, find_host_compiler


@dataclass(frozen=True)
class Linker:
    """A program that makes shared libraries of objects; a compiler, or the bare linker.

    Attributes:
        command: the program, with the arguments that ask for a library.
        identity: for a cache key.
    """

    command: tuple[str, ...]
    identity: str


@functools.cache
def find_linker(config: Settings = settings) -> Linker | Missing:
    """The host compiler where there is one, else cc, else the bare linker."""
    compiler = find_host_compiler(config)
    if compiler:
        return Linker((*compiler.command, "-shared", "-Wl,-Bsymbolic"), f"{compiler.kind} {compiler.version}")
    for name in ("cc", "gcc", "ld", "ld.lld"):
        program = shutil.which(name, path=config.path)
        if program is not None:
            flag = "-Bsymbolic" if name.startswith("ld") else "-Wl,-Bsymbolic"
            return Linker((program, "-shared", flag), name)
    return Missing(f"no linker: {compiler}, and neither cc nor ld is on PATH")


def link_object(folder: Path, linker: Linker, dsl: Dsl, ffi: TvmFfi) -> Path:
    """Link `folder/kernel.o` to `folder/kernel.so` and remove the object.

    Raises:
        BuildError: the linker failed.
        LoadError: the DSL's runtime library is not installed.
    """
    if dsl.runtime is None:
        raise LoadError("the runtime library of nvidia-cutlass-dsl is not installed")
    source, library = folder / "kernel.o", folder / "kernel.so"
    folders = (f"-L{ffi.lib_dir}", f"-L{dsl.runtime.parent}")
    run([*linker.command, source, "-o", library, *folders, "-ltvm_ffi", "-lcute_dsl_runtime"])
    source.unlink()
    return library


def load_linked(folder: Path) -> Callable[..., Any]:
    """Load a linked artefact; a loader for `ArtifactSpec`.

    Raises:
        LoadError: the DSL's runtime library is not installed, or is another version's.
    """
    runtime = find_runtime()
    if isinstance(runtime, Missing):
        raise LoadError(runtime.reason)
    # Which functions of it a kernel calls is the DSL's own affair, and may change with any version.
    made_by = ((read_meta(folder) or {}).get("toolchain") or {}).get("dsl")
    if made_by and runtime.version and made_by != runtime.version:
        raise LoadError(f"nvidia-cutlass-dsl {made_by} compiled it, the runtime library here is of {runtime.version}")
    preload_library(runtime.path)
    return load_launch(folder)
