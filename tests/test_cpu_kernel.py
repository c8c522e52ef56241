"""The CPU kernels themselves, below the operators: bits, layouts, threads, vector widths."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashnorm.backends import cpu, cuda
from flashnorm.jit.cpu import detect_cpu
from flashnorm.jit.toolchain import find_host_compiler
from flashnorm.program import AddResidual, Affine, Cast, LoadRow, Rms, RowProgram, SaveRstd, Variant
from tests import cross
from tests.canonical import rmsnorm_bits

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(
        not find_host_compiler() or detect_cpu().reason_unserved() is not None, reason="the cpu route is not available"
    ),
]

WIDTHS = (1, 7, 8, 9, 15, 16, 17, 111, 255, 256, 257, 500, 576, 1023, 4096, 8191, 8192, 8200, 16384, 65537)
EPS = 1e-6


def program(
    *,
    residual: bool = False,
    rounded: bool = False,
    offset: float = 0.0,
    llama: bool = False,
    weight: bool = True,
    in_place: bool = False,
    save: bool = False,
) -> RowProgram:
    return RowProgram(
        load=AddResidual(rounded=rounded) if residual else LoadRow(),
        stats=Rms(),
        maps=(Affine(offset=offset, round_norm=llama),) if weight else (),
        store=Cast(dst="x") if in_place else Cast(),
        saves=(SaveRstd(),) if save else (),
    )


@cache
def kernel(what: RowProgram, dtypes: tuple[str, ...]) -> Callable[..., Any]:
    return cpu.spec(what, dtypes).build_and_load()


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The representation, with every NaN made the same."""
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor).contiguous()
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


def assert_bits(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    differ = bits(got) != bits(want)
    if differ.any():
        at = tuple(int(i) for i in np.argwhere(differ)[0])
        raise AssertionError(f"{what}: {differ.sum()} of {differ.size} differ, first {at}: {got[at]} for {want[at]}")


def rows(m: int, h: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Ordinary rows first, then the kinds that go wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, h, generator=generator)
    tiny = {torch.float16: 1e-7, torch.bfloat16: 1e-39, torch.float32: 1e-39}[dtype]
    where = int(torch.randint(h, (1,), generator=generator))
    special: list[Callable[[torch.Tensor], Any]] = [
        lambda r: r.mul_(tiny),  # subnormal, and with fp32 an underflowing sum
        lambda r: r.zero_(),
        lambda r: r.fill_(-0.0),
        lambda r: r[where].fill_(3e4),
        lambda r: r[where].fill_(float("inf")),
        lambda r: r[where].fill_(float("nan")),
        lambda r: r.mul_(1e30),  # overflow of the squares, and of the dtype
        lambda r: r.copy_(torch.linspace(-3, 3, h)),
    ]
    for index, change in enumerate(special):
        if 2 + index < m:
            change(x[2 + index])
    return x.to(dtype)


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=name)
def test_every_width(dtype: torch.dtype) -> None:
    launch = kernel(program(), (name(dtype),) * 3)
    for h in WIDTHS:
        x = rows(11 if h < 10000 else 3, h, dtype, h)
        weight = rows(1, h, dtype, h + 1)[0]
        out = torch.empty_like(x)
        launch(EPS, False, x, weight, out)
        assert_bits(out, rmsnorm_bits(x, weight, eps=EPS).out, (h, dtype))


