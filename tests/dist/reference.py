"""The independent reference: plain transformers in one process, plain torch Adam, no line of megarl's
engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.dist.remembered import remembered


def load(model: Path | str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()


def next_token_logprobs(model: torch.nn.Module, data: Mapping[str, Any], temperature: float = 1.0) -> Tensor:
    """[B, S-1], differentiable; padding is masked out of the attention."""
    mask = torch.arange(data["input_ids"].shape[1])[None] < data["input_lengths"][:, None]
    logits = model(input_ids=data["input_ids"], attention_mask=mask.long()).logits.float() / temperature
    return logits.log_softmax(-1)[:, :-1].gather(2, data["input_ids"][:, 1:, None]).squeeze(2)


def logprobs(model: torch.nn.Module, data: Mapping[str, Any], temperature: float = 1.0) -> Tensor:
    """[B, S] with column 0 and padding 0."""
    with torch.no_grad():
        values = torch.nn.functional.pad(next_token_logprobs(model, data, temperature), (1, 0))
    return values * (torch.arange(values.shape[1])[None] < data["input_lengths"][:, None])


@remembered
def logprobs_of(model: Path, batch: Mapping[str, Any], temperature: float) -> Tensor:
    """``logprobs`` of a stored model, which all layouts share."""
    return logprobs(load(model), batch, temperature)


def greedy(model: Any, batch: Mapping[str, Any], new_tokens: int, stop: list[int]) -> list[list[int]]:
    """Prompt and greedy answer of each row, one row at a time."""
    options = {
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "eos_token_id": stop or None,
        "pad_token_id": 0,
    }
    rows = zip(batch["input_ids"], batch["input_lengths"].tolist(), strict=True)
    return [model.generate(ids[None, :length], **options)[0].tolist() for ids, length in rows]


class ReferenceTrainer:
    """Gradient of the whole batch at once, clipped by its norm, AdamW without decay on vectors and biases;
    ``policy_config``'s warm-up."""

    def __init__(self, model: torch.nn.Module, policy: Mapping[str, Any]) -> None:
        self.model = model.train()
        self.policy = policy
        chosen = policy["megatron_cfg"]["optimizer"]
        vectors = [
            p for name, p in model.named_parameters() if p.ndim == 1 or name.endswith("_bias")
        ]  # of all experts in one matrix
        matrices = [p for p in model.parameters() if not any(p is vector for vector in vectors)]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": chosen["weight_decay"]},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=chosen["lr"],
            betas=(chosen["adam_beta1"], chosen["adam_beta2"]),
            eps=chosen["adam_eps"],
        )
        self.calls = 0

    def read(self, data: Mapping[str, Any], temperature: float) -> dict[str, Tensor]:
        """What a loss reads beside the data."""
        return {"next_token_logprobs": next_token_logprobs(self.model, data, temperature)}

    def step(self, data: Mapping[str, Any], loss_fn: Callable[..., Any]) -> tuple[float, float]:
        """(loss, gradient norm before clipping) of one global batch."""
        scheduler, chosen = self.policy["megatron_cfg"]["scheduler"], self.policy["megatron_cfg"]["optimizer"]
        progress = min(1.0, self.calls / scheduler["lr_warmup_iters"])
        for group in self.optimizer.param_groups:
            group["lr"] = (
                scheduler["lr_warmup_init"] + (chosen["lr"] - scheduler["lr_warmup_init"]) * progress
            )
        sequences = data["sample_mask"].sum()
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        temperature = self.policy["generation"]["temperature"]
        loss, _ = loss_fn(data, sequences, tokens, **self.read(data, temperature))
        self.optimizer.zero_grad()
        loss.backward()
        clip = chosen["clip_grad"] or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.calls += 1
        return float(loss.detach()), float(norm)


def load_scoring(model: Path | str) -> torch.nn.Module:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        model, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def token_values(model: Any, data: Mapping[str, Any]) -> Tensor:
    """[B, S], differentiable: what the score layer says of every token; padding is 0."""
    inside = torch.arange(data["input_ids"].shape[1])[None] < data["input_lengths"][:, None]
    hidden = model.model(input_ids=data["input_ids"], attention_mask=inside.long()).last_hidden_state
    return model.score(hidden).squeeze(-1) * inside


class ScoringTrainer(ReferenceTrainer):
    """Of a model that scores, whose losses read values."""

    def read(self, data: Mapping[str, Any], temperature: float) -> dict[str, Tensor]:
        return {"values": token_values(self.model, data)}


class DistillationTrainer(ReferenceTrainer):
    """Reads the log-probabilities of the teacher's tokens."""

    def read(self, data: Mapping[str, Any], temperature: float) -> dict[str, Tensor]:
        mask = torch.arange(data["input_ids"].shape[1])[None] < data["input_lengths"][:, None]
        logits = self.model(input_ids=data["input_ids"], attention_mask=mask.long()).logits[:, :-1]
        found = (logits / temperature).log_softmax(-1)
        return {
            "next_token_logprobs": found.gather(2, data["input_ids"][:, 1:, None]).squeeze(2),
            "scored_logprobs": found.gather(2, data["teacher_topk_indices"][:, :-1]),
        }
