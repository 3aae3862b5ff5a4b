"""Keys and options of TRL, verl and torchtitan: each is answered with what to write, by the real command line
and for files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli import main
from megarl.config.algorithms import ORDER, run_type
from megarl.config.nested import put
from megarl.config.other_trainers import option_faults, without_foreign_keys
from megarl.config.schema import known_paths
from megarl.config.tables import FOREIGN_KEYS
from tests.unit.config_samples import changed, raw_dpo, raw_grpo, raw_ppo

NAMED = re.compile(rf"(?<![\w./-])(?:{'|'.join(ORDER)})(?:\.\w+)+")
MEGATRON = "policy.megatron_cfg"
OF_ARGUMENTS = {"policy.optimizer.kwargs"}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(raw_grpo()))
    return path


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command line writes of a run that it refuses."""
    try:
        code = main(["train", *words])
    except SystemExit as error:
        code = error.code
    shown = capsys.readouterr()
    assert code == 2 and shown.out.count("\n") <= 1 and "Traceback" not in shown.err
    assert "unrecognized arguments" not in shown.err
    return shown.err


def line_of(text: str, key: str) -> str:
    lines = [line for line in text.splitlines() if re.match(rf"\s+\d+\. {re.escape(key)} = ", line)]
    assert len(lines) == 1, (key, text)
    return lines[0]


def keys_in(text: str) -> Iterator[str]:
    """The keys of megarl that a text names."""
    for name in NAMED.findall(text):
        first, _, rest = name.partition(".")
        yield f"policy.{rest}" if first in {"critic", "reward_model"} else name


@pytest.mark.parametrize("trainer", FOREIGN_KEYS)
def test_what_is_to_be_written_are_keys_that_there_are(trainer: str) -> None:
    known = {*known_paths(run_type(None)), *OF_ARGUMENTS}
    for key, text in FOREIGN_KEYS[trainer].items():
        assert key not in known, key
        named = list(keys_in(text.replace("{algorithm}", "grpo")))
        assert [name for name in named if name not in known] == [], key
        only_a_key = re.fullmatch(r"[\w.{}]+", text)
        assert named or not only_a_key or text in known, key


def test_keys_of_an_algorithm_are_those_of_each_that_has_them() -> None:
    known = set(known_paths(run_type(None)))
    shared = {
        name
        for table in FOREIGN_KEYS.values()
        for text in table.values()
        for name in re.findall(r"\{algorithm\}(\.\w+)", text)
    }
    for name in shared - {".num_generations_per_prompt", ".num_prompts_per_step"}:
        assert f"grpo{name}" in known and f"ppo{name}" in known


@pytest.mark.parametrize(
    ("trainer", "table"), [(trainer, FOREIGN_KEYS[trainer]) for trainer in ("TRL", "torchtitan")]
)
def test_every_option_is_answered_in_one_list(
    trainer: str, table: Mapping[str, str], config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [word for key in table for word in (f"--{key}", "7")]
    shown = refusal(capsys, *options, str(config_file), "grpo.num_promts_per_step=3")
    assert f"{len(table) + 1} configuration errors" in shown
    for key, text in table.items():
        line = line_of(shown, f"--{key}")
        assert f"{trainer} has this option" in line
        if re.fullmatch(r"[\w.{}]+", text):
            assert line.endswith(f"Fix: write {text.replace('{algorithm}', 'grpo')}=7")
    assert "did you mean 'grpo.num_prompts_per_step'?" in line_of(shown, "grpo.num_promts_per_step")


@pytest.mark.parametrize(
    ("trainer", "table"),
    [(trainer, table) for trainer, table in FOREIGN_KEYS.items() if trainer != "NeMo-RL"],
)
def test_every_key_is_answered_as_an_override_and_in_a_file(
    trainer: str,
    table: Mapping[str, str],
    config_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = refusal(capsys, str(config_file), *(f"{key}=7" for key in table))
    written: dict[str, Any] = {**raw_grpo(), "algorithm": {}} if trainer == "verl" else raw_grpo()
    for key in table:
        written = put(written, key, 7)
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(written))
    of_file = refusal(capsys, str(path))
    for key, text in table.items():
        for line in (line_of(shown, key), line_of(of_file, key)):
            assert f"{trainer} has this key" in line
            assert "=7" in line or not re.fullmatch(r"[\w.{}]+", text)
    assert "there is no such key" not in shown + of_file


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--config", "CONFIG"], "remove --config"),
        (["-c", "x.yaml"], "remove -c"),
        (["--set", "seed=3"], "remove --set"),
        (["-n"], "megarl keys WORD looks for a key, which is set by key=value"),
        (["--tp", "2"], f"did you mean {MEGATRON}.tensor_model_parallel_size=2"),
        (["--dataset", "gsm8k"], "write data.train.name=gsm8k"),
        (["--resume"], "did you mean checkpointing.resume=...: write for example auto"),
    ],
)
def test_an_option_that_was_guessed_is_answered_by_what_to_write(
    words: list[str], fix: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(config_file) if word == "CONFIG" else word for word in words]
    given = words if str(config_file) in words else [str(config_file), *words]
    assert line_of(refusal(capsys, *given), words[0]).endswith(f"Fix: {fix}")


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_an_option_of_a_size_is_that_of_the_backend(backend: str) -> None:
    section = {"megatron": MEGATRON, "dtensor": "policy.dtensor_cfg"}[backend]
    config = put(raw_grpo(), f"{MEGATRON}.enabled", backend == "megatron")
    [violation] = option_faults([("--cp", "2")], config, [])
    assert violation.fix == f"did you mean {section}.context_parallel_size=2"


