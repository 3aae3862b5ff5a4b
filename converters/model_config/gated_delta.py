"""Gated delta nets (Yang et al. 2024, arXiv:2412.06464): dimensions, and the layers that have them instead of
attention."""

from __future__ import annotations

from dataclasses import dataclass

from converters.model_config.sizes import Config, read_size

LINEAR = "linear_attention"
FULL = "full_attention"
CONFIG_KEYS = frozenset(
    {
        "full_attention_interval",
        "layer_types",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
    }
)
"""Config keys that ``read_gated_delta`` reads."""
# transformers' default of full_attention_interval.
_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Dimensions of gated delta nets, and the layers that have them.

    Attributes:
        key_heads: number of query and key heads.
        value_heads: number of value heads, a multiple of ``key_heads``; those of a key head are adjacent.
        key_width: width of a head's query and key.
        value_width: width of a head's value.
        convolution: kernel size in tokens of the causal convolution over queries, keys and values.
        layers: for each layer, whether it has a gated delta net; the others have attention.
        stored_by_head: Hugging Face checkpoints store the projections by key head (Qwen3-Next) instead of as
            separate tensors.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    convolution: int
    layers: tuple[bool, ...]
    stored_by_head: bool = False

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.values

    @property
    def values(self) -> int:
        """Width of the values of all heads."""
        return self.value_heads * self.value_width

    @property
    def projected(self) -> int:
        """Rows of the input projection: queries, keys, values, the output's gate, and two gates per value
        head."""
        return self.convolved + self.values + 2 * self.value_heads

    def state_bytes(self, element: int) -> int:
        """Return the bytes of a sequence's state in one layer during generation: the float32 state of all
        heads, and the past inputs of the convolution with ``element`` bytes per number."""
        return 4 * self.values * self.key_width + (self.convolution - 1) * self.convolved * element


def read_gated_delta(
    config: Config, num_layers: int, problems: list[str], *, stored_by_head: bool = False
) -> GatedDeltaNet | None:
    """Read the gated delta nets of a model.

    Args:
        config: flat config. Without ``layer_types``, every ``full_attention_interval``-th layer has
            attention.
        num_layers: number of layers.
        problems: list to which problems are appended.
        stored_by_head: see ``GatedDeltaNet``.

    Returns:
        The gated delta nets; None if all layers have attention.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        interval = (
            _INTERVAL
            if config.get("full_attention_interval") is None
            else read_size(config, "full_attention_interval", problems)
        )
        # Every interval-th layer, counted from 1, has full attention.
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    listed = list(kinds) if isinstance(kinds, list | tuple) else []
    unknown = [layer for layer, kind in enumerate(listed) if kind not in (LINEAR, FULL)]
    if unknown or len(listed) != num_layers:
        found = f"[{unknown[0]}] = {listed[unknown[0]]!r}" if unknown else f" has {len(listed)} entries"
        problems.append(
            f"layer_types{found}: {LINEAR} or {FULL} is needed for each of the {num_layers} layers"
        )
        return None
    layers = tuple(kind == LINEAR for kind in listed)
    if not any(layers):
        return None
    net = GatedDeltaNet(
        key_heads=read_size(config, "linear_num_key_heads", problems),
        value_heads=read_size(config, "linear_num_value_heads", problems),
        key_width=read_size(config, "linear_key_head_dim", problems),
        value_width=read_size(config, "linear_value_head_dim", problems),
        convolution=read_size(config, "linear_conv_kernel_dim", problems),
        layers=layers,
        stored_by_head=stored_by_head,
    )
    # No division by 0: ``read_size`` returns 1 for an invalid size.
    if net.value_heads % net.key_heads:
        problems.append(
            f"linear_num_value_heads = {net.value_heads}: no multiple of linear_num_key_heads = "
            f"{net.key_heads}"
        )
    return net
