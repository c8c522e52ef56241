"""The benchmark's own arithmetic, and its loop with the clock and the GPU taken away."""

from __future__ import annotations

import argparse
import contextlib
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import flashnorm
from benchmarks import bench, measure, peers, report, roofline
from flashnorm.program import Operand

BF16 = torch.bfloat16


# ------------------------------------------------------------------ bytes, sets, launches
def test_bytes_come_from_the_operand_list() -> None:
    operands = (
        Operand("x", "row", "inout"),
        Operand("residual", "row", "inout"),
        Operand("weight", "vec"),
        Operand("out", "row", "out"),
        Operand("rstd", "per_row", "out", "float32"),
    )
    assert roofline.bytes_moved(operands, 3, 100, BF16) == 2 * 600 + 2 * 600 + 200 + 600 + 12
    assert roofline.bytes_moved(peers.operands("rmsnorm"), 4, 64, BF16) == 4 * 64 * 2 * 2 + 64 * 2
    assert roofline.bytes_moved(peers.operands("fused_add_rmsnorm"), 4, 64, BF16) == 4 * 64 * 2 * 4 + 64 * 2


@pytest.mark.parametrize("shape", bench.TABLE)
@pytest.mark.parametrize("op", ["rmsnorm", "fused_add_rmsnorm"])
def test_buffers_are_cold_and_graphs_long_enough(op: str, shape: tuple[int, int]) -> None:
    cache = 60 << 20
    size = peers.set_bytes(op, *shape, BF16)
    sets = measure.count_sets(size, cache, 14 << 30)
    assert 3 <= sets <= measure.MAX_LAUNCHES
    assert sets * size >= 1.4 * cache  # 3 caches, but for the smallest shape
    assert sets * size <= 14 << 30
    moved = roofline.bytes_moved(peers.operands(op), *shape, BF16)
    launches = measure.count_launches(sets, moved)
    assert launches >= sets
    assert launches * max(1.2, moved / 4.8e6) >= 200  # us, on the fastest device this knows


def test_sets_shrink_with_memory() -> None:
    assert measure.count_sets(1 << 30, 60 << 20, 2 << 30) == 2
    assert measure.count_sets(1 << 30, 60 << 20, 1 << 20) == 1


# ------------------------------------------------------------------ graphs, with a fake device
class _Recorder:
    """Calls made while a fake graph captures become what its replay does."""

    def __init__(self) -> None:
        self.into: list | None = None

    def wrap(self, function):
        def call():
            result = function()

            def again() -> None:
                new = function()
                for old, value in zip(*([r] if torch.is_tensor(r) else r or () for r in (result, new)), strict=True):
                    old.copy_(value)

            if self.into is not None:
                self.into.append(again)
            return result

        return call


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> _Recorder:
    recorder = _Recorder()

    class FakeGraph:
        def __init__(self) -> None:
            self.calls: list = []

        def replay(self) -> None:
            for call in self.calls:
                call()

    @contextlib.contextmanager
    def capture(graph):
        recorder.into = graph.calls
        yield
        recorder.into = None

    class FakeEvent:
        clock = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            FakeEvent.clock += 1.5
            self.at = FakeEvent.clock

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other) -> float:
            return other.at - self.at

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda s: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": FakeGraph,
        "graph": capture,
        "Event": FakeEvent,
        "_sleep": lambda cycles: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    return recorder


def test_graph_rotates_sets_and_notices_what_writes_nothing(fake_cuda: _Recorder) -> None:
    x, outs = torch.randn(8), [torch.zeros(8) for _ in range(3)]
    used: list[int] = []

    def call(k: int) -> torch.Tensor:
        used.append(k)
        return torch.mul(x, 2, out=outs[k])

    graph = measure.Graph([fake_cuda.wrap(partial(call, k)) for k in range(3)], 7, contextlib.nullcontext)
    used.clear()
    graph.graph.replay()
    assert used == [0, 1, 2, 0, 1, 2, 0]
    assert graph.results[2] is outs[2]
    assert graph.writes(outs[2])
    # This one launches behind the capture's back.
    idle = measure.Graph([partial(torch.mul, x, 2, out=outs[0])], 4, contextlib.nullcontext)
    assert not idle.writes(outs[0])
    times = measure.time_graphs({"a": graph, "b": idle}, 5)
    assert times["a"].us == pytest.approx(1500 / 7)
    assert times["b"].us == pytest.approx(1500 / 4)


