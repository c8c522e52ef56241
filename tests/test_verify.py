"""`flashnorm verify`: that it passes what is right, and sees what it should."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest
import torch

from flashnorm import model, verify
from flashnorm.core.dispatch import backend
from flashnorm.core.op import ALL, OPS
from flashnorm.model import formats
from flashnorm.model import turned as turned_model
from flashnorm.verify import cases, eager, lines, problem, turned

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def raw(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def _canonical(p: problem.Problem) -> dict[str, torch.Tensor]:
    return model.canonical(p.program, p.modelled(), p.scalars())


def _model_call(p, device):
    """A perfect route: the model itself."""
    return _canonical(p)


def _turned(p, device):
    """The same of Q, K and V."""
    return turned_model.canonical(p.program, p.given, turned.scalars_of(p))


@pytest.fixture
def perfect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "call", _model_call)
    monkeypatch.setattr(turned, "call", _turned)
    for module in (verify, lines, turned):
        monkeypatch.setattr(module, "serves", lambda op, route, device: None if route == "cpu" else "not here")
    monkeypatch.setattr(verify, "speed", lambda op, route, device: 1.5)
    monkeypatch.setattr(verify.builds, "COMPILED", ())
    monkeypatch.setattr(cases, "QUICK_SHAPES", ((33, 300), (3, 8200)))


# ------------------------------------------------------------------ what is checked
def test_every_operator_and_every_mode() -> None:
    names = cases.operators()
    rows = {name for name, op in ALL.items() if op.by_rows}
    assert set(OPS) & rows <= set(names)
    assert {op.functional.name for op in ALL.values() if op.functional} - set(OPS) == rows - set(names)
    for name in set(OPS) & rows:
        modes = {case.numerics for case in cases.cases_of(ALL[name])}
        assert modes == {"flashinfer", "hf-llama", "hf-gemma", "torch"}, name


def test_kernels_are_chosen_by_their_stages() -> None:
    """Every operator, every stage with every choice of dtypes, and every mode somewhere; few kernels for all that."""
    ops = list(cases.operators().values())
    every, few = (list(cases.chosen(ops, CPU, exact=exact)) for exact in (False, True))
    assert [op for op, case, _ in few if case == cases.USUAL] == ops
    assert len(few) < 95 < len(every)

    def stages(found):
        programs = [(case, cases.program_of(op, case, CPU)) for op, case, _ in found]
        apart = ((case, cases.apart(s)) for case, p in programs for s in p.stages())
        return {(s, *(cases.dtype_of(o, case) for o in s.operands())) for case, s in apart}

    assert stages(few) == stages(every)
    modes = {(op.name, case.numerics) for op, case, _ in few}
    assert {("rmsnorm", "hf-llama"), ("fused_add_rmsnorm", "hf-llama"), ("fused_add_rmsnorm", "hf-gemma")} <= modes
    assert ("rmsnorm", "hf-gemma") not in modes  # the program of "flashinfer"
    wide = {op.name for op, _, shapes in few if shapes == cases.SHAPES}
    assert {"rmsnorm", "layernorm", "rmsnorm_rows", "rmsnorm_dynamic_quant", "layernorm_quant"} <= wide
    assert all(shapes == cases.QUICK_SHAPES for _, _, shapes in cases.chosen(ops, CPU, quick=True))
    haste = list(cases.chosen(ops, CPU, quick=True, covering=True))
    assert stages(haste) == stages((op, cases.USUAL, ()) for op in ops)
    assert len(haste) < len(ops) / 2 and all(case == cases.USUAL for _, case, _ in haste)


def test_labels_name_what_is_there() -> None:
    for name in ("rmsnorm", "gemma_rmsnorm", "layernorm"):
        assert cases.label(ALL[name], cases.MIXED, CPU) == "float16/float32 +rstd"
    for name in ("fused_add_rmsnorm", "fused_add_layernorm"):
        assert cases.label(ALL[name], cases.MIXED, CPU) == "float16/float32"
    quant = ALL["rmsnorm_dynamic_quant"]
    assert cases.label(quant, cases.MIXED, CPU) == "float16/float32 -> e5m2 +normed_out"
    assert cases.label(quant, cases.MIXED, CUDA) == "float16/float32 -> e5m2 +scale_ub +normed_out"
    assert cases.label(ALL["rmsnorm_rows"], cases.USUAL, CPU) == "int8/bfloat16"


def test_inputs_follow_the_operands() -> None:
    """Their dtypes are accepted, outputs are poisoned to the last byte, and scales have room for their padding."""
    for op in cases.operators().values():
        for device in (CPU, CUDA):
            for case in cases.cases_of(op):
                p = problem.make_problem(op, case, 33, 300, device)
                for operand in p.program.operands():
                    tensor = p.given[operand.name]
                    assert str(tensor.dtype).removeprefix("torch.") in operand.dtypes or operand.like
                    if operand.mode != "out":
                        continue
                    kept = p.as_kernel(operand.name, tensor).reshape(-1)
                    nan = kept.dtype.is_floating_point and kept.element_size() > 1
                    assert (kept.isnan() if nan else raw(kept) == 0x7F).all()
                assert all((scale > 0) for scale in p.scalars().values())
    padded = problem.make_problem(ALL["fused_add_rmsnorm_fp8_block_quant"], cases.USUAL, 33, 300, CPU)
    assert padded.given["scale"].shape == (3, 36)
    assert padded.modelled()["scale"].shape == (36, 3)


def test_a_call_does_not_touch_the_problem() -> None:
    op = ALL["fused_add_rmsnorm_fp8_block_quant"]
    p = problem.make_problem(op, cases.MIXED, 5, 300, CPU)
    before = {name: t.clone() for name, t in p.given.items()}
    with backend("torch"):
        written = problem.call(p, CPU)
    assert model.same_bits(before, p.given)
    assert written["scale"].shape == (8, 3) and not written["scale"][5:].any()
    assert set(written) == {"out", "scale", "normed_out", "residual"}


# ------------------------------------------------------------------ right and wrong routes
def test_a_right_route_passes(perfect: None) -> None:
    found, missing = verify.check_device(CPU, quick=True, ops=tuple(verify.every()))
    assert {line.op for line in found} == set(verify.every())
    assert [line.failures for line in found] == [[] for _ in found]
    assert all(line.bits and line.repeats and line.chunks and line.speed is None for line in found)
    assert set(missing) == {"cute", "cuda"}  # the torch route is passed over in haste


@pytest.mark.parametrize("where", [CPU, CUDA], ids=str)
def test_a_right_route_passes_in_every_case(perfect: None, where: torch.device) -> None:
    """On a GPU, too, where numbers may be tensors: the inputs are made on the CPU, and the model takes them there."""
    for name, op in cases.operators().items():
        for case in cases.cases_of(op):
            line = lines.verify_line(op, where.type, case, where, ((33, 300), (2, 9000)), 1)
            assert not line.failures, (name, case)
            assert line.bits and line.like_cpu is (None if where is CPU else True)


def _other_sum(p, device):
    """Right to the last bit or so, but with another order of additions."""
    formula = model.exact(p.program, p.modelled(), p.scalars())
    made = {}
    for name, v in formula.items():
        dtype, v = p.given[name].dtype, v * (1 + 2.0**-12)
        made[name] = formats.encode(v.float(), dtype) if dtype in formats.LARGEST else v.to(dtype)
    return made


def _drift(p, device):
    written = _canonical(p)
    raw(written["x" if "x" in written else "out"])[-1, 0] ^= torch.randint(1, 255, ()).to(torch.uint8)
    return written


def _by_batch(p, device):
    written = _canonical(p)
    for t in written.values() if p.rows < 3 else ():
        raw(t)[0, 0] ^= 1
    return written


def _unwritten(p, device):
    written = _canonical(p)
    raw(written["x" if "x" in written else "out"])[-1] = 0x7F
    return written


@pytest.mark.parametrize(
    "op",
    [
        *("rmsnorm", "fused_add_rmsnorm", "layernorm", "rmsnorm_quant", "rmsnorm_dynamic_quant", "fused_rmsnorm_silu"),
        *("rmsnorm_fp4quant_swizzled", "add_rmsnorm_fp4quant_both", "rmsnorm_mxfp8_quant"),
    ],
)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_other_sum, "bits differ from the specified arithmetic"),
        (_drift, "runs differ"),
        (_by_batch, "depend on the batch"),
        (_unwritten, "steps from the formula"),
    ],
)
def test_a_wrong_route_fails(perfect: None, monkeypatch: pytest.MonkeyPatch, fault, said: str, op: str) -> None:
    monkeypatch.setattr(problem, "call", fault)
    found, _ = verify.check_device(CPU, quick=True, ops=(op,))
    assert len(found) == 1
    assert any(said in text for text in found[0].failures), found[0]


# ------------------------------------------------------------------ Q, K and V
def test_every_form_of_what_is_no_row_program(perfect: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every such operator, and every scope and pairing, somewhere; a right route passes in each."""
    assert set(turned.operators()) == {name for name, op in ALL.items() if not op.by_rows}
    words = {form.word for forms in turned.FORMS.values() for form in forms}
    assert {word.partition("-")[0] for word in words} == {"hidden", "head", "none"} and len(words) >= 5
    monkeypatch.setattr(turned, "SHAPES", turned.QUICK_SHAPES)
    monkeypatch.setattr(turned, "speed", lambda *_: 1.0)
    found = list(turned.verify_lines(turned.operators().values(), "cpu", CPU, quick=False, say=lambda _: None))
    assert [line.failures for line in found] == [[] for _ in found]
    assert all(line.bits and line.repeats and line.chunks for line in found)


