"""flashnorm under FlashInfer's name: signatures, a test file in FlashInfer's style as it stands, and the way back."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flashnorm
from flashnorm.integrations import flashinfer as integration

pytestmark = pytest.mark.cpu_only

# FlashInfer 0.7.2: positional parameters in order, then keyword-only ones. "=" has a default.
SIGNATURES = {
    "rmsnorm": "input weight eps=1e-06 out=None enable_pdl=None",
    "gemma_rmsnorm": "input weight eps=1e-06 out=None enable_pdl=None",
    "fused_add_rmsnorm": "input residual weight eps=1e-06 enable_pdl=None",
    "gemma_fused_add_rmsnorm": "input residual weight eps=1e-06 enable_pdl=None",
    "rmsnorm_quant": "out input weight scale eps=1e-06 enable_pdl=None",
    "fused_add_rmsnorm_quant": "out input residual weight scale eps=1e-06 enable_pdl=None",
    "fused_add_rmsnorm_fp8_block_quant": ("out block_scale normed_out input residual weight eps=1e-06 enable_pdl=None"),
    "layernorm": "input gemma beta eps=1e-06",
    "layernorm_quant": "out input gemma beta scale eps=1e-06",
    "fused_rmsnorm_silu": "input weight eps=1e-06 out=None block_scale=None",
    "rmsnorm_fp4quant": (
        "input weight y_fp4=None block_scale=None global_scale=None eps=1e-06 block_size=16 scale_format=None "
        "is_sf_swizzled_layout=False enable_pdl=None"
    ),
    "add_rmsnorm_fp4quant": (
        "input residual weight y_fp4=None block_scale=None global_scale=None eps=1e-06 block_size=16 "
        "scale_format=None is_sf_swizzled_layout=False output_both_sf_layouts=False block_scale_unswizzled=None "
        "enable_pdl=None y_out=None"
    ),
    "fused_qk_rmsnorm_rope": (
        "qkv q_weight k_weight * ppf pph ppw num_frame_channels num_height_channels num_width_channels num_heads_q "
        "num_heads_k num_heads_v head_dim eps=1e-06 base=10000.0 interleave=True factor=1.0 low=0.0 high=0.0 "
        "attention_factor=1.0 is_qk_norm=True output_fp8=False output_quant_scale=1.0 v_quant_scale=1.0 q_out=None "
        "k_out=None v_out=None"
    ),
    "fused_dit_gate_residual_layernorm_gamma_beta": (
        "input residual gate gamma beta * gate_bias=None epsilon=1e-06 use_nvfp4=False use_mxfp8=False "
        "global_scaling_factor=None input_global_scaling_factor=None residual_out=None norm_out=None sf_out=None"
    ),
    "fused_dit_gate_residual_layernorm_scale_shift": (
        "input residual gate scale shift * gate_bias=None scale_bias=None shift_bias=None epsilon=1e-06 "
        "use_nvfp4=False use_mxfp8=False global_scaling_factor=None input_global_scaling_factor=None "
        "residual_out=None norm_out=None sf_out=None"
    ),
    "fused_dit_residual_layernorm_scale_shift": (
        "input scale shift * residual=None scale_bias=None shift_bias=None epsilon=1e-06 use_nvfp4=False "
        "use_mxfp8=False global_scaling_factor=None input_global_scaling_factor=None residual_out=None norm_out=None "
        "sf_out=None"
    ),
    "gated_residual_rmsnorm": (
        "branch residual weight alpha beta eps=1e-06 gain_center=0.0 out=None * enable_pdl=True"
    ),
    "gated_residual_next_rmsnorm": (
        "branch residual next_weight alpha beta post_eps=1e-06 next_eps=1e-06 next_gain_center=0.0 "
        "residual_out=None ffn_input=None * post_weight=None post_gain_center=0.0 enable_pdl=True"
    ),
    "rmsnorm_sigmoid_gate": "input gate eps=1e-05 * enable_pdl=True",
    "gen_norm_module": "",
}
CAKE = {
    "cake_rmsnorm": "x w eps=1e-06 residual=None deterministic=True",
    "cake_rmsnorm_train_forward": "x w eps * residual=None out=None rstd=None residual_out=None",
    "cake_rmsnorm_train_backward": ("g x w rstd * deterministic=True g_residual=None workspace=None dx=None dw=None"),
    "cake_rmsnorm_train_backward_workspace_bytes": "rows hidden device * residual=False",
    "cake_rmsnorm_train_backward_workspace": "rows hidden device * residual=False",
    "is_cake_rmsnorm_train_supported": "device hidden=None",
}


@pytest.fixture(autouse=True)
def left_as_found():
    """No test leaves a module or a finder behind."""
    before = {name: module for name, module in sys.modules.items() if integration._mine(name)}
    finders = list(sys.meta_path)
    yield
    for name in [name for name in sys.modules if integration._mine(name)]:
        del sys.modules[name]
    sys.modules.update(before)
    sys.meta_path[:] = finders


def compatible(function, wanted: str) -> str:
    """Why a function cannot be called as FlashInfer's; empty where it can."""
    mine = inspect.signature(function).parameters
    positional = [p.name for p in mine.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword_only, place = False, 0
    for word in wanted.split():
        if word == "*":
            keyword_only = True
            continue
        name, _, default = word.partition("=")
        if name not in mine:
            return f"{name} is missing"
        if not keyword_only:
            if positional[place : place + 1] != [name]:
                return f"{name} is not number {place}"
            place += 1
        if default and repr(mine[name].default) != default:
            return f"{name} defaults to {mine[name].default!r}, not {default}"
    known = {word.partition("=")[0] for word in wanted.split()}
    needed = [p.name for p in mine.values() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    more = [name for name in needed if name not in known]
    return f"{more} must be given" if more else ""


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flashinfers(name):
    if not hasattr(flashnorm, name):
        pytest.skip(f"flashnorm has no {name}")
    with integration.install():
        module = importlib.import_module("flashinfer.norm")
        top = importlib.import_module("flashinfer")
    assert compatible(getattr(module, name), SIGNATURES[name]) == ""
    assert getattr(top, name) is getattr(module, name)


@pytest.mark.parametrize("name", CAKE)
def test_signatures_of_training_are_flashinfers(name):
    if importlib.util.find_spec("flashnorm.cake_rmsnorm_train") is None:
        pytest.skip("flashnorm has no cake_rmsnorm_train")
    with integration.install():
        module = importlib.import_module("flashinfer.cake_rmsnorm_train")
        top = importlib.import_module("flashinfer")
    assert compatible(getattr(module, name), CAKE[name]) == ""
    assert getattr(top, name) is getattr(module, name)


def test_every_name_has_a_signature_here():
    there = {name for name in integration.NORMS if hasattr(flashnorm, name) and not name.startswith("supports_")}
    assert there <= set(SIGNATURES)


def test_the_check_of_signatures_sees_what_it_looks_for():
    def function(input, eps, weight, out=1, *, more):
        """Everything wrong."""

    assert compatible(function, "input weight") == "weight is not number 1"
    assert compatible(function, "input eps weight out=None") == "out defaults to 1, not None"
    assert compatible(function, "input eps weight out=1") == "['more'] must be given"
    assert compatible(function, "input nothing") == "nothing is missing"


# ------------------------------------------------------------------ code that was written for FlashInfer
STYLE = """
import pytest
import torch

import flashinfer
import flashinfer.norm
from flashinfer.utils import device_support_pdl

DEVICE = torch.device("{device}")


def reference(x, w, eps=1e-6):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * w.float()).to(x.dtype)


@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.parametrize("hidden", [111, 1024])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("contiguous", [True, False])
def test_norm(rows, hidden, given, pdl, contiguous):
    if pdl and not device_support_pdl(DEVICE):
        pytest.skip("no PDL")
    x = torch.randn(rows, hidden if contiguous else 2 * hidden, device=DEVICE).half()[:, :hidden]
    w = torch.randn(hidden, device=DEVICE).half()
    if given:
        y = torch.empty_like(x)
        flashinfer.norm.rmsnorm(x, w, out=y, enable_pdl=pdl)
    else:
        y = flashinfer.norm.rmsnorm(x, w, enable_pdl=pdl)
    torch.testing.assert_close(y, reference(x, w), rtol=1e-3, atol=1e-3)


def test_fused_add():
    x, residual = torch.randn(7, 256, device=DEVICE).half(), torch.randn(7, 256, device=DEVICE).half()
    w = torch.randn(256, device=DEVICE).half()
    total = x.float() + residual.float()
    flashinfer.fused_add_rmsnorm(x, residual, w, 1e-6)
    assert torch.equal(residual, total.half())
    torch.testing.assert_close(x, reference(total, w).half(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quant(dtype):
    x, w = torch.randn(9, 512, device=DEVICE).half(), torch.randn(512, device=DEVICE).half()
    y = torch.empty(9, 512, dtype=dtype, device=DEVICE)
    flashinfer.norm.rmsnorm_quant(y, x, w, torch.tensor(0.5, device=DEVICE), 1e-6)
    steps = torch.finfo(dtype)  # the largest distance is half of one
    least = 0.5 * steps.smallest_normal * steps.eps
    torch.testing.assert_close(y.float() * 0.5, reference(x.float(), w), rtol=steps.eps / 2 + 1e-4, atol=least)


def test_layernorm():
    x = torch.randn(3, 129, device=DEVICE).bfloat16()
    gemma, beta = torch.randn(129, device=DEVICE), torch.randn(129, device=DEVICE)
    want = torch.nn.functional.layer_norm(x.float(), (129,), gemma, beta, 1e-6).to(x.dtype)
    torch.testing.assert_close(flashinfer.layernorm(x, gemma, beta, 1e-6), want, rtol=1e-2, atol=1e-2)


def test_fp4():
    from flashinfer.cute_dsl.rmsnorm_fp4quant import rmsnorm_fp4quant
    x, w = torch.randn(5, 128, device=DEVICE).bfloat16(), torch.randn(128, device=DEVICE).bfloat16()
    codes, scale = rmsnorm_fp4quant(x, w, block_size=16)
    assert codes.shape == (5, 64) and scale.shape == (5, 8) and scale.dtype == torch.float8_e4m3fn


def test_compile():
    x, w = torch.randn(4, 128, device=DEVICE).half(), torch.ones(128, device=DEVICE).half()
    want = flashinfer.rmsnorm(x, w)
    got = torch.compile(flashinfer.rmsnorm, fullgraph=True, backend="eager")(x, w)
    assert torch.equal(got, want)
    torch.testing.assert_close(got, reference(x, w), rtol=1e-3, atol=1e-3)
"""


def test_a_test_file_in_flashinfers_style_runs_as_it_stands(tmp_path):
    (tmp_path / "test_style.py").write_text(STYLE.format(device="cpu"))
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "flashnorm.integrations.flashinfer",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path / "test_style.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "22 passed, 16 skipped" in done.stdout, done.stdout


def test_a_script_runs_as_it_stands(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom flashinfer.norm import rmsnorm\nprint(rmsnorm.__module__, sys.argv[1:])\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "flashnorm.integrations.flashinfer", str(script), "--flag"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
    assert done.stdout.strip() == "flashnorm.ops.rmsnorm ['--flag']", done.stdout + done.stderr


# ------------------------------------------------------------------ installing, and the way back
def test_what_is_installed():
    with integration.install():
        import flashinfer
        import flashinfer.norm

        assert flashinfer.rmsnorm is flashinfer.norm.rmsnorm
        assert flashinfer.rmsnorm.__wrapped__ is flashnorm.rmsnorm
        assert flashinfer.__version__ == integration.INTERFACE
        assert importlib.util.find_spec("flashinfer") is not None
        from flashinfer.cute_dsl import add_rmsnorm_fp4quant

        assert add_rmsnorm_fp4quant.__wrapped__ is flashnorm.add_rmsnorm_fp4quant
        from flashinfer.jit.norm import gen_norm_module

        assert gen_norm_module is flashnorm.gen_norm_module
        assert not flashinfer.utils.device_support_pdl(torch.device("cpu"))
        with pytest.raises(ValueError, match="CUDA device"):
            flashinfer.utils.get_compute_capability(torch.device("cpu"))


def test_undo_brings_back_what_was_there(monkeypatch):
    finders = list(sys.meta_path)
    with integration.install() as outer:
        with integration.install():  # again is fine
            pass
        assert "flashinfer.norm" in sys.modules
        assert importlib.import_module("flashinfer").rmsnorm.__wrapped__ is flashnorm.rmsnorm
        outer.undo()
        outer.undo()
    assert "flashinfer" not in sys.modules
    assert "flashinfer.norm" not in sys.modules
    assert sys.meta_path == finders


def test_a_real_flashinfer_is_not_replaced_unasked(monkeypatch):
    real, norm = ModuleType("flashinfer"), ModuleType("flashinfer.norm")
    real.__file__ = "/somewhere/flashinfer/__init__.py"
    monkeypatch.setitem(sys.modules, "flashinfer", real)
    monkeypatch.setitem(sys.modules, "flashinfer.norm", norm)
    with pytest.raises(RuntimeError, match=r"imported already, from /somewhere.*replace=True"):
        integration.install()
    assert sys.modules["flashinfer"] is real
    with integration.install(replace=True):
        assert importlib.import_module("flashinfer.norm").rmsnorm.__wrapped__ is flashnorm.rmsnorm
    assert sys.modules["flashinfer"] is real
    assert sys.modules["flashinfer.norm"] is norm
    assert "flashinfer.utils" not in sys.modules


def test_training_is_found_where_there_is_any(monkeypatch):
    cake = ModuleType("flashnorm.cake_rmsnorm_train")
    cake.__spec__ = importlib.machinery.ModuleSpec(cake.__name__, None)
    cake.SUPPORTED_COMPUTE_CAPABILITIES, cake.ARCHES = ((9, 0), (10, 0)), ("sm_90a", "sm_100a")
    cake.cake_rmsnorm, cake.route_key = (lambda x, w: x), (lambda *_: "key")
    monkeypatch.setitem(sys.modules, cake.__name__, cake)
    with integration.install():
        import flashinfer
        from flashinfer.cake_rmsnorm_train import cake_rmsnorm
        from flashinfer.jit import cake_rmsnorm_train as loader

        assert flashinfer.cake_rmsnorm is cake_rmsnorm is cake.cake_rmsnorm
        assert loader.route_key is cake.route_key and loader.arch_for_capability((10, 0)) == "sm_100a"
        assert loader.route_applies(device_capability=(9, 0), hidden=777, kind="fwd", residual=True)
        assert not loader.route_applies(device_capability=(7, 0), hidden=777, kind="fwd")
        flashinfer.jit.build_jit_specs(loader.specs_for_arch("sm_90a"), verbose=False)
        assert flashinfer.jit.env.has_flashinfer_jit_cache()


def test_parameters_may_be_handed_over_outside_of_no_grad(caplog):
    """FlashInfer records no gradient; flashnorm records one where it can, and says where it is lost."""
    x, weight = torch.randn(4, 64), torch.nn.Parameter(torch.randn(64))
    with pytest.raises(RuntimeError, match="requires grad"):
        flashnorm.fused_add_rmsnorm(x.clone(), x.clone(), weight)
    integration._said.clear()
    with integration.install(), caplog.at_level("WARNING", logger="flashnorm"):
        import flashinfer

        for _ in range(2):
            mine, residual = x.clone(), x.clone()
            flashinfer.fused_add_rmsnorm(mine, residual, weight)
        assert [r.message for r in caplog.records if "records no gradient" in r.message] == [
            "flashinfer.fused_add_rmsnorm records no gradient, and an argument requires one"
        ]
        assert torch.equal(residual, x + x) and not mine.requires_grad
        out = torch.empty_like(x)
        assert flashinfer.rmsnorm(x, weight, out=out) is out and not out.requires_grad
        assert flashinfer.rmsnorm(x, weight, 1e-6, out) is out
        recorded = flashinfer.rmsnorm(x, weight)
        assert recorded.requires_grad and torch.equal(recorded, out)
        compiled = torch.compile(flashinfer.fused_add_rmsnorm, fullgraph=True, backend="eager")
        again, residual = x.clone(), x.clone()
        compiled(again, residual, weight)
        assert torch.equal(again, mine)


def test_one_keyword_more():
    def operator(qkv):
        return qkv

    assert integration._without_skip_check(operator)(3, skip_check=True) == 3
