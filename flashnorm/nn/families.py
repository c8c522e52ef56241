"""RMSNorm as model families configure it."""

from __future__ import annotations

from typing import Any

from flashnorm.nn.modules import RMSNorm


class RMSNormForGemma(RMSNorm):
    """Gemma: gain w + 1, one rounding, weights of zeros to begin with."""

    def __init__(
        self,
        hidden_size: int | None,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str | int = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
        row_mode: bool | None = None,
        **more: Any,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode, **more)


class RMSNormForGemma2(RMSNormForGemma):
    """Gemma 2: as Gemma."""


class RMSNormForGemma3(RMSNormForGemma):
    """Gemma 3: as Gemma; its modules call the size `dim`."""

    def __init__(self, dim: int, eps: float = 1e-6, *rest: Any, **more: Any) -> None:
        super().__init__(dim, eps, *rest, **more)


class RMSNormForQwen3Next(RMSNormForGemma):
    """Qwen3-Next: as Gemma."""


class RMSNormForMuseGlimmerTextCentered(RMSNormForGemma):
    """MuseGlimmer's text tower: as Gemma."""


class RMSNormForGemma4(RMSNorm):
    """Gemma 4: a plain gain, one rounding; without a gain for `with_scale=False`, on the same kernels."""

    def __init__(
        self,
        dim: int | None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str | int = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        row_mode: bool | None = None,
        with_scale: bool = True,
        **more: Any,
    ) -> None:
        super().__init__(
            dim, eps, offset, casting_mode, init_fn, in_place, row_mode, elementwise_affine=with_scale, **more
        )  # fmt: skip
        self.with_scale = with_scale


class RMSNormForMuseGlimmer(RMSNormForGemma4):
    """MuseGlimmer: as Gemma 4; the size may be left out where there is no gain."""

    def __init__(self, dim: int | None = None, eps: float = 1e-6, *rest: Any, **more: Any) -> None:
        super().__init__(dim, eps, *rest, **more)


class RMSNormForOlmo2(RMSNorm):
    """OLMo 2, as Liger-Kernel configures it. Hugging Face's module rounds as casting_mode="gemma" does."""


class RMSNormForGlm4(RMSNorm):
    """GLM-4: the defaults."""
