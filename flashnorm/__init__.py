"""flashnorm: normalisation kernels with the same bits everywhere.

Importing it imports neither the CuTe DSL nor a compiler and does not initialise CUDA.
"""

from __future__ import annotations

from flashnorm.ahead import gen_norm_module, preload, record
from flashnorm.api import capabilities, explain
from flashnorm.core.dispatch import Explanation, backend
from flashnorm.ops.rmsnorm import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm

__version__ = "0.1.0.dev0"

__all__ = [
    "Explanation",
    "__version__",
    "backend",
    "capabilities",
    "explain",
    "fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "gen_norm_module",
    "preload",
    "record",
    "rmsnorm",
]
