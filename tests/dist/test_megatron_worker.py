"""Attacks on MegatronPolicyWorker: what must change nothing, what must be refused, precisions, schedules, odd batches, no Ray."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from megarl.models.generation.sampling import SamplingSettings
from megarl.parity.pool import WorkerPool
from tests import kept_tokens
from tests.dist import jobs, reference, worker_jobs
from tests.dist.batches import make_batch
from tests.dist.contract import parameters_of
from tests.models import policy_config
from tests.tiers import newest_megatron, sampled, slow

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2, "first": 1, "last": 2}),
    "dp2-overlap": (2, {"overlap": True}),
}
# method -> parameters of the contract, in order, without self
WORKER_METHODS = {
    "is_alive": [],
    "reset_peak_memory_stats": [],
    "get_gpu_info": [],
    "train": ["data", "loss_fn", "eval_mode", "gbs", "mbs"],
    "get_logprobs": ["data", "micro_batch_size"],
    "use_reference_model": [],
    "get_reference_policy_logprobs": ["data", "micro_batch_size"],
    "generate": ["data", "greedy"],
    "_add_noise_to_weights": [],
    "report_device_id": [],
    "prepare_for_lp_inference": [],
    "prepare_for_training": ["args", "kwargs"],
    "offload_before_refit": [],
    "offload_after_refit": [],
    "save_checkpoint": ["weights_path", "optimizer_path", "tokenizer_path"],
    "load_checkpoint": ["weights_path", "optimizer_path"],
    "shutdown": [],
    "start_gpu_profiling": [],
    "stop_gpu_profiling": [],
}
POLICY_METHODS = {
    "init_collective": ["ip", "port", "world_size"],
    "get_logprobs": ["data"],
    "get_reference_policy_logprobs": ["data", "micro_batch_size"],
    "train": ["data", "loss_fn", "eval_mode", "gbs", "mbs"],
    "generate": ["data", "greedy"],
    "prepare_for_generation": ["args", "kwargs"],
    "prepare_for_training": ["args", "kwargs"],
    "prepare_for_lp_inference": ["args", "kwargs"],
    "finish_generation": ["args", "kwargs"],
    "finish_training": ["args", "kwargs"],
    "prepare_weights_for_ipc": ["_refit_buffer_size_gb"],
    "get_weights_ipc_handles": ["keys"],
    "prepare_info_for_collective": [],
    "broadcast_weights_for_collective": [],
    "offload_before_refit": [],
    "offload_after_refit": [],
    "save_checkpoint": ["weights_path", "optimizer_path", "tokenizer_path"],
    "shutdown": [],
    "start_gpu_profiling": [],
    "stop_gpu_profiling": [],
    "__del__": [],
}
POLICY_PARAMETERS = [
    "cluster",
    "config",
    "tokenizer",
    "name_prefix",
    "workers_per_node",
    "init_optimizer",
    "weights_path",
    "optimizer_path",
]


def test_every_method_of_the_contract_has_its_signature() -> None:
    from megarl.models.policy.lm_policy import Policy
    from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker

    for owner, methods in ((MegatronPolicyWorker, WORKER_METHODS), (Policy, POLICY_METHODS)):
        for name, expected in methods.items():
            assert parameters_of(getattr(owner, name)) == expected, f"{owner.__name__}.{name}"
    assert parameters_of(Policy.__init__)[:9] == [*POLICY_PARAMETERS, "init_reference_model"]
    for owner in (MegatronPolicyWorker, Policy):
        train = inspect.signature(owner.train).parameters
        assert [train[name].default for name in ("eval_mode", "gbs", "mbs")] == [False, None, None]
    assert not getattr(Policy, "__abstractmethods__", frozenset())


@newest_megatron(layout=["pp2", "dp2-overlap"])
@sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_changes_no_bit(pool: WorkerPool, tiny_models: dict[str, Path], layout: str) -> None:
    world, changes = LAYOUTS[layout]
    config = policy_config(tiny_models["qwen2-tied"], **changes)
    for result in pool.run(world, worker_jobs.evaluate_between, config, make_batch(8, 11, seed=4)):
        assert {name: changed for name, changed in result["changed"].items() if changed} == {}
        assert result["evaluated"]["grad_norm"] is None
        assert torch.equal(result["evaluated"]["global_loss"], result["trained"]["global_loss"])


@newest_megatron
def test_evaluation_changes_no_bit_in_half_precision(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    config = policy_config(tiny_models["qwen3"], precision="bfloat16", overlap=True)
    for result in pool.run(2, worker_jobs.evaluate_between, config, make_batch(8, 11, seed=4)):
        assert {name: changed for name, changed in result["changed"].items() if changed} == {}


@newest_megatron(recompute=[True])
@sampled(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("world", "changes"), [(1, {}), (2, {"tp": 2}), (2, {"tp": 2, "sp": True}), (2, {"pp": 2, "first": 1, "last": 2})])
def test_logprobs_equal_those_inside_the_loss_to_the_bit(
    pool: WorkerPool, tiny_models: dict[str, Path], world: int, changes: dict[str, Any], recompute: bool
) -> None:
    config = policy_config(tiny_models["llama"], temperature=0.8, recompute=recompute, **changes)
    results = pool.run(world, worker_jobs.logprobs_in_loss, config, make_batch(8, 13, seed=6), 2)
    pairs = [pair for result in results for pair in result]
    assert pairs
    for inside, outside in pairs:
        assert torch.equal(inside, outside)


@newest_megatron(precision=["bfloat16"])
@sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["dp2-overlap", "pp2"])
def test_reference_swap_leaves_no_trace(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, precision: str) -> None:
    world, changes = LAYOUTS[layout]
    config = policy_config(tiny_models["qwen2-tied"], precision=precision, **changes)
    for facts in pool.run(world, worker_jobs.reference_swap, config, make_batch(8, 10, seed=2)):
        assert facts["same as first"] and facts["moved away"] and facts["nested"] and facts["trains again"]
        assert facts["after an error"] == [] and facts["after nesting"] == []
        assert [(name, kind) for name, kind, _ in facts["refused"]] == [
            ("train", "StateError"),
            ("load_checkpoint", "StateError"),
            ("save_checkpoint", "StateError"),
        ]


@newest_megatron
@sampled(2)
@pytest.mark.parametrize("masked", ["tokens of one rank", "samples of one rank", "all tokens", "all samples"])
def test_batches_without_valid_tokens(pool: WorkerPool, tiny_models: dict[str, Path], masked: str) -> None:
    config = policy_config(tiny_models["qwen3"], overlap=True, weight_decay=0.0)
    batch = make_batch(8, 12, seed=1)
    batch["sample_mask"] = torch.ones(8)
    rows = slice(4, 8) if "one rank" in masked else slice(0, 8)
    batch["token_mask" if "token" in masked else "sample_mask"][rows] = 0.0
    normal = make_batch(8, 12, seed=2)
    results = pool.run(2, worker_jobs.train_and_look, config, [batch, normal], NLLLoss())
    for result in results:
        first, second = result["results"]
        assert result["agree"]
        assert math.isfinite(float(first["grad_norm"])) and float(second["grad_norm"]) > 0
        assert all(tensor.isfinite().all() for tensor in result["weights"].values())
        if "all" in masked:
            assert float(first["global_loss"]) == 0 and float(first["grad_norm"]) == 0
            assert result["moved"][0] == []
        else:
            alone = reference.ReferenceTrainer(reference.load(tiny_models["qwen3"]), config).step(
                {key: value[:4] for key, value in batch.items()}, NLLLoss()
            )
            assert (float(first["global_loss"]), float(first["grad_norm"])) == pytest.approx(alone, rel=1e-5)


@newest_megatron
@sampled(1)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize(("world", "changes"), [(2, {"overlap": True}), (2, {"tp": 2}), (2, {"pp": 2, "first": 1, "last": 2})])
def test_half_precision_follows_float32(
    pool: WorkerPool, tiny_models: dict[str, Path], precision: str, world: int, changes: dict[str, Any]
) -> None:
    batches = [make_batch(8, 12, seed=seed % 2) for seed in range(6)]
    exact = pool.run(1, jobs.train, policy_config(tiny_models["qwen2-tied"], lr=3e-3), batches, NLLLoss())[0]
    config = policy_config(tiny_models["qwen2-tied"], lr=3e-3, precision=precision, **changes)
    bound = {"bfloat16": 0.03, "float16": 0.005}[precision]
    for result in pool.run(world, jobs.train, config, batches, NLLLoss()):
        for index, ((measured,), (expected,)) in enumerate(zip(result["losses"], exact["losses"], strict=True)):
            assert measured == pytest.approx(expected, rel=bound), f"step {index}"
        assert result["losses"][4][0] < result["losses"][0][0] - 0.05
        assert result["norms"] == pytest.approx(exact["norms"], rel=4 * bound)


@newest_megatron
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    config = policy_config(tiny_models["qwen3"], precision="float16")
    poisoned = make_batch(8, 12, seed=3)
    poisoned["sample_mask"][7] = 2.0
    batches = [make_batch(8, 12, seed=1), poisoned, make_batch(8, 12, seed=2)]
    for result in pool.run(2, worker_jobs.train_and_look, config, batches, worker_jobs.OverflowingLoss()):
        skipped = [step["all_mb_metrics"]["skipped_steps"] for step in result["results"]]
        assert skipped == [[0.0], [1.0], [0.0]]
        assert result["moved"][0] and not result["moved"][1] and result["moved"][2]
        assert result["agree"]


@newest_megatron
@sampled(1)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_resumes_to_the_bit(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, precision: str) -> None:
    config = policy_config(tiny_models["qwen3"], precision=precision)
    batches = [make_batch(8, 12, seed=seed) for seed in range(4)]
    assert pool.run(2, worker_jobs.save_and_resume, config, batches, str(tmp_path)) == [[], []]


def sgd_reference(
    model: Path, config: dict[str, Any], batches: list[dict[str, torch.Tensor]]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer = reference.ReferenceTrainer(reference.load(model), config)
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in trainer.optimizer.param_groups]
    trainer.optimizer = torch.optim.SGD(groups, lr=1.0, momentum=config["megatron_cfg"]["optimizer"]["sgd_momentum"])
    losses = [trainer.step(batch, NLLLoss())[0] for batch in batches]
    return losses, dict(trainer.model.state_dict())


@newest_megatron
@sampled(1)
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd(pool: WorkerPool, tiny_models: dict[str, Path], momentum: float) -> None:
    """Megatron's distributed optimizer knows Adam alone."""
    config = policy_config(tiny_models["qwen3"], optimizer="sgd", lr=0.05, distributed_optimizer=False)
    config["megatron_cfg"]["optimizer"]["sgd_momentum"] = momentum
    batches = [make_batch(8, 12, seed=seed) for seed in (1, 2, 3)]
    losses, weights = sgd_reference(tiny_models["qwen3"], config, batches)
    for result in pool.run(2, jobs.train, config, batches, NLLLoss()):
        assert [step[0] for step in result["losses"]] == pytest.approx(losses, rel=1e-5)
        for name, tensor in result["weights"].items():
            torch.testing.assert_close(tensor, weights[name], atol=1e-5, rtol=1e-5, msg=name)


