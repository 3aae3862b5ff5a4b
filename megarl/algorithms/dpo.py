"""Direct preference optimisation: raise the probability of the chosen answer against that of the rejected
one, relative to a reference policy (arXiv 2305.18290)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from megarl.algorithms.algorithm import ACTOR, REFERENCE, Parts, Role
from megarl.algorithms.supervised import Supervised, SupervisedConfig
from megarl.config.losses import DPOLossConfig
from megarl.config.nested import at
from megarl.config.sections import RunConfig
from megarl.key import Key
from megarl.observe.timing import Sequences

if TYPE_CHECKING:
    from megarl.data.datasets import Dataset
    from megarl.distributed.batched_data_dict import BatchedDataDict


class DPOConfig(DPOLossConfig, SupervisedConfig):
    """Direct preference optimisation. ``policy.train_global_batch_size`` and
    ``policy.train_micro_batch_size`` count pairs."""

    cache_reference_logprobs: NotRequired[
        Annotated[
            bool,
            Key(
                "true computes the reference policy's log-probabilities of all pairs before the first step, "
                "and stores them in ``data.cache_dir``, where the next start finds them; false computes "
                "those of a batch in the batch's own step.",
                default=True,
            ),
        ]
    ]


class DPO(Supervised):
    """Direct preference optimisation. A step trains on one global batch of pairs; in each pair the chosen
    answer precedes the rejected one."""

    SECTIONS = MappingProxyType({"dpo": DPOConfig})
    PAIRS = True

    config: DPOConfig

    def __init__(self, parts: Parts) -> None:
        from megarl.algorithms.loss_functions import DPOLossFn
        from megarl.algorithms.reference_logprobs import ReferenceLogprobs

        super().__init__(parts, DPOLossFn(at(parts.config, "dpo")))
        self.keeps_reference: bool = self.config["cache_reference_logprobs"]
        # By identity, because both data sets may contain equal records and have separate tables.
        self.reference = {
            id(data): ReferenceLogprobs(
                self.policy, parts.config, data, self.pad_token_id, keeps=self.keeps_reference
            )
            for data in (self.train_data, self.validation_data)
            if data is not None
        }

    @classmethod
    def roles(cls, config: RunConfig) -> tuple[Role, ...]:
        """Return the roles of a run: the actor and the reference."""
        return ACTOR, REFERENCE

    def batch(self, data: Dataset, records: Sequence[int], rows: int | None = None) -> BatchedDataDict[Any]:
        """Build a ``DPOLossDataDict`` of these pairs, including the reference log-probabilities."""
        from megarl.algorithms.train_results import scored_tokens

        batch = super().batch(data, records, rows)
        with self.timer.phase("reference_logprobs"):
            # The loss expects the reference in column i to match its own log-probability in column i.
            batch["reference_policy_logprobs"] = (
                self.reference[id(data)].of(data.places(records), batch).roll(-1, dims=1)
            )
            # Cached log-probabilities needed no forward pass, so no throughput is counted.
            if not self.keeps_reference:
                self.timer.passed(Sequences(batch["input_lengths"].numpy(), scored=scored_tokens(batch)))
        return batch

    def metrics(self, result: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics of a training call, averaged over the pairs of its global batch."""
        metrics = super().metrics(result)
        return {
            **metrics,
            "rewards_margin_mean": metrics["rewards_chosen_mean"] - metrics["rewards_rejected_mean"],
        }

    def validated(self) -> Sequence[str]:
        """Return the names of the validation metrics."""
        means = ("loss", "preference_loss", "sft_loss", "accuracy")
        return (*means, "rewards_chosen_mean", "rewards_rejected_mean", "rewards_margin_mean")
