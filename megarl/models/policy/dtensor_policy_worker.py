"""DTensorPolicyWorker: one rank of a policy on DTensor and FSDP2. It is a plain class; Ray wraps it in an
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
    """Gather the parameters of all modules that ``fully_shard`` divided inside the block, and divide them
    again on exit. A collective."""
    try:
        for module in sharded_modules(model):
            module.unshard()
        yield
    finally:
        reshard(model)


def get_cpu_state_dict(
    state_generator: Iterable[tuple[str, torch.Tensor]], pin_memory: bool = False
) -> dict[str, torch.Tensor]:
    """Copy tensors to host memory; of divided tensors, copy this rank's piece.

    Args:
        state_generator: names and tensors.
        pin_memory: copy into page-locked memory, without waiting for each copy.
    """
    copies = {}
    for name, tensor in state_generator:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        copies[name] = torch.empty_like(local, device="cpu", pin_memory=pin_memory)
        copies[name].copy_(local, non_blocking=pin_memory)
    # Synchronize once for all copies, because copies into page-locked memory are only queued.
    runtime().synchronize()
    return copies


class DTensorPolicyWorker(EngineWorker):
    """One rank of a policy on DTensor and FSDP2."""

    backend: DTensorBackend

    @staticmethod
    def make_backend(
        config: PolicyConfig, runtime: DeviceRuntime, seed: int, with_optimizer: bool
    ) -> DTensorBackend:
        """Build the DTensor backend; see ``EngineWorker``."""
        return DTensorBackend(config, open_weights(config), runtime, seed=seed, with_optimizer=with_optimizer)

    # Generation.

    def generate(
        self, *, data: BatchedDataDict[Any], greedy: bool = False, sampling: Sampling | None = None
    ) -> BatchedDataDict[Any]:
        """Continue prompts with the model itself; see ``DTensorBackend.generate``."""
        self._require("generate", remedy="prepare_for_generation")
        return self.backend.generate(data, self._generation(sampling), self.tokenizer, greedy=greedy)

    # Context parallelism for callers with a custom loop.

    @staticmethod
    def create_context_parallel_ctx(
        cp_mesh: DeviceMesh,
        cp_buffers: list[torch.Tensor],
        cp_seq_dims: list[int],
        cp_no_restore_buffers: set[torch.Tensor],
        cp_rotate_method: str | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which every buffer holds this rank's part (``megarl.models.dtensor.mesh``).

        The worker's own methods do not need it, because they divide their batches themselves.

        Args:
            cp_mesh: mesh of the context-parallel ranks.
            cp_buffers: tensors that are changed in place.
            cp_seq_dims: sequence dimension of each buffer.
            cp_no_restore_buffers: buffers whose full content need not be restored.
            cp_rotate_method: exchange of keys and values: ``allgather`` (also for None), or ``alltoall`` for
                ring attention.

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
        """Enter ``cp_context`` around the forward and backward pass. No attention kernel has to be disabled
        for it."""
        with cp_context or contextlib.nullcontext():
            yield

    # Location of a model.

    def move_to_device(self, model: torch.nn.Module, device: str | torch.device) -> torch.nn.Module:
        """Move parameters and buffers to ``device``, and return the model."""
        moved: torch.nn.Module = move_model(model, torch.device(device))
        return moved

    def move_buffer_to_device(self, model: torch.nn.Module, device: str | torch.device) -> torch.nn.Module:
        """Move buffers to ``device``, and return the model. ``fully_shard`` moves only parameters."""
        moved: torch.nn.Module = move_buffers(model, torch.device(device))
        return moved

    def move_to_cuda(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to this worker's device, which may be the CPU, and return the model."""
        moved = self.move_to_device(model, self.runtime.device)
        self.runtime.empty_cache()
        return moved

    def move_to_cpu(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to host memory, and return the model."""
        return self.move_to_device(model, "cpu")

    def return_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name, as DTensors that hold this rank's piece and can gather the full
        tensor (``full_tensor()``). A tied weight appears once.

        If the tensor-parallel ranks do not divide the vocabulary, embedding and output layer end with rows of
        zeros, which the Hugging Face model does not accept. Truncate them to its ``vocab_size``, or write the
        model with ``export_hf``, which leaves them out.
        """
        return self.backend.state_dict()
