"""``--dry-run --data``: what a run would read, and what it would refuse of it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from megarl.cli import main
from megarl.quickstart.material import make_model, write_problems

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A dry run of the quickstart's reinforcement on a model and on problems in ``tmp_path``."""
    make_model(tmp_path / "model", 1)
    write_problems(tmp_path / "train.jsonl", 300, 1)
    write_problems(tmp_path / "validation.jsonl", 256, 2, "validation")
    sources = [f"data.{part}.path={tmp_path / part}.jsonl" for part in ("train", "validation")]
    return [
        "train",
        str(QUICKSTART / "grpo.yaml"),
        "--dry-run",
        f"policy.model_name={tmp_path / 'model'}",
        *sources,
    ]


def test_tokenizer_template_and_records_are_reported(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0
    plain = capsys.readouterr().out
    assert main([*command, "--data"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(plain) and "data.train:" not in plain
    lines = shown[len(plain) :].splitlines()
    assert lines[0].startswith("tokenizer: ") and "pads with" in lines[0]
    assert lines[1] == "responses end with: '<eos>' (1: tokenizer, generation_config.json, config.json)"
    assert lines[2].startswith("chat template: {% for message in messages %}")
    joined = " ".join(lines)
    assert (
        "data.train: 300 records; prompts of " in joined
        and "data.validation: 256 records; prompts of " in joined
    )


def test_what_a_run_would_refuse_of_the_data_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "Tom has 3 apples. " * 20, "answer": "4"}) + "\n")
    assert main(command) == 0, "a plain dry run reads no data"
    capsys.readouterr()
    assert main([*command, "--data"]) == 2
    shown = capsys.readouterr()
    assert (
        "exceed data.max_input_seq_length = 24" in shown.err and "index 300" in shown.err and shown.out == ""
    )


def test_a_template_that_fails_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--data", "policy.tokenizer.chat_template='{{ nobody.knows.it }}'"]) == 2
    assert "policy.tokenizer.chat_template cannot be applied" in capsys.readouterr().err


def test_the_sources_of_the_page_are_read(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of ``configs/README.md``, on files of the forms that it names."""
    page = (QUICKSTART.parent / "README.md").read_text(encoding="utf-8").split("## Data\n")[1]
    data = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["data"]
    (tmp_path / "gsm8k.jsonl").write_text(
        "\n".join([json.dumps({"question": "1+1=", "answer": "one and one\n#### 2"})] * 3)
    )
    problem = {"prompt": [{"role": "user", "content": "1+2="}], "reward_model": {"ground_truth": 3}}
    parquet.write_table(pyarrow.Table.from_pylist([problem] * 4), tmp_path / "problems.parquet")
    turns = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 5))
    data["train"][0]["path"], data["max_input_seq_length"] = "gsm8k.jsonl", 24
    for source in (*data["train"], *data["validation"]):
        source["path"] = str(tmp_path / source["path"])
    changes = [f"data.{key}={json.dumps(value)}" for key, value in data.items()]
    assert main([*command, "--data", *changes]) == 2
    assert "data.train has 7 records" in capsys.readouterr().err, "a step takes 64"
    sizes = ["grpo.num_prompts_per_step=4", "policy.train_global_batch_size=16"]
    assert main([*command, "--data", *changes, *sizes]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert all(
        each in shown
        for each in ("data.train:7records", "gsm8k.jsonl:3", "problems.parquet:4", "data.validation:5records")
    )


def test_your_data_in_five_minutes(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of the page, as it has them, in an empty directory."""
    page = (
        (QUICKSTART.parent / "README.md")
        .read_text(encoding="utf-8")
        .split("## Your data in five minutes\n")[1]
        .split("\n## ")[0]
    )
    monkeypatch.chdir(tmp_path)
    for fence, name in (("python", "make_data.py"), ("python", "my_reward.py"), ("yaml", "my-data.yaml")):
        [text] = [
            each.split("```")[0] for each in page.split(f"```{fence}\n")[1:] if each.startswith(f"# {name}\n")
        ]
        Path(name).write_text(text)
    exec(compile(Path("make_data.py").read_text(), "make_data.py", "exec"), {})
    shown = [line for line in page.splitlines() if line.startswith('{"')]
    assert [Path(f"{name}.jsonl").read_text().splitlines()[0] for name in ("nested", "chats")] == shown[:2]
    model = command[3]
    for recipe in (["quickstart/grpo", model, "--data"], ["grpo-qwen2.5-7b-8gpu-megatron"]):
        assert main(["train", recipe[0], "--with", "my-data.yaml", "--dry-run", *recipe[1:]]) == 0, (
            capsys.readouterr().err
        )
    said = " ".join(capsys.readouterr().out.split())
    assert all(line in said for line in page.splitlines() if line.startswith("data."))


def test_data_without_a_dry_run_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*(word for word in command if word != "--dry-run"), "--data"])
    assert caught.value.code == 2 and "--data goes with --dry-run" in capsys.readouterr().err
