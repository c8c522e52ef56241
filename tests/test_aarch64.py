"""The CPU route's own units, cross-compiled for AArch64 and emulated, against the golden bits on file."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from flashnorm.core.checks import dtype_name
from flashnorm.core.op import ALL
from flashnorm.jit.codegen import unit
from flashnorm.jit.cpu import parse_cpuinfo
from flashnorm.jit.toolchain import HostCompiler, cxx_flags, find_tvm_ffi
from flashnorm.program import RowProgram
from tests import cross
from tests.canonical import Bits
from tests.combos import BLOCKED, COMBOS, DTYPES, DYNAMIC, STATIC, Combo
from tests.golden.digests import golden_digests, golden_file, golden_problem, golden_shapes
from tests.problem import SCALE_DTYPES, Problem, padded
from tests.tolerance import bits_of

pytestmark = pytest.mark.cpu_only

HERE = Path(__file__).parent
# Every dtype as input, weight and residual, every mode, with rstd, without a weight, in place; odd and wide rows.
WANTED = (
    Combo("rmsnorm", "bf16", "bf16", rstd=True),
    Combo("rmsnorm", "f32", "f32", rstd=True),
    Combo("rmsnorm", "bf16", None),
    Combo("rmsnorm", "f16", "f16", numerics="vllm"),
    Combo("gemma_rmsnorm", "f32", "bf16"),
    Combo("fused_add_rmsnorm", "bf16", "bf16", "bf16"),
    Combo("fused_add_rmsnorm", "f16", "f32", "bf16", "cake"),
    Combo("fused_add_rmsnorm", "f16", "f16", "f16", "vllm"),
    Combo("gemma_fused_add_rmsnorm", "f16", "bf16", "f32"),
    # LayerNorm with everything; each way to make codes and scales; rows that are picked and widened.
    Combo("layernorm", "bf16", "f32", bias="f32"),
    next(c for c in COMBOS if c.op == "layernorm_quant" and c.double and c.x == "bf16"),
    next(c for c in COMBOS if c.op == "rmsnorm_quant" and c.numerics == "hf-llama" and c.x == "bf16"),
    next(c for c in COMBOS if c.op == BLOCKED and c.x == "bf16"),
    next(c for c in COMBOS if c.op == DYNAMIC and c.form == "ue8m0_packed" and c.out == "e4m3"),
    next(c for c in COMBOS if c.op == DYNAMIC and c.out == "i8" and c.cap),
    next(c for c in COMBOS if c.op == DYNAMIC and c.out == "e5m2" and c.form == "ue8m0"),
    next(c for c in COMBOS if c.op == "gemma_rmsnorm_quant" and c.x == "i8" and c.index),
)
# DLPack's code and bits of each dtype.
CODES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16)}
CODES |= {torch.float8_e4m3fn: (10, 8), torch.float8_e5m2: (12, 8), torch.uint8: (1, 8)}
CODES |= {torch.int8: (0, 8), torch.int32: (0, 32), torch.int64: (0, 64)}
SCALARS = ("eps", "scale_value", "scale_ub_value")


def operands(problem: Problem) -> tuple[RowProgram, dict[str, torch.Tensor]]:
    """The program of a call and its operands by name, in order; outputs are full of ones."""
    combo, count, h = problem.combo, math.prod(problem.shape[:-1]), problem.shape[-1]
    blocks = -(-h // (combo.block_size or h))
    blocks = -(-blocks // 4) if combo.form == "ue8m0_packed" else blocks
    rows_there = padded(count) if combo.column or combo.op == BLOCKED else count
    given = {
        "x": problem.x,
        "row_index": problem.index,
        "input_scale": problem.input_scale,
        "residual": problem.residual,
        "weight": problem.weight,
        "bias": problem.bias,
        "rstd": torch.empty(problem.shape[:-1]) if combo.rstd else None,
        "out": torch.empty(problem.shape, dtype=combo.out_dtype),
        "normed_out": torch.empty(problem.shape, dtype=DTYPES[combo.x]) if combo.side else None,
        "scale": torch.empty(rows_there, blocks, dtype=SCALE_DTYPES[combo.form]) if combo.makes_scales else None,
        "scale_ub": problem.cap,
    }
    if combo.op in STATIC:
        given["scale"] = problem.scale
    tensors = {name: tensor for name, tensor in given.items() if isinstance(tensor, torch.Tensor)}
    if problem.input_scale is not None:
        tensors["input_scale"] = problem.input_scale.flatten()
    name = combo.op + ("_rows" if combo.index or combo.x == "i8" else "")
    op = ALL[f"fused_add_{name}" if combo.op == DYNAMIC and combo.residual else name]
    asked = {"numerics": combo.numerics, "double_rounding": combo.double}
    asked |= {"granularity": combo.block or "token", "scale_format": combo.form}
    program = op.program(frozenset(tensors), {key: op.options[key][asked[key]] for key in op.options})
    return program, {operand.name: tensors[operand.name] for operand in program.operands()}


def units() -> str:
    """One unit for each combination, each with an export of its own, and the table of them."""
    text, cases = [], []
    for i, combo in enumerate(WANTED):
        program, tensors = operands(golden_problem(combo, golden_shapes(combo)[0], "cpu"))
        one = unit(program, tuple(map(dtype_name, tensors.values())), "cpu")
        assert one.count("FLASHNORM_EXPORT(launch,") == 1
        text.append(f"namespace unit{i} {{\n{one.replace('EXPORT(launch,', f'EXPORT(launch{i},')}}}\n")
        scalars = ", ".join(str(SCALARS.index(name)) for name in program.scalars())
        cases.append(f"    {{unit{i}::__tvm_ffi_launch{i}, {{{scalars}}}}},")
    return "\n".join([*text, "const Case kCases[] = {", *cases, "};", ""])


@pytest.fixture(scope="module")
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cross.need(request.config)
    folder = tmp_path_factory.mktemp("aarch64")
    (folder / "units.inc").write_text(units())
    compiler = HostCompiler((cross.COMPILER,), "gcc", "", "aarch64-linux-gnu")
    # The route's own flags, for Armv8-A in place of the processor it runs on.
    flags = cxx_flags(compiler, parse_cpuinfo("", "aarch64"))
    assert "-mcpu=native" in flags
    flags = tuple("-march=armv8-a" if flag == "-mcpu=native" else flag for flag in flags)
    ffi = find_tvm_ffi()
    assert ffi
    includes = [f"-I{HERE.parent / 'csrc'}", *(f"-I{path}" for path in ffi.include_dirs)]
    includes.append(f'-DUNITS="{folder / "units.inc"}"')
    source = HERE / "csrc" / "run_units.cpp"
    command = [cross.COMPILER, *flags, *includes, "-static", source, "-o", folder / "run", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (folder / "run").read_bytes()[18:20] == b"\xb7\x00"  # ELF: EM_AARCH64
    return folder / "run"


def run(program: Path, which: int, problem: Problem) -> Bits:
    _, tensors = operands(problem)
    combo, sent = problem.combo, b""
    for tensor in tensors.values():
        words = (*CODES[tensor.dtype], tensor.dim(), *tensor.shape)
        sent += np.array(words, np.int64).tobytes() + bits_of(tensor.contiguous()).numpy().tobytes()
    scalars = [problem.eps, *(float(value or 1.0) for value in (problem.scale, problem.cap))]
    command = [*cross.emulator(), program, str(which), *map(repr, scalars)]
    done = subprocess.run(command, input=sent, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    after, start = {}, 0
    for name, tensor in tensors.items():
        raw = bytearray(done.stdout[start : start + tensor.nbytes])
        after[name] = torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)
        start += tensor.nbytes
    assert start == len(done.stdout)
    scale = after["scale"] if combo.makes_scales else None
    if scale is not None:
        count = math.prod(problem.shape[:-1])
        assert not bool(scale[count:].any()), "padding"
        scale = scale[:count]
    more = {name: after.get(name) for name in ("residual", "rstd", "normed_out")}
    return Bits(after["x"] if combo.in_place else after["out"], scale=scale, **more)


@pytest.mark.parametrize("combo", WANTED, ids=str)
def test_golden_bits(combo: Combo, program: Path) -> None:
    assert combo in COMBOS
    want = golden_file()
    for shape in golden_shapes(combo):
        problem = golden_problem(combo, shape, "cpu")
        assert golden_digests(run(program, WANTED.index(combo), problem), combo) == want[problem.what], problem.what


def test_what_is_tried_here() -> None:
    """Each dtype in each place, and rows that are odd, short of a vector, and longer than one fold."""
    for place in ("x", "weight", "residual"):
        assert {"f32", "f16", "bf16"} <= {getattr(combo, place) for combo in WANTED}
    assert {(c.out, c.makes_scales) for c in WANTED} >= {("e4m3", True), ("e5m2", True), ("i8", True), ("e4m3", False)}
    hidden = {shape[1] for combo in WANTED for shape in golden_shapes(combo)}
    assert any(h % 2 for h in hidden) and min(hidden) < 8 and max(hidden) > 8192, sorted(hidden)


def test_a_missing_tool_fails_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        def __init__(self, needed: bool) -> None:
            self.needed = needed

        def getoption(self, name: str) -> bool:
            assert name == "--need-aarch64"
            return self.needed

    monkeypatch.setattr(cross.shutil, "which", lambda name: None)
    assert cross.lacking() == [cross.COMPILER, "qemu-aarch64-static or qemu-aarch64"]
    with pytest.raises(pytest.skip.Exception, match="aarch64-linux-gnu"):
        cross.need(Config(False))  # type: ignore[arg-type]
    with pytest.raises(pytest.fail.Exception, match="need-aarch64"):
        cross.need(Config(True))  # type: ignore[arg-type]
