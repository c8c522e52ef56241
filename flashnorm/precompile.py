"""`flashnorm precompile`: kernels for machines that have no compiler, built here, for GPUs that need not be here.

The folder it fills is what FLASHNORM_AOT_DIR serves from. Each kernel is built by a process of its own, since
neither the CuTe DSL nor a compiler is any faster with threads; what the cache has is copied.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashnorm import backends, recipe
from flashnorm.backends import guard, warm
from flashnorm.config import settings
from flashnorm.core import commands
from flashnorm.core.op import NUMERICS, Op
from flashnorm.jit import ArtifactSpec, Store, toolchain
from flashnorm.jit.aot import export
from flashnorm.jit.entry import check_entry, portable_name
from flashnorm.recipe import Kernel

GPU_ROUTES = ("cute", "cuda")
# Of warm calls; they belong to no kernel.
CALLS = {"guard": guard.spec, "warm": warm.spec}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    many = "comma-separated"
    parser.add_argument(
        "--arch", action="append", default=[], help="sm_90a, ...; 'host' for the CPU of this machine (may be repeated)"
    )
    parser.add_argument("--ops", default="", help=f"operators, {many}")
    parser.add_argument("--dtype", default="bf16", help=f"bf16, fp16, fp32, {many} (default bf16)")
    parser.add_argument("--hidden", default="", help=f"hidden sizes, {many}")
    parser.add_argument("--numerics", default="flashinfer", help=f"{many} (default flashinfer)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help=f"of operators that have it, {many}"
    )
    parser.add_argument("--index", default="int32", help=f"dtypes of row indices and positions, {many} (default int32)")
    parser.add_argument("--routes", default=None, help="cute,cuda (default both)")
    parser.add_argument("--recipe", metavar="FILE", help="what flashnorm.record() wrote; - for standard input")
    parser.add_argument("--jobs", type=int, default=None, help="processes (default: one a processor)")
    parser.add_argument("--out", metavar="DIR", required=True, type=Path, help="the folder to fill")


def run(arguments: argparse.Namespace) -> int:
    """Fills the folder; 0 where every kernel is in it, 1 where one failed, 2 for wrong usage."""
    try:
        if settings.disable_jit:
            raise ValueError("FLASHNORM_DISABLE_JIT forbids building")
        kernels = wanted(arguments)
        jobs = toolchain.job_count(settings) if arguments.jobs is None else arguments.jobs
        if jobs < 1:
            raise ValueError(f"--jobs must be positive, got {jobs}")
    except (OSError, ValueError) as error:
        print(f"flashnorm precompile: {error}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    results = build_all(kernels, arguments.out.expanduser().absolute(), jobs, quiet=arguments.json)
    failed = [result for result in results if result["error"] is not None]
    if arguments.json:
        from flashnorm.__main__ import print_json

        seconds = round(time.perf_counter() - began, 2)
        print_json({"out": str(arguments.out), "seconds": seconds, "failed": len(failed), "artifacts": results})
    else:
        _print(results, arguments.out)
    return 1 if failed else 0


# ------------------------------------------------------------------ what is wanted
def wanted(arguments: argparse.Namespace) -> list[Kernel]:
    """The kernels that a command line asks for.

    Raises:
        ValueError: it asks for something that there is not, or for nothing.
        OSError: the recipe cannot be read.
    """
    archs = list(dict.fromkeys(a if a == "host" else toolchain.parse_arch(a).name for a in arguments.arch))
    routes = _words("--routes", arguments.routes or "cute,cuda", GPU_ROUTES)
    kernels: list[Kernel] = []
    if arguments.recipe is not None:
        for kernel in recipe.read(arguments.recipe, sys.stdin if arguments.recipe == "-" else None):
            gpu = kernel.arch != "host"
            for arch in [a for a in archs if a != "host"] if gpu and archs else [kernel.arch]:
                for route in routes if gpu and arguments.routes is not None else [kernel.route]:
                    kernels.append(dataclasses.replace(kernel, arch=arch, route=route))
    if arguments.ops or arguments.hidden:
        kernels += grid(arguments, archs, routes)
    if not kernels:
        raise ValueError("give --recipe, or --arch, --ops and --hidden")
    return list(dict.fromkeys(kernels))


def grid(arguments: argparse.Namespace, archs: list[str], routes: list[str]) -> Iterator[Kernel]:
    """Every combination of the flags."""
    known = commands.operators()
    ops = _words("--ops", arguments.ops, known)
    dtypes = _words("--dtype", arguments.dtype, commands.DTYPES)
    modes = list(dict.fromkeys(NUMERICS[mode] for mode in _words("--numerics", arguments.numerics, NUMERICS)))
    sizes = [int(word) if word.isdecimal() else 0 for word in arguments.hidden.split(",")]
    if not archs:
        raise ValueError("--arch is missing")
    if not all(1 <= size <= 262144 for size in sizes):
        raise ValueError(f"--hidden must be whole numbers from 1 to 262144, got {arguments.hidden!r}")
    indices = _words("--index", arguments.index, commands.INDICES)
    options = _options(arguments.option, [known[name] for name in ops])
    for op in (known[name] for name in ops):
        mine = {key: words for key, words in options.items() if key in op.options}
        forms = [dict(zip(mine, words, strict=True)) for words in itertools.product(*mine.values())]
        for form, mode, dtype in itertools.product(forms, modes, _taken(op, dtypes, sizes[0])):
            picked = {key: commands.values_of(op, key)[word] for key, word in form.items()}
            for size, index in itertools.product(sizes, indices):
                variant = commands.plain_variant(op, commands.DTYPES[dtype], size, {"numerics": mode, **picked}, index)
                for arch in archs:
                    for route in ["cpu"] if arch == "host" else [r for r in routes if r in op.routes]:
                        yield Kernel(op.name, route, arch, variant)


def _taken(op: Op, dtypes: list[str], size: int) -> list[str]:
    """Those of the dtypes that an operator's rows may have; all of them where they are not the caller's to choose.

    Raises:
        ValueError: none of them is.
    """
    first = commands.plain_variant(op, commands.DTYPES[dtypes[0]], size, {}).program.operands()[0]
    known = [name for name, dtype in commands.DTYPES.items() if str(dtype).removeprefix("torch.") in first.dtypes]
    taken = [name for name in dtypes if name in known] if known else dtypes
    if not taken:
        raise ValueError(f"--dtype {','.join(dtypes)}: {op.name} takes {', '.join(known)}")
    if len(taken) < len(dtypes):
        print(f"flashnorm precompile: {op.name} takes {', '.join(known)} alone", file=sys.stderr)
    return taken


def _options(given: list[str], ops: list[Op]) -> dict[str, list[str]]:
    """Option -> its words; each of an operator that is asked for."""
    found: dict[str, list[str]] = {}
    for text in given:
        name, _, words = text.partition("=")
        having = [op for op in ops if name != "numerics" and name in op.options]
        if not having:
            there = dict.fromkeys(key for op in ops for key in op.options if key != "numerics")
            raise ValueError(f"--option looks like NAME=VALUE, with {', '.join(there) or 'no'} options, got {text!r}")
        known = set.intersection(*(set(commands.values_of(op, name)) for op in having))
        found[name] = _words(f"--option {name}", words, sorted(known))
    return found


def _words(flag: str, text: str, known: Any) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise ValueError(f"{flag} must be among {', '.join(known)}, got {word!r}")
    if not words:
        raise ValueError(f"{flag} is missing")
    return list(dict.fromkeys(words))


# ------------------------------------------------------------------ building it
def calls() -> list[str]:
    """The parts of warm calls that can be made here."""
    return [name for name in CALLS if name != "warm" or warm.headers()]


def _spec(kernel: Kernel | str) -> ArtifactSpec:
    return CALLS[kernel]() if isinstance(kernel, str) else backends.artifact(kernel.route, kernel.variant, kernel.arch)


def _result(kernel: Kernel | str, name: str, state: str, seconds: float = 0.0, **more: Any) -> dict[str, Any]:
    route, arch = (kernel, "host") if isinstance(kernel, str) else (kernel.route, kernel.arch)
    where = {"route": route, "arch": arch}
    return {"name": name, **where, "state": state, "seconds": round(seconds, 2), "path": None, "error": None, **more}


def build_one(kernel: Kernel | str, out: Path) -> dict[str, Any]:
    """Puts one kernel (or a part of warm calls, by its name) into the folder; runs in a process of its own."""
    began = time.perf_counter()
    name = str(kernel)
    try:
        spec = _spec(kernel)
        name = spec.name
        # Not from a folder of precompiled kernels: another compiler may have filled it.
        store = Store.from_settings(dataclasses.replace(settings, aot_dirs=()))
        state = "built" if spec.lookup(store) is None else "cached"
        path = export(spec, out, store)
        return _result(kernel, name, state, time.perf_counter() - began, path=str(path))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return _result(kernel, name, "failed", time.perf_counter() - began, error=text)


def build_all(kernels: list[Kernel], out: Path, jobs: int, *, quiet: bool) -> list[dict[str, Any]]:
    """A result for each distinct artefact."""
    # nvcc takes ten times as long as the DSL: begin with its kernels.
    asked: list[Kernel | str] = [*sorted(kernels, key=lambda kernel: kernel.route == "cute")]
    if any(kernel.arch == "host" for kernel in kernels) or toolchain.find_host_compiler(settings):
        asked += calls()
    results: dict[str, dict[str, Any]] = {}
    todo: dict[str, Kernel | str] = {}
    for kernel in asked:
        try:
            spec = _spec(kernel)
        except Exception as error:  # a dtype or architecture that a route has no kernel for
            results[repr(kernel)] = _result(kernel, repr(kernel), "failed", error=f"{type(error).__name__}: {error}")
            continue
        name = portable_name(spec)
        if name not in results and name not in todo:
            if check_entry(out / name, spec) is None:
                results[name] = _result(kernel, spec.name, "kept", path=str(out / name))
            else:
                todo[name] = kernel
    # Fresh interpreters: a forked child would inherit torch's threads, and their locks, as they were.
    context = multiprocessing.get_context("spawn")
    with _progress(len(todo), quiet) as step:
        if not todo:
            return list(results.values())
        with ProcessPoolExecutor(min(jobs, len(todo)), mp_context=context) as pool:
            running = {pool.submit(build_one, kernel, out): name for name, kernel in todo.items()}
            for future in as_completed(running):
                name = running[future]
                try:
                    results[name] = future.result()
                except BrokenProcessPool as error:  # killed: out of memory, say
                    results[name] = _result(todo[name], name, "failed", error=f"its process died: {error}")
                step(results[name])
    return list(results.values())


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("precompile", total=total)

        def step(result: dict[str, Any]) -> None:
            bar.update(task, advance=1, description=f"{result['name']} ({result['arch']})")

        yield step


def _print(results: list[dict[str, Any]], out: Path) -> None:
    from flashnorm.__main__ import console

    table = Table("kernel", "route", "arch", "state", "s", title=str(out), title_justify="left")
    for result in sorted(results, key=lambda r: (r["route"], r["name"])):
        state = "[red]failed[/red]" if result["error"] else result["state"]
        table.add_row(result["name"], result["route"], result["arch"], state, f"{result['seconds']:.1f}")
    console().print(table)
    for result in results:
        if result["error"]:
            print(f"{result['name']}: {result['error']}", file=sys.stderr)
