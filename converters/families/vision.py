"""Rules of the vision tower of Qwen's models (``converters.model_config.vision``).

A Megatron-Core checkpoint stores the tower's tensors unchanged under ``vision_model.``, so that they are not
lost.
"""

from __future__ import annotations

from collections.abc import Iterator

from converters.mapping.rule import Kind, Rule, module_rules
from converters.model_config.vision import VisionTower

HF_PREFIX, MEGATRON_PREFIX = "model.visual.", "vision_model."


def tower_rules(tower: VisionTower) -> Iterator[Rule]:
    """Yield the rules of all tensors of a tower. All modules except the position embedding have a bias."""
    hidden, ffn, merged = tower.hidden_size, tower.ffn_hidden_size, tower.hidden_size * tower.merged
    yield from _rules("pos_embed", (tower.positions, hidden), bias=False)
    yield from _rules("patch_embed.proj", (hidden, *tower.patch))
    for layer in range(tower.layers):
        block = f"blocks.{layer}"
        yield from _rules(f"{block}.norm1", (hidden,))
        yield from _rules(f"{block}.attn.qkv", (3 * hidden, hidden))
        yield from _rules(f"{block}.attn.proj", (hidden, hidden))
        yield from _rules(f"{block}.norm2", (hidden,))
        yield from _rules(f"{block}.mlp.linear_fc1", (ffn, hidden))
        yield from _rules(f"{block}.mlp.linear_fc2", (hidden, ffn))
    yield from _rules("merger.norm", (hidden,))
    yield from _rules("merger.linear_fc1", (merged, merged))
    yield from _rules("merger.linear_fc2", (tower.output_size, merged))


def _rules(module: str, shape: tuple[int, ...], *, bias: bool = True) -> Iterator[Rule]:
    yield from module_rules(
        f"{MEGATRON_PREFIX}{module}", Kind.REPLICATED, {f"{HF_PREFIX}{module}": shape}, bias=bias
    )
