"""Options, the device, and which routes a test runs on.

pytest tests                             the CPU: routes cpu and torch
pytest tests --device cuda               the same files on a GPU: routes cute, cuda and torch
pytest -n 15 --dist loadgroup tests      in 15 processes, which share compiled kernels through the store
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator

import pytest

# One thread for the CPU side of each process: with one for every core in each, they wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

ROUTES = {"cpu": ("cpu", "torch"), "cuda": ("cute", "cuda", "torch")}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flashnorm")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors live")
    group.addoption("--full", action="store_true", help="every shape and every test of wide grids, not a sample")
    group.addoption("--warm", type=int, help="processes that build kernels first (default: all cores in a large run)")
    group.addoption("--need-aarch64", action="store_true", help="fail where the tools to try AArch64 are missing")
    group.addoption("--nvcc-wheels", help="a folder that holds the wheels of the extra nvcc (pip install --target)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_only: about the host, a compiler, or the CPU route alone")
    config.addinivalue_line("markers", "large: allocates gigabytes, needs a GPU's memory")
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device")


def _group(item: pytest.Item) -> str:
    """Tests that share what takes long stay together: a kernel compiled for an architecture, what a file makes once,
    and again after every test of another file, or a combination's kernels, or those of some dtypes; else those of one
    function. What takes gigabytes takes turns."""
    if item.get_closest_marker("large"):
        return "large"
    callspec = getattr(item, "callspec", None)
    given = callspec.params if callspec is not None else {}
    if {"arch", "name"} <= given.keys():
        return f"{item.path.stem} {given['arch']} {given['name']}"
    fixtures = getattr(item, "_fixtureinfo", None)
    made = fixtures.name2fixturedefs.values() if fixtures is not None else ()
    if any(definition.scope == "module" for definitions in made for definition in definitions):
        return item.path.stem
    if "combo" in given:
        return str(given["combo"])
    function = item.nodeid.split("[")[0]
    return f"{function} {given['dtypes']}" if "dtypes" in given else function


# Of these files' grids a plain run on the CPU takes one test of so many, always the same ones: two cores need minutes
# for what each of them compiles or interprets. All of them run with --full, on a GPU, or where a test is named.
SAMPLED = {
    "test_backward": 6,
    "test_backward_emulated": 6,
    "test_block_scales": 2,
    "test_cpu_kernel": 2,
    "test_csrc_emulated": 8,
    "test_csrc_programs": 2,
    "test_cuda_compile": 3,
    "test_cuda_targets": 2,
    "test_cute_backward": 8,
    "test_cute_compile": 5,
    "test_cute_targets": 4,
    "test_dit": 12,
    "test_gate_bits": 16,
    "test_gate_gradients": 9,
    "test_gate_kernels": 8,
    "test_gate_library": 10,
    "test_gated": 3,
    "test_gradients": 12,
    "test_gradients_library": 2,
    "test_guard_mode": 2,
    "test_library_ops": 3,
    "test_nn": 3,
    "test_qk": 2,
    "test_qk_kernels": 3,
    "test_qk_library": 2,
    "test_scaled": 2,
    "test_verify": 2,
    "test_video_blocks": 6,
    "test_warm_call": 2,
}


def _left_out(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether a plain run passes over a test of a wide grid."""
    share = SAMPLED.get(item.path.stem, 1)
    named = any("::" in argument for argument in config.args)
    if config.getoption("--full") or config.getoption("--device") == "cuda" or named or share == 1:
        return False
    return getattr(item, "callspec", None) is not None and zlib.crc32(item.nodeid.encode()) % share != 0


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if _left_out(config, item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
    cuda = config.getoption("--device") == "cuda"
    parallel = config.pluginmanager.hasplugin("xdist")
    for item in items:
        if parallel:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
        if item.get_closest_marker("gpu") and not cuda:
            item.add_marker(pytest.mark.skip(reason="needs --device cuda"))
        if item.get_closest_marker("large") and not cuda:
            item.add_marker(pytest.mark.skip(reason="tensors of gigabytes: needs --device cuda"))
        if item.get_closest_marker("cpu_only") and cuda and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="about the CPU or a compiler: runs without --device"))


LARGE_RUN = 300  # tests


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before a large run, builds its kernels with every core: one by one they would take most of its time."""
    config = session.config
    jobs = config.getoption("--warm")
    if jobs is None:
        using = sum(bool({"route", "exact_route"} & set(getattr(i, "fixturenames", ()))) for i in session.items)
        alone = "PYTEST_XDIST_WORKER" not in os.environ
        jobs = min(os.cpu_count() or 1, 16) if alone and using >= LARGE_RUN else 0
    if jobs > 0 and not config.getoption("collectonly"):
        from tests.warm import start

        began = time.perf_counter()
        start(config.getoption("--device"), jobs)
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"kernels built by {jobs} processes in {time.perf_counter() - began:.0f} s")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = metafunc.config.getoption("--device")
    if "route" in metafunc.fixturenames:
        metafunc.parametrize("route", ROUTES[device])
    if "exact_route" in metafunc.fixturenames:  # the routes that give the canonical bits
        metafunc.parametrize("exact_route", [r for r in ROUTES[device] if r != "torch"])


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


@pytest.fixture(autouse=True)
def _served(request: pytest.FixtureRequest) -> None:
    """Skips a route that cannot serve here, with the reason it gives itself."""
    for name in ("route", "exact_route"):
        if name in request.fixturenames:
            wanted = request.getfixturevalue(name)
            reason = unserved(wanted, request.config.getoption("--device"))
            if reason:
                pytest.skip(f"{wanted}: {reason}")


_REASONS: dict[tuple[str, str], str] = {}


def unserved(route: str, device: str) -> str:
    """Why a route cannot serve a plain call on a device; empty where it can."""
    import flashnorm

    if (route, device) not in _REASONS:
        x = torch.ones(1, 8, device=device, dtype=torch.bfloat16)
        with flashnorm.backend(route):
            explanation = flashnorm.explain("rmsnorm", x, x[0])
        _REASONS[route, device] = "" if explanation.route == route else dict(explanation.reasons)[route]
    return _REASONS[route, device]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Nothing a test draws depends on the tests before it; a changed global setting fails the test that left it."""
    torch.manual_seed(0)
    threads, default, modes = torch.get_num_threads(), torch.get_default_dtype(), _modes()
    yield
    torch.set_num_threads(threads)
    assert torch.get_default_dtype() == default
    assert _modes() == modes


def _modes() -> tuple[object, ...]:
    """What of autograd, of its transforms and of PyTorch's dispatcher is on or left out for this thread."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    keys = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView", "Tracer")
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.autograd.forward_ad._current_level)
    depth = torch._C._len_torch_dispatch_stack(), torch._C._functorch.peek_interpreter_stack() is None
    return (*modes, *depth, *(excluded(key) for key in keys))


@pytest.fixture(params=["C++", "text", "Python"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Warm calls, each from cold: all in C++, from the generated text, and with the guard in Python as well."""
    from flashnorm.core import guard, native
    from flashnorm.core.op import ALL

    if request.param != "C++":
        monkeypatch.setattr(native, "load", lambda: None)
    if request.param == "Python":
        monkeypatch.setattr(guard, "_in_cpp", lambda *_: None)
    for op in ALL.values():
        op.forget()
    yield request.param
    for op in ALL.values():
        op.forget()
