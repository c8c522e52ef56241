"""From a row program to the C++ unit that binds it: pure text, for the `cuda` and the `cpu` route alike.

The unit says which stages make up the program and which operand each of them takes; everything else
is in `csrc/`. A dataclass `Affine(offset=1.0, round_norm=False)` whose weight is bfloat16 becomes

    struct Map0Options {
      using Input = bf16;                       // T, what "rounded" means (program.rounding)
      static constexpr float kOffset = 0x1p+0f;  // every field of the dataclass that names no operand
      static constexpr bool kRoundNorm = false;
    };
    using Map0 = Affine<Map0Options, bf16>;     // the dataclass's name, its operands' dtypes

and is filled with its operands (references, in the order of `stage.operands()`) and then its run-time
scalars. A field that says a word, `cap="device"`, becomes an enumerator, `Cap kCap = Cap::kDevice` (kNone for
the empty word). A new stage needs a dataclass in `flashnorm/program/` and a struct in `csrc/flashnorm/stages/`; this
file learns nothing about it. A backward has a file of its own, codegen_backward.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from ..program import SCALES, BackwardProgram, Operand, Program, RowProgram, Stage, rounding
from . import codegen_backward, codegen_qk
from .codegen_text import CPP_TYPES, Route, bool_text, float_text, unit_text

# What a route includes; each defines flashnorm::launch_rows(program, operands, enable_pdl).
HEADERS: dict[Route, str] = {
    "cuda": "flashnorm/ffi/launch.h",
    "cpu": "flashnorm/cpu/launch.h",
}

# The function of ffi/operands.h that binds an operand of a kind.
_REFERENCES = {
    "row": "row",
    "pairs": "pairs",
    "vec": "row",
    "pool": "pool",
    "per_row": "per_row",
    "per_pool": "per_pool",
    "scalar": "scalar",
    "blocks": "blocks",
    "swizzled": "swizzled",
}


def _pascal(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _constant(name: str, value: Any) -> tuple[str, str]:
    """The C++ type and literal of a dataclass field."""
    if isinstance(value, bool):
        return "bool", bool_text(value)
    if isinstance(value, int):
        return "int", str(value)
    if isinstance(value, float):
        return "float", float_text(value)
    if isinstance(value, str):
        return _pascal(name), f"{_pascal(name)}::k{_pascal(value) or 'None'}"
    raise TypeError(f"a stage field of type {type(value).__name__} has no C++ form")


def _options(name: str, stage: Stage, input_type: str, operands: Collection[str]) -> list[str]:
    lines = [f"struct {name}Options {{", f"  using Input = {input_type};"]
    for field in fields(stage):
        value = getattr(stage, field.name)
        if isinstance(value, str) and value in operands:
            continue  # it says where a result goes, or like what; the operand list has said so already
        ctype, literal = _constant(field.name, value)
        lines.append(f"  static constexpr {ctype} k{_pascal(field.name)} = {literal};")
    return [*lines, "};"]


class _Unit:
    def __init__(self, program: RowProgram, dtypes: tuple[str, ...]) -> None:
        self.operands = program.operands()
        if len(dtypes) != len(self.operands):
            raise ValueError(f"{len(dtypes)} dtypes for {len(self.operands)} operands")
        self.index = {operand.name: i for i, operand in enumerate(self.operands)}
        self.types = {operand.name: CPP_TYPES[dtype] for operand, dtype in zip(self.operands, dtypes, strict=True)}
        self.input_type = CPP_TYPES[rounding(program, dtypes)]
        # Where rows are picked from a pool, it is the output that says how many there are.
        self.grid = next(i for i, operand in enumerate(self.operands) if operand.kind == "row")
        self.lines: list[str] = []

    def stage(self, name: str, stage: Stage) -> str:
        """Defines the stage's type `name`; returns its initialiser."""
        own = stage.operands()
        self.lines += _options(name, stage, self.input_type, self.index)
        arguments = ", ".join([f"{name}Options", *(self.types[operand.name] for operand in own)])
        self.lines += [f"using {name} = {type(stage).__name__}<{arguments}>;", ""]
        bound = [self._reference(operand, name) for operand in own]
        return "{" + ", ".join([*bound, *(f"float({scalar})" for scalar in stage.scalars())]) + "}"

    def chain(self, name: str, stages: tuple[Stage, ...]) -> tuple[str, str]:
        """The type and initialiser of several stages in a row."""
        names = [f"{name}{i}" for i in range(len(stages))]
        init = "{}"
        for initialiser in reversed([self.stage(n, s) for n, s in zip(names, stages, strict=True)]):
            init = f"{{{initialiser}, {init}}}"
        return f"Chain<{', '.join(names)}>", init

    def _reference(self, operand: Operand, stage: str) -> str:
        const = "" if operand.written else "const "
        arguments = str(self.index[operand.name])
        if operand.kind in SCALES:  # how many values a row has is the stage's business
            arguments += f", {stage}::columns(operands.hidden_size())"
        return f"operands.{_REFERENCES[operand.kind]}<{const}{self.types[operand.name]}>({arguments})"


def unit(program: Program, dtypes: tuple[str, ...], route: Route) -> str:
    """The source text of a unit that exports `launch(*scalars, enable_pdl, *operands)`.

    Args:
        program: what is computed.
        dtypes: one dtype name for each of `program.operands()`, in that order.
        route: whose kernel is launched.

    Raises:
        KeyError: a dtype that no C++ type stands for.
        ValueError: not as many dtypes as operands.
    """
    if isinstance(program, BackwardProgram):
        return codegen_backward.unit(program, dtypes, route)
    if not isinstance(program, RowProgram):
        return codegen_qk.unit(program, [CPP_TYPES[dtype] for dtype in dtypes], route)
    out = _Unit(program, dtypes)
    members = {
        "load": ("Load", out.stage("Load", program.load)),
        "stats": ("Stats", out.stage("Stats", program.stats)),
        "maps": out.chain("Map", program.maps),
        "saves": out.chain("Save", program.saves),
        "store": ("Store", out.stage("Store", program.store)),
    }
    names = [operand.name for operand in out.operands]
    parameters = [*(f"double {name}" for name in program.scalars()), "bool enable_pdl"]
    parameters += [f"TensorView {name}" for name in names]
    lines = [
        *out.lines,
        "struct Program {",
        *(f"  {ctype} {member};" for member, (ctype, _) in members.items()),
        "};",
        "",
        f"void launch({', '.join(parameters)}) {{",
        f"  const TensorView tensors[] = {{{', '.join(names)}}};",
        f"  Operands operands(tensors, {len(names)}, {out.grid});",
        "  const Program program{",
        *(f"      {init},  // {member}" for member, (_, init) in members.items()),
        "  };",
        "  launch_rows(program, operands, enable_pdl);",
        "}",
    ]
    return unit_text(program, HEADERS[route], lines)
