"""verify's kernels, built beside the checks of those that are there, and what is said meanwhile."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from flashnorm import recipe, verify
from flashnorm.core import device as devices
from flashnorm.core.op import ALL
from flashnorm.jit.dsl import find_dsl
from flashnorm.jit.toolchain import Missing
from flashnorm.program import Variant
from flashnorm.verify import cases

pytestmark = pytest.mark.cpu_only
CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent


def test_what_is_built_first_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are built side by side, each once; a failing one counts as there, since its call says why."""
    asked = []

    class Artifact:
        def __init__(self, route, variant, target):
            self.what = (route, target, variant.program.code())

        def build(self):
            asked.append(self.what)
            if len(asked) == 1:
                raise RuntimeError("no compiler")

    monkeypatch.setattr(verify.builds.backends, "artifact", Artifact)
    todo = [(ALL[name], cases.USUAL, cases.QUICK_SHAPES) for name in ("rmsnorm", "fused_add_rmsnorm", "rmsnorm")]
    with verify.builds.Builds("cpu", todo, [(ALL["layernorm"], cases.USUAL)], CPU) as ahead:
        assert ahead.total == 3
        assert sorted(ahead.in_turn()) == [0, 1, 2]
    assert ahead.built == 3 and len(asked) == len(set(asked)) == 3
    monkeypatch.setattr(verify.builds.devices, "facts", lambda _: devices.DeviceFacts("cuda", (9, 0)))
    asked.clear()
    with verify.builds.Builds("cuda", todo, [], CPU) as ahead:
        assert sorted(ahead.in_turn()) == [0, 1, 2]
    assert sorted(what[:2] for what in asked) == [("cpu", "host")] * 2 + [("cuda", "sm_90a")] * 2
    with verify.builds.Builds("torch", todo, [], CPU) as ahead:
        assert list(ahead.in_turn()) == [0, 1, 2] and ahead.total == 0


def test_kernels_of_the_dsl_are_built_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of all shapes that the cache has not, by processes of their own; few are this one's business."""
    monkeypatch.setattr(verify.builds.devices, "facts", lambda _: devices.DeviceFacts("cuda", (9, 0)))
    asked: list[tuple[str, ...]] = []

    class Process:
        pid = 2**22 + 1  # beyond what Linux gives

        def __init__(self, command, stdin, start_new_session, **nowhere):
            assert stdin == subprocess.PIPE and start_new_session and set(nowhere.values()) == {subprocess.DEVNULL}
            assert command[3:5] == ["precompile", "--json"]
            asked.append(recipe.read(command[command.index("--recipe") + 1]))

        def communicate(self):
            asked.append(())

    monkeypatch.setattr(verify.builds.subprocess, "Popen", Process)
    monkeypatch.setattr(verify.builds.Builds, "_start", lambda self, jobs: started.extend(job[0] for job, _ in jobs))
    started: list[str] = []
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    todo = [(ALL[name], cases.USUAL, cases.QUICK_SHAPES) for name in ("rmsnorm", "fused_add_rmsnorm", "rmsnorm")]
    here: set[str] = set()
    monkeypatch.setattr(verify.builds, "_there", lambda kernel: kernel.op in here)
    with verify.builds.Builds("cute", todo, [], CPU) as ahead:
        assert list(ahead.in_turn()) == [0, 1, 2] and ahead.total == 0
    assert started == ["cpu"] * 3  # what results are held against
    kernels, end = asked
    assert sorted((k.op, k.route, k.arch, k.variant.hidden_size) for k in kernels) == [
        (op, "cute", "sm_90a", h) for op in ("fused_add_rmsnorm", "rmsnorm") for h in (1000, 1024, 8200)
    ]
    assert end == () and list(tmp_path.iterdir()) == []
    here.add("rmsnorm")
    with verify.builds.Builds("cute", todo, [], CPU):
        pass
    assert len(asked) == 2


def test_a_kernel_without_a_plan_is_not_built_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be named cannot be built either: verify goes on, and the operator's own line says why."""

    def artifact(route, variant, arch):
        raise ValueError("no plan")

    monkeypatch.setattr(verify.builds.backends, "artifact", artifact)
    monkeypatch.setattr(verify.builds.devices, "facts", lambda _: devices.DeviceFacts("cuda", (9, 0)))
    monkeypatch.setattr(verify.builds.subprocess, "Popen", lambda *_, **__: pytest.fail("nothing to build"))
    todo = [(op, cases.USUAL, cases.QUICK_SHAPES) for op in ALL.values() if "cute" in op.routes][:4]
    with verify.builds.Builds("cute", todo, [], CPU) as ahead:
        assert sorted(ahead.in_turn()) == [0, 1, 2, 3]


