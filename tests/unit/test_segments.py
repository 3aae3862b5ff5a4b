"""Responses of several segments, where a chat template writes earlier responses otherwise: their rows,
advantages, losses and runs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.advantages import generalized_advantages, rewards_of_tokens, values_before
from megarl.algorithms.loss_functions import ClippedPGLossFn
from megarl.algorithms.sampled import Sampling
from megarl.algorithms.sampled_batch import load_batches, save_batches
from megarl.config.losses import ClippedPGLossConfig
from megarl.data.datasets import Example
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.key import defaults_of
from megarl.models.engine.microbatches import under_mask
from megarl.models.engine.normalizers import global_normalizers
from megarl.observe.sample_files import read_samples
from megarl.rollout import collector as collectors
from megarl.rollout import segment_rows
from megarl.rollout.collector import Rollouts
from megarl.rollout.dynamic_sampling import joined
from megarl.rollout.message_env import MessageEnv, MessageEnvironment, Step
from megarl.rollout.samples import sampling_seeds, seed_of_turn
from megarl.rollout.segment_rows import SegmentRows, global_batches, rows_of_segments
from megarl.run.run import run
from tests.templates import tokenizer_of
from tests.unit.driver_runs import PolicyMaker, check_same, comparable, make_config, rows
from tests.unit.scripted import ScriptedStream, collector_of, logprob_of
from tests.unit.test_episodes import SECTION

REASONED = 0.7
"""How often a scripted response begins with reasoning."""


class Asking(MessageEnv):
    """Asks on by a tool or as the user, until the record's number of turns."""

    turns = 0

    def step(self, message: Any) -> Step:
        self.turns += 1
        role = "tool" if (self.record.index + self.turns) % 3 == 0 else "user"
        said = {
            "role": role,
            "content": f"No {self.turns}.",
            **({"name": "look", "tool_call_id": "c"} if role == "tool" else {}),
        }
        return Step(said, reward=self.turns / 8, done=self.turns == self.record.fields["turns"])


def thoughts(prompt: list[int], seed: int) -> list[int]:
    """A response of single letters, which the tokenizer itself would merge; some begin with reasoning."""
    tokenizer = tokenizer_of("qwen3")
    drawn = random.Random(f"{seed} {prompt}")
    letters = [
        tokenizer.convert_tokens_to_ids(letter) for letter in drawn.choices("onst", k=drawn.randint(1, 9))
    ]
    thought = tokenizer("<think>\nstone\n</think>\n\n", add_special_tokens=False)["input_ids"]
    return [*(thought if drawn.random() < REASONED else []), *letters, tokenizer.eos_token_id]


TURNS = (1, 4, 2, 3)


def asked(records: int = 4) -> list[Example]:
    tokenizer = tokenizer_of("qwen3")
    texts = [
        f"<|im_start|>user\nAsk {'x' * place}.<|im_end|>\n<|im_start|>assistant\n" for place in range(records)
    ]
    ids = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    return [
        Example(place, ids[place], (), str(place), fields={"turns": TURNS[place % 4]})
        for place in range(records)
    ]


def collected(
    records: list[Example] | None = None, generations: int = 2, stream: Any = None, **limits: Any
) -> Rollouts:
    collector, engine, _ = collector_of(MessageEnvironment(Asking, SECTION), thoughts, "qwen3", **limits)
    records = asked() if records is None else records
    seeds = sampling_seeds(3, 1, len(records), generations)
    with pytest.MonkeyPatch.context() as patch:
        if stream is not None:
            patch.setattr(collectors, "Waves", lambda *arguments, **options: ScriptedStream(engine, stream))
        return collector.collect(records, generations, seeds, weight_version=1)


Row = tuple[list[int], list[int], list[float], list[float]]


