"""Killed at any moment and started again, a run ends like one that nobody disturbed: the same log and the
same weights, bit for bit.

The program itself is started, with real Megatron on tensor parallel 2 over Ray, and killed so that nothing of
it can tidy up. One run is killed several times where that tells as much. All of it is in the parts
``resume-1`` to ``resume-3``.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from megarl.checkpoint.background import memory_of
from megarl.checkpoint.manifest import verify
from megarl.run.stopping import STOPPED
from tests.system.whole_runs import STEPS, Launch, Launches, Material, comparable, read_rows, write_config
from tests.tiers import slow
from tests.unpickling.watch import PickleWatch

# Five launches in one test: on a machine that does much else they take longer than the limit of other tests.
pytestmark = pytest.mark.timeout(1800)
Moment = Callable[[Launch], Callable[[], bool]]


def on_one_rank(config: Path) -> Path:
    """A configuration beside another that differs in the number of ranks alone."""
    path = config.with_name(f"one-rank-{config.name}")
    policy = {"megatron_cfg": {"tensor_model_parallel_size": 1}}
    path.write_text(
        yaml.safe_dump({"defaults": str(config), "cluster": {"gpus_per_node": 1}, "policy": policy})
    )
    return path


def whole_run(algorithm: str, directory: Path, material: Material, launches: Launches) -> Path:
    return finished(
        write_config(directory / f"{algorithm}.yaml", algorithm, material), directory / algorithm, launches
    )


def finished(config: Path, run_dir: Path, launches: Launches) -> Path:
    """The directory of a run that nobody disturbed."""
    check_leftovers(launches.finish(config, run_dir), 1)
    return run_dir


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, material: Material, launches: Launches) -> Path:
    """A GRPO run that nobody disturbed."""
    return whole_run("grpo", tmp_path_factory.mktemp("whole"), material, launches)


@pytest.fixture(scope="module")
def whole_sft(tmp_path_factory: pytest.TempPathFactory, material: Material, launches: Launches) -> Path:
    """The same of supervised training."""
    return whole_run("sft", tmp_path_factory.mktemp("whole"), material, launches)


def check_leftovers(run_dir: Path, save_period: int) -> None:
    """A finished run has its checkpoints, its export, and nothing that is half written."""
    saved = {f"step_{step}" for step in range(1, STEPS + 1) if step % save_period == 0 or step == STEPS}
    assert {path.name for path in (run_dir / "checkpoints").glob("step_*")} == saved
    assert {path.name for path in (run_dir / "hf").iterdir()} == {f"step_{STEPS}"}
    generates = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["algorithm"] == "grpo"
    left = {"checkpoints", "config.yaml", "hf", "launches.jsonl", "metrics.jsonl", "run.lock"}
    assert {path.name for path in run_dir.iterdir()} == left | ({"samples"} if generates else set())
    check_visible_checkpoints(run_dir)


def check_visible_checkpoints(run_dir: Path) -> None:
    """Whatever bears a checkpoint's name is whole."""
    for path in (run_dir / "checkpoints").glob("step_*"):
        assert verify(path) == [], path


def check_same(run_dir: Path, undisturbed: Path) -> None:
    """The log, and the weights byte by byte."""
    assert comparable(run_dir) == comparable(undisturbed)
    name = f"hf/step_{STEPS}/model.safetensors"
    assert (run_dir / name).read_bytes() == (undisturbed / name).read_bytes()


def run_with_kills(
    config: Path,
    run_dir: Path,
    kills: list[Moment],
    launches: Launches,
    last_has: Mapping[str, str] | None = None,
) -> list[int]:
    """Launch and kill once for each moment, and once more to the end, with some variables; after which step
    each further launch went on (0: anew)."""
    for moment in kills:
        launch = launches.start(config, run_dir)
        launch.kill_when(moment(launch))
        check_visible_checkpoints(run_dir)
    first = len(launches.all) - len(kills)
    last = launches.start(config, run_dir, changed=last_has)
    assert last.finish() == 0, last.output()[-5000:]
    outputs = [launch.output() for launch in launches.all[first + 1 :]]
    found = [re.search(r"resumed after step (\d+)", output) for output in outputs]
    return [int(match[1]) if match else 0 for match in found]


def inside(step: int, undisturbed: Path, seed: int) -> Moment:
    """Some moment inside a step; which, the seed says."""
    share = random.Random(seed).random()
    seconds = next(row["timing/step_s"] for row in read_rows(undisturbed) if row["step"] == step)
    print(
        f"seed {seed}: kill after {share:.3f} of step {step}, {share * seconds:.2f} s after the step before"
    )

    def moment(launch: Launch) -> Callable[[], bool]:
        begun = (
            launch.logged(step - 1)
            if step > 1 or read_rows(undisturbed)[0]["step"] == 0
            else launch.workers_are_up
        )
        ended = launch.logged(step)

        def happened() -> bool:
            if not begun():
                return False
            deadline = time.monotonic() + share * seconds
            # On a machine that has become faster the step may be over before.
            while time.monotonic() < deadline and not ended():
                launch.stay(0.02)
            return True

        return happened

    return moment


