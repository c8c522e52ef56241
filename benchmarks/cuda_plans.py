"""The tuning artefacts of the CUDA C++ route: which programs, and which plans the tiles of each allow."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.tune_cases import CASES
from flashnorm.backends.cuda import spec
from flashnorm.program import (
    AddResidual,
    Affine,
    AffineBias,
    Cast,
    GateResidual,
    LoadRow,
    MeanVar,
    QuantBlocks,
    QuantTensor,
    Rms,
    Round,
    RowProgram,
    SaveRstd,
)

B, H16, F, E4, E5, I8 = "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"
LOAD, ADD, GAIN, ROUNDED = LoadRow(), AddResidual(), (Affine(),), (Affine(), Round())

# name: program, dtype of each operand in order; some are cases of the other tuner, too
BUILDS: dict[str, tuple[RowProgram, tuple[str, ...]]] = {
    **{name: (CASES[name].program, CASES[name].dtypes) for name in ("rms", "add", "ln", "add_ln", "ln_quant", "quant")},
    "rms_f32": (RowProgram(LOAD, Rms(), GAIN, Cast()), (F, F, F)),
    "save": (RowProgram(LOAD, Rms(), GAIN, Cast(), (SaveRstd(),)), (H16, F, H16, F)),
    "gemma": (RowProgram(LOAD, Rms(), (Affine(offset=1.0),), Cast()), (H16, B, H16)),
    "add_f32": (RowProgram(ADD, Rms(), GAIN, Cast("x")), (F, F, F)),
    "llama": (RowProgram(AddResidual(True), Rms(), (Affine(round_norm=True),), Cast("x")), (B, F, H16)),
    "ln_f32": (RowProgram(LOAD, MeanVar(), (AffineBias(),), Cast(), (SaveRstd(),)), (F, F, F, F, F)),
    "quant_device": (RowProgram(LOAD, Rms(), (Affine(offset=1.0),), QuantTensor(True)), (H16, F, E5, H16)),
    "add_quant": (RowProgram(ADD, Rms(), GAIN, QuantTensor(True)), (B, B, B, E4, F)),
    "block": (RowProgram(ADD, Rms(), ROUNDED, QuantBlocks(128, 1e-4, ratio=True, side=True)), (B, B, B, E4, F, B)),
    "dynamic_row": (RowProgram(LOAD, Rms(), ROUNDED, QuantBlocks(0, 1e-10, cap="value")), (B, B, E4, F)),
    "dynamic_row_int8": (RowProgram(LOAD, Rms(), ROUNDED, QuantBlocks(0, 1e-10)), (B, B, I8, F)),
    "dynamic_128": (RowProgram(LOAD, Rms(), ROUNDED, QuantBlocks(128, 1e-10)), (B, B, E4, F)),
    "dynamic_128_packed": (
        RowProgram(ADD, Rms(), ROUNDED, QuantBlocks(128, 1e-10, ue8m0=True, packed=True, side=True)),
        (B, B, B, E4, "int32", B),
    ),
    "indexed": (RowProgram(LoadRow(indexed=True), Rms(), GAIN, Cast()), (B, "int32", B, B)),
    "int8_indexed": (
        RowProgram(LoadRow(True, True), Rms(), GAIN, QuantTensor(), (SaveRstd(),)),
        (I8, "int64", F, B, E4, F),
    ),
}
# Programs that the cases of both tuners have, with their check of the bits.
SHARED = ("gamma_beta", "gate_scale_shift", "gate_scale_shift_biases", "scale_shift_biases")
BUILDS |= {name: (CASES[name].program, CASES[name].dtypes) for name in SHARED}

# threads a row, rows a CTA, CTAs a row, lanes a thread, groups a lane, prefetch, rows a thread
Plan = tuple[int, int, int, int, int, bool, int]
NO_PLAN: Plan = (0, 0, 0, 0, 0, False, 1)


class Log:
    """JSON lines, flushed one by one: whatever happens, what was measured is there."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w", encoding="utf-8")
        self.failures = 0

    def add(self, kind: str, **fields: Any) -> None:
        self.file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self.file.flush()
        if kind == "failure":
            self.failures += 1
            print("FAILURE", json.dumps(fields)[:400], flush=True)


