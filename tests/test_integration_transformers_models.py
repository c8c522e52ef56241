"""`patch` on transformers' own modules, on tiny models of each family, and on a real one."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashnorm
from flashnorm.integrations.transformers import FAMILIES, patch, unpatch
from tests.test_integration_transformers import EPS, calls, state, x_of  # noqa: F401
from tests.tolerance import FP32_OF_LARGEST, FP32_RELATIVE

pytestmark = pytest.mark.cpu_only


# ------------------------------------------------------------------ transformers' own modules and models
def modeling(name: str) -> Any:
    pytest.importorskip("transformers", reason='transformers is not installed: pip install -e ".[transformers]"')
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


MODULES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "phi3": "Phi3",
    "granite": "Granite",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "glm": "Glm",
    "glm4": "Glm4",
    "glm4_moe": "Glm4Moe",
    "seed_oss": "SeedOss",
    "gpt_oss": "GptOss",
    "qwen3_next": "Qwen3Next",
}


def test_every_known_class_is_tried() -> None:
    assert sorted(f"{stem}RMSNorm" for stem in MODULES.values()) == sorted(FAMILIES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", MODULES)
def test_module_rounds_where_the_original_does(model_type: str, dtype: torch.dtype) -> None:
    """The contract's bound: 1 element in 10,000, two steps; and the original's bits on the torch route."""
    norm = getattr(modeling(model_type), f"{MODULES[model_type]}RMSNorm")(1024, eps=EPS).to(dtype)
    x = x_of(128, 1024, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.3, 1.7, 1024))
        want = norm(x)
        assert patch(norm) == 1
        got = norm(x)
        with flashnorm.backend("torch"):
            assert torch.equal(norm(x), want)
    if dtype is torch.float32:
        torch.testing.assert_close(got, want, rtol=FP32_RELATIVE, atol=FP32_OF_LARGEST)
        return
    different = got != want
    assert different.float().mean().item() <= 1e-4
    bits = [t.view(torch.int16)[different].int() for t in (got, want)]
    assert not different.any() or (bits[0] - bits[1]).abs().max() <= 2


CAUSAL = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "glm4", "gemma", "gemma2", "gemma3", "gpt2")
ENCODERS = ("bert", "roberta", "distilbert", "electra")
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def tiny(model_type: str) -> nn.Module:
    """A random model of three layers, its norms nowhere trivial."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    name = "gemma3_text" if model_type == "gemma3" else model_type
    sizes = dict(SIZES)
    if model_type in ("bert", "roberta", "electra", "gpt2", "distilbert"):  # no grouped heads
        sizes.pop("num_key_value_heads"), sizes.pop("head_dim")
    config = transformers.AutoConfig.for_model(name, **sizes)
    kind = transformers.AutoModel if model_type in ENCODERS else transformers.AutoModelForCausalLM
    model: nn.Module = kind.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms (and biases)
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def norms_of(model: nn.Module) -> int:
    return sum(type(m).__name__.endswith("RMSNorm") or type(m) is nn.LayerNorm for m in model.modules())


@pytest.mark.parametrize("model_type", CAUSAL)
def test_tiny_model(model_type: str, calls: list[tuple[str, str]]) -> None:
    model = tiny(model_type)
    norms, before, ids = norms_of(model), state(model), torch.arange(1, 41).view(2, 20)
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        want, tokens = model(ids).logits, model.generate(ids, **how)  # type: ignore[operator]
        assert patch(model) == norms > 6
        got = model(ids).logits
        assert len(calls) == norms
        assert torch.equal(model.generate(ids, **how), tokens)  # type: ignore[operator]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    assert unpatch(model) == norms
    assert state(model) == before


@pytest.mark.parametrize("model_type", ENCODERS)
def test_tiny_encoder(model_type: str, calls: list[tuple[str, str]]) -> None:
    model, ids = tiny(model_type), torch.arange(1, 41).view(2, 20)
    norms = norms_of(model)
    with torch.no_grad():
        want = model(ids).last_hidden_state
        assert patch(model) == norms > 6
        got = model(ids).last_hidden_state
    assert [name for name, _ in calls] == ["layernorm"] * norms
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    assert unpatch(model) == norms


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "olmo2", "glm4"])
def test_tiny_model_in_bf16_has_the_originals_bits_on_the_torch_route(model_type: str) -> None:
    model, ids = tiny(model_type).to(torch.bfloat16), torch.arange(1, 41).view(2, 20)
    with torch.no_grad():
        want = model(ids).logits
        patch(model)
        with flashnorm.backend("torch"):
            assert torch.equal(model(ids).logits, want)


# ------------------------------------------------------------------ a real model
@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[Any, Any, Any]]:
    """(the example as a module, tokenizer, model)."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    try:
        example = importlib.import_module("smollm2")
    finally:
        sys.path.pop(0)
    reason = example.missing()
    if reason is not None:
        pytest.skip(reason)
    yield example, *example.load()


@pytest.mark.slow
def test_smollm2_fp32(smollm2: tuple[Any, Any, Any]) -> None:
    example, tokenizer, model = smollm2
    results = list(example.compare_fp32(tokenizer, model, tokens=8))
    assert len(results) == 3 + len(example.PROMPTS)
    assert all(holds for holds, _ in results), [what for holds, what in results if not holds]


@pytest.mark.slow
def test_smollm2_bf16(smollm2: tuple[Any, Any, Any]) -> None:
    example, tokenizer, model = smollm2
    results = list(example.compare_bf16(tokenizer, copy.deepcopy(model).to(torch.bfloat16)))
    assert len(results) == 3
    assert all(holds for holds, _ in results), [what for holds, what in results if not holds]