@newest_megatron(momentum=[0.9])
@sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_resumes_to_the_bit(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, momentum: float, precision: str) -> None:
    config = policy_config(tiny_models["qwen3"], optimizer="sgd", lr=0.05, distributed_optimizer=False, precision=precision)
    config["megatron_cfg"]["optimizer"]["sgd_momentum"] = momentum
    batches = [make_batch(8, 12, seed=seed) for seed in range(4)]
    assert pool.run(2, worker_jobs.save_and_resume, config, batches, str(tmp_path)) == [[], []]


def schedule_by_formula(call: int, style: str, warmup: int, decay: int, init: float, peak: float, low: float) -> float:
    """Megatron's documented schedules, counted in train() calls."""
    if warmup and call <= warmup:
        return init + (peak - init) * call / warmup
    if style == "constant":
        return peak
    if call > decay:
        return low
    if style == "inverse-square-root":
        return max(low, peak * math.sqrt(max(warmup, 1)) / math.sqrt(max(call, 1)))
    done = (call - warmup) / (decay - warmup)
    share = 1 - done if style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return low + (peak - low) * share


@newest_megatron(warmup=[3])
@sampled(3)
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
def test_schedule_follows_the_formulas(pool: WorkerPool, tiny_models: dict[str, Path], style: str, warmup: int) -> None:
    config = policy_config(tiny_models["qwen3"], lr=8e-3)
    config["megatron_cfg"]["optimizer"]["min_lr"] = 1e-3
    growth = "constant" if style == "constant" else "cosine" if style == "cosine" else "linear"
    config["megatron_cfg"]["scheduler"] = {
        "start_weight_decay": 0.1 if growth == "constant" else 0.02,
        "end_weight_decay": 0.1,
        "weight_decay_incr_style": growth,
        "lr_decay_style": style,
        "lr_decay_iters": 7,
        "lr_warmup_iters": warmup,
        "lr_warmup_init": 2e-3,
    }
    values = pool.run(1, worker_jobs.schedule, config, 10)[0]
    expected = [schedule_by_formula(call, style, warmup, 7, 2e-3, 8e-3, 1e-3) for call in range(10)]
    assert [lr for lr, _ in values] == pytest.approx(expected, rel=1e-9)
    progress = [min(call / 7, 1.0) for call in range(10)]
    growing = {
        "constant": [0.1] * 10,
        "linear": [0.02 + 0.08 * done for done in progress],
        "cosine": [0.02 + 0.08 * (1 - math.cos(math.pi * done)) / 2 for done in progress],
    }
    assert [decay for _, decay in values] == pytest.approx(growing[growth], rel=1e-9)


