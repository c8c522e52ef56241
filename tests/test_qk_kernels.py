"""The CUDA kernel of Q, K and V on machines without a GPU: run over an emulation of its threads, and compiled.

`test_csrc_emulated.py` says what an emulation cannot show.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashnorm.core.operands import normalise
from flashnorm.jit.codegen import unit
from flashnorm.jit.toolchain import find_host_compiler, find_nvcc, find_tvm_ffi, nvcc_flags
from flashnorm.ops import qk
from flashnorm.program import QkNormRope
from tests import binaries
from tests.canonical.qk import turns
from tests.csrc_emulated import Emulated, build
from tests.qk import EPS, PARTS, Case, Problem
from tests.test_cuda_compile import ARCHS, CSRC

pytestmark = pytest.mark.cpu_only

# By kernel: the scope, the pairing, the kind of result and where angles come from.
KERNELS = {
    "hidden": Case(),
    "neox_codes": Case(interleave=False, coded=True, yarn=True),
    "head": Case(scope="head", x="f16", q_weight="f32", k_weight="f32"),
    "cached_head": Case(scope="head", interleave=False, rotary=32, index="i32", q_weight=None, k_weight=None),
    "bare": Case(scope="none", coded=True, q_weight=None, k_weight=None),
}
AXES = {
    8: (4, 2, 2),
    64: (24, 20, 20),
    66: (22, 22, 22),
    96: (32, 32, 32),
    128: (44, 42, 42),
    256: (96, 80, 80),
    320: (0, 160, 160),
}


def program_of(case: Case) -> tuple[QkNormRope, tuple[str, ...]]:
    """What is compiled for a case, with the dtypes of its operands."""
    weights = (case.q_weight is not None, case.k_weight is not None)
    program = QkNormRope(case.scope, case.interleave, case.rotary > 0, *weights, case.coded)  # type: ignore[arg-type]
    long = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "i32": "int32", "i64": "int64"}
    of = {"x": case.x, "q_weight": case.q_weight, "k_weight": case.k_weight, "positions": case.index}
    of["cos_sin_cache"] = "f32"
    dtypes = [long.get(of.get(o.name) or case.x, "") for o in program.operands()]
    dtypes[-3:] = ["float8_e4m3fn" if case.coded else long[case.x]] * 3
    return program, tuple(dtypes)


def declared(case: Case) -> Any:
    return {(0, 0): qk.QK, (0, 1): qk.QK_FP8, (1, 0): qk.QK_CACHED, (1, 1): qk.QK_CACHED_FP8}[
        bool(case.rotary), case.coded
    ]


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Emulated]:
    return build(tmp_path_factory.mktemp("emulated"), {name: program_of(case) for name, case in KERNELS.items()})


def launch(emulated: Emulated, problem: Problem, *, misaligned: bool = False) -> None:
    """Runs the emulated kernel as the route would, and compares every bit."""
    case, op = problem.case, declared(problem.case)
    x = problem.x
    if misaligned:
        x = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    made = [
        torch.empty(*problem.lead, n, case.head_dim, dtype=torch.float8_e4m3fn if case.coded else x.dtype)
        for n in case.heads
    ]
    for out in made:
        out.view(torch.uint8).fill_(0xFF)
    given = {"x": x, **problem.weights, "positions": problem.positions, "cos_sin_cache": problem.cache}
    given |= dict(zip(PARTS, made, strict=True))
    tensors = [given[o.name] for o in op.operands]
    names = {name: value for name, value in problem.options().items() if name in qk._SEEN}
    defaults = {"base": 1e4, "factor": 1.0, "low": 0.0, "high": 0.0, "attention_factor": 1.0}
    defaults |= {"is_qk_norm": True, "norm_scope": "hidden"}
    layout = qk._layout(*(({**defaults, **names}).get(name) for name in qk._SEEN), case.rotary or None)
    program = op.program_of(tensors, {"numerics": "flashinfer", "layout": layout})
    _, views = normalise(op, program, tensors)
    passed = [
        tensors[v.position] if v.size is None else tensors[v.position].as_strided(v.size, v.stride) for v in views
    ]
    program.bind(emulated.launch)(EPS, *problem.scales, False, *passed)
    problem.check(tuple(made), "emulated")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("width", AXES)
def test_picked_plan(units: dict[str, Emulated], name: str, width: int) -> None:
    """Many tokens and few, as many threads as each has; also of a device with little shared memory."""
    case = replace(KERNELS[name], head_dim=width, channels=AXES[width], heads=(5, 3, 2), grid=(1, 1, 2))
    if case.rotary:
        case = replace(case, channels=(), rotary=min(32, width))
    for processors, memory in ((132, 227 * 1024), (1, 227 * 1024), (1, 2048)):
        units[name].module["force"](processors, memory, 0, 0, 0, False)
        launch(units[name], Problem(case, (1, 2) if not case.rotary else (2,)))


@pytest.mark.parametrize("heads", [(17, 1, 1), (33, 40, 41), (70, 5, 0), (0, 3, 1)], ids=str)
@pytest.mark.parametrize("name", ["hidden", "neox_codes"])
def test_sums_of_many_heads(units: dict[str, Emulated], name: str, heads: tuple[int, int, int]) -> None:
    """Every number of lanes a thread, and sums of several rounds."""
    case = replace(KERNELS[name], head_dim=128, channels=AXES[128], heads=heads, grid=(1, 1, 2))
    for processors in (132, 1):
        units[name].module["force"](processors, 227 * 1024, 0, 0, 0, False)
        launch(units[name], Problem(case, (1, 2)))


def test_every_tile_has_the_same_bits(tmp_path: Path) -> None:
    """Those that only a tuning build has, too; a tile with too few lanes is refused."""
    case = replace(KERNELS["neox_codes"], head_dim=128, channels=AXES[128], heads=(12, 9, 13), grid=(1, 1, 2))
    head = replace(KERNELS["head"], head_dim=128, channels=AXES[128], heads=(12, 9, 13), grid=(1, 1, 2))
    cases = {"sums": case, "heads": head}
    made = build(tmp_path, {name: program_of(c) for name, c in cases.items()}, ("FLASHNORM_TUNING",))
    tiles = {
        "sums": ((32, 8), (64, 4), (64, 8), (128, 2), (128, 4), (128, 8), (512, 2)),
        "heads": ((32, 1), (64, 1), (128, 1), (512, 1)),
    }
    for name, plans in tiles.items():
        for plan in plans:
            made[name].module["force"](132, 227 * 1024, *plan, 2, True)
            launch(made[name], Problem(cases[name], (1, 2)))
    made["sums"].module["force"](132, 227 * 1024, 32, 4, 2, True)
    with pytest.raises(RuntimeError, match="no kernel for 32 threads"):
        launch(made["sums"], Problem(case, (1, 2)))


@pytest.mark.parametrize("name", KERNELS)
def test_elements_of_any_alignment(units: dict[str, Emulated], name: str) -> None:
    case = replace(KERNELS[name], grid=(1, 2, 1))
    for memory in (227 * 1024, 2048):
        units[name].module["force"](1, memory, 0, 0, 0, False)
        launch(units[name], Problem(case, (2, 2), bad=bool(case.rotary)), misaligned=True)
        launch(units[name], Problem(case, (2, 2), bad=bool(case.rotary)))


def test_sines_of_the_device_and_of_the_model(units: dict[str, Emulated]) -> None:
    """The routine by itself, on whatever positions and frequencies: the model's bits."""
    pool = torch.Generator().manual_seed(1)
    position = torch.randint(0, 131_073, (200_000,), generator=pool).float()
    frequency = torch.exp2(-17 * torch.rand(200_000, generator=pool).double())
    high = frequency.float()
    triples = torch.stack((position, high, (frequency - high.double()).float()), -1).contiguous()
    want = turns(*(t.contiguous().numpy() for t in triples.unbind(-1)))
    units["hidden"].module["turns"](triples)
    for mine, model in zip(triples.unbind(-1), want, strict=False):
        assert torch.equal(mine.contiguous().view(torch.int32), torch.from_numpy(model).view(torch.int32))


