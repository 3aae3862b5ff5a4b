"""Policy configuration of a case as a user would write it, and its optimizer settings in torch's terms.

This module also contains tensor-parallel plans that ``dtensor_cfg.custom_parallel_plan`` can name. The case
option ``plan=written`` uses a function that returns the built-in plan, ``names`` a dictionary with torch's
column-wise and row-wise styles by name (without sequence parallelism), and ``mlp`` a dictionary that shards
only the MLPs, so that every rank has the complete attention.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from pathlib import Path

from megarl.config.sections import Config
from megarl.models.dtensor.plans import Plan, decoder_plan
from megarl.parity.case import HEAD_NORMS, MILD_EPSILON, Case
from megarl.parity.losses import loss_weight
from megarl.parity.routers import COEFFICIENT, Z_COEFFICIENT, Balancing

_LAYER = "model.layers.*"
_HEAD_NORMS = dict.fromkeys(
    (f"{_LAYER}.self_attn.q_norm", f"{_LAYER}.self_attn.k_norm"), "replicated_with_grad_allreduce"
)
mlp = {
    f"{_LAYER}.mlp.gate_proj": "colwise",
    f"{_LAYER}.mlp.up_proj": "colwise",
    f"{_LAYER}.mlp.down_proj": "rowwise",
}
names = {
    **mlp,
    **{f"{_LAYER}.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v")},
    f"{_LAYER}.self_attn.o_proj": "rowwise",
}
names_head_norms = {**names, **_HEAD_NORMS}
whole_head_norms = functools.partial(decoder_plan, sequence_parallel=False)
sequence_head_norms = functools.partial(decoder_plan, sequence_parallel=True)


def plan_path(case: Case) -> str | None:
    """Return the import path of the case's tensor-parallel plan; None for the built-in plan."""
    if case.plan == "built-in":
        return None
    head_norms = case.family in HEAD_NORMS
    name = {
        "written": ("sequence" if case.sp else "whole") + ("_head_norms" if head_norms else ""),
        "names": "names" + ("_head_norms" if head_norms else ""),
        "mlp": "mlp",
    }[case.plan]
    return f"{__name__}.{name}"


def whole() -> Plan:
    """Return the built-in plan without head norms, for families that do not have them."""
    return _without_head_norms(whole_head_norms())


def sequence() -> Plan:
    """Return the built-in plan with sequence parallelism, for families without head norms."""
    return _without_head_norms(sequence_head_norms())


def _without_head_norms(plan: Plan) -> Plan:
    return {name: style for name, style in plan.items() if name not in _HEAD_NORMS}


ADAPTER_SCALE = 1.5
"""Factor on the LoRA product B A (``alpha / dim``)."""
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
MOMENTUM = 0.9
FIRST_RATE, LAST_RATE = 0.25, 0.1
"""Learning rate at the start of warm-up and at the end of decay, relative to the peak."""
FIRST_DECAY = 0.02
"""Initial weight decay of a schedule that increases it."""
DECAY_CALLS = 3
"""Number of ``train()`` calls after which learning rate and weight decay have reached their final values."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Optimizer hyperparameters of a case, in torch's terms.

    Attributes:
        kind: ``adam`` (decoupled weight decay) or ``sgd``.
        clip: largest gradient norm; None for no clipping.
        warmup: number of ``train()`` calls in which the learning rate rises linearly from a quarter of its
            peak.
        peak: largest learning rate.
        schedule: decay of the learning rate to a tenth of its peak: ``constant`` (no decay), ``linear``,
            ``cosine`` or ``inverse-square-root``.
        decay: increase of the weight decay: ``constant`` (none), ``linear`` or ``cosine``.
        balancing: settings of the router balancing losses.
        epsilon: Adam's epsilon.
    """

    kind: str
    clip: float | None
    warmup: int = 0
    peak: float = 2e-3
    schedule: str = "constant"
    decay: str = "constant"
    balancing: Balancing = field(default_factory=Balancing)
    epsilon: float = MILD_EPSILON

    def rate(self, call: int) -> float:
        """Return the learning rate in ``train()`` call number ``call``, counted from 0."""
        if call < self.warmup:
            return self.peak * (FIRST_RATE + (1 - FIRST_RATE) * call / self.warmup)
        if self.schedule == "inverse-square-root":
            falling = math.sqrt(max(self.warmup, 1) / max(call, 1))
            return self.peak * (max(falling, LAST_RATE) if call <= DECAY_CALLS else LAST_RATE)
        progress = min(1.0, (call - self.warmup) / (DECAY_CALLS - self.warmup))
        left = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[
            self.schedule
        ]
        return self.peak * (LAST_RATE + (1 - LAST_RATE) * left)

    def weight_decay(self, call: int) -> float:
        """Return the weight decay in ``train()`` call number ``call``, counted from 0."""
        progress = min(1.0, call / DECAY_CALLS)
        grown = {"constant": 1.0, "linear": progress, "cosine": (1 - math.cos(math.pi * progress)) / 2}[
            self.decay
        ]
        return FIRST_DECAY + (WEIGHT_DECAY - FIRST_DECAY) * grown


