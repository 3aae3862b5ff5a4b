"""Detection of columns that are not read, although the records make no sense without them: choices, images,
labels, earlier turns, template variables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.errors import RecordError

if TYPE_CHECKING:
    from megarl.data.rows import Fields

_CHOICES = ("choices", "options")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_PLACE_OF_MEDIA = re.compile(r"<(?:image|video|audio)(?:[ _]?\d+)?>")


def fault_of_columns(row: Fields, prompts: Sequence[Any], learns: bool) -> str | None:
    """Return a message about columns that inferred keys ignore although they matter, with its fix, or None.

    This check is only for inferred keys: a user who names keys has decided to ignore the other columns.

    Args:
        row: the first record of a source.
        prompts: values of the prompt fields.
        learns: the answers are trained on.
    """
    media = _media_of(row)
    if media is not None:
        return (
            f"{media!r} holds data other than text, but only text is read. Fix: use text-only "
            "data; to use the text without it, name prompt_key and answer_key, or messages_key"
        )
    written = "\n".join(_texts(list(prompts)))
    for name in _CHOICES:
        choices = list(_texts(_of_json(row.get(name))))
        missing = next((text for text in choices if text.strip() not in written), None)
        # A single "choice" is a setting, not a list of choices.
        if missing is not None and len(choices) > 1:
            return (
                f"{name!r} holds choices that the prompt does not have, such as {missing[:40]!r}. Fix: write "
                "them into the prompt, as 'A. ...', and the letter as the answer; for open questions name "
                "prompt_key and answer_key"
            )
    # KTO's format: one answer per row, and a label that is false for bad answers.
    if learns and isinstance(row.get("label"), bool):
        return (
            "'label' marks the good answers, but all answers would be learned. Fix: keep the "
            "records whose label is true, without that column, or name prompt_key and answer_key"
        )
    history = _of_json(row.get("history"))
    if isinstance(history, list) and history and all(isinstance(each, str) for each in prompts):
        return (
            "'history' holds earlier turns of the conversation, which are not read. Fix: write the whole "
            "conversation as messages, or name prompt_key and answer_key to leave them out"
        )
    if row.get("chat_template_kwargs"):
        return (
            "'chat_template_kwargs' has values of the chat template for each record, but only "
            "those of a run are read. Fix: name messages_key, or prompt_key and answer_key, and "
            "write the values of all records into policy.tokenizer.chat_template_kwargs"
        )
    return None


def refuse_media(row: Fields, texts: Sequence[str], origin: str) -> None:
    """Reject a record whose text contains a placeholder for an image, video or sound that a column holds.

    Raises:
        RecordError: it contains one.
    """
    media = _media_of(row)
    found = None if media is None else next(filter(None, map(_PLACE_OF_MEDIA.search, texts)), None)
    if found is not None:
        raise RecordError(
            f"{origin}: its text has the placeholder {found[0]} for the content of {media!r}, but "
            "only text is read. Fix: use text-only data, or leave such records out with "
            "data.on_bad_record=skip"
        )


def _media_of(row: Fields) -> str | None:
    return next((name for name in _MEDIA if row.get(name)), None)


def _of_json(value: Any) -> Any:
    """Parse a text that is JSON. Return any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts and numbers in a nested value, except the letters of choices (``label``, ``key``)."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in ("label", "key"):
                yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
