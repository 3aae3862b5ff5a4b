"""What the pool's processes run to count bytes that a worker allocates and moves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.config.backend import enabled_backend
from megarl.distributed.device import DeviceRuntime
from megarl.models.engine.offload_state import HostCopies
from megarl.models.huggingface.mover import move_optimizer as move_optimizer_of_torch
from megarl.models.huggingface.optimizer import local_gradients
from megarl.models.megatron import checkpoint, state_stream
from megarl.models.megatron.backend import move_optimizer as move_optimizer_of_megatron
from megarl.models.megatron.optimizer import fused_style_adam
from megarl.patched import patched
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.dist.counted_memory import MEBIBYTE, Allocations, saved_for_backward
from tests.dist.save_jobs import OLD_WAY


def save_and_count(config: Mapping[str, Any], batch: Mapping[str, Any], directory: Path) -> dict[str, int]:
    """Save the optimizer's state after a step, once gathered in full (``whole``) and once in pieces
    (``pieces``).

    Args:
        config: of the policy.
        batch: what the step trains on.
        directory: holds both afterwards.

    Returns:
        The most bytes that either allocates on this rank, by name.
    """
    worker = jobs.build(config, init_reference_model=False)
    worker.train(data=jobs.my_share(worker, batch), loss_fn=NLLLoss())
    backend = worker.backend
    backend.sync_parameters()
    state = (backend.chunks, backend.optimizer, backend.scheduler, backend.runtime)
    replaced: dict[str, list[Any]] = {"whole": OLD_WAY, "pieces": []}
    peaks = {}
    for name, replacements in replaced.items():
        with patched(*replacements), Allocations() as counted:
            checkpoint.save_optimizer(*state, directory / name)
        peaks[name] = counted.peak
    backend.close()
    return peaks


def empty_state(stream: Any, optimizer: Any) -> dict[Any, Any]:
    """Stands for ``StateStream.outlines`` in a load: every state of every buffer in full on every rank, to be
    read into."""
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        size = optimizer.buffers[index].grad_data.numel()
        state[index] = {dtype: {name: torch.zeros(size) for name in state_stream.STATES} for dtype in ranges}
    return state


def load_and_count(config: Mapping[str, Any], directory: Path, slice_bytes: int) -> dict[str, int]:
    """Load the optimizer's state that ``save_and_count`` saved in pieces, once into all of it (``whole``) and
    once in slices (``slices``), and save it as ``again``.

    Returns:
        The most bytes that either allocates on this rank beyond the state itself, by name.
    """
    worker = jobs.build(config, init_reference_model=False)
    backend = worker.backend
    state = (backend.chunks, backend.optimizer, backend.scheduler, backend.runtime)
    with fused_style_adam():
        checkpoint._initialize_state(backend.optimizer)
    peaks = {}
    for name, replacement in (
        ("whole", (state_stream.StateStream, "outlines", empty_state)),
        ("slices", (state_stream, "SLICE_BYTES", slice_bytes)),
    ):
        with patched(replacement), Allocations() as counted:
            checkpoint.load_optimizer(*state, directory / "pieces")
        peaks[name] = counted.peak
    checkpoint.save_optimizer(*state, directory / "again")
    backend.close()
    return peaks


def load_weights_and_count(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Save the weights, spoil them, and load them again: by copies (``copied``), where they belong
    (``placed``), and so that a tensor's memory is given back before the next one is read (``one by one``).

    Returns:
        The most bytes that each allocates on this rank, by name; the bytes of the tensors read, in their
        order (``read``); whether the weights were whole again each time (``whole again``).
    """
    worker = jobs.build(config, init_reference_model=False)
    backend = worker.backend
    worker.save_checkpoint(str(directory))
    before = [tensor.detach().clone() for _, tensor in backend.parameters()]
    found: dict[str, Any] = {"whole again": True}
    read: list[int] = []
    last: list[Tensor] = []
    load = torch.load

    def reads(*arguments: Any, **options: Any) -> Any:
        value = load(*arguments, **options)
        if isinstance(value, Tensor):
            read.append(value.untyped_storage().nbytes())
        return value

    def gives_back(*arguments: Any, **options: Any) -> Any:
        for tensor in last:
            tensor.set_()  # it has no memory then; its values are where they belong
        value = load(*arguments, **options)
        last[:] = [value] if isinstance(value, Tensor) else []
        return value

    ways: dict[str, list[tuple[Any, str, Any]]] = {
        "copied": [(checkpoint, "_places_of", lambda chunks: frozenset())],
        "placed": [(torch, "load", reads)],
        "one by one": [(torch, "load", gives_back)],
    }
    for name, replacements in ways.items():
        for _, tensor in backend.parameters():
            tensor.detach().fill_(math.nan)
        with patched(*replacements), Allocations() as counted:
            checkpoint.load_weights(backend.chunks, directory)
        found[name] = counted.peak
        found["whole again"] &= all(
            torch.equal(tensor, kept) for (_, tensor), kept in zip(backend.parameters(), before, strict=True)
        )
    backend.close()
    return {**found, "read": read}


