"""The warm call of every operator: what is planned once is not planned again, and what changed is noticed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import flashnorm
from flashnorm.core.op import ALL
from tests.combos import COMBOS, DYNAMIC, FP4, MXFP8, SCALED, STATIC, USUAL, Combo
from tests.inputs import rows
from tests.judge import check
from tests.problem import Problem
from tests.tolerance import Pool, assert_same_bits
from tests.warm_calls import planned

FORMS = tuple(
    dict.fromkeys(
        (
            *USUAL,
            next(c for c in COMBOS if c.op == DYNAMIC and c.x == "bf16" and c.residual == "bf16" and c.side),
            *[c for c in COMBOS if c.op == DYNAMIC and c.cap],
            next(c for c in COMBOS if c.op == "rmsnorm" and c.index and c.x == "bf16"),
            next(c for c in COMBOS if c.op == "rmsnorm" and c.x == "i8" and c.out == "bf16"),
            next(c for c in COMBOS if c.op == "rmsnorm_quant" and c.index),
            next(c for c in COMBOS if c.op == "layernorm_quant" and c.double and c.x == "bf16"),
            *[c for c in SCALED if c.x == "bf16"],
        )
    )
)
every_form = pytest.mark.parametrize("combo", FORMS, ids=str)
HOW_OFTEN = 200


@pytest.mark.parametrize("out", ["none", "contiguous"])
@every_form
def test_many_calls_are_planned_once(combo: Combo, out: str, kind: str, device: torch.device) -> None:
    """With results given or not; other rows, other weights and another eps of the same kind change nothing."""
    function = getattr(flashnorm, combo.op)
    calls = [Problem(combo, (4, 128), device, seed=seed).prepare(out) for seed in range(3)]
    assert planned(lambda: function(**calls[0].arguments)) == 1

    def again() -> None:
        for i in range(HOW_OFTEN):
            function(**{**calls[i % 3].arguments, "eps": 1e-6 * (1 + i % 2)})

    assert planned(again) == 0


@every_form
def test_a_warm_call_gives_the_bits_of_a_cold_one(combo: Combo, kind: str, device: torch.device) -> None:
    problems = [Problem(combo, (4, 128), device, seed=seed) for seed in range(3)]
    cold = []
    for problem in problems:
        for op in ALL.values():
            op.forget()
        cold.append(problem.run(None))
    for _ in range(2):
        for problem, want in zip(problems, cold, strict=True):
            got = problem.run(None)
            for name in ("out", "residual", "rstd", "scale", "normed_out"):
                if getattr(want, name) is not None:
                    assert_same_bits(getattr(got, name), getattr(want, name), name)


@every_form
def test_what_differs_is_planned_anew(combo: Combo, kind: str, device: torch.device) -> None:
    """Another number of rows of as many elements, another mode, another layout."""
    function = getattr(flashnorm, combo.op)
    Problem(combo, (4, 256), device).run(None)
    for other in (Problem(combo, (8, 128), device), Problem(combo, (2, 512), device)):
        call = other.prepare()
        assert planned(lambda call=call: function(**call.arguments)) == 1  # type: ignore[misc]
        if device.type == "cpu":
            other.check_bits(other.run("cpu")) if not _missing() else check(other, "torch", Pool(combo.numerics))
    strided = Problem(combo, (4, 256), device, layout="half").prepare()
    assert planned(lambda: function(**strided.arguments)) == 1


def _missing() -> str:
    from tests.conftest import unserved

    return unserved("cpu", "cpu")


@pytest.mark.parametrize("combo", [c for c in USUAL if c.op in STATIC], ids=str)
def test_another_scale_by_value_is_no_other_plan(combo: Combo, kind: str, device: torch.device) -> None:
    """Every number, and every CPU tensor: the value goes with the launch."""
    problem = Problem(combo, (4, 128), device)
    function = getattr(flashnorm, combo.op)
    problem.run(None)

    def again() -> None:
        for scale in (0.5, 0.25, 2, np.float32(0.1), np.float64(0.3), torch.tensor(0.5), torch.tensor([3.0])):
            for _ in range(3):
                call = problem.prepare()
                call.arguments["scale"] = scale
                function(**call.arguments)

    assert planned(again) <= 4  # CPU tensors may be looked at where the plans are made; numbers never


@pytest.mark.gpu
@pytest.mark.parametrize("combo", [c for c in USUAL if c.op in STATIC], ids=str)
def test_another_scale_on_the_device_is_no_other_plan(combo: Combo, kind: str, device: torch.device) -> None:
    problem = Problem(combo, (4, 128), device)
    function = getattr(flashnorm, combo.op)
    scales = [torch.full((1,), value, device=device) for value in (0.5, 0.25, 3.0)]

    def again(turns: int) -> None:
        for i in range(turns):
            call = problem.prepare()
            call.arguments["scale"] = scales[i % 3]
            function(**call.arguments)

    assert planned(lambda: again(1)) == 1
    assert planned(lambda: again(60)) == 0


def test_options_of_the_dynamic_operator_are_told_apart(kind: str, device: torch.device) -> None:
    """The same tensors, other words: each has a plan of its own, and none serves for another."""
    x = rows((4, 256), torch.bfloat16).to(device)
    words: list[dict[str, Any]] = [
        {},
        {"dtype": torch.float8_e5m2},
        {"dtype": torch.int8},
        {"granularity": 128},
        {"scale_format": "ue8m0"},
        {"granularity": 128, "scale_layout": "column"},
        {"granularity": 128, "scale_layout": "column", "scale_format": "ue8m0_packed"},
        {"scale_ub": 0.5},
        {"numerics": "hf-gemma"},
    ]
    with flashnorm.backend("torch"):
        first = [flashnorm.rmsnorm_dynamic_quant(x, None, **word) for word in words]
        for _ in range(2):
            for word, want in zip(words, first, strict=True):
                got = flashnorm.rmsnorm_dynamic_quant(x, None, **word)
                for a, b in zip(got, want, strict=True):
                    assert a.dtype == b.dtype and a.stride() == b.stride()
                    assert_same_bits(a.contiguous(), b.contiguous(), str(word))


@pytest.mark.parametrize("op", [*FP4, *MXFP8])
def test_options_of_scaled_operators_are_told_apart(op: str, kind: str, device: torch.device) -> None:
    """Also where the outputs are given, of the same size for several options, and by bytes."""
    x = rows((128, 128), torch.bfloat16).to(device)
    words: list[dict[str, Any]] = [{}, {"is_sf_swizzled_layout": True}, {"numerics": "hf-gemma"}]
    if op in FP4:
        words += [{"block_size": 32}, {"block_size": 32, "scale_format": "e4m3"}, {"global_scale": 3.0}]
        words += [{"block_size": 32, "scale_rule": "ocp"}, {"block_size": 32, "is_sf_swizzled_layout": True}]
    else:
        words += [{"scale_rule": "ocp"}, {"scale_rule": "ocp", "is_sf_swizzled_layout": True}]
    words += [{"output_both_sf_layouts": True}, {"y_out": torch.empty_like(x)}] if op == FP4[1] else []
    codes = torch.zeros(128, 64 if op in FP4 else 128, dtype=torch.uint8, device=device)
    names = {"y_fp4": codes} if op in FP4 else {"out": codes.view(torch.float8_e4m3fn)}
    scale = torch.zeros(128, 8, dtype=torch.uint8, device=device)  # rows, or a tile or two: as many bytes

    def made(word: dict[str, Any], given: bool) -> list[torch.Tensor]:
        residual = {"residual": x.flip(0)} if op.startswith("add") else {}
        outs = {**names, "block_scale": scale[:, : 128 // (word.get("block_size", 16 if op in FP4 else 32))]}
        if outs["block_scale"].shape[1] == 4:  # dense
            outs["block_scale"] = scale.view(-1)[:512].view(128, 4)
        left = getattr(flashnorm, op)(x, weight=None, **residual, **word, **(outs if given else {}))
        return [t.view(torch.uint8).reshape(-1).clone() for t in left]

    with flashnorm.backend("torch"):
        first = [made(word, False) for word in words]
        for _ in range(2):
            for word, want in zip(words, first, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(made(word, True), want, strict=True)), word


def test_an_output_of_another_format_is_noticed(kind: str, device: torch.device) -> None:
    x = rows((4, 256), torch.bfloat16).to(device)
    outs = [torch.empty(4, 256, dtype=d, device=device) for d in (torch.float8_e4m3fn, torch.float8_e5m2)]
    with flashnorm.backend("torch"):
        for out in outs:
            flashnorm.rmsnorm_quant(out, x, None, 0.01)
        first = [out.clone() for out in outs]
        for _ in range(3):
            for out, want in zip(outs, first, strict=True):
                out.view(torch.uint8).fill_(0)
                flashnorm.rmsnorm_quant(out, x, None, 0.01)
                assert_same_bits(out, want, str(out.dtype))


def test_index_and_scale_are_looked_at_in_a_warm_call(kind: str, device: torch.device) -> None:
    """The same pool with another index: another dtype, a bad value, another count; another scale for int8 rows."""
    x = rows((5, 128), torch.bfloat16).to(device)
    with flashnorm.backend("torch"):
        for index in ([0, 1], [4, 4], [3, 2, 1], [0]):
            for dtype in (torch.int32, torch.int64):
                chosen = torch.tensor(index, dtype=dtype, device=device)
                for _ in range(2):
                    got = flashnorm.rmsnorm(x, None, row_index=chosen)
                    assert torch.equal(got, flashnorm.rmsnorm(x[chosen.long()], None))
        if device.type == "cpu":
            with pytest.raises(ValueError, match="row_index must be 0 to 4, got 5"):
                flashnorm.rmsnorm(x, None, row_index=torch.tensor([0, 5]))
        codes = rows((5, 128), torch.int8).to(device)
        for scale in (torch.full((1,), 0.5), torch.rand(5, 1), torch.full((1,), 0.25)):
            for _ in range(2):
                got = flashnorm.rmsnorm(codes, None, input_scale=scale.to(device))
                want = flashnorm.rmsnorm(codes.float() * scale.to(device), None)
                assert_same_bits(got, want.to(torch.bfloat16), "int8")


@pytest.mark.parametrize(
    "name", ["rmsnorm_fp4quant", "rmsnorm_mxfp8_quant", "add_rmsnorm_fp4quant", "add_rmsnorm_mxfp8_quant"]
)
def test_a_number_is_no_flag_and_a_fraction_no_size(name: str, kind: str, device: torch.device) -> None:
    """0 equals False, and 16.0 equals 16: neither is taken for it, cold or warm."""
    x, weight = torch.ones(4, 64, device=device), torch.ones(64, device=device)
    tensors = (x, x.clone(), weight) if name.startswith("add_") else (x, weight)
    function = getattr(flashnorm, name)
    wrong = [{"is_sf_swizzled_layout": 0}] + [{"block_size": 16.0}, {"block_size": True}] * ("fp4" in name)
    for _ in range(2):
        for options in wrong:
            with pytest.raises((ValueError, TypeError), match=next(iter(options))):
                function(*tensors, **options)
        function(*tensors)


ONE, MOST = 1.0, torch.finfo(torch.float32).max  # what None stands for, of a scale and of a limit
FP4_32: dict[str, Any] = {"block_size": 32}
DOES_NOT_GO: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    *[
        (FP4[0], FP4_32 | {"is_sf_swizzled_layout": flag}, {"global_scale": ONE}, "global_scale goes with")
        for flag in (False, True)
    ],
    *[
        (FP4[1], FP4_32 | more, {"global_scale": ONE}, "global_scale goes with")
        for more in ({}, {"is_sf_swizzled_layout": True}, {"output_both_sf_layouts": True})
    ],
    (DYNAMIC, {"granularity": 128}, {"scale_ub": MOST}, "scale_ub needs granularity"),
    (DYNAMIC, {"granularity": 128, "residual": torch.ones(4, 128)}, {"scale_ub": MOST}, "scale_ub needs granularity"),
    ("fused_rmsnorm_silu", {}, {"scale": ONE}, "scale goes with an FP8 out"),
    *[
        (f"fused_dit_{name}", {"return_scales": True, "use_mxfp8": True} if coded else {},
         {"global_scaling_factor": ONE}, "global_scaling_factor goes with use_nvfp4")
        for name in ("gate_residual_layernorm_gamma_beta", "residual_layernorm_scale_shift")
        for coded in (False, True)
    ],
]  # fmt: skip


@pytest.mark.parametrize("form", [float, int, torch.tensor], ids=["float", "int", "tensor"])
@pytest.mark.parametrize(("name", "options", "wrong", "text"), DOES_NOT_GO, ids=str)
def test_a_number_that_none_stands_for_is_still_a_number(
    name: str,
    options: dict[str, Any],
    wrong: dict[str, Any],
    text: str,
    form: Callable[[float], Any],
    kind: str,
    device: torch.device,
) -> None:
    """Where it does not go with the rest it is refused, also when such a call without it has just been served."""
    function = getattr(flashnorm, name)
    x = rows((1, 4, 128) if "dit" in name else (4, 128), torch.float32).to(device)
    given: dict[str, Any] = {"input": x, "residual": x.clone()}
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    given = {n: given.get(n, torch.linspace(0.5, 2.0, 128, device=device)) for n in needed}
    given |= {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    wrong = {n: form(value) for n, value in wrong.items()}
    with flashnorm.backend("torch"):
        for _ in range(3):
            with pytest.raises(ValueError, match=text):
                function(**given, **wrong)
            function(**given)
        assert planned(lambda: function(**given)) == 0


@pytest.mark.parametrize(("name", "argument"), [(FP4[0], "global_scale"), (DYNAMIC, "scale_ub")])
def test_a_number_and_none_by_turns(name: str, argument: str, kind: str, device: torch.device) -> None:
    """Each is planned once, and none is what its number is."""
    x = rows((4, 128), torch.bfloat16).to(device)
    function, none = getattr(flashnorm, name), ONE if name == FP4[0] else MOST
    with flashnorm.backend("torch"):
        want = {value: function(x, None, **{argument: value}) for value in (None, none, 0.5)}

        def again() -> None:
            for value in (None, none, 0.5, None, 0.5, none):
                got = function(x, None, **{argument: value})
                assert all(map(torch.equal, map(_bytes, got), map(_bytes, want[value])))

        assert planned(again) == 0
        assert all(map(torch.equal, map(_bytes, want[None]), map(_bytes, want[none])))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
