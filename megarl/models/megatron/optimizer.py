"""Megatron's optimizer, and its schedule of learning rate and weight decay."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as mixed_precision
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from converters.model_config.heads import OUTPUT_LAYER
from megarl.checkpoint.collective import gather_objects
from megarl.config.policy import MegatronOptimizerConfig, PolicyConfig
from megarl.distributed.device import runtime
from megarl.errors import ConfigError, Violation
from megarl.models.engine.backend import StepOutcome
from megarl.models.engine.host_adam import HostMemory
from megarl.models.engine.low_precision_adam import StateSettings
from megarl.models.megatron.adam import GroupStepAdam, GroupStepAdamW, ShardedAdamW, copy_as_reduced
from megarl.models.megatron.settings import optimizer_config
from megarl.models.megatron.transformer_engine import KEY
from megarl.patched import patched

NEVER = 2**40
_EMBEDDING = "embedding.word_embeddings.weight"
# Megatron-Core adds this constant to the norm before it divides by it.
_CLIPPED = 1e-6
_SHOWN = 8


@contextlib.contextmanager
def fused_style_adam(*, stored: bool = False) -> Iterator[None]:
    """Within the context, make Megatron-Core build and checkpoint megarl's Adam if it finds neither
    Transformer Engine nor Apex. megarl's Adam counts steps per group, as theirs do.

    The context is needed to build an optimizer and to save or load its state.

    Args:
        stored: always build the Adam with configurable state formats (``ShardedAdamW``).
    """
    if distrib_optimizer.HAVE_APEX_OR_TE and not stored:
        yield
        return
    with patched(
        # Otherwise Megatron-Core would build the fused Adam that it found at import, whose arguments ours
        # does not accept.
        *([(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", True)] if stored else []),
        (torch.optim, "AdamW", ShardedAdamW if stored else GroupStepAdamW),
        (torch.optim, "Adam", GroupStepAdam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        # Treat our Adam as Transformer Engine's, whose step is saved per group. For torch's Adam,
        # Megatron-Core looks for a step in each parameter's state.
        (distrib_optimizer, "USING_TE_OPTIMIZER", True),
    ):
        yield


def _require_one_kind(policy: PolicyConfig) -> None:
    """Require all ranks to use optimizers of the same package. Collective over the world, if it is
    initialised.

    All ranks agree on Transformer Engine's layers, but each rank's Megatron-Core uses whichever optimizer it
    found at import.

    Raises:
        ConfigError: on all ranks; the message lists the ranks and hosts that have each package.
    """
    if not dist.is_initialized():
        return
    places: dict[str, list[str]] = {}
    # Gather the kinds of all ranks before anyone raises, because all ranks must fail with the same message.
    for rank, (kind, host) in enumerate(gather_objects((_kind_found(), socket.gethostname()))):
        places.setdefault(kind, []).append(f"rank {rank} on {host}")
    if len(places) == 1:
        return
    told = "; ".join(
        (
            f"{kind}: "
            f"{', '.join(ranks[:_SHOWN])}{f' and {len(ranks) - _SHOWN} more' if len(ranks) > _SHOWN else ''}"
        )
        for kind, ranks in places.items()
    )
    fix = (
        "install the same packages on all hosts: megarl doctor shows what fails to load, bash "
        "launch/gpu_environment.sh installs a set that fits"
    )
    reason = f"Megatron-Core found fused optimizers of different packages, whose steps differ: {told}"
    raise ConfigError([Violation(KEY, policy["megatron_cfg"]["transformer_engine"], reason, fix)])


def _kind_found() -> str:
    """Return the package whose fused optimizers Megatron-Core found at import."""
    if distrib_optimizer.USING_TE_OPTIMIZER:
        return "Transformer Engine's"
    return "Apex's" if distrib_optimizer.USING_APEX_OPTIMIZER else "none"


def build_optimizer(
    policy: PolicyConfig, chunks: Sequence[DistributedDataParallel], seed: int = 0
) -> MegatronOptimizer:
    """Build Megatron's optimizer for the model chunks of this stage. Collective over the world, if it is
    initialised.

    Biases and norms (one-dimensional parameters) get no weight decay, as in Megatron.

    Args:
        policy: the policy configuration with defaults filled in.
        chunks: the model chunks.
        seed: seed of stochastic rounding for state formats below float32.

    Raises:
        ConfigError: ranks have fused optimizers of different packages.
    """
    _require_one_kind(policy)
    config = optimizer_config(policy)
    states = _state_settings(policy["megatron_cfg"]["optimizer"], seed)
    if not states.are_plain:
        # Select Megatron-Core's path for optimizers that keep master weights themselves and read gradients
        # where data parallelism leaves them. Its public option requires Transformer Engine's optimizer.
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    # Gloo groups are needed only for Megatron-Core's gathering of optimizer state, which state_stream
    # replaces.
    options: dict[str, Any] = {"use_gloo_process_groups": False}
    # Pass Megatron-Core's default overrides explicitly, because their implicit use is marked as temporary.
    overrides = getattr(megatron_optimizer, "get_standard_config_overrides", None)
    if overrides is not None:
        options["config_overrides"] = overrides(config)
    with fused_style_adam(stored=not states.are_plain):
        optimizer = megatron_optimizer.get_megatron_optimizer(config, list(chunks), **options)
    for inner in with_parameters(optimizer):
        if config.optimizer == "sgd":
            inner.init_state_fn = _initialize_momentum
        if isinstance(inner, DistributedOptimizer):
            _number_parameters(inner)
        if not states.are_plain:
            _store_states(inner, states, _names_of(chunks))
            # Not with float16, whose gradients are divided by the loss scale in place after the backward
            # pass.
            if states.host_share and chunks[0].ddp_config.overlap_grad_reduce and not config.fp16:
                copy_as_reduced(chunks, inner)
    if config.fp16:
        # The schedules scale the loss by this function, and the optimizer divides gradients by the same
        # scale.
        chunks[0].config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _number_parameters(optimizer: DistributedOptimizer) -> None:
    """Correct the indices by which Megatron-Core finds each parameter's state for checkpoints.

    Within a group the optimizer steps on float32 parameters first, but Megatron-Core numbers parameters in
    buffer order. A gated delta net mixes float32 and bfloat16 parameters, for which a checkpoint would
    contain the moments of other parameters.
    """
    groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for index, (whole, half) in enumerate(groups):
        for place, parameter in enumerate([*whole, *half]):
            optimizer.model_param_group_index_map[parameter] = index, place


def _state_settings(chosen: MegatronOptimizerConfig, seed: int) -> StateSettings:
    formats = chosen["master_dtype"], chosen["exp_avg_dtype"], chosen["exp_avg_sq_dtype"]
    return StateSettings(*formats, host_share=chosen["optimizer_offload_fraction"], seed=seed)


def with_parameters(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """Yield the inner optimizers that have parameters on this rank."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(inner, "is_stub_optimizer", False):
            yield inner


