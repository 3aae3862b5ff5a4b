"""Asynchronous training in whole programs on Ray: byte for byte what a serial program does that keeps old
weights, however long anything takes, and wherever it is killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from megarl.distributed.worker_stacks import worker_of
from megarl.models.policy.policy_engines import WORKERS
from tests.system.whole_runs import (
    ON_TORCH,
    ROOT,
    Launch,
    Launches,
    Material,
    comparable,
    read_rows,
    write_config,
)
from tests.tiers import sample_seed, slow

pytestmark = pytest.mark.timeout(1800)

STEPS = 6
TOYS = ROOT / "tests" / "toys" / "serial_lag.py"
GUESS = TOYS.with_name("guess.py")
APART = [
    "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}",
    "cluster.gpus_per_node=3",
]
BOUNDED = [
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
]
BY_POLICY_GRADIENT = [
    "distillation.mode=reverse_kl_advantage",
    "~distillation.topk_logits_k",
    "loss_fn={reference_policy_kl_penalty: 0, ratio_clip_min: 0.2, ratio_clip_max: 0.2, ratio_clip_c: null, "
    "token_level_loss: true, use_on_policy_kl_approximation: false, use_importance_sampling_correction: "
    "true, truncated_importance_sampling_type: tis, truncated_importance_sampling_ratio: 2.0}",
]
OF_AGE = ("train/rollout_age", "train/effective_sample_share")


def beside(lag: int, section: str = "grpo") -> list[str]:
    return [f"{section}.async_grpo.enabled=true", f"{section}.async_grpo.max_trajectory_age_steps={lag}"]


class Program:
    """Runs of one configuration."""

    def __init__(
        self,
        directory: Path,
        material: Material,
        launches: Launches,
        backend: str = "megatron",
        section: str = "grpo",
    ) -> None:
        self.directory, self.launches, self.section = directory, launches, section
        self.config = directory / "run.yaml"
        changes = {"teacher": {"model_name": str(material.taught)}} if section == "distillation" else {}
        base = write_config(directory / "base.yaml", section, material, **changes)
        self.config.write_text(yaml.safe_dump({"defaults": str(base), **ON_TORCH.get(backend, {})}))

    def start(self, name: str, *overrides: str, **variables: str) -> Launch:
        bounded = [] if self.section == "distillation" else BOUNDED
        arguments = [*APART, *bounded, f"{self.section}.max_num_steps={STEPS}", *overrides]
        return self.launches.start(self.config, self.directory / name, arguments, variables)

    def finish(self, name: str, *overrides: str, **variables: str) -> Path:
        launch = self.start(name, *overrides, **variables)
        assert launch.finish() == 0, launch.output()[-5000:]
        return launch.run_dir


def without_ages(run_dir: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in OF_AGE} for row in comparable(run_dir)]


def weights(run_dir: Path) -> bytes:
    return (run_dir / f"hf/step_{STEPS}/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("backend", "lag"),
    [
        ("megatron", 1),
        pytest.param("megatron", 2, marks=slow),
        pytest.param("megatron", 4, marks=slow),
        pytest.param("dtensor", 1, marks=slow),
        pytest.param("fsdp1", 2, marks=slow),
    ],
)
def test_it_is_a_serial_program_that_keeps_old_weights(
    backend: str, lag: int, tmp_path: Path, material: Material, launches: Launches
) -> None:
    program = Program(tmp_path, material, launches, backend)
    beside_training = program.finish("beside", *beside(lag))
    serial = program.finish("serial", f"algorithm={TOYS}:SerialLag", SERIAL_LAG=str(lag))
    assert without_ages(beside_training) == without_ages(serial)
    assert weights(beside_training) == weights(serial)
    trained = [row for row in read_rows(beside_training) if row["step"] > 0]
    assert [row["train/rollout_age"] for row in trained] == [min(step, lag) for step in range(STEPS)]
    assert all(0 < row["train/effective_sample_share"] <= 1 for row in trained)
    # validations after steps 0, 2 and 4 went on beside the steps that follow; nothing follows the last one
    validated = {
        name: [row["step"] for row in trained if name in row]
        for name in ("validation/accuracy", "timing/validation_beside_s", "timing/validation_s")
    }
    assert list(validated.values()) == [[2, 4, 6], [1, 3, 5], [6]]
    # what the engine said is the policy's word of k steps ago, and not of now
    assert any(row["train/mismatch_max"] > 1e-3 for row in trained)


@slow
@pytest.mark.parametrize(
    ("section", "changes", "backend", "lag"),
    [
        ("ppo", [], "megatron", 1),
        ("ppo", [], "megatron", 2),
        ("ppo", [], "dtensor", 2),
        ("ppo", [], "fsdp1", 1),
        ("distillation", [], "megatron", 1),
        ("distillation", BY_POLICY_GRADIENT, "megatron", 1),
        ("distillation", [], "dtensor", 2),
        ("distillation", BY_POLICY_GRADIENT, "fsdp1", 2),
    ],
)
def test_models_beside_the_policy_change_nothing(
    section: str,
    changes: list[str],
    backend: str,
    lag: int,
    tmp_path: Path,
    material: Material,
    launches: Launches,
) -> None:
    """A critic and a teacher have the policy's devices in turn with it, while engines sample."""
    program = Program(tmp_path, material, launches, backend, section)
    if section == "distillation":
        changes = [f"policy.model_name={material.model}", *changes]
    beside_training = program.finish("beside", *changes, *beside(lag, section))
    toy = {"ppo": "SerialLagPPO", "distillation": "SerialLagDistillation"}[section]
    serial = program.finish("serial", *changes, f"algorithm={TOYS}:{toy}", SERIAL_LAG=str(lag))
    assert without_ages(beside_training) == without_ages(serial)
    assert weights(beside_training) == weights(serial)
    trained = [row for row in read_rows(beside_training) if row["step"] > 0]
    assert [row["train/rollout_age"] for row in trained] == [min(step, lag) for step in range(STEPS)]
    assert any(row["train/grad_norm"] > 0 for row in trained if "train/grad_norm" in row)


