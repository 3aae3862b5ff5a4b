"""Whole runs of distillation in one process: the real driver, data, checkpoints and logs around the plain
reference policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.algorithms.algorithm import ACTOR
from megarl.algorithms.distillation import Distillation
from megarl.config.distillation import source_key, teachers_of_sources
from megarl.config.rules import check
from megarl.errors import ConfigError, ModelError
from megarl.run.run import run
from tests.tiers import sampled, slow
from tests.unit.config_samples import FACTS, changed, complete, raw_distillation
from tests.unit.driver_runs import STEPS, Crash, PolicyMaker, check_same, make_config, rows
from tests.unit.tiny_model import make_tiny_model

GRADIENT = {
    "reference_policy_kl_penalty": 0.0,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "token_level_loss": True,
}


def make_teacher(path: Path, seed: int) -> str:
    """A model of the same tokens that knows what it wants: a new one gives all tokens nearly the same
    probability."""
    make_tiny_model(path, seed)
    made = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.copy_(
                    0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                )
    made.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_teacher(tmp_path_factory.mktemp("teacher"), 23)


@pytest.fixture(scope="module")
def other_teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_teacher(tmp_path_factory.mktemp("other"), 31)


def distillation_config(run_dir: Path, model: str, data: str, teacher: str, **section: Any) -> dict[str, Any]:
    config = make_config("distillation", run_dir, model, data, **{"topk_logits_k": 8, **section})
    del config["loss_fn"]
    if section.get("mode") == "reverse_kl_advantage":
        del config["distillation"]["topk_logits_k"]
        config["loss_fn"] = dict(GRADIENT)
    return {**config, "teacher": {"model_name": teacher}}


def test_a_whole_run_leaves_what_it_promises(tmp_path: Path, model: str, data: str, teacher: str) -> None:
    maker = PolicyMaker()
    assert run(distillation_config(tmp_path, model, data, teacher), maker) == 0
    policy, of_teacher = maker.policies
    assert policy.train_calls == STEPS and of_teacher.train_calls == 0
    logged = rows(tmp_path)
    assert [row["step"] for row in logged] == list(range(STEPS + 1))
    for row in logged[1:]:
        assert {
            f"train/{name}"
            for name in ("loss", "forward_kl", "reverse_kl", "policy_mass", "teacher_mass", "grad_norm")
        } <= set(row)
        assert (
            row["train/loss"] == pytest.approx(row["train/reverse_kl"])
            and row["train/sampled_reverse_kl"] != 0
        )
        assert row["timing/teacher_logprobs_s"] > 0 and row["train/global_valid_seqs"] == 6
        assert 0 < row["train/teacher_mass"] < 1 and "train/reward" in row
        assert row["performance/teacher_memory_gib"] == 0.5
    assert "validation/accuracy" in logged[0]
    kept = tmp_path / "checkpoints" / f"step_{STEPS}"
    assert {path.name for path in kept.iterdir() if path.is_dir()} == {"policy"}, (
        "nothing of a teacher is kept"
    )
    weights = [[*model.parameters()] for model in (of_teacher.model, of_teacher.reference)]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True)), (
        "a teacher learns nothing"
    )
    samples = json.loads((tmp_path / "samples" / "train_step_1.jsonl").read_text().splitlines()[0])
    assert samples["advantage"] is not None


@sampled(1)
@pytest.mark.parametrize(
    "section",
    [{"kl_type": "reverse"}, {"kl_type": "forward"}, {"kl_type": "mixed"}, {"mode": "reverse_kl_advantage"}],
    ids=lambda section: "-".join(section.values()),
)
def test_the_policy_comes_nearer_to_its_teacher(
    tmp_path: Path, model: str, data: str, teacher: str, section: dict[str, Any]
) -> None:
    """By what the run measures of its own samples, and by the exact divergence over the vocabulary of other
    sequences."""
    by_samples = section.get("mode") == "reverse_kl_advantage"
    steps = 40 if by_samples else 32
    config = distillation_config(
        tmp_path, model, data, teacher, **section, max_num_steps=steps, val_period=0, val_at_start=False
    )
    config["checkpointing"] = {"enabled": False}
    config["data"]["validation"] = None
    maker = PolicyMaker()
    run(config, maker)
    measured = [row["train/sampled_reverse_kl"] for row in rows(tmp_path)]
    first, last = sum(measured[:8]) / 8, sum(measured[-8:]) / 8
    assert last < (0.8 if by_samples else 0.75) * first
    policy, of_teacher = maker.policies
    ids = torch.randint(5, policy.vocab_size, (16, 6), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "input_lengths": torch.full((16,), 6)}
    with torch.no_grad():
        now, before, wanted = (
            policy._distributions(each, given) for each in (policy.model, policy.reference, of_teacher.model)
        )

    def divergence(one: Tensor) -> float:
        return float((one.exp() * (one - wanted)).sum(-1).mean())

    assert divergence(now) < divergence(before)


def test_a_policy_that_is_its_own_teacher_has_nothing_to_learn(tmp_path: Path, model: str, data: str) -> None:
    config = distillation_config(tmp_path, model, data, model, max_num_steps=1)
    config["policy"]["train_global_batch_size"] = 12
    run(config, PolicyMaker())
    row = rows(tmp_path)[1]
    assert row["train/sampled_reverse_kl"] == pytest.approx(0, abs=1e-6)
    assert row["train/loss"] == pytest.approx(0, abs=1e-6) and row["train/grad_norm"] < 1e-5


def test_advantages_are_differences_of_log_probabilities(
    tmp_path: Path, model: str, data: str, teacher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each sampled token at the temperature of sampling, within the bounds, 0 elsewhere; and they pass no
    gradient."""
    seen: list[tuple[Any, Any]] = []
    original = Distillation.advantages

    def watched(self: Any, batch: Any, teacher_logprobs: Any) -> Any:
        found = original(self, batch, teacher_logprobs)
        seen.append((batch, found[0]))
        return found

    monkeypatch.setattr(Distillation, "advantages", watched)
    config = distillation_config(
        tmp_path,
        model,
        data,
        teacher,
        mode="reverse_kl_advantage",
        advantage_clip_low=-0.7,
        advantage_clip_high=0.4,
        max_num_steps=1,
    )
    config["policy"]["generation"]["temperature"] = 0.8
    maker = PolicyMaker()
    run(config, maker)
    [(batch, advantages)] = seen
    policy, of_teacher = maker.policies
    counts = (batch["token_mask"] * batch["sample_mask"][:, None]) != 0
    with torch.no_grad():
        logs = [
            (network(input_ids=batch["input_ids"]).logits.double()[:, :-1] / 0.8).log_softmax(-1)
            for network in (of_teacher.model, policy.reference)
        ]
    one, other = (log.gather(2, batch["input_ids"][:, 1:, None]).squeeze(2) for log in logs)
    expected = torch.nn.functional.pad((one - other).clamp(-0.7, 0.4), (1, 0)).where(
        counts, torch.tensor(0.0).double()
    )
    torch.testing.assert_close(advantages.double(), expected, atol=1e-5, rtol=0)
    assert not advantages.requires_grad and (advantages == -0.7).any() and (advantages == 0.4).any()


