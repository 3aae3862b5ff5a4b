"""Fast decoding of batches of token ids. The texts are those of ``tokenizer.batch_decode``.

transformers inspects each token and calls the tokenizers library once per row. This module passes all rows in
one call. If the decoder only concatenates the tokens' bytes (``ByteLevel``: GPT-2, Qwen, Llama 3 and others),
batches with more tokens than the vocabulary are decoded with a table of these bytes.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.distributed.token_rows import TokenRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Number of tokens decoded at a time, which bounds the memory.
_AT_ONCE = 1 << 20


# Special tokens of the Harmony format, in which GPT-OSS writes reasoning and answer as messages in channels.
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")

_FINAL = "final"
# Only this many tokens after ``<|channel|>`` are decoded to find the channel's name, so that a long header
# costs no time.
_LONGEST_HEADER = 64


def response_texts(tokenizer: PreTrainedTokenizerBase, rows: TokenRows) -> list[str]:
    """Decode responses as rewards read them: without special tokens, and for Harmony only the last message of
    the final channel.

    Without special tokens, a Harmony response would be one text of reasoning, channel names and the answer.
    """
    marks = _harmony_ids(tokenizer)
    texts = decode_rows(tokenizer, rows)
    if marks is None:
        return texts
    return [_final_message(tokenizer, ids, marks, text) for ids, text in zip(rows, texts, strict=True)]


def is_harmony(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer has the special tokens of the Harmony format, in which a response is a
    sequence of messages and rewards read only the final one."""
    return _harmony_ids(tokenizer) is not None


def _harmony_ids(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, int] | None:
    added = getattr(tokenizer, "added_tokens_encoder", {})
    return {mark: added[mark] for mark in _HARMONY} if {*_HARMONY} <= added.keys() else None


def _final_message(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], marks: Mapping[str, int], text: str
) -> str:
    """Return the last message of the final channel. If there are no channels, return the whole text; if none
    is final, an empty text."""
    tokens = list(map(int, ids))
    ends = set(marks.values())
    if marks["<|channel|>"] not in tokens:
        return text
    # Scan backwards, so that each token is visited once: a policy may write thousands of channels.
    message, end, next_mark = None, len(tokens), len(tokens)
    for place in reversed(range(len(tokens))):
        token = tokens[place]
        if token == marks["<|message|>"]:
            message, end = place, next_mark
        if token == marks["<|channel|>"] and message is not None:
            header = tokens[place + 1 : min(message, place + 1 + _LONGEST_HEADER)]
            if tokenizer.decode(header, skip_special_tokens=True).strip().startswith(_FINAL):
                return str(tokenizer.decode(tokens[message + 1 : end], skip_special_tokens=True))
        if token in ends:
            next_mark = place
    return ""


def decode_with_special_tokens(tokenizer: PreTrainedTokenizerBase, rows: TokenRows) -> list[str]:
    """Decode rows of token ids, including special tokens."""
    decode = (
        tokenizer.backend_tokenizer.decode_batch
        if _decodes_as_its_backend(tokenizer)
        else tokenizer.batch_decode
    )
    texts: list[str] = decode(list(rows), skip_special_tokens=False)
    return texts


def decode_rows(tokenizer: PreTrainedTokenizerBase, rows: TokenRows) -> list[str]:
    """Decode rows of token ids without special tokens. Equals ``tokenizer.batch_decode(rows,
    skip_special_tokens=True)``.

    Tokenizers that override ``decode``, have no backend of the tokenizers library, or clean up spaces are
    called directly.
    """
    if len(rows) == 0:
        return []
    if not _decodes_as_its_backend(tokenizer):
        texts: list[str] = tokenizer.batch_decode(list(rows), skip_special_tokens=True)
        return texts
    backend = tokenizer.backend_tokenizer
    table = _table_of(tokenizer, backend) if rows.tokens > backend.get_vocab_size() else None
    if table is not None:
        return table.decode(rows)
    decoded: list[str] = backend.decode_batch(list(rows), skip_special_tokens=True)
    return decoded


