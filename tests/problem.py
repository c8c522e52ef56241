"""One call of one combination: its tensors, its keywords, and everything it left behind.

A `Problem` holds values on the CPU. `prepare` lays them out in watched buffers on a device and returns the `Call` that
goes into the public function; `run` does it all. What the bits must be says `canonical`, what the formula gives
`oracle`.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, fields
from typing import Any

import torch

import flashnorm
from tests import canonical, oracles
from tests.buffers import STALE_SCALES, Guarded, from_tiles, padded, values_for
from tests.canonical import Bits
from tests.combos import BLOCKED, DTYPES, DYNAMIC, E2M1, FP4, MXFP8, SILU, STATIC, Combo
from tests.inputs import SPECIAL, gains, indices, rows, scales
from tests.tolerance import assert_near, assert_same_bits

SCALE = (
    229 / 8192
)  # of the static operators: a little saturates, a little underflows, and no quotient of two bf16 is a tie
GAIN = 229 / 2  # a global scale: some blocks reach the largest scale
CAP = 1.7
SCALE_DTYPES = {"fp32": torch.float32, "ue8m0": torch.uint8, "ue8m0_packed": torch.int32, "e4m3": torch.float8_e4m3fn}


def public_names(combo: Combo) -> dict[str, str]:
    """What the public function calls a tensor, where that is another word."""
    if combo.centred:
        return {"weight": "gemma", "bias": "beta"}
    names = {"scale": "block_scale"} if combo.op == BLOCKED or combo.scaled else {}
    if combo.op in FP4:
        names |= {"out": "y_fp4", "normed_out": "y_out", "scale_rows": "block_scale_unswizzled"}
    return names


@dataclass
class Call:
    """The keywords of one call, and what becomes of them.

    Attributes:
        guards: the watched buffers by parameter name; `scale` of the column layout holds [blocks, padded rows].
        arguments: keywords of the public function.
    """

    problem: Problem
    guards: dict[str, Guarded]
    arguments: dict[str, Any]

    def __call__(self, route: str | None) -> Bits:
        """Calls the public function; everything that must not change is compared afterwards."""
        function = getattr(flashnorm, self.problem.combo.op)
        with contextlib.nullcontext() if route is None else flashnorm.backend(route):
            result = function(**self.arguments)
        return self.outcome(result, f"{self.problem.what} on {route}")

    def left(self, result: Any, what: str = "") -> dict[str, torch.Tensor]:
        """The tensors that a call with these arguments wrote, by name; what it returned is what it should return."""
        combo, given = self.problem.combo, self.arguments
        names = public_names(combo)
        asked = {"residual": combo.residual is not None, "normed_out": combo.side}
        left = {name: given[names.get(name, name)] for name, there in asked.items() if there}
        if combo.op in (*STATIC, BLOCKED) or combo.in_place:
            assert result is None, what
            left["out"] = given["input" if combo.in_place else "out"]
        else:
            made = ["out", *(["scale"] if combo.makes_scales else ["rstd"] if combo.rstd else [])]
            made += ["scale_rows"] if combo.placed == "both" else []
            assert isinstance(result, tuple if len(made) > 1 else torch.Tensor), f"{what}: returned {type(result)}"
            found = dict(zip(made, result if len(made) > 1 else (result,), strict=True))
            for name, tensor in found.items():
                mine = given.get(names.get(name, name))
                assert mine is None or tensor is mine, f"{what}: {name} must be returned itself"
                assert mine is not None or not combo.scaled or tensor.dtype == self.problem.dtype_of(name), what
            left |= found
        if combo.op == BLOCKED:
            left["scale"] = given["block_scale"]
        return left

    def outcome(self, result: Any, what: str) -> Bits:
        """What a call with these arguments left behind, on the CPU; nothing else was written."""
        for name, guard in self.guards.items():
            guard.check(f"{what}: {name}")
        left = self.left(result, what)
        if "rstd" in left:
            assert left["rstd"].is_contiguous() and left["rstd"].device == left["out"].device
        if "scale" in left:
            left["scale"] = self.problem.unpadded(left["scale"], what)
        if "scale_rows" in left:
            both = [t.cpu().view(torch.uint8) for t in (self.problem.by_rows(left.pop("scale_rows")), left["scale"])]
            assert torch.equal(*both), f"{what}: the two layouts hold other scales"
        for name in ("out", "scale") if self.problem.combo.scaled else ():  # given as bytes, or new in their own dtypes
            left[name] = left[name].view(torch.uint8).contiguous().view(self.problem.dtype_of(name))
        return Bits(**{name: tensor.cpu() for name, tensor in left.items()})


class Problem:
    """The values of one call, ready to be laid out and run on any route.

    Args:
        combo: the operator, its dtypes and options.
        shape: of the result, any rank; of the input too, unless rows are picked by index.
        device: where the tensors live.
        layout: of the input and the residual.
        weight_shape: of the weight where it is not `(H,)`.
        special: names of `SPECIAL` rows, written over the first rows.
        x, residual, weight, bias, index, input_scale: values to use in place of random ones.
        scale: of a static operator; the global scale of one of four bits.
        cap: scale_ub, where the combination has one.
        pool: rows of the input that an index picks from.
        eps: passed on.
        seed: part of the key that the numbers are drawn with.
    """

    def __init__(
        self,
        combo: Combo,
        shape: tuple[int, ...],
        device: torch.device | str = "cpu",
        *,
        layout: str = "contiguous",
        residual_layout: str | None = None,
        weight_layout: str = "contiguous",
        weight_shape: tuple[int, ...] | None = None,
        special: tuple[str, ...] = (),
        x: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        scale: float | None = None,
        cap: float = CAP,
        pool: int = 0,
        eps: float = 1e-6,
        seed: object = 0,
    ) -> None:
        self.combo, self.shape, self.device, self.eps = combo, shape, device, eps
        self.index, self.input_scale, self.residual, self.weight, self.bias = index, input_scale, None, None, None
        x_shape = shape
        if combo.index is not None:
            x_shape = (pool or max(5, len(special)), shape[-1])
            if index is None:
                self.index = indices(shape[:-1], x_shape[0], DTYPES[combo.index], seed)
                if special:
                    self.index = (torch.arange(self.index.numel()) % x_shape[0]).to(self.index).view(shape[:-1])
        x = rows(x_shape, DTYPES[combo.x], "x", seed) if x is None else x
        for name, row in zip(special, x.view(-1, shape[-1]), strict=False):
            SPECIAL[name](row)
        self.x_layout, self.residual_layout, self.weight_layout = layout, residual_layout or layout, weight_layout
        self.x = values_for(layout, x)
        if combo.input_scale is not None and input_scale is None:
            count = 1 if combo.input_scale == "one" else self.x[..., 0].numel()
            self.input_scale = scales((count, 1) if combo.input_scale == "rows" else (1,), seed)
        if combo.weight is not None:
            w_shape = weight_shape or shape[-1:]
            weight = gains(w_shape, DTYPES[combo.weight], seed) if weight is None else weight
            self.weight = values_for(weight_layout, weight)
        if combo.bias is not None:
            bias = gains(shape[-1:], DTYPES[combo.bias], "bias", seed) if bias is None else bias
            self.bias = values_for(weight_layout, bias)
        if combo.residual is not None:
            self.residual = rows(shape, DTYPES[combo.residual], "residual", seed) if residual is None else residual
        self.scale: torch.Tensor | float | None = None
        if combo.scale is not None:
            scale = (GAIN if combo.op in FP4 else SCALE) if scale is None else scale
            self.scale = scale if combo.scale == "value" else torch.tensor([scale]).to(DTYPES[combo.scale])
        self.cap: torch.Tensor | float | None = None
        if combo.cap:
            self.cap = cap if combo.cap == "value" else torch.tensor([cap])

    def dtype_of(self, name: str) -> torch.dtype:
        """Of codes and their scales; scales of 8 bits and pairs of codes may be given as bytes."""
        return self.combo.out_dtype if name == "out" else SCALE_DTYPES[self.combo.form]

    @property
    def near(self) -> bool:
        """Whether GPUs have an approximation of the exponential, for 16-bit rows, so that bits are those of a route."""
        return self.combo.op == SILU and self.combo.x != "f32" and torch.device(self.device).type == "cuda"

    @property
    def what(self) -> str:
        return f"{self.combo} {self.shape} {self.x_layout}"

    # -------------------------------------------------------------- what must come out
    @property
    def _loaded(self) -> dict[str, Any]:
        """What both models take, apart from input, weight and residual."""
        combo = self.combo
        return {
            "bias": self.bias,
            "centred": combo.centred,
            "eps": self.eps,
            "numerics": combo.numerics,
            "offset": combo.offset,
            "index": self.index,
            "input_scale": self.input_scale,
            "out": combo.out_dtype,
            "once": combo.once,
        }

    @property
    def _cap(self) -> float | None:
        return None if self.cap is None else float(self.cap)

    def canonical(self) -> Bits:
        """The bits that every exact route must give."""
        combo = self.combo
        row = canonical.norm(self.x, self.weight, self.residual, **self._loaded)
        if combo.op == SILU:
            row = row.silu()
        if combo.scaled:
            if combo.form == "e4m3":
                return canonical.nvfp4_bits(row, combo.block, None if self.scale is None else float(self.scale))
            return canonical.power_bits(row, combo.out_dtype, down=combo.rule == "ocp")
        if combo.op == BLOCKED:
            return canonical.block_bits(row, combo.out_dtype, canonical.Blocks(128, 1e-4, ratio=True))
        if combo.op == DYNAMIC:
            power, packed = combo.form != "fp32", combo.form == "ue8m0_packed"
            how = canonical.Blocks(combo.block, 1e-10, power=power, packed=packed, cap=self._cap)
            return canonical.block_bits(row, combo.out_dtype, how)
        if combo.makes_codes:
            scale = 1.0 if self.scale is None else float(self.scale)
            return canonical.tensor_bits(row, combo.out_dtype, scale, double=combo.double)
        return canonical.cast_bits(row, combo.out_dtype)

    def oracle(self) -> oracles.Expected:
        """The norm in fp64, rounded at the mode's inner places."""
        return oracles.norm(self.x, self.weight, self.residual, **self._loaded, silu=self.combo.op == SILU)

    def eager(self) -> torch.Tensor | None:
        """Eager PyTorch's result in the same dtype, where it has such a thing."""
        combo = self.combo
        one_dtype = {combo.x, combo.weight or combo.x, combo.residual or combo.x, combo.bias or combo.x} == {combo.x}
        many = self.weight is not None and self.weight.dim() > 1
        if not one_dtype or self.index is not None or many or combo.once:
            return None
        options = {name: self._loaded[name] for name in ("bias", "centred", "eps", "numerics", "offset")}
        return oracles.eager(self.x, self.weight, self.residual, **options)

    def check_bits(self, got: Bits, what: str = "") -> None:
        """Every tensor of an outcome against the canonical bits; what was not asked for is not there."""
        want, what = self.canonical(), f"{self.what} {what}"
        assert (got.residual is None) == (want.residual is None), what
        assert (got.scale is None) == (want.scale is None), what
        for field in fields(Bits):
            tensor, right = getattr(got, field.name), getattr(want, field.name)
            if tensor is None:
                continue
            if not self.near:
                assert_same_bits(tensor, right, f"{what}: {field.name}")
                continue
            judged = None
            if field.name == "out" and want.scale is not None:
                same = got.scale.view(torch.uint8) == want.scale.view(torch.uint8)  # type: ignore[union-attr]
                judged = same.repeat_interleave(self.combo.block, -1).view(*tensor.shape[:-1], -1)
            assert_near(tensor, right, f"{what}: {field.name}", judged)

    # -------------------------------------------------------------- the call
    def by_rows(self, scale: torch.Tensor) -> torch.Tensor:
        """[..., blocks] scales of 8 bits with the rows flattened."""
        blocks = self.shape[-1] // self.combo.block
        assert scale.shape == (*self.shape[:-1], blocks), f"{self.what}: scales {tuple(scale.shape)}"
        return scale.reshape(math.prod(self.shape[:-1]), blocks)

    def unpadded(self, scale: torch.Tensor, what: str) -> torch.Tensor:
        """[rows, blocks] of the scales as they were returned, or as block_scale; the padding must be zero."""
        combo = self.combo
        count = self.x[..., 0].numel()
        if combo.scaled:
            blocks = self.shape[-1] // combo.block
            return self.by_rows(scale) if combo.placed == "rows" else from_tiles(scale, count, blocks, what)
        if combo.op == BLOCKED:
            whole = scale
        elif combo.column:
            assert scale.stride() == (1, padded(count)) or not scale.numel(), f"{what}: strides {scale.stride()}"
            whole = scale.as_strided((scale.shape[1], padded(count)), (padded(count), 1))
        else:
            assert scale.shape[0] == count, f"{what}: scales {tuple(scale.shape)}"
            return scale
        assert whole.shape[1] == padded(count), f"{what}: scales {tuple(whole.shape)}"
        assert bool((whole[:, count:] == 0).all()), f"{what}: padding is not zero: {whole[:, count:]}"
        return whole[:, :count].t()

    def _scale_guard(self, layout: str, placed: str = "") -> Guarded:
        combo, count, hidden = self.combo, self.x[..., 0].numel(), self.shape[-1]
        blocks = -(-hidden // (combo.block_size or hidden))
        if combo.scaled:  # as bytes
            tiles = (-(-count // 128) * 128 * padded(blocks),)
            shape = (*self.shape[:-1], blocks) if placed == "rows" else tiles
            return Guarded(None, self.device, layout, written=True, shape=shape, dtype=torch.uint8, poison=0x7F)
        if combo.form == "ue8m0_packed":
            blocks = -(-blocks // 4)
        dtype = SCALE_DTYPES[combo.form]
        columns = combo.column or combo.op == BLOCKED
        shape = (blocks, padded(count)) if columns else (count, blocks)
        return Guarded(None, self.device, layout, written=True, shape=shape, dtype=dtype, poison=STALE_SCALES[dtype])

    def prepare(self, out: str = "none", *, enable_pdl: bool | None = None, **more: Any) -> Call:
        """Lays everything out in fresh watched buffers.

        Args:
            out: "none", "alias" (the input itself), or the layout of given, poisoned outputs.
            enable_pdl: passed on.
            more: further keywords.
        """
        combo, device = self.combo, self.device
        weights = self.weight_layout
        guards = {"input": Guarded(self.x, device, self.x_layout, written=combo.in_place or out == "alias")}
        if self.residual is not None:
            guards["residual"] = Guarded(self.residual, device, self.residual_layout, written=True)
        if self.index is not None:
            guards["row_index"] = Guarded(self.index, device)
        if self.input_scale is not None:
            guards["input_scale"] = Guarded(self.input_scale, device)
        if self.weight is not None:
            guards["weight"] = Guarded(self.weight, device, weights)
        if self.bias is not None:
            guards["bias"] = Guarded(self.bias, device, weights if self.bias.shape == self.shape[-1:] else "contiguous")
        arguments: dict[str, Any] = {"weight": None, "eps": self.eps, "numerics": combo.numerics}
        arguments["enable_pdl"] = enable_pdl
        usual = DTYPES[combo.weight or "bf16"]
        required = combo.op in (*STATIC, BLOCKED) or (combo.x == "i8" and combo.out_dtype != usual)
        required |= combo.op == SILU and combo.out is not None
        layout = "contiguous" if required and out == "none" else out
        if layout not in ("none", "alias") and not combo.in_place:
            pairs = combo.out_dtype == E2M1  # as bytes
            new: dict[str, Any] = {"written": True, "poison": 0x5B if pairs else None}
            new |= {"shape": (*self.shape[:-1], self.shape[-1] // 2) if pairs else self.shape}
            guards["out"] = Guarded(None, device, layout, dtype=torch.uint8 if pairs else combo.out_dtype, **new)
        if combo.side:
            side = "contiguous" if layout == "none" else layout
            guards["normed_out"] = Guarded(None, device, side, written=True, shape=self.shape, dtype=DTYPES[combo.x])
        if combo.op == BLOCKED or (combo.op == DYNAMIC and "out" in guards):
            guards["scale"] = self._scale_guard("contiguous")
        if combo.scaled and out != "none":
            guards["scale"] = self._scale_guard("contiguous", combo.placed)
            if combo.placed == "both":
                guards["scale_rows"] = self._scale_guard("contiguous", "rows")
        arguments |= {name: guard.view for name, guard in guards.items()}
        if combo.op == DYNAMIC and combo.column and "scale" in guards:
            arguments["scale"] = arguments["scale"].t()[: self.x[..., 0].numel()]
        if out == "alias":
            arguments["out"] = arguments["input"]
        if combo.centred:
            arguments.setdefault("bias", None)
        names = public_names(combo)
        renamed = {names.get(name, name): value for name, value in (arguments | more).items()}
        renamed |= self._options()
        return Call(self, {names.get(name, name): guard for name, guard in guards.items()}, renamed)

    def _options(self) -> dict[str, Any]:
        """Keywords that are no operands of every operator."""
        combo = self.combo
        found: dict[str, Any] = {"return_rstd": True} if combo.rstd else {}
        if self.scale is not None:
            name = "global_scale" if combo.op in FP4 else "scale"
            found[name] = self.scale if isinstance(self.scale, float) else self.scale.to(self.device)
        if combo.op in (*FP4, *MXFP8):
            found |= {"is_sf_swizzled_layout": combo.placed != "rows", "scale_rule": combo.rule}
        if combo.op in FP4:
            usual = {16: "e4m3", 32: "ue8m0"}[combo.block] == combo.form
            found |= {"block_size": combo.block, "scale_format": None if usual else combo.form}
        if combo.placed == "both":
            found["output_both_sf_layouts"] = True
        if combo.double:
            found["double_rounding"] = True
        if combo.op == DYNAMIC:
            found |= {"granularity": combo.block or "token", "dtype": combo.out_dtype, "scale_format": combo.form}
            found["scale_layout"] = "column" if combo.column else "row"
            if self.cap is not None:
                found["scale_ub"] = self.cap if isinstance(self.cap, float) else self.cap.to(self.device)
        return found

    def run(self, route: str | None, out: str = "none", *, enable_pdl: bool | None = None) -> Bits:
        """Lays out, calls on a route (None: the dispatcher's choice), and takes everything back to the CPU."""
        return self.prepare(out, enable_pdl=enable_pdl)(route)
