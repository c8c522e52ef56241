"""Load stages: h of round j in fp32, for the first pass (a sum) and again for the later ones (sums, the output).

A load keeps as little as it can between the passes: raw registers of the storage dtype, or nothing where the
row waits in shared memory or is read again. `names` are the rows that it reads, `vecs` the vectors.
"""

from flashnorm.kernels.codec import pack, unpack
from flashnorm.kernels.fp import add_rn, choose, constant, mul_rn
from flashnorm.kernels.silu import activate
from flashnorm.program import AddResidual, LoadGained, LoadGated, LoadRow


class Plain:
    """h = f(x), or mul(float(x), input_scale); x is the row itself, or the row of a pool that an index picks.

    Attributes:
        neutral: what every sum of the row is added to: -0, which changes no number, or NaN where the index lies
            outside of the pool; None where there is no index.
    """

    vecs: tuple = ()

    def __init__(self, k, stage):
        self.k, self.names, self.neutral, self.scale = k, ("x",), None, None
        self.dtype = k.variant.dtype("x")
        if stage.indexed:
            k.pick_row(k.load_one("row_index"))
            self.neutral = choose(k.pool_ok.ir_value(), constant(-0.0), constant(float("nan")))
        if stage.scaled:
            self.scale = k.load_one("input_scale")

    def _widen(self, raw):
        return self._scaled(unpack(raw, self.dtype))

    def _scaled(self, values):
        return values if self.scale is None else [mul_rn(v, self.scale) for v in values]

    def first(self, j):
        raw = self.k.raw("x", j)
        if self.k.tile.hold == "registers":
            self.k.held[j] = raw
        h = self._widen(raw)
        # What the row lacks is +0, whatever the scale: a product with infinity would be NaN.
        return h if self.scale is None else self.k.present(j, h)

    def again(self, j, last):
        if self.k.tile.hold == "registers":
            return self._scaled(self.k.held_again(j, self.dtype))
        return self._widen(self.k.raw("x", j))


class Residual:
    """s = add(x, residual), stored; h is s, or what was stored."""

    neutral, vecs = None, ()

    def __init__(self, k, stage):
        self.k, self.stage, self.names = k, stage, ("x", "residual")
        self.dtype = k.variant.dtype("residual")
        # In place, the sum would overwrite what a later read needs: then it is stored in the last pass. A row that
        # waits in registers has lost what its sum was rounded to by then: there it is always stored in the first.
        self.late_store = k.tile.hold == "global" or (k.tile.late_residual and k.tile.hold == "shared")

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

    def again(self, j, last):
        if self.k.tile.hold == "registers":
            return self.k.held_again(j, self.dtype) if self.stage.rounded else self.k.held[j]
        return self._sum(j, store=self.late_store and last)[0]


class Product:
    """h, a product of x and something else; it waits in fp32, or is made again. Subclasses say `_make(j)`."""

    neutral = None
    vecs: tuple = ()

    def __init__(self, k, stage):
        self.k, self.stage = k, stage

    def _make(self, j):
        raise NotImplementedError

    def first(self, j):
        h = self._make(j)
        if self.k.tile.hold == "registers":
            self.k.held[j] = h
        return h

    def again(self, j, last):
        return self.k.held[j] if self.k.tile.hold == "registers" else self._make(j)


class Gained(Product):
    """h = mul(f(x), add(w, center))."""

    names, vecs = ("x",), ("gain",)

    def _make(self, j):
        center = self.k.scalars["center"]
        gain = [add_rn(w, center) for w in self.k.values("gain", j)]
        h = [mul_rn(a, b) for a, b in zip(self.k.values("x", j), gain, strict=True)]
        return self.k.present(j, h)  # what the row lacks is +0, whatever the centre


class Gated(Product):
    """h = mul(f(x), act(gate)). What the row lacks is +0 under any gate."""

    names = ("x", "gate")

    def _make(self, j):
        act = activate(self.k.values("gate", j), self.stage.activation, self.k.variant.rounding)
        return [mul_rn(a, b) for a, b in zip(self.k.values("x", j), act, strict=True)]


LOADS: dict = {LoadRow: Plain, AddResidual: Residual, LoadGained: Gained, LoadGated: Gated}