def several(run_dir: Path, model: str, data: str, teachers: dict[str, str], **section: Any) -> dict[str, Any]:
    """Two sources, told apart by the names of their files, each with a teacher of its own."""
    config = distillation_config(run_dir, model, data, model, **section)
    other = Path(data).with_name("others.jsonl")
    other.write_text("\n".join(json.dumps({"prompt": f"{left}-{left}=", "answer": "0"}) for left in range(5)))
    source = config["data"]["train"]
    config["data"]["train"] = [source, {**source, "path": str(other)}]
    del config["teacher"]
    config["teachers"] = {name: {"model_name": path} for name, path in teachers.items()}
    config["distillation"]["teacher_of_source"] = dict(
        zip((Path(data).stem, "others"), teachers, strict=True)
    )
    return config


@sampled(1)
@pytest.mark.parametrize("mode", ["topk", "reverse_kl_advantage"])
def test_each_source_has_its_teacher(
    tmp_path: Path, model: str, data: str, teacher: str, other_teacher: str, mode: str
) -> None:
    config = several(
        tmp_path, model, data, {"sums": teacher, "differences": other_teacher}, mode=mode, max_num_steps=3
    )
    asked: dict[str, list[Tensor]] = {}
    maker = PolicyMaker()

    class Asked(PolicyMaker):
        def __call__(self, *given: Any, **named: Any) -> Any:
            made = maker(*given, **named)
            for method in ("get_topk_logits", "get_logprobs"):
                original = getattr(made, method)

                def noted(
                    data: Any,
                    *rest: Any,
                    original: Any = original,
                    path: str = made.cfg["model_name"],
                    **options: Any,
                ) -> Any:
                    asked.setdefault(path, []).append(data["input_ids"])
                    return original(data, *rest, **options)

                setattr(made, method, noted)
            return made

    run(config, Asked())
    minus = maker.policies[0].tokenizer("-", add_special_tokens=False)["input_ids"][0]
    for path, has_minus in ((teacher, False), (other_teacher, True)):
        prompts = torch.cat([ids[:, :3] for ids in asked[path]])
        assert ((prompts == minus).any(dim=1) == has_minus).all(), path
    for row in rows(tmp_path)[1:]:
        names = {name for name in row if name.startswith("train/sampled_reverse_kl")}
        assert len(names) in (1, 3)
    assert any("train/sampled_reverse_kl/differences" in row for row in rows(tmp_path))


