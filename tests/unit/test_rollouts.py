"""Rollouts and batches, with the plain reference policy doing the generating."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.datasets import Example
from megarl.data.tokenization import get_tokenizer
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.token_batches import pad_rows, supervised_batch
from megarl.errors import BatchError
from megarl.observe.timing import PhaseTimer
from megarl.rollout.collector import Collector
from megarl.rollout.environment import EnvironmentReturn, Turn
from megarl.rollout.samples import sampling_seed, sampling_seeds
from tests.unit.reference_policy import ReferencePolicy
from tests.unit.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> ReferencePolicy:
    return make_policy(tmp_path_factory.mktemp("model"))


def make_policy(path: Path, **generation: Any) -> ReferencePolicy:
    config = {
        "model_name": make_tiny_model(path, 3),
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 12,
        "generation": {"max_new_tokens": 5, **generation},
        "megatron_cfg": {
            "optimizer": {
                "lr": 1e-3,
                "weight_decay": 0.0,
                "adam_beta1": 0.9,
                "adam_beta2": 0.99,
                "adam_eps": 1e-8,
            }
        },
    }
    policy = ReferencePolicy(config, get_tokenizer({"name": config["model_name"]}))
    policy.prepare_for_generation()
    return policy


class NoReward:
    def step(self, turn: Turn) -> EnvironmentReturn:
        rows = len(turn.records)
        return EnvironmentReturn([0.0] * rows, [True] * rows, [False] * rows)

    def fault_of_reference(self, answer: str) -> None:
        return None

    def close(self) -> None: ...


def generate_samples(
    policy: Any,
    prompts: list[list[int]],
    tokenizer: Any,
    generations: int = 1,
    seeds: list[int] | None = None,
    greedy: bool = False,
    stop_token_ids: list[int] | None = None,
) -> BatchedDataDict[Any]:
    records = [Example(place, tuple(prompt), (), "") for place, prompt in enumerate(prompts)]
    collector = Collector(policy, tokenizer, NoReward(), PhaseTimer(), stop_token_ids)
    return collector.collect(records, generations, seeds, greedy=greedy).samples


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17]]


def test_samples_fit_together(policy: ReferencePolicy) -> None:
    samples = generate_samples(policy, PROMPTS, policy.tokenizer, 3, sampling_seeds(1, 1, 3, 3))
    assert samples.size == 9
    for row in range(9):
        prompt = PROMPTS[row // 3]
        end = int(samples["input_lengths"][row])
        assert samples["input_ids"][row, : len(prompt)].tolist() == prompt
        assert samples["prompt_ids"][row, : len(prompt)].tolist() == prompt
        assert int(samples["generation_lengths"][row]) == end - len(prompt) > 0
        expected_mask = (
            [0.0] * len(prompt) + [1.0] * (end - len(prompt)) + [0.0] * (samples["input_ids"].shape[1] - end)
        )
        assert samples["token_mask"][row].tolist() == expected_mask
        answer = samples["input_ids"][row, len(prompt) : end].tolist()
        assert bool(samples["truncated"][row]) == (answer[-1] != policy.tokenizer.eos_token_id)
        assert samples["response_text"][row] == policy.tokenizer.decode(answer, skip_special_tokens=True)
    policy.prepare_for_lp_inference()
    logprobs = policy.get_logprobs(samples)["logprobs"]
    policy.prepare_for_generation()
    torch.testing.assert_close(
        logprobs * samples["token_mask"], samples["generation_logprobs"], rtol=1e-4, atol=1e-5
    )


def test_a_row_depends_on_its_seed_alone(policy: ReferencePolicy) -> None:
    seeds = sampling_seeds(7, 2, 3, 2)
    together = generate_samples(policy, PROMPTS, policy.tokenizer, 2, seeds)
    alone = generate_samples(policy, PROMPTS[1:2], policy.tokenizer, 2, seeds[2:4])
    for row in range(2):
        end = int(alone["input_lengths"][row])
        assert together["input_ids"][2 + row, :end].tolist() == alone["input_ids"][row, :end].tolist()
    assert (
        together["response_text"]
        != generate_samples(policy, PROMPTS, policy.tokenizer, 2, sampling_seeds(7, 3, 3, 2))["response_text"]
    )


def test_greedy_answers_agree(policy: ReferencePolicy) -> None:
    samples = generate_samples(policy, PROMPTS[:1], policy.tokenizer, 2, greedy=True)
    assert samples["input_ids"][0].tolist() == samples["input_ids"][1].tolist()


def test_stop_tokens_end_an_answer_and_are_not_truncation(tmp_path: Path) -> None:
    free = make_policy(tmp_path)
    first = int(generate_samples(free, PROMPTS[:1], free.tokenizer, greedy=True)["input_ids"][0, 3])
    stopping = make_policy(tmp_path, stop_token_ids=[first])
    samples = generate_samples(stopping, PROMPTS[:1], free.tokenizer, greedy=True, stop_token_ids=[first])
    assert samples["generation_lengths"].tolist() == [1] and samples["truncated"].tolist() == [False]
    assert samples["token_mask"][0].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_a_prompt_without_room_is_truncated_and_does_not_count(policy: ReferencePolicy) -> None:
    samples = generate_samples(policy, [list(range(5, 17)), [5]], policy.tokenizer)
    assert samples["generation_lengths"].tolist()[0] == 0
    assert samples["truncated"].tolist()[0] is True
    assert samples["sample_mask"].tolist() == [0.0, 1.0]


def test_seeds_must_match_the_samples(policy: ReferencePolicy) -> None:
    with pytest.raises(BatchError, match="2 sampling seeds for 3 samples"):
        generate_samples(policy, PROMPTS, policy.tokenizer, 1, [1, 2])


class ShuffledRows:
    """A broken generator: its rows are not those of the prompts."""

    def __init__(self, policy: ReferencePolicy) -> None:
        self._policy = policy

    def prepare_for_generation(self) -> None:
        self._policy.prepare_for_generation()

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        return self._policy.generate(data, greedy).select_indices([2, 1, 0])


@pytest.mark.parametrize("prompts", [PROMPTS, [[5, 6], [7, 8], [9, 10]]])
def test_answers_to_other_prompts_are_refused(policy: ReferencePolicy, prompts: list[list[int]]) -> None:
    with pytest.raises(BatchError, match="do not continue"):
        generate_samples(ShuffledRows(policy), prompts, policy.tokenizer)


def test_sampling_seeds_are_distinct_pinned_and_in_range() -> None:
    seeds = [sampling_seed(*place) for place in itertools.product(range(3), range(12), range(12), range(4))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seeds(5, 6, 2, 3) == [
        sampling_seed(5, 6, prompt, sample) for prompt in range(2) for sample in range(3)
    ]
    # Another hash would make resumed runs draw other answers.
    assert sampling_seed(1, 2, 3, 4) == 915980125509138081


def test_pad_rows() -> None:
    ids, lengths = pad_rows([[1, 2, 3], [], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 9], [4, 9, 9]]
    assert lengths.tolist() == [3, 0, 1]
    assert pad_rows([], 0)[0].shape == (0, 0)


def test_supervised_batch_trains_on_answers_only() -> None:
    examples = [Example(0, (5, 6, 7), (8, 1), "x"), Example(1, (5,), (1,), "")]
    batch = supervised_batch(examples, pad_token_id=0, rows=3)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 1], [5, 1, 0, 0, 0], [5, 6, 7, 8, 1]]
    assert batch["input_lengths"].tolist() == [5, 2, 5]
    assert batch["token_mask"].tolist() == [[0, 0, 0, 1, 1], [0, 1, 0, 0, 0], [0, 0, 0, 1, 1]]
    assert batch["sample_mask"].tolist() == [1, 1, 0]
    assert supervised_batch(examples, 0)["sample_mask"].tolist() == [1, 1]
