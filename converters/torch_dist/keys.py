"""Key and location of each parameter in a ``torch_dist`` checkpoint.

Keys are those of ``ShardedTensor.key``, and do not depend on the parallelism. If all layers are alike, their
parameters are stacked along a leading dimension; otherwise each layer has its own keys. Experts of a layer
are always stacked. Both layer specs use Transformer Engine's keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from converters.mapping.rule import Rule, fused_norms
from converters.model_config.architecture import Architecture

_LAYER = re.compile(r"decoder\.layers\.(0|[1-9]\d*)\.(.+)")
_PREDICTION_LAYER = re.compile(r"(mtp\.layers\.(0|[1-9]\d*)\.transformer_layer\.)(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(0|[1-9]\d*)\.(.+)")
_WITHOUT_EXTRA_STATE = ("embedding.", "output_layer.", "vision_model.")


def is_of_optimizer(key: str) -> bool:
    """Return whether a key belongs to optimizer state. With several optimizers, such as one for experts and
    one for the rest, keys begin with ``chained_N.optimizer.``."""
    return key.startswith(("optimizer.", "chained_"))


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """Location of a parameter in a checkpoint.

    Attributes:
        key: key of the stored tensor.
        index: index in its leading dimensions of layers and experts; empty without such dimensions.
        grid: sizes of these dimensions.
    """

    key: str
    index: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()


def is_stacked(architecture: Architecture) -> bool:
    """Return whether Megatron-Core stacks the layers of a model, because all are of the same kind."""
    uniform = architecture.mixture is None or all(architecture.mixture.sparse_layers)
    # Layers with gated delta nets and with attention have different parameters.
    return uniform and architecture.gated_delta is None


def are_stacked(keys: Iterable[str]) -> bool:
    """Return whether layers are stacked in a checkpoint with these keys."""
    return any(key.startswith("decoder.layers.self_attention.") for key in keys)


def stored_place(rule: Rule, architecture: Architecture, *, stacked: bool) -> StoredPlace:
    """Return the location of a parameter. Multi-token-prediction layers are never stacked."""
    prediction = _PREDICTION_LAYER.fullmatch(rule.megatron_name)
    if prediction is not None:
        layer = architecture.num_layers + int(prediction.group(2))
        return _place_in_layer(prediction.group(1), prediction.group(3), architecture, layer, (), ())
    match = _LAYER.fullmatch(rule.megatron_name)
    if match is None:
        return StoredPlace(rule.megatron_name)
    layer, suffix = int(match.group(1)), match.group(2)
    if stacked:
        return _place_in_layer(
            "decoder.layers.", suffix, architecture, layer, (layer,), (architecture.num_layers,)
        )
    return _place_in_layer(f"decoder.layers.{layer}.", suffix, architecture, layer, (), ())


def _place_in_layer(
    prefix: str,
    suffix: str,
    architecture: Architecture,
    layer: int,
    index: tuple[int, ...],
    grid: tuple[int, ...],
) -> StoredPlace:
    """Return the location of a parameter inside a layer.

    Args:
        prefix: prefix of the layer's keys.
        suffix: name of the parameter in the layer.
        architecture: architecture of the model.
        layer: global index of the layer.
        index, grid: index and sizes of the leading dimension of layers; empty if layers are not stacked.
    """
    expert = _EXPERT.fullmatch(suffix)
    if expert is not None:
        assert architecture.mixture is not None
        # All experts of a layer are stored in one tensor, indexed by its leading dimensions.
        suffix = f"mlp.experts.experts.{expert.group(2)}"
        return StoredPlace(
            prefix + suffix, (*index, int(expert.group(1))), (*grid, architecture.mixture.num_experts)
        )
    # Checkpoints use Transformer Engine's names, whichever layer spec the model was built with.
    fused = fused_norms(architecture.kind_of(layer))
    return StoredPlace(prefix + fused.get(suffix, suffix), index, grid)


def extra_state_keys(place: StoredPlace) -> Iterator[str]:
    """Yield the names of the objects that a model requests from a checkpoint together with a parameter: the
    fp8 state of its module, which is empty without fp8.

    Which modules request it depends on the layer spec. All possible names are yielded, because a missing
    object makes a load fail, and an additional one does not.
    """
    if place.key.startswith(_WITHOUT_EXTRA_STATE) or not place.key.endswith(".weight"):
        return
    module = place.key.removesuffix(".weight")
    # The object of a module that is not stacked is shard 0 of 1.
    index, grid = (place.index, place.grid) if place.index else ((0,), (1,))
    modules = [module]
    if module.endswith("self_attention.linear_proj"):
        # Core attention requests a state too, but has no weight from which its name follows.
        modules.append(f"{module.removesuffix('linear_proj')}core_attention")
    for name in modules:
        yield f"{name}._extra_state/shard_{_dotted(index)}_{_dotted(grid)}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