def hyperparameters(case: Case) -> Hyperparameters:
    """Return the optimizer hyperparameters of a case."""
    balancing = Balancing(case.balance, case.zloss, case.freeze, loss_weight(case))
    clip, warmup = case.clip or None, _warmup_calls(case)
    return Hyperparameters(
        case.optimizer, clip, warmup, case.lr, case.schedule, case.decay, balancing, case.eps
    )


def _warmup_calls(case: Case) -> int:
    """Return the number of warm-up calls: 0 without warm-up, otherwise 2, or 1 if a decay follows that must
    fit into the few calls."""
    return 0 if not case.warmup else 2 if case.schedule == "constant" else 1


STACKS = ("gate_up_proj", "down_proj")
"""Parameters in which transformers stacks the matrices of all experts of a layer, in transformers' order."""


OUTER = ("embed_tokens", "lm_head")
"""Name suffixes of the embedding and the output layer."""
NOT_ADAPTED = ["*.experts.*", "*.linear_attn.*"]


def adapter_directory(case: Case, model: Path) -> Path | None:
    """Return the directory of the case's LoRA adapter in PEFT format; None for a case without an adapter.

    The adapter covers all linear layers and, if the case requests it, stacked expert weights, the embedding
    and the output layer.
    """
    parts = f"{'-stacks' * case.stacks}{'-outer' * case.outer}"
    return model / f"adapter-{case.lora}{parts}" if case.lora else None


def policy_config(case: Case, model: Path) -> Config:
    """Return the policy configuration of a case as a user would write it, without most keys whose values are
    defaults."""
    config: Config = {
        "model_name": str(model),
        "tokenizer": {"name": str(model)},
        "train_global_batch_size": case.global_batch,
        "train_micro_batch_size": case.mbs,
        "logprob_batch_size": case.lpbs,
        "logprob_chunk_size": case.chunk or None,
        "precision": case.precision,
        "max_total_sequence_length": case.length,
        "make_sequence_length_divisible_by": case.share * case.pad,
        "max_grad_norm": case.clip or None,
        **_batching(case),
    }
    if case.scores:
        config["reward_model_cfg"] = {"enabled": True}
    if case.lora:
        alpha = ADAPTER_SCALE * case.lora
        config["peft"] = {
            "enabled": True,
            "dim": case.lora,
            "alpha": alpha,
            "adapter_path": str(adapter_directory(case, model)),
        }
        if case.stacks:
            config["peft"]["target_parameters"] = [f"experts.{name}" for name in STACKS]
        if case.outer:
            # An empty ``target_modules`` list would select all linear layers but not the outer ones, so the
            # list names both.
            config["peft"] |= {"target_modules": ["*_proj*", *OUTER], "exclude_modules": NOT_ADAPTED}
    if case.temperature != 1.0 or case.filters:
        sampling = case.sampling
        drawing = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        config["generation"] = {"max_new_tokens": 1, **drawing}
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
        **_exchange(case),
        "pipeline_model_parallel_layout": case.layout or None,
        # null selects GPTModel if the installed Megatron-Core has it.
        "model_class": "hybrid" if case.model_class == "hybrid" else None,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "activation_checkpointing": case.recompute,
        "optimizer": {
            "optimizer": case.optimizer,
            "lr": case.lr,
            "min_lr": 0.0 if case.schedule == "constant" else LAST_RATE * case.lr,
            "weight_decay": WEIGHT_DECAY,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_eps": case.eps,
            "sgd_momentum": MOMENTUM,
            "use_distributed_optimizer": case.distopt,
        },
        "distributed_data_parallel_config": {
            "overlap_grad_reduce": case.overlap,
            "overlap_param_gather": case.overlap and case.distopt,
            "bucket_size": case.bucket or None,
            "grad_reduce_in_fp32": case.wide,
        },
    }
    if case.experts:
        megatron |= {
            "moe_token_dispatcher_type": case.dispatcher,
            "freeze_moe_router": case.freeze,
            "moe_router_dtype": None if case.router == "model" else case.router,
            "moe_router_load_balancing_type": {"none": "none", "aux": "aux_loss", "seq": "seq_aux_loss"}[
                case.balance
            ],
            "moe_aux_loss_coeff": None if case.balance == "none" else COEFFICIENT * loss_weight(case),
            "moe_z_loss_coeff": Z_COEFFICIENT * loss_weight(case) if case.zloss else None,
        }
    scheduler = _megatron_scheduler(case)
    return {"megatron_cfg": megatron | ({"scheduler": scheduler} if scheduler else {})}


