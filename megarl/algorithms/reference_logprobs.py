"""Reference log-probabilities of a data set. They are either computed once and cached next to the data set's
tokens, or computed in each step.

A cached table is found by a digest of everything that determines its values: the bytes of the model's files,
precision, backend, and the token ids of its rows with their targets (which cover tokenizer, templates and
records). So a table is never used for other inputs. Layout and batch sizes are not in the digest, because
they change the values only by rounding.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from converters.checkpoint.source import locate_source
from megarl import env
from megarl.config.backend import enabled_backend
from megarl.config.nested import at
from megarl.config.policy import PolicyConfig
from megarl.config.sections import RunConfig
from megarl.data.datasets import Dataset, Examples, bound_cache, cache_directory
from megarl.data.table import Table, TableWriter, read_table
from megarl.distributed.token_batches import supervised_batch
from megarl.errors import DataError, ModelError

if TYPE_CHECKING:
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy.lm_policy import Policy

logger = logging.getLogger(__name__)

# Format version of stored tables. Tables of another version are computed again.
_FORM = 2
# Rows per table. At most this many are lost if the run is killed.
_ROWS_OF_TABLE = 8192
# Rows per policy call. Each call loads the reference weights onto the devices.
_ROWS_OF_CALL = 1024
_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.py")
_ADAPTER_FILES = ("adapter_config.json", "*.safetensors")
# Keys of ``policy.megatron_cfg`` that change the dtype of part of the computation.
_NUMERIC = ("float32_logits", "moe_router_dtype")
_COLUMN = "logprobs"


class ReferenceLogprobs:
    """The reference policy's log-probabilities of a data set's target tokens.

    Args:
        policy: policy that holds the reference weights.
        config: configuration of the run, of which ``policy`` and ``data`` are read.
        dataset: the data set.
        pad_token_id: token id for padding.
        keeps: compute all of them at the first request and cache them on disk. False computes each batch on
            request.
    """

    def __init__(
        self, policy: Policy, config: RunConfig, dataset: Dataset, pad_token_id: int, *, keeps: bool
    ) -> None:
        self._policy, self._config, self._dataset, self._pad_token_id = policy, config, dataset, pad_token_id
        self._keeps = keeps
        self._tables: list[list[Table]] | None = None

    def of(self, places: Sequence[int], batch: BatchedDataDict[Any]) -> Tensor:
        """Return the reference log-probabilities of a batch, [B, S] float32, column i for token i. They are 0
        at tokens that are not targets, and in padding rows.

        Args:
            places: indices of the examples in the first rows of the batch.
            batch: batch from ``supervised_batch``.

        Raises:
            ModelError: a log-probability is not finite.
            DataError: they cannot be written.
        """
        if not self._keeps:
            return self._computed(batch)
        if self._tables is None:
            self._tables = self._all_tables()
        learned, found = batch["token_mask"] > 0, torch.zeros(batch["token_mask"].shape)
        for row, place in enumerate(places):
            source, example = self._dataset.examples.origin(place)
            table, inner = divmod(example, _ROWS_OF_TABLE)
            # Copy, because arrays read from a file are read-only.
            found[row, learned[row]] = torch.from_numpy(
                np.array(self._tables[source][table].columns[_COLUMN][inner])
            )
        return found

    def _computed(self, batch: BatchedDataDict[Any]) -> Tensor:
        self._policy.prepare_for_lp_inference()
        found: Tensor = self._policy.get_reference_policy_logprobs(batch, skip_masked=True)[
            "reference_logprobs"
        ]
        return found

    def _all_tables(self) -> list[list[Table]]:
        """Read or compute the tables of each source."""
        identity = _identity(self._config["policy"])
        found = []
        for examples in self._dataset.examples.by_source():
            starts = range(0, len(examples), _ROWS_OF_TABLE)
            found.append(
                [
                    self._table(identity, examples, start, min(start + _ROWS_OF_TABLE, len(examples)))
                    for start in starts
                ]
            )
        # Trim the cache only after all tables of this run are open: an open table is never deleted.
        bound_cache(self._config["data"])
        return found

    def _table(self, identity: Any, examples: Examples, first: int, last: int) -> Table:
        directory = cache_directory(self._config["data"]) / _digest(
            # Include the user id: another user's table is not trusted, and must not block this name.
            [os.geteuid(), identity, examples.digest(first, last)]
        )
        table = read_table(directory)
        if table is not None:
            return table
        values = self._values(examples, first, last)
        # Write even a small table to disk, so that the next run finds it.
        writer = TableWriter({_COLUMN: "float32"}, directory, most_in_memory=0)
        try:
            writer.append({_COLUMN: values})
            return writer.finish({})
        except OSError as error:
            raise DataError(
                f"data.cache_dir: the reference log-probabilities cannot be written: {error}. Fix: give "
                "data.cache_dir a directory of "
                "your own with more space, or write dpo.cache_reference_logprobs=false"
            ) from error
        finally:
            writer.discard()

    def _values(self, examples: Examples, first: int, last: int) -> list[Any]:
        """Compute the target log-probabilities of the examples [first, last): one array [tokens] float32 per
        example.

        Raises:
            ModelError: one is not finite.
        """
        # Sort by length, because the rows of a call are padded to the longest one.
        by_length = np.argsort(examples.lengths(with_answers=True)[first:last], kind="stable").tolist()
        found: list[Any] = [None] * len(by_length)
        for start in range(0, len(by_length), _ROWS_OF_CALL):
            chosen = by_length[start : start + _ROWS_OF_CALL]
            rows = [examples[first + row] for row in chosen]
            batch = supervised_batch(rows, self._pad_token_id)
            logprobs, learned = self._computed(batch), batch["token_mask"] > 0
            for row, example, values, mask in zip(chosen, rows, logprobs, learned, strict=True):
                found[row] = values[mask].numpy()
                if not np.isfinite(found[row]).all():
                    raise ModelError(
                        f"record {example.index} (counted from 0): the reference policy, "
                        f"policy.model_name = {self._config['policy']['model_name']!r}, gives its "
                        "answer log-probabilities that are not finite. Fix: give other weights, or "
                        "another policy.precision"
                    )
            logger.info(
                "reference log-probabilities: %d of %d examples", first + start + len(chosen), len(examples)
            )
        return found


def _identity(policy: PolicyConfig) -> list[Any]:
    """Return everything except the tokens that determines the log-probabilities, as JSON types."""
    numeric = {key: at(policy, f"megatron_cfg.{key}") for key in _NUMERIC}
    return [
        _FORM,
        # Another release of megarl may compute them differently.
        env.installed_version(env.DISTRIBUTION),
        enabled_backend(policy),
        policy["precision"],
        numeric,
        model_identity(policy),
    ]


def model_identity(policy: PolicyConfig) -> list[list[str]]:
    """Return name and digest of each file that determines a model's outputs.

    Raises:
        ModelError: a file cannot be read.
        ConversionError: there is no such model.
    """
    directory = locate_source(policy["model_name"])
    files = sorted(set(itertools.chain.from_iterable(map(directory.glob, _FILES))))
    family = at(policy, "megatron_cfg.family_file")
    files += [Path(family)] if family else []
    if policy["merged_adapter"] is not None:
        adapter = Path(policy["merged_adapter"]).expanduser()
        files += sorted(set(itertools.chain.from_iterable(map(adapter.glob, _ADAPTER_FILES))))
    with ThreadPoolExecutor() as pool:
        return [
            [file.name, digest] for file, digest in zip(files, pool.map(_file_digest, files), strict=True)
        ]


def _file_digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}. Fix: make it readable") from error


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
