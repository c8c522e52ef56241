"""Recipes: recorded, written, read, precompiled, preloaded; and the commands that messages name."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import replace

import pytest
import torch

import flashnorm
from benchmarks.container_view import look
from flashnorm import backends, recipe
from flashnorm import precompile as module
from flashnorm.__main__ import main
from flashnorm.core import commands, dispatch, plan
from flashnorm.core.device import DeviceFacts
from tests.aotkit import cache_fixture, needs_cxx, precompile, variant  # noqa: F401

pytestmark = pytest.mark.cpu_only

KERNELS = [
    recipe.Kernel(op, route, arch, commands.plain_variant(commands.operators()[op], dtype, hidden, {"numerics": mode}))
    for op in commands.operators()
    for mode in ("flashinfer", "hf-llama")
    for route, arch, dtype, hidden in (("cute", "sm_90a", torch.bfloat16, 111), ("cpu", "host", torch.float32, 64))
]


def test_a_recipe_says_everything():
    text = recipe.to_json(KERNELS)
    assert set(recipe.from_json(text)) == set(KERNELS) and len(KERNELS) >= 4 * len(commands.operators())
    assert text == recipe.to_json(reversed(KERNELS))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: d.update(format=2), "no recipe of format"),
        (lambda d: d["kernels"][0]["program"]["load"].update(stage="RowProgram"), "no stage 'RowProgram'"),
        (lambda d: d["kernels"][0]["program"]["load"].update(stage="os"), "no stage 'os'"),
        (lambda d: d["kernels"][0]["program"].pop("maps"), "kernel 0"),
        (lambda d: d["kernels"][0].update(dtypes=["bfloat16"]), "operands need as many dtypes"),
        (lambda d: d["kernels"][0].update(more=1), "kernel 0"),
    ],
)
def test_a_bad_recipe_is_refused(change, error):
    data = json.loads(recipe.to_json(KERNELS[:1]))
    change(data)
    with pytest.raises(ValueError, match=error):
        recipe.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("data", "error"), [(b"{}", "no recipe of format 1"), (b"\xff\xfe\x00", "nor any text"), (b"[", "line 1")]
)
@pytest.mark.parametrize("command", [False, True])
def test_a_bad_recipe_is_named(data, error, command, tmp_path, capsys):
    file = tmp_path / "recipe.json"
    file.write_bytes(data)
    if command:
        assert main(["precompile", "--recipe", str(file), "--out", str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
    else:
        with pytest.raises(ValueError) as caught:
            flashnorm.preload(file)
        said = str(caught.value)
    assert f"{file}: " in said and error in said


def test_the_command_makes_the_variant_again():
    """Whatever the variant: the words of the message are the command that builds exactly it."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    operators = commands.operators()
    op = operators["rmsnorm"]
    for kernel in KERNELS:
        if kernel.route in operators[kernel.op].routes:
            words = shlex.split(commands.command(operators[kernel.op], kernel.route, kernel.arch, kernel.variant))
            assert words[:2] == ["flashnorm", "precompile"]
            assert module.wanted(parser.parse_args(words[2:])) == [kernel]
    odd = replace(KERNELS[0].variant, row_rank=2, vec=2)
    words = shlex.split(commands.command(op, "cute", "sm_90a", odd))
    assert words[0] == "echo" and words[2:] == ["|", "flashnorm", "precompile", "--recipe", "-", "--out", "DIR"]
    assert recipe.from_json(words[1]) == (recipe.Kernel("rmsnorm", "cute", "sm_90a", odd),)


