"""Load stages: h of round j in fp32, for the first pass (the sum) and again for the second (the output).

A load keeps as little as it can between the passes: raw registers of the storage dtype, or nothing where the
row waits in shared memory or is read again.
"""

from flashnorm.kernels.fp import add_rn, pack, unpack
from flashnorm.program import AddResidual, LoadRow


class Plain:
    """h = f(x)."""

    def __init__(self, k, stage):
        self.k, self.names = k, ("x",)

    def first(self, j):
        raw = self.k.raw("x", j)
        if self.k.tile.hold == "registers":
            self.k.held[j] = raw
        return unpack(raw, self.k.variant.dtype("x"))

    def again(self, j):
        raw = self.k.held_again(j) if self.k.tile.hold == "registers" else self.k.raw("x", j)
        return unpack(raw, self.k.variant.dtype("x"))


class Residual:
    """s = add(x, residual), stored; h is s, or what was stored."""

    def __init__(self, k, stage):
        self.k, self.stage, self.names = k, stage, ("x", "residual")
        self.dtype = k.variant.dtype("residual")
        # In place, the sum would overwrite what a second read needs: then it is stored in the second pass.
        self.late_store = k.tile.hold == "global" or k.tile.late_residual

    def _sum(self, j, store):
        x, r = self.k.values("x", j), self.k.values("residual", j)
        s = [add_rn(a, b) for a, b in zip(x, r, strict=True)]
        if not (store or self.stage.rounded):
            return s, s
        packed = pack(s, self.dtype)
        if store:
            self.k.store(self.stage.dst, j, packed)
        return (unpack(packed, self.dtype), packed) if self.stage.rounded else (s, s)

    def first(self, j):
        h, keep = self._sum(j, store=not self.late_store)
        if self.k.tile.hold == "registers":
            self.k.held[j] = keep
        return h

    def again(self, j):
        if self.k.tile.hold == "registers":
            return unpack(self.k.held_again(j), self.dtype) if self.stage.rounded else self.k.held[j]
        return self._sum(j, store=self.late_store)[0]


LOADS: dict = {LoadRow: Plain, AddResidual: Residual}
