"""Models of any shape that the rules know, cut in any way, and their tensors in memory."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st
from torch import Tensor

from converters.families.read import read_architecture
from converters.mapping.layouts import padded_vocab_size
from converters.mapping.rules import hf_tensors
from converters.model_config.architecture import Architecture
from tests.unit.converters_tiny import ALONE, tiny_config


class MemorySource:
    """Tensors of distinct values, held in memory."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype = torch.int32) -> None:
        self.tensors: dict[str, Tensor] = {}
        start = 1
        for tensor in hf_tensors(architecture):
            values = torch.arange(start, start + torch.Size(tensor.shape).numel(), dtype=torch.int32)
            self.tensors[tensor.name] = values.reshape(tensor.shape).to(dtype)
            start += values.numel()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        return self.tensors[name].clone() if slices is None else self.tensors[name][slices].clone()


@dataclasses.dataclass(frozen=True)
class DrawnModel:
    """A model, and how it is cut."""

    architecture: Architecture
    tensor_size: int
    padded_vocab: int
    expert_tensor_size: int


@st.composite
def drawn_models(draw: st.DrawFn) -> DrawnModel:
    groups = draw(st.integers(1, 4))
    heads = groups * draw(st.integers(1, 4))
    tensor_size = draw(st.sampled_from([size for size in range(1, 9) if heads % size == 0]))
    base = read_architecture(tiny_config(draw(st.sampled_from(sorted(ALONE)))))
    architecture = dataclasses.replace(
        base,
        num_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        hidden_size=7,
        ffn_hidden_size=3 * tensor_size,
        vocab_size=draw(st.integers(1, 13)),
    )
    expert_tensor_size = draw(st.integers(1, 4))
    if architecture.mixture is not None:
        mixture = dataclasses.replace(
            architecture.mixture,
            num_experts=draw(st.integers(1, 4)),
            ffn_hidden_size=5 * expert_tensor_size,
            shared_ffn_hidden_size=4 * tensor_size if architecture.mixture.shared_ffn_hidden_size else 0,
            sparse_layers=(draw(st.booleans()), True),
        )
        architecture = dataclasses.replace(architecture, mixture=mixture)
    if architecture.latent_attention is not None:
        ranks = {
            "q_lora_rank": architecture.latent_attention.q_lora_rank and 3 * tensor_size,
            "kv_lora_rank": 4 * tensor_size,
        }
        latent = dataclasses.replace(architecture.latent_attention, **ranks, qk_rope_head_dim=2 * tensor_size)
        architecture = dataclasses.replace(architecture, latent_attention=latent)
    if architecture.gated_delta is not None:
        key_heads = tensor_size * draw(st.integers(1, 2))
        net = dataclasses.replace(
            architecture.gated_delta,
            key_heads=key_heads,
            value_heads=key_heads * draw(st.integers(1, 3)),
            layers=(draw(st.booleans()), True),
        )
        architecture = dataclasses.replace(architecture, gated_delta=net)
    if (heads + 2 * groups) * architecture.head_dim % tensor_size:
        architecture = dataclasses.replace(architecture, head_dim=2 * tensor_size)
    padded = padded_vocab_size(architecture.vocab_size, tensor_size, draw(st.integers(1, 5)))
    return DrawnModel(architecture, tensor_size, padded, expert_tensor_size)
