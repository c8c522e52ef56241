"""The C++ guard of warm calls (`csrc/flashnorm/ffi/guard.cpp`), built by the host compiler on first use.

It saves a few microseconds a call and decides nothing else: where it cannot be had, `core.guard` does the same
in Python.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashnorm.config import settings
from flashnorm.jit import ninja
from flashnorm.jit.env import BuildError, JitError, Missing
from flashnorm.jit.spec import ArtifactSpec, source_hash
from flashnorm.jit.toolchain import find_host_compiler, find_tvm_ffi, link_flags, tvm_ffi_version

_FOLDER = Path(__file__).resolve().parent.parent / "csrc" / "flashnorm" / "ffi"
SOURCES = (_FOLDER / "guard.cpp", _FOLDER / "call.h")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden")


def _toolchain() -> dict[str, Any]:
    cxx = find_host_compiler(settings)
    return {"host": cxx.identity, "flags": FLAGS} if cxx else {}


def spec() -> ArtifactSpec:
    """The artefact: any processor of this machine's architecture runs it."""

    def build_in(folder: Path) -> None:
        cxx, ffi = find_host_compiler(settings), find_tvm_ffi()
        for found in (cxx, ffi):
            if isinstance(found, Missing):
                raise BuildError(f"the guard cannot be built: {found}")
        assert cxx and ffi
        includes = [f"-isystem{path}" for path in ffi.include_dirs]
        link = ninja.Link(command=(*cxx.command, *link_flags()), libraries=(f"-L{ffi.lib_dir}", "-ltvm_ffi"))
        ninja.build(folder, [ninja.Unit(str(SOURCES[0]), (*cxx.command, *FLAGS, *includes), "kernel.o")], link)

    return ArtifactSpec(
        name="guard",
        key={"sources": source_hash(*SOURCES), "tvm_ffi": tvm_ffi_version()},
        builder=build_in,
        toolchain=_toolchain,
        how_to_get="flashnorm precompile --arch host",
    )


@functools.cache
def load() -> Callable[..., Any] | None:
    """What makes guards, as `make_guard` of guard.cpp says; or None where there is no compiler for it."""
    try:
        return spec().build_and_load()
    except JitError as error:
        logging.getLogger("flashnorm").info("warm calls are guarded in Python: %s", error)
        return None
