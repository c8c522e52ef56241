"""The benchmark's report and the bars it is held to."""

from __future__ import annotations

import pytest

from benchmarks import bars, peers, report, roofline


# ------------------------------------------------------------------ report and bars
def _row(contender: str, kind: str, us: float | None, shape=(1, 4096), op="rmsnorm", moved=1 << 20) -> dict:
    return {
        "op": op, "M": shape[0], "H": shape[1], "dtype": "bfloat16", "device": "cuda", "contender": contender,
        "kind": kind, "us": us, "us_min": us, "us_max": us, "bytes": moved, "gbps": us and moved / us / 1e3,
        "to_best_peer": None, "of_ceiling": None, "error_l2": 0.0, "prepare_s": 0.1, "sets": 3, "launches": 3,
        "failure": None if us else "RuntimeError: no",
    }  # fmt: skip


def _host(contender: str, us: float | None, op: str = "rmsnorm") -> dict:
    why = None if us else "RuntimeError: no"
    return {"op": op, "contender": contender, "us": us, "us_min": us, "us_max": us, "failure": why}


def _check(made: dict) -> list[dict]:
    return bars.check(made, {name: entry.bars for name, entry in peers.BENCHES.items()})


def _missed(made: dict) -> set[str]:
    return {entry["bar"] for entry in _check(made) if not entry["ok"]}


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
    costs["quack"] = None
    hosts = [_host(name, us) for name, us in costs.items()]
    return {"rows": rows, "host": hosts, "skipped": [], "machine": {"capability": "9.0"}, "checks": []}


def test_bars_cleared() -> None:
    made = _report(cute=1.3, wide=104.0, cuda=1.25, host=6.5)
    assert all(entry["ok"] for entry in _check(made)), bars.table(made["checks"])
    text = report.table(made)
    assert "| 1 x 4096 | 1.00 (1049) | 1.30 (807) | **1.25 (839)** |" in text
    assert "rmsnorm 1x4096 quack: RuntimeError: no" in text
    assert "rmsnorm, host cost, quack: RuntimeError: no" in text


@pytest.mark.parametrize(
    ("change", "bar"),
    [
        ({"cute": 1.46}, "cute against fastest peer"),
        ({"wide": 110.0}, "cute of the ceiling"),
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
    assert bar in _missed(made)


def test_a_hair_slower_than_a_peer_is_noise() -> None:
    assert _missed(_report(1.449, 104.0, 1.25, 6.5)) == set()


def test_what_was_not_measured_is_not_cleared() -> None:
    good = _report(cute=1.3, wide=104.0, cuda=1.25, host=6.5)
    good["skipped"].append({"op": "rmsnorm", "M": 8, "H": 4096, "why": "out of time"})
    assert _missed(good) == {"cute against fastest peer"}
    failed = _report(cute=1.3, wide=104.0, cuda=1.25, host=6.5)
    for row in failed["rows"]:
        if row["contender"] == "flashnorm cute" and row["H"] == 65536:
            row |= {"us": None, "gbps": None, "of_ceiling": None, "failure": "BuildError: no"}
    assert _missed(failed) == {"cute against fastest peer", "cute of the ceiling"}
    failed["host"][0] |= {"us": None, "failure": "BuildError: no"}
    assert "host: flashnorm cute / flashnorm cute, bare launch" in _missed(failed)


def _one_shape(op: str, shape: tuple[int, int], **us: float) -> dict:
    """Times by contender, `mul` 1 us; everybody moves as many bytes as `mul`."""
    names = {"mul": "mul", "cute": "flashnorm cute", "cuda": "flashnorm cuda", "compile": "torch.compile"}
    names |= {"fi_cute": "flashinfer cute", "fi_cuda": "flashinfer cuda"}
    kinds = {"mul": "ceiling", "cute": "ours", "cuda": "ours"}
    given = {"mul": 1.0, **us}
    rows = [_row(names.get(n, n), kinds.get(n, "peer"), t, shape, op) for n, t in given.items()]
    report.relate(rows)
    return {"rows": rows, "host": [], "skipped": [], "machine": {"capability": "9.0"}, "checks": []}


BIG = (16384, 7168)


@pytest.mark.parametrize(
    ("op", "bar", "good", "bad"),
    [
        # 1.03 of the fastest peer, and 0.98 in the mean.
        ("rmsnorm_quant", "cute against fastest peer", {"cute": 9.7, "fi_cute": 10}, {"cute": 10.4, "fi_cute": 10}),
        ("rmsnorm_quant", "cute / fastest peer, geomean", {"cute": 9.7, "compile": 10}, {"cute": 9.9, "compile": 10}),
        ("fused_add_rmsnorm_quant", "cute against fastest peer",
         {"cute": 9.7, "fi_cuda": 10}, {"cute": 10.4, "fi_cuda": 10}),
        # No slower than the fastest of three; FlashInfer's time does not count.
        ("layernorm", "cute against quack, torch or torch.compile",
         {"cute": 1.07, "quack": 1.07, "torch": 3, "fi_cute": 1}, {"cute": 1.08, "quack": 1.07, "torch": 3}),
        ("layernorm", "cute against quack, torch or torch.compile",
         {"cute": 1.07, "compile": 2}, {"cute": 1.07, "fi_cute": 2}),
        ("layernorm", "cute of the ceiling", {"cute": 1.07, "quack": 2}, {"cute": 1.09, "quack": 2}),
        ("layernorm_quant", "cuda against fastest peer", {"cuda": 2, "fi_cuda": 2}, {"cuda": 2.01, "fi_cuda": 2}),
        ("fused_add_rmsnorm_fp8_block_quant", "cuda against flashinfer cuda",
         {"cuda": 1.02, "fi_cuda": 1, "compile": 0.5}, {"cuda": 1.04, "fi_cuda": 1}),
        ("fused_add_rmsnorm_fp8_block_quant", "cuda of the ceiling",
         {"cuda": 1.06, "fi_cuda": 1.1}, {"cuda": 1.07, "fi_cuda": 1.1}),
    ],
)  # fmt: skip
def test_bars_of_an_operator(op: str, bar: str, good: dict, bad: dict) -> None:
    assert _missed(_one_shape(op, BIG, **good)) == set()
    assert bar in _missed(_one_shape(op, BIG, **bad))


def test_what_is_only_shown_has_no_bar_but_the_host_s() -> None:
    made = _one_shape("rmsnorm_dynamic_quant/token", BIG, cute=9.0, compile=1.0)
    assert _missed(made) == set() and made["checks"] == []
    name = "flashnorm cute"
    made["host"] = [
        _host(n, us, "rmsnorm_dynamic_quant/token") for n, us in ((name, 9.0), (f"{name}, bare launch", 5.0))
    ]
    assert _missed(made) == {"host: flashnorm cute / flashnorm cute, bare launch"}


def test_no_bar_without_a_gpu() -> None:
    made = _report(cute=9.0, wide=999.0, cuda=9.0, host=6.5)
    del made["machine"]["capability"]
    assert _missed(made) == set()


def test_the_picture(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row for op in list(peers.BENCHES)[:5] for row in _one_shape(op, BIG, cute=1.1, compile=2.0)["rows"]]
    roofline.plot(rows, tmp_path / "bench.png", "a title")
    assert (tmp_path / "bench.png").stat().st_size > 10_000
