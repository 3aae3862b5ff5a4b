"""Builds this worker's part of the model: Megatron's GPTModel for its pipeline stage, wrapped for data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from converters.architecture import Architecture
from converters.megatron_settings import megatron_settings
from megarl.config.arithmetic import padded_vocabulary
from megarl.models.engine.groups import ParallelGroups
from megarl.models.megatron.settings import ddp_config, transformer_config
from megarl.models.megatron.specs import decoder_spec


def build_stage(policy: Mapping[str, Any], architecture: Architecture, groups: ParallelGroups) -> GPTModel:
    """The uninitialised model of this pipeline stage on the current device; weights have to be loaded before anything else."""
    config = transformer_config(policy, architecture)
    options = megatron_settings(architecture).model
    options["vocab_size"] = padded_vocabulary(architecture.vocab_size, groups.tensor_size)
    return GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec(config),
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        parallel_output=True,
        **options,
    )


def wrap_for_data_parallel(model: GPTModel, policy: Mapping[str, Any]) -> DistributedDataParallel:
    """``model`` with Megatron's gradient and parameter buffers; its config learns how the schedules have to synchronise gradients."""
    config: TransformerConfig = model.config
    distribution = ddp_config(policy)
    wrapped = DistributedDataParallel(config, distribution, model)
    if distribution.overlap_grad_reduce:
        config.no_sync_func = wrapped.no_sync
    return wrapped
