"""PPO: whole runs of actor and critic around the plain reference policy, and what of a step can be worked out
by a loop."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from megarl.algorithms.advantages import explained_variance, rewards_of_tokens
from megarl.algorithms.algorithm import ACTOR, CRITIC, Role
from megarl.algorithms.ppo import PPO
from megarl.algorithms.train_results import metrics_of_epochs, step_metrics
from megarl.config.rules import check
from megarl.config.validate import validate_config
from megarl.errors import BatchError, ConfigError, NonFiniteError, StateError
from megarl.observe.metrics import Reduction
from megarl.run.resume import ResumePoint
from megarl.run.run import run
from tests.tiers import sampled
from tests.unit.config_samples import FACTS, complete, raw_ppo
from tests.unit.driver_runs import (
    STEPS,
    Crash,
    PolicyMaker,
    comparable,
    cut_off,
    final_weights,
    make_config,
    rows,
)
from tests.unit.reference_policy import ReferencePolicy

REWARD = f"{Path(__file__).parents[1] / 'toys' / 'digits.py'}:reward"


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 4), length=st.integers(1, 7), penalized=st.booleans())
@settings(max_examples=60)
def test_the_reward_is_that_of_the_last_token(seed: int, rows: int, length: int, penalized: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, length, generator=generator) < 0.5).float()
    rewards, penalties = (
        torch.randn(rows, generator=generator),
        torch.randn(rows, length, generator=generator),
    )
    penalties[mask == 0] = math.nan
    found = rewards_of_tokens(rewards, mask, penalties if penalized else None)
    assert found.dtype == torch.float64
    for row in range(rows):
        places = [place for place in range(length) if mask[row, place]]
        for place in range(length):
            wanted = float(rewards[row]) if places and place == places[-1] else 0.0
            wanted -= float(penalties[row, place]) if penalized and place in places else 0.0
            assert float(found[row, place]) == pytest.approx(wanted, abs=1e-12)


def test_explained_variance() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1.0), "of the spread alone"
    assert explained_variance(torch.zeros(2, 3), returns, mask) == pytest.approx(0.0)
    # residuals 1, -1, 2 around 2/3 against 1, 2, 4 around 7/3
    values = returns - torch.tensor([[1.0, -1.0, 0.0], [2.0, 0.0, 0.0]])
    assert explained_variance(values, returns, mask) == pytest.approx(1 - (14 / 9) / (14 / 9))
    assert explained_variance(values, torch.full((2, 3), 0.1), mask) == 0.0, "nothing to explain"
    assert explained_variance(values, returns, torch.zeros(2, 3)) == 0.0


class Models(PolicyMaker):
    """Reference policies of both roles that note what they are given, and of which one at a time may be on
    the devices."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.by_role: dict[Role, ReferencePolicy] = {}
        self.there: set[Role] = set()
        self.trained: list[tuple[Role, Any, Any]] = []
        self.values: list[Tensor] = []
        self.change_values = lambda values: values

    def __call__(
        self,
        config: Any,
        tokenizer: Any,
        start: ResumePoint,
        stack: ExitStack,
        role: Role = ACTOR,
        beside: Any = None,
    ) -> Any:
        assert (beside is None) == (role == ACTOR)
        policy = self.by_role[role] = super().__call__(config, tokenizer, start, stack, role, beside)
        assert not self.there, "the others have left before one more is built"
        self.there.add(role)
        for name in (
            "prepare_for_training",
            "prepare_for_lp_inference",
            "prepare_for_generation",
            "offload_after_refit",
        ):
            self._watch(role, policy, name)
        train, get_values = policy.train, policy.get_values

        def noting_train(data: Any, loss_fn: Any, **options: Any) -> Any:
            self.trained.append((role, {key: value.clone() for key, value in data.items()}, loss_fn))
            return train(data, loss_fn, **options)

        def noting_values(data: Any) -> Any:
            found = get_values(data)
            found["values"] = self.change_values(found["values"])
            self.values.append(found["values"].clone())
            return found

        policy.train, policy.get_values = noting_train, noting_values  # type: ignore[method-assign]
        return policy

    def _watch(self, role: Role, policy: ReferencePolicy, name: str) -> None:
        move = getattr(policy, name)

        def moved() -> Any:
            self.there = self.there - {role} if name.startswith("offload") else self.there | {role}
            assert len(self.there) <= 1, (
                f"{name}: {sorted(each.name for each in self.there)} are on the devices at once"
            )
            return move()

        setattr(policy, name, moved)


