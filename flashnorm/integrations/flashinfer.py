"""flashnorm under FlashInfer's name: code that says `import flashinfer` runs on flashnorm, with no FlashInfer there.

    from flashnorm.integrations import flashinfer

    with flashinfer.install():
        import engine  # its `from flashinfer.norm import rmsnorm` is flashnorm's

or, for a program or a test file as it stands:

    python -m flashnorm.integrations.flashinfer -m pytest test_norm.py

What is there are FlashInfer's norms, with its names, argument order and defaults (0.7.2), and the few helpers that
code around norms asks for. Everything else of FlashInfer is missing: `importlib.util.find_spec` gives None for its
modules, importing them raises, and a missing attribute says why. The functions call flashnorm's own, so its contract
holds where the two differ: wrong arguments raise ValueError or TypeError, and shapes, dtypes and devices that
FlashInfer refuses are served. A gradient that flashnorm would refuse to lose is lost, as in FlashInfer.
Operators that this version of flashnorm lacks are left out.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

import torch

import flashnorm
from flashnorm.core import device as devices
from flashnorm.core import plan
from flashnorm.core.dispatch import MIN_SM

INTERFACE = "0.7.2"  # the version of FlashInfer whose signatures these are
ROOT = "flashinfer"
_WHY = "flashnorm stands in for flashinfer here, and has its norms alone (flashnorm.integrations.flashinfer)"

DIFFERENTIABLE = ("rmsnorm", "gemma_rmsnorm", "layernorm")  # here; FlashInfer records no gradient of any
log = logging.getLogger("flashnorm")
_said: set[str] = set()
_FP4 = ("rmsnorm_fp4quant", "add_rmsnorm_fp4quant")
_DIT = (
    "fused_dit_gate_residual_layernorm_gamma_beta",
    "fused_dit_gate_residual_layernorm_scale_shift",
    "fused_dit_residual_layernorm_scale_shift",
)
NORMS = (
    "rmsnorm",
    "rmsnorm_quant",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "fused_add_rmsnorm_fp8_block_quant",
    "gemma_rmsnorm",
    "gemma_fused_add_rmsnorm",
    "layernorm",
    "layernorm_quant",
    "fused_rmsnorm_silu",
    "fused_qk_rmsnorm_rope",
    *_DIT,
    *_FP4,
    "gated_residual_rmsnorm",
    "gated_residual_next_rmsnorm",
    "rmsnorm_sigmoid_gate",
    "supports_gated_residual_rmsnorm",
    "supports_gated_residual_next_rmsnorm",
    "supports_rmsnorm_sigmoid_gate",
    "gen_norm_module",
)
_NO_NORMS = tuple(name for name in NORMS if name.startswith(("supports_", "gen_")))
CAKE = (
    "cake_rmsnorm",
    "cake_rmsnorm_train_forward",
    "cake_rmsnorm_train_backward",
    "cake_rmsnorm_train_backward_workspace",
    "cake_rmsnorm_train_backward_workspace_bytes",
    "CakeRMSNormFunction",
    "is_cake_rmsnorm_train_supported",
    "ARCHES",
    "SUPPORTED_COMPUTE_CAPABILITIES",
    "route_key",
)
CAKE_AT_TOP = (*CAKE[:6], "is_cake_rmsnorm_train_supported")


# ------------------------------------------------------------------ helpers that code around norms asks for
def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a CUDA device.

    Raises:
        ValueError: for another device.
    """
    if torch.device(device).type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
    return torch.cuda.get_device_capability(device)


def device_support_pdl(device: torch.device) -> bool:
    """Whether programmatic dependent launch is there: from compute capability 9.0."""
    return devices.facts(torch.device(device)).sm >= 90


def is_cute_dsl_available() -> bool:
    from flashnorm.core.tools import tools

    return tools().dsl is None


def is_cute_dsl_arch_supported(major: int, minor: int) -> bool:
    """True for every device that has a route of kernels: where the CuTe DSL cannot target it, CUDA C++ serves."""
    return 10 * major + minor >= MIN_SM["cuda"]


