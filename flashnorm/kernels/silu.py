"""SiLU of a group: exp and the quotient by the operations that `program.stages.Silu` lists.

Where all eight values are within +-87, and none is a NaN, nothing overflows: no clamps, and the quotient by a
reciprocal with corrections, which gives the bits of the division without a branch for each.
"""

import struct

from cutlass.cutlass_dsl import T

from flashnorm.kernels.fp import asm_many
from flashnorm.kernels.memory import GROUP
from flashnorm.program import EXP2, EXP_FROM, EXP_TO, LOG2E


def _f(value):
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"


_MAGIC = 12582912.0  # 1.5 * 2^23: the sum's low bits are a rounded integer
_ONE, _INFINITY = _f(1.0), "0f7f800000"

# e = exp(t)
_EXP = (
    f"fma.rn.f32 k, t, {_f(LOG2E[0])}, {_f(_MAGIC)}; add.rn.f32 n, k, {_f(-_MAGIC)}; neg.f32 n, n; "
    f"fma.rn.f32 n, t, {_f(LOG2E[0])}, n; fma.rn.f32 n, t, {_f(LOG2E[1])}, n; "
    f"fma.rn.f32 e, n, {_f(EXP2[5])}, {_f(EXP2[4])}; "
    + " ".join(f"fma.rn.f32 e, e, n, {_f(EXP2[i])};" for i in (3, 2, 1, 0))
    + f" fma.rn.f32 e, e, n, {_ONE}; mov.b32 b, k; shl.b32 b, b, 23; mov.b32 c, e; add.u32 c, c, b; mov.b32 e, c; "
)
_FAST = (
    f"neg.f32 t, ${{y}}; {_EXP} add.rn.f32 e, e, {_ONE}; rcp.approx.ftz.f32 r, e; neg.f32 e, e; "
    f"fma.rn.f32 k, e, r, {_ONE}; fma.rn.f32 r, k, r, r; mul.rn.f32 k, ${{y}}, r; fma.rn.f32 n, e, k, ${{y}}; "
    "fma.rn.f32 n, n, r, k; mov.b32 b, n; and.b32 b, b, 0x7fffffff; mov.b32 c, ${y}; and.b32 c, c, 0x80000000; "
    "or.b32 b, b, c; mov.b32 ${z}, b;"  # the sign, also of a -0
)
_SLOW = (
    f"neg.f32 u, ${{y}}; max.f32 t, u, {_f(EXP_FROM)}; {_EXP} setp.gt.f32 q, u, {_f(EXP_TO)}; "
    f"selp.f32 e, {_INFINITY}, e, q; add.rn.f32 e, e, {_ONE}; div.rn.f32 e, ${{y}}, e; setp.nan.f32 q, u, u; "
    "selp.f32 ${z}, ${y}, e, q;"
)


def _text():
    def each(code):
        return " ".join(code.replace("{y}", str(GROUP + i)).replace("{z}", str(i)) for i in range(GROUP))

    inside = " ".join(
        f"abs.f32 t, ${GROUP + i}; setp.le{'.and' if i else ''}.f32 p, t, {_f(-EXP_FROM)}{', p' if i else ''};"
        for i in range(GROUP)
    )
    return (
        "{ .reg .pred p, q; .reg .f32 e, k, n, r, t, u; .reg .b32 b, c; "
        f"{inside} @!p bra ANY; {each(_FAST)} bra DONE; ANY: {each(_SLOW)} DONE: }}"
    )


def silu(k, stage, j, n):
    """y = div(y, add(1, exp(-y)))."""
    constraints = ",".join(["=&f"] * GROUP + ["f"] * GROUP)
    return asm_many(T.f32(), GROUP, _text(), constraints, n)
