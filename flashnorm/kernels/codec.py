"""Storage dtypes and fp32: raw 32-bit registers of one group of 8 elements, and its fp32 values.

Widening is exact. Narrowing rounds once, to nearest even. The 16-bit formats keep NaN and overflow to infinity. The
8-bit ones saturate: what is too large, infinity too, becomes the largest finite code with its sign, NaN of either
sign becomes 0x7F (e4m3fn and e5m2 alike) or 0 (int8), and -0 and what underflows keep their sign.
"""

from dataclasses import dataclass

from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from flashnorm.kernels.fp import asm, asm_many
from flashnorm.kernels.tile import NATIVE_FP8


def _each(count, code):
    """`code` for every i below `count`, `{i}` replaced."""
    return " ".join(code.replace("{i}", str(i)) for i in range(count))


# ------------------------------------------------------------------ widen
_BF16 = "{ .reg .b32 lo, hi; shl.b32 lo, $2, 16; and.b32 hi, $2, 0xffff0000; mov.b32 $0, lo; mov.b32 $1, hi; }"
_F16 = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }"

# Four int8 values. With its sign bit flipped, a byte is q + 128; below the exponent of 2^23 it makes the number
# 2^23 + 128 + q, and the subtraction of 2^23 + 128 is exact.
_INT8 = (
    "{ .reg .b32 t, m; xor.b32 t, $4, 0x80808080; mov.b32 m, 0x4b000000; "
    + _each(4, "prmt.b32 ${i}, t, m, 0x744{i}; add.rn.f32 ${i}, ${i}, 0fcb000080;")
    + " }"
)


def unpack(regs, dtype):
    """The fp32 values of raw registers, exactly."""
    if dtype == "float32":
        return [llvm.bitcast(T.f32(), r) for r in regs]
    count, code = {"bfloat16": (2, _BF16), "float16": (2, _F16), "int8": (4, _INT8)}[dtype]
    constraints = ",".join(["=f"] * count + ["r"])
    out = []
    for r in regs:
        out += asm_many(T.f32(), count, code, constraints, (r,))
    return out


# ------------------------------------------------------------------ narrow to floats of 16 and 32 bits
def pack(values, dtype):
    """Raw registers of fp32 values rounded to `dtype`, nearest even; NaN stays NaN, overflow is infinite."""
    if dtype == "float32":
        return [llvm.bitcast(T.i32(), v) for v in values]
    short = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    return [
        asm(T.i32(), f"cvt.rn.{short}.f32 $0, $2, $1;", "=r,f,f", (values[i], values[i + 1]))
        for i in range(0, len(values), 2)
    ]


# The second and third operand of what widens bfloat16, as numbers that may be hidden from the compiler.
HALVES = (0x1044, -0x10000)
_BF16_BY = "{ .reg .b32 lo, hi; prmt.b32 lo, $2, 0, $3; and.b32 hi, $2, $4; mov.b32 $0, lo; mov.b32 $1, hi; }"


def unpack_by(regs, select, mask):
    """The fp32 values of raw registers of bfloat16; `select` and `mask` are `HALVES` in int32 registers."""
    return [v for r in regs for v in asm_many(T.f32(), 2, _BF16_BY, "=f,=f,r,r,r", (r, select, mask))]


def round_to(values, dtype):
    """rT of fp32 values, widened again."""
    return values if dtype == "float32" else unpack(pack(values, dtype), dtype)


# ------------------------------------------------------------------ narrow to codes of 8 bits
@dataclass(frozen=True)
class Fp8:
    """An 8-bit float: its name in PTX, bits of the mantissa, bias of the exponent, largest finite code."""

    name: str
    mantissa: int
    bias: int
    largest: int


FP8 = {"float8_e4m3fn": Fp8("e4m3", 3, 7, 0x7E), "float8_e5m2": Fp8("e5m2", 2, 15, 0x7B)}


def _native(fp8):
    """Four codes by the instructions for it, which saturate and give 0x7F for NaN of either sign."""
    cvt = f"cvt.rn.satfinite.{fp8.name}x2.f32"
    return f"{{ .reg .b16 lo, hi; {cvt} lo, $2, $1; {cvt} hi, $4, $3; mov.b32 $0, {{lo, hi}}; }}"


def _emulated(fp8):
    """Four codes by integer arithmetic on the bits of |v|.

    From the smallest normal number on: rounding is an addition to the bits that carries into the exponent. Below it:
    fp32 addition of the number whose last place is the smallest subnormal rounds to a multiple of that.
    """
    shift, rebias = 23 - fp8.mantissa, (127 - fp8.bias) << 23
    smallest = (128 - fp8.bias) << 23  # the smallest normal number
    place = (128 - fp8.bias + shift) << 23  # 2^23 times the smallest subnormal
    one = (
        "and.b32 a, ${v}, 0x7fffffff; "
        f"shr.u32 n, a, {shift}; and.b32 n, n, 1; add.u32 n, n, a; "
        f"sub.u32 n, n, {rebias - (1 << (shift - 1)) + 1}; shr.u32 n, n, {shift}; "
        f"add.rn.f32 s, a, 0f{place:08x}; sub.u32 s, s, {place}; "
        f"setp.lt.u32 p, a, {smallest}; selp.b32 n, s, n, p; min.u32 n, n, {fp8.largest}; "
        "shr.u32 s, ${v}, 24; and.b32 s, s, 0x80; or.b32 n, n, s; "
        f"setp.gt.u32 p, a, {0x7F800000}; selp.b32 c{{i}}, 0x7f, n, p;"
    )
    text = " ".join(one.replace("{v}", str(i + 1)).replace("{i}", str(i)) for i in range(4))
    return "{ .reg .pred p; .reg .b32 a, n, s, c0, c1, c2, c3; " + text + _JOIN + " }"


_JOIN = " prmt.b32 c0, c0, c1, 0x0040; prmt.b32 c2, c2, c3, 0x0040; prmt.b32 $0, c0, c2, 0x5410;"

# The conversion to an integer rounds to nearest even, clamps infinities and gives 0 for NaN.
_TO_INT8 = (
    "{ .reg .s32 c0, c1, c2, c3; "
    + " ".join(f"cvt.rni.s32.f32 c{i}, ${i + 1}; max.s32 c{i}, c{i}, -127; min.s32 c{i}, c{i}, 127;" for i in range(4))
    + _JOIN
    + " }"
)


def encode(values, dtype, sm):
    """Raw registers of the 8-bit codes of fp32 values.

    Args:
        values: a multiple of four.
        dtype: "float8_e4m3fn", "float8_e5m2" or "int8".
        sm: the compute capability that the kernel is for, 90 for 9.0.
    """
    if dtype == "int8":
        code = _TO_INT8
    else:
        code = _native(FP8[dtype]) if sm >= NATIVE_FP8 else _emulated(FP8[dtype])
    return [asm(T.i32(), code, "=r,f,f,f,f", values[i : i + 4]) for i in range(0, len(values), 4)]
