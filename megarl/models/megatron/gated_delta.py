"""Gated delta net layers for Megatron's GPT models: Megatron's parallel linear layers around the engine's
functions (``megarl.models.engine.gated_delta``).

Megatron-Core's own gated delta net needs kernels that are not installed here, and supports neither packed
sequences nor context parallelism. Parameter names are the same; rows of the projection and the convolution
are ordered by key head (``converters.families.gated_delta``).

Notation: S positions on this rank, B rows; H key heads and G value heads of this tensor-parallel rank; K and
V their widths; W width of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

from megarl.errors import ModelError
from megarl.models.engine.context import ContextShare
from megarl.models.engine.decoded_rows import DecodedRows
from megarl.models.engine.gated_delta import (
    causal_convolution,
    gated_delta_rule,
    gated_delta_step,
    log_decays,
    unit_norm,
    wide_dtype,
)
from megarl.models.engine.groups import summed_gradients


@dataclass
class GatedDeltaSubmodules:
    """The linear layer classes of a ``GatedDeltaMixer``."""

    in_proj: type = ColumnParallelLinear
    out_proj: type = RowParallelLinear


class GatedNorm(torch.nn.Module):
    """RMS norm of each value head, multiplied by the SiLU of its gate. All heads share one weight, which is
    not stored minus 1."""

    def __init__(self, config: TransformerConfig, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.epsilon, self.group = config.layernorm_epsilon, group
        self.weight = torch.nn.Parameter(
            torch.empty(width, dtype=config.params_dtype, device=torch.cuda.current_device())
        )

    def forward(self, heads: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the gated norm [..., V] of heads [..., V] and gates [..., V]."""
        # Each tensor-parallel rank has different heads, so the weight's gradients must be summed over the
        # ranks.
        weight = summed_gradients(self.weight, self.group)
        wide = wide_dtype(heads)
        # Round to the model's dtype before multiplying by the weight, as transformers does; the gate is
        # applied in float32.
        normed = F.rms_norm(heads.to(wide), (heads.shape[-1],), eps=self.epsilon).to(heads.dtype)
        return (weight * normed * F.silu(gate.to(wide))).to(heads.dtype)


