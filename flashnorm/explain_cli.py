"""`flashnorm explain OP`: which route serves a call, why each other one does not, and whether its kernel is there yet.

Nothing is built or launched, and the device need not be here. A kernel that is there, in a folder of precompiled ones
or in the cache, serves without the tools that would build it: the answer is what the call itself would get.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from flashnorm import __main__ as cli
from flashnorm.api import form_of
from flashnorm.config import settings
from flashnorm.core import checks, dispatch, layout, plan
from flashnorm.core import device as devices
from flashnorm.core.op import OPS, Op
from flashnorm.core.tools import tools
from flashnorm.jit import toolchain
from flashnorm.jit.env import JitError, Missing
from flashnorm.program import FLOATS, Operand, Variant

_NAMES = {
    "float32": ("fp32", "f32", "float32", "float"),
    "float16": ("fp16", "f16", "float16", "half"),
    "bfloat16": ("bf16", "bfloat16"),
    "float8_e4m3fn": ("e4m3", "e4m3fn", "float8_e4m3fn"),
    "float8_e5m2": ("e5m2", "float8_e5m2"),
    "int8": ("int8",),
    "int32": ("int32",),
    "int64": ("int64",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", help=f"one of {', '.join(sorted(OPS))}")
    parser.add_argument("--shape", default="64x4096", metavar="MxH", help="of the input, any rank (default: 64x4096)")
    parser.add_argument("--dtype", default="bf16", help="of the input: fp32, fp16, bf16, of some int8 (default: bf16)")
    parser.add_argument("--weight-dtype", metavar="DTYPE", help="default: the input's; none: no weight")
    parser.add_argument("--bias-dtype", metavar="DTYPE", help="default: the weight's, or the input's; none: no bias")
    parser.add_argument("--residual-dtype", metavar="DTYPE", help="default: the input's")
    parser.add_argument("--out-dtype", metavar="DTYPE", help="of quantised outputs: e4m3, e5m2 or int8 (default: e4m3)")
    parser.add_argument("--row-index", metavar="DTYPE", help="rows picked by an index: int32 or int64")
    parser.add_argument("--numerics", default="flashinfer", help="a rounding mode (default: flashinfer)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another option, such as granularity=128 (may be repeated)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--arch", metavar="SM", help="a GPU that need not be here, such as sm_107a")
    where.add_argument("--device", metavar="DEVICE", help="cuda:0, cpu, ... (default: the first GPU, else the CPU)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the answer; 1 where no route serves the call, 2 for a question that makes no sense."""
    try:
        found = answer(arguments)
    except ValueError as error:
        print(f"flashnorm explain: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        cli.print_json(found)
    else:
        _print(found)
    return 0 if found["route"] else 1


def answer(arguments: argparse.Namespace) -> dict[str, Any]:
    """The answer as plain data.

    Raises:
        ValueError: an unknown operator, dtype, shape, option, architecture or device.
    """
    if arguments.op not in OPS:
        raise ValueError(f"OP must be one of {', '.join(sorted(OPS))}, got {arguments.op!r}")
    op = _form(arguments)
    name, facts, here = _where(arguments)
    variant, dtypes = _variant(op, arguments)
    ready = frozenset(route for route in op.routes if _is_ready(route, op, variant, facts))
    explanation = _explanation(op, variant, facts, ready)
    reasons = dict(explanation.reasons)
    routes = []
    for route in dispatch.ROUTES:
        reason, chosen = reasons.get(route), route == explanation.route
        refusal = dispatch.refusal(route, op.routes, facts, tools())
        if refusal is not None and chosen:
            reason = f"its kernel is there, and only building another one fails: {refusal}"
        # What is merely second in line could serve: its kernel is of interest too.
        kernel = _kernel(route, variant, facts, here) if refusal is None or route in ready else None
        routes.append({"route": route, "chosen": chosen, "reason": reason, "kernel": kernel})
    return {
        "op": op.called,
        "shape": list(_shape(arguments.shape)),
        "dtypes": dtypes,
        "numerics": arguments.numerics,
        "options": dict(text.split("=", 1) for text in arguments.option),
        "device": name,
        "here": here,
        "capability": facts.capability,
        "forced": dispatch.forced_route(settings.backend, settings.use_cuda_norm),
        "access_width": variant.vec,
        "route": explanation.route,
        "routes": routes,
    }


def _where(arguments: argparse.Namespace) -> tuple[str, devices.DeviceFacts, bool]:
    """The device's name, its facts, and whether it is here."""
    if arguments.arch is not None:
        arch = toolchain.parse_arch(arguments.arch)
        return arch.name, devices.DeviceFacts("cuda", arch.capability), False
    present = devices.visible()
    if arguments.device is None:
        return str(present[0]), devices.facts(present[0]), True
    try:
        device = torch.device(arguments.device)
    except RuntimeError as error:
        raise ValueError(f"--device {arguments.device}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device not in present:
            raise ValueError(f"there is no {device} here; --arch sm_90a asks about a GPU that is somewhere else")
    return str(device), devices.facts(device), device.type in ("cpu", "cuda")


def _shape(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--shape looks like 64x4096, got {text!r}")
    return tuple(map(int, parts))


def _dtype(option: str, text: str, accepted: tuple[str, ...]) -> str:
    dtype = next((dtype for dtype in accepted if text.lower() in _NAMES[dtype]), None)
    if dtype is None:
        known = ", ".join(_NAMES[dtype][0] for dtype in accepted)
        raise ValueError(f"{option} must be one of {known}, got {text!r}")
    return dtype


def _form(arguments: argparse.Namespace) -> Op:
    """The operator behind the call: one of its own where rows are picked, or widened from int8."""
    index, widened = getattr(arguments, "row_index", None), _is_int8(arguments)
    op = form_of(arguments.op, {"row_index": index, "input_scale": widened or None})
    if (index or widened) and op is OPS[arguments.op]:
        raise ValueError(f"{op.called} takes no {'int8 rows' if widened else 'row_index'}")
    return op


def _is_int8(arguments: argparse.Namespace) -> bool:
    return str(arguments.dtype).lower() in _NAMES["int8"]


def _variant(op: Op, arguments: argparse.Namespace) -> tuple[Variant, dict[str, str]]:
    """The kernel variant of a contiguous call, and its dtypes by what users call the operands."""
    shape, asked = _shape(arguments.shape), vars(arguments)
    given = {name: asked[f"{name}_dtype"] for name in ("weight", "bias", "residual", "out")}
    given["row_index"] = asked.get("row_index")
    known = {operand.name for operand in op.operands}
    for name, text in given.items():
        if text is not None and name not in known:
            raise ValueError(f"{op.name} takes no {name}")
    absent = {name for name in ("weight", "bias") if given[name] is not None and given[name].lower() == "none"}
    there = {"weight", "bias", *(("row_index",) if given["row_index"] else ())}
    there |= {"input_scale"} if _is_int8(arguments) else set()
    absent |= {operand.name for operand in op.operands if operand.name in op.optional} - there
    options = _options(op, arguments)
    program = op.program(frozenset(known - absent), options)
    checks.check_present(op, [torch.empty(shape, device="meta") if o.name not in absent else None for o in op.operands])
    dtypes = {"x": _dtype("--dtype", arguments.dtype, program.operands()[0].dtypes)}
    for operand in program.operands()[1:]:
        text = given.get(operand.name)
        first, accepted = _dtypes_of(operand, dtypes)
        option = "--row-index" if operand.name == "row_index" else f"--{operand.name}-dtype"
        dtypes[operand.name] = first if text is None else _dtype(option, text, accepted)
    vec = layout.access_width(shape[-1], [(0, 1, (shape[-1],))])
    carried = tuple(operand.carried(dtypes[operand.name]) for operand in program.operands())
    variant = Variant(program, carried, shape[-1], vec=vec)
    return variant, {op.labels.get(name, name): dtype for name, dtype in dtypes.items()}


def _dtypes_of(operand: Operand, before: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    """The dtype that an operand has where none is asked for, and those that it may have, by the operands before it."""
    x = before["x"]
    if x == "int8" and operand.like == "x":  # widened: the result is of the weight's dtype
        return before.get("weight", "bfloat16"), FLOATS
    if operand.like is not None:
        first = before.get(operand.like, x)
        return first, (first,)
    if operand.name == "bias" and "weight" in before:
        return before["weight"], operand.dtypes
    if x == "int8" and operand.name == "weight":
        return "bfloat16", operand.dtypes
    return (x if x in operand.dtypes else operand.dtypes[0]), operand.dtypes


def _options(op: Op, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every option of the operator: the first of its values where the command line names none."""
    chosen = dict(text.split("=", 1) if "=" in text else (text, "") for text in arguments.option)
    unknown = sorted(set(chosen) - set(op.options) | {"numerics"} & set(chosen))
    if unknown:
        others = ", ".join(sorted(set(op.options) - {"numerics"})) or "no further option"
        raise ValueError(f"--option: {op.name} takes {others}, got {', '.join(unknown)}")
    chosen["numerics"] = arguments.numerics
    return {
        key: checks.check_option(op, key, chosen[key]) if key in chosen else next(iter(values.values()))
        for key, values in op.options.items()
    }


# ------------------------------------------------------------------ which route
def _is_ready(route: str, op: Op, variant: Variant, facts: devices.DeviceFacts) -> bool:
    """Whether the route serves this device with a kernel that is there, whatever tools are missing."""
    if dispatch.refusal(route, op.routes, facts, tools(), frozenset({route})) is not None:
        return False
    return plan._there(route, plan.target_of(facts), variant)


def _explanation(op: Op, variant: Variant, facts: devices.DeviceFacts, ready: frozenset[str]) -> dispatch.Explanation:
    """The dispatcher's answer to this very call; `plan.explain` knows the operator and the device alone."""
    this = (plan.target_of(facts), variant)
    failed = {route: reason for (route, *what), reason in plan._failed.items() if tuple(what) == this}
    for route in ("cute", "cuda", "cpu") if settings.disable_jit else ():
        possible = dispatch.refusal(route, op.routes, facts, tools(), frozenset({route})) is None
        if possible and route not in ready:
            failed.setdefault(route, "its kernel is not there, and FLASHNORM_DISABLE_JIT forbids building it")
    forced = dispatch.forced_route(settings.backend, settings.use_cuda_norm)
    return dispatch.choose(op.name, op.routes, facts, tools(), forced, tuple(failed.items()), ready | plan.unbuilt())


# ------------------------------------------------------------------ the kernel behind a route
def _kernel(route: str, variant: Variant, facts: devices.DeviceFacts, here: bool) -> dict[str, Any] | None:
    """What a route's kernel is compiled for, and where it is kept already; None for a route without one."""
    if route == "torch":
        return None
    from flashnorm.backends import artifact

    target = "host" if facts.capability is None else toolchain.device_arch(*facts.capability).name
    made_for = {"cpu": toolchain.detect_cpu().machine, "cuda": _nvcc_target(target)}.get(route, target)
    try:
        spec = artifact(route, variant, target)
        path = spec.lookup()
    except (JitError, KeyError, ValueError) as error:
        return {"name": None, "compiled_for": None, "path": None, "detail": str(error)}
    if path is not None:
        detail = f"compiled for {made_for}, in {path}"
    elif settings.disable_jit:
        detail = f"missing, and FLASHNORM_DISABLE_JIT forbids building it for {made_for}"
    else:
        detail = f"compiled for {made_for} at the first call" if here else f"not compiled yet for {made_for}"
    return {"name": spec.name, "compiled_for": made_for, "path": None if path is None else str(path), "detail": detail}


def _nvcc_target(arch: str) -> str:
    """What nvcc compiles for an architecture: itself, or PTX of one below it."""
    nvcc = toolchain.find_nvcc()
    if arch == "host" or isinstance(nvcc, Missing):
        return arch
    target = nvcc.target(arch)
    if isinstance(target, Missing):
        return arch
    return f"{target.compiled_for} (PTX)" if target.is_ptx else target.compiled_for


def _print(found: dict[str, Any]) -> None:
    console = cli.console()
    dtypes = ", ".join(f"{name} {dtype}" for name, dtype in found["dtypes"].items())
    title = f"{found['op']}, {'x'.join(map(str, found['shape']))}, {dtypes}, {found['numerics']}"
    title += "".join(f", {name} {value}" for name, value in found["options"].items())
    where = found["device"] + ("" if found["here"] else " (not here)")
    if found["capability"]:
        where += " compute capability {}.{}".format(*found["capability"])
    table = Table("route", "", "why", title=f"{title}\non {where}", title_justify="left")
    table.add_column("kernel", overflow="fold")
    for row in found["routes"]:
        mark = "[green]serves[/green]" if row["chosen"] else ""
        table.add_row(row["route"], mark, escape(row["reason"] or ""), escape((row["kernel"] or {}).get("detail", "")))
    console.print(table)
    if found["forced"]:
        console.print(f"the route {found['forced']} is forced by the environment")
    if not found["route"]:
        console.print("[red]no route serves this call[/red]")
