"""What the benchmark measures: the buffers of every operator, its contenders, and what is compiled ahead."""

from __future__ import annotations

import pytest
import torch

import flashnorm
from benchmarks import measure, peers, prepare, rivals, roofline
from benchmarks.roofline import Buffer
from flashnorm.core.op import OPS

BF16 = torch.bfloat16
CPU = torch.device("cpu")


# ------------------------------------------------------------------ bytes, sets, launches
def test_bytes_come_from_the_buffers() -> None:
    buffers = (
        Buffer("x", (3, 100), BF16, "inout"),
        Buffer("residual", (3, 100), BF16, "inout"),
        Buffer("weight", (100,), BF16, kind="vec"),
        Buffer("out", (3, 100), torch.float8_e4m3fn, "out"),
        Buffer("rstd", (3,), torch.float32, "out", "per_row"),
    )
    assert roofline.bytes_moved(buffers) == 2 * 600 + 2 * 600 + 200 + 300 + 12


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("rmsnorm", 2 * 2 * 6 * 256 + 2 * 256),
        ("fused_add_rmsnorm", 4 * 2 * 6 * 256 + 2 * 256),
        ("rmsnorm_quant", (2 + 1) * 6 * 256 + 2 * 256),
        ("fused_add_rmsnorm_quant", (3 * 2 + 1) * 6 * 256 + 2 * 256),
        ("layernorm", 2 * 2 * 6 * 256 + 2 * 4 * 256),
        ("layernorm_quant", (2 + 1) * 6 * 256 + 2 * 4 * 256),
        # The scales of 6 rows are padded to 8.
        ("fused_add_rmsnorm_fp8_block_quant", (4 * 2 + 1) * 6 * 256 + 2 * 256 + 8 * 2 * 4),
        ("rmsnorm_dynamic_quant/token", (2 + 1) * 6 * 256 + 2 * 256 + 6 * 4),
        ("rmsnorm_dynamic_quant/128", (2 + 1) * 6 * 256 + 2 * 256 + 6 * 2 * 4),
    ],
)
def test_bytes_of_every_operator(name: str, wanted: int) -> None:
    assert peers.BENCHES[name].bytes_moved(6, 256, BF16) == wanted


def test_every_operator_is_declared_and_listed() -> None:
    assert all(name.split("/")[0] in OPS and bench.name == name for name, bench in peers.BENCHES.items())
    assert peers.named(["layernorm", "rmsnorm_dynamic_quant"]) == [
        "layernorm", "rmsnorm_dynamic_quant/token", "rmsnorm_dynamic_quant/128",
    ]  # fmt: skip


@pytest.mark.parametrize("name", peers.BENCHES)
def test_buffers_are_cold_and_graphs_long_enough(name: str) -> None:
    cache, bench = 60 << 20, peers.BENCHES[name]
    assert bench.shapes
    for shape in bench.shapes:
        size = bench.set_bytes(*shape, BF16)
        sets = measure.count_sets(size, cache, 14 << 30)
        assert 3 <= sets <= measure.MAX_LAUNCHES
        assert sets * size >= 1.2 * cache  # 3 caches, but for the smallest shape
        assert sets * size <= 14 << 30
        moved = bench.bytes_moved(*shape, BF16)
        launches = measure.count_launches(sets, moved)
        assert launches >= sets
        assert launches * max(1.2, moved / 4.8e6) >= 200  # us, on the fastest device this knows


@pytest.mark.parametrize("name", peers.BENCHES)
def test_buffers_lie_as_the_operator_wants_them(name: str) -> None:
    """The public call and the bare kernel take every set; both leave nothing of the poison in the outputs."""
    bench = peers.BENCHES[name]
    first, last = bench.make_sets(2, 5, 256, BF16, CPU)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(vars(first).values(), vars(last).values(), strict=True))
    with torch.no_grad(), flashnorm.backend("torch"):
        wanted = bench.expected(last, [0, 4])
        distance = float((bench.values(last, bench.ours(last)(), [0, 4]) - wanted).norm() / wanted.norm())
    assert bench.reason_wrong(last, None, distance) is None
    for buffer in bench.buffers(5, 256, BF16):
        tensor = getattr(last, buffer.name)
        assert (tuple(tensor.shape), tensor.dtype) == (buffer.shape, buffer.dtype)
        assert not tensor.float().isnan().any(), buffer.name
    if bench.column:
        assert first.scale.shape == (8, 2) and first.scale.stride() == (1, 8)
        assert last.scale[5:].eq(0).all()


