"""Wrong arguments of `fused_qk_rmsnorm_rope`: each is named before anything is written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashnorm
from tests.qk import Case, Problem

CASE = Case()
TABLE = Case(rotary=32)


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def placed(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """On a device, with elements that share memory sharing it there."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0).to(device).as_strided(tensor.shape, tensor.stride())


def arguments(case: Case = CASE, device: torch.device | str = "cpu") -> dict[str, Any]:
    """A good call, with its results given and poisoned."""
    problem = Problem(case)
    given: dict[str, Any] = {"qkv": problem.x, **problem.weights, **problem.options()}
    if case.rotary:
        given |= {"cos_sin_cache": problem.cache, "positions": problem.positions}
    for name, n in zip(("q_out", "k_out", "v_out"), case.heads, strict=True):
        given[name] = torch.full((*problem.lead, n, case.head_dim), 7.0, dtype=problem.x.dtype)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"qkv": 3}, TypeError, "qkv must be a torch.Tensor, got int"),
    "dtype": (
        {"qkv": zeros(2, 30, 576, dtype=torch.float32)}, ValueError,
        "qkv must have dtype float16 or bfloat16, got float32",
    ),
    "rank": ({"qkv": torch.zeros(17280).bfloat16()}, ValueError, r"qkv must be \[num_tokens, C\] or"),
    "width": (
        {"qkv": zeros(2, 30, 640)}, ValueError,
        r"qkv must have a last dimension of \(4 \+ 2 \+ 3\) \* 64 = 576, got 640",
    ),
    "tokens of a sequence": (
        {"qkv": zeros(2, 29, 576)}, ValueError,
        "ppf \\* pph \\* ppw = 30 tokens a sequence, got 29",
    ),
    "tokens": ({"qkv": zeros(59, 576)}, ValueError, "multiple of ppf \\* pph \\* ppw = 30 tokens, got 59"),
    "head_dim": ({"head_dim": 63}, ValueError, "head_dim must be even, got 63"),
    "wide head": ({"head_dim": 514}, ValueError, "head_dim must be 2 to 512, got 514"),
    "head_dim type": ({"head_dim": 64.0}, TypeError, "head_dim must be an int, got float"),
    "heads": ({"num_heads_k": -1}, ValueError, "num_heads_k must be 0 to 4096, got -1"),
    "heads type": ({"num_heads_v": None}, TypeError, "num_heads_v must be an int, got NoneType"),
    "grid": ({"ppf": 0}, ValueError, "ppf must be 1 to 2097152, got 0"),
    "grid missing": ({"ppw": None}, TypeError, "ppw must be an int, got NoneType"),
    "too fast": ({"base": 1e-7}, ValueError, "base = 1e-07 and factor = 1.0 turn too far in 5 steps"),
    "odd channels": ({"num_frame_channels": 25}, ValueError, "num_frame_channels must be even, got 25"),
    "channels": ({"num_frame_channels": 26}, ValueError, r"must sum to head_dim = 64, got \(26, 20, 20\)"),
    "base": ({"base": 0.0}, ValueError, "base must be finite and > 0, got 0.0"),
    "base type": ({"base": "10"}, TypeError, "base must be a Python number, got str"),
    "factor": ({"factor": math.inf}, ValueError, "factor must be finite and > 0, got inf"),
    "low": ({"low": math.nan}, ValueError, "low must be finite, got nan"),
    "attention": ({"attention_factor": 1.5}, ValueError, "attention_factor must be 1.0 where factor is 1.0, got 1.5"),
    "interleave": ({"interleave": 1}, ValueError, "interleave must be True or False, got 1"),
    "is_qk_norm": ({"is_qk_norm": "no"}, ValueError, "is_qk_norm must be True or False, got 'no'"),
    "output_fp8": ({"output_fp8": 1}, ValueError, "output_fp8 must be True or False, got 1"),
    "scope": ({"norm_scope": "row"}, ValueError, "norm_scope must be one of hidden, head, got 'row'"),
    "eps": ({"eps": -1.0}, ValueError, "eps must be finite and >= 0, got -1.0"),
    "eps type": ({"eps": None}, TypeError, "eps must be a Python number, got NoneType"),
    "unused scale": ({"output_quant_scale": 2.0}, ValueError, "output_quant_scale goes with output_fp8=True, got 2.0"),
    "numerics": ({"numerics": "exact"}, ValueError, "numerics must be one of"),
    "pdl": ({"enable_pdl": 1}, ValueError, "enable_pdl must be None, True or False, got 1"),
    "weight shape": (
        {"q_weight": zeros(64)}, ValueError,
        r"q_weight must have shape \(4, 64\) or \(256,\), got \(64,\)",
    ),
    "weight dtype": ({"k_weight": torch.zeros(128).double()}, ValueError, "k_weight must have dtype"),
    "out shape": ({"q_out": zeros(2, 30, 4, 63)}, ValueError, r"q_out must have shape \(2, 30, 4, 64\), got"),
    "out dtype": (
        {"v_out": zeros(2, 30, 3, 64, dtype=torch.half)}, ValueError,
        "v_out must have dtype bfloat16, got float16",
    ),
    "out overlaps itself": ({"k_out": zeros(2, 30, 1, 64).expand(2, 30, 2, 64)}, ValueError, "k_out is written"),
    "half a table": (
        {"positions": torch.zeros(2, 30).long()}, TypeError,
        "cos_sin_cache and positions come together; cos_sin_cache must be",
    ),
}  # fmt: skip
WRONG_TABLE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "grid too": ({"ppf": 1}, ValueError, "ppf does not go with cos_sin_cache, got 1"),
    "factor too": ({"factor": 2.0}, ValueError, "factor does not go with cos_sin_cache"),
    "columns": (
        {"cos_sin_cache": torch.zeros(11, 66)}, ValueError,
        "an even number of columns, 2 to head_dim = 64, got 66",
    ),
    "odd columns": ({"cos_sin_cache": torch.zeros(11, 31)}, ValueError, "an even number of columns"),
    "rank": (
        {"cos_sin_cache": torch.zeros(11)}, ValueError,
        r"cos_sin_cache must have shape \(P, rotary_dim\), got \(11,\)",
    ),
    "dtype": ({"cos_sin_cache": zeros(11, 32)}, ValueError, "cos_sin_cache must have dtype float32"),
    "positions dtype": ({"positions": torch.zeros(2, 7)}, ValueError, "positions must have dtype int32 or int64"),
    "positions shape": ({"positions": torch.zeros(2, 6).long()}, ValueError, "positions must have shape"),
    "no positions": ({"positions": None}, TypeError, "cos_sin_cache and positions come together; positions must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", [CASE, TABLE], ids=["grid", "table"])
