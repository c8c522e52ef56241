"""Whether precompiled kernels serve where nothing can be compiled: `python -m benchmarks.container_view`.

Fills a folder with `flashnorm precompile` for this GPU's architecture, then looks at it as a slim container would:
in processes of their own with no compiler, no ninja, no DSL, building switched off, and an empty cache.

(a) cute artefacts serve, without the DSL, with the bits of the CPU route; and how long the first call takes
(b) with the DSL's runtime library gone too, cuda artefacts serve, with one log line
(c) a variant that nobody precompiled raises, named
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
FIRST_CALL_S = 0.1  # of rmsnorm, after the import and with a CUDA context
IMPORT_S = 0.3  # of flashnorm, after torch
CUTE_RUNTIME = "libcute_dsl_runtime.so"

# What a container lacks. The DSL's packages go; the wheel that has its runtime library alone may stay. Files are hidden
# rather than removed: they belong to the environment that this runs in.
HIDE = """
import importlib.abc, importlib.metadata, pathlib, sys
GONE = ("cutlass", "nvidia_cutlass_dsl", "ninja")
PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core", "ninja")
FILES = {files!r}
class Gone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in GONE:
            raise ModuleNotFoundError("No module named %r" % name, name=name)
sys.meta_path.insert(0, Gone())
for name in [name for name in sys.modules if name.split(".")[0] in GONE]:
    del sys.modules[name]
sys.path[:] = [path for path in sys.path if "dsl_packages" not in path]
distribution, is_file = importlib.metadata.distribution, pathlib.Path.is_file
def hidden_distribution(name):
    if name in PACKAGES:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)
