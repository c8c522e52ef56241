"""The reference against the modules it must equal to the bit, and its own promises."""

from __future__ import annotations

import pytest
import torch

from flashnorm import reference

pytestmark = pytest.mark.cpu_only

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(7, 1), (3, 5, 96), (33, 576), (5, 4097)]
MODES = ["flashinfer", "hf-llama", "hf-gemma"]
EPS = 1e-6


class LlamaForm(torch.nn.Module):
    """The operations of the Llama family's module, for machines without transformers."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class GemmaForm(LlamaForm):
    """The operations of the Gemma family's module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


def module(family: str, hidden_size: int) -> torch.nn.Module:
    """The family's real module where transformers is installed, the form above elsewhere."""
    try:
        if family == "llama":
            from transformers.models.llama.modeling_llama import LlamaRMSNorm

            return LlamaRMSNorm(hidden_size, EPS)
        from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

        return GemmaRMSNorm(hidden_size, EPS)
    except ImportError:
        return (LlamaForm if family == "llama" else GemmaForm)(hidden_size, EPS)


def tensors(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A row tensor and a weight that is nowhere one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 3
    w = torch.randn(shape[-1], generator=generator) * 0.3 + 1.2
    return x.to(dtype), w.to(dtype)


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor, rstd: torch.Tensor | None = None, **how: object
) -> None:
    reference.rmsnorm(x=x, row_index=None, input_scale=None, weight=weight, out=out, rstd=rstd, **how)


def fused_add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, **how: object) -> None:
    reference.fused_add_rmsnorm(x=x, residual=residual, weight=weight, **how)


