"""Which route serves a call: a pure function of facts, with a reason for every route passed over.

Precedence: `with flashnorm.backend(name)`, then `FLASHNORM_BACKEND`, then `FLASHINFER_USE_CUDA_NORM=1`
(which means "cuda"). "cute" and "cuda" bind CUDA tensors only, "cpu" CPU tensors only, "torch" all:
a forced route that does not bind a device leaves that device's own order in force.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

from flashnorm.core.device import DeviceFacts
from flashnorm.jit.arch import device_arch

ROUTES = ("cute", "cuda", "cpu", "torch")
BINDS: dict[str, tuple[str, ...] | None] = {"cute": ("cuda",), "cuda": ("cuda",), "cpu": ("cpu",), "torch": None}
ORDER = {"cuda": ("cute", "cuda"), "cpu": ("cpu", "torch")}  # every other device: torch alone
MIN_SM = {"cute": 80, "cuda": 75}


@dataclass(frozen=True)
class Tools:
    """What this machine can build with. Each entry is None where it can, or the reason why not.

    Attributes:
        dsl: of the CuTe DSL as such (missing, too old, broken).
        dsl_archs: architectures the installed DSL can target.
        nvcc: of the CUDA compiler.
        cxx: of the host compiler and this processor.
    """

    dsl: str | None
    dsl_archs: frozenset[str]
    nvcc: str | None
    cxx: str | None


@dataclass(frozen=True)
class Explanation:
    """Which route serves an operator, and why each other one does not.

    Attributes:
        op: the operator.
        route: the route that serves the call, or None.
        reasons: (route, reason) for every route passed over.
    """

    op: str
    route: str | None
    reasons: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.op}: {'served by ' + self.route if self.route else 'no route'}"]
        lines += [f"  {route:<6} {reason}" for route, reason in self.reasons]
        return "\n".join(lines)


# For a call whose route builds nothing: compilers need not be looked for.
_NOT_ASKED = "its tools were not looked for: nothing is built for this call"
UNASKED = Tools(dsl=_NOT_ASKED, dsl_archs=frozenset(), nvcc=_NOT_ASKED, cxx=_NOT_ASKED)


def refusal(
    route: str,
    op_routes: tuple[str, ...],
    device: DeviceFacts,
    tools: Tools,
    unbuilt: frozenset[str] = frozenset(),
) -> str | None:
    """Why a route cannot serve an operator on a device; None where it can.

    Args:
        unbuilt: routes that build nothing for this call, and so need no tools: their kernel is there already, or
            building is switched off.
    """
    if route not in op_routes:
        return "this operator has no such route"
    binds = BINDS[route]
    if binds is not None and device.kind not in binds:
        return f"serves {' and '.join(binds)} tensors, not {device.kind} ones"
    low = MIN_SM.get(route, 0)
    if device.sm < low:
        return f"needs compute capability {low // 10}.{low % 10} or newer, the device has {_dotted(device)}"
    if route in unbuilt:
        return None
    if route == "cute":
        if tools.dsl is not None:
            return tools.dsl
        assert device.capability is not None
        arch = device_arch(*device.capability).name
        if arch not in tools.dsl_archs:
            return f"the installed CuTe DSL cannot target {arch}"
    return {"cuda": tools.nvcc, "cpu": tools.cxx}.get(route)


def _dotted(device: DeviceFacts) -> str:
    return "{}.{}".format(*device.capability) if device.capability else device.kind


def candidates(forced: str | None, op_routes: tuple[str, ...], device: DeviceFacts) -> tuple[str, ...]:
    """Routes to try, in order. A forced one stands alone where it binds the device."""
    binds = None if forced is None else BINDS[forced]
    if forced is not None and (binds is None or device.kind in binds):
        if forced == "cute" and "cute" not in op_routes:
            return ("cuda",)  # operators that live on the CUDA route alone
        return (forced,)
    return ORDER.get(device.kind, ("torch",))


def choose(
    op: str,
    op_routes: tuple[str, ...],
    device: DeviceFacts,
    tools: Tools,
    forced: str | None = None,
    failed: tuple[tuple[str, str], ...] = (),
    unbuilt: frozenset[str] = frozenset(),
) -> Explanation:
    """The first route that serves, and the reasons of all the others.

    Args:
        failed: routes whose kernel for this call already failed to build or load, with the reason.
        unbuilt: see `refusal`.
    """
    tried = candidates(forced, op_routes, device)
    broken = dict(failed)
    reasons: dict[str, str] = {}
    chosen: str | None = None
    for route in tried:
        reason = broken.get(route) or refusal(route, op_routes, device, tools, unbuilt)
        if reason is None:
            chosen = route
            break
        reasons[route] = reason
    for route in ROUTES:
        if route == chosen or route in reasons:
            continue
        reason = broken.get(route) or refusal(route, op_routes, device, tools, unbuilt)
        if reason is None:
            if forced is not None and tried == (forced,):
                reason = f"{forced} is forced"
            elif chosen is not None and route in tried:
                reason = f"{chosen} comes first"
            else:
                reason = f"never chosen unasked on {device.kind} tensors"
        reasons[route] = reason
    return Explanation(op, chosen, tuple((route, reasons[route]) for route in ROUTES if route in reasons))


# ------------------------------------------------------------------ what the user forces
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("flashnorm_backend", default=None)
forced_here = _forced.get  # a bound method: the fast path calls it once a launch


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Forces a route inside the block: `with flashnorm.backend("cuda"): ...`.

    Args:
        name: "cute" or "cuda" (CUDA tensors only), "cpu" (CPU tensors only), or "torch" (all).

    Raises:
        ValueError: for another name.
    """
    check_name(name)
    token = _forced.set(ROUTES[ROUTES.index(name)])  # that very string: warm calls compare identities
    try:
        yield
    finally:
        _forced.reset(token)


def check_name(name: str, source: str = "backend") -> None:
    if name not in ROUTES:
        raise ValueError(f"{source} must be one of {', '.join(ROUTES)}, got {name!r}")


def forced_route(setting: str | None, use_cuda_norm: bool) -> str | None:
    """What is forced now, by the precedence above; an unknown FLASHNORM_BACKEND raises here, at the first call."""
    here = forced_here()
    if here is not None:
        return here
    if setting is not None:
        check_name(setting, "FLASHNORM_BACKEND")
        return setting
    return "cuda" if use_cuda_norm else None
