"""What every operator refuses: which exception, that it names the argument, and that nothing was written."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashnorm
from tests.combos import FUSED, PLAIN
from tests.inputs import Guarded, gains, rows
from tests.tolerance import assert_same_bits

OPS = (*PLAIN, *FUSED)
M, H = 4, 32
BF16 = torch.bfloat16
DTYPES = ("float32", "float16", "bfloat16")


def good(op: str, device: torch.device) -> dict[str, Guarded]:
    """The arguments of a call that is fine, each in a watched buffer."""
    made = {"input": Guarded(rows((M, H), BF16, "x"), device, written=True)}
    if op in FUSED:
        made["residual"] = Guarded(rows((M, H), BF16, "r"), device, written=True)
    made["weight"] = Guarded(gains((H,), BF16), device)
    if op in PLAIN:
        made["out"] = Guarded(None, device, written=True, shape=(M, H), dtype=BF16)
    return made


def parameters(op: str) -> list[str]:
    return ["input", "residual", "weight"] if op in FUSED else ["input", "weight", "out"]


EVERY = [(op, name) for op in OPS for name in parameters(op)]
every_argument = pytest.mark.parametrize(("op", "name"), EVERY)
every_op = pytest.mark.parametrize("op", OPS)


def refuse(
    op: str,
    device: torch.device,
    error: type[Exception] | tuple[type[Exception], ...],
    *needles: str,
    change: Callable[[dict[str, torch.Tensor]], dict[str, Any]],
) -> None:
    """Calls `op` with some arguments changed: it must raise, say each needle, and write nothing.

    Args:
        change: given the good tensors by name, returns what is passed in place of them.
    """
    guards = good(op, device)
    arguments: dict[str, Any] = {name: guard.view for name, guard in guards.items()}
    changed = change(dict(arguments))
    before = {name: value.clone() for name, value in changed.items() if _has_data(value)}
    arguments.update(changed)
    with pytest.raises(error) as caught:
        getattr(flashnorm, op)(**arguments)
    text = str(caught.value)
    for needle in needles:
        assert needle in text, f"{needle!r} is not in: {text}"
    for name, guard in guards.items():
        assert guard.unchanged(), f"{name} was written"
    for name, value in before.items():
        now = changed[name].contiguous()
        assert torch.equal(value.contiguous().view(torch.uint8), now.view(torch.uint8)), f"{name} was written"


def _has_data(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and value.dim() > 0
        and value.numel() > 0
    )


# ------------------------------------------------------------------ types, dtypes, devices
@pytest.mark.parametrize("value", [[1.0], 3.0, "x", object()], ids=repr)
@every_argument
def test_not_a_tensor(op: str, name: str, value: object, device: torch.device) -> None:
    refuse(op, device, TypeError, op, name, "Tensor", type(value).__name__, change=lambda t: {name: value})


@pytest.mark.parametrize(("op", "name"), [(op, n) for op, n in EVERY if n in ("input", "residual")])
def test_none_where_a_tensor_is_needed(op: str, name: str, device: torch.device) -> None:
    refuse(op, device, TypeError, op, name, "NoneType", change=lambda t: {name: None})


WRONG = ("float64", "int32", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("dtype", WRONG)
@every_argument
def test_wrong_dtype(op: str, name: str, dtype: str, device: torch.device) -> None:
    accepted = ("bfloat16",) if name == "out" else DTYPES
    refuse(
        op,
        device,
        ValueError,
        *(op, name, dtype, *accepted),
        change=lambda t: {name: torch.ones(t[name].shape, device=device).to(getattr(torch, dtype))},
    )


@pytest.mark.parametrize("op", PLAIN)
def test_out_has_the_dtype_of_the_input(op: str, device: torch.device) -> None:
    refuse(op, device, ValueError, "out", "float32", "bfloat16", change=lambda t: {"out": t["out"].float()})
    refuse(op, device, ValueError, "out", "float16", change=lambda t: {"out": t["input"].view(torch.float16)})


@every_argument
def test_wrong_device(op: str, name: str, device: torch.device) -> None:
    others = ["meta"] + (["cpu"] if device.type == "cuda" else [])
    for other in others:
        needles = (device.type, other) if name != "input" else (device.type,)
        refuse(op, device, ValueError, op, *needles, change=lambda t, o=other: {name: t[name].to(o)})


@every_argument
def test_sparse(op: str, name: str, device: torch.device) -> None:
    refuse(op, device, ValueError, op, name, change=lambda t: {name: t[name].clone().to_sparse()})


# ------------------------------------------------------------------ shapes
BAD_ROWS = [(M, H // 2), (M, H + 1), (M, 1), (1, H), (M - 1, H), (H,), (M, 1, H), (2 * M, H // 2), (H, M)]


@pytest.mark.parametrize("shape", BAD_ROWS, ids=str)
@pytest.mark.parametrize(("op", "name"), [(op, n) for op, n in EVERY if n in ("residual", "out")])
def test_shape_unlike_the_input(op: str, name: str, shape: tuple[int, ...], device: torch.device) -> None:
    refuse(
        op,
        device,
        ValueError,
        *(op, name, str(shape), str((M, H))),
        change=lambda t: {name: torch.zeros(shape, dtype=BF16, device=device)},
    )


@pytest.mark.parametrize("op", FUSED)
def test_residual_of_half_the_width(op: str, device: torch.device) -> None:
    x, residual = (rows((128, h), BF16).to(device) for h in (32, 16))
    refuse(
        op,
        device,
        ValueError,
        "residual",
        "(128, 16)",
        "(128, 32)",
        change=lambda t: {"input": x, "residual": residual},
    )


BAD_WEIGHTS = [
    (),
    (1,),
    (H - 1,),
    (H + 1,),
    (2 * H,),
    (H, 1),
    (1, 1),
    (M, 1),
    (M + 1, H),
    (H, M),
    (2, M, H),
    (1, M, H),
    (0, H),
]


@pytest.mark.parametrize("shape", BAD_WEIGHTS, ids=str)
@every_op
def test_weight_that_does_not_fit(op: str, shape: tuple[int, ...], device: torch.device) -> None:
    """Wrong width, a column, more rows than the input has, or a rank that would enlarge the result."""
    weight = torch.full(shape, 0.5, dtype=BF16, device=device)
    refuse(op, device, ValueError, op, "weight", str(shape), str(H), change=lambda t: {"weight": weight})


@pytest.mark.parametrize("shape", [(M, H), (1, H), (1, 1, H)], ids=str)
@pytest.mark.parametrize("op", FUSED)
def test_fused_weights_are_one_row(op: str, shape: tuple[int, ...], device: torch.device) -> None:
    weight = torch.full(shape, 0.5, dtype=BF16, device=device)
    refuse(op, device, ValueError, op, "weight", str(shape), f"({H},)", change=lambda t: {"weight": weight})


def test_a_square_input_does_not_make_a_column_fit(device: torch.device) -> None:
    x = rows((H, H), BF16).to(device)
    for shape in ((H, 1), (1, 1), (H, H, H)):
        weight = torch.full(shape, 0.5, dtype=BF16, device=device)
        with pytest.raises(ValueError, match="weight"):
            flashnorm.rmsnorm(x, weight)


@every_op
def test_hidden_size_out_of_range(op: str, device: torch.device) -> None:
    for shape, needle in (((), "0-d"), ((M, 0), "0"), ((1, 262_145), "262145")):

        def change(tensors: dict[str, torch.Tensor], shape: tuple[int, ...] = shape) -> dict[str, Any]:
            x = torch.ones(shape, dtype=BF16, device=device)
            changed: dict[str, Any] = {"input": x, "weight": torch.ones(shape[-1:], dtype=BF16, device=device)}
            changed["residual" if op in FUSED else "out"] = x.clone()
            return changed

        refuse(op, device, ValueError, op, "input", needle, change=change)
    accepted = torch.ones(1, 262_144, dtype=BF16, device=device)
    arguments = (accepted, accepted.clone()) if op in FUSED else (accepted,)
    getattr(flashnorm, op)(*arguments, None)


@every_op
def test_empty_inputs_are_checked_too(op: str, device: torch.device) -> None:
    empty = torch.empty(0, H, dtype=BF16, device=device)
    rest = {"residual": empty.clone()} if op in FUSED else {"out": None}
    bad = torch.ones(H // 2, dtype=BF16, device=device)
    refuse(op, device, ValueError, "weight", change=lambda t: {"input": empty, "weight": bad, **rest})
    refuse(op, device, ValueError, "eps", change=lambda t: {"input": empty, "eps": math.nan, **rest})
    refuse(op, device, ValueError, "numerics", change=lambda t: {"input": empty, "numerics": "x", **rest})


# ------------------------------------------------------------------ memory
def overlapping(name: str, kind: str) -> Callable[[dict[str, torch.Tensor]], dict[str, Any]]:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        tensor = tensors[name]
        if kind == "stride 0":
            return {name: tensor[:1].expand(M, H)}
        if kind == "rows overlap":
            return {name: tensor.as_strided((M, H), (H // 2, 1))}
        return {name: tensor.as_strided((M, H), (H, 0))}

    return change


@pytest.mark.parametrize("kind", ["stride 0", "rows overlap", "columns repeat"])
@pytest.mark.parametrize(("op", "name"), [(op, n) for op, n in EVERY if n == "out" or (op in FUSED and n != "weight")])
def test_written_tensors_have_no_element_twice(op: str, name: str, kind: str, device: torch.device) -> None:
    refuse(op, device, ValueError, op, name, "stride", change=overlapping(name, kind))


@pytest.mark.parametrize("op", FUSED)
def test_input_is_residual(op: str, device: torch.device) -> None:
    needles = (op, "input", "residual", "overlap")
    refuse(op, device, ValueError, *needles, change=lambda t: {"residual": t["input"]})
    refuse(op, device, ValueError, *needles, change=lambda t: {"residual": t["input"].view(M, H)})
    shared = rows((M + 1, H), BF16).to(device)
    refuse(op, device, ValueError, *needles, change=lambda t: {"input": shared[:M], "residual": shared[1:]})
    flat = rows((M * H + 1,), BF16).to(device)
    halves = {"input": flat[:-1].view(M, H), "residual": flat[1:].view(M, H)}
    refuse(op, device, ValueError, *needles, change=lambda t: halves)
    wide = rows((M, H + 8), BF16).to(device)
    columns = {"input": wide[:, :H], "residual": wide[:, 8:]}
    refuse(op, device, ValueError, *needles, change=lambda t: columns)


@pytest.mark.parametrize("op", FUSED)
def test_weight_inside_a_written_tensor(op: str, device: torch.device) -> None:
    for name in ("input", "residual"):
        refuse(op, device, ValueError, op, "weight", name, "overlap", change=lambda t, n=name: {"weight": t[n][1]})


@pytest.mark.parametrize("op", PLAIN)
def test_out_overlaps_an_input(op: str, device: torch.device) -> None:
    flat = rows((M * H + 1,), BF16).to(device)
    shared = rows((2 * M, H), BF16).to(device)
    square = rows((H, H), BF16).to(device)
    pairs = {
        "one element later": (flat[:-1].view(M, H), flat[1:].view(M, H)),
        "one row later": (shared[:M], shared[1 : M + 1]),
        "every other row": (shared[:M], shared[::2]),
        "transposed in place": (square, square.t()),
    }
    for x, out in pairs.values():
        refuse(op, device, ValueError, op, "out", "overlap", change=lambda t, x=x, out=out: {"input": x, "out": out})
    refuse(op, device, ValueError, op, "out", "weight", "overlap", change=lambda t: {"weight": t["out"][2]})


def test_neighbours_are_no_overlap(device: torch.device) -> None:
    """Interleaved and adjacent tensors share no element: they are fine."""
    weight = gains((H,), BF16).to(device)
    wide = rows((M, 2 * H), BF16).to(device)
    want = flashnorm.rmsnorm(wide[:, :H].contiguous(), weight)
    assert_same_bits(flashnorm.rmsnorm(wide[:, :H], weight, out=wide[:, H:]), want, "the other half")
    stack = rows((2 * M, H), BF16).to(device)
    want = flashnorm.rmsnorm(stack[::2].contiguous(), weight)
    assert_same_bits(flashnorm.rmsnorm(stack[::2], weight, out=stack[1::2]), want, "alternate rows")
    wide = rows((M, 2 * H), BF16).to(device)
    x, residual = wide[:, :H].clone(), wide[:, H:].clone()
    flashnorm.fused_add_rmsnorm(x, residual, weight)
    flashnorm.fused_add_rmsnorm(wide[:, :H], wide[:, H:], weight)
    assert_same_bits(wide, torch.cat([x, residual], -1), "input and residual of one buffer")


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


@every_op
def test_refused_after_a_good_call_too(op: str, device: torch.device) -> None:
    """The warm path checks as the cold one does."""
    for _ in range(2):
        guards = good(op, device)
        getattr(flashnorm, op)(**{name: guard.view for name, guard in guards.items()})
        refuse(op, device, ValueError, "eps", change=lambda t: {"eps": math.nan})
        refuse(op, device, ValueError, "numerics", change=lambda t: {"numerics": "x"})
        refuse(op, device, TypeError, "input", change=lambda t: {"input": 1})
        refuse(op, device, ValueError, "enable_pdl", change=lambda t: {"enable_pdl": "yes"})
        shared = rows((M + 1, H), BF16).to(device)
        other = "residual" if op in FUSED else "out"
        both = {"input": shared[:M], other: shared[1:]}
        refuse(op, device, ValueError, "overlap", change=lambda t, both=both: both)
        if op in FUSED:
            refuse(op, device, ValueError, "overlap", change=lambda t: {"residual": t["input"]})


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


@every_op
def test_signature(op: str) -> None:
    """FlashInfer's names, order and defaults; what is added is keyword-only."""
    found = inspect.signature(getattr(flashnorm, op)).parameters.values()
    positional = [(p.name, p.default) for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    none = inspect.Parameter.empty
    if op in FUSED:
        want = [("input", none), ("residual", none), ("weight", none), ("eps", 1e-6), ("enable_pdl", None)]
    else:
        want = [("input", none), ("weight", none), ("eps", 1e-6), ("out", None), ("enable_pdl", None)]
    assert positional == want
    added = {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY}
    assert added["numerics"] == "flashinfer" and (op in FUSED or added["return_rstd"] is False)
