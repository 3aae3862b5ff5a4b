"""Workers that are lost are built anew within the launch: log and weights are those of a run that nobody
disturbed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.distributed import virtual_cluster
from megarl.distributed.node_choice import RayNode, ResourceInsufficientError
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.errors import BatchError, DeadlineError, MegarlError, MicroBatchMemoryError, WorkerLostError
from megarl.observe.launches import FINISHED, WORKERS, LaunchOutcome, read_launches, restarts_within
from megarl.observe.metrics_file import FILE_NAME
from megarl.run import start
from megarl.run.restarts import SLURM_RESTARTS, Restarts, await_places, most_restarts, patience_for_places
from megarl.run.resume import ResumePoint
from megarl.run.run import run
from megarl.watch.run_state import read_run_state
from megarl.watch.status import as_plain
from tests.full_disk import full_disk
from tests.tiers import sampled
from tests.unit.driver_runs import Crash, PolicyMaker, comparable, final_weights, make_config, rows

LOST, HANGS = (
    WorkerLostError("[dp0] worker process died during train"),
    DeadlineError("train: 1 of 1 workers did not answer"),
)


class Losses:
    """Raises at given training calls, counted over all policies of a run."""

    def __init__(self, *errors: tuple[int, Exception]) -> None:
        self.calls, self._errors = 0, dict(errors)

    def __call__(self, call: int) -> None:
        self.calls += 1
        if self.calls in self._errors:
            raise self._errors[self.calls]


def config_of(
    algorithm: str, run_dir: Path, model: str, data: str, most: int | None = 3, **checkpointing: Any
) -> dict[str, Any]:
    config = make_config(algorithm, run_dir, model, data)
    config["checkpointing"].update(checkpointing)
    if most is not None:
        config["cluster"]["max_restarts"] = most
    return config


def check_same(run_dir: Path, undisturbed: Path) -> None:
    assert comparable(run_dir) == comparable(undisturbed)
    one, other = final_weights(run_dir), final_weights(undisturbed)
    assert (
        all(torch.equal(one[name], other[name]) for name in other)
        and len({row["train/loss"] for row in rows(run_dir)[1:]}) > 1
    )


# training calls that fail, and after which steps the run goes on; a checkpoint comes every two steps
MOMENTS: list[tuple[tuple[tuple[int, Exception], ...], list[int]]] = [
    (((1, LOST),), [0]),
    (((2, LOST),), [0]),
    (((3, HANGS),), [2]),
    (((4, LOST), (5, LOST)), [2, 2]),
    (((2, HANGS), (5, LOST), (7, LOST)), [0, 2, 2]),
]


@sampled(3)
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
@pytest.mark.parametrize(
    ("errors", "steps"), MOMENTS, ids=[str([call for call, _ in errors]) for errors, _ in MOMENTS]
)
def test_a_run_that_loses_workers_ends_like_one_that_does_not(
    algorithm: str,
    errors: tuple[tuple[int, Exception], ...],
    steps: list[int],
    tmp_path: Path,
    model: str,
    data: str,
) -> None:
    assert run(config_of(algorithm, tmp_path / "whole", model, data), PolicyMaker()) == 0
    maker = PolicyMaker(at_call=Losses(*errors))
    assert run(config_of(algorithm, tmp_path / "run", model, data), maker) == 0
    check_same(tmp_path / "run", tmp_path / "whole")
    assert len(maker.policies) == 1 + len(errors) and all(
        policy._prepared == "shut down" for policy in maker.policies
    )
    [launch] = read_launches(tmp_path / "run")
    assert [(restart.what, restart.step) for restart in launch.restarts] == [
        (WORKERS, step) for step in steps
    ]
    assert launch.outcome == FINISHED and launch.restarts[0].reason.startswith(type(errors[0][1]).__name__)
    counted = {row["step"]: row.get("performance/worker_restarts") for row in rows(tmp_path / "run")}
    assert counted[4] == len(steps) and all(
        "performance/worker_restarts" not in row for row in rows(tmp_path / "whole")
    )
    told = as_plain(read_run_state(tmp_path / "run"))
    assert (told["restarts"], told["worker_restarts"], told["engine_restarts"]) == (0, len(steps), 0)


def test_rows_that_wait_for_a_full_disk_outlive_the_workers(tmp_path: Path, model: str, data: str) -> None:
    """The checkpoint of step 2 is smaller than the log, and so has room where the log has none."""
    assert run(config_of("sft", tmp_path / "whole", model, data), PolicyMaker()) == 0
    run_dir, disk = tmp_path / "run", ExitStack()
    run_dir.mkdir()
    (run_dir / FILE_NAME).write_text(json.dumps({"step": -1, "of an earlier launch": "x" * 2**24}) + "\n")
    written: list[int] = []

    def at_call(call: int) -> None:
        losses(call)
        written.append(len((run_dir / FILE_NAME).read_text().splitlines()))
        if losses.calls == 1:
            disk.enter_context(full_disk(run_dir))
        elif losses.calls == 5:
            disk.close()

    losses = Losses((3, LOST))
    with disk:
        assert run(config_of("sft", run_dir, model, data), PolicyMaker(at_call=at_call)) == 0
    assert [restart.step for restart in read_launches(run_dir)[0].restarts] == [2] and len(
        set(written[1:])
    ) == 1
    kept = [row for row in comparable(run_dir) if row["step"] >= 0]
    assert kept == comparable(tmp_path / "whole")


def test_where_the_restarts_are_used_up_the_run_ends_as_without(
    tmp_path: Path, model: str, data: str
) -> None:
    maker = PolicyMaker(at_call=Losses(*((call, LOST) for call in range(3, 9))))
    with pytest.raises(WorkerLostError, match="worker process died"):
        run(config_of("sft", tmp_path / "run", model, data, most=2), maker)
    assert len(maker.policies) == 3
    [launch] = read_launches(tmp_path / "run")
    assert (
        launch.outcome is not None
        and launch.outcome.startswith("WorkerLostError")
        and restarts_within([launch], WORKERS) == 2
    )
    # the next launch has its own
    assert (
        run(config_of("sft", tmp_path / "run", model, data, most=2), PolicyMaker(at_call=Losses((1, LOST))))
        == 0
    )
    assert [len(launch.restarts) for launch in read_launches(tmp_path / "run")] == [2, 1]
    assert run(config_of("sft", tmp_path / "whole", model, data), PolicyMaker()) == 0
    check_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    "error", [Crash(), BatchError("rows"), MicroBatchMemoryError("no room"), MegarlError("else")]
)
def test_other_errors_end_the_run(error: Exception, tmp_path: Path, model: str, data: str) -> None:
    maker = PolicyMaker(at_call=Losses((3, error)))
    with pytest.raises(type(error)):
        run(config_of("sft", tmp_path / "run", model, data), maker)
    assert len(maker.policies) == 1 and restarts_within(read_launches(tmp_path / "run"), WORKERS) == 0


def test_outside_of_slurm_a_lost_worker_ends_the_run(
    tmp_path: Path, model: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(WorkerLostError):
        run(
            config_of("sft", tmp_path / "run", model, data, most=None), PolicyMaker(at_call=Losses((3, LOST)))
        )
    assert [most_restarts({"max_restarts": said}) for said in (None, 0, 5)] == [0, 0, 5]
    assert patience_for_places(1800.0) == 1800.0
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert [most_restarts({"max_restarts": said}) for said in (None, 0, 5)] == [SLURM_RESTARTS, 0, 5]
    # there a lost node comes back with the next job
    assert patience_for_places(1800.0) == 60.0 and patience_for_places(5.0) == 5.0


def test_a_worker_lost_in_a_save(tmp_path: Path, model: str, data: str) -> None:
    """What was written of the checkpoint goes, and the run goes on from the one before."""

    class DiesInSave(PolicyMaker):
        def __call__(self, *arguments: Any) -> Any:
            policy = super().__call__(*arguments)
            save, first = policy.save_checkpoint, len(self.policies) == 1

            def save_or_die(weights_path: str, **others: Any) -> None:
                save(weights_path, **others)
                if first and "step_4" in weights_path:
                    raise LOST

            policy.save_checkpoint = save_or_die  # type: ignore[method-assign]
            return policy

    assert run(config_of("sft", tmp_path / "whole", model, data), PolicyMaker()) == 0
    assert run(config_of("sft", tmp_path / "run", model, data), DiesInSave()) == 0
    check_same(tmp_path / "run", tmp_path / "whole")
    assert [restart.step for restart in read_launches(tmp_path / "run")[0].restarts] == [2]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").glob("*step_*")} == {"step_2", "step_4"}


@pytest.mark.parametrize("call", [2, 4])
def test_a_launch_that_starts_over_goes_on_from_its_own_checkpoints(
    call: int, tmp_path: Path, model: str, data: str
) -> None:
    assert run(config_of("sft", tmp_path / "whole", model, data), PolicyMaker()) == 0
    run_dir = tmp_path / "run"
    damaged = run_dir / "checkpoints" / "step_3"
    damaged.mkdir(parents=True)
    (damaged / "training_info.json").write_text("{}")
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "time": 5.0}\n')
    assert (
        run(config_of("sft", run_dir, model, data, resume="never"), PolicyMaker(at_call=Losses((call, LOST))))
        == 0
    )
    check_same(run_dir, tmp_path / "whole")
    assert [restart.step for restart in read_launches(run_dir)[0].restarts] == [call // 3 * 2]
    assert (
        json.loads((run_dir / "metrics.before-1.jsonl").read_text())["time"] == 5.0
        and not (run_dir / "metrics.before-2.jsonl").exists()
    )


def test_without_checkpoints_it_begins_anew(tmp_path: Path, model: str, data: str) -> None:
    assert run(config_of("sft", tmp_path / "whole", model, data, enabled=False), PolicyMaker()) == 0
    assert (
        run(
            config_of("sft", tmp_path / "run", model, data, enabled=False),
            PolicyMaker(at_call=Losses((3, LOST))),
        )
        == 0
    )
    check_same(tmp_path / "run", tmp_path / "whole")


def restarts_of(most: int, reason: str | None = None) -> Restarts:
    return Restarts(most, SimpleNamespace(reason=reason), LaunchOutcome())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "built", "reason", "again"),
    [
        (LOST, True, None, True),
        (LOST, False, None, True),
        (HANGS, True, None, True),
        (HANGS, False, None, False),
        (LOST, True, "SIGTERM", False),
        (BatchError("rows"), True, None, False),
    ],
)
def test_what_is_worth_new_workers(error: MegarlError, built: bool, reason: str | None, again: bool) -> None:
    """A start that takes too long waits for places that are not there; and who wants to stop needs none."""
    restarts = restarts_of(1, reason)
    restarts.built = built
    if again:
        restarts.require(error)
        assert not restarts.built and restarts.figures() == {"worker_restarts": 1.0}
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            restarts.require(error)
        assert raised.value is error
    assert restarts.workers == again


def test_places_that_are_lost_while_workers_are_built_anew_are_worth_new_ones() -> None:
    """Another node was lost since they were counted. Where the run never had them, it asks for too much."""
    missing, restarts = ResourceInsufficientError("1 of 2 nodes"), restarts_of(2)
    with pytest.raises(ResourceInsufficientError):
        restarts.require(missing)
    restarts.require(LOST)
    restarts.require(missing)
    assert restarts.workers == 2
    with pytest.raises(ResourceInsufficientError):
        restarts.require(missing)


class Reserved:
    """Stands for places that Ray does not reserve, or only at a later look."""

    def __init__(self, at_look: int | None) -> None:
        self.looks, self.removed, self._at_look = 0, False, at_look

    def wait(self, timeout_seconds: float) -> bool:
        assert 0 <= timeout_seconds <= virtual_cluster._LOOK_S
        self.looks += 1
        return self._at_look is not None and self.looks >= self._at_look


@pytest.mark.parametrize(
    ("at_look", "lost_at", "timeout_s", "error"),
    [
        (1, None, 900.0, None),
        (3, None, 900.0, None),
        # another one that is lost is seen at the next look, not after all the time that places may take
        (None, 2, 900.0, WorkerLostError),
        (None, None, 0.0, DeadlineError),
    ],
)
def test_places_that_a_lost_node_had_are_not_waited_for(
    at_look: int | None,
    lost_at: int | None,
    timeout_s: float,
    error: type[MegarlError] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Reserved] = []

    def reserve(*_: Any, **__: Any) -> Any:
        made.append(Reserved(at_look))
        return made[-1]

    def lost(node_id: str) -> str | None:
        return (
            node_id
            if lost_at is not None and node_id == "n2" and sum(group.looks for group in made) >= lost_at
            else None
        )

    monkeypatch.setattr(virtual_cluster, "placement_group", reserve)
    monkeypatch.setattr(
        virtual_cluster, "remove_placement_group", lambda group: setattr(group, "removed", True)
    )
    monkeypatch.setattr(virtual_cluster, "lost_node_name", lost)
    monkeypatch.setattr(
        virtual_cluster,
        "alive_nodes",
        lambda: [RayNode(name, name, {"CPU": 1.0}, {"CPU": 1.0}) for name in ("n1", "n2")],
    )
    monkeypatch.setattr(virtual_cluster.ray, "available_resources", dict)
    cluster = RayVirtualCluster([1, 1], use_gpus=False, name="anew", ready_timeout_s=timeout_s)
    if error is None:
        assert cluster._reserve("SPREAD", unified=False) == made and not any(group.removed for group in made)
        return
    with pytest.raises(
        error,
        match=r"'anew': node n2 is lost, before" if lost_at else r"'anew': Ray did not reserve 2 bundles",
    ) as raised:
        cluster._reserve("SPREAD", unified=False)
    assert all(group.removed for group in made) and raised.value.exit_code == 4
    # with restarts left, a lost node is worth new workers also before these were built; places that others
    # have are not
    restarts = restarts_of(1)
    if lost_at:
        restarts.require(raised.value)
    with pytest.raises(error):
        restarts.require(raised.value)


def test_the_start_of_ray_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 40 s of what the first workers had; those that are built anew later wait for no Ray."""
    monkeypatch.setattr(start, "_ray_start", {"seconds": 40.0})
    deadlines = {"init_s": 100.0, "load_s": 7.0}
    resumed = ResumePoint(checkpoint=Path("step_2"))
    assert [start._init_seconds(deadlines, point) for point in (ResumePoint(), resumed, ResumePoint())] == [
        60.0,
        107.0,
        100.0,
    ]
    monkeypatch.setattr(start, "_ray_start", {"seconds": 200.0})
    assert [start._init_seconds(deadlines, ResumePoint()) for _ in range(2)] == [1.0, 100.0]


@pytest.mark.parametrize("come_after", [0, 1, 4, None])
def test_places_are_waited_for(come_after: int | None) -> None:
    looks, waits = [], list[float]()

    def check() -> None:
        looks.append(None)
        if come_after is None or len(looks) <= come_after:
            raise ResourceInsufficientError("1 of 2 nodes")

    wait: Callable[[float], None] = waits.append
    if come_after is None:
        with pytest.raises(WorkerLostError) as raised:
            await_places(check, 0.0, LOST, wait)
        assert isinstance(raised.value.__cause__, ResourceInsufficientError) and len(looks) == 1
    else:
        await_places(check, 900.0, LOST, wait)
        assert len(waits) == come_after and all(0 < seconds <= 5 for seconds in waits)
