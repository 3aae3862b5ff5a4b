"""Tiny transformers models with random weights, one per case, saved as Hugging Face checkpoints that the
workers and the reference load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from megarl.models.engine.precision import dtype_of
from megarl.parity.case import CLASS_IN_TRANSFORMERS, GROUPED, HYBRID, LATENT, SPARSE, Case
from megarl.parity.settings import ADAPTER_SCALE, OUTER, STACKS, adapter_directory

transformers_logging.disable_progress_bar()

_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
ADAPTED = (*_LATENT, "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Name suffixes of the linear layers that get LoRA adapters. Expert weights that transformers stacks in one
tensor have adapters of their own."""
# Standard deviations of matrices, in units of 1 / sqrt(in_features); see ``_spread``.
OUTPUT, INPUT, INNER = 1.5, 4.0, 0.5
_SIZES = ("layers", "kv", "group", "head", "width", "ffn", "vocab", "window", "experts", "topk", "expert")
_SCALINGS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    # Megatron-Core hard-codes the original context length of Llama 3. With the large base, even narrow heads
    # have wavelengths in the range that this scaling changes.
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}


def model_config(case: Case) -> Any:
    """Return the transformers config of the case's model."""
    from transformers import AutoConfig

    sizes: dict[str, object] = {
        "vocab_size": case.vocab,
        "hidden_size": case.hidden,
        "intermediate_size": case.ffn,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv,
        "head_dim": case.head,
        "max_position_embeddings": 16384 if case.rope == "llama3" else 128,
        "tie_word_embeddings": case.tied,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-6,
        # transformers gives the embedding of a padding token no gradient, even where that token is part of a
        # sequence. Megatron has no padding token.
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_theta": 500.0, **_SCALINGS[case.rope]},
    }
    sizes |= _mixture(case) | _window(case) | _attention(case) | _hybrid(case)
    if case.scores:
        sizes["num_labels"] = 1
    return AutoConfig.for_model(CLASS_IN_TRANSFORMERS.get(case.family, case.family), **sizes)


def _mixture(case: Case) -> dict[str, object]:
    """Return the config entries for experts and routing; empty for a dense family."""
    if case.family in GROUPED:
        return _grouped_mixture(case)
    if case.family in ("mixtral", "gpt_oss"):
        return {"num_local_experts": case.experts, "num_experts_per_tok": case.topk}
    if case.family not in SPARSE:
        return {}
    sizes: dict[str, object] = {
        "num_experts": case.experts,
        "num_experts_per_tok": case.topk,
        "moe_intermediate_size": case.expert,
    }
    if case.family == "qwen3_5_moe_text":
        return sizes | {"shared_expert_intermediate_size": 2 * case.expert}
    if case.family == "qwen3_next":
        return sizes | {"shared_expert_intermediate_size": 2 * case.expert, "norm_topk_prob": True}
    if case.family == "qwen2_moe":
        return sizes | {"shared_expert_intermediate_size": 2 * case.expert, "norm_topk_prob": False}
    return sizes | {"norm_topk_prob": True}


def _grouped_mixture(case: Case) -> dict[str, object]:
    """Return the config entries of a DeepSeek-style mixture-of-experts model with group-limited routing.

    There are two groups if the number of experts allows it. A token is routed within one group if that group
    has enough experts.
    """
    groups = 2 if case.experts % 2 == 0 and case.experts >= 4 else 1
    taken = 1 if case.topk <= case.experts // groups else groups
    # The first layer is dense, unless it is the only one.
    dense = min(1, case.layers - 1)
    sizes: dict[str, object] = {
        "n_routed_experts": case.experts,
        "num_experts_per_tok": case.topk,
        "moe_intermediate_size": case.expert,
        "n_shared_experts": 2 if case.family == "deepseek_v2" else 1,
        "n_group": groups,
        "topk_group": taken,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": case.family != "deepseek_v2",
    }
    if case.family == "glm4_moe_lite":
        return sizes | {
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (case.layers - dense),
            "num_nextn_predict_layers": 0,
        }
    sizes["first_k_dense_replace"] = dense
    if case.family == "deepseek_v2":
        sizes["topk_method"] = "group_limited_greedy" if taken < groups else "greedy"
    if case.family in ("deepseek_v3", "glm4_moe", "kimi_k2"):
        sizes["num_nextn_predict_layers"] = 0
    return sizes


