"""The configurations that faults are tried on where nobody names one: four steps of a tiny GRPO run on two
ranks, on each backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.faults.trial import Subject
from tests.system.whole_runs import CONFIGS, make_material, write_config

BACKENDS = ("megatron", "dtensor", "fsdp1")
_ALIKE = ("policy.train_micro_batch_size=2", "policy.megatron_cfg.scheduler.lr_warmup_iters=0")


def subjects_of(backends: Sequence[str], work: Path) -> list[Subject]:
    """A configuration of each backend; model, data and file are made once."""
    material = work / "material"
    config = work / "grpo.yaml"
    if not config.exists():
        material.mkdir(parents=True, exist_ok=True)
        write_config(config, "grpo", make_material(material))
    return [Subject(name, config, ("--with", str(CONFIGS / f"{name}.yaml"), *_ALIKE)) for name in backends]
