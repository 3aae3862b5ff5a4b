"""The tiny transformers model of a case: random weights, written once as a Hugging Face directory that workers and reference read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from megarl.models.engine.precision import dtype_of
from megarl.parity.case import SPARSE, Case

transformers_logging.disable_progress_bar()

OUTPUT, INPUT, INNER = 1.5, 4.0, 0.5
_SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    # Megatron-Core knows this kind only with Llama 3's own lengths; the large base gives even narrow heads waves that are as long
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
    """The transformers config of a case's model."""
    from transformers import AutoConfig

    sizes: dict[str, Any] = {
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
        # transformers gives the embedding of a padding token no gradient, also where that token is part of a sequence; Megatron knows none
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_theta": 500.0, **_SCALINGS[case.rope]},
    }
    if case.family == "mixtral":
        sizes |= {"num_local_experts": case.experts, "num_experts_per_tok": case.topk}
    if case.family == "qwen3_moe":
        sizes |= {
            "num_experts": case.experts,
            "num_experts_per_tok": case.topk,
            "moe_intermediate_size": case.expert,
            "norm_topk_prob": True,
        }
    if case.family in ("mistral", "mixtral"):
        sizes["sliding_window"] = case.window or None
    if case.scores:
        sizes["num_labels"] = 1
    return AutoConfig.for_model(case.family, **sizes)


class ModelShelf:
    """The directories of models, made when they are first asked for.

    Args:
        root: an existing directory; the models are left there.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def described(self, case: Case) -> Path:
        """A directory that holds at least the config of the case's model."""
        directory = self._root / _name(case)
        if not (directory / "config.json").exists():
            model_config(case).save_pretrained(directory)
        return directory

    def complete(self, case: Case) -> Path:
        """The directory of the case's model, with weights."""
        directory = self.described(case)
        if not (directory / "model.safetensors").exists():
            _random_model(case).to(dtype_of(case.precision, "case.precision")).save_pretrained(directory)
        return directory


def _name(case: Case) -> str:
    sizes = [
        case.layers,
        case.kv,
        case.group,
        case.head,
        case.width,
        case.ffn,
        case.vocab,
        case.window,
        case.experts,
        case.topk,
        case.expert,
    ]
    words = [case.family, case.rope, "tied" if case.tied else "untied", *map(str, sizes), case.precision, f"seed{case.seed}"]
    return "-".join([*words, *(["scores"] if case.scores else [])])


def _random_model(case: Case) -> Any:
    """Weights without structure, norms and biases among them, so that none can be forgotten and no two be exchanged unseen."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

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
    return model


def _spread(name: str, case: Case) -> float:
    """Times one over the root of the inputs, the size of a matrix's numbers. At every width, activations are of order one, probabilities
    neither flat nor sharp, and the gradient changes slowly enough with the weights for float32 to follow."""
    if "lm_head" in name or "score" in name or ("embed_tokens" in name and case.tied and not case.scores):
        return OUTPUT
    return INPUT if "embed_tokens" in name else INNER
