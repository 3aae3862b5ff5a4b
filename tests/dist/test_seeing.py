"""Published models that also see: their text is trained as transformers trains it, and everything else comes
out as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from converters.errors import ConversionError
from converters.exporting import export_model, plan_export
from converters.opening import open_megatron
from megarl.algorithms.loss_functions import ClippedPGLossFn
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.dist.checks import check_equal
from tests.dist.training import PG_LOSS
from tests.models import policy_config
from tests.seeing import FILES, TOKENS, VISION, make_seeing, save_text_part
from tests.tiers import sampled

LAYOUTS = {
    "qwen3_5-untied": (2, {"tp": 2, "sp": True, "multiple": 2, "batching": "packed"}),
    "qwen3_5-tied": (2, {"pp": 2, "first": 1, "last": 2, "batching": "dynamic"}),
    "qwen3_5_moe-untied": (2, {"ep": 2, "batching": "packed"}),
    "qwen3_5_moe-tied": (2, {"cp": 2, "multiple": 4, "batching": "packed"}),
}


def train_and_export(
    config: Mapping[str, Any], batches: list[dict[str, Tensor]], directory: str
) -> dict[str, Any]:
    """Train, and write a model."""
    worker = jobs.build(config, init_reference_model=False)
    losses = [jobs.step(worker, batch, ClippedPGLossFn(PG_LOSS))[0] for batch in batches]
    worker.export_hf(f"{directory}/hf")
    worker.save_checkpoint(f"{directory}/weights")
    found = {"losses": losses, "weights": jobs.full_weights(worker)}
    worker.backend.close()
    return found


@sampled(2)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_text_is_trained_and_the_rest_is_exported_as_it_was(
    pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    family, tied = kind.split("-")
    model = make_seeing(tmp_path / "model", family, tied=tied == "tied", seed=71)
    text = save_text_part(model, tmp_path / "text")
    world, changes = LAYOUTS[kind]
    config = policy_config(model, mbs=2, clip=0.5, **changes)
    batches = [make_batch(rows=8, length=14, seed=seed) for seed in (1, 2, 3)]
    loss_fn = ClippedPGLossFn(PG_LOSS)
    results = pool.run(world, train_and_export, config, batches, str(tmp_path / "out"))
    expected = pool.run(world, jobs.train, policy_config(text, mbs=2, clip=0.5, **changes), batches, loss_fn)
    weights = results[0]["weights"]
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in weights)
    assert [result["losses"] for result in results] == [result["losses"] for result in expected]
    check_equal(
        {name.replace("model.language_model.", "model."): tensor for name, tensor in weights.items()},
        expected[0]["weights"],
    )

    before, after = (
        load_file(model / "model.safetensors"),
        load_file(tmp_path / "out" / "hf" / "model.safetensors"),
    )
    untouched = [name for name in before if name.startswith(("model.visual.", "mtp."))]
    assert len(untouched) > 40 and all(torch.equal(after[name], before[name]) for name in untouched)
    check_equal({name: after[name] for name in after if name not in untouched}, weights)
    for name in FILES:
        assert (tmp_path / "out" / "hf" / name).read_bytes() == (model / name).read_bytes()
    check_opens(tmp_path / "out" / "hf", after)
    check_export(tmp_path / "out", model, after)


def check_opens(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """transformers takes every tensor of an export, and computes with a picture."""
    loaded, report = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    for name, parameter in loaded.state_dict().items():
        if name in tensors:
            assert torch.equal(parameter, tensors[name]), name
    patches, width = 16, 3 * VISION["temporal_patch_size"] * VISION["patch_size"] ** 2
    pictures = {"pixel_values": torch.randn(patches, width), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    ids = torch.tensor(
        [
            [
                5,
                TOKENS["vision_start_token_id"],
                *[TOKENS["image_token_id"]] * 4,
                TOKENS["vision_end_token_id"],
                7,
            ]
        ]
    )
    kinds = (ids == TOKENS["image_token_id"]).int()
    with torch.no_grad():
        assert loaded(input_ids=ids, mm_token_type_ids=kinds, **pictures).logits.isfinite().all()


def check_export(run: Path, model: Path, expected: Mapping[str, Tensor]) -> None:
    """A checkpoint becomes the same model, with what training left untouched from the model that it began
    with."""
    with pytest.raises(
        ConversionError, match=r"holds only the text part of a vision-language model.*--untouched-from"
    ):
        plan_export(open_megatron(run / "weights"))
    export_model(plan_export(open_megatron(run / "weights"), untouched_from=model), run / "exported")
    check_equal(load_file(run / "exported" / "model.safetensors"), expected)
    assert (
        json.loads((run / "exported" / "config.json").read_text())["vision_config"]["depth"]
        == VISION["depth"]
    )
