"""DPO as a run, around the plain reference policy: what it leaves and learns, the kept log-probabilities of
the reference, and resuming."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.algorithms import reference_logprobs
from megarl.algorithms.reference_logprobs import ReferenceLogprobs
from megarl.config.plan import batch_plan
from megarl.config.report import print_report
from megarl.config.rules.parallel import layout_of
from megarl.config.rules.view import View
from megarl.config.validate import validate_config
from megarl.data.datasets import Dataset
from megarl.distributed.token_batches import supervised_batch
from megarl.errors import ModelError
from megarl.run.inputs import describe_inputs, read_inputs
from megarl.run.run import run
from tests.unit.driver_runs import Crash, PolicyMaker, comparable, final_weights, make_config, rows
from tests.unit.reference_policy import ReferencePolicy

PAIRS = 7


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of pairs: the sum, and a longer answer that is none. Seven pairs and batches of three: steps run
    over the ends of epochs."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = [
        {"prompt": f"{left}+{left}=", "chosen": str(2 * left), "rejected": "abc"[: 1 + left % 3]}
        for left in range(PAIRS)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


class Counting(PolicyMaker):
    """Counts the rows whose log-probabilities the reference was asked for."""

    rows = 0

    def __call__(self, *arguments: Any) -> ReferencePolicy:
        policy = super().__call__(*arguments)
        ask = policy.get_reference_policy_logprobs

        def counted(data: Any, *args: Any, **kwargs: Any) -> Any:
            self.rows += data.size
            return ask(data, *args, **kwargs)

        policy.get_reference_policy_logprobs = counted  # type: ignore[method-assign]
        return policy


def test_a_whole_run_leaves_what_it_promises_and_learns(tmp_path: Path, model: str, pairs: str) -> None:
    config = make_config(
        "dpo", tmp_path / "run", model, pairs, val_at_start=True, max_num_steps=12, sft_loss_weight=0.1
    )
    assert run(config, PolicyMaker()) == 0
    logged = rows(tmp_path / "run")
    before, *trained = logged
    names = (
        "loss",
        "preference_loss",
        "sft_loss",
        "accuracy",
        "rewards_chosen_mean",
        "rewards_rejected_mean",
        "rewards_margin_mean",
    )
    assert before["validation/samples"] == PAIRS and {f"validation/{name}" for name in names} <= set(before)
    # policy and reference are one
    assert (
        before["validation/preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
        and before["validation/accuracy"] == 0
    )
    for row in trained:
        assert {f"train/{name}" for name in (*names, "grad_norm", "lr")} <= set(
            row
        ) and "timing/reference_logprobs_s" in row
        margin = row["train/rewards_chosen_mean"] - row["train/rewards_rejected_mean"]
        assert row["train/rewards_margin_mean"] == pytest.approx(margin)
        assert (row["train/num_valid_samples"], row["train/global_valid_seqs"]) == (3, 6)
    last = trained[-1]
    assert last["validation/accuracy"] == pytest.approx(1) and last["validation/rewards_margin_mean"] > 1
    assert last["validation/loss"] == pytest.approx(
        last["validation/preference_loss"] + 0.1 * last["validation/sft_loss"]
    )
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf" / "step_12")


def test_a_validation_is_the_mean_over_its_pairs(tmp_path: Path, model: str, pairs: str) -> None:
    """Whatever batches they are in; the last one is filled up."""
    found = []
    for size in (1, 4, 7):
        run_dir = tmp_path / str(size)
        config = make_config(
            "dpo", run_dir, model, pairs, val_global_batch_size=size, val_micro_batch_size=1, max_num_steps=2
        )
        config["checkpointing"]["enabled"] = False
        assert run(config, PolicyMaker()) == 0
        found.append(
            {name: value for name, value in rows(run_dir)[-1].items() if name.startswith("validation/")}
        )
    assert (
        all(each == pytest.approx(found[0], rel=1e-5) for each in found)
        and found[0]["validation/samples"] == PAIRS
    )
    config["run_dir"], config["dpo"] = (
        str(tmp_path / "few"),
        {**config["dpo"], "val_global_batch_size": 2, "val_batches": 2},
    )
    assert run(config, PolicyMaker()) == 0
    assert rows(tmp_path / "few")[-1]["validation/samples"] == 4


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "in the step"])
def test_a_resumed_run_is_the_whole_one(kept: bool, tmp_path: Path, model: str, pairs: str) -> None:
    settings = {
        "cache_reference_logprobs": kept,
        "preference_loss_type": "ipo",
        "preference_average_log_probs": True,
    }
    whole, resumed = (
        make_config("dpo", tmp_path / name / "run", model, pairs, **settings) for name in ("whole", "resumed")
    )
    assert run(whole, PolicyMaker()) == 0
    with pytest.raises(Crash):
        run(resumed, PolicyMaker(crash_after=3))
    # the reference is what the run began with, also where its log-probabilities have to be computed anew by a
    # policy that was trained
    shutil.rmtree(tmp_path / "resumed" / "cache", ignore_errors=True)
    maker = Counting()
    assert run(resumed, maker) == 0
    # training and validation have the same pairs, which are computed once; in the step, two of training and
    # one of validation
    assert maker.rows == (2 * PAIRS if kept else 2 * (2 * 3 + 2 * 4))
    first, second = (final_weights(tmp_path / name / "run") for name in ("whole", "resumed"))
    assert all(torch.equal(first[name], second[name]) for name in first) and first.keys() == second.keys()
    assert comparable(tmp_path / "whole" / "run") == comparable(tmp_path / "resumed" / "run")


def test_kept_log_probabilities_are_those_of_each_step(tmp_path: Path, model: str, pairs: str) -> None:
    weights = []
    for kept in (True, False):
        run_dir = tmp_path / str(kept)
        assert (
            run(make_config("dpo", run_dir, model, pairs, cache_reference_logprobs=kept), PolicyMaker()) == 0
        )
        weights.append(final_weights(run_dir))
    for name, tensor in weights[0].items():
        # Adam makes of a rounding error in a tiny gradient a step of up to the learning rate
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-4, atol=1e-4)


class Asking:
    """Reads the data of a run and keeps log-probabilities of its training data, as often as it is asked."""

    def __init__(self, directory: Path, model: str, pairs: str) -> None:
        self.directory, self.model, self.pairs = directory, model, pairs

    def ask(self, **changes: Any) -> tuple[int, torch.Tensor]:
        """The rows that the reference was asked for, and what comes of all pairs, [rows, S]."""
        config = make_config(
            "dpo", self.directory / "run", changes.pop("model", self.model), changes.pop("pairs", self.pairs)
        )
        config["policy"]["precision"] = changes.pop("precision", "float32")
        config["data"]["train"] |= changes.pop("source", {})
        config["data"] |= changes
        config = validate_config(config)
        maker = Counting()
        with ExitStack() as stack:
            data = read_inputs(config, stack).train
            policy = maker(config, None, _Fresh(), stack)
            kept = ReferenceLogprobs(policy, config, data, 0, keeps=True)  # type: ignore[arg-type]
            found = kept.of(range(len(data.examples)), _batch(data))
            again = kept.of(range(len(data.examples)), _batch(data))
            assert torch.equal(found, again)
            return maker.rows, found


class _Fresh:
    def weights_path(self, role: Any) -> None:
        return None

    optimizer_path = weights_path


def _batch(data: Dataset) -> Any:
    return supervised_batch(list(data.examples), 0)


def test_kept_log_probabilities_are_the_model_s(tmp_path: Path, model: str, pairs: str) -> None:
    asking = Asking(tmp_path, model, pairs)
    _, found = asking.ask()
    with ExitStack() as stack:
        data = read_inputs(validate_config(make_config("dpo", tmp_path / "run", model, pairs)), stack).train
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    for row, example in enumerate(data.examples):
        ids = torch.tensor([[*example.prompt_ids, *example.answer_ids]])
        with torch.no_grad():
            logprobs = network(input_ids=ids).logits[0].log_softmax(-1)
        expected = torch.zeros(found.shape[1], dtype=torch.float64)
        for place in range(len(example.prompt_ids), ids.shape[1]):
            expected[place] = logprobs[place - 1, ids[0, place]]
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-5, atol=1e-5)


def test_the_next_start_reads_them_and_nothing_old_is_read(
    tmp_path: Path, model: str, pairs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_logprobs, "_ROWS_OF_TABLE", 4)
    monkeypatch.setattr(reference_logprobs, "_ROWS_OF_CALL", 3)
    asking, everything = Asking(tmp_path, model, pairs), 2 * PAIRS
    asked, found = asking.ask()
    assert asked == everything
    assert asking.ask()[0] == 0 and torch.equal(asking.ask()[1], found)
    # a source that comes twice is computed once
    assert asking.ask(source={"repeat": 2})[0] == 0
    # of four tables, of two pairs each, the first three are those that were there before
    longer = tmp_path / "longer.jsonl"
    longer.write_text(Path(pairs).read_text() + '\n{"prompt": "8+8=", "chosen": "16", "rejected": "no"}')
    assert asking.ask(pairs=str(longer))[0] == 4
    # one answer of the fifth pair is another one
    lines = Path(pairs).read_text().splitlines()
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([*lines[:4], lines[4].replace('"rejected": "', '"rejected": "p'), *lines[5:]]))
    assert asking.ask(pairs=str(other))[0] == 4
    # another template, another precision
    assert asking.ask(prompt_template="p{prompt}")[0] == everything
    assert asking.ask(precision="bfloat16")[0] == everything
    # a directory of other weights under the same name, as old and as large as the one before
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert asking.ask(model=str(copy))[0] == 0
    file = copy / "model.safetensors"
    times, weights = file.stat(), load_file(file)
    weights["model.norm.weight"][3] += 0.5
    save_file(weights, file, metadata={"format": "pt"})
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_size == times.st_size
    asked, moved = asking.ask(model=str(copy))
    assert asked == everything and not torch.equal(moved, found)
    # a table that a full disk cut off
    damaged = next(each for each in (tmp_path / "cache").iterdir() if (each / "logprobs.values").is_file())
    (damaged / "logprobs.values").write_bytes(b"")
    all_of_them: list[dict[str, Any]] = [
        {},
        {"model": str(copy)},
        {"precision": "bfloat16"},
        {"prompt_template": "p{prompt}"},
    ]
    assert sum(asking.ask(**each)[0] for each in all_of_them) <= 4
    assert torch.equal(asking.ask()[1], found)


def test_what_is_not_finite_is_refused_and_not_kept(tmp_path: Path, model: str, pairs: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    for _ in range(2):
        with pytest.raises(ModelError, match=r"record \d+ .* not finite. Fix: "):
            Asking(tmp_path, str(broken), pairs).ask()


def test_the_dry_run_counts_pairs(tmp_path: Path, model: str, pairs: str) -> None:
    lines = describe_inputs(validate_config(make_config("dpo", tmp_path / "run", model, pairs)))
    assert any(line.startswith(f"data.train: {PAIRS} pairs; prompts of 4 to 4 tokens") for line in lines)


def test_batches_are_planned_in_rows_and_written_in_pairs(tmp_path: Path, model: str, pairs: str) -> None:
    config = validate_config(make_config("dpo", tmp_path / "run", model, pairs))
    plan = batch_plan(config, layout_of(View(config)))
    assert (plan.prompts, plan.samples, plan.global_batches, plan.samples_per_rank, plan.micro_batches) == (
        3,
        6,
        1,
        6,
        3,
    )
    assert plan.tokens_per_micro_batch == 2 * config["policy"]["max_total_sequence_length"]
    console = Console(file=io.StringIO(), width=100)
    print_report(config, None, console)
    assert "3 pairs x 2 responses" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_reference_of_a_merged_adapter_is_another_one(tmp_path: Path, model: str) -> None:
    """Stored log-probabilities of a model are neither those with an adapter, nor those after it was trained
    again."""
    config = make_config("dpo", tmp_path / "run", model, tmp_path / "pairs.jsonl")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    found = []
    for merged, factor in ((None, 1.0), (str(adapter), 1.0), (str(adapter), 2.0)):
        save_file({"a": torch.full((2,), factor)}, adapter / "adapter_model.safetensors")
        found.append(reference_logprobs.model_identity({**config["policy"], "merged_adapter": merged}))
    assert found[0] == found[1][: len(found[0])]
    assert found[0] != found[1] != found[2]
