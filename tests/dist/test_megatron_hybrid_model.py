"""Megatron-Core's HybridModel in the place of its GPTModel: the same steps to the bit, of the same weights,
from the same checkpoints."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch

from megarl import env
from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures, reference
from tests.dist.batches import make_batch
from tests.dist.checks import check_equal, check_generated, prompts, transformers_greedy
from tests.dist.test_megatron_checkpoint import load_and_train, train_and_save
from tests.models import policy_config
from tests.tiers import newest_megatron, sampled, slow

GPT = "megatron.core.models.gpt.gpt_model"
HAS_HYBRID = importlib.util.find_spec("megatron.core.models.hybrid") is not None
on_hybrid = pytest.mark.skipif(not HAS_HYBRID, reason="this Megatron-Core has no HybridModel")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"batching": "dynamic"}),
    "tp2-sp": (2, {"tp": 2, "sp": True, "multiple": 2, "batching": "packed"}),
    "cp2": (2, {"cp": 2, "multiple": 4, "batching": "packed", "recompute": True}),
    "pp2": (2, {"pp": 2, "first": 1, "last": 2}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2, "batching": "packed"}),
    "pp2-drawn": (2, {"pp": 2, "pipeline_layout": "E|tttL"}),
    "dp2-recompute": (2, {"overlap": True, "recompute": ["mlp", "core_attn"]}),
    "ep2-tp2": (2, {"ep": 2, "tp": 2, "sp": True, "multiple": 2}),
}
DENSE = ("llama", "qwen2-tied", "qwen3")
OTHERS = (
    "mistral_window",
    "gpt_oss",
    "qwen3_moe_mixed",
    "glm4_moe_mixed",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
CASES = [
    *(
        (family, layout)
        for family in DENSE
        for layout in ("one", "tp2-sp", "cp2", "pp2", "pp2-vpp2", "pp2-drawn", "dp2-recompute")
    ),
    *((family, layout) for family in OTHERS for layout in ("one", "tp2-sp", "cp2", "pp2", "pp2-vpp2")),
    *((family, "ep2-tp2") for family in OTHERS if "moe" in family),
]


def made(
    model_of: Callable[[str], Path], family: str, layout: str, model_class: str = "hybrid", **more: Any
) -> tuple[int, Path, dict[str, Any]]:
    """World, tiny model and configuration."""
    world, changes = LAYOUTS[layout]
    model = model_of(f"{family}-four" if "vpp" in layout else family)
    return world, model, policy_config(model, **changes, model_class=model_class)


def built(config: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Of each chunk the name of its class, and the numbers of its layers."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    found = [
        (type(stage).__name__, [layer.layer_number for layer in stage.decoder.layers])
        for stage in worker.backend.stages
    ]
    worker.backend.close()
    return found


def built_without_gpt(config: Mapping[str, Any]) -> Any:
    """The same, or the error, where Megatron-Core has no GPTModel."""
    found: Any = importlib.import_module(GPT)
    sys.modules[GPT] = None  # type: ignore[assignment]
    try:
        return jobs.build_error(config) if config["megatron_cfg"]["model_class"] else built(config)
    finally:
        sys.modules[GPT] = found


@newest_megatron
def test_a_class_that_is_not_there_is_refused(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    configs = {
        name: policy_config(tiny_models["qwen3"], model_class=name) for name in ("gpt", "hybrid", None)
    }
    if HAS_HYBRID:
        (said,) = pool.run(1, built_without_gpt, configs["gpt"])
        lacks, fix = "GPTModel", "write hybrid or null"
        assert pool.run(1, built_without_gpt, configs[None]) == [[("LayeredModel", [1, 1, 2, 2, 3, 3])]]
    else:
        (said,) = pool.run(1, jobs.build_error, configs["hybrid"])
        lacks, fix = (
            "HybridModel",
            "write gpt or null, or install megatron-core 0.19.2 or newer, for Python 3.12",
        )
    assert said.startswith("ConfigError") and "policy.megatron_cfg.model_class = " in said, said
    # as it is installed: megatron.core.__version__ ends with the commit of any repository around
    assert f"Megatron-Core {env.installed_version('megatron-core')} has no {lacks}. Fix: {fix}" in said
    assert pool.run(1, built, configs[None]) == [[("GPTModel", [1, 2, 3])]]


def link_all_but(source: Path, target: Path, left_out: str) -> None:
    """Make a directory of links to what is in another one, but for names that begin so."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if not entry.name.startswith((left_out, "__pycache__")):
            (target / entry.name).symlink_to(entry)


