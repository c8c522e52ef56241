"""What the tests of precompiled kernels share: the command, a variant by name, who can build what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashnorm.core import commands
from flashnorm.jit import toolchain
from flashnorm.jit.link import find_linker
from flashnorm.program import Variant

ROOT = Path(__file__).parents[1]
HAVE = {
    "cute": bool(toolchain.find_dsl()) and bool(find_linker()),
    "cuda": bool(toolchain.find_nvcc()) and bool(toolchain.find_host_compiler()),
}
needs_dsl = pytest.mark.skipif(not HAVE["cute"], reason="no CuTe DSL or no linker here")
needs_nvcc = pytest.mark.skipif(not HAVE["cuda"], reason="no nvcc here")
needs_cxx = pytest.mark.skipif(
    not toolchain.find_host_compiler() or toolchain.detect_cpu().reason_unserved() is not None,
    reason="no C++ compiler here, or no processor for it",
)


def precompile(*flags: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, the JSON summary, standard error) of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "flashnorm", "precompile", "--json", *flags],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def variant(
    op: str = "rmsnorm", dtype: torch.dtype = torch.bfloat16, hidden: int = 4096, numerics: str = "flashinfer"
) -> Variant:
    """The kernel variant of a plain call."""
    return commands.plain_variant(commands.operators()[op], dtype, hidden, {"numerics": numerics})


@pytest.fixture(name="cache")
def cache_fixture(tmp_path):
    """Where a container cannot write. Root can, so it is looked whether anything came."""
    place = tmp_path / "cache"
    place.mkdir(mode=0o500)
    yield place
    assert not any(place.iterdir())
