"""Settings: everything flashnorm takes from the environment, read once.

This is the only module that looks at environment variables. `settings` is made at import, so that
a variable set later changes nothing and two calls of a process never disagree; a test makes its
own with `Settings.from_env({...})`, which is pure.

| variable | meaning |
|---|---|
| `FLASHNORM_BACKEND` | force a route: cute, cuda, cpu or torch (an unknown name raises at the first call) |
| `FLASHINFER_USE_CUDA_NORM=1` | prefer the CUDA C++ route on CUDA tensors |
| `FLASHNORM_STRICT=1` | raise where a failing variant would fall back to the next route |
| `FLASHNORM_GUARD=1` | guard mode: look at what goes into every call and what comes out (`flashnorm.core.guard_mode`) |
| `FLASHNORM_CACHE_DIR` | where compiled kernels are kept |
| `FLASHNORM_AOT_DIR` | precompiled kernels, read only, looked at first (several: separated by ":") |
| `FLASHNORM_DISABLE_JIT=1` | never compile; say what is missing |
| `FLASHNORM_CUDA_ARCH` | compile for this architecture ("sm_90a", "9.0a") instead of the device's |
| `FLASHNORM_NVCC`, `CUDA_HOME`, `CUDA_PATH`, `PATH` | where nvcc is looked for, in this order |
| `CXX`, `PATH` | the host compiler (arguments allowed: "ccache g++") |
| `FLASHNORM_MAX_JOBS`, `MAX_JOBS` | compiler processes at once |
| `CUTE_DSL_LIBS` | the DSL's runtime library |
| `XDG_CACHE_HOME`, `HOME` | the platform's cache folder |

An empty or blank variable counts as unset.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FALSE = frozenset({"0", "false", "no", "off"})

# nvcc reads these by itself. A flag put there (-use_fast_math, say) would change results without
# being part of any cache key, so the compiler never sees them.
_HIDDEN_FROM_COMPILERS = frozenset({"NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"})


def _text(env: Mapping[str, str], *names: str) -> str | None:
    """The first of the variables that is set and not blank, as it stands."""
    for name in names:
        value = env.get(name, "")
        if value.strip():
            return value
    return None


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = _text(env, name)
    return value is not None and value.strip().lower() not in _FALSE


def _paths(text: str | None) -> tuple[Path, ...]:
    """A path list as written by people: empty parts, trailing slashes and blanks at the ends do not count."""
    if text is None:
        return ()
    parts = (part.strip().strip('"') for part in text.split(os.pathsep))
    return tuple(Path(part).expanduser() for part in parts if part)


def _path(text: str | None) -> Path | None:
    return Path(text.strip()).expanduser() if text is not None else None


def _count(text: str | None) -> int | None:
    """A positive number, or None: a build never fails over a malformed job count."""
    if text is None or not text.strip().isdecimal():
        return None
    return int(text) or None


@dataclass(frozen=True)
class Settings:
    """What the environment said.

    Attributes:
        backend: the forced route as written, or None. Not checked here: the first call does.
        use_cuda_norm: prefer the CUDA C++ route on CUDA tensors.
        strict: raise instead of falling back.
        guard: look at the tensors of every call, before and after; see `flashnorm.core.guard_mode`.
        disable_jit: never compile.
        cache_dir: the cache folder asked for, or None.
        aot_dirs: folders of precompiled kernels, in order.
        cuda_home: CUDA toolkits to try, in order: CUDA_HOME's parts, then CUDA_PATH's.
        nvcc: the nvcc asked for, or None.
        cxx: the host compiler asked for, as written (it may carry arguments), or None.
        cuda_arch: the architecture asked for, as written, or None.
        path: the executables' search path.
        home: the home folder, or None.
        xdg_cache_home: the platform's cache folder, where it is set and absolute.
        max_jobs: compiler processes at once, or None to decide by the processors there are.
        cute_dsl_libs: the DSL's runtime library or libraries, where the user names them.
    """

    backend: str | None = None
    use_cuda_norm: bool = False
    strict: bool = False
    guard: bool = False
    disable_jit: bool = False
    cache_dir: Path | None = None
    aot_dirs: tuple[Path, ...] = ()
    cuda_home: tuple[Path, ...] = ()
    nvcc: Path | None = None
    cxx: str | None = None
    cuda_arch: str | None = None
    path: str = os.defpath
    home: Path | None = None
    xdg_cache_home: Path | None = None
    max_jobs: int | None = None
    cute_dsl_libs: tuple[Path, ...] = ()

    @property
    def platform_cache_dir(self) -> Path | None:
        """flashnorm's folder in the platform's cache folder, or None where there is no home."""
        if self.xdg_cache_home is not None:
            return self.xdg_cache_home / "flashnorm"
        if self.home is None:
            return None
        if sys.platform == "darwin":
            return self.home / "Library" / "Caches" / "flashnorm"
        return self.home / ".cache" / "flashnorm"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Settings from a mapping of variables; reads nothing else.

        Args:
            env: names to values, like `os.environ`.
        """
        backend = _text(env, "FLASHNORM_BACKEND")
        cuda_arch = _text(env, "FLASHNORM_CUDA_ARCH")
        cxx = _text(env, "CXX")
        xdg = _path(_text(env, "XDG_CACHE_HOME"))
        home = _path(_text(env, "HOME", "USERPROFILE"))
        return cls(
            backend=backend.strip() if backend else None,
            use_cuda_norm=(_text(env, "FLASHINFER_USE_CUDA_NORM") or "").strip() == "1",
            strict=_flag(env, "FLASHNORM_STRICT"),
            guard=_flag(env, "FLASHNORM_GUARD"),
            disable_jit=_flag(env, "FLASHNORM_DISABLE_JIT"),
            cache_dir=_path(_text(env, "FLASHNORM_CACHE_DIR")),
            aot_dirs=_paths(_text(env, "FLASHNORM_AOT_DIR")),
            cuda_home=(*_paths(_text(env, "CUDA_HOME")), *_paths(_text(env, "CUDA_PATH"))),
            nvcc=_path(_text(env, "FLASHNORM_NVCC")),
            cxx=cxx.strip() if cxx else None,
            cuda_arch=cuda_arch.strip() if cuda_arch else None,
            path=_text(env, "PATH") or os.defpath,
            home=home if home is not None and home.is_absolute() else None,
            # The XDG specification says to ignore a relative path.
            xdg_cache_home=xdg if xdg is not None and xdg.is_absolute() else None,
            max_jobs=_count(_text(env, "FLASHNORM_MAX_JOBS", "MAX_JOBS")),
            cute_dsl_libs=_paths(_text(env, "CUTE_DSL_LIBS")),
        )


def compiler_environment() -> dict[str, str]:
    """The environment that compilers run in: this process's, less what would change results unseen.

    Messages are asked for in English, because error texts are quoted and searched.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _HIDDEN_FROM_COMPILERS}
    return {**kept, "LC_ALL": "C"}


settings = Settings.from_env(os.environ)
