"""Builds the kernels of a test run beforehand, in as many processes as wanted: `python -m tests.warm --jobs 16`.

Kernels of one process are compiled one after another, so a cold run on a machine with many cores
spends its time waiting for one of them. conftest starts this by itself before a large run.
Nothing is judged here; a kernel that cannot be built fails in the test that needs it, with the reason.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests import gatecombos
from tests.combos import CHUNKED, COMBOS, LAID_OUT, fitting, some_hidden
from tests.gatekit import GateProblem
from tests.problem import Problem

ROOT = Path(__file__).parent.parent
BROADCAST = ("rmsnorm", "gemma_rmsnorm", "rmsnorm_quant", "gemma_rmsnorm_quant")  # take a weight for each row


def problems(device: str) -> Iterator[tuple[str, Problem | GateProblem, str]]:
    """(route, problem, out) of what the tests compile; the slowest compilations first."""
    if device == "cpu":
        yield from (("cpu", Problem(combo, (2, 128)), "none") for combo in COMBOS)
        yield from (("cpu", GateProblem(c, gatecombos.of_shape(c, 6, 128)), "none") for c in gatecombos.COMBOS)
        return
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
    options = parser.parse_args()
    if options.part:
        part, parts = (int(n) for n in options.part.split("/"))
        build(options.device, part, parts)
    else:
        start(options.device, options.jobs)


if __name__ == "__main__":
    main()
