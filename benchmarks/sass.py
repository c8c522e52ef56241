"""Instructions an element, from the machine code: `python -m benchmarks.sass`, from the project's root; no GPU.

    python -m benchmarks.sass --ops silu,silu_quant --shapes 99840x512
    python -m benchmarks.sass --ops fp4,mxfp4,mxfp8 --shapes 16384x7168 --routes cute,cuda --list

Of the kernel that a launch plan picks for the shape: the instructions of the shortest way through it that does all of
its loads and stores, a loop once, a subroutine not at all, divided by the elements of a thread. Beside all of them
what they keep busy, in cycles of a quarter of an SM for a warp and an element (sm_90, CUDA C++ programming guide,
arithmetic throughput): a slot each; two of the integer and comparison unit; eight of the unit of reciprocals and
exponentials. The largest of the three times elements / 32 / (4 SMs' quarters) / clock is the least time.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tune_cases import CASES
from flashnorm.kernels import plans
from flashnorm.kernels.tile import GROUP, needs_of, sm_of

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)([^;]*);")
LABEL = re.compile(r"^(\.L_\w+):")
SPECIAL = ("MUFU", "F2F", "I2F", "F2I", "FRND", "POPC", "FLO", "BREV")
# Not on the integer and comparison unit: fp32 and fp16 arithmetic, multiplications, memory, control.
ELSEWHERE = re.compile(
    r"FFMA|FMUL|FADD|HFMA2|HADD2|HMUL2|IMAD|LD\w*|ST[GSL]|ULDC|DEPBAR|SHFL|BAR|BRA|EXIT|CALL|RET|BS\w+|WARPSYNC|S2U?R|CS2R|"
    r"R2UR|U[A-Z]\w+|ACQBULK|PREEXIT|ERRBAR|CCTL|MEMBAR"
)


@dataclass
class Count:
    """What the way through a kernel takes, in instructions of a thread."""

    text: str
    kinds: Counter[str]

    @property
    def slots(self) -> int:
        return sum(self.kinds.values())

    @property
    def integer(self) -> int:
        return 2 * sum(n for kind, n in self.kinds.items() if not ELSEWHERE.fullmatch(kind) and kind not in SPECIAL)

    @property
    def special(self) -> int:
        return 8 * sum(n for kind, n in self.kinds.items() if kind in SPECIAL)


def disassembler() -> str:
    wheels = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/**/bin/nvdisasm"))
    found = shutil.which("nvdisasm") or next(map(str, wheels), None)
    if found is None:
        raise SystemExit("no nvdisasm")
    return found


def functions(cubin: Path) -> dict[str, list[str]]:
    """Name -> lines of the listing."""
    text = subprocess.run([disassembler(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    out: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(".text."):
            lines = out.setdefault(line[len(".text.") :].rstrip(":"), [])
        lines.append(line)
    return out


def count(lines: list[str]) -> Count:
    """The shortest way that does the most loads and stores; jumps back are not taken."""
    code: list[tuple[str, str, str]] = []  # guard, operation, operands
    labels: dict[str, int] = {}
    for line in lines:
        if label := LABEL.match(line.strip()):
            labels[label[1]] = len(code)
        elif found := LINE.search(line):
            code.append((found[2] or "", found[3], found[4]))
    worst = (-(10**9), 0, -1)
    best: list[tuple[int, int, int]] = [worst] * (len(code) + 1)  # (memory accesses, -instructions, next)
    for at in range(len(code) - 1, -1, -1):
        guard, operation, operands = code[at]
        base = operation.split(".")[0]
        ways = [at + 1]
        if base == "EXIT":
            ways = [] if not guard else [at + 1]
            if not guard:
                best[at] = (0, -1, -1)
                continue
        elif base == "BRA":
            target = re.search(r"\((\.L_\w+)\)", operands)
            to = labels.get(target[1], -1) if target else -1
            conditional = bool(guard) or bool(re.match(r"\s*!?U?P\d", operands)) or ".DIV" in operation
            ways = [to] if not conditional else [at + 1, to]
            ways = [way for way in ways if way > at]
        elif base == "RET":
            ways = []
        reached = max(((*best[way][:2], way) for way in ways), default=worst)
        moves = base in ("LDG", "STG", "LDS", "STS", "LDGSTS", "SHFL")
        best[at] = (reached[0] + moves, reached[1] - 1, reached[2])
    kinds: Counter[str] = Counter()
    text, at = [], 0
    while 0 <= at < len(code):
        kinds[code[at][1].split(".")[0]] += 1
        text.append(" ".join(filter(None, code[at])))
        at = best[at][2]
    kinds.pop("NOP", None)
    return Count("\n".join(text), kinds)


def of_cute(op: str, rows: int, hidden_size: int, arch: str, folder: Path) -> tuple[Count, int, str]:
    """(count, elements of a thread, tile)."""
    from benchmarks.tune_cute import describe
    from flashnorm.kernels.compile import compile_variant

    variant = CASES[op].variant(hidden_size)
    tile = plans.pick(hidden_size, variant.vec, needs_of(variant), sm_of(arch), rows)
    (folder / "kernel.cubin").write_bytes(
        compile_variant(variant, arch, plans=((None, tile),), inspect=True).cubin or b""
    )
    (lines,) = functions(folder / "kernel.cubin").values()
    return count(lines), tile.rounds * tile.turns * tile.abreast * GROUP, describe(tile)


def of_cuda(op: str, arch: str, folder: Path) -> dict[str, Count]:
    """Kernel name -> count, of all tiles."""
    from flashnorm.jit.codegen import unit
    from flashnorm.jit.toolchain import find_host_compiler, find_nvcc, find_tvm_ffi, nvcc_flags

    nvcc, host, ffi = find_nvcc(), find_host_compiler(), find_tvm_ffi()
    assert nvcc and host and ffi
    target = nvcc.target(arch)
    assert target
    case = CASES[op]
    (folder / "kernel.cu").write_text(unit(case.program, case.dtypes, "cuda"))
    csrc = Path(__file__).resolve().parent.parent / "csrc"
    includes = [f"-I{csrc}", *(f"-I{path}" for path in ffi.include_dirs)]
    command = [str(nvcc.path), *nvcc_flags(nvcc, target, host), *includes, "-cubin", "kernel.cu", "-o", "kernel.cubin"]
    subprocess.run(command, check=True, cwd=folder)
    return {name: count(lines) for name, lines in functions(folder / "kernel.cubin").items()}


def report(op: str, shape: str, route: str, tile: str, got: Count, elements: int) -> str:
    return (
        f"{route:4} {op:10} {shape:12} {got.slots / elements:6.1f} slots {got.integer / elements:6.1f} integer "
        f"{got.special / elements:6.1f} special   {elements} elements a thread, {tile}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ops", default="fp4,mxfp4,mxfp8,silu,silu_quant")
    parser.add_argument("--shapes", default="16384x7168")
    parser.add_argument("--routes", default="cute")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--list", action="store_true", help="what is counted, by kind")
    parser.add_argument("--text", action="store_true", help="the instructions")
    args = parser.parse_args()
    for op in args.ops.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if "cuda" in args.routes:
                for kernel, got in of_cuda(op, args.arch, folder).items():
                    tile = re.search(r"4TileILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E", kernel)
                    each = int(tile[3]) * int(tile[4]) if tile else 1
                    shown = f"<{', '.join(tile.groups())}>" if tile else kernel
                    print(report(op, "", "cuda", shown, got, max(1, each) * GROUP), flush=True)
                    if args.list:
                        print("    ", dict(got.kinds.most_common()))
            if "cute" in args.routes:
                for shape in args.shapes.split(","):
                    rows, hidden_size = map(int, shape.split("x"))
                    got, elements, described = of_cute(op, rows, hidden_size, args.arch, folder)
                    print(report(op, shape, "cute", described, got, elements), flush=True)
                    if args.list:
                        print("    ", dict(got.kinds.most_common()))
                    if args.text:
                        print(got.text)


if __name__ == "__main__":
    main()
