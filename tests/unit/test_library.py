"""``megarl.train`` up to the point where its process starts: arguments, rows and functions; and the tables
that a run is read as."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import megarl
from megarl import import_path
from megarl.config.nested import at
from megarl.errors import ConfigError, MegarlError, WorkerLostError
from megarl.library import calls
from megarl.library.process import error_of, run_command
from megarl.library.run import Metrics, Run, new_directory
from megarl.observe.metrics_file import encoded
from megarl.rollout.reward_pool import RewardPool
from megarl.rollout.rewards import RewardSpec, Task
from tests.unit.tiny_model import make_tiny_model

ROWS = [{"prompt": f"{each}+1=", "answer": str(each + 1)} for each in range(12)]
Call = Callable[..., dict[str, Any]]


def right(response: str, answer: str) -> float:
    return float(response == answer)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(import_path, "_given", {})
    make_tiny_model(Path("model"), seed=1)
    yield


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Call:
    """The configuration that a call starts a process with, which is not started here."""

    class Started(Exception):
        pass

    def call(*arguments: Any, **named: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def run(words: list[str], given: dict[str, bytes], *, shows: bool) -> tuple[int, str]:
            found.update(yaml.safe_load(Path(words[1]).read_text()), given=sorted(given), words=words)
            train = found["data"]["train"]
            found["rows"] = (
                Path(train["path"]).read_text() if train.get("path", "").endswith(".jsonl") else None
            )
            found["rewards"] = Path(words[1]).with_name("rewards.py").read_text() if given else None
            raise Started

        monkeypatch.setattr(calls, "run_command", run)
        with pytest.raises(Started):
            megarl.train(*arguments, **named)
        return found

    return call


def refusals(*arguments: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        megarl.train(*arguments, **named)
    assert not list(Path("runs").glob("*")), "what is refused leaves nothing behind"
    return str(caught.value)


def test_the_shortest_call_says_everything_that_a_run_needs(called: Call) -> None:
    config = called("grpo", "model", ROWS, right, max_num_steps=3, learning_rate=1e-3, max_new_tokens=5)
    assert config["env"] == {"reward": "given:right"} and config["given"] == ["given:right"]
    assert [json.loads(line) for line in config["rows"].splitlines()] == ROWS
    assert "return float(response == answer)" in config["rewards"]
    assert config["grpo"]["max_num_steps"] == 3 and config["policy"]["generation"] == {"max_new_tokens": 5}
    assert config["policy"]["megatron_cfg"]["optimizer"] == {"lr": 1e-3, "min_lr": 1e-4}
    assert config["run_dir"] == "runs/grpo-model-1"


def test_sections_whole_keys_and_keys_of_fields_are_overrides(called: Call) -> None:
    rows = [{"q": each["prompt"], "a": each["answer"]} for each in ROWS]
    section = {
        "policy": {"precision": "bfloat16"},
        "policy.generation.top_k": 7,
        "checkpointing": {"save_period": 2},
    }
    config = called(
        "dapo",
        "model",
        rows,
        "math",
        prompt_key="q",
        answer_key="a",
        backend="dtensor",
        learning_rate=2e-5,
        **section,
    )
    assert config["defaults"] == [
        f"base/{name}.yaml" for name in ("grpo", "dapo", "megatron", "dtensor", "small")
    ]
    assert config["policy"]["precision"] == "bfloat16" and config["policy"]["generation"]["top_k"] == 7
    assert (
        config["policy"]["optimizer"] == {"kwargs": {"lr": 2e-5}}
        and config["checkpointing"]["save_period"] == 2
    )
    assert (config["data"]["train"]["prompt_key"], config["data"]["train"]["answer_key"]) == ("q", "a")


def test_a_recipe_keeps_its_sizes_and_takes_what_is_given(called: Call) -> None:
    sizes = {
        "max_total_sequence_length": 64,
        "max_input_seq_length": 32,
        "max_new_tokens": 32,
        "train_global_batch_size": 32,
    }
    config = called("grpo-qwen2.5-1.5b-1gpu-megatron", "model", ROWS, right, num_prompts_per_step=4, **sizes)
    assert config["defaults"].endswith("grpo-qwen2.5-1.5b-1gpu-megatron.yaml")
    assert config["grpo"] == {"num_prompts_per_step": 4} and "precision" not in config["policy"]


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("grpo-qwen2.5-1.5b-megatron", "policy.megatron_cfg.optimizer.lr"),
        ("grpo-qwen2.5-1.5b-dtensor", "policy.optimizer.kwargs.lr"),
        ("grpo-qwen2.5-1.5b-fsdp1", "policy.optimizer.kwargs.lr"),
        ("quickstart/grpo", "policy.learning_rate"),
    ],
)
def test_the_learning_rate_of_a_recipe_is_that_of_its_backend(called: Call, recipe: str, key: str) -> None:
    lengths = {"max_total_sequence_length": 64, "max_input_seq_length": 32, "max_new_tokens": 32}
    config = called(recipe, "model", ROWS, right, learning_rate=1e-3, **lengths)
    assert at(config, key) == 1e-3
    assert json.dumps(config["policy"]).count("0.001") == 1


def test_an_evaluation_refuses_what_only_training_reads() -> None:
    with pytest.raises(ConfigError) as caught:
        megarl.eval("model", ROWS, right, temperature=0.7, num_generations_per_prompt=8, val_top_k=5)
    text = str(caught.value)
    assert "temperature = 0.7: it applies to training steps" in text and "write val_temperature" in text
    assert "write val_num_generations_per_prompt" in text and "top_k" not in text


def test_rows_of_a_generator_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def run(words: list[str], given: dict[str, bytes], *, shows: bool) -> tuple[int, str]:
        call = yaml.safe_load(Path(words[1]).read_text())
        read.append(len(Path(call["data"]["validation"]["path"]).read_text().splitlines()))
        Path(words[words.index("--json") + 1]).write_text("{}")
        return 0, ""

    monkeypatch.setattr(calls, "run_command", run)
    assert megarl.eval("model", (row for row in ROWS), right) == {}
    assert read == [len(ROWS)]


def test_a_reward_of_the_response_alone_needs_no_answers_and_one_of_a_column_gets_it(called: Call) -> None:
    alone = called("grpo", "model", [{"prompt": "say it"}] * 9, lambda response: len(response))
    assert {row["answer"] for row in map(json.loads, alone["rows"].splitlines())} == {""}
    assert alone["env"]["reward"] == "given:reward"
    levels = [{**row, "level": np.int64(2)} for row in ROWS]
    by_column = called("grpo", "model", levels, lambda response, level: level)
    assert (
        by_column["data"]["train"]["extra_keys"] == ["level"]
        and json.loads(by_column["rows"].splitlines()[0])["level"] == 2
    )


def test_several_rewards_have_names_and_weights(called: Call) -> None:
    config = called("grpo", "model", ROWS, [right, right, "exact_match"])
    assert (
        list(config["env"]["rewards"]) == ["right", "right_2", "exact_match"]
        and config["env"]["reward"] is None
    )
    weighted = called("grpo", "model", ROWS, {"main": {"reward": right, "weight": 0.5}, "form": "format"})
    assert weighted["env"]["rewards"] == {
        "main": {"reward": "given:right", "weight": 0.5},
        "form": {"reward": "format"},
    }


def test_tables_and_data_sets_are_written_as_they_are(called: Call) -> None:
    import pandas
    from datasets import Dataset

    for table in (pandas.DataFrame(ROWS), Dataset.from_list(ROWS)):
        path = Path(called("grpo", "model", table, right)["data"]["train"]["path"])
        assert path.suffix == ".parquet"


def test_a_table_s_columns_that_a_reward_cannot_be_given_are_left_out(called: Call) -> None:
    import pandas

    def all_of(response: str, record: dict[str, Any]) -> float:
        return 1.0

    dated = pandas.DataFrame([{**row, "at": pandas.Timestamp("2024-01-01"), "level": 1} for row in ROWS])
    config = called("grpo", "model", dated, all_of, validation=ROWS)
    assert (
        config["data"]["train"]["extra_keys"] == ["level"]
        and "extra_keys" not in config["data"]["validation"]
    )
    differing = [{**ROWS[0], "level": 1, "q[x": 2}, *ROWS[1:]]
    assert "extra_keys" not in called("grpo", "model", differing, all_of)["data"]["train"]
    mixed = pandas.DataFrame({"prompt": ["a", "b"], "answer": [1, "x"]})
    assert "it cannot be stored as a table" in refusals("grpo", "model", mixed, right)


def test_a_named_set_to_validate_on_keeps_its_fields(called: Call) -> None:
    rows = [{"q": each["prompt"], "answer": each["answer"]} for each in ROWS]
    config = called("grpo", "model", rows, right, validation="AIME2024", prompt_key="q")
    assert config["data"]["validation"] == {"name": "AIME2024"}
    assert config["data"]["train"]["prompt_key"] == "q"


def test_everything_that_is_wrong_is_said_at_once_in_the_words_of_the_call() -> None:
    text = refusals(
        "grpo",
        model="./absent",
        data=[{"x": 1}],
        reward=lambda one, two: 1.0,
        max_num_step=3,
        num_generations_per_prompt=1,
    )
    for part in (
        "5 configuration errors",
        "model = './absent': there is no such directory",
        "data = 'x': by their usual names, its columns (x)",
        "max_num_step = 3: megarl.train has no such argument",
        "did you mean max_num_steps",
        "num_generations_per_prompt (grpo.num_generations_per_prompt) = 1",
        "reward (env.reward) = '<lambda>': there is no value for its parameters 'one', 'two'",
    ):
        assert part in text
    assert "model = None" in (text := refusals("grpo")) and "data = None" in text and "reward = None" in text


@pytest.mark.parametrize(
    ("argument", "value", "fix"),
    [
        ("dataset", ROWS, "did you mean data?"),
        ("reward_funcs", right, "did you mean reward?"),
        ("steps", 2, "did you mean max_num_steps?"),
        ("max_steps", 2, "did you mean max_num_steps?"),
        ("num_gpus", 2, "did you mean gpus_per_node?"),
        ("tp", 2, "did you mean tensor_model_parallel_size?"),
        ("output_dir", "x", "write run_dir=x"),
        ("reward_model_name_or_path", "x", "write reward_model.model_name=x"),
        ("nonsense", 2, "megarl keys WORD finds keys"),
    ],
)
def test_a_guessed_argument_is_answered_by_the_one_that_is_meant(
    argument: str, value: object, fix: str
) -> None:
    assert f"Fix: {fix}" in refusals("grpo", "model", ROWS, right, **{argument: value})


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    assert "run_dir = " in refusals("grpo", "model", ROWS, right, run_dir=str(tmp_path / "run"))


def test_an_environment_of_ones_own_has_its_own_rewards(called: Call) -> None:
    environment = f"{Path(__file__).parents[1] / 'toys' / 'guess.py'}:Guess"
    config = called("grpo", "model", ROWS, environment=environment, max_rollout_turns=3, gpus_per_node=2)
    assert config["env"] == {"environment": environment} and config["cluster"] == {"gpus_per_node": 2}
    text = refusals("grpo", "model", ROWS, right, environment=Call, tokenizer={"chat_template": [len]})
    assert "environment = '_CallableGenericAlias': no configuration can hold it" in text
    assert "tokenizer = 'builtin_function_or_method': no configuration can hold it" in text
    odd = {"math": {"weight": torch.float32}}
    assert "reward = 'dtype': no configuration can hold it" in refusals("grpo", "model", ROWS, odd)
    assert "environment (env.environment) = 3" in refusals("grpo", "model", ROWS, right, environment=3)


def test_values_of_other_libraries_are_plain(called: Call) -> None:
    class Precision(StrEnum):
        HALF = "bfloat16"

    plain = {
        "precision": Precision.HALF,
        "learning_rate": np.float32(0.5),
        "stop_token_ids": np.array([3, 5]),
    }
    config = called("grpo", "model", ROWS, right, **plain)
    assert config["policy"]["precision"] == "bfloat16"
    assert config["policy"]["generation"]["stop_token_ids"] == [3, 5]
    assert config["policy"]["megatron_cfg"]["optimizer"]["lr"] == 0.5


def test_other_mistakes() -> None:
    assert "did you mean 'grpo'?" in refusals("grop", "model", ROWS, right)
    assert "trains a second model" in refusals("ppo", "model", ROWS, right)
    assert "backend = 'torch': there is no such" in refusals("grpo", "model", ROWS, right, backend="torch")
    assert "'nowhere.jsonl': there is no such file" in refusals("grpo", "model", "nowhere.jsonl", right)
    assert "data[1] = '3': it is int, not a dictionary" in refusals("grpo", "model", [ROWS[0], 3], right)
    assert "data = []: it has no rows" in refusals("grpo", "model", [], right)
    assert "reward = 3: it is neither a function" in refusals("grpo", "model", ROWS, 3)
    assert "sft samples no responses to reward" in refusals("sft", "model", ROWS, right)
    assert "it must be a directory or a hub id" in refusals("grpo", object(), ROWS, right)
    handle = sys.stdout
    assert "cannot be sent to the processes" in refusals(
        "grpo", "model", ROWS, lambda response: handle.fileno()
    )


def test_a_refused_call_leaves_an_earlier_one_of_its_run_as_it_was(called: Call) -> None:
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("kept: true\n")
    called("grpo", "model", ROWS, right, run_dir="mine", max_num_steps=3)
    before = {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError):
        megarl.train(
            "grpo", "model", [{"prompt": "other", "answer": "rows"}], right, run_dir="mine", max_num_steps=-1
        )
    assert {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()} == before


def _refuse_beside_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command of a call refuse, as it does where a live run holds the lock, while that run writes."""

    def run(words: list[str], given: dict[str, bytes], *, shows: bool) -> tuple[int, str]:
        directory = Path(words[1]).parent
        (directory / "run.lock").write_text('{"pid": 1}')
        (directory / "checkpoints/step_1").mkdir(parents=True)
        (directory / "checkpoints/step_1/weights").write_text("weights")
        return 2, "megarl: in use"

    monkeypatch.setattr(calls, "run_command", run)


