"""RMSNorm with block scales that are found from the norm itself: FP8 and int8, per token or per 1x128 block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashnorm import reference
from flashnorm.core.checks import FLT_MAX, check_dtype_of, check_option, check_whole_blocks
from flashnorm.core.op import NUMERICS, Op
from flashnorm.ops import programs
from flashnorm.program import QuantBlocks, Rms, Round, RowProgram, Stage

Tensor = torch.Tensor
Layout = tuple[tuple[int, ...], tuple[int, ...]]
BLOCK = 128
TMA_ROWS = 4  # fp32 column-major scales are read by TMA, whose strides are multiples of 16 bytes

GRANULARITY = {"token": "token", BLOCK: "128", "128": "128"}
SCALE_FORMAT = {"fp32": "fp32", "ue8m0": "ue8m0", "ue8m0_packed": "ue8m0_packed"}
SCALE_DTYPES = {"fp32": torch.float32, "ue8m0": torch.uint8, "ue8m0_packed": torch.int32}
OUT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def padded(rows: int) -> int:
    """M rounded up to what TMA reads."""
    return -(-rows // TMA_ROWS) * TMA_ROWS


def _fp8_store(present: programs.Present, options: programs.Options) -> Stage:
    return QuantBlocks(BLOCK, floor=1e-4, ratio=True, side=True)


def _dynamic_store(present: programs.Present, options: programs.Options) -> Stage:
    token, form = options["granularity"] == "token", options["scale_format"]
    cap = ("device" if "scale_ub" in present else "value") if token else ""
    return QuantBlocks(
        block=0 if token else BLOCK,
        floor=1e-10,
        ue8m0=form != "fp32",
        packed=form == "ue8m0_packed" and not token,
        cap=cap,  # type: ignore[arg-type]
        side="normed_out" in present,
    )


def _program(
    present: programs.Present,
    options: programs.Options,
    *,
    store: Callable[[programs.Present, programs.Options], Stage],
    residual: str | None = None,
) -> RowProgram:
    maps = programs.rms_maps(present, options, 0.0)
    return RowProgram(
        load=programs.load(present, options, residual),
        stats=Rms(),
        maps=(*maps, Round()),  # codes, scales and the side output start from one value
        store=store(present, options),
    )


# ------------------------------------------------------------------ where scales lie
def _transposed(scale: Tensor, rows: int) -> Layout:
    """[H/128, round_up(M, 4)], one block after the other: what DeepGEMM's TMA loads take."""
    if scale.dim() != 2 or scale.shape[1] != padded(rows) or (scale.stride(1) != 1 and scale.shape[1] > 1):
        raise ValueError(
            "fused_add_rmsnorm_fp8_block_quant: block_scale must have shape (H / 128, round_up(M, 4)) = "
            f"(H / 128, {padded(rows)}) and a last stride of 1, got {tuple(scale.shape)} with strides {scale.stride()}"
        )
    return (scale.shape[1], scale.shape[0]), (scale.stride(1), scale.stride(0))


def _rows_or_columns(scale: Tensor, rows: int) -> Layout:
    """[M, B]. In columns of round_up(M, 4) the rows up to there are padding, and written as zeros."""
    size, stride = tuple(scale.shape), scale.stride()
    if len(size) == 2 and stride == (1, padded(rows)) and rows:
        size = (padded(rows), size[1])
    return size, stride


def _declare(
    name: str,
    formula: Callable[..., None],
    functional: Op | None = None,
    *,
    residual: str | None = None,
    options: Mapping[str, Mapping[Any, Any]] | None = None,
    **more: Any,
) -> Op:
    return Op(
        name,
        program=functools.partial(_program, store=more.pop("store"), residual=residual),
        reference=formula,
        options={"numerics": NUMERICS, **(options or {})},
        functional=functional,
        **more,
    )


