"""Real vLLM on real Ray actors, refitted by policies of every backend: it answers what transformers answers
from the policy's export."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.cases.messages import slices_read
from megarl import env
from megarl.algorithms.loss_functions import NLLLoss
from megarl.algorithms.refit import Refit, connect, refit_policy_generation
from megarl.config import validate_config
from megarl.config.environments import EnvConfig
from megarl.data.datasets import Example
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.errors import BatchError, ConfigError, MegarlError, MismatchError, RefitError, WorkerError
from megarl.key import defaults_of
from megarl.models.generation import engine_stream, shared_stream
from megarl.models.generation.shared_stream import SharedStream
from megarl.models.generation.stream import Completion, Request
from megarl.models.generation.vllm.generation import VllmGeneration
from megarl.models.policy.lm_policy import Policy
from megarl.observe.timing import PhaseTimer
from megarl.patched import patched
from megarl.rollout.collector import Collector
from megarl.rollout.single_turn import SingleTurn
from megarl.run.evaluate import evaluate, result_of, weights_to_evaluate
from megarl.run.run import run
from megarl.weight_sync.manifest import Manifest
from tests.dist import reference
from tests.dist.batches import make_batch
from tests.dist.key_models import SPECIAL, tokenizer_of_words
from tests.engines.suite import fetched, requests_of
from tests.models import VOCABULARY, make_tiny, policy_config
from tests.seeing import make_seeing
from tests.system.vllm_engines import (
    NEW,
    POLICIES,
    PROMPTS,
    SAMPLING,
    TORCHVISION,
    dense_model,
    engines,
    greedy_answers,
    policy_of,
    processes_of,
    resident_bytes,
    rows_of,
)
from tests.tiers import slow

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

REFITS_AFTER = (0, 1, 2, 10)
BAD_PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"input_lengths": torch.tensor([4, 0, 3])}, r"input_lengths\[1\] = 0: a sequence has at least 1 token"),
    ({"input_lengths": torch.tensor([5, 2, 3])}, r"input_lengths\[0\] = 5: input_ids has only 4 columns"),
    ({"input_ids": torch.full((3, 4), VOCABULARY)}, r"input_ids\[0, 0\] = \d+ .*token ids lie in"),
    ({"input_ids": torch.ones(3, 4)}, r"input_ids: expected an int64 tensor \[B, S\], got torch.float32"),
    (
        {"input_ids": torch.full((3, 65), 5), "input_lengths": torch.tensor([4, 65, 3])},
        r"input_lengths\[1\] = 65 tokens: more than policy\.generation\.vllm_cfg\.max_model_len = 64",
    ),
    ({"stop_strings": [None, [""], None]}, r"stop_strings\[1\] has ''"),
    ({"sampling_seeds": torch.tensor([1, 2])}, "sampling_seeds"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's attention on a CPU wants heads of 32 or more."""
    return dense_model(
        tmp_path_factory.mktemp("vllm") / "qwen2",
        intermediate_size=112,
        num_hidden_layers=4,
        initializer_range=0.2,
    )


@pytest.fixture(scope="module")
def colocated(local_ray: int, model: Path) -> Iterator[VllmGeneration]:
    generation = engines(model, "colocated", colocated=True)
    yield generation
    assert generation.shutdown()


@pytest.fixture(scope="module")
def apart(local_ray: int, model: Path) -> Iterator[VllmGeneration]:
    """Two engines."""
    generation = engines(model, "apart", colocated=False, places=2)
    yield generation
    assert generation.shutdown()


@pytest.fixture(scope="module")
def untrained(local_ray: int, model: Path) -> Iterator[Policy]:
    policy = policy_of("megatron-tp1", model)
    yield policy
    assert policy.shutdown()


@pytest.fixture
def policy(untrained: Policy) -> Policy:
    """One for all tests that train none, its parameters on the device."""
    untrained.prepare_for_lp_inference()
    return untrained


@slow
@pytest.mark.parametrize("name", POLICIES)
def test_answers_are_those_of_the_export_at_every_step(
    colocated: VllmGeneration, apart: VllmGeneration, model: Path, tmp_path: Path, name: str
) -> None:
    policy = policy_of(name, model)
    try:
        check_answers(policy, colocated, apart, tmp_path)
    finally:
        assert policy.shutdown()