class GatedDeltaMixer(MegatronModule):
    """A gated delta net that takes the place of ``self_attention`` in a layer.

    Attributes:
        context: the context-parallel ranks that split every sequence.
        rows: the rows being decoded, set by ``megarl.models.megatron.cached_attention.decoding``; None in
            training.

    Raises:
        ModelError: the number of key heads is not divisible by the tensor-parallel ranks.
    """

    rows: DecodedRows | None = None

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaSubmodules,
        layer_number: int,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        net, self.layer_number = config.gated_delta, layer_number
        self.net = net
        tensor, context = pg_collection.tp, pg_collection.cp
        ranks = dist.get_world_size(tensor)
        if net.key_heads % ranks:
            raise ModelError(
                f"linear_num_key_heads = {net.key_heads}: gated delta nets cannot be divided over {ranks} "
                "tensor-parallel ranks; choose a "
                "tensor_model_parallel_size that divides the key heads"
            )
        self.key_heads, self.value_heads = net.key_heads // ranks, net.value_heads // ranks
        size = dist.get_world_size(context)
        self.context = ContextShare(dist.get_rank(context), size, context) if size > 1 else ContextShare()
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": tensor}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            net.projected,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        channels = net.convolved // ranks
        options = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.conv1d = torch.nn.Conv1d(
            channels, channels, net.convolution, groups=channels, bias=False, **options
        )
        # Keep float32 in any model dtype: a decay near 1, rounded to 16 bits, changes the result over
        # thousands of tokens.
        options["dtype"] = wide_dtype(self.conv1d.weight)
        self.dt_bias = torch.nn.Parameter(torch.empty(self.value_heads, **options))
        self.A_log = torch.nn.Parameter(torch.empty(self.value_heads, **options))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            # Mark as sharded: otherwise the gradient norm would count only the first rank's shard.
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.out_norm = GatedNorm(config, net.value_width, tensor)
        self.out_proj = build_module(
            submodules.out_proj,
            net.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def forward(
        self, hidden_states: torch.Tensor, *unused: Any, packed_seq_params: Any = None, **ignored: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [S, B, hidden] for hidden states [S, B, hidden]; under sequence parallelism S is
        split over the tensor-parallel ranks. B is 1 for packed sequences.

        No mask is needed: padding is on the right, and no token reads later positions.
        """
        projected, _ = self.in_proj(hidden_states)
        length, rows = projected.shape[:2]
        heads, net = self.key_heads, self.net
        values = net.values // net.key_heads
        # Keep the rows interleaved: a transpose would copy all projected tokens, and their gradients twice.
        tokens = projected.reshape(length * rows, heads, -1)
        gates = net.value_heads // net.key_heads
        mixed, gate, step, decay = tokens.split([2 * net.key_width + values, values, gates, gates], dim=-1)
        mixed, step = mixed.flatten(1), step.flatten(1).to(wide_dtype(step)).sigmoid()
        decay = log_decays(decay.flatten(1), self.A_log, self.dt_bias)
        if self.rows is None:
            starts = None if packed_seq_params is None else packed_seq_params.layout.starts
            if starts is None:
                # Sequence starts refer to the full length over all context-parallel ranks.
                whole = length * self.context.size
                starts = tuple(range(0, whole * rows + 1, whole))
            convolved = causal_convolution(mixed, self.conv1d.weight.squeeze(1), starts, self.context, rows)
            outputs, _ = gated_delta_rule(*self._heads(convolved), decay, step, starts, self.context, rows)
        elif self.rows.is_step:
            outputs = self._step(mixed, decay, step, self.rows)
        else:
            outputs = self._read_prompts(mixed, decay, step, length, self.rows)
        # The recurrence runs in float32, but the output projection takes the model's dtype.
        outputs = outputs.to(projected.dtype)
        normed = self.out_norm(outputs, gate.reshape(outputs.shape))
        return self.out_proj(normed.reshape(length, rows, -1))

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split the convolution's output [t, channels] into unit-length queries and keys [t, H, K] and values
        [t, G, V]."""
        net = self.net
        by_head = F.silu(convolved).unflatten(1, (self.key_heads, -1))
        query, key, value = by_head.split([net.key_width, net.key_width, net.values // net.key_heads], dim=-1)
        return unit_norm(query), unit_norm(key), value.reshape(len(value), self.value_heads, net.value_width)

    def _read_prompts(
        self, mixed: torch.Tensor, decay: torch.Tensor, step: torch.Tensor, length: int, rows: DecodedRows
    ) -> torch.Tensor:
        """Return the outputs [p * length, G, V] for p left-padded prompts, and store each prompt's recurrent
        state."""
        prompts, reach = len(mixed) // length, self.net.convolution - 1
        by_position = mixed.unflatten(0, (length, prompts))
        if rows.row_lengths is not None:
            # Set padding to 0, so that it leaves the initial state unchanged.
            is_padding = torch.arange(length, device=mixed.device)[:, None] < length - rows.row_lengths
            by_position = by_position.masked_fill(is_padding[..., None], 0)
        starts = tuple(range(0, prompts * length + 1, length))
        convolved = causal_convolution(
            by_position.flatten(0, 1), self.conv1d.weight.squeeze(1), starts, rows=prompts
        )
        outputs, states = gated_delta_rule(*self._heads(convolved), decay, step, starts, rows=prompts)
        # Keep the last W - 1 inputs of the convolution, zero-padded for shorter prompts.
        tails = F.pad(by_position.transpose(0, 1), (0, 0, reach, 0))[:, length:]
        rows.store_states(self.layer_number, tails, states)
        return outputs

    def _step(
        self, mixed: torch.Tensor, decay: torch.Tensor, step: torch.Tensor, rows: DecodedRows
    ) -> torch.Tensor:
        """Return the outputs [b, G, V] for one new token per row; update the recurrent states in place."""
        tails, states = rows.states(self.layer_number)
        seen = torch.cat((tails, mixed[:, None]), dim=1)
        convolved = (seen * self.conv1d.weight.squeeze(1).t()).sum(1)
        outputs, after = gated_delta_step(*self._heads(convolved), decay, step, states)
        # Write in place: a recorded CUDA graph uses the same memory in every step.
        tails.copy_(seen[:, 1:])
        states.copy_(after)
        return outputs

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the sharded state dict. Parameters outside Megatron's modules are sharded by rows, except
        the norm's weight."""
        cut = {"dt_bias": self.dt_bias, "A_log": self.A_log, "conv1d.weight": self.conv1d.weight}
        own = {**cut, "out_norm.weight": self.out_norm.weight}
        sharded: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(cut, 0), sharded_offsets
        )
        for name in ("in_proj", "out_proj"):
            sharded |= sharded_state_dict_default(
                getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata
            )
        return sharded


def gated_delta_spec() -> ModuleSpec:
    """Return the layer spec of a gated delta net."""
    return ModuleSpec(module=GatedDeltaMixer, submodules=GatedDeltaSubmodules())
