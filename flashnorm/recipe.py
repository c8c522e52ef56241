"""Recipes: which kernels a program uses, as JSON that people can read and that holds no code.

A recipe names each kernel by what decides it (`flashnorm.program.Variant`), its route and its architecture, and by
the operator that asked for it, so every operator that is a row program is covered without a line here.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from flashnorm import program as vocabulary
from flashnorm.program import BackwardProgram, Program, QkNormRope, RowProgram, Stage, Variant

FORMAT = 1


@dataclass(frozen=True)
class Kernel:
    """One kernel of a program.

    Attributes:
        op: the operator that asked for it.
        route: "cute", "cuda" or "cpu".
        arch: the architecture, e.g. "sm_90a"; "host" for the CPU.
        variant: what it computes.
    """

    op: str
    route: str
    arch: str
    variant: Variant


# ------------------------------------------------------------------ noting
_listeners: list[dict[Kernel, None]] = []


def note(kernel: Kernel) -> None:
    """Tells whoever records that a kernel was used (`flashnorm.record`)."""
    for kernels in _listeners:
        kernels[kernel] = None


def listen(kernels: dict[Kernel, None]) -> None:
    _listeners.append(kernels)


def leave(kernels: dict[Kernel, None]) -> None:
    _listeners[:] = [other for other in _listeners if other is not kernels]


# ------------------------------------------------------------------ JSON
def _stage_data(stage: Stage) -> dict[str, Any]:
    return {"stage": type(stage).__name__, **dataclasses.asdict(stage)}


def _stage(data: dict[str, Any]) -> Stage:
    fields = dict(data)
    name = fields.pop("stage")
    kind = getattr(vocabulary, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, Stage)):
        raise ValueError(f"there is no stage {name!r}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})


def _program_data(program: Program) -> dict[str, Any]:
    if isinstance(program, QkNormRope):
        return {"program": program.name, **program.data()}
    if isinstance(program, BackwardProgram):
        return {"program": BackwardProgram.__name__, **dataclasses.asdict(program)}
    stages = {key: _stage_data(getattr(program, key)) for key in ("load", "stats", "store")}
    lists = {key: [_stage_data(stage) for stage in getattr(program, key)] for key in ("maps", "saves")}
    return {**stages, **lists}


def _program(data: dict[str, Any]) -> Program:
    given = dict(data)
    name = given.pop("program", RowProgram.__name__)
    if name == QkNormRope.__name__:
        return QkNormRope.of_data(given)
    if name == BackwardProgram.__name__:
        return BackwardProgram(**given)
    if name != RowProgram.__name__:
        raise ValueError(f"there is no program {name!r}")
    lists = {key: tuple(_stage(stage) for stage in given.pop(key)) for key in ("maps", "saves")}
    stages: dict[str, Any] = {**{key: _stage(value) for key, value in given.items()}, **lists}
    return RowProgram(**stages)


def _kernel_data(kernel: Kernel) -> dict[str, Any]:
    variant = kernel.variant
    rest = {f.name: getattr(variant, f.name) for f in dataclasses.fields(variant) if f.name != "program"}
    words = {"op": kernel.op, "route": kernel.route, "arch": kernel.arch}
    return {**words, **rest, "program": _program_data(variant.program)}


def _kernel(data: dict[str, Any]) -> Kernel:
    rest = dict(data)
    program = _program(rest.pop("program"))
    words = {key: rest.pop(key) for key in ("op", "route", "arch")}
    if not all(isinstance(word, str) for word in words.values()):
        raise ValueError("op, route and arch are words")
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in rest.items()}
    variant = Variant(program, **fields)
    if len(variant.dtypes) != len(program.operands()):
        raise ValueError(f"{len(program.operands())} operands need as many dtypes, got {len(variant.dtypes)}")
    return Kernel(variant=variant, **words)


def to_json(kernels: Iterable[Kernel]) -> str:
    """The text of a recipe; equal sets of kernels give equal texts."""
    data = sorted((_kernel_data(kernel) for kernel in dict.fromkeys(kernels)), key=json.dumps)
    return json.dumps({"format": FORMAT, "kernels": data}, indent=1) + "\n"


def read(path: str | os.PathLike[str], stream: TextIO | None = None) -> tuple[Kernel, ...]:
    """The kernels of a recipe's file, or of standard input where that is given.

    Raises:
        OSError: the file cannot be read.
        ValueError: as `from_json` says; the text names the file.
    """
    name = "standard input" if stream is not None else os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8") if stream is None else stream.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: this is no recipe, nor any text") from error
    try:
        return from_json(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def from_json(text: str) -> tuple[Kernel, ...]:
    """The kernels of a recipe.

    Raises:
        ValueError: it is no recipe, or names something that this version does not know.
    """
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("kernels"), list):
        raise ValueError(f"this is no recipe of format {FORMAT}")
    kernels = []
    for number, item in enumerate(data["kernels"]):
        try:
            kernels.append(_kernel(item))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"kernel {number} of the recipe cannot be read: {type(error).__name__}: {error}"
            ) from error
    return tuple(dict.fromkeys(kernels))
