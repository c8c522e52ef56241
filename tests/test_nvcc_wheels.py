"""The CUDA route built by a toolkit made of pip wheels alone (the extra `nvcc`), with the system's own hidden.

pip install --no-deps --target DIR nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl
pytest tests/test_nvcc_wheels.py --nvcc-wheels DIR
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashnorm.backends import cuda
from flashnorm.config import Settings, compiler_environment, settings
from flashnorm.jit import folders, toolchain
from flashnorm.jit.store import Store
from flashnorm.program import Affine, Cast, LoadRow, Rms, RowProgram
from tests import binaries

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]

PROGRAM = RowProgram(LoadRow(), Rms(), (Affine(),), Cast())
DTYPES = ("bfloat16",) * 3
SYSTEM = Path("/usr/local/cuda")


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Path:
    """The folder that holds the wheels: the one named, or one that this Python imports from."""
    named = request.config.getoption("--nvcc-wheels")
    for folder in [named] if named else sys.path:
        if any((Path(folder) / "nvidia").glob("cu[0-9]*/bin/nvcc")):
            return Path(folder).resolve()
    if named:
        pytest.fail(f"--nvcc-wheels: {named} holds no nvidia/cu*/bin/nvcc", pytrace=False)
    pytest.skip("the wheels of the extra nvcc are not installed, and --nvcc-wheels names no folder")


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> str:
    """A search path without nvcc, for this process and the compilers it starts; returns it."""
    path = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "nvcc").exists()
    )
    monkeypatch.setenv("PATH", path)
    for name in ("CUDA_HOME", "CUDA_PATH", "FLASHNORM_NVCC"):
        monkeypatch.delenv(name, raising=False)
    assert shutil.which("nvcc") is None
    real = toolchain.nvcc_candidates
    monkeypatch.setattr(
        toolchain,
        "nvcc_candidates",
        lambda config, sites: [(by, tool) for by, tool in real(config, sites) if tool != SYSTEM / "bin" / "nvcc"],
    )
    return path


def built(config: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The rms unit for sm_90a, compiled and linked by what these settings find."""
    monkeypatch.setattr(cuda, "settings", config)
    root = tmp_path / "cache"
    assert folders.prepare(root) is None
    folder = cuda.spec(PROGRAM, DTYPES, "sm_90a").build(Store(root / folders.LAYOUT))
    import tvm_ffi

    # It holds code for the architecture, and loads where there is no driver.
    listing = subprocess.run(
        [binaries.tool("cuobjdump"), "--list-elf", folder / "kernel.so"], capture_output=True, text=True, check=True
    )
    assert "sm_90a" in re.findall(r"\.(sm_\w+)\.cubin", listing.stdout)  # beside nvcc's empty stub of the link
    assert tvm_ffi.load_module(str(folder / "kernel.so")).get_function("launch") is not None
    return folder


def read_files(nvcc: toolchain.Nvcc, source: Path) -> set[Path]:
    """Every header that the unit reads, as nvcc itself lists them."""
    host, ffi = toolchain.find_host_compiler(), toolchain.find_tvm_ffi()
    target = nvcc.target("sm_90a")
    assert host and ffi and target
    includes = [f"-I{cuda.CSRC}", *(f"-isystem={path}" for path in ffi.include_dirs)]
    command = [nvcc.path, *toolchain.nvcc_flags(nvcc, target, host), *includes, "-M", source]
    listing = subprocess.run(command, capture_output=True, text=True, check=True, env=compiler_environment()).stdout
    # make's syntax: a blank inside a name is escaped
    names = re.split(r"(?<!\\)\s+", listing.replace("\\\n", " ").partition(":")[2].strip())
    return {Path(name.replace("\\ ", " ")).resolve() for name in names}


def test_wheels_alone(site: Path, hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    config = dataclasses.replace(settings, path=hidden, cuda_home=(), nvcc=None)
    toolchain.find_nvcc.cache_clear()
    try:
        nvcc = toolchain.find_nvcc(config)
        assert nvcc, nvcc
        assert nvcc.found_by == "wheel nvidia-cuda-nvcc" and nvcc.path.is_relative_to(site)
        folder = built(config, tmp_path, monkeypatch)
    finally:
        toolchain.find_nvcc.cache_clear()
    headers = read_files(nvcc, folder / "kernel.cu")
    tree = nvcc.path.resolve().parent.parent
    assert any(path.is_relative_to(tree / "include") for path in headers)
    strangers = {p for p in headers if p.is_relative_to(SYSTEM.resolve())} if SYSTEM.exists() else set()
    assert not strangers


def test_cuda_home_that_is_a_tree_of_wheels(
    site: Path, hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_HOME with an empty part in front, a blank inside and a slash behind; the compiler runs from there."""
    tree = next((site / "nvidia").glob("cu[0-9]*"))
    home = tmp_path / "a cuda"
    same_disk = tree.stat().st_dev == tmp_path.stat().st_dev
    shutil.copytree(tree, home, copy_function=os.link if same_disk else shutil.copy2)
    config = Settings.from_env({"CUDA_HOME": f":{home}/", "PATH": hidden})
    nvcc = toolchain.find_nvcc(config)
    assert nvcc, nvcc
    assert nvcc.found_by == "CUDA_HOME" and nvcc.path == home / "bin" / "nvcc"
    built(config, tmp_path, monkeypatch)
