"""`flashnorm explain OP`: which route serves a call, why each other one does not, and whether its kernel is there yet.

Nothing is built or launched, and the device need not be here.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from flashnorm import __main__ as cli
from flashnorm.config import settings
from flashnorm.core import checks, dispatch, plan
from flashnorm.core import device as devices
from flashnorm.core.op import OPS, Op
from flashnorm.core.tools import tools
from flashnorm.jit import toolchain
from flashnorm.jit.env import JitError, Missing
from flashnorm.program import Variant

DTYPES = {
    name: dtype
    for dtype, names in {
        torch.float32: ("fp32", "f32", "float32", "float"),
        torch.float16: ("fp16", "f16", "float16", "half"),
        torch.bfloat16: ("bf16", "bfloat16"),
    }.items()
    for name in names
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", help=f"one of {', '.join(sorted(OPS))}")
    parser.add_argument("--shape", default="64x4096", metavar="MxH", help="of the input, any rank (default: 64x4096)")
    parser.add_argument("--dtype", default="bf16", help="of the input: fp32, fp16 or bf16 (default: bf16)")
    parser.add_argument("--weight-dtype", metavar="DTYPE", help="default: the input's; none: no weight")
    parser.add_argument("--residual-dtype", metavar="DTYPE", help="default: the input's")
    parser.add_argument("--numerics", default="flashinfer", help="a rounding mode (default: flashinfer)")
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
    op = OPS[arguments.op]
    name, facts, here = _where(arguments)
    variant, dtypes = _variant(op, arguments)
    explanation = plan.explain(op, facts)
    reasons = dict(explanation.reasons)
    routes = []
    for route in dispatch.ROUTES:
        reason = reasons.get(route)
        # What is merely second in line could serve: its kernel is of interest too.
        serves = dispatch.refusal(route, op.routes, facts, tools()) is None
        kernel = _kernel(route, variant, facts, here) if serves else None
        routes.append({"route": route, "chosen": route == explanation.route, "reason": reason, "kernel": kernel})
    return {
        "op": op.name,
        "shape": list(_shape(arguments.shape)),
        "dtypes": dtypes,
        "numerics": arguments.numerics,
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


def _dtype(option: str, text: str) -> torch.dtype:
    if text.lower() not in DTYPES:
        raise ValueError(f"{option} must be one of fp32, fp16, bf16, got {text!r}")
    return DTYPES[text.lower()]


def _variant(op: Op, arguments: argparse.Namespace) -> tuple[Variant, dict[str, str]]:
    """The kernel variant of a contiguous call, checked as the call itself is, without any memory."""
    shape = _shape(arguments.shape)
    input_dtype = _dtype("--dtype", arguments.dtype)
    present: dict[str, torch.Tensor | None] = {}
    for operand in op.operands:
        if operand.name in op.optional and operand.name != "weight":
            continue
        asked = getattr(arguments, f"{operand.name}_dtype", None)
        if operand.name == "weight" and asked is not None and asked.lower() == "none":
            continue
        dtype = input_dtype if asked is None else _dtype(f"--{operand.name}-dtype", asked)
        of = shape[-1:] if operand.kind == "vec" else shape
        present[operand.name] = torch.empty(of, dtype=dtype, device="meta")
    if arguments.residual_dtype is not None and "residual" not in present:
        raise ValueError(f"{op.name} takes no residual")
    tensors = [present.get(operand.name) for operand in op.operands]
    checks.check_tensors(op, tensors)
    options = {
        key: checks.check_option(op, key, arguments.numerics) if key == "numerics" else next(iter(values.values()))
        for key, values in op.options.items()
    }
    variant, _ = plan.normalise(op, op.program(frozenset(present), options), tensors)
    return variant, {op.labels.get(name, name): checks.dtype_name(t) for name, t in present.items() if t is not None}


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
    dtypes = ", ".join(f"{name} {dtype}" for name, dtype in found["dtypes"].items() if name != "out")
    title = f"{found['op']}, {'x'.join(map(str, found['shape']))}, {dtypes}, {found['numerics']}"
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