@pytest.mark.parametrize("section", ["policy", "critic"])
def test_a_removed_key_is_answered_in_the_section_of_any_model(section: str) -> None:
    _, [violation] = without_foreign_keys(changed(raw_ppo(), {f"{section}.on_oom": "split"}))
    assert violation.key == f"{section}.on_oom" and violation.fix.startswith(
        "remove it: a micro-batch without room ends the run"
    )


def test_what_is_in_no_table_is_answered_too(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "actor_rollout_ref.rollout.agent.num_workers=8",
        "--metrics.disable_color",
        "--num-generation",
        "8",
        "--foo.bar=1",
    ]
    shown = refusal(capsys, *words, "--grpo.max_num_steps", "3", "--dryrun", str(config_file))
    assert "megarl keys workers looks for a counterpart" in line_of(
        shown, "actor_rollout_ref.rollout.agent.num_workers"
    )
    assert "torchtitan has this section" in line_of(shown, "--metrics.disable_color")
    assert line_of(shown, "--num-generation").endswith("write grpo.num_generations_per_prompt=8")
    assert "there is no such option" in line_of(shown, "--foo.bar")
    assert line_of(shown, "--grpo.max_num_steps").endswith("write grpo.max_num_steps=3")
    assert line_of(shown, "--dryrun").endswith("write --dry-run")
    assert "6 configuration errors" in shown and shown.startswith(
        "usage: megarl train CONFIG [key=value ...]"
    )


def test_algorithm_and_backend_decide_what_is_to_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = raw_dpo()
    config["policy"] |= {
        "megatron_cfg": {"enabled": False},
        "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 2},
    }
    config["policy"]["optimizer"] = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-6}}
    path = tmp_path / "dpo.yaml"
    path.write_text(yaml.safe_dump(config))
    shown = refusal(
        capsys, str(path), "max_steps=5", "learning_rate=1e-6", "parallelism.tensor_parallel_degree=4"
    )
    assert "write dpo.max_num_steps=5" in shown
    assert "write policy.optimizer.kwargs.lr=1e-6" in shown
    assert "write policy.dtensor_cfg.tensor_parallel_size=4" in shown


@pytest.mark.parametrize(
    ("words", "likeliest"),
    [
        ([], "1gpu"),
        (["grpo.max_num_steps=3", "policy.model_name=Qwen/Qwen2.5-7B"], "grpo-qwen2.5-7b-8gpu-megatron"),
        (["dpo.max_num_steps=3"], "dpo-ultrafeedback-qwen2.5-1.5b-megatron"),
        (["--model", "Qwen/Qwen2.5-0.5B"], "qwen2.5"),
        (["actor_rollout_ref.rollout.n=8"], "1gpu"),
    ],
)
def test_a_missing_recipe_is_named_with_likely_ones(
    words: list[str], likeliest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refusal(capsys, *words)
    assert "neither a recipe nor a YAML file is named" in shown and likeliest in line_of(shown, "CONFIG")
    assert shown.count(" = ") == 1 + sum(word.startswith(("--", "actor")) for word in words)


def test_a_recipe_may_stand_anywhere(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grpo.max_num_steps=3", "--dry-run", str(config_file), "seed=5"]) == 0
    out = capsys.readouterr().out
    assert "max_num_steps: 3" in out and "seed: 5" in out


def test_mistakes_beside_a_recipe_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    shown = refusal(capsys, "grpo-gsm", "--max_steps", "5")
    assert (
        "there is neither such a file nor such a recipe" in shown
        and "grpo-gsm8k-qwen2.5-1.5b-1gpu-megatron" in shown
    )
    assert "write grpo.max_num_steps=5" in shown


def test_secrets_stay_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hf_abcdefghijklm" not in refusal(capsys, "--hub_token", "hf_abcdefghijklm")


@pytest.mark.parametrize("command", ["eval", "doctor --nodes"])
def test_other_commands_that_take_a_configuration(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--num_generations", "8"])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert (
        shown.startswith(f"usage: megarl {command.split()[0]}")
        and "write grpo.num_generations_per_prompt=8" in shown
    )


def test_an_algorithm_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["grpo", "--model_name_or_path", "x"])
    assert caught.value.code == 2 and "megarl train RECIPE" in capsys.readouterr().err