@pytest.mark.parametrize("h", [1, 17, 576, 4096, 8200])
@pytest.mark.parametrize(("numerics", "rounded", "llama"), [("flashinfer", False, False), ("hf-llama", True, True)])
def test_residual_in_place(h: int, numerics: str, rounded: bool, llama: bool, threads: int) -> None:
    what = program(residual=True, rounded=rounded, llama=llama, in_place=True, save=True)
    dtypes = ("bfloat16", "float16", "float32", "float32")
    assert [operand.name for operand in what.operands()] == ["x", "residual", "weight", "rstd"]
    x, residual = rows(40, h, torch.bfloat16, h), rows(40, h, torch.float16, h + 1).flip(0).contiguous()
    weight = rows(1, h, torch.float32, h + 2)[0]
    want = rmsnorm_bits(x, weight, residual, eps=EPS, numerics=numerics)
    rstd = torch.empty(40)
    kernel(what, dtypes)(EPS, False, x, residual, weight, rstd)
    assert want.residual is not None
    assert_bits(x, want.out, "out")
    assert_bits(residual, want.residual, "residual")
    assert_bits(rstd, want.rstd, "rstd")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
def test_sum_stored_elsewhere(dtype: torch.dtype) -> None:
    what = RowProgram(AddResidual(rounded=True, dst="residual_out"), Rms(), (Affine(offset=1.0),), Cast())
    x, residual = rows(12, 500, dtype, 1), rows(12, 500, dtype, 2).flip(0).contiguous()
    weight = rows(1, 500, dtype, 3)[0]
    kept = residual.clone()
    residual_out, out = torch.empty_like(x), torch.empty_like(x)
    kernel(what, (name(dtype),) * 5)(EPS, False, x, residual, residual_out, weight, out)
    want = rmsnorm_bits(x, weight, residual, eps=EPS, numerics="hf-gemma", offset=1.0)
    assert want.residual is not None
    assert_bits(out, want.out, "out")
    assert_bits(residual_out, want.residual, "residual_out")
    assert_bits(residual, kept, "residual is an input only")


