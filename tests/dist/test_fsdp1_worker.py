"""FSDP1PolicyWorker: what must change nothing, the reference policy, checkpoints, export, generation, the names of the contract."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import fsdp1_jobs, jobs, reference
from tests.dist.batches import make_batch
from tests.dist.contract import parameters_of
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.dist.test_megatron_generation import likely_stop, prompts, transformers_greedy
from tests.models import policy_config
from tests.tiers import sampled, slow

BATCHES = [make_batch(rows=12, length=12, seed=seed) for seed in range(4)]
SAVED_AFTER = 2
# method -> parameters of the contract (spec/000), in order, without self
METHODS = {
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
    "prepare_weights_for_ipc": [],
    "get_weights_ipc_handles": ["keys"],
    "prepare_for_lp_inference": [],
    "prepare_for_training": ["args", "kwargs"],
    "offload_before_refit": [],
    "offload_after_refit": [],
    "manual_offload_to_cpu": ["model"],
    "manual_load_to_gpu": ["model"],
    "save_checkpoint": ["weights_path", "optimizer_path", "tokenizer_path"],
    "load_checkpoint": ["weights_path", "optimizer_path"],
    "shutdown": [],
    "start_gpu_profiling": [],
    "stop_gpu_profiling": [],
}


def test_every_method_of_the_contract_has_its_signature() -> None:
    from megarl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker

    for name, expected in METHODS.items():
        assert parameters_of(getattr(FSDP1PolicyWorker, name)) == expected, name
    constructor = list(inspect.signature(FSDP1PolicyWorker).parameters)
    assert constructor[:6] == ["config", "tokenizer", "weights_path", "optimizer_path", "init_optimizer", "init_reference_model"]


@sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_changes_no_bit(pool: WorkerPool, tiny_models: dict[str, Path], world: int, precision: str) -> None:
    config = fsdp1_config(tiny_models["qwen2-tied"], precision=precision, gbs=12)
    for result in pool.run(world, fsdp1_jobs.evaluate_between, config, make_batch(12, 11, seed=4)):
        assert {name: changed for name, changed in result["changed"].items() if changed} == {}
        assert result["evaluated"]["grad_norm"] is None
        assert torch.equal(result["evaluated"]["global_loss"], result["trained"]["global_loss"])


@sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_reference_policy(pool: WorkerPool, tiny_models: dict[str, Path], world: int, precision: str) -> None:
    config = fsdp1_config(tiny_models["qwen2-tied"], precision=precision, gbs=12)
    for facts in pool.run(world, fsdp1_jobs.reference_swap, config, make_batch(12, 10, seed=2)):
        assert torch.equal(facts["reference"], facts["first"])
        assert not torch.equal(facts["own"], facts["reference"])
        assert torch.equal(facts["own"], facts["own again"])
        assert facts["changed"] == [] and facts["trained otherwise"] == []


# checkpoints


@sampled(1)
@pytest.mark.parametrize("live", [False, True], ids=["new-worker", "live-worker"])
@pytest.mark.parametrize(("world", "precision"), [(1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16"), (2, "bfloat16")])
def test_resume_is_exact(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, world: int, precision: str, live: bool) -> None:
    config = fsdp1_config(tiny_models["qwen2-tied"], precision=precision, gbs=12)
    undisturbed = pool.run(world, fsdp1_jobs.train_and_save, config, BATCHES, SAVED_AFTER, tmp_path)
    resumed = pool.run(world, fsdp1_jobs.load_and_train, config, BATCHES[SAVED_AFTER:], tmp_path, live)
    for before, after in zip(undisturbed, resumed, strict=True):
        assert after["measured"] == before["measured"]
        assert fsdp1_jobs.differences(after["snapshot"], before["snapshot"]) == []
        assert fsdp1_jobs.differences(after["weights"], before["weights"]) == []


@slow
@pytest.mark.parametrize("live", [False, True], ids=["new-worker", "live-worker"])
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "torch.optim.SGD", "kwargs": {"lr": 0.01}},
        {"name": "torch.optim.SGD", "kwargs": {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}},
        {"name": "torch.optim.NAdam", "kwargs": {"lr": 0.001}},
    ],
    ids=["sgd", "momentum", "nadam"],
)
@pytest.mark.parametrize("saved_after", [0, 2])
def test_resume_of_other_optimizers_and_before_the_first_step(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, optimizer: dict[str, Any], saved_after: int, live: bool
) -> None:
    schedule = [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 2}},
        {"name": "torch.optim.lr_scheduler.MultiStepLR", "kwargs": {"milestones": [1, 2], "gamma": 0.7}},
        {"milestones": [2]},
    ]
    config = fsdp1_config(tiny_models["llama"], gbs=12, torch_optimizer=optimizer, scheduler=schedule)
    undisturbed = pool.run(2, fsdp1_jobs.train_and_save, config, BATCHES, saved_after, tmp_path)[0]
    resumed = pool.run(2, fsdp1_jobs.load_and_train, config, BATCHES[saved_after:], tmp_path, live)[0]
    assert resumed["measured"] == undisturbed["measured"]
    assert fsdp1_jobs.differences(resumed["snapshot"], undisturbed["snapshot"]) == []


@sampled(1)
@pytest.mark.parametrize(("world", "new_world"), [(1, 2), (2, 1), (3, 2), (2, 3)])
def test_any_number_of_ranks_reads_any_other(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, world: int, new_world: int
) -> None:
    config = fsdp1_config(tiny_models["qwen2-tied"], gbs=12)
    undisturbed = pool.run(world, fsdp1_jobs.train_and_save, config, BATCHES, SAVED_AFTER, tmp_path)[0]
    resumed = pool.run(new_world, fsdp1_jobs.load_and_train, config, BATCHES[SAVED_AFTER:], tmp_path, False)[0]
    torch.testing.assert_close(resumed["measured"], undisturbed["measured"], atol=1e-6, rtol=1e-5)
    for name, tensor in undisturbed["weights"].items():
        assert (resumed["weights"][name] - tensor).norm() < 1e-5 * tensor.norm(), name


class Boom:
    """What a hostile checkpoint would like to have unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("/proc/self/definitely-not-there", "w"))


