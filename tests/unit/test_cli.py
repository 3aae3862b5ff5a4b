"""The command line: exit codes, what goes to which stream, dry runs, and the recipes that come with the
project."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from converters.errors import ConversionError
from megarl import __version__
from megarl.cli import load_and_check, main
from megarl.config import load_config, validate_config
from megarl.errors import CheckpointError, DataError, WorkerError
from tests.unit.config_samples import raw_grpo

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(CONFIGS.glob("*-qwen2.5-1.5b-megatron.yaml"))
QWEN_1_5B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(raw_grpo()))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_1_5B))
    return folder


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    """Puts a module in the place of one that another room provides."""
    replacement = types.ModuleType(module)
    vars(replacement).update(functions)
    monkeypatch.setitem(sys.modules, module, replacement)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"megarl {__version__}"


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["plan", "c.yaml"], "write megarl train CONFIG --dry-run"),
        (["evaluate", "c.yaml"], "write megarl eval"),
        (["quickstart/grpo"], "write megarl train quickstart/grpo"),
        (["samples", "run", "--steps", "2"], "did you mean --step?"),
        (["convert", "import", "m", "out", "--tp", "2"], "megarl convert import --help lists what there is"),
    ],
)
def test_a_guessed_command_or_option_is_answered(
    arguments: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert capsys.readouterr().err.rstrip().endswith(fix)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["nonsense"],
        ["plot"],
        ["status"],
        ["status", "one", "two"],
        ["doctor", "run"],
        ["train", "c.yaml", "--dryrun"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: megarl" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_recipes_are_valid(recipe: Path, model: Path) -> None:
    config = load_and_check(str(recipe), [f"policy.model_name={model}"])
    assert config["run_dir"] == f"runs/{recipe.stem}"
    assert config["policy"]["tokenizer"]["name"] == str(model)


def test_there_are_recipes() -> None:
    assert len(RECIPES) == 4


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_dry_run_fits_100_columns_and_shows_everything(
    recipe: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe), "--dry-run", f"policy.model_name={model}", "cluster.num_nodes=4"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    tensor = 1 if "grpo" in recipe.stem else 2
    assert f"32 ranks: pipeline 1 x data {32 // tensor} x context 1 x tensor {tensor}" in out
    assert "28" in out and "peak" in out


def test_dry_run_shows_resolved_config_ranks_batches_and_memory(
    config_file: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        f"policy.model_name={model}",
        "policy.megatron_cfg.optimizer.lr=3e-5",
        "policy.max_total_sequence_length=700",
    ]
    assert main(["train", str(config_file), *arguments, "--dry-run"]) == 0
    out = capsys.readouterr().out
    text = out[: out.index("12 ranks")]
    resolved = yaml.safe_load(text[text.index("\n") :])
    assert resolved == load_and_check(str(config_file), arguments)
    assert resolved["policy"]["megatron_cfg"]["optimizer"]["lr"] == 3e-5
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in out.splitlines()
        if line.startswith("│")
    ]
    assert [row for row in rows if row[0] == "7"] == [["7", "1", "0", "0", "1", "1", "1"]]
    assert ["samples", "15 prompts x 4 responses", "60"] in rows
    assert ["micro-batches a rank", "10 samples / 5", "2"] in rows
    assert ["tokens a step", "60 x 700 tokens at most", "42,000"] in rows
    # Half of the layers and half of the vocabulary on a tensor rank of a stage: 14 layers, tied embedding
    # copied to the last stage.
    layer = (1536 * (1536 + 512) + 1536 * 1536 + 3 * 1536 * 8960 + 1536 + 512) // 2 + 2 * 1536
    assert ["parameters", f"{14 * layer + 75968 * 1536:,}", f"{14 * layer + 75968 * 1536 + 1536:,}"] in rows


def test_a_learning_rate_that_destroys_the_model_is_warned_of(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate, warned in (("1e30", True), ("1e-5", False)):
        assert main(["train", "--dry-run", str(config_file), f"policy.megatron_cfg.optimizer.lr={rate}"]) == 0
        assert (
            "megarl: warning: policy.megatron_cfg.optimizer.lr = 1e+30: a learning rate above 1"
            in capsys.readouterr().err
        ) == warned


def test_dry_run_of_an_unknown_model_says_that_memory_is_left_out(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", str(config_file), "grpo.max_num_steps=2"]) == 0
    assert "No memory estimate" in capsys.readouterr().out


def test_a_dry_run_ends_with_its_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.run.preflight.findings", lambda _: [])
    assert main(["train", "grpo-qwen2.5-1.5b-1gpu-24gb-megatron", "--dry-run"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "fits 24 GiB: 22.5 GiB at the fullest moment, training (planned)"


def test_dry_run_of_many_ranks_is_short(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "cluster.num_nodes=128",
        "policy.train_global_batch_size=1920",
        "grpo.num_prompts_per_step=480",
    ]
    assert main(["train", str(config_file), "--dry-run"]) == 0
    few = capsys.readouterr().out
    assert main(["train", str(config_file), "--dry-run", *overrides]) == 0
    many = capsys.readouterr().out
    assert "768 ranks" in many and "│  767 │" in many
    assert len(many.splitlines()) <= len(few.splitlines()) + 30


def test_configuration_errors_exit_with_2_and_come_all_at_once(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        ["train", str(config_file), "policy.precison=bfloat16", "seed=x", "~env", "cluster.gpus_per_node=5"]
    )
    shown = capsys.readouterr()
    assert code == 2 and shown.out == f"megarl {__version__}: {config_file}\n"
    assert "4 configuration errors" in shown.err
    for part in ("policy.precision", "seed = 'x'", "env = <absent>", "cluster.gpus_per_node = 5"):
        assert part in shown.err
    assert "Traceback" not in shown.err


def test_missing_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "/no/such.yaml"]) == 2
    assert "/no/such.yaml does not exist" in capsys.readouterr().err


def test_train_hands_the_checked_configuration_to_run(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    stand_in(monkeypatch, "megarl.run.run", run=lambda config, stop_at: seen.append(config) or 0)
    assert main(["train", str(config_file), "seed=8"]) == 0
    assert seen == [
        validate_config(
            {**load_config(config_file, ["seed=8"]), "recipe": config_file.stem}, config_file.stem
        )
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("no rows"), 2),
        (ConversionError("no weights", "save them"), 2),
        (CheckpointError("torn"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=["data", "model", "checkpoint", "ctrl-c"],
)
def test_exit_codes_of_a_failed_run(
    error: BaseException,
    code: int,
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(config: Any, stop_at: float | None) -> int:
        raise error

    stand_in(monkeypatch, "megarl.run.run", run=run)
    assert main(["train", str(config_file)]) == code
    assert (str(error) or "interrupted") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cause", "code"),
    [(ConversionError("no weights", "save them"), 2), (OSError("disk"), 1)],
    ids=["model", "disk"],
)
def test_a_fault_of_the_user_that_a_worker_found_is_shown_without_its_traceback(
    cause: Exception,
    code: int,
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(config: Any, stop_at: float | None) -> int:
        raise WorkerError(f"[tp0] {cause}\n--- traceback of the worker ---\nFile 1") from cause

    stand_in(monkeypatch, "megarl.run.run", run=run)
    assert main(["train", str(config_file)]) == code
    shown = capsys.readouterr().err
    assert str(cause) in shown and ("File 1" in shown) == (code == 1)


def test_an_unforeseen_error_keeps_its_traceback(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: Any, stop_at: float | None) -> int:
        raise ZeroDivisionError("bug")

    stand_in(monkeypatch, "megarl.run.run", run=run)
    with pytest.raises(ZeroDivisionError):
        main(["train", str(config_file)])


def test_the_exit_code_tells_the_fault_also_when_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with monkeypatch.context() as patch, open(writing, "wb", buffering=0) as pipe:
        patch.setattr(sys, "stderr", io.TextIOWrapper(pipe, write_through=True))
        assert main(["status", str(tmp_path / "missing")]) == 2


def test_the_exit_code_of_a_run_is_returned(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "megarl.run.run", run=lambda config, stop_at: 3)
    assert main(["train", str(config_file)]) == 3


@pytest.mark.parametrize(
    ("arguments", "module", "handed_over"),
    [
        (
            ["plot", "runs/one", "runs/two", "--out", "a.html"],
            "megarl.watch.report",
            (["runs/one", "runs/two"], "a.html"),
        ),
        (["status", "runs/one", "--hashes"], "megarl.watch.status", ("runs/one", False, True)),
        (["doctor", "--run-dir", "runs", "--json"], "megarl.doctor.command", ("runs", True, False)),
        (["doctor", "--transformer-engine"], "megarl.doctor.command", (None, False, True)),
    ],
    ids=["plot", "status", "doctor", "doctor of what is needed"],
)
def test_what_looks_on_gets_its_arguments_and_gives_its_exit_code(
    arguments: list[str], module: str, handed_over: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    stand_in(monkeypatch, module, run=lambda *values: seen.append(values) or 3)
    assert main(arguments) == 3
    assert seen == [handed_over]


LIMITED = """
import os, resource, subprocess, sys, threading
from megarl import cli
from megarl.errors import ClusterError

