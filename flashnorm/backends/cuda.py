"""The CUDA C++ route: a generated unit over `csrc/`, built by nvcc through ninja on first use.

H, alignment, the rank of the rows and PDL are run-time facts here, so an artefact serves every variant
of a program and its dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashnorm.config import settings
from flashnorm.jit import ninja
from flashnorm.jit.codegen import unit
from flashnorm.jit.env import BuildError, Missing
from flashnorm.jit.spec import ArtifactSpec, safe_name, source_hash
from flashnorm.jit.toolchain import (
    CudaTarget,
    HostCompiler,
    Nvcc,
    find_host_compiler,
    find_nvcc,
    find_tvm_ffi,
    nvcc_flags,
    nvcc_link_flags,
    tvm_ffi_version,
)
from flashnorm.program import BackwardProgram, Program, Variant

CSRC = Path(__file__).resolve().parent.parent / "csrc"

# The parts of csrc/ that a CUDA unit includes: an edit of the CPU route's own files leaves its artefacts alone.
_SOURCES = tuple(
    CSRC / "flashnorm" / name
    for name in (
        "types.cuh",
        "activation.cuh",
        "device.cuh",
        "access.cuh",
        "fp.cuh",
        "vec.cuh",
        "codec.cuh",
        "codec4.cuh",
        "codec8.cuh",
        "reduce.cuh",
        "stages.cuh",
        "stages",
        "row_forward.cuh",
        "row",
        "ffi/operands.h",
        "ffi/call.h",
        "ffi/facts.h",
        "ffi/runtime.h",
        "ffi/plan.h",
        "ffi/select.h",
        "ffi/launch.h",
        "ffi/launch_qk.h",
        "qk",
        "qk_norm_rope.cuh",
    )
)
_BACKWARD_SOURCES = tuple(
    CSRC / "flashnorm" / name
    for name in (
        "types.cuh",
        "device.cuh",
        "access.cuh",
        "fp.cuh",
        "vec.cuh",
        "codec.cuh",
        "reduce.cuh",
        "row_backward.cuh",
        "backward",
        "ffi/operands.h",
        "ffi/call.h",
        "ffi/facts.h",
        "ffi/runtime.h",
        "ffi/backward_plan.h",
        "ffi/backward_select.h",
        "ffi/backward_launch.h",
    )
)


def _flags(nvcc: Nvcc, target: CudaTarget, host: HostCompiler, defines: tuple[str, ...]) -> tuple[str, ...]:
    return (*nvcc_flags(nvcc, target, host), *(f"-D{name}" for name in defines))


def _toolchain(target: str, defines: tuple[str, ...]) -> dict[str, Any]:
    nvcc, host = find_nvcc(settings), find_host_compiler(settings)
    made_for = nvcc.target(target) if nvcc else None
    if not (nvcc and host and made_for):
        return {}
    flags = _flags(nvcc, made_for, host, defines)
    return {"nvcc": nvcc.identity, "host": host.identity, "target": made_for.compiled_for, "flags": flags}


def spec(program: Program, dtypes: tuple[str, ...], target: str, defines: tuple[str, ...] = ()) -> ArtifactSpec:
    """The artefact of a program and its dtypes for an architecture.

    Args:
        program: what is computed.
        dtypes: one dtype name for each of `program.operands()`.
        target: the architecture, e.g. "sm_90a".
        defines: preprocessor definitions ("NAME" or "NAME=VALUE"), for tuning and experiments.

    Raises:
        KeyError: a dtype that the route has no type for.
    """
    program = program.code()
    source = unit(program, dtypes, "cuda")
    backward = isinstance(program, BackwardProgram)

    def build_in(folder: Path) -> None:
        nvcc, host, ffi = find_nvcc(settings), find_host_compiler(settings), find_tvm_ffi()
        made_for = nvcc.target(target) if nvcc else Missing(str(nvcc))
        for found in (nvcc, host, ffi, made_for):
            if isinstance(found, Missing):
                raise BuildError(f"the cuda route cannot be built for {target}: {found}")
        assert nvcc and host and ffi and made_for
        (folder / "kernel.cu").write_text(source, encoding="utf-8")
        includes = [f"-I{CSRC}", *(f"-isystem={path}" for path in ffi.include_dirs)]
        command = (str(nvcc.path), *_flags(nvcc, made_for, host, defines), *includes)
        link = ninja.Link(
            command=(str(nvcc.path), *nvcc_link_flags(nvcc, host)),
            libraries=(f"-L{ffi.lib_dir}", "-ltvm_ffi"),
        )
        ninja.build(folder, [ninja.Unit("kernel.cu", command, "kernel.o")], link)

    return ArtifactSpec(
        name=safe_name("cuda", program.name, *dict.fromkeys(dtypes), target),
        key={
            "route": "cuda",
            "program": repr(program),
            "dtypes": dtypes,
            "arch": target,
            "sources": source_hash(*(_BACKWARD_SOURCES if backward else _SOURCES)),
            "unit": source,
            "defines": defines,
            "tvm_ffi": tvm_ffi_version(),
        },
        builder=build_in,
        toolchain=functools.partial(_toolchain, target, defines),
    )


@functools.cache
def _loaded(program: Program, dtypes: tuple[str, ...], target: str) -> Callable[..., Any]:
    return spec(program, dtypes, target).build_and_load()


def build(variant: Variant, target: str) -> Callable[..., Any]:
    """The kernel of a variant: `launch(*scalars, enable_pdl, *operands)`.

    Args:
        variant: what to compute; of its fields only program and dtypes matter to this route.
        target: the architecture, e.g. "sm_90a".

    Raises:
        flashnorm.jit.JitError: it could not be built or loaded.
    """
    return variant.program.bind(_loaded(variant.program.code(), variant.dtypes, target))
