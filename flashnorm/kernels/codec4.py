"""fp32 to 4-bit codes, e2m1, two to a byte.

Codes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, the sign in the highest bit; nearest even, saturating; a NaN, which arithmetic
makes with a positive sign, becomes 7.

A quotient v / s with s in e4m3, rounded to fp32, is a number halfway between two codes only where v is exactly that
number times s: the product is exact in fp32, and its neighbours are further from it than the rounding of the quotient
reaches. So any quotient with an error far below 2^-24, rounded once, gives the codes of the true one. Here the inverse
of s comes in two parts, the first too small by 2^-11 and the second positive: v times the two, added, is that quotient
in two operations, and keeps infinities and the sign of zeros.

Without the conversion nearly all blocks are usual ones: none of their numbers is beyond the largest code by more than a
rounding, none is NaN, and the scale is a normal number. Where a block is not, one branch leads to clamps and to what
the codes of special blocks are.
"""

from cutlass.cutlass_dsl import T

from flashnorm.kernels.fp import asm
from flashnorm.kernels.memory import GROUP

LARGEST_E2M1 = 6.0
UNIT = 2.0**14  # e2m1 numbers times 2^-14, in fp16, have their code in bits 9 to 11

# fp32 arithmetic, since integer operations have half the rate up to sm_90.
#
# a is a magnitude m times 2^-14, m at most 7. b = (m^2 + 12) 2^-28 lies below 2^-24 for m < 2, then below 2^-23 for
# m < 4.47, then below 2^-22: so 2^33 b - a is rounded to multiples of 2^-14 times 1/2, 1 or 2, and ties go to even
# ones, because b of a tie has few bits. What it lacks of 2^33 b is the rounded magnitude, exactly. Where the difference
# falls below a power of two, steps are half as large, which is no matter: from 1.75 to 2.25 both round to the same,
# and from 3.5 to 4.5.
_ROUND = "fma.rn.f32 b, a{i}, a{i}, 0f33400000; fma.rn.f32 c, b, 0fd0000000, a{i}; fma.rn.f32 a{i}, b, 0f50000000, c;"
_LARGEST = "0f39c00000"  # 6 * 2^-14


def _signs(name, first, at):
    a, b, c, d = (f"${first + at + 2 * i}" for i in range(4))
    return f"prmt.b32 g, {a}, {b}, 0x00fb; prmt.b32 h, {c}, {d}, 0x00fb; prmt.b32 {name}, g, h, 0x5410;"


def _tail(saturate=False):
    """From the magnitudes a0 ... a7 and the numbers $1 ... $8 with their signs to $0.

    In fp16, elements i and i + 4 side by side, codes are shifted to their places, two registers at a time.
    """
    lines = [_ROUND.replace("{i}", str(i)) for i in range(GROUP)]
    for i in range(4):
        lines.append(f"cvt.rn.f16x2.f32 h{i}, a{i + 4}, a{i};")
        if saturate:  # what is less than 8 may have been rounded to that
            lines.append(f"min.f16x2 h{i}, h{i}, six;")
    lines.append("shl.b32 x, h1, 4; add.u32 x, x, h0; shl.b32 y, h3, 4; add.u32 y, y, h2;")
    lines.append("shr.u32 x, x, 9; shr.u32 y, y, 1; add.u32 x, x, y;")
    lines += [_signs("y", 1, 0), "and.b32 y, y, 0x08080808; or.b32 x, x, y;"]
    lines += [_signs("y", 1, 1), "and.b32 y, y, 0x80808080; or.b32 $0, x, y;"]
    return " ".join(lines)


_REGISTERS = ".reg .pred p, q; .reg .f32 " + ", ".join(f"a{i}" for i in range(GROUP)) + ", b, c, n; "
_REGISTERS += ".reg .b32 g, h, x, y, six, h0, h1, h2, h3, keep, add;"


def _each(code):
    return " ".join(code.replace("{v}", f"${1 + i}").replace("{i}", str(i)) for i in range(GROUP))


def _special(amax, nan, byte):
    """Codes of a special block: +0 where `amax` is 0, or the `byte` of its scale; 7 where `nan` says so."""
    also = f"setp.eq.or.u32 q, {byte}, 0, q; " if byte else ""
    return (
        f"setp.eq.u32 q, {amax}, 0; {also}selp.b32 keep, 0, -1, q; selp.b32 add, 0, 0x77777777, q; {nan} "
        "selp.b32 add, add, 0, q; selp.b32 keep, 0, keep, q; and.b32 $0, $0, keep; or.b32 $0, $0, add;"
    )