# what a backward pass keeps


def kept_for_backward(config: Mapping[str, Any], batch: Mapping[str, Any]) -> float:
    """MiB that autograd holds at most in a step."""
    worker = jobs.build(config, init_reference_model=False)
    with saved_for_backward() as saved:
        worker.train(data=jobs.my_share(worker, batch), loss_fn=NLLLoss())
    worker.backend.close()
    return saved.peak


def peaks_of_steps(config: Mapping[str, Any], batch: Mapping[str, Any]) -> list[int]:
    """Most bytes that one step, and six steps, make and have at a time, after a first step, which makes the
    optimizer's state."""
    worker = jobs.build(config, init_reference_model=False)
    share = jobs.my_share(worker, batch)
    peaks = []
    for steps in (1, 1, 6):
        with Allocations() as counted:
            for _ in range(steps):
                worker.train(data=share, loss_fn=NLLLoss())
        peaks.append(counted.peak)
    worker.backend.close()
    return peaks[1:]


# what a step moves

MOVERS = {
    "megatron": move_optimizer_of_megatron,
    "dtensor": move_optimizer_of_torch,
    "fsdp1": move_optimizer_of_torch,
}


def step_and_count(config: Mapping[str, Any], engine: bool) -> dict[str, Any]:
    """Bytes of optimizer state that a GRPO step moves for each parameter, and its moves.

    On a CPU nothing has to move, so what would move it is called with what counts.

    Args:
        config: of the policy.
        engine: one on the same device generates.
    """
    worker = jobs.build(config, init_reference_model=False)
    each = functools.partial(MOVERS[enabled_backend(config)], worker.backend.optimizer)
    moves, moved = [], 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal moved
        moved += tensor.nbytes
        return tensor

    def move(part: str, place: str) -> None:
        moves.append((part, place))
        if part == "optimizer":
            each(count)

    worker.offload_states._move = move
    batch = jobs.my_share(worker, make_batch(8, 9, seed=0))
    worker.train(data=batch, loss_fn=NLLLoss())
    if engine:
        worker.offload_before_refit()
        worker.offload_after_refit()
    worker.prepare_for_lp_inference()
    worker.get_logprobs(data=batch)
    worker.prepare_for_training()
    worker.train(data=batch, loss_fn=NLLLoss())
    parameters = sum(parameter.numel() for _, parameter in worker.backend.parameters())
    worker.backend.close()
    return {"bytes a parameter": moved / parameters, "moves": moves}


def move_and_train(config: Mapping[str, Any]) -> list[str]:
    """What differs after steps with the optimizer's state in host copies between them, and copies that were
    made anew."""
    outcomes, mistakes, places = [], [], []
    for moving in (False, True):
        worker = jobs.build(config, init_reference_model=False)
        each = functools.partial(MOVERS[enabled_backend(config)], worker.backend.optimizer)
        copies, batch = HostCopies(worker.runtime), jobs.my_share(worker, make_batch(8, 9, seed=0))
        losses = []
        for _ in range(3):
            losses.append(float(worker.train(data=batch, loss_fn=NLLLoss())["global_loss"]))
            if moving:
                copies.take(each)
                places.append(_places(each))
                # as on the way back to a device
                each(torch.clone)
        outcomes.append((losses, {name: tensor.clone() for name, tensor in worker.backend.export_hf()}))
        worker.backend.close()
    if any(place != places[0] for place in places) or not places[0]:
        mistakes.append("host copies were made anew")
    (losses, weights), (others, moved) = outcomes
    return (
        mistakes
        + ["losses"] * (losses != others)
        + [name for name in weights if not torch.equal(weights[name], moved[name])]
    )


