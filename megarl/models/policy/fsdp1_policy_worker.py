"""``FSDP1PolicyWorker``, one rank of a policy on torch's FullyShardedDataParallel. It is a plain class: Ray
wraps it in an actor, and torchrun uses it directly."""

from __future__ import annotations

from typing import Any

import torch

from megarl.config.policy import PolicyConfig
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import DeviceRuntime
from megarl.models.engine.model_weights import open_weights
from megarl.models.engine.worker import EngineWorker
from megarl.models.fsdp1.backend import FSDP1Backend
from megarl.models.generation.interfaces import Sampling


class FSDP1PolicyWorker(EngineWorker):
    """One rank of a policy on FullyShardedDataParallel. Data parallelism only: each rank stores a shard of
    every layer."""

    backend: FSDP1Backend

    @staticmethod
    def make_backend(
        config: PolicyConfig, runtime: DeviceRuntime, seed: int, with_optimizer: bool
    ) -> FSDP1Backend:
        """Build the FSDP1 backend; see ``EngineWorker.make_backend``."""
        return FSDP1Backend(config, open_weights(config), runtime, seed=seed, with_optimizer=with_optimizer)

    def generate(
        self, data: BatchedDataDict[Any], greedy: bool = False, *, sampling: Sampling | None = None
    ) -> BatchedDataDict[Any]:
        """Generate a response to each prompt with the transformers model itself; see
        ``megarl.models.engine.decoding.decode``."""
        self._require("generate", remedy="prepare_for_generation")
        return self.backend.generate(data, self._generation(sampling), self.tokenizer, greedy=greedy)

    # NeMo-RL's methods for manual offloading.

    def manual_offload_to_cpu(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to host memory and return it.

        If it is the worker's own model, its gradients are freed too. With ``fsdp_offload_enabled``, and on a
        CPU, the worker's own model is already in host memory.
        """
        if model is not self.model:
            return model.to("cpu")
        # Not ``Module.to``, which would miss FSDP's own reference to its shard of the flat parameters.
        self.backend.move("gradients", "host")
        self.backend.move("parameters", "host")
        return model

    def manual_load_to_gpu(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to this worker's device and return it. With ``fsdp_offload_enabled``, the worker's own
        model stays in host memory."""
        if model is not self.model:
            return model.to(self.runtime.device)
        self.backend.move("parameters", "device")
        return model

    @property
    def model(self) -> torch.nn.Module:
        """The module that the worker trains: FullyShardedDataParallel around the transformers model, or the
        transformers model itself if there is one rank."""
        return self.backend.model.module
