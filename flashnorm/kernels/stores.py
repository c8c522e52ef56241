"""Store and save stages. A store is made before the sums are known, so that what it loads is under way with the row;
given the groups of the row, or called with the row and its statistics, it goes over the row once more, or twice."""

from flashnorm.kernels.blocks import QuantBlocksStore, QuantNvfp4Store
from flashnorm.kernels.codec import encode, pack, unpack
from flashnorm.kernels.fp import add_rn, div_by_int, mul_rn, rcp_rn
from flashnorm.kernels.groups import GroupStore
from flashnorm.kernels.reduce import LaneSum, row_sums
from flashnorm.kernels.stats import inverse_root
from flashnorm.program import Cast, NextNorm, QuantBlocks, QuantNvfp4, QuantTensor, SaveMeans, SaveRstd


class CastStore(GroupStore):
    """One rounding to the destination's dtype."""

    def __init__(self, k, stage, scalars):
        self.k, self.dst = k, stage.dst

    def group(self, j, y):
        self.k.store(self.dst, j, pack(y, self.k.variant.dtype(self.dst)))


class QuantTensorStore(GroupStore):
    """inv = div(1, scale); out = cast(mul(y, inv))."""

    def __init__(self, k, stage, scalars):
        self.k = k
        self.scale = k.load_one("scale") if stage.on_device else scalars["scale_value"]
        # A reciprocal takes its time, and early a register: few rows can spare that while they are under way.
        self.inverse = rcp_rn(self.scale) if k.tile.prefetch == "all" else None

    def begin(self):
        self.inverse = rcp_rn(self.scale) if self.inverse is None else self.inverse

    def group(self, j, y):
        self.k.store("out", j, encode([mul_rn(v, self.inverse) for v in y], self.k.variant.dtype("out"), self.k.sm))


class NextNormStore:
    """y is stored; z = mul(mul(r, rstd2), add(next_weight, next_center)) of r, what is stored, widened again.

    A row that waits in registers waits on as r; else a thread reads again what it has stored.
    """

    def __init__(self, k, stage, scalars):
        self.k, self.scalars = k, scalars

    def __call__(self, row, stats):
        k, tile = self.k, self.k.tile
        dtype, holds = k.variant.dtype("residual_out"), tile.hold == "registers"
        sums = [LaneSum(True) for _ in range(tile.lanes_per_thread)]
        for j, y in row.outputs(stats):
            packed = pack(y, dtype)
            k.store("residual_out", j, packed)
            k.held[j] = packed
            sums[j % tile.lanes_per_thread].add(k.present(j, unpack(packed, dtype)))
        (total,) = row_sums(k, [[one.total() for one in sums]])
        rstd = inverse_root(div_by_int(total, row.hidden_size), self.scalars["next_eps"])
        names = [*(() if holds else ("residual_out",)), *(() if tile.early_weights else ("next_weight",))]
        for j in row.turns(range(tile.rounds), names):
            r = k.held_again(j, dtype) if holds else unpack(k.raw("residual_out", j), dtype)
            gain = [add_rn(w, self.scalars["next_center"]) for w in k.values("next_weight", j)]
            z = [mul_rn(mul_rn(v, rstd), g) for v, g in zip(r, gain, strict=True)]
            k.store("ffn_input", j, pack(z, k.variant.dtype("ffn_input")))


def vecs_of(stage):
    """Names of the vectors that a store reads."""
    return tuple(operand.name for operand in stage.operands() if operand.kind == "vec")


def save_rstd(k, stage, stats):
    k.store_per_row("rstd", stats.rstd)


def save_means(k, stage, stats):
    k.store_per_row("mean", stats.m1)
    k.store_per_row("rest", stats.m2)


STORES: dict = {
    Cast: CastStore,
    NextNorm: NextNormStore,
    QuantTensor: QuantTensorStore,
    QuantBlocks: QuantBlocksStore,
    QuantNvfp4: QuantNvfp4Store,
}
SAVES = {SaveMeans: save_means, SaveRstd: save_rstd}
