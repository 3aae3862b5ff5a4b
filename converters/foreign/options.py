"""Options by which a user supplies what a checkpoint does not contain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODEL_WEIGHTS, MASTER_WEIGHTS = "model", "master"


@dataclass(frozen=True, slots=True)
class OpeningOptions:
    """Options of ``open_megatron``.

    Attributes:
        hf_directory: directory with the model's config and tokenizer.
        tokenizer: directory with only the tokenizer, for a config that is derived from the trainer's
            settings.
        vocab_size: number of embedding rows without padding.
        eos_token_ids: end-of-text token ids; empty for none.
        ignored_settings: names of the trainer's settings to ignore.
        ignored_config_keys: keys of ``config.json`` to ignore.
        rope_scaling_factor: factor of Llama 3's rope scaling in training (``with_rope_factor``).
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
