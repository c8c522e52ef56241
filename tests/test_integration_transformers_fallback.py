"""Calls that no kernel serves run a patched module's original forward, in eager mode and compiled."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from flashnorm.core.checks import MAX_HIDDEN
from flashnorm.integrations.transformers import patch
from tests.test_integration_transformers import GemmaRMSNorm, LlamaRMSNorm, calls, layer, x_of  # noqa: F401

pytestmark = pytest.mark.cpu_only

Function = Callable[..., Any]
MAKERS: dict[str, Callable[[], nn.Module]] = {"llama": LlamaRMSNorm, "gemma": GemmaRMSNorm, "layer": lambda: layer(64)}


@pytest.fixture(params=MAKERS)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """A module as it was, and a patched copy of it."""
    return both(MAKERS[request.param]())


def both(norm: nn.Module) -> tuple[nn.Module, nn.Module]:
    patched = copy.deepcopy(norm)
    assert patch(patched) == 1
    return norm, patched


def outcome(function: Function, *args: Any) -> Any:
    """What a call gives: its result, or the type and the text of its error."""
    try:
        return function(*args)
    except Exception as error:
        return type(error), str(error)


def same(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert type(got) is type(want)
        parts = [t.unbind() if t.is_nested else [t] for t in (got, want)]
        for mine, original in zip(*parts, strict=True):
            torch.testing.assert_close(mine, original, rtol=0, atol=0, equal_nan=True)
    else:
        assert got == want


def compiled(function: Function, backend: str = "aot_eager", **options: Any) -> Function:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, **options)


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([x_of(3, 64), x_of(5, 64)], layout=layout)


# ------------------------------------------------------------------ under torch.compile
def derivative(norm: Function) -> Function:
    return torch.func.grad(lambda x: norm(x).square().sum())


def mapped(norm: Function) -> Function:
    return torch.func.vmap(norm)


def tangent(norm: Function) -> Function:
    return lambda x: torch.func.jvp(norm, (x,), (x.flip(0),))[1]


@pytest.mark.parametrize("transform", [derivative, mapped, tangent])
def test_compiled_transforms(
    transform: Callable[[Function], Function],
    pair: tuple[nn.Module, nn.Module],
    calls: list[tuple[str, str]],
) -> None:
    norm, patched = pair
    x = x_of(4, 64)
    # What PyTorch 2.13 leaves behind of a compilation that failed (a tangent of nn.LayerNorm) holds a dispatch state
    # without autograd, which becomes the thread's own as soon as it is collected: in any test after this one.
    with torch._C._PreserveDispatchKeyGuard():
        want = outcome(compiled(transform(norm), fullgraph=True), x)
        gc.collect()
    if not isinstance(want, torch.Tensor):
        pytest.skip("PyTorch does not compile this of the original")
    same(compiled(transform(patched), fullgraph=True)(x), want)
    assert calls == []


def test_forward_mode_through_a_compiled_module(pair: tuple[nn.Module, nn.Module]) -> None:
    """A graph that was compiled for plain calls does not serve one at a dual level."""
    norm, patched = pair
    x, function = x_of(4, 64), compiled(patched, "eager")  # AOTAutograd's own graphs have no forward mode
    function(x)
    with forward_ad.dual_level():
        got, want = (forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.flip(0)))).tangent for f in (function, norm))
        same(got, want)


def test_compiled_jagged(pair: tuple[nn.Module, nn.Module]) -> None:
    norm, patched = pair
    x = nested(torch.jagged)
    same(compiled(patched, fullgraph=True)(x), norm(x))


def test_ordinary_calls_compile_to_the_operator(pair: tuple[nn.Module, nn.Module]) -> None:
    """One graph without a break for all numbers of rows, and the kernels' bits."""
    _, patched = pair
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Function:
        seen.extend(str(node.target) for node in graph.graph.nodes if "flashnorm" in str(node.target))
        return graph.forward

    torch._dynamo.reset()
    function = torch.compile(patched, fullgraph=True, backend=backend)
    with torch.no_grad():
        for rows in (4, 5, 9):
            x = x_of(rows, 64)
            torch._dynamo.mark_dynamic(x, 0)
            assert torch.equal(function(x), patched(x))
    assert len(seen) == 1


