"""RMSNorm for training with the functions of FlashInfer's Cake kernels, on every device and for every hidden size.

    y, rstd = cake_rmsnorm_train_forward(x, w, eps)
    dx, dw = cake_rmsnorm_train_backward(g, x, w, rstd)           # dw is fp32 [H]

    y = cake_rmsnorm(x, w, eps)                                   # differentiable, dw in w's dtype
    y, h_new = cake_rmsnorm(x, w, eps, residual=u)

Only rstd is saved, 4 bytes a row. With a residual, what is normalised is the rounded sum h_new. Gradients repeat bit
for bit, whatever the device and however many rows of zero gradient follow. bf16, fp16 and fp32; rows of any stride are
read and written in place, another last stride is copied once.
"""

from __future__ import annotations

from typing import Any

import torch

from flashnorm.core import device as devices
from flashnorm.core import plan
from flashnorm.core.checks import MAX_HIDDEN, check_scalar
from flashnorm.core.op import NUMERICS
from flashnorm.jit.arch import device_arch
from flashnorm.ops.add import add_rmsnorm, add_rmsnorm_with_rstd
from flashnorm.ops.backward import RMSNORM_BACKWARD, rmsnorm_backward
from flashnorm.ops.rmsnorm import RMSNORM, rmsnorm
from flashnorm.program import workspace_floats

__all__ = [
    "ARCHES",
    "SUPPORTED_COMPUTE_CAPABILITIES",
    "CakeRMSNormFunction",
    "cake_rmsnorm",
    "cake_rmsnorm_train_backward",
    "cake_rmsnorm_train_backward_workspace",
    "cake_rmsnorm_train_backward_workspace_bytes",
    "cake_rmsnorm_train_forward",
    "is_cake_rmsnorm_train_supported",
    "route_key",
]

Tensor = torch.Tensor

# Devices that kernels are made for by name. A newer one is served too, by its own name or through PTX.
SUPPORTED_COMPUTE_CAPABILITIES: tuple[tuple[int, int], ...] = (
    (8, 0),
    (8, 6),
    (8, 7),
    (8, 9),
    (9, 0),
    (10, 0),
    (10, 3),
    (10, 7),
    (11, 0),
    (12, 0),
    (12, 1),
)
ARCHES: tuple[str, ...] = tuple(device_arch(*capability).name for capability in SUPPORTED_COMPUTE_CAPABILITIES)

_KINDS = ("fwd", "bwd")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 256  # bytes, of a workspace


def is_cake_rmsnorm_train_supported(device: torch.device | str, hidden: int | None = None) -> bool:
    """Whether a device can train with rows of `hidden` elements, with and without a residual. Never raises."""
    try:
        if hidden is not None and not 1 <= int(hidden) <= MAX_HIDDEN:
            return False
        where = torch.device(device)
        if not devices.present(where):
            return False
        facts = devices.facts(where)
        return all(plan.explain(op, facts).route is not None for op in (RMSNORM, RMSNORM_BACKWARD))
    except Exception:  # whatever is wrong with them
        return False


def route_key(hidden: int, kind: str, residual: bool) -> str:
    """The name of one call: kind ("fwd" or "bwd"), whether there is a residual, and the hidden size."""
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {_KINDS}, got {kind!r}")
    return f"{kind}{'_residual' if residual else ''}_h{int(hidden)}"


