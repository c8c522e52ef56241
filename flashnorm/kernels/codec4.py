"""fp32 to 4-bit codes, e2m1, two to a byte; and the e4m3 scales that stand beside them.

Codes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, the sign in the highest bit; nearest even, saturating; NaN becomes 7.
"""

from cutlass.cutlass_dsl import T

from flashnorm.kernels.codec import encode
from flashnorm.kernels.fp import asm

LARGEST_E2M1 = 6.0
_ONE = 0x3F800000

# A magnitude: codes lie 1/2 apart below 2, 1 apart below 4, then 2. The addition of 1.5 * 2^22 of these steps rounds to
# whole ones and leaves their number in the low bits. A code comes out 0xFE too large, for each of eight the same, which
# is taken away at the end.
_MAGNITUDE = (
    f"abs.f32 a, ${{v}}; min.f32 a, a, 0f40c00000; mov.b32 b, a; and.b32 e, b, 0x7f800000; max.u32 e, e, {_ONE}; "
    f"add.u32 m, e, {0x4AC00000 - _ONE}; mov.b32 a, m; mov.b32 c, b; mov.b32 f, c; add.rn.f32 a, f, a; mov.b32 b, a; "
    "sub.u32 b, b, m; shr.u32 e, e, 22; add.u32 b, b, e; mad.lo.u32 w, w, 16, b;"
)
_SIGN = "mov.b32 b, ${s}; and.b32 b, b, 0x80000000; shr.u32 g, g, 4; or.b32 g, g, b;"
_EXCESS = (0xFE * 0x11111111) & 0xFFFFFFFF


def _emulated(signs_at):
    lines = ["{ .reg .f32 a, f; .reg .b32 b, c, e, g, m, w; mov.b32 w, 0; mov.b32 g, 0;"]
    lines += [_MAGNITUDE.replace("{v}", str(1 + i)) for i in reversed(range(8))]
    lines += [_SIGN.replace("{s}", str(signs_at + i)) for i in range(8)]
    return " ".join(lines) + f" sub.u32 w, w, {_EXCESS}; or.b32 $0, w, g; }}"


def _native(signs_at):
    lines = ["{ .reg .f32 lo, hi; .reg .b32 b, c; .reg .b8 p0, p1, p2, p3;"]
    for i in range(4):
        for name, at in (("lo", 2 * i), ("hi", 2 * i + 1)):
            if signs_at == 1:
                lines.append(f"mov.f32 {name}, ${1 + at};")
            else:
                lines.append(
                    f"mov.b32 b, ${1 + at}; mov.b32 c, ${signs_at + at}; and.b32 b, b, 0x7fffffff; "
                    f"and.b32 c, c, 0x80000000; or.b32 b, b, c; mov.b32 {name}, b;"
                )
        lines.append(f"cvt.rn.satfinite.e2m1x2.f32 p{i}, hi, lo;")
    return " ".join(lines) + " mov.b32 $0, {p0, p1, p2, p3}; }"


def encode_e2m1(values, signs, native):
    """The codes of a group in one raw register.

    Args:
        values: eight fp32 values.
        signs: whose signs the codes get: the values themselves, or what they were made of, where a -0 may be lost.
        native: the target has the conversion.
    """
    own = signs is values
    operands = (*values, *(() if own else signs))
    code = (_native if native else _emulated)(1 if own else 9)
    return asm(T.i32(), code, ",".join(["=&r"] + ["f"] * len(operands)), operands)


def e4m3_byte(value, sm):
    """The code of one fp32 value, as an int32."""
    return asm(T.i32(), "and.b32 $0, $1, 0xff;", "=r,r", (encode([value] * 4, "float8_e4m3fn", sm)[0],))


def e4m3_value(byte):
    """What a code that is not negative stands for; NaN of 0x7F."""
    code = (
        "{ .reg .pred p; .reg .f32 s; .reg .b32 n, b; shl.b32 n, $1, 20; add.u32 n, n, 0x3c000000; "
        "cvt.rn.f32.u32 s, $1; mul.rn.f32 s, s, 0f3b000000; mov.b32 b, s; setp.lt.u32 p, $1, 8; selp.b32 n, b, n, p; "
        "setp.eq.u32 p, $1, 127; selp.b32 n, 0x7fffffff, n, p; mov.b32 $0, n; }"
    )
    return asm(T.f32(), code, "=f,r", (byte,))


def code_mask(amax, byte):
    """What codes are masked with: 0 where there is nothing but zeros or the scale is 0, no signs where it is NaN."""
    code = (
        "{ .reg .pred p, q; setp.eq.u32 p, $2, 127; selp.b32 $0, 0x77777777, -1, p; setp.eq.u32 p, $2, 0; "
        "setp.eq.b32 q, $1, 0; or.pred p, p, q; selp.b32 $0, 0, $0, p; }"
    )
    return asm(T.i32(), code, "=&r,f,r", (amax, byte))
