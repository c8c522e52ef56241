"""What the tests of the artefact store share: a fake kernel that counts its builds, and a cache of its own."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from flashnorm.jit import folders
from flashnorm.jit.spec import ArtifactSpec
from flashnorm.jit.store import Store

needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")


class Builder:
    """Writes a fake kernel and notes each call in a file, so that other processes' builds count too."""

    def __init__(self, log: Path, content: bytes = b"\x7fELF kernel", seconds: float = 0.0) -> None:
        self.log, self.content, self.seconds = log, content, seconds

    def __call__(self, folder: Path) -> None:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        assert list(folder.iterdir()) == []
        time.sleep(self.seconds)
        (folder / "kernel.so").write_bytes(self.content)
        (folder / "unit.cpp").write_text("// source\n")
        (folder / "scratch.o").write_bytes(b"x")
        (folder / "kernel.o").write_bytes(b"what kernel.so was linked from")
        (folder / "sub").mkdir()

    @property
    def calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def load_fake(folder: Path):
    content = (folder / "kernel.so").read_bytes()
    return lambda: content


@pytest.fixture(name="builder")
def builder_fixture(tmp_path):
    return Builder(tmp_path / "log")


@pytest.fixture(name="cache")
def cache_fixture(tmp_path):
    root = tmp_path / "cache dir"
    assert folders.prepare(root) is None
    return Store(root / folders.LAYOUT)


def fake_spec(builder, key=None, **more):
    return ArtifactSpec("rmsnorm-bf16", key or {"program": "P()", "eps": 1e-6}, builder, loader=load_fake, **more)


def flip(path: Path, position: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
