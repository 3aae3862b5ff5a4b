"""Finds out what a checkpoint says of its model, and shows its tensors in the form that this library's own checkpoints have."""

from __future__ import annotations

from converters.architecture import Architecture
from converters.errors import ConversionError
from converters.foreign.common_state import arguments_of, read_common_state
from converters.foreign.master_weights import with_master_weights
from converters.foreign.options import MASTER_WEIGHTS, OpeningOptions
from converters.foreign.run_config import find_run_config, read_section
from converters.foreign.settings import ForeignSettings, settings_from_arguments, settings_from_provider, with_rope_factor
from converters.foreign.view import CanonicalTensors, refuse_adapters, without_prefix
from converters.rules import all_rules
from converters.torch_dist.keys import stored_place
from converters.torch_dist.reader import StoredTensors, TorchDistCheckpoint


def read_settings(checkpoint: TorchDistCheckpoint, options: OpeningOptions) -> ForeignSettings | None:
    """What the trainer of a checkpoint says of its model; None where it left nothing.

    Raises:
        ConversionError: what it left is damaged, or is not what the user says.
    """
    said = options.rope_scaling_factor
    run_config = find_run_config(checkpoint.directory)
    if run_config is not None:
        return with_rope_factor(settings_from_provider(read_section(run_config, "model"), str(run_config)), said, is_heeded=True)
    arguments = arguments_of(read_common_state(checkpoint))
    if arguments is not None:
        return with_rope_factor(settings_from_arguments(arguments, f"args of {checkpoint.directory}"), said, is_heeded=False)
    if said is not None:
        raise ConversionError(f"{checkpoint.directory} has no settings of a trainer", "leave --rope-scaling-factor out")
    return None


def tensors_of(checkpoint: TorchDistCheckpoint, weights: str) -> StoredTensors:
    """The tensors without prefixes.

    Args:
        checkpoint: as it lies there.
        weights: see :class:`converters.foreign.options.OpeningOptions`.

    Raises:
        ConversionError: there is not one model in it, there are adapters beside it, or there are no such weights.
    """
    refuse_adapters(checkpoint)
    return without_prefix(with_master_weights(checkpoint) if weights == MASTER_WEIGHTS else checkpoint)


def are_stacked(tensors: StoredTensors) -> bool:
    """Whether the layers of a decoder are stacked."""
    return any(key.startswith("decoder.layers.self_attention.") for key in tensors)


def canonical(tensors: StoredTensors, architecture: Architecture) -> CanonicalTensors:
    """The tensors under the keys that the architecture asks for.

    Raises:
        ConversionError: one tensor is stored under two names.
    """
    stacked = are_stacked(tensors)
    places = [stored_place(rule, architecture, stacked=stacked) for rule in all_rules(architecture)]
    return CanonicalTensors(tensors, {place.key: place.grid for place in places})
