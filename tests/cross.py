"""AArch64 without such a machine: the cross compiler and the user-mode emulator, where they are installed."""

from __future__ import annotations

import shutil

import pytest

COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")  # Debian's qemu-user-static, and its qemu-user
# A machine of Armv8-A alone, so that nothing newer gets in unseen.
CPU = "cortex-a72"


def lacking() -> list[str]:
    """What is not installed, by the name of a program."""
    found = [] if shutil.which(COMPILER) else [COMPILER]
    return found if any(map(shutil.which, EMULATORS)) else [*found, " or ".join(EMULATORS)]


def need(config: pytest.Config) -> None:
    """Skips where AArch64 cannot be tried, or fails there under --need-aarch64."""
    missing = lacking()
    if missing and config.getoption("--need-aarch64"):
        pytest.fail(f"--need-aarch64: {', '.join(missing)} is not installed", pytrace=False)
    if missing:
        pytest.skip(f"AArch64 needs {' and '.join(missing)}")


def emulator() -> list[str]:
    """The command that a static AArch64 program is run under."""
    return [next(filter(None, map(shutil.which, EMULATORS))), "-cpu", CPU]