@slow
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, model: str, data: str, teacher: str, other_teacher: str
) -> None:
    teachers = {"sums": teacher, "differences": other_teacher}
    run(several(tmp_path / "whole", model, data, teachers), PolicyMaker())
    for crash_after in (1, 3):
        config = several(tmp_path / f"crash{crash_after}", model, data, teachers)
        with pytest.raises(Crash):
            run(config, PolicyMaker(crash_after))
        run(config, PolicyMaker())
        check_same(tmp_path / f"crash{crash_after}", tmp_path / "whole")


def test_a_teacher_of_other_tokens_is_refused_before_any_worker(
    tmp_path: Path, model: str, data: str
) -> None:
    other = make_tiny_model(tmp_path / "other", 9)
    path = Path(other) / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[8:10]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    maker = PolicyMaker()
    with pytest.raises(
        ModelError,
        match=r"teacher\.model_name = .*: 2 of the \d+ tokens of the policy's tokenizer have another id",
    ):
        run(distillation_config(tmp_path / "run", model, data, other), maker)
    assert not maker.policies


RULES = [
    ({"teacher": ...}, {"teacher"}, "needs a model that the policy learns from"),
    ({"teachers": {"one": {}}}, {"teachers"}, "there is a section teacher too"),
    (
        {"distillation.teacher_of_source": {"train": "one"}},
        {"distillation.teacher_of_source"},
        "teacher teaches all sources",
    ),
    (
        {"policy.generation.top_p": 0.9},
        {"policy.generation.top_p"},
        "a token excluded from sampling has none",
    ),
    (
        {"policy.generation.top_k": 5},
        {"policy.generation.top_k"},
        "a token excluded from sampling has none",
    ),
    (
        {"teacher.generation": {"temperature": 0.5}},
        {"teacher.generation.temperature"},
        "distributions at different temperatures never match",
    ),
    ({"teacher.generation": {"top_p": 0.5}}, {"teacher.generation.top_p"}, "policy.generation.top_p is 1.0"),
    ({"loss_fn": GRADIENT}, {"loss_fn"}, "whose loss is in distillation"),
    ({"distillation.mixed_kl_weight": 0.3}, {"distillation.mixed_kl_weight"}, "kl_type is reverse"),
    (
        {"distillation.advantage_clip_low": -1.0},
        {"distillation.advantage_clip_low"},
        "mode is topk, which does not read it",
    ),
    ({"distillation.topk_logits_k": 1004}, {"distillation.topk_logits_k"}, "the vocabulary has 1003 tokens"),
    ({"distillation.topk_logits_k": 0}, {"distillation.topk_logits_k"}, "at least 1"),
    (
        {"distillation.mode": "reverse_kl_advantage"},
        {"loss_fn", "distillation.topk_logits_k"},
        "needs a policy-gradient loss",
    ),
    (
        {
            "distillation.mode": "reverse_kl_advantage",
            "distillation.topk_logits_k": ...,
            "loss_fn": {
                **GRADIENT,
                "use_kl_in_reward": True,
                "reference_policy_kl_penalty": 0.1,
                "reference_policy_kl_type": "k1",
            },
        },
        {"loss_fn.use_kl_in_reward"},
        "no reward is read",
    ),
]


