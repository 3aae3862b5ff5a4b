"""Refits that the pool's processes play: every rank is a rank of the policy, and an engine that reads what
another process published."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.checkpoint.background import waits_in_memory
from megarl.config.backend import enabled_backend
from megarl.errors import MegarlError, RefitError
from megarl.models.megatron import weight_stream
from megarl.models.policy.lm_policy import WORKERS
from megarl.parity.pool import COLLECTIVE_SECONDS
from megarl.weight_sync.broadcast import WeightListener
from megarl.weight_sync.mailbox import MailboxReader, mailbox_for
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.plan import checksum
from megarl.weight_sync.session import WeightReceiver, payload_for
from megarl.weight_sync.slices import Slice, Slices, WantedSlices
from megarl.weight_sync.transfer_group import TransferGroup
from tests.dist import jobs
from tests.dist.batches import make_batch

SESSION = 2**61 + 5


def build(config: Mapping[str, Any]) -> Any:
    module, _, kind = WORKERS[enabled_backend(config)].rpartition(".")
    return getattr(importlib.import_module(module), kind)(config, None, init_reference_model=False)


def transfer(worker: Any, receiver: WeightReceiver, budget: int) -> dict[str, Tensor]:
    """One whole refit as the driver plays it, on all ranks: what this rank's engine reads."""
    _, room = worker.prepare_weights_for_ipc()
    received = {}
    for group in receiver.manifest.groups(min(budget, int(room))):
        everybody: list[Any] = [None] * dist.get_world_size()
        with counted_objects() as objects:
            own = worker.get_weights_ipc_handles(group.names)
        assert not objects, "names and shapes travel at the first look alone"
        dist.all_gather_object(everybody, own)
        handles = {device: payload for handle in everybody for device, payload in handle.items()}
        with receiver.group(payload_for(handles, "CPU-engine")) as weights:
            received.update({name: tensor.clone() for name, tensor in weights})
        dist.barrier()
    return received


class Beside:
    """A rank of an engine beside each rank of the policy, a thread; on a CPU all of them read what the
    policy's rank 0 publishes, and of slices, which ``slices`` says of the one of an engine's ``ranks`` that
    is here, what the first rank beside such a one does."""

    def __init__(self, worker: Any, slices: Slices | None = None, ranks: int = 1) -> None:
        self.worker = worker
        manifest = Manifest.from_description(worker.prepare_refit_info()).sliced(slices or {})
        self.receiver = WeightReceiver(manifest, torch.device("cpu"))
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, worker.mailbox())
        mailboxes = {device: handle for own in everybody for device, handle in own.items()}
        assert len(mailboxes) == (ranks if slices else 1), (
            "one rank a host publishes, of slices one for each of an engine's ranks"
        )
        self.mailbox = MailboxReader(mailbox_for(mailboxes, "CPU-engine", dist.get_rank() % ranks), SESSION)
        self.received: dict[str, Tensor] = {}
        dist.barrier()

    def refit(self, ticket: int, budget: int | None = None) -> list[str]:
        """What policy and engine say of a refit; nothing where it went well."""
        self.received.clear()
        with ThreadPoolExecutor(1) as pool:
            # less than a job's own time: what a policy's rank fails of is heard when its engine waits no
            # longer
            receiving = pool.submit(
                self.receiver.receive, self.mailbox, ticket, _kept_in(self.received), COLLECTIVE_SECONDS
            )
            with counted_objects() as objects:
                said = _refusal(self.worker.hand_over_weights, SESSION, ticket, budget)
            assert not objects, "names and shapes travel at the first look alone"
            return [said, _refusal(receiving.result)]

    def close(self) -> None:
        self.mailbox.close()
        self.receiver.close()


