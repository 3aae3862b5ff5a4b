"""What the device process runs: a real worker alone on one device, and plain transformers beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.checkpoint.background import free_memory, move_files, take_memory
from megarl.checkpoint.staged_file import open_staged
from megarl.distributed.allocator import fast_pinning
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import FULL_FLOAT32, runtime
from megarl.models.engine.graphs import Graphs
from megarl.models.megatron import generation
from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker
from megarl.patched import patched
from megarl.weight_sync.broadcast import WeightListener
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.session import WeightReceiver, payload_for
from megarl.weight_sync.transfer_group import TransferGroup
from tests.dist import reference
from tests.dist.jobs import build, dealt, full_weights, my_share

Batch = Mapping[str, Tensor]


def start(device: str, local_rank: int = 0, rank: int = 0, world_size: int = 1, port: int = 0) -> None:
    """Make this process a rank on ``device`` (``cuda``; ``cpu`` to try the jobs themselves).

    Args:
        device: kind of device.
        local_rank: which one; of fewer devices than ranks, several ranks have the same.
        rank, world_size, port: of the group that it is in; one rank needs no port.
    """
    variables = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world_size)}
    os.environ.update(
        {
            "MEGARL_DEVICE": device,
            "TOKENIZERS_PARALLELISM": "false",
            **FULL_FLOAT32,
            **fast_pinning(),
            **variables,
        }
    )
    if device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    store: dist.Store = (
        dist.HashStore()
        if world_size == 1
        else dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    )
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=world_size
    )


def device_of_worker(config: Mapping[str, Any]) -> dict[str, Any]:
    """Where a worker's weights are, by which backend it talks, and whether Transformer Engine made its
    layers."""
    from megarl.models.megatron.transformer_engine import try_it

    worker = build(config, init_optimizer=False, init_reference_model=False)
    answer = {
        "info": worker.get_gpu_info(),
        "identity": worker.report_device_id(),
        "backend": dist.get_backend(),
    }
    worker.backend.close()
    return {**answer, "transformer_engine": try_it().reason is None}


def logprobs(config: Mapping[str, Any], batch: Batch) -> Tensor:
    """Log-probabilities of the worker."""
    worker = build(config, init_optimizer=False, init_reference_model=False)
    values = worker.get_logprobs(data=BatchedDataDict(batch))["logprobs"]
    worker.backend.close()
    return values


def transformers_logprobs(model: Path, dtype: torch.dtype, batch: Batch) -> Tensor:
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
        output = loaded.generate(
            prompt, max_new_tokens=new_tokens, do_sample=False, eos_token_id=stop, pad_token_id=0
        )
        rows.append(output[0].tolist())
    return rows


def greedy(config: Mapping[str, Any], batch: Batch, backend: str = "megatron") -> dict[str, Any]:
    """What the worker generates, and the log-probabilities that get_logprobs gives the same tokens."""
    worker = build(config, init_optimizer=False, init_reference_model=False)
    output = worker.generate(data=BatchedDataDict(batch), greedy=True)
    again = {"input_ids": output["output_ids"], "input_lengths": output["unpadded_sequence_lengths"]}
    recomputed = worker.get_logprobs(data=BatchedDataDict(again))["logprobs"]
    worker.backend.close()
    return {**dict(output), "recomputed": recomputed}


def with_and_without_graphs(config: Mapping[str, Any], batch: Batch, trained: Batch) -> list[dict[str, Any]]:
    """What the worker samples by CUDA graphs and without, before and after a step of training and a way to
    the host and back: tokens, log-probabilities, milliseconds a step, and whether graphs were recorded until
    the end."""
    worker = build(config, init_reference_model=False)
    seen = []
    for _ in range(2):
        for wanted in (True, False):
            with generating(graphs=wanted) as made, worker.backend.runtime.timed() as watch:
                output = worker.generate(data=BatchedDataDict(batch), greedy=False)
            milliseconds = watch.seconds * 1000 / int(output["generation_lengths"].max())
            seen.append(
                {**dict(output), "ms a token": milliseconds, "recorded": made[-1].capture is not None}
            )
        _steps(worker, [trained])
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.prepare_for_training()
    worker.backend.close()
    return seen


@contextlib.contextmanager
def generating(*, graphs: bool) -> Iterator[list[Graphs]]:
    """Inside, Megatron decodes with graphs, as it does by itself, or without; gives the graphs of each
    call."""
    made: list[Graphs] = []
    by_itself = generation.graphs_on

    def graphs_on(*arguments: Any) -> Graphs:
        made.append(by_itself(*arguments) if graphs else Graphs())
        return made[-1]

    with patched((generation, "graphs_on", graphs_on)):
        yield made


def train(config: Mapping[str, Any], batches: list[Batch]) -> dict[str, Any]:
    """Losses, gradient norms and weights after a step on each batch."""
    worker = build(config, init_reference_model=False)
    measured = _steps(worker, batches)
    weights = full_weights(worker)
    worker.backend.close()
    return {"measured": measured, "weights": weights}


def reference_policy(config: Mapping[str, Any], batch: Batch) -> dict[str, Tensor]:
    """Log-probabilities of present and reference policy before and after a step; the present ones also after
    a look at the reference."""
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
    seen["on_device_while_offloaded"] = [
        name for name, parameter in worker.backend.parameters() if _occupies_device(parameter)
    ]
    worker.prepare_for_training()
    seen["back"] = _allocated(worker)
    seen["changed"] = differing(before, state_of(worker))
    steps += _steps(worker, batches[1:])
    weights = full_weights(worker)
    worker.backend.close()
    return {**seen, "measured": steps, "weights": weights}


def train_on(config: Mapping[str, Any], batches: list[Batch], moves: bool = False) -> dict[str, Any]:
    """Losses, gradient norms and exported weights of a worker of DTensor or FSDP1 after a step on each batch.

    Args:
        config: of the policy.
        batches: to train on.
        moves: everything goes to the host and comes back between the steps.
    """
    worker = build(config, init_reference_model=False)
    measured: list[tuple[float, float]] = []
    seen: dict[str, list[int]] = {"in_training": [], "offloaded": []}
    for batch in batches:
        result = worker.train(data=my_share(worker, batch), loss_fn=NLLLoss())
        measured.append((float(result["global_loss"]), float(result["grad_norm"])))
        if moves:
            seen["in_training"].append(_allocated(worker))
            worker.offload_after_refit()
            seen["offloaded"].append(_allocated(worker))
            worker.prepare_for_training()
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in worker.backend.export_hf()}
    worker.backend.close()
    return {"measured": measured, "weights": weights, **seen}


def save(
    config: Mapping[str, Any], batches: list[Batch], saved_after: int, directory: Path
) -> dict[str, Any]:
    """Steps on all batches with a checkpoint after ``saved_after``; the state at that moment and the steps
    that follow."""
    worker = build(config, init_reference_model=False)
    _steps(worker, batches[:saved_after])
    worker.save_checkpoint(str(directory / "weights"), str(directory / "optimizer"))
    state = state_of(worker)
    measured = _steps(worker, batches[saved_after:])
    worker.backend.close()
    return {"state": state, "measured": measured}


def save_staged(config: Mapping[str, Any], batches: list[Batch], directory: Path) -> None:
    """Save after each step to memory, from where it is brought to ``staged``, and after the last one at once
    as ``written``."""
    worker = build(config, init_reference_model=False)
    for batch in batches:
        worker.train(data=my_share(worker, batch), loss_fn=NLLLoss())
        memory = take_memory(directory, 1)
        assert memory is not None
        worker.save_checkpoint(str(memory / "weights"), str(memory / "optimizer"))
        (directory / "staged").mkdir(exist_ok=True)
        move_files(memory, directory / "staged", open_staged(memory))
        free_memory(directory)
    worker.save_checkpoint(*(str(directory / "written" / part) for part in ("weights", "optimizer")))
    worker.backend.close()


def resume(config: Mapping[str, Any], batches: list[Batch], directory: Path) -> dict[str, Any]:
    """A new worker from the checkpoint: its state, and steps on ``batches``."""
    paths = {"weights_path": str(directory / "weights"), "optimizer_path": str(directory / "optimizer")}
    worker = build(config, init_reference_model=False, **paths)
    state = state_of(worker)
    measured = _steps(worker, batches)
    worker.backend.close()
    return {"state": state, "measured": measured}


def state_of(worker: MegatronPolicyWorker) -> dict[str, Tensor]:
    """Copies in host memory of all weights, and of what the optimizer updates with its moments."""
    tensors = {
        name: parameter.detach().to("cpu", copy=True) for name, parameter in worker.backend.parameters()
    }
    optimizer = worker.backend.optimizer
    assert optimizer is not None
    for number, inner in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        parameters = [parameter for group in inner.optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            held = {"main": parameter, **inner.optimizer.state[parameter]}
            for key, value in held.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer {number}.{index}.{key}"] = value.detach().to("cpu", copy=True)
    return tensors


def differing(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
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


def _occupies_device(parameter: Tensor) -> bool:
    return parameter.is_cuda and parameter.untyped_storage().size() > 0


def packed_passes(config: Mapping[str, Any], batch: Batch) -> list[float]:
    """Losses of two steps on a packed batch; in the second one, and in log-probabilities after it, no pass
    may wait."""
    worker = build(config, init_reference_model=False)
    forward_backward = worker.backend.forward_backward
    # without a device nothing can wait for one
    watch = torch.cuda.set_sync_debug_mode if torch.cuda.is_available() else lambda mode: None

    def watched(*arguments: Any, **options: Any) -> Any:
        # torch raises where it makes the host wait
        watch("error")
        try:
            return forward_backward(*arguments, **options)
        finally:
            watch("default")

    share = dealt(worker, batch, "train").shards[0]
    losses = [float(worker.train(data=share, loss_fn=NLLLoss())["global_loss"])]
    with patched((worker.backend, "forward_backward", watched)):
        losses.append(float(worker.train(data=share, loss_fn=NLLLoss())["global_loss"]))
        asked = {key: batch[key] for key in ("input_ids", "input_lengths")}
        worker.get_logprobs(data=dealt(worker, asked, "logprob").shards[0])
    worker.backend.close()
    return losses


_kept: dict[str, Any] = {}
"""What a process keeps from one job to the next: its worker, and what it receives weights with."""


def begin_refits(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keep a worker; what an engine has to know of its weights."""
    _kept["worker"] = build(config, init_reference_model=False)
    return dict(_kept["worker"].prepare_refit_info())


