"""One worker alone on a CUDA device over NCCL: the same numbers as transformers, offload and back,
generation, resume.

Skipped where there is no CUDA device; ``MEGARL_GPU_TESTS_ON=cpu`` runs the bodies on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from tests.dist import reference
from tests.dist.batches import make_batch
from tests.gpu import jobs
from tests.gpu.conftest import DEVICE, ON_GPU, DeviceProcess, needs_device
from tests.models import policy_config

pytestmark = [needs_device, pytest.mark.gpu_worker]
FAMILIES = ["llama", "qwen2", "qwen3"]
BATCHES = [make_batch(rows=8, length=12, seed=seed) for seed in (1, 2, 3)]
MASTER_COPY_BYTES = 4
MOMENT_BYTES = 8


def test_a_worker_is_on_the_device(cuda: DeviceProcess, tiny_models: dict[str, Path]) -> None:
    answer = cuda.run(jobs.device_of_worker, policy_config(tiny_models["llama"]))
    assert answer["backend"] == ("nccl" if ON_GPU else "gloo")
    assert answer["identity"].startswith("GPU-") is ON_GPU
    (sample,) = answer["info"]["parameter_sample"].values()
    assert sample["device"] == ("cuda:0" if ON_GPU else DEVICE)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logprobs_equal_transformers(
    cuda: DeviceProcess, tiny_models: dict[str, Path], family: str
) -> None:
    batch = make_batch(rows=10, length=13, seed=3)
    expected = cuda.run(jobs.transformers_logprobs, tiny_models[family], torch.float32, batch)
    values = cuda.run(jobs.logprobs, policy_config(tiny_models[family]), batch)
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)
    assert values[:, 0].eq(0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_further_from_float32_than_transformers_is(
    cuda: DeviceProcess, tiny_models: dict[str, Path], family: str
) -> None:
    batch = make_batch(rows=10, length=13, seed=3)
    exact = reference.logprobs(reference.load(tiny_models[family]), batch)
    theirs = cuda.run(jobs.transformers_logprobs, tiny_models[family], torch.bfloat16, batch)
    ours = cuda.run(jobs.logprobs, policy_config(tiny_models[family], precision="bfloat16"), batch)
    error, their_error = (ours - exact).abs().mean(), (theirs - exact).abs().mean()
    assert 0 < error < 2 * their_error, f"mean error {error:.2e}, that of transformers {their_error:.2e}"


@pytest.mark.parametrize("distributed_optimizer", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_adam_steps_equal_transformers(
    cuda: DeviceProcess, tiny_models: dict[str, Path], family: str, distributed_optimizer: bool
) -> None:
    config = policy_config(tiny_models[family], clip=0.5, distributed_optimizer=distributed_optimizer)
    trainer = reference.ReferenceTrainer(reference.load(tiny_models[family]), config)
    expected = [trainer.step(batch, NLLLoss()) for batch in BATCHES]
    result = cuda.run(jobs.train, config, BATCHES)
    bound = 1e-4
    torch.testing.assert_close(result["measured"], expected, atol=1e-5, rtol=bound)
    weights = dict(trainer.model.state_dict())
    for name, tensor in result["weights"].items():
        assert (tensor - weights[name]).norm() < bound * weights[name].norm(), name


def test_bfloat16_training_follows_float32(cuda: DeviceProcess, tiny_models: dict[str, Path]) -> None:
    exact = cuda.run(jobs.train, policy_config(tiny_models["qwen3"]), BATCHES)["measured"]
    rounded = cuda.run(jobs.train, policy_config(tiny_models["qwen3"], precision="bfloat16"), BATCHES)[
        "measured"
    ]
    assert rounded != exact
    torch.testing.assert_close([loss for loss, _ in rounded], [loss for loss, _ in exact], atol=0, rtol=3e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_micro_batches_wait_for_nothing(
    cuda: DeviceProcess, tiny_models: dict[str, Path], family: str
) -> None:
    config = policy_config(tiny_models[family], batching="packed", precision="bfloat16")
    losses = cuda.run(jobs.packed_passes, config, BATCHES[0])
    exact = cuda.run(jobs.train, policy_config(tiny_models[family]), BATCHES[:1])["measured"]
    torch.testing.assert_close(losses[0], exact[0][0], atol=0, rtol=3e-2)
    assert losses[1] < losses[0]


def test_the_reference_policy_comes_and_goes_without_a_trace(
    cuda: DeviceProcess, tiny_models: dict[str, Path]
) -> None:
    seen = cuda.run(
        jobs.reference_policy, policy_config(tiny_models["qwen2"], precision="bfloat16"), BATCHES[0]
    )
    assert torch.equal(seen["reference"], seen["first"])
    assert torch.equal(seen["trained_again"], seen["trained"])
    assert not torch.equal(seen["trained"], seen["first"])


@pytest.mark.parametrize("straight", [False, True], ids=["by-way-of-inference", "straight"])
@pytest.mark.parametrize("distributed_optimizer", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_offload_frees_memory_and_changes_nothing(
    cuda: DeviceProcess,
    tiny_models: dict[str, Path],
    precision: str,
    distributed_optimizer: bool,
    straight: bool,
) -> None:
    config = policy_config(
        tiny_models["qwen3"], precision=precision, distributed_optimizer=distributed_optimizer
    )
    undisturbed = cuda.run(jobs.train, config, BATCHES)
    seen = cuda.run(jobs.offload, config, BATCHES, straight)
    check_unchanged(seen, undisturbed)
    if ON_GPU:
        check_memory(seen, precision)


def check_unchanged(seen: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    assert seen["changed"] == []
    assert seen.get("same_logprobs", True)
    # after the way back the optimizer has to update the weights that the model computes with, and not a copy
    # of them
    torch.testing.assert_close(seen["measured"], undisturbed["measured"], atol=1e-6, rtol=1e-5)
    for name, tensor in undisturbed["weights"].items():
        torch.testing.assert_close(
            seen["weights"][name], tensor, atol=1e-6, rtol=1e-2 if tensor.dtype is torch.bfloat16 else 1e-5
        )


def check_memory(seen: dict[str, Any], precision: str) -> None:
    """Freed bytes against those of parameters, gradients, moments and float32 copies; a tenth may stay for
    rounding and alignment."""
    parameters = seen["parameter_bytes"]
    elements = parameters // (4 if precision == "float32" else 2)
    optimizer = elements * (MOMENT_BYTES + (0 if precision == "float32" else MASTER_COPY_BYTES))
    assert seen["on_device_while_offloaded"] == []
    assert seen["in_training"] - seen["offloaded"] > 0.9 * (2 * parameters + optimizer)
    if "in_inference" in seen:
        assert seen["in_training"] - seen["in_inference"] > 0.9 * (parameters + optimizer)
        assert seen["in_inference"] - seen["offloaded"] > 0.9 * parameters
    # Not more than before: a part that comes back beside its old place would double it with every step.
    assert seen["back"] < seen["in_training"] + 0.5 * parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_transformers(
    cuda: DeviceProcess, tiny_models: dict[str, Path], family: str
) -> None:
    batch = {
        key: value
        for key, value in make_batch(rows=6, length=9, seed=5).items()
        if key in ("input_ids", "input_lengths")
    }
    free = cuda.run(jobs.transformers_greedy, tiny_models[family], batch, 8, None)
    stop = free[1][int(batch["input_lengths"][1]) + 3]
    expected = cuda.run(jobs.transformers_greedy, tiny_models[family], batch, 8, stop)
    output = cuda.run(
        jobs.greedy, policy_config(tiny_models[family], generation={"stop_token_ids": [stop]}), batch
    )
    lengths = output["unpadded_sequence_lengths"].tolist()
    assert [
        ids[:length].tolist() for ids, length in zip(output["output_ids"], lengths, strict=True)
    ] == expected
    assert expected != free
    answered = output["logprobs"] != 0
    assert answered.sum() == output["generation_lengths"].sum()
    torch.testing.assert_close(
        output["logprobs"][answered], output["recomputed"][answered], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    ("family", "precision"), [("qwen3", "float32"), ("qwen3_moe", "float32"), ("qwen3_moe", "bfloat16")]
)
def test_cuda_graphs_change_no_answer(
    cuda: DeviceProcess,
    wide_models: dict[str, Path],
    family: str,
    precision: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Sampled answers of several batches; graphs are recorded anew after the weights have changed and moved.
    The products of experts are grouped in bfloat16."""
    batch = {
        key: value
        for key, value in make_batch(rows=40, length=9, seed=5).items()
        if key in ("input_ids", "input_lengths")
    }
    batch["sampling_seeds"] = torch.arange(40) + 3
    generation = {"stop_token_ids": [2], "max_new_tokens": 300 if family == "qwen3" else 40}
    config = policy_config(wide_models[family], precision=precision, generation=generation, max_length=320)
    config["generation_batch_size"] = 16
    seen = cuda.run(jobs.with_and_without_graphs, config, batch, BATCHES[0])
    for recorded, plain in zip(seen[::2], seen[1::2], strict=True):
        assert torch.equal(recorded["output_ids"], plain["output_ids"])
        torch.testing.assert_close(recorded["logprobs"], plain["logprobs"], atol=1e-4, rtol=0)
        assert recorded["recorded"] is ON_GPU and not plain["recorded"]
        with capsys.disabled():
            print(
                f"\nms a token: {recorded['ms a token']:.2f} with CUDA graphs, {plain['ms a token']:.2f} "
                "without"
            )
        if ON_GPU:
            assert recorded["ms a token"] < plain["ms a token"]
    assert not torch.equal(seen[0]["logprobs"], seen[2]["logprobs"])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_worker_is_the_saved_one(
    cuda: DeviceProcess, tiny_models: dict[str, Path], tmp_path: Path, precision: str
) -> None:
    config = policy_config(tiny_models["qwen2"], precision=precision)
    saved = cuda.run(jobs.save, config, BATCHES, 1, tmp_path)
    resumed = cuda.run(jobs.resume, config, BATCHES[1:], tmp_path)
    assert jobs.differing(saved["state"], resumed["state"]) == []
    # the first loss comes from a forward pass alone; backward passes may add in another order every time
    assert resumed["measured"][0][0] == saved["measured"][0][0]
    torch.testing.assert_close(
        resumed["measured"], saved["measured"], atol=1e-6, rtol=1e-4 if precision == "float32" else 2e-2
    )
