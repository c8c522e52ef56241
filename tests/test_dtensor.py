"""Norms of DTensors, on two processes: gloo on the CPU, NCCL where there are two GPUs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from tests.sharded import CHECKS, WORLD, start


@pytest.fixture(scope="module")
def said(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each process said of each check: nothing where it held."""
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    if device.type == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"NCCL needs {WORLD} GPUs, this machine has {torch.cuda.device_count()}")
    folder = tmp_path_factory.mktemp("sharded")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(start, (port, device.type, str(folder)), WORLD)
    return folder


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(name: str, said: Path) -> None:
    for rank in range(WORLD):
        file = said / f"{name}.{rank}"
        assert file.exists(), f"process {rank} failed before this check"
        assert not file.read_text(), f"process {rank}:\n{file.read_text()}"
