"""A model that trains: the example's small one, with and without flashnorm."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the example trains a model of transformers")
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("train_smollm2")
    torch.use_deterministic_algorithms(False)


def test_loss_curves(example: Any, device: torch.device, tmp_path: Path) -> None:
    """The curves repeat to the bit, and are closer to those without flashnorm than two orders of the text."""
    pytest.importorskip("matplotlib", reason="the example draws with matplotlib")
    files = {name: tmp_path / f"train.{name}" for name in ("json", "png")}
    size = ["--steps", "24", "--batch", "4", "--length", "32", "--lr", "3e-3", "--device", device.type]
    written = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    assert example.main(["--tiny", *size, *written]) == 0
    result = json.loads(files["json"].read_text())
    assert result["repeats_bit_for_bit"] and result["runs"]["with"]["patched"] == 5
    for run in result["runs"].values():
        assert len(run["losses"]) == 24 and run["losses"][-1] < run["losses"][0] - 0.3, "nothing was learnt"
    assert 0 <= result["distance_with_to_without"] < result["distance_of_two_orders"]
    assert files["png"].stat().st_size > 10_000


def test_the_example_says_what_went_wrong(example: Any) -> None:
    args = example.parse(["--tiny", "--steps", "3"])
    assert example.smooth([1.0, 2.0]) == [1.5] and example.distance([1.0] * 9, [2.0] * 9) == 1.0
    assert args.tiny and args.steps == 3


def test_the_example_says_what_is_not_installed(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match="transformers is not installed: pip install"):
        example.main(["--tiny", "--steps", "1"])
