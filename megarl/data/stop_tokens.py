"""The tokens that end a response, collected from all files of a model that declare them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.nested import at
from megarl.data.chat_template import ChatTemplate
from megarl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = "chat template"
_FILES = ("generation_config.json", "config.json")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_length")


def stop_tokens_of(tokenizer: PreTrainedTokenizerBase, model_name: str | None) -> dict[int, list[str]]:
    """Return the token ids that end a response, each with the files that declare it.

    All are needed, because a model may stop at any of them and its files disagree. The tokenizer declares one
    EOS token, ``generation_config.json`` a list (Llama 3 ends turns with ``<|eot_id|>``, Gemma with
    ``<end_of_turn>``), and a base model's files omit the token with which its chat template ends turns.

    Args:
        tokenizer: the model's tokenizer; its EOS token comes first.
        model_name: Hugging Face id or directory of the model; None if only the tokenizer is known.

    Raises:
        ModelError: a file of the model is damaged.
    """
    found: dict[int, list[str]] = {int(tokenizer.eos_token_id): ["tokenizer"]}
    for name in _FILES if model_name else ():
        for token in _ids_in(_content(str(model_name), name), name):
            # Ids outside of the vocabulary cannot be sampled.
            if 0 <= token < len(tokenizer):
                found.setdefault(token, []).append(name)
    for token in ChatTemplate(tokenizer).stop_tokens:
        found.setdefault(token, []).append(TEMPLATE)
    return found


def describe_stop_tokens(tokenizer: PreTrainedTokenizerBase, model_name: str | None) -> str:
    """Describe the stop tokens and their origins, for the report of a dry run."""
    found = stop_tokens_of(tokenizer, model_name)
    return ", ".join(
        f"{tokenizer.convert_ids_to_tokens(token)!r} ({token}: {', '.join(places)})"
        for token, places in found.items()
    )


def generation_config_of(tokenizer: PreTrainedTokenizerBase, model_name: str) -> dict[str, Any] | None:
    """Return the contents of ``generation_config.json`` for an exported model. Return None if the model needs
    no such file.

    The model's own contents are kept, even if transformers would not accept them. If the chat template ends
    turns with a token that no file declares, as for a base model trained on conversations, the token is
    added. Otherwise a server of the exported model would not stop there.

    Args:
        tokenizer: the model's tokenizer.
        model_name: Hugging Face id or directory from which the model was loaded.
    """
    own, config = (_content(model_name, name) for name in _FILES)
    # Older models store these settings in config.json, which transformers drops when it writes the file
    # again.
    if not own and at(config, "do_sample"):
        own = {name: config[name] for name in _SAMPLING if config.get(name) is not None}
    stops = list(stop_tokens_of(tokenizer, model_name))
    in_own = list(_ids_in(own, _FILES[0]))
    known = {*in_own, *_ids_in(config, _FILES[1])}
    # A server then finds all stop tokens in config.json.
    if not own and set(stops) <= known:
        return None
    if set(stops) <= set(in_own):
        return dict(own)
    return {**own, "eos_token_id": stops if len(stops) > 1 else stops[0]}


def _ids_in(content: Mapping[str, Any], file: str) -> Iterator[int]:
    ends = content.get("eos_token_id")
    # A multimodal model declares the token in the section of its text model.
    if ends is None and isinstance(content.get("text_config"), dict):
        ends = content["text_config"].get("eos_token_id")
    for end in ends if isinstance(ends, list) else [ends]:
        if type(end) is int or (isinstance(end, float) and end.is_integer()):
            yield int(end)
        elif end is not None:
            raise ModelError(
                f"{file}: eos_token_id = {ends!r}: token ids are whole numbers. Fix: correct the file of the "
                "model, which would otherwise not stop at this token"
            )


def _content(model_name: str, file: str) -> Mapping[str, Any]:
    """Read a JSON file of a model. Return an empty mapping if the model does not have it.

    Raises:
        ModelError: the file is damaged.
    """
    directory = Path(model_name).expanduser()
    try:
        path = directory / file if directory.is_dir() else _cached(model_name, file)
    # A missing model is reported elsewhere.
    except (OSError, ValueError):
        return {}
    if path is None or not Path(path).exists():
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Fix: fetch the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} has no JSON object. Fix: fetch the model again")
    return content


def _cached(model_name: str, file: str) -> str | None:
    """Return the local path of a hub model's file, downloaded if necessary. Return None if the model does not
    have it."""
    from transformers.utils import cached_file

    # A private option of transformers: without it, a file that the model does not have is an error.
    options = {"_raise_exceptions_for_missing_entries": False}
    # Try the local cache first, so that a file on disk does not wait for the network.
    found = cached_file(
        model_name, file, local_files_only=True, _raise_exceptions_for_connection_errors=False, **options
    )
    return found if found is not None else cached_file(model_name, file, **options)
