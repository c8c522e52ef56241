"""SiLU and sigmoid of a group: exp and the quotient by the operations that `program.stages.Silu` lists.

Within +-87 nothing overflows, and the quotient is one with a reciprocal and a correction, without a branch: the
reciprocal is what `rcp.rn` makes of a normal number, so rounded correctly, and a quotient near it, corrected once by
the exact remainder, is then the rounded quotient (P. Markstein, Computation of elementary functions on the IBM RISC
System/6000 processor, 1990). The remainder is taken with the sign that leaves a quotient of -0 as it is.

A group with a number beyond that goes another way: above 87 exp(-y) adds nothing to 1; below -88.5 it is infinite;
between, the quotient is taken with a divisor scaled by 2^-64, whose inverse is a normal number. Sigmoid is the
reciprocal alone: there, `rcp.rn` itself goes the other way.
"""

import struct

from cutlass.cutlass_dsl import T

from flashnorm.kernels.fp import asm_many
from flashnorm.kernels.memory import GROUP
from flashnorm.program import EXP2, EXP_FROM, EXP_TO, LOG2E


def _f(value):
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"


_MAGIC = 12582912.0  # 1.5 * 2^23: the sum's low bits are a rounded integer
_ONE, _SMALL, _LIMIT = _f(1.0), _f(2.0**-64), _f(-EXP_FROM)

# d = 1 + exp(-y), for -88.5 <= y <= 87.
_DIVISOR = (
    f"fma.rn.f32 k, {{y}}, {_f(-LOG2E[0])}, {_f(_MAGIC)}; sub.rn.f32 f, {_f(_MAGIC)}, k; "
    f"fma.rn.f32 f, {{y}}, {_f(-LOG2E[0])}, f; fma.rn.f32 f, {{y}}, {_f(-LOG2E[1])}, f; "
    f"fma.rn.f32 e, f, {_f(EXP2[5])}, {_f(EXP2[4])}; "
    + " ".join(f"fma.rn.f32 e, e, f, {_f(EXP2[i])};" for i in (3, 2, 1, 0))
    + f" fma.rn.f32 e, e, f, {_ONE}; mov.b32 b, k; shl.b32 b, b, 23; mov.b32 c, e; add.s32 c, c, b; mov.b32 e, c; "
    f"add.rn.f32 d, e, {_ONE}; "
)


def _reciprocal(d, z):
    return f"rcp.approx.ftz.f32 r, {d}; neg.f32 e, {d}; fma.rn.f32 e, e, r, {_ONE}; fma.rn.f32 {z}, e, r, r; "


def _quotient(y, d, z):
    return (
        f"{_reciprocal(d, 'r')}"
        f"mul.rn.f32 k, {y}, r; neg.f32 f, {y}; fma.rn.f32 f, {d}, k, f; neg.f32 r, r; fma.rn.f32 {z}, f, r, k; "
    )


_NEAR = _DIVISOR + _quotient("{y}", "d", "{z}")
_FAR = (
    f"{_NEAR} mul.rn.f32 d, d, {_SMALL}; {_quotient('{y}', 'd', 'd')} mul.rn.f32 d, d, {_SMALL}; "
    f"setp.lt.f32 q, {{y}}, {_f(EXP_FROM)}; selp.f32 {{z}}, d, {{z}}, q; "
    f"mul.rn.f32 d, {{y}}, {_f(0.0)}; setp.lt.f32 q, {{y}}, {_f(-EXP_TO)}; selp.f32 {{z}}, d, {{z}}, q; "
    f"setp.gt.f32 q, {{y}}, {_LIMIT}; selp.f32 {{z}}, {{y}}, {{z}}, q; "
)
_NEAR_SIGMOID = _DIVISOR + _reciprocal("d", "{z}")
_FAR_SIGMOID = (
    f"{_DIVISOR} rcp.rn.f32 {{z}}, d; setp.gt.f32 q, {{y}}, {_LIMIT}; selp.f32 {{z}}, {_ONE}, {{z}}, q; "
    f"setp.lt.f32 q, {{y}}, {_f(-EXP_TO)}; selp.f32 {{z}}, {_f(0.0)}, {{z}}, q; "
    f"setp.eq.f32 q, {{y}}, {{y}}; selp.f32 {{z}}, {{z}}, {{y}}, q; "
)
_TEXTS = {"silu": (_NEAR, _FAR, "max.f32"), "sigmoid": (_NEAR_SIGMOID, _FAR_SIGMOID, "max.NaN.f32")}


def _each(code):
    return " ".join(code.replace("{y}", f"${GROUP + i}").replace("{z}", f"${i}") for i in range(GROUP))


def _text(near, far, join):
    most = " ".join(f"abs.f32 d, ${GROUP + i}; {join} m, m, d;" for i in range(GROUP))
    return (
        f"{{ .reg .pred p, q; .reg .f32 d, e, f, k, m, r; .reg .b32 b, c; mov.b32 m, 0; {most} "
        f"setp.le.f32 p, m, {_LIMIT}; @p bra NEAR; {_each(far)} bra DONE; NEAR: {_each(near)} DONE: }}"
    )


def activate(values, name):
    """div(y, add(1, exp(-y))) of 8 values for "silu", div(1, add(1, exp(-y))) for "sigmoid"."""
    constraints = ",".join(["=&f"] * GROUP + ["f"] * GROUP)
    return asm_many(T.f32(), GROUP, _text(*_TEXTS[name]), constraints, values)
