"""Reference log-probabilities of a data set: computed once, stored next to its tokens, and read at the next
start;
or computed in each step.

A stored table is found by a digest of everything that its numbers depend on: the bytes of the model's files,
precision, backend, and the token ids of its rows with their targets, which include the effect of tokenizer,
templates and records. So a table can never belong to other inputs; layouts and batch sizes are not in the
digest, because they change numbers by rounding only.
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
from megarl.data.datasets import Examples, bound_cache, cache_directory
from megarl.data.table import Table, TableWriter, read_table
from megarl.distributed.token_batches import supervised_batch
from megarl.errors import DataError, ModelError

if TYPE_CHECKING:
    from megarl.data.datasets import Dataset
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy.lm_policy import Policy

logger = logging.getLogger(__name__)

# Version of the format of a stored table; a table of another version is computed again.
_FORM = 2
# Rows per table, which is the most that a run loses if it is killed while it computes.
_ROWS_OF_TABLE = 8192
# Rows per call of the policy, which loads the reference's weights onto the device for each call.
_ROWS_OF_CALL = 1024
_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.py")
_ADAPTER_FILES = ("adapter_config.json", "*.safetensors")
# Keys of ``policy.megatron_cfg`` that decide the dtype of a part of the computation.
_NUMERIC = ("float32_logits", "moe_router_dtype")
_COLUMN = "logprobs"


class ReferenceLogprobs:
    """The reference policy's log-probabilities of a data set's targets.

    Args:
        policy: has the reference policy.
        config: of the run: ``policy`` and ``data``.
        dataset: the data set.
        pad_token_id: padding of the rows.
        keeps: compute those of all examples when the first ones are requested, and store them on disk; False
            computes those that are requested.
    """

    def __init__(
        self, policy: Policy, config: RunConfig, dataset: Dataset, pad_token_id: int, *, keeps: bool
    ) -> None:
        self._policy, self._config, self._dataset, self._pad_token_id = policy, config, dataset, pad_token_id
        self._keeps = keeps
        self._tables: list[list[Table]] | None = None

    def of(self, places: Sequence[int], batch: BatchedDataDict[Any]) -> Tensor:
        """Return [B, S] float32, column i for token i; 0 at tokens that are not targets and in rows without
        an example.

        Args:
            places: examples of the first rows of the batch.
            batch: returned by ``supervised_batch``.

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
            # Copy the values: those that are mapped from a file cannot be written.
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
        """Return the tables of each source."""
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
        bound_cache(self._config["data"])
        return found

    def _table(self, identity: Any, examples: Examples, first: int, last: int) -> Table:
        directory = cache_directory(self._config["data"]) / _digest(
            # The name includes the user: a table that another user wrote is not trusted, and would only block
            # this name.
            [os.geteuid(), identity, examples.digest(first, last)]
        )
        table = read_table(directory)
        if table is not None:
            return table
        values = self._values(examples, first, last)
        # Keep nothing in memory, because the next start has to find even a small table.
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
        """Return the log-probabilities of the targets of each of the examples [first, last), [tokens]
        float32."""
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
    """Return everything that the log-probabilities of given tokens depend on, as JSON types."""
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
    """Return name and digest of each file that determines a model's results, read at the speed of the disk.

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
