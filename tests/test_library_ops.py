"""torch.library, for every operator: opcheck, fullgraph compile, fakes, gradients, version counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flashnorm
from flashnorm.core.op import ALL, OPS, Op
from tests import gatecombos
from tests.buffers import padded
from tests.combos import BLOCKED, COMBOS, DYNAMIC, FP4, MXFP8, SILU, STATIC, USUAL, Combo
from tests.problem import Call, Problem
from tests.refusals import CODES, SIDES
from tests.tolerance import assert_same_bits

M, H = 4, 128
every_combo = pytest.mark.parametrize("combo", USUAL, ids=str)
ROWS = [op for op in ALL.values() if op.by_rows]  # what is none has tests of its own
every_registered = pytest.mark.parametrize("op", ROWS, ids=lambda op: op.name)
# A residual, the rounded norm and scales in columns as well, and scales that are tensors.
MORE = (
    next(c for c in COMBOS if c.op == DYNAMIC and c.x == "bf16" and c.residual == "bf16" and c.side),
    next(c for c in COMBOS if c.op == "rmsnorm" and c.index and c.x == "bf16"),
    next(c for c in COMBOS if c.op == "rmsnorm" and c.x == "i8" and c.out == "bf16"),
    next(c for c in COMBOS if c.op == FP4[0] and c.x == "bf16" and c.form == "ue8m0"),
    *[c for c in COMBOS if c.op == SILU and c.x == "bf16" and c.out],
)
every_form = pytest.mark.parametrize("combo", (*USUAL, *MORE), ids=str)
VECTORS = ("gain", "alpha", "beta", "next_weight", "gate_bias", "mod_scale", "mod_scale_bias", "shift", "shift_bias")
USUAL_FP4 = next(c for c in USUAL if c.op == FP4[0])


# ------------------------------------------------------------------ the registered operators
def first_options(op: Op) -> dict[str, Any]:
    return {name: next(iter(values.values())) for name, values in op.options.items()}


def registered(op: Op, device: torch.device, without: bool) -> tuple[Any, ...]:
    """Arguments of a registered operator: bytes for 8-bit floating-point tensors, and their dtypes as words.

    Args:
        without: leave out what may be left out.
    """
    layer = "layernorm" in op.name
    dynamic = op.name.endswith("dynamic_quant")
    store = op.program_of([None] * len(op.operands), first_options(op)).store
    made = {
        "x": torch.randn(M, H),
        "residual": torch.randn(M, H),
        "h": torch.empty(M, H),
        "normed_out": torch.empty(M, H),
        "out": torch.empty(M, H),
        "weight": torch.rand(H) + 0.5,
        "bias": torch.rand(H) + 0.5,
        "gate": torch.randn(M, H) if "rmsnorm" in op.name else torch.rand(H),
        **dict.fromkeys(("residual_out", "ffn_input"), torch.empty(M, H)),
        **{name: torch.rand(H) + 0.5 for name in VECTORS},
    }
    given: list[torch.Tensor | None] = []
    words = []
    for i, operand in enumerate(op.operands):
        name = operand.name
        if name in op.optional and (without or (dynamic and name == "scale_ub") or name in ("scale", "row_index")):
            given.append(None)
        elif operand.kind == "per_row" and operand.mode == "out":
            given.append(torch.empty(M))
        elif operand.kind == "swizzled":
            given.append(torch.zeros(128 * store.columns(H, "swizzled"), dtype=torch.uint8))
        elif operand.kind == "blocks" and operand.raw:
            given.append(torch.zeros(M, store.columns(H), dtype=torch.uint8))
        elif operand.kind == "blocks":
            given.append(torch.empty(M, 1) if dynamic else torch.empty(H // 128, padded(M)))
        elif operand.name in ("global_scale", "input_factor"):
            given.append(None if without else torch.full((1,), 3.0))
        elif operand.kind == "pairs":
            given.append(torch.zeros(M, H // 2, dtype=torch.uint8))
        elif name == "input_scale":
            given.append(None if without else torch.rand(M, 1) + 0.1)
        elif i in op.encoded:
            given.append(torch.zeros(M, H, dtype=torch.uint8))
        else:
            dtype = torch.float32 if layer and name in ("weight", "bias") else torch.bfloat16
            rows_int8 = name == "x" and op.name.endswith("_rows") and not without
            given.append(made[name].to(torch.int8 if rows_int8 else dtype, copy=True))
        if i in op.encoded:  # the first dtype that is none of the bytes' own
            words.append(next(d for d in operand.dtypes if d != "uint8"))
    scalars = {"eps": 1e-6, "scale_value": 0.5, "scale_ub_value": 3e38, "global_scale_value": 1.0, "alpha_value": 0.5}
    scalars |= {"center": 1.0, "next_eps": 1e-5, "next_center": 1.0, "input_factor_value": 0.5}
    return (
        *(None if t is None else t.to(device) for t in given),
        *(scalars[name] for name in op.scalars),
        *first_options(op).values(),
        True,
        *words,
    )


@every_registered
def test_opcheck(op: Op, device: torch.device) -> None:
    torch.library.opcheck(op.overload, registered(op, device, without=False))


@pytest.mark.cpu_only
@pytest.mark.parametrize("op", [op for op in ROWS if op.optional], ids=lambda op: op.name)
def test_opcheck_without_what_may_be_missing(op: Op, device: torch.device) -> None:
    """The dispatcher's side alone is asked here: the kernels of this form are nobody's usual ones."""
    with flashnorm.backend("torch"):
        torch.library.opcheck(op.overload, registered(op, device, without=True))


@every_registered
def test_schema_marks_what_is_written(op: Op) -> None:
    schema = op.overload._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {o.name for o in op.operands if o.written}
    assert not any(a.has_default_value() for a in schema.arguments)


def test_every_public_function_is_an_operator() -> None:
    rows = {name for name, op in OPS.items() if op.by_rows}
    sums = {"add_rmsnorm", "add_layernorm"}  # new tensors: tests/test_gradients.py has them
    assert rows == {combo.op for combo in COMBOS} | set(gatecombos.OPS) | sums
    assert all(callable(getattr(flashnorm, name)) and name in flashnorm.__all__ for name in OPS)


# ------------------------------------------------------------------ compilers
def split(call: Call) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A call's keywords: tensors, and what a graph is made for."""
    tensors = {name: value for name, value in call.arguments.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in call.arguments.items() if name not in tensors}


