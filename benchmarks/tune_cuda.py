"""Tuning the CUDA C++ route: bits first, then every launch plan on every shape of the table.

    python -m benchmarks.tune_cuda --out benchmarks/results/tune_cuda.jsonl [--part bits|plans|all] [--arch sm_90a]

Builds a handful of tuning artefacts (`-DFLASHNORM_TUNING`, which lets a caller force the plan), checks every plan
against the NumPy model of the arithmetic, and times plans in CUDA graphs over buffers that are always cold.
Failures are recorded and the run goes on. JSON lines.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Graph, count_launches, count_sets, time_graphs
from flashnorm.backends.cuda import spec
from flashnorm.program import AddResidual, Affine, Cast, LoadRow, Rms, RowProgram, SaveRstd
from tests.canonical import rmsnorm_bits

B, H16, F = "bfloat16", "float16", "float32"
RMS = RowProgram(LoadRow(), Rms(), (Affine(),), Cast())
RMS_SAVE = RowProgram(LoadRow(), Rms(), (Affine(),), Cast(), (SaveRstd(),))
ADD = RowProgram(AddResidual(), Rms(), (Affine(),), Cast("x"))
LLAMA = RowProgram(AddResidual(rounded=True), Rms(), (Affine(round_norm=True),), Cast("x"))
GEMMA = RowProgram(LoadRow(), Rms(), (Affine(offset=1.0),), Cast())

# name: program, dtype of each operand
BUILDS: dict[str, tuple[RowProgram, dict[str, str]]] = {
    "rms": (RMS, {"x": B, "weight": B, "out": B}),
    "rms_f32": (RMS, {"x": F, "weight": F, "out": F}),
    "save": (RMS_SAVE, {"x": H16, "weight": F, "out": H16, "rstd": F}),
    "gemma": (GEMMA, {"x": H16, "weight": B, "out": H16}),
    "add": (ADD, {"x": B, "residual": B, "weight": B}),
    "add_f32": (ADD, {"x": F, "residual": F, "weight": F}),
    "llama": (LLAMA, {"x": B, "residual": F, "weight": H16}),
}

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
WORK = (
    [("rms", *shape) for shape in TABLE] + [("add", *shape) for shape in TABLE] + [("rms", *shape) for shape in MORE]
    + [(family, *shape) for family in ("rms_f32", "add_f32") for shape in F32_SHAPES]
)  # fmt: skip

# threads a row, rows a CTA, CTAs a row, lanes a thread, groups a lane, prefetch
Plan = tuple[int, int, int, int, int, bool]
NO_PLAN: Plan = (0, 0, 0, 0, 0, False)


class Log:
    """JSON lines, flushed one by one: whatever happens, what was measured is there."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w", encoding="utf-8")
        self.failures = 0

    def add(self, kind: str, **fields: Any) -> None:
        self.file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self.file.flush()
        if kind == "failure":
            self.failures += 1
            print("FAILURE", json.dumps(fields)[:400], flush=True)


def build(arch: str, log: Log) -> dict[str, Any]:
    """The modules that could be built, all at once."""
    import tvm_ffi

    def one(name: str) -> Any:
        program, dtypes = BUILDS[name]
        ordered = tuple(dtypes[operand.name] for operand in program.operands())
        start = time.perf_counter()
        folder = spec(program, ordered, arch, ("FLASHNORM_TUNING",)).build()
        log.add("build", name=name, seconds=round(time.perf_counter() - start, 2))
        return tvm_ffi.load_module(str(folder / "kernel.so"))

    modules = {}
    with ThreadPoolExecutor(16) as pool:
        for name, future in {name: pool.submit(one, name) for name in BUILDS}.items():
            try:
                modules[name] = future.result()
            except Exception as error:
                log.add("failure", where=f"build {name}", error=str(error)[-3000:])
    return modules