# ------------------------------------------------------------------ tensors and values
def sparse() -> torch.Tensor:
    return x_of(4, 64).to_sparse()


def test_meta() -> None:
    for make in MAKERS.values():
        _, patched = both(make())
        got = patched.to("meta")(torch.empty(3, 64, device="meta"))
        assert got.is_meta
        assert got.shape == (3, 64)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nested(torch.strided),
        lambda: nested(torch.jagged),
        sparse,
        lambda: torch.tensor(1.5),
        lambda: x_of(4, 1),
        lambda: x_of(4, 32),
        lambda: x_of(4, 0),
        lambda: None,
        lambda: "x",
    ],
    ids=["nested", "jagged", "sparse", "0-d", "one column", "narrow", "no columns", "None", "str"],
)
def test_inputs_that_no_kernel_takes(
    make: Callable[[], Any],
    pair: tuple[nn.Module, nn.Module],
    calls: list[tuple[str, str]],
) -> None:
    norm, patched = pair
    x = make()
    same(outcome(patched, x), outcome(norm, x))
    assert calls == []


@pytest.mark.parametrize("eps", [-1e-3, float("inf"), float("nan"), 1e39, None, torch.tensor(0.5)], ids=str)
def test_eps_that_no_kernel_takes(
    eps: Any,
    pair: tuple[nn.Module, nn.Module],
    calls: list[tuple[str, str]],
) -> None:
    for module in pair:
        setattr(module, "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps", eps)
    norm, patched = pair
    same(outcome(patched, x_of(4, 64)), outcome(norm, x_of(4, 64)))
    if isinstance(eps, float):
        same(compiled(patched, fullgraph=True)(x_of(4, 64)), norm(x_of(4, 64)))
    assert calls == []


@pytest.mark.parametrize("make", [LlamaRMSNorm, GemmaRMSNorm, layer])
def test_rows_beyond_the_widest(make: Callable[[int], nn.Module], calls: list[tuple[str, str]]) -> None:
    norm, patched = both(make(MAX_HIDDEN + 1))
    x = x_of(2, MAX_HIDDEN + 1)
    same(patched(x), norm(x))
    assert calls == []


@pytest.mark.parametrize(
    "weight", [None, torch.ones(3, 64), torch.ones(64, device="meta")], ids=["none", "2-d", "meta"]
)
def test_weights_that_came_after_the_patch(
    weight: torch.Tensor | None,
    pair: tuple[nn.Module, nn.Module],
    calls: list[tuple[str, str]],
) -> None:
    norm, patched = pair
    if weight is None and isinstance(norm, nn.LayerNorm):
        pytest.skip("a LayerNorm without a weight is served")
    for module in pair:
        module.weight = None if weight is None else nn.Parameter(weight)
    same(outcome(patched, x_of(3, 64)), outcome(norm, x_of(3, 64)))
    assert calls == []


def test_a_width_that_no_weight_tells(calls: list[tuple[str, str]]) -> None:
    norm, patched = both(layer(64, affine=False))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm(x_of(3, 32))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        patched(x_of(3, 32))
    assert calls == []
    patched(x_of(3, 64))
    assert len(calls) == 1


# ------------------------------------------------------------------ torch.export
@pytest.mark.parametrize("strict", [True, False])
def test_export_of_a_patched_root(strict: bool, pair: tuple[nn.Module, nn.Module]) -> None:
    """Inputs keep the names of the original's parameters."""
    norm, patched = pair
    name = "hidden_states" if isinstance(norm, LlamaRMSNorm) else "input" if isinstance(norm, nn.LayerNorm) else "x"
    rows = {name: {0: torch.export.Dim("rows", min=2)}}
    program = torch.export.export(patched, (x_of(4, 64),), dynamic_shapes=rows, strict=strict)
    assert any("flashnorm" in str(node.target) for node in program.graph.nodes)
    assert name in [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert torch.equal(program.module()(x_of(9, 64)), patched(x_of(9, 64)))