def test_the_command_names_options_and_dtypes_of_indices():
    """What a plain call does not say: every form of Q, K and V, and of rows that are picked."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    asked = {
        "fused_qk_rmsnorm_rope": {"layout": "head-neox"},
        "fused_qk_rmsnorm_rope_fp8": {"layout": "none"},
        "fused_qk_rmsnorm_rope_cached": {"layout": "head"},
        "fused_qk_rmsnorm_rope_cached_fp8": {},
        "rmsnorm_rows": {},
        "rmsnorm_dynamic_quant": {"granularity": "128", "scale_format": "ue8m0"},
    }
    for name, form in asked.items():
        op = commands.operators()[name]
        picked = {key: commands.values_of(op, key)[word] for key, word in form.items()}
        variant = commands.plain_variant(op, torch.bfloat16, 64, {"numerics": "flashinfer", **picked}, "int64")
        words = shlex.split(commands.command(op, "cuda", "sm_90a", variant))
        (made,) = module.wanted(parser.parse_args(words[2:]))
        assert (made.op, made.variant.dtypes) == (name, variant.dtypes)
        assert made.variant.program.code() == variant.program.code()
        indexed = "int64" in variant.dtypes
        assert indexed == (name == "rmsnorm_rows" or "cached" in name)
        assert " ".join(words).count("--option") == len(form) and ("--index" in words) == indexed


def test_every_form_of_one_operator():
    """Each a kernel of its own; what no operator has, or knows, is refused."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)

    def wanted(*more):
        flags = ("--arch", "sm_90a", "--ops", "fused_qk_rmsnorm_rope,fused_qk_rmsnorm_rope_cached_fp8", "--hidden", "1")
        return module.wanted(parser.parse_args([*flags, "--out", "x", *more]))

    found = wanted("--option", "layout=hidden,head,head-neox", "--index", "int32,int64", "--dtype", "bf16,fp16")
    assert len({(k.variant.program.code(), k.variant.dtypes) for k in found}) == 3 * 2 * (1 + 2)
    assert all(k.route == "cuda" for k in found)
    for option, error in (("layout=heads", "'heads'"), ("granularity=128", "looks like NAME"), ("layout", "missing")):
        with pytest.raises(ValueError, match=error):
            wanted("--option", option)


def test_record_sees_warm_calls_too():
    x, w = torch.randn(2, 48).bfloat16(), torch.randn(48).bfloat16()
    flashnorm.rmsnorm(x, w)
    flashnorm.rmsnorm(x, w)
    with flashnorm.record() as recorder:
        flashnorm.rmsnorm(x, w)
        flashnorm.rmsnorm(x, w)
        flashnorm.fused_add_rmsnorm(x.clone(), x.clone(), w, numerics="hf-llama")
    flashnorm.gemma_rmsnorm(x, w)
    if dispatch.choose("rmsnorm", dispatch.ROUTES, DeviceFacts("cpu"), plan.tools()).route != "cpu":
        pytest.skip("the torch route needs no kernels")
    assert recorder.kernels == (
        recipe.Kernel("rmsnorm", "cpu", "host", variant(hidden=48)),
        recipe.Kernel("fused_add_rmsnorm", "cpu", "host", variant("fused_add_rmsnorm", hidden=48, numerics="hf-llama")),
    )
    assert recorder.start().stop().kernels == recorder.kernels


PRELOAD = """
import json, logging
import torch
import flashnorm
lines = []
class Note(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("flashnorm").addHandler(Note())
logging.getLogger("flashnorm").setLevel("INFO")
ready = flashnorm.preload({path!r})
built = [line for line in lines if line.startswith("building")]
started.clear()
x = torch.ones(2, 512).bfloat16()
flashnorm.rmsnorm(x, x[0])
later = [line for line in lines if line.startswith("building")][len(built):]
print(json.dumps(dict(ready=ready, built=built, later=later, started=started)))
"""


@needs_cxx
def test_record_then_precompile_then_preload(tmp_path, cache):
    x = torch.ones(2, 512).bfloat16()
    with flashnorm.record() as recorder:
        flashnorm.rmsnorm(x, x[0])
    file = recorder.save(tmp_path / "recipe.json")
    assert json.loads(file.read_text())["kernels"][0]["hidden_size"] == 512
    out = tmp_path / "aot"
    code, summary, _ = precompile("--recipe", str(file), "--out", str(out))
    assert code == 0 and sorted(a["route"] for a in summary["artifacts"]) == ["cpu", *module.calls()]
    seen = look(PRELOAD.format(path=str(file)), out, cache)
    assert seen == {"ready": 1, "built": [], "later": [], "started": []}


SCALED = """
import json
import torch
started.clear()
import flashnorm
from flashnorm.core import plan
x, w = torch.linspace(-3, 3, 5 * 512).reshape(5, 512).bfloat16(), torch.linspace(0.5, 2, 512).bfloat16()
made = [
    *flashnorm.rmsnorm_fp4quant(x, w, block_size=32, is_sf_swizzled_layout=True, scale_rule="ocp"),
    *flashnorm.add_rmsnorm_fp4quant(x, x.clone(), w, global_scale=3.0, output_both_sf_layouts=True),
    flashnorm.fused_rmsnorm_silu(x, w, out=torch.zeros(5, 512).to(torch.float8_e4m3fn), scale=0.25),
]
print(json.dumps(dict(
    routes=[route for route, _, _ in plan._launches], started=started, made=[t.view(torch.uint8).tolist() for t in made]
)))
"""