def ppo(run_dir: Path, model: str, data: str, **section: Any) -> dict[str, Any]:
    """A run of PPO without a reference policy; answers have up to three tokens, and a reward for every right
    digit."""
    config = make_config("ppo", run_dir, model, data, **section)
    config["env"] = {"reward": REWARD}
    config["loss_fn"]["reference_policy_kl_penalty"] = 0.0
    config["critic"] = {"megatron_cfg": {"optimizer": {"lr": 1e-2}}}
    return config


def critic_weights(run_dir: Path, step: int = STEPS) -> dict[str, Tensor]:
    return load_file(run_dir / "checkpoints" / f"step_{step}" / "critic" / "weights" / "model.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@sampled(1)
@pytest.mark.parametrize(("bootstrap", "normalize"), [(False, True), (True, False)])
def test_a_step_is_that_of_the_slow_form(
    bootstrap: bool, normalize: bool, tmp_path: Path, model: str, data: str
) -> None:
    """Of answers that ended and of such that were cut off, with a divergence in the reward: worked out again,
    token by token."""
    own = {
        "gae_gamma": 0.9,
        "gae_lambda": 0.8,
        "normalize_advantages": normalize,
        "bootstrap_truncated": bootstrap,
        "val_at_start": False,
    }
    config = ppo(tmp_path, model, data, max_num_steps=1, val_period=0, **own)
    config["data"]["max_input_seq_length"], config["policy"]["generation"]["max_new_tokens"] = 8, 12
    config["loss_fn"] |= {
        "reference_policy_kl_penalty": 0.3,
        "use_kl_in_reward": True,
        "reference_policy_kl_type": "k1",
    }
    models = Models()
    assert run(config, models) == 0
    [(first, of_critic, value_loss), (second, of_actor, _)] = models.trained
    assert (first, second) == (CRITIC, ACTOR) and value_loss.value_clip == 0.2
    assert not {"values", "returns", "prev_values"} & of_actor.keys(), (
        "the actor is not sent what it does not read"
    )
    tokenizer, [row] = models.by_role[ACTOR].tokenizer, rows(tmp_path)
    from tests.toys.digits import reward  # as the run finds it, by its path

    lengths, mask = of_actor["input_lengths"].tolist(), of_actor["token_mask"]
    answers = ["0", "2", "4", "6", "8", "10", "12"]
    texts = [
        tokenizer.decode(of_actor["input_ids"][index, mask[index] > 0], skip_special_tokens=True)
        for index in range(12)
    ]
    prompts = [
        tokenizer.decode(of_actor["input_ids"][index, :length][mask[index, :length] == 0])
        for index, length in enumerate(lengths)
    ]
    rewards = [
        reward(text, answers[int(prompt.split("+")[0].strip()[-1])])
        for text, prompt in zip(texts, prompts, strict=True)
    ]
    assert row["train/reward"] == pytest.approx(sum(rewards) / 12)
    ended = [
        int(of_actor["input_ids"][index, length - 1]) == tokenizer.eos_token_id
        for index, length in enumerate(lengths)
    ]
    assert len(set(ended)) == 2 and len(set(lengths)) > 1, "answers of both kinds, of several lengths"
    [values] = models.values
    advantages, returns = (
        torch.zeros(mask.shape, dtype=torch.float64),
        torch.zeros(mask.shape, dtype=torch.float64),
    )
    for index, length in enumerate(lengths):
        tokens = [place for place in range(length) if mask[index, place]]
        after = float(values[index, length - 1]) if bootstrap and not ended[index] else 0.0
        advantage = 0.0
        for place in reversed(tokens):
            # before the first step the policy is its own reference
            gain = rewards[index] if place == tokens[-1] else 0.0
            before = float(values[index, place - 1])
            advantage = gain + 0.9 * after - before + 0.9 * 0.8 * advantage
            advantages[index, place], returns[index, place] = advantage, advantage + before
            after = before
            assert float(of_critic["prev_values"][index, place]) == pytest.approx(before)
    counted = advantages[mask > 0]
    if normalize:
        advantages = torch.where(mask > 0, (advantages - counted.mean()) / counted.std(correction=0), 0.0)
    torch.testing.assert_close(of_critic["returns"].double(), returns, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(of_actor["advantages"].double(), advantages, atol=2e-6, rtol=1e-6)
    residual = (returns - torch.nn.functional.pad(values[:, :-1], (1, 0)))[mask > 0]
    explained = 1 - residual.var(correction=0) / returns[mask > 0].var(correction=0)
    assert row["train/explained_variance"] == pytest.approx(float(explained), abs=1e-6)
    # a mean over global batches of the means over their tokens
    means = [float(returns[half][mask[half] > 0].mean()) for half in (slice(0, 6), slice(6, 12))]
    assert row["train/critic_returns_mean"] == pytest.approx(sum(means) / 2, abs=1e-6)
    assert row["train/kl_in_reward"] == pytest.approx(0.0, abs=1e-6)


def test_both_models_are_trained_resumed_and_take_turns(tmp_path: Path, model: str, data: str) -> None:
    whole, again = Models(), Models()
    assert run(ppo(tmp_path / "whole", model, data), whole) == 0
    assert [role.name for role, _, _ in whole.trained] == ["critic", "actor"] * STEPS
    assert all(len(batch["input_ids"]) == 12 for _, batch, _ in whole.trained)
    crashed = Models(crash_after=2)
    with pytest.raises(Crash):
        run(ppo(tmp_path / "parts", model, data), crashed)
    assert run(ppo(tmp_path / "parts", model, data), again) == 0
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
    assert same(final_weights(tmp_path / "parts"), final_weights(tmp_path / "whole"))
    critic = critic_weights(tmp_path / "whole")
    assert "score.weight" in critic and not same(critic, critic_weights(tmp_path / "whole", 2))
    assert same(critic_weights(tmp_path / "parts"), critic)
    logged = rows(tmp_path / "whole")[-1]
    expected = {
        f"train/critic_{name}"
        for name in ("loss", "grad_norm", "lr", "clipped_share", "values_mean", "returns_mean")
    }
    expected |= {
        "train/loss",
        "train/explained_variance",
        "train/probs_ratio_clamped",
        "timing/values_s",
        "timing/train_critic_s",
    }
    expected |= {"performance/memory_gib", "performance/critic_memory_gib", "validation/accuracy"}
    assert expected <= logged.keys()
    # each has a schedule of its own, which has warmed up by now
    assert logged["train/lr"] == pytest.approx(3e-3) and logged["train/critic_lr"] == pytest.approx(1e-2)


def test_the_critic_is_trained_alone_at_first(tmp_path: Path, model: str, data: str) -> None:
    models = Models()
    config = ppo(tmp_path, model, data, critic_warmup_steps=2, val_at_start=False, val_period=0)
    assert run(config, models) == 0
    assert [role.name for role, _, _ in models.trained] == ["critic"] * 2 + ["critic", "actor"] * 2
    start, actor = (
        load_file(path / "model.safetensors")
        for path in (Path(model), tmp_path / "checkpoints/step_2/policy/weights")
    )
    assert all(torch.equal(actor[name], start[name].float()) for name in actor)
    assert models.by_role[ACTOR].train_calls == 2 and models.by_role[CRITIC].train_calls == STEPS
    assert ["train/loss" in row for row in rows(tmp_path)] == [False, False, True, True]


def test_checkpoints_may_be_ranked_by_what_the_actor_says_once_it_is_trained(
    tmp_path: Path, model: str, data: str
) -> None:
    config = ppo(tmp_path, model, data, critic_warmup_steps=2, val_at_start=False, val_period=0)
    config["checkpointing"] |= {"metric_name": "train/loss", "export_hf": False}
    assert run(config, Models()) == 0


def test_both_are_trained_on_a_step_as_often_as_they_are_told(tmp_path: Path, model: str, data: str) -> None:
    models = Models()
    config = ppo(
        tmp_path,
        model,
        data,
        ppo_epochs=2,
        critic_ppo_epochs=3,
        max_num_steps=1,
        val_period=0,
        val_at_start=False,
    )
    assert run(config, models) == 0
    assert [role.name for role, _, _ in models.trained] == ["critic"] * 3 + ["actor"] * 2
    batches = [batch for _, batch, _ in models.trained]
    assert all(torch.equal(batch[name], batches[-1][name]) for batch in batches[3:] for name in batches[-1])
    [row] = rows(tmp_path)
    # the second time it is another policy than the one that sampled
    assert row["train/probs_ratio_max"] > 1 > row["train/probs_ratio_min"]
    follows = validate_config(ppo(tmp_path, model, data, ppo_epochs=4))
    assert follows["ppo"]["critic_ppo_epochs"] == 4


def test_metrics_of_epochs() -> None:
    loss_fn: Any = SimpleNamespace(
        metric_reductions={"low": Reduction.MIN, "high": Reduction.MAX, "sum": Reduction.SUM}
    )
    one, other = (
        {"loss": [loss], "all_mb_metrics": {"low": [loss], "high": [loss], "sum": [loss, 1.0]}}
        for loss in (1.0, 4.0)
    )
    found = metrics_of_epochs([one, {**other, "grad_norm": torch.tensor(3.0)}], loss_fn)
    assert found == {"low": 1.0, "high": 4.0, "sum": 3.5, "loss": 2.5, "grad_norm": 3.0}
    assert metrics_of_epochs([one], loss_fn) == step_metrics(one, loss_fn)


def test_groups_of_one_are_enough(tmp_path: Path, model: str, data: str) -> None:
    config = ppo(
        tmp_path,
        model,
        data,
        num_prompts_per_step=6,
        num_generations_per_prompt=1,
        max_num_steps=2,
        val_period=0,
    )
    del config["ppo"]["num_generations_per_prompt"]
    assert run(config, Models()) == 0
    assert all(row["train/reward_std"] >= 0 for row in rows(tmp_path) if "train/reward_std" in row)


def test_values_that_are_not_finite_end_the_run_before_anything_is_trained(
    tmp_path: Path, model: str, data: str
) -> None:
    models = Models()
    models.change_values = lambda values: values.index_fill(0, torch.tensor([1]), math.nan)
    with pytest.raises(NonFiniteError, match=r"the critic's values of \d+ of \d+ states are not finite"):
        run(ppo(tmp_path, model, data), models)
    assert models.trained == []


def advantages_of_a_critic(values: Tensor, truncated: list[bool]) -> Tensor:
    """Advantages of three responses of two tokens behind a prompt of one, the last of which is not trained
    on."""
    algorithm: Any = object.__new__(PPO)
    algorithm.config = {
        "gae_gamma": 1.0,
        "gae_lambda": 1.0,
        "normalize_advantages": False,
        "bootstrap_truncated": True,
    }
    algorithm.config["rewards_by_turn"] = False
    algorithm.loss_config = {"use_kl_in_reward": False}
    mask = torch.tensor([[0.0, 1.0, 1.0]] * 3)
    batch = {"token_mask": mask, "sample_mask": torch.tensor([1.0, 1.0, 0.0]), "values": values}
    samples = {
        "reward": torch.ones(3),
        "truncated": torch.tensor(truncated),
        "input_lengths": torch.full((3,), 3),
    }
    found: Tensor = algorithm.advantages(samples, batch)[0]
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_value_behind_a_response_is_read_where_it_was_truncated_alone(value: float) -> None:
    values = torch.zeros(3, 3)
    values[1, 2] = 0.5
    clean = advantages_of_a_critic(values, [False, True, False])
    assert clean.tolist() == [[0, 1, 1], [0, 1.5, 1.5], [0, 0, 0]]
    # behind a response that ended, and behind one that was truncated but is not trained on
    values[0, 2] = values[2, 2] = value
    assert torch.equal(advantages_of_a_critic(values, [False, True, True]), clean)
    values[1, 2] = value
    # four states before tokens, and one behind
    with pytest.raises(NonFiniteError, match=r"the critic's values of 1 of 5 states are not finite"):
        advantages_of_a_critic(values, [False, True, True])


def test_a_critic_of_another_backbone_is_refused_by_name(tmp_path: Path, model: str, data: str) -> None:
    config = ppo(tmp_path / "run", model, data)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    content = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**content, "num_hidden_layers": 3}))
    config["critic"]["model_name"] = str(other)
    with pytest.raises(
        ConfigError,
        match=r"critic\.model_name = .*other.*its backbone differs from the policy's: num_layers 3; the "
        r"policy has num_layers 2",
    ):
        validate_config(config)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, set()),
        ({"ppo.critic_warmup_steps": 9}, {"ppo.critic_warmup_steps"}),
        ({"ppo.gae_lambda": 1.1, "ppo.value_clip": 0.0}, {"ppo.gae_lambda", "ppo.value_clip"}),
        ({"critic.generation": {"max_new_tokens": 3}}, {"critic.generation"}),
        ({"critic.train_global_batch_size": 7}, {"critic.train_global_batch_size"}),
        ({"critic.train_global_batch_size": 60}, set()),
        ({"policy.train_global_batch_size": 7}, {"policy.train_global_batch_size"}),
        (
            {
                "critic.megatron_cfg": {"sequence_parallel": True, "tensor_model_parallel_size": 1},
                "critic.train_micro_batch_size": 5,
            },
            {"critic.megatron_cfg.sequence_parallel"},
        ),
        ({"ppo.max_rollout_turns": 2}, {"ppo.max_rollout_turns"}),
        ({"grpo": {"num_prompts_per_step": 1}}, {"grpo"}),
    ],
)
def test_what_a_configuration_of_ppo_may_say(changes: dict[str, Any], refused: set[str]) -> None:
    assert {violation.key for violation in check(complete(raw_ppo(), changes), FACTS)} == refused


