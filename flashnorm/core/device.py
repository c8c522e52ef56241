"""The only asker of the GPU. Everything else sees `DeviceFacts`, plain data that a test can make up."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """What dispatch needs to know of a device.

    Attributes:
        kind: "cuda" (NVIDIA), "hip", "cpu", or whatever torch calls it.
        capability: (major, minor) of a CUDA device.
    """

    kind: str
    capability: tuple[int, int] | None = None

    @property
    def sm(self) -> int:
        return 0 if self.capability is None else self.capability[0] * 10 + self.capability[1]


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    if torch.version.hip is not None:
        return DeviceFacts("hip")
    return DeviceFacts("cuda", torch.cuda.get_device_capability(index))


def facts(device: torch.device) -> DeviceFacts:
    """Facts of a device; asks CUDA only about a CUDA device (never initialises it for a CPU one)."""
    if device.type != "cuda":
        return DeviceFacts(device.type)
    return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)


def present(device: torch.device) -> bool:
    """Whether a device is there; CUDA is asked for no memory."""
    if device.type == "cuda":
        return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    try:
        torch.empty(0, device=device)
    except Exception:  # each kind of device has errors of its own
        return False
    return True


def visible() -> list[torch.device]:
    """Every device to report on: the GPUs, then the CPU."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    return [*(torch.device("cuda", i) for i in gpus), torch.device("cpu")]


def several_gpus() -> bool:
    return torch.cuda.device_count() > 1


def capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
