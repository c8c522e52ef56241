"""Kernels before they are needed: precompiled folders, what a machine without compilers makes of them."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import flashnorm
from benchmarks.container_view import look
from flashnorm import backends
from flashnorm import precompile as precompile_command
from flashnorm.__main__ import main
from flashnorm.backends import guard, warm
from flashnorm.core import dispatch
from flashnorm.core.device import DeviceFacts
from flashnorm.jit import folders
from flashnorm.jit.entry import portable_name, read_meta
from flashnorm.jit.store import Store
from flashnorm.precompile import calls
from tests.aotkit import HAVE, cache_fixture, needs_cxx, needs_dsl, needs_nvcc, precompile, variant  # noqa: F401
from tests.storekit import flip

pytestmark = pytest.mark.cpu_only

ARCHS, SIZES = ("sm_80", "sm_90a"), (512, 4096)
H200 = DeviceFacts("cuda", (9, 0))
GPU_ROUTES = [pytest.param("cute", marks=needs_dsl), pytest.param("cuda", marks=needs_nvcc)]
GRID = ("--ops", "rmsnorm", "--dtype", "bf16", "--hidden", ",".join(map(str, SIZES)))


@pytest.fixture(scope="module")
def gpu_folder(tmp_path_factory):
    """Two architectures, two hidden sizes, both routes; and the command's summary."""
    out = tmp_path_factory.mktemp("gpu") / "aot"
    routes = ",".join(route for route, there in HAVE.items() if there)
    if not routes:
        pytest.skip("neither the CuTe DSL nor nvcc is here")
    flags = [word for arch in ARCHS for word in ("--arch", arch)]
    return out, precompile(*flags, *GRID, "--routes", routes, "--out", str(out))


@pytest.fixture(scope="module")
def host_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("host") / "aot"
    code, summary, error = precompile("--arch", "host", *GRID, "--out", str(out))
    assert code == 0, error
    assert sorted(a["route"] for a in summary["artifacts"]) == ["cpu", *calls()]
    return out


# ------------------------------------------------------------------ the command
@pytest.mark.parametrize("gpu_route", GPU_ROUTES)
def test_the_folder_holds_what_was_asked_for(gpu_folder, gpu_route):
    out, (code, summary, error) = gpu_folder
    assert code == 0 and summary["failed"] == 0, error
    served = Store(None, aot_dirs=[out], disabled=True)
    names = set()
    for arch in ARCHS:
        for hidden in SIZES:
            spec = backends.artifact(gpu_route, variant(hidden=hidden), arch)
            path = spec.lookup(served)
            assert path == out / portable_name(spec)
            assert (path / "kernel.so").read_bytes()[:4] == b"\x7fELF" and not (path / "kernel.o").exists()
            assert (path / "kernel.so").stat().st_mode & 0o044 == 0o044
            assert read_meta(path)["key"]["arch"] == arch
            names.add(path.name)
    # H is a run-time argument of the cuda route.
    assert len(names) == len(ARCHS) * (len(SIZES) if gpu_route == "cute" else 1)
    assert names == {Path(a["path"]).name for a in summary["artifacts"] if a["route"] == gpu_route}


def test_nothing_else_is_in_the_folder_and_a_second_run_keeps_it(gpu_folder):
    out, (_, summary, _) = gpu_folder
    assert sorted(p.name for p in out.iterdir()) == sorted(Path(a["path"]).name for a in summary["artifacts"])
    arch = ARCHS[0]
    routes = ",".join(sorted({a["route"] for a in summary["artifacts"]} - set(calls())))
    code, again, _ = precompile("--arch", arch, *GRID, "--routes", routes, "--out", str(out))
    assert code == 0 and {a["state"] for a in again["artifacts"]} == {"kept"}


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--arch", "sm_90a"), "--arch, --ops and --hidden"),
        (("--ops", "rmsnorm", "--hidden", "64"), "--arch is missing"),
        (("--arch", "sm_90a", "--ops", "rmsnrm", "--hidden", "64"), "'rmsnrm'"),
        (("--arch", "sm_90a", "--ops", "rmsnorm", "--hidden", "0"), "--hidden"),
        (("--arch", "sm_90a", "--ops", "fused_qk_rmsnorm_rope", "--dtype", "fp32", "--hidden", "64"), "bf16, fp16"),
        (("--arch", "h200", "--ops", "rmsnorm", "--hidden", "64"), "sm_90a"),
        (("--arch", "sm_90a", "--ops", "rmsnorm", "--hidden", "64", "--jobs", "0"), "--jobs must be positive, got 0"),
        (("--recipe", "/nowhere/recipe.json"), "No such file"),
        (("--recipe", "-"), "standard input: "),
        (("--recipe", "-"), "Expecting value"),
    ],
)
def test_wrong_usage(flags, error, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["precompile", *flags, "--out", str(tmp_path / "out")]) == 2
    assert error in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_dtype_that_an_operator_does_not_take_is_left_out(capsys):
    """Of several operators and dtypes, and said; the others are what was asked for."""
    flags = ("--arch", "sm_90a", "--ops", "rmsnorm,fused_qk_rmsnorm_rope", "--dtype", "bf16,fp32", "--hidden", "64")
    parser = argparse.ArgumentParser()
    precompile_command.add_arguments(parser)
    kernels = precompile_command.wanted(parser.parse_args([*flags, "--routes", "cuda", "--out", "nowhere"]))
    assert sorted((k.op, k.variant.dtypes[0]) for k in kernels) == [
        ("fused_qk_rmsnorm_rope", "bfloat16"), ("rmsnorm", "bfloat16"), ("rmsnorm", "float32")
    ]  # fmt: skip
    assert capsys.readouterr().err == "flashnorm precompile: fused_qk_rmsnorm_rope takes bf16, fp16 alone\n"


