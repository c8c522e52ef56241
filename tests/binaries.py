"""Reading machine code: where NVIDIA's disassemblers are, and what they say of a cubin."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest


def tool(name: str) -> str:
    """cuobjdump or nvdisasm, of the system or of its wheel; skips where there is neither."""
    wheels = sorted(Path(sysconfig.get_paths()["purelib"]).glob(f"nvidia/**/bin/{name}"))
    found = shutil.which(name) or next(map(str, wheels), None)
    if found is None:
        pytest.skip(f"no {name} (its wheel is part of the test extra)")
    return found


def resources(cubin: Path) -> list[tuple[int, int, int]]:
    """(registers, stack bytes, local bytes) of each kernel."""
    command = [tool("cuobjdump"), "-res-usage", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [tuple(map(int, found)) for found in re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)]


def instructions(cubin: Path) -> set[str]:
    """The mnemonics that occur, modifiers included ("LDG.E.128")."""
    text = subprocess.run([tool("nvdisasm"), str(cubin)], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text))
