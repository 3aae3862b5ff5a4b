"""The policy's adapter in vLLM's model: the factors of a refit replace those of the previous refit.

vLLM loads adapters from directories by name, and ignores factors for which it has no layer. Here the factors
arrive by a refit, and vLLM must use every one of them, with the policy's scale; otherwise the refit fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from megarl.errors import RefitError

if TYPE_CHECKING:
    from megarl.models.generation.vllm.options import AdapterScale

ADAPTER = 1
"""vLLM's id of the policy's adapter, the only one of an engine."""


class AdapterBinding:
    """The connection between received factors and the LoRA layers of vLLM's model.

    Args:
        model: the model, whose layers vLLM has wrapped for LoRA.
        scale: rank and scale of the policy's adapter.
    """

    def __init__(self, model: Any, scale: AdapterScale) -> None:
        self._manager, self._scale = model.lora_manager, scale
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._factors: dict[str, torch.Tensor] = {}

    def clear(self) -> None:
        """Discard the factors received so far."""
        self._factors = {}

    def take(self, factors: list[tuple[str, torch.Tensor]]) -> None:
        """Store copies of received factors, by PEFT's names."""
        # Copy the factors, because the next group overwrites the receive buffer.
        self._factors |= {name: tensor.to("cpu", copy=True) for name, tensor in factors}

    def bind(self) -> tuple[int, int]:
        """Load the received factors into vLLM's model.

        Returns:
            The number of vLLM's layers that have an adapter now, and the number of layers that could have
            one.

        Raises:
            RefitError: vLLM did not load the factors of a module, or uses other values than those received.
        """
        manager, scale = self._manager, self._scale
        peft = PEFTHelper(
            r=scale["rank"],
            lora_alpha=scale["alpha"],
            use_rslora=scale["rank_stabilized"],
            target_modules=[],
        )
        dtype, mapper = (
            manager.lora_config.lora_dtype,
            None if self._mapper is None else self._mapper.get_rename_mapper(),
        )
        expected = {
            parse_fine_tuned_lora_name(name, mapper): tensor.to(dtype)
            for name, tensor in self._factors.items()
        }
        # Give vLLM clones: it scales B in place, but the comparison below needs the factors as received.
        copies = {name: tensor.clone() for name, tensor in self._factors.items()}
        self.clear()
        # Remove the old adapter first: vLLM ignores a new adapter whose id it already knows.
        manager.remove_adapter(ADAPTER)
        lora = LoRAModel.from_lora_tensors(
            ADAPTER, copies, peft, device="cpu", dtype=dtype, weights_mapper=mapper
        )
        manager.add_adapter(lora)
        manager.activate_adapter(ADAPTER)
        bound = {name: factors for name, *factors in self._bound(lora)}
        factor, wrong = peft.vllm_lora_scaling_factor, set()
        for (module, is_down), tensor in expected.items():
            if module not in bound or not torch.equal(
                bound[module][not is_down], tensor if is_down else tensor.mul(factor)
            ):
                wrong.add(module)
        if wrong or not bound:
            raise RefitError(
                f"vLLM computes without the adapter of {min(wrong, default='any module')}, or with other "
                f"factors ({len(wrong)} of "
                f"{len({module for module, _ in expected})} modules). Fix: leave out "
                "policy.generation.vllm_cfg.enable_lora, and engines "
                "get merged weights"
            )
        layers = [name for name in manager.modules if manager._get_lora_layer_weights(lora, name) is not None]
        return len(layers), len(manager.modules)

    def _bound(self, lora: LoRAModel) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield module name, A and B of each module that vLLM computes with. A fused layer yields one entry
        per part."""
        for layer in self._manager.modules:
            factors = self._manager._get_lora_layer_weights(lora, layer)
            if factors is None:
                continue
            if not isinstance(factors.lora_a, list):
                yield layer, factors.lora_a, factors.lora_b
                continue
            for name, down, up in zip(
                self._manager.packed_modules[layer], factors.lora_a, factors.lora_b, strict=True
            ):
                if down is not None:
                    yield name, down, up
