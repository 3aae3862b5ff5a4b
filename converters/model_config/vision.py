"""Vision tower of a vision-language model: its dimensions, and the image tokens of the text.

The tower is converted and exported, but never computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from converters.model_config.sizes import Config, read_size

TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
CONFIG_KEYS = frozenset({"vision_config", *TOKENS})
"""Config keys that ``read_vision`` reads."""
_SIZES = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "in_channels",
    "temporal_patch_size",
    "patch_size",
    "num_position_embeddings",
    "spatial_merge_size",
    "out_hidden_size",
)


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Dimensions of the vision tower of Qwen's models.

    Attributes:
        layers: number of blocks.
        hidden_size: width of a patch's embedding.
        ffn_hidden_size: width of a block's MLP.
        patch: channels, frames, rows and columns of a patch.
        positions: rows of the position embedding.
        merged: number of patches that are merged to one text token.
        output_size: width of a merged token.
        tokens: ids of image and video tokens, and of the tokens that begin and end them.
    """

    layers: int
    hidden_size: int
    ffn_hidden_size: int
    patch: tuple[int, int, int, int]
    positions: int
    merged: int
    output_size: int
    tokens: tuple[int, ...]


def read_vision(config: Config, problems: list[str]) -> VisionTower | None:
    """Read the vision tower of a config. Problems are appended to ``problems``.

    Args:
        config: config whose ``vision_config`` has the defaults of its class.
        problems: list of problems.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        problems.append(f"vision_config = {vision!r}: an object is needed")
        return None
    # A separate list, because these messages get the name of the section in front.
    of_vision: list[str] = []
    read = {key: read_size(vision, key, of_vision) for key in _SIZES}
    problems += [f"vision_config.{problem}" for problem in of_vision]
    if read["out_hidden_size"] != config.get("hidden_size"):
        width = config.get("hidden_size")
        problems.append(
            f"vision_config.out_hidden_size = {read['out_hidden_size']}: the text needs its hidden_size = "
            f"{width!r}"
        )
    tokens = list(map(config.get, TOKENS))
    return VisionTower(
        layers=read["depth"],
        hidden_size=read["hidden_size"],
        ffn_hidden_size=read["intermediate_size"],
        patch=(read["in_channels"], read["temporal_patch_size"], read["patch_size"], read["patch_size"]),
        positions=read["num_position_embeddings"],
        merged=read["spatial_merge_size"] ** 2,
        output_size=read["out_hidden_size"],
        tokens=tuple(token for token in tokens if isinstance(token, int)),
    )
