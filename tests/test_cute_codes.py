"""Codes of the interpreted CuTe kernels, to the byte: special values, scales, padding, and every conversion."""

import math

import numpy as np
import pytest
import torch

from flashnorm.kernels import tile as tiles
from flashnorm.kernels.tile import RowTile
from flashnorm.model import formats
from flashnorm.program import Affine, LoadRow, QuantBlocks, QuantTensor, Rms, Round, RowProgram
from tests import cute_emulator as emulator
from tests.cute_launch import check, dtypes_of

pytestmark = pytest.mark.cpu_only

pytest.importorskip("cutlass")  # nothing is compiled, but its tracing code runs

B, F, S = "bfloat16", "float16", "float32"
E4, E5, I8 = "float8_e4m3fn", "float8_e5m2", "int8"


# ------------------------------------------------------------------ special values, to the byte
def special(hidden_size):
    """Rows of zeros of both signs, infinities, NaN of both signs, the largest, subnormal and ordinary numbers."""

    def fill(x):
        x[0] = 0.0
        x[1] = -0.0
        x[2, ::3], x[2, 1::3] = 0.0, -0.0
        x[3, hidden_size // 2] = math.inf
        x[4, 0] = -math.inf
        x[5, -1] = math.nan
        x[6, 0] = -math.nan
        x[7] = torch.finfo(x.dtype).max
        x[8] = torch.finfo(x.dtype).tiny / 8
        x[9, :130] = 0.0
        x[10, :5] = -1e-38
        x[11] *= 1e-4

    return fill


def norm(store):
    return RowProgram(LoadRow(), Rms(), (Affine(),), store)


STORES = (
    QuantTensor(),
    QuantTensor(on_device=True),
    *(QuantBlocks(block, 1e-10, cap=cap) for block, cap in ((128, ""), (0, "value"), (0, "device"))),
    QuantBlocks(128, 1e-4, ratio=True, side=True),
    QuantBlocks(128, 1e-10, ue8m0=True),
    QuantBlocks(0, 1e-10, ue8m0=True),
    QuantBlocks(128, 1e-10, ue8m0=True, packed=True),
)


@pytest.mark.parametrize("out", (E4, E5, I8))
@pytest.mark.parametrize("store", STORES, ids=str)
def test_special_values(store, out):
    """On architectures with instructions for codes and without; with and without a weight that is special itself."""
    if isinstance(store, QuantTensor) and out == I8:
        pytest.skip("one scale for the tensor is for 8-bit floats")
    for hidden_size, x, maps in (
        (384, S, ()),
        (300, B, (Round(),)),
        (100, F, (Affine(), Round())),
        (1664, S, (Affine(),)),
    ):
        program = RowProgram(LoadRow(), Rms(), maps, store)
        change = {"x": special(hidden_size)}
        if maps and isinstance(maps[0], Affine):
            change["weight"] = lambda w: w[:9].copy_(
                torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-30, -1e-30, math.inf, -1, 2])
            )
        for sm in (80, 90):
            tile = RowTile(hidden_size, 4, 16, 64)
            check(
                program, dtypes_of(program, x=x, weight=S, out=out), hidden_size, tile, rows=13, padding=3,
                column=True, change=change, sm=sm,
            )  # fmt: skip


@pytest.mark.parametrize("scale", (1e-45, 1e-39, 1e-10, 3e38, 0.0, -0.5, math.inf, math.nan))
def test_scales_on_the_device_follow_ieee(scale):
    program = norm(QuantTensor(on_device=True))
    for kind in (S, B, F):
        change = {"scale": lambda s: s.fill_(scale)}
        check(program, dtypes_of(program, out=E4, scale=kind), 64, RowTile(64, 8, 8, 32), change=change)


@pytest.mark.parametrize("cap", (1e-45, 1e-38, 1e-10, 0.5, 3e38, math.inf, math.nan))
def test_caps(cap):
    for ue8m0 in (False, True):
        program = norm(QuantBlocks(0, 1e-10, cap="device", ue8m0=ue8m0))
        for out in (E4, I8):
            change = {"scale_ub": lambda s: s.fill_(cap)}
            check(program, dtypes_of(program, out=out, scale_ub=S), 64, RowTile(64, 8, 8, 32), change=change)


@pytest.mark.parametrize("hidden_size", (100, 128, 129, 384, 520, 1000))
def test_packed_scales_and_their_padding(hidden_size):
    """Bytes of blocks that do not exist, and rows of padding, become zeros; rows past them are not touched."""
    program = norm(QuantBlocks(128, 1e-10, ue8m0=True, packed=True))
    vec = 8 if hidden_size % 8 == 0 else 1
    for rows, padding in ((1, 3), (3, 1), (5, 7), (4, 0)):
        for t, n in ((16, 32), (16, 128), (64, 64)):
            if t <= tiles.lanes(hidden_size):
                tile = RowTile(hidden_size, vec, t, n)
                check(program, dtypes_of(program), hidden_size, tile, rows=rows, padding=padding, column=True)


# ------------------------------------------------------------------ conversions, exhaustively
def convert(values, dtype, sm):
    """Codes of fp32 values by the kernels' own arithmetic, interpreted."""
    from flashnorm.kernels import codec

    values = np.ascontiguousarray(values, np.float32).reshape(-1, 4)
    machine = emulator.Machine(1, values.shape[0], np.zeros(1, np.uint8), None, None)
    with emulator.patched(machine):
        (regs,) = codec.encode([values[:, i] for i in range(4)], dtype, sm)
    return regs.reshape(-1).astype(np.uint32).view(np.uint8)


def numbers():
    """All bf16 values; every number halfway between two codes of any format, and its neighbours; both signs."""
    every = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    halves = []
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(128, dtype=torch.uint8).view(dtype).double()
        codes = codes[codes.isfinite()].sort().values
        halves += [codes, (codes[1:] + codes[:-1]) / 2, codes[-1:] + (codes[-1:] - codes[-2:-1]) / 2]
    halves += [torch.arange(-260, 261) / 2.0]
    near = torch.cat(halves).float()
    near = torch.cat([near, near.nextafter(torch.tensor(0.0)), near.nextafter(torch.tensor(1e9))])
    near = torch.cat([near, -near, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38])]).numpy()
    out = np.concatenate([every, near])
    return np.concatenate([out, np.zeros(-out.size % 4, np.float32)])


@pytest.mark.parametrize("dtype", (E4, E5, I8))
def test_codes_of_every_number_that_matters(dtype):
    """The integer arithmetic for architectures without instructions gives what the instructions give."""
    values = numbers()
    want = formats.encode(torch.from_numpy(values), getattr(torch, dtype)).view(torch.uint8).numpy()
    np.testing.assert_array_equal(convert(values, dtype, 80), want)


def test_int8_widens_exactly():
    from flashnorm.kernels import codec

    every = np.arange(-128, 128, dtype=np.int8)
    machine = emulator.Machine(1, 64, np.zeros(1, np.uint8), None, None)
    with emulator.patched(machine):
        wide = codec.unpack([every.view(np.uint32)[None, :]], "int8")
    np.testing.assert_array_equal(np.stack(wide, -1).reshape(-1), every.astype(np.float32))
