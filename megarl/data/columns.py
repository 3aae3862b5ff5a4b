"""Inference of a data source's field keys from common column names, if the source does not set them."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, cast

from megarl.config.data_sources import FIELD_KEYS, PAIR_KEYS, DataSource, fields_of_key, set_module
from megarl.data.messages import are_messages, as_messages, role_of
from megarl.data.records import ranked_pair, require_object, tools_of, value_of
from megarl.data.rows import Fields, rows_of, source_name
from megarl.data.unread_columns import fault_of_columns
from megarl.errors import DataError, RecordError

logger = logging.getLogger(__name__)

Reading = dict[str, Any]
"""Maps field keys of a data source (such as ``prompt_key``) to field names."""


class Kind(Enum):
    """Use of the records: answers to train on, reference answers for a reward, or preference pairs."""

    ANSWERS = "answers"
    REFERENCES = "reference answers"
    PAIRS = "pairs"


_CONVERSATIONS = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "problem", "question", "instruction", "query")
_TEXTS = ("context", "passage", "article")
_PAIRS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
_ANSWERS = ("completion", "response", "output", "answer", "solution")
_FINAL_ANSWERS = ("answer", "ground_truth", "final_answer", "expected_answer", "target", "label")
_SOLUTIONS = ("solution", "completion", "response", "output")
_STATEMENTS = ("test_list", "challenge_test_list", "test_setup_code", "test_imports")
_CASES = ("public_test_cases", "private_test_cases", "metadata")
_TESTS = ("input_output", "tests", "test_cases")
_VERL = "reward_model.ground_truth"
_SYSTEMS = ("system", "system_prompt")
_TOOLS = ("tools", "functions")
_MEANING = {
    "name": "form of the set",
    "messages_key": "conversations",
    "prompt_key": "prompts",
    "answer_key": "answers",
    "chosen_key": "better answers",
    "rejected_key": "worse answers",
    "system_key": "system messages",
    "tools_key": "tools",
    "extra_keys": "further fields",
}
_BESIDE_TEXTS = ("input", "summary", "labels", "test_list", *itertools.chain(*_PAIRS))
"""If a row also has one of these columns, its text may not be all that should be trained on."""
_ADVICE = "prompt_key and answer_key with the names of the fields, or messages_key for whole conversations"
_ADVICE_OF_TEXTS = f"{_ADVICE}, or prompt_key=[] and answer_key for texts by themselves"
_ANSWERED = "{'prompt': ..., 'answer': ...}"
# Parts of the error message if no columns have common names: what is missing, what to write, and an example
# of a record.
_WANTED = {
    Kind.ANSWERS: ("prompts with answers nor conversations", _ADVICE_OF_TEXTS, _ANSWERED),
    Kind.REFERENCES: ("prompts with reference answers nor conversations", _ADVICE, _ANSWERED),
    Kind.PAIRS: (
        "a prompt with two answers nor two conversations",
        (
            "chosen_key and rejected_key with the names of the fields, and prompt_key unless both hold whole "
            "conversations"
        ),
        "{'prompt': ..., 'chosen': ..., 'rejected': ...}",
    ),
}


def complete_source(source: DataSource, kind: Kind, skips_bad_records: bool = False) -> None:
    """Fill in a source's missing field keys from the columns of its first record. Keys that the source sets
    are kept.

    Raises:
        DataError: no columns have common names, or there are several ways to read them; the message says what
            to write.
    """
    if _is_complete(source, kind):
        _warn_of_unread(source)
        return
    origin, row = _first_record(source, kind, skips_bad_records)
    readings = list(_readings(row, source, kind)) or _whole_text(row, source, kind)
    columns = ", ".join(map(str, row))
    faults = [_fault_of_reading(row, each, kind, origin) for each in readings]
    if faults and all(faults):
        raise DataError(f"{source_name(source)}: {faults[0]}")
    # Never guess: training on the wrong column raises no error.
    if len(readings) > 1:
        texts = list[str]()
        for reading in readings:
            texts.append(" ".join(f"{key}={_in_words(value)}" for key, value in reading.items()))
        ways = "; or ".join(texts)
        raise DataError(
            f"{source_name(source)}: its columns, {columns}, can be read in several ways. Fix: write {ways}"
        )
    if not readings:
        header = (
            ", named by its first line"
            if Path(source.get("path") or "").suffix.lower() in (".csv", ".tsv")
            else ""
        )
        wanted, advice, _ = _WANTED[kind]
        raise DataError(
            f"{source_name(source)}: by their usual names, its columns ({columns}{header}) hold neither "
            f"{wanted}. Fix: write {advice}"
        )
    [found] = readings
    found |= dict(_beside(row, source, found, origin))
    if _is_gsm8k(row, source, found, kind):
        found = {"name": "gsm8k"}
    cast(Any, source).update(found)
    meaning = {**_MEANING, "answer_key": kind.value}
    said = ", ".join(
        f"{meaning[key]} from {', '.join(map(repr, fields_of_key(value)))}"
        for key, value in found.items()
        if value
    )
    logger.info("%s: %s", source_name(source), said)


def _is_complete(source: DataSource, kind: Kind) -> bool:
    if kind is Kind.PAIRS:
        return all(source.get(key) is not None for key in PAIR_KEYS)
    has_both = source.get("prompt_key") is not None and source.get("answer_key") is not None
    return has_both or source.get("messages_key") is not None or set_module(source) is not None


def _warn_of_unread(source: DataSource) -> None:
    """Warn if the first record of a file has tools or a system message that no key of the source names."""
    if "path" not in source or set_module(source) is not None:
        return
    stored = next((each for each in rows_of(source) if isinstance(each[1], Mapping)), None)
    if stored is None:
        return
    origin, row = stored
    first = ""
    for key, value in source.items():
        if key in ("messages_key", "prompt_key", "chosen_key") and isinstance(value, str) and value in row:
            first = value
            break
    for key, name in _beside(row, source, {"prompt_key": first or []}, origin):
        is_said = key == "system_key" and _roles(row.get(first))[:1] == ["system"]
        if not is_said and row[name] not in (None, "", "[]", []):
            logger.warning(
                "%s: its records have %s in %r, but no key names that field, so the model never "
                "sees it. Set %s to use it",
                source_name(source),
                _MEANING[key],
                name,
                key,
            )


def _first_record(source: DataSource, kind: Kind, skips_bad_records: bool) -> tuple[str, Fields]:
    for origin, row in rows_of(source):
        if not skips_bad_records:
            require_object(row, _WANTED[kind][-1], origin)
        if not isinstance(row, Mapping):
            continue
        try:
            return origin, ranked_pair(row, origin) if kind is Kind.PAIRS else row
        except RecordError:
            if not skips_bad_records:
                raise
    raise DataError(
        f"{source_name(source)} holds 0 records, at least 1 is needed. Fix: point the data source at records"
    )


def _in_words(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else json.dumps(value).replace('"', "").replace(" ", "")


def _readings(row: Fields, source: DataSource, kind: Kind) -> Iterator[Reading]:
    """Yield all ways to read a record that are consistent with the source's own keys."""
    own_prompt, own_answer = source.get("prompt_key"), source.get("answer_key")
    prompts = list(_prompts(row, kind)) if own_prompt is None else [own_prompt]
    if kind is Kind.PAIRS:
        yield from _pairs(row, source, prompts)
        return
    answers = list(_answers(row, kind)) if own_answer is None else [own_answer]
    if own_prompt is None:
        yield from _conversations(row, own_answer, answers, kind)
    for prompt, answer in itertools.product(prompts, answers):
        if prompt != answer:
            yield {"prompt_key": prompt, "answer_key": answer}


