"""Strides, as pure arithmetic: how the row grids of several tensors collapse, what overlaps what.

Nothing here touches a tensor's data; everything works on sizes, strides and byte addresses, so that
it is testable for shapes that no machine could hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Ints = tuple[int, ...]

GROUP = 8  # elements of one group of the canonical sum, and the widest access
ACCESS_BYTES = 16
MAX_STEPS = 20_000  # of the overlap search; past it two tensors count as overlapping


@dataclass(frozen=True)
class Span:
    """A strided block of memory: rows of `run` contiguous bytes, laid out over outer dimensions."""

    address: int
    run: int
    sizes: Ints
    strides: Ints  # bytes

    @property
    def low(self) -> int:
        return self.address + sum(min(0, (n - 1) * s) for n, s in zip(self.sizes, self.strides, strict=True))

    @property
    def high(self) -> int:
        return self.address + sum(max(0, (n - 1) * s) for n, s in zip(self.sizes, self.strides, strict=True)) + self.run


def extent(sizes: Ints, strides: Ints, itemsize: int) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    return (sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1) * itemsize


def span(address: int, sizes: Ints, strides: Ints, itemsize: int) -> Span:
    """The memory of a tensor; a last dimension that is not contiguous counts as one more outer one."""
    if sizes and (strides[-1] == 1 or sizes[-1] == 1):
        return Span(address, sizes[-1] * itemsize, sizes[:-1], tuple(s * itemsize for s in strides[:-1]))
    return Span(address, itemsize, sizes, tuple(s * itemsize for s in strides))


def collapse(sizes: Ints, strides: Sequence[Ints]) -> tuple[Ints, list[Ints]]:
    """Merges neighbouring dimensions that every one of several tensors walks with one stride.

    Args:
        sizes: the common outer sizes.
        strides: for each tensor, its strides over those sizes.

    Returns:
        The fewest sizes that serve all the tensors, and the strides of each over them. Dimensions of
        size 1 vanish, whatever their stride.
    """
    keep = [i for i, n in enumerate(sizes) if n != 1]
    out_sizes: list[int] = []
    out_strides: list[list[int]] = [[] for _ in strides]
    for i in keep:
        mergeable = bool(out_sizes) and all(o[-1] == s[i] * sizes[i] for o, s in zip(out_strides, strides, strict=True))
        if mergeable:
            out_sizes[-1] *= sizes[i]
            for o, s in zip(out_strides, strides, strict=True):
                o[-1] = s[i]
        else:
            out_sizes.append(sizes[i])
            for o, s in zip(out_strides, strides, strict=True):
                o.append(s[i])
    return tuple(out_sizes), [tuple(o) for o in out_strides]


def self_overlaps(sizes: Ints, strides: Ints) -> bool:
    """Whether two index tuples may share an element (sufficient condition: sorted strides nest)."""
    reach = 0
    for stride, size in sorted((abs(s), n) for n, s in zip(sizes, strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def overlaps(a: Span, b: Span) -> bool:
    """Whether two blocks share a byte. Exact, but for layouts so tangled that the search gives up (then True)."""
    if a.low >= b.high or b.low >= a.high:
        return False
    # A byte is shared iff  -a.run < (a.address - b.address) + sum(i*sa) - sum(j*sb) < b.run  has a solution.
    # Steps of one size go together (i - j is one number), and the largest come first: what is left reaches so far.
    reach: dict[int, list[int]] = {}
    for strides, sizes, sign in ((a.strides, a.sizes, 1), (b.strides, b.sizes, -1)):
        for stride, size in zip(strides, sizes, strict=True):
            if size > 1 and stride:
                ends = reach.setdefault(abs(stride), [0, 0])
                ends[0 if (stride < 0) == (sign > 0) else 1] += size - 1
    steps_of = sorted(reach.items(), reverse=True)  # (step, [how far down, how far up])
    low_after, high_after = [0], [0]
    for step, (down, up) in reversed(steps_of):
        low_after.append(low_after[-1] - step * down)
        high_after.append(high_after[-1] + step * up)
    low_after.reverse()
    high_after.reverse()
    tried = 0

    def search(k: int, offset: int) -> bool:
        nonlocal tried
        tried += 1
        if tried > MAX_STEPS:
            return True
        if k == len(steps_of):
            return -a.run < offset < b.run
        step, (down, up) = steps_of[k]
        # offset + i * step + [low, high] must meet (-a.run, b.run)
        first = max(-down, -((a.run - 1 + high_after[k + 1] + offset) // step))
        last = min(up, (b.run - 1 - low_after[k + 1] - offset) // step)
        return any(search(k + 1, offset + i * step) for i in range(first, last + 1))

    return search(0, a.address - b.address)


def access_width(hidden_size: int, operands: Sequence[tuple[int, int, Ints]]) -> int:
    """Elements that every operand can be accessed by at once: 8, 4, 2 or 1.

    Args:
        hidden_size: H.
        operands: (low bits of the address, itemsize, outer strides in elements) of each row or vector.
    """
    vec = GROUP
    while vec > 1:
        fits = hidden_size % vec == 0 and all(
            address % min(ACCESS_BYTES, vec * itemsize) == 0 and all(s % vec == 0 for s in strides)
            for address, itemsize, strides in operands
        )
        if fits:
            break
        vec //= 2
    return vec
