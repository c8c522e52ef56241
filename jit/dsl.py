"""What is known of the CuTe DSL without importing it.

Importing the DSL takes seconds, loads MLIR, and can fail in any way a native library can; asking
whether it is there must do none of that. So its version comes from the installed metadata and its
architectures from the syntax tree of its own enumeration. A package that merely calls itself
`cutlass` is not the DSL.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..config import Settings, settings
from .arch import Arch, parse_arch
from .env import Missing

DISTRIBUTION = "nvidia-cutlass-dsl"
PARTS = (DISTRIBUTION, f"{DISTRIBUTION}-libs-core", f"{DISTRIBUTION}-libs-base")  # the first only requires the others
RUNTIME_LIBRARY = "libcute_dsl_runtime.so"

MINIMUM_VERSION = (4, 6)
KNOWN_GOOD = frozenset({(4, 8, 1)})

# Versions that build wrong or slow code without an error: prefix -> what they do.
_FAULTY = {
    (4, 5): "drops predicated copies in some kernels",
    (4, 7, 0): "splits 16-bit vector stores into scalar ones",
}

# Architectures that the enumeration names but only a build of the DSL against a newer CUDA compiles.
_NEEDS_TOOLKIT = {107: 13}


@dataclass(frozen=True)
class Dsl:
    """An installed CuTe DSL.

    Attributes:
        version: as installed, "4.8.1".
        archs: the architectures it can compile for, "sm_80" ... "sm_121f".
        toolkit: major version of the CUDA it was built against, 12 or 13; 0 where that is not to be seen.
        runtime: the library that its compiled kernels need, or None.
    """

    version: str
    archs: frozenset[str]
    toolkit: int = 0
    runtime: Path | None = None

    @property
    def known_good(self) -> bool:
        """Whether this very version has been tested."""
        return parse_version(self.version) in KNOWN_GOOD

    def reason_untargeted(self, arch: str | Arch) -> str | None:
        """Why it cannot compile for an architecture, or None where it can."""
        want = parse_arch(arch) if isinstance(arch, str) else arch
        if want.name in self.archs:
            return None
        build = f" (built against CUDA {self.toolkit})" if self.toolkit else ""
        return f"{DISTRIBUTION} {self.version}{build} cannot target {want}"


def parse_version(text: str) -> tuple[int, ...]:
    """(4, 8, 1) from "4.8.1" or "4.8.1.dev0": the release numbers."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def reason_version_refused(version: str) -> str | None:
    """Why a version of the DSL is not used, or None; pure."""
    numbers = parse_version(version)
    for prefix, fault in _FAULTY.items():
        if numbers[: len(prefix)] == prefix:
            return f"{DISTRIBUTION} {version} {fault}"
    if numbers < MINIMUM_VERSION:
        return f"{DISTRIBUTION} {version} is older than {'.'.join(map(str, MINIMUM_VERSION))}"
    return None


def read_archs(source: str) -> frozenset[str]:
    """The names `sm_...` that the class `Arch` in a piece of Python source assigns.

    Raises:
        SyntaxError: it is not Python.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.ClassDef) and node.name == "Arch"):
            continue
        for line in node.body:
            targets = line.targets if isinstance(line, ast.Assign) else ()
            names |= {t.id for t in targets if isinstance(t, ast.Name) and t.id.startswith("sm_")}
    return frozenset(names)


def served_archs(named: Iterable[str], toolkit: int) -> frozenset[str]:
    """The architectures that a build of the DSL against CUDA `toolkit` (0: unknown) can compile for; pure."""
    return frozenset(
        name for name in named if toolkit == 0 or toolkit >= _NEEDS_TOOLKIT.get(parse_arch(name).number, 0)
    )


def _package_root() -> Path | Missing:
    """The DSL's package folder, and that `import cutlass` would find it and not a namesake."""
    try:
        spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    except (ImportError, ValueError) as error:
        return Missing(f"{DISTRIBUTION} is installed but cannot be found: {error}")
    if spec is None or not spec.submodule_search_locations:
        return Missing(f"{DISTRIBUTION} is installed without its package")
    root = Path(next(iter(spec.submodule_search_locations)))
    try:
        module = importlib.util.find_spec("cutlass")
    except (ImportError, ValueError) as error:
        return Missing(f"{DISTRIBUTION} is installed but its module cutlass cannot be found: {error}")
    if module is None or module.origin is None:
        return Missing(f"{DISTRIBUTION} is installed but its module cutlass is not on the path")
    if not Path(module.origin).resolve().is_relative_to(root.resolve()):
        return Missing(f"another package called cutlass ({module.origin}) hides the one of {DISTRIBUTION}")
    return root