def _branch(usual, near, far):
    return f"{{ {_REGISTERS} mov.b32 six, 0x0e000e00; {usual} @p bra NEAR; {far} bra DONE; NEAR: {near} DONE: }}"


def _products(saturate):
    """$9: the factor over UNIT; $10: the block's amax. Usual blocks have a finite one, not 0."""
    usual = "sub.u32 x, $10, 1; setp.lt.u32 p, x, 0x7f7fffff;"
    near = f"{_each('abs.f32 a{i}, {v}; mul.rn.f32 a{i}, a{i}, $9;')} {_tail(saturate)}"
    far = _each(f"abs.f32 a{{i}}, {{v}}; mul.rn.f32 a{{i}}, a{{i}}, $9; min.f32 a{{i}}, a{{i}}, {_LARGEST};")
    return _branch(usual, near, f"{far} {_tail()} {_special('$10', 'setp.gt.u32 q, $10, 0x7f800000;', '')}")


def _quotients():
    """$9: s; $10, $11: the inverse of UNIT s in two parts; $12: s before it is rounded; $13: amax; $14: the code of s.

    In usual blocks s is a normal number of e4m3 that was not too large for it: v / s is at most 6.4.
    """
    usual = "setp.ge.f32 p, $12, 0f3c800000; setp.le.and.f32 p, $12, 0f43e80000, p; "  # 2^-6 and 464
    usual += "setp.lt.and.u32 p, $13, 0x7f800000, p;"
    quotient = "mul.rn.f32 b, a{i}, $11; fma.rn.f32 a{i}, a{i}, $10, b;"
    near = f"{_each('abs.f32 a{i}, {v}; ' + quotient)} {_tail()}"
    far = "mul.rn.f32 n, $9, 0f40c00000; " + _each("abs.f32 a{i}, {v}; min.f32 a{i}, a{i}, n; " + quotient)
    return _branch(usual, near, f"{far} {_tail()} {_special('$13', 'setp.eq.u32 q, $14, 127;', '$14')}")


def _native(each):
    """The conversion, of eight numbers q0 ... q7 that `each` makes of the operands."""
    lines = ["{ .reg .f32 " + ", ".join(f"q{i}" for i in range(GROUP)) + "; .reg .b8 p0, p1, p2, p3;", _each(each)]
    lines += [f"cvt.rn.satfinite.e2m1x2.f32 p{i}, q{2 * i + 1}, q{2 * i};" for i in range(4)]
    return " ".join(lines) + " mov.b32 $0, {p0, p1, p2, p3}; }"


_NATIVE_PRODUCTS = _native("mul.rn.f32 q{i}, {v}, $9;")
_NATIVE_QUOTIENTS = _native("mul.rn.f32 q{i}, {v}, $10; fma.rn.f32 q{i}, {v}, $9, q{i};")


def unit(native):
    """What e2m1 scales are handed over in units of."""
    return 1.0 if native else UNIT


def products(values, factor):
    """e2m1 of mul(v, factor) by the conversion, for a group, one raw register; the products are exact."""
    return asm(T.i32(), _NATIVE_PRODUCTS, ",".join(["=&r"] + ["f"] * (GROUP + 1)), (*values, factor))


def quotients(values, inverse):
    """e2m1 of div(v, s) by the conversion; `inverse` of s in two parts: see `scales.inverse_parts`."""
    return asm(T.i32(), _NATIVE_QUOTIENTS, ",".join(["=&r"] + ["f"] * (GROUP + 2)), (*values, *inverse))


def emulated_products(values, factor, amax, saturate):
    """e2m1 of mul(v, factor) for a group, special blocks too.

    Args:
        values: eight fp32 values.
        factor: a power of two, divided by `UNIT`; the products are exact.
        amax: the largest magnitude of the block.
        saturate: usual blocks may have products of more than 7; all are less than 8.
    """
    constraints = ",".join(["=&r"] + ["f"] * (GROUP + 2))
    return asm(T.i32(), _products(saturate), constraints, (*values, factor, amax))


def emulated_quotients(values, scale, inverse, wanted, amax, byte):
    """e2m1 of div(v, s) for a group, special blocks too.

    Args:
        values: eight fp32 values.
        scale: s.
        inverse: of s times `UNIT`, in two parts: see `scales.inverse_parts`.
        wanted: what s was rounded from.
        amax: the largest magnitude of the block.
        byte: the code of s.
    """
    constraints = ",".join(["=&r"] + ["f"] * (GROUP + 5) + ["r"])
    return asm(T.i32(), _quotients(), constraints, (*values, scale, *inverse, wanted, amax, byte))
