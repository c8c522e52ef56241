"""What is checked: of each operator the choices of dtypes, modes, options and operands, and the shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashnorm.core.op import ALL, OPS, Op
from flashnorm.program import FLOATS, FP8, AddResidual, BlockScales, Operand, QuantBlocks, QuantNvfp4, RowProgram, Stage

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
MODES = ("flashinfer", "hf-llama", "hf-gemma", "torch")


@dataclass(frozen=True)
class Case:
    """One choice of everything but the shape.

    Attributes:
        x, weight, residual: dtypes; of an int8 input, x is the result's.
        numerics: the mode, where the operator has any.
        extras: whether optional outputs are asked for, and numbers given where they may be left out; on a GPU, numbers
            are tensors then, and wherever a tensor is a vector.
        codes: the dtype of quantised results.
        without: optional inputs that are left out.
        options: (name, value) of the operator's other options, where it is not the first value.
    """

    x: torch.dtype
    weight: torch.dtype
    residual: torch.dtype
    numerics: str = "flashinfer"
    extras: bool = False
    codes: torch.dtype = E4M3
    without: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()


USUAL = Case(BF16, BF16, BF16)
ALL_FP32 = Case(FP32, FP32, FP32)
MIXED = Case(FP16, FP32, FP32, extras=True, codes=E5M2)
CHOICES = (
    replace(USUAL, options=(("double_rounding", "yes"),)),
    replace(USUAL, options=(("granularity", "128"),)),
    replace(USUAL, options=(("granularity", "128"), ("scale_format", "ue8m0_packed")), codes=E5M2, extras=True),
    replace(USUAL, options=(("scale_format", "ue8m0"),), codes=INT8),
)
FP4_CHOICES = (
    replace(USUAL, options=(("block_size", "32"),)),
    replace(USUAL, options=(("block_size", "32"), ("scale_rule", "ocp"))),
    replace(USUAL, options=(("block_size", "32"), ("scale_format", "e4m3"))),
)
MX_CHOICES = (replace(USUAL, options=(("scale_rule", "ocp"),)),)
GATE_CHOICES = (
    replace(USUAL, options=(("activation", "silu"),)),
    replace(USUAL, options=(("norm_before_gate", "no"),)),
    replace(USUAL, options=(("activation", "silu"), ("norm_before_gate", "no"))),
)
# (M, H): every fold of the sum from one group up, odd widths, and past 8192, where lanes take several groups.
QUICK_SHAPES = ((33, 1024), (5, 1000), (2, 8200))
SHAPES = ((33, 4096), (5, 1000), (3, 16392), (4, 77), (17, 7168), (129, 128), (7, 1), (2, 65537))
OTHER_SHAPES = ((33, 4096), (4, 77))  # where all stages have been through more
Shapes = tuple[tuple[int, int], ...]


def operators() -> dict[str, Op]:
    """What calls outside of a compiler run: all but what compilers alone get. What builds faster comes first.

    The model reads row programs: what is none has no part in it.
    """
    compiled = {op.functional.name for op in ALL.values() if op.functional is not None}
    mine = [op for name, op in ALL.items() if (name not in compiled or name in OPS) and op.by_rows]
    return {op.name: op for op in sorted(mine, key=lambda op: (quantised(op), _has(op, "bias"), _has(op, "residual")))}


def chosen(
    ops: Iterable[Op], device: torch.device, *, quick: bool = False, exact: bool = True, covering: bool = False
) -> Iterator[tuple[Op, Case, Shapes]]:
    """What is to be checked.

    Every operator in its usual case. A kernel is put together from stages, and building them is most of the time: of
    the other cases those are left out that have no stage, with its dtypes, that an earlier one had not, and no other
    order of them. Where scales lie is one thing, and what they are another.

    Args:
        ops: the operators.
        device: whose tensors are used.
        quick: the usual cases alone, in few shapes.
        exact: for a route of kernels. PyTorch's builds none, and goes through all cases.
        covering: leave out operators, too, that have no stage of their own.
    """
    seen: set[Any] = set()
    for op in ops:
        for case in (USUAL,) if quick else cases_of(op):
            program = program_of(op, case, device)
            dtypes = {o.name: dtype_of(o, case) for o in program.operands()}
            stages = [apart(s) for s in program.stages()]
            found: set[Any] = {(s, *(dtypes[o.name] for o in s.operands())) for s in stages}
            if not covering and (case == USUAL or case.options or case.numerics != USUAL.numerics):
                found |= {(program.load, program.maps), (program.maps, apart(program.store))}
            new = found - seen
            seen |= found
            if new or not exact or ((quick or case == USUAL) and not covering):
                yield op, case, QUICK_SHAPES if quick else SHAPES if case == USUAL and new else OTHER_SHAPES


def apart(stage: Stage) -> Stage:
    """A stage apart from where its scales lie, and where its sum goes."""
    if isinstance(stage, AddResidual):
        return replace(stage, dst="residual")
    return replace(stage, layout="rows") if isinstance(stage, (QuantBlocks, QuantNvfp4)) else stage


def width(program: RowProgram, hidden: int) -> int:
    """The next H that a program takes."""
    store = program.store
    block = store.block if isinstance(store, BlockScales) and store.whole else 1
    return -(-hidden // block) * block


def cases_of(op: Op) -> Iterator[Case]:
    """All cases that an operator has, the usual one first."""
    for case in _all_cases(op):
        known = all(value in op.options.get(key, ()) for key, value in case.options)
        if known and ("numerics" in op.options or case.numerics == USUAL.numerics):
            yield case


def _all_cases(op: Op) -> Iterator[Case]:
    yield USUAL
    if _has(op, "input_scale"):
        # Behind the operators that the other cases go through: how rows are loaded is all that is new here.
        yield replace(USUAL, without=("input_scale",))
        yield replace(MIXED, without=("row_index",))
        return
    if not quantised(op) and not _has(op, "residual"):
        yield ALL_FP32
    yield replace(MIXED, codes=_codes(op)[-1]) if quantised(op) else MIXED
    yield from (replace(USUAL, numerics=mode) for mode in MODES[1:])
    yield from FP4_CHOICES if "block_size" in op.options else MX_CHOICES if "scale_rule" in op.options else CHOICES
    yield from GATE_CHOICES
    fewer = tuple(name for name in op.optional if name in ("residual", "gain") or name.endswith("_bias"))
    if fewer:
        yield replace(USUAL, without=fewer)


def quantised(op: Op) -> bool:
    return bool(_codes(op))


def _codes(op: Op) -> list[torch.dtype]:
    """The fp8 formats of an operator's codes."""
    names = dict.fromkeys(name for o in op.operands if o.written for name in o.dtypes if name in FP8)
    return [getattr(torch, name) for name in names]


