"""What every operator refuses of its numbers and options, on the cold path and on the warm one; signatures."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flashnorm
from flashnorm import functional
from flashnorm.core.checks import check_option
from flashnorm.core.op import ALL
from tests.combos import BLOCKED, DYNAMIC, FP4, FUSED, MXFP8, OPS, PLAIN, SILU, STATIC
from tests.inputs import rows
from tests.refusals import BF16, FULL, H, M, every_op, good, refuse


# ------------------------------------------------------------------ values and choices
@pytest.mark.parametrize("eps", [math.nan, math.inf, -math.inf, -1.0, -1e-30, 1e39], ids=str)
@every_op
def test_eps_out_of_range(op: str, eps: float, device: torch.device) -> None:
    refuse(op, device, ValueError, op, "eps", repr(eps), "finite", ">= 0", change=lambda t: {"eps": eps})


@pytest.mark.parametrize("eps", ["1e-6", None, [1e-6], 1j, torch.tensor(1e-6)], ids=repr)
@every_op
def test_eps_is_a_number(op: str, eps: object, device: torch.device) -> None:
    refuse(op, device, (TypeError, ValueError), op, "eps", type(eps).__name__, change=lambda t: {"eps": eps})


@pytest.mark.parametrize("numerics", ["fast", "", "HF-Llama", "hf_llama", None, 3, ["torch"]], ids=repr)
@every_op
def test_unknown_numerics(op: str, numerics: object, device: torch.device) -> None:
    accepted = ("flashinfer", "hf-llama", "hf-gemma", "vllm", "torch", "cake")
    needles = (op, "numerics", repr(numerics), *accepted)
    refuse(op, device, ValueError, *needles, change=lambda t: {"numerics": numerics})


@every_op
def test_enable_pdl_is_a_choice(op: str, device: torch.device) -> None:
    refuse(op, device, ValueError, op, "enable_pdl", "'yes'", change=lambda t: {"enable_pdl": "yes"})


@pytest.mark.parametrize("value", [None, 3, [128], 64, "block", 128.5], ids=repr)
@pytest.mark.parametrize("name", ["granularity", "scale_format", "scale_layout"])
def test_options_of_the_dynamic_operator(name: str, value: object, device: torch.device) -> None:
    refuse(DYNAMIC, device, ValueError, DYNAMIC, name, repr(value), change=lambda t: {name: value})


@pytest.mark.parametrize("value", [torch.float16, torch.uint8, "float8_e4m3fn", 8, torch.float8_e4m3fnuz], ids=repr)
def test_dtype_of_the_dynamic_operator(value: object, device: torch.device) -> None:
    change = {"dtype": value, "out": None, "scale": None}
    refuse(DYNAMIC, device, ValueError, DYNAMIC, "dtype", repr(value), change=lambda t: change)


def test_out_and_dtype_must_agree(device: torch.device) -> None:
    refuse(DYNAMIC, device, ValueError, DYNAMIC, "out", "int8", change=lambda t: {"dtype": torch.int8})


@pytest.mark.parametrize("value", ["1", [1.0], True, 1j], ids=repr)
def test_scale_ub_is_a_number(value: object, device: torch.device) -> None:
    change = {"scale_ub": value, "granularity": "token"}
    needles = (DYNAMIC, "scale_ub", type(value).__name__)
    refuse(DYNAMIC, device, (TypeError, ValueError), *needles, change=lambda t: change)


FLAGS = ("is_sf_swizzled_layout", "output_both_sf_layouts", "return_rstd", "double_rounding")
HAVING = [(op, name) for op in OPS for name in FLAGS if name in inspect.signature(getattr(flashnorm, op)).parameters]


@pytest.mark.parametrize(("op", "name"), HAVING)
def test_flags_are_true_or_false(op: str, name: str, device: torch.device) -> None:
    """1 equals True, and is no flag; cold and after a good call."""
    for _ in range(2):
        for value in (1, 0, 1.0, np.bool_(True), np.int64(1), None, "maybe"):
            refuse(op, device, ValueError, op, name, repr(value), change=lambda t, value=value: {name: value})
        getattr(flashnorm, op)(**good(op, device).arguments)


@pytest.mark.parametrize(
    "function", [flashnorm.rmsnorm_sigmoid_gate, functional.rmsnorm_gate], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("recorded", [False, True])
def test_flags_of_gates_are_true_or_false(function: Any, recorded: bool, device: torch.device) -> None:
    gate = rows((4, 64), BF16).to(device)
    for _ in range(2):
        x = rows((4, 64), BF16).to(device).requires_grad_(recorded and function is functional.rmsnorm_gate)
        for value in (1, 0, 1.0, np.bool_(True), None, "maybe"):
            with pytest.raises(ValueError, match=f"{function.__name__}: norm_before_gate must be one of"):
                function(x, gate, norm_before_gate=value)
        function(x, gate, norm_before_gate=True)


def test_flags_of_dequantize_are_true_or_false() -> None:
    codes, scale = torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.float8_e4m3fn)
    for value in (1, 0, "yes"):
        with pytest.raises(ValueError, match="swizzled must be True or False"):
            flashnorm.dequantize(codes, scale, block_size=16, swizzled=value)


@pytest.mark.parametrize("op", sorted(ALL))
def test_what_is_accepted_is_said_once(op: str) -> None:
    """Some values are accepted as a number and as a text, some as None and as a word."""
    for name, accepted in ALL[op].options.items():
        if type(accepted) is not dict:
            continue  # says what it takes in words of its own
        with pytest.raises(ValueError, match="must be one of") as caught:
            check_option(ALL[op], name, "no such word")
        words = str(caught.value).split("[")[1].split("]")[0].split(", ")
        assert len(words) == len(set(words)) and {str(value) for value in accepted} == {w.strip("'") for w in words}


@every_op
def test_refused_after_a_good_call_too(op: str, device: torch.device) -> None:
    """The warm path checks as the cold one does."""
    for _ in range(2):
        getattr(flashnorm, op)(**good(op, device).arguments)
        refuse(op, device, ValueError, "eps", change=lambda t: {"eps": math.nan})
        refuse(op, device, ValueError, "numerics", change=lambda t: {"numerics": "x"})
        refuse(op, device, TypeError, "input", change=lambda t: {"input": 1})
        refuse(op, device, ValueError, "enable_pdl", change=lambda t: {"enable_pdl": "yes"})
        if FULL[op].residual or op in (*PLAIN, SILU):
            shared = rows((M + 1, H), BF16).to(device)
            other = "residual" if FULL[op].residual else "out"
            both = {"input": shared[:M], other: shared[1:]}
            refuse(op, device, ValueError, "overlap", change=lambda t, both=both: both)
        if FULL[op].residual:
            refuse(op, device, ValueError, "overlap", change=lambda t: {"residual": t["input"]})
        if FULL[op].makes_codes:
            name = "y_fp4" if FULL[op].out == "e2m1" else "out"
            width = H // 2 if name == "y_fp4" else H
            over = lambda t, n=name, w=width: {n: t["input"].view(t[n].dtype)[:, :w]}  # noqa: E731
            refuse(op, device, ValueError, "overlap", change=over)
        if FULL[op].side:
            side = "y_out" if op in FP4 else "normed_out"
            refuse(op, device, ValueError, "overlap", change=lambda t, side=side: {side: t["input"]})
            refuse(op, device, ValueError, "overlap", change=lambda t, side=side: {side: t["residual"]})


# ------------------------------------------------------------------ backends
def test_unknown_backend() -> None:
    for name in ("triton", "", "CUDA", None):
        with pytest.raises(ValueError, match=r"backend.*cute, cuda, cpu, torch"), flashnorm.backend(name):  # type: ignore[arg-type]
            raise AssertionError("entered")


CHILD = """
import torch, flashnorm
x = torch.ones(2, 8)
try:
    flashnorm.rmsnorm(x, x[0].clone())
