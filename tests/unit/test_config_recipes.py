"""Recipes by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config import load_config
from megarl.config.recipes import directory, find, recipes
from megarl.errors import ConfigError

NAME = "grpo-qwen2.5-7b-8gpu-megatron"


def test_a_name_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = directory() / f"{NAME}.yaml"
    assert find(NAME) == find(f"{NAME}.yaml") == find(str(shipped)) == shipped
    assert find("base/dtensor") == directory() / "base" / "dtensor.yaml"
    Path(NAME).write_text("seed: 1")
    assert find(NAME) == Path(NAME), "what lies here comes first"
    assert find("mine/other.yaml") == Path("mine/other.yaml"), "the reader says that it is not there"
    assert find("other.yaml") == Path("other.yaml")


def test_a_configuration_elsewhere_inherits_from_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: {NAME}.yaml\nseed: 77\n")
    assert load_config(tmp_path / "mine.yaml")["seed"] == 77
    assert load_config(tmp_path / "mine.yaml")["policy"] == load_config(find(NAME))["policy"]
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "dtensor.yaml").write_text("seed: 3\n")
    (tmp_path / "near.yaml").write_text("defaults: base/dtensor.yaml\n")
    assert load_config(tmp_path / "near.yaml") == {"seed": 3}, "what lies here comes first"


def test_an_unknown_name_lists_its_neighbours() -> None:
    with pytest.raises(ConfigError, match=rf"grpo-qwen2\.5-7b: there is neither .*did you mean {NAME}\?"):
        find("grpo-qwen2.5-7b")
    of_24gb = "grpo-qwen2.5-1.5b-1gpu-24gb-megatron"
    with pytest.raises(ConfigError, match=rf"did you mean {re.escape(of_24gb)} or "):
        find("grpo-qwen2.5-1.5b-24gb")
    for word in ("nothing-like-it", "Qwen/Qwen2.5-1.5B"):
        with pytest.raises(ConfigError, match=r"nor such a recipe\. Fix: megarl recipes lists them"):
            find(word)
    for word, meant in (("base/dtensors", "base/dtensor"), (f"configs/{NAME}", NAME)):
        with pytest.raises(ConfigError, match=rf"did you mean {meant}\?"):
            find(word)
    with pytest.raises(ConfigError, match=r"did you mean grpo-.* or one of \d+ more\?") as caught:
        find("GRPO")
    assert len(str(caught.value)) < 500


def test_a_part_of_recipes_is_not_run_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "base/dtensor", "--dry-run"]) == 2
    assert "Fix: name a recipe, and add --with base/dtensor" in capsys.readouterr().err


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    said = capsys.readouterr().out
    assert all(f"{recipe.name}\n    {recipe.summary}" in said for recipe in recipes())
