"""Norms as modules, with the arguments that Liger-Kernel's users know, and its configurations for model families.

Every module trains and serves with the same kernels. Parameters have the names and shapes of the usual ones, so that
state dicts fit; a parameter may be a DTensor.
"""

from flashnorm.nn.families import (
    RMSNormForGemma,
    RMSNormForGemma2,
    RMSNormForGemma3,
    RMSNormForGemma4,
    RMSNormForGlm4,
    RMSNormForMuseGlimmer,
    RMSNormForMuseGlimmerTextCentered,
    RMSNormForOlmo2,
    RMSNormForQwen3Next,
)
from flashnorm.nn.modules import FusedAddRMSNorm, LayerNorm, RMSNorm, RMSNormFunction

__all__ = [
    "FusedAddRMSNorm",
    "LayerNorm",
    "RMSNorm",
    "RMSNormForGemma",
    "RMSNormForGemma2",
    "RMSNormForGemma3",
    "RMSNormForGemma4",
    "RMSNormForGlm4",
    "RMSNormForMuseGlimmer",
    "RMSNormForMuseGlimmerTextCentered",
    "RMSNormForOlmo2",
    "RMSNormForQwen3Next",
    "RMSNormFunction",
]
