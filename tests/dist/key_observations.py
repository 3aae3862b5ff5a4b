"""What can be seen of a real worker that is built from a configuration: run by the pool's processes."""

from __future__ import annotations

import dataclasses
import importlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.config.backend import enabled_backend
from megarl.config.validation_sets import TEMPERATURE, TOP_K, TOP_P, SetPlan
from megarl.data.tokenization import get_tokenizer
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.generation import configure_generation_config
from megarl.models.policy.batch_plan import Phase, shard_batch
from megarl.models.policy.lm_policy import WORKERS
from tests.dist.batches import make_batch
from tests.dist.key_spies import Watch, watching

STEPS = 3
# a custom plan for DTensor: of the whole model the MLPs alone are divided
MLPS_ALONE = {
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def built(config: Mapping[str, Any]) -> dict[str, Any]:
    """The worker and what it is made of; nothing is computed."""
    with watching() as watch:
        worker = _worker(config, optimizer=True)
    backend = worker.backend
    seen = {
        "worker": type(worker).__name__,
        "config_class": type(worker.hf_config).__name__,
        "parameters": {
            name: (tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in backend.parameters()
        },
        "layout": {
            name: getattr(backend.groups, f"{name}_size")
            for name in ("pipeline", "data", "context", "tensor")
        },
        "notices": list(watch.notices),
        "weights": _weights(worker),
        **(_of_megatron(backend) if hasattr(backend, "chunks") else {}),
    }
    backend.close()
    return seen


def trained(config: Mapping[str, Any]) -> dict[str, Any]:
    """Three calls of ``train()`` on one batch each."""
    return _train(config, collectives=False)


def communicated(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with an eye on its collectives."""
    return _train(config, collectives=True)


def _train(config: Mapping[str, Any], *, collectives: bool) -> dict[str, Any]:
    worker = _worker(config, optimizer=True)
    losses, norms, metrics = [], [], []
    with watching(collectives) as watch:
        watch.passes_of(worker.backend)
        for step in range(STEPS):
            result = worker.train(
                data=_share(worker, make_batch(8, 13, seed=step), "train"), loss_fn=NLLLoss()
            )
            losses.append(result["global_loss"].tolist())
            norms.append(float(result["grad_norm"]))
            metrics.append(result["all_mb_metrics"])
        seen = {
            "losses": losses,
            "norms": norms,
            "rates": [found["lr"] for found in metrics],
            "decays": [found["wd"] for found in metrics],
            "metrics": sorted(metrics[0]),
            "optimizer_state": _optimizer_state(worker.backend.optimizer),
            **_watched(watch),
        }
    weights = _weights(worker)
    worker.backend.close()
    return {
        **seen,
        "weights": weights,
        "routers": {name: value for name, value in weights.items() if "gate.weight" in name},
    }


def scored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Log-probabilities of a batch."""
    worker = _worker(config, optimizer=False)
    with watching() as watch:
        watch.passes_of(worker.backend)
        logprobs = worker.get_logprobs(data=_share(worker, make_batch(8, 13), "logprob"))["logprobs"]
        seen = {"logprobs": logprobs, **_watched(watch)}
    worker.backend.close()
    return seen


def generated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampled answers to prompts of several lengths, and those of a validation."""
    worker = _worker(config, optimizer=False)
    lengths = torch.tensor([2, 5, 3, 4])
    prompts = make_batch(4, 5, seed=9)["input_ids"].clamp(min=3) * (torch.arange(5)[None] < lengths[:, None])
    data: BatchedDataDict[Any] = BatchedDataDict(
        {"input_ids": prompts, "input_lengths": lengths, "sampling_seeds": torch.arange(4)}
    )
    with watching() as watch:
        output = worker.generate(data=data)
        seen = {
            "ids": output["output_ids"],
            "answers": output["generation_lengths"].tolist(),
            "truncated": output["truncated"].tolist(),
            "logprobs": output["logprobs"],
            "rows_at_once": [shape[0] for shape in watch.tokens],
        }
    plan = SetPlan("set", (0,), 1, *(worker.cfg["generation"][key] for key in (TEMPERATURE, TOP_P, TOP_K)))
    seen["validated"] = worker.generate(data=data, greedy=plan.sampling is None, sampling=plan.sampling)[
        "output_ids"
    ]
    worker.backend.close()
    return seen


OBSERVATIONS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    function.__name__: function for function in (built, trained, communicated, scored, generated)
}


def observe(wanted: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any] | str]:
    """What the functions above, by name, see of workers of these configurations, one after the other; where
    one fails, its traceback.

    Several in one job of the pool, because a job's beginning and end cost as much as a small worker's life.
    """
    seen: list[dict[str, Any] | str] = []
    for name, config in wanted:
        try:
            seen.append(OBSERVATIONS[name](config))
        except Exception:
            seen.append(traceback.format_exc())
    return seen


def _worker(config: Mapping[str, Any], *, optimizer: bool) -> Any:
    module, _, kind = WORKERS[enabled_backend(config)].rpartition(".")
    tokenizer = get_tokenizer(config["tokenizer"], config["trust_remote_code"])
    config = {**config, "generation": configure_generation_config(config["generation"], tokenizer)}
    return getattr(importlib.import_module(module), kind)(
        config, tokenizer, init_optimizer=optimizer, init_reference_model=False
    )


def _share(worker: Any, batch: Mapping[str, Tensor], phase: Phase) -> BatchedDataDict[Any]:
    """This rank's rows, as the driver deals them."""
    groups, size = worker.backend.groups, worker.cfg["train_global_batch_size"] if phase == "train" else None
    return shard_batch(
        BatchedDataDict(batch), worker.cfg, groups.data_size, phase=phase, global_batch=size
    ).shards[groups.data_rank]


def _weights(worker: Any) -> dict[str, Tensor]:
    return {name: tensor.clone().cpu() for name, tensor in worker.backend.export_hf()}


def _watched(watch: Watch) -> dict[str, Any]:
    return {
        "collectives": dict(watch.collectives),
        "modules": dict(watch.modules),
        "tokens": list(watch.tokens),
        "micro_batches": list(watch.micro_batches),
        "emptied": list(watch.emptied),
    }


def _optimizer_state(optimizer: Any) -> dict[str, Any]:
    """Kinds of optimizer, and the sizes and types of the state that this rank holds."""
    inner = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [])] or [optimizer]
    return {
        "kinds": [type(part).__name__ for part in inner],
        "state": [
            (key, value.numel(), str(value.dtype))
            for part in inner
            for state in part.state.values()
            for key, value in sorted(state.items())
            if isinstance(value, Tensor) and value.numel() > 1
        ],
    }


def _of_megatron(backend: Any) -> dict[str, Any]:
    """Megatron's own configuration objects, its chunks and its gradient buffers."""
    chunk = backend.chunks[0]
    return {
        "chunks": [sorted(name for name, _ in stage.named_parameters()) for stage in backend.stages],
        "data_parallel": dataclasses.asdict(chunk.ddp_config),
        "buckets": [[len(buffer.buckets) for buffer in chunk.buffers] for chunk in backend.chunks],
        "gradient_types": [str(buffer.grad_dtype) for buffer in chunk.buffers],
    }
