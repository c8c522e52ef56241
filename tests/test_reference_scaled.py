"""The reference's NVFP4, MXFP4, MXFP8 and SiLU: whole operators against the model, in place and apart, compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashnorm import model, reference
from flashnorm.program import (
    AddResidual,
    Affine,
    Cast,
    LoadRow,
    QuantBlocks,
    QuantNvfp4,
    QuantTensor,
    Rms,
    RowProgram,
    Silu,
    Stage,
)

pytestmark = pytest.mark.cpu_only

FP32, BF16 = torch.float32, torch.bfloat16
E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
EPS, GAIN = 1e-6, 61.3
ROWS, HIDDEN = 130, 160

# the store, and the options of the operator that it belongs to
FORMS: dict[str, tuple[QuantNvfp4 | QuantBlocks, dict[str, Any]]] = {
    "nvfp4": (QuantNvfp4(16, "value"), {"block_size": "16", "scale_format": "auto", "scale_rule": "up"}),
    "nvfp4-32": (QuantNvfp4(32, "value"), {"block_size": "32", "scale_format": "e4m3", "scale_rule": "up"}),
    "mxfp4": (
        QuantBlocks(32, 0.0, ue8m0=True, fp4=True),
        {"block_size": "32", "scale_format": "auto", "scale_rule": "up"},
    ),
    "mxfp4-ocp": (
        QuantBlocks(32, 0.0, ue8m0=True, fp4=True, ocp=True),
        {"block_size": "32", "scale_format": "ue8m0", "scale_rule": "ocp"},
    ),
    "mxfp8": (QuantBlocks(32, 0.0, ue8m0=True), {"scale_rule": "up"}),
    "mxfp8-ocp": (QuantBlocks(32, 0.0, ue8m0=True, ocp=True), {"scale_rule": "ocp"}),
}
every_form = pytest.mark.parametrize("form", FORMS)
every_layout = pytest.mark.parametrize("layout", ["rows", "swizzled", "both"])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(dtype: torch.dtype = BF16, residual: torch.dtype | None = FP32) -> dict[str, torch.Tensor]:
    x = (random(ROWS, HIDDEN) * random(ROWS, 1, seed=4).mul(2).exp2()).to(dtype)
    x[0], x[1, 3], x[2, 9], x[3, :32] = 0, torch.nan, -torch.inf, 0
    given = {"x": x, "weight": random(HIDDEN, seed=2).to(dtype)}
    if residual is not None:
        given["residual"] = random(ROWS, HIDDEN, seed=1).to(residual)
        given["residual"][0], given["residual"][3, :32] = -0.0, 0
    return given


def outputs(form: str, layout: str) -> dict[str, torch.Tensor]:
    """Poisoned, as the operators hand them over."""
    stage, _ = FORMS[form]
    blocks = HIDDEN // stage.block

    def poison(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0x7F, dtype=torch.uint8)

    made = {"out": poison(ROWS, HIDDEN).view(E4M3) if "fp8" in form else poison(ROWS, HIDDEN // 2)}
    by_rows = poison(blocks, ROWS + 2).t()  # of any strides, with padding
    tiles = poison(-(-ROWS // 128) * 128, -(-blocks // 4) * 4)
    return made | {"rows": {"scale": by_rows}, "swizzled": {"scale": tiles}}.get(
        layout, {"scale": tiles, "scale_rows": by_rows}
    )


def call(
    form: str, layout: str, given: dict[str, torch.Tensor], made: dict[str, Any], numerics: str, prefix: str
) -> None:
    stage, options = FORMS[form]
    name = "rmsnorm_mxfp8_quant" if "fp8" in form else "rmsnorm_fp4quant"
    if "fp8" not in form:
        by_value = isinstance(stage, QuantNvfp4)
        options = {**options, "global_scale": None, "global_scale_value": GAIN if by_value else 1.0}
    how = {"eps": EPS, "numerics": numerics, "swizzled": layout != "rows", **options}
    getattr(reference, f"{prefix}{name}")(**given, **made, **how)


def judged(program: RowProgram, given: dict[str, Any], got: dict[str, torch.Tensor]) -> None:
    """Bounds of the contract, against the formula with the scales that stand beside the codes."""
    numbers = {"eps": EPS, "global_scale_value": GAIN, "scale_value": 0.02}
    raw = {o.name: o.dtypes[0] for o in program.operands() if o.raw}
    for name, wanted in model.exact(program, {**given, **got}, numbers, got).items():
        t = got[name]
        t = t.contiguous().view(getattr(torch, raw[name])) if name in raw else t
        if t.dtype == FP32:
            torch.testing.assert_close(t.double(), wanted, rtol=2e-6, atol=1e-6, equal_nan=True)
            continue
        steps = model.steps(t, wanted)
        assert int(steps.max()) <= 1 and float((steps == 0).double().mean()) > 0.999, name


# ------------------------------------------------------------------ codes with scales of 8 bits
@every_layout
@every_form
def test_whole_operators_against_the_model(form: str, layout: str) -> None:
    """On these rows both even round alike, to the last byte of codes, scales and padding."""
    stage: Any = FORMS[form][0]
    for dtype in (BF16, FP32):
        given, made = inputs(dtype, None), outputs(form, layout)
        program = RowProgram(LoadRow(), Rms(), (Affine(),), type(stage)(**{**vars(stage), "layout": layout}))
        want = model.canonical(program, {**given, **outputs(form, layout)}, {"eps": EPS, "global_scale_value": GAIN})
        call(form, layout, given, made, "hf-llama", "")
        assert set(want) == set(made)
        same = {name: (made[name].view(torch.uint8) == t.view(torch.uint8)).double().mean() for name, t in want.items()}
        assert all(float(share) > 0.999 for share in same.values()), same
        judged(program, given, made)
        if layout != "rows":
            assert torch.equal(made["scale"] != 0, want["scale"] != 0)
        if layout != "swizzled":
            assert not made["scale_rows" if layout == "both" else "scale"][ROWS:].any()


@pytest.mark.parametrize("numerics", ["flashinfer", "hf-llama", "hf-gemma", "torch"])
@every_form
def test_in_place_and_apart_are_the_same(form: str, numerics: str) -> None:
    apart, in_place = inputs(), inputs()
    h, made, again = torch.full((ROWS, HIDDEN), torch.nan), outputs(form, "both"), outputs(form, "both")
    call(form, "both", {**apart, "h": h}, made, numerics, "add_")
    assert model.same_bits(apart, inputs())
    call(form, "both", in_place, again, numerics, "fused_add_")
    assert model.same_bits({"h": h}, {"h": in_place["residual"]})
    assert model.same_bits({"x": in_place["x"]}, inputs())
    assert model.same_bits(made, again)
    stage: Any = FORMS[form][0]
    load = AddResidual(rounded=numerics != "flashinfer", dst="h")
    program = RowProgram(load, Rms(), (Affine(),), type(stage)(**{**vars(stage), "layout": "both"}))
    judged(program, inputs(), {**made, "h": h})


def test_a_rounded_sum_is_normalised_where_the_mode_says_so() -> None:
    """bf16 sums: codes differ from those of the unrounded sum, and are those of the stored one."""
    found = {}
    for numerics in ("flashinfer", "hf-gemma"):
        given, made = inputs(BF16, BF16), outputs("mxfp8", "rows")
        call("mxfp8", "rows", given, made, numerics, "fused_add_")
        plain = outputs("mxfp8", "rows")
        call("mxfp8", "rows", {"x": given["residual"], "weight": given["weight"]}, plain, numerics, "")
        found[numerics] = model.same_bits(made, plain)
    assert found == {"flashinfer": False, "hf-gemma": True}


def test_the_norm_beside_the_codes_changes_no_byte() -> None:
    given, made = inputs(), outputs("nvfp4", "rows")
    call("nvfp4", "rows", inputs(), made, "flashinfer", "fused_add_")
    side = {**outputs("nvfp4", "rows"), "normed_out": torch.full((ROWS, HIDDEN), 9.0, dtype=BF16)}
    call("nvfp4", "rows", given, side, "flashinfer", "fused_add_")
    assert model.same_bits(made, side)
    plain = torch.empty_like(side["normed_out"])
    again = inputs()
    reference.add_rmsnorm(
        **again, h=torch.empty_like(again["residual"]), out=plain, eps=EPS, numerics="flashinfer"
    )  # fmt: skip
    assert model.same_bits({"y": plain}, {"y": side["normed_out"]})


@pytest.mark.parametrize("dtype", [FP32, torch.float16, BF16], ids=str)
def test_a_global_scale_on_the_device_is_the_same_number(dtype: torch.dtype) -> None:
    gain = torch.tensor([61.25], dtype=dtype)
    made = [outputs("nvfp4", "rows") for _ in range(2)]
    options = {"eps": EPS, "numerics": "flashinfer", **FORMS["nvfp4"][1]}
    for out, (tensor, number) in zip(made, ((gain, 1.0), (None, 61.25)), strict=True):
        reference.rmsnorm_fp4quant(
            **inputs(residual=None), **out, **options, global_scale=tensor, global_scale_value=number
        )
    assert model.same_bits(*made)


def test_any_leading_shape_and_strides() -> None:
    given, want = inputs(residual=None), outputs("nvfp4", "rows")
    call("nvfp4", "rows", given, want, "flashinfer", "")
    for form in ("nvfp4", "mxfp8"):
        want, made = outputs(form, "rows"), outputs(form, "rows")
        call(form, "rows", given, want, "flashinfer", "")
        width = want["out"].shape[1]
        wide = torch.full((13, 10, 2 * width), 0x7F, dtype=torch.uint8).view(want["out"].dtype)
        made["out"] = wide[..., :width]
        call(form, "rows", {**given, "x": given["x"].view(13, 10, HIDDEN)}, made, "flashinfer", "")
        assert model.same_bits(want, {**made, "out": made["out"].reshape(ROWS, width)})
        assert (wide.view(torch.uint8)[..., width:] == 0x7F).all()


# ------------------------------------------------------------------ SiLU
SILU: dict[str, tuple[Stage, dict[str, Any]]] = {
    "fused_rmsnorm_silu": (Cast(), {}),
    "fused_rmsnorm_silu_quant": (QuantTensor(), {"scale": None, "scale_value": 0.02}),
    "fused_rmsnorm_silu_fp4": (QuantNvfp4(16), {}),
}


def silu_outputs(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if name.endswith("quant"):
        return {"out": torch.full((ROWS, HIDDEN), 0x7F, dtype=torch.uint8).view(E5M2)}
    if name.endswith("fp4"):
        return {
            "out": torch.full((ROWS, HIDDEN // 2), 0x7F, dtype=torch.uint8),
            "scale": torch.full((ROWS + 1, HIDDEN // 16), 0x7F, dtype=torch.uint8),
        }
    return {"out": torch.full((ROWS, HIDDEN), torch.nan, dtype=dtype)}


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [FP32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("name", SILU)
def test_silu_against_the_model(name: str, dtype: torch.dtype, weighted: bool) -> None:
    store, options = SILU[name]
    given = inputs(dtype, None)
    given = given if weighted else {"x": given["x"]}
    made = silu_outputs(name, dtype)
    arguments = {"weight": None, **given, **made, **options}
    getattr(reference, name)(**arguments, eps=EPS, numerics="hf-llama")
    program = RowProgram(LoadRow(), Rms(), (*((Affine(),) if weighted else ()), Silu()), store)
    judged(program, given, made)
    want = model.canonical(program, {**given, **silu_outputs(name, dtype)}, {"eps": EPS, "scale_value": 0.02})
    if dtype != FP32:
        assert int(model.steps(made["out"], want["out"]).max()) <= (1 if name != "fused_rmsnorm_silu_fp4" else 0x11)
    if "scale" in made:
        assert not made["scale"][ROWS:].any()


def test_silu_may_overwrite_its_input_and_gives_nan_for_minus_infinity() -> None:
    given = inputs(BF16, None)
    out = torch.empty_like(given["x"])
    reference.fused_rmsnorm_silu(**given, out=out, eps=EPS, numerics="torch")
    reference.fused_rmsnorm_silu(**given, out=given["x"], eps=EPS, numerics="torch")
    assert model.same_bits({"out": out}, {"out": given["x"]})
    huge = torch.tensor([[3e38, 1.0]])
    result = torch.empty_like(huge)
    weight = torch.tensor([-3e38, 1.0])
    reference.fused_rmsnorm_silu(x=huge * 1e-38, weight=weight, out=result, eps=EPS, numerics="torch")
    assert result[0, 0].isnan() and result[0, 1] > 0


# ------------------------------------------------------------------ compilers
@every_layout
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4-ocp", "mxfp8"])
def test_traces_without_a_break(form: str, layout: str) -> None:
    def fused(given: dict[str, torch.Tensor], made: dict[str, torch.Tensor]) -> None:
        call(form, layout, given, made, "hf-gemma", "fused_add_")

    eager, traced, want, got = inputs(), inputs(), outputs(form, layout), outputs(form, layout)
    fused(eager, want)
    torch.compiler.reset()  # each of the cases is a recompilation of one function
    torch.compile(fused, fullgraph=True, backend="aot_eager")(traced, got)
    assert model.same_bits(want, got) and model.same_bits(eager, traced)


@pytest.mark.parametrize("name", SILU)
def test_silu_traces_without_a_break(name: str) -> None:
    def silu(given: dict[str, torch.Tensor], made: dict[str, torch.Tensor]) -> None:
        getattr(reference, name)(**given, **made, **SILU[name][1], eps=EPS, numerics="hf-gemma")

    want, got = silu_outputs(name, BF16), silu_outputs(name, BF16)
    silu(inputs(residual=None), want)
    torch.compiler.reset()
    torch.compile(silu, fullgraph=True, backend="aot_eager")(inputs(residual=None), got)
    assert model.same_bits(want, got)


def test_fake_tensors_and_no_rows() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for form in FORMS:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            groups = (inputs(), outputs(form, "both"))
            given, made = ({name: fake.from_tensor(t) for name, t in group.items()} for group in groups)
            call(form, "both", given, made, "flashinfer", "fused_add_")
        none = {name: t if name == "weight" else t[:0] for name, t in inputs().items()}
        call(form, "rows", none, {name: t[:0] for name, t in outputs(form, "rows").items()}, "flashinfer", "fused_add_")
