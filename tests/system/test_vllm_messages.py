"""What the driver tells engines of a GPU passes vLLM's own messages between its processes, which take plain
values alone."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from megarl.weight_sync.ipc import IpcBuffer
from tests.tiers import slow
from tests.unit.pretended_devices import pretend_devices

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
CUDA = torch.device("cuda", 0)


def through_vllm(message: Any) -> Any:
    """Encoded as a call of ``collective_rpc`` on its way to the process of the engine, and decoded there."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    frames = MsgpackEncoder().encode(
        (0, 7, "collective_rpc", ["megarl_call", None, ["update_weights", message]])
    )
    return MsgpackDecoder().decode(frames)[-1][-1][-1]


@slow
def test_handles_of_device_memory_pass_the_messages_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    devices = pretend_devices(monkeypatch)
    buffer = IpcBuffer.create(100, CUDA)
    came = through_vllm(
        {"update_info": {"handles": {"GPU-5": {"buffer": buffer.handle(), "version": 3, "checksum": None}}}}
    )
    reader = IpcBuffer.attach(came["update_info"]["handles"]["GPU-5"]["buffer"], torch.device("cuda", 4))
    buffer.slot(0)[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert reader.slot(0)[:4].tolist() == [1, 2, 3, 0] and devices.opened == [4]
    reader.close()
    buffer.close()


@slow
def test_torch_s_own_handle_does_not_pass_them() -> None:
    """What the test above would not see if vLLM's messages took anything."""
    with pytest.raises(TypeError, match="not serializable"):
        through_vllm({"handle": (torch.Tensor, torch.uint8)})
