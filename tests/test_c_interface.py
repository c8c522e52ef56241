"""What units say to arguments that the library never hands them (ffi/call.h): nothing is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashnorm.backends import cpu, guard
from flashnorm.core import plan
from flashnorm.core.op import ALL
from flashnorm.ops.rmsnorm import RMSNORM
from flashnorm.program import QkLayout, QkNormRope

pytestmark = pytest.mark.cpu_only
EPS = 1e-6


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [torch.ones(3, 64), torch.ones(64), torch.full((3, 64), 7.0)]


@pytest.fixture
def launch(tensors: list[torch.Tensor]) -> Callable[..., Any]:
    made = plan.make_plan(RMSNORM, (*tensors, None), {"numerics": "flashinfer"})
    if made.explanation.route != "cpu" or made.kernel is None:
        pytest.skip("the cpu route cannot be built here")
    return made.kernel


def test_numbers_of_every_kind(launch: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    for eps, pdl in ((0, 0), (0.0, False), (False, 1)):
        launch(eps, pdl, *tensors)
        assert tensors[2].eq(1).all()
        tensors[2].fill_(7)


def test_arguments_of_another_kind(launch: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    x, weight, out = tensors
    for args, text in (
        ((EPS, False, x, weight), "expected 5 arguments, got 4"),
        ((EPS, False, x, weight, out, out), "expected 5 arguments, got 6"),
        (("small", False, x, weight, out), "argument 0 has to be a number, got an object of TVM-FFI's type"),
        ((EPS, 1.0, x, weight, out), "argument 1 has to be an integer, got a number"),
        ((EPS, False, x, None, out), "argument 3 has to be a tensor, got None"),
        ((EPS, False, x, 1, out), "argument 3 has to be a tensor, got an integer"),
        ((x, False, x, weight, out), "argument 0 has to be a number, got a tensor"),
    ):
        with pytest.raises(TypeError, match=text):
            launch(*args)
    with pytest.raises(
        ValueError, match=r"operand 1 of shape \(63\) does not fit rows of 64 elements in a grid of 1 x 3"
    ):
        launch(EPS, False, x, weight[:63], out)
    with pytest.raises(ValueError, match=r"operand 1 has element type \(2, 64\), this kernel was built for \(2, 32\)"):
        launch(EPS, False, x, weight.double(), out)
    assert out.eq(7).all()


def test_a_text_longer_than_there_is_room_for(launch: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    """A tensor of 61 dimensions, whose sizes are 12 letters each: the text is cut."""
    x, _, out = tensors
    wide = torch.ones(1).as_strided((0, *(10**9,) * 60), (1,) * 61)
    with pytest.raises(ValueError) as caught:
        launch(EPS, False, x, wide, out)
    start = "operand 1 of shape (0"
    assert str(caught.value) == (start + ", 1000000000" * 60)[:511]


def test_layouts_that_no_kernel_takes() -> None:
    layout = QkLayout((1, 1, 1), 64, rotary_dim=64, grid=(1, 1, 1), channels=(24, 20, 20))
    program = QkNormRope("head", True, False, False, False, False, layout)
    bind = cpu._loaded(program.code(), ("float32",) * len(program.operands()))
    integers, numbers = layout.integers(), layout.numbers()
    assert callable(bind(*integers, *numbers))
    with pytest.raises(ValueError, match="10 integers and a number at least, got 10"):
        bind(*integers)
    with pytest.raises(ValueError, match="a layout that no kernel takes"):
        bind(*integers, *numbers[:-1])
    with pytest.raises(ValueError, match="argument 0 is out of range, got 4294967297"):
        bind(2**32 + integers[0], *integers[1:], *numbers)
    with pytest.raises(TypeError, match="argument 2 has to be an integer, got a number"):
        bind(*integers[:2], 1.5, *integers[3:], *numbers)
    bound = bind(*integers, *numbers)
    with pytest.raises(TypeError, match="expected 8 arguments, got 0"):
        bound()


def test_guards_of_lists_that_are_out_of_step(launch: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    make = guard.load()
    assert make is not None
    x, weight, out = tensors
    plain = [False, True, -1, -1]
    words = [launch, 2, 2, 0, 1, 0, 3, x, *plain, weight, *plain, out, True, *plain[1:]]
    guarded = make(*words)
    assert guarded(EPS, False, x, weight, out) is True and out.ne(7).all()
    assert guarded(EPS, False, x, weight[:32], out) is False and guarded(EPS, False, x, weight) is False
    assert guarded(EPS, False, x, None, out) is False and guarded(EPS, False, x, 3, out) is False
    for cut in range(1, len(words)):
        with pytest.raises(TypeError, match=r"arguments are needed|has to be"):
            make(*words[:cut])
    with pytest.raises(TypeError, match="expected 22 arguments, got 23"):
        make(*words, 7)
    with pytest.raises(TypeError, match="has to be a function"):
        make(x, *words[1:])
    with pytest.raises(ValueError, match="more than 24 arguments"):
        make(launch, 2, 0, 0, 23, *[None] * 23)
    with pytest.raises(ValueError, match="a count is negative"):
        make(launch, 2, -1)


@pytest.mark.parametrize(
    ("name", "makes", "said"),
    [
        ("rmsnorm", lambda x: (x, x[0], torch.empty_like(x)), "no"),
        ("rmsnorm", lambda x: (x[:2], x[3], x[1:3]), "no"),  # rows that overlap are copied before they come here
        ("rmsnorm", lambda x: (x, torch.ones(64), x), "yes"),
        ("fused_add_rmsnorm", lambda x: (x, x.clone(), x[0].clone()), "yes"),
        ("add_rmsnorm", lambda x: (x, x.clone(), torch.empty_like(x), x[0].clone(), torch.empty_like(x)), "no"),
        ("add_rmsnorm", lambda x: (x, (r := x.clone()), r, x[0].clone(), torch.empty_like(x)), "yes"),
    ],
)
def test_a_launch_knows_whether_it_is_in_place(
    name: str, makes: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that replace what was read do not go past the caches (cpu/grain.h)."""
    emitted, says = cpu.unit, 'throw value_error() << (operands.in_place() ? "yes" : "no");'
    launching = "launch_rows(program, operands, enable_pdl);"
    monkeypatch.setattr(cpu, "unit", lambda *given: emitted(*given).replace(launching, says))
    op = ALL[name]
    names = (o.name for o in op.operands if o.name not in op.optional or o.name == "weight")
    program = op.program(frozenset(names), {"numerics": "flashinfer"})
    launch = cpu.spec(program, ("float32",) * len(program.operands())).build_and_load()
    with pytest.raises(ValueError, match=f"^{said}$"):
        launch(EPS, False, *makes(torch.ones(4, 64)))
