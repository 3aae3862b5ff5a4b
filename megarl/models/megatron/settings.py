"""Converts the policy configuration and the model's architecture into Megatron-Core's configuration
objects."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from converters.model_config.architecture import Architecture
from converters.model_config.megatron_settings import megatron_settings
from converters.model_config.mixture import Routing
from megarl.config.layout import pipeline_chunks
from megarl.config.nested import at
from megarl.config.policy import MegatronConfig, PolicyConfig
from megarl.distributed.device import runtime
from megarl.errors import ConfigError, Violation
from megarl.models.engine.precision import dtype_of
from megarl.models.megatron.moe_record import BalanceSettings
from megarl.models.megatron.transformer_engine import find

NO_CLIPPING = float("inf")
# Initial loss scale of torch's float16 scaler. Megatron's 2**32 would skip dozens of first steps of any
# model.
INITIAL_LOSS_SCALE = 2.0**16


def compiles() -> bool:
    """Return whether torch.compile fuses the operations for which Transformer Engine has fused kernels.

    False on a CPU, where the compiled code is slower and not bitwise equal.
    """
    return runtime().is_cuda


def _groups_experts(megatron: MegatronConfig) -> bool:
    """Return whether a rank's experts run as one grouped matmul. By default only on GPUs: on a CPU it is not
    faster, and not all results are bitwise equal."""
    chosen = megatron["moe_grouped_gemm"]
    return runtime().is_cuda if chosen is None else bool(chosen)


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def transformer_config(policy: PolicyConfig, architecture: Architecture, *, fused: bool) -> TransformerConfig:
    """Return Megatron's model configuration.

    Losses and gradients are plain sums: ``calculate_per_token_loss`` disables all averaging in Megatron.
    Fusions that need CUDA extensions are enabled only with Transformer Engine's layers (``fused``); fusions
    by torch.compile are enabled on every GPU.
    """
    megatron = policy["megatron_cfg"]
    dtype = dtype_of(policy["precision"], "policy.precision")
    chunks = pipeline_chunks(megatron)
    if chunks > 1:
        # With Megatron's default (batched sends), two stages that send to each other silently receive
        # mixed-up tensors over gloo. Separate, overlapped sends and receives are correct.
        interleaved = {
            "virtual_pipeline_model_parallel_size": chunks,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
        # Memory may be freed during a send only if a CUDA stream orders the two: gloo would send what is
        # written there next.
        interleaved["deallocate_pipeline_outputs"] = runtime().is_cuda
    else:
        interleaved = {"deallocate_pipeline_outputs": True}
    settings = megatron_settings(architecture)
    config = (MLATransformerConfig if architecture.latent_attention is not None else TransformerConfig)(
        **settings.transformer,
        # Only gpt-oss clamps its gates. Its activation is x sigmoid(1.702 x), which is Megatron's quick_gelu.
        activation_func=F.silu if architecture.gate_limit is None else quick_gelu,
        tensor_model_parallel_size=megatron["tensor_model_parallel_size"],
        pipeline_model_parallel_size=megatron["pipeline_model_parallel_size"],
        context_parallel_size=megatron["context_parallel_size"],
        cp_comm_type=megatron["context_parallel_comm_type"],
        pipeline_model_parallel_layout=megatron["pipeline_model_parallel_layout"],
        num_layers_in_first_pipeline_stage=megatron["num_layers_in_first_pipeline_stage"],
        num_layers_in_last_pipeline_stage=megatron["num_layers_in_last_pipeline_stage"],
        sequence_parallel=megatron["sequence_parallel"],
        pipeline_dtype=dtype_of(megatron["pipeline_dtype"], "policy.megatron_cfg.pipeline_dtype"),
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        calculate_per_token_loss=True,
        # Initialisation stays enabled, because it also marks sharded parameters. The values do not matter:
        # every weight is loaded afterwards.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        use_cpu_initialization=False,
        attention_softmax_in_fp32=True,
        deterministic_mode=policy["deterministic"] and runtime().is_cuda,
        # With this fusion, latent attention would require YaRN and could not generate.
        apply_rope_fusion=fused
        and bool(megatron.get("apply_rope_fusion", True))
        and architecture.latent_attention is None,
        # With this fusion, Megatron-Core would clamp gates before adding their bias.
        bias_activation_fusion=(fused or compiles()) and architecture.gate_limit is None,
        # Transformer Engine's experts with biases do not support this fusion.
        bias_dropout_fusion=(fused or compiles())
        and not (architecture.mixture is not None and architecture.mlp_bias),
        masked_softmax_fusion=fused,
        persist_layer_norm=fused,
        # Transformer Engine's layers add weight gradients to the float32 sums inside the matmul, which saves
        # one rounding. ``build_chunks`` decides for the output layer, which is Megatron-Core's own.
        gradient_accumulation_fusion=fused,
        **_recomputation(megatron),
        **interleaved,
        **(
            _experts(megatron, architecture.mixture.routing, fused)
            if architecture.mixture is not None
            else {}
        ),
    )
    # Set these after construction: the dataclass lacks some of them, and its constructor rejects the values
    # of others.
    for name, value in (settings.attributes | {"grouped_experts": _groups_experts(megatron)}).items():
        setattr(config, name, value)
    if architecture.latent_attention is not None and not fused:
        # If True, Megatron sums the gradients of any q_layernorm over the tensor-parallel ranks. Here it is
        # the norm of latent queries, whose gradient is complete on every rank. The portable spec includes the
        # norm anyway.
        config.qk_layernorm = False
    return config


def _recomputation(megatron: MegatronConfig) -> dict[str, object]:
    """Return the settings for activation recomputation in the backward pass."""
    if not megatron["activation_checkpointing"]:
        return {}
    if megatron["recompute_granularity"] == "selective":
        return {
            "recompute_granularity": "selective",
            "recompute_modules": list(megatron["recompute_modules"]),
        }
    # Recomputing one layer at a time needs the least memory; hybrid_model changes this to two half layers.
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _experts(megatron: MegatronConfig, routing: Routing, fused: bool) -> dict[str, object]:
    """Return the settings for mixture-of-experts layers. Megatron's balancing losses are off, because megarl
    computes them itself (``balance_settings``)."""
    return {
        "expert_model_parallel_size": megatron["expert_model_parallel_size"],
        "expert_tensor_parallel_size": megatron["expert_tensor_parallel_size"],
        "moe_token_dispatcher_type": megatron["moe_token_dispatcher_type"],
        "moe_permute_fusion": _permutes_fused(megatron),
        "moe_router_dtype": megatron["moe_router_dtype"] or ("fp32" if routing.in_float32 else None),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # Megatron-Core's grouped matmul requires Transformer Engine; ours is enabled by ``grouped_experts``.
        "moe_grouped_gemm": fused and _groups_experts(megatron),
    }


def _permutes_fused(megatron: MegatronConfig) -> bool:
    """Return whether Transformer Engine's kernels sort tokens by expert; they can do so for portable layers
    too.

    Raises:
        ConfigError: the option is set, but this process cannot use Transformer Engine.
    """
    if not megatron["moe_permute_fusion"]:
        return False
    reason = find().reason
    if reason is not None:
        bound = f"its kernels are Transformer Engine's, which cannot be used: {reason}"
        raise ConfigError(
            [
                Violation(
                    "policy.megatron_cfg.moe_permute_fusion",
                    True,
                    bound,
                    "run megarl doctor for details, or write false",
                )
            ]
        )
    return True


def balance_settings(policy: PolicyConfig, architecture: Architecture) -> BalanceSettings | None:
    """Return the routers' load-balancing settings; None for a dense model. The coefficient defaults to that
    of the model's config."""
    mixture, megatron = architecture.mixture, policy["megatron_cfg"]
    if mixture is None:
        return None
    coefficient = megatron["moe_aux_loss_coeff"]
    return BalanceSettings(
        kind=megatron["moe_router_load_balancing_type"],
        coefficient=mixture.auxiliary_loss_coefficient if coefficient is None else coefficient,
        z_coefficient=megatron["moe_z_loss_coeff"] or 0.0,
        score=mixture.routing.score,
        experts=mixture.num_experts,
        chosen=mixture.experts_per_token,
        sparse_layers=mixture.sparse_layers,
    )


