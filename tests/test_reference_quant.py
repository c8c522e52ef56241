"""The reference's other formulas: LayerNorm, rows that are gathered or widened, and quantised results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashnorm import model, reference
from flashnorm.model import formats
from flashnorm.program import AddResidual, Affine, QuantBlocks, Rms, Round, RowProgram
from flashnorm.reference import quantise
from tests.tolerance import FP32_OF_LARGEST, FP32_RELATIVE

pytestmark = pytest.mark.cpu_only

FP32, BF16 = torch.float32, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
CODES = [E4M3, E5M2, INT8]
EPS = 1e-6


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def raw(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.uint8)


def every_16_bit_number(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()


# ------------------------------------------------------------------ LayerNorm
@pytest.mark.parametrize(
    "row",
    [
        torch.arange(40000.0, 40004.0),
        1000 + torch.arange(16) * 1e-3,
        random(769) + 1000,
        random(4096) * 1e-3 - 5e4,
        torch.full((33,), 7.7),
    ],
    ids=["40000", "1000", "769", "-50000", "equal"],
)
def test_layernorm_far_from_zero(row: torch.Tensor) -> None:
    """Against fp64 on the numbers as they are stored, to 1e-5 of the largest result."""
    wide = row.double()
    centred = wide - wide.mean()
    want = centred / (centred.square().mean() + EPS).sqrt()
    x, out = row[None], torch.full((1, len(row)), torch.nan)
    reference.layernorm(x=x, weight=None, bias=None, out=out, eps=EPS, numerics="flashinfer")
    assert float((out[0] - want).abs().max()) <= 1e-5 * max(float(want.abs().max()), 1e-3)


@pytest.mark.parametrize("dtype", [FP32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize(("weighted", "shifted"), [(True, True), (True, False), (False, True), (False, False)])
def test_layernorm_is_the_formula(weighted: bool, shifted: bool, dtype: torch.dtype) -> None:
    x = (random(5, 3, 77) * 3).to(dtype)
    weight = random(77, seed=1) if weighted else None
    bias = random(77, seed=2) if shifted else None
    want = torch.nn.functional.layer_norm(
        x.double(), (77,), None if weight is None else weight.double(), None if bias is None else bias.double(), EPS
    )
    out = torch.full_like(x, torch.nan)
    reference.layernorm(x=x, weight=weight, bias=bias, out=out, eps=EPS, numerics="torch")
    relative = {FP32: FP32_RELATIVE, torch.float16: 2.0**-11, BF16: 2.0**-8}[dtype]
    torch.testing.assert_close(out.double(), want, rtol=relative, atol=FP32_OF_LARGEST * float(want.abs().max()))
    reference.layernorm(x=x, weight=weight, bias=bias, out=x, eps=EPS, numerics="torch")
    assert torch.equal(x, out)


# ------------------------------------------------------------------ rows
def test_rows_are_gathered_and_widened() -> None:
    pool = torch.randint(-128, 128, (2, 4, 40), generator=torch.Generator().manual_seed(0)).to(INT8)
    scales = torch.rand(2, 4, generator=torch.Generator().manual_seed(1)) + 0.5
    index = torch.tensor([[7, 0, 0], [3, -1, 8]], dtype=torch.int32)
    weight = random(40, seed=1).bfloat16()
    rest = {"weight": weight, "eps": EPS, "numerics": "hf-llama"}

    def run(**rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shape = rows["x"].shape[:-1] if rows["row_index"] is None else rows["row_index"].shape
        out, rstd = torch.full((*shape, 40), 9.0).bfloat16(), torch.full(shape, 9.0)
        reference.rmsnorm(**rows, **rest, out=out, rstd=rstd)
        return out, rstd

    # In hf-llama mode a weight of bf16 says what is rounded to where x is int8; where x is fp32, fp32 does.
    wide = pool.float() * scales[..., None]
    want, inverse = run(x=wide, row_index=None, input_scale=None)
    for shape in ((2, 4), (2, 4, 1), (8, 1)):
        got, _ = run(x=pool, row_index=None, input_scale=scales.reshape(shape))
        assert int(model.steps(got, want).max()) <= 2
        rows, rstd = run(x=pool, row_index=index, input_scale=scales.reshape(shape))
        for i, j in itertools.product(range(2), range(3)):
            if 0 <= int(index[i, j]) < 8:
                assert torch.equal(rows[i, j], got.view(8, 40)[index[i, j]])
                assert torch.equal(rstd[i, j], inverse.view(8)[index[i, j]])
            else:
                assert rows[i, j].isnan().all() and rstd[i, j].isnan()
    one, _ = run(x=pool, row_index=None, input_scale=torch.tensor([0.5]))
    assert int(model.steps(one, run(x=pool.float() * 0.5, row_index=None, input_scale=None)[0]).max()) <= 2
    nothing, rstd = run(x=torch.empty(0, 40), row_index=torch.tensor([0, 5]), input_scale=None)
    assert nothing.isnan().all() and rstd.isnan().all()
    assert run(x=pool, row_index=index[:0], input_scale=scales)[0].shape == (0, 3, 40)


def test_a_bad_index_quantises_to_nan() -> None:
    out = torch.zeros(2, 8, dtype=torch.uint8).view(E5M2)
    reference.rmsnorm_quant(
        x=random(3, 8), row_index=torch.tensor([-1, 2]), input_scale=None, weight=None, out=out, scale=None, eps=EPS,
        scale_value=0.01, numerics="flashinfer",
    )  # fmt: skip
    assert (raw(out)[0] == 0x7F).all()
    assert (raw(out)[1] & 0x7F < 0x7C).all()


# ------------------------------------------------------------------ codes
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_codes_to_the_byte(dtype: torch.dtype) -> None:
    """Every bf16 and fp16 number, among them NaN of both signs, infinities, zeros and subnormal numbers; halves."""
    halves = torch.arange(-300, 300) / 2
    for values in (every_16_bit_number(BF16), every_16_bit_number(torch.float16), halves):
        assert torch.equal(raw(quantise.codes(values, dtype)), raw(formats.encode(values, dtype)))


SPECIAL = torch.tensor([
    [0.0, -0.0, 0.0, -0.0],
    [torch.nan, 1.0, -2.0, 0.0],
    [torch.inf, 1.0, -torch.inf, -0.0],
    [-torch.inf, 3e38, -1e-40, 0.0],
    [1e-30, -1e-30, 0.0, -0.0],
    [448.0, -449.0, 1e-3, -1e-12],
    [3.0, -1e-7, -0.0, 2.9],
    [3.3e38, -1.0, 1e30, -0.0],
    [1e-45, -1e-45, 0.0, -0.0],
])  # fmt: skip


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0", "ue8m0_packed"])
@pytest.mark.parametrize("block", [0, 8, 16])
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_blocks_to_the_byte(dtype: torch.dtype, block: int, scale_format: str) -> None:
    """The formula and the model round the same operations: nothing of their results may differ but a NaN's bits."""
    y = torch.cat([random(20, 36) * random(20, 1).exp2(), SPECIAL.repeat(1, 9)])
    columns = -(-36 // block) if block else 1
    kept = {"fp32": FP32, "ue8m0": torch.uint8, "ue8m0_packed": torch.int32}[scale_format]
    packed = scale_format == "ue8m0_packed"
    for floor, ratio, cap in ((1e-10, False, None), (1e-4, True, None), (1e-10, False, 1.5), (1e-10, False, torch.nan)):
        stage = QuantBlocks(block, floor, ratio, scale_format != "fp32", packed, "device" if cap else "")
        scale_ub = torch.tensor([cap]) if cap else None
        out = torch.empty(y.shape, dtype=dtype)
        scale = torch.empty(len(y) + 3, -(-columns // 4) if packed else columns, dtype=kept)
        given = {"out": out, "scale": scale, "scale_ub": scale_ub}
        want = model.stores.canonical_blocks(stage, y, given, {})  # type: ignore[arg-type]
        codes, scales = quantise.by_blocks(
            y.view(1, *y.shape), dtype, len(scale), block=block, floor=floor, cap=scale_ub, ratio=ratio,
            scale_format=scale_format,
        )  # fmt: skip
        assert codes.shape == (1, *y.shape)
        assert model.same_bits({"out": codes[0], "scale": scales}, want)
        assert not scales[len(y) :].any()


def test_what_special_values_become() -> None:
    codes, scale = quantise.by_blocks(SPECIAL.repeat(1, 2), E4M3, len(SPECIAL), block=8, floor=1e-10)
    by_row = raw(codes)[:, :4].tolist()
    assert by_row[0] == [0, 0, 0, 0]
    assert by_row[1] == [0x7F] * 4
    assert by_row[2] == [0x7E, 0, 0xFE, 0x80]
    assert by_row[3][0] == 0xFE and by_row[3][2] == 0x80
    assert scale[1].isnan() and scale[2] == scale[3] and scale[0] == scale[4]
    assert scale[0] == torch.tensor(1e-10) / 448
    whole, _ = quantise.by_blocks(SPECIAL.repeat(1, 2), INT8, len(SPECIAL), block=8, floor=1e-10)
    assert whole[1].tolist() == [0] * 8
    assert whole[2, :4].tolist() == [127, 0, -127, 0]


@pytest.mark.parametrize("scale", [0.0, -2.0, torch.nan, torch.inf, 1e-45])
def test_a_scale_on_the_device_follows_ieee(scale: float) -> None:
    y = torch.tensor([[0.0, -0.0, 1.0, -3.0, torch.nan, torch.inf, 1e-30, -1e-30]])
    for dtype in (E4M3, E5M2):
        inverse = 1.0 / torch.tensor(scale)
        want = formats.encode(y * inverse, dtype)
        assert torch.equal(raw(quantise.by_tensor(y, torch.tensor([scale]), 1.0, dtype)), raw(want))


# ------------------------------------------------------------------ whole operators
def inputs(residual_dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    x = random(5, 200).bfloat16()
    x[0], x[1, 3] = 0, torch.nan
    residual = random(5, 200, seed=1).to(residual_dtype)
    residual[0] = -0.0
    return {"x": x, "residual": residual, "weight": random(200, seed=2)}


BLOCK_OUT = {"out": (5, 200, E4M3), "scale": (8, 2, FP32), "normed_out": (5, 200, BF16)}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rmsnorm_quant": ({"out": (5, 200, E5M2)}, {"scale": None, "scale_value": 0.02}),
    "rmsnorm_fp8_block_quant": (BLOCK_OUT, {}),
    "rmsnorm_dynamic_quant": (
        {**BLOCK_OUT, "out": (5, 200, INT8), "scale": (8, 1, torch.int32)},
        {"scale_ub": None, "scale_ub_value": 2.0, "granularity": "128", "scale_format": "ue8m0_packed"},
    ),
}


def outputs(form: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((m, n), 77.0).to(dtype) for name, (m, n, dtype) in FORMS[form][0].items()}


@pytest.mark.parametrize("numerics", ["flashinfer", "hf-llama", "hf-gemma"])
@pytest.mark.parametrize("form", FORMS)
def test_in_place_and_apart_are_the_same(form: str, numerics: str) -> None:
    how = {"eps": EPS, "numerics": numerics, **FORMS[form][1]}
    apart, in_place = inputs(FP32), inputs(FP32)
    h, made, again = torch.full((5, 200), torch.nan), outputs(form), outputs(form)
    getattr(reference, f"add_{form}")(**apart, h=h, **made, **how)
    assert model.same_bits(apart, inputs(FP32))
    getattr(reference, f"fused_add_{form}")(**in_place, **again, **how)
    assert torch.equal(in_place["residual"].isnan(), h.isnan())
    assert torch.equal(in_place["residual"].nan_to_num(), h.nan_to_num())
    assert model.same_bits({"x": in_place["x"]}, inputs(FP32))
    assert model.same_bits(made, again)


@pytest.mark.parametrize("numerics", ["flashinfer", "hf-llama"])
def test_block_quant_starts_from_what_it_writes(numerics: str) -> None:
    given, made = inputs(), outputs("rmsnorm_fp8_block_quant")
    reference.fused_add_rmsnorm_fp8_block_quant(**given, **made, eps=EPS, numerics=numerics)
    codes, scale = quantise.by_blocks(made["normed_out"].float(), E4M3, 8, block=128, floor=1e-4, ratio=True)
    assert model.same_bits({"out": codes, "scale": scale}, made)
    load = AddResidual(rounded=numerics != "flashinfer")
    program = RowProgram(
        load, Rms(), (Affine(round_norm=numerics == "hf-llama"), Round()), QuantBlocks(128, 1e-4, ratio=True, side=True)
    )
    formula = model.exact(program, {**inputs(), **made}, {"eps": EPS}, made)
    assert int(model.steps(made["normed_out"], formula["normed_out"]).max()) <= 2
    assert int(model.steps(made["out"], formula["out"]).max()) <= 1


def test_double_rounding_is_a_detour_through_the_inputs_dtype() -> None:
    x, weight = random(64, 128).bfloat16(), random(128, seed=1)
    normed = torch.empty_like(x)
    reference.layernorm(x=x, weight=weight, bias=weight, out=normed, eps=EPS, numerics="flashinfer")
    made = {}
    for word in ("yes", "no"):
        made[word] = torch.zeros(64, 128).to(E4M3)
        reference.layernorm_quant(
            x=x, weight=weight, bias=weight, out=made[word], scale=torch.tensor(0.03).bfloat16(), eps=EPS,
            scale_value=1.0, numerics="flashinfer", double_rounding=word,
        )  # fmt: skip
    detour = quantise.by_tensor(normed.float(), torch.tensor(0.03).bfloat16(), 1.0, E4M3)
    assert torch.equal(raw(made["yes"]), raw(detour))
    assert not torch.equal(raw(made["yes"]), raw(made["no"]))


# ------------------------------------------------------------------ compilers
Call = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]


def calls() -> dict[str, Call]:
    """Each takes `inputs()` and `outputs(form)`."""
    how = {"eps": EPS, "numerics": "hf-llama"}

    def fused(form: str) -> Call:
        return lambda given, made: getattr(reference, f"fused_add_{form}")(**given, **made, **how, **FORMS[form][1])

    def rows(given: dict[str, torch.Tensor], made: dict[str, torch.Tensor]) -> None:
        pool, index = given["x"].to(INT8), torch.tensor([4, 0, -1, 2, 2])
        scales = {"input_scale": torch.rand(5, 1).fill_(0.5), "scale": None, "scale_value": 0.1}
        reference.rmsnorm_quant(x=pool, row_index=index, weight=given["weight"], **scales, **made, **how)

    def layer(given: dict[str, torch.Tensor], made: dict[str, torch.Tensor]) -> None:
        reference.fused_add_layernorm(**given, bias=given["weight"], **how)
        scales = {"scale": torch.full((1,), 0.1), "scale_value": 1.0, "double_rounding": "yes"}
        reference.layernorm_quant(x=given["x"], weight=given["weight"], bias=None, **scales, **made, **how)

    return {**{form: fused(form) for form in FORMS}, "rows": rows, "layer": layer}


def made_by(name: str) -> dict[str, torch.Tensor]:
    return outputs(name if name in FORMS else "rmsnorm_quant")


@pytest.mark.parametrize("name", calls())
def test_traces_without_a_break(name: str) -> None:
    call = calls()[name]
    eager, traced, want, got = inputs(), inputs(), made_by(name), made_by(name)
    call(eager, want)
    torch.compile(call, fullgraph=True, backend="aot_eager")(traced, got)
    assert model.same_bits(want, got)
    assert model.same_bits(eager, traced)


def test_fake_tensors_and_no_rows() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    none = {name: t[:0] if name != "weight" else t for name, t in inputs().items()}
    for name, call in calls().items():
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            call(*({k: fake.from_tensor(t) for k, t in group.items()} for group in (inputs(), made_by(name))))
        if name != "rows":
            made = {k: t if k == "scale" else t[:0] for k, t in made_by(name).items()}
            call(none, made)
            assert "scale" not in made or not made["scale"].any()
