"""Whose a run's directory is: names of recipes, another recipe in it, and what recipes need of an
installation."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from megarl.cli import load_and_check, main
from megarl.config.defaults import complete_run
from megarl.config.engines import kind_of
from megarl.config.load import load_config
from megarl.config.recipes import find, misnamed_directory, name_of, recipes
from megarl.config.resume_changes import check_changes
from megarl.errors import ConfigError
from megarl.run.earlier_launch import keep_template_date, kept_configs, require_same_recipe

ROOT = Path(__file__).parents[2]
RECIPES = [recipe.name for recipe in recipes()]
QUICKSTARTS = ["sft", "grpo", "ppo", "distillation", "dpo", "rm"]
# The names under which version 0.1 put the runs of these.
CUT = {"grpo-qwen2.5-1.5b-megatron": "grpo-qwen2.5-1", "grpo-llama3.1-70b-8x8gpu-megatron": "grpo-llama3"}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("as_path", [False, True], ids=["name", "path"])
def test_the_directory_of_a_recipe_has_its_whole_name(name: str, as_path: bool) -> None:
    config = load_and_check(str(ROOT / "configs" / f"{name}.yaml") if as_path else name, [])
    assert (config["run_dir"], config["recipe"]) == (f"runs/{name}", name)
    assert config["checkpointing"]["checkpoint_dir"] == f"runs/{name}/checkpoints"


def quickstart(name: str) -> dict[str, Any]:
    """The configuration of a quickstart, whose model is made by another one."""
    file = find(f"quickstart/{name}")
    return complete_run(load_config(file, []), name_of(file))


@pytest.mark.parametrize("name", QUICKSTARTS)
def test_a_quickstart_has_a_directory_of_its_own(name: str) -> None:
    assert quickstart(name)["run_dir"] == f"runs/quickstart-{name}"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("my.v2.yaml", "my.v2"),
        ("my.1.5.yml", "my.1.5"),
        ("plain", "plain"),
        ("a/b/c.yaml", "c"),
        ("x.conf.3", "x.conf.3"),
    ],
)
def test_the_name_of_a_file_of_ones_own(tmp_path: Path, file: str, name: str) -> None:
    assert name_of(tmp_path / file) == name


def test_no_two_recipes_share_a_directory() -> None:
    names = [*RECIPES, *(f"quickstart-{name}" for name in QUICKSTARTS)]
    assert len(set(names)) == len(names) >= 27


def left_by_a_run(run_dir: Path, recipe: str | None, *, rows: int = 1) -> None:
    """What a launch leaves in the directory of its run."""
    run_dir.mkdir(parents=True)
    config: dict[str, Any] = {"seed": 1} | ({"recipe": recipe} if recipe else {})
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(rows)))


def of_recipe(recipe: str, run_dir: Path, accepts: bool = False) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "checkpointing": {"accept_changes": accepts, "checkpoint_dir": str(run_dir / "checkpoints")},
    }


def test_a_directory_refuses_another_recipe(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "one"
    left_by_a_run(run_dir, "one")
    require_same_recipe(of_recipe("one", run_dir), run_dir)
    require_same_recipe(of_recipe("two", run_dir, accepts=True), run_dir)
    with pytest.raises(
        ConfigError,
        match=r"recipe = 'two': .*one holds a run of the recipe 'one'.*Fix: give run_dir=runs/two",
    ):
        require_same_recipe(of_recipe("two", run_dir), run_dir)


def test_a_directory_in_which_nothing_was_trained_is_free(tmp_path: Path) -> None:
    run_dir = tmp_path / "one"
    left_by_a_run(run_dir, "one", rows=0)
    require_same_recipe(of_recipe("two", run_dir), run_dir)
    (run_dir / "checkpoints" / "step_3").mkdir(parents=True)
    with pytest.raises(ConfigError):
        require_same_recipe(of_recipe("two", run_dir), run_dir)


def test_a_directory_of_an_earlier_version_names_no_recipe(tmp_path: Path) -> None:
    run_dir = tmp_path / "one"
    left_by_a_run(run_dir, None)
    require_same_recipe(of_recipe("two", run_dir), run_dir)


def test_a_resume_with_another_recipe_breaks_a_promise() -> None:
    before = {"recipe": "one", "policy": {"dtensor_cfg": {"enabled": True}}}
    with pytest.raises(ConfigError, match=r"recipe = 'two'"):
        check_changes(before, {**before, "recipe": "two"}, "checkpoints/step_1", accepted=False)
    assert check_changes(before, {**before, "recipe": "two"}, "checkpoints/step_1", accepted=True) == {
        "recipe": ("one", "two")
    }


def test_a_configuration_that_a_run_left_keeps_the_recipe(tmp_path: Path) -> None:
    first = load_and_check(RECIPES[0], [f"run_dir={tmp_path}"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(first))
    again = load_and_check(str(tmp_path / "config.yaml"), [])
    assert (again["recipe"], again["run_dir"]) == (RECIPES[0], str(tmp_path))


@pytest.mark.parametrize(("name", "cut"), CUT.items())
def test_a_directory_that_an_earlier_version_misnamed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, cut: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert misnamed_directory(name, f"runs/{name}") is None
    left_by_a_run(tmp_path / "runs" / cut, None)
    assert misnamed_directory(name, f"runs/{name}") == f"runs/{cut}"
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert main(["train", name, "--dry-run"]) == 0
    assert f"run_dir=runs/{cut} resumes it" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()} == before
    # whoever names it, or has a run under the whole name, is told nothing
    assert misnamed_directory(name, f"runs/{cut}") is None
    left_by_a_run(tmp_path / "runs" / name, name)
    assert misnamed_directory(name, f"runs/{name}") is None
    assert misnamed_directory("runs", "runs/runs") is None


def test_the_configuration_of_a_copied_run_leads_to_the_original_not_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(find(RECIPES[0]), []) | {"run_dir": "runs/a"}
    for name in ("a", "b"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "launches.jsonl").touch()
        Path("runs", name, "config.yaml").write_text(yaml.safe_dump(config))
    for words, is_told in (
        (["runs/b/config.yaml"], True),
        (["runs/b/config.yaml", "run_dir=runs/b"], False),
        (["runs/b/config.yaml", "run_dir=runs/c"], False),
        (["runs/a/config.yaml"], False),
        ([RECIPES[0]], False),
    ):
        assert main(["train", *words, "--dry-run"]) == 0
        assert ("run_dir=runs/b resumes the run in runs/b" in capsys.readouterr().err) is is_told


def test_a_recipe_in_a_directory_resumes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``quickstart`` is no directory here, only a part of the recipe's name."""
    monkeypatch.chdir(tmp_path)
    Path("runs", "mine").mkdir(parents=True)
    words = ["quickstart/grpo", "run_dir=runs/mine", "policy.model_name=Qwen/Qwen2.5-1.5B"]
    assert main(["train", *words, "--dry-run"]) == 0