def _other_norm(p, device):
    """Another eps: it shows in the quietest tokens alone."""
    scalars = turned.scalars_of(p)
    return turned_model.canonical(p.program, p.given, {**scalars, "eps": scalars["eps"] * 1.5})


def _other_turn(p, device):
    """Q with the other pairs."""
    other = replace(p.program, interleave=not p.program.interleave)
    made = _turned(p, device)
    made["q_out"] = turned_model.canonical(other, p.given, turned.scalars_of(p))["q_out"]
    return made


def _by_tokens(p, device):
    made = _turned(p, device)
    made["v_out"].view(torch.uint8)[-1] += p.given["x"].shape[0]
    return made


@pytest.mark.parametrize("name", ["fused_qk_rmsnorm_rope", "fused_qk_rmsnorm_rope_fp8"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_other_norm, "bits differ from the specified arithmetic"),
        (_other_turn, "steps from the formula"),
        (_by_tokens, "depend on the batch"),
    ],
)
def test_a_wrong_turn_fails(perfect: None, monkeypatch: pytest.MonkeyPatch, fault, said: str, name: str) -> None:
    monkeypatch.setattr(turned, "call", fault)
    found, _ = verify.check_device(CPU, quick=True, ops=(name,))
    assert len(found) == 1 and any(said in text for text in found[0].failures), found[0]


