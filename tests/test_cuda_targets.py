"""NVFP4, MX and SiLU of the CUDA route, compiled for GPUs that are not here: conversions, registers, spills."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flashnorm.jit.codegen import unit
from flashnorm.jit.toolchain import find_host_compiler, find_nvcc, find_tvm_ffi, nvcc_flags
from flashnorm.kernels import tile as tiles
from flashnorm.program import (
    AddResidual,
    Affine,
    Cast,
    LoadRow,
    QuantBlocks,
    QuantNvfp4,
    QuantTensor,
    Rms,
    RowProgram,
    Silu,
)
from tests import binaries

CSRC = Path(__file__).resolve().parent.parent / "csrc"
ARCHS = ("sm_80", "sm_90a", "sm_100", "sm_100a", "sm_103a", "sm_110a", "sm_120", "sm_120a", "sm_121a")
B, E4, U = "bfloat16", "float8_e4m3fn", "uint8"
FOUR = QuantNvfp4(16, "device", side=True, layout="both")
PROGRAMS = {
    "nvfp4": (RowProgram(LoadRow(), Rms(), (Affine(),), QuantNvfp4(16, "value")), (B, B, U, U)),
    "nvfp4-both": (RowProgram(AddResidual(), Rms(), (Affine(),), FOUR), (B, B, B, U, U, U, "float32", B)),
    "mxfp4": (
        RowProgram(LoadRow(), Rms(), (Affine(),), QuantBlocks(32, 0.0, ue8m0=True, fp4=True, ocp=True)),
        (B, B, U, U),
    ),
    "mxfp8": (RowProgram(LoadRow(), Rms(), (Affine(),), QuantBlocks(32, 0.0, ue8m0=True)), (B, B, E4, U)),
    "silu": (RowProgram(LoadRow(), Rms(), (Affine(), Silu()), Cast()), (B, B, B)),
    "silu-fp8": (RowProgram(LoadRow(), Rms(), (Affine(), Silu()), QuantTensor()), (B, B, E4)),
    "silu-fp4": (RowProgram(LoadRow(), Rms(), (Affine(), Silu()), QuantNvfp4(16)), (B, B, U, U)),
}
SAMPLE = (("sm_80", "mxfp4"), ("sm_90a", "nvfp4"), ("sm_100", "nvfp4"), ("sm_100a", "nvfp4"), ("sm_120a", "silu"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full")
    metafunc.parametrize(("arch", "name"), [(a, n) for a in ARCHS for n in PROGRAMS] if full else SAMPLE)


def test_codes_are_native_where_there_are_instructions_and_nothing_spills(arch: str, name: str, tmp_path: Path) -> None:
    nvcc, host, ffi = find_nvcc(), find_host_compiler(), find_tvm_ffi()
    if not nvcc or not host or not ffi:
        pytest.skip(f"{nvcc}; {host}; {ffi}")
    target = nvcc.target(arch)
    if not target or target.compiled_for != arch:
        pytest.skip(f"this nvcc does not compile for {arch} itself")
    (tmp_path / "kernel.cu").write_text(unit(*PROGRAMS[name], "cuda"))
    includes = [f"-I{CSRC}", *(f"-I{path}" for path in ffi.include_dirs)]
    command = [str(nvcc.path), *nvcc_flags(nvcc, target, host), *includes, "-cubin", "kernel.cu", "-o", "kernel.cubin"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    usage = binaries.resources(tmp_path / "kernel.cubin")
    assert len(usage) >= 10
    assert all(registers <= 255 and stack == 0 and local == 0 for registers, stack, local in usage), usage
    found = binaries.instructions(tmp_path / "kernel.cubin")
    four = "fp4" in name
    assert any("E2M1" in i for i in found) == (four and tiles.converts_fp4(arch)), sorted(found)
    eight = ("nvfp4" in name or name in ("mxfp8", "silu-fp8", "silu-fp4")) and tiles.sm_of(arch) >= 89
    assert any("E4M3" in i for i in found) == eight, sorted(found)
    assert ("MUFU.EX2" in found) == ("silu" in name), sorted(found)
    assert not {"LD", "ST"} & {i.split(".")[0] for i in found}
    assert any(i.startswith("LDG.E") and ".128" in i for i in found)