def by_hand(record: Example, seed: int) -> list[Row]:
    """Tokens, mask, log-probabilities and rewards of each segment of a response, from whole renderings of the
    conversation."""
    tokenizer = tokenizer_of("qwen3")
    text = tokenizer.decode(list(record.prompt_ids))
    messages: list[dict[str, str]] = [
        {"role": "user", "content": text.split("\n")[1].removesuffix("<|im_end|>")}
    ]

    def start(prompt: list[int]) -> Row:
        return list(prompt), [0] * len(prompt), [0.0] * len(prompt), [0.0] * len(prompt)

    found = [start(list(record.prompt_ids))]
    for turn in range(record.fields["turns"]):
        ids, mask, logprobs, rewards = found[-1]
        own = seed if turn == 0 else seed_of_turn(seed, turn)
        said = thoughts(ids, own)
        rewards += [*[0.0] * (len(said) - 1), (turn + 1) / 8]
        ids, mask, logprobs = (
            ids + said,
            mask + [1] * len(said),
            logprobs + [logprob_of(token, own) for token in said],
        )
        found[-1] = ids, mask, logprobs, rewards
        if turn + 1 == record.fields["turns"]:
            return found
        role = "tool" if (record.index + turn + 1) % 3 == 0 else "user"
        messages += [
            {"role": "assistant", "content": tokenizer.decode(said[:-1])},
            {"role": role, "content": f"No {turn + 1}."},
        ]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        shown = tokenizer.decode(ids)
        if whole.startswith(shown):
            seen = tokenizer(whole[len(shown) :], add_special_tokens=False)["input_ids"]
            found[-1] = (
                ids + seen,
                mask + [0] * len(seen),
                logprobs + [0.0] * len(seen),
                rewards + [0.0] * len(seen),
            )
        else:
            found.append(start(tokenizer(whole, add_special_tokens=False)["input_ids"]))
    raise AssertionError("no response ended it")


