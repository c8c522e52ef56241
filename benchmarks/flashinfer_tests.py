"""FlashInfer's public tests of its norms, unchanged, on flashnorm: what passes, and every difference with its reason.

    python -m benchmarks.flashinfer_tests CHECKOUT            on the first GPU
    python -m benchmarks.flashinfer_tests CHECKOUT --cpu      on the CPU route, under the name of CUDA
    python -m benchmarks.flashinfer_tests CHECKOUT --markdown FILE --jobs 8

CHECKOUT is a checkout of FlashInfer, of which `tests/utils/test_norm*.py`, `tests/norm/`, the norms of `tests/trace/`
and the Python helpers of `flashinfer_plugin.py` are read. FlashInfer need not be installed. Tests hear of a Blackwell
GPU (`--capability`), since they skip on others what flashnorm serves everywhere.

Ends with 1 where a test fails for another reason than those that are listed here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("tests/utils/test_norm*.py", "tests/norm/test_*.py", "tests/trace/test_*norm*_reference_correctness.py")

# (test, what its failure says, why): differences that are meant.
NOT_RAISED = "DID NOT RAISE"
TEXT = "Regex pattern did not match"
DIFFERENCES = (
    (
        r"fused_matches_separate|separate",
        "cannot import name '.*fp4_quantize'",
        "compares with FlashInfer's FP4 quantiser, no norm",
    ),
    ("without_fp8", "FLASHINFER_CSRC_DIR", "compiles FlashInfer's own sources"),
    ("y_out_.*_raises", "^ValueError: .*y_out must", "refused with ValueError, in place of AssertionError"),
    ("layernorm_quant_invalid_inputs", NOT_RAISED, "served: fp16 rows, and strided ones"),
    ("fp8_block_quant_rejects", NOT_RAISED, "served: every hidden size that is a multiple of 128"),
    ("fused_dit.*wrong_hidden_dim", NOT_RAISED, "served: every hidden size"),
    ("fused_dit.*contiguous_gate", NOT_RAISED, "served: modulation of every row stride"),
    ("error_non_cuda", NOT_RAISED, "served: CPU tensors"),
    ("error_wrong_dtype", NOT_RAISED, "served: fp16"),
    ("qk_rmsnorm_rope.*bad_head_dim", NOT_RAISED, "served: every even head size to 512"),
    ("silu.*c48_nvfp4", NOT_RAISED, "served: every multiple of 16"),
    ("cake.*argument_validation", NOT_RAISED, "served: fp32, mixed dtypes, every hidden size, CPU tensors"),
    ("qk_rmsnorm_rope.*14B", "XPASS", "served: 40 heads"),
    ("fused_dit.*(wrong_dtype|both_nvfp4|wrong_shape)", TEXT, "refused with ValueError, in other words"),
    ("silu.*block_scale_wrong", TEXT, "refused with ValueError, in other words"),
)


@dataclass
class File:
    """What became of one file's tests."""

    path: str
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # of differences and skips
    unexpected: list[str] = field(default_factory=list)


def files(checkout: Path) -> list[Path]:
    """The test files of a checkout that ask for norms; what renormalises probabilities is none."""
    return sorted(path for pattern in PATTERNS for path in checkout.glob(pattern) if "renorm" not in path.name)


def run_pytest(checkout: Path, options: argparse.Namespace, report: Path, which: Sequence[Path]) -> None:
    """Runs the files with the plugin, in processes of their own; what they print goes by."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--noconftest", "-c", os.devnull]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.flashinfer_plugin", f"--rootdir={checkout}"]
    command += [f"--fi-checkout={checkout}", f"--fi-every={options.every}", f"--fi-capability={options.capability}"]
    command += ["--fi-on-cpu"] if options.cpu else []
    # All of a file in one process: one of Cake's tests judges what the others of its file found.
    command += ["-n", str(options.jobs), "--dist", options.dist] if options.jobs > 1 else []
    command += ["-k", options.k] if options.k else []
    command += [f"--junitxml={report}", "--color=no", "-W", "ignore", *map(str, which)]
    places = [str(ROOT), str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, cwd=checkout, env=environment, check=False)


def read(report: Path) -> list[File]:
    """The files in a report of pytest's, failures told from differences that are meant."""
    found: dict[str, File] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = (case.get("classname") or case.get("name") or "").split(".Test")[0]
        file = found.setdefault(module, File(module.replace(".", "/") + ".py"))
        name = case.get("name") or ""
        failure = next((child for child in case if child.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        if failure is not None:
            said = f"{failure.get('message') or ''}\n{failure.text or ''}"
            reason = next(
                (
                    why
                    for test, says, why in DIFFERENCES
                    if re.search(test, f"{module}::{name}") and re.search(says, said)
                ),
                None,
            )
            file.outcomes["differs" if reason else "failed"] += 1
            if reason:
                file.reasons[reason] += 1
            else:
                file.unexpected.append(f"{name}: {(failure.get('message') or said).strip().splitlines()[0][:300]}")
        elif skipped is not None:
            file.outcomes["skipped"] += 1
            file.reasons[f"skipped: {(skipped.get('message') or '').strip()}"] += 1
        else:
            file.outcomes["passed"] += 1
    return [found[name] for name in sorted(found)]


def table(found: Iterable[File]) -> str:
    """The files as a Markdown table, the reasons below it."""
    lines = ["| file | passed | differs, as meant | failed | skipped |", "|---|---|---|---|---|"]
    found = list(found)
    for file in found:
        lines.append(f"| `{file.path}` | " + " | ".join(str(file.outcomes[k]) for k in COLUMNS) + " |")
    total = sum((file.outcomes for file in found), Counter())
    lines.append("| all | " + " | ".join(str(total[k]) for k in COLUMNS) + " |")
    for file in found:
        for reason, count in file.reasons.most_common():
            lines.append(f"\n- `{Path(file.path).name}`, {count}: {reason}")
        lines += [f"\n- FAILED `{Path(file.path).name}` {text}" for text in file.unexpected]
    return "\n".join(lines) + "\n"


COLUMNS = ("passed", "differs", "failed", "skipped")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 where every difference is one that is meant."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flashinfer_tests", description=__doc__.split("\n\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--cpu", action="store_true", help="on the CPU route: what goes to CUDA is put on the CPU")
    parser.add_argument("--capability", default="10.0", help="what tests hear of the GPU; empty: the truth")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one in N of the cases of each test")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (pytest-xdist)")
    parser.add_argument("--dist", default="loadfile", help="how they share the tests (default: by file)")
    parser.add_argument("--files", default="", metavar="TEXT", help="only files with this in their path")
    parser.add_argument("-k", default="", help="pytest's expression for names of tests")
    parser.add_argument("--markdown", type=Path, help="also write the table there")
    options = parser.parse_args(arguments)
    checkout = options.checkout.resolve()
    which = [path for path in files(checkout) if options.files in str(path.relative_to(checkout))]
    if not which:
        print(f"{checkout} has none of {', '.join(PATTERNS)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        run_pytest(checkout, options, report, which)
        if not report.is_file():
            return 2
        found = read(report)
    text = table(found)
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    return 1 if any(file.unexpected for file in found) else 0


if __name__ == "__main__":
    sys.exit(main())
