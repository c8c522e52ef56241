"""The dispatcher, for devices that are not here: pure facts in, a route and reasons out."""

from __future__ import annotations

import json

import pytest
import torch

import flashnorm
from flashnorm import __main__ as cli
from flashnorm.core import dispatch, op
from flashnorm.core.device import DeviceFacts

ARCHS = frozenset({"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"})
ALL = dispatch.Tools(dsl=None, dsl_archs=ARCHS, nvcc=None, cxx=None)
BARE = dispatch.Tools(dsl="no DSL", dsl_archs=frozenset(), nvcc="no nvcc", cxx="no compiler")
CPU, H200 = DeviceFacts("cpu"), DeviceFacts("cuda", (9, 0))


def route(device, tools=ALL, forced=None, routes=dispatch.ROUTES, failed=()):
    return dispatch.choose("rmsnorm", routes, device, tools, forced, failed).route


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 0), None),
        ((7, 5), "cuda"),
        ((8, 0), "cute"),
        ((8, 6), "cute"),
        ((8, 9), "cute"),
        ((9, 0), "cute"),
        ((10, 0), "cute"),
        ((10, 3), "cute"),
        ((10, 7), "cuda"),
        ((11, 0), "cute"),
        ((11, 9), "cuda"),
        ((12, 0), "cute"),
        ((12, 1), "cute"),
        ((13, 0), "cuda"),
    ],
)
def test_capability_decides(capability, expected):
    assert route(DeviceFacts("cuda", capability)) == expected


@pytest.mark.parametrize(
    ("device", "tools", "expected"),
    [
        (CPU, ALL, "cpu"),
        (CPU, BARE, "torch"),
        (H200, BARE, None),
        (DeviceFacts("mps"), ALL, "torch"),
        (DeviceFacts("xpu"), ALL, "torch"),
        (DeviceFacts("hip"), ALL, "torch"),
    ],
)
def test_order_of_a_device(device, tools, expected):
    assert route(device, tools) == expected


@pytest.mark.parametrize(
    ("forced", "device", "expected"),
    [
        ("cute", H200, "cute"),
        ("cuda", H200, "cuda"),
        ("torch", H200, "torch"),
        ("cpu", H200, "cute"),  # binds CPU tensors only
        ("cuda", CPU, "cpu"),
        ("cute", CPU, "cpu"),
        ("cpu", CPU, "cpu"),
        ("torch", CPU, "torch"),
        ("cpu", DeviceFacts("mps"), "torch"),
    ],
)
def test_forced_routes_bind_their_own_devices(forced, device, expected):
    assert route(device, forced=forced) == expected


def test_forcing_cute_on_an_operator_of_the_cuda_route_means_cuda():
    explanation = dispatch.choose("layernorm_quant", ("cuda", "cpu", "torch"), H200, ALL, "cute")
    assert explanation.route == "cuda"
    assert dict(explanation.reasons)["cute"] == "this operator has no such route"


def test_a_forced_route_that_cannot_serve_has_no_substitute():
    assert route(H200, BARE, forced="cute") is None


def test_a_failed_build_is_passed_over_with_its_reason():
    explanation = dispatch.choose("rmsnorm", dispatch.ROUTES, H200, ALL, None, (("cute", "failed to build: x"),))
    assert explanation.route == "cuda"
    assert dict(explanation.reasons)["cute"] == "failed to build: x"


def test_every_other_route_has_a_reason():
    for device in (CPU, H200, DeviceFacts("mps"), DeviceFacts("cuda", (10, 7))):
        for forced in (None, *dispatch.ROUTES):
            explanation = dispatch.choose("rmsnorm", dispatch.ROUTES, device, ALL, forced)
            served = {explanation.route} - {None}
            assert served | {r for r, _ in explanation.reasons} == set(dispatch.ROUTES)
            assert all(reason for _, reason in explanation.reasons)


