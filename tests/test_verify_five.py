"""The five questions of `flashnorm verify`: each sees what it asks for; the report says so in text, JSON and HTML."""

from __future__ import annotations

import argparse
import json
import os
import struct
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from flashnorm import model, verify
from flashnorm.core.op import ALL
from flashnorm.verify import five, lines, problem, report, resources

CPU = torch.device("cpu")


def _model_call(p, device):
    return model.canonical(p.program, p.modelled(), p.scalars())


@pytest.fixture
def perfect(monkeypatch):
    """A perfect route: the model itself."""
    monkeypatch.setattr(problem, "call", _model_call)
    for module in (verify, lines):
        monkeypatch.setattr(module, "serves", lambda op, route, device: None if route == "cpu" else "not here")


@pytest.mark.parametrize("name", five.HEADLINES)
def test_a_right_route_passes(name, route, device):
    found = five.examine(ALL[name], route, device, runs=20)
    shared = device.type == "cuda" and "PYTEST_XDIST_WORKER" in os.environ  # other processes are the tail there
    assert [f for f in found.failures if not (shared and f.startswith("tail:"))] == [], found
    assert found.stable and found.runs == 20
    assert found.special is (None if route == "torch" else True)
    assert found.bytes_needed > 0 and found.bytes_share > 0
    assert found.p50 > 0 and found.p99 >= found.p50
    plain = name in ("rmsnorm", "fused_add_rmsnorm", "layernorm")
    assert (found.ulp is not None) == plain and (found.one_mind is not None) == plain
    assert found.ulp is None or found.ulp <= 1


def ask(question, name="rmsnorm", runs=5):
    found = five.Five(name, "cpu")
    question(found, ALL[name], CPU, runs)
    return found


def test_a_run_that_differs(perfect, monkeypatch):
    calls = []

    def drifts(p, device):
        written = _model_call(p, device)
        calls.append(1)
        if len(calls) == 4:
            written["out"].view(torch.int16)[-1, 0] ^= 1
        return written

    monkeypatch.setattr(problem, "call", drifts)
    found = ask(five._stability)
    assert found.stable is False
    assert found.failures == ["stability: run 3 of 5 differs from the first"]


def test_a_spike_that_is_lost(perfect, monkeypatch):
    def clips(p, device):
        return _model_call(replace(p, given={**p.given, "x": p.given["x"].clamp(-100, 100)}), device)

    monkeypatch.setattr(problem, "call", clips)
    found = ask(five._stability)
    assert found.stable and found.special is False
    assert "spike" in found.failures[0]


def test_dtypes_that_disagree(perfect, monkeypatch):
    def twice(p, device):
        written = _model_call(p, device)
        if written["out"].dtype == torch.float16:  # rounded to bf16 on the way
            written["out"] = written["out"].bfloat16().half()
        return written

    monkeypatch.setattr(problem, "call", twice)
    found = ask(five._dtypes)
    assert not found.one_mind and found.ulp > 1
    assert len(found.failures) == 2


def test_inputs_that_all_dtypes_hold():
    p = problem.make_problem(ALL["fused_add_rmsnorm"], verify.Case(*(torch.float32,) * 3), *five.SHAPE, CPU)
    for name in ("x", "residual"):
        values = five._common(p)[name]
        assert all(torch.equal(values.to(dtype).float(), values) for dtype in (torch.float16, torch.bfloat16))


def test_an_exception_is_a_finding(monkeypatch):
    def broken(*_):
        raise RuntimeError("no launch")

    monkeypatch.setattr(problem, "call", broken)
    found = five.examine(ALL["rmsnorm"], "cpu", CPU, runs=2)
    assert "stability: RuntimeError: no launch" in found.failures
    assert "dtypes: RuntimeError: no launch" in found.failures


# ------------------------------------------------------------------ resources
USAGE = """
Fatbin elf code:
 Function row_a:
  REG:40 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function row_b:
  REG:168 STACK:8 SHARED:16 LOCAL:4 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function stub:
  REG:0 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:0
"""


def test_what_cuobjdump_says():
    found = resources.parse(USAGE)
    assert found == [(40, 0, 1024, 0), (168, 8, 16, 4)]
    assert resources.worst(found, 90) == resources.Resources(2, 168, 12, 1024, 12 / 64)


@pytest.mark.parametrize(
    ("registers", "sm", "share"), [(32, 90, 1.0), (33, 90, 51 / 64), (255, 90, 8 / 64), (40, 89, 1.0)]
)
def test_occupancy(registers, sm, share):
    assert resources.occupancy(registers, sm) == share


def test_gpu_code_inside_of_a_library():
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<H", header, 18, 190)
    struct.pack_into("<QQ", header, 32, 64, 100)  # program headers, section headers
    struct.pack_into("<HHHH", header, 54, 56, 1, 64, 2)
    cubin = bytes(header) + bytes(range(164))
    whole = b"\x7fELF\x02" + bytes(100) + cubin + b"behind"
    assert list(resources._cubins(whole)) == [cubin]


