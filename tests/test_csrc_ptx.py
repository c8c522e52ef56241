"""What nvcc makes of the CUDA route, read from its PTX: no fp32 operation but the ones that were written.

A product and a sum that a compiler merges, a flush to zero or an approximate division changes bits; each
of them has another name in PTX. Needs nvcc, no GPU.
"""

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
    Cast,
    LoadRow,
    MeanVar,
    QuantBlocks,
    QuantTensor,
    Rms,
    Round,
    RowProgram,
    SaveRstd,
)

CSRC = Path(__file__).resolve().parent.parent / "csrc"
# Every kind of stage and element between them.
PROGRAMS = {
    "rms": (
        RowProgram(AddResidual(rounded=True), Rms(), (Affine(offset=1.0, round_norm=True),), Cast(), (SaveRstd(),)),
        ("bfloat16", "float32", "float16", "bfloat16", "float32"),
    ),
    "layer": (
        RowProgram(LoadRow(), MeanVar(), (AffineBias(), Round()), QuantBlocks(128, 1e-4, cap="device")),
        ("bfloat16", "float32", "float16", "float8_e5m2", "float32", "float16"),
    ),
    "codes": (
        RowProgram(LoadRow(indexed=True), Rms(), (Affine(), Round()), QuantBlocks(0, 1e-4, ue8m0=True, side=True)),
        ("float16", "int64", "bfloat16", "int8", "uint8", "float16"),
    ),
    "int8": (
        RowProgram(LoadRow(scaled=True), Rms(), (Affine(),), QuantTensor(on_device=True)),
        ("int8", "float32", "bfloat16", "float8_e4m3fn", "bfloat16"),
    ),
}

FLOATS = re.compile(
    r"^\s*(?:@\S+\s+)?"  # a predicate
    r"([a-z][a-z0-9]*(?:\.[a-z0-9_:]+)*\.(?:f32|f64|f16|f16x2|bf16|bf16x2)(?:\.[a-z0-9]+)*)\s",
    re.MULTILINE,
)
ALLOWED = {
    "add.rn.f32", "mul.rn.f32", "fma.rn.f32", "div.rn.f32", "sqrt.rn.f32", "rcp.rn.f32",
    "cvt.rn.f32.s32", "cvt.f32.f16", "cvt.rn.bf16x2.f32", "cvt.rn.f16.f32", "cvt.rn.f16x2.f32",
    "sub.rn.f32", "cvt.rni.s32.f32", "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32",
    # The rounding of a subnormal code, on devices without the conversions: one addition.
    "add.f32",
}  # fmt: skip
# Moves, signs and comparisons do not round.
MOVES = ("ld.", "st.", "mov.", "selp.", "setp.", "shfl.", "neg.", "abs.", "max.NaN.")


# What a program moves in less than 16 bytes: 8 codes at once, and single values (rstd, scales, an index, padding).
NARROW = {
    "rms": {"st.global.f32"},
    "layer": {"st.global.v2.u32", "ld.global.u16", "st.global.f32", "st.global.u32"},
    "codes": {"st.global.v2.u32", "ld.global.u64", "st.global.u8"},
    "int8": {"ld.global.v2.u32", "st.global.v2.u32", "ld.global.u16", "ld.global.f32"},
}


@pytest.fixture(
    scope="module", params=[(arch, name) for arch in ("sm_75", "sm_90a") for name in PROGRAMS], ids="-".join
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The name of a program, and its PTX."""
    arch, name = request.param
    nvcc, host, ffi = find_nvcc(), find_host_compiler(), find_tvm_ffi()
    if not nvcc or not host or not ffi:
        pytest.skip(f"{nvcc}; {host}; {ffi}")
    target = nvcc.target(arch)
    if not target:
        pytest.skip(str(target))
    folder = tmp_path_factory.mktemp("ptx")
    (folder / "kernel.cu").write_text(unit(*PROGRAMS[name], "cuda"))
    virtual = arch.replace("sm_", "compute_")
    flags = [flag for flag in nvcc_flags(nvcc, target, host) if not flag.startswith("-gencode")]
    includes = [f"-I{CSRC}", *(f"-I{path}" for path in ffi.include_dirs)]
    command = [str(nvcc.path), *flags, f"-arch={virtual}", *includes, "-ptx", "kernel.cu", "-o", "kernel.ptx"]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return name, (folder / "kernel.ptx").read_text()


@pytest.fixture
def ptx(compiled: tuple[str, str]) -> str:
    return compiled[1]


def test_only_the_arithmetic_that_was_written(ptx: str) -> None:
    found = {name for name in FLOATS.findall(ptx) if not name.startswith(MOVES)}
    assert {"add.rn.f32", "mul.rn.f32", "fma.rn.f32", "div.rn.f32", "sqrt.rn.f32", "rcp.rn.f32"} <= found
    assert not found - ALLOWED
    if ".target sm_90" in ptx:
        assert "add.f32" not in found


def test_codes_are_converted_by_the_instruction_there_is(compiled: tuple[str, str]) -> None:
    """From sm_89 on; below, the integer arithmetic that the host has too."""
    name, ptx = compiled
    made = set(re.findall(r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32", ptx))
    wanted = {code for code in ("e4m3", "e5m2") if any(code in dtype for dtype in PROGRAMS[name][1])}
    assert made == (wanted if ".target sm_90" in ptx else set())


def test_whole_groups_move_in_16_bytes(compiled: tuple[str, str]) -> None:
    name, ptx = compiled
    kernels = re.findall(r"\.entry (\S+?)\((.*?)\n}", ptx, flags=re.S)
    whole = [body for kernel, body in kernels if "Shifted" not in kernel]
    assert len(whole) >= 12 and len(kernels) > len(whole)
    for body in whole:
        accesses = set(re.findall(r"\b((?:ld|st)\.global\S*)", body))
        assert {access for access in accesses if ".v4." not in access} == NARROW[name], accesses
        assert any(access.startswith("ld.global.v4") for access in accesses)


def test_dependent_launch_from_sm_90(ptx: str) -> None:
    expected = ".target sm_90" in ptx
    assert ("griddepcontrol.wait" in ptx) == ("griddepcontrol.launch_dependents" in ptx) == expected
