"""Generation: the interface of rollout engines, sampling, and stop conditions."""

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
    """Return a copy of ``config`` in which values that depend on the tokenizer are filled in.

    Args:
        config: the generation configuration.
        tokenizer: gives ``pad_token_id`` and, if ``stop_token_ids`` is not configured, the tokens that end a
            response (``megarl.data.stop_tokens``).
        is_eval: ignored; part of NeMo-RL's policy API.
        model_name: model whose files may declare more stop tokens; defaults to the configuration's.
    """
    filled = dict(config)
    if filled.get("pad_token_id") is None:
        filled["pad_token_id"] = (
            tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        )
    if filled.get("stop_token_ids") is None:
        filled["stop_token_ids"] = list(stop_tokens_of(tokenizer, model_name or config.get("model_name")))
    return cast("GenerationConfig", filled)
