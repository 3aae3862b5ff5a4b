"""Options by which a user says of a checkpoint what it does not say itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODEL_WEIGHTS, MASTER_WEIGHTS = "model", "master"


@dataclass(frozen=True, slots=True)
class OpeningOptions:
    """Options of ``open_megatron``.

    Attributes:
        hf_directory: config and tokenizer of the model.
        tokenizer: directory with the tokenizer's files alone, for a config that is made from the trainer's
            settings.
        vocab_size: rows of the embedding that belong to tokens, without padding.
        eos_token_ids: ends of a text; empty for none.
        ignored_settings: settings of the trainer that are known to be harmless.
        ignored_config_keys: keys of ``config.json`` that are known to be harmless.
        rope_scaling_factor: that a model was trained with which Megatron-LM says to scale as Llama 3 does
            (``with_rope_factor``).
        weights: ``model``, or ``master`` for the float32 weights that the optimizer keeps.
    """

    hf_directory: Path | None = None
    tokenizer: Path | None = None
    vocab_size: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    ignored_settings: tuple[str, ...] = ()
    ignored_config_keys: tuple[str, ...] = ()
    rope_scaling_factor: float | None = None
    weights: str = MODEL_WEIGHTS
