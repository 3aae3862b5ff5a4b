"""FSDP1PolicyWorker: one rank of a policy on torch's FullyShardedDataParallel. A plain class: Ray makes an actor of it, torchrun uses it
as it is."""

from __future__ import annotations

from typing import Any, cast

import torch

from converters.checkpoint.source import open_source
from megarl.config.defaults import complete_policy
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.named_sharding import NamedSharding
from megarl.models.engine.worker import EngineWorker, begin
from megarl.models.fsdp1.backend import FSDP1Backend
from megarl.models.policy import PolicyConfig


class FSDP1PolicyWorker(EngineWorker):
    """One rank of a policy on FullyShardedDataParallel: data parallelism alone, each rank keeps a part of every layer.

    Args:
        config: the checked policy configuration; absent optional keys are filled in.
        tokenizer: of the model; goes into exported checkpoints and finds stop strings.
        weights_path: checkpoint to start from instead of ``model_name``'s weights.
        optimizer_path: optimizer checkpoint to continue from.
        init_optimizer: False for a model that is only read.
        init_reference_model: keep the weights of ``model_name`` as the reference policy, in host memory.
        worker_sharding_annotations: the layout; accepted for the contract, all ranks are data-parallel.
        pre_init_communication_queue: accepted for the contract and not needed: no rank converts for the others.
        seed: for random-number generators.

    Raises:
        ConfigError: the precision, the optimizer or the schedule is not possible.
        ModelError: the model's config and weights do not fit together.
        CheckpointError: a checkpoint is missing or belongs to another model.
    """

    backend: FSDP1Backend

    def __init__(
        self,
        config: PolicyConfig,
        tokenizer: Any,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        *,
        worker_sharding_annotations: NamedSharding | None = None,
        pre_init_communication_queue: Any = None,
        seed: int = 0,
        **unused: Any,
    ) -> None:
        config = cast(PolicyConfig, complete_policy(config))
        here = begin(seed)
        backend = FSDP1Backend(config, open_source(config["model_name"]), here, with_optimizer=init_optimizer)
        super().__init__(config, tokenizer, backend, here, has_optimizer=init_optimizer, init_reference_model=init_reference_model)
        self.continue_from(weights_path, optimizer_path)

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Continue prompts with the transformers model itself; see ``decode``."""
        self.offload_states.require("parameters", "generate", "prepare_for_generation")
        return self.backend.generate(data, self.cfg["generation"], self.tokenizer, greedy=greedy)

    # placement by hand

    def manual_offload_to_cpu(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to host memory and return it. Of the worker's own, the gradients go too; with ``fsdp_offload_enabled``, and on a
        CPU, it is there already."""
        if model is not self.model:
            return model.to("cpu")
        self.backend.move("gradients", "host")
        self.backend.move("parameters", "host")
        return model

    def manual_load_to_gpu(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to this worker's device and return it. The worker's own stays where it is with ``fsdp_offload_enabled``."""
        if model is not self.model:
            return model.to(self.runtime.device)
        self.backend.move("parameters", "device")
        return model

    @property
    def model(self) -> torch.nn.Module:
        """The model: wrapped in FullyShardedDataParallel, or on one rank the transformers model itself."""
        return self.backend.model.module