# -------------------------------------------------------------------- bits
def tensors_for(
    name: str, rows: tuple[int, ...], h: int, pad: int, row_weight: bool, offset: int
) -> dict[str, torch.Tensor]:
    program, dtypes = BUILDS[name]
    made = {}
    for operand in program.operands():
        dtype = getattr(torch, dtypes[operand.name])
        if operand.kind == "per_row":
            made[operand.name] = torch.full(rows, float("nan"), dtype=dtype, device="cuda")
            continue
        shape = (*rows, h + pad) if operand.kind == "row" or row_weight else (h + pad,)
        if operand.mode == "out":
            whole = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
        else:
            whole = torch.randn(shape, device="cuda").to(dtype)
        made[operand.name] = whole[..., offset : offset + h]
    return made


def check_bits(
    name: str, module: Any, rows: tuple[int, ...], h: int, *, plans: Sequence[Plan] = (NO_PLAN,), pad: int = 0,
    row_weight: bool = False, offset: int = 0, pdl: bool = True,
) -> dict[Plan, str]:  # fmt: skip
    """What is wrong with each plan; empty if nothing is."""
    program = BUILDS[name][0]
    tensors = tensors_for(name, rows, h, pad, row_weight, offset)
    affine = program.maps[0]
    assert isinstance(affine, Affine)
    want = rmsnorm_bits(
        tensors["x"], tensors["weight"], tensors.get("residual"), eps=1e-5,
        numerics="hf-llama" if affine.round_norm else "flashinfer", offset=affine.offset,
    )  # fmt: skip
    whole = {n: t if t._base is None else t._base for n, t in tensors.items()}
    before = {n: t.clone() for n, t in whole.items()}
    wrong = {}
    for plan in plans:
        for n, t in whole.items():
            t.copy_(before[n])
        module["force_plan"](*plan)
        try:
            module["launch"](1e-5, pdl, *tensors.values())
            torch.cuda.synchronize()
            problem = _problem(tensors, whole, before, want)
        except RuntimeError as error:
            problem = str(error)[-600:]
        module["force_plan"](*NO_PLAN)
        if problem:
            wrong[plan] = problem
    return wrong


Tensors = dict[str, torch.Tensor]


def _problem(tensors: Tensors, whole: Tensors, before: Tensors, want: Any) -> str | None:
    got = tensors["out" if "out" in tensors else "x"].cpu()
    if not torch.equal(got, want.out):
        bad = (got != want.out).nonzero()
        return f"{len(bad)} of {got.numel()} elements differ, first at {bad[0].tolist()}"
    if want.residual is not None and not torch.equal(tensors["residual"].cpu(), want.residual):
        return "the residual differs"
    if "rstd" in tensors and not torch.equal(tensors["rstd"].cpu(), want.rstd):
        return "rstd differs"
    for n, t in whole.items():
        # What lies between the rows is as it was: put the rows back, and all must be.
        after, inside = t.clone(), tensors[n]
        after.as_strided(inside.shape, inside.stride(), inside.storage_offset()).copy_(
            before[n].as_strided(inside.shape, inside.stride(), inside.storage_offset())
        )
        if not torch.equal(after.nan_to_num(), before[n].nan_to_num()):
            return f"{n}: something outside of its rows was written"
    return None


