"""The CuTe kernels as compiled code, for architectures that are not here: arithmetic, width of access, registers."""

import re
import subprocess
import sys

import pytest

from flashnorm.kernels import plans
from flashnorm.kernels import tile as tiles
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
    Variant,
)
from tests import binaries
from tests.gate_programs import GATED

pytestmark = pytest.mark.cpu_only

B, F, S = "bfloat16", "float16", "float32"
E4, E5, I8, I32, I64 = "float8_e4m3fn", "float8_e5m2", "int8", "int32", "int64"
NORM = RowProgram(LoadRow(), Rms(), (Affine(),), Cast())
FUSED = RowProgram(AddResidual(), Rms(), (Affine(1.0),), Cast("x"))
TRAIN = RowProgram(AddResidual(rounded=True, dst="h"), Rms(), (Affine(0.0, True),), Cast(), (SaveRstd(),))
BARE = RowProgram(LoadRow(), Rms(), (), Cast())
LAYER = RowProgram(LoadRow(), MeanVar(), (AffineBias(),), Cast())
QUANT = RowProgram(LoadRow(), Rms(), (Affine(),), QuantTensor())
LLAMA = RowProgram(AddResidual(rounded=True), Rms(), (Affine(0.0, True), Round()), QuantTensor(on_device=True))
BLOCKS = RowProgram(LoadRow(), Rms(), (Affine(), Round()), QuantBlocks(128, 1e-10, ue8m0=True, packed=True))
TOKEN = RowProgram(AddResidual(), Rms(), (Affine(), Round()), QuantBlocks(0, 1e-10, cap="value", side=True))
PICKED = RowProgram(LoadRow(indexed=True, scaled=True), Rms(), (Affine(1.0),), QuantTensor())

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
VARIANTS = {
    "norm": Variant(NORM, (B, B, B), 4096),
    "norm-wide": Variant(NORM, (F, S, F), 131072),
    "fused": Variant(FUSED, (B, B, B), 8192),
    "train-odd": Variant(TRAIN, (F, S, S, B, F, S), 1003, row_rank=2, row_vecs=("weight",), vec=1),
    "qk": Variant(NORM, (B, B, B), 128, row_rank=2),
    "bare-fp32": Variant(BARE, (S, S), 5120, vec=4),
    "layer": Variant(LAYER, (B, S, S, B), 7168),
    "layer-narrow": Variant(LAYER, (B, S, S, B), 128),
    "quant": Variant(QUANT, (B, B, E4), 4096),
    "llama-odd": Variant(LLAMA, (F, B, F, E5, B), 1003, row_rank=2, vec=1),
    "blocks": Variant(BLOCKS, (B, B, E4, I32), 8200),
    "token": Variant(TOKEN, (B, B, B, I8, S, B), 65536),
    "picked": Variant(PICKED, (I8, I64, S, B, E5), 2048),
    "next": Variant(*GATED["next"], 8192),
    "next-gained": Variant(*GATED["next-gained"], 40000),
    "mix-odd": Variant(*GATED["mix-gained"], 1003, row_rank=2, vec=1),
}
CASES = [(a, v) for a in ARCHS for v in (VARIANTS if a in ("sm_80", "sm_90a") else ("norm-wide", "train-odd", "quant"))]

OPERATIONS = "add|sub|mul|fma|mad|div|rcp|sqrt|rsqrt|neg|abs|min|max|ex2|lg2|tanh|cvt"
FLOAT = re.compile(rf"\b(?:{OPERATIONS})[.\w:]*\.(?:f32|f64|f16|bf16|f16x2|bf16x2)[.\w]*")
ALLOWED = re.compile(
    r"(?:add|sub|mul|fma|div|sqrt|rcp)\.rn\.f32|(?:max|min)\.NaN\.f32|abs\.f32|cvt\.f32\.f16"
    r"|cvt\.rn\.(?:bf16x2|f16x2)\.f32|cvt\.rn\.satfinite\.(?:e4m3x2|e5m2x2)\.f32|cvt\.rni\.s32\.f32"
)


def not_allowed(ptx, *more):
    """Floating-point instructions of a kernel that are neither allowed in all of them nor in this kind."""
    used = set(FLOAT.findall(ptx))
    assert used
    return {u for u in used if not any(pattern.fullmatch(u) for pattern in (ALLOWED, *more))}


