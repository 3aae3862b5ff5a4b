"""Checkpoints between drawn layouts: what a layout writes, another one reads and writes again, bit for
bit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.checkpoint.boxes import whole
from converters.torch_dist.reader import TorchDistCheckpoint
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.layouts import layout
from tests.dist.test_megatron_checkpoint import train_and_save
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled

DENSE = ("llama", "qwen2", "qwen3", "mistral", "qwen3_5_text")
MIXTURES = (
    "qwen2_moe_mixed",
    "qwen3_moe",
    "mixtral",
    "glm4_moe_mixed",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
)
HYBRID = {"qwen3_next", "qwen3_5_text"}
PLACED = [
    "tp1",
    "tp2",
    "tp2-sp",
    "pp2",
    "pp2-uneven",
    "dp2-overlap",
    "tp2-pp2",
    "tp2-dp2",
    "cp2-tp2-sp",
    "pp3",
    "pp2-vpp2",
    "dp4",
]
PLACED_EXPERTS = [
    *("ep1", "ep2-dp2", "tp2-sp-ep2", "tp2-sp-ep2-etp2", "pp2-ep2", "pp2-uneven-ep2"),
    *("cp2-ep2", "pp2-tp2-sp-ep2", "pp3", "pp2-vpp2-ep2", "ep4"),
]

# wrong once: float32 weights among those of bfloat16, on a pipeline stage that tensor parallelism cuts
MIXED = ("qwen3_next", "pp2-tp2-sp-ep2", "tp2-sp-ep2", {"precision": "bfloat16"})


def drawn(seed: int) -> tuple[str, str, str, dict[str, Any]]:
    """A family, the layout that writes, the one that reads, and options of both."""
    draw = random.Random(seed)
    families, layouts = (MIXTURES, PLACED_EXPERTS) if draw.random() < 0.6 else (DENSE, PLACED)
    family, places = draw.choice(families), [draw.choice(layouts) for _ in range(2)]
    if any("vpp" in place for place in places):
        places = [place.replace("pp3", "pp2") for place in places]
    if family == "gpt_oss":
        # Megatron-Core does not cut biases of experts
        places = [place.replace("-etp2", "") for place in places]
    # gradients of a gated delta net's norm overflow at the loss scale that float16 begins with
    precision = draw.choice(
        ("float32", "bfloat16") if family in HYBRID else ("float32", "bfloat16", "float16")
    )
    options = {
        "precision": precision,
        "distributed_optimizer": draw.random() < 0.7,
        "batching": draw.choice(("fixed", "packed", "dynamic")),
        "weight_decay": draw.choice((0.0, 0.1)),
    }
    if family in HYBRID:
        options["distributed_optimizer"] = True  # a rule wants it under bfloat16
    if family in MIXTURES:
        options |= {"freeze_router": draw.random() < 0.2, "grouped": draw.random() < 0.3}
    return family, places[0], places[1], options


def load_and_save(config: Mapping[str, Any], directory: Path, target: Path) -> None:
    """Job: read a checkpoint and write it again."""
    paths = {f"{what}_path": str(directory / what) for what in ("weights", "optimizer")}
    worker = jobs.build(config, **paths, init_reference_model=False)
    worker.save_checkpoint(str(target / "weights"), str(target / "optimizer"))
    worker.backend.close()


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory."""
    checkpoint = TorchDistCheckpoint(directory)
    return {name: checkpoint.read(name, whole(checkpoint.shape(name))) for name in checkpoint}


def overlap(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """What both have: a vocabulary is padded to what a layout divides."""
    common = tuple(slice(0, min(sizes)) for sizes in zip(ours.shape, theirs.shape, strict=True))
    return ours[common], theirs[common]


@newest_megatron(case=[MIXED])
@sampled(3, case=[MIXED])
@pytest.mark.parametrize("case", [MIXED, *map(drawn, range(40))], ids=str)
def test_another_layout_writes_the_same_again(
    pool: WorkerPool, tmp_path: Path, case: tuple[str, str, str, dict[str, Any]]
) -> None:
    family, written, read, options = case
    layers = 4 if "vpp" in written + read else 3
    models = [
        make_tiny(tmp_path / name, family, tied=False, seed=len(name), layers=layers)
        for name in ("first", "second")
    ]
    placed = []
    for model, name in zip(models, (written, read), strict=True):
        world, changes = layout(name)
        if layers == 4:
            changes = {key: value for key, value in changes.items() if key not in {"first", "last"}}
        placed.append((world, policy_config(model, **changes, **options)))
    pool.run(placed[0][0], train_and_save, placed[0][1], tmp_path)
    pool.run(placed[1][0], load_and_save, placed[1][1], tmp_path, tmp_path / "again")
    for what in ("weights", "optimizer"):
        first, second = tensors_of(tmp_path / what), tensors_of(tmp_path / "again" / what)
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            ours, theirs = overlap(tensor, second[name])
            assert torch.equal(ours, theirs), f"{what}: {name}"
