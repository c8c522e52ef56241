"""Plans: how one call, with its dtypes, shapes and strides, becomes one kernel launch.

A plan knows the call's operands as its kernel takes them (`core.operands`), the route that serves it, and the loaded
kernel. Making one may compile; using one is a launch.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flashnorm import recipe
from flashnorm.config import settings
from flashnorm.core import commands, dispatch
from flashnorm.core import device as devices
from flashnorm.core.checks import scales_view
from flashnorm.core.operands import Launch, View, grid_of, leading_arguments, normalise, over
from flashnorm.core.tools import asked, tools
from flashnorm.jit import JitError, LoadError, MissingArtifact
from flashnorm.jit.arch import device_arch
from flashnorm.program import SCALES, Operand, Program, Variant

if TYPE_CHECKING:
    from flashnorm.core.op import Op

log = logging.getLogger("flashnorm")

_launches: dict[tuple[str, str, Variant], Launch] = {}
_failed: dict[tuple[str, str, Variant], str] = {}
_said: set[tuple[str, str]] = set()
_build_lock = threading.RLock()


@dataclass(frozen=True)
class Plan:
    """A loaded kernel and what it needs from a call.

    Attributes:
        run: takes scalars, enable_pdl and every operand of the operator, None where absent.
        kernel: the kernel itself, over `views`; None where `run` is not one kernel.
        leading: which of the operator's scalars and enable_pdl the program takes, in front of operands.
        views: of the kernel's operands.
        device: where it runs.
        explanation: the route and why.
    """

    run: Launch
    kernel: Launch | None
    leading: tuple[int, ...]
    views: tuple[View, ...]
    device: torch.device
    explanation: dispatch.Explanation

    def on_device(self, launch: Launch) -> Launch:
        """With several GPUs: makes the tensors' device current around a launch."""
        if self.device.type != "cuda" or not devices.several_gpus():
            return launch

        def run(*args: Any) -> Any:
            if torch.cuda.current_device() == self.device.index:
                return launch(*args)
            with torch.cuda.device(self.device):
                return launch(*args)

        return run


def make_plan(op: Op, tensors: Sequence[torch.Tensor | None], options: dict[str, Any]) -> Plan:
    """Chooses, builds or loads the kernel of one call (validated before)."""
    x = tensors[0]
    assert x is not None
    program = op.program_of(tensors, options)
    operands, leading = program.operands(), tuple(leading_arguments(op, program))
    grid = grid_of(operands, [tensors[op.index(o.name)] for o in operands])
    if 0 in grid:
        return Plan(_no_rows(op, operands), None, leading, (), x.device, dispatch.Explanation(op.name, None, ()))
    variant, views = normalise(op, program, tensors)
    explanation, kernel = _serve(op, variant, devices.facts(x.device), x.device)
    if explanation.route == "torch":
        return Plan(_reference_launch(op, program, options, math.prod(grid)), None, leading, (), x.device, explanation)
    run = over(op, program, kernel, views)
    return Plan(run, kernel, leading, tuple(views), x.device, explanation)


def explain(op: Op, device: devices.DeviceFacts) -> dispatch.Explanation:
    """The dispatcher's answer for a device, without building anything or looking for kernels."""
    return _choose(op, device, (), tools(), unbuilt())


def preload(op: Op, variant: Variant, where: torch.device) -> None:
    """Makes the kernel of a variant ready, as its first call would."""
    _serve(op, variant, devices.facts(where), where)


def kernels_ready() -> int:
    """How many kernels this process has built or loaded."""
    return len(_launches)


def unbuilt() -> frozenset[str]:
    """Routes that need no tools whatever the call: all of them where building is switched off."""
    return frozenset(dispatch.ROUTES if settings.disable_jit else ())


# ------------------------------------------------------------------ launches
def _nothing(*_: Any) -> None:
    """Nothing to do."""


def _no_rows(op: Op, operands: Sequence[Operand]) -> Launch:
    """Without rows, only sums over rows are written: zeros."""
    sums = [len(op.scalars) + 1 + op.index(o.name) for o in operands if o.kind == "vec" and o.written]
    if not sums:
        return _nothing

    def run(*args: Any) -> None:
        for i in sums:
            args[i].zero_()

    return run


def _reference_launch(op: Op, program: Program, options: dict[str, Any], rows: int) -> Launch:
    count = len(op.scalars)
    names = [o.name for o in op.operands]

    def run(*args: Any) -> None:
        given = dict(zip((*op.scalars, *names), (*args[:count], *args[count + 1 :]), strict=True))
        hidden = given["x"].shape[-1]
        for operand in program.operands():
            tensor = given[operand.name]
            if operand.raw:
                tensor = given[operand.name] = tensor.view(torch.uint8)
            if operand.kind in SCALES:
                view = scales_view(op, program, operand, tensor, rows, hidden)
                given[operand.name] = tensor.as_strided(*view, tensor.storage_offset())
        op.reference(**given, **options)

    return run


# ------------------------------------------------------------------ routes
def _choose(
    op: Op,
    device: devices.DeviceFacts,
    failed: tuple[tuple[str, str], ...],
    have: dispatch.Tools,
    without_tools: frozenset[str],
) -> dispatch.Explanation:
    forced = dispatch.forced_route(settings.backend, settings.use_cuda_norm)
    return dispatch.choose(op.name, op.routes, device, have, forced, failed, without_tools)


