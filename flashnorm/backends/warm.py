"""The warm call in C++ (`csrc/flashnorm/ffi/warm.cpp`), an extension module built by the host compiler on first use.

It is made for the PyTorch and the Python that run it, and saves a microsecond a call; it decides nothing else: where
it cannot be had, the text of `core.fastpath` does the same.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashnorm.config import settings
from flashnorm.jit import ninja
from flashnorm.jit.env import BuildError, JitError, Missing
from flashnorm.jit.spec import ArtifactSpec, source_hash
from flashnorm.jit.toolchain import find_host_compiler, find_tvm_ffi, link_flags, tvm_ffi_version

NAME = "flashnorm_warm"
_FOLDER = Path(__file__).resolve().parent.parent / "csrc" / "flashnorm" / "ffi"
SOURCES = tuple(_FOLDER / name for name in ("warm.cpp", "warm_call.h", "warm_launch.h", "warm_tensors.h"))
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden")  # C++20: newer headers of PyTorch want it


def _toolchain() -> dict[str, Any]:
    cxx = find_host_compiler(settings)
    return {"host": cxx.identity, "flags": FLAGS} if cxx else {}


@dataclass(frozen=True)
class Headers:
    """Folders of the headers that the extension needs beside TVM-FFI's: Python's, and PyTorch's."""

    path: Path
    torch: Path


def headers() -> Headers | Missing:
    found = Headers(Path(sysconfig.get_paths()["include"]), Path(torch.__file__).resolve().parent / "include")
    for header, where in (("Python.h", found.path), ("c10/core/TensorImpl.h", found.torch)):
        if not (where / header).is_file():
            return Missing(f"{where} has no {header}")
    return found


def spec() -> ArtifactSpec:
    """The artefact: for this PyTorch and this Python, on any processor of this machine's architecture."""
    root = Path(torch.__file__).resolve().parent
    abi = int(torch.compiled_with_cxx11_abi())

    def build_in(folder: Path) -> None:
        cxx, ffi, found = find_host_compiler(settings), find_tvm_ffi(), headers()
        for part in (cxx, ffi, found):
            if isinstance(part, Missing):
                raise BuildError(f"the warm call cannot be built: {part}")
        assert cxx and ffi and not isinstance(found, Missing)
        includes = [f"-isystem{path}" for path in (found.path, found.torch, *ffi.include_dirs)]
        command = (*cxx.command, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *includes)
        libraries = [f"-L{ffi.lib_dir}", "-ltvm_ffi", f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        if sys.platform == "darwin":
            libraries.append("-Wl,-undefined,dynamic_lookup")  # the interpreter's own functions
        link = ninja.Link(command=(*cxx.command, *link_flags()), libraries=tuple(libraries))
        ninja.build(folder, [ninja.Unit(str(SOURCES[0]), command, "kernel.o")], link)

    python = f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"
    return ArtifactSpec(
        name="warm",
        key={
            "sources": source_hash(*SOURCES),
            "tvm_ffi": tvm_ffi_version(),
            "torch": [torch.__version__, str(torch.version.git_version), abi],
            "python": python,
        },
        builder=build_in,
        toolchain=_toolchain,
        loader=_open,
        how_to_get="flashnorm precompile --arch host",
    )


def _open(folder: Path) -> Any:
    """The extension module; what it is linked to is loaded with torch and tvm_ffi."""
    import tvm_ffi  # noqa: F401

    loader = importlib.machinery.ExtensionFileLoader(NAME, str(folder / "kernel.so"))
    found = importlib.util.spec_from_file_location(NAME, str(folder / "kernel.so"), loader=loader)
    assert found is not None
    module = importlib.util.module_from_spec(found)
    loader.exec_module(module)
    return module


@functools.cache
def load() -> Any:
    """The extension module, or None where it cannot be had."""
    try:
        return spec().build_and_load()
    except JitError as error:
        logging.getLogger("flashnorm").info("warm calls are looked at in Python: %s", error)
        return None
