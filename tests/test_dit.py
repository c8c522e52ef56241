"""The LayerNorms of diffusion transformers: modulation, batches of tiles, codes, what is refused, what is promised."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashnorm
from flashnorm.ops import dit, modulation
from tests.gatecombos import COMBOS, DIT, OVER, USUAL, A, B, C, GateCombo
from tests.gatekit import FUNCTIONS, G, GateProblem, judge
from tests.inputs import gains, rows
from tests.tolerance import RSTD_RELATIVE, assert_same_bits

BF16 = torch.bfloat16
usual = pytest.mark.parametrize("combo", [c for c in USUAL if c.op in DIT], ids=str)
every_dit = pytest.mark.parametrize("op", DIT)
CODED = tuple(c for c in COMBOS if c.form)


# ------------------------------------------------------------------ modulation
@every_dit
def test_slices_of_one_tensor(op: str, route: str, device: torch.device) -> None:
    """`temb.chunk(6, dim=2)`, one for each token or each batch, is read in place; the same made contiguous is equal."""
    combo = next(c for c in USUAL if c.op == op)
    for tokens in (5, 1):
        problem = GateProblem(replace(combo, over="BRH" if tokens == 5 else "B1H"), (2, 5, 96), device)
        call = problem.prepare()
        temb = torch.full((2, tokens, 6 * 96), 7.0, dtype=BF16, device=device)
        slices = dict(zip(("shift", "scale", "gate"), temb.chunk(6, dim=2)[1::2], strict=True))
        for name, part in slices.items():
            if name in call.arguments:
                part.copy_(call.arguments[name])
                call.arguments[name] = part
        before, want = temb.clone(), problem.run(route)
        for name, tensor in call(route).items():
            assert_same_bits(tensor, want[name], f"{op}: {name}")
        assert torch.equal(temb, before)


@every_dit
def test_rows_of_the_only_batch(op: str, route: str, device: torch.device) -> None:
    """[R, H] where B is 1: as the same with a batch."""
    combo = replace(next(c for c in USUAL if c.op == op), over="BRH")
    problem = GateProblem(combo, (1, 6, 96), device)
    call, want = problem.prepare(), problem.run(route)
    for name in ("gate", "scale", "shift"):
        if name in call.arguments:
            call.arguments[name] = call.arguments[name][0]
    for name, tensor in call(route).items():
        assert_same_bits(tensor, want[name], f"{op}: {name}")


@every_dit
def test_biases_of_one_row(op: str, route: str, device: torch.device) -> None:
    problem = GateProblem(next(c for c in USUAL if c.op == op), (2, 5, 96), device)
    call, want = problem.prepare(), problem.run(route)
    for name in [name for name in call.arguments if name.endswith("_bias")]:
        call.arguments[name] = call.arguments[name].view(1, 96)
    for name, tensor in call(route).items():
        assert_same_bits(tensor, want[name], f"{op}: {name}")


@pytest.mark.parametrize("left_out", [("scale_bias",), ("shift_bias",), ("gate_bias",)], ids=str)
@pytest.mark.parametrize("op", [B, C])
def test_any_bias_may_be_missing(op: str, left_out: tuple[str, ...], route: str, device: torch.device) -> None:
    """One that is missing is none of zeros: -0 would show."""
    problem = GateProblem(next(c for c in USUAL if c.op == op), (2, 5, 96), device)
    for name in left_out:
        if problem.tensors.pop(name, None) is None:
            pytest.skip(f"{op} has no {name}")
    judge(problem, route)
    call = problem.prepare()
    call.arguments |= dict.fromkeys(left_out)
    for name, tensor in call(route).items():
        assert_same_bits(tensor, problem.run(route)[name], name)


def test_no_shift_in_a_vector_of_minus_zeros(exact_route: str, device: torch.device) -> None:
    """What is missing is not added: a norm of -0 plus a shift of -0 stays -0."""
    zeros = torch.zeros(1, 2, 64)
    given = {"input": zeros.to(BF16), "scale": zeros[0, :1].to(BF16), "shift": -zeros[0, :1].to(BF16)}
    given["input"][0, 1] = -0.0
    problem = GateProblem(GateCombo(C, residual=None, bias=None, over="BH"), (1, 2, 64), device, given=given)
    problem.check_bits(problem.run(exact_route))


# ------------------------------------------------------------------ codes
@pytest.mark.parametrize("combo", CODED, ids=str)
def test_quantising_the_norm_gives_the_same_bytes(combo: GateCombo, route: str, device: torch.device) -> None:
    """The output in the input's dtype, put through the quantising norms of a row of ones, or a quantiser: equal."""
    problem = GateProblem(combo, (3, 5, 192), device)
    plain = GateProblem(replace(combo, form=""), (3, 5, 192), device, given=problem.tensors).run(route)
    got = problem.run(route)
    assert_same_bits(got["residual_out"], plain["residual_out"], "residual_out")
    norm = plain["norm_out"].view(15, 192).float()
    codes, scales = problem.decoded(got)
    # A row of ones has a norm of 1 with eps = 0, so that the weight is what is quantised.
    ones = torch.ones(1, 192, dtype=torch.float32, device=device)
    for i, row in enumerate(norm):
        with flashnorm.backend(route):
            if combo.form == "nvfp4":
                mine = flashnorm.rmsnorm_fp4quant(ones, row.to(device), eps=0.0, global_scale=G)
            else:
                mine = flashnorm.rmsnorm_mxfp8_quant(ones, row.to(device), eps=0.0)
        left = [codes.view(torch.uint8).view(15, -1)[i], scales.view(torch.uint8)[i]]
        for bytes_, want in zip(left, mine, strict=True):
            assert torch.equal(bytes_, want[0].cpu().view(torch.uint8)), f"row {i}"


