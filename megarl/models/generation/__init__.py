"""Generation: what every engine offers, how tokens are chosen, when an answer ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from megarl.data.stop_tokens import stop_tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config.generation import GenerationConfig


def configure_generation_config(
    config: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    is_eval: bool = False,
    model_name: str | None = None,
) -> GenerationConfig:
    """A copy of ``config`` with what only the tokenizer knows.

    Args:
        config: the generation configuration.
        tokenizer: gives ``pad_token_id`` and, where no ``stop_token_ids`` are configured, what ends a
            response (``megarl.data.stop_tokens``).
        is_eval: accepted for the NeMo-RL policy API; the policy itself generates alike in training and
            evaluation.
        model_name: of the model, whose files may name further ends; by default the configuration's.
    """
    filled = dict(config)
    if filled.get("pad_token_id") is None:
        filled["pad_token_id"] = (
            tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        )
    if filled.get("stop_token_ids") is None:
        filled["stop_token_ids"] = list(stop_tokens_of(tokenizer, model_name or config.get("model_name")))
    return cast("GenerationConfig", filled)
