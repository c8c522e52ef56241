"""Runs the suite in parallel shards: `python -m tests.parallel -n 14 --device cuda [pytest arguments]`.

Each shard is a pytest of its own with one thread for the CPU side: with PyTorch's default of one thread a core in each,
they spend their time waiting for each other. Compiled kernels are shared through the store. Prints what failed and one
closing line; exits 1 where anything failed, or a shard ran out of time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OUTCOMES = ("passed", "failed", "skipped", "error")


def counts(text: str) -> dict[str, int]:
    """Outcomes so far: from the closing line, or counted from -v output where a shard was cut short."""
    closing = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", text.splitlines()[-1] if text else "")
    if closing:
        return {name.rstrip("s") if name.startswith("error") else name: int(n) for n, name in closing}
    return {name: len(re.findall(rf" {name.upper()}\b", text)) for name in OUTCOMES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="shards")
    parser.add_argument("--timeout", type=float, default=None, help="seconds after which shards are stopped")
    options, rest = parser.parse_known_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    arguments = rest if any(not a.startswith("-") and Path(a).exists() for a in rest) else [*rest, "tests"]
    started, total, failed, cut = time.monotonic(), dict.fromkeys(OUTCOMES, 0), [], 0
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{i}.txt") for i in range(options.n)]
        shards = []
        for i, log in enumerate(logs):
            words = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--show-capture=no", "--warm", "0"]
            words += ["--shard", f"{i}/{options.n}", *arguments]
            shards.append(subprocess.Popen(words, stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment))
        for shard in shards:
            left = None if options.timeout is None else max(0.0, options.timeout - (time.monotonic() - started))
            try:
                shard.wait(left)
            except subprocess.TimeoutExpired:
                shard.kill()
                cut += 1
        for log in logs:
            text = log.read_text(errors="replace").rstrip()
            for name, n in counts(text).items():
                total[name] += n
            closing = re.findall(r"^(?:FAILED|ERROR) .*", text, flags=re.MULTILINE)
            # A shard that was cut short has no closing lines: the names stand in its progress.
            failed += closing or re.findall(r"^\S+::.* (?:FAILED|ERROR)\b", text, flags=re.MULTILINE)
    for line in failed:
        print(line[:300])
    print(f"{cut} of {options.n} shards were stopped; {time.monotonic() - started:.0f} s")
    print(", ".join(f"{total[name]} {name}" for name in OUTCOMES))
    return int(bool(failed or cut))


if __name__ == "__main__":
    sys.exit(main())