@pytest.mark.parametrize("combo", CODED, ids=str)
def test_numbers_that_codes_stand_for(combo: GateCombo, route: str, device: torch.device) -> None:
    """`dequantize` reads the outputs as they are: near the norm by a step of the format."""
    problem = GateProblem(combo, (2, 130, 128), device)
    got = problem.run(route)
    norm = GateProblem(replace(combo, form=""), (2, 130, 128), device, given=problem.tensors).run(route)["norm_out"]
    codes, _ = problem.decoded(got)
    four = combo.form == "nvfp4"
    for batch in range(2):
        read = flashnorm.dequantize(
            codes[batch], got["sf_out"][batch].flatten().view(torch.float8_e4m3fn if four else torch.uint8),
            block_size=combo.whole, global_scale=G if four else None, swizzled=True,
        )  # fmt: skip
        wide = norm[batch].float()
        largest = wide.unflatten(-1, (-1, combo.whole)).abs().amax(-1, keepdim=True)
        apart = (read - wide).unflatten(-1, (-1, combo.whole)).abs()
        saturated = G * largest / 6 > 448 if four else torch.zeros_like(largest, dtype=torch.bool)
        # Half the largest step of the codes; e4m3 scales are off by up to a sixteenth more.
        assert bool(((apart <= largest * (0.25 if four else 1 / 14)) | saturated).all())


@pytest.mark.parametrize("rows_of", [1, 5, 127, 128, 129, 256, 300])
@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("form", ["nvfp4", "mxfp8"])
def test_tiles_of_every_batch(form: str, batches: int, rows_of: int, route: str, device: torch.device) -> None:
    """Each batch has its own, padded with zeros, whatever sf_out held; one call where tiles end with the batch."""
    combo = GateCombo(B, form=form, number="value")
    problem = GateProblem(combo, (batches, rows_of, 96), device)
    for out in ("none", "contiguous"):
        judge(problem, route, out)
    calls: list[int] = []
    key = ("gate_scale_shift", form)
    plain = dit.CALLS[key]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dit.CALLS, key, lambda *a: (calls.append(1), plain(*a))[1])  # type: ignore[index]
        problem.run(route)
    assert len(calls) == (1 if batches == 1 or rows_of % 128 == 0 else batches)


