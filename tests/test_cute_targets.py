"""NVFP4 and SiLU as compiled CuTe kernels, for architectures that are not here: conversions, arithmetic, registers."""

import re

import pytest

from flashnorm.kernels import plans
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
    Variant,
)
from tests import binaries
from tests.test_cute_compile import not_allowed

pytestmark = pytest.mark.cpu_only

B, S, E4, U = "bfloat16", "float32", "float8_e4m3fn", "uint8"
TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")


def norm(store, *maps, load=None):
    return RowProgram(load or LoadRow(), Rms(), maps, store)


VARIANTS = {
    "nvfp4": Variant(norm(QuantNvfp4(16, "value", layout="swizzled"), Affine()), (B, B, U, U), 4096),
    "silu": Variant(norm(Cast(), Affine(), Silu()), (B, B, B), 1024),
    "both": Variant(
        norm(QuantNvfp4(16, "device", True, "both"), Affine(1.0), load=AddResidual(True)),
        (B, S, S, U, U, U, S, B),
        16384,
    ),
    "mxfp4": Variant(norm(QuantBlocks(32, 0.0, ue8m0=True, fp4=True, ocp=True), Affine()), (B, B, U, U), 65536),
    "mxfp8": Variant(norm(QuantBlocks(32, 0.0, ue8m0=True), load=AddResidual()), (B, B, E4, U), 7168, vec=4),
    "silu-fp8": Variant(norm(QuantTensor(), Silu()), (S, E4), 1003, vec=1),
    "silu-fp4": Variant(norm(QuantNvfp4(16), Affine(), Silu()), (B, B, U, U), 5120),
}
# Every target with one program; what SiLU compiles to depends on the generation alone.
SAMPLE = [(a, "nvfp4") for a in TARGETS] + [(a, "silu") for a in ("sm_80", "sm_90a", "sm_100a", "sm_120a")]
# Beside what all kernels do: saturation in fp16, and reciprocals and powers of two
# that are corrected afterwards.
MORE = re.compile(
    r"mul\.rn\.sat\.f32|(?:min|max)\.f32|neg\.f32|min\.f16x2|cvt\.rn\.satfinite\.e2m1x2\.f32|(?:rcp|ex2)\.approx\.ftz\.f32"
)


def pytest_generate_tests(metafunc):
    if "arch" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        metafunc.parametrize(("arch", "name"), [(a, v) for a in TARGETS for v in VARIANTS] if full else SAMPLE)


@pytest.fixture(scope="module")
def compiled():
    """Compile on demand, each case once: few rows and many, every class where there is one sample more to see."""
    pytest.importorskip("cutlass")
    from flashnorm.kernels.compile import compile_variant

    done = {}

    def get(arch, name):
        if (arch, name) not in done:
            chosen = plans.plans_for(VARIANTS[name], arch)
            chosen = chosen if arch == "sm_90a" else (chosen[0], chosen[-1])
            done[arch, name] = compile_variant(VARIANTS[name], arch, plans=chosen, inspect=True)
        return done[arch, name]

    return get


def test_arithmetic_is_what_was_written(compiled, arch, name):
    ptx = compiled(arch, name).ptx
    assert not not_allowed(ptx, MORE)
    rest = re.sub(r"(?:rcp|ex2)\.approx\.ftz\.f32", "", ptx)
    assert ".ftz" not in rest and ".approx" not in rest and ".local" not in rest


def test_codes_are_native_where_there_are_instructions(compiled, arch, name):
    ptx = compiled(arch, name).ptx
    fp4 = VARIANTS[name].program.operands()[-1].kind == "swizzled" or "uint8" in VARIANTS[name].dtypes
    if fp4 and name != "mxfp8":
        native = tiles.sm_of(arch) >= 100
        assert ("cvt.rn.satfinite.e2m1x2.f32" in ptx) == native
        assert ("cvt.rn.f16x2.f32" in ptx) == (not native)
        scale = isinstance(VARIANTS[name].program.store, QuantNvfp4) and tiles.sm_of(arch) >= 89
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == scale


def test_whole_groups_move_at_once(compiled, arch, name):
    """Rows and weights by 16 bytes, codes of 4 bits by 4; and nothing spills."""
    variant, ptx = VARIANTS[name], compiled(arch, name).ptx
    if variant.vec == 8:
        loads = set(re.findall(r"\b(ld\.global[.\w]*)", ptx)) - {"ld.global.f32"}
        assert all(load.endswith(".v4.b32") for load in loads), loads
        if variant.program.operands()[-1].kind == "swizzled":
            assert set(re.findall(r"\b(st\.global[.\w]*)", ptx)) == {"st.global.b32", "st.global.u8"}


def test_nothing_spills(compiled, arch, name, tmp_path):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled(arch, name).cubin)
    usage = binaries.resources(path)
    assert usage and all(stack == 0 and local == 0 for _, stack, local in usage), usage


def test_the_plain_target_has_no_conversion_to_e2m1():
    """Instructions of sm_100a are those of that target, not of every device of its capability."""
    assert not tiles.converts_fp4("sm_100") and tiles.converts_fp4("sm_100a")