importlib.metadata.distribution = hidden_distribution
pathlib.Path.is_file = lambda path, **more: path.name not in FILES and is_file(path, **more)
"""
WATCH = """
import sys
started = []
sys.addaudithook(lambda event, args: started.append(str(args[0])) if event == "subprocess.Popen" else None)
"""

# (a) and (b): one call of each operator; times, bits against the CPU route's, and what was imported and started.
SERVE = """
import json, logging, sys, time
import torch
started.clear()  # importing torch starts a program of its own
x = torch.load({inputs!r}, weights_only=True)
x = {{name: t.cuda() for name, t in x.items()}}
torch.cuda.synchronize()
lines = []
class Note(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("flashnorm").addHandler(Note())
began = time.perf_counter()
import flashnorm
imported = time.perf_counter() - began
began = time.perf_counter()
y = flashnorm.rmsnorm(x["x"], x["w"])
torch.cuda.synchronize()
first = time.perf_counter() - began
a, r = x["x"].clone(), x["r"].clone()
flashnorm.fused_add_rmsnorm(a, r, x["w"])
from flashnorm.core import plan
want = torch.load({expected!r}, weights_only=True)
got = dict(y=y, a=a, r=r)
print(json.dumps(dict(
    routes=sorted({{route for route, _, _ in plan._launches}}),
    equal=all(torch.equal(got[name].cpu(), want[name]) for name in want),
    dsl=sorted(name for name in sys.modules if name.split(".")[0] == "cutlass"),
    started=started, import_s=imported, first_s=first, lines=lines)))
"""

MISSING = """
import json, torch
import flashnorm
x = torch.ones(4, 4096, dtype=torch.float16, device="cuda")
try:
    flashnorm.rmsnorm(x, x[0])
    text = ""
except RuntimeError as error:
    text = str(error)
print(json.dumps(dict(text=text)))
"""


def hidden(*, runtime: bool = False) -> str:
    """The text that makes a process blind to compilers, ninja and the DSL (`runtime`: and to its library)."""
    return HIDE.format(files={"nvcc", "ninja", *((CUTE_RUNTIME,) if runtime else ())}) + WATCH


def environment(aot: Path, cache: Path) -> dict[str, str]:
    """Of a process in such a container."""
    dropped = ("FLASHNORM_", "CUDA_HOME", "CUDA_PATH", "CXX", "CUTE_DSL_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    paths = {"PATH": "/nonexistent", "FLASHNORM_AOT_DIR": str(aot), "FLASHNORM_CACHE_DIR": str(cache)}
    # Installers compile what they install to bytecode; packages that were merely unpacked are treated alike here.
    paths["PYTHONPYCACHEPREFIX"] = str(aot.parent / "bytecode")
    return {**kept, **paths, "FLASHNORM_DISABLE_JIT": "1"}


def look(
    text: str, aot: Path, cache: Path, *, runtime_gone: bool = False, hide: bool = True, **env: str
) -> dict[str, Any]:
    """Runs a piece of Python in a container's view; it prints one line of JSON last.

    Args:
        text: the program.
        aot, cache: the folders it is given.
        runtime_gone: without the DSL's runtime library.
        hide: whether tools are hidden at all.
        env: more variables.
    """
    code = (hidden(runtime=runtime_gone) if hide else WATCH) + textwrap.dedent(text)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment(aot, cache), **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def expected(folder: Path) -> dict[str, str]:
    """Writes inputs and the CPU route's results; their paths."""
    import torch

    import flashnorm

    generator = torch.Generator().manual_seed(1)
    x, r = (torch.randn(64, 4096, generator=generator).bfloat16() for _ in range(2))
    w = torch.randn(4096, generator=generator).bfloat16()
    with flashnorm.backend("cpu"):
        y, a, s = flashnorm.rmsnorm(x, w), x.clone(), r.clone()
        flashnorm.fused_add_rmsnorm(a, s, w)
    paths = {"inputs": str(folder / "inputs.pt"), "expected": str(folder / "expected.pt")}
    torch.save({"x": x, "r": r, "w": w}, paths["inputs"])
    torch.save({"y": y, "a": a, "r": s}, paths["expected"])
    return paths


def fill(aot: Path, arch: str) -> float:
    """Precompiles; seconds it took."""
    began = time.perf_counter()
    flags = ["--arch", arch, "--ops", "rmsnorm,fused_add_rmsnorm", "--dtype", "bf16", "--hidden", "4096"]
    subprocess.run([sys.executable, "-m", "flashnorm", "precompile", *flags, "--out", str(aot)], cwd=ROOT, check=True)
    return time.perf_counter() - began


def judge(arch: str, folder: Path) -> list[tuple[str, str, str, bool]]:
    """(what, asked, got, good) for every demand."""
    aot, cache = folder / "aot", folder / "cache"
    cache.mkdir(mode=0o500)
    rows = [("precompile", "-", f"{fill(aot, arch):.1f} s", True)]
    serve = SERVE.format(**expected(folder))
    look(serve, aot, cache)  # leaves the bytecode
    a = look(serve, aot, cache)
    b = look(serve, aot, cache, runtime_gone=True)
    c = look(MISSING, aot, cache)
    rows += [
        ("(a) route", "cute", " ".join(a["routes"]), a["routes"] == ["cute"]),
        ("(a) bits of the CPU route", "equal", str(a["equal"]), a["equal"]),
        ("(a) modules of the DSL", "none", str(len(a["dsl"])), not a["dsl"]),
        ("(a) programs started", "none", " ".join(a["started"]) or "none", not a["started"]),
        ("(a) log lines", "none", "; ".join(a["lines"]) or "none", not a["lines"]),
        ("(a) first rmsnorm", f"{FIRST_CALL_S} s", f"{a['first_s']:.3f} s", a["first_s"] <= FIRST_CALL_S),
        ("(a) import after torch", f"{IMPORT_S} s", f"{a['import_s']:.3f} s", a["import_s"] <= IMPORT_S),
        ("(b) route", "cuda", " ".join(b["routes"]), b["routes"] == ["cuda"]),
        ("(b) bits of the CPU route", "equal", str(b["equal"]), b["equal"]),
        ("(b) log lines", "one", "; ".join(b["lines"]), len(b["lines"]) == 1 and "runtime library" in b["lines"][0]),
        ("(c) names the variant", "float16, 4096", c["text"][:160], "float16" in c["text"] and "4096" in c["text"]),
        ("(c) names the command", "precompile", "", f"precompile --arch {arch}" in c["text"]),
        ("cache", "empty", str(len(list(cache.iterdir()))), not any(cache.iterdir())),
    ]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90a", help="of the GPU here (default sm_90a)")
    parser.add_argument("--dry-run", action="store_true", help="precompile only: needs no GPU")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flashnorm-container-") as text:
        folder = Path(text)
        if arguments.dry_run:
            seconds = fill(folder / "aot", arguments.arch)
            expected(folder)
            print(f"precompiled {len(list((folder / 'aot').iterdir()))} artefacts in {seconds:.1f} s")
            return 0
        rows = judge(arguments.arch, folder)
    table = Table("what", "asked", "got", "")
    for what, asked, got, good in rows:
        table.add_row(what, asked, got, "ok" if good else "FAIL")
    Console(width=160).print(table)
    return 0 if all(good for *_, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
