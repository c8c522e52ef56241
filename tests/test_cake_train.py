"""The training functions under FlashInfer's names: shapes, layouts, buffers, workspaces, repeats, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashnorm
from flashnorm import cake_rmsnorm_train as cake
from flashnorm.cake_rmsnorm_train import (
    CakeRMSNormFunction,
    cake_rmsnorm,
    cake_rmsnorm_train_backward,
    cake_rmsnorm_train_backward_workspace,
    cake_rmsnorm_train_backward_workspace_bytes,
    cake_rmsnorm_train_forward,
    is_cake_rmsnorm_train_supported,
    route_key,
)
from tests import oracles
from tests.inputs import SPECIAL, gains, rows
from tests.tolerance import Pool, assert_row_gradient, assert_rstd, assert_same_bits, assert_same_sum

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-5


def values(t: int, h: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    made = {name: rows((t, h), dtype, name) for name in ("x", "residual", "g", "g_residual")}
    return {name: v.to(device) for name, v in (made | {"w": gains((h,), dtype)}).items()}


def both(v: dict[str, Any], residual: bool, **more: Any) -> tuple[torch.Tensor, ...]:
    """y, rstd, dx, dw, and h_new."""
    if not residual:
        y, rstd = cake_rmsnorm_train_forward(v["x"], v["w"], EPS)
        return y, rstd, *cake_rmsnorm_train_backward(v["g"], v["x"], v["w"], rstd, **more)
    y, rstd, h = cake_rmsnorm_train_forward(v["x"], v["w"], EPS, residual=v["residual"])
    dx, dw = cake_rmsnorm_train_backward(v["g"], h, v["w"], rstd, g_residual=v["g_residual"], **more)
    return y, rstd, dx, dw, h


def judge(v: dict[str, torch.Tensor], residual: bool, found: tuple[torch.Tensor, ...], what: str) -> None:
    added = v["residual"] if residual else None
    want = oracles.norm(v["x"], v["w"], added, eps=EPS, numerics="cake")
    more = {"dh": v["g_residual"]} if residual else {}
    gradients = oracles.gradients(v["x"], v["w"], added, dy=v["g"], eps=EPS, numerics="cake", **more)
    Pool("cake").add(found[0], want, what)
    assert_rstd(found[1], want, what)
    assert_row_gradient(found[2], gradients, what)
    assert found[3].dtype == F32
    assert_same_sum(found[3], gradients.weight, what)
    if residual:
        assert_same_bits(found[4].cpu(), want.residual, what)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("hidden", [512, 2048, 6144, 111])
def test_rows_of_every_count(hidden: int, residual: bool, device: torch.device) -> None:
    for t in (1, 2, 7, 63, 64, 65, 127, 128, 129, 255, 257):
        v = values(t, hidden, BF16, device)
        judge(v, residual, both(v, residual), f"{t} x {hidden}")


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("hidden", [512, 2048, 6144])
def test_many_rows(hidden: int, residual: bool, device: torch.device) -> None:
    for t in (16172, 16231):
        v = values(t, hidden, BF16, device)
        judge(v, residual, both(v, residual), f"{t} x {hidden}")


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_other_dtypes_and_scales(dtype: torch.dtype, residual: bool, device: torch.device) -> None:
    for scale in (1.0, 1e-3, 1e3) if dtype == F32 else (1.0,):
        v = values(33, 512, dtype, device)
        v["x"], v["residual"] = v["x"] * scale, v["residual"] * scale
        judge(v, residual, both(v, residual), f"{dtype} times {scale}")


@pytest.mark.parametrize("special", ["zero", "spike"])
def test_hard_rows(special: str, device: torch.device) -> None:
    v = values(3, 512, BF16, torch.device("cpu"))
    for row in v["x"]:
        SPECIAL[special](row)
    v = {name: t.to(device) for name, t in v.items()}
    judge(v, False, both(v, False), special)


@pytest.mark.parametrize("residual", [False, True])
def test_no_rows(residual: bool, device: torch.device) -> None:
    y, rstd, dx, dw, *_ = both(values(0, 512, BF16, device), residual, dw=torch.full((512,), torch.nan, device=device))
    assert y.shape == dx.shape == (0, 512) and rstd.shape == (0,)
    assert torch.equal(dw.cpu(), torch.zeros(512))


def test_layouts_give_the_same_bits(device: torch.device, exact_route: str) -> None:
    """Padded, misaligned, transposed, expanded: read in place or copied, never wrong."""
    import flashnorm

    v = values(9, 512, BF16, device)
    with flashnorm.backend(exact_route):
        want = both(v, True)
        for pad, shift in ((64, 0), (512, 64), (1, 1), (8, 3)):
            laid = dict(v)
            for name in ("x", "residual", "g", "g_residual"):
                wide = torch.full((9, 512 + pad), torch.nan, dtype=BF16, device=device)
                laid[name] = wide[:, min(shift, pad) :][:, :512].copy_(v[name])
            for a, b in zip(both(laid, True), want, strict=True):
                assert_same_bits(a, b, f"pad {pad}")
        for a, b in zip(
            both({k: t.t().contiguous().t() if t.dim() == 2 else t for k, t in v.items()}, True), want, strict=True
        ):
            assert_same_bits(a, b, "transposed")
        expanded = v | {"g": v["g"][:1].expand(9, 512)}
        dense = v | {"g": expanded["g"].contiguous()}
        for a, b in zip(both(expanded, True), both(dense, True), strict=True):
            assert_same_bits(a, b, "expanded")


def test_outputs_are_the_callers(device: torch.device) -> None:
    v = values(5, 512, BF16, device)
    want = both(v, True)
    nan = {"dtype": BF16, "device": device}
    for stride in (512, 640):
        out, h, dx = (torch.full((5, stride), torch.nan, **nan)[:, :512] for _ in range(3))
        rstd, dw = torch.full((5,), torch.nan, device=device), torch.full((512,), torch.nan, device=device)
        found = cake_rmsnorm_train_forward(
            v["x"], v["w"], EPS, residual=v["residual"], out=out, rstd=rstd, residual_out=h
        )  # fmt: skip
        assert found[0] is out and found[1] is rstd and found[2] is h
        made = cake_rmsnorm_train_backward(v["g"], h, v["w"], rstd, g_residual=v["g_residual"], dx=dx, dw=dw)
        assert made[0] is dx and made[1] is dw
        for a, b in zip((out, rstd, dx, dw, h), want, strict=True):
            assert_same_bits(a, b)
    out, rstd = torch.full((5, 512), torch.nan, **nan), torch.full((5,), torch.nan, device=device)
    found = cake_rmsnorm_train_forward(v["x"], v["w"], EPS, out=out, rstd=rstd)
    assert found[0] is out and found[1] is rstd
    for a, b in zip(found, cake_rmsnorm_train_forward(v["x"], v["w"], EPS), strict=True):
        assert_same_bits(a, b)


def test_a_workspace_serves_every_number_of_rows_and_repeats(device: torch.device) -> None:
    size = cake_rmsnorm_train_backward_workspace_bytes(7, 512, device)
    assert size == cake_rmsnorm_train_backward_workspace_bytes(99999, 512, device, residual=True) and size % 256 == 0
    workspace = cake_rmsnorm_train_backward_workspace(7, 512, device)
    assert workspace.dtype == torch.uint8 and workspace.numel() == size and not workspace.any()
    for t in (1, 300, 7):
        v = values(t, 512, BF16, device)
        want = both(v, True)
        for _ in range(3):
            workspace.fill_(255)  # NaN
            for a, b in zip(both(v, True, workspace=workspace), want, strict=True):
                assert_same_bits(a, b, f"{t}")


def test_rows_of_zero_gradient_change_no_bit(device: torch.device, exact_route: str) -> None:
    import flashnorm

    v, more = values(70, 512, BF16, device), values(300, 512, BF16, device)
    longer = {name: torch.cat((v[name], more[name])) if v[name].dim() == 2 else v[name] for name in v}
    longer["g"][70:] = 0
    with flashnorm.backend(exact_route):
        a, b = both(v, False), both(longer, False)
    assert_same_bits(a[3], b[3])
    assert_same_bits(a[2], b[2][:70])


def test_recorded_calls_agree(device: torch.device) -> None:
    v = values(33, 512, BF16, device)
    x, u, w = (v[name].clone().requires_grad_() for name in ("x", "residual", "w"))
    y, h = cake_rmsnorm(x, w, EPS, residual=u)
    torch.autograd.backward((y, h), (v["g"], v["g_residual"]))
    want = both(v, True)
    for a, b in zip((y, x.grad, h, u.grad), (want[0], want[2], want[4], want[2]), strict=True):
        assert_same_bits(a, b)
    assert_same_bits(w.grad, want[3].to(BF16))
    plain = CakeRMSNormFunction.apply(x, w, EPS, None, True)
    assert_same_bits(plain, both(v, False)[0])
    assert isinstance(CakeRMSNormFunction.apply(x, w, EPS, u), tuple)


def test_support_is_told_and_never_raises() -> None:
    assert is_cake_rmsnorm_train_supported("cpu") and is_cake_rmsnorm_train_supported(torch.device("cpu"), 333)
    assert not is_cake_rmsnorm_train_supported("cpu", 0) and not is_cake_rmsnorm_train_supported("nowhere")
    assert not is_cake_rmsnorm_train_supported(None)  # type: ignore[arg-type]
    assert is_cake_rmsnorm_train_supported("cuda") == torch.cuda.is_available()
    assert len(cake.ARCHES) == len(cake.SUPPORTED_COMPUTE_CAPABILITIES) and "sm_100a" in cake.ARCHES
    assert (9, 0) in cake.SUPPORTED_COMPUTE_CAPABILITIES and set(cake.__all__) <= set(dir(cake))
    assert route_key(512, "fwd", False) == "fwd_h512" and route_key(6144, "bwd", True) == "bwd_residual_h6144"


SIZES = [float("inf"), float("nan"), "abc", [], object(), 2**80, -1, 1j]


@pytest.mark.parametrize("hidden", SIZES, ids=lambda size: type(size).__name__)
def test_support_of_sizes_that_are_none(hidden: Any) -> None:
    assert is_cake_rmsnorm_train_supported("cpu", hidden) is False


class NoNumber:
    """Says so with an error of its own."""

    def __int__(self) -> int:
        raise KeyError


def test_support_never_raises_whatever_the_error() -> None:
    assert is_cake_rmsnorm_train_supported("cpu", NoNumber()) is False  # type: ignore[arg-type]


@pytest.mark.parametrize("probe", ["cake", "gate"])
@pytest.mark.parametrize("where", ["cpu", "cuda", "cuda:99", "mps", "xpu", "hpu", "xla"])
def test_support_of_devices_that_are_not_here(where: str, probe: str) -> None:
    """Those that a tensor can be on, and no other."""
    try:
        torch.empty(0, device=where)
        here = True
    except Exception:
        here = False
    if probe == "cake":
        assert is_cake_rmsnorm_train_supported(where) is here
    else:
        assert flashnorm.supports_rmsnorm_sigmoid_gate(torch.bfloat16, 128, where) is here


def test_wrong_arguments(device: torch.device) -> None:
    v = values(4, 512, BF16, device)
    x, w, g, rstd = v["x"], v["w"], v["g"], torch.ones(4, device=device)
    small = torch.zeros(16, dtype=torch.uint8, device=device)
    big = cake_rmsnorm_train_backward_workspace(4, 512, device)
    for wrong, text in (
        (lambda: cake_rmsnorm(x, w, deterministic=False), "deterministic=False"),
        (lambda: CakeRMSNormFunction.apply(x, w, EPS, None, False), "deterministic=False"),
        (lambda: cake_rmsnorm_train_backward(g, x, w, rstd, deterministic=False), "deterministic=False"),
        (lambda: cake_rmsnorm_train_forward(x[0], w, EPS), r"x must be a \[T, H\] tensor"),
        (lambda: cake_rmsnorm_train_forward(x.double(), w, EPS), "x must be bfloat16"),
        (lambda: cake_rmsnorm_train_forward(x, w[:3], EPS), "w must have shape"),
        (lambda: cake_rmsnorm_train_forward(x, w, EPS, residual=g.float()), "residual must be torch.bfloat16"),
        (lambda: cake_rmsnorm_train_forward(x, w, EPS, residual_out=g), "residual_out goes with a residual"),
        (lambda: cake_rmsnorm_train_backward(g[:2], x, w, rstd), "g must have shape"),
        (lambda: cake_rmsnorm_train_backward(g, x, w, rstd.half()), "rstd must be torch.float32"),
        (lambda: cake_rmsnorm_train_backward(g, x, w, rstd, dw=w), "dw must be torch.float32"),
        (lambda: cake_rmsnorm_train_backward(g, x, w, rstd, workspace=small), "workspace holds 16 bytes"),
        (lambda: cake_rmsnorm_train_backward(g, x, w, rstd, workspace=big.float()), "must be a 1-D uint8"),
        (lambda: cake_rmsnorm_train_backward_workspace_bytes(-1, 512, device), "rows must not be negative"),
        (lambda: cake_rmsnorm_train_backward_workspace(1, 0, device), "hidden must be 1 to"),
        (lambda: route_key(512, "both", False), "kind must be one of"),
    ):
        with pytest.raises(ValueError, match=text):
            wrong()
    for wrong in (lambda: cake_rmsnorm(3, w), lambda: cake_rmsnorm_train_backward(g, x, w, None)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
            wrong()


@pytest.mark.parametrize("given", [(), ("rstd",), ("out",), ("out", "rstd"), ("residual", "rstd")], ids="+".join)
@pytest.mark.parametrize("eps", ["1e-6", "abc", True, None, 1j, -1.0, float("nan"), float("inf")], ids=repr)
def test_eps_is_a_number(eps: Any, given: tuple[str, ...], device: torch.device) -> None:
    """Whatever else is handed over, and nothing is written before."""
    v = values(4, 64, BF16, device)
    buffers = {"rstd": torch.full((4,), torch.nan, device=device), "out": torch.full_like(v["x"], torch.nan)}
    more = {name: v[name] if name == "residual" else buffers[name] for name in given}
    error = ValueError if isinstance(eps, float) else TypeError
    with pytest.raises(error, match="eps must be"):
        cake_rmsnorm_train_forward(v["x"], v["w"], eps, **more)
    assert all(bool(t.isnan().all()) for t in buffers.values())
