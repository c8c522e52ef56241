"""Finding compilers, flags for architectures that are not here, build files; no GPU, little compiling."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashnorm.config import Settings
from flashnorm.jit import dsl, ninja, toolchain
from flashnorm.jit.arch import cuda_target, device_arch, parse_arch
from flashnorm.jit.cpu import parse_cpuinfo
from flashnorm.jit.env import BuildError, Missing
from flashnorm.jit.link import find_linker

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parent.parent
CUDA_130 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


# -------------------------------------------------------------------- architectures
@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 7), "sm_107a"),
        ((11, 9), "sm_119a"),
        ((12, 1), "sm_121a"),
        ((13, 0), "sm_130a"),
    ],
)
def test_device_names(capability, name):
    assert device_arch(*capability).name == name
    assert parse_arch(name).capability == capability


@pytest.mark.parametrize("text", ["sm_90a", "compute_90a", "90a", "9.0a", " SM_90A "])
def test_ways_to_write_an_architecture(text):
    assert parse_arch(text).name == "sm_90a"


@pytest.mark.parametrize("text", ["", "hopper", "sm_", "sm_9", "9.0b", "sm_90 a", "9.10"])
def test_no_architecture(text):
    with pytest.raises(ValueError, match="sm_90a"):
        parse_arch(text)


@pytest.mark.parametrize(
    ("arch", "version", "compiled_for"),
    [
        ("sm_75", (13, 0, 88), "sm_75"),
        ("sm_90a", (13, 0, 88), "sm_90a"),
        ("sm_90a", (11, 8, 89), "sm_90"),  # knows Hopper, but not its own target
        ("sm_103a", (13, 0, 88), "sm_103a"),
        ("sm_100f", (13, 0, 88), "sm_100f"),
        ("sm_107a", (13, 0, 88), "compute_103"),
        ("sm_119a", (13, 0, 88), "compute_110"),
        ("sm_130a", (13, 0, 88), "compute_121"),
        ("sm_82", (13, 0, 88), "compute_80"),
    ],
)
def test_nvcc_targets(arch, version, compiled_for):
    target = cuda_target(arch, CUDA_130, version)
    assert target.compiled_for == compiled_for
    assert target.is_ptx == compiled_for.startswith("compute")
    base = compiled_for.replace("sm_", "compute_")
    assert target.flags == (f"-gencode=arch={base},code={compiled_for}",)


def test_nvcc_that_has_dropped_an_architecture():
    found = cuda_target("sm_70", CUDA_130, (13, 0, 88))
    assert not found and "sm_70" in found.reason and "sm_75" in found.reason


def test_what_nvcc_prints():
    text = "Cuda compilation tools, release 12.8, V12.8.93\nBuild cuda_12.8.r12.8/compiler.35583870_0\n"
    assert toolchain.parse_nvcc_version(text) == (12, 8, 93)
    assert toolchain.parse_nvcc_version("something else") is None
    assert toolchain.parse_nvcc_archs("compute_75\ncompute_110\ncompute_103\n") == (75, 103, 110)


# -------------------------------------------------------------------- finding nvcc
def _fake_tool(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return path


NVCC_SCRIPT = """case "$1" in
--version) echo "Cuda compilation tools, release 13.0, V13.0.88";;
--list-gpu-arch) echo compute_90; echo compute_100;;
esac
"""


@pytest.fixture
def empty_path(tmp_path, monkeypatch):
    """No wheels, no system toolkit: only what a test puts there."""
    monkeypatch.setattr(toolchain, "nvcc_candidates", _without_system(toolchain.nvcc_candidates))
    return tmp_path


def _without_system(candidates):
    def found(config, site_dirs):
        return [(by, path) for by, path in candidates(config, ()) if by != "/usr/local/cuda"]

    return found


@pytest.mark.parametrize("template", [":{}", "{}/", "/nowhere:{}", " {} "])
def test_cuda_home_spellings(empty_path, template):
    home = empty_path / "a cuda"
    tool = _fake_tool(home / "bin" / "nvcc", NVCC_SCRIPT)
    config = Settings.from_env({"CUDA_HOME": template.format(home), "PATH": "/nowhere"})
    found = toolchain.find_nvcc(config)
    assert found and found.path == tool and found.version == (13, 0, 88) and found.archs == (90, 100)
    assert found.found_by == "CUDA_HOME"


def test_no_nvcc_names_every_place(empty_path):
    found = toolchain.find_nvcc(Settings.from_env({"CUDA_HOME": "/nowhere/cuda", "PATH": "/nowhere"}))
    assert isinstance(found, Missing) and "/nowhere/cuda/bin/nvcc is not there" in found.reason


@pytest.mark.parametrize("script", ["exit 3\n", "echo hello\n", 'kill -9 "$$"\n'])
def test_a_broken_nvcc_is_passed_over(empty_path, script):
    broken = _fake_tool(empty_path / "broken" / "bin" / "nvcc", script)
    good = _fake_tool(empty_path / "good" / "bin" / "nvcc", NVCC_SCRIPT)
    config = Settings.from_env({"CUDA_HOME": str(broken.parent.parent), "PATH": str(good.parent)})
    assert toolchain.find_nvcc(config).path == good
    alone = Settings.from_env({"CUDA_HOME": str(broken.parent.parent), "PATH": "/nowhere"})
    assert "nvcc" in toolchain.find_nvcc(alone).reason


def _wheel_tree(root: Path) -> Path:
    tool = _fake_tool(root / "nvidia" / "cu13" / "bin" / "nvcc", NVCC_SCRIPT)
    for file in ("include/crt/host_config.h", "include/cuda_runtime.h", "nvvm/bin/cicc", "lib/libcudart_static.a"):
        (root / "nvidia" / "cu13" / file).parent.mkdir(parents=True, exist_ok=True)
        (root / "nvidia" / "cu13" / file).touch()
    (root / "nvidia" / "cu13" / "include" / "cccl").mkdir()
    return tool


def test_toolkit_of_wheels(tmp_path):
    tool = _wheel_tree(tmp_path)
    assert ("wheel nvidia-cuda-nvcc", tool) in list(
        toolchain.nvcc_candidates(Settings(path="/nowhere"), [str(tmp_path)])
    )
    found = toolchain._nvcc("wheel nvidia-cuda-nvcc", tool)
    root = tool.parent.parent
    assert found.include_dirs == (root / "include", root / "include" / "cccl") and found.lib_dirs == (root / "lib",)
    compiler = toolchain.HostCompiler(("/usr/bin/g++",), "gcc", "12", "x86_64-linux-gnu")
    assert f"-L{root / 'lib'}" in toolchain.nvcc_link_flags(found, compiler)
    assert f"-isystem={root / 'include'}" in toolchain.nvcc_flags(found, found.target("sm_90a"), compiler)


@pytest.mark.parametrize(
    ("file", "wheel"),
    [
        ("include/crt/host_config.h", "nvidia-cuda-crt"),
        ("nvvm/bin/cicc", "nvidia-nvvm"),
        ("lib/libcudart_static.a", "nvidia-cuda-runtime"),
    ],
)
def test_an_incomplete_toolkit_of_wheels_names_what_lacks(tmp_path, file, wheel):
    tool = _wheel_tree(tmp_path)
    (tool.parent.parent / file).unlink()
    found = toolchain._nvcc("wheel nvidia-cuda-nvcc", tool)
    assert not found and wheel in found.reason


def test_flags_keep_every_operation_as_written():
    compiler = toolchain.HostCompiler(("/usr/bin/ccache", "/usr/bin/g++"), "gcc", "12", "x86_64-linux-gnu")
    nvcc = toolchain.Nvcc(Path("/nvcc"), (13, 0, 88), CUDA_130)
    cuda = toolchain.nvcc_flags(nvcc, nvcc.target("sm_90a"), compiler)
    for flag in ("-fmad=false", "--ftz=false", "-prec-div=true", "-prec-sqrt=true", "-ccbin=/usr/bin/g++"):
        assert flag in cuda
    host = toolchain.cxx_flags(compiler, parse_cpuinfo("", "x86_64"))
    assert "-ffp-contract=off" in host and "-fopenmp" not in host and "-march=native" in host
    assert "-mcpu=native" in toolchain.cxx_flags(compiler, parse_cpuinfo("", "aarch64"))
    assert not any("fast" in flag for flag in (*cuda, *host))


# -------------------------------------------------------------------- host compiler, ninja, linker
def test_host_compiler_here():
    found = toolchain.find_host_compiler(Settings.from_env({"PATH": os.environ["PATH"]}))
    if isinstance(found, Missing):
        pytest.skip(found.reason)
    assert Path(found.command[0]).is_absolute() and found.version and found.machine
    assert find_linker(Settings.from_env({"PATH": os.environ["PATH"]}))


def test_cxx_with_arguments_and_blanks(tmp_path):
    tool = _fake_tool(tmp_path / "my tools" / "g++", 'echo "$(basename "$0") (Test) 1.2.3"\n')
    assert toolchain.find_host_compiler(Settings(cxx=str(tool), path="/nowhere")).command == (str(tool),)
    config = Settings(cxx="env g++ -m64", path=f"{tool.parent}:{os.environ['PATH']}")
    found = toolchain.find_host_compiler(config)
    assert found and found.command[1:] == ("g++", "-m64") and found.identity["arguments"] == ("g++", "-m64")


@pytest.mark.parametrize("text", ["/nowhere/g++", "'unclosed"])
def test_cxx_that_is_not_there_is_not_replaced(text):
    found = toolchain.find_host_compiler(Settings(cxx=text, path=os.environ["PATH"]))
    assert not found and text in found.reason


def test_nothing_on_path():
    config = Settings(path="/nowhere")
    assert not toolchain.find_host_compiler(config) and not find_linker(config)


def test_ninja_beside_python(tmp_path, monkeypatch):
    tool = _fake_tool(tmp_path / "bin" / "ninja", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert toolchain.find_ninja(Settings(path="/nowhere")).path == tool


def test_ninja_of_its_wheel(tmp_path, monkeypatch):
    """Neither on PATH nor beside Python: a wheel installed with --target, say."""
    tool = _fake_tool(tmp_path / "site" / "bin" / "ninja", "")
    info = tmp_path / "site" / "ninja-1.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ninja\nVersion: 1.13.0\n")
    (info / "RECORD").write_text("bin/ninja,,\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert toolchain.find_ninja(Settings(path="/nowhere", cxx="ninja of its wheel")).path == tool


def test_tvm_ffi_is_found_as_files():
    found = toolchain.find_tvm_ffi()
    assert found and found.library.is_file() and (found.include_dirs[0] / "dlpack" / "dlpack.h").is_file()


# -------------------------------------------------------------------- the processor
def test_processors():
    first, second = "flags\t\t: fpu sse sse2 avx2 fma md_clear ibrs\n", "flags\t\t: fpu sse sse2 fma avx2\n"
    cpu = parse_cpuinfo(f"processor: 0\n{first}\nprocessor: 1\n{second}", "x86_64")
    assert cpu.features == ("avx2", "fma", "sse", "sse2") and cpu.reason_unserved() is None
    old = parse_cpuinfo("flags : sse sse2 avx\n", "x86_64")
    assert "avx2 and fma" in old.reason_unserved()
    arm = parse_cpuinfo("Features\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "aarch64")
    assert arm.reason_unserved() is None and {"sve", "implementer-0x41", "part-0xd40"} <= set(arm.features)
    assert "riscv64" in parse_cpuinfo("", "riscv64").reason_unserved()


# -------------------------------------------------------------------- the DSL, not imported
@pytest.mark.parametrize("version", ["4.8.1", "4.8.1.dev0", "4.7.1", "4.6.0", "5.0"])
def test_dsl_versions_that_are_used(version):
    assert dsl.reason_version_refused(version) is None


@pytest.mark.parametrize("version", ["4.5.0", "4.5.2", "4.7.0", "4.7.0rc1", "4.2.1", "rubbish"])
def test_dsl_versions_that_are_not(version):
    assert version in dsl.reason_version_refused(version)


def test_dsl_architectures_from_source():
    source = """
