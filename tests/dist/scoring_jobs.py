"""What the pool's processes run for models that score, on any backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.backend import enabled_backend
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import MegarlError
from megarl.models.engine.worker import EngineWorker
from megarl.models.policy.batch_plan import ShardedBatch, shard_batch
from megarl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from megarl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker

WORKERS: dict[str, type[EngineWorker]] = {
    "megatron": MegatronPolicyWorker,
    "dtensor": DTensorPolicyWorker,
    "fsdp1": FSDP1PolicyWorker,
}


def build(config: Mapping[str, Any], tokenizer: Any = None, **options: Any) -> EngineWorker:
    return WORKERS[enabled_backend(config)](config, tokenizer, init_reference_model=False, **options)


def deal(worker: EngineWorker, batch: Mapping[str, Any], phase: Any, **options: Any) -> ShardedBatch:
    return shard_batch(BatchedDataDict(batch), worker.cfg, worker.backend.groups.data_size, phase=phase, **options)


def values_of(worker: EngineWorker, batch: Mapping[str, Any]) -> torch.Tensor:
    """Values of the whole batch, in its order."""
    sharded = deal(worker, batch, "logprob")
    mine = worker.get_values(data=sharded.shards[worker.backend.groups.data_rank])["values"]
    shares: list[Any] = [None] * worker.backend.groups.data_size
    dist.all_gather_object(shares, mine, group=worker.backend.groups.data)
    return sharded.restore(shares)


def values(config: Mapping[str, Any], batch: Mapping[str, Any], seed: int = 0) -> torch.Tensor:
    worker = build(config, init_optimizer=False, seed=seed)
    found = values_of(worker, batch)
    worker.backend.close()
    return found


def full_weights(worker: EngineWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().cpu() for name, tensor in worker.backend.export_hf()}


def step(worker: EngineWorker, batch: Mapping[str, Any], loss_fn: Any) -> dict[str, Any]:
    together = getattr(loss_fn, "rows_together", 1)
    sharded = deal(worker, batch, "train", global_batch=worker.cfg["train_global_batch_size"], rows_together=together)
    return worker.train(data=sharded.shards[worker.backend.groups.data_rank], loss_fn=loss_fn)


def train(config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any) -> dict[str, Any]:
    """Losses, gradient norms, metrics of this replica and the weights after one ``train()`` call for each batch."""
    worker = build(config)
    results = [step(worker, batch, loss_fn) for batch in batches]
    weights = full_weights(worker)
    worker.backend.close()
    return {
        "losses": [float(result["global_loss"]) for result in results],
        "norms": [float(result["grad_norm"]) for result in results],
        "metrics": [result["all_mb_metrics"] for result in results],
        "weights": weights,
    }


def train_and_save(config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any, directory: Path) -> dict[str, Any]:
    """Trains on all batches, saving after the first; the weights at the end."""
    worker = build(config)
    for number, batch in enumerate(batches):
        step(worker, batch, loss_fn)
        if number == 0:
            worker.save_checkpoint(str(directory / "weights"), str(directory / "optimizer"))
    weights = full_weights(worker)
    worker.backend.close()
    return weights


def resume(config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any, directory: Path) -> dict[str, Any]:
    """What ``train_and_save`` left, trained on the other batches."""
    worker = build(config, weights_path=str(directory / "weights"), optimizer_path=str(directory / "optimizer"))
    for batch in batches[1:]:
        step(worker, batch, loss_fn)
    weights = full_weights(worker)
    worker.backend.close()
    return weights


def export(config: Mapping[str, Any], batch: Mapping[str, Any], directory: Path, tokenizer: Any) -> torch.Tensor:
    """Writes a Hugging Face model; its values of the batch."""
    worker = build(config, tokenizer, init_optimizer=False, seed=5)
    worker.export_hf(str(directory))
    found = values_of(worker, batch)
    worker.backend.close()
    return found


def refused(config: Mapping[str, Any], calls: Mapping[str, Mapping[str, Any]], **options: Any) -> dict[str, str]:
    """What a worker says to each of the calls, by method; to being built, where it cannot be."""
    try:
        worker = build(config, init_optimizer=False, **options)
    except (MegarlError, ValueError) as error:
        return {"build": f"{type(error).__name__}: {error}"}
    said = {}
    for method, arguments in calls.items():
        try:
            getattr(worker, method)(**arguments)
        except MegarlError as error:
            said[method] = f"{type(error).__name__}: {error}"
    worker.backend.close()
    return said


def save(config: Mapping[str, Any], directory: Path) -> None:
    worker = build(config)
    worker.save_checkpoint(str(directory / "weights"))
    worker.backend.close()


def cannot_load(config: Mapping[str, Any], weights: Path) -> str:
    """What a worker says to weights that are not its own."""
    worker = build(config)
    try:
        worker.load_checkpoint(str(weights))
    except MegarlError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        worker.backend.close()
    return ""


def held_parameters(config: Mapping[str, Any]) -> int:
    """Elements of the parameters of this rank."""
    worker = build(config, init_optimizer=False)
    count = sum(parameter.numel() for _, parameter in worker.backend.parameters())
    worker.backend.close()
    return count