SAMPLINGS = {
    "itself": SamplingSettings(),
    "temperature": SamplingSettings(temperature=0.4),
    "top-k": SamplingSettings(top_k=2),
    "top-p": SamplingSettings(top_p=0.6),
    "all three": SamplingSettings(False, 2, 3, 0.7),
}


@sampled("values")
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("world", [2, 4])
def test_vocabulary_shards_equal_float64(pool: WorkerPool, world: int, sampling: SamplingSettings) -> None:
    """Five tokens over four ranks of two columns: the third has one column of padding, the fourth nothing else."""
    columns, size = {2: (6, 5), 4: (8, 5)}[world]
    logits = torch.randn(9, columns, generator=torch.Generator().manual_seed(world)) * 6
    logits[:, size:] = torch.tensor([float("nan"), float("inf"), -float("inf")])[: columns - size]
    logits[4, 0] = -float("inf")
    targets = torch.tensor([0, 1, 2, 3, 4, 4, 0, 2, 3])
    exact = logits[:, :size].double().requires_grad_()
    expected = kept_tokens.expected_logprobs(exact, targets, sampling)
    (expected * torch.arange(1, 10)).sum().backward()
    results = pool.run(world, worker_jobs.shard_of_logits, logits, targets, size, sampling)
    for values, _ in results:
        assert torch.equal(values, results[0][0])
        torch.testing.assert_close(values.double(), expected.detach(), atol=1e-5, rtol=1e-6)
    gradient = torch.cat([gradient for _, gradient in results], dim=1)
    torch.testing.assert_close(gradient[:, :size].double(), exact.grad, atol=1e-5, rtol=1e-5)
    assert gradient[:, size:].eq(0).all()


