"""Tuning the CUDA C++ route: bits first, then every launch plan on every shape of the table.

    python -m benchmarks.tune_cuda --out benchmarks/results/tune_cuda.jsonl [--part bits|plans|all] [--arch sm_90a]
        [--only ln,quant,block] [--shapes 16384x7168,64x4096]

Builds tuning artefacts (`-DFLASHNORM_TUNING`, which lets a caller force the plan), checks every plan against the
NumPy model of the arithmetic, and times plans in CUDA graphs over buffers that are always cold. Failures are
recorded and the run goes on. JSON lines.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda_bits import bits
from benchmarks.cuda_plans import BUILDS, NO_PLAN, SHARED, Log, Plan, build, plans
from benchmarks.measure import Graph, count_launches, count_sets, time_graphs
from benchmarks.tune_cases import SCALARS
from flashnorm.program import Operand, QuantBlocks

TABLE = [
    (1, 4096), (8, 4096), (64, 4096), (64, 8192), (128, 7168), (512, 4096), (1024, 8192), (4096, 4096),
    (16384, 4096), (32768, 8192), (8192, 16384), (4096, 32768), (4096, 65536), (2048, 131072), (32768, 128),
    (262144, 128), (16384, 5120),
]  # fmt: skip
MORE = [
    (1, 128), (1, 16384), (1, 32768), (1, 65536), (1, 131072), (64, 32768), (256, 8192), (1024, 2048), (4096, 1024),
    (8192, 1536), (65536, 576), (64, 4095), (4096, 4095), (1024, 4100), (4096, 20001), (1024, 262144),
]  # fmt: skip
F32_SHAPES = [(64, 4096), (4096, 4096), (8192, 8192), (4096, 16384), (2048, 65536)]
NORM_SHAPES = [
    (1, 4096), (64, 7168), (4096, 4096), (16384, 7168), (8192, 768), (16384, 2048), (1024, 8192), (16384, 4096),
    (8192, 16384), (262144, 128),
]  # fmt: skip
DIT_SHAPES = [(1920, 3072), (32760, 3072), (1920, 5120), (32760, 5120)]
WORK = (
    [("rms", *shape) for shape in TABLE] + [("add", *shape) for shape in TABLE] + [("rms", *shape) for shape in MORE]
    + [(family, *shape) for family in ("rms_f32", "add_f32") for shape in F32_SHAPES]
    + [(family, *shape) for family in ("ln", "quant", "add_quant", "block", "dynamic_row", "dynamic_128", "add_ln",
                                       "ln_quant", "dynamic_row_int8") for shape in NORM_SHAPES]
    + [("block", 512, 7168)] + [(family, *shape) for family in SHARED for shape in DIT_SHAPES]
)  # fmt: skip


def tensor_for(operand: Operand, dtype: str, m: int, h: int, store: Any) -> torch.Tensor:
    """An operand of M rows of H elements, on the GPU; scales of blocks lie column by column."""
    if operand.kind == "blocks":
        assert isinstance(store, QuantBlocks)
        count = 1 if store.block == 0 else -(-h // store.block)
        columns = -(-count // 4) if store.packed else count
        rows = m if columns == 1 else -(-m // 4) * 4
        return torch.zeros(columns, rows, device="cuda", dtype=getattr(torch, dtype)).t()
    if operand.kind == "scalar":
        return torch.full((1,), 0.05, device="cuda", dtype=getattr(torch, dtype))
    shape = {"row": (m, h), "vec": (h,), "per_row": (m,)}[operand.kind]
    return torch.randn(shape, device="cuda").to(getattr(torch, dtype))


def timed(family: str, modules: dict[str, Any], m: int, h: int, log: Log, deadline: float) -> None:
    program, dtypes = BUILDS[family]
    described = list(zip(program.operands(), dtypes, strict=True))

    def buffers_of_a_call() -> dict[str, torch.Tensor]:
        return {operand.name: tensor_for(operand, dtype, m, h, program.store) for operand, dtype in described}

    first = buffers_of_a_call()
    moved = sum(first[o.name].nbytes * (2 if o.mode == "inout" else 1) for o, _ in described)
    props = torch.cuda.get_device_properties(0)
    free = torch.cuda.mem_get_info()[0] // 3
    sets = count_sets(moved, props.L2_cache_size, free)
    launches = count_launches(sets, moved)
    buffers = [first, *(buffers_of_a_call() for _ in range(sets - 1))]
    scalars = [SCALARS[name] for name in program.scalars()]

    graphs: dict[str, Graph] = {}
    labels: dict[str, dict[str, Any]] = {}

    def add(label: str, calls: Sequence[Callable[[], object]], **fields: Any) -> None:
        try:
            graphs[label] = Graph(calls, launches, nullcontext)
            labels[label] = fields
        except Exception as error:
            log.add("failure", where=f"time {label}", shape=[m, h], error=str(error)[-500:])

    def launch(plan: Plan, pdl: bool = True) -> None:
        module = modules[family]
        module["force_plan"](*plan)
        calls = [functools.partial(module["launch"], *scalars, pdl, *b.values()) for b in buffers]
        add(f"{plan} {pdl}", calls, variant=family, plan=plan, pdl=pdl)
        module["force_plan"](*NO_PLAN)

    # The ceiling: as many rows read and written, in the input's dtype.
    doubled = [b.get("normed_out", b["out"] if "out" in b else b["x"]) for b in buffers]
    if all(out.dtype == b["x"].dtype for out, b in zip(doubled, buffers, strict=True)):
        add("mul", [functools.partial(torch.mul, b["x"], 2, out=o) for b, o in zip(buffers, doubled, strict=True)],
            variant="mul")  # fmt: skip
    launch(NO_PLAN)
    launch(NO_PLAN, False)
    for plan in plans(modules[family], family, m, h):
        launch(plan)
    if time.monotonic() > deadline:
        return
    results = time_graphs(graphs, 5)
    for label, timing in results.items():
        log.add("time", family=family, m=m, h=h, us=round(timing.us, 4), us_min=round(timing.us_min, 4),
                gbps=round(moved / timing.us / 1e3, 1), launches=timing.launches, **labels[label])  # fmt: skip
    us = {label: t.us for label, t in results.items()}
    forced = {label: fields["plan"] for label, fields in labels.items() if fields.get("plan", NO_PLAN) != NO_PLAN}
    ranked = sorted((us[label], plan) for label, plan in forced.items())
    best = "  ".join(f"{t:.3f} {','.join(str(int(n)) for n in plan)}" for t, plan in ranked[:3])
    own = us.get(f"{NO_PLAN} True", 0)
    print(f"{family:16}{m:7} x {h:6}  mul {us.get('mul', 0):8.3f}  picked {own:8.3f}"
          f"  {moved / max(own, 1e-9) / 1e3:6.0f} GB/s  no pdl {us.get(f'{NO_PLAN} False', 0):8.3f}  best {best}",
          flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("bits", "plans", "all"), default="all")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--only", help="programs by name, separated by commas")
    parser.add_argument("--shapes", help="MxH by commas, in place of the table's")
    parser.add_argument("--seconds", type=float, default=150.0, help="no new measurement starts after this")
    args = parser.parse_args()
    start = time.monotonic()
    log = Log(args.out)
    log.add("device", name=torch.cuda.get_device_name(), torch=torch.__version__, arch=args.arch)
    names = tuple(args.only.split(",")) if args.only else tuple(BUILDS)
    modules = build(args.arch, log, names)
    print(f"built {len(modules)} of {len(names)} in {time.monotonic() - start:.1f} s", flush=True)
    if args.part != "plans":
        bits(modules, log)
        print(f"{time.monotonic() - start:.1f} s", flush=True)
    if args.part != "bits":
        shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")] if args.shapes else []
        asked = [(name, m, h) for name in names for m, h in shapes] or WORK
        for family, m, h in (work for work in asked if work[0] in modules):
            if time.monotonic() - start > args.seconds:
                log.add("failure", where="out of time", family=family, shape=[m, h])
                break
            try:
                timed(family, modules, m, h, log, start + args.seconds)
            except Exception:
                log.add("failure", where=f"{family} {m} x {h}", error=traceback.format_exc()[-1500:])
            torch.cuda.empty_cache()
    print(f"done in {time.monotonic() - start:.1f} s, {log.failures} failures", flush=True)
    return 1 if log.failures else 0


if __name__ == "__main__":
    sys.exit(main())
