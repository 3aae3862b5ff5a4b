"""Open checkpoints of other trainers: read their model settings, and map their tensors to this library's
keys.

Other state is in ``common.pt`` or, since Megatron-Core 0.18, in an object among the tensors; reading it runs
no code. When a config is derived, special tokens and the vocabulary size come from the user's options.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from converters.errors import ConversionError
from converters.files.reading import read_json_object, require_regular
from converters.files.restricted import DAMAGED, unpickle
from converters.foreign.master_weights import with_master_weights
from converters.foreign.options import MASTER_WEIGHTS, OpeningOptions
from converters.foreign.placeholders import Arguments, Placeholder, placeholder
from converters.foreign.settings import (
    ForeignSettings,
    find_run_config,
    read_section,
    settings_from_arguments,
    settings_from_provider,
    with_rope_factor,
    with_settings_of_whole_layers,
)
from converters.foreign.view import (
    CanonicalTensors,
    refuse_adapters,
    refuse_own_gated_delta_nets,
    with_whole_layers,
    without_prefix,
)
from converters.mapping.layouts import padded_vocab_size
from converters.mapping.rules import all_rules
from converters.model_config.architecture import Architecture
from converters.torch_dist.keys import are_stacked, stored_place
from converters.torch_dist.reader import StoredTensors, TorchDistCheckpoint
from converters.torch_dist.writer import COMMON_FILE

_OBJECT = "common_state/shard_0_1"
_LARGEST = 2**28


def read_common_state(checkpoint: TorchDistCheckpoint) -> dict[str, Any]:
    """Read the state that a trainer saved next to the tensors. Plain values are unchanged; other objects
    become ``Placeholder``.

    Returns:
        The state; empty if none was saved.

    Raises:
        ConversionError: the state is damaged, or contains unexpected objects.
    """
    path = checkpoint.directory / COMMON_FILE
    if path.exists():
        with require_regular(path).open("rb") as file:
            state = _read(file, str(path))
    elif _OBJECT in checkpoint.objects:
        name = f"{_OBJECT} in {checkpoint.directory}"
        # Megatron-Core stores a list with the objects of a rank.
        state = _read(io.BytesIO(checkpoint.read_object(_OBJECT)), name)
        state = state[0] if isinstance(state, list) and len(state) == 1 else state
    else:
        return {}
    if not isinstance(state, dict):
        raise ConversionError(
            f"the common state of {checkpoint.directory} is no dictionary",
            "fetch or write the checkpoint again",
        )
    return state


def arguments_of(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of the Megatron-LM run, or None if there are none.

    Raises:
        ConversionError: ``args`` in the state is not a namespace of arguments.
    """
    arguments = state.get("args")
    if arguments is None:
        return None
    if not isinstance(arguments, Arguments) or not isinstance(arguments.state, dict):
        raise ConversionError(
            f"args of the common state is a {arguments!r}, not an argparse.Namespace",
            "pass --hf-config DIRECTORY",
        )
    return {str(name): value for name, value in arguments.state.items()}


def _read(file: BinaryIO, what: str) -> Any:
    """Unpickle an archive of ``torch.save`` without its tensors."""
    try:
        with zipfile.ZipFile(file) as archive:
            (entry,) = (
                entry for entry in archive.infolist() if entry.filename.partition("/")[2] == "data.pkl"
            )
            # torch.save does not compress, and a compressed entry could expand to any size.
            if entry.file_size > _LARGEST or entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"a description of {entry.file_size} bytes")
            return unpickle(io.BytesIO(archive.read(entry)), placeholder, what, Placeholder)
    # Re-raise it: a ConversionError is a ValueError, which DAMAGED includes.
    except ConversionError:
        raise
    except (zipfile.BadZipFile, OSError, RecursionError, *DAMAGED) as error:
        raise ConversionError(
            f"{what} cannot be read ({type(error).__name__}: {error})", "fetch or write the checkpoint again"
        ) from error


