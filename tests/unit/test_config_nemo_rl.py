"""NeMo-RL's own configurations: whatever is refused of them says what to write, and runs through once that is
done."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli import main
from megarl.config.load import load_config
from megarl.config.nested import put
from megarl.config.rules.not_yet import NEVER_LEGAL
from megarl.config.tables import FOREIGN_KEYS
from megarl.config.validate import validate_config
from megarl.errors import ConfigError
from tests.tables import read_table
from tests.unit.config_samples import raw_grpo

CONFIGS = Path(__file__).parents[2] / "configs"
KEYS = (CONFIGS / "KEYS.md").read_text(encoding="utf-8")
TABLE = (
    (CONFIGS / "README.md").read_text(encoding="utf-8").partition("## From NeMo-RL")[2].partition("\n## ")[0]
)
# what the table says of the keys that have no counterpart of their own
NEW = {"algorithm": "algorithm: grpo", "data.train": "data.train", "env.reward": "env.reward: math_verify"}

THEIRS: dict[str, dict[str, Any]] = read_table("nemo_rl.yaml")


def refused(config: dict[str, Any], directory: Path) -> list[Any]:
    path = directory / "nemo.yaml"
    path.write_text(yaml.safe_dump(config))
    try:
        validate_config(load_config(path))
    except ConfigError as error:
        return list(error.violations)
    return []


@pytest.mark.parametrize("name", THEIRS)
def test_each_refused_key_is_in_the_table_and_has_a_remedy_of_its_own(name: str, tmp_path: Path) -> None:
    found = refused(THEIRS[name], tmp_path)
    assert len(found) > 20
    for violation in found:
        name = NEW.get(violation.key, violation.key.rpartition(".")[2])
        assert re.search(rf"`[^`|]*\b{re.escape(name)}\b[^`|]*`", TABLE), violation.key
        assert "did you mean" not in violation.fix, violation


def as_the_table_says(config: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for key in FOREIGN_KEYS["NeMo-RL"]:
        *parents, name = key.split(".")
        section = config
        for parent in parents:
            section = section.get(parent, {})
        section.pop(name, None)
    source = {
        "name": "nvidia/OpenMathInstruct-2",
        "split": "train_1M",
        "prompt_key": "problem",
        "answer_key": "expected_answer",
    }
    config |= {"algorithm": "grpo", "seed": 42, "env": {"reward": "math_verify"}}
    config["data"] |= {
        "train": source,
        "validation": {**source, "split": "train_1M[999000:]"},
        "max_input_seq_length": 256,
    }
    config["policy"]["generation"]["max_new_tokens"] = 256
    config["checkpointing"]["metric_name"] = "val_accuracy"
    policy = config["policy"]
    if policy["megatron_cfg"]["enabled"]:
        policy["scheduler"] = None
        for key in ("freeze_moe_router", "moe_router_dtype"):
            del policy["megatron_cfg"][key]
        policy["megatron_cfg"]["distributed_data_parallel_config"]["average_in_collective"] = False
        del policy["megatron_cfg"]["distributed_data_parallel_config"]["data_parallel_sharding_strategy"]
        policy["megatron_cfg"]["optimizer"]["use_precision_aware_optimizer"] = False
    return config


@pytest.mark.parametrize("name", THEIRS)
def test_what_the_table_says_makes_them_pass_the_dry_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump(as_the_table_says(THEIRS[name])))
    assert main(["train", str(path), "--dry-run"]) == 0, capsys.readouterr().err
    assert "Qwen/Qwen2.5-1.5B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("data.train.dataset_name", "AIME2024", "write data.train.name=AIME2024"),
        ("checkpointing.save_consolidated", False, "write checkpointing.export_hf: true in its place"),
        ("policy.megatron_cfg.moe_enable_deepep", False, "false: remove it; true: write moe_token"),
        ("policy.megatron_cfg.bias_activation_fusion", True, "remove it: kernels are fused"),
        ("grpo.reward_shaping", {"enabled": False}, "remove it if it is not enabled; else add the reward"),
        ("grpo.async_grpo.in_flight_weight_updates", False, "remove the line, or write"),
    ],
)
def test_the_fix_for_a_key_of_another_meaning_here(key: str, value: Any, fix: str, tmp_path: Path) -> None:
    config = put(raw_grpo(), key, value)
    [violation] = [each for each in refused(config, tmp_path) if each.key == key]
    assert violation.fix.startswith(fix)


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in NEVER_LEGAL.items() for value in sorted(values, key=str)],
)
def test_what_the_page_does_not_list_is_refused_everywhere(key: str, value: Any) -> None:
    for precision in ("float32", "bfloat16", "float16"):
        config = raw_grpo()
        section = config
        for part in key.split(".")[:-1]:
            section = section.setdefault(part, {})
        section[key.rpartition(".")[2]] = value
        config["policy"]["precision"] = precision
        with pytest.raises(ConfigError) as caught:
            validate_config(config)
        assert key in {violation.key for violation in caught.value.violations}
    assert (
        f"`{value}`"
        not in next(
            line for line in KEYS.splitlines() if line.startswith(f"| `{key.rpartition('.')[2]}`")
        ).split("|")[2]
    )