_FP8: dict[str, Any] = {
    "store": _fp8_store,
    "optional": ("weight",),
    "routes": ("cuda", "cpu", "torch"),
    "labels": {"scale": "block_scale"},
    "blocks": _transposed,
    "returns": (),
}
ADD_FP8_BLOCK_QUANT = _declare(
    "add_rmsnorm_fp8_block_quant", reference.add_rmsnorm_fp8_block_quant, residual="h", public=False, **_FP8
)
FP8_BLOCK_QUANT = _declare(
    "fused_add_rmsnorm_fp8_block_quant",
    reference.fused_add_rmsnorm_fp8_block_quant,
    ADD_FP8_BLOCK_QUANT,
    residual="residual",
    **_FP8,
)

_DYNAMIC: dict[str, Any] = {
    "store": _dynamic_store,
    "options": {"granularity": GRANULARITY, "scale_format": SCALE_FORMAT},
    "optional": ("weight", "scale_ub", "normed_out"),
    "by_value": {"scale_ub": ("scale_ub_value", FLT_MAX)},
    "blocks": _rows_or_columns,
    "returns": ("out", "scale"),
}
DYNAMIC_QUANT = _declare("rmsnorm_dynamic_quant", reference.rmsnorm_dynamic_quant, **_DYNAMIC)
ADD_DYNAMIC_QUANT = _declare(
    "add_rmsnorm_dynamic_quant", reference.add_rmsnorm_dynamic_quant, residual="h", public=False, **_DYNAMIC
)
FUSED_ADD_DYNAMIC_QUANT = _declare(
    "fused_add_rmsnorm_dynamic_quant",
    reference.fused_add_rmsnorm_dynamic_quant,
    ADD_DYNAMIC_QUANT,
    residual="residual",
    public=False,
    called="rmsnorm_dynamic_quant",
    **_DYNAMIC,
)


@FP8_BLOCK_QUANT.warm()
def fused_add_rmsnorm_fp8_block_quant(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    numerics: str = "flashinfer",
) -> None:
    r"""Adds into the residual stream, normalises the sum, and quantises the norm in blocks of 1x128.

    .. math::
        h = \mathrm{input} + \mathrm{residual}, \quad \mathrm{residual} \leftarrow h, \quad
        n = \operatorname{rmsnorm}(h), \quad a = \max(\max_{block} |n|, 10^{-4}), \quad
        \mathrm{block\_scale} = \frac{a}{448}, \quad
        \mathrm{out} = \operatorname{cast}\!\left(n \cdot \frac{448}{a}\right)

    n is rounded to the input's dtype before all else, so that quantising `normed_out` again gives the same bytes. A
    block of NaN has the scale NaN and codes 0x7F; a block of zeros has codes of 0. On CUDA tensors the CUDA route
    serves it.

    Args:
        out: [..., H], float8_e4m3fn; written. H is a multiple of 128.
        block_scale: [H / 128, round_up(M, 4)], fp32, last stride 1; written: block b of row m at [b, m], 0 in the
            columns from M on. `block_scale.t()[:M]` are the column-major scales that TMA takes.
        normed_out: [..., H], the input's dtype; written with n.
        input: [..., H], fp32, fp16 or bf16; not written.
        residual: of the same shape, fp32, fp16 or bf16; overwritten with the sum, rounded once.
        weight: [H], fp32, fp16 or bf16; None for no weight.
        eps: added to the mean square, in fp32; finite and >= 0.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: as in `fused_add_rmsnorm`.

    Raises:
        As `fused_add_rmsnorm`; nothing is written then.
    """
    if isinstance(input, torch.Tensor) and input.dim():  # all else is refused below
        check_whole_blocks(FP8_BLOCK_QUANT, input.shape[-1], BLOCK)
    check_dtype_of(FP8_BLOCK_QUANT, "normed_out", normed_out, input)
    FP8_BLOCK_QUANT.checked(input, residual, weight, out, block_scale, normed_out, eps, numerics, enable_pdl)


