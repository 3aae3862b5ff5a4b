"""What the pool's processes run for FSDP1: a real worker on its share of a batch, dealt by the driver's own plan."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.huggingface import generation
from megarl.models.policy.batch_plan import ShardedBatch, shard_batch
from megarl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from tests.dist.jobs import prompts_in_several_passes, recorded_and_replayed, recorded_steps
from tests.dist.worker_jobs import differences
from tests.models import policy_config

BATCHING: dict[str, dict[str, Any]] = {
    "fixed": {},
    "dynamic": {
        "dynamic_batching": {"enabled": True, "train_mb_tokens": 30, "logprob_mb_tokens": 45, "sequence_length_round": 4},
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
    scheduler = changes.pop("scheduler", {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.25, "total_iters": 2}})
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


def build(config: Mapping[str, Any], **options: Any) -> FSDP1PolicyWorker:
    return FSDP1PolicyWorker(config, options.pop("tokenizer", None), **options)


def deal(worker: FSDP1PolicyWorker, batch: Mapping[str, Any], phase: Any, global_batch: int | None = None) -> ShardedBatch:
    return shard_batch(BatchedDataDict(batch), worker.cfg, worker.backend.groups.data_size, phase=phase, global_batch=global_batch)


def my_share(worker: FSDP1PolicyWorker, batch: Mapping[str, Any]) -> BatchedDataDict[Any]:
    return deal(worker, batch, "train", worker.cfg["train_global_batch_size"]).shards[worker.backend.groups.data_rank]


def full_weights(worker: FSDP1PolicyWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().cpu() for name, tensor in worker.backend.export_hf()}


def all_logprobs(worker: FSDP1PolicyWorker, batch: Mapping[str, Any], reference: bool = False) -> torch.Tensor:
    """Of the whole batch, in its order."""
    sharded = deal(worker, batch, "logprob")
    share = sharded.shards[worker.backend.groups.data_rank]
    if reference:
        mine = worker.get_reference_policy_logprobs(data=share)["reference_logprobs"]
    else:
        mine = worker.get_logprobs(data=share)["logprobs"]
    shares: list[Any] = [None] * worker.backend.groups.data_size
    dist.all_gather_object(shares, mine, group=worker.backend.groups.data)
    return sharded.restore(shares)


def logprobs(config: Mapping[str, Any], batch: Mapping[str, Any]) -> torch.Tensor:
    worker = build(config, init_optimizer=False, init_reference_model=False)
    values = all_logprobs(worker, batch)
    worker.backend.close()
    return values


def step(worker: FSDP1PolicyWorker, batch: Mapping[str, Any], loss_fn: Any) -> tuple[float, float, float]:
    """(loss, gradient norm, learning rate) of one global batch."""
    result = worker.train(data=my_share(worker, batch), loss_fn=loss_fn)
    return float(result["global_loss"]), float(result["grad_norm"]), result["all_mb_metrics"]["lr"][-1]


def train(config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any) -> dict[str, Any]:
    worker = build(config, init_reference_model=False)
    measured = [step(worker, batch, loss_fn) for batch in batches]
    weights = full_weights(worker)
    worker.backend.close()
    return {"losses": [m[0] for m in measured], "norms": [m[1] for m in measured], "lrs": [m[2] for m in measured], "weights": weights}


def snapshot(worker: FSDP1PolicyWorker) -> dict[str, Any]:
    """Copies of everything that evaluation must leave alone: this rank's parameters, optimizer state, schedule, generator."""
    kept: dict[str, Any] = {f"weight {name}": parameter.detach().clone() for name, parameter in worker.backend.parameters()}
    optimizer = worker.backend.optimizer
    if optimizer is not None:
        for number, group in enumerate(optimizer.param_groups):
            kept |= {f"group {number} {key}": value for key, value in group.items() if key != "params"}
            for index, parameter in enumerate(group["params"]):
                for key, value in optimizer.state.get(parameter, {}).items():
                    kept[f"state {number} {index} {key}"] = value.clone() if isinstance(value, torch.Tensor) else value
    kept["schedule"] = worker.backend.scheduler.state_dict() if worker.backend.scheduler else None
    kept["rng"] = torch.get_rng_state()
    kept["training"] = worker.backend.is_training()
    return kept