def ddp_config(policy: PolicyConfig, replicas: int) -> DistributedDataParallelConfig:
    """Return Megatron's data-parallel configuration, set to sum gradients over ranks instead of averaging
    them.

    Args:
        policy: the policy configuration with defaults filled in.
        replicas: number of ranks over which one parameter's gradient is reduced (data times context
            parallel).
    """
    megatron = policy["megatron_cfg"]
    chosen = megatron["distributed_data_parallel_config"]
    overlaps = chosen["overlap_grad_reduce"]
    if overlaps is None:
        # Overlap on a single rank too if gradients are copied to host memory: each is then copied as soon as
        # it is reduced.
        in_host_memory = at(megatron, "optimizer.optimizer_offload_fraction") or 0.0
        overlaps = chosen["overlap_param_gather"] or replicas > 1 or in_host_memory > 0
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=chosen["grad_reduce_in_fp32"],
        overlap_grad_reduce=overlaps,
        overlap_param_gather=chosen["overlap_param_gather"],
        use_distributed_optimizer=megatron["optimizer"]["use_distributed_optimizer"]
        if megatron.get("optimizer")
        else False,
        # Losses are normalised over the global batch before the pass, so a mean over ranks would divide
        # twice.
        average_in_collective=False,
        # megarl checks loss and gradient norm itself and can skip the batch; Megatron-Core would abort the
        # run.
        check_for_nan_in_grad=False,
        bucket_size=chosen["bucket_size"],
    )


def optimizer_config(policy: PolicyConfig) -> OptimizerConfig:
    """Return Megatron's optimizer configuration. A ``clip_grad`` of 0 or null disables clipping; the gradient
    norm is still computed."""
    chosen = policy["megatron_cfg"]["optimizer"]
    overlap = policy["megatron_cfg"]["distributed_data_parallel_config"]["overlap_param_gather"]
    return OptimizerConfig(
        optimizer=chosen["optimizer"],
        lr=chosen["lr"],
        min_lr=chosen["min_lr"],
        weight_decay=chosen["weight_decay"],
        bf16=policy["precision"] == "bfloat16",
        fp16=policy["precision"] == "float16",
        params_dtype=dtype_of(policy["precision"], "policy.precision"),
        adam_beta1=chosen["adam_beta1"],
        adam_beta2=chosen["adam_beta2"],
        adam_eps=chosen["adam_eps"],
        sgd_momentum=chosen["sgd_momentum"],
        use_distributed_optimizer=chosen["use_distributed_optimizer"],
        overlap_param_gather=overlap,
        # With 0 a single Megatron-Core optimizer would skip the norm, which megarl logs and uses to reject
        # steps.
        clip_grad=chosen["clip_grad"] or NO_CLIPPING,
        initial_loss_scale=INITIAL_LOSS_SCALE,
    )