def test_spills_are_a_failure(monkeypatch, tmp_path):
    class Artifact:
        def build(self):
            return tmp_path

    monkeypatch.setattr(five.backends, "artifact", lambda *_: Artifact())
    monkeypatch.setattr(five.plan, "target_of", lambda *_: "sm_90a")
    for answer, failures in (
        (resources.Resources(3, 64, 16, 0, 0.5), ["resources: 16 bytes of stack or spills a thread"]),
        (resources.Resources(3, 64, 0, 0, 0.5), []),
        ("no cuobjdump", []),
    ):
        monkeypatch.setattr(resources, "of_artifact", lambda *_, answer=answer: answer)
        found = five.Five("rmsnorm", "cuda")
        five._resources(found, ALL["rmsnorm"], CPU, 1)
        assert found.failures == failures
        assert (found.registers is None) == isinstance(answer, str)


def test_a_gpu_that_is_not_here(monkeypatch, capsys):
    """Built for, and read; an architecture that there is not ends it."""
    asked = []

    def elsewhere(op, route, facts):
        asked.append((op.name, route, facts.capability))
        return five.Five(op.name, route, registers=40, stack=0, occupancy=1.0)

    monkeypatch.setattr(five, "elsewhere", elsewhere)
    monkeypatch.setattr(verify.dispatch, "refusal", lambda route, *_: None if route == "cuda" else "not here")
    monkeypatch.setattr(verify, "check_device", lambda *_, **__: ([lines.Line("rmsnorm", "cpu", "torch", "")], {}))
    monkeypatch.setattr(verify, "examine_device", lambda *_, **__: [])
    assert verify.run(arguments(arch=["sm_90a"], routes="", ops="")) == 0
    assert asked == [("rmsnorm", "cuda", (9, 0)), ("fused_add_rmsnorm", "cuda", (9, 0))]
    assert "sm_90a (not here)" in capsys.readouterr().out
    assert verify.run(arguments(arch=["nine"])) == 2
    assert "nine" in capsys.readouterr().err


def test_resources_of_a_real_artifact(tmp_path):
    """The CUDA route for a GPU that is not here, where its compiler and the disassembler are."""
    import flashnorm
    from flashnorm import backends
    from flashnorm.core import commands
    from flashnorm.jit import toolchain

    if not toolchain.find_nvcc() or resources.find_cuobjdump() is None:
        pytest.skip("no nvcc, or no cuobjdump")
    variant = commands.plain_variant(ALL["rmsnorm"], torch.bfloat16, 4096, {})
    found = resources.of_artifact(backends.artifact("cuda", variant, "sm_90a").build(), 90)
    assert isinstance(found, resources.Resources), found
    assert found.kernels >= 10 and 16 <= found.registers <= 255 and found.stack == 0 and 0 < found.occupancy <= 1
    assert flashnorm.__version__


# ------------------------------------------------------------------ what is printed
class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def arguments(**more):
    return argparse.Namespace(
        **{"quick": True, "json": False, "device": "cpu", "ops": "rmsnorm", "routes": "cpu", **more}
    )


def test_text_json_and_html(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(five, "HASTE", {"runs": 10, "seconds": 0.1})
    page = tmp_path / "verify.html"
    assert verify.run(arguments(html=str(page))) == 0
    out = capsys.readouterr().out
    assert "10 alike" in out
    assert "2 of 2 lines ok" in out
    parser = Tags()
    parser.feed(page.read_text())
    assert parser.open == [] and {"table", "svg", "rect"} <= set(parser.seen)
    assert "every promise held" in page.read_text()
    assert verify.run(arguments(json=True)) == 0
    (entry,) = json.loads(capsys.readouterr().out)["devices"][0]["five"]
    assert entry["op"] == "rmsnorm" and entry["stable"] and entry["tail"] >= 1 and entry["ulp"] <= 1


def test_a_failure_is_said_everywhere(capsys, tmp_path, monkeypatch):
    def fails(op, route, device, **limits):
        return five.Five(op.name, route, failures=["resources: <8> bytes of stack"])

    monkeypatch.setattr(five, "examine", fails)
    page = tmp_path / "verify.html"
    assert verify.run(arguments(html=str(page))) == 1
    assert "FAIL rmsnorm, cpu: resources: <8> bytes of stack" in capsys.readouterr().out
    text = page.read_text()
    assert "broken promises" in text and "resources: &lt;8&gt; bytes of stack" in text


def test_a_page_of_a_gpu_has_all_plots():
    answer = five.Five("rmsnorm", "cute", 1000, True, True, registers=40, stack=0, occupancy=0.75, bytes_share=0.9)
    made = {
        "ok": True,
        "seconds": 1.0,
        "versions": {"torch": "2"},
        "devices": [{"device": "GPU", "lines": [], "not_here": {}, "five": [{**vars(answer), "tail": 1.1}]}],
    }
    text = report.page(made)
    assert text.count("<svg") == 4 and "Registers a thread" in text