@pytest.mark.parametrize("name", peers.BENCHES)
def test_a_result_of_half_the_size_is_wrong(name: str) -> None:
    bench = peers.BENCHES[name]
    (t,) = bench.make_sets(1, 3, 128, BF16, CPU)
    with torch.no_grad(), flashnorm.backend("torch"):
        wanted = bench.expected(t, [0, 2])
        returned = bench.ours(t)()
    distance = float((bench.values(t, returned, [0, 2]) / 2 - wanted).norm() / wanted.norm())
    assert "wrong result" in bench.reason_wrong(t, returned, distance)


def test_the_ceiling_moves_rows_of_the_input_s_dtype() -> None:
    for entry in peers.BENCHES.values():
        (t,) = entry.make_sets(1, 3, 128, BF16, CPU)
        mul = entry.contenders((), (), "cuda")[0]
        assert (mul.name, mul.kind) == ("mul", "ceiling")
        assert mul.bind(t)().dtype is BF16


def test_sets_shrink_with_memory() -> None:
    assert measure.count_sets(1 << 30, 60 << 20, 2 << 30) == 2
    assert measure.count_sets(1 << 30, 60 << 20, 1 << 20) == 1


# ------------------------------------------------------------------ what comes first
def test_contenders_run_under_their_route() -> None:
    routes = ("cute", "cuda", "cpu")
    found = {c.name: c for c in peers.BENCHES["rmsnorm"].contenders(routes, (), "cuda")}
    assert list(found) == ["mul", "flashnorm cute", "flashnorm cuda"]
    from flashnorm.core.dispatch import forced_here

    with found["flashnorm cuda"].context():
        assert forced_here() == "cuda"
    assert forced_here() is None
    assert flashnorm.backend is found["flashnorm cuda"].context.func
    # An operator without a CuTe kernel has no such contender.
    assert [c.name for c in peers.BENCHES["layernorm_quant"].contenders(routes, (), "cuda")] == [
        "mul",
        "flashnorm cuda",
    ]
    assert [c.name for c in peers.BENCHES["layernorm"].contenders(routes, (), "cpu")] == ["mul", "flashnorm cpu"]


def test_kernels_that_are_built_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One artefact a program on the C++ route, one a hidden size on the other, the slow compiler first."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    names = ("rmsnorm_quant", "layernorm", "layernorm_quant")
    work = [(peers.BENCHES[name], shape) for name in names for shape in ((1, 4096), (8, 4096), (64, 8192))]
    routes = ("cute", "cuda", "cpu", "torch")
    found = prepare.jobs(work, routes, BF16, torch.device("cuda"))
    sizes = [(route, target, variant.hidden_size) for route, variant, target in found]
    assert [route for route, _, _ in sizes] == ["cuda"] * 3 + ["cute"] * 4
    assert [(r, h) for r, _, h in sizes[3:]] == [("cute", 4096), ("cute", 8192)] * 2
    assert {target for _, target, _ in sizes} == {"sm_90a"}
    assert [route for route, _, _ in prepare.jobs(work, routes, BF16, CPU)] == ["cpu"] * 3
    variants = {
        entry.name: variant for entry, _ in work for _, variant, _ in found if variant.program == entry.program()
    }
    assert variants["layernorm"].dtypes == ("bfloat16", "float32", "float32", "bfloat16")
    assert variants["rmsnorm_quant"].dtypes == ("bfloat16", "bfloat16", "float8_e4m3fn")


def test_a_build_that_fails_is_no_error_of_the_run() -> None:
    job = ("nonesuch", peers.BENCHES["rmsnorm"].variant(64, BF16), "host")
    builds = prepare.Builds([job, job], ())
    builds.wait(100)
    assert builds.done()


def test_every_shape_is_compiled_as_if_there_were_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    rivals.compiled.cache_clear()
    x, weight = torch.randn(2, 64), torch.rand(64)
    first, again, other = (rivals.compiled(rivals.rmsnorm, shape) for shape in (x.shape, x.shape, torch.Size((3, 64))))
    assert first is again and first.__code__ is not other.__code__ and first.__code__ != other.__code__
    assert torch.equal(first(x, weight), rivals.rmsnorm(x, weight))
    rivals.compiled.cache_clear()
