"""Which compilers this machine has, and how they are called.

Every search returns a frozen description or a `Missing` with the reason, and raises nothing. Nothing
runs at import; a search is done once a process and `Settings`. Neither torch nor the DSL is imported:
TVM-FFI and the DSL are found as files.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import Settings, settings
from .arch import Arch, CudaTarget, cuda_target, device_arch, parse_arch
from .cpu import Cpu, detect_cpu
from .dsl import Dsl, find_dsl
from .env import BuildError, Missing, run

__all__ = [
    "Arch",
    "Cpu",
    "CudaTarget",
    "Dsl",
    "HostCompiler",
    "Missing",
    "Ninja",
    "Nvcc",
    "TvmFfi",
    "cuda_target",
    "cxx_flags",
    "detect_cpu",
    "device_arch",
    "find_dsl",
    "find_host_compiler",
    "find_ninja",
    "find_nvcc",
    "find_tvm_ffi",
    "job_count",
    "link_flags",
    "nvcc_flags",
    "nvcc_link_flags",
    "parse_arch",
    "tvm_ffi_version",
]

_PROBE_TIMEOUT = 30.0


def _ask(*command: str | Path) -> str | Missing:
    """What a tool prints about itself."""
    try:
        return run(command, timeout=_PROBE_TIMEOUT)
    except BuildError as error:
        return Missing(str(error).splitlines()[0])


def job_count(config: Settings = settings) -> int:
    """Compiler processes at once: what was asked for, else the processors this process may use."""
    if config.max_jobs is not None:
        return config.max_jobs
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


# -------------------------------------------------------------------- host compiler
@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler.

    Attributes:
        command: the program and the arguments it always gets ("ccache", "g++").
        kind: "gcc" or "clang".
        version: the line by which it names itself, distribution and all.
        machine: the machine it compiles for, "x86_64-linux-gnu".
    """

    command: tuple[str, ...]
    kind: str
    version: str
    machine: str

    @property
    def identity(self) -> dict[str, object]:
        """What goes into a cache key. Not the path: the same compiler elsewhere makes the same code."""
        return {"kind": self.kind, "version": self.version, "machine": self.machine, "arguments": self.command[1:]}


@functools.cache
def find_host_compiler(config: Settings = settings) -> HostCompiler | Missing:
    """The C++ compiler: CXX where it is set (and then no other), else g++, c++ or clang++ on PATH."""
    asked = config.cxx
    if asked is not None:
        # A path with blanks is one word where such a file exists; otherwise blanks separate arguments.
        try:
            words = (asked,) if Path(asked).is_file() else tuple(shlex.split(asked))
        except ValueError as error:
            return Missing(f"CXX={asked}: {error}")
        found = _host_compiler(words, config)
        return found if found else Missing(f"CXX={asked}: {found}")
    reasons = []
    for name in ("g++", "c++", "clang++"):
        found = _host_compiler((name,), config)
        if found:
            return found
        reasons.append(str(found))
    return Missing("no C++ compiler: " + "; ".join(reasons))


def _host_compiler(words: Sequence[str], config: Settings) -> HostCompiler | Missing:
    if not words:
        return Missing("empty command")
    program = shutil.which(words[0], path=config.path)
    if program is None:
        return Missing(f"{words[0]} is not on PATH")
    command = (program, *words[1:])
    text = _ask(*command, "--version")
    if isinstance(text, Missing):
        return text
    machine = _ask(*command, "-dumpmachine")
    if isinstance(machine, Missing):
        return machine
    kind = "clang" if "clang" in text.lower() else "gcc"
    # The first word is the name it was called by, which says nothing ("c++" or "g++").
    first = text.strip().splitlines()[0] if text.strip() else ""
    version = first.split(" ", 1)[1] if kind == "gcc" and " " in first else first
    return HostCompiler(command, kind, version, machine.strip())


def cxx_flags(compiler: HostCompiler, cpu: Cpu) -> tuple[str, ...]:
    """Flags for one host unit: fast, and every fp32 operation as written (IEEE, no contraction).

    There is no OpenMP in it: the code looks torch's own thread pool up when it runs (csrc/flashnorm/cpu/threads.h).
    """
    native = "-mcpu=native" if cpu.machine in ("aarch64", "arm64") else "-march=native"
    flags = [
        "-std=c++17",
        "-O3",
        native,
        "-fPIC",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        *_HIDDEN,
    ]
    if compiler.kind == "gcc":
        flags += ["-fno-gnu-unique"]
    return tuple(flags)