class Arch(Enum):
    sm_80 = (8, 0, "")
    sm_101 = sm_80
    def f(self): sm_2 = 2
class Other:
    sm_1 = 1
"""
    assert dsl.read_archs(source) == {"sm_80", "sm_101"}


def test_dsl_build_decides_what_it_can_target():
    named = ("sm_90a", "sm_107a")
    assert dsl.served_archs(named, 12) == {"sm_90a"} and dsl.served_archs(named, 13) == set(named)
    found = dsl.Dsl("4.8.1", dsl.served_archs(named, 12), 12)
    assert found.reason_untargeted("sm_90a") is None
    for arch in ("sm_107a", "sm_119a", "sm_130a"):
        assert arch in found.reason_untargeted(arch)
    assert dsl.pick_toolkit([12, 13], 12) == 12 and dsl.pick_toolkit([12, 13], None) == 13


@pytest.fixture
def fresh_dsl():
    dsl.find_dsl.cache_clear()
    yield
    dsl.find_dsl.cache_clear()


def test_no_dsl(monkeypatch, fresh_dsl):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = dsl.find_dsl()
    assert not found and "not installed" in found.reason


def test_a_namesake_of_the_dsl(monkeypatch, fresh_dsl, tmp_path):
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text("raise OSError('imported')\n")
    (tmp_path / "nvidia_cutlass_dsl").mkdir()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.8.1")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "cutlass", raising=False)
    monkeypatch.delitem(sys.modules, "nvidia_cutlass_dsl", raising=False)
    found = dsl.find_dsl()
    assert not found and "hides" in found.reason


def test_asking_imports_nothing():
    # The package itself imports torch; the parts that search are loaded without it.
    code = f"""
