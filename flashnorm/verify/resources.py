"""What a GPU kernel takes of a multiprocessor, read from its artefact: registers, shared memory, spills, occupancy.

Needs NVIDIA's cuobjdump, of a toolkit or of its wheel. Reads files alone: no GPU, no driver.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashnorm.config import compiler_environment
from flashnorm.jit import toolchain

REGISTERS = 65536  # of a multiprocessor, from sm_75 on
GRANULE = 256  # registers are given to a warp in units of this
WARPS = {75: 32, 86: 48, 87: 48, 89: 48, 120: 48, 121: 48}  # that fit a multiprocessor; elsewhere 64
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_CUDA_MACHINE = 190  # e_machine of an ELF file for NVIDIA GPUs


@dataclass(frozen=True)
class Resources:
    """The worst of an artefact's kernels.

    Attributes:
        kernels: how many there are.
        registers: a thread.
        stack: bytes a thread, spills among them.
        shared: bytes a CTA that are declared; what a launch adds is not in the file.
        occupancy: the share of a multiprocessor's warps that registers alone leave room for.
    """

    kernels: int
    registers: int
    stack: int
    shared: int
    occupancy: float


def find_cuobjdump() -> Path | None:
    """Beside nvcc, or of its wheel."""
    nvcc = toolchain.find_nvcc()
    beside = [] if isinstance(nvcc, toolchain.Missing) else [Path(nvcc.path).with_name("cuobjdump")]
    wheels = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/**/bin/cuobjdump"))
    return next((path for path in (*beside, *wheels) if path.is_file()), None)


def of_artifact(folder: Path, sm: int) -> Resources | str:
    """The resources of the kernels in a published folder; a text where they cannot be read."""
    tool = find_cuobjdump()
    if tool is None:
        return "no cuobjdump"
    found: list[tuple[int, int, int, int]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for path in _with_kernels(folder, Path(scratch)):
            command = [str(tool), "-res-usage", str(path)]
            done = subprocess.run(command, check=False, capture_output=True, text=True, env=compiler_environment())
            found += parse(done.stdout)
    return worst(found, sm) if found else f"no kernels to read in {folder}"


def parse(text: str) -> list[tuple[int, int, int, int]]:
    """(registers, stack, shared, local) of each kernel in cuobjdump's answer; one without registers is no kernel."""
    usage = [tuple(map(int, match)) for match in _USAGE.findall(text)]
    return [(r, stack, shared, local) for r, stack, shared, local in usage if r > 0]


def worst(found: list[tuple[int, int, int, int]], sm: int) -> Resources:
    registers = max(r for r, *_ in found)
    stack = max(stack + local for _, stack, _, local in found)
    return Resources(len(found), registers, stack, max(shared for _, _, shared, _ in found), occupancy(registers, sm))


def occupancy(registers: int, sm: int) -> float:
    """The share of its warps that a multiprocessor has registers for."""
    a_warp = -(-registers * 32 // GRANULE) * GRANULE
    most = WARPS.get(sm, 64)
    return min(most, REGISTERS // a_warp) / most


def _with_kernels(folder: Path, scratch: Path) -> Iterator[Path]:
    """Files that cuobjdump reads: a library that nvcc linked, or the GPU code inside of one that the DSL made."""
    for path in sorted({*folder.glob("kernel.so"), *folder.glob("kernel.o")}):
        whole = path.read_bytes()
        inside = list(_cubins(whole))
        if not inside:
            yield path
        for i, cubin in enumerate(inside):
            target = scratch / f"{path.name}.{i}.cubin"
            target.write_bytes(cubin)
            yield target


def _cubins(whole: bytes) -> Iterator[bytes]:
    """GPU code that lies in a file as it is, each to the end of its section table."""
    at = whole.find(b"\x7fELF\x02")
    while at >= 0:
        if len(whole) - at >= 64 and struct.unpack_from("<H", whole, at + 18)[0] == _CUDA_MACHINE:
            sections = struct.unpack_from("<Q", whole, at + 40)[0]
            size, count = struct.unpack_from("<HH", whole, at + 58)
            yield whole[at : at + max(sections + size * count, _end_of_programs(whole, at))]
        at = whole.find(b"\x7fELF\x02", at + 1)


def _end_of_programs(whole: bytes, at: int) -> int:
    programs = struct.unpack_from("<Q", whole, at + 32)[0]
    size, count = struct.unpack_from("<HH", whole, at + 54)
    return int(programs + size * count)
