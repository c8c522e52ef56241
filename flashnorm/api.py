"""Questions a program may ask about flashnorm itself: `explain` and `capabilities`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from flashnorm.config import settings
from flashnorm.core import device as devices
from flashnorm.core import dispatch, plan
from flashnorm.core.op import ALL, OPS, Op
from flashnorm.core.tools import tools
from flashnorm.kernels.tile import BLACKWELL, NATIVE_FP8


def explain(op: str, *tensors: Any, **options: Any) -> dispatch.Explanation:
    """Which route would serve a call, and why every other one would not; nothing is built or launched.

    Args:
        op: a public operator's name, such as "rmsnorm".
        tensors: the call's arguments, as that operator takes them.
        options: its keyword arguments.

    Returns:
        A frozen Explanation(op, route, reasons); its `str` is a table.

    Raises:
        ValueError: for an unknown operator, or an unknown FLASHNORM_BACKEND.
        TypeError: where the arguments do not fit the operator's signature.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(sorted(OPS))}, got {op!r}")
    import flashnorm

    bound = inspect.signature(getattr(flashnorm, op)).bind_partial(*tensors, **options)
    first = next((value for value in bound.arguments.values() if isinstance(value, torch.Tensor)), None)
    if first is None:
        raise TypeError(f"{op}: explain needs at least one tensor")
    return plan.explain(form_of(op, bound.arguments), devices.facts(first.device))


def form_of(op: str, given: Mapping[str, Any]) -> Op:
    """The operator that serves a public function's call: one of its own where rows are picked or widened."""
    rows = any(given.get(name) is not None for name in ("row_index", "input_scale"))
    return ALL.get(f"{op}_rows", OPS[op]) if rows else OPS[op]


def capabilities(device: torch.device | str | None = None) -> dict[str, Any]:
    """What flashnorm can do on a device. Never raises for one that is not there, never initialises CUDA for a CPU one.

    Returns:
        "device"; "capability" ((major, minor), or None); "dsl" (the CuTe DSL's version, or why it cannot serve);
        "routes" (operator -> route, or None); "formats" (encoding -> "native" or "emulated").
    """
    from flashnorm.jit import toolchain

    where = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
    dsl = toolchain.find_dsl()
    if where.type == "cuda" and not torch.cuda.is_available():
        facts = devices.DeviceFacts("absent")
    else:
        facts = devices.facts(where)
    return {
        "device": str(where),
        "capability": facts.capability,
        "dsl": str(dsl) if isinstance(dsl, toolchain.Missing) else dsl.version,
        "routes": {
            name: explanation.route if facts.kind != "absent" else None for name, explanation in routes(facts).items()
        },
        "formats": formats(facts),
    }


def formats(facts: devices.DeviceFacts) -> dict[str, str]:
    """ "native" where the device converts to an encoding by an instruction, else "emulated" (the same bytes)."""
    # A device that the compiler does not know gets portable code, without the instructions of one device or family.
    fp8, four_bits = facts.kind == "cuda" and facts.sm >= NATIVE_FP8, facts.kind == "cuda" and facts.sm in BLACKWELL
    native = {"e4m3": fp8, "e5m2": fp8, "e2m1": four_bits, "ue8m0": four_bits}
    return {name: "native" if there else "emulated" for name, there in native.items()}


def routes(facts: devices.DeviceFacts, have: dispatch.Tools | None = None) -> dict[str, dispatch.Explanation]:
    """The dispatcher's answer for every operator on a device, which need not be here."""
    forced = dispatch.forced_route(settings.backend, settings.use_cuda_norm)
    have = tools() if have is None else have
    unbuilt = plan.unbuilt()
    return {
        name: dispatch.choose(name, op.routes, facts, have, forced, unbuilt=unbuilt) for name, op in sorted(OPS.items())
    }
