"""Compute log-probabilities of a Hugging Face model on a Megatron-Core worker, for ``megarl convert
selftest``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters.errors import ConversionError
from megarl.config import validate_policy_config
from megarl.config.policy import PolicyConfig
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.parity.pool import WorkerPool


@contextmanager
def megatron_logprobs(family_files: Sequence[Path]) -> Iterator[Callable[[Path, Tensor], Tensor]]:
    """Yield the function of ``logprobs_by``, with one worker process on the CPU."""
    with WorkerPool() as pool:
        yield logprobs_by(pool, family_files)


def logprobs_by(
    pool: WorkerPool, family_files: Sequence[Path], **megatron: Any
) -> Callable[[Path, Tensor], Tensor]:
    """Return a function: (Hugging Face directory, tokens [B, S] int64) -> log-probabilities [B, S] float32, 0
    in column 0.

    Args:
        pool: starts the worker that computes the log-probabilities.
        family_files: files that define families (``converters.family_file``); that of the model is the last.
        **megatron: further keys of ``megatron_cfg``.
    """

    def compute(directory: Path, tokens: Tensor) -> Tensor:
        (found,) = pool.run(1, _compute, _policy(directory, tokens, family_files, megatron), tokens)
        # A worker returns this error, because the pool would turn a raised one into a ``JobError``.
        if isinstance(found, ConversionError):
            raise found
        return found

    return compute


def _policy(
    directory: Path, tokens: Tensor, family_files: Sequence[Path], megatron: Mapping[str, object]
) -> Mapping[str, object]:
    rows, length = tokens.shape
    return {
        "model_name": str(directory),
        "tokenizer": {"name": str(directory)},
        "train_global_batch_size": rows,
        "train_micro_batch_size": rows,
        "logprob_batch_size": rows,
        "precision": "float32",
        "max_total_sequence_length": length,
        "megatron_cfg": {
            "enabled": True,
            "family_file": str(family_files[-1]) if family_files else None,
            **megatron,
        },
    }


def _compute(policy: PolicyConfig, tokens: Tensor) -> Tensor | ConversionError:
    # Only the worker process needs Megatron-Core, so import it here.
    from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker

    try:
        config: Any = validate_policy_config(policy, world_size=1)
        worker = MegatronPolicyWorker(config, None, init_optimizer=False, init_reference_model=False)
    except ConversionError as error:
        return error
    try:
        lengths = torch.full((tokens.shape[0],), tokens.shape[1])
        data: BatchedDataDict[Any] = BatchedDataDict({"input_ids": tokens, "input_lengths": lengths})
        return worker.get_logprobs(data=data)["logprobs"]
    finally:
        worker.backend.close()
