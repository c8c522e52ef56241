"""What an artefact is: a name, a key that decides its content, and how to make it.

A compiled kernel is a folder with a shared library `kernel.so` (or, where there is no linker, an
object `kernel.o`) that holds one TVM-FFI entry point, `launch`. Two kinds of facts decide what is
in it and they are kept apart:

- `key`: what the kernel is. The program, dtypes, H, tiles, architecture, CPU features, the hash of
  the kernel sources, and the versions it needs *at run time* (TVM-FFI, for `cute` the DSL).
- `toolchain`: who compiled it. Compiler, version, flags.

The cache is keyed by both, so that a change of anything misses. A folder of precompiled kernels is
keyed by `key` alone: it is there for machines that have no compiler, or another one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .env import LoadError

if TYPE_CHECKING:
    from .store import Store

FORMAT = 1
ENTRY_POINT = "launch"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def safe_name(*parts: object) -> str:
    """A readable, file-system-safe stem from parts: `safe_name("rmsnorm", "bf16", 4096)`."""
    text = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", str(part)) for part in parts)
    return text.lstrip("._-")[:120] or "kernel"


def canonical(value: Any) -> Any:
    """A key value as plain JSON data, the same for equal values in every process.

    Raises:
        TypeError: the value is not made of str, int, float, bool, None, sequences and mappings;
            pass `repr` of a dataclass instead.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)  # nan and inf have no JSON form, and repr is exact
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [canonical(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): canonical(item) for name, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
    raise TypeError(f"a key holds plain data only, not {type(value).__name__}: pass its repr")


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class ArtifactSpec:
    """One artefact: everything that decides it, and the function that makes it.

    Attributes:
        name: readable stem for files and messages (see `safe_name`).
        key: what the kernel is; plain data.
        builder: writes `kernel.so` or `kernel.o`, and whatever else, into the empty private folder
            it is given. It may leave scratch files: `keep` says what is published.
        toolchain: who compiles it; plain data, or a function that asks for it (running compilers, which a
            machine that serves precompiled kernels should not wait for). Empty: nobody here can.
        loader: turns a published folder into a callable; None for `load_launch`.
        how_to_get: the command that precompiles it, for the message when it may not be built.
        keep: glob patterns of the files that are published.
    """

    name: str
    key: Mapping[str, Any]
    builder: Callable[[Path], None] = field(repr=False)
    toolchain: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict, repr=False)
    loader: Callable[[Path], Callable[..., Any]] | None = field(default=None, repr=False)
    how_to_get: str = ""
    keep: tuple[str, ...] = ("kernel.so", "kernel.o", "*.json", "*.cu", "*.cpp", "*.ptx")

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name must match {_NAME.pattern}, got {self.name!r}")

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """`key` with what every artefact depends on, as plain JSON data."""
        return canonical({**self.key, "format": FORMAT, "platform": f"{sys.platform}-{platform.machine()}"})

    @functools.cached_property
    def made_by(self) -> dict[str, Any]:
        """`toolchain` as plain JSON data."""
        return canonical(self.toolchain() if callable(self.toolchain) else self.toolchain)

    @functools.cached_property
    def portable_digest(self) -> str:
        """Digest of the key alone: the name in a folder of precompiled kernels."""
        return _digest(self.identity)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of key and toolchain: the name in the cache."""
        return _digest([self.identity, self.made_by])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArtifactSpec) and (self.name, self.digest) == (other.name, other.digest)

    def __hash__(self) -> int:
        return hash((self.name, self.digest))

    # ---------------------------------------------------------------- having it
    def build(self, store: Store | None = None) -> Path:
        """The published folder; built now if it is not there.

        Raises:
            BuildError: it could not be built.
            MissingArtifact: it is not there and building is switched off.
        """
        return self._store(store).get(self)

    def lookup(self, store: Store | None = None) -> Path | None:
        """The published and intact folder, or None; never builds."""
        return self._store(store).lookup(self)

    def load(self, store: Store | None = None) -> Callable[..., Any]:
        """The kernel, from an artefact that is already there.

        Raises:
            MissingArtifact: it is not there.
            LoadError: it does not load.
        """
        return self._store(store).load(self, build=False)

    def build_and_load(self, store: Store | None = None) -> Callable[..., Any]:
        """The kernel `launch(*scalars, enable_pdl, *operands)`; built now if it is not there.

        Raises:
            BuildError, MissingArtifact, LoadError: as `build` and `load` say.
        """
        return self._store(store).load(self, build=True)

    def open(self, folder: Path) -> Callable[..., Any]:
        """Load a published folder.

        Raises:
            LoadError: whatever went wrong, with the file's name.
        """
        try:
            return (self.loader or load_launch)(folder)
        except LoadError:
            raise
        except Exception as error:
            raise LoadError(f"{self.name}: {folder} does not load: {type(error).__name__}: {error}") from error

    @staticmethod
    def _store(store: Store | None) -> Store:
        if store is not None:
            return store
        from .store import default_store

        return default_store()


def load_launch(folder: Path) -> Callable[..., Any]:
    """The TVM-FFI function `launch` of `folder/kernel.so`, with the library kept for the process."""
    import tvm_ffi

    library = folder / "kernel.so"
    if not library.is_file():
        raise LoadError(f"{folder} has no kernel.so")
    return tvm_ffi.load_module(str(library)).get_function(ENTRY_POINT)


@functools.cache
def preload_library(path: Path) -> None:
    """Load a library that artefacts need by its soname (the DSL's runtime, say), once, for the process."""
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise LoadError(f"{path} does not load: {error}") from error


# -------------------------------------------------------------------- sources
def _is_source(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    if any(part.startswith(".") or part == "__pycache__" for part in parts):
        return False
    return path.is_file() and not path.name.endswith(("~", ".pyc"))


@functools.cache
def _tree_hash(root: Path) -> str:
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if _is_source(p, root))
    if not files:
        raise FileNotFoundError(f"no sources in {root}")
    total = hashlib.sha256()
    for path in files:
        name = path.name if path == root else path.relative_to(root).as_posix()
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{name}\0{content}\n".encode())
    return total.hexdigest()


def source_hash(*roots: Path | str) -> str:
    """Hash of the names and contents of every file in the folders (or files), read once a process.

    It depends on nothing else: not on where the folders lie, on times or on owners.
    """
    return _digest([_tree_hash(Path(root).resolve()) for root in roots])
