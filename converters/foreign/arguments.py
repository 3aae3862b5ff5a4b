"""Import a model for Megatron-LM's ``--load``: write the arguments and the tracker file that it expects."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from converters.checkpoint.narrowing import main_dtype
from converters.checkpoint.work import ConversionResult, RunOptions
from converters.errors import ConversionError
from converters.foreign.settings import RENAMED_ARGUMENTS, ROPE_FACTOR, YARN_ARGUMENTS
from converters.importing import ImportPlan, import_model
from converters.model_config.architecture import Architecture
from converters.model_config.megatron_settings import MegatronSettings, megatron_settings
from converters.torch_dist.location import TRACKER_FILE

RELEASE = "release"
_RENAMED = {name: others[0] for name, others in RENAMED_ARGUMENTS.items()} | YARN_ARGUMENTS
# Megatron-LM has no flags for these YaRN settings of latent attention, so Megatron-Core's defaults apply.
_WITHOUT_FLAGS: dict[str, Any] = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
# Arguments that do not describe the model, with the values of a run that saved only weights.
_OF_A_RUN: dict[str, Any] = {
    "async_save": False,
    "ckpt_format": "torch_dist",
    "ckpt_fully_parallel_save": False,
    "data_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "iteration": 0,
    "no_save_optim": True,
    "no_save_rng": True,
    "pipeline_model_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "tokenizer_type": None,
    "virtual_pipeline_model_parallel_size": None,
    "world_size": 1,
}
_OF_OTHER_MODELS: dict[str, Any] = {
    "apply_query_key_layer_scaling": False,
    "layernorm_zero_centered_gamma": False,
    "apply_layernorm_1p": False,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "num_experts": None,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "spec": None,
    "squared_relu": False,
    "use_rotary_position_embeddings": False,
    "window_size": None,
}
# Arguments that --use-checkpoint-args ignores, with the value that Megatron-LM uses without the flag.
_FLAGS: dict[str, Any] = {
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "kv_lora_rank": 32,
    "moe_router_dtype": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_group_topk": None,
    "moe_router_num_groups": None,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_gate": False,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "multi_latent_attention": False,
    "norm_epsilon": 1e-5,
    "q_lora_rank": None,
    "qk_head_dim": 128,
    "qk_layernorm": False,
    "qk_pos_emb_head_dim": 64,
    "quick_geglu": False,
    "rope_type": None,
    "rotary_scaling_factor": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "softmax_type": "vanilla",
    "use_rope_scaling": False,
    "v_head_dim": 128,
    "window_attn_skip_freq": None,
    "window_size": None,
    "yarn_beta_fast": None,
    "yarn_beta_slow": None,
    "yarn_correction_range_round_to_int": None,
    "yarn_original_max_position_embeddings": None,
}


def megatron_lm_state(architecture: Architecture, padded_vocab: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the common state that Megatron-LM would save.

    Args:
        architecture: architecture of the model.
        padded_vocab: number of rows of the stored embedding.
        dtype: dtype of most weights.

    Raises:
        ConversionError: Megatron-LM's arguments cannot describe the model.
    """
    settings = megatron_settings(architecture)
    _require_arguments(settings)
    found = {**settings.transformer, **settings.model, **settings.attributes}
    arguments = (
        _OF_A_RUN | _OF_OTHER_MODELS | {_RENAMED.get(name, name): value for name, value in found.items()}
    )
    # Megatron-LM has other arguments instead of these two, which are set below.
    for name in ("gated_linear_unit", "share_embeddings_and_output_weights"):
        arguments.pop(name)
    # If a config gives YaRN no scales, Megatron-LM's values without the flags mean the same.
    for name in ("mscale", "mscale_all_dim"):
        if name in arguments and arguments[name] is None:
            arguments[name] = _FLAGS[name]
    arguments |= {
        "add_position_embedding": False,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "group_query_attention": architecture.num_key_value_heads != architecture.num_attention_heads,
        "layernorm_epsilon": architecture.norm_epsilon,  # since Megatron-Core 0.19
        "make_vocab_size_divisible_by": _multiple(architecture.vocab_size, padded_vocab),
        "moe_router_dtype": "fp32"
        if architecture.mixture is not None and architecture.mixture.routing.in_float32
        else None,
        "mtp_num_layers": architecture.prediction_layers or None,
        "padded_vocab_size": padded_vocab,
        "params_dtype": dtype,
        "seq_length": architecture.max_position,
        "swiglu": architecture.gate_limit is None,
        "quick_geglu": architecture.gate_limit is not None,
        "untie_embeddings_and_output_weights": not architecture.tied_embeddings,
        "vocab_size": architecture.vocab_size,
    }
    # Megatron-LM reorders query, key and value of checkpoints below version 2.
    return {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 0}


