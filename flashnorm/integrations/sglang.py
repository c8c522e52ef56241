"""flashnorm in SGLang: a general plugin, found by its entry point, that hooks the CUDA forward of its RMSNorms.

Installing flashnorm beside SGLang is all; `SGLANG_PLUGINS` chooses among plugins. The hook goes around the forward
that is there: calls that flashnorm does not serve (another dtype for the weight, a partial variance, extra arguments)
run it as before. Results round where SGLang's kernels do (`numerics="flashinfer"`), with flashnorm's sums: the same
bits whatever else is in the batch.

On platforms of other vendors SGLang asks its registry of out-of-tree forwards; this plugin is for CUDA alone.

Written against SGLang's public interface (`sglang.srt.plugins.hook_registry.HookRegistry.register` with
`HookType.AROUND`, and `forward_cuda(x, residual=None)` of its layers) and tested against a stand-in of that shape. It
has NOT been run inside SGLang, on any version.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from flashnorm.integrations import engine

log = logging.getLogger("flashnorm")

LAYERS = "sglang.srt.layers.layernorm"
NORMS = ("RMSNorm", "GemmaRMSNorm")
# Attributes of a layer that ask for something else: what each is where they do not.
_PLAIN = {
    "variance_size_override": None,
    "cast_x_before_out_mul": False,
    "fp32_residual": False,
    "override_orig_dtype": None,
}


def register() -> None:
    """The entry point. Harmless where SGLang has no hooks: one log line."""
    try:
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    except ImportError as error:
        log.warning("SGLang has no hooks, flashnorm leaves its norms alone: %s", error)
        return
    for name in NORMS:
        hook = functools.partial(_forward, name == "GemmaRMSNorm")
        hooks.HookRegistry.register(f"{LAYERS}.{name}.forward_cuda", hook, hooks.HookType.AROUND)


def _forward(gemma: bool, original: Any, self: Any, x: Any, residual: Any = None, *more: Any, **named: Any) -> Any:
    """One forward of a layer, as a hook around its own."""
    plain = all(getattr(self, name, value) in (value, None) for name, value in _PLAIN.items())
    plain = plain and not more and all(value is None for value in named.values())
    weight = self.weight.data
    if not plain or not engine.serves(x, residual, weight, self.variance_epsilon, gemma=gemma):
        return original(self, x, residual, *more, **named)
    return engine.norm(x, residual, weight, self.variance_epsilon, gemma=gemma, numerics="flashinfer")