@pytest.mark.parametrize("h", [1, 7, 100, 129, 576])
def test_layouts(h: int, threads: int) -> None:
    """Row strides, three dimensions, starts at odd elements, weights per row with strides of 0."""
    launch = kernel(program(), ("bfloat16", "float32", "bfloat16"))

    def inside(shape: tuple[int, ...], start: int, gap: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        """A view with odd start and strides into a buffer of NaN."""
        padded = [*shape[:-2], shape[-2] + 1, shape[-1] + gap]
        buffer = torch.full((start + int(np.prod(padded)),), float("nan"), dtype=dtype)
        view = buffer[start:].view(padded)[..., : shape[-2], : shape[-1]]
        view.copy_(rows(int(np.prod(shape[:-1])), shape[-1], dtype, seed).view(shape))
        return view

    shapes = [(37, h), (5, 9, h)]
    for shape, start, gap in itertools.product(shapes, (0, 1, 3), (0, 1, 5)):
        x, out = inside(shape, start, gap, torch.bfloat16, h), inside(shape, start + 1, gap, torch.bfloat16, 0)
        around = bits(out._base if out._base is not None else out).copy()
        lead = shape[:-1]
        weights = [rows(1, h, torch.float32, 5)[0], rows(lead[-1], h, torch.float32, 6)]
        if len(shape) == 3:
            weights.append(rows(lead[0], h, torch.float32, 7)[:, None])
        for weight in weights:
            full = weight if weight.dim() == 1 else weight.expand(shape)
            launch(EPS, False, x, full, out)
            assert_bits(out.contiguous(), rmsnorm_bits(x, weight, eps=EPS).out, (shape, start, gap, weight.shape))
        base = out._base if out._base is not None else out
        untouched = torch.ones(base.shape, dtype=torch.bool)
        torch.as_strided(untouched, out.shape, out.stride(), out.storage_offset()).fill_(False)
        assert (bits(base)[untouched.numpy()] == around[untouched.numpy()]).all(), "wrote outside of its rows"


def test_input_rows_that_repeat() -> None:
    launch = kernel(program(), ("bfloat16",) * 3)
    x, weight = rows(6, 300, torch.bfloat16, 1), rows(1, 300, torch.bfloat16, 2)[0]
    out = torch.empty(6, 4, 300, dtype=torch.bfloat16)
    repeated = x[:, None].expand(6, 4, 300)
    launch(EPS, False, repeated, weight, out)
    assert_bits(out, rmsnorm_bits(repeated, weight, eps=EPS).out, "stride 0")


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("in_place", [False, True], ids=["out", "in_place"])
def test_streamed_stores_equal_plain_ones(in_place: bool, offset: int, threads: int) -> None:
    m, h = 1100, 4096
    dtypes = ("float32", "float32") if in_place else ("float32",) * 3
    launch = kernel(program(in_place=in_place), dtypes)
    x = torch.randn(m * h + 1)[offset : m * h + offset].view(m, h)
    weight = torch.randn(h)
    want = torch.empty(m, h)
    for begin in range(0, m, 100):
        kernel(program(), ("float32",) * 3)(EPS, False, x[begin : begin + 100], weight, want[begin : begin + 100])
    out = x if in_place else torch.empty(m * h + 1)[offset : m * h + offset].view(m, h)
    launch(EPS, False, x, weight, *([] if in_place else [out]))
    assert torch.equal(out, want)


def test_subnormals_survive_flushing_threads() -> None:
    """torch.set_flush_denormal changes the calling thread; a kernel's result must not depend on it."""
    launch = kernel(program(residual=True, weight=False), ("float32", "float32", "float32"))
    x, residual = torch.full((64, 4096), 1e-40), torch.full((64, 4096), 2e-40)
    want = bits(x + residual)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        launch(0.0, False, x, residual, torch.empty_like(x))
        still_flushing = bool((torch.tensor([1e-40]) + 0.0 == 0).item())
    finally:
        torch.set_flush_denormal(False)
    assert (bits(residual) == want).all()
    assert still_flushing, "the caller's mode was not given back"


def test_threads_of_their_own_and_nested_calls() -> None:
    launch = kernel(program(), ("bfloat16",) * 3)
    x, weight = rows(200, 4096, torch.bfloat16, 1), rows(1, 4096, torch.bfloat16, 2)[0]
    want = torch.empty_like(x)
    launch(EPS, False, x, weight, want)
    results = [torch.empty_like(x) for _ in range(4)]

    def work(out: torch.Tensor) -> None:
        for _ in range(5):
            launch(EPS, False, x, weight, out)

    workers = [threading.Thread(target=work, args=(out,)) for out in results]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for out in results:
        assert_bits(out, want, "from a thread")


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
@pytest.mark.parametrize("openmp", [False, True])
def test_finds_the_threads_there_are(openmp: bool) -> None:
    """Without an OpenMP runtime in the process a kernel runs on the calling thread; a hidden one is found."""
    runtime = next((Path(torch.__file__).parent / "lib").glob("libgomp*"), None)
    if openmp and runtime is None:
        pytest.skip("this torch brings no libgomp")
    folder = cpu.spec(program(), ("float32",) * 3).build()
    code = f"""
import ctypes, os, sys
sys.modules["torch"] = None  # not to be had
import numpy as np, tvm_ffi
assert "gomp" not in open("/proc/self/maps").read()
if {openmp}:
    ctypes.CDLL({str(runtime)!r}, ctypes.RTLD_LOCAL)
launch = tvm_ffi.load_module({str(folder / "kernel.so")!r}).get_function("launch")
x = np.ones((64, 4096), np.float32) * 3
out = np.empty_like(x)
before = len(os.listdir("/proc/self/task"))
launch(0.0, False, *(tvm_ffi.from_dlpack(a) for a in (x, np.ones(4096, np.float32), out)))
assert (out == 1).all()
assert len(os.listdir("/proc/self/task")) - before == {int(openmp)}
"""
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=env)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_no_second_thread_pool(threads: int) -> None:
    """Threads are torch's, as many as torch was told to use."""
    launch = kernel(program(), ("float32",) * 3)
    x, weight = torch.randn(512, 4096), torch.randn(4096)
    (x + x).sum()
    before = len(os.listdir("/proc/self/task"))
    launch(EPS, False, x, weight, torch.empty_like(x))
    assert len(os.listdir("/proc/self/task")) == before