def further_flags(state: dict[str, Any]) -> str:
    """Return the flags that Megatron-LM needs in addition to ``--use-checkpoint-args``."""
    arguments = vars(state["args"])
    flags = []
    for name, default in _FLAGS.items():
        value = arguments.get(name, default)
        if value != default:
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                flags.append(flag if value else f"--no-{name.replace('_', '-')}")
            else:
                # Without spaces, a tuple is one word on the command line.
                flags.append(f"{flag} {str(value).replace(' ', '')}")
    return " ".join(flags)


def write_tracker(directory: Path) -> None:
    """Write ``release`` to the tracker file, in which Megatron-LM looks up the checkpoint to load.

    Raises:
        ConversionError: the tracker file belongs to a training run.
    """
    tracker = directory / TRACKER_FILE
    if tracker.is_file():
        named = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if named != RELEASE:
            raise ConversionError(
                f"{tracker} names {named!r}: a training run keeps its checkpoints there",
                "choose another target",
            )
        return
    directory.mkdir(parents=True, exist_ok=True)
    tracker.write_text(RELEASE, encoding="utf-8")


def _require_arguments(settings: MegatronSettings) -> None:
    own = {
        "llama3": settings.llama3,
        "routing": settings.routing,
        "latent_norm_epsilon": settings.latent_norm_epsilon,
    }
    problems = [f"{name} = {value}" for name, value in own.items() if value is not None]
    for name, value in settings.attributes.items():
        if not name.startswith("yarn_"):
            problems.append(f"{name} = {value!r}")
    for name, value in _WITHOUT_FLAGS.items():
        if settings.transformer.get(name, value) != value:
            problems.append(
                f"{name} = {settings.transformer[name]!r}: Megatron-LM has no flag for it, and computes with "
                f"{value!r}"
            )
    factor = settings.model.get("rope_scaling_factor", ROPE_FACTOR)
    if factor != ROPE_FACTOR:
        problems.append(
            f"rope_scaling_factor = {factor:g}: Megatron-LM computes with {ROPE_FACTOR:g} whatever "
            "--rope-scaling-factor says"
        )
    if problems:
        raise ConversionError(
            "Megatron-LM has no arguments for this model",
            "leave --layout out; megarl computes what Megatron-LM alone cannot",
            problems,
        )


def _multiple(vocab_size: int, padded_vocab: int) -> int:
    """Return a divisor with which Megatron-LM pads the vocabulary to ``padded_vocab``."""
    if padded_vocab == vocab_size:
        return 1
    # 128 is Megatron-LM's default, and needs no flag.
    return next(
        one for one in (128, *range(1, padded_vocab + 1)) if -(-vocab_size // one) * one == padded_vocab
    )


def import_for_megatron_lm(
    plan: ImportPlan,
    target: Path,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
) -> ConversionResult:
    """Write the checkpoint of a plan to ``target/release``, with Megatron-LM's arguments. The result's notes
    list the flags that a run needs in addition to ``--load`` and ``--use-checkpoint-args``.

    Args:
        plan, options: as in ``import_model``.
        target: directory to create, or one with an earlier import.

    Raises:
        ConversionError: as in ``import_model``. Also if a training run uses ``target``, or Megatron-LM's
            arguments cannot describe the model.
    """
    state = megatron_lm_state(
        plan.architecture,
        plan.padded_vocab,
        main_dtype((plan.dtype(rule), plan.size(rule)) for rule in plan.rules),
    )
    # Write the tracker first, so that a killed import is resumed: the directory that it names does not exist
    # yet.
    write_tracker(target)
    try:
        outcome = import_model(plan, target / RELEASE, options, common_state=state)
    except Exception:
        # The tracker must not name a missing checkpoint.
        if not (target / RELEASE).exists():
            (target / TRACKER_FILE).unlink(missing_ok=True)
        raise
    # Another part that failed may have removed the tracker.
    write_tracker(target)
    flags = further_flags(state)
    return dataclasses.replace(
        outcome, target=target, notes=outcome.notes | ({"further_flags": flags} if flags else {})
    )
