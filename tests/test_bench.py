"""The benchmark's own arithmetic, and its loop with the clock and the GPU taken away."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench, measure, peers, report, run
from benchmarks.entry import Bench

BF16 = torch.bfloat16
CPU = torch.device("cpu")


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


# ------------------------------------------------------------------ the loop
def test_arguments() -> None:
    args = bench.parse(["--shapes", "1x8,2x16", "--peers", "torch", "--ops", "rmsnorm", "--device", "cpu"])
    assert (args.shapes, args.peers, args.ops, args.routes) == (((1, 8), (2, 16)), ("torch",), ("rmsnorm",), ("cpu",))
    assert set(bench.parse(["--peers", "all"]).peers) >= {"torch", "torch.compile", "quack", "flashinfer cuda"}
    with pytest.raises(argparse.ArgumentTypeError):
        bench.parse_shapes("1x2x3")
    for wrong in (["--ops", "nonesuch"], ["--peers", "nonesuch"]):
        with pytest.raises(SystemExit):
            bench.parse(wrong)


def test_help_names_every_operator(capsys) -> None:
    with pytest.raises(SystemExit):
        bench.parse(["--help"])
    printed = "".join(capsys.readouterr().out.split())
    assert all(name in printed for name in peers.BENCHES)


def test_every_operator_has_its_own_table() -> None:
    made = run.Run(bench.parse(["--device", "cpu", "--shapes", "table"]), [])
    work = [(entry.name, shape) for entry, shape in made.work()]
    assert len(work) == len(set(work)) == sum(len(entry.shapes) for entry in peers.BENCHES.values())
    assert ("layernorm", (16384, 7168)) in work and ("rmsnorm_quant", (4096, 65536)) not in work
    assert ("rmsnorm", (2048, 131072)) in work and ("fused_add_rmsnorm_fp8_block_quant", (8, 7168)) in work
    some = run.Run(bench.parse(["--device", "cpu", "--shapes", "3x64", "--ops", "rmsnorm,layernorm"]), [])
    assert [(entry.name, shape) for entry, shape in some.work()] == [("rmsnorm", (3, 64)), ("layernorm", (3, 64))]


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few buffer sets, short host blocks: the loop is looked at, not the clock."""
    monkeypatch.setattr(run, "_CPU_CACHE", 1 << 12)
    monkeypatch.setattr(run, "time_cpu", partial(measure.time_cpu, block_ms=1.0))
    monkeypatch.setattr(run, "time_host", partial(measure.time_host, blocks=2, block=3))


def test_loop_on_the_cpu(tmp_path, capsys, small_cache) -> None:
    """One operator in three; all of them go the way of a GPU below."""
    out = tmp_path / "deep" / "bench.json"
    arguments = [
        "--device",
        "cpu",
        "--routes",
        "torch",
        "--peers",
        "torch",
        "--shapes",
        "2x128,3x384",
        "--repeats",
        "2",
    ]
    some = {name: peers.BENCHES[name] for name in [*peers.BENCHES][::3]}
    arguments += ["--ops", ",".join(some)]
    assert bench.main([*arguments, "--json", str(out), "--budget", "100", "--check"]) == 0
    made = json.loads(out.read_text())
    assert made["schema"] == report.SCHEMA
    assert {row["contender"] for row in made["rows"]} == {"mul", "flashnorm torch", "torch"}
    eager = [name for name, entry in some.items() if "torch" in entry.peers]
    assert len(made["rows"]) == 2 * (2 * len(some) + len(eager))
    assert all(row["us"] > 0 and row["failure"] is None for row in made["rows"])
    assert made["skipped"] == []
    assert {(entry["op"], entry["contender"]) for entry in made["host"]} == {
        *((name, contender) for name in some for contender in ("flashnorm torch", "torch.empty_like")),
        *((name, "torch") for name in eager),
    }
    assert all(entry["us"] > 0 for entry in made["host"])
    printed = capsys.readouterr().out
    assert printed.count("| 3 x 384 |") == len(some)
    assert all(f"**{name}**, bfloat16" in printed for name in some)


