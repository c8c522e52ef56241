"""Warm calls in tests: how often one is planned again. `kind`, in conftest.py, is the guard that looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashnorm.core.op import Op


def planned(call: Callable[[], Any]) -> int:
    """How often a call leaves the warm path, whatever the operator behind it."""
    times = []
    plain = Op._execute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "_execute", lambda *a: (times.append(1), plain(*a))[1])
        call()
    return len(times)