def bits(modules: dict[str, Any], log: Log) -> None:
    checked = wrong = 0

    def one(name: str, rows: tuple[int, ...], h: int, **options: Any) -> None:
        nonlocal checked, wrong
        if name not in modules:
            return
        checked += len(options.get("plans", (NO_PLAN,)))
        try:
            problems: dict[Any, str] = dict(check_bits(name, modules[name], rows, h, **options))
        except Exception as error:
            problems = {"all": f"{type(error).__name__}: {str(error)[-600:]}"}
        wrong += len(problems)
        options.pop("plans", None)
        for plan, problem in problems.items():
            log.add("failure", where="bits", problem=problem, plan=plan, name=name, rows=rows, h=h, **options)

    widths = (1, 7, 8, 9, 64, 111, 128, 136, 200, 256, 512, 576, 1000, 1024, 2048, 4096, 4100, 5120, 7168, 8192, 8200,
              16384, 20000, 24576, 32768, 65536, 100001, 131072, 262144)  # fmt: skip
    for h in widths:
        for name in BUILDS:
            one(name, (3 if h <= 65536 else 2,), h)
    # One M of every class.
    for h in (7, 128, 576, 1024, 1536, 2047, 4096):
        for m in (65, 400, 1031, 4003):
            if m * h <= 4_500_000:
                one("rms", (m,), h, pdl=m != 65)
                one("add", (m,), h)
    for h, m in ((8192, 400), (8192, 900), (8192, 3300), (16384, 900), (32768, 900)):
        one("rms", (m,), h)
    for h in (128, 576, 4096, 4100, 16384):
        for pad in (8, 4, 2, 1):
            one("rms", (5,), h, pad=pad)
            one("llama", (5,), h, pad=pad)
        one("rms", (5,), h, pad=8, offset=1)
        one("rms", (3, 5), h, pad=8, row_weight=True)
        one("save", (3, 5), h, pad=8)
    # Every plan; odd widths with rows of every alignment, in pieces and one by one.
    for h in (128, 264, 576, 1536, 4096, 7168, 8192, 16384, 30000, 65536, 131072):
        for name in ("rms", "add", "add_f32"):
            one(name, (5,), h, plans=list(plans(modules[name], name, 5, h)) if name in modules else [])
    for h in (9, 100, 1003, 2047, 4095, 4100, 7777, 9001, 20001):
        for name in ("rms", "add", "rms_f32", "llama"):
            options = {"plans": list(plans(modules[name], name, 17, h))} if name in modules else {}
            one(name, (17,), h, **options)
            one(name, (17,), h, pad=3, offset=1, **options)
    log.add("bits", checked=checked, wrong=wrong, **_extras(modules, log))
    print(f"bits: {checked} checked, {wrong} wrong", flush=True)


def _extras(modules: dict[str, Any], log: Log) -> dict[str, str]:
    """Order of dependent launches, more than 2^32 elements, broadcast and permuted rows."""
    results = {}

    def chain() -> str:
        ends = []
        for pdl in (True, False):
            torch.manual_seed(0)
            x, r = (torch.randn(40, 4096, device="cuda").bfloat16() for _ in range(2))
            w = torch.randn(4096, device="cuda").bfloat16()
            for _ in range(200):
                modules["add"]["launch"](1e-5, pdl, x, r, w)
                modules["rms"]["launch"](1e-5, pdl, x, w, x)
            ends.append((x, r))
        torch.cuda.synchronize()
        return "ok" if all(torch.equal(a, b) for a, b in zip(*ends, strict=True)) else "WRONG"

    def large() -> str:
        m, h = 530_000, 8192
        x = torch.empty(m, h, dtype=torch.bfloat16, device="cuda").fill_(1.0)
        x[-3:] = torch.randn(3, h, device="cuda")
        w = torch.randn(h, device="cuda").bfloat16()
        out = torch.zeros_like(x)
        modules["rms"]["launch"](1e-5, True, x, w, out)
        right = torch.equal(out[-3:].cpu(), rmsnorm_bits(x[-3:], w, eps=1e-5).out)
        return "ok" if right and out[: m - 3].count_nonzero().item() > 0 else "WRONG"

    def odd() -> str:
        w = torch.randn(256, device="cuda").bfloat16()
        x = torch.randn(7, 5, 256, device="cuda").bfloat16().transpose(0, 1)
        out = torch.zeros(5, 7, 256, dtype=torch.bfloat16, device="cuda")
        modules["rms"]["launch"](1e-5, True, x, w, out)
        first = torch.equal(out.cpu(), rmsnorm_bits(x, w, eps=1e-5).out)
        one = torch.randn(256, device="cuda").bfloat16().expand(9, 256)
        out = torch.zeros(9, 256, dtype=torch.bfloat16, device="cuda")
        modules["rms"]["launch"](1e-5, True, one, w, out)
        return "ok" if first and torch.equal(out.cpu(), rmsnorm_bits(one, w, eps=1e-5).out) else "WRONG"

    for test in (chain, large, odd):
        try:
            results[test.__name__] = test()
        except Exception as error:
            results[test.__name__] = f"{type(error).__name__}: {str(error)[-400:]}"
        if results[test.__name__] != "ok":
            log.add("failure", where=test.__name__, problem=results[test.__name__])
        torch.cuda.empty_cache()
    print(results, flush=True)
    return results


