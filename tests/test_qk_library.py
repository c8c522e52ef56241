"""Q, K and V with everything around an operator: torch.library, compilers, exports, graphs, streams, recipes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashnorm
from flashnorm import recipe
from flashnorm.core.op import Op
from flashnorm.ops import qk
from flashnorm.program import QkLayouts, QkNormRope, Variant
from tests.qk import PARTS, Case, Problem
from tests.tolerance import assert_same_bits

USUAL, CODES, TABLE = Case(), Case(coded=True, interleave=False), Case(rotary=32, scope="head")
every_case = pytest.mark.parametrize("case", [USUAL, CODES, TABLE], ids=str)
every_op = pytest.mark.parametrize("op", [qk.QK, qk.QK_FP8, qk.QK_CACHED, qk.QK_CACHED_FP8], ids=lambda op: op.name)


def arguments(problem: Problem, device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and the rest of a call without results."""
    tensors: dict[str, Any] = {"qkv": problem.x, **problem.weights}
    if problem.case.rotary:
        tensors |= {"cos_sin_cache": problem.cache, "positions": problem.positions}
    return {name: t.to(device) for name, t in tensors.items()}, problem.options()


def compare(made: Any, problem: Problem) -> None:
    problem.check(tuple(t.cpu() for t in made))


# ------------------------------------------------------------------ torch.library
@every_op
def test_opcheck(op: Op, device: torch.device) -> None:
    layout = "hidden;2,1,1,16,16,1,1,2,2,4,6,6;10000.0,1.0,0.0,0.0,1.0"
    if "positions" in [o.name for o in op.operands]:
        layout = "hidden;2,1,1,16,8,1;10000.0,1.0,0.0,0.0,1.0"
    coded = "fp8" in op.name
    sizes = {"x": (4, 64), "q_weight": (2, 16), "k_weight": (16,), "positions": (4,), "cos_sin_cache": (5, 8)}
    sizes |= {"q_out": (4, 2, 16), "k_out": (4, 1, 16), "v_out": (4, 1, 16)}
    given = []
    for operand in op.operands:
        dtype = torch.bfloat16 if operand.name in ("x", "q_weight", "k_weight") or not coded else torch.uint8
        dtype = {"positions": torch.int64, "cos_sin_cache": torch.float32}.get(operand.name, dtype)
        values = torch.randn(sizes[operand.name])
        given.append((values.abs() if operand.name == "positions" else values).to(dtype).to(device))
    words = ("float8_e4m3fn",) * (3 if coded else 0)
    torch.library.opcheck(op.overload, (*given, 1e-6, 1.0, 1.0, "flashinfer", layout, True, *words))


@every_op
def test_schema_marks_what_is_written(op: Op) -> None:
    schema = op.overload._schema
    assert {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write} == set(PARTS)


@every_case
def test_fullgraph(case: Case, device: torch.device) -> None:
    """One graph, no break, eager's bits; also for another number of sequences."""
    torch.compiler.reset()
    problem = Problem(case)
    tensors, options = arguments(problem, device)

    def step(tensors: dict[str, torch.Tensor]) -> Any:
        return flashnorm.fused_qk_rmsnorm_rope(**tensors, **options)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        compare(compiled(tensors), problem)
        compare(compiled(tensors), problem)


