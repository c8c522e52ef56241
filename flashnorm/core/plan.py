"""Plans: how one call, with its dtypes, shapes and strides, becomes one kernel launch.

A plan normalises the operands to what every kernel takes (rows [M, H] or [A, B, H], last stride 1; see
`flashnorm.program.Variant`), chooses the route and holds the loaded kernel. Making one may compile;
using one is a launch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flashnorm import recipe
from flashnorm.config import settings
from flashnorm.core import commands, dispatch, layout
from flashnorm.core import device as devices
from flashnorm.core.checks import dtype_name
from flashnorm.core.tools import tools
from flashnorm.jit import JitError, LoadError, MissingArtifact
from flashnorm.jit.arch import device_arch
from flashnorm.program import Operand, RowProgram, Variant

if TYPE_CHECKING:
    from flashnorm.core.op import Op

log = logging.getLogger("flashnorm")
Launch = Callable[..., Any]

_launches: dict[tuple[str, str, Variant], Launch] = {}
_failed: dict[tuple[str, str, Variant], str] = {}
_said: set[tuple[str, str]] = set()
_build_lock = threading.RLock()


@dataclass(frozen=True)
class View:
    """How the caller's tensor becomes a kernel's operand.

    Attributes:
        position: among the operator's operands.
        size, stride: of the view the kernel takes; None where the tensor is that already.
        expand: shape to broadcast to before a copy, or None.
        copy: the kernel works on a contiguous copy (last stride not 1, or rows no two strides can walk).
        read, write: which way the copy goes.
    """

    position: int
    size: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    expand: tuple[int, ...] | None = None
    copy: bool = False
    read: bool = True
    write: bool = False


@dataclass(frozen=True)
class Plan:
    """A loaded kernel and what it needs from a call.

    Attributes:
        run: takes scalars, enable_pdl and every operand of the operator, None where absent.
        kernel: the kernel itself, over `views`; None where `run` is not one kernel.
        views: of the kernel's operands.
        device: where it runs.
        explanation: the route and why.
    """

    run: Launch
    kernel: Launch | None
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
    if x.numel() == 0:
        return Plan(_nothing, None, (), x.device, dispatch.Explanation(op.name, None, ()))
    device = devices.facts(x.device)
    names = frozenset(o.name for o, t in zip(op.operands, tensors, strict=True) if t is not None)
    program = op.program(names, options)
    variant, views = normalise(op, program, tensors)
    explanation, kernel = _serve(op, variant, device, x.device)
    if explanation.route == "torch":
        return Plan(_reference_launch(op, options), None, (), x.device, explanation)
    return Plan(_over(op, kernel, views), kernel, tuple(views), x.device, explanation)


def explain(op: Op, device: devices.DeviceFacts) -> dispatch.Explanation:
    """The dispatcher's answer for a device, without building anything or looking for kernels."""
    return _choose(op, device, (), tools(), unbuilt())


def preload(op: Op, variant: Variant, where: torch.device) -> None:
    """Makes the kernel of a variant ready, as its first call would."""
    _serve(op, variant, devices.facts(where), where)


def unbuilt() -> frozenset[str]:
    """Routes that need no tools whatever the call: all of them where building is switched off."""
    return frozenset(dispatch.ROUTES if settings.disable_jit else ())