def something_to_lose(whole: Path) -> None:
    """Fail where a run learned nothing, so that no loss of it would be seen."""
    rows = [row for row in comparable(whole) if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert sum(0 < row["train/reward"] < 1 for row in rows) >= 2, (
        "without rewards nothing is trained and nothing can differ"
    )
    assert sum(row["train/grad_norm"] > 0 for row in rows) >= 2
    assert len({row["train/loss"] for row in rows}) == STEPS


@slow
def test_the_undisturbed_run_has_something_to_lose(whole: Path) -> None:
    something_to_lose(whole)


@slow
def test_killed_inside_a_step(material: Material, launches: Launches, tmp_path: Path) -> None:
    """On one rank, which starts sooner. Three launches take a minute and show that a lost machine costs only
    time.

    The launch that resumes shows besides that no pickle is read from a checkpoint.
    """
    undisturbed = finished(
        on_one_rank(write_config(tmp_path / "whole.yaml", "grpo", material)), tmp_path / "whole", launches
    )
    something_to_lose(undisturbed)
    config = on_one_rank(write_config(tmp_path / "run.yaml", "grpo", material, save_period=2))
    watch = PickleWatch(tmp_path / "pickles")
    watch.directory.mkdir()
    assert run_with_kills(
        config, tmp_path / "run", [inside(3, undisturbed, seed=5)], launches, watch.variables
    ) == [2]
    check_leftovers(tmp_path / "run", 2)
    check_same(tmp_path / "run", undisturbed)
    assert any("default_worker.py" in words for words in watch.watched())
    found = watch.found()
    assert not found, "\n".join(found)[:20_000]


@slow
def test_kills_inside_a_step_inside_a_checkpoint_and_between_two(
    whole: Path, material: Material, launches: Launches, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "run.yaml", "grpo", material, save_period=2)
    kills: list[Moment] = [
        inside(1, whole, seed=5),
        lambda launch: launch.writing(2),
        lambda launch: launch.logged(3),
    ]
    assert run_with_kills(config, tmp_path / "run", kills, launches) == [0, 0, 2]
    check_leftovers(tmp_path / "run", 2)
    check_same(tmp_path / "run", whole)


@slow
def test_kills_where_each_step_is_saved(
    whole: Path, material: Material, launches: Launches, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    kills: list[Moment] = [
        inside(1, whole, seed=5),
        lambda launch: launch.logged(1),
        lambda launch: launch.writing(3),
    ]
    first, second, third = run_with_kills(config, tmp_path / "run", kills, launches)
    assert first <= 1 and second <= 1 and third == 2
    check_leftovers(tmp_path / "run", 1)
    check_same(tmp_path / "run", whole)


@slow
def test_kills_while_checkpoints_are_written_beside_the_steps(
    material: Material, launches: Launches, tmp_path: Path
) -> None:
    undisturbed = finished(
        on_one_rank(write_config(tmp_path / "whole.yaml", "grpo", material)), tmp_path / "whole", launches
    )
    beside = {"save_period": 1, "keep_top_k": None, "async_save": True}
    config = on_one_rank(write_config(tmp_path / "run.yaml", "grpo", material, checkpointing=beside))
    kills: list[Moment] = [
        lambda launch: launch.writing(1),
        inside(2, undisturbed, seed=7),
        lambda launch: launch.logged(3),
    ]
    run_with_kills(config, tmp_path / "run", kills, launches)
    check_leftovers(tmp_path / "run", 1)
    check_same(tmp_path / "run", undisturbed)
    assert not memory_of(tmp_path / "run" / "checkpoints").exists()


@slow
def test_supervised_training_resumes(
    whole_sft: Path, material: Material, launches: Launches, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "run.yaml", "sft", material, save_period=2)
    [resumed] = run_with_kills(config, tmp_path / "run", [inside(3, whole_sft, seed=6)], launches)
    assert resumed == 2
    check_leftovers(tmp_path / "run", 2)
    check_same(tmp_path / "run", whole_sft)


def packed_conversations(directory: Path, material: Material) -> Path:
    """A configuration of supervised training on conversations of two turns and on problems, by weights,
    without the longest, packed."""
    problems = [json.loads(line) for line in material.train.read_text(encoding="utf-8").splitlines()]
    rows = []
    for one, other in zip(problems[::2], problems[1::2], strict=False):
        turns = [
            (role, each[field])
            for each in (one, other)
            for role, field in (("user", "prompt"), ("assistant", "answer"))
        ]
        rows.append({"turns": [{"role": role, "content": content} for role, content in turns]})
    (directory / "turns.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    sources = [
        {"path": str(directory / "turns.jsonl"), "messages_key": "turns", "weight": 0.4},
        {"path": str(material.train), "prompt_key": "prompt", "answer_key": "answer", "weight": 0.6},
    ]
    packing = {"enabled": True, "train_mb_tokens": 96, "logprob_mb_tokens": 96}
    policy = {"train_global_batch_size": 8, "max_total_sequence_length": 48, "sequence_packing": packing}
    data = {"train": sources, "max_input_seq_length": 36, "filter_overlong_prompts": True}
    path = directory / "packed.yaml"
    plain = write_config(directory / "plain.yaml", "sft", material, save_period=2)
    path.write_text(yaml.safe_dump({"defaults": str(plain), "policy": policy, "data": data}))
    return path


@slow
def test_packed_conversations_of_mixed_and_filtered_sources_resume(
    material: Material, launches: Launches, tmp_path: Path
) -> None:
    config = packed_conversations(tmp_path, material)
    undisturbed = launches.start(config, tmp_path / "whole")
    assert undisturbed.finish() == 0, undisturbed.output()[-5000:]
    left_out = re.search(r"(\d+) of 18 records .* are left out", undisturbed.output())
    assert left_out and 0 < int(left_out[1]) < 18, undisturbed.output()[-5000:]
    assert all(
        row["performance/padding_efficiency"] > 0.5 for row in read_rows(tmp_path / "whole") if row["step"]
    )
    assert run_with_kills(config, tmp_path / "run", [inside(3, tmp_path / "whole", seed=8)], launches) == [2]
    check_leftovers(tmp_path / "run", 2)
    check_same(tmp_path / "run", tmp_path / "whole")


@slow
def test_asked_to_stop_it_saves_and_goes_on(
    whole: Path, material: Material, launches: Launches, tmp_path: Path
) -> None:
    """Where no checkpoint is due. Ray has a handler of its own for this signal, which would end the driver at
    once."""
    config, run_dir = (
        write_config(tmp_path / "run.yaml", "grpo", material, save_period=STEPS + 1),
        tmp_path / "run",
    )
    stopped = launches.start(config, run_dir)
    stopped.await_moment(stopped.logged(1))
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.finish() == STOPPED, stopped.output()[-5000:]
    # the signal may come before the next step or in it
    told = re.search(r"stopped after step (\d) \(SIGTERM\)", stopped.output())
    assert told, stopped.output()[-5000:]
    assert [path.name for path in (run_dir / "checkpoints").glob("step_*")] == [f"step_{told[1]}"]
    last = launches.start(config, run_dir)
    assert last.finish() == 0, last.output()[-5000:]
    assert f"resumed after step {told[1]}" in last.output()
    check_visible_checkpoints(run_dir)
    check_same(run_dir, whole)


@slow
@pytest.mark.parametrize("save_period", [1, 2])
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_killed_after_each_step(
    step: int, save_period: int, whole: Path, material: Material, launches: Launches, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "run.yaml", "grpo", material, save_period)
    [resumed] = run_with_kills(config, tmp_path / "run", [lambda launch: launch.logged(step)], launches)
    assert resumed in {step // save_period * save_period, (step - 1) // save_period * save_period}
    check_leftovers(tmp_path / "run", save_period)
    check_same(tmp_path / "run", whole)


@slow
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_moments(
    seed: int, whole: Path, material: Material, launches: Launches, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "run.yaml", "grpo", material)
    step = random.Random(f"step {seed}").randint(1, STEPS)
    run_with_kills(config, tmp_path / "run", [inside(step, whole, seed)], launches)
    check_leftovers(tmp_path / "run", 1)
    check_same(tmp_path / "run", whole)


@slow
@pytest.mark.parametrize("where", ["start", "first checkpoint", "committed", "export"])
def test_killed_at_chosen_moments(
    where: str, whole: Path, material: Material, launches: Launches, tmp_path: Path
) -> None:
    config, run_dir = write_config(tmp_path / "run.yaml", "grpo", material), tmp_path / "run"
    moments: dict[str, Moment] = {
        "start": lambda launch: launch.workers_are_up,
        "first checkpoint": lambda launch: launch.writing(1),
        "committed": lambda launch: launch.committed(2),
        "export": lambda launch: lambda: any((run_dir / "hf").glob("*")),
    }
    [resumed] = run_with_kills(config, run_dir, [moments[where]], launches)
    assert (
        resumed in {"start": {0}, "first checkpoint": {0, 1}, "committed": {2, 3}, "export": {STEPS}}[where]
    )
    check_leftovers(run_dir, 1)
    check_same(run_dir, whole)
