"""Scales in tiles and out of them, and numbers out of codes: what consumers of quantised results call."""

from __future__ import annotations

import pytest
import torch

from flashnorm import scales
from flashnorm.program import swizzled_offset
from tests.canonical import tiles

pytestmark = pytest.mark.cpu_only

ROWS, BLOCKS = (1, 17, 127, 128, 129), tuple(range(1, 10))
E4M3, E2M1, E8M0 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
STALE = 0x7F  # of padding, which nobody may read


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def by_hand(block_scale: torch.Tensor, stale: int) -> torch.Tensor:
    """Each byte where the layout has it; `stale` everywhere else."""
    rows, blocks = block_scale.shape
    columns = -(-blocks // 4) * 4
    found = torch.full((-(-rows // 128) * 128 * columns,), stale, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            found[swizzled_offset(row, block, columns)] = block_scale[row, block]
    return found


# ------------------------------------------------------------------ tiles
@pytest.mark.parametrize("rows", ROWS)
def test_tiles_byte_by_byte(rows: int) -> None:
    for blocks in BLOCKS:
        plain = random_bytes(rows, blocks)
        made = scales.swizzle_scales(plain)
        assert made.shape == (-(-rows // 128) * 128, -(-blocks // 4) * 4) and made.is_contiguous()
        assert torch.equal(made.flatten(), by_hand(plain, 0))
        assert torch.equal(made, tiles(plain))
        stale = by_hand(plain, STALE)
        for shape in ((-1,), made.shape, (-1, made.shape[1] // 4, 32, 4, 4)):
            assert torch.equal(scales.unswizzle_scales(stale.view(shape), rows, blocks), plain)


def test_a_tile_by_its_published_picture() -> None:
    """The first bytes of a tile belong to rows 0, 32, 64 and 96, four blocks each; then come rows 1, 33, ..."""
    plain = torch.arange(128).to(torch.uint8).unsqueeze(-1).expand(128, 4)
    assert scales.swizzle_scales(plain).flatten().unflatten(0, (-1, 4))[:8, 0].tolist() == [
        0,
        32,
        64,
        96,
        1,
        33,
        65,
        97,
    ]
    across = scales.swizzle_scales(torch.arange(12, dtype=torch.uint8).expand(128, 12))
    assert [across.flatten()[512 * i : 512 * i + 4].tolist() for i in range(3)] == [
        [4 * i + j for j in range(4)] for i in range(3)
    ]


@pytest.mark.parametrize("dtype", [torch.uint8, E4M3, E8M0], ids=str)
def test_tiles_keep_dtype_and_take_any_strides(dtype: torch.dtype) -> None:
    plain = random_bytes(3, 10, 5)
    made = scales.swizzle_scales(plain.transpose(0, 1).view(dtype))
    assert made.dtype == dtype and made.shape == (128, 8)
    back = scales.unswizzle_scales(made, 30, 5)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), plain.transpose(0, 1).reshape(30, 5))


def test_no_rows_and_no_columns() -> None:
    assert scales.swizzle_scales(torch.empty(0, 5, dtype=torch.uint8)).shape == (0, 8)
    assert scales.unswizzle_scales(torch.empty(0, dtype=torch.uint8), 0, 5).shape == (0, 5)
    assert scales.unswizzle_scales(torch.empty(0, dtype=torch.uint8), 3, 0).shape == (3, 0)


# ------------------------------------------------------------------ numbers
def test_every_code_times_every_scale() -> None:
    """Against numbers that nobody here wrote."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml-dtypes is not installed")
    byte = torch.arange(256).to(torch.uint8)
    e2m1 = torch.from_numpy((byte.numpy() % 16).view(ml_dtypes.float4_e2m1fn).astype("float32"))[:16]
    e4m3, e8m0 = (
        torch.from_numpy(byte.numpy().view(getattr(ml_dtypes, name)).astype("float32"))
        for name in ("float8_e4m3fn", "float8_e8m0fnu")
    )
    assert e8m0[255].isnan() and e8m0[0] == 2.0**-127
    pairs = (torch.arange(0, 16, 2) | torch.arange(1, 16, 2) << 4).to(torch.uint8).expand(256, 8).contiguous()
    for dtype, values, size in ((E4M3, e4m3, 16), (E8M0, e8m0, 16), (torch.uint8, e4m3, 16)):
        for codes in (pairs, pairs.view(E2M1)):
            got = scales.dequantize(codes, byte.view(dtype).unsqueeze(-1), block_size=size)
            assert torch.equal(got.nan_to_num(nan=99), (e2m1 * values.unsqueeze(-1)).nan_to_num(nan=99)), dtype
    wide = byte.view(E4M3).expand(256, 256)
    for dtype in (torch.uint8, E8M0):
        got = scales.dequantize(wide, byte.view(dtype).repeat_interleave(8).view(256, 8), block_size=32)
        want = e4m3 * e8m0.unsqueeze(-1)
        assert torch.equal(got.nan_to_num(nan=99, posinf=98), want.nan_to_num(nan=99, posinf=98))


def test_zeros_keep_their_sign_and_nan_scales_give_nan() -> None:
    codes = torch.tensor([[0x80] * 16])  # +0 and -0 by turns
    block_scale = torch.tensor([[0x38, 0x7F]], dtype=torch.uint8)
    got = scales.dequantize(codes.to(torch.uint8), block_scale, block_size=16)
    assert got[0, :16].signbit().tolist() == [False, True] * 8
    assert not got[0, :16].any() and bool(got[0, 16:].isnan().all())
    powers = scales.dequantize(codes.to(torch.uint8), torch.tensor([[0xFF]], dtype=torch.uint8), block_size=32)
    assert bool(powers.isnan().all())


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape", [(7, 64), (2, 65, 48), (48,), (2, 3, 4, 32), (0, 32)], ids=str)
def test_any_leading_shape(shape: tuple[int, ...], swizzled: bool) -> None:
    codes = random_bytes(*shape[:-1], shape[-1] // 2)
    blocks, rows = shape[-1] // 16, codes[..., 0].numel()
    plain = torch.randint(0, 0x7F, (rows, blocks)).to(torch.uint8).view(E4M3)
    want = scales.dequantize(codes.reshape(rows, shape[-1] // 2), plain, block_size=16).view(shape)
    block_scale = scales.swizzle_scales(plain) if swizzled else plain.view(*shape[:-1], blocks)
    got = scales.dequantize(codes.view(E2M1), block_scale, block_size=16, swizzled=swizzled)
    assert got.shape == shape and torch.equal(got, want)
    if swizzled:
        assert torch.equal(scales.dequantize(codes, block_scale.flatten(), block_size=16, swizzled=True), want)


def test_global_scale_and_dtype() -> None:
    codes, block_scale = random_bytes(5, 16), torch.full((5, 2), 1.5).to(E4M3)
    plain = scales.dequantize(codes, block_scale, block_size=16)
    for gain in (3.0, torch.tensor(3.0), torch.tensor([3.0]).bfloat16()):
        assert torch.equal(scales.dequantize(codes, block_scale, block_size=16, global_scale=gain), plain / 3)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        got = scales.dequantize(codes, block_scale, block_size=16, global_scale=3, dtype=dtype)
        assert got.dtype == dtype and torch.equal(got, (plain / 3).to(dtype))


def test_traces_whole() -> None:
    codes, block_scale = random_bytes(130, 16), torch.full((130, 2), 1.5).to(E4M3)
    tiled = scales.swizzle_scales(block_scale)
    traced = torch.compile(scales.dequantize, fullgraph=True, backend="aot_eager")
    want = scales.dequantize(codes, tiled, block_size=16, swizzled=True)
    assert torch.equal(traced(codes, tiled, block_size=16, swizzled=True), want)


# ------------------------------------------------------------------ errors
U8 = torch.zeros(4, 16, dtype=torch.uint8)
GOOD = {"codes": U8, "block_scale": torch.zeros(4, 2, dtype=torch.uint8), "block_size": 16}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"codes": U8.int()}, "codes must have one of the dtypes uint8, float4_e2m1fn_x2, float8_e4m3fn, got"),
        ({"codes": U8[0, 0]}, "codes must have at least one dimension"),
        ({"codes": U8[:, :15]}, "codes must have whole blocks of 16 elements in a row, got 30"),
        ({"codes": U8[:, :0]}, "codes must have whole blocks"),
        ({"block_scale": U8.float()}, "block_scale must have one of the dtypes"),
        ({"block_scale": U8[:, :3]}, r"block_scale must have shape \(4, 2\), got \(4, 3\)"),
        ({"block_scale": U8[:2, :4]}, "block_scale must have shape"),
        ({"block_scale": U8[:, :2].to("meta")}, "block_scale is on meta"),
        ({"swizzled": True}, "block_scale must be contiguous and have 1 x 1 tiles of 512 = 512 elements for 4 rows"),
        ({"block_size": 0}, "block_size must be a positive whole number, got 0"),
        ({"block_size": 16.0}, "block_size must be"),
        ({"block_size": True}, "block_size must be"),
        ({"global_scale": "3"}, "global_scale must be a number"),
        ({"global_scale": torch.ones(2)}, "global_scale must be one floating-point element"),
        ({"global_scale": torch.ones(1).int()}, "global_scale must be one floating-point element"),
        ({"dtype": torch.int32}, "dtype must be one of float32"),
    ],
)  # fmt: skip
def test_dequantize_names_what_is_wrong(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"dequantize: {named}|unswizzle_scales: {named}"):
        scales.dequantize(**{**GOOD, **wrong})  # type: ignore[arg-type]


def test_tiles_name_what_is_wrong() -> None:
    for call in (
        lambda: scales.dequantize([1], U8, block_size=16),  # type: ignore[arg-type]
        lambda: scales.dequantize(U8, None, block_size=16),  # type: ignore[arg-type]
        lambda: scales.swizzle_scales(3),  # type: ignore[arg-type]
        lambda: scales.unswizzle_scales("x", 1, 1),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
            call()
    whole = torch.zeros(512, dtype=torch.uint8)
    for arguments, named in (
        ((whole.float(), 1, 1), "dtypes"),
        ((whole[1:], 1, 1), "contiguous"),
        ((whole, 129, 1), "2 x 1 tiles"),
        ((torch.zeros(1024, dtype=torch.uint8)[::2], 1, 1), "contiguous"),
        ((whole, -1, 1), "rows must be a non-negative whole number"),
        ((whole, 1, 1.0), "columns must be"),
    ):
        with pytest.raises(ValueError, match=named):
            scales.unswizzle_scales(*arguments)
    with pytest.raises(ValueError, match="at least one dimension"):
        scales.swizzle_scales(whole[0])
