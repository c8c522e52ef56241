"""This machine's processor: what code for it depends on, and whether the `cpu` route serves it."""

from __future__ import annotations

import functools
import platform
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cpu:
    """This machine's processor.

    Attributes:
        machine: "x86_64", "aarch64", ...
        features: what -march=native depends on, sorted; part of the key of host artefacts.
    """

    machine: str
    features: tuple[str, ...]

    def reason_unserved(self) -> str | None:
        """Why the `cpu` route does not serve it, or None: x86-64 needs AVX2 and FMA, AArch64 nothing."""
        if self.machine in ("aarch64", "arm64"):
            return None
        if self.machine not in ("x86_64", "AMD64"):
            return f"the processor is {self.machine}, neither x86-64 nor AArch64"
        lacking = [name for name in ("avx2", "fma") if name not in self.features]
        return f"the processor lacks {' and '.join(lacking)}" if lacking else None

    @property
    def vectors(self) -> tuple[str, ...]:
        """Of the features, those that decide whether the `cpu` route serves and how wide its vectors are."""
        return tuple(name for name in self.features if re.fullmatch(r"avx|avx2|avx512\w+|fma|asimd\w*|sve\w*", name))


# Instruction set extensions as /proc/cpuinfo calls them. Its other words (kernel features, mitigations)
# change with the kernel and say nothing about code.
_ISA = re.compile(
    r"3dnow.*|abm|adx|aes|amx.*|apx.*|avx.*|bmi\d|cl(demote|flushopt|wb|zero)|cmpccxadd|cx16|enqcmd|f16c|fma\d?|fsgsbase"
    r"|gfni|hle|hreset|lahf_lm|lwp|lzcnt|mov(be|dir.*)|mwaitx|pclmul.*|pku|pni|popcnt|prefetch.*|ptwrite|raoint"
    r"|rd(pid|rand|rnd|seed)|rtm|serialize|sha.*|sm[34].*|s?sse.*|tbm|uintr|vaes|vpclmul.*|waitpkg|wbnoinvd|xop|xsave.*"
)


def parse_cpuinfo(text: str, machine: str) -> Cpu:
    """A `Cpu` from the text of /proc/cpuinfo: what every processor of the machine has."""
    lists = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, flags=re.MULTILINE)
    common = set.intersection(*(set(words.split()) for words in lists)) if lists else set()
    if machine not in ("aarch64", "arm64"):
        return Cpu(machine, tuple(sorted(word for word in common if _ISA.fullmatch(word))))
    # -mcpu=native goes by the part number too.
    parts = {f"{a}-{b}" for a, b in re.findall(r"^CPU (implementer|part)\s*:\s*(\S+)$", text, flags=re.MULTILINE)}
    return Cpu(machine, tuple(sorted(common | parts)))


def model_name(text: str) -> str | None:
    """What /proc/cpuinfo calls the processor, where it names it."""
    found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(\S.*)$", text, flags=re.MULTILINE)
    return found[1].strip() if found else None


@functools.cache
def detect_cpu() -> Cpu:
    """This machine's processor."""
    machine = platform.machine()
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"), machine)
    except OSError:
        return Cpu(machine, tuple(filter(None, (platform.processor(),))))