# -------------------------------------------------------------------- plans
def held_bytes(name: str) -> int:
    """Bytes an element takes between the two passes, when it waits in registers."""
    program, dtypes = BUILDS[name]
    load = program.load
    if isinstance(load, AddResidual):
        return 4 if not load.rounded or dtypes["residual"] == F else 2
    return 4 if dtypes["x"] == F else 2


def plans(module: Any, name: str, m: int, h: int) -> Iterator[Plan]:
    """Every plan that the tiles of the artefact allow for rows of H elements."""
    lanes = 1
    while lanes < min(-(-h // 8), 1024):
        lanes *= 2
    numbers = [int(word) for word in module["tiles"]().split()]
    for at in range(0, len(numbers), 5):
        threads, cluster, held, groups, shifted = numbers[at : at + 5]
        some_rows = threads < 128
        threads = threads or lanes // max(1, held)
        turns = -(-h // 8192)
        fits = turns <= groups < 2 * turns and held * groups * 8 * held_bytes(name) <= 256
        fits = fits or (held == 0 and turns > 1)
        if bool(shifted) != (h % 8 != 0) or threads * cluster * max(1, held) != lanes or not fits:
            continue
        for cta in (64, 128, 256) if some_rows and threads < 256 else (threads,):
            if cta % threads == 0:
                for prefetch in (True, False) if m <= 160 else (False,):
                    yield (threads, cta // threads, cluster, held, groups, prefetch)


def timed(family: str, modules: dict[str, Any], m: int, h: int, log: Log, deadline: float) -> None:
    program, dtypes = BUILDS[family]
    names = [operand.name for operand in program.operands()]
    rows = [operand.name for operand in program.operands() if operand.kind == "row"]
    size = {n: torch.finfo(getattr(torch, d)).bits // 8 for n, d in dtypes.items()}
    moved = size["weight"] * h
    moved += sum(
        size[op.name] * m * h * (2 if op.mode == "inout" else 1) for op in program.operands() if op.kind == "row"
    )
    props = torch.cuda.get_device_properties(0)
    free = torch.cuda.mem_get_info()[0] // 3
    sets = count_sets(moved, props.L2_cache_size, free)
    launches = count_launches(sets, moved)
    buffers = [
        {n: torch.randn((m, h) if n in rows else (h,), device="cuda", dtype=getattr(torch, dtypes[n])) for n in names}
        for _ in range(sets)
    ]

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
        calls = [functools.partial(module["launch"], 1e-6, pdl, *b.values()) for b in buffers]
        add(f"{plan} {pdl}", calls, variant=family, plan=plan, pdl=pdl)
        module["force_plan"](*NO_PLAN)

    if family.startswith("rms"):
        add("mul", [functools.partial(torch.mul, b["x"], 2, out=b["out"]) for b in buffers], variant="mul")
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
    print(f"{family:8}{m:7} x {h:6}  mul {us.get('mul', 0):8.3f}  picked {us.get(f'{NO_PLAN} True', 0):8.3f}"
          f"  no pdl {us.get(f'{NO_PLAN} False', 0):8.3f}  best {best}", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("bits", "plans", "all"), default="all")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--seconds", type=float, default=150.0, help="no new measurement starts after this")
    args = parser.parse_args()
    start = time.monotonic()
    log = Log(args.out)
    log.add("device", name=torch.cuda.get_device_name(), torch=torch.__version__, arch=args.arch)
    modules = build(args.arch, log)
    print(f"built {len(modules)} of {len(BUILDS)} in {time.monotonic() - start:.1f} s", flush=True)
    if args.part != "plans":
        bits(modules, log)
        print(f"{time.monotonic() - start:.1f} s", flush=True)
    if args.part != "bits":
        for family, m, h in WORK:
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
