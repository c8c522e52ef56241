"""Writes the golden bits: `python -m tests.golden.make`.

They come from the canonical model, not from a route, and change only where the arithmetic does.
"""

from __future__ import annotations

import json
from collections import defaultdict

from tests.golden.digests import FOLDER, family, golden_digests, golden_problems


def main() -> None:
    found: defaultdict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    for problem in golden_problems():
        found[family(problem.combo)][problem.what] = golden_digests(problem.canonical(), problem.combo)
    for name, cases in found.items():
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(cases, indent=1, sort_keys=True) + "\n")
        print(f"{path}: {len(cases)} cases")


if __name__ == "__main__":
    main()
