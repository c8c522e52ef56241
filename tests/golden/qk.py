"""Golden bits of Q, K and V: `python -m tests.golden.qk` writes them, from the canonical model."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tests.combos import DTYPES
from tests.golden.digests import FOLDER, digest, golden_values, integers
from tests.qk import CASES, PARTS, USUAL, Case, Problem

FILE = FOLDER / "turned" / "qk.json"
ROWS = 11  # of a table
# As video models have them, on a corner of a grid, and heads that no group of 8 fills.
VIDEO = replace(USUAL, heads=(12, 12, 12), head_dim=128, channels=(44, 42, 42), grid=(2, 1, 2))
ODD = replace(USUAL, heads=(5, 1, 2), head_dim=66, channels=(22, 22, 22), interleave=False)


@functools.cache
def problems() -> tuple[Problem, ...]:
    return tuple(map(_problem, (*CASES, VIDEO, replace(VIDEO, coded=True), replace(VIDEO, scope="head"), ODD)))


def _problem(case: Case) -> Problem:
    lead = (1, case.sequence)
    given = {"qkv": golden_values((*lead, case.width), DTYPES[case.x], 21)}
    for i, (name, dtype) in enumerate((("q_weight", case.q_weight), ("k_weight", case.k_weight))):
        if dtype is not None:
            given[name] = golden_values((case.heads[i], case.head_dim), DTYPES[dtype], 22 + i)
    if case.rotary:
        given["cos_sin_cache"] = golden_values((ROWS, case.rotary), torch.float32, 24)
        chosen = (integers(case.sequence, 25) % np.uint64(ROWS)).astype(np.int64).reshape(lead)
        given["positions"] = torch.from_numpy(chosen).to(DTYPES[case.index])
    return Problem(case, lead, given=given)


def digests(made: Sequence[torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in zip(PARTS, made, strict=True)}


@functools.cache
def on_file() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return found


def main() -> None:
    FILE.parent.mkdir(exist_ok=True)
    cases = {problem.what: digests(problem.expected()) for problem in problems()}
    FILE.write_text(json.dumps(cases, indent=1, sort_keys=True) + "\n")
    print(f"{FILE}: {len(cases)} cases")


if __name__ == "__main__":
    main()