@pytest.mark.parametrize("is_run", [True, False])
def test_a_refused_call_removes_no_file_of_other_programs(
    called: Call, monkeypatch: pytest.MonkeyPatch, is_run: bool
) -> None:
    directory, others = Path("theirs"), {"notes.txt": b"notes", "data/data-0.jsonl": b"{}"}
    if is_run:
        others |= {"config.yaml": b"kept: true", "call.yaml": b"call: 1", "rewards.py": b"# rewards"}
    for name, content in others.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    _refuse_beside_another_run(monkeypatch)
    with pytest.raises(ConfigError, match="in use"):
        megarl.train("grpo", "model", ROWS, right, run_dir=directory, max_num_steps=3)
    found = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    theirs = {"run.lock": b'{"pid": 1}', "checkpoints/step_1/weights": b"weights"}
    assert {name: path.read_bytes() for name, path in found.items()} == others | theirs


def test_a_refused_call_leaves_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "run_command", lambda *words, **named: (2, "megarl: refused"))
    before = sorted(Path().rglob("*"))
    for run_dir in ("new/below", None):
        with pytest.raises(ConfigError):
            megarl.train("grpo", "model", ROWS, right, run_dir=run_dir, max_num_steps=3)
    assert [path for path in sorted(Path().rglob("*")) if path not in before] == [Path("runs")]