def round_up(x: int, y: int) -> int:
    """The next multiple of y."""
    return -(-x // y) * y


class MissingJITCacheError(RuntimeError):
    """FlashInfer's, for code that catches it. Never raised: what may not be built raises flashnorm's own error."""


def gen_jit_spec(name: str, *args: Any, **kwargs: Any) -> Any:
    """There is no building FlashInfer's sources here.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"gen_jit_spec({name!r}): {_WHY}; gen_norm_module() has the kernels of flashnorm itself")


def build_jit_specs(specs: Iterable[Any], verbose: bool = False, skip_prebuilt: bool = False) -> None:
    """Builds what `gen_norm_module` returns."""
    for spec in specs:
        spec.build()


def has_flashinfer_jit_cache() -> bool:
    """True: kernels need no warming up, each is built where it is first called."""
    return True


def _without_skip_check(function: Callable[..., Any]) -> Callable[..., Any]:
    """FlashInfer's decorator takes one keyword more, which says not to look at the arguments. They are looked at."""

    @functools.wraps(function)
    def call(*args: Any, skip_check: bool = False, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _unrecorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """As in FlashInfer, a call records no gradient, and Parameters may be handed over outside of `torch.no_grad()`.

    flashnorm itself refuses such calls: a gradient would be lost. Here it is said once, on the logger "flashnorm".
    Functions that flashnorm differentiates stay so, but for calls with `out`, of which it records none.
    """
    names = tuple(inspect.signature(function).parameters)
    out = names.index("out") if function.__name__ in DIFFERENTIABLE else None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if out is not None and (args[out] if len(args) > out else kwargs.get("out")) is None:
            return function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            if not any(isinstance(v, torch.Tensor) and v.requires_grad for v in (*args, *kwargs.values())):
                return function(*args, **kwargs)
            _say_unrecorded(function.__name__)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def _say_unrecorded(name: str) -> None:
    if name not in _said:
        _said.add(name)
        log.warning("flashinfer.%s records no gradient, and an argument requires one", name)


# ------------------------------------------------------------------ the modules
def _found(names: Sequence[str], source: Any = flashnorm) -> dict[str, Any]:
    found = {name: getattr(source, name) for name in names if hasattr(source, name)}
    if source is flashnorm:
        found = {name: f if name in _NO_NORMS else _unrecorded(f) for name, f in found.items()}
    if "fused_qk_rmsnorm_rope" in found:
        found["fused_qk_rmsnorm_rope"] = _without_skip_check(found["fused_qk_rmsnorm_rope"])
    return found


def contents() -> dict[str, dict[str, Any]]:
    """Module -> name -> object, of all that this version of flashnorm has."""
    norms = _found(NORMS)
    fp4 = {name: norms[name] for name in _FP4 if name in norms}
    building = {f.__name__: f for f in (build_jit_specs, gen_jit_spec, MissingJITCacheError)}
    dsl = {f.__name__: f for f in (is_cute_dsl_available, is_cute_dsl_arch_supported)}
    made: dict[str, dict[str, Any]] = {
        f"{ROOT}.norm": norms,
        f"{ROOT}.utils": {
            "get_compute_capability": get_compute_capability,
            "device_support_pdl": device_support_pdl,
            "round_up": round_up,
        },
        f"{ROOT}.jit": {"gen_norm_module": flashnorm.gen_norm_module, **building},
        f"{ROOT}.jit.core": building,
        f"{ROOT}.jit.norm": {"gen_norm_module": flashnorm.gen_norm_module},
        f"{ROOT}.jit.env": {"has_flashinfer_jit_cache": has_flashinfer_jit_cache},
        f"{ROOT}.cute_dsl": {**fp4, "is_cute_dsl_available": is_cute_dsl_available},
        f"{ROOT}.cute_dsl.utils": dsl,
        f"{ROOT}.cute_dsl.rmsnorm_fp4quant": {name: fp4[name] for name in _FP4[:1] if name in fp4},
        f"{ROOT}.cute_dsl.add_rmsnorm_fp4quant": {name: fp4[name] for name in _FP4[1:] if name in fp4},
    }
    top = dict(norms)
    diffusion = {name: norms[name] for name in (*_DIT, "fused_qk_rmsnorm_rope") if name in norms}
    if diffusion:
        made[f"{ROOT}.diffusion_ops"] = diffusion
    if importlib.util.find_spec("flashnorm.cake_rmsnorm_train") is not None:
        cake = importlib.import_module("flashnorm.cake_rmsnorm_train")
        made[f"{ROOT}.cake_rmsnorm_train"] = _found(CAKE, cake)
        made[f"{ROOT}.jit.cake_rmsnorm_train"] = _loader(cake)
        top |= _found(CAKE_AT_TOP, cake)
    return {ROOT: {**top, "__version__": INTERFACE}, **made}


def _loader(cake: Any) -> dict[str, Any]:
    """What tests of Cake's kernels ask its loader: here every hidden size has its kernels, also with a residual."""
    names = dict(zip(cake.SUPPORTED_COMPUTE_CAPABILITIES, cake.ARCHES, strict=True))

    def arch_for_capability(capability: tuple[int, int]) -> str:
        """The architecture of a device; KeyError for one that has no kernels by name."""
        name: str = names[tuple(capability)]
        return name

    def specs_for_arch(arch: str) -> list[Any]:
        """Nothing to build beforehand: kernels are built where they are first called."""
        return []

    def route_applies(*, device_capability: tuple[int, int], hidden: int, kind: str, residual: bool = False) -> bool:
        """Whether a call has a kernel."""
        return tuple(device_capability) in names and kind in ("fwd", "bwd") and hidden >= 1

    def route_modules(arch: str, hidden: int, kind: str, residual: bool = False) -> tuple[str, ...]:
        """The modules of a call: one, which has the kernels of every number of rows."""
        return (cake.route_key(hidden, kind, residual),)

    def selected_modules(arch: str, hidden: int, kind: str, residual: bool = False, *, rows: int) -> tuple[str, ...]:
        """Those of them that serve a number of rows."""
        return route_modules(arch, hidden, kind, residual)

    functions = (arch_for_capability, specs_for_arch, route_applies, route_modules, selected_modules)
    made = {f.__name__: f for f in functions}
    kept = _found(("ARCHES", "SUPPORTED_COMPUTE_CAPABILITIES", "route_key"), cake)
    return {**kept, **made, "MODULES": _Modules(), "load": _Loaded()}


class _Modules(dict[str, dict[str, Any]]):
    """Facts about a module, by its name: none is for some numbers of rows alone."""

    def __missing__(self, name: str) -> dict[str, Any]:
        return {"select_rule": None}


class _Loaded:
    """What a cache of loaded modules says of itself: as many misses as kernels were made ready in this process."""

    @staticmethod
    def cache_info() -> functools._CacheInfo:
        count = plan.kernels_ready()
        return functools._CacheInfo(hits=0, misses=count, maxsize=None, currsize=count)


class _StandIn(ModuleType):
    """A module of flashnorm's under FlashInfer's name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{self.__name__}.{name}: {_WHY}")


class _Finder:
    """Keeps the other modules of FlashInfer missing: stand-ins have empty paths, where most finders find nothing.

    None lets engines look for optional parts (`importlib.util.find_spec`); an import asks no other question, so its
    error has Python's words. Finders that go by full names (editable installations) are stopped by an error.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if _mine(name) and isinstance(sys.modules.get(ROOT), _StandIn):
            others: list[Any] = [f for f in sys.meta_path if getattr(f, "__module__", None) != __name__]
            if any(f.find_spec(name, path, target) is not None for f in others if hasattr(f, "find_spec")):
                raise ModuleNotFoundError(f"No module named {name!r}: {_WHY}", name=name)


def _mine(name: str) -> bool:
    return name == ROOT or name.startswith(f"{ROOT}.")


def _build() -> dict[str, _StandIn]:
    made: dict[str, _StandIn] = {}
    for name, members in contents().items():
        module = made[name] = _StandIn(name, f"flashnorm under the name of {name}.")
        module.__dict__.update(members)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__dict__["__path__"] = []
        module.__dict__["__all__"] = [key for key in members if not key.startswith("_")]
    for name, module in made.items():
        above, _, last = name.rpartition(".")
        # A module that has a function of its own name, as FlashInfer has, keeps the function as its attribute.
        if above and last not in made[above].__dict__:
            setattr(made[above], last, module)
    return made


class Installed:
    """What `install` did; `undo` takes it back, and so does leaving a `with`."""

    def __init__(self, before: dict[str, ModuleType]) -> None:
        self._before: dict[str, ModuleType] | None = before

    def undo(self) -> None:
        """Brings back the modules that there were. Names that were imported meanwhile stay flashnorm's."""
        if self._before is None:
            return
        _remove()
        sys.modules.update(self._before)
        self._before = None
        if not isinstance(sys.modules.get(ROOT), _StandIn):
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Finder]

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()


def _remove() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in [*sys.modules] if _mine(name)}


