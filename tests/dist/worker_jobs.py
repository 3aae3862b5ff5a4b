"""Attacks on one worker, on any backend, that the pool's processes run; each returns what the test has to
judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.engine.logprobs import VocabularyShard, vocab_parallel_scores
from megarl.models.generation.sampling import SamplingSettings
from megarl.models.megatron.backend import move_optimizer
from megarl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker
from tests.dist import jobs


class RecordingLoss(NLLLoss):
    """NLL that keeps the log-probabilities it was given."""

    def __init__(self, *, skips: bool = True) -> None:
        self.seen: list[Tensor] = []
        self.skips_masked = skips

    def __call__(self, data: Any, *normalizers: Any, next_token_logprobs: Tensor) -> Any:
        self.seen.append(next_token_logprobs.detach().clone())
        return super().__call__(data, *normalizers, next_token_logprobs=next_token_logprobs)


class OverflowingLoss(NLLLoss):
    """NLL whose gradient overflows float16 wherever the marked row is."""

    def __call__(self, data: Any, *normalizers: Any, next_token_logprobs: Tensor) -> Any:
        loss, metrics = super().__call__(data, *normalizers, next_token_logprobs=next_token_logprobs)
        return loss * (1e30 if bool((data["sample_mask"] == 2).any()) else 1.0), metrics


class SelfReportingLoss(NLLLoss):
    """NLL whose metrics are attached tensors, the loss itself among them."""

    def __call__(self, data: Any, *normalizers: Any, next_token_logprobs: Tensor) -> Any:
        loss, metrics = super().__call__(data, *normalizers, next_token_logprobs=next_token_logprobs)
        return loss, {**metrics, "loss": loss, "twice": 2 * loss}


def places(worker: MegatronPolicyWorker) -> tuple[list[int], list[int]]:
    """Addresses of the model's parameters and of the parameters that the optimizer updates."""
    assert worker.backend.optimizer is not None
    groups = [
        group
        for chained in worker.backend.optimizer.chained_optimizers
        for group in chained.optimizer.param_groups
    ]
    model = [parameter.data_ptr() for _, parameter in worker.backend.parameters()]
    return model, [parameter.data_ptr() for group in groups for parameter in group["params"]]


def move_optimizer_between_steps(config: Mapping[str, Any], batch: Mapping[str, Any]) -> list[str]:
    """What differs after training with and without moves of the optimizer between the steps, and parameters
    moved by mistake."""
    outcomes, mistakes = [], set()
    for moving in (False, True):
        worker = jobs.build(config, init_reference_model=False)
        for _ in range(3):
            worker.train(data=jobs.my_share(worker, batch), loss_fn=NLLLoss())
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