def test_a_closure_scores_in_the_processes_of_the_pool_and_the_newest_of_a_name_counts() -> None:
    import cloudpickle

    def give(bonus: float) -> None:
        def function(response: str) -> float:
            return len(response) + bonus

        import_path.give_object("function", function, cloudpickle.dumps(function))

    for bonus in (0.5, 2.0):
        give(bonus)
        pool = RewardPool([RewardSpec("given:function")], 1)
        assert pool.score([(0, Task("four", ""))])[0].value == 4 + bonus
        pool.close()


def test_a_process_that_has_not_the_object_says_how_to_go_on() -> None:
    with pytest.raises(ConfigError, match=r"call megarl\.train with it again and the same run_dir"):
        import_path.load_object("given:gone", "env.reward")
    with pytest.raises(ConfigError, match="cannot be recreated in another process"):
        import_path.unpickle_object("given:gone", b"no pickle")


def test_a_pool_says_what_it_cannot_make_again() -> None:
    import_path.give_object("torn", right, b"no pickle")
    with pytest.raises(ConfigError, match="cannot be recreated in another process"):
        RewardPool([RewardSpec("given:torn")], 1)


def test_errors_of_the_command_become_errors_of_their_kinds() -> None:
    code, text = run_command(["train", "absent.yaml"], {}, shows=False)
    error = error_of(code, text)
    assert (
        isinstance(error, ConfigError)
        and "absent.yaml" in str(error)
        and not str(error).startswith("megarl:")
    )
    assert type(error_of(4, "megarl: gone")) is WorkerLostError
    assert type(error_of(1, "")) is MegarlError and "ended with 1" in str(error_of(1, ""))


