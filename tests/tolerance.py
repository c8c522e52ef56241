"""How far a result may be from the oracle: the contract's accuracy rule, and nothing else.

Distances are counted in steps of the dtype (units in the last place, across zero and powers of
two, infinities one step past the largest finite number). A `Pool` gathers many results, because
shares mean something over a hundred thousand elements only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tests.oracles import E2M1, LLAMA, Expected, ExpectedGradients, places, round_to

_INT = {4: torch.int32, 2: torch.int16, 1: torch.int8, 8: torch.int64}
FAR = 2**40  # a NaN against a number

MIN_SHARE_ELEMENTS = 100_000
EQUAL_SHARE = 0.999
FP32_RELATIVE, FP32_OF_LARGEST, RSTD_RELATIVE = 2e-6, 1e-6, 1e-6
DIFFERENCE_OF_LARGEST = 1e-6
CODE_STEPS = 1
EXP_ULPS, EXP_TO = 4, 80.0  # of fp32, with an exponential, for arguments up to that
SCALE_ROUNDING = 2.0**-23  # relative: the scale's rounding, and that of its inverse
EAGER_FACTOR = 2.0
SECOND_RELATIVE = 1e-5
SUM_OF_ROUNDED = 3e-5
SUM_RELATIVE = 1e-6  # L2, of a gradient that is a sum over rows
# Of the largest gradient under a gate, by the dtype that it is stored in: its rounding, and what is found in fp32.
GATED_GRADIENT = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The integer representation."""
    return tensor.detach().contiguous().view(_INT[tensor.element_size()])


def is_nan(tensor: torch.Tensor) -> torch.Tensor:
    """NaNs whose representation is free: those of fp32, fp16 and bf16. Codes and bytes hold to the byte."""
    if tensor.element_size() > 1 and tensor.is_floating_point():
        return tensor.isnan()
    return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)


def steps_between(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance in steps of the dtype, int64; NaN equals NaN; +0 and -0 are one step apart in sign only (0 steps)."""
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)

    def ordered(t: torch.Tensor) -> torch.Tensor:
        raw = bits_of(t).to(torch.int64)
        if not t.is_floating_point():
            return raw
        lowest = -(2 ** (t.element_size() * 8 - 1))
        return torch.where(raw < 0, lowest - raw, raw)

    distance = (ordered(a) - ordered(b)).abs()
    nan_a, nan_b = (t.float().isnan() if t.element_size() == 1 else is_nan(t) for t in (a, b))
    distance = torch.where(nan_a ^ nan_b, torch.full_like(distance, FAR), distance)
    return torch.where(nan_a & nan_b, torch.zeros_like(distance), distance)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal representations; NaN payloads are exempt."""
    return not bool(different_bits(a, b).any())


def different_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where the representations differ, NaN payloads exempt."""
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    return (bits_of(a) != bits_of(b)) & ~(is_nan(a) & is_nan(b))


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """Fails with the first differing element, its values and how many there are."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, want = got.detach().cpu(), want.detach().cpu()
    if got.dtype in (E2M1, torch.float8_e8m0fnu):  # whose elements not every version of PyTorch shows
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    wrong = different_bits(got, want)
    if bool(wrong.any()):
        where = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements have other bits; first at {where}: "
            f"{got[where].item()!r}, expected {want[where].item()!r}"
        )


def assert_near(got: torch.Tensor, want: torch.Tensor, what: str = "", judged: torch.Tensor | None = None) -> None:
    """What two routes with exponentials of their own may differ by: a step; rows in fp32 have none of their own.

    Args:
        got, want: results of two routes.
        what: for the message.
        judged: pairs of codes: which of them have the same scale.
    """
    assert got.dtype == want.dtype and got.shape == want.shape, what
    pairs = got.dtype == E2M1
    got, want = ((places(t) if pairs else t).detach().cpu() for t in (got, want))
    steps = (got - want).abs() if pairs else steps_between(got, want)
    steps = steps if judged is None else steps * judged
    allowed = 0 if got.dtype == torch.float32 else CODE_STEPS
    assert not steps.numel() or int(steps.max()) <= allowed, f"{what}: {int(steps.max())} steps, {allowed} allowed"


def max_steps(dtype: torch.dtype, numerics: str) -> int:
    """The contract's bound for 16-bit results."""
    assert dtype in (torch.float16, torch.bfloat16)
    return 2 if numerics in LLAMA else 1


@dataclass
class Share:
    """How many of the elements judged so far are equal to the oracle's."""

    elements: int = 0
    equal: int = 0

    def add(self, equal: torch.Tensor) -> None:
        self.elements += equal.numel()
        self.equal += int(equal.sum())


