"""The command line: what each command prints, its JSON, its exit codes, and that clearing is safe."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flashnorm import __main__ as cli
from flashnorm import bench, cache_cli, explain_cli
from flashnorm.backends import cute
from flashnorm.config import Settings
from flashnorm.core import dispatch
from flashnorm.core.op import OPS
from flashnorm.core.operands import normalise
from flashnorm.jit import folders, inventory
from flashnorm.jit.arch import parse_arch
from flashnorm.jit.spec import ArtifactSpec
from flashnorm.jit.store import Store
from flashnorm.program import Affine, Cast, LoadRow, Rms, RowProgram, Variant
from tests.storekit import Builder, fake_spec, load_fake, needs_root

pytestmark = pytest.mark.cpu_only

EVERYTHING = dispatch.Tools(None, frozenset({"sm_80", "sm_90a"}), None, None)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def run_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    got, out, _ = run(capsys, *argv, "--json")
    assert got == code
    return json.loads(out)


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["explain"], ["cache", "burn"], ["bench", "--dtype", "int4"]])
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2


def test_an_interrupt_ends_without_a_traceback(capsys, monkeypatch):
    def interrupted(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_cli, "run", interrupted)
    assert run(capsys, "cache", "list") == (130, "", "flashnorm cache: interrupted\n")


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help_and_json(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0 and "--json" in capsys.readouterr().out


# ------------------------------------------------------------------ explain
@pytest.fixture
def tools(monkeypatch):
    """A machine with every tool, and a DSL that knows sm_80 and sm_90a."""
    monkeypatch.setattr(explain_cli, "tools", lambda: EVERYTHING)
    monkeypatch.setattr("flashnorm.core.plan.tools", lambda: EVERYTHING)


@pytest.mark.parametrize(
    ("arch", "served_by", "reasons"),
    [
        ("sm_90a", "cute", {"cuda": "cute comes first", "cpu": "serves cpu tensors, not cuda ones"}),
        ("sm_107a", "cuda", {"cute": "the installed CuTe DSL cannot target sm_107a"}),
        ("11.9", "cuda", {"cute": "the installed CuTe DSL cannot target sm_119a"}),
        ("sm_75", "cuda", {"cute": "needs compute capability 8.0 or newer, the device has 7.5"}),
        ("sm_70", None, {"cuda": "needs compute capability 7.5 or newer, the device has 7.0"}),
    ],
)
def test_explain_a_gpu_that_is_not_here(arch, served_by, reasons, capsys, tools):
    found = run_json(capsys, "explain", "rmsnorm", "--arch", arch, code=0 if served_by else 1)
    assert found["route"] == served_by and found["here"] is False and found["device"] == parse_arch(arch).name
    assert found["capability"] == list(parse_arch(arch).capability)
    rows = {row["route"]: row for row in found["routes"]}
    assert list(rows) == ["cute", "cuda", "cpu", "torch"]
    assert {name: rows[name]["reason"] for name in reasons} == reasons
    assert [name for name, row in rows.items() if row["chosen"]] == ([served_by] if served_by else [])
    assert rows["torch"]["reason"] == "never chosen unasked on cuda tensors"
    code, out, _ = run(capsys, "explain", "rmsnorm", "--arch", arch)
    assert code == (0 if served_by else 1)
    assert all(reason in out for reason in reasons.values())
    assert ("no route serves this call" in out) is (served_by is None)


def test_explain_says_what_the_kernel_is(capsys, tools):
    argv = ("explain", "fused_add_rmsnorm", "--shape", "8x4100", "--dtype", "fp16", "--weight-dtype", "fp32")
    found = run_json(capsys, *argv, "--arch", "sm_90a")
    assert found["shape"] == [8, 4100] and found["access_width"] == 4
    assert found["dtypes"] == {"input": "float16", "residual": "float16", "weight": "float32"}
    kernels = {row["route"]: row["kernel"] for row in found["routes"]}
    assert kernels["cpu"] is None and kernels["torch"] is None  # they serve no CUDA tensor
    assert kernels["cute"]["name"] == "cute-AddResidual_Rms_Affine-f16_f32-4100-sm_90a"
    assert kernels["cuda"]["name"] == "cuda-AddResidual-float16-float32-sm_90a"
    assert kernels["cute"]["path"] is None and kernels["cute"]["detail"] == "not compiled yet for sm_90a"


def test_explain_the_cpu(capsys):
    found = run_json(capsys, "explain", "gemma_rmsnorm", "--device", "cpu", "--weight-dtype", "none")
    assert found["here"] is True and found["capability"] is None and "weight" not in found["dtypes"]
    assert found["route"] in ("cpu", "torch")
    assert run_json(capsys, "explain", "rmsnorm", "--device", "xpu")["route"] == "torch"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["softmax"], "OP must be one of add_layernorm, add_rmsnorm,"),
        (["rmsnorm", "--shape", "64*4096"], "--shape looks like 64x4096"),
        (["rmsnorm", "--shape", "2x300000"], "must be 1 to 262144, got 300000"),
        (["layernorm", "--dtype", "int8"], "layernorm takes no int8 rows"),
        (["rmsnorm", "--dtype", "e4m3"], "--dtype must be one of fp32, fp16, bf16, got 'e4m3'"),
        (["rmsnorm", "--residual-dtype", "bf16"], "rmsnorm takes no residual"),
        (["rmsnorm", "--out-dtype", "fp32"], "--out-dtype must be one of bf16, got 'fp32'"),
        (["layernorm_quant", "--out-dtype", "int8"], "--out-dtype must be one of e4m3, e5m2, got 'int8'"),
        (["rmsnorm", "--option", "granularity=128"], "rmsnorm takes no further option, got granularity"),
        (["rmsnorm_dynamic_quant", "--option", "granularity=7"], "granularity must be one of"),
        (["rmsnorm", "--numerics", "exact"], "numerics must be one of"),
        (["rmsnorm", "--arch", "hopper"], "sm_90a"),
        (["rmsnorm", "--device", "toaster"], "--device toaster"),
        (["rmsnorm", "--device", "cuda:77"], "there is no cuda:77 here"),
    ],
)
def test_explain_refuses_with_2_and_a_reason(argv, text, capsys):
    code, out, err = run(capsys, "explain", *argv)
    assert code == 2 and out == "" and text in err


def test_explain_takes_an_arch_or_a_device(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["explain", "rmsnorm", "--arch", "sm_90a", "--device", "cpu"])
    assert caught.value.code == 2


@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if op.by_rows))
def test_explain_asks_about_the_kernel_of_a_plain_call(name):
    op, hidden = OPS[name], 4096 + 128
    asked = {f"{what}_dtype": None for what in ("weight", "bias", "residual", "out")}
    arguments = argparse.Namespace(shape=f"2x{hidden}", dtype="fp16", numerics="flashinfer", option=[], **asked)
    variant, _ = explain_cli._variant(op, arguments)
    given = {}
    for operand, dtype in zip(variant.program.operands(), variant.dtypes, strict=True):
        shape = {"row": (2, hidden), "pairs": (2, hidden // 2), "vec": (hidden,)}.get(operand.kind)
        if operand.kind == "blocks":
            columns = variant.program.store.columns(hidden)
            shape = (columns, 4) if op.called == "fused_add_rmsnorm_fp8_block_quant" else (2, columns)
        given[operand.name] = torch.empty(shape, dtype=getattr(torch, dtype))
    tensors = [given.get(operand.name) for operand in op.operands]
    assert normalise(op, variant.program, tensors)[0] == variant


def test_explain_takes_what_an_operator_has(capsys, tools):
    argv = ("explain", "layernorm", "--weight-dtype", "fp32", "--arch", "sm_90a")
    assert run_json(capsys, *argv)["dtypes"] == {
        "input": "bfloat16", "gemma": "float32", "beta": "float32", "out": "bfloat16",
    }  # fmt: skip
    argv = (
        "explain",
        "rmsnorm_dynamic_quant",
        "--option",
        "granularity=128",
        "--out-dtype",
        "int8",
        "--arch",
        "sm_90a",
    )
    found = run_json(capsys, *argv)
    assert found["dtypes"]["out"] == "int8" and found["options"] == {"granularity": "128"}
    assert "granularity 128" in run(capsys, *argv)[1]


# ------------------------------------------------------------------ cache
CUTE = Variant(RowProgram(LoadRow(), Rms(), (Affine(),), Cast()), ("bfloat16", "float32", "bfloat16"), 4096)
CPU_KEY = {"route": "cpu", "dtypes": ("float16", "float32"), "cpu": ("x86_64", "avx2", "fma")}


@dataclasses.dataclass
class Kept:
    root: Path
    builder: Builder

    def add(self, name: str, key: dict[str, Any], days: float = 0.0) -> Path:
        path = ArtifactSpec(name, key, self.builder, loader=load_fake).build(Store(self.root))
        then = time.time() - days * 86400
        os.utime(path / "meta.json", (then, then))
        return path


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A cache with a young `cute` artefact, a `cpu` one of ten days, a quarantined one, and a killed build's rest."""
    folder = tmp_path / "the cache"
    monkeypatch.setattr(cache_cli, "settings", Settings(cache_dir=folder, disable_jit=True))
    assert folders.prepare(folder) is None
    made = Kept(folder / folders.LAYOUT, Builder(tmp_path / "log"))
    key = {"route": "cute", "variant": repr(CUTE), "arch": "sm_90a"}
    made.add("cute-LoadRow-bf16_f32-4096-sm_90a", key)
    made.add("cpu-LoadRow-float16-float32", CPU_KEY, days=10)
    spoilt = fake_spec(made.builder)
    (spoilt.build(Store(made.root)) / "kernel.so").write_bytes(b"cut")
    spoilt.build(Store(made.root))
    (made.root / ".tmp" / f"{'0' * 32}-killed").mkdir()
    (made.root / "notes").mkdir()  # not the store's
    return made


