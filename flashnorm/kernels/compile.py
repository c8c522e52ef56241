"""From a variant to an object file: compiled for a named architecture, on a machine that needs no GPU."""

import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from flashnorm.kernels.launch import plans_for
from flashnorm.kernels.row_backward import RowBackward
from flashnorm.kernels.row_forward import RowForward
from flashnorm.kernels.tile import WIDTH, converts_fp4, sm_of
from flashnorm.program import SCALES, BackwardProgram, BlockScales, Operand, Variant

ENTRY_POINT = "launch"
_TRACING = threading.Lock()  # the DSL traces one function at a time in a process
DTYPES = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "int8": cutlass.Int8,
    "uint8": cutlass.Uint8,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}


@dataclass(frozen=True)
class Compiled:
    """A compiled variant.

    Attributes:
        function: the TVM-FFI function `launch(*scalars, enable_pdl, *operands)`, callable where a GPU is.
        ptx, cubin: what it was made of, where `inspect` asked for them.
    """

    function: Any
    ptx: str | None = None
    cubin: bytes | None = None

    def export(self, path: Path) -> None:
        """Write an object file that exports `__tvm_ffi_launch`."""
        self.function.export_to_c(str(path), function_name=ENTRY_POINT)


@dataclass(frozen=True)
class Sizes:
    """What only a launch knows, each a 64-bit unknown: the outer shape of the row grid, and the rows of the pool."""

    outer: tuple
    pool: Any


def fake(operand: Operand, variant: Variant, sizes: Sizes):
    """A tensor that is not there: H is fixed, every other extent and every outer stride is a 64-bit unknown."""
    name, hidden = variant.dtype(operand.name), variant.hidden_size
    if operand.kind == "workspace":
        return make_fake_tensor(DTYPES[name], (cute.sym_int64(),), stride=(1,), assumed_align=16)
    outer: tuple = sizes.outer
    if operand.kind in SCALES:
        store = variant.row_program.store
        assert isinstance(store, BlockScales)
        outer = (cute.sym_int64(), store.columns(hidden, operand.kind))
    elif operand.kind in ("pool", "per_pool"):
        outer = (sizes.pool,)
    elif operand.kind == "scalar":
        outer = (1,)
    elif operand.kind == "vec" and operand.name not in variant.row_vecs:
        outer = ()
    strides = tuple(cute.sym_int64() for _ in outer)
    if operand.kind == "pairs":
        hidden //= 2
    if operand.kind not in ("row", "pairs", "pool", "vec"):
        return make_fake_tensor(DTYPES[name], outer, stride=strides, assumed_align=WIDTH[name])
    align = min(16, variant.vec * WIDTH[name])
    return make_fake_tensor(DTYPES[name], (*outer, hidden), stride=(*strides, 1), assumed_align=align)


def compile_variant(variant: Variant, arch: str, *, plans=None, inspect: bool = False) -> Compiled:
    """Compile a variant for an architecture such as "sm_90a".

    Args:
        variant: what to compile.
        arch: the target; needs no device of its kind.
        plans: launch plans instead of `plans_for(variant, arch)`.
        inspect: keep PTX and cubin.

    Raises:
        ValueError: the variant has a dtype or stage that there is no kernel for.
    """
    unknown = [d for d in variant.dtypes if d not in DTYPES]
    if unknown:
        raise ValueError(f"dtypes must be among {sorted(DTYPES)}, got {unknown}")
    plans = plans or plans_for(variant, arch)
    kernel: RowForward | RowBackward
    if isinstance(variant.program, BackwardProgram):
        kernel = RowBackward(variant, plans, sm_of(arch))
    else:
        kernel = RowForward(variant, plans, sm_of(arch), converts_fp4(arch))
    sizes = Sizes(tuple(cute.sym_int64() for _ in range(variant.row_rank)), cute.sym_int64())
    operands = [fake(o, variant, sizes) for o in variant.program.operands()]
    scalars = [cutlass.Float32(0.0) for _ in variant.program.scalars()]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    arguments = (kernel, stream, *scalars, cutlass.Boolean(True), *operands)
    with _TRACING:
        if not inspect:
            return Compiled(cute.compile(*arguments, options=options))
        with tempfile.TemporaryDirectory() as dump:
            function = cute.compile(*arguments, options=f"{options} --keep-ptx --keep-cubin --dump-dir {dump}")
            (ptx,), (cubin,) = Path(dump).glob("*.ptx"), Path(dump).glob("*.cubin")
            return Compiled(function, ptx.read_text().rstrip("\0"), cubin.read_bytes())