def target_of(device: devices.DeviceFacts) -> str:
    return "host" if device.capability is None else device_arch(*device.capability).name


def _choose_for(
    op: Op, variant: Variant, device: devices.DeviceFacts, failed: tuple[tuple[str, str], ...]
) -> dispatch.Explanation:
    """The route of one call. Tools are looked for only where no kernel is there already."""
    if settings.disable_jit:
        return _choose(op, device, failed, dispatch.UNASKED, unbuilt())
    forced = dispatch.forced_route(settings.backend, settings.use_cuda_norm)
    candidates = dispatch.candidates(forced, op.routes, device)
    for route in candidates:
        mine = frozenset({route})
        if route in dict(failed) or dispatch.refusal(route, op.routes, device, dispatch.UNASKED, mine) is not None:
            continue
        # A kernel that is there needs no compiler: asking all of them takes longer than loading it. Where it is the
        # second choice, people want to know what the first one lacks.
        if _there(route, target_of(device), variant):
            unasked = (settings.aot_dirs and not asked()) or route == candidates[0]
            return _choose(op, device, failed, dispatch.UNASKED if unasked else tools(), mine)
        if dispatch.refusal(route, op.routes, device, tools()) is None:
            break
    return _choose(op, device, failed, tools(), frozenset())


def _there(route: str, target: str, variant: Variant) -> bool:
    """Whether the kernel lies in a folder of precompiled ones, or in the cache."""
    from flashnorm import backends

    if route == "torch":
        return False
    if (route, target, variant) in _launches:
        return True
    try:
        return backends.artifact(route, variant, target).lookup() is not None
    except (KeyError, ValueError, JitError):  # nothing of the kind can exist
        return False


def _serve(
    op: Op, variant: Variant, device: devices.DeviceFacts, where: torch.device
) -> tuple[dispatch.Explanation, Launch]:
    """The first route whose kernel can be had; one that fails to build is skipped for the process."""
    failed: list[tuple[str, str]] = []
    target = target_of(device)
    while True:
        explanation = _choose_for(op, variant, device, tuple(failed))
        route = explanation.route
        if route is None:
            raise _no_route(op, device, explanation)
        _say_fallback(op, device, explanation)
        if route == "torch":
            return explanation, _nothing
        reason = _failed.get((route, target, variant))
        if reason is None:
            try:
                launch = _kernel(route, target, variant, where)
                recipe.note(recipe.Kernel(op.name, route, target, variant))
                return explanation, launch
            except _ColdCapture:
                raise
            except Exception as error:  # any failure to build or load means: the next route
                reason = f"failed to {'load' if isinstance(error, LoadError) else 'build'}: {error}"
                if isinstance(error, MissingArtifact):
                    command = commands.command(op, route, target, variant)
                    reason = f"`{command}` makes its kernel, for FLASHNORM_AOT_DIR=DIR; {error}"
                if settings.strict:
                    raise (MissingArtifact(reason) if isinstance(error, MissingArtifact) else error) from None
                _failed[(route, target, variant)] = reason
        failed.append((route, reason))


class _ColdCapture(RuntimeError):
    pass


def _kernel(route: str, target: str, variant: Variant, where: torch.device) -> Launch:
    key = (route, target, variant)
    launch = _launches.get(key)
    if launch is None:
        if where.type == "cuda" and devices.capturing():
            raise _ColdCapture(
                "flashnorm: first call of this variant inside a CUDA graph capture; "
                "call it once with the same dtypes and hidden size before capturing"
            )
        from flashnorm.backends import builder

        with _build_lock:
            launch = _launches.get(key)
            if launch is None:
                launch = _launches[key] = builder(route)(variant, target)
    return launch


def _no_route(op: Op, device: devices.DeviceFacts, explanation: dispatch.Explanation) -> Exception:
    forced = dispatch.forced_route(settings.backend, settings.use_cuda_norm)
    reasons = dict(explanation.reasons)
    tried = dispatch.candidates(forced, op.routes, device)
    text = "; ".join(f"{route}: {reasons[route]}" for route in tried)
    if forced in tried or (forced == "cute" and tried == ("cuda",)):
        return ValueError(f"{op.name}: the {forced} route is forced but cannot serve: {text}")
    return RuntimeError(f"{op.name}: no route for {device.kind} tensors; {text}")


def _say_fallback(op: Op, device: devices.DeviceFacts, explanation: dispatch.Explanation) -> None:
    """One log line for each reason why a device's first route is not used; an error under strict mode."""
    forced = dispatch.forced_route(settings.backend, settings.use_cuda_norm)
    first = dispatch.candidates(forced, op.routes, device)[0]
    if explanation.route == first or first not in op.routes:
        return
    reason = dict(explanation.reasons)[first]
    line = f"{op.name}: {explanation.route} route in place of {first}: {reason}"
    if settings.strict:
        raise RuntimeError(f"{line} (FLASHNORM_STRICT=1 forbids the fallback)")
    if (first, reason) not in _said:
        _said.add((first, reason))
        log.warning("%s", line)