def _whole_text(row: Fields, source: DataSource, kind: Kind) -> list[Reading]:
    """Return the reading of a row that consists of a single text, as in language-model pre-training. Empty
    for any other row."""
    usual = (_PROMPTS, _TEXTS, _ANSWERS, _FINAL_ANSWERS, _CONVERSATIONS, _SYSTEMS, _TOOLS, _BESIDE_TEXTS)
    others = set(itertools.chain(*usual)) & row.keys() or any(map(source.get, FIELD_KEYS))
    text = row.get("text")
    is_alone = kind is Kind.ANSWERS and isinstance(text, str) and not others and not _roles(text)
    return [{"prompt_key": [], "answer_key": "text"}] if is_alone else []


def _conversations(row: Fields, own_answer: Any, answers: Sequence[Any], kind: Kind) -> Iterator[Reading]:
    for name in (*_CONVERSATIONS, "text"):
        if _roles(row.get(name))[-1:] != ["assistant"]:
            continue
        if own_answer is None:
            yield {"messages_key": name}
        if own_answer is not None or kind is Kind.REFERENCES:
            for answer in answers:
                yield {"messages_key": name, "answer_key": answer}


def _pairs(row: Fields, source: DataSource, prompts: Sequence[Any]) -> Iterator[Reading]:
    own_chosen, own_rejected = map(source.get, PAIR_KEYS)
    for usual_chosen, usual_rejected in _PAIRS:
        chosen, rejected = own_chosen or usual_chosen, own_rejected or usual_rejected
        if not (own_chosen or chosen in row) or not (own_rejected or rejected in row):
            continue
        reading = {"chosen_key": chosen, "rejected_key": rejected}
        # Ignore a prompt next to complete conversations: it adds nothing, and may be only part of their
        # beginning.
        first_role = next(iter(_roles(row.get(str(chosen)))), "assistant")
        if source.get("prompt_key") is None and first_role != "assistant":
            yield reading
        else:
            for prompt in prompts:
                yield {"prompt_key": prompt, **reading}