def _places(each: Callable[[Callable[[Tensor], Tensor]], None]) -> list[int]:
    found: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor.data_ptr())
        return tensor

    each(note)
    return found


def swap_and_count(config: Mapping[str, Any], has_room: bool) -> dict[str, Any]:
    """Bytes that two looks at the reference policy copy to the host, over those of the weights, and whether
    the second used the first one's memory. The device has room for the present weights, or none."""
    with patched((DeviceRuntime, "has_room", lambda runtime, size, left: has_room)):
        return _swap_and_count(config)


def _swap_and_count(config: Mapping[str, Any]) -> dict[str, Any]:
    worker = jobs.build(config)
    for _, parameter in worker.backend.parameters():
        parameter.detach().add_(1)  # no longer the reference's
    before = [parameter.detach().clone() for _, parameter in worker.backend.parameters()]
    batch = jobs.my_share(worker, make_batch(8, 9, seed=0))
    held = worker.reference._present
    copied, places = [], []
    for _ in range(2):
        worker.get_reference_policy_logprobs(data=batch)
        copied.append(held.copied)
        places.append([copy.data_ptr() for copy in held._copies])
    after = [parameter.detach() for _, parameter in worker.backend.parameters()]
    weights = sum(tensor.nbytes for tensor in before)
    worker.backend.close()
    same = all(map(torch.equal, before, after))
    return {
        "copied": [count / weights for count in copied],
        "same memory": places[0] == places[1],
        "same weights": same,
    }


# what the plan says of a step


def terms_of_step(config: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, int]:
    """Bytes on this rank: weights, gradients and optimizer state of a step, and what autograd holds in it at
    most, with the logits of all tokens (``held``) and with those of one at a time (``without logits``)."""
    found = {}
    for name, chunk in (("held", None), ("without logits", 1)):
        worker = jobs.build({**config, "logprob_chunk_size": chunk}, init_reference_model=False)
        share = jobs.my_share(worker, batch)
        with saved_for_backward() as saved:
            worker.train(data=share, loss_fn=NLLLoss())
        found[name] = round(saved.peak * MEBIBYTE)
        found |= _state_bytes(worker.backend, enabled_backend(config))
        worker.backend.close()
    return found


def _state_bytes(backend: Any, name: str) -> dict[str, int]:
    """Weights, gradients and optimizer state, each memory once."""
    if name == "megatron":
        buffers = [
            buffer for chunk in backend.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers
        ]
        weights, gradients = (
            [buffer.param_data for buffer in buffers],
            [buffer.grad_data for buffer in buffers],
        )
        inner = [
            each.optimizer for each in getattr(backend.optimizer, "chained_optimizers", [backend.optimizer])
        ]
    else:
        weights = [_local(parameter) for _, parameter in backend.parameters()]
        gradients, inner = [], [backend.optimizer]
    stepped = [parameter for each in inner for group in each.param_groups for parameter in group["params"]]
    if name != "megatron":
        gradients = local_gradients(stepped)
    states = [
        value
        for each in inner
        for state in each.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    state = [*stepped, *(parameter.grad for parameter in stepped if parameter.grad is not None), *states]
    known: set[int] = set()
    return {
        "weights": _bytes_of(weights, known),
        "gradients": _bytes_of(gradients, known),
        "optimizer": _bytes_of([_local(tensor) for tensor in state if tensor.ndim], known),
    }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_of(tensors: list[Tensor], known: set[int]) -> int:
    """Bytes of memory that no tensor before these had."""
    total = 0
    for storage in (tensor.untyped_storage() for tensor in tensors):
        total += 0 if storage.data_ptr() in known else storage.nbytes()
        known.add(storage.data_ptr())
    return total