def alive(group: int) -> list[str]:
    """Processes of a group that have not ended; whose parent has not asked how is in /proc all the same."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
            found += [path.parent.name] if state != "Z" and int(of) == group else []
    return found


STARTED = """
import sys, time
from tests.test_verify_builds import many
from flashnorm.verify import builds
builds._there = lambda _: False
beside = builds.Beside(many())
print(beside._process.pid, flush=True)
time.sleep(600)
"""


def many() -> list[recipe.Kernel]:
    def variant(hidden: int) -> Variant:
        return verify.builds.variant_of(ALL["rmsnorm"], cases.USUAL, CPU, hidden)

    return [recipe.Kernel("rmsnorm", "cute", "sm_90a", variant(64 * i)) for i in range(1, 40)]


@pytest.mark.skipif(isinstance(find_dsl(), Missing), reason="needs the CuTe DSL")
@pytest.mark.parametrize("how", ["at its end", "killed"])
def test_what_is_beside_ends_with_verify(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also what it has begun, and however verify ends: nothing is left running."""
    monkeypatch.setattr(verify.builds, "_there", lambda _: False)
    monkeypatch.setenv("FLASHNORM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if how == "killed":
        other = subprocess.Popen([sys.executable, "-c", STARTED], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        group = int(other.stdout.readline())
    else:
        beside = verify.builds.Beside(many())
        group = beside._process.pid
    deadline = time.monotonic() + 120
    while not list((tmp_path / "cache").glob("v1/cute-*")):
        assert alive(group) and time.monotonic() < deadline
        time.sleep(0.1)
    if how == "killed":
        other.kill()
        other.communicate()
    else:
        beside.end()
        assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    while alive(group):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert 0 < len(list((tmp_path / "cache").glob("v1/cute-*"))) < len(many())


def test_progress_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    say = verify.builds.Progress()
    say("at once")
    monkeypatch.setattr(verify.builds, "SECONDS", 0.0)
    say("later")
    say.end()
    assert capsys.readouterr().err == "flashnorm verify: 0 s  later\n"


def test_lines_are_counted_once_over_all_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every route's, and those of what is no row program: who waits sees one total."""
    monkeypatch.setattr(verify, "serves", lambda op, route, device: None if route in ("cpu", "torch") else "not here")
    monkeypatch.setattr(
        verify, "verify_line", lambda op, route, case, device, *_: verify.new_line(op, route, case, device)
    )
    monkeypatch.setattr(verify.turned, "_verify", lambda *_: None)
    monkeypatch.setattr(verify.builds, "COMPILED", ())
    for routes in (("cpu", "torch"), ()):
        said: list[str] = []
        found, _ = verify.check_device(CPU, quick=True, routes=routes, say=said.append)
        counted = [text.split("; ")[0] for text in said if " of " in text]
        assert counted == [f"cpu: {n} of {len(found)} lines" for n in range(1, len(found) + 1)]
        assert {line.route for line in found} == set(routes or ("cpu",))
        assert any("fused_qk_rmsnorm_rope" in text for text in said)


def command(**given: object) -> argparse.Namespace:
    plain = {"quick": True, "json": False, "device": "cpu", "ops": "rmsnorm", "routes": "cpu", "html": "", "arch": []}
    return argparse.Namespace(**{**plain, **given})


@pytest.mark.parametrize("place", ["nowhere/page.html", "."])
@pytest.mark.parametrize("json", [False, True])
def test_a_page_that_cannot_be_written_is_told_at_once(place, json, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(verify, "check_device", lambda *_, **__: pytest.fail("checked before the file was tried"))
    assert verify.run(command(html=str(tmp_path / place), json=json)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("flashnorm verify: ") and str(tmp_path) in printed.err and printed.out == ""


def test_trying_a_page_leaves_what_was_there(tmp_path, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "check_device", interrupted)
    old, new = tmp_path / "old.html", tmp_path / "new.html"
    old.write_text("a page")
    for file in (old, new):
        with pytest.raises(KeyboardInterrupt):
            verify.run(command(html=str(file)))
    assert old.read_text() == "a page" and not new.exists()


def test_a_device_that_is_not_here_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setattr(verify.devices, "visible", lambda: [CPU])
    assert verify.run(command(device="cuda")) == 2
    printed = capsys.readouterr()
    assert printed.err == "flashnorm verify: there is no CUDA device here\n" and printed.out == ""
