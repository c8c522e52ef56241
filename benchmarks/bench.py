"""One loop over operators, shapes, routes and peers: `python -m benchmarks.bench`, from the project's root.

    python -m benchmarks.bench --routes cute,cuda --peers all --json bench.json --png bench.png --budget 280 --check

    python -m benchmarks.bench --ops rmsnorm_quant,layernorm --shapes 1x4096,16384x7168     # a part of it
    python -m benchmarks.bench --host-only --peers none --check                             # what warm calls cost

Without a GPU the same loop measures the cpu route against PyTorch, eager and compiled, with `--threads`
threads. `measure.py` says how time is taken, `report.py` what the JSON holds, `bars.py` which bars `--check` holds
the run to, `peers.py` how another operator or peer is added.

Compiling takes more time than measuring, so it comes first: our kernels and FlashInfer's CUDA module are built in
the background (`prepare.py`), and meanwhile every other contender is called for the first time. The run stops before
`--budget` seconds are over and lists what it had to leave out; the JSON is rewritten after every shape, so that a
run that is cut off still leaves what it measured. A contender that fails is reported and left out, the others go on.
Exit status: 0; with `--check`, 1 where a bar was missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import flashnorm

from . import bars
from . import peers as field
from . import report as reporting
from .bars import Shape
from .peers import BENCHES, TABLE
from .report import progress
from .roofline import plot
from .run import HOST_SHAPE, Run

CPU_TABLE: tuple[Shape, ...] = (
    (1, 4096), (8, 4096), (64, 4096), (512, 4096), (1024, 8192), (4096, 4096), (128, 65536), (32768, 128),
)  # fmt: skip
QUICK: tuple[Shape, ...] = ((1, 4096), (64, 8192), (4096, 4096), (32768, 128))


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """A named table ("table": every operator's own; "cpu", "quick"), or shapes such as "1x4096,64x8192".

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    named: dict[str, tuple[Shape, ...]] = {"table": (), "norm": TABLE, "cpu": CPU_TABLE, "quick": QUICK}
    if text in named:
        return named[text]
    try:
        shapes = tuple(tuple(int(n) for n in part.split("x")) for part in text.split(","))
        if any(len(shape) != 2 or min(shape) < 1 for shape in shapes):
            raise ValueError
    except ValueError:
        known = ", ".join(named)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {known} and no list like 1x4096,8x4096") from None
    return shapes  # type: ignore[return-value]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--ops", type=_names, default=tuple(BENCHES), help=f"default: all, {', '.join(BENCHES)}")
    parser.add_argument(
        "--shapes",
        type=parse_shapes,
        help='"table" (each operator\'s own), "norm", "cpu", "quick", or 1x4096,8x4096,...',
    )
    parser.add_argument("--routes", type=_names, help="of cute,cuda,cpu,torch; default: those of the device")
    parser.add_argument("--peers", type=_names, default=("all",), help='"all", "none", or names')
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats, medians are reported")
    parser.add_argument("--threads", type=int, default=2, help="threads of the CPU measurement")
    parser.add_argument(
        "--same-buffers", action="store_true", help="one set of buffers, which stays in the caches, as small results do"
    )
    parser.add_argument("--budget", type=float, default=280.0, help="seconds; what does not fit is skipped")
    parser.add_argument("--json", help="where the report goes")
    parser.add_argument("--commit", default="", help="what the report names, where there is no git")
    parser.add_argument("--png", help="where the roofline picture goes")
    host = parser.add_mutually_exclusive_group()
    host.add_argument("--no-host", action="store_true", help="leave the host cost out")
    host.add_argument(
        "--host-only", action="store_true", help="the host cost alone, at the first of --shapes or 1x4096"
    )
    parser.add_argument("--check", action="store_true", help="hold the figures to the bars; exit 1 on a miss")
    parser.add_argument("--trace", action="store_true", help="print the traceback of every failure")
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.routes is None:
        args.routes = ("cute", "cuda") if args.device == "cuda" else ("cpu",)
    args.host_shape = args.shapes[0] if args.host_only and args.shapes else HOST_SHAPE
    if args.shapes is None:
        args.shapes = () if args.device == "cuda" else CPU_TABLE
    known = field.known_peers()
    if args.peers == ("all",):
        args.peers = tuple(known)
    elif args.peers == ("none",):
        args.peers = ()
    for name in args.peers:
        if name not in known:
            parser.error(f"unknown peer {name!r}; known: {', '.join(known)}")
    try:
        args.ops = tuple(field.named(args.ops))
    except KeyError as error:
        parser.error(f"unknown operator {error}; known: {', '.join(BENCHES)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    run = Run(args, ["python -m benchmarks.bench", *argv])
    machine = run.report["machine"]["device"]
    progress(f"flashnorm {flashnorm.__version__} on {machine}, {args.dtype}, budget {args.budget:.0f} s")
    if args.device == "cpu" and (run.report["machine"]["load_average"] or 0) > 1:
        progress("this machine is busy: CPU figures will say more about that than about any kernel")
    work = run.host_work() if args.host_only else run.work()
    with torch.no_grad():
        run.prepare(work)
        if not args.no_host:
            for name in args.ops:
                with run.clock("host"):
                    run.host(BENCHES[name])
        for bench, shape in () if args.host_only else work:
            run.measure(bench, shape)
    ok = True
    if args.check:
        ok = all(entry["ok"] for entry in bars.check(run.report, {name: BENCHES[name].bars for name in args.ops}))
    run.save()
    if args.png:
        title = f"{machine}, {args.dtype}, buffers past the cache"
        Path(args.png).parent.mkdir(parents=True, exist_ok=True)
        try:
            plot(run.report["rows"], args.png, title)
        except ImportError as error:
            progress(f"no picture: {error}")
    print(reporting.table(run.report))
    if args.check:
        print(bars.table(run.report["checks"]))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
