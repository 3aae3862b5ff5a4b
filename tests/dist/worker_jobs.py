"""Attacks on one worker that the pool's processes run; each returns what the test has to judge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.engine.logprobs import VocabularyShard, vocab_parallel_scores
from megarl.models.generation.sampling import SamplingSettings
from megarl.models.megatron.backend import move_optimizer
from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker
from tests.dist import jobs


class RecordingLoss(NLLLoss):
    """NLL that keeps the log-probabilities it was given."""

    def __init__(self, *, skips: bool = True) -> None:
        self.seen: list[torch.Tensor] = []
        self.skips_masked = skips

    def __call__(self, data: Any, *normalizers: Any, next_token_logprobs: torch.Tensor) -> Any:
        self.seen.append(next_token_logprobs.detach().clone())
        return super().__call__(data, *normalizers, next_token_logprobs=next_token_logprobs)


class OverflowingLoss(NLLLoss):
    """NLL whose gradient overflows float16 wherever the marked row is."""

    def __call__(self, data: Any, *normalizers: Any, next_token_logprobs: torch.Tensor) -> Any:
        loss, metrics = super().__call__(data, *normalizers, next_token_logprobs=next_token_logprobs)
        return loss * (1e30 if bool((data["sample_mask"] == 2).any()) else 1.0), metrics


class SelfReportingLoss(NLLLoss):
    """NLL whose metrics are attached tensors, the loss itself among them."""

    def __call__(self, data: Any, *normalizers: Any, next_token_logprobs: torch.Tensor) -> Any:
        loss, metrics = super().__call__(data, *normalizers, next_token_logprobs=next_token_logprobs)
        return loss, {**metrics, "loss": loss, "twice": 2 * loss}


def places(worker: MegatronPolicyWorker) -> tuple[list[int], list[int]]:
    """Addresses of the model's parameters and of the parameters that the optimizer updates."""
    assert worker.backend.optimizer is not None
    groups = [group for chained in worker.backend.optimizer.chained_optimizers for group in chained.optimizer.param_groups]
    model = [parameter.data_ptr() for _, parameter in worker.backend.parameters()]
    return model, [parameter.data_ptr() for group in groups for parameter in group["params"]]


def move_optimizer_between_steps(config: Mapping[str, Any], batch: Mapping[str, Any]) -> list[str]:
    """What differs after training with and without moves of the optimizer between the steps, and parameters moved by mistake."""
    outcomes, mistakes = [], set()
    for moving in (False, True):
        worker = jobs.build(config, init_reference_model=False)
        for _ in range(3):
            worker.train(data=jobs.my_share(worker, batch, config["train_global_batch_size"]), loss_fn=NLLLoss())
            if moving:
                assert worker.backend.optimizer is not None
                model, updated = places(worker)
                move_optimizer(worker.backend.optimizer, torch.clone)
                if places(worker)[0] != model:
                    mistakes.add("the model moved")
                if (places(worker)[1] != updated) != (config["precision"] != "float32"):
                    mistakes.add("only copies of half-precision parameters have to move")
        outcomes.append(snapshot(worker))
        worker.backend.close()
    return differences(*outcomes) + sorted(mistakes)


