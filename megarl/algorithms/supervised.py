"""Training on given answers: the common base of supervised fine-tuning, preference optimisation and reward
models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from typing_extensions import TypedDict

from megarl.algorithms.algorithm import ACTOR, Algorithm, Parts
from megarl.config.nested import at
from megarl.key import AT_LEAST_0, AT_LEAST_1, Key

if TYPE_CHECKING:
    from megarl.data.datasets import Dataset
    from megarl.distributed.batched_data_dict import BatchedDataDict


class SupervisedConfig(TypedDict):
    """Keys of all algorithms that train on given answers: steps and validation. A sample is a row or, for
    preferences, a pair."""

    max_num_steps: Annotated[
        int,
        Key(
            "maximum number of training steps, after which the run ends; a step trains on one global batch.",
            AT_LEAST_1,
        ),
    ]
    max_num_epochs: NotRequired[
        Annotated[
            int | None,
            Key(
                "maximum number of passes over the training data; the run ends at this or at "
                "``max_num_steps``, whichever comes first. null for no limit.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    val_period: NotRequired[
        Annotated[
            int,
            Key(
                "number of steps between validations; 0 for no validation during training.",
                AT_LEAST_0,
                default=0,
            ),
        ]
    ]
    val_batches: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of global batches per validation, the first ones; null for the whole validation "
                "data.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    val_global_batch_size: NotRequired[
        Annotated[
            int,
            Key(
                "number of validation samples (DPO and reward models: pairs) per global batch; "
                "``policy.train_global_batch_size`` when absent.",
                AT_LEAST_1,
            ),
        ]
    ]
    val_micro_batch_size: NotRequired[
        Annotated[
            int,
            Key(
                "number of validation samples (DPO and reward models: pairs) per forward pass on one "
                "data-parallel rank; ``policy.train_micro_batch_size`` when absent.",
                AT_LEAST_1,
            ),
        ]
    ]
    val_at_start: NotRequired[Annotated[bool, Key("run a validation before the first step.", default=False)]]
    val_at_end: NotRequired[Annotated[bool, Key("run a validation after the last step.", default=False)]]


class Supervised(Algorithm):
    """Base of algorithms that train on given answers. A step trains on one global batch of records. A
    validation averages metrics over records, weighted by ``weight``.

    Args:
        parts: models, data and tools of the run.
        loss_fn: loss function of the policy.
    """

    GENERATES = False
    config: SupervisedConfig

    def __init__(self, parts: Parts, loss_fn: Any) -> None:
        super().__init__(parts)
        self.config, policy = at(parts.config, self.section()), parts.config["policy"]
        self.policy = parts.models[ACTOR]
        self.global_batch_size, self.micro_batch_size = (
            policy["train_global_batch_size"],
            policy["train_micro_batch_size"],
        )
        self.pad_token_id = parts.tokenizer.pad_token_id
        self.train_data, self.validation_data = parts.train_data, parts.validation_data
        self.timer, self.skipped = parts.timer, parts.skipped
        self.loss_fn = loss_fn
        self.rows_of_record = 2 if self.PAIRS else 1

    def step(self, step: int) -> dict[str, float]:
        """Train on the next global batch."""
        from megarl.algorithms.train_results import trained_sequences

        records = self.sampler.take(self.global_batch_size)
        batch = self.batch(self.train_data, records)
        # A preference pair is two rows with the same record.
        rows = [record for record in records for _ in range(self.rows_of_record)]
        with self.timer.phase("train"):
            self.policy.prepare_for_training()
            gbs, mbs = self._rows(self.global_batch_size, self.micro_batch_size)
            result = self.skipped.train(self.policy, batch, self.loss_fn, step, rows, gbs=gbs, mbs=mbs)
            self.policy.finish_training()
            self.timer.passed(trained_sequences(batch, result, self.loss_fn))
        return {
            **self.metrics(result),
            "epoch": self.sampler.epoch,
            "num_tokens": int(batch["input_lengths"].sum()),
        }

    def validate(self) -> dict[str, float]:
        """Return the weighted means of the metrics ``validated()`` over the first ``val_batches`` global
        batches, and ``samples``, the number of records."""
        if self.validation_data is None:
            return {}
        size, batches = self.config["val_global_batch_size"], self.config["val_batches"]
        records = (
            len(self.validation_data) if batches is None else min(len(self.validation_data), batches * size)
        )
        gbs, mbs = self._rows(size, self.config["val_micro_batch_size"])
        sums, weights = dict.fromkeys(self.validated(), 0.0), 0.0
        for start in range(0, records, size):
            chosen = range(start, min(start + size, records))
            # Pad the last batch, so that it divides over the ranks like the others.
            batch = self.batch(self.validation_data, chosen, rows=gbs)
            # For every batch: computing reference log-probabilities may have changed the model's mode.
            self.policy.prepare_for_training()
            metrics = self.metrics(self.policy.train(batch, self.loss_fn, eval_mode=True, gbs=gbs, mbs=mbs))
            weight = self.weight(batch)
            weights += weight
            for name in sums:
                sums[name] += metrics[name] * weight
        return {**{name: total / weights for name, total in sums.items()}, "samples": records}

    def batch(self, data: Dataset, records: Sequence[int], rows: int | None = None) -> BatchedDataDict[Any]:
        """Build the training batch of these records, padded to ``rows`` rows. Padding rows have
        ``sample_mask`` 0."""
        from megarl.distributed.token_batches import supervised_batch

        return supervised_batch(data.select(records), self.pad_token_id, rows)

    def metrics(self, result: Mapping[str, Any]) -> dict[str, float]:
        """Convert the result of ``Policy.train`` to metrics."""
        from megarl.algorithms.train_results import step_metrics

        return step_metrics(result, self.loss_fn)

    @abstractmethod
    def validated(self) -> Sequence[str]:
        """Return the names of the validation metrics."""

    def weight(self, batch: BatchedDataDict[Any]) -> float:
        """Return the weight of a batch in the validation mean: its number of records."""
        return float(batch["sample_mask"].sum()) / self.rows_of_record

    def _rows(self, global_batch: int, micro_batch: int) -> tuple[int, int]:
        """Convert batch sizes from records to rows."""
        return self.rows_of_record * global_batch, self.rows_of_record * micro_batch