@needs_dsl
def test_a_failure_is_told_and_fails_the_command(tmp_path):
    flags = ("--arch", "sm_79", "--ops", "rmsnorm", "--hidden", "64", "--routes", "cute")
    code, summary, _ = precompile(*flags, "--out", str(tmp_path / "out"))
    assert code == 1 and summary["failed"] == 1
    (bad,) = (a for a in summary["artifacts"] if a["error"])
    assert bad["state"] == "failed" and "cannot target sm_79" in bad["error"]


# ------------------------------------------------------------------ a container's view
def test_the_key_does_not_depend_on_what_is_missing(gpu_folder, cache):
    text = """
    import json
    import torch
    from flashnorm import backends
    from flashnorm.backends import guard, warm
    from flashnorm.core import commands
    from flashnorm.core.tools import tools
    v = commands.plain_variant(commands.operators()["rmsnorm"], torch.bfloat16, 4096, {"numerics": "flashinfer"})
    specs = [backends.artifact("cute", v, "sm_90a"), backends.artifact("cuda", v, "sm_90a"),
             backends.artifact("cpu", v, "host"), guard.spec(), warm.spec()]
    missing = [tools().dsl, tools().nvcc, tools().cxx]
    digests, tools = [s.portable_digest for s in specs], [s.made_by for s in specs]
    print(json.dumps(dict(digests=digests, tools=tools, missing=missing)))
    """
    seen = look(text, gpu_folder[0], cache)
    assert seen["tools"] == [{}] * 5 and all(seen["missing"])
    here = [backends.artifact(r, variant(), t) for r, t in (("cute", "sm_90a"), ("cuda", "sm_90a"), ("cpu", "host"))]
    assert seen["digests"] == [spec.portable_digest for spec in (*here, guard.spec(), warm.spec())]


DECIDE = """
import json, logging, sys
import torch
started.clear()
import flashnorm
from flashnorm.core import commands, plan
from flashnorm.core.device import DeviceFacts
lines = []
class Note(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("flashnorm").addHandler(Note())
op = commands.operators()["rmsnorm"]
def serve(dtype, hidden):
    v = commands.plain_variant(op, dtype, hidden, {"numerics": "flashinfer"})
    try:
        return plan._serve(op, v, DeviceFacts("cuda", (9, 0)), torch.device("cuda", 0))[0].route
    except RuntimeError as error:
        return str(error)
routes = [serve(torch.bfloat16, hidden) for hidden in (512, 4096)]
said = list(lines)
missing = serve(torch.float16, 4096)
print(json.dumps(dict(routes=routes, missing=missing, lines=said, started=started,
    dsl=[name for name in sys.modules if name.split(".")[0] == "cutlass"])))
"""


@needs_dsl
@needs_nvcc
@pytest.mark.parametrize("disable", ["1", "0"])
def test_gpu_kernels_load_without_the_dsl(gpu_folder, tmp_path, cache, disable):
    """As far as it goes without a GPU: the library is in, and its entry point was found."""
    place = cache if disable == "1" else tmp_path / "writable"
    seen = look(DECIDE, gpu_folder[0], place, FLASHNORM_DISABLE_JIT=disable)
    assert seen["routes"] == ["cute", "cute"] and seen["dsl"] == [] and seen["started"] == []
    if disable == "1":
        assert seen["lines"] == []
        for part in ("cute", "cuda"):
            assert f"flashnorm precompile --arch sm_90a --routes {part} --ops rmsnorm --dtype fp16" in seen["missing"]
        assert "float16" in seen["missing"] and "FLASHNORM_DISABLE_JIT" in seen["missing"]
    else:
        assert "nvidia-cutlass-dsl is not installed" in seen["missing"] and "no nvcc" in seen["missing"]


