"""Special tokens and the size of the vocabulary of a model whose config is made: from what a user says, or from files that say it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from converters.errors import ConversionError
from converters.foreign.options import OpeningOptions
from converters.foreign.settings import ForeignSettings
from converters.json_file import read_json_object
from converters.layouts import padded_vocab_size

_MEGATRON_MULTIPLE = 128


def vocab_size_of(settings: ForeignSettings, options: OpeningOptions, rows: int) -> int:
    """Rows of the embedding that belong to tokens.

    Args:
        settings: of the trainer.
        options: of the user, who comes first.
        rows: of the stored embedding, padding included.

    Raises:
        ConversionError: nobody says it, or what is said does not fit the embedding.
    """
    fix = f"pass --vocab-size N, the vocab_size of the model's config.json, at most {rows}"
    if options.vocab_size is not None:
        if not 1 <= options.vocab_size <= rows:
            raise ConversionError(f"vocab-size = {options.vocab_size}: the stored embedding has {rows} rows, padding included", fix)
        return options.vocab_size
    said = settings.values.get("vocab_size")
    counts_more = "null" in str(settings.values.get("tokenizer_type") or "").lower()  # adds a token to what it is told
    if not isinstance(said, int) or isinstance(said, bool) or said < 1 or counts_more:
        raise ConversionError(f"{settings.origin} does not say how many of the {rows} rows of the embedding are padding", fix)
    multiple = settings.values.get("make_vocab_size_divisible_by") or _MEGATRON_MULTIPLE
    ranks = settings.values.get("tensor_model_parallel_size") or 1
    if rows not in (said, padded_vocab_size(said, ranks, multiple)):
        raise ConversionError(
            f"{settings.origin}: vocab_size = {said}, padded to a multiple of {multiple} x {ranks}, does not make the {rows} stored rows",
            fix,
        )
    return said


def token_entries(options: OpeningOptions) -> dict[str, Any]:
    """Config entries of special tokens. Those that nobody says are null, so that no class fills in its own."""
    entries: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if options.tokenizer is not None:
        for name in ("config.json", "generation_config.json"):
            found = _read(options.tokenizer / name)
            entries |= {key: found[key] for key in entries if found.get(key) is not None}
    if options.eos_token_ids is not None:
        ids = list(options.eos_token_ids)
        entries["eos_token_id"] = ids[0] if len(ids) == 1 else (ids or None)
    return entries


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
