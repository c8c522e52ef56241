"""FlashInfer's own tests on flashnorm: the runner, what it tells the tests, and the helpers they ask for."""

from __future__ import annotations

import pytest
import torch

import flashnorm
from benchmarks import flashinfer_tests
from flashnorm.integrations import flashinfer as integration
from tests.test_integration_flashinfer import left_as_found

pytestmark = pytest.mark.cpu_only
__all__ = ["left_as_found"]

FILE = """
import pytest
import torch

import flashinfer
from flashinfer.trace import default_check
from flashinfer.utils import get_compute_capability


def test_what_it_is_told():
    x = torch.randn(3, 64).to(0).to(torch.float16)
    assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (10, 0)
    assert get_compute_capability(torch.device("cuda")) == (10, 0)
    generator: torch.Generator | None = torch.Generator(device="cuda:0").manual_seed(1)
    w = torch.randn(64, device="cuda", dtype=x.dtype, generator=generator)
    y = flashinfer.norm.rmsnorm(x, w)
    assert y.device.type == "cpu" and default_check(y)
    assert torch.nn.Linear(2, 2).to("cuda").weight.cuda().device.type == "cpu"


RAN = []


@pytest.mark.parametrize("case", range(7))
def test_cases(case):
    RAN.append(case)


def test_cases_over_the_matrix():
    assert RAN == list(range(7))


def test_memory():
    if torch.cuda.mem_get_info()[0] < 1e9:
        pytest.skip("no memory")


def test_error_non_cuda():
    with pytest.raises(ValueError):
        flashinfer.norm.rmsnorm(torch.ones(2, 64), torch.ones(64))


def test_wrong():
    assert flashinfer.rmsnorm(torch.ones(2, 64, device="cuda"), None).sum() == 0, "not zero"
"""


def test_a_checkout_is_run_and_told_apart(tmp_path, capsys):
    folder = tmp_path / "tests" / "utils"
    folder.mkdir(parents=True)
    (folder / "test_norm.py").write_text(FILE)
    helpers = tmp_path / "flashinfer" / "trace"
    helpers.mkdir(parents=True)
    (helpers / "__init__.py").write_text("def default_check(y):\n    return bool(y.isfinite().all())\n")
    page = tmp_path / "page.md"
    assert flashinfer_tests.main([str(tmp_path), "--cpu", "--every", "3", "--markdown", str(page)]) == 1
    text = page.read_text()
    assert text in capsys.readouterr().out
    assert "| all | 4 | 1 | 1 | 1 |" in text
    assert "served: CPU tensors" in text and "skipped: no memory" in text and "FAILED `test_norm.py` test_wrong" in text
    assert flashinfer_tests.main([str(tmp_path), "--cpu", "--every", "3", "-k", "not wrong"]) == 0
    assert flashinfer_tests.main([str(folder)]) == 2


def test_what_renormalises_probabilities_is_no_norm(tmp_path):
    folder = tmp_path / "tests" / "trace"
    folder.mkdir(parents=True)
    for name in ("rmsnorm", "top_k_renorm_probs"):
        (folder / f"test_{name}_reference_correctness.py").touch()
    assert [path.name for path in flashinfer_tests.files(tmp_path)] == ["test_rmsnorm_reference_correctness.py"]


def test_what_loads_cakes_kernels():
    """Its tests ask which program serves how many rows, and whether another number of rows loads another one."""
    with integration.install():
        from flashinfer.jit import cake_rmsnorm_train as loader

        names = loader.route_modules("sm_100a", 512, "fwd", True)
        assert names == loader.selected_modules("sm_100a", 512, "fwd", True, rows=7) == ("fwd_residual_h512",)
        assert loader.MODULES[names[0]]["select_rule"] is None
        flashnorm.rmsnorm(torch.ones(2, 8), None)
        before = loader.load.cache_info().misses
        flashnorm.rmsnorm(torch.ones(3, 8), None)
        assert loader.load.cache_info().misses == before > 0


def test_helpers_that_code_around_norms_asks_for():
    with integration.install():
        from flashinfer.cute_dsl.utils import is_cute_dsl_arch_supported
        from flashinfer.diffusion_ops import fused_qk_rmsnorm_rope
        from flashinfer.jit import MissingJITCacheError
        from flashinfer.jit.core import gen_jit_spec
        from flashinfer.utils import round_up

        assert round_up(5, 4) == 8 and is_cute_dsl_arch_supported(9, 0) and not is_cute_dsl_arch_supported(7, 0)
        assert issubclass(MissingJITCacheError, RuntimeError) and callable(fused_qk_rmsnorm_rope)
        with pytest.raises(NotImplementedError, match="gen_norm_module"):
            gen_jit_spec("norm", [])
