"""Kernels before they are needed: `record` what a program uses, `preload` it, `gen_norm_module` for build scripts."""

from __future__ import annotations

import logging
from os import PathLike
from pathlib import Path
from types import TracebackType

import torch

from flashnorm import recipe
from flashnorm.config import settings
from flashnorm.core import device as devices
from flashnorm.core import native, plan
from flashnorm.core.commands import DTYPES, operators, plain_variant
from flashnorm.core.op import NUMERICS
from flashnorm.jit import ArtifactSpec
from flashnorm.jit.arch import device_arch, parse_arch
from flashnorm.recipe import Kernel

log = logging.getLogger("flashnorm")


class Recorder:
    """Notes every kernel that is used between `start` and `stop`, by all threads; see `record`."""

    def __init__(self) -> None:
        self._kernels: dict[Kernel, None] = {}
        self._running = False

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """What has been noted so far."""
        return tuple(self._kernels)

    def start(self) -> Recorder:
        """Begins, or goes on. Calls that were warm are planned once more, so that they are seen."""
        if not self._running:
            self._running = True
            recipe.listen(self._kernels)
            for op in operators().values():
                op.forget()
        return self

    def stop(self) -> Recorder:
        """Ends; what was noted stays."""
        self._running = False
        recipe.leave(self._kernels)
        return self

    def save(self, path: str | PathLike[str]) -> Path:
        """Writes the recipe, JSON, to a file; returns its path."""
        file = Path(path)
        file.write_text(recipe.to_json(self._kernels), encoding="utf-8")
        return file

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def record() -> Recorder:
    """A recorder of the kernels that a program uses.

    `with flashnorm.record() as recorder: ...` and then `recorder.save("recipe.json")`; or `start()` and `stop()`.
    Recording costs nothing on warm calls. The recipe is input to `flashnorm precompile --recipe` and to `preload`.
    """
    return Recorder()


def preload(source: str | PathLike[str]) -> int:
    """Loads every kernel of a recipe, so that no first call compiles or loads.

    A kernel for the CPU is loaded always, one for a GPU architecture on every GPU here that has it. Kernels come from
    FLASHNORM_AOT_DIR or the cache, and are built where they are in neither and building is allowed. The route is chosen
    as a call would choose it now, with the same fallbacks and log lines.

    Args:
        source: the file of a recipe.

    Returns:
        How many kernels are ready: fewer than the recipe has where it names devices that are not here.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no recipe, or names an operator that this version does not have.
        RuntimeError: no route can serve a kernel; the text says what is missing.
    """
    kernels = recipe.read(source)
    known = operators()
    unknown = sorted({kernel.op for kernel in kernels} - set(known))
    if unknown:
        raise ValueError(f"{source} names operators that there are not: {', '.join(unknown)}")
    here: dict[str, torch.device] = {}
    for device in devices.visible():
        here.setdefault(plan.target_of(devices.facts(device)), device)
    # The route is decided anew, so one call of the program may stand in the recipe once for each route.
    calls = dict.fromkeys((kernel.op, kernel.arch, kernel.variant) for kernel in kernels if kernel.arch in here)
    for op, arch, variant in calls:
        plan.preload(known[op], variant, here[arch])
    absent = sorted({kernel.arch for kernel in kernels} - set(here))
    if absent:
        log.info("preload: no device here is %s", " or ".join(absent))
    if calls:
        from flashnorm.backends import guard

        guard.load()
        native.load()
    return len(calls)


def gen_norm_module(
    op: str = "rmsnorm",
    *,
    dtype: torch.dtype = torch.bfloat16,
    numerics: str = "flashinfer",
    arch: str | None = None,
) -> ArtifactSpec:
    """The JIT spec of an operator's CUDA module: `.build()`, `.load()`, `.build_and_load()`.

    The module serves every shape, stride and H; it needs no GPU to be built.

    Args:
        op: the operator.
        dtype: of all its tensors.
        numerics: as that operator takes it.
        arch: the architecture, such as "sm_90a"; None for FLASHNORM_CUDA_ARCH, else the current device's.

    Raises:
        ValueError: for an unknown operator or numerics, for a dtype that it does not take, or where no architecture is
            given and no GPU is here.
    """
    known = operators()
    if op not in known:
        raise ValueError(f"op must be one of {', '.join(sorted(known))}, got {op!r}")
    if numerics not in NUMERICS:
        raise ValueError(f"numerics must be one of {', '.join(NUMERICS)}, got {numerics!r}")
    from flashnorm.backends import cuda

    variant = plain_variant(known[op], dtype, 128, {"numerics": NUMERICS[numerics]})
    taken = [f"torch.{name}" for name in variant.program.operands()[0].dtypes]
    accepted = [kind for kind in DTYPES.values() if str(kind) in taken]
    if dtype not in accepted:  # the command line takes it for "any that there is"
        raise ValueError(f"dtype must be one of {', '.join(map(str, accepted))}, got {dtype!r}")
    return cuda.spec(variant.program, variant.dtypes, _arch(arch or settings.cuda_arch))


def _arch(text: str | None) -> str:
    if text is not None:
        return parse_arch(text).name
    if not torch.cuda.is_available():
        raise ValueError(
            "arch must be given, such as 'sm_90a': there is no GPU here, and FLASHNORM_CUDA_ARCH is not set"
        )
    return device_arch(*torch.cuda.get_device_capability()).name