# ------------------------------------------------------------------ report and bars
def _row(contender: str, kind: str, us: float | None, shape=(1, 4096), op="rmsnorm", moved=1 << 20) -> dict:
    return {
        "op": op, "M": shape[0], "H": shape[1], "dtype": "bfloat16", "device": "cuda", "contender": contender,
        "kind": kind, "us": us, "us_min": us, "us_max": us, "bytes": moved, "gbps": us and moved / us / 1e3,
        "to_best_peer": None, "of_ceiling": None, "error_l2": 0.0, "prepare_s": 0.1, "sets": 3, "launches": 3,
        "failure": None if us else "RuntimeError: no",
    }  # fmt: skip


def _report(cute: float, wide: float, cuda: float, host: float) -> dict:
    rows = []
    for shape, ours, factor in (((1, 4096), cute, 1.0), ((4096, 65536), wide, 100.0)):
        here = [
            _row("mul", "ceiling", factor, shape),
            _row("flashnorm cute", "ours", ours, shape),
            _row("flashnorm cuda", "ours", cuda * factor, shape),
            _row("flashinfer cute", "peer", 1.4 * factor, shape),
            _row("flashinfer cuda", "peer", 1.9 * factor, shape),
            _row("quack", "peer", None, shape),
        ]
        report.relate(here)
        rows += here
    costs = {"flashnorm cute": host, "flashnorm cute, bare launch": 5.0, "flashinfer cute": 17.0}
    hosts = [{"op": "rmsnorm", "contender": k, "us": v, "us_min": v, "us_max": v} for k, v in costs.items()]
    return {"rows": rows, "host": hosts, "skipped": [], "machine": {"capability": "9.0"}, "checks": []}


def test_bars_cleared() -> None:
    made = _report(cute=1.3, wide=104.0, cuda=1.25, host=6.5)
    assert all(entry["ok"] for entry in report.check(made)), report.check_table(made["checks"])
    text = report.table(made)
    assert "| 1 x 4096 | 1.00 (1049) | 1.30 (807) | **1.25 (839)** |" in text
    assert "rmsnorm 1x4096 quack: RuntimeError: no" in text


@pytest.mark.parametrize(
    ("change", "bar"),
    [
        ({"cute": 1.46}, "cute against fastest peer"),
        ({"wide": 110.0}, "cute on wide rows"),
        ({"cute": 1.4, "wide": 138.0}, "cute / fastest peer, geomean"),
        ({"cuda": 1.6}, "cuda / cute, geomean"),
        ({"cuda": 1.95}, "cuda against flashinfer cuda"),
        ({"host": 7.2}, "host: flashnorm cute / flashnorm cute, bare launch"),
        ({"host": 10.5}, "host: flashnorm cute / flashinfer cute"),
    ],
)
def test_bars_missed(change: dict, bar: str) -> None:
    good = {"cute": 1.3, "wide": 104.0, "cuda": 1.25, "host": 6.5}
    made = _report(**{**good, **change})
    assert bar in {entry["bar"] for entry in report.check(made) if not entry["ok"]}


def test_a_hair_slower_than_a_peer_is_noise() -> None:
    assert [e for e in report.check(_report(1.449, 104.0, 1.25, 6.5)) if not e["ok"]] == []


# ------------------------------------------------------------------ the loop
def test_arguments() -> None:
    args = bench.parse(["--shapes", "1x8,2x16", "--peers", "torch", "--ops", "rmsnorm", "--device", "cpu"])
    assert (args.shapes, args.peers, args.ops, args.routes) == (((1, 8), (2, 16)), ("torch",), ("rmsnorm",), ("cpu",))
    with pytest.raises(argparse.ArgumentTypeError):
        bench.parse_shapes("1x2x3")
    with pytest.raises(SystemExit):
        bench.parse(["--ops", "nonesuch"])