def test_inductor_and_a_dynamic_batch(device: torch.device) -> None:
    torch.compiler.reset()
    options = Problem(USUAL).options()
    graphs = 0

    def count(module: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    def step(tensors: dict[str, torch.Tensor]) -> Any:
        return flashnorm.fused_qk_rmsnorm_rope(**tensors, **options)

    compiled = torch.compile(step, fullgraph=True, backend=count)
    for batch in (2, 3, 5):
        problem = Problem(USUAL, (batch, USUAL.sequence))
        tensors, _ = arguments(problem, device)
        torch._dynamo.mark_dynamic(tensors["qkv"], 0)
        with torch.no_grad():
            compare(compiled(tensors), problem)
    assert graphs == 1


def test_export(device: torch.device) -> None:
    problem = Problem(USUAL)
    tensors, options = arguments(problem, device)

    class Module(torch.nn.Module):
        def forward(self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> Any:
            return flashnorm.fused_qk_rmsnorm_rope(qkv, q_weight, k_weight, **options)

    with torch.no_grad():
        exported = torch.export.export(Module(), tuple(tensors.values()))
        compare(exported.module()(*tensors.values()), problem)


# ------------------------------------------------------------------ calls
@every_case
def test_warm_calls_give_the_same(case: Case, device: torch.device) -> None:
    """New tensors, given results, other numbers: each call is its own."""
    for problem in (Problem(case), Problem(case), Problem(case, (1, case.sequence))):
        for out in ("none", "contiguous", "none"):
            problem.check(problem.run(None, device, out=out))
    other = Problem(case)
    other.x = other.x.flip(0)
    other.check(other.run(None, device))
    a, b = Problem(case).run(None, device), Problem(case).run(None, device, eps=0.5)
    assert not torch.equal(a[0].view(torch.uint8), b[0].view(torch.uint8))


def test_versions_are_bumped(device: torch.device) -> None:
    problem = Problem(USUAL)
    tensors, options = arguments(problem, device)
    outs = dict(zip(PARTS, flashnorm.fused_qk_rmsnorm_rope(**tensors, **options), strict=True))
    for _ in range(2):
        before = [t._version for t in outs.values()]
        flashnorm.fused_qk_rmsnorm_rope(**tensors, **outs, **options)
        assert [t._version for t in outs.values()] == [v + 1 for v in before]


@pytest.mark.cpu_only
def test_threads_give_the_same() -> None:
    problem = Problem(Case(heads=(12, 4, 4), grid=(3, 5, 7)))
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        problem.check(problem.run("cpu"))
    torch.set_num_threads(before)


@pytest.mark.cpu_only
def test_large_results_pass_the_caches() -> None:
    """Streamed stores: past 4 million elements."""
    problem = Problem(Case(heads=(8, 4, 4), head_dim=128, channels=(44, 42, 42), grid=(1, 33, 64)), (1, 2112))
    problem.check(problem.run("cpu"))


@pytest.mark.cpu_only
def test_recipes_hold_it() -> None:
    """Its kernels are noted, written as JSON, and read again as they were."""
    with flashnorm.record() as recorded:
        Problem(TABLE).run("cpu")
    kernels = list(recorded.kernels)
    assert kernels and all(k.op == "fused_qk_rmsnorm_rope_cached" for k in kernels)
    layout = next(iter(QkLayouts().values()))
    program = QkNormRope("hidden", True, False, True, True, False, layout)
    kernels.append(recipe.Kernel(qk.NAME, "cuda", "sm_90a", Variant(program, ("bfloat16",) * 6, layout.hidden_size)))
    assert set(recipe.from_json(recipe.to_json(kernels))) == set(kernels)
    with pytest.raises(ValueError, match="there is no program"):
        recipe.from_json(recipe.to_json(kernels).replace("QkNormRope", "Qk"))


# ------------------------------------------------------------------ what only a GPU shows
@pytest.mark.gpu
@every_case
@pytest.mark.parametrize("pdl", [True, False])
def test_graph_capture(case: Case, pdl: bool, device: torch.device) -> None:
    """Replays read new data, and the frequencies that they were captured with, whatever was called since."""
    problem = Problem(case)
    tensors, options = arguments(problem, device)
    flashnorm.fused_qk_rmsnorm_rope(**tensors, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = flashnorm.fused_qk_rmsnorm_rope(**tensors, **options, enable_pdl=pdl)
    if not case.rotary:
        flashnorm.fused_qk_rmsnorm_rope(**tensors, **(options | {"base": 77.0}))
    tensors["qkv"].copy_(problem.x.flip(0))
    graph.replay()
    problem.x = problem.x.flip(0)
    compare(made, problem)


@pytest.mark.gpu
def test_two_parameter_sets_on_two_streams(device: torch.device) -> None:
    problems = [Problem(Case()), Problem(Case(channels=(20, 20, 24), yarn=True))]
    calls = [arguments(problem, device) for problem in problems]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    made: list[Any] = [[], []]
    torch.cuda.synchronize()
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                made[i].append(flashnorm.fused_qk_rmsnorm_rope(**calls[i][0], **calls[i][1]))
    torch.cuda.synchronize()
    for problem, results in zip(problems, made, strict=True):
        for result in results:
            compare(result, problem)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [12, 24, 40])
@pytest.mark.parametrize("coded", [False, True])
def test_shapes_of_video_models(heads: int, coded: bool, device: torch.device) -> None:
    """The CPU's bits, over a grid that fills the GPU several times."""
    case = Case((heads,) * 3, 128, (44, 42, 42), (3, 30, 52), coded=coded)
    problem = Problem(case, (1, 4680))
    for mine, want in zip(problem.run("cuda", device), problem.run("cpu"), strict=True):
        assert_same_bits(mine, want)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_to_the_31_elements(device: torch.device) -> None:
    """Addresses of the last tokens are 64 bits wide, of the input and of each result."""
    case = Case((24, 24, 24), 128, (44, 42, 42), (1, 1, 1), scope="none")
    tokens = 2**31 // case.width + 2
    x = torch.zeros(tokens, case.width, dtype=torch.bfloat16, device=device)
    x[-2:] = 3.0
    q, k, v = flashnorm.fused_qk_rmsnorm_rope(x, None, None, **Problem(case).options())
    for part in (q, k, v):
        assert bool((part[-2:] == 3.0).all()) and not bool(part[-3].any())
