"""Environments that are written for NeMo-RL, in conversations and in a whole run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.environments import EnvConfig, is_nemo_rl
from megarl.data.datasets import Example
from megarl.errors import BatchError
from megarl.key import defaults_of
from megarl.rollout.collector import Rollouts
from megarl.rollout.environments import NamedEnvironments, make_environment
from megarl.rollout.message_env import EnvironmentLostError
from megarl.rollout.nemo_rl import EnvironmentReturn, NemoRLEnvironment
from megarl.run.run import run
from tests.templates import tokenizer_of
from tests.toys.higher_lower import HigherLower
from tests.unit.driver_runs import PolicyMaker, check_same, make_config, rows
from tests.unit.scripted import collector_of

TOY = Path(__file__).parents[1] / "toys" / "higher_lower.py"


def section_of(**given: Any) -> Any:
    return {**defaults_of(EnvConfig), "environment": f"{TOY}:HigherLower", "options": {"most": 4}, **given}


def guesses(prompt: list[int], seed: int) -> list[int]:
    """Halves what is left of 0 to 9, from what was said."""
    tokenizer = tokenizer_of("qwen2.5")
    text = tokenizer.decode(prompt)
    low, high, guess = 0, 9, 4
    for said in text.split("<|im_start|>assistant\n")[1:-1]:
        guess = int(said[0])
        low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
    found = tokenizer(str((low + high) // 2), add_special_tokens=False)["input_ids"]
    return [*found, tokenizer.eos_token_id]


def records(answers: list[int], **fields: Any) -> list[Example]:
    tokenizer = tokenizer_of("qwen2.5")
    ids = tokenizer("<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)[
        "input_ids"
    ]
    return [
        Example(place, tuple(ids), (), str(answer), fields=dict(fields))
        for place, answer in enumerate(answers)
    ]


def collected(environment: Any, answers: list[int], **limits: Any) -> Rollouts:
    collector, *_ = collector_of(environment, guesses, **{"turns": 9, **limits})
    return collector.collect(records(answers), 1, list(range(len(answers))))


def test_a_batch_is_stepped_together_until_all_have_ended() -> None:
    environment = make_environment(section_of())
    assert isinstance(environment, NemoRLEnvironment) and is_nemo_rl(HigherLower)
    rollouts = collected(environment, [4, 7, 9, 0])
    assert rollouts.samples["turns"].tolist() == [1, 2, 4, 3]
    torch.testing.assert_close(rollouts.samples["reward"], torch.tensor([1.0, 0.9, 0.7, 0.8]))
    toy: Any = environment._environment
    assert toy.batches == [4, 3, 2, 1]
    text = tokenizer_of("qwen2.5").decode(rollouts.samples["input_ids"][1].tolist())
    assert "4<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n7" in text
    assert rollouts.metrics["episodes/done"] == 4 and not rollouts.samples["masked"].any()


def test_an_environment_ends_at_its_own_bound() -> None:
    rollouts = collected(make_environment(section_of(options={"most": 2})), [9, 4])
    assert rollouts.samples["turns"].tolist() == [2, 1] and rollouts.samples["reward"].tolist() == [0, 1]


def test_its_stop_strings_end_the_next_response() -> None:
    collector, engine, _ = collector_of(make_environment(section_of()), guesses, turns=9)
    asked: list[Any] = []
    generate = engine.generate

    def watched(data: Any, greedy: bool = False) -> Any:
        asked.append(data.get("stop_strings"))
        return generate(data, greedy)

    engine.generate = watched  # type: ignore[method-assign]
    collector.collect(records([9, 4]), 1, [1, 2])
    assert asked == [None, [["\n"]], None, None]


def test_several_rewards_are_parts_of_one() -> None:
    class Two(HigherLower):
        def step(self, message_log_batch: Any, metadata: Any) -> Any:
            found = super().step(message_log_batch, metadata)
            return found._replace(rewards=torch.stack([found.rewards, found.rewards * 0 + 0.5], dim=1))

    samples = collected(NemoRLEnvironment(Two, section_of()), [4, 7]).samples
    torch.testing.assert_close(samples["reward"], torch.tensor([1.5, 1.9]))
    torch.testing.assert_close(samples["reward/reward1"], torch.tensor([1.0, 0.9]))


def test_what_cannot_be_indexed_is_read_in_order() -> None:
    class Views(HigherLower):
        def step(self, message_log_batch: Any, metadata: Any) -> Any:
            found = super().step(message_log_batch, metadata)
            views = {name: dict(enumerate(getattr(found, name))) for name in ("observations", "metadata")}
            return found._replace(**{name: each.values() for name, each in views.items()})

    assert collected(NemoRLEnvironment(Views, section_of()), [4, 7]).samples["turns"].tolist() == [1, 2]


class Odd(HigherLower):
    """Fails on the conversation whose number is 7, as ``how`` says."""

    how = ""
    released = threading.Event()

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        if any(known["ground_truth"] == "7" for known in metadata):
            if self.how == "raises":
                raise ValueError("odd number")
            if self.how == "lost":
                raise EnvironmentLostError("gone")
            if self.how == "server":
                raise TimeoutError("no word of the server")
            if self.how == "hangs":
                self.released.wait(60)
        # what it is given is its own to change
        for log in message_log_batch:
            log[-1]["content"] += " "
        return super().step(message_log_batch, metadata)


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(Odd, "released", threading.Event())
    yield monkeypatch
    Odd.released.set()


@pytest.mark.parametrize(
    ("how", "masked", "ended"), [("raises", False, "turns"), ("lost", True, "lost"), ("server", True, "lost")]
)
def test_what_fails_on_one_conversation_harms_no_other(
    how: str, masked: bool, ended: str, odd: pytest.MonkeyPatch
) -> None:
    odd.setattr(Odd, "how", how)
    samples = collected(NemoRLEnvironment(Odd, section_of()), [4, 7, 9, 0], turns=4).samples
    assert samples["ended"] == ["done", ended, "done", "done"]
    assert samples["masked"].tolist() == [False, masked, False, False]
    torch.testing.assert_close(samples["reward"], torch.tensor([1.0, 0.0, 0.7, 0.8]))
    text = tokenizer_of("qwen2.5").decode(samples["input_ids"][1].tolist())
    assert ("Error: ValueError: odd number" in text) == (how == "raises")


def test_a_failure_may_end_a_conversation_with_0(odd: pytest.MonkeyPatch) -> None:
    odd.setattr(Odd, "how", "raises")
    samples = collected(NemoRLEnvironment(Odd, section_of(on_tool_error="end")), [4, 7]).samples
    assert (
        samples["ended"] == ["done", "error"]
        and samples["reward"].tolist() == [1, 0]
        and not samples["masked"].any()
    )


def test_a_batch_that_hangs_is_left_out(odd: pytest.MonkeyPatch) -> None:
    odd.setattr(Odd, "how", "hangs")
    named = NamedEnvironments(
        {
            "odd": NemoRLEnvironment(Odd, section_of(step_timeout_s=0.3)),
            "sane": make_environment(section_of()),
        }
    )
    collector, *_ = collector_of(named, guesses, turns=4)
    asked = [
        Example(each.index, each.prompt_ids, (), each.answer, env_name=name)
        for each, name in zip(records([7, 9, 9, 4]), ["odd", "odd", "sane", "sane"], strict=True)
    ]
    samples = collector.collect(asked, 1, [1, 2, 3, 4]).samples
    assert samples["ended"] == ["late", "late", "done", "done"] and samples["masked"].tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert samples["reward"].tolist()[2:] == pytest.approx([0.7, 1.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.ones(3)}, r"step returned \{'rewards': 3\} for 2 conversations"),
        ({"terminateds": torch.ones(1)}, r"\{'terminateds': 1\} for 2 conversations"),
        (
            {"observations": ["higher", "lower"], "terminateds": torch.zeros(2)},
            r"continues with the observation 'higher'",
        ),
        ({"rewards": torch.tensor([1.0, float("nan")])}, r"returned the reward nan"),
    ],
)
def test_answers_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    """Rewards of conversations that have ended long ago among them: nobody asked for these."""

    class Wrong(HigherLower):
        def step(self, message_log_batch: Any, metadata: Any) -> Any:
            return super().step(message_log_batch, metadata)._replace(**change)

    with pytest.raises(BatchError, match=message):
        collected(NemoRLEnvironment(Wrong, section_of()), [4, 7])
    nothing = type("Nothing", (HigherLower,), {"step": lambda self, log, metadata: (1.0, True)})
    with pytest.raises(BatchError, match="without observations, metadata, rewards, terminateds"):
        collected(NemoRLEnvironment(nothing, section_of()), [4])


def test_a_class_that_ray_made_an_actor_of_counts_as_itself() -> None:
    class Metadata:
        modified_class = HigherLower

    actor = type("ActorClass", (), {"__ray_metadata__": Metadata})
    assert is_nemo_rl(actor)
    assert collected(NemoRLEnvironment(actor, section_of()), [4]).samples["reward"].tolist() == [1]
    assert EnvironmentReturn([], [], [], torch.ones(0), torch.ones(0)).answers is None


def test_a_run_meets_it_and_is_resumed(tmp_path: Path, model: str, data: str) -> None:
    def config(directory: str, steps: int = 4) -> dict[str, Any]:
        made = make_config(
            "grpo",
            tmp_path / directory,
            model,
            data,
            max_rollout_turns=3,
            max_num_steps=steps,
            val_at_start=False,
        )
        made["policy"]["max_total_sequence_length"] = 60
        made["policy"]["generation"] |= {"max_new_tokens": 5, "stop_token_ids": [*range(1, 32, 3)]}
        made["env"] = {"environment": f"{TOY}:HigherLower", "options": {"most": 3}}
        return made

    assert run(config("a"), PolicyMaker()) == 0
    logged = rows(tmp_path / "a")
    assert all(
        row["train/turns"] > 1 and row["train/episodes/done"] + row["train/episodes/length"] == 12
        for row in logged
    )
    assert run(config("b", 2), PolicyMaker()) == 0 and run(config("b"), PolicyMaker()) == 0
    check_same(tmp_path / "a", tmp_path / "b")