def begin(arguments):
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    if os.getuid() == 0:
        # root is not held to it
        os.setuid(65534)
    if sys.argv[1] == "process":
        subprocess.Popen(["/bin/true"])
    if sys.argv[1] == "thread":
        threading.Thread(target=print).start()
    if sys.argv[1] == "wrapped":
        try:
            subprocess.Popen(["/bin/true"])
        except OSError as error:
            raise ClusterError("Ray does not start") from error
    raise BlockingIOError(11, os.strerror(11))

cli.train = begin
sys.exit(cli.main(["train", "any"]))
"""


@pytest.mark.parametrize(("what", "code"), [("process", 2), ("thread", 2), ("wrapped", 2), ("lock", 1)])
def test_a_limit_of_processes_is_the_user_s_to_raise(what: str, code: int) -> None:
    """Another start would meet it again. A lock that is held says the same as the system, and is something
    else."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, what], capture_output=True, text=True, cwd=Path.cwd()
    )
    assert done.returncode == code, done.stderr
    assert ("ulimit -u = 1: no further process or thread could be started. Fix: raise it" in done.stderr) == (
        code == 2
    ), done.stderr
    assert ("Traceback" in done.stderr) == (code == 1)
    assert ("Ray does not start" in done.stderr) == (what == "wrapped")
