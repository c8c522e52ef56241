"""The command line on a machine that can build nothing: kernels that are there serve all the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flashnorm import __main__ as cli
from flashnorm import doctor, explain_cli
from flashnorm.backends import artifact
from flashnorm.config import Settings
from flashnorm.core import dispatch, plan
from flashnorm.jit import folders
from flashnorm.jit.aot import export
from flashnorm.jit.spec import ArtifactSpec
from flashnorm.jit.store import Store
from flashnorm.program import Affine, Cast, LoadRow, Rms, RowProgram, Variant
from tests.storekit import Builder, load_fake

pytestmark = pytest.mark.cpu_only

PLAIN = Variant(RowProgram(LoadRow(), Rms(), (Affine(),), Cast()), ("bfloat16",) * 3, 4096)


def run_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    assert cli.main([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def no_tools(monkeypatch):
    """A machine that can build nothing."""
    lacking = dispatch.Tools("no DSL here", frozenset(), "no nvcc here", "no compiler here")
    for module in ("explain_cli", "doctor", "api", "core.plan"):
        monkeypatch.setattr(f"flashnorm.{module}.tools", lambda: lacking)


@pytest.fixture
def lay(monkeypatch, tmp_path):
    """A function that lays a kernel into this machine's cache, or into its folder of precompiled ones."""
    builder = Builder(tmp_path / "log")
    kept, ahead = tmp_path / "cache" / folders.LAYOUT, tmp_path / "ahead"
    assert folders.prepare(kept.parent) is None
    store = Store(kept, aot_dirs=(ahead,))
    for module in ("jit.store", "doctor"):
        monkeypatch.setattr(f"flashnorm.{module}.default_store", lambda: store)

    def lay(route: str, target: str, into: str, variant: Variant = PLAIN) -> None:
        real = artifact(route, variant, target)
        spec = ArtifactSpec(real.name, real.key, builder, real.toolchain, loader=load_fake)
        if into == "cache":
            spec.build(store)
        else:
            export(spec, ahead, Store(tmp_path / "elsewhere"))

    (tmp_path / "elsewhere").mkdir()
    return lay


def test_explain_finds_kernels_that_need_no_tools(capsys, no_tools, lay):
    argv = ("explain", "rmsnorm", "--arch", "sm_90a")
    found = run_json(capsys, *argv, code=1)
    assert [row["reason"] for row in found["routes"]][:2] == ["no DSL here", "no nvcc here"]
    lay("cuda", "sm_90a", "cache")
    lay("cuda", "sm_80", "cache", dataclasses.replace(PLAIN, dtypes=("float16",) * 3))
    found = run_json(capsys, *argv)
    row = next(row for row in found["routes"] if row["chosen"])
    assert (found["route"], row["route"]) == ("cuda", "cuda")
    assert "its kernel is there" in row["reason"] and "no nvcc here" in row["reason"]
    assert Path(row["kernel"]["path"]).is_dir()
    lay("cute", "sm_90a", "ahead")
    assert run_json(capsys, *argv)["route"] == "cute"
    assert run_json(capsys, *argv, "--dtype", "fp16", code=1)["route"] is None


def test_explain_knows_what_failed_and_what_may_not_be_built(capsys, lay, monkeypatch):
    every = dispatch.Tools(None, frozenset({"sm_90a"}), None, None)
    for module in (explain_cli, plan):
        monkeypatch.setattr(module, "tools", lambda: every)
    argv = ("explain", "rmsnorm", "--arch", "sm_90a")
    monkeypatch.setitem(plan._failed, ("cute", "sm_90a", PLAIN), "failed to build: a fault")
    found = run_json(capsys, *argv)
    assert found["route"] == "cuda" and found["routes"][0]["reason"] == "failed to build: a fault"
    assert run_json(capsys, *argv, "--shape", "4x128")["route"] == "cute"
    plan._failed.clear()
    for module in (explain_cli, plan):
        monkeypatch.setattr(module, "settings", Settings(disable_jit=True))
    lay("cuda", "sm_90a", "ahead")
    found = run_json(capsys, *argv)
    assert found["route"] == "cuda" and "FLASHNORM_DISABLE_JIT forbids" in found["routes"][0]["reason"]


def test_doctor_finds_kernels_that_need_no_tools(capsys, no_tools, lay):
    lay("cuda", "sm_90a", "cache")
    lay("cuda", "sm_90a", "ahead", dataclasses.replace(PLAIN, dtypes=("float16",) * 3))
    lay("cute", "sm_90a", "ahead")
    lay("cuda", "sm_80", "ahead")
    found = {d["name"]: d["operators"] for d in run_json(capsys, "doctor", "--arch", "sm_90a")["devices"]}
    assert found["sm_90a"]["rmsnorm"]["route"] is None
    assert found["sm_90a"]["rmsnorm"]["kernels"] == {"cute": 1, "cuda": 2}
    assert found["sm_90a"]["layernorm"]["kernels"] == {} and found["cpu"]["rmsnorm"]["kernels"] == {}
    assert cli.main(["doctor", "--arch", "sm_90a"]) == 0
    route, passed_over = doctor._cells(found["sm_90a"]["rmsnorm"])
    assert "only what is there" in route
    assert "cuda: no nvcc here (kernels that are there all the same: 2)" in passed_over


@pytest.mark.parametrize(("kernels", "code"), [({"cuda": 1}, 0), ({}, 1)])
def test_doctor_counts_an_operator_with_kernels_as_served(kernels, code, monkeypatch):
    answer = {"rmsnorm": {"route": None, "passed_over": {}, "kernels": kernels}}
    device = {"name": "cuda:0", "here": True, "capability": (9, 0), "formats": {}, "operators": answer}
    made = {"versions": {}, "tools": {}, "settings": {}, "devices": [device]}
    monkeypatch.setattr(doctor, "report", lambda asked: made)
    assert cli.main(["doctor"]) == code
