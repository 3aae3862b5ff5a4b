"""A worker's passes over a batch: training, log-probabilities, top-k tokens, and values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from megarl.algorithms.interfaces import check_loss
from megarl.distributed.batch_checks import check_sequence_dimension
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.parcels import Columns
from megarl.errors import (
    BatchError,
    StateError,
)
from megarl.models.engine.batching import Batching, FixedRows, Planned
from megarl.models.engine.microbatches import batch_size, chosen_size, move_to, under_mask
from megarl.models.engine.nonfinite import SkipLimit
from megarl.models.engine.offload_state import BaseAsReference, ReferenceWeights
from megarl.models.engine.step import logprobs_of_batch, topk_of_batch, train_on_batch, values_of_batch
from megarl.models.engine.worker_state import WorkerState


class WorkerTrainResult(TypedDict):
    """Result of ``train`` of one worker.

    Keys:
        global_loss: float32 [global batches].
        grad_norm: 0-d, of the last global batch; None in evaluation.
        rank: of this worker.
        all_mb_metrics: a list of values for each metric.
        skipped: the global batches whose step was skipped, with row numbers of this replica.
        positions: number of positions in this replica's forward passes, including padding.
        gpu_info: see ``get_gpu_info``; None in evaluation.
    """

    global_loss: torch.Tensor
    grad_norm: torch.Tensor | None
    rank: int
    all_mb_metrics: dict[str, list[float]]
    skipped: list[dict[str, Any]]
    positions: int
    gpu_info: Any


class PassingWorker(WorkerState):
    """Worker methods that train on a batch or score it, with the weights of the policy or of the reference
    policy."""

    reference: ReferenceWeights | BaseAsReference | None
    _skips: SkipLimit

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> WorkerTrainResult:
        """Train on this data-parallel rank's rows of a batch. With ``eval_mode`` only compute the loss.

        Args:
            data: columns of NeMo-RL's policy API, on the CPU.
            loss_fn: a ``LossFunction``.
            eval_mode: change nothing: no gradients, no optimizer step, no schedule step.
            gbs: samples of a global batch over all data-parallel ranks; defaults to
                ``train_global_batch_size``.
            mbs: rows of a micro-batch; defaults to ``train_micro_batch_size``.

        Raises:
            ConfigError: ``loss_fn`` needs values but the model computes log-probabilities, or the reverse.
            NonFiniteError: a loss or gradient is not finite, and ``policy.on_nonfinite`` does not allow the
                run to continue.
        """
        check_loss(loss_fn, scores=self.scores)
        self._require("train", optimizer=not eval_mode)
        global_batch = chosen_size(gbs, self.cfg["train_global_batch_size"], "global batch size")
        micro_batch = chosen_size(mbs, self.cfg["train_micro_batch_size"], "micro-batch size")
        if "sample_mask" not in data:
            raise BatchError("sample_mask must be present in the data that train() is given: [B] of 0 and 1")
        check_sequence_dimension(data)
        batching = self._plan_of(data) or FixedRows(
            micro_batch, self._local_batch_size(data, global_batch, micro_batch)
        )
        # Skip masked tokens only if the loss declares that it ignores their log-probabilities.
        skips = getattr(loss_fn, "skips_masked", False) and "token_mask" in data
        # Increment the version first, because a call that fails may already have taken steps.
        self._weights_version += not eval_mode
        result = train_on_batch(
            self.backend,
            move_to(data, self.runtime.device, wanted=under_mask(data) if skips else None),
            loss_fn,
            batching,
            sampling=self.sampling,
            limit=None if eval_mode else self._skips,
            chunk_size=self.cfg["logprob_chunk_size"],
        )
        return {
            "global_loss": result.losses,
            "grad_norm": torch.tensor(result.grad_norms[-1]) if result.grad_norms else None,
            "rank": dist.get_rank(),
            "all_mb_metrics": result.micro_batch_metrics,
            "skipped": [batch.as_record() for batch in result.skipped],
            "positions": result.positions,
            "gpu_info": None if eval_mode else self.get_gpu_info(),
        }

    def _local_batch_size(self, data: Columns, global_batch: int, micro_batch: int) -> int:
        ranks = self.backend.groups.data_size
        if global_batch % ranks:
            raise BatchError(
                f"global batch size = {global_batch}: not a multiple of the {ranks} data-parallel ranks; "
                "choose a multiple"
            )
        local = global_batch // ranks
        if local % micro_batch:
            raise BatchError(
                f"micro-batch size = {micro_batch}: does not divide the {local} samples of a global batch "
                "on one data-parallel rank; "
                "choose a divisor"
            )
        if batch_size(data) % local or batch_size(data) == 0:
            raise BatchError(
                f"{batch_size(data)} rows on this data-parallel rank: need a positive multiple of {local} "
                "(one global batch)"
            )
        return local

    def _plan_of(self, data: BatchedDataDict[Any]) -> Planned | None:
        """Return the micro-batches that the driver planned; None if micro-batches have a fixed number of
        rows.

        Raises:
            BatchError: packing or dynamic batching is enabled, but the batch contains no plan.
        """
        packed = self.cfg["sequence_packing"]["enabled"]
        if not packed and not self.cfg["dynamic_batching"]["enabled"]:
            return None
        indices, lengths, counts = data.micro_batch_indices, data.micro_batch_lengths, data.elem_counts_per_gb
        if indices is None or lengths is None:
            way = "sequence_packing" if packed else "dynamic_batching"
            raise BatchError(
                f"policy.{way} is enabled, but the batch carries no plan of its micro-batches; "
                "shard it with megarl.models.policy.batch_plan.shard_batch, or disable it"
            )
        # Without counts, the end of a chunk's last micro-batch is the chunk's number of rows.
        return Planned(indices, lengths, counts or [chunk[-1][1] for chunk in indices], packed)

    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, *, skip_masked: bool = False
    ) -> BatchedDataDict[Any]:
        """Compute ``logprobs`` [B, S] float32 under the current weights, returned on the CPU. Column 0 and
        padding are 0.

        Args:
            data: ``input_ids`` [B, S] and ``input_lengths`` [B]; with ``skip_masked`` also ``token_mask`` [B,
                S] and optionally ``sample_mask`` [B].
            micro_batch_size: rows of a micro-batch; defaults to ``logprob_batch_size``.
            skip_masked: do not score tokens whose mask is 0; their log-probabilities are 0.
        """
        self._require("get_logprobs")
        batch, batching, wanted = self._scored_batch(data, micro_batch_size, skip_masked)
        chunk_size = self.cfg["logprob_chunk_size"]
        found = logprobs_of_batch(
            self.backend, batch, batching, sampling=self.sampling, chunk_size=chunk_size
        )
        logprobs = found.cpu()
        return BatchedDataDict(
            # If the output layer does not support requests, masked tokens were scored too, and may be
            # infinite. ``where`` replaces them; infinity times 0 would be NaN.
            {"logprobs": logprobs if wanted is None else logprobs.where(wanted, torch.zeros_like(logprobs))}
        )

    def get_topk_logits(
        self,
        data: BatchedDataDict[Any],
        k: int,
        micro_batch_size: int | None = None,
        *,
        skip_masked: bool = False,
        vocabulary_size: int | None = None,
    ) -> BatchedDataDict[Any]:
        """Compute the ``k`` most likely next tokens at each position under the current weights, returned on
        the CPU.

        Args:
            data: as in ``get_logprobs``.
            k: at most the vocabulary size.
            micro_batch_size: rows of a micro-batch; defaults to ``logprob_batch_size``.
            skip_masked: skip positions whose next token has a mask of 0; their entries are 0.
            vocabulary_size: exclude tokens with this id or a higher one; None for no exclusion.

        Returns:
            The columns of ``megarl.models.engine.step.topk_of_batch``: ``topk_logits`` [B, S, k] float32,
            ``topk_indices`` [B, S, k] int64, and ``logprobs`` [B, S] of the tokens of ``data``.
        """
        self._require("get_topk_logits")
        batch, batching, wanted = self._scored_batch(data, micro_batch_size, skip_masked)
        found = topk_of_batch(
            self.backend,
            batch,
            batching,
            count=k,
            sampling=self.sampling,
            vocabulary_size=vocabulary_size,
            chunk_size=self.cfg["logprob_chunk_size"],
        )
        columns = {name: values.cpu() for name, values in found.items()}
        if wanted is not None:
            # Entry i of the top-k columns describes token i+1, so shift the mask to the left by one.
            followed = torch.nn.functional.pad(wanted[:, 1:], (0, 1))
            for name, values in columns.items():
                mask = wanted if name == "logprobs" else followed[..., None]
                columns[name] = values.where(mask, torch.zeros_like(values))
        return BatchedDataDict(columns)

    def get_values(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """Compute ``values`` [B, S] float32 of a reward or value model under the current weights, returned on
        the CPU. Entry i is the output at token i, which depends on the tokens up to i; padding is 0.

        Args:
            data: ``input_ids`` [B, S] and ``input_lengths`` [B].
            micro_batch_size: rows of a micro-batch; defaults to ``logprob_batch_size``.
        """
        self._require("get_values")
        batch, batching, _ = self._scored_batch(data, micro_batch_size)
        return BatchedDataDict({"values": values_of_batch(self.backend, batch, batching).cpu()})

    def _scored_batch(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None, skip_masked: bool = False
    ) -> tuple[Columns, Batching, torch.Tensor | None]:
        """Prepare a batch for scoring.

        Returns:
            The columns that a scoring pass needs, on the device; their division into micro-batches; and a
            mask of the tokens to score, bool [B, S] on the host, or None for all tokens.
        """
        rows = chosen_size(micro_batch_size, self.cfg["logprob_batch_size"], "micro-batch size")
        check_sequence_dimension(data)
        wanted = under_mask(data) if skip_masked else None
        # A scoring pass reads only these two columns, so do not copy the others to the device.
        batch = move_to(
            {key: data[key] for key in ("input_ids", "input_lengths")}, self.runtime.device, wanted=wanted
        )
        return batch, self._plan_of(data) or FixedRows(rows), wanted

    @contextlib.contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Swap in the reference policy's weights inside the context.

        Raises:
            StateError: the worker has no reference policy, or its parameters are not on the device.
        """
        if self.reference is None:
            raise StateError(
                "there is no reference policy: the worker was built with init_reference_model=False; build "
                "it with True"
            )
        self._require("use_reference_model")
        with self.reference.swapped_in(self.backend):
            # Restore the previous value instead of False, because these contexts may be nested.
            before, self._reference_is_in = self._reference_is_in, True
            try:
                yield
            finally:
                self._reference_is_in = before

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, *, skip_masked: bool = False
    ) -> BatchedDataDict[Any]:
        """Compute ``reference_logprobs``: the log-probabilities of ``get_logprobs`` under the reference
        policy."""
        with self.use_reference_model():
            found = self.get_logprobs(data=data, micro_batch_size=micro_batch_size, skip_masked=skip_masked)
            return BatchedDataDict({"reference_logprobs": found["logprobs"]})