def _names_of(chunks: Sequence[DistributedDataParallel]) -> dict[torch.nn.Parameter, str]:
    """Return a name for each parameter, equal for all copies of a parameter so that they are rounded
    alike.

    A tied output layer on the last stage is such a copy: it gets the name of the first stage's embedding.
    """
    tied = chunks[0].module.share_embeddings_and_output_weights
    names = {}
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.module.named_parameters():
            is_embedding = name == _EMBEDDING or (tied and name == OUTPUT_LAYER)
            names[parameter] = _EMBEDDING if is_embedding else f"{index} {name}"
    return names


def _store_states(inner: Any, settings: StateSettings, names: Mapping[torch.nn.Parameter, str]) -> None:
    """Configure a distributed optimizer's ``ShardedAdamW``: state formats, and the name and position of each
    shard."""
    adam = inner.optimizer
    places = {}
    for parameter, (group, order) in inner.model_param_group_index_map.items():
        start = inner._get_model_param_range_map(parameter)["param"].start
        places[adam.param_groups[group]["params"][order]] = names[parameter], start
    # Name each state by parameter and position, whose hash decides its rounding, so that it does not depend
    # on the layout.
    adam.settings, adam.place_of = settings, places.__getitem__
    adam.host_zeros = HostMemory(pin=runtime().is_cuda).zeros_like
    adam.place_states()
    inner.init_state_fn = _initialize_states
    # reload_model_params() calls this method. Adam holds the master weights here, so Adam must copy them.
    inner._copy_model_params_to_main_params = lambda state_dict=None: adam.copy_weights()


