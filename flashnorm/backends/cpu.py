"""The CPU route: a generated unit over `csrc/`, built by the host compiler on first use for this very processor.

H, strides, alignment and the number of threads are run-time facts, so an artefact serves every variant of a
program and its dtypes. The code is made with -march=native: the processor's features are part of the key, and
a folder of precompiled kernels serves machines with the same ones. Threads are torch's (`csrc/.../threads.h`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashnorm.config import settings
from flashnorm.jit import ninja
from flashnorm.jit.codegen import unit
from flashnorm.jit.cpu import detect_cpu
from flashnorm.jit.env import BuildError, Missing
from flashnorm.jit.spec import ArtifactSpec, safe_name, source_hash
from flashnorm.jit.toolchain import cxx_flags, find_host_compiler, find_tvm_ffi, link_flags, tvm_ffi_version
from flashnorm.program import BackwardProgram, Program, Variant

CSRC = Path(__file__).resolve().parent.parent / "csrc"

# The parts of csrc/ that a CPU unit includes: an edit of a CUDA kernel leaves CPU artefacts alone.
_SOURCES = tuple(
    CSRC / "flashnorm" / name
    for name in (
        "types.cuh",
        "fp.cuh",
        "vec.cuh",
        "codec.cuh",
        "activation.cuh",
        "codec4.cuh",
        "codec8.cuh",
        "stages.cuh",
        "stages",
        "ffi/operands.h",
        "ffi/call.h",
        "qk",
        "cpu",
    )
)
_BACKWARD_SOURCES = (
    *_SOURCES,
    CSRC / "flashnorm" / "backward" / "program.cuh",
    CSRC / "flashnorm" / "backward" / "place.h",
)


def _toolchain() -> dict[str, Any]:
    cxx = find_host_compiler(settings)
    return {"host": cxx.identity, "flags": cxx_flags(cxx, detect_cpu())} if cxx else {}


def spec(program: Program, dtypes: tuple[str, ...]) -> ArtifactSpec:
    """The artefact of a program and its dtypes for this processor.

    Args:
        program: what is computed.
        dtypes: one dtype name for each of `program.operands()`.

    Raises:
        KeyError: a dtype that the route has no type for.
    """
    program = program.code()
    source = unit(program, dtypes, "cpu")
    backward = isinstance(program, BackwardProgram)
    cpu = detect_cpu()

    def build_in(folder: Path) -> None:
        cxx, ffi = find_host_compiler(settings), find_tvm_ffi()
        for found in (cxx, ffi):
            if isinstance(found, Missing):
                raise BuildError(f"the cpu route cannot be built: {found}")
        if reason := cpu.reason_unserved():
            raise BuildError(f"the cpu route cannot be built: {reason}")
        assert cxx and ffi
        (folder / "kernel.cpp").write_text(source, encoding="utf-8")
        includes = [f"-I{CSRC}", *(f"-isystem{path}" for path in ffi.include_dirs)]
        command = (*cxx.command, *cxx_flags(cxx, cpu), *includes)
        link = ninja.Link(
            command=(*cxx.command, *link_flags()),
            libraries=(f"-L{ffi.lib_dir}", "-ltvm_ffi", "-ldl"),
        )
        ninja.build(folder, [ninja.Unit("kernel.cpp", command, "kernel.o")], link)

    return ArtifactSpec(
        name=safe_name("cpu", program.name, *dict.fromkeys(dtypes)),
        key={
            "route": "cpu",
            "program": repr(program),
            "dtypes": dtypes,
            "cpu": (cpu.machine, *cpu.features),
            "sources": source_hash(*(_BACKWARD_SOURCES if backward else _SOURCES)),
            "unit": source,
            "tvm_ffi": tvm_ffi_version(),
        },
        builder=build_in,
        toolchain=_toolchain,
    )


@functools.cache
def _loaded(program: Program, dtypes: tuple[str, ...]) -> Callable[..., Any]:
    return spec(program, dtypes).build_and_load()


def build(variant: Variant, target: str = "host") -> Callable[..., Any]:
    """The kernel of a variant: `launch(*scalars, enable_pdl, *operands)`.

    Args:
        variant: what to compute; of its fields only program and dtypes matter to this route.
        target: "host"; there is no compiling for another processor.

    Raises:
        flashnorm.jit.JitError: it could not be built or loaded.
        ValueError: another target.
    """
    if target != "host":
        raise ValueError(f"the cpu route compiles for the machine it runs on: target must be 'host', got {target!r}")
    return variant.program.bind(_loaded(variant.program.code(), variant.dtypes))
