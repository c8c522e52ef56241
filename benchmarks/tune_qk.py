"""Which tile for Q, K and V: `python -m benchmarks.tune_qk`, from the project's root, on the GPU.

    python -m benchmarks.tune_qk --json tune_qk.jsonl
    python -m benchmarks.tune_qk --heads 12 --kinds e4m3 --scope head --neox
    python -m benchmarks.tune_qk --code                             # of sm_90a's machine code; needs no GPU

Builds the kernel with every tile that there is to choose (`-DFLASHNORM_TUNING`), compares what each writes with what
the chosen one does, bit for bit, and times it in CUDA graphs over cold buffers with PDL on, beside `torch.mul(x, 2,
out=y)` on as many elements. The share is that of the bandwidth of `mul`. JSON lines.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import qk, sass
from benchmarks.cuda_plans import Log
from benchmarks.measure import Graph, count_launches, count_sets, time_graphs
from benchmarks.roofline import Buffer
from flashnorm.backends.cuda import CSRC, spec
from flashnorm.jit.codegen import unit
from flashnorm.jit.toolchain import find_host_compiler, find_nvcc, find_tvm_ffi, nvcc_flags
from flashnorm.program import QkLayout, QkNormRope
from flashnorm.verify import resources

STEADY = 2  # groups of 8 that have the same channels in every head
# threads, lanes of a sum; csrc/flashnorm/qk/plan.h
SUMS = ((32, 4), (32, 8), (64, 4), (64, 8), (128, 2), (128, 4), (128, 8), (512, 2))
OTHERS = ((32, 1), (64, 1), (128, 1), (512, 1))
KINDS = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def program(kind: str, args: argparse.Namespace, layout: QkLayout | None = None) -> tuple[QkNormRope, tuple[str, ...]]:
    found = QkNormRope(args.scope, not args.neox, False, True, True, kind == "e4m3", layout)
    out = str(KINDS[kind]).removeprefix("torch.")
    return found, (*("bfloat16",) * 3, *(out,) * 3)


def fits(threads: int, lanes: int, layout: QkLayout) -> bool:
    """Whether a tile has a lane for each group of Q and of K, or as many lanes as there can be."""
    groups = max(layout.heads[:2]) * layout.head_dim // 8
    return layout.scope != "hidden" or groups <= threads * lanes or threads * lanes == 1024


# ------------------------------------------------------------------ on the GPU
def tensors(buffers: list[Buffer]) -> dict[str, torch.Tensor]:
    made = {}
    for buffer in buffers:
        values = torch.randn(buffer.shape, device="cuda")
        made[buffer.name] = values.to(buffer.dtype)
    return made


def timed(module: Any, kind: str, heads: int, args: argparse.Namespace, log: Log) -> None:
    layout = replace(qk.layout_for(qk.TOKENS, 384 * heads), scope=args.scope, interleave=not args.neox)
    bench = next(e for e in qk.ENTRIES if e.coded == (kind == "e4m3"))
    described = bench.buffers(qk.TOKENS, layout.hidden_size, torch.bfloat16)
    first = tensors(described)
    moved = sum(t.nbytes for t in first.values())
    props = torch.cuda.get_device_properties(0)
    sets = count_sets(moved, props.L2_cache_size, torch.cuda.mem_get_info()[0] // 3)
    buffers = [first, *(tensors(described) for _ in range(sets - 1))]
    copies = [torch.empty_like(b["x"]) for b in buffers]
    if args.scope == "head":
        weights = {"q_weight": first["q_weight"][: layout.head_dim], "k_weight": first["k_weight"][: layout.head_dim]}
        buffers = [{**b, **weights} for b in buffers]
    launch = module["launch"](*layout.integers(), *layout.numbers())

    def bound(b: dict[str, torch.Tensor]) -> Any:
        shaped = (w.view(-1, layout.head_dim).expand(heads, -1) for w in (b["q_weight"], b["k_weight"]))
        return functools.partial(launch, 1e-6, 1.0, 1.0, True, b["x"], *shaped, b["q_out"], b["k_out"], b["v_out"])

    def results() -> list[torch.Tensor]:
        for name in ("q_out", "k_out", "v_out"):
            first[name].view(torch.uint8).fill_(0xFF)
        bound(buffers[0])()
        torch.cuda.synchronize()
        return [first[name].view(torch.uint8).clone() for name in ("q_out", "k_out", "v_out")]

    where = {"out": kind, "heads": heads, "scope": args.scope, "neox": args.neox}
    launches = count_launches(sets, moved)
    calls = [functools.partial(torch.mul, b["x"], 2, out=c) for b, c in zip(buffers, copies, strict=True)]
    graphs = {"mul": Graph(calls, launches, nullcontext)}
    module["force_plan"](0, 0, 0, True)
    wanted = results()
    for plan in ((0, 0), *(SUMS if args.scope == "hidden" else OTHERS)):
        if plan != (0, 0) and not fits(*plan, layout):
            continue
        module["force_plan"](*plan, STEADY, True)
        try:
            if not all(map(torch.equal, results(), wanted)):
                log.add("failure", where=f"bits {plan}", **where)
                continue
            label = "{}x{}".format(*plan) if plan != (0, 0) else "picked"
            graphs[label] = Graph([bound(b) for b in buffers], launches, nullcontext)
        except Exception as error:
            log.add("failure", where=f"{plan}", error=str(error)[-500:], **where)
    module["force_plan"](0, 0, 0, True)
    took = time_graphs(graphs, args.repeats)
    speed = 2 * first["x"].nbytes / took["mul"].us  # bytes a us
    for label, timing in took.items():
        share = 1.0 if label == "mul" else moved / timing.us / speed
        log.add(
            "time", plan=label, us=round(timing.us, 2), us_min=round(timing.us_min, 2), share=round(share, 4), **where
        )
        print(f"{kind:5} {heads:3} heads {args.scope:6} {label:8} {timing.us:8.2f} us  {share:.3f} of mul", flush=True)


# ------------------------------------------------------------------ without one
def code(kind: str, args: argparse.Namespace) -> None:
    """Registers, stack and instructions of every tile. A group's turn, 21, is not in them: no way asks memory there."""
    nvcc, host, ffi = find_nvcc(), find_host_compiler(), find_tvm_ffi()
    tool, target = resources.find_cuobjdump(), nvcc and nvcc.target(args.arch)
    if not (nvcc and host and ffi and tool and target):
        raise SystemExit(f"{nvcc}; {host}; {ffi}; cuobjdump: {tool}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernel.cu").write_text(unit(*program(kind, args), "cuda"))
        includes = [f"-I{path}" for path in (CSRC, *ffi.include_dirs)]
        command = [str(nvcc.path), *nvcc_flags(nvcc, target, host), "-DFLASHNORM_TUNING", *includes]
        subprocess.run([*command, "-cubin", "kernel.cu", "-o", "kernel.cubin"], check=True, cwd=folder)
        usage = [str(tool), "-res-usage", "kernel.cubin"]
        text = subprocess.run(usage, check=True, cwd=folder, capture_output=True, text=True).stdout
        taken = dict(re.findall(r"Function (\S+):\s+REG:(\d+ STACK:\d+)", text))
        for kernel, lines in sass.functions(folder / "kernel.cubin").items():
            tile = re.search(r"QkTileILi(\d+)ELi(\d+)ELNS_6GroupsE(\d)ELb(\d)", kernel)
            assert tile
            shown = "{}x{} groups {} staged {}".format(*tile.groups())
            print(
                f"{kind:5} {shown:28} {taken.get(kernel, ''):12} {sass.count(lines).slots:5} instructions", flush=True
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="12,24,40", help="of Q, of K and of V; heads of 128")
    parser.add_argument("--kinds", default="e4m3,bf16")
    parser.add_argument("--scope", choices=("hidden", "head", "none"), default="hidden")
    parser.add_argument("--neox", action="store_true")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path("tune_qk.jsonl"))
    parser.add_argument("--code", action="store_true", help="read the machine code, run nothing")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if args.code:
        for kind in kinds:
            code(kind, args)
        return 0
    import tvm_ffi

    start, log = time.monotonic(), Log(args.json)
    log.add("device", name=torch.cuda.get_device_name(), torch=torch.__version__, arch=args.arch)
    for kind in kinds:
        folder = spec(*program(kind, args), args.arch, ("FLASHNORM_TUNING",)).build()
        module = tvm_ffi.load_module(str(folder / "kernel.so"))
        for heads in map(int, args.heads.split(",")):
            timed(module, kind, heads, args, log)
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - start:.0f} s, {log.failures} failures", flush=True)
    return 1 if log.failures else 0


if __name__ == "__main__":
    sys.exit(main())
