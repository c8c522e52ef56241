"""Many builders of one artefact: threads, processes, killed ones, forks, file systems without locks."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest

from flashnorm.jit import inventory, store
from flashnorm.jit.env import BuildError
from flashnorm.jit.spec import ArtifactSpec
from flashnorm.jit.store import Store
from tests.storekit import Builder, builder_fixture, cache_fixture, fake_spec, needs_fork  # noqa: F401

pytestmark = pytest.mark.cpu_only


# -------------------------------------------------------------------- many builders
def _processes(cache, slow, variants: list[int]) -> None:
    """One process for each of `variants`, all of them cold, each with a store of its own."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def work(variant: int) -> None:
        results.put((variant, fake_spec(slow, {"variant": variant}).build_and_load(Store(cache.root))()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads, on purpose
        workers = [context.Process(target=work, args=(variant,)) for variant in variants]
        for worker in workers:
            worker.start()
    got = [results.get(timeout=30) for _ in workers]
    assert sorted(got) == [(variant, slow.content) for variant in sorted(variants)]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0


@needs_fork
@pytest.mark.parametrize(
    "variants",
    [[0] * 8, [0] * 32, [n % 4 for n in range(32)], list(range(32))],
    ids=["8 of one", "32 of one", "32 of four", "32 of their own"],
)
def test_cold_processes_build_each_artefact_once(cache, tmp_path, variants):
    slow = Builder(tmp_path / "log", seconds=0.2)
    _processes(cache, slow, variants)
    assert slow.calls == len(set(variants))
    kept = [path for path in cache.root.iterdir() if not path.name.startswith(".")]
    assert len(kept) == len(set(variants))
    assert list((cache.root / ".tmp").iterdir()) == [] and not (cache.root / ".bad").exists()
    for variant in variants:
        assert fake_spec(slow, {"variant": variant}).lookup(cache) is not None


@needs_fork
def test_processes_build_while_another_one_clears(cache, tmp_path):
    """Nobody gets half an entry, and no builder loses what it is building."""
    slow = Builder(tmp_path / "log", seconds=0.1)
    stop = threading.Event()
    removed = []

    def sweep() -> None:
        while not stop.is_set():
            done = inventory.clear(cache.root)
            assert done.failed == []
            removed.extend(done.removed)
            # Not without a pause: an entry that is gone again before it is loaded is built once more, not for ever.
            stop.wait(0.05)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        _processes(cache, slow, [n % 4 for n in range(16)])
    finally:
        stop.set()
        sweeper.join()
    assert inventory.clear(cache.root).failed == []
    assert {path.name for path in cache.root.iterdir()} <= {".tmp", ".locks"}
    assert slow.calls >= 4


@needs_fork
def test_processes_build_while_another_one_removes_the_cache(cache, tmp_path):
    """All of it, locks and what is being built too, by somebody who knows nothing of them."""
    slow = Builder(tmp_path / "log", seconds=0.2)

    def remove() -> None:
        deadline = time.monotonic() + 10
        while not slow.calls and time.monotonic() < deadline:
            time.sleep(0.01)
        shutil.rmtree(cache.root.parent, ignore_errors=True)  # builders put new things there meanwhile

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        _processes(cache, slow, [n % 4 for n in range(8)])
    finally:
        remover.join()
    assert not list(cache.root.glob(".tmp/*")) and not (cache.root / ".bad").exists()


@pytest.mark.parametrize("how", ["goes on", "fails", "says so"])
def test_a_cache_that_is_removed_in_the_middle_of_a_build(how, cache, tmp_path, builder):
    seen = []

    def build(folder: Path) -> None:
        seen.append(folder)
        if len(seen) == 1:
            shutil.rmtree(cache.root.parent)
            if how == "fails":
                raise BuildError("g++: error: no such file or directory")
            if how == "goes on":
                return
        builder(folder)  # which cannot write there the first time

    assert fake_spec(build).build_and_load(cache)() == builder.content
    assert len(seen) == 2 and list((cache.root / ".tmp").iterdir()) == []


def test_a_cache_that_is_removed_while_a_lock_is_waited_for(cache, builder, monkeypatch):
    if store.fcntl is None:
        pytest.skip("no file locks here")
    real, calls = store._flock, []

    def flock(fd, name):
        calls.append(fd)
        if len(calls) == 1:
            shutil.rmtree(cache.root.parent)
        return real(fd, name)

    monkeypatch.setattr(store, "_flock", flock)
    assert fake_spec(builder).build_and_load(cache)() == builder.content
    assert len(calls) == 2 and builder.calls == 1 and not store._held


def test_a_cache_that_is_removed_again_and_again(cache):
    """Somebody wants it gone: a build ends, and says why."""
    tries = []

    def build(folder: Path) -> None:
        tries.append(folder)
        shutil.rmtree(cache.root.parent)

    with pytest.raises(BuildError, match=r"cannot be stored in .*No such file"):
        fake_spec(build).build(cache)
    assert 1 < len(tries) < 10


def test_a_file_that_a_builder_lacks_is_no_removed_cache(cache):
    tries = []

    def build(folder: Path) -> None:
        tries.append(folder)
        raise FileNotFoundError("nvcc")

    with pytest.raises(BuildError, match="building rmsnorm-bf16 failed: FileNotFoundError: nvcc"):
        fake_spec(build).build(cache)
    assert len(tries) == 1


@pytest.mark.parametrize("own_stores", [True, False])
def test_eight_threads_build_once(cache, tmp_path, own_stores):
    slow = Builder(tmp_path / "log", seconds=0.1)
    results = []

    def work() -> None:
        results.append(fake_spec(slow).build_and_load(Store(cache.root) if own_stores else cache)())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [slow.content] * 8 and slow.calls == 1


def test_different_artefacts_build_side_by_side(cache, tmp_path):
    both = threading.Barrier(2, timeout=10)

    def build(folder: Path) -> None:
        both.wait()  # passes only while the other is building too
        (folder / "kernel.so").write_bytes(b"x")

    threads = [threading.Thread(target=ArtifactSpec("k", {"n": n}, build).build, args=(cache,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both.broken


@needs_fork
def test_a_killed_builder_blocks_nobody(cache, tmp_path, builder):
    started = tmp_path / "started"

    def hang(folder: Path) -> None:
        (folder / "kernel.so").write_bytes(b"half")
        started.touch()
        time.sleep(60)

    child = os.fork()
    if child == 0:
        try:
            fake_spec(hang).build(Store(cache.root))
        finally:
            os._exit(1)
    deadline = time.monotonic() + 10
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list((cache.root / ".tmp").iterdir())) == 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    began = time.monotonic()
    assert fake_spec(builder).build_and_load(cache)() == builder.content
    assert time.monotonic() - began < 5
    assert list((cache.root / ".tmp").iterdir()) == []  # what the dead one left is gone


@needs_fork
def test_a_fork_during_a_build_keeps_no_lock(cache, tmp_path, builder):
    """A child forked by another thread in the middle of a build neither holds its lock nor waits for it."""
    inside, go_on = threading.Event(), threading.Event()

    def build(folder: Path) -> None:
        inside.set()
        go_on.wait(10)
        builder(folder)

    thread = threading.Thread(target=lambda: fake_spec(build).build(cache))
    thread.start()
    inside.wait(10)
    go_on_child, wake = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.read(go_on_child, 1)
            # The lock table of the parent said "held": here the entry is there and all locks are free.
            code = 0 if fake_spec(build, {"another": 1}).lookup(cache) is None and not store._held else 1
            code = code or (0 if fake_spec(builder, {"third": 1}).build(Store(cache.root)) else 1)
        finally:
            os._exit(code)
    go_on.set()
    thread.join(10)
    assert not thread.is_alive()
    assert fake_spec(builder).build_and_load(Store(cache.root))() == builder.content
    os.write(wake, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_lock_file_that_vanishes(cache, builder, monkeypatch):
    """A lock on a file that is no longer there excludes nobody, so it is taken again."""
    if store.fcntl is None:
        pytest.skip("no file locks here")
    spec, real, calls = fake_spec(builder), store._flock, []

    def flock(fd, name):
        locked = real(fd, name)
        if not calls:
            (cache.root / ".locks" / spec.digest).unlink()
        calls.append(fd)
        return locked

    monkeypatch.setattr(store, "_flock", flock)
    assert spec.build_and_load(cache)() == builder.content and len(calls) == 2


@needs_fork
def test_a_file_system_without_locks(cache, tmp_path, monkeypatch):
    """Work is done more than once, and everybody gets an intact entry all the same."""

    def flock(fd, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(store.fcntl, "flock", flock)
    slow = Builder(tmp_path / "log", seconds=0.1)
    _processes(cache, slow, [0] * 8)
    assert 1 <= slow.calls <= 8
    assert fake_spec(slow, {"variant": 0}).lookup(cache) is not None
    assert not list((cache.root / ".bad").iterdir()) if (cache.root / ".bad").exists() else True
