"""Times gradients against other libraries: `python -m benchmarks.backward`, from the root, on the GPU.

    python -m benchmarks.backward --budget 240 --json backward.json        # everything that a bar asks for
    python -m benchmarks.backward --norms rms --peers quack --shapes 4096x2048,32768x8192
    python -m benchmarks.backward --what forward --routes cute

bf16, CUDA graphs over buffers that are cold, PDL on; `mul` is `torch.mul(x, dout, out=dx)`, which reads and writes what
a backward must. Every contender's gradients are compared with the formula in fp32 first. `compile` is torch.compile of
PyTorch's backward. Forwards: with the statistics that a backward needs, against the same norm without them, and with a
residual against `fused_add_*` in place.

The end is a table of what is asked and what was got: RMSNorm at most 0.80 of quack's time in the geometric mean and
nowhere more than it, at least 0.88 of mul's bandwidth above 200 MB; LayerNorm at most 0.9 of the better time of torch
and torch.compile; a forward with statistics at most 3 % more than without. The exit status is 1 where one is missed.
What the budget leaves out is named.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashnorm
from flashnorm.cake_rmsnorm_train import cake_rmsnorm_train_forward
from flashnorm.ops.backward import backward_workspace, layernorm_backward, rmsnorm_backward
from flashnorm.ops.layernorm import ADD_LAYERNORM, LAYERNORM

from .backward_candidates import dtypes, program
from .measure import Graph, Timing, count_launches, count_sets, time_graphs

SHAPES = ((4096, 2048), (16384, 4096), (32768, 8192), (16384, 16384), (16172, 2048), (16231, 6144), (8192, 512),
          (2048, 32768))  # fmt: skip
LAYER_SHAPES = ((4096, 4096), (16384, 7168), (8192, 768), (16384, 16384))
EPS = 1e-6
WRONG = 2e-2  # relative: no result of a correct contender in bf16 comes near
PEERS = {"rms": ("quack", "liger", "torch"), "layer": ("torch", "compile")}
FORWARDS = {"rms": ((16384, 4096), (4096, 4096), (32768, 8192)), "layer": ((16384, 4096), (4096, 4096))}
_LAYERNORM, _ADD_LAYERNORM = LAYERNORM.behind(), ADD_LAYERNORM.behind()
LARGE = 200e6  # bytes, from where the bandwidth counts


@dataclass
class Case:
    """One shape of one norm's backward or forward, and what was measured there, us by contender."""

    norm: str
    rows: int
    hidden: int
    what: str = "backward"
    us: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return 3 * 2 * self.rows * self.hidden

    def __str__(self) -> str:
        return f"{self.norm} {self.what} {self.rows}x{self.hidden}"


@dataclass
class Set:
    """The buffers of one call."""

    dout: Tensor
    x: Tensor
    weight: Tensor
    statistics: tuple[Tensor, ...]
    dx: Tensor  # of a forward, what it writes
    workspace: Tensor
    bias: Tensor


def make_set(case: Case, device: str = "cuda") -> Set:
    shape = (case.rows, case.hidden)
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
    bias = torch.randn(case.hidden, device=device).bfloat16()
    return Set(dout, x, weight, statistics, torch.empty_like(x), workspace, bias)


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