@pytest.mark.parametrize(("changes", "keys", "said"), RULES)
def test_what_would_do_nothing_or_means_nothing_is_refused(
    changes: dict[str, Any], keys: set[str], said: str
) -> None:
    found = check(complete(raw_distillation(), changes), FACTS)
    assert {violation.key for violation in found} == keys
    assert said in " ".join(violation.bound for violation in found)


TEACHERS = {
    "teacher": ...,
    "teachers": {"math": {}, "code": {}},
    "data.train": [
        {"path": "a/problems.jsonl", "prompt_key": "p", "answer_key": "a"},
        {"name": "owner/programs", "prompt_key": "p", "answer_key": "a"},
    ],
}


@pytest.mark.parametrize(
    ("chosen", "keys", "said"),
    [
        (None, {"distillation.teacher_of_source"}, "no source is mapped to one"),
        (
            {"problems": "math"},
            {"distillation.teacher_of_source", "teachers.code"},
            "the source 'programs' of data.train has no teacher",
        ),
        (
            {"problems": "math", "programs": "c"},
            {"distillation.teacher_of_source.programs", "teachers.code"},
            "the teachers are math, code",
        ),
        (
            {"problems": "math", "programs": "code", "x": "code"},
            {"distillation.teacher_of_source.x"},
            "its sources are problems, programs",
        ),
        (
            {"problems": "code", "programs": "code"},
            {"teachers.math"},
            "no source of data.train has this teacher",
        ),
        ({"problems": "math", "programs": "code"}, set(), ""),
    ],
)
def test_every_source_has_a_teacher_and_every_teacher_a_source(
    chosen: dict[str, str] | None, keys: set[str], said: str
) -> None:
    config = complete(changed(raw_distillation(), {**TEACHERS, "distillation.teacher_of_source": chosen}))
    found = check(config, FACTS)
    assert {violation.key for violation in found} == keys
    assert said in " ".join(violation.bound for violation in found)
    if not keys:
        assert teachers_of_sources(config) == ["math", "code"]
        assert [role.section for role in Distillation.roles(config)] == [
            "policy",
            "teachers.math",
            "teachers.code",
        ]


def test_a_source_is_called_by_its_environment_first() -> None:
    assert source_key({"path": "some/where.jsonl", "env_name": "math"}) == "math"
    assert source_key({"path": "some/where.jsonl"}) == "where" and source_key({"name": "owner/set"}) == "set"
    assert Distillation.roles(complete(raw_distillation()))[0] is ACTOR


def test_a_name_of_a_teacher_is_one_that_metrics_can_bear() -> None:
    config = complete(changed(raw_distillation(), {"teacher": ..., "teachers": {"a/b": {}}}))
    assert [violation.key for violation in check(config, FACTS)] == ["teachers.a/b"]


def test_the_whole_configuration_is_refused_at_once(
    tmp_path: Path, model: str, data: str, teacher: str
) -> None:
    config = distillation_config(tmp_path, model, data, teacher, topk_logits_k=10**6)
    config["policy"]["generation"]["top_p"] = 0.5
    maker = PolicyMaker()
    with pytest.raises(ConfigError) as caught:
        run(config, maker)
    assert {violation.key for violation in caught.value.violations} == {
        "distillation.topk_logits_k",
        "policy.generation.top_p",
    }
    assert not maker.policies
