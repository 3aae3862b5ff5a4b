"""A launch without room for its micro-batches, where ranks share the model: the next one goes on with smaller ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.resume import (
    SMALLER_FILE,
    _smaller,
    halvings_of,
    note_smaller_micro_batches,
    remember_halvings,
    with_smaller_micro_batches,
)
from megarl.algorithms.run import run
from megarl.errors import ConfigError, MicroBatchMemoryError, WorkerLostError
from megarl.observe.launches import read_launches
from megarl.observe.metrics_file import FILE_NAME
from tests.full_disk import full_disk
from tests.unit.driver_runs import PolicyMaker, comparable, make_config


@given(st.integers(1, 200), st.integers(1, 50))
def test_half_as_many_rows_divide_what_the_rows_divided(rows: int, times: int) -> None:
    half = _smaller(rows)
    assert (rows * times) % half == 0 and (half <= rows / 2 or half == rows == 1)
    assert not [size for size in range(half + 1, rows // 2 + 1) if rows % size == 0], "the largest of them"


def no_room(at: int, may_go_on_smaller: bool = True, kind: str = "training") -> PolicyMaker:
    def fail(call: int) -> None:
        if call == at:
            error = MicroBatchMemoryError("out of memory", kind)
            error.may_go_on_smaller = may_go_on_smaller
            raise error

    return PolicyMaker(at_call=fail)


def test_the_next_launch_goes_on_with_half(tmp_path: Path, model: str, data: str, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config("sft", tmp_path / "run", model, data)
    with pytest.raises(MicroBatchMemoryError) as caught:
        run(config, no_room(3))
    assert caught.value.exit_code == 4, "Slurm requeues"
    assert (tmp_path / "run" / SMALLER_FILE).is_file()
    maker = PolicyMaker()
    assert run(config, maker) == 0
    assert config["policy"]["train_micro_batch_size"] == 2 and maker.policies[0].cfg["train_micro_batch_size"] == 1
    assert maker.policies[0].cfg["logprob_batch_size"] == 2, "only of the passes that had no room"
    assert "halved 1 times" in caplog.text
    assert run(make_config("sft", tmp_path / "whole", model, data), PolicyMaker()) == 0
    assert comparable(tmp_path / "run") == comparable(tmp_path / "whole"), "the plain policy has no micro-batches"


def test_the_same_launch_goes_on_with_half_where_it_may_restart(tmp_path: Path, model: str, data: str) -> None:
    config = make_config("sft", tmp_path / "run", model, data)
    config["cluster"]["max_restarts"] = 1
    errors = iter([True, False])

    def fail(call: int) -> None:
        if call == 3 and next(errors, False):
            error = MicroBatchMemoryError("out of memory", "training")
            error.may_go_on_smaller = True
            raise error

    maker = PolicyMaker(at_call=fail)
    assert run(config, maker) == 0
    assert [policy.cfg["train_micro_batch_size"] for policy in maker.policies] == [2, 1]
    [launch] = read_launches(tmp_path / "run")
    assert [restart.reason for restart in launch.restarts] == ["MicroBatchMemoryError: out of memory"]
    assert run(make_config("sft", tmp_path / "whole", model, data), PolicyMaker()) == 0
    assert comparable(tmp_path / "run") == comparable(tmp_path / "whole")
    with pytest.raises(MicroBatchMemoryError):
        refused = make_config("sft", tmp_path / "other", model, data)
        refused["cluster"]["max_restarts"] = 1
        run(refused, no_room(1, may_go_on_smaller=False))


def test_micro_batches_that_workers_have_halved_are_so_for_those_that_follow(tmp_path: Path, model: str, data: str) -> None:
    """Built anew in the same launch after a loss, and in the next one; halvings add up."""
    config = make_config("sft", tmp_path / "run", model, data)
    config["policy"] |= {"train_global_batch_size": 4, "train_micro_batch_size": 4}
    config["cluster"]["max_restarts"] = 1

    class Halving(PolicyMaker):
        def __call__(self, config: dict[str, Any], *arguments: Any) -> Any:
            policy = super().__call__(config, *arguments)
            policy.halvings = lambda: {"training": 1}  # type: ignore[method-assign]
            return policy

    lost = iter([True])

    def fail(call: int) -> None:
        if call == 3 and next(lost, False):
            raise WorkerLostError("worker process died")

    maker = Halving(at_call=fail)
    assert run(config, maker) == 0
    assert [policy.cfg["train_micro_batch_size"] for policy in maker.policies] == [4, 2]
    assert json.loads((tmp_path / "run" / SMALLER_FILE).read_text()) == {"training": 2}


def test_halvings_are_written_once_and_never_taken_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remember_halvings({}, {}, tmp_path)
    remember_halvings({"training": 0}, {"training": 3}, tmp_path)
    assert not (tmp_path / SMALLER_FILE).exists()
    remember_halvings({"training": 1}, {"training": 2}, tmp_path)
    before = (tmp_path / SMALLER_FILE).stat().st_ino
    remember_halvings({"training": 1}, {"training": 2}, tmp_path)
    remember_halvings({"training": 1}, {}, tmp_path)
    assert halvings_of(tmp_path) == {"training": 3} and (tmp_path / SMALLER_FILE).stat().st_ino == before
    remember_halvings({"log-probability": 1}, {}, tmp_path)
    assert halvings_of(tmp_path) == {"training": 3, "log-probability": 1}
    remember_halvings({"training": 1}, {}, tmp_path / "absent")
    assert "will not know" in caplog.text, "which is no reason to end a run"


def test_where_the_disk_is_full_the_error_stays_what_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Smaller ones cannot be remembered: new workers would have no more room, in this launch or the next."""
    error = MicroBatchMemoryError("out of memory", "training")
    error.may_go_on_smaller = True
    (tmp_path / FILE_NAME).touch()
    with full_disk(tmp_path):
        note_smaller_micro_batches(error, tmp_path)
    assert (error.may_go_on_smaller, error.exit_code) == (False, 1) and "File too large" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_micro_batches_that_cannot_be_smaller_end_the_run(tmp_path: Path, model: str, data: str) -> None:
    with pytest.raises(MicroBatchMemoryError) as caught:
        run(make_config("sft", tmp_path, model, data), no_room(1, may_go_on_smaller=False))
    assert caught.value.exit_code == 1 and not (tmp_path / SMALLER_FILE).exists()


