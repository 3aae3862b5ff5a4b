"""What the command line lists: recipes and keys; and the end of its output where nobody reads it any more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.config.algorithms import run_type
from megarl.config.recipes import directory
from megarl.config.schema import known_paths
from tests.unit.runs import add_checkpoint, make_run
from tests.unit.test_watch_samples import add_samples, sample

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_all_shipped_files_are_listed_with_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = json.loads(listed(capsys, "recipes", "--json"))
    files = {path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml")}
    assert {row["name"] for row in rows} == files and len(rows) == len(files)
    text = listed(capsys, "recipes")
    for row in rows:
        assert row["summary"].endswith("."), row
        assert Path(row["path"]) == directory() / f"{row['name']}.yaml"
        assert f"{row['name']}\n    {row['summary']}\n" in text
        comment = " ".join(
            line.lstrip("# ") for line in Path(row["path"]).read_text().splitlines() if line.startswith("#")
        )
        assert comment.startswith(row["summary"])
    by_name = {row["name"]: row["summary"] for row in rows}
    assert by_name["distillation-qwen2.5-1.5b-from-7b-8gpu-megatron"].endswith(
        "its teacher tensor parallel 2 and data parallel 4."
    )
    assert by_name["base/vllm"].endswith("in its defaults or by --with.")


def test_a_part_of_a_recipe_is_found_by_half_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "vllm-apart"]) == 2
    assert "base/vllm-apart" in capsys.readouterr().err


def test_keys_without_a_word_are_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    names = [
        line.partition(":")[0] for line in listed(capsys, "keys").splitlines() if not line.startswith(" ")
    ]
    assert names == list(dict.fromkeys(names)) and set(names) == set(known_paths(run_type(None)))


def test_keys_are_searched_by_name_and_by_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    text = listed(capsys, "keys", "SAVE_PERIOD")
    assert (
        "checkpointing.save_period: whole number; at least 1, default 10\n    steps between checkpoints.\n"
        in text
    )
    by_meaning = listed(capsys, "keys", "learning rate", "warm-up")
    assert "policy.megatron_cfg.scheduler.lr_warmup_init" in by_meaning and "save_period" not in by_meaning
    assert "num_generations of TRL: write grpo.num_generations_per_prompt=VALUE" in listed(
        capsys, "keys", "num_generations"
    )


def test_no_such_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "no-such-word"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and "no key has no-such-word" in shown.err


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("run") / "run")
    add_checkpoint(run, 30)
    return add_samples(run, 2, [sample(2, 0, answer="word " * 100), sample(2, 1)])


PIPED = {
    "recipes": ["recipes"],
    "recipes as JSON": ["recipes", "--json"],
    "keys": ["keys"],
    "help": ["train", "--help"],
    "status": ["status", "RUN"],
    "status as JSON": ["status", "RUN", "--json"],
    "samples": ["samples", "RUN"],
    "families": ["convert", "families"],
    "a dry run": ["train", "grpo-qwen2.5-1.5b-1gpu-megatron", "--dry-run"],
}


@pytest.mark.parametrize("name", PIPED)
def test_a_reader_that_is_gone_ends_a_command_quietly(name: str, run_dir: Path) -> None:
    words = [str(run_dir) if word == "RUN" else word for word in PIPED[name]]
    program = subprocess.Popen(
        [sys.executable, "-m", "megarl", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None and program.stderr is not None
    # before it writes: what it has to say may be less than a pipe holds
    program.stdout.close()
    err = program.stderr.read()
    code = program.wait()
    # argparse itself ignores that nobody reads its help
    assert err == "" and code == (0 if name == "help" else 141), (code, err)


def test_a_converter_whose_reader_is_gone() -> None:
    command = [sys.executable, "-m", "converters", "families"]
    program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert program.stderr.read() == ""
