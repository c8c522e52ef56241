"""A CuTe DSL that is not what it seems, breaks on import, compiles nothing, or whose kernels do not load.

Each fault means the next route, with one line in the log that says why; strict mode and a forced route raise.
The DSL is a tree of files that looks installed, the GPU a set of facts, and the cuda route a stand-in.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import flashnorm
from flashnorm import backends
from flashnorm.backends import cute
from flashnorm.core import device as devices
from flashnorm.core import plan
from flashnorm.core.op import OPS
from flashnorm.core.tools import tools
from flashnorm.jit import dsl, folders, store
from flashnorm.jit.env import Missing
from flashnorm.jit.store import Store

pytestmark = pytest.mark.cpu_only

ARCHS = "class Arch:\n" + "".join(f"    {name} = 1\n" for name in ("sm_80", "sm_90a", "sm_100a"))
CACHES = (dsl.find_dsl, dsl.find_runtime, tools, cute._compiler, cute._toolchain)


def fill(tensor: Any, value: float) -> None:
    """The guard of warm calls hands over views, which TVM-FFI cannot export: it owns none of them."""
    if not isinstance(tensor, torch.Tensor):
        dtype = getattr(torch, str(tensor.dtype))
        memory = (ctypes.c_char * (tensor.numel() * dtype.itemsize)).from_address(tensor.data_ptr())
        tensor = torch.frombuffer(memory, dtype=dtype)
    tensor.fill_(value)


class World:
    """A machine with a GPU of some kind, an nvcc, and a DSL that a test spoils."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder = patch, folder
        self.compiled: list[str] = []
        self.served: list[str] = []
        self.site = folder / "site"
        package = self.site / "nvidia_cutlass_dsl" / "python_packages" / "cutlass"
        (package / "base_dsl").mkdir(parents=True)
        (package / "base_dsl" / "enums.py").write_text(ARCHS)
        (self.site / "nvidia_cutlass_dsl" / "__init__.py").touch()
        self.module = package / "__init__.py"
        self.module.touch()
        info = self.site / "nvidia_cutlass_dsl-4.8.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cutlass-dsl\nVersion: 4.8.1\n")
        for path in (package.parent, self.site):
            patch.syspath_prepend(str(path))

    def compiler(self, compile_variant: Callable[..., Any]) -> None:
        """Puts a function in the place of `flashnorm.kernels.compile`, which needs the real DSL."""
        module = types.ModuleType("flashnorm.kernels.compile")
        module.compile_variant = compile_variant  # type: ignore[attr-defined]
        self.patch.setitem(sys.modules, module.__name__, module)

    def builder(self, route: str) -> Callable[..., Any]:
        if route != "cuda":
            return cute.build

        def build(variant: Any, target: str) -> Callable[..., None]:
            def launch(eps: float, pdl: bool, *operands: torch.Tensor) -> None:
                self.served.append(target)
                for operand, tensor in zip(variant.program.operands(), operands, strict=True):
                    if operand.written:
                        fill(tensor, 7)

            return launch

        return build


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    for name in list(sys.modules):
        top = name.split(".")[0]
        # The parts of the kernels that another test may have imported with the real DSL.
        kernels = name.startswith("flashnorm.kernels.") and name not in (
            "flashnorm.kernels.tile",
            "flashnorm.kernels.plans",
        )
        if top in ("cutlass", "nvidia_cutlass_dsl") or kernels:
            monkeypatch.delitem(sys.modules, name)
    made = World(monkeypatch, tmp_path)
    assert folders.prepare(tmp_path / "cache") is None
    kept = Store(tmp_path / "cache" / folders.LAYOUT)
    monkeypatch.setattr(store, "default_store", lambda: kept)
    monkeypatch.setattr(backends, "builder", made.builder)
    monkeypatch.setattr(plan, "tools", lambda: dataclasses.replace(tools(), nvcc=None))
    monkeypatch.setattr(cute, "find_linker", lambda: Missing("no linker"))
    monkeypatch.setattr(plan, "_launches", {})
    monkeypatch.setattr(plan, "_failed", {})
    monkeypatch.setattr(plan, "_said", set())
    for cache in CACHES:
        cache.cache_clear()
    for op in OPS.values():
        op.forget()
    yield made
    for op in OPS.values():
        op.forget()
    for cache in CACHES:
        cache.cache_clear()


# ------------------------------------------------------------------ the faults
@dataclass(frozen=True)
class Fault:
    """What is wrong, on which device, and the reason that must be given.

    `each`: the fault is one variant's own, so another variant is tried, and logged, for itself.
    """

    spoil: Callable[[World], None]
    reason: str
    capability: tuple[int, int] = (9, 0)
    each: bool = False


def namesake(world: World) -> None:
    package = world.folder / "mine" / "cutlass"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('somebody else')\n")
    world.patch.syspath_prepend(str(package.parent))


def raises_on_import(line: str) -> Callable[[World], None]:
    def spoil(world: World) -> None:
        world.module.write_text(f"{line}\n")

    return spoil


def raises_on_compile(error: Exception) -> Callable[[World], None]:
    def spoil(world: World) -> None:
        def compile_variant(variant: Any, arch: str, **_: Any) -> None:
            world.compiled.append(arch)
            raise error

        world.compiler(compile_variant)

    return spoil


