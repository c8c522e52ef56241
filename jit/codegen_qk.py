"""From a `QkNormRope` to the C++ unit that binds it.

The unit's entry point takes a layout and returns the launch: a function that holds the layout, and takes scalars,
enable_pdl and operands like every other.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..program import QkNormRope
from .codegen_text import Route, bool_text, unit_text

# What a route includes; each defines flashnorm::launch_qk(program, operands, enable_pdl).
HEADERS: dict[Route, str] = {"cuda": "flashnorm/ffi/launch_qk.h", "cpu": "flashnorm/cpu/launch_qk.h"}


def unit(program: QkNormRope, types: Sequence[str], route: Route) -> str:
    """The source text of a unit that exports `launch(*integers, *numbers) -> launch(*scalars, enable_pdl, *operands)`.

    Args:
        program: what is computed, whatever the layout.
        types: the C++ type of each of its operands.
        route: "cuda" or "cpu".

    Raises:
        ValueError: not as many types as operands.
    """
    names = [operand.name for operand in program.operands()]
    type_of = dict(zip(names, types, strict=True))
    index = {name: i for i, name in enumerate(names)}

    def bound(name: str, method: str, *more: str) -> str:
        if name not in index:
            return "{}"
        return f"operands.{method}({', '.join([str(index[name]), *more])})"

    arguments = [
        type_of["x"],
        *(type_of.get(n, "void") for n in ("q_weight", "k_weight", "positions")),
        type_of["q_out"],
    ]
    outs = [
        bound(name, f"heads<{type_of[name]}>", part) for name, part in zip(names[-3:], ("kQ", "kK", "kV"), strict=True)
    ]
    members = {
        "x": bound("x", f"row<{type_of['x']}>"),
        "q_weight": bound("q_weight", f"gain<{type_of.get('q_weight')}>", "kQ"),
        "k_weight": bound("k_weight", f"gain<{type_of.get('k_weight')}>", "kK"),
        "positions": bound("positions", f"per_row<{type_of.get('positions')}>"),
        "cos_sin": bound("cos_sin_cache", "table"),
        "out": "{" + ", ".join(outs) + "}",
        "eps": "float(eps)",
        "q_scale": "float(output_quant_scale)",
        "v_scale": "float(v_quant_scale)",
        "layout": "layout",
    }
    scalars = [f"double {name}" for name in program.scalars()]
    tensors = [f"TensorView {name}" for name in names]
    parameters = ", ".join(["const QkLayout& layout", *scalars, "bool enable_pdl", *tensors])
    lines = [
        "struct Options {",
        f"  static constexpr Scope kScope = Scope::k{program.scope.capitalize()};",
        f"  static constexpr bool kInterleave = {bool_text(program.interleave)};",
        "};",
        f"using Program = QkNormRope<{', '.join(['Options', *arguments])}>;",
        "",
        f"void launch({parameters}) {{",
        f"  const TensorView tensors[] = {{{', '.join(names)}}};",
        f"  QkOperands operands(tensors, {len(names)}, layout);",
        "  const Program program{",
        *(f"      {init},  // {member}" for member, init in members.items()),
        "  };",
        "  launch_qk(program, operands, enable_pdl);",
        "}",
    ]
    bind = "FLASHNORM_EXPORT_AS(launch, flashnorm::give_bound<launch>(flashnorm::layout_of(given), launch, result))"
    return unit_text(program, HEADERS[route], lines, bind)
