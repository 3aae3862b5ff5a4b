"""Manifest, IPC buffer, sender and receiver of a refit, across real processes where it matters."""

from __future__ import annotations

import gc
import os
import re
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.distributed.device import DeviceRuntime
from megarl.errors import RefitError, StateError
from megarl.weight_sync import plan
from megarl.weight_sync.ipc import SLOTS, IpcBuffer, SharedBlock
from megarl.weight_sync.manifest import LIST_BYTES, Manifest, pack
from megarl.weight_sync.plan import checksum
from megarl.weight_sync.session import WeightReceiver, WeightSender, payload_for
from tests.memory_limit import no_more_memory_than
from tests.open_files import open_files

CPU = torch.device("cpu")


def weights(step: int = 0) -> dict[str, Tensor]:
    """Every size and type that may come: odd, empty, a scalar, 16 bit, 8 bit; other numbers at each step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "embed": torch.randn(131, 48, generator=generator),
        "layer.q": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        "layer.empty": torch.empty(0, 5),
        "layer.scale": torch.randn((), generator=generator),
        "layer.fp8": torch.randn(33, generator=generator).to(torch.float8_e4m3fn),
        "norm": torch.randn(5, generator=generator, dtype=torch.float64),
    }


class Model:
    """What a backend is to a sender."""

    def __init__(self) -> None:
        self.state = weights()
        self.closed = 0

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from self.state.items()
        finally:
            self.closed += 1


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def sender(model: Model) -> Iterator[WeightSender]:
    sender = WeightSender(model.stream, DeviceRuntime(CPU, "gloo"), with_checksum=True)
    yield sender
    sender.close()


@pytest.fixture
def receiver(sender: WeightSender) -> Iterator[WeightReceiver]:
    receiver = WeightReceiver(Manifest.from_description(sender.manifest.description()), CPU)
    yield receiver
    receiver.close()


def payloads(sender: WeightSender, version: int, budget: int | None = None) -> Iterator[Any]:
    room = sender.begin(version)
    for group in sender.manifest.groups(budget or room):
        yield payload_for(sender.send(group.names), "CPU-engine")


def transfer(
    sender: WeightSender, receiver: WeightReceiver, version: int, budget: int | None = None
) -> dict[str, Tensor]:
    received = {}
    for payload in payloads(sender, version, budget):
        with receiver.group(payload) as tensors:
            received.update({name: tensor.clone() for name, tensor in tensors})
    return received


def assert_same(received: dict[str, Tensor], sent: dict[str, Tensor]) -> None:
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
        assert torch.equal(received[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), (
            name
        )


# whole refits


@pytest.mark.parametrize("budget", [None, 25_600, 26_000])
def test_what_arrives_is_what_was_sent_at_every_version(
    sender: WeightSender, receiver: WeightReceiver, model: Model, budget: int | None
) -> None:
    ipc_buffers = set()
    for version in range(4):
        model.state = weights(version)
        assert_same(transfer(sender, receiver, version, budget), model.state)
        assert receiver.version == version
        ipc_buffers.add(next(payloads(sender, version))["buffer"]["memory"]["token"])
    assert len(ipc_buffers) == 1
    assert model.closed == 1 + 2 * 4


def test_groups_are_numbered(sender: WeightSender) -> None:
    numbers = [payload["index"] for payload in payloads(sender, 0, 25_600)]
    assert numbers == list(range(len(numbers))) and len(numbers) >= SLOTS


def test_a_version_counts_only_when_all_of_it_arrived(sender: WeightSender, receiver: WeightReceiver) -> None:
    transfer(sender, receiver, 3)
    sent = list(payloads(sender, 4, 25_600))
    for payload in sent[:-1]:
        with receiver.group(payload):
            pass
        assert receiver.version is None
    with receiver.group(sent[-1]):
        assert receiver.version is None
    assert receiver.version == 4


# readers that die, are slow, or come back


def test_a_slot_is_not_written_again_before_all_readers_have_acknowledged_it(
    sender: WeightSender, receiver: WeightReceiver
) -> None:
    names = [[name] for name in weights()]
    sender.begin(1)
    with receiver.group(payload_for(sender.send(names[0]), "CPU-x")):
        sender.send(names[1])
        with pytest.raises(
            RefitError, match=rf"group 0 of the weights was not read by process {os.getpid()}"
        ):
            sender.send(names[2])
    with pytest.raises(StateError, match=r"prepare_weights_for_ipc\(\) first"):
        sender.send(names[2])
    assert receiver.version is None
    assert_same(transfer(sender, receiver, 2), weights())


def test_no_file_and_no_page_is_left_when_both_sides_are_gone() -> None:
    before = named_memory()
    descriptors = open_files()
    block = SharedBlock.create(1 << 20)
    other = SharedBlock.attach(block.handle())
    other.bytes[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert block.bytes[:4].tolist() == [1, 2, 3, 0]
    assert named_memory() == before
    block.close()
    other.close()
    del block, other
    assert not open_files() - descriptors


def named_memory() -> list[str]:
    """Files in /dev/shm that this process has in its memory; the directory itself is of all processes."""
    return [
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if " /dev/shm/" in line
    ]


def test_a_hundred_refits_take_no_more_memory_or_files_than_one(
    sender: WeightSender, receiver: WeightReceiver
) -> None:
    for version in range(2):
        # at the second one the sender takes in the receiver
        transfer(sender, receiver, version)
    descriptors, views = open_files(), len(receiver._views)
    for version in range(100):
        transfer(sender, receiver, version)
    assert (open_files() - descriptors, len(receiver._views)) == (Counter(), views)


# what is refused


def test_an_old_handle_is_refused(sender: WeightSender, receiver: WeightReceiver) -> None:
    old, *_ = payloads(sender, 0)
    with receiver.group(old):
        pass
    list(payloads(sender, 1))
    with pytest.raises(RefitError, match="an old handle was used again"), receiver.group(old):
        pass
    assert receiver.version is None


def test_a_buffer_written_while_it_was_read_is_found_out(
    sender: WeightSender, receiver: WeightReceiver
) -> None:
    payload = next(payloads(sender, 0))
    with pytest.raises(RefitError, match="or the refit was aborted"), receiver.group(payload):
        list(payloads(sender, 1))
    assert receiver.version is None


def test_groups_out_of_order_are_refused(sender: WeightSender, receiver: WeightReceiver) -> None:
    sent = list(payloads(sender, 0, 25_600))
    with (
        pytest.raises(RefitError, match="came where the first group of a refit was expected"),
        receiver.group(sent[1]),
    ):
        pass


def test_a_group_that_was_passed_over_is_refused(model: Model) -> None:
    model.state = {name: torch.full((5, 3), float(number)) for number, name in enumerate("abc")}
    with (
        closing(WeightSender(model.stream, DeviceRuntime(CPU, "gloo"))) as sender,
        closing(WeightReceiver(Manifest.from_description(sender.manifest.description()), CPU)) as receiver,
    ):
        stream = payloads(sender, 0, 256)
        with receiver.group(next(stream)):
            pass
        _, third = stream
        with (
            pytest.raises(RefitError, match=r"weight 2 of refit .* came where weight 1 of refit"),
            receiver.group(third),
        ):
            pass
        assert receiver.version is None


def test_a_failure_while_loading_gives_the_refit_up(sender: WeightSender, receiver: WeightReceiver) -> None:
    sent = list(payloads(sender, 0, 25_600))
    with pytest.raises(ZeroDivisionError), receiver.group(sent[0]):
        raise ZeroDivisionError
    with pytest.raises(RefitError, match="the first group of a refit was expected"), receiver.group(sent[1]):
        pass


def test_other_weights_than_announced_are_refused(sender: WeightSender, model: Model) -> None:
    sender.begin(0)
    model.state["layer.q"] = torch.zeros(7, 4, dtype=torch.bfloat16)
    with pytest.raises(
        RefitError, match=r"layer\.q \[7, 4\] bfloat16 where layer\.q \[7, 3\] bfloat16 was announced"
    ):
        sender.send(list(model.state))
    model.state = weights()
    sender.begin(0)
    model.state["more"] = torch.zeros(1)
    with pytest.raises(RefitError, match="gives more after the last weight"):
        sender.send([name for name in model.state if name != "more"])


@pytest.mark.parametrize("staged", [1, 100, 256, 300, 26_000])
def test_weights_taken_in_batches_are_the_weights(monkeypatch: pytest.MonkeyPatch, staged: int) -> None:
    monkeypatch.setattr(plan, "STAGED_BYTES", staged)
    manifest = Manifest.of(iter(weights().items()))
    for group in (manifest.group(0, 6), manifest.group(2, 1), manifest.group(1, 4)):
        buffer = torch.full((group.nbytes,), 255, dtype=torch.uint8)
        sent = list(weights(3).items())
        stream = iter(sent[group.first :])
        pack(stream, manifest, group, buffer)
        part = dict(sent[group.first : group.stop])
        assert_same(dict(group.views(buffer)), part)
        assert len(list(stream)) == 6 - group.stop


@pytest.mark.parametrize("staged", [1, 1 << 20])
def test_a_stream_that_ends_early_is_refused(monkeypatch: pytest.MonkeyPatch, staged: int) -> None:
    monkeypatch.setattr(plan, "STAGED_BYTES", staged)
    manifest = Manifest.of(iter(weights().items()))
    with pytest.raises(
        RefitError, match=r"gives nothing where layer\.fp8 \[33\] float8_e4m3fn was announced"
    ):
        pack(iter(list(weights().items())[:4]), manifest, manifest.group(0, 6), None)


def test_another_manifest_is_refused(sender: WeightSender) -> None:
    description = sender.manifest.description()
    receiver = WeightReceiver(Manifest.from_description({**description, "norm": ((5,), torch.float32)}), CPU)
    with (
        pytest.raises(RefitError, match="other names, shapes or dtypes"),
        receiver.group(next(payloads(sender, 0))),
    ):
        pass


def test_changed_bytes_are_found_by_the_checksum(sender: WeightSender, receiver: WeightReceiver) -> None:
    payload = next(payloads(sender, 0))
    assert sender._ipc_buffer is not None
    sender._ipc_buffer.slot(0)[5] ^= 1
    with pytest.raises(RefitError, match="embed on have another checksum"), receiver.group(payload):
        pass


def test_keys_that_are_not_the_next_ones_are_refused(sender: WeightSender, model: Model) -> None:
    names = list(model.state)
    with pytest.raises(StateError, match="no refit is under way"):
        sender.send(names)
    sender.begin(0)
    with pytest.raises(StateError, match=r"layer\.q is weight 1 .* weight 0 is next"):
        sender.send(names[1:])
    for part in ((-1, 1), (0, 0), (0, len(names) + 1), (len(names), 1)):
        with pytest.raises(
            StateError,
            match=rf"{part[1]} weights from weight {part[0]} on were requested, but there are {len(names)}",
        ):
            sender.send_part(*part)
    for wrong in (["nobody"], [], names[:1] + names[2:]):
        with pytest.raises(RefitError, match="sending order"):
            sender.send(wrong)


def test_a_weight_larger_than_the_buffer_is_refused_with_the_size_that_would_do(model: Model) -> None:
    lists = LIST_BYTES * len(model.state)
    sender = WeightSender(model.stream, DeviceRuntime(CPU, "gloo"), buffer_gib=(40_000 + lists) / 2**30)
    with pytest.raises(
        RefitError, match=r"embed takes 25344 bytes, more than the 20000 .*refit_buffer_size_gb to at least "
    ) as caught:
        sender.begin(0)
    said = re.search(r"at least ([\d.e-]+),", str(caught.value))
    assert said is not None
    least = float(said[1])
    assert 2 * 25_344 + lists <= least * 2**30 < 1.01 * (2 * 25_344 + lists)
    WeightSender(model.stream, DeviceRuntime(CPU, "gloo"), buffer_gib=least).begin(0)


def test_a_dead_policy_s_memory_and_another_host_s_are_refused() -> None:
    ipc_buffer = IpcBuffer.create(100, CPU)
    handle = ipc_buffer.handle()
    with pytest.raises(RefitError, match="another host or container"):
        IpcBuffer.attach({**handle, "memory": {**handle["memory"], "host": "elsewhere"}}, CPU)
    with pytest.raises(RefitError, match="is not the policy's shared memory"):
        IpcBuffer.attach({**handle, "memory": {**handle["memory"], "token": "00"}}, CPU)
    ipc_buffer.close()
    with pytest.raises(RefitError, match=r"gone|is not the policy's shared memory"):
        IpcBuffer.attach(handle, CPU)


def test_an_engine_without_room_for_the_buffer_says_so_and_leaves_nothing() -> None:
    ipc_buffer = IpcBuffer.create(2**27, CPU)
    handle = ipc_buffer.handle()
    before = open_files()
    # what earlier tests have left would be given back within the limit, and make room
    gc.collect()
    with (
        no_more_memory_than(2**24, [os.getpid()], resource.RLIMIT_AS),
        pytest.raises(
            RefitError,
            match=f"no room for {2**28 + 4096} bytes of the policy's shared memory in this process: "
            ".*Cannot allocate",
        ),
    ):
        IpcBuffer.attach(handle, CPU)
    assert not open_files() - before
    reader = IpcBuffer.attach(handle, CPU)
    reader.close()
    ipc_buffer.close()


def test_no_payload_for_a_device_without_policy() -> None:
    with pytest.raises(RefitError, match="no rank of the policy shares GPU-2"):
        payload_for({}, "GPU-2")


# pure functions


@given(st.lists(st.integers(0, 500), min_size=1, max_size=30), st.integers(512, 1200))
def test_groups_hold_as_much_as_fits_and_lose_nothing(sizes: list[int], budget: int) -> None:
    manifest = Manifest.from_description(
        {f"w{index}": ((size,), torch.float32) for index, size in enumerate(sizes)}
    )
    groups = list(manifest.groups(budget * 4))
    assert [name for group in groups for name in group.names] == [tensor.name for tensor in manifest.tensors]
    size = dict(manifest.padded_sizes)
    assert all(sum(size[name] for name in group.names) == group.nbytes <= budget * 4 for group in groups)
    assert all(one.nbytes + size[following.names[0]] > budget * 4 for one, following in pairwise(groups))


def test_groups_follow_the_budget_and_are_found_by_their_names() -> None:
    manifest = Manifest.from_description(dict.fromkeys("abcde", ((64,), torch.float32)))
    groups = list(manifest.groups(600))
    assert [(group.first, group.names) for group in groups] == [(0, ["a", "b"]), (2, ["c", "d"]), (4, ["e"])]
    assert manifest.group_named(["c", "d"]) is groups[1] is manifest.group(2, 2)
    for wrong in (["c", "c"], ["c", "e"], ["c", "a", "b"], ["c", "b", "a"], ["c", "d", "e", "e"], ["x"], []):
        with pytest.raises(RefitError, match="is not at that position of the sending order"):
            manifest.group_named(wrong)
    assert [group.names for group in manifest.groups(1024)] == [["a", "b", "c", "d"], ["e"]]
    assert [group.names for group in manifest.groups(600, 1, 4)] == [["b", "c"], ["d"]]
    assert manifest.largest == ("a", 256) and manifest.total_bytes == 1280


@pytest.mark.parametrize("budget", [-1, 0, 255])
def test_a_group_smaller_than_any_weight_is_refused(budget: int) -> None:
    manifest = Manifest.from_description({"b": ((64,), torch.float32), "c": ((128,), torch.float32)})
    with pytest.raises(
        RefitError, match=f"b takes 256 bytes, more than the {budget} bytes of a transfer buffer"
    ):
        list(manifest.groups(budget))


def test_the_digest_changes_with_everything_that_both_sides_must_agree_on() -> None:
    base = weights()
    changed = [
        {**base, "norm": base["norm"].float()},
        {**base, "norm": base["norm"][:4]},
        {("other" if name == "norm" else name): tensor for name, tensor in base.items()},
        dict(reversed(base.items())),
    ]
    digests = {Manifest.of(iter(state.items())).digest for state in [base, *changed]}
    assert len(digests) == 1 + len(changed)


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(RefitError, match="a is sent twice"):
        Manifest.of(iter([("a", torch.zeros(1)), ("a", torch.zeros(1))]))


def test_what_is_no_description_is_refused() -> None:
    for wrong in ({"a": 1}, {"a": ((2, 3), "float32")}, [("a", 1)]):
        with pytest.raises(RefitError, match="refit info"):
            Manifest.from_description(wrong)  # type: ignore[arg-type]


@given(st.binary(min_size=4, max_size=400), st.data())
def test_a_checksum_sees_every_flipped_bit_and_every_swap(content: bytes, data: st.DataObject) -> None:
    content = content[: len(content) // 4 * 4]
    bytes_ = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    number = checksum(bytes_)
    place = data.draw(st.integers(0, len(content) - 1))
    flipped = bytes_.clone()
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(flipped) != number
    words = bytes_.view(torch.int32).clone()
    first, second = (data.draw(st.integers(0, words.numel() - 1)) for _ in range(2))
    words[[first, second]] = words[[second, first]]
    assert (checksum(words.view(torch.uint8)) == number) == torch.equal(words, bytes_.view(torch.int32))
