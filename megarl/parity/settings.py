"""The policy configuration of a case, as a user would write it, and its optimizer in the terms of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.sections import Config
from megarl.parity.case import Case
from megarl.parity.routers import COEFFICIENT, Z_COEFFICIENT, Balancing

LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
MOMENTUM = 0.9
# Adam divides by the root of the second moment, so that an error of a gradient comes back in a weight times up to LEARNING_RATE / EPSILON.
# Gradients here are of order 1e-2 to 1, their rounding errors of 1e-8 to 1e-7; more than a factor of 1 is seen in the next gradient.
EPSILON = 1e-2
WARMUP_CALLS = 2
FIRST_RATE = 0.25


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What the optimizer of a case does, in the terms of torch.

    Attributes:
        kind: ``adam`` (decoupled weight decay) or ``sgd``.
        clip: largest gradient norm, or None.
        warmup: the learning rate starts at a quarter and is full after two calls of ``train()``.
        balancing: of routers.
    """

    kind: str
    clip: float | None
    warmup: bool
    balancing: Balancing = field(default_factory=Balancing)

    def rate(self, call: int) -> float:
        """The learning rate in the ``call``-th call of ``train()``, counted from 0."""
        progress = min(1.0, call / WARMUP_CALLS) if self.warmup else 1.0
        return LEARNING_RATE * (FIRST_RATE + (1 - FIRST_RATE) * progress)


def hyperparameters(case: Case) -> Hyperparameters:
    """The optimizer of a case."""
    return Hyperparameters(case.optimizer, case.clip or None, case.warmup, Balancing(case.balance, case.zloss, case.freeze))


def policy_config(case: Case, model: Path) -> Config:
    """The case as a user would write it; what is left to defaults is left out."""
    config: Config = {
        "model_name": str(model),
        "tokenizer": {"name": str(model)},
        "train_global_batch_size": case.global_batch,
        "train_micro_batch_size": case.mbs,
        "logprob_batch_size": case.lpbs,
        "precision": case.precision,
        "max_total_sequence_length": case.length,
        "make_sequence_length_divisible_by": case.share * case.pad,
        "max_grad_norm": case.clip or None,
        **_batching(case),
    }
    if case.temperature != 1.0:
        config["generation"] = {"max_new_tokens": 1, "temperature": case.temperature}
    return config | {"megatron": _megatron, "dtensor": _dtensor, "fsdp1": _fsdp1}[case.backend](case)


def _batching(case: Case) -> Config:
    if case.batching == "fixed":
        return {}
    budgets = {"enabled": True, "train_mb_tokens": case.budget, "logprob_mb_tokens": case.budget}
    if case.batching == "dynamic":
        return {"dynamic_batching": {**budgets, "sequence_length_round": case.round}}
    return {"sequence_packing": {**budgets, **({"algorithm": case.packer} if case.packer else {})}}


def _megatron(case: Case) -> Config:
    megatron: Config = {
        "enabled": True,
        "tensor_model_parallel_size": case.tp,
        "sequence_parallel": case.sp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp if case.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": case.first or None,
        "num_layers_in_last_pipeline_stage": case.last or None,
        "context_parallel_size": case.cp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "activation_checkpointing": case.recompute,
        "optimizer": {
            "optimizer": case.optimizer,
            "lr": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_eps": EPSILON,
            "sgd_momentum": MOMENTUM,
            "use_distributed_optimizer": case.distopt,
        },
        "distributed_data_parallel_config": {
            "overlap_grad_reduce": case.overlap,
            "overlap_param_gather": case.overlap and case.distopt,
            "bucket_size": case.bucket or None,
        },
    }
    if case.experts:
        megatron |= {
            "moe_token_dispatcher_type": case.dispatcher,
            "freeze_moe_router": case.freeze,
            "moe_router_load_balancing_type": {"none": "none", "aux": "aux_loss", "seq": "seq_aux_loss"}[case.balance],
            "moe_aux_loss_coeff": None if case.balance == "none" else COEFFICIENT,
            "moe_z_loss_coeff": Z_COEFFICIENT if case.zloss else None,
        }
    if case.warmup:
        megatron["scheduler"] = {"lr_warmup_iters": WARMUP_CALLS, "lr_warmup_init": FIRST_RATE * LEARNING_RATE}
    return {"megatron_cfg": megatron}


def _dtensor(case: Case) -> Config:
    section = {
        "enabled": True,
        "tensor_parallel_size": case.tp,
        "sequence_parallel": case.sp,
        "context_parallel_size": case.cp,
        "activation_checkpointing": case.recompute,
        "cpu_offload": case.offload,
    }
    return {"dtensor_cfg": section, **_torch_optimizer(case)}


def _fsdp1(case: Case) -> Config:
    return {"fsdp_offload_enabled": case.offload, "activation_checkpointing_enabled": case.recompute, **_torch_optimizer(case)}


def _torch_optimizer(case: Case) -> Config:
    common: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    if case.optimizer == "adam":
        optimizer = {"name": "torch.optim.AdamW", "kwargs": {**common, "betas": list(BETAS), "eps": EPSILON}}
    else:
        optimizer = {"name": "torch.optim.SGD", "kwargs": {**common, "momentum": MOMENTUM}}
    if not case.warmup:
        return {"optimizer": optimizer}
    rates = {"start_factor": FIRST_RATE, "end_factor": 1.0, "total_iters": WARMUP_CALLS}
    return {"optimizer": optimizer, "scheduler": {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": rates}}