# ------------------------------------------------------------------ machine code
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every architecture with one kernel, every kernel with one architecture; all pairs with --full."""
    if "arch" not in metafunc.fixturenames:
        return
    full = metafunc.config.getoption("--full")
    pairs = [(arch, name) for arch in ("sm_75", *ARCHS) for name in KERNELS]
    metafunc.parametrize(("arch", "name"), [(a, n) for a, n in pairs if full or n == "neox_codes" or a == "sm_90a"])


def test_compiles_without_a_stack_and_moves_16_bytes(arch: str, name: str, tmp_path: Path) -> None:
    nvcc, host, ffi = find_nvcc(), find_host_compiler(), find_tvm_ffi()
    if not nvcc or not host or not ffi:
        pytest.skip(f"{nvcc}; {host}; {ffi}")
    target = nvcc.target(arch)
    if not target or target.compiled_for != arch:
        pytest.skip(f"this nvcc does not list {arch}")
    (tmp_path / "kernel.cu").write_text(unit(*program_of(KERNELS[name]), "cuda"))
    includes = [f"-I{CSRC}", *(f"-I{path}" for path in ffi.include_dirs)]
    command = [str(nvcc.path), *nvcc_flags(nvcc, target, host), *includes, "-cubin", "kernel.cu", "-o", "kernel.cubin"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    usage = binaries.resources(tmp_path / "kernel.cubin")
    assert len(usage) == (12 if KERNELS[name].scope == "hidden" else 8)
    assert all(registers <= 128 and stack == 0 and local == 0 for registers, stack, local in usage), usage
    found = binaries.instructions(tmp_path / "kernel.cubin")
    wide = r"STG\.E.*\.64" if KERNELS[name].coded else r"STG\.E.*\.128"
    assert any(re.match(wide, i) for i in found) and any(re.match(r"LDG\.E.*\.128", i) for i in found)
    assert arch == "sm_75" or any(re.match(r"LDGSTS\.E.*\.128", i) for i in found)
    assert not any(i.startswith(("LDL", "STL")) for i in found)
