"""Keys of NeMo-RL's configurations (0.3 and after) that megarl does not have, with what to write instead."""

from __future__ import annotations

from collections.abc import Mapping

_VLLM, _MEGATRON = "policy.generation.vllm_cfg", "policy.megatron_cfg"
_LATER = "not in this version: remove it"

INSTEAD: Mapping[str, str] = {
    "grpo.seed": "write seed at the top level",
    "grpo.async_grpo": f"asynchronous training is {_LATER}",
    "grpo.overlong_filtering": f"masking answers that were cut off is {_LATER}",
    "loss_fn.sequence_level_importance_ratios": f"ratios of whole sequences (GSPO) are {_LATER}",
    "checkpointing.checkpoint_must_save_by": "remove it: a job that nears its time limit saves by itself (launch/README.md)",
    "checkpointing.model_save_format": "remove it: export_hf writes safetensors when a run ends",
    "checkpointing.save_consolidated": "remove it: export_hf writes the whole model when a run ends",
    "policy.logprob_chunk_size": "remove it: logprob_batch_size, or logprob_mb_tokens, bounds the log-probability pass",
    "policy.dtensor_cfg._v2": "remove it: there is one DTensor worker",
    f"{_MEGATRON}.defer_fp32_logits": "remove it: logits stay in the model's type until they are scored",
    f"{_MEGATRON}.fp8_cfg": f"training in FP8 is {_LATER}",
    f"{_MEGATRON}.moe_permute_fusion": f"the fused permutation of tokens is {_LATER}",
    "policy.sequence_packing.sequence_length_round": "remove it: packed rows are as long as what is in them",
    f"{_VLLM}.use_deep_gemm": f"engines in FP8 are {_LATER}",
    f"{_VLLM}.num_first_layers_in_bf16": f"engines in FP8 are {_LATER}",
    f"{_VLLM}.num_last_layers_in_bf16": f"engines in FP8 are {_LATER}",
    "data.dataset_name": "write data.train: {name, split, prompt_key, answer_key}, or {path, prompt_key, answer_key}",
    "data.prompt_file": "write the text itself in data.prompt_template, with {prompt} where the problem goes",
    "data.system_prompt_file": "write the text itself in data.system_prompt",
    "env.math": "write env.reward: math_verify; the driver computes rewards",
    "logger.num_val_samples_to_print": "remove it",
    "logger.mlflow_enabled": "remove it: there are metrics.jsonl, TensorBoard and Weights & Biases",
    "logger.mlflow": "remove it: there are metrics.jsonl, TensorBoard and Weights & Biases",
    "logger.swanlab_enabled": "remove it: there are metrics.jsonl, TensorBoard and Weights & Biases",
    "logger.swanlab": "remove it: there are metrics.jsonl, TensorBoard and Weights & Biases",
    "logger.monitor_gpus": "remove it: memory is in every row of metrics.jsonl",
    "logger.gpu_monitoring": "remove it: memory is in every row of metrics.jsonl",
}
"""By dotted key."""