@functools.cache
def compiled(hidden: int) -> Callable[..., Any]:
    """torch.compile of PyTorch's backward of LayerNorm."""

    def backward(dout: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> Any:
        call = torch.ops.aten.native_layer_norm_backward
        return call(dout, x, [hidden], mean, rstd, weight, weight, [True, True, True])

    return torch.compile(backward, dynamic=False)


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
    if name == "compile":
        return functools.partial(compiled(case.hidden), t.dout, t.x, mean, rstd, t.weight)
    layer = torch.ops.aten.native_layer_norm_backward
    return functools.partial(layer, t.dout, t.x, [case.hidden], mean, rstd, t.weight, t.weight, [True, True, True])


def forward(case: Case, t: Set, adds: bool, saves: bool) -> Callable[[], Any]:
    """A forward: `adds` a residual, which is `dout` here, and `saves` statistics."""
    y, h, words = t.dx, torch.empty_like(t.x) if adds and saves else None, t.statistics
    if case.norm == "rms":
        if saves:
            more = {"residual": t.dout, "residual_out": h} if adds else {}
            return functools.partial(
                cake_rmsnorm_train_forward, t.x, t.weight, EPS, out=y, rstd=words[0].clone(), **more
            )
        if adds:
            return functools.partial(flashnorm.fused_add_rmsnorm, t.x, t.dout, t.weight, EPS)
        return functools.partial(flashnorm.rmsnorm, t.x, t.weight, EPS, y)
    vectors = (t.weight, t.bias)
    if saves:
        statistics = [word.clone() for word in words]
        if adds:
            call, tensors = _ADD_LAYERNORM, (t.x, t.dout, h, *vectors, y, *statistics)
            return functools.partial(call, *tensors, EPS, "cake", None)
        return functools.partial(_LAYERNORM, t.x, *vectors, y, *statistics, EPS, "flashinfer", None)
    if adds:
        return functools.partial(flashnorm.fused_add_layernorm, t.x, t.dout, *vectors, EPS)
    return functools.partial(flashnorm.layernorm, t.x, *vectors, EPS, y)


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
        self,
        name: str,
        bind: Callable[[Set], Callable[[], Any]],
        context: Callable[[], Any],
        *,
        check: Callable[[Case, Set, Any], None] | None,
    ) -> None:
        try:
            with context():
                calls = [bind(t) for t in self.sets]
                if check is not None:
                    check(self.case, self.sets[0], calls[0]())
            self.graphs[name] = Graph(calls, self.launches, context)
        except Exception as error:  # a peer that is missing or fails is reported, and passed over
            self.case.failed[name] = f"{type(error).__name__}: {str(error)[-300:]}"

    def time(self) -> dict[str, Timing]:
        return time_graphs(self.graphs, self.repeats)


def run_case(case: Case, args: argparse.Namespace) -> None:
    runner = Runner(case, args.repeats)
    runner.add("mul", lambda t: functools.partial(torch.mul, t.x, t.dout, out=t.dx), contextlib.nullcontext, check=None)
    for route in args.routes:
        forced = functools.partial(flashnorm.backend, route)
        runner.add(route, functools.partial(ours, case), forced, check=check)
    for name in PEERS[case.norm]:
        if name in args.peers:
            runner.add(name, functools.partial(peer, name, case), contextlib.nullcontext, check=check)
    case.us = {name: timing.us for name, timing in runner.time().items()}


def run_forward(case: Case, args: argparse.Namespace) -> None:
    """Names say the route, whether a residual is added, and whether statistics are saved."""
    runner = Runner(case, args.repeats)
    runner.add("mul", lambda t: functools.partial(torch.mul, t.x, t.dout, out=t.dx), contextlib.nullcontext, check=None)
    for route in args.forward_routes:
        forced = functools.partial(flashnorm.backend, route)
        for adds in (False, True):
            for saves in (False, True):
                name = f"{route}{' + residual' * adds}{', saves' * saves}"
                bind = functools.partial(forward, case, adds=adds, saves=saves)
                runner.add(name, bind, forced, check=None)
    case.us = {name: timing.us for name, timing in runner.time().items()}


def build_cuda(norms: list[str]) -> None:
    """Builds the CUDA route's backwards side by side: nvcc takes half a minute for each."""
    from flashnorm.backends.cuda import spec
    from flashnorm.core.device import facts
    from flashnorm.core.plan import target_of

    target = target_of(facts(torch.device("cuda")))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        built = [pool.submit(spec(program(norm), dtypes(norm), target).build) for norm in norms]
        for future in built:
            future.result()


