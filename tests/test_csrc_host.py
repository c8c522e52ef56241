"""The host bodies in csrc/: conversions equal torch's for every pattern, ragged accesses stay inside.

The device bodies are other code (cvt.rn.*x2); they are held to the same bits by the route tests on a GPU.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashnorm.jit.toolchain import detect_cpu, find_host_compiler
from tests.canonical.codes import decode, encode

ROOT = Path(__file__).resolve().parent
CSRC = ROOT.parent / "csrc"
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module", params=["native", "base"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of host.cpp, with this processor's instructions (F16C, ...) and without."""
    compiler = find_host_compiler()
    if not compiler:
        pytest.skip(str(compiler))
    native = "-mcpu=native" if detect_cpu().machine in ("aarch64", "arm64") else "-march=native"
    tune = {"native": native, "base": "-O2"}
    library = tmp_path_factory.mktemp("csrc") / f"host_{request.param}.so"
    flags = ["-std=c++17", "-O2", tune[request.param], "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    flags += ["-shared", "-fPIC", f"-I{CSRC}"]
    command = [*compiler.command, *flags, str(ROOT / "csrc/host.cpp"), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(library))


def convert(function: Any, source: torch.Tensor, dtype: torch.dtype, scalar: int) -> torch.Tensor:
    out = torch.empty(source.shape, dtype=dtype)
    pointers = (ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    function(*pointers, ctypes.c_int64(source.numel()), scalar)
    return out


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, but for the payload of a NaN."""
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    integer = torch.int16 if want.element_size() == 2 else torch.int32
    assert torch.equal(got.view(integer)[~nan], want.view(integer)[~nan])


def fp32_patterns() -> torch.Tensor:
    """Every upper half with lower halves around ties and bf16's and fp16's steps; all signs and exponents."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    every = (upper[:, None] | lower).flatten()
    # fp16's subnormals round at every bit position: a run of patterns around each of their ties.
    ties = (torch.arange(1024, dtype=torch.float64) + 0.5) * 2.0**-24
    bits = ties.float().view(torch.int32).to(torch.int64)
    near = (bits[:, None] + torch.arange(-4, 4)).flatten()
    every = torch.cat([every, near, near | 1 << 31])
    return torch.where(every >= 1 << 31, every - (1 << 32), every).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("scalar", [0, 1])
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_widen(host: ctypes.CDLL, name: str, scalar: int) -> None:
    every = torch.arange(1 << 16).to(torch.int16).view(DTYPES[name])
    assert_same(convert(host[f"widen_{name}"], every, torch.float32, scalar), every.float())


@pytest.mark.parametrize("scalar", [0, 1])
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_narrow(host: ctypes.CDLL, name: str, scalar: int) -> None:
    values = fp32_patterns()
    assert values.numel() % 16 == 0
    assert_same(convert(host[f"narrow_{name}"], values, DTYPES[name], scalar), values.to(DTYPES[name]))


def test_fp32_passes_through(host: ctypes.CDLL) -> None:
    values = fp32_patterns()
    for name in ("widen_f32", "narrow_f32"):
        got = convert(host[name], values, torch.float32, 0)
        assert torch.equal(got.view(torch.int32), values.view(torch.int32))


def code_patterns(dtype: torch.dtype) -> torch.Tensor:
    """What codes are made from: `fp32_patterns`, which has every bf16; every fp16; ties of the codes and around."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    known = torch.from_numpy(decode(torch.arange(256, dtype=torch.uint8).view(dtype)))
    known = known[known.isfinite()].sort().values
    ties = torch.cat([(known[1:] + known[:-1]) / 2, known])
    near = (ties.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)).view(torch.float32).flatten()
    values = torch.cat([fp32_patterns(), every, near])
    return torch.cat([values, values.new_zeros(-values.numel() % 16)])


@pytest.mark.parametrize("scalar", [0, 1])
@pytest.mark.parametrize("name", CODES)
def test_codes(host: ctypes.CDLL, name: str, scalar: int) -> None:
    """Every byte, NaNs included: there is one code for them."""
    values = code_patterns(CODES[name])
    got = convert(host[f"narrow_{name}"], values, CODES[name], scalar)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        want = encode(values.numpy(), CODES[name])
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("name", CODES)
def test_every_code(host: ctypes.CDLL, name: str) -> None:
    """All 256 have the value that their format says; those of a number come back from it."""
    every = torch.arange(256, dtype=torch.uint8)
    wide = convert(host[f"widen_{name}"], every, torch.float32, 0)
    assert_same(wide, torch.from_numpy(decode(every.view(CODES[name]))))
    back = convert(host[f"narrow_{name}"], wide, CODES[name], 0).view(torch.uint8)
    numbers = wide.isfinite() & (wide != -128)
    assert torch.equal(back[numbers], every[numbers])


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_ragged_stays_inside(host: ctypes.CDLL, bits: int) -> None:
    dtype = {8: torch.int8, 16: torch.int16, 32: torch.int32}[bits]
    source = torch.arange(1, 9, dtype=dtype)
    for count in range(-1, 9):
        out = torch.zeros(8, dtype=dtype)
        host[f"copy_{bits}"](ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(out.data_ptr()), count)
        kept = max(0, count)
        assert torch.equal(out[:kept], source[:kept]) and not out[kept:].any()
