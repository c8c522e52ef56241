"""The device bodies of csrc/'s conversions and activations, over every pattern that the host bodies are tried with.

Instructions of this GPU, and the integer arithmetic of older ones: the same source built for this GPU and for sm_80.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashnorm.jit.toolchain import find_host_compiler, find_nvcc, find_tvm_ffi, nvcc_flags
from tests.canonical.arithmetic import narrow
from tests.canonical.codes import encode
from tests.test_csrc_host import CODES, DTYPES, assert_same, code_patterns, fp32_patterns
from tests.tolerance import EXP_TO, EXP_ULPS

ROOT = Path(__file__).resolve().parent

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["own", "sm_80"])
def device_code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The functions of device.cu for this GPU, or as PTX of sm_80 that the driver translates."""
    import tvm_ffi

    nvcc, host, ffi = find_nvcc(), find_host_compiler(), find_tvm_ffi()
    if not nvcc or not host or not ffi:
        pytest.skip(f"{nvcc}; {host}; {ffi}")
    major, minor = torch.cuda.get_device_capability()
    if request.param == "sm_80" and major < 8:
        pytest.skip("this GPU is older than sm_80")
    target = nvcc.target(f"sm_{major}{minor}")
    if not target:
        pytest.skip(str(target))
    flags = [flag for flag in nvcc_flags(nvcc, target, host) if not flag.startswith("-gencode")]
    arch = f"sm_{major}{minor}" if request.param == "own" else "compute_80"
    library = tmp_path_factory.mktemp("device") / f"device_{request.param}.so"
    includes = [f"-I{ROOT.parent / 'csrc'}", *(f"-I{path}" for path in ffi.include_dirs)]
    command = [str(nvcc.path), *flags, f"-arch={arch}", *includes, "-shared", str(ROOT / "csrc/device.cu")]
    command += ["-o", str(library), f"-L{ffi.lib_dir}", "-ltvm_ffi"]
    subprocess.run(command, check=True, capture_output=True)
    return tvm_ffi.load_module(str(library))


def converted(function: Any, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=dtype, device="cuda")
    function(values.cuda(), out)
    return out.cpu()


@pytest.mark.parametrize("name", CODES)
def test_codes(device_code: Any, name: str) -> None:
    values = code_patterns(CODES[name])
    got = converted(device_code[f"narrow_{name}"], values, CODES[name])
    with np.errstate(invalid="ignore"):  # signalling NaNs
        want = encode(values.numpy(), CODES[name])
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_16_bits(device_code: Any, name: str) -> None:
    values = fp32_patterns()
    assert_same(converted(device_code[f"narrow_{name}"], values, DTYPES[name]), narrow(values.numpy(), DTYPES[name]))
    every = torch.arange(1 << 16).to(torch.int16).view(DTYPES[name])
    assert_same(converted(device_code[f"widen_{name}"], every, torch.float32), every.float())


def test_int8_widens(device_code: Any) -> None:
    every = torch.arange(-128, 128).to(torch.int8)
    assert torch.equal(converted(device_code["widen_int8"], every, torch.float32), every.float())


@pytest.mark.parametrize("name", ["silu", "sigmoid"])
def test_activations_of_every_number(device_code: Any, name: str) -> None:
    """By the approximations that 16-bit rows take: all of fp32 between -80 and 80, against the formula in fp64."""
    ends = torch.tensor(EXP_TO).view(torch.int32).item() + 1
    worst = 0.0
    for first in range(0, ends, 1 << 26):
        bits = torch.arange(first, min(first + (1 << 26), -(-ends // 8) * 8), dtype=torch.int32, device="cuda")
        for y in (bits.view(torch.float32), -bits.view(torch.float32)):
            out = torch.empty_like(y)
            device_code[name](y, out)
            exact = (y.double() if name == "silu" else 1.0) / (1 + torch.exp(-y.double()))
            ulp = torch.ldexp(torch.ones_like(exact), torch.frexp(exact.abs().clamp(min=2.0**-126))[1] - 24)
            worst = max(worst, float(((out.double() - exact).abs() / ulp).max()))
    print(f"{name}: {worst:.3f} ulp")
    assert worst <= EXP_ULPS
