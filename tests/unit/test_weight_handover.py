"""Refits that ranks of policy and engines make among themselves, through a mailbox: threads and real
processes, faults of either side."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.device import DeviceRuntime
from megarl.errors import RefitError, StateError
from megarl.weight_sync.mailbox import Mailbox, MailboxReader, mailbox_for
from megarl.weight_sync.session import WeightReceiver, WeightSender
from tests.unit.pretended_devices import pretend_devices, runtime_of
from tests.unit.weight_processes import Actor, Engine, Policy, expected

CPU = torch.device("cpu")
SESSION = 2**62 - 7
# two of the tensors below at most
GROUP = 1536
NAMES = [f"layer.{number}" for number in range(7)]


def weights(step: int) -> dict[str, Tensor]:
    """Seven weights of unequal types and sizes: four groups of at most ``GROUP`` bytes, other numbers at each
    step."""
    generator = torch.Generator().manual_seed(step)
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    return {
        name: torch.randn(11, 11, generator=generator).to(kinds[number % 3])
        for number, name in enumerate(NAMES)
    }


class Side:
    """A policy's rank with a model, and what a test does with its stream."""

    def __init__(self, **options: Any) -> None:
        self.step, self.before = 0, lambda index: None
        self.taken = 0
        self.sender = WeightSender(self._stream, DeviceRuntime(CPU, "gloo"), with_checksum=True, **options)
        self.mailboxes = self.sender.mailbox()

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        for index, pair in enumerate(weights(self.step).items()):
            self.before(index)
            self.taken += 1
            yield pair

    def hand_over(
        self, step: int, *, ticket: int | None = None, session: int = SESSION, patience: float = 60.0
    ) -> None:
        self.step, self.taken = step, 0
        self.sender.begin(step)
        self.sender.hand_over(session, step if ticket is None else ticket, most=GROUP, patience=patience)


class Reader:
    """An engine's rank."""

    def __init__(self, side: Side, session: int = SESSION) -> None:
        self.receiver = WeightReceiver(side.sender.manifest, CPU)
        self.mailbox = MailboxReader(mailbox_for(side.mailboxes, "CPU-engine"), session)
        self.state: dict[str, Tensor] = {}
        self.before: Callable[[int], None] = lambda group: None
        self.groups = 0

    def receive(self, ticket: int, patience: float = 60.0) -> int | None:
        self.groups = 0
        self.receiver.receive(self.mailbox, ticket, self._load, patience)
        return self.receiver.version

    def _load(self, named: list[tuple[str, Tensor]]) -> None:
        self.before(self.groups)
        self.groups += 1
        self.state.update({name: tensor.clone() for name, tensor in named})

    def has(self, step: int) -> bool:
        sent = weights(step)
        return list(self.state) == NAMES and all(torch.equal(self.state[name], sent[name]) for name in NAMES)

    def close(self) -> None:
        self.receiver.close()
        self.mailbox.close()


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side()
    yield side
    side.sender.close()


@pytest.fixture
def readers(side: Side) -> Iterator[list[Reader]]:
    readers = [Reader(side), Reader(side)]
    yield readers
    for reader in readers:
        reader.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def refit(pool: ThreadPoolExecutor, side: Side, readers: list[Reader], step: int) -> list[int | None]:
    """The versions that the readers have in the end."""
    receiving = [pool.submit(reader.receive, step) for reader in readers]
    side.hand_over(step)
    return [future.result(60) for future in receiving]


def test_every_reader_has_every_version_whole(
    pool: ThreadPoolExecutor, side: Side, readers: list[Reader]
) -> None:
    assert len(list(side.sender.manifest.groups(GROUP))) == 4
    for step in range(1, 6):
        assert refit(pool, side, readers, step) == [step, step]
        assert all(reader.has(step) and reader.groups == 4 for reader in readers)


def test_a_slot_is_written_again_when_the_slowest_reader_has_read_it(
    pool: ThreadPoolExecutor, side: Side, readers: list[Reader]
) -> None:
    """While it reads a group, the policy lays down one more, and gathers of the next one nothing."""
    inside, go_on = threading.Event(), threading.Event()

    def stay(group: int) -> None:
        if group == 1:
            inside.set()
            assert go_on.wait(60)

    readers[0].before = stay
    receiving = [pool.submit(reader.receive, 1) for reader in readers]
    sending = pool.submit(side.hand_over, 1)
    assert inside.wait(60)
    # the other reader reads group 2 as well, after which nothing moves
    while readers[1].groups < 3:
        pass
    assert side.taken == 6 and not sending.done()
    go_on.set()
    assert [future.result(60) for future in receiving] == [1, 1] and all(reader.has(1) for reader in readers)
    sending.result(60)