@pytest.mark.parametrize("world", [2, 4])
def test_entropies_of_vocabulary_shards_equal_float64(pool: WorkerPool, world: int) -> None:
    """The same shards of five tokens, in float64: of four ranks one has padding, the last nothing else."""
    columns, size = {2: (6, 5), 4: (8, 5)}[world]
    logits = torch.randn(9, columns, generator=torch.Generator().manual_seed(world), dtype=torch.float64) * 6
    logits[:, size:] = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=torch.float64)[: columns - size]
    logits[4, 0] = -float("inf")
    targets = torch.tensor([0, 1, 2, 3, 4, 4, 0, 2, 3])
    for sampling in SAMPLINGS.values():
        exact = logits[:, :size].clone().requires_grad_()
        given = exact, targets, sampling
        expected = torch.stack([kept_tokens.expected_logprobs(*given), kept_tokens.expected_entropies(*given)])
        (expected * torch.arange(1, 19).view(2, 9)).sum().backward()
        results = pool.run(world, worker_jobs.shard_of_logits, logits, targets, size, sampling, True)
        for values, _ in results:
            assert torch.equal(values, results[0][0])
            torch.testing.assert_close(values, expected.detach(), atol=1e-12, rtol=1e-12)
        gradient = torch.cat([gradient for _, gradient in results], dim=1)
        torch.testing.assert_close(gradient[:, :size], exact.grad, atol=1e-12, rtol=1e-12)
        assert gradient[:, size:].eq(0).all()


