"""Store and save stages. A store is made before the sums are known, so that what it loads is under way with the row;
called with the row and its statistics it goes over the row once more, or twice."""

from flashnorm.kernels.blocks import QuantBlocksStore, QuantNvfp4Store
from flashnorm.kernels.codec import encode, pack
from flashnorm.kernels.fp import mul_rn, rcp_rn
from flashnorm.program import Cast, QuantBlocks, QuantNvfp4, QuantTensor, SaveRstd


class CastStore:
    """One rounding to the destination's dtype."""

    def __init__(self, k, stage, scalars):
        self.k, self.dst = k, stage.dst

    def __call__(self, row, stats):
        for j, y in row.outputs(stats):
            self.k.store(self.dst, j, pack(y, self.k.variant.dtype(self.dst)))


class QuantTensorStore:
    """inv = div(1, scale); out = cast(mul(y, inv))."""

    def __init__(self, k, stage, scalars):
        self.k = k
        self.scale = k.load_one("scale") if stage.on_device else scalars["scale_value"]
        # A reciprocal takes its time, and early a register: few rows can spare that while they are under way.
        self.inverse = rcp_rn(self.scale) if k.tile.prefetch == "all" else None

    def __call__(self, row, stats):
        dtype = self.k.variant.dtype("out")
        inverse = rcp_rn(self.scale) if self.inverse is None else self.inverse
        for j, y in row.outputs(stats):
            self.k.store("out", j, encode([mul_rn(v, inverse) for v in y], dtype, self.k.sm))


def save_rstd(k, stage, stats):
    k.store_per_row("rstd", stats.rstd)


STORES: dict = {
    Cast: CastStore,
    QuantTensor: QuantTensorStore,
    QuantBlocks: QuantBlocksStore,
    QuantNvfp4: QuantNvfp4Store,
}
SAVES = {SaveRstd: save_rstd}
