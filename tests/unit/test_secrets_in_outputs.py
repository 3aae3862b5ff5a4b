"""No command shows a secret of the environment, of a configuration or of its own command line, whatever
becomes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl import redaction
from megarl.cli import main
from megarl.config import load_config
from megarl.errors import ConfigError
from megarl.redaction import HIDDEN
from megarl.run.run import run
from tests.tables import read_table
from tests.unit.driver_runs import PolicyMaker, make_config

TOYS = Path(__file__).parents[1] / "toys"
TABLES = read_table("secrets_in_outputs.yaml")

PLANTED = {
    name: f"{name}-hunter2-{'long-' * 12}end"
    for name in ("variable", "taken", "assigned", "below", "address", "argument", "word", "repeated")
}
"""Secrets by where they stand; each is longer than half a line of the report, so that the console breaks
it."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_learned", set())
    monkeypatch.setenv("MY_JUDGE_TOKEN", PLANTED["variable"])
    # neither its name nor its form says that it is one
    monkeypatch.setenv("MEGARL_TEST_PLACE", PLANTED["taken"])


def config_with_secrets(tmp_path: Path, model: str, data: str) -> dict[str, Any]:
    config = make_config("grpo", tmp_path / "run", model, data)
    config["policy"]["megatron_cfg"]["env_vars"] = {
        "HF_TOKEN": PLANTED["assigned"],
        "EXTRA": f"DB_PASSWORD={PLANTED['word']}",
        "SAME": f"again {PLANTED['repeated']}",
    }
    options = {
        "api_key": [PLANTED["below"], PLANTED["repeated"]],
        "judge": f"https://me:{PLANTED['address']}@host/score?access_token={PLANTED['argument']}",
        "place": "${oc.env:MEGARL_TEST_PLACE}",
        "variable": "${oc.env:MY_JUDGE_TOKEN}",
    }
    # the options of an environment that reads them
    own = {"environment": f"{TOYS}/as_long.py:AsLong", "options": {"farthest": 7, **options}}
    config["env"] = {**config.get("env", {}), **own}
    return config


@pytest.fixture
def file(tmp_path: Path, model: str, data: str) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(config_with_secrets(tmp_path, model, data)))
    return str(path)


@pytest.fixture
def finished(tmp_path: Path, file: str) -> str:
    """A run with that configuration."""
    assert run(load_config(file, allow_env=True), PolicyMaker()) == 0
    return str(tmp_path / "run")


def outputs(
    words: Sequence[str], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> tuple[int, str]:
    """Exit code and all that a command says; it may break a line anywhere."""
    try:
        code = main(list(words))
    except SystemExit as error:
        code = int(error.code or 0)
    said = capfd.readouterr()
    return code, said.out + said.err + caplog.text


def found_in(text: str) -> list[str]:
    """Names of the secrets of which more than a third stands in a text."""
    whole = re.sub(r"\s", "", text)
    return [name for name, secret in PLANTED.items() if secret[: len(name) + 8] in whole]


def test_dry_runs_show_the_rest_of_the_configuration(
    file: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for words in (
        ["train", file, "--dry-run"],
        ["train", file, "--dry-run", "--data"],
        ["eval", file, "--dry-run"],
    ):
        code, text = outputs([*words, "--allow-env"], capfd, caplog)
        assert (code, found_in(text)) == (0, []), text
        if "train" in words:
            assert (
                f"HF_TOKEN: '{HIDDEN}'" in text
                and f"https://{HIDDEN}@host/score?access_token={HIDDEN}" in text
            )
            assert "place: ${oc.env:MEGARL_TEST_PLACE}" in text and "max_num_steps: 4" in text
    assert outputs(["train", file, "--dry-run"], capfd, caplog)[0] == 2


COMMANDS = TABLES["commands"]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_shows_one(
    command: str,
    finished: str,
    file: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = [{"RUN": finished, "FILE": file}.get(word, word) for word in COMMANDS[command]]
    code, text = outputs(words, capfd, caplog)
    assert found_in(text) == [], text
    assert text and code in (0, 1, 2)


def test_nor_does_a_file_of_a_run(finished: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", finished]) == 0
    files = [path for path in Path(finished).rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"config.yaml", "report.html", "metrics.jsonl", "launches.jsonl"}
    known = {
        str(path): found_in(path.read_text(errors="replace"))
        for path in files
        if path.suffix in {".yaml", ".html", ".jsonl", ".json"}
    }
    assert json.dumps({path: names for path, names in known.items() if names}) == "{}"


def test_an_error_names_the_variable_and_not_what_it_holds(tmp_path: Path, model: str, data: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(config_with_secrets(tmp_path, model, data)))
    value = load_config(path, allow_env=True)["env"]["options"]["place"]
    assert (
        value == PLANTED["taken"]
        and redaction.shown("env.options.place", value) == "'${oc.env:MEGARL_TEST_PLACE}'"
    )


@pytest.mark.parametrize(
    "value", [f"DB_PASSWORD={HIDDEN}", f"again {HIDDEN}", f"/data/{HIDDEN}/model", f"https://{HIDDEN}@host"]
)
def test_a_file_of_a_run_is_not_started_with_what_was_hidden(value: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump({"env": {"options": {"note": value, "marked": "a ***word*** of Markdown\n\n****\n"}}})
    )
    with pytest.raises(
        ConfigError,
        match=r"^1 configuration error:\n.*env\.options\.note = .*it was hidden when this file was written",
    ):
        load_config(path)
