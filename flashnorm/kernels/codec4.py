"""fp32 to 4-bit codes, e2m1, two to a byte.

Codes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, the sign in the highest bit; nearest even, saturating; a NaN, which arithmetic
makes with a positive sign, becomes 7.

A quotient v / s with s in e4m3, rounded to fp32, is a number halfway between two codes only where v is exactly that
number times s: the product is exact in fp32, and its neighbours are further from it than the rounding of the quotient
reaches. So any quotient with an error far below 2^-24, rounded once, gives the codes of the true one. Here the inverse
of s comes in two parts, the first too small by 2^-11 and the second positive: v times the two, added, is that quotient
in two operations, and keeps infinities and the sign of zeros.
"""

from cutlass.cutlass_dsl import T

from flashnorm.kernels.fp import asm
from flashnorm.kernels.memory import GROUP

LARGEST_E2M1 = 6.0

# Without the conversion: fp32 and fp16 arithmetic, since integer operations have half the rate up to sm_90.
#
# a is a magnitude over 8, at most 1. b = a^2 + 12/64 lies below 2^-2 for magnitudes below 2, then below 2^-1 for those
# below 4.47, then below 1 for those below 7.21: so 2^22 b - a is rounded to multiples of 1/2, of 1, of 2 or of 4, and
# ties go to even ones, because b of a tie has few bits. What it lacks of 2^22 b is the rounded magnitude, exactly.
# Where the difference falls below a power of two, steps are half as large, which is no matter: from 1.75 to 2.25 both
# round to the same, and from 3.5 to 4.5. The code of a rounded magnitude m = 8a is the integer next to
# m (2.09 - 0.15 m), where 8 becomes 7: in fp16, two at a time, one above the other by 1024 + code -> 1024 + 16 code.
_ROUND = "fma.rn.f32 b, a{i}, a{i}, 0f3e400000; fma.rn.f32 c, b, 0fca800000, a{i}; fma.rn.f32 a{i}, b, 0f4a800000, c;"
_SLOPE, _BASE = "0xc8cdc8cd", "0x4c2e4c2e"  # -9.6 and 16.72, twice


def _pair(name, low, high, above):
    return f"cvt.rn.f16x2.f32 p, a{high}, a{low}; fma.rn.f16x2 h, p, slope, base; fma.rn.f16x2 {name}, h, p, {above};"


def _signs(name, first, at):
    a, b, c, d = (f"${first + at + 2 * i}" for i in range(4))
    return f"prmt.b32 p, {a}, {b}, 0x00fb; prmt.b32 h, {c}, {d}, 0x00fb; prmt.b32 {name}, p, h, 0x5410;"


def _tail(first):
    """From the magnitudes a0 ... a7 and eight numbers with their signs, operands from `first` on, to $0."""
    lines = [_ROUND.replace("{i}", str(i)) for i in range(GROUP)]
    lines.append(f"mov.b32 slope, {_SLOPE}; mov.b32 base, {_BASE}; mov.b32 unit, 0x64006400; ")
    lines.append("mov.b32 up, 0x4c004c00; mov.b32 down, 0xf380f380;")  # 16 and -15360
    for name, at in (("x", 0), ("y", 4)):
        lines.append(_pair(name, at + 1, at + 3, "unit"))
        lines.append(f"fma.rn.f16x2 {name}, {name}, up, down;")
        lines.append(_pair(name, at, at + 2, name))
    lines.append("prmt.b32 x, x, y, 0x6420;")
    lines += [_signs("y", first, 0), "and.b32 y, y, 0x08080808; or.b32 x, x, y;"]
    lines += [_signs("y", first, 1), "and.b32 y, y, 0x80808080; or.b32 $0, x, y;"]
    return " ".join(lines)


_REGISTERS = ".reg .f32 " + ", ".join(f"a{i}" for i in range(GROUP)) + ", b, c; "
_REGISTERS += ".reg .b32 p, h, x, y, slope, base, unit, up, down;"


def _each(code):
    return " ".join(code.replace("{v}", f"${1 + i}").replace("{i}", str(i)) for i in range(GROUP))


# One operand after the values: an eighth of the factor. Saturation makes 1 of what is more, and 0 of NaN.
_PRODUCTS = f"{{ {_REGISTERS} {_each('abs.f32 a{i}, {v}; mul.rn.sat.f32 a{i}, a{i}, $9;')} {_tail(1)} }}"
# Three: 8 s, and the two parts of its inverse. The minimum makes 8 s of NaN.
_QUOTIENTS = (
    f"{{ {_REGISTERS} "
    + _each("abs.f32 a{i}, {v}; min.f32 a{i}, a{i}, $9; mul.rn.f32 b, a{i}, $11; fma.rn.f32 a{i}, a{i}, $10, b;")
    + f" {_tail(1)} }}"
)


def _native(each):
    """The conversion, of eight numbers q0 ... q7 that `each` makes of the operands."""
    lines = ["{ .reg .f32 " + ", ".join(f"q{i}" for i in range(GROUP)) + "; .reg .b8 p0, p1, p2, p3;", _each(each)]
    lines += [f"cvt.rn.satfinite.e2m1x2.f32 p{i}, q{2 * i + 1}, q{2 * i};" for i in range(4)]
    return " ".join(lines) + " mov.b32 $0, {p0, p1, p2, p3}; }"


_NATIVE_PRODUCTS = _native("mul.rn.f32 q{i}, {v}, $9;")
_NATIVE_QUOTIENTS = _native("mul.rn.f32 q{i}, {v}, $10; fma.rn.f32 q{i}, {v}, $9, q{i};")


def unit(native):
    """What e2m1 scales are handed over in units of."""
    return 1.0 if native else 8.0


def encode_products(values, factor, native):
    """e2m1 of mul(v, factor) for a group, one raw register; the products are exact.

    Args:
        values: eight fp32 values; of no meaning where one is NaN.
        factor: a power of two, divided by `unit(native)`.
        native: the target has the conversion.
    """
    code = _NATIVE_PRODUCTS if native else _PRODUCTS
    return asm(T.i32(), code, ",".join(["=&r"] + ["f"] * (GROUP + 1)), (*values, factor))


def encode_quotients(values, scale, inverse, native):
    """e2m1 of div(v, s) for a group, one raw register.

    Args:
        values: eight fp32 values.
        scale: s times `unit(native)`.
        inverse: of that, in two parts: see `inverse_parts`.
        native: the target has the conversion.
    """
    operands = (*values, *inverse) if native else (*values, scale, *inverse)
    code = _NATIVE_QUOTIENTS if native else _QUOTIENTS
    return asm(T.i32(), code, ",".join(["=&r"] + ["f"] * len(operands)), operands)
