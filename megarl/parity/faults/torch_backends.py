"""Known faults on the torch backends: the norm of sharded gradients, what FSDP does with gradients, decay and clipping."""

from __future__ import annotations

from typing import Any

import torch

from megarl.models.huggingface.optimizer import local_gradients, squared_norm
from megarl.parity.faults.patching import Mutation, is_clipped, many_tokens, replacing, sees_tokens

DTENSOR, FSDP1, SHARED = "megarl.models.dtensor", "megarl.models.fsdp1", "megarl.models.huggingface"


def _decay_everywhere(original: Any) -> Any:
    def build(*arguments: Any, **options: Any) -> Any:
        optimizer = original(*arguments, **options)
        for group in optimizer.param_groups:
            group["weight_decay"] = optimizer.defaults["weight_decay"]
        return optimizer

    return build


def _own_piece(original: Any) -> Any:
    """Each rank keeps the piece of its own gradient instead of that of the sum."""

    def take(group: Any, whole: torch.Tensor, shard: torch.Tensor) -> None:
        shard.copy_(whole.chunk(group.size())[group.rank()])

    return take


def _own_norm(original: Any) -> Any:
    return lambda parameters, device: float(squared_norm(local_gradients(parameters), device).sqrt())


FAULTS: dict[str, Mutation] = {
    "dtensor-norm-counts-copies": Mutation(
        "the gradient norm counts parameters that every tensor-parallel rank has once for each of them",
        lambda case: case.tp > 1 and sees_tokens(case),
        replacing(f"{DTENSOR}.backend:DTensorBackend", "_counted", lambda original: lambda self: self._parameters.values()),
        "tp=2",
        ("dtensor",),
    ),
    "fsdp1-norm-of-own-shard": Mutation(
        "the gradient norm is that of a rank's own shard",
        lambda case: case.dp > 1 and sees_tokens(case),
        replacing(f"{SHARED}.backend", "global_norm", _own_norm),
        "dp=2",
        ("fsdp1",),
    ),
    "fsdp1-gradients-not-reduced": Mutation(
        "each rank keeps its own gradient",
        lambda case: case.dp > 1 and many_tokens(case),
        replacing(f"{FSDP1}.sharded", "_sum_gradients", _own_piece),
        "dp=2",
        ("fsdp1",),
    ),
    "torch-clipping-forgotten": Mutation(
        "gradients are not clipped",
        is_clipped,
        replacing(f"{SHARED}.backend", "clip", lambda original: lambda gradients, norm, bound: None),
        "clip=0.05",
        ("dtensor", "fsdp1"),
    ),
    "torch-decay-on-vectors": Mutation(
        "norms and biases decay too",
        lambda case: True,
        replacing(f"{SHARED}.backend", "build_optimizer", _decay_everywhere),
        "",
        ("dtensor", "fsdp1"),
    ),
}
"""The faults by name."""
