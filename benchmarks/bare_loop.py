"""A training loop as a person would write it instead of using a worker: transformers and torch, in one
process or under torch's FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks import tiny


class BareLoop:
    """One model in one process with torch's fused AdamW. Weights, data, micro-batches and hyperparameters are
    the same as the worker's.

    Args:
        model: Hugging Face directory.
        micro_batch: rows of a micro-batch.
        device: ``cpu``, which computes in float32, or ``cuda``, which computes matrix products in bfloat16 as
            the worker does.
    """

    ranks = 1

    def __init__(self, model: Path, micro_batch: int, device: str = "cpu") -> None:
        self.device = device
        self.model: Any = self.divided(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train().to(device)
        )
        self.micro_batch = micro_batch
        # Decay only matrices, as Megatron-Core does.
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": tiny.WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=tiny.LEARNING_RATE,
            betas=tiny.BETAS,
            eps=tiny.EPSILON,
            fused=True,
        )

    def divided(self, model: Any) -> Any:
        """Return the model in the form in which this loop trains it."""
        return model

    def own(self, tensor: Tensor) -> Tensor:
        """Return this process's rows of a batch, on its device."""
        return tensor.to(self.device)

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Take one optimizer step, and return the loss before it: the sum over this process's rows, divided
        by the tokens of all rows."""
        # Rows are padded on the right, so the causal mask alone hides the padding.
        targets = batch["input_ids"].masked_fill(batch["token_mask"] == 0, -100)[:, 1:]
        valid = (targets != -100).sum()
        parts = list(
            zip(
                self.own(batch["input_ids"]).split(self.micro_batch),
                self.own(targets).split(self.micro_batch),
                strict=True,
            )
        )
        total = 0.0
        for place, (ids, expected) in enumerate(parts):
            self.before_pass(place + 1 == len(parts))
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
            flat = logits.float().reshape(-1, logits.shape[-1])
            # Divide by the tokens of all micro-batches and ranks, so that the parts add up to the mean.
            loss = F.cross_entropy(flat, expected.reshape(-1), ignore_index=-100, reduction="sum") / valid
            (loss * self.ranks).backward()  # FSDP2 takes the mean over its ranks
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), tiny.CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def before_pass(self, last: bool) -> None:
        """Prepare a micro-batch; ``last`` marks the last one of a step. Nothing is needed here."""


class FSDP2Loop(BareLoop):
    """The same loop on all ranks, sharded by torch's ``fully_shard``. Gradients are reduced once per step."""

    def divided(self, model: Any) -> Any:
        """Return the model with each layer, and all remaining parameters, sharded over all ranks."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.ranks = dist.get_world_size()
        mesh = init_device_mesh(self.device, (self.ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def own(self, tensor: Tensor) -> Tensor:
        """Return this rank's equal share of the rows."""
        return tensor.chunk(self.ranks)[dist.get_rank()].to(self.device)

    def before_pass(self, last: bool) -> None:
        """Reduce gradients, and prepare the optimizer step, only at the last micro-batch."""
        self.model.set_requires_gradient_sync(last)
        self.model.set_is_last_backward(last)