@needs_dsl
@needs_nvcc
@pytest.mark.parametrize("disable", ["1", "0"])
def test_without_the_dsls_library_the_cuda_kernels_serve(gpu_folder, tmp_path, cache, disable):
    place = cache if disable == "1" else tmp_path / "writable"
    seen = look(DECIDE, gpu_folder[0], place, runtime_gone=True, FLASHNORM_DISABLE_JIT=disable)
    assert seen["routes"] == ["cuda", "cuda"] and seen["started"] == []
    line = seen["lines"][0]
    assert "cuda route in place of cute" in line and "libcute_dsl_runtime.so" in line and "is not installed" in line
    assert len(seen["lines"]) == 1


CALL = """
import json, logging
import torch
started.clear()
import flashnorm
lines = []
class Note(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("flashnorm").addHandler(Note())
x = torch.linspace(-3, 3, 2 * 512).reshape(2, 512)
w = torch.linspace(0.5, 2, 512)
y = flashnorm.rmsnorm(x.bfloat16(), w.bfloat16())
from flashnorm.backends import guard
from flashnorm.core import plan
routes = [route for route, _, _ in plan._launches]
try:
    with flashnorm.backend("cpu"):
        flashnorm.rmsnorm(x, w)
    text = ""
except ValueError as error:
    text = str(error)
print(json.dumps(dict(y=y.float().tolist(), routes=routes, text=text, lines=lines, started=started,
    guard=guard.load() is not None)))
"""


@needs_cxx
def test_cpu_kernels_serve_where_nothing_can_be_compiled(host_folder, cache):
    seen = look(CALL, host_folder, cache)
    x, w = torch.linspace(-3, 3, 2 * 512).reshape(2, 512), torch.linspace(0.5, 2, 512)
    with flashnorm.backend("cpu"):
        want = flashnorm.rmsnorm(x.bfloat16(), w.bfloat16())
    assert torch.equal(torch.tensor(seen["y"]), want.float())
    assert seen["routes"] == ["cpu"] and seen["guard"] and seen["started"] == [] and seen["lines"] == []
    for part in ("float32", "FLASHNORM_DISABLE_JIT", str(host_folder)):
        assert part in seen["text"]
    assert "flashnorm precompile --arch host --ops rmsnorm --dtype fp32 --hidden 512" in seen["text"]


@needs_cxx
@pytest.mark.parametrize("damage", ["truncated", "altered", "no meta.json"])
def test_a_damaged_entry_is_passed_over(host_folder, tmp_path, cache, damage):
    broken = tmp_path / "aot"
    shutil.copytree(host_folder, broken)
    (entry,) = broken.glob("cpu-*")
    if damage == "truncated":
        os.truncate(entry / "kernel.so", 100)
    elif damage == "altered":
        flip(entry / "kernel.so", 4000)
    else:
        (entry / "meta.json").unlink()
    seen = look(CALL, broken, cache)
    assert seen["routes"] == [] and any("is passed over" in line for line in seen["lines"])
    assert any("torch route in place of cpu" in line and "--dtype bf16" in line for line in seen["lines"])
    assert torch.tensor(seen["y"]).isfinite().all()


@needs_cxx
def test_a_warm_cache_serves_without_compilers(host_folder, tmp_path):
    """Whoever built it: there is no toolchain here to compare with."""
    warm = tmp_path / "cache"
    assert folders.prepare(warm) is None
    backends.artifact("cpu", variant(hidden=512), "host").build(Store(warm / folders.LAYOUT))
    seen = look(CALL, tmp_path / "none", warm, FLASHNORM_DISABLE_JIT="0")
    assert seen["routes"] == ["cpu"] and "C++ compiler" in seen["text"] and seen["started"] == []


# ------------------------------------------------------------------ the dispatcher
def test_a_kernel_that_is_there_needs_no_tools():
    bare = dispatch.Tools("no DSL", frozenset(), "no nvcc", "no compiler")
    choose = dispatch.choose
    assert choose("rmsnorm", dispatch.ROUTES, H200, bare, unbuilt=frozenset({"cuda"})).route == "cuda"
    both = choose("rmsnorm", dispatch.ROUTES, H200, bare, unbuilt=frozenset({"cute", "cuda"}))
    assert both.route == "cute" and dict(both.reasons)["cuda"] == "cute comes first"
    old = choose("rmsnorm", dispatch.ROUTES, DeviceFacts("cuda", (7, 5)), bare, unbuilt=frozenset({"cute"}))
    assert old.route is None and "8.0 or newer" in dict(old.reasons)["cute"]
    assert choose("rmsnorm", dispatch.ROUTES, DeviceFacts("cpu"), bare, unbuilt=frozenset({"cpu"})).route == "cpu"
