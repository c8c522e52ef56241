"""The CPU kernels of every kind of stage, below the operators: bits, layouts, threads, and what they refuse.

The stages are those that the CUDA route compiles. Plain RMSNorm is `test_cpu_kernel.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch

from flashnorm.backends import cpu
from flashnorm.jit.codegen import CPP_TYPES, unit
from flashnorm.jit.cpu import detect_cpu
from flashnorm.jit.toolchain import find_host_compiler
from flashnorm.program import Affine, LoadRow, QuantBlocks, Rms, Round, RowProgram
from tests.csrc_programs import EPS, PROGRAMS, Call, prepare

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(
        not find_host_compiler() or detect_cpu().reason_unserved() is not None, reason="the cpu route is not available"
    ),
]

WIDTHS = (*range(1, 300, 7), 8, 16, 64, 128, 136, 248, 256, 257, 512, 576, 1000, 4096, 8192, 8200, 16384, 24576, 65537)


@pytest.fixture(scope="module", autouse=True)
def built(request: pytest.FixtureRequest) -> None:
    """The kernels of this run, side by side: one by one they would take most of the time."""
    given = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = {params.get("name") for params in given} & set(PROGRAMS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: cpu.spec(*PROGRAMS[name]).build(), names))


@cache
def kernel(name: str) -> Callable[..., Any]:
    return cpu.spec(*PROGRAMS[name]).build_and_load()


def launch(call: Call) -> None:
    kernel(call.name)(*call.scalars(), False, *call.tensors.values())
    call.check()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_width(name: str, full: bool) -> None:
    for h in sorted({*WIDTHS, *(range(1, 300) if full else ())}):
        launch(prepare(name, (17 if h < 9000 else 3,), h, bad_index=True))


@pytest.mark.parametrize("h", [1, 100, 129, 576])
@pytest.mark.parametrize("name", PROGRAMS)
def test_layouts(name: str, h: int) -> None:
    """Odd starts and row strides, three dimensions, weights per row, scales in rows; threads share the work."""
    for rows in ((37,), (5, 9)):
        for pad, start in ((0, 1), (3, 0), (5, 3)):
            launch(prepare(name, rows, h, pad=pad, start=start, row_weight=True, columns=False))


@pytest.mark.parametrize("name", ["layernorm", "block_quant", "dynamic_row", "dynamic_128_packed", "int8", "indexed"])
@pytest.mark.parametrize("start", [0, 1], ids=["aligned", "misaligned"])
def test_streamed_stores(name: str, start: int) -> None:
    """So many elements that stores go past the caches."""
    launch(prepare(name, (1030,), 4100, start=start))


def test_no_rows() -> None:
    """Nothing but padding: it is zeros all the same."""
    launch(prepare("block_quant", (0,), 256))
    launch(prepare("dynamic_128_packed", (3, 0), 256))


def test_every_dtype_of_a_scale() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        program, dtypes = PROGRAMS["add_quant"]
        PROGRAMS["add_quant_" + dtype] = (program, (*dtypes[:-1], dtype))
        try:
            launch(prepare("add_quant_" + dtype, (9,), 200))
        finally:
            del PROGRAMS["add_quant_" + dtype]


def test_a_sum_of_infinities_and_overflow() -> None:
    """The largest finite code with its sign; scales of a block with an infinity are finite."""
    call = prepare("block_quant", (1,), 256)
    call.tensors["x"].copy_(torch.linspace(-2e38, 2e38, 256))
    call.tensors["residual"].copy_(call.tensors["x"])
    launch(Call(call.name, call.program, call.dtypes, call.tensors, call.buffers))


def refused(name: str, change: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
    call = prepare(name, (6,), 256)
    tensors = {**call.tensors, change: tensor(call.tensors[change])}
    with pytest.raises(ValueError):
        kernel(name)(*call.scalars(), False, *tensors.values())


def test_operands_are_checked() -> None:
    """What memory safety hangs on."""
    refused("block_quant", "out", lambda t: t.view(torch.uint8))
    refused("block_quant", "out", lambda t: t.view(torch.float8_e5m2))
    refused("block_quant", "out", lambda t: t.view(torch.int8))
    refused("block_quant", "scale", lambda t: t[:5])
    refused("block_quant", "scale", lambda t: t[:, :1])
    refused("block_quant", "scale", lambda t: t[0])
    refused("block_quant", "normed_out", lambda t: t.view(torch.float16))
    refused("dynamic_row", "out", lambda t: t.view(torch.uint8))
    refused("indexed", "row_index", lambda t: t.long())
    refused("indexed", "row_index", lambda t: t[:3])
    refused("indexed", "x", lambda t: t[0])
    refused("indexed", "x", lambda t: t[:, :100])
    refused("int8_indexed", "input_scale", lambda t: t[:3])
    refused("int8", "x", lambda t: t.view(torch.uint8))
    refused("gemma_quant", "scale", lambda t: t.expand(2))


# ------------------------------------------------------------------ the text of a unit
def test_units_say_what_they_are_made_of() -> None:
    program = RowProgram(LoadRow(), Rms(), (Affine(), Round()), QuantBlocks(128, 1e-10, cap="device", side=True))
    dtypes = ("float16", "float32", "float8_e5m2", "float32", "bfloat16", "float16")
    text = unit(program, dtypes, "cuda")
    assert "static constexpr Cap kCap = Cap::kDevice;" in text and "char" not in text
    assert "Operands operands(tensors, 6, 0);" in text
    assert "operands.blocks<float>(3, Store::columns(operands.hidden_size()))" in text
    assert text.count("using Input = f16;") == 5  # load, statistics, two maps, store
    none = unit(RowProgram(LoadRow(), Rms(), (), QuantBlocks(0, 1e-10)), ("float16", "int8", "float32"), "cpu")
    assert "Cap kCap = Cap::kNone;" in none


def test_rows_from_a_pool_take_their_number_from_the_output() -> None:
    program, dtypes = PROGRAMS["int8_indexed"]
    text = unit(program, dtypes, "cpu")
    names = [operand.name for operand in program.operands()]
    assert f"Operands operands(tensors, {len(names)}, {names.index('out')});" in text
    assert "operands.pool<const int8_t>(0)" in text and "operands.per_pool<const float>(2)" in text
    assert "using Input = f16;" in text  # neither int8 nor fp8 is a T: the weight's dtype is


def test_a_dtype_without_a_type() -> None:
    with pytest.raises(KeyError):
        unit(PROGRAMS["layernorm"][0], ("float64", "float32", "float32", "float64", "float32"), "cpu")
    assert set(CPP_TYPES) >= {"float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "int64"}


def test_eps_reaches_every_statistic() -> None:
    """A row of one value has variance 0: what is left is eps alone."""
    call = prepare("layernorm", (1,), 64)
    call.tensors["x"].fill_(3.0)
    kernel("layernorm")(*call.scalars(), False, *call.tensors.values())
    assert call.tensors["rstd"].item() == pytest.approx(EPS**-0.5, rel=1e-6)