def test_a_vocabulary_shard_of_forbidden_tokens_alone(pool: WorkerPool) -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    logits[:, :3] = -float("inf")
    targets = torch.tensor([3, 4, 5, 3])
    expected = logits.double().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    for values, gradient in pool.run(2, worker_jobs.shard_of_logits, logits, targets, 6, SamplingSettings()):
        torch.testing.assert_close(values.double(), expected, atol=1e-6, rtol=0)
        assert gradient.isfinite().all()


@newest_megatron(precision=["bfloat16"])
@sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("world", "changes"), [(2, {}), (2, {"pp": 2, "first": 1, "last": 2}), (2, {"tp": 2})])
def test_noise_reaches_all_copies_and_the_optimizer(
    pool: WorkerPool, tiny_models: dict[str, Path], world: int, changes: dict[str, Any], precision: str
) -> None:
    config = policy_config(tiny_models["qwen2-tied"], lr=1e-9, weight_decay=0.0, precision=precision, **changes)
    for result in pool.run(world, worker_jobs.add_noise, config, make_batch(8, 9, seed=0)):
        assert result["agree"]
        difference = torch.cat([(result["noisy"][name] - tensor).float().flatten() for name, tensor in result["clean"].items()])
        assert float(difference.std()) == pytest.approx(0.01, rel=0.05) and abs(float(difference.mean())) < 1e-3
        for name, tensor in result["noisy"].items():
            torch.testing.assert_close(result["trained"][name].float(), tensor.float(), atol=1e-5, rtol=1e-5, msg=name)