def test_the_key_of_a_cute_artefact_can_be_read():
    """The listing reads dtypes and H out of the variant's repr; a renamed field must not empty it unseen."""
    key = cute.spec(CUTE, "sm_90a").identity
    assert inventory._facts(key) == {
        "route": "cute",
        "arch": "sm_90a",
        "dtypes": ("bfloat16", "float32", "bfloat16"),
        "hidden_size": 4096,
    }


def test_cache_list(kept, capsys):
    found = run_json(capsys, "cache")
    assert found["temporary"] is False
    rows = {(row["name"], row["state"]): row for row in found["artefacts"]}
    assert set(rows) == {
        ("cute-LoadRow-bf16_f32-4096-sm_90a", "kept"),
        ("cpu-LoadRow-float16-float32", "kept"),
        ("rmsnorm-bf16", "kept"),
        ("rmsnorm-bf16", "quarantined"),
        ("", "unfinished"),
    }
    row = rows["cute-LoadRow-bf16_f32-4096-sm_90a", "kept"]
    assert (row["route"], row["arch"], row["hidden_size"]) == ("cute", "sm_90a", 4096)
    assert row["dtypes"] == ["bfloat16", "float32", "bfloat16"]
    assert row["size"] == sum(file.stat().st_size for file in Path(row["path"]).iterdir())
    old = rows["cpu-LoadRow-float16-float32", "kept"]
    assert old["age"] == pytest.approx(864000, abs=60)
    assert (old["route"], old["arch"], old["hidden_size"]) == ("cpu", "x86_64", None)
    code, out, _ = run(capsys, "cache", "list")
    assert code == 0 and "5 artefacts" in out
    line = next(line for line in out.splitlines() if "cpu-LoadRow" in line)
    assert re.search(r"cpu .* x86_64 .* fp16 fp32 .* any .* 10 d", line), line