# ------------------------------------------------------------------ bars
class Bar(NamedTuple):
    """What is asked, and what was got: at most `asked`, or at least."""

    what: str
    got: float
    asked: float
    least: bool = False

    @property
    def cleared(self) -> bool:
        return self.got >= self.asked if self.least else self.got <= self.asked

    def __str__(self) -> str:
        word, mark = ("at least", "at most")[not self.least], "" if self.cleared else "   MISSED"
        return f"{self.what:58} asked {word:8} {self.asked:.2f}, got {self.got:.4f}{mark}"


def bars(cases: list[Case], routes: list[str]) -> Iterator[Bar]:
    for route in routes:
        ratios = []
        for case in (c for c in cases if route in c.us):
            us, what = case.us, f"{route} {case}"
            if case.what == "forward":
                for name in (route, f"{route} + residual"):
                    if name in us and f"{name}, saves" in us:
                        yield Bar(f"{name} {case}, statistics saved / not", us[f"{name}, saves"] / us[name], 1.03)
            elif case.norm == "rms":
                if "quack" in us:
                    ratios.append(us[route] / us["quack"])
                    yield Bar(f"{what} / quack", ratios[-1], 1.0)
                if case.bytes > LARGE:
                    yield Bar(f"{what}, share of mul", us["mul"] / us[route], 0.88, least=True)
            elif peers := [us[name] for name in PEERS["layer"] if name in us]:
                yield Bar(f"{what} / best of torch and compile", us[route] / min(peers), 0.9)
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            yield Bar(f"{route} rms / quack, geometric mean of {len(ratios)}", mean, 0.80)


# ------------------------------------------------------------------ command
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--what", type=words, default=["backward", "forward"])
    parser.add_argument("--norms", type=words, default=["rms", "layer"])
    parser.add_argument("--routes", type=words, default=["cute", "cuda"])
    parser.add_argument("--forward-routes", type=words, default=["cute"], help="cuda too: eight builds of nvcc")
    parser.add_argument("--peers", type=words, default=["quack", "torch", "compile"], help="liger too")
    parser.add_argument("--shapes", type=words, help="MxH,...")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds; what does not fit is left out")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    began = time.monotonic()
    cases: list[Case] = []
    tables = {"backward": {"rms": SHAPES, "layer": LAYER_SHAPES}, "forward": FORWARDS}
    given = [tuple(map(int, shape.split("x"))) for shape in args.shapes or ()]
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if "cuda" in args.routes and "backward" in args.what:
        build_cuda(args.norms)
        print(f"[{time.monotonic() - began:5.1f} s] built")
    for what in args.what:
        for norm in args.norms:
            for rows, hidden in given or tables[what][norm]:
                case = Case(norm, rows, hidden, what)
                if time.monotonic() - began > args.budget:
                    print(f"{case}: left out, no time")
                    continue
                (run_forward if what == "forward" else run_case)(case, args)
                cases.append(case)
                mul = case.us.get("mul", math.nan)
                shown = "  ".join(f"{name} {us:.1f} ({mul / us:.3f})" for name, us in case.us.items())
                print(f"[{time.monotonic() - began:5.1f} s] {case}: {shown}", flush=True)
                for name, reason in case.failed.items():
                    print(f"    {name}: {reason}")
                if args.json:  # after every case: what ends early keeps what it has
                    args.json.write_text(json.dumps([asdict(case) for case in cases], indent=1) + "\n")
                torch.cuda.empty_cache()
    found = list(bars(cases, args.routes))
    print(*found, sep="\n")
    missed = sum(not bar.cleared for bar in found)
    failed = sum(route in case.failed for case in cases for route in args.routes)
    print(f"{len(found)} bars, {missed} missed, {failed} failures of ours")
    return 1 if missed or failed else 0


if __name__ == "__main__":
    sys.exit(main())
