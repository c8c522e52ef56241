"""NVFP4, MXFP4, MXFP8 and SiLU of the CUDA route, with the sequences that it has in place of what the host does.

Run on the CPU over an emulation of the GPU's threads: every byte is the model's, special values too; SiLU is near it.
"""

from __future__ import annotations

import math

import pytest
import torch

from flashnorm import model
from flashnorm.program import (
    TILE_ROWS,
    Affine,
    BlockScales,
    Cast,
    LoadRow,
    QuantBlocks,
    QuantNvfp4,
    QuantTensor,
    Rms,
    RowProgram,
    Silu,
)
from tests.csrc_emulated import Emulated, build

pytestmark = pytest.mark.cpu_only

S, E4, U = "float32", "float8_e4m3fn", "uint8"


def norm(store: BlockScales | Cast | QuantTensor, *maps: Affine | Silu) -> RowProgram:
    return RowProgram(LoadRow(), Rms(), (Affine(), *maps), store)


PROGRAMS = {
    "nvfp4": (norm(QuantNvfp4(16, "value")), (S, S, U, U)),
    "nvfp4-bare": (norm(QuantNvfp4(32, layout="swizzled")), (S, S, U, U)),
    "mxfp4": (norm(QuantBlocks(32, 0.0, ue8m0=True, fp4=True)), (S, S, U, U)),
    "mxfp4-ocp": (norm(QuantBlocks(32, 0.0, ue8m0=True, fp4=True, ocp=True)), (S, S, U, U)),
    "mxfp8": (norm(QuantBlocks(32, 0.0, ue8m0=True)), (S, S, E4, U)),
    "silu": (norm(Cast(), Silu()), (S, S, S)),
    "silu-fp8": (norm(QuantTensor(), Silu()), (S, S, E4)),
    "silu-fp4": (norm(QuantNvfp4(16), Silu()), (S, S, U, U)),
}
GAINS = (1.0, 173.25, 1e-30, 1e20, 2.0**99, 2.0**101, 3.4e38)


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Emulated]:
    return build(tmp_path_factory.mktemp("emulated"), PROGRAMS)


def special(hidden: int) -> torch.Tensor:
    """Rows of zeros of both signs, infinities, NaN, and numbers of every size."""
    x = torch.randn(40, hidden, generator=torch.Generator().manual_seed(hidden))
    x[0], x[1] = 0.0, -0.0
    x[2, ::3], x[2, 1::3] = 0.0, -0.0
    x[3, hidden // 2], x[4, 0], x[5, -1] = math.inf, -math.inf, math.nan
    x[6] = torch.finfo(torch.float32).max
    x[7] = 2.0**-149
    x[8, :40], x[9, 5:40] = 0.0, -0.0
    x[10, :] = torch.tensor([0.5, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0]).repeat(hidden // 8)
    x[11:30] *= torch.logspace(-30, 18, 19)[:, None]
    return x


def weights(hidden: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(hidden, generator=generator)
    if seed:
        w *= torch.logspace(-42, 36, hidden)[torch.randperm(hidden, generator=generator)]
        w[:5] = torch.tensor([0.0, -0.0, math.inf, 1e38, -1e38])
    elif hidden > 64:
        w[:32] *= 30
    return w


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_byte(units: dict[str, Emulated], name: str) -> None:
    program, _ = PROGRAMS[name]
    for hidden in (64, 96, 512):
        for seed in (0, 1):
            for gain in GAINS if "global_scale_value" in program.scalars() else GAINS[:1]:
                given = operands(program, PROGRAMS[name][1], hidden, seed)
                scalars = {"eps": 1e-6, "global_scale_value": gain, "scale_value": 0.05}
                wanted = model.canonical(program, given, scalars)
                units[name].force()
                units[name].launch(*(scalars[s] for s in program.scalars()), False, *given.values())
                found = {n: given[n].view(t.dtype).view(t.shape) for n, t in wanted.items()}
                assert model.agree(program, found, wanted), (name, hidden, seed, gain)


def operands(program: RowProgram, dtypes: tuple[str, ...], hidden: int, seed: int) -> dict[str, torch.Tensor]:
    x = special(hidden)
    out = {}
    for operand, dtype in zip(program.operands(), dtypes, strict=True):
        if operand.name == "x":
            out["x"] = x
        elif operand.name == "weight":
            out["weight"] = weights(hidden, seed)
        else:
            shape: tuple[int, ...] = (len(x), hidden // 2 if operand.kind == "pairs" else hidden)
            if isinstance(program.store, BlockScales) and operand.name == "scale":
                rows = -(-len(x) // TILE_ROWS) * TILE_ROWS if operand.kind == "swizzled" else len(x)
                shape = (rows, program.store.columns(hidden, operand.kind))
            out[operand.name] = torch.full(shape, 77, dtype=torch.uint8)
            if dtype == "float32":
                out[operand.name] = torch.full(shape, math.nan)
            elif dtype != "uint8":
                out[operand.name] = out[operand.name].view(getattr(torch, dtype))
    return out