def _installed_archs(root: Path) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for name in ("enums.py", "arch.py"):
        for path in sorted(root.glob(f"*/cutlass/base_dsl/{name}")):
            try:
                found |= read_archs(path.read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError):
                continue
    return found


def _toolkits(root: Path) -> list[int]:
    """CUDA major versions the installed builds are for, newest first."""
    matches = (re.fullmatch(r"cu(\d+)", folder.name) for folder in root.iterdir() if folder.is_dir())
    return sorted((int(match.group(1)) for match in matches if match), reverse=True)


def _driver_major() -> int | None:
    """CUDA major version of the driver, or None. Asking for it does not initialise CUDA."""
    try:
        version = ctypes.c_int(0)
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000
    except (OSError, AttributeError):
        pass
    return None


def pick_toolkit(installed: Iterable[int], driver_major: int | None) -> int:
    """The build that the DSL will choose: the newest that the driver serves; without a driver the newest."""
    usable = [major for major in installed if driver_major is None or major <= driver_major]
    return max(usable, default=0)


def _version_of(*parts: str) -> str | Missing:
    for part in parts:
        try:
            return importlib.metadata.version(part)
        except importlib.metadata.PackageNotFoundError:
            continue
        except Exception as error:  # broken metadata of any kind is "not there", never a crash
            return Missing(f"{part} has unreadable metadata: {error}")
    return Missing(f"{DISTRIBUTION} is not installed")


@functools.cache
def find_dsl(config: Settings = settings) -> Dsl | Missing:
    """The installed DSL, or why there is none that can be used."""
    version = _version_of(*PARTS)
    if isinstance(version, Missing):
        return version
    refused = reason_version_refused(version)
    if refused:
        return Missing(refused)
    root = _package_root()
    if isinstance(root, Missing):
        return root
    archs = _installed_archs(root)
    if not archs:
        return Missing(f"{DISTRIBUTION} {version} does not say which architectures it targets")
    installed = _toolkits(root)
    # The driver is asked only where there is a choice.
    toolkit = pick_toolkit(installed, _driver_major() if len(installed) > 1 else None)
    return Dsl(version, served_archs(archs, toolkit), toolkit, _runtime(root, toolkit, config))


@dataclass(frozen=True)
class Runtime:
    """The library that kernels of the DSL need when they run; it may be here without the DSL.

    Attributes:
        path: the file.
        version: of the DSL it belongs to, or None where the user named the file.
    """

    path: Path
    version: str | None


@functools.cache
def find_runtime(config: Settings = settings) -> Runtime | Missing:
    """The DSL's runtime library by its files alone: named in CUTE_DSL_LIBS, or where the wheels put it."""
    for folder in dict.fromkeys(sys.path):
        root = Path(folder) / "nvidia_cutlass_dsl"
        if not root.is_dir():
            continue
        installed = _toolkits(root)
        toolkit = pick_toolkit(installed, _driver_major() if len(installed) > 1 else None)
        found = _runtime(root, toolkit, config)
        if found is not None and found.is_relative_to(root):
            version = _version_of(f"{DISTRIBUTION}-libs-cu{toolkit}", *PARTS)
            return Runtime(found, None if isinstance(version, Missing) else version)
    named = _runtime(Path("."), 0, config)
    if named is not None:
        return Runtime(named, None)
    return Missing(f"the runtime library of {DISTRIBUTION} ({RUNTIME_LIBRARY}) is not installed")


def _runtime(root: Path, toolkit: int, config: Settings) -> Path | None:
    named = [path for path in config.cute_dsl_libs if path.name == RUNTIME_LIBRARY]
    placed = [root / f"cu{toolkit}" / "lib" / RUNTIME_LIBRARY, root / "lib" / RUNTIME_LIBRARY]
    return next((path for path in (*named, *placed) if path.is_file()), None)
