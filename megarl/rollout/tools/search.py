"""The tool ``search``: full-text search over a user's documents with SQLite's FTS5, ranked by BM25."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config.data_sources import NAMED_SETS
from megarl.errors import ConfigError, DataError, Violation

_WORD = re.compile(r"\w+")
_TEXT_KEYS = ("text", "content", "contents", "body", "passage")
# Above this number of words, repeated words are dropped: ranking time grows quadratically with repetitions,
# and a policy may repeat a word endlessly.
_MOST_REPEATED = 32
# Maximum characters of each document in a result.
_SHOWN = 2000


class DocumentIndex:
    """An in-memory full-text index that all threads share.

    Args:
        path: a JSON Lines file with one document per line: its text as ``text`` (or ``content``,
            ``contents``, ``body``, ``passage``) and optionally a ``title``. Lines may also be HotpotQA rows;
            each of their paragraphs is a document, and duplicates are dropped. Instead of a file, the name of
            a known data set of such rows (``megarl.config.data_sources.NAMED_SETS``).
        key: dotted configuration key of the path, for error messages.

    Raises:
        ConfigError: the file cannot be read, has no documents, or has a line that is not a document.
    """

    def __init__(self, path: str, key: str) -> None:
        self._lock = threading.Lock()
        # All threads share this connection; the lock serialises their queries.
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute(
            "CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')"
        )
        try:
            rows = list(dict.fromkeys(_documents(path)))
        except (OSError, ValueError, DataError) as error:
            raise ConfigError(
                [Violation(key, path, str(error), "give JSON lines, each an object with a text")]
            ) from error
        if not rows:
            raise ConfigError(
                [Violation(key, path, "it has no documents", "give JSON lines, an object a document")]
            )
        self._index.executemany("INSERT INTO documents VALUES (?, ?)", rows)

    def search(self, query: str, count: int = 3) -> str:
        """Return the ``count`` documents that match the words of a query best, as one numbered text.

        Raises:
            ValueError: the query has no words.
        """
        words = _WORD.findall(query)
        if not words:
            raise ValueError("the query has no words")
        if len(words) > _MOST_REPEATED:
            words = list(dict.fromkeys(map(str.lower, words)))
        # Quote each word, so that FTS5 reads no word as an operator such as NOT.
        match = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            found = self._index.execute(
                # Break ties by rowid, so that the order is the same in every run.
                "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?",
                (match, count),
            ).fetchall()
        shown: list[str] = []
        for place, (title, text) in enumerate(found, start=1):
            heading = f"{title}\n" if title else ""
            shown.append(f"[{place}] {heading}{text[:_SHOWN]}")
        return "\n\n".join(shown) or "nothing was found"


def _documents(path: str) -> Iterator[tuple[str, str]]:
    if path in NAMED_SETS:
        from megarl.data.rows import rows_of

        for origin, row in rows_of({"name": path}):
            yield from _documents_of(row, origin)
        return
    with Path(path).expanduser().open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number} is no JSON: {error}") from error
                yield from _documents_of(row, f"line {number}")


def _documents_of(row: Any, origin: str) -> Iterator[tuple[str, str]]:
    for title, text in _titles_and_texts(row, origin):
        try:
            f"{title}{text}".encode()
        except UnicodeEncodeError as error:
            shown = error.object[error.start].encode("unicode_escape").decode()
            raise ValueError(
                f"{origin} has {shown}, which is half of a surrogate pair and no character"
            ) from error
        yield title, text


def _titles_and_texts(row: Any, origin: str) -> Iterator[tuple[str, str]]:
    context = row.get("context") if isinstance(row, Mapping) else None
    if isinstance(context, Mapping) and {"title", "sentences"} <= context.keys():
        try:
            paragraphs = list(zip(context["title"], map("".join, context["sentences"]), strict=True))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{origin} has a context that is no list of titles and one of sentences"
            ) from error
        for title, sentences in paragraphs:
            yield str(title), sentences
        return
    for key in _TEXT_KEYS if isinstance(row, Mapping) else ():
        if isinstance(row.get(key), str):
            yield str(row.get("title") or ""), row[key]
            return
    raise ValueError(f"{origin} is no object with a text under {', '.join(_TEXT_KEYS)}")