def snapshot(worker: MegatronPolicyWorker) -> dict[str, Any]:
    """Copies of everything that evaluation must leave alone."""
    backend = worker.backend
    backend.sync_parameters()
    kept: dict[str, Any] = {f"weight {name}": parameter.detach().clone() for name, parameter in backend.parameters()}
    if backend.optimizer is not None:
        for chained in backend.optimizer.chained_optimizers:
            for number, group in enumerate(chained.optimizer.param_groups):
                for key, value in group.items():
                    if key != "params":
                        kept[f"group {number} {key}"] = value
                for index, parameter in enumerate(group["params"]):
                    kept[f"main {number} {index}"] = parameter.detach().clone()
                    for key, value in chained.optimizer.state.get(parameter, {}).items():
                        kept[f"state {number} {index} {key}"] = value.clone() if isinstance(value, torch.Tensor) else value
        kept["schedule"] = backend.scheduler.state_dict() if backend.scheduler else None
    kept["rng"] = torch.get_rng_state()
    kept["training"] = backend.is_training()
    return kept


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of entries that are not equal to the bit."""

    def equal(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other

    return sorted(set(before) ^ set(after)) + [key for key in before.keys() & after.keys() if not equal(before[key], after[key])]


def replicas_agree(worker: MegatronPolicyWorker) -> bool:
    """Whether all data-parallel replicas hold the same weights, and all holders of a tied or replicated weight the same copy."""
    worker.backend.sync_parameters()
    groups = worker.backend.groups
    mine = {name: parameter.detach().clone() for name, parameter in worker.backend.parameters()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (groups.pipeline_rank, groups.tensor_rank, mine))
    stages: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for stage, rank, weights in everyone:
        if differences(stages.setdefault((stage, rank), weights), weights):
            return False
    if worker.backend.stages[0].share_embeddings_and_output_weights and groups.pipeline_size > 1:
        for rank in range(groups.tensor_size):
            first, last = stages[0, rank], stages[groups.pipeline_size - 1, rank]
            if not torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"]):
                return False
    replicated = [name for name in mine if "norm" in name]
    return all(torch.equal(stages[s, r][name], stages[s, 0][name]) for s, r in stages for name in replicated if name in stages[s, r])


def evaluate_between(config: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Train, do all that must change nothing, train again; and what an undisturbed worker has at the end."""
    worker = jobs.build(config)
    share = jobs.my_share(worker, batch, config["train_global_batch_size"])
    worker.train(data=share, loss_fn=NLLLoss())
    before = snapshot(worker)
    evaluated = worker.train(data=share, loss_fn=NLLLoss(), eval_mode=True)
    changed = {"eval": differences(before, snapshot(worker))}
    worker.get_logprobs(data=share)
    changed["get_logprobs"] = differences(before, snapshot(worker))
    worker.get_reference_policy_logprobs(data=share)
    changed["get_reference_policy_logprobs"] = differences(before, snapshot(worker))
    worker.prepare_for_lp_inference()
    worker.prepare_for_training()
    changed["prepare"] = differences(before, snapshot(worker))
    prompts = BatchedDataDict({**{key: share[key] for key in ("input_ids", "input_lengths")}})
    prompts["sampling_seeds"] = torch.arange(prompts.size)
    worker.generate(data=prompts)
    changed["generate"] = differences(before, snapshot(worker))
    trained = worker.train(data=share, loss_fn=NLLLoss())
    disturbed = jobs.full_weights(worker)
    worker.backend.close()
    worker = jobs.build(config)
    for _ in range(2):
        worker.train(data=share, loss_fn=NLLLoss())
    changed["later training"] = differences(jobs.full_weights(worker), disturbed)
    worker.backend.close()
    return {"changed": changed, "evaluated": evaluated, "trained": trained}


