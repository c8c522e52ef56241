"""SiLU and sigmoid of a group.

For rows in fp32 by the operations that `Silu` lists, as on a CPU. For rows of 16 bits, in which nobody can tell, by the
units that GPUs have for exponentials and quotients: exp(-y) is e, the approximate 2^t for t = -y log2(e), rounded, and
w = e (-y - t ln(2)), what the rounding of t lost of it. The quotient is y, or 1, times the approximate reciprocal of
d = 1 + e, corrected once by the remainder, to which w belongs: so the error of a result is that of 2^t, the rounding of
d and half an ulp. The sign of the remainder is the one that leaves a quotient of -0 as it is. `csrc` has the same
operations in the same order: the two routes give equal bits on one architecture.

A group with a number beyond 87 goes another way, in which nothing overflows: others get the same bits there; above 87
exp(-y) adds nothing to 1; below -88.5 it is infinite; between -88.5 and -87 the quotient is taken with a divisor scaled
by 2^-64, whose inverse is a normal number.
"""

import math
import struct

from cutlass.cutlass_dsl import T

from flashnorm.kernels.fp import asm_many
from flashnorm.kernels.memory import GROUP
from flashnorm.program import EXP2, EXP_FROM, EXP_TO, LN2, LOG2E


def _f(value):
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"


_ONE, _SMALL, _LIMIT = _f(1.0), _f(2.0**-64), _f(-EXP_FROM)
_MAGIC = _f(1.5 * 2.0**23)  # the low bits of a sum with it are a rounded integer

# 1 + exp(-y) = d + w, for -88.5 <= y <= 2^126.
_DIVISOR = (
    f"mul.rn.f32 k, {{y}}, {_f(-LOG2E[0])}; ex2.approx.ftz.f32 e, k; neg.f32 f, {{y}}; "
    f"fma.rn.f32 f, k, {_f(-LN2[0])}, f; fma.rn.f32 f, k, {_f(-LN2[1])}, f; mul.rn.f32 w, e, f; "
    f"add.rn.f32 d, e, {_ONE}; "
)


def _quotient(n, z):
    """z = n / (d + w)."""
    return (
        f"rcp.approx.ftz.f32 r, d; mul.rn.f32 k, {n}, r; neg.f32 f, {n}; fma.rn.f32 f, d, k, f; fma.rn.f32 f, w, k, f; "
        f"neg.f32 r, r; fma.rn.f32 {z}, f, r, k; "
    )


def _near(n):
    return _DIVISOR + _quotient(n, "{z}")


def _far(n):
    return (
        f"{_near(n)} mul.rn.f32 d, d, {_SMALL}; mul.rn.f32 w, w, {_SMALL}; {_quotient(n, 'd')} "
        f"mul.rn.f32 d, d, {_SMALL}; "
        f"setp.lt.f32 q, {{y}}, {_f(EXP_FROM)}; selp.f32 {{z}}, d, {{z}}, q; "
        f"mul.rn.f32 d, {n}, {_f(0.0)}; setp.lt.f32 q, {{y}}, {_f(-EXP_TO)}; selp.f32 {{z}}, d, {{z}}, q; "
        f"setp.gt.f32 q, {{y}}, {_LIMIT}; selp.f32 {{z}}, {n}, {{z}}, q; "
    )


def _as_on_a_cpu(n):
    """By fp32 operations: the exponential's polynomial, then one division. A NaN comes back as it is."""
    polynomial = " ".join(f"fma.rn.f32 d, d, f, {_f(factor)};" for factor in (*EXP2[-2::-1], 1.0))
    return (
        f"neg.f32 f, {{y}}; setp.lt.f32 q, f, {_f(EXP_FROM)}; selp.f32 k, {_f(EXP_FROM)}, f, q; "
        f"setp.gt.f32 q, f, {_f(EXP_TO)}; "
        f"fma.rn.f32 m, k, {_f(LOG2E[0])}, {_MAGIC}; sub.rn.f32 w, m, {_MAGIC}; neg.f32 w, w; "
        f"fma.rn.f32 f, k, {_f(LOG2E[0])}, w; fma.rn.f32 f, k, {_f(LOG2E[1])}, f; "
        f"mov.b32 d, {_f(EXP2[-1])}; {polynomial} "
        f"mov.b32 i, m; shl.b32 i, i, 23; mov.b32 j, d; add.s32 i, i, j; mov.b32 e, i; "
        f"selp.f32 e, {_f(math.inf)}, e, q; add.rn.f32 d, e, {_ONE}; div.rn.f32 r, {n}, d; "
        f"setp.nan.f32 q, {{y}}, {{y}}; selp.f32 {{z}}, {{y}}, r, q; "
    )


def _each(code):
    return " ".join(code.replace("{y}", f"${GROUP + i}").replace("{z}", f"${i}") for i in range(GROUP))


_REGISTERS = ".reg .pred p, q; .reg .f32 d, e, f, k, m, r, w; .reg .b32 i, j;"


def _text(n):
    # The largest magnitude; a NaN goes the near way, through which it stays one.
    most = " ".join(f"abs.f32 d, ${GROUP + i}; max.f32 m, m, d;" for i in range(GROUP))
    return (
        f"{{ {_REGISTERS} mov.b32 m, 0; {most} "
        f"setp.le.f32 p, m, {_LIMIT}; @p bra NEAR; {_each(_far(n))} bra DONE; NEAR: {_each(_near(n))} DONE: }}"
    )


_DIVIDENDS = {"silu": "{y}", "sigmoid": _ONE}
_TEXTS = {name: _text(n) for name, n in _DIVIDENDS.items()}
_CPU_TEXTS = {name: f"{{ {_REGISTERS} {_each(_as_on_a_cpu(n))} }}" for name, n in _DIVIDENDS.items()}


def activate(values, name, dtype):
    """div(y, add(1, exp(-y))) of 8 values for "silu", div(1, add(1, exp(-y))) for "sigmoid", within 4 ulp.

    `dtype` of the rows: by the CPU's operations where it is "float32".
    """
    texts = _CPU_TEXTS if dtype == "float32" else _TEXTS
    constraints = ",".join(["=&f"] * GROUP + ["f"] * GROUP)
    return asm_many(T.f32(), GROUP, texts[name], constraints, values)
