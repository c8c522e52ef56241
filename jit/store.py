"""The artefact store: content-addressed, atomic, self-checking, safe between processes.

    <cache>/v1/<name>-<digest>/     an entry: kernel.so, meta.json, the generated sources
    <cache>/v1/.locks/<digest>      lock files; the kernel releases a lock when its holder dies
    <cache>/v1/.tmp/<digest>-*      being built
    <cache>/v1/.bad/                entries that failed their check, for a look

Order of looking: folders of precompiled kernels, the cache, then building. An entry becomes visible
by one rename, after everything in it was forced to the disk.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..config import Settings, settings
from .entry import ABSENT, KERNELS, cache_name, check_entry, fsync_path, fsync_tree, portable_name, write_meta
from .env import BuildError, LoadError, MissingArtifact, logger
from .folders import choose_folders, remake, user_id
from .spec import ArtifactSpec

fcntl: Any
try:
    import fcntl
except ImportError:  # no such locks on this system: publishing stays atomic, work may be done twice
    fcntl = None

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL = 1 << 16  # bytes free, below which a failing build is blamed on the disk
_QUARANTINE_SIZE = 8
_REMOVED = (FileNotFoundError, FileExistsError)  # the second: of a folder that was there, and then was not
_TRIES = 3  # at building in a folder that somebody keeps removing


class Store:
    """Keeps artefacts.

    Args:
        root: the folder of entries, owned by this user; None where nothing may be written.
        aot_dirs: folders of precompiled kernels, looked at first, never written.
        readable: more folders of cache entries, never written.
        disabled: never build.
        temporary: `root` is in a place open to all.
    """

    def __init__(
        self,
        root: Path | None,
        *,
        aot_dirs: Sequence[Path] = (),
        readable: Sequence[Path] = (),
        disabled: bool = False,
        temporary: bool = False,
    ) -> None:
        self.root = root
        self.aot_dirs = tuple(aot_dirs)
        self.readable = tuple(readable)
        self.disabled = disabled or root is None
        self.temporary = temporary
        self._loaded: dict[str, Callable[..., Any]] = {}
        self._reported: set[Path] = set()

    @classmethod
    def from_settings(cls, config: Settings) -> Store:
        """The store that the environment asks for."""
        folders = choose_folders(config)
        return cls(
            folders.root,
            aot_dirs=config.aot_dirs,
            readable=folders.readable,
            disabled=config.disable_jit,
            temporary=folders.temporary,
        )

    # ---------------------------------------------------------------- looking
    def lookup(self, spec: ArtifactSpec) -> Path | None:
        """The first intact entry, or None; changes nothing."""
        return next(self._precompiled(spec), None) or self._cached(spec)

    def _precompiled(self, spec: ArtifactSpec) -> Iterator[Path]:
        for folder in self.aot_dirs:
            path = folder / portable_name(spec)
            reason = check_entry(path, spec, portable=True)
            if reason is None:
                yield path
            elif reason is not ABSENT and path not in self._reported:
                self._reported.add(path)
                logger.warning("precompiled kernel %s is passed over: %s", path, reason)

    def _cached(self, spec: ArtifactSpec) -> Path | None:
        mine = [(self.root, user_id())] if self.root is not None else []
        for folder, owner in (*mine, *((folder, None) for folder in self.readable)):
            if check_entry(folder / cache_name(spec), spec, owner=owner) is None:
                return folder / cache_name(spec)
            if spec.made_by:
                continue
            # Nobody here can build it, so there is no toolchain to ask for: whoever built it will do.
            for path in sorted(folder.glob(f"{spec.name}-*")):
                if check_entry(path, spec, portable=True, owner=owner) is None:
                    return path
        return None

    # ---------------------------------------------------------------- loading
    def load(self, spec: ArtifactSpec, *, build: bool) -> Callable[..., Any]:
        """The kernel; each artefact is loaded once a process.

        Raises:
            BuildError: it could not be built.
            MissingArtifact: it is not there and `build` is false or building is switched off.
            LoadError: it is intact but does not load.
        """
        failure: LoadError | None = None
        if self.aot_dirs:  # first, and by the portable digest: the other one asks compilers for their versions
            known = self._loaded.get(spec.portable_digest)
            if known is not None:
                return known
            for path in self._precompiled(spec):
                try:
                    return self._loaded.setdefault(spec.portable_digest, spec.open(path))
                except LoadError as error:
                    failure = error  # made for another system: this one may still build its own
        known = self._loaded.get(spec.digest)
        if known is None:
            known = self._loaded.setdefault(spec.digest, self._load(spec, build, failure))
        return known

    def _load(self, spec: ArtifactSpec, build: bool, failure: LoadError | None) -> Callable[..., Any]:
        cached = self._cached(spec)
        if cached is None and failure is not None and (self.disabled or not build):
            raise failure
        try:
            path = cached or self._obtain(spec, build)
        except BuildError as error:
            if failure is None:
                raise
            raise LoadError(f"{failure}; and it cannot be built here: {error}") from error
        if failure is not None:
            logger.warning("a precompiled kernel of %s is passed over: %s", spec.name, failure)
        try:
            return spec.open(path)
        except LoadError:
            # Intact means that this process or system is at fault, and building again would not help.
            if check_entry(path, spec) is None or not build or self.disabled:
                raise
        return spec.open(self._build(spec))

    # ---------------------------------------------------------------- having it
    def get(self, spec: ArtifactSpec) -> Path:
        """An intact entry, built if need be.

        Raises:
            BuildError: it could not be built.
            MissingArtifact: it is not there and building is switched off.
        """
        return self.lookup(spec) or self._obtain(spec, build=True)

    def _obtain(self, spec: ArtifactSpec, build: bool) -> Path:
        if self.disabled or not build:
            raise MissingArtifact(self._missing(spec, build))
        return self._build(spec)

    def _missing(self, spec: ArtifactSpec, build: bool) -> str:
        """One line. All that makes a kernel what it is, generated sources too, is for those who debug."""
        what = ", ".join(f"{name}={value}" for name, value in spec.identity.items())
        logger.debug("the kernel %s is %s", spec.name, what)
        places = [*self.aot_dirs, *filter(None, (self.root,)), *self.readable]
        why = "FLASHNORM_DISABLE_JIT forbids building it" if build else "it has not been built"
        how = f"`{spec.how_to_get}` makes it, for FLASHNORM_AOT_DIR=DIR; " if spec.how_to_get else ""
        where = ", ".join(map(str, places)) or "any folder"
        return f"{how}the kernel {spec.name} is not in {where}, and {why}"

    def _build(self, spec: ArtifactSpec) -> Path:
        root = self.root
        assert root is not None
        for left in reversed(range(_TRIES)):
            try:
                if not root.is_dir() and (reason := remake(root, self.temporary)) is not None:
                    raise FileNotFoundError(reason)
                return self._build_in(root, spec)
            except OSError as error:
                # A cache may be removed at any time, this one's locks with it: then all begins again.
                if not left or not isinstance(error, _REMOVED):
                    raise _disk_error(root, spec, error) from error
        raise AssertionError

    def _build_in(self, root: Path, spec: ArtifactSpec) -> Path:
        final = root / cache_name(spec)
        with exclusive(root, spec.digest, spec.name) as alone:
            reason = check_entry(final, spec, owner=user_id())
            if reason is None:
                return final  # another process or thread was faster
            if reason is not ABSENT:
                logger.warning("cached kernel %s is built again: %s", final, reason)
                _quarantine(root, final)
            _publish(root, spec, final, alone)
        return final


@functools.cache
def default_store() -> Store:
    """The store of this process, made at first use."""
    return Store.from_settings(settings)


# -------------------------------------------------------------------- publishing
def _publish(root: Path, spec: ArtifactSpec, final: Path, alone: bool) -> None:
    """Build into a private folder and rename it to `final`; `alone`: the caller holds the lock."""
    nursery = root / ".tmp"
    nursery.mkdir(mode=0o700, exist_ok=True)
    if alone:  # then what lies there was left by a builder that was killed: it would hold the lock otherwise
        for left in nursery.glob(f"{spec.digest}-*"):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{spec.digest}-", dir=nursery))
    try:
        _run_builder(spec, folder)
        _prune(folder, spec.keep)
        kernels = [folder / name for name in KERNELS if (folder / name).is_file()]
        if not any(path.stat().st_size for path in kernels):
            raise BuildError(f"building {spec.name} left neither of {' or '.join(KERNELS)}")
        write_meta(folder, spec)
        fsync_tree(folder)
        _rename(root, folder, final, spec)
        fsync_path(root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_builder(spec: ArtifactSpec, folder: Path) -> None:
    logger.info("building %s", spec.name)
    try:
        spec.builder(folder)
    except Exception as error:
        if not folder.is_dir():  # whatever a compiler says of that
            raise FileNotFoundError(errno.ENOENT, "removed while a kernel was built", str(folder)) from error
        if isinstance(error, BuildError):
            # Compilers report a full disk in words of their own, or not at all.
            if shutil.disk_usage(folder).free < _FULL:
                raise BuildError(f"{spec.name} cannot be built: no space left in {folder.parent}\n{error}") from error
            raise
        if isinstance(error, OSError) and not isinstance(error, _REMOVED):
            raise
        raise BuildError(f"building {spec.name} failed: {type(error).__name__}: {error}") from error


def _prune(folder: Path, keep: Sequence[str]) -> None:
    linked = (folder / KERNELS[0]).is_file()
    for path in folder.iterdir():
        if linked and path.name in KERNELS[1:]:
            path.unlink()  # the object of a library that is there too
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.is_symlink() or not any(fnmatchcase(path.name, pattern) for pattern in keep):
            path.unlink()


def _rename(root: Path, folder: Path, final: Path, spec: ArtifactSpec) -> None:
    try:
        os.rename(folder, final)
    except OSError as error:
        # Only where the file system has no locks can somebody have published in the meantime.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        if check_entry(final, spec, owner=user_id()) is not None:
            _quarantine(root, final)
            os.rename(folder, final)


def _quarantine(root: Path, entry: Path) -> None:
    """Rename a broken entry aside. A process that has it loaded keeps its mapping; the oldest few are dropped."""
    aside = root / ".bad"
    aside.mkdir(mode=0o700, exist_ok=True)
    try:
        os.rename(entry, aside / f"{entry.name}-{secrets.token_hex(4)}")
    except FileNotFoundError:
        return
    old = sorted(aside.iterdir(), key=lambda path: path.lstat().st_mtime)
    for path in old[:-_QUARANTINE_SIZE]:
        shutil.rmtree(path, ignore_errors=True)


def _disk_error(root: Path, spec: ArtifactSpec, error: OSError) -> BuildError:
    if error.errno in _DISK_FULL:
        return BuildError(f"{spec.name} cannot be stored: no space left in {root}; nothing was published")
    return BuildError(f"{spec.name} cannot be stored in {root}: {error}")


# -------------------------------------------------------------------- locking
# Threads of this process exclude one another here; flock alone would do, but is not everywhere.
_guard = threading.Lock()
_threads: dict[Path, threading.Lock] = {}
_held: set[int] = set()


@contextlib.contextmanager
def exclusive(root: Path, digest: str, name: str) -> Iterator[bool]:
    """One builder at a time for an artefact, among threads and processes; yields whether processes are excluded."""
    path = root / ".locks" / digest
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with _guard:
        mine = _threads.setdefault(path, threading.Lock())
    with mine:
        fd, locked = _lock_file(path, name)
        _held.add(fd)
        try:
            yield locked
        finally:
            _held.discard(fd)
            _unlock(fd)


def _lock_file(path: Path, name: str) -> tuple[int, bool]:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            locked = _flock(fd, name)
            # Somebody may have removed the file while this process waited: a lock on it excludes nobody.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd, locked
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _flock(fd: int, name: str) -> bool:
    """Wait for the lock; false where there are none."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("waiting for another process that builds %s", name)
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.debug("%s: no file locks here (%s)", name, error)
        return False
    return True


def _unlock(fd: int) -> None:
    # Explicitly: closing releases the lock only once no forked child has the file open any more.
    with contextlib.suppress(OSError):
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.close(fd)


def _after_fork_in_child() -> None:
    """A forked child holds no lock: not its parent's threads' (which do not exist in it), not the files'."""
    global _guard
    _guard = threading.Lock()
    _threads.clear()
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