def check_answers(policy: Policy, colocated: VllmGeneration, apart: VllmGeneration, directory: Path) -> None:
    """After some training steps and others, both answer what transformers answers from the export, other
    things each time."""
    info = policy.prepare_refit_info() or {}
    for generation in (colocated, apart):
        generation.prepare_refit_info(info)
        with pytest.raises(RefitError, match="no complete weights"):
            generation.generate(PROMPTS)
    connect(policy, apart)
    answers = set()
    for before, steps in zip((0, *REFITS_AFTER), REFITS_AFTER, strict=False):
        for step in range(before, steps):
            policy.prepare_for_training()
            policy.train(BatchedDataDict(make_batch(8, 13, seed=step)), NLLLoss())
        policy.prepare_for_lp_inference()
        refit_policy_generation(policy, apart, colocated_inference=False)
        assert len(policy.prepare_weights_for_ipc()) > 2
        refit_policy_generation(policy, colocated, colocated_inference=True, _refit_buffer_size_gb=1)
        policy.prepare_for_lp_inference()
        policy.export_hf(directory / str(steps))
        expected = greedy_answers(directory / str(steps))
        assert rows_of(colocated.generate(PROMPTS, greedy=True)) == expected
        assert rows_of(apart.generate(PROMPTS, greedy=True)) == expected
        assert colocated.version == apart.version == steps
        answers.add(str(expected))
        check_sampling(policy, colocated)
    assert len(answers) == len(REFITS_AFTER)


def check_sampling(policy: Policy, generation: VllmGeneration) -> None:
    """Log-probabilities are the policy's, and a row draws the same again wherever it stands in the batch."""
    seeded = BatchedDataDict({**PROMPTS, "sampling_seeds": torch.tensor([11, 2**63 - 1, 5])})
    drawn = generation.generate(seeded)
    check = BatchedDataDict(
        {"input_ids": drawn["output_ids"], "input_lengths": drawn["unpadded_sequence_lengths"]}
    )
    positions = torch.arange(drawn["output_ids"].shape[1])
    mask = (positions >= PROMPTS["input_lengths"][:, None]) & (
        positions < drawn["unpadded_sequence_lengths"][:, None]
    )
    assert int(mask.sum()) == 3 * NEW
    torch.testing.assert_close(
        policy.get_logprobs(check)["logprobs"][mask], drawn["logprobs"][mask], atol=1e-4, rtol=0
    )
    turned = BatchedDataDict({key: value.flip(0) for key, value in seeded.items()})
    assert rows_of(generation.generate(turned)) == rows_of(drawn)[::-1]


@slow
def test_prompts_that_no_engine_can_take_are_refused_on_the_driver(
    colocated: VllmGeneration, policy: Policy, model: Path
) -> None:
    colocated.prepare_refit_info(policy.prepare_refit_info() or {})
    refit_policy_generation(policy, colocated, colocated_inference=True)
    for changes, message in BAD_PROMPTS:
        with pytest.raises(BatchError, match=message):
            colocated.generate(BatchedDataDict({**PROMPTS, **changes}), greedy=True)
    with pytest.raises(RefitError, match="no handles of weights"):
        colocated.update_weights_from_ipc_handles({})
    refit_policy_generation(policy, colocated, colocated_inference=True)
    assert rows_of(colocated.generate(PROMPTS, greedy=True)) == greedy_answers(model)


@slow
def test_more_tokens_of_prompts_than_a_step_takes(colocated: VllmGeneration, policy: Policy) -> None:
    """Rows draw by their seeds as they do alone. vLLM takes a prompt in pieces where it may, and draws anew
    behind each."""
    colocated.prepare_refit_info(policy.prepare_refit_info() or {})
    refit_policy_generation(policy, colocated, colocated_inference=True)
    rows, width = 240, 48
    ids = torch.randint(3, VOCABULARY, (rows, width), generator=torch.Generator().manual_seed(3))
    seeds = torch.arange(rows) + 5
    many = BatchedDataDict(
        {"input_ids": ids, "input_lengths": torch.full((rows,), width), "sampling_seeds": seeds}
    )
    few = BatchedDataDict({name: values[-8:] for name, values in many.items()})
    refit_policy_generation(policy, colocated, colocated_inference=True)
    alone = rows_of(colocated.generate(few, greedy=False))
    refit_policy_generation(policy, colocated, colocated_inference=True)
    assert rows_of(colocated.generate(many, greedy=False))[-8:] == alone


@slow
def test_a_stream_goes_on_while_further_requests_come_and_not_beyond_a_refit(
    apart: VllmGeneration, policy: Policy
) -> None:
    apart.prepare_refit_info(policy.prepare_refit_info() or {})
    connect(policy, apart)
    refit_policy_generation(policy, apart, colocated_inference=False)
    stream = apart.requests([], 0, greedy=False, sampling=None)
    assert not stream.in_waves
    stream.submit({0: Request(np.full(4, 5), 1)})
    stream.poll(0.001)
    stream.submit({1: Request(np.full(3, 5), 2)})
    assert all(len(found.tokens) == NEW for found in fetched(stream, 2).values())
    refit_policy_generation(policy, apart, colocated_inference=False)
    with pytest.raises(RefitError, match="but version"):
        stream.submit({0: Request(np.full(4, 5), 1)})
        apart.loaded([0, None])
        apart.requests([], 0, greedy=False, sampling=None)
    refit_policy_generation(policy, apart, colocated_inference=False)
    full = apart.requests([], 0, greedy=False, sampling=None)
    full.submit({0: Request(np.full(65, 5), 1)})
    with pytest.raises(
        BatchError, match=r"65 tokens: more than policy\.generation\.vllm_cfg\.max_model_len = 64"
    ):
        full.poll()


