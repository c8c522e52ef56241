"""verify's kernels, built beside the checks of those that are there, and what is said meanwhile."""

from __future__ import annotations

import pytest
import torch

from flashnorm import verify
from flashnorm.core.op import ALL
from flashnorm.verify import cases

pytestmark = pytest.mark.cpu_only
CPU = torch.device("cpu")


def test_what_is_built_first_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are built side by side, each once; a failing one counts as there, since its call says why."""
    asked = []

    class Artifact:
        def __init__(self, route, variant, target):
            self.variant = variant

        def build(self):
            asked.append(self.variant.program.code())
            if len(asked) == 1:
                raise RuntimeError("no compiler")

    monkeypatch.setattr(verify.builds.backends, "artifact", Artifact)
    todo = [(ALL[name], cases.USUAL) for name in ("rmsnorm", "fused_add_rmsnorm", "rmsnorm")]
    with verify.builds.Builds("cpu", todo, [(ALL["layernorm"], cases.USUAL)], CPU) as ahead:
        assert ahead.total == 3
        assert sorted(ahead.in_turn()) == [0, 1, 2]
    assert ahead.built == 3 and len(asked) == len(set(asked)) == 3
    with verify.builds.Builds("cute", todo, [], CPU) as ahead:
        assert list(ahead.in_turn()) == [0, 1, 2] and ahead.total == 0


def test_progress_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    say = verify.builds.Progress()
    say("at once")
    monkeypatch.setattr(verify.builds, "SECONDS", 0.0)
    say("later")
    say.end()
    assert capsys.readouterr().err == "flashnorm verify: 0 s  later\n"
