"""What is kept of a batch that could not be trained on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.algorithms.loss_functions import NLLLoss
from megarl.algorithms.skipped_batches import MOST_KEPT, EmptySteps, SkippedBatches
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import BatchError, NonFiniteError

BATCH = BatchedDataDict(
    {
        "input_ids": torch.arange(35).reshape(7, 5),
        "advantages": torch.tensor([[math.nan] * 5] * 7),
        "texts": list("abcdefg"),
    }
)
SEEN = {
    "rank": 3,
    "place": "pp0 dp1 cp0 tp1",
    "data_rank": 1,
    "micro_batch": 2,
    "rows": [4, 5],
    "quantity": "loss",
}


def found(*seen: dict[str, Any]) -> dict[str, Any]:
    return {"global_batch": 0, "loss": math.nan, "grad_norm": math.inf, "rows": [1, 6], "seen": list(seen)}


class Trained:
    """Answers training calls as it is told."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def train(self, data: Any, loss_fn: Any, gbs: int | None, mbs: int | None) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def run(keeper: SkippedBatches, answer: Any, step: int = 12) -> Any:
    return keeper.train(Trained(answer), BATCH, NLLLoss(), step, [90 + row for row in range(7)])


def test_the_rows_in_which_it_was_seen(tmp_path: Path) -> None:
    answer = {"loss": 1.0, "skipped": [found(SEEN, SEEN | {"rank": 2})]}
    assert run(SkippedBatches(tmp_path / "skipped"), answer) is answer
    report = json.loads((tmp_path / "skipped/step_12.json").read_text())
    assert (report["step"], report["rows"], report["records"]) == (12, [4, 5], [94, 95])
    assert report["skipped"][0]["loss"] == "nan" and report["skipped"][0]["grad_norm"] == "inf"
    assert report["skipped"][0]["seen"][1]["place"] == "pp0 dp1 cp0 tp1"
    assert len({path.stat().st_mode for path in (tmp_path / "skipped").iterdir()}) == 1
    kept = load_file(tmp_path / "skipped/step_12.safetensors")
    assert set(kept) == {"input_ids", "advantages", "row"}
    assert torch.equal(kept["input_ids"], BATCH["input_ids"][4:6]) and kept["row"].tolist() == [4, 5]
    assert bool(kept["advantages"].isnan().all())


def test_the_whole_global_batch_where_nobody_knows_the_rows(tmp_path: Path) -> None:
    run(SkippedBatches(tmp_path), {"skipped": [found()]})
    assert load_file(tmp_path / "step_12.safetensors")["row"].tolist() == [1, 2, 3, 4, 5]


def test_a_step_that_trains_several_times_keeps_each(tmp_path: Path) -> None:
    keeper = SkippedBatches(tmp_path)
    run(keeper, {"skipped": [found(SEEN)]})
    run(keeper, {"skipped": [found()]})
    assert [len(load_file(tmp_path / f"step_12{times}.safetensors")["row"]) for times in ("", "_2")] == [2, 5]
    # a launch that repeats the step writes over what the killed one left
    run(SkippedBatches(tmp_path), {"skipped": [found()]})
    assert len(load_file(tmp_path / "step_12.safetensors")["row"]) == 5 and len([*tmp_path.iterdir()]) == 4


def test_an_error_is_passed_on_after_the_batch_is_kept(tmp_path: Path) -> None:
    error = NonFiniteError("three in a row")
    error.skipped = [found(SEEN)]
    with pytest.raises(NonFiniteError, match="three in a row"):
        run(SkippedBatches(tmp_path), error)
    assert (tmp_path / "step_12.json").exists()


def test_nothing_is_kept_of_a_healthy_step_and_not_more_than_twenty(tmp_path: Path) -> None:
    keeper = SkippedBatches(tmp_path / "skipped")
    run(keeper, {"skipped": []})
    assert not (tmp_path / "skipped").exists()
    for step in range(MOST_KEPT + 3):
        run(keeper, {"skipped": [found(SEEN)]}, step)
    assert len(list((tmp_path / "skipped").glob("*.json"))) == MOST_KEPT
    run(SkippedBatches(), {"skipped": [found(SEEN)]})


@pytest.mark.parametrize("file", ["step_12.json", "step_12.safetensors"])
def test_rows_that_have_no_room_cost_the_rows_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    if file.endswith(".json"):
        (tmp_path / file).symlink_to("/dev/full")
    else:
        # what writes it would put a new file in the place of a link
        (tmp_path / file).mkdir()
    answer = {"loss": 1.0, "skipped": [found()]}
    assert run(SkippedBatches(tmp_path), answer) is answer
    assert "cannot be written to" in caplog.text


@pytest.mark.parametrize(("cut", "causes"), [(0, ["environment"]), (1, ["max_new_tokens", "environment"])])
def test_steps_without_anything_to_train_on_are_put_down_to_their_causes(cut: int, causes: list[str]) -> None:
    masks = BatchedDataDict({"token_mask": torch.ones(2, 4), "sample_mask": torch.zeros(2)})
    truncated = torch.tensor([bool(cut), False])
    samples = BatchedDataDict({"truncated": truncated, "masked": ~truncated})
    with pytest.raises(BatchError, match="none of its 2 responses counts") as raised:
        EmptySteps(1, "grpo").look(masks, samples, 3)
    fix = str(raised.value).partition("Fix: ")[2]
    assert [word for word in ("max_new_tokens", "environment") if word in fix] == causes