def test_another_algorithm_has_no_critic(tmp_path: Path, model: str, data: str) -> None:
    config = make_config("grpo", tmp_path, model, data) | {"critic": {}}
    with pytest.raises(ConfigError, match="algorithm 'grpo' does not read this section"):
        validate_config(config)


def test_a_model_is_not_used_out_of_its_turn(tmp_path: Path, model: str, data: str) -> None:
    """The reference policy of these tests is as strict as the workers."""
    config = validate_config(ppo(tmp_path, model, data))
    with ExitStack() as stack:
        critic = PolicyMaker()(config, None, ResumePoint(), stack, CRITIC)
        critic.offload_after_refit()
        with pytest.raises(StateError):
            critic.get_values(None)  # type: ignore[arg-type]


class CutOff(Models):
    """Whose actor's answers are cut off as ``cut_off`` says."""

    def __init__(self, cut: dict[int, slice]) -> None:
        super().__init__()
        self.cut = cut

    def __call__(
        self,
        config: Any,
        tokenizer: Any,
        start: ResumePoint,
        stack: ExitStack,
        role: Role = ACTOR,
        beside: Any = None,
    ) -> Any:
        policy = super().__call__(config, tokenizer, start, stack, role, beside)
        return cut_off(policy, self.cut) if role == ACTOR else policy


