"""From a backward program to the C++ unit that binds it, as codegen.py; for the one struct of csrc/.../backward/."""

from __future__ import annotations

from ..program import BackwardProgram, rounding
from .codegen_text import CPP_TYPES, Route, bool_text, float_text, unit_text

# What a route includes; each defines flashnorm::launch_backward(program, operands, workspace_elements, enable_pdl).
HEADERS: dict[Route, str] = {
    "cuda": "flashnorm/ffi/backward_launch.h",
    "cpu": "flashnorm/cpu/backward_launch.h",
}
# The struct's element types, in its order, and its members in theirs.
_TYPES = ("dout", "x", "weight", "g_residual", "dx", "dresidual", "dweight", "dbias")
_MEMBERS = (
    "dout", "x", "weight", "mean", "rest", "rstd", "g_residual", "dx", "dresidual", "dweight", "dbias", "workspace",
)  # fmt: skip


def unit(program: BackwardProgram, dtypes: tuple[str, ...], route: Route) -> str:
    """The source text of a unit that exports `launch(enable_pdl, *operands)`.

    Args:
        program: what is computed.
        dtypes: one dtype name for each of `program.operands()`, in that order.
        route: whose kernels are launched.

    Raises:
        KeyError: a dtype that no C++ type stands for.
        ValueError: not as many dtypes as operands.
    """
    operands = program.operands()
    if len(dtypes) != len(operands):
        raise ValueError(f"{len(dtypes)} dtypes for {len(operands)} operands")
    index = {operand.name: i for i, operand in enumerate(operands)}
    types = {operand.name: CPP_TYPES[dtype] for operand, dtype in zip(operands, dtypes, strict=True)}
    const = {operand.name: "" if operand.written else "const " for operand in operands}

    def member(name: str) -> str:
        if name not in index:
            return "nullptr" if name == "workspace" else "{}"
        bind = "per_row" if name in ("mean", "rest", "rstd") else name if name == "workspace" else "row"
        return f"operands.{bind}<{const[name]}{types[name]}>({index[name]})"

    elements = ", ".join(types.get(name, "void") for name in _TYPES)
    parameters = ["bool enable_pdl", *(f"TensorView {name}" for name in index)]
    lines = [
        "struct Options {",
        f"  using Input = {CPP_TYPES[rounding(program, dtypes)]};",
        f"  static constexpr bool kLayer = {bool_text(program.norm == 'layer')};",
        f"  static constexpr bool kRoundNorm = {bool_text(program.round_norm)};",
        f"  static constexpr float kOffset = {float_text(program.offset)};",
        "};",
        f"using Program = Backward<Options, {elements}>;",
        "",
        f"void launch({', '.join(parameters)}) {{",
        f"  const TensorView tensors[] = {{{', '.join(index)}}};",
        f"  Operands operands(tensors, {len(index)}, 0);",
        "  const Program program{",
        *(f"      {member(name)},  // {name}" for name in _MEMBERS),
        "  };",
        f"  launch_backward(program, operands, {'workspace.numel()' if program.sums else '0'}, enable_pdl);",
        "}",
    ]
    return unit_text(program, HEADERS[route], lines)
