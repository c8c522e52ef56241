"""Times gradients against other libraries: `python -m benchmarks.backward`, from the root, on the GPU.

    python -m benchmarks.backward                                  # both norms, routes cute and cuda, all peers
    python -m benchmarks.backward --norms rms --peers quack --shapes 4096x2048,32768x8192
    python -m benchmarks.backward --plans --norms rms --budget 200 # the CUDA route's tiles and stages, the chosen first

bf16, CUDA graphs over buffers that are cold, PDL on; `mul` is `torch.mul(x, dout, out=dx)`, which reads and writes what
a backward must. Every contender's gradients are compared with the formula in fp32 first. The end says which bars are
missed: RMSNorm at most 0.80 of quack's time in the geometric mean and nowhere more than it, at least 0.88 of mul's
bandwidth above 200 MB; LayerNorm at most 0.9 of torch's time. The exit status is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashnorm
from flashnorm.ops.backward import backward_workspace, layernorm_backward, rmsnorm_backward
from flashnorm.program import BackwardProgram

from .measure import Graph, Timing, count_launches, count_sets, time_graphs

SHAPES = ((4096, 2048), (16384, 4096), (32768, 8192), (16384, 16384), (16172, 2048), (16231, 6144), (8192, 512),
          (2048, 32768))  # fmt: skip
LAYER_SHAPES = ((4096, 4096), (16384, 7168), (8192, 768), (16384, 16384))
EPS = 1e-6
WRONG = 2e-2  # relative: no result of a correct contender in bf16 comes near
PEERS = {"rms": ("quack", "liger", "torch"), "layer": ("torch",)}
LARGE = 200e6  # bytes, from where the bandwidth counts


@dataclass
class Case:
    """One shape of one norm, and what was measured there, us by contender."""

    norm: str
    rows: int
    hidden: int
    us: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return 3 * 2 * self.rows * self.hidden


@dataclass
class Set:
    """The buffers of one call."""

    dout: Tensor
    x: Tensor
    weight: Tensor
    statistics: tuple[Tensor, ...]
    dx: Tensor
    workspace: Tensor


def make_set(case: Case) -> Set:
    shape, device = (case.rows, case.hidden), torch.device("cuda")
    x, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = (torch.rand(case.hidden, device=device) + 0.5).bfloat16()
    h = x.float()
    if case.norm == "rms":
        statistics: tuple[Tensor, ...] = (torch.rsqrt(h.square().mean(-1) + EPS),)
    else:
        mean = h.mean(-1)
        rstd = torch.rsqrt((h - mean[:, None]).square().mean(-1) + EPS)
        statistics = (mean, torch.zeros_like(mean), rstd)
    workspace = backward_workspace(1, case.hidden, device, sums=2)
    return Set(dout, x, weight, statistics, torch.empty_like(x), workspace)


# ------------------------------------------------------------------ contenders
def ours(case: Case, t: Set) -> Callable[[], Any]:
    wanted: dict[str, Any] = {"dx": t.dx, "dweight": torch.bfloat16}
    if case.norm == "rms":
        return functools.partial(
            rmsnorm_backward, t.dout, t.x, t.weight, *t.statistics, wanted=wanted, workspace=t.workspace
        )
    wanted["dbias"] = torch.bfloat16
    return functools.partial(
        layernorm_backward, t.dout, t.x, t.weight, *t.statistics, wanted=wanted, workspace=t.workspace
    )


def peer(name: str, case: Case, t: Set) -> Callable[[], Any]:
    if name == "quack":
        from quack.rmsnorm import rmsnorm_bwd

        return functools.partial(rmsnorm_bwd, t.x, t.weight, t.dout, t.statistics[-1])
    if name == "liger":
        from liger_kernel.ops.rms_norm import rms_norm_backward
        from liger_kernel.ops.utils import calculate_settings

        block, warps = calculate_settings(case.hidden)
        mode = (0.0, 1, block, warps, False, None)  # offset, gemma, ..., not in place, no row mode
        return functools.partial(rms_norm_backward, t.dout, t.x, t.weight, t.statistics[-1], *mode)
    if case.norm == "rms":
        rstd = t.statistics[-1].unsqueeze(-1)
        call = torch.ops.aten._fused_rms_norm_backward
        return functools.partial(call, t.dout, t.x, [case.hidden], rstd, t.weight, [True, True])
    mean, rstd = t.statistics[0].unsqueeze(-1), t.statistics[-1].unsqueeze(-1)
    layer = torch.ops.aten.native_layer_norm_backward
    return functools.partial(layer, t.dout, t.x, [case.hidden], mean, rstd, t.weight, t.weight, [True, True, True])


def gradients_of(result: Any) -> tuple[Tensor, Tensor]:
    """dx and dweight of any contender."""
    return (result["dx"], result["dweight"]) if isinstance(result, dict) else (result[0], result[1])


def check(case: Case, t: Set, result: Any) -> None:
    """Raises where a result is not the formula's; the first 512 rows of dx, and dweight."""
    h, dy = t.x.float(), t.dout.float()
    if case.norm == "layer":
        h = h - t.statistics[0][:, None]
    n = h * t.statistics[-1][:, None]
    dweight = (dy * n).sum(0)
    n, gw = n[:512], dy[:512] * t.weight.float()
    centred = gw - gw.mean(-1, keepdim=True) if case.norm == "layer" else gw
    dx = t.statistics[-1][:512, None] * (centred - n * (gw * n).mean(-1, keepdim=True))
    for got, want in zip(gradients_of(result), (dx, dweight), strict=True):
        apart = float((got[: want.shape[0]].float() - want).norm() / want.norm())
        if not apart <= WRONG:
            raise RuntimeError(f"off by {apart:.1e}")