def _has(op: Op, name: str) -> bool:
    return any(o.name == name for o in op.operands)


# ------------------------------------------------------------------ what a case means for an operator
def options_of(op: Op, case: Case) -> dict[str, Any]:
    """The value of every option, as callers give it."""
    chosen = {"numerics": case.numerics, **dict(case.options)}
    return {key: chosen.get(key, next(iter(values))) for key, values in op.options.items()}


def program_of(op: Op, case: Case, device: torch.device) -> RowProgram:
    program = op.program(present(op, case, device), meant(op, case))
    assert isinstance(program, RowProgram)  # gradients are no operators of their own (core.op.BACKWARD)
    return program


def meant(op: Op, case: Case) -> dict[str, Any]:
    """The value of every option, as programs know it."""
    return {key: op.options[key][value] for key, value in options_of(op, case).items()}


# The two parts of LayerNorm's mean: the second is what rounding left of the first, and no formula has it.
_PARTS = ("mean", "rest")


def present(op: Op, case: Case, device: torch.device) -> frozenset[str]:
    """Names of the operands that are tensors in a call: every input, optional outputs where the case asks for them."""
    names = {o.name for o in op.operands}
    possible = {o.name for o in op.program(frozenset(names), meant(op, case)).operands()}
    tensors = {name for name in op.by_value if device.type == "cuda" or op.operands[op.index(name)].kind == "vec"}
    extra = {o.name for o in op.operands if o.mode == "out" and o.name in op.optional} | tensors
    left_out = {*case.without, *_PARTS, *(() if case.extras else extra), *(op.by_value.keys() - tensors)}
    return frozenset(possible - left_out)


def dtype_of(operand: Operand, case: Case) -> torch.dtype:
    """The dtype of an operand of the case's program."""
    if operand.dtypes == FLOATS:
        if operand.name == "residual" or operand.like == "residual":
            return case.residual
        return case.weight if operand.kind == "vec" else case.x
    codes = str(case.codes).removeprefix("torch.")
    name = codes if codes in operand.dtypes else operand.dtypes[0]
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def label(op: Op, case: Case, device: torch.device) -> str:
    """A case's dtypes, and what else sets it apart, in few words."""
    operands = program_of(op, case, device).operands()
    dtypes = {o.name: str(dtype_of(o, case)).removeprefix("torch.") for o in operands}
    vectors = [o.name for o in operands if o.kind == "vec"]
    inputs = dict.fromkeys(dtypes[name] for name in ("x", *vectors, "residual") if name in dtypes)
    words = ["/".join(inputs)]
    if quantised(op):
        words.append(f"-> {dtypes['out'].removeprefix('float8_').removeprefix('float4_').removesuffix('fn_x2')}")
    words += [value if key != "double_rounding" else key for key, value in case.options]
    named = {o.name for o in op.operands if o.name in op.optional and (o.mode == "out" or o.name in op.by_value)}
    words += [f"+{name}" for name in dtypes if name in named]
    words += [f"-{name}" for name in case.without]
    return " ".join(words)
