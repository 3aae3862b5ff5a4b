"""Log-probabilities in parts, computed when all of a step is there: what parts that are scored earlier
have to be equal to."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from megarl.algorithms.grpo import GRPO
from megarl.distributed.batched_data_dict import BatchedDataDict


class InParts(GRPO):
    """GRPO that can score a batch in as many parts as ``grpo.logprob_parts`` says."""

    def parts_of(self, samples: BatchedDataDict[Any]) -> torch.Tensor:
        parts, prompts = self.config["logprob_parts"], self.config["num_prompts_per_step"]
        found = torch.zeros(samples["input_ids"].shape)
        for first, last in pairwise(part * prompts // parts for part in range(parts + 1)):
            rows = slice(first * self.generations, last * self.generations)
            width = int(samples["input_lengths"][rows].max())
            part = {name: samples[name][rows, :width] for name in ("input_ids", "token_mask")}
            inputs: BatchedDataDict[Any] = BatchedDataDict(
                {**part, "input_lengths": samples["input_lengths"][rows]}
            )
            self.policy.prepare_for_lp_inference()
            found[rows, :width] = self.policy.get_logprobs(inputs, skip_masked=True)["logprobs"]
        return found.where(samples["sample_mask"][:, None] != 0, 0.0)


class Afterwards(InParts):
    """Score the parts behind the last response."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self._sampling_collector = replace(self._sampling_collector, scorer=None)

    def batch_of(self, samples: Any, *, previous: bool, reference: bool) -> Any:
        batch = super().batch_of(samples, previous=False, reference=reference)
        return batch | {"prev_logprobs": self.parts_of(samples)} if previous else batch


class Checked(InParts):
    """Score the parts while others are sampled, and again behind the last response."""

    def batch_of(self, samples: Any, *, previous: bool, reference: bool) -> Any:
        batch = super().batch_of(samples, previous=previous, reference=reference)
        if previous:
            assert torch.equal(batch["prev_logprobs"], self.parts_of(samples)), "other bits"
            assert bool((batch["prev_logprobs"] != 0).any())
        return batch