def test_cache_info(kept, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cache_cli, "settings", dataclasses.replace(cache_cli.settings, aot_dirs=(tmp_path / "none",)))
    mine, ahead = run_json(capsys, "cache", "info")["folders"]
    assert mine["path"] == str(kept.root) and mine["kind"] == "cache" and mine["artefacts"] == 5
    assert mine["routes"] == {"cute": 1, "cpu": 1, "other": 1}
    assert mine["states"] == {"kept": 3, "quarantined": 1, "unfinished": 1}
    assert mine["oldest"] == pytest.approx(864000, abs=60) and mine["free"] > 0
    assert (ahead["kind"], ahead["artefacts"], ahead["bytes"]) == ("precompiled", 0, 0)
    code, out, _ = run(capsys, "cache", "info")
    assert code == 0 and str(kept.root) in out and "cpu 1, cute 1, other 1" in out


def test_cache_clear_everything(kept, capsys):
    before = run_json(capsys, "cache", "info")["folders"][0]["bytes"]
    done = run_json(capsys, "cache", "clear")
    assert len(done["removed"]) == 5 and done["failed"] == [] and done["bytes"] == before
    assert sorted(path.name for path in kept.root.iterdir()) == [".bad", ".locks", ".tmp", "notes"]
    assert [list((kept.root / name).iterdir()) for name in (".bad", ".locks", ".tmp")] == [[], [], []]
    code, out, _ = run(capsys, "cache", "clear")
    assert code == 0 and out.startswith("removed 0 artefacts")
    # and the store works on
    calls = kept.builder.calls
    assert fake_spec(kept.builder).build_and_load(Store(kept.root))() == kept.builder.content
    assert kept.builder.calls == calls + 1


def test_cache_clear_what_is_old(kept, capsys):
    done = run_json(capsys, "cache", "clear", "--older-than", "9.5")
    assert [row["name"] for row in done["removed"]] == ["cpu-LoadRow-float16-float32"]
    assert len(inventory.inventory(kept.root)) == 4


def test_cache_clear_what_is_quarantined(kept, capsys):
    done = run_json(capsys, "cache", "clear", "--quarantined")
    assert [row["state"] for row in done["removed"]] == ["quarantined"]
    assert len(inventory.inventory(kept.root)) == 4


