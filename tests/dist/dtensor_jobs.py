"""Configurations for DTensor, and what the pool's processes run for it alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from converters.checkpoint.source import HuggingFaceSource
from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.dtensor.shards import block_of, gather
from megarl.models.policy.dtensor_policy_worker import get_cpu_state_dict, unshard_fsdp2_model
from tests.dist import fsdp1_jobs, jobs
from tests.dist.jobs import gathers_in_their_rows, new_memory_is_undefined
from tests.dist.worker_jobs import differences


def dtensor_config(model: Path | str, batching: str = "fixed", **changes: Any) -> dict[str, Any]:
    """``policy_config`` for DTensor: the same optimizer, and the same warm-up as a schedule of torch.

    Args:
        model: Hugging Face directory.
        batching: fixed, dynamic or packed.
        changes: ``tp``, ``cp``, ``comm``, ``sp``, ``recompute``, ``offload``, ``plan``, and those of
            ``fsdp1_config``.
    """
    take = changes.pop
    settings = {
        "enabled": True,
        "tensor_parallel_size": take("tp", 1),
        "context_parallel_size": take("cp", 1),
        "context_parallel_comm_type": take("comm", None),
        "sequence_parallel": take("sp", False),
        "activation_checkpointing": take("recompute", False),
        "cpu_offload": take("offload", False),
        "custom_parallel_plan": take("plan", None),
    }
    return {**fsdp1_jobs.fsdp1_config(model, batching, **changes), "dtensor_cfg": settings}


def generates_with_what_it_trains(
    config: Mapping[str, Any], prompts: Mapping[str, Any], batches: list[Mapping[str, Any]]
) -> list[str]:
    """What differs, in the model that generates, from the trained one: its parameters in the precision, its
    buffers to the bit; after generating and training in turn. Also what of it still takes memory
    afterwards."""
    worker = jobs.build(config, init_reference_model=False)
    backend, dtype = worker.backend, getattr(torch, config["precision"])
    for batch in batches:
        worker.generate(data=BatchedDataDict(prompts), greedy=True)
        worker.train(data=jobs.my_share(worker, batch), loss_fn=NLLLoss())
    wrong = []
    with torch.no_grad(), backend._gathered() as model:
        for name, buffer in model.named_buffers():
            trained = backend.model.get_buffer(name)
            if buffer.dtype != trained.dtype or not torch.equal(buffer, trained):
                wrong.append(name)
        for name, parameter in model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if not torch.equal(whole, gather(backend._parameters[name], backend.runtime.device).to(dtype)):
                wrong.append(name)
        kept = model
    wrong += [
        f"{name} keeps its memory" for name, parameter in kept.named_parameters() if not parameter.is_meta
    ]
    wrong += [f"{name} is lost" for name, buffer in kept.named_buffers() if buffer.is_meta]
    backend.close()
    return wrong


def replicas_agree(config: Mapping[str, Any], batches: list[Mapping[str, Any]]) -> list[str]:
    """After training, the names of pieces that are not the same to the bit on all ranks that hold the same
    piece."""
    worker = jobs.build(config, init_reference_model=False)
    for batch in batches:
        worker.train(data=jobs.my_share(worker, batch), loss_fn=NLLLoss())
    mine = {
        name: (
            tuple((place.start, place.stop) for place in block_of(parameter).slices),
            parameter.to_local().clone(),
        )
        for name, parameter in worker.return_state_dict().items()
        if isinstance(parameter, DTensor)
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    differing = []
    for name in mine:
        pieces: dict[Any, Tensor] = {}
        for pieces_of_rank in everyone:
            place, piece = pieces_of_rank[name]
            if not torch.equal(pieces.setdefault(place, piece), piece):
                differing.append(name)
        covered = sum(piece.numel() for piece in pieces.values())
        if covered != worker.return_state_dict()[name].numel():
            differing.append(f"{name} has {covered} elements")
    worker.backend.close()
    return differing


class FailingLoss(NLLLoss):
    """Raises at its second micro-batch."""

    calls = 0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise ZeroDivisionError
        return super().__call__(*arguments, **keywords)


def train_after_an_error(config: Mapping[str, Any], batch: Mapping[str, Any]) -> list[str]:
    """What differs between a worker whose first pass was broken off and one that knows nothing of it."""
    outcomes = []
    for broken in (True, False):
        worker = jobs.build(config, init_reference_model=False)
        share = jobs.my_share(worker, batch)
        failing = functools.partial(worker.train, data=share, loss_fn=FailingLoss())
        if broken and not jobs.said(failing).startswith("ZeroDivisionError"):
            return ["no error"]
        worker.train(data=share, loss_fn=NLLLoss())
        outcomes.append(jobs.full_weights(worker))
    return differences(*outcomes)


def own_loop(config: Mapping[str, Any], batch: Mapping[str, Tensor], rotate: str | None) -> dict[str, Any]:
    """Logits of a caller's own loop inside the contract's static contexts, in order, and whether the buffers
    came back."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    mesh = worker.backend._meshes.context
    ids = batch["input_ids"].clone()
    positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    throwaway = positions.clone()
    context = worker.create_context_parallel_ctx(
        mesh, [ids, positions, throwaway], [1, 1, 1], {throwaway}, rotate
    )
    with worker.train_context(context), torch.no_grad():
        logits = worker.backend.model(input_ids=ids, position_ids=positions, use_cache=False).logits.clone()
        place = positions[0].clone()
    whole = torch.empty(ids.shape[0], ids.shape[1], logits.shape[-1])
    parts: list[Any] = [None] * mesh.size()
    dist.all_gather_object(parts, (place, logits), group=mesh.get_group())
    for place, part in parts:
        whole[:, place] = part
    wrong: list[tuple[Any, ...]] = [
        (mesh, [ids], [1, 1], set(), None),
        (mesh, [ids[:, :3].clone()], [1], set(), None),
        (mesh, [ids], [1], set(), "addtoall"),
    ]
    errors = [
        jobs.said(lambda arguments=arguments: worker.create_context_parallel_ctx(*arguments).__enter__())
        for arguments in wrong
    ]  # type: ignore[misc]
    restored = (
        torch.equal(ids, batch["input_ids"])
        and positions.shape == ids.shape
        and throwaway.shape[1] == ids.shape[1] // mesh.size()
    )
    return {"logits": whole, "restored": restored, "errors": errors}


