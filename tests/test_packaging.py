"""What is shipped: the wheel and the sdist hold every file the package needs, and an installed wheel works.

Also a script: `python tests/test_packaging.py DIST...` checks distributions that were built elsewhere.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).parents[1]
# What stands behind the two links of the package.
LINKED = {"flashnorm/jit": "jit", "flashnorm/csrc": "csrc"}
CODE = {".py", ".cuh", ".cu", ".h", ".hpp", ".cpp"}


def wanted() -> set[str]:
    """Every file of the package, by the name it has inside it."""
    folders = {"flashnorm": ROOT / "flashnorm", **{name: ROOT / target for name, target in LINKED.items()}}
    found = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in folders.items()
        for path in folder.rglob("*")
        if path.suffix in CODE and path.is_file() and "__pycache__" not in path.parts
    }
    # rglob follows links to files and, in some Pythons, to folders: a name is what counts.
    assert {"flashnorm/__init__.py", "flashnorm/jit/__init__.py"} <= found
    assert any(name.startswith("flashnorm/csrc/") for name in found)
    return found | {"flashnorm/py.typed"}


def contents(dist: Path) -> dict[str, int]:
    """Names of the files in a wheel or sdist (without its top folder), and their sizes."""
    if dist.suffix == ".whl":
        with zipfile.ZipFile(dist) as archive:
            return {entry.filename: entry.file_size for entry in archive.infolist() if not entry.is_dir()}
    with tarfile.open(dist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members), "a link in an sdist is lost on extraction"
    return {member.name.partition("/")[2]: member.size for member in members if member.isfile()}


def faults(dist: Path) -> list[str]:
    """What is wrong with a distribution; nothing if all is well."""
    held = contents(dist)
    wrong = [f"{dist.name}: {name} is missing" for name in sorted(wanted() - held.keys())]
    wrong += [
        f"{dist.name}: {name} has nothing in it" for name, size in held.items() if name.endswith(".cuh") and not size
    ]
    licensed = any(name.rpartition("/")[2] == "LICENSE" for name in held)
    wrong += [] if licensed else [f"{dist.name}: no LICENSE"]
    if dist.suffix == ".whl":
        extra = [name for name in held if not name.startswith("flashnorm/") and ".dist-info/" not in name]
        wrong += [f"{dist.name}: {name} would be installed beside the package" for name in extra]
        wrong += [
            f"{dist.name}: {name} is a leftover" for name in held if "__pycache__" in name or name.endswith(".so")
        ]
    return wrong


def version() -> str:
    """Read, not imported: as the build reads it."""
    for node in ast.parse((ROOT / "flashnorm" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__version__":
            return str(ast.literal_eval(node.value))
    raise AssertionError("flashnorm/__init__.py has no literal __version__")


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def dists(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An sdist of a copy of the tree, and the wheel that is built from that sdist."""
    try:
        import setuptools
    except ImportError:
        pytest.skip("setuptools is not installed: pip install 'setuptools>=77'")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools.__version__} is too old for this project's pyproject.toml: 77 or newer")
    base = tmp_path_factory.mktemp("dist")
    tree, out = base / "tree", base / "out"
    skipped = shutil.ignore_patterns(".git", ".venv", "venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    tree.mkdir()
    for name in ("flashnorm", "jit", "csrc"):
        source = ROOT / name
        shutil.copytree(source, tree / name, symlinks=True, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    build = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    out.mkdir()
    sdist = out / run(sys.executable, "-c", build, "build_sdist", out, cwd=tree).stdout.split()[-1]
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(base, filter="data")
        else:
            archive.extractall(base)
    unpacked = base / sdist.name.removesuffix(".tar.gz")
    wheel = out / run(sys.executable, "-c", build, "build_wheel", out, cwd=unpacked).stdout.split()[-1]
    return {"sdist": sdist, "wheel": wheel}


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_distribution_holds_every_file(kind: str, dists: dict[str, Path]) -> None:
    assert not faults(dists[kind])
    assert f"flashnorm-{version()}" in dists[kind].name


def test_installed_wheel_works_outside_the_tree(dists: dict[str, Path], tmp_path: Path) -> None:
    """Import, a call, and the command line, with the wheel unpacked as an installer would and no tree in sight."""
    site = tmp_path / "site"
    with zipfile.ZipFile(dists["wheel"]) as archive:
        archive.extractall(site)
    (tmp_path / "elsewhere").mkdir()
    call = (
        "import flashnorm, torch, flashnorm.jit; print(flashnorm.__file__, flashnorm.jit.__file__);"
        "x = torch.randn(3, 40); assert flashnorm.rmsnorm(x, torch.ones(40)).shape == x.shape"
    )
    where, env = tmp_path / "elsewhere", {"PYTHONPATH": str(site), "FLASHNORM_CACHE_DIR": str(tmp_path / "cache")}
    done = run(sys.executable, "-c", call, cwd=where, **env)
    assert all(Path(path).is_relative_to(site) for path in done.stdout.split())
    done = run(sys.executable, "-m", "flashnorm", "doctor", cwd=where, **env)
    assert "rmsnorm" in done.stdout
    # The package's own folder is never written to.
    left = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert left == contents(dists["wheel"]).keys()


def test_entry_point_is_the_command_line(dists: dict[str, Path]) -> None:
    with zipfile.ZipFile(dists["wheel"]) as archive:
        name = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "flashnorm = flashnorm.__main__:main" in archive.read(name).decode()


def test_the_links_are_relative_links() -> None:
    """Committed as links: a checkout that replaced them by text files would build an empty package."""
    for name, target in LINKED.items():
        link = ROOT / name
        assert link.is_symlink(), f"{name} is not a link; with git on Windows set core.symlinks"
        assert os.readlink(link) == f"../{target}"
        assert link.resolve() == ROOT / target


@pytest.mark.parametrize("name", ["jit"])
def test_a_part_is_not_importable_from_the_root(name: str) -> None:
    """`import jit` in a checkout would make a second copy of every lock and cache: it must say so."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert f"flashnorm.{name}" in done.stderr


def test_import_is_light() -> None:
    """No DSL, no compiler, no CUDA: a process that imports flashnorm may still fork."""
    code = (
        "import sys, subprocess, torch; started = []; real = subprocess.Popen.__init__;"
        "subprocess.Popen.__init__ = lambda self, *a, **k: (started.append(a), real(self, *a, **k))[1];"
        "import flashnorm; assert not torch.cuda.is_initialized(); assert not started, started;"
        "heavy = {'cutlass', 'tvm_ffi', 'transformers', 'triton'} & sys.modules.keys(); assert not heavy, heavy"
    )
    run(sys.executable, "-c", code, cwd=ROOT)


def test_installed_metadata_agrees() -> None:
    from importlib import metadata

    try:
        distribution = metadata.distribution("flashnorm")
    except metadata.PackageNotFoundError:
        pytest.skip("flashnorm is not installed here (the tests run from the tree)")
    assert distribution.version == version()


if __name__ == "__main__":
    found = [fault for name in sys.argv[1:] for fault in faults(Path(name))]
    print(*found, sep="\n", end="\n" if found else "")
    print(
        f"{len(sys.argv) - 1} distributions checked, {len(found)} faults, {len(wanted())} files of the package wanted"
    )
    sys.exit(1 if found or len(sys.argv) < 2 else 0)