def test_a_broken_description_is_listed_and_cleared(kept, capsys):
    path = kept.add("cpu-x", {**CPU_KEY, "n": 1})
    (path / "meta.json").write_text("{}")
    found = [row for row in run_json(capsys, "cache")["artefacts"] if row["state"] == "broken"]
    assert [row["path"] for row in found] == [str(path)] and found[0]["name"] == "cpu-x"
    inventory.clear(kept.root)
    assert not path.exists()


def test_clearing_keeps_what_a_process_has_loaded(kept):
    path = kept.add("cpu-y", {**CPU_KEY, "n": 2})
    with (path / "kernel.so").open("rb") as mapped:
        inventory.clear(kept.root)
        assert not path.exists() and mapped.read() == kept.builder.content


@needs_root
def test_what_cannot_be_removed_is_reported(kept, capsys, monkeypatch):
    def rmtree(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(inventory.shutil, "rmtree", rmtree)
    code, _, err = run(capsys, "cache", "clear", "--quarantined")
    assert code == 1 and "cannot be removed: Permission denied" in err


@pytest.mark.parametrize(
    "argv", [["list", "--quarantined"], ["info", "--older-than", "3"], ["clear", "--older-than", "-1"]]
)
def test_cache_refuses_with_2(argv, capsys, kept):
    code, out, err = run(capsys, "cache", *argv)
    assert code == 2 and out == "" and err.startswith("flashnorm cache: ")
    assert len(inventory.inventory(kept.root)) == 5


# ------------------------------------------------------------------ bench
def test_bench(capsys):
    argv = ("bench", "--ops", "rmsnorm,gemma_fused_add_rmsnorm", "--routes", "torch", "--device", "cpu")
    found = run_json(capsys, *argv, "--shapes", "1x64,3x77", "--dtype", "fp32", "--seconds", "0.001")
    assert found["schema"] == "flashnorm-bench/1" and found["dtype"] == "fp32" and found["not_here"] == {}
    lines = [(n["op"], n["shape"]) for n in found["lines"]]
    assert lines == [(op, shape) for op in ("rmsnorm", "gemma_fused_add_rmsnorm") for shape in ([1, 64], [3, 77])]
    for n in found["lines"]:
        assert n["error"] is None and n["speed"] == pytest.approx(n["torch_seconds"] / n["seconds"])
        assert 1e-7 < n["seconds"] < 1
    first, fused = found["lines"][1], found["lines"][3]
    assert first["gb_s"] * first["seconds"] * 1e9 == pytest.approx(4 * (2 * 3 * 77 + 77))  # x, out; weight once
    assert fused["gb_s"] * fused["seconds"] * 1e9 == pytest.approx(4 * (4 * 3 * 77 + 77))  # both read and written


def test_bench_where_nothing_serves(capsys):
    argv = ("bench", "--device", "cpu", "--routes", "cuda", "--shapes", "1x64", "--seconds", "0.001")
    found = run_json(capsys, *argv, code=1)
    assert found["lines"] == [] and found["not_here"] == {"cuda": "serves cuda tensors, not cpu ones"}
    code, out, _ = run(capsys, *argv)
    assert code == 1 and "cuda: not here: serves cuda tensors" in out


def test_bench_shows_what_failed(capsys, monkeypatch):
    def rivals(*_):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(bench, "rivals", rivals)
    code, out, _ = run(capsys, "bench", "--device", "cpu", "--routes", "torch", "--shapes", "1x64")
    assert code == 1 and "failed" in out and "rmsnorm, torch: RuntimeError: no memory left" in out


@pytest.mark.parametrize(
    "argv",
    [["--ops", "softmax"], ["--routes", "triton"], ["--shapes", "4096"], ["--seconds", "0"], ["--device", "tpu"]],
)
def test_bench_refuses_with_2(argv, capsys):
    code, out, err = run(capsys, "bench", *argv)
    assert code == 2 and out == "" and argv[1] in err


def test_verify_and_bench_measure_the_public_function(monkeypatch):
    """The call that users make, warm: not the checks in front of a first call."""
    import flashnorm
    from flashnorm.core.op import OPS
    from flashnorm.verify import Case, rivals

    seen = []
    monkeypatch.setattr(flashnorm, "gemma_rmsnorm", lambda **given: seen.append(given))
    ours, eager = rivals(OPS["gemma_rmsnorm"], Case(*[torch.float32] * 3), torch.device("cpu"), 2, 16)
    ours()
    assert set(seen[0]) == {"input", "weight", "out", "numerics"}
    x, weight = seen[0]["input"], seen[0]["weight"]
    want = torch.nn.functional.rms_norm(x, (16,), weight + 1, 1e-6)
    assert torch.equal(eager(), want)
