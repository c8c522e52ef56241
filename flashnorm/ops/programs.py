"""What the operators' programs have in common: how options and the operands that are there become stages.

arithmetic.md's modes are two switches: whether the normalised residual is the stored one, and whether the norm is
rounded before its weight ("hf-llama", plain RMSNorm weights only).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashnorm.program import AddResidual, Affine, AffineBias, Bias, LoadRow, QuantTensor, Round, Stage

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


def quant_tensor(present: Present) -> QuantTensor:
    """One scale for the tensor, in device memory or by value."""
    return QuantTensor(on_device="scale" in present)


SCALE = {"scale": ("scale_value", None)}  # a number, or a tensor of one element