@newest_megatron
@sampled(1)
@pytest.mark.parametrize(("world", "changes"), [(1, {}), (2, {"tp": 2}), (2, {"pp": 2, "first": 1, "last": 2})])
def test_small_methods_and_wrong_states(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, world: int, changes: dict[str, Any]
) -> None:
    results = pool.run(world, worker_jobs.small_methods, policy_config(tiny_models["qwen3"], **changes), str(tmp_path / "taken"))
    for rank, result in enumerate(results):
        answers, errors = result["answers"], result["errors"]
        assert answers["repr"] == f"MegatronPolicyWorker[rank={rank}]" and answers["alive"] is True
        assert answers["nothing"] == [None, None, None]
        info = answers["info"]
        assert (info["rank"], info["world_size"], info["local_rank"]) == (rank, world, rank)
        assert len(info["parameter_sample"]) == 1 and info["memory_allocated_mb"] > 10
        assert info["env_vars"]["WORLD_SIZE"] == str(world)
        for name in ("gbs", "gbs 0", "mbs", "sample_mask", "rows", "logprob rows"):
            assert errors[name].startswith("BatchError"), f"{name}: {errors[name]}"
        assert "exists" in errors["export"]
        for name in errors:
            if name.endswith(("refit", "offloaded")):
                assert errors[name].startswith("StateError") and "call prepare_for" in errors[name], f"{name}: {errors[name]}"
    assert len({result["answers"]["device"] for result in results}) == world
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@newest_megatron
@sampled(1)
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_moving_the_optimizer_leaves_the_model_where_it_is(
    pool: WorkerPool, tiny_models: dict[str, Path], precision: str, distributed_optimizer: bool
) -> None:
    """Moving gives every moved tensor new memory, so that what was moved shows; and training goes on as if nothing had happened."""
    config = policy_config(tiny_models["qwen3"], precision=precision, distributed_optimizer=distributed_optimizer)
    assert pool.run(2, worker_jobs.move_optimizer_between_steps, config, make_batch(8, 9, seed=0)) == [[], []]


@sampled(1)
@pytest.mark.parametrize(("world", "changes"), [(1, {}), (2, {"pp": 2, "first": 1, "last": 2}), (2, {"tp": 2})])
def test_a_loss_may_report_itself(pool: WorkerPool, tiny_models: dict[str, Path], world: int, changes: dict[str, Any]) -> None:
    """Metrics that are the loss tensor itself, or still carry a graph, keep their value through a pipeline schedule."""
    config = policy_config(tiny_models["qwen3"], **changes)
    for result in pool.run(world, worker_jobs.train_and_look, config, [make_batch(8, 9, seed=0)], worker_jobs.SelfReportingLoss()):
        (outcome,) = result["results"]
        metrics = outcome["all_mb_metrics"]
        assert sum(metrics["loss"]) == pytest.approx(float(outcome["global_loss"]), rel=1e-5)
        assert metrics["twice"] == pytest.approx([2 * value for value in metrics["loss"]], rel=1e-6)


