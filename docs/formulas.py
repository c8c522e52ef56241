"""Formulas of docstrings, which are written for readers of the source, as Markdown's: `.. math::` becomes `$$`."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_INLINE = re.compile(r":math:`([^`]+)`")
_BLOCK = re.compile(r"^( *)\.\. math::(?: (.*))?\n((?:\1 +.*\n|\s*\n)*)", re.MULTILINE)


def to_markdown(text: str) -> str:
    """A docstring with its formulas between dollars."""

    def block(found: re.Match[str]) -> str:
        inside = [found[2] or "", textwrap.dedent(found[3]).strip()]
        formula = " ".join(" ".join(part.split()) for part in inside if part)
        return f"{found[1]}$$\n{found[1]}{formula}\n{found[1]}$$\n\n"

    return _INLINE.sub(r"$\1$", _BLOCK.sub(block, text + "\n"))


class Formulas(griffe.Extension):
    """Rewrites every docstring as it is loaded."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if getattr(obj, "docstring", None) is not None and "math:" in obj.docstring.value:
            obj.docstring.value = to_markdown(obj.docstring.value)