def test_bad_checkpoints_are_refused(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config, other = fsdp1_config(tiny_models["llama"], gbs=12), fsdp1_config(tiny_models["qwen3"], gbs=12)
    pool.run(2, fsdp1_jobs.train_and_save, config, BATCHES[:1], 0, tmp_path / "good")
    pool.run(2, fsdp1_jobs.train_and_save, other, BATCHES[:2], 1, tmp_path / "other")
    empty, hostile, damaged = tmp_path / "empty", tmp_path / "hostile", tmp_path / "damaged"
    for directory in (empty, hostile, damaged):
        directory.mkdir()
    (hostile / ".metadata").write_bytes(pickle.dumps(Boom()))
    (damaged / ".metadata").write_bytes(b"nonsense")
    directories = [tmp_path / "good" / "weights", empty, hostile, damaged, tmp_path / "other" / "weights", tmp_path / "other" / "optimizer"]
    for messages in pool.run(2, fsdp1_jobs.refused_loads, config, directories):
        assert all(message.startswith(("CheckpointError", "UnusableCheckpointError")) for message in messages), messages
        assert "is not a checkpoint" in messages[0] and "is not a checkpoint" in messages[1]
        assert "_io.open" in messages[2] or "io.open" in messages[2]
        assert "damaged" in messages[4]
        assert "does not hold the weights of this model" in messages[6]
        assert "optimizer" in messages[9]


def test_checkpoints_are_never_overwritten(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    messages = pool.run(2, fsdp1_jobs.save_twice, fsdp1_config(tiny_models["llama"]), tmp_path / "checkpoint")
    assert all("never overwritten" in message for message in messages)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


# export


@sampled(2)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
def test_export_is_exact(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, family: str, world: int) -> None:
    stored = reference.load(tiny_models[family]).state_dict()
    results = pool.run(world, fsdp1_jobs.export, fsdp1_config(tiny_models[family]), str(tmp_path / "hf"))
    exported = reference.load(tmp_path / "hf").state_dict()
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(exported[name], tensor), name
    names = [list(result) for result in results]
    assert all(order == names[0] for order in names)
    assert ("lm_head.weight" in names[0]) == (family == "llama")


# generation


@sampled(2)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "qwen3"])
def test_greedy_equals_transformers(pool: WorkerPool, tiny_models: dict[str, Path], family: str, world: int) -> None:
    batch = prompts()
    stop = likely_stop(tiny_models[family], batch)
    expected = transformers_greedy(tiny_models[family], batch, 8, [stop])
    config = fsdp1_config(tiny_models[family], temperature=0.7, generation={"stop_token_ids": [stop]})
    for rows in pool.run(world, fsdp1_jobs.generate, config, batch, True):
        assert [row["ids"] for row in rows] == expected
        check_rows(rows)


@pytest.mark.parametrize("world", [1, 2])
def test_sampling_equals_megatron(pool: WorkerPool, tiny_models: dict[str, Path], world: int) -> None:
    changes = {"temperature": 1.3, "generation": {"stop_token_ids": [2], "top_k": 20, "top_p": 0.9}}
    batch = prompts()
    megatron = pool.run(1, jobs.generate, policy_config(tiny_models["qwen3"], **changes), batch, False)[0]["rows"]
    for rows in pool.run(world, fsdp1_jobs.generate, fsdp1_config(tiny_models["qwen3"], **changes), batch, False):
        assert [row["ids"] for row in rows] == [row["ids"] for row in megatron]
        check_rows(rows)
    assert len({tuple(row["ids"][-row["new"] :]) for row in megatron}) > 1