def test_a_resumed_run_keeps_the_day_of_its_first_start(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "policy": {"tokenizer": {"name": "m"}},
        "checkpointing": {"resume": "auto", "checkpoint_dir": str(tmp_path / "c")},
    }
    dated = {"policy": {"tokenizer": {"template_date": "2026-02-03"}}}
    keep_template_date(config, kept_configs(config, tmp_path))
    assert config["policy"]["tokenizer"] == {"name": "m"}
    # a checkpoint alone was brought here
    (tmp_path / "c" / "step_4").mkdir(parents=True)
    (tmp_path / "c" / "step_4" / "config.yaml").write_text(yaml.safe_dump(dated))
    keep_template_date(config, kept_configs(config, tmp_path))
    assert config["policy"]["tokenizer"].pop("template_date") == "2026-02-03"
    # a run that starts over has a day of its own
    over = {**config, "checkpointing": {**config["checkpointing"], "resume": "never"}}
    keep_template_date(over, kept_configs(over, tmp_path))
    assert config["policy"]["tokenizer"] == {"name": "m"}
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"policy": {"tokenizer": {"template_date": "2026-01-01"}}})
    )
    keep_template_date(config, kept_configs(config, tmp_path))
    assert config["policy"]["tokenizer"]["template_date"] == "2026-01-01"
    config["policy"]["tokenizer"]["template_date"] = "2026-05-06"
    keep_template_date(config, kept_configs(config, tmp_path))
    assert config["policy"]["tokenizer"]["template_date"] == "2026-05-06"


# what recipes need


def distributions_needed(config: dict[str, Any]) -> Iterator[str]:
    """Names of the distributions that a configuration needs: its sinks, its engine, its rewards and its
    plots."""
    yield "matplotlib"
    logger = config["logger"]
    yield from ("tensorboard" for _ in range(bool(logger.get("tensorboard_enabled"))))
    yield from ("wandb" for _ in range(bool(logger.get("wandb_enabled"))))
    kind = kind_of(config["policy"]["generation"])
    yield from () if kind is None else kind.distributions[:1]
    if '"math"' in json.dumps(config.get("env", {})):
        yield "math-verify"


def installed_by(extras: str) -> set[str]:
    """Names of the distributions of megarl with extras, as ``plot,vllm``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in extras.split(",") for each in project["optional-dependencies"][extra]),
    ]
    return {Requirement(each).name for each in wanted}


def extras_in(file: str, pattern: str) -> str:
    [found] = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"))
    return str(found)


def test_every_recipe_finds_what_it_needs_in_the_environment_that_its_instructions_make() -> None:
    by_hand = extras_in("README.md", r"pip install -c constraints-cpu.txt -e '\.\[([a-z,]+)\]'")
    script = extras_in("launch/environment.sh", r"extras=(plot[a-z,]*) ")
    gpus = ",".join(
        re.findall(r"extras\+?=,?([a-z]+)$", (ROOT / "launch/gpu_environment.sh").read_text(), re.MULTILINE)
    )
    assert "vllm" in gpus
    for name in RECIPES:
        config = load_and_check(name, [])
        assert config["cluster"]["device"] == "cuda"
        needed = set(distributions_needed(config))
        assert "tensorboard" in needed and needed <= installed_by(gpus), name
    for name in QUICKSTARTS:
        needed = set(distributions_needed(quickstart(name)))
        assert needed <= installed_by(by_hand) and needed <= installed_by(script), name


def test_an_installation_without_tensorboard_is_found_wanting() -> None:
    needed = set(distributions_needed(load_and_check(RECIPES[0], [])))
    assert not needed <= installed_by("vllm")
