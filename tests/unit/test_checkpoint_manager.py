"""Finding, choosing and pruning checkpoints."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megarl.checkpoint.lock import RunLock
from megarl.checkpoint.manager import (
    INFO_NAME,
    CheckpointManager,
    faults_of_checkpoint,
    ranked_steps,
    read_info,
    steps_to_keep,
)
from megarl.checkpoint.manifest import verify, write_manifest
from megarl.errors import CheckpointError


def manager(directory: Path, **changes: Any) -> CheckpointManager:
    config = {
        "enabled": True,
        "checkpoint_dir": str(directory),
        "metric_name": "accuracy",
        "higher_is_better": True,
    }
    return CheckpointManager({**config, "keep_top_k": None, **changes})


def save(
    target: CheckpointManager, step: int, metric: float | None = None, content: bytes = b"weights"
) -> Path:
    info: dict[str, Any] = {"step": step} if metric is None else {"step": step, "accuracy": metric}
    path = target.init_tmp_checkpoint(step, info)
    (path / "policy" / "weights").mkdir(parents=True)
    (path / "policy" / "weights" / "0.bin").write_bytes(content + b"%d" % step)
    return target.finalize_checkpoint(path)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_life_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = manager(Path("runs/one"))
    assert writer.get_latest_checkpoint_path() is None is writer.get_best_checkpoint_path()
    assert writer.load_training_info() is None
    info = {"step": 3, "sampler": {"epoch": 0, "position": 12}, "accuracy": 0.5}
    temporary = writer.init_tmp_checkpoint(3, info, {"seed": 1, "env_vars": {"HF_TOKEN": "abc"}})
    assert temporary == tmp_path / "runs/one/tmp_step_3"
    assert writer.get_latest_checkpoint_path() is None
    final = writer.finalize_checkpoint(temporary)
    assert (
        final
        == tmp_path / "runs/one/step_3"
        == writer.get_latest_checkpoint_path()
        == writer.get_best_checkpoint_path()
    )
    assert not temporary.exists()
    assert names(final) == ["config.yaml", "manifest.json", "training_info.json"]
    assert writer.load_training_info(final) == info == writer.load_training_info()
    assert yaml.safe_load((final / "config.yaml").read_text()) == {"seed": 1, "env_vars": {"HF_TOKEN": "***"}}
    assert faults_of_checkpoint(final) == []


def test_latest_is_numeric_and_foreign_names_are_ignored(tmp_path: Path) -> None:
    writer = manager(tmp_path)
    for step in (9, 100, 20, 0):
        save(writer, step)
    for odd in ("step_1000_old", "step_-3", "step_007", "xstep_2000", "tmp_step_3000", "step_"):
        (tmp_path / odd).mkdir()
    (tmp_path / "step_4000").write_text("a file")
    (tmp_path / "step_5000").symlink_to(tmp_path / "step_9")
    assert writer.get_latest_checkpoint_path() == tmp_path / "step_100"


def damage_flip(path: Path) -> None:
    file = path / "policy" / "weights" / "0.bin"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


def damage_truncate(path: Path) -> None:
    file = path / "policy" / "weights" / "0.bin"
    file.write_bytes(file.read_bytes()[:-1])


def damage_delete(path: Path) -> None:
    (path / "policy" / "weights" / "0.bin").unlink()


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:40])


def damage_unfinished(path: Path) -> None:
    (path / "manifest.json").unlink()


DAMAGES = [damage_flip, damage_truncate, damage_delete, damage_manifest, damage_unfinished]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_latest_falls_back_to_the_one_before(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    writer = manager(tmp_path)
    for step, metric in ((1, 0.1), (2, 0.3), (3, 0.9)):
        save(writer, step, metric)
    damage(tmp_path / "step_3")
    assert writer.get_latest_checkpoint_path() == tmp_path / "step_2"
    assert writer.get_best_checkpoint_path() == tmp_path / "step_2"
    assert "step_3 is damaged and skipped" in caplog.text
    assert writer.load_training_info() == {"step": 2, "accuracy": 0.3}
    assert faults_of_checkpoint(tmp_path / "step_3")


def test_hashing_can_be_switched_off_sizes_cannot(tmp_path: Path) -> None:
    writer = manager(tmp_path)
    save(writer, 1)
    save(writer, 2)
    damage_flip(tmp_path / "step_2")
    fast = CheckpointManager({"checkpoint_dir": tmp_path}, verify_hashes=False)
    assert fast.get_latest_checkpoint_path() == tmp_path / "step_2"
    damage_truncate(tmp_path / "step_2")
    assert fast.get_latest_checkpoint_path() == tmp_path / "step_1"


@pytest.mark.parametrize(("higher", "best"), [(True, 5), (False, 2)])
def test_best_prefers_the_newer_of_equals(tmp_path: Path, higher: bool, best: int) -> None:
    writer = manager(tmp_path, higher_is_better=higher)
    for step, metric in ((1, 0.2), (2, 0.2), (4, 0.7), (5, 0.7), (6, 0.5), (7, None)):
        save(writer, step, metric)
    assert writer.get_best_checkpoint_path() == tmp_path / f"step_{best}"


def test_best_without_any_metric_is_the_latest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = manager(tmp_path)
    save(writer, 1)
    save(writer, 12)
    assert writer.get_best_checkpoint_path() == tmp_path / "step_12"
    assert "has the metric 'accuracy'" in caplog.text
    caplog.clear()
    assert manager(tmp_path, metric_name=None).get_best_checkpoint_path() == tmp_path / "step_12"
    assert caplog.text == ""


def test_top_k_and_latest_stay(tmp_path: Path) -> None:
    writer = manager(tmp_path, keep_top_k=2)
    for step, metric in ((10, 0.9), (20, 0.4), (30, 0.6), (100, 0.1)):
        save(writer, step, metric)
    assert names(tmp_path) == ["step_10", "step_100", "step_30"]
    save(writer, 110, 0.6)
    assert names(tmp_path) == ["step_10", "step_110"]


def test_without_metric_the_most_recent_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = manager(tmp_path, keep_top_k=2)
    save(writer, 1)
    assert not caplog.text, "the newest one may come from a stop"
    for step in (2, 3, 4):
        save(writer, step)
    assert names(tmp_path) == ["step_3", "step_4"]
    assert "have no metric 'accuracy'" in caplog.text
    save(writer, 5, float("nan"))
    assert names(tmp_path) == ["step_4", "step_5"]


def test_damaged_ones_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    writer = manager(tmp_path, keep_top_k=1)
    save(writer, 1, 0.5)
    save(writer, 2, 0.9)
    damage_truncate(tmp_path / "step_2")
    save(writer, 3, 0.1)
    assert names(tmp_path) == ["step_2", "step_3"]
    assert writer.get_latest_checkpoint_path() == tmp_path / "step_3"


def test_nothing_is_deleted_for_a_newest_that_is_damaged(tmp_path: Path) -> None:
    keep_all = manager(tmp_path)
    for step, metric in ((1, 0.5), (2, 0.6), (3, 0.7)):
        save(keep_all, step, metric)
    damage_flip(tmp_path / "step_3")
    manager(tmp_path, keep_top_k=0).remove_old_checkpoints()
    assert names(tmp_path) == ["step_2", "step_3"]
    damage_flip(tmp_path / "step_2")
    manager(tmp_path, keep_top_k=0).remove_old_checkpoints(exclude_latest=False)
    assert names(tmp_path) == ["step_2", "step_3"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    writer = manager(tmp_path)
    save(writer, 5, 0.1, b"old")
    assert save(writer, 5, 0.2, b"new") == tmp_path / "step_5"
    assert names(tmp_path) == ["step_5"]
    assert (tmp_path / "step_5/policy/weights/0.bin").read_bytes() == b"new5"
    assert writer.load_training_info() == {"step": 5, "accuracy": 0.2}
    damage_truncate(tmp_path / "step_5")
    save(writer, 5, 0.3, b"third")
    assert verify(tmp_path / "step_5") == []


@pytest.mark.parametrize("damaged", [False, True])
def test_interrupted_replacement_is_found_and_ended(tmp_path: Path, damaged: bool) -> None:
    writer = manager(tmp_path)
    save(writer, 5, 0.9, b"new")
    (tmp_path / "step_5").rename(tmp_path / "step_5_replacement")
    save(manager(tmp_path / "other"), 5, 0.1, b"old")
    (tmp_path / "other" / "step_5").rename(tmp_path / "step_5")
    (tmp_path / "other").rmdir()
    if damaged:
        damage_truncate(tmp_path / "step_5_replacement")
    expected = "step_5" if damaged else "step_5_replacement"
    assert writer.get_latest_checkpoint_path() == tmp_path / expected
    assert writer.get_best_checkpoint_path() == tmp_path / expected
    with RunLock(tmp_path / "lock") as lock:
        CheckpointManager({"checkpoint_dir": tmp_path}, lock=lock)
    assert names(tmp_path) == ["lock", "step_5"]
    assert (tmp_path / "step_5/policy/weights/0.bin").read_bytes() == (b"old5" if damaged else b"new5")


def test_leftovers_are_removed_only_with_the_lock(tmp_path: Path) -> None:
    save(manager(tmp_path), 1)
    for name in ("tmp_step_2", "tmp_deleted_step_0_ab12cd34", "tmp_mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("x")
    manager(tmp_path)
    lock = RunLock(tmp_path)
    CheckpointManager({"checkpoint_dir": tmp_path}, lock=lock)
    assert names(tmp_path) == ["step_1", "tmp_deleted_step_0_ab12cd34", "tmp_mine", "tmp_step_2"]
    with lock:
        CheckpointManager({"checkpoint_dir": tmp_path}, lock=lock)
    assert names(tmp_path) == ["run.lock", "step_1", "tmp_mine"]
    with RunLock(tmp_path / "fresh") as lock:
        CheckpointManager({"checkpoint_dir": tmp_path / "fresh" / "checkpoints"}, lock=lock)


def test_stale_temporary_of_the_same_step_is_not_mixed_in(tmp_path: Path) -> None:
    writer = manager(tmp_path)
    (writer.init_tmp_checkpoint(4, {"step": 4}) / "stale").write_text("x")
    final = writer.finalize_checkpoint(writer.init_tmp_checkpoint(4, {"step": 4}))
    assert names(final) == ["manifest.json", "training_info.json"]


@pytest.mark.parametrize("step", [-1, 1.0, "3", None, True])
def test_bad_steps_are_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(CheckpointError, match="must be a whole number"):
        manager(tmp_path).init_tmp_checkpoint(step, {})


def test_bad_calls_are_refused(tmp_path: Path) -> None:
    writer = manager(tmp_path)
    with pytest.raises(CheckpointError, match="is a bytes"):
        writer.init_tmp_checkpoint(1, {"x": b"pickle"})
    assert list(tmp_path.iterdir()) == []
    temporary = writer.init_tmp_checkpoint(1, {})
    final = writer.finalize_checkpoint(temporary)
    for path in (temporary, final, tmp_path, tmp_path / "elsewhere" / "tmp_step_1"):
        with pytest.raises(CheckpointError, match="is not a checkpoint begun in"):
            writer.finalize_checkpoint(path)
    with pytest.raises(CheckpointError, match="keep_top_k = -1"):
        manager(tmp_path, keep_top_k=-1)
    (final / "training_info.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an object"):
        writer.load_training_info(final)
    with pytest.raises(CheckpointError, match="cannot be read"):
        writer.load_training_info(tmp_path / "missing")


def test_a_symbolic_link_fails_the_save_and_keeps_the_old(tmp_path: Path) -> None:
    writer = manager(tmp_path)
    save(writer, 1)
    temporary = writer.init_tmp_checkpoint(2, {})
    (temporary / "tokenizer").symlink_to("/etc")
    with pytest.raises(CheckpointError, match="symbolic link"):
        writer.finalize_checkpoint(temporary)
    assert names(tmp_path) == ["step_1"]


metric_tables = st.dictionaries(
    st.integers(0, 30), st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=12
)


@given(metric_tables, st.integers(0, 6), st.booleans(), st.booleans())
def test_retention_properties(
    metrics: dict[int, float | None], top_k: int, higher: bool, keep_latest: bool
) -> None:
    kept = steps_to_keep(metrics, top_k, higher, keep_latest)
    assert kept <= set(metrics)
    assert bool(kept) == bool(metrics)
    assert min(top_k, len(metrics)) <= len(kept) <= top_k + 1
    if metrics and keep_latest:
        assert max(metrics) in kept
    for dropped in set(metrics) - kept:
        better_or_equal = 0
        for step in kept:
            ours, theirs = metrics[step], metrics[dropped]
            if ours is None:
                better_or_equal += theirs is None and step > dropped
            elif theirs is None or ours == theirs:
                better_or_equal += theirs is None or step > dropped
            else:
                better_or_equal += (ours > theirs) == higher
        assert better_or_equal >= top_k
    assert steps_to_keep({step: metrics[step] for step in kept}, top_k, higher, keep_latest) == kept
    assert steps_to_keep(metrics, None, higher) == set(metrics)


@given(metric_tables, st.booleans())
def test_ranking_is_a_permutation_with_missing_metrics_last(
    metrics: dict[int, float | None], higher: bool
) -> None:
    ranked = ranked_steps(metrics, higher)
    assert sorted(ranked) == sorted(metrics)
    missing = [step for step in ranked if metrics[step] is None]
    assert ranked[len(ranked) - len(missing) :] == sorted(missing, reverse=True)


def test_retention_on_disk_follows_the_rule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    table = [(3, 0.5), (1, None), (4, 0.5), (15, 0.1), (9, 0.9), (2, None), (6, 0.9), (20, 0.0)]
    writer, present = manager(tmp_path, keep_top_k=3), {}
    for step, metric in table:
        save(writer, step, metric)
        present[step] = metric
        present = {kept: present[kept] for kept in steps_to_keep(present, 3, True)}
        assert names(tmp_path) == sorted(f"step_{kept}" for kept in present)


@pytest.mark.parametrize("copies", [True, False])
def test_a_checkpoint_under_another_name_is_not_resumed_from(copies: bool, tmp_path: Path) -> None:
    """It would be gone on from again and again: the run saves the step after its own, which is not the
    newest."""
    writer = manager(tmp_path, keep_top_k=1)
    for step in (1, 3):
        save(writer, step)
    (shutil.copytree if copies else Path.rename)(tmp_path / "step_3", tmp_path / "step_9")
    latest, damaged = manager(tmp_path).latest_and_damaged()
    assert latest == (tmp_path / "step_3" if copies else None)
    assert damaged == {
        tmp_path / "step_9": [
            f"{INFO_NAME} says step = 3: its directory was renamed, or is a copy of another checkpoint"
        ]
    }
    save(writer, 4)
    assert names(tmp_path) == ["step_4", "step_9"], (
        "one that is not trusted is no reason to remove others, and is left"
    )


@pytest.mark.parametrize("step", [-1, "3", 3.0, True, None])
def test_a_step_that_is_none_is_damage(step: Any, tmp_path: Path) -> None:
    path = save(manager(tmp_path), 3)
    (path / INFO_NAME).write_text(json.dumps({"step": step}))
    write_manifest(path)
    assert manager(tmp_path).latest_and_damaged() == (
        None,
        {path: [f"{INFO_NAME} says step = {step!r}, must be a whole number of at least 0"]},
    )


def test_a_manifest_that_names_nothing_is_damage(tmp_path: Path) -> None:
    path = save(manager(tmp_path), 3)
    for file in [each for each in path.rglob("*") if each.is_file()]:
        file.unlink()
    write_manifest(path)
    assert "lists no files" in verify(path)[0] and manager(tmp_path).get_latest_checkpoint_path() is None


def test_the_step_that_is_saved_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    assert read_info(manager(tmp_path).init_tmp_checkpoint(3, {"metrics": {}})) == {"metrics": {}, "step": 3}