@slow
def test_requests_go_on_over_refits_with_the_tokens_that_they_have(
    apart: VllmGeneration, policy: Policy
) -> None:
    """A step of vLLM at a time, with the same weights again between any two: what comes out is as if nothing
    had been."""
    apart.prepare_refit_info(policy.prepare_refit_info() or {})
    connect(policy, apart)
    refit_policy_generation(policy, apart, colocated_inference=False)
    data = BatchedDataDict({**PROMPTS, "sampling_seeds": torch.tensor([11, 3, 5])})
    whole = apart.generate(data, greedy=True)
    shared = SharedStream(lambda: apart.requests([], 0, greedy=True, sampling=None), NEW)
    view = shared.view()
    view.submit(requests_of(data))
    found: dict[int, Completion] = {}
    with patched((engine_stream, "TURN_SECONDS", 1e-3), (shared_stream, "_LOOK_SECONDS", 0.0)):
        for version in range(100):
            shared.resume(version)
            found |= view.poll(1e-3)
            shared.pause()
            if len(found) == 3:
                break
            refit_policy_generation(policy, apart, colocated_inference=False)
    assert version > 1, "nothing was interrupted"
    for row, length in enumerate(PROMPTS["input_lengths"].tolist()):
        assert found[row].tokens.tolist() == rows_of(whole)[row][length:] and found[row].truncated
        np.testing.assert_allclose(
            found[row].logprobs, whole["logprobs"][row, length : length + NEW].numpy(), rtol=0, atol=1e-5
        )


@slow
def test_rewards_begin_with_what_is_complete_and_the_batch_is_the_same(
    apart: VllmGeneration, policy: Policy, tmp_path: Path
) -> None:
    apart.prepare_refit_info(policy.prepare_refit_info() or {})
    connect(policy, apart)
    refit_policy_generation(policy, apart, colocated_inference=False)
    (tmp_path / "mine.py").write_text(
        "def reward(response, answer):\n    return len(response) + len(answer)\n"
    )
    words = AutoTokenizer.from_pretrained(
        tokenizer_of_words(tmp_path / "words", [f"w{number}" for number in range(VOCABULARY - len(SPECIAL))])
    )
    section = {**defaults_of(EnvConfig), "reward": f"{tmp_path / 'mine.py'}:reward", "processes": 1}
    environment = SingleTurn(section)  # type: ignore[typeddict-item]
    engine: Any = SimpleNamespace(generation=apart, bring_up_to_date=lambda: None)
    collector = Collector(policy, words, environment, PhaseTimer(), None, engine)
    # the engines' 64 tokens leave some prompts less room than others
    prompts = ((5, 9, 6) * 20, (7, 5, 8) * 19, (6, 7, 5))
    records = [Example(place, prompt, (), "x" * place) for place, prompt in enumerate(prompts)]
    begun: list[int] = []
    begin = environment.score_ahead

    def noted(turn: Any) -> None:
        begun.append(len(turn.responses))
        begin(turn)

    try:
        # told of after each of vLLM's steps
        with patched((engine_stream, "GATHER_SECONDS", 1e-4), (environment, "score_ahead", noted)):
            found = collector.collect(records, 4, list(range(12)), weight_version=3)
        assert begun and sum(begun) < 12
        with patched((VllmGeneration, "takes_requests", False)):
            expected = collector.collect(records, 4, list(range(12)), weight_version=3)
        assert set(found.samples["generation_lengths"].tolist()) == {4, 7, NEW}
    finally:
        environment.close()
    for name, column in expected.samples.items():
        if name == "generation_logprobs":
            torch.testing.assert_close(found.samples[name], column, rtol=0, atol=1e-5)
        else:
            assert (
                list(found.samples[name]) == list(column)
                if isinstance(column, list)
                else torch.equal(found.samples[name], column)
            ), name


