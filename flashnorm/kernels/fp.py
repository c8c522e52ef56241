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


def sub_rn(a, b):
    return asm(T.f32(), "sub.rn.f32 $0, $1, $2;", "=f,f,f", (a, b))


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


def max_nan(a, b):
    """The larger one; NaN where one of the two is."""
    return asm(T.f32(), "max.NaN.f32 $0, $1, $2;", "=f,f,f", (a, b))


def min_nan(a, b):
    """The smaller one; NaN where one of the two is."""
    return asm(T.f32(), "min.NaN.f32 $0, $1, $2;", "=f,f,f", (a, b))


def magnitude(a):
    return asm(T.f32(), "abs.f32 $0, $1;", "=f,f", (a,))


# ------------------------------------------------------------------ raw contents
def hide(reg, zero):
    """`reg`, by way of a zero that the compiler does not know."""
    return asm(T.i32(), "xor.b32 $0, $1, $2;", "=r,r,r", (reg, zero))


def keep(value, bits):
    """`value` where the int32 `bits` are all ones, +0 where they are 0."""
    return asm(T.f32(), "and.b32 $0, $1, $2;", "=f,f,r", (value, bits))


def choose(condition, value, other):
    """`value` where the int32 `condition` is not 0, else `other`; fp32."""
    code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; selp.b32 $0, $2, $3, p; }"
    return asm(T.f32(), code, "=f,r,f,f", (condition, value, other))