def test_lost_scales_are_warned_of_once(device: torch.device) -> None:
    problem = GateProblem(GateCombo(C, form="mxfp8", number=""), (1, 5, 96), device)
    call = problem.prepare()
    given = {name: value for name, value in call.arguments.items() if name != "return_scales"}
    dit._say_lost.cache_clear()
    with flashnorm.backend("torch"):
        with pytest.warns(UserWarning, match=f"{C}: the scales of these codes are lost") as caught:
            made = FUNCTIONS[C](**given)
        assert len(made) == 2 and len(caught) == 1 and caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            FUNCTIONS[C](**given)
            dit._say_lost.cache_clear()
            scales = problem.prepare("contiguous").arguments["sf_out"]
            assert len(FUNCTIONS[C](**given, sf_out=scales)) == 2
            assert len(FUNCTIONS[C](**given, return_scales=True)) == 3


# ------------------------------------------------------------------ accuracy
@usual
def test_rows_far_from_zero(combo: GateCombo, route: str, device: torch.device) -> None:
    """A mean of 1000, a spread of 0.01: rstd within 1e-5 of the fp64 variance of h. E[x^2] - E[x]^2 would be noise."""
    combo = GateCombo(combo.op, "f32", "f32", "f32", None, over="H")
    for h in (16, 769, 3072):
        shape = (1, 3, h)
        spread = rows(shape, torch.float32, "spread", h)
        given = {"input": 1000 + 0.01 * spread / spread.std(-1, keepdim=True)}
        given |= {"residual": torch.zeros(shape), "gate": torch.ones(h)}
        given |= {
            "gamma": torch.full((h,), 1.0),
            "beta": torch.zeros(h),
            "scale": torch.zeros(h),
            "shift": torch.zeros(h),
        }
        problem = GateProblem(combo, shape, device, given=given, eps=1e-12)
        wide = problem.tensors["input"].double()
        centred = wide - wide.mean(-1, keepdim=True)
        rstd = 1 / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        got = problem.run(route)["norm_out"].double()
        found = (got * centred).sum(-1, keepdim=True) / centred.square().sum(-1, keepdim=True)  # the slope, fitted
        assert float(((found - rstd) / rstd).abs().max()) < 10 * RSTD_RELATIVE


def test_h_is_rounded_once(exact_route: str, device: torch.device) -> None:
    """x g + r in one fused step: a product that is rounded by itself loses what the residual leaves of it."""
    x = torch.full((1, 1, 64), 1 + 2.0**-12)
    gate = torch.full((64,), 1 - 2.0**-12)
    given = {"input": x, "gate": gate, "residual": torch.full((1, 1, 64), -1.0)}
    combo = GateCombo(A, "f32", "f32", "f32", None, over="H")
    stored = GateProblem(combo, (1, 1, 64), device, given=given).run(exact_route)["residual_out"]
    assert torch.equal(stored, torch.full((1, 1, 64), -(2.0**-24)))


def test_which_sum_is_normalised(route: str, device: torch.device) -> None:
    """x = 1, residual = 0.00396 in bf16: 1.0039673, or what is stored of it, 1.0078125."""
    base = torch.full((1, 1, 64), 1.0)
    base[..., ::2] = -1.0
    for numerics, h in (("flashinfer", 1.0039673), ("hf-gemma", 1.0078125)):
        given = {"input": base.to(BF16), "residual": (base * 0.00396).to(BF16)}
        given |= {"scale": torch.zeros(1, 64).to(BF16), "shift": torch.zeros(1, 64).to(BF16)}
        combo = GateCombo(C, bias=None, over="1H", numerics=numerics)
        problem = GateProblem(combo, (1, 1, 64), device, given=given, eps=1.0)
        judge(problem, route)
        got = problem.run(route)
        assert float(got["residual_out"][0, 0, 1]) == 1.0078125
        assert abs(float(got["norm_out"][0, 0, 1]) - h / math.sqrt(1 + h * h)) < 2.0**-8


# ------------------------------------------------------------------ what is refused
def good(op: str, device: torch.device, form: str = "") -> dict[str, Any]:
    combo = replace(next(c for c in USUAL if c.op == op), form=form, number="value" if form else "")
    return GateProblem(combo, (2, 5, 96), device).prepare("contiguous").arguments