def does_not_load(world: World) -> None:
    def compile_variant(variant: Any, arch: str, **_: Any) -> Any:
        world.compiled.append(arch)
        return types.SimpleNamespace(export=lambda path: path.write_bytes(b"\x7fELF"))

    def load(folder: Path) -> None:
        assert (folder / "kernel.o").read_bytes() == b"\x7fELF"
        raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    world.compiler(compile_variant)
    world.patch.setattr(cute, "load", load)


def nothing(world: World) -> None:
    """The DSL is as it should be, but older than the device."""


FAULTS = {
    "a package called cutlass": Fault(namesake, "another package called cutlass .* hides the one of nvidia-cutlass"),
    "OSError on import": Fault(
        raises_on_import("raise OSError('libMLIR.so: cannot open')"),
        "the CuTe DSL cannot be imported: OSError: libMLIR.so",
    ),
    "ImportError on import": Fault(
        raises_on_import("from sys import no_such_name"), "the CuTe DSL cannot be imported: ImportError: .*no_such_name"
    ),
    "AttributeError on import": Fault(
        raises_on_import("import sys\nsys.no_such_name"), "the CuTe DSL cannot be imported: AttributeError: "
    ),
    "KeyError on compile": Fault(raises_on_compile(KeyError("sm_90a")), "KeyError: 'sm_90a'", each=True),
    "OSError on compile": Fault(raises_on_compile(OSError("no ptxas")), "no ptxas", each=True),
    "AttributeError on compile": Fault(
        raises_on_compile(AttributeError("no attribute 'arch'")), "AttributeError: no attribute 'arch'", each=True
    ),
    "no sm_107a": Fault(nothing, "the installed CuTe DSL cannot target sm_107a", (10, 7)),
    "no sm_119a": Fault(nothing, "the installed CuTe DSL cannot target sm_119a", (11, 9)),
    "no sm_130a": Fault(nothing, "the installed CuTe DSL cannot target sm_130a", (13, 0)),
    "a driver error on loading": Fault(
        does_not_load, "does not load: RuntimeError: CUDA_ERROR_NO_BINARY_FOR_GPU", each=True
    ),
}


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest, world: World) -> Fault:
    found = FAULTS[request.param]
    world.patch.setattr(devices, "facts", lambda _: devices.DeviceFacts("cuda", found.capability))
    found.spoil(world)
    return found


def call(dtype: torch.dtype = torch.bfloat16, m: int = 3) -> torch.Tensor:
    return flashnorm.rmsnorm(torch.ones(m, 48, dtype=dtype), torch.full((48,), 2.0, dtype=dtype))


# ------------------------------------------------------------------ what follows from them
@pytest.mark.parametrize("ahead", [False, True], ids=["", "and a folder of kernels"])
def test_the_next_route_serves_and_one_line_says_why(
    fault: Fault, ahead: bool, world: World, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    world.patch.setattr(plan, "settings", dataclasses.replace(plan.settings, aot_dirs=(tmp_path,) if ahead else ()))
    target = "sm_{}{}a".format(*fault.capability)
    with caplog.at_level(logging.WARNING, logger="flashnorm"):
        assert all(bool((call(m=m) == 7).all()) for m in (3, 3, 2, 5))
        OPS["rmsnorm"].forget()  # a cold call again: what failed is not tried twice
        assert bool((call() == 7).all())
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1, lines
        assert lines[0].startswith("rmsnorm: cuda route in place of cute: ")
        assert re.search(fault.reason, lines[0]), lines[0]
        assert bool((call(torch.float16) == 7).all())
    assert len(caplog.records) == (2 if fault.each else 1)
    assert all(record.levelno == logging.WARNING and record.name == "flashnorm" for record in caplog.records)
    assert world.served == [target] * 6
    assert len(world.compiled) == (2 if fault.each else 0)
    assert "cutlass" not in sys.modules


def test_strict_mode_raises_the_reason(fault: Fault, world: World) -> None:
    world.patch.setattr(plan, "settings", dataclasses.replace(plan.settings, strict=True))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=fault.reason):
            call()
    assert world.served == []


def test_a_forced_route_raises_the_reason(fault: Fault, world: World) -> None:
    with flashnorm.backend("cute"), pytest.raises(ValueError, match=f"the cute route is forced .*{fault.reason}"):
        call()
    assert world.served == []


def test_an_artefact_that_does_not_load_is_kept(world: World) -> None:
    """The driver may be at fault: the file is intact, so neither built again nor thrown away."""
    world.patch.setattr(devices, "facts", lambda _: devices.DeviceFacts("cuda", (9, 0)))
    does_not_load(world)
    assert bool((call() == 7).all())
    root = world.folder / "cache" / folders.LAYOUT
    assert world.compiled == ["sm_90a"] and not (root / ".bad").exists()
    assert [path.name.rpartition("-")[0] for path in root.glob("cute-*")] == ["cute-LoadRow_Rms_Affine-bf16-48-sm_90a"]


def test_the_world_is_in_order_without_a_fault(world: World) -> None:
    """Otherwise the tests above would pass for reasons of their own."""
    world.patch.setattr(devices, "facts", lambda _: devices.DeviceFacts("cuda", (9, 0)))
    found = dsl.find_dsl()
    assert found and found.version == "4.8.1" and found.archs == {"sm_80", "sm_90a", "sm_100a"}

    def compile_variant(variant: Any, arch: str, **_: Any) -> Any:
        return types.SimpleNamespace(export=lambda path: path.write_bytes(b"\x7fELF"))

    world.compiler(compile_variant)
    world.patch.setattr(cute, "load", lambda folder: lambda eps, pdl, x, weight, out: fill(out, 5))
    assert bool((call() == 5).all()) and world.served == []