def _window(case: Case) -> dict[str, object]:
    """Return the sliding-window entries: for every layer, or for layers 1, 3, 5, ..., depending on the
    family."""
    if case.family in ("mistral", "mixtral"):
        return {"sliding_window": case.window or None}
    if case.family not in ("ministral", "dots1", "gpt_oss"):
        return {}
    kinds = [
        "sliding_attention" if case.window and layer % 2 else "full_attention" for layer in range(case.layers)
    ]
    # transformers builds the window mask even if no layer uses it, so a width is always needed.
    return {"sliding_window": case.window or (None if case.family == "dots1" else 128), "layer_types": kinds}


def _attention(case: Case) -> dict[str, object]:
    """Return the attention entries that only some families have."""
    if case.family in LATENT:
        # The output rows of these projections (48 for queries, 20 + 4 for keys and values) must be divisible
        # by tensor-parallel sizes of up to 8.
        widths = {
            "q_lora_rank": None if case.family == "deepseek_v2" else 48,
            "kv_lora_rank": 20,
            "qk_rope_head_dim": 4,
            "head_dim": 4,
        }
        return {
            **widths,
            "qk_nope_head_dim": case.head,
            "v_head_dim": case.head + 2,
            "num_key_value_heads": case.heads,
        } | (
            {
                "rope_parameters": {
                    "rope_theta": 500.0,
                    **_SCALINGS["yarn"],
                    "mscale": 1.0,
                    "mscale_all_dim": 0.7,
                }
            }
            if case.rope == "yarn"
            else {}
        )
    if case.family == "glm4_moe" or case.family in HYBRID:
        # The rotated part of a head must have an even number of elements.
        part = 0.5 if case.head % 4 == 0 else 1.0
        rope = {"rope_theta": 500.0, **_SCALINGS[case.rope], "partial_rotary_factor": part}
        return {
            "attention_bias": case.family == "glm4_moe",
            "partial_rotary_factor": part,
            "rope_parameters": rope,
        }
    if case.family == "seed_oss":
        return {"attention_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0}
    return {"swiglu_limit": 2.0} if case.family == "gpt_oss" else {}


def _hybrid(case: Case) -> dict[str, object]:
    """Return the config entries of gated delta nets; empty for other families.

    They have as many heads as the attention, with different head widths.
    """
    if case.family not in HYBRID:
        return {}
    return {
        # The KV cache of transformers requires at least one attention layer.
        "layer_types": [
            "full_attention" if layer % 2 or case.layers == 1 else "linear_attention"
            for layer in range(case.layers)
        ],
        "linear_num_key_heads": case.kv,
        "linear_num_value_heads": case.heads,
        "linear_key_head_dim": case.head - 3,
        "linear_value_head_dim": case.head + 1,
        # The query and key of a first token are nearly orthogonal. With a smaller epsilon, the output norm
        # would magnify the rounding noise that every float32 implementation has there.
        "rms_norm_eps": 1e-2,
    }


class ModelShelf:
    """Directory of model checkpoints, each created on first request.

    Args:
        root: an existing directory; the checkpoints remain there.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def described(self, case: Case) -> Path:
        """Return a directory that contains at least the ``config.json`` of the case's model."""
        directory = self._root / _name(case)
        if not (directory / "config.json").exists():
            _save_config(case, model_config(case), directory)
        return directory

    def complete(self, case: Case) -> Path:
        """Return the checkpoint directory of the case's model, with weights and, if the case has one, its
        adapter."""
        directory = self.described(case)
        if not (directory / "model.safetensors").exists():
            model = _random_model(case).to(dtype_of(case.precision, "case.precision"))
            model.save_pretrained(directory)
            # save_pretrained rewrote the config in the form that transformers uses, so restore the published
            # form.
            _save_config(case, model.config, directory)
        # Cases with different adapters share the base model.
        adapter = adapter_directory(case, directory)
        if adapter is not None and not adapter.exists():
            _save_adapter(case, directory, adapter)
        return directory


def _save_adapter(case: Case, directory: Path, adapter: Path) -> None:
    """Save a LoRA adapter with random factors. They are large enough that the product B A changes every
    weight noticeably."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    # Another seed than for the base weights, so that factors are independent of them.
    generator = torch.Generator().manual_seed(case.seed + 1)
    factors: dict[str, torch.Tensor] = {}
    with safe_open(directory / "model.safetensors", "pt") as stored:
        for name in sorted(stored.keys()):
            module = name.removesuffix(".weight")
            layer = module.rpartition(".")[2]
            if layer not in (*ADAPTED, *OUTER * case.outer) or ".experts." in name or name == module:
                continue
            # Shapes are in the file's header, so this reads no weights.
            rows, columns = stored.get_slice(name).get_shape()
            # PEFT selects columns of A for an embedding instead of multiplying, so it uses other names and
            # shapes.
            factor = "lora_{}.weight" if layer != OUTER[0] else "lora_embedding_{}"
            if layer == OUTER[0]:
                rows, columns = columns, rows
            for letter, shape in (("A", (case.lora, columns)), ("B", (rows, case.lora))):
                values = INNER * torch.randn(shape, generator=generator)
                if layer != OUTER[0] or letter == "B":
                    # Column selection sums nothing, so the A factor of an embedding is not scaled by its
                    # width.
                    values *= shape[1] ** -0.5
                factors[f"base_model.model.{module}.{factor.format(letter)}"] = values
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in factors})
    factors |= _stacked_factors(case, generator) if case.stacks else {}
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": case.lora,
        "lora_alpha": ADAPTER_SCALE * case.lora,
        "target_modules": targets,
    }
    config |= {"target_parameters": [f"experts.{name}" for name in STACKS]} if case.stacks else {}
    (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _stacked_factors(case: Case, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the LoRA factors of all stacked expert weights, by PEFT name.

    PEFT wraps the module once per stacked parameter: the wrapper of the first parameter is the ``base_layer``
    of the second.
    """
    from transformers import AutoModelForCausalLM

    # Only names and shapes are needed, so allocate no memory.
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(model_config(case))
    factors = {}
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        for stack, wrapper in zip(STACKS, (".base_layer", ""), strict=True):
            experts, rows, columns = module.get_parameter(stack).shape
            # GPT-OSS stores expert weights as [experts, in, out] instead of [experts, out, in].
            if getattr(module, "is_transposed", False):
                rows, columns = columns, rows
            ranks = experts * case.lora
            down = torch.randn(ranks, columns, generator=generator)
            up = torch.randn(rows, ranks, generator=generator)
            factors[f"base_model.model.{name}{wrapper}.lora_A.weight"] = INNER * down * columns**-0.5
            factors[f"base_model.model.{name}{wrapper}.lora_B.weight"] = INNER * up * case.lora**-0.5
    return factors


def _save_config(case: Case, config: Any, directory: Path) -> None:
    """Save the config. A family that transformers implements under another name gets the model type and
    ``auto_map`` of its published checkpoints."""
    config.save_pretrained(directory)
    if case.family in CLASS_IN_TRANSFORMERS:
        file = directory / "config.json"
        code = {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        }
        content = json.loads(file.read_text(encoding="utf-8")) | {"model_type": case.family, "auto_map": code}
        file.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _name(case: Case) -> str:
    # Cases with the same name share a directory, so include everything that the config or the weights depend
    # on.
    sizes = (str(getattr(case, name)) for name in _SIZES)
    words = [
        case.family,
        case.rope,
        "tied" if case.tied else "untied",
        *sizes,
        case.precision,
        f"seed{case.seed}",
    ]
    return "-".join([*words, *(["scores"] if case.scores else [])])


def _random_model(case: Case) -> Any:
    """Return a model in which all parameters are random, including norms and biases, so that a missing or
    swapped weight is detected."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    # Eager experts: the grouped matmul requires row sizes that are multiples of 16 bytes, and these widths
    # are not.
    options = {"experts_implementation": "eager"} if case.family in SPARSE else {}
    auto = AutoModelForSequenceClassification if case.scores else AutoModelForCausalLM
    model = auto.from_config(model_config(case), dtype=torch.float32, **options)
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_((0.0 if name.endswith("bias") else 1.0) + 0.2 * noise)
            else:
                parameter.copy_(noise * _spread(name, case) * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            # This buffer changes the selection of experts and has no gradient. At its default of zero,
            # ignoring it would go undetected.
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def _spread(name: str, case: Case) -> float:
    """Return the standard deviation of a matrix, in units of 1 / sqrt(in_features).

    With these factors activations are of order one at every width, probabilities are neither flat nor peaked,
    and the gradient is smooth enough in the weights for float32 to be accurate.
    """
    if "lm_head" in name or "score" in name or ("embed_tokens" in name and case.tied and not case.scores):
        return OUTPUT
    return INPUT if "embed_tokens" in name else INNER