def refuse(op: str, error: type[Exception], text: str, given: dict[str, Any]) -> None:
    device = given["input"].device
    written = ("residual_out", "norm_out", "sf_out")
    kept = {n: given[n].clone() for n in written if isinstance(given.get(n), torch.Tensor)}
    kept = {n: t for n, t in kept.items() if given[n].is_contiguous() and t.device == device}
    for _ in range(2):
        with flashnorm.backend("torch"), pytest.raises(error, match=f"{op}: {text}"):
            FUNCTIONS[op](**given)
    for name, before in kept.items():
        assert torch.equal(given[name].view(torch.uint8), before.view(torch.uint8)), f"{name} was written"


SHAPES = [
    (95,),
    (97,),
    (1,),
    (3, 96),
    (5, 96),
    (2, 95),
    (1, 5, 95),
    (3, 1, 96),
    (2, 4, 96),
    (2, 2, 96),
    (1, 2, 5, 96),
    (),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("op", "name"), [(A, "gate"), (B, "gate"), (B, "scale"), (B, "shift"), (C, "scale"), (C, "shift")]
)
def test_modulation_that_does_not_fit(op: str, name: str, shape: tuple[int, ...], device: torch.device) -> None:
    """B is 2 and R is 5: neither rows for batches nor a third batch, in every format."""
    for form in dit.FORMATS:
        bad = torch.ones(shape, device=device).to(BF16)
        text = rf"{name} must have shape \(96,\), \(1, 96\), \(2, 96\), \(2, 1, 96\) or \(2, 5, 96\), got "
        refuse(op, ValueError, text, good(op, device, form) | {name: bad})


@pytest.mark.parametrize("shape", [(2, 96), (5, 96), (95,), (1, 1, 96), (96, 1), ()], ids=str)
def test_biases_and_gains_that_do_not_fit(shape: tuple[int, ...], device: torch.device) -> None:
    for op, names in {A: ("gate_bias", "gamma", "beta"), B: ("gate_bias", "scale_bias", "shift_bias")}.items():
        for name in names:
            bad, given = torch.ones(shape, device=device), good(op, device)
            refuse(op, ValueError, rf"{name} must have shape \(96,\).*got", given | {name: bad})
    refuse(A, ValueError, r"gamma must have shape \(96,\), got", good(A, device) | {"gamma": torch.ones(1, 96)})


@every_dit
def test_rows_that_do_not_fit(op: str, device: torch.device) -> None:
    for form in dit.FORMATS:
        given = good(op, device, form)
        for name in ("residual", "residual_out", *(() if form else ("norm_out",))):
            for shape in ((2, 5, 95), (3, 5, 96), (1, 5, 96), (2, 1, 96), (10, 96)):
                bad = torch.zeros(shape, device=device).to(BF16)
                refuse(op, ValueError, rf"{name} must have shape \(2, 5, 96\), got", given | {name: bad})
    for shape in ((5, 96), (96,), (1, 2, 5, 96), ()):
        bad = torch.zeros(shape, device=device).to(BF16)
        refuse(op, ValueError, r"input must have shape \[B, R, H\], got", good(op, device) | {"input": bad})


@every_dit
def test_codes_that_do_not_fit(op: str, device: torch.device) -> None:
    for form, block in (("nvfp4", 16), ("mxfp8", 32)):
        given = good(op, device, form)
        narrow = {
            n: t[..., :72] if isinstance(t, torch.Tensor) and t.shape[-1:] == (96,) else t for n, t in given.items()
        }
        refuse(op, ValueError, f"the last dimension of input must be a multiple of {block}, got 72", narrow)
        for name in ("norm_out", "sf_out"):
            tensor = given[name]
            refuse(op, ValueError, f"{name} must have shape .*, got", given | {name: tensor[:1]})
            apart = tensor.new_empty((*tensor.shape, 2))[..., 0]
            refuse(op, ValueError, f"{name} must be contiguous .*, got", given | {name: apart})
            refuse(
                op, ValueError, f"{name} must be contiguous .*, got torch.int8", given | {name: tensor.to(torch.int8)}
            )
            refuse(op, TypeError, f"{name} must be a torch.Tensor, got list", given | {name: [1]})
            refuse(op, ValueError, f"{name} is on meta, but input on", given | {name: tensor.to("meta")})


