"""Which device a process and a run compute on: what is asked for, what is there, and no CPU by mistake. A GPU
is pretended."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.distributed import nvml
from megarl.distributed.device import DeviceRuntime, runtime, will_use_cuda
from megarl.errors import ConfigError
from megarl.models.megatron import cuda_redirect
from megarl.run.start import uses_gpus
from tests.dist.batches import make_batch
from tests.gpu import conftest as gpu_tests
from tests.gpu import jobs
from tests.models import make_tiny, policy_config
from tests.tables import read_table
from tests.tiers import slow

TABLES = read_table("device.yaml")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch says that there is a GPU; the runtime of this process is made anew, before and after."""
    runtime.cache_clear()
    _pretend_a_gpu(monkeypatch.setattr)
    monkeypatch.delenv("MEGARL_DEVICE", raising=False)
    yield
    runtime.cache_clear()


def _pretend_a_gpu(replace: Any = setattr) -> None:
    replace(torch.cuda, "is_available", lambda: True)
    replace(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("said", "device", "backend"),
    [("cpu", "cpu", "gloo"), ("auto", "cuda:1", "nccl"), ("", "cuda:1", "nccl"), ("cuda", "cuda:1", "nccl")],
)
def test_the_environment_decides_on_a_machine_with_gpus(
    said: str, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_DEVICE", said)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (runtime().device, runtime().backend) == (torch.device(device), backend)
    assert will_use_cuda() is (device != "cpu")
    assert cuda_redirect.needed() is (device == "cpu")


@pytest.mark.usefixtures("gpu")
def test_megatron_is_redirected_beside_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_DEVICE", "cpu")
    cuda_redirect.install()
    try:
        assert torch.cuda.current_device() == torch.device("cpu")
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (False, 0)
        with cuda_redirect.cuda_literals():
            assert torch.zeros(2, device="cuda").device.type == "cpu"
    finally:
        cuda_redirect.restore()
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == (True, 2)


def test_a_device_that_there_is_none_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_DEVICE", "gpu")
    with pytest.raises(ValueError, match="MEGARL_DEVICE = 'gpu': expected auto, cpu or cuda"):
        will_use_cuda()


# the ranks of a run


def on_machine(monkeypatch: pytest.MonkeyPatch, *, gpus: int = 0, job: str = "", said: str = "") -> None:
    monkeypatch.setattr(nvml, "count_devices", lambda: gpus)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("MEGARL_DEVICE", said)


@pytest.mark.parametrize(
    ("device", "of_ray", "machine", "expected"),
    TABLES["what the ranks run on"],
)
def test_what_the_ranks_run_on(
    device: str, of_ray: float, machine: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, **machine)
    assert uses_gpus(device, of_ray) is expected


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"job": "4711"}, "this is job 4711 of Slurm"),
        ({"gpus": 8}, "the NVIDIA driver has 8 GPUs"),
        ({"gpus": 4, "job": "4711"}, "the NVIDIA driver has 4 GPUs"),
    ],
    ids=["slurm", "driver", "both"],
)
def test_auto_takes_no_cpu_where_gpus_are_expected(
    machine: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, **machine)
    with pytest.raises(ConfigError, match=message) as refused:
        uses_gpus("auto", 0.0)
    assert "cluster.device=cpu" in str(refused.value)


