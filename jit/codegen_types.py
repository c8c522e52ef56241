"""What generated C++ units call dtypes and constants."""

from __future__ import annotations

from typing import Literal

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
