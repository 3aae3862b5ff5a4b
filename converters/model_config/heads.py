"""Score layers that replace the output layer in value and reward models.

transformers names the layer ``score``. In ``...ForSequenceClassification`` it has no bias, and the last token
is scored; in ``...ForTokenClassification`` it has a bias. Trainers on Megatron-Core put a linear layer with
the name of the output layer into the last pipeline stage, replicated over tensor-parallel ranks. It is never
tied to the embedding, whatever ``tie_word_embeddings`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from converters.model_config.sizes import Config, read_size

OUTPUT_LAYER = "output_layer.weight"
_LANGUAGE_MODEL = "ForCausalLM"
# Suffix of the class -> whether its score layer has a bias.
_SCORING = {"ForSequenceClassification": False, "ForTokenClassification": True}


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """A linear score layer.

    Attributes:
        labels: number of scores per token, at least 1.
        bias: the layer has a bias.
    """

    labels: int
    bias: bool


def known_classes(architecture_class: str) -> dict[str, bool | None]:
    """Return the supported model classes of a family: class -> whether its score layer has a bias, or None
    for the language model.

    Args:
        architecture_class: the family's language model class.
    """
    stem = architecture_class.removesuffix(_LANGUAGE_MODEL)
    scoring = {stem + suffix: bias for suffix, bias in _SCORING.items()} if stem != architecture_class else {}
    return {architecture_class: None, **scoring}


def read_head(config: Config, architecture_class: str, problems: list[str]) -> ScoreHead | None:
    """Return the score layer of the class in ``architectures``; None for a language model. Problems are
    appended to ``problems``."""
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
    # num_labels may be missing in the file, because it is a property of transformers' configs; id2label then
    # gives the number.
    labels = config.get("num_labels", len(names) if isinstance(names, Mapping) else None)
    return ScoreHead(read_size({"num_labels": labels}, "num_labels", problems), bias)