except Exception as error:
    print(type(error).__name__, error)
else:
    print("served")
"""


def child(**variables: str) -> str:
    """What a call says in a process whose environment has these variables."""
    env = {**os.environ, **variables}
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.cpu_only
def test_environment_that_cannot_be_followed(tmp_path: Path) -> None:
    """An unknown name raises at the first call, not at import; a forced route that cannot serve gives its reason."""
    said = child(FLASHNORM_BACKEND="triton")
    assert said.startswith("ValueError") and "FLASHNORM_BACKEND" in said and "'triton'" in said and "cute" in said
    missing = {"CXX": str(tmp_path / "g++"), "PATH": str(tmp_path), "FLASHNORM_CACHE_DIR": str(tmp_path)}
    said = child(FLASHNORM_BACKEND="cpu", **missing)
    assert said.startswith("ValueError") and "cpu" in said and str(tmp_path / "g++") in said
    assert child(FLASHNORM_BACKEND="", **missing) == "served"  # by the torch route
    assert child(FLASHNORM_BACKEND=" torch ") == "served"


# ------------------------------------------------------------------ signatures
NONE = inspect.Parameter.empty
EPS, PDL = ("eps", 1e-6), ("enable_pdl", None)


def needed(*names: str) -> list[tuple[str, Any]]:
    return [(name, NONE) for name in names]


SIGNATURES: dict[str, list[tuple[str, Any]]] = {}
for _op in OPS:
    _gains = ("gemma", "beta") if "layernorm" in _op else ("weight",)
    _add = ("residual",) if "fused_add" in _op else ()
    if _op in STATIC:
        SIGNATURES[_op] = [*needed("out", "input", *_add, *_gains, "scale"), EPS, PDL]
    elif _op == BLOCKED:
        SIGNATURES[_op] = [*needed("out", "block_scale", "normed_out", "input", "residual", "weight"), EPS, PDL]
    elif _op == DYNAMIC:
        SIGNATURES[_op] = [*needed("input", "weight"), EPS]
    elif _op in FP4:
        _add = ("residual",) if _op == FP4[1] else ()
        _both = [("output_both_sf_layouts", False), ("block_scale_unswizzled", None)] if _add else []
        SIGNATURES[_op] = [
            *needed("input", *_add, "weight"),
            *[(name, None) for name in ("y_fp4", "block_scale", "global_scale")],
            EPS,
            ("block_size", 16),
            ("scale_format", None),
            ("is_sf_swizzled_layout", False),
            *_both,
            PDL,
            *([("y_out", None)] if _add else []),
        ]
    elif _op in MXFP8:
        _add = ("residual",) if _op == MXFP8[1] else ()
        SIGNATURES[_op] = [*needed("input", *_add, "weight"), ("out", None), ("block_scale", None), EPS]
    elif _op == SILU:
        SIGNATURES[_op] = [*needed("input", "weight"), EPS, ("out", None), ("block_scale", None)]
    else:
        SIGNATURES[_op] = [*needed("input", *_add, *_gains), EPS, *([] if _op in FUSED else [("out", None)]), PDL]

ROWS = {"row_index": None, "input_scale": None}
ADDED: dict[str, dict[str, Any]] = {op: {"numerics": "flashinfer"} for op in OPS}
for _op in ("rmsnorm", "gemma_rmsnorm"):
    ADDED[_op] |= {"return_rstd": False, **ROWS}
for _op in ("rmsnorm_quant", "gemma_rmsnorm_quant"):
    ADDED[_op] |= ROWS
ADDED["layernorm_quant"] |= {"double_rounding": False}
for _op in (*FP4, *MXFP8):
    ADDED[_op] |= {"scale_rule": "up"}
for _op in MXFP8:
    ADDED[_op] |= {"is_sf_swizzled_layout": False, "enable_pdl": None}
ADDED[SILU] |= {"scale": None, "enable_pdl": None}
ADDED[DYNAMIC] |= {
    "residual": None,
    "granularity": "token",
    "scale_format": "fp32",
    "scale_layout": "row",
    "scale_ub": None,
    "out": None,
    "scale": None,
    "normed_out": None,
    "enable_pdl": None,
}


@every_op
def test_signature(op: str) -> None:
    """FlashInfer's names, order and defaults; what is added is keyword-only."""
    found = inspect.signature(getattr(flashnorm, op)).parameters.values()
    assert [(p.name, p.default) for p in found if p.kind is p.POSITIONAL_OR_KEYWORD] == SIGNATURES[op]
    added = {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY}
    if op == DYNAMIC:  # None and e4m3fn mean the same, unless there is an out
        assert added.pop("dtype") in (None, torch.float8_e4m3fn)
    assert added == ADDED[op]


@every_op
def test_it_is_documented(op: str) -> None:
    """Formula first, every parameter, and what is raised; siblings refer to the operator that says it all."""
    text = inspect.getdoc(getattr(flashnorm, op)) or ""
    sibling = next((other for other in OPS if f"those of `{other}`" in text), None)
    if sibling is None:
        assert ".. math::" in text and "Args:" in text and "Raises:" in text
        for name in inspect.signature(getattr(flashnorm, op)).parameters:
            assert name in text, name
    else:
        assert op.removeprefix("gemma_") == sibling


def test_positional_calls(device: torch.device) -> None:
    """In FlashInfer's order, without a keyword."""
    for op in OPS:
        call = good(op, device)
        names = [name for name, _ in SIGNATURES[op]]
        if FULL[op].placed == "swizzled" and "is_sf_swizzled_layout" not in names:
            call.arguments["block_scale"] = None  # without the keyword scales lie by rows
        positional = [call.arguments.get(name) for name in names]
        result = getattr(flashnorm, op)(*positional)
        assert (result is None) == (op in (*STATIC, *FUSED, BLOCKED))