@slow
def test_conversations_of_several_turns_are_sampled_beside_training_too(
    tmp_path: Path, material: Material, launches: Launches
) -> None:
    program = Program(tmp_path, material, launches)
    guessing = [
        "grpo.max_rollout_turns=3",
        "~env.reward",
        f"env.environment={GUESS}:Guess",
        "+env.options={near: 4}",
    ]
    tokenizer = AutoTokenizer.from_pretrained(shutil.copytree(material.taught, tmp_path / "model"))
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% if message['role'] "
        "== 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    room = ["policy.max_total_sequence_length=96", f"policy.model_name={tmp_path / 'model'}"]
    beside_training = program.finish("beside", *beside(1), *guessing, *room)
    serial = program.finish("serial", f"algorithm={TOYS}:SerialLag", *guessing, *room, SERIAL_LAG="1")
    assert without_ages(beside_training) == without_ages(serial)
    assert weights(beside_training) == weights(serial)
    trained = [row for row in read_rows(beside_training) if row["step"] > 0]
    assert all(row["train/turns"] > 1 for row in trained) and any(
        row["train/grad_norm"] > 0 for row in trained
    )


@slow
def test_nothing_hangs_on_how_long_anything_takes(
    tmp_path: Path, material: Material, launches: Launches
) -> None:
    program = Program(tmp_path, material, launches)
    plain = program.finish("plain", *beside(2))
    for seed in (sample_seed(), sample_seed() + 1):
        delayed = program.finish(
            f"delayed-{seed}", *beside(2), f"algorithm={TOYS}:Delayed", DELAY_SEED=str(seed)
        )
        assert comparable(delayed) == comparable(plain), seed
        assert weights(delayed) == weights(plain), seed


@slow
def test_killed_anywhere_it_goes_on_with_the_batches_that_waited(
    tmp_path: Path, material: Material, launches: Launches
) -> None:
    """Also where the last launch keeps up with no one: a run that goes on in turn trains on what waits
    first."""
    program = Program(tmp_path, material, launches)
    undisturbed = program.finish("undisturbed", *beside(2))
    seed = sample_seed()
    draw = random.Random(seed)
    for step in sorted(draw.sample(range(1, STEPS), 3)):
        launch = program.start("killed", *beside(2))
        launch.kill_when(launch.logged(step) if draw.random() < 0.5 else launch.committed(step))
    killed = program.finish("killed", *beside(2))
    assert comparable(killed) == comparable(undisturbed), seed
    assert weights(killed) == weights(undisturbed), seed


