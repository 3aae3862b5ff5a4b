"""Preference pairs: prompts with a better and a worse answer, read from a source and tokenized for ``DPOLossFn``.

Nothing that a configuration starts reads them yet; a program calls ``load_preferences``, and ``supervised_batch`` on ``alternating`` pairs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.data.datasets import Example, Reading
from megarl.data.records import ChatMessage, Record, conversation, prompt_of, text_of, tools_of, value_of
from megarl.data.rows import rows_of, source_name
from megarl.data.tokenization import PromptEncoder, encode_answers
from megarl.errors import DataError

if TYPE_CHECKING:
    from megarl.config.sections import PreferenceSource

logger = logging.getLogger(__name__)

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt.

    Attributes:
        index: place of the pair, counted from 0.
        chosen, rejected: with equal ``prompt_ids``; what is learned is the answer, of a conversation its last turn.
    """

    index: int
    chosen: Example
    rejected: Example


def load_preferences(source: PreferenceSource, reading: Reading) -> tuple[PreferencePair, ...]:
    """Read and tokenize the pairs of a source in their stored order; all of them are held in memory.

    Args:
        source: its rows have a text or messages for the prompt and for each answer, or two conversations that differ in their last turn.
        reading: templates and limits; with ``filter_overlong_prompts`` a pair goes where either answer is too long.

    Raises:
        DataError: a row is broken, its answers are equal or belong to different prompts, or it is too long; the message says which.
    """
    encoder = PromptEncoder.from_config(reading.tokenizer, reading.config, reading.template_kwargs)
    limit, filters = reading.config["max_input_seq_length"], bool(reading.config.get("filter_overlong_prompts"))
    pairs: list[PreferencePair] = []
    long: list[str] = []
    longest = seen = 0
    for chosen, rejected in read_preferences(source):
        seen += 1
        pair = _encoded(chosen, rejected, len(pairs), encoder, reading)
        tokens = max(len(each.prompt_ids) + len(each.answer_ids) for each in (pair.chosen, pair.rejected))
        longest = max(longest, tokens)
        if tokens > limit:
            long.append(f"{chosen.origin}: {tokens} tokens")
        else:
            pairs.append(pair)
    shown = "; ".join(long[:_SHOWN]) + (f" and {len(long) - _SHOWN} more" if len(long) > _SHOWN else "")
    bound = f"data.max_input_seq_length = {limit}"
    if long and not (filters and pairs):
        fix = f"raise it to {longest}, or remove those pairs" + ("" if filters else ", or set data.filter_overlong_prompts=true")
        raise DataError(f"{len(long)} of {seen} pairs exceed {bound}. Fix: {fix}. They are: {shown}")
    if long:
        logger.warning(
            "%s: %d of %d pairs (%.2f %%) are left out: they exceed %s", source_name(source), len(long), seen, 100 * len(long) / seen, bound
        )
    return tuple(pairs)


def alternating(pairs: Sequence[PreferencePair]) -> list[Example]:
    """The rows of a batch as ``DPOLossFn`` wants them: chosen, rejected, chosen, ..."""
    return [example for pair in pairs for example in (pair.chosen, pair.rejected)]


def read_preferences(source: PreferenceSource) -> Iterator[tuple[Record, Record]]:
    """The better and the worse record of each row, at most ``max_samples``. Errors as of ``load_preferences``."""
    rows = 0
    for origin, row in itertools.islice(rows_of(source), source.get("max_samples")):
        if not isinstance(row, Mapping):
            raise DataError(f"{origin} is a {type(row).__name__}, expected an object. Fix: write a prompt and two answers a row")
        rows += 1
        chosen, rejected = (_answered(row, key, source, origin) for key in (source["chosen_key"], source["rejected_key"]))
        where = f"{origin}: {source['chosen_key']!r} and {source['rejected_key']!r}"
        if chosen.prompt != rejected.prompt:
            raise DataError(f"{where} differ in more than their last turn. Fix: give both the same prompt")
        if (chosen.answer, chosen.last) == (rejected.answer, rejected.last):
            raise DataError(f"{where} are the same answer {chosen.answer[:60]!r}. Fix: correct the row, or remove it")
        yield chosen, rejected
    if not rows:
        raise DataError(f"{source_name(source)} holds 0 pairs, at least 1 is needed. Fix: point the data source at pairs")


def _answered(row: Mapping[str, Any], key: str, source: PreferenceSource, origin: str) -> Record:
    """The prompt of a row with one of its answers."""
    value, tools = value_of(row, key, origin), tools_of(row, source, origin)
    prompt_key = source.get("prompt_key")
    before: str | tuple[ChatMessage, ...] = () if prompt_key is None else prompt_of(value_of(row, prompt_key, origin), prompt_key, origin)
    if prompt_key is not None and not isinstance(value, list):
        return Record(before, text_of(value, key, origin), origin, tools=tools)
    asked = [{"role": "user", "content": before}] if isinstance(before, str) else list(before)
    messages = conversation([*asked, *value] if isinstance(value, list) else value, key, origin)
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"{origin}: {key!r} ends with a turn of {messages[-1]['role']!r}. Fix: end it with the answer, a turn of 'assistant'"
        )
    has_system = messages[0]["role"] in ("system", "developer")
    return Record(messages[:-1], messages[-1].get("content") or "", origin, messages[-1], tools, has_system)


def _encoded(chosen: Record, rejected: Record, index: int, encoder: PromptEncoder, reading: Reading) -> PreferencePair:
    if chosen.last is None:
        [prompt] = encoder.encode_records([chosen])
        if not prompt:
            raise DataError(f"{chosen.origin}: the prompt has no tokens, at least 1 is needed. Fix: remove the row")
        answers = encode_answers(reading.tokenizer, [chosen.answer, rejected.answer])
        made = [
            Example(index, tuple(prompt), tuple(answer), record.answer) for record, answer in zip((chosen, rejected), answers, strict=True)
        ]
        return PreferencePair(index, *made)
    made = []
    for record in (chosen, rejected):
        whole = encoder.encode_conversation(record)
        start, end = whole.targets[-1]
        made.append(Example(index, tuple(whole.ids[:start]), tuple(whole.ids[start:]), record.answer, ((start, end),)))
    if made[0].prompt_ids != made[1].prompt_ids:
        raise DataError(
            f"{chosen.origin}: the chat template writes what is before the last turn in another way for the other answer. Fix: give "
            "policy.tokenizer.chat_template a template that does not"
        )
    return PreferencePair(index, *made)