@pytest.mark.parametrize(
    ("sources", "included"),
    [
        (cpu._SOURCES, ("cpu/launch.h",)),
        (cpu._BACKWARD_SOURCES, ("cpu/backward_launch.h",)),
        (cuda._SOURCES, ("ffi/launch.h", "ffi/launch_qk.h")),
        (cuda._BACKWARD_SOURCES, ("ffi/backward_launch.h",)),
    ],
    ids=["cpu", "cpu backward", "cuda", "cuda backward"],
)
def test_key_covers_every_header(sources: tuple[Path, ...], included: tuple[str, ...]) -> None:
    """Whatever a unit includes is hashed into its key."""
    pending, seen = [cpu.CSRC / "flashnorm" / name for name in included], set()
    while pending:
        path = pending.pop().resolve()
        if path not in seen:
            seen.add(path)
            pending += [
                path.parent / found for found in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
            ]
    hashed = [source.resolve() for source in sources]
    assert [path for path in seen if not any(path == source or source in path.parents for source in hashed)] == []


def test_target() -> None:
    variant = Variant(program(), ("float32",) * 3, 16)
    assert cpu.build(variant, "host") is cpu.build(variant)
    with pytest.raises(ValueError, match="sm_90a"):
        cpu.build(variant, "sm_90a")


def test_operands_are_checked() -> None:
    launch = kernel(program(), ("float32",) * 3)
    x = torch.zeros(4, 16)
    w = torch.zeros(16)
    for bad in ((x, w[:8], x.clone()), (x, w, torch.zeros(3, 16)), (x.t(), w[:4], x.t()), (x, w.double(), x.clone())):
        with pytest.raises(ValueError):
            launch(EPS, False, *bad)


# ------------------------------------------------------------------ other vectors, compilers, processors
X86 = detect_cpu().machine in ("x86_64", "AMD64")
BUILDS = {
    "AVX-512 without bf16": (("g++", "-march=native", "-mno-avx512bf16"), X86),
    "AVX2": (("g++", "-march=haswell"), X86),
    "four lanes": (("g++", "-march=native", "-mno-avx512f", "-DFN_CPU_WIDTH=4"), X86),
    "x86-64 without fma": (("g++", "-march=x86-64"), X86),
    "clang": (("clang++", "-march=native" if X86 else "-mcpu=native"), True),
    "AArch64": ((cross.COMPILER, "-static"), X86),
}


@cache
def portable_hash(command: tuple[str, ...], folder: Path) -> str:
    """What `csrc/cpu_portable.cpp` prints; it fails where its own checks do."""
    program = folder / str(abs(hash(command)))
    source = Path(__file__).parent / "csrc" / "cpu_portable.cpp"
    flags = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", f"-I{cpu.CSRC}")
    subprocess.run([*command, *flags, source, "-o", program, "-ldl"], check=True, capture_output=True, text=True)
    emulator = cross.emulator() if command[0] == cross.COMPILER else []
    run = subprocess.run([*emulator, program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    return run.stdout.strip()


@pytest.mark.parametrize("build", BUILDS)
def test_same_bits_for_all_vectors_and_compilers(
    build: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    command, fits = BUILDS[build]
    lacking = [tool for tool in ("g++", command[0]) if shutil.which(tool) is None]
    if build == "AArch64":
        cross.need(request.config)
    if lacking or not fits:
        pytest.skip(f"needs {lacking or 'x86-64'}")
    if "avx512f" not in detect_cpu().features:
        command = tuple(word for word in command if "avx512" not in word)
    native = ("g++", "-march=native" if X86 else "-mcpu=native")
    folder = tmp_path_factory.getbasetemp()
    assert portable_hash(command, folder) == portable_hash(native, folder)