def stepper(op: str, options: dict[str, Any]) -> Callable[..., Any]:
    def step(tensors: dict[str, torch.Tensor]) -> Any:
        return getattr(flashnorm, op)(**tensors, **options)

    return step


def mark(tensors: dict[str, torch.Tensor]) -> None:
    """The number of rows may change; block_scale has it in its last dimension."""
    for name, tensor in tensors.items():
        if name == "block_scale":
            torch._dynamo.mark_dynamic(tensor, 1)
        elif tensor.dim() > 1 or name == "row_index":
            torch._dynamo.mark_dynamic(tensor, 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@every_form
def test_fullgraph_compile_is_bit_equal_with_one_graph_for_all_m(
    combo: Combo, backend: str, device: torch.device
) -> None:
    torch._dynamo.reset()
    graphs = 0

    def counted(gm: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    step = None
    for m in (4, 7, 2, 33):
        problem = Problem(combo, (m, H), device)
        want, call = problem.run(None), problem.prepare()
        tensors, options = split(call)
        mark(tensors)
        step = step or torch.compile(stepper(combo.op, options), backend=counted, fullgraph=True)
        got = call.outcome(step(tensors), f"{combo}, compiled, M = {m}")
        for name in ("out", "residual", "rstd", "scale", "normed_out"):
            tensor, right = getattr(got, name), getattr(want, name)
            assert (tensor is None) == (right is None)
            if tensor is not None:
                assert_same_bits(tensor, right, f"{name}, M = {m}")
    assert graphs == 1


@pytest.mark.parametrize("combo", [*[c for c in USUAL if c.op in STATIC][:2], USUAL_FP4], ids=str)
def test_a_scale_that_is_a_tensor_does_not_recompile(combo: Combo, device: torch.device) -> None:
    torch._dynamo.reset()
    graphs = 0

    def counted(gm: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return gm.forward

    step = None
    for scale in (0.5, 0.25, 0.1):
        problem = Problem(combo, (M, H), device, scale=scale)
        want, call = problem.run(None), problem.prepare()
        call.arguments["global_scale" if combo.op in FP4 else "scale"] = torch.tensor([scale], device=device)
        tensors, options = split(call)
        step = step or torch.compile(stepper(combo.op, options), backend=counted, fullgraph=True)
        assert_same_bits(call.outcome(step(tensors), f"scale {scale}").out, want.out, f"scale {scale}")
    assert graphs == 1


@pytest.mark.parametrize("combo", [c for c in USUAL if c.op in (BLOCKED, MXFP8[1])] + list(MORE[:1]), ids=str)
def test_inductor_with_a_graph_around(combo: Combo, device: torch.device) -> None:
    """Codes made from what the graph computes, scales used by what follows, the residual updated."""
    problem = Problem(combo, (5, 256), device)
    calls = [problem.prepare() for _ in range(2)]

    def step(tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> Any:
        x = tensors["input"] * 2
        result = getattr(flashnorm, combo.op)(**{**tensors, "input": x}, **options)
        out, scale = result if result is not None else (tensors["out"], tensors["block_scale"])
        return out.view(torch.uint8), scale * 2, tensors["residual"] + 1

    torch._dynamo.reset()
    results = []
    for call, function in zip(calls, (step, torch.compile(step, fullgraph=True)), strict=True):
        tensors, options = split(call)
        results.append((*function(tensors, options), *(tensors[n] for n in ("residual", "normed_out") if n in tensors)))
    for name, want, got in zip(("codes", "scales", "sum", "residual", "normed_out"), *results, strict=False):
        assert_same_bits(got.contiguous(), want.contiguous(), name)


def test_errors_keep_their_text_under_fullgraph(device: torch.device) -> None:
    x, weight, bad = (torch.randn(*shape, device=device).bfloat16() for shape in ((4, 128), (128,), (64,)))
    out = torch.zeros(4, 128, device=device).to(torch.float8_e4m3fn)
    cases = {
        r"layernorm: gemma must have shape \(128,\), got \(64,\)": lambda: flashnorm.layernorm(x, bad, None),
        "rmsnorm_quant: scale must be finite and > 0": lambda: flashnorm.rmsnorm_quant(out, x, weight, -1.0),
        "rmsnorm_dynamic_quant: granularity must be": lambda: flashnorm.rmsnorm_dynamic_quant(x, weight, granularity=3),
        "rmsnorm_fp4quant: global_scale goes with": lambda: flashnorm.rmsnorm_fp4quant(
            x, weight, block_size=32, global_scale=2.0
        ),
        "rmsnorm_mxfp8_quant: block_scale must be contig": lambda: flashnorm.rmsnorm_mxfp8_quant(
            x, weight, block_scale=out.view(torch.uint8)[:, :127], is_sf_swizzled_layout=True
        ),
        r"fused_rmsnorm_silu: out must have shape \(4, 64\)": lambda: flashnorm.fused_rmsnorm_silu(
            x, weight, out=out.view(torch.uint8)
        ),
    }
    for text, call in cases.items():
        torch._dynamo.reset()
        with pytest.raises(Exception, match=text):
            torch.compile(call, backend="eager", fullgraph=True)()


def test_export_of_codes_and_scales(device: torch.device) -> None:
    class Quantise(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, scale = flashnorm.rmsnorm_dynamic_quant(x, None, granularity=128)
            return out.view(torch.uint8), scale

    x = torch.randn(6, 256, device=device).bfloat16()
    program = torch.export.export(Quantise(), (x,), dynamic_shapes=({0: torch.export.Dim("m", min=2)},))
    y = torch.randn(9, 256, device=device).bfloat16()
    for got, want in zip(program.module()(y), Quantise()(y), strict=True):
        assert torch.equal(got, want)


def test_export_of_tiles(device: torch.device) -> None:
    """How many tiles there are follows the number of rows."""

    class Quantise(torch.nn.Module):
        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
            codes, scale = flashnorm.add_rmsnorm_fp4quant(x, residual, None, is_sf_swizzled_layout=True)
            eight, power = flashnorm.rmsnorm_mxfp8_quant(x, None, is_sf_swizzled_layout=True)
            active = flashnorm.fused_rmsnorm_silu(x, None)
            return codes.view(torch.uint8), scale.view(torch.uint8), eight.view(torch.uint8), power, residual, active

    def inputs(m: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(m, 96, device=device).bfloat16()
        return x, x.flip(0)

    rows = {0: torch.export.Dim("m", min=2)}
    with flashnorm.backend("torch"):
        program = torch.export.export(Quantise(), inputs(6), dynamic_shapes=(rows, rows))
        for m in (9, 128, 300):
            given = inputs(m)
            left = program.module()(*(t.clone() for t in given))
            for got, want in zip(left, Quantise()(*(t.clone() for t in given)), strict=True):
                assert torch.equal(got, want)


# ------------------------------------------------------------------ fakes
@every_form
def test_fake_tensors_have_the_right_shapes(combo: Combo) -> None:
    problem = Problem(combo, (3, 5, H))
    call = problem.prepare()
    want = call.left(getattr(flashnorm, combo.op)(**call.arguments))
    tensors, options = split(problem.prepare())
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
        result = getattr(flashnorm, combo.op)(**fakes, **options)
    fake = Call(problem, {}, {**fakes, **options}).left(result)
    for name, tensor in want.items():
        assert fake[name].shape == tensor.shape and fake[name].dtype == tensor.dtype, name
        assert fake[name].stride() == tensor.stride(), name


@every_form
def test_meta_tensors_never_reach_a_kernel(combo: Combo, device: torch.device) -> None:
    problem = Problem(combo, (3, H), device)
    problem.run(None)  # warm
    tensors, options = split(problem.prepare())
    tensors = {name: tensor.to("meta") for name, tensor in tensors.items()}
    result = getattr(flashnorm, combo.op)(**tensors, **options)
    left = Call(problem, {}, {**tensors, **options}).left(result)
    assert left["out"].device.type == "meta" and left["out"].shape == (3, H // 2 if combo.out == "e2m1" else H)


# ------------------------------------------------------------------ autograd
@every_form
def test_a_gradient_is_never_lost(combo: Combo, device: torch.device) -> None:
    problem = Problem(combo, (M, H), device)
    problem.run(None)  # warm: the fast path must refuse as well
    for name in ("input", "weight", "gemma", "beta", "residual", "input_scale"):
        call = problem.prepare("none" if combo.in_place else "contiguous")  # with `out`, none is differentiable
        if name not in call.arguments or not call.arguments[name].is_floating_point():
            continue
        leaf = call.arguments[name] = call.arguments[name].clone().requires_grad_(True)
        by = [given for given in ("row_index", "input_scale") if call.arguments.get(given) is not None]
        lost = f"a call with {' and '.join(by)}" if by else "(this operator|a call with out)"
        with pytest.raises(RuntimeError, match=f"requires grad, but {lost} records no gradient"):
            getattr(flashnorm, combo.op)(**call.arguments)
        assert all(guard.unchanged() for guard in call.guards.values())
        if name in ("input", "residual") and (name == "residual" or combo.in_place):
            continue  # a leaf that requires grad is not written in place
        with torch.no_grad():
            call.arguments[name] = leaf.detach()
            getattr(flashnorm, combo.op)(**call.arguments)


@pytest.mark.parametrize("warm", [False, True])
@every_form
def test_writes_are_seen_by_autograd(combo: Combo, warm: bool, device: torch.device) -> None:
    """Whatever is written counts one version more, and nothing else does."""
    for op in ALL.values():
        op.forget()
    problem = Problem(combo, (M, H), device)
    call = problem.prepare("none" if combo.in_place else "contiguous")
    if warm:
        getattr(flashnorm, combo.op)(**call.arguments)
    tensors, _ = split(call)
    before = {name: tensor._version for name, tensor in tensors.items()}
    getattr(flashnorm, combo.op)(**call.arguments)
    written = {"residual", *CODES, *SIDES, "block_scale", "block_scale_unswizzled"}
    written |= {"input"} if combo.in_place else set()
    written |= {"scale"} if combo.op == DYNAMIC else set()
    for name, tensor in tensors.items():
        assert (tensor._version > before[name]) == (name in written), name


@every_combo
def test_inference_mode_and_parameters(combo: Combo, device: torch.device) -> None:
    problem = Problem(combo, (M, H), device)
    want = problem.run(None).out
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(2):
                call = problem.prepare()
                for name in ("weight", "gemma", "beta"):
                    if call.arguments.get(name) is not None:
                        call.arguments[name] = torch.nn.Parameter(call.arguments[name])
                assert_same_bits(call(None).out, want, f"{mode}")


@every_combo
def test_autocast_changes_nothing(combo: Combo, device: torch.device) -> None:
    problem = Problem(combo, (M, H), device)
    want = problem.run(None).out
    with torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16):
        assert_same_bits(problem.run(None).out, want, "under autocast")


@every_combo
def test_a_profiler_sees_the_operator(combo: Combo, device: torch.device) -> None:
    problem = Problem(combo, (M, H), device)
    problem.run(None)
    call = problem.prepare()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        getattr(flashnorm, combo.op)(**call.arguments)
    names = {f"flashnorm::{op.name}" for op in ALL.values() if op.called == combo.op}
    assert any(event.key in names for event in profile.key_averages())
