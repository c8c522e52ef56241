"""GPU architectures as names and numbers; pure tables, nothing is looked up on this machine.

A name is "sm_" + major + minor + suffix, as NVIDIA writes it: (9, 0) is "sm_90a", (12, 1) "sm_121a".
From 9.0 on a device has features that only the "a" target of exactly its own capability offers, so
that is the one to compile for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .env import Missing

_ARCH = re.compile(r"(?:sm_|compute_)?(\d{2,3})([af]?)|(\d{1,2})\.(\d)([af]?)")

# The first nvcc that knows a suffix, for the bases where its list of bases does not tell.
_A_SUFFIX_SINCE = {90: (12, 0)}
_F_SUFFIX_SINCE = (12, 9)


@dataclass(frozen=True, order=True)
class Arch:
    """An architecture: 10 * major + minor, and "", "a" (this device alone) or "f" (its family)."""

    number: int
    suffix: str = ""

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(self.number, 10)

    @property
    def name(self) -> str:
        return f"sm_{self.number}{self.suffix}"

    def __str__(self) -> str:
        return self.name


def parse_arch(text: str) -> Arch:
    """An architecture as people write it: "sm_90a", "compute_90", "90a", "9.0a".

    Raises:
        ValueError: it is none of these.
    """
    match = _ARCH.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"an architecture looks like 'sm_90a' or '9.0', got {text!r}")
    number, suffix, major, minor, dotted_suffix = match.groups()
    if number is not None:
        return Arch(int(number), suffix)
    return Arch(10 * int(major) + int(minor), dotted_suffix)


def device_arch(major: int, minor: int) -> Arch:
    """The target for a device: (8, 9) is sm_89, (9, 0) sm_90a, (10, 7) sm_107a."""
    return Arch(10 * major + minor, "a" if major >= 9 else "")


@dataclass(frozen=True)
class CudaTarget:
    """How nvcc is told to compile for an architecture.

    Attributes:
        arch: what was asked for.
        compiled_for: what the code is compiled for: "sm_90a", or "compute_103" for PTX that the
            driver translates when it is loaded.
        flags: the -gencode flags.
    """

    arch: str
    compiled_for: str
    flags: tuple[str, ...]

    @property
    def is_ptx(self) -> bool:
        return self.compiled_for.startswith("compute_")


def cuda_target(arch: str | Arch, listed: Iterable[int], version: tuple[int, ...]) -> CudaTarget | Missing:
    """Flags for an architecture, given the base architectures that an nvcc lists.

    An architecture that is not listed gets PTX of the highest listed base below it. PTX of an "a"
    or "f" target would be refused by other devices, hence a base one.

    Args:
        arch: the architecture, e.g. "sm_107a".
        listed: numbers that `nvcc --list-gpu-arch` prints: 75, 80, ..., 121.
        version: the version of nvcc, (13, 0, 88).
    """
    want = parse_arch(arch) if isinstance(arch, str) else arch
    known = sorted(set(listed))
    if want.number in known:
        name = f"{want.number}{want.suffix if _knows_suffix(want, version) else ''}"
        return CudaTarget(want.name, f"sm_{name}", (f"-gencode=arch=compute_{name},code=sm_{name}",))
    below = [number for number in known if number < want.number]
    if not below:
        least = f"sm_{known[0]}" if known else "none"
        return Missing(f"nvcc {'.'.join(map(str, version))} cannot target {want}: the lowest it lists is {least}")
    name = f"compute_{below[-1]}"
    return CudaTarget(want.name, name, (f"-gencode=arch={name},code={name}",))


def _knows_suffix(arch: Arch, version: tuple[int, ...]) -> bool:
    if arch.suffix == "a":
        return arch.number >= 90 and version >= _A_SUFFIX_SINCE.get(arch.number, ())
    return arch.suffix == "f" and arch.number >= 100 and version >= _F_SUFFIX_SINCE
