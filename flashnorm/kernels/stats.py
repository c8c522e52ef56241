"""Statistics stages: what the row's sums say about it.

A stage yields the lane sums of each pass and is sent the row's; so rows abreast make each pass together.
"""

from flashnorm.kernels.fp import add_rn, constant, div_by_int, fma_rn, max_nan, mul_rn, rcp_rn, sqrt_rn, sub_rn
from flashnorm.program import MeanVar, Rms


def inverse_root(v, eps):
    """div(1, sqrt(add(v, eps)))."""
    return rcp_rn(sqrt_rn(add_rn(v, eps)))


class RmsStats:
    """rstd = div(1, sqrt(add(div(sum(h*h), H), eps))); n = mul(h, rstd)."""

    def passes(self, row, scalars):
        (total,) = yield row.lane_sums(lambda j, h: h, squares=(True,))
        self.rstd = inverse_root(div_by_int(total, row.hidden_size), scalars["eps"])

    def normalise(self, h):
        return [mul_rn(v, self.rstd) for v in h]


class MeanVarStats:
    """The corrected two-pass: m1 = div(sum(h), H); d = sub(h, m1); m2 = div(sum(d), H).

    var = max(0, fma(-m2, m2, div(sum(d*d), H))); n = mul(sub(d, m2), rstd). Both sums of d are taken in one pass.
    """

    def passes(self, row, scalars):
        (total,) = yield row.lane_sums(lambda j, h: h, squares=(False,))
        self.m1 = div_by_int(total, row.hidden_size)
        total, squares = yield row.lane_sums(lambda j, h: row.present(j, self.centre(h)), squares=(False, True))
        self.m2 = div_by_int(total, row.hidden_size)
        minus = mul_rn(self.m2, constant(-1.0))
        var = max_nan(constant(0.0), fma_rn(minus, self.m2, div_by_int(squares, row.hidden_size)))
        self.rstd = inverse_root(var, scalars["eps"])

    def centre(self, h):
        return [sub_rn(v, self.m1) for v in h]

    def normalise(self, h):
        return [mul_rn(sub_rn(d, self.m2), self.rstd) for d in self.centre(h)]


STATS: dict = {Rms: RmsStats, MeanVar: MeanVarStats}
