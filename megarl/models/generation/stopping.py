"""Stop conditions of responses: stop tokens and stop strings, per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.errors import BatchError


class StopRules:
    """Stop tokens and stop strings for the rows of a batch. The stop token or string remains part of the
    response.

    Args:
        stop_token_ids: tokens that end a response.
        stop_strings: for each row, strings that end the response as soon as the decoded text contains one.
        tokenizer: decodes responses; needed only if a row has stop strings.
    """

    def __init__(
        self, stop_token_ids: Sequence[int], stop_strings: Sequence[Sequence[str]], tokenizer: Any
    ) -> None:
        self._token_ids = np.array(sorted(set(stop_token_ids)), dtype=np.int64)
        self._strings = list(map(tuple, stop_strings))
        self._tokenizer = tokenizer

    def finished(self, rows: np.ndarray, newest: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """Return whether each of ``rows`` ends with its newest token, [n] bool.

        Args:
            rows: [n], indices of rows in the batch.
            newest: [n] int64, the newest token of each of these rows.
            answers: [b, t] int64, the response tokens so far of all rows of the batch, including the newest.
        """
        finished = np.isin(newest, self._token_ids)
        for place, row in enumerate(rows if any(self._strings) else ()):
            if self._strings[row] and not finished[place]:
                # Decode the entire response each time: a stop string may span tokens, and one character may
                # consist of several tokens.
                text = self._tokenizer.decode(answers[row].tolist(), skip_special_tokens=False)
                finished[place] = any(stop in text for stop in self._strings[row])
        return finished


def stop_strings_of_rows(
    configured: Sequence[str] | None, of_samples: Sequence[Any] | None, rows: int
) -> list[tuple[str, ...]]:
    """Return the stop strings of each row: the configured ones followed by the row's own.

    Raises:
        BatchError: a stop string is empty or not a string.
    """
    common = tuple(configured or ())
    _refuse_empty(common, "policy.generation.stop_strings")
    if of_samples is None:
        return [common] * rows
    found = []
    for row, given in enumerate(of_samples):
        own = tuple([given] if isinstance(given, str) else (given or ()))
        _refuse_empty(own, f"stop_strings[{row}]")
        found.append(common + own)
    return found


def _refuse_empty(strings: Sequence[Any], where: str) -> None:
    wrong = [string for string in strings if not isinstance(string, str) or not string]
    if wrong:
        raise BatchError(
            f"{where} has {wrong[0]!r}: a stop string has at least one character, because every text "
            "contains the empty one, and each "
            "response would end after its first token. Fix: leave it out, or write null for no stop strings"
        )
