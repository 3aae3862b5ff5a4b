"""Linear layers of Megatron-Core with adapters beside them, as Megatron-Bridge (0.3.1) builds them of
Megatron-Core's own layers.

Megatron-Bridge itself needs Transformer Engine. What follows says the same of shapes, cuts, names and
arithmetic; experts, sequence parallelism and dropout are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.models.megatron import checkpoint
from megarl.models.megatron.cuda_redirect import cuda_literals
from megarl.models.megatron.sharded_save import save_sharded
from megarl.models.megatron.state_stream import StateStream, StreamedLoad
from tests.dist import jobs

PLACES = {"self_attention": ("linear_qkv", "linear_proj"), "mlp": ("linear_fc1", "linear_fc2")}
"""Linear layers of a block that have adapters."""


class Adapter(torch.nn.Module):
    """``linear_out(linear_in(x)) * alpha / rank`` beside a layer [out, in]."""

    def __init__(self, base: Any, rank: int, alpha: float, gated: bool) -> None:
        super().__init__()
        options = {
            "config": base.config,
            "init_method": lambda weight: weight,
            "bias": False,
            "tp_group": base.tp_group,
        }
        is_row = isinstance(base, RowParallelLinear)
        if is_row:
            self.linear_in = RowParallelLinear(
                base.input_size, rank, input_is_parallel=True, skip_bias_add=True, **options
            )
        else:
            self.linear_in = ColumnParallelLinear(base.input_size, rank, gather_output=True, **options)
        self.linear_out = ColumnParallelLinear(rank, base.output_size, gather_output=is_row, **options)
        self.scale, self.gated = alpha / rank, gated

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_out(self.linear_in(x)[0])[0] * self.scale

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        state = self.linear_in.sharded_state_dict(f"{prefix}linear_in.", sharded_offsets, metadata)
        out = self.linear_out.sharded_state_dict(f"{prefix}linear_out.", sharded_offsets, metadata)
        if self.gated:
            name = f"{prefix}linear_out.weight"
            out[name] = apply_swiglu_sharded_factory(out[name], sharded_offsets)
        return {**state, **out}


class WithAdapter(torch.nn.Module):
    """A linear layer and its adapter; in a state dict the layer keeps its name."""

    def __init__(self, to_wrap: Any, adapter: Adapter) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        output, bias = self.to_wrap(x)
        return output + self.adapter(x), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        own = self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata)
        return {**own, **self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)}


def put_beside(model: torch.nn.Module, rank: int, alpha: float, blocks: Sequence[str]) -> None:
    """Give every linear layer of some blocks of a layer an adapter."""
    for layer in [module for module in model.modules() if isinstance(module, TransformerLayer)]:
        for module, name in [(getattr(layer, block), name) for block in blocks for name in PLACES[block]]:
            if isinstance(module, IdentityOp):
                continue  # of a HybridModel, whose layers have one of the blocks each
            base = getattr(module, name)
            setattr(module, name, WithAdapter(base, Adapter(base, rank, alpha, gated=name == "linear_fc1")))


def wanted(model: Any, apart: bool) -> dict[str, Any]:
    """What Megatron-Bridge saves and loads: of the state dict what belongs to adapters."""
    metadata = {"non_homogeneous_layers": True} if apart else {}
    return {
        name: part
        for name, part in model.sharded_state_dict(metadata=metadata).items()
        if ".adapter." in name
    }


def load_compute_train_and_save(
    config: Mapping[str, Any],
    blocks: Sequence[str],
    source: str,
    batch: Mapping[str, Any],
    said: Mapping[str, Any],
    target: str,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities with the adapters of ``source``, and with others everywhere, also where those had
    zeros, which are saved."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    model = worker.backend.chunks[0].module
    with cuda_literals():
        put_beside(model, said["rank"], said["alpha"], blocks)
        loaded = checkpoint._load(
            wanted(model, said["layers"] == "apart"), Path(source), "adapters", StreamedLoad()
        )
    model.load_state_dict(loaded, strict=False)
    first = jobs.logprobs_of(worker, batch)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    tensors = {name: parameter for name, parameter in model.named_parameters() if ".adapter." in name}
    with torch.no_grad():
        for parameter in tensors.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    second = jobs.logprobs_of(worker, batch)
    if torch.distributed.get_rank() == 0:
        Path(target).mkdir(parents=True)
        peft = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": said["rank"], "alpha": said["alpha"]}
        sizes = {"tensor_model_parallel_size": config["megatron_cfg"]["tensor_model_parallel_size"]}
        (Path(target) / "run_config.yaml").write_text(yaml.safe_dump({"model": sizes, "peft": peft}))
    torch.distributed.barrier()
    with cuda_literals():
        save_sharded(wanted(model, said["layers"] == "apart"), Path(target), StateStream())
    worker.backend.close()
    return first, second
