"""Scales of a block as bytes, powers of two (ue8m0) or e4m3, and what codes are multiplied with, or divided by.

Powers of two are compared, not divided: a largest magnitude a is at most Q 2^e where div(a, Q), rounded, is at most
2^e, because Q = 6, 448, 57344 or 127 times 2^e has neighbours further away than that rounding reaches. One number near
2^-127 is an exception.
"""

import struct

from cutlass.cutlass_dsl import T

from flashnorm.kernels.codec import encode
from flashnorm.kernels.codec4 import LARGEST_E2M1
from flashnorm.kernels.fp import asm, asm_many, constant, fma_rn, mul_rn
from flashnorm.kernels.tile import NATIVE_FP8

SIGNIFICAND = (1 << 23) - 1
_SIXTH = struct.unpack("<f", struct.pack("<f", 1 / 6))[0]


def _bits(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


# ------------------------------------------------------------------ ue8m0
def up_byte(a, largest):
    """127 + the least e with 2^e >= div(a, Q), Q the largest code; 0 ... 254, 255 for NaN; int32."""
    exponent, rest = (_bits(largest) >> 23) - 127, _bits(largest) & SIGNIFICAND
    # The quotient of the next number after Q 2^-127 is rounded to 2^-127, a subnormal number.
    least = (exponent << 23) + rest + 1
    code = (
        f"{{ .reg .pred p, q; add.u32 $0, $1, {SIGNIFICAND - rest}; shr.u32 $0, $0, 23; sub.u32 $0, $0, {exponent}; "
        f"setp.le.s32 p, $1, {least}; setp.gt.s32 q, $1, 0x7f800000; selp.b32 $0, 0, $0, p; selp.b32 $0, 255, $0, q; }}"
    )
    return asm(T.i32(), code, "=&r,f", (a,))


def floor_byte(a, largest):
    """127 + floor(log2 a) - floor(log2 Q); 0 ... 254, 255 for NaN; int32."""
    exponent = (_bits(largest) >> 23) - 127
    code = (
        f"{{ .reg .pred p; shr.u32 $0, $1, 23; max.u32 $0, $0, {exponent}; sub.u32 $0, $0, {exponent}; "
        "setp.gt.s32 p, $1, 0x7f800000; selp.b32 $0, 255, $0, p; }"
    )
    return asm(T.i32(), code, "=&r,f", (a,))


def factor_of(byte):
    """2^(127 - byte), which is div(1, the power of two), for the bytes that a scale can have: at most 253."""
    code = "{ .reg .b32 n; sub.u32 n, 254, $1; shl.b32 $0, n, 23; }"
    return asm(T.f32(), code, "=f,r", (byte,))


# ------------------------------------------------------------------ e4m3
def sixth(a, gain=None):
    """mul(gain, div(a, 6)), or the quotient alone, as far as e4m3 scales can tell.

    By the product with the inverse and one correction, which may miss a tie of subnormal quotients. They all make a
    scale of 0, but with a gain of 2^100 or more: that leads to the division itself.

    Args:
        a: fp32, not negative.
        gain: fp32, the same in all threads.
    """
    near = mul_rn(a, constant(_SIXTH))
    rest = fma_rn(near, constant(-LARGEST_E2M1), a)
    quotient = fma_rn(rest, constant(_SIXTH), near)
    if gain is None:
        return quotient
    code = (
        "{ .reg .pred p; mov.b32 $0, $2; setp.lt.f32 p, $3, 0f71800000; @p bra.uni USUAL; "
        "div.rn.f32 $0, $1, 0f40c00000; USUAL: mul.rn.f32 $0, $0, $3; }"
    )
    return asm(T.f32(), code, "=&f,f,f,f", (a, quotient, gain))


def e4m3_byte(value, sm):
    """The code of one fp32 value that is not negative, as an int32; saturating, 0x7F of NaN."""
    if sm >= NATIVE_FP8:
        code = "{ .reg .b16 h, z; cvt.rn.satfinite.e4m3x2.f32 h, 0f00000000, $1; mov.b16 z, 0; mov.b32 $0, {h, z}; }"
        return asm(T.i32(), code, "=r,f", (value,))
    return asm(T.i32(), "and.b32 $0, $1, 0xff;", "=r,r", (encode([value] * 4, "float8_e4m3fn", sm)[0],))


def e4m3_value(byte):
    """What a code that is not negative stands for; of no meaning for NaN."""
    power = _bits(2.0**120)
    code = f"{{ .reg .b32 n; .reg .f32 v; shl.b32 n, $1, 20; mov.b32 v, n; mul.rn.f32 $0, v, 0f{power:08x}; }}"
    return asm(T.f32(), code, "=f,r", (byte,))


def inverse_parts(s, unit):
    """(r, r') with r + r' = 1 / (s unit) to 2^-33 and r' positive, for a normal number of few bits."""
    less, one = _bits((1 - 2.0**-11) / unit), _bits(1 / unit)
    code = (
        f"{{ .reg .f32 n; rcp.approx.ftz.f32 $1, $2; mul.rn.f32 $0, $1, 0f{less:08x}; neg.f32 n, $2; "
        f"fma.rn.f32 n, n, $0, 0f{one:08x}; mul.rn.f32 $1, $1, n; }}"
    )
    return asm_many(T.f32(), 2, code, "=&f,=&f,f", (s,))


# ------------------------------------------------------------------ what becomes of the codes of a block
def is_nan(a):
    return asm(T.i32(), "{ .reg .pred p; setp.nan.f32 p, $1, $1; selp.b32 $0, 1, 0, p; }", "=r,f", (a,))


def is_nan_e4m3(byte):
    return asm(T.i32(), "{ .reg .pred p; setp.eq.u32 p, $1, 127; selp.b32 $0, 1, 0, p; }", "=r,r", (byte,))


def masks(amax, unordered, nan_codes, byte=None):
    """(keep, add), with which codes & keep | add are right in special cases too.

    +0 where amax is 0, or `byte`, a scale, is; else `nan_codes` where the int32 `unordered` is not 0.
    """
    operands = (amax, unordered) if byte is None else (amax, unordered, byte)
    also = "" if byte is None else "setp.eq.or.u32 p, $4, 0, p; "
    code = (
        f"{{ .reg .pred p, q; setp.eq.u32 p, $2, 0; {also}setp.ne.u32 q, $3, 0; selp.b32 $1, {nan_codes}, 0, q; "
        "selp.b32 $1, 0, $1, p; or.pred p, p, q; selp.b32 $0, 0, -1, p; }"
    )
    return asm_many(T.i32(), 2, code, ",".join(["=&r,=&r,f,r", "r"][: len(operands) - 1]), operands)


def masked(codes, keep, add):
    """codes & keep | add."""
    return asm(T.i32(), "{ .reg .b32 t; and.b32 t, $1, $2; or.b32 $0, t, $3; }", "=r,r,r,r", (codes, keep, add))
