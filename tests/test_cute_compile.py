"""The CuTe kernels as compiled code, for architectures that are not here: arithmetic, width of access, registers."""

import re
import subprocess
import sys

import pytest

from flashnorm.kernels import tile as tiles
from flashnorm.program import AddResidual, Affine, Cast, LoadRow, Rms, RowProgram, SaveRstd, Variant
from tests import binaries

B, F, S = "bfloat16", "float16", "float32"
NORM = RowProgram(LoadRow(), Rms(), (Affine(),), Cast())
FUSED = RowProgram(AddResidual(), Rms(), (Affine(1.0),), Cast("x"))
TRAIN = RowProgram(AddResidual(rounded=True, dst="h"), Rms(), (Affine(0.0, True),), Cast(), (SaveRstd(),))
BARE = RowProgram(LoadRow(), Rms(), (), Cast())

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
VARIANTS = {
    "norm": Variant(NORM, (B, B, B), 4096),
    "norm-wide": Variant(NORM, (F, S, F), 131072),
    "fused": Variant(FUSED, (B, B, B), 8192),
    "train-odd": Variant(TRAIN, (F, S, S, B, F, S), 1003, row_rank=2, row_vecs=("weight",), vec=1),
    "qk": Variant(NORM, (B, B, B), 128, row_rank=2),
    "bare-fp32": Variant(BARE, (S, S), 5120, vec=4),
}
CASES = [(a, v) for a in ARCHS for v in (VARIANTS if a in ("sm_80", "sm_90a") else ("norm", "norm-wide", "train-odd"))]

OPERATIONS = "add|sub|mul|fma|mad|div|rcp|sqrt|rsqrt|neg|abs|min|max|ex2|lg2|tanh|cvt"
FLOAT = re.compile(rf"\b(?:{OPERATIONS})[.\w:]*\.(?:f32|f64|f16|bf16|f16x2|bf16x2)[.\w]*")
ALLOWED = re.compile(r"(?:add|mul|fma|div|sqrt|rcp)\.rn\.f32|cvt\.f32\.f16|cvt\.rn\.(?:bf16x2|f16x2)\.f32")


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
    used = set(FLOAT.findall(ptx))
    assert used and not {u for u in used if not ALLOWED.fullmatch(u)}
    assert ".ftz" not in ptx and ".approx" not in ptx and ".local" not in ptx
    assert ("griddepcontrol" in ptx) == (tiles.sm_of(arch) >= 90)
    assert "cutlass" not in re.search(r"\.visible \.entry (\w+)", ptx).group(1)
    clusters = any(tile.cluster_n > 1 for _, tile in tiles.plans_for(VARIANTS[name], arch))
    assert ("barrier.cluster" in ptx) == clusters


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_every_class_of_rows_is_in_one_artefact(compiled, arch, name):
    entries = compiled(arch, name).ptx.count(".visible .entry")
    assert entries == len(tiles.plans_for(VARIANTS[name], arch))


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_whole_groups_move_16_bytes_at_a_time(compiled, arch):
    for name in ("norm", "fused", "qk", "bare-fp32"):
        ptx = compiled(arch, name).ptx
        moves = set(re.findall(r"\b((?:ld|st)\.global[.\w]*)", ptx))
        assert moves and all(m.endswith(".v4.b32") for m in moves), moves


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