@pytest.mark.parametrize("world", [1, 2])
def test_recorded_steps_give_the_same_answers(pool: WorkerPool, tiny_models: dict[str, Path], world: int) -> None:
    """As CUDA graphs run them; on one rank, no step reads a number from the device."""
    options = {"temperature": 1.3, "generation": {"stop_token_ids": list(range(2, 100, 9)), "max_new_tokens": 20}}
    [plain] = pool.run(1, jobs.generate, policy_config(tiny_models["qwen3"], **options), prompts(11), False)
    for rows, counts in pool.run(world, fsdp1_jobs.generate_recorded, fsdp1_config(tiny_models["qwen3"], **options), prompts(11), False):
        assert [row["ids"] for row in rows] == [row["ids"] for row in plain["rows"]]
        check_rows(rows)
        recorded, replayed = counts
        assert replayed > recorded > 1


def test_a_rank_without_prompts_waits_for_nobody(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    batch = prompts(rows=4)
    expected = pool.run(1, fsdp1_jobs.generate, fsdp1_config(tiny_models["qwen3"]), batch, False)[0]
    for rows in pool.run(3, fsdp1_jobs.generate, fsdp1_config(tiny_models["qwen3"]), batch, False):
        assert [row["ids"] for row in rows] == [row["ids"] for row in expected]


class LetterTokenizer:
    """Token t is the letter number t % 26."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + token % 26) for token in ids)


def test_stop_strings_are_each_samples_own(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    batch = prompts()
    config = fsdp1_config(tiny_models["qwen3"], generation={"stop_token_ids": []})
    free = pool.run(2, fsdp1_jobs.generate, config, batch, True, LetterTokenizer())[0]
    text = [LetterTokenizer().decode(row["ids"][-row["new"] :]) for row in free]
    wanted = {1: [text[1][2:4]], 4: [text[4][1:3]]}
    stopped = pool.run(
        2, fsdp1_jobs.generate, config, {**batch, "stop_strings": [wanted.get(row) for row in range(6)]}, True, LetterTokenizer()
    )[0]
    for row in range(6):
        answer = LetterTokenizer().decode(stopped[row]["ids"][-stopped[row]["new"] :])
        if row in wanted:
            assert answer == text[row][: text[row].index(wanted[row][0]) + 2] and not stopped[row]["truncated"]
        else:
            assert answer == text[row] and stopped[row]["truncated"]


def check_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        torch.testing.assert_close(row["logprobs"], row["recomputed"], atol=1e-5, rtol=0)
        assert row["others"].eq(0).all()
        assert all(token == 0 for token in row["padding"])


# the rest of the contract


@pytest.mark.parametrize("world", [1, 2])
def test_small_methods(pool: WorkerPool, tiny_models: dict[str, Path], world: int) -> None:
    for rank, answers in enumerate(pool.run(world, fsdp1_jobs.small_methods, fsdp1_config(tiny_models["qwen2-tied"], gbs=12))):
        assert answers["repr"] == f"FSDP1PolicyWorker[rank={rank}]" and answers["alive"] and answers["same model"]
        assert answers["info"]["world_size"] == world and len(answers["info"]["parameter_sample"]) == 1
        assert answers["other model"]
        refusal = "BatchError: token_mask: Dim 1 must be the sequence dim, expected 4 as in input_ids, got torch.float32 [2, 5]"
        assert answers["columns"] == [refusal, refusal]
        assert answers["traced"] == (rank == 0) and answers["stopped"] is None, "only the ranks that were named record"
        assert str(answers["trace"]).endswith("/profiles/steps_1_to_1_rank0.json") == (rank == 0)
        assert all(0.002 < spread < 0.03 for spread in answers["noise"].values()), answers["noise"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": "float16"}, ["policy.precision", "loss scaling"]),
        ({"torch_optimizer": {"name": "torch.optim.Muon", "kwargs": {}}}, ["policy.optimizer.name", "flat pieces"]),
    ],
    ids=["float16", "muon"],
)
def test_what_cannot_be_is_refused(pool: WorkerPool, tiny_models: dict[str, Path], changes: dict[str, Any], words: list[str]) -> None:
    for message in pool.run(2, fsdp1_jobs.build_error, fsdp1_config(tiny_models["llama"], **changes)):
        assert message.startswith("ConfigError") and all(word in message for word in words), message


@pytest.mark.parametrize("masked", ["one rank", "all"])
def test_zero_valid_tokens_leave_ranks_in_step(pool: WorkerPool, tiny_models: dict[str, Path], masked: str) -> None:
    batch = make_batch(rows=12, length=12, seed=1)
    batch["sample_mask"] = torch.cat([torch.zeros(6), torch.ones(6) if masked == "one rank" else torch.zeros(6)])
    config = fsdp1_config(tiny_models["llama"], gbs=12, weight_decay=0.0)
    results = [pool.run(world, fsdp1_jobs.train, config, [batch], NLLLoss())[0] for world in (1, 2)]
    torch.testing.assert_close(results[0]["losses"], results[1]["losses"])
    torch.testing.assert_close(results[0]["norms"], results[1]["norms"])
    if masked == "all":
        assert results[0]["norms"] == [0.0] and results[0]["losses"] == [0.0]