def open_refit() -> list[list[str]]:
    """Begin a refit of the kept worker; the groups in which its weights go."""
    manifest = Manifest.from_description(_kept["worker"].prepare_refit_info())
    _, budget = _kept["worker"].prepare_weights_for_ipc()
    return [group.names for group in manifest.groups(int(budget))]


def send_group(keys: list[str]) -> dict[str, Any]:
    """Lay a group into the buffer; the handles of it."""
    return dict(_kept["worker"].get_weights_ipc_handles(keys))


def kept_step(batch: Batch) -> dict[str, Tensor]:
    """A training step of the kept worker, and its weights afterwards."""
    _steps(_kept["worker"], [batch])
    return full_weights(_kept["worker"])


def kept_weights() -> dict[str, Tensor]:
    """Its weights."""
    return full_weights(_kept["worker"])


def kept_call(method: str, *arguments: Any) -> Any:
    """What a method of the kept worker returns."""
    return getattr(_kept["worker"], method)(*arguments)


def kept_logprobs(batch: Batch) -> Tensor:
    """Log-probabilities of the kept worker."""
    _kept["worker"].prepare_for_lp_inference()
    return _kept["worker"].get_logprobs(data=BatchedDataDict(batch))["logprobs"]


def free_bytes() -> int:
    """Bytes that nobody has of the device; 0 on a CPU."""
    runtime().empty_cache()
    return torch.cuda.mem_get_info()[0] if runtime().is_cuda else 0


