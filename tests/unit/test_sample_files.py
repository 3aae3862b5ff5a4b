"""Samples on disk: what a run leaves of its answers, and that whatever happens to the disk does not happen to
the run."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.validation_sets import SetPlan
from megarl.data.datasets import Example, SourceRange
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.observe import sample_files
from megarl.observe.sample_files import SampleFiles, list_samples, read_samples, shorten
from megarl.rollout.collector import Rollouts
from megarl.rollout.evaluation import ValidatedSet
from megarl.rollout.sample_log import SampleLog
from megarl.rollout.samples import mismatch_metrics, row_mismatch
from megarl.run.run import run
from tests.tiers import slow
from tests.unit.driver_runs import STEPS, Crash, PolicyMaker, comparable, final_weights, make_config, rows

SECTION = {
    "num_train_samples": None,
    "num_validation_samples": None,
    "period": 1,
    "max_characters": 1000,
    "token_ids": False,
    "wandb_table": False,
}

JUDGE = """
from megarl.rollout.environment import EnvironmentReturn

class Judge:
    def __init__(self, section): pass

    def step(self, turn):
        even = [float(len(text) % 2 == 0) for text in turn.responses]
        small = [float(sum(ids) % 3) for ids in turn.response_ids]
        rewards = [one + 0.5 * other for one, other in zip(even, small)]
        count = len(rewards)
        parts = {"even": even, "small": small}
        return EnvironmentReturn(rewards, [True] * count, [False] * count, accuracies=even, parts=parts)

    def fault_of_reference(self, answer): return None

    def close(self): pass
