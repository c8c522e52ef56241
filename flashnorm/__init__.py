"""flashnorm: normalisation kernels with the same bits everywhere.

Importing it imports neither the CuTe DSL nor a compiler and does not initialise CUDA.
"""

from __future__ import annotations

from flashnorm import functional
from flashnorm.ahead import gen_norm_module, preload, record
from flashnorm.api import capabilities, explain
from flashnorm.core.dispatch import Explanation, backend
from flashnorm.ops.add import add_layernorm, add_rmsnorm
from flashnorm.ops.blocks import fused_add_rmsnorm_fp8_block_quant, rmsnorm_dynamic_quant
from flashnorm.ops.dit import (
    fused_dit_gate_residual_layernorm_gamma_beta,
    fused_dit_gate_residual_layernorm_scale_shift,
    fused_dit_residual_layernorm_scale_shift,
)
from flashnorm.ops.fp4 import add_rmsnorm_fp4quant, rmsnorm_fp4quant
from flashnorm.ops.gated import (
    gated_residual_next_rmsnorm,
    gated_residual_rmsnorm,
    rmsnorm_sigmoid_gate,
    supports_gated_residual_next_rmsnorm,
    supports_gated_residual_rmsnorm,
    supports_rmsnorm_sigmoid_gate,
)
from flashnorm.ops.layernorm import fused_add_layernorm, layernorm, layernorm_quant
from flashnorm.ops.mxfp8 import add_rmsnorm_mxfp8_quant, rmsnorm_mxfp8_quant
from flashnorm.ops.qk import fused_qk_rmsnorm_rope, supports_fused_qk_rmsnorm_rope
from flashnorm.ops.rmsnorm import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm
from flashnorm.ops.rmsnorm_quant import (
    fused_add_rmsnorm_quant,
    gemma_fused_add_rmsnorm_quant,
    gemma_rmsnorm_quant,
    rmsnorm_quant,
)
from flashnorm.ops.silu import fused_rmsnorm_silu
from flashnorm.scales import dequantize, swizzle_scales, unswizzle_scales

__version__ = "0.1.0.dev0"

__all__ = [
    "Explanation",
    "__version__",
    "add_layernorm",
    "add_rmsnorm",
    "add_rmsnorm_fp4quant",
    "add_rmsnorm_mxfp8_quant",
    "backend",
    "capabilities",
    "dequantize",
    "explain",
    "functional",
    "fused_add_layernorm",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_fp8_block_quant",
    "fused_add_rmsnorm_quant",
    "fused_dit_gate_residual_layernorm_gamma_beta",
    "fused_dit_gate_residual_layernorm_scale_shift",
    "fused_dit_residual_layernorm_scale_shift",
    "fused_qk_rmsnorm_rope",
    "fused_rmsnorm_silu",
    "gated_residual_next_rmsnorm",
    "gated_residual_rmsnorm",
    "gemma_fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm_quant",
    "gemma_rmsnorm",
    "gemma_rmsnorm_quant",
    "gen_norm_module",
    "layernorm",
    "layernorm_quant",
    "preload",
    "record",
    "rmsnorm",
    "rmsnorm_dynamic_quant",
    "rmsnorm_fp4quant",
    "rmsnorm_mxfp8_quant",
    "rmsnorm_quant",
    "rmsnorm_sigmoid_gate",
    "supports_fused_qk_rmsnorm_rope",
    "supports_gated_residual_next_rmsnorm",
    "supports_gated_residual_rmsnorm",
    "supports_rmsnorm_sigmoid_gate",
    "swizzle_scales",
    "unswizzle_scales",
]
