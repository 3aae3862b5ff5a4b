"""Reward and value models: a linear layer with one output replaces the output layer of a language model.

transformers calls such a model ``...ForSequenceClassification``. Its ``score.weight`` [1, h] has no bias and
is never tied to the embedding. ``policy.reward_model_cfg`` turns a language model into one: the output layer
is dropped, and the score layer is initialized from the seed alone, so it is equal in every layout and on
every backend.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch

from converters.checkpoint.source import HuggingFaceSource
from megarl.errors import ModelError

SCORE = "score.weight"
# Names of a language model's output layer, and of its copies in multi-token-prediction layers.
_OUTPUT_LAYERS = re.compile(r"lm_head\.weight|.*\.shared_head\.head\.weight")
_AUTO_CLASS = "AutoModelForSequenceClassification"


def scoring_config(hf_config: Any) -> Any:
    """Return a copy of a model's config with the class of a reward or value model and one label.

    Args:
        hf_config: transformers config of a language model, or of a model that already has a score layer.

    Raises:
        ModelError: transformers has no such class for this model; or the model is neither of these kinds, or
            has several labels.
    """
    # Copy, because the caller's config still describes the base model's files.
    config = copy.deepcopy(hf_config)
    wanted, given = _scoring_class(config), (getattr(config, "architectures", None) or [None])[0]
    if given == wanted and config.num_labels != 1:
        raise ModelError(
            f"policy.model_name: it scores with {config.num_labels} labels, but "
            "policy.reward_model_cfg needs 1. Fix: give a language model, or a reward model with "
            "one label"
        )
    if given is not None and given != wanted and not given.endswith("ForCausalLM"):
        raise ModelError(
            f"policy.model_name: it is a {given}, but policy.reward_model_cfg needs a language "
            f"model or a {wanted}. Fix: give one of these"
        )
    config.architectures = [wanted]
    config.num_labels = 1
    return config


def said_of_scoring(config: Any) -> dict[str, object]:
    """Return the entries of ``config.json`` in which a reward or value model differs from its language
    model."""
    full = config.to_dict()
    # Write labels as text: JSON has only text keys, as in a config.json that transformers writes.
    full["id2label"] = {str(label): name for label, name in full["id2label"].items()}
    return {key: full[key] for key in ("architectures", "id2label", "label2id", "pad_token_id")}


def _scoring_class(config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    # A model with custom code names its class in the config.
    of_remote_code = (getattr(config, "auto_map", None) or {}).get(_AUTO_CLASS)
    name = (
        of_remote_code.rpartition(".")[2]
        if of_remote_code
        else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    )
    if name is None:
        raise ModelError(
            f"policy.reward_model_cfg: transformers has no class with a score layer ({_AUTO_CLASS}) for "
            "model_type "
            f"{config.model_type!r}. Fix: take a model of another family"
        )
    return str(name)


def scoring_source(source: HuggingFaceSource, hf_config: Any, seed: int) -> HuggingFaceSource:
    """Return the weights for a reward or value model: ``source`` if it has a score layer, otherwise the
    language model's weights with a new score layer.

    Args:
        source: the checkpoint.
        hf_config: config of the checkpoint. As in transformers, the new layer is initialized from a normal
            distribution with standard deviation ``initializer_range``.
        seed: seed of the new layer.
    """
    if SCORE in source:
        return source
    text = hf_config.get_text_config()
    return _WithNewScore(source.directory, text.hidden_size, text.initializer_range, seed)


class _WithNewScore(HuggingFaceSource):
    """A language model's weights with a new score layer instead of the output layer.

    Args:
        directory: directory of the language model.
        hidden_size: number of inputs of the score layer.
        deviation: standard deviation of its initial weights.
        seed: seed of its initial weights.
    """

    def __init__(self, directory: Path, hidden_size: int, deviation: float, seed: int) -> None:
        # Sample on the CPU from a separate generator, so that every backend and layout gets the same layer.
        self._score = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed)) * deviation
        super().__init__(directory)

    def names(self) -> list[str]:
        return sorted([SCORE, *(name for name in super().names() if not _OUTPUT_LAYERS.fullmatch(name))])

    def __contains__(self, name: str) -> bool:
        return name == SCORE or (not _OUTPUT_LAYERS.fullmatch(name) and super().__contains__(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._score.shape) if name == SCORE else super().shape(name)

    def dtype_name(self, name: str) -> str:
        return str(self._score.dtype) if name == SCORE else super().dtype_name(name)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        return self._score[slices or ()].clone() if name == SCORE else super().read(name, slices)