@on_hybrid
@slow
@newest_megatron
def test_a_release_without_gptmodel_trains_hybridmodel_by_itself(tmp_path: Path) -> None:
    """All of Megatron-Core is there but the module of GPTModel, from the start of every process."""
    (core,) = megatron.core.__path__
    for package, left_out in (("", "models"), ("models", "gpt"), ("models/gpt", "gpt_model.py")):
        link_all_but(Path(core) / package, tmp_path / "megatron" / "core" / package, left_out)
    # which imports GPTModel
    (tmp_path / "megatron" / "core" / "models" / "gpt" / "__init__.py").unlink()
    repository = Path(__file__).parents[2]
    variables = {**env.snapshot(), "PYTHONPATH": f"{tmp_path}:{repository}"}
    line = "family=qwen3_5_text head=12 layers=2 tp=2 kv=2 ffn=6 batching=packed room=9 mbs=2 length=6"
    command = [sys.executable, "-m", "megarl", "parity", "--case", line]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "agrees: " in done.stdout, done.stdout + done.stderr


@on_hybrid
@slow
@newest_megatron
def test_layers_are_halves(pool: WorkerPool, model_of: Callable[[str], Path]) -> None:
    world, _, config = made(model_of, "qwen3", "pp2-vpp2")
    found = pool.run(world, built, config)
    assert found == [
        [("LayeredModel", [layer, layer]), ("LayeredModel", [layer + 2, layer + 2])] for layer in (1, 2)
    ]


@on_hybrid
@slow
@newest_megatron
@sampled("values")
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_log_probabilities_are_those_of_transformers(
    pool: WorkerPool, model_of: Callable[[str], Path], family: str, layout: str
) -> None:
    world, model, config = made(model_of, family, layout)
    batch = make_batch(rows=8, length=14, seed=4)
    expected = (mixtures.logprobs if family in OTHERS else reference.logprobs_of)(model, batch, 1.0)
    for found in pool.run(world, jobs.logprobs, config, batch):
        torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)


@on_hybrid
@slow
@newest_megatron
@sampled("values")
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_checkpoint_of_gptmodel_goes_on_to_the_bit(
    pool: WorkerPool, model_of: Callable[[str], Path], tmp_path: Path, family: str, layout: str
) -> None:
    """And so do the steps before it: losses, gradient norms and weights are those of GPTModel, which goes on
    from its checkpoints too."""
    world, _, config = made(model_of, family, layout, "gpt")
    *_, other = made(model_of, family, layout)
    of_gpt = pool.run(world, train_and_save, config, tmp_path / "gpt")[0]
    for run, given, directory in (
        (load_and_train, other, "gpt"),
        (train_and_save, other, "hybrid"),
        (load_and_train, config, "hybrid"),
    ):
        more = (False,) if run is load_and_train else ()
        found = pool.run(world, run, given, tmp_path / directory, *more)[0]
        assert found["measured"] == of_gpt["measured"], (run.__name__, directory)
        check_equal(found["weights"], of_gpt["weights"])


@on_hybrid
@slow
@newest_megatron
@sampled(4)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("layout", ["tp2-sp", "cp2", "pp2", "pp2-vpp2"])
def test_greedy_equals_transformers(
    pool: WorkerPool, model_of: Callable[[str], Path], family: str, layout: str
) -> None:
    world, model, config = made(model_of, family, layout)
    config["generation"]["stop_token_ids"] = []
    check_generated(
        pool, world, config, prompts(rows=8), True, transformers_greedy(model, prompts(rows=8), 8, [])
    )


@on_hybrid
@slow
@newest_megatron
def test_sums_and_norms_in_one_are_those_of_gptmodel(
    pool: WorkerPool, model_of: Callable[[str], Path]
) -> None:
    """As they are on GPUs, run operation by operation here."""
    found = []
    for model_class in ("gpt", "hybrid"):
        world, _, config = made(model_of, "qwen3", "one", model_class)
        found += pool.run(
            world, jobs.train_with_fusions, config, [make_batch(rows=8, length=12, seed=1)], NLLLoss()
        )
    assert found[0]["losses"] == found[1]["losses"] and found[0]["norms"] == found[1]["norms"]
    check_equal(found[1]["weights"], found[0]["weights"])
