"""Folders of precompiled kernels: what FLASHNORM_AOT_DIR serves from.

Such a folder holds the same entries as the cache, under names that do not depend on who compiled
them (`ArtifactSpec.portable_digest`), so a machine without a compiler finds them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ..config import Settings, settings
from .entry import check_entry, fsync_tree, portable_name
from .env import BuildError
from .spec import ArtifactSpec
from .store import Store, default_store
from .toolchain import job_count


def export(spec: ArtifactSpec, out: Path, store: Store | None = None) -> Path:
    """Build an artefact, or take it from the cache, and copy it into `out`.

    An intact entry of the same toolchain that is already there is kept. The copy appears at once or not at all.

    Returns:
        The entry in `out`.

    Raises:
        BuildError: it cannot be built, or `out` cannot be written.
        MissingArtifact: it is not there and building is switched off.
    """
    final = out / portable_name(spec)
    if check_entry(final, spec) is None:
        return final
    source = (store or default_store()).get(spec)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=out, ignore_cleanup_errors=True) as scratch:
            copy = Path(scratch) / final.name
            shutil.copytree(source, copy)
            # Readable by whoever serves from the folder, unlike the cache.
            for path in (copy, *copy.iterdir()):
                path.chmod(0o755 if path.is_dir() else 0o644)
            fsync_tree(copy)
            if final.exists():
                shutil.rmtree(final)
            os.rename(copy, final)
    except OSError as error:
        if check_entry(final, spec, portable=True) is None:
            return final  # another process exported the same entry in the meantime
        raise BuildError(f"{spec.name} cannot be written to {out}: {error}") from error
    return final


def export_all(
    specs: Iterable[ArtifactSpec],
    out: Path,
    *,
    store: Store | None = None,
    config: Settings = settings,
    progress: Callable[[ArtifactSpec, Path | Exception], None] | None = None,
) -> dict[ArtifactSpec, Path | Exception]:
    """`export` many, side by side; a failure is noted beside its spec and stops nothing else.

    Args:
        specs: the artefacts; equal ones are built once.
        out: the folder.
        progress: called once for each as it ends, from the calling thread.
    """
    results: dict[ArtifactSpec, Path | Exception] = {}
    with ThreadPoolExecutor(job_count(config)) as pool:
        futures = {pool.submit(export, spec, out, store): spec for spec in dict.fromkeys(specs)}
        for future in as_completed(futures):
            spec = futures[future]
            failure = future.exception()
            if failure is not None and not isinstance(failure, Exception):
                raise failure
            results[spec] = failure if failure is not None else future.result()
            if progress is not None:
                progress(spec, results[spec])
    return results
