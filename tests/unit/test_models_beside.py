"""Models beside the policy: sections that take from ``policy`` what they do not say, whose turn it is, what a
resume is told."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from megarl.algorithms.algorithm import ACTOR, CRITIC, Role
from megarl.algorithms.turns import Turns
from megarl.config.algorithms import run_type
from megarl.config.defaults import complete_run
from megarl.config.models import model_sections, renamed_text
from megarl.config.places import places_of
from megarl.config.plan import memory_of_models
from megarl.config.resume_changes import check_changes
from megarl.config.rules import check
from megarl.config.schema import check_run
from megarl.config.validate import unusual_values, validate_config
from megarl.data.tokenization import get_tokenizer
from megarl.errors import ConfigError, ModelError, Violation
from megarl.quickstart.material import make_model
from megarl.run.model_check import check_models_beside
from tests.unit.config_samples import FACTS, changed, raw_grpo

ALGORITHM = """
from typing import ClassVar
from typing_extensions import TypedDict
from megarl.algorithms.algorithm import ACTOR, CRITIC, Algorithm, ModelSection, Role

class Own(TypedDict):
    max_num_steps: int

class Several(Algorithm):
    SECTIONS = {"several": Own}
    MODELS = {
        "critic": ModelSection("a value model.", scores=True, is_trained=True),
        "teachers": ModelSection("teachers by name.", by_name=True),
        "guide": ModelSection("a guide.", is_optional=True),
    }

    @classmethod
    def roles(cls, config):
        names = config.get("teachers") or {}
        return (ACTOR, CRITIC, *(Role(name, None, section=f"teachers.{name}") for name in names))

    def step(self, step):
        return {}