@newest_megatron
def test_a_worker_that_only_reads(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    messages = pool.run(1, worker_jobs.read_only, policy_config(tiny_models["qwen3"]))[0]
    assert len(messages) == 4
    assert all(message.startswith("StateError") for message in messages), messages
    assert not Path("/tmp/never-written").exists()


@newest_megatron
def test_a_constructor_that_fails_takes_its_redirection_back(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    for file in tiny_models["qwen3"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 52', '"intermediate_size": 56'))
    assert pool.run(1, worker_jobs.build_of_nothing, policy_config(tmp_path)) == [True]


# generation


class Letters:
    """A tokenizer whose token n is one character."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(200 + token) for token in tokens)


def prompts(rows: int = 5, length: int = 9) -> dict[str, Any]:
    batch = make_batch(rows, length, 5)
    return {
        "input_ids": batch["input_ids"],
        "input_lengths": batch["input_lengths"],
        "sampling_seeds": torch.arange(rows) * 7919 + 11,
    }


def generation_config(model: Path, changes: dict[str, Any], **generation: Any) -> dict[str, Any]:
    return policy_config(model, generation={"stop_token_ids": [], "max_new_tokens": 7, **generation}, **changes)


@sampled(1)
@pytest.mark.parametrize(("world", "changes"), [(1, {}), (2, {}), (2, {"pp": 2, "first": 1, "last": 2})])
def test_stop_strings_of_rows_and_of_the_configuration(
    pool: WorkerPool, tiny_models: dict[str, Path], world: int, changes: dict[str, Any]
) -> None:
    model = tiny_models["qwen3"]
    batch = prompts(rows=6)
    free = pool.run(1, jobs.generate, generation_config(model, {}), batch, True)[0]["rows"]
    answers = [row["ids"][-row["new"] :] for row in free]
    text = [Letters().decode(answer, skip_special_tokens=False) for answer in answers]
    batch["stop_strings"] = [[text[0][1:3]], None, [text[2][4]], ["no such text"], text[4][0], []]
    common = [text[5][2:4]]
    expected = []
    for row, whole in enumerate(text):
        own = batch["stop_strings"][row] or []
        stops = [own] if isinstance(own, str) else own
        ends = [end for end in range(1, 8) if any(stop in whole[:end] for stop in [*stops, *common])]
        expected.append(ends[0] if ends else 7)
    assert len(set(expected)) > 2
    config = generation_config(model, changes, stop_strings=common)
    for result in pool.run(world, jobs.generate, config, batch, True, Letters()):
        assert [row["new"] for row in result["rows"]] == expected
        assert [row["ids"][-row["new"] :] for row in result["rows"]] == [answers[row][:end] for row, end in enumerate(expected)]


@sampled(2)
@pytest.mark.parametrize(("world", "changes"), [(2, {"tp": 2, "sp": True}), (2, {"pp": 2, "first": 1, "last": 2})])
@pytest.mark.parametrize(("new", "limit"), [(1, 64), (5, 9), (3, 10)])
def test_length_limits(pool: WorkerPool, tiny_models: dict[str, Path], world: int, changes: dict[str, Any], new: int, limit: int) -> None:
    """A prompt of the full length has an empty answer; one token is the least that is asked for."""
    model, batch = tiny_models["qwen3"], prompts(length=9)
    free = pool.run(1, jobs.generate, generation_config(model, {}), batch, True)[0]["rows"]
    config = generation_config(model, changes, max_new_tokens=new)
    config["max_total_sequence_length"] = limit
    for result in pool.run(world, jobs.generate, config, batch, True):
        for row, whole, length in zip(result["rows"], free, batch["input_lengths"].tolist(), strict=True):
            assert row["new"] == min(new, limit - length)
            assert row["ids"] == whole["ids"][: length + row["new"]]


@sampled(1)
@pytest.mark.parametrize("greedy", [True, False])
def test_more_replicas_than_prompts(pool: WorkerPool, tiny_models: dict[str, Path], greedy: bool) -> None:
    model, batch = tiny_models["qwen3"], prompts(rows=3)
    alone = pool.run(1, jobs.generate, generation_config(model, {}), batch, greedy)[0]["rows"]
    for result in pool.run(4, worker_jobs.generate_unevenly, generation_config(model, {"overlap": True}), batch, greedy):
        assert result == [row["ids"] for row in alone]


# without Ray

SCRIPT = """
import json, os, sys
import torch
from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker
from tests.dist.batches import make_batch
from tests.models import policy_config

worker = MegatronPolicyWorker(policy_config(sys.argv[1], tp=2), None)
batch = BatchedDataDict(make_batch(8, 12, seed=1))
losses = [float(worker.train(data=batch, loss_fn=NLLLoss())["global_loss"]) for _ in range(2)]
if os.environ["RANK"] == "0":
    open(sys.argv[2], "w").write(json.dumps(losses))
worker.shutdown()
"""


@slow
@newest_megatron
def test_torchrun_needs_no_ray(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Two processes start under torchrun, which takes twenty seconds: nothing else shows that a worker needs no Ray."""
    import json

    script, output = tmp_path / "script.py", tmp_path / "losses.json"
    script.write_text(SCRIPT)
    model = tiny_models["qwen3"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "MEGARL_DEVICE": "cpu"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), str(model), str(output)]
    with open(tmp_path / "log", "w") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL).returncode
    assert code == 0, (tmp_path / "log").read_text()[-4000:]
    batch = make_batch(8, 12, seed=1)
    trainer = reference.ReferenceTrainer(reference.load(model), policy_config(model))
    expected = [trainer.step(batch, NLLLoss())[0] for _ in range(2)]
    assert json.loads(output.read_text()) == pytest.approx(expected, rel=1e-5)
