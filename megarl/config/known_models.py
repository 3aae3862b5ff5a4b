"""Published sizes of much-used models: content of ``config.json`` by Hugging Face id, without what neither the rules, the memory plan nor
the converters read. A dry run sizes them before anything is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Config = dict[str, Any]


def _sizes(layers: int, hidden: int, width: int, heads: int, key_value_heads: int) -> Config:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
    }


def _qwen2_5(sizes: Config, longest: int, *, tied: bool, vocabulary: int = 152064, theta: float = 1e6) -> Config:
    return {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-06,
        "rope_theta": theta,
        "use_sliding_window": False,
        **sizes,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
    }


def _qwen3(sizes: Config, *, tied: bool = False, **others: Any) -> Config:
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1e6,
        "use_sliding_window": False,
        **sizes,
        "tie_word_embeddings": tied,
        "vocab_size": 151936,
        **others,
    }


def _qwen3_moe(sizes: Config, expert_width: int, **others: Any) -> Config:
    experts: Config = {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": expert_width,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
    }
    return _qwen3(sizes, **experts, **others)


def _llama3(sizes: Config, factor: float, *, tied: bool = False, **others: Any) -> Config:
    return {
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        **sizes,
        "tie_word_embeddings": tied,
        "vocab_size": 128256,
        **others,
    }


def _gpt_oss(layers: int, experts: int) -> Config:
    scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    return {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_act": "silu",
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_local_experts": experts,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {**scaling, "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        **_sizes(layers, 2880, 2880, 64, 8),
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }


_DEEPSEEK_V3: Config = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    **_sizes(61, 7168, 18432, 128, 128),
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
_GLM_4_5_AIR: Config = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    **_sizes(46, 4096, 10944, 96, 8),
    "tie_word_embeddings": False,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
_MISTRAL_7B: Config = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    **_sizes(32, 4096, 14336, 32, 8),
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
_PHI_4: Config = {
    "model_type": "phi3",
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-05,
    "rope_theta": 250000,
    "sliding_window": None,
    **_sizes(40, 5120, 17920, 40, 10),
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
_SMOLLM2_1_7B: Config = {
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 130000,
    **_sizes(24, 2048, 8192, 32, 32),
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
_1_5B, _7B, _14B, _32B = (
    _sizes(28, 1536, 8960, 12, 2),
    _sizes(28, 3584, 18944, 28, 4),
    _sizes(48, 5120, 13824, 40, 8),
    _sizes(64, 5120, 27648, 40, 8),
)
"""Of Qwen2.5, and of what was distilled into it."""
_LLAMA_8B, _LLAMA_70B = _llama3(_sizes(32, 4096, 14336, 32, 8), 8.0), _llama3(_sizes(80, 8192, 28672, 64, 8), 8.0)
_LLAMA_1B = _llama3(_sizes(16, 2048, 8192, 32, 8), 32.0, tied=True, head_dim=64)
_LLAMA_3B = _llama3(_sizes(28, 3072, 8192, 24, 8), 32.0, tied=True, head_dim=128)

KNOWN_MODELS: Mapping[str, Config] = MappingProxyType(
    {
        "Qwen/Qwen2.5-0.5B": _qwen2_5(_sizes(24, 896, 4864, 14, 2), 32768, tied=True, vocabulary=151936),
        "Qwen/Qwen2.5-0.5B-Instruct": _qwen2_5(_sizes(24, 896, 4864, 14, 2), 32768, tied=True, vocabulary=151936),
        "Qwen/Qwen2.5-1.5B": _qwen2_5(_1_5B, 131072, tied=True, vocabulary=151936),
        "Qwen/Qwen2.5-1.5B-Instruct": _qwen2_5(_1_5B, 32768, tied=True, vocabulary=151936),
        "Qwen/Qwen2.5-3B": _qwen2_5(_sizes(36, 2048, 11008, 16, 2), 32768, tied=True, vocabulary=151936),
        "Qwen/Qwen2.5-3B-Instruct": _qwen2_5(_sizes(36, 2048, 11008, 16, 2), 32768, tied=True, vocabulary=151936),
        "Qwen/Qwen2.5-7B": _qwen2_5(_7B, 131072, tied=False),
        "Qwen/Qwen2.5-7B-Instruct": _qwen2_5(_7B, 32768, tied=False),
        "Qwen/Qwen2.5-14B-Instruct": _qwen2_5(_14B, 32768, tied=False),
        "Qwen/Qwen2.5-32B-Instruct": _qwen2_5(_32B, 32768, tied=False),
        "Qwen/Qwen2.5-72B-Instruct": _qwen2_5(_sizes(80, 8192, 29568, 64, 8), 32768, tied=False),
        "Qwen/Qwen3-0.6B": _qwen3(_sizes(28, 1024, 3072, 16, 8), tied=True),
        "Qwen/Qwen3-1.7B": _qwen3(_sizes(28, 2048, 6144, 16, 8), tied=True),
        "Qwen/Qwen3-4B": _qwen3(_sizes(36, 2560, 9728, 32, 8), tied=True),
        "Qwen/Qwen3-8B": _qwen3(_sizes(36, 4096, 12288, 32, 8)),
        "Qwen/Qwen3-14B": _qwen3(_sizes(40, 5120, 17408, 40, 8)),
        "Qwen/Qwen3-32B": _qwen3(_sizes(64, 5120, 25600, 64, 8)),
        "Qwen/Qwen3-30B-A3B": _qwen3_moe(_sizes(48, 2048, 6144, 32, 4), 768),
        "Qwen/Qwen3-235B-A22B": _qwen3_moe(_sizes(94, 4096, 12288, 64, 4), 1536),
        "deepseek-ai/DeepSeek-R1": _DEEPSEEK_V3,
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _LLAMA_8B,
        "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": _LLAMA_70B,
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen2_5(_1_5B, 131072, tied=False, vocabulary=151936, theta=1e4),
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _qwen2_5(_7B, 131072, tied=False, theta=1e4),
        "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
        "HuggingFaceTB/SmolLM2-1.7B": _SMOLLM2_1_7B,
        "HuggingFaceTB/SmolLM2-1.7B-Instruct": _SMOLLM2_1_7B,
        "meta-llama/Llama-3.1-8B": _LLAMA_8B,
        "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_8B,
        "meta-llama/Llama-3.1-70B": _LLAMA_70B,
        "meta-llama/Llama-3.1-70B-Instruct": _LLAMA_70B,
        "meta-llama/Llama-3.2-1B": _LLAMA_1B,
        "meta-llama/Llama-3.2-1B-Instruct": _LLAMA_1B,
        "meta-llama/Llama-3.2-3B": _LLAMA_3B,
        "meta-llama/Llama-3.2-3B-Instruct": _LLAMA_3B,
        "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_70B,
        "microsoft/phi-4": _PHI_4,
        "mistralai/Mistral-7B-v0.3": _MISTRAL_7B,
        "mistralai/Mistral-7B-Instruct-v0.3": _MISTRAL_7B,
        "openai/gpt-oss-20b": _gpt_oss(24, 32),
        "openai/gpt-oss-120b": _gpt_oss(36, 128),
        "zai-org/GLM-4.5-Air": _GLM_4_5_AIR,
    }
)
