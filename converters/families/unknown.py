"""Hints for unsupported model types: the most similar supported family, and the differences."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_GEMMA = (
    "like Llama, but for norms after each block, zero-centred norms, scaled embeddings and a "
    "window in some layers"
)
UNKNOWN: Mapping[str, str] = MappingProxyType(
    {
        "bailing_moe": "like Qwen3-MoE, but for fused query_key_value weights under names of its own",
        "bailing_moe_v2": (
            "like dots.llm1, but for fused query_key_value weights, a router without softmax "
            "and names of its own"
        ),
        "deepseek_v32": (
            "like DeepSeek-V3, but for the indexer that chooses the tokens of the attention (index_topk)"
        ),
        "ernie4_5": "like Llama, but for rotary embeddings of interleaved dimensions",
        "ernie4_5_moe": (
            "like Qwen2-MoE, but for rotary embeddings of interleaved dimensions and a "
            "correction bias of its own"
        ),
        "exaone4": "like Qwen3, but for norms after each block and layers without rotary embeddings",
        "falcon_h1": "a mixture of attention and state-space layers",
        "gemma": "like Llama, but for zero-centred norms and scaled embeddings",
        "gemma2": f"{_GEMMA}, and soft caps on attention and logits",
        "gemma3": f"{_GEMMA} and two rotary bases",
        "gemma3_text": f"{_GEMMA} and two rotary bases",
        "glm": "like Llama, but for a fused gate_up_proj and rotary embeddings of interleaved dimensions",
        "glm4": (
            "like Llama, but for a fused gate_up_proj, norms after each block and rotary "
            "embeddings of interleaved dimensions"
        ),
        "glm_moe_dsa": "like DeepSeek-V3, but for the indexer that chooses the tokens of the attention",
        "granite": "like Llama, but for multipliers of embeddings, attention, residuals and logits",
        "internlm2": "like Llama, but for a fused wqkv and names of its own",
        "kimi_linear": "like DeepSeek-V3, but for linear attention in most layers",
        "llama4": (
            "like Llama, but for experts next to a shared one, chunked attention and layers "
            "without rotary embeddings"
        ),
        "mimo": (
            "like Qwen2, but for prediction layers of its own form (num_nextn_predict_layers, "
            "model.mtp_layers)"
        ),
        "minimax_m2": "like Qwen3-MoE, but for norms over all heads together and a partial rotation",
        "ministral3": "like Mistral, but for a scale of the queries that grows with the position",
        "nemotron": "not gated: squared ReLU and LayerNorm with zero-centred weights",
        "nemotron_h": "a mixture of attention and state-space layers",
        "olmo2": "like Qwen3, but for norms after each block and over all heads together",
        "olmo3": "like Qwen3, but for norms after each block and over all heads together",
        "phi": "not gated: LayerNorm, biases and blocks side by side",
        "phi3": "like Llama, but for fused weights (qkv_proj, gate_up_proj), which have to be split",
        "phimoe": "like Mixtral, but for LayerNorm with biases and a router of its own (sparsemixer)",
        "smollm3": "like Llama, but for layers without rotary embeddings (no_rope_layers)",
        "starcoder2": "not gated: LayerNorm and biases",
    }
)
"""``model_type`` -> description of the differences."""