# ------------------------------------------------------------------ operands
def normalise(op: Op, program: RowProgram, tensors: Sequence[torch.Tensor | None]) -> tuple[Variant, list[View]]:
    """The kernel variant of a call and, for each operand of the program, its view."""
    x = tensors[0]
    assert x is not None
    rows, hidden = tuple(x.shape[:-1]), x.shape[-1]
    operands = program.operands()
    given = [tensors[op.index(o.name)] for o in operands]
    strides, copies = [], []
    for operand, tensor in zip(operands, given, strict=True):
        assert tensor is not None
        outer = _outer_strides(operand, tensor, rows)
        packed = operand.kind == "per_row" or tensor.shape[-1] == 1 or tensor.stride(-1) == 1
        copies.append(not packed)
        strides.append(outer if packed else _packed(operand, outer, rows, hidden))
    sizes, grid = layout.collapse(rows, strides)
    if len(sizes) > 2:  # no two strides walk these rows: copy whatever does not collapse by itself
        for i, operand in enumerate(operands):
            if len(layout.collapse(rows, [strides[i]])[0]) > 1:
                copies[i] = True
                strides[i] = _packed(operand, strides[i], rows, hidden)
        sizes, grid = layout.collapse(rows, strides)
    sizes = sizes or (1,)
    grid = [g or (0,) for g in grid]
    views, row_vecs, access = [], [], []
    for i, (operand, tensor) in enumerate(zip(operands, given, strict=True)):
        assert tensor is not None
        outer = grid[i] if copies[i] or operand.kind != "row" else _span_row(grid[i], sizes, hidden)
        whole = operand.kind == "vec" and not any(outer)
        if operand.kind == "vec" and not whole:
            row_vecs.append(operand.name)
        lead = () if whole else sizes
        size, stride = (lead, outer) if operand.kind == "per_row" else ((*lead, hidden), (*(() if whole else outer), 1))
        same = not copies[i] and _is_view(tensor, size, stride)
        views.append(
            View(
                op.index(operand.name),
                None if same else size,
                None if same else stride,
                expand=(*rows, hidden) if copies[i] and operand.kind == "vec" and any(outer) else None,
                copy=copies[i],
                read=operand.mode != "out",
                write=operand.written,
            )
        )
        if operand.kind != "per_row":
            address = 0 if copies[i] else tensor.data_ptr() & (layout.ACCESS_BYTES - 1)
            access.append((address, tensor.element_size(), () if whole else outer))
    variant = Variant(
        program,
        tuple(dtype_name(t) for t in given if t is not None),
        hidden,
        len(sizes),
        tuple(row_vecs),
        layout.access_width(hidden, access),
    )
    return variant, views


def _is_view(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor is the view already; a dimension of size 1 may have any stride."""
    return tuple(tensor.shape) == size and all(
        n == 1 or a == b for n, a, b in zip(size, tensor.stride(), stride, strict=True)
    )


def _outer_strides(operand: Operand, tensor: torch.Tensor, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Strides over the row grid; a vector broadcasts against it with stride 0."""
    if operand.kind == "per_row":
        return tensor.stride()
    lead = tensor.shape[:-1]
    pad = len(rows) - len(lead)
    inner = (0 if n == 1 else s for n, s in zip(lead, tensor.stride()[:-1], strict=True))
    return (*(0 for _ in range(pad)), *inner)


def _packed(operand: Operand, outer: tuple[int, ...], rows: tuple[int, ...], hidden: int) -> tuple[int, ...]:
    """Strides of the contiguous copy of an operand; a vector shared by all rows stays one row."""
    if operand.kind == "vec" and not any(outer):
        return outer
    out, step = [], hidden
    for n in reversed(rows):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def _span_row(outer: tuple[int, ...], sizes: tuple[int, ...], hidden: int) -> tuple[int, ...]:
    """A grid of one row has no stride of its own; H keeps the access width that H alone decides."""
    return (hidden,) if sizes == (1,) else outer


# ------------------------------------------------------------------ launches
def _nothing(*_: Any) -> None:
    """No rows: nothing to do."""


def _over(op: Op, kernel: Launch, views: Sequence[View]) -> Launch:
    """The kernel over the operator's operands: views, and copies in and out, around it."""
    first = len(op.scalars) + 1

    def run(*args: Any) -> None:
        operands, back = [], []
        for view in views:
            tensor = source = args[first + view.position]
            if view.copy:
                tensor = _copy_in(source, view)
                if view.write:
                    back.append((source, tensor))
            operands.append(tensor if view.size is None else tensor.as_strided(view.size, view.stride))
        kernel(*args[:first], *operands)
        for target, tensor in back:
            target.copy_(tensor.view(target.shape))

    return run


def _copy_in(source: torch.Tensor, view: View) -> torch.Tensor:
    shape = source.shape if view.expand is None else view.expand
    if not view.read:
        return torch.empty(shape, dtype=source.dtype, device=source.device)
    return source.expand(shape).clone(memory_format=torch.contiguous_format)


def _reference_launch(op: Op, options: dict[str, Any]) -> Launch:
    count = len(op.scalars)

    def run(*args: Any) -> None:
        op.reference(*args[count + 1 :], **dict(zip(op.scalars, args[:count], strict=True)), **options)

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
    have = dispatch.UNASKED if settings.aot_dirs else tools()
    for route in dispatch.candidates(forced, op.routes, device):
        mine = frozenset({route})
        if route in dict(failed) or dispatch.refusal(route, op.routes, device, have, mine) is not None:
            continue
        if settings.aot_dirs and _there(route, target_of(device), variant):
            return _choose(op, device, failed, have, mine)
        have = tools()
        if dispatch.refusal(route, op.routes, device, have) is None:
            break
        if _there(route, target_of(device), variant):
            return _choose(op, device, failed, have, mine)
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
                    reason = f"{error}\nThis command makes it: {commands.command(op, route, target, variant)}"
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
