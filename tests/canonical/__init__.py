"""The arithmetic of every operator, step by step and bit for bit, in NumPy.

Every exact route must give these bits. Nothing here is fast or clever, and nothing is shared with the package: each
step is one fp32 operation that is correctly rounded by construction. `test_harness.py` checks all of it against
exact fractions.

`arithmetic` has the fp32 operations, the canonical sum and SiLU, `codes` the formats of 8 and 4 bits, `norms` the
operators up to their stores, `quantise` the stores that make codes, `gates` the operators with gates.
"""

from tests.canonical import gates
from tests.canonical.arithmetic import F32, canonical_sum, exp, fma, narrow, silu, widen
from tests.canonical.norms import (
    Bits,
    block_bits,
    cast_bits,
    norm,
    nvfp4_bits,
    power_bits,
    rmsnorm_bits,
    tensor_bits,
)
from tests.canonical.quantise import Blocks, tiles

__all__ = [
    "F32",
    "Bits",
    "Blocks",
    "block_bits",
    "canonical_sum",
    "cast_bits",
    "exp",
    "fma",
    "gates",
    "narrow",
    "norm",
    "nvfp4_bits",
    "power_bits",
    "rmsnorm_bits",
    "silu",
    "tensor_bits",
    "tiles",
    "widen",
]