@dataclass
class Pool:
    """Results of one operator, its dtypes and mode, judged one by one and as shares.

    Attributes:
        numerics: the mode, which decides the step bound of 16-bit results.
    """

    numerics: str
    shares: dict[str, Share] = field(default_factory=dict)
    own_error: list[float] = field(default_factory=list)
    eager_error: list[float] = field(default_factory=list)
    own_worst: float = 0.0
    eager_worst: float = 0.0

    def add(self, got: torch.Tensor, want: Expected, what: str, eager: torch.Tensor | None = None) -> None:
        """Judges one fp32 or 16-bit result; remembers its share and, given eager PyTorch's, both errors."""
        got = got.detach().cpu()
        rows = want.judged
        assert got.shape == want.out.shape, f"{what}: shape {tuple(got.shape)}"
        assert got.dtype == want.rounded.dtype, f"{what}: dtype {got.dtype}"
        got, exact, rounded = got[rows], want.out[rows], want.rounded[rows]
        if not got.numel():
            return
        largest = exact.abs().amax(-1, keepdim=True)
        if want.operand is not None:
            largest = torch.maximum(largest, want.operand[rows].unsqueeze(-1))
        if got.dtype == torch.float32:
            wrong = ~((got.double() - exact).abs() <= exact.abs() * FP32_RELATIVE + largest * FP32_OF_LARGEST)
            # an fp32 overflow is a correct rounding, not an error
            wrong &= ~(steps_between(got, rounded) == 0)
        else:
            steps = steps_between(got, rounded)
            wrong = steps > max_steps(got.dtype, self.numerics)
            if want.operand is not None:
                wrong &= ~((got.double() - exact).abs() <= largest * DIFFERENCE_OF_LARGEST)
            self._share("elements").add(steps == 0)
        _fail(wrong, got, exact, what)
        if eager is not None and bool(got.isfinite().all()):
            other = (eager.detach().cpu()[rows].double() - exact).abs()
            own = (got.double() - exact).abs()
            self.own_error.append(float(own.square().sum()))
            self.eager_error.append(float(other.square().sum()))
            self.own_worst = max(self.own_worst, float(own.max()))
            self.eager_worst = max(self.eager_worst, float(other.max()))

    def add_codes(self, got: torch.Tensor, quotient: torch.Tensor, judged: torch.Tensor, what: str) -> None:
        """Judges codes by the fp64 norm divided by the stored scale: a step at most, and few of those.

        A quotient of two bf16 numbers is a tie of two codes once in a thousand. The stored scale was rounded, so what
        is left of such a tie by it means nothing: both codes count as right.
        """
        dtype, got = got.dtype, got.detach().cpu()
        got, quotient = (places(got) if dtype == E2M1 else got)[judged], quotient[judged]
        near = [round_to(quotient * (1 + side * SCALE_ROUNDING), dtype) for side in (-1, 0, 1)]
        steps = torch.stack([steps_between(got, code) for code in near]).amin(0)
        self._share("codes").add(steps == 0)
        _fail(steps > CODE_STEPS, got, quotient, f"{what}: codes")

    def add_scales(self, got: torch.Tensor, want: torch.Tensor, step: torch.Tensor, what: str) -> None:
        """Judges scales by the fp64 ones.

        Args:
            got: fp32, e4m3, or the exponent bytes of powers of two.
            want: fp64.
            step: how much of an fp32 scale one step of the values' dtype is, for T of 16 bits; 0: judged as fp32.
        """
        got = got.detach().cpu()
        if got.dtype == torch.uint8:
            near = torch.log2(want).round().long() + 127
            wrong, equal = (got.long() - near).abs() > 1, got.long() == near
        elif got.dtype == torch.float8_e4m3fn:
            steps = steps_between(got, round_to(want, got.dtype))
            wrong, equal = steps > 1, steps == 0
        else:
            apart = (got.double() - want).abs()
            wrong = ~(apart <= step + want * (FP32_RELATIVE + FP32_OF_LARGEST))
            equal = got == want.float()
        if bool((step > 0).all()):
            self._share("scales").add(equal)
        _fail(wrong, got, want, f"{what}: scales")

    def _share(self, name: str) -> Share:
        return self.shares.setdefault(name, Share())

    def judge(self, what: str, *, need: int = MIN_SHARE_ELEMENTS) -> None:
        """The shares of equal elements and the comparison with eager PyTorch, over everything added.

        There are never enough scales for their share to mean something, but in a test of their own.
        """
        for name, share in self.shares.items():
            if name == "scales" and share.elements < need:
                continue
            assert share.elements >= need, f"{what}: {share.elements} {name} are too few to judge a share"
            part = share.equal / share.elements
            assert part >= EQUAL_SHARE, f"{what}: {part:.5%} of {share.elements} {name} equal, need {EQUAL_SHARE:.1%}"
        if self.eager_error:
            own, other = sum(self.own_error) ** 0.5, sum(self.eager_error) ** 0.5
            assert own <= EAGER_FACTOR * other, f"{what}: error {own:g} is more than twice eager PyTorch's {other:g}"
            assert self.own_worst <= EAGER_FACTOR * self.eager_worst, (
                f"{what}: worst error {self.own_worst:g} is more than twice eager PyTorch's {self.eager_worst:g}"
            )


