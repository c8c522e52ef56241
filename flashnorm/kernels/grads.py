"""What a norm's backward makes of a row: which sums it needs, and the gradient of an element.

xh is the normalised value, made again from the row and its saved statistics; gw = mul(dout, g).
"""

from flashnorm.kernels.fp import constant, div_by_int, fma_rn, mul_rn, sub_rn


class RmsGrad:
    """c = div(sum(gw * xh), H); dx = mul(rstd, fma(-c, xh, gw))."""

    def __init__(self, k):
        self.hidden_size, self.rstd = k.tile.hidden_size, k.word("rstd")

    def normalise(self, h):
        return [mul_rn(v, self.rstd) for v in h]

    def terms(self, gw, xh):
        """(values, factors) of each sum."""
        return ((gw, xh),)

    def take(self, totals):
        self.minus_c = mul_rn(div_by_int(totals[0], self.hidden_size), constant(-1.0))

    def dx(self, gw, xh):
        return [mul_rn(self.rstd, fma_rn(self.minus_c, x, g)) for g, x in zip(gw, xh, strict=True)]


class LayerGrad(RmsGrad):
    """b = div(sum(gw), H) too; dx = mul(rstd, fma(-c, xh, sub(gw, b))); xh = mul(sub(sub(h, m1), m2), rstd)."""

    def __init__(self, k):
        super().__init__(k)
        self.m1, self.m2 = k.word("mean"), k.word("rest")

    def normalise(self, h):
        return [mul_rn(sub_rn(sub_rn(v, self.m1), self.m2), self.rstd) for v in h]

    def terms(self, gw, xh):
        return ((gw, xh), (gw, None))

    def take(self, totals):
        super().take(totals)
        self.b = div_by_int(totals[1], self.hidden_size)

    def dx(self, gw, xh):
        return super().dx([sub_rn(g, self.b) for g in gw], xh)


GRADS = {"rms": RmsGrad, "layer": LayerGrad}
