"""The configurations that faults are tried on where nobody names one: four steps of a tiny GRPO run on two
ranks, on each backend; or eight with an engine beside them, two steps ahead, in either schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.faults.trial import READY_FIRST, Subject
from tests.system.whole_runs import CONFIGS, ROOT, make_material, write_config

BACKENDS = ("megatron", "dtensor", "fsdp1")
SCHEDULES = ("in_order", READY_FIRST)
_BESIDE = (
    "grpo.max_num_steps=8",
    "cluster.gpus_per_node=3",
    "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}",
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.max_trajectory_age_steps=2",
    # a function of one's own is computed by processes beside the driver
    f"env.reward={ROOT / 'tests' / 'toys' / 'digits.py'}:reward",
    "env.processes=1",
)
_AHEAD = {"in_order": (), READY_FIRST: ("grpo.async_grpo.lookahead_steps=2",)}
_ALIKE = ("policy.train_micro_batch_size=2", "policy.megatron_cfg.scheduler.lr_warmup_iters=0")


def subjects_of(backends: Sequence[str], work: Path, beside: bool = False) -> list[Subject]:
    """A configuration of each backend, or with engines ``beside`` of each backend and schedule; model, data
    and file are made once."""
    material = work / "material"
    config = work / "grpo.yaml"
    if not config.exists():
        material.mkdir(parents=True, exist_ok=True)
        write_config(config, "grpo", make_material(material))
    plain = [Subject(name, config, ("--with", str(CONFIGS / f"{name}.yaml"), *_ALIKE)) for name in backends]
    if not beside:
        return plain
    return [
        Subject(
            f"{each.name}-{schedule}",
            config,
            (*each.arguments, *_BESIDE, *_AHEAD[schedule], f"grpo.async_grpo.schedule={schedule}"),
        )
        for schedule in SCHEDULES
        for each in plain
    ]
