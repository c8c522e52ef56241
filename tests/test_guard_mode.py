"""Guard mode finds what a broken kernel did, names it, and leaves the caller's tensors alone."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

import flashnorm
from flashnorm.core import device as devices
from flashnorm.core import guard_mode, plan
from flashnorm.core.guard_mode import GuardError
from flashnorm.core.op import ALL
from flashnorm.model import same_bits
from flashnorm.ops import qk
from flashnorm.ops.rmsnorm import RMSNORM
from flashnorm.verify.cases import cases_of, operators
from flashnorm.verify.problem import call, make_problem
from tests.problem import Problem
from tests.qk import EPS
from tests.qk import Case as TurnedCase
from tests.qk import Problem as Turned
from tests.refusals import FULL, OPS, every_op

NAN = float("nan")


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    """Guard mode for one test, from cold."""
    for op in ALL.values():
        op.forget()
    monkeypatch.setattr(guard_mode, "settings", dataclasses.replace(guard_mode.settings, guard=True))
    yield
    for op in ALL.values():
        op.forget()


@pytest.fixture
def breaks(monkeypatch):
    """Puts a fault behind the kernel of every call: a function of the tensors by operand, called after the launch."""

    def install(fault):
        plain = plan.make_plan

        def broken(op, tensors, options):
            made = plain(op, tensors, options)

            def run(*args):
                given = dict(zip([o.name for o in op.operands], args[len(op.scalars) + 1 :], strict=True))
                fault(given, lambda: made.run(*args))

            return dataclasses.replace(made, run=run)

        monkeypatch.setattr(plan, "make_plan", broken)

    return install


def after(fault):
    """A fault that follows the launch."""

    def both(given, launch):
        launch()
        fault(given)

    return both


def rows(device, *shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@every_op
def test_a_good_kernel_passes(op, route, device):
    """With everything an operator can be given, written tensors in watched buffers: the bits are those of any call."""
    make = lambda: Problem(FULL[op], (5, 256), device)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard_mode, "settings", dataclasses.replace(guard_mode.settings, guard=False))
        want = make().prepare("contiguous")(route)
    got = make().prepare("contiguous")(route)
    for field in dataclasses.fields(want):
        left, right = getattr(want, field.name), getattr(got, field.name)
        assert (left is None) == (right is None)
        if left is not None:
            assert torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)), field.name


@pytest.mark.parametrize("name", operators())
def test_every_case_of_every_operator_passes_on_pytorchs_route(name, device):
    """No false alarm, whatever the operands are; and the same results as without."""
    op = ALL[name]
    for case in cases_of(op):
        p = make_problem(op, case, 5, 256, device)
        with flashnorm.backend("torch"):
            got = call(p, device)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(guard_mode, "settings", dataclasses.replace(guard_mode.settings, guard=False))
                want = call(p, device)
        assert same_bits(want, got), case


def test_no_call_becomes_warm(device):
    x, w = rows(device, 4, 64), rows(device, 64, seed=1)
    for _ in range(3):
        flashnorm.rmsnorm(x, w)
    assert not RMSNORM._warm_calls


def test_switched_off_nothing_is_looked_at(device, monkeypatch):
    monkeypatch.setattr(guard_mode, "settings", dataclasses.replace(guard_mode.settings, guard=False))
    monkeypatch.setattr(guard_mode, "launch", None)
    x = rows(device, 4, 64)
    x[1, 2] = NAN
    assert flashnorm.rmsnorm(x, rows(device, 64))[1].isnan().all()
    assert RMSNORM._warm_calls


# ------------------------------------------------------------------ what goes in
@pytest.mark.parametrize("name", ["input", "residual", "weight"])
def test_a_nan_that_goes_in(name, device, route):
    given = {"input": rows(device, 6, 64), "residual": rows(device, 6, 64, seed=1), "weight": rows(device, 64, seed=2)}
    given[name].view(-1, 64)[-1, 7] = NAN
    before = {key: t.clone() for key, t in given.items()}
    row = 0 if name == "weight" else 5
    with (
        flashnorm.backend(route),
        pytest.raises(GuardError, match=rf"fused_add_rmsnorm: .*{name}: row {row}, element 7"),
    ):
        flashnorm.fused_add_rmsnorm(*given.values())
    assert all(torch.equal(given[key], t) or key == name for key, t in before.items())


@pytest.mark.parametrize("bad", [6, -1])
def test_a_row_index_that_is_out_of_range(bad, device):
    index = torch.tensor([0, bad, 2], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=f"row_index must be 0 to 5, got {bad}"):
        flashnorm.rmsnorm(rows(device, 6, 64), rows(device, 64), row_index=index)
    out = torch.full((3, 64), 7.0, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=f"rmsnorm: row_index must be 0 to 5, got {bad}"):
        torch.ops.flashnorm.rmsnorm_rows(
            rows(device, 6, 64), index, None, rows(device, 64), out, None, 1e-6, "flashinfer", True
        )
    assert bool((out == 7).all())


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("bad", [11, -1])
def test_a_position_that_is_out_of_range(bad, coded, device):
    """Of a table of cosines: the operator and the token are named, whoever calls, and no result is written."""
    problem = Turned(TurnedCase(rotary=32, interleave=False, coded=coded))
    problem.positions.view(-1)[9] = bad
    with pytest.raises(ValueError, match=rf"fused_qk_rmsnorm_rope: positions must be 0 to 10, got {bad} for row 9"):
        problem.run(None, device)
    given = [t.to(device) for t in (problem.x, *problem.weights.values(), problem.positions, problem.cache)]
    dtype = torch.uint8 if coded else torch.bfloat16
    outs = [torch.full((*problem.lead, n, 64), 7, dtype=dtype, device=device) for n in problem.case.heads]
    layout = qk._text(*problem.case.heads, 64, *[None] * 6, 10000.0, False, 1.0, 0.0, 0.0, 1.0, True, "hidden", 32)
    op = (
        torch.ops.flashnorm.fused_qk_rmsnorm_rope_cached_fp8
        if coded
        else torch.ops.flashnorm.fused_qk_rmsnorm_rope_cached
    )
    with pytest.raises(ValueError, match=rf"fused_qk_rmsnorm_rope: positions must be 0 to 10, got {bad} for row 9"):
        op(*given, *outs, EPS, 1.0, 1.0, "flashinfer", layout, True, *(["float8_e4m3fn"] * 3 if coded else []))
    assert all(bool((out == 7).all()) for out in outs)


@pytest.mark.parametrize("which", [torch.int32, torch.int64])
def test_rows_that_no_index_picks_may_hold_anything(which, device, route):
    pool, w = rows(device, 2, 3, 64), rows(device, 64, seed=1)
    index = torch.tensor([[5, 1], [1, 2]], dtype=which, device=device)
    with flashnorm.backend(route):
        want = flashnorm.rmsnorm(pool, w, row_index=index)
    pool.view(6, 64)[0], pool.view(6, 64)[3:5] = NAN, torch.inf
    with flashnorm.backend(route):
        assert torch.equal(flashnorm.rmsnorm(pool, w, row_index=index), want)
        pool.view(6, 64)[2, 7] = NAN
        with pytest.raises(GuardError, match=r"rmsnorm: .*input: row 2, element 7 is NaN before the launch \(1 of 6"):
            flashnorm.rmsnorm(pool, w, row_index=index)
        pool.view(6, 64)[2, 7] = torch.inf
        with pytest.raises(GuardError, match="is NaN after the launch; row 2 of input holds an infinity"):
            flashnorm.rmsnorm(pool, w, row_index=index)


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_scales_of_rows_that_no_index_picks_may_hold_anything(shape, device, route):
    pool, w = torch.arange(-192, 192, device=device).view(6, 64).char(), rows(device, 64, seed=1)
    scale, index = torch.full(shape, 0.25, device=device), torch.tensor([4, 1], device=device)
    with flashnorm.backend(route):
        want = flashnorm.rmsnorm(pool, w, row_index=index, input_scale=scale)
    scale[0] = scale[5] = NAN
    with flashnorm.backend(route):
        assert torch.equal(flashnorm.rmsnorm(pool, w, row_index=index, input_scale=scale), want)
        scale[4] = NAN
        with pytest.raises(GuardError, match="input_scale: row 4, element 0 is NaN before the launch"):
            flashnorm.rmsnorm(pool, w, row_index=index, input_scale=scale)
        with pytest.raises(GuardError, match="input_scale: row 0, element 0 is NaN"):  # one for all rows
            flashnorm.rmsnorm(pool, w, row_index=index, input_scale=scale[:1])


@pytest.mark.parametrize("coded", [False, True])
def test_positions_that_no_token_has_may_hold_anything(coded, device, route):
    problem = Turned(TurnedCase(rotary=32, interleave=False, coded=coded))
    problem.positions.clamp_(1, 9)
    problem.cache[0], problem.cache[10] = NAN, torch.inf
    problem.run(route, device)
    used = int(problem.positions.min())
    problem.cache[used, 3] = NAN
    with pytest.raises(GuardError, match=f"cos_sin_cache: row {used}, element 3 is NaN before the launch"):
        problem.run(route, device)


def test_rows_that_eps_rules_are_named(device, caplog):
    x, w = rows(device, 5, 64), rows(device, 64, seed=1)
    x[2:4] *= 1e-4
    with caplog.at_level(logging.WARNING, logger="flashnorm"):
        flashnorm.rmsnorm(x, w, 1e-6)
    assert "rmsnorm: guard mode: 2 of 5 rows have a mean square below 10 eps; the first is row 2" in caplog.text
    caplog.clear()
    flashnorm.rmsnorm(x, w, 1e-12)
    assert not caplog.text
    constant = torch.full_like(x, 3.0)
    flashnorm.layernorm(constant, w, None)
    assert "layernorm: guard mode: 5 of 5 rows have a variance below" in caplog.text
    caplog.clear()
    flashnorm.fused_add_rmsnorm(x.clone(), -x, w)
    assert "fused_add_rmsnorm: guard mode: 5 of 5 rows have a mean square" in caplog.text


# ------------------------------------------------------------------ what comes out
def test_rows_that_were_not_written(breaks, device):
    def half(given, launch):
        out, kept = given["out"], given["out"].clone()
        launch()
        out[3:] = kept[3:]

    x, w = rows(device, 6, 64), rows(device, 64, seed=1)
    out = torch.zeros_like(x)
    breaks(half)
    with pytest.raises(GuardError, match=r"rmsnorm: .*out: row 3, element 0 was not written \(3 of 6 rows\)"):
        flashnorm.rmsnorm(x, w, out=out)
    assert not bool(out.any())


def test_a_residual_that_was_not_written(breaks, device):
    def forgets(given, launch):
        kept = given["residual"].clone()
        launch()
        given["residual"][4] = kept[4]

    breaks(forgets)
    x, residual = rows(device, 6, 64), rows(device, 6, 64, seed=1)
    before = x.clone(), residual.clone()
    with pytest.raises(GuardError, match="residual: row 4, element 0 is not the sum of input and residual"):
        flashnorm.fused_add_rmsnorm(x, residual, rows(device, 64, seed=2))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])  # no half-updated call


@pytest.mark.parametrize(
    ("at", "where"), [(6 * 80, "behind row 5"), (-1, "in front of row 0"), (2 * 80 + 64, "behind row 2")]
)
def test_a_store_beside_a_row(at, where, breaks, device):
    def past(given):
        out = given["out"]
        out.as_strided((1,), (1,), out.storage_offset() + at).fill_(1.0)

    breaks(after(past))
    out = torch.zeros(6, 80, dtype=torch.bfloat16, device=device)[:, :64]
    with pytest.raises(GuardError, match=f"out: 2 bytes were written outside of it, the first {where}"):
        flashnorm.rmsnorm(rows(device, 6, 64), rows(device, 64), out=out)


def test_an_input_that_was_written(breaks, device):
    breaks(after(lambda given: given["x"][2].mul_(2)))
    with pytest.raises(GuardError, match="input: row 2, element 0 was written, but is an input"):
        flashnorm.rmsnorm(rows(device, 6, 64), rows(device, 64))


def test_a_nan_that_comes_out(breaks, device):
    breaks(after(lambda given: given["out"][1, 5].fill_(NAN)))
    with pytest.raises(GuardError, match=r"out: row 1, element 5 is NaN after the launch \(1 of 6 rows\)$"):
        flashnorm.rmsnorm(rows(device, 6, 64), rows(device, 64))


def test_an_infinity_is_named_where_it_made_a_nan(device, route):
    x = rows(device, 6, 64)
    x[3, 9] = torch.inf
    with (
        flashnorm.backend(route),
        pytest.raises(GuardError, match="is NaN after the launch; row 3 of input holds an inf"),
    ):
        flashnorm.rmsnorm(x, rows(device, 64))


QUANT = {
    "e4m3": lambda x, w, out: flashnorm.rmsnorm_quant(out.view(torch.float8_e4m3fn), x, w, 1.0),
    "e5m2": lambda x, w, out: flashnorm.rmsnorm_quant(out.view(torch.float8_e5m2), x, w, 1.0),
    "int8": lambda x, w, out: flashnorm.rmsnorm_dynamic_quant(x, w, dtype=torch.int8, out=out.view(torch.int8)),
    "nvfp4": lambda x, w, out: flashnorm.rmsnorm_fp4quant(x, w, out[:, :64]),
}


@pytest.mark.parametrize("form", QUANT)
def test_codes_that_were_not_written(form, breaks, device):
    def one(given, launch):
        out = given["out"].view(torch.uint8)
        kept = out.clone()
        launch()
        out[2, 24:32] = kept[2, 24:32]

    breaks(one)
    with pytest.raises(GuardError, match=r"row 2, element 24 was not written \(1 of 6 rows\)"):
        QUANT[form](rows(device, 6, 128), rows(device, 128), torch.zeros(6, 128, dtype=torch.uint8, device=device))


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_codes_that_are_nan(form, breaks, device):
    breaks(after(lambda given: given["out"].view(torch.uint8)[4, 1].fill_(0x7F)))
    with pytest.raises(GuardError, match="out: row 4, element 1 is NaN after the launch"):
        QUANT[form](rows(device, 6, 128), rows(device, 128), torch.zeros(6, 128, dtype=torch.uint8, device=device))


SCALED = {
    "column": lambda x, w: flashnorm.rmsnorm_dynamic_quant(x, w, granularity=128, scale_layout="column"),
    "packed": lambda x, w: flashnorm.rmsnorm_dynamic_quant(
        x, w, granularity=128, scale_layout="column", scale_format="ue8m0_packed"
    ),
    "e4m3 tiles": lambda x, w: flashnorm.rmsnorm_fp4quant(x, w, is_sf_swizzled_layout=True),
    "ue8m0 tiles": lambda x, w: flashnorm.rmsnorm_mxfp8_quant(x, w, is_sf_swizzled_layout=True),
}


@pytest.mark.parametrize("form", SCALED)
def test_padding_of_scales(form, breaks, device):
    """The memory of row 6, which is not there: in columns behind the last row, in tiles 16 bytes a row."""

    def dirty(given):
        scale = given["scale"]
        flat = scale.as_strided((8,), (1,), scale.storage_offset()) if scale.dim() > 1 else scale.view(torch.uint8)
        flat[96 if scale.dim() == 1 else 6] = 1

    breaks(after(dirty))
    with pytest.raises(GuardError, match="scale: row 6, element 0 is padding, but not zero"):
        SCALED[form](rows(device, 6, 256), rows(device, 256))


@pytest.mark.parametrize("form", SCALED)
def test_scales_that_were_not_written(form, breaks, device):
    def skips(given, launch):
        scale = given["scale"]
        raw = scale.view(torch.uint8) if scale.element_size() == 1 else scale
        kept = raw.clone()
        launch()
        at = 3 * 16 if scale.dim() == 1 else (3, 0)
        raw[at] = kept[at]

    breaks(skips)
    with pytest.raises(GuardError, match=r"scale: row 3, element 0 was not written"):
        SCALED[form](rows(device, 6, 256), rows(device, 256))


# ------------------------------------------------------------------ which calls
def test_the_registered_operator_is_looked_at(breaks, device):
    breaks(after(lambda given: given["out"][1].fill_(NAN)))
    x = rows(device, 6, 64)
    with pytest.raises(GuardError, match="row 1"):
        torch.ops.flashnorm.rmsnorm(x, x[0], torch.empty_like(x), None, 1e-6, "flashinfer", True)


def test_inference_tensors_and_parameters(device):
    with torch.inference_mode():
        x, residual = rows(device, 6, 64), rows(device, 6, 64, seed=1)
        weight = torch.nn.Parameter(rows(device, 64, seed=2))
    flashnorm.fused_add_rmsnorm(x, residual, weight)
    with torch.no_grad():
        flashnorm.rmsnorm(x, torch.nn.Parameter(rows(device, 64, seed=2)))


def test_no_rows(device):
    assert flashnorm.rmsnorm(rows(device, 0, 64), rows(device, 64)).shape == (0, 64)


def test_a_capture_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(devices, "capturing", lambda: True)
    assert not guard_mode.applies(torch.device("cuda", 0))
    assert guard_mode.applies(torch.device("cpu"))


def test_every_operator_is_tried():
    assert set(OPS) <= set(ALL)
