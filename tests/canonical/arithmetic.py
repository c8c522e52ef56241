"""The fp32 operations and the one sum: everything else of the model is made of these.

* `+`, `-`, `*`, `/` and `sqrt` on float32 arrays are IEEE operations in NumPy (no contraction,
  since every call is a loop of its own).
* `fma` is not in NumPy. The product of two fp32 numbers has at most 48 significant bits, so it is
  exact in fp64. TwoSum gives the fp64 sum with the third operand *and* its exact error; the sum is
  then rounded to odd (if it was inexact, the neighbour with an odd last bit is taken). A number
  rounded to odd with two or more spare bits rounds to the same fp32 value as the exact one, and
  fp64 has 29 spare bits, more where the result is subnormal. Rounding twice to nearest would not do.
* Casts to 16 bits are nearest even on the integer representation (bfloat16) or NumPy's own cast
  (float16, which is nearest even with subnormals).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

F32 = npt.NDArray[np.float32]

GROUP = 8
MAX_LANES = 1024
BLOCK = 32


def widen(tensor: torch.Tensor) -> F32:
    """The fp32 value of every element, exact; any strides."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        raw = tensor.view(torch.int16).numpy().astype(np.uint16).astype(np.uint32)
        return (raw << np.uint32(16)).view(np.float32)
    if tensor.dtype == torch.float16:
        return tensor.numpy().astype(np.float32)
    assert tensor.dtype == torch.float32, tensor.dtype
    return tensor.numpy()


def narrow(values: F32, dtype: torch.dtype) -> torch.Tensor:
    """One rounding from fp32 to `dtype`, nearest even; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == torch.bfloat16:
        raw = values.view(np.uint32)
        rounded = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        rounded = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
        return torch.from_numpy(rounded.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return torch.from_numpy(values.astype(np.float16))
    assert dtype == torch.float32, dtype
    return torch.from_numpy(values.copy())


def fma(a: F32, b: F32, c: F32) -> F32:
    """round(a * b + c) in fp32, one rounding, elementwise."""
    with np.errstate(all="ignore"):
        product = a.astype(np.float64) * b.astype(np.float64)
        addend = c.astype(np.float64)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        raw = total.view(np.int64)
        inexact_even = (error != 0) & ((raw & 1) == 0) & np.isfinite(total)
        # One step of the representation: away from zero where the error has the sum's sign.
        step = np.where((error > 0) == (total > 0), 1, -1)
        odd = np.where(inexact_even, raw + step, raw).view(np.float64)
        return odd.astype(np.float32)


def canonical_sum(a: F32, b: F32 | None = None) -> F32:
    """The sum over the last axis of `a` (or of the products a * b) in the one order there is."""
    h = a.shape[-1]
    rows = a.shape[:-1]
    groups = -(-h // GROUP)
    lanes = 1
    while lanes < min(groups, MAX_LANES):
        lanes *= 2
    turns = -(-groups // lanes)

    def spread(values: F32) -> F32:
        padded = np.zeros((*rows, turns * lanes * GROUP), np.float32)
        padded[..., :h] = values
        return padded.reshape(*rows, turns, lanes, GROUP)

    left = spread(a)
    right = None if b is None else spread(b)
    with np.errstate(all="ignore"):
        acc = left[..., 0, :, :] if right is None else left[..., 0, :, :] * right[..., 0, :, :]
        for turn in range(1, turns):
            term = left[..., turn, :, :]
            acc = acc + term if right is None else fma(term, right[..., turn, :, :], acc)
        p = [acc[..., i] for i in range(GROUP)]
        lane = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))
        width = min(lanes, BLOCK)
        lane = lane.reshape(*rows, lanes // width, width)
        half = width // 2
        while half:
            lane = lane[..., :half] + lane[..., half : 2 * half]
            half //= 2
        blocks = lane[..., 0]
        half = blocks.shape[-1] // 2
        while half:
            blocks = blocks[..., :half] + blocks[..., half : 2 * half]
            half //= 2
        return blocks[..., 0]


# exp: a polynomial in the fraction of t / log(2), and its whole part as an exponent
_LOG2E = np.float32(float.fromhex("0x1.715476p+0")), np.float32(float.fromhex("0x1.4ae0cp-26"))
_EXP2 = [
    np.float32(float.fromhex(text))
    for text in ("0x1.41fb2ep-13", "0x1.5f3f3p-10", "0x1.3b2d5p-7", "0x1.c6aee6p-5", "0x1.ebfbdcp-3", "0x1.62e43p-1")
]


def exp(t: F32) -> F32:
    """e^t by the operations that every route shares."""

    def like(value: np.float32) -> F32:
        return np.full(t.shape, value, np.float32)

    with np.errstate(all="ignore"):
        x = np.maximum(t, np.float32(-87))  # keeps a NaN
        shift = like(np.float32(12582912))  # beside it, fp32 has no fractions: adding it rounds
        whole = fma(x, like(_LOG2E[0]), shift) - shift
        part = fma(x, like(_LOG2E[0]), -whole)
        part = fma(x, like(_LOG2E[1]), part)
        p = like(_EXP2[0])
        for factor in (*_EXP2[1:], np.float32(1)):
            p = fma(p, part, like(factor))
        power = np.ldexp(p.astype(np.float64), np.nan_to_num(whole).astype(np.int32)).astype(np.float32)
    return np.where(t > np.float32(88.5), np.float32(np.inf), power)


def silu(y: F32) -> F32:
    """y / (1 + exp(-y))."""
    with np.errstate(all="ignore"):
        return y / (np.float32(1) + exp(-y))
