"""The CUDA route's kernels of every kind of stage, run on the CPU over an emulation of the GPU's threads.

Codes, scales, padding, statistics and saved values to the bit, for the plans that would be picked and for those that
would not. `test_csrc_plans.py` has the same of plain RMSNorm, and says what an emulation cannot show.
"""

from __future__ import annotations

import pytest

from tests.csrc_emulated import Emulated, build
from tests.csrc_programs import PROGRAMS, Call, prepare

pytestmark = pytest.mark.cpu_only

# One of every stage, store and way to load; all programs with --full.
SAMPLE = ("layernorm", "layernorm_quant", "layernorm_bare", "add_layernorm", "gemma_quant", "block_quant",
          "dynamic_128_packed", "dynamic_row_capped", "dynamic_row", "indexed", "int8_indexed")  # fmt: skip


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory, full: bool) -> dict[str, Emulated]:
    names = PROGRAMS if full else SAMPLE
    return build(tmp_path_factory.mktemp("emulated"), {name: PROGRAMS[name] for name in names})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", PROGRAMS if metafunc.config.getoption("--full") else SAMPLE)


def launch(emulated: Emulated, call: Call) -> None:
    emulated.launch(*call.scalars(), False, *call.tensors.values())
    call.check()


@pytest.mark.parametrize("h", [1, 5, 8, 9, 24, 64, 72, 111, 128, 136, 256, 264, 300, 576, 1000, 1032, 2048, 4095, 4096])
def test_picked_plan(units: dict[str, Emulated], name: str, h: int) -> None:
    units[name].force()
    rows = (11,) if h < 600 else (3,)
    launch(units[name], prepare(name, rows, h, bad_index=True))
    launch(units[name], prepare(name, rows, h, pad=3, start=1, columns=False, row_weight=True))


@pytest.mark.parametrize("sm", [75, 90])
@pytest.mark.parametrize("h", [7168, 8200, 16384, 20001, 40960, 131072])
def test_picked_plan_of_wide_rows(units: dict[str, Emulated], name: str, h: int, sm: int) -> None:
    units[name].force(sm=sm, shared_memory=64 * 1024 if sm == 75 else 227 * 1024)
    launch(units[name], prepare(name, (1,), h))


# threads a row, rows a CTA, CTAs a row, lanes a thread, groups a lane
PLANS = {
    40: [(8, 4, 1, 1, 1), (2, 16, 1, 4, 1)],
    128: [(16, 2, 1, 1, 1), (4, 8, 1, 4, 1)],
    200: [(32, 4, 1, 1, 1), (8, 16, 1, 4, 1)],
    576: [(128, 1, 1, 1, 1), (32, 4, 1, 4, 1)],
    1536: [(32, 2, 1, 8, 1), (64, 2, 1, 4, 1)],
    4096: [(256, 1, 1, 2, 1), (128, 1, 1, 4, 1)],
    7168: [(256, 1, 1, 4, 1), (512, 1, 1, 2, 1), (128, 1, 1, 8, 1)],
    16384: [(512, 1, 1, 2, 2), (256, 1, 1, 4, 2), (1024, 1, 1, 0, 0)],
    24576: [(512, 1, 1, 2, 4), (128, 1, 4, 2, 4), (512, 1, 2, 1, 4), (128, 1, 8, 0, 0)],
    57344: [(256, 1, 4, 1, 8)],
    70000: [(128, 1, 8, 1, 16), (128, 1, 8, 0, 0)],
    # rows that are not whole aligned groups
    4095: [(256, 1, 1, 2, 1), (512, 1, 1, 1, 1)],
    7777: [(256, 1, 1, 4, 1)],
    9001: [(1024, 1, 1, 0, 0)],
}


@pytest.mark.parametrize("h", PLANS)
def test_forced_plans(units: dict[str, Emulated], name: str, h: int) -> None:
    """Programs differ in their tiles: a plan that none of them carries out is refused."""
    carried_out = 0
    call = prepare(name, (3,) if h < 8192 else (1,), h, pad=8)
    for plan in PLANS[h]:
        units[name].force(plan=plan)
        call.reset()
        try:
            launch(units[name], call)
            carried_out += 1
        except RuntimeError as error:
            assert "no kernel" in str(error)
    held = 2 if call.tensors["x"].element_size() == 2 and "residual" not in call.tensors else 4
    assert carried_out > 0 or (h == 70000 and held == 4)


@pytest.mark.parametrize("rows", [(1,), (2,), (5,), (3, 3), (3, 4)], ids=str)
@pytest.mark.parametrize("h", [4104, 7168, 8192])
@pytest.mark.parametrize("program", ["layernorm", "layernorm_quant"])
def test_rows_abreast(units: dict[str, Emulated], program: str, h: int, rows: tuple[int, ...]) -> None:
    """Two rows a thread, but none that would belong to two outer ones."""
    units[program].force(plan=(128, 1, 1, 8, 1), abreast=2)
    launch(units[program], prepare(program, rows, h, pad=8))


@pytest.mark.parametrize("shared_memory", [227 * 1024, 2048])
@pytest.mark.parametrize("h", [8264, 9001])
def test_staged_and_read_again(units: dict[str, Emulated], name: str, h: int, shared_memory: int) -> None:
    units[name].force(shared_memory=shared_memory, plan=(1024, 1, 1, 0, 0))
    launch(units[name], prepare(name, (2,), h))


@pytest.mark.parametrize("pad", [8, 4, 2, 1])
def test_outer_and_inner_rows(units: dict[str, Emulated], name: str, pad: int) -> None:
    """[A, B, H] rows: scales belong to the flattened row."""
    units[name].force()
    launch(units[name], prepare(name, (2, 5), 264, pad=pad, row_weight=True, bad_index=True))


@pytest.mark.parametrize("program", ["block_quant", "dynamic_128_packed"])
def test_no_rows(units: dict[str, Emulated], program: str) -> None:
    """Nothing but padding: it is zeros all the same."""
    units[program].force()
    for rows in ((0,), (3, 0), (0, 3)):
        launch(units[program], prepare(program, rows, 256))


@pytest.mark.parametrize("program", ["layernorm", "layernorm_bare"])
@pytest.mark.parametrize(
    ("h", "plan"),
    [
        (72, (4, 8, 1, 4, 1)),
        (576, (32, 4, 1, 4, 1)),
        (16384, (512, 1, 1, 2, 2)),
        (24576, (512, 1, 1, 2, 4)),
        (24576, (128, 1, 4, 2, 4)),
        (24576, (1024, 1, 1, 0, 0)),
        (40000, (256, 1, 4, 1, 8)),
    ],
)
def test_a_row_of_negative_zeros(units: dict[str, Emulated], program: str, h: int, plan: tuple[int, ...]) -> None:
    """The sign of a sum that is zero says whether something was added that is not there."""
    units[program].force(plan=plan)
    call = prepare(program, (1,), h)
    for name in {"x", "bias"} & call.tensors.keys():
        call.tensors[name].fill_(-0.0)
    launch(units[program], Call(call.name, call.program, call.dtypes, call.tensors, call.buffers))