def logprobs_in_loss(config: Mapping[str, Any], batch: Mapping[str, Any], micro_batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(inside the loss, from get_logprobs) on the last stage, each [b, S-1] with padding set to 0: of the tokens under the mask, where both
    skip the others, and then of all."""
    worker = jobs.build(config, init_reference_model=False)
    share = jobs.my_share(worker, batch, config["train_global_batch_size"])
    positions = torch.arange(1, share["input_ids"].shape[1])[None] < share["input_lengths"][:, None]
    pairs = []
    for skips in (True, False):
        outside = worker.get_logprobs(data=share, micro_batch_size=micro_batch, skip_masked=skips)["logprobs"][:, 1:]
        loss = RecordingLoss(skips=skips)
        worker.train(data=share, loss_fn=loss, mbs=micro_batch)
        if loss.seen:
            pairs.append((torch.cat(loss.seen)[:, : outside.shape[1]] * positions, outside))
    worker.backend.close()
    return pairs


def reference_swap(config: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """What use_reference_model leaves behind, also after an error and when nested."""
    worker = jobs.build(config)
    share = jobs.my_share(worker, batch, config["train_global_batch_size"])
    first = worker.get_logprobs(data=share)["logprobs"]
    for _ in range(2):
        worker.train(data=share, loss_fn=NLLLoss())
    before = snapshot(worker)
    facts: dict[str, Any] = {}
    facts["same as first"] = torch.equal(worker.get_reference_policy_logprobs(data=share)["reference_logprobs"], first)
    facts["moved away"] = not torch.equal(worker.get_logprobs(data=share)["logprobs"], first)
    try:
        with worker.use_reference_model():
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    facts["after an error"] = differences(before, snapshot(worker))
    refused = []
    with worker.use_reference_model():
        nested = worker.get_reference_policy_logprobs(data=share)["reference_logprobs"]
        attempts = {
            "train": lambda: worker.train(data=share, loss_fn=NLLLoss()),
            "load_checkpoint": lambda: worker.load_checkpoint("/proc/nowhere"),
            "save_checkpoint": lambda: worker.save_checkpoint("/proc/nowhere"),
        }
        for name, attempt in attempts.items():
            try:
                attempt()
            except Exception as error:
                refused.append((name, type(error).__name__, str(error)))
    facts["nested"] = torch.equal(nested, first)
    facts["refused"] = refused
    facts["after nesting"] = differences(before, snapshot(worker))
    worker.train(data=share, loss_fn=NLLLoss())
    facts["trains again"] = bool(differences(before, snapshot(worker)))
    worker.backend.close()
    return facts


def train_and_look(config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any) -> dict[str, Any]:
    """Results of train() for each batch, which weights moved, and whether replicas still agree."""
    worker = jobs.build(config, init_reference_model=False)
    results, moved = [], []
    for batch in batches:
        before = jobs.full_weights(worker)
        results.append(worker.train(data=jobs.my_share(worker, batch, config["train_global_batch_size"]), loss_fn=loss_fn))
        moved.append(differences(before, jobs.full_weights(worker)))
    weights = jobs.full_weights(worker)
    agree = replicas_agree(worker)
    worker.backend.close()
    return {"results": results, "moved": moved, "weights": weights, "agree": agree}


def add_noise(config: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Noise on weights of replicas whose generators have drifted apart, then one training step with a learning rate of almost nothing."""
    worker = jobs.build(config, init_reference_model=False)
    torch.rand(1 + dist.get_rank())
    clean = jobs.full_weights(worker)
    worker._add_noise_to_weights()
    agree = replicas_agree(worker)
    noisy = jobs.full_weights(worker)
    worker.train(data=jobs.my_share(worker, batch, config["train_global_batch_size"]), loss_fn=NLLLoss())
    trained = jobs.full_weights(worker)
    worker.backend.close()
    return {"agree": agree, "clean": clean, "noisy": noisy, "trained": trained}


def schedule(config: Mapping[str, Any], calls: int) -> list[tuple[float, float]]:
    """(lr, wd) of each of ``calls`` train() calls."""
    worker = jobs.build(config, init_reference_model=False)
    values = []
    for _ in range(calls):
        now = worker.backend.schedule_values()
        values.append((now["lr"], now["wd"]))
        worker.backend.lr_step()
    worker.backend.close()
    return values


def shard_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, size: int, sampling: SamplingSettings, with_entropies: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [T], or with entropies [2, T], and this rank's gradient when ``logits`` [T, columns] are cut over all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    columns = logits.shape[1] // ranks
    mine = logits[:, rank * columns : (rank + 1) * columns].clone().requires_grad_()
    shard = VocabularyShard(size, rank * columns, dist.group.WORLD)
    scores = vocab_parallel_scores(mine, targets, shard, sampling, with_entropies=with_entropies)
    values = scores.logprobs if scores.entropies is None else torch.stack([scores.logprobs, scores.entropies])
    (values * torch.arange(1, values.numel() + 1).view(values.shape)).sum().backward()
    return values.detach(), mine.grad


def small_methods(config: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """Answers of the contract's small methods, and the errors of calls in the wrong state."""
    worker = jobs.build(config)
    errors: dict[str, str] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
            errors[name] = "no error"
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"

    data = BatchedDataDict({"input_ids": torch.ones(2, 3, dtype=torch.int64), "input_lengths": torch.tensor([3, 2])})
    full = BatchedDataDict({**data, "sample_mask": torch.ones(2), "token_mask": torch.ones(2, 3)})
    for name, change in {"gbs": {"gbs": -2}, "gbs 0": {"gbs": 0}, "mbs": {"mbs": 0, "gbs": 2 * worker.backend.groups.data_size}}.items():
        attempt(name, lambda change=change: worker.train(data=full, loss_fn=NLLLoss(), **change))
    attempt("sample_mask", lambda: worker.train(data=data, loss_fn=NLLLoss()))
    attempt("rows", lambda: worker.train(data=full, loss_fn=NLLLoss(), gbs=4 * worker.backend.groups.data_size))
    attempt("logprob rows", lambda: worker.get_logprobs(data=data, micro_batch_size=-1))
    Path(directory).mkdir(exist_ok=True)
    (Path(directory) / "something").touch()
    attempt("export", lambda: worker.export_hf(directory))
    worker.offload_before_refit()
    attempt("train before refit", lambda: worker.train(data=full, loss_fn=NLLLoss()))
    worker.offload_after_refit()
    attempt("train offloaded", lambda: worker.train(data=full, loss_fn=NLLLoss()))
    attempt("evaluate offloaded", lambda: worker.train(data=full, loss_fn=NLLLoss(), eval_mode=True))
    attempt("get_logprobs offloaded", lambda: worker.get_logprobs(data=data))
    attempt("generate offloaded", lambda: worker.generate(data=data))
    attempt("save offloaded", lambda: worker.save_checkpoint(directory))
    attempt("noise offloaded", worker._add_noise_to_weights)
    worker.prepare_for_training()
    answers = {
        "repr": repr(worker),
        "alive": worker.is_alive(),
        "info": worker.get_gpu_info(),
        "device": worker.report_device_id(),
        "nothing": [worker.reset_peak_memory_stats(), worker.start_gpu_profiling(), worker.stop_gpu_profiling()],
    }
    worker.shutdown()
    worker.shutdown()
    return {"answers": answers, "errors": errors}


def read_only(config: Mapping[str, Any]) -> list[str]:
    """Errors of a worker without optimizer and reference policy."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    data = BatchedDataDict(
        {"input_ids": torch.ones(2, 3, dtype=torch.int64), "input_lengths": torch.tensor([3, 2]), "sample_mask": torch.ones(2)}
    )
    messages = []
    for call in (
        lambda: worker.train(data=data, loss_fn=NLLLoss(), gbs=2, mbs=1),
        worker.prepare_for_training,
        lambda: worker.get_reference_policy_logprobs(data=data),
        lambda: worker.save_checkpoint("/tmp/never-written", "/tmp/never-written-either"),
    ):
        try:
            call()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    worker.backend.close()
    return messages


def build_of_nothing(config: Mapping[str, Any]) -> bool:
    """Whether a constructor that failed left torch.cuda as it was."""
    before = (torch.cuda.current_device, torch.cuda.Stream, torch.cuda.synchronize)
    try:
        jobs.build(config)
    except Exception:
        return before == (torch.cuda.current_device, torch.cuda.Stream, torch.cuda.synchronize)
    raise AssertionError("the constructor accepted a broken model")


def save_and_resume(config: Mapping[str, Any], batches: list[Mapping[str, Any]], directory: str) -> list[str]:
    """What differs between a run that was saved and loaded half-way and the undisturbed one."""
    worker = jobs.build(config, init_reference_model=False)
    size = config["train_global_batch_size"]
    for index, batch in enumerate(batches):
        if index == len(batches) // 2:
            worker.save_checkpoint(f"{directory}/weights", f"{directory}/optimizer")
        worker.train(data=jobs.my_share(worker, batch, size), loss_fn=NLLLoss())
    undisturbed = snapshot(worker)
    worker.backend.close()
    worker = jobs.build(config, weights_path=f"{directory}/weights", optimizer_path=f"{directory}/optimizer", init_reference_model=False)
    for batch in batches[len(batches) // 2 :]:
        worker.train(data=jobs.my_share(worker, batch, size), loss_fn=NLLLoss())
    changed = differences(undisturbed, snapshot(worker))
    worker.backend.close()
    return changed


def generate_unevenly(config: Mapping[str, Any], batch: Mapping[str, Any], greedy: bool) -> list[list[int]]:
    """Prompts and answers of all replicas in order, some of which may get no prompt at all."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    groups = worker.backend.groups
    shards = BatchedDataDict(batch).shard_by_batch_size(groups.data_size, batch_size=None, allow_uneven_shards=True)
    with jobs.prompts_in_several_passes():
        output = worker.generate(data=shards[groups.data_rank], greedy=greedy)
    rows = [ids[:total].tolist() for ids, total in zip(output["output_ids"], output["unpadded_sequence_lengths"].tolist(), strict=True)]
    shares: list[Any] = [None] * groups.data_size
    dist.all_gather_object(shares, rows, group=groups.data)
    worker.backend.close()
    return [row for share in shares for row in share]
