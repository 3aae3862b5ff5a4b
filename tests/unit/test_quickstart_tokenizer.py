"""The quickstart's tokenizer: lossless, reproducible, one token a digit, and the same after a save and a
load."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megarl.quickstart.material import VOCABULARY_SIZE, generate_problems, make_tokenizer

TOKENIZER = make_tokenizer()
PROBLEMS = generate_problems(1009, 42, "train") + generate_problems(503, 43, "validation")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return TOKENIZER


def test_vocabulary_is_a_small_prime(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == VOCABULARY_SIZE < 512
    assert all(VOCABULARY_SIZE % divisor for divisor in range(2, VOCABULARY_SIZE))
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCABULARY_SIZE))


def test_padding_and_end_are_distinct_and_never_come_from_problems(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    special = {tokenizer.pad_token_id, tokenizer.eos_token_id}
    assert len(special) == 2
    assert None not in special
    assert all(
        special.isdisjoint(tokenizer(problem.prompt + problem.answer)["input_ids"]) for problem in PROBLEMS
    )


def test_making_it_twice_gives_the_same_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert make_tokenizer().backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


@settings(derandomize=True, max_examples=200)
@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30).filter(
        lambda text: "<" not in text
    )
)
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == unicodedata.normalize("NFC", text)


def test_problems_round_trip_and_are_short(tokenizer: PreTrainedTokenizerFast) -> None:
    for problem in PROBLEMS:
        prompt, answer = tokenizer(problem.prompt)["input_ids"], tokenizer(problem.answer)["input_ids"]
        assert tokenizer.decode(prompt) == problem.prompt
        assert len(prompt) <= 24
        assert len(answer) == len(problem.answer) <= 2
        assert tokenizer(problem.prompt + problem.answer)["input_ids"] == prompt + answer


def test_digits_are_single_tokens_and_words_are_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("Ben has 407") == ["Ben", "Ġhas", "Ġ", "4", "0", "7"]
    words = {word for problem in PROBLEMS for word in problem.prompt.split() if word.isalpha()}
    assert len(words) > 25
    assert [
        word
        for word in words
        if len(tokenizer.tokenize(f" {word}")) > 1 and len(tokenizer.tokenize(word)) > 1
    ] == []


def test_saved_tokenizer_is_the_same(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.pad_token_id, loaded.eos_token_id, len(loaded)) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        len(tokenizer),
    )
    for problem in PROBLEMS[::13]:
        assert loaded(problem.prompt)["input_ids"] == tokenizer(problem.prompt)["input_ids"]
    assert loaded.padding_side == "right"


def test_a_qwen2_folder_gives_the_same_tokenizer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Transformers picks the class by the model type; no token may be added beyond the embedding."""
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.tokenize("Ben has 407 cards.") == tokenizer.tokenize("Ben has 407 cards.")