# Everything but the entry point stays inside its library: two artefacts instantiate templates of the
# same name, and a process loads many of them.
_HIDDEN = ("-fvisibility=hidden", "-fvisibility-inlines-hidden")


def link_flags() -> tuple[str, ...]:
    """Flags to link objects into `kernel.so` with the host compiler."""
    # An artefact calls its own functions, also where another one exports the same names.
    return ("-shared",) if sys.platform == "darwin" else ("-shared", "-Wl,-Bsymbolic")


# -------------------------------------------------------------------- nvcc
@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler.

    Attributes:
        path: the program.
        version: (13, 0, 88).
        archs: the base architectures it lists: (75, 80, ..., 121).
        include_dirs, lib_dirs: folders it does not look at by itself (toolkits made of wheels).
        found_by: "CUDA_HOME", "PATH", ...
    """

    path: Path
    version: tuple[int, ...]
    archs: tuple[int, ...]
    include_dirs: tuple[Path, ...] = ()
    lib_dirs: tuple[Path, ...] = ()
    found_by: str = ""

    @property
    def identity(self) -> dict[str, object]:
        return {"kind": "nvcc", "version": ".".join(map(str, self.version))}

    def target(self, arch: str | Arch) -> CudaTarget | Missing:
        """How to compile for an architecture; see `cuda_target`."""
        return cuda_target(arch, self.archs, self.version)


def nvcc_candidates(config: Settings, site_dirs: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Where an nvcc may be, in order, with the reason to look there. Looks at no file but folder lists."""
    if config.nvcc is not None:
        yield "FLASHNORM_NVCC", config.nvcc
    for home in config.cuda_home:
        yield "CUDA_HOME", home / "bin" / "nvcc"
    on_path = shutil.which("nvcc", path=config.path)
    if on_path is not None:
        yield "PATH", Path(on_path)
    yield "/usr/local/cuda", Path("/usr/local/cuda/bin/nvcc")
    for site in dict.fromkeys(site_dirs):
        # One tree "cu13" from CUDA 13 on; one folder a wheel before that.
        for tree in sorted((Path(site) / "nvidia").glob("cu[0-9]*"), reverse=True):
            yield "wheel nvidia-cuda-nvcc", tree / "bin" / "nvcc"
        yield "wheel nvidia-cuda-nvcc-cu12", Path(site) / "nvidia" / "cuda_nvcc" / "bin" / "nvcc"


@functools.cache
def find_nvcc(config: Settings = settings) -> Nvcc | Missing:
    """The first nvcc that is there and runs: FLASHNORM_NVCC, CUDA_HOME, PATH, /usr/local/cuda, wheels."""
    reasons = []
    for found_by, path in nvcc_candidates(config, sys.path):
        found = _nvcc(found_by, path)
        if found:
            return found
        if path.exists() or found_by in ("FLASHNORM_NVCC", "CUDA_HOME"):
            reasons.append(f"{found_by}: {found}")
    return Missing("no nvcc: " + ("; ".join(reasons) or "not in CUDA_HOME, PATH, /usr/local/cuda or a wheel"))


def _nvcc(found_by: str, path: Path) -> Nvcc | Missing:
    if not path.is_file():
        return Missing(f"{path} is not there")
    if not os.access(path, os.X_OK):
        return Missing(f"{path} may not be executed")
    facts = _nvcc_facts(path, path.stat().st_mtime_ns)
    if isinstance(facts, Missing):
        return facts
    version, archs = facts
    # A toolkit of wheels has "lib" where nvcc looks in "lib64", and may lack parts that are wheels of their own.
    root = path.resolve().parent.parent
    if not (root / "lib" / "libcudart_static.a").is_file() or (root / "lib64").exists():
        if found_by.startswith("wheel"):
            return Missing(f"{path} needs the nvidia-cuda-runtime wheel beside it")
        return Nvcc(path, version, archs, found_by=found_by)
    parts = (
        ("include/crt/host_config.h", "nvidia-cuda-crt"),
        ("include/cuda_runtime.h", "nvidia-cuda-runtime"),
        ("nvvm/bin/cicc", "nvidia-nvvm"),
    )
    absent = [wheel for file, wheel in parts if not (root / file).exists()]
    if absent:
        return Missing(f"{path} needs {', '.join(absent)} beside it")
    includes = tuple(d for d in (root / "include", root / "include" / "cccl") if d.is_dir())
    return Nvcc(path, version, archs, includes, (root / "lib",), found_by)


