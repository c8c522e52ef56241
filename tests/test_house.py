"""House rules as small checks of the source: layers, the environment, file sizes, words.

They read text and syntax trees alone, so they also hold for code that needs a GPU or a compiler to run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).parents[1]
FOLDERS = ("flashnorm", "jit", "csrc", "tests", "benchmarks", "examples", "docs", ".ci", ".github")
SOURCES = {".py", ".cuh", ".cu", ".h", ".hpp", ".cpp"}
TEXTS = SOURCES | {".md", ".toml", ".yaml", ".yml", ".sh", ""}

# Who may import whom: only what stands at a lower level, or in the same part.
LEVELS = {
    "program": 0,
    "config": 0,
    "reference": 1,
    "model": 1,
    "recipe": 1,
    "jit": 1,
    "kernels": 1,
    "backends": 2,
    "core": 3,
    "ops": 4,
    "functional": 5,
    "scales": 5,
    "api": 5,
    "ahead": 5,
    "nn": 6,
    "": 7,  # the package itself: the public names
    "cake_rmsnorm_train": 8,
    "integrations": 8,
    "__main__": 8,
    "timing": 8,
    "doctor": 9,  # the commands: __main__ finds them by name
    "verify": 9,
    "explain_cli": 9,
    "cache_cli": 9,
    "bench": 10,  # uses what verify has
    "precompile": 9,
}
# `explain` takes the arguments of the public function it is asked about, so it looks that up when called.
ALLOWED = {("flashnorm.api", "flashnorm")}


def files(suffixes: set[str]) -> list[Path]:
    """The project's own files. A search follows no links: jit and csrc are read in one place."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += (ROOT / folder).rglob("*")
    return sorted(
        path
        for path in found
        if path.suffix in suffixes
        and path.is_file()
        and not any(part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)
        and path.name != "LICENSE"
    )


def package_files() -> list[Path]:
    return [path for path in files({".py"}) if path.relative_to(ROOT).parts[0] in ("flashnorm", "jit")]


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "jit":
        parts.insert(0, "flashnorm")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(module: str) -> str:
    """flashnorm.core.op -> core; flashnorm -> ""."""
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module of flashnorm) for every import statement, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, base] if base else above)
            if base == "flashnorm":  # `from flashnorm import core` names a part or a public name
                known = {name.name: f"flashnorm.{name.name}" for name in node.names}
                yield from ((node.lineno, known[name] if name in LEVELS else "flashnorm") for name in known)
            else:
                yield node.lineno, base


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


@pytest.mark.parametrize("path", package_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    module = module_name(path)
    own = part(module)
    assert own in LEVELS, f"{own}: give it a level"
    wrong = [
        f"{where(path, line)}: {module} imports {other}"
        for line, other in imports(ast.parse(path.read_text()), module, path.name == "__init__.py")
        if other.split(".")[0] == "flashnorm" and part(other) != own and LEVELS[part(other)] >= LEVELS[own]
        if (module, other) not in ALLOWED
    ]
    assert not wrong, wrong


def reads_environment(tree: ast.AST) -> Iterator[int]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "os" and node.attr in names:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os" and names & {name.name for name in node.names}:
            yield node.lineno


def test_only_config_reads_the_environment() -> None:
    wrong = [
        where(path, line)
        for path in package_files()
        if module_name(path) != "flashnorm.config"
        for line in reads_environment(ast.parse(path.read_text()))
    ]
    assert not wrong, wrong


def test_only_the_kernels_import_the_dsl_at_import_time() -> None:
    """Importing flashnorm must not import the DSL: outside kernels/, only functions may."""
    wrong = []
    for path in package_files():
        if part(module_name(path)) == "kernels":
            continue
        for node in ast.parse(path.read_text()).body:
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [where(path, node.lineno) for name in names if name.split(".")[0] in ("cutlass", "tvm_ffi")]
    assert not wrong, wrong


def test_every_import_is_a_declared_dependency() -> None:
    """A developer's environment holds more than a user's: an import that only works there is a fault."""
    declared = re.search(
        r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL
    )
    assert declared
    names = set(re.findall(r'^ *"([\w.-]+)', declared[1], re.MULTILINE))
    distribution = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
    wrong = []
    for path in package_files():
        for line, module in imports(ast.parse(path.read_text()), module_name(path), path.name == "__init__.py"):
            top = module.split(".")[0]
            known = top == "flashnorm" or top in sys.stdlib_module_names or distribution.get(top, top) in names
            wrong += [] if known else [f"{where(path, line)}: {module}"]
    assert not wrong, wrong


@pytest.mark.parametrize("limit", [400])
def test_files_stay_short(limit: int) -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in files(SOURCES)}
    assert lengths
    long = {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > limit}
    assert not long, long


# Spelt in pieces, so that this file is not its own first finding.
WORDS = [
    r"work" + r"place",
    r"/work" + r"/",
    r"\bthis " + r"session\b",
    r"\bC" + r"EO\b",
    r"\bsub-?" + r"agent",
    r"\biss" + r"ue #?\d",
    r"shared/" + r"(contract|design|arithmetic|anchors|cases|prototype)",
    r"/(tmp|ro" + r"ot)/|/home" + r"/(?!me\b)",
    r"pypi\." + r"org|python" + r"hosted|registry\." + r"npmjs|deb\." + r"debian",
]


@pytest.mark.parametrize("pattern", WORDS)
def test_nothing_speaks_of_where_it_was_written(pattern: str) -> None:
    expression = re.compile(pattern, re.IGNORECASE if pattern.islower() else 0)
    wrong = [
        where(path, number)
        for path in files(TEXTS | {".json", ".jsonl"})
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if expression.search(line)
    ]
    assert not wrong, wrong


def test_the_checks_see_what_they_look_for() -> None:
    """A lint that finds nothing proves nothing: each is shown a fault."""
    names = {path.name for path in files(SOURCES)}
    assert {"config.py", "spec.py", "test_house.py"} <= names
    assert not any("flashnorm/jit/" in str(path) for path in files(SOURCES))
    found = dict(enumerate(imports(ast.parse("from ..core import op\nimport flashnorm"), "flashnorm.ops.x", False)))
    assert found == {0: (1, "flashnorm.core"), 1: (2, "flashnorm")}
    assert list(imports(ast.parse("from .spec import a"), "flashnorm.jit", True)) == [(1, "flashnorm.jit.spec")]
    assert list(imports(ast.parse("from flashnorm import api, rmsnorm"), "flashnorm.ops", True)) == [
        (1, "flashnorm.api"),
        (1, "flashnorm"),
    ]
    assert sorted(reads_environment(ast.parse("import os\nos.environ['A']\nfrom os import getenv"))) == [2, 3]


def test_groups_of_tests_stay_together(request: pytest.FixtureRequest) -> None:
    """Else each process makes what a group shares."""
    if request.config.getoption("loadgroup", False):
        assert "@" in request.node.nodeid
    else:
        pytest.skip("for pytest-xdist with --dist loadgroup")


def test_no_header_of_ffis_in_cpp() -> None:
    """They take 6 s of a CUDA unit's build and 4 of the guard's; `ffi/call.h` does with the C interface."""
    found = 0
    for path in files({".h", ".cuh", ".cpp", ".cu"}):
        if path.relative_to(ROOT).parts[0] == "csrc":
            for header in re.findall(r"#include <(tvm/[^>]*)>", path.read_text(encoding="utf-8")):
                assert header in ("tvm/ffi/c_api.h", "tvm/ffi/extra/c_env_api.h"), f"{path.name}: {header}"
                found += 1
    assert found == 4
