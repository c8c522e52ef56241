"""What `flashnorm doctor` says of a machine: what a bug report needs, and uncut where no terminal is."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from flashnorm import __main__ as cli
from flashnorm import doctor
from flashnorm.core import device as devices
from flashnorm.core.op import OPS
from flashnorm.jit import cpu, toolchain

pytestmark = pytest.mark.cpu_only

CPUINFO = "processor\t: 0\nmodel name\t: Some Processor 9000\nflags\t\t: fma sse2 avx2 avx512f avx512_bf16 pni\n"


def test_nothing_is_cut_where_no_terminal_is(capsys):
    cli.main(["doctor"])
    printed = capsys.readouterr().out
    public = {op.called for op in OPS.values()} & set(OPS)
    assert max(map(len, public)) > 33 and not [name for name in public if name not in printed]
    assert "\u2026" not in printed


def test_the_compiler_has_a_name_and_a_kind():
    found = toolchain.HostCompiler(("ccache", "clang++-19"), "clang", "Debian clang version 19.1.7", "x86_64-linux-gnu")
    wanted = "ccache clang++-19 (clang) Debian clang version 19.1.7 x86_64-linux-gnu"
    assert doctor._tool(found) == {"found": True, "detail": wanted}


def test_the_processor_has_a_model_and_vectors(monkeypatch):
    monkeypatch.setattr(doctor, "_read", lambda path: CPUINFO)
    found = doctor._tool(cpu.parse_cpuinfo(CPUINFO, "x86_64"))
    assert found["detail"] == "Some Processor 9000, x86_64, avx2 avx512_bf16 avx512f fma"
    monkeypatch.setattr(doctor, "_read", lambda path: "")
    arm = cpu.parse_cpuinfo("Features\t: fp asimd sve sve2 crc32\n", "aarch64")
    assert doctor._tool(arm)["detail"] == "aarch64, asimd sve sve2"
    assert doctor._read(str(Path(__file__).parent / "there is no such file")) == ""


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (root)", "580.159.03"),
        ("", None),
    ],
)
def test_the_driver_is_read(line, version, monkeypatch):
    text = f"{line}\nGCC version:  gcc version 12.2.0 (Debian)\n"
    assert doctor.driver(text) == version
    monkeypatch.setattr(doctor, "_read", lambda path: text)
    assert doctor.versions().get("nvidia driver") == version


def test_a_gpu_has_a_model(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"A GPU, {device}")
    monkeypatch.setattr(devices, "visible", lambda: [torch.device("cuda", 1)])
    monkeypatch.setattr(devices, "facts", lambda device: devices.DeviceFacts("cuda", (9, 0)))
    found = doctor.report([toolchain.parse_arch("sm_100a")])["devices"]
    assert [device["model"] for device in found] == ["A GPU, cuda:1", None]
    doctor.run(argparse.Namespace(arch=[], json=False))
    assert "cuda:1 A GPU, cuda:1 compute capability 9.0" in capsys.readouterr().out
