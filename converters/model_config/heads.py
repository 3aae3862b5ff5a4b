"""Heads that replace the output layer over the vocabulary: the linear score layer of value and reward models.

transformers calls the layer ``score``. It has no bias in ``...ForSequenceClassification``, which returns the
last token's scores, and a bias in ``...ForTokenClassification``. Trainers on Megatron-Core put a plain linear
layer into the last pipeline stage, under the name of the output layer, and replicate it on every
tensor-parallel rank. The layer is never tied to the embedding, whatever ``tie_word_embeddings`` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from converters.model_config.sizes import Config, read_size

OUTPUT_LAYER = "output_layer.weight"
_LANGUAGE_MODEL = "ForCausalLM"
# The value states whether the linear layer of this class has a bias.
_SCORING = {"ForSequenceClassification": False, "ForTokenClassification": True}


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """The linear score layer.

    Attributes:
        labels: number of scores for each token, at least one.
        bias: whether the layer has a bias.
    """

    labels: int
    bias: bool


def known_classes(architecture_class: str) -> dict[str, bool | None]:
    """Return the known model classes of a family, given its language model class. The value is a flag for a
    bias of the score layer, or None for the language model, which has no score layer."""
    stem = architecture_class.removesuffix(_LANGUAGE_MODEL)
    scoring = {stem + suffix: bias for suffix, bias in _SCORING.items()} if stem != architecture_class else {}
    return {architecture_class: None, **scoring}


def read_head(config: Config, architecture_class: str, problems: list[str]) -> ScoreHead | None:
    """Return the head of the class that a config names under ``architectures``, or None for a language model.
    Problems are appended to ``problems``."""
    classes = config.get("architectures")
    if not classes:
        return None
    known = known_classes(architecture_class)
    if (
        not isinstance(classes, (list, tuple))
        or len(classes) != 1
        or not isinstance(classes[0], str)
        or classes[0] not in known
    ):
        problems.append(f"architectures = {classes!r}: only {', '.join(known)} are supported")
        return None
    bias = known[classes[0]]
    if bias is None:
        return None
    names = config.get("id2label")
    # num_labels is a property of transformers' configs, and may be missing in the file. id2label then gives
    # the number.
    labels = config.get("num_labels", len(names) if isinstance(names, Mapping) else None)
    return ScoreHead(read_size({"num_labels": labels}, "num_labels", problems), bias)
