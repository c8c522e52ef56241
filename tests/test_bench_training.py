"""The benchmark of training, small and on this device: it runs, checks its contenders, and writes what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import training


def test_sweep(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the sweep draws with matplotlib")
    monkeypatch.setitem(training.CONTENDERS["rmsnorm"], "wrong", lambda h: torch.nn.LayerNorm(h, bias=False))
    for contenders in training.CONTENDERS.values():  # compiling takes longer than all else
        monkeypatch.delitem(contenders, "huggingface, compiled")
    files = {name: tmp_path / f"sweep.{name}" for name in ("json", "png")}
    written = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    size = ["--rows", "16", "--hidden", "64,128", "--repeats", "2", "--device", device.type]
    assert training.main([*size, *written]) == 0
    report = json.loads(files["json"].read_text())
    assert [(e["norm"], e["hidden"]) for e in report["rows"]] == [
        (norm, hidden) for norm in ("rmsnorm", "add_rmsnorm") for hidden in (64, 128)
    ]
    for entry in report["rows"]:
        assert {"flashnorm", "torch"} <= set(entry["ms"]) and "wrong" not in entry["ms"]
        assert all(entry["ms"]["flashnorm"][mode] > 0 for mode in training.MODES)
        assert (entry["ms"]["flashnorm"]["peak_mb"] is None) == (device.type == "cpu")
    assert "off" in report["rows"][0]["failed"]["wrong"] and files["png"].stat().st_size > 10_000
