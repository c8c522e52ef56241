"""Folders of the artefact store: precompiled kernels, missing and read-only homes, other users, traps."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from pathlib import Path

import pytest

from flashnorm.config import Settings
from flashnorm.jit import aot, folders
from flashnorm.jit.entry import check_entry
from flashnorm.jit.env import BuildError, LoadError, MissingArtifact
from flashnorm.jit.folders import choose_folders
from flashnorm.jit.spec import ArtifactSpec
from flashnorm.jit.store import Store
from tests.storekit import builder_fixture, cache_fixture, fake_spec, flip, load_fake, needs_root  # noqa: F401

pytestmark = pytest.mark.cpu_only


# -------------------------------------------------------------------- precompiled
def test_aot_folder_serves_whoever_has_other_tools(cache, builder, tmp_path):
    out = tmp_path / "aot dir"
    path = aot.export(fake_spec(builder, toolchain={"nvcc": "13.0"}), out, cache)
    assert aot.export(fake_spec(builder, toolchain={"nvcc": "13.0"}), out, cache) == path and path.parent == out
    elsewhere = fake_spec(None, toolchain={"nvcc": None})
    served = Store(None, aot_dirs=[out], disabled=True)
    assert elsewhere.lookup(served) == path and elsewhere.load(served)() == builder.content
    assert builder.calls == 1 and not list(out.glob(".tmp*"))
    assert path.stat().st_mode & 0o055 == 0o055


def test_aot_folder_comes_first_and_a_broken_entry_in_it_is_passed_over(cache, builder, tmp_path, caplog):
    spec, out = fake_spec(builder), tmp_path / "aot"
    path = aot.export(spec, out, cache)
    both = Store(cache.root, aot_dirs=[out])
    assert spec.lookup(both) == path
    flip(path / "kernel.so", 0)
    for _ in range(2):
        assert spec.lookup(both) == cache.root / f"{spec.name}-{spec.digest}"
    assert len([r for r in caplog.records if "passed over" in r.message]) == 1
    assert path.exists()  # it is not ours to move
    assert aot.export(spec, out, cache) == path and check_entry(path, spec, portable=True) is None


def test_an_aot_kernel_that_does_not_load_gives_way(cache, builder, tmp_path):
    out = tmp_path / "aot"

    def loader(folder: Path):
        if folder.parent == out:
            raise OSError("version `GLIBC_9.9' not found")
        return load_fake(folder)

    spec = ArtifactSpec("k", {}, builder, loader=loader)
    aot.export(spec, out, cache)
    assert spec.build_and_load(Store(cache.root, aot_dirs=[out]))() == builder.content
    with pytest.raises(LoadError, match="GLIBC"):
        spec.build_and_load(Store(None, aot_dirs=[out], disabled=True))


def test_export_all_goes_on_after_a_failure(cache, builder, tmp_path):
    def fail(folder: Path) -> None:
        raise BuildError("no")

    good, bad = fake_spec(builder), ArtifactSpec("bad", {}, fail)
    seen = []
    results = aot.export_all(
        [bad, good, good], tmp_path / "out", store=cache, progress=lambda spec, result: seen.append(spec.name)
    )
    assert isinstance(results[bad], BuildError) and isinstance(results[good], Path)
    assert sorted(seen) == ["bad", good.name] and builder.calls == 1


def test_disabled_says_what_is_missing(cache, builder, tmp_path, caplog):
    """The command first, in one line; what a kernel is made of may be pages, and is for those who debug."""
    caplog.set_level("DEBUG", logger="flashnorm")
    spec = fake_spec(
        builder, {"op": "rmsnorm", "arch": "sm_90a"}, how_to_get="flashnorm precompile --arch sm_90a --out DIR"
    )
    disabled = Store(cache.root, aot_dirs=[tmp_path / "aot"], disabled=True)
    with pytest.raises(MissingArtifact) as caught:
        spec.build_and_load(disabled)
    text = str(caught.value)
    assert text.startswith("`flashnorm precompile --arch sm_90a --out DIR` makes it, for FLASHNORM_AOT_DIR=DIR; ")
    assert len(text.splitlines()) == 1 and "arch=sm_90a" not in text
    assert [(r.levelname, "arch=sm_90a" in r.message) for r in caplog.records] == [("DEBUG", True)]
    for part in (
        "rmsnorm-bf16",
        str(tmp_path / "aot"),
        "FLASHNORM_DISABLE_JIT",
    ):
        assert part in text
    assert builder.calls == 0
    spec.build(cache)  # what the cache has is served all the same
    assert spec.build_and_load(disabled)() == builder.content


# -------------------------------------------------------------------- folders
@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The system's temporary folder, for this test alone."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(folders.tempfile, "tempdir", str(place))
    folders._temporary_root.cache_clear()
    yield place
    folders._temporary_root.cache_clear()


def test_named_and_platform_folders(tmp_path):
    config = Settings.from_env({"HOME": str(tmp_path), "FLASHNORM_CACHE_DIR": str(tmp_path / "my cache")})
    assert choose_folders(config).root == tmp_path / "my cache" / "v1"
    assert choose_folders(Settings.from_env({"HOME": str(tmp_path)})).root == tmp_path / ".cache" / "flashnorm" / "v1"
    assert (tmp_path / ".cache" / "flashnorm").stat().st_mode & 0o777 == 0o700


def test_an_open_folder_is_closed(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1").chmod(0o777)
    assert folders.prepare(tmp_path) is None
    assert (tmp_path / "v1").stat().st_mode & 0o777 == 0o700


def _temporary_with_warning(config: Settings, temporary: Path, reason: str) -> folders.Folders:
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        found = choose_folders(config)
    assert len(caught) == 1 and "FLASHNORM_CACHE_DIR" in str(caught[0].message)
    assert found.temporary and found.root.is_relative_to(temporary) and found.root.stat().st_mode & 0o777 == 0o700
    return found


def test_no_home(temporary, builder):
    found = _temporary_with_warning(Settings.from_env({}), temporary, "no home")
    assert fake_spec(builder).build_and_load(Store(found.root))() == builder.content
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert choose_folders(Settings.from_env({})) == found  # shared by this user's processes


def test_home_that_does_not_exist_and_cannot_be_made(temporary, tmp_path):
    (tmp_path / "file").write_text("")
    _temporary_with_warning(Settings(home=tmp_path / "file" / "home"), temporary, "cannot be written")
    _temporary_with_warning(Settings(cache_dir=tmp_path / "file"), temporary, "not a folder")


def test_read_only_folder(temporary, tmp_path, builder, monkeypatch):
    """Its entries are served still; new ones go to the temporary folder. Root may write anywhere, hence the patch."""
    place = tmp_path / "cache"
    assert folders.prepare(place) is None
    spec = fake_spec(builder)
    spec.build(Store(place / "v1"))
    real = folders.tempfile.mkdtemp

    def mkdtemp(*args, **kwargs):
        if str(kwargs.get("dir", "")).startswith(str(place)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(*args, **kwargs)

    monkeypatch.setattr(folders.tempfile, "mkdtemp", mkdtemp)
    found = _temporary_with_warning(Settings(cache_dir=place), temporary, "Read-only file system")
    assert found.readable == (place / "v1",)
    used = Store(found.root, readable=found.readable)
    assert spec.build(used).parent == place / "v1" and builder.calls == 1
    assert fake_spec(builder, {"new": 1}).build(used).parent == found.root


@needs_root
@pytest.mark.parametrize("which", ["cache", "layout"])
def test_another_users_folder(temporary, tmp_path, which):
    place = tmp_path / "cache"
    (place / "v1").mkdir(parents=True, mode=0o777)
    os.chown(place if which == "cache" else place / "v1", 12345, 12345)
    found = _temporary_with_warning(Settings(cache_dir=place), temporary, "another user")
    assert found.readable == (() if which == "layout" else (place / "v1",))


@needs_root
def test_another_users_files_in_ones_own_folder(cache, builder):
    spec = fake_spec(builder)
    os.chown(spec.build(cache) / "kernel.so", 12345, 12345)
    assert spec.lookup(cache) is None
    spec.build(cache)
    assert builder.calls == 2


def set_trap(place, trap, tmp_path):
    """What somebody else may have put where a temporary folder is to be."""
    if trap == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
        place.chmod(0o777)
        if trap == "owner":
            os.chown(place, 12345, 12345)


@needs_root
@pytest.mark.parametrize("trap", ["owner", "link", "open"])
def test_a_trap_in_the_temporary_folder(temporary, tmp_path, trap):
    place = temporary / f"flashnorm-{os.geteuid()}"
    set_trap(place, trap, tmp_path)
    found = _temporary_with_warning(Settings.from_env({}), temporary, "no home")
    assert not found.root.is_relative_to(place)


# -------------------------------------------------------------------- a folder that is removed while it is used
@pytest.mark.parametrize("gone", ["v1", "my cache", "outer"])
def test_a_removed_cache_is_made_again(gone, tmp_path, builder):
    place = tmp_path / "outer" / "my cache"
    used = Store.from_settings(Settings(cache_dir=place))
    assert fake_spec(builder).build_and_load(used)() == builder.content
    made = {path: path.stat().st_mode for path in (place, place / "v1", *(place / "v1").glob(".*"))}
    shutil.rmtree(next(path for path in (place / "v1", *(place / "v1").parents) if path.name == gone))
    other = fake_spec(builder, {"dtype": "another"})
    assert other.build_and_load(used)() == builder.content and other.lookup(used).parent == place / "v1"
    assert {path: path.stat().st_mode for path in made} == made
    # What is loaded stays so, and what is not is built once more.
    assert fake_spec(builder).build_and_load(used)() == builder.content and builder.calls == 2
    assert fake_spec(builder).build_and_load(Store(used.root))() == builder.content and builder.calls == 3


def test_a_removed_temporary_folder_is_made_again(temporary, builder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        used = Store.from_settings(Settings.from_env({}))
    shutil.rmtree(used.root.parent)
    assert fake_spec(builder).build_and_load(used)() == builder.content
    assert used.root.parent.stat().st_mode & 0o777 == used.root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trap", [pytest.param("owner", marks=needs_root), "link", "open"])
def test_a_trap_where_a_temporary_folder_was(trap, temporary, tmp_path, builder):
    """Somebody else was faster to make it, in a place open to all: nothing is built there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        used = Store.from_settings(Settings.from_env({}))
    place = used.root.parent
    shutil.rmtree(place)
    set_trap(place, trap, tmp_path)
    with pytest.raises(BuildError, match=r"cannot be stored in .* is not this user's alone"):
        fake_spec(builder).build(used)
    assert builder.calls == 0 and not any(place.iterdir())


@needs_root
def test_another_user_where_a_cache_was(cache, builder):
    shutil.rmtree(cache.root.parent)
    cache.root.parent.mkdir()
    os.chown(cache.root.parent, 12345, 12345)
    with pytest.raises(BuildError, match=r"cannot be stored in .* belongs to another user \(12345\)"):
        fake_spec(builder).build(cache)
    assert builder.calls == 0 and not any(cache.root.parent.iterdir())


def test_disabled_creates_nothing(tmp_path, builder):
    config = Settings(cache_dir=tmp_path / "cache", disable_jit=True)
    with pytest.raises(MissingArtifact):
        fake_spec(builder).build(Store.from_settings(config))
    assert not (tmp_path / "cache").exists()
    fake_spec(builder).build(Store.from_settings(Settings(cache_dir=tmp_path / "cache")))
    assert fake_spec(builder).build_and_load(Store.from_settings(config))() == builder.content
