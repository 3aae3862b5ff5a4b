"""The baseline of the step cases: the training loop that a person writes on transformers and torch, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from benchmarks import tiny


class BareLoop:
    """One model in one process with torch's AdamW; the same weights, data, micro-batches and hyperparameters as the worker's."""

    def __init__(self, model: Path, micro_batch: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        self.micro_batch = micro_batch
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": tiny.WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
            lr=tiny.LEARNING_RATE,
            betas=tiny.BETAS,
            eps=tiny.EPSILON,
        )

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        """One optimizer step; the loss before it."""
        # rows are padded on the right, so the causal mask alone hides the padding
        targets = batch["input_ids"].masked_fill(batch["token_mask"] == 0, -100)[:, 1:]
        valid = (targets != -100).sum()
        total = 0.0
        for ids, expected in zip(batch["input_ids"].split(self.micro_batch), targets.split(self.micro_batch), strict=True):
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), expected.reshape(-1), ignore_index=-100, reduction="sum") / valid
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), tiny.CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total
