"""``DTensorPolicyWorker``, one rank of a policy on DTensor and FSDP2. It is a plain class: Ray wraps it in an
actor, and torchrun uses it directly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megarl.config.policy import PolicyConfig
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import DeviceRuntime, runtime
from megarl.errors import ConfigError
from megarl.models.dtensor.backend import DTensorBackend
from megarl.models.dtensor.mesh import ROTATE_METHODS, context_parallel
from megarl.models.dtensor.parallelize import reshard, sharded_modules
from megarl.models.engine.model_weights import open_weights
from megarl.models.engine.worker import EngineWorker
from megarl.models.generation.interfaces import Sampling
from megarl.models.huggingface.mover import move_buffers, move_model


@contextlib.contextmanager
def unshard_fsdp2_model(model: torch.nn.Module) -> Iterator[None]:
    """All-gather the parameters of every module that ``fully_shard`` has sharded, and reshard them on exit.
    Collective."""
    try:
        for module in sharded_modules(model):
            module.unshard()
        yield
    finally:
        reshard(model)


def get_cpu_state_dict(
    state_generator: Iterable[tuple[str, torch.Tensor]], pin_memory: bool = False
) -> dict[str, torch.Tensor]:
    """Copy tensors to host memory. Of a DTensor, only this rank's shard is copied.

    Args:
        state_generator: (name, tensor) pairs.
        pin_memory: copy into page-locked memory, asynchronously; the copies are complete on return.
    """
    copies = {}
    for name, tensor in state_generator:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        copies[name] = torch.empty_like(local, device="cpu", pin_memory=pin_memory)
        copies[name].copy_(local, non_blocking=pin_memory)
    # Copies into page-locked memory are asynchronous. One synchronization for all of them lets them overlap.
    runtime().synchronize()
    return copies


class DTensorPolicyWorker(EngineWorker):
    """One rank of a policy on DTensor and FSDP2."""

    backend: DTensorBackend

    @staticmethod
    def make_backend(
        config: PolicyConfig, runtime: DeviceRuntime, seed: int, with_optimizer: bool
    ) -> DTensorBackend:
        """Build the DTensor backend; see ``EngineWorker.make_backend``."""
        return DTensorBackend(config, open_weights(config), runtime, seed=seed, with_optimizer=with_optimizer)

    def generate(
        self, *, data: BatchedDataDict[Any], greedy: bool = False, sampling: Sampling | None = None
    ) -> BatchedDataDict[Any]:
        """Generate a response to each prompt with the training model itself; see
        ``DTensorBackend.generate``."""
        self._require("generate", remedy="prepare_for_generation")
        return self.backend.generate(data, self._generation(sampling), self.tokenizer, greedy=greedy)

    # NeMo-RL has the following two context managers on its worker, for callers with their own training loop.

    @staticmethod
    def create_context_parallel_ctx(
        cp_mesh: DeviceMesh,
        cp_buffers: list[torch.Tensor],
        cp_seq_dims: list[int],
        cp_no_restore_buffers: set[torch.Tensor],
        cp_rotate_method: str | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which each buffer contains only this context-parallel rank's shard of its
        sequence dimension.

        The worker's own methods do not need it, because they shard their batches themselves. It is meant for
        callers with their own training loop. See ``megarl.models.dtensor.mesh``.

        Args:
            cp_mesh: mesh of the context-parallel ranks.
            cp_buffers: tensors to shard, in place.
            cp_seq_dims: sequence dimension of each buffer.
            cp_no_restore_buffers: buffers whose full content need not be restored on exit.
            cp_rotate_method: how keys and values are exchanged: ``allgather`` (also for None), or
                ``alltoall`` for ring attention.

        Raises:
            ConfigError: the rotate method is unknown.
        """
        if cp_rotate_method not in ROTATE_METHODS:
            raise ConfigError(
                f"cp_rotate_method = {cp_rotate_method!r}: keys and values are exchanged by "
                "allgather or alltoall; write one or None"
            )
        return context_parallel(cp_mesh, cp_buffers, cp_seq_dims, cp_no_restore_buffers, cp_rotate_method)

    @staticmethod
    @contextlib.contextmanager
    def train_context(cp_context: contextlib.AbstractContextManager[None] | None = None) -> Iterator[None]:
        """Enter ``cp_context``, if given, around a forward and backward pass. Unlike in NeMo-RL, no attention
        kernel has to be disabled for context parallelism."""
        with cp_context or contextlib.nullcontext():
            yield

    # NeMo-RL's methods for moving a model. The worker itself offloads through ``offload_states``.

    def move_to_device(self, model: torch.nn.Module, device: str | torch.device) -> torch.nn.Module:
        """Move a model's parameters and buffers to ``device``, and return the model."""
        moved: torch.nn.Module = move_model(model, torch.device(device))
        return moved

    def move_buffer_to_device(self, model: torch.nn.Module, device: str | torch.device) -> torch.nn.Module:
        """Move a model's buffers to ``device``, and return the model. Needed because ``fully_shard`` moves
        only the parameters."""
        moved: torch.nn.Module = move_buffers(model, torch.device(device))
        return moved

    def move_to_cuda(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to this worker's device (the CPU on a machine without GPUs), and return the model."""
        moved = self.move_to_device(model, self.runtime.device)
        self.runtime.empty_cache()
        return moved

    def move_to_cpu(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to host memory, and return the model."""
        return self.move_to_device(model, "cpu")

    def return_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name, as DTensors: each contains this rank's shard, and ``full_tensor()``
        gathers the full tensor. A tied weight appears once.

        If the tensor-parallel size does not divide the vocabulary, embedding and output layer are padded with
        rows of zeros, which the Hugging Face model does not accept. Truncate both to ``vocab_size`` rows, or
        write the model with ``export_hf``, which removes the padding.
        """
        return self.backend.state_dict()
