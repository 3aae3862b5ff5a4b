"""What the device process runs: a real worker alone on one device, and plain transformers beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker
from megarl.patched import patched
from tests.dist import reference
from tests.dist.jobs import build, dealt, full_weights

Batch = Mapping[str, torch.Tensor]


def start(device: str) -> None:
    """Make this process the only rank of a world on ``device`` (``cuda``; ``cpu`` to try the jobs themselves)."""
    os.environ.update({"MEGARL_DEVICE": device, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TOKENIZERS_PARALLELISM": "false"})
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)


def device_of_worker(config: Mapping[str, Any]) -> dict[str, Any]:
    """Where a worker's weights are, by which backend it talks, and whether Transformer Engine made its layers."""
    from megarl.models.megatron.specs import transformer_engine_available

    worker = build(config, init_optimizer=False, init_reference_model=False)
    answer = {"info": worker.get_gpu_info(), "identity": worker.report_device_id(), "backend": dist.get_backend()}
    worker.backend.close()
    return {**answer, "transformer_engine": transformer_engine_available()}


def logprobs(config: Mapping[str, Any], batch: Batch) -> torch.Tensor:
    """Log-probabilities of the worker."""
    worker = build(config, init_optimizer=False, init_reference_model=False)
    values = worker.get_logprobs(data=BatchedDataDict(batch))["logprobs"]
    worker.backend.close()
    return values


def transformers_logprobs(model: Path, dtype: torch.dtype, batch: Batch) -> torch.Tensor:
    """Log-probabilities of transformers on the same device."""
    device = torch.device(os.environ["MEGARL_DEVICE"])
    with device:
        there = {key: value.to(device) for key, value in batch.items()}
        return reference.logprobs(reference.load(model, dtype).to(device), there).cpu()


def transformers_greedy(model: Path, batch: Batch, new_tokens: int, stop: int | None) -> list[list[int]]:
    """Prompt and answer of each row by transformers on the same device, one row at a time."""
    device = torch.device(os.environ["MEGARL_DEVICE"])
    loaded = reference.load(model).to(device)
    rows = []
    for ids, length in zip(batch["input_ids"], batch["input_lengths"].tolist(), strict=True):
        prompt = ids[None, :length].to(device)
        output = loaded.generate(prompt, max_new_tokens=new_tokens, do_sample=False, eos_token_id=stop, pad_token_id=0)
        rows.append(output[0].tolist())
    return rows


