"""MegatronPolicyWorker: one rank of a policy on Megatron-Core. A plain class: Ray makes an actor of it, torchrun uses it as it is."""

from __future__ import annotations

from typing import Any, cast

from converters.checkpoint.source import open_source
from megarl.config.defaults import complete_policy
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.named_sharding import NamedSharding
from megarl.models.engine.worker import EngineWorker, begin
from megarl.models.megatron.backend import MegatronBackend
from megarl.models.megatron.generation import generate
from megarl.models.policy import PolicyConfig


class MegatronPolicyWorker(EngineWorker):
    """One rank of a policy on Megatron-Core.

    Args:
        config: the checked policy configuration; absent optional keys are filled in.
        tokenizer: of the model; goes into exported checkpoints and finds stop strings.
        weights_path: checkpoint to start from instead of ``model_name``'s weights.
        optimizer_path: optimizer checkpoint to continue from.
        init_optimizer: False for a model that is only read.
        init_reference_model: keep the weights of ``model_name`` as the reference policy.
        worker_sharding_annotations: the layout, for checks; the groups are Megatron's own.
        pre_init_communication_queue: accepted for the contract and not needed: no rank converts for the others.
        seed: for random-number generators.

    Raises:
        ConversionError: the model cannot be carried over.
        CheckpointError: a checkpoint is missing or belongs to another model.
    """

    backend: MegatronBackend

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
        backend = MegatronBackend(config, open_source(config["model_name"]), here, seed=seed, with_optimizer=init_optimizer)
        super().__init__(config, tokenizer, backend, here, has_optimizer=init_optimizer, init_reference_model=init_reference_model)
        self.continue_from(weights_path, optimizer_path)

    def generate(self, *, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Continue prompts with Megatron itself; see ``generate``."""
        self.offload_states.require("parameters", "generate", "prepare_for_generation")
        return generate(self.backend, data, self.cfg["generation"], self.tokenizer, greedy=greedy)
