"""What is tested: combinations of operator, mode and dtypes, and the hidden sizes.

A combination is one compiled kernel on the C++ routes, and one for each hidden size on the cute
route. The lists are pairwise rather than full, so that a test run compiles a few dozen kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

# What users have, and what has broken kernels: odd, one short of or past a vector, a warp, a power of two.
HIDDEN = (1, 2, 7, 8, 9, 64, 111, 128, 500, 576, 769, 1023, 1024, 3584, 4096, 8192, 16384, 65537)
HIDDEN_ODD = (250, 1440, 4095, 8200, 24579)
HIDDEN_LONG = (131072, 262144)
TOKENS = (1, 2, 7, 19, 99, 989)

PLAIN = ("rmsnorm", "gemma_rmsnorm")
FUSED = ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm")


@dataclass(frozen=True)
class Combo:
    """What a compiled kernel is made for: the operator, its mode, and the dtypes (None: not given)."""

    op: str
    x: str = "bf16"
    weight: str | None = "bf16"
    residual: str | None = None
    numerics: str = "flashinfer"
    rstd: bool = False

    @property
    def offset(self) -> float:
        return 1.0 if self.op.startswith("gemma") else 0.0

    def __str__(self) -> str:
        parts = [self.op, self.numerics, self.x, f"w={self.weight}"]
        parts += [f"r={self.residual}"] if self.residual else []
        return "-".join(parts + (["rstd"] if self.rstd else []))


def _combos() -> tuple[Combo, ...]:
    """Every pair of dtypes of every operator, every mode, with few enough kernels to compile in a test run."""
    names = list(DTYPES)
    found = [Combo("rmsnorm", x, w, rstd=x == w) for x in names for w in names]
    found += [Combo("rmsnorm"), Combo("rmsnorm", "bf16", None), Combo("rmsnorm", "f32", None, rstd=True)]
    llama = [("bf16", "bf16"), ("f16", "f16"), ("bf16", "f32"), ("f32", "f16")]
    found += [Combo("rmsnorm", x, w, numerics="vllm" if x == "f16" else "hf-llama") for x, w in llama]
    gemma = [("bf16", "bf16"), ("f16", "f32"), ("f32", "bf16"), ("f16", "f16")]
    found += [Combo("gemma_rmsnorm", x, w, rstd=w == "f32") for x, w in gemma]
    # x, residual and weight: a Latin square holds each pair of two of them once
    found += [Combo("fused_add_rmsnorm", names[i], names[-(i + j) % 3], names[j]) for i in range(3) for j in range(3)]
    found += [
        Combo("fused_add_rmsnorm", "bf16", None, "f32"),
        Combo("fused_add_rmsnorm", "bf16", "bf16", "bf16", "hf-llama"),
        Combo("fused_add_rmsnorm", "f16", "f16", "f16", "vllm"),
        Combo("fused_add_rmsnorm", "bf16", "bf16", "bf16", "hf-gemma"),
        Combo("fused_add_rmsnorm", "f16", "f32", "bf16", "cake"),
        Combo("gemma_fused_add_rmsnorm", "bf16", "bf16", "bf16"),
        Combo("gemma_fused_add_rmsnorm", "f16", "bf16", "f32"),
        Combo("gemma_fused_add_rmsnorm", "f32", "f16", "bf16"),
        Combo("gemma_fused_add_rmsnorm", "bf16", "bf16", "bf16", "hf-gemma"),
    ]
    return tuple(found)


COMBOS = _combos()
# One of each operator, in the dtypes that are used most: for layouts, cases and everything that is not about dtypes.
BF16 = tuple(
    Combo(op, "bf16", "bf16", "bf16" if op in FUSED else None, rstd=op == "rmsnorm") for op in (*PLAIN, *FUSED)
)
# What batches are cut up for: every operator in its plain form, and a cross-section of the rest.
CHUNKED = tuple(dict.fromkeys((*BF16, *COMBOS[::5])))
assert set(BF16) <= set(COMBOS)


def some_hidden(combo: Combo) -> tuple[int, ...]:
    """The hidden sizes of a combination where each costs a compilation: two by turns, and 4096."""
    every = sorted((*HIDDEN, *HIDDEN_ODD, *HIDDEN_LONG))
    turn = COMBOS.index(combo)
    return tuple(dict.fromkeys((every[turn % len(every)], every[(turn + len(every) // 2) % len(every)], 4096)))


# Each hidden size has its turn.
assert {h for combo in COMBOS for h in some_hidden(combo)} == {*HIDDEN, *HIDDEN_ODD, *HIDDEN_LONG}
