"""Backends: each turns a variant into a loaded kernel. One contract, `build(variant, target) -> launch`.

`launch(*scalars, enable_pdl, *operands)` takes the operands of `variant.program.operands()` in that order,
normalised as `flashnorm.program.Variant` says, and runs on their device and its current stream.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from flashnorm.program import Variant

if TYPE_CHECKING:
    from flashnorm.jit import ArtifactSpec


def builder(route: str) -> Callable[[Variant, str], Callable[..., Any]]:
    """The build function of a route; imported on first use, since a route may bring a compiler along."""
    return importlib.import_module(f"flashnorm.backends.{route}").build


def artifact(route: str, variant: Variant, target: str) -> ArtifactSpec:
    """The artefact that a route's build function loads for a variant."""
    module = importlib.import_module(f"flashnorm.backends.{route}")
    if route == "cute":
        return cast("ArtifactSpec", module.spec(variant, target))
    where = () if route == "cpu" else (target,)
    return cast("ArtifactSpec", module.spec(variant.program, variant.dtypes, *where))