def refits(config: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """A refit after 0, 1 and 2 training steps, the second one by handles: each with the weights as the engine
    and as the export have them."""
    worker = build(config)
    beside = Beside(worker)
    receiver = beside.receiver
    seen = []
    for step in range(3):
        if step == 1:
            received = transfer(worker, receiver, budget)
        else:
            assert beside.refit(100 + step, budget) == ["", ""]
            received = dict(beside.received)
        exported = dict(_copies(worker))
        same = list(received) == list(exported) and all(
            torch.equal(received[name], exported[name]) for name in exported
        )
        seen.append({"same": same, "version": receiver.version, "weights": received})
        rows = config["train_global_batch_size"]
        worker.train(data=jobs.my_share(worker, make_batch(rows, 13, seed=step), rows), loss_fn=NLLLoss())
    beside.close()
    worker.backend.close()
    return {"refits": seen}


def refits_beside_a_base(config: Mapping[str, Any], count: int, budget: int) -> dict[str, Any]:
    """A refit after each of ``count`` steps of adapters, and one more with the factors of the first.

    Returns:
        ``changed``: the refits after which a weight of the base was another one; weights that were others
        than in the first refit, ``different`` in the last one of a step, ``lost`` in the one with its
        factors.
    """
    worker = build(config)
    beside, (rows, backend) = Beside(worker), (config["train_global_batch_size"], worker.backend)
    base = {name: each.detach().clone() for name, each in backend.parameters() if not each.requires_grad}
    batches = [make_batch(rows, 13, seed=seed) for seed in range(4)]
    first: dict[str, Tensor] = {}
    factors: dict[str, Tensor] = {}
    changed = []
    for refit in range(1, count + 1):
        worker.train(data=jobs.my_share(worker, batches[refit % 4], rows), loss_fn=NLLLoss())
        assert beside.refit(refit, budget) == ["", ""]
        if refit == 1:
            first = dict(beside.received)
            factors = {name: each.detach().clone() for name, each in backend.trainable()}
        now = dict(backend.parameters())
        changed += [refit for name, weight in base.items() if not torch.equal(now[name].detach(), weight)]
    last = dict(beside.received)
    with torch.no_grad():
        for name, parameter in backend.trainable():
            parameter.copy_(factors[name])
    backend.parameters_changed()
    assert beside.refit(count + 1, budget) == ["", ""]
    different = [
        [name for name, weight in first.items() if not torch.equal(other[name], weight)]
        for other in (last, beside.received)
    ]
    beside.close()
    backend.close()
    return {"changed": changed, "base": len(base), "different": different[0], "lost": different[1]}


def sliced_refits(config: Mapping[str, Any], wanted: Sequence[Slices], budget: int) -> dict[str, Any]:
    """Refits before and after a training step of engines whose ranks read ``wanted``, and one of engines that
    take whole weights.

    Returns:
        ``names`` that came as slices; of each refit its ``version``, whether each weight was the ``same`` as
        the export's or its slice, the bytes that it ``gathered`` from others within its stage, sliced and
        whole, those among them that were ``experts_gathered``, and the bytes of all ``experts``;
        ``vocabularies``, how many matrices of it this rank's stage has; whether engines that took whole
        weights afterwards got the same, and the names of slices among these.
    """
    worker = build(config)
    info = worker.prepare_refit_info()
    names = worker.send_slices(WantedSlices(tuple(wanted), {}))
    groups, engine = worker.backend.groups, dist.get_rank() % len(wanted)
    slices = {name: wanted[engine].get(name, Slice.all_of(info[name][0])) for name in names}
    beside, seen = Beside(worker, slices, len(wanted)), []
    for step in range(2):
        with gathered_bytes(worker) as (gathered, of_experts):
            assert beside.refit(100 + step, budget) == ["", ""]
        with gathered_bytes(worker) as (whole, _):
            exported = dict(_copies(worker))
        same = list(beside.received) == list(exported) and all(
            torch.equal(tensor, slices[name].of(exported[name]) if name in slices else exported[name])
            for name, tensor in beside.received.items()
        )
        counts = {
            "gathered": sum(gathered),
            "gathered_whole": sum(whole),
            "experts_gathered": sum(of_experts),
        }
        counts["experts"] = sum(tensor.nbytes for name, tensor in exported.items() if ".experts." in name)
        seen.append({"same": same, "version": beside.receiver.version, **counts})
        rows = config["train_global_batch_size"]
        worker.train(data=jobs.my_share(worker, make_batch(rows, 13, seed=step), rows), loss_fn=NLLLoss())
    beside.close()
    none = worker.send_slices(None)
    beside, exported = Beside(worker), dict(_copies(worker))
    assert beside.refit(200, budget) == ["", ""]
    again = all(torch.equal(beside.received[name], tensor) for name, tensor in exported.items())
    beside.close()
    vocabularies = groups.is_first_stage + (
        groups.is_last_stage and not worker.backend.hf_config.tie_word_embeddings
    )
    worker.backend.close()
    return {
        "names": names,
        "refits": seen,
        "vocabularies": vocabularies,
        "whole_again": again,
        "whole_again_names": none,
    }


@contextlib.contextmanager
def gathered_bytes(worker: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Bytes that each gather or broadcast inside brings from other ranks of the stage, and those among them
    of experts."""
    found: list[int] = []
    of_experts: list[int] = []
    pipeline, experts = worker.backend.groups.pipeline, getattr(worker.backend, "experts", None)
    expert_groups = [] if experts is None else [experts.tensor, experts.model, experts.tensor_and_model]
    gather, broadcast = dist.all_gather_into_tensor, dist.broadcast

    def note(nbytes: int, group: Any) -> None:
        found.append(nbytes)
        of_experts.extend([nbytes] if any(group is one for one in expert_groups) else [])

    def gathering(into: Tensor, own: Tensor, group: Any = None, **options: Any) -> Any:
        note(into.nbytes - own.nbytes, group)
        return gather(into, own, group=group, **options)

    def broadcasting(tensor: Tensor, src: int, group: Any = None, **options: Any) -> Any:
        if group is not pipeline:
            note(tensor.nbytes if src != dist.get_rank() else 0, group)
        return broadcast(tensor, src=src, group=group, **options)

    with (
        mock.patch.object(dist, "all_gather_into_tensor", gathering),
        mock.patch.object(dist, "broadcast", broadcasting),
    ):
        yield found, of_experts


def faulty(config: Mapping[str, Any], budget: int) -> list[list[str]]:
    """What policy and engine say of refits that the last rank cannot begin, that it breaks off in, in which
    no rank hears of the others, whose parameters are away, and of one after them."""
    worker = build(config)
    beside, last = Beside(worker), dist.get_rank() == dist.get_world_size() - 1
    said = []
    for ticket, method in enumerate(("begin", "_lay"), 1):
        whole = getattr(worker._sender, method)

        def fail(*arguments: Any, whole: Any = whole, method: str = method) -> Any:
            if method == "begin" or arguments[1].first > 0:
                raise MemoryError("all of it is taken")
            return whole(*arguments)

        with mock.patch.object(worker._sender, method, fail) if last else contextlib.nullcontext():
            said.append(beside.refit(ticket, budget))
    with mock.patch.object(dist, "all_reduce", side_effect=RefitError("the others did not come")):
        said.append(beside.refit(3, budget))
    worker.offload_after_refit()
    said.append(beside.refit(4, budget))
    worker.prepare_for_lp_inference()
    said.append(beside.refit(5, budget))
    exported = dict(_copies(worker))
    assert all(torch.equal(exported[name], tensor) for name, tensor in beside.received.items()) and len(
        beside.received
    ) == len(exported)
    beside.close()
    worker.backend.close()
    return said


def exports_in_buckets(
    config: Mapping[str, Any], sizes: Sequence[int]
) -> list[tuple[int, int, dict[str, Tensor]]]:
    """For each size of a bucket, in bytes: how many buckets this rank went through, how many came by a
    broadcast from the one rank that has their experts, and what came out."""
    worker = build(config)
    exported, set_out = [], weight_stream._set_out
    for nbytes in sizes:
        arrivals: list[Any] = []

        def noting(*arguments: Any, arrivals: list[Any] = arrivals, **options: Any) -> Any:
            arrivals.append(arguments)
            return set_out(*arguments, **options)

        worker.backend._weights._buckets = None
        with (
            mock.patch.object(worker.backend._weights, "_bucket_bytes", nbytes),
            mock.patch.object(weight_stream, "_set_out", noting),
            jobs.new_memory_is_undefined(),
            jobs.gathers_in_their_rows(),
        ):
            weights = dict(_copies(worker))
        exported.append((len(arrivals), sum(bucket.source is not None for bucket, *_ in arrivals), weights))
    worker.backend.close()
    return exported


def broadcasts(config: Mapping[str, Any], port: int) -> dict[str, Any]:
    """Refits with two engine ranks, threads of rank 0; how often a refit calls collectives of objects, and
    what goes over the pipeline.

    Returns:
        ``refits``, the names of the weights that this rank ``sends``, and how often it ``asked`` other stages
        to learn them.
    """
    worker = build(config)
    worker.prepare_info_for_collective()
    seen: list[Any] = []
    with ThreadPoolExecutor(2) as pool:
        with counted_objects() as asked:
            listeners = _engines(worker, port, 2, pool)
        sends = [name for _, part in getattr(worker._broadcaster, "parts", ()) for name in part.names]
        for step in range(3):
            received: list[dict[str, Tensor]] = [{} for _ in listeners]
            receiving = [
                pool.submit(one.receive, _kept_in(kept))
                for one, kept in zip(listeners, received, strict=True)
            ]
            summed = mock.patch("megarl.weight_sync.broadcast.checksum", wraps=checksum)
            with (
                counted_objects() as objects,
                counted_over(worker.backend.groups.pipeline) as piped,
                summed as sums,
            ):
                worker.broadcast_weights_for_collective()
            versions = [future.result() for future in receiving]
            exported = dict(_copies(worker))
            same = all(
                list(kept) == list(exported)
                and all(torch.equal(kept[name], exported[name]) for name in exported)
                for kept in received
            )
            seen.append(
                {
                    "same": same,
                    "versions": versions,
                    "objects": len(objects),
                    "piped": len(piped),
                    "summed": sums.call_count,
                }
            )
            rows = config["train_global_batch_size"]
            worker.train(data=jobs.my_share(worker, make_batch(rows, 13, seed=step), rows), loss_fn=NLLLoss())
    worker.backend.close()
    return {"refits": seen, "sends": sends, "asked": len(asked)}


def _engines(worker: Any, port: int, count: int, pool: ThreadPoolExecutor) -> list[WeightListener]:
    """Ranks of engines apart, threads of the policy's rank 0, which is connected to them."""
    manifest = Manifest.from_description(worker.prepare_refit_info())
    options = {"digest": manifest.digest, "device": torch.device("cpu")}
    ranks = range(1, count + 1) if dist.get_rank() == 0 else ()
    joining = [pool.submit(TransferGroup, "127.0.0.1", port, count + 1, rank, **options) for rank in ranks]
    worker.init_collective("127.0.0.1", port, count + 1)
    return [WeightListener(joined.result(), manifest) for joined in joining]


def held_back(config: Mapping[str, Any], port: int) -> list[list[str]]:
    """What policy and engine say of refits that the policy fails before it has any weight to send, and of one
    after them."""
    worker = build(config)
    said = []
    with ThreadPoolExecutor(1) as pool:
        listeners = _engines(worker, port, 1, pool)

        def refit() -> None:
            receiving = [pool.submit(listener.receive, lambda _: None) for listener in listeners]
            said.append(
                [
                    _refusal(worker.broadcast_weights_for_collective),
                    *(_refusal(future.result) for future in receiving),
                ]
            )

        with mock.patch.object(worker.backend, "export_stage", side_effect=MemoryError("all of it is taken")):
            refit()
        worker.offload_after_refit()
        refit()
        worker.prepare_for_lp_inference()
        refit()
    worker.backend.close()
    return said


def refused(config: Mapping[str, Any], taken: int, free: tuple[int, int]) -> list[str]:
    """What groups end in, first at a port that is taken, then with an engine that has another world size,
    then as they should be."""
    worker = build(config)
    manifest = Manifest.from_description(worker.prepare_refit_info())
    options = {"digest": manifest.digest, "device": torch.device("cpu")}
    said = [_refusal(worker.init_collective, "127.0.0.1", taken, 2)]
    for port, world_size in zip(free, (3, 2), strict=True):
        with ThreadPoolExecutor(1) as pool:
            engine = (
                pool.submit(TransferGroup, "127.0.0.1", port, world_size, 1, **options)
                if dist.get_rank() == 0
                else None
            )
            said.append(_refusal(worker.init_collective, "127.0.0.1", port, 2))
            if engine is not None:
                said.append(_refusal(engine.result))
    worker._leave_collective()
    worker.backend.close()
    return said


def _refusal(action: Callable[..., Any], *arguments: Any) -> str:
    try:
        action(*arguments)
    except (MegarlError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def many(config: Mapping[str, Any], port: int, marks: tuple[int, int]) -> dict[str, Any]:
    """As many refits as the second mark says, of an engine on the same device and of one apart, which is a
    thread of rank 0.

    Returns:
        ``mib`` resident, open ``files`` and names in /dev/shm at the marks, and how often, from the second
        refit on, a collective of objects was called and a tensor pickled.
    """
    worker = build(config)
    manifest = Manifest.from_description(worker.prepare_refit_info())
    receiver = WeightReceiver(manifest, torch.device("cpu"))
    seen: list[dict[str, Any]] = []
    objects: list[str] = []
    with ThreadPoolExecutor(1) as pool, counted_objects() as called, counted_pickles() as pickled:
        listeners = _engines(worker, port, 1, pool)
        for refit in range(1, marks[1] + 1):
            sizes, _ = worker.prepare_weights_for_ipc()
            called.clear()
            own = worker.get_weights_ipc_handles([name for name, _ in sizes])
            objects += called
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, own)
            handles = {device: payload for handle in everybody for device, payload in handle.items()}
            with receiver.group(payload_for(handles, "CPU-engine")) as weights:
                checked = sum(tensor.numel() for _, tensor in weights)
            dist.barrier()
            receiving = [pool.submit(listener.receive, lambda _: None) for listener in listeners]
            called.clear()
            worker.broadcast_weights_for_collective()
            objects += called
            assert (
                checked
                and receiver.version == 0
                and [future.result() for future in receiving] == [0] * len(listeners)
            )
            if refit == 1:
                objects.clear()
                pickled.clear()
            if refit in marks:
                seen.append(_held())
    receiver.close()
    worker.backend.close()
    return {
        "seen": seen,
        "objects": objects,
        "pickled": len(pickled),
        "mib": sum(info.nbytes for info in manifest.tensors) / 2**20,
    }


def _held() -> dict[str, Any]:
    gc.collect()
    # a checkpoint that waits there is of another run, which may have been killed
    names = [
        path.name
        for path in Path("/dev/shm").iterdir()
        if (f"_{os.getpid()}_" in path.name or "megarl" in path.name) and not waits_in_memory(path)
    ]
    return {
        "mib": psutil.Process().memory_info().rss / 2**20,
        "files": len(os.listdir("/proc/self/fd")),
        "shared": names,
    }


@contextlib.contextmanager
def counted_pickles() -> Iterator[list[int]]:
    """The tensors that are pickled inside."""
    pickled: list[int] = []
    original = Tensor.__reduce_ex__

    def reduce(tensor: Tensor, protocol: Any) -> Any:
        pickled.append(tensor.numel())
        return original(tensor, protocol)

    try:
        Tensor.__reduce_ex__ = reduce  # type: ignore[method-assign]
        yield pickled
    finally:
        Tensor.__reduce_ex__ = original  # type: ignore[method-assign]


def _kept_in(kept: dict[str, Tensor]) -> Callable[[list[tuple[str, Tensor]]], None]:
    return lambda weights: kept.update({name: tensor.clone() for name, tensor in weights})


def counted_objects() -> contextlib.AbstractContextManager[list[str]]:
    """The collectives of objects that are called inside."""
    return _counted("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


def counted_over(group: Any) -> contextlib.AbstractContextManager[list[str]]:
    """The broadcasts, sends and receives over ``group`` that are called inside."""
    return _counted(
        "broadcast", "send", "recv", "isend", "irecv", counts=lambda options: options.get("group") is group
    )


@contextlib.contextmanager
def _counted(
    *names: str, counts: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> Iterator[list[str]]:
    """The functions of ``torch.distributed`` that are called inside with options that count."""
    called: list[str] = []
    kept = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            called.extend([name] if counts(options) else [])
            return kept[name](*arguments, **options)

        return call

    try:
        for name in kept:
            setattr(dist, name, counting(name))
        yield called
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def handle_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The handle of a group of all weights."""
    return _room_and_handle(config)[1]


def room_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes that a group may have, and those of the buffer's two halves."""
    room, payload = _room_and_handle(config)
    return room, 2 * payload["buffer"]["slot_bytes"]


def _room_and_handle(config: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    worker = build(config)
    sizes, room = worker.prepare_weights_for_ipc()
    [payload] = worker.get_weights_ipc_handles([name for name, _ in sizes]).values()
    worker.backend.close()
    return int(room), payload


def _copies(worker: Any) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in worker.backend.export_hf():
        yield name, tensor.clone()