def _prompts(row: Fields, kind: Kind) -> Iterator[str | list[str]]:
    """Yield the fields, or lists of fields, that may hold the prompt."""
    names = _present(row, _PROMPTS)
    if "input" in row and "instruction" not in row:
        names.append("input")
    if kind is Kind.REFERENCES:
        # Accept a name that only one data set uses (LiveCodeBench, MBPP) if another field identifies the set,
        # because elsewhere the name means something else.
        for name, of_set in (("question_content", "public_test_cases"), ("text", "test_list")):
            if {name, of_set} <= row.keys():
                names.append(name)
    for name in names:
        # Further fields of the same prompt: Alpaca's input, Dolly's context, starter code of programming
        # tasks.
        behind = (
            ["input", "context"]
            if name == "instruction"
            else ["starter_code"]
            if kind is Kind.REFERENCES
            else []
        )
        parts = [name, *(each for each in behind if isinstance(row.get(each), str | None) and each in row)]
        yield parts if len(parts) > 1 else name
        for text in _TEXTS:
            if isinstance(row.get(text), str) and text not in parts:
                yield [text, name]
    for name in _CONVERSATIONS:
        roles = _roles(row.get(name))
        if roles and (kind is Kind.PAIRS or roles[-1] != "assistant"):
            yield name


def _answers(row: Fields, kind: Kind) -> Iterator[str | list[str]]:
    """Yield the fields, or lists of fields, that may hold the answer."""
    if kind is Kind.ANSWERS:
        yield from _present(row, _ANSWERS)
        return
    verl = row.get("reward_model")
    if isinstance(verl, Mapping) and "ground_truth" in verl:
        yield _VERL
        return
    for together in (_STATEMENTS, _CASES):
        if any(row.get(name) is not None for name in together[:2]):
            names = _present(row, together)
            yield names if len(names) > 1 else names[0]
    # "test" may mean anything, so require that it contains a test function (KodCode).
    tests = (*_TESTS, "test") if "def test" in str(row.get("test")) else _TESTS
    # Prefer a final answer over a worked solution, which is not the reference.
    for name in _present(row, (*tests, *_FINAL_ANSWERS)) or _present(row, _SOLUTIONS):
        # Add the field that names the function under test (DeepCoder).
        yield [name, "metadata"] if name in _TESTS and _names_function(row.get("metadata")) else name


