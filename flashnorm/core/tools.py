"""What this machine can build with, asked once: compilers, the CuTe DSL, the processor."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from flashnorm.core.dispatch import Tools
from flashnorm.jit import toolchain


def _reason(*found: object) -> str | None:
    """Why the first tool that is missing is missing; None where all are there."""
    return next((str(f) for f in found if isinstance(f, toolchain.Missing)), None)


@functools.cache
def tools() -> Tools:
    """The facts of this machine. Runs each compiler once to ask its version; imports nothing but files' names."""
    dsl = toolchain.find_dsl()
    ffi = toolchain.find_tvm_ffi()
    cxx = toolchain.find_host_compiler()
    ninja = toolchain.find_ninja()
    archs: Iterable[str] = () if isinstance(dsl, toolchain.Missing) else dsl.archs
    cpu_reason = toolchain.detect_cpu().reason_unserved()
    return Tools(
        dsl=_reason(dsl, ffi),
        dsl_archs=frozenset(archs),
        nvcc=_reason(toolchain.find_nvcc(), cxx, ninja, ffi),
        cxx=cpu_reason or _reason(cxx, ninja, ffi),
    )


def asked() -> bool:
    """Whether `tools` has looked, so that its answer costs nothing more."""
    return tools.cache_info().currsize > 0
