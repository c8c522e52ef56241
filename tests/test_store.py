"""The artefact store: keys, damage, failing builds, full disks; nothing is compiled for a GPU."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flashnorm.jit import entry, folders, ninja, store, toolchain
from flashnorm.jit.entry import ABSENT, META, check_entry
from flashnorm.jit.env import BuildError, LoadError, MissingArtifact, run
from flashnorm.jit.spec import ArtifactSpec, safe_name, source_hash
from flashnorm.jit.store import Store
from tests.storekit import Builder, builder_fixture, cache_fixture, fake_spec, flip, load_fake, needs_root  # noqa: F401

pytestmark = pytest.mark.cpu_only


# -------------------------------------------------------------------- keys
def test_digest_depends_on_everything_and_on_nothing_else(builder):
    base = fake_spec(builder, {"a": 1, "b": (1, 2)}, toolchain={"cxx": "12"})
    same = fake_spec(None, {"b": [1, 2], "a": 1}, toolchain={"cxx": "12"})
    assert base == same and hash(base) == hash(same)
    other_key = fake_spec(builder, {"a": 2, "b": (1, 2)}, toolchain={"cxx": "12"})
    other_tool = fake_spec(builder, {"a": 1, "b": (1, 2)}, toolchain={"cxx": "13"})
    assert len({base.digest, other_key.digest, other_tool.digest}) == 3
    assert base.portable_digest == other_tool.portable_digest != other_key.portable_digest
    assert (
        fake_spec(builder, {"a": 1}).digest
        != fake_spec(builder, {"a": "1"}).digest
        != fake_spec(builder, {"a": 1.0}).digest
    )
    assert fake_spec(builder, {"a": float("nan")}).digest == fake_spec(builder, {"a": float("nan")}).digest


def test_keys_are_plain_data(builder):
    with pytest.raises(TypeError, match="plain data"):
        _ = fake_spec(builder, {"a": object()}).digest
    for name in ("", "a/b", "../x", ".hidden", "x" * 121):
        with pytest.raises(ValueError, match="name"):
            ArtifactSpec(name, {}, builder)
    assert safe_name("rms norm", "bf16/fp32", 4096) == "rms_norm-bf16_fp32-4096"


def test_source_hash(tmp_path):
    for name in "ab":
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "x.cuh").write_text("1")
        (tmp_path / name / ".hidden").write_text(name)
    assert source_hash(tmp_path / "a") == source_hash(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.cuh").write_text("1")
    assert source_hash(tmp_path / "c") != source_hash(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        source_hash(tmp_path / "nowhere")


# -------------------------------------------------------------------- the ordinary way
def test_build_once_then_find(cache, builder):
    spec = fake_spec(builder)
    assert spec.lookup(cache) is None
    with pytest.raises(MissingArtifact, match="has not been built"):
        spec.load(cache)
    path = spec.build(cache)
    assert path.parent == cache.root and path.name == f"rmsnorm-bf16-{spec.digest}"
    assert sorted(p.name for p in path.iterdir()) == ["kernel.so", META, "unit.cpp"]
    assert spec.build(cache) == path == spec.lookup(cache) == spec.build(Store(cache.root))
    assert builder.calls == 1
    meta = json.loads((path / META).read_text())
    assert meta["key"]["program"] == "P()" and meta["files"]["kernel.so"]["size"] == len(builder.content)
    assert cache.root.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o700
    assert list((cache.root / ".tmp").iterdir()) == []


def test_loaded_once(cache, builder):
    spec = fake_spec(builder)
    kernel = spec.build_and_load(cache)
    assert kernel() == builder.content and fake_spec(builder).build_and_load(cache) is kernel
    assert spec.load(Store(cache.root))() == builder.content


def test_other_keys_and_tools_are_other_entries(cache, builder):
    paths = {fake_spec(builder, {"H": h}, toolchain={"v": v}).build(cache) for h in (1, 2) for v in "ab"}
    assert len(paths) == 4 == builder.calls


# -------------------------------------------------------------------- damage
def _truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


DAMAGES = {
    "empty": lambda path: _truncate(path, 0),
    "half": lambda path: _truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "first byte": lambda path: flip(path, 0),
    "middle byte": lambda path: flip(path, path.stat().st_size // 2),
    "gone": lambda path: path.unlink(),
    "link": lambda path: (shutil.move(path, path.parent.parent / "away"), path.symlink_to(path.parent.parent / "away")),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["kernel.so", META, "unit.cpp"])
def test_a_damaged_entry_is_built_again(cache, builder, file, damage):
    spec = fake_spec(builder)
    path = spec.build(cache)
    DAMAGES[damage](path / file)
    fresh = Store(cache.root)
    assert spec.lookup(fresh) is None
    assert spec.build_and_load(fresh)() == builder.content
    assert check_entry(path, spec) is None
    assert builder.calls == 2
    assert len(list((cache.root / ".bad").iterdir())) == 1


def test_every_flipped_byte_of_the_description_is_noticed(cache, builder):
    spec = fake_spec(builder)
    path = spec.build(cache)
    text = (path / META).read_bytes()
    parsed = json.loads(text)
    for position in range(len(text)):
        changed = bytearray(text)
        changed[position] ^= 4
        (path / META).write_bytes(changed)
        if check_entry(path, spec) is None:
            assert json.loads(changed) == parsed  # white space
    (path / META).write_bytes(text)
    assert check_entry(path, spec) is None


def test_a_foreign_entry_is_a_miss(cache, builder):
    one, two = fake_spec(builder, {"H": 1024}), fake_spec(builder, {"H": 2048})
    shutil.copytree(one.build(cache), cache.root / f"{two.name}-{two.digest}")
    assert two.lookup(cache) is None
    two.build(cache)
    assert builder.calls == 2


def test_an_entry_cannot_name_files_outside(cache, builder):
    spec = fake_spec(builder)
    path = spec.build(cache)
    meta = json.loads((path / META).read_text())
    meta["files"]["../../x"] = meta["files"]["unit.cpp"]
    meta["seal"] = entry.seal(meta)
    (path / META).write_text(json.dumps(meta))
    assert "outside" in check_entry(path, spec)


@pytest.mark.parametrize("thing", ["file", "folder"])
def test_something_else_lies_where_an_entry_goes(cache, builder, thing):
    spec = fake_spec(builder)
    place = cache.root / f"{spec.name}-{spec.digest}"
    place.write_text("x") if thing == "file" else place.mkdir()
    assert spec.build_and_load(cache)() == builder.content


def test_quarantine_stays_small(cache, builder):
    spec = fake_spec(builder)
    for _ in range(12):
        _truncate(spec.build(cache) / "kernel.so", 1)
    assert len(list((cache.root / ".bad").iterdir())) <= 8


def test_damage_between_check_and_load(cache, builder):
    def loader(folder: Path):
        if builder.calls == 1:
            _truncate(folder / "kernel.so", 3)
            raise OSError("file too short")
        return load_fake(folder)

    spec = ArtifactSpec("k", {}, builder, loader=loader)
    assert spec.build_and_load(cache)() == builder.content and builder.calls == 2


def test_an_intact_entry_that_does_not_load_is_not_built_again(cache, builder):
    def loader(folder: Path):
        raise OSError("libcute_dsl_runtime.so: cannot open shared object file")

    spec = ArtifactSpec("k", {}, builder, loader=loader)
    for _ in range(2):
        with pytest.raises(LoadError, match="libcute_dsl_runtime"):
            spec.build_and_load(cache)
    assert builder.calls == 1


# -------------------------------------------------------------------- failing builds
def test_a_failing_build_leaves_nothing(cache):
    def fail(folder: Path) -> None:
        (folder / "kernel.so").write_bytes(b"half")
        run(["sh", "-c", "echo the last line; exit 3"])

    with pytest.raises(BuildError, match="the last line") as caught:
        ArtifactSpec("k", {}, fail).build(cache)
    assert "exit status 3" in str(caught.value) and "command: sh -c" in str(caught.value)
    assert list((cache.root / ".tmp").iterdir()) == []
    assert not [p for p in cache.root.iterdir() if not p.name.startswith(".")]


@pytest.mark.parametrize("content", [None, b""])
def test_a_build_without_a_kernel_fails(cache, content):
    def build(folder: Path) -> None:
        if content is not None:
            (folder / "kernel.so").write_bytes(content)

    with pytest.raises(BuildError, match=r"kernel\.so"):
        ArtifactSpec("k", {}, build).build(cache)


def test_any_exception_of_a_builder_is_a_build_error(cache):
    def build(folder: Path) -> None:
        raise KeyError("sm_130a")

    with pytest.raises(BuildError, match="KeyError: 'sm_130a'"):
        ArtifactSpec("k", {}, build).build(cache)


def test_long_output_is_cut():
    error = BuildError("no", output="\n".join(map(str, range(1000))), command="g++")
    assert len(str(error).splitlines()) < 50 and "\n999\n" in str(error) and len(error.output.splitlines()) == 1000


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full_while_building(cache, builder, code):
    def build(folder: Path) -> None:
        (folder / "kernel.so").write_bytes(b"half")
        raise OSError(code, os.strerror(code))

    with pytest.raises(BuildError, match="no space left"):
        ArtifactSpec("k", {}, build).build(cache)
    assert list((cache.root / ".tmp").iterdir()) == []


def test_disk_full_while_publishing(cache, builder, monkeypatch):
    def no_space(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "fsync_tree", no_space)
        with pytest.raises(BuildError, match="nothing was published"):
            fake_spec(builder).build(cache)
    assert fake_spec(builder).lookup(cache) is None
    assert fake_spec(builder).build_and_load(cache)() == builder.content


@needs_root
def test_a_really_full_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount")
    try:
        assert folders.prepare(place) is None
        small = Store(place / folders.LAYOUT)
        big = Builder(tmp_path / "log", b"x" * 100_000)
        with pytest.raises(BuildError, match="no space left"):
            fake_spec(big).build(small)
        with pytest.raises(BuildError, match="no space left"):  # the compiler's own words are unknown
            ArtifactSpec("k", {}, lambda f: run(["sh", "-c", f"head -c 99999 /dev/zero > '{f}/kernel.so'"])).build(
                small
            )
        assert fake_spec(Builder(tmp_path / "log2")).build_and_load(small)()
    finally:
        subprocess.run(["umount", str(place)], check=True)


# -------------------------------------------------------------------- a real library
UNIT = """
#include <tvm/ffi/c_api.h>
int VALUE(void);
int __tvm_ffi_launch(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* out) {
  out->type_index = kTVMFFIInt;
  out->v_int64 = args[0].v_int64 + VALUE();
  return 0;
}
"""


def test_two_real_libraries_keep_apart(cache):
    """Both export the same names; each artefact calls its own."""
    ffi, compiler = toolchain.find_tvm_ffi(), shutil.which("cc")
    if not ffi or compiler is None:
        pytest.skip("no TVM-FFI or no C compiler")

    def spec(value: int) -> ArtifactSpec:
        def build(folder: Path) -> None:
            (folder / "entry.c").write_text(UNIT)
            (folder / "value.c").write_text(f"int VALUE(void) {{ return {value}; }}\n")
            command = (compiler, "-fPIC", *(f"-I{path}" for path in ffi.include_dirs))
            units = [ninja.Unit(f"{name}.c", command, f"{name}.o") for name in ("entry", "value")]
            libraries = (f"-L{ffi.lib_dir}", "-ltvm_ffi")
            ninja.build(folder, units, ninja.Link((compiler, *toolchain.link_flags()), libraries=libraries))

        return ArtifactSpec("real", {"value": value}, build)

    kernels = [spec(value).build_and_load(cache) for value in (1, 2)]
    assert [kernel(40) for kernel in kernels] == [41, 42]
    assert sorted(p.name for p in spec(1).lookup(cache).iterdir()) == ["kernel.so", META]
    assert check_entry(spec(1).lookup(cache), spec(2)) not in (None, ABSENT)
