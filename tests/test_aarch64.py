"""The CPU route's own units, cross-compiled for AArch64 and emulated, against the golden bits on file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from flashnorm.core.checks import dtype_name
from flashnorm.core.op import OPS
from flashnorm.jit.codegen import unit
from flashnorm.jit.cpu import parse_cpuinfo
from flashnorm.jit.toolchain import HostCompiler, cxx_flags
from flashnorm.program import RowProgram
from tests import cross
from tests.combos import COMBOS, Combo
from tests.inputs import Outcome, Problem
from tests.test_bits import golden_digests, golden_file, golden_problem, golden_shapes
from tests.tolerance import bits_of

pytestmark = pytest.mark.cpu_only

HERE = Path(__file__).parent
# Every dtype as input, weight and residual, every mode, with rstd, without a weight, in place; odd and wide rows.
WANTED = (
    Combo("rmsnorm", "bf16", "bf16", rstd=True),
    Combo("rmsnorm", "f16", "f32"),
    Combo("rmsnorm", "f32", "f32", rstd=True),
    Combo("rmsnorm", "bf16", None),
    Combo("rmsnorm", "f16", "f16", numerics="vllm"),
    Combo("gemma_rmsnorm", "f32", "bf16"),
    Combo("fused_add_rmsnorm", "bf16", "bf16", "bf16"),
    Combo("fused_add_rmsnorm", "f16", "f32", "bf16", "cake"),
    Combo("fused_add_rmsnorm", "f32", "bf16", "f16"),
    Combo("fused_add_rmsnorm", "f16", "f16", "f16", "vllm"),
    Combo("gemma_fused_add_rmsnorm", "f16", "bf16", "f32"),
)
CODES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16)}


def operands(problem: Problem) -> tuple[RowProgram, dict[str, torch.Tensor]]:
    """The program of a call and its operands by name, in order; outputs are NaN."""
    combo = problem.combo
    given = {"x": problem.x, "residual": problem.residual, "weight": problem.weight}
    present = {name for name, tensor in given.items() if tensor is not None} | ({"rstd"} if combo.rstd else set())
    op = OPS[combo.op]
    program = op.program(frozenset(present), {"numerics": op.options["numerics"][combo.numerics]})
    nan = {"out": torch.full_like(problem.x, torch.nan), "rstd": torch.full(problem.shape[:-1], torch.nan)}
    tensors = {o.name: given.get(o.name) for o in program.operands()}
    return program, {name: nan[name] if tensor is None else tensor for name, tensor in tensors.items()}


def units() -> str:
    """One unit for each combination, in a namespace of its own, and the function that picks one."""
    text, cases = [], []
    for i, combo in enumerate(WANTED):
        program, tensors = operands(golden_problem(combo, golden_shapes(combo)[0], "cpu"))
        text.append(f"namespace unit{i} {{\n{unit(program, tuple(map(dtype_name, tensors.values())), 'cpu')}}}\n")
        arguments = ", ".join(f"t[{n}]" for n in range(len(tensors)))
        assert program.scalars() == ("eps",)
        cases.append(f"    case {i}: return unit{i}::launch(eps, false, {arguments});")
    head = "void call(int which, double eps, const std::vector<TensorView>& t) {\n  switch (which) {\n"
    return "".join(text) + head + "\n".join(cases) + "\n    default: std::exit(4);\n  }\n}\n"


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
    includes = [f"-I{HERE / 'csrc' / 'fake_ffi'}", f"-I{HERE.parent / 'csrc'}", f'-DUNITS="{folder / "units.inc"}"']
    source = HERE / "csrc" / "run_units.cpp"
    command = [cross.COMPILER, *flags, *includes, "-static", source, "-o", folder / "run", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (folder / "run").read_bytes()[18:20] == b"\xb7\x00"  # ELF: EM_AARCH64
    return folder / "run"


def run(program: Path, which: int, problem: Problem) -> Outcome:
    _, tensors = operands(problem)
    sent = b""
    for tensor in tensors.values():
        words = (*CODES[tensor.dtype], tensor.dim(), *tensor.shape)
        sent += np.array(words, np.int64).tobytes() + bits_of(tensor.contiguous()).numpy().tobytes()
    done = subprocess.run(
        [*cross.emulator(), program, str(which), repr(problem.eps)], input=sent, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    after, start = {}, 0
    for name, tensor in tensors.items():
        raw = bytearray(done.stdout[start : start + tensor.nbytes])
        after[name] = torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)
        start += tensor.nbytes
    assert start == len(done.stdout)
    return Outcome(after.get("out", after["x"]), after.get("residual"), after.get("rstd"))


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
