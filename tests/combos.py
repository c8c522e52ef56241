"""What is tested: combinations of operator, mode, dtypes and options, and the hidden sizes.

A combination is one compiled kernel on the C++ routes, and one for each hidden size on the cute
route. The lists are pairwise rather than full, so that a test run compiles a few dozen kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
}
E2M1 = torch.float4_e2m1fn_x2  # two codes a byte
CODES = ("e4m3", "e5m2", "i8", "e2m1")
FLOATS = ("f32", "f16", "bf16")

# What users have, and what has broken kernels: odd, one short of or past a vector, a warp, a power of two.
HIDDEN = (1, 2, 7, 8, 9, 64, 111, 128, 500, 576, 769, 1023, 1024, 3584, 4096, 8192, 16384, 65537)
HIDDEN_ODD = (250, 1440, 4095, 8200, 24579)
HIDDEN_LONG = (131072, 262144)
BLOCK_HIDDEN = (128, 256, 384, 1024, 3584, 4096, 8192, 16384, 24576)  # for operators of whole blocks of 128
SCALED_HIDDEN = (32, 64, 96, 576, 4096, 16384)  # of 32 elements; and these two of 16
SCALED_HIDDEN_16 = (16, 48)
TOKENS = (1, 2, 7, 19, 99, 989)

PLAIN = ("rmsnorm", "gemma_rmsnorm", "layernorm")
FUSED = ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "fused_add_layernorm")
STATIC = (
    "rmsnorm_quant",
    "gemma_rmsnorm_quant",
    "fused_add_rmsnorm_quant",
    "gemma_fused_add_rmsnorm_quant",
    "layernorm_quant",
)
BLOCKED = "fused_add_rmsnorm_fp8_block_quant"
DYNAMIC = "rmsnorm_dynamic_quant"
OLD = (*PLAIN, *FUSED, *STATIC, BLOCKED, DYNAMIC)  # those that store numbers, or scales of more than 8 bits
FP4 = ("rmsnorm_fp4quant", "add_rmsnorm_fp4quant")
MXFP8 = ("rmsnorm_mxfp8_quant", "add_rmsnorm_mxfp8_quant")
SILU = "fused_rmsnorm_silu"
OPS = (*OLD, *FP4, *MXFP8, SILU)


@dataclass(frozen=True)
class Combo:
    """What a compiled kernel is made for: the operator, its mode, the dtypes (None: not given) and the options.

    Attributes:
        op: a public operator.
        x, weight, residual, bias: dtypes by their short names.
        numerics: the mode.
        rstd: whether rstd is asked for.
        out: dtype of the result where it is not the input's.
        scale: of the static operators: "value", or the dtype of an element on the device. Of those of four bits:
            the global scale, or None.
        block: elements that a scale found from the row serves, 0 for one scale a token.
        form: of such scales: "fp32", "ue8m0", "ue8m0_packed" or "e4m3".
        column: of the dynamic operator: scales lie in columns.
        cap: where scale_ub is: "", "value" or "device".
        side: normed_out is asked for.
        index: dtype of a row_index.
        input_scale: of an int8 input: "one" for everything, or "rows".
        double: layernorm_quant's double_rounding.
        placed: where scales of 8 bits go: "rows", "swizzled" or "both".
        rule: of those that are powers of two: "up" or "ocp".
    """

    op: str
    x: str = "bf16"
    weight: str | None = "bf16"
    residual: str | None = None
    numerics: str = "flashinfer"
    rstd: bool = False
    bias: str | None = None
    out: str | None = None
    scale: str | None = None
    block: int = 0
    form: str = "fp32"
    column: bool = False
    cap: str = ""
    side: bool = False
    index: str | None = None
    input_scale: str | None = None
    double: bool = False
    placed: str = "rows"
    rule: str = "up"

    @property
    def offset(self) -> float:
        return 1.0 if self.op.startswith("gemma") else 0.0

    @property
    def centred(self) -> bool:
        """LayerNorm rather than RMSNorm."""
        return "layernorm" in self.op

    @property
    def makes_codes(self) -> bool:
        return self.out in CODES

    @property
    def scaled(self) -> bool:
        """NVFP4, MXFP4 or MXFP8: scales of 8 bits, from the norm in fp32."""
        return self.op in (*FP4, *MXFP8) or (self.op == SILU and self.out == "e2m1")

    @property
    def makes_scales(self) -> bool:
        return self.op in (BLOCKED, DYNAMIC) or self.scaled

    @property
    def once(self) -> bool:
        """Nothing is rounded before the end, whatever the mode."""
        return self.scaled or self.op == SILU

    @property
    def in_place(self) -> bool:
        """The result overwrites the input."""
        return self.op in FUSED

    @property
    def may_alias(self) -> bool:
        """out= may be the input."""
        return (self.op in PLAIN and self.index is None and self.x != "i8") or (self.op == SILU and self.out is None)

    @property
    def out_dtype(self) -> torch.dtype:
        return E2M1 if self.out == "e2m1" else DTYPES[self.out or self.x]

    @property
    def whole(self) -> int:
        """What the length of a row must be a multiple of."""
        return self.block_size if self.scaled or self.op == BLOCKED else 1

    @property
    def block_size(self) -> int:
        """Elements that a scale serves, 0 for a whole row."""
        return 128 if self.op == BLOCKED else self.block

    def __str__(self) -> str:
        parts = [self.op, self.numerics, self.x, f"w={self.weight}"]
        named = {"r": self.residual, "b": self.bias, "out": self.out, "scale": self.scale, "cap": self.cap}
        named |= {"index": self.index, "unit": self.input_scale, "block": self.block}
        named |= {"form": self.form if self.form != "fp32" else "", "placed": self.placed if self.scaled else ""}
        named |= {"rule": self.rule if self.rule != "up" else ""}
        parts += [f"{name}={value}" for name, value in named.items() if value]
        flags = {"rstd": self.rstd, "column": self.column, "side": self.side, "double": self.double}
        return "-".join(parts + [name for name, given in flags.items() if given])


def _rmsnorms() -> Iterator[Combo]:
    """Every pair of dtypes of every operator, every mode, with few enough kernels to compile in a test run."""
    yield from (Combo("rmsnorm", x, w, rstd=x == w) for x in FLOATS for w in FLOATS)
    yield from (Combo("rmsnorm"), Combo("rmsnorm", "bf16", None), Combo("rmsnorm", "f32", None, rstd=True))
    llama = [("bf16", "bf16"), ("f16", "f16"), ("bf16", "f32"), ("f32", "f16")]
    yield from (Combo("rmsnorm", x, w, numerics="vllm" if x == "f16" else "hf-llama") for x, w in llama)
    gemma = [("bf16", "bf16"), ("f16", "f32"), ("f32", "bf16"), ("f16", "f16")]
    yield from (Combo("gemma_rmsnorm", x, w, rstd=w == "f32") for x, w in gemma)
    # x, residual and weight: a Latin square holds each pair of two of them once
    names = FLOATS
    for i in range(3):
        yield from (Combo("fused_add_rmsnorm", names[i], names[-(i + j) % 3], names[j]) for j in range(3))
    yield Combo("fused_add_rmsnorm", "bf16", None, "f32")
    yield Combo("fused_add_rmsnorm", "bf16", "bf16", "bf16", "hf-llama")
    yield Combo("fused_add_rmsnorm", "f16", "f16", "f16", "vllm")
    yield Combo("fused_add_rmsnorm", "bf16", "bf16", "bf16", "hf-gemma")
    yield Combo("fused_add_rmsnorm", "f16", "f32", "bf16", "cake")
    yield Combo("gemma_fused_add_rmsnorm", "bf16", "bf16", "bf16")
    yield Combo("gemma_fused_add_rmsnorm", "f16", "bf16", "f32")
    yield Combo("gemma_fused_add_rmsnorm", "f32", "f16", "bf16")
    yield Combo("gemma_fused_add_rmsnorm", "bf16", "bf16", "bf16", "hf-gemma")


def _layernorms() -> Iterator[Combo]:
    """Every dtype in every place, each of gain and bias there and not there, both sums."""
    yield Combo("layernorm", "bf16", "f32", bias="f32")
    yield Combo("layernorm", "f16", "f16", bias="f16")
    yield Combo("layernorm", "f32", "f32", bias="f32")
    yield Combo("layernorm", "bf16", "bf16", numerics="hf-llama")
    yield Combo("layernorm", "f32", None, bias="f16")
    yield Combo("layernorm", "f16", None)
    yield Combo("fused_add_layernorm", "bf16", "f32", "bf16", bias="f32")
    yield Combo("fused_add_layernorm", "f16", "bf16", "f32", "hf-gemma", bias="f16")
    yield Combo("fused_add_layernorm", "f32", "f32", "f32", bias="f32")


def _static() -> Iterator[Combo]:
    """Every format with every place and dtype of the scale, every mode."""
    yield Combo("rmsnorm_quant", out="e4m3", scale="value")
    yield Combo("rmsnorm_quant", out="e5m2", scale="f32")
    yield Combo("rmsnorm_quant", "f16", "f32", out="e4m3", scale="f16")
    yield Combo("rmsnorm_quant", "f32", None, out="e5m2", scale="value")
    yield Combo("rmsnorm_quant", numerics="hf-llama", out="e4m3", scale="bf16")
    yield Combo("gemma_rmsnorm_quant", out="e4m3", scale="value")
    yield Combo("gemma_rmsnorm_quant", "f16", "f32", numerics="vllm", out="e5m2", scale="f32")
    yield Combo("fused_add_rmsnorm_quant", "bf16", "bf16", "bf16", out="e4m3", scale="value")
    yield Combo("fused_add_rmsnorm_quant", "f16", "bf16", "f32", "hf-llama", out="e5m2", scale="f32")
    yield Combo("fused_add_rmsnorm_quant", "f32", None, "f16", "hf-gemma", out="e4m3", scale="f32")
    yield Combo("gemma_fused_add_rmsnorm_quant", "bf16", "bf16", "bf16", out="e4m3", scale="value")
    yield Combo("gemma_fused_add_rmsnorm_quant", "f16", "f32", "bf16", "hf-gemma", out="e5m2", scale="value")
    yield Combo("layernorm_quant", "bf16", "f32", bias="f32", out="e4m3", scale="value")
    yield Combo("layernorm_quant", "bf16", "f32", bias="f32", out="e5m2", scale="f32", double=True)
    yield Combo("layernorm_quant", "f16", "f16", out="e4m3", scale="bf16")
    yield Combo("layernorm_quant", "f32", None, bias="bf16", out="e5m2", scale="value", double=True)


def _blocked() -> Iterator[Combo]:
    yield Combo(BLOCKED, "bf16", "bf16", "bf16", out="e4m3", side=True)
    yield Combo(BLOCKED, "f16", "f32", "bf16", "hf-llama", out="e4m3", side=True)
    yield Combo(BLOCKED, "f32", None, "f16", "hf-gemma", out="e4m3", side=True)


def _dynamic() -> Iterator[Combo]:
    """Every format, form and layout of scales, with and without a residual, a cap, the rounded norm."""
    yield Combo(DYNAMIC, out="e4m3")
    yield Combo(DYNAMIC, "bf16", "bf16", "bf16", out="e4m3", block=128, column=True, side=True)
    yield Combo(DYNAMIC, "bf16", "bf16", "f32", "hf-llama", out="e4m3", block=128, form="ue8m0_packed", column=True)
    yield Combo(DYNAMIC, "f16", "f32", out="i8", cap="value", side=True)
    yield Combo(DYNAMIC, "f16", "f16", out="e5m2", block=128, form="ue8m0")
    yield Combo(DYNAMIC, "f32", None, out="e4m3", form="ue8m0", column=True, side=True)
    yield Combo(DYNAMIC, "bf16", "f16", "f16", "hf-gemma", out="e5m2", cap="device")
    yield Combo(DYNAMIC, "f32", "bf16", "f32", "vllm", out="i8", block=128, column=True)
    yield Combo(DYNAMIC, "bf16", None, out="e5m2", block=128, form="ue8m0_packed", column=True, side=True)


def _gathered() -> Iterator[Combo]:
    """Rows by index, int8 rows, and both."""
    yield Combo("rmsnorm", index="i32")
    yield Combo("rmsnorm", "f32", "f16", rstd=True, index="i64")
    yield Combo("gemma_rmsnorm", "f16", "f16", index="i32")
    yield Combo("rmsnorm_quant", out="e4m3", scale="value", index="i64")
    yield Combo("rmsnorm", "i8", "bf16", rstd=True, out="bf16", input_scale="rows")
    yield Combo("rmsnorm", "i8", "bf16", numerics="hf-llama", out="f16", input_scale="one")
    yield Combo("gemma_rmsnorm", "i8", "f32", out="f32", input_scale="rows", index="i32")
    yield Combo("rmsnorm_quant", "i8", "f16", numerics="hf-llama", out="e5m2", scale="f32", input_scale="one")
    yield Combo("gemma_rmsnorm_quant", "i8", "bf16", out="e4m3", scale="value", input_scale="rows", index="i64")


def _scaled() -> Iterator[Combo]:
    """Every block, format and rule of scales of 8 bits with each layout; every mode, dtype and place of G."""
    nv = {"out": "e2m1", "block": 16, "form": "e4m3"}
    mx = {"out": "e2m1", "block": 32, "form": "ue8m0"}
    yield Combo(FP4[0], scale="value", **nv)
    yield Combo(FP4[0], "f32", None, scale="f32", placed="swizzled", **nv)
    yield Combo(FP4[0], "f16", "f32", numerics="vllm", **(nv | {"block": 32}))
    yield Combo(FP4[0], "bf16", "f16", placed="swizzled", **mx)
    yield Combo(FP4[0], "f32", "f32", numerics="torch", rule="ocp", **mx)
    yield Combo(FP4[1], "bf16", "bf16", "bf16", scale="value", placed="both", side=True, **nv)
    yield Combo(FP4[1], "f16", "f16", "f32", "hf-llama", scale="bf16", **nv)
    yield Combo(FP4[1], "f32", None, "f16", "hf-gemma", rule="ocp", placed="both", side=True, **mx)
    yield Combo(FP4[1], "bf16", "f32", "bf16", placed="swizzled", **mx)
    eight = {"out": "e4m3", "block": 32, "form": "ue8m0"}
    yield Combo(MXFP8[0], **eight)
    yield Combo(MXFP8[0], "f32", None, rule="ocp", placed="swizzled", **eight)
    yield Combo(MXFP8[1], "bf16", "bf16", "bf16", placed="swizzled", **eight)
    yield Combo(MXFP8[1], "f16", "f32", "f32", "hf-llama", rule="ocp", **eight)


def _silu() -> Iterator[Combo]:
    yield Combo(SILU)
    yield Combo(SILU, "f32", "f16", numerics="hf-llama")
    yield Combo(SILU, "f16", None)
    yield Combo(SILU, out="e4m3", scale="value")
    yield Combo(SILU, "f16", "f32", out="e5m2", scale="f32")
    yield Combo(SILU, "f32", "bf16", out="e4m3")
    yield Combo(SILU, out="e2m1", block=16, form="e4m3")


RMSNORMS = tuple(_rmsnorms())
SCALED = (*_scaled(), *_silu())
COMBOS = (*RMSNORMS, *_layernorms(), *_static(), *_blocked(), *_dynamic(), *_gathered(), *SCALED)
# One of each operator, in the dtypes that are used most: for layouts, cases and everything that is not about dtypes.
USUAL = tuple(
    next(c for c in COMBOS if (c.op, c.x, c.rstd) == (op, "bf16", op == "rmsnorm") and c.residual in (None, "bf16"))
    for op in OPS
)
BF16 = tuple(c for c in USUAL if c in RMSNORMS)
# Where every layout of every tensor is tried: the newer operators by the one that has the most of them.
LAID_OUT = tuple(c for c in USUAL if c.op in OLD or c.op == FP4[1])
# What batches are cut up for: every operator in its usual form, and a cross-section of the rest.
CHUNKED = tuple(dict.fromkeys((*LAID_OUT, *COMBOS[: -len(SCALED) : 5], Combo(SILU))))
assert len(set(COMBOS)) == len(COMBOS) and len({str(c) for c in COMBOS}) == len(COMBOS)


def every_hidden(combo: Combo) -> tuple[int, ...]:
    """All hidden sizes that an operator is tried with."""
    if combo.scaled:
        return (*SCALED_HIDDEN, *(SCALED_HIDDEN_16 if combo.block == 16 else ()))
    return BLOCK_HIDDEN if combo.op == BLOCKED else (*HIDDEN, *HIDDEN_ODD, *HIDDEN_LONG)


def fitting(combo: Combo, *shape: int) -> tuple[int, ...]:
    """A shape, its rows long enough for whole blocks where the operator takes nothing else."""
    *lead, h = shape
    return (*lead, -(-h // combo.whole) * combo.whole)


def some_hidden(combo: Combo) -> tuple[int, ...]:
    """The hidden sizes of a combination where each costs a compilation: two by turns, and 4096."""
    every = sorted(every_hidden(combo))
    turn = COMBOS.index(combo)
    return tuple(dict.fromkeys((every[turn % len(every)], every[(turn + len(every) // 2) % len(every)], 4096)))


# Each hidden size has its turn.
assert {h for combo in COMBOS for h in some_hidden(combo)} >= {*HIDDEN, *HIDDEN_ODD, *HIDDEN_LONG}