import sys, types
for name in ("flashnorm", "flashnorm.jit"):
    module = types.ModuleType(name); module.__path__ = [{str(ROOT)!r} + "/" + name.replace(".", "/")]
    sys.modules[name] = module
from flashnorm.jit import toolchain, link
for search in (toolchain.find_dsl, toolchain.find_nvcc, toolchain.find_host_compiler, toolchain.find_tvm_ffi,
               toolchain.find_ninja, toolchain.detect_cpu, link.find_linker):
    search()
loaded = {{"torch", "cutlass", "tvm_ffi", "ninja", "numpy"}} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_the_jit_folder_under_its_own_name_fails_loudly():
    done = subprocess.run([sys.executable, "-c", "import jit"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "flashnorm.jit" in done.stderr


# -------------------------------------------------------------------- ninja
def _units(compiler: str) -> tuple[list[ninja.Unit], ninja.Link]:
    units = [
        ninja.Unit("a b.c", (compiler, "-fPIC", "-DTEXT=a $x"), "a b.o"),
        ninja.Unit("two.c", (compiler, "-fPIC"), "two.o"),
    ]
    return units, ninja.Link((compiler, "-shared"), "kernel.so", ("-lm",))


def test_build_file_escapes():
    text = ninja.ninja_text(*_units("/my cc"))
    assert "build a$ b.o: run a$ b.c\n" in text
    assert "  what = '/my cc' -fPIC '-DTEXT=a $$x' -c 'a b.c' -o 'a b.o'\n" in text
    assert "build kernel.so: run a$ b.o two.o\n  what = '/my cc' -shared 'a b.o' two.o -o kernel.so -lm\n" in text
    assert ninja.escape_path("c:/a b$") == "c$:/a$ b$$"
    with pytest.raises(ValueError, match="newline"):
        ninja.escape_path("a\nb")


@pytest.mark.parametrize("with_ninja", [True, False])
def test_building(tmp_path, with_ninja, monkeypatch):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    if not with_ninja:
        monkeypatch.setattr(ninja, "find_ninja", lambda config: Missing("none"))
    folder = tmp_path / "some $folder: here"
    folder.mkdir()
    (folder / "a b.c").write_text("int one(void) { return 1; }\n")
    (folder / "two.c").write_text("int one(void); int two(void) { return one() + 1; }\n")
    units, link = _units(compiler)
    assert ninja.build(folder, units, link, Settings(path=os.environ["PATH"])).is_file()
    (folder / "two.c").write_text("int two(void) { return unknown_name; }\n")
    with pytest.raises(BuildError, match="unknown_name") as caught:
        ninja.build(folder, units, link, Settings(path=os.environ["PATH"]))
    assert "two.c" in str(caught.value) and "command:" in str(caught.value)
