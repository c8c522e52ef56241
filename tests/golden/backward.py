"""Golden bits of gradients: `python -m tests.golden.backward` writes them, from the canonical model."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from tests.backward_problem import NORMS, SUMS, Problem
from tests.canonical import narrow
from tests.combos import DTYPES
from tests.golden.digests import FOLDER, digest, golden_values

FILE = FOLDER / "gradients" / "backward.json"


def problems() -> list[Problem]:
    """Two shapes of every backward, and one with weights of several rows."""
    found = []
    for turn, norm in enumerate(NORMS):
        shapes = [(((150, 384), ()), ((7, 1001), ()))[turn % 2], (((3, 9216), ()), ((300, 64), ()))[turn % 2]]
        if not norm.centred and norm.weight is not None:
            shapes.append(((40, 3, 72), (3,)))
        for shape, lead in shapes:
            given = {"dout": golden_values(shape, DTYPES[norm.dout], 11), "x": golden_values(shape, DTYPES[norm.x], 12)}
            if norm.weight is not None:
                given["weight"] = golden_values((*lead, shape[-1]), DTYPES[norm.weight], 13)
            if norm.joins:
                given["g_residual"] = golden_values(shape, DTYPES[norm.x], 14)
            found.append(Problem(norm, shape, lead, given=given))
    return found


def digests(got: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in got.items()}


def _expected(problem: Problem) -> dict[str, torch.Tensor]:
    want = problem.canonical()
    made = {name: getattr(want, name) for name in problem.norm.wanted}
    return {n: narrow(t, problem.norm.dtype(n)) if n in SUMS else t for n, t in made.items()}


def main() -> None:
    FILE.parent.mkdir(exist_ok=True)
    cases = {problem.what: digests(_expected(problem)) for problem in problems()}
    FILE.write_text(json.dumps(cases, indent=1, sort_keys=True) + "\n")
    print(f"{FILE}: {len(cases)} cases")


if __name__ == "__main__":
    main()