@pytest.fixture(scope="module")
def compiled():
    """Compile on demand, each case once."""
    pytest.importorskip("cutlass")
    from flashnorm.kernels.compile import compile_variant

    done = {}

    def get(arch, name):
        if (arch, name) not in done:
            done[arch, name] = compile_variant(VARIANTS[name], arch, inspect=True)
        return done[arch, name]

    return get


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_arithmetic_is_what_was_written(compiled, arch, name):
    """No contraction, no approximation, no flushing; architecture features only where they exist."""
    ptx = compiled(arch, name).ptx
    assert not not_allowed(ptx)
    assert ".ftz" not in ptx and ".approx" not in ptx and ".local" not in ptx
    assert ("griddepcontrol" in ptx) == (tiles.sm_of(arch) >= 90)
    assert "cutlass" not in re.search(r"\.visible \.entry (\w+)", ptx).group(1)
    clusters = any(tile.cluster_n > 1 for _, tile in plans.plans_for(VARIANTS[name], arch))
    assert ("barrier.cluster" in ptx) == clusters


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_every_class_of_rows_is_in_one_artefact(compiled, arch, name):
    entries = compiled(arch, name).ptx.count(".visible .entry")
    assert entries == len(plans.plans_for(VARIANTS[name], arch))


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_whole_groups_move_16_bytes_at_a_time(compiled, arch):
    for name in ("norm", "fused", "qk", "bare-fp32"):
        ptx = compiled(arch, name).ptx
        moves = set(re.findall(r"\b((?:ld|st)\.global[.\w]*)", ptx))
        assert moves and all(m.endswith(".v4.b32") for m in moves), moves


def test_codes_of_whole_groups_move_8_bytes_at_a_time(compiled):
    for arch in ("sm_80", "sm_90a"):
        moves = set(re.findall(r"\b((?:ld|st)\.global[.\w]*)", compiled(arch, "quant").ptx))
        assert moves == {"ld.global.v4.b32", "st.global.v2.b32"}
        moves = set(re.findall(r"\b(ld\.global[.\w]*)", compiled(arch, "picked").ptx))
        assert moves == {"ld.global.v2.b32", "ld.global.v4.b32", "ld.global.f32", "ld.global.s64"}


@pytest.mark.parametrize("arch", ARCHS)
def test_fp8_is_native_where_there_are_instructions(compiled, arch, tmp_path):
    got = compiled(arch, "quant")
    (tmp_path / "kernel.cubin").write_bytes(got.cubin)
    native = {i for i in binaries.instructions(tmp_path / "kernel.cubin") if "E4M3" in i}
    assert ("e4m3" in got.ptx) == bool(native) == (tiles.sm_of(arch) >= 89), native


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_nothing_spills(compiled, arch, name, tmp_path):
    """No local memory and no stack, read from the machine code."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled(arch, name).cubin)
    usage = binaries.resources(path)
    assert usage and all(stack == 0 and local == 0 for _, stack, local in usage), usage


def test_an_object_links_and_loads_without_the_dsl(tmp_path):
    """A fresh process loads a published artefact and does not import the DSL."""
    pytest.importorskip("cutlass")
    from flashnorm.jit.link import find_linker

    if not find_linker():
        pytest.skip("no linker")
    program = (
        "import sys; from pathlib import Path\n"
        "from flashnorm.backends import cute; from flashnorm.jit import Store; from flashnorm.program import *\n"
        "variant = Variant(RowProgram(LoadRow(), Rms(), (Affine(),), Cast()), ('bfloat16',) * 3, 4096)\n"
        "spec = cute.spec(variant, 'sm_90a')\n"
        "launch = getattr(spec, sys.argv[2])(Store(Path(sys.argv[1])))\n"
        "print(callable(launch), 'cutlass' in sys.modules)\n"
    )
    (tmp_path / "cache").mkdir(mode=0o700)
    got = []
    for what in ("build_and_load", "load"):
        words = [sys.executable, "-c", program, str(tmp_path / "cache"), what]
        got.append(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())
    assert got == [["True", "True"], ["True", "False"]]
