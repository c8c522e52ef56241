"""Operators with gates under compilers, fakes, autograd, warm calls and CUDA graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flashnorm
from flashnorm import functional
from flashnorm.core.op import ALL
from tests import gatecombos
from tests.gatecombos import COMBOS, DIT, GATE, MIX, MIXES, NEXT, USUAL, A, B, C, GateCombo, of_shape
from tests.gatekit import FUNCTIONS, GateCall, GateProblem
from tests.inputs import gains, rows
from tests.tolerance import Pool, assert_same_bits
from tests.warm_calls import planned

FORMS = (
    *USUAL,
    *[c for c in COMBOS if c.form and c.x == "bf16" and c.number == "value"],
    *[c for c in COMBOS if c.op == GATE and c.x != "bf16"],
    next(c for c in COMBOS if c.op == C and c.residual is None and c.x == "bf16"),
    *[c for c in COMBOS if c.op in MIXES and c.number == "value" and c.x == "bf16"],
)
every_form = pytest.mark.parametrize("combo", FORMS, ids=str)
usual = pytest.mark.parametrize("combo", USUAL, ids=str)


def split(call: GateCall) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A call's keywords: tensors, and what a graph is made for."""
    tensors = {name: value for name, value in call.arguments.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in call.arguments.items() if name not in tensors}


def test_public_names() -> None:
    """Each where users look for it, and the probes beside them."""
    for name in gatecombos.OPS:
        assert getattr(flashnorm, name) is FUNCTIONS[name] and name in flashnorm.__all__
    for name in (MIX, NEXT, GATE):
        assert f"supports_{name}" in flashnorm.__all__ and callable(getattr(flashnorm, f"supports_{name}"))
    assert "rmsnorm_gate" in functional.__all__