def read_settings(checkpoint: TorchDistCheckpoint, options: OpeningOptions) -> ForeignSettings | None:
    """Return the model settings that a trainer stored in its checkpoint, or None if it stored none.

    Raises:
        ConversionError: the settings are damaged, or contradict the user's options.
    """
    said = options.rope_scaling_factor
    run_config = find_run_config(checkpoint.directory)
    if run_config is not None:
        settings = settings_from_provider(read_section(run_config, "model"), str(run_config))
        return with_rope_factor(with_settings_of_whole_layers(settings), said, is_heeded=True)
    arguments = arguments_of(read_common_state(checkpoint))
    if arguments is not None:
        settings = settings_from_arguments(arguments, f"args of {checkpoint.directory}")
        return with_rope_factor(with_settings_of_whole_layers(settings), said, is_heeded=False)
    if said is not None:
        raise ConversionError(
            f"{checkpoint.directory} has no settings of a trainer", "leave --rope-scaling-factor out"
        )
    return None


def tensors_of(checkpoint: TorchDistCheckpoint, weights: str) -> StoredTensors:
    """Return the tensors of a checkpoint without key prefixes.

    Args:
        checkpoint: the checkpoint.
        weights: see ``OpeningOptions``.

    Raises:
        ConversionError: the checkpoint contains adapters or not exactly one model, or lacks the requested
            weights.
    """
    refuse_adapters(checkpoint)
    refuse_own_gated_delta_nets(checkpoint)
    return with_whole_layers(
        without_prefix(with_master_weights(checkpoint) if weights == MASTER_WEIGHTS else checkpoint)
    )


def canonical(tensors: StoredTensors, architecture: Architecture) -> CanonicalTensors:
    """Return the tensors by the keys that the architecture needs.

    Raises:
        ConversionError: a tensor is stored under two names.
    """
    stacked = are_stacked(tensors)
    grids = {}
    for rule in all_rules(architecture):
        place = stored_place(rule, architecture, stacked=stacked)
        grids[place.key] = place.grid
    return CanonicalTensors(tensors, grids)


# Default of Megatron-LM's --make-vocab-size-divisible-by.
_MEGATRON_MULTIPLE = 128


def vocab_size_of(settings: ForeignSettings, options: OpeningOptions, rows: int) -> int:
    """Return the number of embedding rows without padding.

    Args:
        settings: the trainer's settings.
        options: the user's options, which take precedence.
        rows: number of rows of the stored embedding, with padding.

    Raises:
        ConversionError: the number is unknown, or does not match the embedding.
    """
    fix = f"pass --vocab-size N, the vocab_size of the model's config.json, at most {rows}"
    if options.vocab_size is not None:
        if not 1 <= options.vocab_size <= rows:
            raise ConversionError(
                f"vocab-size = {options.vocab_size}: the stored embedding has {rows} rows, padding included",
                fix,
            )
        return options.vocab_size
    said = settings.values.get("vocab_size")
    counts_more = (
        "null" in str(settings.values.get("tokenizer_type") or "").lower()
    )  # NullTokenizer adds a token to the given vocabulary size.
    if not isinstance(said, int) or isinstance(said, bool) or said < 1 or counts_more:
        raise ConversionError(
            f"{settings.origin} does not say how many of the {rows} rows of the embedding are padding", fix
        )
    # Megatron-LM pads the vocabulary to a multiple of this number times the tensor-parallel size.
    multiple = settings.values.get("make_vocab_size_divisible_by") or _MEGATRON_MULTIPLE
    ranks = settings.values.get("tensor_model_parallel_size") or 1
    if rows not in (said, padded_vocab_size(said, ranks, multiple)):
        raise ConversionError(
            f"{settings.origin}: vocab_size = {said}, padded to a multiple of {multiple} x {ranks}, does "
            f"not make the {rows} stored rows",
            fix,
        )
    return said


def token_entries(options: OpeningOptions) -> dict[str, Any]:
    """Return the config entries of special tokens. Unknown ones are null, so that the config class does not
    fill in its defaults."""
    entries: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if options.tokenizer is not None:
        # Later files override earlier ones, as the generation config does in transformers.
        for name in ("config.json", "generation_config.json"):
            found = _read_json_file(options.tokenizer / name)
            entries |= {key: found[key] for key in entries if found.get(key) is not None}
    if options.eos_token_ids is not None:
        ids = list(options.eos_token_ids)
        entries["eos_token_id"] = ids[0] if len(ids) == 1 else (ids or None)
    return entries


def _read_json_file(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
