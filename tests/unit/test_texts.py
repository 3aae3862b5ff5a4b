"""Texts of many rows at once: always those of the tokenizer's own ``batch_decode``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import BertTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from megarl.distributed.token_batches import pad_rows
from megarl.distributed.token_rows import TokenRows
from megarl.quickstart.material import make_tokenizer
from megarl.rollout import texts
from megarl.rollout.texts import decode_rows, decode_with_special_tokens, response_texts
from megarl.time_limit import time_limit
from tests.tables import read_table
from tests.templates import tokenizer_of
from tests.tiers import sampled

TABLES = read_table("texts.yaml")

SPECIAL = {"eos_token": "<eos>", "pad_token": "<pad>"}
WORDS = [
    "<pad>",
    "<eos>",
    "don",
    "'",
    "t",
    "##s",
    "it",
    ".",
    ",",
    "?",
    "'s",
    "n't",
    "a",
    "Ġb",
    "▁c",
    "<0xE2>",
    "<0x82>",
    "<0xAC>",
    "é",
    "Ã",
    "©",
]


def of_words(decoder: Any, **settings: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<pad>")
    )
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL, **settings)


def of_bytes(**settings: Any) -> PreTrainedTokenizerFast:
    """All single bytes and some pairs, so that ids at random are seldom UTF-8; added tokens of both kinds,
    and a gap in the ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        token: place for place, token in enumerate([*alphabet, "Ã©", "âĤ¬", "Ġthe", " stray", "ðŁĺ"])
    }
    vocabulary["last"] = len(vocabulary) + 3
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL, **settings)
    tokenizer.add_tokens([AddedToken("Ġfür €", normalized=False)])
    return tokenizer


