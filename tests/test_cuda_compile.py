"""The CUDA route compiled for GPUs that are not here: registers, spills and access widths from the machine code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from flashnorm.jit.codegen import unit
from flashnorm.jit.toolchain import find_host_compiler, find_nvcc, find_tvm_ffi, nvcc_flags
from flashnorm.program import AddResidual, Affine, Cast, LoadRow, Rms, RowProgram
from tests import binaries

CSRC = Path(__file__).resolve().parent.parent / "csrc"
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
PROGRAMS = {
    "rmsnorm": RowProgram(LoadRow(), Rms(), (Affine(),), Cast()),
    "fused_add": RowProgram(AddResidual(), Rms(), (Affine(),), Cast("x")),
}


def pytest_generate_tests(metafunc):
    """Every architecture with one program; every pair with --full."""
    full = metafunc.config.getoption("--full")
    cases = [(arch, name) for arch in ARCHS for name in PROGRAMS if full or name == "rmsnorm" or arch == "sm_90a"]
    metafunc.parametrize(("arch", "name"), cases)


def test_compiles_without_spills_and_moves_16_bytes(arch, name, tmp_path):
    nvcc, host, ffi = find_nvcc(), find_host_compiler(), find_tvm_ffi()
    if not nvcc or not host or not ffi:
        pytest.skip(f"{nvcc}; {host}; {ffi}")
    target = nvcc.target(arch)
    if not target or target.compiled_for != arch:
        pytest.skip(f"this nvcc does not list {arch}")
    program = PROGRAMS[name]
    (tmp_path / "kernel.cu").write_text(unit(program, ("bfloat16",) * len(program.operands()), "cuda"))
    includes = [f"-I{CSRC}", *(f"-I{path}" for path in ffi.include_dirs)]
    command = [str(nvcc.path), *nvcc_flags(nvcc, target, host), *includes, "-cubin", "kernel.cu", "-o", "kernel.cubin"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    usage = binaries.resources(tmp_path / "kernel.cubin")
    assert len(usage) >= 10
    assert all(registers <= 255 and stack == 0 and local == 0 for registers, stack, local in usage), usage
    found = binaries.instructions(tmp_path / "kernel.cubin")
    assert {"LDG", "STG"} <= {i.split(".")[0] for i in found}
    assert any(re.match(r"LDG\.E.*\.128", i) for i in found) and any(re.match(r"STG\.E.*\.128", i) for i in found)
    assert not any(i.startswith(("LDL", "STL")) for i in found)