"""


def content(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run_dir / "samples").iterdir())}


def texts_of_losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == sample_files.__name__]


# whole runs


def test_a_run_leaves_the_samples_that_its_metrics_are_of(tmp_path: Path, model: str, data: str) -> None:
    config = make_config("grpo", tmp_path, model, data)
    (tmp_path / "judge.py").write_text(JUDGE)
    config["env"] = {"environment": f"{tmp_path / 'judge.py'}:Judge"}
    run(config, PolicyMaker())
    assert [step for step, _ in list_samples(tmp_path / "samples", "train")] == [1, 2, 3, 4]
    assert [step for step, _ in list_samples(tmp_path / "samples", "validation")] == [0, 2, 4]
    logged = {row["step"]: row for row in rows(tmp_path)}
    for step, path in list_samples(tmp_path / "samples", "train"):
        found, row = read_samples(path), logged[step]
        assert [(each["group"], each["generation"]) for each in found] == [
            divmod(place, 3) for place in range(12)
        ]
        assert all(each["record"] == found[place - place % 3]["record"] for place, each in enumerate(found))
        assert all(
            each["step"] == step and each["weight_version"] == step - 1 and each["set"] is None
            for each in found
        )
        assert np.mean([each["reward"] for each in found]) == pytest.approx(row["train/reward"])
        assert all(
            each["reward"] == pytest.approx(each["rewards"]["even"] + 0.5 * each["rewards"]["small"])
            for each in found
        )
        assert np.mean([each["rewards"]["small"] for each in found]) == pytest.approx(
            row["train/reward/small"]
        )
        assert np.mean([each["accuracy"] for each in found]) == pytest.approx(row["train/accuracy"])
        assert np.mean([each["length"] for each in found]) == pytest.approx(row["train/generation_length"])
        assert np.mean([each["truncated"] for each in found]) == pytest.approx(row["train/truncated"])
        advantages = [each["advantage"] for each in found]
        assert (min(advantages), max(advantages)) == pytest.approx(
            (row["train/advantages_min"], row["train/advantages_max"])
        )
        tokens = np.array([each["length"] for each in found])
        assert np.average([each["mismatch"] for each in found], weights=tokens) == pytest.approx(
            row["train/mismatch_mean"]
        )
        assert all(
            each["source"] == f"data file {data}" and each["env"] is None and each["masked"] is False
            for each in found
        )
    assert all(row["train/reward_std"] > 0 for row in logged.values() if row["step"]), (
        "something is to be told apart"
    )
    for step, path in list_samples(tmp_path / "samples", "validation"):
        found = read_samples(path)
        assert (
            [each["record"] for each in found] == list(range(len(found))) == [each["group"] for each in found]
        )
        assert np.mean([each["accuracy"] for each in found]) == pytest.approx(
            logged[step]["validation/accuracy"]
        )
        assert len(found) == logged[step]["validation/samples"]
        assert {each["weight_version"] for each in found} == {step} and {
            each["advantage"] for each in found
        } == {None}
    given = [json.loads(line) for line in Path(data).read_text().splitlines()]
    for each, record in zip(found, given, strict=True):
        assert record["prompt"] in each["prompt"] and each["reference"] == record["answer"]


def test_a_run_is_the_same_with_samples_and_without(tmp_path: Path, model: str, data: str) -> None:
    for name, section in (
        ("with", {"num_train_samples": None, "token_ids": True}),
        ("without", {"enabled": False}),
    ):
        run(
            {**make_config("grpo", tmp_path / name, model, data), "logger": {"samples": section}},
            PolicyMaker(),
        )
    assert (tmp_path / "with" / "samples").is_dir() and not (tmp_path / "without" / "samples").exists()
    assert comparable(tmp_path / "with") == comparable(tmp_path / "without")
    weights = [final_weights(tmp_path / name) for name in ("with", "without")]
    assert weights[0].keys() == weights[1].keys() and all(
        torch.equal(weights[0][name], weights[1][name]) for name in weights[0]
    )


def test_the_keys_bound_what_is_written(tmp_path: Path, model: str, data: str) -> None:
    section = {
        "num_train_samples": 5,
        "num_validation_samples": 2,
        "period": 3,
        "max_characters": 2,
        "max_files": 2,
        "token_ids": True,
    }
    run({**make_config("grpo", tmp_path, model, data), "logger": {"samples": section}}, PolicyMaker())
    assert sorted(content(tmp_path)) == [
        "train_step_1.jsonl",
        "train_step_3.jsonl",
        "validation_step_0.jsonl",
        "validation_step_4.jsonl",
    ]
    train, validation = (
        read_samples(tmp_path / "samples" / f"{name}.jsonl") for name in ("train_step_3", "validation_step_4")
    )
    assert (len(train), len(validation)) == (5, 2)
    for each in (*train, *validation):
        assert "characters left out" in each["prompt"]
        assert len(each["answer_ids"]) == each["length"]


def test_nothing_is_written_of_what_generates_nothing(tmp_path: Path, model: str, data: str) -> None:
    config = make_config("sft", tmp_path, model, data)
    config["sft"]["max_num_steps"] = 1
    run(config, PolicyMaker())
    assert not (tmp_path / "samples").exists()


@slow
def test_a_resumed_run_overwrites_what_it_repeats(tmp_path: Path, model: str, data: str) -> None:
    run(make_config("grpo", tmp_path / "whole", model, data), PolicyMaker())
    config = make_config("grpo", tmp_path / "cut", model, data)
    seen: dict[int, list[str]] = {}

    def look(call: int) -> None:
        seen[call] = sorted(content(tmp_path / "cut")) if (tmp_path / "cut" / "samples").is_dir() else []

    with pytest.raises(Crash):
        run(
            config, PolicyMaker(2)
        )  # in the third step, whose samples are kept before anything is trained on them
    assert "train_step_3.jsonl" in content(tmp_path / "cut")
    for name in ("train_step_3.jsonl", "validation_step_4.jsonl"):
        (tmp_path / "cut" / "samples" / name).write_text("of before")
    (tmp_path / "cut" / "samples" / ".train_step_3.jsonl.1.tmp").write_text("half")
    with pytest.raises(Crash):
        run(config, PolicyMaker(0, look))
    assert "validation_step_4.jsonl" not in seen[1] and "train_step_2.jsonl" in seen[1], (
        "those of later steps are of another run"
    )
    run(config, PolicyMaker())
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_a_run_that_starts_over_keeps_the_old_samples_beside(tmp_path: Path, model: str, data: str) -> None:
    config = make_config("grpo", tmp_path, model, data, max_num_steps=1, val_at_start=False)
    config["checkpointing"] = {"enabled": False, "resume": "never"}
    run(config, PolicyMaker())
    before = content(tmp_path)
    run(config, PolicyMaker())
    assert (
        {path.name: path.read_bytes() for path in (tmp_path / "samples.before-1").iterdir()}
        == before
        == content(tmp_path)
    )


def test_samples_are_on_disk_before_a_checkpoint_is(
    tmp_path: Path, model: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes nothing until somebody waits for it: only a flush brings files there."""
    flushing, whole_file, flush = threading.Event(), sample_files.whole_file, SampleFiles.flush
    seen: dict[int, set[str]] = {}

    def late(path: Path, **options: bool) -> Any:
        flushing.wait()
        return whole_file(path, **options)

    def flush_and_close_again(files: SampleFiles) -> None:
        flushing.set()
        flush(files)
        flushing.clear()

    monkeypatch.setattr(sample_files, "whole_file", late)
    monkeypatch.setattr(SampleFiles, "flush", flush_and_close_again)
    config = make_config("grpo", tmp_path, model, data, val_at_start=False)
    run(
        config,
        PolicyMaker(
            at_call=lambda call: seen.setdefault(
                call, {path.name for path in tmp_path.glob("samples/*.jsonl")}
            )
        ),
    )
    assert seen[2] == set() and seen[3] == {
        "train_step_1.jsonl",
        "train_step_2.jsonl",
        "validation_step_2.jsonl",
    }
    assert len(content(tmp_path)) == STEPS + 2, "the rest is written when the run ends"


