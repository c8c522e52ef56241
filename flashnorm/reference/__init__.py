"""The formula of every operator in plain PyTorch: its executable specification, and the `torch` route.

Everything happens in fp32, whatever the dtypes of the tensors, and rounds to them where the numerics
mode says so. Each function takes the operator's tensors, numbers and options by name, writes into tensors
its caller gives, like a kernel of any other route, and reads all of its inputs before it writes: an `out`
that is `x` itself is fine.

A mode decides two things, and nothing else:

=============  ==============================  =======================
mode           normalised value                residual that is normed
=============  ==============================  =======================
"flashinfer"   one rounding, at the end        the unrounded fp32 sum
"hf-llama"     rounded to x's dtype before a   the sum as it is stored
               plain weight, product rounded
"hf-gemma"     one rounding, at the end        the sum as it is stored
"torch"        the same                        the same
=============  ==============================  =======================

A weight with an offset (Gemma's `1 + w`) is always applied in fp32 with one rounding at the end, and so are
LayerNorm's weight and bias, and weights before SiLU or before codes with scales of 8 bits. RMSNorm's sums are
PyTorch's own, so the two "hf" modes are bit-equal to the modules they are named after, and "torch" is to
`torch.nn.functional.rms_norm` (which has a kernel and an order of its own on GPUs); the other routes use the
canonical sum and are not bit-equal to this one.

The functions trace under `torch.compile(fullgraph=True)` and on fake tensors: no value decides control flow.
"""

from flashnorm.reference.backward import layernorm_backward, rmsnorm_backward
from flashnorm.reference.dit import (
    fused_dit_gate_residual_layernorm_gamma_beta,
    fused_dit_gate_residual_layernorm_scale_shift,
    fused_dit_residual_layernorm_scale_shift,
)
from flashnorm.reference.gated import (
    gated_residual_next_rmsnorm,
    gated_residual_rmsnorm,
    rmsnorm_gate,
    rmsnorm_sigmoid_gate,
)
from flashnorm.reference.layer import add_layernorm, fused_add_layernorm, layernorm, layernorm_quant
from flashnorm.reference.qk import fused_qk_rmsnorm_rope
from flashnorm.reference.rms import (
    add_rmsnorm,
    add_rmsnorm_dynamic_quant,
    add_rmsnorm_fp8_block_quant,
    add_rmsnorm_quant,
    fused_add_rmsnorm,
    fused_add_rmsnorm_dynamic_quant,
    fused_add_rmsnorm_fp8_block_quant,
    fused_add_rmsnorm_quant,
    rmsnorm,
    rmsnorm_dynamic_quant,
    rmsnorm_quant,
)
from flashnorm.reference.scaled import (
    add_rmsnorm_fp4quant,
    add_rmsnorm_mxfp8_quant,
    fused_add_rmsnorm_fp4quant,
    fused_add_rmsnorm_mxfp8_quant,
    rmsnorm_fp4quant,
    rmsnorm_mxfp8_quant,
)
from flashnorm.reference.silu import fused_rmsnorm_silu, fused_rmsnorm_silu_fp4, fused_rmsnorm_silu_quant

__all__ = [
    "add_layernorm",
    "add_rmsnorm",
    "add_rmsnorm_dynamic_quant",
    "add_rmsnorm_fp4quant",
    "add_rmsnorm_fp8_block_quant",
    "add_rmsnorm_mxfp8_quant",
    "add_rmsnorm_quant",
    "fused_add_layernorm",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_dynamic_quant",
    "fused_add_rmsnorm_fp4quant",
    "fused_add_rmsnorm_fp8_block_quant",
    "fused_add_rmsnorm_mxfp8_quant",
    "fused_add_rmsnorm_quant",
    "fused_dit_gate_residual_layernorm_gamma_beta",
    "fused_dit_gate_residual_layernorm_scale_shift",
    "fused_dit_residual_layernorm_scale_shift",
    "fused_qk_rmsnorm_rope",
    "fused_rmsnorm_silu",
    "fused_rmsnorm_silu_fp4",
    "fused_rmsnorm_silu_quant",
    "gated_residual_next_rmsnorm",
    "gated_residual_rmsnorm",
    "layernorm",
    "layernorm_backward",
    "layernorm_quant",
    "rmsnorm",
    "rmsnorm_backward",
    "rmsnorm_dynamic_quant",
    "rmsnorm_fp4quant",
    "rmsnorm_gate",
    "rmsnorm_mxfp8_quant",
    "rmsnorm_quant",
    "rmsnorm_sigmoid_gate",
]
