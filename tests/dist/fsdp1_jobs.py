"""Configurations for FSDP1, and what the pool's processes run for it alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.batched_data_dict import BatchedDataDict
from tests.dist import jobs
from tests.models import policy_config

BATCHING: dict[str, dict[str, Any]] = {
    "fixed": {},
    "dynamic": {
        "dynamic_batching": {
            "enabled": True,
            "train_mb_tokens": 30,
            "logprob_mb_tokens": 45,
            "sequence_length_round": 4,
        },
    },
    "packed": {
        "sequence_packing": {
            "enabled": True,
            "train_mb_tokens": 29,
            "logprob_mb_tokens": 41,
            "algorithm": "modified_first_fit_decreasing",
        },
    },
}


def fsdp1_config(model: Path | str, batching: str = "fixed", **changes: Any) -> dict[str, Any]:
    """``policy_config`` for FSDP1: the same optimizer, and the same warm-up as a schedule of torch."""
    recompute = changes.pop("recompute", False)
    scheduler = changes.pop(
        "scheduler",
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.25, "total_iters": 2}},
    )
    optimizer = changes.pop("torch_optimizer", None)
    config = policy_config(model, **changes)
    adam = config["megatron_cfg"]["optimizer"]
    return {
        **config,
        "megatron_cfg": {"enabled": False},
        "activation_checkpointing_enabled": recompute,
        "optimizer": optimizer
        or {
            "name": "torch.optim.AdamW",
            "weight_decay_on_vectors": False,
            "kwargs": {
                "lr": adam["lr"],
                "weight_decay": adam["weight_decay"],
                "betas": [adam["adam_beta1"], adam["adam_beta2"]],
                "eps": adam["adam_eps"],
                "foreach": False,
                "fused": False,
            },
        },
        "scheduler": scheduler,
        **BATCHING[batching],
    }


def refused_loads(config: Mapping[str, Any], directories: list[Path]) -> list[str]:
    """Errors of loading weights, and of loading an optimizer, from each directory."""
    worker = jobs.build(config, init_reference_model=False)
    good, *others = map(str, directories)
    messages = []
    for other in others:
        messages += [jobs.said(lambda other=other: worker.load_checkpoint(other, None))]  # type: ignore[misc]
        messages += [jobs.said(lambda other=other: worker.load_checkpoint(good, other))]  # type: ignore[misc]
    worker.backend.close()
    return messages


def save_twice(config: Mapping[str, Any], directory: Path) -> str:
    worker = jobs.build(config, init_reference_model=False)
    worker.save_checkpoint(str(directory))
    message = jobs.said(lambda: worker.save_checkpoint(str(directory)))
    worker.backend.close()
    return message


def small_methods(config: Mapping[str, Any]) -> dict[str, Any]:
    """Answers and errors of methods that move nothing on a CPU, and of those that are not there yet."""
    worker = jobs.build(config)
    answers: dict[str, Any] = {
        "repr": repr(worker),
        "alive": worker.is_alive(),
        "info": worker.get_gpu_info(),
        "same model": worker.manual_load_to_gpu(worker.manual_offload_to_cpu(worker.model)) is worker.model,
    }
    other = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    answers["other model"] = worker.manual_load_to_gpu(worker.manual_offload_to_cpu(other)) is other
    narrow = {
        "input_ids": torch.ones(2, 4, dtype=torch.int64),
        "input_lengths": torch.tensor([4, 4]),
        "sample_mask": torch.ones(2),
    }
    wide = BatchedDataDict({**narrow, "token_mask": torch.ones(2, 5)})
    answers["columns"] = [
        jobs.said(lambda: worker.get_logprobs(wide)),
        jobs.said(lambda: worker.train(data=wide, loss_fn=NLLLoss())),
    ]
    with tempfile.TemporaryDirectory() as directory:
        worker.start_torch_profiling([0])
        worker.get_logprobs(BatchedDataDict(narrow))
        answers["trace"] = worker.stop_torch_profiling(Path(directory) / "profiles" / "steps_1_to_1")
        events = json.loads(Path(answers["trace"]).read_text())["traceEvents"] if answers["trace"] else []
        answers["traced"] = any(event.get("name") == "aten::mm" for event in events)
        answers["stopped"] = worker.stop_torch_profiling(Path(directory) / "again")
    before = jobs.full_weights(worker)
    worker._add_noise_to_weights()
    after = jobs.full_weights(worker)
    answers["noise"] = {name: float((after[name] - before[name]).std()) for name in before}
    worker.shutdown()
    return answers


def peak_of_build(config: Mapping[str, Any]) -> dict[str, int]:
    """Largest number of elements that real parameters had at once while the model was built, and of the whole
    model."""
    from megarl.models.fsdp1.build import Filler

    live: list[int] = []
    original = Filler.__call__

    def counting(self: Filler, module: torch.nn.Module) -> None:
        original(self, module)
        live.append(sum(place.get().numel() for place in self.held.values() if not place.get().is_meta))

    Filler.__call__ = counting  # type: ignore[method-assign]
    try:
        worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    finally:
        Filler.__call__ = original  # type: ignore[method-assign]
    total = sum(tensor.numel() for _, tensor in worker.backend.export_hf())
    worker.backend.close()
    return {"peak": max(live), "total": total}