@slow
def test_half_a_refit_is_never_served_and_the_next_one_works(
    colocated: VllmGeneration, policy: Policy
) -> None:
    colocated.prepare_refit_info(policy.prepare_refit_info() or {})
    refit_policy_generation(policy, colocated, colocated_inference=True)
    before = rows_of(colocated.generate(PROMPTS, greedy=True))
    policy.prepare_for_lp_inference()
    names = [name for group in policy.prepare_weights_for_ipc() for name in group]
    half = policy.get_weights_ipc_handles(names[:7])
    colocated.update_weights_from_ipc_handles(half)
    with pytest.raises(RefitError, match="no complete weights"):
        colocated.generate(PROMPTS)
    policy.prepare_weights_for_ipc()
    policy.get_weights_ipc_handles(names[:3])
    with pytest.raises(MegarlError, match="an old handle was used again"):
        colocated.update_weights_from_ipc_handles(half)
    refit_policy_generation(policy, colocated, colocated_inference=True)
    assert rows_of(colocated.generate(PROMPTS, greedy=True)) == before


@slow
def test_engines_apart_that_missed_a_version_are_refused(apart: VllmGeneration, policy: Policy) -> None:
    apart.prepare_refit_info(policy.prepare_refit_info() or {})
    connect(policy, apart)
    sending, receiving = policy.broadcast_weights_for_collective(), apart.update_weights_from_collective()
    for side, futures in ((policy, sending), (apart, receiving)):
        side.worker_group.get_all_worker_results(futures)
    # nobody called loaded(): the engines themselves say what came
    before = rows_of(apart.generate(PROMPTS, greedy=True))
    assert apart.version == apart.expected_version == 0
    with pytest.raises(RefitError, match="version 0, but version 7 is required"):
        apart.worker_group.get_all_worker_results(
            apart.worker_group.run_all_workers_single_data("generate", data=PROMPTS, greedy=True, version=7)
        )
    apart.loaded([0, None])
    with pytest.raises(
        RefitError,
        match="engine 1 of 2 has no complete weights, but version 0 was sent last: refit all engines",
    ):
        apart.generate(PROMPTS)
    sending, receiving = policy.broadcast_weights_for_collective(), apart.update_weights_from_collective(3)
    policy.worker_group.get_all_worker_results(sending)
    with pytest.raises(
        RefitError, match="the policy sent version 0 of its weights, but version 3 was requested"
    ):
        apart.generate(PROMPTS)
    with pytest.raises(
        RefitError, match="engine 0 of 2 has no complete weights, but version 3 was sent last"
    ):
        apart.generate(PROMPTS)
    refit_policy_generation(policy, apart, colocated_inference=False)
    assert rows_of(apart.generate(PROMPTS, greedy=True)) == before