@slow
def test_lost_engines_cost_a_restart_within_the_launch(
    tmp_path: Path, material: Material, launches: Launches
) -> None:
    program = Program(tmp_path, material, launches)
    undisturbed = program.finish("undisturbed", *beside(1))
    # Engines that have validated need no refit before they sample: they are lost while they do. On a busy
    # machine the signal comes as late as the next refit, which replaces them without a restart of the run.
    waiting = f"algorithm={TOYS}:ValidatesInTurn"
    launch = program.start("lost", *beside(1), waiting, "++cluster.max_restarts=3")

    def recoveries() -> int:
        return sum(launch.output().count(text) for text in (f"{STEPS} steps", "engines were lost, restart"))

    for step in (2, 4):
        launch.await_moment(launch.logged(step))
        [engine] = [pid for pid in launch.processes() if (worker_of(pid) or "").startswith(WORKERS)]
        before = recoveries()
        os.kill(engine, signal.SIGKILL)
        launch.await_moment(lambda before=before: recoveries() > before)  # type: ignore[misc]
    assert launch.finish() == 0, launch.output()[-5000:]
    logs = [
        [{k: v for k, v in row.items() if "restarts" not in k} for row in comparable(each)]
        for each in (launch.run_dir, undisturbed)
    ]
    assert logs[0] == logs[1]
    assert weights(launch.run_dir) == weights(undisturbed)


@slow
def test_a_run_changes_to_turns_and_back(tmp_path: Path, material: Material, launches: Launches) -> None:
    program = Program(tmp_path, material, launches)
    launch = program.start("run", *beside(2))
    launch.kill_when(launch.committed(2))
    launch = program.start("run", "grpo.async_grpo.enabled=false")
    launch.kill_when(launch.committed(4))
    assert "async_grpo.enabled" in launch.output()
    run_dir = program.finish("run", *beside(1))
    ages = [row.get("train/rollout_age") for row in read_rows(run_dir) if row["step"] > 0]
    # step 5 samples for itself, since nobody did while 4 trained
    assert ages[:2] == [0.0, 1.0] and ages[-2:] == [0.0, 1.0], ages


@slow
def test_engines_have_a_layout_of_their_own(tmp_path: Path, material: Material, launches: Launches) -> None:
    """Two pipeline stages train, and two tensor-parallel ranks generate with the weights of both."""
    program = Program(tmp_path, material, launches)
    layout = [
        "policy.megatron_cfg.tensor_model_parallel_size=1",
        "policy.megatron_cfg.pipeline_model_parallel_size=2",
    ]
    engines = ["policy.generation.colocated.resources.gpus_per_node=2", "cluster.gpus_per_node=4"]
    run_dir = program.finish(
        "run", *layout, *engines, "policy.generation.engine_cfg={tensor_parallel_size: 2}"
    )
    rows = [row for row in read_rows(run_dir) if row["step"] > 0]
    assert all(row["train/mismatch_max"] < 1e-5 and row["train/grad_norm"] > 0 for row in rows)


READY_FIRST = [
    *beside(2),
    "grpo.async_grpo.schedule=ready_first",
    "grpo.async_grpo.lookahead_steps=2",
]


@slow
@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_what_was_ready_first_is_repeated_from_its_ledger(
    backend: str, tmp_path: Path, material: Material, launches: Launches
) -> None:
    """After kills too; the checkpoints say which groups wait and which are sampled again."""
    program = Program(tmp_path, material, launches, backend)
    seed = sample_seed()
    draw = random.Random(seed)
    for step in sorted(draw.sample(range(1, STEPS), 2)):
        launch = program.start("run", *READY_FIRST)
        launch.kill_when(launch.logged(step) if draw.random() < 0.5 else launch.committed(step))
    run = program.finish("run", *READY_FIRST)
    records = [
        json.loads(path.read_text())["records"] for path in sorted((run / "ledger").glob("step_*.json"))
    ]
    prompts = [record for step in records for record in dict.fromkeys(step)]
    assert len(prompts) == len(set(prompts)), f"seed {seed}: a prompt was trained on twice within an epoch"
    again = program.finish("again", *READY_FIRST, f"grpo.async_grpo.replay={run}")
    # Validated beside training there, and between steps here, with the same weights.
    of_engines = ("train/rollouts_", "train/engine_check")
    rows = [
        [
            {name: value for name, value in row.items() if not name.startswith(of_engines)}
            for row in comparable(each)
        ]
        for each in (run, again)
    ]
    assert rows[0] == rows[1], f"seed {seed}"
    assert weights(run) == weights(again), f"seed {seed}"
    trained = [row for row in read_rows(run) if row["step"] > 0]
    ages = [row["train/rollout_age"] for row in trained]
    assert max(ages) <= 2 and any(age > 0 for age in ages)
    assert any("timing/validation_beside_s" in row for row in trained)
