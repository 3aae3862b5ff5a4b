"""No key of ``policy`` is idle: each does something that can be seen on a real worker of each backend, or is
refused with a reason.

The keys come from the TypedDicts themselves, so that a new one fails here until it has its demonstration.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from converters.families.read import read_architecture
from megarl.config import load_config, validate_policy_config
from megarl.data.tokenization import PromptEncoder, get_tokenizer
from megarl.errors import ConfigError
from megarl.models.megatron import settings
from megarl.models.megatron.transformer_engine import Finding
from megarl.parity.pool import WorkerPool
from megarl.run.inputs import tokenizer_of
from tests.dist import key_observations
from tests.dist.key_demonstrations import (
    BACKENDS,
    AsItIs,
    Changes,
    Refused,
    ShownBy,
    differs,
    leaves,
    read_demonstrations,
)
from tests.dist.key_models import make_models
from tests.dist.key_runs import RANKS, Keys, Run
from tests.tiers import sampled
from tests.unit.config_samples import changed

DEMONSTRATIONS = read_demonstrations()
GROUPS = {
    "megatron": ("shared", "megatron"),
    "dtensor": ("shared", "torch", "dtensor"),
    "fsdp1": ("shared", "torch", "fsdp1"),
}
ONE_EACH = {backend: [DEMONSTRATIONS[group] for group in groups] for backend, groups in GROUPS.items()}
TABLES = {
    backend: {key: shown for group in groups for key, shown in group.items()}
    for backend, groups in ONE_EACH.items()
}
RATE = {
    "megatron": "megatron_cfg.optimizer.lr",
    "dtensor": "optimizer.kwargs.lr",
    "fsdp1": "optimizer.kwargs.lr",
}


def keys_shown_by(kind: type) -> list[tuple[str, str]]:
    return [
        (backend, key)
        for backend in BACKENDS
        for key, shown in TABLES[backend].items()
        if isinstance(shown, kind)
    ]


@pytest.fixture(scope="module")
def keys(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Keys:
    keys = Keys(pool, make_models(tmp_path_factory.mktemp("keys")))
    demonstrations = [
        item
        for item in request.session.items
        if getattr(item, "function", None) is test_the_key_changes_what_it_says
    ]
    for backend, key in (item.callspec.params.values() for item in demonstrations):  # type: ignore[attr-defined]
        for run in runs_of(keys, backend, key):
            keys.will_want(run)
    return keys


def runs_of(keys: Keys, backend: str, key: str) -> list[Run]:
    """The two runs between which the key changes."""
    shown = TABLES[backend][key]
    path = shown.path or key
    before = {} if shown.before is AsItIs else {path: shown.before}
    policies = [
        keys.policy(backend, shown.model, shown.beside, before),
        keys.policy(backend, shown.model, shown.beside, {path: shown.value}, shown.with_it),
    ]
    return [
        Run(shown.seen_in.partition(".")[0], policy, shown.world or RANKS[backend]) for policy in policies
    ]


# every key has one demonstration


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_key_has_one_demonstration(backend: str) -> None:
    names = [key for table in ONE_EACH[backend] for key in table]
    assert sorted(names) == sorted(leaves(backend)), {
        "without a demonstration": sorted(leaves(backend) - set(names)),
        "of no key": sorted(set(names) - leaves(backend)),
        "twice": sorted({name for name in names if names.count(name) > 1}),
    }


@pytest.mark.parametrize(("backend", "key"), keys_shown_by(ShownBy))
def test_a_key_s_own_test_exists(backend: str, key: str) -> None:
    module, _, test = TABLES[backend][key].test.rpartition(":")
    assert callable(getattr(importlib.import_module(module or __name__), test))


def test_a_new_key_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.dist import key_demonstrations

    more = (
        *key_demonstrations.known_paths(key_demonstrations.PolicyConfig),
        "megatron_cfg.optimizer.brand_new",
    )
    monkeypatch.setattr(key_demonstrations, "known_paths", lambda section: more)
    assert "megatron_cfg.optimizer.brand_new" in leaves("megatron") - set(TABLES["megatron"])
    assert leaves("dtensor") == set(TABLES["dtensor"])


# demonstrations


@sampled(30)
@pytest.mark.parametrize(("backend", "key"), keys_shown_by(Changes))
def test_the_key_changes_what_it_says(keys: Keys, backend: str, key: str) -> None:
    seen_in = TABLES[backend][key].seen_in
    name = seen_in.partition(".")[2]
    one, other = ([rank[name] for rank in keys.seen(run)] for run in runs_of(keys, backend, key))
    changed_something = differs(one, other)
    assert changed_something, f"{key} changes nothing in {seen_in}: {str(one)[:300]}"


@pytest.mark.parametrize(("backend", "key"), keys_shown_by(Refused))
def test_the_key_is_refused_with_a_reason(keys: Keys, backend: str, key: str) -> None:
    shown = TABLES[backend][key]
    path, named = shown.path or key, f"policy.{shown.named or shown.path or key}"
    for value in shown.values:
        policy = keys.policy(backend, shown.model, shown.beside, {path: value})
        found = keys.violations(policy)
        assert named in found, value
        assert shown.reason in found[named].bound and found[named].fix
    for value in shown.accepted:
        assert keys.violations(keys.policy(backend, shown.model, shown.beside, {path: value})) == {}, value


# what makes the demonstrations sound


@sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("observation", key_observations.OBSERVATIONS)
def test_what_is_seen_is_the_same_twice(keys: Keys, backend: str, observation: str) -> None:
    """A difference between two runs comes from the key, not from chance."""
    run = Run(
        observation, keys.policy(backend, "qwen2"), 2 if observation == "communicated" else RANKS[backend]
    )
    assert not differs(keys.seen(run), keys.seen(run, again=True))


def test_a_key_that_does_nothing_is_seen_to_do_nothing(keys: Keys) -> None:
    """Adam has no momentum of SGD's, and the learning rate is what moves weights."""
    idle, busy = (
        {f"megatron_cfg.optimizer.{name}": value} for name, value in (("sgd_momentum", 0.0), ("lr", 2e-2))
    )
    weights = [
        keys.seen(Run("trained", keys.policy("megatron", "qwen2", change), 1))[0]["weights"]
        for change in ({}, idle, busy)
    ]
    assert not differs(weights[0], weights[1])
    assert differs(weights[0], weights[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_section_of_a_backend_that_is_off_changes_nothing(keys: Keys, backend: str) -> None:
    """A recipe keeps the sections of the backends that it does not run on."""
    off: dict[str, Any] = {
        "megatron_cfg": {
            "enabled": False,
            "tensor_model_parallel_size": 7,
            "activation_checkpointing": True,
            "optimizer": {"lr": 5.0},
        },
        "dtensor_cfg": {
            "enabled": False,
            "tensor_parallel_size": 7,
            "activation_checkpointing": True,
            "sequence_parallel": True,
        },
    }
    off.pop(f"{backend}_cfg", None)
    one, other = (
        keys.seen(Run("trained", keys.policy(backend, "qwen2", change), RANKS[backend]))
        for change in ({}, off)
    )
    assert not differs(one, other)


# keys with a test of their own


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tokenizer_s_keys_decide_what_a_prompt_becomes(keys: Keys, backend: str) -> None:
    def prompt(**change: Any) -> list[int]:
        section = validate_policy_config(keys.policy(backend, "qwen2", change), RANKS[backend])["tokenizer"]
        return PromptEncoder(
            get_tokenizer(section), template_kwargs=section.get("chat_template_kwargs")
        ).encode("w5 w6")

    assert prompt() == [5, 6]
    assert prompt(**{"tokenizer.name": "model:backwards"}) == [98, 97]
    template = "w9 {% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert prompt(**{"tokenizer.chat_template": template}) == [9, 5, 6]
    template = "{{ first }} " + template
    assert prompt(
        **{"tokenizer.chat_template": template, "tokenizer.chat_template_kwargs": {"first": "w8"}}
    ) == [8, 9, 5, 6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_learning_rate_is_what_an_optimizer_refers_to(keys: Keys, backend: str, tmp_path: Path) -> None:
    written = changed(
        {"policy": keys.policy(backend, "qwen2")}, {f"policy.{RATE[backend]}": "${policy.learning_rate}"}
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(written), encoding="utf-8")
    read = load_config(file, ["policy.learning_rate=0.03"])["policy"]
    section: Any = validate_policy_config(read, RANKS[backend])
    for name in RATE[backend].split("."):
        section = section[name]
    assert section == 0.03
    with pytest.raises(
        ConfigError, match=r"policy\.learning_rate = 0\.03: it is only read through a reference"
    ):
        validate_policy_config(keys.policy(backend, "qwen2", {"learning_rate": 0.03}), RANKS[backend])


def test_code_that_comes_with_a_tokenizer_runs_only_where_it_is_trusted(keys: Keys) -> None:
    def kind(trusted: bool) -> str:
        change = {"tokenizer.name": "model:coded", "trust_remote_code": trusted}
        return type(
            tokenizer_of(validate_policy_config(keys.policy("megatron", "qwen2", change), 1))
        ).__name__

    assert "Remote" not in kind(False)
    assert kind(True) == "RemoteTokenizer"


def test_rope_fusion_reaches_megatron_where_its_kernel_is(keys: Keys) -> None:
    """Its kernel is Transformer Engine's, which needs a GPU: without one it is off, whatever the key says."""
    architecture = read_architecture(AutoConfig.from_pretrained(keys.models["qwen2"]))
    policies = {
        wanted: keys.policy("megatron", "qwen2", {"megatron_cfg.apply_rope_fusion": wanted})
        for wanted in (True, False)
    }

    def rotates_fused(wanted: bool, engine: bool) -> bool:
        return bool(
            settings.transformer_config(
                validate_policy_config(policies[wanted]), architecture, fused=engine
            ).apply_rope_fusion
        )

    assert not any(rotates_fused(wanted, engine=False) for wanted in (True, False))
    assert not rotates_fused(False, engine=True)
    with pytest.raises(ValueError, match="apply_rope_fusion is not available"):
        rotates_fused(True, engine=True)


def test_the_fused_permutation_reaches_megatron(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are Transformer Engine's, which Megatron-Core looks for; without a GPU there are none."""
    architecture = read_architecture(AutoConfig.from_pretrained(keys.models["mixtral"]))
    policy = validate_policy_config(
        keys.policy("megatron", "mixtral", {"megatron_cfg.moe_permute_fusion": True})
    )
    with pytest.raises(
        ConfigError,
        match=r"moe_permute_fusion = True: its kernels are Transformer Engine's, which cannot be used",
    ):
        settings.transformer_config(policy, architecture, fused=False)
    monkeypatch.setattr(settings, "find", Finding)
    with pytest.raises((ImportError, ValueError), match=r"fused.permut"):
        settings.transformer_config(policy, architecture, fused=False)
