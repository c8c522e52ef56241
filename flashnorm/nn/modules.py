"""RMSNorm, plain and with a residual, and LayerNorm as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashnorm import functional

_INITIAL = {"ones": torch.ones, "zeros": torch.zeros}


def _parameter(hidden_size: int, init_fn: str, device: Any, dtype: Any) -> nn.Parameter:
    if isinstance(hidden_size, bool) or not isinstance(hidden_size, int) or hidden_size < 1:
        raise ValueError(f"hidden_size must be a positive integer, got {hidden_size!r}")
    return nn.Parameter(_INITIAL[init_fn](hidden_size, device=device, dtype=dtype))


class _Norm(nn.Module):
    """What the RMSNorm modules have in common: their weight and how it is applied."""

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int | None,
        eps: float,
        offset: float,
        casting_mode: str | int,
        init_fn: str,
        in_place: bool,
        affine: bool,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        if init_fn not in _INITIAL:
            raise ValueError(f"init_fn must be one of 'ones', 'zeros', got {init_fn!r}")
        functional.check_mode(casting_mode, offset)
        if affine and hidden_size is None:
            raise ValueError("hidden_size may be None only where there is no weight")
        weight = _parameter(hidden_size, init_fn, device, dtype) if affine and hidden_size is not None else None
        self.register_parameter("weight", weight)
        self.hidden_size = hidden_size
        self.init_fn = init_fn
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.in_place = in_place

    def reset_parameters(self) -> None:
        """The weight as `init_fn` says."""
        if self.weight is not None:
            nn.init.constant_(self.weight, float(self.init_fn == "ones"))

    def extra_repr(self) -> str:
        parts = [f"{self.hidden_size}", f"eps={self.variance_epsilon}", f"offset={self.offset}"]
        parts += [f"casting_mode={self.casting_mode!r}", f"in_place={self.in_place}"]
        return ", ".join(parts)


class RMSNorm(_Norm):
    r"""RMSNorm over the last dimension.

    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot (w + \mathrm{offset})

    Args:
        hidden_size: H, the length of a row and of the weight.
        eps: added to the mean square; finite and >= 0.
        offset: added to the weight, in fp32.
        casting_mode: "llama", "gemma" or "none", where results are rounded: see `flashnorm.functional.rms_norm`.
        init_fn: "ones" or "zeros", the weight to begin with.
        in_place: the backward writes the gradient of the input over the one that it is given. Off, other than in
            Liger-Kernel: it corrupts that gradient for everybody else who reads it, as in a residual connection.
        row_mode: accepted and not needed.
        elementwise_affine: there is a weight.
        device, dtype: of the weight.

    Shape: [..., H] to [..., H], in the input's dtype.

    Raises:
        ValueError: for a wrong mode, init_fn or size.
    """

    def __init__(
        self,
        hidden_size: int | None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            hidden_size, eps, offset, casting_mode, init_fn, in_place, elementwise_affine, device, dtype
        )  # fmt: skip
        self.row_mode = row_mode
        self.elementwise_affine = elementwise_affine

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return functional.rms_norm(
            hidden_states,
            self.weight,
            self.variance_epsilon,
            offset=self.offset,
            casting_mode=self.casting_mode,
            in_place=self.in_place,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.elementwise_affine else ", elementwise_affine=False")


class FusedAddRMSNorm(_Norm):
    r"""A residual addition and the RMSNorm of the sum.

    .. math::
        s = x + \mathrm{residual}, \quad
        y = \frac{s}{\sqrt{\operatorname{mean}(s^2) + \epsilon}} \cdot (w + \mathrm{offset})

    Args:
        hidden_size, eps, offset, casting_mode, init_fn, device, dtype: those of `RMSNorm`.
        in_place: accepted and not used: the backward makes new gradients.

    Shape: two of [..., H] to (y, s): y in the dtype of `hidden_states`, s in the residual's, rounded once.

    Raises:
        As `RMSNorm`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, True, device, dtype)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(x, residual) -> (norm of their sum, their sum)."""
        return functional.fused_add_rms_norm(
            hidden_states,
            residual,
            self.weight,
            self.variance_epsilon,
            offset=self.offset,
            casting_mode=self.casting_mode,
            in_place=self.in_place,
        )


class LayerNorm(nn.Module):
    r"""LayerNorm over the last dimension.

    .. math:: y = \frac{x - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + \epsilon}} \cdot w + b

    Args:
        hidden_size: H.
        eps: added to the variance; finite and >= 0.
        bias: how the bias begins, as in Liger-Kernel: False zeros, True normal numbers. There always is one.
        init_fn: "ones" or "zeros", the weight to begin with.
        device, dtype: of the parameters.

    Shape: [..., H] to [..., H], in the input's dtype.

    Raises:
        ValueError: for a wrong init_fn or size.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if init_fn not in _INITIAL:
            raise ValueError(f"init_fn must be one of 'ones', 'zeros', got {init_fn!r}")
        self.weight = _parameter(hidden_size, init_fn, device, dtype)
        self.bias = _parameter(hidden_size, "zeros", device, dtype)
        self.hidden_size = hidden_size
        self.init_fn, self.random_bias = init_fn, bool(bias)
        self.variance_epsilon = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight and bias as the arguments say."""
        nn.init.constant_(self.weight, float(self.init_fn == "ones"))
        if self.random_bias:
            nn.init.normal_(self.bias)
        else:
            nn.init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return functional.layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"


class RMSNormFunction:
    """`RMSNormFunction.apply(X, W, eps, ...)`: RMSNorm in the form in which Liger-Kernel's own function is called."""

    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> Tensor:
        """`flashnorm.functional.rms_norm` with positional arguments; `in_place` is off where it is not asked for."""
        return functional.rms_norm(
            X, W, eps, offset=offset, casting_mode=casting_mode, in_place=in_place, row_mode=row_mode
        )