def test_a_command_that_ends_before_it_reads_says_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:

    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(subprocess, "Popen", Ended)
    assert run_command(["train"], {}, shows=False) == (1, "")


@pytest.mark.parametrize(("shows", "keeps_all"), [(False, False), (True, False), (False, True)])
def test_long_output_is_whole_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, shows: bool, keeps_all: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversion that leaves out many tensors prints one of their names a line, in one object of JSON."""
    names = [f"layers.{number}" for number in range(500)]
    program = f"import json; print(json.dumps({{'left_out': {names}}}, indent=1))"
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda _, **options: real([sys.executable, "-c", program], **options),
    )
    code, text = run_command(["convert"], {}, shows=shows, keeps_all=keeps_all)
    assert code == 0 and capsys.readouterr().out.count("\n") == 504 * shows
    if keeps_all:
        assert json.loads(text) == {"left_out": names}
    else:
        assert text.count("\n") == 200


def test_options_of_a_conversion_are_those_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[str]] = []

    def run(words: list[str], given: dict[str, bytes], *, shows: bool, keeps_all: bool) -> tuple[int, str]:
        assert keeps_all
        begun.append(words)
        return 2, ""

    monkeypatch.setattr(calls, "run_command", run)
    options: list[dict[str, Any]] = [
        {"eos_token_id": 0, "overwrite": True},
        {"eos_token_id": [0, 1], "overwrite": False, "vocab_size": None},
        {"ignore_setting": ["one", "other"]},
    ]
    for each in options:
        with pytest.raises(ConfigError):
            megarl.convert("model", "target", **each)
    assert [words[4:] for words in begun] == [
        ["--json", "--eos-token-id", "0", "--overwrite"],
        ["--json", "--eos-token-id", "0,1"],
        ["--json", "--ignore-setting", "one", "--ignore-setting", "other"],
    ]


def test_metrics_are_columns_with_a_value_for_each_step() -> None:
    run_dir = Path("runs/some")
    run_dir.mkdir(parents=True)
    rows = [
        {"step": 0, "time": 1.0, "validation/accuracy": 0.25},
        {"step": 1, "time": 2.0, "train/reward": 0.5, "train/loss": 1.0},
        {"step": 2, "time": 3.0, "train/reward": 0.75, "train/loss": 0.5, "validation/accuracy": 0.5},
    ]
    (run_dir / "metrics.jsonl").write_bytes(b"".join(encoded(row) for row in rows))
    metrics = Run(run_dir).metrics
    assert metrics["step"] == [0, 1, 2] and metrics["reward"] == metrics["train/reward"] == [None, 0.5, 0.75]
    assert metrics["accuracy"] == [0.25, None, 0.5]
    assert repr(metrics).splitlines()[0].split() == ["step", "loss", "reward", "accuracy"]
    assert "<td>0.75</td>" in metrics._repr_html_()
    with pytest.raises(KeyError, match="there are step"):
        metrics["rewards"]
    assert repr(Metrics()).endswith("0 steps, 0 columns")


def test_directories_of_runs_are_numbered() -> None:
    assert [new_directory("grpo-model") for _ in range(2)] == [
        Path("runs/grpo-model-1"),
        Path("runs/grpo-model-2"),
    ]


def test_importing_the_package_stays_light_and_has_the_library() -> None:
    program = (
        "import sys, megarl; assert not {'torch', 'ray', 'yaml'} & set(sys.modules); "
        "print(megarl.eval, megarl.convert, megarl.Run)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.count("megarl") >= 1 and "evaluate" in said
    assert {"train", "eval", "convert", "Run"} <= set(dir(megarl))
    with pytest.raises(AttributeError):
        _ = megarl.trian  # type: ignore[attr-defined]


def test_the_readme_trains_on_rows_of_ones_own_in_six_lines(called: Call) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    program = text.partition("## Six lines of Python")[2].partition("```python\n")[2].partition("```")[0]
    assert 1 < len([line for line in program.splitlines() if line.strip()]) <= 6
    rows, _, rest = program.partition("run = megarl.train")
    space: dict[str, Any] = {"called": called}
    # as printed, but for the model, which is on the hub, and for what only a run that has trained can do
    exec(f"{rows}found = called{rest.splitlines()[0]}".replace("Qwen/Qwen2.5-0.5B-Instruct", "model"), space)
    assert (
        space["found"]["env"] == {"reward": "given:reward"}
        and len(space["found"]["rows"].splitlines()) == 10_000
    )
