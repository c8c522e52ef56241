"""Buffers that are watched: every tensor a test hands over lies inside a larger one.

What surrounds it, and the gaps of a strided layout, hold a signalling-NaN pattern (for integers: a value that means
nothing): a kernel that reads there spoils its result, and one that writes there is caught when the buffer is compared
afterwards. Outputs are poisoned, so a stale element cannot pass for a result.
"""

from __future__ import annotations

import torch

from tests.tolerance import bits_of

_INT = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
# NaNs that no arithmetic produces: quiet bit clear, low bits set; integers far from any index, code or scale.
_GUARD = {
    torch.float32: 0x7FA5A5A5,
    torch.float16: 0x7DA5,
    torch.bfloat16: 0x7FA5,
    torch.float8_e4m3fn: -1,
    torch.float8_e5m2: -1,
    torch.int8: -128,
    torch.uint8: 0x5A,
    torch.int32: 0x7FA5A5A5,
    torch.int64: 0x7FA5A5A57FA5A5A5,
}
# What outputs hold before: a NaN; 0xFF or -128, codes that no store makes; bytes of 0x7F where scales go.
_POISON = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}
_POISON |= {torch.float8_e4m3fn: -1, torch.float8_e5m2: -1, torch.int8: -128}
STALE_SCALES = {torch.float32: 0x7F7F7F7F, torch.int32: 0x7F7F7F7F, torch.uint8: 0x7F}
_EDGE = 64  # elements at least before and after, a multiple of every alignment


Strides = tuple[list[int], int]  # strides and the offset of the first element, in elements


def _dense(shape: tuple[int, ...], last: int = 1) -> list[int]:
    strides = [last] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides


def place(shape: tuple[int, ...], layout: str) -> Strides:
    """Where the elements of a tensor lie.

    `contiguous`; `misaligned` by one element; `half` and `other half` of rows twice as long; `odd rows` one element
    apart; `heads` of a wider projection; `transposed` outer dimensions; `every other` row; `expanded` along the
    outer dimensions (inputs only); `last 2`, a last stride of 2.
    """
    h = shape[-1] if shape else 1
    dense = _dense(shape)
    if layout == "contiguous":
        return dense, 0
    if layout == "misaligned":
        return dense, 1
    if layout in ("half", "other half"):
        return [s * 2 for s in dense[:-1]] + [1], h if layout == "other half" else 0
    if layout == "odd rows":
        return _dense((*shape[:-1], h + 1)), 0
    if layout == "heads":  # (B, N, H) of rows that hold N + 3 heads
        wider = _dense((*shape[:-2], shape[-2] + 3, h))
        return wider, 2 * h
    if layout == "transposed":
        outer = list(range(len(shape) - 1))[::-1]
        inner = _dense((*(shape[i] for i in outer), h))
        strides = [0] * len(shape)
        for position, dim in enumerate([*outer, len(shape) - 1]):
            strides[dim] = inner[position]
        return strides, 0
    if layout == "every other":
        strides = _dense((*shape[:-2], shape[-2] * 2, h))
        strides[-2] *= 2
        return strides, h
    if layout == "expanded":
        return [0] * (len(shape) - 1) + [1], 0
    assert layout == "last 2", layout
    return _dense(shape, last=2), 0


def values_for(layout: str, values: torch.Tensor) -> torch.Tensor:
    """The values a layout can hold: an expanded tensor repeats its first row."""
    if layout != "expanded":
        return values
    return values[(0,) * (values.dim() - 1)].expand(values.shape)


class Guarded:
    """A tensor inside a buffer whose every other byte is watched.

    Args:
        values: what it holds, or None for a poisoned output of `shape` and `dtype`.
        device: where it lives.
        layout: one of `place`.
        written: whether the operator may write it.
        poison: the integer an output starts as, where it is no NaN.
    """

    def __init__(
        self,
        values: torch.Tensor | None,
        device: torch.device | str = "cpu",
        layout: str = "contiguous",
        *,
        written: bool = False,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        poison: int | None = None,
    ) -> None:
        if values is None:
            assert shape is not None and dtype is not None
            start = _POISON[dtype] if poison is None else poison
            values = torch.full(shape, start, dtype=_INT[dtype.itemsize]).view(dtype)
        values = values_for(layout, values)
        shape, dtype = tuple(values.shape), values.dtype
        strides, offset = place(shape, layout)
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) + 1
        edge = -(-max(_EDGE, shape[-1] if shape else 1) // _EDGE) * _EDGE
        size = 2 * edge + offset + reach
        raw = torch.full((size,), _GUARD[dtype], dtype=_INT[dtype.itemsize], device=device)
        where = (shape, strides, edge + offset)
        self.inside = torch.zeros(size, dtype=torch.bool, device=device)
        self.inside.as_strided(*where).fill_(True)
        self.storage = raw.view(dtype)
        # integers: a copy of floating-point NaNs need not keep their bits
        once = tuple(slice(0, 1) if s == 0 and n > 1 else slice(None) for n, s in zip(shape, strides, strict=True))
        raw.as_strided(*where)[once].copy_(bits_of(values).view(shape)[once].to(device))
        self.view = self.storage.as_strided(*where)
        self.before = raw.clone()
        self.written = written

    def check(self, what: str) -> None:
        """Nothing outside the tensor was written; nothing at all of an input."""
        changed = self.storage.view(self.before.dtype) != self.before
        outside = changed & ~self.inside
        assert not bool(outside.any()), f"{what}: {int(outside.sum())} elements outside the tensor were written"
        if not self.written:
            assert not bool(changed.any()), f"{what}: an input was written"

    def unchanged(self) -> bool:
        return bool((self.storage.view(self.before.dtype) == self.before).all())


# ------------------------------------------------------------------ where scales lie
def padded(count: int) -> int:
    """A multiple of 4: rows of scales in columns, columns of swizzled ones."""
    return -(-count // 4) * 4


def tiled(rows: int, blocks: int) -> torch.Tensor:
    """Where in swizzled scales the value of each row and block lies, [rows, blocks].

    Tiles of 128 rows and 4 blocks follow each other along a row first. Each is 32 lines of 16 bytes: four rows that
    are 32 apart, four blocks of each.
    """
    row, block = torch.arange(rows).unsqueeze(1), torch.arange(blocks)
    tile = row // 128 * (padded(blocks) // 4) + block // 4
    return (tile * 32 + row % 32) * 16 + row % 128 // 32 * 4 + block % 4


def from_tiles(scale: torch.Tensor, rows: int, blocks: int, what: str) -> torch.Tensor:
    """[rows, blocks] of swizzled scales; everything else in them must be zero."""
    flat = scale.reshape(-1).view(torch.uint8).cpu()
    assert flat.numel() == -(-rows // 128) * 128 * padded(blocks), f"{what}: {tuple(scale.shape)} swizzled scales"
    where = tiled(rows, blocks)
    inside = torch.zeros(flat.shape, dtype=torch.bool)
    inside[where] = True
    assert not bool(flat[~inside].any()), f"{what}: padding is not zero"
    return flat[where].view(scale.dtype)
