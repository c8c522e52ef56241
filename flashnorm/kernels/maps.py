"""Map stages: n -> y of one group, in fp32."""

from flashnorm.kernels.fp import add_rn, constant, mul_rn, round_to
from flashnorm.program import Affine


def affine(k, stage, j, n):
    """y = mul(n, g), g = w or add(w, offset)."""
    g = k.values("weight", j)
    if stage.offset:
        offset = constant(stage.offset)
        g = [add_rn(w, offset) for w in g]
    if stage.round_norm:
        n = round_to(n, k.variant.dtype("x"))
    return [mul_rn(a, b) for a, b in zip(n, g, strict=True)]


MAPS = {Affine: affine}
