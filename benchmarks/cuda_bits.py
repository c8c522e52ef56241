"""Bits first: every plan of the tuning artefacts against the NumPy model of the arithmetic, on this GPU.

Used by `tune_cuda`. The model, and the buffers whose surroundings are watched, are those of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.cuda_plans import BUILDS, NO_PLAN, SHARED, Log, Plan, plans
from benchmarks.tune_cases import Checker
from tests.canonical import rmsnorm_bits
from tests.csrc_programs import make

WIDTHS = (1, 7, 8, 9, 64, 111, 128, 136, 200, 256, 512, 576, 1000, 1024, 2048, 4096, 4100, 5120, 7168, 8192, 8200,
          16384, 20000, 24576, 32768, 65536, 100001, 131072, 262144)  # fmt: skip


def wrong_plans(
    name: str, module: Any, rows: tuple[int, ...], h: int, *, tried: Sequence[Plan] = (NO_PLAN,), pdl: bool = True,
    **layout: Any,
) -> dict[Plan, str]:  # fmt: skip
    """What is wrong with each plan; empty if nothing is."""
    if name in SHARED:
        return dict(_wrong_cases(name, module, rows[0], h, tried))
    call = make(name, *BUILDS[name], rows, h, device="cuda", **layout)
    wrong = {}
    for plan in tried:
        call.reset()
        module["force_plan"](*plan)
        try:
            module["launch"](*call.scalars(), pdl, *call.tensors.values())
            torch.cuda.synchronize()
            call.check()
        except (AssertionError, RuntimeError, ValueError) as error:
            wrong[plan] = str(error)[-600:]
        module["force_plan"](*NO_PLAN)
    return wrong


def _wrong_cases(name: str, module: Any, rows: int, h: int, tried: Sequence[Plan]) -> Iterator[tuple[Plan, str]]:
    checker = Checker(name, h, rows)
    for plan in tried:
        module["force_plan"](*plan)
        problem = checker.wrong(module["launch"])
        module["force_plan"](*NO_PLAN)
        if problem:
            yield plan, problem


def _work() -> Iterator[tuple[str, tuple[int, ...], int, dict[str, Any]]]:
    """(build, rows, H, how) of every check."""
    own = [name for name in BUILDS if name not in SHARED]
    for h in WIDTHS:
        for name in own:
            yield name, (17 if h <= 4096 else 3 if h <= 65536 else 2,), h, {"bad_index": True}
    # One M of every class.
    for h in (7, 128, 576, 1024, 1536, 2047, 4096):
        for m in (65, 400, 1031, 4003):
            if m * h <= 4_500_000:
                yield "rms", (m,), h, {"pdl": m != 65}
                for name in ("add", "ln", "quant", "block", "dynamic_row", "int8_indexed"):
                    yield name, (m,), h, {}
    for h, m in ((8192, 400), (8192, 900), (8192, 3300), (16384, 900), (32768, 900)):
        yield "rms", (m,), h, {}
    for h in (128, 576, 4096, 4100, 16384):
        for pad in (8, 4, 2, 1):
            for name in ("rms", "llama", "ln", "quant", "block", "dynamic_128"):
                yield name, (5,), h, {"pad": pad, "columns": pad != 4}
        yield "rms", (5,), h, {"pad": 8, "start": 1}
        for name in ("rms", "save", "ln", "block", "dynamic_row", "int8_indexed"):
            yield name, (3, 5), h, {"pad": 8, "row_weight": True}
    # Every plan; odd widths with rows of every alignment, in pieces and one by one.
    for h in (128, 264, 576, 1536, 2048, 4096, 7168, 8192, 16384, 24576, 30000, 65536, 131072):
        for name in BUILDS:
            yield name, (5,), h, {"tried": None}
    # More rows than CTAs that stay.
    for h in (3072, 5120, 7168):
        for name in ("ln", "ln_quant", *SHARED):
            yield name, (700,), h, {"tried": None}
    for h in (9, 100, 1003, 2047, 4095, 4100, 7777, 9001, 20001):
        for name in BUILDS:
            yield name, (17,), h, {"tried": None}
        for name in own:
            yield name, (17,), h, {"tried": None, "pad": 3, "start": 1}


def bits(modules: dict[str, Any], log: Log) -> None:
    """Checks all of it, and logs what is wrong."""
    checked = wrong = 0
    for name, rows, h, how in _work():
        if name not in modules:
            continue
        if how.get("tried", ()) is None:
            how["tried"] = list(plans(modules[name], name, rows[0], h))
        checked += len(how.get("tried", (NO_PLAN,)))
        try:
            problems: dict[Any, str] = dict(wrong_plans(name, modules[name], rows, h, **how))
        except Exception as error:
            problems = {"all": f"{type(error).__name__}: {str(error)[-600:]}"}
        wrong += len(problems)
        how.pop("tried", None)
        for plan, problem in problems.items():
            log.add("failure", where="bits", problem=problem, plan=plan, name=name, rows=rows, h=h, **how)
    log.add("bits", checked=checked, wrong=wrong, **_extras(modules, log))
    print(f"bits: {checked} checked, {wrong} wrong", flush=True)


def _chain(modules: dict[str, Any]) -> bool:
    """Dependent launches keep their order."""
    ends = []
    for pdl in (True, False):
        torch.manual_seed(0)
        x, r = (torch.randn(40, 4096, device="cuda").bfloat16() for _ in range(2))
        w = torch.randn(4096, device="cuda").bfloat16()
        for _ in range(200):
            modules["add"]["launch"](1e-5, pdl, x, r, w)
            modules["rms"]["launch"](1e-5, pdl, x, w, x)
        ends.append((x, r))
    torch.cuda.synchronize()
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def _large(modules: dict[str, Any]) -> bool:
    """More than 2^32 elements."""
    m, h = 530_000, 8192
    x = torch.empty(m, h, dtype=torch.bfloat16, device="cuda").fill_(1.0)
    x[-3:] = torch.randn(3, h, device="cuda")
    w = torch.randn(h, device="cuda").bfloat16()
    out = torch.zeros_like(x)
    modules["rms"]["launch"](1e-5, True, x, w, out)
    right = torch.equal(out[-3:].cpu(), rmsnorm_bits(x[-3:], w, eps=1e-5).out)
    codes = torch.zeros(m, h, dtype=torch.float8_e4m3fn, device="cuda")
    modules["quant"]["launch"](1e-5, 1.0, True, x, w, codes)
    same = out[-3:].float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    close = (codes[-3:].view(torch.uint8).int() - same.int()).abs().max().item() <= 1
    return right and close and out[: m - 3].count_nonzero().item() > 0


def _odd(modules: dict[str, Any]) -> bool:
    """Permuted and broadcast rows."""
    w = torch.randn(256, device="cuda").bfloat16()
    x = torch.randn(7, 5, 256, device="cuda").bfloat16().transpose(0, 1)
    out = torch.zeros(5, 7, 256, dtype=torch.bfloat16, device="cuda")
    modules["rms"]["launch"](1e-5, True, x, w, out)
    first = torch.equal(out.cpu(), rmsnorm_bits(x, w, eps=1e-5).out)
    one = torch.randn(256, device="cuda").bfloat16().expand(9, 256)
    out = torch.zeros(9, 256, dtype=torch.bfloat16, device="cuda")
    modules["rms"]["launch"](1e-5, True, one, w, out)
    return first and torch.equal(out.cpu(), rmsnorm_bits(one, w, eps=1e-5).out)


def _extras(modules: dict[str, Any], log: Log) -> dict[str, str]:
    results: dict[str, str] = {}
    if not {"rms", "add", "quant"} <= modules.keys():
        return results
    tests: tuple[Callable[[dict[str, Any]], bool], ...] = (_chain, _large, _odd)
    for test in tests:
        name = test.__name__.removeprefix("_")
        try:
            results[name] = "ok" if test(modules) else "WRONG"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {str(error)[-400:]}"
        if results[name] != "ok":
            log.add("failure", where=name, problem=results[name])
        torch.cuda.empty_cache()
    print(results, flush=True)
    return results
