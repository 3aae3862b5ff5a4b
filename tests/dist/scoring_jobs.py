"""What the pool's processes run for models that score, on any backend."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megarl.errors import MegarlError
from megarl.models.engine.offload_state import OffloadState
from tests.dist import jobs


def values(config: Mapping[str, Any], batch: Mapping[str, Any], seed: int = 0) -> Tensor:
    worker = jobs.build(config, init_reference_model=False, init_optimizer=False, seed=seed)
    found = jobs.logprobs_of(worker, batch, "get_values")
    worker.backend.close()
    return found


def train_and_save(
    config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any, directory: Path
) -> dict[str, Any]:
    """Trains on all batches, saving after the first; the weights at the end."""
    worker = jobs.build(config, init_reference_model=False)
    for number, batch in enumerate(batches):
        jobs.step(worker, batch, loss_fn)
        if number == 0:
            worker.save_checkpoint(str(directory / "weights"), str(directory / "optimizer"))
    weights = jobs.full_weights(worker)
    worker.backend.close()
    return weights


def resume(
    config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any, directory: Path
) -> dict[str, Any]:
    """What ``train_and_save`` left, trained on the other batches."""
    worker = jobs.build(
        config,
        init_reference_model=False,
        weights_path=str(directory / "weights"),
        optimizer_path=str(directory / "optimizer"),
    )
    for batch in batches[1:]:
        jobs.step(worker, batch, loss_fn)
    weights = jobs.full_weights(worker)
    worker.backend.close()
    return weights


def export(config: Mapping[str, Any], batch: Mapping[str, Any], directory: Path, tokenizer: Any) -> Tensor:
    """Write a Hugging Face model, and return its values for the batch."""
    worker = jobs.build(config, tokenizer=tokenizer, init_reference_model=False, init_optimizer=False, seed=5)
    worker.export_hf(str(directory))
    found = jobs.logprobs_of(worker, batch, "get_values")
    worker.backend.close()
    return found


def refused(
    config: Mapping[str, Any], calls: Mapping[str, Mapping[str, Any]], **options: Any
) -> dict[str, str]:
    """What a worker says to each of the calls, by method; to being built, where it cannot be."""
    try:
        worker = jobs.build(config, init_reference_model=False, init_optimizer=False, **options)
    except (MegarlError, ValueError) as error:
        return {"build": f"{type(error).__name__}: {error}"}
    said = {
        method: jobs.said(functools.partial(getattr(worker, method), **arguments))
        for method, arguments in calls.items()
    }
    worker.backend.close()
    return said


def save(config: Mapping[str, Any], directory: Path) -> None:
    worker = jobs.build(config, init_reference_model=False)
    worker.save_checkpoint(str(directory / "weights"))
    worker.backend.close()


def cannot_load(config: Mapping[str, Any], weights: Path) -> str:
    """What a worker says to weights that are not its own."""
    worker = jobs.build(config, init_reference_model=False)
    message = jobs.said(lambda: worker.load_checkpoint(str(weights)))
    worker.backend.close()
    return message


def held_parameters(config: Mapping[str, Any]) -> int:
    """Elements of the parameters of this rank."""
    worker = jobs.build(config, init_reference_model=False, init_optimizer=False)
    count = sum(parameter.numel() for _, parameter in worker.backend.parameters())
    worker.backend.close()
    return count


def train_on_shared_base(
    config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any, of: Mapping[str, Any]
) -> tuple[dict[str, Any], int, int, bool]:
    """Train a model that reads its frozen weights from the block of another one, built from ``of``. Return
    losses and weights, the bytes that it reads there, those of all its frozen weights, and whether they all
    see a change of the block, while their own memory is free."""
    owner = jobs.build(of, init_reference_model=False)
    shared: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shared, owner.share_base())
    owner.backend.close()
    worker = jobs.build(config, init_reference_model=False)
    own = {name: tensors[0].untyped_storage() for name, tensors in worker.backend.frozen().items()}
    frozen = sum(each.nbytes() for each in own.values())
    # torch's cache of DTensor operations may keep an uneven shard of the embedding.
    kept = [StorageWeakRef(each) for name, each in own.items() if "embed_tokens" not in name]
    del own
    taken = worker.take_base(shared)
    is_free = all(each.expired() for each in kept)
    losses = [jobs.step(worker, batch, loss_fn)[0] for batch in batches]
    weights = jobs.full_weights(worker)
    owner._block.bytes.zero_()
    trained = dict(worker.backend.trainable())
    sees = not any(each.any() for name, each in worker.backend.parameters() if name not in trained)
    worker.backend.close()
    return {"losses": losses, "weights": weights}, taken, frozen, sees and is_free


def share_nothing(config: Mapping[str, Any]) -> list[Any]:
    """What workers say that have no shared memory, or read a block of another machine, and of calls without
    the parameters."""
    worker = jobs.build(config, init_reference_model=False)
    with mock.patch.object(os, "memfd_create", side_effect=OSError(12, "Cannot allocate memory")):
        found: list[Any] = [worker.share_base(), worker.take_base([{}] * dist.get_world_size())]
    elsewhere = {"places": {}, "block": {"host": "another"}}
    found.append(worker.take_base([elsewhere] * dist.get_world_size()))
    worker.offload_states.offload_state = OffloadState.OFFLOADED
    found += [jobs.said(worker.share_base), jobs.said(lambda: worker.take_base([elsewhere]))]
    worker.backend.close()
    return found
