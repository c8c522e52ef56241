"""Liger-Kernel's own sweep of RMSNorm as a module that trains: `python -m benchmarks.training`, from the root.

    python -m benchmarks.training --json training.json --png training.png          # on a GPU; seconds a shape
    python -m benchmarks.training --norm add_rmsnorm
    python -m benchmarks.training --device cpu --rows 64 --hidden 256,512 --repeats 3

4096 rows of 1024 to 16384 elements in bf16: milliseconds of the forward, the backward and both, through PyTorch's
autograd, and the memory that both take at their peak beyond the inputs. Against Liger-Kernel's module with its defaults
(its backward overwrites the incoming gradient), Hugging Face's Llama module, as it is and compiled, and PyTorch's.

Every call stands between two events of its own, behind a write that clears the L2 cache and gives the host a head
start; medians of `--repeats` rounds over all contenders. Who is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import flashnorm
from flashnorm import nn

from . import report as reporting

ROWS, HIDDEN = 4096, (1024, 2048, 4096, 8192, 16384)
MODES = ("forward", "backward", "full")
EPS = 1e-6
FLUSH_BYTES = 256 << 20
WRONG = 2e-2  # relative, of results and gradients in bf16

Module = torch.nn.Module


# ------------------------------------------------------------------ contenders
def _liger(hidden: int) -> Module:
    from liger_kernel.transformers import LigerRMSNorm

    return LigerRMSNorm(hidden, EPS)


def _liger_add(hidden: int) -> Module:
    from liger_kernel.transformers.fused_add_rms_norm import LigerFusedAddRMSNorm

    return LigerFusedAddRMSNorm(hidden, EPS)


def _hugging_face(hidden: int) -> Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(hidden, EPS)


class _Added(torch.nn.Module):
    """A residual addition in front of a norm, as models write it."""

    def __init__(self, norm: Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.norm(total), total


Make = Callable[[int], Module]
CONTENDERS: dict[str, dict[str, Make]] = {
    "rmsnorm": {
        "flashnorm": lambda h: nn.RMSNorm(h, EPS),
        "liger": _liger,
        "huggingface": _hugging_face,
        "huggingface, compiled": lambda h: torch.compile(_hugging_face(h)),  # type: ignore[return-value]
        "torch": lambda h: torch.nn.RMSNorm(h, EPS),
    },
    "add_rmsnorm": {
        "flashnorm": lambda h: nn.FusedAddRMSNorm(h, EPS),
        "liger": _liger_add,
        "huggingface": lambda h: _Added(_hugging_face(h)),
        "huggingface, compiled": lambda h: torch.compile(_Added(_hugging_face(h))),  # type: ignore[return-value]
        "torch": lambda h: _Added(torch.nn.RMSNorm(h, EPS)),
    },
}


class Trial:
    """One contender at one shape: its tensors, and a call for each mode."""

    def __init__(self, make: Make, norm: str, rows: int, hidden: int, device: torch.device) -> None:
        source = torch.Generator().manual_seed(hidden)

        def draw() -> torch.Tensor:
            return torch.randn(rows, hidden, generator=source).to(device, torch.bfloat16)

        self.module = make(hidden).to(device, torch.bfloat16)
        self.inputs = [draw().requires_grad_() for _ in range(2 if norm == "add_rmsnorm" else 1)]
        self.gradients = [draw() for _ in self.inputs]
        self.leaves = [*self.inputs, *self.module.parameters()]
        self.results: Sequence[torch.Tensor] = ()

    def forward(self) -> None:
        found = self.module(*self.inputs)
        self.results = found if isinstance(found, tuple) else (found,)

    def backward(self) -> Sequence[torch.Tensor]:
        return torch.autograd.grad(self.results, self.leaves, self.gradients, retain_graph=True)

    def full(self) -> Sequence[torch.Tensor]:
        self.forward()
        found = torch.autograd.grad(self.results, self.leaves, self.gradients)
        self.results = ()
        return found

    def checked(self) -> list[torch.Tensor]:
        """Results and gradients of a first call; its incoming gradients may be overwritten, so it gets copies."""
        kept, self.gradients = self.gradients, [g.clone() for g in self.gradients]
        self.forward()
        found = [*(y.detach() for y in self.results), *self.backward()]
        self.gradients = kept
        return found


def timed(call: Callable[[], Any], device: torch.device, flush: torch.Tensor | None) -> float:
    """Milliseconds of one call."""
    if flush is None:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)


def peak_megabytes(trial: Trial, device: torch.device) -> float | None:
    """What forward and backward take at their peak, beyond inputs and incoming gradients."""
    if device.type != "cuda":
        return None
    trial.results = ()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trial.full()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def measure(norm: str, rows: int, hidden: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """All contenders at one shape."""
    trials: dict[str, Trial] = {}
    failed: dict[str, str] = {}
    want: list[torch.Tensor] = []
    for name, make in CONTENDERS[norm].items():
        try:
            trial = Trial(make, norm, rows, hidden, device)
            got = trial.checked()
            want = want or got  # flashnorm's, which its own tests hold to the formula
            apart = max(
                float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, want, strict=True)
            )
            if apart > WRONG:
                raise ValueError(f"results are {apart:.1e} off")
            for mode in MODES:
                getattr(trial, mode)()
                trial.forward()
            trials[name] = trial
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    samples: dict[str, dict[str, list[float]]] = {name: {mode: [] for mode in MODES} for name in trials}
    for _ in range(repeats):
        for mode in MODES:
            for name, trial in trials.items():
                if mode == "backward":
                    trial.forward()
                samples[name][mode].append(timed(getattr(trial, mode), device, flush))
                trial.results = ()
    found = {
        name: {
            **{mode: statistics.median(samples[name][mode]) for mode in MODES},
            "peak_mb": peak_megabytes(trial, device),
        }
        for name, trial in trials.items()
    }
    return {"norm": norm, "rows": rows, "hidden": hidden, "ms": found, "failed": failed}


def table(entries: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'M x H':>14}  {'contender':<22}" + "".join(f"{mode + ' ms':>14}" for mode in MODES) + f"{'peak MB':>10}"
    ]
    for entry in entries:
        for name, figures in entry["ms"].items():
            peak = "-" if figures["peak_mb"] is None else f"{figures['peak_mb']:.1f}"
            cells = "".join(f"{figures[mode]:>14.4f}" for mode in MODES)
            lines.append(f"{entry['rows']:>6} x {entry['hidden']:<5}  {name:<22}{cells}{peak:>10}")
        lines += [f"{'':>14}  {name:<22} left out: {why.splitlines()[0]}" for name, why in entry["failed"].items()]
    return "\n".join(lines)


def plot(entries: Sequence[dict[str, Any]], file: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    has_peak = any(figures["peak_mb"] is not None for entry in entries for figures in entry["ms"].values())
    panels = (*MODES, "peak_mb") if has_peak else MODES
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 4), layout="constrained")
    for axis, what in zip(axes, panels, strict=True):
        for name in dict.fromkeys(name for entry in entries for name in entry["ms"]):
            points = [(e["hidden"], e["ms"][name][what]) for e in entries if name in e["ms"]]
            axis.plot([h for h, _ in points], [y for _, y in points], "o-", label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("H")
        axis.set_title("peak, MB" if what == "peak_mb" else f"{what}, ms")
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(file, dpi=130)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.split("\n")[0])
    parser.add_argument("--norm", choices=tuple(CONTENDERS), action="append", help="default: both")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--hidden", type=numbers, default=HIDDEN, help="comma-separated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, help="where the report goes")
    parser.add_argument("--png", type=Path, help="where the picture goes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    command = ["python -m benchmarks.training", *(sys.argv[1:] if argv is None else argv)]
    report = reporting.header(command, device, {"repeats": args.repeats, "eps": EPS, "dtype": "bfloat16"})
    report["rows"] = []
    for norm in args.norm or tuple(CONTENDERS):
        for hidden in args.hidden:
            report["rows"].append(measure(norm, args.rows, hidden, device, args.repeats))
            reporting.progress(table(report["rows"][-1:]))
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report["rows"]))
    if args.png:
        first = report["rows"][0]["norm"]
        title = f"{first} in training, flashnorm {flashnorm.__version__}, {report['machine']['device']}"
        plot([entry for entry in report["rows"] if entry["norm"] == first], args.png, title)
    return 0 if all("flashnorm" in entry["ms"] for entry in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
