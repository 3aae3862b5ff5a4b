"""Options with which a user supplies what a checkpoint lacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODEL_WEIGHTS, MASTER_WEIGHTS = "model", "master"


@dataclass(frozen=True, slots=True)
class OpeningOptions:
    """Options of ``open_megatron``.

    Attributes:
        hf_directory: directory with config and tokenizer of the model.
        tokenizer: directory with only the tokenizer's files, for a config that is derived from the trainer's
            settings.
        vocab_size: rows of the embedding that belong to tokens, without padding.
        eos_token_ids: ids of the end-of-text tokens; empty for none.
        ignored_settings: settings of the trainer that are known to be harmless.
        ignored_config_keys: keys of ``config.json`` that are known to be harmless.
        rope_scaling_factor: factor of Llama 3's rope scaling that the model was trained with
            (``with_rope_factor``).
        weights: ``model``, or ``master`` for the optimizer's float32 weights.
    """

    hf_directory: Path | None = None
    tokenizer: Path | None = None
    vocab_size: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    ignored_settings: tuple[str, ...] = ()
    ignored_config_keys: tuple[str, ...] = ()
    rope_scaling_factor: float | None = None
    weights: str = MODEL_WEIGHTS
