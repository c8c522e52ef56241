"""Statistics stages: what the row's sums say about it."""

from flashnorm.kernels.fp import add_rn, div_by_int, mul_rn, rcp_rn, sqrt_rn
from flashnorm.kernels.reduce import row_sum
from flashnorm.program import Rms


class RmsStats:
    """rstd = div(1, sqrt(add(div(sum(h*h), H), eps))); n = mul(h, rstd)."""

    square = True

    def __init__(self, k, stage, scalars, lane_sums):
        mean = div_by_int(row_sum(k, lane_sums), k.tile.hidden_size)
        self.rstd = rcp_rn(sqrt_rn(add_rn(mean, scalars["eps"])))

    def normalise(self, h):
        return [mul_rn(v, self.rstd) for v in h]


STATS = {Rms: RmsStats}
