"""What all generated C++ units have in common: names of dtypes and constants, and what stands around a program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

Route = Literal["cuda", "cpu"]

CPP_TYPES = {
    "float32": "float",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "int32": "int32_t",
    "int64": "int64_t",
}


def bool_text(value: bool) -> str:
    return "true" if value else "false"


def float_text(value: float) -> str:
    """Hexadecimal: exact."""
    return f"{value.hex()}f"


def unit_text(program: Any, header: str, lines: Iterable[str], export: str = "FLASHNORM_EXPORT(launch, launch)") -> str:
    """A unit: `lines` define the function that it exports.

    Args:
        program: for the reader.
        header: with the kernels.
        lines: in a namespace of their own, flashnorm's names known.
        export: the statement that exports it.
    """
    head = [f"// Generated from {program!r}", f'#include "{header}"', ""]
    body = ["namespace {", "", "using namespace flashnorm;", "", *lines, "", "}  // namespace", ""]
    return "\n".join([*head, *body, export, ""])