@pytest.mark.parametrize(("device", "said"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_two_different_devices_are_refused(device: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, said=said)
    with pytest.raises(ConfigError, match=f"cluster.device = '?{device}'?.*MEGARL_DEVICE = {said}"):
        uses_gpus(device, 8)


def test_gpus_are_counted_by_the_driver_and_else_by_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = SimpleNamespace(NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlShutdown=lambda: None)
    monkeypatch.setattr(nvml, "_KERNEL_LIST", tmp_path / "gpus")
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**vars(nothing), nvmlDeviceGetCount=lambda: 4))
    assert nvml.count_devices() == 4
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.count_devices() == 0
    for name in ("0000:1a:00.0", "0000:3b:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert nvml.count_devices() == 2


# a worker


def _start_beside_a_gpu(pretended: bool) -> None:
    if pretended:
        _pretend_a_gpu()
    jobs.start("cpu")


@slow
def test_a_worker_on_the_cpu_of_a_machine_with_gpus_computes_the_same(tmp_path: Path) -> None:
    """Bit for bit what it computes where there is none."""
    config = policy_config(make_tiny(tmp_path / "model", "qwen2", tied=True))
    batches = [make_batch(rows=8, length=12, seed=seed) for seed in (1, 2)]
    found = []
    for pretended in (False, True):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            1, mp_context=context, initializer=_start_beside_a_gpu, initargs=(pretended,)
        ) as process:
            found.append(process.submit(jobs.train, config, batches).result(timeout=300))
    plain, beside = found
    assert plain["measured"] == beside["measured"]
    assert jobs.differing(plain["weights"], beside["weights"]) == []


def test_room_is_what_is_free_and_what_the_allocator_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 100 bytes, of which 20 are free and the allocator keeps 30 that nothing uses; a CPU has no
    room of its own."""
    device = DeviceRuntime(torch.device("cuda", 0), "nccl")
    monkeypatch.setattr(DeviceRuntime, "free_memory", lambda self: 20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    assert device.has_room(25, 0.25) and not device.has_room(26, 0.25)
    assert not DeviceRuntime(torch.device("cpu"), "gloo").has_room(0, 0.0)


@pytest.mark.parametrize(
    ("devices", "shares", "version", "lack"),
    [
        (2, False, 0, None),
        (1, True, 23_102, None),
        (1, True, 22_809, "needs NCCL 2.30 or newer, and this is 22809"),
        (1, False, 23_102, "needs two CUDA devices"),
        (0, True, 23_102, "needs two CUDA devices"),
    ],
)
def test_two_ranks_have_two_devices_or_one_that_nccl_lets_them_share(
    monkeypatch: pytest.MonkeyPatch, devices: int, shares: bool, version: int, lack: str | None
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", str(int(shares)))
    monkeypatch.setattr(gpu_tests, "nccl_version", lambda: version)
    found = gpu_tests.lack_of_devices(devices)
    assert found == lack if lack is None else found is not None and lack in found


def test_the_version_of_nccl_is_that_of_the_library_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch tells the one that it was built with, also where another is preloaded."""

    def answer(place: Any) -> None:
        place._obj.value = 23_102

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(ncclGetVersion=answer))
    assert gpu_tests.nccl_version() == 23_102
    monkeypatch.setattr(ctypes, "CDLL", lambda name: ctypes.cdll.LoadLibrary(f"no-{name}"))
    assert gpu_tests.nccl_version() == 0


@pytest.mark.parametrize("refused", [False, True])
def test_pages_are_locked_where_they_are(
    refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal is a warning, and the error that it leaves in CUDA is taken away. There is no GPU: this shows
    the calls alone."""
    calls: list[Any] = []

    def register(*arguments: int) -> int:
        calls.append(arguments)
        return int(refused)

    def launch(size: int, device: torch.device) -> None:
        calls.append(device)
        raise RuntimeError("CUDA error: invalid argument")

    library = SimpleNamespace(cudaHostRegister=register, cudaError=SimpleNamespace(success=0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    tensor, empty = torch.zeros(3), torch.empty(0)
    monkeypatch.setattr(torch, "ones", launch)
    there, device = DeviceRuntime(torch.device("cuda", 0), "nccl"), torch.device("cuda", 0)
    there.lock_pages(empty)
    DeviceRuntime(torch.device("cpu"), "gloo").lock_pages(tensor)
    assert calls == []
    there.lock_pages(tensor)
    assert calls == [(tensor.data_ptr(), 12, 0), *([device] if refused else [])]
    assert ("12 bytes of host memory cannot be locked" in caplog.text) is refused