def _initialize_states(optimizer: ShardedAdamW, config: Any = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.initialize_state(parameter)


def _initialize_momentum(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Create zero momentum, without which Megatron cannot load SGD's state. The first step is bitwise equal
    to that of a new SGD."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


def build_scheduler(policy: PolicyConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the schedule of ``megatron_cfg.scheduler``, counted in ``train()`` calls. A checkpoint restores
    only its step."""
    chosen, scheduler = policy["megatron_cfg"]["optimizer"], policy["megatron_cfg"]["scheduler"]
    # NEVER instead of None, because Megatron-Core asserts a number above 0.
    warmup, decay = scheduler["lr_warmup_iters"], scheduler["lr_decay_iters"] or NEVER
    return OptimizerParamScheduler(
        optimizer,
        init_lr=scheduler["lr_warmup_init"] if warmup else 0.0,
        max_lr=chosen["lr"],
        min_lr=chosen["min_lr"],
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=scheduler["lr_decay_style"],
        start_wd=scheduler["start_weight_decay"],
        end_wd=scheduler["end_weight_decay"],
        wd_incr_steps=decay if scheduler["weight_decay_incr_style"] != "constant" else 1,
        wd_incr_style=scheduler["weight_decay_incr_style"],
        use_checkpoint_opt_param_scheduler=False,
        # The configuration overrides the checkpoint; megarl itself rejects a changed schedule unless the user
        # accepts it.
        override_opt_param_scheduler=True,
    )


def _norm_of_all(
    chunk_size: int, noop_flag: torch.Tensor, tensors: list[list[torch.Tensor]], *options: Any
) -> tuple[torch.Tensor, None]:
    """Return the joint L2 norm of some tensors, [1] float32.

    Bitwise equal to ``local_multi_tensor_l2_norm``, which synchronizes with the device for each tensor.
    """
    if not _are_float32(tensors[0]):  # Megatron-Core would round each norm to its tensor's dtype
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors[0]]
        return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None
    # Take the norm of the norms, as Megatron-Core does: one sum of squares over all elements would round
    # differently.
    return torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(tensors[0])))).reshape(1), None


def _scale_all(
    chunk_size: int, noop_flag: torch.Tensor, tensors: list[list[torch.Tensor]], scale: float
) -> None:
    """Multiply tensors by a number. Bitwise equal to ``local_multi_tensor_scale``, but without copies if
    source and target are the same tensors."""
    source, target = tensors
    # Only in place and in float32 is the result bitwise equal; leave other cases to Megatron-Core.
    if _are_float32(source) and all(one is other for one, other in zip(source, target, strict=True)):
        torch._foreach_mul_(target, scale)
    else:
        local_multi_tensor_scale(chunk_size, noop_flag, tensors, scale)


def _are_float32(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.dtype is torch.float32 for tensor in tensors)


# Megatron-Core's norm and scale functions for clipping without Transformer Engine or Apex, each with our
# replacement.
_OVER_ALL = {
    "l2_norm_impl": (local_multi_tensor_l2_norm, _norm_of_all),
    "multi_tensor_scale_impl": (local_multi_tensor_scale, _scale_all),
}


def _over_all() -> list[tuple[Any, str, Any]]:
    return [
        (clip_grads, name, ours)
        for name, (own, ours) in _OVER_ALL.items()
        # With Transformer Engine or Apex these are fused kernels, which we keep.
        if getattr(clip_grads, name) is own
    ]


def step_where_accepted(optimizer: MegatronOptimizer, accepts: Callable[[float], bool]) -> StepOutcome:
    """Run ``optimizer.step()``, but apply the update only if ``accepts`` returns True for the gradient
    norm.

    Megatron computes the norm within ``step()`` and then always updates, so this function patches the
    optimizer's ``get_grad_norm`` and ``step_with_ready_grads`` during the call.
    """
    norms: list[float] = []
    # Check before the step, which lowers the loss scale.
    overflow_is_mended = _scale_can_fall(optimizer)
    norm_of, update = optimizer.get_grad_norm, optimizer.step_with_ready_grads

    def get_grad_norm() -> float:
        # float() synchronizes with the device; the host needs the norm anyway to decide about the step.
        norms.append(float(norm_of()))
        return norms[-1]

    def step_with_ready_grads() -> bool:
        # False makes step() report that it did not update, as after an overflow.
        return accepts(norms[-1]) and bool(update())

    asked = (
        (optimizer, "get_grad_norm", get_grad_norm),
        (optimizer, "step_with_ready_grads", step_with_ready_grads),
    )
    adams = _sharded_adams(optimizer)

    def clip(parameters: Any, max_norm: float, total_norm: float, *options: Any, **named: Any) -> None:
        for adam in adams:
            # Adam applies the clip factor when it reads the gradients: scaling 16-bit gradients in place
            # would round them once more.
            adam.gradient_factor = min(1.0, max_norm / (total_norm + _CLIPPED))

    with patched(
        *asked, *_over_all(), *([(mixed_precision, "clip_grad_by_total_norm_fp32", clip)] if adams else [])
    ):
        stepped, _, _ = optimizer.step()
    for adam in adams:
        # After a rejected step too, because early gradient copies belong to this batch only.
        adam.forget_early()
    # If no norm was computed, float16's loss scaler found an infinity.
    return StepOutcome(
        norms[-1] if norms else math.nan, bool(stepped), overflowed=not norms and overflow_is_mended
    )


def finish_in_host_memory(optimizer: MegatronOptimizer) -> None:
    """Wait for the part of the last step that runs on the CPU; see ``HostAdam``."""
    for adam in _sharded_adams(optimizer):
        adam.finish()


def _sharded_adams(optimizer: MegatronOptimizer) -> list[ShardedAdamW]:
    inners = with_parameters(optimizer)
    return [inner.optimizer for inner in inners if isinstance(inner.optimizer, ShardedAdamW)]


def _scale_can_fall(optimizer: MegatronOptimizer) -> bool:
    """Return whether an overflow lowers float16's loss scale, so that the next batch may succeed."""
    scaler = getattr(next(iter(getattr(optimizer, "chained_optimizers", [optimizer]))), "grad_scaler", None)
    least = getattr(scaler, "min_scale", None)
    return scaler is not None and least is not None and float(scaler.scale) > float(least)


def schedule_values(optimizer: MegatronOptimizer) -> dict[str, float]:
    """Return ``lr`` and ``wd`` of the next optimizer step."""
    groups = optimizer.param_groups
    return {
        "lr": float(groups[0]["lr"]) if groups else 0.0,
        # Norms and biases have weight decay 0; the largest value is the one that the schedule sets.
        "wd": max((float(group["weight_decay"]) for group in groups), default=0.0),
    }
