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
from flashnorm.program import AddResidual, Affine, Cast, Rms, RowProgram, SaveRstd

CSRC = Path(__file__).resolve().parent.parent / "csrc"
# Every kind of stage and element at once.
PROGRAM = RowProgram(AddResidual(rounded=True), Rms(), (Affine(offset=1.0, round_norm=True),), Cast(), (SaveRstd(),))
DTYPES = {"x": "bfloat16", "residual": "float32", "weight": "float16", "out": "bfloat16", "rstd": "float32"}

FLOATS = re.compile(
    r"^\s*(?:@\S+\s+)?"  # a predicate
    r"([a-z][a-z0-9]*(?:\.[a-z0-9_:]+)*\.(?:f32|f64|f16|f16x2|bf16|bf16x2)(?:\.[a-z0-9]+)*)\s",
    re.MULTILINE,
)
ALLOWED = {
    "add.rn.f32", "mul.rn.f32", "fma.rn.f32", "div.rn.f32", "sqrt.rn.f32", "rcp.rn.f32",
    "cvt.rn.f32.s32", "cvt.f32.f16", "cvt.rn.bf16x2.f32", "cvt.rn.f16.f32", "cvt.rn.f16x2.f32",
}  # fmt: skip
# Moves and comparisons do not round.
MOVES = ("ld.", "st.", "mov.", "selp.", "setp.", "shfl.")


@pytest.fixture(scope="module", params=["sm_75", "sm_90a"])
def ptx(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    nvcc, host, ffi = find_nvcc(), find_host_compiler(), find_tvm_ffi()
    if not nvcc or not host or not ffi:
        pytest.skip(f"{nvcc}; {host}; {ffi}")
    target = nvcc.target(request.param)
    if not target:
        pytest.skip(str(target))
    folder = tmp_path_factory.mktemp("ptx")
    (folder / "kernel.cu").write_text(unit(PROGRAM, tuple(DTYPES[o.name] for o in PROGRAM.operands()), "cuda"))
    virtual = request.param.replace("sm_", "compute_")
    flags = [flag for flag in nvcc_flags(nvcc, target, host) if not flag.startswith("-gencode")]
    includes = [f"-I{CSRC}", *(f"-I{path}" for path in ffi.include_dirs)]
    command = [str(nvcc.path), *flags, f"-arch={virtual}", *includes, "-ptx", "kernel.cu", "-o", "kernel.ptx"]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return (folder / "kernel.ptx").read_text()


def test_only_the_arithmetic_that_was_written(ptx: str) -> None:
    found = set(FLOATS.findall(ptx))
    assert {"add.rn.f32", "mul.rn.f32", "fma.rn.f32", "div.rn.f32", "sqrt.rn.f32", "rcp.rn.f32"} <= found
    assert not {name for name in found if not name.startswith(MOVES)} - ALLOWED


def test_whole_groups_move_in_16_bytes(ptx: str) -> None:
    kernels = re.findall(r"\.entry (\S+?)\((.*?)\n}", ptx, flags=re.S)
    whole = [body for name, body in kernels if "Shifted" not in name]
    assert len(whole) >= 12 and len(kernels) > len(whole)
    for body in whole:
        accesses = set(re.findall(r"\b((?:ld|st)\.global\S*)", body))
        # The one narrow store is rstd.
        assert {name for name in accesses if ".v4." not in name} == {"st.global.f32"}, accesses


def test_dependent_launch_from_sm_90(ptx: str) -> None:
    expected = ".target sm_90" in ptx
    assert ("griddepcontrol.wait" in ptx) == ("griddepcontrol.launch_dependents" in ptx) == expected
