"""The kernels of the CUDA route, run on the CPU over an emulation of the GPU's threads.

Every launch plan must give the bits of the canonical arithmetic and touch nothing but its rows. Slow
(a context switch a shuffle), hence few rows; what needs real hardware is said in emulated_device.h.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from flashnorm.program import AddResidual, Affine, Cast, LoadRow, Rms, RowProgram, SaveRstd
from tests.canonical import rmsnorm_bits
from tests.csrc_emulated import Emulated, build

pytestmark = pytest.mark.cpu_only

PLAIN = RowProgram(LoadRow(), Rms(), (Affine(),), Cast(), (SaveRstd(),))
GEMMA_ADD = RowProgram(AddResidual(), Rms(), (Affine(offset=1.0),), Cast("x"))
LLAMA_ADD = RowProgram(AddResidual(rounded=True), Rms(), (Affine(round_norm=True),), Cast("x"))
# name: program, dtypes of its operands in order
UNITS: dict[str, tuple[RowProgram, tuple[str, ...]]] = {
    "plain": (PLAIN, ("bfloat16", "float32", "bfloat16", "float32")),
    "gemma_add": (GEMMA_ADD, ("bfloat16", "float16", "bfloat16")),
    "llama_add": (LLAMA_ADD, ("float16", "float32", "bfloat16")),
}


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Emulated]:
    return build(tmp_path_factory.mktemp("plans"), UNITS)


def run(emulated: Emulated, rows: tuple[int, ...], hidden_size: int, *, pad: int = 0, row_weight: bool = False) -> None:
    """One launch on poisoned outputs, judged bit for bit."""
    generator = torch.Generator().manual_seed(hash((rows, hidden_size, pad)) % 2**31)
    padded: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for operand, dtype_name in zip(emulated.program.operands(), emulated.dtypes, strict=True):
        dtype = getattr(torch, dtype_name)
        if operand.kind == "per_row":
            tensors[operand.name] = torch.full(rows, float("nan"), dtype=dtype)
            continue
        shape = (*rows, hidden_size + pad) if operand.kind == "row" or row_weight else (hidden_size,)
        if operand.mode == "out":
            values = torch.full(shape, float("nan"), dtype=dtype)
        else:
            values = torch.randn(shape, generator=generator).to(dtype)
        padded[operand.name] = values
        tensors[operand.name] = values[..., :hidden_size]
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    guards = {name: tensor[..., hidden_size:].clone() for name, tensor in padded.items()}
    affine = emulated.program.maps[0]
    assert isinstance(affine, Affine)
    load = emulated.program.load
    numerics = "hf-llama" if affine.round_norm else "flashinfer"
    want = rmsnorm_bits(
        before["x"], before["weight"], before.get("residual"), eps=1e-5, numerics=numerics, offset=affine.offset
    )
    emulated.launch(1e-5, False, *tensors.values())
    out = tensors["x"] if isinstance(load, AddResidual) else tensors["out"]
    if isinstance(load, AddResidual):
        assert want.residual is not None
        assert torch.equal(tensors["residual"], want.residual)
    else:
        assert torch.equal(tensors["rstd"], want.rstd)
    if out.dtype == before["x"].dtype:
        assert torch.equal(out, want.out)
    else:
        assert torch.equal(out.to(before["x"].dtype), want.out)
    assert torch.equal(tensors["weight"], before["weight"])
    for name, guard in guards.items():
        beyond = padded[name][..., hidden_size:]
        assert torch.equal(beyond.nan_to_num(), guard.nan_to_num()), f"{name}: written past a row"


@pytest.mark.parametrize("name", list(UNITS))
@pytest.mark.parametrize("hidden_size", [1, 7, 8, 9, 16, 111, 128, 136, 248, 256, 576, 1000, 2048, 2056, 4095])
def test_picked_plan(units: dict[str, Emulated], name: str, hidden_size: int) -> None:
    units[name].force()
    run(units[name], (3,), hidden_size)


@pytest.mark.parametrize("sm", [75, 90])
@pytest.mark.parametrize("hidden_size", [7168, 8192, 8200, 16384, 20000, 20004, 40960, 65536, 131072])
def test_picked_plan_of_wide_rows(units: dict[str, Emulated], hidden_size: int, sm: int) -> None:
    emulated = units["plain" if hidden_size % 2048 else "gemma_add"]
    emulated.force(sm=sm, shared_memory=64 * 1024 if sm == 75 else 227 * 1024)
    run(emulated, (2,) if hidden_size < 16384 else (1,), hidden_size)


# threads a row, rows a CTA, CTAs a row, lanes a thread, groups a lane
PLANS = {
    128: [(16, 2, 1, 1, 1), (16, 16, 1, 1, 1)],
    264: [(64, 4, 1, 1, 1), (32, 4, 1, 2, 1)],
    576: [(128, 1, 1, 1, 1), (32, 4, 1, 4, 1)],
    1536: [(256, 1, 1, 1, 1), (32, 2, 1, 8, 1)],
    4096: [(512, 1, 1, 1, 1), (256, 1, 1, 2, 1)],
    7168: [(256, 1, 1, 4, 1), (512, 1, 1, 2, 1)],
    16384: [(512, 1, 1, 2, 2), (1024, 1, 1, 0, 0), (128, 1, 8, 0, 0)],
    30000: [(512, 1, 1, 2, 4), (512, 1, 2, 1, 4), (128, 1, 8, 0, 0)],
    60000: [(256, 1, 4, 1, 8)],
    70000: [(128, 1, 8, 1, 16)],
    # rows that are not whole aligned groups
    100: [(16, 8, 1, 1, 1)],
    2047: [(256, 1, 1, 1, 1)],
    4095: [(256, 1, 1, 2, 1), (512, 1, 1, 1, 1)],
    7777: [(256, 1, 1, 4, 1)],
}


@pytest.mark.parametrize(("hidden_size", "plan"), [(h, p) for h, plans in PLANS.items() for p in plans])
@pytest.mark.parametrize("name", ["plain", "llama_add"])
def test_forced_plan(units: dict[str, Emulated], name: str, hidden_size: int, plan: tuple[int, ...]) -> None:
    units[name].force(plan=plan)
    fits = 8 * plan[3] * plan[4] * (2 if name == "plain" else 4) <= 256
    if fits:
        run(units[name], (3,) if hidden_size < 8192 else (1,), hidden_size, pad=8)
    else:
        with pytest.raises(RuntimeError, match="no kernel"):
            run(units[name], (1,), hidden_size, pad=8)


@pytest.mark.parametrize("shared_memory", [227 * 1024, 2048])
@pytest.mark.parametrize("hidden_size", [8264, 9001, 17000])
def test_staged_and_read_twice(units: dict[str, Emulated], hidden_size: int, shared_memory: int) -> None:
    for name in ("gemma_add", "llama_add"):
        units[name].force(shared_memory=shared_memory, plan=(1024, 1, 1, 0, 0))
        run(units[name], (2,), hidden_size)


@pytest.mark.parametrize("pad", [8, 4, 2, 1])
def test_layouts(units: dict[str, Emulated], pad: int) -> None:
    units["plain"].force()
    run(units["plain"], (2, 5), 264, pad=pad, row_weight=True)
    run(units["plain"], (5,), 100, pad=pad)


# Of programs: heavy, layered, large, modulated, gated, dense, rows abreast.
KINDS = (
    *((heavy, layered, False, False, False, 0, 1) for heavy in (False, True) for layered in (False, True)),
    *((True, True, True, True, gated, 0, abreast) for gated in (False, True) for abreast in (1, 2)),
    (False, True, True, True, True, 0, 1),
    *((True, False, False, False, False, dense, 1) for dense in (1, 2, 4)),
    *((True, False, True, True, True, dense, 1) for dense in (2, 4)),
    *((heavy, False, True, False, False, dense, 1) for heavy in (False, True) for dense in (0, 1)),
    (True, True, False, False, False, 0, 2),
)


def test_no_plan_is_illegal(units: dict[str, Emulated]) -> None:
    """For every shape and device: a whole number of warps, at most 1024 threads, the lanes of the row exactly."""
    picked, has_kernel = (units["plain"].module[name] for name in ("picked", "has_kernel"))
    devices = ((75, 40, 65536), (80, 108, 166912), (90, 132, 232448), (120, 188, 101376))
    narrow = (1, 8, 9, 64, 72, 128, 129, 256, 576, 1024, 2048, 3072, 4096)
    widths = (*narrow, 7168, 8192, 8200, 16384, 24576, 65536, 65568, 131072, 262144)
    for (sm, processors, memory), rows, h in itertools.product(devices, (1, 7, 64, 1000, 10**6), widths):
        total = min(1024, 1 << max(0, (-(-h // 8) - 1).bit_length()))
        widths_here = (8, 4, 1) if h % 8 == 0 else (1,)
        for width, kept, kind in itertools.product(widths_here, (2, 4), KINDS):
            _, _, large, modulated, _, dense, most_abreast = kind
            if h % (8 * dense or 1):  # a block of scales is whole
                continue
            if most_abreast > 1 and kept == 4 and not modulated:  # `rows_abreast` has none
                continue
            plan = [picked(sm, processors, memory, rows, h, width, kept, *kind, field) for field in range(6)]
            threads, cta_rows, cluster, lanes, groups, abreast = plan
            shape = f"sm {sm}, {rows} x {h}, width {width}, {kept} bytes"
            where = f"{shape}, heavy, layered, large, modulated, gated, dense, abreast {kind}: {plan}"
            assert threads * cta_rows % 32 == 0 and threads * cta_rows <= 1024, where
            assert cluster == 1 or (sm >= 90 and cta_rows == 1 and threads >= 32), where
            held = threads * cluster * max(1, lanes)
            assert held == total or (lanes == 0 and large and total // held in (2, 4)), where  # streamed
            assert dense or lanes <= 1 or threads >= 32 or threads * lanes <= 32, where
            assert lanes == 0 or groups * 1024 * 8 >= h or groups == 1, where
            assert abreast <= most_abreast and (lanes > 1 or abreast == 1), where
            assert has_kernel(*plan, h, kept, width == 8, *kind), where