@pytest.mark.parametrize("group", [0, 1, 3])
def test_a_reader_that_fails_is_waited_for_no_longer_and_reads_the_next_refit(
    pool: ThreadPoolExecutor, side: Side, readers: list[Reader], group: int
) -> None:
    assert refit(pool, side, readers, 1) == [1, 1]

    def fail(at: int) -> None:
        if at == group:
            raise ZeroDivisionError

    readers[0].before = fail
    receiving = [pool.submit(reader.receive, 2) for reader in readers]
    side.hand_over(2)
    with pytest.raises(ZeroDivisionError):
        receiving[0].result(60)
    assert receiving[1].result(60) == 2 and readers[1].has(2)
    assert readers[0].receiver.version is None
    readers[0].before = lambda at: None
    assert refit(pool, side, readers, 3) == [3, 3] and all(reader.has(3) for reader in readers)


def test_a_reader_that_refused_before_it_began_is_not_waited_for(
    pool: ThreadPoolExecutor, side: Side, readers: list[Reader]
) -> None:
    readers[0].mailbox.refuse(1)
    receiving = pool.submit(readers[1].receive, 1)
    side.hand_over(1)
    assert receiving.result(60) == 1
    assert refit(pool, side, readers, 2) == [2, 2]


@pytest.mark.parametrize("weight", [0, 3, 6])
def test_a_policy_that_fails_says_why_goes_through_its_weights_and_the_next_refit_works(
    pool: ThreadPoolExecutor, side: Side, readers: list[Reader], weight: int
) -> None:
    assert refit(pool, side, readers, 1) == [1, 1]
    named = side.sender.manifest.tensors[weight].name
    kept = list(weights(2).items())
    kept[weight] = (named, torch.zeros(3))
    taken: list[str] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in kept:
            taken.append(name)
            yield name, tensor

    whole, side.sender._stream = side.sender._stream, stream
    receiving = [pool.submit(reader.receive, 2) for reader in readers]
    with pytest.raises(RefitError, match=rf"gives {named} \[3\] float32 where {named} \[11, 11\]"):
        side.hand_over(2)
    for future in receiving:
        with pytest.raises(
            RefitError, match=rf"the policy aborted the refit: RefitError: .*{named} \[3\].*refit again"
        ):
            future.result(60)
    assert taken == NAMES, "the other ranks gather to the end"
    assert [reader.receiver.version for reader in readers] == [None, None]
    side.sender._stream = whole
    assert refit(pool, side, readers, 3) == [3, 3] and all(reader.has(3) for reader in readers)


def test_a_policy_that_cannot_see_who_reads_says_so_and_goes_through_its_weights(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, side: Side, readers: list[Reader]
) -> None:
    receiving = [pool.submit(reader.receive, 1) for reader in readers]
    with monkeypatch.context() as broken, pytest.raises(OSError, match="no such socket"):
        broken.setattr(Mailbox, "has_readers", Mock(side_effect=OSError("no such socket")))
        side.hand_over(1)
    for future in receiving:
        with pytest.raises(RefitError, match="aborted the refit: OSError: no such socket; refit again"):
            future.result(60)
    assert side.taken == len(NAMES), "the other ranks gather to the end"
    assert refit(pool, side, readers, 2) == [2, 2]


def test_a_refit_that_was_never_begun_is_refused_with_the_reason(
    pool: ThreadPoolExecutor, side: Side, readers: list[Reader]
) -> None:
    receiving = pool.submit(readers[0].receive, 9)
    side.sender.refuse(SESSION, 9, StateError("the parameters are in host memory"))
    with pytest.raises(
        RefitError, match="aborted the refit: StateError: the parameters are in host memory; refit again"
    ):
        receiving.result(60)
    assert refit(pool, side, readers, 10) == [10, 10]


def test_a_reader_that_stands_still_is_named_and_frees_the_policy(
    pool: ThreadPoolExecutor, side: Side, readers: list[Reader]
) -> None:
    """It never comes; the other one hears that the refit is over."""
    receiving = pool.submit(readers[0].receive, 1)
    with pytest.raises(
        RefitError, match=r"group 0 of the weights was not read by process \d+ of an engine within 0\.05 s"
    ):
        side.hand_over(1, patience=0.05)
    with pytest.raises(
        RefitError, match=r"aborted the refit: RefitError: group 0 of the weights was not read"
    ):
        receiving.result(60)
    # the last groups are waited for too
    alone, hold = Reader(side, session=3), threading.Event()
    alone.before = lambda group: None if group < 3 else hold.wait(60)
    receiving = pool.submit(alone.receive, 2)
    with pytest.raises(RefitError, match=r"group 3 of the weights was not read by process"):
        side.hand_over(2, session=3, patience=0.2)
    hold.set()
    with contextlib.suppress(RefitError):
        receiving.result(60)
    alone.close()


