"""For pytest: FlashInfer's test files, unchanged, on flashnorm under its name (`flashinfer_tests.py` starts it).

It installs `flashnorm.integrations.flashinfer`, lets the files have the plain Python helpers of their checkout (the
templates of `flashinfer.trace`, a table of NVFP4), and can tell them two things that are not so:

- `--fi-capability 10.0`: which GPU there is. Many tests run on Blackwell alone, where FlashInfer's kernels do;
- `--fi-on-cpu`: that there is a GPU at all. What they put on "cuda" then lies on the CPU.

Only the test files are told so: flashnorm asks for itself.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flashnorm.integrations import flashinfer as integration

# Packages of the checkout that hold no kernel, and what is in them that the tests need.
HELPERS = ("flashinfer.trace", "flashinfer.quantization.nvfp4_quantization_utils")
FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones"),
    *("ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)

DEVICES = {
    "is_cake_rmsnorm_train_supported": 0,
    "cake_rmsnorm_train_backward_workspace": 2,
    "cake_rmsnorm_train_backward_workspace_bytes": 2,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flashinfer")
    group.addoption("--fi-checkout", default=".", help="a checkout of FlashInfer, or the part of it that is needed")
    group.addoption("--fi-on-cpu", action="store_true", help="put what goes to CUDA on the CPU")
    group.addoption("--fi-capability", default="", metavar="10.0", help="the GPU that tests hear of")
    group.addoption("--fi-every", type=int, default=1, metavar="N", help="run one in N of the cases of each test")


def pytest_configure(config: pytest.Config) -> None:
    checkout = Path(config.getoption("--fi-checkout")).resolve()
    integration.install()
    sys.meta_path.insert(0, _Helpers(checkout))
    _say_capability(checkout, config.getoption("--fi-capability"))
    if config.getoption("--fi-on-cpu"):
        _on_cpu(checkout)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each test's cases, one in N: a step that has no factor in common with most grids goes through all values.

    What judges all cases together (Cake's median) says nothing of some of them, and is left out then.
    """
    every = config.getoption("--fi-every")
    seen: Counter[str] = Counter()
    kept, left = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        whole = every > 1 and name.endswith("_over_the_matrix")
        (left if whole or seen[name] % every else kept).append(item)
        seen[name] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


class _Helpers:
    """Finds the helpers in the checkout; every other module of FlashInfer stays flashnorm's, or missing."""

    def __init__(self, checkout: Path) -> None:
        self._root = checkout / "flashinfer"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        above = any(helper.startswith(f"{name}.") for helper in HELPERS)
        if not above and not any(name == helper or name.startswith(f"{helper}.") for helper in HELPERS):
            return None
        inside = self._root.joinpath(*name.split(".")[1:-1])
        if above:  # an empty package: its own __init__ would ask for kernels
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(inside / name.rpartition(".")[2])]
            return spec
        return PathFinder.find_spec(name, [str(inside)])


# ------------------------------------------------------------------ what tests are told
def _for_tests(checkout: Path, real: Callable[..., Any], told: Callable[..., Any]) -> Callable[..., Any]:
    """A function that says one thing to files of the checkout, and the truth to everybody else."""

    @functools.wraps(real)
    def answer(*args: Any, **kwargs: Any) -> Any:
        asker = sys._getframe(1).f_globals.get("__file__") or ""
        return (told if Path(asker).is_relative_to(checkout) else real)(*args, **kwargs)

    return answer


def _say_capability(checkout: Path, text: str) -> None:
    if not text:
        return
    major, minor = map(int, text.split("."))
    told = {
        "torch.cuda": {"get_device_capability": lambda *_: (major, minor)},
        "flashinfer.utils": {"get_compute_capability": lambda _: (major, minor), "device_support_pdl": lambda _: True},
        "flashinfer.cute_dsl.utils": {"is_cute_dsl_arch_supported": lambda *_: True},
    }
    _tell(checkout, told)


def _tell(checkout: Path, told: dict[str, dict[str, Callable[..., Any]]]) -> None:
    for name, functions in told.items():
        module: ModuleType = importlib.import_module(name)
        for function, says in functions.items():
            setattr(module, function, _for_tests(checkout, getattr(module, function), says))


# ------------------------------------------------------------------ a CPU under CUDA's name
def _on_cpu(checkout: Path) -> None:
    for name in FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        owner.to = _moved(owner.to)  # type: ignore[method-assign]
        owner.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Generator = _Generator  # type: ignore[misc]
    top, cake = sys.modules["flashinfer"], sys.modules["flashinfer.cake_rmsnorm_train"]
    for name, place in DEVICES.items():  # Cake's functions that take a device
        made = _redirected(getattr(cake, name), place)
        for module in (top, cake):
            setattr(module, name, made)
    nothing = dict.fromkeys(("synchronize", "empty_cache"), lambda *_: None)
    # No memory: what needs more than 4 GiB of it is skipped.
    more = {"is_available": lambda: True, "device_count": lambda: 1, "mem_get_info": lambda *_: (0, 0)}
    _tell(checkout, {"torch.cuda": {**nothing, **more}})


class _Generator(torch.Generator):
    """A class still: annotations name it."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return cls.__base__(_place(device))


def _place(device: Any) -> Any:
    is_cuda = isinstance(device, int) or str(device).startswith("cuda")
    return torch.device("cpu") if device is not None and not isinstance(device, bool) and is_cuda else device


def _redirected(factory: Callable[..., Any], place: int | None = None) -> Callable[..., Any]:
    """The same function, whose `device` (a keyword, or the argument at a place) is the CPU where it says CUDA."""

    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _place(kwargs["device"])
        return factory(*(_place(a) if i == place else a for i, a in enumerate(args)), **kwargs)

    return call


def _moved(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _place(kwargs["device"])
        words = (int, str, torch.device)
        args = tuple(_place(a) if isinstance(a, words) and not isinstance(a, bool) else a for a in args)
        return move(self, *args, **kwargs)

    return to