def test_loop_on_the_cpu(tmp_path, capsys) -> None:
    out = tmp_path / "deep" / "bench.json"
    arguments = ["--device", "cpu", "--routes", "torch", "--peers", "torch", "--shapes", "2x64,3x40", "--repeats", "2"]
    assert bench.main([*arguments, "--no-host", "--json", str(out), "--budget", "100"]) == 0
    made = json.loads(out.read_text())
    assert made["schema"] == report.SCHEMA
    assert {row["contender"] for row in made["rows"]} == {"mul", "flashnorm torch", "torch"}
    assert len(made["rows"]) == 3 * 2 * len(peers.BENCHES)
    assert all(row["us"] > 0 and row["failure"] is None for row in made["rows"])
    assert "| 3 x 40 |" in capsys.readouterr().out


def test_failing_and_wrong_contenders_are_left_out(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken(t):
        raise ImportError("not installed here")

    binds = {
        "torch": peers.BENCHES["rmsnorm"].peers["torch"],
        "broken": broken,
        "wrong": lambda t: partial(torch.mul, t.x, 3, out=t.out),
    }
    entry = peers.Bench(peers.BENCHES["rmsnorm"].ours, binds, cpu=tuple(binds))
    monkeypatch.setitem(peers.BENCHES, "rmsnorm", entry)
    args = bench.parse(["--device", "cpu", "--routes", "torch", "--ops", "rmsnorm", "--repeats", "2"])
    run = bench.Run(args, [])
    run.measure("rmsnorm", (4, 32))
    rows = {row["contender"]: row for row in run.report["rows"]}
    assert rows["torch"]["us"] > 0
    assert rows["broken"]["failure"] == "ImportError: not installed here"
    assert rows["wrong"]["failure"].startswith("wrong result")
    assert rows["wrong"]["us"] is None


def test_loop_on_a_fake_gpu(fake_cuda: _Recorder, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The device path, its graphs replayed by Python and its buffers on the CPU."""

    class Recorded(measure.Graph):
        def __init__(self, calls, launches, context) -> None:
            super().__init__([fake_cuda.wrap(call) for call in calls], launches, context)

    original = peers.make_sets
    cpu = torch.device("cpu")
    properties = SimpleNamespace(L2_cache_size=1 << 12)
    monkeypatch.setattr(bench, "Graph", Recorded)
    monkeypatch.setattr(peers, "make_sets", lambda *args: original(*args[:-1], cpu))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 24, 1 << 24))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    binds = {"torch": peers.BENCHES["rmsnorm"].peers["torch"], "wrong": lambda t: partial(torch.mul, t.x, 3, out=t.out)}
    monkeypatch.setitem(peers.BENCHES, "rmsnorm", peers.Bench(peers.BENCHES["rmsnorm"].ours, binds))
    run = bench.Run(bench.parse(["--device", "cpu", "--routes", "torch", "--repeats", "2"]), [])
    run.device = torch.device("cuda")
    run.args.peers = tuple(binds)
    for op in ("rmsnorm", "fused_add_rmsnorm"):
        run.measure(op, (4, 32))
    rows = {(row["op"], row["contender"]): row for row in run.report["rows"]}
    assert run.report["skipped"] == []
    assert rows["rmsnorm", "wrong"]["failure"].startswith("wrong result")
    for name in ("mul", "flashnorm torch", "torch"):
        for op in ("rmsnorm", "fused_add_rmsnorm"):
            row = rows[op, name]
            assert row["failure"] is None
            assert row["us"] == pytest.approx(1500 / row["launches"])
            assert row["launches"] >= row["sets"] >= 3


def test_out_of_time_is_said(capsys) -> None:
    assert bench.main(["--device", "cpu", "--routes", "torch", "--peers", "none", "--no-host", "--budget", "0"]) == 0
    assert "rmsnorm 1x4096: out of time" in capsys.readouterr().out


def test_contenders_run_under_their_route() -> None:
    found = {c.name: c for c in peers.contenders("rmsnorm", ("cute", "cuda", "cpu"), (), "cuda")}
    assert list(found) == ["mul", "flashnorm cute", "flashnorm cuda"]
    from flashnorm.core.dispatch import forced_here

    with found["flashnorm cuda"].context():
        assert forced_here() == "cuda"
    assert forced_here() is None
    assert flashnorm.backend is found["flashnorm cuda"].context.func