@every_dit
def test_what_does_not_go_together(op: str, device: torch.device) -> None:
    plain, nvfp4, mxfp8 = (good(op, device, form) for form in dit.FORMATS)
    refuse(op, ValueError, "use_nvfp4 and use_mxfp8 exclude each other", nvfp4 | {"use_mxfp8": True})
    without = {name: value for name, value in nvfp4.items() if name != "global_scaling_factor"}
    refuse(op, ValueError, "global_scaling_factor is needed with use_nvfp4", without)
    refuse(op, ValueError, "global_scaling_factor goes with use_nvfp4", mxfp8 | {"global_scaling_factor": 2.0})
    refuse(op, ValueError, "global_scaling_factor goes with use_nvfp4", plain | {"global_scaling_factor": 2.0})
    refuse(op, ValueError, "sf_out goes with", plain | {"sf_out": mxfp8["sf_out"]})
    refuse(op, ValueError, "return_scales goes with", plain | {"return_scales": True})
    refuse(op, ValueError, "use_mxfp8 must be True or False", plain | {"use_mxfp8": 1})
    refuse(
        op,
        ValueError,
        "input_global_scaling_factor must be finite and > 0",
        plain | {"input_global_scaling_factor": 0.0},
    )
    refuse(op, TypeError, "global_scaling_factor must be a Python number", nvfp4 | {"global_scaling_factor": "2"})
    for bad in (torch.ones(2, device=device), torch.ones(1, 1, device=device)):
        refuse(op, ValueError, "global_scaling_factor must be a scalar", nvfp4 | {"global_scaling_factor": bad})
    refuse(op, ValueError, "epsilon must be finite and >= 0, got -1.0", plain | {"epsilon": -1.0})
    refuse(op, ValueError, "numerics must be one of", plain | {"numerics": "exact"})
    refuse(op, ValueError, "enable_pdl must be", plain | {"enable_pdl": 3})


@every_dit
def test_memory_that_overlaps(op: str, device: torch.device) -> None:
    """Within a batch, and from one batch to another where each is a call of its own."""
    for form in dit.FORMATS:
        given = good(op, device, form)
        shared = rows((3, 5, 96), BF16).to(device)
        text = "(residual_out|input) overlaps (input|residual_out) in memory"
        refuse(op, ValueError, text, given | {"input": shared[:2], "residual_out": shared[1:]})
        refuse(op, ValueError, "residual_out is written", given | {"residual_out": shared[:1].expand(2, 5, 96)})
        if op != C:
            text = "(gate overlaps residual_out|residual_out overlaps gate)"
            refuse(
                op,
                ValueError,
                text,
                given | {"gate": given["residual_out"][1]} | {"gate": given["residual_out"][1, :1]},
            )


@every_dit
def test_no_batches_are_checked_too(op: str, device: torch.device) -> None:
    for form in dit.FORMATS:
        combo = replace(next(c for c in USUAL if c.op == op), form=form, number="value" if form else "")
        given = GateProblem(combo, (0, 5, 96), device).prepare("contiguous").arguments
        refuse(op, ValueError, "epsilon must be", given | {"epsilon": math.nan})
        refuse(
            op, ValueError, "residual must have dtype", given | {"residual": torch.zeros(0, 5, 96, dtype=torch.int8)}
        )


def test_modulation_has_a_shape_of_its_own() -> None:
    """Of every shape of up to three dimensions, those that the contract names are taken, and no other."""
    batches, count, hidden = 2, 5, 96
    x = torch.empty(batches, count, hidden)
    taken = {(hidden,), (1, hidden), (batches, hidden)}
    taken |= {(b, r, hidden) for b in (1, batches) for r in (1, count)}
    sizes = (1, batches, count, 3, hidden)
    for shape in (
        [(a,) for a in sizes]
        + [(a, b) for a in sizes for b in sizes]
        + [(a, b, c) for a in sizes for b in sizes for c in sizes]
    ):
        assert modulation._modulates(torch.empty(shape), x) == (shape in taken), shape
    assert len(OVER) == 5


@usual
def test_weights_are_never_enlarged(combo: GateCombo, device: torch.device) -> None:
    vector = gains((1, 5, 96), BF16).to(device)
    name = "gate" if combo.op == A else "scale"
    given = GateProblem(combo, (1, 1, 96), device).prepare().arguments
    refuse(combo.op, ValueError, f"{name} must have shape", given | {name: vector})
