"""The launch plans of any variant."""

from __future__ import annotations

from typing import Any

from flashnorm.kernels import plans, stream_plans
from flashnorm.program import BackwardProgram, Variant


def plans_for(variant: Variant, arch: str) -> tuple[tuple[int | None, Any], ...]:
    """(largest M, tile) for every class of M; the last one serves every larger M."""
    if isinstance(variant.program, BackwardProgram):
        return stream_plans.plans_for(variant, arch)
    return plans.plans_for(variant, arch)
