"""Functions that return new tensors."""

from flashnorm.ops.gated import rmsnorm_gate

__all__ = ["rmsnorm_gate"]