def evaluate_between(config: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Train, do all that must change nothing, train again; and what an undisturbed worker has at the end."""
    worker = build(config)
    share = my_share(worker, batch)
    worker.train(data=share, loss_fn=NLLLoss())
    before = snapshot(worker)
    evaluated = worker.train(data=share, loss_fn=NLLLoss(), eval_mode=True)
    changed = {"eval": differences(before, snapshot(worker))}
    all_logprobs(worker, batch)
    changed["get_logprobs"] = differences(before, snapshot(worker))
    all_logprobs(worker, batch, reference=True)
    changed["get_reference_policy_logprobs"] = differences(before, snapshot(worker))
    worker.prepare_for_lp_inference()
    worker.prepare_for_training()
    changed["prepare"] = differences(before, snapshot(worker))
    prompts = BatchedDataDict({key: share[key] for key in ("input_ids", "input_lengths")})
    prompts["sampling_seeds"] = torch.arange(prompts.size)
    worker.generate(data=prompts)
    changed["generate"] = differences(before, snapshot(worker))
    full_weights(worker)
    changed["export"] = differences(before, snapshot(worker))
    trained = worker.train(data=share, loss_fn=NLLLoss())
    disturbed = full_weights(worker)
    worker.backend.close()
    worker = build(config)
    for _ in range(2):
        worker.train(data=share, loss_fn=NLLLoss())
    changed["later training"] = differences(full_weights(worker), disturbed)
    worker.backend.close()
    return {"changed": changed, "evaluated": evaluated, "trained": trained}


def reference_swap(config: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the reference policy gives and leaves behind, passes under both weights following one another."""
    worker = build(config)
    first = all_logprobs(worker, batch)
    share = my_share(worker, batch)
    for _ in range(2):
        worker.train(data=share, loss_fn=NLLLoss())
    before = snapshot(worker)
    facts: dict[str, Any] = {"own": all_logprobs(worker, batch)}
    facts["reference"] = all_logprobs(worker, batch, reference=True)
    facts["own again"] = all_logprobs(worker, batch)
    facts["first"] = first
    try:
        with worker.use_reference_model():
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    facts["changed"] = differences(before, snapshot(worker))
    worker.train(data=share, loss_fn=NLLLoss())
    trained = full_weights(worker)
    worker.backend.close()
    worker = build(config, init_reference_model=False)
    for _ in range(3):
        worker.train(data=share, loss_fn=NLLLoss())
    facts["trained otherwise"] = differences(trained, full_weights(worker))
    worker.backend.close()
    return facts


def train_and_save(config: Mapping[str, Any], batches: list[Mapping[str, Any]], saved_after: int, directory: Path) -> dict[str, Any]:
    """Trains on all batches, saving after some of them; what came after."""
    worker = build(config, init_reference_model=False)
    measured = []
    for index, batch in enumerate(batches):
        if index == saved_after:
            worker.save_checkpoint(str(directory / "weights"), str(directory / "optimizer"))
        measured.append(step(worker, batch, NLLLoss()))
    result = {
        "measured": measured[saved_after:],
        "weights": full_weights(worker),
        "snapshot": snapshot(worker),
        "logprobs": all_logprobs(worker, batches[0]),
    }
    worker.backend.close()
    return result


def load_and_train(config: Mapping[str, Any], batches: list[Mapping[str, Any]], directory: Path, live: bool) -> dict[str, Any]:
    """Continues from a checkpoint, in a new worker or in one that has trained on something else before."""
    paths = (str(directory / "weights"), str(directory / "optimizer"))
    if live:
        worker = build(config, init_reference_model=False)
        step(worker, {key: value.flip(0) for key, value in batches[0].items()}, NLLLoss())
        all_logprobs(worker, batches[0])
        worker.load_checkpoint(*paths)
    else:
        worker = build(config, weights_path=paths[0], optimizer_path=paths[1], init_reference_model=False)
    measured = [step(worker, batch, NLLLoss()) for batch in batches]
    result = {
        "measured": measured,
        "weights": full_weights(worker),
        "snapshot": snapshot(worker),
        "logprobs": all_logprobs(worker, batches[-1]),
    }
    worker.backend.close()
    return result


def refused_loads(config: Mapping[str, Any], directories: list[Path]) -> list[str]:
    """Errors of loading weights, and of loading an optimizer, from each directory."""
    worker = build(config, init_reference_model=False)
    worker_weights = directories[0]
    messages = []
    for directory in directories[1:]:
        for paths in ((directory, None), (worker_weights, directory)):
            try:
                worker.load_checkpoint(str(paths[0]), str(paths[1]) if paths[1] else None)
                messages.append("no error")
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
    worker.backend.close()
    return messages


def save_twice(config: Mapping[str, Any], directory: Path) -> str:
    worker = build(config, init_reference_model=False)
    worker.save_checkpoint(str(directory))
    try:
        worker.save_checkpoint(str(directory))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        worker.backend.close()
    return ""


def generate(config: Mapping[str, Any], batch: Mapping[str, Any], greedy: bool, tokenizer: Any = None) -> list[dict[str, Any]]:
    """Rows of all ranks in order, some of which may get no prompt at all, with get_logprobs' log-probabilities of the same tokens."""
    worker = build(config, tokenizer=tokenizer, init_optimizer=False, init_reference_model=False)
    groups = worker.backend.groups
    shards = BatchedDataDict(batch).shard_by_batch_size(groups.data_size, batch_size=None, allow_uneven_shards=True)
    with prompts_in_several_passes():
        output = worker.generate(data=shards[groups.data_rank], greedy=greedy)
    rows = []
    for row in range(output["output_ids"].shape[0]):
        total, new = int(output["unpadded_sequence_lengths"][row]), int(output["generation_lengths"][row])
        values = output["logprobs"][row]
        rows.append(
            {
                "ids": output["output_ids"][row, :total].tolist(),
                "padding": output["output_ids"][row, total:].tolist(),
                "new": new,
                "truncated": bool(output["truncated"][row]),
                "logprobs": values[total - new : total],
                "others": torch.cat([values[: total - new], values[total:]]),
            }
        )
    shares: list[Any] = [None] * groups.data_size
    dist.all_gather_object(shares, rows, group=groups.data)
    every = [row for share in shares for row in share]
    width = max(len(row["ids"]) for row in every)
    ids = torch.tensor([row["ids"] + [0] * (width - len(row["ids"])) for row in every])
    recomputed = all_logprobs(worker, {"input_ids": ids, "input_lengths": torch.tensor([len(row["ids"]) for row in every])})
    for row, values in zip(every, recomputed, strict=True):
        row["recomputed"] = values[len(row["ids"]) - row["new"] : len(row["ids"])]
    worker.backend.close()
    return every


def small_methods(config: Mapping[str, Any]) -> dict[str, Any]:
    """Answers and errors of methods that move nothing on a CPU, and of those that are not there yet."""
    worker = build(config)
    answers: dict[str, Any] = {
        "repr": repr(worker),
        "alive": worker.is_alive(),
        "info": worker.get_gpu_info(),
        "same model": worker.manual_load_to_gpu(worker.manual_offload_to_cpu(worker.model)) is worker.model,
    }
    other = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    answers["other model"] = worker.manual_load_to_gpu(worker.manual_offload_to_cpu(other)) is other
    narrow = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "input_lengths": torch.tensor([4, 4]), "sample_mask": torch.ones(2)}
    answers["columns"] = []
    for call in (worker.get_logprobs, lambda data: worker.train(data=data, loss_fn=NLLLoss())):
        try:
            call(BatchedDataDict({**narrow, "token_mask": torch.ones(2, 5)}))
        except AssertionError as error:
            answers["columns"].append(f"{type(error).__name__}: {error}")
    with tempfile.TemporaryDirectory() as directory:
        worker.start_torch_profiling([0])
        worker.get_logprobs(BatchedDataDict(narrow))
        answers["trace"] = worker.stop_torch_profiling(Path(directory) / "profiles" / "steps_1_to_1")
        events = json.loads(Path(answers["trace"]).read_text())["traceEvents"] if answers["trace"] else []
        answers["traced"] = any(event.get("name") == "aten::mm" for event in events)
        answers["stopped"] = worker.stop_torch_profiling(Path(directory) / "again")
    before = full_weights(worker)
    worker._add_noise_to_weights()
    after = full_weights(worker)
    answers["noise"] = {name: float((after[name] - before[name]).std()) for name in before}
    worker.shutdown()
    return answers