def _decodes_as_its_backend(tokenizer: Any) -> bool:
    """Return whether transformers returns the tokenizers library's texts unchanged."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    for name in ("decode", "batch_decode", "_decode"):
        if getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name):
            return False
    if not tokenizer.clean_up_tokenization_spaces:
        return True
    # Newer versions of transformers ignore clean_up_tokenization_spaces for BPE, because it would corrupt the
    # text.
    kept = not getattr(
        tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True
    )
    return kept and type(tokenizer.backend_tokenizer.model).__name__ == "BPE"


@dataclass(frozen=True, slots=True)
class ByteTable:
    """Byte strings of all token ids, as flat arrays.

    Attributes:
        data: uint8, concatenated bytes of all tokens.
        first: int64 [tokens + 1], offset of each token's first byte in ``data``.
        lengths: int64 [tokens + 1], number of bytes of each token. 0 for special tokens, for unused ids, and
            for the last entry, which stands for all larger ids.
    """

    data: np.ndarray
    first: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, tokens: Mapping[int, bytes]) -> ByteTable:
        """Build the table from a mapping of token ids to bytes."""
        pieces = [tokens.get(number, b"") for number in range(max(tokens, default=-1) + 2)]
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        return cls(np.frombuffer(b"".join(pieces), np.uint8), np.cumsum(lengths) - lengths, lengths)

    def decode(self, rows: TokenRows) -> list[str]:
        """Decode rows to texts. Invalid UTF-8 becomes U+FFFD."""
        return list(chain.from_iterable(map(self._decode, rows.parts(_AT_ONCE))))

    def _decode(self, rows: TokenRows) -> Iterator[str]:
        ids = rows.joined
        beyond = len(self.lengths) - 1
        ids = np.where((ids < 0) | (ids > beyond), beyond, ids)
        lengths = self.lengths[ids]
        ends = np.cumsum(lengths)
        size = int(ends[-1]) if len(ends) else 0
        # Index into ``data`` of each output byte: the offset of its token plus its position in the token.
        places = np.repeat(self.first[ids] - (ends - lengths), lengths)
        places += np.arange(size)
        joined = self.data[places].tobytes()
        begun = 0
        # Split the joined bytes at the ends of the rows.
        for end in np.concatenate([[0], ends])[np.cumsum(rows.lengths)].tolist():
            yield joined[begun:end].decode("utf-8", "replace")
            begun = end


# Weak keys: a table is dropped together with its tokenizer.
_tables: weakref.WeakKeyDictionary[Any, tuple[Any, ByteTable | None]] = weakref.WeakKeyDictionary()


def _table_of(tokenizer: Any, backend: Any) -> ByteTable | None:
    """Return the cached byte table of a tokenizer, or None if its decoder does more than concatenate
    bytes."""
    state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
    if (json.loads(state) or {}).get("type") != "ByteLevel":
        return None
    added = backend.get_added_tokens_decoder()
    # Part of the cache key, because tokens may be added to a tokenizer after its table was built.
    now = (
        state,
        backend.get_vocab_size(),
        {number: (token.content, token.special) for number, token in added.items()},
    )
    known = _tables.get(tokenizer)
    if known is None or known[0] != now:
        known = _tables[tokenizer] = now, _checked_table(backend, added)
    return known[1]


def _checked_table(backend: Any, added: Mapping[int, Any]) -> ByteTable | None:
    """Build a byte table and compare its texts with those of the tokenizers library for the whole vocabulary.
    Return None if they differ, as they may with a future version of that library."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = {number: _bytes_of(token) for token, number in vocabulary.items()}
    # If both have a number, the library uses the added token.
    for number, token in added.items():
        tokens[number] = b"" if token.special else _bytes_of(token.content)
    table = ByteTable.of(tokens)
    numbers = list(range(len(table.lengths)))
    every = TokenRows.of([numbers[start : start + 256] for start in range(0, len(numbers), 256)])
    is_right = table.decode(every) == backend.decode_batch(list(every), skip_special_tokens=True)
    return table if is_right else None


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a byte-level token. A token with a character outside the byte-level alphabet is
    encoded as UTF-8."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


def _byte_characters() -> dict[str, int]:
    """Map the characters of byte-level tokens to bytes, as GPT-2 does: printable Latin-1 characters stand for
    themselves, the other bytes for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted({*range(256)} - {*printable})
    characters = map(chr, [*printable, *range(256, 256 + len(others))])
    return dict(zip(characters, [*printable, *others], strict=True))


_BYTE_OF = _byte_characters()
