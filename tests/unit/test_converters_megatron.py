"""A real Megatron-Core model, filled by the rules, computes the logits that transformers computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from converters.checkpoint.source import open_source
from converters.families.read import read_architecture
from converters.mapping.rules import all_rules, rule_for
from converters.mapping.shards import load_shard, to_hf
from converters.model_config.megatron_settings import megatron_settings
from megarl.models.megatron.build import scale_rotary_like_llama3
from megarl.models.megatron.cuda_redirect import CudaLiterals
from megarl.models.megatron.latent_attention import LatentSelfAttention, set_latent_norm_epsilon
from megarl.models.megatron.moe_router import teach_routing
from megarl.models.megatron.specs import PortableAttention, with_our_router
from tests.tiers import newest_megatron, sampled
from tests.unit.converters_tiny import CONFIGS, DEEPSEEK_YARN, save_tiny, stored_tensors

pytestmark = newest_megatron

# Megatron-Core's own specs have no gated delta net without kernels: hybrids are compared in
# tests/dist/test_training.py
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name in CONFIGS if not name.startswith(("qwen3_next", "qwen3_5"))
} | {
    "llama3_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    **{
        f"llama3_rope_{name}": (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
            },
        )
        # so short that some frequencies are left alone, some divided and some in between
        for name, low, high, original in (("short", 1.0, 4.0, 16), ("of_other_bounds", 0.5, 7.0, 40))
    },
    "linear_rope": (
        "qwen2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
    ),
    "yarn_rope": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "window_of_one": ("mistral", {"sliding_window": 1}),
    "window_of_almost_all": ("mistral", {"sliding_window": 36}),
    "qwen3_moe_window": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3_moe_every_second": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "norm_topk_prob": False, "num_experts_per_tok": 1},
    ),
    "qwen3_moe_all_dense": ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
    "qwen3_moe_all_experts": ("qwen3_moe", {"num_experts_per_tok": 7}),
    "qwen2_moe_without_biases": ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True}),
    "qwen2_moe_every_second": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen2_moe_all_dense": ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}),
    "qwen2_moe_top_1": ("qwen2_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    "mixtral_one_expert_of_two": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "mixtral_top_1": ("mixtral", {"num_experts_per_tok": 1}),
    **{
        f"glm4_moe_{name}": ("glm4_moe", changes)
        for name, changes in {
            "without_groups": {"n_group": 1, "topk_group": 1},
            "all_groups": {"n_group": 3, "topk_group": 3, "num_experts_per_tok": 5},
            "groups_of_two": {"n_group": 6, "topk_group": 3, "num_experts_per_tok": 6},
            "not_normalized": {"norm_topk_prob": False},
            "top_1": {"num_experts_per_tok": 1},
            "top_1_not_normalized": {
                "num_experts_per_tok": 1,
                "norm_topk_prob": False,
                "n_group": 1,
                "topk_group": 1,
            },
            "three_of_two_groups": {"num_experts_per_tok": 3},
            "all_dense": {"first_k_dense_replace": 3},
            "whole_rotation": {"partial_rotary_factor": 1.0, "use_qk_norm": True},
            "linear_rope": {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 10000.0,
                    "factor": 2.5,
                    "partial_rotary_factor": 0.4,
                }
            },
        }.items()
    },
    **{
        f"deepseek_{name}": (f"deepseek_{name[:2]}", changes)
        for name, changes in {
            "v2_yarn": {"rope_parameters": DEEPSEEK_YARN},
            "v2_groups_of_six": {
                "topk_method": "group_limited_greedy",
                "n_group": 2,
                "topk_group": 1,
                "q_lora_rank": 16,
            },
            "v3_yarn": {"rope_parameters": DEEPSEEK_YARN, "rms_norm_eps": 1e-2},
            "v3_yarn_one_scale": {"rope_parameters": {**DEEPSEEK_YARN, "mscale": None}},
            "v3_yarn_other_scale": {"rope_parameters": {**DEEPSEEK_YARN, "mscale_all_dim": None}},
            "v3_yarn_attention_factor": {"rope_parameters": {**DEEPSEEK_YARN, "attention_factor": 1.3}},
            "v3_without_query_rank": {"q_lora_rank": None, "v_head_dim": 16, "norm_topk_prob": False},
        }.items()
    },
    "qwen3_moe_top_1": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
}


@pytest.fixture(scope="module")
def one_process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron's groups in a world of one process."""
    if torch.distributed.is_initialized():
        pytest.skip("this process already belongs to a process group")
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def cpu_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core builds constants on the current CUDA device and switches CUDA generators around dropout;
    here both are the CPU's."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(get_cuda_rng_tracker(), "fork", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)


@sampled(6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("one_process_group", "cpu_device")
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    model = save_tiny(tmp_path, name, **changes)
    architecture, source = read_architecture(model.config), open_source(tmp_path)
    settings = megatron_settings(architecture)
    config = (TransformerConfig if architecture.latent_attention is None else MLATransformerConfig)(
        **settings.transformer,
        activation_func=torch.nn.functional.silu if architecture.gate_limit is None else quick_gelu,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    for key, value in settings.attributes.items():
        setattr(config, key, value)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer, layer_spec in enumerate(spec.layer_specs):
        if (
            architecture.latent_attention is not None
        ):  # what Megatron-Core has for it wants keys and values of one width
            layer_spec.submodules.self_attention.submodules.core_attention = PortableAttention
            # from 0.19 on it wants no norm of latents without Transformer Engine, unless queries come from
            # one too
            layer_spec.submodules.self_attention.module = LatentSelfAttention
        if settings.routing is not None and architecture.is_sparse(layer):
            with_our_router(layer_spec.submodules.mlp)
    megatron = GPTModel(config, spec, **{**settings.model, "vocab_size": 104}).eval()
    scale_rotary_like_llama3(megatron, settings.llama3)
    set_latent_norm_epsilon(megatron, settings.latent_norm_epsilon)
    experts = [
        layer.layer_number - 1
        for layer in megatron.decoder.layers
        if isinstance(getattr(layer.mlp, "experts", None), SequentialMLP)
    ]
    assert experts == [layer for layer in range(3) if architecture.is_sparse(layer)]
    teach_routing([megatron], architecture)
    parameters = dict(megatron.named_parameters())
    parameters |= {
        name: buffer for name, buffer in megatron.named_buffers() if name.endswith("router.expert_bias")
    }
    assert sorted(parameters) == sorted(rule.megatron_name for rule in all_rules(architecture))
    with torch.no_grad():
        for parameter_name, parameter in parameters.items():
            parameter.copy_(
                load_shard(rule_for(parameter_name, architecture), source, architecture, padded_vocab=104)
            )
        ids = torch.randint(0, 101, (2, 37), generator=torch.Generator().manual_seed(11))
        positions = torch.arange(37)[None].expand(2, -1)
        mask = torch.ones(37, 37, dtype=torch.bool).triu(1)[None, None]
        with CudaLiterals():  # the mask of a sliding window
            logits = megatron(ids, positions, mask)
        expected = model(ids).logits
    torch.testing.assert_close(logits[..., :101], expected, rtol=0, atol=2e-5)
    assert expected.std() > 0.1
    assert torch.count_nonzero(logits[..., 101:]) == 0
    state = stored_tensors(tmp_path)
    for parameter_name, parameter in parameters.items():
        rule = rule_for(parameter_name, architecture)
        alone = {part.name: part for part in rule.parts if part.alone}
        for hf_name, tensor in to_hf(rule, [parameter], architecture):
            if hf_name in alone:  # others are compared where they are stored, in test_conversion
                assert torch.equal(tensor, state[hf_name])
