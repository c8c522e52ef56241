"""The model: what a program's kernels must write, bit for bit, and what it means in fp64, in plain PyTorch.

Two independent readers of a `RowProgram`, for `flashnorm verify`, the tests and the benchmarks. Neither shares
a line with a kernel or with `flashnorm.reference`. They are slow and take small inputs.

Formats and order of operations: every fp32 operation is rounded once, to nearest even; sums follow the one order
that all routes share (see `canonical_sum`); codes are made by integer arithmetic on the bits of fp32 numbers.
"""

from flashnorm.model.arithmetic import canonical_sum
from flashnorm.model.distance import agree, same_bits, steps
from flashnorm.model.programs import canonical, exact

__all__ = ["agree", "canonical", "canonical_sum", "exact", "same_bits", "steps"]
