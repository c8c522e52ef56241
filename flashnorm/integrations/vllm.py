"""flashnorm in vLLM: a general plugin, found by its entry point, that registers RMSNorm and GemmaRMSNorm out of tree.

Installing flashnorm beside vLLM is all; `VLLM_PLUGINS` chooses among plugins. vLLM makes an instance of the registered
class wherever a model asks for its own, so checkpoints load as before. Results round where vLLM's kernels do
(`numerics="vllm"`), with flashnorm's sums: the same bits whatever else is in the batch.

vLLM asks for custom operators only where they are switched on: with its Inductor backend they are off by default, and
the layer's plain PyTorch form is compiled instead. `--compilation-config '{"custom_ops": ["+rms_norm"]}'` brings them
in.

Written against vLLM's public interface (`CustomOp.register_oot`, `CustomOp.forward_cuda`, `RMSNorm(hidden_size, eps,
var_hidden_size, has_weight, dtype)`) and tested against a stand-in of that shape. It has NOT been run inside vLLM, on
any version; what vLLM's compiler passes do with these operators is not known.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from flashnorm.integrations import engine

log = logging.getLogger("flashnorm")

NUMERICS = {"RMSNorm": "vllm", "GemmaRMSNorm": "hf-gemma"}


def register() -> None:
    """The entry point. Harmless where vLLM has no such layers, and where another plugin was first: one log line."""
    try:
        layers = importlib.import_module("vllm.model_executor.layers.layernorm")
        custom_op = importlib.import_module("vllm.model_executor.custom_op")
    except ImportError as error:
        log.warning("vLLM's norms are not where they were expected, flashnorm leaves them alone: %s", error)
        return
    for name in NUMERICS:
        layer = getattr(layers, name, None)
        if layer is None or not hasattr(layer, "register_oot"):
            log.warning("vLLM's %s cannot be registered out of tree, flashnorm leaves it alone", name)
            continue
        there = _registry(custom_op, layer).get(name)
        if there is not None:
            if not getattr(there, "_flashnorm", False):
                log.warning("%s serves vLLM's %s already, flashnorm leaves it alone", there.__qualname__, name)
            continue
        known_as = getattr(layer, "name", name)
        ours = layer.register_oot(_subclass(layer, name))
        # Registering renames it. "+rms_norm" and "-rms_norm" go on meaning what they mean.
        ours.name = known_as
        log.info("vLLM's %s runs on flashnorm", name)


def _registry(custom_op: Any, layer: Any) -> Any:
    """What is registered out of tree: of the module today, of the class before."""
    return getattr(custom_op, "op_registry_oot", None) or getattr(layer, "op_registry_oot", {})


def _subclass(layer: Any, name: str) -> Any:
    """vLLM's own layer with another forward; all else is inherited."""
    gemma, numerics = name == "GemmaRMSNorm", NUMERICS[name]

    def forward(self: Any, original: Any, x: Any, residual: Any, more: tuple[Any, ...], named: dict[str, Any]) -> Any:
        weight = self.weight.data if getattr(self, "has_weight", True) else None
        plain = getattr(self, "variance_size_override", None) is None and not more and not named
        if not plain or not engine.serves(x, residual, weight, self.variance_epsilon, gemma=gemma):
            return original(self, x, residual, *more, **named)
        return engine.norm(x, residual, weight, self.variance_epsilon, gemma=gemma, numerics=numerics)

    def forward_cuda(self: Any, x: Any, residual: Any = None, *more: Any, **named: Any) -> Any:
        return forward(self, layer.forward_cuda, x, residual, more, named)

    def forward_cpu(self: Any, x: Any, residual: Any = None, *more: Any, **named: Any) -> Any:
        return forward(self, layer.forward_cpu, x, residual, more, named)

    members = {"forward_cuda": forward_cuda, "forward_cpu": forward_cpu, "_flashnorm": True, "__doc__": __doc__}
    return type(f"Flashnorm{name}", (layer,), members)
