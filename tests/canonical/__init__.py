"""The arithmetic of every operator, step by step and bit for bit, in NumPy.

Every exact route must give these bits. Nothing here is fast or clever, and nothing is shared with the package: each
step is one fp32 operation that is correctly rounded by construction. `test_harness.py` checks all of it against
exact fractions.

`arithmetic` has the fp32 operations and the canonical sum, `codes` the 8-bit formats, `norms` the operators up to
their stores, `quantise` the stores that make codes.
"""

from tests.canonical.arithmetic import F32, canonical_sum, fma, narrow, widen
from tests.canonical.norms import Bits, block_bits, cast_bits, norm, rmsnorm_bits, tensor_bits
from tests.canonical.quantise import Blocks

__all__ = [
    "F32",
    "Bits",
    "Blocks",
    "block_bits",
    "canonical_sum",
    "cast_bits",
    "fma",
    "narrow",
    "norm",
    "rmsnorm_bits",
    "tensor_bits",
    "widen",
]