def run(x: torch.Tensor, weight: torch.Tensor | None, mode: str, offset: float = 0.0) -> torch.Tensor:
    out = torch.full_like(x, float("nan"))
    rmsnorm(x, weight, out, eps=EPS, numerics=mode, offset=offset)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_bit_equal_to_the_family_module(family: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w = tensors(shape, dtype)
    norm = module(family, shape[-1]).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(w)
        want = norm(x)
    offset = 1.0 if family == "gemma" else 0.0
    assert torch.equal(run(x, w, f"hf-{family}", offset), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_bit_equal_to_functional_rms_norm(weighted: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w = tensors(shape, dtype)
    weight = w if weighted else None
    want = torch.nn.functional.rms_norm(x, shape[-1:], weight, EPS)
    assert torch.equal(run(x, weight, "hf-gemma"), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_fused_add_is_an_add_and_then_the_module(family: str, dtype: torch.dtype) -> None:
    x, w = tensors((33, 576), dtype)
    residual, _ = tensors((33, 576), dtype, seed=1)
    norm = module(family, 576).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(w)
        total = residual + x
        want = norm(total)
    offset = 1.0 if family == "gemma" else 0.0
    fused_add(x, residual, w, eps=EPS, numerics=f"hf-{family}", offset=offset)
    assert torch.equal(residual, total)
    assert torch.equal(x, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("residual_dtype", DTYPES, ids=str)
def test_functional_form_equals_the_one_in_place(residual_dtype: torch.dtype, mode: str) -> None:
    x, w = tensors((9, 48), torch.bfloat16)
    residual, _ = tensors((9, 48), residual_dtype, seed=1)
    given = x.clone(), residual.clone()
    h, out = torch.full_like(residual, float("nan")), torch.full_like(x, float("nan"))
    reference.add_rmsnorm(x=x, residual=residual, h=h, weight=w, out=out, eps=EPS, numerics=mode)
    assert torch.equal(x, given[0])
    assert torch.equal(residual, given[1])
    fused_add(x, residual, w, eps=EPS, numerics=mode)
    assert torch.equal(x, out)
    assert torch.equal(residual, h)


def test_only_flashinfer_norms_the_unrounded_sum() -> None:
    """1.0 + 0.00396 is 1.0039673 in fp32 and 1.0078125 in bf16: the first column tells which was normed."""
    stored = torch.tensor([1.0 + 2**-7, 0.0, 0.0, 0.0]).bfloat16()
    summand = torch.tensor([0.00396]).bfloat16().float()
    unrounded = torch.cat([summand + 1.0, torch.zeros(3)])
    for mode, h in [("flashinfer", unrounded), ("hf-llama", stored.float()), ("hf-gemma", stored.float())]:
        x = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).bfloat16()
        residual = torch.tensor([[0.00396, 0.0, 0.0, 0.0]]).bfloat16()
        # A huge eps makes the norm proportional to h, so that the rounding of h stays visible in fp32.
        wide = x.float()
        fused_add(wide, residual, None, eps=1e6, numerics=mode)
        assert torch.equal(residual[0], stored), mode
        assert torch.equal(wide[0], h * torch.rsqrt(h.pow(2).mean() + 1e6)), mode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_dtypes_round_once_to_the_input(dtype: torch.dtype, weight_dtype: torch.dtype, mode: str) -> None:
    x, _ = tensors((64, 576), dtype)
    _, w = tensors((64, 576), weight_dtype, seed=2)
    n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    n = n.to(dtype).float() if mode == "hf-llama" else n
    out = run(x, w, mode)
    assert out.dtype == dtype
    assert torch.equal(out, (n * w.float()).to(dtype))


def test_llama_mode_leaves_gemma_weights_in_fp32() -> None:
    x, w = tensors((64, 576), torch.bfloat16)
    assert torch.equal(run(x, w, "hf-llama", 1.0), run(x, w, "hf-gemma", 1.0))
    assert not torch.equal(run(x, w, "hf-llama"), run(x, w, "hf-gemma"))
    # 15.8125 + 1 has no bf16: the offset must be added in fp32.
    one = torch.ones(1, 4).bfloat16()
    gain = torch.tensor([15.8125, 0.00390625, 0.0, -1.0]).bfloat16()
    got = run(one, gain, "flashinfer", 1.0)
    assert torch.equal(got[0], torch.tensor([16.8125, 1.00390625, 1.0, 0.0]).bfloat16())


@pytest.mark.parametrize("shape", [(6, 4, 32), (6, 1, 32), (4, 32), (1, 32), (32,)], ids=str)
def test_weights_broadcast(shape: tuple[int, ...]) -> None:
    x, _ = tensors((6, 4, 32), torch.bfloat16)
    weight, _ = tensors(shape, torch.float32, seed=3)
    whole = weight.expand(6, 4, 32)
    want = torch.cat([run(x[i, j][None], whole[i, j], "hf-llama") for i in range(6) for j in range(4)])
    assert torch.equal(run(x, weight, "hf-llama").view(24, 32), want)


@pytest.mark.parametrize("shape", [(0, 16), (0, 8, 16), (4, 0, 16)], ids=str)
def test_no_rows(shape: tuple[int, ...]) -> None:
    x, w = tensors(shape, torch.float16)
    rstd = torch.empty(shape[:-1])
    rmsnorm(x, w, x, rstd, eps=EPS, numerics="flashinfer")
    fused_add(x, x.clone(), w, eps=EPS, numerics="hf-llama")


def test_out_may_be_the_input_and_rstd_is_what_was_used() -> None:
    x, w = tensors((9, 40), torch.bfloat16)
    want, rstd = run(x, w, "flashinfer"), torch.full((9,), float("nan"))
    wide = x.float()
    rmsnorm(x, w, x, rstd, eps=EPS, numerics="flashinfer")
    assert torch.equal(x, want)
    assert torch.equal(rstd, torch.rsqrt(wide.pow(2).mean(-1) + EPS))


def test_zero_row() -> None:
    zero = torch.zeros(1, 8)
    out = torch.empty_like(zero)
    rmsnorm(zero, None, out, eps=1e-6, numerics="flashinfer")
    assert torch.equal(out, zero)
    rmsnorm(zero, None, out, eps=0.0, numerics="flashinfer")
    assert out.isnan().all()


def test_unresolved_alias_is_refused() -> None:
    x, w = tensors((2, 8), torch.float32)
    with pytest.raises(KeyError):
        rmsnorm(x, w, x, eps=EPS, numerics="vllm")
    with pytest.raises(KeyError):
        fused_add(x, x.clone(), w, eps=EPS, numerics="vllm")


@pytest.mark.parametrize("mode", MODES)
def test_traces_without_a_break(mode: str) -> None:
    def call(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        rmsnorm(x, w, out, rstd, eps=EPS, numerics=mode)
        fused_add(out, residual, w, eps=EPS, numerics=mode)
        return out, rstd

    x, w = tensors((6, 48), torch.bfloat16)
    residual, _ = tensors((6, 48), torch.float32, seed=1)
    eager_residual = residual.clone()
    want = call(x, eager_residual, w)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(x, residual, w)
    assert torch.equal(residual, eager_residual)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, w = torch.empty(4, 3, 16, dtype=torch.float16), torch.empty(16)
        out, rstd = torch.empty_like(x), torch.empty(4, 3)
        rmsnorm(x, w, out, rstd, eps=EPS, numerics="hf-llama", offset=1.0)
        fused_add(out, x, w, eps=EPS, numerics="flashinfer")
