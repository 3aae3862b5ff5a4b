"""Tokenized data sets: prompts to answer (reinforcement learning) and prompts with answers (supervised fine-tuning)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.data.records import Record, fingerprint, load_records, texts_of
from megarl.data.tokenization import PromptEncoder, encode_answers, refuse_empty_and_long
from megarl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config.sections import DataConfig, DataSource

logger = logging.getLogger(__name__)

_CHUNK = 1024
_PROGRESS_EVERY = 100_000
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized record.

    Attributes:
        index: its place in the data set, counted from 0.
        prompt_ids: tokens up to where the answer starts.
        answer_ids: the reference answer's tokens with the end-of-sequence token.
        answer: the reference answer as text.
    """

    index: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """Examples in stored order, and the digest of the records they came from."""

    examples: tuple[Example, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.examples)

    def select(self, indices: Sequence[int]) -> list[Example]:
        """The examples at these places, in this order."""
        return [self.examples[index] for index in indices]


def load_dataset(
    source: DataSource,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    with_answers: bool,
    fault_of_answer: Callable[[str], str | None] | None = None,
) -> Dataset:
    """Read and tokenize a data source.

    Args:
        source: where the records are.
        config: the ``data`` section: templates and ``max_input_seq_length``.
        tokenizer: from ``get_tokenizer``.
        with_answers: True when the answer is part of the model's input, and so counts towards ``max_input_seq_length``.
        fault_of_answer: says why a reference answer is of no use, None for one that is.

    Raises:
        DataError: a record is broken, empty or too long, or its answer is of no use; the message says which.
    """
    records = load_records(source)
    if fault_of_answer is not None:
        _refuse_useless_answers(records, fault_of_answer)
    _warn_of_control_tokens(records, tokenizer)
    examples = tokenize(records, PromptEncoder.from_config(tokenizer, config), tokenizer)
    refuse_empty_and_long([len(example.prompt_ids) for example in examples], records, config["max_input_seq_length"], "prompts")
    if with_answers:
        totals = [len(example.prompt_ids) + len(example.answer_ids) for example in examples]
        refuse_empty_and_long(totals, records, config["max_input_seq_length"], "prompts with answers")
    return Dataset(examples, fingerprint(records))


def _refuse_useless_answers(records: Sequence[Record], fault_of_answer: Callable[[str], str | None]) -> None:
    faults = {answer: fault_of_answer(answer) for answer in dict.fromkeys(record.answer for record in records)}
    offenders = [(place, record) for place, record in enumerate(records) if faults[record.answer] is not None]
    if offenders:
        shown = "; ".join(
            f"index {place} ({record.origin}): {record.answer[:80]!r}: {faults[record.answer]}" for place, record in offenders[:_SHOWN]
        )
        more = f" and {len(offenders) - _SHOWN} more" if len(offenders) > _SHOWN else ""
        raise DataError(
            f"{len(offenders)} of {len(records)} reference answers are of no use to env.reward: every answer to those prompts would be "
            f"wrong. Fix: correct or remove them. They are: {shown}{more}"
        )


def _warn_of_control_tokens(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase) -> None:
    """Say where the text of prompts has what the tokenizer reads as a control token: such a prompt can end a turn, or begin another."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    names = sorted({*map(str, tokenizer.all_special_tokens), *added} - {""})
    if not names:
        return
    control = re.compile("|".join(map(re.escape, names)))
    found = [(place, hit[0]) for place, record in enumerate(records) if (hit := control.search("\n".join(texts_of(record.prompt))))]
    if found:
        place, name = found[0]
        logger.warning(
            "%d of %d prompts have a control token of the tokenizer in their text, which it reads as such; the first: index %d (%s): %r. "
            "Take it out where it is meant as text",
            len(found),
            len(records),
            place,
            records[place].origin,
            name,
        )


def tokenize(records: Sequence[Record], encoder: PromptEncoder, tokenizer: PreTrainedTokenizerBase) -> tuple[Example, ...]:
    """The examples of the records, in order."""
    examples: list[Example] = []
    for start in range(0, len(records), _CHUNK):
        chunk = records[start : start + _CHUNK]
        prompts = encoder.encode_many([record.prompt for record in chunk])
        answers = encode_answers(tokenizer, [record.answer for record in chunk])
        for record, prompt, answer in zip(chunk, prompts, answers, strict=True):
            examples.append(Example(len(examples), tuple(prompt), tuple(answer), record.answer))
        if len(records) > _PROGRESS_EVERY and len(examples) % _PROGRESS_EVERY < _CHUNK:
            logger.info("tokenized %d of %d records", len(examples), len(records))
    return tuple(examples)