@functools.cache
def _nvcc_facts(path: Path, _mtime: int) -> tuple[tuple[int, ...], tuple[int, ...]] | Missing:
    text = _ask(path, "--version")
    if isinstance(text, Missing):
        return text
    version = parse_nvcc_version(text)
    if version is None:
        return Missing(f"{path} --version names no version")
    listing = _ask(path, "--list-gpu-arch")
    if isinstance(listing, Missing):
        return listing
    archs = parse_nvcc_archs(listing)
    return (version, archs) if archs else Missing(f"{path} lists no architectures")


def parse_nvcc_version(text: str) -> tuple[int, ...] | None:
    """(13, 0, 88) from what `nvcc --version` prints."""
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", text) or re.search(r"\brelease (\d+)\.(\d+)", text)
    return tuple(int(part) for part in match.groups()) if match else None


def parse_nvcc_archs(text: str) -> tuple[int, ...]:
    """(75, 80, ...) from what `nvcc --list-gpu-arch` prints, in order."""
    return tuple(sorted({int(number) for number in re.findall(r"\bcompute_(\d+)\b", text)}))


def nvcc_flags(nvcc: Nvcc, target: CudaTarget, compiler: HostCompiler) -> tuple[str, ...]:
    """Flags for one CUDA unit: every fp32 operation as written, whatever the source leaves to the compiler."""
    host = ["-fPIC", "-ffp-contract=off", *_HIDDEN]
    if compiler.kind == "gcc":
        host.append("-fno-gnu-unique")
    return (
        "-std=c++17",
        "-O3",
        *target.flags,
        "-fmad=false",
        "--ftz=false",
        "-prec-div=true",
        "-prec-sqrt=true",
        f"-ccbin={_host_program(compiler)}",
        "-cudart=static",
        *(f"-isystem={folder}" for folder in nvcc.include_dirs),
        *(f"-Xcompiler={flag}" for flag in host),
    )


def _host_program(compiler: HostCompiler) -> str:
    """The program nvcc calls: the compiler itself, not the launcher ("ccache g++") in front of it."""
    words = [word for word in compiler.command if not word.startswith("-")]
    return words[-1]


def nvcc_link_flags(nvcc: Nvcc, compiler: HostCompiler) -> tuple[str, ...]:
    """Flags to link objects into `kernel.so` with nvcc; the CUDA runtime goes in statically."""
    return (
        "-shared",
        f"-ccbin={_host_program(compiler)}",
        "-cudart=static",
        "-Xlinker=-Bsymbolic",
        *(f"-L{folder}" for folder in nvcc.lib_dirs),
    )


# -------------------------------------------------------------------- ninja
@dataclass(frozen=True)
class Ninja:
    """The build tool."""

    path: Path


@functools.cache
def find_ninja(config: Settings = settings) -> Ninja | Missing:
    """ninja on PATH, beside this Python, or in the wheel of that name."""
    on_path = shutil.which("ninja", path=config.path)
    candidates = [Path(on_path)] if on_path else []
    candidates.append(Path(sys.executable).parent / "ninja")
    try:
        for file in importlib.metadata.files("ninja") or ():
            if file.name == "ninja":
                candidates.append(Path(str(file.locate())))
    except importlib.metadata.PackageNotFoundError:
        pass
    for path in candidates:
        if path.is_file() and os.access(path, os.X_OK):
            return Ninja(path)
    return Missing("ninja is neither on PATH, nor beside this Python, nor installed as a package")


# -------------------------------------------------------------------- TVM-FFI
@dataclass(frozen=True)
class TvmFfi:
    """Where TVM-FFI's headers and library are."""

    version: str
    include_dirs: tuple[Path, ...]
    library: Path

    @property
    def lib_dir(self) -> Path:
        return self.library.parent


@functools.cache
def tvm_ffi_version() -> str | None:
    """What kernels need when they run, whether or not it can be compiled against here."""
    try:
        return importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def find_tvm_ffi() -> TvmFfi | Missing:
    """TVM-FFI by its files: importing it would import torch."""
    try:
        version = importlib.metadata.version("apache-tvm-ffi")
        spec = importlib.util.find_spec("tvm_ffi")
    except (importlib.metadata.PackageNotFoundError, ImportError, ValueError) as error:
        return Missing(f"apache-tvm-ffi is not installed ({error})")
    if spec is None or not spec.submodule_search_locations:
        return Missing("apache-tvm-ffi is installed without its package tvm_ffi")
    root = Path(next(iter(spec.submodule_search_locations)))
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    library = root / "lib" / f"libtvm_ffi{suffix}"
    include = root / "include"
    if not library.is_file() or not (include / "tvm" / "ffi" / "c_api.h").is_file():
        return Missing(f"{root} has no headers or no {library.name}")
    return TvmFfi(version, (include,), library)
