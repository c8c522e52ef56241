"""Settings: a pure function of a mapping, and the only reader of the environment."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from flashnorm import config
from flashnorm.config import Settings

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parent.parent


def test_nothing_set_is_all_defaults():
    assert Settings.from_env({}) == Settings()


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_empty_variables_count_as_unset(blank):
    # Every variable that the module's own table lists.
    names = re.findall(r"`([A-Z_]+)(?:=1)?`", config.__doc__ or "")
    assert len(names) > 15
    assert Settings.from_env(dict.fromkeys(names, blank)) == Settings()


def test_flags():
    on = Settings.from_env({"FLASHNORM_STRICT": "1", "FLASHNORM_GUARD": "true", "FLASHNORM_DISABLE_JIT": "1"})
    assert on.strict and on.guard and on.disable_jit
    off = Settings.from_env({"FLASHNORM_STRICT": "0", "FLASHNORM_GUARD": "False", "FLASHNORM_DISABLE_JIT": "off"})
    assert not (off.strict or off.guard or off.disable_jit)
    assert Settings.from_env({"FLASHINFER_USE_CUDA_NORM": "1"}).use_cuda_norm
    assert not Settings.from_env({"FLASHINFER_USE_CUDA_NORM": "0"}).use_cuda_norm


def test_an_unknown_backend_is_kept_as_written():
    assert Settings.from_env({"FLASHNORM_BACKEND": " Triton "}).backend == "Triton"


@pytest.mark.parametrize(
    ("text", "folders"),
    [
        (":/usr/local/cuda", ["/usr/local/cuda"]),
        ("/usr/local/cuda/", ["/usr/local/cuda"]),
        ("/opt/my cuda", ["/opt/my cuda"]),
        ("/a:/b:", ["/a", "/b"]),
        (" /a ", ["/a"]),
    ],
)
def test_cuda_home_as_people_write_it(text, folders):
    assert Settings.from_env({"CUDA_HOME": text}).cuda_home == tuple(map(Path, folders))


def test_cuda_path_comes_after_cuda_home():
    assert Settings.from_env({"CUDA_PATH": "/b", "CUDA_HOME": "/a"}).cuda_home == (Path("/a"), Path("/b"))


def test_cache_folder_of_the_platform(monkeypatch):
    monkeypatch.setattr(config.sys, "platform", "linux")
    assert Settings.from_env({"HOME": "/home/me"}).platform_cache_dir == Path("/home/me/.cache/flashnorm")
    with_xdg = Settings.from_env({"HOME": "/home/me", "XDG_CACHE_HOME": "/scratch"})
    assert with_xdg.platform_cache_dir == Path("/scratch/flashnorm")
    assert Settings.from_env({"HOME": "/me", "XDG_CACHE_HOME": "rel"}).platform_cache_dir == Path(
        "/me/.cache/flashnorm"
    )
    assert Settings.from_env({}).platform_cache_dir is None


@pytest.mark.parametrize(("text", "jobs"), [("4", 4), ("0", None), ("-1", None), ("many", None), (" 8 ", 8)])
def test_job_counts(text, jobs):
    assert Settings.from_env({"MAX_JOBS": text}).max_jobs == jobs


def test_own_job_count_goes_first():
    assert Settings.from_env({"MAX_JOBS": "2", "FLASHNORM_MAX_JOBS": "3"}).max_jobs == 3


def test_compilers_do_not_see_hidden_flags(monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    monkeypatch.setenv("CPATH", "/keep")
    seen = config.compiler_environment()
    assert "NVCC_APPEND_FLAGS" not in seen
    assert seen["CPATH"] == "/keep"
    assert os.environ["NVCC_APPEND_FLAGS"] == "--use_fast_math"


def _reads_environment(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
            return True
        imported = node.names if isinstance(node, ast.ImportFrom) and node.module == "os" else ()
        if any(alias.name in ("environ", "getenv") for alias in imported):
            return True
    return False


def test_no_other_module_reads_the_environment():
    files = [*(ROOT / "flashnorm").rglob("*.py"), *(ROOT / "jit").rglob("*.py")]
    # The DSL takes its target from an environment variable alone: the one module that calls it sets that.
    allowed = {ROOT / "flashnorm" / "config.py", ROOT / "flashnorm" / "kernels" / "compile.py"}
    assert len(files) > 10
    assert [str(path) for path in files if path not in allowed and _reads_environment(path)] == []