def snapshot(worker: Any) -> dict[str, Any]:
    """Copies of everything that evaluation must leave alone: this rank's pieces of parameters and optimizer
    state, schedule, generator."""
    backend = worker.backend
    if isinstance(worker, MegatronPolicyWorker):
        backend.sync_parameters()
        optimizers = (
            [chained.optimizer for chained in backend.optimizer.chained_optimizers]
            if backend.optimizer
            else []
        )
    else:
        optimizers = [backend.optimizer] if backend.optimizer else []
    kept: dict[str, Any] = {f"weight {name}": parameter.detach() for name, parameter in backend.parameters()}
    for number, group in enumerate(group for optimizer in optimizers for group in optimizer.param_groups):
        kept |= {f"group {number} {key}": value for key, value in group.items() if key != "params"}
    states = ((optimizer.state, group) for optimizer in optimizers for group in optimizer.param_groups)
    for number, (state, group) in enumerate(states):
        for index, parameter in enumerate(group["params"]):
            kept[f"main {number} {index}"] = parameter.detach()
            kept |= {
                f"state {number} {index} {key}": value for key, value in state.get(parameter, {}).items()
            }
    kept["schedule"] = backend.scheduler.state_dict() if backend.scheduler else None
    kept["rng"] = torch.get_rng_state()
    kept["training"] = backend.is_training()
    if isinstance(worker, DTensorPolicyWorker):
        kept["loss scale"] = (backend.loss_scale.factor, backend.loss_scale.clean_steps)
    pieces = {key: value.to_local() if isinstance(value, DTensor) else value for key, value in kept.items()}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in pieces.items()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of entries that are not equal to the bit."""

    def equal(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, Tensor) else one == other

    return sorted(set(before) ^ set(after)) + [
        key for key in before.keys() & after.keys() if not equal(before[key], after[key])
    ]


def replicas_agree(worker: MegatronPolicyWorker) -> bool:
    """Whether all data-parallel replicas hold the same weights, and all holders of a tied or replicated
    weight the same copy."""
    worker.backend.sync_parameters()
    groups = worker.backend.groups
    mine = {name: parameter.detach().clone() for name, parameter in worker.backend.parameters()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (groups.pipeline_rank, groups.tensor_rank, mine))
    stages: dict[tuple[int, int], dict[str, Tensor]] = {}
    for stage, rank, weights in everyone:
        if differences(stages.setdefault((stage, rank), weights), weights):
            return False
    if worker.backend.stages[0].share_embeddings_and_output_weights and groups.pipeline_size > 1:
        for rank in range(groups.tensor_size):
            first, last = stages[0, rank], stages[groups.pipeline_size - 1, rank]
            if not torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"]):
                return False
    replicated = [name for name in mine if "norm" in name]
    return all(
        torch.equal(stages[s, r][name], stages[s, 0][name])
        for s, r in stages
        for name in replicated
        if name in stages[s, r]
    )


def evaluate_between(config: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Train, do all that must change nothing, train again; and what an undisturbed worker has at the end."""
    worker = jobs.build(config)
    share = jobs.my_share(worker, batch)
    worker.train(data=share, loss_fn=NLLLoss())
    before = snapshot(worker)
    evaluated = worker.train(data=share, loss_fn=NLLLoss(), eval_mode=True)
    changed = {"eval": differences(before, snapshot(worker))}
    prompts = BatchedDataDict({key: share[key] for key in ("input_ids", "input_lengths")})
    prompts["sampling_seeds"] = torch.arange(prompts.size)
    calls: dict[str, Callable[[], Any]] = {
        "get_logprobs": lambda: jobs.logprobs_of(worker, batch),
        "get_reference_policy_logprobs": lambda: jobs.logprobs_of(
            worker, batch, "get_reference_policy_logprobs"
        ),
        "prepare": lambda: (worker.prepare_for_lp_inference(), worker.prepare_for_training()),
        "generate": lambda: worker.generate(data=prompts),
        "export": lambda: jobs.full_weights(worker),
    }
    for name, call in calls.items():
        call()
        changed[name] = differences(before, snapshot(worker))
    trained = worker.train(data=share, loss_fn=NLLLoss())
    disturbed = jobs.full_weights(worker)
    worker.backend.close()
    undisturbed = jobs.train(config, [batch, batch], NLLLoss())["weights"]
    changed["later training"] = differences(undisturbed, disturbed)
    return {"changed": changed, "evaluated": evaluated, "trained": trained}