class Slow(PreTrainedTokenizer):
    """A tokenizer in Python, without a backend."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**SPECIAL, **settings)

    @property
    def vocab_size(self) -> int:
        return len(WORDS)

    def get_vocab(self) -> dict[str, int]:
        return {**{word: place for place, word in enumerate(WORDS)}, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        return text.split()

    def _convert_token_to_id(self, token: str) -> int:
        return WORDS.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return WORDS[index]


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer that does more to a text than its backend."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


def shouting() -> Shouting:
    return Shouting(tokenizer_object=of_bytes().backend_tokenizer, **SPECIAL)


def byte_fallback() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "quickstart": make_tokenizer,
    "bytes": of_bytes,
    "bytes, which BPE does not clean up": lambda: of_bytes(clean_up_tokenization_spaces=True),
    "bytes, cleaned up all the same": lambda: of_bytes(
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    ),
    "word pieces, cleaned up": lambda: of_words(
        decoders.WordPiece(cleanup=False), clean_up_tokenization_spaces=True
    ),
    "word pieces": lambda: of_words(decoders.WordPiece(cleanup=False), clean_up_tokenization_spaces=False),
    "byte fallback": lambda: of_words(byte_fallback()),
    "no decoder": lambda: of_words(None),
    "decode of its own": shouting,
    "slow": Slow,
    "slow, cleaned up": lambda: Slow(clean_up_tokenization_spaces=True),
    "bert": lambda: BertTokenizer(
        vocab={
            word: place for place, word in enumerate([*WORDS, "[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]"])
        }
    ),
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: make() for name, make in TOKENIZERS.items()}


@sampled(4)
@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_texts_are_those_of_batch_decode(tokenizers: dict[str, Any], name: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[name]
    some = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    rows = data.draw(st.lists(some, min_size=1, max_size=6))
    if data.draw(st.booleans()):
        rows = [
            *rows,
            list(range(len(tokenizer))),
            list(range(len(tokenizer)))[::-1],
        ]  # more than the table of bytes has entries
    for decode, skips in ((decode_rows, True), (decode_with_special_tokens, False)):
        assert decode(tokenizer, TokenRows.of(rows)) == tokenizer.batch_decode(
            rows, skip_special_tokens=skips
        )


def test_large_batches_of_byte_level_tokens_take_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = of_bytes()
    rows = [
        [place % len(tokenizer) for place in range(start, start + start % 9)]
        for start in range(len(tokenizer))
    ]
    expected = tokenizer.batch_decode(rows, skip_special_tokens=True)
    monkeypatch.setattr(texts, "_AT_ONCE", 7)  # rows in many parts, some of one row that is longer
    asked: list[Any] = []
    monkeypatch.setattr(texts.ByteTable, "decode", counted(texts.ByteTable.decode, asked))
    assert decode_rows(tokenizer, TokenRows.of(rows)) == expected
    assert len(asked) == 2, "one check of the table, and the rows"
    assert decode_rows(tokenizer, TokenRows.of(rows)) == expected
    assert len(asked) == 3


def counted(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    return call


def test_added_tokens_are_in_the_next_table() -> None:
    tokenizer = of_bytes()
    rows = [list(range(len(tokenizer) + 1)), [len(tokenizer), 5]]
    before = decode_rows(tokenizer, TokenRows.of(rows))
    assert before == tokenizer.batch_decode(rows, skip_special_tokens=True)
    tokenizer.add_tokens(["<tool>"])
    after = decode_rows(tokenizer, TokenRows.of(rows))
    assert after == tokenizer.batch_decode(rows, skip_special_tokens=True) != before


def test_a_decoder_that_joins_other_bytes_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_bytes_of", lambda token: token.encode())
    tokenizer = of_bytes()
    rows = [list(range(len(tokenizer)))] * 2
    assert decode_rows(tokenizer, TokenRows.of(rows)) == tokenizer.batch_decode(
        rows, skip_special_tokens=True
    )


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=6), st.integers(1, 9))
def test_token_rows_are_slices_of_their_batch(cuts: Sequence[tuple[int, int]], at_once: int) -> None:
    ids = np.arange(len(cuts) * 8).reshape(len(cuts), 8)
    arrays = [ids[row, cut[0] : sum(cut)] for row, cut in enumerate(cuts)]
    rows, expected = TokenRows.of_arrays(arrays), [array.tolist() for array in arrays]
    assert list(rows) == [rows[row] for row in range(len(rows))] == list(rows[:]) == expected
    assert [rows[row - len(rows)] for row in range(len(rows))] == expected
    assert list(rows[1::2]) == expected[1::2]
    assert rows.joined.tolist() == [token for row in expected for token in row]
    parts = list(rows.parts(at_once))
    assert [row for part in parts for row in part] == expected
    assert all(len(part) == 1 or part.tokens < 2 * at_once + 4 for part in parts)
    assert list(TokenRows.of(expected)) == expected


def test_no_rows() -> None:
    assert decode_rows(make_tokenizer(), TokenRows.of([])) == []
    assert pad_rows([], 0)[0].shape == (0, 0) and list(TokenRows.of([[]])) == [[]]


def harmony(*parts: str) -> tuple[Any, list[int]]:
    """A response of GPT-OSS, as its token ids."""
    tokenizer = tokenizer_of("gpt-oss")
    return tokenizer, tokenizer("".join(parts), add_special_tokens=False)["input_ids"]


THINKS = "<|channel|>analysis<|message|>Is it final? 2+2<|end|><|start|>assistant"
SAYS = "<|channel|>final<|message|>Four."


@pytest.mark.parametrize(
    ("parts", "said"),
    TABLES["of harmony the last final message is the response"],
)
def test_of_harmony_the_last_final_message_is_the_response(parts: tuple[str, ...], said: str) -> None:
    tokenizer, ids = harmony(*parts)
    assert response_texts(tokenizer, TokenRows.of([ids, ids])) == [said, said]
    assert decode_with_special_tokens(tokenizer, TokenRows.of([ids])) == ["".join(parts)]


@pytest.mark.parametrize("ending", ["", "<|message|>", THINKS + SAYS])
def test_the_time_to_find_the_final_message_grows_as_the_response(ending: str) -> None:
    """A policy that repeats a channel took minutes for 100,000 tokens, whose time grew as their square."""
    tokenizer, channel = harmony("<|channel|>")
    row = channel * 100_000 + harmony(ending)[1]
    with time_limit(20.0):
        assert response_texts(tokenizer, TokenRows.of([row])) == ["Four." if SAYS in ending else ""]


def test_other_formats_are_decoded_whole() -> None:
    tokenizer = tokenizer_of("qwen3")
    ids = tokenizer("<think>\nadd\n</think>\n\nFour.<|im_end|>", add_special_tokens=False)["input_ids"]
    assert response_texts(tokenizer, TokenRows.of([ids])) == ["<think>\nadd\n</think>\n\nFour."]
