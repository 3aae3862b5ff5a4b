"""Chat templates that behave as published ones do, and tokenizers with the special tokens that each is made
for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

DIRECTORY = Path(__file__).parent


@dataclass(frozen=True)
class Published:
    """The tokens of a published tokenizer that its template writes.

    Attributes:
        special: tokens that decoding may skip; the first one ends texts.
        stops: further tokens that generation_config.json lists as ends.
        other: added tokens that are ordinary text to a decoder.
        begins: the tokenizer has a begin-of-sequence token.
    """

    special: Sequence[str]
    stops: Sequence[str] = ()
    other: Sequence[str] = ()
    begins: str | None = None


TEMPLATES = {
    name: Published(**row)
    for name, row in yaml.safe_load((DIRECTORY / "tokens.yaml").read_text(encoding="utf-8")).items()
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the special tokens that a template is made for; line feeds and some
    words are merged."""
    published = TEMPLATES[name]
    vocabulary = {
        character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    merges = [
        ("Ċ", "Ċ"),
        ("Ġ", "t"),
        ("o", "n"),
        ("on", "e"),
        ("Ġt", "w"),
        ("Ġtw", "o"),
        (".", "Ċ"),
        ("s", "t"),
    ]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in published.special]
    )
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in published.other])
    names = {"bos_token": published.begins} if published.begins else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=published.special[0], clean_up_tokenization_spaces=False, **names
    )
    tokenizer.pad_token = published.special[-1]
    tokenizer.chat_template = (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def stop_ids(name: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the token ids at which the published generation configuration stops."""
    published = TEMPLATES[name]
    return [tokenizer.convert_tokens_to_ids(token) for token in (published.special[0], *published.stops)]