def names_of_the_contract(config: Mapping[str, Any]) -> dict[str, Any]:
    """Answers and errors of what DTensor adds to the common worker."""
    worker = jobs.build(config)
    model = worker.backend.model
    before = jobs.full_weights(worker)
    with unshard_fsdp2_model(model):
        gathered = {
            name: tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if type(parameter) is torch.nn.Parameter
        }
    copies = get_cpu_state_dict(worker.return_state_dict().items())
    answers: dict[str, Any] = {
        "repr": repr(worker),
        "info": worker.get_gpu_info(),
        "gathered": gathered,
        "divided again": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "pieces": {name: tuple(tensor.shape) for name, tensor in copies.items()},
        "own memory": all(
            copies[name].numel() == 0 or copies[name].data_ptr() != tensor.to_local().data_ptr()
            for name, tensor in worker.return_state_dict().items()
            if isinstance(tensor, DTensor)
        ),
    }
    moves = [
        worker.move_to_cpu,
        worker.move_to_cuda,
        lambda model: worker.move_buffer_to_device(model, "cpu"),
    ]
    answers["same model"] = all(
        move(model) is model for move in [*moves, lambda model: worker.move_to_device(model, "cpu")]
    )
    other = torch.nn.BatchNorm1d(3)
    answers["other model"] = all(move(other) is other for move in moves) and other.running_mean is not None
    answers["weights stay"] = differences(before, jobs.full_weights(worker)) == []
    worker._add_noise_to_weights()
    after = jobs.full_weights(worker)
    answers["noise"] = {name: float((after[name] - before[name]).std()) for name in before}
    worker.shutdown()
    return answers


def bytes_read(config: Mapping[str, Any]) -> tuple[int, int]:
    """Elements that this rank read from the checkpoint, and elements of the model."""
    read: list[int] = []
    original = HuggingFaceSource.read

    def counting(self: HuggingFaceSource, name: str, slices: Any = None) -> Tensor:
        tensor = original(self, name, slices)
        read.append(tensor.numel())
        return tensor

    HuggingFaceSource.read = counting
    try:
        worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    finally:
        HuggingFaceSource.read = original
    return sum(read), sum(tensor.numel() for _, tensor in worker.backend.export_hf())


def export_in_buckets(config: Mapping[str, Any], nbytes: int) -> dict[str, Any]:
    """The export twice, in buckets of ``nbytes``, against each parameter gathered by itself; and what the
    second one gathered."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    with (
        mock.patch.object(worker.backend._weights, "_bucket_bytes", nbytes),
        gathers_in_their_rows() as gathers,
        new_memory_is_undefined(),
    ):
        first = [(name, tensor.clone()) for name, tensor in worker.backend.export_hf()]
        for _, parameter in worker.backend.parameters():
            parameter.data.mul_(-0.5)
        gathers.clear()
        second = list(worker.backend.export_hf())
    divided, rows, dtype = worker.backend._divided(), worker.backend._rows, worker.backend._dtype
    wrong = [
        name
        for name, tensor in second
        if not torch.equal(tensor, gather(divided[name], tensor.device, rows[name]).to(dtype))
    ]
    wrong += [
        name
        for (name, tensor), (_, later) in zip(first, second, strict=True)
        if not torch.equal(tensor * -0.5, later)
    ]
    assert all(tensor.is_contiguous() for _, tensor in second)
    left = sorted(divided.keys() - dict(second).keys())
    return {
        "wrong": wrong,
        "left": left,
        "gathers": gathers,
        "parameters": len(second),
        "elements": sum(t.numel() for _, t in second),
    }
