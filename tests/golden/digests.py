"""Golden bits: problems whose values are made from integers alone, and the digests of what they must leave.

The files beside this one hold the digests, a file for each family of operators.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from tests import gatecombos
from tests.canonical import Bits, narrow
from tests.combos import COMBOS, DTYPES, RMSNORMS, Combo, some_hidden
from tests.gatecombos import GateCombo
from tests.gatekit import GateProblem
from tests.problem import Problem
from tests.tolerance import bits_of

FOLDER = Path(__file__).parent
POOL = 5  # rows that an index picks from


def family(combo: Combo | GateCombo) -> str:
    """The file that holds a combination."""
    if isinstance(combo, GateCombo):
        return "gates"
    if combo in RMSNORMS:
        return "rmsnorm"
    if combo.once:
        return "scaled"
    if combo.index is not None or combo.x == "i8":
        return "rows"
    return "quant" if combo.makes_codes else "layernorm"


def integers(count: int, seed: int) -> np.ndarray:
    """The same 32-bit numbers everywhere: a multiply-and-shift mix of the index, in integers alone."""
    value = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        seed * 0x632BE59BD9B4E019 % 2**64
    )
    value ^= value >> np.uint64(29)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    return value >> np.uint64(32)


def golden_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values that every dtype holds exactly: 8 significant bits (fp32: 22) times a power of two from 1/16 to 16.

    In int8 every value.
    """
    raw = integers(int(np.prod(shape)), seed)
    if dtype == torch.int8:
        return torch.from_numpy((raw & np.uint64(0xFF)).astype(np.uint8).view(np.int8).reshape(shape))
    bits = 22 if dtype == torch.float32 else 8
    mantissa = (raw & np.uint64(2**bits - 1)).astype(np.float64) - 2.0 ** (bits - 1) + 0.5
    mantissa = np.where(mantissa > 0, np.ceil(mantissa), np.floor(mantissa))  # no zeros
    power = ((raw >> np.uint64(24)) % np.uint64(9)).astype(np.float64) - 4
    values = (mantissa * np.exp2(power - (bits - 2))).astype(np.float32).reshape(shape)
    tensor = narrow(values, dtype)
    assert bool((tensor.double() == torch.from_numpy(values).double()).all())
    return tensor


def golden_shapes(combo: Combo) -> tuple[tuple[int, int], ...]:
    """4096 and one of the others by turns; where a file would grow, the other alone."""
    other = some_hidden(combo)[0]
    spare = 2048 if combo.whole > 1 else 2000
    rest = (3 if other < 8192 else 1, other if other != 4096 else spare)
    return ((5, 4096), rest) if combo in RMSNORMS else (rest,)


def golden_problem(combo: Combo, shape: tuple[int, int], device: torch.device | str) -> Problem:
    def values(dtype: str | None, of: tuple[int, ...], seed: int) -> torch.Tensor | None:
        return None if dtype is None else golden_values(of, DTYPES[dtype], seed)

    index = input_scale = None
    pool = shape if combo.index is None else (POOL, shape[-1])
    if combo.index is not None:
        chosen = integers(shape[0], 5) % np.uint64(POOL)
        index = torch.from_numpy(chosen.astype(np.int64)).to(DTYPES[combo.index])
    if combo.input_scale is not None:
        input_scale = golden_values((pool[0], 1) if combo.input_scale == "rows" else (1,), torch.float32, 6).abs()
    return Problem(
        combo,
        shape,
        device,
        x=values(combo.x, pool, 1),
        residual=values(combo.residual, shape, 2),
        weight=values(combo.weight, shape[-1:], 3),
        bias=values(combo.bias, shape[-1:], 4),
        index=index,
        input_scale=input_scale,
        eps=1e-5,
    )


def gate_problem(combo: GateCombo, device: torch.device | str) -> GateProblem:
    """Of an operator with gates: 1000 to 4096 wide by turns, one of them streamed."""
    turn = gatecombos.COMBOS.index(combo)
    shape = gatecombos.of_shape(combo, *((6, 1000), (4, 4096), (2, 2000), (1, 24576))[turn % 4])
    like = GateProblem(combo, shape)
    values = {name: golden_values(tuple(t.shape), t.dtype, 10 + i) for i, (name, t) in enumerate(like.tensors.items())}
    return GateProblem(combo, shape, device, eps=1e-5, given=values)


def golden_problems() -> list[Problem | GateProblem]:
    found: list[Problem | GateProblem] = []
    found += [golden_problem(combo, shape, "cpu") for combo in COMBOS for shape in golden_shapes(combo)]
    return found + [gate_problem(combo, "cpu") for combo in gatecombos.COMBOS]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bits_of(tensor).numpy().tobytes()).hexdigest()


def golden_digests(got: Bits | dict[str, torch.Tensor], combo: Combo | GateCombo) -> dict[str, str]:
    """A digest of everything that a call of the combination leaves."""
    if isinstance(got, dict):
        return {name: digest(tensor) for name, tensor in got.items()}
    assert isinstance(combo, Combo)
    there = {"out": True, "residual": combo.residual is not None, "rstd": combo.rstd}
    there |= {"scale": combo.makes_scales, "normed_out": combo.side}
    found = {}
    for field in fields(Bits):
        if there[field.name]:
            tensor = getattr(got, field.name)
            assert tensor is not None
            found[field.name] = digest(tensor)
    return found


def golden_file() -> dict[str, dict[str, str]]:
    """What all the files hold."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(FOLDER.glob("*.json")):
        found |= json.loads(path.read_text())
    return found
