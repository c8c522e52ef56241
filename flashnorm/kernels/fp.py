"""fp32 arithmetic for the canonical order: each function is one correctly rounded PTX instruction.

The DSL's own `*` and `+` may be contracted to `fma` before ptxas is ever asked, so nothing here goes
through them: every operation of the arithmetic is inline PTX with an explicit `.rn`, without `.ftz`
(subnormals are kept). Values are raw MLIR values (f32, or i32 for raw register contents): wrapping each
of the thousands of values of a wide row costs more tracing time than all the rest.
"""

import struct

from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

Value = ir.Value


def asm(result, code, constraints, args, *, effect=False):
    """Inline PTX. `effect` marks what must stay, and stay in order (loads, stores, barriers)."""
    return llvm.inline_asm(
        result,
        list(args),
        code,
        constraints,
        has_side_effects=effect,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def asm_many(type_, count, code, constraints, args, *, effect=False):
    """Inline PTX with `count` results of one type, as a list."""
    if count == 1:
        return [asm(type_, code, constraints, args, effect=effect)]
    struct_type = ir.Type.parse(f"!llvm.struct<({', '.join([str(type_)] * count)})>")
    packed = asm(struct_type, code, constraints, args, effect=effect)
    return [llvm.extractvalue(type_, packed, [i]) for i in range(count)]


def constant(value):
    """An fp32 constant, by its bits: no decimal text on the way."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return asm(T.f32(), f"mov.b32 $0, 0x{bits:08x};", "=f", ())


def add_rn(a, b):
    return asm(T.f32(), "add.rn.f32 $0, $1, $2;", "=f,f,f", (a, b))


def mul_rn(a, b):
    return asm(T.f32(), "mul.rn.f32 $0, $1, $2;", "=f,f,f", (a, b))


def fma_rn(a, b, c):
    return asm(T.f32(), "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", (a, b, c))


def div_rn(a, b):
    return asm(T.f32(), "div.rn.f32 $0, $1, $2;", "=f,f,f", (a, b))


def sqrt_rn(a):
    return asm(T.f32(), "sqrt.rn.f32 $0, $1;", "=f,f", (a,))


def rcp_rn(a):
    """div(1, a): the correctly rounded reciprocal is that quotient."""
    return asm(T.f32(), "rcp.rn.f32 $0, $1;", "=f,f", (a,))


def div_by_int(a, n):
    """div(a, n). For a power of two the product with the exact reciprocal is the same number, rounded once."""
    if n & (n - 1) == 0:
        return a if n == 1 else mul_rn(a, constant(1.0 / n))
    return div_rn(a, constant(float(n)))


# ------------------------------------------------------------------ storage dtypes <-> fp32
def unpack(regs, dtype):
    """The fp32 values of raw registers, exactly."""
    if dtype == "float32":
        return [llvm.bitcast(T.f32(), r) for r in regs]
    out = []
    for r in regs:
        if dtype == "bfloat16":
            code = (
                "{ .reg .b32 lo, hi; shl.b32 lo, $2, 16; and.b32 hi, $2, 0xffff0000; mov.b32 $0, lo; mov.b32 $1, hi; }"
            )
        else:
            code = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }"
        out += asm_many(T.f32(), 2, code, "=f,=f,r", (r,))
    return out


def pack(values, dtype):
    """Raw registers of fp32 values rounded to `dtype`, nearest even; NaN stays NaN, overflow is infinite."""
    if dtype == "float32":
        return [llvm.bitcast(T.i32(), v) for v in values]
    short = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    return [
        asm(T.i32(), f"cvt.rn.{short}.f32 $0, $2, $1;", "=r,f,f", (values[i], values[i + 1]))
        for i in range(0, len(values), 2)
    ]


def round_to(values, dtype):
    """rT of fp32 values, widened again."""
    return values if dtype == "float32" else unpack(pack(values, dtype), dtype)


def hide(reg, zero):
    """`reg`, by way of a zero that the compiler does not know."""
    return asm(T.i32(), "xor.b32 $0, $1, $2;", "=r,r,r", (reg, zero))