def install(*, replace: bool = False) -> Installed:
    """Puts flashnorm in the place of `flashinfer`, `flashinfer.norm` and the modules beside it.

    Do it before the code that imports them. A FlashInfer that is installed, but not imported yet, is hidden.

    Args:
        replace: also where FlashInfer is imported already. Names that were taken from it before stay its own.

    Returns:
        A context manager; its `undo()` brings back what was there.

    Raises:
        RuntimeError: FlashInfer is imported already, and `replace` is False.
    """
    here = sys.modules.get(ROOT)
    if here is not None and not isinstance(here, _StandIn) and not replace:
        where = getattr(here, "__file__", None) or "an unknown place"
        raise RuntimeError(
            f"flashinfer is imported already, from {where}: what was imported from it would go on using it. "
            "Install flashnorm earlier, or say install(replace=True)"
        )
    made = _build()
    done = Installed(_remove())
    sys.modules.update(made)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    return done


def main(argv: Sequence[str]) -> int:
    """`python -m flashnorm.integrations.flashinfer (-m MODULE | SCRIPT) ...`: runs it with flashnorm installed."""
    arguments = list(argv)
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[as_module:]
    if not arguments:
        print("usage: python -m flashnorm.integrations.flashinfer (-m MODULE | SCRIPT) [arguments]", file=sys.stderr)
        return 2
    sys.argv = arguments
    # This module is known as __main__ now: the one that others import must be the one that is installed.
    importlib.import_module("flashnorm.integrations.flashinfer").install()
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
