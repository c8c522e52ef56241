"""What a service that runs for weeks sees, on a GPU: `python -m benchmarks.steady`.

The tail: the 99th percentile over the median of 2,000 replays of a graph of 64 launches of `rmsnorm`, 64 x 4096.
Memory: what the process and PyTorch's allocator hold more after 200,000 warm calls, of operators in turn, than after
the first 20,000. JSON; the exit status is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import flashnorm

from .measure import resident

LAUNCHES, REPLAYS, MAX_TAIL = 64, 2000, 1.1
WARM, CALLS, MAX_GROWTH = 20_000, 200_000, 1 << 20  # bytes


def replays(route: str) -> dict[str, float]:
    """Microseconds of a replay: the median, the 99th percentile, the worst."""
    x, weight = torch.randn(64, 4096, device="cuda").bfloat16(), torch.randn(4096, device="cuda").bfloat16()
    out, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    with flashnorm.backend(route):
        flashnorm.rmsnorm(x, weight, out=out)
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                flashnorm.rmsnorm(x, weight, out=out)
    for _ in range(100):
        graph.replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for start, stop in marks:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) * 1e3 for start, stop in marks)
    return {"p50": statistics.median(times), "p99": times[len(times) * 99 // 100], "worst": times[-1]}


def calls(rows: int, hidden: int) -> list[Callable[[], object]]:
    """Operators with their results given, and one that allocates its own."""
    x, residual = torch.randn(2, rows, hidden, device="cuda").bfloat16()
    weight, bias = torch.randn(2, hidden, device="cuda")
    out, codes = torch.empty_like(x), torch.empty(rows, hidden, device="cuda", dtype=torch.float8_e4m3fn)
    w = weight.bfloat16()
    return [
        lambda: flashnorm.rmsnorm(x, w, out=out),
        lambda: flashnorm.rmsnorm(x, w),
        lambda: flashnorm.fused_add_rmsnorm(x, residual, w),
        lambda: flashnorm.layernorm(x, weight, bias),
        lambda: flashnorm.rmsnorm_quant(codes, x, w, 0.5),
    ]


def held() -> dict[str, int]:
    torch.cuda.synchronize()
    return {
        "resident": resident(),
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }


def growth(route: str) -> dict[str, int]:
    """Bytes held more after `CALLS` calls than after `WARM` of them."""
    with flashnorm.backend(route):
        each = calls(8, 4096)
        before: dict[str, int] = {}
        for i in range(WARM + CALLS):
            each[i % len(each)]()
            if i % 1000 == 999:
                torch.cuda.synchronize()
            if i + 1 == WARM:
                before = held()
        after = held()
    return {name: after[name] - before[name] for name in after}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found, missed = {}, 0
    for route in ("cute", "cuda"):
        times, more = replays(route), growth(route)
        tail = times["p99"] / times["p50"]
        found[route] = {"replay_us": times, "tail": tail, "growth_bytes": more}
        missed += (tail > MAX_TAIL) + any(value >= MAX_GROWTH for value in more.values())
        print(f"{route}: a replay {times['p50']:.1f} us, p99/p50 {tail:.3f} (asked {MAX_TAIL})", flush=True)
        print(f"    {CALLS} calls more hold {more} bytes more (asked: below {MAX_GROWTH})", flush=True)
    found["device"] = torch.cuda.get_device_name()
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
