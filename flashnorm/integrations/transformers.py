"""flashnorm in Hugging Face models: `patch(model)` runs a model's RMSNorm and LayerNorm modules on its kernels.

    from flashnorm.integrations.transformers import patch, unpatch

    patch(model)
    model(**batch).loss.backward()
    with torch.no_grad():
        model.generate(...)
    unpatch(model)

Only the way a module computes changes: its class, name, parameters, buffers, hooks and state dict are
what they were, and it pickles and copies (the copy is patched too, and its own). Results round at the
same places as the original's; sums are taken in flashnorm's own fixed order, so their last bit may
differ (the contract's section on numerics bounds by how much).

A call that the kernels do not serve runs the original forward, compiled or not, so nothing is lost, and what raises is
the original's own error:
- a `torch.func` transform or forward-mode differentiation is active;
- a tensor subclass (DTensor, jagged tensors, fake tensors), a nested or sparse tensor, a dtype other than fp32, fp16
  and bf16, or a weight in another dtype than the input where the original would return the wider one;
- an input whose last dimension is not the weight's, or is beyond 262,144; an eps that is negative, not finite, or
  no number;
- a LayerNorm under autocast, which wants it in fp32.

transformers itself is not imported: RMSNorm modules are known by their class name and attributes, LayerNorm ones by
being `torch.nn.LayerNorm` (BERT and its kin, GPT-2, OPT, Phi, Falcon, ViT, Whisper).
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import flashnorm
from flashnorm.core.op import NUMERICS
from flashnorm.integrations import engine


class Family(NamedTuple):
    """How a class of modules computes: its numerics, and the public function."""

    numerics: str
    op: str


_LLAMA = Family("hf-llama", "rmsnorm")  # weight * norm.to(dtype)
_OLMO = Family("hf-gemma", "rmsnorm")  # (weight * norm).to(dtype)
_GEMMA = Family("hf-gemma", "gemma_rmsnorm")  # (norm * (1 + weight)).to(dtype)
_LAYER = Family("torch", "layernorm")

# By exact class name: subclasses and similar names exist that compute something else.
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            "LlamaRMSNorm",
            "MistralRMSNorm",
            "MixtralRMSNorm",
            "Qwen2RMSNorm",
            "Qwen2MoeRMSNorm",
            "Qwen3RMSNorm",
            "Qwen3MoeRMSNorm",
            "Phi3RMSNorm",
            "GraniteRMSNorm",
            "DeepseekV2RMSNorm",
            "DeepseekV3RMSNorm",
            "SmolLM3RMSNorm",
            "GlmRMSNorm",
            "Glm4RMSNorm",
            "Glm4MoeRMSNorm",
            "SeedOssRMSNorm",
        ),
        _LLAMA,
    ),
    **dict.fromkeys(("Olmo2RMSNorm", "Olmo3RMSNorm", "GptOssRMSNorm"), _OLMO),
    **dict.fromkeys(("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "Qwen3NextRMSNorm"), _GEMMA),
}


class _Forward:
    """The `forward` of one patched module.

    An object and not a bound method: copy and pickle then go through its attributes, so that a copied
    module gets a forward bound to the copy. `replaced` is what an unpatch puts back; None where the module
    had no forward of its own, and its class's was used.
    """

    def __init__(self, module: nn.Module, family: Family, replaced: Any) -> None:
        self.module = module
        self.family = family
        self.replaced = replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, (numerics, op) = self.module, self.family
        weight: Any = module.weight
        given: tuple[Any, ...] = (weight,)
        shape = getattr(weight, "shape", None)
        if op == "layernorm":
            given, shape = (weight, module.bias), module.normalized_shape
        eps = _eps(module)
        # Families name their parameter differently: a keyword is the original's business.
        if len(args) != 1 or kwargs or not _serves(args[0], given, shape, eps, op):
            original: Any = type(module).forward
            return original(module, *args, **kwargs)
        return getattr(flashnorm, op)(args[0], *given, float(eps), numerics=numerics)

    # `torch.export` without Dynamo looks at the forward of the root as at a function, and names inputs by it.
    @property
    def __code__(self) -> Any:
        return type(self.module).forward.__code__

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))


def patch(model: nn.Module, *, numerics: str | None = None) -> int:
    """Replaces the forward of every known RMSNorm and LayerNorm module in `model` (itself included).

    Patching again is harmless, and changes the numerics. Modules that accelerate has hooked keep their
    hooks. Patch before `torch.compile`.

    Args:
        model: a Hugging Face model (Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-Next, Phi-3, Granite, DeepSeek-V2
            and -V3, SmolLM3, GLM-4, Seed-OSS, OLMo2, OLMo3, GPT-OSS, Gemma 1 to 3, and those built on
            `torch.nn.LayerNorm`), or one of its parts.
        numerics: one mode for all modules, instead of their family's own.

    Returns:
        The number of modules patched.

    Raises:
        TypeError: `model` is no `nn.Module`.
        ValueError: no module is known; one has a forward that something else has replaced; `numerics` is
            unknown. Nothing is patched then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if numerics is not None and numerics not in NUMERICS:
        raise ValueError(f"numerics: got {numerics!r}, accepted are {', '.join(map(repr, NUMERICS))} and None")
    found = [(name, module) for name, module in model.named_modules() if _family(module) is not None]
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no RMSNorm module that flashnorm knows; known are "
            f"{', '.join(sorted(FAMILIES))}, with a one-dimensional weight, and torch.nn.LayerNorm over one dimension"
        )
    for name, module in found:
        own = module.__dict__.get(_slot(module))
        if not (own is None or isinstance(own, _Forward) or _bound_original(own, module)):
            raise ValueError(
                f"model: the forward of {name or 'the module itself'} ({type(module).__name__}) has been replaced "
                f"by {own!r}; undo that first"
            )
    for _, module in found:
        slot = _slot(module)
        own = module.__dict__.get(slot)
        family = _family(module)
        assert family is not None
        if numerics is not None:
            family = family._replace(numerics=numerics)
        replaced = own.replaced if isinstance(own, _Forward) else own
        setattr(module, slot, _Forward(module, family, replaced))
    return len(found)


