"""Store and save stages."""

from flashnorm.kernels.fp import pack
from flashnorm.program import Cast, SaveRstd


def cast(k, stage, j, y):
    """One rounding to the destination's dtype."""
    k.store(stage.dst, j, pack(y, k.variant.dtype(stage.dst)))


def save_rstd(k, stage, stats):
    k.store_per_row("rstd", stats.rstd)


STORES = {Cast: cast}
SAVES = {SaveRstd: save_rstd}