@pytest.mark.parametrize(("more", "sets"), [([], 3), (["--same-buffers"], 1)])
def test_buffers_are_rotated_or_the_same(more: list[str], sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_CPU_CACHE", 1)
    arguments = ["--device", "cpu", "--routes", "torch", "--peers", "none", "--ops", "rmsnorm", "--repeats", "1"]
    made = run.Run(bench.parse([*arguments, *more]), [])
    made.measure(peers.BENCHES["rmsnorm"], (4, 32))
    assert [row["sets"] for row in made.report["rows"]] == [sets, sets]


def test_failing_and_wrong_contenders_are_left_out(monkeypatch: pytest.MonkeyPatch, small_cache) -> None:
    def broken(t):
        raise ImportError("not installed here")

    binds = {
        "torch": peers.BENCHES["rmsnorm"].peers["torch"],
        "broken": broken,
        "wrong": lambda t: partial(torch.mul, t.x, 3, out=t.out),
    }
    entry = dataclasses.replace(peers.BENCHES["rmsnorm"], peers=binds, cpu=tuple(binds))
    args = bench.parse(["--device", "cpu", "--routes", "torch", "--ops", "rmsnorm", "--repeats", "2"])
    args.peers = tuple(binds)
    made = run.Run(args, [])
    made.measure(entry, (4, 32))
    made.host(entry)
    rows = {row["contender"]: row for row in made.report["rows"]}
    assert rows["torch"]["us"] > 0
    assert rows["broken"]["failure"] == "ImportError: not installed here"
    assert rows["wrong"]["failure"].startswith("wrong result")
    assert rows["wrong"]["us"] is None
    hosts = {row["contender"]: row for row in made.report["host"]}
    assert (hosts["broken"]["us"], hosts["broken"]["failure"]) == (None, "ImportError: not installed here")
    assert hosts["torch"]["us"] > 0 and hosts["torch"]["failure"] is None


def test_loop_on_a_fake_gpu(fake_cuda: _Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device path of every operator, its graphs replayed by Python and its buffers on the CPU."""

    class Recorded(measure.Graph):
        def __init__(self, calls, launches, context) -> None:
            super().__init__([fake_cuda.wrap(call) for call in calls], launches, context)

    original = Bench.make_sets
    properties = SimpleNamespace(L2_cache_size=1 << 12)
    monkeypatch.setattr(run, "Graph", Recorded)
    monkeypatch.setattr(run, "count_launches", lambda sets, moved: sets + 1)
    monkeypatch.setattr(Bench, "make_sets", lambda *args: original(*args[:-1], CPU))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 24, 1 << 24))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made = run.Run(bench.parse(["--device", "cpu", "--routes", "torch", "--repeats", "2"]), [])
    made.device = torch.device("cuda")
    made.args.peers = ("torch", "wrong")
    for entry in peers.BENCHES.values():
        wrong = {"wrong": lambda t: partial(torch.mul, t.x, 3, out=t.x)}
        eager = {name: bind for name, bind in entry.peers.items() if name == "torch"}
        made.measure(dataclasses.replace(entry, peers={**eager, **wrong}), (4, 128))
    rows = {(row["op"], row["contender"]): row for row in made.report["rows"]}
    assert made.report["skipped"] == []
    for op in peers.BENCHES:
        assert rows[op, "wrong"]["failure"].startswith("wrong result")
        for name in ("mul", "flashnorm torch", *(["torch"] if "torch" in peers.BENCHES[op].peers else [])):
            row = rows[op, name]
            assert row["failure"] is None
            assert row["us"] == pytest.approx(1500 / row["launches"])
            assert row["launches"] > row["sets"] >= 3


def test_out_of_time_is_said(capsys) -> None:
    assert bench.main(["--device", "cpu", "--routes", "torch", "--peers", "none", "--no-host", "--budget", "0"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name} 1x4096: out of time" in printed for name in peers.BENCHES)


def test_first_calls_use_the_time_of_the_builds(monkeypatch: pytest.MonkeyPatch, small_cache, capsys) -> None:
    """They are made while something is built, each once, and never of what is being built."""

    class Endless:
        def __init__(self, todo, names, work) -> None:
            assert names == ()  # nothing of FlashInfer on a CPU

        def done(self) -> bool:
            return False

        def wait(self, seconds: float) -> None:
            assert seconds > 0

    called: list[str] = []

    def count(name, bind):
        def counted(t):
            called.append(name)
            return bind(t)

        return counted

    entry = peers.BENCHES["layernorm"]
    entry = dataclasses.replace(
        entry, peers={"torch": count("torch", entry.peers["torch"])}, ours=count("ours", entry.ours)
    )
    monkeypatch.setattr(run, "Builds", Endless)
    monkeypatch.setitem(peers.BENCHES, "layernorm", entry)
    args = ["--device", "cpu", "--routes", "torch", "--ops", "layernorm", "--shapes", "2x64,2x128", "--repeats", "2"]
    made = run.Run(bench.parse([*args, "--peers", "torch"]), [])
    work = made.work()
    with torch.no_grad():
        made.prepare(work)
        assert called == ["torch", "torch"]
        made.measure(*work[0])
    assert made.report["rows"] and all(row["failure"] is None for row in made.report["rows"])
    sets = made.report["rows"][0]["sets"]
    assert called[2] == "ours"
    assert called.count("torch") == 2 + sets and called.count("ours") == 1 + sets