def unpatch(model: nn.Module) -> int:
    """Undoes `patch`: every module is what it was before, to its last attribute.

    Returns:
        The number of modules restored; 0 where none was patched.

    Raises:
        TypeError: `model` is no `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    restored = 0
    for module in model.modules():
        # Both, because accelerate moves a forward between them when its hooks come and go.
        for slot in ("forward", "_old_forward"):
            own = module.__dict__.get(slot)
            if not isinstance(own, _Forward):
                continue
            if own.replaced is not None:
                setattr(module, slot, own.replaced)
            elif slot == "forward":
                del module.forward
            else:
                module._old_forward = type(module).forward.__get__(module)
            restored += 1
    return restored


def _family(module: nn.Module) -> Family | None:
    """How a module computes; None where it is not known."""
    if type(module) is nn.LayerNorm:
        return _LAYER if len(module.normalized_shape) == 1 else None
    weight = getattr(module, "weight", None)
    known = isinstance(weight, Tensor) and weight.dim() == 1
    if not known or not (hasattr(module, "variance_epsilon") or hasattr(module, "eps")):
        return None
    return FAMILIES.get(type(module).__name__)


def _eps(module: nn.Module) -> Any:
    """Read at every call, as the original does."""
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def _slot(module: nn.Module) -> str:
    """Where the computing forward is kept: accelerate's hooked modules call `_old_forward` from their own."""
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def _bound_original(function: Any, module: nn.Module) -> bool:
    """Whether an instance's own forward is just its class's (what accelerate leaves behind)."""
    return getattr(function, "__self__", None) is module and getattr(function, "__func__", None) is type(module).forward


def _serves(x: Any, given: tuple[Any, ...], shape: Any, eps: Any, op: str) -> bool:
    """Whether a kernel may take this call: the same result, and no transform to lose."""
    if not engine.fits(x, given, eps, any_dtype=op == "gemma_rmsnorm") or x.shape[-1:] != shape:
        return False
    return op != "layernorm" or not _autocast(x.device.type)


def _autocast(device: str) -> bool:
    # A device without autocast (meta) must not be asked whether it is on.
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
