"""What a store holds, and removing it: the part of the store that people ask for (`flashnorm cache`).

Removing is safe beside running programs. An entry goes under its builder's lock and by one rename, so nobody
sees half of it; a process that has the library loaded keeps its mapping; one that comes too late builds again.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .entry import META, read_meta, seal
from .store import exclusive

State = Literal["kept", "broken", "quarantined", "unfinished"]

_ENTRY = re.compile(r"(?P<name>.+)-(?P<digest>[0-9a-f]{32})(?:-[0-9a-f]{8})?")
_UNFINISHED = re.compile(r"(?P<digest>[0-9a-f]{32})-.+")
# A `cute` artefact's key has them inside the repr of its variant.
_DTYPES = re.compile(r"\bdtypes=\(([^)]*)\)")
_HIDDEN = re.compile(r"\bhidden_size=(\d+)")


@dataclass(frozen=True)
class Found:
    """One artefact on disk.

    Attributes:
        path: its folder.
        state: "kept" (an entry), "broken" (one that does not even name itself), "quarantined" (failed its check
            and was put aside) or "unfinished" (being built, or left by a builder that was killed).
        name, digest: of its folder.
        route, arch, dtypes, hidden_size: of its key, where it says; hidden_size None means any.
        size: bytes of its files.
        age: seconds since it was written.
    """

    path: Path
    state: State
    name: str
    digest: str
    size: int
    age: float
    route: str = ""
    arch: str = ""
    dtypes: tuple[str, ...] = ()
    hidden_size: int | None = None


@dataclass
class Cleared:
    """What a clearing did."""

    removed: list[Found] = field(default_factory=list)
    failed: list[tuple[Found, str]] = field(default_factory=list)


def inventory(root: Path) -> list[Found]:
    """Everything in one folder of entries, entries first, each kind by name. What vanishes meanwhile is left out."""
    found = [
        *(_look(path, "kept") for path in _folders(root) if not path.name.startswith(".")),
        *(_look(path, "quarantined") for path in _folders(root / ".bad")),
        *(_look(path, "unfinished") for path in _folders(root / ".tmp")),
    ]
    return [one for one in found if one is not None]


def _folders(root: Path) -> Iterator[Path]:
    try:
        yield from sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return


def _look(path: Path, state: State) -> Found | None:
    match = (_UNFINISHED if state == "unfinished" else _ENTRY).fullmatch(path.name)
    if match is None:  # nobody's but the user's: neither shown nor removed
        return None
    try:
        size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        # An entry's folder changes when it is moved, its description never.
        written = (path / META if (path / META).is_file() else path).lstat().st_mtime
    except OSError:
        return None
    meta = read_meta(path) or {}
    if state == "kept" and (not meta or meta.get("seal") != seal(meta)):
        state = "broken"
    key = meta.get("key")
    name = str(meta.get("name") or match.groupdict().get("name") or "")
    age = max(0.0, time.time() - written)
    return Found(path, state, name, match["digest"], size, age, **_facts(key if isinstance(key, dict) else {}))


def _facts(key: dict[str, Any]) -> dict[str, Any]:
    """Route, architecture, dtypes and H from a key of any route."""
    variant = str(key.get("variant", ""))
    dtypes, hidden = _DTYPES.search(variant), _HIDDEN.search(variant)
    named = key.get("dtypes") or (re.findall(r"'(\w+)'", dtypes[1]) if dtypes else ())
    processor = key.get("cpu")
    arch = key.get("arch") or (processor[0] if isinstance(processor, list) and processor else "")
    return {
        "route": str(key.get("route", "")),
        "arch": str(arch),
        "dtypes": tuple(map(str, named)),
        "hidden_size": int(hidden[1]) if hidden else None,
    }


def clear(root: Path, *, older_than: float = 0.0, quarantined_only: bool = False) -> Cleared:
    """Remove artefacts from a folder of entries that this user owns.

    Waits for builders of what it removes. Lock files go too: whoever waits for one takes a new one.

    Args:
        root: the folder.
        older_than: only what was written at least this many seconds ago.
        quarantined_only: leave the entries, and what is unfinished.
    """
    done = Cleared()
    for found in inventory(root):
        if found.age < older_than or (quarantined_only and found.state != "quarantined"):
            continue
        try:
            if _remove(root, found, older_than):
                done.removed.append(found)
        except OSError as error:
            done.failed.append((found, error.strerror or str(error)))
    return done


def _remove(root: Path, found: Found, older_than: float) -> bool:
    """Whether it was there to be removed."""
    with exclusive(root, found.digest, found.name):
        # While this waited, a builder may have published what was unfinished, or built a broken entry again.
        now = _look(found.path, found.state) if found.path.exists() else None
        if now is None or now.age < older_than:
            return False
        grave = found.path
        if found.state in ("kept", "broken"):
            (root / ".tmp").mkdir(mode=0o700, exist_ok=True)
            # Its name says whose it is: were this process killed now, the next builder of it would tidy up.
            grave = root / ".tmp" / f"{found.digest}-{secrets.token_hex(4)}"
            found.path.rename(grave)
        shutil.rmtree(grave)
        with contextlib.suppress(OSError):
            (root / ".locks" / found.digest).unlink()
    return True