def _names_function(metadata: Any) -> bool:
    return isinstance(metadata, str | Mapping) and "func_name" in metadata


def _present(row: Fields, names: Sequence[str]) -> list[str]:
    """Return the names of the fields that a record has. Null fields are dropped, unless all are null."""
    found = [name for name in names if name in row]
    return [name for name in found if row[name] is not None] or found


def _fault_of_reading(row: Fields, reading: Reading, kind: Kind, origin: str) -> str | None:
    """Return a message about what a reading would leave out of the prompt, or None."""
    named: Any = reading.get("prompt_key", reading.get("messages_key", reading.get("chosen_key")))
    keys = fields_of_key(named)
    return fault_of_columns(row, [value_of(row, key, origin) for key in keys], kind is Kind.ANSWERS)


def _beside(row: Fields, source: DataSource, found: Reading, origin: str) -> Iterator[tuple[str, Any]]:
    """Yield keys for a record's secondary fields: its system message, its tools, and the fields that verl's
    rewards read."""
    if source.get("system_key") is None:
        for name in _SYSTEMS:
            # Use 0 as the default, so that a missing field differs from one that holds null.
            if isinstance(row.get(name, 0), str | None):
                yield "system_key", name
                break
    # Data sets in Hermes' form list the tools in the system message as well.
    if source.get("tools_key") is None and not _system_lists_tools(row, found, origin):
        for name in _TOOLS:
            if name in row and _are_tools(row, source, name):
                yield "tools_key", name
                break
    if source.get("extra_keys") is None and found.get("answer_key") == _VERL:
        extra = ["data_source"] if isinstance(row.get("data_source"), str) else []
        extra += ["extra_info"] if isinstance(row.get("extra_info"), Mapping) else []
        if extra:
            yield "extra_keys", extra


def _system_lists_tools(row: Fields, found: Reading, origin: str) -> bool:
    """Return whether a record's system message already lists the tools as text."""
    first = found.get("messages_key") or found.get("chosen_key") or found["prompt_key"]
    systems: list[Any] = list(map(row.get, _SYSTEMS))
    # Ignore the error here, because the reader of the record reports it.
    with contextlib.suppress(RecordError):
        stored = value_of(row, first, origin) if isinstance(first, str) else None
        messages = as_messages(stored, "", origin)
        if are_messages(messages):
            systems.append(messages[0].get("content"))
    return any(isinstance(text, str) and "<tools>" in text for text in systems)


def _are_tools(row: Fields, source: DataSource, name: str) -> bool:
    try:
        tools_of(row, cast("DataSource", {**source, "tools_key": name}), "")
    except RecordError:
        return False
    return True


def _is_gsm8k(row: Fields, source: DataSource, found: Reading, kind: Kind) -> bool:
    """Return whether the reference answers are GSM8K solutions, of which only the text after ``####`` is
    compared."""
    own = any(source.get(key) is not None for key in FIELD_KEYS)
    is_reading = found == {"prompt_key": "question", "answer_key": "answer"} and kind is Kind.REFERENCES
    return is_reading and not own and "\n####" in str(row["answer"])


def _roles(value: Any) -> list[str | None]:
    """Return the roles of stored messages. Empty for any other value."""
    try:
        found = as_messages(value, "", "")
    except RecordError:
        # Ignore the error here, because the reader of the record reports it.
        found = value
    return list(map(role_of, found)) if are_messages(found) else []
