"""One stored artefact on disk: its file list with hashes, and checking it.

An entry is a folder of plain files. `meta.json` says in readable form what it is (name, key,
toolchain) and lists every file with size and sha256; it is sealed with a hash of its own content.
An entry is used only if all of that holds, so one that is cut short, altered, or put there by
somebody else is as good as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from .spec import ArtifactSpec, canonical

META = "meta.json"
KERNELS = ("kernel.so", "kernel.o")
ABSENT = "it is not there"


def cache_name(spec: ArtifactSpec) -> str:
    """An entry's folder name in the cache."""
    return f"{spec.name}-{spec.digest}"


def portable_name(spec: ArtifactSpec) -> str:
    """An entry's folder name among precompiled kernels."""
    return f"{spec.name}-{spec.portable_digest}"


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()


def seal(meta: dict[str, Any]) -> str:
    rest = {name: value for name, value in meta.items() if name != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_meta(folder: Path, spec: ArtifactSpec) -> None:
    """Describe the files in `folder`, all of them plain, as an entry of `spec`."""
    files = {p.name: {"sha256": _sha256(p), "size": p.stat().st_size} for p in sorted(folder.iterdir())}
    meta: dict[str, Any] = {"name": spec.name, "key": spec.identity, "toolchain": spec.made_by, "files": files}
    meta["seal"] = seal(meta)
    (folder / META).write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def check_entry(folder: Path, spec: ArtifactSpec, *, portable: bool = False, owner: int | None = None) -> str | None:
    """Why `folder` cannot be used for `spec`, or None where it is intact; reads every byte of it.

    Args:
        folder: the entry.
        spec: what it should be.
        portable: accept any toolchain.
        owner: the user id that must own folder and files, or None for anybody.

    Returns:
        `ABSENT` where there is no such folder, another text where it is broken.
    """
    try:
        return _check(folder, spec, portable, owner)
    except FileNotFoundError as error:
        return ABSENT if not folder.exists() else f"{error.filename} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # A damaged meta.json fails in many ways, and all of them mean the same.
        return f"it cannot be read ({type(error).__name__}: {error})"


def _strange(path: Path, owner: int | None) -> str | None:
    info = path.lstat()
    if not stat.S_ISREG(info.st_mode):
        return f"{path.name} is no plain file"
    if owner is not None and info.st_uid != owner:
        return f"{path.name} belongs to user {info.st_uid}"
    return None


def _check(folder: Path, spec: ArtifactSpec, portable: bool, owner: int | None) -> str | None:
    if owner is not None and folder.stat().st_uid != owner:
        return f"it belongs to user {folder.stat().st_uid}"
    strange = _strange(folder / META, owner)
    if strange:
        return strange
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    if meta["seal"] != seal(meta):
        return f"its {META} was altered"
    if meta["name"] != spec.name or meta["key"] != spec.identity:
        return "it is another artefact"
    if not portable and meta["toolchain"] != spec.made_by:
        return "another toolchain built it"
    if not any(name in meta["files"] for name in KERNELS):
        return "it holds no kernel"
    for name, facts in meta["files"].items():
        if name != os.path.basename(name):
            return f"it names a file outside of itself: {name}"
        path = folder / name
        strange = _strange(path, owner)
        if strange:
            return strange
        if path.stat().st_size != facts["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {facts['size']}"
        if _sha256(path) != facts["sha256"]:
            return f"{name} was altered"
    return None


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What an entry says of itself, for people to read (`flashnorm cache`); None where it says nothing."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return canonical(meta) if isinstance(meta, dict) else None


def fsync_path(path: Path) -> None:
    """Force a file or a folder to the disk; a file system that cannot is left alone."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (22, 38, 95):  # EINVAL, ENOSYS, EOPNOTSUPP: some network and user-space file systems
            raise
    finally:
        os.close(fd)


def fsync_tree(folder: Path) -> None:
    """Force an entry to the disk: its files, then the folder that names them."""
    for path in folder.iterdir():
        fsync_path(path)
    fsync_path(folder)
