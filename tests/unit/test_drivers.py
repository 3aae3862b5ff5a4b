"""Whole runs of SFT and GRPO in one process: the real drivers, data, checkpoints and logs around the plain
reference policy."""

from __future__ import annotations

import gc
import json
import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.checkpoint.lock import RunLock
from megarl.cli import report
from megarl.config.resume_changes import check_changes
from megarl.config.validate import validate_config
from megarl.config.validation_sets import set_plans
from megarl.data.tokenization import get_tokenizer
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    MismatchError,
    StateError,
    UnusableCheckpointError,
)
from megarl.observe.launches import read_launches
from megarl.observe.sample_files import list_samples, read_samples
from megarl.run import run as algorithms_run
from megarl.run.earlier_launch import require_own_checkpoints
from megarl.run.inputs import read_inputs
from megarl.run.loop import total_steps
from megarl.run.run import run
from megarl.watch.run_state import read_run_state
from tests.tables import read_table
from tests.tiers import sampled, slow
from tests.unit.driver_runs import (
    STEPS,
    Crash,
    PolicyMaker,
    check_same,
    comparable,
    cut_off,
    final_weights,
    make_config,
    rows,
)
from tests.unit.reference_policy import ReferencePolicy

TABLES = read_table("drivers.yaml")

TAUGHT = 70


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, model: str, data: str) -> dict[str, str]:
    """What each algorithm starts from: GRPO needs a model that is right now and then, or there is nothing to
    reward."""
    run_dir = tmp_path_factory.mktemp("taught")
    config = make_config("sft", run_dir, model, data, max_num_steps=TAUGHT, val_period=0)
    config["checkpointing"]["enabled"] = False
    run(config, PolicyMaker())
    return {"sft": model, "grpo": str(run_dir / "hf" / f"step_{TAUGHT}")}


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_whole_run_leaves_what_it_promises(
    algorithm: str, tmp_path: Path, models: dict[str, str], data: str
) -> None:
    maker = PolicyMaker()
    assert run(make_config(algorithm, tmp_path, models[algorithm], data), maker) == 0
    logged = rows(tmp_path)
    assert [row["step"] for row in logged] == list(range(0 if algorithm == "grpo" else 1, STEPS + 1))
    training = [row for row in logged if row["step"]]
    assert all(
        (row["performance/memory_gib"], row["performance/peak_memory_gib"]) == (0.5, 0.75) for row in training
    )
    [launch] = read_launches(tmp_path)
    assert (launch.first_step, launch.total_steps, launch.outcome) == (0, STEPS, "finished")
    for row in training:
        assert {
            "train/loss",
            "train/grad_norm",
            "train/lr",
            "timing/train_s",
            "timing/step_s",
            "performance/tokens_per_s",
        } <= set(row)
        assert all(value is not None for value in row.values())
    assert all(0 < row["performance/padding_efficiency"] <= 1 for row in training)
    assert [row["train/lr"] for row in training] == pytest.approx([1e-3, 2e-3, 3e-3, 3e-3])
    assert [
        ("validation/loss" if algorithm == "sft" else "validation/accuracy") in row for row in training
    ] == [False, True, False, True]
    assert "timing/checkpoint_s" in training[1] and "timing/validation_s" in training[1]
    if algorithm == "grpo":
        phases = {
            "timing/generation_s",
            "timing/reward_s",
            "timing/logprobs_s",
            "timing/reference_logprobs_s",
        }
        assert all(phases <= set(row) for row in training)
        names = ("generation", "logprobs", "reference_logprobs", "train")
        rates = {
            f"performance/{name}_{rate}"
            for name in names
            for rate in ("tokens_per_s", "tokens_per_s_per_device", "tflops", "mfu")
        }
        assert all(rates | {"performance/idle_s", "performance/mfu"} <= set(row) for row in training)
        assert all(row["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3) for row in training)
        assert any(
            0 < row["train/reward"] < 1 and row["train/advantages_min"] < 0 < row["train/advantages_max"]
            for row in training
        )
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["seed"] == 11
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*")) == ["step_2", "step_4"]
    info = json.loads((tmp_path / "checkpoints" / "step_4" / "training_info.json").read_text())
    assert info["step"] == 4 and info["sampler"]["epoch"] == 2 and info["sampler"]["position"] == 2
    assert ("val_loss" if algorithm == "sft" else "val_accuracy") in info["metrics"]
    assert maker.policies[0]._prepared == "shut down"
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "step_4")
    AutoTokenizer.from_pretrained(tmp_path / "hf" / "step_4")


class OtherGenerator(PolicyMaker):
    """Makes policies whose answers say of each token that it was likelier, by 0.06 in the logarithm, than the
    policy has it."""

    def __call__(self, *arguments: Any) -> ReferencePolicy:
        policy = super().__call__(*arguments)
        generate = policy.generate

        def generate_otherwise(*args: Any, **kwargs: Any) -> BatchedDataDict[Any]:
            output = generate(*args, **kwargs)
            output["logprobs"] = torch.where(output["logprobs"] != 0, output["logprobs"] + 0.06, 0.0)
            return output

        policy.generate = generate_otherwise  # type: ignore[method-assign]
        return policy


def test_a_mismatch_is_logged_at_every_step_and_ends_the_run_at_its_bound(
    tmp_path: Path, models: dict[str, str], data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        "grpo", tmp_path / "open", models["grpo"], data, max_num_steps=2, val_period=0, val_at_start=False
    )
    config["checkpointing"]["enabled"] = False
    assert run(config, OtherGenerator()) == 0
    logged = rows(tmp_path / "open")
    assert [row["step"] for row in logged] == [1, 2]
    for row in logged:
        assert row["train/mismatch_mean"] == pytest.approx(0.06, abs=1e-5)
        assert row["train/mismatch_max"] == pytest.approx(0.06, abs=1e-4)
        assert row["train/mismatch_share_above_0.05"] == 1.0
        assert row["train/token_mult_prob_error"] == pytest.approx(math.exp(0.06), abs=1e-5)
    config = make_config("grpo", tmp_path / "bound", models["grpo"], data, max_token_mult_prob_error=1.05)
    maker = OtherGenerator()
    with pytest.raises(MismatchError) as stopped:
        run(config, maker)
    assert maker.policies[0].trained_steps == 0
    assert report(stopped.value) == 1
    assert (
        "step 1: token_mult_prob_error = 1.062 is above grpo.max_token_mult_prob_error = 1.05"
        in capsys.readouterr().err
    )


class CountingLogprobs(PolicyMaker):
    """Counts the calls of ``get_logprobs``."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def __call__(self, *arguments: Any) -> ReferencePolicy:
        policy = super().__call__(*arguments)
        get_logprobs = policy.get_logprobs

        def counted(*args: Any, **kwargs: Any) -> BatchedDataDict[Any]:
            self.passes += 1
            return get_logprobs(*args, **kwargs)

        policy.get_logprobs = counted  # type: ignore[method-assign]
        return policy


@slow
@pytest.mark.parametrize("penalty", [0.0, 0.01])
def test_a_batch_that_is_trained_on_once_needs_no_pass_for_its_logprobs(
    penalty: float, tmp_path: Path, models: dict[str, str], data: str
) -> None:
    """Weights and metrics are those of the run with the pass, to rounding; a bound of the mismatch brings the
    pass back."""
    passes, logged, weights = {}, {}, {}
    for name, forced, bound in (("pass", False, None), ("none", True, None), ("bound", True, 10.0)):
        config = make_config("grpo", tmp_path / name, models["grpo"], data, val_period=0, val_at_start=False)
        config["grpo"]["max_token_mult_prob_error"] = bound
        config["policy"]["train_global_batch_size"] = 12
        config["loss_fn"] |= {"force_on_policy_ratio": forced, "reference_policy_kl_penalty": penalty}
        maker = CountingLogprobs()
        assert run(config, maker) == 0
        passes[name], logged[name], weights[name] = (
            maker.passes,
            comparable(tmp_path / name),
            final_weights(tmp_path / name),
        )
    assert passes == {"pass": STEPS, "none": 0, "bound": STEPS}
    for whole, *others in zip(*logged.values(), strict=True):
        for other in others:
            assert other.keys() == whole.keys()
            assert other == pytest.approx(whole, rel=1e-4, abs=1e-5)
    for name in ("none", "bound"):
        for key, tensor in weights["pass"].items():
            torch.testing.assert_close(weights[name][key], tensor, rtol=1e-4, atol=1e-5)


@sampled(1)
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    algorithm: str, tmp_path: Path, models: dict[str, str], data: str
) -> None:
    model = models[algorithm]
    run(make_config(algorithm, tmp_path / "whole", model, data), PolicyMaker())
    for crash_after in range(STEPS):
        run_dir = tmp_path / f"crash{crash_after}"
        config = make_config(algorithm, run_dir, model, data)
        with pytest.raises(Crash):
            run(config, PolicyMaker(crash_after))
        resumed = PolicyMaker()
        run(config, resumed)
        assert resumed.policies[0].trained_steps == STEPS * (1 if algorithm == "sft" else 2)
        check_same(run_dir, tmp_path / "whole")


@slow
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_run_of_mixed_and_filtered_sources_is_resumed_exactly(
    algorithm: str, tmp_path: Path, models: dict[str, str], data: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of four prompts, sources of five and of three: each step ends in the middle of an epoch of some
    source."""
    turns = [
        [("user", f"{one}+1="), ("assistant", str(one + 1)), ("user", "+1="), ("assistant", str(one + 2))]
        for one in range(4)
    ]
    rows_of_turns = [
        {"turns": [{"role": role, "content": content} for role, content in each]} for each in turns
    ]
    rows_of_turns[2]["turns"][0]["content"] = "1+" * 9 + "1="
    (tmp_path / "turns.jsonl").write_text("\n".join(map(json.dumps, rows_of_turns)))
    (tmp_path / "sums.jsonl").write_text(
        "\n".join(json.dumps({"x": {"ask": f"{each}+{each}=", "sum": 2 * each}}) for each in range(5))
    )
    sources = [
        {"path": str(tmp_path / "turns.jsonl"), "messages_key": "turns", "weight": 0.3},
        {"path": str(tmp_path / "sums.jsonl"), "prompt_key": "x.ask", "answer_key": "x.sum", "weight": 0.7},
    ]

    whole = make_config(algorithm, tmp_path / "whole", models[algorithm], data)
    whole["data"] |= {"train": sources, "filter_overlong_prompts": True}
    whole["data"]["validation"] = [{name: value for name, value in sources[1].items() if name != "weight"}]
    run(whole, PolicyMaker())
    assert "1 of 4 records (25.00 %) are left out" in caplog.text
    info = json.loads((tmp_path / "whole" / "checkpoints" / "step_4" / "training_info.json").read_text())
    assert (
        info["sampler"]["sizes"] == [3, 5]
        and info["sampler"]["taken"] == [5, 11]
        and info["sampler"]["weights"] == ["3/10", "7/10"]
    )
    for crash_after in (1, 3):
        config = {**whole, "run_dir": str(tmp_path / f"crash{crash_after}")}
        with pytest.raises(Crash):
            run(config, PolicyMaker(crash_after))
        run(config, PolicyMaker())
        check_same(tmp_path / f"crash{crash_after}", tmp_path / "whole")


def test_other_weights_are_other_data(tmp_path: Path, model: str, data: str) -> None:
    source = {"path": data, "prompt_key": "prompt", "answer_key": "answer"}
    config = make_config("sft", tmp_path, model, data)
    config["data"]["train"] = [{**source, "weight": 1}, {**source, "weight": 2}]
    run(config, PolicyMaker())
    config["data"]["train"][1]["weight"] = 3
    with pytest.raises(ConfigError, match=r"data\.train\.1\.weight = 3: .* was trained with 2"):
        run(config, PolicyMaker())


def test_columns_that_were_found_are_kept_with_the_run(tmp_path: Path, model: str, data: str) -> None:
    config = make_config("sft", tmp_path / "run", model, data)
    config["data"] |= {"train": {"path": data}, "validation": {"path": data}}
    with pytest.raises(Crash):
        run(config, PolicyMaker(3))
    kept = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["data"]
    assert (
        kept["train"] == kept["validation"] == {"path": data, "prompt_key": "prompt", "answer_key": "answer"}
    )
    other = tmp_path / "other.jsonl"
    other.write_text(Path(data).read_text().replace('"prompt":', '"question":'))
    with pytest.raises(
        ConfigError, match=r"data\.train\.prompt_key = 'question': .* was trained with 'prompt'"
    ):
        run(merged(config, {"data": {"train": {"path": str(other)}}}), PolicyMaker())
    explicit = make_config("sft", tmp_path / "run", model, data)
    maker = PolicyMaker()
    run(explicit, maker)
    assert maker.policies[0].trained_steps == STEPS


def test_a_validation_set_keeps_its_name_where_its_form_is_a_named_one(tmp_path: Path, model: str) -> None:
    problems = [{"question": f"{place} plus", "answer": f"It is.\n#### {place}"} for place in range(8)]
    files = [tmp_path / f"{name}.jsonl" for name in ("train", "easy", "hard")]
    for file in files:
        file.write_text("\n".join(map(json.dumps, problems)))
    config = make_config("grpo", tmp_path / "run", model, str(files[0]))
    config["data"] |= {
        "train": {"path": str(files[0])},
        "validation": [{"path": str(file)} for file in files[1:]],
    }
    config = validate_config(config)
    with ExitStack() as stack:
        inputs = read_inputs(config, stack)
    assert [each.answer for each in inputs.train.examples] == [str(place) for place in range(8)]
    assert config["data"]["train"] == {"path": str(files[0]), "name": "gsm8k"}
    assert [plan.name for plan in set_plans(config)] == ["easy", "hard"]
    assert validate_config(config) == config


def test_a_finished_run_has_nothing_to_do(tmp_path: Path, model: str, data: str) -> None:
    config = make_config("sft", tmp_path, model, data)
    run(config, PolicyMaker())
    before = (tmp_path / "metrics.jsonl").read_bytes()
    maker = PolicyMaker()
    run(config, maker)
    assert maker.policies[0].trained_steps == STEPS
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_the_garbage_collector_seldom_runs_and_leaves_out_what_stays(
    tmp_path: Path, model: str, data: str
) -> None:
    """During the steps alone; what a caller has frozen, as the tests have, stays so."""
    counts: list[int] = []
    thresholds: list[int] = []
    before, own = gc.get_freeze_count(), gc.get_threshold()

    def note(call: str) -> None:
        counts.append(gc.get_freeze_count())
        thresholds.append(gc.get_threshold()[0])

    maker = PolicyMaker(at_call=note)
    assert before > 10_000 and run(make_config("sft", tmp_path / "kept", model, data), maker) == 0
    assert before >= max(counts) and gc.get_freeze_count() > before / 2
    assert max(thresholds) >= 50_000 and gc.get_threshold() == own
    counts.clear()
    gc.unfreeze()
    try:
        run(make_config("sft", tmp_path / "own", model, data), maker)
        assert min(counts) > before / 2 and gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_a_failed_run_frees_its_directory_and_workers(tmp_path: Path, model: str, data: str) -> None:
    maker = PolicyMaker(0)
    with pytest.raises(Crash):
        run(make_config("sft", tmp_path, model, data), maker)
    assert maker.policies[0]._prepared == "shut down"
    with RunLock(tmp_path):
        pass


def test_a_directory_in_use_is_refused(tmp_path: Path, model: str, data: str) -> None:
    with RunLock(tmp_path), pytest.raises(StateError, match="in use"):
        run(make_config("sft", tmp_path, model, data), PolicyMaker())


def test_other_data_cannot_be_resumed(tmp_path: Path, model: str, data: str) -> None:
    run(make_config("sft", tmp_path / "run", model, data), PolicyMaker())
    changed = tmp_path / "changed.jsonl"
    changed.write_text(Path(data).read_text().replace('"12"', '"13"'))
    with pytest.raises(CheckpointError, match="data_fingerprint"):
        run(make_config("sft", tmp_path / "run", model, str(changed)), PolicyMaker())


def test_never_resuming_refuses_old_checkpoints(tmp_path: Path, model: str, data: str) -> None:
    config = make_config("sft", tmp_path, model, data)
    run(config, PolicyMaker())
    config["checkpointing"]["resume"] = "never"
    with pytest.raises(CheckpointError, match="resume = 'never'"):
        run(config, PolicyMaker())


def _begin_as_job(monkeypatch: pytest.MonkeyPatch, began: str) -> None:
    """Set Slurm's variables to those of a job's first launch: its number, and in an array ARRAY_TASK."""
    for name in ("SLURM_RESTART_COUNT", "MEGARL_CHAIN_BEFORE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    number, _, task = began.partition(" ")
    found = {"SLURM_JOB_ID": number}
    if task:
        found["SLURM_ARRAY_JOB_ID"], _, found["SLURM_ARRAY_TASK_ID"] = task.partition("_")
    for name, value in found.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("began", "later", "continues"),
    [
        ("7", {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ("7", {"SLURM_JOB_ID": "8", "MEGARL_CHAIN_BEFORE": "6 7 "}, True),
        ("7", {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}, False),
        ("7", {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        ("7", {"SLURM_JOB_ID": "9", "MEGARL_CHAIN_BEFORE": "8 "}, False),
        ("", {"SLURM_RESTART_COUNT": "1"}, False),
        # A chain of arrays: only the array's own number is known, and tasks go on with tasks.
        ("12 10_3", {"SLURM_JOB_ID": "22", "SLURM_ARRAY_TASK_ID": "3", "MEGARL_CHAIN_BEFORE": "10 "}, True),
        ("10 10_4", {"SLURM_JOB_ID": "22", "SLURM_ARRAY_TASK_ID": "3", "MEGARL_CHAIN_BEFORE": "10 "}, False),
    ],
)
def test_a_later_launch_of_a_job_that_never_resumes_continues_its_own_run(
    tmp_path: Path,
    model: str,
    data: str,
    monkeypatch: pytest.MonkeyPatch,
    began: str,
    later: dict[str, str],
    continues: bool,
) -> None:
    """The command line of a requeued or chained job is that of its first launch."""
    _begin_as_job(monkeypatch, began)
    config = make_config("sft", tmp_path, model, data)
    config["checkpointing"]["resume"] = "never"
    run(config, PolicyMaker())
    for name, value in later.items():
        monkeypatch.setenv(name, value)
    if continues:
        rows_before = (tmp_path / "metrics.jsonl").read_bytes()
        assert run(config, PolicyMaker()) == 0
        assert read_launches(tmp_path)[-1].first_step == STEPS
        assert (tmp_path / "metrics.jsonl").read_bytes() == rows_before
    else:
        with pytest.raises(CheckpointError, match="resume = 'never'"):
            run(config, PolicyMaker())


def test_a_requeued_job_that_never_resumes_leaves_checkpoints_of_another_run_alone(
    tmp_path: Path, model: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs share a directory of checkpoints, and the requeued one had saved none."""
    _begin_as_job(monkeypatch, "7")
    config = make_config("sft", tmp_path / "a", model, data)
    config["checkpointing"] |= {"resume": "never", "checkpoint_dir": str(tmp_path / "shared")}
    with pytest.raises(Crash):
        run(config, PolicyMaker(crash_after=1))
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    run({**config, "run_dir": str(tmp_path / "b")}, PolicyMaker())
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(CheckpointError, match="resume = 'never'"):
        run(config, PolicyMaker())


def test_the_status_of_a_run_finds_checkpoints_in_the_directory_of_its_start(
    tmp_path: Path, model: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config("sft", tmp_path / "run", model, data)
    config["checkpointing"]["checkpoint_dir"] = "saved"
    run(config, PolicyMaker())
    monkeypatch.chdir(tmp_path / "run")
    assert read_run_state(".").checkpoints[0] == STEPS


@pytest.mark.parametrize("saved", ["checkpoints", "saved"])
def test_a_copied_run_goes_on_in_its_copy(
    tmp_path: Path, model: str, data: str, monkeypatch: pytest.MonkeyPatch, saved: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config("sft", Path("runs/a"), model, data)
    config["checkpointing"]["checkpoint_dir"] = f"runs/a/{saved}"
    with pytest.raises(Crash):
        run(config, PolicyMaker(crash_after=2))
    shutil.copytree("runs/a", "runs/b")
    before = {path: path.read_bytes() for path in Path("runs/a").rglob("*") if path.is_file()}
    copied = yaml.safe_load(Path("runs/b/config.yaml").read_text()) | {"run_dir": "runs/b"}
    if saved == "saved":
        with pytest.raises(ConfigError, match=f"copy of runs/a.*checkpoint_dir={tmp_path}/runs/b/saved"):
            run(copied, PolicyMaker())
        copied["checkpointing"]["checkpoint_dir"] = "runs/b/saved"
    assert run(copied, PolicyMaker()) == 0
    assert read_launches(Path("runs/b"))[-1].first_step == 2
    assert {path: path.read_bytes() for path in Path("runs/a").rglob("*") if path.is_file()} == before


def test_a_link_to_a_run_is_no_copy_of_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "a" / "config.yaml").write_text(json.dumps({"run_dir": str(tmp_path / "a")}))
    section: Any = {"checkpoint_dir": str(tmp_path / "a" / "saved")}
    require_own_checkpoints(section, tmp_path / "link")


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(
    tmp_path: Path, model: str, data: str
) -> None:
    config = make_config("sft", tmp_path, model, data)
    run(config, PolicyMaker())
    rows_before = (tmp_path / "metrics.jsonl").read_bytes()
    for step in (2, 4):
        (tmp_path / f"checkpoints/step_{step}/training_info.json").write_text("{}")
    maker = PolicyMaker()
    with pytest.raises(
        UnusableCheckpointError,
        match=r"2 checkpoints and none can be used.*step_4: .*training_info.*step_2: ",
    ) as caught:
        run(config, maker)
    assert caught.value.exit_code == 2 and not maker.policies
    assert (tmp_path / "metrics.jsonl").read_bytes() == rows_before
    config["checkpointing"]["resume"] = "never"
    run(config, maker)
    assert maker.policies[0].trained_steps == STEPS
    assert (tmp_path / "metrics.before-1.jsonl").read_bytes() == rows_before
    assert (tmp_path / f"hf/step_{STEPS}.before-1").is_dir() and (tmp_path / f"hf/step_{STEPS}").is_dir(), (
        "not the old export for the new"
    )
    assert len(rows(tmp_path)) == len(rows_before.splitlines())


CHANGES: list[tuple[str, dict[str, Any], bool, str]] = TABLES["changes"]


def merged(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return config | {
        key: merged(config[key], value) if isinstance(value, dict) else value for key, value in change.items()
    }


@sampled(3)
@pytest.mark.parametrize(
    ("change", "acceptable", "message"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES]
)
def test_what_a_checkpoint_was_promised_to_be_is_not_changed_in_silence(
    change: dict[str, Any], acceptable: bool, message: str, tmp_path: Path, model: str, data: str
) -> None:
    config = make_config("sft", tmp_path, model, data)
    with pytest.raises(Crash):
        run(config, PolicyMaker(3))
    changed = merged(config, change)
    if "backend" in message:
        changed["policy"]["optimizer"] = {"name": "torch.optim.AdamW", "kwargs": {"lr": 3e-3}}
    for accepted in (False, True):
        changed["checkpointing"] = {**config["checkpointing"], "accept_changes": accepted}
        maker = PolicyMaker()
        if accepted and acceptable:
            run(changed, maker)
            assert maker.policies[0].trained_steps == STEPS
        else:
            with pytest.raises(ConfigError, match=message):
                run(changed, maker)
            assert not maker.policies
            assert yaml.safe_load((tmp_path / "config.yaml").read_text())["seed"] == 11, (
                "the refused one is not left there"
            )


@pytest.mark.parametrize(
    ("before", "now", "key"),
    [
        ({"lr": 1e-3}, {"lr": 2e-3}, "policy.optimizer.kwargs.lr"),
        ({}, {"lr": 2e-3}, "policy.optimizer.kwargs.lr"),
        ({"lr": 1e-3, "eps": 1e-6}, {"lr": 1e-3}, None),
    ],
)
def test_of_torch_a_rate_may_change_and_a_moment_may_not(
    before: dict[str, float], now: dict[str, float], key: str | None
) -> None:
    """Also where only one of the two configurations has the argument."""
    old, new = (
        {"policy": {"optimizer": {"name": "torch.optim.AdamW", "kwargs": kwargs}}} for kwargs in (before, now)
    )
    with pytest.raises(
        ConfigError, match="accept_changes=true" if key else r"kwargs\.eps = None: .*would do nothing"
    ):
        check_changes(old, new, "step_2", accepted=False)
    if key is not None:
        assert check_changes(old, new, "step_2", accepted=True) == {key: (before.get("lr"), now["lr"])}


def test_what_does_not_matter_may_change_and_is_said(
    tmp_path: Path, model: str, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config("sft", tmp_path, model, data)
    with pytest.raises(Crash):
        run(config, PolicyMaker(3))
    run(
        merged(
            config,
            {
                "sft": {"max_num_steps": STEPS + 1},
                "policy": {"train_micro_batch_size": 4, "max_grad_norm": 0.5},
            },
        ),
        PolicyMaker(),
    )
    assert f"checkpoints/step_2: sft.max_num_steps = {STEPS + 1}, in the checkpoint {STEPS}" in caplog.text
    assert "policy.train_micro_batch_size = 4, in the checkpoint 2" in caplog.text
    assert rows(tmp_path)[-1]["step"] == STEPS + 1


def test_two_runs_do_not_write_checkpoints_into_one_directory(tmp_path: Path, model: str, data: str) -> None:
    shared = str(tmp_path / "shared")
    second = make_config("sft", tmp_path / "second", model, data)
    second["checkpointing"]["checkpoint_dir"] = shared

    def start_another(call: int) -> None:
        with pytest.raises(StateError, match="in use"):
            run(second, PolicyMaker())

    first = make_config("sft", tmp_path / "first", model, data, max_num_steps=1)
    first["checkpointing"]["checkpoint_dir"] = shared
    run(first, PolicyMaker(at_call=start_another))


def test_checkpoints_may_lie_in_the_run_directory_itself(tmp_path: Path, model: str, data: str) -> None:
    config = make_config("sft", tmp_path / "run", model, data)
    config["checkpointing"]["checkpoint_dir"] = str(tmp_path / "run" / ".")
    run(config, PolicyMaker())
    assert (tmp_path / "run/step_4").is_dir()


def test_a_run_that_was_copied_reads_and_writes_its_own_checkpoints(
    tmp_path: Path, model: str, data: str
) -> None:
    config = make_config("sft", tmp_path / "first", model, data)
    with pytest.raises(Crash):
        run(config, PolicyMaker(3))
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    shutil.rmtree(tmp_path / "first")
    kept = yaml.safe_load((tmp_path / "copy/config.yaml").read_text())
    run({**kept, "run_dir": str(tmp_path / "copy")}, PolicyMaker())
    assert sorted(path.name for path in (tmp_path / "copy/checkpoints").glob("step_*")) == [
        "step_2",
        "step_4",
    ]
    assert not (tmp_path / "first").exists()


def test_faults_are_found_before_a_policy_is_made(tmp_path: Path, model: str, data: str) -> None:
    maker = PolicyMaker()
    config = make_config("sft", tmp_path, model, data)
    config["data"]["max_input_seq_length"] = 2
    with pytest.raises(DataError, match=r"7 of 7 prompts with answers exceed"):
        run(config, maker)
    with pytest.raises(ConfigError, match="seed"):
        run({**make_config("sft", tmp_path, model, data), "seed": "eleven"}, maker)
    assert not maker.policies


def test_validation_loss_is_that_of_plain_transformers(tmp_path: Path, model: str, data: str) -> None:
    run(make_config("sft", tmp_path, model, data, max_num_steps=1, val_period=1), PolicyMaker())
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "step_1", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    total, count = 0.0, 0
    for left in range(7):
        prompt = tokenizer(f"{left}+{left}=")["input_ids"]
        answer = [*tokenizer(str(2 * left))["input_ids"], tokenizer.eos_token_id]
        logits = trained(torch.tensor([prompt + answer])).logits[0].double().log_softmax(-1)
        total -= sum(
            float(logits[len(prompt) - 1 + place, token].detach()) for place, token in enumerate(answer)
        )
        count += len(answer)
    row = rows(tmp_path)[-1]
    assert row["validation/loss"] == pytest.approx(total / count, rel=1e-5)
    assert row["validation/samples"] == 7


def test_validation_accuracy_is_that_of_plain_transformers(
    tmp_path: Path, models: dict[str, str], data: str
) -> None:
    run(make_config("grpo", tmp_path, models["grpo"], data, max_num_steps=1, val_period=0), PolicyMaker())
    trained = AutoModelForCausalLM.from_pretrained(models["grpo"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(models["grpo"])
    right = 0
    for left in range(7):
        prompt = torch.tensor([tokenizer(f"{left}+{left}=")["input_ids"]])
        answer = trained.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=3
        )[0, prompt.shape[1] :]
        right += tokenizer.decode(answer, skip_special_tokens=True).strip() == str(2 * left)
    first = rows(tmp_path)[0]
    assert first["step"] == 0 and first["validation/samples"] == 7
    assert right > 0, "the comparison says nothing when every answer is wrong"
    assert first["validation/accuracy"] == pytest.approx(right / 7)


@pytest.mark.parametrize(
    ("steps", "epochs", "records", "per_step", "expected"),
    [(10, None, 7, 4, 10), (10, 2, 7, 4, 3), (2, 9, 7, 4, 2), (10, 1, 3, 8, 1), (10, 4, 8, 8, 4)],
)
def test_total_steps(steps: int, epochs: int | None, records: int, per_step: int, expected: int) -> None:
    assert total_steps(steps, epochs, records, per_step) == expected


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("train/los", True),
        ("val_accuracy", True),
        ("validation/losss", True),
        ("train/loss", False),
        ("val_loss", False),
        ("step", False),
    ],
)
def test_a_metric_that_no_step_has_ranks_no_checkpoint(
    name: str, refused: bool, tmp_path: Path, model: str, data: str
) -> None:
    config = make_config("sft", tmp_path, model, data)
    config["checkpointing"] |= {"metric_name": name, "export_hf": False}
    if not refused:
        run(config, PolicyMaker())
        return
    with pytest.raises(
        ConfigError, match=rf"metric_name = '{name}': this run has no such metric\. Fix: write \S*loss"
    ):
        run(config, PolicyMaker())
    assert not list((tmp_path / "checkpoints").glob("*step_*"))


def few_records(path: Path, model: str, records: int) -> Path:
    """Records of which the second has a control token of the tokenizer in its prompt."""
    eos = get_tokenizer({"name": model}).eos_token
    prompts = ["2+2=", f"1+{eos}3=", "3+1=", "4+0="][:records]
    path.write_text("\n".join(json.dumps({"prompt": prompt, "answer": "4"}) for prompt in prompts))
    return path


def test_control_tokens_are_said(tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture) -> None:
    path = few_records(tmp_path / "few.jsonl", model, 4)
    config = make_config("sft", tmp_path / "run", model, str(path), max_num_steps=1, val_period=0)
    config["checkpointing"]["enabled"] = config["checkpointing"]["export_hf"] = False
    run(config, PolicyMaker())
    assert (
        "1 of 4 records have a control token of the tokenizer in their text, which it encodes as such; the "
        f"first: index 1 ({path} line 2)"
    ) in caplog.text
    assert repr(get_tokenizer({"name": model}).eos_token) in caplog.text


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_fewer_records_than_a_step_takes_are_refused_and_repeated_ones_are_meant(
    algorithm: str, tmp_path: Path, model: str
) -> None:
    """Validation sets may be of any size."""
    path = few_records(tmp_path / "few.jsonl", model, 3)
    config = make_config(algorithm, tmp_path / "run", model, str(path), max_num_steps=2)
    maker = PolicyMaker()
    with pytest.raises(
        DataError,
        match=r"data\.train has 3 records .* a step takes \S+ = 4, .* Fix: write \S+=3 or less, .* repeat: 2",
    ):
        run(config, maker)
    assert maker.policies == []
    config["data"]["train"] = {**config["data"]["train"], "repeat": 2}
    assert run(config, maker) == 0
    info = json.loads((tmp_path / "run" / "checkpoints" / "step_2" / "training_info.json").read_text())
    assert (info["sampler"]["size"], info["sampler"]["epoch"], info["sampler"]["position"]) == (6, 1, 2)


def test_a_run_that_was_begun_with_fewer_records_goes_on(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version did not refuse it. Other data in their place are no resumption, and are refused."""
    path = few_records(tmp_path / "few.jsonl", model, 3)
    config = make_config("sft", tmp_path / "run", model, str(path), max_num_steps=2, val_period=0)
    with monkeypatch.context() as earlier:
        earlier.setattr(algorithms_run, "require_a_step_of_records", lambda *arguments: None)
        run(config, PolicyMaker())
    longer = {**config, "sft": {**config["sft"], "max_num_steps": STEPS}}
    assert run(longer, PolicyMaker()) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]
    few_records(path, model, 2)
    changed = {**longer, "checkpointing": {**longer["checkpointing"], "accept_changes": True}}
    with pytest.raises(DataError, match=r"data\.train has 2 records"):
        run(changed, PolicyMaker())


def test_a_source_that_weighs_more_than_it_has_is_said(
    tmp_path: Path, model: str, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    few = {
        "path": str(few_records(tmp_path / "few.jsonl", model, 2)),
        "prompt_key": "prompt",
        "answer_key": "answer",
        "weight": 3,
    }
    config = make_config("sft", tmp_path / "run", model, data, max_num_steps=1, val_period=0)
    config["data"]["train"] = [few, {**config["data"]["train"], "weight": 1}]
    assert run(config, PolicyMaker()) == 0
    assert "few.jsonl has 2 records, and by its weight a step takes 3.0 of them" in caplog.text
    assert caplog.text.count("by its weight") == 1


def test_records_with_equal_prompts_are_groups_of_their_own(tmp_path: Path, model: str) -> None:
    """As where a set holds a problem several times: what each is compared with are the answers to the same
    record."""
    path = tmp_path / "equal.jsonl"
    path.write_text("\n".join([json.dumps({"prompt": "1+1=", "answer": str(answer)}) for answer in range(4)]))
    reward = tmp_path / "reward.py"
    # each record has a reward of its own, in which its answers differ little: between records they differ
    # much
    reward.write_text(
        "def far(prompt, response, record):\n    return 100.0 * int(record['answer']) + len(response)\n"
    )
    config = make_config(
        "grpo", tmp_path / "run", model, str(path), max_num_steps=1, val_period=0, val_at_start=False
    )
    config["grpo"]["normalize_rewards"] = False
    config["env"] = {"reward": f"{reward}:far"}
    run(config, PolicyMaker())
    [row] = rows(tmp_path / "run")
    assert row["train/reward_std"] > 50, "the records have different rewards"
    assert -3 <= row["train/advantages_min"] <= row["train/advantages_max"] <= 3


VERIFIERS = """
import os
import time
import zlib


def fate(response, index):
    if index > 1:
        return "dies" if index == 2 and zlib.crc32(response.encode()) % 2 else "is judged"
    return ("hangs", "dies")[index]


def harsh(prompt, response, record):
    kind = fate(response, record["index"])
    if kind == "dies":
        os.kill(os.getpid(), 9)
    while kind == "hangs":
        try:
            time.sleep(60)
        except BaseException:
            pass
    return float(len(response))


def mild(prompt, response, record):
    if fate(response, record["index"]) != "is judged":
        raise KeyError(response)
    return float(len(response))
"""


@slow
def test_a_verifier_that_hangs_or_dies_costs_its_own_samples_alone(tmp_path: Path, model: str) -> None:
    """The rest of the run is, to the bit, that with a function which only raises where the other one hangs or
    kills its process."""
    data, path = few_records(tmp_path / "four.jsonl", model, 4), tmp_path / "verifiers.py"
    path.write_text(VERIFIERS)
    told: dict[str, Any] = {}
    exec(VERIFIERS, told)
    logged = {}
    for name in ("harsh", "mild"):
        config = make_config(
            "grpo",
            tmp_path / name,
            model,
            str(data),
            max_num_steps=1,
            val_period=0,
            val_at_start=False,
            val_at_end=False,
        )
        config["env"] = {
            "reward": f"{path}:{name}",
            "processes": 2,
            "timeout_s": 1.0,
            "on_timeout": "mask",
            "on_error": "mask",
        }
        assert run(config, PolicyMaker()) == 0
        [logged[name]] = comparable(tmp_path / name)
        [(_, file)] = list_samples(tmp_path / name / "samples", "train")
        samples = read_samples(file)
        fates = [told["fate"](row["answer"], row["record"]) for row in samples]
        assert fates.count("hangs") == 3 and fates.count("dies") >= 3 and fates.count("is judged") >= 3
        assert [row["masked"] for row in samples] == [fate != "is judged" for fate in fates]
        assert all((row["reward"] is None) == row["masked"] for row in samples)
        faults = [logged[name].pop(f"train/{key}") for key in ("reward_timeouts", "reward_errors")]
        assert faults == (
            [fates.count("hangs"), fates.count("dies")]
            if name == "harsh"
            else [0, len(fates) - fates.count("is judged")]
        )
    assert logged["harsh"] == logged["mild"] and logged["mild"]["train/grad_norm"] > 0
    weights = [load_file(tmp_path / name / "hf" / "step_1" / "model.safetensors") for name in logged]
    assert weights[0].keys() == weights[1].keys() and all(
        torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items()
    )


@slow
def test_conversations_and_a_function_learn_what_prompts_and_exact_match_do(
    tmp_path: Path, models: dict[str, str], data: str
) -> None:
    """The same tokens and the same rewards: the same run, to the bit."""
    turns = tmp_path / "turns.jsonl"
    with open(data) as lines, turns.open("w") as out:
        for row in map(json.loads, lines):
            messages = [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["answer"]},
            ]
            out.write(json.dumps({"talk": {"messages": messages}}) + "\n")
    reward = tmp_path / "reward.py"
    reward.write_text("def right(response, answer):\n    return float(response.strip() == answer)\n")
    for algorithm in ("sft", "grpo"):
        plain = make_config(algorithm, tmp_path / f"{algorithm}-plain", models[algorithm], data)
        run(plain, PolicyMaker())
        talks = make_config(algorithm, tmp_path / f"{algorithm}-talks", models[algorithm], data)
        talks["data"] |= {
            key: {"path": str(turns), "messages_key": "talk.messages"} for key in ("train", "validation")
        }
        if algorithm == "grpo":
            talks["env"] = {"reward": f"{reward}:right"}
        run(talks, PolicyMaker())
        check_same(tmp_path / f"{algorithm}-talks", tmp_path / f"{algorithm}-plain")
    assert any(row["train/reward"] > 0 for row in rows(tmp_path / "grpo-plain") if row["step"]), (
        "there was something to reward"
    )


@pytest.mark.parametrize("crash_at", [None, 3])
def test_chosen_steps_are_profiled(crash_at: int | None, tmp_path: Path, model: str, data: str) -> None:
    config = make_config("sft", tmp_path, model, data, val_period=0)
    config["profiler"] = {"steps": [2, STEPS], "torch_ranks": [0]}
    maker = PolicyMaker(crash_at) if crash_at else PolicyMaker()
    if crash_at:
        with pytest.raises(Crash):
            run(config, maker)
        # from the checkpoint after step 2, inside the range
        maker = PolicyMaker()
    run(config, maker)
    begun = 3 if crash_at else 2
    seen = maker.policies[0].profiled
    assert [kind for kind, _ in seen] == ["start", "torch", "stop", "written"]
    assert seen[1] == ("torch", [0]) and seen[3] == ("written", f"steps_{begun}_to_{STEPS - 1}")
    assert [steps for kind, steps in seen if kind in {"start", "stop"}] == [begun - 1, STEPS - 1], (
        "before the run's last step"
    )


def test_a_range_that_ends_behind_the_run_is_written_too(tmp_path: Path, model: str, data: str) -> None:
    config = make_config("sft", tmp_path, model, data, val_period=0)
    config["profiler"] = {"steps": [STEPS, STEPS + 9], "torch_ranks": [0]}
    maker = PolicyMaker()
    run(config, maker)
    assert maker.policies[0].profiled[-1] == ("written", f"steps_{STEPS}_to_{STEPS}")


class KeepingBatches(PolicyMaker):
    """Keeps what its policies are trained on; of every second answer they say that each token was likelier,
    by ``apart``."""

    def __init__(self, apart: float = 0.0) -> None:
        super().__init__()
        self.apart = apart
        self.batches: list[BatchedDataDict[Any]] = []

    def __call__(self, *arguments: Any) -> ReferencePolicy:
        policy = super().__call__(*arguments)
        generate, train = policy.generate, policy.train

        def generate_otherwise(*args: Any, **kwargs: Any) -> BatchedDataDict[Any]:
            output = generate(*args, **kwargs)
            output["logprobs"][1::2] += self.apart * (output["logprobs"][1::2] != 0)
            return output

        def train_and_keep(data: BatchedDataDict[Any], *args: Any, **kwargs: Any) -> Any:
            self.batches.append(data)
            return train(data, *args, **kwargs)

        policy.generate, policy.train = generate_otherwise, train_and_keep  # type: ignore[method-assign]
        return policy


def last_step(
    tmp_path: Path, model: str, data: str, maker: PolicyMaker, loss: dict[str, Any], **section: Any
) -> dict[str, Any]:
    """The row of the last of two steps of a run without validation."""
    config = make_config(
        "grpo", tmp_path, model, data, max_num_steps=2, val_period=0, val_at_start=False, **section
    )
    config["checkpointing"]["enabled"] = False
    config["policy"]["train_global_batch_size"] = 12
    config["env"] = {
        "rewards": {"one": {"reward": "exact_match"}, "other": {"reward": "exact_match", "weight": 0.5}}
    }
    config["loss_fn"] |= loss
    assert run(config, maker) == 0
    return rows(tmp_path)[-1]


IN_REWARD = {"use_kl_in_reward": True, "reference_policy_kl_type": "k1"}


@sampled(2)
@pytest.mark.parametrize("name", ["grpo", "rloo", "gdpo", "reinforce_plus_plus"])
def test_advantages_are_those_of_the_estimator(
    name: str, tmp_path: Path, models: dict[str, str], data: str
) -> None:
    maker, loss = KeepingBatches(), {} if name == "gdpo" else {**IN_REWARD, "force_on_policy_ratio": True}
    row = last_step(
        tmp_path, models["grpo"], data, maker, loss, adv_estimator={"name": name}, advantage_clip_high=1.5
    )
    batch = maker.batches[-1]
    counts = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)) != 0
    advantages = batch["advantages"]
    assert float(advantages.max()) <= 1.5 and bool(advantages[counts].any())
    same_in_a_row = all(
        len(set(values[counted].tolist())) <= 1 for values, counted in zip(advantages, counts, strict=True)
    )
    assert same_in_a_row == (name != "reinforce_plus_plus")
    assert ("train/kl_in_reward" in row) == bool(loss)
    assert (row["train/kl_penalty"] == 0) == bool(loss)


def test_an_entropy_bonus_is_taken_off_the_loss_and_logged(tmp_path: Path, model: str, data: str) -> None:
    losses = []
    for coefficient in (0.0, 0.5):
        row = last_step(
            tmp_path / str(coefficient),
            model,
            data,
            PolicyMaker(),
            {"entropy_coef": coefficient},
            num_prompts_per_step=4,
        )
        first = rows(tmp_path / str(coefficient))[0]
        losses.append(first["train/loss"])
        assert ("train/entropy" in row) == (coefficient > 0)
    # an untrained model of few tokens: an estimate from the sampled tokens is near
    assert first["train/entropy"] == pytest.approx(first["train/approx_entropy"], rel=0.3)
    assert losses[1] == pytest.approx(losses[0] - 0.5 * first["train/entropy"], abs=1e-5)


def test_answers_that_are_far_apart_are_left_out(tmp_path: Path, models: dict[str, str], data: str) -> None:
    maker = KeepingBatches(apart=0.5)
    bounds = {"seq_logprob_error_threshold": 1.2, "max_token_mult_prob_error": 1.1}
    row = last_step(tmp_path / "some", models["grpo"], data, maker, {}, **bounds)
    batch = maker.batches[-1]
    assert batch["sample_mask"].tolist() == [1.0, 0.0] * 6
    assert row["train/num_masked_seqs_by_logprob_error"] == 6 and row["train/num_valid_samples"] == 6
    assert row["train/max_seq_mult_prob_error"] == pytest.approx(math.exp(0.5), rel=1e-3)
    assert row["train/token_mult_prob_error"] > 1.1
    config = make_config("grpo", tmp_path / "all", models["grpo"], data, seq_logprob_error_threshold=1.05)
    with pytest.raises(MismatchError, match="step 1: all 12 sequences"):
        run(config, OtherGenerator())


class CutOff(KeepingBatches):
    """As ``cut_off`` says."""

    def __init__(self, cut: dict[int, slice]) -> None:
        super().__init__()
        self.cut = cut

    def __call__(self, *arguments: Any) -> ReferencePolicy:
        return cut_off(super().__call__(*arguments), self.cut)


def filtered(run_dir: Path, model: str, data: str, **section: Any) -> dict[str, Any]:
    """A run of four steps of two global batches each, six rows, in which answers that were cut off are left
    out."""
    config = make_config(
        "grpo", run_dir, model, data, val_period=0, val_at_start=False, overlong_filtering=True, **section
    )
    config["checkpointing"] |= {"export_hf": False, "save_period": 1, "metric_name": "train/loss"}
    return config


def test_a_step_whose_answers_were_all_cut_off_changes_nothing(
    tmp_path: Path, models: dict[str, str], data: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And of another one the global batch that is empty does not."""
    whole = slice(None)
    maker = CutOff({2: whole, 3: slice(6), 4: slice(3, 9)})
    assert run(filtered(tmp_path, models["grpo"], data), maker) == 0
    first, second, third, last = rows(tmp_path)
    [policy] = maker.policies
    assert [len(batch["input_ids"]) for batch in maker.batches] == [
        12,
        6,
        12,
    ] and policy.trained_steps == 2 + 0 + 1 + 2
    weights = [
        load_file(tmp_path / "checkpoints" / f"step_{step}" / "policy" / "weights" / "model.safetensors")
        for step in (1, 2, 3)
    ]
    assert all(torch.equal(values, weights[1][name]) for name, values in weights[0].items())
    assert any(not torch.equal(values, weights[2][name]) for name, values in weights[0].items())
    assert (second["train/skipped_steps"], second["train/empty_global_batches"], "train/loss" in second) == (
        2,
        2,
        False,
    )
    assert (third["train/skipped_steps"], third["train/empty_global_batches"]) == (1, 1) and third[
        "train/num_valid_samples"
    ] == 6
    for row in (first, last):
        assert "train/empty_global_batches" not in row and math.isfinite(row["train/loss"])
    assert second["train/truncated"] == 1.0 and third["train/truncated"] == 0.5
    [said] = [record.getMessage() for record in caplog.records if "none of its" in record.getMessage()]
    assert said.startswith(
        "step 2: none of its 12 responses counts: 12 were truncated, 0 could not be scored"
    )


def test_a_run_whose_answers_are_always_cut_off_ends(
    tmp_path: Path, models: dict[str, str], data: str
) -> None:
    maker = CutOff(dict.fromkeys(range(1, 9), slice(None)))
    config = filtered(tmp_path, models["grpo"], data)
    config["policy"]["max_consecutive_skips"] = 2
    with pytest.raises(
        BatchError,
        match=r"step 2: none of its 12 responses counts: 12 were truncated.*in 2 steps in a row.*Fix: raise "
        r"policy",
    ):
        run(config, maker)
    assert maker.batches == [] and maker.policies[0].trained_steps == 0
    assert [row["step"] for row in rows(tmp_path)] == [1]
