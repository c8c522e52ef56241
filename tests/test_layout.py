"""Strides: collapsing, overlap and access width, against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnorm.core import layout

sizes_and_strides = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=0, max_size=3)


def addresses(span: layout.Span) -> set[int]:
    """Every byte of a span, one by one."""
    out = set()
    for index in itertools.product(*(range(n) for n in span.sizes)):
        start = span.address + sum(i * s for i, s in zip(index, span.strides, strict=True))
        out.update(range(start, start + span.run))
    return out


@settings(max_examples=400, deadline=None, derandomize=True)
@given(sizes_and_strides, sizes_and_strides, st.integers(0, 40), st.integers(1, 6), st.integers(1, 6))
def test_overlap_is_exact(a, b, offset, run_a, run_b):
    left = layout.Span(0, run_a, tuple(n for n, _ in a), tuple(s for _, s in a))
    right = layout.Span(offset, run_b, tuple(n for n, _ in b), tuple(s for _, s in b))
    assert layout.overlaps(left, right) == bool(addresses(left) & addresses(right))


def test_interleaved_columns_of_one_buffer_do_not_overlap():
    # q and k of a packed qkv: the address ranges cross, the bytes do not
    q = layout.span(0, (1000, 128), (384, 1), 2)
    k = layout.span(256, (1000, 128), (384, 1), 2)
    assert not layout.overlaps(q, k)
    assert layout.overlaps(q, layout.span(254, (1000, 128), (384, 1), 2))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 20), st.integers(0, 20)), max_size=4))
def test_collapse_keeps_every_address_in_order(dims):
    sizes = tuple(n for n, _, _ in dims)
    strides = [tuple(a for _, a, _ in dims), tuple(b for _, _, b in dims)]
    small, merged = layout.collapse(sizes, strides)
    assert len(small) <= len(sizes) and 1 not in small

    def walk(shape, step):
        return [sum(i * s for i, s in zip(ix, step, strict=True)) for ix in itertools.product(*map(range, shape))]

    for before, after in zip(strides, merged, strict=True):
        assert walk(sizes, before) == walk(small, after)


@pytest.mark.parametrize(
    ("sizes", "strides", "expected"),
    [
        ((4, 8), (8, 1), False),
        ((4, 8), (0, 1), True),
        ((4, 8), (7, 1), True),
        ((1, 8), (0, 1), False),
        ((2, 3, 8), (24, 8, 1), False),
        ((2, 3, 8), (8, 16, 1), False),
        ((2, 3, 8), (8, 8, 1), True),
        ((8, 4), (1, 8), False),
    ],
)
def test_self_overlap(sizes, strides, expected):
    assert layout.self_overlaps(sizes, strides) is expected


@pytest.mark.parametrize(
    ("hidden", "operands", "expected"),
    [
        (4096, [(0, 2, (4096,)), (0, 2, ())], 8),
        (4096, [(0, 4, (4096,)), (0, 2, ())], 8),
        (500, [(0, 2, (500,))], 4),
        (111, [(0, 2, (111,))], 1),
        (4096, [(2, 2, (4096,))], 1),
        (4096, [(8, 2, (4096,))], 4),
        (4096, [(8, 4, (4096,))], 2),
        (4096, [(0, 2, (4097,))], 1),
        (4096, [(0, 2, (0,))], 8),
        (2, [(0, 2, (2,))], 2),
    ],
)
def test_access_width(hidden, operands, expected):
    assert layout.access_width(hidden, operands) == expected