"""


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """A run as a user writes it, with a critic that differs in two keys and two teachers of which one is the
    policy."""
    (tmp_path / "several.py").write_text(ALGORITHM)
    run = raw_grpo()
    for section in ("grpo", "loss_fn", "env"):
        del run[section]
    run |= {"algorithm": f"{tmp_path / 'several.py'}:Several", "several": {"max_num_steps": 3}}
    run["critic"] = {"train_micro_batch_size": 2, "megatron_cfg": {"optimizer": {"lr": 3e-4}}}
    run["teachers"] = {
        "same": {},
        "large": {"model_name": "owner/larger", "megatron_cfg": {"tensor_model_parallel_size": 6}},
    }
    return run


def test_absent_keys_are_those_of_the_policy(raw: dict[str, Any]) -> None:
    before = copy.deepcopy(raw)
    run = complete_run(raw)
    assert raw == before
    policy, critic, teachers = run["policy"], run["critic"], run["teachers"]
    assert (
        critic["megatron_cfg"]["optimizer"]["lr"] == 3e-4
        and policy["megatron_cfg"]["optimizer"]["lr"] == 1e-4
    )
    assert critic["logprob_batch_size"] == 2 and policy["logprob_batch_size"] == 5, (
        "what follows from a key follows from the own one"
    )
    assert (
        critic["megatron_cfg"]["tensor_model_parallel_size"] == 2
        and critic["model_name"] == policy["model_name"]
    )
    assert (
        critic["reward_model_cfg"]["enabled"] is True
        and policy["reward_model_cfg"] is None
        and critic["generation"] is None
    )
    assert teachers["same"] == policy, (
        "a language model's log-probabilities follow from how answers are drawn"
    )
    assert (
        teachers["large"]["model_name"] == "owner/larger"
        and teachers["large"]["generation"] == policy["generation"]
    )
    # 6 ranks share a layer, and a sequence is cut for them
    assert teachers["large"]["make_sequence_length_divisible_by"] == 6
    assert "guide" not in run and set(model_sections(run)) == {"critic", "teachers.same", "teachers.large"}
    assert complete_run(run) == run


def test_a_section_that_is_not_there_is_the_policy_with_a_score_layer(raw: dict[str, Any]) -> None:
    del raw["critic"]
    run = complete_run(raw)
    assert {key for key in run["critic"] if run["critic"][key] != run["policy"][key]} == {
        "generation",
        "reward_model_cfg",
    }


def keys(violations: list[Violation]) -> list[str]:
    return [violation.key for violation in violations]


def test_shapes_are_checked_under_the_own_name(raw: dict[str, Any]) -> None:
    assert check_run(raw) == check_run(complete_run(raw)) == []
    faults = {
        "critic.modle_name": "x",
        "critic.megatron_cfg.optimizer.lr": "1",
        "teachers.same.precision": "float8",
        "teachers.large": 3,
        "policy.train_micro_batch_size": "five",
        "guide": [],
    }
    changed(raw, faults)
    found = check_run(raw)
    # the critic has micro-batches of its own; what the first teacher has from the policy is said once
    assert sorted(keys(found)) == sorted(faults)
    assert "did you mean 'critic.model_name'?" in {violation.fix for violation in found}
    completed = complete_run(raw)
    assert completed["teachers"]["large"] == 3
    assert set(keys(check_run(completed))) >= set(faults)


def test_rules_are_kept_under_the_own_name(raw: dict[str, Any]) -> None:
    assert check(complete_run(raw), FACTS, (), {"critic": FACTS, "teachers.same": FACTS}) == []
    changed(
        raw,
        {
            "critic.megatron_cfg.pipeline_dtype": "float32",
            "critic.train_global_batch_size": 31,
            "critic.reward_model_cfg": {"enabled": False},
            "teachers.same.megatron_cfg.sequence_parallel": True,
            "teachers.same.megatron_cfg.tensor_model_parallel_size": 1,
            "teachers.large.megatron_cfg.tensor_model_parallel_size": 5,
            "policy.megatron_cfg.optimizer.min_lr": 1e-3,
        },
    )
    found = {violation.key: violation for violation in check(complete_run(raw), FACTS)}
    assert set(found) == {
        "policy.megatron_cfg.optimizer.min_lr",
        "critic.megatron_cfg.optimizer.min_lr",  # its own learning rate is another one
        "critic.megatron_cfg.pipeline_dtype",
        "critic.train_global_batch_size",
        "critic.reward_model_cfg.enabled",
        "teachers.same.megatron_cfg.sequence_parallel",
        "cluster.gpus_per_node",
    }, "teachers have what they took of the policy's optimizer, and no use for it"
    assert "write ${critic.precision}" in found["critic.megatron_cfg.pipeline_dtype"].fix
    assert "tensor 5 = 10" in found["cluster.gpus_per_node"].bound
    assert not any(
        "policy." in str(violation)
        for key, violation in found.items()
        if key.startswith(("critic", "teachers"))
    )


def test_another_model_reads_sequences_as_long_as_the_policy_s(raw: dict[str, Any]) -> None:
    """A prompt and a response, or any conversation of several turns."""
    config = complete_run(raw)
    longest = config["policy"]["max_total_sequence_length"]
    once = config["data"]["max_input_seq_length"] + config["policy"]["generation"]["max_new_tokens"]
    for length, turns, refused in (
        (min(once, longest) - 1, None, True),
        (min(once, longest), None, False),
        (longest - 1, 3, True),
        (longest, 3, False),
    ):
        changes = {"critic.max_total_sequence_length": length, "several.max_rollout_turns": turns or ...}
        config = complete_run(changed(copy.deepcopy(raw), changes))
        found = [each for each in check(config, FACTS) if each.key == "critic.max_total_sequence_length"]
        assert bool(found) is refused, (length, turns)
        assert not found or f"of up to {length + 1} tokens" in found[0].bound


def test_texts_name_the_section() -> None:
    text = (
        "write policy.a.b, ${policy.c} or policy.scheduler[1]; the policy is as before, and lm_policy.d "
        "too. This is a policy. Fix"
    )
    assert renamed_text(text, "critic") == (
        "write critic.a.b, ${critic.c} or critic.scheduler[1]; the policy is as before, and lm_policy.d "
        "too. This is a policy. Fix"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('MODELS = {"policy": ModelSection("a.")}', "its MODELS have policy, which every run has"),
        ('MODELS = {"several": ModelSection("a.")}', "its SECTIONS and its MODELS both have several"),
    ],
)
def test_sections_of_models_have_names_of_their_own(
    text: str, said: str, raw: dict[str, Any], tmp_path: Path
) -> None:
    before, _, after = ALGORITHM.partition("    MODELS = {")
    (tmp_path / "other.py").write_text(f"{before}    {text}\n{after.partition('    }')[2]}")
    raw["algorithm"] = f"{tmp_path / 'other.py'}:Several"
    with pytest.raises(ConfigError, match=said):
        validate_config(raw)


def test_a_whole_configuration_is_checked_for_all_models(raw: dict[str, Any], tmp_path: Path) -> None:
    assert unusual_values_of(raw) == []
    changed(
        raw,
        {"critic.megatron_cfg.optimizer.lr": 2.0, "teachers.same.megatron_cfg": {"optimizer": {"lr": 3.0}}},
    )
    assert [text.partition(" ")[0] for text in unusual_values_of(raw)] == ["critic.megatron_cfg.optimizer.lr"]
    raw["critic"]["model_name"] = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"critic\.model_name = .*nowhere.*this directory does not exist"):
        validate_config(raw)
    found = dict(places_of(complete_run(raw)))
    assert (
        found["critic.model_name"] == str(tmp_path / "nowhere")
        and found["teachers.large.model_name"] == "owner/larger"
    )


@pytest.mark.parametrize(("period", "warns"), [(0, True), (5, False)])
def test_a_metric_of_a_validation_that_never_runs_is_doubted(period: int, warns: bool) -> None:
    raw = changed(raw_grpo(), {"grpo.val_period": period})
    raw["data"]["validation"] = raw["data"]["train"]
    raw["checkpointing"] = {"enabled": True, "metric_name": "validation/accuracy"}
    assert any("grpo.val_period is 0" in text for text in unusual_values_of(raw)) is warns


def unusual_values_of(raw: dict[str, Any]) -> list[str]:
    return list(unusual_values(validate_config(copy.deepcopy(raw))))


def test_what_a_resume_may_change_of_a_model(raw: dict[str, Any]) -> None:
    before = complete_run(raw)
    changed(
        raw,
        {
            "critic.megatron_cfg.optimizer.lr": 5e-4,
            "critic.model_name": "owner/another",
            "critic.train_micro_batch_size": 1,
            "teachers.same.megatron_cfg": {"optimizer": {"lr": 5e-4}},
        },
    )
    with pytest.raises(ConfigError) as caught:
        check_changes(before, complete_run(raw), "step_2", accepted=False)
    assert sorted(keys(list(caught.value.violations))) == [
        "critic.megatron_cfg.optimizer.lr",
        "critic.model_name",
    ]
    raw["critic"] |= {"megatron_cfg": {"enabled": False}, "optimizer": {"name": "torch.optim.AdamW"}}
    with pytest.raises(ConfigError, match="the enabled backend of critic = 'fsdp1'"):
        check_changes(before, complete_run(raw), "step_2", accepted=True)


def test_memory_of_models(raw: dict[str, Any], tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=1)
    changed(
        raw,
        {"policy.model_name": str(tmp_path / "model"), "policy.megatron_cfg.pipeline_model_parallel_size": 1},
    )
    found = memory_of_models(complete_run(raw))
    assert found.keys() == {"critic", "teachers.same"}, "the sizes of the others are not known"
    [critic], [teacher] = found["critic"], found["teachers.same"]
    assert critic.optimizer > 0 and critic.activations > 0 and critic.parameters < teacher.parameters
    assert teacher.optimizer == teacher.activations == teacher.generation_cache == 0
    assert critic.reference_weights == teacher.reference_weights == 0


def test_the_critic_is_known_by_its_directory() -> None:
    assert CRITIC.is_trained and CRITIC.section == CRITIC.directory == "critic"
    assert ACTOR.section == "policy" and not Role("teacher", None).is_trained
    assert "several" not in run_type(None).__annotations__


class Moved:
    """Stands for the workers of a model, and notes what they are told."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def offload_after_refit(self) -> None:
        self.told.append(f"{self.name} leaves")

    def prepare_for_lp_inference(self) -> None:
        self.told.append(f"{self.name} comes")