@slow
def test_an_engine_that_died_is_said_to_be_dead_and_a_new_one_is_refused_until_it_is_refitted(
    colocated: VllmGeneration, policy: Policy
) -> None:
    colocated.prepare_refit_info(policy.prepare_refit_info() or {})
    refit_policy_generation(policy, colocated, colocated_inference=True)
    before = rows_of(colocated.generate(PROMPTS, greedy=True))
    [future] = colocated.worker_group.run_all_workers_single_data("is_alive")
    process = colocated.worker_group._registry.process(future)
    assert process is not None
    os.kill(process.process_id, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker process died(.|\n)*VllmGeneration\.restart\(policy\)"):
        colocated.generate(PROMPTS)
    with pytest.raises(
        RefitError, match="engine 0 of 1 has no complete weights, but version 0 was sent last"
    ):
        colocated.generate(PROMPTS)
    colocated.restart(policy)
    with pytest.raises(
        RefitError, match="engine 0 of 1 has no complete weights, but version 0 was sent last"
    ):
        colocated.generate(PROMPTS)
    refit_policy_generation(policy, colocated, colocated_inference=True)
    assert rows_of(colocated.generate(PROMPTS, greedy=True)) == before


@slow
def test_a_hundred_refits_leave_memory_flat(local_ray: int, model: Path, tmp_path: Path) -> None:
    """In the policy and in a real engine, which after them still answers what transformers answers."""
    # what the C library keeps in pieces of tensors that were freed comes and goes by megabytes; so nothing of
    # a tensor's size stays there
    exact = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    policy, generation = (
        policy_of("megatron-tp2", model, **exact),
        engines(model, "hundred", colocated=True, **exact),
    )
    generation.prepare_refit_info(policy.prepare_refit_info() or {})
    resident: dict[int, list[int]] = {}
    for number in range(1, 101):
        policy.prepare_for_training()
        policy.train(BatchedDataDict(make_batch(8, 13, seed=number)), NLLLoss())
        refit_policy_generation(policy, generation, colocated_inference=True)
        if number in (20, 60, 100):
            groups = policy.worker_group, generation.worker_group
            resident[number] = [
                resident_bytes(process) for group in groups for process in processes_of(group)
            ]
    policy.prepare_for_lp_inference()
    policy.export_hf(tmp_path / "out")
    assert rows_of(generation.generate(PROMPTS, greedy=True)) == greedy_answers(tmp_path / "out")
    weights = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    for early, late in zip(resident[60], resident[100], strict=True):
        # a fortieth of what forty refits would leave that keep their weights once
        assert late - early < weights, resident
    assert generation.shutdown() and policy.shutdown()


@slow
def test_a_wrong_world_size_and_wrong_refit_info_are_refused_at_once(
    apart: VllmGeneration, model: Path
) -> None:
    with pytest.raises(RefitError, match="the refit info is not"):
        apart.prepare_refit_info({"weight": (2, 3)})
    apart.prepare_refit_info({"weight": ((2, 3), torch.float32)})
    with pytest.raises(RefitError, match=r"world_size = 9: 2 engines of 1 ranks and the policy make 3"):
        apart.init_collective("127.0.0.1", 1, 9)


@slow
def test_places_that_make_no_whole_engines_are_refused(local_ray: int, model: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 2: it does not divide the 3 bundles"):
        engines(model, "odd", colocated=True, places=3, tensor_parallel=2)


@slow
def test_the_engines_have_the_environment_of_their_section(colocated: VllmGeneration) -> None:
    [environment] = colocated.worker_group.get_all_worker_results(
        colocated.worker_group.run_all_workers_single_data("environment")
    )
    assert environment["VLLM_CPU_CI_ENV"] == "1" and environment["VLLM_LOGGING_LEVEL"] == "ERROR"


@slow
@pytest.mark.parametrize("adapters_alone", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("shared", [True, False], ids=["colocated", "apart"])
def test_grpo_from_a_configuration(
    local_ray: int, model: Path, tmp_path: Path, shared: bool, adapters_alone: bool
) -> None:
    """Two steps, each with a validation and a checkpoint, which has the validation's figures by itself too; a
    second launch goes on from there and stops at a bound of no difference."""
    data = tmp_path / "data.jsonl"
    data.write_text(
        "\n".join(
            json.dumps({"prompt": f"w{left} w{left + 1}", "answer": f"w{left + 2}"}) for left in range(9, 20)
        )
    )
    # the policy's tokenizer is elsewhere than its model
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*"))
    words = tokenizer_of_words(
        tmp_path / "tokenizer", [f"w{number}" for number in range(len(SPECIAL), VOCABULARY)]
    )
    source = {"path": str(data), "prompt_key": "prompt", "answer_key": "answer"}
    policy = policy_config(bare, gbs=8, mbs=4, temperature=0.7)
    settings = {"enforce_eager": True, "kv_cache_gb": 0.02, "env_vars": {"VLLM_CPU_CI_ENV": "1"}}
    if adapters_alone:
        policy["peft"] = {"enabled": True, "dim": 5}
        settings |= {"enable_lora": True, "load_format": "auto"}
    policy["generation"] = {
        "backend": "vllm",
        "max_new_tokens": 5,
        "temperature": 0.7,
        "val_temperature": 0.9,
        "val_top_k": 30,
        "stop_strings": ["w7"],
        "colocated": {"enabled": True} if shared else {"enabled": False, "resources": {"gpus_per_node": 1}},
        "vllm_cfg": settings,
    }
    config = {
        "algorithm": "grpo",
        "seed": 3,
        "run_dir": str(tmp_path / "run"),
        "policy": {**policy, "tokenizer": {"name": str(words), "chat_template": None}},
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 4,
            "max_num_steps": 2,
            "val_period": 1,
            "max_val_samples": 6,
            "val_num_generations_per_prompt": 3,
        },
        "loss_fn": {
            "reference_policy_kl_penalty": 0.0,
            "ratio_clip_min": 0.2,
            "ratio_clip_max": 0.2,
            "ratio_clip_c": None,
            "use_on_policy_kl_approximation": False,
            "use_importance_sampling_correction": True,
            "token_level_loss": True,
        },
        "env": {"reward": "exact_match"},
        "data": {"train": source, "validation": source, "max_input_seq_length": 20},
        "checkpointing": {"enabled": True, "save_period": 1, "export_hf": True},
        "cluster": {"gpus_per_node": 1 if shared else 2, "num_nodes": 1, "device": "cpu"},
    }
    assert run(copy.deepcopy(config)) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["train/mismatch_mean"] < 1e-5 and row["train/mismatch_share_above_0.05"] == 0
        assert row["train/token_mult_prob_error"] == pytest.approx(1 + row["train/mismatch_mean"], rel=1e-6)
        assert row["timing/refit_s"] > 0 and row["validation/samples"] == 18
    checked, weights = (
        validate_config(copy.deepcopy(config)),
        weights_to_evaluate(tmp_path / "run" / "checkpoints" / "step_2"),
    )
    alone = result_of(evaluate(checked, weights), checked, weights)["metrics"]
    assert alone == {name: value for name, value in rows[1].items() if name.startswith("validation/")}
    if shared:
        config["grpo"] |= {"max_num_steps": 3, "max_token_mult_prob_error": 1.0}
        with pytest.raises(MismatchError, match="step 3: token_mult_prob_error"):
            run(config)


@slow
@pytest.mark.parametrize(
    "changes", [{"ep": 2}, {"tp": 2, "ep": 2, "sp": True, "multiple": 2}], ids=["ep2", "tp2-ep2"]
)
def test_a_mixture_of_experts(local_ray: int, tmp_path: Path, changes: dict[str, int]) -> None:
    path = tmp_path / "mixture"
    torch.manual_seed(4)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=112,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    tokenizer_of_words(path, [f"w{number}" for number in range(len(SPECIAL), VOCABULARY)])
    settings = policy_config(path, gbs=8, mbs=2, **changes) | {"refit_buffer_size_gb": 0.0005}
    settings["generation"] |= SAMPLING
    cluster = RayVirtualCluster([2 * changes.get("tp", 1)], use_gpus=False, name="mixture")
    policy = Policy(cluster, settings, None, init_reference_model=False)
    shared, other = engines(path, "mixture", colocated=True), engines(path, "mixture-apart", colocated=False)
    check_answers(policy, shared, other, tmp_path)
    assert shared.shutdown() and other.shutdown() and policy.shutdown()


NO_PREFIXES = {"enable_prefix_caching": False}
# what vLLM's kernels for CPUs take
HYBRID = {
    "hidden_size": 96,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 9000.0, "partial_rotary_factor": 0.5},
}
NEXT = {**HYBRID, "intermediate_size": 160, "partial_rotary_factor": 0.5}
HYBRIDS: dict[str, Callable[[Path], Path]] = {
    "qwen3_next": lambda path: make_tiny(path, "qwen3_next", tied=False, seed=3, layers=4, **NEXT),
    # as they are published: the text in a section, beside a tower and a prediction layer
    "qwen3_5": lambda path: make_seeing(path, "qwen3_5", tied=True, seed=3, **HYBRID),
    "qwen3_5_moe": lambda path: make_seeing(
        path, "qwen3_5_moe", tied=False, seed=3, stacked_experts=True, **HYBRID
    ),
}


@slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid(local_ray: int, tmp_path: Path, family: str) -> None:
    """In bfloat16, vLLM's only dtype for gated delta nets on CPUs: log-probabilities are the policy's within
    the rounding that transformers shows with the same weights, ten times farther from those of older weights,
    and to the bit those of a new engine's first refit."""
    if family != "qwen3_next" and TORCHVISION is None:
        pytest.skip("torchvision is not installed: bash launch/test.sh --part vllm-1 installs it")
    model = HYBRIDS[family](tmp_path / "model")
    tokenizer_of_words(model, [f"w{number}" for number in range(len(SPECIAL), VOCABULARY)])
    settings = policy_config(
        model, gbs=8, mbs=2, tp=2, sp=True, multiple=2, precision="bfloat16", lr=0.02
    ) | {"refit_buffer_size_gb": 0.0005}
    settings["generation"] |= SAMPLING
    policy = Policy(
        RayVirtualCluster([2], use_gpus=False, name="hybrid"), settings, None, init_reference_model=False
    )
    made: list[VllmGeneration] = []

    def refitted(generation: VllmGeneration) -> Answers:
        refit_policy_generation(policy, generation, colocated_inference=True)
        policy.prepare_for_lp_inference()
        return answers_of(policy, generation)

    def engine() -> VllmGeneration:
        made.append(
            engines(
                model,
                f"hybrid-{len(made)}",
                colocated=True,
                changes={"precision": "bfloat16"},
                arguments=NO_PREFIXES,
                **({} if TORCHVISION is None else {"PYTHONPATH": TORCHVISION}),
            )
        )
        made[-1].prepare_refit_info(policy.prepare_refit_info() or {})
        return made[-1]

    first = engine()
    for step in range(3):
        stale = math.inf
        if step:
            policy.prepare_for_training()
            policy.train(BatchedDataDict(make_batch(8, 13, seed=step)), NLLLoss())
            policy.prepare_for_lp_inference()
            stale = answers_of(policy, first).error
        answers = refitted(first)
        policy.export_hf(tmp_path / f"step_{step}")
        rounding = rounding_of(tmp_path / f"step_{step}", answers)
        assert answers.error < min(max(0.08, 2 * rounding), stale / 10), (
            step,
            answers.error,
            rounding,
            stale,
        )
    assert torch.equal(refitted(engine()).of_engine, answers.of_engine)
    assert all(generation.shutdown() for generation in made) and policy.shutdown()


@dataclass(frozen=True)
class Answers:
    """Seeded answers, and the log-probabilities of their tokens by the engine and by the policy."""

    batch: BatchedDataDict
    mask: torch.Tensor
    of_engine: torch.Tensor
    of_policy: torch.Tensor

    @property
    def error(self) -> float:
        return float((self.of_engine - self.of_policy).abs().mean())


def answers_of(policy: Policy, generation: VllmGeneration) -> Answers:
    drawn = generation.generate(
        BatchedDataDict({**PROMPTS, "sampling_seeds": torch.tensor([11, 2**63 - 1, 5])})
    )
    ids, lengths = drawn["output_ids"], drawn["unpadded_sequence_lengths"]
    positions = torch.arange(ids.shape[1])
    mask = (positions >= PROMPTS["input_lengths"][:, None]) & (positions < lengths[:, None])
    batch = BatchedDataDict({"input_ids": ids, "input_lengths": lengths})
    return Answers(batch, mask, drawn["logprobs"][mask], policy.get_logprobs(batch)["logprobs"][mask])


def rounding_of(model: Path, answers: Answers) -> float:
    """How far bfloat16 takes the log-probabilities of transformers from those in float32. Near ties a mixture
    chooses other experts, and how often depends on the weights and on the kind of CPU."""
    text_alone = "vision_config" not in json.loads((model / "config.json").read_text())
    kind = AutoModelForCausalLM if text_alone else AutoModelForImageTextToText
    exact, rounded = (
        reference.logprobs(
            kind.from_pretrained(model, dtype=dtype, experts_implementation="eager"),
            answers.batch,
            SAMPLING["temperature"],
        )[answers.mask]
        for dtype in (torch.float32, torch.bfloat16)
    )
    return float((exact - rounded).abs().mean())


TENSOR = {"tensor_parallel_size": 2}


def train_and_refit(policy: Policy, refit: Refit, step: int) -> None:
    """A step of training, which step 0 has not, and a refit; the policy is then ready to be exported."""
    if step:
        policy.prepare_for_training()
        policy.train(BatchedDataDict(make_batch(8, 13, seed=step)), NLLLoss())
        refit.stale = True
    refit.bring_up_to_date()
    policy.prepare_for_lp_inference()


@slow
@pytest.mark.parametrize(
    ("shared", "places"),
    [(True, [2]), (False, [4]), (True, [1, 1]), (False, [1, 1, 1, 1])],
    ids=["one-colocated", "two-apart", "one-over-nodes", "two-over-nodes"],
)
def test_engines_of_two_ranks(
    local_ray: int, model: Path, tmp_path: Path, shared: bool, places: list[int]
) -> None:
    """On one node, or one rank on each of two."""
    policy = policy_of("megatron-tp2", model)
    generation = engines(
        model, "tp2" if shared else "tp2-apart", colocated=shared, places=places, changes=TENSOR
    )
    refit = Refit(policy, generation, colocated=shared)
    for step in range(2):
        train_and_refit(policy, refit, step)
        policy.export_hf(tmp_path / str(step))
        assert rows_of(generation.generate(PROMPTS, greedy=True)) == greedy_answers(tmp_path / str(step))
    assert generation.shutdown() and policy.shutdown()


VOCABULARIES = {"odd-and-tied": (VOCABULARY, True), "even": (128, False)}


@slow
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_ranks_of_an_engine_take_their_slices_with_the_bits_of_whole_weights(
    local_ray: int, tmp_path: Path, vocabulary: str
) -> None:
    """What vLLM's loaders are seen to read is what the count of bytes reckons with."""
    size, tied = VOCABULARIES[vocabulary]
    sizes = {"intermediate_size": 112, "num_hidden_layers": 3, "initializer_range": 0.2}
    model = dense_model(tmp_path / "model", vocab_size=size, tie_word_embeddings=tied, **sizes)
    policy, generation = (
        policy_of("megatron-tp2", model),
        engines(model, "slices", colocated=True, places=2, changes=TENSOR),
    )
    refit = Refit(policy, generation, colocated=True)
    seeded = BatchedDataDict({**PROMPTS, "sampling_seeds": torch.tensor([5, 6, 7])})
    answers = []
    for step in range(2):
        train_and_refit(policy, refit, step)
        policy.export_hf(tmp_path / str(step))
        assert rows_of(generation.generate(PROMPTS, greedy=True)) == greedy_answers(tmp_path / str(step))
        sliced = generation.generate(seeded, greedy=False)
        wanted = slices_read(Manifest.from_description(policy.prepare_refit_info() or {}), 2, 2)
        read = generation.slices_wanted()
        assert read is not None and read.ranks == wanted
        assert set(generation._sliced) == wanted[0].keys() and len(generation._sliced) >= 3 * 10
        with patched((generation, "slices_wanted", lambda: None)):
            refit.stale = True
            refit.bring_up_to_date()
            policy.prepare_for_lp_inference()
        assert generation._sliced == ()
        whole = generation.generate(seeded, greedy=False)
        assert sliced.keys() == whole.keys() and all(torch.equal(sliced[name], whole[name]) for name in whole)
        answers.append(whole["logprobs"])
        refit.stale = True
    assert not torch.equal(*answers)
    assert generation.shutdown() and policy.shutdown()


@slow
def test_the_newer_model_runner_is_refused_without_a_triton_for_cpus(local_ray: int, model: Path) -> None:
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        pytest.skip("Triton has a backend for CPUs here")
    with pytest.raises(
        MegarlError, match="VLLM_USE_V2_MODEL_RUNNER = 1: vLLM's newer model runner needs Triton"
    ):
        engines(model, "runner", colocated=True, VLLM_USE_V2_MODEL_RUNNER="1")


@slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("runner", ["newer", "older"])
def test_both_model_runners_are_refitted_and_answer_what_transformers_answers(
    tmp_path: Path, runner: str
) -> None:
    """The kernels of the newer one run in Triton's interpreter (``tests/system/model_runners.py``)."""
    newer = runner == "newer"
    changes = {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(newer)),
        "TRITON_INTERPRET": str(int(newer)),
        "MEGARL_DEVICE": "cpu",
    }
    changes |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "tests.system.model_runners", str(tmp_path), runner]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**env.snapshot(), **changes},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["newer"] is newer
    assert found["greedy"][0] != found["greedy"][1] and max(found["error"]) < 1e-4