def logprobs_in_loss(
    config: Mapping[str, Any], batch: Mapping[str, Any], rows: int
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of log-probabilities inside the loss and from get_logprobs, a micro-batch of ``rows`` rows each,
    padding set to 0, where a loss is computed: of the tokens under the mask, where both skip the others, and
    then of all."""
    worker = jobs.build(config, init_reference_model=False)
    share = jobs.my_share(worker, batch)
    lengths, pairs = share["input_lengths"], []
    for skips in (True, False):
        outside = worker.get_logprobs(data=share, micro_batch_size=rows, skip_masked=skips)["logprobs"]
        loss_fn = RecordingLoss(skips=skips)
        worker.train(data=share, loss_fn=loss_fn, eval_mode=True)
        worker.train(data=share, loss_fn=loss_fn)
        for number, seen in enumerate(loss_fn.seen):
            first = number * rows % share.size
            inside = torch.arange(1, seen.shape[1] + 1)[None] < lengths[first : first + rows, None]
            width = min(seen.shape[1], outside.shape[1] - 1)
            pairs.append(((seen * inside)[:, :width], outside[first : first + rows, 1 : width + 1]))
    worker.backend.close()
    return pairs


def reference_swap(config: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the reference policy gives and leaves behind: passes under both weights following one another, an
    error, passes and refused calls inside."""
    worker = jobs.build(config)
    first = jobs.logprobs_of(worker, batch)
    share = jobs.my_share(worker, batch)
    for _ in range(2):
        worker.train(data=share, loss_fn=NLLLoss())
    before = snapshot(worker)
    facts: dict[str, Any] = {"first": first, "own": jobs.logprobs_of(worker, batch)}
    facts["reference"] = jobs.logprobs_of(worker, batch, "get_reference_policy_logprobs")
    facts["own again"] = jobs.logprobs_of(worker, batch)
    try:
        with worker.use_reference_model():
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    facts["after an error"] = differences(before, snapshot(worker))
    with worker.use_reference_model():
        facts["nested"] = jobs.logprobs_of(worker, batch, "get_reference_policy_logprobs")
        facts["refused"] = [
            jobs.said(lambda: worker.train(data=share, loss_fn=NLLLoss())),
            jobs.said(lambda: worker.load_checkpoint("/proc/nowhere")),
            jobs.said(lambda: worker.save_checkpoint("/proc/nowhere")),
        ]
    facts["after nesting"] = differences(before, snapshot(worker))
    worker.train(data=share, loss_fn=NLLLoss())
    trained = jobs.full_weights(worker)
    worker.backend.close()
    facts["trained otherwise"] = differences(trained, jobs.train(config, [batch] * 3, NLLLoss())["weights"])
    return facts


def train_and_look(
    config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any
) -> dict[str, Any]:
    """Results of train() for each batch, which weights moved, the loss scale afterwards, and whether replicas
    still agree."""
    worker = jobs.build(config, init_reference_model=False)
    results, moved, scales = [], [], []
    for batch in batches:
        before = jobs.full_weights(worker)
        results.append(worker.train(data=jobs.my_share(worker, batch), loss_fn=loss_fn))
        moved.append(differences(before, jobs.full_weights(worker)))
        scales.append(worker.backend.loss_scale.factor if isinstance(worker, DTensorPolicyWorker) else None)
    weights = jobs.full_weights(worker)
    agree = replicas_agree(worker) if isinstance(worker, MegatronPolicyWorker) else True
    worker.backend.close()
    return {"results": results, "moved": moved, "scales": scales, "weights": weights, "agree": agree}


def train_and_save(
    config: Mapping[str, Any], batches: list[Mapping[str, Any]], saved_after: int, directory: Path
) -> dict[str, Any]:
    """Trains on all batches, saving after some of them; what came after."""
    worker = jobs.build(config, init_reference_model=False)
    measured = []
    for index, batch in enumerate(batches):
        if index == saved_after:
            worker.save_checkpoint(str(directory / "weights"), str(directory / "optimizer"))
        measured.append(jobs.step(worker, batch, NLLLoss()))
    return _end(worker, measured[saved_after:])


def load_and_train(
    config: Mapping[str, Any], batches: list[Mapping[str, Any]], directory: Path, live: bool
) -> dict[str, Any]:
    """Continues from a checkpoint, in a new worker or in one that has trained on something else before."""
    paths = (str(directory / "weights"), str(directory / "optimizer"))
    if live:
        worker = jobs.build(config, init_reference_model=False)
        jobs.step(worker, {key: value.flip(0) for key, value in batches[0].items()}, NLLLoss())
        jobs.logprobs_of(worker, batches[0])
        worker.load_checkpoint(*paths)
    else:
        worker = jobs.build(
            config, weights_path=paths[0], optimizer_path=paths[1], init_reference_model=False
        )
    return _end(worker, [jobs.step(worker, batch, NLLLoss()) for batch in batches])


def _end(worker: Any, measured: list[Any]) -> dict[str, Any]:
    found = {"measured": measured, "weights": jobs.full_weights(worker), "snapshot": snapshot(worker)}
    worker.backend.close()
    return found


def export(config: Mapping[str, Any], directory: str) -> dict[str, Tensor]:
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    weights = jobs.full_weights(worker)
    worker.export_hf(directory)
    worker.backend.close()
    return weights


def add_noise(config: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Noise on weights of replicas whose generators have drifted apart, then one training step with a
    learning rate of almost nothing."""
    worker = jobs.build(config, init_reference_model=False)
    torch.rand(1 + dist.get_rank())
    clean = jobs.full_weights(worker)
    worker._add_noise_to_weights()
    agree = replicas_agree(worker)
    noisy = jobs.full_weights(worker)
    worker.train(data=jobs.my_share(worker, batch), loss_fn=NLLLoss())
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
    logits: Tensor, targets: Tensor, size: int, sampling: SamplingSettings, with_entropies: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [T], or with entropies [2, T], and this rank's gradient when ``logits`` [T, columns]
    are cut over all ranks."""
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

    def attempt(name: str, call: Callable[[], Any]) -> None:
        errors[name] = jobs.said(call)

    data = BatchedDataDict(
        {"input_ids": torch.ones(2, 3, dtype=torch.int64), "input_lengths": torch.tensor([3, 2])}
    )
    full = BatchedDataDict({**data, "sample_mask": torch.ones(2), "token_mask": torch.ones(2, 3)})
    for name, change in {
        "gbs": {"gbs": -2},
        "gbs 0": {"gbs": 0},
        "mbs": {"mbs": 0, "gbs": 2 * worker.backend.groups.data_size},
    }.items():
        attempt(name, lambda change=change: worker.train(data=full, loss_fn=NLLLoss(), **change))
    attempt("sample_mask", lambda: worker.train(data=data, loss_fn=NLLLoss()))
    attempt(
        "rows", lambda: worker.train(data=full, loss_fn=NLLLoss(), gbs=4 * worker.backend.groups.data_size)
    )
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
        "nothing": [
            worker.reset_peak_memory_stats(),
            worker.start_gpu_profiling(),
            worker.stop_gpu_profiling(),
        ],
    }
    worker.shutdown()
    worker.shutdown()
    return {"answers": answers, "errors": errors}


def read_only(config: Mapping[str, Any]) -> list[str]:
    """Errors of a worker without optimizer and reference policy."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    data = BatchedDataDict(
        {
            "input_ids": torch.ones(2, 3, dtype=torch.int64),
            "input_lengths": torch.tensor([3, 2]),
            "sample_mask": torch.ones(2),
        }
    )
    calls: list[Callable[[], Any]] = [
        lambda: worker.train(data=data, loss_fn=NLLLoss(), gbs=2, mbs=1),
        worker.prepare_for_training,
        lambda: worker.get_reference_policy_logprobs(data=data),
        lambda: worker.save_checkpoint("/tmp/never-written", "/tmp/never-written-either"),
    ]
    messages = [jobs.said(call) for call in calls]
    worker.backend.close()
    return messages


def build_of_nothing(config: Mapping[str, Any]) -> bool:
    """Whether a constructor that failed left torch.cuda as it was."""
    before = (torch.cuda.current_device, torch.cuda.Stream, torch.cuda.synchronize)
    assert jobs.build_error(config) != "no error"
    return before == (torch.cuda.current_device, torch.cuda.Stream, torch.cuda.synchronize)
