"""What recipes for GPUs do, on one device: packed bfloat16 with heads of width 64, activation recompute,
mixtures of experts, Transformer Engine where it is installed.

Skipped where there is no CUDA device; ``MEGARL_GPU_TESTS_ON=cpu`` runs the bodies on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.loss_functions import NLLLoss
from tests.dist import jobs as rank_jobs
from tests.dist import mixtures, reference
from tests.dist.batches import make_batch
from tests.gpu import jobs
from tests.gpu.conftest import DEVICE, ON_GPU, WITH_TE, DeviceProcess, needs_device
from tests.models import policy_config

pytestmark = [needs_device, pytest.mark.gpu_training]
LONGEST = 200
BATCHES = [make_batch(rows=12, length=LONGEST, seed=seed) for seed in (1, 2, 3)]
FAMILIES = ["qwen2", "qwen3"]


def packed(model: Path, **changes: Any) -> dict[str, Any]:
    """A configuration of bins of 512 tokens, so that a bin holds several sequences of these batches."""
    config = policy_config(
        model,
        **{"batching": "packed", "precision": "bfloat16", "max_length": LONGEST + 8, "gbs": 12, **changes},
    )
    if config["sequence_packing"]["enabled"]:
        config["sequence_packing"].update({"train_mb_tokens": 512, "logprob_mb_tokens": 768})
    return config


def exact_logprobs(model: Path, batch: dict[str, Tensor], family: str) -> Tensor:
    loaded = mixtures.load(model) if family.endswith("moe") else reference.load(model)
    return reference.logprobs(loaded, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_bfloat16_is_no_further_from_float32_than_transformers_is(
    cuda: DeviceProcess, wide_models: dict[str, Path], family: str
) -> None:
    model, batch = wide_models[family], BATCHES[0]
    exact = exact_logprobs(model, batch, family)
    theirs = cuda.run(jobs.transformers_logprobs, model, torch.bfloat16, batch)
    ours = cuda.run(rank_jobs.logprobs, packed(model), batch)
    error, their_error = (ours - exact).abs().mean(), (theirs - exact).abs().mean()
    assert 0 < error < 2 * their_error, f"mean error {error:.2e}, that of transformers {their_error:.2e}"


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_packed_float32_equals_transformers(
    cuda: DeviceProcess, wide_models: dict[str, Path], family: str
) -> None:
    values = cuda.run(rank_jobs.logprobs, packed(wide_models[family], precision="float32"), BATCHES[0])
    expected = exact_logprobs(wide_models[family], BATCHES[0], family)
    torch.testing.assert_close(values, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_packed_bfloat16_training_follows_unpacked_float32(
    cuda: DeviceProcess, wide_models: dict[str, Path], family: str
) -> None:
    exact = cuda.run(
        rank_jobs.train,
        packed(wide_models[family], precision="float32", batching="fixed"),
        BATCHES,
        NLLLoss(),
    )
    rounded = cuda.run(rank_jobs.train, packed(wide_models[family]), BATCHES, NLLLoss())
    assert rounded["losses"] != exact["losses"]
    torch.testing.assert_close(
        torch.tensor(rounded["losses"]), torch.tensor(exact["losses"]), atol=0, rtol=3e-2
    )
    torch.testing.assert_close(
        torch.tensor(rounded["norms"]), torch.tensor(exact["norms"]), atol=0, rtol=1e-1
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_recomputed_activations_change_nothing(
    cuda: DeviceProcess, wide_models: dict[str, Path], family: str
) -> None:
    kept = cuda.run(rank_jobs.train, packed(wide_models[family]), BATCHES[:2], NLLLoss())
    recomputed = cuda.run(
        rank_jobs.train, packed(wide_models[family], recompute=True), BATCHES[:2], NLLLoss()
    )
    # on a device backward passes may add in another order, and a compiled norm, which is made together with
    # the sum in front of it unless recomputation stands between them, is that of the sum before it is rounded
    # to 16 bits
    assert (ON_GPU and not WITH_TE) or recomputed["losses"][0] == kept["losses"][0]
    torch.testing.assert_close(
        torch.tensor(recomputed["losses"][0]), torch.tensor(kept["losses"][0]), atol=0, rtol=1e-3
    )
    close = {"atol": 0, "rtol": 1e-2 if ON_GPU else 1e-5}
    torch.testing.assert_close(torch.tensor(recomputed["losses"]), torch.tensor(kept["losses"]), **close)
    torch.testing.assert_close(torch.tensor(recomputed["norms"]), torch.tensor(kept["norms"]), **close)


def test_experts_answer_as_transformers_does(cuda: DeviceProcess, wide_models: dict[str, Path]) -> None:
    batch = {
        key: value
        for key, value in make_batch(rows=4, length=9, seed=5).items()
        if key in ("input_ids", "input_lengths")
    }
    output = cuda.run(
        jobs.greedy, packed(wide_models["qwen3_moe"], precision="float32", batching="fixed"), batch
    )
    expected = reference.greedy(mixtures.load(wide_models["qwen3_moe"]), batch, 8, [2])
    lengths = output["unpadded_sequence_lengths"].tolist()
    assert [
        ids[:length].tolist() for ids, length in zip(output["output_ids"], lengths, strict=True)
    ] == expected


@pytest.mark.parametrize(("family", "is_taken"), [("qwen3", False), ("qwen3_moe", WITH_TE)])
def test_transformer_engine_makes_the_layers_of_mixtures_where_it_is(
    cuda: DeviceProcess, wide_models: dict[str, Path], family: str, is_taken: bool
) -> None:
    names = cuda.run(jobs.layers_of, packed(wide_models[family]))
    assert ("TEDotProductAttention" in names) is is_taken
    assert ("PortableAttention" in names) is not is_taken


def test_packed_rows_are_separate(cuda: DeviceProcess, wide_models: dict[str, Path]) -> None:
    """What a neighbour in the bin says changes no log-probability of a sequence: the mask of the kernel, in
    whatever kernel there is."""
    first = {key: BATCHES[0][key] for key in ("input_ids", "input_lengths")}
    other = {"input_ids": first["input_ids"].clone(), "input_lengths": first["input_lengths"]}
    changed = torch.arange(12) % 2 == 1
    other["input_ids"][changed] = BATCHES[1]["input_ids"][changed] * (
        torch.arange(LONGEST)[None] < first["input_lengths"][changed, None]
    )
    one, two = (cuda.run(rank_jobs.logprobs, packed(wide_models["qwen2"]), batch) for batch in (first, other))
    torch.testing.assert_close(one[~changed], two[~changed], atol=0, rtol=0)
    assert not torch.equal(one[changed], two[changed])


def test_the_device_is_the_one_that_is_asked_for(cuda: DeviceProcess, wide_models: dict[str, Path]) -> None:
    (sample,) = cuda.run(jobs.device_of_worker, packed(wide_models["qwen2"]))["info"][
        "parameter_sample"
    ].values()
    assert sample["device"].startswith(DEVICE)
