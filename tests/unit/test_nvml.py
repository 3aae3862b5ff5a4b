"""NVIDIA's management library, with a stand-in for it: which GPU is asked, what is done where it does not
answer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.distributed import nvml
from megarl.distributed.device import DeviceRuntime
from megarl.models.policy.lm_policy import gpu_metrics


class NVMLError(Exception): ...


def stand_in(**broken: Callable[..., Any]) -> SimpleNamespace:
    """Four GPUs; the handle of one is its index."""
    uuids = [f"GPU-{index}{index}" for index in range(4)]
    answers: dict[str, Any] = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda name: uuids.index(name),
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetUUID": lambda handle: uuids[handle],
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(free=(handle + 1) * 2**30),
        "nvmlDeviceGetPowerUsage": lambda handle: 300_000 + handle,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=10 * handle),
    }
    return SimpleNamespace(**{**answers, **broken})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda **broken: monkeypatch.setitem(sys.modules, "pynvml", stand_in(**broken))


def fails(*arguments: Any) -> Any:
    raise NVMLError("no answer")


@pytest.mark.parametrize(
    ("visible", "physical"),
    [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("GPU-33, 1", [3, 1]), (" ", [0, 1, 2, 3])],
)
def test_a_gpu_is_the_one_that_torch_counts(
    visible: str | None, physical: list[int], library: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for device_id, index in enumerate(physical):
        assert nvml.device_id_to_physical_device_id(device_id) == index
        assert nvml.get_device_uuid(device_id) == f"GPU-{index}{index}"
        assert nvml.get_free_memory_bytes(device_id) == (index + 1) * 2**30
        figures = nvml.gpu_figures(device_id)
        assert (figures.free_mb, figures.power_w, figures.utilization_percent) == (
            (index + 1) * 1024,
            300 + index / 1000,
            10 * index,
        )
    if visible and visible.strip():
        with pytest.raises(RuntimeError, match="names 2"):
            nvml.get_device_uuid(2)


def test_what_a_gpu_does_not_say_is_left_out(library: Callable[..., None]) -> None:
    library(nvmlDeviceGetPowerUsage=fails)
    runtime = DeviceRuntime(torch.device("cuda", 1), "nccl")
    assert runtime.identity() == "GPU-11" and runtime.free_memory() == 2 * 2**30
    assert runtime.gpu_figures() == {"free_memory_mb": 2048.0, "utilization_percent": 10.0}
    assert DeviceRuntime(torch.device("cpu"), "gloo").gpu_figures() == {}


FAULTS = {"driver": {"nvmlInit": fails}, "device": {"nvmlDeviceGetHandleByIndex": fails}, "no library": None}


@pytest.mark.parametrize("broken", FAULTS.values(), ids=FAULTS)
def test_a_library_that_fails_ends_no_run(
    broken: dict[str, Any] | None, library: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library(**(broken or {}))
    if broken is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RuntimeError, match="NVML"):
        nvml.get_free_memory_bytes(0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="by-torch"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9))
    runtime = DeviceRuntime(torch.device("cuda", 0), "nccl")
    assert (runtime.identity(), runtime.free_memory(), runtime.gpu_figures()) == ("GPU-by-torch", 7, {})


def test_figures_of_all_workers_become_metrics() -> None:
    full = {"free_memory_mb": 2048.0, "power_w": 300.0, "utilization_percent": 40.0}
    other = {"free_memory_mb": 1024.0, "power_w": 500.0, "utilization_percent": 60.0}
    assert gpu_metrics([full, other]) == {
        "free_memory_gib": 1.0,
        "power_w": 800.0,
        "utilization_percent": 50.0,
    }
    assert gpu_metrics([full, {"power_w": 1.0}]) == {"power_w": 301.0}
    assert gpu_metrics([{}, {}]) == {}