def test_rows_are_the_segments_token_by_token() -> None:
    rollouts, tokenizer = collected(), tokenizer_of("qwen3")
    found = rows_of_segments(rollouts, tokenizer.pad_token_id)
    samples = found.samples
    seeds = sampling_seeds(3, 1, 4, 2)
    expected = [(number, row) for number in range(8) for row in by_hand(asked()[number // 2], seeds[number])]
    assert len(expected) > 12 and samples["response"].tolist() == [number for number, _ in expected]
    again = 0
    for row, (number, (ids, mask, logprobs, rewards)) in enumerate(expected):
        end = len(ids)
        assert samples["input_ids"][row, :end].tolist() == ids and samples["input_lengths"][row] == end
        width = samples["input_ids"].shape[1] - end
        assert samples["token_mask"][row].tolist() == mask + [0] * width
        np.testing.assert_array_equal(
            samples["generation_logprobs"][row, :end].numpy(), np.array(logprobs, np.float32)
        )
        assert samples["token_rewards"][row].tolist() == rewards + [0.0] * width
        assert found.records[row] is rollouts.records[number]
        again += tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] != ids
    assert again > 4, "hardly a row whose text would be tokenized otherwise"
    counts = samples["token_mask"].sum(dim=1)
    for number in range(8):
        mine = samples["response"] == number
        assert rollouts.samples["generation_lengths"][number] == counts[mine].sum()
        assert rollouts.samples["segments"][number] == mine.sum()
        assert (
            rollouts.samples["reward"][number]
            == sum(rollouts.samples["turn_rewards"][number])
            == samples["token_rewards"][mine].sum()
        )
    assert rollouts.metrics["episodes/done"] == 8


def test_neither_pace_nor_order_changes_the_rows() -> None:
    expected = rows_of_segments(collected(), 0)
    for _ in range(3):
        found = rows_of_segments(collected(stream=lambda: random.random() * 0.01), 0)
        for name, values in expected.samples.items():
            same = (
                torch.equal(values, found.samples[name])
                if isinstance(values, torch.Tensor)
                else list(values) == found.samples[name]
            )
            assert same, name


def test_tokens_of_a_conversation_count_once_whatever_its_segments() -> None:
    free = collected(asked(2)[1:], 1)
    most = int(free.samples["generation_lengths"][0]) + int(free.metrics["observed_tokens"])
    assert free.samples["segments"][0] > 1
    assert collected(asked(2)[1:], 1, tokens=most).metrics["episodes/done"] == 1
    for tokens in [*range(1, most, 7), most - 1]:
        found = collected(asked(2)[1:], 1, tokens=tokens)
        used = int(found.samples["generation_lengths"][0]) + int(found.metrics["observed_tokens"])
        assert used <= tokens and found.samples["truncated"].all()


def test_joined_batches_keep_the_segments_of_their_responses() -> None:
    one, other = collected(asked(3)), collected(asked(4)[2:])
    together = joined([one, other], [1, 3, 4], 2, 0)
    rows_together = rows_of_segments(together, 0).samples
    parts = [rows_of_segments(each, 0).samples for each in (one, other)]
    wanted = [(parts[0], {2, 3}), (parts[1], {0, 1}), (parts[1], {2, 3})]
    lengths = [
        length
        for samples, responses in wanted
        for length, response in _lengths(samples)
        if response in responses
    ]
    assert rows_together["input_lengths"].tolist() == lengths
    assert together.samples["reward"].tolist() == [*one.samples["reward"][2:4], *other.samples["reward"]]


def test_batches_that_wait_keep_the_segments_of_their_responses(tmp_path: Path) -> None:
    class Data:
        def select(self, indices: list[int]) -> list[Example]:
            return [asked()[index] for index in indices]

    rollouts = collected()
    save_batches(tmp_path, {3: Sampling(rollouts, rollouts.samples, {})})
    found = load_batches(tmp_path, Data())[3].rollouts  # type: ignore[arg-type]
    expected, again = (rows_of_segments(each, 0).samples for each in (rollouts, found))
    assert expected.keys() == again.keys() and "response" in again
    assert all(
        torch.equal(values, again[name])
        for name, values in expected.items()
        if isinstance(values, torch.Tensor)
    )
    assert all(values == again[name] for name, values in expected.items() if isinstance(values, list))


def _lengths(samples: Any) -> list[tuple[int, int]]:
    return list(zip(samples["input_lengths"].tolist(), samples["response"].tolist(), strict=True))


# losses
# ------------------------------------------------------------------------------------------------------------


class Bigrams:
    """A model in float64: the log-probability of a token given the one before."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(4)
        self.table = torch.randn(size, size, generator=generator, dtype=torch.float64).requires_grad_()

    def logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, S-1]."""
        return self.table.log_softmax(-1)[ids[:, :-1], ids[:, 1:]]


def slow_loss(
    model: Bigrams, responses: list[list[Row]], advantages: list[float], settings: dict[str, Any]
) -> torch.Tensor:
    """The clipped loss of a global batch, token by token, over responses given as hand-masked sequences."""
    tokens_of_all = sum(sum(mask) for response in responses for _, mask, _, _ in response)
    total = torch.zeros((), dtype=torch.float64)
    for response, advantage in zip(responses, advantages, strict=True):
        of_response, count = (
            torch.zeros((), dtype=torch.float64),
            sum(sum(mask) for _, mask, _, _ in response),
        )
        for ids, mask, logprobs, _ in response:
            for place in range(1, len(ids)):
                if mask[place]:
                    current = model.table[ids[place - 1]].log_softmax(-1)[ids[place]]
                    previous = current.detach() - 0.1 * math.sin(place)
                    ratio = torch.exp(current - previous)
                    weight = math.exp(float(previous) - float(np.float32(logprobs[place])))
                    bounded = ratio.clamp(0.9, 1.1)
                    of_response = of_response + weight * torch.maximum(
                        -advantage * ratio, -advantage * bounded
                    )
        # masked_mean adds 1e-8 to what it divides by
        divisor = settings.get("sequence_normalizer") or count
        total = total + (of_response if settings["token_level_loss"] else of_response / (divisor + 1e-8))
    return total / ((tokens_of_all if settings["token_level_loss"] else len(responses)) + 1e-8)


class Alone:
    """The groups of a data-parallel rank among others, whose counts are added up by the test."""

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.mark.parametrize(
    "settings",
    [
        {"token_level_loss": True},
        {"token_level_loss": False},
        {"token_level_loss": False, "sequence_normalizer": 32.0},
    ],
    ids=["tokens", "sequences", "Dr.GRPO"],
)
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_losses_are_those_of_hand_masked_sequences(settings: dict[str, Any], pieces: int) -> None:
    """Whatever a response is cut into, and whichever micro-batches its segments are in."""
    tokenizer = tokenizer_of("qwen3")
    samples = rows_of_segments(collected(), tokenizer.pad_token_id).samples
    seeds = sampling_seeds(3, 1, 4, 2)
    responses = [by_hand(asked()[number // 2], seeds[number]) for number in range(8)]
    advantages = [0.5, -0.25, 1.5, -1.0, 0.75, 0.1, -2.0, 0.3]
    model = Bigrams(len(tokenizer))
    keys = ("input_ids", "input_lengths", "token_mask", "sample_mask", "response")
    columns: dict[str, Any] = {key: samples[key] for key in keys}
    columns["generation_logprobs"] = samples["generation_logprobs"].double()
    places = torch.arange(samples["input_ids"].shape[1], dtype=torch.float64)
    fresh = torch.nn.functional.pad(model.logprobs(samples["input_ids"]).detach(), (1, 0))
    columns["prev_logprobs"] = fresh - 0.1 * places.sin()
    columns["advantages"] = torch.tensor(advantages, dtype=torch.float64)[samples["response"]][
        :, None
    ].expand_as(fresh)
    batch, size, _ = global_batches(BatchedDataDict(columns), 4, 3)
    assert batch.size == 2 * size and size % 3 == 0
    section = {
        "reference_policy_kl_penalty": 0.0,
        "ratio_clip_min": 0.1,
        "ratio_clip_max": 0.1,
        "use_importance_sampling_correction": True,
    }
    given = {**section, "ratio_clip_c": None, "use_on_policy_kl_approximation": False, **settings}
    loss_fn = ClippedPGLossFn({**defaults_of(ClippedPGLossConfig), **given})  # type: ignore[arg-type]
    for number in range(2):
        rows_here = range(number * size, (number + 1) * size)
        whole = batch.select_indices(list(rows_here))
        normalizers = global_normalizers(whole, Alone())  # type: ignore[arg-type]
        assert normalizers.valid_sequences == 4 and normalizers.valid_tokens == int(
            under_mask(whole)[:, 1:].sum()
        )
        found = torch.zeros((), dtype=torch.float64)
        valid = 0.0
        for piece in range(pieces):
            part = whole.select_indices(list(range(piece, size, pieces)))
            counts = normalizers.valid_sequences.double(), normalizers.valid_tokens.double()
            loss, metrics = loss_fn(part, *counts, next_token_logprobs=model.logprobs(part["input_ids"]))
            found, valid = found + loss, valid + float(metrics["num_valid_samples"])
        mine = slice(number * 4, number * 4 + 4)
        expected = slow_loss(model, responses[mine], advantages[mine], settings)
        assert valid == pytest.approx(4, abs=1e-12)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        gradients = torch.autograd.grad(found, model.table), torch.autograd.grad(expected, model.table)
        torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=0, atol=1e-12)


def test_global_batches_have_whole_responses_and_one_size() -> None:
    rows = torch.tensor([0, 0, 0, 1, 2, 3, 3])
    batch = BatchedDataDict(
        {
            "input_ids": torch.arange(28).view(7, 4),
            "input_lengths": torch.tensor([4, 3, 4, 4, 4, 2, 4]),
            "token_mask": torch.tensor([[0, 1, 1, 0]] * 7).float(),
            "sample_mask": torch.tensor([1.0, 1, 1, 1, 0, 1, 1]),
            "response": rows,
        }
    )
    found, size, origin = global_batches(batch, 2, 3)
    assert size == 6 and origin == [0, 1, 2, 3, 1, 1, 4, 5, 6, 5, 5, 5]
    assert found["sample_mask"].tolist() == [1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0]
    assert found["response_tokens"][:4].tolist() == [6, 6, 6, 2] and found["response_tokens"][
        6:9
    ].tolist() == [0, 4, 4]
    assert int(under_mask(found).sum()) == 12 and "response" not in found


# what is estimated of responses
# ----------------------------------------------------------------------------------------------------


def test_generalized_advantages_go_over_the_segments_of_a_response() -> None:
    """As if it were one row: what comes later in a response counts for earlier segments too."""
    generator = torch.Generator().manual_seed(7)
    lengths, response = [5, 3, 6, 4], torch.tensor([0, 0, 0, 1])
    width = 6
    mask = torch.zeros(4, width)
    for row, length in enumerate(lengths):
        mask[row, 2:length] = 1
    values = torch.randn(4, width, generator=generator, dtype=torch.float64)
    batch = {
        "input_ids": torch.zeros(4, width, dtype=torch.int64),
        "input_lengths": torch.tensor(lengths),
        "token_mask": mask,
        "sample_mask": torch.ones(4),
        "values": values,
        "response": response,
    }
    segments = SegmentRows.of(batch)
    assert segments is not None
    scored = segments.by_response(batch)
    assert scored["input_lengths"].tolist() == [2 * width + 6, 4] and scored["token_mask"].shape == (
        2,
        3 * width,
    )
    counts = scored["token_mask"] != 0
    rewards = rewards_of_tokens(torch.tensor([1.0, -1.0], dtype=torch.float64), counts)
    found, _ = generalized_advantages(
        rewards, values_before(scored["values"]), counts, discount=0.9, gae_lambda=0.8
    )
    by_row = segments.by_row(found)
    assert by_row.shape == (4, width) and not by_row[mask == 0].any()
    before = [float(values[row, place - 1]) for row in range(3) for place in range(2, lengths[row])]
    advantage, expected = 0.0, list[float]()
    for number in reversed(range(len(before))):
        last = number == len(before) - 1
        change = (1.0 if last else 0.9 * before[number + 1]) - before[number]
        advantage = change + 0.9 * 0.8 * advantage
        expected.insert(0, advantage)
    np.testing.assert_allclose(by_row[:3][mask[:3] != 0].numpy(), expected, rtol=1e-12)


def test_a_segment_that_is_left_out_takes_its_response_with_it() -> None:
    segments = SegmentRows(torch.tensor([0, 0, 1, 2, 2]))
    found = segments.without_some_rows(torch.tensor([1.0, 1, 1, 0, 1]), torch.tensor([1.0, 0, 1, 0, 1]))
    assert found.tolist() == [0, 0, 1, 0, 1]


# whole runs
# ------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<eos>{% else %}{% set said = "
    "m.content.split('</think>')[-1] %}"
    "{{ said[1:] if 1 < said | length < 6 else said }}p{% endif %}{% endfor %}"
)
"""Leaves the first letter of earlier responses out."""

OWN = Path(__file__).parent / "test_segments.py"


class Nagging(MessageEnv):
    """Asks again and again; the more digits are said, the better."""

    turns = 0

    def step(self, message: Any) -> Step:
        self.turns += 1
        digits = sum(letter.isdigit() for letter in message["content"])
        return Step("no", reward=digits / 4 + self.turns / 16, done=self.turns == 2 + self.record.index % 2)


def nagging(algorithm: str, run_dir: Path, model: str, data: str, **section: Any) -> dict[str, Any]:
    config = make_config(algorithm, run_dir, model, data, max_rollout_turns=3, val_at_start=False, **section)
    config["policy"] |= {
        "max_total_sequence_length": 40,
        "tokenizer": {"name": model, "chat_template": TEMPLATE},
    }
    config["policy"]["generation"] |= {"max_new_tokens": 5, "stop_token_ids": [*range(1, 32, 3)]}
    config["env"] = {"environment": f"{OWN}:Nagging"}
    config["logger"] = {"samples": {"period": 1}}
    if algorithm == "ppo":
        config["critic"] = {"train_global_batch_size": 4}
    if algorithm == "distillation":
        config["teacher"] = {}
        config["distillation"]["topk_logits_k"] = 8
        config["distillation"].pop("val_at_start")
        del config["loss_fn"]
    return config


class Watched(PolicyMaker):
    """Reference policies that keep the batches they were trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[tuple[BatchedDataDict[Any], int | None]] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        policy = super().__call__(*arguments, **options)
        train = policy.train

        def watched(data: Any, *more: Any, gbs: int | None = None, **further: Any) -> Any:
            if not further.get("eval_mode"):
                self.trained.append((data, gbs))
            return train(data, *more, gbs=gbs, **further)

        policy.train = watched  # type: ignore[method-assign]
        return policy


@pytest.mark.parametrize("algorithm", ["grpo", "grpo-sequences", "grpo-dynamic", "ppo", "distillation"])
def test_runs_train_on_segments(
    algorithm: str, tmp_path: Path, model: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, kind = algorithm.partition("-")
    section = {"use_dynamic_sampling": True, "batch_multiplier": 1.5} if kind == "dynamic" else {}

    def config(run_dir: Path) -> dict[str, Any]:
        made = nagging(name, run_dir, model, data, **section)
        if kind == "sequences":
            made["loss_fn"] |= {"token_level_loss": False, "use_importance_sampling_correction": True}
        return made

    makers, given = Watched(), list[BatchedDataDict[Any]]()
    monkeypatch.setattr(
        segment_rows,
        "global_batches",
        lambda batch, *sizes: (given.append(batch), global_batches(batch, *sizes))[1],
    )
    assert run(config(tmp_path / "a"), makers) == 0
    logged = rows(tmp_path / "a")
    assert all(row["train/segments"] > 1 and row["train/turns"] >= row["train/segments"] for row in logged)
    sizes = {gbs for _, gbs in makers.trained}
    assert None not in sizes and all(size % 2 == 0 for size in sizes if size is not None)
    for batch, _ in makers.trained:
        assert (
            "response" not in batch
            and (batch["response_tokens"] >= under_mask(batch)[:, 1:].sum(dim=1)).all()
        )
    assert {row["train/global_valid_seqs"] for row in logged} == {6.0}, "normalisers do not count responses"
    for batch in given if name == "grpo" else ():
        of_response: dict[int, set[float]] = {}
        for response, advantages in zip(
            batch["response"].tolist(), batch["advantages"].tolist(), strict=True
        ):
            of_response.setdefault(response, set()).update(advantages)
        assert len(of_response) == 12 and all(len(found) == 1 for found in of_response.values())
    samples = read_samples(tmp_path / "a" / "samples" / "train_step_1.jsonl")
    segmented = next(row for row in samples if any("segment" in turn for turn in row["turns"]))
    assert [turn["role"] for turn in segmented["turns"]] == [
        "assistant",
        *["environment", "assistant"] * (len(segmented["turns"]) // 2),
    ]
    assert sum(turn.get("reward", 0) for turn in segmented["turns"]) == pytest.approx(segmented["reward"])
    stopped = config(tmp_path / "b")
    stopped[name] |= {"max_num_steps": 2}
    assert run(stopped, PolicyMaker()) == 0 and run(config(tmp_path / "b"), PolicyMaker()) == 0
    check_same(tmp_path / "a", tmp_path / "b")
    assert comparable(tmp_path / "a")[-1]["step"] == 4


@pytest.mark.parametrize("by_turn", [False, True])
def test_rewards_stand_at_the_turns_that_they_are_of(
    by_turn: bool, tmp_path: Path, model: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a discount, and without the critic's word, a token's return is all that is rewarded from it
    on."""
    sampled, makers = list[Any](), Watched()
    monkeypatch.setattr(
        segment_rows,
        "rows_of_segments",
        lambda *given: (sampled.append(rows_of_segments(*given)), sampled[-1])[1],
    )
    own = {
        "gae_gamma": 1.0,
        "gae_lambda": 1.0,
        "rewards_by_turn": by_turn,
        "max_num_steps": 1,
        "val_period": 0,
    }
    assert run(nagging("ppo", tmp_path, model, data, **own), makers) == 0
    [rollouts] = sampled
    columns = {tuple(ids[:length].tolist()): row for row, (ids, length) in _sequences(rollouts.samples)}
    [(of_critic, _)] = [each for each in makers.trained if "returns" in each[0]]
    tried = set()
    for place, (ids, length) in _sequences(of_critic):
        if not of_critic["sample_mask"][place]:
            continue
        row = columns[tuple(ids[:length].tolist())]
        samples = rollouts.samples
        response = samples["response"] == samples["response"][row]
        later = response & (torch.arange(len(response)) > row)
        for token in (of_critic["token_mask"][place] != 0).nonzero().squeeze(1).tolist():
            to_come = float(
                samples["token_rewards"][row, token:].sum() + samples["token_rewards"][later].sum()
            )
            expected = to_come if by_turn else float(samples["reward"][row])
            assert float(of_critic["returns"][place, token]) == pytest.approx(expected, abs=1e-5)
            tried.add(round(expected, 4))
    assert len(tried) > 5 and int(samples["segments"].max()) > 1


def _sequences(batch: Any) -> Iterator[tuple[int, tuple[torch.Tensor, int]]]:
    return enumerate(zip(batch["input_ids"], batch["input_lengths"].tolist(), strict=True))
