"""Converters against Megatron-Core itself: its loader reads what ``import`` writes, in any layout, and
``export`` reads what it saves."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoTokenizer

from converters.checkpoint.source import open_source
from converters.exporting import export_model, plan_export
from converters.importing import import_model, plan_import
from converters.opening import open_any, open_megatron
from converters.verify import verify
from megarl.data.tokenization import get_tokenizer
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures, reference
from tests.dist.batches import make_batch
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled
from tests.unit.test_tokenization import save_tokenizer

pytestmark = newest_megatron
MIXTURES = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_mixed",
    "gpt_oss",
    "mixtral",
    "qwen2_moe",
    "qwen2_moe_mixed",
    "qwen3_moe",
    "qwen3_moe_mixed",
)
UNEVEN = {"first": 1, "last": 2}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("deepseek_v2-tied", 2, {"pp": 2, **UNEVEN}),
    ("deepseek_v3", 4, {"tp": 2, "sp": True, "ep": 2, "etp": 2, "multiple": 2}),
    ("deepseek_v3_dense", 2, {"tp": 2}),
    ("llama", 2, {"tp": 2}),
    ("llama", 2, {"pp": 2, **UNEVEN}),
    ("mistral_window", 1, {}),
    ("qwen2", 4, {"tp": 2, "pp": 2, **UNEVEN}),
    ("qwen2-tied", 4, {"tp": 2, "pp": 2, **UNEVEN}),
    ("qwen3-tied-four", 2, {"pp": 2, "vpp": 2}),
    ("mixtral", 2, {"ep": 2}),
    ("mixtral", 4, {"ep": 2, "etp": 2}),
    ("qwen3_moe", 4, {"pp": 2, "ep": 2, **UNEVEN}),
    ("qwen3_moe_mixed", 4, {"tp": 2, "sp": True, "ep": 2, "multiple": 2}),
    ("qwen3_moe_mixed", 2, {"pp": 2, **UNEVEN}),
    ("qwen2_moe", 4, {"tp": 2, "sp": True, "ep": 2, "etp": 2, "multiple": 2}),
    ("qwen2_moe_mixed", 2, {"pp": 2, **UNEVEN}),
    ("glm4_moe", 2, {"pp": 2, **UNEVEN}),
    ("gpt_oss", 2, {"tp": 2, "sp": True, "ep": 2, "multiple": 2}),
    ("gpt_oss-tied", 2, {"pp": 2, **UNEVEN}),
    ("glm4_moe_mixed-tied", 4, {"tp": 2, "sp": True, "ep": 2, "etp": 2, "multiple": 2}),
]


def load_compute_and_save(
    config: Mapping[str, Any], weights: str, batch: Mapping[str, Any], target: str
) -> torch.Tensor:
    """Log-probabilities of a worker that was built from other weights and then read ``weights``; it saves
    them again to ``target``."""
    worker = jobs.build(config, init_reference_model=False)
    worker.load_checkpoint(weights, None)
    values = jobs.logprobs_of(worker, batch)
    worker.save_checkpoint(target, None)
    worker.backend.close()
    return values


def extra_states(directory: Path) -> set[str]:
    """Keys of the modules' states; without one that it asks for, Megatron-LM's own loading fails, though that
    of megarl does not."""
    return {
        key
        for key in FileSystemReader(directory).read_metadata().state_dict_metadata
        if "_extra_state" in key
    }


def tiny(directory: Path, name: str, seed: int) -> Path:
    family, *options = name.split("-")
    return make_tiny(
        directory, family, tied="tied" in options, seed=seed, **({"layers": 4} if "four" in options else {})
    )


@sampled(2)
@pytest.mark.parametrize(("name", "world", "layout"), CASES, ids=lambda value: str(value).replace("'", ""))
def test_megatron_core_loads_and_saves_what_is_converted(
    pool: WorkerPool, tmp_path: Path, name: str, world: int, layout: dict[str, Any]
) -> None:
    wanted, other = tiny(tmp_path / "wanted", name, 1), tiny(tmp_path / "other", name, 2)
    import_model(plan_import(open_source(wanted), vocab_multiple=4), tmp_path / "imported")
    batch = make_batch(rows=7, length=13, seed=3)
    expected = reference.logprobs(
        (mixtures if name.split("-")[0] in MIXTURES else reference).load(wanted), batch
    )
    config = policy_config(other, **layout)
    results = pool.run(
        world, load_compute_and_save, config, str(tmp_path / "imported"), batch, str(tmp_path / "saved")
    )
    for values in results:
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    assert extra_states(tmp_path / "saved") <= extra_states(tmp_path / "imported")
    export_model(plan_export(open_megatron(tmp_path / "saved")), tmp_path / "exported")
    assert verify(open_any(wanted), open_any(tmp_path / "exported")) == []
    assert (tmp_path / "exported" / "config.json").read_bytes() == (other / "config.json").read_bytes()


def save_and_export(config: Mapping[str, Any], tokenizer: Any, directory: str, gone: tuple[str, ...]) -> None:
    worker = jobs.build(config, tokenizer=tokenizer, init_reference_model=False)
    for path in gone if dist.get_rank() == 0 else ():
        shutil.rmtree(path)
    worker.save_checkpoint(f"{directory}/policy/weights", tokenizer_path=f"{directory}/policy/tokenizer")
    worker.export_hf(f"{directory}/hf")
    worker.backend.close()


def test_a_checkpoint_s_export_has_the_files_of_the_run_s_own(pool: WorkerPool, tmp_path: Path) -> None:
    """The tokenizer of the run among them, and not that of its model."""
    model = make_tiny(tmp_path / "model", "llama", tied=False)
    save_tokenizer(model, chat=True)
    (model / "tokenizer.model").write_text("sentencepiece")
    template = "Q {{ messages[0]['content'] }} A"
    tokenizer = get_tokenizer(
        {"name": save_tokenizer(tmp_path / "other", bos=True), "chat_template": template}
    )
    # A job may remove its copy of the model as soon as the workers have read it.
    gone = (str(model), str(tmp_path / "other"))
    pool.run(2, save_and_export, policy_config(model, tp=2), tokenizer, str(tmp_path / "run"), gone)
    checkpoint = tmp_path / "run" / "policy" / "weights"
    export_model(plan_export(open_megatron(checkpoint)), tmp_path / "exported")
    exported, own = (
        {path.name: path.read_bytes() for path in directory.iterdir()}
        for directory in (tmp_path / "exported", tmp_path / "run" / "hf")
    )
    for files in (exported, own):
        files.pop("model.safetensors")
    exported.pop("conversion.json")
    assert exported == own and "tokenizer.model" not in own
    found = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert found.chat_template == template and found("two")["input_ids"] == [2, 6]
