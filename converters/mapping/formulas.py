"""Express expected shapes as formulas of ``config.json`` keys, for messages about wrong shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from converters.families import FAMILIES
from converters.mapping.rule import Rule
from converters.model_config.architecture import Architecture

_HEADS, _GROUPS = "num_attention_heads * head_dim", "num_key_value_heads * head_dim"
_QUERIES = "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"
# Last part of a module's name -> (formulas of its rows, formulas of its columns), the likeliest first.
_MODULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "embed_tokens": (("vocab_size",), ("hidden_size",)),
    "lm_head": (("vocab_size",), ("hidden_size",)),
    "score": (("num_labels",), ("hidden_size",)),
    "q_proj": ((_HEADS, _QUERIES, f"2 * {_HEADS}"), ("hidden_size",)),
    "k_proj": ((_GROUPS,), ("hidden_size",)),
    "v_proj": ((_GROUPS,), ("hidden_size",)),
    "o_proj": (("hidden_size",), (_HEADS, "num_attention_heads * v_head_dim")),
    "q_a_proj": (("q_lora_rank",), ("hidden_size",)),
    "q_b_proj": ((_QUERIES,), ("q_lora_rank",)),
    "kv_a_proj_with_mqa": (("kv_lora_rank + qk_rope_head_dim",), ("hidden_size",)),
    "kv_b_proj": (("num_attention_heads * (qk_nope_head_dim + v_head_dim)",), ("kv_lora_rank",)),
    "eh_proj": (("hidden_size",), ("2 * hidden_size",)),
    "q_norm": (("head_dim",), ()),
    "k_norm": (("head_dim",), ()),
    "sinks": (("num_attention_heads",), ()),
}
_LINEAR_KEYS, _LINEAR_VALUES = (
    "linear_num_key_heads * linear_key_head_dim",
    "linear_num_value_heads * linear_value_head_dim",
)
_CONVOLVED = f"2 * {_LINEAR_KEYS} + {_LINEAR_VALUES}"
# The same for modules of gated delta nets.
_GATED_DELTA: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "in_proj_qkvz": ((f"2 * {_LINEAR_KEYS} + 2 * {_LINEAR_VALUES}",), ("hidden_size",)),
    "in_proj_ba": (("2 * linear_num_value_heads",), ("hidden_size",)),
    "in_proj_qkv": ((_CONVOLVED,), ("hidden_size",)),
    "in_proj_z": ((_LINEAR_VALUES,), ("hidden_size",)),
    "in_proj_a": (("linear_num_value_heads",), ("hidden_size",)),
    "in_proj_b": (("linear_num_value_heads",), ("hidden_size",)),
    "conv1d": ((_CONVOLVED,), ()),
    "out_proj": (("hidden_size",), (_LINEAR_VALUES,)),
    "A_log": (("linear_num_value_heads",), ()),
    "dt_bias": (("linear_num_value_heads",), ()),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def formula_of(name: str, shape: Sequence[int], architecture: Architecture) -> str:
    """Return the formula of a tensor's expected shape, such as ``[num_key_value_heads * head_dim,
    hidden_size]``. Sizes without a formula remain numbers."""
    return f"[{', '.join(_expressions(name, shape, architecture))}]"


def formula_of_parameter(rule: Rule, architecture: Architecture) -> str:
    """Return the formula of a full Megatron-Core parameter. Its rows are the sum of its tensors' rows."""
    parts = [_expressions(part.name, part.shape, architecture) for part in rule.parts]
    return f"[{', '.join([' + '.join(part[0] for part in parts), *parts[0][1:]])}]"


def _expressions(name: str, shape: Sequence[int], architecture: Architecture) -> list[str]:
    values = _values(name, architecture)
    modules = {**_MODULES, **_GATED_DELTA} if ".linear_attn." in name else _MODULES
    module = next((part for part in reversed(name.split(".")) if part in modules), None)
    hints = modules[module] if module is not None and len(shape) <= len(modules[module]) + 1 else ()
    said = []
    for axis, size in enumerate(shape):
        likely = [*(hints[axis] if axis < len(hints) else ()), *values]
        said.append(next((expression for expression in likely if values.get(expression) == size), str(size)))
    return said


def _values(name: str, architecture: Architecture) -> dict[str, int]:
    """Return formula -> value for a model. Formulas that are likely for a tensor of this name come first."""
    mixture, latent, head = architecture.mixture, architecture.latent_attention, architecture.head
    values: dict[str, int] = {}
    if mixture is not None:
        keys = FAMILIES[architecture.family].config_keys
        # The key that users find in a config of this family.
        experts = next((key for key in _EXPERTS if key in keys), _EXPERTS[0])
        width = "moe_intermediate_size" if "moe_intermediate_size" in keys else "intermediate_size"
        if "shared_expert" in name:
            counted = "shared_expert_intermediate_size"
            values[counted if counted in keys else f"n_shared_experts * {width}"] = (
                mixture.shared_ffn_hidden_size
            )
        elif re.search(r"\.experts(\.|$)", name):
            values |= {width: mixture.ffn_hidden_size, f"2 * {width}": 2 * mixture.ffn_hidden_size}
        values[experts] = mixture.num_experts
    heads = architecture.num_attention_heads
    values |= {
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.ffn_hidden_size,
        "vocab_size": architecture.vocab_size,
        "2 * hidden_size": 2 * architecture.hidden_size,
        "num_attention_heads": heads,
        "head_dim": architecture.head_dim,
    }
    if latent is None:
        values |= {
            _HEADS: heads * architecture.head_dim,
            _GROUPS: architecture.num_key_value_heads * architecture.head_dim,
        }
        values |= {f"2 * {_HEADS}": 2 * heads * architecture.head_dim} if architecture.output_gate else {}
    else:
        values |= {
            "kv_lora_rank": latent.kv_lora_rank,
            "kv_lora_rank + qk_rope_head_dim": latent.kv_lora_rank + latent.qk_rope_head_dim,
            _QUERIES: heads * latent.qk_head_dim,
            "num_attention_heads * (qk_nope_head_dim + v_head_dim)": heads
            * (latent.qk_nope_head_dim + latent.v_head_dim),
            "num_attention_heads * v_head_dim": heads * latent.v_head_dim,
        }
        values |= {} if latent.q_lora_rank is None else {"q_lora_rank": latent.q_lora_rank}
    net = architecture.gated_delta
    if net is not None and ".linear_attn." in name:
        projected = net.key_heads * net.key_width
        values |= {
            _CONVOLVED: net.convolved,
            f"2 * {_LINEAR_KEYS} + 2 * {_LINEAR_VALUES}": 2 * projected + 2 * net.values,
            _LINEAR_VALUES: net.values,
            "linear_num_value_heads": net.value_heads,
            "2 * linear_num_value_heads": 2 * net.value_heads,
            "linear_value_head_dim": net.value_width,
            "linear_conv_kernel_dim": net.convolution,
        }
    return values if head is None else {**values, "num_labels": head.labels}
