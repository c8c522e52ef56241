"""From the words of the command line to kernels and back: `flashnorm precompile --ops ... --dtype ... --hidden ...`."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from flashnorm.core import layout
from flashnorm.program import Variant
from flashnorm.recipe import Kernel, to_json

if TYPE_CHECKING:
    from flashnorm.core.op import Op

GRADIENT_MODES = ("flashinfer", "hf-llama")  # of the forward: those that a gradient tells apart
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INDICES = ("int32", "int64")  # of rows that are picked, and of positions


def operators() -> dict[str, Op]:
    """Every operator by name: the public ones, those that stand behind them, and their gradients."""
    from flashnorm.core.op import ALL, BACKWARD

    return ALL | BACKWARD


def values_of(op: Op, option: str) -> dict[str, Any]:
    """What a command line may say of an option, with what each word stands for; the first is that of a plain call."""
    values = op.options[option]
    words = values.words() if hasattr(values, "words") else {str(word): word for word in values}
    return {word: values[key] for word, key in words.items()}


def plain_variant(
    op: Op, dtype: torch.dtype, hidden_size: int, options: dict[str, Any], index: str = INDICES[0]
) -> Variant:
    """The variant of a plain call: contiguous rows, one dtype, one weight vector, scales as numbers.

    Options that are not given have their first value, and so has a dtype that is not the caller's to choose.
    """
    options = {**{key: next(iter(values.values())) for key, values in op.options.items()}, **options}
    left_out = {o.name for o in op.operands if o.name in op.by_value or (o.name in op.optional and o.mode == "out")}
    left_out -= set(op.plainly)
    left_out.add("input_scale")  # rows are of the given dtype, not int8
    program = op.program(frozenset(o.name for o in op.operands) - left_out, options)
    plain = str(dtype).removeprefix("torch.")
    if plain not in program.operands()[0].dtypes:
        plain = program.operands()[0].dtypes[0]
    wanted = (plain, index)
    dtypes = tuple(o.carried(next((d for d in wanted if d in o.dtypes), o.dtypes[0])) for o in program.operands())
    return Variant(program, dtypes, hidden_size, vec=layout.access_width(hidden_size, [(0, 1, (hidden_size,))]))


def modes(op: Op) -> Iterator[str]:
    """The numerics of an operator, each once, by its first name."""
    named: dict[Any, str] = {}
    for name, value in op.options.get("numerics", {}).items():
        named.setdefault(value, name)
    yield from named.values()


def command(op: Op, route: str, target: str, variant: Variant) -> str:
    """The command that precompiles a variant: flags where they can say it, else a recipe on standard input."""
    shown = next((name for name, dtype in DTYPES.items() if str(dtype) == f"torch.{variant.dtypes[0]}"), "")
    routes = "" if target == "host" else f" --routes {route}"
    for mode, form, index in _forms(op) if shown else ():
        chosen = {key: values_of(op, key)[word] for key, word in form.items()}
        with contextlib.suppress(ValueError):  # options that do not go together
            plain = plain_variant(op, DTYPES[shown], variant.hidden_size, {"numerics": mode, **chosen}, index)
            if plain == variant if route == "cute" else _code(plain) == _code(variant):
                what = f"--ops {op.name} --dtype {shown} --hidden {variant.hidden_size} --numerics {mode}"
                what += "".join(f" --option {key}={word}" for key, word in form.items())
                what += f" --index {index}" if index != INDICES[0] else ""
                return f"flashnorm precompile --arch {target}{routes} {what} --out DIR"
    text = json.dumps(json.loads(to_json([Kernel(op.name, route, target, variant)])))
    return f"echo {shlex.quote(text)} | flashnorm precompile --recipe - --out DIR"


def _forms(op: Op) -> Iterator[tuple[str, dict[str, str], str]]:
    """(numerics, other options that are not the first, dtype of indices): all that flags can say, plain calls first."""
    keys = [key for key in op.options if key != "numerics"]
    words = [list(values_of(op, key)) for key in keys]
    indices = INDICES if any(set(o.dtypes) == set(INDICES) for o in op.operands) else INDICES[:1]
    for index in indices:
        for chosen in itertools.product(*words):
            form = {key: word for key, of, word in zip(keys, words, chosen, strict=True) if word != of[0]}
            for mode in tuple(modes(op)) or GRADIENT_MODES:
                yield mode, form, index


def _code(variant: Variant) -> tuple[Any, ...]:
    """What the C++ routes compile for; the rest is known when a kernel runs."""
    return variant.program.code(), variant.dtypes
