"""Models that score, with a linear layer of one output instead of a language model's output layer, as reward
and value models have.

transformers calls such a model ``...ForSequenceClassification``: its ``score.weight`` [1, h] has no bias, and
is never tied to the embedding. The configuration (``policy.reward_model_cfg``) turns a language model into
one: its output layer is dropped, and the score layer depends on the seed alone, so that it is equal in every
layout and on every backend.
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
# These are the names of a language model's output layer, and of its copies in layers that predict further
# tokens.
_OUTPUT_LAYERS = re.compile(r"lm_head\.weight|.*\.shared_head\.head\.weight")
_AUTO_CLASS = "AutoModelForSequenceClassification"


def scoring_config(hf_config: Any) -> Any:
    """Return a copy of a model's config that names the class with a score layer, and one label.

    Args:
        hf_config: a transformers config, of a language model or of a model that already scores.

    Raises:
        ModelError: transformers has no such class for the model, or the model has another class or several
            labels.
    """
    # Copy the config, because the caller's still describes the files.
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


def said_of_scoring(config: Any) -> dict[str, Any]:
    """Return the keys of a ``config.json`` in which a model that scores differs from its language model."""
    full = config.to_dict()
    # Write labels as text: JSON has only text keys, as in a config.json that transformers writes.
    full["id2label"] = {str(label): name for label, name in full["id2label"].items()}
    return {key: full[key] for key in ("architectures", "id2label", "label2id", "pad_token_id")}


def _scoring_class(config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    # A model with custom code names its own class.
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
    """Return the weights of a model that scores: ``source`` if it has a score layer, otherwise its language
    model with a new score layer.

    Args:
        source: the checkpoint.
        hf_config: its config; the new layer is sampled from a normal distribution of ``initializer_range``,
            as in transformers.
        seed: seed of the new layer.
    """
    if SCORE in source:
        return source
    text = hf_config.get_text_config()
    return _WithNewScore(source.directory, text.hidden_size, text.initializer_range, seed)


class _WithNewScore(HuggingFaceSource):
    """A language model's weights with a new score layer instead of its output layer.

    Args:
        directory: directory of the language model.
        hidden_size: inputs of the layer.
        deviation: standard deviation of its weights.
        seed: seed of its weights.
    """

    def __init__(self, directory: Path, hidden_size: int, deviation: float, seed: int) -> None:
        # Sample on the CPU from a separate generator, so that every backend and layout gets the same layer.
        self._score = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed)) * deviation
        super().__init__(directory)

    def names(self) -> list[str]:
        """Return all names, with the score layer instead of the output layer."""
        return sorted([SCORE, *(name for name in super().names() if not _OUTPUT_LAYERS.fullmatch(name))])

    def __contains__(self, name: str) -> bool:
        return name == SCORE or (not _OUTPUT_LAYERS.fullmatch(name) and super().__contains__(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight or of the score layer."""
        return tuple(self._score.shape) if name == SCORE else super().shape(name)

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a weight or of the score layer."""
        return str(self._score.dtype) if name == SCORE else super().dtype_name(name)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return a weight or the score layer; see ``HuggingFaceSource``."""
        return self._score[slices or ()].clone() if name == SCORE else super().read(name, slices)
