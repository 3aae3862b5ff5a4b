"""What a driver checks of a model before any worker starts: that its weights can be carried over, and that it knows the data's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from converters.architecture import Architecture, read_architecture
from converters.check import check_source
from converters.source import open_source
from megarl.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.datasets import Dataset


def check_model(policy: Mapping[str, Any]) -> Architecture:
    """The architecture of the model, whose weights are there and fit its config. Reads headers only.

    Args:
        policy: the ``policy`` section.

    Raises:
        ConversionError: the model cannot be carried over, or its weights do not fit its config.
        ModelError: its config cannot be read.
    """
    from transformers import AutoConfig

    source = open_source(policy["model_name"])
    try:
        config = AutoConfig.from_pretrained(source.directory, trust_remote_code=policy["trust_remote_code"])
    except Exception as error:
        # Model code, the checks of a config's fields and the file system raise errors of many unrelated classes.
        raise ModelError(
            f"policy.model_name = {policy['model_name']!r}: its config.json cannot be used: {type(error).__name__}: {error}. "
            "Fix: give the directory of a complete Hugging Face model"
        ) from error
    architecture = read_architecture(config)
    # Whether tied weights are equal takes reading them; the worker that holds them compares.
    check_source(source, architecture, compare_tied=False)
    return architecture


def check_tokens(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, vocab_size: int, with_answers: bool) -> None:
    """Refuse data whose tokens the model does not have.

    Args:
        dataset: tokenized.
        tokenizer: what made its tokens; its padding token goes through the model too.
        vocab_size: token ids lie in [0, vocab_size).
        with_answers: True when the answers are part of the model's input.

    Raises:
        ModelError: the padding token is out of range.
        DataError: a record's token is out of range; names the first such record.
    """
    fix = "give policy.tokenizer.name the tokenizer that belongs to policy.model_name"
    pad = tokenizer.pad_token_id
    if not 0 <= pad < vocab_size:
        raise ModelError(f"padding token {tokenizer.pad_token!r} = {pad}: token ids of the model lie in [0, {vocab_size}). Fix: {fix}")
    for example in dataset.examples:
        ids = example.prompt_ids + (example.answer_ids if with_answers else ())
        if ids and max(ids) >= vocab_size:
            raise DataError(
                f"record {example.index} (counted from 0) has token id {max(ids)} ({tokenizer.convert_ids_to_tokens(max(ids))!r}): "
                f"token ids of the model lie in [0, {vocab_size}). Fix: {fix}"
            )