def test_what_is_not_the_model_s_stays_out(tmp_path: Path, model: str, data: str) -> None:
    """Further fields of a record go to the environment alone: a key for a service may be among them."""
    records = [{**json.loads(line), "token": "hf_hidden"} for line in Path(data).read_text().splitlines()]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    config = make_config("grpo", tmp_path / "run", model, str(tmp_path / "data.jsonl"), max_num_steps=2)
    config["data"]["train"] = {**config["data"]["train"], "extra_keys": ["token"]}
    config["policy"]["megatron_cfg"]["env_vars"] = {"HF_TOKEN": "hf_hidden"}
    run(config, PolicyMaker())
    assert len(content(tmp_path / "run")) == 4
    assert not any(b"hf_hidden" in text for text in content(tmp_path / "run").values())


# disks


@pytest.mark.parametrize("fault", ["full", "gone"])
def test_a_run_goes_on_without_a_disk_and_says_so_once(
    fault: str,
    tmp_path: Path,
    model: str,
    data: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if "samples" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    if fault == "full":
        monkeypatch.setattr(sample_files.os, "fsync", full)
    else:
        (tmp_path / "samples").write_text("a file where the directory would be")
    config = make_config("grpo", tmp_path, model, data, val_at_start=False)
    config["checkpointing"]["enabled"] = False
    run(config, PolicyMaker())
    assert rows(tmp_path)[-1]["step"] == STEPS
    said = [text for text in texts_of_losses(caplog) if "training continues without them" in text]
    assert len(said) == 1 and ("No space left on device" if fault == "full" else "FileExistsError") in said[0]
    assert f"lost {STEPS + 2} times" in texts_of_losses(caplog)[-1]
    assert fault == "gone" or list((tmp_path / "samples").iterdir()) == [], "no half of a file stays"


def test_a_disk_that_hangs_stalls_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers, whole_file = threading.Event(), sample_files.whole_file

    def hang(path: Path, **options: bool) -> Any:
        answers.wait()
        return whole_file(path, **options)

    monkeypatch.setattr(sample_files, "whole_file", hang)
    files = SampleFiles(tmp_path / "samples", patience_s=0.01)
    for step in range(1, 10):
        files.write("train", step, [{"prompt": "", "answer": ""}])
    files.flush()
    waits: list[float | None] = []
    wait_for = files._changed.wait_for

    def note(predicate: Any, timeout: float | None = None) -> bool:
        waits.append(timeout)
        return wait_for(predicate, timeout)

    monkeypatch.setattr(files._changed, "wait_for", note)
    files.flush()
    assert waits == [0.0], "the same disk is not waited for again"
    assert len([text for text in texts_of_losses(caplog) if "slower than the steps" in text]) == 1
    answers.set()
    files.close()
    files.close()
    assert files._thread is not None and files._thread.daemon
    files._thread.join(60)
    assert sorted(content(tmp_path)) == [f"train_step_{step}.jsonl" for step in range(1, 5)]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SampleFiles(tmp_path / "samples") as files:
        files.write("train", 1, [{"prompt": "p", "answer": "a"}])
    before = content(tmp_path)

    def fail(*_: object) -> None:
        raise OSError("unplugged")

    with monkeypatch.context() as patch:
        patch.setattr(sample_files.os, "rename", fail)
        with SampleFiles(tmp_path / "samples") as files:
            files.write("train", 1, [{"prompt": "p", "answer": "another"}])
    assert content(tmp_path) == before


def test_the_oldest_file_and_the_newest_ones_stay(tmp_path: Path) -> None:
    with SampleFiles(tmp_path / "samples", most_files=3) as files:
        for step in (10, 2, 300, 40, 5):
            files.write("validation", step, [{"prompt": "p", "answer": "a"}])
            files.write("train", 1, [{"prompt": "p", "answer": "a"}])
            files.flush()
    assert [step for step, _ in list_samples(tmp_path / "samples", "validation")] == [2, 40, 300]
    assert [step for step, _ in list_samples(tmp_path / "samples", "train")] == [1]


def test_files_of_other_names_are_nobody_s(tmp_path: Path) -> None:
    for name in (
        "train_step_3.jsonl",
        "train_step_x.jsonl",
        "train_step_4.jsonl.gz",
        "notes.txt",
        "validation_step_3.jsonl",
    ):
        (tmp_path / name).write_text("")
    assert list_samples(tmp_path, "train") == [(3, tmp_path / "train_step_3.jsonl")]
    SampleFiles(tmp_path).truncate_after(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "train_step_4.jsonl.gz",
        "train_step_x.jsonl",
    ]
    assert list_samples(tmp_path / "nowhere", "train") == []


# what is in them


HOSTILE = (
    "a\x1b[31mred\x9b2J\x00\r\n\ttab </script><img onerror=alert(1)> \u202eevil \u2028 \ud800 ü漢😀 "
    "\\x1b \x7f \x85"
)


def test_any_text_comes_back_as_it_was_and_no_terminal_obeys_it(tmp_path: Path) -> None:
    with SampleFiles(tmp_path / "samples") as files:
        files.write("train", 1, [{"prompt": HOSTILE, "answer": HOSTILE[::-1]}, {"prompt": "", "answer": ""}])
    [raw] = content(tmp_path).values()
    assert [
        (row["prompt"], row["answer"]) for row in read_samples(tmp_path / "samples/train_step_1.jsonl")
    ] == [
        (HOSTILE, HOSTILE[::-1]),
        ("", ""),
    ]
    text = raw.decode()
    assert (
        not any(character in text for character in "\x1b\x9b\x00\r\t\x7f\x85\u202e\u2028") and "ü漢😀" in text
    )
    assert raw.count(b"\n") == 2 and not any(b"\n" in line for line in raw.split(b"\n"))


def test_lines_that_are_no_samples_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = json.dumps({"prompt": "p", "answer": "a", "reward": math.nan})
    (tmp_path / "f").write_text(
        f'{good}\nnonsense\n[1]\n{{"prompt": 3, "answer": "a"}}\n\n{"[" * 100_000}\n{good}'
    )
    assert read_samples(tmp_path / "f") == [{"prompt": "p", "answer": "a", "reward": None}] * 2
    assert "4 lines are not samples" in caplog.text


@pytest.mark.parametrize(
    ("text", "limit", "cut"),
    [("abcdef", 6, "abcdef"), ("abcdefg", 4, "ab\n[... 3 characters left out ...]\nfg"), ("", 1, "")],
)
def test_a_long_text_loses_its_middle(text: str, limit: int, cut: str) -> None:
    assert shorten(text, limit) == cut
    assert shorten("abc", 1) == "\n[... 2 characters left out ...]\nc"


class Words:
    """A tokenizer of one word a token."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return " ".join(f"w{each}" for each in ids)


def rollouts_of(prompts: int, generations: int, first: int = 0) -> Rollouts:
    """Samples with everything that can be odd: no tokens, masked ones, numbers that are none."""
    records = [
        Example(first + place, (7, 8, place), (), f"reference {place}", env_name="math")
        for place in range(prompts)
    ]
    count = prompts * generations
    mask = torch.zeros(count, 6)
    mask[:, 3:5] = 1.0
    mask[-1] = 0.0
    samples: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": torch.arange(count * 6).reshape(count, 6),
            "input_lengths": torch.tensor([5] * (count - 1) + [3]),
            "prompt_lengths": torch.full((count,), 3),
            "token_mask": mask,
            "sample_mask": torch.tensor([1.0] * (count - 2) + [0.0, 0.0]),
            "generation_logprobs": torch.full((count, 6), -1.0),
            "generation_lengths": torch.tensor([2] * (count - 1) + [0]),
            "truncated": torch.tensor([True] + [False] * (count - 1)),
            "response_text": [f"answer {row}" for row in range(count)],
            "reward": torch.tensor([0.1] * count),
            "accuracy": torch.tensor([math.nan] + [1.0] * (count - 1)),
            "reward/right": torch.tensor([1.0] * (count - 1) + [math.nan]),
            "weight_version": torch.full((count,), 8),
            "masked": torch.tensor([False] * (count - 2) + [True, False]),
        }
    )
    return Rollouts(samples, [record for record in records for _ in range(generations)], {})


def log_of(tmp_path: Path, **section: Any) -> tuple[SampleLog, SampleFiles]:
    files = SampleFiles(tmp_path / "samples")
    return SampleLog(files, {**SECTION, **section}, Words()), files  # type: ignore[arg-type]


def test_what_is_not_known_is_null_and_numbers_are_those_of_the_batch(tmp_path: Path) -> None:
    log, files = log_of(tmp_path, token_ids=True)
    rollouts = rollouts_of(2, 2, first=3)
    previous = torch.full((4, 6), -1.0)
    previous[0, 4], previous[1, 3], previous[1, 5] = -1.5, math.nan, 100.0
    with files:
        log.train(
            9,
            rollouts,
            torch.tensor([0.3, -0.3, 0.0, 0.0]),
            {**rollouts.samples, "prev_logprobs": previous},
            [SourceRange("one", 0, 4), SourceRange("two", 4, 9)],
        )
    first, second, third, last = read_samples(tmp_path / "samples/train_step_9.jsonl")
    assert first == {
        "step": 9,
        "set": None,
        "group": 0,
        "generation": 0,
        "record": 3,
        "source": "one",
        "env": "math",
        "prompt": "w7 w8 w0",
        "answer": "answer 0",
        "reference": "reference 0",
        "reward": 0.1,
        "accuracy": None,
        "advantage": 0.3,
        "mismatch": 0.25,
        "rewards": {"right": 1.0},
        "length": 2,
        "truncated": True,
        "masked": False,
        "weight_version": 8,
        "prompt_ids": [0, 1, 2],
        "answer_ids": [3, 4],
    }
    assert second["mismatch"] == "inf" and second["generation"] == 1 and second["accuracy"] == 1.0
    assert (third["record"], third["source"], third["prompt"], third["group"]) == (4, "two", "w7 w8 w1", 1)
    assert (third["masked"], last["masked"], last["length"], last["mismatch"], last["rewards"]) == (
        True,
        True,
        0,
        None,
        {"right": None},
    )
    assert last["answer_ids"] == []
    assert (third["reward"], third["accuracy"]) == (None, None)
    assert (last["reward"], last["accuracy"]) == (0.1, 1.0), "no answer, but scored"


def test_a_table_that_takes_long_keeps_no_step_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is made by the thread that writes the files; one that fails costs nothing else."""
    goes_on, taken = threading.Event(), list[tuple[str, int, int, bool]]()

    class Sinks:
        def log_samples(self, kind: str, step: int, rows: list[Any]) -> None:
            goes_on.wait(60)  # where it is called within the step, nobody sets it
            taken.append((kind, step, len(rows), threading.current_thread() is threading.main_thread()))
            if step == 2:
                raise OSError("no network")

    log, files = log_of(tmp_path, wandb_table=True)
    log = dataclasses.replace(log, sinks=Sinks())
    with files:
        for step in (1, 2, 3):
            log.train(step, rollouts_of(2, 2), torch.zeros(4))
        assert taken == []
        goes_on.set()
    assert taken == [("train", step, 4, False) for step in (1, 2, 3)]
    assert len(content(tmp_path)) == 3 and "no network" in caplog.text


def test_a_validation_of_several_sets_in_parts_is_one_file(tmp_path: Path) -> None:
    log, files = log_of(tmp_path, num_validation_samples=5)
    with files:
        aime = ValidatedSet(SetPlan("aime", (0,), 2), [rollouts_of(2, 2), rollouts_of(1, 2, first=2)], None)
        sums = ValidatedSet(SetPlan("sums", (1,), 3), [rollouts_of(1, 3)], None)
        log.validation(7, [aime, sums])
        log.validation(8, [])
        log.validation(9, [sums])
    found = read_samples(tmp_path / "samples/validation_step_7.jsonl")
    assert [(each["set"], each["group"], each["generation"], each["record"]) for each in found] == [
        *[("aime", place // 2, place % 2, place // 2) for place in range(5)],
        *[("sums", 0, place, 0) for place in range(3)],
    ]
    assert {each["set"] for each in read_samples(tmp_path / "samples/validation_step_9.jsonl")} == {None}
    assert sorted(content(tmp_path)) == ["validation_step_7.jsonl", "validation_step_9.jsonl"]


@pytest.mark.parametrize("seed", range(5))
def test_the_mismatch_of_rows_is_that_of_a_slow_loop(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    generation, policy = (-5 * torch.rand(4, 7, generator=draw) for _ in range(2))
    mask = (torch.rand(4, 7, generator=draw) > 0.4).float()
    mask[2] = 0.0
    policy[0, 0], mask[0, 0] = math.nan, 0.0
    found = row_mismatch(generation, policy, mask).tolist()
    for row in range(4):
        values = [
            abs(float(generation[row, place]) - float(policy[row, place]))
            for place in range(7)
            if mask[row, place]
        ]
        assert found[row] == pytest.approx(sum(values) / len(values)) if values else math.isnan(found[row]), (
            f"seed {seed}"
        )
    counts = mask.sum(1)
    whole = sum(found[row] * float(counts[row]) for row in (0, 1, 3)) / float(counts.sum())
    assert whole == pytest.approx(mismatch_metrics(generation, policy, mask)["mismatch_mean"])


def test_an_unwritable_directory_is_said_at_the_start_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "samples").write_text("a file")
    with caplog.at_level(logging.WARNING):
        SampleFiles(tmp_path / "samples").truncate_after(3)
    assert "cannot be removed" in caplog.text and os.path.isfile(tmp_path / "samples")


def test_a_temporary_file_that_stays_keeps_no_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".train_step_9.jsonl.tmp").mkdir()
    (tmp_path / "train_step_9.jsonl").write_text("")
    with caplog.at_level(logging.WARNING):
        SampleFiles(tmp_path).truncate_after(3)
    assert "cannot be removed" in caplog.text and list_samples(tmp_path, "train") == []
