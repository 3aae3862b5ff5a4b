"""The reference for mixtures of experts: plain transformers with slow, literal load-balancing losses."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.parity.pool import WorkerPool
from tests.dist import jobs, reference
from tests.dist.batches import make_batch
from tests.dist.checks import check_trained
from tests.dist.remembered import remembered, without_layout

BATCHES = [make_batch(rows=8, length=12, seed=seed) for seed in (1, 2, 3)]


def load(model: Path | str) -> torch.nn.Module:
    """In float32; the eager experts, because the grouped product of transformers wants rows of 16 bytes,
    which tiny models lack."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def weights_of(model: torch.nn.Module, directory: Path) -> dict[str, Tensor]:
    """Weights by the names that a checkpoint has them under; transformers itself stacks the experts."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def gates(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


class Balanced:
    """A loss with load-balancing losses added, over the routing of the one forward pass before it.

    Attributes:
        plain: the last loss without them.
        figures: ``moe_aux_loss``, ``moe_z_loss`` and the load of experts, as the engine reports them.
    """

    def __init__(
        self, model: torch.nn.Module, loss_fn: Callable[..., Any], config: Mapping[str, Any]
    ) -> None:
        megatron = config["megatron_cfg"]
        self.loss_fn = loss_fn
        self.kind = megatron["moe_router_load_balancing_type"]
        given = megatron["moe_aux_loss_coeff"]
        self.coefficient = getattr(model.config, "router_aux_loss_coef", 0.0) if given is None else given
        self.z = megatron["moe_z_loss_coeff"] or 0.0
        self.chosen = model.config.num_experts_per_tok
        self.sigmoid = any(hasattr(gate, "e_score_correction_bias") for gate in gates(model))
        self.grouped = getattr(model.config, "topk_method", None) == "group_limited_greedy"
        self.experts = gates(model)[0].weight.shape[0]
        self.logits: list[Tensor] = []
        self.plain = 0.0
        self.figures: dict[str, float] = {}
        for gate in gates(model):
            gate.register_forward_hook(
                lambda module, inputs, outputs: self.logits.append(self.marked(outputs[0], outputs[2]))
            )
            if megatron["freeze_moe_router"]:
                gate.weight.requires_grad_(False)

    def __call__(
        self, data: Mapping[str, Any], *normalizers: Any, next_token_logprobs: Tensor
    ) -> tuple[Tensor, Any]:
        loss, metrics = self.loss_fn(data, *normalizers, next_token_logprobs=next_token_logprobs)
        self.plain = float(loss.detach())
        rows, width = data["input_ids"].shape
        layers = [logits.view(rows, width, -1) for logits in self.logits]
        self.logits = []
        sequences = [
            [
                layer[row, : int(data["input_lengths"][row])]
                for row in range(rows)
                if data["sample_mask"][row] != 0
            ]
            for layer in layers
        ]
        whole = [torch.cat(layer) for layer in sequences]
        if self.kind == "seq_aux_loss":
            balance = [
                torch.stack([self.switch(sequence) for sequence in layer]).mean() for layer in sequences
            ]
        else:
            balance = [self.switch(tokens) for tokens in whole]
        z = [
            torch.stack([token[: self.experts].exp().sum().log() ** 2 for token in tokens]).mean()
            for tokens in whole
        ]
        loads = torch.stack([self.load(tokens) for tokens in whole])
        loads = loads / loads.mean(1, keepdim=True)
        self.figures = {
            "moe_aux_loss": float(torch.stack(balance).detach().mean()),
            "moe_z_loss": float(torch.stack(z).detach().mean()),
            "moe_expert_load_max": float(loads.max()),
            "moe_expert_load_min": float(loads.min()),
        }
        if self.kind != "none":
            loss = loss + self.coefficient * torch.stack(balance).sum()
        return loss + self.z * torch.stack(z).sum(), metrics

    def marked(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """[t, 2 E]: the logits of some tokens, and behind them 1 for the experts that they go to. For softmax
        these are the highest logits; for sigmoids, with groups and corrections, those that transformers
        chose."""
        marks = torch.zeros_like(logits)
        for token, experts in enumerate(chosen):
            marks[
                token, experts if self.sigmoid or self.grouped else logits[token].topk(self.chosen).indices
            ] = 1
        return torch.cat([logits, marks], 1)

    def load(self, tokens: Tensor) -> Tensor:
        """[E]: tokens that went to each expert."""
        return tokens.detach()[:, self.experts :].sum(0)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of one token."""
        if not self.sigmoid:
            return logits.softmax(0)
        scores = [1 / (1 + (-logit).exp()) for logit in logits]
        return torch.stack(scores) / sum(scores)

    def switch(self, marked: Tensor) -> Tensor:
        """E * sum_i f_i * P_i over some tokens, [t, 2 E]."""
        logits, tokens, experts = marked[:, : self.experts], len(marked), self.experts
        counts = self.load(marked)
        by_token = torch.stack([self.probabilities(token) for token in logits])
        total = logits.new_zeros(())
        for expert in range(experts):
            fraction = counts[expert] / (tokens * self.chosen)
            probability = by_token[:, expert].sum() / tokens
            total = total + fraction * probability
        return experts * total


@remembered
def train(
    model: Path, config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Callable[..., Any]
) -> tuple[list[float], list[float], dict[str, Tensor], list[dict[str, float]]]:
    """Losses without the balancing ones, gradient norms, weights after one step for each batch, and balance
    figures.

    ``config`` is given without its layout, so that all layouts share one answer.
    """
    trainer = reference.ReferenceTrainer(load(model), config)
    balanced = Balanced(trainer.model, loss_fn, config)
    losses, norms, figures = [], [], []
    for batch in batches:
        norms.append(trainer.step(batch, balanced)[1])
        losses.append(balanced.plain)
        figures.append(balanced.figures)
    with tempfile.TemporaryDirectory() as directory:
        return losses, norms, weights_of(trainer.model, Path(directory)), figures


@remembered
def logprobs(model: Path, batch: Mapping[str, Any], temperature: float) -> Tensor:
    """As ``reference.logprobs``."""
    return reference.logprobs(load(model), batch, temperature)


@remembered
def greedy(model: Path, batch: Mapping[str, Any], new_tokens: int) -> list[list[int]]:
    """As ``reference.greedy``."""
    return reference.greedy(load(model), batch, new_tokens, [])


def check_training(
    pool: WorkerPool, world: int, model: Path, config: dict[str, Any], loss_fn: Any
) -> list[dict[str, Any]]:
    """Losses, gradient norms, weights and balance figures of three Adam steps."""
    alike = without_layout(config)
    losses, norms, weights, figures = train(model, alike, BATCHES, loss_fn)
    results: list[dict[str, Any]] = pool.run(world, jobs.train, config, BATCHES, loss_fn)
    check_trained(results, losses, norms, weights)
    for result in results:
        for measured, expected in zip(result["metrics"], figures, strict=True):
            reported = {name: measured[name] for name in measured if name.startswith("moe_")}
            assert {"moe_aux_loss", "moe_expert_load_max", "moe_expert_load_min"} <= reported.keys()
            for name, values in reported.items():
                torch.testing.assert_close(
                    values, [expected[name]], atol=0, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
                )
    return results
