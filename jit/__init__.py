"""Building, caching and loading compiled kernels (`flashnorm.jit`).

`spec.ArtifactSpec` says what an artefact is and how it is made, `store` keeps it, `toolchain` finds
compilers, `ninja` runs them. Nothing here runs a compiler, imports torch or the DSL at import.
"""

if __name__ != "flashnorm.jit":
    # The folder lies at the root of the source tree, so a Python started there would find it under
    # the wrong name, with two copies of every lock and cache in one process.
    raise ImportError(
        f"{__name__!r} is a part of flashnorm that was picked up from the source tree: import 'flashnorm.jit' instead"
    )

from .env import BuildError, JitError, LoadError, MissingArtifact
from .spec import ArtifactSpec, source_hash
from .store import Store, default_store

__all__ = [
    "ArtifactSpec",
    "BuildError",
    "JitError",
    "LoadError",
    "MissingArtifact",
    "Store",
    "default_store",
    "source_hash",
]