# ------------------------------------------------------------------ measuring
class Runner:
    """Graphs of all contenders of a case over the same sets."""

    def __init__(self, case: Case, repeats: int):
        self.case, self.repeats = case, repeats
        free = torch.cuda.mem_get_info()[0]
        count = count_sets(case.bytes, torch.cuda.get_device_properties(0).L2_cache_size, free // 4)
        self.sets = [make_set(case) for _ in range(count)]
        self.launches = count_launches(count, case.bytes)
        self.graphs: dict[str, Graph] = {}

    def add(
        self, name: str, bind: Callable[[Set], Callable[[], Any]], context: Callable[[], Any], *, mul: bool
    ) -> None:
        try:
            with context():
                calls = [bind(t) for t in self.sets]
                if not mul:
                    check(self.case, self.sets[0], calls[0]())
            self.graphs[name] = Graph(calls, self.launches, context)
        except Exception as error:  # a peer that is missing or fails is reported, and passed over
            self.case.failed[name] = f"{type(error).__name__}: {str(error)[-300:]}"

    def time(self) -> dict[str, Timing]:
        return time_graphs(self.graphs, self.repeats)


def run_case(case: Case, args: argparse.Namespace) -> None:
    runner = Runner(case, args.repeats)
    runner.add("mul", lambda t: functools.partial(torch.mul, t.x, t.dout, out=t.dx), contextlib.nullcontext, mul=True)
    for route in args.routes:
        forced = functools.partial(flashnorm.backend, route)
        runner.add(route, functools.partial(ours, case), forced, mul=False)
    for name in PEERS[case.norm]:
        if name in args.peers:
            runner.add(name, functools.partial(peer, name, case), contextlib.nullcontext, mul=False)
    case.us = {name: timing.us for name, timing in runner.time().items()}


# ------------------------------------------------------------------ the CUDA route's plans
PLANS = {  # by the most elements of a row: threads, rows, cluster, lanes, groups
    512: ((32, 8, 1, 2, 1),), 1024: ((32, 8, 1, 4, 1),), 2048: ((128, 4, 1, 2, 1),), 4096: ((256, 2, 1, 2, 1),),
    8192: ((256, 1, 1, 4, 1), (512, 1, 1, 2, 1)), 16384: ((512, 1, 1, 2, 2), (512, 1, 2, 1, 4)),
    32768: ((512, 1, 2, 1, 4),),
}  # fmt: skip


def run_plans(case: Case, args: argparse.Namespace, deadline: float) -> None:
    """The chosen plan, others with every number of stages, and rows and sums apart."""
    import tvm_ffi

    from flashnorm.backends.cuda import spec
    from flashnorm.core.device import facts
    from flashnorm.core.plan import target_of

    layer = case.norm == "layer"
    program = BackwardProgram("layer", dbias=True) if layer else BackwardProgram("rms")
    dtypes = tuple("float32" if o.dtypes == ("float32",) else "bfloat16" for o in program.operands())
    target = target_of(facts(torch.device("cuda")))
    module: Any = tvm_ffi.load_module(str(spec(program, dtypes, target, ("FLASHNORM_TUNING",)).build() / "kernel.so"))
    runner = Runner(case, args.repeats)
    runner.add("mul", lambda t: functools.partial(torch.mul, t.x, t.dout, out=t.dx), contextlib.nullcontext, mul=True)

    def bind(plan: tuple[int, ...], stages: int, apart: bool, t: Set) -> Callable[[], Any]:
        made = {"dx": t.dx, "dweight": torch.empty_like(t.weight), "dbias": torch.empty_like(t.weight)}
        named = {"dout": t.dout, "x": t.x, "weight": t.weight, "rstd": t.statistics[-1], "workspace": t.workspace}
        named |= made | ({"mean": t.statistics[0], "rest": t.statistics[1]} if layer else {})
        tensors = [named[o.name] for o in program.operands()]

        def call() -> dict[str, Tensor]:
            module["force_streams"](*plan, stages, apart)
            module["launch"](True, *tensors)
            return made

        return call

    own = (0, 0, 0, 0, 0)
    most = next((size for size in PLANS if case.hidden <= size), 0)
    tries = [(own, 0, False), *((p, s, False) for p in PLANS.get(most, ()) for s in (1, 2, 3, 4)), (own, 0, True)]
    for plan, stages, apart in tries:
        if time.monotonic() > deadline:
            break
        name = "apart" if apart else f"{plan} x{stages}" if stages else "chosen"
        runner.add(name, functools.partial(bind, plan, stages, apart), contextlib.nullcontext, mul=False)
    case.us = {name: timing.us for name, timing in runner.time().items()}


# ------------------------------------------------------------------ report
def missed(cases: list[Case], routes: list[str]) -> Iterator[str]:
    for route in routes:
        ratios = []
        for case in (c for c in cases if route in c.us):
            what, us = f"{route} {case.norm} {case.rows}x{case.hidden}", case.us[route]
            if case.norm == "rms" and "quack" in case.us:
                ratios.append(us / case.us["quack"])
                if ratios[-1] > 1.0:
                    yield f"{what}: {ratios[-1]:.3f} of quack's time, asked <= 1"
            if case.norm == "rms" and case.bytes > LARGE and case.us["mul"] / us < 0.88:
                yield f"{what}: {case.us['mul'] / us:.3f} of mul, asked >= 0.88"
            if case.norm == "layer" and "torch" in case.us and us / case.us["torch"] > 0.9:
                yield f"{what}: {us / case.us['torch']:.3f} of torch's time, asked <= 0.9"
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{route}: geometric mean {mean:.3f} of quack's time over {len(ratios)} shapes")
            if mean > 0.80:
                yield f"{route}: geometric mean {mean:.3f} of quack's time, asked <= 0.80"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--norms", type=words, default=["rms", "layer"])
    parser.add_argument("--routes", type=words, default=["cute", "cuda"])
    parser.add_argument("--peers", type=words, default=["quack", "liger", "torch"])
    parser.add_argument("--shapes", type=words, help="MxH,...")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--plans", action="store_true", help="the CUDA route's plans in place of the contenders")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds; what does not fit is left out")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    deadline = time.monotonic() + args.budget
    cases: list[Case] = []
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for norm in args.norms:
        given = [tuple(map(int, shape.split("x"))) for shape in args.shapes or ()]
        for rows, hidden in given or (SHAPES if norm == "rms" else LAYER_SHAPES):
            if time.monotonic() > deadline:
                print(f"{norm} {rows}x{hidden}: left out, no time")
                continue
            case = Case(norm, rows, hidden)
            run_plans(case, args, deadline) if args.plans else run_case(case, args)
            cases.append(case)
            shown = "  ".join(f"{name} {us:.1f} ({case.us['mul'] / us:.2f})" for name, us in case.us.items())
            print(f"{norm} {rows}x{hidden}: {shown}", flush=True)
            for name, reason in case.failed.items():
                print(f"    {name}: {reason}")
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps([asdict(case) for case in cases], indent=1) + "\n")
    faults = [] if args.plans else list(missed(cases, args.routes))
    for fault in faults:
        print("missed:", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
