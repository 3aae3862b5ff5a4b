"""Access to the weights named by a policy section."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from converters.adapters.adapted_source import AdaptedSource
from converters.checkpoint.source import HuggingFaceSource, open_source
from converters.families.hf_config import read_hf_config
from converters.families.read import read_architecture
from converters.model_config.prediction_layers import as_stored
from megarl.config.policy import PolicyConfig


def open_weights(policy: PolicyConfig) -> HuggingFaceSource:
    """Open the weights of ``model_name``, with ``merged_adapter`` merged into them on reading.

    Raises:
        ConversionError: there is no readable checkpoint; or the adapter is damaged, is not a plain LoRA, or
            belongs to another model.
    """
    source = open_source(policy["model_name"])
    adapter = policy["merged_adapter"]
    if adapter is None:
        return source
    config = read_hf_config(source.directory, trust_remote_code=policy["trust_remote_code"])
    megatron = policy["megatron_cfg"]
    ignored = megatron["ignore_config_keys"] if megatron["enabled"] else ()
    stored = as_stored(read_architecture(config, ignored), source.names())
    # Exclude layers that are never trained. Exports copy these from the model's files, so an adapter merged
    # into them would be lost.
    trained = replace(stored, prediction_layers=0, vision=None)
    return AdaptedSource(source.directory, Path(adapter), trained)
