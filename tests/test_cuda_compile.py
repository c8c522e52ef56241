"""The CUDA route compiled for GPUs that are not here: registers, spills and access widths from the machine code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from flashnorm.jit.codegen import unit
from flashnorm.jit.toolchain import find_host_compiler, find_nvcc, find_tvm_ffi, nvcc_flags
from flashnorm.program import (
    AddResidual,
    Affine,
    AffineBias,
    BackwardProgram,
    Cast,
    LoadRow,
    MeanVar,
    QuantBlocks,
    QuantTensor,
    Rms,
    Round,
    RowProgram,
)
from tests import binaries
from tests.gate_programs import DIT, GATED

pytestmark = pytest.mark.cpu_only

CSRC = Path(__file__).resolve().parent.parent / "csrc"
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
B, F, E4M3 = "bfloat16", "float32", "float8_e4m3fn"
BLOCK = QuantBlocks(128, 1e-4, ratio=True, side=True)
# name: program, dtypes of its operands in order
PROGRAMS = {
    "rmsnorm": (RowProgram(LoadRow(), Rms(), (Affine(),), Cast()), (B,) * 3),
    "fused_add": (RowProgram(AddResidual(), Rms(), (Affine(),), Cast("x")), (B,) * 3),
    "layernorm": (RowProgram(LoadRow(), MeanVar(), (AffineBias(),), Cast()), (B, F, F, B)),
    "rmsnorm_quant": (RowProgram(LoadRow(), Rms(), (Affine(),), QuantTensor(True)), (B, B, E4M3, F)),
    "fused_add_quant": (RowProgram(AddResidual(), Rms(), (Affine(),), QuantTensor()), (B, B, B, E4M3)),
    "block_quant": (RowProgram(AddResidual(), Rms(), (Affine(), Round()), BLOCK), (B, B, B, E4M3, F, B)),
    "dynamic_row": (RowProgram(LoadRow(), Rms(), (Affine(), Round()), QuantBlocks(0, 1e-10)), (B, B, E4M3, F)),
    "indexed": (RowProgram(LoadRow(indexed=True), Rms(), (Affine(),), Cast()), (B, "int32", B, B)),
    "backward": (BackwardProgram("rms"), (B, B, B, F, B, B, F)),
    "backward_layer": (BackwardProgram("layer", dbias=True), (B, B, F, F, F, F, B, F, F, F)),
    "backward_wide": (
        BackwardProgram("rms", offset=1.0, round_norm=True, g_residual=True, dresidual=True),
        (B, F, F, F, F, B, F, F, F),
    ),
    "int8": (RowProgram(LoadRow(scaled=True), Rms(), (Affine(),), Cast()), ("int8", F, B, B)),
    "modulated": DIT["gate-modulated"],
    "modulated_quant": DIT["gate-mxfp8"],
    "second_norm": GATED["next-gained"],
    "gated": GATED["before"],
}


def pytest_generate_tests(metafunc):
    """Every architecture with one program, and with another one below and above native codes; all pairs with --full."""
    full = metafunc.config.getoption("--full")
    always, every = {("sm_80", "block_quant"), ("sm_89", "rmsnorm_quant")}, ("rmsnorm", "backward")
    pairs = [(arch, name) for arch in ARCHS for name in PROGRAMS]
    metafunc.parametrize(
        ("arch", "name"),
        [(a, n) for a, n in pairs if full or a == "sm_90a" or n in every or (a, n) in always],
    )


def test_compiles_without_spills_and_moves_16_bytes(arch, name, tmp_path):
    nvcc, host, ffi = find_nvcc(), find_host_compiler(), find_tvm_ffi()
    if not nvcc or not host or not ffi:
        pytest.skip(f"{nvcc}; {host}; {ffi}")
    target = nvcc.target(arch)
    if not target or target.compiled_for != arch:
        pytest.skip(f"this nvcc does not list {arch}")
    program, dtypes = PROGRAMS[name]
    (tmp_path / "kernel.cu").write_text(unit(program, dtypes, "cuda"))
    includes = [f"-I{CSRC}", *(f"-I{path}" for path in ffi.include_dirs)]
    command = [str(nvcc.path), *nvcc_flags(nvcc, target, host), *includes, "-cubin", "kernel.cu", "-o", "kernel.cubin"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    usage = binaries.resources(tmp_path / "kernel.cubin")
    assert len(usage) >= 10
    assert all(registers <= 255 and stack == 0 and local == 0 for registers, stack, local in usage), usage
    found = binaries.instructions(tmp_path / "kernel.cubin")
    assert {"LDG", "STG"} <= {i.split(".")[0] for i in found}
    # Pointers are known to be global ones: no generic access.
    assert not {"LD", "ST"} & {i.split(".")[0] for i in found}
    codes = any(dtype.startswith("float8") for dtype in dtypes)
    native = any(re.match(r"F2FP\.SATFINITE\.E\dM\d\.F32", i) for i in found)
    assert native == (codes and int(re.findall(r"\d+", arch)[0]) >= 89), found
    if codes or name == "int8":
        assert any(re.match(r"(STG|LDG)\.E.*\.64", i) for i in found)
    assert any(re.match(r"LDG\.E.*\.128", i) for i in found)
    if not codes or (
        isinstance(program, RowProgram) and isinstance(program.load, AddResidual)
    ):  # else nothing wide is stored
        assert any(re.match(r"STG\.E.*\.128", i) for i in found)
    assert not any(i.startswith(("LDL", "STL")) for i in found)