# Columns may end before their padding does, which only the function behind looks at.
@DYNAMIC_QUANT.warm(unless=("residual",), seen=("dtype", "scale_layout"), only={"scale_layout": "row"})
def rmsnorm_dynamic_quant(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    granularity: str | int = "token",
    dtype: torch.dtype | None = None,
    scale_format: str = "fp32",
    scale_layout: str = "row",
    scale_ub: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    normed_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    numerics: str = "flashinfer",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""`rmsnorm` in 8 bits, with a scale for every token or every 1x128 block that is found from the norm.

    .. math::
        n = \operatorname{rmsnorm}(x), \quad a = \min(\max(\max_{block} |n|, 10^{-10}), \mathrm{scale\_ub}), \quad
        s = \frac{a}{Q}, \quad \mathrm{out} = \operatorname{cast}\!\left(n \cdot \frac{1}{s}\right)

    Q is the largest finite code: 448 (e4m3), 57344 (e5m2) or 127 (int8, symmetric). n is rounded to the input's dtype
    before all else, so that quantising `normed_out` again gives the same bytes. In "ue8m0" s is the smallest power of
    two that is not less (OCP Microscaling Formats, 2023, with the scale rounded up, so that nothing saturates).

    Args:
        input: [..., H], fp32, fp16 or bf16; M is the product of its leading dimensions.
        weight: [H], fp32, fp16 or bf16; None for no weight.
        eps: added to the mean square, in fp32; finite and >= 0.
        residual: of the input's shape: `input + residual` is normalised, and stored there, rounded once.
        granularity: "token", or 128; the last block of a row may be shorter.
        dtype: float8_e4m3fn, float8_e5m2 or int8; None for `out`'s, or float8_e4m3fn.
        scale_format: "fp32"; "ue8m0" (uint8 exponents with a bias of 127); "ue8m0_packed" (four of them in an int32,
            the first in its low byte; granularity 128 and scale_layout "column" only).
        scale_layout: "row" ([M, B], contiguous), or "column" (strides (1, round_up(M, 4)), padding 0).
        scale_ub: a limit on a, with granularity "token": a number or a CPU tensor of one element (by value, finite and
            > 0), or a 0-d or (1,) tensor on the device.
        out: [..., H]; written in place of a new tensor.
        scale: [M, B], B = 1, ceil(H / 128), or for packed ceil(ceil(H / 128) / 4); written in place of a new tensor. In
            columns, its memory reaches to round_up(M, 4) rows.
        normed_out: [..., H], the input's dtype: also written, with n.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.
        numerics: as in `rmsnorm`; with `residual`, as in `fused_add_rmsnorm`.

    Returns:
        (out, scale): codes, and what they are to be multiplied by.

    Raises:
        TypeError: for something that is no tensor, or an eps or scale_ub that is no number.
        ValueError: for a wrong dtype, shape, device, overlap or option, before anything is launched.
        RuntimeError: where no route serves the device, or a gradient would be lost.
    """
    op = DYNAMIC_QUANT if residual is None else FUSED_ADD_DYNAMIC_QUANT
    if not isinstance(input, torch.Tensor):
        raise TypeError(f"{op.called}: input must be a torch.Tensor, got {type(input).__name__}")
    made = _dynamic_outputs(op, input, granularity, dtype, scale_format, scale_layout, scale_ub, out, scale)
    check_dtype_of(op, "normed_out", normed_out, input)
    more: dict[str, Any] = {"numerics": numerics, "granularity": granularity, "scale_format": scale_format}
    rest = (weight, *made, scale_ub, normed_out, eps, enable_pdl)
    if residual is None:
        result = _dynamic_quant(input, *rest, **more, dtype=dtype, scale_layout=scale_layout)
    else:
        result = _fused_add_dynamic_quant(input, residual, *rest, **more)
    pair: tuple[torch.Tensor, torch.Tensor] = result
    return pair


@FUSED_ADD_DYNAMIC_QUANT.warm()
def _fused_add_dynamic_quant(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    out: Tensor,
    scale: Tensor,
    scale_ub: float | Tensor | None,
    normed_out: Tensor | None,
    eps: float,
    enable_pdl: bool | None,
    *,
    numerics: str,
    granularity: str | int,
    scale_format: str,
) -> tuple[Tensor, Tensor]:
    """`rmsnorm_dynamic_quant` with a residual; behind the public function, with a warm call of its own."""
    options = (numerics, granularity, scale_format)
    given = (input, residual, weight, out, scale, scale_ub, normed_out)
    pair: tuple[Tensor, Tensor] = FUSED_ADD_DYNAMIC_QUANT.checked(*given, eps, *options, enable_pdl)
    return pair


@DYNAMIC_QUANT.warm(seen=("dtype", "scale_layout"))
def _dynamic_quant(
    input: Tensor,
    weight: Tensor | None,
    out: Tensor,
    scale: Tensor,
    scale_ub: float | Tensor | None,
    normed_out: Tensor | None,
    eps: float,
    enable_pdl: bool | None,
    *,
    numerics: str,
    granularity: str | int,
    scale_format: str,
    dtype: torch.dtype | None,
    scale_layout: str,
) -> tuple[Tensor, Tensor]:
    """`rmsnorm_dynamic_quant` after its checks; behind the public function, with which it shares its warm calls."""
    options = (numerics, granularity, scale_format)
    given = (input, weight, out, scale, scale_ub, normed_out)
    seen = (dtype, scale_layout)
    pair: tuple[Tensor, Tensor] = DYNAMIC_QUANT.checked(*given, eps, *options, enable_pdl, seen=seen)
    return pair


# ------------------------------------------------------------------ checks, and what is allocated
def _dynamic_outputs(
    op: Op,
    input: Tensor,
    granularity: Any,
    dtype: Any,
    scale_format: Any,
    scale_layout: Any,
    scale_ub: Any,
    out: Any,
    scale: Any,
) -> tuple[Tensor, Tensor]:
    """The outputs, new where they were not given, after the checks of what goes with what."""

    def refuse(text: str) -> None:
        raise ValueError(f"{op.called}: {text}")

    options = {"granularity": granularity, "scale_format": scale_format}
    options = {name: check_option(op, name, value) for name, value in options.items()}
    for name, value, accepted in (
        ("scale_layout", scale_layout, ("row", "column")),
        ("dtype", dtype, (*OUT_DTYPES, None)),
    ):
        if value not in accepted:
            refuse(f"{name} must be one of {sorted(map(str, accepted))}, got {value!r}")
    if scale_format == "ue8m0_packed" and (granularity == "token" or scale_layout != "column"):
        refuse("scale_format 'ue8m0_packed' needs granularity 128 and scale_layout 'column'")
    if scale_ub is not None and granularity != "token":
        refuse("scale_ub needs granularity 'token'")
    if input.dim() < 1:
        refuse("input must have at least one dimension, got a 0-d tensor")
    if isinstance(out, torch.Tensor) and dtype not in (None, out.dtype):
        refuse(f"out must have dtype {dtype}, got {out.dtype}")
    if out is None:
        out = torch.empty(input.shape, dtype=dtype or OUT_DTYPES[0], device=input.device)
    hidden = input.shape[-1]
    rows = input.numel() // hidden if hidden else 0
    store = _dynamic_store(frozenset(), options)
    assert isinstance(store, QuantBlocks)
    columns, stride = store.columns(hidden), (1, padded(rows))
    if scale is None:
        kind, device = SCALE_DTYPES[scale_format], input.device
        if scale_layout == "row":
            return out, torch.empty((rows, columns), dtype=kind, device=device)
        return out, torch.empty((columns, padded(rows)), dtype=kind, device=device).t()[:rows]
    if isinstance(scale, torch.Tensor):
        if tuple(scale.shape) != (rows, columns):
            refuse(f"scale must have shape {(rows, columns)}, got {tuple(scale.shape)}")
        if scale_layout == "column" and rows:
            need = scale.storage_offset() + padded(rows) * columns
            if scale.stride() != stride or scale.untyped_storage().nbytes() < need * scale.element_size():
                refuse(f"scale must have strides {stride} and memory for {padded(rows)} rows, got {scale.stride()}")
        if scale_layout == "row" and scale.stride() == stride and padded(rows) > rows:
            refuse("scale lies in columns; say scale_layout='column'")
    return out, scale
