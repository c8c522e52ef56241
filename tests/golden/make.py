"""Writes the golden bits: `python -m tests.golden.make`.

They come from the canonical model, not from a route, and change only where the arithmetic does.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.combos import COMBOS
from tests.test_bits import GOLDEN, golden_digests, golden_problem, golden_shapes


def main() -> None:
    found = {}
    for combo in COMBOS:
        for shape in golden_shapes(combo):
            problem = golden_problem(combo, shape, "cpu")
            found[problem.what] = golden_digests(problem.canonical(), combo)
    path = Path(GOLDEN)
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{path}: {len(found)} cases")


if __name__ == "__main__":
    main()