def cake_rmsnorm_train_forward(
    x: torch.Tensor,
    w: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    r"""RMSNorm with what its backward needs; nothing is recorded.

    .. math:: r = \frac{1}{\sqrt{\operatorname{mean}(h^2) + \epsilon}}, \quad y = h \cdot r \cdot w

    where h is `x`, or the sum of `x` and the residual, rounded to their dtype.

    Args:
        x: [T, H], bf16, fp16 or fp32, any strides.
        w: [H], any of these dtypes.
        eps: added to the mean square, in fp32.
        residual: [T, H], in the dtype of `x`.
        out: [T, H], in the dtype of `x`, written in place of a new tensor; may be `x` itself.
        rstd: [T], fp32, the same.
        residual_out: [T, H], in the dtype of `x`, the same; may be `residual` itself. Only with a residual.

    Returns:
        (y, rstd), or (y, rstd, h_new) with a residual: the caller's tensors where given.

    Raises:
        TypeError: for something that is no tensor.
        ValueError: for a wrong shape, dtype, device or overlap, before anything is launched.
    """
    rows, hidden = _rows(x, "x")
    _check(w, "w", (hidden,), x.device, _DTYPES)
    for name, tensor, shape, dtype in (
        ("residual", residual, (rows, hidden), x.dtype),
        ("out", out, (rows, hidden), x.dtype),
        ("rstd", rstd, (rows,), torch.float32),
        ("residual_out", residual_out, (rows, hidden), x.dtype),
    ):
        if tensor is not None:
            _check(tensor, name, shape, x.device, (dtype,))
    if residual is None and residual_out is not None:
        raise ValueError("residual_out goes with a residual only")
    with torch.no_grad():
        if residual is None and rstd is None:
            y, r = rmsnorm(x, w, eps, out, numerics="cake", return_rstd=True)
            return y, r
        r = torch.empty(rows, dtype=torch.float32, device=x.device) if rstd is None else rstd
        if residual is not None:
            y, h = add_rmsnorm_with_rstd(x, residual, residual_out, w, out, r, eps, "cake", None)
            return y, r, h
        number = check_scalar(RMSNORM, "eps", eps)
        y = torch.empty_like(x) if out is None else out
        RMSNORM.overload(x, w, y, r, number, NUMERICS["cake"], True)
        return y, r


def cake_rmsnorm_train_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    rstd: torch.Tensor,
    *,
    deterministic: bool = True,
    g_residual: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    dx: torch.Tensor | None = None,
    dw: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""The gradients of RMSNorm.

    .. math::
        dx = r \left(g w - \hat{x} \operatorname{mean}(g w \hat{x})\right) + g_{residual}, \quad
        dw = \sum_t g_t \hat{x}_t, \quad \hat{x} = x r

    Args:
        g: [T, H], the gradient of y, in the dtype of `x`; any strides, also an expanded tensor's.
        x: [T, H], what was normalised: the forward's `x`, or its h_new.
        w: [H].
        rstd: [T], fp32, from the forward.
        deterministic: True; there is no other way.
        g_residual: [T, H], the gradient of h_new itself, added in fp32 before dx is rounded.
        workspace: from `cake_rmsnorm_train_backward_workspace`; its content does not matter, before or after.
        dx: [T, H], in the dtype of `x`, written in place of a new tensor.
        dw: [H], fp32, the same.

    Returns:
        (dx, dw): dx, which is the gradient of the residual too, in the dtype of `x`; dw fp32, zeros where T is 0.

    Raises:
        TypeError: for something that is no tensor.
        ValueError: for a wrong shape, dtype, device or workspace, or deterministic=False.
    """
    _check_deterministic(deterministic)
    rows, hidden = _rows(x, "x")
    _check(g, "g", (rows, hidden), x.device, (x.dtype,))
    _check(w, "w", (hidden,), x.device, _DTYPES)
    _check(rstd, "rstd", (rows,), x.device, (torch.float32,))
    for name, tensor, shape, dtype in (
        ("g_residual", g_residual, (rows, hidden), x.dtype),
        ("dx", dx, (rows, hidden), x.dtype),
        ("dw", dw, (hidden,), torch.float32),
    ):
        if tensor is not None:
            _check(tensor, name, shape, x.device, (dtype,))
    floats = None if workspace is None else _workspace_floats(workspace, hidden, x.device)
    with torch.no_grad():
        wanted: dict[str, Any] = {"dx": x.dtype if dx is None else dx, "dweight": torch.float32 if dw is None else dw}
        made = rmsnorm_backward(g, x, w, rstd, wanted=wanted, g_residual=g_residual, workspace=floats)
    return made["dx"], made["dweight"]


def cake_rmsnorm_train_backward_workspace_bytes(
    rows: int, hidden: int, device: torch.device | str, *, residual: bool = False
) -> int:
    """Bytes of a workspace for the backward of rows of `hidden` elements; the same for every number of rows.

    Args:
        rows: T, not negative.
        hidden: H.
        device: where it will be.
        residual: makes no difference.

    Raises:
        ValueError: for a negative `rows`, or a hidden size that is not served.
    """
    torch.device(device)
    if int(rows) < 0:
        raise ValueError(f"rows must not be negative, got {rows}")
    if not 1 <= int(hidden) <= MAX_HIDDEN:
        raise ValueError(f"hidden must be 1 to {MAX_HIDDEN}, got {hidden}")
    return -(-4 * workspace_floats(1, int(hidden)) // _ALIGNMENT) * _ALIGNMENT


def cake_rmsnorm_train_backward_workspace(
    rows: int, hidden: int, device: torch.device | str, *, residual: bool = False
) -> torch.Tensor:
    """A workspace of zeros, uint8, for any number of rows, again and again, also in a CUDA graph.

    Arguments and errors are those of `cake_rmsnorm_train_backward_workspace_bytes`.
    """
    size = cake_rmsnorm_train_backward_workspace_bytes(rows, hidden, device, residual=residual)
    room = torch.zeros(size + _ALIGNMENT, dtype=torch.uint8, device=device)
    return room.narrow(0, -room.data_ptr() % _ALIGNMENT, size)


class CakeRMSNormFunction(torch.autograd.Function):
    """`CakeRMSNormFunction.apply(x, w, eps, residual, deterministic)`: `cake_rmsnorm` with positional arguments."""

    @staticmethod
    def apply(x: Any, w: Any, eps: float, residual: Any = None, deterministic: bool = True) -> Any:
        """y, or (y, h_new)."""
        return cake_rmsnorm(x, w, eps, residual, deterministic)


def cake_rmsnorm(
    x: torch.Tensor,
    w: torch.Tensor,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    deterministic: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm, of `x` or of its rounded sum with a residual; differentiable.

    Args:
        x, w, eps, residual: those of `cake_rmsnorm_train_forward`.
        deterministic: True; there is no other way.

    Returns:
        y, or (y, h_new) with a residual.

    Raises:
        As `cake_rmsnorm_train_forward`, and ValueError for deterministic=False.
    """
    _check_deterministic(deterministic)
    rows, hidden = _rows(x, "x")
    _check(w, "w", (hidden,), x.device, _DTYPES)
    if residual is not None:
        _check(residual, "residual", (rows, hidden), x.device, (x.dtype,))
        return add_rmsnorm(x, residual, w, eps, numerics="cake")
    return rmsnorm(x, w, eps, numerics="cake")


# ------------------------------------------------------------------ checks
def _check_deterministic(deterministic: bool) -> None:
    if not deterministic:
        raise ValueError("deterministic=False is not served: every gradient here repeats bit for bit")


def _rows(x: Any, name: str) -> tuple[int, int]:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim != 2:
        raise ValueError(f"{name} must be a [T, H] tensor, got shape {tuple(x.shape)}")
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
    return x.shape[0], x.shape[1]


def _check(
    tensor: Any, name: str, shape: tuple[int, ...], device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def _workspace_floats(workspace: Any, hidden: int, device: torch.device) -> Tensor:
    """The bytes that a caller owns, as the backward takes them."""
    if not isinstance(workspace, torch.Tensor):
        raise TypeError(f"workspace must be a torch.Tensor, got {type(workspace).__name__}")
    if workspace.device != device or workspace.dtype != torch.uint8 or workspace.ndim != 1:
        raise ValueError(
            f"workspace must be a 1-D uint8 tensor on {device}, got {workspace.dtype} {tuple(workspace.shape)} on "
            f"{workspace.device}"
        )
    size = cake_rmsnorm_train_backward_workspace_bytes(0, hidden, device)
    if workspace.numel() < size:
        raise ValueError(f"workspace holds {workspace.numel()} bytes, this call needs {size}")
    if not workspace.is_contiguous() or workspace.data_ptr() % _ALIGNMENT:
        raise ValueError(f"workspace must be contiguous and its address a multiple of {_ALIGNMENT} bytes")
    return workspace[:size].view(torch.float32)