def _padding_left(p, device):
    written = _canonical(p)
    written["scale"][p.rows :] = torch.nan
    return written


def _other_scale(p, device):
    """Scales of twice the size, and codes that go with them."""
    written = _canonical(p)
    written["scale"] *= 2
    written["out"] = formats.encode(written["out"].float() / 2, written["out"].dtype)
    return written


def _other_codes(p, device):
    written = _canonical(p)
    raw(written["out"])[4:, ::700] ^= 1
    return written


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_padding_left, "scale: 9 elements outside of the fp32 bound"),
        (_other_scale, "outside of the fp32 bound"),
        (_other_codes, "of out are equal to the rounded formula"),
    ],
)
def test_wrong_scales_and_codes_fail_on_any_route(
    perfect: None, monkeypatch: pytest.MonkeyPatch, fault, said: str
) -> None:
    """Not by their bits alone: the torch route promises none."""
    monkeypatch.setattr(problem, "call", fault)
    op = ALL["fused_add_rmsnorm_fp8_block_quant"]
    found = lines.verify_line(op, "torch", cases.USUAL, CPU, ((33, 384),) * 10, 1)
    assert any(said in text for text in found.failures), found.failures


@pytest.mark.parametrize(
    "name", ["rmsnorm_fp4quant_swizzled", "add_rmsnorm_fp4quant_both", "rmsnorm_mxfp8_quant_swizzled"]
)
def test_stale_tiles_fail_on_any_route(perfect: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A byte of their padding, and scales that are right but lie by rows."""

    def padding(p, device):
        written = _canonical(p)
        raw(written["scale"])[-1, -1] = 0x7F
        return written

    def by_rows(p, device):
        written = _canonical(p)
        plain = raw(p.by_rows("scale", written["scale"]))
        raw(written["scale"])[: len(plain), : plain.shape[1]] = plain
        return written

    for fault in (padding, by_rows):
        monkeypatch.setattr(problem, "call", fault)
        found = lines.verify_line(ALL[name], "torch", cases.USUAL, CPU, ((33, 384),), 1)
        assert any("scale: " in text and "steps from the formula" in text for text in found.failures), found.failures


def test_a_difference_may_lose_what_its_operands_are_rounded_to() -> None:
    """A bias that takes the norm away leaves numbers of many steps of their own, and few of the operands'."""
    op = ALL["layernorm"]
    p = problem.make_problem(op, cases.USUAL, 4, 64, CPU)
    wanted = torch.full((4, 64), 1e-9, dtype=torch.float64)
    wanted[:, 0] = 1.0
    near = wanted.clone()
    near[:, 1] = 5e-8
    for offset, right in ((0.0, True), (3e-6, False)):
        line = lines.new_line(op, "torch", cases.USUAL, CPU)
        lines._judge(line, p, "out", (near + offset * (near < 1)).bfloat16(), wanted, "here", {})
        assert (line.failures == []) == right


# ------------------------------------------------------------------ the command
def test_an_exception_is_a_finding(perfect: None, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no launch")

    monkeypatch.setattr(problem, "call", broken)
    arguments = argparse.Namespace(quick=True, json=False, device="cpu", ops="rmsnorm", routes="cpu")
    assert verify.run(arguments) == 1
    assert "FAIL rmsnorm, cpu, flashinfer, bfloat16: RuntimeError: no launch" in capsys.readouterr().out


def test_in_haste_every_stage_is_checked_and_the_table_says_so(perfect: None, capsys) -> None:
    arguments = argparse.Namespace(quick=True, json=False, device="cpu", ops="", routes="cpu")
    assert verify.run(arguments) == 0
    count = len(list(cases.chosen(cases.operators().values(), CPU, quick=True, covering=True)))
    count += len(turned.COVERING)
    assert f"({count} of {len(verify.every())} operators)" in capsys.readouterr().out


def test_json(perfect: None, capsys) -> None:
    arguments = argparse.Namespace(quick=True, json=True, device="cpu", ops="rmsnorm,fused_add_rmsnorm", routes="")
    assert verify.run(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "flashnorm-verify/1"
    assert report["ok"] is True
    assert [line["op"] for line in report["devices"][0]["lines"]] == ["rmsnorm", "fused_add_rmsnorm"]


def test_nothing_to_check_is_not_success(perfect: None, capsys) -> None:
    arguments = argparse.Namespace(quick=True, json=False, device="cpu", ops="", routes="cuda")
    assert verify.run(arguments) == 2


def test_the_torch_route_is_accurate() -> None:
    found, _ = verify.check_device(CPU, quick=True, routes=("torch",), ops=tuple(verify.every()))
    assert {line.op for line in found} == set(verify.every())
    assert [line.failures for line in found] == [[] for _ in found]
    assert all(line.bits is None for line in found)


def test_the_torch_route_is_accurate_in_every_case() -> None:
    for name, op in cases.operators().items():
        for case in cases.cases_of(op):
            assert not lines.verify_line(op, "torch", case, CPU, ((33, 300),), 1).failures, (name, case)


def test_eager_pytorch_does_the_same_work() -> None:
    """What speed is measured against: the formula's results, but for the rounding of a step or two."""
    for name, op in OPS.items():
        if not op.by_rows:
            continue
        for case in cases.cases_of(op):
            if case.numerics != "flashinfer" or case.x != torch.bfloat16 or "ocp" in dict(case.options).values():
                continue
            case = replace(case, extras=False, numerics="hf-gemma")  # what is normalised is the sum as it is stored
            p = problem.make_problem(op, case, 4, 384, CPU)
            result = eager._eager(p, dict(p.given))
            y = result[0] if isinstance(result, tuple) else result
            formula = model.exact(p.program, p.modelled(), p.scalars())
            wanted = next(formula[name] for name in ("out", "x", "ffn_input") if name in formula)
            if "ue8m0" in cases.options_of(op, case).get("scale_format", ""):
                continue  # a user would not write powers of two for blocks that long
            apart = model.steps(y.flatten(1), wanted)
            assert float((apart <= 2).double().mean()) > 0.99, (name, case)