def test_budgets_of_tokens_are_halved_down_to_the_longest_sequence(tmp_path: Path) -> None:
    policy: dict[str, Any] = {
        "train_micro_batch_size": 6,
        "logprob_batch_size": 5,
        "max_total_sequence_length": 100,
        "dynamic_batching": {"enabled": True, "train_mb_tokens": 1000, "logprob_mb_tokens": 150},
        "sequence_packing": {"enabled": False},
    }
    config = {"algorithm": "sft", "policy": policy, "seed": 1}
    assert with_smaller_micro_batches(config, tmp_path) == config
    (tmp_path / SMALLER_FILE).write_text('{"training": 2, "log-probability": 1}')
    assert with_smaller_micro_batches(config, tmp_path)["policy"] == {
        "train_micro_batch_size": 1,
        "logprob_batch_size": 1,
        "max_total_sequence_length": 100,
        "dynamic_batching": {"enabled": True, "train_mb_tokens": 250, "logprob_mb_tokens": 100},
        "sequence_packing": {"enabled": False},
    }


def test_a_budget_of_tokens_holds_a_pair(tmp_path: Path) -> None:
    budgets = {"enabled": True, "train_mb_tokens": 300, "logprob_mb_tokens": 300}
    policy = {"train_micro_batch_size": 1, "logprob_batch_size": 1, "max_total_sequence_length": 100}
    config: dict[str, Any] = {"algorithm": "dpo", "policy": {**policy, "dynamic_batching": budgets, "sequence_packing": {}}}
    (tmp_path / SMALLER_FILE).write_text('{"training": 3, "log-probability": 3}')
    smaller = with_smaller_micro_batches(config, tmp_path)["policy"]["dynamic_batching"]
    assert (smaller["train_mb_tokens"], smaller["logprob_mb_tokens"]) == (200, 100)


class NotingRows(PolicyMaker):
    """Notes the rows of a micro-batch of each training call, as the policy is asked for them; None leaves them to its configuration."""

    def __call__(self, config: dict[str, Any], *arguments: Any) -> Any:
        policy = super().__call__(config, *arguments)
        train = policy.train
        self.rows: list[int] = []

        def noted(*args: Any, mbs: int | None = None, **kwargs: Any) -> Any:
            if not kwargs.get("eval_mode"):
                self.rows.append(mbs or config["policy"]["train_micro_batch_size"])
            return train(*args, mbs=mbs, **kwargs)

        policy.train = noted  # type: ignore[method-assign]
        return policy


def test_training_calls_that_say_their_rows_say_fewer(tmp_path: Path, model: str) -> None:
    """Of pairs, which are two rows each."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(json.dumps({"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)}) for n in range(7)))
    config = make_config("dpo", tmp_path / "run", model, str(pairs))
    config["policy"] |= {"train_global_batch_size": 4, "train_micro_batch_size": 2}
    with pytest.raises(MicroBatchMemoryError):
        run(config, no_room(3))
    maker = NotingRows()
    assert run(config, maker) == 0
    assert maker.rows == [2, 2]


@pytest.mark.parametrize("text", ["[]", '{"training": 0}', '{"other": 1}', '{"training": "1"}', "{"])
def test_a_file_with_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / SMALLER_FILE).write_text(text)
    with pytest.raises(ConfigError, match="Fix: remove it"):
        with_smaller_micro_batches({"algorithm": "sft", "policy": {}}, tmp_path)