def test_reasons_name_the_device():
    reasons = dict(dispatch.choose("rmsnorm", dispatch.ROUTES, DeviceFacts("cuda", (10, 7)), ALL).reasons)
    assert "sm_107a" in reasons["cute"]
    reasons = dict(dispatch.choose("rmsnorm", dispatch.ROUTES, DeviceFacts("cuda", (7, 0)), ALL).reasons)
    assert "8.0" in reasons["cute"] and "7.0" in reasons["cute"] and "7.5" in reasons["cuda"]


def test_precedence_of_what_is_forced():
    assert dispatch.forced_route(None, False) is None
    assert dispatch.forced_route(None, True) == "cuda"
    assert dispatch.forced_route("torch", True) == "torch"
    with flashnorm.backend("cpu"):
        assert dispatch.forced_route("torch", True) == "cpu"
        with flashnorm.backend("cute"):
            assert dispatch.forced_route("torch", True) == "cute"
        assert dispatch.forced_route("torch", True) == "cpu"
    assert dispatch.forced_route("torch", True) == "torch"


def test_an_unknown_name_raises():
    with pytest.raises(ValueError, match=r"backend must be one of .*got 'triton'"), flashnorm.backend("triton"):
        pass
    with pytest.raises(ValueError, match=r"FLASHNORM_BACKEND must be one of .*got 'gpu'"):
        dispatch.forced_route("gpu", False)


@pytest.mark.parametrize("name", sorted(op.ALL))
def test_explain_is_asked_about_public_functions(name):
    """By the device of their tensors; what stands behind them has no answer of its own."""
    x = torch.ones(2, 64)
    if name in op.OPS:
        assert flashnorm.explain(name, x).route in ("cpu", "torch")
        assert set(dict(flashnorm.explain(name, x).reasons)) >= {"cute", "cuda"}
        assert name in flashnorm.capabilities("cpu")["routes"]
    else:
        with pytest.raises(ValueError, match="op must be one of add_layernorm, add_rmsnorm, add_rmsnorm_fp4quant, "):
            flashnorm.explain(name, x)


def test_an_explanation_is_frozen_and_prints_a_line_a_route():
    explanation = dispatch.choose("rmsnorm", dispatch.ROUTES, H200, ALL)
    assert str(explanation).splitlines()[0] == "rmsnorm: served by cute"
    assert len(str(explanation).splitlines()) == 4
    with pytest.raises(AttributeError):
        explanation.route = "cuda"


def test_explain_is_asked_about_picked_and_widened_rows():
    x, index = torch.ones(4, 64, dtype=torch.int8), torch.tensor([1, 0])
    for options in ({"row_index": index}, {"input_scale": torch.ones(1)}):
        assert flashnorm.explain("rmsnorm", x, None, **options).op == "rmsnorm_rows"
        assert flashnorm.explain("gemma_rmsnorm_quant", x, x, None, 1.0, **options).op == "gemma_rmsnorm_quant_rows"
    assert flashnorm.explain("rmsnorm", x.float(), None).op == "rmsnorm"
    assert flashnorm.explain("add_rmsnorm", x.float(), x.float(), None).op == "add_rmsnorm"


@pytest.mark.parametrize(
    ("words", "dtypes"),
    [
        ("--dtype int8", {"input": "int8", "input_scale": "float32", "weight": "bfloat16", "out": "bfloat16"}),
        (
            "--dtype int8 --weight-dtype none --out-dtype fp16",
            {"input": "int8", "input_scale": "float32", "out": "float16"},
        ),
        ("--row-index int32", {"input": "bfloat16", "row_index": "int32", "weight": "bfloat16", "out": "bfloat16"}),
    ],
)
def test_the_command_explains_them_too(words, dtypes, capsys):
    cli.main(["explain", "rmsnorm", "--arch", "sm_90a", "--json", *words.split()])
    found = json.loads(capsys.readouterr().out)
    assert found["op"] == "rmsnorm" and found["dtypes"] == dtypes
    assert cli.main(["explain", "layernorm", *words.split()[:2]]) == 2
    assert "layernorm takes no" in capsys.readouterr().err