def greedy(config: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
    """What the worker generates, and the log-probabilities that get_logprobs gives the same tokens."""
    worker = build(config, init_optimizer=False, init_reference_model=False)
    output = worker.generate(data=BatchedDataDict(batch), greedy=True)
    again = {"input_ids": output["output_ids"], "input_lengths": output["unpadded_sequence_lengths"]}
    recomputed = worker.get_logprobs(data=BatchedDataDict(again))["logprobs"]
    worker.backend.close()
    return {**dict(output), "recomputed": recomputed}


def train(config: Mapping[str, Any], batches: list[Batch]) -> dict[str, Any]:
    """Losses, gradient norms and weights after a step on each batch."""
    worker = build(config, init_reference_model=False)
    measured = _steps(worker, batches)
    weights = full_weights(worker)
    worker.backend.close()
    return {"measured": measured, "weights": weights}


def reference_policy(config: Mapping[str, Any], batch: Batch) -> dict[str, torch.Tensor]:
    """Log-probabilities of present and reference policy before and after a step; the present ones also after a look at the reference."""
    worker = build(config)
    data = BatchedDataDict(batch)
    seen = {"first": worker.get_logprobs(data=data)["logprobs"]}
    _steps(worker, [batch])
    seen["trained"] = worker.get_logprobs(data=data)["logprobs"]
    seen["reference"] = worker.get_reference_policy_logprobs(data=data)["reference_logprobs"]
    seen["trained_again"] = worker.get_logprobs(data=data)["logprobs"]
    worker.backend.close()
    return seen


def offload(config: Mapping[str, Any], batches: list[Batch], straight: bool) -> dict[str, Any]:
    """One step, everything to the host and back, the remaining steps.

    Args:
        config: of the policy.
        batches: the first is trained on before, the others after.
        straight: go to the host in one move and not by way of inference.
    """
    worker = build(config, init_reference_model=False)
    steps = _steps(worker, batches[:1])
    data = BatchedDataDict(batches[0])
    logprobs_before = worker.get_logprobs(data=data)["logprobs"]
    before = state_of(worker)
    seen: dict[str, Any] = {"parameter_bytes": _bytes(worker), "in_training": _allocated(worker)}
    if not straight:
        worker.offload_before_refit()
        seen["in_inference"] = _allocated(worker)
        seen["same_logprobs"] = torch.equal(worker.get_logprobs(data=data)["logprobs"], logprobs_before)
    worker.offload_after_refit()
    seen["offloaded"] = _allocated(worker)
    seen["on_device_while_offloaded"] = [name for name, parameter in worker.backend.parameters() if _occupies_device(parameter)]
    worker.prepare_for_training()
    seen["back"] = _allocated(worker)
    seen["changed"] = differing(before, state_of(worker))
    steps += _steps(worker, batches[1:])
    weights = full_weights(worker)
    worker.backend.close()
    return {**seen, "measured": steps, "weights": weights}


def save(config: Mapping[str, Any], batches: list[Batch], saved_after: int, directory: Path) -> dict[str, Any]:
    """Steps on all batches with a checkpoint after ``saved_after``; the state at that moment and the steps that follow."""
    worker = build(config, init_reference_model=False)
    _steps(worker, batches[:saved_after])
    worker.save_checkpoint(str(directory / "weights"), str(directory / "optimizer"))
    state = state_of(worker)
    measured = _steps(worker, batches[saved_after:])
    worker.backend.close()
    return {"state": state, "measured": measured}


def resume(config: Mapping[str, Any], batches: list[Batch], directory: Path) -> dict[str, Any]:
    """A new worker from the checkpoint: its state, and steps on ``batches``."""
    paths = {"weights_path": str(directory / "weights"), "optimizer_path": str(directory / "optimizer")}
    worker = build(config, init_reference_model=False, **paths)
    state = state_of(worker)
    measured = _steps(worker, batches)
    worker.backend.close()
    return {"state": state, "measured": measured}


def state_of(worker: MegatronPolicyWorker) -> dict[str, torch.Tensor]:
    """Copies in host memory of all weights, and of what the optimizer updates with its moments."""
    tensors = {name: parameter.detach().to("cpu", copy=True) for name, parameter in worker.backend.parameters()}
    optimizer = worker.backend.optimizer
    assert optimizer is not None
    for number, inner in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        parameters = [parameter for group in inner.optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            held = {"main": parameter, **inner.optimizer.state[parameter]}
            for key, value in held.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer {number}.{index}.{key}"] = value.detach().to("cpu", copy=True)
    return tensors


def differing(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that are not the same to the bit in both."""
    return sorted(
        name
        for name in before.keys() | after.keys()
        if name not in before or name not in after or not torch.equal(before[name], after[name])
    )


def _steps(worker: MegatronPolicyWorker, batches: list[Batch]) -> list[tuple[float, float]]:
    results = [worker.train(data=BatchedDataDict(batch), loss_fn=NLLLoss()) for batch in batches]
    return [(float(result["global_loss"]), float(result["grad_norm"])) for result in results]


def _bytes(worker: MegatronPolicyWorker) -> int:
    return sum(parameter.numel() * parameter.element_size() for _, parameter in worker.backend.parameters())


def _allocated(worker: MegatronPolicyWorker) -> int:
    worker.runtime.synchronize()
    return torch.cuda.memory_allocated() if worker.runtime.is_cuda else 0


def _occupies_device(parameter: torch.Tensor) -> bool:
    return parameter.is_cuda and parameter.untyped_storage().size() > 0


def packed_passes(config: Mapping[str, Any], batch: Batch) -> list[float]:
    """Losses of two steps on a packed batch; in the second one, and in log-probabilities after it, no pass may wait."""
    worker = build(config, init_reference_model=False)
    forward_backward = worker.backend.forward_backward

    def watched(*arguments: Any, **options: Any) -> Any:
        # torch raises where it makes the host wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            return forward_backward(*arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    share = dealt(worker, batch, "train").shards[0]
    losses = [float(worker.train(data=share, loss_fn=NLLLoss())["global_loss"])]
    with patched((worker.backend, "forward_backward", watched)):
        losses.append(float(worker.train(data=share, loss_fn=NLLLoss())["global_loss"]))
        asked = {key: batch[key] for key in ("input_ids", "input_lengths")}
        worker.get_logprobs(data=dealt(worker, asked, "logprob").shards[0])
    worker.backend.close()
    return losses
