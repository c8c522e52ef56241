"""Builds the kernels of a test run beforehand, in as many processes as wanted: `python -m tests.warm --jobs 16`.

Kernels of one process are compiled one after another, so a cold run on a machine with many cores
spends its time waiting for one of them. conftest starts this by itself before a large run.
Nothing is judged here; a kernel that cannot be built fails in the test that needs it, with the reason.

Where a GPU's time is short, another machine builds them: no GPU is needed to say which they are.

    python -m tests.warm --recipe FILE --arch sm_90a && flashnorm precompile --recipe FILE --out DIR
    FLASHNORM_AOT_DIR=DIR python -m pytest --warm 0 --device cuda tests        on the GPU
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import flashnorm
from flashnorm import recipe
from flashnorm.core import plan
from tests import gatecombos
from tests.combos import CHUNKED, COMBOS, LAID_OUT, fitting, some_hidden
from tests.gatekit import GateProblem
from tests.inputs import rows
from tests.problem import Problem
from tests.test_gradients import DTYPES, NORMS, SHAPES, leaves

ROOT = Path(__file__).parent.parent
BROADCAST = ("rmsnorm", "gemma_rmsnorm", "rmsnorm_quant", "gemma_rmsnorm_quant")  # take a weight for each row


def problems(device: str, place: str | None = None) -> Iterator[tuple[str, Problem | GateProblem, str]]:
    """(route, problem, out) of what the tests compile for a device, tensors in a place (default: there); the slowest
    compilations first."""
    if device == "cpu":
        yield from (("cpu", Problem(combo, (2, 128)), "none") for combo in COMBOS)
        yield from (("cpu", GateProblem(c, gatecombos.of_shape(c, 6, 128)), "none") for c in gatecombos.COMBOS)
        return
    device = place or device
    for gate in gatecombos.COMBOS:
        yield "cuda", GateProblem(gate, gatecombos.of_shape(gate, 6, 128), device), "none"
        for h in (128, 576, 1000, 3072, 4096) if gate.op not in gatecombos.DIT else ():
            yield "cute", GateProblem(gate, gatecombos.of_shape(gate, 6, h), device), "none"
    for combo in COMBOS:
        yield "cuda", Problem(combo, (2, 128), device), "none"
        for h in some_hidden(combo):
            yield "cute", Problem(combo, (2, h), device), "none"
    for combo in CHUNKED:
        yield "cute", Problem(combo, (2, 128), device), "none"
    for combo in LAID_OUT:
        for shape in ((3, 5, 128), fitting(combo, 19, 576), fitting(combo, 5, 111)):
            for layout in ("contiguous", "misaligned", "half", "transposed"):
                for out in ("none", "heads", "misaligned") if not combo.in_place and len(shape) == 3 else ("none",):
                    yield "cute", Problem(combo, shape, device, layout=layout), out
        for residual_layout in ("heads", "transposed", "misaligned") if combo.residual else ():
            yield "cute", Problem(combo, (3, 5, 128), device, residual_layout=residual_layout), "none"
        for weight_shape in ((5, 128), (3, 1, 128), (3, 5, 128)) if combo.op in BROADCAST else ():
            yield "cute", Problem(combo, (3, 5, 128), device, weight_shape=weight_shape), "none"


class _Noted(Exception):
    """A kernel has been named; nothing is to be launched."""


def kernels_for(arch: str) -> list[recipe.Kernel]:
    """What the tests compile for a GPU, found on the CPU: a plan is followed until it would ask for its kernel."""
    found: dict[recipe.Kernel, None] = {}
    for route, problem, out in problems("cuda", "cpu"):

        def note(op: Any, variant: Any, *_: Any, route: str = route) -> None:
            served = route if route in op.routes else "cuda"  # as the dispatcher answers a forced `cute`
            found[recipe.Kernel(op.name, served, arch, variant)] = None
            raise _Noted

        with mock.patch.object(plan, "_serve", note), contextlib.suppress(_Noted):
            problem.run(route, out)
    serve = plan._serve

    def noted(op: Any, variant: Any, *where: Any) -> Any:
        for route in ("cuda", "cute"):
            if route in op.routes:
                found[recipe.Kernel(op.name, route, arch, variant)] = None
        return serve(op, variant, *where)

    with mock.patch.object(plan, "_serve", noted), flashnorm.backend("torch"):
        record_gradients()
    return list(found)


def record_gradients() -> None:
    """Both directions of what is differentiable, in all dtypes, on the CPU."""
    for norm, dtypes, shape in itertools.product(NORMS.values(), DTYPES, SHAPES):
        dtype, vectors, residual = dtypes
        given = norm.tensors(shape, dtype, weight=vectors, bias=vectors, residual=residual)
        y, *h = norm(leaves(given, torch.device("cpu")))
        sums = [rows(shape, residual, "dh")] if h else []
        torch.autograd.backward((y, *h), [rows(shape, dtype, "dy"), *sums])


def build(device: str, part: int, parts: int) -> None:
    """One process's share."""
    for i, (route, problem, out) in enumerate(problems(device)):
        if i % parts == part:
            try:
                problem.run(route, out)
            except Exception as error:  # judged where it is tested
                print(f"{problem.what} on {route}: {type(error).__name__}", file=sys.stderr)


def start(device: str, jobs: int) -> None:
    """Builds everything with `jobs` processes and waits for them."""
    command = [sys.executable, "-m", "tests.warm", "--device", device]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([*command, "--part", f"{i}/{jobs}"], cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
        for i in range(jobs)
    ]
    for child in children:
        child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--part", help="i/n: build one share in this process")
    parser.add_argument("--recipe", type=Path, help="only write down which kernels a run on a GPU builds")
    parser.add_argument("--arch", default="sm_90a", help="the architecture of that GPU")
    options = parser.parse_args()
    if options.recipe:
        options.recipe.write_text(recipe.to_json(kernels_for(options.arch)), encoding="utf-8")
    elif options.part:
        part, parts = (int(n) for n in options.part.split("/"))
        build(options.device, part, parts)
    else:
        start(options.device, options.jobs)


if __name__ == "__main__":
    main()