def test_the_call_that_is_made_wrong_is_right(case: Case, route: str, device: torch.device) -> None:
    with flashnorm.backend(route):
        flashnorm.fused_qk_rmsnorm_rope(**arguments(case, device))


@pytest.mark.parametrize(("case", "name"), [*((CASE, n) for n in WRONG), *((TABLE, n) for n in WRONG_TABLE)])
@pytest.mark.parametrize("warm", [False, True])
def test_wrong_arguments(case: Case, name: str, warm: bool, device: torch.device) -> None:
    change, error, text = (WRONG if case == CASE else WRONG_TABLE)[name]
    given = arguments(case, device)
    if warm:
        flashnorm.fused_qk_rmsnorm_rope(**given)
        given = arguments(case, device)
    given |= {k: placed(v, device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(error, match=f"fused_qk_rmsnorm_rope: .*{text}"):
        flashnorm.fused_qk_rmsnorm_rope(**given)
    for out in ("q_out", "k_out", "v_out"):
        assert out in change or bool((given[out] == 7.0).all())


def test_results_apart(device: torch.device) -> None:
    given = arguments(CASE, device)
    given["k_out"] = given["q_out"][..., :2, :]
    with pytest.raises(ValueError, match="k_out overlaps q_out in memory"):
        flashnorm.fused_qk_rmsnorm_rope(**given)
    given = arguments(CASE, device)
    given["v_out"] = given["qkv"].view(2, 30, 9, 64)[:, :, 6:]
    with pytest.raises(ValueError, match="overlaps qkv in memory"):
        flashnorm.fused_qk_rmsnorm_rope(**given)


@pytest.mark.parametrize("lacking", ["num_heads_q", "head_dim"])
def test_lacking_keywords(lacking: str, device: torch.device) -> None:
    given = arguments(CASE, device)
    del given[lacking]
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{lacking}'"):
        flashnorm.fused_qk_rmsnorm_rope(**given)


def test_a_gradient_that_would_be_lost(device: torch.device) -> None:
    given = arguments(CASE, device)
    given["qkv"].requires_grad_()
    with pytest.raises(RuntimeError, match="qkv requires grad"):
        flashnorm.fused_qk_rmsnorm_rope(**given)


def test_the_probe_never_raises(device: torch.device) -> None:
    supported = flashnorm.supports_fused_qk_rmsnorm_rope
    for case, wrong in ((CASE, WRONG), (TABLE, WRONG_TABLE)):
        given = arguments(case, device)
        assert supported(**given)
        overlap = {"k_out": given["q_out"][..., : given["num_heads_k"], :]}
        assert not supported(**given | overlap)
        for name in ("q_out", "k_out", "v_out"):
            del given[name]
        assert supported(**given)
        for name, (change, _, _) in wrong.items():
            assert not supported(**(given | change)), name
    assert not supported(None) and not supported(given["qkv"], 3, unknown=1)


NUMBERS = {"eps": (-1, -1e-6, math.inf, math.nan, "1", None, True), "v_quant_scale": (0.0, -1.0, math.nan, None, "1")}
NUMBERS["output_quant_scale"] = NUMBERS["v_quant_scale"]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("case", [CASE, TABLE], ids=["grid", "table"])
def test_the_probe_says_what_the_operator_does(case: Case, fp8: bool, device: torch.device) -> None:
    """Of numbers, words and flags; results are new."""
    given = {n: v for n, v in arguments(case, device).items() if not n.endswith("_out")} | {"output_fp8": fp8}
    changes: list[dict[str, Any]] = [{name: value} for name, values in NUMBERS.items() for value in values]
    changes += [{"numerics": word} for word in ("foo", None, "hf-llama")] + [{"enable_pdl": 1}, {"enable_pdl": False}]
    changes += [{"v_quant_scale": 2.0}, {"output_quant_scale": 0.5}, {"eps": 0}, {"output_fp8": 1}, {}]
    if case.rotary and device.type == "cpu":
        changes.append({"positions": given["positions"] + 1000})
    for change in changes:
        try:
            with flashnorm.backend("torch"):
                flashnorm.fused_qk_rmsnorm_rope(**(given | change))
        except (TypeError, ValueError):
            served = False
        else:
            served = True
        assert flashnorm.supports_fused_qk_rmsnorm_rope(**(given | change)) == served, change


def test_forcing_cute_means_cuda() -> None:
    from flashnorm.core import dispatch
    from flashnorm.core.device import DeviceFacts
    from flashnorm.ops.qk import QK

    tools = dispatch.Tools(dsl=None, dsl_archs=frozenset({"sm_90a"}), nvcc=None, cxx=None)
    for forced in (None, "cute", "cuda"):
        found = dispatch.choose(QK.name, QK.routes, DeviceFacts("cuda", (9, 0)), tools, forced)
        assert found.route == "cuda" and dict(found.reasons)["cute"] == "this operator has no such route"
