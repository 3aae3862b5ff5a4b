"""What MegatronPolicyWorker alone does: SGD, schedules, shards of the vocabulary, moves of its optimizer,
calls in wrong states, no Ray."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.models.generation.sampling import SamplingSettings
from megarl.parity.pool import WorkerPool
from tests import kept_tokens
from tests.dist import jobs, reference, worker_jobs
from tests.dist.batches import make_batch
from tests.models import policy_config
from tests.tiers import newest_megatron, sampled, slow


def sgd_reference(
    model: Path, config: dict[str, Any], batches: list[dict[str, Tensor]]
) -> tuple[list[float], dict[str, Tensor]]:
    trainer = reference.ReferenceTrainer(reference.load(model), config)
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in trainer.optimizer.param_groups
    ]
    trainer.optimizer = torch.optim.SGD(
        groups, lr=1.0, momentum=config["megatron_cfg"]["optimizer"]["sgd_momentum"]
    )
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
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        for name, tensor in result["weights"].items():
            torch.testing.assert_close(tensor, weights[name], atol=1e-5, rtol=1e-5, msg=name)


def schedule_by_formula(
    call: int, style: str, warmup: int, decay: int, init: float, peak: float, low: float
) -> float:
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
def test_schedule_follows_the_formulas(
    pool: WorkerPool, tiny_models: dict[str, Path], style: str, warmup: int
) -> None:
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
    """Five tokens over four ranks of two columns: the third has one column of padding, the fourth nothing
    else."""
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
    logits[:, size:] = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=torch.float64)[
        : columns - size
    ]
    logits[4, 0] = -float("inf")
    targets = torch.tensor([0, 1, 2, 3, 4, 4, 0, 2, 3])
    for sampling in SAMPLINGS.values():
        exact = logits[:, :size].clone().requires_grad_()
        given = exact, targets, sampling
        expected = torch.stack(
            [kept_tokens.expected_logprobs(*given), kept_tokens.expected_entropies(*given)]
        )
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
@pytest.mark.parametrize(
    ("world", "changes"), [(2, {}), (2, {"pp": 2, "first": 1, "last": 2}), (2, {"tp": 2})]
)
def test_noise_reaches_all_copies_and_the_optimizer(
    pool: WorkerPool, tiny_models: dict[str, Path], world: int, changes: dict[str, Any], precision: str
) -> None:
    config = policy_config(
        tiny_models["qwen2-tied"], lr=1e-9, weight_decay=0.0, precision=precision, **changes
    )
    for result in pool.run(world, worker_jobs.add_noise, config, make_batch(8, 9, seed=0)):
        assert result["agree"]
        difference = torch.cat(
            [(result["noisy"][name] - tensor).float().flatten() for name, tensor in result["clean"].items()]
        )
        assert (
            float(difference.std()) == pytest.approx(0.01, rel=0.05) and abs(float(difference.mean())) < 1e-3
        )
        for name, tensor in result["noisy"].items():
            torch.testing.assert_close(
                result["trained"][name].float(), tensor.float(), atol=1e-5, rtol=1e-5, msg=name
            )


@newest_megatron
@sampled(1)
@pytest.mark.parametrize(
    ("world", "changes"), [(1, {}), (2, {"tp": 2}), (2, {"pp": 2, "first": 1, "last": 2})]
)
def test_small_methods_and_wrong_states(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, world: int, changes: dict[str, Any]
) -> None:
    results = pool.run(
        world,
        worker_jobs.small_methods,
        policy_config(tiny_models["qwen3"], **changes),
        str(tmp_path / "taken"),
    )
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
                assert errors[name].startswith("StateError") and "call prepare_for" in errors[name], (
                    f"{name}: {errors[name]}"
                )
    assert len({result["answers"]["device"] for result in results}) == world
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@newest_megatron
@sampled(1)
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_moving_the_optimizer_leaves_the_model_where_it_is(
    pool: WorkerPool, tiny_models: dict[str, Path], precision: str, distributed_optimizer: bool
) -> None:
    """Moving gives every moved tensor new memory, so that what was moved shows; and training goes on as if
    nothing had happened."""
    config = policy_config(
        tiny_models["qwen3"], precision=precision, distributed_optimizer=distributed_optimizer
    )
    assert pool.run(2, worker_jobs.move_optimizer_between_steps, config, make_batch(8, 9, seed=0)) == [[], []]


@sampled(1)
@pytest.mark.parametrize(
    ("world", "changes"), [(1, {}), (2, {"pp": 2, "first": 1, "last": 2}), (2, {"tp": 2})]
)
def test_a_loss_may_report_itself(
    pool: WorkerPool, tiny_models: dict[str, Path], world: int, changes: dict[str, Any]
) -> None:
    """Metrics that are the loss tensor itself, or still carry a graph, keep their value through a pipeline
    schedule."""
    config = policy_config(tiny_models["qwen3"], **changes)
    for result in pool.run(
        world, worker_jobs.train_and_look, config, [make_batch(8, 9, seed=0)], worker_jobs.SelfReportingLoss()
    ):
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
def test_a_constructor_that_fails_takes_its_redirection_back(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    for file in tiny_models["qwen3"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"intermediate_size": 52', '"intermediate_size": 56')
    )
    assert pool.run(1, worker_jobs.build_of_nothing, policy_config(tmp_path)) == [True]


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
    """Two processes start under torchrun, which takes twenty seconds: nothing else shows that a worker needs
    no Ray."""
    import json

    script, output = tmp_path / "script.py", tmp_path / "losses.json"
    script.write_text(SCRIPT)
    model = tiny_models["qwen3"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "MEGARL_DEVICE": "cpu",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(script),
        str(model),
        str(output),
    ]
    with open(tmp_path / "log", "w") as log:
        code = subprocess.run(
            command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        ).returncode
    assert code == 0, (tmp_path / "log").read_text()[-4000:]
    batch = make_batch(8, 12, seed=1)
    trainer = reference.ReferenceTrainer(reference.load(model), policy_config(model))
    expected = [trainer.step(batch, NLLLoss())[0] for _ in range(2)]
    assert json.loads(output.read_text()) == pytest.approx(expected, rel=1e-5)