def end_refits() -> None:
    """Let go of the worker, or of the receiver, that this process keeps."""
    if "worker" in _kept:
        _kept.pop("worker").backend.close()
    if "receiver" in _kept:
        _kept.pop("receiver").close()


def begin_receiving(description: Mapping[str, Any]) -> str:
    """Keep a receiver, as an engine on this device has it; the identity of the device."""
    _kept["receiver"] = WeightReceiver(Manifest.from_description(description), runtime().device)
    return runtime().identity()


def receive_group(handles: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a group, copied on the device and then to the host."""
    with _kept["receiver"].group(payload_for(handles, runtime().identity())) as weights:
        copies = {name: tensor.clone() for name, tensor in weights}
    return {name: tensor.cpu() for name, tensor in copies.items()}


def received_version() -> int | None:
    """Version of the weights that are whole."""
    version = _kept["receiver"].version
    return None if version is None else int(version)


def join_transfer(port: int, description: Mapping[str, Any]) -> None:
    """Keep an engine's end of a transfer group, which waits for the policy's."""
    manifest = Manifest.from_description(description)
    group = TransferGroup("127.0.0.1", port, 2, 1, digest=manifest.digest, device=runtime().device)
    _kept["receiver"] = WeightListener(group, manifest)


def lead_transfer(port: int) -> None:
    """The policy's end of it."""
    _kept["worker"].init_collective("127.0.0.1", port, 2)


def broadcast() -> None:
    """Send the kept worker's weights over the transfer group."""
    _kept["worker"].broadcast_weights_for_collective()


def listen() -> dict[str, Tensor]:
    """Receive them."""
    received: dict[str, Tensor] = {}
    _kept["receiver"].receive(
        lambda weights: received.update({name: tensor.clone() for name, tensor in weights})
    )
    return {name: tensor.cpu() for name, tensor in received.items()}


def offload_times(config: Mapping[str, Any], batch: Batch, repeats: int) -> list[dict[str, float]]:
    """Seconds of everything to the host and back, for each repeat, and the bytes that left the device (on a
    CPU, those that there are)."""
    worker = build(config, init_reference_model=False)
    _steps(worker, [batch])
    found = []
    for _ in range(repeats):
        before = _allocated(worker)
        with worker.runtime.timed() as out:
            worker.offload_after_refit()
        moved = before - _allocated(worker)
        with worker.runtime.timed() as back:
            worker.prepare_for_training()
        found.append({"out": out.seconds, "back": back.seconds, "bytes": float(moved)})
    worker.backend.close()
    return found


def layers_of(config: Mapping[str, Any]) -> set[str]:
    """Names of the classes of a worker's modules."""
    worker = build(config, init_optimizer=False, init_reference_model=False)
    names = {type(module).__name__ for chunk in worker.backend.chunks for module in chunk.modules()}
    worker.backend.close()
    return names


def sum_over_ranks(numbers: int) -> float:
    """Seconds of an all-reduce of float32 [numbers], and a ValueError for a wrong sum."""
    here = runtime()
    summed = torch.full((numbers,), float(dist.get_rank() + 1), device=here.device)
    dist.all_reduce(summed)
    if not bool((summed == dist.get_world_size() * (dist.get_world_size() + 1) / 2).all()):
        raise ValueError(f"rank {dist.get_rank()}: wrong sum")
    with here.timed() as watch:
        dist.all_reduce(summed)
    return watch.seconds
