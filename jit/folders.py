"""Where compiled kernels are kept.

The folder holds code that is loaded into the process, so nobody else may be able to put some there:
it is created 0700 and used only where this user owns it. Where no such folder can be had (no home,
a read-only one, somebody else's), kernels go to a private temporary folder, with one warning.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import stat
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from ..config import Settings
from .spec import FORMAT

LAYOUT = f"v{FORMAT}"


@dataclass(frozen=True)
class Folders:
    """The folders of a process.

    Attributes:
        root: where entries are looked up and published, or None where nothing may be built.
        readable: more folders of cache entries, which cannot be written.
        temporary: whether `root` is a temporary one.
    """

    root: Path | None
    readable: tuple[Path, ...] = ()
    temporary: bool = False


def user_id() -> int | None:
    """This user, or None on a system without user ids."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def _reason_untrusted(folder: Path, owners: tuple[int, ...]) -> str | None:
    owner = folder.stat().st_uid
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if user_id() is not None and owner not in owners:
        return f"{folder} belongs to another user ({owner})"
    return None


def prepare(folder: Path) -> str | None:
    """Make `folder` and the layout folder in it; return why it cannot hold a cache, or None.

    The folder may be the system's (a volume that root mounted for this user), for it was named on
    purpose; the layout folder in it is this user's and closed to all others.
    """
    return _prepare(folder / LAYOUT)


def remake(root: Path, temporary: bool) -> str | None:
    """Make a layout folder again that somebody removed while this process uses it; return why that fails, or None.

    As `choose_folders` made it, with all its questions: in a place open to all, somebody else may have been faster.
    """
    if temporary and not _is_private(root.parent):
        return f"{root.parent} is not this user's alone"
    return _prepare(root)


def _prepare(root: Path) -> str | None:
    mine, folder = user_id() or 0, root.parent
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = _reason_untrusted(folder, (mine, 0))
        if reason:
            return reason
        root.mkdir(mode=0o700, exist_ok=True)
        reason = _reason_untrusted(root, (mine,))
        if reason:
            return reason
        if stat.S_IMODE(root.stat().st_mode) & 0o077:
            root.chmod(0o700)
        # Permission bits do not tell of a read-only file system, or of a full quota of files: try.
        os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=root))
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror or error})"
    return None


def _readable_layout(folder: Path) -> Path | None:
    """The layout folder of a cache that cannot be written (an image with a warm cache) but can be trusted."""
    root = folder / LAYOUT
    try:
        return root if _reason_untrusted(root, (user_id() or 0, 0)) is None else None
    except OSError:
        return None


def choose_folders(config: Settings) -> Folders:
    """The folders for these settings: FLASHNORM_CACHE_DIR, else the platform's, else a temporary one.

    With building switched off nothing is created.
    """
    wanted = config.cache_dir or config.platform_cache_dir
    if config.disable_jit:
        existing = _readable_layout(wanted) if wanted is not None else None
        return Folders(None, (existing,) if existing is not None else ())
    if wanted is None:
        reason, readable = "there is no home folder", None
    else:
        wanted = Path(os.path.abspath(wanted))
        failed = prepare(wanted)
        if failed is None:
            return Folders(wanted / LAYOUT)
        reason, readable = failed, _readable_layout(wanted)
    root = _temporary_root()
    warnings.warn(
        f"flashnorm keeps compiled kernels in {root}, because {reason}; "
        "set FLASHNORM_CACHE_DIR to a folder of your own",
        RuntimeWarning,
        stacklevel=2,
    )
    return Folders(root, (readable,) if readable is not None else (), temporary=True)


@functools.cache
def _temporary_root() -> Path:
    """A layout folder in the system's temporary folder: one a user, so that processes share it, else one a process."""
    shared = Path(tempfile.gettempdir()) / f"flashnorm-{user_id() if user_id() is not None else 'user'}"
    if _is_private(shared) and prepare(shared) is None:
        return shared / LAYOUT
    own = Path(tempfile.mkdtemp(prefix="flashnorm-"))
    atexit.register(_remove, own, os.getpid())
    root = own / LAYOUT
    root.mkdir(mode=0o700)
    return root


def _is_private(folder: Path) -> bool:
    """Whether a folder in a place open to all is this user's alone, or not there yet and then made."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:
        return False
    info = folder.lstat()  # a link could lead anywhere
    mine = user_id()
    return stat.S_ISDIR(info.st_mode) and (mine is None or info.st_uid == mine) and not info.st_mode & 0o022


def _remove(folder: Path, made_by: int) -> None:
    if os.getpid() == made_by:  # a forked child runs its parent's exit handlers
        shutil.rmtree(folder, ignore_errors=True)