def _megatron_scheduler(case: Case) -> Config:
    scheduler: Config = {}
    if case.warmup:
        scheduler |= {"lr_warmup_iters": _warmup_calls(case), "lr_warmup_init": FIRST_RATE * case.lr}
    if case.schedule != "constant":
        scheduler |= {"lr_decay_style": case.schedule, "lr_decay_iters": DECAY_CALLS}
    if case.decay != "constant":
        growth = {
            "weight_decay_incr_style": case.decay,
            "start_weight_decay": FIRST_DECAY,
            "end_weight_decay": WEIGHT_DECAY,
        }
        scheduler |= {**growth, "lr_decay_iters": DECAY_CALLS}
    return scheduler


def _exchange(case: Case) -> Config:
    """Return the config key for the communication of keys and values between context-parallel ranks; empty
    for the default."""
    return {} if case.comm == "all_gather" else {"context_parallel_comm_type": case.comm}


def _dtensor(case: Case) -> Config:
    section = {
        "enabled": True,
        "tensor_parallel_size": case.tp,
        "sequence_parallel": case.sp,
        "context_parallel_size": case.cp,
        **_exchange(case),
        "custom_parallel_plan": plan_path(case),
        "activation_checkpointing": case.recompute,
        "cpu_offload": case.offload,
    }
    return {"dtensor_cfg": section, **_torch_optimizer(case)}


def _fsdp1(case: Case) -> Config:
    return {
        "fsdp_offload_enabled": case.offload,
        "activation_checkpointing_enabled": case.recompute,
        **_torch_optimizer(case),
    }


def _torch_optimizer(case: Case) -> Config:
    common = {"lr": case.lr, "weight_decay": WEIGHT_DECAY}
    if case.optimizer == "adam":
        optimizer = {"name": "torch.optim.AdamW", "kwargs": {**common, "betas": list(BETAS), "eps": case.eps}}
    else:
        optimizer = {"name": "torch.optim.SGD", "kwargs": {**common, "momentum": MOMENTUM}}
    # Megatron-Core does not decay vectors either, and the reference is the same for all backends.
    return {"optimizer": {**optimizer, "weight_decay_on_vectors": False}, **_torch_schedule(case)}


def _torch_schedule(case: Case) -> Config:
    """Return the scheduler config: one schedule, or two and the call at which the second starts."""
    kinds, warmup = "torch.optim.lr_scheduler", _warmup_calls(case)
    left = DECAY_CALLS - warmup
    growing = {
        "name": f"{kinds}.LinearLR",
        "kwargs": {"start_factor": FIRST_RATE, "end_factor": 1.0, "total_iters": warmup},
    }
    falling = {
        "linear": {
            "name": f"{kinds}.LinearLR",
            "kwargs": {"start_factor": 1.0, "end_factor": LAST_RATE, "total_iters": left},
        },
        "cosine": {
            "name": f"{kinds}.CosineAnnealingLR",
            "kwargs": {"T_max": left, "eta_min": LAST_RATE * case.lr},
        },
    }.get(case.schedule)
    if falling is None:
        return {"scheduler": growing} if warmup else {}
    return {"scheduler": [growing, falling, {"milestones": [warmup]}] if warmup else falling}