def test_answers_that_were_all_cut_off_change_neither_model(tmp_path: Path, model: str, data: str) -> None:
    """Nor does the half of a step that is one global batch of both."""
    models = CutOff({1: slice(None), 2: slice(6), 3: slice(None), 4: slice(None)})
    config = ppo(
        tmp_path, model, data, overlong_filtering=True, max_num_steps=9, val_period=0, val_at_start=False
    )
    config["checkpointing"] |= {"export_hf": False, "save_period": 1}
    config["policy"]["max_consecutive_skips"] = 2
    with pytest.raises(
        BatchError,
        match=r"step 4: none of its 12 responses counts: 12 were truncated.*2 steps.*ppo\.overlong_filtering",
    ):
        run(config, models)
    assert [(role, len(batch["input_ids"])) for role, batch, _ in models.trained] == [(CRITIC, 6), (ACTOR, 6)]
    assert models.by_role[ACTOR].trained_steps == models.by_role[CRITIC].trained_steps == 1
    first, second, third = rows(tmp_path)
    for row in (first, third):
        assert (
            row["train/truncated"] == 1.0
            and row["train/empty_global_batches"] == row["train/critic_empty_global_batches"] == 2
        )
        assert not {"train/loss", "train/critic_loss"} & row.keys()
    assert {"train/loss", "train/critic_loss"} <= second.keys() and second["train/critic_skipped_steps"] == 1
    for role in ("critic", "policy"):
        one, two, three = (
            load_file(tmp_path / "checkpoints" / f"step_{step}" / role / "weights" / "model.safetensors")
            for step in (1, 2, 3)
        )
        assert not same(one, two) and same(two, three)