NEEDED = inspect.Parameter.empty
_CODES = {"epsilon": 1e-6, "use_nvfp4": False, "use_mxfp8": False, "global_scaling_factor": None}
_CODES |= dict.fromkeys(("input_global_scaling_factor", "residual_out", "norm_out", "sf_out"))
_OURS = {"return_scales": False, "enable_pdl": None, "numerics": "flashinfer"}
_CENTER = {"next_gain_center": 0.0, "residual_out": None, "ffn_input": None}
# FlashInfer's parameters that may be positional, those that may not, and what is added.
SIGNATURES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    A: (dict.fromkeys(("input", "residual", "gate", "gamma", "beta"), NEEDED), {"gate_bias": None, **_CODES}, _OURS),
    B: (
        dict.fromkeys(("input", "residual", "gate", "scale", "shift"), NEEDED),
        {**dict.fromkeys(("gate_bias", "scale_bias", "shift_bias")), **_CODES},
        _OURS,
    ),
    C: (
        dict.fromkeys(("input", "scale", "shift"), NEEDED),
        {**dict.fromkeys(("residual", "scale_bias", "shift_bias")), **_CODES},
        _OURS,
    ),
    MIX: (
        dict.fromkeys(("branch", "residual", "weight", "alpha", "beta"), NEEDED)
        | {"eps": 1e-6, "gain_center": 0.0, "out": None},
        {"enable_pdl": True},
        {"numerics": "flashinfer"},
    ),
    NEXT: (
        dict.fromkeys(("branch", "residual", "next_weight", "alpha", "beta"), NEEDED)
        | {"post_eps": 1e-6, "next_eps": 1e-6, **_CENTER},
        {"post_weight": None, "post_gain_center": 0.0, "enable_pdl": True},
        {"numerics": "flashinfer"},
    ),
    GATE: (
        {"input": NEEDED, "gate": NEEDED, "eps": 1e-5},
        {"enable_pdl": True},
        {
            "weight": None, "group_size": None, "activation": "sigmoid", "norm_before_gate": True,
            "numerics": "flashinfer",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", gatecombos.OPS)
def test_signature_and_docstring(op: str) -> None:
    """FlashInfer's names, order and defaults; what is added is keyword-only. Formula first, then every parameter."""
    first, keywords, added = SIGNATURES[op]
    found = inspect.signature(getattr(flashnorm, op)).parameters.values()
    assert {p.name: p.default for p in found if p.kind is p.POSITIONAL_OR_KEYWORD} == first
    assert [p.name for p in found][: len(first)] == list(first)
    assert {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY} == keywords | added
    text = inspect.getdoc(getattr(flashnorm, op)) or ""
    assert ".. math::" in text and "Args:" in text and "Raises:" in text
    rest = inspect.getdoc(getattr(flashnorm, A)) or "" if f"as in `{A}`" in text else ""
    for p in found:
        assert f"{p.name}:" in text + rest or f"{p.name}," in text + rest, p.name


# ------------------------------------------------------------------ compilers
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@every_form
def test_fullgraph_compile_is_bit_equal_with_one_graph_for_all_rows(
    combo: GateCombo, backend: str, device: torch.device
) -> None:
    torch._dynamo.reset()
    graphs, dim = 0, 1 if combo.op in DIT else 0

    def counted(gm: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    def step(tensors: dict[str, torch.Tensor]) -> Any:
        return FUNCTIONS[combo.op](**tensors, **options)

    compiled = torch.compile(step, backend=counted, fullgraph=True)
    for count in (4, 7, 2, 33):
        shape = (1, count, 128) if combo.op in DIT else (count, 128)
        problem = GateProblem(combo, shape, device)
        want, call = problem.run(None), problem.prepare()
        tensors, options = split(call)
        for tensor in tensors.values():
            if tuple(tensor.shape) == shape:
                torch._dynamo.mark_dynamic(tensor, dim)
        for name, tensor in call.outcome(compiled(tensors), f"{combo}, compiled").items():
            assert_same_bits(tensor, want[name], f"{name}, {count} rows")
    assert graphs == 1


@pytest.mark.parametrize("combo", [c for c in FORMS if c.form], ids=str)
def test_batches_under_a_compiler(combo: GateCombo, device: torch.device) -> None:
    """Calls for each batch, or one for all: unrolled, with the same bits."""
    torch._dynamo.reset()
    for shape in ((3, 5, 128), (2, 128, 64)):
        problem = GateProblem(combo, shape, device)
        want, call = problem.run(None), problem.prepare()
        compiled = torch.compile(FUNCTIONS[combo.op], backend="aot_eager", fullgraph=True)
        for name, tensor in call.outcome(compiled(**call.arguments), str(combo)).items():
            assert_same_bits(tensor, want[name], f"{name}, {shape}")


def test_inductor_with_a_graph_around(device: torch.device) -> None:
    """What a graph computes goes in, and comes out into what follows; the stream is updated in place."""
    problem = GateProblem(GateCombo(NEXT, residual="f32", vec="f32", bias="bf16"), (5, 96), device)
    given, options = split(problem.prepare())
    gate = rows((5, 96), torch.bfloat16, "gate").to(device)

    def step(branch: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, ...]:
        more = {**given, **options, "branch": branch * 2, "residual": stream, "residual_out": stream}
        stored, normed = flashnorm.gated_residual_next_rmsnorm(**more)
        normed = normed + 1
        flashnorm.rmsnorm_sigmoid_gate(normed, gate)
        return stored * 2, normed

    torch._dynamo.reset()
    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        stream = given["residual"].clone()
        results.append((*function(given["branch"], stream), stream))
    for name, want, got in zip(("sum", "norm", "stream"), *results, strict=True):
        assert_same_bits(got, want, name)


def test_errors_keep_their_text_under_fullgraph(device: torch.device) -> None:
    x, vector = torch.randn(2, 5, 96, device=device).bfloat16(), torch.randn(2, 95, device=device)
    good, stream = torch.randn(96, device=device), torch.randn(2, 5, 96, device=device)
    cases: dict[str, Callable[[], Any]] = {
        rf"{C}: scale must have shape \(96,\)": lambda: FUNCTIONS[C](x, vector, good),
        rf"{A}: input must have shape \[B, R, H\]": lambda: FUNCTIONS[A](x[0], x[0], good, good, good),
        rf"{MIX}: beta must have shape \(96,\)": lambda: FUNCTIONS[MIX](x, stream, None, 1.0, vector[0]),
        f"{GATE}: group_size must be a positive divisor": lambda: FUNCTIONS[GATE](x, x + 1, group_size=7),
        f"{GATE}: gate is input, and one of them is written": lambda: FUNCTIONS[GATE](x, x),
    }
    for text, call in cases.items():
        torch._dynamo.reset()
        with pytest.raises(Exception, match=text):
            torch.compile(call, backend="eager", fullgraph=True)()


# ------------------------------------------------------------------ fakes
@every_form
def test_fake_tensors_have_the_right_shapes(combo: GateCombo) -> None:
    problem = GateProblem(combo, of_shape(combo, 6, 128))
    with flashnorm.backend("torch"):
        call = problem.prepare()
        want = call.left(FUNCTIONS[combo.op](**call.arguments))
    tensors, options = split(problem.prepare())
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
        fake = GateCall(problem, {}, {**fakes, **options}).left(FUNCTIONS[combo.op](**fakes, **options))
    for name, tensor in want.items():
        assert fake[name].shape == tensor.shape and fake[name].dtype == tensor.dtype, name
        assert fake[name].stride() == tensor.stride(), name


@every_form
def test_meta_tensors_never_reach_a_kernel(combo: GateCombo, device: torch.device) -> None:
    problem = GateProblem(combo, of_shape(combo, 6, 128), device)
    with flashnorm.backend("torch"):
        problem.prepare()()  # warm
        tensors, options = split(problem.prepare())
        tensors = {name: tensor.to("meta") for name, tensor in tensors.items()}
        result = FUNCTIONS[combo.op](**tensors, **options)
    shapes = {"input": (problem.shape, None), **problem.canonical_shapes()}
    for name, tensor in GateCall(problem, {}, {**tensors, **options}).left(result).items():
        assert tensor.device.type == "meta" and tensor.shape == shapes[name][0], name


# ------------------------------------------------------------------ autograd
@usual
def test_a_gradient_is_never_lost(combo: GateCombo, device: torch.device) -> None:
    problem = GateProblem(combo, of_shape(combo, 6, 128), device)
    with flashnorm.backend("torch"):
        problem.prepare()()  # warm: the fast path must refuse as well
        for name in problem.tensors:
            call = problem.prepare()
            call.arguments[name] = call.arguments[name].clone().requires_grad_(True)
            with pytest.raises(RuntimeError, match=f"{name} requires grad, but this operator records no gradient"):
                FUNCTIONS[combo.op](**call.arguments)
            assert all(g.unchanged() for n, g in call.guards.items() if n != name)


@pytest.mark.parametrize("warm", [False, True])
@every_form
def test_writes_are_seen_by_autograd(combo: GateCombo, warm: bool, device: torch.device) -> None:
    """Whatever is written counts at least one version more, and nothing else does."""
    for op in ALL.values():
        op.forget()
    call = GateProblem(combo, of_shape(combo, 6, 128), device).prepare("contiguous")
    tensors, _ = split(call)
    with flashnorm.backend("torch"):
        if warm:
            FUNCTIONS[combo.op](**call.arguments)
        before = {name: tensor._version for name, tensor in tensors.items()}
        FUNCTIONS[combo.op](**call.arguments)
    for name, tensor in tensors.items():
        assert (tensor._version > before[name]) == (name in combo.written), name


@usual
def test_modes_of_torch_change_nothing(combo: GateCombo, device: torch.device) -> None:
    """Inference mode, parameters as vectors, autocast, a profiler, which sees the operator."""
    problem = GateProblem(combo, of_shape(combo, 6, 128), device)
    with flashnorm.backend("torch"):
        want = problem.run(None)
        for mode in (torch.no_grad, torch.inference_mode):
            for _ in range(2):
                with mode():
                    call = problem.prepare()
                    for name in ("gamma", "beta", "weight", "next_weight", "alpha", "scale_bias"):
                        if isinstance(call.arguments.get(name), torch.Tensor):
                            call.arguments[name] = torch.nn.Parameter(call.arguments[name])
                    for name, tensor in call().items():
                        assert_same_bits(tensor, want[name], f"{mode}: {name}")
        with torch.autocast(device.type, dtype=torch.bfloat16):
            for name, tensor in problem.run(None).items():
                assert_same_bits(tensor, want[name], f"autocast: {name}")
        call = problem.prepare()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            FUNCTIONS[combo.op](**call.arguments)
        assert any(event.key == f"flashnorm::{combo.op}" for event in profile.key_averages())


# ------------------------------------------------------------------ warm calls
@pytest.mark.parametrize("out", ["none", "contiguous"])
@every_form
def test_many_calls_are_planned_once(combo: GateCombo, out: str, kind: str, device: torch.device) -> None:
    """With results given or not; other rows, vectors, numbers and another eps of the same kind change nothing."""
    problems = [GateProblem(combo, of_shape(combo, 5, 128), device, seed=seed) for seed in range(3)]
    want = [problem.run(None) for problem in problems]
    for op in ALL.values():
        op.forget()
    calls = [problem.prepare(out) for problem in problems]
    function = FUNCTIONS[combo.op]
    assert planned(lambda: function(**calls[0].arguments)) == 1
    names = [n for n in ("eps", "epsilon", "post_eps", "gain_center", "post_gain_center") if n in calls[0].arguments]

    def again() -> None:
        for i in range(60):
            function(**{**calls[i % 3].arguments, **dict.fromkeys(names, 1e-6 * (1 + i % 2))})

    fixed = combo.op in MIXES and combo.bias is None  # a center that no kernel takes belongs to the plan
    assert planned(again) == 0 if not fixed else planned(again) <= 2
    for problem, right in zip(problems, want, strict=True):
        for _ in range(2):
            for name, tensor in problem.run(None, out).items():
                assert_same_bits(tensor, right[name], name)


@usual
def test_what_differs_is_planned_anew(combo: GateCombo, kind: str, device: torch.device) -> None:
    """Rows of another length and as many elements, another layout, another dtype of a vector."""
    problem = GateProblem(combo, of_shape(combo, 4, 256), device)
    problem.run(None)
    for other in (
        GateProblem(combo, of_shape(combo, 8, 128), device),
        GateProblem(combo, problem.shape, device, layout="half"),
    ):
        call = other.prepare()
        assert planned(lambda call=call: FUNCTIONS[combo.op](**call.arguments)) == 1  # type: ignore[misc]
        other.accuracy(other.run(None), Pool(combo.numerics), other.what)
    call = problem.prepare()
    name = {GATE: "gate"}.get(combo.op, "beta" if "beta" in call.arguments else "scale")
    call.arguments[name] = gains(tuple(call.arguments[name].shape), torch.float16).to(device)
    assert planned(lambda: FUNCTIONS[combo.op](**call.arguments)) == 1


# ------------------------------------------------------------------ CUDA graphs
@pytest.mark.gpu
@every_form
def test_captured_without_a_copy_or_an_allocation(combo: GateCombo, exact_route: str, device: torch.device) -> None:
    if exact_route == "cute" and combo.op in DIT:
        pytest.skip("the cuda route serves it whatever is forced")
    problem = GateProblem(combo, of_shape(combo, 6, 512), device)
    want, call = problem.run(exact_route), problem.prepare("contiguous")
    kept = {name: value.clone() for name, value in call.arguments.items() if isinstance(value, torch.Tensor)}
    function = FUNCTIONS[combo.op]
    with flashnorm.backend(exact_route):
        function(**call.arguments)  # warm
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            result = function(**call.arguments)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "allocated in capture"
        for _ in range(2):
            for name, value in kept.items():
                call.arguments[name].copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            for name, tensor in call.outcome(result, f"{combo} replayed").items():
                assert_same_bits(tensor, want[name], name)
