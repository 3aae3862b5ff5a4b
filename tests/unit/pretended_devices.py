"""Device memory that is played by host memory: torch's handles of it have their real fields, and copies wait
in a queue until a wait."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megarl.distributed.device import DeviceRuntime
from megarl.weight_sync import ipc, session


@dataclass
class Devices:
    """What was done to device memory.

    Attributes:
        handles: torch's handles that were made, by number.
        opened: device that each opening named.
        queued: copies that have not run.
    """

    handles: list[Tensor] = field(default_factory=list)
    opened: list[Any] = field(default_factory=list)
    queued: list[Callable[[], None]] = field(default_factory=list)

    def run_queue(self) -> None:
        while self.queued:
            self.queued.pop(0)()

    def share(self, data: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """As ``reduce_tensor`` of a tensor on a GPU: what opens it, and its fifteen arguments."""
        self.handles.append(data)
        number = len(self.handles) - 1
        kind, storage = type(data), type(data._typed_storage())
        memory = (0, bytes([number]) * 64, data.numel(), 512)
        counter = (b"/torch_counter", 3, b"e" * 64, True)
        return reductions.rebuild_cuda_tensor, (
            kind,
            data.size(),
            data.stride(),
            0,
            storage,
            data.dtype,
            *memory,
            False,
            *counter,
        )

    def open(self, **fields: Any) -> Tensor:
        """As ``rebuild_cuda_tensor``, which takes its arguments by name too."""
        self.opened.append(fields["storage_device"])
        data = self.handles[fields["storage_handle"][0]]
        assert (fields["tensor_cls"], fields["dtype"], fields["tensor_size"]) == (
            Tensor,
            torch.uint8,
            data.size(),
        )
        assert (
            fields["storage_cls"] is torch.storage.TypedStorage
            and fields["tensor_stride"] == (1,)
            and not fields["requires_grad"]
        )
        return data


@dataclass(frozen=True)
class PretendedRuntime(DeviceRuntime):
    """The runtime of a GPU that is played."""

    devices: Devices

    def synchronize(self) -> None:
        self.devices.run_queue()

    def free_memory(self) -> int:
        return 2**30

    def identity(self) -> str:
        return "GPU-5"


def pretend_devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    """Let this process have GPUs, of which device 2 is the current one."""
    devices = Devices()
    real = reductions.rebuild_cuda_tensor
    monkeypatch.setattr(reductions, "reduce_tensor", devices.share)
    # with the signature of torch's, which says what the fields are
    monkeypatch.setattr(
        reductions, "rebuild_cuda_tensor", functools.wraps(real)(lambda **fields: devices.open(**fields))
    )
    monkeypatch.setattr(ipc, "_device_buffer", lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    runtime_on = session.runtime_on
    monkeypatch.setattr(session, "runtime_on", lambda device: runtime_of(devices, runtime_on(device).device))
    return devices


def runtime_of(devices: Devices, device: torch.device) -> PretendedRuntime:
    return PretendedRuntime(device, "nccl", devices)
