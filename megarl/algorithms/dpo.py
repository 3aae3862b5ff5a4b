"""Direct preference optimisation: raise what is preferred against what is not, measured against a reference policy (arXiv 2305.18290)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NotRequired

from megarl.algorithms.algorithm import ACTOR, REFERENCE, Algorithm, Parts, Role
from megarl.config.losses import DPOLossConfig
from megarl.key import AT_LEAST_0, AT_LEAST_1, Key
from megarl.observe.timing import Sequences

if TYPE_CHECKING:
    from megarl.algorithms.reference_logprobs import ReferenceLogprobs
    from megarl.data.datasets import Dataset
    from megarl.distributed.batched_data_dict import BatchedDataDict


class DPOConfig(DPOLossConfig):
    """Direct preference optimisation. ``policy.train_global_batch_size`` and ``policy.train_micro_batch_size`` count pairs."""

    max_num_steps: Annotated[int, Key("steps of the run.", AT_LEAST_1)]
    max_num_epochs: NotRequired[
        Annotated[
            int | None,
            Key("passes over the training data after which the run ends even so; null for no such end.", AT_LEAST_1, default=None),
        ]
    ]
    val_period: NotRequired[Annotated[int, Key("steps between validations; 0 for none.", AT_LEAST_0, default=0)]]
    val_batches: NotRequired[Annotated[int | None, Key("global batches of a validation; null for all.", AT_LEAST_1, default=None)]]
    val_global_batch_size: NotRequired[Annotated[int, Key("pairs of a global batch of a validation.", AT_LEAST_1)]]
    val_micro_batch_size: NotRequired[Annotated[int, Key("pairs of a forward pass on one data-parallel rank.", AT_LEAST_1)]]
    val_at_start: NotRequired[Annotated[bool, Key("validate before the first step.", default=False)]]
    val_at_end: NotRequired[Annotated[bool, Key("validate after the last step.", default=False)]]
    cache_reference_logprobs: NotRequired[
        Annotated[
            bool,
            Key(
                "compute the reference policy's log-probabilities of all pairs before the first step, and keep them in ``data.cache_dir`` "
                "for the next start; false computes those of each batch in its step.",
                default=True,
            ),
        ]
    ]


class DPO(Algorithm):
    """One step trains on one global batch of pairs, each a better and a worse answer one after the other."""

    SECTIONS: ClassVar[Mapping[str, Any]] = MappingProxyType({"dpo": DPOConfig})
    GENERATES = False
    PAIRS = True

    def __init__(self, parts: Parts) -> None:
        from megarl.algorithms.loss_functions import DPOLossFn

        super().__init__(parts)
        self.config = parts.config["dpo"]
        self.policy = parts.models[ACTOR]
        policy = parts.config["policy"]
        self.global_batch_size, self.micro_batch_size = policy["train_global_batch_size"], policy["train_micro_batch_size"]
        self.pad_token_id = parts.tokenizer.pad_token_id
        self.train_data = _Pairs(parts, parts.train_data)
        self.validation_data = None if parts.validation_data is None else _Pairs(parts, parts.validation_data)
        self.timer, self.skipped = parts.timer, parts.skipped
        self.loss_fn = DPOLossFn(self.config)

    @classmethod
    def roles(cls, config: Mapping[str, Any]) -> tuple[Role, ...]:
        """The actor, and the reference."""
        return ACTOR, REFERENCE

    def step(self, step: int) -> dict[str, float]:
        """Train on the next global batch of pairs."""
        from megarl.algorithms.train_results import trained_sequences

        indices = self.sampler.take(self.global_batch_size)
        batch = self.train_data.batch(indices)
        sizes = {"gbs": 2 * self.global_batch_size, "mbs": 2 * self.micro_batch_size}
        with self.timer.phase("train"):
            self.policy.prepare_for_training()
            result = self.skipped.train(self.policy, batch, self.loss_fn, step, [index for index in indices for _ in range(2)], **sizes)
            self.policy.finish_training()
            self.timer.passed(trained_sequences(batch, result, self.loss_fn))
        return {**self._metrics(result), "epoch": self.sampler.epoch, "num_tokens": int(batch["input_lengths"].sum())}

    def validate(self) -> dict[str, float]:
        """Means over the pairs of the first ``val_batches`` global batches: ``loss`` and its parts, ``accuracy``, rewards and their margin;
        and ``samples``, the number of pairs."""
        if self.validation_data is None:
            return {}
        size, batches = self.config["val_global_batch_size"], self.config["val_batches"]
        pairs = len(self.validation_data) if batches is None else min(len(self.validation_data), batches * size)
        sizes = {"gbs": 2 * size, "mbs": 2 * self.config["val_micro_batch_size"]}
        sums = dict.fromkeys(_MEANS, 0.0)
        for start in range(0, pairs, size):
            indices = range(start, min(start + size, pairs))
            batch = self.validation_data.batch(indices, rows=2 * size)
            self.policy.prepare_for_training()
            metrics = self._metrics(self.policy.train(batch, self.loss_fn, eval_mode=True, **sizes))
            for name in sums:
                sums[name] += metrics[name] * len(indices)
        return {**{name: total / pairs for name, total in sums.items()}, "samples": pairs}

    def _metrics(self, result: Mapping[str, Any]) -> dict[str, float]:
        """Metrics of a call of ``train``; means over the pairs of its global batch."""
        from megarl.algorithms.train_results import step_metrics

        metrics = step_metrics(result, self.loss_fn)
        return {**metrics, "rewards_margin_mean": metrics["rewards_chosen_mean"] - metrics["rewards_rejected_mean"]}


_MEANS = (
    "loss",
    "preference_loss",
    "sft_loss",
    "accuracy",
    "rewards_chosen_mean",
    "rewards_rejected_mean",
    "rewards_margin_mean",
)


class _Pairs:
    """Makes batches of the pairs of a data set, with what the reference policy says of them."""

    def __init__(self, parts: Parts, data: Dataset) -> None:
        from megarl.algorithms.reference_logprobs import ReferenceLogprobs

        self._data, self._timer, self._pad_token_id = data, parts.timer, parts.tokenizer.pad_token_id
        self._keeps: bool = parts.config["dpo"]["cache_reference_logprobs"]
        self._reference: ReferenceLogprobs = ReferenceLogprobs(
            parts.models[ACTOR], parts.config, data, self._pad_token_id, keeps=self._keeps
        )

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Sequence[int], rows: int | None = None) -> BatchedDataDict[Any]:
        """A ``DPOLossDataDict`` of these pairs; filled up to ``rows`` rows, those without a pair with ``sample_mask`` 0."""
        from megarl.algorithms.train_results import scored_tokens
        from megarl.distributed.token_batches import supervised_batch

        batch = supervised_batch(self._data.select(indices), self._pad_token_id, rows)
        with self._timer.phase("reference_logprobs"):
            # the loss wants column i to be of the token that column i of its log-probabilities is of
            batch["reference_policy_logprobs"] = self._reference.of(self._data.places(indices), batch).roll(-1, dims=1)
            if not self._keeps:
                self._timer.passed(Sequences(batch["input_lengths"].numpy(), scored=scored_tokens(batch)))
        return batch