@needs_cxx
def test_scaled_operators_from_a_folder(tmp_path, cache):
    """What calls of any option used can be made beforehand, and serves where nothing can be compiled."""
    shown = []
    scope = {"started": [], "print": shown.append}
    with flashnorm.record() as recorder, flashnorm.backend("cpu"):
        exec(SCALED, scope)
    file, out = recorder.save(tmp_path / "recipe.json"), tmp_path / "aot"
    assert {kernel.op for kernel in recorder.kernels} == {
        "rmsnorm_fp4quant_swizzled", "add_rmsnorm_fp4quant_both", "fused_rmsnorm_silu_quant",
    }  # fmt: skip
    code, summary, error = precompile("--recipe", str(file), "--out", str(out))
    assert code == 0 and sorted(a["route"] for a in summary["artifacts"]) == ["cpu", "cpu", "cpu", *module.calls()], (
        error
    )
    seen = look(SCALED, out, cache)
    assert seen["routes"] == ["cpu"] * 3 and seen["started"] == []
    assert seen["made"] == json.loads(shown[0])["made"]


@needs_cxx
def test_preload_builds_where_it_may(tmp_path):
    file = tmp_path / "recipe.json"
    kernels = [recipe.Kernel("rmsnorm", "cpu", "host", variant(hidden=512)), KERNELS[0]]
    file.write_text(recipe.to_json(kernels))
    env = {name: os.environ[name] for name in ("PATH", "CXX") if name in os.environ}
    seen = look(
        PRELOAD.format(path=str(file)),
        tmp_path / "none",
        tmp_path / "new",
        FLASHNORM_DISABLE_JIT="0",
        hide=False,
        **env,
    )
    assert seen["ready"] == 1 and seen["later"] == [] and seen["started"] == []
    assert seen["built"] == ["building cpu-LoadRow-bfloat16", *(f"building {name}" for name in module.calls())]


def test_preload_refuses_what_it_does_not_know(tmp_path):
    data = json.loads(recipe.to_json(KERNELS[:1]))
    data["kernels"][0]["op"] = "rmsnrm"
    (tmp_path / "recipe.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="rmsnrm"):
        flashnorm.preload(tmp_path / "recipe.json")


# ------------------------------------------------------------------ for build scripts
def test_gen_norm_module_is_the_cuda_module():
    spec = flashnorm.gen_norm_module(arch="9.0a")
    assert spec == backends.artifact("cuda", variant(), "sm_90a")
    other = flashnorm.gen_norm_module("fused_add_rmsnorm", dtype=torch.float16, numerics="vllm", arch="sm_80")
    assert other == backends.artifact("cuda", variant("fused_add_rmsnorm", torch.float16, 64, "hf-llama"), "sm_80")
    assert all(callable(getattr(spec, name)) for name in ("build", "load", "build_and_load"))
    with pytest.raises(ValueError, match="op must be one of"):
        flashnorm.gen_norm_module("norm", arch="sm_80")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="arch must be given"):
            flashnorm.gen_norm_module()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn, torch.bool, "half", None], ids=str)
@pytest.mark.parametrize("op", ["rmsnorm", "layernorm", "rmsnorm_quant", "fused_qk_rmsnorm_rope"])
def test_gen_norm_module_refuses_other_dtypes(op: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of torch\.bfloat16, torch\.float16.*, got"):
        flashnorm.gen_norm_module(op, dtype=dtype, arch="sm_80")


def test_gen_norm_module_takes_what_the_operator_takes() -> None:
    """Each of its dtypes is a module of its own; fp32 is none of those that are turned."""
    made = [flashnorm.gen_norm_module(dtype=dtype, arch="sm_80").key for dtype in commands.DTYPES.values()]
    assert all(made.count(key) == 1 for key in made)
    with pytest.raises(ValueError, match=r"dtype must be one of torch\.bfloat16, torch\.float16, got torch\.float32"):
        flashnorm.gen_norm_module("fused_qk_rmsnorm_rope", dtype=torch.float32, arch="sm_80")