SAME_PROMPT = BatchedDataDict(
    {"input_ids": PROMPTS["input_ids"][:1].expand(6, -1).contiguous(), "input_lengths": torch.full((6,), 4)}
)


@slow
@pytest.mark.parametrize("changes", [{}, TENSOR], ids=["one-rank", "two-ranks"])
def test_fast_sampling_draws_by_the_seed_of_the_call(
    local_ray: int, model: Path, changes: dict[str, int]
) -> None:
    """The same again for the same seed, other tokens for another one and in each row, with the policy's
    log-probabilities."""
    policy = policy_of("megatron-tp1", model)
    places = changes.get("tensor_parallel_size", 1)
    generation = engines(
        model, "fast", colocated=True, places=places, changes={"fast_sampling": True, **changes}
    )
    generation.prepare_refit_info(policy.prepare_refit_info() or {})
    policy.prepare_for_lp_inference()
    refit_policy_generation(policy, generation, colocated_inference=True)
    first, other, again = (
        generation.generate(BatchedDataDict({**SAME_PROMPT, "sampling_seeds": torch.arange(6) + seed}))
        for seed in (11, 12, 11)
    )
    assert rows_of(first) == rows_of(again) != rows_of(other)
    assert len(set(map(tuple, rows_of(first)))) > 1
    policy.prepare_for_lp_inference()
    scored = policy.get_logprobs(
        BatchedDataDict(
            {"input_ids": first["output_ids"], "input_lengths": first["unpadded_sequence_lengths"]}
        )
    )
    torch.testing.assert_close(scored["logprobs"][:, 4:], first["logprobs"][:, 4:], atol=1e-4, rtol=0)
    assert generation.shutdown() and policy.shutdown()


LONG = BatchedDataDict(
    {
        "input_ids": (torch.arange(48)[None] * 7 % 90 + 3).expand(4, -1).contiguous(),
        "input_lengths": torch.full((4,), 48),
    }
)


@slow
def test_keys_and_values_of_a_prompt_are_shared_and_forgotten_at_a_refit(
    local_ray: int, model: Path, tmp_path: Path
) -> None:
    """A prompt of more than a block of the cache, asked again with the same weights and with others."""
    policy, generation = policy_of("megatron-tp1", model), engines(model, "prefix", colocated=True)
    refit = Refit(policy, generation, colocated=True)
    for step in range(3):
        train_and_refit(policy, refit, step)
        policy.export_hf(tmp_path / str(step))
        expected = greedy_answers(tmp_path / str(step), LONG)
        assert (
            rows_of(generation.generate(LONG, greedy=True))
            == rows_of(generation.generate(LONG, greedy=True))
            == expected
        )
    assert generation.shutdown() and policy.shutdown()
