"""Units of the CUDA route, compiled over an emulation of the GPU's threads and loaded: see csrc/emulated_device.h."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashnorm.jit.codegen import unit
from flashnorm.jit.toolchain import find_host_compiler, find_tvm_ffi
from flashnorm.program import Program

ROOT = Path(__file__).resolve().parent
CSRC = ROOT.parent / "csrc"
HEADERS = {
    "flashnorm/ffi/launch.h": "emulated_launch.h",
    "flashnorm/ffi/launch_qk.h": "emulated_qk.h",
    "flashnorm/ffi/backward_launch.h": "emulated_backward.h",
}


@dataclass(frozen=True)
class Emulated:
    """A unit compiled over the emulation."""

    module: Any
    program: Program
    dtypes: tuple[str, ...]

    @property
    def launch(self) -> Callable[..., Any]:
        return self.module["launch"]

    def force(
        self,
        *,
        sm: int = 90,
        shared_memory: int = 227 * 1024,
        plan: tuple[int, ...] = (0, 0, 0, 0, 0),
        abreast: int = 1,
    ) -> None:
        """The device of the next launches, and their plan: threads, rows, cluster, lanes, groups; zeros for its own."""
        self.module["force"](sm, shared_memory, *plan, abreast)


def build(
    folder: Path, programs: Mapping[str, tuple[Program, tuple[str, ...]]], defines: tuple[str, ...] = ()
) -> dict[str, Emulated]:
    """Compiles programs with their dtypes, as many at once as there are cores; skips where there is no compiler."""
    import tvm_ffi

    compiler, ffi = find_host_compiler(), find_tvm_ffi()
    if not compiler or not ffi:
        pytest.skip(f"{compiler}; {ffi}")

    def compile_one(name: str) -> str:
        program, dtypes = programs[name]
        source = unit(program, dtypes, "cuda")
        for real, emulated in HEADERS.items():
            source = source.replace(f'"{real}"', f'"{emulated}"')
        (folder / f"{name}.cpp").write_text(source)
        command = [
            *compiler.command,
            "-std=c++17",
            "-O1",
            "-march=native",
            "-ffp-contract=off",
            "-fno-gnu-unique",
            "-DFN_FAST=1",
            *(f"-D{name}" for name in defines),
        ]
        command += ["-fvisibility=hidden", "-shared", "-fPIC", f"-I{CSRC}", f"-I{ROOT / 'csrc'}"]
        command += [f"-I{path}" for path in ffi.include_dirs]
        command += [str(folder / f"{name}.cpp"), "-o", str(folder / f"{name}.so"), f"-L{ffi.lib_dir}", "-ltvm_ffi"]
        done = subprocess.run(command, capture_output=True, text=True)
        return f"{name}: {done.stderr[-4000:]}" if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = [problem for problem in pool.map(compile_one, programs) if problem]
    assert not problems, problems
    return {
        name: Emulated(tvm_ffi.load_module(str(folder / f"{name}.so")), program, dtypes)
        for name, (program, dtypes) in programs.items()
    }