def test_a_reader_that_is_in_the_next_refit_before_the_policy_looks_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, side: Side, readers: list[Reader]
) -> None:
    for step, groups in ((1, 4), (2, 2)):
        receiving = [pool.submit(reader.receive, step) for reader in readers]
        whole = side.sender._mailbox.wait_until_read

        def look_late(
            count: int,
            patience: float,
            *,
            step: int = step,
            groups: int = groups,
            receiving: list[Any] = receiving,
            whole: Any = whole,
        ) -> None:
            if count == groups:
                assert (
                    receiving[0].exception(60) is None
                    if step == 1
                    else isinstance(receiving[0].exception(60), ZeroDivisionError)
                )
                readers[0].mailbox.enter(step + 1)
            whole(count, patience)

        with monkeypatch.context() as late:
            late.setattr(side.sender._mailbox, "wait_until_read", look_late)
            side.hand_over(step)
        assert receiving[1].result(60) == step and readers[1].has(step)
        readers[0].before = _fail_at_once
    readers[0].before = lambda group: None
    assert refit(pool, side, readers, 3) == [3, 3] and all(reader.has(3) for reader in readers)


def _fail_at_once(group: int) -> None:
    raise ZeroDivisionError


def test_a_policy_that_is_in_the_next_refit_before_the_reader_looks_is_not_waited_for(
    pool: ThreadPoolExecutor, side: Side, readers: list[Reader]
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def stay(group: int) -> None:
        inside.set()
        assert go_on.wait(60)

    readers[0].before = stay
    receiving = pool.submit(readers[0].receive, 1)
    with pytest.raises(RefitError, match="was not read by process"):
        side.hand_over(1, patience=0.05)
    assert inside.wait(60)
    side.sender.refuse(SESSION, 2, RefitError("another rank could not begin"))
    go_on.set()
    with pytest.raises(
        RefitError, match="aborted the refit: RefitError: group 0 of the weights was not read"
    ):
        receiving.result(60)
    readers[0].before = lambda group: None
    assert refit(pool, side, readers, 3) == [3, 3] and all(reader.has(3) for reader in readers)


def test_a_policy_that_stands_still_is_named(side: Side, readers: list[Reader]) -> None:
    with pytest.raises(
        RefitError, match=r"the policy's process \d+ has not posted group 0 of its weights in 0\.05 s"
    ):
        readers[0].receive(1, patience=0.05)
    assert readers[0].receiver.version is None


def test_readers_of_other_engines_are_not_waited_for(
    pool: ThreadPoolExecutor, side: Side, readers: list[Reader]
) -> None:
    """A policy of which two sets of engines have the mailbox hands its weights to one."""
    other = Reader(side, session=1)
    assert refit(pool, side, readers, 1) == [1, 1]
    receiving = pool.submit(other.receive, 1)
    side.hand_over(1, session=1)
    assert receiving.result(60) == 1 and other.has(1)
    other.close()


def test_where_nobody_reads_nothing_is_laid_down(side: Side) -> None:
    side.hand_over(1)
    assert side.taken == len(NAMES) and side.sender._ipc_buffer is None


def test_what_was_posted_for_another_refit_is_not_read(side: Side, readers: list[Reader]) -> None:
    side.hand_over(1, session=0)
    side.sender.refuse(0, 1, RefitError("over"))
    for session, ticket in ((SESSION, 2), (SESSION, 1), (0, 2)):
        reader = Reader(side, session)
        with pytest.raises(RefitError, match="has not posted group 0"):
            reader.receive(ticket, patience=0.01)
        reader.close()


def test_readers_that_left_or_do_not_know_the_mailbox_are_not_waited_for(
    pool: ThreadPoolExecutor, side: Side
) -> None:
    [handle] = side.mailboxes.values()
    readers = [Reader(side) for _ in range(3)]
    readers.pop().close()
    stranger = MailboxReader({**handle, "token": "0" * 32}, SESSION)
    assert refit(pool, side, readers, 1) == [1, 1]
    with pytest.raises(RefitError, match=r"the policy's process \d+ ended"):
        stranger.payload(1, 0, 60.0)
    for reader in (*readers, stranger):
        reader.close()
    side.hand_over(2)


def test_a_reader_that_refused_is_told_no_more_of_a_refit_however_long_that_is() -> None:
    mailbox = Mailbox(on_gpu=False)
    reader = MailboxReader(mailbox.handle(), 5)
    reader.enter(1)
    reader.refuse(1)
    mailbox.open(5, 1)
    for index in range(500):
        mailbox.wait_until_read(index, 0.0)
        mailbox.post(index, {"text": 2_000 * "x"})
    mailbox.open(5, 2)
    mailbox.post(0, {"text": "again"})
    assert reader.payload(2, 0, 5.0) == {"text": "again"}
    for side in (reader, mailbox):
        side.close()


def test_each_device_has_its_own_mailbox() -> None:
    mailbox = Mailbox(on_gpu=True)
    first, second = mailbox.handle(), {**mailbox.handle(), "number": 2}
    assert mailbox_for({"GPU-1": first, "GPU-2": second}, "GPU-2") is second
    with pytest.raises(RefitError, match=r"no rank of the policy shares GPU-3 \(they are on GPU-1, GPU-2\)"):
        mailbox_for({"GPU-1": first, "GPU-2": second}, "GPU-3")
    elsewhere = {**first, "on_gpu": False, "host": "elsewhere"}
    with pytest.raises(RefitError, match="the memory of another host or container"):
        MailboxReader(elsewhere, SESSION)
    with pytest.raises(RefitError, match=r"shares CPU-here"):
        mailbox_for({"CPU-there": elsewhere}, "CPU-here")
    mailbox.close()


def test_handles_of_device_memory_go_through_the_mailbox_as_they_are(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """Device memory is played by host memory; its handle is bytes and numbers."""
    devices = pretend_devices(monkeypatch)
    state = weights(1)
    sender = WeightSender(lambda: iter(state.items()), runtime_of(devices, torch.device("cuda", 0)))
    [(device, handle)] = sender.mailbox().items()
    assert device == "GPU-5" and handle["on_gpu"]
    receiver, mailbox = WeightReceiver(sender.manifest, torch.device("cuda")), MailboxReader(handle, SESSION)
    loaded: dict[str, Tensor] = {}

    def load(named: list[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            devices.queued.append(lambda name=name, tensor=tensor: loaded.update({name: tensor.clone()}))

    for ticket in (1, 2):
        receiving = pool.submit(receiver.receive, mailbox, ticket, load)
        sender.begin(ticket)
        sender.hand_over(SESSION, ticket, most=GROUP)
        receiving.result(60)
        assert receiver.version == ticket and all(
            torch.equal(loaded.pop(name), state[name]) for name in NAMES
        )
    assert (len(devices.handles), devices.opened) == (1, [2])
    for one in (sender, receiver, mailbox):
        one.close()


# processes that are killed


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[type[Any]], Actor]]:
    actors: list[Actor] = []

    def begin(kind: type[Any]) -> Actor:
        actors.append(Actor(kind, *([str(tmp_path)] if kind is Policy else [])))
        return actors[-1]

    yield begin
    for actor in actors:
        actor.kill()


def meet(policy: Actor, *engines: Actor) -> None:
    mailboxes = policy.do("mailboxes")
    assert [engine.do("meet", mailboxes) for engine in engines] == ["met"] * len(engines)


def hand_over(policy: Actor, engines: list[Actor], step: int) -> list[Any]:
    policy.order("hand_over", step)
    for engine in engines:
        engine.order("take", step)
    return [actor.answer() for actor in (policy, *engines)]


def test_an_engine_killed_while_it_reads_is_not_waited_for_and_a_new_one_reads(
    start: Callable[[type[Any]], Actor],
) -> None:
    policy, engine, other = start(Policy), start(Engine), start(Engine)
    meet(policy, engine, other)
    assert hand_over(policy, [engine, other], 1) == ["handed over", (1, expected(1)), (1, expected(1))]
    policy.order("hand_over", 2)
    engine.order("take", 2, "layer.1.weight")
    other.order("take", 2)
    assert engine.answer() == "paused"
    engine.kill()
    assert [policy.answer(), other.answer()] == ["handed over", (2, expected(2))]
    new = start(Engine)
    meet(policy, new)
    assert new.do("served") is None
    assert hand_over(policy, [new, other], 3) == ["handed over", (3, expected(3)), (3, expected(3))]


def test_a_policy_killed_within_a_refit_is_missed_and_leaves_nothing_served(
    start: Callable[[type[Any]], Actor],
) -> None:
    policy, engine = start(Policy), start(Engine)
    meet(policy, engine)
    assert hand_over(policy, [engine], 1) == ["handed over", (1, expected(1))]
    policy.order("hand_over", 2, 3)
    engine.order("take", 2)
    assert policy.answer() == "paused"
    policy.kill()
    error = engine.answer()
    assert isinstance(
        error, RefitError
    ) and f"the policy's process {policy.number} ended within a refit" in str(error)
    assert engine.do("served") is None
    new = start(Policy)
    meet(new, engine)
    assert hand_over(new, [engine], 3) == ["handed over", (3, expected(3))]
