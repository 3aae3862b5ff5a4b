"""The float32 weights that an optimizer keeps are exported in place of the model's own, or it is said why
they cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from converters.opening import OpeningOptions, inspect_path
from tests.tiers import sampled
from tests.unit.foreign_checkpoints import (
    arguments_for,
    assert_exported,
    is_refused,
    tensors_of,
    write_checkpoint,
)

MASTERS: dict[str, str] = {
    "fully_reshardable": "optimizer.state.param.",
    "not distributed": "optimizer.state.fp32_param.",
}


@sampled(1)
@pytest.mark.parametrize("prefix", MASTERS.values(), ids=MASTERS)
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_master_weights_are_exported(prefix: str, beside: bool, tmp_path: Path) -> None:
    """The model that transformers saved in float32 is what the optimizer holds; the checkpoint's own weights
    are it in bfloat16."""
    exact = tensors_of("qwen3_moe", tmp_path)
    rounded = {key: tensor.bfloat16() for key, tensor in exact.items()}
    master = {f"chained_{int('experts' in key)}.{prefix}{key}": tensor for key, tensor in exact.items()}
    source = write_checkpoint(
        tmp_path / "run" / "weights", rounded if beside else rounded | master, arguments_for("qwen3_moe")
    )
    if beside:
        write_checkpoint(tmp_path / "run" / "optimizer", master)
    _, facts, _ = inspect_path(source, OpeningOptions(eos_token_ids=(2,)))
    assert facts["optimizer_state"] is not beside
    flags = ("--eos-token-id", "2")
    assert_exported(source, tmp_path / "own", tmp_path / "hf", *flags, dtype=torch.bfloat16)
    assert_exported(source, tmp_path / "exact", tmp_path / "hf", *flags, "--source-weights", "master")
    assert_exported(
        source,
        tmp_path / "rounded",
        tmp_path / "hf",
        *flags,
        "--source-weights",
        "master",
        "--dtype",
        "bfloat16",
        dtype=torch.bfloat16,
    )
    assert (
        load_file(tmp_path / "rounded" / "model.safetensors").keys()
        == load_file(tmp_path / "own" / "model.safetensors").keys()
    )


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda exact: {}, "has no optimizer state with float32 weights"),
        (
            lambda exact: {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.param": torch.zeros(9)},
            "was saved by buckets",
        ),
        (
            lambda exact: {
                f"optimizer.state.fp32_param.{key}": value.reshape(-1) for key, value in exact.items()
            },
            "in its own shapes",
        ),
        (
            lambda exact: {
                f"optimizer.state.param.{key}": value for key, value in exact.items() if "final" not in key
            },
            r"missing: decoder.final_layernorm.weight \(torch.bfloat16 in the model\)",
        ),
    ],
    ids=["none", "buckets", "flattened", "incomplete"],
)
def test_master_weights_that_cannot_be_read_are_refused(
    optimizer: Callable[[dict[str, Tensor]], dict[str, Tensor]], said: str, tmp_path: Path
) -> None:
    exact = tensors_of("llama", tmp_path)
    rounded = {key: tensor.bfloat16() for key, tensor in exact.items()}
    source = write_checkpoint(tmp_path / "run", rounded | optimizer(exact), arguments_for("llama"))
    assert re.search(said, is_refused(source, "--eos-token-id", "2", "--source-weights", "master"))
