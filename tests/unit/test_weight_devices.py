"""Weights through memory of a GPU, which is played by host memory: its handle, and copies that run later than
they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import RefitError
from megarl.weight_sync import ipc
from megarl.weight_sync.ipc import IpcBuffer
from megarl.weight_sync.session import WeightReceiver, WeightSender, payload_for
from tests.unit.pretended_devices import Devices, pretend_devices, runtime_of

CUDA = torch.device("cuda", 0)
NAMES = "abcde"


def weights(step: int) -> dict[str, Tensor]:
    return {name: torch.full((5, 13), float(100 * step + number)) for number, name in enumerate(NAMES)}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    return pretend_devices(monkeypatch)


@pytest.fixture
def sender(devices: Devices) -> Iterator[WeightSender]:
    state: dict[str, Any] = {"step": 0}
    sender = WeightSender(lambda: iter(weights(state["step"]).items()), runtime_of(devices, CUDA))
    sender.state = state  # type: ignore[attr-defined]
    yield sender
    sender.close()


def sent(sender: WeightSender, step: int) -> Iterator[dict[str, Any]]:
    """Payloads of groups of one weight, as they come out of a message."""
    sender.state["step"] = step  # type: ignore[attr-defined]
    sender.begin(step)
    for name in NAMES:
        message = msgpack.packb(sender.send([name]), strict_types=True)
        yield dict(payload_for(msgpack.unpackb(message), "GPU-5"))


def test_groups_are_acknowledged_when_their_copies_have_run_and_the_handle_is_made_and_opened_once(
    devices: Devices, sender: WeightSender
) -> None:
    receiver = WeightReceiver(sender.manifest, torch.device("cuda"))
    for step in range(3):
        loaded: dict[str, Tensor] = {}

        def copy(name: str, weight: Tensor, into: dict[str, Tensor] = loaded) -> None:
            into[name] = weight.clone()

        for payload in sent(sender, step):
            with receiver.group(payload) as tensors:
                for name, tensor in tensors:
                    devices.queued.append(lambda name=name, tensor=tensor: copy(name, tensor))
                assert devices.queued
            assert not devices.queued
        assert receiver.version == step
        assert all(torch.equal(loaded[name], weight) for name, weight in weights(step).items())
    assert (len(devices.handles), devices.opened) == (1, [2])
    receiver.close()


def test_a_copy_that_fails_on_the_device_is_no_acknowledgement(
    devices: Devices, sender: WeightSender
) -> None:
    receiver = WeightReceiver(sender.manifest, CUDA)

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"), receiver.group(next(sent(sender, 0))):
        devices.queued.append(fail)
    assert (
        sender._mailbox is not None
        and sender._mailbox._look(0.0) is None
        and [one.read for one in sender._mailbox._everybody] == [0]
    )
    receiver.close()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"storage_cls": "builtins.eval"}, "storage_cls"),
        ({"storage_handle": "text"}, "storage_handle"),
        ({"event_sync_required": 1}, "event_sync_required"),
        ({"nbytes": None}, "nbytes"),
        ({"tensor_offset": ...}, "tensor_offset"),
    ],
)
def test_a_handle_with_other_fields_or_types_is_refused(
    devices: Devices, changes: dict[str, Any], field: str
) -> None:
    handle = IpcBuffer.create(100, CUDA).handle()
    device = {name: value for name, value in {**handle["device"], **changes}.items() if value is not ...}
    with pytest.raises(RefitError, match=rf"has other fields than megarl's: {field}\."):
        IpcBuffer.attach({**handle, "device": device}, CUDA)
    assert devices.opened == []


def test_a_torch_that_shares_memory_by_other_fields_is_refused(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = IpcBuffer.create(100, CUDA).handle()

    def rebuild(storage_handle: bytes, fabric: int) -> None: ...

    monkeypatch.setattr(torch.multiprocessing.reductions, "rebuild_cuda_tensor", rebuild)
    for use in (lambda: IpcBuffer.create(100, CUDA), lambda: IpcBuffer.attach(handle, CUDA)):
        with pytest.raises(
            RefitError,
            match=r"shares device memory with other fields than megarl expects: \['dtype', .*'fabric'",
        ):
            use()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, []),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
            [
                "max_split_size_mb:64,expandable_segments:False",
                "max_split_size_mb:64,expandable_segments:True",
            ],
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            ["expandable_segments:False", "expandable_segments:True"],
        ),
    ],
)
def test_the_buffer_lies_in_a_segment_that_does_not_grow(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: list[str]
) -> None:
    said: list[str] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ipc, "_set_allocator", said.append)
    monkeypatch.setattr(torch, "empty", lambda *arguments, **options: [].append(said.append("buffer")))
    ipc._device_buffer(10, CUDA)
    assert said == [*expected[:1], "buffer", *expected[1:]]