def build_error(config: Mapping[str, Any]) -> str:
    try:
        build(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def export(config: Mapping[str, Any], directory: str) -> dict[str, torch.Tensor]:
    worker = build(config, init_optimizer=False, init_reference_model=False)
    weights = full_weights(worker)
    worker.export_hf(directory)
    worker.backend.close()
    return weights


def peak_of_build(config: Mapping[str, Any]) -> dict[str, int]:
    """Largest number of elements that real parameters had at once while the model was built, and of the whole model."""
    from megarl.models.fsdp1.build import Filler

    live: list[int] = []
    original = Filler.__call__

    def counting(self: Filler, module: torch.nn.Module) -> None:
        original(self, module)
        live.append(sum(place.get().numel() for place in self.held.values() if not place.get().is_meta))

    Filler.__call__ = counting  # type: ignore[method-assign]
    try:
        worker = build(config, init_optimizer=False, init_reference_model=False)
    finally:
        Filler.__call__ = original  # type: ignore[method-assign]
    total = sum(tensor.numel() for _, tensor in worker.backend.export_hf())
    worker.backend.close()
    return {"peak": max(live), "total": total}


def generate_recorded(
    config: Mapping[str, Any], batch: Mapping[str, Any], greedy: bool
) -> tuple[list[dict[str, Any]], tuple[int, int] | None]:
    """``generate`` whose steps are recorded and run from the recording, as ``jobs.generate_recorded``."""
    with recorded_steps(checked=dist.get_world_size() == 1, backend=generation) as graphs:
        return generate(config, batch, greedy), recorded_and_replayed(graphs)