def build(arch: str, log: Log, names: tuple[str, ...]) -> dict[str, Any]:
    """The modules that could be built, all at once."""
    import tvm_ffi

    def one(name: str) -> Any:
        start = time.perf_counter()
        folder = spec(*BUILDS[name], arch, ("FLASHNORM_TUNING",)).build()
        log.add("build", name=name, seconds=round(time.perf_counter() - start, 2))
        return tvm_ffi.load_module(str(folder / "kernel.so"))

    modules = {}
    with ThreadPoolExecutor(16) as pool:
        for name, future in {name: pool.submit(one, name) for name in names}.items():
            try:
                modules[name] = future.result()
            except Exception as error:
                log.add("failure", where=f"build {name}", error=str(error)[-3000:])
    return modules


def dtype_of(name: str, operand: str) -> str:
    program, dtypes = BUILDS[name]
    return next(dtype for o, dtype in zip(program.operands(), dtypes, strict=True) if o.name == operand)


def held_bytes(name: str) -> int:
    """Bytes an element takes between the passes, when it waits in registers (the load stage's Kept)."""
    load = BUILDS[name][0].load
    if isinstance(load, GateResidual):
        return 2 if load.rounded else 4
    if isinstance(load, AddResidual):
        return 4 if not load.rounded or dtype_of(name, "residual") == F else 2
    return 4 if dtype_of(name, "x") in (F, I8) else 2


def lists_of(name: str) -> set[int]:
    """Which tiles a program has: ffi/launch.h's numbers for their lists."""
    program, _ = BUILDS[name]
    if isinstance(program.load, GateResidual):
        return {2, 3, 4, 7}
    if isinstance(program.stats, MeanVar):
        return {0, 2, 6}
    size = {F: 4, I8: 1}
    read = sum(size.get(dtype_of(name, o.name), 2) for o in program.load.operands() if o.kind in ("row", "pool"))
    return {0, 1} if read == 1 or (read == 2 and not isinstance(program.store, Cast)) else {0}


def plans(module: Any, name: str, m: int, h: int) -> Iterator[Plan]:
    """Every plan that the tiles of the artefact allow for rows of H elements."""
    lanes = 1
    while lanes < min(-(-h // 8), 1024):
        lanes *= 2
    numbers = list(itertools.takewhile(lambda number: number >= 0, map(module["tiles"], itertools.count())))
    seen: set[Plan] = set()
    for at in range(0, len(numbers), 10):
        threads, cluster, held, groups, present, most, some_rows, abreast, shifted, programs = numbers[at : at + 10]
        narrow = threads == 0 and held > 1
        threads = threads or lanes // max(1, held)
        turns = -(-h // 8192)
        fits = turns <= groups < 2 * turns and present * abreast * 8 * held_bytes(name) <= 256
        fits = fits and (present == held * groups or h <= 8 * present * threads * cluster)
        fits = fits or (held == 0 and turns > 1)
        fits = fits and programs in lists_of(name) and not (narrow and lanes > 32) and threads <= most
        if bool(shifted) != (h % 8 != 0) or threads * cluster * max(1, held) != lanes or not fits:
            continue
        sizes = [cta for cta in (64, 128, 256, 512) if cta <= most and cta % threads == 0]
        for cta in sizes if some_rows and threads < 256 else (threads,):
            for prefetch in (True, False) if m <= 640 else (False,):
                plan = (threads, cta // threads, cluster, held, groups, prefetch, abreast)
                if plan not in seen:
                    seen.add(plan)
                    yield plan
