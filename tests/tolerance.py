"""How far a result may be from the oracle: the contract's accuracy rule, and nothing else.

Distances are counted in steps of the dtype (units in the last place, across zero and powers of
two, infinities one step past the largest finite number). A `Pool` gathers many results, because
shares mean something over a hundred thousand elements only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tests.oracles import LLAMA, Expected

_INT = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
FAR = 2**40  # a NaN against a number

MIN_SHARE_ELEMENTS = 100_000
EQUAL_SHARE = 0.999
FP32_RELATIVE, FP32_OF_LARGEST, RSTD_RELATIVE = 2e-6, 1e-6, 1e-6
EAGER_FACTOR = 2.0


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The integer representation."""
    return tensor.detach().contiguous().view(_INT[tensor.dtype])


def steps_between(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance in steps of the dtype, int64; NaN equals NaN; +0 and -0 are one step apart in sign only (0 steps)."""
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)

    def ordered(t: torch.Tensor) -> torch.Tensor:
        raw = bits_of(t).to(torch.int64)
        lowest = -(2 ** (t.element_size() * 8 - 1))
        return torch.where(raw < 0, lowest - raw, raw)

    distance = (ordered(a) - ordered(b)).abs()
    nan_a, nan_b = a.isnan(), b.isnan()
    distance = torch.where(nan_a ^ nan_b, torch.full_like(distance, FAR), distance)
    return torch.where(nan_a & nan_b, torch.zeros_like(distance), distance)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal representations; NaN payloads are exempt."""
    return not bool(different_bits(a, b).any())


def different_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where the representations differ, NaN payloads exempt."""
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    return (bits_of(a) != bits_of(b)) & ~(a.isnan() & b.isnan())


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """Fails with the first differing element, its values and how many there are."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, want = got.detach().cpu(), want.detach().cpu()
    wrong = different_bits(got, want)
    if bool(wrong.any()):
        where = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements have other bits; first at {where}: "
            f"{got[where].item()!r}, expected {want[where].item()!r}"
        )


def max_steps(dtype: torch.dtype, numerics: str) -> int:
    """The contract's bound for 16-bit results."""
    assert dtype in (torch.float16, torch.bfloat16)
    return 2 if numerics in LLAMA else 1


@dataclass
class Pool:
    """Results of one operator, dtype and mode, judged one by one and as a share.

    Attributes:
        numerics: the mode, which decides the step bound of 16-bit results.
    """

    numerics: str
    elements: int = 0
    equal: int = 0
    own_error: list[float] = field(default_factory=list)
    eager_error: list[float] = field(default_factory=list)
    own_worst: float = 0.0
    eager_worst: float = 0.0

    def add(self, got: torch.Tensor, want: Expected, what: str, eager: torch.Tensor | None = None) -> None:
        """Judges one output; remembers its share and, given eager PyTorch's result, both errors."""
        got = got.detach().cpu()
        rows = want.judged
        assert got.shape == want.out.shape, f"{what}: shape {tuple(got.shape)}"
        assert got.dtype == want.rounded.dtype, f"{what}: dtype {got.dtype}"
        got, exact, rounded = got[rows], want.out[rows], want.rounded[rows]
        if not got.numel():
            return
        if got.dtype == torch.float32:
            close = exact.abs() * FP32_RELATIVE + exact.abs().amax(-1, keepdim=True) * FP32_OF_LARGEST
            wrong = ~((got.double() - exact).abs() <= close)
            # an fp32 overflow is a correct rounding, not an error
            wrong &= ~(steps_between(got, rounded) == 0)
        else:
            steps = steps_between(got, rounded)
            wrong = steps > max_steps(got.dtype, self.numerics)
            self.elements += got.numel()
            self.equal += int((steps == 0).sum())
        if bool(wrong.any()):
            where = tuple(int(i) for i in wrong.nonzero()[0])
            raise AssertionError(
                f"{what}: {int(wrong.sum())} of {wrong.numel()} elements out of tolerance; first at {where}: "
                f"{got[where].item()!r}, expected {exact[where].item()!r}"
            )
        if eager is not None and bool(got.isfinite().all()):
            other = (eager.detach().cpu()[rows].double() - exact).abs()
            own = (got.double() - exact).abs()
            self.own_error.append(float(own.square().sum()))
            self.eager_error.append(float(other.square().sum()))
            self.own_worst = max(self.own_worst, float(own.max()))
            self.eager_worst = max(self.eager_worst, float(other.max()))

    def judge(self, what: str, *, need: int = MIN_SHARE_ELEMENTS) -> None:
        """The share of equal elements and the comparison with eager PyTorch, over everything added."""
        if self.elements:
            assert self.elements >= need, f"{what}: {self.elements} elements are too few to judge a share"
            share = self.equal / self.elements
            assert share >= EQUAL_SHARE, (
                f"{what}: {share:.5%} of {self.elements} elements equal, need {EQUAL_SHARE:.1%}"
            )
        if self.eager_error:
            own, other = sum(self.own_error) ** 0.5, sum(self.eager_error) ** 0.5
            assert own <= EAGER_FACTOR * other, f"{what}: error {own:g} is more than twice eager PyTorch's {other:g}"
            assert self.own_worst <= EAGER_FACTOR * self.eager_worst, (
                f"{what}: worst error {self.own_worst:g} is more than twice eager PyTorch's {self.eager_worst:g}"
            )


def assert_rstd(got: torch.Tensor, want: Expected, what: str = "") -> None:
    """fp32, the input's shape without the last dimension, within 1e-6 relative on the rows that are judged."""
    assert got.dtype == torch.float32, f"{what}: rstd has dtype {got.dtype}"
    assert got.shape == want.rstd.shape, f"{what}: rstd has shape {tuple(got.shape)}, expected {tuple(want.rstd.shape)}"
    got, exact = got.detach().cpu().double()[want.judged], want.rstd[want.judged]
    assert bool(((got - exact).abs() <= exact.abs() * RSTD_RELATIVE).all()), f"{what}: rstd off by more than 1e-6"


def assert_share_of(got: torch.Tensor, want: torch.Tensor, what: str, *, worst: int = 2, share: float = 1e-4) -> None:
    """The promise to Hugging Face users: at most 1 in 10,000 differs, by at most two steps, over 100,000 or more."""
    steps = steps_between(got.detach().cpu(), want.detach().cpu())
    assert steps.numel() >= MIN_SHARE_ELEMENTS, f"{what}: {steps.numel()} elements are too few"
    assert int(steps.max()) <= worst, f"{what}: {int(steps.max())} steps"
    part = float((steps != 0).double().mean())
    assert part <= share, f"{what}: {part:.5%} of the elements differ, at most {share:.3%} may"