def test_one_model_at_a_time_has_the_devices() -> None:
    told: list[str] = []
    teacher = Role("teacher", None, section="teacher")
    models: Any = {role: Moved(role.name, told) for role in (ACTOR, CRITIC, teacher)}
    turns = Turns(models)
    turns.take(ACTOR)
    assert told == ["critic leaves", "teacher leaves"]
    turns.take(ACTOR)
    turns.take(CRITIC)
    assert told[2:] == ["actor leaves"]
    turns.bring(ACTOR)
    assert told[3:] == ["critic leaves", "actor comes"]


def test_a_model_that_is_alone_is_left_alone() -> None:
    told: list[str] = []
    models: Any = {ACTOR: Moved("actor", told)}
    turns = Turns(models)
    turns.take(ACTOR)
    turns.bring(ACTOR)
    assert told == []


def test_a_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=1)
    make_model(tmp_path / "critic", seed=2)
    policy: dict[str, Any] = {
        **complete_run(raw_grpo())["policy"],
        "model_name": str(tmp_path / "model"),
        "tokenizer": {"name": str(tmp_path / "model")},
    }
    raw = {"algorithm": "", "policy": policy}
    (tmp_path / "several.py").write_text(ALGORITHM)
    raw |= {
        "algorithm": f"{tmp_path / 'several.py'}:Several",
        "critic": {"model_name": str(tmp_path / "critic")},
        "several": {},
    }
    config, tokenizer = complete_run(raw), get_tokenizer(policy["tokenizer"])
    check_models_beside(config, tokenizer)
    path = tmp_path / "critic" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    with pytest.raises(
        ModelError,
        match=r"critic\.model_name = .*: 2 of the \d+ tokens of the policy's tokenizer have another id",
    ):
        check_models_beside(config, tokenizer)
