"""What the operators' declarations have in common: how options and the operands that are there become stages.

arithmetic.md's modes are two switches: whether the normalised residual is the stored one, and whether the norm is
rounded before its weight ("hf-llama", plain RMSNorm weights only).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from flashnorm.core.op import NUMERICS, Op
from flashnorm.program import (
    AddResidual,
    Affine,
    AffineBias,
    Bias,
    LoadRow,
    QuantTensor,
    Round,
    RowProgram,
    SaveMeans,
    SaveRstd,
    Stage,
)

Present = frozenset[str]
Options = Mapping[str, Any]


def load(present: Present, options: Options, residual: str | None = None, rows: bool = False) -> Stage:
    """How h comes about.

    Args:
        present: names of the operands that are there.
        options: of the call.
        residual: None, or where the sum with the residual goes: "residual" (in place), or another operand.
        rows: the operator takes `row_index` and `input_scale`.
    """
    if residual is not None:
        return AddResidual(rounded=options["numerics"] != "flashinfer", dst=residual)
    return LoadRow(rows and "row_index" in present, rows and "input_scale" in present)


def rms_maps(present: Present, options: Options, offset: float, *, quantised: bool = False) -> tuple[Stage, ...]:
    """The weight of RMSNorm. In "hf-llama" the product is rounded to T as well: quantising starts from there."""
    if "weight" not in present:
        return ()
    llama = options["numerics"] == "hf-llama" and offset == 0.0
    return (Affine(offset, llama), *((Round(),) if llama and quantised else ()))


def layer_maps(present: Present) -> tuple[Stage, ...]:
    """Weight and bias of LayerNorm; one that is missing is skipped."""
    if "bias" not in present:
        return (Affine(),) if "weight" in present else ()
    return (AffineBias(),) if "weight" in present else (Bias(),)


def saves(present: Present) -> tuple[Stage, ...]:
    """The statistics that somebody asks for."""
    means = (SaveMeans(),) if "mean" in present else ()
    return (*means, SaveRstd()) if "rstd" in present else means


def quant_tensor(present: Present) -> QuantTensor:
    """One scale for the tensor, in device memory or by value."""
    return QuantTensor(on_device="scale" in present)


SCALE = {"scale": ("scale_value", None)}  # a number, or a tensor of one element


def rms_op(
    name: str,
    functional: Op | None = None,
    *,
    program: Callable[..., RowProgram],
    formulas: Mapping[str | None, Callable[..., None]],
    optional: tuple[str, ...],
    offset: float = 0.0,
    residual: str | None = None,
    rows: bool = False,
    public: bool | None = None,
    **more: Any,
) -> Op:
    """One of a family of RMSNorms: plain, over rows that are picked or widened, or with a residual.

    Args:
        name, functional: of the operator.
        program: takes `offset`, `residual` and `rows` as keywords.
        formulas: by `residual`.
        optional: operands that calls may leave out, beside those that rows come with.
        offset: added to the weight.
        residual, rows: as `load` takes them.
        public: is a public function; by default what has no rows of its own and overwrites its residual is.
        more: further arguments of `Op`.
    """
    absent = {} if residual or rows else {"row_index": None, "input_scale": None}
    return Op(
        name,
        program=functools.partial(program, offset=offset, residual=residual, rows=rows),
        reference=functools.partial(formulas[residual], offset=offset, **absent),
        options={"numerics": NUMERICS},
        optional=("row_index", "input_scale", *optional),
        broadcast_vecs=residual is None,
        functional=functional,
        public=residual != "h" and not rows if public is None else public,
        called=name.removesuffix("_rows"),
        **more,
    )
