"""The `cute` route: kernels in CuTe DSL, compiled once and then loaded without the DSL.

Importing this module, asking for a spec and loading a published artefact import no DSL; only compiling does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashnorm.jit import ArtifactSpec, LoadError, source_hash
from flashnorm.jit.dsl import Dsl, find_dsl
from flashnorm.jit.env import BuildError, Missing
from flashnorm.jit.link import find_linker, link_object, load_linked
from flashnorm.jit.spec import ENTRY_POINT, safe_name
from flashnorm.jit.toolchain import find_tvm_ffi, tvm_ffi_version
from flashnorm.kernels.launch import plans_for
from flashnorm.kernels.tile import sm_of
from flashnorm.program import BackwardProgram, Cast, SaveRstd, Variant

_ROOT = Path(__file__).resolve().parents[1]
_SHORT = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
}


@functools.cache
def _sources() -> str:
    return source_hash(_ROOT / "kernels", _ROOT / "program")


def _dsl(target: str) -> Dsl:
    dsl = find_dsl()
    if isinstance(dsl, Missing):
        raise BuildError(dsl.reason)
    reason = dsl.reason_untargeted(target)
    if reason is not None:
        raise BuildError(reason)
    return dsl


@functools.cache
def _compiler() -> Callable[..., Any] | Missing:
    """The function that compiles a variant, or why the DSL cannot be imported.

    It is tried once: a native library that failed half way may not survive a second try, and every variant would
    give a reason of its own for one and the same fault.
    """
    try:
        from flashnorm.kernels.compile import compile_variant
    except Exception as error:  # whatever a broken installation raises
        return Missing(f"the CuTe DSL cannot be imported: {type(error).__name__}: {error}")
    return compile_variant


@functools.cache
def _toolchain() -> dict[str, Any]:
    dsl, linker = find_dsl(), find_linker()
    if not dsl:
        return {}
    return {"linker": linker.identity if linker else "none", "toolkit": dsl.toolkit, "dsl": dsl.version}


def spec(variant: Variant, target: str) -> ArtifactSpec:
    """The artefact of a variant for an architecture such as "sm_90a".

    The DSL's version stands in the toolchain: a machine that serves the artefact need not know it. Whether the
    DSL's runtime library is the right one is asked when the artefact is loaded.
    """
    plans = plans_for(variant, target)

    def build(folder: Path) -> None:
        dsl, ffi, linker = _dsl(target), find_tvm_ffi(), find_linker()
        if isinstance(ffi, Missing):
            raise BuildError(ffi.reason)
        compile_variant = _compiler()
        if isinstance(compile_variant, Missing):
            raise BuildError(compile_variant.reason)
        compile_variant(variant, target, plans=plans).export(folder / "kernel.o")
        # Without a linker, or on a machine without the runtime, the object itself is published.
        if linker and dsl.runtime is not None:
            link_object(folder, linker, dsl, ffi)

    program = variant.program
    if isinstance(program, BackwardProgram):
        stages = f"{program.norm}_backward"
    else:
        steps = (stage for stage in variant.row_program.stages() if not isinstance(stage, (Cast, SaveRstd)))
        stages = "_".join(type(stage).__name__ for stage in steps)
    dtypes = "_".join(dict.fromkeys(_SHORT.get(d, d) for d in variant.dtypes))
    return ArtifactSpec(
        name=safe_name("cute", stages, dtypes, variant.hidden_size, target),
        key={
            "route": "cute",
            "variant": repr(variant),
            "plans": repr(plans),
            "arch": target,
            "sources": _sources(),
            "tvm_ffi": tvm_ffi_version(),
        },
        toolchain=_toolchain,
        builder=build,
        loader=load,
    )


def load(folder: Path) -> Callable[..., Any]:
    """The launch function of a published folder; an object that nobody linked is loaded by the DSL."""
    if (folder / "kernel.so").is_file():
        return load_linked(folder)
    if not (folder / "kernel.o").is_file():
        raise LoadError(f"{folder} has neither kernel.so nor kernel.o")
    from cutlass.cute import runtime

    module = runtime.load_module(str(folder / "kernel.o"), enable_tvm_ffi=True)
    return module[ENTRY_POINT] if hasattr(module, "__getitem__") else getattr(module, ENTRY_POINT)


def build(variant: Variant, target: str) -> Callable[..., Any]:
    """`launch(*scalars, enable_pdl, *operands)` for an architecture, built if it is not there.

    Args:
        variant: what to compute.
        target: the architecture, e.g. "sm_90a".

    Raises:
        BuildError, MissingArtifact, LoadError: as `ArtifactSpec.build_and_load` says.
    """
    return spec(variant, target).build_and_load()


def reason_unserved(variant: Variant, target: str) -> str | None:
    """Why this route has no kernel for a variant, or None; imports no DSL."""
    unknown = sorted(set(variant.dtypes) - set(_SHORT))
    if unknown:
        return f"no CuTe kernel for {', '.join(unknown)}"
    if sm_of(target) < 80:
        return f"CuTe kernels need sm_80 or newer, not {target}"
    return None