def _fail(wrong: torch.Tensor, got: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    if bool(wrong.any()):
        where = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements out of tolerance; first at {where}: "
            f"{got[where].item()!r}, expected {exact[where].item()!r}"
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


def assert_no_worse(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """Of a whole module, by the same module in fp64: its error is at most twice that of eager PyTorch in that dtype."""
    assert got.shape == exact.shape and got.dtype == eager.dtype, f"{what}: {tuple(got.shape)}, {got.dtype}"
    own, other = ((t.detach().cpu().double() - exact.cpu()).abs() for t in (got, eager))
    assert bool(own.isfinite().all()) and float(other.max()) > 0, f"{what}: nothing to compare"
    for name, mine, theirs in (("error", own.norm(), other.norm()), ("worst error", own.max(), other.max())):
        assert float(mine) <= EAGER_FACTOR * float(theirs), f"{what}: {name} {mine:g}, eager PyTorch's {theirs:g}"


# ------------------------------------------------------------------ gradients
def assert_row_gradient(got: torch.Tensor, want: ExpectedGradients, what: str = "") -> None:
    """The accuracy of a result that is a difference: a step of 16 bits, or 1e-6 of the row's largest operand."""
    got = got.detach().cpu()
    assert got.shape == want.dh.shape, f"{what}: shape {tuple(got.shape)}"
    room = want.operand.unsqueeze(-1) * DIFFERENCE_OF_LARGEST
    wrong = ~((got.double() - want.dh).abs() <= room + want.dh.abs() * FP32_RELATIVE)
    if got.dtype != torch.float32:
        wrong &= steps_between(got, round_to(want.dh, got.dtype)) > 1
    _fail(wrong, got, want.dh, what)


def assert_gated_gradient(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """A gradient under a gate, whose exponential is PyTorch's: by the largest of its tensor."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}"
    error = float((got.detach().cpu().double() - want.cpu()).abs().max() / want.abs().max())
    assert error <= GATED_GRADIENT[got.dtype], f"{what}: off by {error:.2e} of the largest"


def assert_same_sum(got: torch.Tensor, want: torch.Tensor, what: str = "", *, rounded: bool = False) -> None:
    """Two orders of one sum, rounded to the dtype: 1e-6 in the L2 norm, and in 16 bits a step's width.

    `rounded`: of terms that were rounded to 16 bits, where a last bit of fp32 tips a term by a step now and then.
    """
    assert got.shape == want.shape and want.dtype in (got.dtype, torch.float64), (what, got.dtype, got.shape)
    got, want = got.detach().cpu(), want.detach().cpu()
    fp32 = SUM_OF_ROUNDED if rounded else SUM_RELATIVE
    bound = fp32 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps
    apart, size = float((got.double() - want.double()).norm()), float(want.double().norm())
    assert apart <= bound * size, f"{what}: sums differ by {apart:.2e}, at most {bound:.0e} of {size:.2e}"


def assert_second_gradient(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """Second gradients come from the formula in fp32: a thousandth of a per cent in the L2 norm."""
    apart, size = float((got.detach().cpu().double() - want.cpu()).norm()), float(want.norm())
    assert apart <= SECOND_RELATIVE * size, f"{what}: off by {apart:.2e} of {size:.2e}"


def assert_weight_gradient(got: torch.Tensor, want: torch.Tensor, eager: torch.Tensor, what: str = "") -> None:
    """A sum over rows in fp32: 1e-6 in the L2 norm, and no further from the formula than eager PyTorch in fp32."""
    want, size = want.cpu().double(), float(want.norm())
    apart, theirs = (float((t.detach().cpu().double() - want).norm()) / size for t in (got, eager))
    assert apart <= SUM_RELATIVE, f"{what}: off by {apart:.2e}"
    assert apart <= max(theirs, torch.finfo(torch.float32).eps), f"{what}: off by {apart:.2e}, eager by {theirs:.2e}"
